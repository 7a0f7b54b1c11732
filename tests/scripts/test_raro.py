"""raro.py: both rewards in every case, groups without a deviation, what the critic sees; one step
by hand."""

import random
import re
from contextlib import nullcontext

import raro
from common.core.batch import Batch
from common.core.lists import mean
from raro import shown

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainers import solution, twice, without_model

END = ord("\n") + 10  # the token that ends what the players write here


def boxed(choice) -> str:
    return rf"\boxed{{{choice}}}"


# ------------------------------------------------------------------ parsing
@given(st.text(alphabet="<>/step answer\\boxed{}12!\n", max_size=200))
def test_both_sides_are_shown_in_one_form(text):
    form = r"(<step>(?:(?!</step>).)*</step>\n)*<answer>\\boxed\{.*\}</answer>"
    assert re.fullmatch(form, shown(text))


# ------------------------------------------------------------------ rewards, and a step by hand
@pytest.mark.parametrize("expert, other", ["12", "21"])
def test_rewards_in_every_case(expert, other):
    said = [expert, other, "tie", None]
    assert [raro.policy_reward(choice, expert, tau_pol=0.6) for choice in said] == [0, 1, 0.6, 0]
    texts = [[{"content": boxed(choice)}] for choice in said]
    assert raro.critic_reward(texts, [expert] * 4, tau_crit=[0.55] * 4) == [1, 0, 0.55, 0]


def given_texts(policy=(), judgements=(), old=(), **change) -> raro.Raro:
    cfg = raro.Args(**{"group_size": 2, "pairs": 2} | change)
    texts = {"policy": [f"{text}\n" for text in policy]}
    texts["critic"] = [f"{text}\n" for text in judgements]
    trainer = without_model(raro.Raro, cfg, texts, eos_token_ids=[END])
    trainer.saved["buffer"] = [*old]
    return trainer


# the expert's step has a mark of its own, behind words that nobody is to see
ROWS = twice("1+6", "2+5", reference="As experts say: " + solution(7, "?"))


def test_a_step():
    """Four solutions: right, wrong, right, wrong; the critic takes the first for the expert's, sees
    through the second and the last, calls the third a tie. Each side has a weight.
    """
    rng = random.Random("0 0 ")  # the first step's
    expert = [rng.choice("12") for _ in range(4)]
    other = {"1": "2", "2": "1"}[expert[0]]
    said = [*map(boxed, (other, expert[1], "tie", expert[3]))]
    said += [*map(boxed, ("1", "2", "tie")), "hm"]
    weights = {"weight_pol": 0.25, "weight_crit": 2.0}
    trainer = given_texts([solution(n) for n in (7, 8, 7, 9)], said, **weights)
    (policy, critic) = trainer.step(ROWS)[0]
    assert policy.rewards.tolist() == pytest.approx([1, 0, 0.6, 0])
    # without a deviation
    assert policy.advantages.tolist() == pytest.approx([0.125, -0.125, 0.075, -0.075])
    # the expert's solution stands where it is said to stand
    asked = []
    for _, text in trainer.asked[4:]:
        assert text.endswith("Which is sounder?")  # as the small model has been taught
        asked.append(text.partition("Solution 1:\n")[2].split("Solution 2:\n"))
    for place, ours, (first, second) in zip(expert, (7, 8, 7, 9), asked):
        assert (first if place == "1" else second).startswith("<step>x=7?<")
        assert (second if place == "1" else first).startswith(f"<step>x={ours}<")
    one, two = critic.advantages.split(2)
    assert one.tolist() == ([1, -1] if "x=7?" in asked[4][0] else [-1, 1])
    assert two.tolist() == pytest.approx([0.55, -0.55])  # of .55 and 0
    assert mean(trainer.logged["critic/says_tie"]) == 0.25
    assert mean(trainer.logged["policy/accuracy"]) == 0.5


BOX = r"<answer>\boxed{7}</answer>"
STEP = "<step>x=7</step>"


@pytest.mark.parametrize("text", ["", "no", STEP, STEP + boxed(" "), BOX, f"<step> \n</step>{BOX}"])
def test_what_is_no_whole_solution_earns_nothing(text):
    """Though a critic takes it for the expert's, or calls it a tie."""
    trainer = given_texts([text, solution(8)] * 2, [boxed("tie")] * 8)
    policy, _ = trainer.step(ROWS)[0]
    assert policy.rewards.tolist() == pytest.approx([0, 0.6] * 2)


def test_a_completion_that_was_cut_has_no_advantage():
    trainer = given_texts()
    ids = torch.tensor([[5, END], [5, 5], [END, 0], [5, END]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 0]])
    batch = Batch("policy", ids, mask, ids, mask, row=torch.arange(4))
    batch.rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert trainer.advantages(batch).tolist() == [0.5, 0.0, 0.5, 0.0]  # the last: behind the mask


def old_pair(i: int) -> dict:
    return {"question": f"old {i}", "expert": "1", "theirs": "a", "ours": "b", "right": False}


@pytest.mark.parametrize(
    "share, count, known", [(0.5, 2, 9), (1.0, 4, 9), (1.0, 3, 3), (0.0, 0, 9)]
)
def test_the_critic_trains_on_new_and_old_pairs(share, count, known):
    buffer = [old_pair(i) for i in range(known)]
    trainer = given_texts([], ["x"] * 8, buffer, pairs=4, old_share=share)
    new = [old_pair(i) | {"question": f"new {i}"} for i in range(4)]
    trainer.train_critic(new, random.Random(0))
    asked = [text for _, text in trainer.asked[::2]]
    assert len(set(asked)) == 4  # none twice
    assert sum("Problem: old" in text for text in asked) == count and len(trainer.asked) == 8
    assert trainer.asked[::2] == trainer.asked[1::2]  # G judgements of one pair


def test_half_of_one_pair_is_an_old_one_in_half_of_the_steps():
    buffer = [old_pair(i) for i in range(9)]
    for step in range(8):
        trainer = given_texts([], ["x"] * 2, buffer, pairs=1)
        trainer.state.global_step = step
        trainer.train_critic([old_pair(0) | {"question": "new"}], random.Random(step))
        assert ("Problem: old" in trainer.asked[0][1]) == (step % 4 in (1, 2))


def test_a_full_buffer_drops_the_oldest():
    buffer = [old_pair(i) for i in range(3)]
    trainer = given_texts([solution(8)] * 2, [boxed(1)] * 6, buffer, buffer=4, shared=False)
    batches = trainer.step(ROWS[:2])  # of two adapters: not joined
    assert [batch.player for batch in batches] == ["policy", "critic"]
    kept = [pair["question"] for pair in trainer.saved["buffer"]]
    assert kept == ["old 1", "old 2", "1+6", "1+6"]


def test_controls_are_never_trained_and_a_coin_is_not_asked():
    trainer = given_texts([solution(8)] * 4, [], critic="coin")
    batches = trainer.step(ROWS)
    assert [batch.player for batch in batches] == ["policy"] and len(trainer.asked) == 4
    assert {*batches[0].rewards.tolist()} <= {0.0, 1.0}
    players = raro.Raro.define_players
    assert {player.adapter for player in players(raro.Args()).values()} == {"agent"}
    apart = players(raro.Args(shared=False, critic="frozen"))
    assert apart["critic"].lr == 0 < apart["policy"].lr and not apart["critic"].adapter


@pytest.mark.parametrize("critic, shared", [("frozen", True), ("frozen", False), ("coin", True)])
def test_a_frozen_critic_is_the_base(critic, shared):
    """With two adapters its own is never trained, so it need not be turned off."""
    trainer, who = given_texts([solution(8)] * 2, [boxed(1)] * 2, critic=critic, shared=shared), []
    trainer.playing = lambda name: who.append(name) or nullcontext()
    trainer.step(ROWS[:2])
    assert who == [None] * (critic == "frozen" and shared)
