r"""PRIME: a policy learns from token rewards of a reward model that learns online, from outcomes
(Cui et al. 2025, Process Reinforcement through Implicit Rewards, arXiv:2502.01456).

    python prime.py                                       the small model on a CPU, 2 minutes
    python prime.py --no-process-reward                   baseline: outcome rewards only
    python prime.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU

The loop (algorithm 1)
    repeat
      FILTER = `fill_batch`
        sample K responses per question and keep the groups with right and wrong responses; sample
        further questions until there are P groups
      PRM = `prm_batch` and `loss`
        d_t = log pi_prm(y_t) - log pi_ref(y_t)
        loss = cross-entropy of sigmoid(beta * sum_t d_t) with the outcome                 eq. 2
      POLICY = `credit`; its loss is `CoTrainer.loss` in common/core/cotrainer.py
        d_t is the process reward at token t, and the outcome is the reward at the last token.
        A = whiten(returns-to-go of both, minus leave-one-out baselines, added 1:1)      eq. 5, 6

The PRM is a language model that never sees a step label. It learns to tell correct responses from
wrong responses by its log-ratio to a reference, which is a sum over tokens. So every token gets its
part of that judgement.

Our changes that matter (more in docs/prime.md)
    1. Policy and PRM are LoRA adapters on one base, and the base is the reference. The paper has
       three models.
    2. The process reward's baseline is the mean, over the other responses, of a response's MEAN
       per token, as in the released code. Eq. 5 as printed has a response's SUM, which is larger by
       a factor of the length. The released code, and so ours, also multiplies a token's deviation
       from its own response's mean by K / (K - 1).
    3. Process rewards are divided by the largest return-to-go of the batch. The released code
       divides by the largest on each device. PRM and reference start equal, so d is rounding noise
       at first. Process rewards stay 0 until d exceeds the noise measured in step 1.
    4. Each player has one update per batch. In the paper it has four updates, one for each
       minibatch. In the released code an already updated PRM scores minibatches 2 to 4.
    5. The PRM scores in a separate forward pass. The released code takes the scores from its
       training pass.
    6. If `--max-refills` rounds of sampling do not fill the batch, the step trains on fewer groups.
       The released code samples until the batch is full.
    7. An offline PRM (--prm-warmup 15 --prm-update none) learns from the untrained policy's
       responses. The paper's offline PRM was trained on 500,000 other responses.

Shapes: P questions, K responses each, B = P * K rows, T completion tokens.
"""

from dataclasses import dataclass, replace
from typing import Literal

from common.core.errors import UserError
from common.run.args import (
    Count,
    CountOrZero,
    GroupSize,
    RunArgs,
    Scale,
    Share,
    Tokens,
    Weight,
    parse,
    per_model,
)


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
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
    """the PRM is updated after it has scored the batch ("single forward" in the paper), before that
    ("double forward"), or never after --prm-warmup, which makes it offline"""
    prm_warmup: CountOrZero = 0
    """first steps, in which only the PRM is trained, on the untrained policy's responses (paper: 0,
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

    def keep_bounds(self) -> tuple[float, float]:
        """Returns the lowest and the highest accuracy of a group that is trained on. By default
        this is every mixed group.
        """
        K = self.group_size
        low = 1 / K if self.keep_low is None else self.keep_low
        high = 1 - 1 / K if self.keep_high is None else self.keep_high
        return low, high

    def check(self):
        low, high = self.keep_bounds()
        if low > high:
            raise UserError(f"--keep-low {low:g} is over --keep-high {high:g}: no group is kept.")
        if self.prm_warmup >= self.steps:
            raise UserError(
                f"--prm-warmup {self.prm_warmup} must be less than --steps {self.steps}."
            )
        if self.prm_warmup and not self.process_reward:
            raise UserError("--prm-warmup: --no-process-reward has no PRM to train.")
        if self.prm_update == "none" and self.prm_warmup == 0 and self.process_reward:
            raise UserError(
                "--prm-update none needs --prm-warmup: a PRM that was never trained gives no "
                "process reward, which is --no-process-reward."
            )


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.advantage import return_to_go, whiten
from common.core.cotrainer import Batch
from common.core.lists import mean
from common.core.model import without_checkpointing
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import evaluate_solver, is_correct, solve_prompt
from common.tasks.math import count_for_steps, load_for_steps
from common.tiny.tasks import gold_steps

import torch
import torch.nn.functional as F

PRM_MAX_GRAD_NORM = 10.0  # the released script's


# ------------------------------------------------------------------ rewards, called by TRL
def outcome_reward(completions, answer, **_) -> list[float]:
    """o = [answer == gold]. Fractions, such as the share of tests passed, would do as well."""
    return [float(is_correct(c[0]["content"], gold)) for c, gold in zip(completions, answer)]


# ------------------------------------------------------------------ the paper's mathematics
def prm_loss(d, outcome, mask, beta: float = 0.05) -> torch.Tensor:
    """Eq. 2, a scalar: the cross-entropy of the PRM's summed log-ratio with the outcome.

    Args:
        d: (B, T) log pi_prm - log pi_ref, with gradient.
        outcome: (B,) in [0, 1], used as it is.
        mask: (B, T) of 0/1.

    Raises:
        ValueError: an outcome outside [0, 1].
    """
    if ((outcome < 0) | (outcome > 1)).any():
        low, high = outcome.min().item(), outcome.max().item()
        raise ValueError(f"outcome must lie in [0, 1], got {low} to {high}")
    # z = beta * sum_t d_t, a SUM and no mean;  -o log sigmoid(z) - (1 - o) log sigmoid(-z)
    z = beta * (d * mask).sum(1)  # (B,)
    return F.binary_cross_entropy_with_logits(z, outcome.to(z.dtype))  # ln 2 at z = 0


def prm_hits(d, outcome, mask) -> torch.Tensor:
    """(B,), whether the PRM is right: sum_t d_t > 0 for a correct response, else not."""
    return ((d * mask).sum(1) > 0) == (outcome > 0.5)


def prime_advantages(d, outcome, mask, group_size: int, noise: float = 0.0) -> tuple:
    """The policy's per-token advantages, eq. 5 as the released code computes it.

    Args:
        d: (B, T) log pi_prm - log pi_ref, without beta, which cancels. 0 for outcomes only.
        outcome: (B,) in [0, 1].
        mask: (B, T) of 0/1.
        group_size: K, at least 2.
        noise: in nats. There is no process reward unless some return-to-go of d is larger.

    Returns:
        A, and A without process rewards, for the report. Both are (B, T) and 0 outside the mask.
    """
    K = group_size
    # outcome: o_i - mean of the others' o. Given at the last token, so every token's return is this
    R_outcome = leave_one_out(outcome, K)[:, None] * mask  # (B, T)
    # p = d / max |return-to-go of d|: process returns lie in [-1, 1], as outcomes do
    d = d * mask  # (B, T)
    largest = return_to_go(d, mask).abs().max()
    p = d / (largest + 1e-6) * (largest > noise)  # (B, T)
    # c_it = p_it K / (K - 1) - (sum over the group of its responses' token means) / (K - 1)
    token_mean = p.sum(1) / mask.sum(1).clamp(min=1)  # (B,)
    S = token_mean.reshape(-1, K).sum(1).repeat_interleave(K)[:, None]  # (B, 1)
    R_process = return_to_go((p * K - S) / (K - 1), mask)  # (B, T)
    # A = whiten(R_outcome + R_process), over all valid tokens of the batch. Whitening the two
    # separately would change their ratio.
    return whiten(R_outcome + R_process, mask), whiten(R_outcome, mask)


def leave_one_out(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """RLOO (Ahmadian et al. 2024, eq. 8), (B,) -> (B,): each reward minus the others' mean.

    >>> leave_one_out(torch.tensor([1.0, 0, 0, 0]), 4)
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    pool = rewards.reshape(-1, group_size)  # (P, K)
    others = (pool.sum(1, keepdim=True) - pool) / (group_size - 1)  # (P, K)
    return (pool - others).reshape(rewards.shape)


# ------------------------------------------------------------------ the trainer
class Prime(CoTrainer):
    """`step` is algorithm 1. CoTrainer samples, scores, computes the policy's loss and updates."""

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        T, K = args.solution_tokens, args.group_size
        prm_lr = args.prm_lr if args.process_reward else 0.0
        return {
            "policy": Player([outcome_reward], args.lr, T, K),
            "prm": Player([], prm_lr, T, K, max_grad_norm=PRM_MAX_GRAD_NORM),  # only scores
        }

    def step(self, rows):
        """rows: B, every question K times in a row; the filter adds further questions."""
        cfg = self.cfg
        batch = self.fill_batch(rows[:: cfg.group_size])
        if not cfg.process_reward:
            d = torch.zeros_like(batch.completion_mask)
            self.credit(batch, d, noise=0.0)
            return [batch]
        prm_batch, noise = self.prm_batch(batch), self.rounding_noise(batch)
        if self.state.global_step < cfg.prm_warmup:
            return [prm_batch]  # the policy is not trained yet
        if cfg.prm_update == "before":
            self.update(prm_batch)
        # d_t = log pi_prm(y_t) - log pi_ref(y_t), of the PRM as it is now
        d = self.log_probs("prm", batch) - prm_batch.token_extras["reference_logps"]  # (B, T)
        self.credit(batch, d, noise)
        if cfg.prm_update == "after":
            return [prm_batch, batch]  # the PRM has scored, now it learns
        if cfg.prm_update == "none":
            hits = prm_hits(d, batch.rewards, batch.completion_mask)  # (B,)
            self.log_mean("prm/accuracy", hits)  # where no loss of the PRM logs it
        return [batch]

    def credit(self, batch, d, noise: float):
        """Sets the policy's advantages, whitened over all processes' rows. d: (B, T)."""
        K = self.cfg.group_size

        def both(d, outcome, mask):
            return torch.stack(prime_advantages(d, outcome, mask, K, noise), 2)  # (B, T, 2)

        columns = d, batch.rewards, batch.completion_mask
        A, alone = self.over_all_processes(both, *columns).unbind(2)  # (B, T) each
        batch.advantages = A
        batch.components = {"outcome alone": alone, "process reward": A - alone}
        for note, text in zip(batch.notes, batch.texts):
            note["gold"] = gold_steps(note["prompt"], text)  # does credit find the wrong step?

    # --- the PRM
    def prm_batch(self, batch) -> Batch:
        """The same rows for the PRM, without advantages, so that all of them are trained on."""
        reference = "policy" if self.cfg.prm_reference == "policy" else None
        more = {"token_extras": {"reference_logps": self.log_probs(reference, batch)}}  # (B, T)
        more["extras"] = {"rows": sum(self.gather([len(batch)]))}  # B of all processes
        nothing = {"advantages": None, "sampled_logps": None, "notes": []}
        return replace(batch, player="prm", **more, **nothing)

    def loss(self, batch):
        """Eq. 2 for the PRM's micro-batches of b rows, and CoTrainer's loss for the policy's."""
        if batch.player != "prm":
            return super().loss(batch)
        outcome, mask = batch.rewards, batch.completion_mask  # (b,), (b, T)
        logp, entropy = self.score(batch)  # (b, T)
        d = logp - batch.token_extras["reference_logps"]  # (b, T)
        # the means of the micro-batches, times b / B each, add up to the mean of the step
        loss = prm_loss(d, outcome, mask, self.cfg.beta) * len(outcome) / batch.extras["rows"]
        return loss, {"entropy": entropy, "accuracy": prm_hits(d, outcome, mask)}

    def rounding_noise(self, batch) -> float:
        """The largest return-to-go, in nats, that rounding alone can give d. It is far larger in
        bfloat16 than in float32. It is measured in the first step and kept.

        The base scores the same rows twice, the second time with an additional padding token in
        front, which changes only how numbers are rounded. The largest difference is doubled,
        because another sample's maximum is larger half of the time.
        """
        if "noise" in self.saved:
            return self.saved["noise"]
        largest = 0.0
        with torch.no_grad(), self.playing(None), without_checkpointing(self.model):
            for rows in torch.arange(len(batch)).split(self.cfg.micro_batch):
                part = batch.take(rows)
                ids, mask = (F.pad(x, (1, 0)) for x in (part.prompt_ids, part.prompt_mask))
                moved = replace(part, prompt_ids=ids, prompt_mask=mask)
                d = self.score(moved)[0] - self.score(part)[0]  # (b, t)
                returns = return_to_go(d, part.completion_mask)
                largest = max(largest, returns.abs().max().item())
        self.saved["noise"] = 2 * max(self.gather([largest]))
        return self.saved["noise"]

    # --- the filter
    def fill_batch(self, questions: list[dict]) -> Batch:
        """P groups of K responses with an accuracy within `keep_bounds`. There are fewer groups if
        max_refills rounds of sampling do not find P.
        """
        cfg, P, K = self.cfg, self.cfg.questions, self.cfg.group_size
        low, high = cfg.keep_bounds()
        queue = self.load_queue(questions)
        kept, accuracies, tokens = [], [], 0  # kept: (question, its group of a batch)
        for _ in range(cfg.max_refills):
            tried = self.next_questions(queue)
            batch = self.rollout("policy", [row for row in tried for _ in range(K)])
            accuracy = batch.rewards.reshape(P, K).mean(1)  # (P,)
            keep = (accuracy > low - 1e-6) & (accuracy < high + 1e-6)  # (P,), thirds are rounded
            groups = torch.arange(P * K).split(K)  # P times the K rows of a question
            kept += [(tried[g], batch.take(groups[g])) for g in keep.nonzero().flatten().tolist()]
            accuracies += accuracy.tolist()
            tokens += int(batch.completion_mask.sum())
            # all processes sample as many rounds, and train on as many groups
            count = min(P, *self.gather([len(kept)]))
            if count == P:
                break
        if count == 0:
            raise UserError(
                f"step {self.state.global_step}: in {cfg.max_refills} rounds no group of {K} had "
                f"an accuracy between --keep-low {low:g} and --keep-high {high:g}; "
                f"the accuracy is {mean(accuracies):.2f}. Take harder or easier questions, wider "
                f"bounds, or a larger --group-size."
            )
        self.report_filter(accuracies, len(kept), count, tokens)
        # the other groups give their questions back: by the next step their responses are stale
        queue["waiting"] += [question for question, _ in kept[count:]]
        self.saved["filter"] = self.gather([queue])
        batch = self.concat([group for _, group in kept[:count]])
        batch.total_tokens = sum(self.gather([int(batch.completion_mask.sum())]))
        return batch

    def load_queue(self, questions: list[dict]) -> dict:
        """waiting: the questions that come next, with this step's questions from the loader at the
        end. drawn: how many further questions this process has asked for so far.
        """
        if "filter" not in self.saved:
            return {"waiting": questions, "drawn": 0}
        [mine] = self.shard(self.saved["filter"])  # an entry per process
        return {"waiting": mine["waiting"] + questions, "drawn": mine["drawn"]}

    def next_questions(self, queue: dict) -> list[dict]:
        """P questions that wait. Further questions come from the end of the data set, where each
        process has its own part; the loader takes its questions from the beginning.
        """
        P, part = self.cfg.questions, self.shard(range(len(self.train_dataset)))
        while len(queue["waiting"]) < P:
            queue["drawn"] += 1
            queue["waiting"].append(self.train_dataset[part[-queue["drawn"] % len(part)]])
        tried, queue["waiting"] = queue["waiting"][:P], queue["waiting"][P:]
        return tried

    # --- what is logged and shown; no method below affects training
    def report_filter(self, accuracies: list[float], kept: int, trained: int, tokens: int):
        """Logs this process's accuracies of groups, how many groups were kept and trained on, and
        the sampled tokens.
        """
        samples = len(accuracies) * self.cfg.group_size * self.accelerator.num_processes
        self.saved["samples"] = self.saved.get("samples", 0) + samples
        self.log_mean("policy/accuracy", accuracies)  # before the filter
        self.log_mean("co/groups_kept", kept / len(accuracies))
        self.log_mean("co/tokens_per_kept_group", tokens / trained)
        self.log_mean("co/samples", self.saved["samples"])


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Prime, held_out: list[dict]) -> dict[str, float]:
    """Figures of the policy on held-out questions: the accuracy of sampled answers and of greedy
    answers.
    """
    return evaluate_solver(trainer, "policy", held_out)[0]


# ------------------------------------------------------------------ main
CURVES = {
    "policy": ["policy/accuracy"],
    "PRM": ["prm/accuracy", "prm/loss"],
    "health": ["co/groups_kept", "policy/entropy"],
}


def load(args: Args):
    return load_for_steps(
        args, 8 * count_for_steps(args)
    )  # the filter takes more than the loader's


def main(args: Args):
    launch(Prime, args, load=load, evaluate=evaluate, curves=CURVES, prompt=solve_prompt)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
