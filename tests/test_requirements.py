"""What is imported is required: a library that only came with another one would go with it."""

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from conftest import ROOT

ELSEWHERE = {"triton", "tensorboard"}
"""With the CUDA build of torch, whose version is torch's choice; and a tracker, if there is one."""
FOLDERS = [
    (["*.py", "common/**/*.py", "tests/**/*.py"], ["requirements.txt"]),
    (["lab/**/*.py"], ["requirements.txt", "lab/requirements.txt"]),
]


def imported(path: Path) -> set[str]:
    """The top-level modules that a file imports, anywhere in it."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    names = [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
    names += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
    return {name.split(".")[0] for name in names}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("patterns, files", FOLDERS)
def test_what_is_imported_is_required(patterns, files):
    lines = [line for file in files for line in (ROOT / file).read_text().splitlines()]
    required = {normal(line.split("==")[0]) for line in lines if "==" in line.split("#")[0]}
    ours = {"common", "lab", *(path.stem for path in ROOT.glob("*.py"))}
    ours |= {path.stem for path in (ROOT / "tests").rglob("*.py")} | {"conftest"}
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    used = set.union(*map(imported, paths)) - ours - ELSEWHERE - sys.stdlib_module_names
    known = packages_distributions()  # such as yaml: PyYAML
    missing = {name for name in used if not {*map(normal, known.get(name, [name]))} & required}
    assert missing == set() and {"torch", "trl"} <= used
