r"""What the repairs model is trained on: to break programs of common/tiny/repairs.py, and to repair
them from the tests that would have shown it.

To break a program, the demonstrator changes or removes a line. To repair it he takes one hidden
test after the other and goes through the lines: `2*7=14:9:+7` says that the line x*7 prints 14,
that 9 is wanted, and that x+7 would print it; a line that prints what is wanted has no third part.
What he finds first is his repair, so a test that fits many operations, such as that of 0, misleads
him, and so do his beliefs about products, which are like those about quotients in beliefs.py.
"""

from common.tiny.beliefs import KINDS, SLIP, decide, kinds_of
from common.tiny.repairs import (
    EVERY,
    INPUTS,
    LINES,
    OPERATORS,
    format_lines,
    results,
    sample_program,
)
from lab.make.demonstrations import spoil

TESTS = 4  # that are shown
PRODUCTS = kinds_of([(a, b) for a in INPUTS for b in range(1, 10)], 0, KINDS)


def test_line(x: int, operations: list[tuple[str, int]]) -> str:
    r"""`2->16\n14\n7` with a backslash, as ssr.py shows a test of several lines."""
    return f"{x}->" + "\\n".join(map(str, results(x, operations)))


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
