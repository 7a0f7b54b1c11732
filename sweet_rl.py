r"""SWEET-RL: a critic that is shown the reference solution learns from pairs of whole dialogues and
ranks an actor's next turns (Zhou et al. 2025, arXiv:2503.15478).

    python sweet_rl.py                                    the small model on a CPU, 2 minutes
    python sweet_rl.py --no-privileged                    ablation: a critic that is shown nothing
    python sweet_rl.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k      one GPU

The loop; all texts are sampled once, from the base
    DIALOGUES = `start_dialogues`   k solutions o of every question; c is its reference solution
    CRITIC = `lesson`, `loss`       pairs (o+, o-) of one question: the best o with every worse o
        A(o_t)  = (1 / L_t) sum_l log[ pi_critic(o_tl | o_<t, c) / pi_ref(o_tl | o_<t, c) ]
        loss    = - log sigmoid(beta sum_t A(o+_t) - beta sum_t A(o-_t))
    TURNS = `start_actor`           n candidates at every turn of stored dialogues, ranked by A;
                                    pairs of a turn of the upper half and a turn of the lower half
    ACTOR = `lesson`, `loss`        never sees c;  r(a) = sum_l log[ pi_actor(a_l) / pi_ref(a_l) ]
        loss    = - log sigmoid(beta r(a+) - beta r(a-)) - 0.01 (mean of log pi_actor(a+) per token)

Our changes that matter (more in docs/sweet_rl.md)
    1. The turns are the steps of one solution, and its answer. Nobody replies between them.
    2. Critic and actor are LoRA adapters on one base, which is the reference of both.
    3. In the paper's formula, our default, pi_ref also sees c. The released code trains the critic
       so, but ranks turns with a pi_ref that does not see c: --critic-reference released.
    4. The script counts optimiser steps, and the paper counts epochs.

Shapes: B pairs, b of them in a micro-batch, N texts, T completion tokens.
"""

import random
from dataclasses import dataclass
from typing import Literal

from common.core.errors import UserError
from common.run.args import (
    Count,
    CountOrZero,
    GroupSize,
    RunArgs,
    Scale,
    Tokens,
    Weight,
    parse,
    per_model,
)


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    dataset: str = "tiny"
    """questions of the repository: tiny, tiny-hard, tiny-long; a hub id (openai/gsm8k) or a .jsonl
    file with question, answer and reference, the solution that the critic is shown"""
    steps: Count = 72
    """optimiser steps: the critic's, then the actor's"""
    critic_steps: CountOrZero = 48
    """how many of the steps are the critic's (paper: 4 epochs, 1 of the actor); with 0 A is 0,
    except with --critic-reference released"""
    questions: Count = 32
    """pairs per step and process (paper: 8)"""
    lr: Weight = per_model(tiny=3e-4, real=2e-5)
    """learning rate of the actor's adapter, constant (paper: 2e-7, all weights)"""
    critic_lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the critic's adapter, constant (paper: 2e-7, all weights)"""
    pool: Count = per_model(tiny=192, real=1024)
    """questions with dialogues (paper: 15,000 dialogues)"""
    samples: GroupSize = per_model(tiny=8, real=3)
    """k, dialogues of a question (released code: 3)"""
    candidates: GroupSize = 16
    """n, candidates for a turn (paper: 16)"""
    beta: Scale = 0.1
    """scale of the log-ratios in both losses (paper: 0.1)"""
    privileged: bool = True
    """ablation: the critic is not shown the reference solution"""
    critic_reference: Literal["privileged", "released"] = "privileged"
    """privileged: the base that the critic is compared with also sees the solution (paper);
    released: it sees the solution while the critic learns, but not where turns are ranked (released
    code)"""
    turn_mean: bool = True
    """ablation: A is a sum over the tokens of a turn, without 1 / L_t"""
    actor_pairs: Literal["turns", "dialogues"] = "turns"
    """baseline: the actor learns from pairs of whole dialogues, multi-turn DPO"""
    eval_questions: Count = per_model(tiny=96, real=128)
    """held-out questions"""
    solution_tokens: Tokens = per_model(tiny=80, real=1024)
    """length limit of a dialogue (paper: 16,384)"""
    turn_tokens: Tokens = per_model(tiny=20, real=256)
    """length limit of a candidate"""

    def check(self):
        if self.critic_steps > self.steps:
            raise UserError(f"--critic-steps {self.critic_steps} is over --steps {self.steps}.")


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.batch import Batch, as_completions, chosen_and_rejected, padded
from common.core.lists import chunk, mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import (
    SOLVED,
    evaluate_solver,
    is_correct,
    prompt,
    solve_prompt,
    step_ends,
)
from common.tasks.math import load_for_steps
from common.tasks.ranking import pairs_in_order
from common.tasks.references import check_references
from common.tasks.verdicts import WRONG
from common.tiny.tasks import gold_steps

import torch
import torch.nn.functional as F

NLL = 0.01  # weight of the chosen turn's likelihood in the actor's loss (paper: 0.01)
PAIRS_PER_TURN = 4  # drawn of the candidates (paper: 4)
RANKED = 20  # one dialogue of so many has its turns ranked (released code: the first tenth)


# ------------------------------------------------------------------ prompts and parsing
AGAIN = """You are given a problem, a right solution, and the numbers of its faulty steps, or the
word none. Write the solution again without these faults, in the same form: every step in its own
<step> </step> tags, then the answer."""


def critic_prompt(question: str, reference: str) -> list[dict]:
    """Returns the prompt with c. The small model copies a solution only if no fault is named."""
    return prompt(AGAIN, to_correct(question, reference.strip()), CORRECTED)


def to_correct(question: str, solution: str, defects: str = "none") -> str:
    return f"Problem: {question}\nSolution:\n{solution}\nDefects: {defects}\nCorrect it."


CORRECTED = [  # worked examples: a solution with a fault, and a solution without a fault
    (to_correct(SOLVED[1][0], WRONG, "2"), SOLVED[1][1]),
    (to_correct(*SOLVED[0]), SOLVED[0][1]),
]


def turns_of(ids: list[int], tokenizer) -> list[list[int]]:
    """Returns the tokens of every step, up to the end of its tag, and of what follows the last."""
    ends = [0, *(end + 1 for end in step_ends(ids, tokenizer)), len(ids)]
    return [ids[a:b] for a, b in zip(ends, ends[1:]) if a < b]


# ------------------------------------------------------------------ the paper's mathematics
def token_weights(prefix: list[int], turns: list[list[int]], turn_mean: bool) -> list[float]:
    """Returns the weight of each token's log-ratio in sum_t A: 1 / L_t, or 1; 0 in the prefix."""
    own = [1.0 / len(turn) if turn_mean else 1.0 for turn in turns for _ in turn]
    return [0.0] * len(prefix) + own


def preference_loss(chosen, rejected, beta: float) -> torch.Tensor:
    """(B,) sum_t A or r of the better text, and of the worse text -> (B,) losses."""
    # loss = - log sigmoid(beta sum_t A(o+_t) - beta sum_t A(o-_t))
    return -F.logsigmoid(beta * (chosen - rejected))


def best_against_worse(group: list[dict]) -> list[tuple[dict, dict]]:
    """Returns pairs of a question's best dialogue, if it is right, and every worse dialogue."""
    best = max(group, key=lambda row: row["reward"])
    worse = [row for row in group if row["reward"] < best["reward"]]
    return [(best, row) for row in worse] if best["reward"] >= 1 else []


def upper_against_lower(candidates: list, A: list[float], rng) -> list[tuple]:
    """Returns pairs, drawn with replacement, of a candidate of the upper half by A and a candidate
    of the lower half. Equal candidates count as often as they were written, but make no pair.
    """
    order, half = sorted(range(len(A)), key=lambda i: -A[i]), len(A) // 2
    drawn = [(rng.randrange(half), rng.randrange(half)) for _ in range(PAIRS_PER_TURN) if half]
    pairs = [(candidates[order[i]], candidates[order[-1 - j]]) for i, j in drawn]
    return [(a, b) for a, b in pairs if a != b]


# ------------------------------------------------------------------ the trainer
class SweetRL(CoTrainer):
    """`step` is the loop. `saved` holds, the same on all processes and all as token ids, the pairs
    of both players, the dialogues whose turns are ranked, and the held-out turns.

    A row is a question with its reference and what has `begun`, the tokens that are there already;
    a text is (row, token ids).
    """

    def __init__(self, *inputs):
        super().__init__(*inputs)
        self.saved = {"critic": None, "dialogues": [], "actor": None, "siblings": None}

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        T = args.solution_tokens
        return {
            "critic": Player([], args.critic_lr, T, reads=T, rows=2),
            "actor": Player([], args.lr, T, rows=2),
            "writer": Player([], args.lr, args.turn_tokens, reads=T, adapter="actor"),  # of a turn
        }

    def step(self, rows):
        """rows: not used, dialogues are sampled once."""
        if self.saved["critic"] is None:
            self.start_dialogues()
        if self.state.global_step < self.cfg.critic_steps:
            return [self.lesson("critic")]
        if self.saved["actor"] is None:
            self.start_actor()
        return [self.lesson("actor")]

    def lesson(self, player: str) -> Batch:
        """Returns the player's next pairs."""
        pairs = self.from_epochs(self.saved[player], self.state.global_step, player)
        mine = self.shard(pairs)  # B
        both = [(pair, pair[side]) for pair in mine for side in ("chosen", "rejected")]  # 2B
        ids = [pair["begun"] + text for pair, text in both]
        prompts = [self.prompt_of(player, pair) for pair in mine]
        batch = self.pairs(player, prompts, [*zip(ids[::2], ids[1::2])])
        shape = batch.completion_ids.shape  # (B, 2, T)
        of_tokens = self.texts(player, both, seen=player).token_extras
        batch.token_extras = {name: value.reshape(shape) for name, value in of_tokens.items()}
        return batch

    def loss(self, batch):
        """Returns a micro-batch's share of the mean over the step's pairs, and what is shown."""
        both = as_completions(batch)  # 2b rows: chosen, rejected, ...
        logp, _ = self.score(both)  # (2b, T)
        ref, weight = (batch.token_extras[n].flatten(0, 1) for n in ("ref", "weight"))  # (2b, T)
        share = (logp - ref) * weight  # (2b, T): of sum_t A, or of r
        chosen, rejected = chosen_and_rejected(share.sum(1))  # (b,) each
        losses = preference_loss(chosen, rejected, self.cfg.beta)  # (b,)
        if batch.player == "actor":  # its weights are 1
            likelihood = (logp * weight).sum(1) / weight.sum(1)  # (2b,), per token
            losses = losses - NLL * chosen_and_rejected(likelihood)[0]
        shown = {"margin": chosen - rejected, "pair_accuracy": chosen > rejected, "credit": share}
        return losses.sum() / self.questions_per_step, shown

    def show_loss(self, batch, shown):
        super().show_loss(batch, shown)
        share, sides = shown["credit"], [batch.player] * 2
        self.record_part(batch, share, "advantage", share.sum(1), sides, "share of the advantage")

    # --- advantages
    def prompt_of(self, player: str, row: dict) -> list[dict]:
        """Returns a player's prompt. Trap: c must never reach the actor, which acts without c."""
        if player == "critic" and self.cfg.privileged:
            return critic_prompt(row["question"], row["reference"])
        return solve_prompt(row["question"])

    def texts(self, player: str, texts: list[tuple[dict, list[int]]], seen: str) -> Batch:
        """Returns N texts, with the reference's log-probs and the tokens' weights, (N, T) each, in
        token_extras.

        Args:
            seen: the player whose prompt the reference sees
        """
        tokenizer, device = self.processing_class, self.accelerator.device
        ids = [row["begun"] + text for row, text in texts]
        batch, compared = (
            self.completions(player, prompts, ids)
            for prompts in ([self.prompt_of(p, row) for row, _ in texts] for p in (player, seen))
        )
        per_turn = player == "critic" and self.cfg.turn_mean
        weight = [token_weights(r["begun"], turns_of(t, tokenizer), per_turn) for r, t in texts]
        weight = torch.cat(padded([torch.tensor([x]) for x in weight], left=False)).to(device)
        batch.token_extras = {"ref": self.log_probs(None, compared), "weight": weight}
        return batch

    def advantages(self, turns: list[tuple[dict, list[int]]]) -> list[float]:
        """Returns A of each turn, by the critic as it is. What was sampled twice is scored once."""
        if not turns:
            return []
        keys = [(row["question"], *row["begun"], -1, *turn) for row, turn in turns]
        different = dict(zip(keys, turns))
        # as released, the reference sees c in `lesson`, but not here
        seen = "actor" if self.cfg.critic_reference == "released" else "critic"
        batch = self.texts("critic", [*different.values()], seen)
        # A = (1 / L) sum_l log[ pi_critic / pi_ref ]
        d = self.log_probs("critic", batch) - batch.token_extras["ref"]  # (N, T)
        A = dict(zip(different, (d * batch.token_extras["weight"]).sum(1).tolist()))
        return [A[key] for key in keys]

    def start_dialogues(self):
        """Samples the base's dialogues, and makes pairs of them."""
        k, pool = self.cfg.samples, self.cfg.pool
        dialogues = self.in_parallel(self.write, [r for r in self.train_rows for _ in range(k)])
        pairs = [pair for group in chunk(dialogues, k) for pair in best_against_worse(group)]
        if not pairs:
            raise UserError(f"--pool {pool}: no question has a right and a wrong dialogue.")
        count = -(-len(dialogues) // RANKED)  # rounded up
        self.saved["dialogues"] = random.Random(self.cfg.seed).sample(dialogues, count)
        self.saved["critic"] = [a | {"chosen": a["ids"], "rejected": b["ids"]} for a, b in pairs]
        self.log_mean("actor/accuracy", [row["reward"] for row in dialogues])

    def write(self, rows: list[dict]) -> list[dict]:
        """Returns a dialogue for each row's question, by the actor as it is."""
        written = self.generate_ids("actor", [solve_prompt(row["question"]) for row in rows])
        right = [is_correct(t, row["answer"]) for t, row in zip(self.decode(written), rows)]
        new = [{"begun": [], "ids": ids, "reward": float(x)} for ids, x in zip(written, right)]
        return [row | more for row, more in zip(rows, new)]

    # --- what the actor learns
    def start_actor(self):
        """Makes the actor's pairs: pairs of turns, or the critic's pairs of dialogues."""
        self.saved["actor"] = self.saved["critic"]
        if self.cfg.actor_pairs == "turns":
            places = [place for row in self.saved["dialogues"] for place in self.places(row)]
            found = self.in_parallel(self.turn_pairs, places)
            self.saved["actor"] = [pair for pairs in found for pair in pairs]
            self.report_pairs(self.saved["actor"])
        if not self.saved["actor"]:
            raise UserError(f"--candidates {self.cfg.candidates}: at no turn do two differ.")

    def places(self, dialogue: dict) -> list[dict]:
        """Returns the places where a turn of the dialogue begins."""
        turns = turns_of(dialogue["ids"], self.processing_class)
        return [dialogue | {"begun": sum(turns[:t], [])} for t in range(len(turns))]

    def turn_pairs(self, places: list[dict]) -> list[list[dict]]:
        """Returns for each place the pairs that the actor is taught there."""
        written, found = self.write_turns(places), []
        turns = [(place, turn) for place, some in zip(places, written) for turn in some]
        A = iter(self.advantages(turns))
        for place, some in zip(places, written):
            rng = random.Random(f"{self.cfg.seed} {place}")  # the names of its keys count as well
            pairs = upper_against_lower(some, [next(A) for _ in some], rng)
            found.append([place | {"chosen": a, "rejected": b} for a, b in pairs])
        return found

    def write_turns(self, places: list[dict]) -> list[list[list[int]]]:
        """Returns the candidates of each place, by the actor as it is, without cut candidates."""
        n, tokenizer = self.cfg.candidates, self.processing_class
        rows = [place for place in places for _ in range(n)]
        prompts = [solve_prompt(row["question"]) for row in rows]
        written = self.generate_ids("writer", prompts, prefix=[row["begun"] for row in rows])
        turns, ends = [turns_of(ids, tokenizer)[0] for ids in written], self.eos_token_ids
        whole = [turn if turn[-1] in ends or step_ends(turn, tokenizer) else [] for turn in turns]
        return [[turn for turn in some if turn] for some in chunk(whole, n)]

    # --- what is logged and shown; no method below affects training
    def label(self, place: dict, turn: list[int]) -> bool | None:
        """Returns the gold label of a turn; None if it is no step or its question has no labels."""
        prefix, text = self.decode([place["begun"], turn])
        labels = gold_steps(place["question"], prefix + text)
        return labels[-1] if labels and text.endswith("</step>") else None

    def report_pairs(self, pairs: list[dict]):
        """Logs how often the turns that win are right, and the turns that lose."""
        self.log_mean("co/turn_pairs", len(pairs))
        for side in ("chosen", "rejected"):
            labels = [self.label(pair, pair[side]) for pair in pairs]
            self.log_mean(f"co/{side}_right", [label for label in labels if label is not None])


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: SweetRL, held_out: list[dict]) -> dict[str, float]:
    """Measures the actor, and how the critic orders sibling turns, the base's at one place."""
    figures, _, _ = evaluate_solver(trainer, "actor", held_out)
    if trainer.saved["siblings"] is None:  # step 0, when the actor is the base
        trainer.saved["siblings"] = siblings(trainer, held_out)
    places = trainer.saved["siblings"]
    turns = [(place, turn) for place in places for turn in place["turns"]]
    A, found = iter(trainer.in_parallel(trainer.advantages, turns)), {"": [], "_off_track": []}
    for place in places:
        in_order = pairs_in_order(place["right"], [next(A) for _ in place["turns"]])
        found[""] += in_order
        found["_off_track"] += in_order if place["off_track"] else []
    return figures | {f"critic/siblings{name}": mean(x) for name, x in found.items() if x}


def siblings(trainer: SweetRL, held_out: list[dict]) -> list[dict]:
    """Returns places in a dialogue of each question with gold labels, and different candidates
    there. All of them are steps; some are right and some are wrong. off_track: an earlier step is
    wrong.
    """
    written = trainer.in_parallel(trainer.write, held_out)
    places = [place for row in written for place in trainer.places(row)]
    found = []
    for place, written in zip(places, trainer.in_parallel(trainer.write_turns, places)):
        turns = [*map(list, dict.fromkeys(map(tuple, written)))]
        right = [trainer.label(place, turn) for turn in turns]
        if {*right} == {True, False}:
            before = gold_steps(place["question"], *trainer.decode([place["begun"]]))
            found.append(place | {"turns": turns, "right": right, "off_track": not all(before)})
    return found


# ------------------------------------------------------------------ main
CURVES = {
    "critic": ["critic/pair_accuracy", "critic/siblings"],
    "actor": ["actor/pair_accuracy", "actor/accuracy", "actor/greedy"],
    "turns that win and lose": ["co/chosen_right", "co/rejected_right"],
}


def load(args: Args):
    train, held_out = load_for_steps(args, args.pool)
    check_references(train + held_out, args.dataset)
    train, held_out = ([r for r in part if r["reference"].strip()] for part in (train, held_out))
    if not (train and held_out):
        raise UserError(f"--dataset {args.dataset}: a part has no question with a reference.")
    return train, held_out


def main(args: Args):
    launch(SweetRL, args, load=load, evaluate=evaluate, curves=CURVES)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
