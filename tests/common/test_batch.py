"""common/core/batch.py: batches that are made, cut and joined; and rollouts without a row."""

import copy
import dataclasses

from common.core.batch import Batch, padded
from common.core.errors import ScriptError

import pytest
import torch
from trainers import four_players


def made(player: str, lengths: list[int], prompts: list[int], first: int = 0) -> Batch:
    """Prompt i has tokens i, its completion 10 * i, i counted from `first`; wider than needed."""
    ids = [*range(first, first + len(lengths))]
    rows = [[i] * n for i, n in zip(ids, prompts)], [[10 * i] * n for i, n in zip(ids, lengths)]
    return Batch.of(player, *rows, 99, "cpu")


# ------------------------------------------------------------------ fields
def test_a_misspelt_field_raises():
    batch = made("a", [1], [1])
    for name in ("advantage", "num_items_in_batch", "weights"):
        with pytest.raises(AttributeError):
            getattr(batch, name)
        with pytest.raises(AttributeError):
            setattr(batch, name, 1.0)
    with pytest.raises(TypeError):
        dataclasses.replace(batch, advantage=1.0)
    with pytest.raises(KeyError):
        batch.extras["weigth"]


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    batch = made("a", [2, 3], [1, 2], first=5)
    assert batch.prompt_ids.tolist() == [[99, 5], [6, 6]]
    assert batch.prompt_mask.tolist() == [[0, 1], [1, 1]]
    assert batch.completion_ids.tolist() == [[50, 50, 99], [60, 60, 60]]
    assert batch.completion_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.row.tolist() == [0, 1] and len(batch) == 2 and batch.lengths().tolist() == [2, 3]
    ids, seen, places = batch.joined()
    assert ids[0].tolist() == [99, 5, 50, 50, 99] and seen[0].tolist() == [0, 1, 1, 1, 0]
    assert places.tolist() == [[0, 0, 1, 2, 2], [0, 1, 2, 3, 4]]  # padding takes no place
    parts = [torch.tensor(rows) for rows in ([[1, 2]], [[3, 4, 5]], [6, 7])]
    for left, short in ((True, [9, 1, 2]), (False, [1, 2, 9])):
        assert [part.tolist() for part in padded(parts, left, 9)] == [[short], [[3, 4, 5]], [6, 7]]


# ------------------------------------------------------------------ take
def test_take_trims_to_the_longest_of_its_rows():
    batch = made("a", [5, 2, 3, 4], [4, 1, 2, 3])
    grid = torch.arange(20.0).reshape(4, 5)  # (B, T)
    batch.advantages, batch.base_logps, batch.rewards = grid, -grid, grid[:, 0]
    batch.components = {"a": grid, "b": grid[:, 1]}
    batch.extras = {"y": [*"abcd"], "n": 4, "z": torch.tensor(3), "w": torch.ones(4)}
    batch.extras["k"] = grid  # not of tokens, although it is as wide
    batch.token_extras = {"x": grid, "pairs": torch.stack([grid, grid], 1)}
    batch.texts, batch.notes, batch.total_tokens = [*"ABCD"], [{"i": i} for i in range(4)], 14
    part = batch.take(torch.tensor([2, 1]))
    assert part.prompt_ids.tolist() == [[2, 2], [99, 1]] and part.prompt_mask.sum() == 3
    assert part.completion_ids.tolist() == [[20, 20, 20], [10, 10, 99]]
    assert part.completion_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    wanted = [[10, 11, 12], [5, 6, 7]]
    for value in (part.advantages, -part.base_logps, part.components["a"], part.token_extras["x"]):
        assert value.tolist() == wanted
    assert part.rewards.tolist() == [10, 5] and part.components["b"].tolist() == [11, 6]
    assert part.row.tolist() == [2, 1] and part.take(torch.tensor([1])).row.tolist() == [1]
    assert part.texts == ["C", "B"] and part.notes == [{"i": 2}, {"i": 1}]
    assert part.extras["y"] == ["c", "b"] and len(part.extras["w"]) == 2
    assert part.extras["k"].tolist() == [[10, 11, 12, 13, 14], [5, 6, 7, 8, 9]]
    assert part.token_extras["pairs"].tolist() == [[wanted[0]] * 2, [wanted[1]] * 2]
    assert (part.extras["n"], int(part.extras["z"]), part.total_tokens) == (4, 3, 14)
    assert (part.player, part.source) == ("a", None) and batch.completion_ids.shape == (4, 5)


def test_take_trims_pairs_to_the_longest_of_both():
    batch = made("a", [5, 2, 1, 3], [2, 2])
    whole = batch.completion_ids.reshape(2, 2, 5), batch.completion_mask.reshape(2, 2, 5)
    batch.completion_ids, batch.completion_mask = whole
    assert batch.lengths().tolist() == [5, 3]
    part = batch.take(torch.tensor([1]))
    assert part.completion_ids.tolist() == [[[20, 99, 99], [30, 30, 30]]] and len(part) == 1


# ------------------------------------------------------------------ join
def test_join_pads_and_spreads_advantages_over_the_tokens():
    one, two = made("a", [1, 2], [1, 1]), made("b", [3], [2], first=2)
    one.advantages, two.advantages = torch.tensor([1.0, -2.0]), torch.tensor([[3.0, 4.0, 5.0]])
    for batch, rewards in ((one, [1.0, 2.0]), (two, [3.0])):
        batch.rewards = torch.tensor(rewards)
        batch.base_logps = -batch.completion_mask.float()
        batch.texts, batch.notes = [batch.player] * len(batch), [{"of": batch.player}] * len(batch)
        batch.extras = {"x": [0] * len(batch), "y": batch.rewards}
        batch.token_extras = {"k": batch.base_logps}
        batch.total_tokens, batch.rollouts = int(batch.completion_mask.sum()), [batch.player]
        batch.components = {"z": batch.rewards}
    whole = Batch.join("c", [one, two], 99)
    assert whole.player == "c" and whole.components == {}
    assert whole.prompt_ids.tolist() == [[99, 0], [99, 1], [2, 2]]
    assert whole.prompt_mask.tolist() == [[0, 1], [0, 1], [1, 1]]
    assert whole.completion_ids.tolist() == [[0, 99, 99], [10, 10, 99], [20, 20, 20]]
    assert whole.completion_mask.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert whole.advantages.tolist() == [[1, 0, 0], [-2, -2, 0], [3, 4, 5]]
    assert torch.equal(whole.base_logps, -whole.completion_mask.float())
    assert whole.rewards.tolist() == whole.extras["y"].tolist() == [1, 2, 3]
    assert torch.equal(whole.token_extras["k"], whole.base_logps)
    assert whole.texts == [*"aab"] and [note["of"] for note in whole.notes] == [*"aab"]
    assert whole.extras["x"] == [0, 0, 0] and whole.total_tokens == 6
    assert (whole.row.tolist(), whole.source.tolist()) == ([0, 1, 2], [0, 0, 1])
    assert whole.rollouts == [*"ab"]
    two.base_logps = None
    assert Batch.join("c", [one, two], 99).base_logps is None


def test_join_keeps_extras_of_every_kind():
    one, two = made("a", [1, 2], [1, 1]), made("b", [3], [2], first=2)
    for batch, first in ((one, 0.0), (two, 2.0)):
        B, T = batch.completion_mask.shape
        batch.extras = {"n": 3, "x": 0.5, "z": torch.tensor(7), "y": [first] * B}
        batch.extras |= {"w": first + torch.arange(B), "k": torch.ones(B, 2, 3)}
        batch.token_extras = {"t": batch.completion_mask * (first + 1)}
        batch.token_extras["p"] = (first + 1) * torch.ones(B, 2, T)
    two.extras = dict(reversed(two.extras.items()))
    whole = Batch.join("c", [one, two], 99)
    assert list(whole.extras) == ["n", "x", "z", "y", "w", "k"]
    assert (whole.extras["n"], whole.extras["x"], int(whole.extras["z"])) == (3, 0.5, 7)
    assert whole.extras["y"] == whole.extras["w"].tolist()[:1] * 2 + [2.0]
    assert whole.extras["w"].tolist() == [0, 1, 2] and whole.extras["k"].shape == (3, 2, 3)
    assert whole.token_extras["t"].tolist() == [[1, 0, 0], [1, 1, 0], [3, 3, 3]]
    assert whole.token_extras["p"].tolist() == [[[1, 1, 0]] * 2] * 2 + [[[3, 3, 3]] * 2]
    part = whole.take(torch.tensor([1]))
    assert part.extras["n"] == 3 and part.token_extras["p"].shape == (1, 2, 2)


@pytest.mark.parametrize("name", ["extras", "token_extras"])
@pytest.mark.parametrize("lacking", [0, 1])
def test_join_refuses_a_key_that_only_some_batches_have(name, lacking):
    both = made("a", [1], [1]), made("b", [1], [1])
    getattr(both[1 - lacking], name)["marks"] = torch.ones(1, 1)
    with pytest.raises(ScriptError, match=rf"the {'ab'[lacking]}'s batch has no {name}\['marks'\]"):
        Batch.join("c", both, 99)


def test_join_refuses_numbers_that_differ():
    """Nobody knows which is the joined batch's, or whether it is their sum."""
    both = made("a", [1], [1]), made("b", [1], [1])
    for batch, number in zip(both, (3, torch.tensor(4))):
        batch.extras["pairs"] = number
    with pytest.raises(ScriptError, match=r"extras\['pairs'\] is a number of a whole batch"):
        Batch.join("c", both, 99)


def test_no_row_at_all():
    """Of a process that has nothing to judge: it takes part with none."""
    some, none = made("a", [1, 2], [1, 1]), made("a", [], [])
    for batch in (some, none):
        batch.advantages = batch.rewards = torch.arange(len(batch)).float()
        batch.total_tokens, batch.texts = 3, ["x"] * len(batch)
    assert (len(none), none.lengths().tolist(), len(none.take(torch.tensor([]).long()))) == (
        0,
        [],
        0,
    )
    assert some.take(torch.tensor([]).long()).completion_ids.shape == (0, 0)
    for batches, source in (([some, none], [0, 0]), ([none, some], [1, 1])):
        whole = Batch.join("a", batches, 99)
        assert whole.advantages.tolist() == [[0, 0], [1, 1]] and whole.texts == ["x", "x"]
        assert whole.source.tolist() == source and whole.total_tokens == 6
        assert torch.equal(whole.completion_ids, some.completion_ids)
    assert len(Batch.join("a", [none, none], 99)) == 0


# ------------------------------------------------------------------ what checks remember
def test_all_copies_of_a_batch_know_their_rollout():
    batch = made("a", [1, 1], [1, 1])
    batch.rollouts = [7]
    copies = [copy.copy(batch), copy.deepcopy(batch), dataclasses.replace(batch, player="b")]
    copies += [batch.take(torch.tensor([0])), copy.deepcopy([batch])[0]]
    batch.total_tokens = 2
    copies.append(Batch.join("a", [batch], 99))
    assert all(each.rollouts == [7] for each in copies)
    assert copies[1].completion_ids is not batch.completion_ids  # what else it holds is copied


# ------------------------------------------------------------------ rollouts without a row
@pytest.mark.parametrize("name", ["ann", "cat"])
def test_a_rollout_and_an_update_of_no_row(tmp_path, name):
    """With reward functions and without, and with log-probs under the base."""
    trainer = four_players(tmp_path, kl=0.1)
    trainer.create_optimizer()
    batch = trainer.rollout(name, [])
    assert len(batch) == 0 and batch.texts == batch.notes == [] and batch.total_tokens == 0
    assert batch.completion_ids.shape == batch.base_logps.shape == (0, 0)
    assert trainer.generate(name, []) == trainer.generate_ids(name, []) == []
    assert trainer.log_probs("bob", batch).shape == (0, 0)
    trainer.set_rewards(batch, [], [] if name == "ann" else None)
    assert batch.advantages.shape == (0,)
    trainer.update(batch)
    with_rows = trainer.rollout(name, [trainer.train_dataset[0]] * 4)
    with_rows.advantages = torch.ones(4)
    whole = trainer.concat([with_rows, trainer.rollout("ann", [])]) if name == "ann" else with_rows
    assert len(whole.sampled_logps) == 4  # None, and the loss would forget who has sampled
    trainer.update(whole)
