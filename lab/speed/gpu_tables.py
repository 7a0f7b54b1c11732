"""The tables of docs/real-models.md and lab/notes/speed.md, each as (header, rows), which pages.py
writes: what fits on a card by common/run/memory.py, and what gpu.py has measured.
"""

from common.run.memory import GIB, estimate, halves
from lab.speed.gpu import SHAPES

CUDA_CONTEXT = 600 << 20  # what CUDA takes before the first tensor
CARDS = {"16 GB": 15.6, "24 GB": 23.6, "80 GB": 79.1}  # GiB that torch finds on them
# (prompt, completion) of tango.py with a real model: a solution, and a judgement that has read it
TURNS = [(512, 1024), (512 + 1024, 1024)]


def need(size: str, **change) -> dict[str, int]:
    """The estimate for two players of tango.py on a 4-bit base."""
    given = dict(adapters=2, lora_rank=16, four_bit=True, rows=1, micro_batch=1) | change
    return estimate(SHAPES[size], TURNS, **given)


def fitting(size: str, gib: float) -> tuple[int, int, dict] | None:
    """(rows at once, micro-batch, estimate): the most that fits on a card of `gib` GiB."""
    gpu_bytes = int(gib * GIB)

    def fits(phase: str, **change) -> bool:
        return need(size, gpu_bytes=gpu_bytes, **change)[phase] <= gpu_bytes - CUDA_CONTEXT

    rows = next((n for n in halves(256) if fits("sampling", rows=n)), None)
    # 8 rows of this length are enough work for a GPU
    micro = next((n for n in halves(8) if fits("training", micro_batch=n)), None)
    if not rows or not micro:
        return None
    return rows, micro, need(size, gpu_bytes=gpu_bytes, rows=rows, micro_batch=micro)


def cards_table() -> tuple[list, list]:
    """A line per model and card that changes something."""
    titles, rows = ["model", "card", "`--generation-batch-size`", "`--micro-batch`"], []
    parts = ["certain", "sampling", "training"]
    for size in SHAPES:
        last = None
        for card, gib in CARDS.items():
            found = fitting(size, gib)
            if found and found[:2] != last:
                gigabytes = [f"{found[2][key] / GIB:.1f}" for key in parts]
                rows.append([f"Qwen2.5 {size.upper()}", card, *found[:2], *gigabytes])
                last = found[:2]
    return [*titles, *parts], rows


def used(part: dict) -> str:
    """`0.58 s`, with GiB at the highest point where they were measured."""
    seconds = f"{part['seconds']:.2f} s"
    return f"{seconds}, {part['allocated']:.1f} GiB" if "allocated" in part else seconds


def in_ms(measured: dict, whose: str, place: int) -> str:
    return f"{measured[f'{whose}_ms']:.1f} ms, {measured['extra_mib'][place] / 1024:.1f} GiB"


def peers(cell: dict) -> list[tuple]:
    """(ours, a peer, its, ours / its) of a cell that compares; else none."""
    kind = cell["cell"].split("/")[0]
    if kind == "logprob":
        return [
            (in_ms(m, "ours", 0), m["against"], in_ms(m, "its", 1), m["ratio"])
            for m in cell["peers"]
        ]
    if kind == "rollouts":
        ours, its = (cell[name]["ms_per_token_step"] for name in ("sample", "generate"))
        return [(f"{ours:.1f} ms", "`generate`", f"{its:.1f} ms", ours / its)]
    ours, theirs = cell.get("ours"), {name: cell[name] for name in cell if name.startswith("TRL")}
    if kind == "two":  # one step of each player
        ours = {"seconds": sum(ours["seconds"][-2:])}
        theirs = {"two trainers": {"seconds": sum(cell["two trainers"]["seconds"])}}
    compared = [(name, its, ours["seconds"] / its["seconds"]) for name, its in theirs.items()]
    return [(used(ours), name, used(its), ratio) for name, its, ratio in compared]


def measured_table(cells: dict[str, dict]) -> tuple[list, list]:
    """Ours against others, a line for each."""
    rows = [
        [f"`{name}`", *some, f"{ratio:.2f}"]
        for name, cell in cells.items()
        for *some, ratio in ([] if "error" in cell else peers(cell))
    ]
    return ["cell", "ours", "against", "its", "ours / its"], rows


def other_table(cells: dict[str, dict]) -> tuple[list, list]:
    """What compares nothing, and what failed."""
    rows = []
    for name, cell in cells.items():
        if "error" in cell:
            rows.append([f"`{name}`", cell["error"]])
        elif not peers(cell):
            parts = {k: v for k, v in cell.items() if k not in ("cell", "machine", "took")}
            texts = {k: used(v) if isinstance(v, dict) else f"{v:.3g}" for k, v in parts.items()}
            rows.append([f"`{name}`", "; ".join(f"{k} {text}" for k, text in texts.items())])
    return ["cell", "figures"], rows
