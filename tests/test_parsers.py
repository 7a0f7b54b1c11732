"""Every line of tests/data/texts.txt: what a parser makes of a text that a model may write."""

import importlib

from common.tasks.functions import LONGEST, call_each

import pytest
from conftest import ROOT

PLUS = "def f(x):\n return (x+3)%100"


def V(score: float) -> float:
    return min(1.0, max(0.0, (score - 1) / 9))


def lines() -> list:
    found, section = [], ""
    for line in (ROOT / "tests" / "data" / "texts.txt").read_text().splitlines():
        section = line[3:] if line.startswith("== ") else section
        if section and " | " in line and line[0] != "#":
            found.append(pytest.param(section, *line.rsplit(" | ", 1), id=f"{section} {line}"[:90]))
    return found


@pytest.mark.parametrize("function, text, wanted", lines())
def test_what_is_read_in_a_text(function, text, wanted, sandbox, monkeypatch):
    monkeypatch.setattr("common.tasks.answers.SECONDS", 600)  # however busy the machine is
    wanted = eval(wanted, {"V": V})
    arguments = eval(f"({text},)", {"PLUS": PLUS, "LONGEST": LONGEST})
    if function == "call":
        assert call_each(sandbox, [[(*arguments, "3")]], 0.5) == [[wanted]]
        return
    module, _, name = function.rpartition(".")
    parse = getattr(importlib.import_module(module), name)
    if isinstance(wanted, type):
        with pytest.raises(wanted):
            parse(*arguments)
        return
    found = parse(*arguments)
    assert type(found) is type(wanted)
    assert found == (pytest.approx(wanted, abs=1e-12) if isinstance(wanted, float) else wanted)
