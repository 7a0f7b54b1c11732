"""What common/cotrainer.py relies on in TRL. An upgrade that moves any of it fails here, in one clear place."""

import inspect

import pytest
import torch
import trl
from trl import GRPOConfig, GRPOTrainer


def test_version():
    assert trl.__version__.startswith("1.16.")


@pytest.mark.parametrize(
    "method, arguments",
    [
        ("_generate_and_score_completions", ["self", "inputs"]),
        ("_calculate_rewards", ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
        ("_prepare_inputs", ["self", "generation_batch"]),
        ("_tokenize_prompts", ["self", "prompts"]),
        ("_generate_single_turn", ["self", "prompt_ids", "images", "multimodal_fields", "num_generations"]),
        ("_get_per_token_logps_and_entropies", ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]),
        ("_compute_loss", ["self", "model", "inputs"]),
        ("_save_checkpoint", ["self", "model", "trial"]),
        ("_load_from_checkpoint", ["self", "resume_from_checkpoint", "model"]),
        ("_get_train_sampler", ["self", "dataset"]),
        ("create_model_card", ["self", "model_name", "dataset_name"]),
        ("create_optimizer", ["self", "model"]),
        ("log", ["self", "logs", "start_time"]),
    ],
)
def test_signatures(method, arguments):
    assert list(inspect.signature(getattr(GRPOTrainer, method)).parameters)[: len(arguments)] == arguments


@pytest.mark.parametrize(
    "method, fragments",
    [
        # attributes that become() swaps are read at every call, not kept from __init__
        ("_generate_and_score_completions", ["self.num_generations if mode", "self.reward_weights", "self.reward_func_names"]),
        ("_generate_and_score_completions", ['"ref" if "ref" in model.peft_config else None', "num_items_in_batch = "]),
        ("_generate_single_turn", ["generation_config=self.generation_config", "generation_kwargs=self.generation_kwargs"]),
        ("_calculate_rewards", ["self.reward_funcs, self.reward_processing_classes, self.reward_func_names"]),
        # the normaliser counts the tokens of all rows: what makes dropping dead rows exact
        ("_compute_loss", ['inputs["num_items_in_batch"]', 'self.loss_type in ["cispo", "dapo", "vespo"]']),
        ("_compute_loss", ["if advantages.dim() == 1:", "per_token_logps.detach() if old_per_token_logps is None"]),
        ("_prepare_inputs", ["self._step % self.args.steps_per_generation", "self._buffered_inputs"]),
    ],
)
def test_internals(method, fragments):
    source = inspect.getsource(getattr(GRPOTrainer, method))
    for fragment in fragments:
        assert fragment in source, f"GRPOTrainer.{method} no longer has: {fragment}"


def test_config_values_we_set_exist():
    fields = GRPOConfig.__dataclass_fields__
    for name in ("steps_per_generation", "num_generations", "loss_type", "scale_rewards", "beta", "max_completion_length"):
        assert name in fields


def test_events():
    """A flat step is skipped at this event, after clipping and before the optimiser."""
    from transformers import Trainer, TrainerCallback

    assert hasattr(TrainerCallback, "on_pre_optimizer_step")
    source = inspect.getsource(Trainer)
    assert source.index("on_pre_optimizer_step(") < source.index("self.optimizer.step()")


def test_batch_and_per_token_advantages(trainer):
    """Keys of the dict, and (B, T) advantages through the loss."""
    rows = [trainer.train_dataset[0]] * 4 + [trainer.train_dataset[1]] * 4
    trainer.model.train()
    batch = trainer.turn("generator", rows)
    for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"):
        assert key in batch
    B, T = batch["completion_ids"].shape
    assert batch["advantages"].shape == (B,) and int(batch["num_items_in_batch"]) == int(batch["completion_mask"].sum())
    trainer.current_gradient_accumulation_steps = 1
    batch["advantages"] = torch.ones(B, T)
    per_token = trainer._compute_loss(trainer.model, batch)
    batch["advantages"] = torch.ones(B)
    assert per_token.item() == pytest.approx(trainer._compute_loss(trainer.model, batch).item())
