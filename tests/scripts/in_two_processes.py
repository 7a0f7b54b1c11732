"""Runs small runs of several scripts one after the other, in each of two processes that
test_every_script.py starts:

    torchrun --nproc_per_node 2 in_two_processes.py FOLDER SCRIPT ...

One start for all of them. On the way every gradient that reaches the optimiser is compared with the
one that a single process has from the rows of both, and all sampled texts are noted.
"""

import dataclasses
import gc
import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import evaluated_once, small  # isort: skip  it finds the project

from common.checked import CoTrainer
from common.core.batch import Batch, padded
from common.core.errors import say
from common.run import session as run
from common.run.session import begin, exit_with_one_sentence

import torch
import torch.nn.functional as F
import tyro

MORE = {"spin.py": "--steps 4 --iterations 2", "tango.py": "--steps 2 --seed 1"}
MORE["few_labels.py"] = "--steps 4 --seed 1"
MORE["apo.py"] = "--steps 2 --rm-steps 1 --iterations 1"
MORE["pvg.py"] = "--rounds 1 --steps 2"
MORE["azr.py"] = "--steps 1"
MORE["aprm.py"] = "--steps 2 --seed 1"
MORE["deepseekmath.py"] = "--steps 4"  # the first with its generator
MORE["self_verify.py"] = "--steps 3 --interval 2"  # the third is the verifier's
MORE["vstar.py"] = "--steps 4 --ver-steps 1"
MORE["rstar.py"] = "--steps 2 --ver-steps 1"
MORE["sweet_rl.py"] = "--steps 2 --critic-steps 1"
"""Arguments of the runs here; with seed 1 the first judgements differ in their rewards.
All other scripts train every player within two steps."""
OF_A_PROCESS = {"--questions", "--pairs", "--second-order"}
last, noted = {}, []
sample, update, add_up_gradients = CoTrainer.sample, CoTrainer.update, CoTrainer.add_up_gradients


def arguments_of(script: str, folder: Path, processes: int = 2) -> list[str]:
    """Of a run in two processes, or of one in a single process that asks as much in a step."""
    more = MORE.get(script, "--steps 2") + " --save-every 100"
    more += " --eval-every 0 --eval-questions 4 --eval-samples 1"
    given = small(script, folder / Path(script).stem, *more.split())
    if script == "ssr.py":
        given += ["--second-order", "2"]
    return [
        str(int(value) * 2 // processes) if name in OF_A_PROCESS else value
        for name, value in zip(["", *given], given)
    ]


def sample_and_note(trainer, name: str, *arguments, **more):
    """The player, and the token ids of all processes' completions."""
    found = sample(trainer, name, *arguments, **more)
    noted.append([name, trainer.gather([[*map(int, ids)] for ids in found[1]])])
    return found


def rows_of_both(trainer, batch: Batch) -> Batch:
    """The batch that a single process would have: this one's rows, and the other's."""

    def of_both(value, left=False):
        if isinstance(value, dict):
            return {key: of_both(value[key]) for key in sorted(value)}
        if isinstance(value, list):
            return trainer.gather(value)
        if not isinstance(value, torch.Tensor) or not value.dim():  # of the whole step already
            return value
        parts = trainer.gather([value])
        if value.dim() == 3:  # pairs, (B, 2, T)
            longest = max(part.shape[2] for part in parts)
            parts = [F.pad(part, (0, longest - part.shape[2])) for part in parts]
        return torch.cat(padded(parts, left))

    names = [field.name for field in dataclasses.fields(batch) if field.name != "rollouts"]
    return Batch(**{n: of_both(getattr(batch, n), n.startswith("prompt")) for n in names})


def update_both_ways(trainer, batch: Batch):
    """First what one process would do, of which nothing remains but `expected`, in one of them."""
    last["trainer"] = trainer
    whole, metrics = rows_of_both(trainer, batch), dict(trainer._sums)
    if trainer.accelerator.is_main_process:
        parameters = trainer.parameters_of(trainer.player_named(batch.player).adapter)
        with trainer.playing(batch.player):
            trainer.expected = torch.autograd.grad(trainer.loss(whole)[0], parameters)
    trainer._sums = metrics
    update(trainer, batch)


def add_up_and_compare(trainer, name: str, parameters):
    """A line per update: the largest difference, as a share of the largest entry."""
    add_up_gradients(trainer, name, parameters)
    if not trainer.accelerator.is_main_process:
        return
    most = max(g.abs().max().item() for g in trainer.expected)
    difference = max((p.grad - g).abs().max().item() for p, g in zip(parameters, trainer.expected))
    if most or difference:
        say(f"gradient of {name}: {difference / (most or 1):.1e} of {most:.1e}")


def main(folder: Path, scripts: list[str]):
    CoTrainer.update, CoTrainer.add_up_gradients = update_both_ways, add_up_and_compare
    CoTrainer.sample = sample_and_note
    run.write_report = lambda *_: None  # nobody reads it
    gc.freeze()  # see conftest.py
    assert begin("tiny").num_processes == 2
    for script in scripts:
        say(f"=== {script}")
        module = importlib.import_module(Path(script).stem)
        evaluated_once(module, most_tokens=2)
        noted.clear()
        module.main(tyro.cli(module.Args, args=arguments_of(script, folder)))
        trainer = last["trainer"]
        if trainer.accelerator.is_main_process:
            (folder / Path(script).stem / "sampled.json").write_text(json.dumps(noted))
        say(f"kinds of saved: {len({*trainer.gather([json.dumps(trainer.saved)])})}")
    say("=== the end")


if __name__ == "__main__":
    with exit_with_one_sentence():  # parts the processes in order, as every script does
        main(Path(sys.argv[1]), sys.argv[2:])
