"""Machines that cannot run what was asked for end in a sentence, before anything is loaded."""

from common.core.errors import UserError
from common.run import machine

import pytest
import torch

REAL = "Qwen/Qwen2.5-1.5B-Instruct"


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """gpus(2): as if so many were visible; 0: none, and no driver."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda *_: str(tmp_path))
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


def test_no_c_compiler_and_no_header_of_python(gpus, monkeypatch, tmp_path):
    gpus(1)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="no C compiler.*gcc"):
        patch.setattr(machine.shutil, "which", lambda name: None)
        machine.check_machine("tiny")
        machine.check_machine(REAL)
    (tmp_path / "Python.h").unlink()
    with pytest.raises(UserError, match=r"has no Python\.h.*python3-dev"):
        machine.check_machine(REAL)
    (tmp_path / "posix_prefix").mkdir()
    (tmp_path / "posix_prefix" / "Python.h").touch()
    schemes = {("include",): tmp_path, ("include", "posix_prefix"): tmp_path / "posix_prefix"}
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda *scheme: schemes[scheme])
    machine.check_machine(REAL)
