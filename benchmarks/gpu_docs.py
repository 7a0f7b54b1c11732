"""The tables of docs/one-gpu.md: python benchmarks/gpu_docs.py

What fits, by common/memory.py; and what gpu.py has measured, docs/evidence/gpu.jsonl. Nothing
stands there that was not measured.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from common.memory import CUDA_CONTEXT, GIB, estimate, halves  # noqa: E402

from gpu import OUT, ROOT, SHAPES, read  # noqa: E402

DOCS = ROOT / "docs" / "one-gpu.md"
CARDS = {"16 GB": 16, "24 GB": 24, "80 GB": 80}
# (prompt, completion) of tango.py with a real model: a solution, and a judgement that has read it
TURNS = [(512, 1024), (512 + 1024, 1024)]


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


def cards_table() -> str:
    text = header(
        "model | card | `--rows-at-once` | `--micro-batch` | certain | sampling | training"
    )
    for size in ("0.5b", "1.5b", "7b", "14b", "32b"):
        for card, gib in CARDS.items():
            found = fitting(size, gib)
            if found is None:
                text += row(name(size), card, "does not fit", "", "", "", "")
                continue
            rows, micro, needed = found
            gigabytes = [f"{needed[key] / GIB:.1f}" for key in ("certain", "sampling", "training")]
            text += row(name(size), card, rows, micro, *gigabytes)
    return text


def parts_table() -> str:
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


def figures(value, name: str = "") -> list[str]:
    """`ratio 0.58`, `ours seconds 1.23`, ... of whatever a cell holds; of a list its last entry."""
    if isinstance(value, dict):
        return [text for key, part in value.items() for text in figures(part, f"{name} {key}")]
    value = value[-1] if isinstance(value, list) and value else value
    return [f"{name.strip()} {value:.4g}"] if isinstance(value, int | float) else []


def methods(cell: dict) -> list[str]:
    """Of logprob/H: every method's milliseconds, and what ours takes of them."""
    return [
        f"{m['method']} {m['ms']:.1f} ms, ours {m['ours_over_it']:.2f} of it"
        for m in cell["methods"]
    ]


def measured_table(cells: dict[str, dict]) -> str:
    """A line per cell; a sentence where there is none."""
    if not cells:
        return "Nothing has been measured on a GPU yet.\n"
    text = header("cell | machine | figures")
    for cell in cells.values():
        about = {k: v for k, v in cell.items() if k not in ("cell", "machine", "took", "methods")}
        found = [cell["error"]] if "error" in cell else figures(about)
        found = methods(cell) if "methods" in cell else found
        text += row(f"`{cell['cell']}`", cell["machine"], "; ".join(found))
    return text


def with_tables(text: str, cells: dict[str, dict]) -> str:
    """The document with what is between the marks of every table made anew."""
    tables = {"cards": cards_table(), "parts": parts_table(), "measured": measured_table(cells)}
    for key, table in tables.items():
        start, end = f"<!-- table: {key} -->\n", f"<!-- end: {key} -->"
        before, rest = text.split(start)
        text = before + start + table + rest[rest.index(end) :]
    return text


if __name__ == "__main__":
    DOCS.write_text(with_tables(DOCS.read_text(), read(OUT)))
