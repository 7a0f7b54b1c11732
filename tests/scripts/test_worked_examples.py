"""The worked examples of prompts: the script's own parser reads each as what it means. Programs of
azr.py, cure.py and ssr.py, which are run: in their own tests.
"""

import re

import aprm
import coverrl
import deepseekmath as dsm
import gar
import genrm
import mae
import maporl
import raro
import score
import self_rewarding
import self_taught
import self_verify
import ssp
import sweet_rl
from common.tasks.answers import SOLVED, final_answer, is_correct, split_steps
from common.tasks.equations import equations_hold
from common.tasks.verdicts import (
    ALSO_WRONG,
    VERIFIED,
    WRONG,
    Analysis,
    read_analysis,
    read_score,
    read_verdict,
)

import pytest

GOLD = ["25", "80"]  # of the questions in SOLVED
RIGHT, FAULTY = Analysis((), 1.0), Analysis((2,), 0.0)


def pairs(prompt: list[dict]) -> list[tuple[str, str]]:
    """What the user says and the model answers, in a prompt's worked examples."""
    texts = [message["content"] for message in prompt if message.get("example")]
    return [*zip(texts[::2], texts[1::2])]


def of_ten(text: str) -> float:
    return mae.judge_score(text) * 9


def says_yes(text: str) -> bool:
    assert text in genrm.YES + genrm.NO
    return text in genrm.YES


@pytest.mark.parametrize(
    "prompt, read, meant",
    [
        (gar.judge_prompt("Q", "R"), gar.parse_verdict, [1, 0]),
        (genrm.ask_prompt("Q", "S"), says_yes, [True, False]),
        (mae.judge_answer_prompt("Q", "7"), of_ten, [9, 1]),
        (mae.judge_question_prompt("Q"), of_ten, [8, 2]),
        (mae.propose_prompt("Q"), lambda text: mae.tag_format(text, "question"), [1, 1, 1]),
        (self_rewarding.score_prompt("Q", "S"), self_rewarding.parse_score, [1, 0]),
        (self_taught.compare_prompt("Q", "A", "B"), self_taught.parse_choice, [1, 2]),
        (raro.compare_prompt("Q", "A", "B"), raro.parse_choice, ["1", "2", "tie"]),
        (
            self_verify.judge_prompt("answer", "Q", "7"),
            lambda text: self_verify.parse_verdict("answer", text),
            [True, False],
        ),
        (sweet_rl.critic_prompt("Q", "S"), final_answer, ["80", "25"]),
    ],
)
def test_a_worked_example_is_read_as_what_it_means(prompt, read, meant):
    examples, asked = pairs(prompt), prompt[-1]["content"]
    assert [read(text) for _, text in examples] == meant
    for user, text in examples:
        assert user.splitlines()[-1] == asked.splitlines()[-1]  # the user asks in the same words
        assert not re.search(r"[.?}]</", text)  # which is one token of many tokenizers
        marks = [read_verdict(step, ("CORRECT", "INCORRECT")) for step in split_steps(text)]
        if "CORRECT" in marks:  # each step of each solution has its verdict, and a false equation
            steps = split_steps(user)  # is in a step that is called faulty
            assert len(marks) == len(steps)
            for step, mark in zip(steps, marks):
                assert equations_hold(step) or mark == "INCORRECT"


@pytest.mark.parametrize(
    "examples, read, meant",
    [
        (VERIFIED, lambda text: genrm.rationale(text)[1], [True, False]),
        (VERIFIED, coverrl.parse_judgement, [(True, []), (False, [2])]),
        (dsm.META_GRADED, lambda text: read_score(text, dsm.SCORES), [0.0, 1.0]),
        (dsm.PROVED, dsm.parse_solution, [(SOLVED[0][1], RIGHT), (WRONG, FAULTY)]),
    ],
)
def test_an_examples_answer_is_read_as_what_it_means(examples, read, meant):
    assert [read(text) for _, text in examples] == meant


def test_an_example_of_an_analysis_fits_the_solution_that_it_is_about():
    # what the user says holds the solution's steps
    assert [read_analysis(text, user, dsm.SCORES) for user, text in dsm.GRADED] == [RIGHT, FAULTY]
    assert [is_correct(s, gold) for s, gold in zip((ALSO_WRONG, WRONG), GOLD)] == [False, False]


@pytest.mark.parametrize(
    "examples", [SOLVED, coverrl.CORRECTED, dsm.CORRECTED, maporl.DEBATED, score.TRIED_AGAIN]
)
def test_an_example_of_a_solution_is_right_and_in_form(examples):
    for (_, text), gold in zip(examples, GOLD, strict=True):
        shown = maporl.shown(text)
        assert is_correct(shown, gold) and split_steps(shown) and "think" not in shown


def test_an_example_of_an_edit_makes_a_right_step_wrong():
    for (_, text), (question, solution) in zip(aprm.CORRUPTED, (SOLVED[0], aprm.ONE_STEP)):
        k, step = aprm.parse_edit(text, {"question": question, "reference": solution})
        assert equations_hold(split_steps(solution)[k]) and not equations_hold(step)


@pytest.mark.parametrize(
    "prompt",
    [
        gar.judge_prompt(SOLVED[0][0], gar.reasoning(SOLVED[0][1])),
        genrm.ask_prompt(*SOLVED[0]),
        aprm.corrupt_prompt(*SOLVED[0]),
        coverrl.correct_prompt(SOLVED[0][0], ALSO_WRONG, [1, 3]),
        dsm.prove_prompt(SOLVED[0][0]),
        dsm.grade_prompt(dsm.RIGHT),
        dsm.meta_prompt(dsm.RIGHT, (1, 3)),
        maporl.debate_prompt(*SOLVED[0], ALSO_WRONG),
        score.again_prompt(*SOLVED[0]),
    ],
)
def test_a_prompt_about_the_first_example_asks_in_the_same_words(prompt):
    _, example, *_, asked = prompt
    assert asked["content"] == example["content"]


def test_the_examples_proposals_can_be_solved_and_do_not_name_their_answer():
    worked_out = [3 * 12 - 6 - 5, (20 - 4 - 6) * 8]  # what the new questions ask for
    examples = pairs(ssp.propose_prompt("Q", "7"))
    for (user, text), (shown, _), answer, value in zip(examples, SOLVED, GOLD, worked_out):
        assert user == ssp.to_propose(shown, answer) and value == int(answer)
        assert ssp.follows_rules(ssp.proposed_question(text), answer, shown)
