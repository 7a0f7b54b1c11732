"""The arguments that all scripts share, and TRL's configuration made from them.

A script's `Args` inherits `RunArgs` and adds the paper's own. Where a paper's value is worth
telling, or another default fits better, a script declares a field of `RunArgs` again. `--help`
shows one list.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import UserError
from common.machine import on_gpu
from common.tiny import MODELS

import torch
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from trl import GRPOConfig

# Bounds of all scripts' numbers. By default from 0 on, and for *_tokens from 1 on.
SIZES = """steps questions eval_questions eval_samples save_every lora_rank micro_batch rows_at_once
    iterations max_refills own_tests difficulty_samples pool_size seed_tasks
    solutions analyses votes least_valid pool samples step_samples rationales candidates
    readings"""
SHARES = "alpha reference_share silent_share keep_low keep_high leak"
AT_LEAST = dict.fromkeys(SIZES.split(), 1) | {"time_limit": 0.001, "inputs": 2}
AT_LEAST |= {"beta": 1e-6, "last_beta": 1e-6}  # at 0 neither loss has a gradient
AT_MOST = dict.fromkeys(SHARES.split(), 1) | {"time_limit": 3600, "seed": 2**32 - 1}  # numpy's
AT_MOST |= {"inputs": 100}
AT_MOST |= dict.fromkeys("steps questions eval_questions eval_samples pool".split(), 1_000_000)
AT_MOST |= {"lora_rank": 4096, "group_size": 100_000, "solutions": 1_000_000}
COUNTS = "samples candidates readings analyses votes difficulty_samples rationales step_samples"
AT_MOST |= dict.fromkeys(COUNTS.split(), 10_000)  # of one question, solution or step


class _PerModel:
    """A default that depends on the model: one value if it is an embedded one, else another."""

    def __new__(cls, tiny, real):
        value = super().__new__(cls, tiny)
        value.for_tiny, value.for_real = tiny, real
        return value

    def __str__(self):  # what --help shows
        return f"{self.for_tiny} embedded, {self.for_real} real"


class _PerModelInt(_PerModel, int):
    pass


class _PerModelFloat(_PerModel, float):
    pass


def per_model(tiny, real):
    """The default of an argument: `tiny` with an embedded model, `real` with any other."""
    return (_PerModelFloat if isinstance(real, float) else _PerModelInt)(tiny, real)


@dataclass
class RunArgs:
    model: str = "tiny"
    """the embedded model, a hub id or a folder"""
    dataset: str = "tiny"
    """the embedded questions, tiny or tiny-hard; a hub id (openai/gsm8k) or a .jsonl file with
    question and answer"""
    out: str | None = None
    """run folder, by default runs/SCRIPT-TIME-SEED; given again, the run goes on where it stopped
    """
    seed: int = 0
    """random seed"""
    micro_batch: int = per_model(tiny=32, real=8)
    """rows per forward and backward pass; must divide the rows of a step"""
    lora_rank: int = 16
    """rank of each LoRA adapter"""
    four_bit: bool = per_model(tiny=False, real=torch.cuda.is_available())
    """load the base in 4-bit NF4; works on a CPU too, slowly"""
    rows_at_once: int | None = None
    """most rows sampled at a time, which bounds the KV cache; by default 256 or what fits"""
    checkpointing: Literal["auto", "on", "off"] = "auto"
    """recompute activations in the backward pass: less memory, a third more work; auto: only where
    they do not fit"""
    eight_bit_adam: bool = False
    """keep Adam's moments in 8 bits"""
    dry_run: bool = False
    """print how much memory this needs, load nothing, and end"""
    eval_every: int = 16
    """steps between evaluations on held-out questions; 0 = only first and last"""
    eval_questions: int = per_model(tiny=256, real=128)
    """held-out questions"""
    eval_samples: int = 4
    """completions per held-out question, of which accuracy is the mean"""
    save_every: int = 20
    """steps between checkpoints"""
    show_every: int = 20
    """steps between samples shown; 0 = never"""
    report_to: str = "none"
    """any tracker that transformers knows: trackio, wandb, tensorboard"""


def fill_in(args: RunArgs, rows: int) -> RunArgs:
    """The arguments with every `per_model` default replaced by its value for this model.

    rows: rows of one optimiser step and process. A micro-batch that was not given becomes the
    largest one that divides them.

    Raises:
        UserError: a number out of its bounds, a group of one, a tracker that is not there, a
            micro-batch that does not divide the rows, or the embedded model of other scripts.
    """
    own = type(args).model
    if args.model in MODELS and own in MODELS and args.model != own:
        raise UserError(
            f"--model {args.model}: this embedded model has learnt nothing that this script asks "
            f"of it; take --model {own}."
        )
    left = {k: v for k, v in vars(args).items() if isinstance(v, _PerModel)}
    filled = {k: v.for_tiny if args.model in MODELS else v.for_real for k, v in left.items()}
    if "micro_batch" in filled and rows > 0:
        sizes = range(1, filled["micro_batch"] + 1)
        filled["micro_batch"] = max(n for n in sizes if rows % n == 0)
    args = dataclasses.replace(args, **filled)
    if getattr(args, "group_size", 2) < 2:
        raise UserError(
            f"--group-size {args.group_size}: rewards are compared within a group, "
            f"so it must be at least 2."
        )
    for name, value in vars(args).items():
        if isinstance(value, int | float):  # a switch is 0 or 1
            check_number(name, value)
    check_tracker(args.report_to)
    if rows % args.micro_batch:
        fitting = ", ".join(map(str, divisors(rows)))
        raise UserError(
            f"--micro-batch {args.micro_batch} does not divide the {rows} rows of a step "
            f"(see --questions); it can be {fitting}."
        )
    return args


def check_number(name: str, value: float):
    """Raises UserError unless it is finite and within the bounds of this argument."""
    least = AT_LEAST.get(name, int(name.endswith("_tokens")))
    most = AT_MOST.get(name, math.inf)
    if least <= value <= most and value < math.inf:  # NaN is in no bounds
        return
    no_limit = most == math.inf or (name not in SHARES.split() and not value > most)
    bounds = f"at least {least}" if no_limit else f"from {least} to {most}"
    finite = "" if -math.inf < value < math.inf else "finite, and "
    raise UserError(f"--{name.replace('_', '-')} {value} must be {finite}{bounds}.")


def check_tracker(name: str):
    """Raises UserError for a tracker that transformers does not know or find installed."""
    if name in ("none", "all"):
        return
    installed = get_available_reporting_integrations()
    if name not in installed:
        known = name in INTEGRATION_TO_CALLBACK
        reason = "it is not installed" if known else "there is no such tracker"
        raise UserError(
            f"--report-to {name}: {reason}; it can be {', '.join(['none', *installed])}."
        )


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def grpo_config(args: RunArgs, folder: Path, rows: int, group_size: int = 2, **more) -> GRPOConfig:
    """What TRL's trainer is told.

    The loss, the learning rates, lengths and temperatures are not in it: they belong to the
    players (common/adapters.py), and the loss stands in common/cotrainer.py.

    Args:
        rows: rows of one optimiser step and process.
        group_size: how often the data loader repeats each question; 2, TRL's least, where a script
            does not use the loader's rows.
        more: fields of GRPOConfig in which a paper differs.
    """
    gpu = on_gpu(args.model)
    if rows % args.micro_batch:
        raise ValueError(f"rows {rows} must be a multiple of --micro-batch {args.micro_batch}")
    micro_batches = rows // args.micro_batch
    options = {
        "output_dir": str(folder),
        "seed": args.seed,
        "max_steps": args.steps,
        "per_device_train_batch_size": args.micro_batch,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_generation": micro_batches,  # one optimiser step per batch: strictly on-policy
        "num_generations": group_size,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,  # it would move an adapter whose gradient is exactly zero
        "logging_steps": 1,  # the player is a property of the step
        "logging_nan_inf_filter": False,  # we want to see a NaN, and stop
        "save_steps": args.save_every,
        "save_total_limit": 2,
        "report_to": args.report_to,
        "project": "duet",  # to a tracker, as is the next; a resumed run goes on under its name
        "run_name": Path(folder).name,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": True,  # the idle adapter has no gradient
        "gradient_checkpointing": args.checkpointing == "on",
        "bf16": gpu,
        "use_cpu": not gpu,  # nor Apple's GPU, on which nothing here was ever tried
        "optim": "adamw_8bit" if args.eight_bit_adam else "adamw_torch_fused",
    }
    return GRPOConfig(**options | more)
