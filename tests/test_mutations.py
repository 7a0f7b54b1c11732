"""The table of tests/mutate.py, which runs too long for the suite, fits the code as it is."""

import re

from conftest import ROOT
from mutate import mutations


def test_every_anchor_is_in_its_file_just_once_and_its_change_is_one():
    texts = {m["file"]: (ROOT / m["file"]).read_text() for m in mutations()}
    gone = [(m["file"], m["old"]) for m in mutations() if texts[m["file"]].count(m["old"]) != 1]
    assert gone == [] and len(texts) > 30
    assert all(m["old"] != m["new"] for m in mutations())


def test_the_tests_that_should_see_it_are_there():
    for test in {test for m in mutations() for test in m["tests"].split()}:
        file, _, name = test.partition("::")
        assert re.search(rf"def {name or 'test_'}", (ROOT / file).read_text()), test
