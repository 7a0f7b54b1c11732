"""ssp.py: parser and rules with hostile texts, rewards and advantages against loops, what penalty
and gate are worth by counting all cases; a step with completions that are given.
"""

import contextlib
import random
from types import SimpleNamespace

import ssp
from ssp import (
    Question,
    follows_rules,
    proposed_question,
    proposer_advantages,
    proposer_reward,
)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainers import solution, whitened, without_model

KINDS = ("1-acc", "intermediate_difficulty", "format_only")


# ------------------------------------------------------------------ prompts, parsing, rules
def test_proposed_question():
    """Others are in texts.txt. These would take minutes if every tag looked for its end."""
    for many in ("<question>" * 100_000, "</question>" * 100_000, "<" * 1_000_000):
        assert proposed_question(many) == ""
    assert proposed_question("<question>" * 100_000 + "7</question>" * 100_000) == "7"


def test_rules():
    for question, answer, expected in [
        ("1+2 mod 61", None, True),
        ("", None, False),
        ("", "", False),
        ("x" * 1000, None, True),
        ("x" * 1001, None, False),
        ("7 eggs and 3 more?", "7", False),
        ("17 eggs, 70 more, a7?", "7", True),
        ("Who painted THE NIGHT WATCH?", "the night watch", False),
        ("Is it (a?", "(a?", False),
        ("Is it a?", "(a?", True),
        ("is it .*?", "3", True),
        ("((24/9)/7)-3 mod 61", "9", False),  # its value
    ]:
        assert follows_rules(question, answer) is expected, (question, answer)
    shown = "Ann has 3 eggs , and buys 2 . How many ?"
    assert not follows_rules("ann has 3 eggs and buys 2. How many?", "5", shown)
    assert follows_rules("Ann has 3 eggs and buys 4. How many?", "5", shown)
    assert not follows_rules("?" * 1_000_000, "5", shown) and not follows_rules("", "5", "")


# ------------------------------------------------------------------ rewards and advantages
@pytest.mark.parametrize("n", [2, 5])
def test_rewards_against_the_released_codes_formulas(n):
    left, right = 0.0, 1.0
    for hits in range(n + 1):
        s = hits / n
        middle = 4 * (left + s) * (right - s) if 0 < s < 1 else 0.0
        expected = dict(zip(KINDS, (1 - s, middle, 1.0)))
        for kind in KINDS:
            assert proposer_reward(s, kind, 0.1) == pytest.approx(expected[kind], abs=1e-12)
    assert [proposer_reward(None, kind, 0.1) for kind in KINDS] == [-0.1] * 3
    assert proposer_reward(0.5, "intermediate_difficulty", 0) == 1.0
    assert proposer_reward(None, "1-acc", 0.0) == 0


@given(st.lists(st.one_of(st.floats(-1, 1, width=32), st.just(torch.nan)), min_size=1, max_size=20))
@settings(max_examples=200)
def test_advantages_against_a_loop(rewards):
    known = [r for r in rewards if r == r]
    centre = sum(known) / len(known) if known else 0.0
    for baseline, mean in (("none", 0.0), ("batch", centre)):
        got = proposer_advantages(torch.tensor(rewards, dtype=torch.float64), baseline)
        assert got.tolist() == pytest.approx([r - mean if r == r else 0.0 for r in rewards])


def test_what_a_valid_question_earns_more_than_one_without_a_value():
    """The page's (1 - e)(1 - s) - e + (1 - 2 e) p, of both cases of the coin."""
    texts = {True: "1+2 mod 61", False: "1+ mod 61"}
    for e, p, s in [(0.0, 0.1, 0.5), (0.1, 0.0, 0.9), (0.3, 0.0, 0.6), (0.3, 0.1, 0.6)]:
        earned = {}
        for has_value, text in texts.items():
            earned[has_value] = 0.0
            for turned, share in ((True, e), (False, 1 - e)):
                trainer = given_texts(gate_error=float(turned))
                question = Question(text, None, has_value)
                trainer.turn_round([question], random.Random(0))
                rate = (s if has_value else 0.0) if question.valid else None
                earned[has_value] += share * proposer_reward(rate, "1-acc", p)
        gap = (1 - e) * (1 - s) - e + (1 - 2 * e) * p
        assert earned[True] - earned[False] == pytest.approx(gap, abs=1e-12)


# ------------------------------------------------------------------ a step
def given_texts(texts=(), grammar=True, held_out=(), base=(), step=0, **change) -> ssp.Ssp:
    """base: what the base says, in the order in which it is asked."""
    change = {"group_size": 2, "questions": 4} | change
    more = {"has_grammar": grammar, "held_out_questions": {*held_out}}
    trainer = without_model(ssp.Ssp, ssp.Args(**change), texts, **more)
    trainer.saved, trainer.args = {"pool": {}}, SimpleNamespace(seed=0)
    trainer.state.global_step = step
    written, off = [*base], []

    @contextlib.contextmanager
    def playing(name):
        off.append(name)
        yield
        off.pop()

    generate = trainer.generate

    def by_the_base(name, prompts, greedy=False):
        if off != [None]:
            return generate(name, prompts, greedy)
        frozen = trainer.cfg.proposer == "frozen" and name == "proposer"
        assert frozen or (greedy and name == "solver")
        trainer.asked += [("base", prompt[-1]["content"]) for prompt in prompts]
        return [written.pop(0) for _ in prompts]

    trainer.playing, trainer.generate = playing, by_the_base
    return trainer


def rows(*pairs) -> list[dict]:
    return [{"question": q, "answer": a} for q, a in pairs for _ in range(2)]


A, B, C, D = "1+2 mod 61", "(1+2)*3 mod 61", "1+ mod 61", "3+4 mod 61"
FOUR = rows(*[(f"{i}+1 mod 61", str(i + 1)) for i in range(4)])


def tagged(*questions) -> list[str]:
    return [f"<question>{q}</question>" for q in questions]


def test_a_step_by_hand():
    """A is solved once in two, B never; C has no value; the last text has no question."""
    written = {"proposer": [*tagged(A, C, B), "no tag"]}
    written["solver"] = [solution(3), solution(4), solution(7), solution(2)]
    written["solver"] += [solution(0), "no box", solution(7), solution(7)]
    trainer = given_texts(written, penalty=0.1, step=3)
    trainer.saved["pool"] = {D: "7"}
    proposer, solver = trainer.step(FOUR)
    assert trainer.asked[:4] == [("proposer", "Propose a question.")] * 4
    # two have failed: an earlier one stands in the place of both
    asked = [user for name, user in trainer.asked if name == "solver"]
    assert asked == [A, A, D, D, B, B, D, D]
    assert proposer.rewards.tolist() == pytest.approx([0.5, -0.1, 1.0, -0.1])
    assert proposer.advantages.tolist() == proposer.rewards.tolist()
    assert solver.rewards.tolist() == [1, 0, 1, 0, 0, 0, 1, 1]
    groups = [(r, i // 2) for i, r in enumerate(solver.rewards.tolist())]
    assert solver.advantages.tolist() == pytest.approx(whitened(groups, added=1e-6), abs=1e-5)
    assert trainer.saved["pool"] == {D: "7", A: "3", B: "9"}
    assert trainer.logged["proposer/valid"] == trainer.logged["proposer/passed"]
    assert trainer.logged["proposer/valid"] == [True, False, True, False]
    assert trainer.logged["proposer/solve_rate"] == [0.5, 0.0]
    assert trainer.logged["proposer/never_solved"] == [False, True]
    assert trainer.logged["proposer/operations"] == [1, 2]
    assert trainer.logged["co/reused"] == [0.5]
    assert proposer.notes[0]["answer"] == "3" and proposer.notes[1]["solve_rate"] is None


@pytest.mark.parametrize(
    "change, trained, advantages",
    [
        ({}, ["proposer", "solver"], [0.5, 0, 1, 0]),
        ({"baseline": "batch"}, ["proposer", "solver"], [0.125, -0.375, 0.625, -0.375]),
        ({"proposer_reward": "format_only"}, ["proposer", "solver"], [1, 0, 1, 0]),
        ({"proposer_reward": KINDS[1], "penalty": 1}, ["proposer", "solver"], [1, -1, 0, -1]),
        ({"train_solver": False}, ["proposer"], [0.5, 0, 1, 0]),
        ({"proposer": "frozen"}, ["solver"], None),
        ({"proposer": "none"}, ["solver"], None),
    ],
)
def test_ablations(change, trained, advantages):
    written = {"proposer": [*tagged(A, C, B), ""], "solver": [solution(3)] + [solution(5)] * 7}
    frozen = change.get("proposer") == "frozen"  # the base proposes, whatever the solver learns
    trainer = given_texts(written, base=written["proposer"] if frozen else (), **change)
    batches = trainer.step(FOUR)
    assert [batch.player for batch in batches] == trained
    if advantages:
        assert batches[0].advantages.tolist() == pytest.approx(advantages)
    if change == {"proposer": "none"}:  # plain GRPO: the data's questions, and their answers
        assert trainer.asked == [("solver", row["question"]) for row in FOUR]
        assert batches[0].rewards.tolist() == [0, 0, 0, 0, 0, 0, 0, 0]
        assert trainer.saved == {"pool": {}}


def test_a_question_for_the_small_model_must_not_name_its_value():
    found = given_texts().gate(tagged("7*1 mod 61", "(19/1)/1 mod 61", A), FOUR[:3])
    assert [(q.valid, q.answer) for q in found] == [(False, "7"), (False, "19"), (True, "3")]


def test_reuse():
    """As the last step left the pool; forgotten after so many steps; --no-reuse leaves holes."""
    old = {f"{i}+1 mod 61": str(i + 1) for i in range(5)}
    for step, change, count in [(1, {}, 2), (9, {}, 2), (10, {}, 0), (20, {}, 0), (11, {}, 2),
                                (10, {"pool_steps": 4}, 2), (8, {"pool_steps": 4}, 0),
                                (1, {"reuse": False}, 0)]:  # fmt: skip
        written = {"proposer": [*tagged(A, C, B), ""], "solver": [""] * (4 + 2 * count)}
        trainer = given_texts(written, step=step, **change)
        trainer.saved["pool"] = dict(old)
        trainer.step(FOUR)
        asked = [user for name, user in trainer.asked if name == "solver"]
        own = [question for question in asked if question not in old]
        assert own == [A, A, B, B] and len(asked) == 4 + 2 * count, (step, change)
        assert not count or asked[2] in old and asked[-1] in old  # in the places of C and of ""
        kept = {} if trainer.state.global_step % trainer.cfg.pool_steps == 0 else old
        assert trainer.saved["pool"] == kept | {A: "3", B: "9"}
    trainer = given_texts(step=1)
    trainer.saved["pool"] = old
    failed = [Question(C, None, False)] * 60
    drawn = {q.text: q.answer for q in trainer.with_reused(failed, random.Random(0))}
    assert drawn == old


def test_a_gate_that_errs():
    for share, low, high in ((0.0, 0, 0), (1.0, 400, 400), (0.3, 90, 150)):
        trainer, rng = given_texts(gate_error=share), random.Random(0)
        proposed = [Question(A, "3", True) for _ in range(200)]
        proposed += [Question(C, None, False) for _ in range(200)]
        before = [q.valid for q in proposed]
        trainer.turn_round(proposed, rng)
        assert low <= sum(q.valid != b for q, b in zip(proposed, before)) <= high
    # what breaks a rule or is held out never passes, and a good one still may
    never = [Question("", None, False), Question("x" * 1001, None, False)]
    never += [Question("7 eggs?", "7", False), Question(A, None, False, held_out=True)]
    never += [Question("Two eggs?", "2", False, "two eggs ?")]
    given_texts(gate_error=1.0).turn_round(never, random.Random(0))
    assert not any(q.valid for q in never)


def test_held_out_questions_teach_nobody():
    same = f"  {B.replace('mod', ', mod').upper()} "  # but for a comma and capitals
    written = {"proposer": tagged(A, same, C, A), "solver": [solution(3)] * 4}
    trainer = given_texts(written, held_out=[B], penalty=0.1, step=1)
    proposer, solver = trainer.step(FOUR)
    assert proposer.rewards.isnan().tolist() == [False, True, False, False]
    assert proposer.advantages.tolist() == pytest.approx([0, 0, -0.1, 0])
    assert B not in [user for _, user in trainer.asked] and B not in trainer.saved["pool"]


def test_with_other_data_the_proposer_is_given_a_star_and_the_base_is_the_gate():
    names = (("Ann?", "42"), ("Bob?", "7"), ("Cy?", "9"), ("Di?", "1/2"), ("Eve?", "1"))
    data = rows(*names)
    written = {"proposer": [*tagged("Six times seven?", "7 eggs?", "Three squared?"), ""]}
    written["proposer"] += tagged("Eve ?")
    written["solver"] = [solution(42), solution(41)]
    base = [solution(42), solution(8)]
    trainer = given_texts(written, grammar=False, base=base, questions=5)
    proposer, solver = trainer.step(data)
    users = [user for name, user in trainer.asked if name == "proposer"]
    assert users == [f"Problem: {q}\nAnswer: {a}\nPropose a question." for q, a in names]
    # the second names its answer, the fourth is none, the last is what was shown: nobody is asked
    base = [user for name, user in trainer.asked if name == "base"]
    assert base == ["Six times seven?", "Three squared?"]
    assert proposer.rewards.tolist() == [0.5, 0, 0, 0, 0] and len(solver) == 2
    assert trainer.saved["pool"] == {"Six times seven?": "42"}
