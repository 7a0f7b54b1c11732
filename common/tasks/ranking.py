"""A verifier ranks N solutions of each held-out question. The figures compare its favourite with
the majority's answer, with a random choice, and with an oracle.
"""

import math
from collections import Counter

from common.core.lists import chunk, mean
from common.tasks.answers import final_answer, in_one_form


def ranking_figures(solutions: list[dict], scores: list[float], N: int) -> dict[str, float]:
    """Returns held-out figures of a ranking.

    Args:
        solutions: rows {solution, right}; the N solutions of a question are adjacent.
        scores: the verifier's score of each solution; a higher score is better.

    Returns:
        generator/accuracy       share of all solutions that are right
        co/majority              how often the most frequent answer is right
        co/best_of_k             how often the best of k is right, for k = 2, 4, 8, 16, 64 and N
        co/oracle                how often any of the N is right
        verifier/rank_agreement  how often a right solution scores higher than a wrong solution of
                                 the same question; left out if there is no such pair
    """
    answers = chunk([final_answer(row["solution"]) for row in solutions], N)  # (questions, N)
    answers = [in_one_form(its) for its in answers]
    right = chunk([row["right"] for row in solutions], N)
    scores = chunk(scores, N)
    figures = {
        "generator/accuracy": mean([mean(its) for its in right]),
        "co/majority": mean([majority(*its) for its in zip(answers, right)]),
    }
    ranked = [best_first(*its) for its in zip(right, scores)]
    for k in [k for k in (2, 4, 8, 16, 64) if k < N] + [N]:
        figures[f"co/best_of_{k}"] = mean([best_of_k(its, k) for its in ranked])
    figures["co/oracle"] = mean([any(its) for its in right])
    in_order = [x for its in zip(right, scores) for x in pairs_in_order(*its)]
    return figures | ({"verifier/rank_agreement": mean(in_order)} if in_order else {})


def best_of_k(ranked: list[bool], k: int) -> float:
    """Returns how often the best of k solutions is right, over all choices of k from the N. This is
    the estimate of V-STaR (arXiv:2402.06457).

    ranked: whether each solution is right, from the highest score to the lowest.

    >>> best_of_k([False, True, True], 2)  # solution 0 is the best of 01 and 02, and 1 of 12
    0.3333333333333333
    """
    # SUM over i = 0 .. N - k of C(N - i - 1, k - 1) right_i / C(N, k): the solution at place i is
    # the best of a choice if the k - 1 others come from the N - i - 1 places after it
    N = len(ranked)
    best = [math.comb(N - i - 1, k - 1) * right for i, right in enumerate(ranked[: N - k + 1])]
    return sum(best) / math.comb(N, k)


def best_first(right: list[bool], scores: list[float]) -> list[bool]:
    """Returns `right` in the order of falling scores; equal scores keep their order."""
    return [right[i] for i in sorted(range(len(right)), key=lambda i: -scores[i])]


def majority(answers: list[str | None], right: list[bool]) -> bool:
    """Whether the most frequent answer is right; of equally frequent answers the first counts."""
    counts = Counter(answer for answer in answers if answer is not None)
    return bool(counts) and right[answers.index(counts.most_common(1)[0][0])]


def pairs_in_order(right: list[bool], scores: list[float]) -> list[float]:
    """Returns a number for each pair of a right and a wrong solution: 1 if the right solution
    scores higher, 1/2 if the two scores are equal, else 0.
    """
    good = [score for score, z in zip(scores, right) if z]
    bad = [score for score, z in zip(scores, right) if not z]
    return [float(g > b) + 0.5 * (g == b) for g in good for b in bad]
