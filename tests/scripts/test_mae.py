"""mae.py: scores, formats, rewards and both pools by hand and by oracle; the roles with completions
that are given; one real step.
"""

import copy
import random
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import mae
from mae import add_questions, draw_from, judge_score, part_whiten

import pytest
import torch
from conftest import build, gradient, relative
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trainers import whitened, without_model

# ------------------------------------------------------------------ judge_score
PIECES = ["<score>", "</score>", "<think>", "</think>", "<SCORE>", "</Score>", "nine"]
PIECES += ["7", "10", "-", ".", "/", "0", " ", "\n"]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
@settings(max_examples=500)
def test_a_score_is_none_or_in_the_unit_interval(text):
    value = judge_score(text)
    assert value is None or 0.0 <= value <= 1.0
    # nothing in its thoughts can change it
    assert judge_score(f"<think>{text}</think><score>4</score>") == pytest.approx(3 / 9)


# ------------------------------------------------------------------ advantages
@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.integers(0, 2)), min_size=1, max_size=40))
@example([(1 / 3, 0), (1 / 3 + 6e-8, 0)] * 8)  # rounding noise is not amplified
@settings(max_examples=200)
def test_part_whiten_equals_the_loop(rows):
    got = part_whiten(*map(torch.tensor, zip(*rows)))
    assert got.tolist() == pytest.approx(whitened(rows, 1e-4), abs=1e-4)


# ------------------------------------------------------------------ pools
@given(
    st.integers(0, 4),
    st.integers(1, 6),
    st.lists(st.lists(st.sampled_from("abcdefghijkl"), max_size=5), max_size=8),
)
@settings(max_examples=300)
def test_a_full_pool_drops_its_oldest_self_generated_question(seeds, room, batches):
    """And neither copies nor held-out questions, here "c", join it."""
    pool = [f"seed {i}" for i in range(seeds)]
    oracle = deque(maxlen=room)  # of self-generated ones
    for batch in batches:
        oracle.extend([q for q in dict.fromkeys(batch) if q not in {*oracle, "c"}])
        add_questions(pool, [*batch, *pool[:seeds]], seeds, seeds + room, {"c"})
        assert pool == [f"seed {i}" for i in range(seeds)] + list(oracle)


def test_draw_from():
    rng = random.Random(0)
    assert draw_from(rng, [], 5) == []
    assert len(set(draw_from(rng, list(range(100)), 20))) == 20  # without replacement
    more = draw_from(rng, [1, 2, 3], 10)
    assert len(more) == 10 and set(more[:3]) == {1, 2, 3} and set(more) == {1, 2, 3}


# ------------------------------------------------------------------ the roles, one by one
def given_texts(texts=(), gate=0.7, **change) -> mae.Mae:
    """A trainer without a model; there is a question in its pool."""
    cfg, more = mae.Args(questions=4, **change), {"unread": [], "held_out_questions": set()}
    trainer = without_model(mae.Mae, cfg, texts, gate=gate, trouble="", **more)
    trainer.saved = {"questions": ["seed"], "seeds": 1, "pairs": [], "silent_steps": 0}
    trainer.args = SimpleNamespace(output_dir="run")
    return trainer


def score(s: int) -> str:
    return f"<score>{s}</score>"


GOOD, POOR = "1+2 mod 61", "1+ mod 61"


def test_the_proposers_reward_by_hand():
    written = [f"<question>{text}</question>" for text in (GOOD, POOR)]
    written += ["<question>x</question><question> </question>"]  # its last one is none
    written += ["<question>x</question><question>2+2 mod 61</question>"]
    said = [score(8), score(7), "no score"] + [score(4)] * 5
    solved = [r"<answer>\boxed{3}</answer>"] * 5
    trainer = given_texts({"proposer": written, "solver": solved, "judge": said})
    batch = trainer.propose([None] * 4)
    difficulties = [note["rewards"].get("difficulty") for note in batch.notes]
    assert difficulties == pytest.approx([6 / 9, 0.0, None, 0.0])
    # quality 7/9, difficulty 1 - 3/9 from 5 answers scored 4; below the gate no difficulty; no
    # question: 0; two pairs: format one half, quality neutral
    expected = [(7 / 9 + 6 / 9 + 1) / 3, (6 / 9 + 0 + 1) / 3, 0.0, (0.5 + 0 + 0.5) / 3]
    assert mae.proposer_reward(0.7, 1.0, 1.0, gate=0.7) == pytest.approx(2.7 / 3)  # just at it
    assert mae.proposer_reward(0.6, 1.0, 1.0, gate=0.7) == pytest.approx(1.6 / 3)  # below it
    assert batch.rewards.tolist() == pytest.approx(expected)
    assert [note["rewards"]["total"] for note in batch.notes] == batch.rewards.tolist()
    asked = [f"Question: {text}\nScore the question." for text in (GOOD, POOR, "2+2 mod 61")]
    asked += [f"Question: {GOOD}\nAnswer: 3\nScore the answer."] * 5
    assert [user for name, user in trainer.asked if name == "judge"] == asked
    # difficulty is sampled above the gate only
    assert [user for name, user in trainer.asked if name == "solver"] == [GOOD] * 5
    assert trainer.unread == [False, False, True] + [False] * 5
    assert trainer.saved["questions"] == ["seed", GOOD]
    assert trainer.logged["proposer/quality"] == pytest.approx([7 / 9, 6 / 9, 0.5])
    assert trainer.logged["proposer/difficulty"] == pytest.approx([6 / 9])
    assert trainer.logged["proposer/accepted"] == [1 / 4] and trainer.logged["co/questions"] == [2]


def test_without_the_gate_everything_joins_and_difficulty_always_counts():
    written, said = [f"<question>{POOR}</question>"] * 4, [score(1)] * (4 + 20)
    texts = {"proposer": written, "solver": ["no box"] * 20, "judge": said}
    trainer = given_texts(texts, gate=0.0, format_reward=False)
    rewards = trainer.propose([None] * 4).rewards
    assert rewards.tolist() == pytest.approx([(0 + 1 + 0) / 3] * 4)
    assert trainer.saved["questions"] == ["seed", POOR]
    assert trainer.asked[-1] == ("judge", f"Question: {POOR}\nAnswer: no box\nScore the answer.")


def test_the_solvers_reward_by_hand_and_its_pairs():
    two = "<answer>x</answer>" * 2
    texts = [r"<answer>\boxed{1}</answer>", r"<answer>\boxed{2}</answer>", r"\boxed{3}", two]
    said = [score(10), "?", score(10), score(4)]
    trainer = given_texts({"solver": texts * 2, "judge": said * 2})
    batch = trainer.solve(["q1", "q2", "q3", "q4"])
    assert [note["rewards"]["judged"] for note in batch.notes][:2] == [1.0, 0.5]
    expected = [1.0, (0.5 + 1) / 2, (1 + 0) / 2, (3 / 9 + 0.5) / 2]
    assert batch.rewards.tolist() == pytest.approx(expected)
    answers = {"q1": "1", "q2": "2", "q3": "3", "q4": two}
    assert trainer.saved["pairs"] == [{"question": q, "answer": a} for q, a in answers.items()]
    shown = [f"Question: {q}\nAnswer: {a}\nScore the answer." for q, a in answers.items()]
    assert [user for name, user in trainer.asked if name == "judge"] == shown
    trainer.cfg.format_reward = False
    trainer.cfg.pool_size = 6
    rewards = trainer.solve(["q5", "q6", "q7", "q8"]).rewards
    assert rewards.tolist() == pytest.approx([0.5, 0.25, 0.5, 1 / 6])
    kept = [pair["question"] for pair in trainer.saved["pairs"]]
    assert kept == ["q3", "q4", "q5", "q6", "q7", "q8"]


def test_the_judges_reward_is_its_format_and_nothing_else():
    said = [score(10), "no score", score(10), score(4) + score(1)]
    trainer, pairs = given_texts({"judge": said * 2}), [{"question": "q", "answer": "1"}] * 4
    batch = trainer.judge(pairs)
    assert batch.rewards.tolist() == [1.0, 0.0, 1.0, 0.5] and batch.player == "judge"
    trainer.cfg.format_reward = False
    assert trainer.judge(pairs).rewards.tolist() == [0.0] * 4


PAIRS = [{"question": f"{i}+4 mod 61", "answer": str(i)} for i in range(4)]


def test_two_processes_share_what_seed_and_step_draw():
    trainer, shares = given_texts(), []
    trainer.saved |= {"questions": [*"abcdefghijkl"], "pairs": PAIRS * 2}
    for rank in range(2):
        trainer.accelerator = SimpleNamespace(num_processes=2, process_index=rank)
        shares.append(trainer.draw())
        assert trainer.draw() == shares[rank]
    (_, *first), (_, *second) = shares
    assert len({*first[0], *second[0]}) == 8  # without replacement
    assert sorted(pair["answer"] for pair in first[1] + second[1]) == sorted("01230123")
    trainer.state.global_step = 1
    assert trainer.draw() != shares[1]


# ------------------------------------------------------------------ one real step
def make_mae(folder, **change):
    """A trainer on the small model, 4 rows of each role, 12 seeds."""
    args = mae.Args(questions=4, micro_batch=4, seed_questions=12, lr=1e-3, steps=4, **change)
    trainer = build(mae.Mae, folder, args, mae.Mae.define_players(args), mae.solve_prompt)
    seeds = [row["question"] for row in trainer.train_rows[:12]]
    trainer.saved |= {"questions": seeds, "seeds": 12, "pairs": list(PAIRS)}
    return trainer


def test_the_roles_play_on_the_last_steps_pools_and_only_rollouts_are_trained_on(tmp_path):
    trainer = make_mae(tmp_path, difficulty_samples=2)
    assert trainer.gate == 0.7
    before, rollout, rollouts = copy.deepcopy(trainer.saved), trainer.rollout, {}

    def spy(name, rows):
        prompts = [row["prompt"][-1]["content"] for row in rows]
        rollouts[name] = (prompts, rollout(name, rows))
        return rollouts[name][1]

    trainer.rollout, together = spy, []
    trainer.over_all_processes = lambda fn, *rows: together.append(fn) or fn(*rows)
    (batch,) = trainer.step([])
    proposed, solved, judged = (rollouts[name][0] for name in ("proposer", "solver", "judge"))
    assert set(solved) <= set(before["questions"]) and len(set(solved)) == 4
    shown = "Question: {question}\nAnswer: {answer}\nScore the answer."
    assert sorted(judged) == sorted(shown.format(**pair) for pair in before["pairs"])
    references = {text.split("\n")[0].removeprefix("Reference: ") for text in proposed}
    assert references <= {*before["questions"], "Propose a question."}
    assert together == [part_whiten]
    # one batch of the three rollouts, each role whitened by itself
    assert list(rollouts) == ["proposer", "solver", "judge"] and batch.player == "agent"
    assert batch.texts == [text for _, part in rollouts.values() for text in part.texts]
    rows = [(reward, i // 4) for i, reward in enumerate(batch.rewards.tolist())]
    assert batch.advantages.tolist() == pytest.approx(whitened(rows, 1e-4), abs=1e-4)
    assert batch.total_tokens == batch.completion_mask.sum()


@pytest.mark.parametrize("part, role", enumerate(["proposer", "solver", "judge"]))
def test_a_role_that_is_not_trained_plays_and_adds_nothing(tmp_path, part, role):
    """The gradient does not depend on what its rows would have had for advantages."""
    change = {f"train_{role}": False, "quality_gate": False}
    trainer = make_mae(tmp_path, difficulty_samples=1, **change)
    assert trainer.gate == 0.0
    (batch,) = trainer.step([])
    own = torch.arange(12) // 4 == part
    A = batch.advantages
    assert (A[own] == 0).all() and A.shape == (12,) and len(trainer.saved["pairs"]) == 8
    assert [note["player"] == role for note in batch.notes] == own.tolist()
    batch.advantages = A + (~own).float()  # so that no other role is flat
    without = replace(batch, completion_ids=batch.completion_ids.clone())
    without.completion_ids[own] = 5  # whatever it writes
    assert relative(gradient(trainer, batch), gradient(trainer, without)) < 1e-4


def test_silent_steps_must_follow_each_other():
    trainer = given_texts()
    for unread, count in (([True], 1), ([True] * 3 + [False], 2), ([True, False], 0), ([True], 1)):
        trainer.unread = unread  # half is not more than half
        trainer.stop_if_silent()
        assert trainer.saved["silent_steps"] == count and not trainer.trouble
        assert trainer.unread == []
    for _ in range(2):
        trainer.unread = [True] * 3 + [False]
        trainer.stop_if_silent()
    assert "75% of the judgements had no <score>" in trainer.trouble
    assert trainer.state.max_steps == 1


# ------------------------------------------------------------------ evaluation
def test_against_gold():
    right = [True, True, True, False, False, False]
    values = [1.0, 0.6, 0.2, None, 0.0, 0.6]  # no score is wrong; 0.6 says right
    assert mae.balanced_accuracy(values, right) == pytest.approx((2 / 3 + 1 / 3) / 2)
    # right 1, .6, .2 against wrong .5 (no score), 0, .6: wins 3, 2.5, 1
    assert mae.rank_agreement(values, right) == pytest.approx(6.5 / 9)
    assert mae.rank_agreement([0.3] * 6, [True, False] * 3) == 0.5
    one_class = [1.0, 0.0], [True, True]
    assert mae.balanced_accuracy(*one_class) == mae.rank_agreement(*one_class) == 0.5
    assert mae.balanced_accuracy([0.5, 0.49], [True, False]) == 1.0
