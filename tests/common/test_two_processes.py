"""Everything of common/ that several processes could do differently, in one start of torchrun."""

import re
from pathlib import Path

import pytest
from conftest import run_two_processes

SCRIPT = Path(__file__).parent / "two_processes.py"
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def result(shared_folder, tmp_path_factory):
    return run_two_processes(shared_folder, SCRIPT, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("check", CHECKS)
def test_in_two_processes(result, check):
    assert f"holds: {check}\n" in result.stdout, "see the last test's error"


def test_nothing_else_went_wrong(result):
    assert result.returncode == 0 and len(CHECKS) == 8, result.stderr
