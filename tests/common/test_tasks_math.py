"""Questions from every source, and the two parts that never overlap; references in the form that
prompts ask for: right by `is_correct`, with steps that count."""

import json
import re
import time

from common.core.errors import UserError
from common.tasks.answers import boxed, is_correct, split_steps
from common.tasks.math import load_questions
from common.tasks.references import check_references, render
from common.tiny.tasks import is_held_out

import pytest
from conftest import write_rows


@pytest.mark.parametrize("level, lengths", [("tiny", {3, 4}), ("tiny-hard", {5, 6})])
def test_the_small_models_parts_never_overlap_and_the_held_out_part_is_the_same(level, lengths):
    """For all seeds."""
    parts = [load_questions(level, 200, 100, seed) for seed in (0, 1)]
    for train, held_out in parts:
        assert len(train) == 200 and len(held_out) == 100
        assert all(is_held_out(row["question"]) for row in held_out)
        assert not any(is_held_out(row["question"]) for row in train)
    counts = [len(re.findall(r"[+*/-]", row["question"])) for row in train + held_out]
    assert set(counts) == lengths
    assert counts == [row["reference"].count("<step>") for row in train + held_out]
    assert parts[0][1] == parts[1][1] and parts[0][0] != parts[1][0]


def test_columns_of_common_datasets(tmp_path):
    """Numbers are answers, zero among them, and null is nothing."""
    eurus = [{"role": "system", "content": "s"}, {"role": "user", "content": "eurus"}]
    nothing = {"solution": None, "reference": None}
    rows = [
        {"question": "gsm8k", "answer": "so 1+1=<<1+1=2>>2\n#### 1,234"},
        {"problem": "math", "solution": r"\boxed{\frac{1}{2}}"},
        {"prompt": eurus, "reward_model": {"ground_truth": "7"}},
        {"prompt": "plain", "ground_truth": 5},
        *[{"question": f"{x}", "answer": x, **nothing} for x in (0, -3, 2.5, 10**20)],
        *[{"question": f"filler {i}", "answer": str(i)} for i in range(60)],
    ]
    train, held_out = load_questions(write_rows(tmp_path / "data.jsonl", rows), 1000, 1000, seed=0)
    found = {row["question"]: row for row in train + held_out}
    expected = {"gsm8k": "1234", "math": r"\frac{1}{2}", "eurus": "7", "plain": "5", "0": "0"}
    expected |= {"-3": "-3", "2.5": "2.5", str(10**20): str(10**20), "filler 0": "0"}
    assert {question: found[question]["answer"] for question in expected} == expected
    assert {found[str(x)]["reference"] for x in (0, -3, 2.5, 10**20)} == {""}


def test_a_question_never_changes_sides(tmp_path):
    rows = [{"question": f"q{i}", "answer": "1"} for i in range(300)]
    train, held_out = load_questions(write_rows(tmp_path / "data.jsonl", rows), 1000, 1000, seed=0)
    rows = rows[::-1] + [{"question": "new", "answer": "1"}] * 5
    more = load_questions(write_rows(tmp_path / "data.jsonl", rows), 1000, 1000, seed=3)
    assert {r["question"] for r in train} <= {r["question"] for r in more[0]}
    assert {r["question"] for r in held_out} <= {r["question"] for r in more[1]}
    assert 10 < len(held_out) < 60


def test_of_copies_the_first_is_read(tmp_path, capsys):
    """In other capitals, spaces, quotes or punctuation. Signs, brackets and digits make questions
    different ones."""
    different = ["2 + 1 ?", "2-1?", "21?", "2, 1?", "2.1?", "(2+1)*2", "2+(1*2)", "It 's 3 - 1 ."]
    rows = [*different, "it’s 3-1?", "2+1", "2  1", "filler", "Filler."]
    rows += [f"q{i}" for i in range(60)]
    rows = write_rows(tmp_path / "a.jsonl", [{"question": q, "answer": "1"} for q in rows])
    both = load_questions(rows, 1000, 1000, seed=0)
    found = [row["question"] for part in both for row in part]
    assert sorted(found) == sorted([*different, "filler", *(f"q{i}" for i in range(60))])
    assert "4 rows repeat another one's question" in capsys.readouterr().out


def test_a_file_is_held_out_and_nothing_else(tmp_path):
    """No question of it is trained on, in whatever capitals."""
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(60)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    given = [("Q3 ?", "3"), ("q5", "6"), ("new", "1")]
    given = [{"question": question, "answer": answer} for question, answer in given]
    file = write_rows(tmp_path / "test.jsonl", given)
    train, held_out = load_questions(path, 1000, 3, 0, file)
    assert {row["question"] for row in held_out} == {"Q3 ?", "q5", "new"}
    kept = {f"q{i}" for i in range(60)} - {"q3", "q5"}
    assert len(train) == 58 and {row["question"] for row in train} == kept
    with pytest.raises(UserError, match="0 training and 60 held-out questions; both are needed"):
        load_questions(path, 1000, 60, 0, path)


def test_any_valid_json_lines_are_read(tmp_path):
    """A byte-order mark, characters that Python takes for ends of lines within a text, and lines
    that are empty."""
    path = tmp_path / "odd.jsonl"
    rows = [{"question": f"{i}\u2028 and\u0085{i}", "answer": "1"} for i in range(60)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\ufeff" + "\r\n\r\n".join(lines), encoding="utf-8", newline="")
    train, held_out = load_questions(str(path), 100, 100, seed=0)
    assert {row["question"] for row in train + held_out} == {row["question"] for row in rows}


def test_rows_are_drawn_from_the_whole_file_by_the_seed(tmp_path):
    rows = [{"question": f"{i:03}", "answer": "1"} for i in range(500)]
    path = write_rows(tmp_path / "data.jsonl", rows)
    drawn, held_out = zip(*[load_questions(path, 50, 10, seed) for seed in (0, 0, 1)])
    assert drawn[0] == drawn[1] != drawn[2] and held_out[0] == held_out[2]
    assert max(row["question"] for row in drawn[0]) > "300"  # files are often sorted


def test_gsm8k_rows(real_data):
    train, held_out = load_questions(str(real_data / "gsm8k_test.jsonl"), 10_000, 10_000, seed=0)
    assert len(train) + len(held_out) == 1319 and 80 < len(held_out) < 200
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    for row in train + held_out:
        assert row["answer"] and "#" not in row["answer"] and "," not in row["answer"]


# ------------------------------------------------------------------ references
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
    text = "<step>" * 500 + "\n" + "</step>" * 500 + "\n" * 60_000 + "<<" * 2000 + "\n#### 1"
    start = time.process_time()
    reference = render(text, "1")
    assert time.process_time() - start < 1  # a hundredth; squares would take three
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
