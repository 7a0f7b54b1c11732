"""Do the tests notice when the mathematics is wrong? Each line of mutations.toml changes one place
of a copy of the project, and runs the tests that should see it:

    python tests/mutate.py                        all of them, in hours; resumes where it stopped
    python tests/mutate.py tango                  those of files whose name has this in it
    python tests/mutate.py --sample 30 --seed 1   30 of them, drawn at random: an estimated score

A mutation that survives is printed, with its reason in mutations.toml if it has one. Tests that
fail on the unchanged copy end it: they would notice everything. Not a part of the suite, which
only keeps the anchors alive (test_mutations.py). Results: mutations.jsonl beside the copy, in the
folder that --out names.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).parent.parent
IGNORED = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".pytest_cache", "docs")


@dataclass
class Args:
    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """only files whose name contains one of these"""
    sample: int | None = None
    """only so many of them, drawn at random"""
    seed: int = 0
    """random seed of the sample"""
    out: Path = Path("runs/mutations")
    """the copy, and the results so far"""


def mutations(names: tuple[str, ...] = ()) -> list[dict]:
    """[{file, old, new, tests, why?}]; tests: pytest's arguments."""
    table, found = tomllib.loads((ROOT / "tests" / "mutations.toml").read_text()), []
    for file, entry in table.items():
        for change in entry["changes"]:
            old, new, *why = change
            found.append({"file": file, "old": old, "new": new, "tests": entry["tests"]})
            found[-1] |= {"why": why[0]} if why else {}
    return [m for m in found if not names or any(name in m["file"] for name in names)]


def notice(copy: Path, tests: str) -> bool:
    """Whether one of the tests fails on the copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *tests.split()],
            cwd=copy,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
    except subprocess.TimeoutExpired:  # a loop without an end is noticed
        return True
    if done.returncode not in (0, 1):
        raise SystemExit(f"{tests}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode == 1


def is_caught(copy: Path, mutation: dict) -> bool:
    """Whether the tests fail on the changed copy, which is put right again."""
    path = copy / mutation["file"]
    text = path.read_text()
    if text.count(mutation["old"]) != 1:
        raise SystemExit(f"{mutation['file']}: {mutation['old']!r} is there not just once")
    path.write_text(text.replace(mutation["old"], mutation["new"]))
    try:
        return notice(copy, mutation["tests"])
    finally:
        path.write_text(text)


def main(args: Args):
    copy, results = args.out / "copy", args.out / "mutations.jsonl"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, ignore=IGNORED)
    (copy / "docs").symlink_to(ROOT / "docs")
    lines = results.read_text().splitlines() if results.exists() else []
    known = {(r["file"], r["old"], r["new"]): r["caught"] for r in map(json.loads, lines)}
    chosen, pass_unchanged = mutations(args.names), set()
    if args.sample is not None:
        chosen = random.Random(args.seed).sample(chosen, min(args.sample, len(chosen)))
    for number, m in enumerate(chosen, start=1):
        key = m["file"], m["old"], m["new"]
        if key not in known:
            if m["tests"] not in pass_unchanged and notice(copy, m["tests"]):
                raise SystemExit(f"{m['tests']}: fail on the unchanged copy")
            pass_unchanged.add(m["tests"])
            known[key] = is_caught(copy, m)
            with open(results, "a") as file:
                file.write(json.dumps(m | {"caught": known[key]}) + "\n")
        state = "caught" if known[key] else f"SURVIVES ({m.get('why', 'no reason known')})"
        print(f"{number}/{len(chosen)} {m['file']}: {m['old']} -> {m['new']}: {state}", flush=True)
    caught = sum(known[m["file"], m["old"], m["new"]] for m in chosen)
    print(f"{caught} of {len(chosen)} caught")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
