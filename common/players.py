"""AdapterTrainer: one GRPOTrainer, several players, each a LoRA adapter on one shared base.

What co-training needs of TRL and what need not be read to follow an optimiser step, which is in
common/cotrainer.py: whose turn it is, the optimiser, metrics, several processes and checkpoints.
Everything that overrides TRL is here, but for `training_step`:

    _get_train_sampler                       a resumed run continues in a later pass over the data
    create_optimizer                         one AdamW, a parameter group per adapter
    log                                      Trainer's own loss, norm and rate are left out
    _save_checkpoint, _load_from_checkpoint  every adapter by name, and `saved`
    create_model_card                        none

requirements.txt pins TRL, and tests/common/test_trl_contract.py fails first if any of this moves.
"""

import dataclasses
import json
import random
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import fast, plain
from common.batch import padded
from common.errors import ScriptError
from common.run.checks import check_players, check_saved, checked, stripped, warn_once
from common.run.folder import seal

import torch
from accelerate.utils import gather_object
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from trl import GRPOConfig, GRPOTrainer


@dataclass
class Player:
    """What TRL keeps once per trainer and co-training needs once per player."""

    rewards: list[Callable]
    """reward functions, called as TRL calls them; empty for a player that `set_rewards` rewards, or
    nobody"""
    lr: float
    """learning rate of its adapter; 0 for a frozen one"""
    max_tokens: int
    """length limit of a completion"""
    group_size: int = 8
    """adjacent rows whose rewards are compared with each other"""
    temperature: float = 1.0
    """sampling temperature of its rollouts; 0 = greedy"""
    adapter: str = ""
    """the adapter it plays with; by default one named after the player"""
    max_grad_norm: float = 1.0
    """its gradient is clipped to this norm; 0 = not clipped"""
    reads: int = 0
    """tokens of other players' texts in its prompt, at most: for the estimate of memory"""
    rows: int = 1
    """rows of a forward pass per unit of --micro-batch, 2 for pairs: for the same estimate"""


class AdapterTrainer(GRPOTrainer):
    """See the top of this file."""

    saved: dict
    """what a checkpoint keeps beside adapters, optimiser and random numbers; JSON"""
    engine = fast
    """what samples and scores: common/fast/, or common/plain.py with --plain"""

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
            cfg: the script's arguments. Of them this class and CoTrainer read kl, plain,
                micro_batch and rows_at_once.
            config: from `launch.grpo_config`.
            dataset: what the data loader gives `step`: rows with a prompt.
            train_rows, held_out: the data as they were loaded.
        """
        if "saved" in vars(self):
            raise ScriptError("set self.saved after super().__init__, which makes it")
        check_players(players)
        self.players, self.cfg, self.kl = players, cfg, getattr(cfg, "kl", 0.0)
        self.engine = plain if getattr(cfg, "plain", False) else fast
        self.train_rows, self.held_out = list(train_rows), list(held_out)
        asked = [row["question"] for row in held_out if "question" in row]
        self.held_out_questions = {*asked, *map(stripped, asked)}  # a space more is no other one
        self.saved = {}
        self.player = ""  # whose batch was trained last
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
        self.inherited = set(vars(self)) | {"inherited"}  # else the script's, see keeping_state

    # ------------------------------------------------------------------ whose turn it is
    @contextmanager
    def playing(self, name: str | None):
        """Inside of this block the model is the base with this player's adapter; None: the base.

        The adapters of all others get no gradient (PEFT turns their requires_grad off), and AdamW
        leaves what has no gradient alone, momentum included.
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
        """A player by its name, or by that of its adapter, as `concat` calls a joined batch."""
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
        """A metric under its full name, such as "verifier/accuracy": the mean over all values of
        this step and of all processes.

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
        """The mean, and the share of groups whose rewards are all equal, which teach nothing."""
        self.log_mean(f"{name}/{metric}", rewards[~rewards.isnan()])
        if groups is not None and len(set(groups)) < len(groups):
            different = {}
            for group, reward in zip(groups, rewards.tolist()):
                different.setdefault(group, set()).update({reward} if reward == reward else ())
            flat = [len(values) < 2 for values in different.values()]
            self.log_mean(f"{name}/frac_reward_zero_std", flat)

    def call_rewards(self, name: str, rows, prompts, texts: list[str], ids) -> torch.Tensor:
        """(B, functions) of this process, NaN where one does not judge; TRL calls them."""
        functions = self.player_named(name).rewards
        if not functions:
            return torch.full((len(texts), 0), torch.nan, device=self.accelerator.device)
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
        """The lists of all processes, one after the other."""
        return gather_object(values)

    def over_all_processes(self, fn: Callable, *columns):
        """This process's rows of fn(everyone's rows): for whatever must see the whole batch.

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
        """This process's part of a list that is the same on all processes."""
        return items[self.accelerator.process_index :: self.accelerator.num_processes]

    def in_parallel(self, fn: Callable[[list], list], items: list) -> list:
        """fn(items), each process doing its share; items and result are the same on all processes.

        fn: a list -> a list with an entry for each item, in order.
        """
        shares = self.gather([fn(self.my_share(items))])
        world = self.accelerator.num_processes
        return [shares[i % world][i // world] for i in range(len(items))]

    def random_numbers(self) -> random.Random:
        """Of this process and this step only: a resumed run draws the same ones."""
        seed, step = self.args.seed, self.state.global_step
        return random.Random(f"{seed} {step} {self.accelerator.process_index}")

    # ------------------------------------------------------------------ overrides of TRL
    def _get_train_sampler(self, dataset=None):
        """TRL's shuffles with random numbers that continue from pass to pass and are in no
        checkpoint: a run that resumes draws those of the passes before, or the first would repeat.
        """
        sampler = super()._get_train_sampler(dataset)
        rows = self._resumed_at * self.args.generation_batch_size
        for _ in range(rows // len(sampler) if rows and sampler.shuffle else 0):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def create_optimizer(self, model=None):
        """One AdamW, one parameter group per adapter, so that each has its own learning rate."""
        if self.optimizer is None:
            rates = {player.adapter: player.lr for player in self.players.values()}
            groups = [
                {"params": self.parameters_of(a), "adapter": a, "lr": lr, "weight_decay": 0.0}
                for a, lr in rates.items()
            ]
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def log(self, logs: dict, start_time: float | None = None):
        """Adds the step's means over all processes. Trainer's loss, norm and rate are of its own
        optimiser step, which has nothing to do; `update` logs each player's.
        """
        theirs = ("loss", "grad_norm", "learning_rate")
        ours = {key: x for key, x in logs.items() if key not in theirs}
        everyones = self.gather([self._sums])  # one collective call for all metrics
        self._sums = {}
        for name in dict.fromkeys(name for sums in everyones for name in sums):
            totals, counts = zip(*(sums.get(name, (0.0, 0)) for sums in everyones))
            if sum(counts):
                self._metrics["train"][name] = [sum(totals) / sum(counts)]
        super().log(ours, start_time)

    def create_model_card(self, *_, **__):
        """None: it could not name the base, nor say what the paper's players are."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # every process writes its own random numbers
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            check_saved(self.saved)
            (folder / "saved.json").write_text(json.dumps(self.saved))
            seal(folder)  # last: one that was cut short is not finished

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Every adapter by its own name; Trainer would load into the active one."""
        folder = Path(resume_from_checkpoint)
        for adapter in {player.adapter for player in self.players.values()}:
            state = load_file(folder / adapter / "adapter_model.safetensors")
            set_peft_model_state_dict(self.model, state, adapter_name=adapter)
        self.saved = json.loads((folder / "saved.json").read_text())
        self._resumed_at = int(folder.name.removeprefix("checkpoint-"))


def with_adapters(players: dict[str, Player]) -> dict[str, Player]:
    """The same players, each with the name of its adapter."""
    return {
        name: dataclasses.replace(player, adapter=player.adapter or name)
        for name, player in players.items()
    }


def copy_adapter(model, source: str, target: str):
    """The weights of the adapter `source` become those of `target`, too."""
    state = get_peft_model_state_dict(model, adapter_name=source)
    set_peft_model_state_dict(model, state, adapter_name=target)


def no_reward(completions, **_) -> list[float]:
    """GRPOTrainer must be constructed with a reward function; each player brings its own."""
    return [0.0] * len(completions)
