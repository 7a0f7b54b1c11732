"""The README's first screen, and the README's promises against what was measured.

Its links, functions, metrics, other commands and generated tables are tested in test_docs.py.
"""

import json
import re

import evidence
from conftest import ROOT, SCRIPTS

README = (ROOT / "README.md").read_text()


def test_the_first_screen_has_exactly_two_commands():
    first = README[: README.index("## ")]
    blocks = re.findall(r"```\n(.*?)\n```", first, re.DOTALL)
    install = "pip install -r requirements.txt"
    assert blocks == [f"{install} && python tango.py", f"{install} && pytest"]


def test_it_can_be_read_in_five_minutes():
    assert len(README.split()) <= 900


def test_the_quoted_lines_are_those_of_the_code():
    """The generator's step and the loss, as they stand in the two files that they are said to be
    in, in their order; lines may have been left out.
    """
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    sources = [(ROOT / name).read_text() for name in ("tango.py", "common/cotrainer.py")]
    for part, source in zip(block.split("\n\n"), sources, strict=True):
        for line in part.strip().splitlines():
            found = re.search(rf"^ *{re.escape(line.strip())}$", source, re.MULTILINE)
            assert found, line
            source = source[found.end() :]


def test_the_notebook_is_kept_without_outputs():
    """CI runs it; here it is only looked at: every cell is Python, or a command of the README."""
    cells = json.loads((ROOT / "notebooks" / "tango.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    old = re.search(r"OLD = (\".*\")", "".join("".join(cell["source"]) for cell in code))[1]
    assert (ROOT / "tango.py").read_text().count(json.loads(old)) == 1


def test_every_default_keeps_its_five_minutes():
    runs = evidence.read("defaults")["runs"]
    assert {f"{run['variant']}.py" for run in runs} == set(SCRIPTS)
    assert all(run["wall_seconds"] <= 300 for run in runs)


def test_the_measured_runs_keep_the_promise():
    """Five minutes or less; the generator up by at least 10 points, greedy by 25; the solution that
    the verifier picks better than the mean of those it picks from; on four samples of at least 250
    held-out questions, for each of three random seeds.
    """
    runs = evidence.read("tango_default")["runs"]
    assert {0, 1, 2} <= {run["seed"] for run in runs}
    for run in runs:
        first, last = run["evaluations"][0], run["evaluations"][-1]
        assert run["wall_seconds"] <= 300 and run["questions"] >= 250
        for key, least in (("eval/generator/accuracy", 0.1), ("eval/generator/greedy", 0.25)):
            assert last[key] - first[key] >= least
        assert last["eval/co/best_of_4"] > last["eval/co/mean_of_same"]
