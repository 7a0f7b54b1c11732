"""Does every default keep its five minutes? python benchmarks/defaults.py

Runs all scripts without arguments, one after the other on an otherwise idle machine, and writes
wall-clock and CPU seconds, evaluations included, to docs/evidence/defaults.json, from which
benchmarks/evidence.py makes a row of docs/measured.md. A script that is in the file already is
not run again; one that was interrupted starts anew, because its time would not be that of one run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tango_default import processor

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs" / "evidence" / "defaults.json"
SCRIPTS = "tango prime gar cure spin mae azr deepseekmath vstar self_rewarding".split()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", nargs="+", default=[], choices=SCRIPTS, help="measured anew")
    args = parser.parse_args()
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in SCRIPTS:
        if name in results and name not in args.again:
            continue
        folder = ROOT / "runs" / "defaults" / name
        shutil.rmtree(folder, ignore_errors=True)
        start, command = time.time(), [sys.executable, f"{name}.py", "--out", str(folder)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.time() - start
        if status:
            raise SystemExit(f"{name}.py ended with status {os.waitstatus_to_exitcode(status)}")
        cpu = round(usage.ru_utime + usage.ru_stime, 1)
        machine = f"{processor()}, {os.cpu_count()} cores"
        results[name] = {"wall_seconds": round(wall, 1), "cpu_seconds": cpu, "machine": machine}
        RESULT.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {wall:.0f} s, {cpu:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main()
