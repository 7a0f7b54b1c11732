"""score.py: the shaped reward, the groups of each turn and the KL weight of each row against loops
and numbers worked by hand; both stages step by step."""

import math
import random
from types import SimpleNamespace

import score
from common.core.batch import Batch
from common.core.lists import mean
from lab.make.demonstrations import try_again
from score import Score, again_prompt, content, shaped

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainers import answering, solution, twice, without_model


# ------------------------------------------------------------------ prompts and parsing
def test_the_second_turn_asks_as_the_demonstrator_does():
    for seed in range(20):
        user, _ = try_again(random.Random(seed), noise=1)
        question, first = user.removeprefix("Problem: ").split("\nSolution:\n")
        assert again_prompt(question, first.removesuffix("\nTry again."))[-1]["content"] == user


@given(st.text(alphabet="<>/stephinkbox\\{}7! \n", max_size=200))
def test_no_text_breaks_the_parser_and_thoughts_do_not_count(text):
    assert content("<think>1+1=2:2-1=1\n</think>" + text) == content(text)


# ------------------------------------------------------------------ the paper's mathematics
@given(st.integers(0, 2**31), st.sampled_from([0.0, 1.0, 10.0]))
def test_given_the_first_try_the_bonus_only_weighs_the_second_turn(seed, alpha):
    """Exact expected gradients of a softmax over five second tries after each of three first ones,
    in float64: that of the shaped reward is 1 + alpha times that of r2.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    r1 = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)[:, None].expand(3, 5)
    r2 = torch.randint(0, 2, (3, 5), generator=generator).double()
    pi = logits.softmax(-1)
    values = [(pi * r).sum() for r in (shaped(r1, r2, alpha), r2)]
    one, two = (torch.autograd.grad(v, logits, retain_graph=True)[0] for v in values)
    assert torch.allclose(one, (1 + alpha) * two, atol=1e-12)


# ------------------------------------------------------------------ a step by hand
def given_texts(first: list[str], second: list[str], done=0, **change) -> Score:
    cfg = score.Args(**{"group_size": 2, "stage1_steps": 3} | change)
    trainer = without_model(Score, cfg, {"first": first, "second": second}, kl=0.1)
    trainer.state.global_step, trainer.moments = done, {"of stage I": 1}
    trainer.optimizer = SimpleNamespace(state=trainer.moments)
    return trainer


ROWS = twice("a", "b")
FIRST = [solution(7), solution(8), solution(7), solution(9)]  # right, wrong; right, wrong
SHARES = {"first/accuracy": 0.5, "second/accuracy": 0.5, "co/delta": 0.0, "co/same": 0.5}
SHARES |= {"co/wrong_to_right": 0.25, "co/right_to_wrong": 0.25, "co/corrected": 0.5}
SECOND = [solution(7), solution(7), solution(8), "<think>hm</think>" + solution(9, step="!")]


def test_stage_one_moves_only_the_second_turn():
    """Right -> wrong, wrong -> right; right -> wrong, wrong -> wrong."""
    again = [solution(n) for n in (8, 7, 8, 9)]
    trainer = given_texts(FIRST, again, done=2, kl=0.02, first_kl=0.25)
    first, second = trainer.step(ROWS)[0]
    assert first.advantages.tolist() == [0.0] * 4  # though the rewards differ
    assert first.rewards.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert second.rewards.tolist() == [0.0, 1.0, 0.0, 0.0]  # without the bonus
    assert second.advantages.tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert first.kl_weights.tolist() == pytest.approx([0.27] * 4)
    assert second.kl_weights.tolist() == pytest.approx([0.02] * 4)
    assert trainer.moments
    asked = [again_prompt(row["question"], y1)[-1]["content"] for row, y1 in zip(ROWS, FIRST)]
    assert trainer.asked[4:] == [("second", text) for text in asked]


def test_stage_two_rewards_both_turns_and_does_not_divide_by_the_deviation():
    trainer = given_texts(FIRST, SECOND, done=3, kl=0.02, first_kl=0.25)
    first, second = trainer.step(ROWS)[0]
    assert first.advantages.tolist() == [0.5, -0.5, 0.5, -0.5]
    assert second.rewards.tolist() == [1.0, 11.0, -10.0, 0.0]
    assert second.advantages.tolist() == [-5.0, 5.0, -5.0, 5.0]
    for batch in (first, second):
        assert batch.kl_weights.tolist() == pytest.approx([0.02] * 4)
    assert not trainer.moments  # AdamW starts anew
    assert {name: mean(trainer.logged[name]) for name in SHARES} == SHARES
    assert trainer.logged["second/accuracy"] == [True, True, False, False]
    assert second.notes[1]["rewards"] == {"total": 11.0, "r1": 0.0, "r2": 1.0}


def test_what_is_cut_in_its_thoughts_has_no_answer():
    """Whatever it quotes there, in training and held out."""
    cut = r"<think>My solution says \boxed{7}, but"
    _, second = given_texts(FIRST, [cut] * 4, done=3).step(ROWS)[0]
    assert second.rewards.tolist() == [-10.0, 0.0, -10.0, 0.0]
    trainer = answering(
        lambda player, *_: solution(7) if player == "first" else cut, eval_samples=1
    )
    found = score.evaluate(trainer, ROWS[:1])
    assert found["first/accuracy"] == 1 and found["second/accuracy"] == found["co/same"] == 0


def test_later_steps_and_ablations():
    trainer = given_texts(FIRST, SECOND, done=4)
    assert trainer.step(ROWS)[0][1].rewards[1] == 11.0 and trainer.moments
    second = given_texts(FIRST, SECOND, stage1_steps=0, alpha=0.0).step(ROWS)[0][1]
    assert second.rewards.tolist() == [1.0, 1.0, 0.0, 0.0]
    trainer = given_texts(FIRST, [], done=3, turns=1)
    (first,) = trainer.step(ROWS)
    assert len(trainer.asked) == 4 and first.player == "first"
    assert first.kl_weights.tolist() == pytest.approx([0.01] * 4) and trainer.moments
    (first,) = given_texts(FIRST, [], turns=1).step(ROWS)  # there is no stage I either
    assert first.advantages.tolist() == [0.5, -0.5, 0.5, -0.5]


# ------------------------------------------------------------------ the loss
@given(st.lists(st.floats(-2, 2), min_size=28, max_size=28))
def test_the_loss_and_its_gradient_equal_the_loop(numbers):
    """Two rows of each turn, of unequal length."""
    A, base, logp = torch.tensor(numbers, dtype=torch.float64).split([4, 12, 12])
    base, logp = base.view(4, 3), logp.view(4, 3).requires_grad_()
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    batch = Batch("agent", mask, mask, mask, mask, row=torch.arange(4), total_tokens=9)
    batch.base_logps, batch.advantages = base, A[:, None] * mask
    batch.source = torch.tensor([0, 0, 1, 1])
    batch.kl_weights = torch.tensor([0.5, 0.5, 0.01, 0.01], dtype=torch.float64)
    cfg = score.Args()
    trainer = without_model(Score, cfg, kl=0.5, clip_max=0, players=Score.define_players(cfg))
    trainer.score = lambda part: (logp, torch.ones(4, 3))
    loss, shown = trainer.loss(batch)
    trainer.show_loss(batch, shown)
    (gradient,) = torch.autograd.grad(loss, logp)
    total, k3s = 0.0, {"first": [], "second": []}
    for i, length in enumerate([3, 1, 2, 3]):
        for t in range(3):
            beta, A = [0.5, 0.5, 0.01, 0.01][i], numbers[i]
            q = math.exp(numbers[4 + 3 * i + t] - numbers[16 + 3 * i + t])
            if t < length:
                k3 = q - math.log(q) - 1
                total += (-A + beta * k3) / 9
                k3s["first" if i < 2 else "second"].append(k3)
            slope = (-A + beta * (1 - q)) / 9 if t < length else 0.0
            assert gradient[i, t].item() == pytest.approx(slope, abs=1e-6)
    assert loss.item() == pytest.approx(total, abs=1e-6)
    for turn, values in k3s.items():  # the mean over the tokens of that turn alone
        logged = [v for part in trainer.logged[f"{turn}/kl"] for v in part.tolist()]
        assert logged == pytest.approx(values, abs=1e-9)
