"""The embedded tasks: chains of arithmetic modulo 100, with gold answers and gold step labels.

A question is a left-nested chain such as `((38+4)*7)-5 mod 100`. Only the last two digits are kept
after each operation, so the right solution is

    <step>38+4=42</step>
    <step>42*7=94</step>
    <step>94-5=89</step>
    <answer>\\boxed{89}</answer>

The programming tasks are the same chains with an input in place of the first number: "Read x. Then
add 4, times 7, minus 5. Print x mod 100." The model has been trained on those. cure.py trains on
two kinds for which a test can be bad, each in its own way: see `make_testing_task`.

A model of one million parameters can half know these tasks, and each has an exact oracle: whatever
a run of co-training claims about a verifier or a tester can be checked against the truth. There are
2,100 facts such as `42*7=94`, far more than a batch visits, and an answer is right by luck once in
a hundred times only. docs/test-bed.md says what follows from that.

Nothing here is random by itself: every function that samples takes a `random.Random` or a seed.
"""

import hashlib
import random
import re

MODULO = 100
OPERATORS = {
    "+": lambda a, b: (a + b) % MODULO,
    "-": lambda a, b: (a - b) % MODULO,
    "*": lambda a, b: (a * b) % MODULO,
}
# Sums and differences of 1 to 9. Products by 3, 7 and 9 only: each result then comes from one
# value, so that no later step hides an earlier mistake.
OPERANDS = {"+": range(1, 10), "-": range(1, 10), "*": (3, 7, 9)}
FACTORS = (2, 3, 4, 6, 7, 8, 9)  # of programming tasks, where hiding a mistake is the point
LEVELS = {"tiny": (3, 4), "tiny-hard": (5, 6)}  # operations of a question
WORDS = {"+": "add", "-": "minus", "*": "times"}
NUMBER = r"(?:0|[1-9]\d?)"  # 0 to 99
CHAIN = re.compile(rf"(\(*)({NUMBER})((?:[+*-]\d\)?)+) mod {MODULO}")
STEP = re.compile(rf"({NUMBER})([+*-])(\d)=({NUMBER})")


# ------------------------------------------------------------------ questions
def make_operations(rng: random.Random, count: int, operands=OPERANDS) -> list[tuple[str, int]]:
    return [(op, rng.choice(operands[op])) for op in rng.choices("+-*", k=count)]


def nest(start: str, operations: list[tuple[str, int]]) -> str:
    """`38`, [('+', 4), ('*', 7)] -> `(38+4)*7`."""
    text = "(" * (len(operations) - 1) + start
    return text + ")".join(f"{op}{operand}" for op, operand in operations)


def make_question(rng: random.Random, steps: int) -> str:
    """A chain of `steps` operations."""
    return f"{nest(str(rng.randrange(MODULO)), make_operations(rng, steps))} mod {MODULO}"


def parse_question(question: str) -> tuple[int, list[tuple[str, int]]] | None:
    """`(38+4)*7 mod 100` -> (38, [('+', 4), ('*', 7)]); None for anything else."""
    match = CHAIN.fullmatch(question.strip())
    if not match:
        return None
    operations = [(op, int(b)) for op, b in re.findall(r"([+*-])(\d)", match[3])]
    # left-nested: one "(" per operation but the last, closed right after it
    well_formed = f"{nest(match[2], operations)} mod {MODULO}" == question.strip()
    return (int(match[2]), operations) if well_formed else None


def is_held_out(question: str) -> bool:
    """True for a tenth of all questions, by hash; the model has never been trained on them."""
    return hashlib.blake2b(question.encode(), digest_size=1).digest()[0] % 10 == 0


def sample_questions(
    seed: int, count: int, held_out: bool, steps: tuple[int, ...] = LEVELS["tiny"]
) -> list[str]:
    """`count` different questions of the training or held-out part, all lengths equally often."""
    return _sample(random.Random(seed), count, held_out, make_question, steps)


def _sample(rng: random.Random, count: int, held_out: bool, make, steps) -> list[str]:
    """`count` different ones, or as many as there are, all lengths equally often.

    There are few short ones, some three hundred programming tasks of two steps. A length of which
    10,000 draws give nothing new is left out from then on.
    """
    steps, seen, misses = list(steps), {}, 0
    while steps and len(seen) < count:
        i = len(seen) % len(steps)
        question = make(rng, steps[i])
        if is_held_out(question) == held_out and question not in seen:
            seen[question], misses = None, 0
        elif (misses := misses + 1) > 10_000:
            steps, misses = steps[:i] + steps[i + 1 :], 0
    return list(seen)


# ------------------------------------------------------------------ solutions
def format_solution(steps: list[str], answer: int) -> str:
    lines = "".join(f"<step>{step}</step>\n" for step in steps)
    return f"{lines}<answer>\\boxed{{{answer}}}</answer>"


def gold_solution(question: str) -> str:
    """The right solution, one operation a line. Raises TypeError on a malformed question."""
    value, operations = parse_question(question)
    steps = []
    for op, operand in operations:
        result = OPERATORS[op](value, operand)
        steps.append(f"{value}{op}{operand}={result}")
        value = result
    return format_solution(steps, value)


def gold_answer(question: str) -> int:
    value, operations = parse_question(question)
    for op, operand in operations:
        value = OPERATORS[op](value, operand)
    return value


def step_labels(question: str, steps: list[str]) -> list[bool]:
    """Gold label of each step of any solution.

    A step is right when it applies the question's k-th operation to the value claimed just before
    it, and gets the result right. So a mistake is charged once, to the step that makes it.
    """
    value, operations = parse_question(question)
    labels = []
    for k, step in enumerate(steps):
        match = STEP.fullmatch(step.strip())
        if not match or k >= len(operations) or value is None:
            labels.append(False)
            claimed = re.search(rf"(?<!\d){NUMBER}$", step.strip())
            value = int(claimed[0]) if claimed else None
            continue
        a, op, b, claimed = int(match[1]), match[2], int(match[3]), int(match[4])
        labels.append((a, op, b) == (value, *operations[k]) and claimed == OPERATORS[op](a, b))
        value = claimed
    return labels


def faulty_steps(question: str, steps: list[str]) -> list[int] | None:
    """Numbers, from 1 on, of the steps that are faulty in themselves; None if the question is not
    an embedded one.

    Other than in `step_labels` a step may also go on from what the one before *should* have said:
    who slips in one step and goes on as if he had not has made one mistake.
    """
    parsed = parse_question(question)
    if not parsed:
        return None
    (value, operations), faulty = parsed, []
    values = {value}  # that the next step may go on from
    for k, step in enumerate(steps):
        match = STEP.fullmatch(step.strip())
        if not match or k >= len(operations):
            faulty.append(k + 1)
            claimed = re.search(rf"(?<!\d){NUMBER}$", step.strip())
            values = {int(claimed[0])} if claimed else set()
            continue
        a, op, b, claimed = int(match[1]), match[2], int(match[3]), int(match[4])
        right = OPERATORS[op](a, b)
        if (op, b) != operations[k] or a not in values or claimed != right:
            faulty.append(k + 1)
        values = {claimed, right}
    return faulty


def gold_steps(question: str, text: str) -> list[bool] | None:
    """`step_labels` of the <step> blocks of a text; None if the question is not an embedded one."""
    if not parse_question(question):
        return None
    return step_labels(question, re.findall(r"<step>(.*?)</step>", text, re.DOTALL))


# ------------------------------------------------------------------ programming tasks
READ_AS = {"add": "+", "minus": "-", "times": "*", "add minus": "-"}


def make_program_task(rng: random.Random, steps: int) -> str:
    """`Read x. Then add 4, times 7, minus 5. Print x mod 100.`: what the model is trained on."""
    return program_task(make_operations(rng, steps, OPERANDS | {"*": FACTORS}))


def program_task(operations: list[tuple[str, int]]) -> str:
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
    return _sample(random.Random(seed), count, held_out, make_testing_task, steps)


def parse_program_task(task: str) -> list[tuple[str, int]]:
    found = re.findall(r"(add minus|add|minus|times) (\d)", task)
    return [(READ_AS[words], int(operand)) for words, operand in found]


def program_output(task: str, x: int) -> int:
    value = x
    for op, operand in parse_program_task(task):
        value = OPERATORS[op](value, operand)
    return value % MODULO


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
    return _sample(random.Random(seed), count, held_out, make, steps)
