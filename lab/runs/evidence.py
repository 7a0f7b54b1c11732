"""Runs the training experiments of experiments.toml, and keeps what they find:

    python -m lab.runs.evidence tango "answer only" --seed 0    one run, beside the committed one
    python -m lab.runs.evidence tango "answer only"             the variant's missing seeds
    python -m lab.runs.evidence tango                           every variant's; `all` experiments

A run is one process with one thread, but for timed ones. What it needs runs before it: another
run's verifier, or the model on which spin.py starts. The first form keeps nothing. The others keep
runs in lab/evidence/NAME.json: held-out evaluations, of every step the metrics that the experiment
compares, the commit, and a hash of the code. Finished runs are not repeated, an interrupted one
resumes unless the code has changed since. At the end pages.py makes tables and figures, of these
files alone.
"""

import ast
import hashlib
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import tokenize
import tomllib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock

from lab import EVIDENCE, ROOT
from lab.runs.measures import OF_STEPS, measure

RUNS = ROOT / "runs" / "evidence"
MAKING = Lock()  # one thread makes what several runs need
QUIET = "--eval-every 0 --show-every 0 --save-every 1000"  # of every run that is not timed


@dataclass
class Variant:
    """See experiments.toml, also for the fields of `Experiment`."""

    script: str = ""
    arguments: str = ""
    controls: list[str] = field(default_factory=list)
    judge: list[str] = field(default_factory=list)
    seeds: int = 5
    own_start: bool = False
    recorded: str = ""


@dataclass
class Experiment:
    variants: dict[str, Variant]
    script: str
    page: str
    arguments: str = ""
    timed: bool = False
    columns: list[list[str]] = field(default_factory=list)
    panels: list[list] = field(default_factory=list)


def _read_experiments() -> dict[str, Experiment]:
    read = tomllib.loads((Path(__file__).parent / "experiments.toml").read_text())
    for name, given in read.items():
        given["variants"] = {variant: Variant(**v) for variant, v in given["variants"].items()}
        script = given.setdefault("script", f"{name}.py")
        read[name] = {"page": f"{script.removesuffix('.py')}.md#results"} | given
    # the minutes that every script takes, evaluations included
    scripts = sorted(p for p in ROOT.glob("*.py") if "\nclass Args(" in p.read_text())
    variants = {path.stem: Variant(path.name, seeds=1) for path in scripts}
    read["defaults"] = {"variants": variants, "script": "", "page": "results.md", "timed": True}
    return {name: Experiment(**given) for name, given in read.items()}


EXPERIMENTS = _read_experiments()


# ------------------------------------------------------------------ what is kept
def kept_metrics(name: str) -> set[str]:
    """Of every step: what columns and panels name, and what `measures.having` asks for."""
    experiment = EXPERIMENTS[name]
    texts = [text for _, text, *_ in experiment.columns if text.startswith(OF_STEPS)]
    parts = [text.split(":") for text in texts]
    parts += [[x, key] for _, x, key, *_ in experiment.panels if not key.startswith("eval/")]
    named = {part for some in parts for part in some if "/" in part}
    return named | {"step", "co/sampled_tokens", "co/alpha"}


def read(file: str, timed: bool = False) -> dict:
    """What lab/evidence/FILE.json holds: the machine, and the finished runs."""
    path = EVIDENCE / f"{file}.json"
    if path.exists():
        return json.loads(path.read_text())
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cpu = found[1] if found else f"{platform.machine()} CPU"
    threads = os.environ.get("OMP_NUM_THREADS", os.cpu_count()) if timed else 1  # see `run`
    return {"machine": f"{cpu}, {threads} thread{'s' * (int(threads) > 1)}", "runs": []}


def runs_of(name: str, variant: str, file: str = "") -> dict[int, dict]:
    """Seed -> run, of lab/evidence/NAME.json or another file."""
    its = recorded(name, variant)
    runs = [run for run in read(file or name)["runs"] if run["variant"] == its]
    return {run["seed"]: run for run in sorted(runs, key=lambda run: run["seed"])}


def recorded(name: str, variant: str) -> str:
    """What runs of a variant call it: its name, or the name that it had when they began."""
    return EXPERIMENTS[name].variants.get(variant, Variant()).recorded or variant


def with_runs(name: str) -> list[str]:
    """The variants of the experiment that have a run, in its order."""
    return [variant for variant in EXPERIMENTS[name].variants if runs_of(name, variant)]


# ------------------------------------------------------------------ which code a run is of
NO_PART = "common/run/report/"
"""Of common/, what changes no run of an experiment."""


@cache
def bare(path: Path) -> str:
    """A file's code, without what changes no run: comments, docstrings, empty lines."""
    text = path.read_text()
    lines, tokens = text.splitlines(), [*tokenize.generate_tokens(io.StringIO(text).readline)]
    said = [token for token in tokens if token.type not in (tokenize.COMMENT, tokenize.NL)]
    starts = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for before, token, after in zip([None, *said], said, said[1:]):
        alone = (before is None or before.type in starts) and after.type == tokenize.NEWLINE
        if token.type == tokenize.STRING and alone:
            first, last = token.start[0] - 1, token.end[0]
            lines[first:last] = [""] * (last - first)
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def code_of_controls(names: list[str]) -> dict[str, str]:
    """Name -> source, of these controls and of whatever they name of controls.py."""
    text = bare(ROOT / "lab/runs/controls.py")
    defined, found, left = {}, {}, [name.partition("=")[0] for name in names]
    for node in ast.parse(text).body:
        targets = getattr(node, "targets", [node])
        defined |= {getattr(x, "id", getattr(x, "name", "")): node for x in targets}
    while left:
        name = left.pop()
        if name in defined and name not in found:
            found[name] = ast.get_source_segment(text, defined[name])
            left += re.findall(r"\w+", found[name])
    if "asked" in names:
        found["verifiers.py"] = bare(ROOT / "lab/runs/verifiers.py")
    return found


def code_of(name: str, variant: str) -> str:
    """A hash of what a run of this variant executes: the script and common/, the small models,
    its controls, its arguments. The prerequisites of a run are not in it.
    """
    experiment, chosen = EXPERIMENTS[name], EXPERIMENTS[name].variants[variant]
    script = ROOT / (chosen.script or experiment.script)
    forked = [ROOT / f"{name}.py" for name in re.findall(r"(?m)^import (\w+)$", script.read_text())]
    files = [script, *filter(Path.exists, forked), *sorted((ROOT / "common").rglob("*.py"))]
    parts = [bare(path) for path in files if NO_PART not in path.as_posix()]
    parts += [file_hash(path) for path in sorted((ROOT / "common/tiny").glob("*/*.safetensors"))]
    controls = code_of_controls([*chosen.controls, *["judge_from"] * bool(chosen.judge)])
    parts += [*map(str, sorted(controls.items())), experiment.arguments, chosen.arguments]
    parts += [control for control in chosen.controls if "=" in control]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@cache
def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def commit() -> str:
    """HEAD; "-dirty" behind it where a file differs that is neither evidence nor text."""

    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    unlike = git(
        "status", "--porcelain", "--untracked-files=no", ":!docs", ":!lab/evidence", ":!*.md"
    )
    return git("rev-parse", "HEAD") + "-dirty" * bool(unlike)


# ------------------------------------------------------------------ running
def folder_of(name: str, variant: str, seed: int) -> Path:
    return RUNS / name / re.sub(r"\W+", "_", variant) / str(seed)


def judge_of(name: str, variant: str, seed: int) -> list[str]:
    """The control that starts with the variant's judge, whose run comes first if it has not ended,
    or was one of other code.
    """
    if not EXPERIMENTS[name].variants[variant].judge:
        return []
    where, whose, player = EXPERIMENTS[name].variants[variant].judge
    adapter = folder_of(where, whose, seed) / player
    mark = adapter.parent.with_suffix(".code")
    ended = (adapter / "adapter_model.safetensors").exists() and mark.exists()
    if not ended or mark.read_text() != code_of(where, whose):
        print(f"{name}, {variant}, seed {seed} needs the run {where}, {whose}: it runs", flush=True)
        run(where, whose, seed)
    return [f"judge_from={adapter}"]


def command(name: str, variant: str, seed: int) -> list[str]:
    """What starts a run, after its prerequisites; its output folder is not in it."""
    experiment, chosen = EXPERIMENTS[name], EXPERIMENTS[name].variants[variant]
    if "spin_base" in experiment.arguments:
        with MAKING:
            spin_base()
    controls = chosen.controls + judge_of(name, variant, seed)
    words = [sys.executable, *["-m", "lab.runs.controls"] * bool(controls)]
    words += [chosen.script or experiment.script, *controls]
    quiet = "" if experiment.timed else QUIET
    options = f"{quiet} {experiment.arguments} {chosen.arguments} --seed {seed}"
    for base in re.findall(r"runs/bases/\S+", options):
        with MAKING:
            make_base(base)
    for file in re.findall(r"--(?:model|dataset) (\S*[/.]\S*)", options):
        if not (ROOT / file).exists():
            raise SystemExit(f"{name} needs {file}; lab/notes/warm-up.md says where it comes from.")
    return words + options.split()


def run(name: str, variant: str, seed: int) -> dict:
    """One run of a variant, in a process of its own -> what is kept of it."""
    experiment, code = EXPERIMENTS[name], code_of(name, variant)
    words, folder = command(name, variant, seed), folder_of(name, variant, seed)
    mark = folder.with_suffix(".code")
    # a resumed run's time would not be that of one run, and its code not that of one
    if experiment.timed or not mark.exists() or mark.read_text() != code:
        shutil.rmtree(folder, ignore_errors=True)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(code)
    one = {} if experiment.timed else {"OMP_NUM_THREADS": "1"}
    start, env = time.time(), os.environ | one | {"PYTHONPATH": str(ROOT)}
    of = {"commit": commit()}
    words += ["--out", str(folder)]
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
        "variant": recorded(name, variant),
        "seed": seed,
        "seconds": rows[-1]["seconds"],
        "wall_seconds": round(wall, 1),
        "code": code,
        "versions": json.loads((folder / "versions.json").read_text()) | of,
        "questions": json.loads((folder / "args.json").read_text())["eval_questions"],
        "evaluations": [{key: short(value) for key, value in row.items()} for row in evaluations],
        "steps": [{key: short(x) for key, x in row.items() if key in kept} for row in steps],
    }


def run_missing(name: str, jobs: list[tuple[str, int]], at_once: int):
    """The jobs (variant, seed) that lab/evidence/NAME.json does not hold yet; each run is kept as
    soon as it ends.
    """
    timed = EXPERIMENTS[name].timed
    missing = [job for job in jobs if job[1] not in runs_of(name, job[0])]
    with ThreadPoolExecutor(at_once) as pool:
        for result in pool.map(lambda job: run(name, *job), missing):
            kept = read(name, timed)  # as it is now: another process may have added a run
            kept["runs"].append(result)
            (EVIDENCE / f"{name}.json").write_text(json.dumps(kept) + "\n")
            took = f"seed {result['seed']}, {result['wall_seconds']:.0f} s"
            print(f"{name}: {result['variant']}, {took}", flush=True)


def repeat(name: str, variant: str, seed: int):
    """Runs it, and prints its figures beside the committed run's. Keeps nothing."""
    print(shlex.join(command(name, variant, seed)), flush=True)
    tried = runs_of(name, variant, f"{name}_settings")
    here, committed = run(name, variant, seed), (tried | runs_of(name, variant)).get(seed)
    both = [here] if committed is None else [here, committed]
    print(f"{'':36}{'here':>12}{'committed' if committed else 'none is committed':>12}")
    for title, text, *count in EXPERIMENTS[name].columns:
        cells = [measure(text, found) for found in both]
        if all(x != x for x in cells):  # without a verifier there is nothing to say of it
            continue
        cells = [f"{x:,.0f}" if count else f"{100 * x:.1f} %" for x in cells]
        print(f"{title:36}" + "".join(f"{cell:>12}" for cell in cells))
    for found, whose in zip(both, ("here", "committed")):
        v = found["versions"]
        code = "today's code" if found.get("code") == here["code"] else "older code"
        print(f"{whose}: commit {v['commit']}, {code}, Python {v['python']}, torch {v['torch']}")


def make_base(base: str):
    """runs/bases/NAME, a model of bases.py."""
    if not (ROOT / base / "config.json").exists():
        words = [sys.executable, "-m", "lab.runs.bases", Path(base).name]
        subprocess.run(words, cwd=ROOT, check=True)


def spin_base():
    """A model on which continued SFT has nothing left to give. SPIN starts where SFT on the human
    answers has ended: the small model is trained on the right solutions of 1,200 questions for
    many passes, and the adapter is merged into it. Seed 21, which no experiment reports.
    """
    folder = RUNS / "spin_base"
    if (folder / "model" / "config.json").exists():
        return
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


def run_experiment(name: str, only: str | None, at_once: int):
    """The missing runs of an experiment, or of one variant."""
    experiment, variants = EXPERIMENTS[name], EXPERIMENTS[name].variants
    chosen = {only: variants[only]} if only else variants
    at_once = 1 if experiment.timed else at_once
    jobs = [(variant, seed) for variant in chosen for seed in range(chosen[variant].seeds)]
    jobs.sort(key=lambda job: job[1])  # of all variants the first seed, the second, ...
    run_missing(name, jobs, at_once)


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("variant", nargs="?", help="as experiments.toml and the tables call it")
    parser.add_argument("--seed", type=int, help="this run alone, beside the committed one")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    names = [*EXPERIMENTS] if args.experiment == "all" else [args.experiment]
    known = [variant for name in names for variant in EXPERIMENTS[name].variants]
    if args.variant and args.variant not in known or args.experiment == "all" and args.variant:
        parser.error(f"{args.experiment} has no variant {args.variant!r}, but: {', '.join(known)}")
    if args.seed is not None:
        if not args.variant:
            parser.error("--seed takes one run: name its variant, too")
        return repeat(args.experiment, args.variant, args.seed)
    for name in names:
        run_experiment(name, args.variant, args.at_once)
    # a command of its own, because it imports this file
    subprocess.run([sys.executable, "-m", "lab.runs.pages", *names], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
