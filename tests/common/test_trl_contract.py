"""What cotrainer.py and run/trainer.py rely on in TRL. An upgrade that moves any of it
fails here.
"""

import inspect

from common.cotrainer import CoTrainer
from common.run.trainer import RunTrainer

import pytest
import trl
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

OVERRIDDEN = {
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "create_optimizer": ["self", "model"],
    "log": ["self", "logs", "start_time"],
    "create_model_card": ["self", "model_name", "dataset_name"],
    "_get_train_sampler": ["self", "dataset"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
}
CALLED = {
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "get_optimizer_cls_and_kwargs": ["args", "model"],
}


def test_version():
    assert trl.__version__.startswith("1.16.")


def test_nothing_else_is_overridden():
    """But for `evaluate`, which common/run/session.py replaces in the instance."""
    ours = {*vars(RunTrainer), *vars(CoTrainer)}
    assert {n for n in ours if hasattr(GRPOTrainer, n) and n[:2] != "__"} == {*OVERRIDDEN}


@pytest.mark.parametrize("method, arguments", [*OVERRIDDEN.items(), *CALLED.items()])
def test_signatures(method, arguments):
    found = [*inspect.signature(getattr(GRPOTrainer, method)).parameters]
    assert found[: len(arguments)] == arguments


@pytest.mark.parametrize(
    "method, fragments",
    [
        (GRPOTrainer._calculate_rewards, ["self.reward_funcs, self.", "gather(rewards_per_func)"]),
        (GRPOTrainer._log_metric, ["self._pending_metrics[name].append(value)"]),
        (GRPOTrainer.__init__, ["self.eos_token_ids = ", "self._pending_metrics = "]),
        (GRPOTrainer.log, ["self._metrics[mode].items()", "self._metrics[mode].clear()"]),
        # once per optimiser step; then its line, and after that what is due
        (Trainer._maybe_log_save_evaluate, ["self.log(", "self._evaluate(", "_save_checkpoint("]),
        (Trainer._evaluate, ["self.evaluate(ignore_keys="]),
        # those of the passes before are drawn again when a run is resumed
        (RepeatSampler.__iter__, ["if self.shuffle:", "randperm(self.num_samples, generator=self"]),
    ],
)
def test_internals(method, fragments):
    source, at = inspect.getsource(method), 0
    for fragment in fragments:
        assert fragment in source[at:], f"{method.__qualname__} no longer has: {fragment}"
        at += source[at:].index(fragment)
    assert method is not RepeatSampler.__iter__ or source.count("torch.rand") == 1


def test_defaults_we_leave_alone():
    """None of them is in common/run/args.py, and each one would change what is trained."""
    config = GRPOConfig("unused", use_cpu=True, bf16=False)
    assert (config.adam_beta1, config.adam_beta2, config.adam_epsilon) == (0.9, 0.999, 1e-8)
    assert config.warmup_steps == 0 and config.shuffle_dataset is True
