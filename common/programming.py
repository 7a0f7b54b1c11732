"""Programming tasks with tests on standard input and output: rows {question, test_input, test_output, reference}.

From the embedded tasks, from JSONL with test_input and test_output (as CodeContests is published for CURE), or from MBPP,
whose functions are turned into programs as in CURE's appendix C.2: every argument on a line of its own, a list as its elements
separated by spaces. The parts for training and evaluation never overlap.
"""

import ast
import random

from common.data import QUESTION_COLUMNS, UserError, read_rows, split
from common.tiny import tasks

READ_AND_PRINT = (
    "Write it as a program: every argument stands on a line of its own on standard input, a list or tuple as its elements "
    "separated by spaces; print the result, a list or tuple in the same way."
)


def load_tasks(dataset: str, train_count: int, held_out_count: int, seed: int) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows), each {"question": str, "test_input": [str], "test_output": [str], "reference": str}, the
    last one a right program, or "" if none is known. Evaluation uses it, training never does.

    Args: as `common.data.load_questions`.  Raises: UserError naming file and row.
    """
    if dataset == "tiny":
        parts = ((seed + 1, train_count, False), (0, held_out_count, True))
        train, held_out = ([_tiny_row(task) for task in tasks.sample_tasks(*part)] for part in parts)
        return train, held_out
    raw, raw_held_out = read_rows(dataset)
    rows, held_out = ([r for where, row in part if (r := _read_task(row, where))] for part in (raw, raw_held_out))
    left_out = len(raw) + len(raw_held_out) - len(rows) - len(held_out)
    if left_out:
        print(f"--dataset {dataset}: {left_out} functions take or give more than scalars and flat lists; left out.", flush=True)
    rows, held_out = split(rows, held_out, dataset)
    return rows[:train_count], held_out[:held_out_count]


def _tiny_row(task: str) -> dict:
    inputs = random.Random(task).sample(range(10), 10)  # modulo 10: these ten are all there are
    return {
        "question": task,
        "test_input": [f"{x}\n" for x in inputs],
        "test_output": [f"{tasks.program_output(task, x)}\n" for x in inputs],
        "reference": tasks.format_program(tasks.parse_program_task(task)).removeprefix("```python\n").removesuffix("\n```"),
    }


def _read_task(row: dict, where: str) -> dict | None:
    """None: an MBPP row that cannot be written with standard input and output."""
    if "test_list" in row and "code" in row:
        return _from_function(row, where)
    question = next((row[c] for c in QUESTION_COLUMNS if row.get(c)), None)
    inputs, outputs = row.get("test_input"), row.get("test_output")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"--dataset {where} has no question (one of the columns {', '.join(QUESTION_COLUMNS)}).")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise UserError(f"--dataset {where} has no tests (the columns test_input and test_output, lists of strings).")
    if len(inputs) != len(outputs):
        raise UserError(f"--dataset {where} has {len(inputs)} test inputs but {len(outputs)} test outputs.")
    for number, (given, expected) in enumerate(zip(inputs, outputs), start=1):
        for name, text in (("input", given), ("output", expected)):
            if not isinstance(text, str) or any(0xD800 <= ord(c) < 0xE000 for c in text):
                raise UserError(f"--dataset {where}, test {number}: its {name} is not UTF-8 text.")
        if not expected.strip():
            raise UserError(f"--dataset {where}, test {number} expects empty output: programs that print nothing would pass.")
    reference = row.get("reference")
    return {
        "question": question.strip(),
        "test_input": inputs,
        "test_output": outputs,
        "reference": reference if isinstance(reference, str) else "",
    }


# ------------------------------------------------------------------ MBPP: functions as programs
def _from_function(row: dict, where: str) -> dict | None:
    """`assert f(2, [1, 3]) == [2, 6]` becomes the input "2\\n1 3\\n" and the output "2 6\\n"."""
    question, inputs, outputs, readers = row.get("text") or row.get("prompt"), [], [], set()
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"--dataset {where} has no question (the column text).")
    if not row["test_list"]:
        raise UserError(f"--dataset {where} has no tests (the column test_list).")
    for line in row["test_list"]:
        try:
            compared = ast.parse(line.strip()).body[0].test  # f(...) == value
            name, arguments = compared.left.func.id, [ast.literal_eval(a) for a in compared.left.args]
            expected = ast.literal_eval(compared.comparators[0])
        except (AttributeError, SyntaxError, ValueError, TypeError, IndexError):
            return None
        if not isinstance(compared.ops[0], ast.Eq) or compared.left.keywords:
            return None
        if not all(_on_one_line(value) for value in (*arguments, expected)):
            return None
        inputs.append("".join(_line(value) for value in arguments))
        outputs.append(_line(expected))
        readers.add(f"print_result({name}({', '.join(_reader(value) for value in arguments)}))")
    if len(readers) > 1 or not all(output.strip() for output in outputs):
        return None  # types differ between the tests: no one way to read the input
    printer = "def print_result(r):\n    print(*r) if isinstance(r, (list, tuple)) else print(r)"
    code = row["code"].replace("\r\n", "\n")
    return {
        "question": f"{question.strip()} {READ_AND_PRINT}",
        "test_input": inputs,
        "test_output": outputs,
        "reference": f"{code}\n\n{printer}\n\n{readers.pop()}\n",
    }


def _on_one_line(value) -> bool:
    """A scalar, or a list of equally typed scalars that do not contain the separator."""
    if isinstance(value, (list, tuple)):
        words = all(not isinstance(v, str) or v.split() == [v] for v in value)
        return len(value) > 0 and len({type(v) for v in value}) == 1 and type(value[0]) in (int, float, str) and words
    return type(value) in (int, float, bool) or (type(value) is str and "\n" not in value)


def _line(value) -> str:
    return (" ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)) + "\n"


def _reader(value) -> str:
    """The expression that reads such a value back."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}(map({type(value[0]).__name__}, input().split()))"
    return {bool: 'input() == "True"', str: "input()"}.get(type(value), f"{type(value).__name__}(input())")
