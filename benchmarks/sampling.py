"""common/sampling.py against `generate`: python benchmarks/sampling.py

The embedded model with a LoRA adapter, 16 questions in groups of 8, to the end of every row. Greedy
tokens must be equal. See side_by_side.py for what is written.
"""

from functools import partial

from side_by_side import arguments, compared, in_turn, keep  # isort: skip
from common.model import load_model
from common.sampling import sample
from common.tasks.math import load_questions
from tango import solve_prompt, verify_prompt

import torch

SOLUTION = "<step>3+4=7</step>\n<step>7*6=2</step>\n<answer>\\boxed{2}</answer>"


def generate(model, tokenizer, ids: list[list[int]], limit: int, greedy: bool) -> list[list[int]]:
    inputs = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    end, width = tokenizer.eos_token_id, inputs["input_ids"].shape[1]
    settings = {"max_new_tokens": limit, "do_sample": not greedy, "top_k": 0}
    settings |= {"eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
    with torch.no_grad():
        rows = model.generate(**inputs, **settings)[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def ours(model, tokenizer, ids: list[list[int]], limit: int, greedy: bool) -> list[list[int]]:
    end, pad = [tokenizer.eos_token_id], tokenizer.pad_token_id
    return sample(model, ids, limit, 0.0 if greedy else 1.0, end, pad)[0]


def measure(part: str, inputs: tuple, repeats: int) -> list[dict]:
    """inputs: of both functions but for `greedy`."""
    equal = generate(*inputs, greedy=True) == ours(*inputs, greedy=True)
    methods = {"ours": ours, "`generate`": generate}
    runs = {name: partial(method, *inputs, greedy=False) for name, method in methods.items()}
    rows = compared(in_turn(runs, repeats)[0])
    return [
        {"what": f"sampling, embedded, {part}", "greedy_tokens_equal": equal, **r} for r in rows
    ]


def main():
    args = arguments(__doc__, repeats=7).parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model("tiny", ["player"], 16, False, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.01)  # an adapter that does something
    questions = [row["question"] for row in load_questions("tiny", 16, 8, seed=0)[0]]
    for part, prompts, limit in (
        ("solve", [solve_prompt(q) for q in questions], 64),
        ("verify", [verify_prompt(q, SOLUTION) for q in questions], 96),
    ):
        encoded = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)
        ids = [row for row in encoded["input_ids"] for _ in range(8)]
        keep(measure(part, (model, tokenizer, ids, limit), args.repeats), args.out)


if __name__ == "__main__":
    main()
