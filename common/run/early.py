"""--help, a wrong argument and a wrong data file are answered before torch, transformers and TRL
are imported, which takes more than ten seconds.

`common/__init__.py` calls `answer` when a script is run. It executes those statements of the script
that its `tyro.cli(Args)` and its `load` need, and none of the others; after that the script is run
from its first line to its last one, whether `answer` has been there or not.
"""

import ast
import contextlib
import io
import sys
from pathlib import Path
from types import ModuleType

from common.core.errors import NOBODY, UserError

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)


def answer(script: ModuleType):
    """Ends the process where the script's arguments or its .jsonl files are wrong, and with --help.

    script: `__main__`. Whatever is not a script with `tyro.cli` of one of its classes is left
    alone, and so is every other error, which the run itself will meet.
    """
    with contextlib.suppress(Exception):
        tree = ast.parse(Path(script.__file__).read_bytes())
        ask, load = asked(tree), loaded(tree)
        space = {**vars(script)}
        try:
            args = evaluate(ask, tree, script.__file__, space)
            if load and not args.dry_run and any(map(is_file, (args.dataset, args.held_out))):
                with contextlib.redirect_stdout(io.StringIO()):  # the run itself will say it
                    evaluate(load, tree, script.__file__, space)(args)
        except BrokenPipeError:  # `--help | head` has seen enough
            sys.stdout = NOBODY
            sys.exit()
        except UserError as error:
            if sys.stderr:  # None: the shell has closed it
                print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(2)


def asked(tree: ast.Module) -> ast.expr:
    """The call `tyro.cli(Args)`, of a class of this file: a function would be run by it.

    Raises:
        StopIteration: there is none.
    """
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "tyro.cli"
        and classes & {ast.unparse(argument) for argument in node.args[:1]}
    )


def loaded(tree: ast.Module) -> ast.expr | None:
    """What `launch` is given as `load`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    launches = [call for call in calls if ast.unparse(call.func) == "launch"]
    return next((k.value for call in launches for k in call.keywords if k.arg == "load"), None)


def evaluate(expression: ast.expr, tree: ast.Module, file: str, space: dict):
    """The value of an expression, after the definitions at the top level that it needs."""
    definitions, needed, names = tree.body, [], names_in(expression)
    while found := [
        statement
        for statement in definitions
        if isinstance(statement, DEFINITIONS) and names & defined(statement)
    ]:
        needed += found
        definitions = [statement for statement in definitions if statement not in found]
        names = set.union(*map(names_in, found))
    body = sorted(needed, key=lambda statement: statement.lineno)
    exec(compile(ast.Module(body, []), file, "exec"), space)
    return eval(compile(ast.Expression(expression), file, "eval"), space)


def defined(statement: ast.stmt) -> set[str]:
    """The names that a definition gives to something."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.split(".")[0] for alias in statement.names}
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    return names_in(statement, ast.Store)


def names_in(node: ast.AST, context: type = ast.Load) -> set[str]:
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, context)}


def is_file(dataset: str | None) -> bool:
    return str(dataset).endswith((".json", ".jsonl"))
