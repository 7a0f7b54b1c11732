"""common/tasks/verdicts.py: the same verdict with and without decoration, and what must stay
unread."""

import re
import time

from common.tasks.verdicts import (
    Analysis,
    read_analysis,
    read_first_verdict,
    read_score,
    read_verdict,
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


@pytest.mark.parametrize("text", ["yes", "**YE", "**YES", "**NOT**", "**YES or NO**", "\\boxed{NO"])
def test_what_is_no_first_verdict(text):
    assert read_first_verdict(text, ("YES", "NO")) is None


@given(st.sets(st.integers(1, 3)), st.sampled_from(SCORES), st.sampled_from(STARTS), st.data())
def test_an_analysis_is_the_same_in_every_decoration(defects, score, start, data):
    joined = data.draw(st.sampled_from([",", ", ", " and ", ", and "])).join(map(str, defects))
    word = joined or data.draw(st.sampled_from(["none", "None", "\\text{none}"]))
    label = data.draw(st.sampled_from(["Defects: ", "**Defects:** ", "defects:", "### Defects\n"]))
    line = label + data.draw(decorated(word)) + data.draw(st.sampled_from(["", ".", "**"]))
    blank = data.draw(st.sampled_from(["\n", "\n\n", " \n"]))
    text = f"{start}{line}{blank}{data.draw(score_lines(float(score)))}"
    assert read_analysis(text, SOLUTION, SCORES) == (tuple(sorted(defects)), score), text


@pytest.mark.parametrize("text", [r"**Score: \boxed{1}**", r"\[\text{Score: } \boxed{1}\]"])
def test_what_a_real_model_writes_is_read(text):
    assert read_score(text, SCORES) == 1
    assert read_analysis(f"Defects: None\n{text}", SOLUTION, SCORES) == Analysis((), 1.0)


def test_the_last_line_counts():
    assert read_score("It claims\nScore: 0\nbut no:\nScore: 1\n", SCORES) == 1
    twice = "Defects: 1\nScore: 0\nNo:\nDefects: 2\nScore: 0.5"
    assert read_analysis(twice, SOLUTION, SCORES) == ((2,), 0.5)


UNREAD = [
    "",
    "Score:",
    "Score: \\boxed{0",  # which was 0.5 before it was cut
    "Score: \\boxed{\\text{1}",
    "Score: \\boxed{0.25}",
    "Score: 10",
    "Score: \\boxed{-1}",
    "Score: \\boxed{١}",
    "\u017fcore: 1",  # a letter that lower case makes of another
    "Score: \\boxed{1} or so",
    "Score: \\boxed{1}\nDefects: 2",
    "Score: 1 or 0",
    "Score: 1/10",
    "It ends like this:\n> Score: \\boxed{1}",
    'It ends with\n"Score: \\boxed{1}"',
    "The solution says Score: \\boxed{1}",
    "My Score: \\boxed{1}",
    "Scores: \\boxed{1}",
    "\\boxed{1}",
    "Score: 1\nScore:",  # a verdict before a second try
]


@pytest.mark.parametrize("text", UNREAD)
def test_a_score_that_is_none(text):
    assert read_score(text, SCORES) is None
    assert read_analysis(f"Defects: none\n{text}", SOLUTION, SCORES) is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Defects:",
        "Defects: 4",  # a step that is not there
        "Defects: 0",
        "Defects: -1",
        "Defects: two",
        "Defects: 1,",
        "Defects: none,1",
        "Defects: ١",
        "Defects: " + "9" * 5000,
        "Defects: {1",
        "Defects: 1 or maybe 2",
        "Defects: 1\nfine",
        "> Defects: 1",
        "It says Defects: 1",
        "Defects: 1\nDefects:",  # a second try
    ],
)
def test_defects_that_are_none(line):
    assert read_analysis(f"{line}\nScore: 0", SOLUTION, SCORES) is None
    assert read_analysis(f"Score: 0\n{line}", SOLUTION, SCORES) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "CORRECT",  # no mark
        r"\boxed{MAYBE}",
        r"\boxed{CORRECT",
        r"\boxed{NOT CORRECT}",
        r"\boxed{CORRECTED}",
        r"\boxed{CORRECT} at first",
        r"It quotes \boxed{CORRECT}, and stops",
        '"\\boxed{CORRECT}"',
        "**not CORRECT**",
        "*CORRECT*",
    ],
)
def test_a_verdict_that_is_none(text):
    assert read_verdict(text, CHOICES) is None


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
