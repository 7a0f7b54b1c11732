r"""Few labels: 32 answers train a verifier, whose verdicts train the generator on all questions.

    python few_labels.py                                  on a CPU, 6 minutes
    python few_labels.py --verifier beforehand            the verifier is trained first, then frozen
    python few_labels.py --verifier frozen --steps 40     the verifier is never trained
    python few_labels.py --verifier none --steps 40       plain GRPO on the same 32 answers

This is no paper's method, but a fork of tango.py: the class overrides what differs, and inherits
everything else. Without --model both train the small model that comes with the repository.
docs/few_labels.md has a command for every row of its table.

What differs
    VERIFIER = `verifier_step`: it learns from questions whose answer is known
    GENERATOR = `generator_step`: it learns from all questions
      r_out = [the answer is right]       if the answer is known;    A as in tango.py
      r_out = [the solution is accepted]  if no answer is known;     A = (r_out - mean) / std
      A judgement accepts a solution if all its verdicts do, and the box holds the result of the
      last step. With --votes V each of V judgements must accept it.

Shapes: P questions, M samples each, B = P * M rows, T completion tokens.
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
    Several,
    Share,
    Tokens,
    Weight,
    parse,
    per_model,
)


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # has all fields of tango.Args, which cannot be imported without torch
    verifier: Literal["co-trained", "beforehand", "frozen", "none"] = "co-trained"
    """beforehand = the verifier's steps, as many as with co-trained, all come first, and then it is
    frozen; frozen = untrained, none = plain GRPO on the known answers; with these two all --steps
    are the generator's"""
    labels: CountOrZero = 32
    """number of training questions whose answers are known; 0: all"""
    votes: Several = 1
    """V, judgements of a solution whose answer is not known; all must accept it"""
    hard_negatives: Share = 0.0
    """share of the verifier's questions for which it judges a right solution that was made wrong:
    steps are cut, or one has another operation (the latter on the small model's questions only)"""
    dataset: str = "tiny-hard"
    """as in tango.py; the default is the small model's questions with five or six operations"""
    steps: Count = 90
    """optimiser steps, both players together; 40 of these 90 are the generator's"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of both adapters, constant"""
    ver_warmup: CountOrZero = 10
    """verifier steps before everything else"""
    gen_steps: CountOrZero = 1
    """N_g, generator steps per cycle (tango.py: 3)"""
    eval_every: CountOrZero = 20
    """steps between evaluations on held-out questions; 0 = only first and last"""
    eval_questions: Count = per_model(tiny=128, real=128)
    """held-out questions"""
    # from here on as in tango.py
    questions: Count = 16
    """P, questions per step and process"""
    group_size: GroupSize = 8
    """M, solutions of a question, or judgements of a solution"""
    kl: Weight = 0.001
    """weight of the KL term towards the base; 0 saves the reference pass"""
    ver_steps: CountOrZero = 1
    """N_v, verifier steps per cycle"""
    alpha: Share = 0.1
    """weight of the step advantage in the first generator step; 0: no judgements"""
    alpha_end: Share = 0.001
    """what --alpha falls to by the end; --alpha 1 --alpha-end 1 keeps it at 1"""
    generator: Literal["co-trained", "frozen"] = "co-trained"
    """ablation: train the verifier only"""
    solution_tokens: Tokens = per_model(tiny=112, real=1024)
    """length limit of a solution"""
    judgement_tokens: Tokens = per_model(tiny=208, real=1024)
    """length limit of a judgement"""

    def check(self):
        if self.generator == "frozen" and self.verifier != "co-trained":
            raise UserError(f"--generator frozen, --verifier {self.verifier}: nobody is trained.")
        if self.gen_steps + self.ver_steps == 0:
            raise UserError("--gen-steps 0 and --ver-steps 0: a cycle needs a step of one of them.")
        if self.alpha_end == 0 < self.alpha:
            raise UserError("--alpha-end 0: alpha decays by a factor, so the end must be above 0.")


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

import tango
from common.core.errors import say
from common.core.lists import mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import (
    beginnings,
    box_follows,
    is_correct,
    result_of,
    solve_prompt,
    split_steps,
)
from common.tasks.math import count_for_steps, load_for_steps
from common.tiny.diagnostics import panels
from common.tiny.tasks import format_solution, parse_question, with_another_operation
from tango import has_countable_steps, judge

import torch


# ------------------------------------------------------------------ rewards
def outcome_reward(completions, answer, **_) -> list[float | None]:
    """Generator: r_out = [answer == gold]; None where no answer is known."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(is_correct(text, gold)) if gold else None for text, gold in zip(texts, answer)]


def accepts(judgement: tango.Judgement, solution: str) -> bool:
    """Whether a judgement accepts every step of a solution, and the whole. A judgement that has not
    as many verdicts as there are steps accepts nothing, nor is a solution accepted that has no step
    or no box.
    """
    fits = len(judgement.verdicts) == len(split_steps(solution))
    whole = has_countable_steps(solution) and judgement.final is True
    return whole and fits and all(judgement.verdicts)


def all_accepted(judgements: list[tango.Judgement], solutions: list[str]) -> torch.Tensor:
    """Generator: r_out of B solutions without a known answer, (B,). It is 1 if the verifier accepts
    every step and the whole, and if the answer in the box is the result of the last step. So a
    further step must be accepted as well. (With the step rewards of tango.py alone a solution of
    four rejected steps can beat a solution of one.) Whether the solution is complete, and whether
    its steps are those that the question asks for, only the verifier can say: behind "45+9=54" the
    step "7*1=7" is true, and then a box with 7 follows.
    """
    both = zip(judgements, solutions)
    return torch.tensor([accepts(said, y) and box_follows(y) for said, y in both]).float()


# ------------------------------------------------------------------ the trainer
class FewLabels(tango.Tango):
    @staticmethod
    def define_players(args: Args):
        players = tango.Tango.define_players(args)
        players["generator"].rewards = [outcome_reward]
        return players

    def player_at(self, step: int) -> str:
        """With --verifier beforehand all of the verifier's turns in tango's schedule come first."""
        if self.cfg.verifier != "beforehand":
            return super().player_at(step)
        turns = [tango.Tango.player_at(self, n) for n in range(self.cfg.steps)]
        return "verifier" if step < turns.count("verifier") else "generator"

    def with_answers(self, questions: list[dict]) -> list[dict]:
        """Returns as many questions as these, whose answers are known."""
        if not self.cfg.labels:
            return questions
        known = [row for row in self.train_rows if row["answer"]]
        rng = self.random_numbers()

        def draw(questions):
            rows = rng.sample(known, min(len(questions), len(known)))
            return rows + rng.choices(known, k=len(questions) - len(rows))

        rows = self.over_all_processes(draw, questions)
        return [{"prompt": solve_prompt(row["question"]), **row} for row in rows]

    def verifier_step(self, questions):
        return super().verifier_step(self.with_answers(questions))

    def solutions_to_judge(self, questions):
        """P questions -> P solutions, of which --hard-negatives are right ones made wrong, as far
        as they can be. They need no further answer: where the generator's solution is wrong, the
        reference is taken.
        """
        solutions = super().solutions_to_judge(questions)
        for i, row in enumerate(questions):
            rng = self.random_numbers(row["question"])
            if rng.random() < self.cfg.hard_negatives:
                right = is_correct(solutions[i], row["answer"])
                of = solutions[i] if right else row["reference"]
                # no wrong box, which `box_follows` sees, except behind a step without "="
                made = [made_wrong(kind, row, of, rng) for kind in rng.sample(KINDS[:2], 2)]
                solutions[i] = made[0] or made[1] or solutions[i]
        return solutions

    def generator_step(self, rows):
        """B rows, every question M times in a row -> a solution of each, and its advantages."""
        if self.cfg.verifier == "none":
            M = self.cfg.group_size
            known = self.with_answers(rows[::M])  # P
            return super().generator_step([row for row in known for _ in range(M)])
        batch, votes = self.rollout("generator", rows), []
        for _ in range(self.cfg.votes):
            judgements = self.ask_verifier(rows, batch)  # B; the last ones are reported
            votes.append(all_accepted(judgements, batch.texts))
        accepted = torch.stack(votes).amin(0).to(batch.rewards)  # (B,): by all votes
        unknown = batch.rewards.isnan()  # (B,)
        r_out = torch.where(unknown, accepted, batch.rewards)  # (B,)
        alpha = self.alpha()
        # Where verdicts are r_out already, A has no step term. All rows of a group have the same
        # question, so the answer is known for all of them or for none.
        self.set_advantages(batch, r_out, judgements, alpha * ~unknown[:, None])
        self.log_mean("generator/accepted", accepted)
        self.report_generator(rows, batch, judgements, alpha)
        return batch


# ------------------------------------------------------------------ right solutions, made wrong
KINDS = ("incomplete", "other_operation", "wrong_box")


def made_wrong(kind: str, row: dict, solution: str, rng: random.Random) -> str | None:
    """Makes a right solution wrong, in a way that a verifier of steps overlooks. If all its steps
    are true, so are all that are left. None where this cannot be done.

    kind: incomplete (some last steps are cut, and the box holds the result of the step before),
        other_operation (see `with_another_operation`; only of the small model's questions, whose
        arithmetic is modulo 61), wrong_box (the box holds the result of an earlier step)
    """
    steps, kept, found = split_steps(solution), beginnings(solution), []
    if len(steps) < 2:
        return None
    if kind == "other_operation":
        changed = parse_question(row["question"]) and with_another_operation(rng, steps)
        found = [format_solution(changed, result_of(changed[-1]))] if changed else []
    else:  # some earlier step, whose result is in the box
        for k in rng.sample(range(len(steps) - 1), len(steps) - 1):
            end = f"\n<answer>\\boxed{{{result_of(steps[k])}}}</answer>"
            found += [kept[k if kind == "incomplete" else -1] + end] * bool(result_of(steps[k]))
    return next((wrong for wrong in found if not is_correct(wrong, row["answer"])), None)


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: FewLabels, held_out: list[dict]) -> dict[str, float]:
    """As tango.py does, and also how many right solutions that were made wrong the verifier
    accepts. A generator can learn to write such solutions, and balanced accuracy does not show it:
    it is about solutions of the starting model, which makes other mistakes. Each solution has one
    judgement, and `box_follows` is not asked.
    """
    result = tango.evaluate(trainer, held_out)
    if trainer.cfg.verifier == "none":
        return result
    some = held_out[: max(1, len(held_out) // 4)]
    for kind in KINDS:
        made = [made_wrong(kind, r, r["reference"], random.Random(r["question"])) for r in some]
        rows = [row for row, text in zip(some, made) if text]
        texts = [text for text in made if text]
        if rows:
            said = zip(judge(trainer, rows, texts), texts)
            result[f"verifier/accepts_{kind}"] = mean([accepts(v, y) for v, y in said])
    return result


# ------------------------------------------------------------------ main
CURVES = tango.CURVES | {"generator": ["generator/accepted", "generator/accuracy"]}


def load(args: Args) -> tuple[list[dict], list[dict]]:
    """Returns (training rows, held-out rows); training answers after the first --labels are ""."""
    train, held_out = load_for_steps(args, max(args.labels, count_for_steps(args)))
    for row in train[args.labels :] if args.labels else []:
        row |= {"answer": "", "reference": ""}
    return train, held_out


def main(args: Args):
    both = args.verifier in ("co-trained", "beforehand") and args.generator == "co-trained"
    if both and args.steps <= args.ver_warmup:
        say(f"note: all --steps {args.steps} are --ver-warmup; the generator will not be trained")
    curves = (tango.CURVES if args.verifier == "none" else CURVES) | panels(args.dataset)
    launch(FewLabels, args, load=load, evaluate=evaluate, curves=curves, prompt=solve_prompt)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
