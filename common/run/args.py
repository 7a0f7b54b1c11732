"""The arguments that all scripts share, and TRL's configuration made from them.

A script's `Args` inherits `RunArgs` and adds the paper's own; its `check` refuses what cannot go
together. Where another default fits a paper better, a script declares a field of `RunArgs` again.
The type of a field says its bounds: `steps: Count`, `alpha: Share`. `--help` shows one list.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_type_hints

from common.errors import UserError
from common.run.machine import on_gpu
from common.tiny import MODELS
from common.tiny.tasks import LEVELS

from transformers.integrations import get_available_reporting_integrations
from trl import GRPOConfig


# ------------------------------------------------------------------ types with bounds
class Bounds(NamedTuple):
    """Both included."""

    least: float = -math.inf
    most: float = math.inf


Count = Annotated[int, Bounds(1, 1_000_000)]
Several = Annotated[int, Bounds(1, 10_000)]  # of one question, solution or step
Tokens = Annotated[int, Bounds(1)]
CountOrZero = Annotated[int, Bounds(0)]  # 0 switches something off
Share = Annotated[float, Bounds(0, 1)]
Weight = Annotated[float, Bounds(0)]
Scale = Annotated[float, Bounds(1e-6)]  # of log-ratios: at 0 a loss has no gradient
GroupSize = Annotated[int, Bounds(2, 100_000)]  # rewards are compared within a group
Seconds = Annotated[float, Bounds(0.001, 3600)]


def per_model(tiny, real):
    """The default of an argument: `tiny` with an embedded model, `real` with any other."""

    class PerModel(float if isinstance(real, float) else int):
        for_tiny, for_real = tiny, real

        def __str__(self):  # what --help shows
            return f"{tiny} embedded, {real} real"

        def __hash__(self):  # tyro keeps types by their defaults, and would take this for its int
            return hash(str(self))

    return PerModel(tiny)


# ------------------------------------------------------------------ the arguments
@dataclass
class RunArgs:
    model: str = "tiny"
    """the embedded model, a hub id or a folder"""
    dataset: str = "tiny"
    """embedded questions: tiny, tiny-hard, tiny-long; a hub id (openai/gsm8k) or a .jsonl file with
    question and answer"""
    out: str | None = None
    """run folder, by default runs/SCRIPT-TIME-SEED; given again, the run resumes where it stopped
    """
    seed: Annotated[int, Bounds(0, 2**32 - 1)] = 0  # numpy's
    """random seed"""
    micro_batch: Count = per_model(tiny=32, real=8)
    """rows per forward and backward pass"""
    lora_rank: Annotated[int, Bounds(1, 4096)] = 16
    """rank of each LoRA adapter"""
    four_bit: bool = per_model(tiny=False, real="auto")
    """load the base in 4-bit NF4; works on a CPU too, slowly; auto: on a GPU that it would not fit
    otherwise"""
    rows_at_once: Count | None = None
    """most rows sampled at a time, which bounds the KV cache; by default 256 or what fits"""
    checkpointing: Literal["auto", "on", "off"] = "auto"
    """recompute activations in the backward pass: less memory, a third more work; auto: only where
    they do not fit"""
    plain: bool = False
    """sample and score by transformers, PEFT and autograd alone: slower, the same numbers but for
    rounding; to see whether a fast path is at fault"""
    dry_run: bool = False
    """print how much memory this needs, load nothing, and end"""
    eval_every: CountOrZero = 16
    """steps between evaluations on held-out questions; 0 = only first and last"""
    eval_questions: Count = per_model(tiny=256, real=128)
    """held-out questions"""
    eval_samples: Several = 4
    """completions per held-out question, of which accuracy is the mean"""
    save_every: Count = 20
    """steps between checkpoints"""
    show_every: CountOrZero = 20
    """steps between samples shown; 0 = never"""
    report_to: str = "none"
    """any tracker that transformers knows: trackio, wandb, tensorboard"""

    def __post_init__(self):
        """Every `per_model` default becomes its value for this model, and everything is checked.

        Raises:
            UserError: a number out of its bounds, a tracker that is not there, the embedded model
                of other scripts, or what the script's own `check` refuses.
        """
        own = type(self).model
        if self.model in MODELS and own in MODELS and self.model != own:
            raise UserError(
                f"--model {self.model}: this embedded model has learnt nothing that this script "
                f"asks of it; take --model {own}."
            )
        if self.model in LEVELS and self.model not in MODELS:
            raise UserError(f"--model {self.model}: that is a data set, --dataset {self.model}.")
        for name, value in vars(self).items():
            if hasattr(value, "for_tiny"):
                vars(self)[name] = value.for_tiny if self.model in MODELS else value.for_real
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            check_number(name, getattr(self, name), kind)
        trackers = ["none", "all", *get_available_reporting_integrations()]
        if self.report_to not in trackers:
            raise UserError(
                f"--report-to {self.report_to}: there is no such tracker, or it is not installed; "
                f"it can be {', '.join(trackers)}."
            )
        self.check()

    def check(self):
        """A SCRIPT MAY WRITE THIS: raises UserError for arguments that do not go together."""


def check_number(name: str, value, kind):
    """Raises UserError unless a number is finite and within the bounds of its type."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    options = [kind, *getattr(kind, "__args__", ())]  # Count | None
    found = [b for k in options for b in getattr(k, "__metadata__", ()) if isinstance(b, Bounds)]
    least, most = found[0] if found else Bounds()
    if not math.isfinite(value):
        wanted = "finite"
    elif value < least:
        wanted = f"at least {least:g}"
    elif value > most:
        wanted = f"at most {most:,}"
    else:
        return
    raise UserError(f"--{name.replace('_', '-')} {value} must be {wanted}.")


# ------------------------------------------------------------------ for TRL
def grpo_config(args: RunArgs, folder: Path, rows: int, group_size: int = 2, **more) -> GRPOConfig:
    """What TRL's trainer is told.

    The loss, the learning rates, lengths and temperatures are not in it: they belong to the
    players (common/players.py), and the loss stands in common/cotrainer.py.

    Args:
        rows: rows that the data loader gives each process for one optimiser step.
        group_size: how often the data loader repeats each question; 2, TRL's least, where a script
            does not use the loader's rows.
        more: fields of GRPOConfig in which a paper differs.
    """
    gpu = on_gpu(args.model)
    options = {
        "output_dir": str(folder),
        "seed": args.seed,
        "max_steps": args.steps,
        "per_device_train_batch_size": rows,  # `CoTrainer.update` makes micro-batches
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_generations": group_size,
        "max_grad_norm": 0.0,  # `CoTrainer.update` clips
        "lr_scheduler_type": "constant",
        "logging_steps": 1,  # the player is a property of the step
        "save_steps": args.save_every,
        "report_to": args.report_to,
        "project": "duet",  # to a tracker, as is the next; a resumed run keeps its name
        "run_name": Path(folder).name,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "gradient_checkpointing": args.checkpointing == "on",
        "gradient_checkpointing_kwargs": {"use_reentrant": False},  # autograd.grad needs it
        "bf16": gpu,
        "use_cpu": not gpu,  # nor Apple's GPU, on which nothing here was ever tried
        "optim": "adamw_torch_fused",
    }
    return GRPOConfig(**options | more)
