r"""PRIME (Cui et al. 2025, arXiv:2502.01456): train a policy with process rewards from an implicit PRM that is trained online.

The loop (paper, algorithm 1)
    repeat
      sample K responses per prompt; keep groups with accuracy in [0.2, 0.8], sample further prompts until the batch is full
      PRM      d_t = log pi_prm(y_t) - log pi_ref(y_t);  cross-entropy of sigmoid(beta * sum_t d_t) with the outcome   eq. 2
      POLICY   process reward = d_t, outcome reward = right or wrong; leave-one-out baselines and returns-to-go separately,
               added 1:1, whitened once; clipped policy gradient                                                  eq. 5-6
    The PRM is never shown a step label. Policy, PRM and reference start as the same model, so the first process rewards are 0.

Where we differ from the paper [P] or the released code [C], and why
     1. QLoRA: policy and PRM are adapters on one base, and the base with adapters off is the reference. [P, C: three models.]
     2. The process reward follows [C]: deviations inside a response are stretched by K / (K - 1), and the baseline is the
        mean over the others of their per-token MEAN. Eq. 5 as printed has their sum, too large by a factor of their length.
     3. Process rewards are divided by the largest absolute return-to-go, as in [C]; not in [P]. Over the whole batch: [C]
        takes each device's own, so its result depends on the number of devices. Below 1e-3 nats the PRM still is the
        reference, and its rounding noise would be blown up to size 1: the process reward is then 0.
     4. `--prm-update after` (default of [P]): rewards from the PRM as it was, then its update. One update on the whole batch;
        [C] takes four, so that its later quarters are scored by an updated PRM. `before` scores again with the updated one.
     5. One policy update per batch, [C] four: strictly on-policy. Token mean over the batch; [C]'s is the mean over sequences.
     6. If `--max-refills` rounds do not fill the batch, the step runs on the groups there are; none at all ends the run.
        [C] throws the partial batch away.
     7. BCE with logits, [C] sigmoid and then BCE: the same value, without overflow.

Run
    python prime.py                                                                # embedded default, CPU, five minutes
    python prime.py --no-process-reward                                            # outcome only, the paper's baseline
    python prime.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      # one GPU, policy and PRM in 4-bit

Shapes: P prompts, K responses each, B = P * K rows, T completion tokens.
"""

from dataclasses import dataclass
from typing import Literal

from common.advantage import leave_one_out, return_to_go, whiten
from common.answers import is_correct
from common.cotrainer import CoTrainer, Player
from common.data import UserError, load_questions
from common.memory import check_memory, machine_options
from common.model import load_model
from common.run import check_batch, fill_in, mean, plain_errors, start_run
from common.tiny.tasks import gold_steps

import torch
import torch.nn.functional as F
import tyro
from datasets import Dataset
from trl import GRPOConfig
from trl.trainer.utils import use_adapter


# ------------------------------------------------------------------ arguments
@dataclass
class Args:
    # --- alike in all six scripts; what is None depends on the model, see SMALL and REAL below
    model: str = "tiny"
    """the embedded default, a hub id or a folder"""
    dataset: str = "tiny"
    """the embedded questions, a hub id (openai/gsm8k) or a .jsonl file with question and answer"""
    out: str | None = None
    """run folder, runs/prime-<time>-<seed> if not given; given again, the run goes on where it stopped"""
    seed: int = 0
    """of adapters, questions and sampling"""
    steps: int = 30
    """optimiser steps"""
    questions: int = 16
    """P, questions per step and process (paper: 256)"""
    group_size: int = 8
    """K, responses of one question (paper: 4)"""
    micro_batch: int | None = None
    """rows per forward and backward pass (embedded 32, real 8); questions * group_size must be a multiple"""
    lr: float | None = None
    """learning rate of the policy's adapter, constant (embedded 5e-4, real 1e-5; paper: 5e-7, all weights)"""
    kl: float = 0.0
    """weight of the k3 KL term to the base (paper: 0)"""
    lora_rank: int = 16
    """rank of each adapter"""
    four_bit: bool = torch.cuda.is_available()
    """base in 4-bit NF4; works on a CPU too, slowly"""
    rows_at_once: int | None = None
    """most rows sampled at a time, which bounds the KV cache (embedded 256, real 64)"""
    eight_bit_adam: bool = False
    """Adam's moments in 8 bits, paged to the CPU where the GPU is full"""
    vllm: bool = False
    """sample with vLLM, which needs a GPU and --no-four-bit"""
    dry_run: bool = False
    """print how much memory this needs, load nothing, and end"""
    eval_every: int = 16
    """steps between evaluations on held-out questions; 0 = only first and last"""
    eval_questions: int = 512
    """held-out questions"""
    save_every: int = 20
    """steps between checkpoints"""
    show_every: int = 20
    """steps between samples shown; 0 = never"""
    report_to: str = "none"
    """any tracker that transformers knows: trackio, wandb, tensorboard"""
    # --- the paper
    prm_lr: float | None = None
    """learning rate of the PRM's adapter (embedded 1e-3, real 2e-5; paper: 1e-6, twice the policy's)"""
    beta: float = 0.05
    """scale of the log-ratio in the PRM's loss (paper: 0.05)"""
    process_reward: bool = True
    """ablation: without it, outcome-only leave-one-out, the paper's baseline"""
    prm_update: Literal["after", "before", "none"] = "after"
    """score with the PRM as it is and update it after that (one forward pass: the paper's "single forward"), update it before
    (two: its "double forward"), or never"""
    prm_reference: Literal["base", "policy"] = "base"
    """what the PRM is compared with: the frozen base, or the current policy (appendix B.1)"""
    keep_low: float = 0.2
    """groups with a lower accuracy are not trained on"""
    keep_high: float = 0.8
    """groups with a higher accuracy are not trained on"""
    max_refills: int = 6
    """rounds of sampling per step, at most"""
    solution_tokens: int | None = None
    """length limit of a response (embedded 64, real 1024; paper: 3072)"""


SMALL = {"lr": 5e-4, "prm_lr": 1e-3, "solution_tokens": 64}
REAL = {"lr": 1e-5, "prm_lr": 2e-5, "solution_tokens": 1024}
PRM_MAX_GRAD_NORM = 10.0  # the released script's
NOISE = 1e-3  # nats; a largest return-to-go below this is rounding

# ------------------------------------------------------------------ prompts and parsing
SOLVE = r"""Solve the problem step by step. Put every step in its own <step> </step> tags, and after the last one the answer
in this form: <answer>\boxed{...}</answer>. Write nothing outside of these tags.
For example, for 15-(3*2):
<step>First the bracket: 3*2 = 6.</step>
<step>Then 15-6 = 9.</step>
<answer>\boxed{9}</answer>"""


def solve_prompt(question: str) -> list[dict]:
    return [{"role": "system", "content": SOLVE}, {"role": "user", "content": question}]


# ------------------------------------------------------------------ rewards: one number per row, called by TRL
def outcome_reward(completions, answer, **_) -> list[float]:
    """o in {0, 1}: the answer is right. Fractions, such as tests passed, would do as well."""
    return [float(is_correct(c[0]["content"], gold)) for c, gold in zip(completions, answer)]


# ------------------------------------------------------------------ the paper's mathematics
def prm_loss(log_ratio, outcome, mask, beta: float = 0.05) -> torch.Tensor:
    """Eq. 2: cross-entropy of sigmoid(z) with the outcome, z = beta * SUM over tokens of log pi_prm - log pi_ref.

    log_ratio: (B, T), with gradient.  outcome: (B,) in [0, 1], used as it is.  mask: (B, T) of 0/1.  Returns a scalar, ln 2
    while the PRM is the reference.

    Raises:
        ValueError: an outcome outside [0, 1].
    """
    if ((outcome < 0) | (outcome > 1)).any():
        raise ValueError(f"outcome must lie in [0, 1], got {outcome.min().item()} to {outcome.max().item()}")
    z = beta * (log_ratio * mask).sum(1)  # (B,)
    return F.binary_cross_entropy_with_logits(z, outcome.to(z.dtype))


def prime_advantages(log_ratio, outcome, mask, group_size: int) -> torch.Tensor:
    """The policy's per-token advantages, eq. 5 as the released code computes it.

    Args:
        log_ratio: (B, T) raw log pi_prm - log pi_ref, without beta (it cancels); None = outcome only.
        outcome: (B,) in [0, 1].  mask: (B, T) of 0/1.  group_size: K, at least 2.

    Returns:
        (B, T), 0 outside the mask.
    """
    if group_size < 2:
        raise ValueError(f"group_size must be at least 2 for a leave-one-out baseline, got {group_size}")
    K = group_size
    # outcome: o_i - mean of the others' o, the same at every token (its return-to-go from the last one)
    R = leave_one_out(outcome, K)[:, None] * mask  # (B, T)
    if log_ratio is not None:
        d = log_ratio * mask
        # p = d / max |return-to-go|: process returns lie in [-1, 1], as outcomes do
        largest = return_to_go(d, mask).abs().max()
        p = d / (largest + 1e-6) * (largest > NOISE)  # (B, T)
        # c_it = p_it K / (K - 1) - (sum over the group of its responses' token means) / (K - 1)
        token_mean = p.sum(1) / mask.sum(1).clamp(min=1)  # (B,)
        S = token_mean.reshape(-1, K).sum(1).repeat_interleave(K)[:, None]  # (B, 1)
        R = R + return_to_go((p * K - S) / (K - 1), mask)
    # one whitening over all valid tokens of the batch: per stream or per group would change their ratio
    return whiten(R, mask)


# ------------------------------------------------------------------ the trainer: one optimiser step
class Prime(CoTrainer):
    """Inherited: sampling, reward calls, log-probs, the clipped loss, the optimiser, logging, checkpoints.
    Here: the prompt filter, the PRM's update, and the advantages."""

    def __init__(self, model, script: Args, **kwargs):
        self.script = script
        players = {
            "policy": Player([outcome_reward], script.lr, script.solution_tokens, script.group_size),
            # only scores, always without temperature; its own learning rate and clip
            "prm": Player([], script.prm_lr, script.solution_tokens, script.group_size),
        }
        super().__init__(model, players, kl=script.kl, rows_at_once=script.rows_at_once, **kwargs)
        self.example = ""

    def _generate_and_score_completions(self, rows):
        """rows: B of them, every question K times in a row; the filter draws its own further questions."""
        batch = self.fill_batch(rows[:: self.script.group_size])
        mask, outcome = batch["completion_mask"], batch["rewards"]  # (B, T), (B,)
        log_ratio = None
        if self.script.process_reward:
            log_ratio = self.prm_step(batch)  # scores with the PRM as it is, and updates it
            if self.script.prm_update == "before":
                log_ratio = self.log_ratios(batch)  # the second forward
        # normalisation and whitening are over all processes' rows
        batch["advantages"] = self.on_all_processes(log_ratio, outcome, mask)  # (B, T)
        self.become("policy")
        for note, text in zip(batch["notes"], batch["texts"]):
            note["gold"] = gold_steps(note["prompt"], text)  # for the report: does credit find the wrong step?
        i = int(batch["rewards"].argmax())
        self.example = f"--- {batch['questions'][i // self.script.group_size]}\n{batch['texts'][i]}\n---"
        return batch

    # --- the filter
    def fill_batch(self, questions: list[dict]) -> dict:
        """Sample until P groups have an accuracy in [keep_low, keep_high]. Surplus groups give back their question only:
        its responses would be stale by the next step."""
        s, K = self.script, self.script.group_size
        kept, names, accuracies, tokens = [], [], [], 0
        waiting = self.memory.setdefault("surplus", {}).pop(str(self.accelerator.process_index), []) + questions
        for _ in range(s.max_refills):
            while len(waiting) < s.questions:
                waiting.append(self.next_question())
            asked, waiting = waiting[: s.questions], waiting[s.questions :]
            batch = self.turn("policy", [row for row in asked for _ in range(K)])
            accuracy = batch["rewards"].reshape(-1, K).mean(1)  # (P,)
            accuracies += accuracy.tolist()
            tokens += int(batch["completion_mask"].sum())
            for g in ((accuracy >= s.keep_low) & (accuracy <= s.keep_high)).nonzero().flatten().tolist():
                kept.append(take_rows(batch, g * K, (g + 1) * K))
                names.append(asked[g])
            if min(self.gather([len(kept)])) >= s.questions:  # all processes take part in every round
                break
        self.memory["samples"] = self.memory.get("samples", 0) + sum(self.gather([len(accuracies) * K]))
        if min(self.gather([len(kept)])) == 0:
            seen = mean(self.gather(accuracies))
            raise UserError(
                f"step {self.state.global_step}: in {s.max_refills} rounds no group of {K} had an accuracy between "
                f"--keep-low {s.keep_low} and --keep-high {s.keep_high}; the accuracy is {seen:.2f}. Take harder or easier "
                f"questions, wider bounds, or a larger --group-size."
            )
        self.log_metric("pol/accuracy", mean(self.gather(accuracies)))  # before the filter
        self.log_metric("co/groups_kept", sum(self.gather([len(kept)])) / sum(self.gather([len(accuracies)])))
        self.log_metric("co/tokens_per_kept_group", sum(self.gather([tokens])) / sum(self.gather([len(kept)])))
        self.log_metric("co/samples", self.memory["samples"])
        count = min(s.questions, *self.gather([len(kept)]))  # as many rows on every process
        # of all processes, because the first one saves the checkpoint
        own = [waiting + names[count:], self.memory.get("drawn", {}).get(str(self.accelerator.process_index), 0)]
        everyone = {str(rank): of_one for rank, of_one in enumerate(self.gather([own]))}
        self.memory["surplus"] = {rank: questions for rank, (questions, _) in everyone.items()}
        self.memory["drawn"] = {rank: drawn for rank, (_, drawn) in everyone.items()}
        joined = self.join(kept[:count])
        joined["num_items_in_batch"] = self.accelerator.reduce(joined["completion_mask"].sum(), "sum")
        joined["questions"] = [row["question"] for row in names]
        return joined

    def next_question(self) -> dict:
        """Further questions beside those of the data loader (which shuffles all, so some come twice): from the end of the data
        set, each process its own and as many as it needs."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        drawn = self.memory.setdefault("drawn", {})
        drawn[str(rank)] = drawn.get(str(rank), 0) + 1
        return self.train_dataset[-(drawn[str(rank)] * world + rank) % len(self.train_dataset)]

    # --- the PRM
    def log_ratios(self, batch: dict, grad: bool = False):
        """log pi_prm - log pi_ref of every token, (B, T); with `grad`, a generator over micro-batches of (index, (b, T))."""
        parts = self.ratio_parts(batch, grad)
        return parts if grad else torch.cat([ratio for _, ratio in parts])

    def ratio_parts(self, batch: dict, grad: bool):
        self.become("prm")
        model = self.accelerator.unwrap_model(self.model)  # gradients are exchanged by hand, in step_adapter
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        T = batch["completion_ids"].shape[1]
        for index in torch.arange(len(ids)).split(self.args.per_device_train_batch_size):
            with torch.no_grad(), use_adapter(model, "policy" if self.script.prm_reference == "policy" else None):
                reference = self._get_per_token_logps_and_entropies(model, ids[index], mask[index], T)[0]
            self._trainable()  # use_adapter leaves only one adapter so
            with torch.set_grad_enabled(grad):
                yield index, self._get_per_token_logps_and_entropies(model, ids[index], mask[index], T)[0] - reference

    def prm_step(self, batch: dict) -> torch.Tensor:
        """Scores of the PRM as it is, (B, T), and, in the same forward pass, one update of it on the outcomes."""
        outcome, mask = batch["rewards"], batch["completion_mask"]
        if self.script.prm_update == "none":
            return self.log_ratios(batch)
        scores, losses = [], []
        for index, ratio in self.log_ratios(batch, grad=True):
            loss = prm_loss(ratio, outcome[index], mask[index], self.script.beta)
            self.backward_now(loss * len(index) / len(outcome), "prm")
            scores.append(ratio.detach())  # the policy's gradient must not reach the PRM
            losses += [loss.item()] * len(index)
        norm = self.step_adapter("prm", PRM_MAX_GRAD_NORM)  # the policy has no gradient now and is left alone
        scores = torch.cat(scores)
        says = (scores * mask).sum(1) > 0
        self.log_metric("prm/loss", mean(self.gather(losses)))
        self.log_metric("prm/accuracy", mean(self.gather((says == (outcome > 0.5)).tolist())))
        self.log_metric("prm/grad_norm", norm)
        return scores

    def on_all_processes(self, log_ratio, outcome, mask):
        """`prime_advantages` of the whole batch; this process's rows of it."""
        T, counts = mask.shape[1], self.gather([len(outcome)])
        wide = lambda x: torch.cat([F.pad(part, (0, max(widths) - part.shape[1])) for part in self.gather([x.cpu()])])  # noqa: E731
        widths = self.gather([T])
        everything = prime_advantages(
            None if log_ratio is None else wide(log_ratio),
            torch.tensor(self.gather(outcome.tolist())),
            wide(mask),
            self.script.group_size,
        )
        first = sum(counts[: self.accelerator.process_index])
        return everything[first : first + len(outcome), :T].to(mask.device)


def take_rows(batch: dict, first: int, last: int) -> dict:
    return {k: v[first:last] if isinstance(v, list) or v.dim() else v for k, v in batch.items()}


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Prime, held_out: list[dict]) -> dict[str, float]:
    """The policy on held-out questions."""
    state = trainer.accelerator
    rows = held_out[state.process_index :: state.num_processes]
    prompts = [solve_prompt(row["question"]) for row in rows]

    def right(texts: list[str], of: list[dict]) -> list[bool]:
        return [is_correct(text, row["answer"]) for text, row in zip(texts, of)]

    return {
        "pol/greedy": mean(trainer.gather(right(trainer.act("policy", prompts, greedy=True), rows))),
        "pol/accuracy": mean(trainer.gather(right(trainer.act("policy", prompts), rows))),
    }


# ------------------------------------------------------------------ main
CURVES = {
    "policy": ["pol/accuracy"],
    "PRM": ["prm/accuracy", "prm/loss"],
    "health": ["co/groups_kept", "pol/entropy"],
}


def main(args: Args):
    args = fill_in(args, SMALL, REAL)
    check_batch(args.questions, args.group_size, args.micro_batch)
    check_memory(args, [(0, args.solution_tokens)], adapters=2)
    train, held_out = load_questions(args.dataset, args.steps * args.questions * 8, args.eval_questions, args.seed)
    run = start_run(args, __file__, train, held_out)
    model, tokenizer = load_model(args.model, ["policy", "prm"], args.lora_rank, args.four_bit, args.seed)
    accumulation = args.questions * args.group_size // args.micro_batch
    config = GRPOConfig(
        output_dir=str(run.folder),
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,  # one optimiser step per batch of rollouts: strictly on-policy, the ratio is 1
        num_generations=args.group_size,
        max_completion_length=args.solution_tokens,
        loss_type="dapo",  # token mean over the whole batch
        scale_rewards="group",
        max_grad_norm=1.0,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.999,
        save_steps=args.save_every,
        save_total_limit=2,
        report_to=args.report_to,
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=True,  # the idle adapter has no gradient
        **machine_options(args),  # bfloat16, checkpointing, Adam in 8 bits, vLLM
    )
    rows = [{"prompt": solve_prompt(row["question"]), **row} for row in train]
    trainer = Prime(model, args, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    run.train(trainer, lambda: evaluate(trainer, held_out), args, CURVES)


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
