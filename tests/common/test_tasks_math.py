"""Questions from every source, and the two parts that never overlap."""

import json
import re

from common.errors import UserError
from common.tasks.math import load_questions
from common.tiny.tasks import is_held_out

import pytest


def write(tmp_path, rows):
    path = tmp_path / "data.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_tiny_parts_never_overlap_and_the_held_out_part_is_the_same_for_all_seeds():
    parts = [load_questions("tiny", 500, 200, seed) for seed in (0, 1)]
    for train, held_out in parts:
        assert len(train) == 500 and len(held_out) == 200
        assert all(is_held_out(row["question"]) for row in held_out)
        assert not any(is_held_out(row["question"]) for row in train)
    assert parts[0][1] == parts[1][1] and parts[0][0] != parts[1][0]


def test_hard_questions_are_longer_and_never_trained_on_either():
    train, held_out = load_questions("tiny-hard", 60, 30, seed=0)
    for row in train + held_out:
        count = len(re.findall(r"[+*/-]", row["question"]))
        assert count in (5, 6) and row["reference"].count("<step>") == count
    assert all(is_held_out(row["question"]) for row in held_out)
    assert not any(is_held_out(row["question"]) for row in train)


def test_columns_of_common_datasets(tmp_path):
    rows = [
        {"question": "gsm8k", "answer": "so 1+1=<<1+1=2>>2\n#### 1,234"},
        {"problem": "math", "solution": r"\boxed{\frac{1}{2}}"},
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "eurus"}],
            "reward_model": {"ground_truth": "7"},
        },
        {"prompt": "plain", "ground_truth": 5},
    ] + [{"question": f"filler {i}", "answer": str(i)} for i in range(60)]
    train, held_out = load_questions(write(tmp_path, rows), 1000, 1000, seed=0)
    answers = {row["question"]: row["answer"] for row in train + held_out}
    expected = {"gsm8k": "1234", "math": r"\frac{1}{2}", "eurus": "7", "plain": "5"}
    expected["filler 0"] = "0"  # zero is an answer
    assert {question: answers[question] for question in expected} == expected


def test_a_question_never_changes_sides(tmp_path):
    rows = [{"question": f"q{i}", "answer": "1"} for i in range(300)]
    train, held_out = load_questions(write(tmp_path, rows), 1000, 1000, seed=0)
    changed = write(tmp_path, rows[::-1] + [{"question": "new", "answer": "1"}] * 5)
    more = load_questions(changed, 1000, 1000, seed=3)
    assert {r["question"] for r in train} <= {r["question"] for r in more[0]}
    assert {r["question"] for r in held_out} <= {r["question"] for r in more[1]}
    assert 10 < len(held_out) < 60


def test_any_valid_json_lines_are_read(tmp_path):
    """A byte-order mark, and characters that Python takes for ends of lines within a text."""
    path = tmp_path / "odd.jsonl"
    rows = [{"question": f"{i}\u2028 and\u0085{i}", "answer": "1"} for i in range(60)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8", newline="")
    train, held_out = load_questions(str(path), 100, 100, seed=0)
    assert {row["question"] for row in train + held_out} == {row["question"] for row in rows}


def test_numbers_are_answers_and_null_is_nothing(tmp_path):
    filler = [{"question": f"filler {i}", "answer": "1"} for i in range(60)]
    nothing = {"solution": None, "reference": None}
    rows = [{"question": f"{x}", "answer": x, **nothing} for x in (0, -3, 2.5, 10**20)] + filler
    train, held_out = load_questions(write(tmp_path, rows), 100, 100, seed=0)
    answers = {row["question"]: row["answer"] for row in train + held_out}
    for x in (0, -3, 2.5, 10**20):
        assert answers[str(x)] == str(x)
    assert {row["reference"] for row in train + held_out} == {""}


def test_rows_are_drawn_from_the_whole_file_by_the_seed(tmp_path):
    path = write(tmp_path, [{"question": f"{i:03}", "answer": "1"} for i in range(500)])
    found = [load_questions(path, 50, 10, seed)[0] for seed in (0, 0, 1)]
    drawn = [[row["question"] for row in rows] for rows in found]
    assert drawn[0] == drawn[1] != drawn[2] and max(drawn[0]) > "300"  # files are often sorted
    held_out = [load_questions(path, 50, 10, seed)[1] for seed in (0, 1)]
    assert held_out[0] == held_out[1]


def test_too_little_data_and_bad_bytes(tmp_path):
    with pytest.raises(UserError, match="1 training and 0 held-out|0 training and 1 held-out"):
        load_questions(write(tmp_path, [{"question": "only", "answer": "1"}]), 10, 10, seed=0)
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b'{"question": "\xff\xfe"}\n')
    with pytest.raises(UserError, match="not a UTF-8"):
        load_questions(str(path), 10, 10, seed=0)
    gaps = [{"question": f"{i}", "answer": "1"} if i % 2 else "" for i in range(99)]
    assert len(load_questions(write(tmp_path, gaps), 9, 9, 0)[0])  # empty lines are no rows
