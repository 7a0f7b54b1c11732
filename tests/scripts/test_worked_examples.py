"""The worked examples of prompts: the script's own parser reads each as what it means."""

import aprm
import coverrl
import deepseekmath as dsm
import gar
import genrm
import maporl
import score
from common.tasks.answers import SOLVED, is_correct, split_steps
from common.tasks.equations import equations_hold
from common.tasks.verdicts import ALSO_WRONG, VERIFIED, WRONG, Analysis, read_analysis, read_score

import pytest

GOLD = ["25", "80"]  # of the questions in SOLVED
RIGHT, FAULTY = Analysis((), 1.0), Analysis((2,), 0.0)


def analysed(user: str, text: str) -> Analysis | None:
    return read_analysis(text, user, dsm.SCORES)  # what the user says holds the solution's steps


@pytest.mark.parametrize(
    "examples, read, meant",
    [
        (gar.JUDGED, gar.parse_verdict, [1, 0]),
        (genrm.ASKED, lambda text: text in genrm.YES, [True, False]),
        (genrm.ASKED, lambda text: text in genrm.NO, [False, True]),
        (VERIFIED, lambda text: genrm.rationale(text)[1], [True, False]),
        (VERIFIED, coverrl.parse_judgement, [(True, []), (False, [2])]),
        (dsm.META_GRADED, lambda text: read_score(text, dsm.SCORES), [0.0, 1.0]),
        (dsm.PROVED, dsm.parse_solution, [(SOLVED[0][1], RIGHT), (WRONG, FAULTY)]),
    ],
)
def test_an_examples_answer_is_read_as_what_it_means(examples, read, meant):
    assert [read(text) for _, text in examples] == meant


def test_an_example_of_an_analysis_fits_the_solution_that_it_is_about():
    assert [analysed(*example) for example in dsm.GRADED] == [RIGHT, FAULTY]
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
