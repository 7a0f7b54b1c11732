"""References in the form that prompts ask for: right by `is_correct`, with steps that count."""

import json

from common.errors import UserError
from common.tasks.answers import boxed, is_correct, split_steps
from common.tasks.references import check_references, render

import pytest


def test_every_reference_of_gsm8k_is_right_and_has_steps(real_data):
    """0 of 50 were, before they were rendered."""
    rows = [json.loads(line) for line in open(real_data / "gsm8k_test.jsonl", encoding="utf-8")]
    for row in rows[:400]:
        answer = row["answer"].rsplit("####", 1)[1].replace(",", "").strip()
        reference = render(row["answer"], answer)
        assert is_correct(reference, answer), reference
        assert len(split_steps(reference)) == len(row["answer"].strip().split("\n")) - 1
        assert "####" not in reference and "<<" not in reference


@pytest.mark.parametrize(
    "solution, answer, expected",
    [
        # MATH: a paragraph with a box in it, whose answer counts
        (
            r"Half of 14 is 7. So the answer is $\boxed{\frac{7}{2}}$.",
            r"\frac{7}{2}",
            "<step>Half of 14 is 7.</step>\n"
            r"<step>So the answer is $\boxed{\frac{7}{2}}$.</step>" + "\n"
            r"<answer>\boxed{\frac{7}{2}}</answer>",
        ),
        # a wrong box stays wrong: nothing is put right in silence
        (
            r"It is 3 squared. That is $\boxed{6}$.",
            "9",
            r"<step>It is 3 squared.</step>" + "\n"
            r"<step>That is $\boxed{6}$.</step>" + "\n" + r"<answer>\boxed{6}</answer>",
        ),
        # already in the form
        (
            r"<step>1+1=2</step><answer>\boxed{2}</answer>",
            "2",
            r"<step>1+1=2</step><answer>\boxed{2}</answer>",
        ),
        ("17", "17", ""),
        ("#### 17", "17", ""),
        ("", "17", ""),
        # tags that do not pair up cannot tear a step apart
        (
            "one </step> and\ntwo <answer>",
            "2",
            "<step>one  and</step>\n<step>two</step>\n" + r"<answer>\boxed{2}</answer>",
        ),
        # decimals and abbreviations do not end a sentence
        (
            "He pays 3.50 a day. Then 7.00.",
            "7",
            "<step>He pays 3.50 a day.</step>\n<step>Then 7.00.</step>\n"
            r"<answer>\boxed{7}</answer>",
        ),
    ],
)
def test_render(solution, answer, expected):
    assert render(solution, answer) == expected


def test_hostile_text_stays_countable():
    text = "<step>" * 500 + "\n" + "</step>" * 500 + "\nx" + "<<" * 2000 + "\n#### 1"
    reference = render(text, "1")
    assert boxed(reference) == "1" and len(split_steps(reference)) == reference.count("<step>")


def test_wrong_references_are_refused_with_counts():
    row = {"question": "q", "answer": "2", "reference": r"<step>s</step>\boxed{2}"}
    wrong = {**row, "reference": r"<step>s</step>\boxed{3}"}
    none = {**row, "reference": ""}
    check_references([row, wrong, none], is_correct, "d.jsonl")  # half are right
    with pytest.raises(UserError, match="d.jsonl: of 3 reference solutions 1 end in the right"):
        check_references([row, wrong, wrong, none], is_correct, "d.jsonl")
    check_references([none], is_correct, "d.jsonl")
