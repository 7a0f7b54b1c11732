"""linear_logprob against its peers, side by side in one process: python benchmarks/logprob.py

Forward and backward pass with a gradient for the hidden states, a frozen head, and a random
gradient per token. The methods alternate; a figure is the median over repetitions of the ratio ours
/ peer within one repetition, with its range. Errors are against float64. Writes
docs/evidence/logprob_<device>.json.

    naive   log_softmax of all logits, autograd
    TRL     trl.kernels.ChunkedLogProbFunction, which GRPOTrainer uses
    Liger   its _ChunkedSelectiveLogProbFunction (no entropy)
    CCE     cut-cross-entropy, exact (GPU only)
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from common.logprob import linear_logprob  # noqa: E402

CPU_SIZES = [(2048, 256, 4096), (512, 1024, 32768), (512, 256, 32768), (512, 256, 151936)]
GPU_SIZES = [(16384, 2048, 151936), (16384, 4096, 151936)]


def naive(hidden, weight, targets, temperature):
    logp = torch.log_softmax((hidden @ weight.T).float() / temperature, dim=-1)
    return logp.gather(1, targets[:, None]).squeeze(1)


def trl(hidden, weight, targets, temperature):
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    outputs = ("entropy",)
    return ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, temperature, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
    )[0]


def liger(hidden, weight, targets, temperature):
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

    return _ChunkedSelectiveLogProbFunction.apply(hidden, weight, targets, None, temperature, 4096)


def cce(hidden, weight, targets, temperature):
    from cut_cross_entropy import linear_cross_entropy

    hidden = hidden / temperature
    return -linear_cross_entropy(hidden, weight, targets, reduction="none", filter_eps=None)


def ours(hidden, weight, targets, temperature):
    return linear_logprob(hidden, weight, targets, temperature=temperature)[0]


def once(method, hidden, weight, targets, upstream, train: bool) -> tuple[float, torch.Tensor]:
    """(seconds of one forward and, if `train`, backward pass; the log-probs)"""
    leaf = hidden.detach().requires_grad_(train)
    sync = torch.cuda.synchronize if hidden.is_cuda else lambda: None
    sync()
    start = time.perf_counter()
    with torch.set_grad_enabled(train):
        logp = method(leaf, weight, targets, 0.9)
        if train:
            logp.backward(upstream.to(logp.dtype))
    sync()
    return time.perf_counter() - start, logp.detach()


def peak_mib(method, *arguments) -> float:
    """Most memory alive above what the inputs take."""
    if arguments[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        once(method, *arguments, True)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status_kib("VmRSS")
    once(method, *arguments, True)
    return (status_kib("VmHWM") - before) / 1024


def status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def make_inputs(n: int, h: int, v: int, device: str, dtype) -> tuple:
    """Hidden states (N, H), weight (V, H), targets (N,), a gradient per log-prob (N,)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, h, generator=generator).to(device, dtype)
    weight = (torch.randn(v, h, generator=generator) / h**0.5 * 3).to(device, dtype)
    targets = torch.randint(v, (n,), generator=generator).to(device)
    return hidden, weight, targets, torch.randn(n, generator=generator).to(device)


def measure(size: tuple[int, int, int], inputs: tuple, train: bool, repeats: int) -> list[dict]:
    """A row per method, the methods in turn; what does not run here is left out, and says so."""
    hidden, weight, targets, _ = inputs
    some = slice(0, min(len(targets), 256))
    logits = hidden[some].double() @ weight.double().T / 0.9
    exact = logits.log_softmax(-1).gather(1, targets[some, None])[:, 0]
    methods, errors, memory = [], {}, {}
    for method in [ours, naive, trl, liger, cce]:
        name = method.__name__
        try:
            _, logp = once(method, *inputs, train)  # warms up, too
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:80]}"
            print(f"{name} does not run here: {reason}", file=sys.stderr)
            continue
        methods.append(method)
        errors[name] = (logp[some].double() - exact).abs().max().item()
        memory[name] = peak_mib(method, *inputs) if train else None
    times = {method.__name__: [] for method in methods}
    for _ in range(repeats):
        for method in methods:
            times[method.__name__].append(once(method, *inputs, train)[0])
    rows = []
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(times["ours"], seconds)]
        rows.append(
            {
                **dict(zip("NHV", size)),
                "pass": "forward+backward" if train else "forward",
                "method": name,
                "ms": statistics.median(seconds) * 1e3,
                "ours_over_it": statistics.median(ratios),
                "range": [min(ratios), max(ratios)],
                "logprob_error": errors[name],
                "extra_mib": memory[name],
            }
        )
    return rows


def show(row: dict):
    low, high = row["range"]
    extra = " " * 12 if row["extra_mib"] is None else f"{row['extra_mib']:8.0f} MiB"
    print(
        f"{row['N']:6}{row['H']:6}{row['V']:8} {row['pass']:<17}{row['method']:<7}"
        f"{row['ms']:10.1f} ms {extra}  ours/it {row['ours_over_it']:.2f} [{low:.2f}, {high:.2f}]"
        f"  error {row['logprob_error']:.1e}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--sizes", nargs="*", help="N,H,V ...")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, dtype, sizes = "cpu", torch.float32, CPU_SIZES
    machine = f"{platform.machine()} CPU, {args.threads} threads"
    if torch.cuda.is_available():
        device, dtype, sizes = "cuda", torch.bfloat16, GPU_SIZES
        machine = torch.cuda.get_device_name()
    if args.sizes:
        sizes = [tuple(map(int, size.split(","))) for size in args.sizes]
    table = []
    for size in sizes:
        inputs = make_inputs(*size, device, dtype)
        for train in (True, False):
            rows = measure(size, inputs, train, args.repeats)
            table += rows
            for row in rows:
                show(row)
    result = {
        "machine": machine,
        "dtype": str(dtype),
        "torch": torch.__version__,
        "trl": importlib.metadata.version("trl"),
        "repeats": args.repeats,
        "rows": table,
    }
    name = "logprob_gpu.json" if device == "cuda" else "logprob_cpu.json"
    out = args.out or ROOT / "docs" / "evidence" / name
    out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
