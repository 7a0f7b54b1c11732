r"""APO, Adversarial Preference Optimization: a reward model learns to prefer golden answers to the
generator's answers, and the generator learns to please it (Cheng et al. 2024, arXiv:2311.08045).

    python apo.py                                         the small model on a CPU, 2 minutes
    python apo.py --adversarial 0                         plain DPO: the reward model is fixed
    python apo.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU

The game of r, the reward model (RM), and pi, the generator; x is a question, y* its golden answer
    min over pi, max over r:   E[r(x, y*)] - E over y ~ pi of [r(x, y)]

The loop; half of the questions are the RM's, half are the generator's; y+ > y- is a pair
    PEOPLE = `human_pairs`, once   pairs right > wrong of answers to a few labelled questions
    for t = 1 .. iterations
        ATTACK = `start_round`     pi writes y_1 .. y_S to the RM's questions; pairs y* > y_i
        RM                         starts from the base again and learns from both kinds of pairs
                                   loss = mean of - w log sigmoid(r(x, y+) - r(x, y-))
                                   w = anchor for people's pairs, adversarial / S for y* > y_i
        SCORE = `start_generator`  pi writes S answers to its own questions, and r ranks them
        GENERATOR                  loss = - log sigmoid(h(y best) - h(y worst))
                                   h(y) = beta log(pi(y | x) / base(y | x))

Our changes that matter (more in docs/apo.md)
    1. r(x, y) = beta_r log V(y | x), the answer's likelihood under the RM's adapter. The paper's r
       is a linear head. We have tried no head. A likelihood falls with the length of the answer.
    2. The truth stands for people, who here prefer the first model's right answers to its wrong
       answers.
    3. The paper leaves DPO's pairs open. Ours are the best and the worst of S answers.

Shapes: B pairs, b of them in a micro-batch, T completion tokens, S answers to a question.
"""

from dataclasses import dataclass
from typing import Literal

from common.core.errors import UserError
from common.run.args import (
    Count,
    CountOrZero,
    RunArgs,
    Scale,
    Tokens,
    TwoOrMore,
    Weight,
    parse,
    per_model,
)


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    dataset: str = "tiny"
    """tiny, tiny-hard, tiny-long; a hub id or a .jsonl file: question, answer, golden reference"""
    steps: Count = 72
    """optimiser steps of all rounds; must be a multiple of --iterations"""
    rm_steps: Count = 12
    """steps of a round that train the RM; the other steps train the generator"""
    questions: Count = 32
    """pairs per step and process (paper: 64)"""
    micro_batch: Count = per_model(tiny=16, real=4)
    """pairs per forward and backward pass"""
    lr: Weight = per_model(tiny=3e-4, real=5e-6)
    """learning rate of the generator's adapter, constant (paper: 5e-6, 2e-6, 9e-7 by round)"""
    rm_lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the RM's adapter, constant (paper: 1e-6, all weights)"""
    iterations: Count = 3
    """rounds (paper: 3)"""
    pool: Count = per_model(tiny=128, real=1024)
    """questions of the RM, and as many questions of the generator; the same in every round"""
    samples: TwoOrMore = 4
    """S, answers to each question and round (paper: 4)"""
    labelled: CountOrZero = 32
    """so many of the RM's questions are labelled: it is known whether an answer is right"""
    anchor: Weight = 1.0
    """weight of a pair from people; ablation: 0 leaves these pairs out (paper: 1.0)"""
    adversarial: Weight = 1.0
    """weight of the S pairs y* > y_i of a question together (paper: 0.1); ablation, plain DPO: 0
    leaves these pairs out, and every round has the same RM"""
    diff: bool = False
    """ablation, as in WGAN: a pair y* > y_i adds - w (r(x, y*) - r(x, y_i)) to the loss"""
    restart: bool = True
    """every round starts its RM from the base; ablation: it continues the last RM"""
    improve: Literal["dpo", "rejection", "golden"] = "dpo"
    """the generator learns by DPO; by SFT on the RM's favourites; or, without any RM, by SFT on the
    golden answers of the RM's questions"""
    beta: Scale = 0.1
    """scale of the generator's log-ratios"""
    rm_beta: Scale = 0.5
    """scale of r, which is how sure the RM is; below 1 the untrained RM is nearly calibrated"""
    eval_every: CountOrZero = 24
    """steps between evaluations on held-out questions; 0 = only first and last"""
    solution_tokens: Tokens = per_model(tiny=80, real=512)
    """length limit of an answer (paper: 512)"""

    def check(self):
        if self.steps % self.iterations or self.steps // self.iterations <= self.rm_steps:
            rounds = f"--steps {self.steps} / --iterations {self.iterations}"
            raise UserError(f"{rounds} must be whole and more than --rm-steps {self.rm_steps}.")


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.batch import Batch, as_completions, chosen_and_rejected
from common.core.lists import chunk, mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import is_correct, solve, solve_prompt
from common.tasks.math import load_for_steps
from common.tasks.ranking import best_first
from common.tasks.references import check_references

import torch
import torch.nn.functional as F


# ------------------------------------------------------------------ the paper's mathematics
def rm_losses(margin, human, anchor: float, adversarial: float, diff: bool = False):
    """The RM's loss on each pair, (B,). As in the released code, the RM's loss is the mean over
    BOTH kinds of pairs in the step, so that the rarer kind counts less.

    margin: (B,), r(x, y+) - r(x, y-). human: (B,), whether a pair is from people. anchor,
        adversarial: the weights of a pair from people and of a pair with a golden answer.
    """
    # - w log sigmoid(r(x, y+) - r(x, y-));   diff, y* > y_i only: - w (r(x, y+) - r(x, y-))
    game = -margin if diff else -F.logsigmoid(margin)
    return torch.where(human, anchor * -F.logsigmoid(margin), adversarial * game)


def dpo_losses(best: torch.Tensor, worst: torch.Tensor, beta: float) -> torch.Tensor:
    """(B,) losses of (B,) log-ratios log(pi / base): SUMS over an answer's tokens, never means."""
    # - log sigmoid(h(y best) - h(y worst)),   h = beta * log-ratio
    return -F.logsigmoid(beta * (best - worst))


def best_and_worst(answers: list[dict], scores: list[float]) -> list[dict]:
    """The answers to one question with the highest and the lowest score, the first among equal
    scores. [] if all scores are equal, or if both are the same text: DPO has no gradient then.
    """
    best, worst = (answers[scores.index(end(scores))] for end in (max, min))
    return [best, worst] if best["ids"] != worst["ids"] else []


def calibration_error(margins: list[float], bins: int = 10) -> float:
    """The expected calibration error of p = sigmoid(r(right) - r(wrong)), the probability by the RM
    that the right answer is better. The RM is as sure as max(p, 1 - p): the bins divide [.5, 1].
    """
    # ECE = SUM over bins of |SUM over its pairs of ([in order] - confidence)| / all pairs
    margin = torch.tensor(margins, dtype=torch.float64)  # (n,)
    confidence = torch.sigmoid(margin.abs())  # (n,)
    in_order = (margin > 0) + 0.5 * (margin == 0)  # (n,), a tie is half in order
    place = ((2 * confidence - 1) * bins).long().clamp(max=bins - 1)  # (n,)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, place, in_order - confidence)
    return (gaps.abs().sum() / len(margin)).item()


# ------------------------------------------------------------------ the trainer
class Apo(CoTrainer):
    """`step` is the loop. `saved` is the same on all processes: the round, people's pairs, the RM's
    pairs, the last round whose answers the RM has scored, and the generator's pairs.
    """

    def __init__(self, *inputs):
        super().__init__(*inputs)
        rows, n = self.train_rows, len(self.train_rows) // 2  # not in turn, as their lengths may be
        self.rm_rows, self.generator_rows = self.with_golden(rows[:n]), rows[n:]
        self.saved = {"round": -1, "human": [], "rm": [], "scored": -1, "generator": []}

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        return {
            "generator": Player([], args.lr, args.solution_tokens, rows=2),
            "rm": Player([], args.rm_lr, args.solution_tokens, rows=2),
        }

    def step(self, rows):
        """One batch of pairs. rows: not used, because pairs are made twice in every round."""
        t, turn = divmod(self.state.global_step, self.cfg.steps // self.cfg.iterations)
        if self.saved["round"] < t:
            self.start_round(t)
        if turn < self.cfg.rm_steps:
            return [self.next_pairs("rm", turn, t)]
        if self.saved["scored"] < t:
            self.start_generator(t)
        return [self.next_pairs("generator", turn, t)]

    def next_pairs(self, player: str, turn: int, t: int) -> Batch:
        """The next pairs of shuffled epochs over the round's pairs. An RM that starts again takes
        its pairs in the same order in every round: from the same pairs it becomes the same RM.
        """
        key = "" if player == "rm" and self.cfg.restart else f"{t}"
        pairs = self.from_epochs(self.saved[player], turn, key)  # of all processes
        mine = self.shard(pairs)  # B
        prompts = [solve_prompt(pair["question"]) for pair in mine]
        batch = self.pairs(player, prompts, [(pair["chosen"], pair["rejected"]) for pair in mine])
        batch.extras["human"] = torch.tensor([p["human"] for p in mine]).to(batch.row.device)
        batch.extras["tokens"] = sum(len(pair["chosen"]) for pair in pairs)
        return batch

    def loss(self, batch):
        """A micro-batch's share of the mean over the pairs, or over the tokens, of the step."""
        cfg, both = self.cfg, as_completions(batch)  # 2b rows: y+, y-, y+, ...
        logp, _ = self.score(both)  # (2b, T)
        chosen, rejected = chosen_and_rejected(logp.sum(1))  # (b,) each
        shown = {"credit": logp}
        if batch.player == "rm":
            margin, human = cfg.rm_beta * (chosen - rejected), batch.extras["human"]  # (b,) each
            losses = rm_losses(margin, human, cfg.anchor, cfg.adversarial / cfg.samples, cfg.diff)
            shown |= {"human_in_order": margin[human] > 0, "golden_in_order": margin[~human] > 0}
        elif cfg.improve == "dpo":
            with torch.no_grad(), self.playing(None):
                ref, _ = self.score(both)  # (2b, T)
            best, worst = chosen_and_rejected((logp - ref).sum(1))  # (b,) each
            losses, margin = dpo_losses(best, worst, cfg.beta), cfg.beta * (best - worst)  # (b,)
        else:
            shown["logp"] = chosen
            return -chosen.sum() / batch.extras["tokens"], shown  # - log pi(y | x) per token
        return losses.sum() / self.questions_per_step, shown | {"margin": margin}

    # --- what the RM learns
    def start_round(self, t: int):
        """The generator answers the RM's questions, and the RM starts from the base again."""
        cfg = self.cfg
        if t == 0:
            self.saved["human"] = self.human_pairs() if cfg.anchor else []
        own = self.answers_to(self.rm_rows, cfg.samples)
        golden = [row["golden"] for row in self.rm_rows for _ in range(cfg.samples)]
        game = [a_pair(y, ids, y["ids"]) for y, ids in zip(own, golden) if ids != y["ids"]]
        self.report_round(own, game)
        self.saved |= {"round": t, "rm": self.saved["human"] + (game if cfg.adversarial else [])}
        if not self.saved["rm"]:
            flags = "--anchor, --labelled, --samples and --adversarial"
            raise UserError(f"round {t + 1}: no answers make a pair for the RM; see {flags}.")
        if cfg.restart:
            self.restart("rm")

    def human_pairs(self) -> list[dict]:
        """All pairs of a right and a wrong answer of the first model to a labelled question."""
        S = self.cfg.samples
        pairs = right_and_wrong(self.answers_to(self.rm_rows[: self.cfg.labelled], S), S)
        return [a_pair(y, y["ids"], z["ids"], human=True) for y, z in pairs]

    def with_golden(self, rows: list[dict]) -> list[dict]:
        """The rows whose golden answer and its end token fit: no golden answer is cut."""
        limit, tokenizer = self.cfg.solution_tokens, self.processing_class
        texts, end = [row["reference"].strip() for row in rows], tokenizer.eos_token_id
        ids = tokenizer(texts, add_special_tokens=False).input_ids
        found = [row | {"golden": [*y, end]} for row, y in zip(rows, ids) if 0 < len(y) < limit]
        if not found:
            data, flag = f"--dataset {self.cfg.dataset}", f"--solution-tokens {limit}"
            raise UserError(f"{data}: no question has a reference of at most {flag}.")
        return found

    # --- what the generator learns
    def start_generator(self, t: int):
        """It answers its own questions, and the RM picks each question's best and worst answer."""
        S = self.cfg.samples
        answers = self.answers_to(self.generator_rows, S)
        scores = self.in_parallel(self.scores, answers)
        several = [*zip(chunk(answers, S), chunk(scores, S))]
        chosen = [pair for of in several if (pair := best_and_worst(*of))]
        self.report_scores(answers, scores, chosen)
        pairs = [a_pair(y, y["ids"], z["ids"]) for y, z in chosen]
        if self.cfg.improve == "golden":
            pairs = [a_pair(row, row["golden"], row["golden"]) for row in self.rm_rows]
        if not pairs:
            raise UserError(f"round {t + 1}: no question has two answers that differ in r.")
        self.saved |= {"scored": t, "generator": pairs}

    def answers_to(self, rows: list[dict], n: int) -> list[dict]:
        """n answers to each question, adjacent, by the present generator."""
        return self.in_parallel(self.answers, [row for row in rows for _ in range(n)])

    def answers(self, rows: list[dict]) -> list[dict]:
        """As sampled: an answer that is cut at the length limit gets no end token."""
        ids = self.generate_ids("generator", [solve_prompt(row["question"]) for row in rows])
        right = [is_correct(text, row["answer"]) for text, row in zip(self.decode(ids), rows)]
        asked = [row["question"] for row in rows]
        return [{"question": x, "ids": y, "right": z} for x, y, z in zip(asked, ids, right)]

    def scores(self, answers: list[dict]) -> list[float]:
        """r(x, y) of each answer by the present RM."""
        if not answers:
            return []
        prompts = [solve_prompt(y["question"]) for y in answers]
        batch = self.completions("rm", prompts, [y["ids"] for y in answers])
        # r(x, y) = beta_r * SUM over t of log V(y_t | x, y_<t)
        return (self.cfg.rm_beta * self.log_probs("rm", batch).sum(1)).tolist()

    # --- what is logged and shown; no method below affects training
    def report_round(self, own: list[dict], game: list[dict]):
        self.log_mean("generator/accuracy", [y["right"] for y in own])
        self.log_mean("co/own_golden", 1 - len(game) / len(own))
        self.log_mean("co/human_pairs", len(self.saved["human"]))

    def report_scores(self, answers: list[dict], scores: list[float], chosen: list[list[dict]]):
        for name, value in rm_figures(answers, scores, self.cfg.samples).items():
            self.log_mean(f"rm/{name}", value)
        one_right = [best["right"] for best, worst in chosen if best["right"] != worst["right"]]
        self.log_mean("co/pairs_one_right", len(one_right) / max(1, len(chosen)))
        self.log_mean("co/pairs_right_way", one_right)

    def show_loss(self, batch, shown):
        super().show_loss(batch, shown)
        sides = [f"{batch.player}, chosen", f"{batch.player}, rejected"]
        name = "margin" if "margin" in shown else "logp"
        self.record_part(batch, shown["credit"], name, shown[name], sides)


def right_and_wrong(answers: list[dict], n: int) -> list[tuple[dict, dict]]:
    """All pairs of a right and a wrong answer to a question, whose n answers are adjacent."""
    return [(y, z) for of in chunk(answers, n) for y in of for z in of if y["right"] > z["right"]]


def a_pair(row: dict, chosen: list[int], rejected: list[int], human: bool = False) -> dict:
    return {"question": row["question"], "chosen": chosen, "rejected": rejected, "human": human}


# ------------------------------------------------------------------ evaluation
def rm_figures(answers: list[dict], scores: list[float], n: int) -> dict[str, float]:
    """Figures of all pairs of a right and a wrong answer to one question: the share in which the
    right answer scores higher, where a tie counts one half; how sure the RM is; and the
    calibration error. {} if there are no pairs.
    """
    scored = [y | {"r": r} for y, r in zip(answers, scores)]
    margins = [y["r"] - z["r"] for y, z in right_and_wrong(scored, n)]
    if not margins:
        return {}
    in_order = mean((margin > 0) + 0.5 * (margin == 0) for margin in margins)
    sureness = torch.tensor(margins).abs().sigmoid().mean().item()  # mean of max(p, 1 - p)
    return {"rank_agreement": in_order, "sureness": sureness, "ece": calibration_error(margins)}


def evaluate(trainer: Apo, held_out: list[dict]) -> dict[str, float]:
    """The generator alone, and with the RM's choice among n answers. The RM on the generator's
    present answers, and on the answers of the first model at step 0, always the same.
    """
    n = trainer.cfg.eval_samples
    _, greedy = solve(trainer, "generator", held_out, greedy=True)
    answers = trainer.answers_to(held_out, n)
    scores = trainer.in_parallel(trainer.scores, answers)
    right = chunk([y["right"] for y in answers], n)
    picked = [best_first(*of)[0] for of in zip(right, chunk(scores, n))]  # the highest r
    figures = {"generator/accuracy": mean(map(mean, right)), "generator/greedy": mean(greedy)}
    figures |= {f"co/best_of_{n}": mean(picked), "co/oracle": mean(map(any, right))}
    first = trainer.saved.setdefault("first", answers)
    of_first = rm_figures(first, trainer.in_parallel(trainer.scores, first), n)
    figures |= {f"rm/{name}": x for name, x in rm_figures(answers, scores, n).items()}
    return figures | {f"rm/first_{name}": x for name, x in of_first.items()}


# ------------------------------------------------------------------ main
CURVES = {
    "generator": ["generator/accuracy", "generator/greedy", "co/best_of_4"],
    "RM: right above wrong": ["rm/rank_agreement", "rm/first_rank_agreement"],
    "RM: calibration error": ["rm/ece", "rm/first_ece"],
}


def load(args: Args):
    train, held_out = load_for_steps(args, 2 * args.pool)
    check_references(train, args.dataset)
    return train, held_out


def main(args: Args):
    launch(Apo, args, load=load, evaluate=evaluate, curves=CURVES)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
