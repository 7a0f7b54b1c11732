"""What a warm-up teaches (common/run/warm_up.py): solutions in the form that prompts ask for,
judgements of these solutions, and arithmetic; and figures of what a model has learned. All are made
from references whose steps hold plain equations, such as 3 * 2 = 6.
"""

import random
import re
from collections.abc import Callable

from common.core.errors import UserError
from common.core.lists import chunk, mean
from common.tasks.answers import boxed, is_correct, split_steps
from common.tasks.references import OPERATIONS, as_number
from common.tasks.verdicts import final_verdict, mark, read_verdict, verdict_metrics, verify_prompt

NUMBER = r"-?\d+(?:\.\d+)?"
EQUATION = re.compile(rf"(?<![\d.*/+-])({NUMBER}) ?([-+*/])( ?)({NUMBER}) ?= ?({NUMBER})(?!\.?\d)")
NAMES = "zero one two three four five six seven eight nine ten eleven twelve".split()
NAMES = dict(zip(NAMES, range(13))) | {"half": 2, "twice": 2, "double": 2, "dozen": 12}
JUDGEMENT = re.compile(
    r"\s*<step_verification>(.*)</step_verification>"
    r"\s*<final_verification>[^<]*</final_verification>\s*",
    re.DOTALL,
)
STEPS = ("{}", "{}.", "So {}.", "We have {}.", "That makes {}.", "Now {}.")
COMMENTS = {  # what was changed -> what is said of the step
    "nothing": ("The problem asks for {asked}, and {check}.", "It is {asked}: {check}."),
    "result": ("The problem asks for {asked}, but {check}.", "It is {asked}: {check}."),
    "operation": ("The problem asks for {asked}, not {sum}.", "It is {asked}, not {sum}."),
}
INVERSE = {"+": "-", "-": "+", "/": "*"}  # a product is worked out again
COMPLETE = "Nothing is missing."
DRILL = "Work out:"


def reworded(reference: str, rng: random.Random) -> str:
    """Returns a reference in other words, so that there is more than one way to begin. A step that
    is an equation and nothing else gets one of several wordings. The operands of half of the sums
    and products change places.
    """

    def step(found: re.Match) -> str:
        equation = EQUATION.fullmatch(found[1])
        if not equation:
            return found[0]
        a, sign, gap, b, result = equation.groups()
        if sign in "+*" and rng.random() < 0.5:
            a, b = b, a
        return f"<step>{rng.choice(STEPS).format(gap.join((a, sign, b, '=', result)))}</step>"

    return re.sub(r"<step>(.*?)</step>", step, reference, flags=re.DOTALL)


def judged(question: str, reference: str, rng: random.Random) -> tuple[str, str] | None:
    r"""Returns (a solution, the judgement of it, in the form that `VERIFY` asks for). Of the
    solutions with two steps or more, a third lacks the first or the last step, and in another third
    the result or the operation of a step is changed. Of the solutions with a single step, half are
    changed. The result is None unless every step is a plain equation that holds, the last equation
    gives the answer, and every result can be told from the problem's numbers.

    Steps after a changed step take over its result, and they are right if they are computed right:
    a step's verdict is about this step, and the final verdict is about the answer. If a step is
    missing, the next step takes a number of the problem for its result. Then all verdicts on steps
    are CORRECT, and the final verdict is INCORRECT: it is not their AND.
    """
    equations, gold = plain_equations(reference), boxed(reference) or ""
    if not equations or not re.fullmatch(NUMBER, gold) or float(equations[-1][-1]) != float(gold):
        return None
    if not results_stand_out(question, equations):
        return None
    several = len(equations) > 1
    kind = rng.choice(("right", "changed", "short") if several else ("right", "changed"))
    broken = rng.randrange(len(equations)) if kind == "changed" else -1
    missing = rng.choice((0, len(equations) - 1)) if kind == "short" else -1
    solution, comments, instead = [], [], {}  # instead: a result -> what stands in its place
    lacks = COMPLETE
    for place, (step, (a, sign, gap, b, given)) in enumerate(
        zip(split_steps(reference), equations)
    ):
        a, b = instead.get(float(a), a), instead.get(float(b), b)
        if place == missing:
            lacks = f"{a} {sign} {b} is missing."
            instead[float(given)] = rng.choice((a, b))
            continue
        change = rng.choice(("result", "operation")) if place == broken else "nothing"
        used = rng.choice([s for s in OPERATIONS if s != sign]) if change == "operation" else sign
        off = rng.choice((-10, -2, -1, 1, 2, 10)) if change == "result" else 0
        try:
            said = as_number(OPERATIONS[used](float(a), float(b)) + off)
            if change == "operation" and float(said) == float(given):  # 2 + 2 for 2 * 2
                return None
            comments.append(comment((a, sign, b), (a, used, b), said, rng))
        except (ValueError, ArithmeticError):  # divided by zero, or a third
            return None
        if float(said) != float(given):
            instead[float(given)] = said
        solution.append(f"<step>{EQUATION.sub(gap.join((a, used, b, '=', said)), step)}</step>")
    right = float(said) == float(gold)
    if right and kind == "short":  # what is missing adds 0
        return None
    solution.append(rf"<answer>\boxed{{{said}}}</answer>")
    return "\n".join(solution), judgement(comments, right, lacks)


def judged_own(reference: str, text: str, rng: random.Random) -> tuple[str, str] | None:
    """Returns (a model's solution in a single step, the judgement of it). The solution is wrong if
    it computes something else than the reference, or slips. The result is None unless both have a
    single plain equation, or if the model reaches the answer by another way.
    """
    equations, steps = plain_equations(reference), split_steps(text)
    found = EQUATION.findall(steps[0]) if len(steps) == 1 else []
    if len(equations) != 1 or len(found) != 1 or boxed(text) != found[0][-1]:
        return None
    if re.search(r"\d", EQUATION.sub("", steps[0])):  # 8 + 3 + 1 = 12
        return None
    (a, sign, _, b, gold), (x, used, _, y, said) = equations[0], found[0]
    if used in "+*" and (x, y) == (b, a):
        a, b = b, a
    if (x, used, y) != (a, sign, b) and float(said) == float(gold):
        return None
    try:
        words = comment((a, sign, b), (x, used, y), said, rng)
    except (ValueError, ArithmeticError):
        return None
    return text, judgement([words], float(said) == float(gold), COMPLETE)


def comment(asked: tuple, used: tuple, said: str, rng: random.Random) -> tuple[str, bool]:
    """Returns (what a judgement says of a step, whether the step is right). If the step computes
    what is `asked`, (a, sign, b), it is checked by the inverse operation, which must lead from what
    was `said` back to a.

    Raises:
        ValueError, ArithmeticError: a result has no end, as a third has none, or something is
            divided by zero.
    """
    a, sign, b = used
    if used != asked:
        words = {"asked": " ".join(asked), "sum": " ".join(used)}
        return rng.choice(COMMENTS["operation"]).format(**words), False
    start, inverse, end = (said, INVERSE[sign], a) if sign in INVERSE else (a, sign, said)
    back = as_number(OPERATIONS[inverse](float(start), float(b)))
    right = float(back) == float(end)
    check = f"{start} {inverse} {b} = {back}" + ("" if right else f", not {end}")
    template = rng.choice(COMMENTS["nothing" if right else "result"])
    return template.format(asked=" ".join(asked), check=check), right


def judgement(comments: list[tuple[str, bool]], right: bool, lacks: str) -> str:
    """Returns a judgement of steps and of the answer, in the form that `VERIFY` asks for. What the
    solution `lacks` is said after the last comment, because the final verdict has room for a box
    alone.
    """
    (last, holds), before = comments[-1], comments[:-1]
    said = [*before, (f"{last} {lacks}", holds)]
    steps = [f"<step>{words} {mark(holds)}</step>" for words, holds in said]
    end = f"<final_verification>{mark(right)}</final_verification>"
    return "\n".join(["<step_verification>", *steps, "</step_verification>", end])


def drill(numbers: list[int], rng: random.Random) -> tuple[list[dict], str]:
    """Returns (a prompt, the equations that answer it). The prompt has eight sums, differences,
    products or quotients of two of these numbers.
    """
    asked, answered = [], []
    for _ in range(8):
        (a, b), sign = rng.choices(numbers, k=2), rng.choice("+-*/")
        if sign in "-/":  # so that the result is a
            a = a + b if sign == "-" else a * b
        asked.append(f"{a} {sign} {b}")
        answered.append(f"{asked[-1]} = {as_number(OPERATIONS[sign](float(a), float(b)))}")
    return [{"role": "user", "content": f"{DRILL} {'; '.join(asked)}"}], "\n".join(answered)


def plain_equations(reference: str) -> list[tuple[str, ...]]:
    """Returns (a, sign, gap, b, result) of each step; [] unless each step has a single equation,
    and it holds.
    """
    found = [EQUATION.findall(step) for step in split_steps(reference)]
    if any(len(of_step) != 1 for of_step in found):
        return []
    equations = [equation for (equation,) in found]
    try:
        hold = [float(r) == OPERATIONS[sign](float(a), float(b)) for a, sign, _, b, r in equations]
    except ArithmeticError:
        return []
    return equations if all(hold) else []


def results_stand_out(question: str, equations: list[tuple[str, ...]]) -> bool:
    """Whether an operand that equals the result of a step must be that result. This is so if all
    results differ from one another and from the problem's numbers, and no result is both operands
    of a step.
    """
    question = re.sub(r"(?<=\d),(?=\d{3})", "", question)
    words = re.findall(r"[a-z]+|\d+(?:\.\d+)?", question)
    numbers = {float(NAMES.get(word, word)) for word in words if word in NAMES or word[0] < "a"}
    results = []
    for a, _, _, b, result in equations:
        operands = [float(a), float(b)]
        if operands[0] == operands[1] and operands[0] in results:
            return False
        numbers.update(abs(x) for x in operands if x not in results)
        results.append(float(result))
    return len({*results}) == len(results) and not numbers & {*map(abs, results)}


def judges(script) -> bool:
    """Whether the script has a verifier of steps that is asked in the words of `VERIFY`."""
    return getattr(script, "verify_prompt", None) is verify_prompt


def is_judgement(text: str, count: int) -> bool:
    """Whether a text has the form that `VERIFY` asks for, with verdicts on `count` steps."""
    form = JUDGEMENT.fullmatch(text)
    if not form or final_verdict(text) is None:
        return False
    verdicts = [read_verdict(step, ("CORRECT", "INCORRECT")) for step in split_steps(form[1])]
    return len(verdicts) == count and all(verdicts)


def demonstrations(script, rows: list[dict], count: int, seed: int, own: dict) -> list[dict]:
    """Returns rows for TRL, mixed. Each question in turn gives a solution and, if the script has a
    verifier of steps, a judgement. Every second question also gives a drill.

    Args:
        script: the module of the script whose form is taught.
        rows: {question, answer, reference}.
        count: number of rows.
        seed: random seed.
        own: question -> solutions that the model has written. A judgement is of one of these if its
            truth is known.

    Raises:
        UserError: no row has a reference, or no reference can give a judgement.
    """
    rng, made, judgements = random.Random(seed), [], 0
    rows = [row for row in rows if row["reference"]]
    if not rows:
        raise UserError("no row has a solution, a reference or an equation to be taught.")
    found = [e for row in rows for e in plain_equations(row["reference"])]
    numbers = [int(x) for e in found for x in (e[0], e[3]) if re.fullmatch(r"[1-9]\d{0,3}", x)]
    while len(made) < count:
        for i, row in enumerate(rng.sample(rows, len(rows))):
            question, reference = row["question"], row["reference"]
            made.append((script.solve_prompt(question), reworded(reference, rng)))
            if judges(script):
                pairs = [judged_own(reference, text, rng) for text in own.get(question, ())]
                pairs = [p for p in pairs if p] or [judged(question, reworded(reference, rng), rng)]
                if pair := rng.choice(pairs):
                    made.append((script.verify_prompt(question, pair[0]), pair[1]))
                    judgements += 1
            if numbers and i % 2:
                made.append(drill(numbers, rng))
        if judges(script) and not judgements:
            raise UserError(
                "no reference has one plain equation in each step, as 3 * 2 = 6, and judgements "
                "are made of these."
            )
    said = [{"prompt": p, "completion": [{"role": "assistant", "content": t}]} for p, t in made]
    return rng.sample(said[:count], count)


def figures(script, rows: list[dict], samples: int, write: Callable) -> dict[str, float]:
    """Returns figures of a model on these questions, each of which it answers `samples` times. It
    then judges a quarter of its answers, if the script has a verifier of steps.

    Args:
        script: the module of the script.
        rows: {question, answer}.
        samples: answers to each question.
        write: (prompts, whether they ask for judgements) -> (texts, the mean of -log p over all
            their tokens, in nats).
    """
    rows = [row for row in rows for _ in range(samples)]
    texts, entropy = write([script.solve_prompt(row["question"]) for row in rows], False)
    right = [is_correct(text, row["answer"]) for text, row in zip(texts, rows)]
    groups, counts = chunk(right, samples), [len(split_steps(text)) for text in texts]
    read = [count > 0 and boxed(text) is not None for count, text in zip(counts, texts)]
    found = {
        "solutions read": mean(read),
        "accuracy": mean(right),
        f"best of {samples}": mean([any(group) for group in groups]),
        "groups with two outcomes": mean([len(set(group)) == 2 for group in groups]),
        "entropy per token": entropy,
    }
    if judges(script):
        rows, texts, right, counts = (
            x[:: max(1, samples // 4)] for x in (rows, texts, right, counts)
        )
        prompts = [script.verify_prompt(row["question"], t) for row, t in zip(rows, texts)]
        judgements = write(prompts, True)[0]
        finals = [final_verdict(text) for text in judgements]
        metrics, names = verdict_metrics(finals, right), ("balanced_accuracy", "says_correct")
        found["judgements read"] = mean(map(is_judgement, judgements, counts))
        found |= {f"verifier, {name}": metrics[name] for name in names}
    return found
