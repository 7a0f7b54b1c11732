"""common/fast/ against core/plain.py, and the boundary between what one reads and what need not
be read."""

import ast
import json
import sys
from pathlib import Path

import pytest
import torch
import warm
from conftest import ROOT, gradient, make_trainer, perturb, relative

LIBRARIES = {"accelerate", "peft", "safetensors", "torch", "transformers", "trl"}


def imported(path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def test_the_core_imports_nothing_above_it():
    """Of ours its own files, and else torch and what stands on it."""
    files = [*(ROOT / "common" / "core").glob("*.py")]
    assert len(files) > 8
    for path in files:
        names = imported(path)
        ours = {n for n in names if n == "common" or n.startswith("common.")}
        assert all(n.startswith("common.core") for n in ours), (path.name, ours)
        others = {n.split(".")[0] for n in names - ours}
        assert others <= LIBRARIES | sys.stdlib_module_names, (path.name, others)


def test_the_product_does_not_know_the_laboratory():
    """Neither scripts nor common/."""
    files = [*ROOT.glob("*.py"), *(ROOT / "common").rglob("*.py")]
    assert len(files) > 60
    for path in files:
        assert not {n for n in imported(path) if n.split(".")[0] == "lab"}, path


def test_what_is_fast_does_not_know_the_run():
    for path in (ROOT / "common" / "fast").glob("*.py"):
        assert not {n for n in imported(path) if n.startswith("common.run")}, path.name


def test_the_small_models_tasks_do_not_know_those_from_anywhere():
    for path in (ROOT / "common" / "tiny").glob("*.py"):
        known = {n for n in imported(path) if n.startswith("common.tasks")}
        assert not known or path.name == "diagnostics.py", path.name  # of a script's report


# ------------------------------------------------------------------ a plain step, traced
def test_a_plain_step_runs_no_line_that_is_fast(tmp_path):
    """Of a generator's step of tango.py, see one_step.py."""
    out, err = tmp_path / "out", tmp_path / "err"
    process = warm.start(Path(__file__).parent / "one_step.py", [tmp_path / "run"], out, err)
    process.join(timeout=600)
    assert process.exitcode == 0, err.read_text()
    called = [tuple(call) for call in json.loads(out.read_text().splitlines()[-1])]
    assert ("common/core/plain.py", "token_logps") in called
    assert not [file for file, _ in called if file.startswith("common/fast/")]


# ------------------------------------------------------------------ the same numbers
@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """One trainer that is fast and one that is plain, their players equal, and not the base."""
    trainers = []
    for path in (False, True):
        trainer = make_trainer(tmp_path_factory.mktemp("run"), kl=0.1, plain=path)
        perturb(trainer)
        trainers.append(trainer)
    return trainers


def test_log_probs_and_gradients_are_equal(both):
    """Of two groups of unlike lengths, one with advantages per token and rows without any; and with
    which log-probs plain.py has drawn the tokens."""
    torch.manual_seed(0)
    rows = [row for row in [*both[0].train_dataset][:2] for _ in range(4)]
    batch = both[1].rollout("generator", rows)
    A = torch.tensor([1.0, -0.5, 0.25, -0.75, 0, 0, 2, -2])[:, None]
    batch.advantages = A * torch.linspace(-1, 2, batch.completion_mask.shape[1])
    logps = [trainer.log_probs("generator", batch) for trainer in both]
    torch.testing.assert_close(*logps, rtol=0, atol=1e-4)
    torch.testing.assert_close(batch.sampled_logps, logps[1], rtol=0, atol=1e-4)
    for kl in (0.0, 0.1):  # without it, rows without advantages are left out
        found = []
        for trainer in both:
            trainer.kl, trainer.cfg.micro_batch = kl, 3
            trainer.model.train()
            found.append(gradient(trainer, batch))
        assert relative(*found) < 1e-4
