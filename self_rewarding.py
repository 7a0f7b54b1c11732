r"""Self-Rewarding Language Models: one model answers, scores its own answers, and learns to prefer
the better ones (Yuan et al. 2024, arXiv:2401.10020).

    python self_rewarding.py                              the embedded model on a CPU, 2 minutes
    python self_rewarding.py --train-judge self-taught    it learns to judge, too
    python self_rewarding.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k
                                                          one GPU, 4-bit

The loop.  M_1 is the model as it is given; x are questions, y answers
    for t = 1 .. iterations
        y_1 .. y_N by M_t for every question x of a new pool
        s_i = the mean of several readings of y_i by M_t, an additive score
        y+ = the answer with the highest score, y- with the lowest; no pair if they are equal
        M_{t+1} = M_t trained by   loss = - log sigmoid(r(x, y+) - r(x, y-)),
                                   r(x, y) = beta log(M(y | x) / M_t(y | x))

Nobody knows a right answer: the gold ones are for the log alone. With --train-judge self-taught
each round begins with the judge (Self-Taught Evaluators, Wang et al. 2024, arXiv:2408.02666), and
what comes of that is the round's M_t:
        x' = x changed;  y for x, y' for x': as an answer to x, y' is taken to be the worse one
        y and y' are compared in both orders; judgements j that prefer y are kept, as many of either
        order;   loss = - mean of log M(j | x, y, y') per token
The losses are in `SelfRewarding.loss`; nothing is paid, and no advantage is computed.

What we changed and it matters (the full list is in docs/self_rewarding.md)
    1. M_t is a LoRA adapter on one base; a second one, the copy from before the round, is the
       reference.
    2. The model is not first fine-tuned on judging. The embedded one has been taught to; a small
       one that only follows instructions may be a poor judge.
    3. The score adds two half points instead of five points: our questions have right answers, and
       steps that hold or do not.
    4. One number of the question is changed by the script; for the paper the model rewrites it. And
       the judge goes on from M_t instead of starting afresh; to train an answering model's judge
       before every round is in neither paper.
    5. Questions come from a data set instead of being made up, and answers are sampled at
       temperature 1 (paper: 0.7 and top-p 0.9). Answers that read the same count as one.

Shapes: B pairs or judgements, b of them in a micro-batch, T completion tokens, N answers.
"""

import random
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from common.adapters import copy_adapter
from common.args import (
    Bounds,
    Count,
    CountOrZero,
    RunArgs,
    Scale,
    Several,
    Tokens,
    Weight,
    per_model,
)
from common.cotrainer import CoTrainer, Player
from common.errors import UserError
from common.launch import launch
from common.pairs import (
    as_completions,
    chosen_and_rejected,
    completion_batch,
    in_passes,
    pair_batch,
)
from common.run import mean, plain_errors
from common.tasks.answers import boxed, is_correct, prompt, solve, solve_prompt
from common.tasks.math import load_questions

import torch
import torch.nn.functional as F
import tyro


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/args.py
    steps: Count = 72
    """optimiser steps of all rounds; must be a multiple of --iterations"""
    questions: Count = 32
    """pairs, or judgements, per step and process"""
    micro_batch: Count = per_model(tiny=16, real=4)
    """pairs or judgements per forward and backward pass"""
    lr: Weight = per_model(tiny=3e-4, real=5e-6)
    """learning rate of the adapter, constant (paper: 1e-6 falling to 1e-7)"""
    iterations: Count = 3
    """rounds (paper: 2, which make M_2 and M_3)"""
    beta: Scale = 0.1
    """scale of the log-ratios (paper: 0.1)"""
    pool: Count = per_model(tiny=192, real=1024)
    """questions that are answered in every round"""
    samples: Annotated[int, Bounds(2, 10_000)] = 4
    """N, answers of each (paper: 4)"""
    readings: Several = 3
    """judgements whose mean is an answer's score (paper: 3)"""
    train_judge: Literal["none", "self-taught"] = "none"
    """whether the judge is trained, at the beginning of every round (the paper: no)"""
    judge_steps: Count = 8
    """of --train-judge self-taught: so many of each round's steps are the judge's, and so many less
    are left for pairs"""
    eval_every: CountOrZero = 24
    """steps between evaluations on held-out questions; 0 = only first and last"""
    eval_questions: Count = per_model(tiny=128, real=128)
    """held-out questions"""
    solution_tokens: Tokens = per_model(tiny=80, real=512)
    """length limit of an answer"""
    judgement_tokens: Tokens = per_model(tiny=176, real=768)
    """length limit of a judgement"""

    def check(self):
        if self.steps % self.iterations:
            raise UserError(
                f"--steps {self.steps} must be a multiple of --iterations {self.iterations}."
            )
        length = self.steps // self.iterations
        if self.train_judge != "none" and not 0 < self.judge_steps < length:
            raise UserError(
                f"--judge-steps {self.judge_steps} must leave some of a round's {length} steps to "
                f"the solver."
            )


# ------------------------------------------------------------------ prompts and parsing
SCORE = r"""You are given a problem and a solution. Check the steps one after the other, by your own
calculation, each in its own <step> </step> tags that end in \boxed{CORRECT} or \boxed{INCORRECT}.
Then add up the score: half a point if the answer is right, and another half if every step is. End
with these two lines, the first with the numbers of the faulty steps or the word none:
Defects: 2,3
Score: \boxed{0.5}"""

COMPARE = r"""You are given a problem and two solutions, one of which is better. Check the steps of
both, by your own calculation, each in its own <step> </step> tags that end in \boxed{CORRECT} or
\boxed{INCORRECT}; a step that the problem does not ask for is INCORRECT, too. End with the number
of the better solution, and nothing after it: \boxed{1} or \boxed{2}"""


# read, too, is what others make of it: **Score:** $\boxed{ 1.0 }$.
POINTS = r"\$?\\boxed\{ *(0(?:\.0)?|0?\.5|1(?:\.0)?) *\}\$?\.?\s*"
SCORE_LINE = re.compile(rf"(?:^|\n) *(?:\*\*)?Score:? ?(?:\*\*)?:? *{POINTS}\Z")


def score_prompt(question: str, solution: str) -> list[dict]:
    return prompt(SCORE, f"Problem: {question}\nSolution:\n{solution}\nGrade it.")


def compare_prompt(question: str, first: str, second: str) -> list[dict]:
    both = f"Solution 1:\n{first}\nSolution 2:\n{second}"
    return prompt(COMPARE, f"Problem: {question}\n{both}\nWhich is right?")


def parse_score(text: str) -> float | None:
    r"""The score that a judgement ends with; None if there is none, which is not a score of 0.

    >>> parse_score("Defects: none\nScore: \\boxed{1}"), parse_score("Score: \\boxed{9}")
    (1.0, None)
    """
    found = SCORE_LINE.search(text)
    return float(found[1]) if found else None


def parse_choice(text: str) -> int | None:
    r"""The solution that a comparison ends with, 1 or 2; None if there is none."""
    found = re.search(r"\\boxed\{ *([12]) *\}\$?\.?\s*\Z", text)
    return int(found[1]) if found else None


def changed_question(rng: random.Random, question: str) -> str | None:
    """The question with one number replaced by another with as many digits; None without a number.

    The last number is left alone if there are others: of an embedded question it is the modulus.
    Decimals, thousands and digits inside of words are no numbers here.

    >>> changed_question(random.Random(0), "(38+4)*7 mod 100")
    '(38+7)*7 mod 100'
    """
    numbers = list(re.finditer(r"(?<![\w.,])[0-9]{1,9}(?!\w|[.,]\d)", question))
    if not numbers:
        return None
    place = rng.choice(numbers[:-1] or numbers)
    digits = len(place[0])
    least, most = (10 ** (digits - 1), 10**digits - 1) if digits > 1 else (1, 9)
    others = [n for n in rng.sample(range(least, most + 1), 2) if n != int(place[0])]
    return question[: place.start()] + str(others[0]) + question[place.end() :]


# ------------------------------------------------------------------ the paper's mathematics
def mean_score(readings: list[float | None]) -> float | None:
    """The mean of the readings that can be read; None if no more than half of them can: one lucky
    reading must not make the best answer of a question.
    """
    read = [score for score in readings if score is not None]
    return sum(read) / len(read) if 2 * len(read) > len(readings) else None


def best_and_worst(scores: list[float | None]) -> tuple[int, int] | None:
    """Places of the highest and the lowest score, the first ones among equals; None where all are
    equal, or fewer than two are known: such a question teaches nothing.
    """
    known = [i for i, score in enumerate(scores) if score is not None]
    if len(known) < 2:
        return None
    best, worst = max(known, key=scores.__getitem__), min(known, key=scores.__getitem__)
    return (best, worst) if scores[best] > scores[worst] else None


def dpo_loss(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    """- log sigmoid(beta (log-ratio of y+ - log-ratio of y-)): (B,) sums over tokens -> (B,).

    Sums, never means: a mean over tokens would be another method.
    """
    return -F.logsigmoid(beta * (chosen - rejected))


def balanced(judgements: list[dict]) -> list[dict]:
    """As many that name solution 1 as such that name solution 2: who always says 1 learns nothing
    of it (Self-Taught Evaluators, section 3).
    """
    of = [[j for j in judgements if j["choice"] == n] for n in (1, 2)]
    count = min(map(len, of))
    return of[0][:count] + of[1][:count]


def round_at(step: int, cfg: Args) -> tuple[int, bool]:
    """(the round, from 0 on; whether this step trains the judge)."""
    t, turn = divmod(step, cfg.steps // cfg.iterations)
    return t, cfg.train_judge == "self-taught" and turn < cfg.judge_steps


# ------------------------------------------------------------------ the trainer
class SelfRewarding(CoTrainer):
    """`step` is the loop of section 2, `loss` has both losses.

    `saved` holds the pairs and the judgements that the round trains on, the same on all processes.
    """

    def __init__(self, *inputs):
        super().__init__(*inputs)
        self.rows_per_step = self.cfg.questions * self.accelerator.num_processes
        self.saved = {"paired": -1, "pairs": [], "taught": -1, "judgements": []}

    @staticmethod
    def players(args: Args) -> dict[str, Player]:
        solution, judgement = args.solution_tokens, args.judgement_tokens
        return {
            "solver": Player([], args.lr, solution, adapter="agent", rows=2),
            "judge": Player([], args.lr, judgement, reads=2 * solution, adapter="agent"),
            "previous": Player([], 0.0, solution),  # M_t, frozen during its round
        }

    def step(self, rows):
        """rows: not used, data are made once per round."""
        now = self.state.global_step
        t, judging = round_at(now, self.cfg)
        if judging:
            if self.saved["taught"] < t:
                self.start_judging(t)
            some = in_passes(
                self.saved["judgements"], now * self.rows_per_step, self.rows_per_step, "j"
            )
            return [self.judgement_batch(some)]
        if self.saved["paired"] < t:
            self.start_round(t)
        some = in_passes(self.saved["pairs"], now * self.rows_per_step, self.rows_per_step, "p")
        return [self.preference_batch(self.my_share(some))]

    # --- data
    def start_round(self, t: int):
        """M_t answers, M_t scores, M_t is the reference."""
        self.start_afresh()
        asked = [row for row in self.pool(t) for _ in range(self.cfg.samples)]
        answers = self.in_parallel(self.answers, asked)
        readings = self.in_parallel(self.readings, answers)
        pairs, N = [], self.cfg.samples
        for i in range(0, len(answers), N):
            different, read = {}, {}  # by their texts: two that are alike make no pair
            for answer, scores in zip(answers[i : i + N], readings[i : i + N]):
                different.setdefault(answer["text"], answer)
                read.setdefault(answer["text"], []).extend(scores)
            scores = [mean_score(read[text]) for text in different]
            places = best_and_worst(scores)
            if places:
                chosen, rejected = ([*different.values()][k] for k in places)
                pairs.append({"question": chosen["question"], "chosen": chosen})
                pairs[-1] |= {"rejected": rejected, "scores": [scores[k] for k in places]}
        self.report_round(answers, readings, pairs)
        if not pairs:
            silent = mean([score is None for scores in readings for score in scores])
            raise UserError(
                f"round {t}: of no question do two different answers differ in score, so there is "
                f"nothing to prefer (a share of {silent:.2f} of the judgements could not be read); "
                f"--judgement-tokens {self.cfg.judgement_tokens} or --pool {self.cfg.pool} may be "
                f"too small."
            )
        self.saved |= {"paired": t, "pairs": pairs}

    def start_afresh(self):
        """The reference is the model as it is now, and Adam knows nothing."""
        copy_adapter(self.model, "agent", "previous")
        self.own_optimizer().state.clear()

    def pool(self, t: int) -> list[dict]:
        """The questions of a round: new ones, as long as there are any."""
        first = t * self.cfg.pool
        return [
            self.train_rows[i % len(self.train_rows)] for i in range(first, first + self.cfg.pool)
        ]

    def answers(self, rows: list[dict]) -> list[dict]:
        """One answer of each, as sampled: one cut at the length limit has no end token, and gets
        none.
        """
        prompts = [solve_prompt(row["question"]) for row in rows]
        ids = self.generate_ids("solver", prompts)
        texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        return [
            {
                "question": row["question"],
                "ids": list(map(int, one)),
                "text": text.strip(),
                # for the log alone; a changed question has no known answer
                "right": row["answer"] is not None and is_correct(text, row["answer"]),
            }
            for row, one, text in zip(rows, ids, texts)
        ]

    def readings(self, answers: list[dict]) -> list[list[float | None]]:
        """The scores that the judge gives to each answer, one by one."""
        R = self.cfg.readings
        asked = [score_prompt(a["question"], a["text"]) for a in answers for _ in range(R)]
        scores = [parse_score(text) for text in self.generate("judge", asked)]
        return [scores[i : i + R] for i in range(0, len(scores), R)]

    def start_judging(self, t: int):
        """Comparisons of an answer with one to another question, whose outcome is known."""
        self.start_afresh()
        rng = random.Random(f"{self.cfg.seed} {t}")
        rows = [row | {"changed": changed_question(rng, row["question"])} for row in self.pool(t)]
        rows = [row for row in rows if row["changed"]]
        good = self.in_parallel(self.answers, rows)
        bad = self.in_parallel(
            self.answers, [{"question": row["changed"], "answer": None} for row in rows]
        )
        compared = []
        for better, worse in zip(good, bad):
            said = [boxed(better["text"]), boxed(worse["text"])]
            if all(said) and said[0] != said[1]:
                for first, second, wanted in ((better, worse, 1), (worse, better, 2)):
                    shown = compare_prompt(better["question"], first["text"], second["text"])
                    compared.append({"prompt": shown, "wanted": wanted})
        judged = self.in_parallel(self.compare, compared)
        fine = [j["choice"] == j["wanted"] for j in judged]
        kept = balanced([j for j, preferred in zip(judged, fine) if preferred])
        if fine:
            self.log_mean("judge/prefers_the_own_question", fine)
        self.log_mean("judge/judgements", len(kept))
        if not kept:
            unread = sum(j["choice"] is None for j in judged)
            raise UserError(
                f"round {t}: of {len(judged)} comparisons {sum(fine)} prefer the answer to the "
                f"question itself, in one of the two orders none, so that the judge would learn a "
                f"place and nothing else; {unread} end in no choice, within --judgement-tokens "
                f"{self.cfg.judgement_tokens}; --pool {self.cfg.pool} may be too small."
            )
        rng.shuffle(kept)
        self.saved |= {"taught": t, "judgements": kept}

    def compare(self, rows: list[dict]) -> list[dict]:
        """Each row's prompt, answered: ids, and the choice."""
        ids = self.generate_ids("judge", [row["prompt"] for row in rows])
        texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        return [
            row | {"ids": list(map(int, one)), "choice": parse_choice(text)}
            for row, one, text in zip(rows, ids, texts)
        ]

    # --- batches
    def preference_batch(self, pairs: list[dict]) -> dict:
        batch = pair_batch(
            "solver",
            [solve_prompt(pair["question"]) for pair in pairs],
            [(pair["chosen"]["ids"], pair["rejected"]["ids"]) for pair in pairs],
            self.processing_class,
            self.accelerator.device,
        )
        batch["notes"] = [
            {
                "player": "solver",
                "prompt": pair["question"],
                "scores": pair["scores"],
                "right": [pair[who]["right"] for who in ("chosen", "rejected")],
            }
            for pair in pairs
        ]
        return batch

    def judgement_batch(self, everyones: list[dict]) -> dict:
        mine = self.my_share(everyones)
        prompts, ids = [row["prompt"] for row in mine], [row["ids"] for row in mine]
        batch = completion_batch(prompts, ids, self.processing_class, self.accelerator.device)
        batch["row"] = torch.arange(len(ids), device=self.accelerator.device)
        batch["tokens"] = torch.tensor(sum(len(row["ids"]) for row in everyones))
        batch["notes"] = [{"player": "judge", "prompt": p[-1]["content"]} for p in prompts]
        return batch | {"player": "judge"}

    # --- losses
    def loss(self, batch):
        """The share of a micro-batch: of pairs, a mean over the pairs of the step; of judgements, a
        mean over their tokens.
        """
        if batch["player"] == "judge":
            logp = self.score(batch)[0]  # (b, T)
            self.log_mean("judge/logp", logp.sum(1))
            self.report_judgements(batch, logp)
            return -logp.sum() / batch["tokens"]  # - log M(j) per token
        both = as_completions(batch)  # 2b rows: chosen, rejected, chosen, ...
        logp = self.score(both)[0]  # (2b, T), under M
        with torch.no_grad(), self.playing("previous"):  # in equal parts: ln 2 at a round's start
            ref = self.score(both)[0]  # (2b, T), under M_t
        log_ratio = logp - ref  # (2b, T), log of M / M_t token by token, 0 behind the end
        chosen, rejected = chosen_and_rejected(log_ratio.sum(1))  # (b,) each
        losses = dpo_loss(chosen, rejected, self.cfg.beta)  # (b,)
        self.report_pairs(batch, both, log_ratio, losses, chosen - rejected)
        return losses.sum() / self.rows_per_step

    # --- what is logged and shown; nothing below affects training
    def report_round(self, answers, readings, pairs):
        self.log_mean("solver/accuracy", [a["right"] for a in answers])
        self.log_mean("solver/length", [len(a["ids"]) for a in answers])
        self.log_mean("judge/unreadable", [s is None for read in readings for s in read])
        self.log_mean("co/pairs", len(pairs) / self.cfg.pool)
        if not pairs:
            return
        length_gap = [len(p["chosen"]["ids"]) - len(p["rejected"]["ids"]) for p in pairs]
        self.log_mean("co/length_gap", length_gap)
        told = [p for p in pairs if p["chosen"]["right"] != p["rejected"]["right"]]
        self.log_mean("co/pairs_one_right", len(told) / len(pairs))
        if told:
            self.log_mean("co/pairs_right_way", [p["chosen"]["right"] for p in told])

    def report_pairs(self, batch, both, log_ratio, losses, margin):
        self.log_mean("solver/pair_loss", losses)
        self.log_mean("solver/margin", margin)
        if 0 not in batch["row"]:
            return  # one micro-batch of the step is shown
        notes = [
            {
                "player": f"solver, {who}, {'right' if right else 'wrong'}",
                "prompt": note["prompt"],
                "rewards": {"own score": score, "margin": m},
                "credit": "log-ratio",
            }
            for note, m in zip(batch["notes"], margin.tolist())
            for who, score, right in zip(("chosen", "rejected"), note["scores"], note["right"])
        ]
        self.record(both | {"advantages": log_ratio.detach(), "notes": notes})

    def report_judgements(self, batch, logp):
        if 0 in batch["row"]:
            notes = [
                {**note, "rewards": {"log-likelihood": total}, "credit": "log-probability"}
                for note, total in zip(batch["notes"], logp.sum(1).tolist())
            ]
            self.record(batch | {"advantages": logp.detach(), "notes": notes})


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: SelfRewarding, held_out: list[dict]) -> dict[str, float]:
    """The solver on held-out questions, and of n answers the one that the judge scores highest; the
    judge on pairs of a right and a wrong answer: of the model as it is, and of the first model,
    which stay the same in all evaluations.
    """
    n = trainer.cfg.eval_samples
    _, greedy = solve(trainer, "solver", held_out, greedy=True)
    result = {"solver/greedy": mean(greedy)}
    answers = trainer.in_parallel(trainer.answers, [row for row in held_out for _ in range(n)])
    result["solver/accuracy"] = mean([a["right"] for a in answers])
    result["solver/length"] = mean([len(a["ids"]) for a in answers])
    means = [*map(place_of, trainer.in_parallel(trainer.readings, answers))]
    groups = [range(i, i + n) for i in range(0, len(answers), n)]
    best = [answers[max(group, key=means.__getitem__)]["right"] for group in groups]
    result[f"co/best_of_{n}"] = mean(best)
    told = [  # a right and a wrong answer of every question that has both
        [next(i for i in group if answers[i]["right"] is z) for z in (True, False)]
        for group in groups
        if len({answers[i]["right"] for i in group}) == 2
    ]
    if told:
        result["judge/own_pairs"] = mean([ranked(means[a], means[b]) for a, b in told])
    # step 0: the solver is the first model
    some = [[answers[a] | {"ids": []}, answers[b] | {"ids": []}] for a, b in told]
    bank = trainer.saved.setdefault("bank", some)
    return result | evaluate_judge(trainer, bank)


def evaluate_judge(trainer: SelfRewarding, bank: list) -> dict[str, float]:
    """bank: pairs of a right and a wrong answer.

    Returns:
        first_pairs: how often the right one has the higher score; equal ones count half.
        readings_right: share of single readings that give points to a right answer and none to a
            wrong one.
        first_compared: how often the right one is chosen, over both orders.
        both_orders: share of pairs in which it is chosen in both.
    """
    if not bank:
        return {}
    read = trainer.in_parallel(trainer.readings, [answer for pair in bank for answer in pair])
    means = [*map(place_of, read)]
    right = [s is not None and (s > 0) is (i % 2 == 0) for i, some in enumerate(read) for s in some]
    shown = [
        {
            "prompt": compare_prompt(good["question"], first["text"], second["text"]),
            "wanted": wanted,
        }
        for good, bad in bank
        for first, second, wanted in ((good, bad, 1), (bad, good, 2))
    ]
    chosen = [j["choice"] == j["wanted"] for j in trainer.in_parallel(trainer.compare, shown)]
    return {
        "judge/first_pairs": mean([ranked(*two) for two in zip(means[::2], means[1::2])]),
        "judge/readings_right": mean(right),
        "judge/first_compared": mean(chosen),
        "judge/both_orders": mean([a and b for a, b in zip(chosen[::2], chosen[1::2])]),
    }


def place_of(readings: list[float | None]) -> float:
    """The mean score, by which answers are ranked; what has none comes last."""
    score = mean_score(readings)
    return -1.0 if score is None else score


def ranked(good: float, bad: float) -> float:
    return float(good > bad) + 0.5 * (good == bad)


# ------------------------------------------------------------------ main
CURVES = {  # panels of curves.png and report.html; step lines show the first metric of each
    "solver": ["solver/accuracy", "solver/greedy", "co/best_of_4"],
    "judge": ["judge/own_pairs", "judge/first_pairs", "judge/first_compared"],
    "its pairs": ["co/pairs_right_way", "co/pairs_one_right", "co/pairs"],
    "tokens of an answer": ["solver/length"],
}


def load(args: Args):
    asked = args.pool * args.iterations
    return load_questions(args.dataset, asked, args.eval_questions, args.seed)


def main(args: Args):
    launch(SelfRewarding, args, load, evaluate, CURVES)


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
