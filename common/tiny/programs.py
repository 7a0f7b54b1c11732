"""Programming tasks of cure.py and azr.py for their small model, with gold programs and outputs.

They are chains as in tasks.py, but modulo 100 and without divisions, with an input in place of the
first number: "Read x. Then add 4, times 7, minus 5. Print x mod 100." The model has been trained on
those. cure.py trains on two kinds for which a test can be bad, each in its own way: see
`make_testing_task`.
"""

import random
import re

from common.tiny.tasks import nest, sample_different

MODULO = 100
OPERATORS = {
    "+": lambda a, b: (a + b) % MODULO,
    "-": lambda a, b: (a - b) % MODULO,
    "*": lambda a, b: (a * b) % MODULO,
}
# Products by 3, 7 and 9 only: each result then comes from one value, so that no later operation
# hides an earlier mistake. In tasks for cure.py hiding a mistake is the point.
OPERANDS = {"+": range(1, 10), "-": range(1, 10), "*": (3, 7, 9)}
FACTORS = (2, 3, 4, 6, 7, 8, 9)
WORDS = {"+": "add", "-": "minus", "*": "times"}


def make_operations(rng: random.Random, count: int, operands=OPERANDS) -> list[tuple[str, int]]:
    return [(op, rng.choice(operands[op])) for op in rng.choices("+-*", k=count)]


READ_AS = {"add": "+", "minus": "-", "times": "*", "add minus": "-"}


def make_program_task(rng: random.Random, steps: int) -> str:
    """`Read x. Then add 4, times 7, minus 5. Print x mod 100.`: what the model is trained on."""
    operations = make_operations(rng, steps, OPERANDS | {"*": FACTORS})
    words = ", ".join(f"{WORDS[op]} {operand}" for op, operand in operations)
    return f"Read x. Then {words}. Print x mod {MODULO}."


def make_testing_task(rng: random.Random, steps: int) -> str:
    """What cure.py trains on: two kinds equally often, one for each way in which a test can be bad.

    Products, `Read x. Then times 4, times 7. Print x mod 100.`: one wrong factor never shows on the
    input 0, and seldom on 50. There a right test lets wrong programs pass.

    Sums with one negative number, `Read x. Then minus 2, add minus 4. Print x mod 100.`: the model
    has never read one, and drops the sign in many of its programs and tests. Such tests let such
    programs pass, and vote for them.
    """
    if rng.random() < 0.5:
        words = [f"times {rng.choice(FACTORS)}" for _ in range(steps)]
    else:
        words = [f"{rng.choice(['add', 'minus'])} {rng.randint(1, 9)}" for _ in range(steps)]
        words[rng.randrange(steps)] = f"add minus {rng.randint(1, 9)}"
    return f"Read x. Then {', '.join(words)}. Print x mod {MODULO}."


def sample_tasks(seed: int, count: int, held_out: bool, steps=(2, 3, 4)) -> list[str]:
    """`count` different tasks for cure.py, of the training or the held-out part."""
    return sample_different(random.Random(seed), count, held_out, make_testing_task, steps)


def parse_program_task(task: str) -> list[tuple[str, int]]:
    found = re.findall(r"(add minus|add|minus|times) (\d)", task)
    return [(READ_AS[words], int(operand)) for words, operand in found]


def program_output(task: str, x: int) -> int:
    return run(x, parse_program_task(task))


def run(value: int, operations: list[tuple[str, int]]) -> int:
    for op, operand in operations:
        value = OPERATORS[op](value, operand)
    return value


def format_program(operations: list[tuple[str, int]]) -> str:
    return f"```python\nx=int(input())\nprint(({nest('x', operations)})%{MODULO})\n```"


def format_function(operations: list[tuple[str, int]]) -> str:
    """The same as a function, the form of azr.py."""
    return f"```python\ndef f(x):\n return ({nest('x', operations)})%{MODULO}\n```"


def message(operations: list[tuple[str, int]]) -> str:
    """All operations in words, but for the last operand: the hint that goes with examples."""
    words = [f"{WORDS[op]} {operand}" for op, operand in operations]
    return ", ".join([*words[:-1], f"{WORDS[operations[-1][0]]} ?"])


def function_operations(program: str) -> list[tuple[str, int]] | None:
    """Of a function in the form above, fenced or not; None for any other."""
    found = re.search(r"return \(([^\n]*)\)%100(?:\n|$)", program)
    operations = [(op, int(b)) for op, b in re.findall(r"([+*-])(\d)", found[1] if found else "")]
    well_formed = operations and f"return ({nest('x', operations)})%{MODULO}" in program
    return operations if well_formed else None


def sample_functions(seed: int, count: int, held_out: bool, steps=(2, 3, 4)) -> list[str]:
    """`count` different functions for azr.py, of the training or the held-out part."""
    make = lambda rng, n: format_function(make_operations(rng, n))  # noqa: E731
    return sample_different(random.Random(seed), count, held_out, make, steps)
