"""The tasks of ssr.py for its small model: programs that print three results of their input, one on
each line, with their tests.
"""

import random

from common.tiny.tasks import is_held_out

LINES = 3
INPUTS = range(10)
OPERATORS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
EVERY = [(op, b) for op in OPERATORS for b in range(1, 10)]


def format_lines(operations: list[tuple[str, int]]) -> str:
    body = "".join(f"\nprint(x{op}{operand})" for op, operand in operations)
    return f"x=int(input()){body}"


def results(x: int, operations: list[tuple[str, int]]) -> list[int]:
    return [OPERATORS[op](x, operand) for op, operand in operations]


def printed(x: int, operations: list[tuple[str, int]]) -> str:
    return "".join(f"{y}\n" for y in results(x, operations))


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
            "tests": [(f"{x}\n", printed(x, operations)) for x in inputs],
            "reference": program,
        }
    return list(rows.values())
