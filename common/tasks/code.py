"""Programming tasks with tests: rows {question, tests, reference}, in two forms.

    functions        a test is a line such as `assert add(2, [3]) == [5]`, whose arguments and value
                     are literals, and a program defines the function. The question ends in the
                     first of the tests, which names the function. MBPP, HumanEval, and the
                     functions of LiveCodeBench with their public tests are read.
    standard input   a test is a pair (input, expected output). The tasks of common/tiny, and JSONL
                     with test_input and test_output (as CodeContests is published for CURE).

Nothing that a model or a data set wrote is evaluated in this process, and the value that a test
expects never enters the process that runs the program: the two are compared here, as literals. No
question is both in the training part and in the held-out part.
"""

import ast
import functools
import json
import random
import re
from typing import NamedTuple

from common.core.errors import UserError, say
from common.sandbox import Sandbox, Status, same_output
from common.tasks.functions import read_call, read_value, run_calls, same_value
from common.tasks.math import QUESTION_COLUMNS, UNPARSABLE, as_text, read_rows, split_held_out
from common.tiny import programs

OUTPUT_LIMIT = 1 << 16  # bytes; thousands of results are held together
METHOD = re.compile(r"def\s+(\w+)\(\s*self\s*,?\s*([^\n]*:)")  # of LiveCodeBench's starter code


# ------------------------------------------------------------------ tests
class Assert(NamedTuple):
    call: str  # add(2, [3])
    value: str  # [5]


@functools.lru_cache(1 << 14)
def read_assert(line: str) -> Assert | None:
    """Returns the call and the value of a test, in one spelling; None unless the line is a single
    assert that compares one call with `==`, and arguments and value are literals.

    >>> read_assert("assert add(2,[3])==[5], 'wrong'"), read_assert("assert add(g(2)) == 5")
    (Assert(call='add(2, [3])', value='[5]'), None)
    """
    if len(line) > 4000:  # no call is that long, nor a value: `read_call`, `read_value`
        return None
    try:
        (statement,) = ast.parse(line.strip()).body
        (operator,), (value,) = statement.test.ops, statement.test.comparators
        found = Assert(ast.unparse(statement.test.left), ast.unparse(value))
        read_call(found.call), read_value(found.value)
    except (AttributeError, TypeError, *UNPARSABLE):
        return None
    return found if isinstance(statement, ast.Assert) and isinstance(operator, ast.Eq) else None


def shown_assert(question: str) -> Assert | None:
    """Returns the test in which the text of a task ends; None for a task on standard input."""
    return read_assert(question.rstrip().rpartition("\n")[2])


def parse_assert(text: str, question: str) -> str | None:
    """Returns the last assert line of a text; None if it is no test of the task's function, or if
    it repeats the call that the question shows, whose value would be right for free.
    """
    lines = re.findall(r"^[ \t]*(assert .*)", text, re.MULTILINE)
    found, shown = read_assert(lines[-1].strip()) if lines else None, shown_assert(question)
    if found is None:
        return None
    (name, arguments), (entry, known) = read_call(found.call), read_call(shown.call)
    new = name == entry and as_lists(arguments) != as_lists(known)
    return f"assert {found.call} == {found.value}" if new else None


def as_lists(value):
    """Returns the value with lists in place of tuples: most functions do not tell them apart."""
    return [*map(as_lists, value)] if isinstance(value, (list, tuple)) else value


def given(test: tuple[str, str] | str) -> str | Assert:
    """Returns what a program gets in a test: an input, or a call, whose value is left out."""
    return read_assert(test)._replace(value="") if isinstance(test, str) else test[0]


def passes(result: bytes | str | None, test: tuple[str, str] | str) -> bool:
    """Whether a test holds. result: what `run_pairs` returns for its `given`."""
    if result is None:
        return False
    if isinstance(test, str):
        return same_value(result, read_assert(test).value)
    return same_output(result, test[1])


def run_pairs(
    sandbox: Sandbox, pairs: list[tuple[str, str | Assert]], time_limit: float
) -> list[bytes | str | None]:
    """Returns for each (program, input) what the program prints, and for each (program, call) what
    the call returns, as a literal; None if it fails. All calls of a program run in one process.

    time_limit: seconds of CPU time for an input or a call.
    """
    found, calls = dict.fromkeys(pairs), {}  # calls: program -> its pairs
    on_input = [pair for pair in found if isinstance(pair[1], str)]
    limits = {"time_limit": time_limit, "output_limit": OUTPUT_LIMIT}
    results = sandbox.run([p for p, _ in on_input], [text for _, text in on_input], **limits)
    for pair, result in zip(on_input, results):
        found[pair] = result.output if result.status is Status.OK else None
    for program, call in found:
        if not isinstance(call, str):
            calls.setdefault(program, []).append((program, call))
    wanted = [(p, [read_call(call.call) for _, call in its]) for p, its in calls.items()]
    for its, returned in zip(calls.values(), run_calls(sandbox, wanted, time_limit)):
        found.update(zip(its, returned))
    return [found[pair] for pair in pairs]


# ------------------------------------------------------------------ where they come from
def load_tasks(
    dataset: str, train_count: int, held_out_count: int, seed: int, file: str | None = None
) -> tuple[list[dict], list[dict]]:
    """Returns (training rows, held-out rows), each {"question": str, "tests": [(input, output)] or
    [assert line], "reference": str}; all rows of a data set are in one form.

    The reference is a right program, or "" if none is known. Evaluation uses it, and training never
    does. Arguments and errors are the same as in `common.tasks.math.load_questions`; of the tasks
    in common/tiny there is a single level, "tiny".
    """
    if dataset == "tiny":
        train = programs.sample_tasks(seed + 1, train_count, held_out=False)
        held_out = programs.sample_tasks(0, held_out_count, held_out=True)
        return [_tiny_row(task) for task in train], [_tiny_row(task) for task in held_out]
    found = [[(w, _read_task(row, w)) for w, row in part] for part in read_rows(dataset, file)]
    rows, held_out = ([row for _, row in part if row] for part in found)
    if left_out := sum(row is None for part in found for _, row in part):
        reason = "have tests other than `f(...) == value` with literals, or only one; left out."
        say(f"--dataset {dataset}: {left_out} tasks {reason}")
    forms = [(isinstance(row["tests"][0], str), w) for part in found for w, row in part if row]
    if odd := next((where for form, where in forms if form != forms[0][0]), None):
        raise UserError(f"{odd} has asserts, or standard input, unlike the rows before it.")
    parts = split_held_out(rows, held_out, dataset, train_count, held_out_count, seed, file)
    for row in (row for part in parts for row in part):  # by the text alone it is held out or not
        if isinstance(row["tests"][0], str):
            row["question"] += f"\n{row['tests'][0]}"
    return parts


def _tiny_row(task: str) -> dict:
    inputs = random.Random(task).sample(range(programs.MODULO), 10)
    program = programs.format_program(programs.parse_program_task(task))
    return {
        "question": task,
        "tests": [(f"{x}\n", f"{programs.program_output(task, x)}\n") for x in inputs],
        "reference": parse_program(program),
    }


def _read_task(row: dict, where: str) -> dict | None:
    """Returns a row, or None for a function whose tests cannot be read. Such a function is left out
    whole, so that what passes all its tests passes all that its author wrote.

    Raises:
        UserError: the row has no question or no usable tests.
    """
    if "test_list" in row and "code" in row:
        return _from_mbpp(row, where)
    if "entry_point" in row:
        return _from_human_eval(row, where)
    if "starter_code" in row and "public_test_cases" in row:
        return _from_live_code_bench(row, where)
    question = next((row[c] for c in QUESTION_COLUMNS if row.get(c)), None)
    inputs, outputs = row.get("test_input"), row.get("test_output")
    question = as_text(question, where, "question", QUESTION_COLUMNS)
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        columns = "test_input and test_output, lists of strings"
        raise UserError(f"{where} has no tests (the columns {columns}).")
    if len(inputs) != len(outputs):
        raise UserError(f"{where} has {len(inputs)} test inputs but {len(outputs)} test outputs.")
    for number, (given, expected) in enumerate(zip(inputs, outputs), start=1):
        if not isinstance(given, str) or not isinstance(expected, str):
            raise UserError(f"{where}, test {number}: its input or output is not text.")
        if not expected.strip():
            reason = "programs that print nothing would pass"
            raise UserError(f"{where}, test {number} expects empty output: {reason}.")
    return {
        "question": question.strip(),
        "tests": [*zip(inputs, outputs)],
        "reference": as_text(row.get("reference"), where, "reference"),
    }


def _from_mbpp(row: dict, where: str) -> dict | None:
    question = as_text(row.get("text") or row.get("prompt"), where, "question", ("text", "prompt"))
    code = as_text(row["code"], where, "program", ("code",)).replace("\r\n", "\n")
    tests = row["test_list"]
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise UserError(f"{where} has no tests (the column test_list, a list of text).")
    return _function(question, tests, code)


def _from_human_eval(row: dict, where: str) -> dict | None:
    """Its tests are `assert candidate(...) == value` in a function `check(candidate)`."""
    start = as_text(row.get("prompt"), where, "question", ("prompt",))
    name = as_text(row["entry_point"], where, "function", ("entry_point",)).strip()
    code = as_text(row.get("test"), where, "tests", ("test",))
    try:
        checks = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
        lines = [ast.unparse(line) for check in checks for line in check.body]
    except UNPARSABLE:
        return None
    tests = [line.replace("candidate(", f"{name}(", 1) for line in lines if "candidate" in line]
    return _function(start, tests, start + as_text(row.get("canonical_solution"), where, "program"))


def _from_live_code_bench(row: dict, where: str) -> dict | None:
    """A test has an argument a line and a value, as JSON. The starter code has a method of a class,
    and here it is a function. Tasks on standard input are left out. So are private tests: they are
    packed as a pickle, and to open a pickle runs what is in it. No reference comes with a task.
    """
    method = METHOD.search(as_text(row["starter_code"], where, "function"))
    tests = as_text(row["public_test_cases"], where, "tests", ("public_test_cases",))
    try:
        tests = json.loads(tests)
        its = [([*map(json.loads, t["input"].split("\n"))], json.loads(t["output"])) for t in tests]
    except (AttributeError, KeyError, TypeError, *UNPARSABLE):
        return None
    if not method or any(test.get("testtype") != "functional" for test in tests):
        return None
    question = as_text(row.get("question_content"), where, "question", ("question_content",))
    name, signature = method[1], f"def {method[1]}({method[2]}"
    lines = [f"assert {name}({', '.join(map(repr, args))}) == {value!r}" for args, value in its]
    return _function(f"{question.strip()}\n\n{signature}", lines, "")


def _function(question: str, tests: list[str], reference: str) -> dict | None:
    """A task needs a second test, or a program that knows the one which is shown would pass all."""
    read = [read_assert(test) for test in tests]
    if None in read or len({(read_call(test.call)[0]) for test in read}) != 1:
        return None
    if len({test.call for test in read}) < 2:
        return None
    lines = [f"assert {test.call} == {test.value}" for test in read]
    return {"question": question.strip(), "tests": lines, "reference": reference}


# ------------------------------------------------------------------ what a player writes
def parse_program(text: str) -> str | None:
    r"""Returns the last ```python block of a text, wherever its fences stand, or None.

    >>> parse_program("```python\nprint(1)\n``` or better ```python print(2)```")
    'print(2)'
    """
    blocks = re.findall(r"```python(.*?)```", text, re.DOTALL)
    return (blocks[-1].strip() or None) if blocks else None
