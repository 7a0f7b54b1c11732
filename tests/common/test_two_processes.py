"""Everything of common/ that several processes could do differently, in one start of torchrun."""

import json
import re
from pathlib import Path

import pytest
from conftest import run_script
from filelock import FileLock

SCRIPT = Path(__file__).parent / "two_processes.py"
CHECKS = re.findall(r"^def (check_\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def result(shared_folder, tmp_path_factory):
    """(exit code, output, errors); started once, whichever worker asks first.

    Two real processes on the CPU (gloo). `accelerate launch --cpu --num_processes 2` starts them
    through MPI only; without an MPI hostfile it runs one process.
    """
    kept = shared_folder / "two_processes.json"
    with FileLock(kept.with_suffix(".lock")):
        if not kept.exists():
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ACCELERATE_USE_CPU", "true")
                done = run_script(*launcher, SCRIPT, tmp_path_factory.mktemp("two"))
            kept.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
    return json.loads(kept.read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_in_two_processes(result, check):
    assert f"holds: {check}\n" in result[1], "see the last test's error"


def test_nothing_else_went_wrong(result):
    assert result[0] == 0 and len(CHECKS) == 8, result[2]
