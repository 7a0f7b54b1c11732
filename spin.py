r"""SPIN, Self-Play Fine-Tuning: a model learns to prefer human answers to the answers of its own
previous iterate (Chen et al. 2024, arXiv:2401.01335).

    python spin.py                                        the small model on a CPU, 1 minute
    python spin.py --opponent none                        control: continued SFT on the same answers
    python spin.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU

The loop (algorithm 1)
    for t = 0 .. iterations - 1
      OPPONENT = `start_iteration`
        opponent <- frozen copy of the player
        y' ~ opponent(. | x), one y' for every prompt x that has a human answer y
      PLAYER = `step` and `loss`, until the iteration is over
        take pairs (y, y') of this iteration and of the previous one
        h = lambda * [ (log p(y) - log p_opp(y)) - (log p(y') - log p_opp(y')) ]
        loss = mean of log(1 + e^-h)                                                     eq. 4.7

SPIN needs only the data of supervised fine-tuning, not a reward model or preference labels. The
opponent's best response is the player itself (eq. 4.1-4.6), so its update is a copy of weights. At
the first step of every iteration player and opponent are equal, and the loss is exactly ln 2.

Our changes that matter (more in docs/spin.md)
    1. Player and opponent are LoRA adapters on one base; the opponent's adapter is called "ref".
       In the released code with LoRA the opponent is the model without its adapter. So unless the
       user merges the adapter after each iteration, the opponent never changes.
    2. The previous iteration's pairs are mixed in, as in the paper's experiments; algorithm 1 has
       the current pairs only. Old pairs are scored against the new opponent, which did not write
       them.
    3. The opponent samples at temperature 1, as the theory asks; the released code leaves it open.
    4. One chat template generates and trains, and a completion that was cut at the length limit
       gets no end token. The released code has two templates and always appends an end token. Both
       differences tell the human's answer from the opponent's answer, whatever the answers say.
    5. The optimiser is AdamW (paper: RMSProp), the learning rate is one for LoRA, and a step has 32
       pairs (paper: 64). As in the released code every iteration starts with a new optimiser. As in
       the paper the learning rate falls to a fifth from iteration three on. Within each iteration
       it has a linear warm-up and decay; the released code plans the decay for more epochs than it
       trains.
    6. Far fewer prompts than 50,000, and one pass over the mixed pairs instead of 2 epochs. The
       first iteration has nothing to mix in, so it makes two passes.
    7. Questions with checkable answers, and a system prompt of our own. The paper's first model was
       fine-tuned on the human answers before; our first model need not have been.

Shapes: B pairs, b of them in a micro-batch, P prompt tokens, T completion tokens.
"""

from dataclasses import dataclass
from typing import Literal

from common.core.errors import UserError
from common.run.args import Count, CountOrZero, RunArgs, Scale, Tokens, Weight, parse, per_model


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    dataset: str = "tiny"
    """questions of the repository: tiny, tiny-hard, tiny-long; a hub id (openai/gsm8k) or a .jsonl
    file with question, answer and reference, the human answer"""
    steps: Count = 64
    """optimiser steps of all iterations together"""
    questions: Count = 32
    """pairs per step and process (paper: 64)"""
    micro_batch: Count = per_model(tiny=16, real=4)
    """pairs per forward and backward pass"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate at the end of the warm-up (paper: 5e-7, all weights)"""
    save_every: Count = 16
    """steps between checkpoints"""
    show_every: CountOrZero = 16
    """steps between samples shown; 0 = never"""
    iterations: Count = 4
    """T, outer iterations; must divide --steps"""
    beta: Scale = 0.1
    """lambda, scale of the log-ratios (paper: 0.1)"""
    last_beta: Scale = 5.0
    """lambda in the last iteration, even if it is the only one (paper: 5.0 in its fourth)"""
    opponent: Literal["previous", "sft", "none"] = "previous"
    """who writes y'. previous: the previous iterate. sft: the first model in every iteration, which
    is DPO against its completions, sampled again each time. none: nobody, which is continued SFT on
    the human answers"""
    mix_previous: bool = True
    """train on the previous iteration's pairs as well"""
    opponent_temperature: Weight = 1.0
    """sampling temperature of the opponent; 0 = greedy"""
    solution_tokens: Tokens = per_model(tiny=80, real=512)
    """length limit of a completion (paper: 2048; released generation: 256)"""

    def check(self):
        if self.steps % self.iterations:
            raise UserError(
                f"--steps {self.steps} is not a multiple of --iterations {self.iterations}."
            )


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.batch import as_completions, chosen_and_rejected
from common.core.errors import say
from common.core.lists import mean
from common.core.model import copy_adapter
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import evaluate_solver, is_correct, solve_prompt
from common.tasks.math import load_for_steps
from common.tasks.references import check_references

import torch
import torch.nn.functional as F

LATE_LR = 0.2  # lr of the third and later iterations, relative to the first (paper: 1e-7 / 5e-7)
WARMUP = 0.1  # share of an iteration's steps (paper: 10 %)


# ------------------------------------------------------------------ prompts and parsing
def human_ids(row: dict, tokenizer) -> list[int]:
    """Returns the human answer as the model would have written it: with an end token."""
    ids = tokenizer(row["reference"], add_special_tokens=False).input_ids
    return ids + [tokenizer.eos_token_id]


# ------------------------------------------------------------------ the paper's mathematics
def spin_loss(logp_real, ref_logp_real, logp_generated, ref_logp_generated, beta: float):
    """Computes eq. 4.7 with the logistic loss.

    Args:
        logp_real, logp_generated: (B,), the player's log-prob of the human and of the opponent's
            completion: SUMS over tokens. A mean would make another method.
        ref_logp_real, ref_logp_generated: (B,), the opponent's.
        beta: lambda.

    Returns:
        The loss, a scalar; r(y) and r(y'), (B,) each, detached.
    """
    # r(y) = lambda (log p(y) - log p_opp(y)),   h = r(y) - r(y'),   loss = log(1 + e^-h)
    real = beta * (logp_real - ref_logp_real)  # (B,)
    generated = beta * (logp_generated - ref_logp_generated)  # (B,)
    loss = -F.logsigmoid(real - generated).mean()
    return loss, real.detach(), generated.detach()


def learning_rate_at(step: int, length: int) -> float:
    """Returns the learning rate as a share of --lr, in iterations of `length` steps.

    It warms up linearly over a tenth of the iteration and then decays linearly. From the third
    iteration it is a fifth of that.
    """
    inside, warmup = step % length, max(1, round(WARMUP * length))
    shape = min((inside + 1) / warmup, (length - inside) / (length - warmup + 1))
    return shape * (LATE_LR if step // length >= 2 else 1.0)


# ------------------------------------------------------------------ the trainer
class Spin(CoTrainer):
    """`step` and `start_iteration` are algorithm 1, `loss` is eq. 4.7."""

    def __init__(self, *inputs):
        super().__init__(*inputs)
        copy_adapter(self.model, "player", "ref")  # the first opponent
        self.train_rows = self.with_human_answers(self.train_rows)
        self.held_out = self.with_human_answers(self.held_out)
        self.length = self.cfg.steps // self.cfg.iterations  # optimiser steps per iteration
        if len(self.train_rows) < self.questions_per_step:
            raise UserError(
                f"--dataset {self.cfg.dataset}: {len(self.train_rows)} training questions are too "
                f"few for one step, see --questions {self.cfg.questions}."
            )

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        tokens, temperature = args.solution_tokens, args.opponent_temperature
        return {
            "player": Player([], args.lr, tokens, rows=2),
            # the frozen opponent twice: scored at temperature 1, and writing at its own
            "opponent": Player([], 0.0, tokens, adapter="ref"),
            "writer": Player([], 0.0, tokens, temperature=temperature, adapter="ref"),
        }

    def step(self, rows):
        """rows: not used, pairs are made once per iteration."""
        t, done = divmod(self.state.global_step, self.length)  # iteration, steps of it so far
        if self.saved.get("iteration") != t:
            self.start_iteration(t)
        everything = self.saved["pairs"] + self.saved["previous_pairs"]
        pairs = self.from_epochs(everything, done, f"{t}")  # of all processes
        mine = self.shard(pairs)  # B
        prompts = [solve_prompt(pair["question"]) for pair in mine]
        batch = self.pairs("player", prompts, [(p["real"], p["generated"]) for p in mine])
        batch.extras["human_tokens"] = sum(len(pair["real"]) for pair in pairs)
        return [batch]

    def start_iteration(self, t: int):
        """Freezes the opponent, has it answer every prompt once, and clears the optimiser."""
        if self.cfg.opponent == "previous":
            copy_adapter(self.model, "player", "ref")
        rows, previous = self.prompts(), self.saved.get("pairs", [])
        pairs = self.in_parallel(self.make_pairs, rows)
        if self.cfg.opponent != "none":
            self.report_opponent(rows, pairs)
            if all(pair["real"] == pair["generated"] for pair in pairs):
                raise UserError(
                    f"iteration {t}: every completion of the opponent equals the human answer, so "
                    f"that nothing is left to learn."
                )
        self.saved |= {"iteration": t, "pairs": pairs}
        self.saved["previous_pairs"] = previous if self.cfg.mix_previous else []
        self.optimizer.state.clear()  # AdamW's moments; for the rate see learning_rate_at

    def prompts(self) -> list[dict]:
        """Returns the prompts, the same in every iteration: one pass over the mixed pairs."""
        count = self.length * self.questions_per_step
        return self.train_rows[: max(1, count // 2) if self.cfg.mix_previous else count]

    def with_human_answers(self, rows: list[dict]) -> list[dict]:
        """Returns the rows with a human answer that fits; a human answer is never cut."""
        limit = self.cfg.solution_tokens
        fitting = [row for row in rows if row["reference"].strip()]
        fitting = [row for row in fitting if len(human_ids(row, self.processing_class)) <= limit]
        problem = f"no human answer of at most --solution-tokens {limit}"
        if not fitting:
            raise UserError(f"--dataset {self.cfg.dataset}: {problem}.")
        if len(fitting) < len(rows):
            say(f"left out: {len(rows) - len(fitting)} of {len(rows)} questions have {problem}")
        return fitting

    def make_pairs(self, rows: list[dict]) -> list[dict]:
        """Returns a pair (y, y') of token ids for each row."""
        real = [human_ids(row, self.processing_class) for row in rows]
        generated = real  # continued SFT needs no y'
        if self.cfg.opponent != "none":
            prompts = [solve_prompt(row["question"]) for row in rows]
            # as sampled: a completion cut at the length limit has no end token, and gets none
            generated = self.generate_ids("writer", prompts)
        return [
            {"question": row["question"], "real": y, "generated": y_}
            for row, y, y_ in zip(rows, real, generated)
        ]

    def loss(self, batch):
        """Returns what b pairs add to the mean over the step's pairs, and what is shown."""
        both = as_completions(batch)  # 2b rows: human, opponent's, human, ...
        logp, entropy = self.score(both)  # (2b, T), of the player
        real, generated = chosen_and_rejected(logp.sum(1))  # (b,) each
        shown = {"entropy": entropy, "logp_human": real}
        if self.cfg.opponent == "none":
            return -real.sum() / batch.extras["human_tokens"], shown  # - log p(y) per token
        with torch.no_grad(), self.playing("opponent"):  # the same rows at a time: ln 2 is exact
            ref_logp = self.score(both)[0]  # (2b, T)
        ref_real, ref_generated = chosen_and_rejected(ref_logp.sum(1))  # (b,) each
        beta = self.scale()
        loss, r_real, r_generated = spin_loss(real, ref_real, generated, ref_generated, beta)
        shown |= {"reward_human": r_real, "reward_generated": r_generated}
        shown["pair_accuracy"] = r_real > r_generated
        shown["credit"] = beta * (logp - ref_logp)  # (2b, T): each token's share of r(y) or r(y')
        shown["spin_loss"] = loss.expand(len(real))  # (b,), however pairs are cut
        return loss * (len(real) / self.questions_per_step), shown

    def scale(self) -> float:
        """Returns lambda. It is larger in the last iteration, which makes the update smaller."""
        last = self.state.global_step // self.length == self.cfg.iterations - 1
        return self.cfg.last_beta if last else self.cfg.beta

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: learning_rate_at(step, self.length)
            )
        return self.lr_scheduler

    # --- what is logged and shown; no method below affects training
    def report_opponent(self, rows: list[dict], pairs: list[dict]):
        ids = [pair["generated"] for pair in pairs]
        texts = self.decode(ids)
        right = [is_correct(text, row["answer"]) for text, row in zip(texts, rows)]
        equal = [pair["real"] == pair["generated"] for pair in pairs]
        cut = [row[-1] not in self.eos_token_ids for row in ids]
        self.log_mean("opponent/accuracy", right)  # only a measure: SPIN has no reward
        self.log_mean("opponent/equal_to_human", equal)
        self.log_mean("opponent/completions/mean_length", [len(row) for row in ids])
        self.log_mean("opponent/completions/clipped_ratio", cut)

    def show_loss(self, batch, shown):
        if "credit" in shown:
            credit, sides = shown["credit"], ["human", "opponent"]
            self.record_part(batch, credit, "reward", credit.sum(1), sides, "share of the reward")
            period = self.length if self.cfg.opponent == "previous" else self.cfg.steps
            if self.state.global_step % period == 0:  # player and opponent are equal: rewards are 0
                del shown["reward_human"], shown["reward_generated"], shown["pair_accuracy"]
        super().show_loss(batch, shown)


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Spin, held_out: list[dict]) -> dict[str, float]:
    """Measures the player's answers to held-out questions, and its log-likelihood of human ones."""

    def logp_human(rows: list[dict]) -> list[float]:
        if not rows:
            return []
        ids = [human_ids(row, trainer.processing_class) for row in rows]
        batch = trainer.completions("player", [solve_prompt(row["question"]) for row in rows], ids)
        return trainer.log_probs("player", batch).sum(1).tolist()

    figures, _, _ = evaluate_solver(trainer, "player", held_out)
    return figures | {"player/logp_human": mean(trainer.in_parallel(logp_human, held_out))}


# ------------------------------------------------------------------ main
CURVES = {
    "player": ["player/pair_accuracy", "player/accuracy"],
    "log-likelihood of human answers": ["player/logp_human"],
    "loss and rewards": ["player/spin_loss", "player/reward_human", "player/reward_generated"],
}


def load(args: Args):
    train, held_out = load_for_steps(args)
    check_references(train + held_out, args.dataset)
    return train, held_out


def main(args: Args):
    launch(Spin, args, load=load, evaluate=evaluate, curves=CURVES)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
