"""common/fast/ against common/plain.py, and the boundary between what one reads and what need not
be read."""

import ast
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import warm
from conftest import ROOT, gradient, make_trainer, perturb, relative

SEAMS = {
    "__init__.py": {"common.run.early"},
    "cotrainer.py": {"common.fast", "common.fast.vllm", "common.run.checks", "common.run.trainer"},
    "model.py": {"common.fast", "common.run.machine", "common.run.models"},
}
"""What the files that one reads import of common/fast/ and common/run/."""


def imported(path) -> set[str]:
    """The modules of common/ that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    inside = {f"common.{p}" for p in ("fast", "run")}
    files = [p.relative_to(ROOT).with_suffix("") for p in (ROOT / "common").rglob("*.py")]
    modules = {".".join(p.parts).removesuffix(".__init__") for p in files}
    return {name for name in found & modules if name not in inside or name == "common.fast"}


def test_the_core_touches_fast_and_run_at_its_seams_only():
    for path in (ROOT / "common").glob("*.py"):
        beyond = {n for n in imported(path) if n.startswith(("common.fast", "common.run"))}
        assert beyond == SEAMS.get(path.name, set()), path.name


def test_what_is_fast_does_not_know_the_run():
    for path in (ROOT / "common" / "fast").glob("*.py"):
        assert not {n for n in imported(path) if n.startswith("common.run")}, path.name


def test_the_embedded_tasks_do_not_know_those_from_anywhere():
    for path in (ROOT / "common" / "tiny").glob("*.py"):
        assert not {n for n in imported(path) if n.startswith("common.tasks")}, path.name


# ------------------------------------------------------------------ a plain step, traced
@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> list[tuple[str, str, bool]]:
    """(file, function, whether it acts) of one step of tango.py's generator, see one_step.py."""
    folder = tmp_path_factory.mktemp("step")
    out, err = folder / "out", folder / "err"
    process = warm.start(Path(__file__).parent / "one_step.py", [folder / "run"], out, err)
    process.join(timeout=600)
    assert process.exitcode == 0, err.read_text()
    return [tuple(call) for call in json.loads(out.read_text().splitlines()[-1])]


def test_a_plain_step_runs_no_line_that_is_fast(calls):
    assert not [file for file, *_ in calls if file.startswith("common/fast/")]


READ = {
    "tango.py": 10,
    "common/advantage.py": 2,
    "common/batch.py": 6,
    "common/cotrainer.py": 15,
    "common/draws.py": 3,
    "common/model.py": 3,
    "common/plain.py": 9,
    "common/run/trainer.py": 5,
    "common/tasks/answers.py": 9,
    "common/tasks/verdicts.py": 5,
}
"""How many functions one reads to follow a plain generator step, by file."""


def test_how_much_one_reads_to_follow_a_plain_step(calls):
    """Without what only watches."""
    assert Counter(file for file, _, acts in calls if acts) == READ


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
