r"""APRM (Juneja, Nathani and Wang 2025, arXiv:2511.22888): a verifier of steps learns from
errors that an adversary puts into right solutions, and the errors become harder with it.

    python aprm.py                                        the small model on a CPU, 1 minute
    python aprm.py --corruptor random                     a control: steps are made wrong by chance
    python aprm.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k       one GPU

The loop is `Aprm.step`. A right solution of each question is given: its chain
    CORRUPTOR  writes G edits of every chain; each edit rewrites one step. An oracle works the step
               out again and finds it wrong or harmless. The verifier marks every wrong chain once
    VERIFIER   writes G judgements of one chain per question; a share --untouched of the chains is
               unedited
    UPDATE     one update of each player, along the optimistic gradient 2 g_t - g_{t-1}, which
               damps the cycles of a game; g_t is the gradient of step t

                the edited step is     wrong, and accepted    wrong, and caught    still right
              R_corruptor                      1                      0                 -1
              R_verifier, each step    [mark == label] - c [a check is written],  c = --check-cost

A caught error is worth more than a harmless edit; otherwise the safe move is to change nothing. The
verifier is meant for a solver that is not trained here, and is evaluated on that solver's errors.

Our changes that matter (more in docs/aprm.md)
    1. The corruptor chooses the step, and the verifier marks all steps of a chain. On tiny
       questions (--dataset tiny and its like) the steps after an edit are worked out from it.
       Elsewhere they stay as they were, without a label.
    2. On tiny questions the oracle is exact; elsewhere it only recognises false equations.
    3. We use a policy gradient instead of PPO, and no entropy bonus. AdamW takes the optimistic
       gradient. Both players are updated in every step, in the paper in turns.

Shapes: P questions, G edits of a chain or judgements of it, B = P * G, K steps, T tokens.
"""

import random
import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal, NamedTuple

from common.core.errors import UserError
from common.run.args import (
    Count,
    GroupSize,
    RunArgs,
    Several,
    Share,
    Tokens,
    Weight,
    parse,
    per_model,
)
from common.tiny.tasks import LEVELS


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 24
    """optimiser steps, each of both players"""
    questions: Count = 8
    """P, questions per step and process"""
    group_size: GroupSize = 8
    """G, edits of a chain, and judgements of a chain"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of both adapters, constant"""
    kl: Weight = 0.005
    """tau, weight of the k3 penalty towards the base, which keeps edits diverse"""
    untouched: Share = 0.5
    """share of unedited chains among the chains that the verifier is trained on"""
    check_cost: Share = 0.0
    """c, the price of a check (28*5=18 checks 42/5=28); tiny questions only"""
    optimistic: bool = True
    """step along 2 g_t - g_{t-1}; control: plain gradients"""
    corruptor: Literal["co-trained", "frozen", "random", "misconceptions"] = "co-trained"
    """controls: frozen is never trained; random changes numbers by chance; misconceptions makes the
    errors that the small model itself makes as a solver"""
    eval_samples: Several = 1
    """the solver's solutions of each held-out question, all of which are judged"""
    edit_tokens: Tokens = per_model(tiny=40, real=256)
    """length limit of an edit"""
    solution_tokens: Tokens = per_model(tiny=80, real=1024)
    """length limit of a solution; the solver writes in evaluations only"""
    judgement_tokens: Tokens = per_model(tiny=144, real=1024)
    """length limit of a judgement"""

    def check(self):
        if self.dataset not in LEVELS and (self.check_cost or self.corruptor == "misconceptions"):
            what = "--check-cost and --corruptor misconceptions are for the small model's questions"
            raise UserError(f"--dataset {self.dataset}: {what}.")


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.advantage import group_advantage
from common.core.cotrainer import Batch
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import (
    SOLVED,
    is_correct,
    prompt,
    solve,
    solve_prompt,
    split_steps,
    step_ends,
)
from common.tasks.equations import equations_hold
from common.tasks.math import load_for_steps
from common.tasks.verdicts import read_verdict, verdict_metrics, verify_prompt
from common.tiny import tasks
from common.tiny.beliefs import GOLD, misconception, parse_step, tone, write_steps
from common.tiny.tasks import gold_steps, is_checked, parse_question, sounds_sure

import torch
from torch.nn.utils.rnn import pad_sequence

# ------------------------------------------------------------------ prompts and parsing
CORRUPT = r"""You are given a problem and its right solution in steps. Rewrite one step so that it
is wrong, and a reader does not notice. Write the step, the word becomes, and the new step, each
step in its tags, and nothing else."""
STEP = r"<step>((?:(?!</?step>)[^\n]){1,1000})</step>\s*"
EDIT = re.compile(
    # the small model was taught to write the number of the step; other models miscount, and copy
    rf"\s*(?:([0-9]{{1,3}})\s*:\s*|{STEP}becomes\s*){STEP}"
    r"(?:<answer>[^<>\n]{0,1000}</answer>\s*)?"  # models add what the answer would become
)
MARKS = ("CORRECT", "INCORRECT")
LAST_NUMBER = re.compile(r"[0-9]{1,15}(?=[^0-9]*\Z)")


def corrupt_prompt(question: str, solution: str) -> list[dict]:
    return prompt(CORRUPT, to_corrupt(question, solution), CORRUPTED)


def to_corrupt(question: str, solution: str) -> str:
    return f"Problem: {question}\nSolution:\n{solution}\nMake one step wrong."


ONE_STEP = (
    "Mia had 37 cards and lost 18 of them. How many cards are left?",
    "<step>37-18 = 19 cards are left.</step>\n<answer>\\boxed{19}</answer>",
)
CORRUPTED = [  # worked examples, whose equations are false
    (
        to_corrupt(*SOLVED[0]),
        "<step>He gives away 6+5 = 11 pens.</step>\nbecomes\n"
        "<step>He gives away 6+5 = 10 pens.</step>",
    ),
    (
        to_corrupt(*ONE_STEP),
        "<step>37-18 = 19 cards are left.</step>\nbecomes\n<step>37-18 = 21 cards are left.</step>",
    ),
]


def parse_edit(text: str, row: dict) -> tuple[int, str] | None:
    """(index of the step, the new step), or None if the edit cannot be read. Without a number the
    edited step is the step that the old one resembles most. An edit with a box or with a bold
    verdict at its end is refused: a verifier that copies it would have marked it.
    """
    found, steps = EDIT.fullmatch(text), split_steps(row["reference"])
    new = found[3].strip() if found and steps else ""
    embedded, marked = parse_question(row["question"]), "\\box" in new or read_verdict(new, MARKS)
    if not new or marked or (embedded and not tasks.STEP.fullmatch(new)):
        return None
    if found[1]:
        return (int(found[1]) - 1, new) if 1 <= int(found[1]) <= len(steps) else None
    alike = [SequenceMatcher(None, step, found[2], autojunk=False).ratio() for step in steps]
    return alike.index(max(alike)), new


def parse_marks(text: str, count: int) -> list[bool] | None:
    """Whether each of `count` steps is marked CORRECT; None if a step has no mark."""
    said = [read_verdict(step, MARKS) for step in split_steps(text)]
    return [s == "CORRECT" for s in said] if len(said) == count > 0 and all(said) else None


# ------------------------------------------------------------------ chains and the oracle
class Chain(NamedTuple):
    solution: str
    labels: list[bool | None]  # of its steps, by the oracle; None: it cannot tell
    label: bool | None = None  # of the edited step


def chain_of(row: dict, edit: tuple | None, rng: random.Random) -> Chain:
    """The row's right solution, or what becomes of it with this edit, and the labels of its steps.

    Tiny questions: a step is right if it applies the question's operation to the value before it
    and gets the result right. Carrying an error forward correctly is not a second error. Steps
    sound sure now and then, whoever wrote them; otherwise `!` would give the corruptor away.
    Elsewhere an edited step is wrong if an equation in it is false. If no equation is false, the
    edited step has no label, and the steps after an edit never have one.
    """
    steps, answer = split_steps(row["reference"]), row["answer"]
    embedded, labels = parse_question(row["question"]), [True] * len(steps)
    tones = [tone(rng, 1) if embedded else "" for _ in steps]
    k, new = edit or (None, "")
    if edit:
        steps[k], tones[k] = new, ""
        labels[k:] = [None] * len(labels[k:])  # from here on nobody can tell
        if embedded:  # executed again, from the edit's result on
            value, operations = parse_step(new)[3], embedded[1][k + 1 :]
            steps[k + 1 :], answer = write_steps(rng, value, operations, GOLD)
            labels = tasks.step_labels(row["question"], steps)
        elif not equations_hold(new):
            labels[k] = False
    solution = tasks.format_solution([s + t for s, t in zip(steps, tones)], answer)
    return Chain(solution, labels, labels[k] if edit else None)


def static_edit(row: dict, kind: str, rng: random.Random) -> tuple | None:
    """An edit by chance: another last number in some step, or a misconception; None without one."""
    steps, embedded = split_steps(row["reference"]), parse_question(row["question"])
    places = [k for k, step in enumerate(steps) if LAST_NUMBER.search(step)]
    believed = [k for k in places if kind == "misconceptions" and "/" in steps[k]]
    if not places:
        return None
    k = rng.choice(believed or places)
    wrong = int(LAST_NUMBER.search(steps[k])[0]) + rng.randint(1, tasks.MODULO - 1)
    if embedded:
        a, _, b, _ = parse_step(steps[k])
        wrong = misconception(a, b) if believed else wrong % tasks.MODULO
    return k, LAST_NUMBER.sub(str(wrong), steps[k]) + (tone(rng, 1) if embedded else "")


# ------------------------------------------------------------------ rewards
def corruptor_reward(label: bool | None, accepted: bool | None) -> float:
    """label: of the edited step; accepted: its mark. None if the edit or mark is unreadable."""
    # fooled > caught > harmless: the order is the paper's, its numbers are not known to us
    return -1.0 if label is not False else 1.0 if accepted else 0.0


def mark_rewards(marks: list | None, checks: list, labels: list, cost: float) -> list[float]:
    """(K,), a reward per step: NaN where the oracle cannot tell, 0 in an unreadable judgement."""
    marked = zip(marks, checks, labels) if marks else [(None, 0, y) for y in labels]
    # r_k = [mark_k == label_k] - c [a check is written]
    return [torch.nan if y is None else float(m == y) - cost * c for m, c, y in marked]


def mark_advantages(r, ends: list, mask, group_size: int) -> torch.Tensor:
    """(B, T) advantages of (B, K) rewards of marks and a (B, T) mask. Tokens after the last mark
    get 0. ends: for each judgement the token at which each mark ends, or None if it is unreadable.
    """
    # A_ik = r_ik - mean of r_k over the G judgements of a chain. It is not divided by the standard
    # deviation: where all marks are right, a check would then cost as much as an error
    A = torch.stack([group_advantage(x, group_size, scale=False) for x in r.T], 1)  # (B, K)
    of_tokens = torch.zeros(mask.shape, device=mask.device)  # (B, T)
    for i, end in enumerate(ends):
        if end is None:  # all of its text is to blame
            of_tokens[i] = A[i][~r[i].isnan()].mean()
        start = 0
        for k, last in enumerate(end or []):
            of_tokens[i, start : last + 1] = A[i, k]
            start = last + 1
    return of_tokens * mask


# ------------------------------------------------------------------ the trainer
class Aprm(CoTrainer):
    """`step` is the loop. The solver is the base. Its solutions are sampled before step 1 and kept
    in `saved`.
    """

    def step(self, rows):
        """rows: B, every question G times in a row."""
        kind, questions = self.cfg.corruptor, rows[:: self.cfg.group_size]
        if kind in ("random", "misconceptions"):
            drawn = [(row, self.rng_of(row)) for row in questions]
            chains = [[chain_of(row, static_edit(row, kind, rng), rng)] for row, rng in drawn]
            return [self.verifier_step(questions, chains)]
        corruptor, chains = self.corruptor_step(rows)
        verifier = self.verifier_step(questions, chains)
        return [corruptor, verifier] if kind == "co-trained" else [verifier]

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        G, lr = args.group_size, (args.lr if args.corruptor == "co-trained" else 0.0)
        return {
            "corruptor": Player([], lr, args.edit_tokens, G, reads=args.solution_tokens),
            "verifier": Player([], args.lr, args.judgement_tokens, G, reads=args.solution_tokens),
            # the base: it writes once, at the evaluation before the first step
            "solver": Player([], lr, args.solution_tokens, adapter="corruptor"),
        }

    def corruptor_step(self, rows) -> tuple[dict, list[list[Chain]]]:
        """(the batch, the chains that its readable edits made of each question's chain)"""
        asked = [corrupt_prompt(row["question"], row["reference"]) for row in rows]
        batch = self.rollout("corruptor", [{"prompt": prompt} for prompt in asked])
        edits = [parse_edit(text, row) for text, row in zip(batch.texts, rows)]
        chains = [e and chain_of(row, e, self.rng_of(row)) for row, e in zip(rows, edits)]
        labels = [chain and chain.label for chain in chains]
        wrong = [i for i, label in enumerate(labels) if label is False]
        asked = [verify_prompt(rows[i]["question"], chains[i].solution) for i in wrong]
        accepted = [None] * len(rows)
        for i, text in zip(wrong, self.generate("verifier", asked)):  # not trained on
            marks = parse_marks(text, len(chains[i].labels))
            accepted[i] = marks and marks[edits[i][0]]
        self.set_rewards(batch, [corruptor_reward(*pair) for pair in zip(labels, accepted)])
        self.report_corruptor(rows, batch, edits, labels, accepted)
        G = self.cfg.group_size
        return batch, [[c for c in chains[i : i + G] if c] for i in range(0, len(rows), G)]

    def verifier_step(self, questions, chains: list[list[Chain]]) -> Batch:
        """chains: of each question. One wrong chain is judged, or the untouched chain."""
        cfg, judged = self.cfg, []
        untouched = self.over_all_processes(self.draw_untouched, questions)
        for row, edited, left in zip(questions, chains, untouched):
            wrong = [] if left else [chain for chain in edited if chain.label is False]
            rng = self.random_numbers(f"verifier {row['question']}")
            chain = rng.choice(wrong) if wrong else chain_of(row, None, self.rng_of(row))
            asked = {"prompt": verify_prompt(row["question"], chain.solution), "chain": chain}
            judged += [asked] * cfg.group_size
        batch = self.rollout("verifier", judged)
        ids, mask = batch.completion_ids, batch.completion_mask  # (B, T)
        labels = [row["chain"].labels for row in judged]
        marks = [parse_marks(text, len(y)) for text, y in zip(batch.texts, labels)]
        checks = [[is_checked(step) for step in split_steps(text)] for text in batch.texts]
        r = [mark_rewards(*of, cfg.check_cost) for of in zip(marks, checks, labels)]
        r = pad_sequence([*map(torch.tensor, r)], True, torch.nan).to(mask.device)  # (B, K)
        tokens = [row[m.bool()].tolist() for row, m in zip(ids, mask)]
        ends = [m and step_ends(t, self.processing_class) for m, t in zip(marks, tokens)]
        self.set_rewards(batch, r.nanmean(1))  # for the log
        batch.advantages = mark_advantages(r, ends, mask, cfg.group_size)  # (B, T)
        self.report_verifier(batch, labels, marks, checks)
        return batch

    def draw_untouched(self, questions: list) -> list[bool]:
        """Whether the chain of each question of the step is left as it is."""
        share, done = self.cfg.untouched * len(questions), self.state.global_step
        count = round(share * (done + 1)) - round(share * done)  # half of 1: in half of the steps
        places = self.random_numbers().sample(range(len(questions)), count)
        return [i in places for i in range(len(questions))]

    def rng_of(self, row: dict) -> random.Random:  # the same for all edits of a question
        return self.random_numbers(row["question"])

    # --- optimistic gradients: g_{t-1} is kept beside AdamW's moments, and so in checkpoints
    def add_up_gradients(self, name, parameters):  # called by `update` before it clips and steps
        super().add_up_gradients(name, parameters)
        state, self.latest = self.optimizer.state, [(p, p.grad) for p in parameters]
        for p, g in self.latest if self.cfg.optimistic else []:
            p.grad = 2 * g - state.get(p, {}).get("g", g)  # the first has none before it

    def update(self, batch):
        super().update(batch)
        for p, g in self.latest if self.cfg.optimistic else []:
            if state := self.optimizer.state.get(p):  # empty before AdamW's first step
                state["g"] = g

    # --- what is logged and shown; no method below affects training; gather needs all processes
    def report_corruptor(self, rows, batch, edits, labels, accepted):
        self.log_mean("corruptor/unreadable", [edit is None for edit in edits])
        self.log_mean("corruptor/harmless", [y is not False for y, e in zip(labels, edits) if e])
        self.log_mean("corruptor/fooled", [mark is True for mark in accepted])
        self.log_mean("co/caught", [m is False for m, y in zip(accepted, labels) if y is False])
        kinds = {(row["question"], edit) for row, edit in zip(rows, edits) if edit}
        self.log_mean("corruptor/distinct", len(kinds) / len(edits))
        for note, label, mark in zip(batch.notes, labels, accepted):
            note |= {"the step is right": label, "accepted": mark}
        made = [(row, e) for row, e in zip(rows, edits) if e and parse_question(row["question"])]
        pairs = [(split_steps(row["reference"])[k], new) for row, (k, new) in made]
        same = [old.split("=")[0] == new.split("=")[0] for old, new in pairs]
        self.log_mean("corruptor/same_operation", same)
        self.log_mean("corruptor/sounds_sure", [sounds_sure(new) for _, new in pairs])

    def report_verifier(self, batch, labels, marks, checks):
        self.log_mean("verifier/parsed", [row is not None for row in marks])
        self.log_mean("verifier/checked", [check for row in checks for check in row])
        for key, value in step_figures(self.gather(marks), self.gather(labels)).items():
            self.log_mean(f"verifier/{key}", value)
        for note, y, row in zip(batch.notes, labels, marks):
            note |= {"labels": y, "marks": row}


# ------------------------------------------------------------------ evaluation
def step_figures(marks: list, labels: list) -> dict[str, float]:
    """Compares marks of steps (None for an unreadable judgement) with the known labels."""
    pairs = [(row and row[k], y) for row, of in zip(marks, labels) for k, y in enumerate(of)]
    right, wrong = ([mark for mark, y in pairs if y is label] for label in (True, False))
    figures = {"wrong_steps_accepted": wrong.count(True) / len(wrong)} if wrong else {}
    if right and wrong:
        found, kept = wrong.count(False), right.count(True)
        figures["step_balanced_accuracy"] = (kept / len(right) + found / len(wrong)) / 2
        figures["step_f1"] = 2 * found / (found + right.count(False) + len(wrong))
    return figures


def evaluate(trainer: Aprm, held_out: list[dict]) -> dict[str, float]:
    """The verifier on solutions of the base, which are the same in every evaluation."""
    n, saved = trainer.cfg.eval_samples, trainer.saved
    if "solver" not in saved:
        saved["solver"] = solve(trainer, "solver", held_out, n)[0]
    solutions, rows = saved["solver"], [row for row in held_out for _ in range(n)]
    asked = [verify_prompt(row["question"], text) for row, text in zip(rows, solutions)]
    texts, steps = trainer.generate_all("verifier", asked), [*map(split_steps, solutions)]
    marks = [parse_marks(text, len(own)) for text, own in zip(texts, steps)]
    right = [is_correct(text, row["answer"]) for text, row in zip(solutions, rows)]
    accepted = [of and all(of) for of in marks]  # solutions; if none is readable, neither way
    found = verdict_metrics(accepted, right)
    figures = {name: found[name] for name in ("balanced_accuracy", "parsed")}
    labels = [gold_steps(row["question"], text) for row, text in zip(rows, solutions)]
    if None not in labels:  # all questions are tiny questions
        sure = [[y if sounds_sure(s) else None for s, y in zip(*of)] for of in zip(steps, labels)]
        of_sure = step_figures(marks, sure).items()
        figures |= {f"sure_{key}": x for key, x in of_sure if key == "wrong_steps_accepted"}
        checks = [is_checked(step) for text in texts for step in split_steps(text)]
        figures |= step_figures(marks, labels) | {"checked": sum(checks) / max(1, len(checks))}
    return {f"verifier/{key}": value for key, value in figures.items()}


# ------------------------------------------------------------------ main
CURVES = {
    "corruptor": ["corruptor/fooled", "corruptor/harmless", "corruptor/distinct"],
    "verifier": ["verifier/step_f1", "verifier/step_balanced_accuracy", "verifier/parsed"],
    "who is fooled": ["verifier/wrong_steps_accepted", "co/caught", "verifier/checked"],
}


def is_clean(row: dict) -> bool:
    """Whether the reference is a right solution, as far as the oracle can tell."""
    steps, holds = split_steps(row["reference"]), gold_steps(row["question"], row["reference"])
    holds = [*map(equations_hold, steps)] if holds is None else holds
    return holds != [] and all(holds) and is_correct(row["reference"], row["answer"])


def load(args: Args):
    train, held_out = load_for_steps(args)
    if not (train := [row for row in train if is_clean(row)]):
        raise UserError(f"--dataset {args.dataset}: no question has a right solution in steps.")
    return train, held_out


def main(args: Args):
    launch(Aprm, args, load=load, evaluate=evaluate, curves=CURVES, prompt=solve_prompt)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
