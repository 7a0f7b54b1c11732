"""The small model's task: chains of arithmetic modulo 61, with gold answers and gold step labels.

A question is a left-nested chain such as `((42/5)+9)*7 mod 61`. Its right solution is

    <step>42/5=45</step>        because 45*5 = 225 = 42 mod 61
    <step>45+9=54</step>
    <step>54*7=12</step>
    <answer>\\boxed{12}</answer>

A quotient is a fact that one knows or not; a product is known, and checks the quotient. So a
verifier can find out what a solver does not know, if it looks: docs/test-bed.md. Every step has an
exact label, and an answer is right by luck once in 61 times only.

`!` behind a step says that its writer is sure of it. It is no part of the arithmetic.

Nothing here is random by itself: every function that samples takes a `random.Random` or a seed.
"""

import hashlib
import random
import re

MODULO = 61  # a prime: every division has one result
OPERATORS = {
    "+": lambda a, b: (a + b) % MODULO,
    "-": lambda a, b: (a - b) % MODULO,
    "*": lambda a, b: (a * b) % MODULO,
    "/": lambda a, b: (a * pow(b, -1, MODULO)) % MODULO,
}
OPERANDS = {"+": range(1, 10), "-": range(1, 10), "*": range(2, 10), "/": range(2, 10)}
MIX = {"+": 0.15, "-": 0.15, "*": 0.20, "/": 0.50}  # shares of the operations
LEVELS = {"tiny": (3, 4), "tiny-hard": (5, 6), "tiny-long": (8, 9, 10)}  # operations of a question
NUMBER = r"(?:60|[1-5]\d|\d)"  # 0 to 60
CHAIN = re.compile(rf"(\(*)({NUMBER})((?:[+*/-]\d\)?)+) mod {MODULO}", re.ASCII)
STEP = re.compile(rf"({NUMBER})([+*/-])(\d)=({NUMBER})!?", re.ASCII)
CLAIMED = re.compile(rf"(?<!\d)({NUMBER})!?$", re.ASCII)


# ------------------------------------------------------------------ questions
def make_operations(rng: random.Random, count: int) -> list[tuple[str, int]]:
    signs = rng.choices([*MIX], [*MIX.values()], k=count)
    return [(op, rng.choice(OPERANDS[op])) for op in signs]


def nest(start: str, operations: list[tuple[str, int]]) -> str:
    """`42`, [('/', 5), ('*', 7)] -> `(42/5)*7`."""
    text = "(" * (len(operations) - 1) + start
    return text + ")".join(f"{op}{operand}" for op, operand in operations)


def make_question(rng: random.Random, steps: int) -> str:
    """A chain of `steps` operations."""
    return f"{nest(str(rng.randrange(MODULO)), make_operations(rng, steps))} mod {MODULO}"


def parse_question(question: str) -> tuple[int, list[tuple[str, int]]] | None:
    """`(42/5)*7 mod 61` -> (42, [('/', 5), ('*', 7)]); None for anything else."""
    match = CHAIN.fullmatch(question.strip())
    if not match:
        return None
    operations = [(op, int(b)) for op, b in re.findall(r"([+*/-])(\d)", match[3])]
    # left-nested: one "(" per operation but the last, closed right after it
    well_formed = f"{nest(match[2], operations)} mod {MODULO}" == question.strip()
    return (int(match[2]), operations) if well_formed and ("/", 0) not in operations else None


def is_held_out(question: str) -> bool:
    """True for a tenth of all questions, by hash; the model has never been trained on them."""
    return hashlib.blake2b(question.encode(), digest_size=1).digest()[0] % 10 == 0


def sample_questions(
    seed: int, count: int, held_out: bool, steps: tuple[int, ...] = LEVELS["tiny"]
) -> list[str]:
    """Of the training or the held-out part."""
    return sample_different(random.Random(seed), count, held_out, make_question, steps)


def sample_different(rng: random.Random, count: int, held_out: bool, make, steps) -> list[str]:
    """`count` different ones, or as many as there are, all lengths equally often. The first ones
    do not depend on `count`.

    There are few short ones, some three hundred programming tasks of two steps. A length of which
    10,000 draws give nothing new is left out from then on.
    """
    steps, seen, misses = list(steps), {}, 0
    while steps and len(seen) < count:
        i = len(seen) % len(steps)
        if not held_out:  # not in turn: a player that trains in every second step meets all lengths
            i = random.Random(len(seen)).randrange(len(steps))
        question = make(rng, steps[i])
        if is_held_out(question) == held_out and question not in seen:
            seen[question], misses = None, 0
        elif (misses := misses + 1) > 10_000:
            steps, misses = steps[:i] + steps[i + 1 :], 0
    return list(seen)


# ------------------------------------------------------------------ prompts
def misfit(prompt: str) -> str:
    """In what a prompt differs from those with the same ending that the small model was taught;
    "" if nothing is known to.
    """
    shown, _, end = prompt.strip().rpartition("\n")
    opened, closed = shown.count("<step>"), shown.count("</step>")
    number = re.fullmatch(r"Verify its (\d+) steps\.", end)
    if number and int(number[1]) not in (opened, closed):
        return f"{end!r} of {closed} steps"
    if end == "Is it sound?" and not 1 <= max(opened, closed) <= 3:
        return f"{end!r} of {closed} steps, instead of one to three in <step> tags"
    parts = re.split(r"^Solution(?: \d)?:$", shown, flags=re.MULTILINE)[1:]
    if not all("</step>" in part and "</answer>" in part for part in parts):
        return f"{end!r} of a solution that is not whole, steps and answer in their tags"
    return ""


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


def with_another_operation(rng: random.Random, steps: list[str]) -> list[str] | None:
    """Returns right steps, except that one of them applies another operation to its operands. Its
    result is true, and so are the results of the steps behind it, which go on from this result.
    None if a step is in another form, or divides by 0.

    >>> with_another_operation(random.Random(1), ["42/5=45!", "45+9=54"])
    ['42-5=37!', '37+9=46']
    """
    parts, changed, value = [STEP.fullmatch(step.strip()) for step in steps], [], None
    k = rng.randrange(len(steps))
    for i, part in enumerate(parts):
        if part is None:
            return None
        a, op, b = (int(part[1]) if value is None else value), part[2], int(part[3])
        op = rng.choice([other for other in OPERATORS if other != op]) if i == k else op
        if (op, b) == ("/", 0):
            return None
        value = OPERATORS[op](a, b)
        changed.append(f"{a}{op}{b}={value}{'!' if sounds_sure(part[0]) else ''}")
    return changed


def gold_answer(question: str) -> int:
    value, operations = parse_question(question)
    for op, operand in operations:
        value = OPERATORS[op](value, operand)
    return value


def step_labels(question: str, steps: list[str], slips: bool = False) -> list[bool]:
    """Gold label of each step of any solution.

    A step is right when it applies the question's k-th operation to the value claimed just before
    it, and gets the result right. So a mistake is charged once, to the step that makes it.

    slips: a step may also go on from what the one before *should* have said: who slips in one step
        and goes on as if he had not has made one mistake.
    """
    value, operations = parse_question(question)
    values, labels = {value}, []  # values: that the next step may go on from
    for k, step in enumerate(steps):
        match = STEP.fullmatch(step.strip())
        if not match or k >= len(operations):
            labels.append(False)
            claimed = CLAIMED.search(step.strip())
            values = {int(claimed[1])} if claimed else set()
            continue
        a, op, b, claimed = int(match[1]), match[2], int(match[3]), int(match[4])
        right = OPERATORS[op](a, b) if (op, b) != ("/", 0) else None
        labels.append((op, b) == operations[k] and a in values and claimed == right)
        values = {claimed, right} if slips else {claimed}
    return labels


def faulty_steps(question: str, steps: list[str]) -> list[int] | None:
    """Numbers, from 1 on, of the steps that are faulty in themselves, see `slips`; None if the
    question is not one of the small model.
    """
    if not parse_question(question):
        return None
    labels = step_labels(question, steps, slips=True)
    return [k for k, right in enumerate(labels, start=1) if not right]


def gold_steps(question: str, text: str) -> list[bool] | None:
    """`step_labels` of the <step> blocks of a text; None if the question is not one of the small
    model.
    """
    if not parse_question(question):
        return None
    return step_labels(question, re.findall(r"<step>(.*?)</step>", text, re.DOTALL))


def sounds_sure(step: str) -> bool:
    """Whether the writer of a step says so."""
    return step.strip().endswith("!")


def is_checked(judged_step: str) -> bool:
    """Whether whoever marked a step has written down a check, `42/5=28:28*5=18`, or, in whatever
    form, a second operation.
    """
    said = judged_step.partition("\\boxed")[0]
    return ":" in said or len(re.findall(r"[-+*/] ?[0-9]", said)) > 1
