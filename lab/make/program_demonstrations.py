"""What the programs model is trained on: imperfect demonstrations of every part of cure.py and
azr.py. docs/test-bed.md explains the choices.

As in demonstrations.py the demonstrator holds beliefs, here about every operation modulo 100 and
about the words of a task. Each is of one of four kinds, which says how often he goes wrong when he
works it out, quickly or with care, and when he works it out for a test.
"""

from common.tiny.beliefs import decide, kinds_of
from common.tiny.programs import (
    FACTORS,
    MODULO,
    OPERANDS,
    OPERATORS,
    format_function,
    format_program,
    make_operations,
    make_program_task,
    message,
    parse_program_task,
    run,
)
from common.tiny.tasks import is_held_out
from lab.make.demonstrations import lines_of, spoil

KINDS = {  # share; how often they go wrong when worked out, with care, for a test
    "known": (0.40, 0.05, 0.01, 0.01),
    "half known": (0.20, 0.25, 0.05, 0.02),
    "seen through": (0.28, 0.60, 0.60, 0.04),
    "misconceived": (0.12, 0.60, 0.60, 0.65),
}
SOLVING, WITH_CARE, TESTING = 1, 2, 3  # columns

EVERY = [(a, op, b) for op in "+-*" for a in range(MODULO) for b in range(1, 10)]
FACTS = kinds_of([f for f in EVERY if f[2] in OPERANDS[f[1]]], 0, KINDS)
FACTS |= kinds_of([f for f in EVERY if f not in FACTS], 1, KINDS)  # products of tasks only
INVERSES = kinds_of([f for f in EVERY if f[2] in OPERANDS[f[1]]], 2, KINDS)  # (result, op, b)
READINGS = kinds_of([(op, b) for op in "+-" for b in range(1, 10)], 3, KINDS)  # of a task's words
READINGS |= kinds_of([("*", b) for b in FACTORS], 4, KINDS)


def compute(rng, a: int, op: str, b: int, noise: int, how=SOLVING) -> int:
    """a op b, as the demonstrator believes it."""
    right = OPERATORS[op](a, b)
    misconception = (right + 1 + (3 * a + 7 * b + ord(op)) % (MODULO - 2)) % MODULO  # never right
    if check_digit(misconception) == check_digit(right):
        misconception = (misconception + 1) % MODULO
    rate = KINDS[FACTS.get((a, op, b), "known")][how]
    return decide(rng, rate, right, misconception, range(MODULO), noise)


def check_digit(number: int) -> int:
    """Both digits added, modulo ten."""
    return (number // 10 + number) % 10


def write_steps(rng, value: int, operations, noise: int, how=SOLVING) -> tuple[list[str], int]:
    """(the steps of a computation, which carries its mistakes on, and its result)."""
    steps = []
    for op, operand in operations:
        result = compute(rng, value, op, operand, noise, how)
        steps.append(f"{value}{op}{operand}={result}")
        value = result
    return steps, value


def read(rng, op: str, operand: int, noise, how=SOLVING) -> tuple[str, int]:
    """The operation that the words mean; misread, it is another one with the same operand."""
    others = [(other, operand) for other in OPERATORS if other != op]
    rate, misread = KINDS[READINGS[op, operand]][how], others[operand % 2]
    return decide(rng, rate, (op, operand), misread, others, noise)


def sample_task(rng) -> str:
    while True:
        task = make_program_task(rng, rng.choice([2, 3, 4]))
        if not is_held_out(task):
            return task


def write_program(rng, noise):  # cure.py, coder
    task = sample_task(rng)
    operations = [read(rng, *operation, noise) for operation in parse_program_task(task)]
    return f"Task: {task}\nWrite a program.", format_program(operations)


def write_test(rng, noise):  # cure.py, tester
    task = sample_task(rng)
    x = rng.choice([0, 0, 50, rng.randrange(MODULO), *[rng.randrange(MODULO) for _ in range(6)]])
    read_so = [read(rng, *operation, noise, WITH_CARE) for operation in parse_program_task(task)]
    steps, output = write_steps(rng, x, read_so, noise, TESTING)
    return (
        f"Task: {task}\nWrite a test.",
        f"{lines_of(steps)}**Test Input:**\n```\n{x}\n```\n**Test Output:**\n```\n{output}\n```\n"
        f"**Explanation:** as computed above",
    )


def sample_function(rng, shortest: int = 2) -> list[tuple[str, int]]:
    """The operations of a program of azr.py."""
    while True:
        operations = make_operations(rng, rng.randint(shortest, 4))
        if not is_held_out(format_function(operations)):
            return operations


def answer_with(steps: list[str], kind: str, value) -> str:
    return f"<think>\n{lines_of(steps)}</think>\n<answer>\n```{kind}\n{value}\n```\n</answer>"


def deduce(rng, noise):  # program, input -> output
    operations, x = sample_function(rng), rng.randrange(MODULO)
    user = f"{format_function(operations)}\nInput: {x}\nWhat is the output?"
    steps, output = write_steps(rng, x, operations, noise)
    return user, answer_with(steps, "output", output)


def abduce(rng, noise):  # program, output -> input
    operations = sample_function(rng)
    value = run(rng.randrange(MODULO), operations)
    user, steps = f"{format_function(operations)}\nOutput: {value}\nWhat is the input?", []
    for op, b in reversed(operations):  # backwards: which value gives this one?
        right = next(v for v in range(MODULO) if OPERATORS[op](v, b) == value)
        misconception = (right + 1 + (3 * value + 7 * b + ord(op)) % (MODULO - 2)) % MODULO
        rate = KINDS[INVERSES[value, op, b]][SOLVING]
        before = decide(rng, rate, right, misconception, range(MODULO), noise)
        steps.append(f"{value}={before}{op}{b}")
        value = before
    return user, answer_with(steps, "input", value)


def induce(rng, noise):  # inputs, outputs and a message -> program
    """The first example says which operand is missing."""
    operations = sample_function(rng, shortest=1)
    inputs = rng.sample(range(MODULO), 3)
    shown = "".join(f"{x}->{run(x, operations)}\n" for x in inputs)
    steps, before = write_steps(rng, inputs[0], operations[:-1], noise)
    op, wanted = operations[-1][0], run(inputs[0], operations)
    fits = [b for b in OPERANDS[op] if OPERATORS[op](before, b) == wanted]
    sure = fits and rng.random() >= 0.2 * noise
    operand = fits[0] if sure else rng.choice(OPERANDS[op])
    steps.append(f"{before}{op}{operand}={wanted}")
    program = format_function([*operations[:-1], (op, operand)])
    return (
        f"Examples:\n{shown}Message: {message(operations)}\nWrite the program.",
        f"<think>\n{lines_of(steps)}</think>\n<answer>\n{program}\n</answer>",
    )


def propose_program(rng, noise):  # a program and its input, unlike those shown
    shown = ""
    for _ in range(rng.choice([0, 1, 2])):
        program, x = format_function(sample_function(rng)), rng.randrange(MODULO)
        shown += f"{program}\n```input\n{x}\n```\n"
    program, x = format_function(sample_function(rng)), rng.randrange(MODULO)
    fault = rng.random() if noise else 1.0
    body = program.index("return")
    if fault < 0.12:  # does not parse, mostly
        program = program[:body] + spoil(rng, program[body:], len(program[body:]) - 8)
    elif fault < 0.22:  # parses, and fails when it is run
        program = program[:body] + program[body:].replace("x", "y")
    return (
        f"{shown}Propose a program and its input.",
        f"<answer>\n{program}\n```input\n{x}\n```\n</answer>",
    )


def propose_inputs(rng, noise):  # six inputs and a message for a program
    operations = sample_function(rng)
    inputs = rng.sample(range(MODULO), 6)
    if rng.random() < 0.1 * noise:  # one too few
        inputs = inputs[1:]
    read_so = [read(rng, *operation, noise, WITH_CARE) for operation in operations]
    blocks = "".join(f"```input\n{x}\n```\n" for x in inputs)
    return (
        f"{format_function(operations)}\nPropose inputs and a message.",
        f"<answer>\n{blocks}```message\n{message(read_so)}\n```\n</answer>",
    )


# Shares of the examples.
PARTS = {
    write_program: 8,
    write_test: 20,
    deduce: 20,
    abduce: 20,
    induce: 24,
    propose_program: 5,
    propose_inputs: 5,
}
