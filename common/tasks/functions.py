"""Calls of Python functions: how they are read and run. And functions with inputs, for azr.py: how
rows {question, program, inputs, message} are loaded. The question is the program's `bare` form,
which keeps training and held-out rows apart.

A program of azr.py defines `f`. Inputs and results travel as literals (`3, [1, 'a']`) and are
compared by value; nothing that a model wrote is ever evaluated in this process. The released code
of Absolute Zero differs. It puts a solver's input into `gold == f(INPUT)` and evaluates that, so
the input `3) or (True` is right for every program. It compares a solver's output with `==`, so an
object that is equal to everything is also right.
"""

import ast
import random
import re
from contextlib import suppress

from common.core.errors import UserError, say
from common.sandbox import Sandbox
from common.tasks.math import UNPARSABLE, as_text, read_rows, split_held_out
from common.tiny import programs

LONGEST = 1000
"""characters of an input or a result; if it is longer, it is not read (the released code cuts it)
"""
BANNED = set(
    "bcrypt calendar datetime hashlib hmac logging multiprocessing os pebble random subprocess sys "
    "threading time".split()
)
"""modules that a proposed program may not import: results would depend on more than the inputs"""

# A program can write what it likes, and it can see the calls; but it cannot see what they should
# return, which never enters its process. So all that it can say is what each call returns.
HARNESS = """import ast, io, sys
calls, out = ast.literal_eval(sys.stdin.read()), sys.stdout
sys.stdout = io.StringIO()
code = compile({program!r}, "program", "exec")
for name, arguments in calls:
    try:
        space = {{"__name__": "program"}}
        exec(code, space)
        value = space[name](*arguments)
        if isinstance(value, dict):
            value = dict(value)  # a Counter equals the dict with its contents
        text = repr(value).replace("\\n", " ")
        text = text if text.encode() and len(text) <= {longest} else ""
    except BaseException:
        text = ""
    out.write(text + "\\n")
    out.flush()
"""


# ------------------------------------------------------------------ values
def read_value(text: str):
    """Returns the value of a literal. Raises ValueError for everything else, such as `1 + 1`,
    `inf`, or a literal of more than LONGEST characters.

    >>> read_value(" [1, 'a', None] ")
    [1, 'a', None]
    """
    if len(text) > LONGEST:
        raise ValueError("too long")
    try:
        value = ast.literal_eval(text.strip())
        ast.literal_eval(repr(value))  # 1e999 is a literal, but its value inf is not
    except (TypeError, *UNPARSABLE) as error:
        raise ValueError(str(error)) from None
    return value


def read_call(text: str) -> tuple[str, tuple]:
    """Returns the function's name and the arguments of a call, all of them literals. Raises
    ValueError for everything else: no argument, `f(*[1])`, `f(x=1)`, `f(g(1))`.

    >>> read_call("add(3, [1, 2])")
    ('add', (3, [1, 2]))
    """
    if len(text) > LONGEST:
        raise ValueError("too long")
    try:
        call = ast.parse(text, mode="eval").body
        whole = isinstance(call, ast.Call) and isinstance(call.func, ast.Name)  # not f(3)(4)
        if not whole or call.keywords or not call.args:
            raise ValueError("not one call with arguments")
        return call.func.id, tuple(read_value(ast.unparse(argument)) for argument in call.args)
    except UNPARSABLE as error:
        raise ValueError(str(error)) from None


def read_arguments(text: str) -> tuple:
    """Returns the arguments that stand between the brackets of `f(...)`, as `read_call` reads them.
    Raises ValueError for everything else, such as `3) or (True`.

    >>> read_arguments("3, [1, 2]")
    (3, [1, 2])
    """
    return read_call(f"f({text.strip()}\n)")[1]  # the line break ends a comment


def same_value(a: str, b: str) -> bool:
    """Whether two literals have equal values. A text that is not a literal equals nothing.

    >>> same_value("{1, 2}", "{2,1}"), same_value("'1'", "1"), same_value("inf", "inf")
    (True, False, False)
    """
    try:
        return bool(read_value(a) == read_value(b))
    except ValueError:
        return False


# ------------------------------------------------------------------ programs
def names_of(tree: ast.Module) -> list[str]:
    """Returns the names of functions and variables that a program defines at its top level."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return names


def with_f(program: str) -> str:
    """Returns a program whose last function is also called f, if it defines no f. Models name a
    function after what it does. A text that Python cannot parse stays as it is.

    >>> with_f("def add(a):\\n  return a+3")
    'def add(a):\\n  return a+3\\n\\nf = add'
    """
    try:
        tree = ast.parse(program)
    except UNPARSABLE:
        return program
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if not functions or "f" in names_of(tree):
        return program
    return f"{program}\n\nf = {functions[-1]}"


def is_program(text: str, banned: set = BANNED) -> bool:
    """Whether Python can parse the text, and it defines f at its top level and imports nothing
    banned.
    """
    try:
        tree = ast.parse(text)
    except UNPARSABLE:
        return False
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    return "f" in names_of(tree) and not imported & banned


def bare(program: str) -> str:
    """Returns the program without comments, without its layout, and with other names. Two programs
    with the same bare form are the same program. A text that Python cannot parse stays as it is.

    Functions, parameters and variables are numbered as they first occur. Names from elsewhere, such
    as `max` or `math`, stay, and so does `f`.

    >>> bare("def f(n):  # a comment\\n  total = n+3\\n  return total")
    'def f(v0):\\n    v1 = v0 + 3\\n    return v1'
    """
    try:
        return ast.unparse(_renamed(ast.parse(program)))
    except UNPARSABLE:
        return program


def _renamed(tree: ast.Module) -> ast.Module:
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    last = re.fullmatch(r"f = (\w+)", ast.unparse(tree.body[-1])) if functions else None
    entry = last[1] if last and last[1] in functions - {"f"} else None
    if entry:  # `def add ...; f = add` is the same as `def f ...`
        tree.body.pop()
    fields = {ast.FunctionDef: "name", ast.arg: "arg", ast.Name: "id"}
    names = [(node, fields[type(node)]) for node in ast.walk(tree) if type(node) in fields]
    numbers = {}
    for node, field in names:  # in the order of `walk`, which depends on the structure alone
        name, read = getattr(node, field), isinstance(getattr(node, "ctx", None), ast.Load)
        if not read and name not in ("f", entry):
            numbers.setdefault(name, f"v{len(numbers)}")
    for node, field in names:
        name = getattr(node, field)
        setattr(node, field, "f" if name == entry else numbers.get(name, name))
    return tree


# ------------------------------------------------------------------ running them
def call_each(
    sandbox: Sandbox, calls: list[list[tuple]], time_limit: float
) -> list[list[str | None]]:
    """Returns what f returns in each call, as a literal. It is None if the program fails, has no f,
    takes too long, or returns something that is not a literal. Equal calls are run once.

    Args:
        sandbox: where the programs run.
        calls: for each task its calls, (program, its arguments as text).
        time_limit: seconds for a call.
    """
    found = dict.fromkeys(call for of_one in calls for call in of_one)
    tried = {}  # calls whose arguments can be read
    for program, arguments in found:
        with suppress(ValueError):
            tried[program, arguments] = "f", read_arguments(arguments)
    # a process for each call: what f returns must not depend on the calls before
    alone = [(program, [call]) for (program, _), call in tried.items()]
    for call, (returned,) in zip(tried, run_calls(sandbox, alone, time_limit)):
        found[call] = returned
    return [[found[call] for call in of_one] for of_one in calls]


def run_calls(
    sandbox: Sandbox, programs: list[tuple[str, list[tuple[str, tuple]]]], time_limit: float
) -> list[list[str | None]]:
    """Returns for each program what its calls return, as literals; None as in `call_each`.

    All calls of a program run in one process, each with fresh arguments after a fresh run of the
    program's text. A call that ends the process, by its time for example, ends no other call.

    Args:
        sandbox: where the programs run.
        programs: for each its text and its calls, (name of the function, arguments).
        time_limit: seconds for a call.
    """
    found = [[None] * len(calls) for _, calls in programs]
    waiting = [(i, 0) for i, (_, calls) in enumerate(programs) if calls]  # (program, next call)
    while waiting:
        sources = [HARNESS.format(program=programs[i][0], longest=LONGEST) for i, _ in waiting]
        inputs = [repr(programs[i][1][k:]) for i, k in waiting]
        most = max(len(programs[i][1]) - k for i, k in waiting)
        limits = {"time_limit": time_limit, "output_limit": 4 * (LONGEST + 1) * most}
        results, begun, waiting = sandbox.run(sources, inputs, **limits), waiting, []
        for (i, k), result in zip(begun, results):
            # after the last line break stands what was cut
            lines = result.output.decode(errors="replace").split("\n")[:-1][: len(found[i]) - k]
            for number, line in enumerate(lines, k):
                with suppress(ValueError):
                    read_value(line)
                    found[i][number] = line
            # the call that ended the process has no result if it had all of the time to itself
            following = k + max(1, len(lines))
            if following < len(found[i]):
                waiting.append((i, following))
    return found


# ------------------------------------------------------------------ where they come from
def load_functions(
    dataset: str,
    train_count: int,
    held_out_count: int,
    inputs: int,
    seed: int,
    file: str | None = None,
) -> tuple[list[dict], list[dict]]:
    """Returns (training rows, held-out rows), each {"question": str, "program": str, "inputs":
    [str], "message": str}. A program is in a single part, whatever its names and comments are. The
    other arguments, and the errors, are the same as in `common.tasks.math.load_questions`.

    Args:
        dataset: "tiny" (functions of a number, from common/tiny), or a .jsonl file or hub data set
            with the columns program and inputs (a list of texts such as "3, [1, 2]"), which may
            have a column message; or with MBPP's columns code, test_list and text.
        inputs: how many inputs a function of "tiny" has. Programs of a data set that have fewer
            inputs are counted in a printed line.
    """
    if dataset == "tiny":
        train = programs.sample_functions(seed + 1, train_count, held_out=False)
        held_out = programs.sample_functions(0, held_out_count, held_out=True)
        return [_tiny_row(o, inputs) for o in train], [_tiny_row(o, inputs) for o in held_out]
    parts = [[_read_row(row, where) for where, row in part] for part in read_rows(dataset, file)]
    if left_out := sum(row is None for part in parts for row in part):
        say(f"--dataset {dataset}: {left_out} programs have no plain calls as tests; left out.")
    rows, held_out = ([row for row in part if row] for part in parts)
    rows, held_out = split_held_out(
        rows, held_out, dataset, train_count, held_out_count, seed, file
    )
    counts = [len(row["inputs"]) for row in rows + held_out]
    few = [count for count in counts if count < inputs]
    if few:
        reason = f"fewer than {inputs} inputs, {min(few)} at least, and are tried on those alone."
        say(f"--dataset {dataset}: {len(few)} of {len(counts)} programs have {reason}")
    return rows, held_out


def _tiny_row(function: str, count: int) -> dict:
    program = function.removeprefix("```python\n").removesuffix("\n```")
    numbers = random.Random(function).sample(range(programs.MODULO), count)
    hint = programs.message(programs.function_operations(program))
    inputs = [str(x) for x in numbers]
    return {"question": bare(program), "program": program, "inputs": inputs, "message": hint}


def _read_row(row: dict, where: str) -> dict | None:
    """Returns a row, or None for a row of MBPP whose tests are not plain calls with literals."""
    program = as_text(row.get("program") or row.get("code"), where, "program", ("program", "code"))
    message = as_text(row.get("message") or row.get("text"), where, "message").strip()
    if "test_list" in row and "inputs" not in row:
        return _from_mbpp(program, row["test_list"], message, where)
    inputs = row.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise UserError(f"{where} has no inputs (the column inputs, a list of texts).")
    for number, text in enumerate(inputs, start=1):
        try:
            read_arguments(text if isinstance(text, str) else "")
        except ValueError:
            reason = "is not a text of literals, such as 3, [1, 2]"
            raise UserError(f"{where}: input {number} {reason}.") from None
    return {"question": bare(program), "program": program, "inputs": inputs, "message": message}


def _from_mbpp(program: str, tests, message: str, where: str) -> dict | None:
    """Returns a row of MBPP. Its test `assert add(2, 3) == 5` gives the input "2, 3" of f = add."""
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise UserError(f"{where}: its test_list is not a list of texts.")
    inputs, names = [], set()
    for test in tests:
        try:
            call = ast.parse(test.strip()).body[0].test.left
            names.add(call.func.id)
            inputs.append(", ".join(ast.unparse(part) for part in [*call.args, *call.keywords]))
            read_arguments(inputs[-1])
        except (AttributeError, IndexError, *UNPARSABLE):
            return None
    if len(names) != 1:
        return None
    program = f"{program.replace(chr(13), '').rstrip()}\n\nf = {names.pop()}"
    return {"question": bare(program), "program": program, "inputs": inputs, "message": message}
