"""What several players change of GRPOTrainer around the optimiser step: the optimiser, TRL's reward
calls, the order of the data, checkpoints. The step itself is in cotrainer.py, and processes.py has
metrics and what several processes share. This file overrides these methods of TRL and Trainer:

    create_optimizer                         a learning rate for each adapter
    log                                      means over all processes; not Trainer's own loss
    _get_train_sampler                       the questions come in the order of their list
    _get_output_dir, _save_checkpoint, _load_from_checkpoint
                                             whole checkpoints only; every adapter by name; `saved`
    create_model_card                        writes none

requirements.txt pins TRL. If a newer TRL changes these methods, tests/common/test_trl_contract.py
fails.
"""

import json
import shutil
from contextlib import suppress
from pathlib import Path

from common.core.errors import ScriptError
from common.core.lists import epochs, stripped
from common.core.model import reset_adapter
from common.core.processes import Processes

import torch
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from trl import GRPOConfig, GRPOTrainer


class PlayersTrainer(Processes, GRPOTrainer):
    """See the top of this file."""

    saved: dict
    """the script's own state, which a checkpoint keeps as JSON"""

    def __init__(
        self,
        model,
        players: dict,
        cfg,
        config: GRPOConfig,
        dataset,
        tokenizer,
        train_rows: list[dict] = (),
        held_out: list[dict] = (),
    ):
        """
        Args:
            model: from common/core/model.py, with an adapter for every player.
            players: from `with_adapters`.
            cfg: the script's arguments, a RunArgs.
            config: from `launch.grpo_config`.
            dataset: the rows that the data loader gives `step`; each has a prompt.
            tokenizer: the model's.
            train_rows, held_out: the data as they were loaded.
        """
        self.players, self.cfg = players, cfg
        self.train_rows, self.held_out = list(train_rows), list(held_out)
        questions = [row["question"] for row in held_out if "question" in row]
        # what training must not see, as it stands and without spaces at the ends of lines
        self.held_out_questions = {*questions, *map(stripped, questions)}
        self.saved = {}
        self._sums = {}  # metric -> (sum, count) of this process and step
        self._resumed_at = 0  # the step after which this run was resumed
        # beta 0: with a KL term of its own, TRL would copy an adapter called "default"
        config.beta = 0.0
        super().__init__(
            model, [no_reward], args=config, train_dataset=dataset, processing_class=tokenizer
        )
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:  # TRL makes them bfloat16 on a 4-bit base: steps of 1e-5 vanish
                parameter.data = parameter.data.float()

    def player_named(self, name: str):
        """Returns a player by its name, or by the name of its adapter, which a joined batch has.

        Raises:
            ScriptError: there is no such player.
        """
        if name in self.players:
            return self.players[name]
        for player in self.players.values():
            if player.adapter == name:
                return player
        raise ScriptError(f"there is no player {name!r}; there are {', '.join(self.players)}")

    # ------------------------------------------------------------------ the optimiser
    def create_optimizer(self, model=None):
        """Makes and returns an AdamW that has a parameter group, and so a learning rate, for each
        adapter.
        """
        if self.optimizer is None:
            rates = {player.adapter: player.lr for player in self.players.values()}
            groups = [
                {"params": self.parameters_of(a), "adapter": a, "lr": lr, "weight_decay": 0.0}
                for a, lr in rates.items()
            ]
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def parameters_of(self, adapter: str) -> list[torch.Tensor]:
        """Returns the weights of an adapter: A and B of every layer."""
        # ...q_proj.lora_A.generator.weight
        named = [(n.split("."), p) for n, p in self.model.named_parameters() if "lora_" in n]
        return [p for name, p in named if name[-2] == adapter]

    def restart(self, name: str):
        """Makes a player's adapter untrained, the same every time (see `reset_adapter`). AdamW
        forgets the adapter's moments.
        """
        adapter = self.player_named(name).adapter
        reset_adapter(self.model, adapter, self.args.seed)
        for p in self.parameters_of(adapter):
            self.optimizer.state.pop(p, None)

    # ------------------------------------------------------------------ rewards, called by TRL
    def call_rewards(self, name: str, rows, prompts, texts: list[str], ids) -> torch.Tensor:
        """Has TRL call the player's reward functions. Returns their rewards of this process's rows,
        (B, functions), NaN where a function has returned None. Logs the mean of each function.

        Args:
            name: the player.
            rows: the B rows, with the columns for the reward functions.
            prompts: B lists of messages.
            texts: B completions.
            ids: the token ids of each completion.
        """
        functions = self.player_named(name).rewards
        if not functions or not rows:
            shape = len(texts), len(functions)
            return torch.full(shape, torch.nan, device=self.accelerator.device)
        self.reward_funcs = functions
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
            self.log_mean(f"{name}/rewards/{function}/mean", known)
        return each

    def log(self, logs: dict, start_time: float | None = None):
        """Adds the step's means over all processes to Trainer's metrics. Trainer's loss, norm and
        learning rate are left out: they belong to its own optimiser step, which does nothing.
        `update` logs those of each player.
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

    # ------------------------------------------------------------------ data and checkpoints
    def _get_train_sampler(self, dataset=None):
        """Returns the numbers of the rows of all steps. The first pass has the order of the list,
        which is shuffled already, and each further pass has an order of its own.

        TRL's sampler shuffles the list in one piece. So the first questions would depend on how
        many were loaded, which depends on --steps. It also drops what is left of a pass that does
        not fill a step. And a run that is resumed would repeat the order of its first pass.
        """
        G, rows = self.num_generations, range(len(self.train_dataset))
        count = self.args.max_steps * self.args.generation_batch_size // G
        order = [*rows[:count]]
        order += epochs(rows, 0, count - len(order), f"{self.args.seed}")
        return [row for row in order for _ in range(G)]

    def create_model_card(self, *_, **__):
        """Writes no model card: TRL's could not name the base, nor say what the players are."""

    def _get_output_dir(self, trial) -> str:
        """Returns the folder in which a checkpoint is written. When it is whole, it moves."""
        return str(Path(self.args.output_dir, ".unfinished"))

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # every process writes its own random numbers
        if self.args.should_save:
            written = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            (written / "saved.json").write_text(json.dumps(self.saved))
            folder = Path(self.args.output_dir, written.name)
            shutil.rmtree(folder, ignore_errors=True)  # an earlier checkpoint of the same step
            written.rename(folder)
            with suppress(OSError):  # one that was cut short may lie there, too
                written.parent.rmdir()

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Loads every adapter by its own name; Trainer would load into the active adapter."""
        folder = Path(resume_from_checkpoint)
        for adapter in {player.adapter for player in self.players.values()}:
            state = load_file(folder / adapter / "adapter_model.safetensors")
            set_peft_model_state_dict(self.model, state, adapter_name=adapter)
        self.saved = json.loads((folder / "saved.json").read_text())
        self._resumed_at = int(folder.name.removeprefix("checkpoint-"))


def no_reward(completions, **_) -> list[float]:
    """Stands in for the reward function that GRPOTrainer demands; it is never called, because each
    player brings its own functions.
    """
    return [0.0] * len(completions)
