"""AdapterTrainer: one GRPOTrainer, several players, each a LoRA adapter on one shared base.

TRL has one model, one completion length, one temperature, one list of reward functions. Here each
player has its own, and `playing(name)` swaps them. Beside that this file holds what co-training
wants of TRL and does not need to be read to follow an optimiser step, which stands in
common/cotrainer.py:

    _get_train_sampler                       a resumed run goes on in a later pass over the data
    create_optimizer                         one AdamW, a parameter group per adapter
    _get_per_token_logps_and_entropies       log-probs by common/logprob.py, scoring.py
    _calculate_rewards                       keeps texts and rewards, which TRL's batch leaves out
    _tokenize_prompts                        a model's text cannot pass for the template's own marks
    _generate_single_turn                    common/sampling.py on a CPU, where it is faster
    log                                      metrics under the player's name; a NaN stops the run
    _save_checkpoint, _load_from_checkpoint  every adapter by name, and `memory`
    create_model_card                        none

requirements.txt pins TRL, and tests/common/test_trl_contract.py fails first if any of this moves.
"""

import dataclasses
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import scoring
from common.checks import check_players
from common.errors import UserError
from common.folder import seal
from common.logprob import NonFiniteError
from common.sampling import (
    PREFILL_TOKENS,
    blank_special_tokens,
    can_sample,
    float32_logits,
    generation_settings,
    sample,
)

import torch
from accelerate.utils import gather_object
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


@dataclass
class Player:
    """What TRL keeps once per trainer and co-training needs once per player."""

    rewards: list[Callable]
    """reward functions, called as TRL calls them; empty for a player that is paid later, or never
    """
    lr: float
    """learning rate of its adapter"""
    max_tokens: int
    """length limit of a completion"""
    group_size: int = 8
    """adjacent rows whose rewards are compared with each other"""
    temperature: float = 1.0
    """sampling temperature of its rollouts; 0 = greedy"""
    adapter: str = ""
    """the adapter it plays with; by default one named after the player"""
    max_grad_norm: float = 1.0
    """its gradient is clipped to this norm"""


class AdapterTrainer(GRPOTrainer):
    """See the top of this file."""

    def __init__(
        self,
        model,
        players: dict[str, Player],
        args: GRPOConfig,
        kl: float = 0.0,
        rows_at_once: int | None = None,
        **kwargs,
    ):
        """
        Args:
            model: from common/model.py, with an adapter for every player.
            players: their names, which metrics begin with, and what each one needs.
            args: from common/args.py.
            kl: weight of the penalty that keeps players near the base.
            rows_at_once: rows sampled at a time, at most, which bounds the KV cache; None: 256.
            kwargs: of GRPOTrainer: train_dataset, processing_class.
        """
        for name, player in players.items():
            player.adapter = player.adapter or name
        check_players(players)
        _check_config(args)
        self.players, self.kl, self.rows_at_once = players, kl, rows_at_once or 256
        self.player = next(iter(players))  # whose turn it is
        self.memory = {}  # what must survive a checkpoint
        self.flat = False  # whether the latest `micro_batches` found no gradient to take
        self.sampling = False  # and not training, for who runs out of memory
        self.sampled_tokens = 0  # by all players, since the step began
        self._means = defaultdict(list)
        # beta 0: with a KL term of its own, TRL would copy an adapter called "default"
        args.beta = 0.0
        super().__init__(model, [unpaid], args, **kwargs)
        self._all_trainable()
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:  # on a 4-bit base TRL has made them bfloat16: steps of 1e-5 vanish
                parameter.data = parameter.data.float()
        scoring.install_scoring(model.get_base_model())
        self.add_callback(_SkipFlatSteps(self))
        self.add_callback(_GoOnInTheData(self))

    # ------------------------------------------------------------------ whose turn it is
    @contextmanager
    def playing(self, name: str | None):
        """Inside of this block the player `name` samples and is scored; None: the base, adapters
        off.
        """
        before = self.player
        try:
            if name is None:
                with self.accelerator.unwrap_model(self.model).disable_adapter():
                    yield
            else:
                self._become(name)
                yield
        finally:
            self._become(before)

    def _become(self, name: str):
        player = self._player(name)
        self.player = name
        self.model.set_adapter(player.adapter)
        self._all_trainable()
        self.num_generations = player.group_size
        self.max_completion_length = player.max_tokens
        # what scoring divides logits by; who decodes greedily (0) is scored at 1
        self.temperature = player.temperature or 1.0
        self.args.max_grad_norm = player.max_grad_norm
        self.reward_funcs = player.rewards or [unpaid]
        self.reward_func_names = [f.__name__ for f in self.reward_funcs]
        self.reward_processing_classes = [None] * len(self.reward_funcs)
        self.reward_weights = torch.ones(len(self.reward_funcs))
        self._set_sampling(player.max_tokens, player.temperature)

    def _player(self, name: str | None = None) -> Player:
        """The player of this name; by default, the one whose turn it is."""
        name = name or self.player
        if name in self.players:
            return self.players[name]
        for player in self.players.values():  # `concat` calls players of one adapter by its name
            if player.adapter == name:
                return player
        raise ValueError(f"there is no player {name!r}; there are {', '.join(self.players)}")

    def _all_trainable(self):
        """set_adapter turns requires_grad of all other adapters off, but DDP and the optimiser fix
        their list of parameters at the start. An idle adapter is not part of the graph: its
        gradient is None.
        """
        trained = {player.adapter for player in self.players.values()}
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.requires_grad_(name.split(".")[-2] in trained)

    def _parameters_of(self, adapter: str) -> list[torch.Tensor]:
        # ...q_proj.lora_A.generator.weight
        named = [(n.split("."), p) for n, p in self.model.named_parameters() if "lora_" in n]
        return [p for name, p in named if name[-2] == adapter]

    # ------------------------------------------------------------------ logging
    def log_mean(self, name: str, values):
        """A metric under its full name, such as "verifier/accuracy": the mean over all processes.

        values: a number, a list or a tensor; nothing is logged if no process has any.
        """
        if "/" not in name or name.startswith("eval/"):
            raise ValueError(
                f"log_mean: {name!r} must begin with a player's name or with co, and a slash; "
                f"eval/ is for held-out figures"
            )
        values = (
            torch.as_tensor(values, dtype=torch.float64, device="cpu").detach().flatten().tolist()
        )
        values = self.gather(values)
        if values:
            self._means[name].append(sum(values) / len(values))

    def gather(self, values: list) -> list:
        """The lists of all processes, one after the other."""
        return gather_object(values)

    def random_numbers(self) -> random.Random:
        """Of this process and this step only: a resumed run draws the same ones."""
        seed, step = self.args.seed, self.state.global_step
        return random.Random(f"{seed} {step} {self.accelerator.process_index}")

    # ------------------------------------------------------------------ overrides of TRL
    def _get_train_sampler(self, dataset=None):
        self.sampler = super()._get_train_sampler(dataset)
        return self.sampler

    def create_optimizer(self, model=None):
        """One AdamW, one parameter group per adapter, so that each has its own learning rate."""
        if self.optimizer is None:
            adapters = {player.adapter: player.lr for player in self.players.values()}
            groups = [
                {"params": self._parameters_of(adapter), "lr": lr, "weight_decay": 0.0}
                for adapter, lr in adapters.items()
            ]
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def score(self, model, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the completions under whoever is playing, both (B, T).

        Through the wrapped model's own forward, so that DDP sees it; see scoring.install_scoring.
        """
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)  # (B, P + T)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)  # (B, P + T)
        T = batch["completion_ids"].shape[1]
        return self._get_per_token_logps_and_entropies(model, ids, mask, T)[:2]

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, **_
    ):
        """TRL wants a third value, None: nothing here has auxiliary losses."""
        score = (logits_to_keep, self.temperature)
        try:
            with self.accelerator.autocast():
                return *model(input_ids=input_ids, attention_mask=attention_mask, score=score), None
        except NonFiniteError:
            raise self._diverged("hidden states are no longer finite") from None

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """Keeps the texts and every function's rewards, which TRL's batch leaves out."""
        self._texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards_per_func = rewards  # of all processes
        return rewards

    def _tokenize_prompts(self, prompts: list):
        return super()._tokenize_prompts(blank_special_tokens(prompts, self.processing_class))

    def _generate_single_turn(self, prompt_ids, images, fields, *rest):
        model = self.accelerator.unwrap_model(self.model)
        filtered = self.top_p != 1.0 or self.top_k or self.min_p or self.repetition_penalty != 1.0
        filtered = filtered or self.args.generation_kwargs
        ours = self.accelerator.device.type == "cpu" and can_sample(model) and not filtered
        settings, completions = self.generation_config, []
        self.sampling = True
        for start in range(0, len(prompt_ids), self.rows_at_once):
            part = prompt_ids[start : start + self.rows_at_once]
            if ours:
                T, pad_id = settings.max_new_tokens, self.processing_class.pad_token_id
                temperature = settings.temperature if settings.do_sample else 0.0
                with scoring.without_checkpointing(model):  # under it no layer fills a cache
                    ids, _ = sample(model, part, T, temperature, self.eos_token_ids, pad_id)
            else:
                # TRL switches checkpointing on again, each time with one more hook on the embedding
                model.get_base_model().disable_input_require_grads()
                # autocast, as in scoring: else LoRA would compute in float32 here, and only here
                with self.accelerator.autocast(), float32_logits(model.get_base_model()):
                    ids, _ = super()._generate_single_turn(part, images, fields, *rest)
            completions += ids
        self.sampling = False
        self.sampled_tokens += sum(map(len, completions))
        return completions, None  # TRL wants log-probs only where sampler and trainer disagree

    def _set_sampling(self, max_tokens: int, temperature: float):
        """The settings that TRL builds once, for this player."""
        self.generation_kwargs |= generation_settings(max_tokens, temperature)
        self.generation_config = GenerationConfig(
            **self.generation_kwargs, prefill_chunk_size=PREFILL_TOKENS, disable_compile=True
        )

    @contextmanager
    def _metrics_named(self, name: str):
        """TRL's own metrics get the player's name: verifier/reward,
        verifier/completions/mean_length.
        """
        outer, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        try:
            yield
        finally:
            inner, self._metrics["train"] = self._metrics["train"], outer
            if not self._player(name).rewards:  # `pay` logs rewards when they are known
                inner = {key: values for key, values in inner.items() if "reward" not in key}
            for key, values in inner.items():
                outer[key if key == "num_tokens" else f"{name}/{key}"].extend(values)

    def log(self, logs: dict, start_time: float | None = None):
        """Loss, gradient norm and rate get the name of the player of Trainer's own step."""
        if "loss" in logs:
            for key in ("loss", "grad_norm"):
                self._finite(key, float(logs.get(key, 0.0)))
            rates = zip(
                dict.fromkeys(p.adapter for p in self.players.values()), self.optimizer.param_groups
            )
            rate = {adapter: group["lr"] for adapter, group in rates}[self._player().adapter]
            logs = logs | {"learning_rate": rate} if "learning_rate" in logs else logs
            named = ("loss", "grad_norm", "learning_rate")
            logs = {f"{self.player}/{k}" if k in named else k: v for k, v in logs.items()}
        self._metrics["train"] |= self._means
        self._means.clear()
        super().log(logs, start_time)

    def _finite(self, what: str, value: float):
        if not math.isfinite(value):
            raise self._diverged(f"{what} is {value}")

    def _diverged(self, what: str) -> UserError:
        return UserError(
            f"step {self.state.global_step}: the {self.player}'s {what}. The run stops here and "
            f"keeps its last checkpoint in {self.args.output_dir}; a lower --lr is the first thing "
            f"to try."
        )

    def create_model_card(self, *_, **__):
        """None: it could not name the base, nor say what the paper's players are."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # every process writes its own random numbers
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            (folder / "memory.json").write_text(json.dumps(self.memory))
            seal(folder)  # last: a checkpoint without a seal was cut short

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Every adapter by its own name; Trainer would load into the active one."""
        folder = Path(resume_from_checkpoint)
        for adapter in {player.adapter for player in self.players.values()}:
            state = load_file(folder / adapter / "adapter_model.safetensors")
            set_peft_model_state_dict(self.model, state, adapter_name=adapter)
        self.memory = json.loads((folder / "memory.json").read_text())


def copy_adapter(model, source: str, target: str):
    """The weights of the adapter `source` become those of `target`, too."""
    state = get_peft_model_state_dict(model, adapter_name=source)
    set_peft_model_state_dict(model, state, adapter_name=target)


class _GoOnInTheData(TrainerCallback):
    """A run that goes on in a later pass over the data: TRL's sampler shuffles with random numbers
    that go on from pass to pass and are in no checkpoint, so it would begin with the first again.
    """

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, train_dataloader=None, **_):
        sampler = self.trainer.sampler
        passes = state.global_step * args.gradient_accumulation_steps // len(train_dataloader)
        for _ in range(passes if sampler.shuffle else 0):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


OF_PLAYERS = {
    "learning_rate": "lr",
    "max_grad_norm": "max_grad_norm",
    "temperature": "temperature",
    "max_completion_length": "max_tokens",
}
OF_THE_LOSS = """beta loss_type epsilon epsilon_high delta importance_sampling_level entropy_coef
top_entropy_quantile use_bias_correction_kl scale_rewards reward_weights weight_decay"""


def _check_config(args: GRPOConfig):
    """Raises ValueError for what GRPOTrainer would heed and this trainer does not."""
    usual = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    for name in [*OF_PLAYERS, *OF_THE_LOSS.split()]:
        if getattr(args, name, None) != usual.get(name):
            where = "loss and advantages are the script's, and `kl` an argument of the trainer"
            if name in OF_PLAYERS:
                where = f"it belongs to each Player, as {OF_PLAYERS[name]}"
            raise ValueError(f"GRPOConfig({name}=...) would have no effect: {where}")
    if args.num_iterations != 1 or args.gradient_accumulation_steps != args.steps_per_generation:
        raise ValueError(
            "GRPOConfig: a step is one update on fresh samples; num_iterations must be 1, and "
            "gradient_accumulation_steps and steps_per_generation equal"
        )


def unpaid(completions, **_) -> list[float]:
    """In place of the reward functions of a player that has none."""
    return [0.0] * len(completions)


class _SkipFlatSteps(TrainerCallback):
    """A step whose advantages are all zero must not move anything, but Adam's momentum would."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **_):
        if self.trainer.flat:
            self.trainer.optimizer.zero_grad(set_to_none=True)
