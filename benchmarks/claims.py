"""Measures of a run, intervals over seeds, and the claims of claims.toml that are made of them.

Variants are compared seed by seed. An interval is Student's 95 % interval of the mean over seeds,
of the paired difference, or of the paired ratio (of its logarithm). A comparison whose interval
contains "no difference" is called not separated. Many comparisons are made, and by chance one in
twenty of those without an effect looks separated; Holm's correction over all claims says which
remain.
"""

import math
import statistics
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

WINDOW = 5  # steps over which accuracy in training is averaged before it counts as reached


# ------------------------------------------------------------------ measures of one run
def measure(text: str, run: dict) -> float:
    """The value of a measure, written as in claims.toml and experiments.toml:

    last:KEY, after:KEY      a held-out figure after training (`after` has no value before it)
    first:KEY, gain:KEY      the same before training, and what training has added
    mean:KEY, end:N:KEY      a metric's mean over all steps that have it, over the last N of them
    needed:LEVEL:UNIT:KEY    what it takes until an accuracy in training reaches a level, in
    whole:UNIT:KEY           `steps`, `tokens` or a running count; what the whole run takes
    """
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
    own = having(run, key)
    return len(own) if unit == "steps" else own[-1][unit]


MEASURES: dict[str, Callable] = {"last": last, "after": last, "first": partial(last, at=0)}
MEASURES |= {"gain": gain, "mean": end, "end": end, "needed": needed, "whole": whole}
OF_STEPS = ("mean", "end", "needed", "whole")


# ------------------------------------------------------------------ over seeds
def outside(t: float, df: int) -> float:
    """P(|T| > t) of Student's t, by its finite sums for whole df (Abramowitz & Stegun 26.7.3-4)."""
    angle = math.atan(abs(t) / math.sqrt(df))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    term, total = (1.0, 0.0) if df % 2 == 0 else (math.cos(angle), 0.0)
    for k in range(df % 2, df - 1, 2):
        total, term = total + term, term * square * (k + 1) / (k + 2)
    within = sine * total if df % 2 == 0 else 2 / math.pi * (angle + sine * total)
    return 1 - within


def root(f: Callable, low: float, high: float) -> float:
    """Where a falling function crosses 0."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) > 0 else (low, middle)
    return middle


@cache
def student(df: int) -> float:
    """The two-sided 95 % quantile."""
    return root(lambda t: outside(t, df) - 0.05, 0, 100)


def interval(values: list[float]) -> tuple[float, float, float]:
    """(mean, low, high); one value has no interval."""
    middle = statistics.mean(values)
    if len(values) < 2:
        return middle, math.nan, math.nan
    half = student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return middle, middle - half, middle + half


def p_value(values: list[float]) -> float:
    """Of the hypothesis that their mean is 0."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return outside(statistics.mean(values) / error, len(values) - 1) if error else 0.0


def holm(p: list[float], m: int) -> list[float]:
    """p values, corrected for m comparisons: the k-th smallest times m - k + 1, none below a
    smaller one's, none above 1. Those of the m that are not given count as the largest.
    """
    corrected, most = [0.0] * len(p), 0.0
    for k, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        corrected[i] = most = min(1.0, max(most, p[i] * (m - k)))
    return corrected


def clopper_pearson(k: int, n: int) -> tuple[float, float]:
    """The exact 95 % interval of a share of which k of n were seen."""

    def at_most(k, p):
        return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))

    low = root(lambda p: at_most(k - 1, p) - 0.975, 0, 1) if k else 0.0
    high = root(lambda p: at_most(k, p) - 0.025, 0, 1) if k < n else 1.0
    return low, high


@dataclass
class Claim:
    """See claims.toml."""

    name: str
    experiment: str
    says: str
    measure: str
    variants: list[str]
    seeds: int
    steps: str
    control: str
    paper: str = "-"
    changed: str = ""

    @property
    def kind(self) -> str:
        """Of two variants, "ratio" (first / second) if the measure says what is needed, else
        "difference" (second - first). Of one, "gain", which is held against 0.
        """
        if len(self.variants) == 2:
            return "ratio" if self.measure.startswith("needed:") else "difference"
        return "gain"


def effects(claim: Claim, runs: list[dict[int, dict]]) -> tuple[dict[int, float], list, list[int]]:
    """(seed -> its difference, logarithm of its ratio, or figure; the values of each variant; how
    many of each never get there, for which all that they took stands in).

    Args:
        runs: for each variant of the claim, seed -> run. Of the claim's seeds those count for which
            all variants have a figure.
    """
    seeds = [s for s in range(claim.seeds) if all(s in found for found in runs)]
    values = [[measure(claim.measure, found[seed]) for seed in seeds] for found in runs]
    # a share of nothing, such as of the defects that a silent verifier claims, is no figure
    known = [i for i, of_seed in enumerate(zip(*values)) if not any(map(math.isnan, of_seed))]
    seeds, values = [seeds[i] for i in known], [[some[i] for i in known] for some in values]
    never = [sum(map(math.isinf, some)) for some in values]
    for some, found in zip(values, runs):  # a run that never gets there has taken at least this
        for i, value in enumerate(some):
            if math.isinf(value):
                _, _, unit, key = claim.measure.split(":")
                some[i] = whole(found[seeds[i]], key, unit)
    found = {
        "ratio": lambda a, b: math.log(a / b),
        "difference": lambda a, b: b - a,
    }.get(claim.kind, lambda a: a)
    return dict(zip(seeds, map(found, *values))), values, never


def result(claim: Claim, runs: list[dict[int, dict]], earlier: list[dict] = ()) -> dict | None:
    """A row of docs/evidence/summary.json; None before every variant has a run.

    Args:
        runs: see `effects`
        earlier: an earlier set of runs of the same arguments. `pooled` is the interval over seeds
            of the mean of both sets, because two runs of one seed are not two seeds.
    """
    found, values, never = effects(claim, runs)
    if not found:
        return None
    ours, low, high = spread(claim, list(found.values()))
    neutral = 1.0 if claim.kind == "ratio" else 0.0
    apart = low > neutral or high < neutral
    verdict = "separated" if apart else "not separated"
    before = effects(claim, earlier)[0] if earlier and all(earlier) else {}
    both = [statistics.mean([found[s], before[s]]) for s in found if s in before]
    return {
        "claim": claim.name,
        "says": claim.says,
        "paper": claim.paper,
        "ours": _plain(ours),
        "low": _plain(low),
        "high": _plain(high),
        "kind": claim.kind,
        "verdict": verdict,
        "p": p_value([*found.values()]) if len(found) > 1 else None,
        "seeds": len(found),
        "variants": claim.variants,
        "means": [_plain(statistics.mean(some)) for some in values],
        "never": never,
        "pooled": [*map(_plain, spread(claim, both)), len(both)] if both else None,
        "command": f"python benchmarks/evidence.py {claim.experiment}",
    }


def spread(claim: Claim, effects: list[float]) -> tuple[float, float, float]:
    """(mean, low, high) of effects, of ratios the geometric mean."""
    found = interval(effects)
    return tuple(map(math.exp, found)) if claim.kind == "ratio" else found


def corrected(rows: list[dict]) -> list[dict]:
    """The rows with `holm`: their p values, corrected for the family in claims.toml."""
    tested = [row for row in rows if row["p"] is not None]
    p = holm([row["p"] for row in tested], SHOWN["family"])
    after = dict(zip((row["claim"] for row in tested), p))
    return [row | {"holm": after.get(row["claim"])} for row in rows]


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _read_claims() -> tuple[dict, list[Claim]]:
    """(what the README and docs/idea.md show, all claims)"""
    read = tomllib.loads((Path(__file__).parent / "claims.toml").read_text())
    shown, claims = read.pop("shown"), []
    for experiment, found in read.items():
        claims += [Claim(name, experiment, **given) for name, given in found.items()]
    return shown, claims


SHOWN, CLAIMS = _read_claims()
