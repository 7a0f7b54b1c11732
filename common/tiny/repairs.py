"""The embedded tasks of ssr.py, and what its model is trained on: to break programs, and to repair
them from the tests that a break was hidden from.

A program applies three operations modulo 100 to its input, one on each line. To break it, the
demonstrator changes or removes a line. To repair it he takes the first test, and looks for a place
where one operation is missing: forwards from the input to that place, backwards from the output to
it, and if one operation leads from the one value to the other, that is the repair. He tries the
places in any order, and takes the first at which something fits. Where nothing is missing, one of
five places fits by chance: then the other tests still fail. What he believes about single
operations is that of program_demonstrations.py.
"""

import random

from common.tiny.demonstrations import decide, lines_of, spoil
from common.tiny.program_demonstrations import INVERSES, KINDS, SOLVING, compute
from common.tiny.programs import MODULO, OPERANDS, OPERATORS, make_operations
from common.tiny.tasks import is_held_out

LINES = 3
TESTS = 4  # that are shown
EVERY = [(op, b) for op in OPERANDS for b in OPERANDS[op]]


def format_lines(operations: list[tuple[str, int]]) -> str:
    body = "".join(f"x{op}={operand}\n" for op, operand in operations)
    return f"x=int(input())\n{body}print(x%{MODULO})"


def run(value: int, operations: list[tuple[str, int]]) -> int:
    for op, operand in operations:
        value = OPERATORS[op](value, operand)
    return value


def sample_program(rng: random.Random, held_out: bool = False) -> list[tuple[str, int]]:
    while True:
        operations = make_operations(rng, LINES)
        if is_held_out(format_lines(operations)) == held_out:
            return operations


def sample_rows(seed: int, count: int, held_out: bool) -> list[dict]:
    """`count` different programs with ten tests each, in the form of `code.load_tasks`."""
    rng, rows = random.Random(seed), {}
    while len(rows) < count:
        operations = sample_program(rng, held_out)
        program, inputs = format_lines(operations), rng.sample(range(MODULO), 10)
        rows[program] = {
            "question": program,
            "test_input": [f"{x}\n" for x in inputs],
            "test_output": [f"{run(x, operations)}\n" for x in inputs],
            "reference": program,
        }
    return list(rows.values())


# ------------------------------------------------------------------ demonstrations
def change(rng, operations: list) -> tuple[list, int, bool]:
    """(operations with another one on a line, its place, False)."""
    place = rng.randrange(len(operations))
    other = rng.choice([one for one in EVERY if one != operations[place]])
    return [*operations[:place], other, *operations[place + 1 :]], place, False


def remove(rng, operations: list) -> tuple[list, int, bool]:
    """(operations without a line, where it was, True)."""
    place = rng.randrange(len(operations))
    return operations[:place] + operations[place + 1 :], place, True


def break_program(rng, noise):  # injector
    operations = sample_program(rng)
    how, ending = rng.choice([(change, "Change a line."), (remove, "Remove a line.")])
    broken, *_ = how(rng, operations)
    if noise and rng.random() < 0.15:  # a second line; where it is the same one, maybe no bug
        broken, *_ = change(rng, broken)
    elif noise and rng.random() < 0.05:
        broken = operations
    program = format_lines(broken)
    if noise and rng.random() < 0.08:  # does not parse, mostly
        start = rng.randrange(len("x=int(input())\n"), len(program) - 8)
        program = program[:start] + spoil(rng, program[start:], len(program[start:]) - 8)
    inputs = rng.sample(range(MODULO), TESTS)
    tests = "".join(f"{k}: {x}->{run(x, operations)}\n" for k, x in enumerate(inputs, 1))
    hidden = sorted(rng.sample(range(1, TESTS + 1), rng.randint(1, 3)))
    if noise and rng.random() < 0.05:
        hidden = [*hidden, rng.randint(TESTS + 1, 9)]
    return (
        f"```python\n{format_lines(operations)}\n```\nTests:\n{tests}{ending}",
        f"```python\n{program}\n```\n**Hidden tests:** {', '.join(map(str, hidden))}",
    )


def repair_program(rng, noise):  # solver
    right = sample_program(rng)
    broken, place, removed = rng.choice([change, remove])(rng, right)
    inputs = rng.sample(range(MODULO), rng.randint(1, 3))
    tests = "".join(f"{x}->{run(x, right)}\n" for x in inputs)
    steps, repaired = search(rng, broken, removed, inputs[0], run(inputs[0], right), noise)
    return (
        f"```python\n{format_lines(broken)}\n```\nTests:\n{tests}Repair it.",
        f"<think>\n{lines_of(steps)}</think>\n```python\n{format_lines(repaired)}\n```",
    )


def search(rng, broken, removed: bool, x: int, y: int, noise) -> tuple[list[str], list]:
    """(the lines of thought, the repaired operations) from one test, x -> y."""
    steps, places = [], list(range(len(broken) + removed))
    rng.shuffle(places)
    for place in places:
        before, after = broken[:place], broken[place if removed else place + 1 :]
        reached, wanted = x, y
        for op, operand in before:
            result = compute(rng, reached, op, operand, noise, SOLVING)
            steps.append(f"{reached}{op}{operand}={result}")
            reached = result
        for op, operand in reversed(after):
            value = undo(rng, wanted, op, operand, noise)
            steps.append(f"{wanted}={value}{op}{operand}")
            wanted = value
        fits = [(op, b) for op, b in EVERY if OPERATORS[op](reached, b) == wanted]
        if fits and noise and rng.random() < 0.05:  # overlooked
            fits = []
        chosen = rng.choice(fits) if fits else None
        steps.append(f"{reached}->{wanted}:" + (f"{chosen[0]}{chosen[1]}" if chosen else "no"))
        if chosen:
            break
    chosen = chosen or rng.choice(EVERY)
    return steps, [*before, chosen, *after]


def undo(rng, result: int, op: str, operand: int, noise) -> int:
    """Which value gives this result, as the demonstrator believes it."""
    right = next(v for v in range(MODULO) if OPERATORS[op](v, operand) == result)
    misconception = (right + 1 + (3 * result + 7 * operand + ord(op)) % (MODULO - 2)) % MODULO
    rate = KINDS[INVERSES[result, op, operand]][SOLVING]
    return decide(rng, rate, right, misconception, range(MODULO), noise)


# Shares of the examples.
PARTS = {break_program: 1, repair_program: 4}
