"""--vllm, as far as a machine without vLLM can tell: what it is asked for, which weights it is
given, and that its log-probs still correct the loss. common/sampling.py takes the place of vLLM."""

import inspect

from common.sampling import sample
from tango import solve_prompt, verify_prompt

import pytest
import torch
from conftest import make_trainer
from trl.generation.vllm_generation import VLLMGeneration


class Sampler:
    """What TRL's VLLMGeneration is to a trainer. `off`: added to its log-probs."""

    def __init__(self, trainer, off: float = 0.0):
        self.trainer, self.off, self.calls, self.adapter = trainer, off, [], None
        self.temperature = self.max_completion_length = None

    def sync_weights(self):
        self.adapter = self.trainer.model.active_adapter

    def generate(self, prompts, images, num_generations, profiler=None):
        trainer, limit = self.trainer, self.max_completion_length
        self.calls.append((self.adapter, limit, self.temperature, len(prompts), num_generations))
        assert self.adapter == trainer.model.active_adapter  # never the weights of another player
        eos, pad = trainer.eos_token_ids, trainer.processing_class.pad_token_id
        ids, logps = sample(trainer.model, prompts, limit, self.temperature, eos, pad)
        return prompts, ids, [[[lp + self.off] for lp in row] for row in logps], None


@pytest.fixture
def with_vllm(trainer):
    def put(off: float = 0.0):
        trainer.use_vllm, trainer.vllm_mode = True, "colocate"
        trainer.vllm_generation = Sampler(trainer, off)
        trainer.vllm_importance_sampling_correction = True
        trainer._last_loaded_step = -1
        return trainer

    return put


def test_a_trainer_that_is_made_for_vllm(tmp_path, monkeypatch):
    """TRL then makes none of the settings for `generate`."""
    made, there = [], "trl.trainer.grpo_trainer"

    def generation(*_, **how):
        made.append(how)
        return Sampler(None)

    monkeypatch.setattr(f"{there}.VLLMGeneration", generation)
    monkeypatch.setattr(f"{there}.is_vllm_available", lambda *_, **__: True, raising=False)
    trainer = make_trainer(tmp_path, vllm=True)
    trainer.vllm_generation.trainer = trainer
    texts = trainer.generate("generator", [solve_prompt("3+4 mod 10")] * 2)
    assert made and len(texts) == 2
    assert trainer.vllm_generation.calls == [("generator", 64, 1.0, 2, 1)]


def test_trl_has_what_is_set():
    source = inspect.getsource(VLLMGeneration)
    for name in ("max_completion_length", "temperature"):
        assert (
            f"self.{name}" in source
        )  # read when generating, so that it can differ between players
    arguments = {"prompts", "images", "num_generations", "profiler"}
    assert arguments <= set(inspect.signature(VLLMGeneration.generate).parameters)


def test_every_player_has_its_own_weights_limit_and_temperature(with_vllm):
    trainer = with_vllm()
    trainer.players["verifier"].temperature = 0.7
    trainer.generate("generator", [solve_prompt("3+4 mod 10")] * 2, greedy=True)
    trainer.generate("verifier", [verify_prompt("3+4 mod 10", "<step>3+4=7</step>")] * 3)
    trainer.generate("generator", [solve_prompt("3+4 mod 10")])
    assert trainer.vllm_generation.calls == [
        ("generator", 64, 0.0, 2, 1), ("verifier", 96, 0.7, 3, 1), ("generator", 64, 1.0, 1, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("off", [0.0, 0.1])
def test_the_importance_correction_sees_the_samplers_log_probs(with_vllm, off):
    """The ratio of trainer to sampler: 1 where they agree, exp(-0.1) per token where the sampler is
    0.1 nats too sure."""
    trainer = with_vllm(off)
    trainer.vllm_importance_sampling_mode = "token_truncate"
    trainer.model.train()
    rows = [{"prompt": solve_prompt("3+4 mod 10"), "answer": "7"}] * 4
    batch = trainer.rollout("generator", rows)
    mask = batch["completion_mask"].bool()
    assert mask.any() and batch["sampling_per_token_logps"].shape == mask.shape
    ratio = batch["importance_sampling_ratio"].expand(mask.shape)[mask]
    assert ratio == pytest.approx(torch.full_like(ratio, -off).exp(), abs=1e-3)
    # and it arrives in the loss, through this project's micro-batches
    batch["advantages"] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    losses = []
    for share in (1.0, 0.5):
        weighted = batch | {"importance_sampling_ratio": batch["importance_sampling_ratio"] * share}
        parts = trainer.micro_batches(weighted)
        losses.append(sum(trainer._compute_loss(trainer.model, part).item() for part in parts))
    assert losses[1] == pytest.approx(0.5 * losses[0], rel=1e-4) and losses[0] != 0
