r"""Learning to Self-Verify (Chen et al. 2026, arXiv:2602.07594): one model solves, and is taught to
verify its own solutions.

    python self_verify.py                                 the small model on a CPU, 2 minutes
    python self_verify.py --schedule generate             plain GRPO
    python self_verify.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k  one GPU

The loop is `SelfVerify.step`. One adapter learns two tasks:
    GENERATE   write G solutions of each question;  r = [the answer is right]
    VERIFY     judge solutions that the model has written, about half of them right, G times each;
               r = [verdict == answer is right] * min(pass rate of the question, .5)
    A = (r - mean) / std over the G completions of a group; the loss is `CoTrainer.loss` in
    common/core/.

    --schedule generate    plain GRPO
               verify      solutions are only written to be judged, and are never trained on
               init        --init-steps verify steps come first, then generate steps
               alter       after every --interval generate steps comes a verify step; it judges
                           solutions written since the last verify step, but the solutions of the
                           newest generate step wait for the next verify step
               mixed       both tasks in one update (as RISE, arXiv:2505.13445)

The paper's claim is an asymmetry: a model that learns to verify also gets better at solving, and a
model that learns to solve gets no better at verifying. Both tasks need gold answers.

Our changes that matter (more in docs/self_verify.md)
    1. --task solution, the default, shows the verifier the whole solution. The released code has
       this mode, but its scripts show the boxed answer alone (--task answer).
    2. The factor min(pass rate, .5) is the same for all judgements of a group, so the division by
       std takes it out again. It is never 0, because solutions of a question that no solution gets
       right are not judged. So it has no effect, neither here nor in the released code.

Shapes: P questions, G samples each, B = P * G rows.
"""

import random
import re
from dataclasses import dataclass
from typing import Literal

from common.core.errors import UserError
from common.run.args import Count, GroupSize, RunArgs, Tokens, Weight, parse, per_model


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 36
    """optimiser steps of both tasks together (paper: 1000 of generation)"""
    questions: Count = 16
    """P, questions per step and process, and solutions judged in a verify step (paper: 128)"""
    group_size: GroupSize = 8
    """G, solutions of a question, or judgements of a solution (paper: 8)"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the adapter, constant (paper: 1e-6, all weights)"""
    schedule: Literal["generate", "verify", "init", "alter", "mixed"] = "alter"
    """which of the two tasks a step trains (paper: all five)"""
    init_steps: Count = 12
    """verify steps that come first, with --schedule init (paper: 400 of 1000)"""
    interval: Count = 5
    """generate steps before each verify step, with --schedule alter (paper: 5)"""
    task: Literal["solution", "answer"] = "solution"
    """what the verifier is shown (the released code has both, its scripts show the answer)"""
    solution_tokens: Tokens = per_model(tiny=80, real=1024)
    """length limit of a solution (released code: 10240)"""
    judgement_tokens: Tokens = per_model(tiny=208, real=1024)
    """length limit of a judgement (released code: 10240)"""

    def check(self):
        if self.schedule == "init" and self.init_steps >= self.steps:
            raise UserError(
                f"--init-steps {self.init_steps} must be less than --steps {self.steps}."
            )
        if self.schedule == "alter" and self.interval < 2:
            raise UserError(
                "--interval 1: the last step's solutions wait for the next verify step, so the "
                "first would have none to judge; it must be at least 2."
            )


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.batch import Batch
from common.core.lists import chunk, mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import boxed, evaluate_solver, is_correct, prompt, solve_prompt
from common.tasks.math import load_for_steps
from common.tasks.verdicts import (
    SCORED,
    final_verdict,
    to_score,
    verdict_metrics,
    verify_prompt,
)

MOST = 0.5  # the largest factor that a pass rate becomes in the verifier's reward

# ------------------------------------------------------------------ prompts and parsing
SCORE = """Score an answer to a question from 1 to 10. First solve the question yourself inside of
<think> </think> tags, and compare. 1 to 5: it is wrong. 6 to 10: it is right. Then write the number
alone inside of one pair of <score> </score> tags."""


def judge_prompt(task: str, question: str, solution: str) -> list[dict]:
    if task == "solution":
        return verify_prompt(question, solution)
    return prompt(SCORE, to_score(question, boxed(solution)), SCORED)


def parse_verdict(task: str, text: str) -> bool | None:
    """Returns whether a judgement accepts; None if it cannot be read. A score must be a whole
    number from 1 to 10, and end the text.

    >>> parse_verdict("answer", "<think>No.</think> <score>3</score>"), parse_verdict("answer", "9")
    (False, None)
    """
    if task == "solution":
        return final_verdict(text)
    found = re.search(r"<score>\s*(\d{1,2})\s*</score>\s*\Z", text, re.ASCII)
    score = int(found[1]) if found else 0
    return score > 5 if 1 <= score <= 10 else None


# ------------------------------------------------------------------ rewards
def answer_reward(completions, answer, **_) -> list[float]:
    """GENERATE, called by TRL: returns for each solution 1 if its answer is right, else 0."""
    return [float(is_correct(c[0]["content"], a)) for c, a in zip(completions, answer)]


def verdict_reward(verdict: bool | None, right: bool, pass_rate: float) -> float:
    """VERIFY: returns [verdict == answer is right] * min(pass rate, .5); 0 if it is unreadable."""
    return float(verdict is right) * min(pass_rate, MOST)


# ------------------------------------------------------------------ what is judged
def samples_of(groups: list[list[dict]], rng: random.Random) -> list[dict]:
    """Returns right and wrong solutions, of each class at most half as many as there are groups.

    A question with right and wrong solutions gives one of each class, and one more of each class
    waits in a pool. If all solutions of a question are right, one of them waits; if all are wrong,
    none does. Each class is filled from its pool, first without and then with replacement. A class
    whose pool is empty stays short. All this is as in the released code.

    groups: the readable solutions of each question, {"right": bool, ...}.
    """
    groups = [group for group in groups if group]
    half, taken, pools = len(groups) // 2, {True: [], False: []}, {True: [], False: []}
    for group in groups:
        kinds = {c: [row for row in group if row["right"] is c] for c in (True, False)}
        if kinds[True] and kinds[False]:
            for c, rows in kinds.items():
                first, *more = rng.sample(rows, min(2, len(rows)))
                taken[c].append(first)
                pools[c] += more
        elif kinds[True]:
            pools[True].append(rng.choice(kinds[True]))
    for c, pool in pools.items():
        rng.shuffle(pool)
        missing = max(0, half - len(taken[c]))
        again = max(0, missing - len(pool)) if pool else 0
        taken[c] += pool[:missing] + rng.choices(pool, k=again) if pool else []
        taken[c] = taken[c][:half]
    samples = taken[True] + taken[False]
    rng.shuffle(samples)
    return samples


# ------------------------------------------------------------------ the trainer
class SelfVerify(CoTrainer):
    """`saved` holds, the same on all processes: `buffer`, solutions to be judged, and `last`, the
    solutions of the last generate step, which come into the buffer one step later.
    """

    def __init__(self, *inputs):
        super().__init__(*inputs)
        self.saved = {"buffer": [], "last": []}

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        solution, judgement = args.solution_tokens, args.judgement_tokens
        shown = solution if args.task == "solution" else 32  # tokens of it that are read
        G, shared = args.group_size, {"adapter": "agent"}
        return {
            "generator": Player([answer_reward], args.lr, solution, G, **shared),
            "verifier": Player([], args.lr, judgement, G, reads=shown, **shared),
        }

    def step(self, rows):
        """rows: B, every question G times in a row."""
        task = self.task_of_step()
        if task == "verify" and self.cfg.schedule == "alter":
            samples, self.saved["buffer"] = self.saved["buffer"], []
            return [self.verify(samples)]
        if task == "verify":
            texts = self.generate("generator", [row["prompt"] for row in rows])
            return [self.verify(self.to_judge(rows, texts))]
        batch = self.rollout("generator", rows)
        self.report_generator(batch)
        if task == "generate":
            self.saved["buffer"] += self.saved["last"]
            keeps = self.cfg.schedule == "alter"
            self.saved["last"] = self.to_judge(rows, batch.texts) if keeps else []
            return [batch]
        return [self.concat([batch, self.verify(self.to_judge(rows, batch.texts))])]

    def task_of_step(self) -> Literal["generate", "verify", "both"]:
        cfg, step = self.cfg, self.state.global_step
        if cfg.schedule == "init":
            return "verify" if step < cfg.init_steps else "generate"
        if cfg.schedule == "alter":
            return "verify" if step % (cfg.interval + 1) == cfg.interval else "generate"
        return "both" if cfg.schedule == "mixed" else cfg.schedule

    def to_judge(self, rows: list[dict], texts: list[str]) -> list[dict]:
        """Returns which solutions of all processes are to be judged."""
        right = [is_correct(text, row["answer"]) for row, text in zip(rows, texts)]
        groups = []
        for i, group in enumerate(chunk(texts, self.cfg.group_size)):
            of_group = right[i * self.cfg.group_size :][: self.cfg.group_size]
            about = {"question": rows[i * self.cfg.group_size]["question"], "rate": mean(of_group)}
            pairs = [(text, r) for text, r in zip(group, of_group) if boxed(text) is not None]
            groups.append([about | {"solution": text, "right": r} for text, r in pairs])
        rng = random.Random(f"{self.cfg.seed} {self.state.global_step}")
        return samples_of(self.gather(groups), rng)

    def verify(self, samples: list[dict]) -> Batch:
        """Judges P of the samples G times each."""
        rng = random.Random(f"{self.cfg.seed} {self.state.global_step} verify")
        count = min(len(samples), self.cfg.questions * self.accelerator.num_processes)
        mine = self.shard(rng.sample(samples, count))
        rows = [sample for sample in mine for _ in range(self.cfg.group_size)]  # B
        task = self.cfg.task
        prompts = [judge_prompt(task, row["question"], row["solution"]) for row in rows]
        batch = self.rollout("verifier", [{"prompt": p} for p in prompts])
        verdicts = [parse_verdict(task, text) for text in batch.texts]
        rewards = [verdict_reward(v, r["right"], r["rate"]) for v, r in zip(verdicts, rows)]  # B
        self.set_rewards(batch, rewards)  # A = (r - mean) / std of the G judgements of a solution
        self.report_verifier(batch, verdicts, rows)
        return batch

    # --- what is logged and shown; no method below affects training
    def report_generator(self, batch: Batch):
        self.log_mean("generator/accuracy", batch.rewards)

    def report_verifier(self, batch: Batch, verdicts: list, rows: list[dict]):
        self.log_mean("verifier/accuracy", [v is r["right"] for v, r in zip(verdicts, rows)])
        self.log_mean("verifier/says_right", [v is True for v in verdicts])
        self.log_mean("verifier/parsed", [v is not None for v in verdicts])
        for note, row in zip(batch.notes, rows):
            note["right"] = row["right"]


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: SelfVerify, held_out: list[dict]) -> dict[str, float]:
    """Measures the generator, and the verifier on the base's solutions of step 0."""
    n, task = trainer.cfg.eval_samples, trainer.cfg.task
    result, texts, _ = evaluate_solver(trainer, "generator", held_out)
    base = trainer.saved.setdefault("base_solutions", texts[::n])  # step 0: the base's
    # as in training, only solutions with a box are judged
    judged = [(row, text) for row, text in zip(held_out, base) if boxed(text) is not None]
    prompts = [judge_prompt(task, row["question"], text) for row, text in judged]
    judgements = trainer.generate_all("verifier", prompts)
    if not judged:
        return result
    labels = [is_correct(text, row["answer"]) for row, text in judged]
    found = verdict_metrics([parse_verdict(task, text) for text in judgements], labels)
    names = ("balanced_accuracy", "says_correct", "parsed")
    return result | {f"verifier/{name}": found[name] for name in names}


# ------------------------------------------------------------------ main
CURVES = {
    "generator": ["generator/accuracy", "generator/greedy"],
    "verifier": ["verifier/accuracy", "verifier/balanced_accuracy", "verifier/says_right"],
}


def main(args: Args):
    launch(
        SelfVerify, args, load=load_for_steps, evaluate=evaluate, curves=CURVES,
        prompt=solve_prompt,
    )  # fmt: skip


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
