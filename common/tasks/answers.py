"""Asks for a solution, and reads what a model has written: the boxed answer, whether it is right,
the steps, and where the steps end.

Reading takes time in proportion to the length of the text, even if a model writes thousands of
unclosed braces or tags.
"""

import bisect
import functools
import itertools
import re
import threading
from collections.abc import Iterable

from common.core.lists import mean

from math_verify import parse, verify
from math_verify.errors import TimeoutException
from math_verify.grader import take_last_relation
from sympy import And, Eq, FiniteSet, Mul, Number, Pow, UnevaluatedExpr

SECONDS = 3  # to read an answer; an answer that takes longer is wrong
BRACE = re.compile(r"\\boxed\{|[{}]")
STEP = re.compile(r"<step>(.*?)(</step>|\Z)", re.DOTALL)
SPACE = r"(?<=[\d}])(?:[\s~]|\\[ ,;:])"  # after a number or an expression
TEXT = re.compile(SPACE + r"*+\\(?:text|mathrm)\w*\{([^{}]*)\}")
WHOLE = re.compile(r"\\(?:text|math)\w*\{([^{}]*\d[^{}]*)\}")
UNIT = re.compile(SPACE + r"++([A-Za-z]{3,}(?: +[A-Za-z]{2,}){0,3})\Z", re.ASCII)
CHANGES = """times plus minus over below of by percent mod modulo to and or not never is least most
zero dozen hundred thousand million billion trillion half halve third quarter squared cubed
remainder""".split()
PART = r"\w*(?:four|f|six|ven|eigh|nin|ten|teen|tie|red|sand|illion)th"  # 5 tenths, 5 thousandths
ENDS = "wrong|incorrect|false|negative|invalid|impossible"  # but 5 wrong answers, 5 sixth graders
CHANGES = rf"\d|\b(?:{'|'.join(CHANGES)})s?\b|\b(?:{PART}s\b|(?:{PART}|{ENDS})\s*\Z)"
CHANGES = re.compile(CHANGES, re.IGNORECASE)
RELATION = (
    r"\\(?:not(?:in)?|neq?|n?[lg]eq?q?(?:slant)?|[lg]t|ll|gg|n?(?:less|gtr)(?:sim)?|prec|succ|in)"
)
RELATION = re.compile(rf"[<>≠≤≥⩽⩾≪≫≮≯≰≱≲≳∉]|{RELATION}(?![A-Za-z])")  # \approx is read as =
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?|\.\d+", re.ASCII)
EQUALS = re.compile(r"(?<![!<>=:])=(?![=>])")
MARKUP = re.compile(r"\\[()\[\]]|\\?\$|\\boxed\s*\{")  # in and around a value, which stays the same
VALUE = re.compile(
    rf"-?\\[dt]?frac\s*(?:\{{[^{{}}]*\}}|\d)\s*(?:\{{[^{{}}]*\}}|\d)|{NUMBER.pattern}", re.ASCII
)
BLANK = r"[^\S\n]*"
GOES_ON = re.compile(  # the value is not the whole result: 10^3, 2\sqrt{3}, 1 1/2, 5*8, 1e3
    rf"{BLANK}(?:[*/^×·÷+-]{BLANK}[\d({{\\]|\\(?:times|cdot|div|sqrt|pi|[dt]?frac)|\d)|[eE][-+]?\d"
)
SEVERAL = re.compile(r"[\d}]\s+\d|\d[eE][-+]?\d|[,;]|arrow|\\to\b|\\implies|\b(?:or|and|not|to)\b")
CONTEXT = 8  # tokens, more than the bytes of one character


# ------------------------------------------------------------------ asking
SOLVE = r"""Solve the problem step by step. Put every step in its own <step> </step> tags, and after
the last one the answer in this form: <answer>\boxed{...}</answer>. Write nothing outside of these
tags."""

SOLVED = [  # worked examples, of unlike length, so that a model cannot copy one whole
    (
        "Tom has 3 boxes with 12 pens each. He gives 6 pens to Ann and 5 pens to Bob. How many "
        "pens does he keep?",
        r"""<step>3 boxes hold 3*12 = 36 pens.</step>
<step>He gives away 6+5 = 11 pens.</step>
<step>He keeps 36-11 = 25 pens.</step>
<answer>\boxed{25}</answer>""",
    ),
    (
        "A shop has 20 books and sells half of them for 8 dollars each. How much money comes in?",
        r"""<step>Half of 20 is 20/2 = 10 books.</step>
<step>They bring 10*8 = 80 dollars.</step>
<answer>\boxed{80}</answer>""",
    ),
]


def prompt(system: str, user: str, examples: Iterable[tuple[str, str]] = ()) -> list[dict]:
    """Returns the messages of a prompt: the instructions, worked examples as earlier turns of the
    dialogue, and what the user says.

    A model that nobody has taught a form follows two examples of it far better than a description.
    The small models have been taught, and their chat templates leave out instructions and examples.

    examples: pairs of what the user says and what the model answers.
    """
    # a space before a closing tag: many tokenizers have a token "}</", and a model that samples "}"
    # alone would not have been shown that a tag is closed after it
    apart = [(asked, re.sub(r"(?<=[^\w\s])</", " </", answer)) for asked, answer in examples]
    turns = [m for pair in apart for m in zip(("user", "assistant"), pair)]
    turns = [{"role": role, "content": text, "example": True} for role, text in turns]
    ask = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return [ask[0], *turns, ask[1]]


def solve_prompt(question: str) -> list[dict]:
    """Returns the messages that ask for a solution in steps, with its answer in a box."""
    return prompt(SOLVE, question, SOLVED)


def solve(
    trainer, player: str, rows: list[dict], samples: int = 1, greedy: bool = False
) -> tuple[list[str], list[bool]]:
    """Has a player answer held-out questions, `samples` times each. The questions are the same on
    all processes, and so are the results.

    Returns:
        (the texts, whether the answer of each text is right); texts of a question are adjacent.
    """
    several = [row for row in rows for _ in range(samples)]
    texts = trainer.generate_all(player, [solve_prompt(r["question"]) for r in several], greedy)
    return texts, [is_correct(text, row["answer"]) for text, row in zip(texts, several)]


def evaluate_solver(
    trainer, player: str, held_out: list[dict]
) -> tuple[dict[str, float], list[str], list[bool]]:
    """Has a player answer held-out questions, --eval-samples times each at its temperature, and
    once greedily.

    Returns:
        (the player's accuracy and greedy accuracy by name, the sampled texts, whether the answer of
        each sampled text is right); texts of a question are adjacent.
    """
    texts, right = solve(trainer, player, held_out, trainer.cfg.eval_samples)
    _, greedy = solve(trainer, player, held_out, greedy=True)
    return {f"{player}/accuracy": mean(right), f"{player}/greedy": mean(greedy)}, texts, right


def solutions_to_teach(trainer, player: str, rows: list[dict]) -> list[dict]:
    """Samples a solution of each row's question, which a player may later be taught. Returns rows
    {question, answer, solution, right, well_formed}.

    A solution is well formed if it has steps and an answer, was not cut, and spells out no special
    token. It is taught with an end token, and a special token that is spelt out would become a real
    token.

    rows: they may have a `prefix`, the text with which the solution begins. A box in the prefix
        does not count as an answer.
    """
    from common.core.model import special_tokens  # and torch, which the loaders do without

    prompts, parts = [solve_prompt(row["question"]) for row in rows], []
    if any("prefix" in row for row in rows):
        parts = [trainer.processing_class(r["prefix"], add_special_tokens=False) for r in rows]
    prefix = [part.input_ids for part in parts] or None
    ids = trainer.generate_ids(player, prompts, prefix=prefix)
    texts = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    special = special_tokens(trainer.processing_class)
    return [
        {
            "question": row["question"],
            "answer": row["answer"],
            "solution": (row.get("prefix", "") + text).strip(),
            "right": is_correct(text, row["answer"]),
            "well_formed": final_answer(text) is not None
            and bool(split_steps(row.get("prefix", "") + text))
            and written[-1] in trainer.eos_token_ids
            and not any(token in text for token in special),
        }
        for row, text, written in zip(rows, texts, ids)
    ]


# ------------------------------------------------------------------ answers
def boxed(text: str) -> str | None:
    """Returns the content of the last complete \\boxed{...}, or None. Braces may nest."""
    opened, latest, content = [], 0, None  # opened: where a brace's content starts, is it a box
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            opened.append((brace.end(), brace[0] != "{"))
        elif opened:  # a brace that closes nothing is skipped
            start, is_box = opened.pop()
            if is_box and start > latest:  # not a box around the latest box
                latest, content = start, text[start : brace.start()]
    return content


def final_answer(text: str) -> str | None:
    """Returns the boxed answer; None if there is no box, or an empty box."""
    return (boxed(text) or "").strip() or None


def is_correct(text: str, gold: str) -> bool:
    """Whether the last boxed answer of `text` equals `gold`.

    Equal strings are equal, plain numbers are compared as numbers, and math-verify compares
    anything else. Units are not compared. If gold is a number, an answer is wrong that has still to
    be worked out, or that stands in another relation than "=" or \\approx. A text without a box,
    with an empty box, or with a box that math-verify cannot read is wrong. No text raises an
    exception.
    """
    answer, gold = final_answer(text), gold.strip()
    if answer is None or answer == gold:
        return answer is not None
    if max(len(answer), len(gold)) > 1000:  # no answer is that long, and to parse it takes minutes
        return False
    answer, gold = without_unit(answer), without_unit(gold)
    if re.fullmatch(r"-?\d+", answer) and re.fullmatch(r"-?\d+", gold):
        return int(answer) == int(gold)
    try:
        expected, given = parsed(gold), parsed(answer)
        if is_number(expected[0]) and (RELATION.search(answer) or not is_number(given[0])):
            return False
        compared = can_be_compared(gold) and can_be_compared(answer)
        return compared and bool(verify(expected, given, timeout_seconds=time_limit()))
    except Exception:
        return False


@functools.lru_cache(1 << 14)
def parsed(answer: str) -> list:
    """Returns what math-verify reads in an answer."""
    return parse(f"\\boxed{{{answer}}}", parsing_timeout=time_limit())


@functools.lru_cache(1 << 14)
def can_be_compared(answer: str) -> bool:
    """Whether an answer can be compared in time. 9^{9^9} cannot: its value would take for ever. A
    comparison with a number shows it, once, because in a vote an answer is compared with all
    others.
    """
    try:
        verify(Number(1), parsed(answer), timeout_seconds=time_limit(), raise_on_error=True)
    except TimeoutException:
        return False
    except Exception:  # it cannot be compared with a number
        pass
    return True


def time_limit() -> int | None:
    """Returns math-verify's time limit in seconds. It works by signals, which only the main thread
    gets; any other thread has no limit.
    """
    return SECONDS if threading.current_thread() is threading.main_thread() else None


def without_unit(answer: str) -> str:
    r"""Returns the answer without its last full stop and its unit. Words that change its value
    stay, in plain letters, because math-verify leaves out every `\text{...}`.

    >>> [without_unit(a) for a in ("18 red books.", r"7 \text{ or more}", "2 dozen", "18xyz")]
    ['18', '7  or more', '2 dozen', '18xyz']
    """
    whole = WHOLE.fullmatch(answer)
    answer = (whole[1] if whole else answer).removesuffix(".") or answer
    answer = TEXT.sub(lambda text: f" {text[1]}" if CHANGES.search(text[1]) else text[0], answer)
    return UNIT.sub(lambda words: words[0] if CHANGES.search(words[1]) else "", answer)


def is_number(value) -> bool:
    """Whether what math-verify has read is worked out: a number or a quotient of two numbers, which
    may have a percent sign or a power of ten. Of an equation the right side counts.
    """
    if isinstance(value, (And, Eq)):
        value = take_last_relation(value).rhs
    if isinstance(value, FiniteSet) and len(value) == 1:
        (value,) = value
    numbers = [factor for factor in Mul.make_args(value) if isinstance(factor, Number)]
    others = [factor for factor in Mul.make_args(value) if not isinstance(factor, Number)]
    return sum(number != -1 for number in numbers) <= 1 and all(
        isinstance(factor, UnevaluatedExpr)  # 1/100
        or isinstance(factor, Pow)
        and isinstance(factor.base, Number)
        and (factor.base == 10 and factor.exp.is_Integer or factor.exp == -1)
        for factor in others
    )


def in_one_form(answers: list[str | None]) -> list[str | None]:
    r"""Returns answers for a vote. Each is written as the first answer that equals it; otherwise
    `18.0` would not vote for `18`.

    >>> in_one_form(["18", None, "18.0", "1/2", r"\$18", "9*2"])
    ['18', None, '18', '1/2', '18', '9*2']
    """
    first = {}
    for answer in dict.fromkeys(a for a in answers if a is not None):
        forms = dict.fromkeys(first.values())
        equal = (
            form
            for form in forms  # either way: 9*2 is not 18, but 18 is 9*2
            if is_correct(rf"\boxed{{{answer}}}", form) and is_correct(rf"\boxed{{{form}}}", answer)
        )
        first[answer] = next(equal, answer)
    return [first.get(answer) for answer in answers]


def without_thoughts(text: str) -> str:
    """Returns what follows the thoughts of a text. If the text was cut in its thoughts, that is
    nothing, whatever box the thoughts quote. If the thoughts are not closed and the text ends in
    its answer, it stays as it is.

    >>> without_thoughts("<think>Is it 8?</think>No: 7"), without_thoughts("<think>Is it 8?")
    ('No: 7', '')
    """
    text = text.rpartition("</think>")[2]
    return text if text.rstrip().endswith("</answer>") else text.partition("<think>")[0]


# ------------------------------------------------------------------ steps
def split_steps(text: str) -> list[str]:
    """Returns the contents of all <step>...</step> blocks, in order."""
    return [block[1] for block in _steps(text)]


def beginnings(solution: str) -> list[str]:
    """Returns the solution up to the end of each of its steps.

    >>> beginnings("<step>a</step> <step>b</step> c")
    ['<step>a</step>', '<step>a</step> <step>b</step>']
    """
    return [solution[: block.end()] for block in _steps(solution)]


def _steps(text: str) -> list[re.Match]:
    """Returns the matches of all blocks. A block that is never closed matches up to the end of the
    text and is then left out; so the closing tag is not looked for again from every opening tag.
    """
    return [block for block in STEP.finditer(text) if block[2]]


def result_of(step: str) -> str | None:
    r"""Returns the result of a step, which is the first value behind its last "=", a number or a
    fraction. If this value is part of a product, a root or a power, all that stands behind the "="
    is the result. None if there is no "=", no value behind it, or no single value.

    >>> [result_of(step) for step in ("45+9=54!", r"\(36-11 = 25\) pens.", "3-8 = - 5", "so 25")]
    ['54', '25', '-5', None]
    >>> [result_of(step) for step in ("45+9=54 != 7", r"$= 2\sqrt{3}$", "= 1 1/2", "= 1e3")]
    ['54', '2\\sqrt{3}', None, None]
    """
    *before, behind = EQUALS.split(step)
    behind = MARKUP.sub("", behind).replace("−", "-") if before else ""
    behind = re.sub(r"-\s+(?=[\d\\])", "-", behind)
    value = VALUE.search(behind)
    if not value or not GOES_ON.match(behind, value.end()):
        return value[0] if value else None
    whole = behind[value.start() :].strip(" \n.!")
    unclear = len(whole) > 100 or RELATION.search(whole) or SEVERAL.search(whole)
    return None if unclear else whole


def box_follows(solution: str) -> bool:
    """Whether there is an answer in the box, and it is the result of the last step. A verifier of
    steps does not see this: it judges each step by itself. A last step without "=" must name the
    answer among its numbers, and steps without a number are passed over. If no step has a number,
    any answer follows.
    """
    steps = [step for step in split_steps(solution) if re.search(r"\d", step)]  # also １
    if not steps:
        return final_answer(solution) is not None
    last = steps[-1]
    # a hostile step may hold thousands of numbers, and each comparison takes milliseconds
    numbers = [result_of(last)] if EQUALS.search(last) else NUMBER.findall(last)[:20]
    return any(number and is_correct(solution, number) for number in numbers)


def step_ends(token_ids: list[int], tokenizer) -> list[int]:
    """Returns the index of the token that completes `</step>`, for every <step>...</step> block.

    The token ids themselves are read, because a text that is encoded again need not give the same
    tokens, and because in a byte-level BPE a token may hold `>` and the newline after it. There are
    always as many indices as `split_steps(tokenizer.decode(ids))` has steps.
    """
    text = tokenizer.decode(token_ids)
    if not _steps(text):
        return []
    # a character that the tokenizer cuts in two decodes to other characters; ASCII tags stay whole
    pieces = tokenizer.batch_decode([[i] for i in token_ids])
    together = "".join(pieces)
    if together.encode("ascii", "ignore") != text.encode("ascii", "ignore"):
        # SentencePiece drops the leading space of a token at the start of a text. So the piece of a
        # token is what it adds to the few tokens before it
        windows = [token_ids[max(0, i - CONTEXT) : i + 1] for i in range(len(token_ids))]
        before = tokenizer.batch_decode([window[:-1] for window in windows])
        after = tokenizer.batch_decode(windows)
        pieces = [new[len(old) :] for old, new in zip(before, after)]
    starts = [0, *itertools.accumulate(map(len, pieces))]  # character at which each piece starts
    ends = [block.end() for block in _steps("".join(pieces))]
    return [bisect.bisect_right(starts, end - 1) - 1 for end in ends]
