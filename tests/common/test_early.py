"""common/run/early.py: what a script answers without torch, which these processes cannot import."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPTS

WITHOUT = """
import sys
class Without:
    def find_spec(name, *_):
        if name in ("torch", "transformers", "trl", "accelerate", "datasets"):
            raise SystemExit(f"{name} was imported")
sys.meta_path.insert(0, Without)
"""
# every script with every list of arguments, in one process -> [exit code or None, what it said]
ASK = f"""{WITHOUT}
import contextlib, io, json, types
from common.run.early import answer
found = {{}}
for script, cases in json.load(sys.stdin).items():
    module = types.ModuleType("__main__")
    module.__file__, sys.modules["__main__"] = script, module
    for case in cases:
        sys.argv, said, code = [script, *case.split()], io.StringIO(), None
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                answer(module)
            except SystemExit as ended:
                code = ended.code
        found[script + " " + case] = code, said.getvalue()
print(json.dumps(found))
"""
HELP, NUMBER, FLAG, NO_FILE = "--help", "--steps 0", "--stepz 5", "--dataset no.jsonl"
NO_TEST, EMBEDDED = f"{NO_FILE} --held-out none.jsonl", "--held-out none.jsonl"
REAL = f"--model some/model {NO_FILE}"


def python(*arguments, given: str = ""):
    command = [sys.executable, *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT)


def ask(cases: dict[str, list[str]]) -> dict[str, list]:
    process = python("-c", ASK, given=json.dumps(cases))
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def asked():
    cases = [HELP, NUMBER, FLAG, NO_FILE, NO_TEST, EMBEDDED, REAL, ""]
    return ask(dict.fromkeys(SCRIPTS, cases))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_first_answer_needs_no_torch(script, asked):
    code, said = asked[f"{script} {HELP}"]
    assert code == 0 and "--steps INT" in said
    assert asked[f"{script} {NUMBER}"] == [2, "error: --steps 0 must be at least 1.\n"]
    code, said = asked[f"{script} {FLAG}"]
    assert code == 2 and "Unrecognized options: --stepz" in said
    missing = [2, "error: --dataset no.jsonl: there is no such file.\n"]
    assert asked[f"{script} {NO_FILE}"] == asked[f"{script} {REAL}"] == missing
    none = "error: --held-out none.jsonl: "
    assert asked[f"{script} {NO_TEST}"] == [2, f"{none}there is no such file.\n"]
    assert asked[f"{script} {EMBEDDED}"][1].startswith(f"{none}the embedded questions, ")
    assert asked[f"{script} "] == [None, ""]  # nothing is wrong: the script is run


def test_the_rows_of_a_file_are_read_by_the_scripts_own_load(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1?", "answer": "2"}\n' * 2 + '{"question": "2+2?"}\n')
    no_reference = tmp_path / "bare.jsonl"
    asked = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(50)]
    no_reference.write_text("".join(json.dumps(row) + "\n" for row in asked))
    cases = {"tango.py": [f"--dataset {rows}", f"--dataset {no_reference}"]}
    cases["raro.py"] = [f"--dataset {no_reference}", f"--dataset {rows} --dry-run"]
    found = ask(cases)
    code, said = found[f"tango.py --dataset {rows}"]
    assert code == 2 and f"--dataset {rows}: row 3 has no answer" in said
    assert found[f"tango.py --dataset {no_reference}"] == [None, ""]
    code, said = found[f"raro.py --dataset {no_reference}"]
    assert code == 2 and "no question has a reference" in said
    assert found[f"raro.py --dataset {rows} --dry-run"] == [None, ""]  # which loads nothing


FORK = '''
from __future__ import annotations
{above}
from common.run.args import RunArgs, Count
from dataclasses import dataclass
import torch
import tyro

LEAST: int = 3

def least():
    return LEAST

@dataclass
class Mine(RunArgs):
    """My own."""
    steps: Count = 7
    """how many"""

    def check(self):
        if self.steps < least():
            from common.core.errors import UserError
            raise UserError("too few")

if __name__ == "__main__":
    print({call})
'''


def test_a_fork_is_answered_or_left_alone(tmp_path):
    few, alone = [2, "error: too few\n"], [None, ""]
    forks = [
        ("", "tyro.cli(Mine, description='Mine')", few),
        ("print('once')", "tyro.cli(Mine)", few),  # nothing but definitions is executed
        ("", "tyro.cli(lambda: 1)", alone),  # which would be run, as it is no class
        ("def steps(", "tyro.cli(Mine)", alone),  # Python itself says what is wrong
        ("", "tyro.cli(Mine, default=missing)", alone),
    ]
    cases, expected = {}, {}
    for number, (above, call, said) in enumerate(forks):
        fork = tmp_path / f"{number}.py"
        fork.write_text(FORK.format(above=above, call=call))
        cases[str(fork)], expected[f"{fork} --steps 2"] = ["--steps 2"], said
    assert ask(cases) == expected


@pytest.mark.parametrize("how", [["tango.py"], ["-m", "tango"]])
def test_python_itself_asks(how):
    process = python("-X", "importtime", *how, "--stepz")
    assert process.returncode == 2 and "Unrecognized options: --stepz" in process.stderr
    assert "common.run.args" in process.stderr and "torch" not in process.stderr
