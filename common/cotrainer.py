"""CoTrainer: several players in one GRPOTrainer, each a LoRA adapter on one shared base.

A script writes `step(rows)`, one optimiser step of its paper, and returns the batches to train on,
in order. Each batch remembers its player, so the right adapter is trained. The verbs it is written
with:
    rollout(player, rows)            sample and reward completions -> batch, with group advantages
    generate(player, prompts)        sample without training -> texts (generate_ids: token ids)
    update(batch)                    one optimiser step at once, before `step` goes on
    pay(batch, rewards)              rewards known only later: sets them, and the group advantages
    concat(batches)                  several rollouts of one adapter as one batch
    log_probs(player, batch)         (B, T) of any player; None is the base
    log_mean(name, values)           a metric, averaged over all processes
    over_all_processes(fn, columns)  this process's rows of fn(everyone's rows)
    generate_all, in_parallel        work shared between processes, results to all: for evaluation
    my_share(items)                  this process's part of a list that is the same everywhere

A batch is a dict: player, prompt_ids and prompt_mask (B, P), completion_ids and completion_mask (B,
T), advantages (B,) or (B, T), num_items_in_batch (tokens of all processes), with a KL term
base_logps (B, T); for the script rewards (B,), texts and notes (B each); for the report, where
advantages are a sum, components {name: (B,) or (B, T)}. `memory`, a dict, holds what must survive a
checkpoint.

The loss is `CoTrainer.loss`. How players share a trainer is in common/adapters.py; the rest is
TRL's: data loader, reward calls, gradient accumulation, schedule, logging, checkpoints, several
processes. docs/how-grpotrainer-works.md lists every override.

Shapes: B rows, P prompt tokens, T completion tokens.
"""

import math
from collections.abc import Callable
from pathlib import Path

from common import scoring
from common.adapters import AdapterTrainer, Player  # noqa: F401  Player: for scripts
from common.advantage import group_advantage
from common.checks import check_batch, check_groups, check_prompts, check_step
from common.recording import record

import torch


class CoTrainer(AdapterTrainer):
    """See the top of this file."""

    all_rows = False
    """Rows whose advantages are all zero are left out, unless there is a KL term. A script whose
    `loss` has another term with a gradient there, such as an entropy bonus, sets this."""

    # ------------------------------------------------------------------ one optimiser step
    def step(self, rows: list[dict]) -> list[dict]:
        """THE SCRIPT WRITES THIS: one optimiser step -> the batches to train on, in order.

        rows: this process's share of the data loader's, every question group_size times in a row.
        """
        raise NotImplementedError

    def _prepare_inputs(self, rows):
        """Called for every micro-batch; at the first one of a step, the step is played."""
        if self._step % self.args.steps_per_generation == 0:
            self.sampled_tokens = 0
            batches = self.step(rows)
            check_step(self, batches, self._needs_advantages())
            *first, last = batches
            self.log_mean("co/sampled_tokens", sum(self.gather([self.sampled_tokens])))
            for batch in first:
                self.update(batch)  # at once
            self._become(last["player"])  # for good: Trainer asks for its loss after this
            parts, last["trained"] = self.micro_batches(last), True
            unused = self.args.steps_per_generation - len(parts)
            self._buffered_inputs = [{}] * unused + parts  # DDP exchanges gradients at the last one
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def loss(self, model, batch: dict) -> torch.Tensor:
        """The share of a micro-batch in

            loss     = sum over all tokens t of a step (-A_t ratio_t + kl k3_t) / their number
            ratio_t  = pi(y_t) / stop_grad(pi(y_t))     1, but with the gradient of log pi(y_t)
            k3_t     = q - log q - 1,   q = pi_base(y_t) / pi(y_t)

        There is one update per batch of rollouts, so PPO's clip would never act. A script whose
        paper has another loss overrides this; `batch["player"]` says whose micro-batch it is.
        Rows whose advantages are all zero are left out of it, see `all_rows`.
        """
        logp, entropy = self.score(model, batch)  # (b, T)
        mask, A = batch["completion_mask"], batch["advantages"]  # (b, T), (b,) or (b, T)
        A = A[:, None] if A.dim() == 1 else A
        ratio = (logp - logp.detach()).exp()  # (b, T)
        loss = -A * ratio  # (b, T)
        if self.kl:
            log_q = batch["base_logps"] - logp
            k3 = log_q.exp() - log_q - 1
            loss = loss + self.kl * k3
            self.log_mean(f"{batch['player']}/kl", (k3 * mask).sum() / mask.sum())
        self.log_mean(f"{batch['player']}/entropy", (entropy * mask).sum() / mask.sum())
        # DDP averages the gradients of the processes; the tokens are those of all of them together
        return (loss * mask).sum() / batch["num_items_in_batch"] * self.accelerator.num_processes

    def update(self, batch: dict):
        """One optimiser step of the batch's player, at once, outside of Trainer's own step.

        Gradients are taken with autograd.grad, because backward() would fire DDP's hooks, which
        would take this adapter to be part of Trainer's own backward pass. All other adapters have
        no gradient (None), so AdamW leaves them alone, momentum included.
        """
        check_batch(self, batch, self._needs_advantages())
        batch["trained"] = True  # see checks.TWICE
        with self.playing(batch["player"]):
            parts, player = self.micro_batches(batch), self._player()
            if self.flat:
                return
            model = self.accelerator.unwrap_model(self.model)
            parameters = self._parameters_of(player.adapter)
            for part in parts:
                loss = self._compute_loss(model, part)
                for p, g in zip(parameters, torch.autograd.grad(loss, parameters)):
                    p.grad = g if p.grad is None else p.grad + g
                # log_mean averages over the parts, whose losses are shares of a sum
                self.log_mean(f"{batch['player']}/loss", loss * len(parts))
            for p in parameters:
                p.grad = self.accelerator.reduce(p.grad, "mean")
            most = player.max_grad_norm or math.inf  # 0: not clipped, as Trainer has it
            norm = torch.nn.utils.clip_grad_norm_(parameters, most).item()
            self._finite("grad_norm", norm)
            self.log_mean(f"{batch['player']}/grad_norm", norm)
            # not accelerate's wrapper, which would wait for its turn
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def micro_batches(self, batch: dict) -> list[dict]:
        """The batch in parts of at most --micro-batch rows; a few rows are recorded on the way."""
        self.record(batch)
        live = scoring.live_rows(batch, self.kl or self.all_rows)  # (B,)
        # all processes need as many parts: DDP and metrics wait for each other in every one
        batches, counts = zip(*self.gather([((batch["player"], len(live)), int(live.sum()))]))
        if len(set(batches)) > 1:
            got = ", ".join(f"{count} rows of the {player}" for player, count in batches)
            raise ValueError(f"all processes must train one player on as many rows; got {got}")
        self.flat = max(counts) == 0  # then not even momentum may move the adapter
        size = self.args.per_device_train_batch_size
        sharing = not self.args.gradient_checkpointing
        return scoring.micro_batches(batch, live, max(1, *counts), size, sharing)

    def _needs_advantages(self) -> bool:
        """A script's own loss may do without, as those on pairs do."""
        return type(self).loss is CoTrainer.loss

    def record(self, batch: dict):
        """A few rows of the batch go to rollouts.jsonl, for the report."""
        if self.accelerator.is_main_process and {"notes", "advantages"} <= batch.keys():
            file = Path(self.args.output_dir) / "rollouts.jsonl"
            record(batch, file, self.state.global_step + 1, self.processing_class)

    def _compute_loss(self, model, batch):
        if not batch:  # a micro-batch that is not needed: a zero that backward accepts
            return 0.0 * self._parameters_of(self._player().adapter)[0].sum()
        return self.loss(model, batch)

    # ------------------------------------------------------------------ the verbs
    def rollout(self, name: str, rows: list[dict]) -> dict:
        """A completion per row, its rewards, and the advantages of its group; without advantages if
        the player has no reward functions.

        Args:
            name: the player.
            rows: {"prompt": [messages], further columns for the reward functions}; groups adjacent.

        Returns:
            A batch, see the top of this file. rewards (B,) is the sum over the reward functions;
            notes say what the report shows of each row, and a script may add to them.
        """
        G, prompts = self._player(name).group_size, [row.get("prompt") for row in rows]
        check_prompts(name, prompts)
        check_groups(name, prompts, G)
        with self.playing(name), self._metrics_named(name):
            batch = self._generate_and_score_completions(rows)
            if self.kl:
                batch["base_logps"] = self.log_probs(None, batch)  # (B, T)
        first = self.accelerator.process_index * len(rows)
        rewards = self._rewards_per_func[
            first : first + len(rows)
        ]  # (B, functions), NaN: not judged
        R = rewards.nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)  # (B,)
        functions = [f.__name__ for f in self._player(name).rewards]
        batch |= {"player": name, "texts": self._texts, "rewards": R}
        if functions:
            batch["advantages"] = group_advantage(R, G)  # (B,)
        else:
            del batch["advantages"]  # TRL's, all zero; `pay` sets them
        batch["notes"] = [
            {
                "player": name,
                "prompt": row["prompt"][-1]["content"],
                "rewards": {k: r for k, r in zip(functions, paid) if r == r},
            }
            for row, paid in zip(rows, rewards.tolist())
        ]
        return batch

    @torch.no_grad()
    def generate_ids(
        self, name: str, prompts: list, greedy: bool = False, begun: list | None = None
    ) -> list[list[int]]:
        """Token ids of one completion per prompt, as sampled; nothing is trained on them.

        begun: token ids with which each completion has begun already; what comes back follows them.
        """
        if not prompts:
            return []
        check_prompts(name, prompts)
        with self.playing(name):
            if greedy:
                self._set_sampling(self._player().max_tokens, 0.0)
            ids, *rest = self._tokenize_prompts(prompts)
            if begun:
                ids = [prompt + list(start) for prompt, start in zip(ids, begun, strict=True)]
            return self._generate_single_turn(ids, *rest, 1)[0]

    def generate(self, name: str, prompts: list, greedy: bool = False) -> list[str]:
        """One completion per prompt, as text; nothing is trained on them."""
        ids = self.generate_ids(name, prompts, greedy)
        return self.processing_class.batch_decode(ids, skip_special_tokens=True) if ids else []

    def pay(self, batch: dict, rewards):
        """Rewards that are known only after the rollout, because somebody judged, ran or counted:
        (B,); NaN where nobody did, which makes the row's advantage 0.

        Sets the batch's rewards and group advantages, and says so in notes and metrics.
        """
        rewards = torch.as_tensor(rewards).to(batch["rewards"])  # (B,)
        if rewards.shape != batch["rewards"].shape:
            rows, paid = len(batch["rewards"]), tuple(rewards.shape)
            raise ValueError(f"pay: rewards must be ({rows},), one per row; got {paid}")
        name, G = batch["player"], self._player(batch["player"]).group_size
        batch |= {"rewards": rewards, "advantages": group_advantage(rewards, G)}
        for note, reward in zip(batch["notes"], rewards.tolist()):
            note["rewards"]["total"] = reward
        known = ~rewards.isnan()  # NaN: not judged
        self.log_mean(f"{name}/total_reward", rewards[known])
        if G > 1:  # in the place of what `rollout` has logged of the reward functions alone
            most = rewards.masked_fill(~known, -math.inf).reshape(-1, G).amax(1)  # (P,)
            least = rewards.masked_fill(~known, math.inf).reshape(-1, G).amin(1)  # (P,)
            self.log_mean(f"{name}/frac_reward_zero_std", most <= least)

    def concat(self, batches: list[dict]) -> dict:
        """Several rollouts of ONE adapter as one batch, for one update on all of them.

        Prompts are padded on the left, completions on the right; advantages become (B, T), and
        components, which only the report shows, are to be set on the whole.
        """
        players = [self._player(batch["player"]) for batch in batches]
        for what in ("adapter", "temperature"):
            if len({getattr(player, what) for player in players}) != 1:
                found = ", ".join(
                    f"{b['player']}: {getattr(p, what)}" for b, p in zip(batches, players)
                )
                raise ValueError(f"concat: batches must be of one {what}; got {found}")
        if odd := set.union(*(batches[0].keys() ^ batch.keys() for batch in batches)):
            raise ValueError(f"concat: not every batch has {', '.join(sorted(odd))}")
        names = {batch["player"] for batch in batches}
        joined = {"player": names.pop() if len(names) == 1 else players[0].adapter}
        joined["num_items_in_batch"] = sum(batch["num_items_in_batch"] for batch in batches)
        for batch in batches:
            if batch["advantages"].dim() == 1:
                batch["advantages"] = batch["advantages"][:, None] * batch["completion_mask"]
        for key in batches[0]:
            if key in joined or key == "components":
                continue
            values = [batch[key] for batch in batches]
            if isinstance(values[0], list):  # texts, notes
                joined[key] = [value for part in values for value in part]
            else:
                fill = self.processing_class.pad_token_id if key.endswith("_ids") else 0
                joined[key] = torch.cat(
                    scoring.padded(values, left=key.startswith("prompt"), fill=fill)
                )
        return joined

    def log_probs(self, name: str | None, batch: dict, model=None) -> torch.Tensor:
        """(B, T) log-probs of the batch's completions under a player, or under the base for None.

        model: the one that `loss` was given, for log-probs with a gradient. Without it they have
        none, and are computed micro-batch by micro-batch.
        """
        rolled_out = batch.get("player", self.player)  # the base is scored at its temperature
        with self.playing(rolled_out), self.playing(name):
            if model is not None:
                return self.score(model, batch)[0]
            model = self.accelerator.unwrap_model(self.model)
            scored = {key: batch[key] for key in scoring.SCORED}
            logps = torch.zeros(batch["completion_ids"].shape, device=self.accelerator.device)
            parts = scoring.like_with_like(batch).split(self.args.per_device_train_batch_size)
            with torch.no_grad(), scoring.without_checkpointing(model):
                for rows in parts:
                    part = self.score(model, scoring.take_rows(scored, rows))[0]  # (b, t)
                    logps[rows, : part.shape[1]] = part.to(logps.dtype)
            return logps

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
                whole.append(torch.cat(scoring.padded(self.gather([column.cpu()]), left=False)))
            else:
                whole.append(self.gather(list(column)))
        first = sum(counts[: self.accelerator.process_index])
        mine = fn(*whole)[first : first + len(columns[0])]
        if isinstance(mine, torch.Tensor):
            width = max([c.shape[1] for c in columns if getattr(c, "ndim", 1) == 2], default=None)
            mine = (mine[:, :width] if mine.dim() == 2 else mine).to(self.accelerator.device)
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

    def generate_all(self, name: str, prompts: list, greedy: bool = False) -> list[str]:
        """`generate` for prompts that are the same on all processes; all of them get all texts."""
        return self.in_parallel(lambda share: self.generate(name, share, greedy), prompts)
