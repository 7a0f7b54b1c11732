"""Program runs per second of common/sandbox/pool.py, and what a long load leaves behind.

    python benchmarks/sandbox.py            # speed: rounds in turn, medians and range
    python benchmarks/sandbox.py --load     # 50,000 runs, every tenth program hostile

Speed is compared with a plain interpreter per pair of a program and an input, and with the design
of CURE's released execute.py, written anew here: a forked multiprocessing.Process per pair, `exec`
with stdin replaced by a StringIO, 200 at a time, one second of wall-clock time, results fetched
when all have ended. As in that code, the process that forks is a trainer: it has torch loaded.
Writes docs/evidence/sandbox.json.
"""

import argparse
import io
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from common.sandbox import Sandbox, Status, same_output  # noqa: E402

import torch  # noqa: E402, F401

CORES = 2
# (program, what it prints for the numbers 1 2 ... n on two lines: n, then the numbers)
PROGRAMS = [
    ("n = int(input()); print(sum(map(int, input().split())))", lambda n: n * (n + 1) // 2),
    (
        "import sys\nn, *x = map(int, sys.stdin.read().split())\nprint(max(x) - min(x))",
        lambda n: n - 1,
    ),
    ("from collections import Counter\ninput(); print(len(Counter(input().split())))", lambda n: n),
    (
        "n = int(input())\nx = sorted(map(int, input().split()), reverse=True)\nprint(*x[:3])",
        lambda n: f"{n} {n - 1} {n - 2}",
    ),
    (
        "import math\nn = int(input())\nprint(math.factorial(n) % (10**9 + 7))",
        lambda n: FACTORIALS[n],
    ),
    (
        "n = int(input())\nf = [0, 1]\nfor _ in range(n): f.append(f[-1] + f[-2])\nprint(f[n])",
        lambda n: FIBONACCI[n],
    ),
]
FACTORIALS, FIBONACCI = [1], [0, 1]
for i in range(1, 100):
    FACTORIALS.append(FACTORIALS[-1] * i % (10**9 + 7))
    FIBONACCI.append(FIBONACCI[-1] + FIBONACCI[-2])


def pairs(count: int) -> tuple[list[str], list[str], list[str]]:
    """(programs, inputs, expected outputs)"""
    chosen = [(*PROGRAMS[i % len(PROGRAMS)], 3 + i % 90) for i in range(count)]
    programs = [program for program, _, _ in chosen]
    inputs = [f"{n}\n{' '.join(map(str, range(1, n + 1)))}\n" for _, _, n in chosen]
    return programs, inputs, [str(expected(n)) for _, expected, n in chosen]


# ------------------------------------------------------------------ the three
def run_sandbox(sandbox, programs, inputs) -> list[bytes]:
    return [result.output for result in sandbox.run(programs, inputs)]


def run_plain(programs, inputs) -> list[bytes]:
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}

    def run_one(program, text) -> bytes:
        return subprocess.run([sys.executable, "-c", program], input=text.encode(), **quiet).stdout

    with ThreadPoolExecutor(CORES) as pool:
        return list(pool.map(run_one, programs, inputs))


def run_released(programs, inputs) -> list[bytes]:
    fork = multiprocessing.get_context("fork")

    def child(program, text, queue):
        lines = iter(text.splitlines())
        sys.stdin, sys.stdout = io.StringIO(text), io.StringIO()
        try:
            exec(program, {"__name__": "__main__", "input": lambda *_: next(lines)})
        except BaseException as error:
            print(f"error: {error}")
        queue.put(sys.stdout.getvalue())

    outputs = []
    for at in range(0, len(programs), 200):
        started = []
        for program, text in zip(programs[at : at + 200], inputs[at : at + 200]):
            queue = fork.Queue()
            process = fork.Process(target=child, args=(program, text, queue))
            process.start()
            started.append((process, queue, time.monotonic() + 1))
        for process, queue, deadline in started:
            process.join(max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.terminate()
                process.join()
                outputs.append(b"Timeout Error")
            else:
                outputs.append(queue.get().encode())
    return outputs


def speed(rounds: int) -> dict:
    rows = {"sandbox": [], "plain interpreter": [], "released design": []}
    right = Counter()
    counts = {"sandbox": 1000, "plain interpreter": 100, "released design": 400}
    with Sandbox(CORES) as sandbox:
        runners = {
            "sandbox": partial(run_sandbox, sandbox),
            "plain interpreter": run_plain,
            "released design": run_released,
        }
        for _ in range(rounds):
            for name, run in runners.items():
                programs, inputs, expected = pairs(counts[name])
                start = time.perf_counter()
                outputs = run(programs, inputs)
                rows[name].append(counts[name] / (time.perf_counter() - start))
                right[name] += sum(map(same_output, outputs, expected))
                rate = f"{rows[name][-1]:>8.0f} runs per second"
                print(f"{name:<18}{rate}, right {right[name]}", flush=True)
    result = {"rounds": rounds, "right_of_100_that_compute_for_0.1_s": crowded()}
    for name, values in rows.items():
        ratios = [ours / theirs for ours, theirs in zip(rows["sandbox"], values)]
        result[name] = {
            "runs_per_second": statistics.median(values),
            "range": [min(values), max(values)],
        }
        if name != "sandbox":
            result[name] |= {
                "sandbox_is_faster_by": statistics.median(ratios),
                "range_of_that": [min(ratios), max(ratios)],
            }
        result[name]["right_outputs"] = right[name] / (rounds * counts[name])
    return result


def crowded() -> dict:
    """Share of right programs that are taken for right, when each computes for 0.1 s and there are
    many more than cores.
    """
    program = "import time\nwhile time.process_time() < 0.1: pass\nprint(1)"
    programs, inputs = [program] * 100, [""] * 100
    with Sandbox(CORES) as sandbox:
        outputs = {
            "sandbox": run_sandbox(sandbox, programs, inputs),
            "released design": run_released(programs, inputs),
        }
    return {name: sum(same_output(o, "1") for o in of) / 100 for name, of in outputs.items()}


# ------------------------------------------------------------------ load
THREADS = """import threading, time
for _ in range(9): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"""
HOSTILE = {
    "while True: pass": Status.TIMEOUT,
    "import os\nwhile True: os.fork()": Status.ERROR,
    "x = bytearray(10 ** 10)": Status.MEMORY,
    "while True: print('x' * 10 ** 6)": Status.OUTPUT,
    "import socket; socket.socket()": Status.ERROR,
    "open('/etc/passwd')": Status.ERROR,
    "for i in range(9): open(str(i), 'w').write('x' * 1000)": Status.ERROR,
    THREADS: Status.OK,
    "import ctypes; ctypes.string_at(0)": Status.WRONG_EXIT,
    "import os; os.kill(os.getppid(), 9)": Status.ERROR,
}


def footprint(sandbox: Sandbox) -> dict:
    """Processes, descriptors and memory (MB) of this process and the sandbox's workers."""
    workers = [worker.process.pid for worker in sandbox.workers]
    parents = []  # of every process of this machine
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.append(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            pass  # it has ended meanwhile

    def resident(pid) -> float:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 2**20

    return {
        "processes": sum(parent in map(str, [os.getpid(), *workers]) for parent in parents),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "worker_descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in workers),
        "trainer_mb": round(resident(os.getpid()), 1),
        "worker_mb": round(sum(map(resident, workers)), 1),
    }


def load(total: int) -> dict:
    """Batches of 500: 450 programs with inputs, and the hostile ones five times."""
    programs, inputs, answers = pairs(450)
    programs, inputs, answers = (
        programs + list(HOSTILE) * 5,
        inputs + [""] * 50,
        answers + [""] * 50,
    )
    with Sandbox(CORES) as sandbox:
        sandbox.run(programs, inputs, time_limit=0.2)
        rows, wrong, start = [{"runs": 0, **footprint(sandbox)}], Counter(), time.perf_counter()
        pids = [worker.process.pid for worker in sandbox.workers]
        for runs in range(500, total + 1, 500):
            results = sandbox.run(programs, inputs, time_limit=0.2)
            for program, result, answer in zip(programs, results, answers):
                as_expected = result.status is HOSTILE.get(program, Status.OK)
                if not as_expected or (answer and not same_output(result.output, answer)):
                    wrong[f"{result.status.name}: {program}"] += 1
            if runs % 5000 == 0:
                rows.append({"runs": runs, **footprint(sandbox)})
                seconds = time.perf_counter() - start
                print(f"{seconds:.0f} s, {wrong.total()} wrong, {rows[-1]}", flush=True)
        seconds = time.perf_counter() - start
        same_workers = pids == [worker.process.pid for worker in sandbox.workers]
    return {
        "seconds": seconds,
        "wrong": wrong,
        "same_workers": same_workers,
        "footprint": rows,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--runs", type=int, default=50_000)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "evidence" / "sandbox.json")
    args = parser.parse_args()
    evidence = {"machine": "2-core CPU"}
    if args.out.exists():
        evidence = json.loads(args.out.read_text())
    if args.load:
        evidence["load"] = load(args.runs)
    else:
        evidence["speed"] = speed(args.rounds)
    args.out.write_text(json.dumps(evidence, indent=1) + "\n")


if __name__ == "__main__":
    main()
