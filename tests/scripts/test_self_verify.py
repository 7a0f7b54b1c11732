"""self_verify.py: which solutions are judged, both rewards, the schedules, hostile judgements."""

import random
from collections import Counter

import self_verify
from self_verify import parse_verdict, samples_of, verdict_reward

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainers import C, X, judgement, solution, twice, whitened, without_model


# ------------------------------------------------------------------ parsing
@pytest.mark.parametrize(
    "text, verdict",
    [
        ("<think>So.</think><score>6</score>", True),
        ("<score>10</score>\n", True),
        ("<score> 5 </score>", False),
        ("<score>1</score>", False),
        ("<score>1</score><score>9</score>", True),  # the last one ends the text
        ("<score>9</score> or so", None),
        ("<score>0</score>", None),
        ("<score>11</score>", None),
        ("<score>-6</score>", None),
        ("<score>8/10</score>", None),
        ("<score>7.5</score>", None),
        ("<score>\u0669</score>", None),  # a nine, in Arabic digits
        ("<score>9", None),
        ("", None),
    ],
)
def test_a_score_is_whole_and_ends_the_text(text, verdict):
    assert parse_verdict("answer", text) is verdict


@given(st.lists(st.sampled_from(["<score>", "</score>", "<think>", "9", " ", "2", C, X])))
def test_whatever_is_written_a_verdict_is_a_verdict_or_none(parts):
    assert parse_verdict("answer", "".join(parts)) in (True, False, None)
    assert parse_verdict("solution", "".join(parts)) is None  # there is no section


def test_the_judge_of_answers_sees_nothing_else():
    asked = self_verify.judge_prompt("answer", "1+1", solution(2, "!"))[-1]["content"]
    assert asked == "Question: 1+1\nAnswer: 2\nScore the answer."
    asked = self_verify.judge_prompt("solution", "1+1", solution(2, "!"))[-1]["content"]
    assert "2!" in asked and asked.endswith("Verify its 1 steps.")


# ------------------------------------------------------------------ what is judged
def group(right: int, wrong: int, name="q") -> list[dict]:
    kinds = [True] * right + [False] * wrong
    return [{"question": name, "solution": f"{name}{i}", "right": r} for i, r in enumerate(kinds)]


KINDS = {"mixed": (3, 2), "right": (4, 0), "wrong": (0, 4), "once": (1, 1), "none": (0, 0)}


def expected(kinds: list[str]) -> Counter:
    """How many right and wrong ones, counted by hand: (taken, waiting) of each kind of question."""
    taken = sum(kind in ("mixed", "once") for kind in kinds)
    waiting = {True: kinds.count("mixed") + kinds.count("right"), False: kinds.count("mixed")}
    half = sum(kind != "none" for kind in kinds) // 2
    return Counter({c: half if waiting[c] else min(half, taken) for c in (True, False)})


@given(st.lists(st.sampled_from([*KINDS]), max_size=12), st.integers(0, 99))
def test_as_many_right_as_wrong_ones_where_a_pool_allows(kinds, seed):
    groups = [group(*KINDS[kind], f"{i}.") for i, kind in enumerate(kinds)]
    found = samples_of(groups, random.Random(seed))
    counts = expected(kinds)
    assert Counter(row["right"] for row in found) == +counts
    of_question = {i: [row for row in found if row["question"] == f"{i}."] for i in range(12)}
    for i, kind in enumerate(kinds):
        if kind in ("wrong", "none"):
            assert not of_question[i]


def test_a_solution_comes_twice_only_when_the_pool_is_empty():
    groups = [group(8, 0, f"{i}.") for i in range(7)] + [group(2, 2, "m")]
    for seed in range(20):
        found = samples_of(groups, random.Random(seed))
        right = Counter(row["solution"] for row in found if row["right"])
        wrong = Counter(row["solution"] for row in found if not row["right"])
        assert len(right) == sum(right.values()) == 4
        assert set(wrong) == {"m2", "m3"} and sum(wrong.values()) == 4  # one was taken, one waits
    assert samples_of([], random.Random(0)) == samples_of([[]], random.Random(0)) == []


# ------------------------------------------------------------------ rewards
@pytest.mark.parametrize("rate, most", [(0.125, 0.125), (0.5, 0.5), (1.0, 0.5)])
def test_the_reward_of_a_verdict(rate, most):
    for right in (True, False):
        assert verdict_reward(right, right, rate) == most
        assert verdict_reward(not right, right, rate) == verdict_reward(None, right, rate) == 0


# ------------------------------------------------------------------ a step
def given_texts(texts: dict, **change):
    cfg = self_verify.Args(questions=2, group_size=2, **change)
    return without_model(self_verify.SelfVerify, cfg, texts, saved={"buffer": [], "last": []})


ROWS = [*twice("1"), *twice("2", answer="5")]
SOLVED = [solution(7), solution(8), solution(5), solution(4)]  # of both, one right, one wrong


def test_a_step_of_both_tasks_by_hand():
    """Two questions, so one right and one wrong solution are judged, two judgements each."""
    written = {"generator": SOLVED, "verifier": [judgement(v, final=v) for v in (C, X, C, C)]}
    trainer = given_texts(written, schedule="mixed")
    trainer.step(ROWS)
    rewards, A = (getattr(trainer.batches["verifier"], n) for n in ("rewards", "advantages"))
    assert sorted(rewards[:2].tolist()) == [0.0, 0.5]  # pass rate 1/2
    first = whitened([(r, 0) for r in rewards[:2].tolist()], added=1e-6)
    assert A[:2].tolist() == pytest.approx(first, abs=1e-5)
    assert A[2:].tolist() == [0, 0]  # two judgements that say the same
    assert trainer.batches["generator"].rewards.tolist() == [1, 0, 1, 0]
    assert trainer.logged["generator/accuracy"][0].tolist() == [1, 0, 1, 0]
    assert trainer.logged["verifier/says_right"] == [True, False, True, True]
    asked = [text for who, text in trainer.asked if who == "verifier"]
    assert asked[0] == asked[1] != asked[2] == asked[3]


def test_solutions_that_are_only_judged_are_not_trained_on():
    written = {"generator": SOLVED, "verifier": [judgement(C, final=C)] * 4}
    trainer = given_texts(written, schedule="verify")
    (batch,) = trainer.step(ROWS)
    assert batch.player == "verifier" and trainer.saved == {"buffer": [], "last": []}


def test_what_is_judged_knows_how_often_its_question_is_answered_rightly():
    trainer = given_texts({}, schedule="mixed")
    texts = [solution(7), solution(7), solution(5), solution(4)]
    found = trainer.to_judge([*twice("1"), *twice("2", answer="5")], texts)
    assert {(row["question"], row["right"], row["rate"]) for row in found} <= {
        ("1", True, 1.0), ("2", True, 0.5), ("2", False, 0.5),
    }  # fmt: skip
    assert ("2", False, 0.5) in {(row["question"], row["right"], row["rate"]) for row in found}


def test_what_cannot_be_read_is_not_judged():
    written = {"generator": ["7", "no box", solution(5), solution(4)], "verifier": []}
    trainer = given_texts(written, schedule="verify")
    (batch,) = trainer.step(ROWS)
    assert len(batch) == 0  # one question is left, and half of one is none


def test_the_buffer_waits_a_step_and_is_emptied():
    """interval 3: judged are solutions of the first two generate steps, then of the third on."""
    trainer = given_texts({}, schedule="alter", interval=3)
    trainer.to_judge = lambda rows, texts: [
        {"question": "1", "solution": solution(trainer.state.global_step), "right": True, "rate": 1}
    ]
    seen, trainer.verify = [], lambda samples: seen.append([s["solution"] for s in samples])
    for step in range(8):
        trainer.state.global_step = step
        trainer.texts["generator"] = list(SOLVED)
        trainer.step(ROWS)
    assert seen == [[solution(0), solution(1)], [solution(2), solution(4), solution(5)]]


@pytest.mark.parametrize(
    "schedule, tasks",
    [
        ("generate", ["generate"] * 6),
        ("verify", ["verify"] * 6),
        ("init", ["verify"] * 2 + ["generate"] * 4),
        ("alter", ["generate", "generate", "verify"] * 2),
        ("mixed", ["both"] * 6),
    ],
)
def test_schedules(schedule, tasks):
    trainer = given_texts({}, schedule=schedule, init_steps=2, interval=2)
    found = []
    for trainer.state.global_step in range(6):
        found.append(trainer.task_of_step())
    assert found == tasks
