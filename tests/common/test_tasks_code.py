"""Programming tasks from every source, on standard input and output."""

import random

from common.tasks.code import load_tasks
from common.tiny.tasks import is_held_out

from conftest import write_rows


def runs(sandbox, row) -> bool:
    """The reference program gives every expected output, word for word."""
    results = sandbox.run([row["reference"]] * len(row["test_input"]), row["test_input"])
    outputs = [result.output.decode().split() for result in results]
    return outputs == [expected.split() for expected in row["test_output"]]


FILLER = [
    {"question": f"task {i}", "test_input": ["1\n"], "test_output": ["1\n"]} for i in range(60)
]


def test_the_small_models_tasks(sandbox):
    train, held_out = load_tasks("tiny", 60, 20, seed=0)
    assert len(train) == 60 and len(held_out) == 20
    assert all(is_held_out(row["question"]) for row in held_out)
    assert not any(is_held_out(row["question"]) for row in train)
    for row in train + held_out:
        inputs = [int(line) for line in row["test_input"]]
        assert len(set(inputs)) == 10 and all(0 <= x < 100 for x in inputs)
    assert load_tasks("tiny", 60, 20, seed=1)[1] == held_out
    assert all(runs(sandbox, row) for row in train[:2] + held_out[:2])


def test_columns_as_codecontests_is_published(tmp_path):
    tests = {"test_input": ["1 2\n", "3 4"], "test_output": ["3\n", "7"]}
    rows = [{"question": "Add two numbers.", **tests}, *FILLER]
    train, held_out = load_tasks(write_rows(tmp_path / "tasks.jsonl", rows), 100, 100, 0)
    row = next(row for row in train + held_out if row["question"] == "Add two numbers.")
    assert {key: row[key] for key in tests} == tests and row["reference"] == ""
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    assert len(train) + len(held_out) == 61


MBPP = {
    "text": "Write a function to scale a list.",
    "code": "def f(k, xs):\r\n\treturn [k * x for x in xs]",
    "test_list": ["assert f(2, [1, 3]) == [2, 6]", "assert f(-1, [5]) == [-5]"],
}


def test_functions_become_programs(tmp_path, sandbox):
    rows = [{**MBPP, "text": f"{MBPP['text']} {i}"} for i in range(60)]
    train, held_out = load_tasks(write_rows(tmp_path / "tasks.jsonl", rows), 100, 100, 0)
    row = (train + held_out)[0]
    assert row["test_input"] == ["2\n1 3\n", "-1\n5\n"]
    assert row["test_output"] == ["2 6\n", "-5\n"] and runs(sandbox, row)
    assert "standard input" in row["question"]


ODD = [
    ["assert f([[1]]) == 1"],  # nested
    ["assert f({1: 2}) == 1"],
    ["assert f([]) == 1"],  # an empty line is no list
    ["assert f(1) == 1", "assert f('a') == 1"],  # no one way to read it
    ["assert f(['a b']) == 1"],
    ["assert f('a\\nb') == 1"],
    ["assert f(1) > 2"],
    ["assert f(x=1) == 2"],
    ["assert set(f(1)) == {1}"],
    ["assert f(1) == ''"],  # expects nothing
    ["import os"],
    ["assert f(1"],
    ["assert f('\\ud83d') == 1"],  # half a character cannot be written to a program
    ["assert f(1) == ['\\ud83d']"],
    ["assert f('a\\rb') == 1"],  # which a program reads as two lines
    ["assert f(0x" + "f" * 5000 + ") == 1"],  # more digits than Python prints
    ["assert f(" + "-" * 100_000 + "1) == 1"],
    ["assert f(" + "(" * 5000 + "1" + ")" * 5000 + ") == 1"],
    ["assert f(" + "1 + " * 20_000 + "1) == 1"],
    [""],
]


def test_functions_that_cannot_be_programs_are_left_out_and_counted(tmp_path, capsys):
    rows = [{**MBPP, "text": f"odd {i}", "test_list": tests} for i, tests in enumerate(ODD)]
    train, held_out = load_tasks(write_rows(tmp_path / "t.jsonl", rows + FILLER), 100, 100, 0)
    assert len(train + held_out) == 60 and "odd" not in str(train + held_out)
    sentence = f"{len(ODD)} functions take or give more than scalars and flat lists; left out"
    assert sentence in capsys.readouterr().out


def test_published_mbpp(real_data, sandbox):
    """737 of 974 rows can be converted, and their published solutions pass the converted tests."""
    train, held_out = load_tasks(str(real_data / "mbpp.jsonl"), 1000, 1000, 0)
    assert len(train) + len(held_out) == 737
    sample = random.Random(0).sample(train + held_out, 12)
    # `7.0 == 7` is true in Python, but not word for word
    assert sum(runs(sandbox, row) for row in sample) >= 11
