"""What several players change of GRPOTrainer around the optimiser step: the optimiser, metrics,
several processes, TRL's reward calls, data and checkpoints. The step itself is in cotrainer.py.
This file overrides these methods of TRL and Trainer:

    create_optimizer                         a learning rate for each adapter
    log                                      means over all processes; not Trainer's own loss
    _get_train_sampler                       the questions come in the order of their list
    _get_output_dir, _save_checkpoint, _load_from_checkpoint
                                             whole checkpoints only; every adapter by name; `saved`
    create_model_card                        writes none

requirements.txt pins TRL. If a newer TRL changes these methods, tests/common/test_trl_contract.py
fails.
"""

import dataclasses
import json
import random
import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common.core.batch import Batch, as_completions, padded
from common.core.errors import ScriptError
from common.core.lists import epochs, stripped
from common.core.model import reset_adapter
from common.core.recording import write_rows

import torch
from accelerate.utils import gather_object
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from trl import GRPOConfig, GRPOTrainer


class PlayersTrainer(GRPOTrainer):
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
        self._parts = []  # what `record_part` has got in this update
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

    # ------------------------------------------------------------------ metrics
    def log_mean(self, name: str, values):
        """Adds values to a metric, which is logged at the end of the step: the mean of all values
        that the metric has got in this step from all processes.

        name: the full name, such as "verifier/accuracy".
        values: a number, a list or a tensor. If no process gives a value, the metric is not logged.
        """
        values = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach().flatten()
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + values.sum().item(), count + len(values))

    def log_flat_groups(self, rows: list[tuple]):
        """Logs frac_reward_zero_std of each player: of the groups in which a row of the player has
        a reward, the share whose rewards are all equal. If each row is a group, nothing is logged.

        rows: (player, reward or NaN, key of the group) of each row. A group may have rows of
            several players, and all of them are compared.
        """
        rewards, groups_of = defaultdict(set), defaultdict(set)  # group ->; player ->
        for player, reward, group in rows:
            if reward == reward:
                rewards[group].add(reward)
                groups_of[player].add(group)
        if len({group for _, _, group in rows}) < len(rows):
            for player, groups in groups_of.items():
                flat = [len(rewards[group]) == 1 for group in groups]
                self.log_mean(f"{player}/frac_reward_zero_std", flat)

    def log_advantages(self, batch: Batch):
        """Logs frac_advantage_zero: the share of the rows whose advantages are all 0, which teach
        nothing. It differs from frac_reward_zero_std if a script compares other rows than the
        group's.
        """
        if batch.advantages is not None and len(batch):
            idle = (batch.advantages.reshape(len(batch), -1) == 0).all(1)  # (B,)
            self.log_mean(f"{batch.player}/frac_advantage_zero", idle)

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

    # ------------------------------------------------------------------ what the report shows
    def record(self, batch: Batch, credit: torch.Tensor | None = None, notes: list | None = None):
        """Writes a few rows of a batch to rollouts.jsonl, for the report.

        credit: (B,) or (B, T), numbers that the report shows on the tokens in place of advantages.
        notes: B dicts in place of the batch's notes.
        """
        credit = batch.advantages if credit is None else credit.detach()
        shown = dataclasses.replace(batch, advantages=credit, notes=notes or batch.notes)
        if self.accelerator.is_main_process and shown.notes and credit is not None:
            file = Path(self.args.output_dir) / "rollouts.jsonl"
            write_rows(shown, file, self.state.global_step + 1, self.processing_class)

    def record_part(self, batch: Batch, credit: torch.Tensor, name: str, values, sides=(), of=""):
        """Records a micro-batch of the step, with numbers on the tokens that are not advantages. A
        script's `show_loss` calls it. The rows to show are chosen after the last micro-batch, among
        all rows, so they do not depend on how rows were sorted and split.

        Args:
            batch: b completions or b pairs.
            credit: the numbers on the tokens, (b, T), or (2b, T) for pairs.
            name: what `values` is.
            values: a number for each row or pair, which the report shows as its reward.
            sides: for pairs, two names: who wrote the chosen text, and who wrote the rejected text.
                For completions, one name: who wrote them. By default it is the batch's player.
            of: what `credit` is; by default log-probabilities.
        """
        sides, rows = sides or [batch.player], batch
        if len(sides) == 2:
            rows = as_completions(batch)
        notes = [note | {"player": side} for note in batch.notes for side in sides]
        for i, note in enumerate(notes):
            value = values[i * len(values) // len(notes)].item()
            note |= {"rewards": {name: value}, "credit": of or "log-probability"}
        shown = rows.prompt_ids, rows.prompt_mask, rows.completion_ids, rows.completion_mask
        numbers = batch.row.repeat_interleave(len(sides))  # in the whole batch
        part = Batch(batch.player, *shown, row=numbers, notes=notes, advantages=credit.detach())
        self._parts.append(part)

    def record_parts(self):
        """Writes a few rows of all that `record_part` has got in this update, in the batch's order.
        `update` calls it after the last micro-batch.
        """
        if self._parts:
            order = torch.cat([part.row for part in self._parts]).argsort(stable=True)
            pad_id = self.processing_class.pad_token_id
            self.record(Batch.join(self._parts[0].player, self._parts, pad_id).take(order))
            self._parts.clear()

    # ------------------------------------------------------------------ several processes
    def gather(self, values: list) -> list:
        """Returns the lists of all processes, one after the other."""
        return gather_object(values)

    def over_all_processes(self, fn: Callable, *columns):
        """Applies fn to the rows of all processes, and returns this process's rows of the result.
        Use it for mathematics that must see the whole batch, such as a normalisation over several
        rollouts. All processes call it together.

        Args:
            fn: takes as many columns as are given, of the rows of all processes, and returns a
                column of the same length.
            columns: lists or tensors with an entry for each row, (B,) or (B, T). Tensors are padded
                with zeros to the longest T of all processes.
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

    def shard(self, items: list) -> list:
        """Returns this process's part of a list that is the same on all processes; the parts of the
        processes, one after the other, are the list.
        """
        mine, world = self.accelerator.process_index, self.accelerator.num_processes
        return items[len(items) * mine // world : len(items) * (mine + 1) // world]

    def in_parallel(self, fn: Callable[[list], list], items: list) -> list:
        """Returns fn(items), of which each process computes its part. Items and result are the same
        on all processes.

        fn: takes a list, and returns a list with an entry for each item, in order.
        """
        return self.gather(fn(self.shard(items)))

    def random_numbers(self, of: str = "") -> random.Random:
        """Returns a generator that is seeded by run, step and `of`; so a resumed run draws the same
        numbers. Two calls in one step also give the same numbers.

        A seed must mean the same on one process as on several, so all processes get the same
        numbers: they draw for the rows of all processes, and `shard` gives each its own; or they
        draw for each question by itself.

        of: what the numbers are for, such as a question.
        """
        return random.Random(f"{self.args.seed} {self.state.global_step} {of}")

    def add_up_gradients(self, name: str, parameters: list[torch.Tensor]):
        """Sums the gradients over the processes, in one collective call. A process whose rows have
        no gradient adds zeros.

        Raises:
            ScriptError: the processes train different players.
        """
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if self.accelerator.num_processes > 1:
            names = self.gather([name])
            if len(set(names)) > 1:
                found = ", ".join(names)
                raise ScriptError(f"all processes must train one player together; got {found}")
            flat = torch.cat([p.grad.flatten() for p in parameters])
            flat = self.accelerator.reduce(flat, "sum")
            for p, g in zip(parameters, flat.split([p.numel() for p in parameters])):
                p.grad = g.view_as(p)

    # ------------------------------------------------------------------ data and checkpoints
    @property
    def questions_per_step(self) -> int:
        """The number of questions in a step: --questions times the number of processes."""
        return self.cfg.questions * self.accelerator.num_processes

    def from_epochs(self, items: list, turn: int, key: str, count: int | None = None) -> list:
        """Returns `count` items, the next part of shuffled epochs (see `epochs`), for all processes
        together; `shard` gives each its own part.

        Args:
            items: what the epochs are over.
            turn: how many parts of these items came before.
            key: decides the orders of the epochs.
            count: by default `questions_per_step`.
        """
        count = count or self.questions_per_step
        return epochs(items, turn * count, count, key)

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
