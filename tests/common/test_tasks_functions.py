"""Calls and rows of azr.py. How programs are read: tests/data/texts.txt."""

from common.tasks.functions import bare, call_each, load_functions

from conftest import write_rows

PLUS = "def f(x):\n return (x+3)%100"
CLOCK = "def f(x): return __import__('time').time_ns()"  # no import statement


# ------------------------------------------------------------------ calls
def test_calls_of_several_tasks_come_back_by_task(sandbox):
    """Arguments that are none are not run."""
    calls = [[(PLUS, "1"), (CLOCK, "1")], [], [(CLOCK, "1"), (PLUS, "x"), (PLUS, "3) or (True")]]
    (plus, first), nothing, (again, *unread) = call_each(sandbox, calls, 0.5)
    assert (plus, nothing, unread) == ("4", [], [None, None]) and first == again  # run once


# ------------------------------------------------------------------ rows
def test_the_small_models_functions_do_what_their_message_says(sandbox):
    train, held_out = load_functions("tiny", 30, 12, 6, seed=1)
    assert len(train) == 30 and len(held_out) == 12
    assert not {row["program"] for row in train} & {row["program"] for row in held_out}
    symbol = {"add": "+", "minus": "-", "times": "*"}
    for row in train[:10]:
        *words, last = row["message"].split(", ")
        expression = "x"
        for word in words:
            name, operand = word.split()
            expression = f"({expression}){symbol[name]}{operand}"
        expression = f"({expression}){symbol[last.split()[0]]}"
        assert last.endswith(" ?") and len(row["inputs"]) == len(set(row["inputs"])) == 6
        (outputs,) = call_each(sandbox, [[(row["program"], x) for x in row["inputs"]]], 0.5)
        values = {x: int(y) for x, y in zip(map(int, row["inputs"]), outputs)}
        computed = [{x: eval(f"{expression}{b}") % 100 for x in values} for b in range(1, 10)]
        assert values in computed
    assert load_functions("tiny", 30, 12, 6, seed=1) == (train, held_out)
    assert load_functions("tiny", 30, 12, 6, seed=2)[1] == held_out


def test_a_program_is_on_one_side_whatever_its_names(tmp_path):
    text = "def {0}(x):\n return (x+{1})%100\n\nf = {0}"
    rows = [
        {"program": text.format(name, i), "inputs": ["1", "2"]}
        for i in range(40)
        for name in ("add", "plus", "more")
    ]
    train, held_out = load_functions(write_rows(tmp_path / "f.jsonl", rows), 200, 200, 2, seed=0)
    assert len(train) + len(held_out) == 120 and len(held_out) >= 3
    assert not {bare(row["program"]) for row in train} & {bare(row["program"]) for row in held_out}


def test_mbpp_becomes_functions(tmp_path, capsys):
    code, tests = "def add{0}(a, b):\r\n  return a + b + {0}", ["(2, [3]) == 5", "(1, 2) == 3"]
    rows = [
        {"code": code.format(i), "text": "Add.", "test_list": [f"assert add{i}{x}" for x in tests]}
        for i in range(40)
    ]
    for test in ("assert g(h(1)) == 2", "assert g(x=1) == 1"):
        rows.append({"code": "def g(x): return x", "text": "", "test_list": [test]})
    train, held_out = load_functions(write_rows(tmp_path / "m.jsonl", rows), 100, 100, 6, seed=0)
    assert len(train) + len(held_out) == 40  # arguments of the last two are no literals
    assert "2 programs have no plain calls as tests; left out." in capsys.readouterr().out
    row, name = train[0], train[0]["program"].split("(")[0].removeprefix("def ")
    assert row["inputs"] == ["2, [3]", "1, 2"] and row["program"].endswith(f"\n\nf = {name}")
    assert "\r" not in row["program"]
