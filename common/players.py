"""AdapterTrainer: one GRPOTrainer, several players, each a LoRA adapter on one shared base.

This file holds what players share: whose turn it is, the optimiser, TRL's reward calls, metrics and
several processes. An optimiser step is in common/cotrainer.py. Other overrides of TRL (data order,
log lines, checkpoints) are in common/run/trainer.py; skip them when you follow a step.
"""

import dataclasses
import random
import secrets
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

from common import fast, plain
from common.batch import padded
from common.errors import ScriptError
from common.fast import vllm
from common.run.checks import check_players, checked, stripped, warn_once
from common.run.trainer import ResumableTrainer

import torch
from accelerate.utils import gather_object
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from trl import GRPOConfig


@dataclass
class Player:
    """The settings that TRL has once per trainer and co-training needs once per player."""

    rewards: list[Callable]
    """reward functions with TRL's signature; empty where `set_rewards` gives the rewards, or where
    the player gets none"""
    lr: float
    """learning rate of the player's adapter; 0 freezes the player"""
    max_tokens: int
    """length limit of a completion"""
    group_size: int = 8
    """number of adjacent rows whose rewards are compared with each other"""
    temperature: float = 1.0
    """sampling temperature; 0 = greedy"""
    adapter: str = ""
    """name of the player's adapter; by default the player's own name"""
    max_grad_norm: float = 1.0
    """norm to which the gradient is clipped; 0 = no clipping"""
    reads: int = 0
    """at most so many tokens of other players' texts are in a prompt (for the memory estimate)"""
    rows: int = 1
    """rows of a forward pass for each row of --micro-batch, 2 for pairs (for the same estimate)"""


class AdapterTrainer(ResumableTrainer):
    """See the top of this file."""

    engine = fast
    """the module that samples and scores: common/fast/, or common/plain.py with --plain"""
    server: vllm.Server | None = None
    """what samples with --rollouts"""
    clip_max: float | None = None
    """--vllm-importance-sampling-clip-max"""

    def __init__(
        self,
        model,
        players: dict[str, Player],
        cfg,
        config: GRPOConfig,
        dataset,
        tokenizer,
        train_rows: list[dict] = (),
        held_out: list[dict] = (),
    ):
        """
        Args:
            model: from common/model.py, with an adapter for every player.
            players: from `with_adapters`.
            cfg: the script's arguments. Of them this class and CoTrainer read kl, plain, rollouts,
                vllm_importance_sampling_clip_max, micro_batch and rows_at_once.
            config: from `launch.grpo_config`.
            dataset: what the data loader gives `step`: rows with a prompt.
            train_rows, held_out: the data as they were loaded.
        """
        if "saved" in vars(self):
            raise ScriptError("set self.saved after super().__init__, which makes it")
        check_players(players)
        self.players, self.cfg, self.kl = players, cfg, getattr(cfg, "kl", 0.0)
        self.clip_max = getattr(cfg, "vllm_importance_sampling_clip_max", None)
        self.engine = plain if getattr(cfg, "plain", False) else fast
        self.train_rows, self.held_out = list(train_rows), list(held_out)
        asked = [row["question"] for row in held_out if "question" in row]
        self.held_out_questions = {*asked, *map(stripped, asked)}  # a space more is no other one
        self.saved = {}
        self.trained_last = ""  # player of the latest update
        self.sampled_tokens = 0  # by all players, since the step began
        self.asked_in_evaluation = None  # prompts -> how often, while an evaluation lasts
        self.idle = {}  # player -> its latest updates in a row without a gradient
        self._sums = {}  # metric -> (sum, count) of this process and step
        self._resumed_at = 0  # step
        # beta 0: with a KL term of its own, TRL would copy an adapter called "default"
        config.beta = 0.0
        super().__init__(
            model, [no_reward], args=config, train_dataset=dataset, processing_class=tokenizer
        )
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:  # on a 4-bit base TRL has made them bfloat16: steps of 1e-5 vanish
                parameter.data = parameter.data.float()
        if url := getattr(cfg, "rollouts", None):
            word = self.gather([secrets.token_hex(4)])[0]  # the same on all processes
            self.server = vllm.Server(url, config.output_dir, word)
        self.inherited = set(vars(self)) | {"inherited"}  # else the script's, see keeping_state

    # ------------------------------------------------------------------ whose turn it is
    @contextmanager
    def playing(self, name: str | None):
        """Inside this block the model is the base with this player's adapter; for None, the base.

        PEFT turns requires_grad off for all other adapters, so they get no gradient, and AdamW
        changes neither weights nor momentum of a parameter without one.
        """
        before = self.model.active_adapter
        try:
            if name is None:
                with self.model.disable_adapter():
                    yield
            else:
                self.model.set_adapter(self.player_named(name).adapter)
                yield
        finally:
            self.model.set_adapter(before)

    def player_named(self, name: str) -> Player:
        """Returns a player by name; or by the name of its adapter, which a joined batch carries."""
        if name in self.players:
            return self.players[name]
        for player in self.players.values():
            if player.adapter == name:
                return player
        raise ScriptError(f"there is no player {name!r}; there are {', '.join(self.players)}")

    def parameters_of(self, adapter: str) -> list[torch.Tensor]:
        # ...q_proj.lora_A.generator.weight
        named = [(n.split("."), p) for n, p in self.model.named_parameters() if "lora_" in n]
        return [p for name, p in named if name[-2] == adapter]

    # ------------------------------------------------------------------ metrics
    def log_mean(self, name: str, values):
        """Logs the mean of all values that this step and all processes give to a metric.

        name: the full name, such as "verifier/accuracy".
        values: a number, a list or a tensor; nothing is logged if no process has any.
        """
        if "/" not in name or name.startswith("eval/"):
            raise ScriptError(
                f"log_mean: {name!r} must begin with a player's name or with co, and a slash; "
                f"eval/ is for held-out figures"
            )
        values = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach().flatten()
        if values.isnan().any():
            warn_once(f"log_mean: {name} was logged as NaN; a share of nothing is an empty list")
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + values.sum().item(), count + len(values))

    def log_rewards(self, name: str, metric: str, rewards: torch.Tensor, groups: list | None):
        """Logs the mean, and the share of groups whose rewards are all equal and teach nothing."""
        self.log_mean(f"{name}/{metric}", rewards[~rewards.isnan()])
        if groups is not None and len(set(groups)) < len(groups):
            different = {}
            for group, reward in zip(groups, rewards.tolist()):
                different.setdefault(group, set()).update({reward} if reward == reward else ())
            flat = [len(values) < 2 for values in different.values()]
            self.log_mean(f"{name}/frac_reward_zero_std", flat)

    def call_rewards(self, name: str, rows, prompts, texts: list[str], ids) -> torch.Tensor:
        """Has TRL call the player's reward functions -> (B, functions) of this process's rows, NaN
        where a function returns None.
        """
        functions = self.player_named(name).rewards
        if not functions or not rows:
            shape = len(texts), len(functions)
            return torch.full(shape, torch.nan, device=self.accelerator.device)
        self.reward_funcs = [*map(checked, functions)]
        self.reward_func_names = [function.__name__ for function in functions]
        self.reward_processing_classes = [None] * len(functions)
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        everyones = self._calculate_rewards(rows, prompts, completions, ids)
        for metric, values in self._pending_metrics.items():  # TRL's log_metric
            self.log_mean(f"{name}/{metric}", values)
        self._pending_metrics.clear()
        each = everyones[self.accelerator.process_index * len(rows) :][: len(rows)]
        for k, function in enumerate(self.reward_func_names):
            known = each[:, k][~each[:, k].isnan()]
            if not len(known):
                warn_once(f"{function} gave none of the {name}'s completions a reward")
            self.log_mean(f"{name}/rewards/{function}/mean", known)
        return each

    # ------------------------------------------------------------------ several processes
    def gather(self, values: list) -> list:
        """Returns the lists of all processes, one after the other."""
        return gather_object(values)

    def over_all_processes(self, fn: Callable, *columns):
        """Applies fn to the rows of all processes and returns this process's rows of the result,
        for mathematics that must see the whole batch.

        columns: lists or tensors with an entry per row, (B,) or (B, T); tensors are padded with
        zeros to the longest T of all processes. fn takes as many columns and returns one, of the
        same length.
        """
        if self.accelerator.num_processes == 1:
            return fn(*columns)
        counts, whole = self.gather([len(columns[0])]), []
        for column in columns:
            if isinstance(column, torch.Tensor):
                whole.append(torch.cat(padded(self.gather([column.cpu()]), left=False)))
            else:
                whole.append(self.gather(list(column)))
        first = sum(counts[: self.accelerator.process_index])
        mine = fn(*whole)[first : first + len(columns[0])]
        if isinstance(mine, torch.Tensor):
            width = max([c.shape[1] for c in columns if getattr(c, "ndim", 1) == 2], default=None)
            mine = (mine[:, :width] if mine.dim() > 1 else mine).to(self.accelerator.device)
        return mine

    def my_share(self, items: list) -> list:
        """Returns this process's part of a list that is the same on all processes."""
        return items[self.accelerator.process_index :: self.accelerator.num_processes]

    def in_parallel(self, fn: Callable[[list], list], items: list) -> list:
        """Returns fn(items), of which each process computes its share; items and result are the
        same on all processes.

        fn: a list -> a list with an entry for each item, in order.
        """
        shares = self.gather([fn(self.my_share(items))])
        world = self.accelerator.num_processes
        return [shares[i % world][i // world] for i in range(len(items))]

    def random_numbers(self) -> random.Random:
        """Returns a generator seeded by run, step and process, so a resumed run draws the same."""
        seed, step = self.args.seed, self.state.global_step
        return random.Random(f"{seed} {step} {self.accelerator.process_index}")

    # ------------------------------------------------------------------ the optimiser
    def create_optimizer(self, model=None):
        """Makes one AdamW with a parameter group, and so a learning rate, for each adapter."""
        if self.optimizer is None:
            rates = {player.adapter: player.lr for player in self.players.values()}
            groups = [
                {"params": self.parameters_of(a), "adapter": a, "lr": lr, "weight_decay": 0.0}
                for a, lr in rates.items()
            ]
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer


def with_adapters(players: dict[str, Player]) -> dict[str, Player]:
    """Returns the same players, each with the name of its adapter filled in."""
    return {
        name: dataclasses.replace(player, adapter=player.adapter or name)
        for name, player in players.items()
    }


def copy_adapter(model, source: str, target: str):
    """Copies the weights of the adapter `source` into the adapter `target`."""
    state = get_peft_model_state_dict(model, adapter_name=source)
    set_peft_model_state_dict(model, state, adapter_name=target)


def no_reward(completions, **_) -> list[float]:
    """Stands for the reward function that GRPOTrainer demands; each player brings its own."""
    return [0.0] * len(completions)
