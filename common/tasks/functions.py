"""Python functions with inputs and what they return, for azr.py: rows {program, inputs, message}.

A program defines `f`. Inputs and results travel as literals (`3, [1, 'a']`) and are compared by
value; nothing that a model wrote is ever evaluated in this process. The released code of Absolute
Zero puts a solver's input into `gold == f(INPUT)` and evaluates that, where `3) or (True` is right
for every program, and compares a solver's output with `==`, where an object that is equal to
everything is right, too.
"""

import ast
import random

from common.errors import UserError
from common.sandbox import Sandbox, Status
from common.tasks.math import as_text, read_rows, split
from common.tiny import tasks

LONGEST = 1000
"""characters of an input or a result; a longer one is none (the released code cuts it in two)"""

# What stands in `program` cannot reach past its own quotes, and what it prints is not its result.
HARNESS = """import ast, io, sys
program, given = {program!r}, ast.literal_eval(sys.stdin.read())
out, sys.stdout = sys.stdout, io.StringIO()
space = {{"__name__": "program"}}
exec(compile(program, "program", "exec"), space)
out.write(repr(space["f"](*given)))
"""


# ------------------------------------------------------------------ values
def read_value(text: str):
    """The value of a literal. Raises ValueError for everything else, such as `1 + 1`, `inf`, or a
    literal of more than LONGEST characters.

    >>> read_value(" [1, 'a', None] ")
    [1, 'a', None]
    """
    if len(text) > LONGEST:
        raise ValueError("too long")
    try:
        value = ast.literal_eval(text.strip())
        ast.literal_eval(repr(value))  # 1e999 is a literal, but inf is none
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None
    return value


def read_arguments(text: str) -> tuple:
    """The arguments that stand between the brackets of `f(...)`, all of them literals.

    Raises ValueError for everything else: none at all, `3) or (True`, `*[1]`, `x=1`.

    >>> read_arguments("3, [1, 2]")
    (3, [1, 2])
    """
    if len(text) > LONGEST:
        raise ValueError("too long")
    try:
        # the line break ends a comment
        call = ast.parse(f"f({text.strip()}\n)", mode="eval").body
        whole = isinstance(call, ast.Call) and isinstance(call.func, ast.Name)  # not f(3)(4)
        if not whole or call.keywords or not call.args:
            raise ValueError("not the arguments of one call")
        return tuple(read_value(ast.unparse(argument)) for argument in call.args)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def same_value(a: str, b: str) -> bool:
    """Whether two literals have equal values; what is no literal equals nothing.

    >>> same_value("{1, 2}", "{2,1}"), same_value("'1'", "1"), same_value("inf", "inf")
    (True, False, False)
    """
    try:
        return bool(read_value(a) == read_value(b))
    except ValueError:
        return False


# ------------------------------------------------------------------ running them
def call_all(sandbox: Sandbox, calls: list[tuple], time_limit: float) -> list[str | None]:
    """calls: (program, its arguments as text) -> what f returns, as a literal.

    None: the program fails, has no f, takes too long, or returns what is no literal. A call that
    occurs twice is run twice, so that a program of two minds can be found out.
    """
    found: list[str | None] = [None] * len(calls)
    sources, inputs, places = [], [], []
    for i, (program, arguments) in enumerate(calls):
        try:
            inputs.append(repr(read_arguments(arguments)))
        except ValueError:
            continue
        sources.append(HARNESS.format(program=program))
        places.append(i)
    limits = {"time_limit": time_limit, "output_limit": 4 * LONGEST}
    for i, result in zip(places, sandbox.run(sources, inputs, **limits)):
        if result.status is Status.OK:
            try:
                text = result.output.decode()
                read_value(text)
                found[i] = text
            except ValueError:  # no literal, or no text
                pass
    return found


# ------------------------------------------------------------------ where they come from
def load_functions(
    dataset: str, train_count: int, held_out_count: int, inputs: int, seed: int
) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows), each {"program": str, "inputs": [str], "message": str}.

    Args:
        dataset: "tiny" (embedded functions of one number), or a .jsonl file or hub data set with
            the columns program and inputs (a list of texts such as "3, [1, 2]") and, if there is
            one, message; or with MBPP's columns code, test_list and text.
        train_count, held_out_count: at most so many rows.
        inputs: of an embedded function.
        seed: as in `common.tasks.math.load_questions`.

    Raises:
        UserError: see there.
    """
    if dataset == "tiny":
        train = tasks.sample_functions(seed + 1, train_count, held_out=False)
        held_out = tasks.sample_functions(0, held_out_count, held_out=True)
        return [_tiny_row(o, inputs) for o in train], [_tiny_row(o, inputs) for o in held_out]
    if dataset in tasks.LEVELS:
        raise UserError(f"--dataset {dataset}: functions have one level only, tiny.")
    parts = [[_read_row(row, where) for where, row in part] for part in read_rows(dataset)]
    rows, held_out = split(*([row for row in part if row] for part in parts), dataset)
    random.Random(seed).shuffle(rows)
    random.Random(0).shuffle(held_out)
    return rows[:train_count], held_out[:held_out_count]


def _tiny_row(function: str, count: int) -> dict:
    program = function.removeprefix("```python\n").removesuffix("\n```")
    numbers = random.Random(function).sample(range(tasks.MODULO), count)
    hint = tasks.message(tasks.function_operations(program))
    inputs = [str(x) for x in numbers]
    return {"question": program, "program": program, "inputs": inputs, "message": hint}


def _read_row(row: dict, where: str) -> dict | None:
    """None: a row of MBPP whose tests are not plain calls with literals."""
    program = as_text(row.get("program") or row.get("code"), where, "program", ("program", "code"))
    message = as_text(row.get("message") or row.get("text"), where, "message").strip()
    if "test_list" in row and "inputs" not in row:
        return _from_mbpp(program, row["test_list"], message, where)
    inputs = row.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise UserError(f"--dataset {where} has no inputs (the column inputs, a list of texts).")
    for number, text in enumerate(inputs, start=1):
        try:
            read_arguments(text if isinstance(text, str) else "")
        except ValueError:
            reason = "is not a text of literals, such as 3, [1, 2]"
            raise UserError(f"--dataset {where}: input {number} {reason}.") from None
    return {"question": program, "program": program, "inputs": inputs, "message": message}


def _from_mbpp(program: str, tests, message: str, where: str) -> dict | None:
    """`assert add(2, 3) == 5` gives the input "2, 3" of f = add."""
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise UserError(f"--dataset {where}: its test_list is not a list of texts.")
    inputs, names = [], set()
    for test in tests:
        try:
            call = ast.parse(test.strip()).body[0].test.left
            names.add(call.func.id)
            inputs.append(", ".join(ast.unparse(argument) for argument in call.args))
            read_arguments(inputs[-1])
        except (AttributeError, IndexError, SyntaxError, ValueError, RecursionError, MemoryError):
            return None
    if len(names) != 1:
        return None
    program = f"{program.replace(chr(13), '').rstrip()}\n\nf = {names.pop()}"
    return {"question": program, "program": program, "inputs": inputs, "message": message}
