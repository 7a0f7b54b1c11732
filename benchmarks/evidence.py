"""The papers' claims in miniature, measured: python benchmarks/evidence.py prime gar

Every variant of an experiment runs on the embedded default with the same seeds, two runs at a time with one thread each.
docs/evidence/NAME.json keeps each finished run (held-out evaluations, and per step what the experiment compares); runs that
are there are not repeated, one that was interrupted goes on where it stopped. The tables are printed and written to
docs/evidence/NAME.md.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "evidence"

EXPERIMENTS = {  # script, arguments of all variants, variants, what is kept of every step
    "prime": (
        "prime.py",
        "--steps 30 --eval-every 15 --show-every 0",
        {"PRIME": "", "outcome only": "--no-process-reward", "offline PRM": "--prm-update none"},
        ("pol/accuracy", "co/samples", "prm/accuracy", "prm/loss"),
    ),
    "gar": (
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
}


def run(name: str, variant: str, seed: int) -> dict:
    script, shared, variants, kept = EXPERIMENTS[name]
    folder = ROOT / "runs" / "evidence" / name / variant.replace(" ", "_").replace(",", "") / str(seed)
    command = [sys.executable, script, *shared.split(), *variants[variant].split(), "--seed", str(seed), "--out", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
    return {
        "variant": variant,
        "seed": seed,
        "seconds": rows[-1]["seconds"],
        "versions": json.loads((folder / "versions.json").read_text()),
        "evaluations": evaluations,
        "steps": [{"step": r["step"], **{k: r[k] for k in kept if k in r}} for r in rows if r not in evaluations],
    }


def spread(values: list[float], percent: bool = True) -> str:
    """mean, and the range over seeds."""
    scale, digits = (100, 1) if percent else (1, 0)
    low, high = min(values) * scale, max(values) * scale
    return f"{statistics.mean(values) * scale:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def final(results: list[dict], variant: str, key: str) -> list[float]:
    return [r["evaluations"][-1][key] for r in results if r["variant"] == variant and key in r["evaluations"][-1]]


def samples_to_reach(steps: list[dict], level: float, window: int = 10) -> float:
    """Samples drawn when the moving average of the unfiltered training accuracy first reaches `level`; inf if never."""
    for i in range(len(steps)):
        recent = [s["pol/accuracy"] for s in steps[max(0, i - window + 1) : i + 1]]
        if statistics.mean(recent) >= level:
            return steps[i]["co/samples"]
    return math.inf


def prime_table(results: list[dict]) -> str:
    """The paper's figure 3a: samples to the baseline's final training reward (10-step moving average). Paper: 2.5x fewer."""
    by_seed = {(r["variant"], r["seed"]): r for r in results}
    seeds = sorted({r["seed"] for r in results})
    lines = [
        "| variant | held-out accuracy, T = 1 | the same, greedy | samples drawn in all "
        "| samples to the baseline's final reward | ratio baseline / variant, per seed |",
        "|---|---|---|---|---|---|",
    ]
    baseline = {}
    for seed in seeds:
        steps = by_seed["outcome only", seed]["steps"]
        level = statistics.mean(s["pol/accuracy"] for s in steps[-10:])
        baseline[seed] = (level, samples_to_reach(steps, level))
    for variant in EXPERIMENTS["prime"][2]:
        mine = [samples_to_reach(by_seed[variant, seed]["steps"], baseline[seed][0]) for seed in seeds]
        ratios = ", ".join("never reached" if m == math.inf else f"{baseline[s][1] / m:.2f}" for s, m in zip(seeds, mine))
        drawn = [by_seed[variant, seed]["steps"][-1]["co/samples"] for seed in seeds]
        reached = ", ".join("never" if m == math.inf else f"{m:.0f}" for m in mine)
        cells = [spread(final(results, variant, f"eval/pol/{key}")) for key in ("accuracy", "greedy")]
        lines.append(f"| {variant} | {cells[0]} | {cells[1]} | {spread(drawn, False)} | {reached} | {ratios} |")
    return "\n".join(lines) + "\n"


def gar_table(results: list[dict]) -> str:
    """The paper's table 4, with what the discriminator says at the end."""
    paper = {"2": (56.3, 40.7), "4": (58.6, 42.0), "5": (59.4, 42.8), "6": (60.2, 43.3), "7": (61.3, 44.3)}
    said = ("yes_reference", "yes_generated_right", "yes_generated_wrong", "yes_sound", "yes_unsound")
    lines = [
        "| row | paper: AIME24 / 25 | held-out accuracy, T = 1 | the same, greedy | "
        + " | ".join(f"P({key.removeprefix('yes_').replace('_', ' ')} → YES)" for key in said)
        + " |",
        "|---|---|---|---|" + "---|" * len(said),
    ]
    for variant in EXPERIMENTS["gar"][2]:
        cells = [spread(final(results, variant, f"eval/rea/{key}")) for key in ("accuracy", "greedy")]
        for key in said:
            values = final(results, variant, f"eval/dis/{key}")
            cells.append(spread(values) if values else "-")
        lines.append(f"| {variant} | {paper[variant[0]][0]} / {paper[variant[0]][1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def prime_figure(results: list[dict], path: Path):
    """Unfiltered training accuracy by step and by samples drawn, every seed a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, x, label in zip(axes, ("step", "co/samples"), ("optimiser step", "samples drawn, filtered ones included")):
        for color, variant in enumerate(("PRIME", "outcome only")):
            for i, run_ in enumerate(r for r in results if r["variant"] == variant):
                points = [(s[x], s["pol/accuracy"]) for s in run_["steps"]]
                axis.plot(*zip(*points), color=f"C{color}", alpha=0.7, linewidth=1, label=variant if i == 0 else None)
        axis.set(xlabel=label, ylabel="training accuracy before the filter" if x == "step" else "")
        axis.grid(alpha=0.25)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


TABLES = {"prime": prime_table, "gar": gar_table}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=2)
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in EXPERIMENTS if "all" in args.names else args.names:
        path = FOLDER / f"{name}.json"
        kept = (
            json.loads(path.read_text())
            if path.exists()
            else {"machine": f"{platform.machine()} CPU, 1 thread a run", "runs": []}
        )
        done = {(r["variant"], r["seed"]) for r in kept["runs"]}
        todo = [(v, s) for s in args.seeds for v in EXPERIMENTS[name][2] if (v, s) not in done]
        with ThreadPoolExecutor(args.at_once) as pool:
            for result in pool.map(lambda job, name=name: run(name, *job), todo):
                kept["runs"].append(result)
                path.write_text(json.dumps(kept) + "\n")
                print(f"{name}: {result['variant']}, seed {result['seed']}, {result['seconds']:.0f} s", flush=True)
        text = TABLES[name](kept["runs"])
        seeds = sorted({r["seed"] for r in kept["runs"]})
        heading = f"Mean over seeds {', '.join(map(str, seeds))} and range. {EXPERIMENTS[name][0]} {EXPERIMENTS[name][1]}\n\n"
        if name == "prime":
            prime_figure(kept["runs"], FOLDER / "prime.png")
            heading += "The paper reports a ratio of 2.5. An offline PRM that was never trained is the reference: its process "
            heading += "reward is zero, and the row repeats the baseline.\n\n![by step and by samples](prime.png)\n\n"
        (FOLDER / f"{name}.md").write_text(heading + text)
        print(text)


if __name__ == "__main__":
    main()
