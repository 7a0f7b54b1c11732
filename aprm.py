r"""APRM (Juneja, Nathani and Wang 2025, arXiv:2511.22888): a verifier of steps that learns from
errors which an adversary puts into right solutions, harder ones as it gets better.

    python aprm.py                                        the embedded model on a CPU, 2 minutes
    python aprm.py --corruptor random                     as many wrong steps, by chance
    python aprm.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k       one GPU, 4-bit

The loop is `Aprm.step`. A right solution of each question is given, and is called its chain
    CORRUPTOR  G edits of every chain, each rewrites one step. An oracle works the step out again:
               wrong or harmless. The verifier marks the steps of every chain that is wrong, once
    VERIFIER   a chain per question, --untouched of them as they were; G judgements of each
    UPDATE     one of each player, by --optimistic along 2 g_t - g_{t-1}

                the edited step is     wrong, and accepted    wrong, and caught    still right
              R_corruptor                      1                      0                 -1
              R_verifier, of each step         1 if its mark is the oracle's label, else 0;
                                               minus --check-cost where it has written a check

A caught error is worth more than a harmless edit: otherwise the safe move is to change nothing.
What is wanted is the verifier, and for a solver that nobody trains here. So it is measured on this
solver's errors, never on the corruptor's; the corruptor is thrown away.

What we changed and it matters (the full list is in docs/aprm.md)
    1. The verifier reads a whole chain and marks all steps; each mark is credited with its own
       reward. On embedded questions what follows the edit is worked out from it, so that one step
       is wrong; elsewhere it stays as it was, and nobody is rewarded for its marks.
    2. The oracle knows all of embedded questions. Elsewhere it sees a false equation, nothing else.
    3. Policy gradient instead of PPO, and no entropy bonus; AdamW takes the optimistic gradient.

Shapes: P questions, G edits of a chain or judgements of it, B = P * G, K steps, T tokens.
"""

import random
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from common.advantage import group_advantage
from common.args import Count, GroupSize, RunArgs, Share, Tokens, Weight, per_model
from common.cotrainer import CoTrainer, Player
from common.errors import UserError
from common.launch import launch
from common.run import mean, plain_errors
from common.tasks.answers import boxed, is_correct, prompt, solve, solve_prompt
from common.tasks.answers import split_steps, step_ends
from common.tasks.equations import equations_hold
from common.tasks.math import load_questions
from common.tasks.verdicts import read_verdict
from common.tiny.demonstrations import GOLD, misconception, parse_step, tone, write_steps
from common.tiny.tasks import LEVELS, MODULO, STEP, format_solution, gold_steps
from common.tiny.tasks import is_checked, parse_question, sounds_sure, step_labels

import torch
import tyro


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, out, seed, micro_batch, eval_every, ...: common/args.py
    dataset: str = "tiny"
    """embedded questions: tiny, tiny-hard, tiny-long; a hub id (openai/gsm8k) or a .jsonl file with
    question, answer and reference, a right solution"""
    steps: Count = 24
    """optimiser steps, each of both players"""
    questions: Count = 8
    """P, questions per step and process"""
    group_size: GroupSize = 8
    """G, edits of a chain, and judgements of a chain"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of both adapters, constant"""
    kl: Weight = 0.005
    """tau, weight of the k3 penalty towards the base; without it the corruptor knows one trick"""
    untouched: Share = 0.5
    """share of the chains that the verifier is trained on as they were"""
    check_cost: Share = 0.0
    """what a check costs the verifier (42/5=28:28*5=18 has one); embedded questions only"""
    optimistic: bool = True
    """step along 2 g_t - g_{t-1}; its control is plain gradients"""
    corruptor: Literal["co-trained", "frozen", "random", "misconceptions"] = "co-trained"
    """controls: never trained; or in its place as many wrong steps, by random numbers or by what
    the embedded solver gets wrong"""
    edit_tokens: Tokens = per_model(tiny=40, real=256)
    """length limit of an edit"""
    solution_tokens: Tokens = per_model(tiny=80, real=1024)
    """length limit of a solution, which is written in evaluations only"""
    judgement_tokens: Tokens = per_model(tiny=144, real=1024)
    """length limit of a judgement"""

    def check(self):
        embedded = self.dataset in LEVELS
        if self.corruptor == "misconceptions" and not embedded:
            raise UserError(f"--corruptor misconceptions: nobody knows those of {self.dataset}.")
        if self.check_cost and not embedded:
            raise UserError(
                f"--check-cost {self.check_cost}: what a check is can be told on embedded "
                f"questions only, not on {self.dataset}."
            )


FOOLED, CAUGHT, HARMLESS = 1.0, 0.0, -1.0  # the paper's order; its numbers are not known to us

# ------------------------------------------------------------------ prompts and parsing
CORRUPT = r"""You are given a problem and its right solution in steps. Rewrite one step so that it is
wrong, and so that a reader will not notice. Write the number of the step, a colon, and the new step
in its tags, and nothing else, like this: 2:<step>3*4 = 14</step>"""
VERIFY = r"""You are given a problem and a solution in numbered steps. Check the steps one after the
other, by your own calculation. Write one <step> </step> block for each step of the solution, ending
in its verdict, \boxed{CORRECT} or \boxed{INCORRECT}, then the verdict on the solution as a whole,
in exactly this form:
<step_verification>
<step>3*2 is 6, as the step says. \boxed{CORRECT}</step>
</step_verification>
<final_verification>\boxed{CORRECT}</final_verification>"""
VERDICTS = ("CORRECT", "INCORRECT")
EDIT = re.compile(r"\s*([0-9]{1,3})\s*:\s*<step>((?:(?!</?step>)[^\n]){1,1000})</step>\s*")
LAST = re.compile(r"[0-9]{1,15}(?=[^0-9]*\Z)")  # number of a step


def corrupt_prompt(question: str, solution: str) -> list[dict]:
    return prompt(CORRUPT, f"Problem: {question}\nSolution:\n{solution}\nMake one step wrong.")


def verify_prompt(question: str, solution: str) -> list[dict]:
    """The verifier never sees the step as it was."""
    count = len(split_steps(solution))
    return prompt(VERIFY, f"Problem: {question}\nSolution:\n{solution}\nVerify its {count} steps.")


class Edit(NamedTuple):
    place: int  # of the step, from 0 on
    step: str  # as it is now


def parse_edit(text: str, row: dict) -> Edit | None:
    """None unless the text is one step of the row's chain and nothing else. One that holds a
    verdict speaks to the verifier; on embedded questions it must be a step as solvers write them.
    """
    found = EDIT.fullmatch(text)
    step = found[2].strip() if found else ""
    if not step or not 1 <= int(found[1]) <= len(split_steps(row["reference"])):
        return None
    if "\\box" in step or (parse_question(row["question"]) and not STEP.fullmatch(step)):
        return None
    return Edit(int(found[1]) - 1, step)


def parse_marks(text: str, count: int) -> list[bool] | None:
    """Whether each of a solution's steps is marked CORRECT; None unless all of them have a mark."""
    said = [read_verdict(step, VERDICTS) for step in split_steps(text)]
    return [s == "CORRECT" for s in said] if len(said) == count and all(said) else None


# ------------------------------------------------------------------ chains and the oracle
class Chain(NamedTuple):
    solution: str
    labels: list[bool | None]  # of its steps, by the oracle; None: it cannot tell
    place: int | None = None  # of the edited step

    @property
    def wrong(self) -> bool:
        return self.place is not None and self.labels[self.place] is False


def chain_of(row: dict, edit: Edit | None, rng: random.Random) -> Chain:
    """The row's right solution, or what becomes of it with this edit, and the labels.

    Embedded: a step is right if it applies the question's operation to the value before it and gets
    the result right. So a right result of another operand is wrong, and whoever carries an error on
    rightly makes no second one. Steps sound sure now and then, whoever wrote them: else `!` would
    give the corruptor away. Elsewhere a step is wrong if an equation in it is false, right if it is
    the step as it was, and nobody can tell otherwise, nor what has become of those after it.
    """
    steps, answer = split_steps(row["reference"]), boxed(row["reference"])
    labels, place = [True] * len(steps), edit and edit.place
    embedded = parse_question(row["question"])
    tones = [tone(rng, 1) if embedded else "" for _ in steps]
    if edit:
        old, steps[place], tones[place] = steps[place], edit.step, ""
        if embedded:  # executed again, from the edit's result on
            result = parse_step(edit.step)[3]
            steps[place + 1 :], answer = write_steps(rng, result, embedded[1][place + 1 :], GOLD)
            labels = step_labels(row["question"], steps)
        else:
            same = True if edit.step == old.strip() else None
            labels[place] = same if equations_hold(edit.step) else False
            labels[place + 1 :] = [None] * len(labels[place + 1 :])
    return Chain(format_solution([s + t for s, t in zip(steps, tones)], answer), labels, place)


def static_edit(row: dict, kind: str, rng: random.Random) -> Edit | None:
    """A step whose last number is wrong by chance, or a misconception; None without a number."""
    steps, embedded = split_steps(row["reference"]), parse_question(row["question"])
    places = [k for k, step in enumerate(steps) if LAST.search(step)]
    quotients = [k for k in places if kind == "misconceptions" and "/" in steps[k]]
    if not places:
        return None
    place = rng.choice(quotients or places)
    number = int(LAST.search(steps[place])[0])
    wrong = (
        (number + rng.randint(1, MODULO - 1)) % MODULO if embedded else number + rng.randint(1, 9)
    )
    if quotients:
        a, _, b, _ = parse_step(steps[place])
        wrong = misconception(a, b)
    return Edit(place, LAST.sub(str(wrong), steps[place]) + (tone(rng, 1) if embedded else ""))


# ------------------------------------------------------------------ rewards
def corruptor_reward(label: bool | None, accepted: bool | None) -> float:
    """Of an edit. label: of the edited step, None also where the edit was not readable; accepted:
    the verifier's mark of it, None where its judgement was not.
    """
    if label is not False:
        return HARMLESS
    return FOOLED if accepted else CAUGHT


def mark_rewards(marks, checks, labels, cost: float) -> list[float]:
    """(K,) rewards of a judgement, one per step; NaN where the oracle cannot tell. A judgement that
    is not readable (marks is None) has no mark that is right.
    """
    if marks is None:
        return [float("nan") if label is None else 0.0 for label in labels]
    # r_k = [mark_k == label_k] - c [a check is written]
    return [
        float("nan") if label is None else float(mark == label) - cost * check
        for mark, check, label in zip(marks, checks, labels)
    ]


def mark_advantages(r, ends: list, mask, group_size: int) -> torch.Tensor:
    """(B, K) rewards of marks, B lists of the token that ends each mark, None where a judgement is
    not readable, (B, T) mask -> (B, T). Tokens behind the last mark get none.
    """
    # A_ik = r_ik - mean of r_k over the G judgements of the same chain. No deviation: it would make
    # the price of a check as large as an error wherever all marks are right
    columns = [group_advantage(r[:, k], group_size, scale=False) for k in range(r.shape[1])]
    A = torch.stack(columns, 1)  # (B, K), 0 where there is no reward
    known = (~r.isnan()).sum(1).clamp(min=1)  # (B,)
    at_tokens = torch.zeros_like(mask, dtype=A.dtype)  # (B, T)
    for i, end in enumerate(ends):
        if end is None:
            at_tokens[i] = A[i].sum() / known[i]
            continue
        for k, (first, last) in enumerate(zip([-1, *end], end)):
            at_tokens[i, first + 1 : last + 1] = A[i, k]
    return at_tokens * mask


# ------------------------------------------------------------------ the trainer
class Aprm(CoTrainer):
    """`step` is the loop. `saved` holds the solver's held-out solutions, from `evaluate`."""

    def step(self, rows):
        """rows: B, every question G times in a row."""
        kind, questions = self.cfg.corruptor, rows[:: self.cfg.group_size]
        if kind not in ("co-trained", "frozen"):
            edits = [static_edit(row, kind, self.numbers_of(row, "static")) for row in questions]
            chains = [[self.chain_of(row, edit)] for row, edit in zip(questions, edits)]
            return [self.verifier_step(questions, chains)]
        corruptor, chains = self.corruptor_step(rows)
        verifier = self.verifier_step(questions, chains)
        return [corruptor, verifier] if kind == "co-trained" else [verifier]

    @staticmethod
    def players(args: Args) -> dict[str, Player]:
        G, lr = args.group_size, args.lr if args.corruptor == "co-trained" else 0.0
        solution = args.solution_tokens
        return {
            "corruptor": Player([], lr, args.edit_tokens, G, reads=solution),
            "verifier": Player([], args.lr, args.judgement_tokens, G, reads=solution),
            # at step 0, when this adapter is the base
            "solver": Player([], lr, solution, adapter="corruptor"),
        }

    def corruptor_step(self, rows) -> tuple[dict, list[list[Chain]]]:
        """(batch, the chains that its edits make of each question's)"""
        G = self.cfg.group_size
        asked = [(row["question"], row["reference"]) for row in rows]
        batch = self.rollout("corruptor", [{"prompt": corrupt_prompt(*pair)} for pair in asked])
        edits = [parse_edit(text, row) for text, row in zip(batch["texts"], rows)]
        chains = [edit and self.chain_of(row, edit) for row, edit in zip(rows, edits)]
        wrong = [i for i, chain in enumerate(chains) if chain and chain.wrong]
        prompts = [verify_prompt(rows[i]["question"], chains[i].solution) for i in wrong]
        judgements, accepted = self.generate("verifier", prompts), [None] * len(rows)
        for i, text in zip(wrong, judgements):
            if marks := parse_marks(text, len(chains[i].labels)):
                accepted[i] = marks[chains[i].place]
        labels = [chain and chain.labels[chain.place] for chain in chains]
        self.set_rewards(batch, [corruptor_reward(*pair) for pair in zip(labels, accepted)])
        self.report_corruptor(rows, batch, edits, labels, accepted)
        return batch, [[c for c in chains[i : i + G] if c] for i in range(0, len(chains), G)]

    def verifier_step(self, questions, chains: list[list[Chain]]) -> dict:
        """chains: of each question; of those that are wrong one is judged, or the untouched one."""
        cfg, rng = self.cfg, self.random_numbers()
        whole = {*rng.sample(range(len(questions)), round(cfg.untouched * len(questions)))}
        rows = []
        for i, (row, edited) in enumerate(zip(questions, chains)):
            wrong = [] if i in whole else [chain for chain in edited if chain.wrong]
            chain = rng.choice(wrong) if wrong else self.chain_of(row, None)
            judged = {"prompt": verify_prompt(row["question"], chain.solution), "chain": chain}
            rows += [judged] * cfg.group_size
        batch = self.rollout("verifier", rows)
        ids, mask = batch["completion_ids"], batch["completion_mask"]  # (B, T)
        marks, checks, r, ends = [], [], [], []
        for i, (row, text) in enumerate(zip(rows, batch["texts"])):
            labels = row["chain"].labels
            marks.append(parse_marks(text, len(labels)))
            checks.append([is_checked(step) for step in split_steps(text)])
            r.append(mark_rewards(marks[i], checks[i], labels, cfg.check_cost))
            tokens = ids[i][mask[i].bool()].tolist()
            ends.append(marks[i] and step_ends(tokens, self.processing_class))
        K = max(map(len, r))
        padded = [row + [float("nan")] * (K - len(row)) for row in r]
        r = torch.tensor(padded, device=mask.device)  # (B, K)
        self.set_rewards(batch, r.nanmean(1))  # what is logged
        batch["advantages"] = mark_advantages(r, ends, mask, cfg.group_size)  # (B, T)
        self.report_verifier(batch, [row["chain"] for row in rows], marks, checks)
        return batch

    def numbers_of(self, row: dict, what: str) -> random.Random:
        """The same for all edits of a question, on all processes."""
        return random.Random(f"{self.cfg.seed} {self.state.global_step} {row['question']} {what}")

    def chain_of(self, row: dict, edit: Edit | None) -> Chain:
        return chain_of(row, edit, self.numbers_of(row, "tones"))

    # --- optimistic gradients
    def add_up_gradients(self, name, parameters):
        """`update` calls this before it clips. g_{t-1} is kept beside AdamW's moments, and so is in
        every checkpoint.
        """
        super().add_up_gradients(name, parameters)
        if self.cfg.optimistic:
            self.latest = [(p, p.grad) for p in parameters]
            for p, g in self.latest:
                # 2 g_t - g_{t-1}; the first one has none before it
                p.grad = 2 * g - self.own_optimizer().state.get(p, {}).get("g", g)

    def update(self, batch):
        super().update(batch)
        for p, g in self.latest if self.cfg.optimistic else []:
            if state := self.own_optimizer().state.get(p):  # empty: AdamW has yet to begin
                state["g"] = g

    # --- what is logged and shown; nothing below affects training
    def report_corruptor(self, rows, batch, edits, labels, accepted):
        G = self.cfg.group_size
        wrong = [label is False for label in labels]
        self.log_mean("corruptor/unreadable", [edit is None for edit in edits])
        self.log_mean("corruptor/harmless", [not w for w, e in zip(wrong, edits) if e])
        self.log_mean("corruptor/fooled", [a is True for a in accepted])
        self.log_mean("co/caught", [a is False for a, w in zip(accepted, wrong) if w])
        for i in range(0, len(edits), G):
            known = [edit for edit in edits[i : i + G] if edit]
            self.log_mean("corruptor/distinct", len({*known}) / len(known) if known else [])
        for note, label, mark in zip(batch["notes"], labels, accepted):
            note |= {"the step is right": label, "accepted": mark}
        made = [(row, e) for row, e in zip(rows, edits) if e and parse_question(row["question"])]
        olds = [split_steps(row["reference"])[edit.place] for row, edit in made]
        self.log_mean("corruptor/sounds_sure", [sounds_sure(edit.step) for _, edit in made])
        self.log_mean("corruptor/quotients", ["/" in old for old in olds])
        pairs = [(old.split("=")[0], edit.step.split("=")[0]) for old, (_, edit) in zip(olds, made)]
        self.log_mean("corruptor/other_operation", [old != new for old, new in pairs])

    def report_verifier(self, batch, chains: list[Chain], marks, checks):
        labels = [chain.labels for chain in chains]
        self.log_mean("verifier/parsed", [m is not None for m in marks])
        self.log_mean("verifier/checked", [c for row in checks for c in row])
        for key, value in step_figures(marks, labels).items():
            self.log_mean(f"verifier/{key}", value)
        for note, chain, row in zip(batch["notes"], chains, marks):
            note |= {"labels": chain.labels, "marks": row}


# ------------------------------------------------------------------ evaluation
def step_figures(marks: list, labels: list) -> dict[str, float]:
    """Marks, None of a judgement that is not readable, against the labels that are known."""
    pairs = [
        (mark, label)
        for row, known in zip(marks, labels)
        for mark, label in zip(row or [None] * len(known), known)
        if label is not None
    ]
    right = [mark is True for mark, label in pairs if label]
    found = [mark is False for mark, label in pairs if not label]
    flagged = sum(mark is False for mark, _ in pairs)
    accepted = [mark is True for mark, label in pairs if not label]
    return {
        "step_balanced_accuracy": mean([mean(hits) for hits in (right, found) if hits]),
        "step_f1": 2 * sum(found) / max(1, flagged + len(found)),  # of finding wrong steps
        **({"wrong_steps_accepted": mean(accepted)} if accepted else {}),
    }


def judge(trainer, rows: list[dict], solutions: list[str]) -> tuple[list[str], list]:
    prompts = [verify_prompt(row["question"], text) for row, text in zip(rows, solutions)]
    texts = trainer.generate_all("verifier", prompts)
    return texts, [parse_marks(t, len(split_steps(s))) for t, s in zip(texts, solutions)]


def evaluate(trainer: Aprm, held_out: list[dict]) -> dict[str, float]:
    """The verifier on what the solver, the base, has written: the same in every evaluation."""
    n, saved = trainer.cfg.eval_samples, trainer.saved
    if "solver" not in saved:  # later evaluations draw the numbers that come after these
        with torch.random.fork_rng():
            saved["solver"] = solve(trainer, "solver", held_out, n)[0]
    several = [row for row in held_out for _ in range(n)]
    right = [is_correct(text, row["answer"]) for text, row in zip(saved["solver"], several)]
    solutions = saved["solver"][::n]
    judgements, marks = judge(trainer, held_out, solutions)
    rates = {True: [], False: []}  # a solution is accepted if all of its steps are
    for row, truth in zip(marks, right[::n]):
        rates[truth].append(row is not None and (bool(row) and all(row)) is truth)
    result = {
        "verifier/balanced_accuracy": mean([mean(hits) for hits in rates.values() if hits]),
        "verifier/parsed": mean([row is not None for row in marks]),
    }
    labels = [gold_steps(row["question"], text) for row, text in zip(held_out, solutions)]
    if None not in labels:  # all questions are embedded ones
        result |= {f"verifier/{k}": v for k, v in step_figures(marks, labels).items()}
        sure = [[sounds_sure(step) for step in split_steps(text)] for text in solutions]
        only = [[y if s else None for y, s in zip(*both)] for both in zip(labels, sure)]
        if any(False in row for row in only):
            accepted = step_figures(marks, only)["wrong_steps_accepted"]
            result["verifier/sure_wrong_steps_accepted"] = accepted
        checks = [is_checked(step) for text in judgements for step in split_steps(text)]
        result["verifier/checked"] = mean(checks) if checks else 0.0
    # best of n, of a quarter of the questions: accepted ones first, then by the share of steps
    count = n * max(1, len(held_out) // 4)
    _, marks = judge(trainer, several[:count], saved["solver"][:count])
    scores = [mean(row) if row else 0.0 for row in marks]
    picked = [max(range(i, i + n), key=scores.__getitem__) for i in range(0, count, n)]
    result[f"co/best_of_{n}"] = mean([right[i] for i in picked])
    return result | {"co/mean_of_same": mean(right[:count])}


# ------------------------------------------------------------------ main
CURVES = {  # panels of report.html; step lines show the first metric of each
    "corruptor": ["corruptor/fooled", "corruptor/harmless", "corruptor/distinct"],
    "verifier": ["verifier/step_f1", "verifier/step_balanced_accuracy", "verifier/parsed"],
    "who is fooled": ["verifier/wrong_steps_accepted", "co/caught", "verifier/checked"],
}


def is_clean(row: dict) -> bool:
    """Whether the reference is a right solution, as far as the oracle can tell."""
    steps, gold = split_steps(row["reference"]), gold_steps(row["question"], row["reference"])
    sound = map(equations_hold, steps) if gold is None else gold
    return bool(steps) and all(sound) and is_correct(row["reference"], row["answer"])


def load(args: Args):
    wanted = args.steps * args.questions * 4  # enough for four processes
    train, held_out = load_questions(args.dataset, wanted, args.eval_questions, args.seed)
    if not (train := [row for row in train if is_clean(row)]):
        raise UserError(f"--dataset {args.dataset}: no question has a right solution to corrupt.")
    return train, held_out


def main(args: Args):
    launch(Aprm, args, load, evaluate, CURVES, solve_prompt, args.group_size)


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
