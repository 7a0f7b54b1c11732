"""common/args.py: defaults that depend on the model, sizes that fit, and what TRL is told."""

import dataclasses
import importlib
import json
from dataclasses import dataclass

from common.args import RunArgs, divisors, fill_in, grpo_config, per_model
from common.errors import UserError

import pytest
import tyro
from conftest import SCRIPTS


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


def numbers(kind):
    """(script, argument) for every number of every script: with `kind`, the floats or the ints."""
    for script in SCRIPTS:
        found = importlib.import_module(script.removesuffix(".py")).Args()
        hints = {field.name: str(field.type) for field in dataclasses.fields(found)}
        yield from ((script, name) for name, hint in hints.items() if kind in hint)


def refusal(script, **change) -> str:
    module = importlib.import_module(script.removesuffix(".py"))
    with pytest.raises(UserError) as error:
        module.main(module.Args(**change))
    return str(error.value)


@pytest.mark.parametrize("script, name", [*numbers("float")])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1e-9])
def test_every_float_is_finite_and_not_negative(script, name, value):
    message = refusal(script, **{name: value})
    assert message.startswith(f"--{name.replace('_', '-')} {value} must be "), message
    assert ("finite, and" in message) == (abs(value) != 1e-9)


@pytest.mark.parametrize("script, name", [*numbers("int")])
def test_no_int_is_negative_and_no_length_zero(script, name):
    for value in (-1, 0) if name.endswith("_tokens") else (-1,):
        message = refusal(script, **{name: value})
        assert message.startswith(f"--{name.replace('_', '-')} {value}"), message
        assert "must be" in message


@pytest.mark.parametrize(
    "script, change, says",
    [
        ("tango.py", {"alpha": 1.5}, "--alpha 1.5 must be from 0 to 1"),
        ("tango.py", {"gen_steps": 0, "ver_steps": 0}, "a cycle needs a step"),
        ("tango.py", {"seed": 2**32}, "--seed 4294967296 must be from 0 to 4294967295"),
        ("prime.py", {"keep_high": 2.0}, "--keep-high 2.0 must be from 0 to 1"),
        ("prime.py", {"keep_low": 0.9}, "--keep-low 0.9 is over --keep-high 0.875"),
        ("prime.py", {"max_refills": 0}, "--max-refills 0 must be at least 1"),
        ("gar.py", {"slice_tokens": 5}, "--min-slice-tokens 6, --slice-tokens 5: no cue word"),
        ("gar.py", {"silent_share": 1.1}, "--silent-share 1.1 must be from 0 to 1"),
        ("cure.py", {"time_limit": 1e9}, "--time-limit 1000000000.0 must be from 0.001 to 3600"),
        ("cure.py", {"time_limit": 0.0}, "--time-limit 0.0 must be at least 0.001"),
        ("cure.py", {"own_tests": 0}, "--own-tests 0 must be at least 1"),
        ("spin.py", {"iterations": 0}, "--iterations 0 must be at least 1"),
        ("mae.py", {"reference_share": 1.5}, "--reference-share 1.5 must be from 0 to 1"),
        ("spin.py", {"last_beta": 0.0}, "--last-beta 0.0 must be at least 1e-06"),
        ("tango.py", {"steps": 10**12}, "--steps 1000000000000 must be from 1 to 1000000"),
        (
            "mae.py",
            {"train_proposer": False, "train_solver": False, "train_judge": False},
            "leave nobody to train",
        ),
        ("mae.py", {"difficulty_samples": 0}, "--difficulty-samples 0 must be at least 1"),
    ],
)
def test_bounds_of_a_scripts_own(script, change, says):
    assert says in refusal(script, **change)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_defaults_and_zeros_that_mean_something_are_within_bounds(script):
    module = importlib.import_module(script.removesuffix(".py"))
    for model in (module.Args().model, "some/model"):
        args = module.Args(model=model, seed=2**32 - 1, eval_every=0, show_every=0, lr=0.0)
        filled = fill_in(args, rows=96)
        assert 96 % filled.micro_batch == 0 and filled.eval_every == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_small_sizes_need_no_micro_batch(script, monkeypatch):
    """Every script's step of 4 questions, or groups of 4, without a word about micro-batches."""

    class Fits(Exception):
        pass

    def fits(args, *_, **__):
        raise Fits(args.micro_batch)

    module = importlib.import_module(script.removesuffix(".py"))
    monkeypatch.setattr(module, "check_memory", fits)
    sizes = {"questions": 4} | ({"group_size": 4} if hasattr(module.Args(), "group_size") else {})
    rows = {"mae.py": 12, "spin.py": 4, "azr.py": 24, "vstar.py": 4, "self_rewarding.py": 4}
    rows = rows.get(script, 16)
    with pytest.raises(Fits, match=f"^{rows}$"):
        module.main(module.Args(**sizes))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_embedded_model_of_other_scripts_is_refused(script):
    module = importlib.import_module(script.removesuffix(".py"))
    own = module.Args().model
    (other,) = {"tiny", "tiny-programs"} - {own}
    with pytest.raises(UserError, match=f"--model {other}: .* take --model {own}"):
        fill_in(module.Args(model=other), rows=0)
    assert fill_in(module.Args(), rows=0).model == own


def test_trackers(monkeypatch):
    monkeypatch.setattr("common.args.get_available_reporting_integrations", lambda: ["wandb"])
    for name in ("none", "all", "wandb"):
        assert fill_in(parsed("--report-to", name), rows=32).report_to == name
    says = "--report-to nonsense: there is no such tracker; it can be none, wandb"
    with pytest.raises(UserError, match=says):
        fill_in(parsed("--report-to", "nonsense"), rows=32)
    with pytest.raises(UserError, match="--report-to mlflow: it is not installed"):
        fill_in(parsed("--report-to", "mlflow"), rows=32)


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


def test_rows_of_a_step_are_not_its_questions(tmp_path):
    args = fill_in(RunArgs(micro_batch=16), rows=128)
    with pytest.raises(ValueError, match="rows 8 must be a multiple of --micro-batch 16"):
        grpo_config(args, tmp_path, rows=8, group_size=8)


def test_a_script_may_tell_trl_more(tmp_path):
    args = fill_in(parsed("--eight-bit-adam"), rows=32)
    config = grpo_config(args, tmp_path, 32, 8, save_strategy="no", weight_decay=0.1)
    assert config.save_strategy == "no" and config.weight_decay == 0.1
    assert config.optim == "adamw_8bit"
    with pytest.raises(TypeError, match="no_such_field"):
        grpo_config(args, tmp_path, 32, 8, no_such_field=1)
