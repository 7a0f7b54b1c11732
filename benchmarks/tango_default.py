"""What `python tango.py` shows, over seeds: python benchmarks/tango_default.py

Runs the default once per seed, one after the other, and writes held-out figures before and after,
and the seconds, to docs/evidence/tango_default.json, the table of docs/tango.md and the picture.
Finished seeds are kept; a seed that was interrupted goes on where it stopped.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs" / "evidence" / "tango_default.json"


def processor() -> str:
    """The CPU's name, as Linux gives it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


COLUMNS = {
    "eval/generator/accuracy": "generator accuracy",
    "eval/generator/greedy": "the same, greedy",
    "eval/generator/step_accuracy": "its steps",
    "eval/generator/step_accuracy_greedy": "the same, greedy",
    "eval/verifier/balanced_accuracy": "verifier balanced accuracy",
    "eval/verifier/balanced_accuracy_greedy": "the same, greedy",
    "eval/verifier/step_f1": "verifier step F1",
    "eval/verifier/step_f1_greedy": "the same, greedy",
    "eval/co/mean_of_same": "mean of 4 samples, a quarter of the questions",
    "eval/co/best_of_4": "best of these 4, picked by the verifier",
}


def table(results: dict) -> str:
    """The table of docs/tango.md: held-out figures before -> after, per seed."""
    some = next(iter(results.values()))
    lines = [
        "Held-out figures before and after `python tango.py`, sampled at temperature 1 but for "
        f"greedy, {some['held_out_questions']} questions, four samples of each, {some['machine']}:",
        "",
        "| seed | " + " | ".join(COLUMNS.values()) + " | minutes |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for seed, result in results.items():
        first, last = result["evaluations"][0], result["evaluations"][-1]
        cells = [f"{100 * first[key]:.0f} → {100 * last[key]:.0f} %" for key in COLUMNS]
        lines.append(f"| {seed} | " + " | ".join(cells) + f" | {result['wall_seconds'] / 60:.1f} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "tango_default")
    args = parser.parse_args()
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for seed in args.seeds:
        if str(seed) in results:
            print(f"seed {seed}: kept from before")
            continue
        start, folder = time.time(), args.runs / str(seed)
        command = [sys.executable, "tango.py", "--seed", str(seed), "--out", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
        results[str(seed)] = {
            "wall_seconds": round(time.time() - start, 1),
            "machine": f"{processor()}, {os.cpu_count()} cores",
            "versions": json.loads((folder / "versions.json").read_text()),
            "held_out_questions": json.loads((folder / "args.json").read_text())["eval_questions"],
            "evaluations": evaluations,
        }
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    print(text)
    page = ROOT / "docs" / "tango.md"
    start, end = "<!-- table: tango_default -->\n", "<!-- end -->"
    before, after = page.read_text().split(start)
    page.write_text(before + start + text + end + after.split(end, 1)[1])
    shutil.copy(args.runs / str(args.seeds[0]) / "curves.png", ROOT / "docs" / "tango_default.png")


if __name__ == "__main__":
    main()
