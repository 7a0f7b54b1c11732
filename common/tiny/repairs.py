r"""The tasks of ssr.py for its small model, and what this model is trained on: to break programs,
and to repair them from the tests that would have shown it.

A program prints three results of its input, one on each line. To break it, the demonstrator
changes or removes a line. To repair it he takes one hidden test after the other and goes through
the lines: `2*7=14:9:+7` says that the line x*7 prints 14, that 9 is wanted, and that x+7 would
print it; a line that prints what is wanted has no third part. What he finds first is his repair, so
a test that fits many operations, such as that of 0, misleads him, and so do his beliefs about
products, which are like those about quotients in demonstrations.py.
"""

import random

from common.tiny.demonstrations import KINDS, SLIP, decide, kinds_of, spoil
from common.tiny.tasks import is_held_out

LINES = 3
TESTS = 4  # that are shown
INPUTS = range(10)
OPERATORS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
EVERY = [(op, b) for op in OPERATORS for b in range(1, 10)]
PRODUCTS = kinds_of([(a, b) for a in INPUTS for b in range(1, 10)], 0, KINDS)


def format_lines(operations: list[tuple[str, int]]) -> str:
    body = "".join(f"\nprint(x{op}{operand})" for op, operand in operations)
    return f"x=int(input()){body}"


def results(x: int, operations: list[tuple[str, int]]) -> list[int]:
    return [OPERATORS[op](x, operand) for op, operand in operations]


def test_line(x: int, operations: list[tuple[str, int]]) -> str:
    r"""`2->16\n14\n7` with a backslash, as ssr.py shows a test of several lines."""
    return f"{x}->" + "\\n".join(map(str, results(x, operations)))


def sample_program(rng: random.Random, held_out: bool = False) -> list[tuple[str, int]]:
    while True:
        operations = rng.sample(EVERY, LINES)
        if is_held_out(format_lines(operations)) == held_out:
            return operations


def sample_rows(seed: int, count: int, held_out: bool) -> list[dict]:
    """`count` different programs with ten tests each, in the form of `code.load_tasks`; as many as
    there are, some sixteen thousand to train on, once 10,000 draws have given nothing new.
    """
    rng, rows, misses = random.Random(seed), {}, 0
    while len(rows) < count and misses < 10_000:
        operations = sample_program(rng, held_out)
        program, inputs = format_lines(operations), rng.sample(INPUTS, 10)
        misses = misses + 1 if program in rows else 0
        rows[program] = {
            "question": program,
            "test_input": [f"{x}\n" for x in inputs],
            "test_output": ["".join(f"{y}\n" for y in results(x, operations)) for x in inputs],
            "reference": program,
        }
    return list(rows.values())


# ------------------------------------------------------------------ demonstrations
def change(rng, operations: list) -> list:
    """Another operation on one of the lines."""
    place = rng.randrange(len(operations))
    other = rng.choice([one for one in EVERY if one != operations[place]])
    return [*operations[:place], other, *operations[place + 1 :]]


def remove(rng, operations: list) -> list:
    place = rng.randrange(len(operations))
    return operations[:place] + operations[place + 1 :]


def break_program(rng, noise):  # injector
    operations = sample_program(rng)
    how, ending = rng.choice([(change, "Change a line."), (remove, "Remove a line.")])
    broken = how(rng, operations)
    if noise and rng.random() < 0.15:  # a second line; where it is the same one, maybe no bug
        broken = change(rng, broken)
    elif noise and rng.random() < 0.05:
        broken = operations
    program = format_lines(broken)
    if noise and rng.random() < 0.08:  # does not parse, mostly
        start = rng.randrange(len("x=int(input())\n"), len(program) - 8)
        program = program[:start] + spoil(rng, program[start:], len(program[start:]) - 1)
    inputs = rng.sample(INPUTS, TESTS)
    tests = "".join(f"{k}: {test_line(x, operations)}\n" for k, x in enumerate(inputs, 1))
    hidden = sorted(rng.sample(range(1, TESTS + 1), rng.randint(1, 3)))
    if noise and rng.random() < 0.05:
        hidden = [*hidden, rng.randint(TESTS + 1, 9)]
    return (
        f"```python\n{format_lines(operations)}\n```\nTests:\n{tests}{ending}",
        f"```python\n{program}\n```\n**Hidden tests:** {', '.join(map(str, hidden))}",
    )


def repair_program(rng, noise):  # solver
    right = sample_program(rng)
    broken = rng.choice([change, remove])(rng, right)
    if noise and rng.random() < 0.1:  # somebody's wrong repair
        broken = change(rng, broken)
    inputs = rng.sample(INPUTS, rng.randint(1, 3))
    steps, repaired = search(rng, broken, [(x, results(x, right)) for x in inputs], noise)
    tests = "".join(f"{test_line(x, right)}\n" for x in inputs)
    thoughts = "".join(f"{step}\n" for step in steps)
    return (
        f"```python\n{format_lines(broken)}\n```\nTests:\n{tests}Repair it.",
        f"<think>\n{thoughts}</think>\n```python\n{format_lines(repaired)}\n```",
    )


def search(rng, broken: list, tests: list[tuple[int, list]], noise) -> tuple[list[str], list]:
    """(the lines of thought, the repaired operations); they are unchanged if all looks right."""
    steps, removed = [], LINES - len(broken)
    for x, wanted in tests:
        for place, y in enumerate(wanted):
            if place == len(broken):  # the last line is missing
                operation = fitting(rng, x, y, noise)
                steps.append(f"{x}:{y}:{operation[0]}{operation[1]}")
                return steps, [*broken, operation]
            op, operand = broken[place]
            printed = compute(rng, x, op, operand, noise)
            steps.append(f"{x}{op}{operand}={printed}:{y}")
            if printed != y:
                operation = fitting(rng, x, y, noise)
                steps[-1] += f":{operation[0]}{operation[1]}"
                return steps, [*broken[:place], operation, *broken[place + 1 - removed :]]
    return steps, broken


def compute(rng, a: int, op: str, b: int, noise) -> int:
    """a op b, as the demonstrator believes it."""
    right = OPERATORS[op](a, b)
    rate = KINDS[PRODUCTS[a, b]][1] if op == "*" else SLIP
    return decide(rng, rate, right, right + 1 + (3 * a + 7 * b) % 8, range(100), noise)


def fitting(rng, x: int, y: int, noise) -> tuple[str, int]:
    """An operation that makes y of x."""
    fits = [(op, b) for op, b in EVERY if OPERATORS[op](x, b) == y]
    return rng.choice(EVERY if not fits or (noise and rng.random() < 0.1) else fits)


# Shares of the examples.
PARTS = {break_program: 1, repair_program: 4}
