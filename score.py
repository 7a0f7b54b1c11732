r"""SCoRe (Kumar et al. 2024, arXiv:2409.12917): a model learns to correct itself, by RL in two
turns.

    python score.py                                       the small model on a CPU, 3 minutes
    python score.py --stage1-steps 0 --alpha 0            ablation: plain RL in two turns
    python score.py --turns 1                             control: RL in one turn, no second try
    python score.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU

The loop is `Score.step`. One model plays both turns, and nobody tells it whether it was right
    FIRST     writes K solutions y1 of each question
    SECOND    gets the same instruction after every y1, "there may be an error", and writes y2
    UPDATE    one update, on both turns together; each turn is rewarded for its own answer only
              (gamma = 0)

              stage I                       stage II
    FIRST     no reward, held at the base   r1
              by a KL weight beta1 + beta2
    SECOND    r2                            r2' = r2 + alpha (r2 - r1)

                    right -> right    wrong -> right    right -> wrong    wrong -> wrong
              r2'         1              1 + alpha          -alpha              0

Plain RL in two turns has two optima: to improve between the turns, or to answer as well as possible
in the first turn and to copy, y2 = y1. In the paper it ends in copying. Stage I moves only the
second turn. In stage II the bonus makes a change between the turns count alpha times as much as the
answer.

Our changes that matter (more in docs/score.md)
    1. The second turn is a prompt of its own that quotes question and y1. The paper has one
       conversation with two messages, which the small model has never seen.
    2. A = r - mean over the K first tries of a question, and over its K second tries. We do not
       divide by the deviation, which would divide alpha out again.
    3. AdamW starts anew with stage II, whose rewards are up to 11 times as large.
    4. All first tries are the model's own; the paper mixes in some of the base's.

Shapes: P questions, K tries of each, B = P * K; b rows of a micro-batch, T tokens.
"""

from dataclasses import dataclass
from typing import Literal

from common.run.args import (
    Count,
    CountOrZero,
    GroupSize,
    RunArgs,
    Several,
    Tokens,
    Weight,
    parse,
    per_model,
)


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 40
    """optimiser steps of both stages together (paper: 3000 on MATH)"""
    stage1_steps: CountOrZero = 16
    """how many of the steps are stage I; ablation: 0 (the paper does not say)"""
    turns: Literal[1, 2] = 2
    """turns that are trained; control: 1, plain RL of the first try, without stage I"""
    questions: Count = 8
    """P, questions per step and process (paper: a batch of 512 on MATH)"""
    group_size: GroupSize = 8
    """K, first tries of a question, with one second try each (the paper does not say)"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the adapter, constant (paper: 5e-6, all weights)"""
    alpha: Weight = 10.0
    """weight of the bonus r2 - r1 in stage II (paper: 10); ablation: 0"""
    kl: Weight = 0.01
    """beta1, weight of the k3 penalty towards the base in both turns (paper: 0.01)"""
    first_kl: Weight = 0.1
    """beta2, added to beta1 for the first turn in stage I (paper: 0.1 MATH, 0.25 MBPP)"""
    solution_tokens: Tokens = per_model(tiny=80, real=1024)
    """length limit of a first try"""
    second_tokens: Tokens = per_model(tiny=144, real=1536)
    """length limit of a second try, with its thoughts"""
    eval_samples: Several = 2
    """first tries per held-out question, with one second try each"""


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.advantage import group_advantage
from common.core.cotrainer import Batch
from common.core.lists import mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import (
    SOLVED,
    boxed,
    is_correct,
    prompt,
    solve_prompt,
    split_steps,
    without_thoughts,
)
from common.tasks.math import load_for_steps
from common.tasks.verdicts import WRONG

import torch

# ------------------------------------------------------------------ prompts and parsing
AGAIN = r"""You are given a problem and your own first solution of it. There may be an error in it.
Think about it between <think> and </think>: check its steps by your own calculation. Then write the
whole solution again, corrected if need be: every step in its own <step> </step> tags, and after
the last one the answer in this form: <answer>\boxed{...}</answer>."""


def again_prompt(question: str, first: str) -> list[dict]:
    """Returns the second turn's prompt: the same words whether the first try is right or not."""
    return prompt(AGAIN, to_try_again(question, first), TRIED_AGAIN)


def to_try_again(question: str, first: str) -> str:
    """Returns what the user says after a first try."""
    return f"Problem: {question}\nSolution:\n{first}\nTry again."


TRIED_AGAIN = [  # worked examples: a right first try stays, and a wrong first try is corrected
    (
        to_try_again(*SOLVED[0]),
        "<think>\n3 boxes of 12 pens are 36 pens. Ann gets 6 and Bob gets 5, so 11 are gone, and "
        f"36-11 = 25 are left. I find no error.\n</think>\n{SOLVED[0][1]}",
    ),
    (
        to_try_again(SOLVED[1][0], WRONG),
        "<think>\nHalf of 20 is 10. Each of 10 books brings 8 dollars: 10*8 = 80, not 10+8.\n"
        f"</think>\n{SOLVED[1][1]}",
    ),
]


def content(text: str) -> tuple | str:
    r"""Returns what a try says, without its thoughts and without `!`: its steps and its answer, or
    its text if it has no steps and no answer.

    >>> content("<think>\n3+4=8:8-4=4\n</think>\n<step>3+4=7!</step> <answer>\\boxed{7}</answer>")
    (['3+4=7'], '7')
    """
    text = without_thoughts(text)
    steps, answer = [step.strip().rstrip("!") for step in split_steps(text)], boxed(text)
    return (steps, answer and answer.strip()) if steps or answer else text.strip()


# ------------------------------------------------------------------ the paper's mathematics
def are_right(tries: list[str], rows: list[dict]) -> list[bool]:
    """Returns whether each try is right: r = 1 or 0."""
    return [is_correct(without_thoughts(y), row["answer"]) for y, row in zip(tries, rows)]


def shaped(r1: torch.Tensor, r2: torch.Tensor, alpha: float) -> torch.Tensor:
    """Returns the second turn's reward. (B,) each -> (B,)

    Given y1, -alpha r1 is the same for every y2. So, like any baseline, it has no share in the
    expected gradient of the second turn: this gradient is 1 + alpha times the gradient of r2.
    """
    # r2' = r2 + b,   b = alpha (r2 - r1)
    return r2 + alpha * (r2 - r1)


def transitions(first: list[bool], second: list[bool]) -> dict[str, list[float]]:
    """Returns what happens between the turns, for pairs of tries that are right or wrong. delta =
    wrong_to_right - right_to_wrong; all three are shares of all pairs. corrected is the share of
    the wrong first tries whose second try is right, so it can stay high when few tries are wrong.
    """
    pairs = list(zip(first, second, strict=True))
    return {
        "delta": [float(two) - float(one) for one, two in pairs],
        "wrong_to_right": [float(two and not one) for one, two in pairs],
        "right_to_wrong": [float(one and not two) for one, two in pairs],
        "corrected": [float(two) for one, two in pairs if not one],
    }


# ------------------------------------------------------------------ the trainer
class Score(CoTrainer):
    """`step` is the loop. Each row has its own KL weight."""

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        first, second = args.solution_tokens, args.second_tokens
        return {
            "first": Player([], args.lr, first, args.group_size, adapter="agent"),
            # every second try has a prompt of its own
            "second": Player([], args.lr, second, group_size=1, reads=first, adapter="agent"),
        }

    def step(self, rows):
        """rows: B, every question K times in a row."""
        cfg, done = self.cfg, self.state.global_step
        stage1 = cfg.turns == 2 and done < cfg.stage1_steps
        if cfg.turns == 2 and done == cfg.stage1_steps:
            self.optimizer.state.clear()  # AdamW's moments are those of smaller rewards
        # this is a switch, because each row has its own weight: at 0 nothing scores with the base
        self.kl = cfg.kl + (cfg.first_kl if stage1 else 0.0)
        first = self.rollout("first", rows)  # B tries y1
        r1 = torch.tensor(are_right(first.texts, rows)).to(first.rewards)  # (B,)
        self.set_turn_rewards(first, rows, r1)
        if stage1:
            first.advantages = torch.zeros_like(r1)  # A1 = 0: only its KL term is left
        first.kl_weights = torch.full_like(r1, self.kl)  # (B,)
        if cfg.turns == 1:
            self.log_mean("first/accuracy", r1)
            return [first]
        asked = [again_prompt(row["question"], y1) for row, y1 in zip(rows, first.texts)]
        second = self.rollout("second", [{"prompt": x2} for x2 in asked])  # B tries y2
        r2 = torch.tensor(are_right(second.texts, rows)).to(second.rewards)  # (B,)
        r = r2 if stage1 else shaped(r1, r2, cfg.alpha)  # (B,)
        self.set_turn_rewards(second, rows, r)
        second.kl_weights = torch.full_like(r2, cfg.kl)  # (B,)
        self.report_step(first, second, r1, r2)
        return [self.concat([first, second])]

    def set_turn_rewards(self, batch: Batch, rows: list[dict], rewards: torch.Tensor):
        """Sets the rewards and the advantages of one turn. The K tries of a question are a group,
        also in the second turn, where they follow different first tries.
        """
        K = self.cfg.group_size
        self.set_rewards(batch, rewards, groups=[row["question"] for row in rows])
        # A = r - mean; not / std, which would scale 11 and -10 back to the size of 1 and 0
        batch.advantages = group_advantage(rewards, K, scale=False)  # (B,)

    # --- what is logged and shown; no method below affects training
    def report_step(self, first: Batch, second: Batch, r1: torch.Tensor, r2: torch.Tensor):
        one, two = r1.bool().tolist(), r2.bool().tolist()
        self.log_mean("first/accuracy", one)
        self.log_mean("second/accuracy", two)
        for name, values in transitions(one, two).items():
            self.log_mean(f"co/{name}", values)
        same = [content(y1) == content(y2) for y1, y2 in zip(first.texts, second.texts)]
        self.log_mean("co/same", same)
        for note, right1, right2 in zip(second.notes, r1.tolist(), r2.tolist()):
            note["rewards"] |= {"r1": right1, "r2": right2}

    def show_loss(self, batch, shown):
        """Logs the KL term and the entropy, (b, T), of each turn by itself."""
        mask = batch.completion_mask.bool()
        turn = batch.row * 0 if batch.source is None else batch.source  # (b,) 0 or 1
        for name, values in shown.items():
            for i, player in enumerate(self.players):
                self.log_mean(f"{player}/{name}", values[mask & (turn == i)[:, None]])


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Score, held_out: list[dict]) -> dict[str, float]:
    """Measures both turns on held-out questions, sampled and greedily."""
    result = {}
    for greedy in (False, True):
        n = 1 if greedy else trainer.cfg.eval_samples
        rows = [row for row in held_out for _ in range(n)]
        asked = [solve_prompt(row["question"]) for row in rows]
        texts = trainer.generate_all("first", asked, greedy)
        asked = [again_prompt(row["question"], y1) for row, y1 in zip(rows, texts)]
        again = trainer.generate_all("second", asked, greedy)
        one, two = are_right(texts, rows), are_right(again, rows)
        kind = "greedy" if greedy else "accuracy"
        result |= {f"first/{kind}": mean(one), f"second/{kind}": mean(two)}
        found = transitions(one, two)
        found["same"] = [content(y1) == content(y2) for y1, y2 in zip(texts, again)]
        end = "_greedy" if greedy else ""
        result |= {f"co/{name}{end}": mean(values) for name, values in found.items() if values}
    return result


# ------------------------------------------------------------------ main
CURVES = {
    "accuracy": ["second/accuracy", "first/accuracy"],
    "between the turns": ["co/delta", "co/wrong_to_right", "co/right_to_wrong", "co/corrected"],
    "collapse": ["co/same"],
    "how far the first turn is from the base": ["first/kl"],
}


def main(args: Args):
    launch(Score, args, load=load_for_steps, evaluate=evaluate, curves=CURVES, prompt=solve_prompt)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
