"""The truth about solutions that are graded 0, 0.5 or 1, and about analyses that say which steps of
a solution are faulty.
"""

from collections.abc import Callable

from common.core.lists import mean
from common.tasks.answers import is_correct, split_steps
from common.tasks.equations import equations_hold
from common.tasks.verdicts import Analysis
from common.tiny.tasks import faulty_steps

LEAST = 10  # a true score with as many analyses is a class of its own in the metrics


def truth_of(row: dict, solution: str) -> tuple[float, list[int] | None]:
    """Returns (score, numbers of the faulty steps) of a solution of the row's question. The score
    is 0 if the answer is wrong, 0.5 if it is right and a step is faulty, and 1 if all is right.

    For questions of common/tiny every faulty step is known. For other questions a step is faulty if
    an equation in it is false. If the answer is wrong and no equation is false, nobody knows which
    step is faulty, and the numbers are None.
    """
    steps = split_steps(solution)
    right = is_correct(solution.partition("<answer>")[2], row["answer"])
    faulty = faulty_steps(row["question"], steps)
    if faulty is None:
        faulty = [k for k, step in enumerate(steps, start=1) if not equations_hold(step)]
        if not right and not faulty:
            return 0.0, None
    if not right:
        return 0.0, faulty
    return 0.5 if faulty else 1.0, faulty


def meta_truth(defects: tuple[int, ...], faulty: list[int]) -> float:
    """Returns the score of an analysis: 1 if all claimed defects are real, 0.5 if some are, else 0.

    Trap, which DeepSeekMath-V2 has too: an analysis that claims no defect of a wrong solution is
    worth 1. Only the score that it gives is wrong.
    """
    real = [number in faulty for number in defects]
    if all(real):
        return 1.0
    return 0.5 if any(real) else 0.0


def analysis_metrics(
    rows: list[dict], analyses: list[Analysis | None], quality: Callable
) -> dict[str, float]:
    """Compares analyses with the truth about the solutions of the rows.

    Args:
        rows: they have `truth` and `faulty`, see `truth_of`.
        analyses: an analysis for each row; None if it cannot be read.
        quality: (analysis, its true score) -> what it is worth.

    Returns:
        balanced_accuracy: the share of right scores, as a mean over the true scores that at least
            LEAST solutions have. (A true score that a single solution has would count as much as
            all others.) If no true score has as many, it is the share among all solutions.
        claims_real: the share of the claimed defects that are real.
        defects_found: the share of the faulty steps that are claimed.
        analysis_quality: the mean quality; an analysis that cannot be read has 0.
        The last three leave out solutions whose faulty steps nobody knows. A share of nothing is
        not in the result.
    """
    hits = {}
    for row, a in zip(rows, analyses):
        hits.setdefault(row["truth"], []).append(a is not None and a.score == row["truth"])
    classes = [mean(of_score) for of_score in hits.values() if len(of_score) >= LEAST]
    everything = [hit for of_score in hits.values() for hit in of_score]
    known = [(row["faulty"], a) for row, a in zip(rows, analyses) if row["faulty"] is not None]
    shares = {
        "claims_real": [k in faulty for faulty, a in known if a for k in a.defects],
        "defects_found": [bool(a) and k in a.defects for faulty, a in known for k in faulty],
        "analysis_quality": [
            quality(a, meta_truth(a.defects, faulty)) if a else 0.0 for faulty, a in known
        ],
    }
    return {
        "balanced_accuracy": mean(classes or everything),
        **{name: mean(values) for name, values in shares.items() if values},
    }
