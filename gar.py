r"""GAR, Generative Adversarial Reasoner (Liu et al. 2025, arXiv:2512.16917): a reasoner and a discriminator of slices of its
reasoning, trained against each other with GRPO.

The loop (paper, section 3, stage 2)
    repeat
      sample G solutions per question, cut their reasoning into slices; the discriminator says YES or NO to each slice
      REASONER       R = [answer right] + mean of its slices' verdicts; one number per solution, plain GRPO
      DISCRIMINATOR  on as many reference slices as generated ones:  R = R_d + 0.5 * R_a, GRPO over judgements of one slice
                     R_d  real or generated: YES to a reference slice, NO to a generated one
                     R_a  agreement: the verdict on a generated slice equals the correctness of its solution's answer
    Both are updated from the same batch. On generated slices of right solutions the two terms pull in opposite directions.

Where we differ from the paper [P], what it leaves open, and how we read it
     1. QLoRA: both players are adapters on one base. [P: a 7B reasoner, a 1.5B discriminator.] No code was released.
     2. R_d = E_ref[log M_d] + E_gen[log(1 - M_d)] needs M_d(x) in [0, 1], and [P] does not say how a text-writing M_d gives it.
        Here each sampled verdict is a 0/1 reward: the log of 0 or 1 would need a floor, and this is a reward for GRPO as it is.
     3. R_a on reference slices: not said; here they have none, and their largest reward is 1.
     4. The discriminator's group: not said; here M judgements of the same slice, for some generated slices and as many
        reference slices; all other generated slices are judged once. The group's mean, but the BATCH's std: two verdicts
        divided by their own std are +-1 whatever the weights of R_d and R_a, and rows 6 and 7 of table 4 would be one.
     5. Order in an iteration: not said; here all slices are judged by the discriminator as it is, then both are updated.
     6. Reference slices: not said whose; here the data set's own solution of the same question.
     7. A discriminator that gives no verdict: not said; 0 for the reasoner, no reward for the discriminator.
     8. The KL weight: not said; here 0. Constant lr, not a cosine from 1e-6 to 5e-7.
     9. Slices: [P] cuts at newlines and cue words and merges to at most 320 tokens; minimum length and full cue list not said.
    10. Stage 1, supervised training of the discriminator: the embedded model has had it; for a real one give `--sft-labels`.
        One pass over the labels, then on. [P: 500 steps of 128, lr 1e-4, 100 of warm-up, early stopping.]

Run
    python gar.py                                                                  # embedded default, CPU, five minutes
    python gar.py --discriminator none                                             # plain GRPO, for comparison
    python gar.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k        # one GPU, both players in 4-bit

Shapes: P questions, G solutions each, B = P * G rows, T completion tokens.
"""

import itertools
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.advantage import group_advantage
from common.answers import is_correct
from common.cotrainer import CoTrainer, Player
from common.data import UserError, load_questions, read_jsonl
from common.memory import check_memory, machine_options
from common.model import load_model
from common.run import check_batch, fill_in, mean, plain_errors, start_run
from common.tiny.tasks import gold_steps

import torch
import tyro
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOConfig


# ------------------------------------------------------------------ arguments
@dataclass
class Args:
    # --- alike in all six scripts; what is None depends on the model, see SMALL and REAL below
    model: str = "tiny"
    """the embedded default, a hub id or a folder"""
    dataset: str = "tiny"
    """the embedded questions, a hub id (openai/gsm8k) or a .jsonl file with question, answer and reference"""
    out: str | None = None
    """run folder, runs/gar-<time>-<seed> if not given; given again, the run goes on where it stopped"""
    seed: int = 0
    """of adapters, questions and sampling"""
    steps: int = 24
    """optimiser steps, each of both players"""
    questions: int = 16
    """P, questions per step and process"""
    group_size: int = 8
    """G, solutions of one question, or judgements of one slice (paper: not said)"""
    micro_batch: int | None = None
    """rows per forward and backward pass (embedded 32, real 8); questions * group_size must be a multiple"""
    lr: float | None = None
    """learning rate of the adapters, constant (embedded 1e-3, real 2e-5; paper: 1e-6, all weights)"""
    kl: float = 0.0
    """weight of the k3 KL term to the base (paper: not said)"""
    lora_rank: int = 16
    """rank of each adapter"""
    four_bit: bool = torch.cuda.is_available()
    """base in 4-bit NF4; works on a CPU too, slowly"""
    rows_at_once: int | None = None
    """most rows sampled at a time, which bounds the KV cache (embedded 256, real 64)"""
    eight_bit_adam: bool = False
    """Adam's moments in 8 bits, paged to the CPU where the GPU is full"""
    vllm: bool = False
    """sample with vLLM, which needs a GPU and --no-four-bit"""
    dry_run: bool = False
    """print how much memory this needs, load nothing, and end"""
    eval_every: int = 16
    """steps between evaluations on held-out questions; 0 = only first and last"""
    eval_questions: int = 512
    """held-out questions"""
    save_every: int = 20
    """steps between checkpoints"""
    show_every: int = 20
    """steps between samples shown; 0 = never"""
    report_to: str = "none"
    """any tracker that transformers knows: trackio, wandb, tensorboard"""
    # --- the paper
    discriminator: Literal["co-trained", "frozen", "none"] = "co-trained"
    """ablation, rows 7, 4 and 2 of table 4: a discriminator that is never trained, or none (plain GRPO)"""
    reward: Literal["both", "alignment", "adversarial"] = "both"
    """ablation, rows 7, 5 and 6 of table 4: the discriminator's reward"""
    slice_tokens: int | None = None
    """L, longest slice (embedded 18, real 320 as in the paper: longer ones nearly always hold an error)"""
    min_slice_tokens: int | None = None
    """a cue word ends a slice only once it is as long as this (embedded 6, real 48; paper: not said)"""
    solution_tokens: int | None = None
    """length limit of a solution (embedded 64, real 1024)"""
    judgement_tokens: int | None = None
    """K, length limit of a judgement, which cuts its rationale only (embedded 64, real 128; paper: 128)"""
    sft_labels: str | None = None
    """stage 1 first: a .jsonl file with question, slice, label (YES or NO) and optionally analysis and rationale"""
    silent_share: float = 0.5
    """stop with an explanation when a larger share of a step's judgements has no verdict"""


SMALL = {"lr": 1e-3, "slice_tokens": 18, "min_slice_tokens": 6, "solution_tokens": 64, "judgement_tokens": 64}
REAL = {"lr": 2e-5, "slice_tokens": 320, "min_slice_tokens": 48, "solution_tokens": 1024, "judgement_tokens": 128}
LAMBDA_MATCH, LAMBDA_SLICES, LAMBDA_REAL, LAMBDA_AGREE = 1.0, 1.0, 1.0, 0.5  # l1 to l4 (paper sec. 4.1)

# ------------------------------------------------------------------ prompts and parsing
SOLVE = r"""Solve the problem step by step. Put every step in its own <step> </step> tags, and after the last one the answer
in this form: <answer>\boxed{...}</answer>. Write nothing outside of these tags.
For example, for 15-(3*2):
<step>First the bracket: 3*2 = 6.</step>
<step>Then 15-6 = 9.</step>
<answer>\boxed{9}</answer>"""

JUDGE = r"""You are given a problem and a part of somebody's reasoning about it. Analyse very briefly whether this part is
sound, checking it sentence by sentence. Then give your verdict, **YES** if it is sound or **NO** if it is not, and last a
short reason."""


def solve_prompt(question: str) -> list[dict]:
    return [{"role": "system", "content": SOLVE}, {"role": "user", "content": question}]


def judge_prompt(question: str, part: str) -> list[dict]:
    """The discriminator sees the question and one slice; neither the answer nor where the slice comes from."""
    user = f"Problem: {question}\nReasoning:\n{part.rstrip()}\nIs it sound?"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": user}]


def parse_verdict(text: str) -> int | None:
    """1 = YES, 0 = NO, None = neither: the first verdict, since a rationale may quote another.

    >>> parse_verdict("3+4 is 7. **NO** a step is wrong; **YES** would need 8"), parse_verdict("yes")
    (0, None)
    """
    match = re.search(r"\*\*(YES|NO)\*\*", text)
    return None if match is None else int(match[1] == "YES")


def reasoning(text: str) -> str:
    """What comes before the answer, the last one: only this is sliced, and a tag in passing must not hide what follows it."""
    return text.rsplit("<answer>", 1)[0]


# A new line, or a sentence that begins with a cue of a new thought. Zero-width, so that joining gives the text back.
CUES = "Wait|Since|Therefore|However|But|So|Thus|Hence|Then|Now|Next|First|Second|Finally|Alternatively|Let me|Let's|Hmm|Okay"
CUTS = re.compile(rf"(?<=\n)(?=[^\n])|(?<=[.!?;]\s)(?=(?:{CUES})\b)")


def slice_reasoning(text: str, count_tokens, max_tokens: int, min_tokens: int) -> list[str]:
    """Slices of reasoning, in order: cut at newlines and discourse cues, neighbours merged (paper sec. 3, app. D.1).

    A slice ends before a cue once it has `min_tokens`, and at any cut if the next segment would take it past `max_tokens`.
    A segment that is too long alone is split hard. `count_tokens(str) -> int`.

    Returns:
        Slices whose concatenation is `text`, none longer than `max_tokens` (unless one character is), none empty.
    """
    slices, current = [], ""
    for segment in filter(None, CUTS.split(text)):
        for piece in _fitting(segment, count_tokens, max_tokens):
            starts_anew = re.match(rf"(?:{CUES})\b", piece) is not None
            too_long = count_tokens(current + piece) > max_tokens
            if current and (too_long or (starts_anew and count_tokens(current) >= min_tokens)):
                slices.append(current)
                current = ""
            current += piece
    if current:
        slices.append(current)
    return slices


def _fitting(segment: str, count_tokens, max_tokens: int) -> list[str]:
    """The segment in pieces of at most max_tokens, halved until they fit: token counts are known of strings only."""
    if count_tokens(segment) <= max_tokens or len(segment) == 1:
        return [segment]
    middle = len(segment) // 2
    return _fitting(segment[:middle], count_tokens, max_tokens) + _fitting(segment[middle:], count_tokens, max_tokens)


# ------------------------------------------------------------------ rewards
def match_reward(completions, answer, **_) -> list[float]:
    """R_m = [answer == gold], called by TRL. The slices' part is added in the trainer, which has the verdicts."""
    return [float(is_correct(c[0]["content"], gold)) for c, gold in zip(completions, answer)]


def reasoner_reward(exact: list[int], verdicts: list[list[float | None]]) -> list[float]:
    """R = 1 * R_m + 1 * R_s, R_s = MEAN of the solution's slice verdicts: a sum would pay for length.

    exact: 0/1 per solution.  verdicts: per solution one number per slice, 1 = YES, or the share of YES if it was judged several
    times; None (no verdict) counts as 0, a solution without slices has mean 0."""
    slices = [mean([v or 0 for v in of_one]) for of_one in verdicts]
    return [LAMBDA_MATCH * e + LAMBDA_SLICES * s for e, s in zip(exact, slices)]


def discriminator_rewards(
    verdicts: list[int | None], is_reference: list[bool], answer_right: list[bool | None], kind: str = "both"
) -> list[float]:
    """R = 1 * R_d + 0.5 * R_a per judgement, 0 without a verdict.

    verdicts: 1 = YES, 0 = NO, None = not parsed.  answer_right: of the slice's solution, None on reference slices, which
    have no R_a.  kind: "both", "alignment" (R_a alone) or "adversarial" (R_d alone)."""
    rewards = []
    for verdict, reference, right in zip(verdicts, is_reference, answer_right):
        R_d = float(verdict == int(reference))
        R_a = float(right is not None and verdict == int(right))
        R = (LAMBDA_REAL * R_d if kind != "alignment" else 0.0) + (LAMBDA_AGREE * R_a if kind != "adversarial" else 0.0)
        rewards.append(R if verdict is not None else 0.0)
    return rewards


def judgement_reward(completions, reference, right, kind, **_) -> list[float]:
    """`discriminator_rewards`, called by TRL."""
    return discriminator_rewards([parse_verdict(c[0]["content"]) for c in completions], reference, right, kind[0])


# ------------------------------------------------------------------ the trainer: one optimiser step
class Gar(CoTrainer):
    """Inherited: sampling, reward calls, log-probs, the clipped loss, the optimiser, logging, checkpoints.
    Here: slices, both rewards, and which judgements train the discriminator."""

    def __init__(self, model, script: Args, **kwargs):
        self.script = script
        players = {
            "reasoner": Player([match_reward], script.lr, script.solution_tokens, script.group_size),
            "discriminator": Player([judgement_reward], script.lr, script.judgement_tokens, script.group_size),
        }
        super().__init__(model, players, kl=script.kl, rows_at_once=script.rows_at_once, **kwargs)
        self.example = ""

    def count_tokens(self, text: str) -> int:
        return len(self.processing_class(text, add_special_tokens=False).input_ids)

    def slices(self, text: str) -> list[str]:
        s = self.script
        parts = slice_reasoning(reasoning(text), self.count_tokens, s.slice_tokens, s.min_slice_tokens)
        return [part for part in parts if part.strip()]  # white space is no reasoning, and must not earn a YES

    def _generate_and_score_completions(self, rows):
        """rows: B of them, every question G times in a row."""
        batch = self.turn("reasoner", rows)  # exact match (B,)
        exact = batch["rewards"].int().tolist()
        self.log_metric("rea/accuracy", mean(self.gather(exact)))
        if self.script.discriminator == "none":
            batch["advantages"] = group_advantage(batch["rewards"], self.script.group_size)  # (B,)
            return batch
        # every generated slice: which solution it is from, and its text
        generated = [(i, part) for i, text in enumerate(batch["texts"]) for part in self.slices(text)]
        verdicts = self.judge(rows, exact, generated)  # also updates the discriminator, from these judgements
        share_yes = [mean([v == 1 for v in of_one]) for of_one in verdicts]  # r_gi of every slice, however often it was judged
        scores = [[r for (i, _), r in zip(generated, share_yes) if i == row] for row in range(len(rows))]
        # R_m + R_s are added BEFORE the group normalisation: R_s mostly breaks ties, and dominates where all are right or wrong
        R = torch.tensor(reasoner_reward(exact, scores), device=batch["rewards"].device)  # (B,)
        batch["advantages"] = group_advantage(R, self.script.group_size)  # (B,), one number per solution
        spread = torch.tensor([mean(of_one) for of_one in scores]).reshape(-1, self.script.group_size).std(1)
        self.log_metric("rea/total_reward", mean(self.gather(R.tolist())))
        self.log_metric("dis/spread_in_groups", mean(self.gather(spread.tolist())))
        for i, (note, r) in enumerate(zip(batch["notes"], R.tolist())):
            note["rewards"]["with the slices"] = r
            parts = [part for row, part in generated if row == i]
            note |= {"parts": parts, "verdicts": scores[i], "gold": are_sound(rows[i]["question"], parts)}
        self.become("reasoner")
        return batch

    def judge(self, rows, exact, generated) -> list[list[int | None]]:
        """Verdicts on every generated slice. Some get M judgements, and with as many reference slices they are the batch on
        which the discriminator is updated; all others get one."""
        s, M = self.script, self.script.group_size
        draw = random.Random(f"{s.seed} {self.state.global_step} {self.accelerator.process_index}")
        count = len(rows) // M // 2  # slices of each kind: 2 * count * M = B judgements in all
        references = [(row, part) for row in rows[::M] if row["reference"] for part in self.slices(row["reference"])]
        trained = s.discriminator == "co-trained" and min(self.gather([min(len(generated), len(references))])) >= count > 0
        chosen = sorted(draw.sample(range(len(generated)), count)) if trained else []
        verdicts: list[list[int | None]] = [[] for _ in generated]
        if trained:
            asked = [(rows[generated[j][0]], generated[j][1], False, bool(exact[generated[j][0]])) for j in chosen]
            asked += [(row, part, True, None) for row, part in draw.sample(references, count)]
            batch = self.turn(
                "discriminator",
                [
                    {"prompt": judge_prompt(row["question"], part), "reference": reference, "right": right, "kind": s.reward}
                    for row, part, reference, right in asked
                    for _ in range(M)
                ],
            )
            std = torch.tensor(self.gather(batch["rewards"].tolist())).std()  # of all judgements, see 4 above
            batch["advantages"] = group_advantage(batch["rewards"], M, scale=False) / (std + 1e-6)  # (2 * count * M,)
            said = [parse_verdict(text) for text in batch["texts"]]
            for place, j in enumerate(chosen):
                verdicts[j] = said[place * M : (place + 1) * M]
            self.log_verdicts(said, [a for a in asked for _ in range(M)])
            for note, (_, _, reference, right) in zip(batch["notes"], [a for a in asked for _ in range(M)]):
                note |= {"slice": "reference" if reference else "generated", "solution is right": reference or right}
        others = [j for j, of_one in enumerate(verdicts) if not of_one]
        texts = self.act("discriminator", [judge_prompt(rows[generated[j][0]]["question"], generated[j][1]) for j in others])
        for j, text in zip(others, texts):
            verdicts[j] = [parse_verdict(text)]
        everything = self.gather([v for of_one in verdicts for v in of_one])
        silent = mean([v is None for v in everything])
        self.log_metric("dis/silent", silent)
        if silent > s.silent_share:
            raise UserError(
                f"step {self.state.global_step}: {silent:.0%} of the discriminator's judgements have no **YES** or **NO** "
                f"within --judgement-tokens {s.judgement_tokens}. Train it first (--sft-labels), or allow longer judgements."
            )
        if texts:
            i, part = generated[others[0]]
            self.example = f"--- {rows[i]['question']}\n{part}--- the discriminator\n{texts[0]}\n---"
        if trained:
            self.update(batch)  # after everything has been judged by the discriminator as it was
        self.log_metric("dis/updated", float(trained))
        return verdicts

    def log_verdicts(self, said, asked):
        """Per class, because the two rewards pull apart on generated slices of right solutions."""
        for name, wanted in {"reference": None, "generated_right": True, "generated_wrong": False}.items():
            found = self.gather([v == 1 for v, (*_, right) in zip(said, asked) if right is wanted])
            if found:
                self.log_metric(f"dis/yes_{name}", mean(found))
        self.log_metric("dis/says_yes", mean(self.gather([v == 1 for v in said])))


def are_sound(question: str, slices: list[str]) -> list[bool | None]:
    """Of a solution's slices in order, on embedded questions: whether all steps that end in it are right (None: none does)."""
    labels = [gold_steps(question, "".join(slices[:k])) or [] for k in range(len(slices) + 1)]  # of the first k slices
    ending = [after[len(before) :] for before, after in itertools.pairwise(labels)]
    return [all(steps) if steps else None for steps in ending]


# ------------------------------------------------------------------ stage 1: supervised training of the discriminator
def discriminator_sft(trainer: Gar, labels: list[dict], epochs: int = 1) -> float:
    """Cross-entropy on (question, slice) -> "analysis **YES|NO** rationale", YES and NO in equal numbers (the majority is cut).

    labels: rows of question, slice, label ("YES" or "NO"), and optionally analysis and rationale.  Returns the last loss."""
    trainer.become("discriminator")
    tokenizer, model = trainer.processing_class, trainer.model
    by_label = {label: [row for row in labels if row["label"] == label] for label in ("YES", "NO")}
    count = min(map(len, by_label.values()))
    draw = random.Random(trainer.script.seed)
    parameters = [p for n, p in model.named_parameters() if ".discriminator." in n]
    optimizer = torch.optim.AdamW(parameters, lr=trainer.script.lr, weight_decay=1e-4)  # the paper's decay
    loss = torch.zeros(())
    if trainer.args.gradient_checkpointing:  # train() would do it, but comes later
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for _ in range(epochs):
        rows = [row for of_one in by_label.values() for row in draw.sample(of_one, count)]
        draw.shuffle(rows)
        for start in range(0, len(rows), trainer.script.micro_batch):
            ids, written = [], []
            for row in rows[start : start + trainer.script.micro_batch]:
                prompt = tokenizer.apply_chat_template(
                    judge_prompt(row["question"], row["slice"]), add_generation_prompt=True, return_dict=True
                )["input_ids"]
                text = f"{row.get('analysis', '')}**{row['label']}**{row.get('rationale', '')}"
                answer = tokenizer(text, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
                ids.append(torch.tensor(prompt + answer))
                written.append(torch.tensor([0] * len(prompt) + [1] * len(answer)))
            there = pad_sequence([torch.ones_like(i) for i in ids], True).to(model.device)  # (b, L)
            ids = pad_sequence(ids, True, tokenizer.pad_token_id).to(model.device)  # (b, L)
            mask = pad_sequence(written, True).to(model.device)[:, 1:]  # (b, L - 1): of what is predicted
            logp = trainer._get_per_token_logps_and_entropies(model, ids, there, mask.shape[1])[0]  # (b, L - 1)
            loss = -(logp * mask).sum() / mask.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    trainer.become("reasoner")
    return loss.item()


def read_labels(path: str) -> list[dict]:
    rows = read_jsonl(Path(path), "--sft-labels")
    for where, row in rows:
        if not (row.get("question") and row.get("slice") and row.get("label") in ("YES", "NO")):
            raise UserError(f"--sft-labels {where} needs question, slice, and label YES or NO.")
    if {row["label"] for _, row in rows} != {"YES", "NO"}:
        raise UserError(f"--sft-labels {path}: it does not have both labels, YES and NO.")
    return [row for _, row in rows]


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Gar, held_out: list[dict]) -> dict[str, float]:
    """The reasoner on held-out questions; the discriminator on slices of the reasoner's solutions and on reference slices,
    and, on embedded questions, against gold step labels: P(YES | every step of the slice is right), P(YES | one is wrong)."""
    state = trainer.accelerator
    rows = held_out[state.process_index :: state.num_processes]
    prompts = [solve_prompt(row["question"]) for row in rows]

    def right(texts: list[str], of: list[dict]) -> list[bool]:
        return [is_correct(text, row["answer"]) for text, row in zip(texts, of)]

    texts = trainer.act("reasoner", prompts)
    exact = right(texts, rows)
    result = {
        "rea/greedy": mean(trainer.gather(right(trainer.act("reasoner", prompts, greedy=True), rows))),
        "rea/accuracy": mean(trainer.gather(exact)),
    }
    if trainer.script.discriminator == "none":
        return result
    # one slice of each solution and of each reference, the same ones at every evaluation of the same texts
    cut = [(row, trainer.slices(text), ok) for row, text, ok in zip(rows, texts, exact)]
    cut += [(row, trainer.slices(row["reference"]), None) for row in rows if row["reference"]]
    draw = random.Random("evaluation")
    asked = [(row, parts, ok, draw.randrange(len(parts))) for row, parts, ok in cut if parts]
    judgements = trainer.act("discriminator", [judge_prompt(row["question"], parts[k]) for row, parts, _, k in asked])
    said = [parse_verdict(text) for text in judgements]
    groups: dict[str, list[bool]] = {"reference": [], "generated_right": [], "generated_wrong": [], "sound": [], "unsound": []}
    for (row, parts, ok, k), verdict in zip(asked, said):
        groups["reference" if ok is None else "generated_right" if ok else "generated_wrong"].append(verdict == 1)
        sound = are_sound(row["question"], parts)[k]
        if ok is not None and sound is not None:
            groups["sound" if sound else "unsound"].append(verdict == 1)
    for name, values in groups.items():
        everyone = trainer.gather(values)
        if everyone:
            result[f"dis/yes_{name}"] = mean(everyone)
    result["dis/says_yes"] = mean(trainer.gather([verdict == 1 for verdict in said]))
    return result


# ------------------------------------------------------------------ main
CURVES = {
    "reasoner": ["rea/accuracy"],
    "P(YES)": ["dis/says_yes", "dis/yes_reference", "dis/yes_generated_right", "dis/yes_generated_wrong"],
    "health": ["dis/silent", "dis/spread_in_groups", "rea/frac_reward_zero_std"],
}


def main(args: Args):
    args = fill_in(args, SMALL, REAL)
    check_batch(args.questions, args.group_size, args.micro_batch)
    if args.discriminator == "co-trained" and args.questions < 2:
        raise UserError("--questions 1 leaves no room for a generated and a reference slice; take 2 or more.")
    labels = read_labels(args.sft_labels) if args.sft_labels else []
    check_memory(args, [(0, args.solution_tokens), (args.solution_tokens, args.judgement_tokens)], adapters=2)
    train, held_out = load_questions(args.dataset, args.steps * args.questions * 4, args.eval_questions, args.seed)
    run = start_run(args, __file__, train, held_out)
    missing = sum(not row["reference"] for row in train)
    if missing and args.discriminator == "co-trained":
        run.say(f"{missing} of {len(train)} questions have no reference solution; the discriminator does not see theirs.")
        if missing == len(train):
            raise UserError(f"--dataset {args.dataset}: no question has a reference solution; take --discriminator frozen.")
    model, tokenizer = load_model(args.model, ["reasoner", "discriminator"], args.lora_rank, args.four_bit, args.seed)
    accumulation = args.questions * args.group_size // args.micro_batch
    config = GRPOConfig(
        output_dir=str(run.folder),
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,  # one optimiser step per batch of rollouts: strictly on-policy, the ratio is 1
        num_generations=args.group_size,
        max_completion_length=args.solution_tokens,
        loss_type="dapo",  # token mean over the whole batch
        scale_rewards="group",
        max_grad_norm=1.0,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.999,
        save_steps=args.save_every,
        save_total_limit=2,
        report_to=args.report_to,
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=True,  # the idle adapter has no gradient
        **machine_options(args),  # bfloat16, checkpointing, Adam in 8 bits, vLLM
    )
    rows = [{"prompt": solve_prompt(row["question"]), **row} for row in train]
    trainer = Gar(model, args, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    if labels and run.checkpoint is None:
        run.say(f"stage 1: {len(labels)} labels, last loss {discriminator_sft(trainer, labels):.3f}")
    run.train(trainer, lambda: evaluate(trainer, held_out), args, CURVES)


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
