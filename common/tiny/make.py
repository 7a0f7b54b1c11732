"""Make the embedded model: `python -m common.tiny.make`, about half an hour on one core.

A Qwen3-shaped model of one million parameters and its character tokenizer, trained by plain
supervised learning on the tasks of `tasks.py`, to play every part that the scripts need: solve,
verify step by step, judge a slice of reasoning, write a program, write a test for it, propose a
question, score an answer or a question.

What it must be is *half* competent: RL needs something to sharpen. A model trained briefly on clean
data does not know enough, and one trained well on clean data has nothing left to learn. So there
are two stages: clean data teaches the skills, then imperfect demonstrations teach mistakes. In
these each small decision goes wrong at a stated rate, and everything after it follows from it. The
right decision is then mostly the likeliest one, samples err, and the model is calibrated to its own
mistakes.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

from common.tiny.tasks import (
    OPERATORS,
    format_program,
    format_solution,
    gold_answer,
    is_held_out,
    make_program_task,
    make_question,
    parse_program_task,
    parse_question,
)

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

FOLDER = Path(__file__).parent / "model"

# Tokens longer than one character: the tags of all scripts, the words of their user messages.
SPECIAL = ["<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|end|>"]
TAGS = (
    "<think> </think> <step> </step> <answer> </answer> <question> </question> <score> </score> "
    "<step_verification> </step_verification> <final_verification> </final_verification> "
    "\\boxed{CORRECT} \\boxed{INCORRECT} \\boxed{ **YES** **NO** ```python ``` int(input()) print("
).split()
PHRASES = [
    " mod 10", "Problem: ", "Solution:\n", "Verify its ", " steps.", "Reasoning:\n", "Is it sound?",
    " every step holds", " a step is wrong", "Task: ", "Write a program.", "Write a test.",
    "Read x. Then ", "add ", "minus ", "times ", ". Print x mod 10.", "**Test Input:**",
    "**Test Output:**", "**Explanation:**", " as computed above", "Propose a question.",
    "Reference: ", "Question: ", "Answer: ", "Score the answer.", "Score the question.",
]  # fmt: skip
# A system message holds instructions in prose, which one million parameters cannot read. The
# template leaves it out, so that scripts can send the same messages to every model.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    characters = ["\n"] + [chr(c) for c in range(32, 127)]
    vocab = {token: i for i, token in enumerate(SPECIAL + TAGS + PHRASES + characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(TAGS + PHRASES)
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
            intermediate_size=384,
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


# ------------------------------------------------------------------ imperfect demonstrations
def fact_error_rates(seed: int = 0) -> dict[tuple[int, str, int], float]:
    """How often the demonstrator gets each of the 300 facts wrong: half of them are well known.

    The table is fixed, so that mistakes are systematic, as a real model's are: of a hard fact one
    wrong result is the likeliest of all, and greedy decoding alone does not repair it.
    """
    rng = random.Random(seed)
    return {
        (a, op, b): rng.choices([0.15, 0.30, 0.60], [50, 35, 15])[0]
        for op in OPERATORS
        for a in range(10)
        for b in range(10)
    }


FACT_ERRORS = fact_error_rates()


def compute(rng: random.Random, a: int, op: str, b: int, noise: float) -> int:
    """a op b, wrong at `noise` times the rate of that fact; two thirds of its wrong results are the
    same one, its misconception.
    """
    right = OPERATORS[op](a, b)
    if rng.random() >= noise * FACT_ERRORS[a, op, b]:
        return right
    misconception = (right + 1 + (3 * a + 7 * b + ord(op)) % 9) % 10  # never the right result
    return misconception if rng.random() < 2 / 3 else (right + rng.randint(1, 9)) % 10


def write_steps(rng, value: int, operations, noise: float) -> tuple[list[str], int]:
    """(the steps of a solution, which carries its mistakes on, and the answer it ends with)."""
    steps = []
    for op, operand in operations:
        result = compute(rng, value, op, operand, noise)
        steps.append(f"{value}{op}{operand}={result}")
        value = result
    return steps, value


def flip(rng, verdict: bool, rate: float) -> bool:
    return verdict != (rng.random() < rate)


def check_steps(rng, steps: list[str], noise: float) -> tuple[str, bool]:
    """(every step, recomputed and marked, whether all marks say correct).

    At noise 1 the recomputation is wrong in 12 % of the cases, and the mark disagrees with it in
    11 %.
    """
    lines, sound = "", True
    for step in steps:
        a, op, b, claimed = int(step[0]), step[1], int(step[2]), int(step[4])
        again = OPERATORS[op](a, b)
        if rng.random() < 0.12 * noise:
            again = (again + rng.randint(1, 9)) % 10
        mark = flip(rng, again == claimed, 0.11 * noise)
        lines += f"<step>{step}:{again}\\boxed{{{'CORRECT' if mark else 'INCORRECT'}}}</step>\n"
        sound &= mark
    return lines, sound


def sample_question(rng) -> str:
    while True:
        question = make_question(rng, rng.choice([2, 3, 4, 5]))
        if not is_held_out(question):
            return question


def judged_steps(rng, question: str) -> list[str]:
    """A solution to be judged; in half of the cases, in both stages, it has a wrong step."""
    value, operations = parse_question(question)
    if rng.random() < 0.4:
        return write_steps(rng, value, operations, 0.0)[0]
    return write_steps(rng, value, operations, 1.0)[0]


# ------------------------------------------------------------------ the parts: (user message,
# assistant message)
def solve_part(rng, noise):
    question = sample_question(rng)
    steps, answer = write_steps(rng, *parse_question(question), noise)
    return question, format_solution(steps, answer)


def verify_part(rng, noise):  # tango.py
    question = sample_question(rng)
    steps = judged_steps(rng, question)
    solution = format_solution(steps, int(steps[-1][-1]))
    lines, sound = check_steps(rng, steps, noise)
    sound = flip(rng, sound, 0.12 * noise)
    if rng.random() < 0.03 * noise:  # a malformed judgement now and then: one step is left out
        lines = lines[lines.index("\n") + 1 :]
    verdict = f"\\boxed{{{'CORRECT' if sound else 'INCORRECT'}}}"
    return (
        f"Problem: {question}\nSolution:\n{solution}\nVerify its {len(steps)} steps.",
        f"<step_verification>\n{lines}</step_verification>\n"
        f"<final_verification>{verdict}</final_verification>",
    )


def discriminate_part(rng, noise):  # gar.py
    question = sample_question(rng)
    steps = judged_steps(rng, question)
    first = rng.randrange(len(steps))
    steps = steps[first : first + rng.randint(1, 3)]
    lines, sound = check_steps(rng, steps, noise)
    sound = flip(rng, sound, 0.12 * noise)
    reasoning = "".join(f"<step>{step}</step>\n" for step in steps)
    verdict = "**YES** every step holds" if sound else "**NO** a step is wrong"
    return f"Problem: {question}\nReasoning:\n{reasoning}Is it sound?", lines + verdict


def sample_task(rng) -> str:
    while True:
        task = make_program_task(rng, rng.choice([2, 3, 4]))
        if not is_held_out(task):
            return task


def program_part(rng, noise):  # cure.py, coder
    task = sample_task(rng)
    operations = []
    for op, operand in parse_program_task(task):
        if rng.random() < 0.12 * noise:
            op = rng.choice([other for other in OPERATORS if other != op])
        if rng.random() < 0.08 * noise:
            operand = rng.randint(1, 9)
        operations.append((op, operand))
    return f"Task: {task}\nWrite a program.", format_program(operations)


def test_part(rng, noise):  # cure.py, tester
    task = sample_task(rng)
    x = rng.randint(0, 9)
    steps, output = write_steps(rng, x, parse_program_task(task), noise)
    reasoning = "".join(f"<step>{step}</step>\n" for step in steps)
    return (
        f"Task: {task}\nWrite a test.",
        f"{reasoning}**Test Input:**\n```\n{x}\n```\n**Test Output:**\n```\n{output}\n```\n"
        f"**Explanation:** as computed above",
    )


def spoil(rng, question: str) -> str:
    """A malformed question: one character is lost, doubled, or replaced by another."""
    i = rng.randrange(len(question) - len(" mod 10"))
    return question[:i] + rng.choice(["", question[i] * 2, rng.choice("+*-()")]) + question[i + 1 :]


def propose_part(rng, noise):  # mae.py, proposer
    question = sample_question(rng)
    user = "Propose a question."
    if rng.random() >= 0.5:
        user = f"Reference: {sample_question(rng)}\n{user}"
    if rng.random() < 0.2 * noise:
        question = spoil(rng, question)
    return user, f"<question>{question}</question>"


def score(rng, good: bool, noise: float) -> str:
    number = rng.randint(8, 10) if flip(rng, good, 0.15 * noise) else rng.randint(1, 3)
    return f"<score>{number}</score>"


def judge_answer_part(rng, noise):  # mae.py, judge
    question = sample_question(rng)
    steps, own = write_steps(rng, *parse_question(question), noise)
    answer = gold_answer(question) if rng.random() < 0.5 else rng.randint(0, 9)
    reasoning = "".join(f"<step>{step}</step>\n" for step in steps)
    return (
        f"Question: {question}\nAnswer: {answer}\nScore the answer.",
        f"<think>\n{reasoning}{own}:{answer}\n</think>\n" + score(rng, own == answer, noise),
    )


def judge_question_part(rng, noise):  # mae.py, judge
    question = sample_question(rng)
    if rng.random() < 0.5:
        question = spoil(rng, question)
    # brackets opened and closed, the subtlest fault
    reasoning = f"{question.count('(')}:{question.count(')')}"
    good = parse_question(question) is not None
    return (
        f"Question: {question}\nScore the question.",
        f"<think>\n{reasoning}\n</think>\n{score(rng, good, noise)}",
    )


PARTS = {  # share of the examples; judging is learnt far more slowly than solving
    solve_part: 20,
    verify_part: 26,
    discriminate_part: 8,
    program_part: 7,
    test_part: 9,
    propose_part: 4,
    judge_answer_part: 14,
    judge_question_part: 12,
}


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


def train(model, tokenizer, rng, steps: int, clean_share: float, batch_size: int, lr: float):
    """AdamW, with linear warm-up and cosine decay in each of the two stages."""
    parts, weights = list(PARTS), list(PARTS.values())
    clean = round(steps * clean_share)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    start, done = time.time(), 0
    for noise, stage_steps, peak in [(0.0, clean, lr), (1.0, steps - clean, lr / 3)]:
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
            for i in range(0, batch_size, 32):
                loss = batch_loss(model, tokenizer, examples[i : i + 32]) / targets
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    clean = "share of the steps on clean data (stage 1)"
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--clean-share", type=float, default=0.4, help=clean)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the same file on any number of cores
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    rng = random.Random(args.seed)
    train(model, tokenizer, rng, args.steps, args.clean_share, args.batch_size, args.lr)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    recipe = {k: str(v) for k, v in vars(args).items() if k != "out"}
    (args.out / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n")
    # it must load as any other model does
    AutoModelForCausalLM.from_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.out)


if __name__ == "__main__":
    main()
