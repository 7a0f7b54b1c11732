"""What common/adapters.py and cotrainer.py rely on in TRL. An upgrade that moves any of it fails
here."""

import inspect

import pytest
import trl
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler


def test_version():
    assert trl.__version__.startswith("1.16.")


@pytest.mark.parametrize(
    "method, arguments",
    [
        ("_generate_and_score_completions", ["self", "inputs"]),
        ("_calculate_rewards", ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
        ("_prepare_inputs", ["self", "generation_batch"]),
        ("_tokenize_prompts", ["self", "prompts"]),
        (
            "_generate_single_turn",
            ["self", "prompt_ids", "images", "multimodal_fields", "num_generations"],
        ),
        (
            "_get_per_token_logps_and_entropies",
            ["self", "model", "input_ids", "attention_mask", "logits_to_keep"],
        ),
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
    assert (
        list(inspect.signature(getattr(GRPOTrainer, method)).parameters)[: len(arguments)]
        == arguments
    )


def test_a_pass_over_the_data_draws_one_permutation():
    """Those of the passes before are drawn again when a run goes on."""
    source = inspect.getsource(RepeatSampler.__iter__)
    assert source.count("torch.rand") == 1
    assert "torch.randperm(self.num_samples, generator=self.generator)" in source


@pytest.mark.parametrize(
    "method, fragments",
    [
        # attributes that `playing` swaps are read at every call, not kept from __init__
        (
            "_generate_and_score_completions",
            ["self.num_generations if mode", "self.reward_weights", "self.reward_func_names"],
        ),
        (
            "_generate_and_score_completions",
            ['"ref" if "ref" in model.peft_config else None', "num_items_in_batch = "],
        ),
        (
            "_generate_single_turn",
            [
                "generation_config=self.generation_config",
                "generation_kwargs=self.generation_kwargs",
            ],
        ),
        (
            "_calculate_rewards",
            ["self.reward_funcs, self.reward_processing_classes, self.reward_func_names"],
        ),
        # what our loss takes from the batch, and who calls it
        ("compute_loss", ["return self._compute_loss(model, inputs)"]),
        # when a step is played: at the first of its micro-batches
        ("_prepare_inputs", ["self._buffered_inputs[self._step % self.args.steps_per_generation]"]),
        ("training_step", ["self._step += 1"]),
        ("log", ["self._metrics[mode].items()", "self._metrics[mode].clear()"]),
    ],
)
def test_internals(method, fragments):
    source = inspect.getsource(getattr(GRPOTrainer, method))
    for fragment in fragments:
        assert fragment in source, f"GRPOTrainer.{method} no longer has: {fragment}"


def test_defaults_we_leave_alone():
    """None of them is in common/args.py, and each one would change what is sampled or trained."""
    config = GRPOConfig("unused", use_cpu=True, bf16=False)
    sampling = config.top_p, config.top_k, config.min_p, config.repetition_penalty
    assert sampling == (1.0, 0, None, 1.0)
    assert config.num_iterations == 1 and config.mask_truncated_completions is False
    assert (config.adam_beta1, config.adam_beta2, config.adam_epsilon) == (0.9, 0.999, 1e-8)
    assert config.warmup_steps == 0 and config.shuffle_dataset is True


def test_events():
    """A flat step is skipped at this event, after clipping and before the optimiser."""
    from transformers import Trainer, TrainerCallback

    assert hasattr(TrainerCallback, "on_pre_optimizer_step")
    source = inspect.getsource(Trainer)
    assert source.index("on_pre_optimizer_step(") < source.index("self.optimizer.step()")


def test_a_batch_has_what_is_relied_on(trainer):
    rows = [trainer.train_dataset[0]] * 4 + [trainer.train_dataset[1]] * 4
    batch = trainer.rollout("generator", rows)
    B, T = batch["completion_ids"].shape
    assert batch["completion_mask"].shape == (B, T) and B == 8
    assert batch["prompt_ids"].shape == batch["prompt_mask"].shape
    assert batch["prompt_mask"][:, -1].all() and batch["completion_mask"][:, 0].all()  # padding
    assert int(batch["num_items_in_batch"]) == int(batch["completion_mask"].sum())
