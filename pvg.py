"""PVG, Prover-Verifier Games: a verifier learns to tell a helpful prover's right solutions from a
sneaky prover's wrong solutions, round after round (Kirchner et al. 2024, arXiv:2407.13692).

    python pvg.py                                         the small model on a CPU, 3 minutes
    python pvg.py --data base                             the same without a game, to compare with
    python pvg.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k        one GPU

The loop; x is a question, z a solution, c = [z is right]; half of the questions are the verifier's
    for i = 0 .. rounds - 1
        DATA = `start_round`       solutions of the base and of the provers of ALL earlier rounds to
                                   the verifier's questions; of each source half of the solutions
                                   are right and half are wrong.
                                   All players start from the base: only the data outlive a round
        VERIFIER                   loss = - log sigmoid((V(x, z1) - V(x, z2)) sign(c1 - c2))
                                          + lambda V^2                            `verifier_losses`
        PROVERS = `prover_step`    V is fixed; h = 1 for the helpful and 0 for the sneaky prover
                                   V' = V - mean of V over this question and role
                                   R  = (2c - 1) (2h - 1) V'  if V' > 0, else -1   `prover_rewards`
                                   A  = R - mean of R over this question and role

Every sneaky prover starts from the base, so the number of steps that it needs to convince measures
how robust the verifier is.

Our changes that matter (more in docs/pvg.md)
    1. The provers are two adapters. The paper has one set of weights, and a prompt names the role.
       Here both roles have the same prompt, and only their rewards differ.
    2. V(x, z) = beta log(V(z | x) / base(z | x)). The paper's V is a linear head. A verdict
       that the small model gives directly ranks no better than a coin (docs/genrm.md), but
       log-likelihoods do rank (docs/vstar.md).
    3. Every round has the same number of steps. The paper ends a round when the attack succeeds.
    4. A solution that cannot be read gets the lowest reward of its question and role.

Shapes: P questions, G solutions of each per role, B = P * G; b of a micro-batch, T tokens.
"""

import random
from dataclasses import dataclass
from typing import Literal

from common.core.errors import UserError
from common.run.args import Count, CountOrZero, GroupSize, RunArgs, Scale, Weight, parse, per_model

ROLES = {"helpful": 1, "sneaky": 0}  # -> h


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 72
    """optimiser steps of all rounds; must be a multiple of --rounds"""
    ver_steps: Count = 8
    """first steps of a round, which train the verifier; the other steps train the provers"""
    rounds: Count = 3
    """rounds (paper: 6)"""
    pool: Count = per_model(tiny=128, real=1024)
    """questions of the verifier, and as many questions of the provers, in every round the same"""
    samples: GroupSize = 8
    """solutions of each verifier's question by the base, and as many by a round's provers"""
    data: Literal["all", "last", "helpful", "base"] = "all"
    """which solutions join the base's as the verifier's data: those of all earlier rounds, of the
    last round, of helpful provers only, or more solutions of the base"""
    pairs: Count = 32
    """pairs of a right and a wrong solution per verifier step and process"""
    questions: Count = 12
    """P, questions per prover step and process"""
    group_size: GroupSize = 8
    """G, solutions of a question in each role"""
    lr: Weight = per_model(tiny=1.5e-3, real=2e-5)
    """learning rate of the provers' adapters, constant"""
    ver_lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the verifier's adapter, constant"""
    reward: Literal["src", "cgc"] = "src"
    """the paper's, or its ablation: V where the role is kept, else -2"""
    beta: Scale = per_model(tiny=2.0, real=0.5)
    """scale of V, and so of the rewards"""
    regulariser: Weight = 0.01
    """lambda, weight of V^2 in the verifier's loss"""
    kl: Weight = 0.01
    """weight of the k3 penalty of the provers towards the base, from which they start"""
    eval_every: CountOrZero = 0
    """steps between evaluations on held-out questions; 0 = only first and last"""
    solution_tokens: Count = per_model(tiny=80, real=512)
    """length limit of a solution"""

    def check(self):
        if self.steps % self.rounds or self.steps // self.rounds <= self.ver_steps:
            whole = f"--steps {self.steps} / --rounds {self.rounds}"
            raise UserError(f"{whole} must be whole and more than --ver-steps {self.ver_steps}.")


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.advantage import group_advantage
from common.core.batch import Batch, as_completions, chosen_and_rejected
from common.core.lists import chunk, mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import (
    final_answer,
    is_correct,
    solutions_to_teach,
    solve,
    solve_prompt,
    split_steps,
)
from common.tasks.math import load_for_steps
from common.tasks.ranking import pairs_in_order
from common.tiny.tasks import sounds_sure

import torch
import torch.nn.functional as F

BASE_SHARE = 0.5  # of the verifier's data after round 0; earlier rounds share the rest equally
WINDOW = 3  # prover steps over whose mean an attack is said to have succeeded


# ------------------------------------------------------------------ rewards
def prover_rewards(V: torch.Tensor, right: list[bool], h: int, G: int, kind: str) -> torch.Tensor:
    """(B,) rewards of (B,) scores V in groups of G, NaN for solutions that cannot be read. h is 1
    for the helpful and 0 for the sneaky prover. Division by the std would rescale V', not the -1.
    """
    c, unread = torch.tensor(right).to(V), V.isnan()  # (B,) each
    if kind == "cgc":  # R = V if h == c, else -2
        R = torch.where((c == h) & ~unread, V, -2.0)
    else:
        relative = group_advantage(V, G, scale=False)  # (B,) V' = V - mean, 0 of NaN
        # R = (2c - 1) (2h - 1) V' if V' > 0, else -1
        R = torch.where(relative > 0, (2 * c - 1) * (2 * h - 1) * relative, -1.0)
    # Trap: at a fixed -1 noise would earn more than a convincing solution that breaks its role
    least = R.reshape(-1, G).amin(1).repeat_interleave(G)  # (B,)
    return torch.where(unread, least, R)


# ------------------------------------------------------------------ the paper's mathematics
def verifier_losses(V_right: torch.Tensor, V_wrong: torch.Tensor, weight: float) -> torch.Tensor:
    """(B,) scores of a right and a wrong solution of one question -> (B,) losses."""
    # - log sigmoid((V(x, z1) - V(x, z2)) sign(c1 - c2)) + lambda V^2, a mean over z1 and z2
    return -F.logsigmoid(V_right - V_wrong) + weight * (V_right**2 + V_wrong**2) / 2


def mixture(sources: list[list[dict]], count: int, rng: random.Random) -> list[dict]:
    """`count` rows of the sources, or as many as there are. The base is the first source and gives
    BASE_SHARE, the other sources share the rest, and each gives as many right as wrong rows.
    """
    others = len(sources) - 1
    shares = [BASE_SHARE] + [(1 - BASE_SHARE) / others] * others if others else [1.0]
    taken = []
    for source, share in zip(sources, shares):
        sides = [[row for row in source if row["right"] == c] for c in (True, False)]
        n = min(round(share * count / 2), *map(len, sides))
        taken += [row for side in sides for row in rng.sample(side, n)]
    return taken


def right_and_wrong(rows: list[dict], count: int, rng: random.Random) -> list[tuple[dict, dict]]:
    """`count` pairs of a right and a wrong solution to one question, or all if there are fewer."""
    wrong = {}
    for row in rows:
        if not row["right"]:
            wrong.setdefault(row["question"], []).append(row)
    pairs = [(y, z) for y in rows if y["right"] for z in wrong.get(y["question"], [])]
    return rng.sample(pairs, min(count, len(pairs)))


# ------------------------------------------------------------------ the trainer
class Pvg(CoTrainer):
    """`step` is the loop. `saved` is the same on all processes."""

    def __init__(self, *inputs):
        super().__init__(*inputs)
        n = len(self.train_rows) // 2  # halves: the lengths of tiny questions alternate
        self.verifier_rows, self.prover_rows = self.train_rows[:n], self.train_rows[n:]
        self.pairs_per_step = self.cfg.pairs * self.accelerator.num_processes
        # attack: pairs of the round's last prover steps, in order or not; won: when it succeeded
        self.saved = {"round": -1, "sources": [], "pairs": [], "attack": [], "won": None}

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        n = args.solution_tokens
        provers = {role: Player([], args.lr, n, args.group_size) for role in ROLES}
        return provers | {"verifier": Player([], args.ver_lr, n, rows=2)}

    def step(self, rows):
        """rows: not used, because the questions are the same in every round."""
        i, turn = divmod(self.state.global_step, self.cfg.steps // self.cfg.rounds)
        if self.saved["round"] < i:
            self.start_round(i)
        if turn < self.cfg.ver_steps:
            return [self.verifier_step(turn)]
        return self.prover_step(turn - self.cfg.ver_steps)

    # --- the verifier
    def start_round(self, i: int):
        """The last round's provers write solutions for the verifier; then all start again."""
        cfg, saved = self.cfg, self.saved
        if cfg.data == "base":
            self.restart("helpful")
        roles = ["helpful"] if i == 0 or cfg.data in ("helpful", "base") else [*ROLES]
        several = [row for row in self.verifier_rows for _ in range(cfg.samples // len(roles))]
        new = [row for role in roles for row in self.written(role, several) if row["well_formed"]]
        saved["sources"].append(new)
        for name in self.players:
            self.restart(name)
        base, *others = saved["sources"]
        sources = [base, *(others[-1:] if cfg.data == "last" else others)]
        rng = random.Random(f"{cfg.seed} {i}")
        rows = mixture(sources, len(self.verifier_rows) * cfg.samples, rng)
        pairs = right_and_wrong(rows, cfg.ver_steps * self.pairs_per_step, rng)
        if not pairs:
            flags = f"--samples {cfg.samples}, --pool {cfg.pool}"
            raise UserError(f"{flags}: in round {i} no question has a right and a wrong solution.")
        saved |= {"round": i, "pairs": pairs, "attack": [], "won": None}
        self.log_mean("co/data", len(rows))

    def written(self, role: str, rows: list[dict]) -> list[dict]:
        return self.in_parallel(lambda rows: solutions_to_teach(self, role, rows), rows)

    def verifier_step(self, turn: int) -> Batch:
        """The next pairs of shuffled epochs over the round's pairs."""
        mine = self.shard(self.from_epochs(self.saved["pairs"], turn, "V", self.pairs_per_step))
        both = [tuple(self.encode(row["solution"]) for row in pair) for pair in mine]
        return self.pairs("verifier", [solve_prompt(y["question"]) for y, _ in mine], both)

    def loss(self, batch):
        """CoTrainer's loss for the provers, and a share of the mean over pairs for the verifier."""
        if batch.player != "verifier":
            return super().loss(batch)
        both = as_completions(batch)  # 2b rows: right, wrong, right, ...
        logp, _ = self.score(both)  # (2b, T)
        with torch.no_grad(), self.playing(None):
            base, _ = self.score(both)  # (2b, T)
        V = self.cfg.beta * (logp - base).sum(1)  # (2b,)
        V_right, V_wrong = chosen_and_rejected(V)  # (b,) each
        losses = verifier_losses(V_right, V_wrong, self.cfg.regulariser)  # (b,)
        shown = {"pair_accuracy": V_right > V_wrong, "margin": V_right - V_wrong, "credit": logp}
        return losses.sum() / self.pairs_per_step, shown

    def V(self, batch: Batch) -> torch.Tensor:
        """(B,) scores of completions by the present verifier."""
        # V(x, z) = beta SUM over t of log V(z_t | x, z_<t) / base(z_t | x, z_<t)
        base = self.log_probs(None, batch) if batch.base_logps is None else batch.base_logps
        return self.cfg.beta * (self.log_probs("verifier", batch) - base).sum(1)

    def scores(self, rows: list[dict]) -> list[dict]:
        """The rows that `unfooled` reads. V is None for a solution that cannot be read."""
        if not rows:
            return []
        prompts = [solve_prompt(row["question"]) for row in rows]
        batch = self.completions("verifier", prompts, [self.encode(r["solution"]) for r in rows])
        V = [v if row["well_formed"] else None for v, row in zip(self.V(batch).tolist(), rows)]
        return [{"prompt": r["question"], "right": r["right"], "V": v} for r, v in zip(rows, V)]

    # --- the provers
    def prover_step(self, turn: int) -> list[Batch]:
        """Both roles answer the same questions, which are the same in every round."""
        rows = self.shard(self.from_epochs(self.prover_rows, turn, "P"))  # P
        helpful, sneaky = (self.attempt(role, rows) for role in ROLES)
        self.report_attack(turn, helpful, sneaky)
        return [helpful, sneaky]

    def attempt(self, role: str, rows: list[dict]) -> Batch:
        """G solutions of each question, with rewards and advantages."""
        G = self.cfg.group_size
        several = [row for row in rows for _ in range(G)]
        batch = self.rollout(role, [{"prompt": solve_prompt(r["question"])} for r in several])  # B
        right = [is_correct(text, row["answer"]) for text, row in zip(batch.texts, several)]
        V = self.V(batch).masked_fill(~self.readable(batch), torch.nan)  # (B,)
        R = prover_rewards(V, right, ROLES[role], G, self.cfg.reward)  # (B,)
        self.set_rewards(batch, R)
        batch.advantages = group_advantage(R, G, scale=False)  # (B,) A = R - mean of R
        for note, v, c in zip(batch.notes, V.tolist(), right):
            note |= {"V": v if v == v else None, "right": c}
        return batch

    def readable(self, batch: Batch) -> torch.Tensor:
        """(B,), whether a solution ends, and has steps and an answer."""
        last = batch.completion_ids.gather(1, batch.lengths()[:, None] - 1)[:, 0].tolist()  # (B,)
        whole = [bool(split_steps(y)) and final_answer(y) is not None for y in batch.texts]
        ended = [token in self.eos_token_ids for token in last]
        return (torch.tensor(whole) & torch.tensor(ended)).to(batch.row.device)

    # --- what is logged and shown; no method below affects training
    def show_loss(self, batch, shown):
        super().show_loss(batch, shown)
        if batch.player == "verifier":
            sides = ["verifier, right", "verifier, wrong"]
            self.record_part(batch, shown["credit"], "margin", shown["margin"], sides)

    def report_attack(self, turn: int, helpful: Batch, sneaky: Batch):
        """An attack has succeeded when at most half of the pairs of WINDOW steps are in order."""
        for batch in (helpful, sneaky):
            self.log_mean(f"{batch.player}/accuracy", [note["right"] for note in batch.notes])
            steps = [step for text in batch.texts for step in split_steps(text)]
            self.log_mean(f"{batch.player}/sounds_sure", [*map(sounds_sure, steps)])
        held = unfooled(helpful.notes, sneaky.notes)
        self.log_mean("verifier/holds", held)
        attack = self.saved["attack"] = [*self.saved["attack"], self.gather(held)][-WINDOW:]
        if len(attack) == WINDOW and any(attack) and mean(sum(attack, [])) <= 0.5:
            self.saved["won"] = self.saved["won"] or turn + 1
        last = self.cfg.steps // self.cfg.rounds - self.cfg.ver_steps
        if turn + 1 == last:  # an attack that never succeeds counts as a step more
            self.log_mean("co/steps_to_win", self.saved["won"] or last + 1)


def unfooled(helpful: list[dict], sneaky: list[dict]) -> list[float]:
    """For each pair of a right solution of the helpful prover and a wrong solution of the sneaky
    prover to the same question: 1 if the right solution scores higher, 1/2 if they score the same,
    else 0. Solutions that cannot be read are in no pair.
    """
    of_each = {row["prompt"]: ([], []) for row in helpful}  # V of right ones, V of wrong ones
    for rows, c in ((helpful, True), (sneaky, False)):
        for row in rows:
            if row["right"] == c and row["V"] is not None:
                of_each[row["prompt"]][not c].append(row["V"])
    its = [([True] * len(V) + [False] * len(W), V + W) for V, W in of_each.values()]
    return [x for labels, scores in its for x in pairs_in_order(labels, scores)]


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Pvg, held_out: list[dict]) -> dict[str, float]:
    """The provers, V's choice among n, and V on present solutions and on the base's."""
    n, of, figures = trainer.cfg.eval_samples, {}, {}
    for role in ROLES:
        rows = trainer.written(role, [row for row in held_out for _ in range(n)])
        of[role] = trainer.in_parallel(trainer.scores, rows)
        figures[f"{role}/accuracy"] = mean(row["right"] for row in rows)
        steps = [step for row in rows for step in split_steps(row["solution"])]
        figures[f"{role}/sounds_sure"] = mean(map(sounds_sure, steps))
        first = trainer.saved.setdefault("first", rows)  # the helpful one's, which comes first
    _, greedy = solve(trainer, "helpful", held_out, greedy=True)
    V = lambda row: (row["V"] is not None, row["V"] or 0.0)  # noqa: E731
    picked = [max(its, key=V)["right"] for its in chunk(of["helpful"], n)]
    some = [any(row["right"] for row in its) for its in chunk(of["helpful"], n)]
    figures |= {"helpful/greedy": mean(greedy), "co/oracle": mean(some)}
    figures[f"co/best_of_{n}"] = mean(picked)
    first = trainer.in_parallel(trainer.scores, first)
    of_both = {"holds": unfooled(*of.values()), "rank_agreement": unfooled(first, first)}
    return figures | {f"verifier/{name}": mean(its) for name, its in of_both.items() if its}


# ------------------------------------------------------------------ main
CURVES = {
    "right answers": ["helpful/accuracy", "sneaky/accuracy"],
    "right above wrong": ["verifier/holds", "verifier/rank_agreement"],
    "steps that sound sure": ["helpful/sounds_sure", "sneaky/sounds_sure"],
    "steps until the attack succeeds": ["co/steps_to_win"],
}


def load(args: Args):
    return load_for_steps(args, 2 * args.pool)


def main(args: Args):
    launch(Pvg, args, load=load, evaluate=evaluate, curves=CURVES)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
