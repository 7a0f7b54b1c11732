"""CoTrainer: several players in one GRPOTrainer, each a LoRA adapter on one shared base.

A script writes `players(args)` and `step(rows)`, one optimiser step of its paper, which returns the
batches to train on, in order. The verbs it is written with:
    rollout(player, rows)            sample and reward completions -> batch, with group advantages
    generate(player, prompts)        sample without training -> texts (generate_ids: token ids)
    set_rewards(batch, rewards)      rewards known only later: sets them and the group advantages
    concat(batches)                  several rollouts of one adapter as one batch
    update(batch)                    one optimiser step at once, before `step` continues
    log_probs(player, batch)         (B, T) of any player; None is the base
    playing(player), score(batch)    the same with gradients, inside of a script's own loss
    log_mean(name, values)           a metric, averaged over all processes
    over_all_processes(fn, columns)  this process's rows of fn(everyone's rows)
    generate_all, in_parallel        work shared between processes, results to all: for evaluation
    my_share(items)                  this process's part of a list that is the same everywhere

A batch is a dict
    key                              what                                    set by
    player                           the name of who is trained on it        rollout
    prompt_ids, prompt_mask          (B, P), padded on the left              rollout
    completion_ids, completion_mask  (B, T), padded on the right             rollout
    num_items_in_batch               tokens of the batch on all processes    rollout
    base_logps                       (B, T), only with a KL term             rollout
    texts, notes                     B strings; B dicts for the report       rollout
    rewards                          (B,), NaN where nobody judged           rollout, set_rewards
    advantages                       (B,) or (B, T)                          rollout, set_rewards
    rollout                          (B,) which of the joined batches it is  concat
    components                       {name: (B,) or (B, T)}: a sum's terms   the script
    trained, rewarded, rewards_of_advantages     what checks.py remembers of it

`saved`, a dict, holds what a checkpoint keeps of the script's own state. How players share a
trainer is in common/players.py; the rest is TRL's: data loader, reward calls, schedule, logging,
checkpoints, several processes. docs/how-grpotrainer-works.md lists every override.

Shapes: B rows, P prompt tokens, T completion tokens.
"""

import math
import time
import zlib
from contextlib import nullcontext
from pathlib import Path

from common.advantage import group_advantage, named_group_advantage
from common.batch import SCORED, padded, padded_batch, take_rows
from common.errors import ScriptError, UserError
from common.plain import tokenize, without_checkpointing
from common.players import AdapterTrainer, Player  # noqa: F401  Player: for scripts
from common.run import checks
from common.run.recording import record
from common.tasks.answers import grouped

import torch


class CoTrainer(AdapterTrainer):
    """See the top of this file."""

    all_rows = False
    """Rows whose advantages are all zero are left out, unless there is a KL term. A script whose
    `loss` has another term with a gradient there, such as an entropy bonus, sets this."""

    # ------------------------------------------------------------------ one optimiser step
    @staticmethod
    def players(args) -> dict[str, Player]:
        """THE SCRIPT WRITES THIS: name -> Player. Metrics begin with these names."""
        raise NotImplementedError

    def step(self, rows: list[dict]) -> list[dict]:
        """THE SCRIPT WRITES THIS: one optimiser step -> the batches to train on, in order.

        rows: this process's share of the data loader's, every question group_size times in a row.
        """
        raise NotImplementedError

    def training_step(self, model, rows, num_items_in_batch=None):
        """Trainer calls this once per optimiser step. The gradients that Trainer knows of stay
        None, so its own optimiser step does nothing: every batch is trained by `update`.
        """
        start, self.sampled_tokens = time.perf_counter(), 0
        model.train()
        with nullcontext() if self.player else checks.keeping_state(self, "the first step"):
            batches = self.step(rows)
        checks.check_step(self, batches)
        for batch in batches:
            self.update(batch)
        self.player = batches[-1]["player"]  # the step's line names it
        world = self.accelerator.num_processes
        # log_mean averages over the processes; these are the tokens of all
        self.log_mean("co/sampled_tokens", self.sampled_tokens * world)
        self._metrics["train"]["step_time"] = [time.perf_counter() - start]
        return torch.zeros((), device=self.accelerator.device)

    def loss(self, batch: dict) -> torch.Tensor:
        """This micro-batch's share of the step's loss:

            loss     = sum over all tokens t of a step (-A_t ratio_t + kl k3_t) / their number
            ratio_t  = pi(y_t) / stop_grad(pi(y_t))     1, but with the gradient of log pi(y_t)
            k3_t     = q - log q - 1,   q = pi_base(y_t) / pi(y_t)

        There is one update per batch of rollouts, so PPO's clip would never act. A script whose
        paper has another loss overrides this; `batch["player"]` says whose micro-batch it is.
        Rows whose advantages are all zero are left out of it, see `all_rows`. The shares of all
        micro-batches and processes add up to the loss, and so do their gradients.
        """
        logp, entropy = self.score(batch)  # (b, T)
        mask, A = batch["completion_mask"], batch["advantages"]  # (b, T), (b,) or (b, T)
        A = A[:, None] if A.dim() == 1 else A
        ratio = (logp - logp.detach()).exp()  # (b, T)
        loss = -A * ratio  # (b, T)
        if self.kl:
            log_q = batch["base_logps"] - logp
            k3 = log_q.exp() - log_q - 1
            loss = loss + self.kl * k3
            self.log_mean(f"{batch['player']}/kl", k3[mask.bool()])
        self.log_mean(f"{batch['player']}/entropy", entropy[mask.bool()])
        return (loss * mask).sum() / batch["num_items_in_batch"]

    def update(self, batch: dict):
        """One optimiser step of the batch's player: loss and gradient micro-batch by micro-batch,
        the sum over all processes, clipping, AdamW.
        """
        if self.asked_in_evaluation is not None:
            raise ScriptError("update inside of `evaluate` would train on held-out questions")
        checks.check_batch(self, batch)
        for flag in batch.setdefault("trained", [[False]]):  # shared by copies, see checks.TWICE
            flag[0] = True
        self.record(batch)
        name, player = batch["player"], self.player_named(batch["player"])
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
        # log_mean averages over the processes; their shares add up
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
        if norm > 0:  # all advantages were 0: not even Adam's momentum may move the adapter
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def add_up_gradients(self, name: str, parameters: list[torch.Tensor]):
        """Over the processes, in one collective call. One without live rows adds zeros."""
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

    def record(self, batch: dict):
        """A few rows of the batch go to rollouts.jsonl, for the report."""
        if self.accelerator.is_main_process and {"notes", "advantages"} <= batch.keys():
            file = Path(self.args.output_dir) / "rollouts.jsonl"
            record(batch, file, self.state.global_step + 1, self.processing_class)

    # ------------------------------------------------------------------ the verbs: sampling
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
        player, prompts = self.player_named(name), [row.get("prompt") for row in rows]
        checks.check_rollout(self, name, rows, player.group_size)
        prompt_ids, ids = self.sample(name, prompts)
        device, pad_id = self.accelerator.device, self.processing_class.pad_token_id
        batch = {"player": name, **padded_batch(prompt_ids, ids, pad_id, device)}
        tokens, counts = zip(*self.gather([(sum(map(len, ids)), len(rows))]))
        batch["num_items_in_batch"] = torch.tensor(sum(tokens), device=device)
        batch["texts"] = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        if self.kl:
            batch["base_logps"] = self.log_probs(None, batch)  # (B, T)
        batch["trained"] = [[False]]  # shared: copies and concat's batches see it change
        functions = [function.__name__ for function in player.rewards]
        if functions and len(set(counts)) > 1:
            raise ScriptError(
                f"the {name} has {', '.join(map(str, counts))} rows on the processes; with reward "
                f"functions all need as many, because TRL gathers the rewards"
            )
        each = self.call_rewards(name, rows, prompts, batch["texts"], ids)  # (B, functions)
        batch["notes"] = [
            {
                "player": name,
                "prompt": prompt[-1]["content"],
                "rewards": {k: r for k, r in zip(functions, rewards) if r == r},
            }
            for prompt, rewards in zip(prompts, each.tolist())
        ]
        R = each.nansum(1).masked_fill(each.isnan().all(1), torch.nan)  # (B,), NaN: not judged
        batch["rewards"] = R
        if functions:
            batch["advantages"] = group_advantage(R, player.group_size)  # (B,)
            batch["rewards_of_advantages"] = R.clone()
            self.log_rewards(name, "reward", R, [i // player.group_size for i in range(len(R))])
        cut = [row[-1] not in self.eos_token_ids for row in ids]  # at the length limit
        self.log_mean(f"{name}/completions/mean_length", [len(row) for row in ids])
        self.log_mean(f"{name}/completions/clipped_ratio", cut)
        return batch

    def sample(self, name: str, prompts: list, greedy=False, begun: list | None = None):
        """(token ids of each prompt, those of its completion, with its end token)."""
        player, completions = self.player_named(name), []
        prompt_ids = tokenize(prompts, self.processing_class)
        if begun:
            prompt_ids = [ids + list(start) for ids, start in zip(prompt_ids, begun, strict=True)]
        temperature = 0.0 if greedy else player.temperature
        ends, pad_id = self.eos_token_ids, self.processing_class.pad_token_id
        if self.asked_in_evaluation is not None:
            # draws that depend neither on the step nor on what others have written before
            key = zlib.crc32(f"{self.args.seed} {name} {prompt_ids}".encode())
            self.asked_in_evaluation[key] += 1
            torch.manual_seed(key + self.asked_in_evaluation[key])
        # autocast, as in scoring: else LoRA would compute in float32 here, and only here
        with self.playing(name), self.accelerator.autocast():
            for part in grouped(prompt_ids, self.cfg.rows_at_once or 256):
                completions += self.engine.complete(
                    self.model, part, player.max_tokens, temperature, ends, pad_id
                )
        self.sampled_tokens += sum(map(len, completions))
        return prompt_ids, completions

    def generate_ids(
        self, name: str, prompts: list, greedy: bool = False, begun: list | None = None
    ) -> list[list[int]]:
        """Token ids of one completion per prompt, as sampled; nothing is trained on them.

        begun: token ids with which each completion has begun already; what comes back follows them.
        """
        if not prompts:
            return []
        checks.check_prompts(self, name, prompts)
        return self.sample(name, prompts, greedy, begun)[1]

    def generate(self, name: str, prompts: list, greedy: bool = False) -> list[str]:
        """One completion per prompt, as text; nothing is trained on them."""
        ids = self.generate_ids(name, prompts, greedy)
        return self.processing_class.batch_decode(ids, skip_special_tokens=True) if ids else []

    def generate_all(self, name: str, prompts: list, greedy: bool = False) -> list[str]:
        """`generate` for prompts that are the same on all processes; all of them get all texts."""
        return self.in_parallel(lambda share: self.generate(name, share, greedy), prompts)

    # ------------------------------------------------------------------ the verbs: batches
    def set_rewards(self, batch: dict, rewards, groups: list | None = None):
        """Rewards that are known only after the rollout, because somebody judged, ran or counted.

        Sets the batch's rewards and group advantages, and says so in notes and metrics.

        Args:
            rewards: (B,); NaN where nobody judged, which makes the row's advantage 0.
            groups: a key per row; rows with the same key are compared with each other, whatever
                their prompts and wherever they are. By default the player's groups of adjacent
                rows; with groups of one there are no advantages, and the script writes them.
        """
        checks.check_rewards(batch, rewards, groups)
        rewards = torch.as_tensor(rewards).to(batch["rewards"])  # (B,)
        name, G = batch["player"], self.player_named(batch["player"]).group_size
        batch |= {"rewards": rewards, "rewards_of_advantages": rewards.clone(), "rewarded": True}
        if groups is not None:
            batch["advantages"] = named_group_advantage(rewards, groups)  # (B,)
        elif G > 1:
            batch["advantages"] = group_advantage(rewards, G)  # (B,)
            groups = [i // G for i in range(len(rewards))]
        for note, reward in zip(batch["notes"], rewards.tolist()):
            note["rewards"]["total"] = reward
        if self.player_named(name).rewards:  # instead of what `rollout` has logged of these alone
            self._sums.pop(f"{name}/frac_reward_zero_std", None)
        self.log_rewards(name, "total_reward", rewards, groups)

    def concat(self, batches: list[dict]) -> dict:
        """Several rollouts of ONE adapter as one batch, for one update on all of them. Its player
        is called as the adapter.

        Prompts are padded on the left, completions on the right; advantages become (B, T), and
        components, which only the report shows, are to be set on the whole. "rollout" (B,) says
        which of the batches each row comes from.
        """
        joined = {"player": self.player_named(batches[0]["player"]).adapter}
        names = [batch["player"] for batch in [*batches, joined]]
        checks.check_concat(batches, {name: self.player_named(name) for name in names})
        joined["num_items_in_batch"] = sum(batch["num_items_in_batch"] for batch in batches)
        joined["trained"] = [flag for batch in batches for flag in batch["trained"]]
        for key in set.intersection(*map(set, batches)) - {*joined, "components", "rewarded"}:
            values = [batch[key] for batch in batches]
            if key == "advantages":
                values = [
                    A if A.dim() == 2 else A[:, None] * batch["completion_mask"]
                    for A, batch in zip(values, batches)
                ]
            if isinstance(values[0], list):  # texts, notes
                joined[key] = [value for part in values for value in part]
            else:
                fill = self.processing_class.pad_token_id if key.endswith("_ids") else 0
                joined[key] = torch.cat(padded(values, left=key.startswith("prompt"), fill=fill))
        rows = torch.tensor([len(batch["rewards"]) for batch in batches])
        of = torch.arange(len(batches)).repeat_interleave(rows)
        joined["rollout"] = of.to(joined["rewards"].device)  # (B,)
        return joined

    # ------------------------------------------------------------------ the verbs: log-probs
    def score(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the completions under who is `playing`, and entropies, both (B, T), at the
        temperature at which the batch's player samples (1 if it decodes greedily).
        """
        temperature = self.player_named(batch["player"]).temperature or 1.0
        with self.accelerator.autocast():
            return self.engine.score(self.model.get_base_model(), batch, temperature)

    @torch.no_grad()
    def log_probs(self, name: str | None, batch: dict) -> torch.Tensor:
        """(B, T) log-probs of the batch's completions under a player, or under the base for None;
        without a gradient, micro-batch by micro-batch.
        """
        scored = {key: batch[key] for key in SCORED}
        scored["player"] = batch.get("player", name)
        logps = torch.zeros(batch["completion_ids"].shape, device=self.accelerator.device)
        with self.playing(name), without_checkpointing(self.model):
            for rows in self.engine.in_order(batch).split(self.cfg.micro_batch):
                part = self.score(take_rows(scored, rows))[0]  # (b, t)
                logps[rows, : part.shape[1]] = part.to(logps.dtype)
        return logps
