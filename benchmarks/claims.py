"""Measures of a run, intervals over seeds, and the claims of claims.toml that are made of them.

Variants are compared seed by seed. An interval is Student's 95 % interval of the mean over seeds,
of the paired difference, or of the paired ratio (of its logarithm). A comparison whose interval
contains "no difference" is called not separated.
"""

import math
import statistics
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# two-sided 95 % quantiles of Student's t with n - 1 degrees of freedom
STUDENT = dict(zip(range(2, 11), (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)))
WINDOW = 5  # steps over which accuracy in training is averaged before it counts as reached


# ------------------------------------------------------------------ measures of one run
def measure(text: str, run: dict) -> float:
    """The value of a measure, written as in claims.toml and experiments.toml:

    last:KEY, after:KEY      a held-out figure after training (`after` has no value before it)
    first:KEY, gain:KEY      the same before training, and what training has added
    mean:KEY, end:N:KEY      a metric's mean over all steps that have it, over the last N of them
    needed:LEVEL:UNIT:KEY    what it takes until an accuracy in training reaches a level, in
    whole:UNIT:KEY           `steps`, `tokens` or a running count; what the whole run takes, also
                             in `hours`
    A - B                    the difference of two measures
    """
    if " - " in text:
        a, b = (measure(part, run) for part in text.split(" - "))
        return a - b
    kind, *given, key = text.split(":")
    return MEASURES[kind](run, key, *given)


def last(run: dict, key: str, at: int = -1) -> float:
    return run["evaluations"][at].get(f"eval/{key}", math.nan)


def gain(run: dict, key: str) -> float:
    return last(run, key) - last(run, key, 0)


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
    if unit == "hours":
        return run["seconds"] / 3600
    own = having(run, key)
    return len(own) if unit == "steps" else own[-1][unit]


MEASURES: dict[str, Callable] = {"last": last, "after": last, "first": partial(last, at=0)}
MEASURES |= {"gain": gain, "mean": end, "end": end, "needed": needed, "whole": whole}
OF_STEPS = ("mean", "end", "needed", "whole")


# ------------------------------------------------------------------ over seeds
def interval(values: list[float]) -> tuple[float, float, float]:
    """(mean, low, high); one value has no interval."""
    middle = statistics.mean(values)
    if len(values) < 2:
        return middle, math.nan, math.nan
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return middle, middle - half, middle + half


def ratios(above: list[float], below: list[float]) -> tuple[float, float, float]:
    """(geometric mean, low, high) of the paired ratios."""
    logs = [math.log(a / b) for a, b in zip(above, below)]
    return tuple(math.exp(x) for x in interval(logs))


@dataclass
class Claim:
    name: str
    experiment: str
    says: str
    measure: str
    variants: list[str]
    paper: str = "-"

    @property
    def kind(self) -> str:
        """Of two variants, "ratio" (first / second) if the measure says what is needed, else
        "difference" (second - first). Of one, "gain" if the measure is a difference, which is held
        against 0, else "mean".
        """
        if len(self.variants) == 2:
            return "ratio" if self.measure.startswith("needed:") else "difference"
        is_gain = self.measure.startswith("gain:") or " - " in self.measure
        return "gain" if is_gain else "mean"


def result(claim: Claim, runs: list[dict[int, dict]]) -> dict | None:
    """A row of docs/evidence/summary.json; None before every variant has a run.

    Args:
        runs: for each variant of the claim, seed -> run. Only seeds count for which all variants
            have a figure.
    """
    seeds = sorted(set.intersection(*(set(found) for found in runs)))
    values = [[measure(claim.measure, found[seed]) for seed in seeds] for found in runs]
    # a share of nothing, such as of the defects that a silent verifier claims, is no figure
    known = [i for i, of_seed in enumerate(zip(*values)) if not any(map(math.isnan, of_seed))]
    seeds, values = [seeds[i] for i in known], [[some[i] for i in known] for some in values]
    if not seeds:
        return None
    never = [sum(map(math.isinf, some)) for some in values]
    for some, found in zip(values, runs):  # a run that never gets there has taken at least this
        for i, value in enumerate(some):
            if math.isinf(value):
                _, _, unit, key = claim.measure.split(":")
                some[i] = whole(found[seeds[i]], key, unit)
    if claim.kind == "ratio":
        ours, low, high = ratios(*values)
    elif claim.kind == "difference":
        ours, low, high = interval([b - a for a, b in zip(*values)])
    else:
        ours, low, high = interval(values[0])
    neutral = 1.0 if claim.kind == "ratio" else 0.0
    apart = low > neutral or high < neutral
    verdict = "one variant" if claim.kind == "mean" else "separated" if apart else "not separated"
    return {
        "claim": claim.name,
        "says": claim.says,
        "paper": claim.paper,
        "ours": _plain(ours),
        "low": _plain(low),
        "high": _plain(high),
        "kind": claim.kind,
        "verdict": verdict,
        "seeds": len(seeds),
        "variants": claim.variants,
        "means": [_plain(statistics.mean(found)) for found in values],
        "never": never,
        "command": f"python benchmarks/evidence.py {claim.experiment}",
    }


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _read_claims() -> tuple[dict, list[Claim]]:
    """(what the README and docs/idea.md show, all claims)"""
    read, experiments = (
        tomllib.loads((Path(__file__).parent / f"{file}.toml").read_text())
        for file in ("claims", "experiments")
    )
    shown, claims = read.pop("shown"), []
    for experiment, found in read.items():
        default = {"measure": experiments[experiment]["columns"][0][1]}
        claims += [Claim(name, experiment, **(default | given)) for name, given in found.items()]
    return shown, claims


SHOWN, CLAIMS = _read_claims()
