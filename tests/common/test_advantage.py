"""Advantage estimators against loops written from their definitions, in float64."""

import math

from common.core.advantage import group_advantage, named_group_advantage, return_to_go, whiten

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainers import whitened

one_reward = st.floats(-3, 3) | st.just(float("nan")) | st.sampled_from([0.0, 1.0])
rewards = st.lists(one_reward, min_size=12, max_size=12)


@given(rewards, st.sampled_from([2, 3, 4, 6, 12]), st.booleans())
@settings(max_examples=200)
def test_groups_equal_the_loop(values, group_size, scale):
    tensor = torch.tensor(values, dtype=torch.float64)
    rows = [(value, i // group_size) for i, value in enumerate(values)]
    expected = torch.tensor(whitened(rows, added=1e-6, scale=scale), dtype=torch.float64)
    got = group_advantage(tensor, group_size, scale)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    if group_size % 2 == 0:  # (B, 2), rewards of steps: a group normalises all its values together
        pooled = group_advantage(tensor.reshape(6, 2), group_size // 2, scale)
        assert torch.equal(pooled.flatten(), got)


@pytest.mark.parametrize("group_size", [3, 4, 6, 7, 8, 12, 16])
def test_constant_groups_are_exactly_zero(group_size):
    """The float mean of equal numbers need not equal them: at 0.1 * n, groups of 6 or 12 leave a
    remainder."""
    for level in range(200):
        tensor = torch.full((2 * group_size,), level / 199 * 1.7, dtype=torch.float32)
        tensor[1] = torch.nan
        assert (group_advantage(tensor, group_size) == 0).all()
    tensor = torch.tensor([0.5, 0.5, 0.5, 0.5 + 1e-3])
    assert (group_advantage(tensor, 4) != 0).all()  # nearly constant is not constant


@given(st.lists(st.tuples(one_reward, st.sampled_from("abc")), min_size=1, max_size=12))
@settings(max_examples=100)
def test_named_groups_of_any_size_and_order_equal_the_loop(rows):
    values, keys = map(list, zip(*rows))
    found = named_group_advantage(torch.tensor(values, dtype=torch.float64), keys)
    assert found.tolist() == pytest.approx(whitened(rows, added=1e-6), abs=1e-6)


def test_rows_that_do_not_fill_groups_are_refused():
    with pytest.raises(ValueError, match="10 rows are not a multiple of the group size 4"):
        group_advantage(torch.zeros(10), 4)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 33])
def test_return_to_go_equals_the_loop(length):
    generator = torch.Generator().manual_seed(length)
    values = torch.randn(5, length, generator=generator, dtype=torch.float64)
    mask = (torch.arange(length) < torch.randint(1, length + 1, (5, 1), generator=generator)).long()
    expected = torch.zeros_like(values)
    for b in range(5):
        future = 0.0
        for t in reversed(range(length)):
            if mask[b, t]:
                future += values[b, t].item()
                expected[b, t] = future
    torch.testing.assert_close(return_to_go(values, mask), expected, rtol=1e-12, atol=1e-12)


def test_whiten_equals_the_loop_and_is_exact_when_flat():
    values = [[1.0, 2.0, 99.0], [4.0, float("nan"), float("nan")]]
    values = torch.tensor(values, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    valid = [1.0, 2.0, 4.0]
    mean = sum(valid) / 3
    std = math.sqrt(sum((v - mean) ** 2 for v in valid) / 2 + 1e-8)
    expected = [[(1 - mean) / std, (2 - mean) / std, 0.0], [(4 - mean) / std, 0.0, 0.0]]
    torch.testing.assert_close(whiten(values, mask), torch.tensor(expected, dtype=torch.float64))
    assert (whiten(torch.full((3, 7), 0.1), torch.ones(3, 7)) == 0).all()
