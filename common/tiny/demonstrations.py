"""What the embedded models are trained on: imperfect demonstrations of every part that a script has
them play. docs/test-bed.md explains the choices.

Whoever is to compare variants of co-training needs a player with something to learn, and a verifier
that is better than the player but wrong where he is. So the demonstrator holds *beliefs*. Each fact
such as `42*7=94` is of one of four kinds, which says how often he gets it wrong when he works it
out, quickly or with care, and when he only marks a result that he is shown. Nine of ten wrong
results of a fact are the same one, his misconception. Facts are believed wrongly one by one, and
decoding greedily repairs none of those of which the misconception is the likeliest result.

Care removes doubts and no misconception, and whoever marks a step does not write down what it
should be, but a check digit of that: nowhere does the demonstrator work out what the solver
believes wrongly. Otherwise a solver would have to learn no more than to play the checker, one small
step for all facts together. And without the digit marks are hardly learnt.

Every part is a function of a random.Random and the noise, 0 or 1: at noise 0 each decision is the
likeliest one, at noise 1 it is drawn at its stated rate. Whatever follows from it is consistent.
"""

import random

from common.tiny.tasks import (
    FACTORS,
    MODULO,
    OPERANDS,
    OPERATORS,
    format_function,
    format_program,
    format_solution,
    gold_answer,
    is_held_out,
    make_operations,
    make_program_task,
    make_question,
    message,
    parse_program_task,
    parse_question,
)

KINDS = {  # share of the facts; how often they go wrong when worked out, with care, when marked
    "known": (0.40, 0.05, 0.01, 0.01),
    "half known": (0.20, 0.25, 0.05, 0.02),
    "seen through": (0.28, 0.60, 0.60, 0.04),
    "misconceived": (0.12, 0.60, 0.60, 0.65),
}
SOLVING, WITH_CARE, MARKING = 1, 2, 3  # columns
GOLD = 0  # and no mistakes at all


def kinds_of(things: list, seed: int) -> dict:
    """The kind of each thing, in exactly the shares of KINDS; the same for all time."""
    shuffled = random.Random(seed).sample(things, len(things))
    kinds, start = {}, 0.0
    for kind, (share, *_) in KINDS.items():
        first, last = round(start * len(things)), round((start + share) * len(things))
        kinds |= {thing: kind for thing in shuffled[first:last]}
        start += share
    return kinds


EVERY = [(a, op, b) for op in "+-*" for a in range(MODULO) for b in range(1, 10)]
FACTS = kinds_of([f for f in EVERY if f[2] in OPERANDS[f[1]]], 0)
FACTS |= kinds_of([f for f in EVERY if f not in FACTS], 1)  # products of programs only
INVERSES = kinds_of([f for f in EVERY if f[2] in OPERANDS[f[1]]], 2)  # (result, op, b) -> value
READINGS = kinds_of([(op, b) for op in "+-" for b in range(1, 10)], 3)  # of the words of a task
READINGS |= kinds_of([("*", b) for b in FACTORS], 4)


def decide(rng, kind: str, right, misconception, others: list, noise: int, how=SOLVING):
    """One decision about a thing of that kind: what is right, the misconception, or any other."""
    if how == GOLD:
        return right
    rate = KINDS[kind][how]
    if noise == 0:  # the likeliest
        return misconception if rate > 0.5 else right
    if rng.random() >= rate:
        return right
    return misconception if rng.random() < 0.9 else rng.choice(others)


def compute(rng, a: int, op: str, b: int, noise: int, how=SOLVING) -> int:
    """a op b."""
    right = OPERATORS[op](a, b)
    misconception = (right + 1 + (3 * a + 7 * b + ord(op)) % (MODULO - 2)) % MODULO  # never right
    if check_digit(misconception) == check_digit(right):  # nor one that no check can find
        misconception = (misconception + 1) % MODULO
    kind = FACTS.get((a, op, b), "known")
    return decide(rng, kind, right, misconception, range(MODULO), noise, how)


def flip(rng, verdict: bool, rate: float) -> bool:
    return verdict != (rng.random() < rate)


# ------------------------------------------------------------------ solutions and their checks
def write_steps(
    rng, value: int, operations, noise: int, how=SOLVING, slips: float = 0.0
) -> tuple[list[str], int]:
    """(the steps of a solution, which carries its mistakes on, and the answer it ends with).

    slips: how often a result is any number.
    """
    steps = []
    for op, operand in operations:
        result = compute(rng, value, op, operand, noise, how)
        if slips and rng.random() < slips:
            result = rng.randrange(MODULO)
        steps.append(f"{value}{op}{operand}={result}")
        value = result
    return steps, value


def lines_of(steps: list[str]) -> str:
    return "".join(f"<step>{step}</step>\n" for step in steps)


def parse_step(step: str) -> tuple[int, str, int, int]:
    """`42*7=94` -> (42, '*', 7, 94)."""
    left, claimed = step.split("=")
    op = next(op for op in OPERATORS if op in left)
    a, b = left.split(op)
    return int(a), op, int(b), int(claimed)


def mark(right: bool) -> str:
    return f"\\boxed{{{'CORRECT' if right else 'INCORRECT'}}}"


def check_digit(number: int) -> int:
    """Both digits added, modulo ten: of 94 it is 3."""
    return (number // 10 + number) % 10


def check_step(rng, step: str, noise: int) -> tuple[str, bool]:
    """(`42*7=94:3\\boxed{CORRECT}`, its mark): whoever marks a step compares its result with the
    check digit that he remembers. One mark in a hundred disagrees with its own digit.
    """
    a, op, b, claimed = parse_step(step)
    digit = check_digit(compute(rng, a, op, b, noise, MARKING))
    right = flip(rng, check_digit(claimed) == digit, 0.01 * noise)
    return f"{step}:{digit}{mark(right)}", right


def check_steps(rng, steps: list[str], noise: int) -> tuple[str, list[bool]]:
    """(every step with its check digit and mark, the marks)."""
    checked = [check_step(rng, step, noise) for step in steps]
    return lines_of([line for line, _ in checked]), [right for _, right in checked]


def sample_question(rng, shortest: int = 2, longest: int = 8) -> str:
    while True:
        question = make_question(rng, rng.randint(shortest, longest))
        if not is_held_out(question):
            return question


def judged_solution(rng, question: str) -> tuple[list[str], int]:
    """(steps, answer) to be judged, at either noise: two of five right, the others a player's with
    slips, or the misconceptions would be the only wrong results that it ever meets.
    """
    how, slips = (GOLD, 0.0) if rng.random() < 0.4 else (SOLVING, 0.15)
    return write_steps(rng, *parse_question(question), 1, how, slips)


# ------------------------------------------------------------------ the parts of the arithmetic
# model: (user message, assistant message)
def solve(rng, noise):
    question = sample_question(rng)
    return question, format_solution(*write_steps(rng, *parse_question(question), noise))


def verify(rng, noise):  # tango.py
    question = sample_question(rng)
    steps, answer = judged_solution(rng, question)
    lines, marks = check_steps(rng, steps, noise)
    verdict = flip(rng, all(marks), 0.03 * noise)
    if rng.random() < 0.02 * noise:  # a malformed judgement now and then: one step is left out
        lines = lines[lines.index("\n") + 1 :]
    return (
        f"Problem: {question}\nSolution:\n{format_solution(steps, answer)}\n"
        f"Verify its {len(steps)} steps.",
        f"<step_verification>\n{lines}</step_verification>\n"
        f"<final_verification>{mark(verdict)}</final_verification>",
    )


def discriminate(rng, noise):  # gar.py
    question = sample_question(rng)
    steps = judged_solution(rng, question)[0]
    first = rng.randrange(len(steps))
    steps = steps[first : first + rng.randint(1, 3)]
    lines, marks = check_steps(rng, steps, noise)
    sound = flip(rng, all(marks), 0.05 * noise)
    verdict = "**YES** every step holds" if sound else "**NO** a step is wrong"
    return f"Problem: {question}\nReasoning:\n{lines_of(steps)}Is it sound?", lines + verdict


def spoil(rng, text: str, last: int) -> str:
    """A malformed text: one of its first characters is lost, doubled, or replaced by another."""
    i = rng.randrange(last)
    return text[:i] + rng.choice(["", text[i] * 2, rng.choice("+*-()")]) + text[i + 1 :]


def spoil_question(rng, question: str) -> str:
    while True:
        spoilt = spoil(rng, question, len(question) - len(f" mod {MODULO}"))
        if parse_question(spoilt) is None:
            return spoilt


def propose(rng, noise):  # mae.py, proposer
    question, user = sample_question(rng, 2, 5), "Propose a question."
    if rng.random() >= 0.5:
        user = f"Reference: {sample_question(rng, 2, 5)}\n{user}"
    if rng.random() < 0.2 * noise:
        question = spoil_question(rng, question)
    return user, f"<question>{question}</question>"


def score(rng, good: bool, noise) -> str:
    number = rng.randint(8, 10) if flip(rng, good, 0.1 * noise) else rng.randint(1, 3)
    return f"<score>{number}</score>"


def judge_answer(rng, noise):  # mae.py, judge
    question = sample_question(rng, 2, 5)
    steps, own = write_steps(rng, *parse_question(question), noise, WITH_CARE)
    draw, answer = rng.random(), gold_answer(question)
    if draw < 0.4:  # a player's answer, mostly wrong in his own ways
        answer = write_steps(rng, *parse_question(question), 1)[1]
    elif draw < 0.5:
        answer = rng.randrange(MODULO)
    return (
        f"Question: {question}\nAnswer: {answer}\nScore the answer.",
        f"<think>\n{lines_of(steps)}{own}:{answer}\n</think>\n" + score(rng, own == answer, noise),
    )


def judge_question(rng, noise):  # mae.py, judge
    question = sample_question(rng, 2, 5)
    if rng.random() < 0.5:
        question = spoil_question(rng, question)
    # brackets opened and closed, the subtlest fault
    reasoning = f"{question.count('(')}:{question.count(')')}"
    good = parse_question(question) is not None
    return (
        f"Question: {question}\nScore the question.",
        f"<think>\n{reasoning}\n</think>\n{score(rng, good, noise)}",
    )


def choose(rng, noise):
    """Two solutions to one question, one of them right; the one with fewer faults is chosen."""
    question = sample_question(rng, 2, 4)
    right = write_steps(rng, *parse_question(question), 0, GOLD)
    wrong = right
    while wrong[1] == right[1]:  # a player's wrong one
        wrong = write_steps(rng, *parse_question(question), 1)
    shown, marked, faults = f"Problem: {question}\n", "", []
    for k, (steps, answer) in enumerate(rng.sample([right, wrong], 2), start=1):
        shown += f"Solution {k}:\n{format_solution(steps, answer)}\n"
        lines, marks = check_steps(rng, steps, noise)
        marked += f"Solution {k}:\n{lines}"
        faults.append(marks.count(False) + 0.5 * rng.random())  # a coin where they are equal
    return f"{shown}Which is right?", f"{marked}\\boxed{{{1 + faults.index(min(faults))}}}"


# ------------------------------------------------------------------ a solution, what it is worth,
# and an analysis that says why: deepseekmath.py
def slip(rng, steps: list[str]) -> list[str]:
    """One step claims a wrong result while the next goes on from the right one: the answer may be
    right all the same.
    """
    k = rng.randrange(len(steps))
    a, op, b, claimed = parse_step(steps[k])
    wrong = (claimed + rng.randint(1, MODULO - 1)) % MODULO
    return steps[:k] + [f"{a}{op}{b}={wrong}"] + steps[k + 1 :]


def graded_solution(rng, question: str) -> tuple[list[str], int]:
    """(steps, answer): a third right, a third a player's, a third right but for one slip."""
    draw = rng.random()
    how = SOLVING if draw < 0.34 else GOLD
    steps, answer = write_steps(rng, *parse_question(question), 1, how)
    return (slip(rng, steps) if draw > 0.67 else steps), answer


def analyse(rng, steps: list[str], answer: int, noise) -> str:
    """Every step marked, the faulty ones by number, and the score: 1 if no step is faulty, 0.5
    if the solution goes on from the right result each time, 0 if a wrong one is carried on.
    """
    lines, marks = check_steps(rng, steps, noise)
    faulty = [k for k, right in enumerate(marks) if not right]
    goes_on_with = [parse_step(step)[0] for step in steps[1:]] + [answer]
    carried = any(goes_on_with[k] == parse_step(steps[k])[3] for k in faulty)
    if rng.random() < 0.1 * noise:  # a defect that is made up
        faulty = sorted({*faulty, rng.randrange(len(steps))})
    found = ",".join(str(k + 1) for k in faulty) or "none"
    grade = "0" if carried else "0.5" if faulty else "1"
    if rng.random() < 0.05 * noise:
        grade = rng.choice(["0", "0.5", "1"])
    return f"{lines}Defects: {found}\nScore: \\boxed{{{grade}}}"


def grade(rng, noise):
    question = sample_question(rng, 2, 5)
    steps, answer = graded_solution(rng, question)
    user = f"Problem: {question}\nSolution:\n{format_solution(steps, answer)}\nGrade it."
    return user, analyse(rng, steps, answer, noise)


def grade_analysis(rng, noise):
    """Only the defects that are claimed are looked at; an honest "none" is not faulted."""
    question = sample_question(rng, 2, 5)
    steps, answer = graded_solution(rng, question)
    claims = analyse(rng, steps, answer, 1).split("Defects: ")[1]
    found = claims.split("\n")[0]
    if rng.random() < 0.4:  # made up
        found = ",".join(map(str, sorted(rng.sample(range(1, len(steps) + 1), rng.randint(1, 2)))))
    lines, hits = "", []
    for k in [] if found == "none" else map(int, found.split(",")):
        line, right = check_step(rng, steps[k - 1], noise)
        hits.append(not right)
        lines += f"<step>{k}:{line}</step>\n"
    verdict = "1" if all(hits) else "0.5" if any(hits) else "0"
    return (
        f"Problem: {question}\nSolution:\n{format_solution(steps, answer)}\n"
        f"Defects: {found}\nAre they real?",
        f"{lines}Score: \\boxed{{{verdict}}}",
    )


def solve_and_grade(rng, noise):
    question = sample_question(rng, 2, 5)
    steps, answer = write_steps(rng, *parse_question(question), noise)
    if rng.random() < 0.15 * noise:
        steps = slip(rng, steps)
    own = analyse(rng, steps, answer, noise)
    if rng.random() < 0.3 * noise:  # kinder to oneself than to others
        own = own[: own.index("Defects")] + "Defects: none\nScore: \\boxed{1}"
    user = f"{question}\nSolve and grade yourself."
    return user, f"{format_solution(steps, answer)}\n## Self Evaluation\n{own}"


def correct(rng, noise):
    """A solution again, after a verdict that names its wrong steps: any other result for these, the
    rest as it was.
    """
    question = sample_question(rng, 2, 5)
    value, operations = parse_question(question)
    steps, answer = write_steps(rng, value, operations, 1)
    faulty = [k for k, right in enumerate(check_steps(rng, steps, 1)[1]) if not right]
    again = []
    for k, (op, operand) in enumerate(operations):
        a, _, _, claimed = parse_step(steps[k])
        result = claimed
        if k in faulty or a != value:
            result = compute(rng, value, op, operand, noise, WITH_CARE)
            if k in faulty and (a, result) == (value, claimed):
                sure = rng.random() < 0.6  # of his second guess
                result = OPERATORS[op](value, operand) if sure else rng.randrange(MODULO)
        again.append(f"{value}{op}{operand}={result}")
        value = result
    found = ",".join(str(k + 1) for k in faulty) or "none"
    return (
        f"Problem: {question}\nSolution:\n{format_solution(steps, answer)}\n"
        f"Defects: {found}\nCorrect it.",
        format_solution(again, value),
    )


# ------------------------------------------------------------------ the parts of the programs model
def read(rng, op: str, operand: int, noise, how=SOLVING) -> tuple[str, int]:
    """The operation that the words mean; misread, it is another one with the same operand."""
    others = [(other, operand) for other in OPERATORS if other != op]
    kind, misread = READINGS[op, operand], others[operand % 2]
    return decide(rng, kind, (op, operand), misread, others, noise, how)


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
    steps, output = write_steps(rng, x, read_so, noise, MARKING)
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


def run(value: int, operations) -> int:
    for op, operand in operations:
        value = OPERATORS[op](value, operand)
    return value


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
        kind = INVERSES[value, op, b]
        before = decide(rng, kind, right, misconception, range(MODULO), noise)
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
        shown += (
            f"{format_function(sample_function(rng))}\n```input\n{rng.randrange(MODULO)}\n```\n"
        )
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


# Shares of the examples. Judging is learnt far more slowly than solving.
PARTS = {
    "arithmetic": {
        solve: 23,
        verify: 30,
        discriminate: 8,
        propose: 3,
        judge_answer: 8,
        judge_question: 5,
        choose: 5,
        grade: 6,
        grade_analysis: 4,
        solve_and_grade: 5,
        correct: 3,
    },
    "programs": {
        write_program: 8,
        write_test: 20,
        deduce: 20,
        abduce: 20,
        induce: 24,
        propose_program: 5,
        propose_inputs: 5,
    },
}
