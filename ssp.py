"""SSP, Search Self-Play (Lu et al. 2025, arXiv:2510.18821): a proposer writes questions that a
solver of the same weights answers, and a gate keeps those whose answer somebody else recovers.

    python ssp.py                                         the small model on a CPU, 2 minutes
    python ssp.py --penalty 0.1                           the paper's "death spiral", or not
    python ssp.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k        one GPU

The loop is `Ssp.step`.  a*: the answer of a question.  s: share of n answers that are right
    PROPOSER  writes a question                                                 `rollout`
    RULES     the text holds a question, which is short, does not name a*,      `follows_rules`
              and is neither held out nor the question that was shown
    GATE      an answerer that is not trained must recover a*                   `gate`
    REUSE     an earlier valid question takes the place of each that fails      `reused`
    SOLVER    writes n answers to each, r = [equals a*], A = (r - mean) / std   `solve`
    UPDATE    two updates of the same weights: the proposer's, then the solver's

    r_proposer = 1 - s           of a valid question                            `proposer_reward`
               = -penalty        of a question that fails (default: 0)
    A_proposer = r_proposer      the released code takes 0 for the mean and 1 for the deviation of
                                 a group of one question, so the advantage is the reward itself

The released script's penalty is 0 (its code's default: 1). With a penalty of .1, the authors
report, the proposer ends up writing hardly anything valid. With 0 no advantage of the proposer is
negative, and with .1 questions that fail have a negative one. The harm may come from the penalty,
or from the missing baseline; --baseline batch subtracts a baseline, which tells the two apart.

Our changes that matter (more in docs/ssp.md)
    1. Nobody searches. The paper's proposer searches for documents on a*, and its answerer reads
       them and four others. Here the proposer is shown the question of the data that has the answer
       a*, and writes another one. The answerer is the base, which reads the new question alone.
    2. For the chains of arithmetic that come with the repository, a program that works a chain out
       is the answerer, and the proposer is given NOTHING, because the small model has not been
       taught to write a chain that ends in a given number. Here a* is the value of the chain, and
       the gate asks whether the proposed text has a value. A chain whose value is one of its own
       numbers names a*, so it fails.
    3. --gate-error is the share of verdicts that a coin turns round. If a question without a value
       passes, nobody can solve it: s = 0, the largest reward.

Shapes: P questions, n answers each.
"""

import random
import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

from common.core.errors import UserError
from common.run.args import Count, GroupSize, RunArgs, Share, Tokens, Weight, parse, per_model


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 48
    """optimiser steps, each an update of the proposer and one of the solver (paper: 150 to 200)"""
    questions: Count = 16
    """P, questions per step and process (paper: 256)"""
    group_size: GroupSize = 5
    """n, answers of a question (paper: 5)"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the adapter, constant (paper: 1e-6, all weights)"""
    kl: Weight = 0.01
    """weight of the k3 penalty towards the base (paper: 0.01)"""
    proposer_reward: Literal["1-acc", "intermediate_difficulty", "format_only"] = "1-acc"
    """reward of a valid question, named as in the released code: 1 - s; 4 s (1 - s); 1"""
    penalty: Weight = 0.0
    """what a question that fails costs (paper: 0; ablation: 0.1)"""
    baseline: Literal["none", "batch"] = "none"
    """what is subtracted from the proposer's rewards: nothing (paper); their mean"""
    reuse: bool = True
    """an earlier question takes the place of one that fails; ablation: nothing does"""
    pool_steps: Count = 10
    """number of steps after which the earlier questions are forgotten (paper: 10)"""
    gate_error: Share = 0.0
    """share of the gate's verdicts that are turned round"""
    proposer: Literal["co-trained", "frozen", "none"] = "co-trained"
    """ablations. frozen: never trained. none: questions of the data set, which is plain GRPO"""
    train_solver: bool = True
    """ablation: train the proposer only; the solver still answers"""
    proposal_tokens: Tokens = per_model(tiny=64, real=1024)
    """length limit of a proposal (paper: 8192)"""
    solution_tokens: Tokens = per_model(tiny=112, real=1024)
    """length limit of a solution (paper: 8192)"""

    def check(self):
        if self.proposer != "co-trained" and not self.train_solver:
            raise UserError(f"--proposer {self.proposer}, --no-train-solver: nobody is trained.")


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)


from common.checked import CoTrainer, Player
from common.core.cotrainer import Batch
from common.core.errors import say
from common.core.lists import chunk, mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import (
    SOLVED,
    evaluate_solver,
    is_correct,
    prompt,
    solve_prompt,
)
from common.tasks.math import load_for_steps, same_question
from common.tiny.tasks import LEVELS, gold_answer, parse_question

import torch

LONGEST = 1000  # characters of a question (released code)

# ------------------------------------------------------------------ prompts and parsing
PROPOSE = """Write one new problem that is hard but can be solved by reasoning alone:
self-contained, with one right answer. If you are given a problem and its answer, the new problem
must have the same answer, tell of something else, and not mention the answer. Write nothing but the
new problem, inside of one pair of <question> </question> tags."""


def propose_prompt(question: str | None, answer: str | None) -> list[dict]:
    """question, answer: a question of the data, and a*; None where the proposer is given none."""
    return prompt(PROPOSE, to_propose(question, answer), PROPOSED)


def to_propose(question: str | None, answer: str | None) -> str:
    given = "" if question is None else f"Problem: {question}\nAnswer: {answer}\n"
    return given + "Propose a question."


PROPOSED = [  # worked examples: as hard as the problem that is given, and harder
    (
        to_propose(SOLVED[0][0], "25"),
        "<question>A baker makes 3 trays with 12 rolls each. He sells 6 rolls in the morning and 5 "
        "rolls in the afternoon. How many rolls are left?</question>",
    ),
    (
        to_propose(SOLVED[1][0], "80"),
        "<question>Mia bakes 20 cakes. She eats 4 cakes, gives away 6 cakes, and sells the others "
        "for 8 dollars each. How many dollars does she get?</question>",
    ),
]


def proposed_question(text: str) -> str:
    """Returns what stands in the first pair of tags, "" if there is no pair. If a tag is opened
    again before it is closed, the last opening counts.

    >>> proposed_question("<question> 1+2 mod 61\\n</question><question>x</question>")
    '1+2 mod 61'
    """
    inside, closed, _ = text.partition("<question>")[2].partition("</question>")
    return inside.rpartition("<question>")[2].strip() if closed else ""


def follows_rules(question: str, answer: str | None, shown: str | None = None) -> bool:
    """Returns whether a question is there, is short enough, does not name a* as a word, and does
    not repeat the question that the proposer was shown.
    """
    word = rf"(?<!\w){re.escape(answer or '')}(?!\w)"
    named = answer is not None and re.search(word, question, re.IGNORECASE) is not None
    if named or not 0 < len(question) <= LONGEST:
        return False
    return shown is None or same_question(question) != same_question(shown)


# ------------------------------------------------------------------ rewards
def proposer_reward(s: float | None, kind: str, penalty: float) -> float:
    """s: share of right answers; None of a question that fails.

    >>> [proposer_reward(s, "1-acc", 0.1) for s in (0.0, 0.2, 1.0, None)]
    [1.0, 0.8, 0.0, -0.1]
    """
    if s is None:
        return 0.0 - penalty  # and not -0.0
    # the released code has 4 (left + s) (right - s), and sets left 0 and right 1
    return {"1-acc": 1 - s, "intermediate_difficulty": 4 * s * (1 - s), "format_only": 1.0}[kind]


# ------------------------------------------------------------------ the paper's mathematics
def proposer_advantages(rewards: torch.Tensor, baseline: str) -> torch.Tensor:
    """Returns A = r, which the released code makes of a group of one question, with mean 0 and
    deviation 1; or A = r - mean of the batch. (B,) -> (B,); A = 0 if a reward is missing (NaN).

    >>> proposer_advantages(torch.tensor([0.5, -0.25, torch.nan]), "batch")
    tensor([ 0.3750, -0.3750,  0.0000])
    """
    mean = rewards.nanmean().nan_to_num() if baseline == "batch" else 0.0
    return (rewards - mean).nan_to_num(0.0)


# ------------------------------------------------------------------ the trainer
@dataclass
class Question:
    text: str  # "" = there is none
    answer: str | None  # a*; None = it has none
    valid: bool = True
    shown: str | None = None  # what its proposer was shown
    held_out: bool = False


class Ssp(CoTrainer):
    """`step` is the loop. CoTrainer samples, scores, computes the loss and updates.

    `saved["pool"]` maps earlier valid questions to their a*, each question once (the released code
    has a list that repeats them). It is the same on all processes.
    """

    def __init__(self, *inputs):
        super().__init__(*inputs)
        self.saved = {"pool": {}}
        # whether the repository's grammar knows every question's value
        self.has_grammar = all(parse_question(row["question"]) for row in self.train_rows)

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        proposal, solution, n = args.proposal_tokens, args.solution_tokens, args.group_size
        return {
            "proposer": Player([], args.lr, proposal, group_size=1, adapter="agent"),
            "solver": Player([], args.lr, solution, n, adapter="agent", reads=proposal),
        }

    def step(self, rows):
        """rows: P * n, every question of the data n times in a row."""
        cfg, given = self.cfg, rows[:: self.cfg.group_size]  # P
        if cfg.proposer == "none":
            return [self.solve([Question(row["question"], row["answer"]) for row in given])[0]]
        with self.proposing():
            prompts = [{"prompt": p} for p in self.propose_prompts(given)]
            proposer = self.rollout("proposer", prompts)
        proposed = self.gate(proposer.texts, given)
        truly = [question.valid for question in proposed]
        rng = self.random_numbers()
        self.turn_round(proposed, rng)
        valid = [question for question in proposed if question.valid]
        asked = self.with_reused(proposed, rng)
        solver, right = self.solve(asked)  # n answers to each

        rates = dict(zip(map(id, asked), [mean(hits) for hits in chunk(right, cfg.group_size)]))
        s = [rates.get(id(question)) for question in proposed]  # P; None: not asked
        # to punish held-out questions would also be to train on them
        rewards = [
            torch.nan if question.held_out else proposer_reward(r, cfg.proposer_reward, cfg.penalty)
            for question, r in zip(proposed, s)
        ]
        self.set_rewards(proposer, rewards)
        # over the rows of all processes
        advantages = lambda r: proposer_advantages(r, cfg.baseline)  # noqa: E731
        proposer.advantages = self.over_all_processes(advantages, proposer.rewards)  # (P,)
        self.saved["pool"] |= dict(self.gather([(q.text, q.answer) for q in valid]))
        self.report_step(proposer, proposed, truly, s, len(asked) - len(valid))
        # two updates: the solver's ignores that the proposer's has moved the weights
        return [proposer] * (cfg.proposer == "co-trained") + [solver] * cfg.train_solver

    def proposing(self):
        """Plays a frozen proposer as the base, because the solver moves their common adapter."""
        return self.playing(None) if self.cfg.proposer == "frozen" else nullcontext()

    def propose_prompts(self, given: list[dict]) -> list:
        if self.has_grammar:
            return [propose_prompt(None, None) for _ in given]
        return [propose_prompt(row["question"], row["answer"]) for row in given]

    def gate(self, texts: list[str], given: list[dict]) -> list[Question]:
        """Returns the question in each text. It is valid if it keeps the rules and a* is recovered
        from it. The grammar recovers a* by saying what a* is. The base recovers an a* that was
        given, by a greedy solution.

        given: the row of the data with a* for each text.
        """
        grammar = self.has_grammar
        shown = [(None, None) if grammar else (row["answer"], row["question"]) for row in given]
        found = [Question(proposed_question(t), a, False, q) for t, (a, q) in zip(texts, shown)]
        held_out = {*map(same_question, self.held_out_questions)}
        for q in found:
            q.held_out = same_question(q.text) in held_out
        asked = [q for q in found if follows_rules(q.text, q.answer, q.shown) and not q.held_out]
        if grammar:
            for q in asked:
                q.valid = parse_question(q.text) is not None
                q.answer = str(gold_answer(q.text)) if q.valid else None
                q.valid &= follows_rules(q.text, q.answer)  # now that a* is known
        else:
            with self.playing(None):  # the base, with the adapter off
                prompts = [solve_prompt(q.text) for q in asked]
                solutions = self.generate("solver", prompts, greedy=True)
            for q, solution in zip(asked, solutions):
                q.valid = is_correct(solution, q.answer)
        return found

    def turn_round(self, proposed: list[Question], rng: random.Random):
        """Makes the gate err: a coin turns --gate-error of its verdicts round, never the rules'."""
        coins = self.over_all_processes(lambda all: [rng.random() for _ in all], proposed)
        for q, coin in zip(proposed, coins):
            if coin < self.cfg.gate_error and not q.held_out:
                q.valid = not q.valid and follows_rules(q.text, q.answer, q.shown)

    def with_reused(self, proposed: list[Question], rng: random.Random) -> list[Question]:
        """Returns the valid questions, with an earlier valid question in the place of each question
        that has failed, or with nothing there while there are no earlier questions.

        The proposer of a question that has failed is not rewarded for what takes its place.
        """
        if self.state.global_step % self.cfg.pool_steps == 0:
            self.saved["pool"] = {}
        pool = [*self.saved["pool"].items()]
        if not (pool and self.cfg.reuse):
            return [q for q in proposed if q.valid]
        drawn = self.over_all_processes(lambda all: rng.choices(pool, k=len(all)), proposed)
        return [q if q.valid else Question(*pair) for q, pair in zip(proposed, drawn)]

    def solve(self, questions: list[Question]) -> tuple[Batch, list[bool]]:
        """Writes n answers to each question -> (batch with rewards and advantages, whether each
        answer is right). No answer to a question without a* is right.
        """
        several = [q for q in questions for _ in range(self.cfg.group_size)]
        rows = [{"prompt": solve_prompt(q.text), "question": q.text} for q in several]
        batch = self.rollout("solver", rows)
        pairs = zip(batch.texts, several)
        right = [q.answer is not None and is_correct(text, q.answer) for text, q in pairs]
        self.set_rewards(batch, [float(r) for r in right])  # A = (r - mean) / std of n
        self.log_mean("solver/accuracy", right)
        return batch, right

    # --- what is logged and shown; no method below affects training
    def report_step(self, batch: Batch, proposed, truly: list[bool], s: list, reused: int):
        rates = [rate for rate in s if rate is not None]
        chains = [parse_question(q.text) for q in proposed if q.valid]
        self.log_mean("proposer/passed", [q.valid for q in proposed])
        self.log_mean("proposer/valid", truly)  # if the gate did not err
        self.log_mean("proposer/solve_rate", rates)
        self.log_mean("proposer/never_solved", [rate == 0 for rate in rates])
        self.log_mean("proposer/operations", [len(chain[1]) for chain in chains if chain])
        self.log_mean("co/reused", reused / len(proposed))
        for note, q, rate in zip(batch.notes, proposed, s):
            note |= {"answer": q.answer, "passed": q.valid, "solve_rate": rate}


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Ssp, held_out: list[dict]) -> dict[str, float]:
    """Measures the solver on held-out questions, and as many proposals by a gate without errors."""
    result, _, _ = evaluate_solver(trainer, "solver", held_out)
    with trainer.proposing():
        texts = trainer.generate_all("proposer", trainer.propose_prompts(held_out))
    found = trainer.in_parallel(lambda its: trainer.gate(*zip(*its)) if its else [],
                                [*zip(texts, held_out)])  # fmt: skip
    valid = [q.text for q in found if q.valid]
    chains = [chain for chain in map(parse_question, valid) if chain]
    result |= {
        "proposer/valid": mean([q.valid for q in found]),
        "proposer/different": len({*valid}) / len(found),
    }
    if chains:
        result["proposer/operations"] = mean([len(operations) for _, operations in chains])
    return result


# ------------------------------------------------------------------ main
CURVES = {
    "solver": ["solver/accuracy"],
    "proposer": ["proposer/valid", "proposer/passed", "proposer/different"],
    "its questions": ["proposer/solve_rate", "proposer/never_solved", "co/reused"],
    "operations of a question": ["proposer/operations"],
}


def main(args: Args):
    if args.proposer != "none" and args.dataset not in LEVELS:
        say(
            "note: a proposer must be able to write a question that has a given answer. Of 32 by "
            "Qwen2.5-Coder-0.5B-Instruct 2 do so, and such a model learns slowly; --proposer none "
            "trains the solver alone"
        )
    launch(Ssp, args, load=load_for_steps, evaluate=evaluate, curves=CURVES, prompt=solve_prompt)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
