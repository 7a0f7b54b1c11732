r"""PRIME: train a policy on token rewards from a reward model that learns online, from outcomes
(Cui et al. 2025, Process Reinforcement through Implicit Rewards, arXiv:2502.01456).

    python prime.py                                       the embedded model on a CPU, 5 minutes
    python prime.py --no-process-reward                   baseline: outcome rewards only
    python prime.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU, 4-bit

The loop (algorithm 1)
    repeat
      sample K responses per question; keep groups with right and wrong ones (in the released
      script an accuracy in [0.2, 0.8], at K = 4); further questions until P groups are there

    PRM      d_t = log pi_prm(y_t) - log pi_ref(y_t)
             loss = cross-entropy of sigmoid(beta * sum_t d_t) with the outcome             eq. 2
    POLICY   d_t is its reward at token t, beside the outcome's at the end: returns-to-go of both,
             minus leave-one-out baselines, added 1:1, then whitened as released            eq. 5
             loss in common/cotrainer.py, `CoTrainer.loss`                                  eq. 6

The PRM is a language model that never sees a step label: trained to tell correct responses from
wrong ones by its log-ratio to a reference, it spreads that judgement over the tokens. Policy, PRM
and reference start as the same model, so the first process rewards are 0.

What we changed and it matters (the full list is in docs/prime.md)
    1. Policy and PRM are LoRA adapters on one base, and the base is the reference; the paper has
       three models.
    2. The process reward's baseline is the released code's, the mean over the other responses of
       their per-token MEAN. Eq. 5 as printed has their sum, too large by a factor of the length.
    3. The released code divides process rewards by the largest return-to-go on a device; here it
       is that of the whole batch. While this is no larger than rounding can make it, which is
       measured in the first step, process rewards are 0: at the start PRM and reference are equal.
    4. One update of each player per batch; four in the paper, and in the released code later
       quarters are scored by a PRM that has already been updated.
    5. Scoring is a forward pass of its own; the released code scores in the PRM's training pass.
    6. The released code samples until the batch is full; here, after `--max-refills` rounds, the
       step runs on the groups there are.
    7. An offline PRM (--prm-warmup 15 --prm-update none) learns from the untrained policy's
       responses; the paper's was trained on 500,000 others.

Shapes: P questions, K responses each, B = P * K rows, T completion tokens.
"""

from dataclasses import dataclass
from typing import Literal

from common.advantage import return_to_go, whiten
from common.args import (
    Count,
    CountOrZero,
    GroupSize,
    RunArgs,
    Scale,
    Share,
    Tokens,
    Weight,
    per_model,
)
from common.cotrainer import CoTrainer, Player
from common.errors import UserError
from common.launch import launch
from common.run import mean, plain_errors
from common.sampling import without_checkpointing
from common.scoring import SCORED, take_rows
from common.tasks.answers import is_correct, solve, solve_prompt
from common.tasks.math import load_questions
from common.tiny.tasks import gold_steps

import torch
import torch.nn.functional as F
import tyro


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/args.py
    steps: Count = 30
    """optimiser steps, each of both players"""
    questions: Count = 16
    """P, questions per step and process (paper: 256)"""
    group_size: GroupSize = 8
    """K, responses to a question (paper: 4)"""
    lr: Weight = per_model(tiny=5e-4, real=1e-5)
    """learning rate of the policy's adapter, constant and half of the PRM's (paper: 5e-7, all
    weights)"""
    prm_lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the PRM's adapter (paper: 1e-6, twice the policy's)"""
    kl: Weight = 0.0
    """weight of the policy's k3 penalty towards the base (paper: 0)"""
    beta: Scale = 0.05
    """scale of the log-ratio in the PRM's loss (paper: 0.05)"""
    process_reward: bool = True
    """ablation: without it, leave-one-out on the outcome only, the paper's baseline"""
    prm_update: Literal["after", "before", "none"] = "after"
    """update the PRM after it has scored the batch ("single forward" in the paper), before
    ("double forward"), or not after --prm-warmup: then it is offline"""
    prm_warmup: CountOrZero = 0
    """first steps in which only the PRM is trained, on the untrained policy's responses (paper: 0,
    and an ablation with a PRM trained on other data)"""
    prm_reference: Literal["base", "policy"] = "base"
    """what the PRM is compared with: the frozen base, or the current policy (appendix B.1)"""
    keep_low: Share | None = None
    """groups with a lower accuracy are not trained on; by default 1 / K, one right response
    (released script: 0.2, which is the same at its K of 4)"""
    keep_high: Share | None = None
    """groups with a higher accuracy are not trained on; by default 1 - 1 / K, one wrong response
    (released script: 0.8, which is the same at its K of 4)"""
    max_refills: Count = 6
    """rounds of sampling per step, at most"""
    solution_tokens: Tokens = per_model(tiny=80, real=1024)
    """length limit of a response (released script: 3072)"""

    def check(self):
        low, high = keep_bounds(self)
        if low > high:
            raise UserError(f"--keep-low {low:g} is over --keep-high {high:g}: no group is kept.")
        if self.prm_warmup >= self.steps:
            least = f"--steps {self.steps}"
            raise UserError(f"--prm-warmup {self.prm_warmup} must be less than {least}.")
        if self.prm_update == "none" and self.prm_warmup == 0 and self.process_reward:
            raise UserError(
                "--prm-update none needs --prm-warmup: a PRM that was never trained gives no "
                "process reward, which is --no-process-reward."
            )


PRM_MAX_GRAD_NORM = 10.0  # the released script's


# ------------------------------------------------------------------ rewards, called by TRL
def outcome_reward(completions, answer, **_) -> list[float]:
    """o = [answer == gold]. Fractions, such as the share of tests passed, would do as well."""
    return [float(is_correct(c[0]["content"], gold)) for c, gold in zip(completions, answer)]


# ------------------------------------------------------------------ the paper's mathematics
def prm_loss(log_ratio, outcome, mask, beta: float = 0.05) -> torch.Tensor:
    """Eq. 2, a scalar: how badly the PRM's log-ratio tells correct responses from wrong ones.

    Args:
        log_ratio: (B, T) log pi_prm - log pi_ref, with gradient.
        outcome: (B,) in [0, 1], used as it is.
        mask: (B, T) of 0/1.

    Raises:
        ValueError: an outcome outside [0, 1].
    """
    if ((outcome < 0) | (outcome > 1)).any():
        low, high = outcome.min().item(), outcome.max().item()
        raise ValueError(f"outcome must lie in [0, 1], got {low} to {high}")
    # z = beta * sum_t d_t, a SUM and no mean;  -o log sigmoid(z) - (1 - o) log sigmoid(-z)
    z = beta * (log_ratio * mask).sum(1)  # (B,)
    return F.binary_cross_entropy_with_logits(z, outcome.to(z.dtype))  # ln 2 at z = 0


def prime_advantages(log_ratio, outcome, mask, group_size: int, noise: float = 0.0) -> torch.Tensor:
    """The policy's per-token advantages, eq. 5 as the released code computes it.

    Args:
        log_ratio: (B, T) log pi_prm - log pi_ref, without beta, which cancels; None = outcome only.
        outcome: (B,) in [0, 1].
        mask: (B, T) of 0/1.
        group_size: K, at least 2.
        noise: nats; where no return-to-go of log_ratio is larger there is no process reward.

    Returns:
        (B, T), 0 outside the mask.
    """
    if group_size < 2:
        raise ValueError(
            f"group_size must be at least 2 for a leave-one-out baseline, got {group_size}"
        )
    K = group_size
    # outcome: o_i - mean of the others' o, the same at every token: its return-to-go from the last
    R = leave_one_out(outcome, K)[:, None] * mask  # (B, T)
    if log_ratio is not None:
        d = log_ratio * mask  # (B, T)
        # p = d / max |return-to-go|: process returns lie in [-1, 1], as outcomes do
        largest = return_to_go(d, mask).abs().max()
        p = d / (largest + 1e-6) * (largest > noise)  # (B, T)
        # c_it = p_it K / (K - 1) - (sum over the group of its responses' token means) / (K - 1)
        token_mean = p.sum(1) / mask.sum(1).clamp(min=1)  # (B,)
        S = token_mean.reshape(-1, K).sum(1).repeat_interleave(K)[:, None]  # (B, 1)
        R = R + return_to_go((p * K - S) / (K - 1), mask)
    # one whitening over all valid tokens of the batch: per stream or per group would change their
    # ratio
    return whiten(R, mask)


def leave_one_out(rewards, group_size: int) -> torch.Tensor:
    """RLOO: each reward minus the mean of the *others* of its group (Ahmadian et al. 2024, eq. 8).

    (B,), NaN = missing -> (B,); exactly 0 where missing, alone, or where all are equal.
    """
    pool = rewards.reshape(-1, group_size)  # (P, K)
    missing = pool.isnan()
    count = (~missing).sum(1, keepdim=True)
    values = pool.nan_to_num(0.0)
    others = (values.sum(1, keepdim=True) - values) / (count - 1).clamp(min=1)  # (P, K)
    # the float mean of equal numbers need not equal them
    flat = pool.nan_to_num(-torch.inf).amax(1) <= pool.nan_to_num(torch.inf).amin(1)  # (P,)
    return (values - others).masked_fill(missing | flat[:, None], 0.0).reshape(rewards.shape)


def keep_bounds(args: Args) -> tuple[float, float]:
    """Lowest and highest accuracy of a group that is trained on; by default of all groups but those
    that are all right or all wrong.
    """
    K = args.group_size
    low = 1 / K if args.keep_low is None else args.keep_low
    return low, 1 - 1 / K if args.keep_high is None else args.keep_high


# ------------------------------------------------------------------ the trainer
class Prime(CoTrainer):
    """`step` is algorithm 1. CoTrainer samples, scores, computes the policy's loss and updates."""

    @staticmethod
    def players(args: Args) -> dict[str, Player]:
        T, K = args.solution_tokens, args.group_size
        return {
            "policy": Player([outcome_reward], args.lr, T, K),
            "prm": Player([], args.prm_lr, T, K, max_grad_norm=PRM_MAX_GRAD_NORM),  # only scores
        }

    def step(self, rows):
        """rows: B, every question K times in a row; the filter adds questions of its own."""
        cfg = self.cfg
        batch = self.fill_batch(rows[:: cfg.group_size])
        self.report_policy(batch)
        if not cfg.process_reward:
            self.set_advantages(batch, None, 0.0)
            return [batch]
        noise, prm_batch = self.noise_floor(batch), self.prm_batch(batch)
        if self.state.global_step < cfg.prm_warmup:
            return [prm_batch]  # the policy is not trained yet
        if cfg.prm_update == "before":
            self.update(prm_batch)
        # d_t = log pi_prm(y_t) - log pi_ref(y_t), of the PRM as it is now
        d = self.log_probs("prm", batch) - prm_batch["reference_logps"]  # (B, T)
        self.set_advantages(batch, d, noise)
        if cfg.prm_update == "after":
            return [prm_batch, batch]  # the PRM has scored, now it learns
        if cfg.prm_update == "none":
            self.report_prm(d, batch["rewards"], batch["completion_mask"])
        return [batch]

    def set_advantages(self, batch, d, noise: float):
        """d: (B, T), None = outcome only. Normalised and whitened over the rows of all processes;
        components: the advantages without the process reward, and what it changes.
        """
        K, signals = self.cfg.group_size, (batch["rewards"], batch["completion_mask"])
        alone = self.over_all_processes(
            lambda outcome, mask: prime_advantages(None, outcome, mask, K), *signals
        )  # (B, T)
        batch["advantages"] = alone
        if d is not None:
            batch["advantages"] = self.over_all_processes(
                lambda outcome, mask, d: prime_advantages(d, outcome, mask, K, noise), *signals, d
            )  # (B, T)
            rest = batch["advantages"] - alone
            batch["components"] = {"outcome alone": alone, "process reward": rest}

    # --- the PRM
    def prm_batch(self, batch) -> dict:
        """The same rows for the PRM, without advantages, so that all of them are trained on."""
        reference = "policy" if self.cfg.prm_reference == "policy" else None
        return {
            "player": "prm",
            **{key: batch[key] for key in SCORED},  # prompt and completion, ids and masks
            "outcome": batch["rewards"],  # (B,)
            "reference_logps": self.log_probs(reference, batch),  # (B, T)
            "rows": torch.tensor(sum(self.gather([len(batch["rewards"])]))),  # B of all processes
        }

    def noise_floor(self, batch) -> float:
        """The largest return-to-go, in nats, that rounding alone gives d, measured in the first
        step and kept; in bfloat16 it is far larger than in float32.

        The base scores the rows twice, the second time with one more padding token in front, which
        changes nothing but how numbers are rounded.
        """
        if "noise" not in self.saved:
            largest, rows = 0.0, torch.arange(len(batch["rewards"]))
            with torch.no_grad(), self.playing(None), without_checkpointing(self.model):
                for part in rows.split(self.cfg.micro_batch):
                    part = take_rows({key: batch[key] for key in (*SCORED, "player")}, part)
                    longer = {
                        k: v if k == "player" else F.pad(v, (int("prompt" in k), 0))
                        for k, v in part.items()
                    }
                    d = self.score(longer)[0] - self.score(part)[0]  # (b, t)
                    returns = return_to_go(d, part["completion_mask"])
                    largest = max(largest, returns.abs().max().item())
            self.saved["noise"] = max(self.gather([largest]))
        return self.saved["noise"]

    def loss(self, batch):
        """Eq. 2 for the PRM's micro-batches of b rows; for the policy's, CoTrainer's."""
        if batch["player"] != "prm":
            return super().loss(batch)
        outcome, mask = batch["outcome"], batch["completion_mask"]  # (b,), (b, T)
        log_ratio = self.score(batch)[0] - batch["reference_logps"]  # (b, T)
        self.report_prm(log_ratio, outcome, mask)
        # the means of the micro-batches, times b / B each, add up to the mean of the step
        return prm_loss(log_ratio, outcome, mask, self.cfg.beta) * len(outcome) / batch["rows"]

    # --- the filter
    def fill_batch(self, questions: list[dict]) -> dict:
        """P groups of K responses with an accuracy within `keep_bounds`; fewer, if max_refills
        rounds of sampling do not bring as many.

        A group beyond P gives its question back; its responses would be stale by the next step.
        """
        cfg, K, (low, high) = self.cfg, self.cfg.group_size, keep_bounds(self.cfg)
        mine = {"waiting": [], "drawn": 0}
        if "filter" in self.saved:  # an entry per process
            [mine] = self.my_share(self.saved["filter"])
        waiting, drawn = mine["waiting"] + questions, mine["drawn"]
        accuracies, kept, tokens = [], [], 0
        for _ in range(cfg.max_refills):
            while len(waiting) < cfg.questions:
                drawn += 1
                waiting.append(self.further_question(drawn))
            tried, waiting = waiting[: cfg.questions], waiting[cfg.questions :]
            batch = self.rollout("policy", [row for row in tried for _ in range(K)])
            accuracy = batch["rewards"].reshape(-1, K).mean(1)  # (P,)
            keep = (accuracy > low - 1e-6) & (accuracy < high + 1e-6)  # (P,), thirds are rounded
            kept += [(tried[g], rows_of(batch, g, K)) for g in keep.nonzero().flatten().tolist()]
            accuracies += accuracy.tolist()
            tokens += int(batch["completion_mask"].sum())
            # all processes sample as many rounds, and train on as many groups
            counts = self.gather([(len(kept), tokens)])
            fewest = min(groups for groups, _ in counts)
            if fewest >= cfg.questions:
                break
        self.report_filter(accuracies, counts)
        if fewest == 0:
            raise UserError(
                f"step {self.state.global_step}: in {cfg.max_refills} rounds no group of {K} had "
                f"an accuracy between --keep-low {low:g} and --keep-high {high:g}; "
                f"the accuracy is {mean(accuracies):.2f}. Take harder or easier questions, wider "
                f"bounds, or a larger --group-size."
            )
        count = min(cfg.questions, fewest)
        waiting += [question for question, _ in kept[count:]]
        self.saved["filter"] = self.gather([{"waiting": waiting, "drawn": drawn}])
        batch = self.concat([group for _, group in kept[:count]])
        trained_tokens = batch["completion_mask"].sum()
        batch["num_items_in_batch"] = self.accelerator.reduce(trained_tokens, "sum")
        return batch

    def further_question(self, n: int) -> dict:
        """The n-th question, from 1, that the loader did not bring: from the end of the data set,
        each process from its own part. The loader shuffles all of it, so some come twice.
        """
        part = self.my_share(range(len(self.train_dataset)))
        return self.train_dataset[part[-n % len(part)]]

    # --- what is logged and shown; nothing below affects training
    def report_policy(self, batch):
        for note, text in zip(batch["notes"], batch["texts"]):
            note["gold"] = gold_steps(note["prompt"], text)  # does credit find the wrong step?

    def report_prm(self, log_ratio, outcome, mask):
        """From its loss, and where it has none any more, from its scores."""
        says_correct = (log_ratio * mask).sum(1) > 0  # (b,)
        self.log_mean("prm/accuracy", says_correct == (outcome > 0.5))

    def report_filter(self, accuracies: list[float], counts: list[tuple[int, int]]):
        """counts: of each process, the groups that it has kept and the tokens it has sampled."""
        groups, tokens = (sum(column) for column in zip(*counts))
        teach = len(counts) * min(self.cfg.questions, *[kept for kept, _ in counts])
        sampled = len(accuracies) * len(counts)  # groups, of all processes
        samples = self.saved.get("samples", 0) + sampled * self.cfg.group_size
        self.saved["samples"] = samples
        self.log_mean("policy/accuracy", accuracies)  # before the filter
        self.log_mean("co/groups_kept", groups / sampled)
        self.log_mean("co/tokens_per_kept_group", tokens / max(1, teach))
        self.log_mean("co/samples", samples)


def rows_of(batch: dict, group: int, size: int) -> dict:
    """One group of a batch: its rows of every tensor and list."""
    rows, whole = slice(group * size, (group + 1) * size), ("player", "num_items_in_batch")
    return {key: value if key in whole else value[rows] for key, value in batch.items()}


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Prime, held_out: list[dict]) -> dict[str, float]:
    """The policy on held-out questions. Sampling comes first, so that it meets the same random
    numbers every time.
    """

    _, right = solve(trainer, "policy", held_out, trainer.cfg.eval_samples)
    _, greedy = solve(trainer, "policy", held_out, greedy=True)
    return {"policy/accuracy": mean(right), "policy/greedy": mean(greedy)}


# ------------------------------------------------------------------ main
CURVES = {  # panels of curves.png and report.html; step lines show the first metric of each
    "policy": ["policy/accuracy"],
    "PRM": ["prm/accuracy", "prm/loss"],
    "health": ["co/groups_kept", "policy/entropy"],
}


def load(args: Args):
    wanted = args.steps * args.questions * 8  # the filter takes more than the loader's
    return load_questions(args.dataset, wanted, args.eval_questions, args.seed)


def main(args: Args):
    launch(Prime, args, load, evaluate, CURVES, solve_prompt, args.group_size)


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
