"""`CoTrainer.loss` against TRL's own on the same batch, and against plain autograd in float64."""

from types import MethodType

import pytest
import torch
from conftest import gradients, make_trainer, moved, perturb
from trl import GRPOConfig, GRPOTrainer


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A trainer whose players are not the base, and a rollout of two groups, of ragged lengths."""
    trainer = make_trainer(tmp_path_factory.mktemp("loss"), kl=0.1)
    perturb(trainer)
    trainer.model.train()
    torch.manual_seed(0)
    rows = [trainer.train_dataset[0]] * 4 + [trainer.train_dataset[3]] * 4
    batch = trainer.rollout("generator", rows)
    del batch["notes"]  # nothing is recorded
    for i, mask in enumerate(batch["completion_mask"]):
        mask[i + 3 if i % 2 else len(mask) :] = 0
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    return trainer, batch


def with_advantages(batch, per_token: bool) -> dict:
    A = torch.tensor([1.0, -0.5, 0.25, -0.75, 0, 0, 0, 0])
    mask = batch["completion_mask"]
    if per_token:
        A = A[:, None] * torch.linspace(-1, 2, mask.shape[1]) * mask  # (B, T), of both signs
    return batch | {"advantages": A}


def ours(trainer, batch, kl: float, count: int):
    """(loss, gradient, metrics) of a step, in `count` micro-batches as a run makes them."""
    trainer.model.zero_grad(set_to_none=True)
    trainer._means.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "kl", kl)
        patch.setattr(trainer.args, "per_device_train_batch_size", 8 // count)
        parts = trainer.micro_batches(batch)
        losses = [trainer._compute_loss(trainer.model, part) for part in parts]
    sum(losses).backward()
    return sum(losses).item(), gradients(trainer), dict(trainer._means)


def trls(trainer, batch, kl: float, count: int, bias_correction=False):
    """The same by TRL's `_compute_loss`, log-probs included, on plain pieces of the batch: nothing
    dropped, sorted or trimmed."""
    trainer.model.zero_grad(set_to_none=True)
    whole = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    whole["ref_per_token_logps"] = whole["base_logps"]
    rows = torch.arange(8).split(8 // count)
    parts = [{k: v[i] if v.dim() else v for k, v in whole.items()} for i in rows]
    log_probs = GRPOTrainer._get_per_token_logps_and_entropies
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "_get_per_token_logps_and_entropies", MethodType(log_probs, trainer))
        patch.setattr(trainer, "beta", kl)
        patch.setattr(trainer, "current_gradient_accumulation_steps", count, raising=False)
        patch.setattr(trainer.args, "steps_per_generation", count)
        patch.setattr(trainer.args, "use_bias_correction_kl", bias_correction)
        trainer._metrics["train"].clear()
        losses = [GRPOTrainer._compute_loss(trainer, trainer.model, part) for part in parts]
        metrics = dict(trainer._metrics["train"])
    sum(losses).backward()
    return sum(losses).item(), gradients(trainer), metrics


def relative(one: dict, other: dict) -> float:
    """The largest difference of two gradients, as a share of the largest entry."""
    assert one.keys() == other.keys() and one and all(".generator." in name for name in one)
    return moved(one, other) / max(g.abs().max().item() for g in other.values())


@pytest.mark.parametrize("per_token", [False, True], ids=["(B,)", "(B, T)"])
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_loss_and_gradient_are_trls_without_its_bias_correction(played, per_token, count, kl):
    trainer, batch = played
    batch = with_advantages(batch, per_token)
    loss, gradient, metrics = ours(trainer, batch, kl, count)
    expected, expected_gradient, theirs = trls(trainer, batch, kl, count)
    assert loss == pytest.approx(expected, abs=1e-6) and abs(loss) > 1e-3
    assert relative(gradient, expected_gradient) <= 1e-5
    assert ("generator/kl" in metrics) == (kl > 0)
    if kl and count == 1:  # the same rows are averaged
        assert metrics["generator/kl"] == pytest.approx(theirs["kl"], rel=1e-4)
        assert metrics["generator/entropy"] == pytest.approx(theirs["entropy"], rel=1e-4)


@pytest.mark.parametrize("count", [1, 2])
def test_trls_default_for_the_kl_term_has_not_come_back(played, count):
    """It multiplies k3 by the ratio, which adds k3 * grad log pi to the gradient: not k3 as in the
    papers. The loss is the same number, so that no curve would show it."""
    assert GRPOConfig.__dataclass_fields__["use_bias_correction_kl"].default is True
    trainer, batch = played
    batch = with_advantages(batch, per_token=False)
    loss, gradient, _ = ours(trainer, batch, 0.1, count)
    corrected, corrected_gradient, _ = trls(trainer, batch, 0.1, count, bias_correction=True)
    assert loss == pytest.approx(corrected, abs=1e-6)
    assert relative(gradient, corrected_gradient) > 1e-4
    assert relative(gradient, trls(trainer, batch, 0.1, count)[1]) <= 1e-5


@pytest.mark.parametrize("per_token", [False, True], ids=["(B,)", "(B, T)"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_the_equation_by_plain_autograd_in_float64(played, tmp_path, per_token, kl):
    """(-sum A log pi + kl * sum k3) / tokens, through the logits of the plain model."""
    trainer = make_trainer(tmp_path, kl=kl)
    perturb(trainer)
    trainer.model.double()
    batch = with_advantages(played[1], per_token)
    T, mask = batch["completion_mask"].shape[1], batch["completion_mask"]
    batch["base_logps"] = trainer.log_probs(None, batch)
    loss, gradient, _ = ours(trainer, batch, kl, 2)

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)

    def log_pi():
        logits = trainer.model(input_ids=ids, attention_mask=seen).logits[:, -T - 1 : -1]
        chosen = batch["completion_ids"][..., None]
        return logits.log_softmax(-1).gather(2, chosen).squeeze(2)  # (B, T)

    trainer.model.zero_grad(set_to_none=True)
    logp = log_pi()
    assert logp.dtype == torch.float64
    with torch.no_grad(), trainer.model.disable_adapter():
        base = log_pi()
    trainer._become("generator")
    A = batch["advantages"] if per_token else batch["advantages"][:, None]
    q = (base - logp).exp()
    terms = -A * logp + kl * (q - q.log() - 1)
    ((terms * mask).sum() / mask.sum()).backward()
    value = -A + kl * (q - q.log() - 1)  # the ratio is 1
    assert loss == pytest.approx(((value * mask).sum() / mask.sum()).item(), abs=1e-9)
    assert relative(gradient, gradients(trainer)) <= 3e-6  # its norms stay float32
