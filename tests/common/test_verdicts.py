"""common/tasks/verdicts.py: the same verdict with and without decoration, and any text. What must
stay unread: tests/data/texts.txt."""

import re
import time

from common.tasks.verdicts import (
    read_analysis,
    read_first_verdict,
    read_score,
    read_verdict,
    verdict_metrics,
)

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCORES, CHOICES = (0, 0.5, 1), ("CORRECT", "INCORRECT")
SOLUTION = "<step>a</step><step>b</step><step>c</step>"
WRITTEN = {0.0: ["0", "0.0"], 0.5: ["0.5", ".5"], 1.0: ["1", "1.0"]}

PAIRS = [("", ""), ("**", "**"), ("$", "$"), ("$$", "$$"), ("_", "_"), ("\\(", "\\)")]
PAIRS += [("\\[", "\\]"), ("\\[\n", "\n\\]"), ("\\text{", "}"), ("\\mathbf{", "}"), (" ", " ")]
BOXES = [("\\boxed{", "}"), ("\\boxed{ ", " }"), ("\\boxed{\\text{", "}}"), ("\\box{", "}")]
MARKS = [*BOXES, ("**", "**"), ("**", ".**")]
AROUND = [pair for pair in PAIRS if "{" not in pair[0]]  # a box stands in math or in bold type
ENDS = ["", ".", "\n", " \n\n", ".\n", "**", ".**\n"]
STARTS = ["", "All is checked.\n", "Score: \\boxed{0.5} is what it claims.\n", "\n\n"]
STARTS += ["Defects: 3\nScore: 0\nBut no:\n"]


@st.composite
def decorated(draw, inside: str, pairs=PAIRS) -> str:
    for before, after in draw(st.lists(st.sampled_from(pairs), max_size=3)):
        inside = f"{before}{inside}{after}"
    return inside


@st.composite
def score_lines(draw, score: float) -> str:
    value = draw(st.sampled_from(WRITTEN[score]))
    if draw(st.booleans()):
        before, after = draw(st.sampled_from(BOXES))
        value = f"{before}{value}{after}"
    value = draw(decorated(value)) + draw(st.sampled_from(ENDS))
    word = draw(st.sampled_from(["Score", "score", "SCORE", "Final score", "Overall Score"]))
    label = draw(st.sampled_from(["{}: ", "{}:", "**{}:** ", "**{}**: ", "### {}\n", "_{}_: "]))
    return label.format(word) + value


@given(st.sampled_from(CHOICES), st.sampled_from(STARTS), st.sampled_from(MARKS), st.data())
def test_a_verdict_is_the_same_in_every_decoration(choice, start, box, data):
    word = data.draw(st.sampled_from([choice, choice.lower(), choice.title()]))
    text = data.draw(decorated(f"{box[0]}{word}{box[1]}", AROUND))
    text = start + text + data.draw(st.sampled_from(ENDS))
    assert read_verdict(text, CHOICES) == choice, text


@given(st.sampled_from(["YES", "NO"]), st.sampled_from(MARKS), st.data())
def test_a_first_verdict_is_the_same_in_every_decoration(choice, box, data):
    word = data.draw(st.sampled_from([choice, choice.lower(), choice.title()]))
    labels = ["", "Verdict: ", "Final verdict: "] if "*" in box[0] else [""]
    label = data.draw(st.sampled_from(labels))
    verdict = data.draw(decorated(f"{box[0]}{label}{word}{box[1]}", AROUND))
    text = f"3+4 is 7, yes.\n{verdict} For **YES** or **NO** it must be 8."
    assert read_first_verdict(text, ("YES", "NO")) == choice, text


@given(st.sets(st.integers(1, 3)), st.sampled_from(SCORES), st.sampled_from(STARTS), st.data())
def test_an_analysis_is_the_same_in_every_decoration(defects, score, start, data):
    joined = data.draw(st.sampled_from([",", ", ", " and ", ", and "])).join(map(str, defects))
    word = joined or data.draw(st.sampled_from(["none", "None", "\\text{none}", "0"]))
    label = data.draw(st.sampled_from(["Defects: ", "**Defects:** ", "defects:", "### Defects\n"]))
    line = label + data.draw(decorated(word)) + data.draw(st.sampled_from(["", ".", "**"]))
    blank = data.draw(st.sampled_from(["\n", "\n\n", " \n"]))
    text = f"{start}{line}{blank}{data.draw(score_lines(float(score)))}"
    assert read_analysis(text, SOLUTION, SCORES) == (tuple(sorted(defects)), score), text


@given(st.text(st.sampled_from("Score: \\boxed{}1.05$*\n()[]Dfcts,nR>"), max_size=60), st.data())
def test_text_behind_a_verdict_makes_it_unread(noise, data):
    """Unless it is decoration, or a verdict itself."""
    text = data.draw(score_lines(1.0)) + noise
    said = read_score(text, SCORES)
    if said is not None:
        tail = text[[*re.finditer("score", text, re.IGNORECASE)][-1].end() :]
        digits = re.sub(r"\\\w+|[^\d.]", "", tail).strip(".")
        assert float(digits) == said and text.count("{") >= tail.count("}")


@given(st.text(max_size=80))
def test_any_text_can_be_read(text):
    assert read_score(text, SCORES) in (None, *SCORES)
    assert read_verdict(text, CHOICES) in (None, *CHOICES)
    read_analysis(text, SOLUTION, SCORES)


N = 100_000
LONG = ["Score: " * N, "\nScore: " * N, "\n" * N, "**" * N, "\\boxed{" * N, "**CORRECT" * N]
LONG += ["Defects: " + "1," * N, "Defects: 1" + " " * N + "x", "_" * N + "score", "$ " * N]
LONG += ["Defects: 1" + "\n" * N + "Score: 1" + "\n" * N + "x", "Defects: 1 \n" * N]
LONG += ["Score: " + "\\boxed{" * N + "1" + "}" * N + "x", "\\boxed{CORRECT" + "**" * N + "x"]
LONG += ["**_$" * N, "**verdict: " * N, "** YES " * N]


@pytest.mark.parametrize("text", LONG, ids=lambda text: repr(text[:12]))
def test_long_texts_are_read_in_no_time(text):
    start = time.process_time()
    read_score(text, SCORES), read_verdict(text, CHOICES), read_analysis(text, SOLUTION, SCORES)
    read_first_verdict(text, ("YES", "NO"))
    assert time.process_time() - start < 5  # a tenth of a second; squares would take hours


def test_verdicts_against_gold():
    """Of four right solutions two are accepted, and one judgement is unreadable; two are wrong."""
    found = verdict_metrics([True, True, False, None, False, True], [True] * 4 + [False] * 2)
    expected = {"tpr": 2 / 4, "tnr": 1 / 2, "balanced_accuracy": 1 / 2, "accuracy": 3 / 6}
    assert found == expected | {"best_constant": 4 / 6, "says_correct": 3 / 6, "parsed": 5 / 6}
    assert "tpr" not in (one := verdict_metrics([None, False], [False] * 2))
    assert one["balanced_accuracy"] == one["accuracy"] == 0.5 and one["best_constant"] == 1.0
