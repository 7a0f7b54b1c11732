r"""GAR: train a reasoner against a discriminator of slices of its reasoning (Liu et al. 2025,
Generative Adversarial Reasoner, arXiv:2512.16917v2; we found no released code).

    python gar.py                                         the embedded model on a CPU, 5 minutes
    python gar.py --discriminator none                    baseline: plain GRPO
    python gar.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k        one GPU, 4-bit

The loop (section 3, stage 2)
    repeat
      sample G solutions per question and cut their reasoning into slices
      the discriminator says YES or NO to every slice, once; but M times to some of them, and to as
      many slices of reference solutions

    DISCRIMINATOR  R = R_d + 0.5 * R_a, on those M judgements of a slice
                   R_d  real or generated: YES to a reference slice, NO to a generated one
                   R_a  agreement: YES to a slice of a correct solution, NO to one of a wrong one
    REASONER       R = R_m + R_s, one number per solution, plain GRPO
                   R_m  the answer is correct
                   R_s  mean of the verdicts on the solution's slices

    Both are updated with the loss in common/cotrainer.py, `CoTrainer.loss`.

A whole solution is too long to judge and a single step too short, hence slices. On a slice of a
correct solution R_d wants NO and R_a wants YES: the discriminator is an adversary that has to stay
a judge.

What we changed and it matters (the full list is in docs/gar.md)
    1. Both players are LoRA adapters on one base; the paper has a 7B reasoner and a 1.5B
       discriminator.
    2. The paper's R_d = E_ref[log M_d] + E_gen[log(1 - M_d)] needs M_d, the probability that a
       slice is real, and it does not say how a verdict in words gives one. Here YES stands for
       sound and for real, and each verdict is a reward of 0 or 1. So is R_a, which in the paper is
       a solution's mean.
    3. The discriminator's group is not described: here M judgements of one slice. They share a
       mean, but the std is the whole batch's, because two verdicts divided by their own std are
       +-1 whatever the weights of R_d and R_a.
    4. The order is not described: here all slices are judged first, then both players are updated.
    5. Stage 1, supervised training of the discriminator, is one pass over the labels in
       `--sft-labels`; the embedded model has been taught to judge slices.
    6. Prompts of our own, 16 questions of 8 solutions a step, a constant rate, no KL term. The
       paper has 192 a step, it does not say of what, and a cosine.

Shapes: P questions, G solutions each, B = P * G rows, T completion tokens.
"""

import itertools
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.advantage import group_advantage
from common.args import Count, GroupSize, RunArgs, Share, Tokens, Weight, per_model
from common.cotrainer import CoTrainer, Player
from common.errors import UserError
from common.launch import launch
from common.pairs import completion_batch
from common.run import mean, plain_errors, say
from common.tasks.answers import is_correct, prompt, solve, solve_prompt
from common.tasks.math import load_questions, read_jsonl
from common.tasks.references import check_references
from common.tiny.tasks import gold_steps

import torch
import tyro


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, out, seed, micro_batch, eval_every, ...: common/args.py
    dataset: str = "tiny"
    """the embedded questions, tiny or tiny-hard; a hub id (openai/gsm8k) or a .jsonl file with
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
    """ablation, rows 7, 4 and 2 of table 4: one that RL never trains, or none (plain GRPO)"""
    reward: Literal["both", "alignment", "adversarial"] = "both"
    """ablation, rows 7, 5 and 6 of table 4: the discriminator's reward"""
    slice_tokens: Tokens = per_model(tiny=18, real=320)
    """L, longest slice (paper: 320; longer ones nearly always hold an error)"""
    min_slice_tokens: Tokens = per_model(tiny=6, real=48)
    """a cue word ends a slice only once it is as long as this (paper: not said)"""
    solution_tokens: Tokens = per_model(tiny=80, real=1024)
    """length limit of a solution"""
    judgement_tokens: Tokens = per_model(tiny=64, real=128)
    """K, length limit of a judgement, which is to cut its rationale only (paper: 128)"""
    sft_labels: str | None = None
    """stage 1 first: a .jsonl file with question, slice, label (YES or NO), and optionally analysis
    and rationale"""
    silent_share: Share = 0.5
    """stop with an explanation when a larger share of a step's judgements has no verdict"""

    def check(self):
        if self.discriminator == "co-trained" and self.questions < 2:
            raise UserError(
                "--questions 1 leaves no room for a generated and a reference slice; take 2 or "
                "more."
            )
        if self.min_slice_tokens > self.slice_tokens:
            least, most = self.min_slice_tokens, self.slice_tokens
            sizes = f"--min-slice-tokens {least}, --slice-tokens {most}"
            raise UserError(f"{sizes}: no cue word would ever end a slice.")


LAMBDA_MATCH, LAMBDA_SLICES, LAMBDA_REAL, LAMBDA_AGREE = 1.0, 1.0, 1.0, 0.5  # l1 to l4, sec. 4.1

# ------------------------------------------------------------------ prompts and parsing
JUDGE = """You are given a problem and a part of somebody's reasoning about it. Analyse very briefly
whether this part is sound, checking it sentence by sentence. Then give your verdict, **YES** if it
is sound or **NO** if it is not, and last a short reason."""


def judge_prompt(question: str, part: str) -> list[dict]:
    """The discriminator sees neither the answer nor where the slice comes from."""
    return prompt(JUDGE, f"Problem: {question}\nReasoning:\n{part.rstrip()}\nIs it sound?")


def parse_verdict(text: str) -> int | None:
    """1 = YES, 0 = NO, None = neither: the first verdict, since a rationale may quote another.

    >>> [parse_verdict(text) for text in ("3+4 is 7. **NO** for **YES** it must be 8", "yes")]
    [0, None]
    """
    match = re.search(r"\*\*(YES|NO)\*\*", text)
    return None if match is None else int(match[1] == "YES")


def reasoning(text: str) -> str:
    r"""All before the last answer. A tag in passing must not hide the reasoning that follows it,
    neither before the next tag nor before the box.

    >>> reasoning(r"<answer>no <answer>7, as 3+4=7: \boxed{7}</answer>")
    '<answer>no <answer>7, as 3+4=7: '
    """
    before, tag, answer = text.rpartition("<answer>")
    said, _, _ = answer.rpartition(r"\boxed")
    if not tag:
        return text
    return before + tag + said if said.strip() else before


# A new line, or a sentence that begins with a cue of a new thought. Zero-width, so that nothing is
# lost.
CUES = (
    "Wait|Since|Therefore|However|But|So|Thus|Hence|Then|Now|Next|First|Second|Finally|"
    "Alternatively|Let me|Let's|Hmm|Okay"
)
CUTS = re.compile(rf"(?<=\n)(?=[^\n])|(?<=[.!?;]\s)(?=(?:{CUES})\b)")


def slice_reasoning(text: str, count_tokens, max_tokens: int, min_tokens: int) -> list[str]:
    """Slices of a reasoning text, in order (paper sec. 3, app. D.1).

    The text is cut at newlines and cue words, and neighbours are merged: a slice ends before a cue
    word once it has `min_tokens`, and at any cut if the next segment would take it past
    `max_tokens`. A segment that is too long alone is halved until it fits.

    Args:
        count_tokens: str -> int.

    Returns:
        Slices whose concatenation is `text`, none longer than `max_tokens` (unless one character
        is), none empty.
    """
    slices, current = [], ""
    for segment in filter(None, CUTS.split(text)):
        for piece in _fitting(segment, count_tokens, max_tokens):
            new_thought = re.match(rf"(?:<step>\s*)?(?:{CUES})\b", piece) is not None
            too_long = count_tokens(current + piece) > max_tokens
            if current and (too_long or (new_thought and count_tokens(current) >= min_tokens)):
                slices.append(current)
                current = ""
            current += piece
    if current:
        slices.append(current)
    return slices


def _fitting(segment: str, count_tokens, max_tokens: int) -> list[str]:
    """The segment in pieces of at most max_tokens; only whole strings can be counted."""
    if count_tokens(segment) <= max_tokens or len(segment) == 1:
        return [segment]
    halves = segment[: len(segment) // 2], segment[len(segment) // 2 :]
    return [piece for half in halves for piece in _fitting(half, count_tokens, max_tokens)]


# ------------------------------------------------------------------ rewards
def match_reward(completions, answer, **_) -> list[float]:
    """Reasoner: R_m = [answer == gold], called by TRL. R_s comes later, from the verdicts."""
    return [float(is_correct(c[0]["content"], gold)) for c, gold in zip(completions, answer)]


def reasoner_reward(exact: list[int], verdicts: list[list[float]]) -> list[float]:
    """Reasoner: R = l1 * R_m + l2 * R_s, with R_s a MEAN over slices: a sum would pay for length.

    Args:
        exact: R_m of each solution, 0 or 1.
        verdicts: for each solution a number per slice: 1 = YES, 0 = NO or no verdict, or the share
            of YES if it was judged several times; no slices give R_s = 0.
    """
    slices = [mean(solution) for solution in verdicts]
    return [LAMBDA_MATCH * R_m + LAMBDA_SLICES * R_s for R_m, R_s in zip(exact, slices)]


def discriminator_rewards(
    verdicts: list[int | None],
    is_reference: list[bool],
    answer_right: list[bool | None],
    kind: str = "both",
) -> list[float]:
    """Discriminator: R = l3 * R_d + l4 * R_a for each judgement, 0 without a verdict.

    Args:
        verdicts: 1 = YES, 0 = NO, None = not parsed.
        is_reference: whether the slice is a reference solution's.
        answer_right: whether the slice's solution is correct; None on reference slices, which have
            no R_a.
        kind: "both", "alignment" (R_a alone) or "adversarial" (R_d alone).
    """
    real = LAMBDA_REAL if kind != "alignment" else 0.0
    agree = LAMBDA_AGREE if kind != "adversarial" else 0.0
    rewards = []
    for verdict, reference, right in zip(verdicts, is_reference, answer_right):
        R_d = float(verdict == int(reference))
        R_a = float(right is not None and verdict == int(right))
        rewards.append(real * R_d + agree * R_a if verdict is not None else 0.0)
    return rewards


def judgement_reward(completions, reference, right, kind, **_) -> list[float]:
    """`discriminator_rewards`, called by TRL."""
    verdicts = [parse_verdict(c[0]["content"]) for c in completions]
    return discriminator_rewards(verdicts, reference, right, kind[0])


# ------------------------------------------------------------------ the trainer
class Gar(CoTrainer):
    """`step` is the loop above. CoTrainer samples, scores, computes the loss and updates."""

    def __init__(self, *inputs, labels: list[dict]):
        super().__init__(*inputs)
        self.labels = labels

    @staticmethod
    def players(args: Args) -> dict[str, Player]:
        G, solution, judgement = args.group_size, args.solution_tokens, args.judgement_tokens
        return {
            "reasoner": Player([match_reward], args.lr, solution, G),
            "discriminator": Player(
                [judgement_reward], args.lr, judgement, G, reads=args.slice_tokens
            ),
        }

    def train(self, resume_from_checkpoint=None):
        """Stage 1, if there are labels for it, and then the loop."""
        if self.labels and resume_from_checkpoint is None:
            last = discriminator_sft(self, self.labels)
            say(f"stage 1: {len(self.labels)} labels, last loss {last:.3f}")
        return super().train(resume_from_checkpoint=resume_from_checkpoint)

    def step(self, rows):
        """rows: B, every question G times in a row."""
        batch = self.rollout("reasoner", rows)  # texts, rewards (B,): R_m
        self.log_mean("reasoner/accuracy", batch["rewards"])
        if self.cfg.discriminator == "none":
            return [batch]
        R_m = batch["rewards"].int().tolist()
        generated = [
            {"row": i, "question": row["question"], "text": part, "right": bool(R_m[i])}
            for i, (row, text) in enumerate(zip(rows, batch["texts"]))
            for part in self.slices(text)
        ]
        # every slice is judged by the discriminator as it is now; it learns afterwards
        judgements = self.judge_often(rows, generated)
        self.judge_once([part for part in generated if "verdicts" not in part])
        self.stop_if_silent(generated)
        scores = [[] for _ in rows]
        for part in generated:  # a share of YES: M verdicts on a slice weigh no more than one
            scores[part["row"]].append(mean([v == 1 for v in part["verdicts"]]))
        # R_m + R_s comes before the group normalisation: R_s breaks ties, and it rules where the
        # answers of a group are all correct or all wrong
        self.set_rewards(batch, reasoner_reward(R_m, scores))
        self.report_reasoner(rows, batch, generated, scores)
        return [judgements, batch] if judgements else [batch]

    def judge_often(self, rows, generated) -> dict | None:
        """M judgements each of some generated slices and as many reference slices, B in all: what
        the discriminator learns from. None if it is frozen, or if a process has too few slices.
        """
        cfg, M = self.cfg, self.cfg.group_size
        references = [
            {"question": row["question"], "text": part, "right": None}
            for row in rows[::M]
            for part in self.slices(row["reference"])
        ]
        count = cfg.questions // 2  # of each kind
        fewest = min(self.gather([len(generated), len(references)]))  # of all processes
        learns = cfg.discriminator == "co-trained" and fewest >= count
        self.log_mean("discriminator/updated", float(learns))
        if not learns:
            return None
        draw = self.random_numbers()
        chosen = [generated[j] for j in sorted(draw.sample(range(len(generated)), count))]
        chosen += draw.sample(references, count)
        judged = [
            {
                "prompt": judge_prompt(part["question"], part["text"]),
                "reference": part["right"] is None,
                "right": part["right"],
                "kind": cfg.reward,
            }
            for part in chosen
            for _ in range(M)  # a group is M judgements of one slice
        ]
        batch = self.rollout("discriminator", judged)
        # A = (R - mean over the slice's M) / std over ALL judgements of the step: see 3 at the top
        batch["advantages"] = self.over_all_processes(
            lambda R: group_advantage(R, M, scale=False) / (R.std() + 1e-6), batch["rewards"]
        )  # (B,)
        verdicts = [parse_verdict(text) for text in batch["texts"]]
        for k, part in enumerate(chosen):
            part["verdicts"] = verdicts[k * M : (k + 1) * M]
        self.report_discriminator(chosen, batch)
        return batch

    def judge_once(self, slices):
        prompts = [judge_prompt(part["question"], part["text"]) for part in slices]
        for part, text in zip(slices, self.generate("discriminator", prompts)):
            part |= {"judgement": text, "verdicts": [parse_verdict(text)]}

    def slices(self, text: str) -> list[str]:
        cfg = self.cfg
        parts = slice_reasoning(
            reasoning(text), self.count_tokens, cfg.slice_tokens, cfg.min_slice_tokens
        )
        return [part for part in parts if part.strip()]  # white space must not earn a YES

    def count_tokens(self, text: str) -> int:
        return len(self.processing_class(text, add_special_tokens=False).input_ids)

    def stop_if_silent(self, slices):
        verdicts = self.gather([v for part in slices for v in part["verdicts"]])
        silent = mean([v is None for v in verdicts])
        self.log_mean("discriminator/silent", silent)
        if silent > self.cfg.silent_share:
            raise UserError(
                f"step {self.state.global_step}: {silent:.0%} of the discriminator's judgements "
                f"have no **YES** or **NO** within --judgement-tokens {self.cfg.judgement_tokens}. "
                f"Train it first (--sft-labels), or allow longer judgements."
            )

    # --- what is logged and shown; nothing below affects training
    def report_reasoner(self, rows, batch, generated, scores):
        means = torch.tensor([mean(solution) for solution in scores])  # (B,): R_s
        spread = means.reshape(-1, self.cfg.group_size).std(1)
        self.log_mean("discriminator/spread_in_groups", spread)
        for i, note in enumerate(batch["notes"]):
            parts = [part["text"] for part in generated if part["row"] == i]
            note |= {"parts": parts, "verdicts": scores[i]}
            note["gold"] = are_sound(rows[i]["question"], parts)
            said = [p["judgement"] for p in generated if p["row"] == i and "judgement" in p]
            note |= {"judgement": said[0]} if said else {}

    def report_discriminator(self, chosen, batch):
        """Per kind of slice, because the two rewards pull apart on slices of correct solutions."""
        slices = [part for part in chosen for _ in part["verdicts"]]  # one per judgement
        yes = [v == 1 for part in chosen for v in part["verdicts"]]
        for right, kind in KINDS.items():
            found = [y for y, part in zip(yes, slices) if part["right"] is right]
            self.log_mean(f"discriminator/yes_{kind}", found)
        self.log_mean("discriminator/says_yes", yes)
        for note, part in zip(batch["notes"], slices):
            note["slice"] = "reference" if part["right"] is None else "generated"
            note["solution is right"] = part["right"] is not False


KINDS = {None: "reference", True: "generated_right", False: "generated_wrong"}
"""Whether a slice's solution is correct, None for a reference -> what metrics call the slice."""


def are_sound(question: str, slices: list[str]) -> list[bool | None]:
    """Embedded questions: of a solution's slices in order, whether all steps that end in it are
    correct (None: no step does).
    """
    starts = range(len(slices) + 1)
    labels = [gold_steps(question, "".join(slices[:k])) or [] for k in starts]  # of the first k
    ending = [after[len(before) :] for before, after in itertools.pairwise(labels)]
    return [all(steps) if steps else None for steps in ending]


# ------------------------------------------------------------------ stage 1
def discriminator_sft(trainer: Gar, labels: list[dict]) -> float:
    """Supervised training of the discriminator: cross-entropy of "analysis **YES|NO** rationale".

    Args:
        labels: rows of question, slice, label ("YES" or "NO"), and optionally analysis and
            rationale. Of the more frequent label, only as many are used as of the other.

    Returns:
        The last loss.
    """
    cfg, model = trainer.cfg, trainer.model
    draw = random.Random(cfg.seed)
    by_label = [[row for row in labels if row["label"] == label] for label in ("YES", "NO")]
    fewest = min(map(len, by_label))
    rows = [row for same in by_label for row in draw.sample(same, fewest)]
    draw.shuffle(rows)
    parameters = [p for n, p in model.named_parameters() if ".discriminator." in n]
    optimizer = torch.optim.AdamW(parameters, lr=cfg.lr, weight_decay=1e-4)  # the paper's decay
    if trainer.args.gradient_checkpointing:  # train() would do it, but comes later
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    with trainer.playing("discriminator"):  # in the backward pass, too, which may recompute
        for start in range(0, len(rows), cfg.micro_batch):
            batch = sft_batch(rows[start : start + cfg.micro_batch], trainer)
            mask = batch["completion_mask"]  # (b, T)
            logp = trainer.score(batch)[0]  # (b, T)
            loss = -(logp * mask).sum() / mask.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


def sft_batch(rows: list[dict], trainer: Gar) -> dict:
    """What the discriminator is asked, and what it is to write."""
    tokenizer = trainer.processing_class
    texts = [
        f"{row.get('analysis') or ''}**{row['label']}**{row.get('rationale') or ''}" for row in rows
    ]
    ids = [
        [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        for text in texts
    ]
    prompts = [judge_prompt(row["question"], row["slice"]) for row in rows]
    batch = completion_batch(prompts, ids, tokenizer, trainer.accelerator.device)
    return batch | {"player": "discriminator"}


def read_labels(path: str) -> list[dict]:
    rows = read_jsonl(Path(path), "--sft-labels")
    for where, row in rows:
        texts = [row.get("question"), row.get("slice"), row.get("analysis"), row.get("rationale")]
        right = all(isinstance(text, str) for text in texts if text is not None)
        if not (right and texts[0] and texts[1] and row.get("label") in ("YES", "NO")):
            raise UserError(f"--sft-labels {where} needs question, slice, and label YES or NO.")
    if {row["label"] for _, row in rows} != {"YES", "NO"}:
        raise UserError(f"--sft-labels {path}: it does not have both labels, YES and NO.")
    return [row for _, row in rows]


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Gar, held_out: list[dict]) -> dict[str, float]:
    """The reasoner on held-out questions. The discriminator on slices of the reasoner's solutions
    and on reference slices; with embedded questions, against gold step labels, too: P(YES | every
    step of the slice is correct), P(YES | one is not).
    """

    n = trainer.cfg.eval_samples
    texts, exact = solve(trainer, "reasoner", held_out, n)
    _, greedy = solve(trainer, "reasoner", held_out, greedy=True)
    result = {"reasoner/greedy": mean(greedy), "reasoner/accuracy": mean(exact)}
    if trainer.cfg.discriminator == "none":
        return result
    # one slice of each solution and of each reference, the same one whenever the text is the same
    judged = []
    references = [row["reference"] for row in held_out]
    human = zip(held_out, references, itertools.repeat(None))
    for row, text, right in [*zip(held_out, texts[::n], exact[::n]), *human]:
        if parts := trainer.slices(text):
            k = random.Random(text).randrange(len(parts))
            judged.append((row["question"], parts, k, right))
    prompts = [judge_prompt(question, parts[k]) for question, parts, k, _ in judged]
    judgements = trainer.generate_all("discriminator", prompts)
    yes = [parse_verdict(text) == 1 for text in judgements]
    found = {kind: [] for kind in (*KINDS.values(), "sound", "unsound")}
    for (question, parts, k, right), says_yes in zip(judged, yes):
        found[KINDS[right]].append(says_yes)
        sound = are_sound(question, parts)[k]
        if right is not None and sound is not None:
            found["sound" if sound else "unsound"].append(says_yes)
    result |= {f"discriminator/yes_{kind}": mean(says) for kind, says in found.items() if says}
    result["discriminator/says_yes"] = mean(yes)
    return result


# ------------------------------------------------------------------ main
CURVES = {  # panels of curves.png and report.html; step lines show the first metric of each
    "reasoner": ["reasoner/accuracy"],
    "P(YES)": [
        "discriminator/says_yes",
        "discriminator/yes_reference",
        "discriminator/yes_generated_right",
        "discriminator/yes_generated_wrong",
    ],
    "health": [
        "discriminator/silent",
        "discriminator/spread_in_groups",
        "reasoner/frac_reward_zero_std",
    ],
}


def load(args: Args):
    wanted = args.steps * args.questions * 4  # enough for four processes
    train, held_out = load_questions(args.dataset, wanted, args.eval_questions, args.seed)
    check_references(train + held_out, is_correct, args.dataset)
    missing = sum(not row["reference"] for row in train)
    if missing and args.discriminator == "co-trained":
        share = f"{missing} of {len(train)} questions have no reference solution"
        say(f"{share}; the discriminator does not see theirs.")
        if missing == len(train):
            raise UserError(f"--dataset {args.dataset}: {share}; take --discriminator frozen.")
    return train, held_out


def main(args: Args):
    labels = read_labels(args.sft_labels) if args.sft_labels else []
    launch(Gar, args, load, evaluate, CURVES, solve_prompt, args.group_size, labels=labels)


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
