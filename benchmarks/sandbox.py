"""Program runs per second of common/sandbox/pool.py: python benchmarks/sandbox.py

Against a plain interpreter per pair of a program and an input, and against the design of CURE's
released execute.py, written anew here: a forked multiprocessing.Process per pair, `exec` with stdin
replaced by a StringIO, 200 at a time, one second of wall-clock time, results fetched when all have
ended. As in that code, the process that forks is a trainer: it has torch loaded. See
side_by_side.py for what is written.
"""

import io
import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from side_by_side import arguments, compared, in_turn, keep  # isort: skip
from common.sandbox import Sandbox, same_output

CORES = 2
# each reads two lines: n, and the numbers 1 2 ... n
PROGRAMS = [
    "n = int(input()); print(sum(map(int, input().split())))",
    "import sys\nn, *x = map(int, sys.stdin.read().split())\nprint(max(x) - min(x))",
    "from collections import Counter\ninput(); print(len(Counter(input().split())))",
    "n = int(input())\nx = sorted(map(int, input().split()), reverse=True)\nprint(*x[:3])",
    "import math\nn = int(input())\nprint(math.factorial(n) % (10**9 + 7))",
    "n = int(input())\nf = [0, 1]\nfor _ in range(n): f.append(f[-1] + f[-2])\nprint(f[n])",
]


def pairs(count: int) -> tuple[list[str], list[str]]:
    """(programs, their inputs)"""
    programs = [PROGRAMS[i % len(PROGRAMS)] for i in range(count)]
    sizes = [3 + i % 90 for i in range(count)]
    return programs, [f"{n}\n{' '.join(map(str, range(1, n + 1)))}\n" for n in sizes]


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


def main():
    args = arguments(__doc__, repeats=7).parse_args()
    work = {"ours": 1000, "plain interpreter": 100, "bare forks, CURE's released design": 400}
    with Sandbox(CORES) as sandbox:
        ours = lambda *given: [result.output for result in sandbox.run(*given)]  # noqa: E731
        methods = dict(zip(work, (ours, run_plain, run_released)))
        runs = {name: partial(run, *pairs(work[name])) for name, run in methods.items()}
        times, last = in_turn(runs, args.repeats)
    expected = [output.decode() for output in last["plain interpreter"]]
    right = {name: sum(map(same_output, last[name], expected)) / len(expected) for name in work}
    rows = compared(times, work)
    for row in rows:
        row |= {"what": "running programs", "right": [right["ours"], right[row["against"]]]}
    keep(rows, args.out)


if __name__ == "__main__":
    main()
