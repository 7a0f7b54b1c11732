"""common/sampling.py against `generate`, side by side: python benchmarks/sampling.py

The embedded model with a LoRA adapter, 16 questions in groups of 8, to the end of every row. Alternating; a figure is the
median of the ratios within one repetition, with their range. Greedy tokens must be equal.
Writes docs/evidence/sampling_cpu.json.
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
from common.data import load_questions  # noqa: E402
from common.model import load_model  # noqa: E402
from common.sampling import sample  # noqa: E402
from tango import solve_prompt, verify_prompt  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model("tiny", ["player"], 16, False, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.01)  # an adapter that does something
    questions = [row["question"] for row in load_questions("tiny", 16, 8, seed=0)[0]]
    solution = "<step>3+4=7</step>\n<step>7*6=2</step>\n<answer>\\boxed{2}</answer>"
    rows = []
    for part, prompts, limit in (
        ("solve", [solve_prompt(q) for q in questions], 64),
        ("verify", [verify_prompt(q, solution) for q in questions], 96),
    ):
        ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=True)["input_ids"] for p in prompts]
        ids = [row for row in ids for _ in range(8)]

        def generate(greedy, ids=ids, limit=limit):
            width = max(map(len, ids))
            padded = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in ids])
            config = GenerationConfig(
                max_new_tokens=limit,
                do_sample=not greedy,
                top_k=0,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            with torch.no_grad():
                mask = (padded != tokenizer.pad_token_id).long()
                out = model.generate(input_ids=padded, attention_mask=mask, generation_config=config)[:, width:]
            ended = [row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else limit for row in out.tolist()]
            return [row[:n] for row, n in zip(out.tolist(), ended)]

        def ours(greedy, ids=ids, limit=limit):
            stop, pad = [tokenizer.eos_token_id], tokenizer.pad_token_id
            return sample(model, ids, limit, 0.0 if greedy else 1.0, stop, pad)[0]

        equal = generate(True) == ours(True)
        times: dict[str, list[float]] = {"generate": [], "ours": []}
        for _ in range(args.repeats):
            for name, function in (("generate", generate), ("ours", ours)):
                start = time.perf_counter()
                function(False)
                times[name].append(time.perf_counter() - start)
        ratios = [a / b for a, b in zip(times["ours"], times["generate"])]
        row = {
            "part": part,
            "rows": len(ids),
            "greedy_tokens_equal": equal,
            "generate_ms": statistics.median(times["generate"]) * 1e3,
            "ours_ms": statistics.median(times["ours"]) * 1e3,
            "ratio": statistics.median(ratios),
            "range": [min(ratios), max(ratios)],
        }
        rows.append(row)
        print(row)
    out = ROOT / "docs" / "evidence" / "sampling_cpu.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = f"{platform.machine()} CPU, {args.threads} threads"
    out.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
