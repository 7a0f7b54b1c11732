r"""SPIN, Self-Play Fine-Tuning (Chen et al. 2024, arXiv:2401.01335): a model trained to prefer human answers to those of its
own previous iterate. No reward model, no preference labels, nothing but the data of supervised fine-tuning.

The loop (paper, algorithm 1)
    for t = 0 .. 3
      opponent <- frozen copy of the player
      y' ~ opponent(. | x), one for every prompt x with a human answer y;  train on these pairs and the previous iteration's
      h = lambda * [ (log p(y) - log p_opp(y)) - (log p(y') - log p_opp(y')) ],  loss = log(1 + e^-h)               eq. 4.7
    The opponent's own best response is the player (sec. 4.2), so its update is a copy of weights. At the first step of every
    iteration the loss is exactly ln 2: player and opponent are the same.

Where we differ from the paper [P] or the released code [C], and why
     1. QLoRA: player and opponent are adapters on one base; the opponent is the one named "ref". [P, C: two full models.] With
        PEFT the code of [C] would take the base as opponent for ever, unless adapters were merged in between.
     2. Previous pairs are mixed in, as in [C]'s experiments; algorithm 1 as printed uses the current ones only. They are
        scored against the NEW opponent, which did not write them.
     3. The opponent samples at temperature 1, what the theory asks for; [P] does not say, [C]'s generate.py sets nothing.
     4. One template generates and trains. [C] generates with an Alpaca-style one and trains with the chat template, so that
        the two answers of a pair can be told apart by form.
     5. An answer cut at the length limit keeps its cut: no end-of-sequence token that it never wrote. [C] appends one to every
        answer, by which the player can win. Human answers longer than the limit are left out and counted.
     6. Fresh AdamW and schedule (10 % warm-up, linear decay) per iteration. [P, C: RMSProp.] lambda 0.1, 5.0 in the last
        iteration; the lr falls to a fifth from the third iteration on (5e-7 to 1e-7 in [P]). LoRA's lr is far higher: its
        B matrices start at zero, and with so few pairs 5e-7 would not move them.
     7. Far fewer prompts. An iteration is one pass over the mixed pairs; the first, with nothing to mix in, two over its own.

Run
    python spin.py                                                                 # embedded default, CPU, five minutes
    python spin.py --opponent none                                                 # continued SFT, the paper's control
    python spin.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k       # one GPU, in 4-bit

Shapes: B pairs, P prompt tokens, T answer tokens.
"""

import random
from dataclasses import dataclass
from typing import Literal

from common.answers import is_correct
from common.cotrainer import CoTrainer, Player
from common.data import UserError, load_questions
from common.memory import check_memory, machine_options
from common.model import load_model
from common.run import fill_in, mean, plain_errors, start_run

import torch
import torch.nn.functional as F
import tyro
from datasets import Dataset
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOConfig
from trl.trainer.utils import use_adapter


# ------------------------------------------------------------------ arguments
@dataclass
class Args:
    # --- alike in all six scripts; what is None depends on the model, see SMALL and REAL below
    model: str = "tiny"
    """the embedded default, a hub id or a folder"""
    dataset: str = "tiny"
    """the embedded questions, a hub id (openai/gsm8k) or a .jsonl file with question, answer and reference"""
    out: str | None = None
    """run folder, runs/spin-<time>-<seed> if not given; given again, the run goes on where it stopped"""
    seed: int = 0
    """of adapters, questions and sampling"""
    steps: int = 64
    """optimiser steps of all iterations together"""
    questions: int = 32
    """pairs per step and process (paper: 64)"""
    micro_batch: int | None = None
    """pairs per forward and backward pass (embedded 16, real 4); questions must be a multiple"""
    lr: float | None = None
    """peak learning rate of the adapter (embedded 1e-3, real 2e-5; paper: 5e-7, all weights)"""
    lora_rank: int = 16
    """rank of the adapter"""
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
    save_every: int = 16
    """steps between checkpoints"""
    show_every: int = 16
    """steps between samples shown; 0 = never"""
    report_to: str = "none"
    """any tracker that transformers knows: trackio, wandb, tensorboard"""
    # --- the paper
    iterations: int = 4
    """T, outer iterations; steps must be a multiple"""
    beta: float = 0.1
    """lambda, scale of the log-ratios (paper: 0.1)"""
    last_beta: float = 5.0
    """lambda in the last iteration, also if it is the only one (paper: 5.0): a small step, near convergence"""
    opponent: Literal["previous", "sft", "none"] = "previous"
    """who writes y': the previous iterate; the first model for ever (DPO against the SFT model's answers); nobody (continued
    SFT on the same human answers for the same number of steps, the paper's control)"""
    mix_previous: bool = True
    """train on the previous iteration's pairs, too"""
    opponent_temperature: float = 1.0
    """sampling temperature of the opponent, 0 = greedy"""
    solution_tokens: int | None = None
    """length limit of an answer (embedded 64, real 512; paper: 2048; released generation: 256)"""


SMALL = {"lr": 1e-3, "micro_batch": 16, "solution_tokens": 64}
REAL = {"lr": 2e-5, "micro_batch": 4, "solution_tokens": 512}
LATE_LR = 0.2  # lr of the third and later iterations, relative to the first (paper: 1e-7 / 5e-7)
WARMUP = 0.1  # share of an iteration's steps (paper: 10 %)

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
def answer_reward(completions, answer, **_) -> list[float]:
    """Whether the opponent's answer is right. Logged only: SPIN knows no reward."""
    return [float(is_correct(c[0]["content"], gold)) for c, gold in zip(completions, answer)]


# ------------------------------------------------------------------ the paper's mathematics
def spin_loss(logp_real, ref_logp_real, logp_generated, ref_logp_generated, beta: float):
    """Eq. 4.7 with the logistic loss. All inputs (B,): SUMS of token log-probs, of the player and of the opponent (ref).

    Returns (loss, a scalar; real_reward (B,); generated_reward (B,)), the rewards lambda * (log p - log p_opp), detached.
    """
    real = beta * (logp_real - ref_logp_real)  # (B,)
    generated = beta * (logp_generated - ref_logp_generated)  # (B,)
    loss = -F.logsigmoid(real - generated).mean()  # log(1 + e^-h), h = real - generated
    return loss, real.detach(), generated.detach()


# ------------------------------------------------------------------ the trainer: one optimiser step
class Spin(CoTrainer):
    """Inherited: the opponent's rollouts, log-probs, the optimiser, logging, checkpoints.
    Here: the outer loop, the pairs, and the loss."""

    def __init__(self, model, script: Args, **kwargs):
        self.script = script
        players = {
            "player": Player([answer_reward], script.lr, script.solution_tokens, 1),
            "opponent": Player([answer_reward], 0.0, script.solution_tokens, 1, script.opponent_temperature, adapter="ref"),
        }
        super().__init__(model, players, rows_at_once=script.rows_at_once, **kwargs)
        self.example = ""
        self.length = script.steps // script.iterations  # optimiser steps per iteration

    def iteration(self) -> int:
        return self.state.global_step // self.length

    def _generate_and_score_completions(self, rows):
        """Nothing of the loader's rows: the pairs of this iteration, in an order that is shuffled once per pass."""
        t, s = self.iteration(), self.script
        if self.memory.get("iteration") != t:
            self.start_iteration(t)
        pairs = self.memory["pairs"][str(self.accelerator.process_index)]
        if s.mix_previous:
            pairs = pairs + self.memory["previous_pairs"][str(self.accelerator.process_index)]
        first = self.state.global_step % self.length * s.questions
        epoch, offset = divmod(first, len(pairs))
        order = shuffled(len(pairs), t, epoch) + shuffled(len(pairs), t, epoch + 1)
        chosen = [pairs[i] for i in order[offset : offset + s.questions]]
        self.become("player")
        self.asked = [pair["question"] for pair in chosen]
        return self.collate(chosen)

    # --- the outer loop
    def start_iteration(self, t: int):
        """Freeze the opponent, let it answer every prompt once, start the optimiser afresh."""
        s = self.script
        if s.opponent == "previous":
            copy_adapter(self.model, "player", "ref")
        new, equal = [], 0
        rows = self.prompts_of(t)
        for start in range(0, len(rows), 128):
            part = rows[start : start + 128]
            human = [self.processing_class(row["reference"], add_special_tokens=False).input_ids for row in part]
            human = [ids + [self.processing_class.eos_token_id] for ids in human]
            if s.opponent == "none":
                new += [{"question": row["question"], "real": real, "generated": real} for row, real in zip(part, human)]
                continue
            batch = self.turn("opponent", part)
            for row, real, ids, mask in zip(part, human, batch["completion_ids"], batch["completion_mask"]):
                generated = ids[mask.bool()].tolist()  # as sampled: cut ones have no end, and get none
                equal += generated == real
                new.append({"question": row["question"], "real": real, "generated": generated})
            self.example = f"--- {part[0]['question']}\n{batch['texts'][0]}\n--- a human\n{part[0]['reference']}\n---"
        if s.opponent != "none":
            share = mean(self.gather([equal / len(new)]))
            self.log_metric("opp/equal_to_human", share)
            if share == 1.0:
                raise UserError(f"iteration {t}: every answer of the opponent equals the human one; nothing is left to learn.")
        previous = self.memory.get("pairs", {})
        self.memory["iteration"] = t
        self.memory["previous_pairs"] = {str(r): previous.get(str(r), []) for r in range(self.accelerator.num_processes)}
        self.memory["pairs"] = {str(r): pairs for r, pairs in enumerate(self.gather([new]))}
        self.become("player")
        getattr(self.optimizer, "optimizer", self.optimizer).state.clear()  # its moments; the schedule: learning_rate_at

    def prompts_of(self, t: int) -> list[dict]:
        """The same prompts in every iteration: only their answers are new. As many as make one pass over the mixed pairs, and
        as many on every process."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        count = self.length * self.script.questions // (2 if self.script.mix_previous else 1)
        count = min(count * world, len(self.train_dataset) // world * world)
        return [self.train_dataset[i] for i in range(rank, count, world)]

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """10 % warm-up and linear decay within every iteration."""
        if self.lr_scheduler is None:
            at = lambda step: learning_rate_at(step, self.length)  # noqa: E731
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, at)
        return self.lr_scheduler

    # --- pairs and their loss
    def collate(self, pairs: list[dict]) -> dict:
        """Prompts (B, P) padded on the left; both answers (B, 2, T) padded on the right, human first."""
        tokenizer, pad_id = self.processing_class, self.processing_class.pad_token_id
        chats = [solve_prompt(pair["question"]) for pair in pairs]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
        left = lambda rows, fill: pad_sequence([r.flip(0) for r in rows], True, fill).flip(1)  # noqa: E731
        prompts = [torch.tensor(ids) for ids in prompts]
        answers = [torch.tensor(pair[kind]) for pair in pairs for kind in ("real", "generated")]
        ids = pad_sequence(answers, True, pad_id)  # (2B, T)
        mask = pad_sequence([torch.ones_like(a) for a in answers], True, 0)  # (2B, T)
        device = self.accelerator.device
        batch = {
            "prompt_ids": left(prompts, pad_id),
            "prompt_mask": left([torch.ones_like(p) for p in prompts], 0),
            "pair_ids": ids.reshape(len(pairs), 2, -1),
            "pair_mask": mask.reshape(len(pairs), 2, -1),
            "completion_mask": mask.reshape(len(pairs), 2, -1).amax(1),  # what micro-batches are sorted and trimmed by
            "advantages": torch.ones(len(pairs)),  # no pair is dead
            "rows_in_step": torch.tensor(len(pairs)),
            "human_tokens": torch.tensor(sum(len(pair["real"]) for pair in pairs)),  # of the step, however it is cut
            "row": torch.arange(len(pairs)),
        }
        return {key: value.to(device) for key, value in batch.items()}

    def _compute_loss(self, model, inputs):
        beta = self.script.last_beta if self.iteration() == self.script.iterations - 1 else self.script.beta
        T = inputs["completion_mask"].shape[1]
        pair_ids, pair_mask = inputs["pair_ids"][..., :T], inputs["pair_mask"][..., :T]  # (b, 2, T)
        ids = torch.cat([inputs["prompt_ids"].repeat_interleave(2, 0), pair_ids.flatten(0, 1)], 1)  # (2b, P + T)
        mask = torch.cat([inputs["prompt_mask"].repeat_interleave(2, 0), pair_mask.flatten(0, 1)], 1)
        share = len(pair_ids) / inputs["rows_in_step"]  # mean over the pairs of the whole step
        logps, entropies, _ = self._get_per_token_logps_and_entropies(model, ids, mask, T)  # (2b, T)
        real, generated = logps.sum(1).reshape(-1, 2).unbind(1)  # (b,) each: sums, never means
        self.log_metric("pla/entropy", (entropies.sum() / pair_mask.sum()).item())
        self.log_metric("pla/logp_human", real.mean().item())
        if self.script.opponent == "none":
            return -real.sum() / inputs["human_tokens"]  # continued SFT: negative log-likelihood per token
        with torch.no_grad(), use_adapter(self.accelerator.unwrap_model(self.model), "ref"):
            ref_logps = self._get_per_token_logps_and_entropies(model, ids, mask, T)[0]
        self._trainable()  # use_adapter leaves only one adapter so
        ref_real, ref_generated = ref_logps.sum(1).reshape(-1, 2).unbind(1)
        loss, real_reward, generated_reward = spin_loss(real, ref_real, generated, ref_generated, beta)
        self.log_metric("pla/spin_loss", loss.item())
        self.log_metric("pla/reward_human", real_reward.mean().item())
        self.log_metric("pla/reward_generated", generated_reward.mean().item())
        self.log_metric("pla/pair_accuracy", (real_reward > generated_reward).float().mean().item())
        if self._step % self.args.steps_per_generation == 0:
            self.record_pairs(inputs["row"].tolist(), pair_ids, pair_mask, beta * (logps.detach() - ref_logps))
        return loss * share

    def record_pairs(self, rows: list[int], pair_ids, pair_mask, token_rewards):
        """For the report: both answers to a question, each token with its share of the reward, lambda log(player / opponent).

        pair_ids, pair_mask: (b, 2, T).  token_rewards: (2b, T)."""
        notes = [
            {"player": who, "prompt": self.asked[i], "credit": "share of the reward"}
            for i in rows
            for who in ("human", "opponent")
        ]
        for note, reward in zip(notes, token_rewards.sum(1).tolist()):
            note["rewards"] = {"reward": reward}
        ids, mask = pair_ids.flatten(0, 1), pair_mask.flatten(0, 1)  # (2b, T)
        self.record({"completion_ids": ids, "completion_mask": mask, "advantages": token_rewards, "notes": notes})


def learning_rate_at(step: int, length: int) -> float:
    """Relative to --lr: linear warm-up over a tenth of the iteration, linear decay, a fifth from the third iteration on."""
    inside, warmup = step % length, max(1, round(WARMUP * length))
    shape = min((inside + 1) / warmup, (length - inside) / max(1, length - warmup + 1))
    return shape * (LATE_LR if step // length >= 2 else 1.0)


def shuffled(count: int, iteration: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{iteration} {epoch}").shuffle(order)
    return order


def copy_adapter(model, source: str, target: str):
    set_peft_model_state_dict(model, get_peft_model_state_dict(model, adapter_name=source), adapter_name=target)


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Spin, held_out: list[dict]) -> dict[str, float]:
    """The player's answers to held-out questions, and the log-likelihood it gives held-out human answers."""
    state = trainer.accelerator
    rows = held_out[state.process_index :: state.num_processes]
    prompts = [solve_prompt(row["question"]) for row in rows]

    def right(texts: list[str], of: list[dict]) -> list[bool]:
        return [is_correct(text, row["answer"]) for text, row in zip(texts, of)]

    trainer.become("player")
    tokenizer, logps = trainer.processing_class, []
    for start in range(0, len(rows), 64):
        pairs = []
        for row in rows[start : start + 64]:
            ids = tokenizer(row["reference"], add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
            pairs.append({"question": row["question"], "real": ids, "generated": ids})
        batch = trainer.collate(pairs)
        ids = torch.cat([batch["prompt_ids"], batch["pair_ids"][:, 0]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["pair_mask"][:, 0]], 1)
        T = batch["pair_ids"].shape[2]
        with torch.no_grad():
            model = state.unwrap_model(trainer.model)
            size = 2 * trainer.script.micro_batch
            logps += trainer._get_per_token_logps_and_entropies(model, ids, mask, T, size)[0].sum(1).tolist()
    return {
        "pla/greedy": mean(trainer.gather(right(trainer.act("player", prompts, greedy=True), rows))),
        "pla/accuracy": mean(trainer.gather(right(trainer.act("player", prompts), rows))),
        "pla/logp_human": mean(trainer.gather(logps)),
    }


# ------------------------------------------------------------------ main
CURVES = {
    "player": ["pla/pair_accuracy", "pla/accuracy"],
    "log-likelihood of human answers": ["pla/logp_human"],
    "loss and rewards": ["pla/spin_loss", "pla/reward_human", "pla/reward_generated"],
}


def human_answers(rows: list[dict], tokenizer, limit: int, where: str) -> list[dict]:
    """Rows with a human answer that fits; the others are counted and reported, never cut."""
    there = [row for row in rows if row["reference"].strip()]
    fitting = [row for row in there if len(tokenizer(row["reference"], add_special_tokens=False).input_ids) < limit]
    missing, long = len(rows) - len(there), len(there) - len(fitting)
    if missing or long:
        counts = f"{missing} of {len(rows)} have no human answer, {long} are longer than --solution-tokens {limit}"
        print(f"{where}: {counts}; left out.", flush=True)
    if not fitting:
        raise UserError(f"{where}: no question has a human answer of at most --solution-tokens {limit}.")
    return fitting


def main(args: Args):
    args = fill_in(args, SMALL, REAL)
    if args.questions % 2:
        raise UserError(f"--questions {args.questions} must be even: GRPOTrainer's loader gives them in twos.")
    if args.micro_batch < 1 or args.questions % args.micro_batch:
        raise UserError(f"--questions {args.questions} is not a multiple of --micro-batch {args.micro_batch}.")
    if args.iterations < 1 or args.steps % args.iterations:
        raise UserError(f"--steps {args.steps} is not a multiple of --iterations {args.iterations}.")
    check_memory(args, [(0, args.solution_tokens)], adapters=1, frozen_adapters=1, rows_per_item=2)
    wanted = args.steps // args.iterations * args.questions
    train, held_out = load_questions(args.dataset, wanted * 2, args.eval_questions, args.seed)
    run = start_run(args, __file__, train, held_out)
    model, tokenizer = load_model(args.model, ["player", "ref"], args.lora_rank, args.four_bit, args.seed)
    copy_adapter(model, "player", "ref")
    train = human_answers(train, tokenizer, args.solution_tokens, "training questions")
    held_out = human_answers(held_out, tokenizer, args.solution_tokens, "held-out questions")
    accumulation = args.questions // args.micro_batch
    config = GRPOConfig(
        output_dir=str(run.folder),
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_generations=2,  # GRPOTrainer's least; the loader's rows are not used
        max_completion_length=args.solution_tokens,
        loss_type="dapo",
        max_grad_norm=1.0,
        learning_rate=args.lr,
        lr_scheduler_type="constant",  # see create_scheduler
        adam_beta2=0.999,
        save_steps=args.save_every,
        save_total_limit=2,
        report_to=args.report_to,
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=True,  # the opponent has no gradient
        **machine_options(args),  # bfloat16, checkpointing, Adam in 8 bits, vLLM
    )
    rows = [{"prompt": solve_prompt(row["question"]), **row} for row in train]
    trainer = Spin(model, args, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    run.train(trainer, lambda: evaluate(trainer, held_out), args, CURVES)


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
