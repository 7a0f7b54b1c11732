"""What evidence.py's runs show, in cells: a table and a few claims per paper; see
evidence_pages.py.

`TABLES[name](results)` is a table in Markdown, `CLAIMS[name](results)` a list of (claim, the
paper's figures, ours).
"""

import math
import statistics
from functools import partial

from evidence import EXPERIMENTS, read

# two-sided 95 % quantiles of Student's t with n - 1 degrees of freedom
STUDENT = dict(zip(range(2, 11), (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)))


def spread(values: list[float], percent: bool = True, digits: int = 1) -> str:
    """Mean, 95 % interval of the mean, and the range over seeds."""
    values = [value * (100 if percent else 1) for value in values]
    text, count = f"{statistics.mean(values):.{digits}f}", len(values)
    if count > 1:
        interval = STUDENT[count] * statistics.stdev(values) / math.sqrt(count)
        text += f" ± {interval:.{digits}f}"
    return f"{text} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


class Results:
    """The runs of an experiment, and the cells that tables and claims are made of."""

    def __init__(self, name: str):
        self.variants, self.runs = list(EXPERIMENTS[name].variants), read(name)["runs"]

    def of(self, variant: str) -> list[dict]:
        return [r for r in self.runs if r["variant"] == variant]

    def seed(self, variant: str, seed: int) -> dict:
        return next(r for r in self.of(variant) if r["seed"] == seed)

    def first(self, variant: str, key: str) -> str:
        """A held-out figure before training, over the seeds."""
        return spread([r["evaluations"][0][f"eval/{key}"] for r in self.of(variant)])

    def last(self, variant: str, key: str, missing: str = "-") -> str:
        """The same after training; `missing` if no run has one."""
        ends = [r["evaluations"][-1] for r in self.of(variant)]
        values = [end[f"eval/{key}"] for end in ends if f"eval/{key}" in end]
        return spread(values) if values else missing

    def rise(self, variant: str, key: str) -> str:
        """Before, of the first run, and after."""
        before = self.runs[0]["evaluations"][0][f"eval/{key}"]
        return f"{100 * before:.1f} → {self.last(variant, key)}"


def moving_average(curve: list[float], window: int) -> list[float]:
    return [statistics.mean(curve[max(0, i - window + 1) : i + 1]) for i in range(len(curve))]


# ------------------------------------------------------------------ tango
def tango_table(results: Results) -> str:
    """Figure 4's claim (GRPO's final accuracy after 3.3x fewer generator steps), the verifier's
    steps, and reward hacking.
    """
    columns = {
        "verifier/balanced_accuracy": "verifier: balanced accuracy",
        "verifier/tpr": "says CORRECT to right",
        "verifier/tnr": "says INCORRECT to wrong",
        "verifier/step_f1": "step F1",
    }
    start = [results.first("co-trained", key) for key in ("generator/accuracy", *columns)]
    rows = [["at the start", start[0], "", *start[1:], ""]]
    for variant in results.variants:
        plain = "GRPO, no verifier"
        runs = results.of(variant)
        ratios = [speed_up(results.seed(plain, r["seed"]), r) for r in runs]
        gaps = [gap for gap in map(accepted_minus_right, runs) if gap]
        rows.append(
            [
                variant,
                results.last(variant, "generator/accuracy"),
                ", ".join("never" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                *[results.last(variant, key) for key in columns],
                " → ".join(spread(list(values)) for values in zip(*gaps)) or "-",
            ]
        )
    header = [
        "variant",
        "held-out accuracy",
        "GRPO's generator steps / own, to GRPO's final training accuracy, per seed",
        *columns.values(),
        "verifier's accept rate minus true accuracy in training, first and last 5 generator steps",
    ]
    return markdown(header, rows)


def generator_steps(run: dict) -> list[dict]:
    """Not those in which the generator only writes for the verifier."""
    return [step for step in run["steps"] if "co/alpha" in step]


def speed_up(plain: dict, own: dict) -> float | None:
    """How many times fewer generator steps a run needs than plain GRPO, to plain GRPO's accuracy
    at its end. None: it never gets there.
    """
    target = statistics.mean(s["generator/accuracy"] for s in plain["steps"][-5:])
    reached = []  # the first step, from 1, at which the moving average is as high
    for steps in (plain["steps"], generator_steps(own)):
        averages = moving_average([s["generator/accuracy"] for s in steps], window=5)
        reached.append(next((i for i, a in enumerate(averages, start=1) if a >= target), None))
    return None if reached[1] is None else reached[0] / reached[1]


def accepted_minus_right(run: dict) -> list[float]:
    """The verifier's accept rate minus the true accuracy, averaged over the generator's first five
    steps and over its last five.
    """
    key = "co/verdict_minus_gold"
    gaps = [step[key] for step in generator_steps(run) if key in step]
    return [statistics.mean(gaps[:5]), statistics.mean(gaps[-5:])] if gaps else []


def tango_claims(results: Results) -> list[tuple]:
    plain, accuracy, balanced = "GRPO, no verifier", "generator/accuracy", "balanced_accuracy"
    ends = [results.last(variant, accuracy) for variant in ("co-trained", plain)]
    trained = ("co-trained", "co-trained, no class weights")
    weights = [results.last(variant, f"verifier/{balanced}") for variant in trained]
    frozen, alone = (f"reward from the verifier alone, {k}" for k in ("frozen", "co-trained"))
    gaps = {v: spread([accepted_minus_right(r)[1] for r in results.of(v)]) for v in (frozen, alone)}
    return [
        (
            "co-training against plain GRPO, equally many generator steps",
            "46.1 against 37.0",
            " against ".join(ends),
        ),
        (
            "step F1 of the verifier at T = 1, without step labels in RL; greedily it starts high",
            "rises",
            results.rise("co-trained", "verifier/step_f1"),
        ),
        (
            "its balanced accuracy, with and without class weights",
            "collapses without",
            " and ".join(weights),
        ),
        (
            "reward from a frozen verifier alone: accuracy; accept rate minus accuracy",
            "-",
            f"{results.rise(frozen, accuracy)}; {gaps[frozen]}",
        ),
        (
            "the same, verifier co-trained",
            "-",
            f"{results.last(alone, accuracy)}; {gaps[alone]}",
        ),
    ]


# ------------------------------------------------------------------ prime
def prime_table(results: Results) -> str:
    """The paper's figure 3a: samples to the baseline's final training reward, as a moving average
    over 10 steps. Paper: 2.5x fewer.
    """
    baseline = {}  # seed -> its final reward, and the samples until it was reached first
    for run in results.of("outcome only"):
        target = statistics.mean(step["policy/accuracy"] for step in run["steps"][-10:])
        baseline[run["seed"]] = (target, samples_to_reach(target, run["steps"]))
    rows = []
    for variant in results.variants:
        needed, ratios, drawn = [], [], []
        for seed, (target, samples) in sorted(baseline.items()):
            steps = results.seed(variant, seed)["steps"]
            own = samples_to_reach(target, steps)
            needed.append("never" if own == math.inf else f"{own:.0f}")
            ratios.append("never reached" if own == math.inf else f"{samples / own:.2f}")
            drawn.append(steps[-1]["co/samples"])
        accuracy = [results.last(variant, f"policy/{key}") for key in ("accuracy", "greedy")]
        counts = [spread(drawn, False, 0), ", ".join(needed), ", ".join(ratios)]
        rows.append([variant, *accuracy, *counts])
    header = ["variant", "held-out accuracy, T = 1", "the same, greedy", "samples drawn in all"]
    header += ["samples to the baseline's final reward", "ratio baseline / variant, per seed"]
    return markdown(header, rows)


def samples_to_reach(target: float, steps: list[dict], window: int = 10) -> float:
    """Samples drawn when the moving average of the unfiltered training accuracy first reaches the
    target; inf if never.
    """
    averages = moving_average([step["policy/accuracy"] for step in steps], window)
    reached = [s["co/samples"] for s, average in zip(steps, averages) if average >= target]
    return reached[0] if reached else math.inf


def prime_claims(results: Results) -> list[tuple]:
    ends = [results.last(variant, "policy/accuracy") for variant in ("PRIME", "outcome only")]
    claim = "token rewards against outcome only, held-out accuracy"
    return [(claim, "41.0 against 36.9 (38.1 by its own row)", " against ".join(ends))]


# ------------------------------------------------------------------ gar
def gar_table(results: Results) -> str:
    """The paper's table 4, with what the discriminator says at the end."""
    rows_of_table_4 = {
        "2": "56.3 / 40.7",
        "4": "58.6 / 42.0",
        "5": "59.4 / 42.8",
        "6": "60.2 / 43.3",
        "7": "61.3 / 44.3",
    }
    slices = ("reference", "generated_right", "generated_wrong", "sound", "unsound")
    keys = ["reasoner/accuracy", "reasoner/greedy", *[f"discriminator/yes_{s}" for s in slices]]
    rows = [
        [variant, rows_of_table_4[variant[0]], *[results.last(variant, key) for key in keys]]
        for variant in results.variants
    ]
    header = ["row", "paper: AIME24 / 25", "held-out accuracy, T = 1", "the same, greedy"]
    return markdown(header + [f"P({s.replace('_', ' ')} → YES)" for s in slices], rows)


def gar_claims(results: Results) -> list[tuple]:
    variants = ("7 trained, both", "2 GRPO, exact match only")
    ends = " against ".join(results.last(variant, "reasoner/accuracy") for variant in variants)
    return [("trained discriminator against plain GRPO", "61.3 against 56.3 (AIME24)", ends)]


# ------------------------------------------------------------------ cure
def cure_table(results: Results) -> str:
    """Figure 6b's claim: the precision reward ends with lower p01 and p00 than the simple one;
    and what best-of-n gains.
    """
    columns = {
        "coder/accuracy": "right programs",
        "tester/accuracy": "right tests",
        "tester/p01": "p01",
        "tester/p00": "p00",
        "tester/p01_base": "p01, base's programs",
        "tester/p00_base": "p00, base's programs",
        "co/precision": "reward precision, base's programs",
        "co/best_of_4": "best of 4 by 4 tests",
        "co/best_of_16": "best of 16 by 16 tests",
    }
    paper = {"precision": "36.5 / 9.1", "simple reward": "42.2 / 14.7"}
    rows = [["at the start", *[results.first("precision", key) for key in columns], "-"]]
    for variant in results.variants:
        ends = [results.last(variant, key, missing="undefined") for key in columns]
        rows.append([variant, *ends, paper.get(variant, "-")])
    header = ["tester's reward", *columns.values(), "paper: p01 / p00 after 100 steps"]
    gaps = []
    for key in ("tester/p01_base", "tester/p00_base"):
        simple, precise = (
            {r["seed"]: r["evaluations"][-1][f"eval/{key}"] for r in results.of(variant)}
            for variant in ("simple reward", "precision")
        )
        differences = [precise[seed] - simple[seed] for seed in precise.keys() & simple.keys()]
        lower = f"lower in {sum(d < 0 for d in differences)} of {len(differences)}"
        gaps.append(f"{columns[key]}: {spread(differences)} points, {lower}")
    line = f"The precision reward minus the simple one, seed by seed. {'; '.join(gaps)}."
    return f"{markdown(header, rows)}\n{line}\n"


def cure_claims(results: Results) -> list[tuple]:
    def both(cell, variant, *keys):
        return "; ".join(cell(variant, key) for key in keys)

    rates = ("tester/p01_base", "tester/p00_base")
    only, accuracies = "precision, only the tester trained", ("coder/accuracy", "tester/accuracy")
    return [
        (
            "right programs; right tests",
            "+5.3; +37.8 points",
            both(results.rise, "precision", *accuracies),
        ),
        (
            "p01; p00: wrong programs of the base pass right tests; wrong ones",
            "36.5; 9.1 after 100 steps",
            both(results.rise, "precision", *rates),
        ),
        (
            "the same with the simple reward",
            "42.2; 14.7",
            both(results.last, "simple reward", *rates),
        ),
        (
            "best of 4 programs by 4 tests, only the tester trained: programs; best of 4",
            "-",
            both(results.rise, only, "coder/accuracy", "co/best_of_4"),
        ),
    ]


# ------------------------------------------------------------------ spin
def spin_table(results: Results) -> str:
    """Table 2's claim: better with every iteration, where continued SFT is not."""
    nats, rows = partial(spread, percent=False, digits=2), []
    for variant in results.variants:
        evaluations = [r["evaluations"] for r in results.of(variant)]
        for key, title, cell in (
            ("accuracy", "accuracy, T = 1", spread),
            ("greedy", "accuracy, greedy", spread),
            ("logp_human", "log-likelihood of human answers", nats),
        ):
            points = [[e[f"eval/player/{key}"] for e in step] for step in zip(*evaluations)]
            rows.append([variant, title, *map(cell, points)])
    iterations = [f"after iteration {t}" for t in range(4)]
    return markdown(["variant", "held out", "start", *iterations], rows)


def spin_claims(results: Results) -> list[tuple]:
    ends = [results.last(variant, "player/accuracy") for variant in ("SPIN", "continued SFT")]
    claim = "self-play against continued SFT on the same answers"
    return [(claim, "rises; does not", " against ".join(ends))]


# ------------------------------------------------------------------ mae
OPINION = {
    "co/flattery": "judged minus true accuracy (flattery)",
    "judge/balanced_accuracy": "judge: balanced accuracy",
    "judge/rank_agreement": "judge: rank agreement with the truth (AUC)",
    "judge/unparsable": "judgements without a score",
    "proposer/answerable": "proposals with an answer",
}


def mae_table(results: Results) -> str:
    """Table 6's rows, and whether the model's opinion of itself follows the truth."""
    paper = {
        "all parts trained": "59.9",
        "no proposer training": "57.9",
        "no solver training": "57.8",
        "no judge training": "57.2",
        "no quality gate": "56.2",
    }
    keys = [key for key in OPINION if key != "judge/unparsable"]
    columns = {"solver/accuracy": "held-out accuracy, T = 1", "solver/greedy": "the same, greedy"}
    columns |= {key: OPINION[key] for key in keys}
    rows = [["at the start", *[results.first("all parts trained", key) for key in columns], "55.3"]]
    for variant in results.variants:
        ends = [results.last(variant, key) for key in columns]
        rows.append([variant, *ends, paper.get(variant, "-")])
    header = ["variant", *columns.values(), "paper: mean accuracy of 22 benchmarks"]
    return markdown(header, rows)


def mae_claims(results: Results) -> list[tuple]:
    trained = "all parts trained"
    accuracy = results.rise(trained, "solver/accuracy")
    opinion = results.rise(trained, "co/flattery")
    return [
        ("accuracy without any gold answer", "55.3 → 59.9", accuracy),
        ("its opinion of itself minus the truth", "not measured", opinion),
    ]


def collapse_table(results: Results) -> str:
    """What is left after too high a learning rate: mae's own table, and where a run gave up."""
    columns = {"solver/accuracy": "held-out accuracy, T = 1", **OPINION}
    del columns["judge/balanced_accuracy"]
    rows = [["at the start", *[results.first(results.variants[0], key) for key in columns], "-"]]
    for variant in results.variants:
        ended = ", ".join(str(r["evaluations"][-1]["step"]) for r in results.of(variant))
        rows.append([variant, *[results.last(variant, key) for key in columns], ended])
    return markdown(["variant", *columns.values(), "last step, per seed"], rows)


def collapse_claims(results: Results) -> list[tuple]:
    keys = ("solver/accuracy", "co/flattery")
    ends = "; ".join(results.last("all parts trained", key) for key in keys)
    return [("four times the learning rate: accuracy; flattery", "-", ends)]


TABLES = {
    "tango": tango_table,
    "prime": prime_table,
    "gar": gar_table,
    "spin": spin_table,
    "cure": cure_table,
    "mae": mae_table,
    "mae_collapse": collapse_table,
}
CLAIMS = {
    "tango": tango_claims,
    "prime": prime_claims,
    "gar": gar_claims,
    "cure": cure_claims,
    "spin": spin_claims,
    "mae": mae_claims,
    "mae_collapse": collapse_claims,
}
