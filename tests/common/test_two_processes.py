"""Everything of common/ that several processes could do differently, in one start."""

import re
from pathlib import Path

import pytest
import warm
from filelock import FileLock

SCRIPT = Path(__file__).parent / "two_processes.py"
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def result(shared_folder):
    """(exit code, output, errors) of two real processes on the CPU (gloo); started once, whichever
    worker asks first.
    """
    out, err, ended = (shared_folder / f"two_processes.{name}" for name in ("out", "err", "ended"))
    with FileLock(shared_folder / "two_processes.lock"):
        if not ended.exists():
            folder = shared_folder / "two_processes"
            folder.mkdir()
            ended.write_text(str(warm.start_two(SCRIPT, [folder], out, err)))
    return int(ended.read_text()), out.read_text(), err.read_text()


@pytest.mark.parametrize("check", CHECKS)
def test_in_two_processes(result, check):
    assert f"holds: {check}\n" in result[1], "see the last test's error"


def test_nothing_else_went_wrong(result):
    assert result[0] == 0 and CHECKS, result[2]
