"""common/sampling.py against `generate`, side by side: python benchmarks/sampling.py

The embedded model with a LoRA adapter, 16 questions in groups of 8, to the end of every row.
Alternating; a figure is the median of the ratios within one repetition, with their range. Greedy
tokens must be equal. Writes docs/evidence/sampling_cpu.json.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import GenerationConfig

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from common.model import load_model  # noqa: E402
from common.sampling import sample  # noqa: E402
from common.tasks.math import load_questions  # noqa: E402
from tango import solve_prompt, verify_prompt  # noqa: E402

SOLUTION = "<step>3+4=7</step>\n<step>7*6=2</step>\n<answer>\\boxed{2}</answer>"


def generate(model, tokenizer, ids: list[list[int]], limit: int, greedy: bool) -> list[list[int]]:
    pad, end, width = tokenizer.pad_token_id, tokenizer.eos_token_id, max(map(len, ids))
    padded = torch.tensor([[pad] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    settings = GenerationConfig(
        max_new_tokens=limit,
        do_sample=not greedy,
        top_k=0,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.no_grad():
        out = model.generate(input_ids=padded, attention_mask=mask, generation_config=settings)
    rows = out[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def ours(model, tokenizer, ids: list[list[int]], limit: int, greedy: bool) -> list[list[int]]:
    temperature = 0.0 if greedy else 1.0
    return sample(model, ids, limit, temperature, [tokenizer.eos_token_id], tokenizer.pad_token_id)[
        0
    ]


def measure(part: str, inputs: tuple, repeats: int) -> dict:
    """inputs: of both functions but for `greedy`."""
    equal = generate(*inputs, True) == ours(*inputs, True)
    times = {"generate": [], "ours": []}
    for _ in range(repeats):
        for function in (generate, ours):
            start = time.perf_counter()
            function(*inputs, False)
            times[function.__name__].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(times["ours"], times["generate"])]
    return {
        "part": part,
        "rows": len(inputs[2]),
        "greedy_tokens_equal": equal,
        "generate_ms": statistics.median(times["generate"]) * 1e3,
        "ours_ms": statistics.median(times["ours"]) * 1e3,
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/evidence/sampling_cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model("tiny", ["player"], 16, False, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.01)  # an adapter that does something
    questions = [row["question"] for row in load_questions("tiny", 16, 8, seed=0)[0]]
    rows = []
    for part, prompts, limit in (
        ("solve", [solve_prompt(q) for q in questions], 64),
        ("verify", [verify_prompt(q, SOLUTION) for q in questions], 96),
    ):
        encoded = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)
        ids = [row for row in encoded["input_ids"] for _ in range(8)]
        rows.append(measure(part, (model, tokenizer, ids, limit), args.repeats))
        print(rows[-1], flush=True)
    machine = f"{platform.machine()} CPU, {args.threads} threads"
    result = {"machine": machine, "torch": torch.__version__, "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
