r"""RARO (Cai, Ryabinin and Provilkov 2025, arXiv:2511.21667): reason like the experts, from their
solutions alone, against a critic that may say tie.

    python raro.py                                        the small model on a CPU, 2 minutes
    python raro.py --critic frozen                        the critic is never trained
    python raro.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k       one GPU

The loop is `Raro.step`. There is no checker: all that is given is an expert's solution of each
question
    POLICY    writes K solutions of each question. The critic sees each solution beside the
              expert's, in random order, and names the solution that it takes for the expert's,
              or a tie
    CRITIC    judges pairs G times each. Half of the pairs are of this step, half come from a buffer
              of older pairs
    UPDATE    one update on both, of one model (or of two adapters, --no-shared)

                      the critic names      the expert's    the policy's    a tie
              R_policy                           0               1          tau_pol
              R_critic                           1               0          tau_crit

The critic earns more by a tie than by naming a solution, unless it is surer than tau_crit that this
solution is the expert's. A tie pays the two players tau_crit + tau_pol > 1 together, and a decision
pays them 1. So they could settle for ties; critic/says_tie shows whether they do.

Our changes that matter (more in docs/raro.md)
    1. The critic is shown steps and answers of both solutions, in one form, so that the form does
       not say whose solution it is. The paper's critic sees final answers, without the reasoning.
    2. The critic judges a solution once for the policy's reward, and G times for its own.
    3. A judgement that cannot be read earns 0, and so does the solution. A solution that lacks
       steps or an answer earns 0 as well, whatever the critic says, because the critic is shown
       both.
    4. The loss is a mean over all tokens of the batch; the paper divides by a constant.

Shapes: P questions, K solutions each; C pairs, G judgements each; T tokens.
"""

import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

from common.core.errors import UserError
from common.run.args import Count, GroupSize, RunArgs, Share, Tokens, Weight, parse, per_model


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, out, seed, micro_batch, eval_every, ...: common/run/args.py
    dataset: str = "tiny"
    """questions of the repository: tiny, tiny-hard, tiny-long; a hub id (openai/gsm8k) or a .jsonl
    file with question, answer and reference, an expert's solution"""
    steps: Count = 24
    """optimiser steps"""
    questions: Count = 4
    """P, questions per step and process"""
    group_size: GroupSize = 8
    """K, solutions of a question, and G, judgements of a pair (the unofficial port: 16)"""
    pairs: Count = 4
    """C, pairs that the critic is trained on per step and process"""
    old_share: Share = 0.5
    """share of these pairs that comes from the buffer, if it has as many (port: a half)"""
    buffer: Count = 10_000
    """how many of the newest pairs are kept (port: 10,000)"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate, constant (port: 1e-6, all weights)"""
    kl: Weight = 0.001
    """weight of the k3 penalty towards the base (port: 0.001)"""
    tau_pol: Share = 0.6
    """the policy's reward for a tie (port: 0.6)"""
    tau_crit: Share = 0.55
    """the critic's reward for a tie (port: 0.55); ablation: 0, so that it must choose"""
    weight_pol: Weight = 1.0
    """weight of the policy's advantages (port: 1/9)"""
    weight_crit: Weight = 1.0
    """weight of the critic's advantages (port: 8/9)"""
    critic: Literal["co-trained", "frozen", "coin"] = "co-trained"
    """controls: a critic that is never trained; or a coin in its place"""
    shared: bool = True
    """policy and critic are one model, as in the paper; if not, two adapters"""
    solution_tokens: Tokens = per_model(tiny=80, real=1024)
    """length limit of a solution"""
    judgement_tokens: Tokens = per_model(tiny=176, real=1024)
    """length limit of a judgement"""

    def check(self):
        if self.pairs > self.questions * self.group_size:
            raise UserError(
                f"--pairs {self.pairs}: a step makes --questions {self.questions} * --group-size "
                f"{self.group_size} new ones, each of which is drawn once at most."
            )


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)


from common.checked import CoTrainer, Player
from common.core.advantage import group_advantage
from common.core.cotrainer import Batch
from common.core.lists import mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import (
    boxed,
    evaluate_solver,
    final_answer,
    is_correct,
    prompt,
    solve_prompt,
    split_steps,
)
from common.tasks.math import load_for_steps
from common.tasks.references import check_references
from common.tasks.verdicts import COMPARED, read_verdict

import torch

# ------------------------------------------------------------------ prompts and parsing
COMPARE = r"""You are given a problem and two solutions. One of them was written by an expert. Work
the problem out, and say what each solution gets right or wrong. End with the number of the expert's
solution, or with a tie if you cannot tell, and nothing after it: \boxed{1}, \boxed{2} or
\boxed{tie}"""


def compare_prompt(question: str, first: str, second: str) -> list[dict]:
    return prompt(COMPARE, to_compare(question, first, second), EXAMPLES)


def to_compare(question: str, first: str, second: str) -> str:
    both = f"Solution 1:\n{first}\nSolution 2:\n{second}"
    return f"Problem: {question}\n{both}\nWhich is sounder?"


EXAMPLES = [(to_compare(*both), judgement) for *both, judgement in COMPARED]
EXAMPLES += [
    (
        to_compare(
            "Ann has 4 bags of 6 nuts and eats 3 nuts. How many nuts are left?",
            "<step>4*6 = 24</step>\n<step>24-3 = 21</step>\n<answer>\\boxed{21}</answer>",
            "<step>She has 6*4 = 24 nuts, and 24-3 = 21.</step>\n<answer>\\boxed{21}</answer>",
        ),
        r"""4 bags of 6 nuts are 4*6 = 24 nuts, and 24-3 = 21 are left.
Solution 1 says 21, which is right. Solution 2 says 21, which is right.
The better solution: \boxed{tie}""",
    ),
]


def shown(text: str) -> str:
    r"""Returns a solution as the critic sees it, in one form whoever wrote it: each step on a line
    of its own, as in an expert's solution (references.py), and the boxed answer.

    >>> shown("Well: <step>3+4\n=7</step> <answer>so \\boxed{ 7}.</answer>")
    '<step>3+4 =7</step>\n<answer>\\boxed{7}</answer>'
    """
    *steps, answer = (" ".join(x.split()) for x in [*split_steps(text), boxed(text) or ""])
    return "".join(f"<step>{x}</step>\n" for x in steps) + rf"<answer>\boxed{{{answer}}}</answer>"


def is_whole(text: str) -> bool:
    """Whether a solution has an answer and a step that is not empty."""
    return final_answer(text) is not None and any(map(str.strip, split_steps(text)))


def parse_choice(text: str) -> str | None:
    r"""Returns what a judgement ends with: "1", "2" or "tie"; None if it ends with anything else.

    >>> parse_choice("Both hold: **Tie.**"), parse_choice("\\boxed{2} or a tie")
    ('tie', None)
    """
    return read_verdict(text, ("1", "2", "tie"))


# ------------------------------------------------------------------ rewards
def policy_reward(choice: str | None, expert: str, tau_pol: float) -> float:
    """Returns a solution's reward: 1 if the critic takes it for the expert's, tau_pol for a tie,
    else 0.

    expert: the place of the expert's solution, "1" or "2".
    """
    if choice is None or choice == expert:
        return 0.0
    return tau_pol if choice == "tie" else 1.0


def critic_reward(completions, expert, tau_crit, **_) -> list[float]:
    """Returns a reward for each judgement: 1 if it names the expert's solution, tau_crit for a tie,
    else 0. TRL calls it with the columns of the rows.
    """
    choices = [parse_choice(completion[0]["content"]) for completion in completions]
    return [
        1.0 if choice == place else tau if choice == "tie" else 0.0
        for choice, place, tau in zip(choices, expert, tau_crit)
    ]


# ------------------------------------------------------------------ the trainer
class Raro(CoTrainer):
    """`step` is the loop. `saved` holds the buffer, the same on all processes."""

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        K, solution, judgement = args.group_size, args.solution_tokens, args.judgement_tokens
        adapter = {"adapter": "agent"} if args.shared else {}
        lr = args.lr if args.shared or args.critic == "co-trained" else 0.0
        return {
            "policy": Player([], args.lr, solution, K, **adapter),
            "critic": Player([critic_reward], lr, judgement, K, reads=2 * solution, **adapter),
        }

    def step(self, rows):
        """rows: B, every question K times in a row."""
        cfg = self.cfg
        policy = self.rollout("policy", rows)  # P * K solutions
        rng = self.random_numbers()
        places = self.over_all_processes(lambda rows: [rng.choice("12") for _ in rows], rows)
        pairs = [pair_of(*one) for one in zip(rows, policy.texts, places)]
        choices = self.judged(pairs, rng)  # B
        rewards = [policy_reward(c, p["expert"], cfg.tau_pol) for c, p in zip(choices, pairs)]
        whole = map(is_whole, policy.texts)
        self.set_rewards(policy, [r if w else 0.0 for r, w in zip(rewards, whole)])
        policy.advantages = cfg.weight_pol * self.advantages(policy)  # (B,)
        self.report_step(pairs, choices)
        batches = [policy]
        if cfg.critic == "co-trained":
            batches.append(self.train_critic(pairs, rng))
        buffer = self.saved.get("buffer", []) + self.gather(pairs)
        self.saved["buffer"] = buffer[-cfg.buffer :]
        return [self.concat(batches)] if cfg.shared and len(batches) > 1 else batches

    def judged(self, pairs: list[dict], rng: random.Random) -> list[str | None]:
        """Judges each pair once; nothing is trained on these judgements."""
        if self.cfg.critic == "coin":
            return self.over_all_processes(lambda all: [rng.choice("12") for _ in all], pairs)
        with self.as_critic():
            return [parse_choice(text) for text in self.generate("critic", [*map(asked, pairs)])]

    def as_critic(self):
        """A frozen critic that shares the policy's adapter is the base, with that adapter off."""
        frozen = self.cfg.shared and self.cfg.critic == "frozen"
        return self.playing(None) if frozen else nullcontext()

    def train_critic(self, new: list[dict], rng: random.Random) -> Batch:
        """Judges C pairs G times each; the pairs are of this step and of old policies."""
        cfg, buffer = self.cfg, self.saved.get("buffer", [])
        count = cfg.pairs * self.accelerator.num_processes  # everyone's; each takes its share
        share, done = count * cfg.old_share, self.state.global_step
        old = round(share * (done + 1)) - round(share * done)  # half of 1: in half of the steps
        old = min(old, len(buffer))
        drawn = rng.sample(buffer, old) + rng.sample(self.gather(new), count - old)
        rows = [
            {"prompt": asked(pair), "expert": pair["expert"], "tau_crit": cfg.tau_crit}
            for pair in self.shard(drawn)
            for _ in range(cfg.group_size)
        ]
        critic = self.rollout("critic", rows)
        critic.advantages = cfg.weight_crit * self.advantages(critic)  # (C * G,)
        return critic

    def advantages(self, batch: Batch) -> torch.Tensor:
        """Returns A = r - mean over the group, (B,), without a division by its deviation (Dr.
        GRPO). A is 0 for a completion that was cut at its length limit.
        """
        # A = R - mean(R of the group)
        A = group_advantage(batch.rewards, self.cfg.group_size, scale=False)  # (B,)
        ends = torch.tensor(self.eos_token_ids, device=batch.completion_ids.device)
        ended = torch.isin(batch.completion_ids, ends) & batch.completion_mask.bool()
        return A * ended.any(1)

    # --- what is logged and shown; no method below affects training
    def report_step(self, pairs: list[dict], choices: list[str | None]):
        self.log_mean("policy/accuracy", [pair["right"] for pair in pairs])
        self.log_mean("critic/parsed", [choice is not None for choice in choices])
        self.log_mean("critic/says_tie", [choice == "tie" for choice in choices])
        self.log_mean("co/same_text", [pair["ours"] == pair["theirs"] for pair in pairs])
        for key, value in by_truth(pairs, choices).items():
            self.log_mean(f"critic/{key}", value)


def pair_of(row: dict, text: str, place: str) -> dict:
    """Returns a solution with the expert's, which is shown in this place."""
    return {
        "question": row["question"],
        "expert": place,
        "theirs": shown(row["reference"]),
        "ours": shown(text),
        "right": is_correct(text, row["answer"]),  # for the log alone
    }


def asked(pair: dict) -> list[dict]:
    both = (pair["theirs"], pair["ours"])
    return compare_prompt(pair["question"], *(both if pair["expert"] == "1" else both[::-1]))


def by_truth(pairs: list[dict], choices: list[str | None]) -> dict[str, list[bool]]:
    """Returns what the critic says of right and of wrong solutions beside the expert's.

    Of a right solution it should say tie in the end: a critic that still names the expert
    recognises the style and not a mistake.
    """
    said = list(zip(pairs, choices))
    return {
        "tie_where_right": [c == "tie" for p, c in said if p["right"]],
        "expert_where_right": [c == p["expert"] for p, c in said if p["right"]],
        "expert_where_wrong": [c == p["expert"] for p, c in said if not p["right"]],
    }


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Raro, held_out: list[dict]) -> dict[str, float]:
    """Measures the policy, and the critic on solutions of the base. These solutions are the same in
    every evaluation; only the judgements are drawn anew.
    """
    n = trainer.cfg.eval_samples
    result, texts, _ = evaluate_solver(trainer, "policy", held_out)
    base = trainer.saved.setdefault("base_solutions", texts[::n])  # step 0: the policy is the base
    pairs = [pair_of(r, text, "12"[i % 2]) for i, (r, text) in enumerate(zip(held_out, base))]
    with trainer.as_critic():
        texts = trainer.generate_all("critic", [*map(asked, pairs)])
    found = by_truth(pairs, [parse_choice(text) for text in texts])
    return result | {f"critic/{key}": mean(hits) for key, hits in found.items() if hits}


# ------------------------------------------------------------------ main
CURVES = {
    "policy": ["policy/accuracy"],
    "critic": ["critic/expert_where_wrong", "critic/expert_where_right", "critic/tie_where_right"],
    "ties": ["critic/says_tie", "critic/parsed"],
}


def load(args: Args):
    train, held_out = ([row for row in part if row["reference"]] for part in load_for_steps(args))
    if not train or not held_out:
        raise UserError(f"--dataset {args.dataset}: no question has a reference, which is all that "
                        f"the policy learns from.")  # fmt: skip
    check_references(train + held_out, args.dataset)
    return train, held_out


def main(args: Args):
    launch(Raro, args, load=load, evaluate=evaluate, curves=CURVES, prompt=solve_prompt)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
