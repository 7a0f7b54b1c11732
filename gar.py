r"""GAR: train a reasoner against a discriminator of slices of its reasoning (Liu et al. 2025,
Generative Adversarial Reasoner, arXiv:2512.16917v2; we found no released code).

    python gar.py                                         the small model on a CPU, 1 minute
    python gar.py --discriminator none                    baseline: plain GRPO
    python gar.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k        one GPU

The loop (section 3, stage 2) is `Gar.step`
    sample G solutions per question and cut their reasoning into slices
    the discriminator says YES or NO once to every slice (`judge_once`), and M times to some of the
    slices and to as many slices of reference solutions (`judge_often`)

    DISCRIMINATOR = `judge_often`   R = R_d + 0.5 * R_a for each of the M judgements of a slice
                    R_d  real or generated: YES to a reference slice, NO to a generated one
                    R_a  agreement: YES to slices of correct solutions, NO to slices of wrong ones
    REASONER = `step`               R = R_m + R_s, one number per solution, plain GRPO
                    R_m  the answer is correct
                    R_s  mean of the verdicts on the solution's slices

A short slice hardly ever shows an error and a long slice nearly always holds one (the paper's table
9), so slices have a medium length. On a generated slice of a correct solution R_d wants NO and R_a
wants YES: the discriminator is an adversary that must also stay a verifier. Both players have the
loss `CoTrainer.loss` in common/core/cotrainer.py.

Our changes that matter (more in docs/gar.md)
    1. Both players are LoRA adapters on one base. The paper's players are models of 7B and 1.5B.
    2. The paper's R_d = E_ref[log M_d] + E_gen[log(1 - M_d)] needs M_d, the probability that a
       slice is real, but does not say how a verdict in words gives M_d. Here YES means both "sound"
       and "real", and R_d is 0 or 1 for each verdict. R_a is also 0 or 1 for each verdict; in the
       paper it is a mean over a solution's slices.
    3. The paper does not describe the discriminator's group. Here it is M judgements of one slice.
       The advantage subtracts the group's mean, but divides by the std of the whole batch: see
       `discriminator_advantages`.
    4. The paper does not say who is updated when. Here all slices are judged before either update.
    5. In the paper's stage 1 the discriminator is fine-tuned on labelled slices. Here stage 1 runs
       only with `--sft-labels`, because the small model can judge slices already.

Shapes: P questions, G solutions each, B = P * G rows, M = G judgements of a slice.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.core.errors import UserError
from common.run.args import Count, GroupSize, RunArgs, Share, Tokens, Weight, parse, per_model


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, out, seed, micro_batch, eval_every, ...: common/run/args.py
    dataset: str = "tiny"
    """our own questions: tiny, tiny-hard, tiny-long; a hub id (openai/gsm8k) or a .jsonl file with
    question, answer and reference, a solution"""
    steps: Count = 24
    """optimiser steps, each of both players (paper: 400)"""
    questions: Count = 16
    """P, questions per step and process (paper: 192, questions or solutions)"""
    group_size: GroupSize = 8
    """G, solutions of a question, and M, judgements of a slice (paper: not said)"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of both adapters, constant (paper: 1e-6 to 5e-7, all weights)"""
    kl: Weight = 0.0
    """weight of the k3 penalty towards the base (paper: not said)"""
    discriminator: Literal["co-trained", "frozen", "none"] = "co-trained"
    """ablation, rows 7, 4 and 2 of table 4: frozen is never trained by RL, none is plain GRPO"""
    reward: Literal["both", "alignment", "adversarial"] = "both"
    """the discriminator's reward; ablation, rows 7, 5 and 6 of table 4"""
    slice_tokens: Tokens = per_model(tiny=18, real=320)
    """L, longest slice (paper: 320; longer slices nearly always hold an error)"""
    min_slice_tokens: Tokens = per_model(tiny=6, real=48)
    """a cue word ends a slice only once it is as long as this (paper: not said)"""
    solution_tokens: Tokens = per_model(tiny=80, real=1024)
    """length limit of a solution"""
    judgement_tokens: Tokens = per_model(tiny=64, real=128)
    """K, length limit of a judgement, which should cut only its rationale (paper: 128)"""
    sft_labels: str | None = None
    """stage 1 first: a .jsonl file with question, slice and judgement (analysis **YES** reason)"""
    sft_steps: Count = 8
    """steps of stage 1, among --steps, on P * G labels each (paper: 500 on 128, before the 400)"""
    silent_share: Share = 0.5
    """stop with an explanation when a larger share of a step's judgements has no verdict"""

    def check(self):
        if self.min_slice_tokens > self.slice_tokens:
            least, most = self.min_slice_tokens, self.slice_tokens
            sizes = f"--min-slice-tokens {least}, --slice-tokens {most}"
            raise UserError(f"{sizes}: no cue word would ever end a slice.")
        if self.sft_labels and self.discriminator == "none":
            raise UserError("--sft-labels: --discriminator none has nobody to teach.")


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)


from common.checked import CoTrainer, Player
from common.core.advantage import group_advantage
from common.core.cotrainer import Batch
from common.core.lists import chunk, mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import (
    SOLVED,
    evaluate_solver,
    is_correct,
    prompt,
    solve_prompt,
    split_steps,
)
from common.tasks.math import load_for_steps, read_jsonl
from common.tasks.references import check_references
from common.tasks.verdicts import WRONG, read_first_verdict
from common.tiny.tasks import LEVELS, gold_steps

import torch

LAMBDA_MATCH, LAMBDA_SLICES, LAMBDA_REAL, LAMBDA_AGREE = 1.0, 1.0, 1.0, 0.5  # l1 to l4, sec. 4.1

# ------------------------------------------------------------------ prompts and parsing
JUDGE = """You are given a problem and a part of somebody's reasoning about it. Analyse very briefly
whether this part is sound, checking it sentence by sentence. Then give your verdict, **YES** if it
is sound or **NO** if it is not, and last a short reason."""


def judge_prompt(question: str, part: str) -> list[dict]:
    """The discriminator sees neither the answer nor where the slice comes from."""
    return prompt(JUDGE, to_judge(question, part), JUDGED)


def to_judge(question: str, part: str) -> str:
    return f"Problem: {question}\nReasoning:\n{part.rstrip()}\nIs it sound?"


JUDGED = [  # worked examples: a sound slice, and a slice with an error
    (
        to_judge(SOLVED[0][0], SOLVED[0][1].partition("<answer>")[0]),
        "Analysis: 3*12 = 36 pens are there, 6+5 = 11 go away, and 36-11 = 25 are left.\n"
        "Verdict: **YES**\nReason: Every step follows from the problem.",
    ),
    (
        to_judge(SOLVED[1][0], split_steps(WRONG)[1]),
        "Analysis: 10 books of 8 dollars each bring 10*8 = 80 dollars.\n"
        "Verdict: **NO**\nReason: The part adds where it has to multiply.",
    ),
]


def parse_verdict(text: str) -> int | None:
    """The first verdict, because a reason may quote another: 1 = YES, 0 = NO, None = neither."""
    verdict = read_first_verdict(text, ("YES", "NO"))
    return None if verdict is None else int(verdict == "YES")


# ------------------------------------------------------------------ rewards
def match_reward(completions, answer, **_) -> list[float]:
    """Reasoner: R_m = [answer == gold], called by TRL. R_s comes later, from the verdicts."""
    return [float(is_correct(c[0]["content"], gold)) for c, gold in zip(completions, answer)]


def reasoner_reward(R_m: float, yes: list[float]) -> float:
    """Reasoner: R = l1 * R_m + l2 * R_s. R_s is a MEAN over slices: a sum would reward length.

    yes: for each slice of the solution the share of YES among its verdicts. R_s = 0 if empty.
    """
    return LAMBDA_MATCH * R_m + LAMBDA_SLICES * mean(yes)


def discriminator_reward(verdict: int | None, right: bool | None, kind: str = "both") -> float:
    """Discriminator: R = l3 * R_d + l4 * R_a of one judgement, 0 without a verdict.

    Args:
        verdict: 1 = YES, 0 = NO, None = not parsed.
        right: whether the slice's solution is correct. None: a reference slice, without R_a.
        kind: "both", "alignment" (R_a alone) or "adversarial" (R_d alone).
    """
    if verdict is None:
        return 0.0
    R_d = float(verdict == (right is None))  # YES to a reference, NO to a generated slice
    R_a = float(right is not None and verdict == right)
    real = LAMBDA_REAL if kind != "alignment" else 0.0
    agree = LAMBDA_AGREE if kind != "adversarial" else 0.0
    return real * R_d + agree * R_a


def judgement_reward(completions, right, kind, **_) -> list[float]:
    """`discriminator_reward`, called by TRL."""
    verdicts = [parse_verdict(c[0]["content"]) for c in completions]
    return list(map(discriminator_reward, verdicts, right, kind))


# ------------------------------------------------------------------ the paper's mathematics
def discriminator_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """A = (R - mean over the M judgements of a slice) / std over ALL judgements, (B,) -> (B,).

    Trap: divided by their own std, two different rewards get -0.7 and 0.7, whatever they are. The
    example has YES and NO to a slice of a correct solution, where R_d and R_a disagree, and then
    YES and NO to a slice of a wrong solution:

    >>> A = discriminator_advantages(torch.tensor([0.5, 1.0, 0.0, 1.5]), group_size=2)
    >>> [round(a, 2) for a in A.tolist()]
    [-0.39, 0.39, -1.16, 1.16]
    """
    return group_advantage(rewards, group_size, scale=False) / (rewards.std() + 1e-6)


# ------------------------------------------------------------------ the trainer
@dataclass
class Slice:
    question: str
    text: str
    right: bool | None  # whether its solution has the correct answer; None: a reference solution
    sound: bool | None  # see `are_sound`
    verdicts: list = field(default_factory=list)  # one, or M: 1 = YES, 0 = NO, None = neither

    def prompt(self) -> list[dict]:
        return judge_prompt(self.question, self.text)


class Gar(CoTrainer):
    """`step` is the loop above. CoTrainer samples, scores, computes the loss and updates."""

    def __init__(self, *inputs, labels: dict[int, list[dict]]):
        super().__init__(*inputs)
        self.labels = labels

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        G, K = args.group_size, args.judgement_tokens
        return {
            "reasoner": Player([match_reward], args.lr, args.solution_tokens, G),
            "discriminator": Player([judgement_reward], args.lr, K, G, reads=args.slice_tokens),
        }

    def step(self, rows):
        """rows: B, every question G times in a row."""
        if self.labels and self.state.global_step < self.cfg.sft_steps:
            return [self.sft_batch(len(rows))]  # stage 1
        # REASONER: G solutions per question; R_s has to wait for the verdicts
        batch = self.rollout("reasoner", rows)
        R_m = batch.rewards.tolist()  # B
        self.log_mean("reasoner/accuracy", R_m)
        if self.cfg.discriminator == "none":
            return [batch]
        solutions = [
            self.cut(row["question"], text, right=R == 1)
            for row, text, R in zip(rows, batch.texts, R_m)
        ]  # B lists of slices
        generated = [part for parts in solutions for part in parts]

        # DISCRIMINATOR: judges every slice as it is now, before either player is updated
        judgements = self.judge_often(rows, generated)
        self.judge_once([part for part in generated if not part.verdicts])
        self.stop_if_silent(generated)

        # R_m + R_s comes before the group normalisation: R_s breaks ties, and decides where the
        # answers of a group are all correct or all wrong. M verdicts count as a single verdict.
        yes = [[mean([v == 1 for v in part.verdicts]) for part in parts] for parts in solutions]
        self.set_rewards(batch, list(map(reasoner_reward, R_m, yes)))
        self.report_reasoner(batch, solutions, yes)
        return [judgements, batch] if judgements else [batch]

    def cut(self, question: str, text: str, right: bool | None) -> list[Slice]:
        """The slices of a solution's reasoning."""
        most, least = self.cfg.slice_tokens, self.cfg.min_slice_tokens
        parts = slice_reasoning(reasoning(text), self.count_tokens, most, least)
        parts = [part for part in parts if part.strip()]  # white space must not earn a YES
        sound = are_sound(question, parts)
        return [Slice(question, part, right, is_sound) for part, is_sound in zip(parts, sound)]

    def count_tokens(self, text: str) -> int:
        return len(self.processing_class(text, add_special_tokens=False).input_ids)

    def judge_often(self, rows: list[dict], generated: list[Slice]) -> Batch | None:
        """The batch that the discriminator learns from: M judgements each of P / 2 generated slices
        and P / 2 reference slices, with the P of all processes. None if it is frozen, or if there
        are too few slices.
        """
        cfg, M = self.cfg, self.cfg.group_size
        references = [
            part for row in rows[::M] for part in self.cut(row["question"], row["reference"], None)
        ]
        everyones, references = self.gather(generated), self.gather(references)
        count = max(1, self.questions_per_step // 2)  # generated ones
        rest = max(1, self.questions_per_step - count)  # so every process judges as many
        enough = len(everyones) >= count and len(references) >= rest
        learns = cfg.discriminator == "co-trained" and enough
        self.log_mean("discriminator/updated", float(learns))
        if not learns:
            return None
        draw = self.random_numbers()
        places = sorted(draw.sample(range(len(everyones)), count))
        chosen = self.shard([everyones[i] for i in places] + draw.sample(references, rest))
        judged = [
            {"prompt": part.prompt(), "right": part.right, "kind": cfg.reward}
            for part in chosen
            for _ in range(M)  # a group is M judgements of one slice
        ]
        batch = self.rollout("discriminator", judged)
        # instead of GRPO's, and over all processes, because the std is the whole batch's
        A = self.over_all_processes(lambda R: discriminator_advantages(R, M), batch.rewards)
        batch.advantages = A  # (B,)
        for part, texts in zip(chosen, chunk(batch.texts, M)):
            part.verdicts = [parse_verdict(text) for text in texts]
        self.report_discriminator(batch, judged, chosen)
        verdicts = dict(zip(places, self.gather([part.verdicts for part in chosen])))
        of_all = lambda parts: [verdicts.get(i, []) for i in range(len(parts))]  # noqa: E731
        for part, its in zip(generated, self.over_all_processes(of_all, generated)):
            part.verdicts = its  # another process may have judged it
        return batch

    def judge_once(self, slices: list[Slice]):
        texts = self.generate("discriminator", [part.prompt() for part in slices])
        for part, text in zip(slices, texts):
            part.verdicts = [parse_verdict(text)]

    def stop_if_silent(self, slices: list[Slice]):
        verdicts = self.gather([v for part in slices for v in part.verdicts])
        silent = mean([v is None for v in verdicts])
        self.log_mean("discriminator/silent", silent)
        if silent > self.cfg.silent_share:
            helps = "Train it first (--sft-labels), or allow longer judgements."
            if self.cfg.model == "tiny" and self.cfg.dataset not in LEVELS:
                helps = "The small model knows its own questions only; take another --model."
            raise UserError(
                f"step {self.state.global_step}: {silent:.0%} of the judgements have no "
                f"**YES** or **NO** within --judgement-tokens {self.cfg.judgement_tokens}. {helps}"
            )

    def sft_batch(self, count: int) -> Batch:
        """A batch of stage 1, with as many labels YES as NO. With A = 1 for every token
        `CoTrainer.loss` has the gradient of the cross-entropy.
        """
        draw, total = self.random_numbers(), count * self.accelerator.num_processes
        rows = self.shard([draw.choice(self.labels[i % 2]) for i in range(total)])
        prompts = [judge_prompt(row["question"], row["slice"]) for row in rows]
        ids = [self.encode(row["judgement"]) for row in rows]
        batch = self.completions("discriminator", prompts, ids)
        batch.notes = []  # the report shows what players write, and this is written by a teacher
        batch.advantages = torch.ones(count, device=batch.row.device)
        batch.total_tokens = sum(self.gather([sum(map(len, ids))]))
        if self.kl:
            batch.base_logps = self.log_probs(None, batch)  # (B, T)
        logp = self.log_probs("discriminator", batch)  # (B, T)
        self.log_mean("discriminator/sft_loss", -logp[batch.completion_mask.bool()])
        return batch

    # --- what is logged and shown; no method below affects training
    def report_reasoner(self, batch: Batch, solutions: list[list[Slice]], yes: list[list[float]]):
        means = torch.tensor([mean(verdicts) for verdicts in yes])  # (B,): R_s
        spread = means.reshape(-1, self.cfg.group_size).std(1)  # (P,)
        self.log_mean("discriminator/spread_in_groups", spread)
        for note, parts, verdicts in zip(batch.notes, solutions, yes):
            note |= {"parts": [part.text for part in parts], "verdicts": verdicts}
            note["gold"] = [part.sound for part in parts]

    def report_discriminator(self, batch: Batch, judged: list[dict], chosen: list[Slice]):
        """By kind of slice: on slices of correct solutions the two rewards disagree."""
        for note, row in zip(batch.notes, judged):
            note["slice"] = KINDS[row["right"]]
        says_yes = [(part.right, v == 1) for part in chosen for v in part.verdicts]
        for right, kind in KINDS.items():
            self.log_mean(f"discriminator/yes_{kind}", [yes for r, yes in says_yes if r is right])
        self.log_mean("discriminator/says_yes", [yes for _, yes in says_yes])


KINDS = {None: "reference", True: "generated_right", False: "generated_wrong"}
"""`Slice.right` -> what metrics call such a slice."""


# ------------------------------------------------------------------ slices
def reasoning(text: str) -> str:
    r"""All text before the last answer. A tag in passing must not hide the reasoning after it,
    whether a further tag or a box follows.

    >>> reasoning(r"<answer>no <answer>7, as 3+4=7: \boxed{7}</answer>")
    '<answer>no <answer>7, as 3+4=7: '
    """
    before, tag, answer = text.rpartition("<answer>")
    before_box, _, _ = answer.rpartition(r"\boxed")
    if not tag:
        return text
    return before + tag + before_box if before_box.strip() else before


CUES = (
    "Wait|Since|Therefore|However|But|So|Thus|Hence|Then|Now|Next|First|Second|Finally|"
    "Alternatively|Let me|Let's|Hmm|Okay"
)
NEW_THOUGHT = re.compile(rf"(?:<step>\s*)?(?:{CUES})\b")
# after a new line, and before a sentence that begins with a cue; zero-width, so nothing is lost
CUTS = re.compile(rf"(?<=\n)(?=[^\n])|(?<=[.!?;]\s)(?=(?:{CUES})\b)")


def slice_reasoning(
    text: str, count_tokens: Callable, max_tokens: int, min_tokens: int
) -> list[str]:
    """The text cut at new lines and cue words, with neighbours merged (paper sec. 3, app. D.1). A
    slice ends before a cue if it has `min_tokens` already, and anywhere if the next piece would
    take it past `max_tokens`. The slices joined together are the text.

    >>> count_words = lambda part: len(part.split())
    >>> text = "We add them. Wait, that is wrong. So we subtract. The end."
    >>> slice_reasoning(text, count_words, max_tokens=100, min_tokens=3)
    ['We add them. ', 'Wait, that is wrong. ', 'So we subtract. The end.']
    """
    slices = [""]
    for segment in CUTS.split(text):
        for piece in halves(segment, count_tokens, max_tokens):
            too_long = count_tokens(slices[-1] + piece) > max_tokens
            new_thought = NEW_THOUGHT.match(piece) and count_tokens(slices[-1]) >= min_tokens
            if slices[-1] and (too_long or new_thought):
                slices.append("")
            slices[-1] += piece
    return [part for part in slices if part]


def halves(segment: str, count_tokens: Callable, max_tokens: int) -> list[str]:
    """The segment, halved until every piece fits: tokens are counted in whole strings only."""
    if count_tokens(segment) <= max_tokens or len(segment) == 1:
        return [segment]
    parts = segment[: len(segment) // 2], segment[len(segment) // 2 :]
    return [piece for part in parts for piece in halves(part, count_tokens, max_tokens)]


def are_sound(question: str, slices: list[str]) -> list[bool | None]:
    """Tiny questions: whether all steps that end in a slice are correct; None if no step does."""
    sound, steps_before = [], 0
    for k in range(len(slices)):
        labels = gold_steps(question, "".join(slices[: k + 1])) or []  # of the steps so far
        ending, steps_before = labels[steps_before:], len(labels)
        sound.append(all(ending) if ending else None)
    return sound


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Gar, held_out: list[dict]) -> dict[str, float]:
    """The reasoner on held-out questions, and the discriminator on the first solution of each."""
    n = trainer.cfg.eval_samples
    result, texts, right = evaluate_solver(trainer, "reasoner", held_out)
    if trainer.cfg.discriminator != "none":
        result |= evaluate_discriminator(trainer, held_out, texts[::n], right[::n])
    return result


def evaluate_discriminator(trainer: Gar, held_out: list[dict], texts, right) -> dict[str, float]:
    """P(YES) on one slice of each solution (texts, right) and of each reference, by kind of slice.
    On tiny questions also on generated slices whose steps are all correct, and on generated slices
    with a wrong step.
    """
    references = [(row, row["reference"], None) for row in held_out]
    slices = []
    for row, text, is_right in [*zip(held_out, texts, right), *references]:
        if parts := trainer.cut(row["question"], text, is_right):
            slices.append(random.Random(text).choice(parts))  # the same one of the same text
    judgements = trainer.generate_all("discriminator", [part.prompt() for part in slices])
    says_yes = [parse_verdict(text) == 1 for text in judgements]
    by_kind = {name: [] for name in (*KINDS.values(), "sound", "unsound")}
    for part, yes in zip(slices, says_yes):
        by_kind[KINDS[part.right]].append(yes)
        if part.right is not None and part.sound is not None:
            by_kind["sound" if part.sound else "unsound"].append(yes)
    result = {f"discriminator/yes_{name}": mean(yes) for name, yes in by_kind.items() if yes}
    return result | {"discriminator/says_yes": mean(says_yes)}


# ------------------------------------------------------------------ main
CURVES = {
    "reasoner": ["reasoner/accuracy", "reasoner/frac_reward_zero_std"],
    "P(YES)": ["discriminator/says_yes", *[f"discriminator/yes_{k}" for k in KINDS.values()]],
    "health": ["discriminator/silent", "discriminator/spread_in_groups"],
}


def load(args: Args):
    train, held_out = load_for_steps(args)
    check_references(train + held_out, args.dataset)
    if args.discriminator == "co-trained" and not any(row["reference"] for row in train):
        reason = "no question has a reference solution; take --discriminator frozen"
        raise UserError(f"--dataset {args.dataset}: {reason}.")
    return train, held_out


def load_labels(path: str) -> dict[int, list[dict]]:
    """Verdict -> rows of question, slice and judgement."""
    labels = {0: [], 1: []}
    for where, row in read_jsonl(Path(path), "--sft-labels"):
        texts = [row.get(key) for key in ("question", "slice", "judgement")]
        verdict = parse_verdict(texts[2]) if all(x and type(x) is str for x in texts) else None
        if verdict is None:
            raise UserError(f"{where} needs question, slice and judgement (verdict).")
        labels[verdict].append(row)
    if not all(labels.values()):
        raise UserError(f"--sft-labels {path}: it needs both labels, YES and NO.")
    return labels


def main(args: Args):
    labels = load_labels(args.sft_labels) if args.sft_labels else {}
    more = {"prompt": solve_prompt, "labels": labels}
    launch(Gar, args, load=load, evaluate=evaluate, curves=CURVES, **more)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
