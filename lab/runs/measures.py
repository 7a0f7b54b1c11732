"""Measures of a run, and their interval over seeds: Student's 95 % interval of the mean."""

import math
import statistics
from collections.abc import Callable
from functools import partial

from scipy import stats

WINDOW = 5  # steps over which accuracy in training is averaged before it counts as reached


# ------------------------------------------------------------------ measures of one run
def measure(text: str, run: dict) -> float:
    """The value of a measure, written as in experiments.toml:

    last:KEY, after:KEY      a held-out figure after training (`after` has no value before it)
    first:KEY                the same before training
    mean:KEY, end:N:KEY      a metric's mean over all steps that have it, over the last N of them
    needed:LEVEL:UNIT:KEY    what it takes until an accuracy in training reaches a level, in
    whole:UNIT:KEY           `steps`, `tokens` or a running count; what the whole run takes
    """
    kind, *given, key = text.split(":")
    return MEASURES[kind](run, key, *given)


def last(run: dict, key: str, at: int = -1) -> float:
    return run["evaluations"][at].get(f"eval/{key}", math.nan)


def end(run: dict, key: str, steps: str = "") -> float:
    values = [step[key] for step in having(run, key)][-int(steps or 10**9) :]
    return statistics.mean(values) if values else math.nan


def having(run: dict, key: str) -> list[dict]:
    """A run's steps that have a metric. In older runs of tango.py a verifier's step has
    generator/accuracy, too: what is now verifier/judged_right. Only the generator's own steps,
    which have an alpha, count.
    """
    steps = run["steps"]
    if key.startswith("generator/") and any("co/alpha" in step for step in steps):
        steps = [step for step in steps if "co/alpha" in step]
    return [step for step in steps if key in step]


def needed(run: dict, key: str, level: str, unit: str) -> float:
    """Until the moving average of a metric first reaches the level; infinite if it never does.
    Tokens are those that all players sampled in all steps so far. Training questions are new in
    each step, and answered before they are trained on.
    """
    values, tokens, own = [], 0, having(run, key)
    for step in run["steps"]:
        tokens += step.get("co/sampled_tokens", 0)
        if step not in own:
            continue
        values.append(step[key])
        recent = values[-WINDOW:]
        if len(recent) == WINDOW and statistics.mean(recent) >= float(level):
            return {"steps": len(values), "tokens": tokens}.get(unit) or step[unit]
    return math.inf


def whole(run: dict, key: str, unit: str) -> float:
    if unit == "tokens":
        return sum(step.get("co/sampled_tokens", 0) for step in run["steps"])
    own = having(run, key)
    return len(own) if unit == "steps" else own[-1][unit]


MEASURES: dict[str, Callable] = {"last": last, "after": last, "first": partial(last, at=0)}
MEASURES |= {"mean": end, "end": end, "needed": needed, "whole": whole}
OF_STEPS = ("mean", "end", "needed", "whole")


# ------------------------------------------------------------------ over seeds
def interval(values: list[float]) -> tuple[float, float, float]:
    """(mean, low, high); one value has no interval."""
    middle = statistics.mean(values)
    if len(values) < 2:
        return middle, math.nan, math.nan
    if not (error := stats.sem(values)):
        return middle, middle, middle
    return middle, *map(float, stats.t.interval(0.95, len(values) - 1, middle, error))
