"""What several processes share of a run: metrics, random numbers, parts of lists, gradients. One
process is a special case everywhere.
"""

import random
from collections import defaultdict
from collections.abc import Callable

from common.core.batch import Batch, padded
from common.core.errors import ScriptError
from common.core.lists import epochs

import torch
from accelerate.utils import gather_object


class Processes:
    """Methods of the trainer, which has `accelerator`, `args`, `cfg`, `state` and `_sums`."""

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

    # ------------------------------------------------------------------ epochs
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
