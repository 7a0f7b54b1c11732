r"""Asks for a verdict, and reads a verdict, a score or an analysis, mostly from the end of a text.

Reading is lenient about decoration: asked for `Score: \boxed{1}`, real models write
`**Score:** $\boxed{1}$.` or `\[\boxed{0.5}\]`. It is strict about the place: only what a text ends
with counts, so a verdict that is quoted from the prompt or from a solution never counts. The caller
cuts out the section that it asks about. After the verdict only whitespace and closing decoration
may follow.

Every repetition below is bounded or possessive (`*+` gives nothing back). So reading takes time in
proportion to the text, whatever the text is.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from common.core.errors import say
from common.core.lists import mean
from common.tasks.answers import SOLVED, prompt, split_steps

BOX = r"\\box(?:ed)?\{"
OPENING = rf"(?:[\s*_$]|\\[(\[]|{BOX}|\\(?:text|math)(?:bf|it|rm)?\{{)"
CLOSING = r"(?:[\s*_$.}]|\\[)\]])"
VERDICT = rf"(?:{BOX}|\*\*){OPENING}{{0,8}}+(?P<choice>%s){CLOSING}*+\Z"
# after the first verdict a reason may follow; the verdict may have a label, **Verdict: YES**
FIRST = rf"(?:{BOX}|\*\*){OPENING}{{0,8}}+(?:(?:final )?(?:verdict|answer): ?)?{OPENING}{{0,8}}+"
FIRST += rf"(?P<choice>%s){CLOSING}{{0,8}}?(?:\*\*|\}})"
# `NOT \boxed{CORRECT}` is not a verdict; other words before a verdict are not read
DENIAL = r"(?:\b(?:not|isnt|never|cannot|hardly|neither|nor)|n['’]t)(?: be)?"
DENIAL += r"(?:[ \t*_$}:]|\\[(\[]|\\box(?:ed)?\{|\\(?:text|math)(?:bf|it|rm)?\{)*+\Z"  # on its line
DENIAL = re.compile(DENIAL, re.IGNORECASE)
# a label begins a line: **Score:**, ### Final score:, \text{Score: }
LABEL = r"^(?:[ \t*_$#]|\\[(\[]|\\text\{)*+(?:final |overall )?%s(?![A-Za-z0-9])"
LABEL += r"[ \t*_}]*+:?[ \t*_}]*+"
FLAGS = re.IGNORECASE | re.ASCII | re.MULTILINE
SCORE_LABEL, DEFECTS_LABEL = (re.compile(LABEL % word, FLAGS) for word in ("score", "defects"))
SCORE = re.compile(rf"{OPENING}*+(\d{{1,3}}(?:\.\d)?|\.\d){CLOSING}*+", re.ASCII)
NUMBERS = r"\d{1,4}(?: ?(?:,|,? ?and) ?\d{1,4}){0,99}+"
DEFECTS = re.compile(rf"{OPENING}*+(?:none|(?:steps? )?\[?{NUMBERS}\]?){CLOSING}*+", FLAGS)


REFUSED = Counter()  # scores that are allowed -> texts that end in another one
MANY = 10  # of them get a warning, once; a few are a model's slips


class Analysis(NamedTuple):
    """What an analysis of a solution says: which steps are faulty, and a score."""

    defects: tuple[int, ...]  # numbers of the steps that it calls faulty, counted from 1
    score: float

    @property
    def consistent(self) -> bool:
        """Whether its score follows from its defects: 1 without a defect, less with defects."""
        return (self.score == 1) == (not self.defects)


VERIFY = r"""You are given a problem and a solution in steps. Check the steps one after the other,
by your own calculation. Write one <step> </step> block for each step of the solution, ending in its
verdict, \boxed{CORRECT} or \boxed{INCORRECT}, all inside of <step_verification>
</step_verification>. Then write the verdict on the solution as a whole in the same way, inside of
<final_verification> </final_verification>."""


def verify_prompt(question: str, solution: str) -> list[dict]:
    """Returns the messages that ask for a verdict on each step and on the whole. The verifier is
    told how many steps there are, and never sees the gold answer.
    """
    return prompt(VERIFY, to_verify(question, solution), VERIFIED)


def to_verify(question: str, solution: str) -> str:
    """Returns what the user says to a verifier of steps."""
    count = len(split_steps(solution))
    return f"Problem: {question}\nSolution:\n{solution}\nVerify its {count} steps."


WRONG = r"""<step>Half of 20 is 20/2 = 10 books.</step>
<step>They bring 10+8 = 18 dollars.</step>
<answer>\boxed{18}</answer>"""  # its second step is wrong; compare with SOLVED[1]

ALSO_WRONG = r"""<step>3 boxes hold 3+12 = 15 pens.</step>
<step>He gives away 6+5 = 11 pens.</step>
<step>He keeps 15-11 = 4 pens.</step>
<answer>\boxed{4}</answer>"""  # its first step is wrong; compare with SOLVED[0]

VERIFIED = [  # worked examples: a right solution and a wrong solution
    (
        to_verify(*SOLVED[0]),
        r"""<step_verification>
<step>3 boxes of 12 pens are 3*12 = 36 pens. \boxed{CORRECT}</step>
<step>Ann gets 6 and Bob gets 5, so 6+5 = 11. \boxed{CORRECT}</step>
<step>36-11 = 25, because 25+11 = 36. \boxed{CORRECT}</step>
</step_verification>
<final_verification>\boxed{CORRECT}</final_verification>""",
    ),
    (
        to_verify(SOLVED[1][0], WRONG),
        r"""<step_verification>
<step>20/2 = 10, because 2*10 = 20. \boxed{CORRECT}</step>
<step>Each of 10 books brings 8 dollars: 10*8 = 80, not 10+8. \boxed{INCORRECT}</step>
</step_verification>
<final_verification>\boxed{INCORRECT}</final_verification>""",
    ),
]

COMPARED = [  # a problem, two solutions, and a judgement that names the better solution
    (
        *SOLVED[0],
        ALSO_WRONG,
        r"""3 boxes of 12 pens are 3*12 = 36 pens, 6+5 = 11 are given away, and 36-11 = 25 are left.
Solution 1 says 25, which is right. Solution 2 says 4, because it adds 3 and 12.
The better solution: \boxed{1}""",
    ),
    (
        SOLVED[1][0],
        WRONG,
        SOLVED[1][1],
        r"""Half of 20 is 10 books, and 10*8 = 80 dollars come in.
Solution 1 says 18, because it adds 10 and 8. Solution 2 says 80, which is right.
The better solution: \boxed{2}""",
    ),
]


def to_score(question: str, answer: str | None) -> str:
    """Returns what the user says to a judge that scores an answer from 1 to 10."""
    return f"Question: {question}\nAnswer: {answer}\nScore the answer."


SCORED = [  # worked examples: a right answer and a wrong answer
    (
        to_score(SOLVED[0][0], "25"),
        """<think>
3 boxes of 12 pens are 3*12 = 36 pens. He gives away 6+5 = 11 pens and keeps 36-11 = 25 pens.
25 is the answer.
</think>
<score>10</score>""",
    ),
    (
        to_score(SOLVED[1][0], "18"),
        """<think>
Half of 20 is 10 books, and they bring 10*8 = 80 dollars. The answer is 18 and not 80.
</think>
<score>2</score>""",
    ),
]


def mark(right: bool) -> str:
    """Returns a verdict in the form that `VERIFY` asks for."""
    return rf"\boxed{{{'CORRECT' if right else 'INCORRECT'}}}"


def read_verdict(text: str, choices: Iterable[str]) -> str | None:
    r"""Returns the choice that the text ends with, in a box or in bold type; None if it ends with
    anything else, or if the words just before deny the choice.

    >>> read_verdict(r"It says \boxed{NO}, but \[ \boxed{\text{Yes}} \].", ("YES", "NO"))
    'YES'
    """
    words = {word.lower(): word for word in choices}
    pattern = VERDICT % "|".join(map(re.escape, words))
    found = re.search(pattern, text, re.IGNORECASE | re.ASCII)
    return words[found["choice"].lower()] if is_affirmed(found) and balanced(found[0]) else None


def read_first_verdict(text: str, choices: Iterable[str]) -> str | None:
    r"""Returns the first choice that stands alone in a box or in bold type, or None. Use it if a
    verdict's reason follows the verdict; the reason may quote another choice.

    >>> read_first_verdict("3+4 is 7. **No.** For **YES** it must be 8", ("YES", "NO"))
    'NO'
    """
    words = {word.lower(): word for word in choices}
    found = re.search(FIRST % "|".join(map(re.escape, words)), text, re.IGNORECASE | re.ASCII)
    return words[found["choice"].lower()] if is_affirmed(found) else None


def final_verdict(judgement: str) -> bool | None:
    r"""Whether the last <final_verification> says CORRECT; None if it cannot be read.

    >>> final_verdict(r"... <final_verification>\boxed{INCORRECT}</final_verification>")
    False
    """
    _, opened, rest = judgement.rpartition("<final_verification>")
    inside, closed, _ = rest.partition("</final_verification>")
    verdict = read_verdict(inside, ("CORRECT", "INCORRECT")) if opened and closed else None
    return verdict and verdict == "CORRECT"


def read_score(text: str, allowed: Iterable[float]) -> float | None:
    r"""Returns the score of the line "Score: ..." that the text ends with; None if there is no
    score, or a score that is not allowed. If many scores are not allowed, a warning says so,
    because their rewards look like 0.

    >>> read_score("A step is wrong.\n**Score:** $\\boxed{0.5}$.", (0, 0.5, 1))
    0.5
    """
    label = last_match(SCORE_LABEL, text)
    found = SCORE.fullmatch(text, label.end()) if label else None
    if not found or not balanced(text[label.start() :]):
        return None
    score, allowed = float(found[1]), tuple(allowed)
    if score in allowed:
        return score
    REFUSED[allowed] += 1
    if REFUSED[allowed] == MANY:
        say(
            f"warning: {MANY} texts by now end in a score that is none of {allowed}, which "
            f"read_score or read_analysis is given; they count as unreadable. The last one is "
            f"{score:g}"
        )
    return None


def read_analysis(text: str, solution: str, allowed: Iterable[float]) -> Analysis | None:
    r"""Returns the two lines "Defects: ..." and "Score: ..." that the text ends with; None if they
    are missing, or if they name a step that the solution does not have.

    >>> solution = "<step>3*2 = 7</step> <step>7+1 = 8</step>"
    >>> read_analysis("**Defects:** 1 and 2.\n\nScore: 0", solution, (0, 0.5, 1))
    Analysis(defects=(1, 2), score=0.0)
    """
    score, label = read_score(text, allowed), last_match(DEFECTS_LABEL, text)
    if score is None or not label:
        return None
    line = text[label.end() : last_match(SCORE_LABEL, text).start()]
    if not DEFECTS.fullmatch(line) or not balanced(text[label.start() :]):
        return None
    numbers = {*map(int, re.findall(r"\d+", line, re.ASCII))}
    numbers = set() if numbers == {0} else numbers  # some models say 0 for none
    if numbers - {*range(1, len(split_steps(solution)) + 1)}:
        return None
    return Analysis(tuple(sorted(numbers)), score)


def verdict_metrics(verdicts: list[bool | None], right: list[bool]) -> dict[str, float]:
    """Compares verdicts with the truth.

    Args:
        verdicts: True accepts, False rejects, None cannot be read.
        right: whether each solution is right.

    Returns:
        tpr: the true-positive rate, the share of right solutions that are accepted; left out if no
            solution is right.
        tnr: the true-negative rate, the share of wrong solutions that are rejected; left out if no
            solution is wrong. A verdict that cannot be read is wrong in both.
        balanced_accuracy: the mean of tpr and tnr. A verifier that always gives the same verdict
            has 0.5.
        accuracy: the share of true verdicts.
        best_constant: the accuracy of the better of the two constant verdicts.
        says_correct: the share of verdicts that accept.
        parsed: the share of verdicts that can be read.
    """
    hits = {"tpr": [], "tnr": []}
    for verdict, label in zip(verdicts, right, strict=True):
        hits["tpr" if label else "tnr"].append(verdict is label)
    rates = {name: mean(values) for name, values in hits.items() if values}
    share = mean(right)
    return {
        "balanced_accuracy": mean(rates.values()),
        **rates,
        "accuracy": mean(hits["tpr"] + hits["tnr"]),
        "best_constant": max(share, 1 - share),
        "says_correct": mean(verdict is True for verdict in verdicts),
        "parsed": mean(verdict is not None for verdict in verdicts),
    }


def is_affirmed(found: re.Match | None) -> bool:
    """Whether a choice was found, and the words just before do not deny it."""
    return bool(found) and not DENIAL.search(found.string[: found.start()][-40:])


def last_match(label: re.Pattern, text: str) -> re.Match | None:
    places = [*label.finditer(text)]
    return places[-1] if places else None


def balanced(text: str) -> bool:
    r"""Whether every brace is closed; if not, `\boxed{0` may have been cut from `\boxed{0.5}`."""
    return text.count("{") == text.count("}")
