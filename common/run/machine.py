"""On which device a model runs. What this machine cannot run is refused before it is loaded."""

import os
import shutil
from pathlib import Path

from common.core.errors import UserError
from common.tiny import MODELS

import torch

DRIVER = Path("/proc/driver/nvidia/version")


def on_gpu(model: str) -> bool:
    """Whether this model, the argument --model, runs on a GPU. A small model runs on the CPU in
    float32 on every machine: its published figures are from there, and a GPU would wait for Python
    at each of its tokens. Any other model runs on a GPU if there is one.
    """
    return torch.cuda.is_available() and model not in MODELS


def check_machine(model: str):
    """Raises UserError if this model would fail minutes later, or run on the wrong device.

    model: the argument --model.
    """
    if model in MODELS:
        return
    if not on_gpu(model):
        if DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            cuda = torch.version.cuda
            built = f"was built for CUDA {cuda}, for which the driver may be too old"
            reason = built if cuda else "is a build for CPUs"
            raise UserError(
                f"--model {model}: this machine has an NVIDIA driver that torch {torch.__version__}"
                f" cannot use (it {reason}), and would run in float32 on the CPU. To do that on "
                f"purpose, put CUDA_VISIBLE_DEVICES= in front of the command."
            )
        return
    gpus = torch.cuda.device_count()
    if gpus > 1 and "WORLD_SIZE" not in os.environ:
        raise UserError(
            f"{gpus} GPUs are visible, and this is one process. CUDA_VISIBLE_DEVICES=0 in front of "
            f"the command takes one of them; accelerate launch --multi_gpu --num_processes {gpus} "
            f"SCRIPT takes all."
        )
    if not any(map(shutil.which, [os.environ.get("CC") or "cc", "gcc", "clang"])):
        raise UserError(
            "no C compiler was found (cc, gcc or clang), and Triton needs one for its kernels; "
            "install gcc, or set CC."
        )
