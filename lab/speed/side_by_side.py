"""Ours beside a peer in one process, for logprob.py and step.py.

The methods alternate, so that a busy machine slows all of them. A figure is the median over
repetitions of the ratio ours / peer within one repetition, with its range. Rows are kept in
lab/evidence/speed_<device>.json; what is measured again replaces its row.
"""

import ctypes
import gc
import importlib.metadata
import json
import platform
import re
import statistics
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path

from lab import EVIDENCE

import torch

GPU = torch.cuda.is_available()


def machine() -> str:
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name() if GPU else cpu


def libraries() -> str:
    """The processor, which starts a GPU's kernels, and the versions of what is compared."""
    text = Path("/proc/cpuinfo").read_text()
    cpu = re.search(r"model name\s*: (.*)", text)
    names = ["torch", "transformers", "trl", "peft", "bitsandbytes"]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return ", ".join([cpu[1] if cpu else platform.machine(), *versions])


def now() -> float:
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def in_turn(methods: dict[str, Callable], repeats: int) -> tuple[dict[str, list[float]], dict]:
    """(seconds of each method, what it returned last); a round before the first one warms up."""
    times, last = {name: [] for name in methods}, {}
    for repeat in range(repeats + 1):
        for name, method in methods.items():
            last.pop(name, None)  # its memory
            start = now()
            last[name] = method()
            if repeat:
                times[name].append(now() - start)
    return times, last


def compared(times: dict[str, list[float]]) -> list[dict]:
    """A row for each peer."""
    ours, rows = times["ours"], []
    for name, theirs in times.items():
        if name == "ours":
            continue
        ratios = [a / b for a, b in zip(ours, theirs)]
        row = {"ratio": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
        row |= {k: 1e3 * statistics.median(s) for k, s in (("ours_ms", ours), ("its_ms", theirs))}
        rows.append({"against": name, **row, "repeats": len(ratios)})
    return rows


def peak_mib(work) -> float:
    """Most memory alive above what was there before."""
    if GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work has freed goes back to the system
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status_kib("VmRSS")
    work()
    return (status_kib("VmHWM") - before) / 1024


def status_kib(key: str) -> int:
    return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def with_memory(methods: dict[str, Callable], repeats: int) -> tuple[list[dict], dict]:
    """(rows for the peers, with the memory that ours and theirs take, what each returned last)."""
    extra = {name: peak_mib(method) for name, method in methods.items()}
    times, last = in_turn(methods, repeats)
    rows = compared(times)
    return [row | {"extra_mib": [extra["ours"], extra[row["against"]]]} for row in rows], last


def keep(rows: list[dict], out: Path):
    """Shows the rows, and writes them down with what they were measured on."""
    kept = json.loads(out.read_text())["rows"] if out.exists() else []
    places = {(row["what"], row["against"]): row for row in kept}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "trl")}
    for row in rows:
        print("{what}, against {against}: {ratio:.2f}x".format(**row), row["range"], flush=True)
        places[row["what"], row["against"]] = row | {"machine": machine(), **versions}
    out.write_text(json.dumps({"rows": list(places.values())}, indent=1) + "\n")


def arguments(description: str, repeats: int) -> ArgumentParser:
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=2)
    file = f"speed_{'gpu' if GPU else 'cpu'}.json"
    parser.add_argument("--out", type=Path, default=EVIDENCE / file)
    return parser
