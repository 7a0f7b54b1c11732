"""References in the form that prompts ask for: right by `is_correct`, with steps that count."""

import json

from common.errors import UserError
from common.tasks.answers import boxed, is_correct, split_steps
from common.tasks.math import load_questions
from common.tasks.references import check_references, render

import pytest
from conftest import write_rows


def test_every_reference_of_gsm8k_is_right_and_has_steps(real_data):
    """0 of 50 were, before they were rendered."""
    rows = [json.loads(line) for line in open(real_data / "gsm8k_test.jsonl", encoding="utf-8")]
    for row in rows[:400]:
        answer = row["answer"].rsplit("####", 1)[1].replace(",", "").strip()
        reference = render(row["answer"], answer)
        assert is_correct(reference, answer), reference
        assert len(split_steps(reference)) == len(row["answer"].strip().split("\n")) - 1
        assert "####" not in reference and "<<" not in reference


def test_hostile_text_stays_countable():
    text = "<step>" * 500 + "\n" + "</step>" * 500 + "\nx" + "<<" * 2000 + "\n#### 1"
    reference = render(text, "1")
    assert boxed(reference) == "1" and len(split_steps(reference)) == reference.count("<step>")


def test_wrong_references_are_refused_with_counts():
    row = {"question": "q", "answer": "2", "reference": r"<step>s</step>\boxed{2}"}
    wrong = {**row, "reference": r"<step>s</step>\boxed{3}"}
    none = {**row, "reference": ""}
    check_references([row, wrong, none], "d.jsonl")  # half are right
    with pytest.raises(UserError, match="d.jsonl: of 3 reference solutions 1 end in the right"):
        check_references([row, wrong, wrong, none], "d.jsonl")
    check_references([none], "d.jsonl")


def test_rows_with_an_equation_have_a_reference(tmp_path):
    """If it ends in the answer; a solution of the row's own comes first."""
    given = {"equation": "+ number0 number1", "numbers": [8, 3]}
    rows = [{"question": f"Q{i}", "answer": "11", **given} for i in range(40)]
    rows += [{"question": f"W{i}", "answer": "12", **given} for i in range(40)]
    given["solution"] = "So 11."
    rows += [{"question": f"S{i}", "answer": "11", **given} for i in range(40)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    found = [row for part in load_questions(path, 200, 200, seed=0) for row in part]
    wanted = {"Q": "<step>8 + 3 = 11</step>\n<answer>\\boxed{11}</answer>", "W": ""}
    wanted["S"] = "<step>So 11.</step>\n<answer>\\boxed{11}</answer>"
    assert len(found) == 120
    assert all(row["reference"] == wanted[row["question"][0]] for row in found)


def test_every_equation_of_mawps_ends_in_its_answer(real_data):
    if not (real_data / "mawps.jsonl").exists():
        pytest.skip("no mawps.jsonl in the data folder")
    train, held_out = load_questions(str(real_data / "mawps.jsonl"), 10_000, 10_000, seed=0)
    assert len(train + held_out) == 2876 - 392  # which are copies
    for row in train + held_out:
        assert is_correct(row["reference"], row["answer"]) and split_steps(row["reference"])
