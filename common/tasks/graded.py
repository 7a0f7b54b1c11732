"""The truth about solutions that are graded 0, 0.5 or 1, and about analyses that say which of their
steps are faulty.
"""

from collections.abc import Callable

from common.core.lists import mean
from common.tasks.answers import is_correct, split_steps
from common.tasks.equations import equations_hold
from common.tasks.verdicts import Analysis
from common.tiny.tasks import faulty_steps

LEAST = 10  # analyses of solutions with the same true score that make a class


def truth_of(row: dict, solution: str) -> tuple[float, list[int] | None]:
    """(score, numbers of the faulty steps) of a solution of the row's question: 0 the answer is
    wrong, 0.5 it is right, but a step is not, 1 all is right.

    Of embedded questions every faulty step is known. Of others a step is faulty if an equation in
    it is false; where a wrong answer without such a step went wrong nobody knows: None.
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
    """The score of an analysis: 1 if all claimed defects are real, 0.5 if some are, else 0.

    Trap, and DeepSeekMath-V2's: an honest "none" about a wrong solution is worth 1. Only the
    analysis's score is wrong then.
    """
    real = [number in faulty for number in defects]
    if all(real):
        return 1.0
    return 0.5 if any(real) else 0.0


def analysis_metrics(
    rows: list[dict], analyses: list[Analysis | None], quality: Callable
) -> dict[str, float]:
    """Analyses, None where unreadable, against the truth about the rows' solutions.

    Args:
        rows: with truth and faulty, see `truth_of`.
        quality: (analysis, its true score) -> what it is worth.

    Returns:
        balanced_accuracy: share of right scores, the mean over the true scores that at least LEAST
            solutions have: one of one or two would count as much as all others. Where none has as
            many it is the share among all.
        claims_real: share of the claimed defects that are real.
        defects_found: share of the faulty steps that are claimed.
        analysis_quality: mean quality, 0 for an unreadable one.
        The last three leave out solutions whose faulty steps nobody knows; a share of nothing is
        left out.
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
