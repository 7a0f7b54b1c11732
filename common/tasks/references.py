r"""Writes a data set's own solutions in the form that the prompts ask for.

A solver is asked for `<step>` blocks and an answer in a box. If a human solution has another form,
its form alone tells it from a generated solution. A discriminator would then be rewarded for seeing
tags (gar.py), and a model that is trained on the human solution would unlearn the form in which its
answers are read (spin.py).
"""

import operator
import re

from common.core.errors import UserError
from common.tasks.answers import boxed, is_correct, split_steps

OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
MOSTLY = 0.5  # at least this share of reference solutions must end in the right answer


def render(solution: str, answer: str) -> str:
    r"""Returns a solution in prose as steps in tags and an answer in a box; "" if it has no
    reasoning.

    A step is a line; if the solution is a single line, a step is a sentence. The answer is the
    solution's own if it has an answer in a box, else `answer`. A solution that has steps already
    stays as it is.

    >>> print(render("2+3 is <<2+3=5>>5 apples.\nTwice that is 10.\n#### 10", "10"))
    <step>2+3 is 5 apples.</step>
    <step>Twice that is 10.</step>
    <answer>\boxed{10}</answer>
    """
    if split_steps(solution) and boxed(solution) is not None:
        return solution
    text = re.sub(r"<<[^<>\n]*>>", "", solution)  # GSM8K's marks for a calculator
    text = re.sub(r"</?(step|answer)>", "", text)  # half of a tag would tear a step apart
    text = re.sub(r"^[ \t]*####.*$", "", text, flags=re.MULTILINE)  # GSM8K's answer line
    steps = [line.strip() for line in text.splitlines() if line.strip()]
    if len(steps) == 1:  # MATH: a paragraph
        steps = re.split(r"(?<=[.!?])\s+(?=[A-Z])", steps[0])
    if not steps or steps == [answer.strip()]:
        return ""
    own = boxed(solution)
    final = answer.strip() if own is None else own
    return "\n".join(
        [*(f"<step>{s}</step>" for s in steps), rf"<answer>\boxed{{{final}}}</answer>"]
    )


def solve_equation(equation, numbers) -> list[str]:
    """Returns the steps of an equation in prefix form over `numbers`, as MAWPS has them, the
    innermost first; [] for anything else.

    >>> solve_equation("- number0 * number1 2.0", [30, 4])
    ['4 * 2 = 8', '30 - 8 = 22']
    """
    values, steps = [], []
    try:
        for word in reversed(equation.split()):  # prefix form from its end: operands come first
            if word in OPERATIONS:
                a, b = values.pop(), values.pop()
                values.append(OPERATIONS[word](a, b))
                steps.append(f"{as_number(a)} {word} {as_number(b)} = {as_number(values[-1])}")
            else:
                place = re.fullmatch(r"number(\d{1,2})", word)
                values.append(float(numbers[int(place[1])] if place else word))
        return steps if len(values) == 1 else []
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError):
        return []


def as_number(value: float) -> str:
    """Returns a number as people write it. Raises ValueError if it needs more than six decimals, as
    a third does.
    """
    text = f"{value:.6f}".rstrip("0").rstrip(".")
    if not abs(value) < 1e12 or abs(float(text) - value) > 1e-9:  # `not` also refuses NaN
        raise ValueError(f"{value} has no short form")
    return text


def check_references(rows: list[dict], dataset: str):
    """Raises UserError if most of the reference solutions do not end in their row's answer.

    rows: {question, answer, reference}; rows without a reference do not count.
    """
    written = [row for row in rows if row["reference"].strip()]
    right = sum(is_correct(row["reference"], row["answer"]) for row in written)
    if right < MOSTLY * len(written):
        raise UserError(
            f"--dataset {dataset}: of {len(written)} reference solutions {right:g} end in the "
            f"right answer; training on them would teach wrong ones."
        )
