"""Other small models on which few_labels.py can start, for the experiment `bases`:

    python -m benchmarks.bases --seed 1 --drill 0.25

They have the shape of common/tiny/arithmetic and its tokenizer, but other initial weights, and they
were taught only what few_labels.py asks for: to solve, and to verify step by step. `--drill` is how
often they met the drill of checks (common/tiny/demonstrations.py), the shipped model's being 1.
With `--asked` a check begins with the operation that the question asks for, and some solutions that
they judge have a true step of another operation. Half an hour on one core. evidence.py makes a base
that a run needs and that is missing.
"""

import random
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from common.tiny import demonstrations as d
from common.tiny import make
from common.tiny.tasks import OPERANDS, parse_question

import torch

FOLDER = Path(__file__).parent.parent / "runs" / "bases"
STEPS = 1600  # three parts of seventeen, which are .46 of the shipped model's 4,000 steps


# ------------------------------------------------------------------ checks that say what is asked
def of_another_operation(rng, question: str) -> tuple[list[str], int]:
    """(steps, answer) of a solution whose results are all true, but one operation is not the
    question's. Generators come to write such solutions in place of a quotient.
    """
    value, operations = parse_question(question)
    k = rng.randrange(len(operations))
    op = rng.choice([op for op in "+-*" if op != operations[k][0]])
    operations[k] = (op, rng.choice(OPERANDS[op]))
    steps, answer = d.write_steps(rng, value, operations, d.GOLD)
    return [step + d.tone(rng, 1) for step in steps], answer


def judge_asked(rng, question: str, steps: list[str], noise, looks) -> tuple[str, list[bool]]:
    """(every step with its mark, the marks). The operation that is asked for follows the step, and
    then the check: `42/5=28:42/5:28*5=18\\boxed{INCORRECT}`. A step of another operation needs no
    check: `42+5=47:42/5\\boxed{INCORRECT}`. looks: whether a step is looked at.
    """
    value, operations = parse_question(question)
    lines, marks = [], []
    for step, (op, b) in zip(steps, operations):
        shown, right = d.check(step)
        asked = f"{value}{op}{b}"
        if not looks(step):
            line, right = step, True
        elif step.split("=")[0] != asked:
            line, right = f"{step}:{asked}", False
        else:
            line = f"{step}:{asked}:{shown}"
        lines.append(line + d.mark(right))
        marks.append(right)
        value = d.parse_step(step)[3]
    return d.lines_of(lines), marks


def verify(rng, noise):
    question = d.any_question(rng)
    other = rng.random() < 0.3
    steps, answer = (of_another_operation if other else d.judged_solution)(rng, question)
    looks = lambda step: not d.trusts(rng, step, noise)  # noqa: E731
    lines, marks = judge_asked(rng, question, steps, noise, looks)
    verdict = d.flip(rng, all(marks), 0.01 * noise)
    return (
        f"Problem: {question}\n{d.solution_of(steps, answer)}Verify its {len(steps)} steps.",
        f"<step_verification>\n{lines}</step_verification>\n"
        f"<final_verification>{d.mark(verdict)}</final_verification>",
    )


def drill(rng, noise):
    question = d.sample_question(rng, 3, 6)
    if rng.random() < 0.3:
        steps = of_another_operation(rng, question)[0]
    else:
        steps = d.write_steps(rng, *parse_question(question), d.GOLD, 0.5)[0]
    steps = [step.rstrip("!") + ("!" if rng.random() < 0.5 else "") for step in steps]
    return (
        f"Problem: {question}\nReasoning:\n{d.lines_of(steps)}Check every step.",
        judge_asked(rng, question, steps, noise, lambda step: True)[0],
    )


# ------------------------------------------------------------------ making
def make_base(seed: int, share: float, asked: bool) -> Path:
    """Trains it, unless its folder is there -> its folder."""
    folder = FOLDER / f"{seed}-{share:g}{'-asked' * asked}"
    if (folder / "config.json").exists():
        return folder
    torch.set_num_threads(1)
    tokenizer = make.make_tokenizer("arithmetic")
    model = make.make_model(tokenizer, seed)
    parts = (d.solve, verify, drill) if asked else (d.solve, d.verify, d.drill)
    of = d.PARTS
    shares = dict(zip(parts, (of[d.solve], of[d.verify], share * of[d.drill])))
    make.train(model, tokenizer, shares, random.Random(seed), STEPS, 0.6, 64, 3e-3)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--drill", type=float, default=1.0)
    parser.add_argument("--asked", action="store_true")
    args = parser.parse_args()
    print(make_base(args.seed, args.drill, args.asked))
