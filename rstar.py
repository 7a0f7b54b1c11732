r"""rStar-Math: a search tree says which step is better than its siblings, and a process preference
model (PPM) learns this from pairs (Guan et al. 2025, arXiv:2501.04519). This script is one of the
four rounds of the paper.

    python rstar.py                       the small model on a CPU, 2 minutes
    python rstar.py --verifier orm        pairs of whole solutions alone, from the same trees
    python rstar.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU

The loop (section 3; a node s is a question x and the first steps of a solution)
    SEARCH = `search`             --samples times per question: start at the root; while the node
                                  has --width rollouts, go to its child with the largest UCT,
                                    UCT(s) = Q(s) + c sqrt(ln N_parent / N(s)),  Q(s) = q(s) / N(s)
                                  let G finish the solution from there; for every s in it
                                    q(s) += 1 if the answer is right, else q(s) -= 1
    GENERATOR = `generator_step`  loss = - mean of log G(y | x) per token; y: the two right
                                  solutions of a question with the highest mean Q
    PPM = `verifier_step`         loss = - 1/(2*2) SUM log sigmoid(r(x, y+) - r(x, y-)),
                                  y+: the two siblings with the highest Q, y-: with the lowest
    TEST = `evaluate`             G writes N solutions; V, the PPM's adapter, picks the solution y
                                  with the highest log V(y | x)

Our changes that matter (more in docs/rstar.md)
    1. There is one round, and G writes its solutions itself. In the paper's first round a much
       larger model writes them. The PPM does not set the first Q of a node, and guides no search.
    2. r has no head: r = beta log(V / base). As in vstar.py, log V alone ranks solutions.
    3. A rollout is a whole solution. Children exist only where a rollout has passed, so every child
       has been visited, and UCT is always defined.

Shapes: B pairs or solutions, b of them in a micro-batch, T completion tokens.
"""

import math
from dataclasses import dataclass, field
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
    steps: Count = 64
    """optimiser steps: the generator's, then the verifier's"""
    ver_steps: CountOrZero = 48
    """how many of the steps are the verifier's"""
    questions: Count = 32
    """solutions, or pairs, per step and process"""
    micro_batch: Count = per_model(tiny=16, real=4)
    """rows or pairs per forward and backward pass"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the generator's adapter, constant"""
    ver_lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the verifier's adapter, constant"""
    pool: Count = per_model(tiny=192, real=1024)
    """questions that have a tree (paper: 747 thousand)"""
    samples: Several = 16
    """solutions of every question, in one tree (paper: 8, 16 and up to 128)"""
    width: Several = 4
    """rollouts that go on from a node before one of its children is chosen; --width as large as
    --samples is sampling without a tree (paper: 5 to 16 children)"""
    c: Weight = 2.0
    """how much UCT prefers children with few rollouts (paper: 2)"""
    verifier: Literal["ppm", "orm"] = "ppm"
    """ppm: pairs of siblings and pairs of whole solutions; orm: pairs of whole solutions alone"""
    beta: Scale = 0.1
    """scale of the log-ratios"""
    eval_every: CountOrZero = 0
    """steps between evaluations on held-out questions; 0 = only first and last"""
    candidates: Several = 16
    """N, solutions of each held-out question that are ranked (paper: 8 to 64)"""
    solution_tokens: Tokens = per_model(tiny=80, real=512)
    """length limit of a solution"""

    def check(self):
        if self.ver_steps > self.steps:
            raise UserError(f"--ver-steps {self.ver_steps} is more than --steps {self.steps}.")


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.batch import Batch, as_completions, chosen_and_rejected
from common.core.lists import mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import beginnings, solutions_to_teach, solve, solve_prompt
from common.tasks.math import load_for_steps
from common.tasks.ranking import pairs_in_order, ranking_figures
from common.tiny.tasks import gold_steps

import torch
import torch.nn.functional as F


# ------------------------------------------------------------------ the paper's mathematics
@dataclass
class Node:
    """The beginning of a solution, up to the end of a step, or a whole solution."""

    ended: bool  # it is a whole solution
    N: int = 0  # rollouts through it
    q: int = 0  # the sum of their values, +1 for a right answer and -1 for a wrong one
    steps: list[str] = field(default_factory=list)  # children that are no whole solutions

    @property
    def Q(self) -> float:
        return self.q / self.N


Tree = dict[str, Node]  # text -> node, of those that a rollout goes through; "" is the root


def uct(N: int, Q: float, N_parent: int, c: float) -> float:
    """Returns how promising a child is."""
    # UCT(s) = Q(s) + c sqrt(ln N_parent / N(s))
    return Q + c * math.sqrt(math.log(N_parent) / N)


def next_start(tree: Tree, width: int, c: float) -> str:
    """Returns the node that the next rollout goes on from; of equal children the first."""
    text = ""
    while (parent := tree[text]).N >= width and parent.steps:
        text = max(parent.steps, key=lambda s: uct(tree[s].N, tree[s].Q, parent.N, c))
    return text


def path_of(solution: str) -> list[str]:
    """Returns the root, the solution up to the end of each of its steps, and the whole solution."""
    return ["", *beginnings(solution), solution]


def back_up(tree: Tree, solution: str, right: bool):
    """Counts a rollout for every node on its path, the root included."""
    path = path_of(solution)
    for parent, text in zip([None, *path], path):
        if text not in tree:
            tree[text] = Node(ended=text == solution)
            tree[parent].steps += [text] * (not tree[text].ended)
        # q(s) = q(s) + q(terminal),   q(terminal) = 1 if the answer is right, else -1
        tree[text].N += 1
        tree[text].q += 1 if right else -1


def best_against_worst(tree: Tree, values: dict[str, float]) -> list[dict]:
    """Returns pairs {chosen, rejected, weight}: the two texts with the highest values that led to a
    right answer, each with the two texts with the lowest values that led to a wrong answer. A text
    may be on both sides, but two equal values make no pair.
    """
    good = sorted((s for s in values if tree[s].q > -tree[s].N), key=lambda s: -values[s])[:2]
    bad = sorted((s for s in values if tree[s].q < tree[s].N), key=lambda s: values[s])[:2]
    pairs = [(a, b) for a in good for b in bad if values[a] > values[b]]
    # 1/(2*2), or 1 / the number of pairs if there are fewer: every parent counts once
    return [{"chosen": a, "rejected": b, "weight": 1 / len(pairs)} for a, b in pairs]


def sibling_pairs(tree: Tree) -> list[dict]:
    """Returns pairs of steps that go on from the same node, compared by Q."""
    of_each = [{s: tree[s].Q for s in parent.steps} for parent in tree.values()]
    return [pair for values in of_each for pair in best_against_worst(tree, values)]


def mean_Q(tree: Tree) -> dict[str, float]:
    """Returns the mean Q over the path of every whole solution, without the root."""
    whole = [text for text, node in tree.items() if node.ended]
    return {text: mean(tree[s].Q for s in path_of(text)[1:]) for text in whole}


def best_solutions(tree: Tree) -> list[str]:
    """Returns the two right solutions with the highest mean Q, which the generator learns."""
    values = mean_Q(tree)
    return sorted((y for y in values if tree[y].q > 0), key=lambda y: -values[y])[:2]


# ------------------------------------------------------------------ the trainer
class RStar(CoTrainer):
    """`saved` is what the players learn, the same on all processes: rows {question, solution} and
    {question, chosen, rejected, weight, ended}.
    """

    def __init__(self, *inputs):
        super().__init__(*inputs)
        self.saved = {"solutions": [], "pairs": []}

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        n = args.solution_tokens
        generator = Player([], args.lr, n, reads=n)  # the beginnings that rollouts go on from
        return {"generator": generator, "verifier": Player([], args.ver_lr, n, rows=2)}

    def step(self, rows):
        """rows: not used, the trees are grown once."""
        if not self.saved["solutions"]:
            self.start()
        if self.state.global_step < self.cfg.steps - self.cfg.ver_steps:
            return [self.generator_step()]
        return [self.verifier_step()]

    # --- the trees
    def start(self):
        """Grows a tree for every question, and takes from it what the two players learn."""
        trees, saved = [{"": Node(False)} for _ in self.train_rows], self.saved
        self.search(self.train_rows, trees, self.cfg.samples)
        siblings, whole = [], []
        for row, tree in zip(self.train_rows, trees):
            asked = {"question": row["question"]}
            saved["solutions"] += [asked | {"solution": y} for y in best_solutions(tree)]
            siblings += [asked | pair | {"ended": False} for pair in sibling_pairs(tree)]
            pairs = best_against_worst(tree, mean_Q(tree))  # the answers' siblings are solutions
            whole += [asked | pair | {"ended": True} for pair in pairs]
        saved["pairs"] = whole if self.cfg.verifier == "orm" else siblings + whole
        if not saved["solutions"]:
            larger = f"--samples (now {self.cfg.samples}) or --pool (now {self.cfg.pool})"
            raise UserError(f"no rollout can be read and is right; try a larger {larger}.")
        if not saved["pairs"] and self.cfg.ver_steps:
            raise UserError("all solutions of a question are right, or all wrong: no pairs.")
        self.log_mean("co/right_rollouts", [(1 + t[""].Q) / 2 for t in trees if t[""].N])
        self.log_mean("co/sibling_pairs", len(siblings) / len(trees))
        both = [[gold_steps(p["question"], p[y]) for y in ("chosen", "rejected")] for p in siblings]
        self.log_mean("co/true_pairs", [good[-1] and not bad[-1] for good, bad in both if good])

    def search(self, rows: list[dict], trees: list[Tree], rollouts: int):
        """Adds this number of rollouts to the tree of each question."""
        for _ in range(rollouts):
            starts = [next_start(tree, self.cfg.width, self.cfg.c) for tree in trees]
            prefix = [row | {"prefix": text} for row, text in zip(rows, starts)]
            for tree, new in zip(trees, self.in_parallel(self.sample_solutions, prefix)):
                if new["well_formed"]:  # else no node hears of it
                    back_up(tree, new["solution"], new["right"])

    def sample_solutions(self, rows: list[dict]) -> list[dict]:
        """Writes a solution for each row. A solution that goes on from a `prefix` is not well
        formed if it is too long as a whole, or if nothing follows the prefix.
        """
        found = solutions_to_teach(self, "generator", rows)
        for row in found:
            fits = len(self.encode(row["solution"])) <= self.cfg.solution_tokens
            row["well_formed"] &= fits and not row["solution"].endswith("</step>")
        return found

    # --- what the players learn
    def generator_step(self) -> Batch:
        rows = self.from_epochs(self.saved["solutions"], self.state.global_step, "G")
        tokens = sum(len(self.encode(row["solution"])) for row in rows)  # of all processes
        mine = self.shard(rows)  # B
        prompts = [solve_prompt(row["question"]) for row in mine]
        batch = self.completions("generator", prompts, [self.encode(r["solution"]) for r in mine])
        batch.extras["weight"] = torch.full_like(batch.row, 1 / tokens, dtype=torch.float32)
        return batch

    def verifier_step(self) -> Batch:
        """Returns the next pairs, as B times (y+, y-). Only a whole solution has an end token."""
        rows = self.from_epochs(self.saved["pairs"], self.state.global_step, "V")
        total = sum(row["weight"] for row in rows)  # of all processes
        mine = self.shard(rows)  # B
        prompts = [solve_prompt(row["question"]) for row in mine]
        ids = [[self.encode(r[y], r["ended"]) for y in ("chosen", "rejected")] for r in mine]
        batch = self.pairs("verifier", prompts, ids)
        weights = [row["weight"] / total for row in mine]
        batch.extras["weight"] = torch.tensor(weights).to(batch.row.device)  # (B,)
        return batch

    def loss(self, batch):
        """Returns a micro-batch's share of the mean over the step's tokens (generator) or over its
        parents (verifier), and what is shown.
        """
        if batch.player == "generator":
            logp, _ = self.score(batch)  # (b, T)
            likelihood = logp.sum(1)  # (b,)
            # loss = - SUM over rows of log G(y | x) / number of tokens
            loss = -(likelihood * batch.extras["weight"]).sum()
            return loss, {"logp": likelihood, "credit": logp}
        both = as_completions(batch)  # 2b rows: y+, y-, y+, ...
        logp, _ = self.score(both)  # (2b, T)
        with torch.no_grad(), self.playing(None):
            ref, _ = self.score(both)  # (2b, T)
        # r(x, y) = beta log(V(y | x) / base(y | x)), a sum over tokens
        r_plus, r_minus = chosen_and_rejected(self.cfg.beta * (logp - ref).sum(1))  # (b,) each
        # loss = - log sigmoid(r(x, y+) - r(x, y-))
        margin = r_plus - r_minus  # (b,)
        losses = -F.logsigmoid(margin)  # (b,)
        shown = {"pair_loss": losses, "pair_accuracy": margin > 0, "margin": margin}
        return (losses * batch.extras["weight"]).sum(), shown | {"credit": logp}

    def show_loss(self, batch, shown):
        super().show_loss(batch, shown)
        if batch.player == "generator":
            self.record_part(batch, shown["credit"], "log-likelihood", shown["logp"])
        else:
            margin, sides = shown["margin"], ["better", "worse"]
            self.record_part(batch, shown["credit"], "r+ - r-", margin, sides)

    # --- scores
    def scores(self, rows: list[dict]) -> list[float]:
        """Returns log V(y | x) of each row's solution or beginning, a sum over tokens."""
        if not rows:
            return []
        ids = [self.encode(row["solution"], row.get("ended", True)) for row in rows]
        batch = self.completions("verifier", [solve_prompt(row["question"]) for row in rows], ids)
        return self.log_probs("verifier", batch).sum(1).tolist()


# ------------------------------------------------------------------ evaluation
def step_figures(trainer: RStar, rows: list[dict]) -> dict[str, float]:
    """Compares right steps with wrong steps that go on from the same right steps. Returns how often
    the right step has the higher Q (after 4, 8, ... rollouts and after all of them) and the higher
    log V; ties count one half.

    rows: questions of the repository, whose steps have gold labels.
    """
    trees, figures, done, most = [{"": Node(False)} for _ in rows], {}, 0, trainer.cfg.samples
    for total in [n for n in (4, 8, 16, 32, 64) if n < most] + [most]:
        trainer.search(rows, trees, total - done)
        done, groups = total, []  # (a tree, siblings in it as rows, whether each is right)
        for question, tree in zip([row["question"] for row in rows], trees):
            for text, parent in tree.items():
                if all(gold_steps(question, text)):
                    right = [gold_steps(question, s)[-1] for s in parent.steps]
                    groups.append((question, tree, parent.steps, right))
        by_Q = [pairs_in_order(z, [tree[s].Q for s in steps]) for _, tree, steps, z in groups]
        figures[f"verifier/q_order_{total}"] = by_Q
    judged = [{"question": x, "solution": s, "ended": False} for x, _, ss, _ in groups for s in ss]
    log_V = iter(trainer.in_parallel(trainer.scores, judged))
    by_V = [pairs_in_order(z, [next(log_V) for _ in steps]) for _, _, steps, z in groups]
    figures["verifier/step_order"] = by_V
    return {name: mean(sum(its, [])) for name, its in figures.items() if any(its)}


def evaluate(trainer: RStar, held_out: list[dict]) -> dict[str, float]:
    """Has the verifier rank N solutions of every held-out question by the generator."""
    N = trainer.cfg.candidates
    _, greedy = solve(trainer, "generator", held_out, greedy=True)
    repeated = [row for row in held_out for _ in range(N)]
    solutions = trainer.in_parallel(trainer.sample_solutions, repeated)
    scores = trainer.in_parallel(trainer.scores, solutions)
    figures = {"generator/greedy": mean(greedy)} | ranking_figures(solutions, scores, N)
    labelled = [row for row in held_out if gold_steps(row["question"], "") is not None]
    return figures | (step_figures(trainer, labelled) if labelled else {})


# ------------------------------------------------------------------ main
CURVES = {
    "generator": ["generator/accuracy", "generator/greedy"],
    "verifier": ["verifier/step_order", "verifier/rank_agreement"],
    "best of several": ["co/majority", "co/oracle"],
}


def load(args: Args):
    return load_for_steps(args, args.pool)


def main(args: Args):
    launch(RStar, args, load=load, evaluate=evaluate, curves=CURVES)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
