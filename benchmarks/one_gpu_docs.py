"""The tables of docs/one-gpu.md, from common/memory.py and from what one_gpu.py and rollouts.py left in
docs/evidence/one_gpu/: python benchmarks/one_gpu_docs.py. What has not been measured says so."""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from common.memory import CUDA_CONTEXT, GIB, estimate, halves  # noqa: E402

from one_gpu import RESULTS, ROOT, SHAPES  # noqa: E402

DOCS = ROOT / "docs" / "one-gpu.md"
CARDS = {"16 GB": 16, "24 GB": 24, "80 GB": 80}
TURNS = [(512, 1024), (512 + 1024, 1024)]  # tango.py's for real models: a solution, and a judgement that has read it
PHASES = ("rollout", "scoring", "log-prob", "backward", "other")
NOT_YET = "not measured yet"


def row(*cells) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


def header(*titles) -> str:
    return row(*titles) + "|" + "---|" * len(titles) + "\n"


def name(size: str) -> str:
    return f"Qwen2.5 {size.upper()}"


def fitting(size: str, gib: int) -> tuple[int, int, dict] | None:
    """(rows at once, micro-batch, estimate): the most that two players of tango.py may take on such a card."""
    free = gib * GIB - CUDA_CONTEXT

    def need(rows, micro):
        sizes = dict(rows=rows, micro_batch=micro, gpu_bytes=gib * GIB)
        return estimate(SHAPES[size], TURNS, adapters=2, lora_rank=16, four_bit=True, **sizes)

    rows = next((r for r in halves(256) if need(r, 1)["sampling"] <= free), None)
    micro = next((m for m in halves(8) if need(1, m)["training"] <= free), None)  # more gain nothing at this length
    return (rows, micro, need(rows, micro)) if rows and micro else None


def cards_table(results: dict[str, dict]) -> str:
    text = header(
        "model", "card", "`--rows-at-once`", "`--micro-batch`", "certain", "sampling", "training", "measured, training"
    )
    for size in ("0.5b", "1.5b", "7b", "14b", "32b"):
        for card, gib in CARDS.items():
            found = fitting(size, gib)
            if found is None:
                text += row(name(size), card, "does not fit", "", "", "", "", "")
                continue
            rows, micro, need = found
            gigabytes = [f"{need[key] / GIB:.1f}" for key in ("certain", "sampling", "training")]
            measured = peak(results.get(f"training-{size}-{micro}-ours", {})) or NOT_YET
            text += row(name(size), card, rows, micro, *gigabytes, measured)
    return text


def parts_table(_: dict[str, dict]) -> str:
    def need(**change):
        given = dict(adapters=2, lora_rank=16, four_bit=True, rows=1, micro_batch=1) | change
        return estimate(SHAPES["7b"], TURNS, **given)

    one, two = need(), need(micro_batch=2)
    length = max(sum(turn) for turn in TURNS)
    gib = lambda count: f"{count / GIB:.2f}"  # noqa: E731
    text = header("what", "7B, GiB", "lower it with")
    text += row("base: NF4 with double quantisation; embeddings and head in bfloat16", gib(one["weights"]), "a smaller model")
    both = one["adapters"] + one["gradients"]
    text += row("two adapters of rank 16 in float32, and the gradient of one", gib(both), "`--lora-rank`")
    paged = f"`--eight-bit-adam`: {gib(need(eight_bit_adam=True)['adam'])}, paged to the CPU where the GPU is full"
    text += row("Adam's moments", gib(one["adam"]), paged)
    text += row(f"KV cache, per row of {length:,} tokens", gib(one["kv_cache"]), "`--rows-at-once`")
    passing = two["kept"] + two["layer"] - one["kept"] - one["layer"]
    text += row(f"activations, per row of {length:,} tokens", gib(passing), "`--micro-batch`")
    return text + row("log-probs: a block of logits, on 24 GB", gib(one["logprob"]), "nothing; it is a 32nd of the card")


def peak(cell: dict) -> str:
    highest = max(cell.get("peak", {}).values(), default=0)
    return f"{highest / GIB:.1f}" if highest else ""


def told(cell: dict) -> str:
    """Why a cell has no figures."""
    return cell.get("error") or cell.get("skipped") or NOT_YET


def training_table(results: dict[str, dict]) -> str:
    matmul = results.get("matmul", {})
    gpu_bytes = matmul.get("machine", {}).get("memory") or 24 * GIB
    text = header(
        "model", "micro-batch", "ours, s", "of the matmul rate", "peak, GiB", "estimated, GiB", "TRL, s", "its peak, GiB"
    )
    for size in ("1.5b", "7b"):
        for micro in (1, 2, 4, 8):
            sizes = dict(rows=1, micro_batch=micro, gpu_bytes=gpu_bytes)
            need = estimate(SHAPES[size], TURNS[1:], adapters=2, lora_rank=16, four_bit=True, **sizes)
            ours, trl = (results.get(f"training-{size}-{micro}-{who}", {}) for who in ("ours", "trl"))
            seconds = [f"{c['seconds']:.2f}" if "seconds" in c else told(c) for c in (ours, trl)]
            share = f"{ours['tflops'] / matmul['tflops']:.0%}" if "tflops" in ours and "tflops" in matmul else ""
            estimated = f"{need['training'] / GIB:.1f}"
            text += row(name(size), micro, seconds[0], share, peak(ours), estimated, seconds[1], peak(trl))
    return text


def steps_table(results: dict[str, dict]) -> str:
    text = header("script", "model", "who", *(f"{phase}, s" for phase in PHASES), "s a step", "tokens/s", "peak, GiB")
    cells = [cell for key, cell in results.items() if key.startswith("step-")]
    planned = [(size, who) for size in ("7b", "1.5b") for who in ("ours", "two trainers")]
    for cell in cells or [{"script": "tango", "size": size, "who": who} for size, who in planned]:
        first = [f"{cell['script']}.py", name(cell["size"]), cell["who"]]
        if "seconds" not in cell:
            text += row(*first, told(cell), *[""] * (len(PHASES) + 2))
            continue
        seconds = [f"{cell['phases'].get(phase, 0.0):.2f}" for phase in PHASES]
        text += row(*first, *seconds, f"{cell['seconds']:.2f}", f"{cell['tokens_per_second']:.0f}", peak(cell))
    return text


def rollouts_table(results: dict[str, dict]) -> str:
    text = header("model", "rows x tokens", "method", "tokens/s", "against generate", "peak, GiB")
    cells = {key: cell for key, cell in results.items() if key.startswith("rollouts-")}
    methods = ("generate", "generate_batch", "sample", "static")
    default = {f"rollouts-7b-64x1000-{m}": {"size": "7b", "rows": 64, "tokens": 1000, "method": m} for m in methods}
    for key, cell in (cells or default).items():
        first = [name(cell["size"]), f"{cell['rows']} x {cell['tokens']}", f"`{cell['method']}`"]
        if "tokens_per_second" not in cell:
            text += row(*first, told(cell), "", "")
            continue
        base = results.get(key.removesuffix(cell["method"]) + "generate", {}).get("tokens_per_second")
        ratio = f"{cell['tokens_per_second'] / base:.2f}x" if base else ""
        text += row(*first, f"{cell['tokens_per_second']:.0f}", ratio, peak(cell))
    return text


TABLES = {
    "cards": cards_table,
    "parts": parts_table,
    "training": training_table,
    "steps": steps_table,
    "rollouts": rollouts_table,
}


def read_results(folder: Path = RESULTS) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def with_tables(text: str, results: dict[str, dict]) -> str:
    """The document with what is between the marks of every table made anew."""
    for key, table in TABLES.items():
        start, end = f"<!-- table: {key} -->\n", f"<!-- end: {key} -->"
        before, rest = text.split(start)
        text = before + start + table(results) + rest[rest.index(end) :]
    return text


if __name__ == "__main__":
    DOCS.write_text(with_tables(DOCS.read_text(), read_results()))
