"""common/tasks/graded.py: the truth about solutions and analyses, cases by hand."""

from common.tasks.graded import analysis_metrics, meta_truth, truth_of
from common.tasks.verdicts import Analysis
from common.tiny.tasks import format_solution, gold_solution

import pytest

ROW = {"question": "(38+4)*7 mod 61", "answer": "50"}  # 42, 50
RIGHT = gold_solution(ROW["question"])
LUCKY = format_solution(["38+4=41", "42*7=50"], 50)  # the answer in spite of a wrong step
WRONG = format_solution(["38+4=41", "41*7=43"], 43)


def row_of(solution=WRONG, **more) -> dict:
    truth, faulty = truth_of(ROW, solution)
    return {"truth": truth, "faulty": faulty} | more


def worth(analysis: Analysis, ms: float) -> float:
    return ms if analysis.consistent else ms / 2


def test_the_truth_of_the_small_models_solutions():
    assert truth_of(ROW, RIGHT) == (1.0, [])
    assert truth_of(ROW, LUCKY) == (0.5, [1])  # the second goes on as if there were no mistake
    assert truth_of(ROW, WRONG) == (0.0, [1])
    assert truth_of(ROW, "nonsense") == (0.0, [])
    in_a_step = RIGHT.replace("</step>\n<answer>", " ").replace("</answer>", "</step>")
    assert "<answer>" not in in_a_step and truth_of(ROW, in_a_step)[0] == 0.0


WORDS = {"question": "Tom has 3 bags of 4 apples and eats 2. How many are left?", "answer": "10"}


@pytest.mark.parametrize(
    "steps, answer, truth",
    [
        (["3 x 4 = 12", "12 − 2 = 10"], 10, (1.0, [])),
        (["3 x 4 = 13", "so 10 are left"], 10, (0.5, [1])),
        (["3*4 = 12", "12 - 2 = 9"], 9, (0.0, [2])),
        (["3*4 = 12", "so 12 are left"], 12, (0.0, None)),  # nobody knows which step is faulty
    ],
)
def test_the_truth_of_other_solutions_is_the_answer_and_the_equations(steps, answer, truth):
    assert truth_of(WORDS, format_solution(steps, answer)) == truth


def test_what_is_claimed_is_judged_and_nothing_else():
    assert meta_truth((1,), [1, 2]) == 1  # it missed one: not its business
    assert meta_truth((1, 3), [1, 2]) == 0.5
    assert meta_truth((3, 4), [1, 2]) == 0
    assert meta_truth((), [1, 2]) == 1  # an honest "none" about a wrong solution
    assert meta_truth((), []) == 1


def test_metrics_of_analyses_by_hand():
    """Of the first three faults claimed one is real; the last two analyses are unreadable."""
    rows = [row_of(), row_of(RIGHT), row_of(LUCKY), row_of(faulty=None), row_of()]
    analyses = [Analysis((1, 2, 3), 0.0), Analysis((), 1.0), Analysis((1,), 0.5), None, None]
    metrics = analysis_metrics(rows, analyses, worth)
    assert metrics["balanced_accuracy"] == 3 / 5  # no score has ten solutions: the share of all
    assert metrics["claims_real"] == 2 / 4 and metrics["defects_found"] == 2 / 3
    assert metrics["analysis_quality"] == pytest.approx((0.5 + 1 + 1 + 0) / 4)


def test_a_class_of_one_does_not_count_as_much_as_all_others():
    """78 wrong solutions, 17 right ones, and one of 0.5, as a base's held-out ones are."""
    rows = [row_of()] * 78 + [row_of(RIGHT)] * 17 + [row_of(LUCKY)]
    said = [0.0] * 70 + [1.0] * 8 + [1.0] * 10 + [0.0] * 7 + [0.5]
    analyses = [Analysis((), score) for score in said]

    def accuracy(places) -> float:
        chosen = [rows[i] for i in places], [analyses[i] for i in places]
        return analysis_metrics(*chosen, worth)["balanced_accuracy"]

    assert accuracy(range(96)) == pytest.approx((70 / 78 + 10 / 17) / 2)
    assert accuracy([*range(78), *range(78, 87)]) == pytest.approx(70 / 78)  # nine of them
    assert accuracy([*range(78), *range(78, 88)]) == pytest.approx((70 / 78 + 1) / 2)
