"""common/tasks/equations.py: generated equations in the signs and sentences of real solutions, and
GSM8K's own. Cases by hand: tests/data/texts.txt.
"""

import json
import time
from fractions import Fraction

from common.tasks.answers import split_steps
from common.tasks.equations import equations_hold
from common.tasks.references import render

import pytest
from hypothesis import given
from hypothesis import strategies as st

SIGNS = {
    "+": ["+"],
    "-": ["-", "−", "–"],
    "*": ["*", "×", "x", "X", r"\times", r"\cdot", "·", "⋅"],
    "/": ["/", "÷", r"\div"],
}
BEFORE = ["", "So ", "the total is ", "(", "First, ", "Then he has: ", "n = ", "1. ", "- ", "**"]
BEFORE += ["$", r"\[ ", r"\( ", "It is 5 apples. ", "Is it so? "]
BEHIND = ["", ".", ", so", ")", " apples", "$", r" \]", "**", "; and", " = n", " in all."]
NUMBERS = st.integers(1, 1500)


@st.composite
def written(draw, number: Fraction) -> str:
    """As 1200, 1,200, $1200 or 2 1/2."""
    if number.denominator > 1:
        whole, rest = divmod(number, 1)
        return f"{whole} {rest}"
    return draw(st.sampled_from(["{}", "{:,}", "${}", "${:,}"])).format(int(number))


@st.composite
def equations(draw, off: int) -> str:
    """Two numbers and a sign, and a result that is off by so many."""
    sign = draw(st.sampled_from("+-*/"))
    a, b = Fraction(draw(NUMBERS)), Fraction(draw(NUMBERS))
    if sign == "/":
        a = a * b
    if sign in "+*" and draw(st.booleans()):
        a = draw(st.integers(1, 50)) + Fraction(draw(st.sampled_from([1, 3])), 4)
        b = Fraction(4 * draw(st.integers(1, 20))) if sign == "*" else b + 1 - a % 1
    if sign == "-":
        a, b = max(a, b) + 1, min(a, b)
    result = eval(f"a {sign} b")
    space = draw(st.sampled_from(["", " "]))
    sign = draw(st.sampled_from(SIGNS[sign]))
    space = " " if "\\" in sign else space
    a, b, result = draw(written(a)), draw(written(b)), draw(written(result + off))
    return f"{a}{space}{sign}{space}{b}{space}={space}{result}"


@given(st.sampled_from(BEFORE), st.sampled_from(BEHIND), st.integers(1, 9), st.data())
def test_an_equation_is_judged_in_every_decoration(before, behind, off, data):
    right = f"{before}{data.draw(equations(0))}{behind}"
    wrong = f"{before}{data.draw(equations(off))}{behind}"
    assert equations_hold(right), right
    assert not equations_hold(wrong), wrong


@st.composite
def chains(draw) -> str:
    """A true equation of three or four numbers, evaluated by Python."""
    numbers = draw(st.lists(st.integers(1, 60), min_size=3, max_size=4))
    signs = [draw(st.sampled_from("+-*/")) for _ in numbers[1:]]
    text = "".join(f"{sign}Fraction({n})" for sign, n in zip(["", *signs], numbers))
    value = eval(text)
    result = str(value) if value.denominator == 1 else f"{float(value):.9f}"
    shown = [draw(st.sampled_from(SIGNS[sign])) for sign in signs]
    text = "".join(f" {sign} {n}" for sign, n in zip(["", *shown], numbers)).strip()
    return f"{text} = {result}"


@given(st.sampled_from(BEFORE + ["twice as much: "]), st.sampled_from(BEHIND), chains())
def test_a_right_chain_is_never_called_false(before, behind, chain):
    assert equations_hold(f"{before}{chain}{behind}"), chain


PREFIXES = ["twice ", "half of ", "5 - ", "2*", "3 plus ", "2^", "10% of ", "7x ", "4 times ", "6/"]


@given(st.sampled_from(PREFIXES), st.integers(1, 9), st.data())
def test_a_part_of_something_longer_is_passed_over(prefix, off, data):
    step = prefix + data.draw(equations(off)).replace("$", "")
    assert equations_hold(step), step


@given(st.text(max_size=80))
def test_any_text_can_be_checked(text):
    assert equations_hold(text) in (True, False)


@pytest.mark.parametrize("text", ["1+1=", "1 1/", "9", "x ", "\\", "$", "and 1/", "=1*", "so "])
def test_long_texts_are_checked_in_no_time(text):
    start = time.process_time()
    equations_hold(text * 50_000)
    assert time.process_time() - start < 10  # under a second; squares would take hours


def test_few_of_gsm8ks_own_solutions_are_called_faulty(real_data):
    """2.64 % of them were before signs, percents and mixed numbers were read; what is left is 19 of
    7,473, and nearly all are slips of their writers, such as 50-8 = 44.
    """
    if not (real_data / "gsm8k_train.jsonl").exists():
        pytest.skip("gsm8k_train.jsonl is not there")
    rows = map(json.loads, (real_data / "gsm8k_train.jsonl").read_text("utf-8").splitlines())
    steps = [split_steps(render(row["answer"], "")) for row in rows]
    faulty = [not all(map(equations_hold, of_row)) for of_row in steps]
    assert len(faulty) == 7473 and sum(faulty) <= 25
