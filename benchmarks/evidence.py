"""The papers' claims in miniature, measured: python benchmarks/evidence.py prime gar

Every variant of an experiment runs on the embedded default with the same seeds, two runs at a time with one thread each.
docs/evidence/NAME.json keeps each finished run (held-out evaluations, and per step what the experiment compares); runs that
are there are not repeated, one that was interrupted goes on where it stopped. Tables and figures are made from these files
alone (`--tables-only` does just that): docs/evidence/NAME.md and .png, the results block of docs/NAME.md, and the README's.
"""

import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "evidence"


@dataclass
class Experiment:
    script: str
    arguments: str
    """of all variants"""
    variants: dict[str, str | tuple[str, str]]
    """name -> arguments, or (arguments, a line of Python that changes the imported script: for what is no switch of ours)"""
    kept: tuple[str, ...]
    """metrics kept of every step"""


ONLY_STEPS = "tango.alpha_at = lambda n, total, alpha: 1.0"  # A = A_step: the gold answer is no longer in the reward
NO_CODER_UPDATE = "cure.Cure.update = lambda self, batch: self.record(batch)"  # the trainer's own update is the tester's
NO_CLASS_WEIGHTS = "tango.class_weights = lambda labels, counts: (labels == labels).float()"  # 1 for every row

EXPERIMENTS = {
    "tango": Experiment(
        "tango.py",
        "--eval-every 0 --show-every 0",
        {
            "co-trained": "--steps 48",
            "frozen verifier": "--steps 21 --verifier frozen",
            "GRPO, no verifier": "--steps 21 --verifier none",
            "co-trained, no class weights": ("--steps 48", NO_CLASS_WEIGHTS),
            "reward from the verifier alone, frozen": ("--steps 21 --verifier frozen", ONLY_STEPS),
            "reward from the verifier alone, co-trained": ("--steps 48", ONLY_STEPS),
        },
        (
            "gen/accuracy",
            "ver/balanced_accuracy",
            "ver/tpr",
            "ver/tnr",
            "ver/says_correct",
            "co/verdict_minus_gold",
            "co/alpha",
        ),
    ),
    "prime": Experiment(
        "prime.py",
        "--steps 30 --eval-every 15 --show-every 0",
        {"PRIME": "", "outcome only": "--no-process-reward", "offline PRM": "--prm-update none"},
        ("pol/accuracy", "co/samples", "prm/accuracy", "prm/loss"),
    ),
    "gar": Experiment(
        "gar.py",
        "--steps 24 --lr 1e-3 --eval-every 0 --show-every 0",
        {
            "2 GRPO, exact match only": "--discriminator none",
            "4 fixed discriminator": "--discriminator frozen",
            "5 trained, R_a only": "--reward alignment",
            "6 trained, R_d only": "--reward adversarial",
            "7 trained, both": "",
        },
        ("rea/accuracy", "dis/yes_reference", "dis/yes_generated_right", "dis/yes_generated_wrong", "dis/spread_in_groups"),
    ),
    "cure": Experiment(
        "cure.py",
        "--show-every 0",
        {
            "precision": "",
            "simple reward": "--tester-reward simple",
            "precision, only the tester trained": ("", NO_CODER_UPDATE),
            "simple reward, only the tester trained": ("--tester-reward simple", NO_CODER_UPDATE),
        },
        ("cod/accuracy", "tes/accuracy", "tes/p01", "tes/p00", "co/tasks_with_a_right_program"),
    ),
    "spin": Experiment(
        "spin.py",
        "--steps 64 --eval-every 16 --show-every 0",
        {"SPIN": "", "continued SFT": "--opponent none", "opponent fixed at the SFT model": "--opponent sft"},
        ("pla/spin_loss", "pla/pair_accuracy", "pla/logp_human", "opp/equal_to_human"),
    ),
    "mae": Experiment(
        "mae.py",
        "--steps 64 --eval-every 16 --show-every 0",
        {
            "all parts trained": "",
            "no proposer training": "--no-train-proposer",
            "no solver training": "--no-train-solver",
            "no judge training": "--no-train-judge",
            "no quality gate": "--no-quality-gate",
            "judge paid for agreement with gold": "--judge-reward agreement",
        },
        ("sol/judged", "pro/difficulty", "pro/quality", "pro/accepted", "jud/unparsable", "co/questions"),
    ),
    "mae_collapse": Experiment(  # found on training questions with another seed: at this rate the judge is lost
        "mae.py",
        "--lr 4e-3 --steps 24 --eval-every 8 --show-every 0",
        {
            "all parts trained": "",
            "no judge training": "--no-train-judge",
            "judge paid for agreement with gold": "--judge-reward agreement",
        },
        ("sol/judged", "pro/accepted", "jud/unparsable"),
    ),
}


def run(name: str, variant: str, seed: int) -> dict:
    experiment = EXPERIMENTS[name]
    arguments, patch = experiment.variants[variant], None
    if isinstance(arguments, tuple):
        arguments, patch = arguments
    folder = ROOT / "runs" / "evidence" / name / re.sub(r"\W+", "_", variant) / str(seed)
    options = [*experiment.arguments.split(), *arguments.split(), "--seed", str(seed), "--out", str(folder)]
    module = experiment.script.removesuffix(".py")
    patched = f"import {module}; {patch}; import tyro; {module}.main(tyro.cli({module}.Args))"
    command = [sys.executable, "-c", patched] if patch else [sys.executable, experiment.script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command + options, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode and "steps in a row. The run ends" not in done.stderr:  # mae.py stops itself when it is hopeless
        raise RuntimeError(f"{name}, {variant}, seed {seed}:\n{done.stdout[-500:]}\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
    return {
        "variant": variant,
        "seed": seed,
        "seconds": rows[-1]["seconds"],
        "versions": json.loads((folder / "versions.json").read_text()),
        "evaluations": evaluations,
        "steps": [{"step": r["step"], **{k: r[k] for k in experiment.kept if k in r}} for r in rows if r not in evaluations],
    }


# two-sided 95 % quantiles of Student's t with n - 1 degrees of freedom
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def spread(values: list[float], percent: bool = True, digits: int = 1) -> str:
    """Mean, 95 % interval of the mean, and the range over seeds."""
    values = [value * (100 if percent else 1) for value in values]
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"
    return f"{text} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def final(results: list[dict], variant: str, key: str) -> list[float]:
    return [r["evaluations"][-1][key] for r in results if r["variant"] == variant and key in r["evaluations"][-1]]


def samples_to_reach(steps: list[dict], level: float, window: int = 10) -> float:
    """Samples drawn when the moving average of the unfiltered training accuracy first reaches `level`; inf if never."""
    for i in range(len(steps)):
        recent = [s["pol/accuracy"] for s in steps[max(0, i - window + 1) : i + 1]]
        if statistics.mean(recent) >= level:
            return steps[i]["co/samples"]
    return math.inf


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


# ------------------------------------------------------------------ a table per paper, from the kept runs alone
def tango_table(results: list[dict]) -> str:
    """Figure 4's claim (GRPO's final accuracy after 3.3x fewer generator steps), the verifier's steps, and reward hacking."""
    by_seed = {(r["variant"], r["seed"]): r for r in results}
    rows = []
    for variant in EXPERIMENTS["tango"].variants:
        runs = [r for r in results if r["variant"] == variant]
        ratios = []
        for r in runs:
            plain = [s["gen/accuracy"] for s in by_seed["GRPO, no verifier", r["seed"]]["steps"]]
            mine = [s["gen/accuracy"] for s in r["steps"] if "co/alpha" in s]  # the generator's steps
            level = statistics.mean(plain[-5:])
            reached = [first_at(curve, level, window=5) for curve in (plain, mine)]
            ratios.append("never" if reached[1] is None else f"{reached[0] / reached[1]:.2f}")
        cells = [spread(final(results, variant, "eval/gen/accuracy")), ", ".join(ratios)]
        for key in ("balanced_accuracy", "tpr", "tnr", "step_f1"):
            values = final(results, variant, f"eval/ver/{key}")
            cells.append(spread(values) if values else "-")
        gaps = [gap for gap in map(claimed_minus_true, runs) if gap]
        cells.append(" → ".join(spread(list(values)) for values in zip(*gaps)) or "-")
        rows.append([variant, *cells])
    before = [r["evaluations"][0] for r in results if r["variant"] == "co-trained"]
    names = ("gen/accuracy", "ver/balanced_accuracy", "ver/tpr", "ver/tnr", "ver/step_f1")
    start = [spread([e[f"eval/{name}"] for e in before]) for name in names]
    rows.insert(0, ["at the start", start[0], "", *start[1:], ""])
    header = ["variant", "held-out accuracy", "GRPO's generator steps / own, to GRPO's final training accuracy, per seed"]
    header += ["verifier: balanced accuracy", "says CORRECT to right", "says INCORRECT to wrong", "step F1"]
    return markdown([*header, "verifier's accept rate minus true accuracy in training, first and last 5 generator steps"], rows)


def first_at(curve: list[float], level: float, window: int) -> int | None:
    """The step (from 1) at which the moving average first reaches the level."""
    for i in range(len(curve)):
        if statistics.mean(curve[max(0, i - window + 1) : i + 1]) >= level:
            return i + 1
    return None


def claimed_minus_true(run_: dict) -> list[float]:
    """Accept rate minus accuracy on the generator's own steps, averaged over the first and the last five of them."""
    gaps = [s["co/verdict_minus_gold"] for s in run_["steps"] if "co/alpha" in s and "co/verdict_minus_gold" in s]
    return [statistics.mean(gaps[:5]), statistics.mean(gaps[-5:])] if gaps else []


def prime_table(results: list[dict]) -> str:
    """The paper's figure 3a: samples to the baseline's final training reward (10-step moving average). Paper: 2.5x fewer."""
    by_seed = {(r["variant"], r["seed"]): r for r in results}
    seeds = sorted({r["seed"] for r in results})
    rows, baseline = [], {}
    for seed in seeds:
        steps = by_seed["outcome only", seed]["steps"]
        level = statistics.mean(s["pol/accuracy"] for s in steps[-10:])
        baseline[seed] = (level, samples_to_reach(steps, level))
    for variant in EXPERIMENTS["prime"].variants:
        mine = [samples_to_reach(by_seed[variant, seed]["steps"], baseline[seed][0]) for seed in seeds]
        ratios = ", ".join("never reached" if m == math.inf else f"{baseline[s][1] / m:.2f}" for s, m in zip(seeds, mine))
        drawn = [by_seed[variant, seed]["steps"][-1]["co/samples"] for seed in seeds]
        reached = ", ".join("never" if m == math.inf else f"{m:.0f}" for m in mine)
        cells = [spread(final(results, variant, f"eval/pol/{key}")) for key in ("accuracy", "greedy")]
        rows.append([variant, *cells, spread(drawn, False, 0), reached, ratios])
    header = ["variant", "held-out accuracy, T = 1", "the same, greedy", "samples drawn in all"]
    return markdown([*header, "samples to the baseline's final reward", "ratio baseline / variant, per seed"], rows)


def gar_table(results: list[dict]) -> str:
    """The paper's table 4, with what the discriminator says at the end."""
    paper = {"2": (56.3, 40.7), "4": (58.6, 42.0), "5": (59.4, 42.8), "6": (60.2, 43.3), "7": (61.3, 44.3)}
    said = ("yes_reference", "yes_generated_right", "yes_generated_wrong", "yes_sound", "yes_unsound")
    rows = []
    for variant in EXPERIMENTS["gar"].variants:
        cells = [spread(final(results, variant, f"eval/rea/{key}")) for key in ("accuracy", "greedy")]
        for key in said:
            values = final(results, variant, f"eval/dis/{key}")
            cells.append(spread(values) if values else "-")
        rows.append([variant, f"{paper[variant[0]][0]} / {paper[variant[0]][1]}", *cells])
    header = ["row", "paper: AIME24 / 25", "held-out accuracy, T = 1", "the same, greedy"]
    return markdown(header + [f"P({key.removeprefix('yes_').replace('_', ' ')} → YES)" for key in said], rows)


def spin_table(results: list[dict]) -> str:
    """Table 2's claim: better with every iteration, where continued SFT is not."""
    rows = []
    for variant in EXPERIMENTS["spin"].variants:
        runs = [r["evaluations"] for r in results if r["variant"] == variant]
        for key, percent in (("accuracy", True), ("greedy", True), ("logp_human", False)):
            points = [[e[f"eval/pla/{key}"] for e in at] for at in zip(*runs)]
            rows.append([variant, key, *[spread(values, percent, 1 if percent else 2) for values in points]])
    names = {"accuracy": "accuracy, T = 1", "greedy": "accuracy, greedy", "logp_human": "log-likelihood of human answers"}
    rows = [[variant, names[key], *cells] for variant, key, *cells in rows]
    return markdown(["variant", "held out", "start", *[f"after iteration {t}" for t in range(4)]], rows)


def cure_table(results: list[dict]) -> str:
    """Figure 6b's claim: the precision reward ends with lower p01 and p00 than the simple one; best-of-n gains."""
    columns = {
        "cod/accuracy": "right programs",
        "tes/accuracy": "right tests",
        "tes/p01": "p01",
        "tes/p00": "p00",
        "tes/p01_base": "p01, base's programs",
        "tes/p00_base": "p00, base's programs",
        "co/precision": "reward precision, base's programs",
        "co/best_of_4": "best of 4 by 4 tests",
        "co/best_of_16": "best of 16 by 16 tests",
    }
    start = [r["evaluations"][0] for r in results if r["variant"] == "precision"]
    rows = [["at the start", *[spread([e[f"eval/{key}"] for e in start]) for key in columns], "-"]]
    for variant in EXPERIMENTS["cure"].variants:
        ends = [final(results, variant, f"eval/{key}") for key in columns]
        paper = {"precision": "36.5 / 9.1", "simple reward": "42.2 / 14.7"}.get(variant, "-")
        rows.append([variant, *[spread(values) if values else "undefined" for values in ends], paper])
    table = markdown(["tester's reward", *columns.values(), "paper: p01 / p00 after 100 steps"], rows)
    ends = {(r["variant"], r["seed"]): r["evaluations"][-1] for r in results}
    seeds = [seed for variant, seed in ends if variant == "precision" and ("simple reward", seed) in ends]
    gaps = []
    for key in ("tes/p01_base", "tes/p00_base"):
        both = [(ends["precision", seed][f"eval/{key}"], ends["simple reward", seed][f"eval/{key}"]) for seed in seeds]
        lower = sum(precision < simple for precision, simple in both)
        gaps.append(f"{columns[key]}: {spread([a - b for a, b in both])} points, lower in {lower} of {len(both)}")
    return f"{table}\nThe precision reward minus the simple one, seed by seed. {'; '.join(gaps)}.\n"


def collapse_table(results: list[dict]) -> str:
    """What is left after too high a learning rate: mae's own table, and where a run gave up."""
    rows = []
    for variant in EXPERIMENTS["mae_collapse"].variants:
        runs = [r["evaluations"] for r in results if r["variant"] == variant]
        if not rows:
            rows.append(["at the start", *[spread([e[0][f"eval/{key}"] for e in runs]) for key in COLLAPSE], "-"])
        ended = ", ".join(str(e[-1]["step"]) for e in runs)
        rows.append([variant, *[spread(final(results, variant, f"eval/{key}")) for key in COLLAPSE], ended])
    header = ["variant", "held-out accuracy, T = 1", "judged minus true accuracy (flattery)"]
    header += ["judge: rank agreement with the truth (AUC)", "judgements without a score", "proposals with an answer"]
    return markdown([*header, "last step, per seed"], rows)


COLLAPSE = ("sol/accuracy", "co/flattery", "jud/rank_agreement", "jud/unparsable", "pro/answerable")


def mae_table(results: list[dict]) -> str:
    """Table 6's rows, and whether the model's opinion of itself follows the truth."""
    paper = {"all": "59.9", "no proposer training": "57.9", "no solver training": "57.8", "no judge training": "57.2"}
    paper |= {"no quality gate": "56.2"}
    keys = ["sol/accuracy", "sol/greedy", "co/flattery", "jud/balanced_accuracy", "jud/rank_agreement", "pro/answerable"]
    rows = []
    for variant in EXPERIMENTS["mae"].variants:
        runs = [r["evaluations"] for r in results if r["variant"] == variant]
        if variant == "all parts trained":
            rows.append(["at the start", *[spread([e[0][f"eval/{key}"] for e in runs]) for key in keys], "55.3"])
        cells = [spread(final(results, variant, f"eval/{key}")) for key in keys]
        rows.append([variant, *cells, paper.get(variant, paper["all"] if variant.startswith("all") else "-")])
    header = ["variant", "held-out accuracy, T = 1", "the same, greedy", "judged minus true accuracy (flattery)"]
    header += ["judge: balanced accuracy", "judge: rank agreement with the truth (AUC)", "proposals with an answer"]
    return markdown([*header, "paper: mean accuracy of 22 benchmarks"], rows)


TABLES = {
    "tango": tango_table,
    "prime": prime_table,
    "gar": gar_table,
    "spin": spin_table,
    "cure": cure_table,
    "mae": mae_table,
    "mae_collapse": collapse_table,
}
NOTES = {
    "cure": "The paper, on far harder tasks: the precision reward ends with tests that let fewer wrong programs pass than the "
    "simple one's, right tests (p01) and wrong ones (p00). The embedded tasks are of two kinds, each with a way of its own for "
    "tests to be bad: products, where some inputs tell little, and sums with a negative number, whose sign both parts drop at "
    "first. So at the start wrong tests let wrong programs pass more often than two wrong digits agree by chance, one case of "
    "nine. For the base's programs, the same ones all along, both rates fall in every seed: p00 to about chance, since a wrong "
    "test is now one of wrong arithmetic, and p01 because there are right tests for sums now, which a dropped sign fails. On "
    "products p01 stays about where it was, though the testers choose weak inputs less often "
    "(docs/evidence/cure_inputs.md). Of the coder's programs of now hardly any is wrong in the end: the means of their rates "
    "fall, too, but single seeds end above the start. Between the rewards the difference has the paper's sign and is small: "
    "see the line below the table. "
    "Where only the tester is trained the coder, on the same adapter, gains some, and the program that the tests "
    "pick of four is right far more often.",
    "mae": "The paper: each part is needed, and without the quality gate training hurts. All numbers are against gold answers "
    "that training never sees, but for the last row's judge. Here the solver's own training and the gate matter as in the "
    "paper; the judge's training does not help: it is paid for its format, which the embedded model has, and moves the one "
    "adapter for nothing. Rows without a trained part can collapse, as a thin line does in the figure: the judge loses its "
    "judgement, its opinion rises above the truth, and accuracy falls below the start. Paying it for being right, which the "
    "paper does not, helps most, and no such run collapsed.",
    "mae_collapse": "Four times the default learning rate: accuracy falls below the start, the model's opinion of itself rises "
    "far above the truth, and the judge knows no more than chance. At this rate neither leaving out the judge's training nor "
    "paying it for being right prevents it. When the judgements have lost their scores "
    "for three steps, a run stops itself, at the step in the last column.",
    "tango": "The paper: GRPO's final accuracy in 3.3x fewer steps of the generator, and a verifier that learns to judge steps "
    "without step labels; without class weights the verifier collapses. Here the verifier does learn to judge steps. But all "
    "generators are nearly perfect after 21 steps, so that none reaches GRPO's last accuracy sooner, and the verifier does not "
    "collapse: the embedded generator is right often enough from the start. The last two variants take the gold answer out of "
    "the generator's reward (alpha = 1). A frozen verifier is then a worse teacher than a co-trained one; it is not gamed, for "
    "its accept rate stays below the truth.",
    "prime": "The paper reports a ratio of 2.5. An offline PRM that was never trained is the reference: its process reward is "
    "zero, and the row repeats the baseline.",
    "gar": "The paper's table 4: each row better than the one before. Here plain GRPO is soon nearly perfect, and no row is "
    "better. What the discriminator says does differ: agreement alone drifts to YES for everything, in some runs for unsound "
    "slices, too; telling real from generated alone keeps them down, and sound ones as well; both together say YES to sound "
    "slices and seldom to unsound ones.",
    "spin": "The paper: accuracy rises with every iteration, where continued SFT on the same data does not. There the starting "
    "model had been trained on these very data before; the embedded one has not, so SFT still has something to give. With the "
    "opponent fixed at the SFT model the seeds differ more, and some fall back on the way: human answers become less likely "
    "again, which the loss allows as long as the opponent's become less likely still.",
}
FIGURES = {  # panels: title, x, metric (of every step, or of evaluations if it begins with eval/), variants
    "tango": [
        ("generator, training accuracy", "gen_step", "gen/accuracy", ("co-trained", "frozen verifier", "GRPO, no verifier")),
        (
            "accept rate minus true accuracy",
            "gen_step",
            "co/verdict_minus_gold",
            ("co-trained", "reward from the verifier alone, frozen", "reward from the verifier alone, co-trained"),
        ),
        ("verifier, balanced accuracy", "step", "ver/balanced_accuracy", ("co-trained", "co-trained, no class weights")),
    ],
    "prime": [
        ("training accuracy before the filter", x, "pol/accuracy", ("PRIME", "outcome only")) for x in ("step", "co/samples")
    ],
    "gar": [
        (f"P({kind.replace('_', ' ')} → YES)", "step", f"dis/yes_{kind}", tuple(list(EXPERIMENTS["gar"].variants)[2:]))
        for kind in ("reference", "generated_right", "generated_wrong")
    ],
    "cure": [
        (title, "step", key, tuple(EXPERIMENTS["cure"].variants))
        for title, key in (
            ("tester: right tests", "tes/accuracy"),
            ("held out: p01, base's programs", "eval/tes/p01_base"),
            ("held out: p00, base's programs", "eval/tes/p00_base"),
        )
    ],
    "mae": [
        (title, "step", f"eval/{key}", tuple(EXPERIMENTS["mae"].variants))
        for title, key in (
            ("held-out accuracy", "sol/accuracy"),
            ("judged minus true accuracy", "co/flattery"),
            ("judge against gold, AUC", "jud/rank_agreement"),
        )
    ],
    "mae_collapse": [
        (title, "step", f"eval/{key}", tuple(EXPERIMENTS["mae_collapse"].variants))
        for title, key in (
            ("held-out accuracy", "sol/accuracy"),
            ("judged minus true accuracy", "co/flattery"),
            ("judgements without a score", "jud/unparsable"),
        )
    ],
    "spin": [
        ("held-out accuracy", "step", "eval/pla/accuracy", tuple(EXPERIMENTS["spin"].variants)),
        ("log-likelihood of held-out human answers", "step", "eval/pla/logp_human", tuple(EXPERIMENTS["spin"].variants)),
    ],
}


XLABELS = {"step": "optimiser step", "gen_step": "the generator's steps", "co/samples": "samples drawn, filtered ones included"}


def draw(results: list[dict], panels: list[tuple], path: Path):
    """Every seed a thin line, the mean a thick one: of evaluations where all seeds have one, of steps where most do."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.4 * len(panels), 4.0), squeeze=False)
    everyone = list(dict.fromkeys(variant for *_, variants in panels for variant in variants))
    for axis, (title, x, key, variants) in zip(axes[0], panels):
        for variant in variants:
            curves, color = [], everyone.index(variant)
            for r in [r for r in results if r["variant"] == variant]:
                rows = r["evaluations"] if key.startswith("eval/") else r["steps"]
                if x == "gen_step":  # tango's own generator steps, not those in which it only writes for the verifier
                    own = [row for row in rows if "co/alpha" in row] or rows
                    rows = [{**row, x: i} for i, row in enumerate(own, start=1)]
                curves.append([(row[x], row[key]) for row in rows if key in row])
                axis.plot(*zip(*curves[-1]), color=f"C{color}", alpha=0.3, linewidth=0.8)
            if x != "co/samples":  # there every run is elsewhere
                of = defaultdict(list)  # step -> its values, one per run that has one
                for step, value in (point for curve in curves for point in curve):
                    of[step].append(value)
                # a run that stopped itself ends the mean of evaluations, which else would be the survivors'
                enough = len(curves) if key.startswith("eval/") else len(curves) // 2 + 1
                means = sorted((step, statistics.mean(values)) for step, values in of.items() if len(values) >= enough)
                axis.plot(*zip(*means), color=f"C{color}", linewidth=1.8)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(XLABELS[x])
        axis.grid(alpha=0.25)
    colours = [pyplot.Line2D([], [], color=f"C{color}", linewidth=1.8) for color in range(len(everyone))]
    figure.legend(colours, everyone, loc="lower center", ncols=3, fontsize=8, frameon=False)  # beside the curves, not on them
    figure.tight_layout(rect=(0, 0.05 * math.ceil(len(everyone) / 3) + 0.02, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


class Figures:
    """What a claim quotes of an experiment: in per cent, over the seeds."""

    def __init__(self, results: list[dict]):
        self.results = results
        self.first = next(r["evaluations"][0] for r in results if r["seed"] == results[0]["seed"])

    def end(self, variant: str, key: str) -> str:
        return spread(final(self.results, variant, f"eval/{key}"))

    def rise(self, variant: str, key: str) -> str:
        return f"{100 * self.first[f'eval/{key}']:.1f} → {self.end(variant, key)}"


def tango_claims(f: Figures) -> list[tuple]:
    alone = [f"reward from the verifier alone, {kind}" for kind in ("frozen", "co-trained")]
    gaps = [spread([claimed_minus_true(r)[1] for r in f.results if r["variant"] == variant]) for variant in alone]
    weights = [f.end(variant, "ver/balanced_accuracy") for variant in ("co-trained", "co-trained, no class weights")]
    plain = f"{f.end('co-trained', 'gen/accuracy')} against {f.end('GRPO, no verifier', 'gen/accuracy')}"
    frozen = "reward from a frozen verifier alone: accuracy; accept rate minus accuracy"
    return [
        ("co-training against plain GRPO, equally many generator steps", "46.1 against 37.0", plain),
        ("the verifier judges steps without step labels: step F1", "rises", f.rise("co-trained", "ver/step_f1")),
        ("its balanced accuracy, with and without class weights", "collapses without", " and ".join(weights)),
        (frozen, "-", f"{f.rise(alone[0], 'gen/accuracy')}; {gaps[0]}"),
        ("the same, verifier co-trained", "-", f"{f.end(alone[1], 'gen/accuracy')}; {gaps[1]}"),
    ]


def prime_claims(f: Figures) -> list[tuple]:
    ends = f"{f.end('PRIME', 'pol/accuracy')} against {f.end('outcome only', 'pol/accuracy')}"
    return [("token rewards against outcome only, held-out accuracy", "41.0 against 36.9", ends)]


def gar_claims(f: Figures) -> list[tuple]:
    ends = [f.end(variant, "rea/accuracy") for variant in ("7 trained, both", "2 GRPO, exact match only")]
    return [("trained discriminator against plain GRPO", "61.3 against 56.3 (AIME24)", " against ".join(ends))]


def cure_claims(f: Figures) -> list[tuple]:
    def both(figure, variant, *keys):
        return "; ".join(figure(variant, key) for key in keys)

    rates, only = ("tes/p01_base", "tes/p00_base"), "precision, only the tester trained"
    claim = "p01; p00: wrong programs of the base pass right tests; wrong ones"
    best = "best of 4 programs by 4 tests, only the tester trained: programs; best of 4"
    return [
        ("right programs; right tests", "+5.3; +37.8 points", both(f.rise, "precision", "cod/accuracy", "tes/accuracy")),
        (claim, "36.5; 9.1 after 100 steps", both(f.rise, "precision", *rates)),
        ("the same with the simple reward", "42.2; 14.7", both(f.end, "simple reward", *rates)),
        (best, "-", both(f.rise, only, "cod/accuracy", "co/best_of_4")),
    ]


def spin_claims(f: Figures) -> list[tuple]:
    ends = f"{f.end('SPIN', 'pla/accuracy')} against {f.end('continued SFT', 'pla/accuracy')}"
    return [("self-play against continued SFT on the same answers", "rises; does not", ends)]


def mae_claims(f: Figures) -> list[tuple]:
    return [
        ("accuracy without any gold answer", "55.3 → 59.9", f.rise("all parts trained", "sol/accuracy")),
        ("its opinion of itself minus the truth", "not measured", f.rise("all parts trained", "co/flattery")),
    ]


def collapse_claims(f: Figures) -> list[tuple]:
    ends = f"{f.end('all parts trained', 'sol/accuracy')}; {f.end('all parts trained', 'co/flattery')}"
    return [("four times the learning rate: accuracy; flattery", "-", ends)]


CLAIMS = {  # (claim, the paper's figures, ours)
    "tango": tango_claims,
    "prime": prime_claims,
    "gar": gar_claims,
    "cure": cure_claims,
    "spin": spin_claims,
    "mae": mae_claims,
    "mae_collapse": collapse_claims,
}


def summary() -> str:
    """The README's table: one line per claim, for every experiment there is."""
    rows = []
    for name, claims in CLAIMS.items():
        path = FOLDER / f"{name}.json"
        results = json.loads(path.read_text())["runs"] if path.exists() else []
        if {r["variant"] for r in results} != set(EXPERIMENTS[name].variants):
            continue  # begun only
        link = f"[`{EXPERIMENTS[name].script}`](docs/evidence/{name}.md)"
        rows += [["" if i else link, *claim] for i, claim in enumerate(claims(Figures(results)))]
    return markdown(["script", "claim", "paper", "here, in %: mean ± 95 % interval [range over seeds]"], rows)


def hardware() -> str:
    """The README's table: minutes of the embedded defaults, and the largest Qwen2.5 for each card, by estimate."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from one_gpu_docs import CARDS, GIB, fitting
    from one_gpu_docs import name as model_name

    measured = json.loads((FOLDER / "defaults.json").read_text()) if (FOLDER / "defaults.json").exists() else {}
    minutes = ", ".join(f"`{name}.py` {r['wall_seconds'] / 60:.1f}" for name, r in measured.items())
    machine = next(iter(measured.values()))["machine"] if measured else "a laptop's CPU"
    rows = [
        [machine, "the embedded default", "", f"minutes, evaluations included: {minutes}" if minutes else "not measured yet"]
    ]
    for card, gib in CARDS.items():
        size = [size for size in ("0.5b", "1.5b", "7b", "14b", "32b") if fitting(size, gib)][-1]
        at_once, micro, need = fitting(size, gib)
        options = f"`--rows-at-once {at_once} --micro-batch {micro}`"
        rows.append([f"one GPU of {card}", f"two players of {model_name(size)}, 4-bit", options])
        rows[-1].append(f"{need['peak'] / GIB:.1f} GiB, estimated; not measured yet")
    return markdown(["hardware", "the largest that fits", "with", "takes"], rows)


def speed() -> str:
    """The README's table: our time over theirs, median of the ratios within a repetition, and their range."""
    read = lambda name: json.loads((FOLDER / f"{name}.json").read_text())  # noqa: E731
    times = lambda r, low, high: f"{r:.2f}x [{low:.2f}, {high:.2f}]"  # noqa: E731
    rows, peers = [], {"trl": "TRL's fused head", "liger": "Liger", "naive": "plain autograd"}
    kept = {(r["N"], r["H"], r["V"], r["pass"], r["method"]): r for r in read("logprob_cpu")["rows"]}
    for N, H, V in sorted({key[:3] for key in kept}, reverse=True):
        for kind in ("forward+backward", "forward"):
            for method, peer in peers.items():
                r, ours = kept[N, H, V, kind, method], kept[N, H, V, kind, "ours"]
                extra = f"{ours['extra_mib']:.0f} / {r['extra_mib']:.0f} MiB" if r["extra_mib"] else ""
                what = f"log-probs, {kind}, {N} tokens, hidden {H}, vocabulary {V:,}"
                rows.append([what, peer, times(r["ours_over_it"], *r["range"]), extra])
    for r in sorted(read("train_phase_cpu")["rows"], key=lambda r: (r["shape"], r["threads"])):
        what = f"loss and backward of a batch, {r['shape']}, {r['threads']} thread{'s' * (r['threads'] > 1)}"
        rows.append([what, "TRL's", times(r["ratio"], *r["range"]), ""])
    for r in read("sampling_cpu")["rows"]:
        rows.append([f"sampling, embedded, {r['part']}", "`generate`", times(r["ratio"], *r["range"]), ""])
    kept = read("sandbox")["speed"]
    for peer in ("plain interpreter", "released design"):
        low, high = (1 / faster for faster in reversed(kept[peer]["range_of_that"]))
        ratio = times(1 / kept[peer]["sandbox_is_faster_by"], low, high)
        rows.append(["running programs", {"released design": "bare forks, CURE's released design"}.get(peer, peer), ratio, ""])
    return markdown(["what, on a 2-core CPU", "against", "our time over its time [range]", "extra memory, ours / its"], rows)


def fill(page: Path, name: str, text: str):
    """Put text between <!-- name --> and <!-- end -->, if the page is there."""
    if page.exists():
        block = f"<!-- {name} -->\n{text}<!-- end -->"
        page.write_text(re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _: block, page.read_text(), flags=re.DOTALL))


def write_up(name: str):
    """docs/evidence/NAME.md and .png, and the results block of docs/NAME.md."""
    kept = json.loads((FOLDER / f"{name}.json").read_text())
    seeds = sorted({r["seed"] for r in kept["runs"]})
    draw(kept["runs"], FIGURES[name], FOLDER / f"{name}.png")
    experiment = EXPERIMENTS[name]
    text = f"{NOTES[name]}\n\nMean ± 95 % interval [range] over seeds {', '.join(map(str, seeds))}; {kept['machine']}; "
    text += f"`python benchmarks/evidence.py {name}` runs `{experiment.script} {experiment.arguments}` with"
    for variant, arguments in experiment.variants.items():
        arguments, patch = arguments if isinstance(arguments, tuple) else (arguments, None)
        words = [f"`{arguments}`"] * bool(arguments) + [f"`{patch}`"] * bool(patch)
        own = sorted(r["seed"] for r in kept["runs"] if r["variant"] == variant)
        fewer = f" (seeds {', '.join(map(str, own))})" if own != seeds else ""
        text += f"\n- {variant}{fewer}: {' and '.join(words) or 'nothing else'}"
    table = TABLES[name](kept["runs"])
    picture = "![every seed thin, their mean thick]({})\n\n"
    (FOLDER / f"{name}.md").write_text(f"# {name}\n\n{text}\n\n{picture.format(f'{name}.png')}{table}")
    page, block = ("mae", "collapse") if name == "mae_collapse" else (name, "results")
    fill(ROOT / "docs" / f"{page}.md", block, f"{text}\n\n{picture.format(f'evidence/{name}.png')}{table}")
    fill(ROOT / "README.md", "evidence", summary())
    fill(ROOT / "README.md", "hardware", hardware())
    fill(ROOT / "README.md", "speed", speed())
    print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--variants", nargs="+", help="only these; a table with a variant missing is not written")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--tables-only", action="store_true")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in EXPERIMENTS if "all" in args.names else args.names:
        path = FOLDER / f"{name}.json"
        empty = {"machine": f"{platform.machine()} CPU, 1 thread a run", "runs": []}
        kept = json.loads(path.read_text()) if path.exists() else empty
        done = {(r["variant"], r["seed"]) for r in kept["runs"]}
        variants = args.variants or EXPERIMENTS[name].variants
        todo = [(v, s) for s in args.seeds for v in variants if (v, s) not in done]
        with ThreadPoolExecutor(args.at_once) as pool:
            for result in pool.map(lambda job, name=name: run(name, *job), [] if args.tables_only else todo):
                kept["runs"].append(result)
                path.write_text(json.dumps(kept) + "\n")
                print(f"{name}: {result['variant']}, seed {result['seed']}, {result['seconds']:.0f} s", flush=True)
        if {r["variant"] for r in kept["runs"]} == set(EXPERIMENTS[name].variants):
            write_up(name)


if __name__ == "__main__":
    main()
