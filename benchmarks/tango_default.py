"""What `python tango.py` shows, over seeds: python benchmarks/tango_default.py

Runs the default once per seed, one after the other, and writes held-out figures before and after, and the seconds, to
docs/evidence/tango_default.json. Finished seeds are kept; a seed that was interrupted goes on where it stopped.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs" / "evidence" / "tango_default.json"


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "tango_default")
    args = parser.parse_args()
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for seed in args.seeds:
        if str(seed) in results:
            print(f"seed {seed}: kept from before")
            continue
        start = time.time()
        folder = args.runs / str(seed)
        subprocess.run([sys.executable, "tango.py", "--seed", str(seed), "--out", str(folder)], cwd=ROOT, check=True)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]
        results[str(seed)] = {
            "wall_seconds": round(time.time() - start, 1),
            "machine": f"{processor()}, {os.cpu_count()} cores",
            "versions": json.loads((folder / "versions.json").read_text()),
            "evaluations": evaluations,
        }
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{'seed':<6}{'gen/accuracy':>24}{'ver/balanced_accuracy':>26}{'seconds':>10}")
    for seed, result in results.items():
        first, last = result["evaluations"][0], result["evaluations"][-1]
        columns = [
            f"{first[key]:.3f} -> {last[key]:.3f} ({last[key] - first[key]:+.3f})"
            for key in ("eval/gen/accuracy", "eval/ver/balanced_accuracy")
        ]
        print(f"{seed:<6}{columns[0]:>24}{columns[1]:>26}{result['wall_seconds']:>10}")


if __name__ == "__main__":
    main()
