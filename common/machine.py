"""What this machine cannot run, in one sentence, before anything is loaded."""

import os
import shutil
from pathlib import Path

from common.errors import UserError
from common.tiny import MODELS

import torch

DRIVER = Path("/proc/driver/nvidia/version")


def check_machine(model: str):
    """Raises UserError for what would otherwise fail minutes later, or run on the wrong device.

    model: the argument --model; the embedded ones run on any CPU.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not torch.cuda.is_available():
        if model not in MODELS and DRIVER.exists() and not hidden:
            raise UserError(
                f"--model {model}: this machine has an NVIDIA driver that torch {torch.__version__}"
                f" cannot use ({_reason()}), and would run in float32 on the CPU. To do that on "
                f"purpose, put CUDA_VISIBLE_DEVICES= in front of the command."
            )
        return
    gpus, launched = torch.cuda.device_count(), "WORLD_SIZE" in os.environ
    if gpus > 1 and not launched:
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


def _reason() -> str:
    if torch.version.cuda is None:
        return "it is a build for CPUs"
    return f"it was built for CUDA {torch.version.cuda}, for which the driver may be too old"
