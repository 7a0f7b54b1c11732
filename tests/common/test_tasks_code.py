"""Programming tasks from every source, in both forms, and what no program earns by tricks."""

import json
import random

from common.tasks.code import (
    given,
    load_tasks,
    parse_assert,
    passes,
    read_assert,
    run_pairs,
    shown_assert,
)
from common.tiny.tasks import is_held_out

import pytest
from conftest import write_rows


def holds(sandbox, program: str, tests: list, time_limit: float = 1.0) -> list[bool]:
    pairs = [(program, given(test)) for test in tests]
    return [*map(passes, run_pairs(sandbox, pairs, time_limit), tests)]


FILLER = [
    {"question": f"task {i}", "test_input": ["1\n"], "test_output": ["1\n"]} for i in range(60)
]


def test_the_small_models_tasks(sandbox):
    train, held_out = load_tasks("tiny", 60, 20, seed=0)
    assert len(train) == 60 and len(held_out) == 20
    assert all(is_held_out(row["question"]) for row in held_out)
    assert not any(is_held_out(row["question"]) for row in train)
    for row in train + held_out:
        inputs = [int(line) for line, _ in row["tests"]]
        assert len(set(inputs)) == 10 and all(0 <= x < 100 for x in inputs)
        assert shown_assert(row["question"]) is None
    assert load_tasks("tiny", 60, 20, seed=1)[1] == held_out
    for row in train[:2] + held_out[:2]:
        assert all(holds(sandbox, row["reference"], row["tests"]))


def test_columns_as_codecontests_is_published(tmp_path):
    tests = {"test_input": ["1 2\n", "3 4"], "test_output": ["3\n", "7"]}
    rows = [{"question": "Add two numbers.", **tests}, *FILLER]
    train, held_out = load_tasks(write_rows(tmp_path / "tasks.jsonl", rows), 100, 100, 0)
    row = next(row for row in train + held_out if row["question"] == "Add two numbers.")
    assert row["tests"] == [("1 2\n", "3\n"), ("3 4", "7")] and row["reference"] == ""
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    assert len(train) + len(held_out) == 61


# ------------------------------------------------------------------ functions
MBPP = {
    "text": "Write a function to scale a list.",
    "code": "def f(k, xs):\r\n\treturn [k * x for x in xs]",
    "test_list": ["assert f(2, [1,3]) == [2, 6]", "assert f(-1, [5])==[-5] "],
}
HUMAN_EVAL = {
    "prompt": 'def f(k, xs):\n    """ Scales a list. """\n',
    "canonical_solution": "    return [k * x for x in xs]\n",
    "entry_point": "f",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2, [1,3]) == [2, 6]\n"
    "    assert candidate(-1, [5]) == [-5], 'no'\n    assert True, 'fine'\n",
}


@pytest.mark.parametrize("form, text", [(MBPP, "text"), (HUMAN_EVAL, "prompt")])
def test_functions_keep_their_asserts(tmp_path, sandbox, form, text):
    rows = [form | {text: f"{form[text]}    # {i}\n"} for i in range(60)]
    train, held_out = load_tasks(write_rows(tmp_path / "tasks.jsonl", rows), 100, 100, 0)
    assert len(train) + len(held_out) == 60
    for row in (train[0], held_out[0]):
        assert row["tests"] == ["assert f(2, [1, 3]) == [2, 6]", "assert f(-1, [5]) == [-5]"]
        assert row["question"].endswith("\nassert f(2, [1, 3]) == [2, 6]")
        assert row["tests"][1] not in row["question"]
        assert all(holds(sandbox, row["reference"], row["tests"]))


def test_a_text_is_on_one_side_whatever_its_tests(tmp_path):
    rows = [
        MBPP | {"text": f"task {i}", "test_list": [f"assert f({k}) == 0", "assert f(7) == 0"]}
        for i in range(60)
        for k in range(3)
    ]
    train, held_out = load_tasks(write_rows(tmp_path / "tasks.jsonl", rows), 1000, 1000, 0)
    texts = [{row["question"].partition("\n")[0] for row in part} for part in (train, held_out)]
    assert len(train + held_out) == 180 and all(texts) and not texts[0] & texts[1]


ODD = [
    "assert f(1) > 2",
    "assert f(1) != 2",
    "assert f(1) == 2 == 2",
    "assert f(1) == 2 or True",
    "assert f(x=1) == 2",
    "assert f(*[1]) == 2",
    "assert f() == 2",
    "assert f(1)(2) == 3",
    "assert set(f(1)) == {1}",
    "assert f(g(1)) == 1",
    "assert f(1) == g(1)",
    "assert f(1) == 1 + 1",
    "assert f(1.0/3) == 1",
    "assert f(1) == float('nan')",
    "assert f(1) == 1e999",
    "assert f(root) == 1",
    "assert not f(1)",
    "assert (f(1) == 1, 'always true')",
    "assert f(1) == 1; import os",
    "assert [f(1)] == [1]",
    "import os",
    "assert f(1",
    "assert f('\\ud83d') == '\0'",
    "assert f(0x" + "f" * 5000 + ") == 1",  # more digits than Python prints
    "assert f(0x" + "f" * 990 + ") == 1",  # longer in decimal digits
    "assert f('" + "a" * 1_000_000 + "') == 1",
    "assert f(1) == '" + "a" * 1_000_000 + "'",
    "assert f(" + "-" * 100_000 + "1) == 1",
    "assert f(" + "-" * 900 + "1) == 1",
    "assert f(" + "(" * 400 + "1" + ")" * 400 + ") == 1",
    "assert f(" + "[" * 3900,
    "assert f(" + "1 + " * 20_000 + "1) == 1",
    "assert " * 100_000,
    "",
]


def test_functions_with_other_tests_are_left_out_and_counted(tmp_path, capsys):
    assert [line for line in ODD if read_assert(line)] == []
    tests = [[MBPP["test_list"][0], line] for line in ODD]
    # a lone test is shown, and a program that knows it would pass; nor may there be two functions
    tests += [
        ["assert f(1) == 1"],
        ["assert f(1) == 1"] * 2,
        ["assert f(1) == 1", "assert g(2) == 2"],
    ]
    rows = [{**MBPP, "text": f"odd {i}", "test_list": lines} for i, lines in enumerate(tests)]
    rows += [{**MBPP, "text": f"fine {i}"} for i in range(60)]
    train, held_out = load_tasks(write_rows(tmp_path / "t.jsonl", rows), 100, 100, 0)
    assert len(train + held_out) == 60 and "odd" not in str(train + held_out)
    assert f"{len(tests)} tasks" in capsys.readouterr().out


START = "class Solution:\n    def f(self, k: int, xs: List[int]) -> List[int]:\n        "
CASES = [("2\n[1, 3]", "[2, 6]"), ("-1\n[5]", "[-5]")]


def live(cases, testtype="functional", **more) -> dict:
    tests = [{"input": x, "output": y, "testtype": testtype} for x, y in cases]
    row = {"question_content": "Scale a list.", "starter_code": START, "private_test_cases": "eJx"}
    return row | {"public_test_cases": json.dumps(tests)} | more


def test_functions_of_live_code_bench(tmp_path, sandbox, capsys):
    """In the published columns. Private tests are a pickle, which nobody opens."""
    name = {"question_content": "Say it.", "starter_code": START.replace("k: int, xs: ", "it: ")}
    said = live([('"a\\n\\u00e4"', "true"), ("[null, 1.5]", "{}")], **name)
    left_out = [
        live([("1 2\n", "3\n")], "stdin", starter_code=""),
        live(CASES, "stdin"),
        live(CASES[:1]),
        live(CASES, starter_code="def f(k, xs):"),
        *[live([CASES[0], (odd, "1")]) for odd in ("", "f(1)", "NaN", "[" * 100_000, "1\n\n1")],
        *[live(CASES, public_test_cases=odd) for odd in ("[", "7", "{}", "[1]", '[{"input": 1}]')],
    ]
    rows = [row | {"question_content": f"{i} odd"} for i, row in enumerate(left_out)] + [said]
    rows += [live(CASES, question_content=f"Scale. {i}") for i in range(60)]
    train, held_out = load_tasks(write_rows(tmp_path / "t.jsonl", rows), 100, 100, 0)
    assert len(train + held_out) == 61 and "odd" not in str(train + held_out)
    assert f"{len(left_out)} tasks" in capsys.readouterr().out
    row = next(row for row in train + held_out if row["question"].startswith("Scale."))
    assert row["tests"] == ["assert f(2, [1, 3]) == [2, 6]", "assert f(-1, [5]) == [-5]"]
    shown = "\n\ndef f(k: int, xs: List[int]) -> List[int]:\nassert f(2, [1, 3]) == [2, 6]"
    assert row["question"].endswith(shown) and row["reference"] == ""
    assert all(holds(sandbox, "def f(k, xs):\n    return [k * x for x in xs]", row["tests"]))
    (other,) = (row for row in train + held_out if row["question"].startswith("Say it."))
    assert other["tests"] == ["assert f('a\\nä') == True", "assert f([None, 1.5]) == {}"]


def test_published_mbpp(real_data, sandbox):
    """964 of 974 rows can be read, and their published solutions hold their tests."""
    train, held_out = load_tasks(str(real_data / "mbpp.jsonl"), 1000, 1000, 0)
    assert len(train) + len(held_out) == 964
    sample = random.Random(0).sample(train + held_out, 40)  # all but one, which takes too long
    assert sum(all(holds(sandbox, row["reference"], row["tests"])) for row in sample) >= 39


# ------------------------------------------------------------------ generated tests
QUESTION = "Double it, however long.\nassert f(2, [1]) == [2]"


@pytest.mark.parametrize(
    "text, test",
    [
        ("assert f(3, [1,2])==[3, 6]", "assert f(3, [1, 2]) == [3, 6]"),
        ("Try 0.\n```python\n  assert f(0, [1]) == [0]  # so\n```", "assert f(0, [1]) == [0]"),
        ("assert f(1, [1]) == [1]\nassert f(3, []) == []", "assert f(3, []) == []"),  # the last
        ("assert f(1, [1]) == [1]\nassert f(3, [", None),  # cut
        ("assert g(3, [1]) == [3]", None),  # another function
        ("So: assert f(3, [1]) == [3]", None),
        ("assert f(2, [1]) == [2]", None),  # what is shown, in every spelling
        ("assert f( 2,[1] ) == [3]", None),
        ("assert f(2.0, [True]) == [2]", None),
        ("assert f(2, (1,)) == [2]", None),
        ("assert f(2, [1, 1]) == [2, 2]", "assert f(2, [1, 1]) == [2, 2]"),
        ("", None),
        *[(line, None) for line in ODD],
    ],
)
def test_parse_assert(text, test):
    assert parse_assert(text, QUESTION) == test


# ------------------------------------------------------------------ what a program earns
TESTS = ["assert f([1]) == 1000001", "assert f([2]) == 1000002", "assert f([3]) == 1000003"]
RIGHT = "def f(x): return x[0] + 10**6"


@pytest.mark.parametrize(
    "program",
    [
        RIGHT,
        "def f(x):\n    x[0] += 10**6\n    return x.pop()",  # changes its argument
        "def f(x):\n    print('no'); print(x[0], end='')\n    return x[0] + 10**6",
        "def f(x): return float(x[0]) + 10**6",  # equal, as in Python
        "def f(x, seen=[]):\n    seen.append(1)\n    return x[0] + 10**6 * len(seen)",
        "n = 0\ndef f(x):\n    global n\n    n += 10**6\n    return x[0] + n",
        "f = lambda x: x[0] + 10**6\nif __name__ == '__main__': f = None",
    ],
)
def test_right_programs(sandbox, program):
    assert holds(sandbox, program, TESTS) == [True] * 3


EQUAL = "class E(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
LOOK = """import gc, sys
def f(x):
    seen, frame = [], sys._getframe()
    while frame:
        seen += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    text = repr(seen) + repr([o for o in gc.get_objects() if type(o) in (list, tuple, dict)])
    return x[0] + 10**6 if str(10**6 + x[0]) in text else None
"""
NOTHING = [False] * 3


@pytest.mark.parametrize(
    "program, expected",
    [
        (EQUAL + "def f(x): return E(7)", NOTHING),
        (EQUAL + "def f(x): return [E(7)]", NOTHING),
        ("class E:\n    def __eq__(self, o): return True\ndef f(x): return E()", NOTHING),
        ("class E:\n    def __repr__(self): return '1000001 or 1'\ndef f(x): return E()", NOTHING),
        ("def f(x): return True", NOTHING),
        ("import os\ndef f(x): os._exit(0)", NOTHING),
        ("import os\nos._exit(0)", NOTHING),
        ("def f(x): raise SystemExit", NOTHING),
        ("def f(x): return f(x)", NOTHING),
        ("def f(x):\n    while True: pass", NOTHING),
        ("while True: pass", NOTHING),
        ("def f(x): return '1' * 10**7", NOTHING),
        ("def f(x):\n    y = []\n    for _ in range(10**5): y = [y]\n    return y", NOTHING),
        ("def f(x): return 10**(10**5)", NOTHING),
        ("def f(x): return [0] * 10**9", NOTHING),
        ("def f(x): print(x[0] + 10**6)", NOTHING),
        ("def f(x): return '\\ud83d'", NOTHING),
        ("def g(x): return 1", NOTHING),
        ("def f(x", NOTHING),
        ("\0", NOTHING),
        ("", NOTHING),
        (LOOK, NOTHING),  # the expected values are nowhere to be found
        ("import sys\ndef f(x): return eval(sys.stdin.read() or sys.__stdin__.read())", NOTHING),
        ("import os\ndef f(x):\n    os.write(1, b'True\\n' * 9)\n    return 1", NOTHING),
        ("import sys\ndef f(x): sys.__stdout__.close()", NOTHING),
        ("import builtins\nbuiltins.repr = lambda x: 'True'\ndef f(x): return 1", NOTHING),
        ("import builtins\nbuiltins.len = builtins.exec = None\ndef f(x): return 1", NOTHING),
        ("def f(x): return 1000001", [True, False, False]),  # the test that is shown
        ("def f(x):\n    if x == [2]:\n        while 1: pass\n    return x[0] + 10**6",)
        + ([True, False, True],),
        ("import os\ndef f(x):\n    x == [2] and os._exit(0)\n    return x[0] + 10**6",)
        + ([True, False, True],),
    ],
)
def test_hostile_programs(sandbox, program, expected):
    """What ends the process costs the call at which it ends, and no other."""
    assert holds(sandbox, program, TESTS, time_limit=0.3) == expected


def test_each_call_has_all_of_the_time(sandbox):
    """Three calls take longer together than one may."""
    program = "import time\ndef f(x):\n    end = time.process_time() + 0.5\n"
    program += "    while time.process_time() < end: pass\n    return x[0] + 10**6"
    assert holds(sandbox, program, TESTS, time_limit=0.8) == [True] * 3


@pytest.mark.parametrize(
    "returned, value, same",
    [
        ("(1, 2)", "(1, 2)", True),
        ("(1, 2)", "[1, 2]", False),
        ("{2, 1}", "{1, 2}", True),
        ("set()", "set()", True),
        ("0.1 + 0.2", "0.3", False),
        ("0.1 + 0.2", "0.30000000000000004", True),
        ("1 == 1", "1", True),
        ("float('nan')", "1", False),
        ("'\\n\\u00e9'", "'\\n\\u00e9'", True),
        ("__import__('collections').Counter('aab')", "{'a': 2, 'b': 1}", True),
        ("range(3)", "[0, 1, 2]", False),
    ],
)
def test_values_are_compared_as_python_compares_literals(sandbox, returned, value, same):
    program = f"def f(x): return {returned}"
    assert holds(sandbox, program, [f"assert f(0) == {value}"]) == [same]
