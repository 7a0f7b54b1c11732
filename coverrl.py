r"""CoVerRL (2026, arXiv:2603.17775): one model solves, verifies and corrects, without gold answers.

    python coverrl.py                                     the small model on a CPU, 2 minutes
    python coverrl.py --verifier none                     majority vote alone: TTRL
    python coverrl.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k    one GPU

The loop (algorithm 1) is `CoVerRL.step`
    SOLVE     writes N solutions of each question; its label m is the most frequent answer
    VERIFY    V+ = judgements of up to M different solutions with the answer m, one for each
              V- = as many judgements of ONE solution with the rarest other answer
    FILTER    keeps a question if more than half of its V+ say CORRECT
    CORRECT   writes K corrected solutions after each judgement that says INCORRECT
    UPDATE    is one update of one model, on T of the N solutions, all judgements, all corrections
              r = [format] + [agrees with m];  a judgement agrees if it accepts a solution with
              the answer m, or rejects a solution with another answer
              A = (r - mean) / std within a group: the solutions of a question; V+; V-; the
              corrections after one judgement

So the labels come from a vote, and the vote counts only where a verifier with the same weights
accepts it. The verifier is rewarded for agreeing with the vote. V+ and V- are equally many, so a
verifier that always says the same is right half of the time.

Our changes that matter (more in docs/coverrl.md)
    1. The three turns of a conversation are separate prompts. Each shows what it must know of the
       turns before. The verifier does not see that the solution is its own.
    2. If all answers that can be read agree, the question is kept without being verified. In the
       released code all solutions must also be readable. Algorithm 1 verifies such questions.
    3. A question that is dropped has advantages of 0, but the small KL term still acts on it and it
       counts in the mean over tokens. The same holds for all judgements with --verifier untrained.
    4. Only judgements in the required form are read. The released code also guesses.
    5. As in the released code, a readable form earns 1, and V- is written before the filter. In the
       paper a reward is 1 for agreeing with m, and V- follows the filter. V+ takes the first
       solutions that differ; the paper samples them, the released code takes the first.

Shapes: P questions, N solutions of each, T of them trained, B rows of the joined batch.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from common.core.errors import UserError
from common.run.args import Count, CountOrZero, GroupSize, RunArgs, Tokens, Weight, parse, per_model


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 24
    """optimiser steps"""
    questions: Count = 6
    """P, questions per step and process (paper: 64)"""
    samples: GroupSize = 16
    """N, solutions of a question that vote (paper: 32)"""
    group_size: GroupSize = 8
    """T, solutions of a question that are trained on (paper: 16)"""
    checks: GroupSize = 4
    """M, most judgements in V+, and as many in V- (paper: 8)"""
    corrections: CountOrZero = 2
    """K, corrected solutions after a judgement that says INCORRECT (paper: 6; ablation: 0)"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the adapter, constant (released code: 5e-7, cosine, all weights)"""
    kl: Weight = 0.001
    """weight of the k3 penalty towards the base (released code: 0.001)"""
    verifier: Literal["co-trained", "untrained", "none"] = "co-trained"
    """ablation: untrained does not train on judgements; none is majority vote alone, TTRL"""
    filter: Literal["verifier", "coin", "none"] = "verifier"
    """which questions are kept: those the verifier accepts; as many at random (coin); all (none)"""
    solution_tokens: Tokens = per_model(tiny=80, real=1024)
    """length limit of a solution (released code: 2048)"""
    judgement_tokens: Tokens = per_model(tiny=112, real=1024)
    """length limit of a judgement (released code: 2048)"""

    def check(self):
        if self.group_size > self.samples:
            most = f"must be at most --samples {self.samples}"
            raise UserError(f"--group-size {self.group_size} {most}.")
        if self.corrections == 1:  # they are compared with each other
            raise UserError("--corrections 1 must be at least 2, or 0.")
        if self.verifier == "none" and self.filter == "coin":
            raise UserError("--verifier none, --filter coin: nothing says how many to keep.")
        if self.questions == 1 and self.filter == "coin":
            raise UserError("--filter coin: --questions must be at least 2, or it has no choice.")


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.advantage import named_group_advantage
from common.core.cotrainer import Batch
from common.core.lists import mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import (
    SOLVED,
    evaluate_solver,
    final_answer,
    in_one_form,
    is_correct,
    prompt,
    solve_prompt,
    split_steps,
)
from common.tasks.math import load_for_steps
from common.tasks.verdicts import (
    ALSO_WRONG,
    WRONG,
    read_verdict,
    verdict_metrics,
    verify_prompt,
)

import torch

# ------------------------------------------------------------------ prompts and parsing
CORRECT = r"""You are given a problem, a solution, and the numbers of its steps that were found
wrong. Solve the problem again. Put every step in its own <step> </step> tags, and after the last
one the answer in this form: <answer>\boxed{...}</answer>."""

VERDICTS = ("CORRECT", "INCORRECT")
JUDGEMENT = re.compile(
    # models that nobody has taught leave the first closing tag out, or open the section again
    r"(?s)\s*<step_verification>(?P<steps>.*?)(?:</?step_verification>\s*)?"
    r"<final_verification>(?P<final>[^<]*)</final_verification>\s*"
)


def correct_prompt(question: str, solution: str, faulty: list[int]) -> list[dict]:
    return prompt(CORRECT, to_correct(question, solution, faulty), CORRECTED)


def to_correct(question: str, solution: str, faulty: list[int]) -> str:
    found = ",".join(map(str, faulty)) or "none"
    return f"Problem: {question}\nSolution:\n{solution}\nDefects: {found}\nCorrect it."


CORRECTED = [  # worked examples
    (to_correct(SOLVED[0][0], ALSO_WRONG, [1, 3]), SOLVED[0][1]),
    (to_correct(SOLVED[1][0], WRONG, [2]), SOLVED[1][1]),
]


def parse_judgement(text: str) -> tuple[bool | None, list[int]]:
    r"""(whether it says CORRECT, the steps that it calls wrong); (None, ...) without the form.

    >>> end = r"</step_verification><final_verification>\boxed{INCORRECT}</final_verification>"
    >>> parse_judgement(rf"<step_verification><step>3*2=7:6\boxed{{INCORRECT}}</step>{end}")
    (False, [1])
    """
    found = JUDGEMENT.fullmatch(text)
    final = read_verdict(found["final"], VERDICTS) if found else None
    if final is None:
        return None, []
    verdicts = [read_verdict(step, VERDICTS) for step in split_steps(found["steps"])]
    return final == "CORRECT", [k for k, v in enumerate(verdicts, 1) if v == "INCORRECT"]


# ------------------------------------------------------------------ the paper's mathematics
def vote(answers: list[str | None]) -> tuple[str | None, str | None]:
    """(m, the most frequent answer; the rarest other answer), each the first of equally frequent
    answers, and None if there is no such answer.

    >>> vote(["7", None, "8", "7", "9", "8", "7"]), vote(["7", "7", None]), vote([None])
    (('7', '9'), ('7', None), (None, None))
    """
    counts = Counter(answer for answer in answers if answer is not None).most_common()
    most = counts[0][0] if counts else None
    return most, min(counts[1:], key=lambda pair: pair[1], default=(None, 0))[0]


def to_verify(texts: list[str], answers: list, M: int) -> tuple[list[str], list[str]]:
    """The solutions that V+ and V- judge, equally many. V+ has up to M different solutions with the
    answer m, and V- has one solution with the rarest other answer, again and again. Both are empty
    where all answers agree.
    """
    m, rarest = vote(answers)
    if rarest is None:
        return [], []
    for_m = list(dict.fromkeys(text for text, answer in zip(texts, answers) if answer == m))[:M]
    return for_m, [texts[answers.index(rarest)]] * len(for_m)


def is_kept(said: list[bool | None]) -> bool:
    """Whether more than half of V+ say CORRECT, or V+ is empty because all answers agree."""
    return not said or sum(s is True for s in said) > len(said) / 2


def reward(answer: str | None, m: str | None) -> float:
    """A solution's or a correction's r = [it has a boxed answer] + [the answer is m]."""
    return float(answer is not None) + float(answer is not None and answer == m)


def judgement_reward(said: bool | None, for_m: bool) -> float:
    """A judgement's r = [format] + [it says CORRECT of m, or INCORRECT of another answer]."""
    return float(said is not None) + float(said is for_m)


def advantages(rewards: torch.Tensor, groups: list) -> torch.Tensor:
    """A = (r - mean) / (std + 1e-6) within each group, (B,). A row alone in its group gets 0, where
    the released code has r. rewards: (B,), NaN for dropped questions. groups: a key per row.

    >>> advantages(torch.tensor([2.0, 1.0, 2.0]), ["a", "a", "b"])
    tensor([ 0.7071, -0.7071,  0.0000])
    """
    return named_group_advantage(rewards, groups)


# ------------------------------------------------------------------ the trainer
@dataclass
class Asked:
    """What a step knows of one question."""

    question: str
    gold: str  # for the log alone
    texts: list[str]  # N solutions
    answers: list[str | None]
    m: str | None  # the label
    kept: bool = True


class CoVerRL(CoTrainer):
    """`step` is algorithm 1. CoTrainer samples, scores, computes the loss and updates."""

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        solution, judgement = args.solution_tokens, args.judgement_tokens
        shared = {"group_size": 1, "adapter": "agent"}  # groups have names, see `advantages`
        return {
            "solver": Player([], args.lr, solution, **shared),
            "verifier": Player([], args.lr, judgement, reads=solution, **shared),
            "corrector": Player([], args.lr, solution, reads=solution, **shared),
        }

    def step(self, rows):
        """rows: B, every question T times in a row."""
        T, extra = self.cfg.group_size, self.cfg.samples - self.cfg.group_size
        solver = self.rollout("solver", rows)  # P * T solutions, trained on
        more = [row["prompt"] for row in rows[::T] for _ in range(extra)]
        more = self.generate("solver", more)  # they only vote
        asked = []
        for i, row in enumerate(rows[::T]):
            texts = solver.texts[i * T :][:T] + more[i * extra :][:extra]
            answers = in_one_form([*map(final_answer, texts)])
            asked.append(Asked(row["question"], row["answer"], texts, answers, vote(answers)[0]))
        batches = [solver]
        if self.cfg.verifier != "none":
            batches += self.verify_and_correct(asked)
        keys = [(i, "solution") for i in range(len(asked)) for _ in range(T)]
        rewards = [reward(answer, one.m) for one in asked for answer in one.answers[:T]]
        self.set_advantages(solver, rewards, keys, asked)
        self.report_step(asked)
        return [self.concat(batches)]

    def verify_and_correct(self, asked: list[Asked]) -> list[Batch]:
        """Judgements decide which questions are kept, and corrections follow the judgements that
        find fault. Returns the batches of both, leaving out an empty batch.
        """
        rows = []  # a judgement each
        for i, one in enumerate(asked):
            for_m, for_other = to_verify(one.texts, one.answers, self.cfg.checks)
            rows += [{"i": i, "for_m": True, "solution": text} for text in for_m]
            rows += [{"i": i, "for_m": False, "solution": text} for text in for_other]
        prompts = [verify_prompt(asked[row["i"]].question, row["solution"]) for row in rows]
        verifier = self.rollout("verifier", [{"prompt": p} for p in prompts])
        found = [parse_judgement(text) for text in verifier.texts]
        self.filter(asked, rows, found)
        rewards = [judgement_reward(said, row["for_m"]) for row, (said, _) in zip(rows, found)]
        if self.cfg.verifier == "untrained":
            rewards = [torch.nan] * len(rows)
        keys = [(row["i"], row["for_m"]) for row in rows]
        self.set_advantages(verifier, rewards, keys, asked)
        return [verifier, self.correct(asked, rows, found)]

    def filter(self, asked: list[Asked], rows: list[dict], found: list[tuple]):
        """Sets `kept` of each question."""
        said = [[] for _ in asked]
        for row, (verdict, _) in zip(rows, found):
            if row["for_m"]:
                said[row["i"]].append(verdict)
        kept = [is_kept(verdicts) for verdicts in said]
        if self.cfg.filter == "coin":  # as many, but without a reason
            rng = self.random_numbers()
            kept = self.over_all_processes(lambda kept: rng.sample(kept, len(kept)), kept)
        for one, keep in zip(asked, kept):
            one.kept = keep or self.cfg.filter == "none"

    def correct(self, asked: list[Asked], rows: list[dict], found: list[tuple]) -> Batch:
        K, prompts, keys, labels = self.cfg.corrections, [], [], []
        for j, (row, (said, faulty)) in enumerate(zip(rows, found)):
            one = asked[row["i"]]
            if said is False and one.kept:
                prompts += [correct_prompt(one.question, row["solution"], faulty)] * K
                keys += [(row["i"], "correction", j)] * K
                labels += [one.m] * K
        corrector = self.rollout("corrector", [{"prompt": p} for p in prompts])
        pairs = zip(labels, map(final_answer, corrector.texts))
        answers = [in_one_form([m, answer])[1] for m, answer in pairs]
        rewards = [reward(answer, m) for answer, m in zip(answers, labels)]
        self.set_advantages(corrector, rewards, keys, asked)
        gold = [asked[key[0]].gold for key in keys]
        right = [is_correct(text, g) for text, g in zip(corrector.texts, gold)]
        self.log_mean("corrector/accuracy", right)
        return corrector

    def set_advantages(self, batch: Batch, rewards: list, keys: list, asked: list[Asked]):
        """Sets the advantages, which are 0 for dropped questions. keys: the group of each row, a
        tuple that starts with the number of the question.
        """
        known = [r if asked[key[0]].kept else torch.nan for r, key in zip(rewards, keys)]
        self.set_rewards(batch, known)
        batch.advantages = advantages(batch.rewards, keys)  # (B,)

    # --- what is logged and shown; no method below affects training
    def report_step(self, asked: list[Asked]):
        right = [[is_correct(t, one.gold) for t in one.texts] for one in asked]
        agrees = [[answer == one.m is not None for answer in one.answers] for one in asked]
        self.log_mean("solver/accuracy", [r for its in right for r in its])
        self.log_mean("co/majority_ratio", [a for its in agrees for a in its])
        self.log_mean("co/kept", [one.kept for one in asked])
        kept = [i for i, one in enumerate(asked) if one.kept]
        labels = [is_correct(rf"\boxed{{{one.m}}}", one.gold) for one in asked]
        self.log_mean("co/label_accuracy", labels)
        # of kept questions: does a solution agree with the label exactly if it is right?
        true = [a == r for i in kept for a, r in zip(agrees[i], right[i])]
        self.log_mean("co/reward_accuracy", true)
        alone = [len({*one.answers} - {None}) == 1 for one in asked]  # so it is not verified
        wrong = [one and not label for one, label in zip(alone, labels)]
        self.log_mean("co/unanimous_and_wrong", wrong)


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: CoVerRL, held_out: list[dict]) -> dict[str, float]:
    """The first answers; what one turn of verifying and correcting makes of them; and the verifier
    on what the base has written, the same in every evaluation.
    """
    n = trainer.cfg.eval_samples
    result, texts, right = evaluate_solver(trainer, "solver", held_out)
    if trainer.cfg.verifier == "none":
        return result
    first = texts[::n]
    read = judged(trainer, held_out, first)
    prompts = [correct_prompt(row["question"], text, faulty)
               for row, text, (said, faulty) in read if said is False]  # fmt: skip
    again = iter(trainer.generate_all("corrector", prompts))
    final = [next(again) if said is False else text for _, text, (said, _) in read]
    base = trainer.saved.setdefault("base_solutions", first)  # step 0: the solver is the base
    verdicts = [said for _, _, (said, _) in judged(trainer, held_out, base)]
    labels = [is_correct(text, row["answer"]) for text, row in zip(base, held_out)]
    return result | {
        "solver/first": mean(right[::n]),
        "solver/final": mean([is_correct(x, row["answer"]) for x, row in zip(final, held_out)]),
        "verifier/balanced_accuracy": verdict_metrics(verdicts, labels)["balanced_accuracy"],
    }


def judged(trainer, rows: list[dict], solutions: list[str]) -> list[tuple]:
    """(row, solution, judgement) for each solution."""
    prompts = [verify_prompt(row["question"], text) for row, text in zip(rows, solutions)]
    texts = trainer.generate_all("verifier", prompts)
    return list(zip(rows, solutions, map(parse_judgement, texts)))


# ------------------------------------------------------------------ main
CURVES = {
    "solver": ["solver/accuracy", "solver/final"],
    "the labels": ["co/reward_accuracy", "co/label_accuracy", "co/majority_ratio", "co/kept"],
    "verifier": ["verifier/balanced_accuracy"],
}


def main(args: Args):
    launch(
        CoVerRL, args, load=load_for_steps, evaluate=evaluate, curves=CURVES, prompt=solve_prompt
    )


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
