"""Programming tasks with tests: rows {question, test_input, test_output, reference}.

The tasks come from common/tiny, from JSONL with test_input and test_output (as CodeContests is
published for CURE), or from MBPP. MBPP's functions are turned into programs as in CURE's appendix
C.2: every argument stands on a line of its own, and a list is its elements separated by spaces. No
question is both in the training part and in the held-out part.
"""

import ast
import random
import re

from common.core.errors import UserError, say
from common.tasks.math import QUESTION_COLUMNS, UNPARSABLE, as_text, read_rows, split
from common.tiny import programs

READ_AND_PRINT = (
    "Write it as a program: every argument stands on a line of its own on standard input, a list "
    "or tuple as its elements separated by spaces; print the result, a list or tuple in the same "
    "way."
)


def load_tasks(
    dataset: str, train_count: int, held_out_count: int, seed: int, file: str | None = None
) -> tuple[list[dict], list[dict]]:
    """Returns (training rows, held-out rows), each {"question": str, "test_input": [str],
    "test_output": [str], "reference": str}.

    The reference is a right program, or "" if none is known. Evaluation uses it, and training never
    does. Arguments and errors are the same as in `common.tasks.math.load_questions`; of the tasks
    in common/tiny there is a single level, "tiny".
    """
    if dataset == "tiny":
        train = programs.sample_tasks(seed + 1, train_count, held_out=False)
        held_out = programs.sample_tasks(0, held_out_count, held_out=True)
        return [_tiny_row(task) for task in train], [_tiny_row(task) for task in held_out]
    found = [[_read_task(row, where) for where, row in part] for part in read_rows(dataset, file)]
    rows, held_out = ([row for row in part if row] for part in found)
    if left_out := sum(row is None for part in found for row in part):
        reason = "take or give more than scalars and flat lists; left out."
        say(f"--dataset {dataset}: {left_out} functions {reason}")
    return split(rows, held_out, dataset, train_count, held_out_count, seed, file)


def _tiny_row(task: str) -> dict:
    inputs = random.Random(task).sample(range(programs.MODULO), 10)
    program = programs.format_program(programs.parse_program_task(task))
    return {
        "question": task,
        "test_input": [f"{x}\n" for x in inputs],
        "test_output": [f"{programs.program_output(task, x)}\n" for x in inputs],
        "reference": parse_program(program),
    }


def _read_task(row: dict, where: str) -> dict | None:
    """Returns a row, or None for a row of MBPP that cannot use standard input and output.

    Raises:
        UserError: the row has no question or no usable tests.
    """
    if "test_list" in row and "code" in row:
        return _from_function(row, where)
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
        "test_input": inputs,
        "test_output": outputs,
        "reference": as_text(row.get("reference"), where, "reference"),
    }


# ------------------------------------------------------------------ MBPP: functions as programs
def _from_function(row: dict, where: str) -> dict | None:
    """`assert f(2, [1, 3]) == [2, 6]` becomes the input "2\\n1 3\\n" and the output "2 6\\n"."""
    question = as_text(row.get("text") or row.get("prompt"), where, "question", ("text", "prompt"))
    code = as_text(row["code"], where, "program", ("code",)).replace("\r\n", "\n")
    tests, inputs, outputs, readers = row["test_list"], [], [], set()
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise UserError(f"{where} has no tests (the column test_list, a list of text).")
    for line in tests:
        try:
            compared = ast.parse(line.strip()).body[0].test  # f(...) == value
            name = compared.left.func.id
            arguments = [ast.literal_eval(argument) for argument in compared.left.args]
            expected = ast.literal_eval(compared.comparators[0])
        except (AttributeError, IndexError, TypeError, *UNPARSABLE):
            return None
        plain = isinstance(compared.ops[0], ast.Eq) and not compared.left.keywords
        if not plain or not all(_on_one_line(value) for value in (*arguments, expected)):
            return None
        inputs.append("".join(_line(value) for value in arguments))
        outputs.append(_line(expected))
        readers.add(f"print_result({name}({', '.join(_reader(value) for value in arguments)}))")
    if len(readers) > 1 or not all(output.strip() for output in outputs):
        return None  # types differ between the tests, and so do the ways to read the input
    printer = "def print_result(r):\n    print(*r) if isinstance(r, (list, tuple)) else print(r)"
    return {
        "question": f"{question.strip()} {READ_AND_PRINT}",
        "test_input": inputs,
        "test_output": outputs,
        "reference": f"{code}\n\n{printer}\n\n{readers.pop()}\n",
    }


def _on_one_line(value) -> bool:
    """Whether it is a scalar, or a list of scalars of one type without the separator in them."""
    try:
        _line(value).encode()
    except ValueError:  # half a character, or an integer of thousands of digits
        return False
    if isinstance(value, (list, tuple)):
        kinds = {type(v) for v in value}
        words = all(not isinstance(v, str) or v.split() == [v] for v in value)
        return len(kinds) == 1 and kinds <= {int, float, str} and words
    return type(value) in (int, float, bool) or (
        type(value) is str and not set(value) & {"\n", "\r"}
    )


def _line(value) -> str:
    return (" ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)) + "\n"


def _reader(value) -> str:
    """Returns the expression that reads such a value from the input."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}(map({type(value[0]).__name__}, input().split()))"
    plain = f"{type(value).__name__}(input())"
    return {bool: 'input() == "True"', str: "input()"}.get(type(value), plain)


# ------------------------------------------------------------------ what a player writes
def parse_program(text: str) -> str | None:
    r"""Returns the last ```python block of a text, wherever its fences stand, or None.

    >>> parse_program("```python\nprint(1)\n``` or better ```python print(2)```")
    'print(2)'
    """
    blocks = re.findall(r"```python(.*?)```", text, re.DOTALL)
    return (blocks[-1].strip() or None) if blocks else None
