"""The tables of docs/one-gpu.md: python benchmarks/gpu_docs.py

What fits, by common/memory.py; and what gpu.py has measured, docs/evidence/gpu.jsonl. Nothing
stands there that was not measured.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
import doc_tables  # noqa: E402
from fits import cards_table, need, parts_table  # noqa: E402, F401

OUT, DOCS = ROOT / "docs" / "evidence" / "gpu.jsonl", ROOT / "docs" / "one-gpu.md"


def read(out: Path) -> dict[str, dict]:
    """Cell -> its last line."""
    lines = out.read_text().splitlines() if out.exists() else []
    return {row["cell"]: row for row in map(json.loads, lines)}


def figures(value, name: str = "") -> list[str]:
    """`ratio 0.58`, `ours seconds 1.23`, ... of whatever a cell holds; of a list its last entry."""
    if name == " methods":  # of logprob/H: milliseconds, and what ours takes of them
        parts = [(m["method"], m["ms"], m["ours_over_it"]) for m in value]
        return [f"{method} {ms:.1f} ms, ours {share:.2f} of it" for method, ms, share in parts]
    if isinstance(value, dict):
        return [text for key, part in value.items() for text in figures(part, f"{name} {key}")]
    value = value[-1] if isinstance(value, list) and value else value
    return [f"{name.strip()} {value:.4g}"] if isinstance(value, int | float) else []


def measured_table(cells: dict[str, dict]) -> str:
    """A line per cell; a sentence where there is none."""
    if not cells:
        return "Nothing has been measured on a GPU yet.\n"
    rows = []
    for cell in cells.values():
        about = {k: v for k, v in cell.items() if k not in ("cell", "machine", "took")}
        found = [cell["error"]] if "error" in cell else figures(about)
        rows.append([f"`{cell['cell']}`", cell["machine"], "; ".join(found)])
    return doc_tables.markdown(["cell", "machine", "figures"], rows)


def with_tables(text: str, cells: dict[str, dict]) -> str:
    made = {"cards": cards_table(), "parts": parts_table(), "measured": measured_table(cells)}
    return doc_tables.with_tables(text, made)


if __name__ == "__main__":
    DOCS.write_text(with_tables(DOCS.read_text(), read(OUT)))
