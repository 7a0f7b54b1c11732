r"""DeepSeekMath-V2: a verifier that is itself verified, and a generator that grades itself (Shao et
al. 2025, arXiv:2511.22570).

    python deepseekmath.py                                the small model on a CPU, 3 minutes
    python deepseekmath.py --no-meta-reward               a verifier that may invent defects
    python deepseekmath.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k   one GPU

The loop (section 2; all updates by `CoTrainer.loss`, in common/core/cotrainer.py)
    scores s: 0, the answer is wrong; 0.5, it is right, but a step is not; 1, all is right
    R_format: 1, the text has the required form; 0, it does not

    A run begins with LABELS by the truth. Then come steps of VERIFIER with R_meta = 1, then steps
    of META, then rounds. A round has steps of VERIFIER, of which every third is a step of META
    instead, and then steps of GENERATOR. Every later round begins with LABELS

    LABELS     = `label_solutions`: new solutions Y of the generator and their scores s, in the
               first round by the truth, then by votes: n analyses of Y, m meta-votes on each
    VERIFIER   = `verifier_step`: Y -> an analysis that names the faulty steps, and a score s'
               R_V = R_format * (1 - |s' - s|) * R_meta                             sec. 2.1.2
    META       = `meta_step`: the steps that an analysis calls faulty -> a score ms' of whether
               these steps are faulty
               R = R_format * (1 - |ms' - ms|)                                      sec. 2.1.2
    GENERATOR  = `generator_step`: question -> a solution Y and below it Z, its analysis of Y
               R = R_format * (0.76 * R_Y + 0.24 * R_Z)                             sec. 2.2
               R_Y = s', the verifier's score of Y;  R_Z = (1 - |s_own - s'|) * R_meta(Z)

Our changes that matter (more in docs/deepseekmath.md)
    1. There are two LoRA adapters on one base: one for the generator, and one for verifier and
       meta-verifier. The paper starts each model from the other model's weights and ends with a
       single model.
    2. The paper has proofs that experts graded. We have solutions with an answer, and grade them by
       answer and steps.
    3. A defect is the number of a step, and the meta-verifier reads these numbers only.

Shapes: P questions or solutions per step, M completions of each, B = P * M rows.
"""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from common.core.errors import UserError
from common.run.args import Count, CountOrZero, GroupSize, RunArgs, Tokens, Weight, parse, per_model


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 48
    """optimiser steps of all phases together (paper: not given)"""
    questions: Count = 16
    """P, questions or solutions per step and process (paper: not given)"""
    group_size: GroupSize = 8
    """M, completions that are compared with each other (paper: not given)"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of both adapters, constant (paper: not given)"""
    kl: Weight = 0.001
    """weight of the k3 penalty towards the base (paper: not given); 0 saves the reference pass"""
    verifier_steps: CountOrZero = 6
    """verifier steps, at the start and in every round; each third step of a round is META"""
    meta_steps: CountOrZero = 6
    """meta-verifier steps after the first verifier steps; with 0 it is never trained"""
    generator_steps: CountOrZero = 6
    """generator steps in every round, after the verifier's"""
    eval_every: CountOrZero = 24
    """steps between evaluations on held-out questions; 0 = only first and last"""
    eval_questions: Count = per_model(tiny=96, real=128)
    """held-out questions"""
    solutions: Count = per_model(tiny=128, real=256)
    """solutions that are labelled at the beginning of every round"""
    analyses: Count = 4
    """n, analyses of each solution that votes label (paper: not given)"""
    votes: Count = 3
    """m, meta-verifications of an analysis that finds fault (paper: not given)"""
    least_valid: Count = per_model(tiny=1, real=2)
    """k, valid analyses that a label below 1 needs (paper: not given)"""
    labels: Literal["votes", "truth"] = "votes"
    """ablation: labels by the truth in all rounds"""
    meta_reward: bool = True
    """ablation: R_meta = 1 in the verifier's reward"""
    self_reward: bool = True
    """ablation: the generator's reward is R_Y alone"""
    solution_tokens: Tokens = per_model(tiny=160, real=1536)
    """length limit of a solution with its self-evaluation (released code: 128k)"""
    analysis_tokens: Tokens = per_model(tiny=112, real=1024)
    """length limit of an analysis and of a meta-verification (released code: 64k)"""

    def check(self):
        if self.verifier_steps + self.generator_steps == 0:
            raise UserError("--verifier-steps 0 and --generator-steps 0: a round needs a step.")
        if self.least_valid > self.analyses:
            most = f"must be at most --analyses {self.analyses}"
            raise UserError(f"--least-valid {self.least_valid} {most}: no label could be below 1.")


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.cotrainer import Batch
from common.core.lists import chunk, mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import SOLVED, final_answer, prompt, split_steps
from common.tasks.graded import analysis_metrics, meta_truth, truth_of
from common.tasks.math import count_for_steps, load_for_steps
from common.tasks.verdicts import WRONG, Analysis, read_analysis, read_score

ALPHA, BETA = 0.76, 0.24  # weights of R_Y and R_Z (paper sec. 2.2)
SCORES = (0.0, 0.5, 1.0)
HEADING = "## Self Evaluation"
KEPT = ("question", "solution", "truth", "faulty")  # kept of a solution; with a label and a round

# ------------------------------------------------------------------ prompts and parsing
FORM = r"""Work the problem out, and compare each step of the solution with it. End with two
lines: "Defects:" with the numbers of the faulty steps or the word none, and "Score:" with the
score. The score is 1 if no step is faulty, 0.5 if the answer is right in spite of a faulty
step, and 0 if the answer is wrong. Do not name a step of which you are not sure."""

PROVE = rf"""Solve the problem step by step. Put every step in its own <step> </step> tags, and
after the last one the answer in this form: <answer>\boxed{{...}}</answer>. Then, under the heading
{HEADING}, grade your own solution as strictly as if it were somebody else's: an honest low score is
worth more than a high one that is not true. {FORM}"""

GRADE = f"You are given a problem and a solution. {FORM}"

META = r"""You are given a problem, a solution, and the numbers of the steps that somebody has
called faulty. Check these steps and no others, each in its own <step> </step> tags that end in
\boxed{CORRECT} or \boxed{INCORRECT}, which says whether the solution's step is right. End with a
line "Score:" with the score. The score is 1 if all of them are faulty, 0.5 if some of
them are, and 0 if none is."""


def prove_prompt(question: str) -> list[dict]:
    return prompt(PROVE, to_prove(question), PROVED)


def to_prove(question: str) -> str:
    return f"{question}\nSolve and grade yourself."


def grade_prompt(row: dict) -> list[dict]:
    return prompt(GRADE, to_grade(row), GRADED)


def to_grade(row: dict) -> str:
    return f"Problem: {row['question']}\nSolution:\n{row['solution']}\nGrade it."


def meta_prompt(row: dict, defects: tuple[int, ...]) -> list[dict]:
    return prompt(META, with_claims(row, defects, "Are they real?"), META_GRADED)


def with_claims(row: dict, defects: tuple[int, ...], ask: str) -> str:
    claims = ",".join(map(str, defects)) or "none"
    solution = f"Problem: {row['question']}\nSolution:\n{row['solution']}"
    return f"{solution}\nDefects: {claims}\n{ask}"


# worked examples, of a right solution and a wrong solution
RIGHT = {"question": SOLVED[0][0], "solution": SOLVED[0][1]}
FAULTY = {"question": SOLVED[1][0], "solution": WRONG}
GRADED = [
    (
        to_grade(RIGHT),
        "3 boxes of 12 pens are 3*12 = 36 pens, 6+5 = 11 are given away, and 36-11 = 25 are left. "
        "The solution says 25, which is right.\nDefects: none\nScore: 1",
    ),
    (
        to_grade(FAULTY),
        "Half of 20 is 10 books, and 10*8 = 80 dollars come in. The solution says 18, because "
        "step 2 adds 10 and 8.\nDefects: 2\nScore: 0",
    ),
]
PROVED = [
    (to_prove(row["question"]), f"{row['solution']}\n{HEADING}\n{analysis}")
    for row, (_, analysis) in zip((RIGHT, FAULTY), GRADED)
]
META_GRADED = [
    (
        with_claims(RIGHT, (1, 3), "Are they real?"),
        r"""<step>12+12+12 = 36 pens are in 3 boxes. \boxed{CORRECT}</step>
<step>36-11 = 25, because 25+11 = 36. \boxed{CORRECT}</step>
Score: 0""",
    ),
    (
        with_claims(FAULTY, (2,), "Are they real?"),
        r"""<step>10 books of 8 dollars bring 10*8 = 80, not 10+8. \boxed{INCORRECT}</step>
Score: 1""",
    ),
]


def parse_solution(text: str) -> tuple[str, Analysis | None]:
    """(the solution, its analysis of itself). Of the solution only the steps and the answer's box
    are kept, because a verifier might believe praise. The analysis is also None if the solution
    lacks steps or a boxed answer, or has the heading twice.
    """
    before, _, own = text.partition(HEADING)
    before, _, rest = before.partition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    box = final_answer(answer) or ""
    solution = "".join(f"<step>{step}</step>\n" for step in split_steps(before))
    complete = solution and closed and box and HEADING not in own
    if closed:
        solution += rf"<answer>\boxed{{{box}}}</answer>" if box else "<answer></answer>"
    return solution.strip(), read_analysis(own, solution, SCORES) if complete else None


# ------------------------------------------------------------------ rewards and mathematics
def verifier_reward(said: float | None, truth: float, R_meta: float = 1.0) -> float:
    """Sec. 2.1.2: R_V = R_format * (1 - |s' - s|) * R_meta, and with ms' and ms that of META."""
    if said is None:  # R_format = 0
        return 0.0
    return (1 - abs(said - truth)) * R_meta


def generator_reward(s: float, s_own: float, R_meta: float, self_reward: bool = True) -> float:
    """Sec. 2.2, where R_format is 1: R = 0.76 * R_Y + 0.24 * R_Z.

    >>> generator_reward(0.0, 0.0, 1.0), generator_reward(0.0, 1.0, 1.0)  # honest, and boasting
    (0.24, 0.0)
    """
    R_Y, R_Z = s, (1 - abs(s_own - s)) * R_meta
    return ALPHA * R_Y + BETA * R_Z if self_reward else R_Y


def meta_quality(analysis: Analysis, ms: float | None) -> float:
    """R_meta: ms', 0.5 if it cannot be read, and at most 0.5 where score and defects disagree."""
    return min(0.5 if ms is None else ms, 1.0 if analysis.consistent else 0.5)


def auto_label(analyses: list[tuple[float, list[bool]]], k: int) -> float | None:
    """Sec. 2.3: the label of a solution without the truth, or None, which drops the solution. An
    analysis is (score, meta-votes), and is valid if more than half of its votes say so.

    >>> yes, no = [True, True, False], [True, False, False]
    >>> auto_label([(0.0, yes), (0.5, yes), (0.5, yes)], 2), auto_label([(0.0, no), (1.0, [])], 2)
    (0.5, 1.0)
    """
    if len(analyses) < k:
        return None
    valid = Counter(s for s, votes in analyses if s < 1 and sum(votes) > len(votes) / 2)
    if not valid:
        return 1.0
    # the lowest score that k valid analyses give; in the paper these k must have the lowest of all
    return min((score for score, count in valid.items() if count >= k), default=None)


# ------------------------------------------------------------------ the trainer
class DeepSeekMath(CoTrainer):
    """`step` is the loop of section 2. CoTrainer samples, scores, computes the loss and updates."""

    def __init__(self, *inputs):
        super().__init__(*inputs)
        self.saved = {"labelled": [], "rounds": 0}  # the same on all processes

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        """The players have no reward functions: rewards need what both verifiers say."""
        M, solution, analysis = args.group_size, args.solution_tokens, args.analysis_tokens
        return {
            "generator": Player([], args.lr, solution, M, reads=solution),  # in `evaluate`
            "verifier": Player([], args.lr, analysis, M, reads=solution),
            "meta": Player([], args.lr, analysis, M, reads=solution, adapter="verifier"),
        }

    def step(self, rows):
        """rows: B, every question M times in a row; only the generator's steps use them."""
        phase, current = phase_at(self.state.global_step, self.cfg)
        if phase == "generator":
            return [self.generator_step(rows)]
        if self.saved["rounds"] == current:
            self.label_solutions(current)
        return [self.meta_step() if phase == "meta" else self.verifier_step()]

    def verifier_step(self) -> Batch:
        M, now = self.cfg.group_size, self.state.global_step
        drawn = self.draw(self.saved["labelled"], self.random_numbers())  # P
        rows = [{**row, "prompt": grade_prompt(row)} for row in drawn for _ in range(M)]  # B
        batch = self.rollout("verifier", rows)
        analyses = [read_analysis(t, r["solution"], SCORES) for t, r in zip(batch.texts, rows)]
        R_meta = [1.0] * len(rows)
        if self.cfg.meta_reward and now >= self.cfg.verifier_steps + self.cfg.meta_steps:
            R_meta = self.meta_verify(rows, analyses)
        # R_V = R_format * (1 - |s' - s|) * R_meta
        said = [analysis.score if analysis else None for analysis in analyses]
        self.set_rewards(batch, [*map(verifier_reward, said, [r["label"] for r in rows], R_meta)])
        self.report_verifier(rows, batch, analyses, R_meta)
        return batch

    def meta_step(self) -> Batch:
        """META learns from the first round's solutions, whose faulty steps are known."""
        rng = self.random_numbers()
        pool = [row for row in self.saved["labelled"] if row["faulty"] is not None]
        lessons = [row for row in pool if row["round"] == 0]
        if not lessons:
            why = "no answer is right and no equation false; set it to 0"
            steps = f"--meta-steps {self.cfg.meta_steps}"
            raise UserError(f"{steps}: no solution's faulty steps are known, as {why}.")
        drawn, rows = self.draw(lessons, rng), []  # P
        steps = [len(split_steps(row["solution"])) for row in drawn]
        made_up = self.over_all_processes(lambda steps: [rng.randint(1, n) for n in steps], steps)
        for row, analysis, k in zip(drawn, self.analyse(drawn), made_up):
            claims = analysis.defects if analysis else ()
            if not claims:  # one is made up, which may be real
                claims = (k,)
            row = row | {"claims": claims, "ms": meta_truth(claims, row["faulty"])}
            rows += [row | {"prompt": meta_prompt(row, claims)}] * self.cfg.group_size  # B
        batch = self.rollout("meta", rows)
        said = [read_score(text, SCORES) for text in batch.texts]
        # R = R_format * (1 - |ms' - ms|)
        self.set_rewards(batch, [verifier_reward(ms, row["ms"]) for ms, row in zip(said, rows)])
        self.report_meta(rows, batch, said)
        return batch

    def generator_step(self, rows: list[dict]) -> Batch:
        batch = self.rollout("generator", rows)
        solutions, own = zip(*map(parse_solution, batch.texts))
        solved = [{"question": r["question"], "solution": s} for r, s in zip(rows, solutions)]
        readable = [i for i, analysis in enumerate(own) if analysis]  # R_format = 1
        judged = [solved[i] for i in readable]
        verdicts = self.analyse(judged)
        R_meta = self.meta_verify(judged, [own[i] for i in readable])
        rewards = [0.0] * len(rows)
        for i, verdict, quality in zip(readable, verdicts, R_meta):
            s = verdict.score if verdict else 0.0
            # R = R_format * (0.76 * R_Y + 0.24 * R_Z)
            rewards[i] = generator_reward(s, own[i].score, quality, self.cfg.self_reward)
        self.set_rewards(batch, rewards)
        self.report_generator(rows, batch, solved, own, dict(zip(readable, verdicts)))
        return batch

    def analyse(self, rows: list[dict]) -> list[Analysis | None]:
        """The verifier's analysis of each row's solution."""
        texts = self.generate("verifier", [grade_prompt(row) for row in rows])
        return [read_analysis(text, row["solution"], SCORES) for text, row in zip(texts, rows)]

    def meta_verify(self, rows: list[dict], analyses: list[Analysis | None]) -> list[float]:
        """R_meta of each row's analysis, by one meta-verification of its claims. For an analysis
        that claims nothing ms' is 1 without a meta-verification.
        """
        claiming = [i for i, analysis in enumerate(analyses) if analysis and analysis.defects]
        asked = [meta_prompt(rows[i], analyses[i].defects) for i in claiming]
        said = [read_score(text, SCORES) for text in self.generate("meta", asked)]
        ms = dict(zip(claiming, said))
        return [meta_quality(a, ms.get(i, 1.0)) if a else 0.0 for i, a in enumerate(analyses)]

    # --- labels
    def label_solutions(self, current: int):
        """Labels a solution of each of the round's questions by the present generator."""
        count, pool = self.cfg.solutions, self.saved["labelled"]
        numbers = range(current * count, (current + 1) * count)
        questions = [self.train_rows[i % len(self.train_rows)] for i in numbers]
        solved = self.in_parallel(self.solve, questions)
        labels = [row["truth"] for row in solved]
        if current > 0 and self.cfg.labels == "votes":
            labels = self.in_parallel(self.vote, solved)
        kept = []
        for row, label in zip(solved, labels):
            if label is not None and split_steps(row["solution"]):
                row = {name: row[name] for name in KEPT}
                kept.append(row | {"label": label, "round": current})
        pool += kept
        if not pool:
            limit = f"--solution-tokens {self.cfg.solution_tokens}"
            raise UserError(f"no solution can be labelled: none has a step in tags within {limit}.")
        self.saved["rounds"] = current + 1
        self.log_mean("labels/kept", len(kept) / count)
        self.log_mean("labels/agreement", [row["label"] == row["truth"] for row in kept])

    def solve(self, rows: list[dict], greedy: bool = False) -> list[dict]:
        """A solution of each row's question, its own analysis of it, and the truth about it."""
        asked = [prove_prompt(row["question"]) for row in rows]
        solved = []
        for row, text in zip(rows, self.generate("generator", asked, greedy)):
            solution, own = parse_solution(text)
            truth, faulty = truth_of(row, solution)
            solved.append(row | dict(solution=solution, own=own, truth=truth, faulty=faulty))
        return solved

    def vote(self, rows: list[dict]) -> list[float | None]:
        """Labels by n analyses of each solution, and m meta-votes on an analysis with claims."""
        n, m, k = self.cfg.analyses, self.cfg.votes, self.cfg.least_valid
        copies = [row for row in rows for _ in range(n)]
        analyses = self.analyse(copies)
        doubts = [i for i, a in enumerate(analyses) if a and a.score < 1 and a.defects]
        doubts = [i for i in doubts for _ in range(m)]
        asked = [meta_prompt(copies[i], analyses[i].defects) for i in doubts]
        votes = [[] for _ in copies]
        for i, text in zip(doubts, self.generate("meta", asked)):
            votes[i].append((read_score(text, SCORES) or 0) > 0)  # one real defect is enough
        labels = []
        for row, its_analyses, its_votes in zip(rows, chunk(analyses, n), chunk(votes, n)):
            readable = [(a.score, vote) for a, vote in zip(its_analyses, its_votes) if a]
            labels.append(auto_label(readable, k))
            self.log_mean("labels/single", [score == row["truth"] for score, _ in readable])
        return labels

    def draw(self, pool: list[dict], rng: random.Random) -> list[dict]:
        """P labelled solutions of this process, every label equally often. Otherwise 0 would be a
        safe guess.

        A label with fewer different solutions than a step needs is drawn as often as it occurs.
        Otherwise a handful of solutions with mostly wrong labels would be a third of all lessons.
        """
        count = self.cfg.questions * self.accelerator.num_processes
        of_label = {score: [row for row in pool if row["label"] == score] for score in SCORES}
        different = {s: len({row["solution"] for row in rows}) for s, rows in of_label.items()}
        common = [score for score in SCORES if different[score] >= count]
        rng.shuffle(common)  # else the first would always get what is left over
        drawn = [row for row in rng.choices(pool, k=count) if row["label"] not in common]
        drawn += [rng.choice(of_label[common[i % len(common)]]) for i in range(count - len(drawn))]
        rng.shuffle(drawn)
        return self.shard(drawn)

    # --- what is logged and shown; no method below affects training; gather needs all processes
    def report_verifier(self, rows, batch, analyses, R_meta):
        of_all = self.gather(rows), self.gather(analyses)  # a share of all, not the mean of shares
        for name, value in analysis_metrics(*of_all, meta_quality).items():
            self.log_mean(f"verifier/{name}", value)
        self.log_mean("verifier/meta_reward", R_meta)
        self.log_mean("verifier/wrong_lessons", [row["label"] != row["truth"] for row in rows])
        for note, row, a in zip(batch.notes, rows, analyses):
            note |= {"label": row["label"], "truth": row["truth"], "defects": row["faulty"]}
            note["claimed"] = a and list(a.defects)

    def report_meta(self, rows, batch, said):
        self.log_mean("meta/accuracy", [ms == row["ms"] for row, ms in zip(rows, said)])
        for note, row in zip(batch.notes, rows):
            note |= {"claimed": list(row["claims"]), "defects": row["faulty"]}

    def report_generator(self, rows, batch, solved, own, verdicts):
        truths = [truth_of(row, answer["solution"]) for row, answer in zip(rows, solved)]
        self.log_mean("generator/accuracy", [s > 0 for s, _ in truths])
        self.log_mean("generator/well_formed", [a is not None for a in own])
        self.log_mean("co/over_claim", [a.score - s for a, (s, _) in zip(own, truths) if a])
        flattery = [a.score - truths[i][0] for i, a in verdicts.items() if a]
        self.log_mean("co/verdict_minus_gold", flattery)
        for i, (note, a, (s, faulty)) in enumerate(zip(batch.notes, own, truths)):
            note |= {"truth": s, "defects": faulty, "claimed": a and list(a.defects)}
            note["verifier's score"] = verdicts[i].score if verdicts.get(i) else None


def phase_at(step: int, cfg: Args) -> tuple[str, int]:
    """(the player of this step, the round). Verifier and meta-verifier come first, then rounds of
    both and the generator. Every third verifier step of a round trains the meta-verifier, which
    would otherwise forget.
    """
    V, meta, G = cfg.verifier_steps, cfg.meta_steps, cfg.generator_steps
    if step < V + meta:
        return "verifier" if step < V else "meta", 0
    current, turn = divmod(step - V - meta, V + G)
    if turn >= V:
        return "generator", current
    return "meta" if meta and turn % 3 == 2 else "verifier", current


# ------------------------------------------------------------------ evaluation
CORRECT = """You are given a problem, your solution, and the numbers of the steps that you found
faulty. Write the solution again without these faults, in the same form: every step in its own
<step> </step> tags, then the answer."""


def refine_prompt(row: dict) -> list[dict]:
    """Sequential refinement (sec. 3): the generator is shown its own evaluation."""
    defects = row["own"].defects if row["own"] else ()
    return prompt(CORRECT, with_claims(row, defects, "Correct it."), CORRECTED)


CORRECTED = [  # worked examples: without a fault, the solution is written as it was
    (with_claims(RIGHT, (), "Correct it."), RIGHT["solution"]),
    (with_claims(FAULTY, (2,), "Correct it."), SOLVED[1][1]),
]


def evaluate(trainer: DeepSeekMath, held_out: list[dict]) -> dict[str, float]:
    """Figures of the generator, and of the verifier on the base's solutions of step 0."""
    n = trainer.cfg.eval_samples
    samples = trainer.in_parallel(trainer.solve, [row for row in held_out for _ in range(n)])
    greedy = trainer.in_parallel(lambda rows: trainer.solve(rows, greedy=True), held_out)
    first = samples[::n]
    again = trainer.generate_all("generator", [refine_prompt(row) for row in first])
    refined = [truth_of(row, parse_solution(text)[0]) for row, text in zip(held_out, again)]
    own = [(row["own"].score, row["truth"]) for row in samples if row["own"]]
    base = trainer.saved.setdefault("base", [{name: row[name] for name in KEPT} for row in first])
    return {
        "generator/accuracy": mean([row["truth"] > 0 for row in samples]),
        "generator/greedy": mean([row["truth"] > 0 for row in greedy]),
        "generator/refined": mean([score > 0 for score, _ in refined]),
        "generator/own_score_right": mean([said == s for said, s in own]),
        "co/over_claim": mean([said - s for said, s in own]),
        **evaluate_verifier(trainer, base),
    }


def evaluate_verifier(trainer: DeepSeekMath, rows: list[dict]) -> dict[str, float]:
    """By one analysis of each solution, and a meta-verification of each analysis with claims."""
    analyses = trainer.in_parallel(trainer.analyse, rows)
    result = {f"verifier/{k}": x for k, x in analysis_metrics(rows, analyses, meta_quality).items()}
    known = [(row, a) for row, a in zip(rows, analyses) if a and row["faulty"] is not None]
    claims = [(row, a.defects) for row, a in known if a.defects]
    asked = [meta_prompt(row, defects) for row, defects in claims]
    said = [read_score(text, SCORES) for text in trainer.generate_all("meta", asked)]
    right = [ms == meta_truth(defects, row["faulty"]) for ms, (row, defects) in zip(said, claims)]
    return result | ({"meta/accuracy": mean(right)} if right else {})


# ------------------------------------------------------------------ main
CURVES = {
    "generator": ["generator/accuracy", "co/over_claim"],
    "verifier": ["verifier/balanced_accuracy", "verifier/claims_real", "verifier/defects_found"],
    "meta-verifier": ["meta/accuracy"],
    "labels": ["labels/agreement", "labels/single", "labels/kept", "verifier/wrong_lessons"],
}


def load(args: Args):
    _, last = phase_at(args.steps - 1, args)  # every round labels solutions of further questions
    return load_for_steps(args, max((last + 1) * args.solutions, count_for_steps(args)))


def main(args: Args):
    launch(DeepSeekMath, args, load=load, evaluate=evaluate, curves=CURVES, prompt=prove_prompt)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
