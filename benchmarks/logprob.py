"""linear_logprob against its peers, side by side in one process: python benchmarks/logprob.py

Forward and backward, hidden states requiring grad, head frozen, a random gradient per token. The methods alternate;
a figure is the median over repetitions of the ratio ours / peer within one repetition, with its range. Errors are
against float64. Writes docs/evidence/logprob_<device>.json.

    naive   log_softmax of all logits, autograd
    TRL     trl.kernels.ChunkedLogProbFunction, which GRPOTrainer uses
    Liger   its _ChunkedSelectiveLogProbFunction (no entropy)
    CCE     cut-cross-entropy, exact (GPU only)
"""

import argparse
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

    return -linear_cross_entropy(hidden / temperature, weight, targets, reduction="none", filter_eps=None)


def ours(hidden, weight, targets, temperature):
    return linear_logprob(hidden, weight, targets, temperature=temperature)[0]


def once(method, hidden, weight, targets, upstream, train: bool) -> float:
    """Seconds of one forward (and backward)."""
    leaf = hidden.detach().requires_grad_(train)
    sync = torch.cuda.synchronize if hidden.is_cuda else lambda: None
    sync()
    start = time.perf_counter()
    with torch.set_grad_enabled(train):
        logp = method(leaf, weight, targets, 0.9)
        if train:
            logp.backward(upstream.to(logp.dtype))
    sync()
    once.result = (logp.detach(), leaf.grad)
    return time.perf_counter() - start


def peak_mib(method, *arguments) -> float:
    """Most memory alive above what the inputs take."""
    if arguments[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        once(method, *arguments, True)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    status = lambda key: int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])  # noqa: E731
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = status("VmRSS")
    once(method, *arguments, True)
    return (status("VmHWM") - before) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--sizes", nargs="*", help="N,H,V ...")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    name = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU, {args.threads} threads"
    sizes = [tuple(map(int, size.split(","))) for size in args.sizes] if args.sizes else GPU_SIZES if gpu else CPU_SIZES
    peers = [naive, trl, liger] + ([cce] if gpu else [])
    table = []
    for n, h, v in sizes:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(n, h, generator=generator).to(device, dtype)
        weight = (torch.randn(v, h, generator=generator) / h**0.5 * 3).to(device, dtype)
        targets = torch.randint(v, (n,), generator=generator).to(device)
        upstream = torch.randn(n, generator=generator).to(device)
        inputs = (hidden, weight, targets, upstream)
        some = slice(0, min(n, 256))
        exact = naive(hidden[some].double(), weight.double(), targets[some], 0.9)
        for train in (True, False):
            methods = [ours, *peers]
            times: dict[str, list[float]] = {m.__name__: [] for m in methods}
            errors, memory = {}, {}
            for method in list(methods):
                try:
                    once(method, *inputs, train)  # warm up
                except Exception as error:
                    print(f"{method.__name__} does not run here: {type(error).__name__}: {str(error)[:80]}", file=sys.stderr)
                    methods.remove(method)
                    continue
                errors[method.__name__] = (once.result[0][some].double() - exact).abs().max().item()
                if train:
                    memory[method.__name__] = peak_mib(method, *inputs)
            for _ in range(args.repeats):
                for method in methods:
                    times[method.__name__].append(once(method, *inputs, train))
            for method in methods:
                peer = method.__name__
                ratios = [a / b for a, b in zip(times["ours"], times[peer])]
                row = {
                    "N": n, "H": h, "V": v, "pass": "forward+backward" if train else "forward", "method": peer,
                    "ms": statistics.median(times[peer]) * 1e3, "ours_over_it": statistics.median(ratios),
                    "range": [min(ratios), max(ratios)], "logprob_error": errors[peer], "extra_mib": memory.get(peer),
                }  # fmt: skip
                table.append(row)
                extra = f"{row['extra_mib']:8.0f} MiB" if row["extra_mib"] is not None else " " * 12
                print(
                    f"{n:6}{h:6}{v:8} {row['pass']:<17}{peer:<7}{row['ms']:10.1f} ms {extra}  "
                    f"ours/it {row['ours_over_it']:.2f} [{min(ratios):.2f}, {max(ratios):.2f}]  "
                    f"error {row['logprob_error']:.1e}",
                    flush=True,
                )
    out = args.out or ROOT / "docs" / "evidence" / f"logprob_{'gpu' if gpu else 'cpu'}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    import trl as trl_package

    versions = {"torch": torch.__version__, "trl": trl_package.__version__}
    out.write_text(
        json.dumps({"machine": name, "dtype": str(dtype), **versions, "repeats": args.repeats, "rows": table}, indent=1)
    )


if __name__ == "__main__":
    main()
