"""CoTrainer holds several players in one GRPOTrainer. A player is a LoRA adapter on a base that all
players share. This file has one training step: what is sampled, rewarded and scored, THE LOSS, and
the updates (optimiser steps). What TRL's trainer does differently for several players is in trl.py.

A script defines its players and writes the method `step`, one training step of its paper. `step`
returns the batches to train on, in order, and each batch makes one update. A script writes `step`
with these verbs:
    rollout(player, rows)            samples completions and rewards them -> batch with advantages
    generate(player, prompts)        samples without training -> texts (generate_ids: token ids)
    set_rewards(batch, rewards)      sets rewards that are known only later, and group advantages;
                                     `batch` may be a list, and the script may name the groups
    concat(batches)                  joins several rollouts of one adapter into one batch
    completions(player, prompts, ids), pairs(player, prompts, pairs)
                                     make a batch of texts that this step has not sampled
    update(batch)                    trains immediately, before `step` continues
    log_probs(player, batch)         (B, T) log-probs under any player; None is the base
    playing(player)                  the model is the base with this player's adapter, in a `with`
    score(batch)                     log-probs with gradients, for a script's own loss
    restart(player)                  makes the player's adapter untrained, and AdamW forgets it
    log_mean(name, values)           logs a metric: its mean over the step and all processes
    over_all_processes(fn, columns)  applies fn to the rows of all processes -> this process's rows
    generate_all, in_parallel        share work between processes; all processes get the results
    shard(items)                     returns this process's part of a list that all processes have

batch.py defines a batch. A checkpoint keeps the script's own state if it is in the dict
`self.saved`. TRL provides the data loader, the reward calls, the schedule, logging, checkpoints and
several processes: see docs/one-step.md. Scripts take CoTrainer from common/checked.py.
That class computes the same, and also looks at what each verb is given.

Shapes: B rows of a batch, b of a micro-batch, T completion tokens.
"""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

from common.core import plain
from common.core.advantage import group_advantage, named_group_advantage
from common.core.batch import Batch, as_pairs
from common.core.draws import row_key
from common.core.errors import UserError
from common.core.lists import chunk
from common.core.model import prompt_text, tokenize, without_checkpointing
from common.core.trl import PlayersTrainer

import torch


@dataclass
class Player:
    """Settings of a player. (TRL has one value of each setting for a whole trainer.)"""

    rewards: list[Callable]
    """reward functions with TRL's signature; empty if `set_rewards` gives the rewards, or if the
    player gets no rewards"""
    lr: float
    """learning rate of the player's adapter; 0 freezes the player"""
    max_tokens: int
    """length limit of a completion"""
    group_size: int = 8
    """number of adjacent rows whose rewards are compared with each other"""
    temperature: float = 1.0
    """sampling temperature; 0 takes the likeliest token"""
    adapter: str = ""
    """name of the player's adapter; by default the player's own name"""
    max_grad_norm: float = 1.0
    """norm to which the gradient is clipped; 0 clips nothing"""
    reads: int = 0
    """largest number of tokens of other players' texts in its prompt; memory is planned from it"""
    rows: int = 1
    """how many sequences each row of a micro-batch has: 2 if the player is trained on pairs; memory
    is planned from it"""


class CoTrainer(PlayersTrainer):
    """See the top of this file."""

    all_rows = False
    """False: if there is no KL term, rows whose advantages are all 0 are skipped, because their
    gradient is 0. A script sets True if its `loss` has a gradient in such rows, for example because
    of an entropy bonus."""

    def __init__(self, model, players: dict[str, Player], cfg, config, *data, **more):
        """Takes the arguments of PlayersTrainer. Of cfg this class reads kl (0 if cfg has none),
        micro_batch, generation_batch_size and vllm_importance_sampling_clip_max.
        """
        super().__init__(model, players, cfg, config, *data, **more)
        # `engine` computes log-probs, and `sampler` samples; `launch` may put others here.
        self.engine = self.sampler = plain
        self.recorder = None  # writes what the report shows; `launch` puts it here
        self.kl = getattr(cfg, "kl", 0.0)
        self.clip_max = cfg.vllm_importance_sampling_clip_max
        self.generation_batch_size = cfg.generation_batch_size or 256
        self.turns = []  # the players of the `playing` blocks that are open
        self.trained_last = ""  # player of the latest update
        self.sampled_tokens = self.sample_calls = 0  # since the step began
        self.asked_in_evaluation = None  # (player, prompt) -> how often, in an evaluation

    # ------------------------------------------------------------------ one training step
    @staticmethod
    def define_players(args) -> dict[str, Player]:
        """THE SCRIPT WRITES THIS. Returns name -> Player; metrics begin with these names."""
        raise NotImplementedError

    def step(self, rows: list[dict]) -> list[Batch]:
        """THE SCRIPT WRITES THIS: one training step of the paper. Returns the batches to train on,
        in order, at least one.

        rows: this process's questions from the data loader, each group_size times in a row.
        """
        raise NotImplementedError

    def training_step(self, model, rows, num_items_in_batch=None):
        """Runs the script's step and makes one update for each batch that it returns. Trainer calls
        this method once per training step, and its own optimiser afterwards. `update` has cleared
        p.grad by then, so Trainer's optimiser finds no gradient and does nothing. Returns 0 for
        Trainer's loss, which nobody reads.
        """
        start, self.sampled_tokens, self.sample_calls = time.perf_counter(), 0, 0
        model.train()
        batches = self.run_step(rows)
        for batch in batches:
            self.update(batch)
        self.trained_last = batches[-1].player  # printed in the line of the step
        world = self.accelerator.num_processes
        # the tokens of all processes: times world, because log_mean averages over the processes
        self.log_mean("co/sampled_tokens", self.sampled_tokens * world)
        self._metrics["train"]["step_time"] = [time.perf_counter() - start]
        return torch.zeros((), device=self.accelerator.device)

    def run_evaluation(self, evaluate: Callable) -> dict[str, float]:
        """Returns the metrics that a script's `evaluate` computes on the held-out questions. An
        evaluation has random numbers of its own, so the number of evaluations does not change the
        training. The random numbers are the same in each evaluation, so a player that has not
        changed answers the same prompt with the same text.
        """
        cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(self.args.seed)  # for what the script draws itself
            self.asked_in_evaluation = Counter()  # for what `sample` draws
            try:
                return evaluate(self, self.held_out)
            finally:
                self.asked_in_evaluation = None

    def run_step(self, rows: list[dict]) -> list[Batch]:
        """Calls `step`; common/checked.py also looks at what `step` has left on the trainer."""
        return self.step(rows)

    def loss(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns (this micro-batch's share of the batch's loss, tensors by name for `show_loss`).
        The loss is GRPO's with a mean over tokens (DAPO, arXiv:2503.14476, eq. 8):

            loss     = sum over all tokens t of the batch (-A_t ratio_t + kl k3_t) / their number
            ratio_t  = pi(y_t) / stop_grad(pi(y_t))     1, but with the gradient of log pi(y_t)
            k3_t     = q - log q - 1,   q = pi_base(y_t) / pi(y_t)

        k3 is the estimator of KL(pi, pi_base) that GRPO takes (arXiv:2402.03300, eq. 4). A batch is
        trained on once, so the ratio is 1, and PPO's clip never acts. With
        --vllm-importance-sampling-clip-max the ratio is multiplied by min(pi / pi_vllm, clip_max),
        where pi_vllm is the probability with which the vLLM server drew the token. If all A_t of a
        batch are 0, the player follows the KL term alone; without a KL term the update is skipped
        (see `teaches_nothing`).

        The shares of all micro-batches and processes add up to the loss, and their gradients add up
        to its gradient. A script whose paper has another loss overrides this method. Its loss
        divides by a number of the whole batch, such as the tokens or the pairs of all processes.
        `batch.player` says whose micro-batch it is.
        """
        logp, entropy = self.score(batch)  # (b, T)
        mask, A = batch.completion_mask, batch.advantages  # (b, T), (b,) or (b, T)
        A = A[:, None] if A.dim() == 1 else A
        ratio = (logp - logp.detach()).exp()  # (b, T)
        if self.clip_max and batch.sampled_logps is not None:  # truncated importance sampling
            ratio = ratio * (logp.detach() - batch.sampled_logps).exp().clamp(max=self.clip_max)
        loss = -A * ratio  # (b, T)
        shown = {"entropy": entropy}  # (b, T)
        if self.kl:
            log_q = batch.base_logps - logp
            k3 = log_q.exp() - log_q - 1
            loss = loss + (self.kl if batch.kl_weights is None else batch.kl_weights[:, None]) * k3
            shown["kl"] = k3
        return (loss * mask).sum() / batch.total_tokens, shown

    def show_loss(self, batch: Batch, shown: dict[str, torch.Tensor]):
        """Logs the mean of each tensor that `loss` has returned by name, as {player}/{name}. A
        script that shows more, or something else, overrides this method.

        shown: tensors without gradients. A tensor of shape (b, T), or (2b, T) for pairs, is
            averaged over all tokens of the completions, and any other tensor over all entries.
            "credit", (b, T) or (2b, T), is not logged: it is for `record_part`.
        """
        mask = batch.completion_mask.flatten(0, -2).bool()  # (b, T) or (2b, T)
        for name, values in shown.items():
            if name != "credit":
                values = values[mask] if values.shape == mask.shape else values
                self.log_mean(f"{batch.player}/{name}", values)

    def record(self, batch: Batch, credit: torch.Tensor | None = None, notes: list | None = None):
        """Shows a few rows of a batch in the report. `update` calls it for every batch that has
        advantages; a script calls it to show other numbers.

        credit: (B,) or (B, T), numbers that the report shows on the tokens in place of advantages.
        notes: B dicts in place of the batch's notes.
        """
        if self.recorder:
            self.recorder.record(batch, credit, notes)

    def record_part(self, batch: Batch, credit: torch.Tensor, name: str, values, sides=(), of=""):
        """Shows rows of a micro-batch in the report. The tokens carry the numbers `credit` in place
        of advantages. A script's `show_loss` calls this method. The rows to show are chosen after
        the last micro-batch, among all rows, so they do not depend on how rows were sorted and
        split.

        Args:
            batch: b completions or b pairs.
            credit: the numbers on the tokens, (b, T), or (2b, T) for pairs.
            name: what `values` is.
            values: a number for each row or pair, which the report shows as its reward.
            sides: for pairs, two names: who wrote the chosen text, and who wrote the rejected text.
                For completions, one name: who wrote them. By default it is the batch's player.
            of: what `credit` is; by default log-probabilities.
        """
        if self.recorder:
            self.recorder.record_part(batch, credit, name, values, sides, of)

    def update(self, batch: Batch):
        """Makes one update (an optimiser step) of the batch's player: computes loss and gradient of
        each micro-batch, adds the gradients over all processes, clips, and applies AdamW. All
        processes call it together.

        Raises:
            UserError: the gradient's norm is not finite.
        """
        if self.kl and batch.advantages is not None and batch.base_logps is None:
            batch.base_logps = self.log_probs(None, batch)  # (B, T), of texts from elsewhere
        self.record(batch)
        self.log_advantages(batch)
        name, player = batch.player, self.player_named(batch.player)
        [group] = [g for g in self.optimizer.param_groups if g["adapter"] == player.adapter]
        parameters, total = group["params"], 0.0
        with self.playing(name):
            for rows in self.micro_batches(batch):
                part = batch.take(rows)
                loss, shown = self.loss(part)
                # detached, or the entropy's graph would stay in memory until the gradient is there
                shown = {name: values.detach() for name, values in shown.items()}
                self.show_loss(part, shown)
                total += loss.detach()
                for p, g in zip(parameters, torch.autograd.grad(loss, parameters)):
                    p.grad = g if p.grad is None else p.grad + g
        if self.recorder:
            self.recorder.record_parts()
        self.add_up_gradients(name, parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, player.max_grad_norm or math.inf).item()
        # the processes' shares add up, and log_mean takes their mean
        self.log_mean(f"{name}/loss", total * self.accelerator.num_processes)
        self.log_mean(f"{name}/grad_norm", norm)
        self.log_mean(f"{name}/learning_rate", group["lr"])  # as scheduled
        if not math.isfinite(norm):
            raise UserError(
                f"step {self.state.global_step}: the {name}'s grad_norm is {norm}. The run stops "
                f"here and keeps its last checkpoint in {self.args.output_dir}; a lower --lr is "
                f"the first thing to try."
            )
        if not self.teaches_nothing(batch, norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def teaches_nothing(self, batch: Batch, norm: float) -> bool:
        """Whether the adapter must not move after this batch.

        If all advantages on all processes are 0 and there is no KL term, the adapter must not move:
        Adam's momentum alone would move it. With a KL term the pull to the base remains, and the
        adapter follows this pull, as in TRL and in the papers' releases (verl). But the adapter
        must not move if this would be its first update. The adapter then equals the base, and the
        gradient of the KL term is only rounding. Adam divides a gradient by the size of the
        gradients so far, so it would move each weight by the learning rate.

        If a batch has no advantages, or if the script's loss has a gradient where advantages are 0,
        the adapter must not move if the norm of the gradient is 0.
        """
        A = batch.advantages
        if A is None or self.all_rows:
            return norm == 0
        if any(self.gather([bool(A.any())])):
            return False
        parameters = self.parameters_of(self.player_named(batch.player).adapter)
        return not self.kl or norm == 0 or parameters[0] not in self.optimizer.state

    def micro_batches(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Splits the rows that can have a gradient into micro-batches. Returns the row numbers of
        each micro-batch, (b,). The loss divides by the tokens of *all* rows, so the gradient does
        not change if rows are left out, sorted or split in another way.
        """
        if not len(batch):  # another process may have rows
            return ()
        order, A = self.engine.in_order(batch), batch.advantages  # (B,); (B,), (B, T) or None
        if A is not None and not (self.kl or self.all_rows):  # else all rows may have a gradient
            order = order[(A.reshape(len(A), -1) != 0).any(1).cpu()[order]]
        parts = -(-len(order) // self.cfg.micro_batch)  # rounded up
        return torch.tensor_split(order, parts) if parts else ()

    # ------------------------------------------------------------------ whose turn it is
    @contextmanager
    def playing(self, name: str | None):
        """Inside this block the model is the base with this player's adapter; for None, the base.

        PEFT turns requires_grad off for all other adapters, so their gradients are None. AdamW
        leaves a parameter whose gradient is None as it is, weights and momentum.
        """
        before = self.model.active_adapter
        self.turns.append(name)
        try:
            if name is None:
                with self.model.disable_adapter():
                    yield
            else:
                self.model.set_adapter(self.player_named(name).adapter)
                yield
        finally:
            self.turns.pop()
            self.model.set_adapter(before)

    # ------------------------------------------------------------------ the verbs: sampling
    def rollout(self, name: str, rows: list[dict]) -> Batch:
        """Samples a completion for each row, has TRL call the player's reward functions, and
        computes the advantages of each group. If the player has no reward functions, the batch has
        no advantages before `set_rewards`. All processes call `rollout` together. They need equally
        many rows if the player has reward functions.

        Args:
            name: the player.
            rows: {"prompt": [messages], further columns for the reward functions}; rows of a group
                are adjacent.

        Returns:
            A batch. Its rewards, (B,), are sums over the reward functions, and its advantages are
            (B,). A script may add to its notes, which the report shows.
        """
        player, prompts = self.player_named(name), [row.get("prompt") for row in rows]
        prompt_ids, ids, logps = self.sample(name, prompts)
        batch = self.batch_of_ids(name, prompt_ids, ids)
        batch.total_tokens = sum(self.gather([sum(map(len, ids))]))
        batch.texts = self.decode(ids)
        batch.sampled_logps = torch.zeros(batch.completion_ids.shape, device=batch.row.device)
        drawn = torch.tensor([logp for row in logps for logp in row], device=batch.row.device)
        batch.sampled_logps[batch.completion_mask.bool()] = drawn
        if self.kl:
            batch.base_logps = self.log_probs(None, batch)  # (B, T)
        each = self.call_rewards(name, rows, prompts, batch.texts, ids)  # (B, functions)
        R = each.nansum(1).masked_fill(each.isnan().all(1), torch.nan)  # (B,), NaN: not judged
        batch.rewards = R
        if player.rewards:
            batch.advantages = group_advantage(R, player.group_size)  # (B,)
            self.log_mean(f"{name}/reward", R[~R.isnan()])
            G = player.group_size
            self.log_flat_groups([(name, r, i // G) for i, r in enumerate(R.tolist())])
        functions = [function.__name__ for function in player.rewards]
        for prompt, rewards in zip(prompts, each.tolist()):
            of_row = {f: r for f, r in zip(functions, rewards) if r == r}
            batch.notes.append({"player": name, "prompt": prompt_text(prompt), "rewards": of_row})
        cut = [row[-1] not in self.eos_token_ids for row in ids]  # at the length limit
        self.log_mean(f"{name}/completions/mean_length", [len(row) for row in ids])
        self.log_mean(f"{name}/completions/clipped_ratio", cut)
        return batch

    def sample(self, name: str, prompts: list, greedy=False, prefix: list | None = None):
        """Samples one completion for each prompt. All processes call it together. The number of
        prompts may differ between processes.

        Args:
            name: the player.
            prompts: a list of messages for each completion.
            greedy: take the likeliest token, whatever the player's temperature.
            prefix: for each prompt, the token ids with which its completion starts; they count as
                part of the prompt.

        Returns:
            (token ids of each prompt, token ids of its completion with the end token, the log-prob
            in nats of each token when it was drawn).
        """
        player, completions, logps = self.player_named(name), [], []
        prompt_ids = tokenize(prompts, self.processing_class)
        if prefix:
            prompt_ids = [ids + list(start) for ids, start in zip(prompt_ids, prefix, strict=True)]
        limits = player.max_tokens, 0.0 if greedy else player.temperature, self.eos_token_ids
        keys = self.row_keys(name, prompt_ids)
        # autocast, as in scoring: without it LoRA would compute in float32 here only
        with self.playing(name), without_checkpointing(self.model), self.accelerator.autocast():
            size = self.generation_batch_size
            for part, its_keys in zip(chunk(prompt_ids, size), chunk(keys, size)):
                ids, of_tokens = self.sampler.generate(self.model, part, *limits, its_keys)
                completions, logps = completions + ids, logps + of_tokens
        self.sampled_tokens += sum(map(len, completions))
        return prompt_ids, completions, logps

    def row_keys(self, name: str, prompt_ids: list[list[int]]) -> list[int]:
        """Returns the key of each row's draws (see draws.py). In training a key is made of the
        seed, the step, the player, the number of the call in this step, and the row's number among
        the rows of all processes. In an evaluation it is made of the seed, the player, the prompt,
        and how often this prompt was asked before; so a figure changes only if a player changes.
        """
        seed, asked, keys = self.args.seed, self.asked_in_evaluation, {}
        if asked is None:
            self.sample_calls, asked = self.sample_calls + 1, Counter()
            words = row_key(seed, self.state.global_step, name, self.sample_calls)
            words = [words] * len(prompt_ids)
        else:
            words = [row_key(seed, name, ids) for ids in prompt_ids]
        for process, its in enumerate(self.gather([words])):
            keys[process] = []
            for word in its:
                keys[process].append(row_key(word, asked[word]))
                asked[word] += 1
        return keys[self.accelerator.process_index]

    def generate_ids(
        self, name: str, prompts: list, greedy: bool = False, prefix: list | None = None
    ) -> list[list[int]]:
        """Returns the token ids of one completion per prompt; nothing is trained on them.

        greedy: take the likeliest token, whatever the player's temperature.
        prefix: for each prompt, the token ids with which its completion starts; the returned ids
            continue them.
        """
        return self.sample(name, prompts, greedy, prefix)[1]

    def generate(self, name: str, prompts: list, greedy: bool = False) -> list[str]:
        """Returns one completion per prompt as text; nothing is trained on them. All processes call
        it together. The number of prompts may differ between processes.
        """
        return self.decode(self.generate_ids(name, prompts, greedy))

    def generate_all(self, name: str, prompts: list, greedy: bool = False) -> list[str]:
        """Returns what `generate` does, and splits the work between the processes. The prompts must
        be the same on all processes, and so are the results.
        """
        return self.in_parallel(lambda share: self.generate(name, share, greedy), prompts)

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Returns token ids as texts, without special tokens."""
        # batch_decode would turn an empty list into one empty text
        return self.processing_class.batch_decode(ids, skip_special_tokens=True) if ids else []

    # ------------------------------------------------------------------ the verbs: batches
    def batch_of_ids(self, name: str, prompt_ids: list[list[int]], ids: list[list[int]]) -> Batch:
        """Returns a batch that trains this player, from token ids of B prompts and completions."""
        pad_id, device = self.processing_class.pad_token_id, self.accelerator.device
        return Batch.of(name, prompt_ids, ids, pad_id, device)

    def completions(self, name: str, prompts: list, ids: list[list[int]]) -> Batch:
        """Returns a batch of completions that this step has not sampled, for `log_probs` or for a
        script's own `loss`. Both score them at the player's temperature. The batch has neither
        rewards nor advantages.

        Args:
            name: the player that is trained on them, if `step` returns the batch.
            prompts: B lists of messages, which are tokenised as for a rollout.
            ids: B lists of token ids. They are taken as they are: no end token is added.
        """
        batch = self.batch_of_ids(name, tokenize(prompts, self.processing_class), ids)
        batch.notes = [
            {"player": name, "prompt": prompt_text(prompt), "rewards": {}} for prompt in prompts
        ]
        return batch

    def pairs(self, name: str, prompts: list, pairs: list[tuple]) -> Batch:
        """Returns a batch of B pairs for a script's own `loss`; batch.py shows such a loss.

        Args:
            name, prompts: as in `completions`, with one prompt for each pair.
            pairs: B times (chosen, rejected), each a list of token ids.
        """
        twice = [prompt for prompt in prompts for _ in range(2)]
        return as_pairs(self.completions(name, twice, [ids for pair in pairs for ids in pair]))

    def encode(self, text: str, ended: bool = True) -> list[int]:
        """Returns a text's token ids as a player would have written them; ended: with the end token
        that stops a completion.
        """
        ids = self.processing_class(text, add_special_tokens=False).input_ids
        return [*ids, self.processing_class.eos_token_id] if ended else ids

    def set_rewards(self, batch: Batch | list[Batch], rewards, groups: list | None = None):
        """Sets rewards that are known only after the rollout, because they come from another
        player's verdict or from a program, and sets the advantages of each group. Adds the rewards
        to the notes and the metrics.

        Args:
            batch: what `rollout` returned; or a list of rollouts that are normalised together, for
                example all turns of a dialogue.
            rewards: (B,); for a list of batches, the rewards of all their rows, batch after batch.
                NaN marks a row without a reward, and its advantage is 0.
            groups: a key for each row, in the order of `rewards`. Rows with equal keys are
                compared with each other, whatever their prompts are, on all processes; so all
                processes make this call together. By default `group_size` adjacent rows are a
                group. With a group_size of 1 and without `groups`, the script writes
                batch.advantages itself.
        """
        batches = batch if isinstance(batch, list) else [batch]
        R = torch.as_tensor(rewards).to(batches[0].rewards)  # (B,)
        G, A = self.player_named(batches[0].player).group_size, None
        names = [batch.player for batch in batches for _ in range(len(batch))]
        compared = []  # (player, reward, group) of each row
        if groups is not None:
            A = self.over_all_processes(named_group_advantage, R, groups)  # (B,)
            compared = self.gather([*zip(names, R.tolist(), groups)])
        elif G > 1:
            A = group_advantage(R, G)  # (B,)
            compared = [(name, r, i // G) for i, (name, r) in enumerate(zip(names, R.tolist()))]
        first = 0
        for batch in batches:
            rows = slice(first, first := first + len(batch))
            batch.rewards = R[rows]
            batch.advantages = batch.advantages if A is None else A[rows]
            for note, reward in zip(batch.notes, R[rows].tolist()):
                note["rewards"]["total"] = reward
            # `rollout` has logged this metric for the rewards of the functions; R replaces them
            if self.player_named(batch.player).rewards:
                self._sums.pop(f"{batch.player}/frac_reward_zero_std", None)
            self.log_mean(f"{batch.player}/total_reward", R[rows][~R[rows].isnan()])
        self.log_flat_groups(compared)

    def concat(self, batches: list[Batch]) -> Batch:
        """Returns one batch with the rows of several rollouts of ONE adapter, for one update; see
        `Batch.join`. The player of the joined batch is the adapter's name, because the rows may
        come from several players. The batch is scored at one temperature, so these players must all
        have sampled at the same temperature. Advantages are copied, so set them before the call.
        """
        adapter = self.player_named(batches[0].player).adapter
        return Batch.join(adapter, batches, self.processing_class.pad_token_id)

    # ------------------------------------------------------------------ the verbs: log-probs
    def score(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (log-probs of the completions under the player that is `playing`, entropies of
        the distributions of their tokens), (B, T) each, in nats, with a gradient unless it is
        switched off. Both are at the sampling temperature of the batch's player, or at 1 if it
        decodes greedily. In `step`, call `log_probs` in place of `score`.
        """
        temperature = self.player_named(batch.player).temperature or 1.0
        with self.accelerator.autocast():
            logp, entropy = self.engine.token_logps(self.model.get_base_model(), batch, temperature)
        # a gradient means that `loss` scores the batch under the player that is trained
        if logp.requires_grad and batch.sampled_logps is not None:
            gap = (logp.detach() - batch.sampled_logps).abs()[batch.completion_mask.bool()]
            self.log_mean("co/sampler_gap", gap)
        return logp, entropy

    @torch.no_grad()
    def log_probs(self, name: str | None, batch: Batch) -> torch.Tensor:
        """Returns the log-probs of the batch's completions under a player, (B, T), in nats, without
        a gradient; name None is the base. One micro-batch is scored at a time.
        """
        logps = torch.zeros(batch.completion_ids.shape, device=self.accelerator.device)
        if not len(batch):
            return logps
        with self.playing(name), without_checkpointing(self.model):
            for rows in self.engine.in_order(batch).split(self.cfg.micro_batch):
                part = self.score(batch.take(rows))[0]  # (b, t)
                logps[rows, : part.shape[1]] = part.to(logps.dtype)
        return logps


def with_adapters(players: dict[str, Player]) -> dict[str, Player]:
    """Returns the same players, each with the name of its adapter filled in."""
    return {
        name: dataclasses.replace(player, adapter=player.adapter or name)
        for name, player in players.items()
    }
