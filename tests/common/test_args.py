"""common/run/args.py: defaults that depend on the model, bounds, what TRL is told, and
what is answered before torch is imported."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import get_args, get_type_hints

from common.core.errors import UserError
from common.run.args import (
    Bounds,
    Count,
    GroupSize,
    RunArgs,
    Tokens,
    Weight,
    per_model,
)
from common.run.launch import grpo_config

import pytest
import tyro
from conftest import ROOT, SCRIPTS, module_of


@dataclass
class Args(RunArgs):
    steps: Count = 10
    """optimiser steps"""
    questions: Count = 4
    """questions per step"""
    group_size: GroupSize = 8
    """rollouts of a question"""
    lr: Weight = per_model(tiny=2e-3, real=2e-5)
    """learning rate"""
    tokens: Tokens = per_model(tiny=64, real=1024)
    """length limit"""


def parsed(*flags) -> Args:
    return tyro.cli(Args, args=[*flags])


# ------------------------------------------------------------------ defaults per model
@pytest.mark.parametrize("model, expected", [("tiny", (2e-3, 64, 32)), ("a/b", (2e-5, 1024, 8))])
def test_what_was_not_given_fits_the_model(model, expected):
    args = parsed("--model", model)
    assert (args.lr, args.tokens, args.micro_batch) == expected
    values = dataclasses.asdict(args)
    assert [type(values[k]) for k in ("lr", "tokens", "micro_batch")] == [float, int, int]
    assert json.loads(json.dumps(values)) == values  # what args.json holds
    assert str(Args.lr) == "0.002 small model, 2e-05 real"  # what --help shows


def test_what_was_given_counts_even_if_it_is_the_other_models_default():
    flags = "--lr 2e-3 --tokens 64 --generation-batch-size 256 --micro-batch 32 --model some/model"
    args = dataclasses.replace(parsed(*flags.split()), gradient_checkpointing="on")
    assert (args.lr, args.tokens, args.generation_batch_size, args.micro_batch) == (
        2e-3,
        64,
        256,
        32,
    )


def test_a_default_is_nothing_that_can_be_given(capsys):
    for flags in (["--lr", "None"], ["--tokens", "None"], ["--four-bit", "None"]):
        with pytest.raises(SystemExit):
            parsed(*flags)
    assert "--lr: None is no number" in capsys.readouterr().err
    assert [parsed(*f).four_bit for f in ([], ["--four-bit"], ["--no-four-bit"])] == [None, 1, 0]


# ------------------------------------------------------------------ bounds
def refusal(script, **change) -> str:
    with pytest.raises(UserError) as error:
        module_of(script).Args(**change)
    return str(error.value)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_bounds_and_is_finite(script):
    Args = module_of(script).Args
    for model in (Args.model, "some/model"):  # zeros that mean something
        Args(model=model, seed=2**32 - 1, eval_every=0, show_every=0, lr=0.0, micro_batch=5)
    hints = get_type_hints(Args, include_extras=True)
    for name, kind in hints.items():
        options = [kind, *getattr(kind, "__args__", ())]  # Count | None
        kinds = {k for o in options for k in (o, *get_args(getattr(o, "__origin__", o)))}
        if not {int, float} & kinds:
            continue
        metadata = [m for o in options for m in getattr(o, "__metadata__", ())]
        (bounds,) = [m for m in metadata if isinstance(m, Bounds)]
        flag = f"--{name.replace('_', '-')}"
        assert bounds.least >= 0, name
        assert bounds.least > 0 or not name.endswith("_tokens"), name
        for value in (math.nan, math.inf, -math.inf):
            said = refusal(script, **{name: value})
            assert said.startswith(f"{flag} {value} must be finite"), said
        said = refusal(script, **{name: bounds.least - 1})
        assert said == f"{flag} {bounds.least - 1} must be at least {bounds.least:g}."
        if math.isfinite(bounds.most):
            said = refusal(script, **{name: bounds.most + 1})
            assert said.startswith(f"{flag} {bounds.most + 1} must be at most "), said


# ------------------------------------------------------------------ TRL's configuration
def test_a_step_is_one_strictly_on_policy_update(tmp_path):
    config = grpo_config(parsed("--micro-batch", "5", "--seed", "7"), tmp_path, 32, group_size=8)
    assert config.gradient_accumulation_steps == config.steps_per_generation == 1
    assert config.num_iterations == 1 and config.per_device_train_batch_size == 32
    assert config.generation_batch_size == 32 and config.num_generations == 8
    assert (config.max_steps, config.seed, config.output_dir) == (10, 7, str(tmp_path))
    assert config.weight_decay == config.max_grad_norm == 0.0 and config.beta == 0.0
    assert str(config.lr_scheduler_type) == "SchedulerType.CONSTANT"
    assert config.report_to == [] and config.logging_steps == 1
    assert (config.project, config.run_name) == ("duet", tmp_path.name)  # what a tracker calls it
    assert config.use_cpu and not config.bf16 and not config.gradient_checkpointing
    assert config.optim == "adamw_torch_fused"  # a script may tell TRL more
    config = grpo_config(
        parsed("--gradient-checkpointing", "on"), tmp_path, 32, 8, optim="adamw_torch"
    )
    assert config.optim == "adamw_torch" and config.gradient_checkpointing


# ------------------------------------------------------------------ above torch and TRL
# each list of arguments is given to a script as a user gives it -> [exit code, what it said]
ASK = """
import contextlib, io, json, runpy, sys
found = []
for words in json.load(sys.stdin):
    sys.argv, said, code = words, io.StringIO(), None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    found.append([code, said.getvalue()])
    assert not {"torch", "transformers", "trl", "datasets"} & {*sys.modules}, words
print(json.dumps(found))
"""


def test_help_and_a_wrong_argument_need_no_torch():
    cases = [[s, *words.split()] for s in SCRIPTS for words in ("--help", "--steps 0", "--stepz 5")]
    process = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.returncode == 0, process.stderr
    for (script, *words), (code, said) in zip(cases, json.loads(process.stdout), strict=True):
        if words == ["--help"]:
            assert code == 0 and "--steps INT" in said, script
        elif words[0] == "--steps":
            assert [code, said] == [2, "error: --steps 0 must be at least 1.\n"], script
        else:
            assert code == 2 and "Unrecognized options: --stepz" in said, script


def test_a_closed_pipe_and_a_closed_stream_end_quietly():
    for shell in ("--help | true", "--help >&-", "--steps 0 2>&-"):
        command = ["bash", "-c", f"{sys.executable} tango.py {shell}"]
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert process.stderr == "" and process.returncode == 2 * ("--steps" in shell), shell


# ------------------------------------------------------------------ names of folders
@pytest.mark.parametrize("argument", ["model", "out"])
def test_a_name_that_is_not_utf_8_is_refused_by_name(argument):
    """A byte that is no character, as a name with an umlaut has two in an ASCII locale. The
    libraries cannot find such a folder, and would call the download broken.
    """
    assert vars(Args(**{argument: "runs/ü"}))[argument] == "runs/ü"
    for bytes_ in (b"runs/\xff", "runs/ü".encode("latin-1")):
        with pytest.raises(UserError, match=f"--{argument} runs/.*: its name is not UTF-8"):
            Args(**{argument: os.fsdecode(bytes_)})


@pytest.mark.parametrize("utf8, ends", [("0", 2), ("1", 0)])
def test_an_umlaut_in_an_ascii_locale(utf8, ends):
    """In the UTF-8 mode it is no trouble, and this is the advice."""
    code = "from common.run.args import RunArgs, parse; parse(RunArgs)"
    strict = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": utf8}
    done = subprocess.run(
        [sys.executable, "-c", code, "--out", os.fsencode("runs/ü")],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | strict,
        capture_output=True,
        text=True,
    )
    assert done.returncode == ends and done.stderr.count("PYTHONUTF8=1") == ends / 2, done.stderr
