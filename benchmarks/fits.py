"""What fits on a card, by common/memory.py: two players of tango.py in Qwen2.5's shapes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from common.memory import CUDA_CONTEXT, GIB, estimate, halves  # noqa: E402

import doc_tables  # noqa: E402
from transformers import Qwen2Config  # noqa: E402

CARDS = {"16 GB": 16, "24 GB": 24, "80 GB": 80}
# (prompt, completion) of tango.py with a real model: a solution, and a judgement that has read it
TURNS = [(512, 1024), (512 + 1024, 1024)]


def shape(hidden, width, layers, heads, kv_heads, vocab=151936, tied=True) -> Qwen2Config:
    size = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
    size |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab}
    return Qwen2Config(**size, tie_word_embeddings=tied, rms_norm_eps=1e-6, rope_theta=1e6)


SHAPES = {  # as published in config.json
    "tiny": shape(64, 128, 2, 4, 2),
    "0.5b": shape(896, 4864, 24, 14, 2),
    "1.5b": shape(1536, 8960, 28, 12, 2),
    "7b": shape(3584, 18944, 28, 28, 4, vocab=152064, tied=False),
    "14b": shape(5120, 13824, 48, 40, 8, vocab=152064, tied=False),
    "32b": shape(5120, 27648, 64, 40, 8, vocab=152064, tied=False),
}


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
    titles, rows = ["model", "card", "`--rows-at-once`", "`--micro-batch`"], []
    parts = ["certain", "sampling", "training"]
    for size in ("0.5b", "1.5b", "7b", "14b", "32b"):
        for card, gib in CARDS.items():
            at_once, micro, needed = fitting(size, gib) or ("does not fit", "", {})
            gigabytes = [f"{needed[key] / GIB:.1f}" if needed else "" for key in parts]
            rows.append([name(size), card, at_once, micro, *gigabytes])
    return doc_tables.markdown([*titles, *parts], rows)


def parts_table() -> str:
    one, two, eight_bit = need("7b"), need("7b", micro_batch=2), need("7b", eight_bit_adam=True)
    length = f"{max(map(sum, TURNS)):,} tokens"
    base = "base: NF4 with double quantisation; embeddings and head in bfloat16"
    passing = two["kept"] + two["layer"] - one["kept"] - one["layer"]
    adam = f"`--eight-bit-adam`: {eight_bit['adam'] / GIB:.2f}"
    adapters = "two adapters of rank 16 in float32, and the gradient of one"
    rows = [
        (base, one["weights"], "a smaller model"),
        (adapters, one["adapters"] + one["gradients"], "`--lora-rank`"),
        ("Adam's moments", one["adam"], adam),
        (f"KV cache, per row of {length}", one["kv_cache"], "`--rows-at-once`"),
        (f"activations, per row of {length}", passing, "`--micro-batch`"),
        (
            "log-probs: a block of logits, on 24 GB",
            one["logprob"],
            "nothing; it is a 32nd of the card",
        ),
    ]
    rows = [(what, f"{size / GIB:.2f}", lower) for what, size, lower in rows]
    return doc_tables.markdown(["what", "7B, GiB", "lower it with"], rows)
