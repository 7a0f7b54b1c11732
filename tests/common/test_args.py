"""common/args.py: defaults that depend on the model, sizes that fit, and what TRL is told."""

import dataclasses
import json
from dataclasses import dataclass

from common.args import RunArgs, divisors, fill_in, grpo_config, per_model
from common.errors import UserError

import pytest
import tyro


@dataclass
class Args(RunArgs):
    steps: int = 10
    """optimiser steps"""
    questions: int = 4
    """questions per step"""
    group_size: int = 8
    """rollouts of a question"""
    lr: float = per_model(tiny=2e-3, real=2e-5)
    """learning rate"""
    tokens: int = per_model(tiny=64, real=1024)
    """length limit"""


def parsed(*flags) -> Args:
    return tyro.cli(Args, args=[*flags])


# ------------------------------------------------------------------ defaults per model
@pytest.mark.parametrize(
    "model, expected",
    [("tiny", (2e-3, 64, 32)), ("some/model", (2e-5, 1024, 8))],
)
def test_what_was_not_given_fits_the_model(model, expected):
    args = fill_in(parsed("--model", model), rows=64)
    assert (args.lr, args.tokens, args.micro_batch) == expected
    values = dataclasses.asdict(args)
    assert [type(values[k]) for k in ("lr", "tokens", "micro_batch")] == [float, int, int]
    assert json.loads(json.dumps(values)) == values  # what args.json holds


def test_what_was_given_counts_even_if_it_is_the_other_models_default():
    flags = "--lr 2e-3 --tokens 64 --rows-at-once 256 --micro-batch 32 --model some/model"
    args = fill_in(parsed(*flags.split()), rows=64)
    assert (args.lr, args.tokens, args.rows_at_once, args.micro_batch) == (2e-3, 64, 256, 32)


def test_the_arguments_themselves_are_left_as_they_are():
    args = parsed()
    fill_in(args, rows=64)
    assert str(args.lr) == "0.002 embedded, 2e-05 real" and args.micro_batch == 32


# ------------------------------------------------------------------ sizes
@pytest.mark.parametrize(
    "rows, micro_batch", [(64, 32), (48, 24), (30, 30), (34, 17), (37, 1), (1, 1)]
)
def test_a_micro_batch_that_was_not_given_is_the_largest_that_divides_the_rows(rows, micro_batch):
    assert fill_in(parsed(), rows).micro_batch == micro_batch


def test_a_micro_batch_that_does_not_divide_the_rows():
    with pytest.raises(UserError) as error:
        fill_in(parsed("--micro-batch", "5"), rows=12)
    assert "--micro-batch 5 does not divide the 12 rows" in str(error.value)
    assert "it can be 1, 2, 3, 4, 6, 12" in str(error.value)


@pytest.mark.parametrize("value", ["0", "-3"])
@pytest.mark.parametrize(
    "flag",
    [
        "steps",
        "questions",
        "eval-questions",
        "save-every",
        "lora-rank",
        "micro-batch",
        "rows-at-once",
    ],
)
def test_sizes_below_one(flag, value):
    args = parsed(f"--{flag}", value)
    with pytest.raises(UserError, match=f"^--{flag} {value} must be at least 1"):
        fill_in(args, rows=args.questions * args.group_size)


@pytest.mark.parametrize("size", ["1", "0", "-2"])
def test_a_group_of_one_has_nothing_to_compare(size):
    args = parsed("--group-size", size)
    with pytest.raises(UserError, match=f"^--group-size {size}: .*must be at least 2"):
        fill_in(args, rows=args.questions * args.group_size)


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(7) == [1, 7] and divisors(0) == []


# ------------------------------------------------------------------ TRL's configuration
def test_a_step_is_one_strictly_on_policy_update(tmp_path):
    args = fill_in(parsed("--micro-batch", "8", "--seed", "7"), rows=32)
    config = grpo_config(args, tmp_path, rows=32, group_size=8)
    assert config.gradient_accumulation_steps == config.steps_per_generation == 4
    assert config.num_iterations == 1 and config.per_device_train_batch_size == 8
    assert config.generation_batch_size == 32 and config.num_generations == 8
    assert (config.max_steps, config.seed, config.output_dir) == (10, 7, str(tmp_path))
    assert config.weight_decay == 0.0 and str(config.lr_scheduler_type) == "SchedulerType.CONSTANT"
    assert config.report_to == [] and config.logging_steps == 1 and config.beta == 0.0


def test_a_script_may_tell_trl_more(tmp_path):
    args = fill_in(parsed("--eight-bit-adam"), rows=32)
    config = grpo_config(args, tmp_path, 32, 8, save_strategy="no", weight_decay=0.1)
    assert config.save_strategy == "no" and config.weight_decay == 0.1
    assert config.optim == "adamw_8bit"
    with pytest.raises(TypeError, match="no_such_field"):
        grpo_config(args, tmp_path, 32, 8, no_such_field=1)
