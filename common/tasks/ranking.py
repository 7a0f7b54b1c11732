"""N solutions of each held-out question, ranked by a verifier: what its favourite is worth, beside
the majority's answer, a pick at random, and an oracle.
"""

import math
from collections import Counter

from common.core.lists import chunk, mean
from common.tasks.answers import final_answer, in_one_form


def ranking_figures(solutions: list[dict], scores: list[float], N: int) -> dict[str, float]:
    """
    Args:
        solutions: rows {solution, right}, the N of a question adjacent.
        scores: the verifier's of each; higher is better.

    Returns:
        generator/accuracy       share of all solutions that are right
        co/majority              how often the most frequent answer is right
        co/best_of_k             how often the best of k is right, for k = 2, 4, 8, 16, 64 and N
        co/oracle                how often any of the N is right
        verifier/rank_agreement  how often, of a right and a wrong solution of one question, the
                                 right one scores higher; left out where there is no such pair
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
    """How often the best of k solutions is right, over all choices of k from the N: the estimate of
    V-STaR (arXiv:2402.06457).

    ranked: whether each solution is right, the one with the highest score first.

    >>> best_of_k([False, True, True], 2)  # of 01, 02 and 12 the first is the best
    0.3333333333333333
    """
    # SUM over i = 0 .. N - k of C(N - i - 1, k - 1) right_i / C(N, k): the solution at place i is
    # the best of a choice if the k - 1 others come from the N - i - 1 places behind it
    N = len(ranked)
    best = [math.comb(N - i - 1, k - 1) * right for i, right in enumerate(ranked[: N - k + 1])]
    return sum(best) / math.comb(N, k)


def best_first(right: list[bool], scores: list[float]) -> list[bool]:
    """By falling score; of equal scores the first comes first."""
    return [right[i] for i in sorted(range(len(right)), key=lambda i: -scores[i])]


def majority(answers: list[str | None], right: list[bool]) -> bool:
    """Whether the most frequent answer is right; of equally frequent ones the first counts."""
    counts = Counter(answer for answer in answers if answer is not None)
    return bool(counts) and right[answers.index(counts.most_common(1)[0][0])]


def pairs_in_order(right: list[bool], scores: list[float]) -> list[float]:
    """For each pair of a right and a wrong solution: 1 if the right one scores higher, 1/2 if they
    score the same, else 0.
    """
    good = [score for score, z in zip(scores, right) if z]
    bad = [score for score, z in zip(scores, right) if not z]
    return [float(g > b) + 0.5 * (g == b) for g in good for b in bad]
