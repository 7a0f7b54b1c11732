"""How co-training goes wrong: the metrics that show it, and the sentences about them."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Health(NamedTuple):
    """A panel of the page, and what is said of a metric in it that stands out."""

    metrics: str  # a regular expression
    hint: str  # below the panel's title
    stands_out: Callable[[float, float], bool]  # of the means of its last and its first third
    sentence: str


# The order is that of the page. The bounds are rules of thumb: they say where to look first.
HEALTH = {
    "accepts right, rejects wrong": Health(
        ".+/(tpr|tnr)",
        "true-positive and true-negative rate; a lazy verifier has only one of them",
        lambda now, _: now < 0.1,
        "{metric} is only {now:.0%}: the {player} has one opinion on nearly everything.",
    ),
    "says yes": Health(
        ".+/(says_correct|says_yes)",
        "far from the share of right answers: one opinion on everything",
        lambda now, _: now < 0.05 or now > 0.95,
        "The {player} says yes to {now:.0%} of everything.",
    ),
    "reward minus gold": Health(
        ".+/(verdict_minus_gold|flattery|rewarded_minus_true)",
        "above 0 verdicts or rewards are better than the answers deserve",
        lambda now, _: now > 0.25,
        "Verdicts or rewards are {now:.2f} above the truth on average ({metric}).",
    ),
    "can be read": Health(
        ".+/parsed",
        "share of what a player writes",
        lambda now, _: now < 0.8,
        "Only {now:.0%} of what the {player} writes can be read.",
    ),
    "cannot be read": Health(
        ".+/(silent|unparsable|unreadable)",
        "share of what a player writes",
        lambda now, _: now > 0.2,
        "{now:.0%} of what the {player} writes cannot be read.",
    ),
    "advantages of 0": Health(
        ".+/frac_advantage_zero",
        "share of the completions that teach nothing, as where all rewards of a group are the same",
        lambda now, _: now > 0.8,
        "{now:.0%} of the {player}'s completions have advantages of 0; they teach nothing.",
    ),
    "gradient norm": Health(
        ".+/grad_norm",
        "before clipping; 0 where all advantages are 0",
        lambda now, _: now == 0,
        "The {player}'s gradient was zero in its last {count} updates; it learns nothing.",
    ),
    "entropy": Health(
        ".+/entropy",
        "nats per token; near 0 nothing new is tried",
        lambda now, before: now < 0.1 * before,
        "The {player}'s entropy fell from {before:.2g} to {now:.2g} nats per token; it tries "
        "hardly anything new.",
    ),
    "KL to the base": Health(
        ".+/kl",
        "nats per token",
        lambda now, _: now > 1,
        "The {player} is {now:.1f} nats per token away from the base.",
    ),
    "cut at the length limit": Health(
        ".+/completions/clipped_ratio",
        "share of completions; they are rewarded and trained on as written, no end token is added",
        lambda now, _: now > 0.2,
        "{now:.0%} of the {player}'s completions are cut at the length limit.",
    ),
}


def sentences(rows: list[dict]) -> list[str]:
    """Returns a sentence for each metric of metrics.jsonl that stands out in the last third of its
    values in training. If it has fewer than twelve values, the last three count. About a metric
    with one or two values there is no sentence.
    """
    evaluations = [row for row in rows if is_evaluation(row)] or [{}]
    values = defaultdict(list)  # metric -> its values in training
    for row in rows:
        if not is_evaluation(row):
            for metric, value in row.items():
                if is_number(value):
                    values[metric].append(value)
    found = []
    for health in HEALTH.values():
        for metric, y in values.items():
            if not re.fullmatch(health.metrics, metric) or len(y) < 3:
                continue
            third = max(3, len(y) // 3)  # of each player's own values: its turns may be rare
            now, before = (sum(part) / third for part in (y[-third:], y[:third]))
            if health.stands_out(now, before):
                known = {"metric": metric, "player": player_of(metric), "count": third}
                found.append(health.sentence.format(now=now, before=before, **known))
    for key, now in evaluations[-1].items():
        before = evaluations[0].get(key)
        known = is_number(before) and is_number(now)
        if known and key.endswith("accuracy") and before - now > 0.05:
            found.append(f"Held out, {key[5:]} fell from {before:.2f} to {now:.2f}.")
    return found


MEANINGS = {
    "tpr": "share of right ones that are accepted",
    "tnr": "share of wrong ones that are rejected",
    "balanced_accuracy": "mean of the shares of right and of wrong ones judged right",
    "says_correct": "share that is accepted, right or wrong",
    "step_f1": "of finding wrong steps",
    "parsed": "share that could be read",
    "greedy": "accuracy of the likeliest answer",
}
"""What held-out metrics are whose names do not say it, by what follows the player's name."""


# ------------------------------------------------------------------ the result
def main_metrics(curves: dict[str, list[str]], found: Iterable[str]) -> list[str]:
    """Returns the first metric of each panel of CURVES that was found; all metrics, if none was."""
    panels = [[key for key in keys if key in found] for keys in curves.values()]
    return [keys[0] for keys in panels if keys] or [*found]


def highest_of(evaluations: list[dict], key: str) -> tuple[float, int]:
    """Returns the highest value of a metric, and the first step that has it."""
    row = max((row for row in evaluations if is_number(row.get(key))), key=lambda row: row[key])
    return row[key], row["step"]


def result(rows: list[dict], curves: dict[str, list[str]]) -> str:
    """Returns a sentence on how the main metrics have changed on held-out questions; "" before
    there are two evaluations.
    """
    evaluations = [row for row in rows if is_evaluation(row)] or [{}]
    first, last = evaluations[0], evaluations[-1]
    keys = [k for k in last if is_number(last[k]) and is_number(first.get(k))]
    keys = [key[5:] for key in keys if key.startswith("eval/")]
    said = []
    for key in main_metrics(curves, keys)[:3] if last is not first else ():
        before, now = first[f"eval/{key}"], last[f"eval/{key}"]
        verb = "rose" if now > before else "fell"
        line = f"{key} {verb} from {before:.3f} to {now:.3f}"
        line = line if abs(now - before) >= 0.0005 else f"{key} stayed at {now:.3f}"
        highest, step = highest_of(evaluations, f"eval/{key}")
        peak = f", after {highest:.3f} at step {step}" if highest > max(before, now) else ""
        said.append(line + peak)
    return f"On held-out questions, by step {last['step']}: {'; '.join(said)}." if said else ""


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def is_evaluation(row: dict) -> bool:
    return any(key.startswith("eval/") for key in row)


def player_of(metric: str) -> str:
    return metric.split("/")[0]
