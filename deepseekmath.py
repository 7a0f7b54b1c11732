r"""DeepSeekMath-V2: a verifier that is itself verified, and a generator that grades itself (Shao et
al. 2025, arXiv:2511.22570).

    python deepseekmath.py                                the embedded model on a CPU, 5 minutes
    python deepseekmath.py --no-meta-reward               a verifier that may invent defects
    python deepseekmath.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k   one GPU

The loop (sec. 2; GRPO all along, with the loss in common/cotrainer.py, `CoTrainer.loss`)
    scores s in {0, 0.5, 1}: the answer is wrong; right, but a step is not; all is right
    LABELS     solutions Y of the generator with their scores s, by the truth the first time
    VERIFIER   Y -> an analysis that names the faulty steps, and s'
               R_V = R_format * (1 - |s' - s|)                                    sec. 2.1.1
    META       the steps an analysis faults -> ms', is it right about them?
               R = R_format * (1 - |ms' - ms|)                                    sec. 2.1.2
    then round after round
    LABELS     from the second round on by votes: n analyses of Y, m meta-votes on each     sec. 2.3
    VERIFIER   R_V = R_format * (1 - |s' - s|) * R_meta                           sec. 2.1.2
    GENERATOR  question -> a solution Y and, below it, its own analysis Z of it
               R = R_format * (0.76 * R_Y + 0.24 * R_Z)                            sec. 2.2
               R_Y = s, the verifier's;  R_Z = (1 - |s_own - s|) * R_meta(Z)

From the second round on no new solution is labelled by the truth; those of the first round stay in
the pool. It is only logged: how far the labels agree with it, which share of the faulted steps is
faulty, and by how much the generator's score of its own solutions is too high. That is the paper's
claim, in numbers.

What we changed and it matters (the full list is in docs/deepseekmath.md)
    1. Two LoRA adapters on one base, verifier and generator; the paper starts each from the other's
       weights, after fine-tuning on the samples of both, and ends with one model for all.
    2. Proofs, graded by experts, become solutions with an answer, graded by it and by their steps.
    3. A defect is the number of a step, and the meta-verifier judges these numbers only. A score
       that does not follow from an analysis's own defects is found by comparing them.
    4. n, m, k, learning rate, batch and steps are ours: the paper does not give them.

Shapes: P questions or solutions per step, M completions of each, B = P * M rows.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from common.args import Count, CountOrZero, GroupSize, RunArgs, Several, Tokens, Weight, per_model
from common.cotrainer import CoTrainer, Player
from common.errors import UserError
from common.launch import launch
from common.run import mean, plain_errors
from common.tasks.answers import boxed, is_correct, prompt, split_steps
from common.tasks.math import load_questions
from common.tiny.tasks import faulty_steps

import tyro


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/args.py
    steps: Count = 48
    """optimiser steps of all phases together (paper: not given)"""
    questions: Count = 16
    """P, questions or solutions per step and process (paper: not given)"""
    group_size: GroupSize = 8
    """M, completions that are compared with each other (paper: not given)"""
    lr: Weight = per_model(tiny=2e-3, real=2e-5)
    """learning rate of both adapters, constant (paper: not given)"""
    kl: Weight = 0.001
    """weight of the k3 penalty towards the base (paper: not given); 0 saves the reference pass"""
    verifier_steps: CountOrZero = 6
    """verifier steps, at the start and again in every round"""
    meta_steps: CountOrZero = 6
    """meta-verifier steps, once, after the verifier's first"""
    generator_steps: CountOrZero = 6
    """generator steps in every round, after the verifier's"""
    eval_every: CountOrZero = 24
    """steps between evaluations on held-out questions; 0 = only first and last"""
    eval_questions: Count = per_model(tiny=96, real=128)
    """held-out questions"""
    solutions: Count = per_model(tiny=128, real=256)
    """solutions that are labelled before the first step and before every round but the first"""
    analyses: Several = 4
    """n, analyses of a solution that is labelled by votes (paper: not given)"""
    votes: Several = 3
    """m, meta-verifications of an analysis that finds fault (paper: not given)"""
    least_valid: Several = per_model(tiny=1, real=2)
    """k, valid analyses that a label below 1 needs (paper: not given)"""
    labels: Literal["votes", "truth"] = "votes"
    """ablation: after the first round, too, the truth"""
    meta_reward: bool = True
    """ablation: R_meta = 1 in the verifier's reward"""
    self_reward: bool = True
    """ablation: the generator is paid R_Y alone"""
    solution_tokens: Tokens = per_model(tiny=160, real=1536)
    """length limit of a solution with its self-evaluation (released code: 128k)"""
    analysis_tokens: Tokens = per_model(tiny=112, real=1024)
    """length limit of an analysis and of a meta-verification (released code: 64k)"""

    def check(self):
        if self.verifier_steps + self.generator_steps == 0:
            raise UserError(
                "--verifier-steps 0 and --generator-steps 0: a round needs a step of one of them."
            )
        if self.least_valid > self.analyses:
            most = f"must be at most --analyses {self.analyses}"
            raise UserError(f"--least-valid {self.least_valid} {most}: no label below 1 gets it.")


ALPHA, BETA = 0.76, 0.24  # weights of R_Y and R_Z (paper sec. 2.2)
HEADING = "## Self Evaluation"

# ------------------------------------------------------------------ prompts and parsing
FORM = r"""Check the steps one after the other, by your own calculation, each in its own <step>
</step> tags that end in \boxed{CORRECT} or \boxed{INCORRECT}. End with these two lines, the first
with the numbers of the faulty steps or the word none:
Defects: 2,3
Score: \boxed{0}
The score is 1 if no step is faulty, 0.5 if the answer is right in spite of a faulty one, and 0 if
the answer is wrong. Do not name a step of which you are not sure."""

PROVE = rf"""Solve the problem step by step. Put every step in its own <step> </step> tags, and
after the last one the answer in this form: <answer>\boxed{{...}}</answer>. Then, under the heading
{HEADING}, grade your own solution as strictly as if it were somebody else's: an honest low score is
worth more than a high one that is not true. {FORM}"""

GRADE = f"You are given a problem and a solution. {FORM}"

META = r"""You are given a problem, a solution, and the numbers of the steps that somebody has
called faulty. Check these steps and no others, each in its own <step> </step> tags that end in
\boxed{CORRECT} or \boxed{INCORRECT}, which says whether the solution's step is right. End with the
line
Score: \boxed{1}
if all of them are faulty, 0.5 if some of them are, and 0 if none is."""

CORRECT = """You are given a problem, your solution, and the numbers of the steps that you found
faulty. Write the solution again without these faults, in the same form: every step in its own
<step> </step> tags, then the answer."""


def solve_prompt(question: str) -> list[dict]:
    return prompt(PROVE, f"{question}\nSolve and grade yourself.")


def shown_solution(row: dict) -> str:
    return f"Problem: {row['question']}\nSolution:\n{row['solution']}"


def grade_prompt(row: dict) -> list[dict]:
    return prompt(GRADE, f"{shown_solution(row)}\nGrade it.")


def named(defects: tuple[int, ...]) -> str:
    return ",".join(map(str, defects)) or "none"


def meta_prompt(row: dict, defects: tuple[int, ...]) -> list[dict]:
    return prompt(META, f"{shown_solution(row)}\nDefects: {named(defects)}\nAre they real?")


def correct_prompt(row: dict, defects: tuple[int, ...]) -> list[dict]:
    return prompt(CORRECT, f"{shown_solution(row)}\nDefects: {named(defects)}\nCorrect it.")


class Analysis(NamedTuple):
    defects: tuple[int, ...]  # numbers of the steps it faults, from 1 on
    score: float

    @property
    def fits(self) -> bool:
        """Whether its score follows from its defects: 1 without any, less with one."""
        return (self.score == 1) == (not self.defects)


SCORE = r"Score: *\\boxed\{(0|0\.5|1)\}\s*"
ENDING = re.compile(r"Defects: *(none|\d{1,4}(?: ?, ?\d{1,4}){0,99}) *\n" + SCORE, re.ASCII)


def parse_analysis(text: str, count: int) -> Analysis | None:
    r"""What an analysis of `count` steps ends with, and nothing after it; None is no format.

    Only the last "Defects:" counts, so that one in its thoughts is none, and a step that the
    solution does not have is no defect.

    >>> parse_analysis("Defects: 2\nScore: \\boxed{0}", 3)
    Analysis(defects=(2,), score=0.0)
    """
    found = ENDING.fullmatch(text, max(0, text.rfind("Defects:")))
    if not found:
        return None
    numbers = [] if found[1] == "none" else [int(number) for number in found[1].split(",")]
    if not all(1 <= number <= count for number in numbers):
        return None
    return Analysis(tuple(sorted({*numbers})), float(found[2]))


def parse_meta(text: str) -> float | None:
    """The score that a meta-verification ends with; None if there is none."""
    found = re.compile(SCORE).fullmatch(text, max(0, text.rfind("Score:")))
    return float(found[1]) if found else None


def parse_solution(text: str) -> tuple[str, Analysis | None]:
    """(solution, its own analysis). What stands outside of the steps and the answer's box is left
    out: a verifier that is shown praise might believe it. The analysis is None, too, if the
    solution lacks steps or a boxed answer, or the heading is there twice.
    """
    before, _, own = text.partition(HEADING)
    before, _, rest = before.partition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    steps = split_steps(before)
    solution = "".join(f"<step>{step}</step>\n" for step in steps)
    box = boxed(answer) or ""
    if closed:
        solution += rf"<answer>\boxed{{{box}}}</answer>" if box else "<answer></answer>"
    fine = steps and closed and box and HEADING not in own
    return solution.strip(), parse_analysis(own, len(steps)) if fine else None


# ------------------------------------------------------------------ the truth, on data with answers
def truth_of(row: dict, solution: str) -> tuple[float, list[int] | None]:
    """(s, numbers of the faulty steps) of a solution: 1 a right answer with right steps, 0.5 a
    right answer with a wrong step, 0 a wrong answer.

    Of embedded questions every faulty step is known. Of others a step is taken to be faulty if an
    equation in it does not hold; nobody knows where a wrong answer without such a step went wrong:
    None.
    """
    _, _, answer = solution.partition("<answer>")
    right, steps = is_correct(answer, row["answer"]), split_steps(solution)
    faulty = faulty_steps(row["question"], steps)
    known = faulty is not None
    if not known:
        faulty = [k for k, step in enumerate(steps, start=1) if not equations_hold(step)]
    score = 0.0 if not right else 0.5 if faulty else 1.0
    return score, faulty if known or right or faulty else None


NUMBER = r"-?\d{1,15}(?:\.\d{1,6})?"
EQUATION = re.compile(  # not what begins or goes on before or behind it, as in x^2+3=7 or 1/5=20%
    rf"(?<![\w.*/+=)\]}}^%!√-])({NUMBER})([+*/-])({NUMBER})=({NUMBER})(?![\d.]*[\w*/+^%!-])",
    re.ASCII,
)


def equations_hold(step: str) -> bool:
    """The cheap check of a step of any text: are its plain equations true? `3*2 = 6`, no chains. An
    equation that may be a part of something else is passed over.

    A result of d decimals may be rounded: it may be off by half a unit of the last one.
    """
    step = re.sub(r"^\s*[-*•]\s+", "", step)  # an item of a list
    plain = re.sub(r" ?([-+*/=]) ?", r"\1", step.replace("$", "").replace(",", ""))
    for a, op, b, c in EQUATION.findall(plain):
        a, b, claimed = Fraction(a), Fraction(b), Fraction(c)
        if op == "/" and b == 0:
            return False
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else a}[op]
        slack = Fraction(1, 2 * 10 ** len(c.partition(".")[2]))
        if abs(value - claimed) > (slack if op == "/" or "." in c else 0):
            return False
    return True


def meta_truth(defects: tuple[int, ...], faulty: list[int]) -> float:
    """ms: 0 if none of the claimed defects is one, 0.5 if some are not, else 1.

    Trap, and the paper's: whoever claims nothing claims nothing false, so "none" is worth 1, on a
    wrong solution, too. It is for the verifier's score to pay for what is missed.
    """
    real = [number in faulty for number in defects]
    return 1.0 if all(real) else 0.5 if any(real) else 0.0


# ------------------------------------------------------------------ the paper's mathematics
def verifier_reward(well_formed: bool, truth: float, said: float, meta: float) -> float:
    """Sec. 2.1.2: R_V = R_format * (1 - |s' - s|) * R_meta.

    truth: s, said: s', meta: R_meta, all in [0, 1]. With meta = 1 it is that of sec. 2.1.1, and
    with ms and ms' the meta-verifier's own reward.
    """
    return float(well_formed) * (1 - abs(said - truth)) * meta


def generator_reward(
    well_formed: bool, score: float, own_score: float, meta: float, self_reward: bool = True
) -> float:
    """Sec. 2.2: R = R_format * (0.76 * R_Y + 0.24 * R_Z), with R_Y = s and R_Z = (1 - |s_own - s|)
    * R_meta.

    score: s, the verifier's; own_score: s_own; meta: R_meta of the self-evaluation. Without
    self_reward R = R_format * R_Y.
    """
    R_Y, R_Z = score, (1 - abs(own_score - score)) * meta
    return float(well_formed) * (ALPHA * R_Y + BETA * R_Z if self_reward else R_Y)


def meta_quality(analysis: Analysis, meta: float | None) -> float:
    """R_meta: the meta-verifier's score, at most 0.5 where the analysis's score does not follow
    from its defects; 0.5 for a meta-verification that cannot be read.
    """
    return min(0.5 if meta is None else meta, 1.0 if analysis.fits else 0.5)


def auto_label(scores: list[float], votes: list[list[bool]], k: int) -> float | None:
    """The label of a solution without the truth (sec. 2.3).

    Args:
        scores: of its n analyses.
        votes: the meta-votes on each, empty where the score is 1; an analysis is valid if more than
            half of its votes say so.
        k: valid analyses that a label needs.

    Returns:
        The lowest score with at least k valid analyses; 1 if no analysis with a lower score is
        valid; else None: too few agree, the solution is dropped. The paper looks at the analyses
        with the lowest score of all, and at no others.
    """
    if not scores:
        return None
    valid = Counter(s for s, vote in zip(scores, votes) if s < 1 and sum(vote) > len(vote) / 2)
    enough = [score for score, count in valid.items() if count >= k]
    return min(enough) if enough else None if valid else 1.0


# ------------------------------------------------------------------ the trainer
class DeepSeekMath(CoTrainer):
    """`step` is the loop of section 2. CoTrainer samples, scores, computes the loss and updates.

    The labelled solutions are in `saved`, the same on all processes. A labelled solution is
    {question, solution, label, truth, faulty, round}; truth and faulty are for the first round, the
    meta-verifier's lessons and the metrics.
    """

    def __init__(self, *inputs):
        super().__init__(*inputs)
        self.saved = {"labelled": [], "rounds": 0}

    @staticmethod
    def players(args: Args) -> dict[str, Player]:
        """Without reward functions: `step` rewards them when verifier and meta-verifier have
        spoken.
        """
        M, solution, analysis = args.group_size, args.solution_tokens, args.analysis_tokens
        return {
            "generator": Player([], args.lr, solution, M),
            "verifier": Player([], args.lr, analysis, M, reads=solution),
            "meta": Player([], args.lr, analysis, M, reads=solution, adapter="verifier"),
        }

    def step(self, rows):
        """rows: B, every question M times in a row; only the generator's steps use them."""
        phase, current = phase_at(self.state.global_step, self.cfg)
        if phase == "generator":
            return [self.generator_step(rows)]
        while self.saved["rounds"] <= current:
            self.label_solutions(self.saved["rounds"])
        if phase == "meta":
            return [self.meta_step()]
        met = self.state.global_step >= self.cfg.verifier_steps + self.cfg.meta_steps
        return [self.verifier_step(met and self.cfg.meta_reward)]

    # --- labels
    def label_solutions(self, number: int):
        """A round's new solutions, by the generator as it is now, and their labels."""
        cfg, pool = self.cfg, self.saved["labelled"]
        first = number * cfg.solutions
        some = range(first, first + cfg.solutions)
        questions = [self.train_rows[i % len(self.train_rows)] for i in some]
        by_truth = number == 0 or cfg.labels == "truth"
        label = self.by_truth if by_truth else self.by_votes
        new = self.in_parallel(lambda share: label(self.solved(share)), questions)
        kept = [row | {"round": number} for row in new if row["label"] is not None]
        if not pool + kept:
            raise UserError(
                "no solution could be labelled: none had a step in its tags within "
                f"--solution-tokens {cfg.solution_tokens}."
            )
        pool += kept
        self.saved["rounds"] = number + 1
        self.report_labels(new, kept)

    def solved(self, questions: list[dict]) -> list[dict]:
        """One solution of each, without its self-evaluation, and the truth about it."""
        texts = self.generate("generator", [solve_prompt(q["question"]) for q in questions])
        rows = []
        for question, text in zip(questions, texts):
            solution = parse_solution(text)[0]
            score, faulty = truth_of(question, solution)
            rows.append({"question": question["question"], "solution": solution})
            rows[-1] |= {"truth": score, "faulty": faulty, "single": None}
        return rows

    def by_truth(self, rows: list[dict]) -> list[dict]:
        return [
            row | {"label": row["truth"] if split_steps(row["solution"]) else None} for row in rows
        ]

    def by_votes(self, rows: list[dict]) -> list[dict]:
        """Labels by n analyses each and m meta-votes on every one that finds fault."""
        n, m = self.cfg.analyses, self.cfg.votes
        asked = [row for row in rows for _ in range(n)]
        found = self.analyse(asked)
        doubts = [i for i, a in enumerate(found) if a and a.score < 1 and a.defects]
        texts = self.generate("meta", [meta_prompt(asked[i], found[i].defects) for i in doubts * m])
        votes = [[] for _ in asked]
        for i, text in zip(doubts * m, texts):
            votes[i].append((parse_meta(text) or 0) > 0)  # some of it is real
        labelled = []
        for j, row in enumerate(rows):
            mine = [i for i in range(j * n, (j + 1) * n) if found[i]]
            scores = [found[i].score for i in mine]
            label = auto_label(scores, [votes[i] for i in mine], self.cfg.least_valid)
            alone = mean([score == row["truth"] for score in scores]) if scores else None
            if not split_steps(row["solution"]) or len(mine) < self.cfg.least_valid:
                label = None
            labelled.append(row | {"label": label, "single": alone})
        return labelled

    def analyse(self, rows: list[dict]) -> list[Analysis | None]:
        """One analysis of each row's solution."""
        texts = self.generate("verifier", [grade_prompt(row) for row in rows])
        return [parse_analysis(t, len(split_steps(r["solution"]))) for t, r in zip(texts, rows)]

    def draw(self, pool: list[dict], rng: random.Random) -> list[dict]:
        """P labelled solutions of this process, each label equally often if there are any."""
        kinds = sorted({row["label"] for row in pool})
        of_label = {kind: [row for row in pool if row["label"] == kind] for kind in kinds}
        count = self.cfg.questions * self.accelerator.num_processes
        drawn = [rng.choice(of_label[kinds[i % len(kinds)]]) for i in range(count)]
        rng.shuffle(drawn)
        return self.my_share(drawn)

    # --- the three kinds of steps
    def verifier_step(self, with_meta: bool) -> dict:
        M, rng = self.cfg.group_size, random.Random(f"{self.cfg.seed} {self.state.global_step}")
        drawn = self.draw(self.saved["labelled"], rng)
        rows = [{**row, "prompt": grade_prompt(row)} for row in drawn for _ in range(M)]  # B
        batch = self.rollout("verifier", rows)
        counts = [len(split_steps(row["solution"])) for row in rows]
        found = [parse_analysis(text, count) for text, count in zip(batch["texts"], counts)]
        quality = self.quality(rows, found) if with_meta else [1.0] * len(rows)
        # R_V = R_format * (1 - |s' - s|) * R_meta
        rewards = [
            verifier_reward(True, row["label"], a.score, q) if a else 0.0
            for row, a, q in zip(rows, found, quality)
        ]
        self.set_rewards(batch, rewards)
        self.report_analyses(rows, batch, found, quality)
        return batch

    def meta_step(self) -> dict:
        M, rng = self.cfg.group_size, random.Random(f"{self.cfg.seed} {self.state.global_step}")
        known = [row for row in self.saved["labelled"] if row["faulty"] is not None]
        if not known:
            raise UserError(
                f"--meta-steps {self.cfg.meta_steps}: of no labelled solution is it known which "
                "steps are faulty, as no answer is right and no equation is false; it can be 0."
            )
        drawn = self.draw(known, rng)
        # what the verifier claims; where it claims nothing, a defect is made up
        claims = [a.defects if a else () for a in self.analyse(drawn)]
        claims = [
            claim or (rng.randint(1, len(split_steps(row["solution"]))),)
            for claim, row in zip(claims, drawn)
        ]
        rows = [
            {
                **row,
                "prompt": meta_prompt(row, claim),
                "claim": claim,
                "ms": meta_truth(claim, row["faulty"]),
            }
            for row, claim in zip(drawn, claims)
            for _ in range(M)
        ]
        batch = self.rollout("meta", rows)
        said = [parse_meta(text) for text in batch["texts"]]
        # R = R_format * (1 - |ms' - ms|)
        rewards = [
            0.0 if ms is None else verifier_reward(True, row["ms"], ms, 1.0)
            for row, ms in zip(rows, said)
        ]
        self.set_rewards(batch, rewards)
        self.report_meta(rows, batch, said)
        return batch

    def generator_step(self, rows: list[dict]) -> dict:
        batch = self.rollout("generator", rows)
        parsed = [parse_solution(text) for text in batch["texts"]]
        solved = [
            {"question": row["question"], "solution": solution}
            for row, (solution, _) in zip(rows, parsed)
        ]
        own = [analysis for _, analysis in parsed]
        # what has no format is paid 0 anyway
        fine = [i for i, analysis in enumerate(own) if analysis]
        judged = dict(zip(fine, self.analyse([solved[i] for i in fine])))
        quality = dict(zip(fine, self.quality([solved[i] for i in fine], [own[i] for i in fine])))
        rewards = [0.0] * len(rows)
        for i in fine:
            s = judged[i].score if judged[i] else 0.0  # R_Y
            rewards[i] = generator_reward(True, s, own[i].score, quality[i], self.cfg.self_reward)
        self.set_rewards(batch, rewards)
        self.report_solutions(rows, batch, solved, own, judged)
        return batch

    def quality(self, rows: list[dict], found: list[Analysis | None]) -> list[float]:
        """R_meta of each row's analysis, by one meta-verification of what it claims. One that
        claims nothing is not asked about.
        """
        claiming = [i for i, a in enumerate(found) if a and a.defects]
        texts = self.generate("meta", [meta_prompt(rows[i], found[i].defects) for i in claiming])
        said = dict(zip(claiming, map(parse_meta, texts)))
        return [meta_quality(a, said.get(i, 1.0)) if a else 0.0 for i, a in enumerate(found)]

    # --- what is logged and shown; nothing below affects training
    def report_labels(self, new: list[dict], kept: list[dict]):
        self.log_mean("labels/kept", len(kept) / len(new))
        self.log_mean("labels/agreement", [row["label"] == row["truth"] for row in kept])
        self.log_mean("labels/single", [row["single"] for row in new if row["single"] is not None])

    def report_analyses(self, rows, batch, found, quality):
        known = analysis_metrics(rows, found)
        for key in ANALYSES:  # every process logs each of them, or they would wait for each other
            self.log_mean(f"verifier/{key}", known.get(key, []))
        self.log_mean("verifier/meta_reward", quality)
        for note, row, a in zip(batch["notes"], rows, found):
            note |= {"label": row["label"], "truth": row["truth"], "defects": row["faulty"]}
            note["claimed"] = a and list(a.defects)

    def report_meta(self, rows, batch, said):
        self.log_mean("meta/accuracy", [ms == row["ms"] for row, ms in zip(rows, said)])
        for note, row in zip(batch["notes"], rows):
            note |= {"claimed": list(row["claim"]), "defects": row["faulty"]}

    def report_solutions(self, rows, batch, solved, own, judged):
        truths = [truth_of(row, some["solution"]) for row, some in zip(rows, solved)]
        self.log_mean("generator/accuracy", [score > 0 for score, _ in truths])
        self.log_mean("generator/well_formed", [a is not None for a in own])
        graded = [(a.score, score) for a, (score, _) in zip(own, truths) if a]
        self.log_mean("co/over_claim", [said - score for said, score in graded])
        verdicts = [(judged[i].score, truths[i][0]) for i in judged if judged[i]]
        self.log_mean("co/verdict_minus_gold", [said - score for said, score in verdicts])
        for i, (note, a, (score, faulty)) in enumerate(zip(batch["notes"], own, truths)):
            note |= {"truth": score, "defects": faulty, "claimed": a and list(a.defects)}
            note["verifier's score"] = judged[i].score if judged.get(i) else None


def phase_at(step: int, cfg: Args) -> tuple[str, int]:
    """(the player that is trained in this step, the round, from 0 on): verifier and meta-verifier
    once, then rounds of verifier and generator.
    """
    V, meta, G = cfg.verifier_steps, cfg.meta_steps, cfg.generator_steps
    if step < V + meta:
        return "verifier" if step < V else "meta", 0
    current, turn = divmod(step - V - meta, V + G)
    return "verifier" if turn < V else "generator", current


# ------------------------------------------------------------------ evaluation
ANALYSES = ("balanced_accuracy", "claims_real", "defects_found", "analysis_quality")


def analysis_metrics(rows: list[dict], found: list[Analysis | None]) -> dict[str, float]:
    """Against the truth of the rows' solutions.

    Returns:
        balanced_accuracy: share of right scores, the mean over the scores that occur.
        claims_real: share of the claimed defects that are real.
        defects_found: share of the faulty steps that are claimed.
        analysis_quality: mean of the true R_meta.
        Solutions of which nobody knows what is faulty count for the first only; a share of nothing
        is left out.
    """
    hits = {}
    for row, a in zip(rows, found):
        hits.setdefault(row["truth"], []).append(a is not None and a.score == row["truth"])
    known = [(row["faulty"], a) for row, a in zip(rows, found) if row["faulty"] is not None]
    real = [number in faulty for faulty, a in known if a for number in a.defects]
    found_too = [bool(a) and number in a.defects for faulty, a in known for number in faulty]
    good = [meta_quality(a, meta_truth(a.defects, faulty)) if a else 0.0 for faulty, a in known]
    shares = {"claims_real": real, "defects_found": found_too, "analysis_quality": good}
    return {
        "balanced_accuracy": mean([mean(of_score) for of_score in hits.values()]),
        **{name: mean(values) for name, values in shares.items() if values},
    }


def evaluate(trainer: DeepSeekMath, held_out: list[dict]) -> dict[str, float]:
    """The generator on held-out questions: its answers, its opinion of them, and what another look
    at them mends; `evaluate_verifier`; and both: of n solutions the one that two analyses like
    best.
    """
    n, result = trainer.cfg.eval_samples, {}
    several = [row for row in held_out for _ in range(n)]

    def solve(rows: list[dict], greedy: bool) -> list[tuple[str, Analysis | None]]:
        asked = [solve_prompt(row["question"]) for row in rows]
        return [*map(parse_solution, trainer.generate_all("generator", asked, greedy))]

    samples, likeliest = solve(several, greedy=False), solve(held_out, greedy=True)
    for suffix, rows, parsed in (("", several, samples), ("_greedy", held_out, likeliest)):
        truths = [truth_of(row, solution)[0] for row, (solution, _) in zip(rows, parsed)]
        name = "generator/greedy" if suffix else "generator/accuracy"
        result[name] = mean([score > 0 for score in truths])
        own = [(a.score, score) for (_, a), score in zip(parsed, truths) if a]
        result[f"generator/own_score_right{suffix}"] = mean([said == s for said, s in own])
        result[f"co/over_claim{suffix}"] = mean([said - score for said, score in own])
    # the generator sees its own evaluation once more (sequential refinement, sec. 3)
    first = samples[::n]
    asked = [
        correct_prompt({**row, "solution": solution}, own.defects if own else ())
        for row, (solution, own) in zip(held_out, first)
    ]
    again = trainer.generate_all("generator", asked)
    again = [parse_solution(text)[0] for text in again]
    right = [truth_of(row, solution)[0] > 0 for row, solution in zip(held_out, again)]
    result["generator/refined"] = mean(right)
    # step 0: the generator is the base
    base = trainer.saved.setdefault("base_solutions", [solution for solution, _ in first])
    result |= evaluate_verifier(trainer, held_out, base)
    # of n solutions of a question the best by mean score; the first quarter of questions
    some = n * max(1, len(held_out) // 4)
    shown = [
        {"question": row["question"], "solution": solution}
        for row, (solution, _) in zip(several[:some], samples)
    ]
    marks = analyse_all(trainer, [row for row in shown for _ in range(2)])
    scores = [mean([a.score if a else 0.0 for a in marks[2 * i : 2 * i + 2]]) for i in range(some)]
    right = [truth_of(b, a["solution"])[0] > 0 for a, b in zip(shown, several)]
    picked = [max(range(i, i + n), key=scores.__getitem__) for i in range(0, some, n)]
    result[f"co/best_of_{n}"] = mean([right[i] for i in picked])
    result["co/mean_of_same"] = mean(right)
    return result


def evaluate_verifier(trainer: DeepSeekMath, held_out: list[dict], base: list[str]) -> dict:
    """On solutions that the base wrote at step 0, sampled and greedily; and the meta-verifier on
    what is claimed of them.
    """
    truths, result = [truth_of(row, solution) for row, solution in zip(held_out, base)], {}
    rows = [
        {"question": row["question"], "solution": solution, "truth": score, "faulty": faulty}
        for row, solution, (score, faulty) in zip(held_out, base, truths)
    ]
    found = {suffix: analyse_all(trainer, rows, greedy=bool(suffix)) for suffix in ("", "_greedy")}
    for suffix, analyses in found.items():
        for key, value in analysis_metrics(rows, analyses).items():
            result[f"verifier/{key}{suffix}"] = value
    known = [(row, a) for row, a in zip(rows, found[""]) if row["faulty"] is not None]
    claims = [(row, a) for row, a in known if a and a.defects]
    said = trainer.generate_all("meta", [meta_prompt(row, a.defects) for row, a in claims])
    wanted = [meta_truth(a.defects, row["faulty"]) for row, a in claims]
    if claims:
        result["meta/accuracy"] = mean([parse_meta(text) == ms for text, ms in zip(said, wanted)])
    return result


def analyse_all(trainer: DeepSeekMath, rows: list[dict], greedy=False) -> list[Analysis | None]:
    """`DeepSeekMath.analyse` for rows that are the same on all processes."""
    texts = trainer.generate_all("verifier", [grade_prompt(row) for row in rows], greedy)
    return [parse_analysis(t, len(split_steps(r["solution"]))) for t, r in zip(texts, rows)]


# ------------------------------------------------------------------ main
CURVES = {  # panels of curves.png and report.html; step lines show the first metric of each
    "generator": ["generator/accuracy", "co/over_claim"],
    "verifier": ["verifier/balanced_accuracy", "verifier/claims_real", "verifier/defects_found"],
    "meta-verifier": ["meta/accuracy"],
    "labels": ["labels/agreement", "labels/single", "labels/kept"],
}


def load(args: Args):
    wanted = max(args.steps * args.questions * 4, args.solutions)
    return load_questions(args.dataset, wanted, args.eval_questions, args.seed)


def main(args: Args):
    launch(DeepSeekMath, args, load, evaluate, CURVES, solve_prompt, args.group_size)


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
