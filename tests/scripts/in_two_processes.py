"""Runs small runs of several scripts one after the other, in each of two processes that
test_every_script.py starts:

    torchrun --nproc_per_node 2 in_two_processes.py FOLDER SCRIPT ...

One start for all of them. On the way every gradient that reaches
the optimiser is compared with the one that a single process has from the rows of both.
"""

import gc
import importlib
import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import evaluated_once, small  # isort: skip  it finds the project

from common import scoring
from common.cotrainer import CoTrainer
from common.run import plain_errors, this_process

import torch
import torch.nn.functional as F
import tyro
from accelerate import Accelerator

MORE = {"spin.py": "--steps 4 --iterations 2", "tango.py": "--steps 2 --seed 1"}
MORE["azr.py"] = "--steps 1"
MORE["deepseekmath.py"] = "--steps 4"  # the first with its generator
MORE["vstar.py"] = "--steps 4 --ver-steps 1"
MORE["self_rewarding.py"] = "--train-judge self-taught --judge-steps 1"
"""Arguments of the runs here; with seed 1 the verifier's first judgements differ in their rewards.
All other scripts train every player within two steps."""
EXPECTED, REACHED = [], []  # (player, gradients) by parameter, in the order of optimiser steps
SUMS = {"rows"}  # what a batch knows about this process's rows only

micro_batches, adam_step = CoTrainer.micro_batches, torch.optim.AdamW.step


def rows_of_both(trainer, batch: dict) -> dict:
    """The batch that a single process would have: this one's rows, and the other's."""
    whole = {"player": batch["player"]}
    for key, value in sorted(batch.items()):
        if isinstance(value, torch.Tensor) and value.dim():
            parts = trainer.gather([value])
            if value.dim() == 3:  # pairs, (B, 2, T)
                longest = max(part.shape[2] for part in parts)
                parts = [F.pad(part, (0, longest - part.shape[2])) for part in parts]
            whole[key] = torch.cat(scoring.padded(parts, left=key.startswith("prompt")))
        elif isinstance(value, torch.Tensor):
            whole[key] = sum(trainer.gather([value])) if key in SUMS else value
    return whole


def remember_what_one_process_would_do(trainer, batch: dict):
    for player in trainer.players.values():
        player.max_grad_norm = 1e9  # what reaches the optimiser is the gradient itself
    whole, model = rows_of_both(trainer, batch), trainer.accelerator.unwrap_model(trainer.model)
    questions, metrics = trainer.cfg.questions, dict(trainer._means)
    trainer.cfg.questions = 2 * questions
    with trainer.playing(batch["player"]), patch.object(Accelerator, "num_processes", 1):
        loss = trainer.loss(model, whole)
        parameters = trainer._parameters_of(trainer._player().adapter)
        gradients = torch.autograd.grad(loss, parameters)
    trainer.cfg.questions = questions
    trainer._means.clear()
    trainer._means.update(metrics)
    if any(g.any() for g in gradients):
        EXPECTED.append((batch["player"], dict(zip(parameters, gradients))))
    return micro_batches(trainer, batch)


def remember_what_reached(optimizer, *args, **kwargs):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = {p: p.grad.clone() for p in parameters if p.grad is not None}
    if gradients:
        REACHED.append(gradients)
    return adam_step(optimizer, *args, **kwargs)


def say_how_they_differ():
    """A line per optimiser step: the largest difference, as a share of the largest entry."""
    assert len(EXPECTED) == len(REACHED), (len(EXPECTED), len(REACHED))
    for (player, expected), reached in zip(EXPECTED, REACHED):
        assert {*expected} == {*reached}, player  # nobody else has a gradient
        most = max(g.abs().max().item() for g in expected.values())
        difference = max((expected[p] - reached[p]).abs().max().item() for p in expected)
        if this_process("tiny").is_main_process:
            print(f"gradient of {player}: {difference / most:.1e} of {most:.1e}", flush=True)
    EXPECTED.clear()
    REACHED.clear()


def main(folder: Path, scripts: list[str]):
    CoTrainer.micro_batches = remember_what_one_process_would_do
    torch.optim.AdamW.step = remember_what_reached
    gc.freeze()  # see conftest.py
    for script in scripts:
        if this_process("tiny").is_main_process:
            print(f"=== {script}", flush=True)
        module = importlib.import_module(Path(script).stem)
        evaluated_once(module, most_tokens=2)
        more = MORE.get(script, "--steps 2") + " --save-every 100"
        more += " --eval-every 0 --eval-questions 4 --eval-samples 1"
        arguments = small(script, folder / Path(script).stem, *more.split())
        module.main(tyro.cli(module.Args, args=arguments))
        say_how_they_differ()
    if this_process("tiny").is_main_process:
        print("=== the end", flush=True)


if __name__ == "__main__":
    with plain_errors():  # parts the processes in order, as every script does
        main(Path(sys.argv[1]), sys.argv[2:])
