r"""V-STaR: a generator learns from its right solutions, a verifier learns from right and wrong
solutions, and the verifier picks the best of many (Hosseini et al. 2024, arXiv:2402.06457).

    python vstar.py                                       the small model on a CPU, 2 minutes
    python vstar.py --verifier orm                        the paper's baseline on the same solutions
    python vstar.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU

The loop (algorithm 1)
    for t = 1 .. iterations
        SAMPLE = `start_iteration`    G writes k solutions y of every question x; z = y is right
                                      D_gen += the right y,  D_ver += all y;  G <- the base again
        GENERATOR = `generator_step`  loss = - mean of log G(y | x) per token, y from D_gen
    LESSONS = `start_verifier`        pairs (y+, y-) of one question, from D_ver
    VERIFIER = `verifier_step`        loss = - log sigmoid(r(y+) - r(y-)),  r = beta log(V / G_sft)
    TEST = `evaluate`                 G writes N solutions, V picks y with the highest log V(y | x)

There are no rewards. Without --verifier-in-loop the generator never hears of the verifier: the data
grow, and a verifier is trained on them at the end. So other verifiers can be trained on the very
same solutions:
    --verifier orm    outcomes: p = sigmoid of a logit after y,  loss = BCE of p and z
    --verifier prm    steps: the same after every step; z says whether a solution that G completes
                      from this step is right (Math-Shepherd, Wang et al. 2023, arXiv:2312.08935)

Our changes that matter (more in docs/vstar.md)
    1. Generator and verifier are LoRA adapters on one base, which is G_sft: the model as it is
       given. In the paper D_gen and D_ver begin with the texts on which G_sft was fine-tuned. Ours
       begin empty.
    2. The script counts optimiser steps and not epochs, so that iterations are equally long.
    3. orm and prm have no head: their logit is log p("+") - log p("-") of the next token.
       Math-Shepherd reads its scores in the same way.

Shapes: B lessons, b of them in a micro-batch, T completion tokens, N solutions of a question.
"""

import random
from dataclasses import dataclass
from typing import Literal

from common.core.errors import UserError
from common.run.args import (
    Count,
    CountOrZero,
    RunArgs,
    Scale,
    Several,
    Tokens,
    Weight,
    parse,
    per_model,
)


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 96
    """optimiser steps: the generator's in all iterations, then the verifier's"""
    ver_steps: CountOrZero = 48
    """how many of the steps are the verifier's; the rest must be a multiple of --iterations"""
    questions: Count = 32
    """solutions, or pairs of them, per step and process"""
    micro_batch: Count = per_model(tiny=16, real=4)
    """rows or pairs per forward and backward pass"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the generator's adapter, constant"""
    ver_lr: Weight = per_model(tiny=3e-4, real=2e-5)
    """learning rate of the verifier's adapter, constant"""
    iterations: Count = 3
    """T, rounds of sampling (paper: 3)"""
    pool: Count = per_model(tiny=192, real=1024)
    """questions that are sampled from in every iteration (paper: all of GSM8K)"""
    samples: Several = per_model(tiny=8, real=16)
    """k, solutions of each question and iteration (paper: 16)"""
    restart: bool = True
    """every iteration trains the first model anew; ablation: it continues the last generator"""
    verifier: Literal["dpo", "orm", "prm"] = "dpo"
    """the paper's verifier, its baseline, or a verifier of steps; without --verifier-in-loop the
    generator is the same with all of them"""
    beta: Scale = 0.1
    """for --verifier dpo: scale of the log-ratios"""
    step_samples: Several = 4
    """for --verifier prm: completions from the end of a step (Math-Shepherd: 8)"""
    step_labels: Literal["hard", "soft"] = "hard"
    """for --verifier prm: whether any of the completions is right, or the share that is"""
    verifier_in_loop: bool = False
    """ablation: the verifier is trained in every iteration, and of the right solutions only the
    half that it scores best joins D_gen"""
    eval_every: CountOrZero = 0
    """steps between evaluations on held-out questions; 0 = only first and last"""
    candidates: Several = 16
    """N, solutions of each held-out question that are ranked (paper: 128)"""
    solution_tokens: Tokens = per_model(tiny=80, real=512)
    """length limit of a solution"""

    def check(self):
        own = self.steps - self.ver_steps
        if own < 0 or own % self.iterations:
            raise UserError(
                f"--steps {self.steps} minus --ver-steps {self.ver_steps} leaves the generator "
                f"{own}, which is not a multiple of --iterations {self.iterations}."
            )
        if self.verifier_in_loop and (self.ver_steps % self.iterations or not self.ver_steps):
            raise UserError(
                f"--ver-steps {self.ver_steps} must be a multiple of --iterations "
                f"{self.iterations} above 0, as --verifier-in-loop needs it."
            )


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.batch import Batch, as_completions, chosen_and_rejected
from common.core.lists import chunk, mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import beginnings, is_correct, solutions_to_teach, solve, solve_prompt
from common.tasks.math import load_for_steps
from common.tasks.ranking import ranking_figures

import torch
import torch.nn.functional as F

GOOD, BAD = "+", "-"  # the tokens whose difference is the logit of orm and prm


# ------------------------------------------------------------------ the paper's mathematics
def dpo_loss(chosen, ref_chosen, rejected, ref_rejected, beta: float) -> torch.Tensor:
    """(B,) log-probs of y+ and y-, under V and under the reference G_sft -> (B,) losses.

    The log-probs are sums over tokens, never means: the score at test time is a sum, and a mean
    would train another ranking.
    """
    # loss = - log sigmoid(r(y+) - r(y-)),   r(y) = beta (log V(y | x) - log G_sft(y | x))
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))


def verdict_loss(logit: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """(B,) logits and (B,) labels in [0, 1], hard or soft -> (B,) losses."""
    # loss = - z log p - (1 - z) log(1 - p),   p = sigmoid(logit)
    return -(z * F.logsigmoid(logit) + (1 - z) * F.logsigmoid(-logit))


# ------------------------------------------------------------------ the trainer
class VStar(CoTrainer):
    """`step` is algorithm 1. `saved` holds, the same on all processes, D_gen and D_ver, rows
    {question, solution, right, answer, iteration}, and the lessons that the verifier is taught.
    """

    def __init__(self, *inputs):
        super().__init__(*inputs)
        self.saved = {"iteration": -1, "D_gen": [], "D_ver": [], "lessons": [], "taught": -1}

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        prefix = args.solution_tokens if args.verifier == "prm" else 0  # see `step_labels`
        return {
            "generator": Player([], args.lr, args.solution_tokens, reads=prefix),
            "verifier": Player([], args.ver_lr, args.solution_tokens, rows=2),
        }

    def step(self, rows):
        """rows: not used, solutions are sampled once per iteration."""
        player, t = player_at(self.state.global_step, self.cfg)
        if self.saved["iteration"] < t:
            self.start_iteration(t)
        if player == "generator":
            return [self.generator_step()]
        if self.saved["taught"] < t:
            self.start_verifier(t)
        return [self.verifier_step()]

    def generator_step(self) -> Batch:
        """Returns the next solutions of D_gen."""
        rows = self.from_epochs(self.saved["D_gen"], self.state.global_step, "G")
        tokens = sum(len(self.encode(row["solution"])) for row in rows)  # of all processes
        mine = self.shard(rows)  # B
        prompts = [solve_prompt(row["question"]) for row in mine]
        batch = self.completions("generator", prompts, [self.encode(r["solution"]) for r in mine])
        weight = torch.full_like(batch.row, 1 / tokens, dtype=torch.float32)  # (B,)
        batch.extras["weight"] = weight
        return batch

    def verifier_step(self) -> Batch:
        """Returns the next lessons as pairs: y+ and y-, or the two verdicts after the same text."""
        lessons = self.from_epochs(self.saved["lessons"], self.state.global_step, "V")
        mine = self.shard(lessons)  # B
        prompts = [solve_prompt(row["question"]) for row in mine]
        if self.cfg.verifier == "dpo":
            pairs = [(self.encode(r["solution"]), self.encode(r["rejected"])) for r in mine]
        else:
            pairs = [self.with_verdicts(row["part"]) for row in mine]
        batch = self.pairs("verifier", prompts, pairs)
        batch.extras["z"] = torch.tensor([row["z"] for row in mine]).to(batch.row.device)  # (B,)
        for note, row in zip(batch.notes, mine):
            note["z"] = row["z"]
        return batch

    def loss(self, batch):
        """Returns a micro-batch's share of the mean over the step's tokens (generator) or pairs
        (verifier), and what is shown.
        """
        if batch.player == "generator":
            logp, _ = self.score(batch)  # (b, T)
            likelihood = logp.sum(1)  # (b,)
            # loss = - SUM over rows of log G(y | x) / number of tokens
            loss = -(likelihood * batch.extras["weight"]).sum()
            return loss, {"logp": likelihood, "credit": logp}
        both = as_completions(batch)  # 2b rows: y+ or good, y- or bad, ...
        logp, _ = self.score(both)  # (2b, T)
        first, second = chosen_and_rejected(logp.sum(1))  # (b,) each
        if self.cfg.verifier == "dpo":
            with torch.no_grad(), self.playing(None):  # G_sft is the base
                ref, _ = self.score(both)  # (2b, T)
            ref_first, ref_second = chosen_and_rejected(ref.sum(1))  # (b,) each
            losses = dpo_loss(first, ref_first, second, ref_second, self.cfg.beta)  # (b,)
            margin = (first - ref_first) - (second - ref_second)  # (b,)
        else:
            # a pair differs in its last token only, so that all else cancels out
            margin = first - second  # (b,): the logit, log p("+") - log p("-")
            losses = verdict_loss(margin, batch.extras["z"])  # (b,)
        shown = {"pair_loss": losses, "margin": margin, "credit": logp}
        shown["pair_accuracy"] = (margin > 0) == (batch.extras["z"] > 0.5)
        return losses.sum() / self.questions_per_step, shown

    def show_loss(self, batch, shown):
        super().show_loss(batch, shown)
        if batch.player == "generator":
            self.record_part(batch, shown["credit"], "log-likelihood", shown["logp"])
        else:
            sides = ["right", "wrong"] if self.cfg.verifier == "dpo" else [GOOD, BAD]
            self.record_part(batch, shown["credit"], "margin", shown["margin"], sides)

    # --- what the generator learns
    def start_iteration(self, t: int):
        """Samples by the generator, adds to D_gen and D_ver, and then restarts the generator."""
        cfg = self.cfg
        questions = [row for row in self.train_rows for _ in range(cfg.samples)]
        solutions = self.in_parallel(self.sample_solutions, questions)
        # a solution without steps or an answer would teach the verifier to look at the form
        new = [row | {"iteration": t} for row in solutions if row["well_formed"]]
        right = [row for row in new if row["right"]]
        if cfg.verifier_in_loop and t > 0:
            right = self.better_half(right)
        known = {(row["question"], row["solution"]) for row in self.saved["D_gen"]}
        for row in right:  # a solution is learnt once, however often it is written
            if (row["question"], row["solution"]) not in known:
                known.add((row["question"], row["solution"]))
                self.saved["D_gen"].append(row)
        if not self.saved["D_gen"]:
            raise UserError(
                f"iteration {t}: {len(new)} of {len(solutions)} solutions have steps, a box and "
                f"an end, and none is right; try a larger --samples (now {cfg.samples}) or --pool "
                f"(now {cfg.pool})."
            )
        self.saved["D_ver"] += new
        self.saved["iteration"] = t
        if cfg.restart:  # after sampling, which is the last generator's
            self.restart("generator")
        self.log_mean("generator/accuracy", [row["right"] for row in solutions])
        self.log_mean("co/right_solutions", len(self.saved["D_gen"]))
        self.log_mean("co/all_solutions", len(self.saved["D_ver"]))

    def sample_solutions(self, rows: list[dict]) -> list[dict]:
        return solutions_to_teach(self, "generator", rows)

    def better_half(self, right: list[dict]) -> list[dict]:
        """Returns the half of each question's right solutions that the verifier scores best."""
        scores = self.in_parallel(self.scores, right)
        ranked = {row["question"]: [] for row in right}  # of each question, the best first
        for _, row in sorted(zip(scores, right), key=lambda pair: -pair[0]):
            ranked[row["question"]].append(row)
        return [row for group in ranked.values() for row in group[: (len(group) + 1) // 2]]

    # --- what the verifier learns
    def start_verifier(self, t: int):
        """Makes the lessons from the solutions of ALL iterations: the last generator makes fewer
        kinds of mistakes.
        """
        rng = random.Random(f"{self.cfg.seed} {t}")
        right = [row for row in self.saved["D_ver"] if row["right"]]
        wrong = [row for row in self.saved["D_ver"] if not row["right"]]
        if not (right and wrong):
            one = "right" if right else "wrong"
            raise UserError(f"all solutions are {one}: there is nothing to tell apart.")
        count = min(len(right), len(wrong))
        balanced = rng.sample(right, count) + rng.sample(wrong, count)
        rng.shuffle(balanced)
        if self.cfg.verifier == "dpo":
            lessons = self.preferences(rng)
        else:
            lessons = self.judged_parts(balanced)
        if not lessons:
            raise UserError(
                "no question has a right and a wrong solution, as --verifier dpo needs."
            )
        self.saved["lessons"], self.saved["taught"] = lessons, t

    def preferences(self, rng: random.Random) -> list[dict]:
        """Pairs every right solution with one wrong solution of the same question, at random."""
        wrong = {}
        for row in self.saved["D_ver"]:
            if not row["right"]:
                wrong.setdefault(row["question"], []).append(row["solution"])
        return [
            row | {"rejected": rng.choice(wrong[row["question"]]), "z": 1.0}
            for row in self.saved["D_ver"]
            if row["right"] and row["question"] in wrong
        ]

    def judged_parts(self, rows: list[dict]) -> list[dict]:
        """Returns the lessons of orm: every solution and its z. prm also has every beginning of a
        solution. Its z needs completions, so prm takes only as many solutions as there are
        questions.
        """
        rows = rows[: len(self.train_rows)] if self.cfg.verifier == "prm" else rows
        lessons = [
            row | {"part": part, "z": float(row["right"])}
            for row in rows
            for part in self.parts(row["solution"])
        ]
        unfinished = [lesson for lesson in lessons if lesson["part"] != lesson["solution"]]
        for lesson, z in zip(unfinished, self.in_parallel(self.step_labels, unfinished)):
            lesson["z"] = z
        return lessons

    def parts(self, solution: str) -> list[str]:
        """Returns the texts after which orm or prm gives a verdict."""
        ends = beginnings(solution) if self.cfg.verifier == "prm" else []
        return [*ends[:-1], solution]

    def step_labels(self, lessons: list[dict]) -> list[float]:
        """Returns z of unfinished solutions, by how the GENERATOR ends them (Math-Shepherd)."""
        # hard: z = 1 if any of n completions is right;  soft: z = the share that is
        n = self.cfg.step_samples
        repeated = [lesson for lesson in lessons for _ in range(n)]
        prefix = [self.encode(row["part"], ended=False) for row in repeated]
        prompts = [solve_prompt(row["question"]) for row in repeated]
        texts = self.decode(self.generate_ids("generator", prompts, prefix=prefix))
        # of the completion alone: a box in the part is not the completion's answer
        right = [is_correct(text, row["answer"]) for text, row in zip(texts, repeated)]
        label = any if self.cfg.step_labels == "hard" else mean
        return [float(label(completions)) for completions in chunk(right, n)]

    # --- scores
    def scores(self, rows: list[dict]) -> list[float]:
        """Returns the verifier's score of each row's solution; only the order of scores counts."""
        if not rows:
            return []
        if self.cfg.verifier == "dpo":  # log V(y | x) itself, not its ratio to G_sft
            return self.likelihoods(rows, [self.encode(row["solution"]) for row in rows])
        parts = [self.parts(row["solution"]) for row in rows]
        repeated = [row for row, texts in zip(rows, parts) for _ in range(2 * len(texts))]
        both = [ids for texts in parts for text in texts for ids in self.with_verdicts(text)]
        good, bad = chosen_and_rejected(torch.tensor(self.likelihoods(repeated, both)))
        p = iter(torch.sigmoid(good - bad).tolist())
        # a solution is as good as its worst step (Math-Shepherd)
        return [min(next(p) for _ in texts) for texts in parts]

    def likelihoods(self, rows: list[dict], ids: list[list[int]]) -> list[float]:
        """Returns log V(y | x), a sum over tokens."""
        batch = self.completions("verifier", [solve_prompt(row["question"]) for row in rows], ids)
        return self.log_probs("verifier", batch).sum(1).tolist()

    def with_verdicts(self, text: str) -> tuple[list[int], list[int]]:
        """Returns the text with the token for good at its end, and with the token for bad."""
        parts = [text, GOOD, BAD]
        ids, good, bad = self.processing_class(parts, add_special_tokens=False).input_ids
        return ids + good[-1:], ids + bad[-1:]


def player_at(step: int, cfg: Args) -> tuple[str, int]:
    """Returns (who is trained in this step, the iteration, counted from 0). The generator is
    trained in all iterations, then the verifier; with --verifier-in-loop both in each iteration.
    """
    own = (cfg.steps - cfg.ver_steps) // cfg.iterations  # generator steps in an iteration
    if cfg.verifier_in_loop:
        t, turn = divmod(step, own + cfg.ver_steps // cfg.iterations)
        return "generator" if turn < own else "verifier", t
    if step < own * cfg.iterations:
        return "generator", step // own
    return "verifier", cfg.iterations - 1


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: VStar, held_out: list[dict]) -> dict[str, float]:
    """Has the verifier rank N solutions of every held-out question by the generator."""
    N = trainer.cfg.candidates
    _, greedy = solve(trainer, "generator", held_out, greedy=True)
    repeated = [row for row in held_out for _ in range(N)]
    solutions = trainer.in_parallel(trainer.sample_solutions, repeated)
    scores = trainer.in_parallel(trainer.scores, solutions)
    return {"generator/greedy": mean(greedy)} | ranking_figures(solutions, scores, N)


# ------------------------------------------------------------------ main
CURVES = {
    "generator": ["generator/accuracy", "generator/greedy"],
    "verifier": ["verifier/rank_agreement"],
    "best of several": ["co/majority", "co/oracle"],
}


def load(args: Args):
    return load_for_steps(args, args.pool)


def main(args: Args):
    launch(VStar, args, load=load, evaluate=evaluate, curves=CURVES)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
