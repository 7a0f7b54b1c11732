"""Runs the training experiments of experiments.toml: python benchmarks/evidence.py tango gamed

First a variant that has several learning rates is run with each on seeds 11 to 13, which are kept
apart in docs/evidence/NAME_rates.json; then every variant runs at its only or best rate on seeds 0,
1, ..., the ones that are reported, in docs/evidence/NAME.json. A run is one process with one
thread, but for timed ones. What is kept of it: its held-out evaluations, and of every step the
metrics that the experiment compares. Finished runs are kept and not repeated; an interrupted one
resumes. At the end pages.py makes the tables and figures, of these files alone.
"""

import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from claims import CLAIMS, OF_STEPS, measure

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "evidence"
RUNS = ROOT / "runs" / "evidence"
SWEEP_SEEDS = (11, 12, 13)
QUIET = "--eval-every 0 --show-every 0 --save-every 1000"  # of every run that is not timed


@dataclass
class Variant:
    """See experiments.toml, also for the fields of `Experiment`."""

    script: str = ""
    arguments: str = ""
    rates: list[float] = field(default_factory=list)
    patches: list[str] = field(default_factory=list)
    seeds: int = 5
    own_start: bool = False


@dataclass
class Experiment:
    variants: dict[str, Variant]
    script: str
    page: str
    arguments: str = ""
    yardstick: str = ""
    rate: str = "--lr"
    timed: bool = False
    since: str = ""
    columns: list[list[str]] = field(default_factory=list)
    panels: list[list] = field(default_factory=list)


def _read_experiments() -> tuple[dict[str, str], dict[str, Experiment]]:
    read = tomllib.loads((Path(__file__).parent / "experiments.toml").read_text())
    patches = read.pop("patches")
    for name, given in read.items():
        given["variants"] = {variant: Variant(**v) for variant, v in given["variants"].items()}
        script = given.setdefault("script", f"{name}.py")
        read[name] = {"page": f"{script.removesuffix('.py')}.md#results"} | given
    # the minutes that every script takes, evaluations included
    scripts = sorted(p for p in ROOT.glob("*.py") if "\nclass Args(" in p.read_text())
    variants = {path.stem: Variant(path.name, seeds=1) for path in scripts}
    read["defaults"] = {"variants": variants, "script": "", "page": "measured.md", "timed": True}
    return patches, {name: Experiment(**given) for name, given in read.items()}


PATCHES, EXPERIMENTS = _read_experiments()


# ------------------------------------------------------------------ what is kept
def kept_metrics(name: str) -> set[str]:
    """Of every step: what columns, panels and claims name, and what `claims.having` asks for."""
    experiment = EXPERIMENTS[name]
    texts = [experiment.yardstick, *[text for _, text, *_ in experiment.columns]]
    texts += [claim.measure for claim in CLAIMS if claim.experiment == name]
    parts = [text.split(":") for text in texts if text.startswith(OF_STEPS)]
    parts += [[x, key] for _, x, key, *_ in experiment.panels if not key.startswith("eval/")]
    named = {part for some in parts for part in some if "/" in part}
    return named | {"step", "co/sampled_tokens", "co/alpha"}


def read(file: str, timed: bool = False) -> dict:
    """What docs/evidence/FILE.json holds: the machine, and the finished runs."""
    path = FOLDER / f"{file}.json"
    if path.exists():
        return json.loads(path.read_text())
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cpu = found[1] if found else f"{platform.machine()} CPU"
    threads = os.environ.get("OMP_NUM_THREADS", os.cpu_count()) if timed else 1  # see `run`
    return {"machine": f"{cpu}, {threads} thread{'s' * (int(threads) > 1)}", "runs": []}


def runs_of(name: str, variant: str) -> dict[int, dict]:
    """Seed -> run."""
    return {r["seed"]: r for r in read(name)["runs"] if r["variant"] == variant}


def with_runs(name: str) -> list[str]:
    """The variants of the experiment that have a run, in its order."""
    ran = {r["variant"] for r in read(name)["runs"]}
    return [variant for variant in EXPERIMENTS[name].variants if variant in ran]


def rate_of(name: str, variant: str) -> float | None:
    """The learning rate at which a variant did best in the sweep."""
    rates, experiment = EXPERIMENTS[name].variants[variant].rates, EXPERIMENTS[name]
    if len(rates) < 2:
        return rates[0] if rates else None
    scores = {rate: [] for rate in rates}
    for r in read(f"{name}_rates")["runs"]:
        if r["variant"] == variant and r["rate"] in scores:
            scores[r["rate"]].append(measure(experiment.yardstick, r))
    if any(len(found) < len(SWEEP_SEEDS) for found in scores.values()):
        raise RuntimeError(f"{name}, {variant}: its rates are not swept yet")
    return max(rates, key=lambda rate: statistics.mean(scores[rate]))


# ------------------------------------------------------------------ running
def command(script: str, patches: list[str]) -> list[str]:
    """What starts a script, changed by the patches before its `main`."""
    if not patches:
        return [sys.executable, script]
    module, lines = script.removesuffix(".py"), "; ".join(PATCHES[name] for name in patches)
    lines = lines.replace("SCRIPT", module)
    start = f"import sys, tyro, {module}; sys.path.append('benchmarks'); import controls; {lines}"
    return [sys.executable, "-c", f"{start}; {module}.main(tyro.cli({module}.Args))"]


def run(name: str, variant: str, seed: int, rate: float | None) -> dict:
    """One run of a variant, in a process of its own -> what is kept of it."""
    experiment, chosen = EXPERIMENTS[name], EXPERIMENTS[name].variants[variant]
    place = re.sub(r"\W+", "_", variant) + (f"-{rate}" if rate else "")
    folder = RUNS / name / place / str(seed)
    if experiment.timed:  # a resumed run's time would not be that of one run
        shutil.rmtree(folder, ignore_errors=True)
    quiet, one = ("", {}) if experiment.timed else (QUIET, {"OMP_NUM_THREADS": "1"})
    options = f"{quiet} {experiment.arguments} {chosen.arguments} --seed {seed} --out {folder}"
    options += f" {experiment.rate} {rate}" if rate else ""
    words = [*command(chosen.script or experiment.script, chosen.patches), *options.split()]
    start, env = time.time(), os.environ | one
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    wall = time.time() - start
    hopeless = "steps in a row. The run ends" in done.stderr  # mae.py stops itself: a result, too
    if done.returncode and not hopeless:
        output = f"{done.stdout[-500:]}\n{done.stderr[-2000:]}"
        raise RuntimeError(f"{name}, {variant}, seed {seed}:\n{output}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
    steps = [row for row in rows if row not in evaluations] if not experiment.timed else []
    kept = kept_metrics(name)
    short = lambda value: round(value, 5) if isinstance(value, float) else value  # noqa: E731
    return {
        "variant": variant,
        "seed": seed,
        "rate": rate,
        "seconds": rows[-1]["seconds"],
        "wall_seconds": round(wall, 1),
        "versions": json.loads((folder / "versions.json").read_text()),
        "questions": json.loads((folder / "args.json").read_text())["eval_questions"],
        "evaluations": [{key: short(value) for key, value in row.items()} for row in evaluations],
        "steps": [{key: short(x) for key, x in row.items() if key in kept} for row in steps],
    }


def run_missing(file: str, name: str, jobs: list[tuple], at_once: int):
    """The jobs (variant, seed, rate) that docs/evidence/FILE.json does not hold yet; each run is
    kept as soon as it ends.
    """
    path, kept = FOLDER / f"{file}.json", read(file, EXPERIMENTS[name].timed)
    done = {(r["variant"], r["seed"], r["rate"]) for r in kept["runs"]}
    with ThreadPoolExecutor(at_once) as pool:
        for result in pool.map(lambda job: run(name, *job), [j for j in jobs if j not in done]):
            kept["runs"].append(result)
            path.write_text(json.dumps(kept) + "\n")
            took = f"rate {result['rate']}, seed {result['seed']}, {result['wall_seconds']:.0f} s"
            print(f"{file}: {result['variant']}, {took}", flush=True)


def spin_base():
    """A model on which continued SFT has nothing left to give. SPIN starts where SFT on the human
    answers has ended: the embedded model is trained on the right solutions of 1,200 questions for
    many passes, and the adapter is merged into it. Seed 21, which no experiment reports.
    """
    folder = RUNS / "spin_base"
    if (folder / "model" / "config.json").exists():
        return
    sys.path.insert(0, str(ROOT))
    from common.tasks.math import load_questions
    from common.tiny import TINY

    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    rows, data = load_questions("tiny", 1_200, 1, 21)[0], folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = "--steps 160 --iterations 4 --opponent none --eval-every 0 --show-every 0 --seed 21"
    words = [sys.executable, "spin.py", *options.split(), "--dataset", data]
    subprocess.run([*words, "--out", folder / "sft"], cwd=ROOT, check=True)
    base = AutoModelForCausalLM.from_pretrained(TINY)
    model = PeftModel.from_pretrained(base, folder / "sft/player")
    model.merge_and_unload().save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder / "model")


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    names = EXPERIMENTS if "all" in args.names else args.names
    for name in names:
        experiment, variants = EXPERIMENTS[name], EXPERIMENTS[name].variants
        at_once = 1 if experiment.timed else args.at_once
        if "spin_base" in experiment.arguments:
            spin_base()
        swept = {v: chosen.rates for v, chosen in variants.items() if len(chosen.rates) > 1}
        sweep = [(v, seed, rate) for seed in SWEEP_SEEDS for v in swept for rate in swept[v]]
        run_missing(f"{name}_rates", name, sweep, at_once)
        jobs = [(v, s, rate_of(name, v)) for v in variants for s in range(variants[v].seeds)]
        jobs.sort(key=lambda job: job[1])  # of all variants the first seed, the second, ...
        run_missing(name, name, jobs, at_once)
    # a command of its own, because it imports this file
    subprocess.run([sys.executable, "benchmarks/pages.py", *args.names], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
