"""The tables of docs/one-gpu.md: python benchmarks/one_gpu_docs.py

They come from common/memory.py and from what one_gpu.py and rollouts.py have left in
docs/evidence/one_gpu/. What has not been measured says so.
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from common.memory import CUDA_CONTEXT, GIB, estimate, halves  # noqa: E402

from one_gpu import RESULTS, ROOT, SHAPES  # noqa: E402

DOCS = ROOT / "docs" / "one-gpu.md"
CARDS = {"16 GB": 16, "24 GB": 24, "80 GB": 80}
# (prompt, completion) of tango.py with a real model: a solution, and a judgement that has read it
TURNS = [(512, 1024), (512 + 1024, 1024)]
PHASES = ("rollout", "scoring", "log-prob", "backward", "other")
NOT_YET = "not measured yet"


def row(*cells) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


def header(titles: str) -> str:
    """titles: separated by " | "."""
    titles = titles.split(" | ")
    return row(*titles) + "|" + "---|" * len(titles) + "\n"


def name(size: str) -> str:
    return f"Qwen2.5 {size.upper()}"


def need(size: str, turns=TURNS, **change) -> dict[str, int]:
    """The estimate for two players of tango.py on a 4-bit base."""
    given = dict(adapters=2, lora_rank=16, four_bit=True, rows=1, micro_batch=1) | change
    return estimate(SHAPES[size], turns, **given)


def fitting(size: str, gib: int) -> tuple[int, int, dict] | None:
    """(rows at once, micro-batch, estimate): the most that fits on a card of `gib` GiB."""
    free = gib * GIB - CUDA_CONTEXT

    def fits(phase: str, **change) -> bool:
        return need(size, gpu_bytes=gib * GIB, **change)[phase] <= free

    rows = next((n for n in halves(256) if fits("sampling", rows=n)), None)
    # at this length, a micro-batch of more than 8 rows gains nothing
    micro = next((n for n in halves(8) if fits("training", micro_batch=n)), None)
    if not rows or not micro:
        return None
    return rows, micro, need(size, gpu_bytes=gib * GIB, rows=rows, micro_batch=micro)


def cards_table(results: dict[str, dict]) -> str:
    text = header(
        "model | card | `--rows-at-once` | `--micro-batch` | certain | sampling | training | "
        "measured, training"
    )
    for size in ("0.5b", "1.5b", "7b", "14b", "32b"):
        for card, gib in CARDS.items():
            found = fitting(size, gib)
            if found is None:
                text += row(name(size), card, "does not fit", "", "", "", "", "")
                continue
            rows, micro, needed = found
            gigabytes = [f"{needed[key] / GIB:.1f}" for key in ("certain", "sampling", "training")]
            measured = peak(results.get(f"training-{size}-{micro}-ours", {})) or NOT_YET
            text += row(name(size), card, rows, micro, *gigabytes, measured)
    return text


def parts_table(_: dict[str, dict]) -> str:
    one, two, eight_bit = need("7b"), need("7b", micro_batch=2), need("7b", eight_bit_adam=True)
    length = f"{max(map(sum, TURNS)):,} tokens"
    adapters = one["adapters"] + one["gradients"]
    passing = two["kept"] + two["layer"] - one["kept"] - one["layer"]
    in_eight_bits = f"{eight_bit['adam'] / GIB:.2f}"
    parts = {
        "base: NF4 with double quantisation; embeddings and head in bfloat16": one["weights"],
        "two adapters of rank 16 in float32, and the gradient of one": adapters,
        "Adam's moments": one["adam"],
        f"KV cache, per row of {length}": one["kv_cache"],
        f"activations, per row of {length}": passing,
        "log-probs: a block of logits, on 24 GB": one["logprob"],
    }
    lower_with = [
        "a smaller model",
        "`--lora-rank`",
        f"`--eight-bit-adam`: {in_eight_bits}",
        "`--rows-at-once`",
        "`--micro-batch`",
        "nothing; it is a 32nd of the card",
    ]
    text = header("what | 7B, GiB | lower it with")
    for (what, size), lower in zip(parts.items(), lower_with, strict=True):
        text += row(what, f"{size / GIB:.2f}", lower)
    return text


def peak(cell: dict) -> str:
    highest = max(cell.get("peak", {}).values(), default=0)
    return f"{highest / GIB:.1f}" if highest else ""


def why_empty(cell: dict) -> str:
    """Why a cell has no figures."""
    return cell.get("error") or cell.get("skipped") or NOT_YET


def training_table(results: dict[str, dict]) -> str:
    matmul = results.get("matmul", {})
    gpu_bytes = matmul.get("machine", {}).get("memory") or 24 * GIB
    text = header(
        "model | micro-batch | ours, s | of the matmul rate | peak, GiB | estimated, GiB | "
        "TRL, s | its peak, GiB"
    )
    for size in ("1.5b", "7b"):
        for micro in (1, 2, 4, 8):
            needed = need(size, TURNS[1:], micro_batch=micro, gpu_bytes=gpu_bytes)
            cells = [results.get(f"training-{size}-{micro}-{who}", {}) for who in ("ours", "trl")]
            ours, trl = cells
            seconds = [f"{c['seconds']:.2f}" if "seconds" in c else why_empty(c) for c in cells]
            share = ""
            if "tflops" in ours and "tflops" in matmul:
                share = f"{ours['tflops'] / matmul['tflops']:.0%}"
            estimated = f"{needed['training'] / GIB:.1f}"
            own = (seconds[0], share, peak(ours), estimated)
            text += row(name(size), micro, *own, seconds[1], peak(trl))
    return text


def steps_table(results: dict[str, dict]) -> str:
    phases = " | ".join(f"{phase}, s" for phase in PHASES)
    text = header(f"script | model | who | {phases} | s a step | tokens/s | peak, GiB")
    cells = [cell for key, cell in results.items() if key.startswith("step-")]
    planned = [(size, who) for size in ("7b", "1.5b") for who in ("ours", "two trainers")]
    for cell in cells or [{"script": "tango", "size": size, "who": who} for size, who in planned]:
        first = [f"{cell['script']}.py", name(cell["size"]), cell["who"]]
        if "seconds" not in cell:
            text += row(*first, why_empty(cell), *[""] * (len(PHASES) + 2))
            continue
        seconds = [cell["phases"].get(phase, 0.0) for phase in PHASES] + [cell["seconds"]]
        rate = f"{cell['tokens_per_second']:.0f}"
        text += row(*first, *[f"{s:.2f}" for s in seconds], rate, peak(cell))
    return text


def rollouts_table(results: dict[str, dict]) -> str:
    text = header("model | rows x tokens | method | tokens/s | against generate | peak, GiB")
    cells = {key: cell for key, cell in results.items() if key.startswith("rollouts-")}
    for method in () if cells else ("generate", "generate_batch", "sample", "static"):
        planned = {"size": "7b", "rows": 64, "tokens": 1000, "method": method}
        cells[f"rollouts-7b-64x1000-{method}"] = planned
    for key, cell in cells.items():
        first = [name(cell["size"]), f"{cell['rows']} x {cell['tokens']}", f"`{cell['method']}`"]
        rate = cell.get("tokens_per_second")
        if rate is None:
            text += row(*first, why_empty(cell), "", "")
            continue
        plain = results.get(f"{key.removesuffix(cell['method'])}generate", {})
        base = plain.get("tokens_per_second")
        text += row(*first, f"{rate:.0f}", f"{rate / base:.2f}x" if base else "", peak(cell))
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
