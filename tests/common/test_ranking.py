"""common/tasks/ranking.py: the best of k against all choices of k, and the figures of an evaluation
worked by hand."""

import itertools
import random

from common.tasks import ranking

import pytest


@pytest.mark.parametrize("seed", range(20))
def test_best_of_k_is_the_mean_over_all_choices(seed):
    rng = random.Random(seed)
    N = rng.randint(1, 8)
    ranked = [rng.random() < 0.5 for _ in range(N)]  # the best first
    for k in range(1, N + 1):
        choices = list(itertools.combinations(range(N), k))
        wanted = sum(ranked[min(choice)] for choice in choices) / len(choices)
        assert ranking.best_of_k(ranked, k) == pytest.approx(wanted)


def test_the_first_of_equally_frequent_answers_is_the_majoritys():
    assert ranking.majority(["7", None, "8", "8", "7", None, None], [True, *[False] * 6]) is True
    assert ranking.majority(["8", "7"], [False, True]) is False
    assert ranking.majority([None, None], [True, True]) is False


def solutions(*rows: tuple) -> list[dict]:
    return [{"solution": rf"\boxed{{{answer}}}", "right": right} for answer, right in rows]


def test_figures_of_two_questions_by_hand():
    rows = solutions(("1", True), ("2", False), ("2", False))  # scores .9 .1 .2
    rows += solutions(("5", True), ("5", True), ("6", False))  # scores .3 .3 .3
    figures = ranking.ranking_figures(rows, [0.9, 0.1, 0.2, 0.3, 0.3, 0.3], 3)
    best = (2 / 3 + 1) / 2  # of the first question's pairs, the two with the right one; all others
    agreement = (1 + 1 + 0.5 + 0.5) / 4  # .9 is above both wrong ones; .3 are as high as theirs
    assert figures == pytest.approx({
        "generator/accuracy": 3 / 6, "co/majority": 1 / 2, "co/best_of_2": best,
        "co/best_of_3": 1.0, "co/oracle": 1.0, "verifier/rank_agreement": agreement,
    })  # fmt: skip


def test_an_answer_in_several_spellings_is_one_and_an_empty_box_is_none():
    rows = solutions(("50", True), ("050", True), ("50.0", True), ("7", False), ("7", False))
    assert ranking.ranking_figures(rows, [0.0] * 5, 5)["co/majority"] == 1
    rows = solutions(("", False), (" ", False), ("50", True))
    assert ranking.ranking_figures(rows, [0.0] * 3, 3)["co/majority"] == 1


def test_one_right_solution_is_enough_for_the_oracle_and_none_leaves_no_pairs():
    figures = ranking.ranking_figures(solutions(("1", True), ("2", False)), [0.0, 1.0], 2)
    assert figures["co/oracle"] == 1 and figures["verifier/rank_agreement"] == 0
    figures = ranking.ranking_figures(solutions(("1", False), ("2", False)), [0.0, 1.0], 2)
    assert figures["co/oracle"] == 0 and "verifier/rank_agreement" not in figures
