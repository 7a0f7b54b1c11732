"""The papers' claims in miniature, measured: python benchmarks/evidence.py prime gar

Every variant of an experiment runs on the embedded default with the same random seeds, two runs at
a time with one thread each. docs/evidence/NAME.json keeps each finished run: its held-out
evaluations, and of every step the metrics that the experiment compares. Runs that are kept are not
repeated; one that was interrupted goes on where it stopped. Tables and figures are made from these
files alone, by evidence_pages.py; `--tables-only` does just that.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "evidence"


@dataclass
class Experiment:
    script: str
    arguments: str
    """of all variants"""
    variants: dict[str, str]
    """name -> its own arguments"""
    kept: tuple[str, ...]
    """metrics kept of every step"""
    patches: dict[str, str] = field(default_factory=dict)
    """variant -> a line of Python that changes the imported script, where it has no argument for it
    """


# A = A_step: the gold answer is no longer in the reward
ONLY_STEPS = "tango.alpha_at = lambda n, total, alpha: 1.0"
# every row counts once
NO_CLASS_WEIGHTS = "tango.class_weights = lambda labels, counts: (labels == labels).float()"
# the coder's batch is recorded for the report and not trained on; the last one of a step, the
# tester's, does not go through `update`
NO_CODER_UPDATE = "cure.Cure.update = lambda self, batch: self.micro_batches(batch)"

EXPERIMENTS = {
    "tango": Experiment(
        "tango.py",
        "--eval-every 0 --show-every 0",
        {
            "co-trained": "--steps 48",
            "frozen verifier": "--steps 21 --verifier frozen",
            "GRPO, no verifier": "--steps 21 --verifier none",
            "co-trained, no class weights": "--steps 48",
            "reward from the verifier alone, frozen": "--steps 21 --verifier frozen",
            "reward from the verifier alone, co-trained": "--steps 48",
        },
        (
            "generator/accuracy",
            "verifier/balanced_accuracy",
            "verifier/tpr",
            "verifier/tnr",
            "verifier/says_correct",
            "co/verdict_minus_gold",
            "co/alpha",
        ),
        {
            "co-trained, no class weights": NO_CLASS_WEIGHTS,
            "reward from the verifier alone, frozen": ONLY_STEPS,
            "reward from the verifier alone, co-trained": ONLY_STEPS,
        },
    ),
    "prime": Experiment(
        "prime.py",
        "--steps 30 --eval-every 15 --show-every 0",
        {"PRIME": "", "outcome only": "--no-process-reward"},
        ("policy/accuracy", "co/samples", "prm/accuracy", "prm/loss"),
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
        (
            "reasoner/accuracy",
            "discriminator/yes_reference",
            "discriminator/yes_generated_right",
            "discriminator/yes_generated_wrong",
            "discriminator/spread_in_groups",
        ),
    ),
    "cure": Experiment(
        "cure.py",
        "--show-every 0",
        {
            "precision": "",
            "simple reward": "--tester-reward simple",
            "precision, only the tester trained": "",
            "simple reward, only the tester trained": "--tester-reward simple",
        },
        (
            "coder/accuracy",
            "tester/accuracy",
            "tester/p01",
            "tester/p00",
            "co/tasks_with_a_right_program",
        ),
        {
            "precision, only the tester trained": NO_CODER_UPDATE,
            "simple reward, only the tester trained": NO_CODER_UPDATE,
        },
    ),
    "spin": Experiment(
        "spin.py",
        "--steps 64 --eval-every 16 --show-every 0",
        {
            "SPIN": "",
            "continued SFT": "--opponent none",
            "opponent fixed at the SFT model": "--opponent sft",
        },
        (
            "player/spin_loss",
            "player/pair_accuracy",
            "player/logp_human",
            "opponent/equal_to_human",
        ),
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
        (
            "solver/judged",
            "proposer/difficulty",
            "proposer/quality",
            "proposer/accepted",
            "judge/unparsable",
            "co/questions",
        ),
    ),
    # a rate at which the judge is lost, found on training questions with another random seed
    "mae_collapse": Experiment(
        "mae.py",
        "--lr 4e-3 --steps 24 --eval-every 8 --show-every 0",
        {
            "all parts trained": "",
            "no judge training": "--no-train-judge",
            "judge paid for agreement with gold": "--judge-reward agreement",
        },
        ("solver/judged", "proposer/accepted", "judge/unparsable"),
    ),
}


def folder_name(variant: str) -> str:
    return re.sub(r"\W+", "_", variant)


def run(name: str, variant: str, seed: int) -> dict:
    """One run of a variant, in a process of its own -> what is kept of it."""
    experiment = EXPERIMENTS[name]
    folder = ROOT / "runs" / "evidence" / name / folder_name(variant) / str(seed)
    options = f"{experiment.arguments} {experiment.variants[variant]} --seed {seed}".split()
    command = [sys.executable, experiment.script]
    if variant in experiment.patches:
        module, patch = experiment.script.removesuffix(".py"), experiment.patches[variant]
        start = f"import {module}, tyro; {patch}; {module}.main(tyro.cli({module}.Args))"
        command = [sys.executable, "-c", start]
    done = subprocess.run(
        [*command, *options, "--out", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    hopeless = "steps in a row. The run ends" in done.stderr  # mae.py stops itself: a result, too
    if done.returncode and not hopeless:
        output = f"{done.stdout[-500:]}\n{done.stderr[-2000:]}"
        raise RuntimeError(f"{name}, {variant}, seed {seed}:\n{output}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
    steps = [row for row in rows if row not in evaluations]
    kept = ("step", *experiment.kept)
    return {
        "variant": variant,
        "seed": seed,
        "seconds": rows[-1]["seconds"],
        "versions": json.loads((folder / "versions.json").read_text()),
        "evaluations": evaluations,
        "steps": [{key: row[key] for key in kept if key in row} for row in steps],
    }


def read(name: str) -> dict:
    """What docs/evidence/NAME.json holds: the machine, and the finished runs."""
    path = FOLDER / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text())
    return {"machine": f"{platform.machine()} CPU, 1 thread a run", "runs": []}


def finished(name: str) -> bool:
    """Whether every variant of the experiment has a run."""
    return {r["variant"] for r in read(name)["runs"]} == set(EXPERIMENTS[name].variants)


def run_missing(name: str, variants: list[str], seeds: list[int], at_once: int):
    """The runs that docs/evidence/NAME.json does not hold yet; each is kept as soon as it ends."""
    path, kept = FOLDER / f"{name}.json", read(name)
    done = {(r["variant"], r["seed"]) for r in kept["runs"]}
    todo = [(variant, seed) for seed in seeds for variant in variants]
    todo = [job for job in todo if job not in done]
    with ThreadPoolExecutor(at_once) as pool:
        for result in pool.map(lambda job: run(name, *job), todo):
            kept["runs"].append(result)
            path.write_text(json.dumps(kept) + "\n")
            took = f"seed {result['seed']}, {result['seconds']:.0f} s"
            print(f"{name}: {result['variant']}, {took}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--variants", nargs="+", help="only these; no page before all have a run")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    parser.add_argument("--tables-only", action="store_true", help="run nothing")
    args = parser.parse_args()
    from evidence_pages import write_up  # it imports what stands above

    for name in EXPERIMENTS if "all" in args.names else args.names:
        if not args.tables_only:
            variants = args.variants or list(EXPERIMENTS[name].variants)
            run_missing(name, variants, args.seeds, args.at_once)
        if finished(name):
            write_up(name)


if __name__ == "__main__":
    main()
