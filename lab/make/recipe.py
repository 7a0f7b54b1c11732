"""Make the small models: `python -m lab.make.recipe arithmetic` (or programs, repairs), a good
hour each at most on one core.

Three Qwen3-shaped models of one million parameters with one character tokenizer, trained by plain
supervised learning on imperfect demonstrations to play every part that the scripts need. The
`arithmetic` model solves, verifies step by step, judges, proposes, grades and corrects
(demonstrations.py); `programs` writes programs and tests and reasons about what a program does
(program_demonstrations.py); `repairs` breaks and repairs programs (repair_demonstrations.py).

What they must be is *half* competent: RL needs something to sharpen and something to unlearn. So
there are two stages. In the first each decision is the demonstrator's likeliest one: the model
learns the skills, and what he believes, his misconceptions too. In the second each decision is
drawn at its rate: the model learns how often he doubts. Samples then err, and the likeliest answer
is what is believed, right or wrong.
"""

import json
import math
import random
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from common.tiny import TINY
from common.tiny.tasks import MODULO
from lab.make import demonstrations, program_demonstrations, repair_demonstrations

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

STEPS = {"arithmetic": 4000, "programs": 3000, "repairs": 1200}
PARTS = {
    "arithmetic": demonstrations.PARTS,
    "programs": program_demonstrations.PARTS,
    "repairs": repair_demonstrations.PARTS,
}

# Tokens longer than one character: the numbers of two digits, so that a result is one decision; the
# tags that the scripts ask for; the words of their user messages.
SPECIAL = ["<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|end|>"]
NUMBERS = [str(number) for number in range(10, 100)]
TAGS = [
    "<think>", "</think>", "<step>", "</step>", "<answer>", "</answer>", "<question>",
    "</question>", "<score>", "</score>", "<step_verification>", "</step_verification>",
    "<final_verification>", "</final_verification>", "\\boxed{CORRECT}", "\\boxed{INCORRECT}",
    "\\boxed{", "**YES**", "**NO**",
]  # fmt: skip
WORDS = {
    "arithmetic": [
        *TAGS, "Yes", "No", "none", "tie", f" mod {MODULO}", "Problem: ", "Solution:\n",
        "Solution 1:\n", "Solution 2:\n",
        "Reasoning:\n", "Question: ", "Answer: ", "Reference: ", "Defects: ", "Score: ",
        "## Self Evaluation", "Verify its ", " steps.", "Is it right?", "Is it sound?",
        " every step holds", " a step is wrong", "Check every step.", "Which is right?",
        "Which is sounder?", "Grade it.", "Are they real?", "Solve and grade yourself.",
        "Correct it.", "Try again.", "Write your own.", "Make one step wrong.",
        "Propose a question.", "Score the answer.", "Score the question.",
    ],
    "programs": [
        *TAGS, "```python", "```input", "```output", "```message", "```",
        "int(input())", "print(", "none", " mod 100", "%100", "Problem: ", "Solution:\n",
        "Verify its ", " steps.", "Reasoning:\n", "Is it sound?", " every step holds",
        " a step is wrong", "Task: ", "Write a program.", "Write a test.", "Read x. Then ", "add ",
        "minus ", "times ", ". Print x mod 100.", "**Test Input:**", "**Test Output:**",
        "**Explanation:**", " as computed above", "Propose a question.", "Reference: ",
        "Question: ", "Answer: ", "Solution 1:\n", "Solution 2:\n", "Which is right?",
        "Score the answer.", "Score the question.", "Grade it.", "Defects: ", "Are they real?",
        "Score: ", "Solve and grade yourself.", "## Self Evaluation", "Correct it.",
        "def f(x):\n return ", "Input: ", "Output: ", "What is the output?", "What is the input?",
        "Examples:\n", "Message: ", "->", "Write the program.", "Propose a program and its input.",
        "Propose inputs and a message.",
    ],
    "repairs": [
        "<think>", "</think>", "```python", "```", "x=int(input())", "print(x", "Tests:\n", "->",
        "\\n", "Change a line.", "Remove a line.", "Repair it.", "**Hidden tests:**",
    ],
}  # fmt: skip
# A system message holds instructions in prose, which one million parameters cannot read. The
# template leaves it out, so that scripts can send the same messages to every model.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' and not m['example'] %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    words, characters = WORDS[name], ["\n"] + [chr(c) for c in range(32, 127)]
    vocab = {token: i for i, token in enumerate(SPECIAL + words + characters + NUMBERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(words + NUMBERS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_model(tokenizer, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


# ------------------------------------------------------------------ training
def encode(tokenizer, user: str, assistant: str) -> tuple[list[int], int]:
    """(token ids of the conversation, how many of them are prompt, on which there is no loss)."""
    prompt = tokenizer(f"<|user|>{user}<|assistant|>", add_special_tokens=False).input_ids
    answer = tokenizer(f"{assistant}<|end|>", add_special_tokens=False).input_ids
    return prompt + answer, len(prompt)


def batch_loss(model, tokenizer, examples) -> torch.Tensor:
    """Summed cross-entropy over the assistant's tokens of one right-padded micro-batch."""
    width = max(len(ids) for ids, _ in examples)
    ids = torch.full((len(examples), width), tokenizer.pad_token_id)  # (B, T)
    labels = torch.full((len(examples), width), -100)  # (B, T)
    for row, (tokens, prompt_length) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, prompt_length : len(tokens)] = ids[row, prompt_length : len(tokens)]
    # right padding under a causal mask needs no attention mask
    logits = model(input_ids=ids).logits[:, :-1]  # (B, T - 1, V)
    targets = labels[:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100, reduction="sum")


def train(model, tokenizer, shares: dict, rng, steps: int, clean_share: float, batch_size, lr):
    """AdamW, with linear warm-up and cosine decay in each of the two stages. `shares` says of every
    part its share of the examples.
    """
    parts, weights = list(shares), list(shares.values())
    clean = round(steps * clean_share)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    start, done = time.time(), 0
    for noise, stage_steps, peak in [(0, clean, lr), (1, steps - clean, lr / 3)]:
        for step in range(stage_steps):
            warmup = min(1, (step + 1) / 100)
            decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / stage_steps))
            for group in optimizer.param_groups:
                group["lr"] = peak * warmup * decay
            chosen = (rng.choices(parts, weights)[0] for _ in range(batch_size))
            examples = [encode(tokenizer, *part(rng, noise)) for part in chosen]
            examples.sort(key=lambda example: len(example[0]))  # like lengths need little padding
            targets = sum(len(ids) - prompt_length for ids, prompt_length in examples)
            total = 0.0
            for i in range(0, batch_size, 8):  # small enough for the cache
                loss = batch_loss(model, tokenizer, examples[i : i + 8]) / targets
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done % 100 == 0:
                seconds = f"{time.time() - start:.0f} s"
                print(f"step {done}/{steps} noise {noise} loss {total:.4f} {seconds}", flush=True)


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    clean = "share of the steps on the likeliest decisions (stage 1)"
    parser.add_argument("name", choices=list(PARTS))
    parser.add_argument("--steps", type=int, help="default: as the shipped model")
    parser.add_argument("--clean-share", type=float, default=0.6, help=clean)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: where the scripts look for it")
    args = parser.parse_args()
    args.steps = args.steps or STEPS[args.name]
    torch.set_num_threads(1)  # the same file on any number of cores
    tokenizer = make_tokenizer(args.name)
    model = make_model(tokenizer, args.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    rng = random.Random(args.seed)
    shares = PARTS[args.name]
    train(model, tokenizer, shares, rng, args.steps, args.clean_share, args.batch_size, args.lr)
    args.out = args.out or TINY.parent / args.name
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    recipe = {k: str(v) for k, v in vars(args).items() if k != "out"}
    (args.out / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n")
    # it must load as any other model does
    AutoModelForCausalLM.from_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.out)


if __name__ == "__main__":
    main()
