"""Other small models on which few_labels.py can start, for the experiment `bases`:

    python -m lab.runs.bases beliefs

Three are the shipped model of common/tiny/arithmetic after 400 further steps on other
demonstrations of the parts that few_labels.py asks for: to solve, and to verify. The fourth shares
only the recipe with the shipped model.

    beliefs     other quotients are known, half known or misconceived
    trusting    a verifier looks at a step far less often, and there is no drill of checks
    asked       a check begins with the operation that the question asks for, and some solutions
                that are judged have a true step of another operation
    seed1       the whole of lab/make/recipe.py with seed 1: other initial weights, and other
                draws of the same demonstrations

evidence.py makes a base that a run needs and that is missing: in seven minutes on one core, and
seed1 in a good hour.
"""

import random
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from common.tiny import TINY, beliefs
from common.tiny.tasks import OPERANDS, parse_question
from lab import ROOT
from lab.make import demonstrations as d
from lab.make import recipe

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = ROOT / "runs" / "bases"
STEPS = 400
TRUSTING = {"sure": 0.95, "hard": 0.8, "other": 0.6}  # in place of .8, .5 and .2: demonstrations.py


# ------------------------------------------------------------------ checks that say what is asked
def of_another_operation(rng, question: str) -> tuple[list[str], int]:
    """(steps, answer) of a solution whose results are all true, but one operation is not the
    question's. Generators come to write such solutions in place of a quotient.
    """
    value, operations = parse_question(question)
    k = rng.randrange(len(operations))
    op = rng.choice([op for op in "+-*" if op != operations[k][0]])
    operations[k] = (op, rng.choice(OPERANDS[op]))
    steps, answer = beliefs.write_steps(rng, value, operations, beliefs.GOLD)
    return [step + beliefs.tone(rng, 1) for step in steps], answer


def judge_asked(question: str, steps: list[str], looks) -> tuple[str, list[bool]]:
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
        value = beliefs.parse_step(step)[3]
    return d.lines_of(lines), marks


def verify(rng, noise):
    question = d.any_question(rng)
    other = rng.random() < 0.3
    steps, answer = (of_another_operation if other else d.judged_solution)(rng, question)
    looks = lambda step: not d.trusts(rng, step, noise)  # noqa: E731
    lines, marks = judge_asked(question, steps, looks)
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
        steps = beliefs.write_steps(rng, *parse_question(question), beliefs.GOLD, 0.5)[0]
    steps = [step.rstrip("!") + ("!" if rng.random() < 0.5 else "") for step in steps]
    return (
        f"Problem: {question}\nReasoning:\n{d.lines_of(steps)}Check every step.",
        judge_asked(question, steps, lambda step: True)[0],
    )


# ------------------------------------------------------------------ making
def parts_of(name: str) -> dict:
    """Part -> its share of the examples. Changes what the demonstrator believes and trusts."""
    verifying = (verify, drill) if name == "asked" else (d.verify, d.drill)
    shares = {part: d.PARTS[of] for part, of in zip(verifying, (d.verify, d.drill))}
    if name == "beliefs":
        beliefs.QUOTIENTS = beliefs.kinds_of([*beliefs.QUOTIENTS], 1, beliefs.KINDS)
    if name == "trusting":
        d.TRUST = TRUSTING
        del shares[d.drill]
    return {d.solve: d.PARTS[d.solve]} | shares


def make_base(name: str) -> Path:
    """Trains it -> its folder."""
    if name == "seed1":
        words = ["-m", "lab.make.recipe", "arithmetic", "--seed", "1", "--out", str(FOLDER / name)]
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
        return FOLDER / name
    torch.set_num_threads(1)
    tokenizer, model = (of.from_pretrained(TINY) for of in (AutoTokenizer, AutoModelForCausalLM))
    # the second stage of lab/make/recipe.py alone: decisions are drawn
    recipe.train(model, tokenizer, parts_of(name), random.Random(0), STEPS, 0, 64, 3e-3)
    tokenizer.save_pretrained(FOLDER / name)
    model.save_pretrained(FOLDER / name)
    return FOLDER / name


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["beliefs", "trusting", "asked", "seed1"])
    print(make_base(parser.parse_args().name))
