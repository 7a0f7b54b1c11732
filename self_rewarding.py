r"""Self-Rewarding Language Models: one model answers, scores its own answers, and is trained to
prefer the answers with the higher score (Yuan et al. 2024, arXiv:2401.10020).

    python self_rewarding.py                              the small model on a CPU, 2 minutes
    python self_rewarding.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k
                                                          one GPU

The loop (section 2).  M_1 is the model as it is given; x are questions, y answers
    for t = 1 .. iterations                                              `step`, `start_round`
        ANSWER   M_t writes y_1 .. y_N to every question x of a new pool           `answers`
        JUDGE    s_i = mean of several scores of y_i, each sampled from M_t       `readings`
        PAIR     y+ = highest score, y- = lowest; no pair if they are equal        `pair_of`
        TRAIN    M_{t+1} = M_t trained by                                             `loss`
                 loss = - log sigmoid(r(x, y+) - r(x, y-)),
                 r(x, y) = beta log(M(y | x) / M_t(y | x))

The loss is on pairs, without a reward or an advantage. No right answer is used in training; the
data set's answers only measure how often the model prefers what is right. Nothing trains the judge.
It changes because solver and judge are the same model.

Our changes that matter (more in docs/self_rewarding.md)
    1. M_t is a LoRA adapter on one base. A second adapter is the reference, a copy that is made
       when a round begins. Adam starts every round with new moments.
    2. The model is not first fine-tuned on judgements. The small model was pretrained to judge;
       an instruction-tuned model of few parameters may be a poor judge.
    3. The score is half a point for a right answer and half a point if every step is right. The
       paper's score adds up five points.
    4. Questions come from a data set; the paper's model writes them. Answers are sampled at
       temperature 1 (paper: 0.7 and top-p 0.9). Answers with the same text count as one answer.

Shapes: B pairs, b of them in a micro-batch, T completion tokens, N answers to a question.
"""

from dataclasses import dataclass

from common.core.errors import UserError
from common.run.args import (
    Count,
    CountOrZero,
    RunArgs,
    Scale,
    Several,
    Tokens,
    TwoOrMore,
    Weight,
    parse,
    per_model,
)


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 72
    """optimiser steps of all rounds; must be a multiple of --iterations"""
    questions: Count = 32
    """pairs per step and process (paper: 16)"""
    micro_batch: Count = per_model(tiny=16, real=4)
    """pairs per forward and backward pass"""
    lr: Weight = per_model(tiny=3e-4, real=5e-6)
    """learning rate of the adapter, constant (paper: 1e-6 falling to 1e-7)"""
    iterations: Count = 3
    """rounds (paper: 2, which make M_2 and M_3)"""
    beta: Scale = 0.1
    """scale of the log-ratios (paper: 0.1)"""
    pool: Count = per_model(tiny=192, real=1024)
    """questions that are answered in every round"""
    samples: TwoOrMore = 4
    """N, answers to each question (paper: 4)"""
    readings: Several = 3
    """judgements whose mean is an answer's score (paper: 3)"""
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


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.batch import Batch, as_completions, chosen_and_rejected
from common.core.lists import chunk, mean
from common.core.model import copy_adapter
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import SOLVED, is_correct, prompt, solve, solve_prompt
from common.tasks.math import load_for_steps
from common.tasks.verdicts import WRONG, read_score

import torch
import torch.nn.functional as F

# ------------------------------------------------------------------ prompts and parsing
SCORE = """You are given a problem and a solution. Work the problem out, and compare the solution
with it. End with a line "Score:" and the score: half a point if the answer is right, and another
half if every step is. So it is 0, 0.5 or 1."""


def score_prompt(question: str, solution: str) -> list[dict]:
    return prompt(SCORE, to_grade(question, solution), GRADED)


def to_grade(question: str, solution: str) -> str:
    return f"Problem: {question}\nSolution:\n{solution}\nGrade it."


GRADED = [  # worked examples: a right solution and a wrong solution
    (
        to_grade(*SOLVED[0]),
        "3 boxes of 12 pens are 3*12 = 36 pens, 6+5 = 11 are given away, and 36-11 = 25 are left. "
        "The solution says 25, which is right.\nScore: 1",
    ),
    (
        to_grade(SOLVED[1][0], WRONG),
        "Half of 20 is 10 books, and 10*8 = 80 dollars come in. The solution says 18, because it "
        "adds 10 and 8.\nScore: 0",
    ),
]


def parse_score(text: str) -> float | None:
    r"""Returns the score at the end of a judgement. None, not 0, if it cannot be read.

    >>> parse_score("Defects: none\nScore: \\boxed{1}"), parse_score("Score: \\boxed{9}")
    (1.0, None)
    """
    return read_score(text, (0, 0.5, 1))


# ------------------------------------------------------------------ the paper's mathematics
def mean_score(readings: list[float | None]) -> float | None:
    """Returns the mean of the readings that could be parsed. It is None unless more than half of
    them could: a single lucky reading must not make an answer the best answer.
    """
    read = [score for score in readings if score is not None]
    return sum(read) / len(read) if 2 * len(read) > len(readings) else None


def best_and_worst(scores: list[float | None]) -> tuple[int, int] | None:
    """Returns the indices of the highest and the lowest score, of equal scores the first.

    None if fewer than two scores are known or all are equal: such a question teaches nothing.

    >>> best_and_worst([0.5, None, 1.0, 0.5, 1.0]), best_and_worst([0.5, 0.5, None])
    ((2, 0), None)
    """
    known = [i for i, score in enumerate(scores) if score is not None]
    if len(known) < 2:
        return None
    best, worst = max(known, key=scores.__getitem__), min(known, key=scores.__getitem__)
    return (best, worst) if scores[best] > scores[worst] else None


def pair_of(answers: list[dict], readings: list[list[float | None]]) -> dict | None:
    """Returns y+ and y- among the answers to one question, with their scores; None if there is no
    pair.

    Answers with the same text count as one answer, which has the readings of all of them: DPO has
    no gradient between a text and itself.
    """
    by_text, readings_by_text = {}, {}
    for answer, its_readings in zip(answers, readings):
        by_text.setdefault(answer["text"], answer)
        readings_by_text.setdefault(answer["text"], []).extend(its_readings)
    different = [*by_text.values()]
    scores = [mean_score(read) for read in readings_by_text.values()]
    indices = best_and_worst(scores)
    if indices is None:
        return None
    best, worst = indices
    return {
        "question": different[best]["question"],
        "chosen": different[best],
        "rejected": different[worst],
        "scores": [scores[best], scores[worst]],
    }


def dpo_loss(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    """Returns - log sigmoid(beta (log-ratio of y+ - log-ratio of y-)), a value for each pair.

    Args:
        chosen, rejected: (B,), log-ratios log(M / M_t) SUMMED over the tokens of y+ and y-. Means
            over tokens would make another method.

    Returns:
        (B,); ln 2 where M = M_t.
    """
    return -F.logsigmoid(beta * (chosen - rejected))


# ------------------------------------------------------------------ the trainer
class SelfRewarding(CoTrainer):
    """`step` is the loop of section 2, `loss` is the paper's.

    `saved` holds the number of the round and its pairs, the same on all processes.
    """

    def __init__(self, *inputs):
        super().__init__(*inputs)
        self.saved = {"round": -1, "pairs": []}

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        """Returns the players. One adapter plays solver and judge."""
        solution, judgement = args.solution_tokens, args.judgement_tokens
        return {
            "solver": Player([], args.lr, solution, adapter="agent", rows=2),
            "judge": Player([], args.lr, judgement, reads=solution, adapter="agent"),
            "previous": Player([], 0.0, solution),  # M_t, frozen during its round
        }

    def step(self, rows):
        """rows: not used; every round makes its own pairs, and its steps pass over them."""
        now = self.state.global_step
        t = now // (self.cfg.steps // self.cfg.iterations)  # the round, from 0 on
        if self.saved["round"] < t:
            self.start_round(t)
        pairs = self.from_epochs(self.saved["pairs"], now, "p")  # of all processes
        return [self.preference_batch(self.shard(pairs))]

    def start_round(self, t: int):
        """Has M_t answer and score its answers, and makes M_t the reference."""
        self.freeze_reference()
        N = self.cfg.samples
        rows = [row for row in self.pool(t) for _ in range(N)]
        answers = self.in_parallel(self.answers, rows)
        readings = self.in_parallel(self.readings, answers)
        pairs = [pair_of(*one) for one in zip(chunk(answers, N), chunk(readings, N))]
        pairs = [pair for pair in pairs if pair]
        self.report_round(answers, readings, pairs)
        if not pairs:
            unread = mean([score is None for scores in readings for score in scores])
            raise UserError(
                f"round {t}: no question has two different answers that differ in score, so there "
                f"is nothing to prefer (a share of {unread:.2f} of the judgements could not be "
                f"read); --judgement-tokens {self.cfg.judgement_tokens} or --pool {self.cfg.pool} "
                f"may be too small."
            )
        self.saved |= {"round": t, "pairs": pairs}

    def freeze_reference(self):
        """Makes the model as it is now the reference. Adam forgets its moments, because the loss
        changes with the reference.
        """
        copy_adapter(self.model, "agent", "previous")
        self.optimizer.state.clear()

    def pool(self, t: int) -> list[dict]:
        """Returns the questions of a round: new questions, and after the last the first again."""
        rows, first = self.train_rows, t * self.cfg.pool
        return [rows[i % len(rows)] for i in range(first, first + self.cfg.pool)]

    def answers(self, rows: list[dict]) -> list[dict]:
        """Samples one answer for each row. An answer that was cut at the length limit has no end
        token, and none is added.
        """
        ids = self.generate_ids("solver", [solve_prompt(row["question"]) for row in rows])
        texts = self.decode(ids)
        return [
            {
                "question": row["question"],
                "ids": list(map(int, token_ids)),
                "text": text.strip(),
                "right": is_correct(text, row["answer"]),  # for the log alone
            }
            for row, token_ids, text in zip(rows, ids, texts)
        ]

    def readings(self, answers: list[dict]) -> list[list[float | None]]:
        """Returns the scores that the judge gives to each answer, --readings of them."""
        R = self.cfg.readings
        prompts = [score_prompt(a["question"], a["text"]) for a in answers for _ in range(R)]
        return chunk([parse_score(text) for text in self.generate("judge", prompts)], R)

    def preference_batch(self, pairs: list[dict]) -> Batch:
        prompts = [solve_prompt(pair["question"]) for pair in pairs]
        both = [(pair["chosen"]["ids"], pair["rejected"]["ids"]) for pair in pairs]
        batch = self.pairs("solver", prompts, both)
        for note, pair in zip(batch.notes, pairs):
            note["scores"] = pair["scores"]
            note["right"] = [pair[which]["right"] for which in ("chosen", "rejected")]
        return batch

    def loss(self, batch):
        """Returns a micro-batch's share of the mean over the step's pairs, and what is shown."""
        both = as_completions(batch)  # 2b rows: chosen, rejected, chosen, ...
        logp, entropy = self.score(both)  # (2b, T), under M
        # scored in the same micro-batches as M, so that the loss is ln 2 when a round begins
        with torch.no_grad(), self.playing("previous"):
            ref = self.score(both)[0]  # (2b, T), under M_t
        log_ratio = logp - ref  # (2b, T), log(M / M_t) of every token, 0 after the end
        chosen, rejected = chosen_and_rejected(log_ratio.sum(1))  # (b,) each
        # loss = - log sigmoid(r(x, y+) - r(x, y-))
        losses = dpo_loss(chosen, rejected, self.cfg.beta)  # (b,)
        shown = {"entropy": entropy, "pair_loss": losses, "margin": chosen - rejected}
        return losses.sum() / self.questions_per_step, shown | {"credit": log_ratio}

    # --- what is logged and shown; no method below affects training
    def report_round(self, answers, readings, pairs):
        self.log_mean("solver/accuracy", [a["right"] for a in answers])
        self.log_mean("solver/length", [len(a["ids"]) for a in answers])
        self.log_mean("judge/unreadable", [s is None for scores in readings for s in scores])
        self.log_mean("co/pairs", len(pairs) / self.cfg.pool)
        if not pairs:
            return
        length_gap = [len(p["chosen"]["ids"]) - len(p["rejected"]["ids"]) for p in pairs]
        self.log_mean("co/length_gap", length_gap)
        one_right = [p for p in pairs if p["chosen"]["right"] != p["rejected"]["right"]]
        self.log_mean("co/pairs_one_right", len(one_right) / len(pairs))
        self.log_mean("co/pairs_right_way", [p["chosen"]["right"] for p in one_right])

    def show_loss(self, batch, shown):
        super().show_loss(batch, shown)
        if 0 not in batch.row:
            return  # one micro-batch of the step is shown
        notes = [
            {
                "player": f"solver, {which}, {'right' if right else 'wrong'}",
                "prompt": note["prompt"],
                "rewards": {"own score": score, "margin": m},
                "credit": "log-ratio",
            }
            for note, m in zip(batch.notes, shown["margin"].tolist())
            for which, score, right in zip(("chosen", "rejected"), note["scores"], note["right"])
        ]
        self.record(as_completions(batch), shown["credit"], notes)


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: SelfRewarding, held_out: list[dict]) -> dict[str, float]:
    """Measures the solver alone; the solver with the judge, who picks one of n answers; and the
    judge, on a right and a wrong answer to the same question.

    The judge sees two sets of such pairs. The model as it is now writes the first set. The model
    of step 0 has written the second set, which is the same in all evaluations.
    """
    n = trainer.cfg.eval_samples
    _, greedy = solve(trainer, "solver", held_out, greedy=True)
    answers = trainer.in_parallel(trainer.answers, [row for row in held_out for _ in range(n)])
    scores = [rank_score(read) for read in trainer.in_parallel(trainer.readings, answers)]
    picked, pairs = [], []  # pairs: indices of a right and a wrong answer to one question
    for group in chunk([*range(len(answers))], n):
        picked.append(answers[max(group, key=scores.__getitem__)]["right"])
        right = [i for i in group if answers[i]["right"]]
        wrong = [i for i in group if not answers[i]["right"]]
        pairs += zip(right[:1], wrong[:1])
    result = {
        "solver/greedy": mean(greedy),
        "solver/accuracy": mean([a["right"] for a in answers]),
        "solver/length": mean([len(a["ids"]) for a in answers]),
        f"co/best_of_{n}": mean(picked),
    }
    if pairs:
        result["judge/own_pairs"] = mean([ranked(scores[i], scores[j]) for i, j in pairs])
    first_pairs = [[answers[i] | {"ids": []}, answers[j] | {"ids": []}] for i, j in pairs]
    bank = trainer.saved.setdefault("bank", first_pairs)  # at step 0 the solver is the first model
    return result | evaluate_judge(trainer, bank)


def evaluate_judge(trainer: SelfRewarding, bank: list) -> dict[str, float]:
    """bank: pairs of a right and a wrong answer.

    Returns:
        first_pairs: how often the right answer has the higher score; equal scores count half.
        readings_right: share of single readings that are above 0 for a right answer, or 0 for a
            wrong answer.
    """
    if not bank:
        return {}
    readings = trainer.in_parallel(trainer.readings, [answer for pair in bank for answer in pair])
    scores = [rank_score(read) for read in readings]
    of_right, of_wrong = readings[::2], readings[1::2]
    hits = [s is not None and s > 0 for read in of_right for s in read]
    hits += [s == 0 for read in of_wrong for s in read]
    return {
        "judge/first_pairs": mean([ranked(*two) for two in zip(scores[::2], scores[1::2])]),
        "judge/readings_right": mean(hits),
    }


def rank_score(readings: list[float | None]) -> float:
    """Returns the score by which answers are ranked; an answer without a score comes last."""
    score = mean_score(readings)
    return -1.0 if score is None else score


def ranked(right: float, wrong: float) -> float:
    return float(right > wrong) + 0.5 * (right == wrong)


# ------------------------------------------------------------------ main
CURVES = {
    "solver": ["solver/accuracy", "solver/greedy", "co/best_of_4"],
    "judge": ["judge/own_pairs", "judge/first_pairs", "judge/readings_right"],
    "its pairs": ["co/pairs_right_way", "co/pairs_one_right", "co/pairs"],
    "tokens of an answer": ["solver/length"],
}


def load(args: Args):
    return load_for_steps(args, args.pool * args.iterations)


def main(args: Args):
    launch(SelfRewarding, args, load=load, evaluate=evaluate, curves=CURVES)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
