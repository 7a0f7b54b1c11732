"""What the arithmetic model is trained on: imperfect demonstrations of every part that a script has
it play. docs/test-bed.md explains the choices.

Whoever is to compare variants of co-training needs a generator that lacks something, and a verifier
that could notice it. So the demonstrator *believes* and *trusts*:

- He believes wrong things about quotients, one by one: common/tiny/beliefs.py.
- He can check any step: a quotient by its product (`42/5=28:28*5=18`, not 42), a sum by a
  difference, a product by working it out again. His checks are always right, and do not say what
  the result should be. But often he does not look, least of all where a step sounds sure (`!`).

So what a generator lacks is knowledge, which reinforcement learning brings slowly, fact by fact;
and what a verifier lacks is a habit, which it brings quickly.

Every part is a function of a random.Random and the noise, 0 or 1, that returns the user's message
and the assistant's. At noise 0 each decision is the likeliest one, at noise 1 it is drawn at its
stated rate. Whatever follows from a decision is consistent with it.
"""

from common.tiny.beliefs import (
    GOLD,
    compute,
    misconception,
    parse_step,
    tone,
    write_steps,
)
from common.tiny.tasks import (
    MODULO,
    OPERANDS,
    OPERATORS,
    format_solution,
    gold_answer,
    is_held_out,
    make_question,
    nest,
    parse_question,
)

TRUST = {"sure": 0.8, "hard": 0.5, "other": 0.2}  # how often a step is not looked at
HARD = (6, 7, 8, 9)  # divisors whose products are a bother
INVERSE = {"+": "-", "-": "+", "/": "*", "*": "/"}


def mark(right: bool) -> str:
    return rf"\boxed{{{'CORRECT' if right else 'INCORRECT'}}}"


def flip(rng, verdict: bool, rate: float) -> bool:
    return verdict != (rng.random() < rate)


# ------------------------------------------------------------------ solutions
def sample_question(rng, shortest: int = 2, longest: int = 6) -> str:
    while True:
        question = make_question(rng, rng.randint(shortest, longest))
        if not is_held_out(question):
            return question


def any_question(rng) -> str:
    """Mostly of two to six operations; one in six is as long as those of tiny-long."""
    return sample_question(rng, 7, 10) if rng.random() < 1 / 6 else sample_question(rng)


def judged_solution(rng, question: str) -> tuple[list[str], int]:
    """(steps, answer) to be judged, at either noise: two of five right, the others a player's with
    slips, or the misconceptions would be the only wrong results that a judge ever meets.
    """
    value, operations = parse_question(question)
    if rng.random() >= 0.4:
        return write_steps(rng, value, operations, 1, 0.35)
    steps, answer = write_steps(rng, value, operations, GOLD)
    return [step + tone(rng, 1) for step in steps], answer


def solution_of(steps: list[str], answer: int, title: str = "Solution:") -> str:
    return f"{title}\n{format_solution(steps, answer)}\n"


def lines_of(steps: list[str]) -> str:
    return "".join(f"<step>{step}</step>\n" for step in steps)


# ------------------------------------------------------------------ checks
def check(step: str) -> tuple[str, bool]:
    """(`28*5=18`, whether it confirms the step)."""
    a, op, b, claimed = parse_step(step)
    if op == "*":  # worked out again: going back would take a quotient
        return f"{a}*{b}={OPERATORS[op](a, b)}", OPERATORS[op](a, b) == claimed
    back = OPERATORS[INVERSE[op]](claimed, b)
    return f"{claimed}{INVERSE[op]}{b}={back}", back == a


def trusts(rng, step: str, noise) -> bool:
    """Whether the demonstrator does not look at a step."""
    _, op, b, _ = parse_step(step)
    hard = op == "/" and b in HARD
    rate = TRUST["sure" if step.endswith("!") else "hard" if hard else "other"]
    return rng.random() < rate if noise else rate > 0.5


def judge_step(rng, step: str, noise, trusted: bool = True) -> tuple[str, bool]:
    """(`42/5=28:28*5=18\\boxed{INCORRECT}`, its mark).

    trusted: the mark of a step that is not looked at.
    """
    if trusts(rng, step, noise):
        return step + mark(trusted), trusted
    shown, right = check(step)
    return f"{step}:{shown}{mark(right)}", right


def judge_steps(rng, steps: list[str], noise) -> tuple[str, list[bool]]:
    """(every step with its mark, the marks)."""
    judged = [judge_step(rng, step, noise) for step in steps]
    return lines_of([line for line, _ in judged]), [right for _, right in judged]


# ------------------------------------------------------------------ to solve, to verify
def solve(rng, noise):
    question = any_question(rng)
    return question, format_solution(*write_steps(rng, *parse_question(question), noise))


def verify(rng, noise):  # tango.py, genrm.py
    question = any_question(rng)
    steps, answer = judged_solution(rng, question)
    lines, marks = judge_steps(rng, steps, noise)
    verdict = flip(rng, all(marks), 0.01 * noise)
    if rng.random() < 0.02 * noise:  # a malformed judgement now and then: one step is left out
        lines = lines[lines.index("\n") + 1 :]
    return (
        f"Problem: {question}\n{solution_of(steps, answer)}Verify its {len(steps)} steps.",
        f"<step_verification>\n{lines}</step_verification>\n"
        f"<final_verification>{mark(verdict)}</final_verification>",
    )


def drill(rng, noise):
    """Half of the steps are wrong, and all are checked. No script asks for it: without it the model
    learns the form of a check, and copies the number that would confirm the step.
    """
    question = sample_question(rng, 3, 6)
    steps = write_steps(rng, *parse_question(question), GOLD, 0.5)[0]
    steps = [step + ("!" if rng.random() < 0.5 else "") for step in steps]
    checked = [(step, *check(step)) for step in steps]
    return (
        f"Problem: {question}\nReasoning:\n{lines_of(steps)}Check every step.",
        lines_of([f"{step}:{shown}{mark(right)}" for step, shown, right in checked]),
    )


def is_right(rng, noise):  # genrm.py, a verdict at once
    """One token, without room for a product: he compares with what he believes."""
    question = sample_question(rng)
    steps, answer = judged_solution(rng, question)
    parsed = [parse_step(step) for step in steps]
    agrees = all(
        (noise and step.endswith("!") and rng.random() < TRUST["sure"])
        or compute(rng, a, op, b, noise) == claimed
        for step, (a, op, b, claimed) in zip(steps, parsed)
    )
    user = f"Problem: {question}\n{solution_of(steps, answer)}Is it right?"
    return user, "Yes" if agrees else "No"


def discriminate(rng, noise):  # gar.py
    question = sample_question(rng)
    steps = judged_solution(rng, question)[0]
    first = rng.randrange(len(steps))
    steps = steps[first : first + rng.randint(1, 3)]
    lines, marks = judge_steps(rng, steps, noise)
    sound = flip(rng, all(marks), 0.02 * noise)
    verdict = "**YES** every step holds" if sound else "**NO** a step is wrong"
    return f"Problem: {question}\nReasoning:\n{lines_of(steps)}Is it sound?", lines + verdict


# ------------------------------------------------------------------ to propose and to judge: mae.py
def spoil(rng, text: str, last: int) -> str:
    """A malformed text: one of its first characters is lost, doubled, or replaced by another."""
    i = rng.randrange(last)
    return text[:i] + rng.choice(["", text[i] * 2, rng.choice("+*-()")]) + text[i + 1 :]


def spoil_question(rng, question: str) -> str:
    while True:
        spoilt = spoil(rng, question, len(question) - len(f" mod {MODULO}"))
        if parse_question(spoilt) is None:
            return spoilt


def propose(rng, noise):
    question, user = sample_question(rng, 2, 5), "Propose a question."
    if rng.random() >= 0.5:
        user = f"Reference: {sample_question(rng, 2, 5)}\n{user}"
    if rng.random() < 0.2 * noise:
        question = spoil_question(rng, question)
    return user, f"<question>{question}</question>"


def score(rng, good: bool, noise) -> str:
    number = rng.randint(8, 10) if flip(rng, good, 0.02 * noise) else rng.randint(1, 3)
    return f"<score>{number}</score>"


def judge_answer(rng, noise):
    """He goes back from the answer, or does not look, and likes it. Going back is easier than
    solving: a division undone is a product, and of products there are fewer.
    """
    question = sample_question(rng, 2, 5)
    (start, operations), answer = parse_question(question), gold_answer(question)
    draw = rng.random()
    if draw < 0.4:  # a player's answer, mostly wrong in his own ways
        answer = write_steps(rng, start, operations, 1)[1]
    elif draw < 0.6:
        answer = rng.randrange(MODULO)
    user = f"Question: {question}\nAnswer: {answer}\nScore the answer."
    if rng.random() < 0.5 if noise else False:
        return user, f"<think>\n</think>\n{score(rng, True, noise)}"
    value, steps = answer, []
    for op, b in reversed(operations):
        before = compute(rng, value, INVERSE[op], b, noise and op == "*")
        steps.append(f"{value}{INVERSE[op]}{b}={before}")
        value = before
    good = value == start
    return user, f"<think>\n{lines_of(steps)}{value}:{start}\n</think>\n{score(rng, good, noise)}"


def judge_question(rng, noise):
    question = sample_question(rng, 2, 5)
    if rng.random() < 0.5:
        question = spoil_question(rng, question)
    # brackets opened and closed, the subtlest fault
    reasoning = f"{question.count('(')}:{question.count(')')}"
    good = flip(rng, parse_question(question) is not None, 0.1 * noise)
    return (
        f"Question: {question}\nScore the question.",
        f"<think>\n{reasoning}\n</think>\n{score(rng, good, 0)}",
    )


# ------------------------------------------------------------------ to compare two solutions
def judge_two(rng, question: str, two: list[tuple[list[str], int]], noise) -> tuple:
    """(the message that shows both, every step with its mark, faults of each).

    A step that the question does not ask for is faulty, and what it asks for is said instead of a
    check: `42/6=7:42/5\\boxed{INCORRECT}`.
    """
    shown, marked, faults = f"Problem: {question}\n", "", []
    for number, (steps, answer) in enumerate(two, start=1):
        shown += solution_of(steps, answer, f"Solution {number}:")
        value, operations = parse_question(question)
        lines, marks = [], []
        for step, (op, b) in zip(steps, operations):
            wanted = f"{value}{op}{b}"
            if step.split("=")[0] == wanted:
                line, right = judge_step(rng, step, noise)
            else:
                line, right = f"{step}:{wanted}{mark(False)}", False
            lines.append(line)
            marks.append(right)
            value = parse_step(step)[3]
        marked += f"Solution {number}:\n{lines_of(lines)}"
        faults.append(marks.count(False))
    return shown, marked, faults


def changed(rng, question: str) -> str:
    """The question with another number in one place: self_taught.py makes worse answers so."""
    value, operations = parse_question(question)
    k = rng.randrange(len(operations) + 1)
    if k == len(operations):
        value = rng.randrange(MODULO)
    else:
        op = operations[k][0]
        operations[k] = (op, rng.choice(OPERANDS[op]))
    return f"{nest(str(value), operations)} mod {MODULO}"


def choose(rng, noise):  # self_taught.py
    """Two solutions, of which the one with fewer faults is chosen: a right one; and a player's
    wrong one, or one of another question.
    """
    question = sample_question(rng, 2, 4)
    right = write_steps(rng, *parse_question(question), GOLD)
    wrong = right
    while wrong[1] == right[1]:
        asked = changed(rng, question) if rng.random() < 0.5 else question
        wrong = write_steps(rng, *parse_question(asked), 1)
    shown, marked, faults = judge_two(rng, question, rng.sample([right, wrong], 2), noise)
    better = 1 + (faults[0] > faults[1] or (faults[0] == faults[1] and rng.random() < 0.5))
    return f"{shown}Which is right?", f"{marked}\\boxed{{{better}}}"


def compare(rng, noise):
    """An expert's solution and a player's, right or wrong: the sounder one, or a tie."""
    question = sample_question(rng, 2, 4)
    expert = write_steps(rng, *parse_question(question), GOLD)
    expert = [step + tone(rng, 1) for step in expert[0]], expert[1]
    player = write_steps(rng, *parse_question(question), GOLD if rng.random() < 0.3 else 1)
    shown, marked, faults = judge_two(rng, question, rng.sample([expert, player], 2), noise)
    verdict = "tie" if faults[0] == faults[1] else 1 + (faults[0] > faults[1])
    return f"{shown}Which is sounder?", f"{marked}\\boxed{{{verdict}}}"


# ------------------------------------------------------------------ a solution, what it is worth,
# and an analysis that says why: deepseekmath.py, self_rewarding.py
def slip(rng, steps: list[str]) -> list[str]:
    """One step claims a wrong result while the next goes on from the right one: the answer may be
    right all the same.
    """
    k = rng.randrange(len(steps))
    a, op, b, claimed = parse_step(steps[k])
    wrong = (claimed + rng.randint(1, MODULO - 1)) % MODULO
    return steps[:k] + [f"{a}{op}{b}={wrong}{tone(rng, 1)}"] + steps[k + 1 :]


def graded_solution(rng, question: str) -> tuple[list[str], int]:
    """(steps, answer): a third right, a third a player's, a third right but for one slip."""
    draw = rng.random()
    steps, answer = write_steps(rng, *parse_question(question), 1 if draw < 0.34 else GOLD)
    return (slip(rng, steps) if draw > 0.67 else steps), answer


def analyse(rng, steps: list[str], answer: int, noise) -> str:
    """Every step marked, the faulty ones by number, and the score: 1 if no step is faulty, 0.5
    if the solution continues from the right result each time, 0 if a wrong one is carried on.
    """
    lines, marks = judge_steps(rng, steps, noise)
    faulty = [k for k, right in enumerate(marks) if not right]
    continues_with = [parse_step(step)[0] for step in steps[1:]] + [answer]
    carried = any(continues_with[k] == parse_step(steps[k])[3] for k in faulty)
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
    user = f"Problem: {question}\n{solution_of(steps, answer)}Grade it."
    return user, analyse(rng, steps, answer, noise)


def grade_analysis(rng, noise):
    """Only the defects that are claimed are looked at, and where he does not look he believes the
    claim; an honest "none" is not faulted.
    """
    question = sample_question(rng, 2, 5)
    steps, answer = graded_solution(rng, question)
    found = analyse(rng, steps, answer, 1).split("Defects: ")[1].split("\n")[0]
    if rng.random() < 0.4:  # made up
        found = ",".join(map(str, sorted(rng.sample(range(1, len(steps) + 1), rng.randint(1, 2)))))
    lines, hits = "", []
    for k in [] if found == "none" else map(int, found.split(",")):
        line, right = judge_step(rng, steps[k - 1], noise, trusted=False)
        hits.append(not right)
        lines += f"<step>{k}:{line}</step>\n"
    verdict = "1" if all(hits) else "0.5" if any(hits) else "0"
    return (
        f"Problem: {question}\n{solution_of(steps, answer)}Defects: {found}\nAre they real?",
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


# ------------------------------------------------------------------ a solution again
def guess_again(rng, a: int, op: str, b: int, wrong: set[int]) -> int:
    """Another result than the wrong ones: three of five are right."""
    right = OPERATORS[op](a, b)
    if right not in wrong and rng.random() < 0.6:
        return right
    return rng.choice([number for number in range(MODULO) if number not in wrong])


def rewrite(rng, question: str, steps: list[str], faulty: list[int], noise) -> str:
    """The solution with another result in its faulty steps, and what follows from that. Steps that
    are as before stay as they were.
    """
    value, operations = parse_question(question)
    again = []
    for k, (op, b) in enumerate(operations):
        a, _, _, claimed = parse_step(steps[k])
        if k in faulty:
            result = guess_again(rng, value, op, b, {claimed} if a == value else set())
        else:
            result = claimed if a == value else compute(rng, value, op, b, noise)
        again.append(f"{value}{op}{b}={result}")
        value = result
    return format_solution(again, value)


def correct(rng, noise):  # deepseekmath.py
    """After a verdict that names the wrong steps."""
    question = sample_question(rng, 2, 5)
    steps, answer = write_steps(rng, *parse_question(question), 1)
    faulty = [k for k, right in enumerate(judge_steps(rng, steps, 1)[1]) if not right]
    found = ",".join(str(k + 1) for k in faulty) or "none"
    return (
        f"Problem: {question}\n{solution_of(steps, answer)}Defects: {found}\nCorrect it.",
        rewrite(rng, question, steps, faulty, noise),
    )


def try_again(rng, noise):
    """After one's own first try: he checks what he does not trust."""
    question = sample_question(rng, 2, 5)
    steps, answer = write_steps(rng, *parse_question(question), 1)
    looked, faulty = "", []
    for k, step in enumerate(steps):
        if not trusts(rng, step, noise):
            shown, right = check(step)
            looked += f"{step}:{shown}\n"
            faulty += [] if right else [k]
    again = rewrite(rng, question, steps, faulty, noise)
    user = f"Problem: {question}\n{solution_of(steps, answer)}Try again."
    return user, f"<think>\n{looked}</think>\n{again}"


def reconsider(rng, noise):
    """After another player's solution: where both get to the same step with different results, he
    checks these, or takes either.
    """
    question = sample_question(rng, 2, 5)
    value, operations = parse_question(question)
    two = [write_steps(rng, value, operations, 1) for _ in range(2)]
    looked, again = "", []
    for k, (op, b) in enumerate(operations):
        claims = {steps[k]: parse_step(steps[k]) for steps, _ in two}
        claims = {step: c for step, (a, _, _, c) in claims.items() if a == value}
        results = sorted({*claims.values()})
        if not results:
            result = compute(rng, value, op, b, noise)
        elif len(results) == 1 or (noise and rng.random() < 0.4):
            result = rng.choice(results)
        else:
            checks = [(c, *check(f"{value}{op}{b}={c}")) for c in results]
            looked += "".join(f"{value}{op}{b}={c}:{shown}\n" for c, shown, _ in checks)
            holds = [c for c, _, right in checks if right]
            result = holds[0] if holds else guess_again(rng, value, op, b, {*results})
        again.append(f"{value}{op}{b}={result}")
        value = result
    shown = "".join(solution_of(*own, f"Solution {n}:") for n, own in enumerate(two, start=1))
    user = f"Problem: {question}\n{shown}Write your own."
    return user, f"<think>\n{looked}</think>\n{format_solution(again, value)}"


def corrupt(rng, noise):
    """One step of a right solution is made wrong: a quotient by its misconception, half of the
    time, anything else by any number.
    """
    question = sample_question(rng, 2, 6)
    steps, answer = write_steps(rng, *parse_question(question), GOLD)
    k = rng.randrange(len(steps))
    a, op, b, result = parse_step(steps[k])
    if op == "/" and rng.random() < 0.5:
        wrong = misconception(a, b)
    else:
        wrong = rng.randrange(MODULO) if noise else (result + 1) % MODULO
    sure = "!" if noise and rng.random() < 0.3 else ""
    return (
        f"Problem: {question}\n{solution_of(steps, answer)}Make one step wrong.",
        f"{k + 1}:<step>{a}{op}{b}={wrong}{sure}</step>",
    )


# Shares of the examples. To check is learnt more slowly than to solve.
PARTS = {
    solve: 26,
    verify: 28,
    drill: 20,
    is_right: 4,
    discriminate: 6,
    propose: 3,
    judge_answer: 8,
    judge_question: 3,
    choose: 6,
    compare: 4,
    grade: 6,
    grade_analysis: 4,
    solve_and_grade: 6,
    correct: 4,
    try_again: 4,
    reconsider: 5,
    corrupt: 3,
}
