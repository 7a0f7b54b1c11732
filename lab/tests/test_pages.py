"""The pages' tables are those of the measured runs, and the runs keep what the pages promise."""

import random
import re
from collections import defaultdict

from common.tasks import verdicts
from lab import ROOT
from lab.make.demonstrations import PARTS
from lab.runs import evidence, pages


def test_tables_are_those_of_the_measured_runs():
    """Generated, never typed: `python -m lab.runs.pages` writes them."""
    made = pages.blocks()
    for (page, mark), text in made.items():
        found = re.findall(rf"<!-- {mark} -->\n(.*?)<!-- end -->", (ROOT / page).read_text(), re.S)
        assert found == [text], f"{page}: {mark} is not what was measured"
    for page in {page for page, _ in made}:  # and there is no other mark, which nothing fills
        marks = re.findall(r"^<!-- (?!end)([^>]*) -->$", (ROOT / page).read_text(), re.MULTILINE)
        assert sorted(marks) == sorted(mark for other, mark in made if other == page)


def test_the_measured_runs_keep_the_promise():
    """Every default in five minutes; tango.py's three seeds get better, and its verifier picks."""
    runs = evidence.read("defaults")["runs"]
    # the default of few_labels.py is the front page's row and takes about ten
    scripts = evidence.EXPERIMENTS["defaults"].variants.keys()
    assert {run["variant"] for run in runs} == scripts - {"few_labels"}
    assert all(run["wall_seconds"] <= 300 for run in runs)
    for run in evidence.read("tango_default")["runs"]:
        first, last = run["evaluations"][0], run["evaluations"][-1]
        assert last["eval/generator/accuracy"] >= first["eval/generator/accuracy"] + 0.1
        assert last["eval/co/best_of_4"] > last["eval/co/mean_of_same"]


def test_the_readers_of_the_table_read_what_the_small_models_were_taught():
    """Every demonstration can be read, and every value that the page names occurs: with one fewer
    what is well formed would be refused.
    """
    page = (ROOT / "docs" / "test-bed.md").read_text()
    rows = re.findall(r"^\| .*`([^`|]+)` \| .* \| `((?:read|final)_[^`]+)`", page, re.MULTILINE)
    shown = {ending: call for ending, call in rows}
    rng, values, read = random.Random(0), defaultdict(set), {**vars(verdicts)}
    for user, text in (part(rng, 1) for part in PARTS for _ in range(100)):
        ending = re.sub(r"\d+ steps", "3 steps", user.split("\n")[-1])
        if call := shown.get(ending):
            S = user.partition("Solution:\n")[2]
            found = eval(call, read | {"text": text, "S": S})
            assert found is not None, (call, text)
            values[ending].add(getattr(found, "score", found))
            if "Defects" in text and hasattr(found, "defects"):
                values["defects"].add(len(found.defects) > 1)
    of = {ending: re.search(r", (\(.*\))\)$", call) for ending, call in shown.items()}
    wanted = {ending: {*eval(its[1])} if its else {True, False} for ending, its in of.items()}
    assert len(wanted) == 6 and values == wanted | {"defects": {True, False}}
