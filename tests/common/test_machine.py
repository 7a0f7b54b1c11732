"""Machines that cannot run what was asked for end in a sentence, before anything is loaded; and
what a container or a batch system leaves of a machine.
"""

import math
import os

from common.core.errors import UserError
from common.run import limits, machine
from common.run.memory import available
from common.sandbox import Sandbox

import pytest
import torch

REAL = "Qwen/Qwen2.5-1.5B-Instruct"


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """gpus(2): as if so many were visible; 0: none, and no driver."""
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "none")
    for name in ("WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")

    def visible(count: int):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return visible


def test_several_gpus_and_one_process(gpus, monkeypatch):
    """No GPU is fine, and so is one."""
    for count in (0, 1):
        gpus(count)
        machine.check_machine(REAL)
    gpus(3)
    with pytest.raises(UserError, match="3 GPUs are visible.*CUDA_VISIBLE_DEVICES=0.*processes 3"):
        machine.check_machine(REAL)
    machine.check_machine("tiny")  # on the CPU
    monkeypatch.setenv("WORLD_SIZE", "3")
    machine.check_machine(REAL)


@pytest.mark.parametrize("cuda, reason", [("13.0", "built for CUDA 13.0"), (None, "for CPUs")])
def test_a_driver_that_torch_cannot_use(gpus, monkeypatch, tmp_path, cuda, reason):
    gpus(0)
    monkeypatch.setattr(machine, "DRIVER", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(UserError, match=f"{reason}.*float32 on the CPU"):
        machine.check_machine(REAL)
    machine.check_machine("tiny")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine.check_machine(REAL)  # on purpose


def test_no_c_compiler(gpus, monkeypatch):
    gpus(1)
    machine.check_machine(REAL)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    machine.check_machine("tiny")
    with pytest.raises(UserError, match="no C compiler.*gcc"):
        machine.check_machine(REAL)


# ------------------------------------------------------------------ a part of a machine
V1, V2 = "9:cpuset:/\n4:memory:/a/b\n1:cpu,cpuacct:/a\n0::/\n", "0::/a/b\n"
HUGE = "9223372036854771712"  # what version 1 says where nothing limits the memory


@pytest.mark.parametrize(
    "own, files, memory, cores",
    [
        ("", {}, math.inf, 64),
        (V2, {"a/b/memory.max": "max", "a/b/cpu.max": "max 100000"}, math.inf, 64),
        (V2, {"a/b/memory.max": "3000", "a/b/cpu.max": "150000 100000"}, 3000, 2),
        (V2, {"a/b/memory.max": "3000", "a/memory.max": "2000", "cpu.max": "9 10"}, 2000, 1),
        (V2, {"memory.max": "1000", "other/memory.max": "1"}, 1000, 64),
        (V1, {"memory/a/b/memory.limit_in_bytes": HUGE, "cpu/a/cpu.cfs_quota_us": "-1",
              "cpu/a/cpu.cfs_period_us": "100000"}, math.inf, 64),
        (V1, {"memory/memory.limit_in_bytes": "500", "memory/a/b/memory.limit_in_bytes": HUGE,
              "cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 500, 3),
    ],
)  # fmt: skip
def test_the_least_limit_of_all_control_groups_holds(
    monkeypatch, tmp_path, own, files, memory, cores
):
    """An affinity of 64 cores; groups as versions 1 and 2 show them, seen from inside or outside of
    a container.
    """
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(limits, "GROUPS", tmp_path)
    monkeypatch.setattr(limits, "OWN", tmp_path / ("own" if own else "none"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available(gpu=False)[1] == limits.memory() == min(memory, machine)
    assert limits.cores() == cores


def test_programs_run_on_the_cores_of_this_process(monkeypatch, tmp_path):
    """Not on all of the machine's: with too many workers right programs run out of time."""
    monkeypatch.setattr(limits, "OWN", tmp_path / "none")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    for beside, workers in ((None, 2), ("2", 1), ("4", 1)):
        if beside:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", beside)
        with Sandbox(unsafe=True) as sandbox:
            assert len(sandbox.workers) == workers
