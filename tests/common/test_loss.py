"""`CoTrainer.loss` through `update`: against TRL's own on the same batch. Against a loop, with a KL
weight for each row: tests/scripts/test_score.py."""

from dataclasses import replace

from common.core.batch import Batch

import pytest
import torch
from conftest import gradient, make_trainer, perturb, relative
from trl import GRPOTrainer


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A trainer whose players are not the base, and a rollout of two groups, of ragged lengths."""
    trainer = make_trainer(tmp_path_factory.mktemp("loss"), kl=0.1)
    perturb(trainer)
    trainer.model.train()
    torch.manual_seed(0)
    rows = [trainer.train_dataset[0]] * 4 + [trainer.train_dataset[3]] * 4
    batch = trainer.rollout("generator", rows)
    for i, mask in enumerate(batch.completion_mask):
        mask[i + 3 if i % 2 else len(mask) :] = 0
    batch.total_tokens = int(batch.completion_mask.sum())
    return trainer, batch


def with_advantages(batch, per_token: bool) -> Batch:
    A = torch.tensor([1.0, -0.5, 0.25, -0.75, 0, 0, 0, 0])
    mask = batch.completion_mask
    if per_token:
        A = A[:, None] * torch.linspace(-1, 2, mask.shape[1]) * mask  # (B, T), of both signs
    return replace(batch, advantages=A)


def ours(trainer, batch, kl: float, size: int):
    """(loss, gradient, metrics) of an update in micro-batches of at most `size` rows."""
    trainer.kl, trainer.cfg.micro_batch = kl, size
    trainer._sums.clear()
    found = gradient(trainer, batch)
    assert found and all(".generator." in name for name in found)  # nobody else has one
    metrics = {name.split("/")[1]: total / n for name, (total, n) in trainer._sums.items()}
    return metrics["loss"], found, metrics


def trls(trainer, batch, kl: float, bias_correction=False):
    """The same by TRL's `_compute_loss`, log-probs included, on the plain batch: nothing dropped,
    sorted, trimmed or cut."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    whole = {name: getattr(batch, name) for name in names}
    whole["ref_per_token_logps"] = batch.base_logps
    whole["num_items_in_batch"] = torch.tensor(batch.total_tokens)
    with pytest.MonkeyPatch.context() as patch, trainer.playing("generator"):
        patch.setattr(trainer, "beta", kl)
        patch.setattr(trainer, "current_gradient_accumulation_steps", 1, raising=False)
        patch.setattr(trainer.args, "use_bias_correction_kl", bias_correction)
        trainer._metrics["train"].clear()
        loss = GRPOTrainer._compute_loss(trainer, trainer.model, whole)
        metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
        named = {n: p for n, p in trainer.model.named_parameters() if ".generator." in n}
        found = torch.autograd.grad(loss, named.values())
    return loss.item(), dict(zip(named, found)), metrics


@pytest.mark.parametrize("per_token", [False, True], ids=["(B,)", "(B, T)"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_loss_and_gradient_are_trls_without_its_bias_correction(played, per_token, kl):
    """However the rows are cut; 3 and 5 do not divide them. TRL's bias correction multiplies k3 by
    the ratio, which adds k3 * grad log pi to the gradient; no curve of the loss would show it."""
    trainer, batch = played
    batch = with_advantages(batch, per_token)
    expected, expected_gradient, theirs = trls(trainer, batch, kl)
    for size in (1, 3, 5, 8, 100):
        loss, found, metrics = ours(trainer, batch, kl, size)
        assert loss == pytest.approx(expected, abs=1e-6) and abs(loss) > 1e-3
        assert relative(found, expected_gradient) <= 3e-5
        norm = sum(g.square().sum() for g in found.values()).sqrt().item()
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert ("kl" in metrics) == (kl > 0)
        if kl:  # the same rows are averaged, token by token
            assert metrics["kl"] == pytest.approx(theirs["kl"], rel=1e-3)
            assert metrics["entropy"] == pytest.approx(theirs["entropy"], rel=1e-4)
    if kl:
        corrected, corrected_gradient, _ = trls(trainer, batch, kl, bias_correction=True)
        assert loss == pytest.approx(corrected, abs=1e-6)
        assert relative(found, corrected_gradient) > 1e-4


def test_without_an_advantage_the_gradient_is_that_of_trls_kl_term(played, monkeypatch):
    trainer, batch = played
    monkeypatch.setattr(trainer, "teaches_nothing", lambda *_: False)  # it was never updated
    batch = replace(batch, advantages=torch.zeros(8))
    expected, expected_gradient, _ = trls(trainer, batch, 0.1)
    loss, found, _ = ours(trainer, batch, 0.1, 3)
    assert loss == pytest.approx(expected, abs=1e-8) and loss > 5e-6
    assert relative(found, expected_gradient) <= 1e-3  # 1 - q rounds: q is nearly 1
