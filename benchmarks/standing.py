"""Where does a script stand? python benchmarks/standing.py my_script.py

Runs a script, one of ours or your own, on the embedded questions of one level with several seeds,
and prints its row below those of our scripts, with what it is better or worse by, seed by seed:

    python benchmarks/standing.py my_script.py --level tiny-hard -- --lr 1e-3 --steps 48

Our rows are the runs in docs/evidence/, with the arguments that differ from the defaults; they have
as many steps as these say. Held-out questions are the same for all scripts and seeds. The accuracy
is the first of the script's CURVES that ends in /accuracy and is not a judge's, the verifier's
figure the first one of an evaluation that ends in balanced_accuracy or rank_agreement. `a step` is
--questions times --group-size: the solutions that a step compares, where a script has both. A run
has one thread; finished ones are in runs/standing and are not repeated.
"""

import importlib
import json
import os
import re
import statistics
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import tyro
from claims import interval
from evidence import EXPERIMENTS, ROOT, read

OF_MEASURING = r"--(dataset|eval-questions|eval-every|show-every|save-every) \S+ ?"


def one_run(script: Path, level: str, more: list[str], seed: int) -> dict:
    """Runs it if it has not ended yet -> its figures."""
    words = [re.sub(r"\W+", "_", word) for word in more]
    folder = ROOT / "runs" / "standing" / "-".join([script.stem, level, *words]) / str(seed)
    options = f"--dataset {level} --seed {seed} --out {folder} --eval-every 0 --show-every 0"
    command = [sys.executable, script, *options.split(), *more]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    print(f"seed {seed} begins; what it prints is in {folder}.txt", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.txt", "w") as out:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=out, stderr=out)
    if done.returncode:
        raise SystemExit(f"{script}, seed {seed}:\n{Path(f'{folder}.txt').read_text()[-2000:]}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    curves = json.loads((folder / "about.json").read_text())["curves"]
    given = json.loads((folder / "args.json").read_text())
    found = figures([json.loads(line) for line in lines], curves) | {"solutions": solutions(given)}
    print(f"seed {seed} has ended after {found['seconds']:.0f} s", flush=True)
    return found


def solutions(args: dict) -> int:
    """That a step compares with each other; 0 where the arguments do not say."""
    return args.get("questions", 0) * args.get("group_size", 0)


def figures(rows: list[dict], curves: dict[str, list[str]]) -> dict:
    """accuracy and verifier: (before, after) or None; tokens of all players; seconds."""
    evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
    first, last = evaluations[0], evaluations[-1]
    named = re.compile(r"(?!judge|verifier|critic)\w+/accuracy")
    names = [f"eval/{key}" for keys in curves.values() for key in keys if named.fullmatch(key)]
    accuracy = next((name for name in names if name in last), "")
    verifier = next((n for n in last if re.search("(balanced_accuracy|rank_agreement)$", n)), "")
    found = {"accuracy": accuracy, "verifier": verifier}
    found = {what: [first[n], last[n]] if n in first else None for what, n in found.items()}
    tokens = sum(row.get("co/sampled_tokens", 0) for row in rows)
    return found | {"tokens": tokens, "seconds": rows[-1]["seconds"]}


def known(level: str) -> dict[str, dict[str, dict]]:
    """Script and arguments -> seed -> figures: the runs of docs/evidence/ on this level."""
    sys.path.insert(0, str(ROOT))  # where the scripts are
    found = {}
    for name, experiment in EXPERIMENTS.items():
        if name == "defaults" or "--model" in experiment.arguments:  # one seed; another model
            continue
        for run in read(name)["runs"]:
            variant = experiment.variants.get(run["variant"])
            if variant is None or variant.controls or variant.judge:
                continue
            script = variant.script or experiment.script
            given = f"{experiment.arguments} {variant.arguments}"
            its_level = re.search(r"--dataset (\S+)", given)
            programs = 'model: str = "tiny-' in (ROOT / script).read_text()
            if programs or (its_level[1] if its_level else "tiny") != level:
                continue
            label = " ".join([script, *re.sub(OF_MEASURING, "", given + " ").split()])
            module = importlib.import_module(script.removesuffix(".py"))
            rows = [*run["evaluations"], *run["steps"]]
            its = figures([*rows, {"seconds": run["seconds"]}], module.CURVES)
            its["solutions"] = solutions(vars(tyro.cli(module.Args, args=given.split())))
            found.setdefault(label, {})[str(run["seed"])] = its
    return found


def row_of(name: str, runs: dict[str, dict]) -> list[str]:
    """A line of the table. runs: seed -> figures."""
    cells = [name, str(len(runs))]
    for what in ("accuracy", "verifier"):
        pairs = [run[what] for run in runs.values() if run[what]]
        before, after = (statistics.mean(x) for x in zip(*pairs)) if pairs else (None, None)
        cells.append(f"{100 * before:.0f} -> {100 * after:.0f}" if pairs else "-")
    for what in ("solutions", "tokens", "seconds"):
        mean = statistics.mean(run[what] for run in runs.values())
        cells.append(f"{mean:,.0f}" if mean else "-")
    return cells


def compared(mine: dict[str, dict], theirs: dict[str, dict]) -> str:
    """Accuracy, mine minus theirs, over the seeds of both."""
    seeds = [s for s in mine if s in theirs and mine[s]["accuracy"] and theirs[s]["accuracy"]]
    if not seeds:
        return "-"
    gaps = [100 * (mine[s]["accuracy"][1] - theirs[s]["accuracy"][1]) for s in seeds]
    middle, low, high = interval(gaps)
    return f"{middle:+.1f}" + (f" [{low:.1f}, {high:.1f}]" if len(gaps) > 1 else "")


def main():
    own, more = sys.argv[1:], []
    if "--" in own:
        own, more = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("--level", default="tiny", choices=("tiny", "tiny-hard", "tiny-long"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    args = parser.parse_args(own)
    if not args.script.exists():
        raise SystemExit(f"{args.script}: there is no such script.")
    run = partial(one_run, args.script.resolve(), args.level, more)
    with ThreadPoolExecutor(args.at_once) as pool:
        mine = {str(seed): found for seed, found in enumerate(pool.map(run, range(args.seeds)))}
    table = [["script", "seeds", "accuracy", "verifier", "a step", "tokens", "seconds"]]
    table[0].append("mine minus this")
    for other, runs in known(args.level).items():
        table.append([*row_of(other, runs), compared(mine, runs)])
    table.append([*row_of(" ".join([args.script.name, *more]), mine), ""])
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


if __name__ == "__main__":
    main()
