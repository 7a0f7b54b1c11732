"""Values, calls and rows of functions: what a hostile program or answer can try."""

import json

from common.sandbox import Sandbox
from common.tasks.functions import (
    LONGEST,
    call_all,
    load_functions,
    read_arguments,
    read_value,
    same_value,
)

import pytest
from conftest import DATA


# ------------------------------------------------------------------ values
@pytest.mark.parametrize(
    "text, value",
    [
        ("3", 3),
        (" -3 ", -3),
        ("'a\\n'", "a\n"),
        ("[1, (2, {3: {4}})]", [1, (2, {3: {4}})]),
        ("None", None),
        ("True", True),
        ("b'x'", b"x"),
        ("1.5e3", 1500.0),
        ("1+2j", 1 + 2j),
    ],
)
def test_literals_are_read(text, value):
    assert read_value(text) == value and type(read_value(text)) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1 + 1",
        "3) or (True",
        "__import__('os').getpid()",
        "1e999",
        "-1e999",
        "1e999-1e999j",
        "nan",
        "[1e999]",
        "lambda: 1",
        "[x for x in (1, 2)]",
        "{[]: 1}",
        "f'{1}'",
        "(" * 300 + ")" * 300,
        "-" * 900 + "1",
        "+".join(["1"] * 400),
        "9" * (LONGEST + 1),
        "1\n2",
        "\0",
        "'\\ud800",
    ],
)
def test_anything_else_is_not(text):
    with pytest.raises(ValueError):
        read_value(text)


@pytest.mark.parametrize(
    "text, values",
    [("3", (3,)), ("3, 'a'", (3, "a")), ("[1,\n2],", ([1, 2],)), ("3 # three", (3,))]
    + [("(1, 2)", ((1, 2),)), ("-1, None", (-1, None))],
)
def test_arguments_are_read(text, values):
    assert read_arguments(text) == values


@pytest.mark.parametrize(
    "text",
    ["", " ", "3) or (True", "3)(4", "3), f(4", "*[1, 2]", "x=1", "**{'x': 1}", "x", "f(3)"]
    + [
        "-" * 400 + "1",
        "+".join(["1"] * 400),
        "[" * 400,
        "x := 3",
        "i for i in [1]",
        "3)\n#",
        "1 if True else 2",
        "3; 4",
        "1e999",
        "(" * 300,
    ],
)
def test_what_is_more_than_arguments_is_refused(text):
    with pytest.raises(ValueError):
        read_arguments(text)


def test_values_are_compared_not_texts():
    assert same_value("[1,2]", "[1, 2]") and same_value("{1, 2}", "{2, 1}")
    assert (
        same_value("'a'", '"a"') and same_value("1.0", "1") and same_value("{}", "dict()") is False
    )
    assert not same_value("'1'", "1") and not same_value("(1,)", "[1]") and not same_value("", "")
    assert not same_value("nan", "nan") and not same_value("x", "x")


# ------------------------------------------------------------------ calls
@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(1) as one:
        yield one


def call(sandbox, program, arguments="3"):
    return call_all(sandbox, [(program, arguments)], 0.5)[0]


@pytest.mark.parametrize(
    "program, returned",
    [
        ("def f(x):\n return x + 1", "4"),
        ("f = lambda x: [x, str(x)]", "[3, '3']"),
        ("def g(x): return x\ndef f(x):\n def h(y): return g(y)\n return h(x)", "3"),
        ("import math\ndef f(x): return math.floor(x / 2)", "1"),
        ("def f(x):\n print('1')\n return x", "3"),  # what it prints is not its result
        ("print('1')\ndef f(x): return x", "3"),
        ("def f(x): return 'a\\nb'", "'a\\nb'"),
        ("def f(x): return None", "None"),
        ("x = '''\ndef f(x): return 1\n'''\ndef f(x): return 2", "2"),
        ("def f(x): return 1\nif __name__ == '__main__': f = None", "1"),
    ],
)
def test_what_a_function_returns(sandbox, program, returned):
    assert call(sandbox, program) == returned


@pytest.mark.parametrize(
    "program",
    [
        "",
        "def g(x): return x",
        "def f(x): return y",
        "def f(): return 1",
        "def f(x: return 1",
        "def f(x):\n while True: pass",
        "def f(x): return object()",
        "def f(x): return float('inf')",
        "def f(x): return f",
        "def f(x): return 'a' * 2000",
        "def f(x): return 10 ** 10000",
        "f = 3",
        "raise SystemExit",
        "def f(x): raise SystemExit",
        "import os\nos._exit(0)",
        "import sys\nsys.__stdout__.write('7')\ndef f(x): return 8",  # neither 7, nor 78
        "'''",  # cannot reach the harness behind it
        "x = (",
        "\\",
        "def f(x): return 1\n\0",
    ],
)
def test_what_returns_nothing_that_counts(sandbox, program):
    found = call(sandbox, program)
    assert found is None or "__stdout__" in program and found not in ("7", "8")


def test_an_object_that_is_equal_to_everything_is_no_value(sandbox):
    program = """
class Any(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __repr__(self): return 'Any()'
def f(x): return Any(7)
"""
    assert call(sandbox, program) is None
    honest = program.replace("'Any()'", "'5'")  # it says that it is 5, so it is 5
    assert call(sandbox, honest) == "5" and not same_value("5", "7")


def test_a_call_that_occurs_twice_is_run_twice(sandbox):
    program = "import time\ndef f(x): return time.time_ns()"
    first, second = call_all(sandbox, [(program, "1")] * 2, 0.5)
    assert first and second and first != second


def test_arguments_that_are_none_are_not_run(sandbox):
    calls = [("def f(x): return x", given) for given in ("3) or (True", "4", "x")]
    assert call_all(sandbox, calls, 0.5) == [None, "4", None]


# ------------------------------------------------------------------ rows
def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_embedded_functions_do_what_their_message_says(sandbox):
    train, held_out = load_functions("tiny", 30, 12, 6, seed=1)
    assert len(train) == 30 and len(held_out) == 12
    assert not {row["program"] for row in train} & {row["program"] for row in held_out}
    for row in train[:10]:
        *words, last = row["message"].split(", ")
        symbol = {"add": "+", "minus": "-", "times": "*"}
        expression = "x"
        for word in words:
            name, operand = word.split()
            expression = f"({expression}){symbol[name]}{operand}"
        assert last.endswith(" ?") and len(row["inputs"]) == len(set(row["inputs"])) == 6
        outputs = call_all(sandbox, [(row["program"], x) for x in row["inputs"]], 0.5)
        fitting = [
            b
            for b in range(1, 10)
            if all(
                eval(f"({expression}){symbol[last.split()[0]]}{b}", {"x": int(x)}) % 100 == int(y)
                for x, y in zip(row["inputs"], outputs)
            )
        ]
        assert len(fitting) >= 1
    assert load_functions("tiny", 30, 12, 6, seed=1) == (train, held_out)
    assert load_functions("tiny", 30, 12, 6, seed=2)[1] == held_out


def test_rows_of_a_file(tmp_path):
    rows = [
        {"program": f"def f(x):\n return x + {i}", "inputs": ["1", "2, 3"][:1], "message": f"m{i}"}
        for i in range(60)
    ]
    train, held_out = load_functions(write(tmp_path / "f.jsonl", rows), 100, 100, 6, seed=0)
    assert len(train) + len(held_out) == 60 and held_out
    assert all(row["message"].startswith("m") and row["inputs"] == ["1"] for row in train)


def test_mbpp_becomes_functions(tmp_path):
    rows = [
        {
            "code": f"def add{i}(a, b):\r\n  return a + b + {i}",
            "text": "Add.",
            "test_list": [f"assert add{i}(2, [3]) == 5", f"assert add{i}(1, 2) == 3"],
        }
        for i in range(40)
    ]
    rows.append({"code": "def g(x): return x", "text": "", "test_list": ["assert g(h(1)) == 2"]})
    train, held_out = load_functions(write(tmp_path / "m.jsonl", rows), 100, 100, 6, seed=0)
    assert len(train) + len(held_out) == 40  # the last one's argument is no literal
    row = train[0]
    assert row["inputs"] == ["2, [3]", "1, 2"] and row["program"].endswith(
        "\n\nf = " + row["program"].split("(")[0].removeprefix("def ")
    )
    assert "\r" not in row["program"]


def test_published_mbpp(real_data):
    if not (DATA / "mbpp.jsonl").exists():
        pytest.skip("no mbpp.jsonl")
    train, held_out = load_functions(str(DATA / "mbpp.jsonl"), 2000, 2000, 3, seed=0)
    assert len(train) + len(held_out) > 600
