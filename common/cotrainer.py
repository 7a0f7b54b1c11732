"""CoTrainer: several players in one GRPOTrainer, each a LoRA adapter on one shared base.

A script defines its players and writes `step`, one training step of its paper, which returns the
batches to train on, in order. A step is written with these verbs:
    rollout(player, rows)            samples completions and rewards them -> batch with advantages
    generate(player, prompts)        samples without training -> texts (generate_ids: token ids)
    set_rewards(batch, rewards)      sets rewards that are known only later, and group advantages
    concat(batches)                  joins several rollouts of one adapter to one batch
    update(batch)                    trains at once, before `step` continues
    log_probs(player, batch)         (B, T) log-probs under any player; None is the base
    playing(player), score(batch)    the same with gradients, inside of a script's own loss
    log_mean(name, values)           logs a metric, the mean over all processes
    over_all_processes(fn, columns)  applies fn to the rows of all processes -> this process's rows
    generate_all, in_parallel        share work between processes; all get the results
    my_share(items)                  this process's part of a list that is the same everywhere

common/batch.py defines a batch, common/players.py a player. `self.saved` is a dict of the script's
own state that a checkpoint keeps. TRL provides the data loader, the reward calls, the schedule,
logging, checkpoints and several processes: see docs/how-grpotrainer-works.md.

Shapes: B rows, P prompt tokens, T completion tokens.
"""

import dataclasses
import math
import time
import zlib
from contextlib import nullcontext
from pathlib import Path

from common.advantage import group_advantage, named_group_advantage
from common.batch import Batch, Origin
from common.errors import ScriptError, UserError
from common.plain import tokenize, without_checkpointing
from common.players import AdapterTrainer, Player  # noqa: F401  Player: for scripts
from common.run import checks
from common.run.recording import write_rows
from common.tasks.answers import grouped

import torch


class CoTrainer(AdapterTrainer):
    """See the top of this file."""

    all_rows = False
    """False: without a KL term, rows whose advantages are all zero are skipped, because their
    gradient is zero. A script whose `loss` has another term there, such as an entropy bonus, sets
    True."""

    # ------------------------------------------------------------------ one optimiser step
    @staticmethod
    def define_players(args) -> dict[str, Player]:
        """THE SCRIPT WRITES THIS and returns name -> Player. Metrics begin with these names."""
        raise NotImplementedError

    def step(self, rows: list[dict]) -> list[Batch]:
        """THE SCRIPT WRITES THIS: one training step, which returns the batches to train on.

        rows: this process's questions from the data loader, each group_size times in a row.
        """
        raise NotImplementedError

    def training_step(self, model, rows, num_items_in_batch=None):
        """Runs the script's step and trains its batches; Trainer calls this once per optimiser
        step. `update` sets, uses and clears p.grad, so the optimiser step that Trainer takes
        afterwards finds no gradient and does nothing.
        """
        start, self.sampled_tokens = time.perf_counter(), 0
        model.train()
        with nullcontext() if self.trained_last else checks.keeping_state(self, "the first step"):
            batches = self.step(rows)
        checks.check_step(self, batches)
        for batch in batches:
            self.update(batch)
        self.trained_last = batches[-1].player  # the step's line names it
        world = self.accelerator.num_processes
        # log_mean averages over the processes; these are the tokens of all
        self.log_mean("co/sampled_tokens", self.sampled_tokens * world)
        self._metrics["train"]["step_time"] = [time.perf_counter() - start]
        return torch.zeros((), device=self.accelerator.device)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Returns this micro-batch's share of the batch's loss:

            loss     = sum over all tokens t of the batch (-A_t ratio_t + kl k3_t) / their number
            ratio_t  = pi(y_t) / stop_grad(pi(y_t))     1, but with the gradient of log pi(y_t)
            k3_t     = q - log q - 1,   q = pi_base(y_t) / pi(y_t)

        A batch is trained on once: the ratio is set to 1, and PPO's clip never acts. The shares of
        all micro-batches and processes add up to the loss, and so do their gradients. A script
        whose paper has another loss overrides this method; `batch.player` names the player.
        """
        logp, entropy = self.score(batch)  # (b, T)
        mask, A = batch.completion_mask, batch.advantages  # (b, T), (b,) or (b, T)
        A = A[:, None] if A.dim() == 1 else A
        ratio = (logp - logp.detach()).exp()  # (b, T)
        if self.clip_max and batch.sampled_logps is not None:  # truncated importance sampling
            ratio = ratio * (logp.detach() - batch.sampled_logps).exp().clamp(max=self.clip_max)
        loss = -A * ratio  # (b, T)
        if self.kl:
            log_q = batch.base_logps - logp
            k3 = log_q.exp() - log_q - 1
            loss = loss + self.kl * k3
            self.log_mean(f"{batch.player}/kl", k3[mask.bool()])
        self.log_mean(f"{batch.player}/entropy", entropy[mask.bool()])
        return (loss * mask).sum() / batch.total_tokens

    def update(self, batch: Batch):
        """Takes one optimiser step of the batch's player: computes loss and gradient for each
        micro-batch, adds the gradients over all processes, clips, and applies AdamW.
        """
        if self.asked_in_evaluation is not None:
            raise ScriptError("update inside of `evaluate` would train on held-out questions")
        checks.check_batch(self, batch)
        for origin in batch.origins:
            origin.trained = True
        self.record(batch)
        name, player = batch.player, self.player_named(batch.player)
        [group] = [g for g in self.optimizer.param_groups if g["adapter"] == player.adapter]
        parameters = group["params"]
        parts = self.engine.in_parts(batch, self.cfg.micro_batch, self.kl or self.all_rows)
        total = 0.0
        with self.playing(name):
            for part in parts:
                loss = self.loss(part)
                checks.check_loss(loss)
                total += loss.detach()
                for p, g in zip(parameters, torch.autograd.grad(loss, parameters)):
                    p.grad = g if p.grad is None else p.grad + g
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
        checks.check_learning(self, batch, norm)
        if norm > 0:  # if all advantages are 0, Adam's momentum must not move the adapter either
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def add_up_gradients(self, name: str, parameters: list[torch.Tensor]):
        """Sums the gradients over the processes, in one collective call. A process whose rows have
        no gradient adds zeros.
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

    def record(self, batch: Batch, credit: torch.Tensor | None = None, notes: list | None = None):
        """Writes a few rows of a batch to rollouts.jsonl, for the report.

        credit: (B,) or (B, T) numbers that are shown on the tokens in place of the advantages.
        notes: B dicts in place of the batch's.
        """
        credit = batch.advantages if credit is None else credit.detach()
        shown = dataclasses.replace(batch, advantages=credit, notes=notes or batch.notes)
        if self.accelerator.is_main_process and shown.notes and credit is not None:
            file = Path(self.args.output_dir) / "rollouts.jsonl"
            write_rows(shown, file, self.state.global_step + 1, self.processing_class)

    # ------------------------------------------------------------------ the verbs: sampling
    def rollout(self, name: str, rows: list[dict]) -> Batch:
        """Samples a completion for each row, has TRL call the player's reward functions, and
        computes the advantages of each group. A player without reward functions gets no advantages.

        Args:
            name: the player.
            rows: {"prompt": [messages], further columns for the reward functions}; rows of a group
                are adjacent. All processes call `rollout` together, with as many rows each; for a
                player without reward functions the numbers may differ between processes.

        Returns:
            A batch. Its rewards (B,) are sums over the reward functions; a script may add to its
            notes, which the report shows.
        """
        player, prompts = self.player_named(name), [row.get("prompt") for row in rows]
        checks.check_rollout(self, name, rows, player.group_size)
        prompt_ids, ids, logps = self.sample(name, prompts)
        device, pad_id = self.accelerator.device, self.processing_class.pad_token_id
        batch = Batch.of(name, prompt_ids, ids, pad_id, device)
        batch.origins = [Origin()]
        tokens, counts = zip(*self.gather([(sum(map(len, ids)), len(rows))]))
        batch.total_tokens = sum(tokens)
        batch.texts = self.decode(ids)
        if len(logps) == len(ids):  # --plain has none; for no rows an empty one, which `join` needs
            batch.sampled_logps = torch.zeros(batch.completion_ids.shape, device=device)
            drawn = torch.tensor([logp for row in logps for logp in row], device=device)
            batch.sampled_logps[batch.completion_mask.bool()] = drawn
        if self.kl:
            batch.base_logps = self.log_probs(None, batch)  # (B, T)
        functions = [function.__name__ for function in player.rewards]
        if functions and len(set(counts)) > 1:
            raise ScriptError(
                f"the {name} has {', '.join(map(str, counts))} rows on the processes; with reward "
                f"functions all need as many, because TRL gathers the rewards"
            )
        each = self.call_rewards(name, rows, prompts, batch.texts, ids)  # (B, functions)
        batch.notes = [
            {
                "player": name,
                "prompt": prompt[-1]["content"],
                "rewards": {k: r for k, r in zip(functions, rewards) if r == r},
            }
            for prompt, rewards in zip(prompts, each.tolist())
        ]
        R = each.nansum(1).masked_fill(each.isnan().all(1), torch.nan)  # (B,), NaN: not judged
        batch.rewards = R
        if functions:
            batch.advantages = group_advantage(R, player.group_size)  # (B,)
            batch.origins[0].rewards = R.clone()
            self.log_rewards(name, "reward", R, [i // player.group_size for i in range(len(R))])
        cut = [row[-1] not in self.eos_token_ids for row in ids]  # at the length limit
        self.log_mean(f"{name}/completions/mean_length", [len(row) for row in ids])
        self.log_mean(f"{name}/completions/clipped_ratio", cut)
        return batch

    def sample(self, name: str, prompts: list, greedy=False, begun: list | None = None):
        """Returns (token ids of each prompt, token ids of its completion with the end token, the
        log-prob of each token when it was drawn; [] with --plain).
        """
        if not prompts:
            return [], [], []
        player, completions, logps = self.player_named(name), [], []
        prompt_ids = tokenize(prompts, self.processing_class)
        if begun:
            prompt_ids = [ids + list(start) for ids, start in zip(prompt_ids, begun, strict=True)]
        temperature = 0.0 if greedy else player.temperature
        ends, pad_id = self.eos_token_ids, self.processing_class.pad_token_id
        if self.asked_in_evaluation is not None:
            # the draws must not depend on the step or on texts that were sampled before
            key = zlib.crc32(f"{self.args.seed} {name} {prompt_ids}".encode())
            self.asked_in_evaluation[key] += 1
            # of copies of one question each process may get as many: they must not be the same text
            apart = 1_000_003 * self.accelerator.process_index
            torch.manual_seed(key + self.asked_in_evaluation[key] + apart)
        # autocast, as in scoring: without it LoRA would compute in float32 here only
        with self.playing(name), self.accelerator.autocast():
            if self.server:
                completions, logps = self.server.complete(
                    self.model, prompt_ids, player.max_tokens, temperature, ends
                )
            else:
                for part in grouped(prompt_ids, self.cfg.rows_at_once or 256):
                    ids, of_tokens = self.engine.complete(
                        self.model, part, player.max_tokens, temperature, ends, pad_id
                    )
                    completions, logps = completions + ids, logps + of_tokens
        self.sampled_tokens += sum(map(len, completions))
        return prompt_ids, completions, logps

    def generate_ids(
        self, name: str, prompts: list, greedy: bool = False, begun: list | None = None
    ) -> list[list[int]]:
        """Returns the token ids of one completion per prompt; nothing is trained on them.

        begun: token ids with which each completion starts; the returned ids continue them.
        """
        checks.check_prompts(self, name, prompts)
        return self.sample(name, prompts, greedy, begun)[1]

    def generate(self, name: str, prompts: list, greedy: bool = False) -> list[str]:
        """Returns one completion per prompt as text; nothing is trained on them."""
        ids = self.generate_ids(name, prompts, greedy)
        return self.decode(ids)

    def decode(self, ids: list[list[int]]) -> list[str]:
        # of no rows, batch_decode makes one empty text
        return self.processing_class.batch_decode(ids, skip_special_tokens=True) if ids else []

    def generate_all(self, name: str, prompts: list, greedy: bool = False) -> list[str]:
        """Splits `generate` between the processes; prompts and results are the same on all."""
        return self.in_parallel(lambda share: self.generate(name, share, greedy), prompts)

    # ------------------------------------------------------------------ the verbs: batches
    def set_rewards(self, batch: Batch, rewards, groups: list | None = None):
        """Sets rewards that are known only after the rollout, because another player judged the
        texts or a program ran; sets the group advantages; and adds both to notes and metrics.

        Args:
            rewards: (B,). NaN marks a row without a reward, and its advantage is 0.
            groups: a key per row. Rows with the same key are compared with each other, whatever
                their prompts and wherever they are. By default `group_size` adjacent rows are a
                group; with a group_size of 1 the script writes the advantages itself.
        """
        checks.check_rewards(batch, rewards, groups)
        rewards = torch.as_tensor(rewards).to(batch.rewards)  # (B,)
        name, G = batch.player, self.player_named(batch.player).group_size
        batch.rewards, [origin] = rewards, batch.origins
        origin.rewarded, origin.rewards = True, rewards.clone()
        if groups is not None:
            batch.advantages = named_group_advantage(rewards, groups)  # (B,)
        elif G > 1:
            batch.advantages = group_advantage(rewards, G)  # (B,)
            groups = [i // G for i in range(len(rewards))]
        for note, reward in zip(batch.notes, rewards.tolist()):
            note["rewards"]["total"] = reward
        if self.player_named(name).rewards:  # `rollout` has logged this of its functions alone
            self._sums.pop(f"{name}/frac_reward_zero_std", None)
        self.log_rewards(name, "total_reward", rewards, groups)

    def concat(self, batches: list[Batch]) -> Batch:
        """Joins several rollouts of ONE adapter to a batch for one update, see `Batch.join`. The
        player of the joined batch is the adapter's name.
        """
        adapter = self.player_named(batches[0].player).adapter
        names = [*(batch.player for batch in batches), adapter]
        checks.check_concat(batches, {name: self.player_named(name) for name in names})
        return Batch.join(adapter, batches, self.processing_class.pad_token_id)

    # ------------------------------------------------------------------ the verbs: log-probs
    def score(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log-probs of the completions under the player that is `playing`, and entropies,
        (B, T) each, at the sampling temperature of the batch's player (1 if it decodes greedily).
        """
        temperature = self.player_named(batch.player).temperature or 1.0
        with self.accelerator.autocast():
            logp, entropy = self.engine.token_logps(self.model.get_base_model(), batch, temperature)
        if logp.requires_grad and batch.sampled_logps is not None:  # sampled by who is trained
            gap = (logp.detach() - batch.sampled_logps).abs()
            self.log_mean("co/sampler_gap", gap[batch.completion_mask.bool()])
        return logp, entropy

    @torch.no_grad()
    def log_probs(self, name: str | None, batch: Batch) -> torch.Tensor:
        """Returns (B, T) log-probs of the batch's completions under a player, or under the base for
        None, without a gradient. Scores one micro-batch at a time.
        """
        logps = torch.zeros(batch.completion_ids.shape, device=self.accelerator.device)
        if not len(batch):
            return logps
        with self.playing(name), without_checkpointing(self.model):
            for rows in self.engine.in_order(batch).split(self.cfg.micro_batch):
                part = self.score(batch.take(rows))[0]  # (b, t)
                logps[rows, : part.shape[1]] = part.to(logps.dtype)
        return logps
