r"""GenRM, a generative verifier: a language model says whether a solution is right, and learns this
by predicting the next token, as it learns all else (Zhang et al. 2024, arXiv:2408.15240).

    python genrm.py                                       the small model on a CPU, 2 minutes
    python genrm.py --verifier direct                     Yes or No without a rationale
    python genrm.py --solve-weight 0                      ablation: without the solving loss
    python genrm.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU

The loop. The generator G is fixed: it is the base, without any adapter
    SAMPLE = `collect`             G writes k solutions y of every question x, and z = [y is right]
                                   D_verify: as many right as wrong y;  D_correct: right y only
    RATIONALES = `with_rationales` cot: V writes a rationale of each y, kept if its verdict is z
    VERIFIER = `step`              loss = L(D_verify) + lambda L(D_correct)
                                   L = - mean of log V(token), over the tokens of verdicts and
                                   rationales in L(D_verify), of solutions in L(D_correct)
    TEST = `evaluate`              takes the solution with the highest score of N solutions by G:
        direct                     p = V(Yes | x, y, "Is it right?")
        cot                        p = mean over K rationales c, sampled from V, of
                                   V(CORRECT | x, y, c)

Solving and verifying are the same task here, predicting the next token, and solving is meant to
help verifying. The verifier sees no reference solution, neither in training nor at test time.

Our changes that matter (more in docs/genrm.md)
    1. The verifier is a LoRA adapter on the base, trained for a fixed number of steps.
    2. The verifier writes its own rationales. The paper's rationales were written by a model that
       saw the reference solution.
    3. p is normalised over both verdicts, and over the forms in which a tokenizer may write them.
    4. A rationale checks every step and ends in CORRECT or INCORRECT, in place of Yes or No. The
       small model was pretrained to check so, and a real model is told how.

Shapes: B rows, b of them in a micro-batch, T completion tokens, N solutions of a question.
"""

import random
from dataclasses import dataclass
from typing import Literal

from common.run.args import Count, CountOrZero, RunArgs, Several, Tokens, Weight, parse, per_model


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 48
    """optimiser steps"""
    questions: Count = 16
    """verdicts per step and process, and as many solutions (paper: 64 of both together)"""
    micro_batch: Count = per_model(tiny=32, real=4)
    """rows per forward and backward pass"""
    lr: Weight = per_model(tiny=3e-4, real=2e-5)
    """learning rate of the verifier's adapter, constant"""
    verifier: Literal["cot", "direct"] = "cot"
    """whether the verifier writes a rationale before its verdict (cot) or not (direct)"""
    rationales: Several = 4
    """K, for --verifier cot: a score is the mean over K rationales (paper: 32)"""
    solve_weight: Weight = 0.25
    """lambda, weight of the solving loss (paper: 1/4 on GSM8K, 1/3 on algorithmic tasks); ablation:
    0, verification alone"""
    pool: Count = per_model(tiny=192, real=1024)
    """questions that the generator answers for training"""
    samples: Several = per_model(tiny=8, real=16)
    """k, solutions of each of these questions"""
    candidates: Several = per_model(tiny=8, real=16)
    """N, solutions of each held-out question that are ranked (paper: 16)"""
    eval_every: CountOrZero = 0
    """steps between evaluations on held-out questions; 0 = only first and last"""
    eval_questions: Count = per_model(tiny=128, real=64)
    """held-out questions"""
    solution_tokens: Tokens = per_model(tiny=80, real=512)
    """length limit of a solution"""
    judgement_tokens: Tokens = per_model(tiny=112, real=512)
    """length limit of a rationale"""


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.batch import Batch
from common.core.errors import UserError
from common.core.lists import chunk, mean
from common.core.model import special_tokens
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import SOLVED, prompt, solutions_to_teach, solve, solve_prompt
from common.tasks.math import load_for_steps
from common.tasks.ranking import ranking_figures
from common.tasks.verdicts import WRONG, read_verdict, verify_prompt

import torch

YES, NO = ("Yes", " Yes", "yes"), ("No", " No", "no")  # the first form is taught, all are read
VERDICTS = (r"\boxed{CORRECT}", r"\boxed{INCORRECT}")
OPENING, CLOSING = "<final_verification>", "</final_verification>"

# ------------------------------------------------------------------ prompts and parsing
ASK = "You are given a problem and a solution. Is its answer right? Say Yes or No, nothing else."


def ask_prompt(question: str, solution: str) -> list[dict]:
    return prompt(ASK, to_ask(question, solution), ASKED)


def to_ask(question: str, solution: str) -> str:
    return f"Problem: {question}\nSolution:\n{solution}\nIs it right?"


ASKED = [(to_ask(*SOLVED[0]), YES[0]), (to_ask(SOLVED[1][0], WRONG), NO[0])]  # worked examples


def rationale(text: str) -> tuple[str, bool] | None:
    r"""(a judgement up to its final verdict, whether the verdict is CORRECT), or None without it.

    >>> rationale(r"3*2=6 <final_verification>\boxed{INCORRECT}</final_verification>")
    ('3*2=6 <final_verification>', False)
    """
    thoughts, opening, rest = text.rpartition(OPENING)
    verdict = read_verdict(rest.partition(CLOSING)[0], ("CORRECT", "INCORRECT"))
    if not opening or verdict is None:
        return None
    return thoughts + opening, verdict == "CORRECT"


# ------------------------------------------------------------------ the paper's mathematics
def row_weights(verify: list[int], solve: list[int], solve_weight: float) -> list[float]:
    """Each row's factor in the loss, first for the verdicts, then for the solutions.

    Every mean is over its own tokens: solutions would drown a verdict, which may be one token.

    Args:
        verify, solve: tokens of each row, of all processes.
        solve_weight: lambda.

    >>> row_weights([2, 2], [10, 6], solve_weight=0.25)
    [0.25, 0.25, 0.015625, 0.015625]
    """
    # loss = - SUM of log V(verdicts) / their tokens - lambda SUM of log V(solutions) / their tokens
    weights = [1 / sum(verify)] * len(verify)
    return weights + [solve_weight / max(1, sum(solve))] * len(solve)


def p_yes(logps: torch.Tensor) -> torch.Tensor:
    """(B, 2, forms) log-probs of yes and no -> (B,): p(yes) / (p(yes) + p(no)), where p is a sum
    over forms. Probability on other words must not count, because an untrained verifier puts most
    of it there.
    """
    return logps.logsumexp(2).softmax(1)[:, 0]


def balanced(rows: list[dict], rng: random.Random) -> list[dict]:
    """As many right as wrong solutions, all of the rarer kind, in random order. Otherwise it would
    be good always to give the more frequent verdict.
    """
    right = [row for row in rows if row["right"]]
    wrong = [row for row in rows if not row["right"]]
    count = min(len(right), len(wrong))
    chosen = rng.sample(right, count) + rng.sample(wrong, count)
    rng.shuffle(chosen)
    return chosen


# ------------------------------------------------------------------ the trainer
class GenRM(CoTrainer):
    """`step` trains the verifier. `saved` is the same on all processes and holds D_verify and
    D_correct: rows {question, solution, right, well_formed}, for cot with a rationale in D_verify.
    """

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        solution, judgement = args.solution_tokens, args.judgement_tokens
        return {
            "verifier": Player([], args.lr, judgement, reads=solution),
            # it samples with all adapters off, see `sample_solutions`, and needs none of its own
            "generator": Player([], args.lr, solution, adapter="verifier"),
        }

    def step(self, rows):
        """One batch of both kinds. rows: not used, because solutions are sampled only once."""
        if not self.saved:
            self.collect()
        now = self.state.global_step
        judged = self.from_epochs(self.saved["D_verify"], now, "verify")
        lessons, solutions = [self.lesson(row) for row in judged], []
        if self.cfg.solve_weight > 0:
            right = self.from_epochs(self.saved["D_correct"], now, "solve")
            solutions = [(solve_prompt(row["question"]), row["solution"]) for row in right]
        return [self.batch_of(lessons, solutions)]

    def batch_of(self, lessons: list[tuple], solutions: list[tuple]) -> Batch:
        """The batch of this process's share of (prompt, text) pairs of all processes."""
        ids = [self.encode(text) for _, text in lessons + solutions]
        lengths, count = [len(row) for row in ids], len(lessons)
        weights = row_weights(lengths[:count], lengths[count:], self.cfg.solve_weight)
        prompts = [messages for messages, _ in lessons + solutions]
        solves = [i >= count for i in range(len(ids))]
        rows = self.shard(list(zip(prompts, ids, weights, solves)))
        prompts, ids, weights, solves = map(list, zip(*rows))
        batch = self.completions("verifier", prompts, ids)
        batch.extras["weight"] = torch.tensor(weights).to(batch.row.device)  # (B,)
        batch.extras["solves"] = torch.tensor(solves).to(batch.row.device)  # (B,)
        return batch

    def loss(self, batch):
        """A micro-batch's share of L(D_verify) + lambda L(D_correct)."""
        logp, _ = self.score(batch)  # (b, T)
        likelihood = logp.sum(1)  # (b,)
        tokens, solves = batch.completion_mask.bool(), batch.extras["solves"][:, None]
        shown = {"verify_loss": -logp[tokens & ~solves], "solve_loss": -logp[tokens & solves]}
        return -(likelihood * batch.extras["weight"]).sum(), shown | {"credit": logp}

    # --- data
    def collect(self):
        """Samples from the base, once, and makes D_correct and D_verify of the solutions."""
        cfg, rng = self.cfg, random.Random(self.cfg.seed)
        questions = [row for row in self.train_rows for _ in range(cfg.samples)]
        solutions = self.in_parallel(self.sample_solutions, questions)
        # a solution without steps or an answer would teach the verifier to look at the form
        well_formed = [row for row in solutions if row["well_formed"]]
        lessons = balanced(well_formed, rng)
        if cfg.verifier == "cot":
            lessons = balanced(self.with_rationales(lessons), rng)
        if not lessons:
            count = sum(row["right"] for row in well_formed)
            kept = " with a rationale that agrees" if cfg.verifier == "cot" else ""
            raise UserError(
                f"{count} of {len(well_formed)} solutions are right: the verifier needs right and "
                f"wrong ones{kept}; try a larger --pool (now {cfg.pool}) or --samples (now "
                f"{cfg.samples})."
            )
        # a solution is learnt once, however often it is written
        right = {(row["question"], row["solution"]): row for row in well_formed if row["right"]}
        self.saved = {"D_verify": lessons, "D_correct": [*right.values()]}
        self.log_mean("generator/accuracy", [row["right"] for row in solutions])
        self.log_mean("co/lessons", len(lessons))
        self.log_mean("co/right_solutions", len(right))

    def sample_solutions(self, rows: list[dict]) -> list[dict]:
        with self.playing(None):  # the base, with all adapters off
            return solutions_to_teach(self, "generator", rows)

    def with_rationales(self, rows: list[dict]) -> list[dict]:
        """One rationale of each solution, kept if its verdict agrees with the answer."""
        prompts = [verify_prompt(row["question"], row["solution"]) for row in rows]
        texts, kept = self.generate_all("verifier", prompts), []
        special = special_tokens(self.processing_class)
        for row, text in zip(rows, texts):
            judged = rationale(text)
            if judged and judged[1] is row["right"] and not any(s in text for s in special):
                kept.append(row | {"rationale": judged[0]})
        self.log_mean("verifier/rationales_kept", len(kept) / max(1, len(rows)))
        return kept

    def lesson(self, row: dict) -> tuple[list[dict], str]:
        """(prompt, what the verifier is to write)"""
        if self.cfg.verifier == "direct":
            forms = YES if row["right"] else NO
            return ask_prompt(row["question"], row["solution"]), forms[0]
        verdict = VERDICTS[0] if row["right"] else VERDICTS[1]
        text = row["rationale"] + verdict + CLOSING
        return verify_prompt(row["question"], row["solution"]), text

    # --- scores
    def scores(self, rows: list[dict]) -> list[float]:
        """p of each row's solution, by the present verifier."""
        if self.cfg.verifier == "direct":
            prompts = [ask_prompt(row["question"], row["solution"]) for row in rows]
            return self.p_after([(messages, "") for messages in prompts], YES, NO)
        # p = mean over K rationales: a single rationale may be mistaken, and sampling shows doubt
        K = self.cfg.rationales
        prompts = [verify_prompt(r["question"], r["solution"]) for r in rows for _ in range(K)]
        judged = [rationale(text) for text in self.generate("verifier", prompts)]
        readable = [(messages, read[0]) for messages, read in zip(prompts, judged) if read]
        right, wrong = ((verdict + CLOSING,) for verdict in VERDICTS)
        p = iter(self.p_after(readable, right, wrong))
        # a rationale without a verdict speaks neither for the solution nor against it
        values = [next(p) if read else 0.5 for read in judged]
        return [mean(group) for group in chunk(values, K)]

    def p_after(self, prefix: list[tuple], yes: tuple, no: tuple) -> list[float]:
        """p(yes) after each (prompt, text). yes, no: the forms that either word may take.

        Text and form are encoded as one string, as they were taught: many tokenizers merge
        characters across the boundary.
        """
        if not prefix:
            return []
        forms = [*yes, *no]
        prompts = [messages for messages, _ in prefix for _ in forms]
        ids = [self.encode(text + form, ended=False) for _, text in prefix for form in forms]
        batch = self.completions("verifier", prompts, ids)
        logps = self.log_probs("verifier", batch).sum(1)  # (B * 2 * forms,), sums over tokens
        return p_yes(logps.reshape(len(prefix), 2, -1)).tolist()

    # --- what is logged and shown; no method below affects training
    def show_loss(self, batch, shown):
        super().show_loss(batch, shown)
        logp = shown["credit"]
        self.record_part(batch, logp, "log-likelihood", logp.sum(1))


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: GenRM, held_out: list[dict]) -> dict[str, float]:
    """Ranks N solutions of every held-out question by the verifier. They are by the fixed generator
    and the same in every evaluation. Also says how many questions the verifier itself solves.
    """
    N = trainer.cfg.candidates
    repeated = [row for row in held_out for _ in range(N)]
    solutions = trainer.in_parallel(trainer.sample_solutions, repeated)
    scores = trainer.in_parallel(trainer.scores, solutions)
    figures = ranking_figures(solutions, scores, N)
    for name, z in (("right", True), ("wrong", False)):
        values = [p for p, row in zip(scores, solutions) if row["right"] is z]
        if values:
            figures[f"verifier/p_of_{name}"] = mean(values)
    _, solved = solve(trainer, "verifier", held_out, greedy=True)
    return figures | {"verifier/greedy": mean(solved)}


# ------------------------------------------------------------------ main
CURVES = {
    "loss": ["verifier/verify_loss", "verifier/solve_loss"],
    "verifier": ["verifier/rank_agreement", "verifier/p_of_right", "verifier/p_of_wrong"],
    "best of several": ["co/majority", "co/oracle"],
}


def load(args: Args):
    return load_for_steps(args, args.pool)


def main(args: Args):
    launch(GenRM, args, load=load, evaluate=evaluate, curves=CURVES)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
