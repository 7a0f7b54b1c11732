r"""Whether the plain equations of a step hold: a cheap check of a step in any text.

A data set with answers has no labels for steps. But a step that says `3*2 = 7` is faulty, whatever
else it says. An equation that may be a part of something longer is passed over. To call a right
step faulty would teach something wrong; to miss a faulty step teaches nothing.
"""

import itertools
import re
from fractions import Fraction

from common.tasks.references import OPERATIONS

SIGNS = {
    **dict.fromkeys(("\\times", "\\cdot", "×", "·", "⋅", "∗"), "*"),
    **dict.fromkeys(("\\div", "÷"), "/"),
    **dict.fromkeys(("−", "–"), "-"),
    **{"½": " 1/2", "¼": " 1/4", "¾": " 3/4"},
    **dict.fromkeys(("\\left", "\\right", "\\$", "$", "€", "£", "\\,", "{,}"), ""),
    **{"\\%": "%", "\\(": "(", "\\[": "[", "\\)": ")", "\\]": "]"},
}
SIGN = re.compile("|".join(re.escape(sign) for sign in sorted(SIGNS, key=len, reverse=True)))
REWRITES = [
    (r"^\s*(?:[-*•]|\d+[.)])\s+", ""),  # an item of a list
    (r"\\[dt]?frac\{(\d{1,15})\}\{(\d{1,15})\}", r" \1/\2"),
    (r"(?<=\d) ?\*\* ?(?=\d)", "^"),  # a power; all other pairs of stars are bold type
    (r"\*\*", ""),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),  # 1,200
    (r"(?<=[\d%]) ?[xX] ?(?=[\d.(])", "*"),
    (r"(?<=%) of (?=\d)", "*"),  # 20% of 50
    (r"(?<=\d) and (?=\d{1,3}/\d)", " "),  # 1 and 1/2
    (r" ?([-+*/=^]) ?", r"\1"),
]
REWRITES = [(re.compile(pattern, re.ASCII), replacement) for pattern, replacement in REWRITES]

# after an equation, as in 3*4 = 12 times 2, 4 remainder 3 and 2 o'clock: it is not the whole
CONTINUES = """times plus minus multiplied divided over of by per percent mod modulo to and dozen
hundred thousand million billion squared cubed cents remainder rem r R o'clock [ap][.]?m""".split()
# before an equation, as in "twice 3+4 = 14"; all other words are plain
OPERATORS = """times plus minus multiplied divided over of by per percent double twice thrice triple
half third thirds quarter quarters than from less more add subtract if not""".split()

DECIMAL = r"(?:(?:0|[1-9]\d{0,14})(?:\.\d{1,6})?|\.\d{1,6})"  # 0730 is a time of day
NUMBER = rf"-?(?:[1-9]\d{{0,5}} \d{{1,3}}/[1-9]\d{{0,2}}|{DECIMAL}%?)"  # 16 1/2, 1.5, 20%
EQUATION = re.compile(
    rf"({NUMBER})([-+*/])({NUMBER})=({NUMBER})"
    rf"(?=\Z|[,;?)\]}}=]|[.:](?!\d)| (?!\d|(?:{'|'.join(CONTINUES)})\b))",
    re.ASCII,
)
ALONE = re.compile(
    r"(?:\A|[(\[{=] ?|(?<=[A-Za-z)]), |(?<=[\w)%])[.?!] |(?<=[A-Za-z)])[:;] ?"
    r"|(?<![\w\\])(?P<word>[A-Za-z]{2,}) )\Z",
    re.ASCII,
)


def equations_hold(step: str) -> bool:
    r"""Whether the plain equations of the step are true. A plain equation has two numbers on its
    left side and a sign between them; others, such as chains, are passed over.

    >>> [equations_hold(step) for step in (r"3 \times 4 = 12", "So 3 × 4 = 13.", "2*3 + 4 = 11")]
    [True, False, True]
    """
    text = " ".join(SIGN.sub(lambda sign: SIGNS[sign[0]], step).split())
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return all(
        holds(*equation.groups())
        for equation in EQUATION.finditer(text)
        if stands_alone(text[max(0, equation.start() - 40) : equation.start()])
    )


def stands_alone(before: str) -> bool:
    """Whether an equation may begin after this text: at the start of the step, or after
    punctuation, "=" or a plain word. After "2*", "twice" or "x" it is a part of something longer.
    """
    found = ALONE.search(before)
    return found is not None and (found["word"] or "").lower() not in OPERATORS


def holds(a: str, sign: str, b: str, claimed: str) -> bool:
    """Whether `a sign b = claimed`, for some way to read the percent signs: 20% is 0.2 in
    20% * 50 = 10, it is 20 in 5 * 4 = 20%, and it is 40 in 200 + 20% = 240.

    A result of d decimals may be rounded, or cut off as in 2/3 = 0.66.
    """
    rounded = sign == "/" or "." in claimed
    slack = Fraction(1, 2 * 10 ** len(claimed.rstrip("%").partition(".")[2])) if rounded else 0
    for (x, _), (y, _), (z, unit) in itertools.product(*map(readings, (a, b, claimed))):
        if sign == "/" and y == 0:
            return False
        of_x = [x * y] if sign in "+-" and b.endswith("%") else []
        for value in (OPERATIONS[sign](x, operand) for operand in [y, *of_x]):
            short = value - z if value > 0 else z - value  # of the value, towards zero
            if short == 0 or -slack * unit <= short < 2 * slack * unit:
                return True
    return False


def readings(number: str) -> list[tuple[Fraction, Fraction]]:
    """Returns the readings of a number, (value, its unit): 1.5 and 16 1/2 have one, 20% has two."""
    magnitude = sum(map(Fraction, number.lstrip("-").rstrip("%").split()))
    value = -magnitude if number.startswith("-") else magnitude
    units = [Fraction(1), Fraction(1, 100)] if number.endswith("%") else [Fraction(1)]
    return [(value * unit, unit) for unit in units]
