r"""MAE, Multi-Agent Evolve: one model proposes questions, answers them and judges both (Chen et al.
2025, arXiv:2510.23595).

    python mae.py                                         the small model on a CPU, 2 minutes
    python mae.py --no-train-judge                        one of table 6's ablations
    python mae.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k        one GPU

The loop (algorithm 1) is `Mae.step`. D is the pool of questions, at first the seeds. S is the pool
of pairs (q, a). V is the judge's value of a question or an answer
    PROPOSER = `propose`   q ~ proposer(. | a reference from D, or none)                  sec. 4.1
                           quality = V(q);  difficulty = 1 - mean of V(a_i, q) over 5 answers a_i
                           r = (quality + difficulty + format) / 3;  quality >= 0.7: q joins D
    SOLVER = `solve`       q ~ D, a ~ solver(. | q)                                       sec. 4.2
                           r = (V(a, q) + format) / 2;  (q, a) joins S
    JUDGE = `judge`        (q, a) ~ S, score ~ judge(. | q, a);  r = format               sec. 4.3

    V = (score - 1) / 9, with a score of the judge from 1 to 10
    A = (r - mean) / std within each role. ONE update on all three batches, with the loss
    `CoTrainer.loss` in common/core/cotrainer.py.

The judgements behind V and the 5 answers only make rewards, and are never trained on. No gold
answer is used, and nothing rewards the judge for being right. co/flattery says whether the model
flatters itself: V of its own answers to held-out questions minus their true accuracy.

Our changes that matter (more in docs/mae.md)
    1. Format counts the tags in the response and wants one pair, as the paper says. The released
       code also counts the tags in the prompt, so a proposer may write three questions.
    2. If quality < 0.7 the difficulty is 0, as in the released code but not in the paper, because
       nonsense is also hard to answer.
    3. All roles draw from D and S as the last step left them, as in the released code. In algorithm
       1 the solver can already draw this step's questions, and the judge this step's answers.
    4. A full D drops its oldest self-generated question. The released code keeps the oldest 10,000
       for ever. S starts empty. The released code starts S with the seeds' gold answers.
    5. A is whitened over rows, in the released code over tokens. There is no entropy bonus (paper
       and released code: weight 0.001).

Shapes: N rows of each role, B = 3 * N rows of a step.
"""

import random
import re
from dataclasses import dataclass

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


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 48
    """optimiser steps, each on all three roles (paper: 300)"""
    questions: GroupSize = 32
    """N, rows of each role per step and process (paper: 128)"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the adapter, constant (paper: 1e-6, all weights)"""
    reference_share: Share = 0.5
    """share of proposals that are shown a question of the pool (paper: 0, 0.5 or 1)"""
    seed_questions: Count = 256
    """questions in the pool at the start, without answers (paper: 967, or 16 of the model's own)"""
    pool_size: Count = 10_000
    """most questions in D, and most pairs in S (released code: 10,000 questions)"""
    difficulty_samples: Several = 5
    """answers that a question's difficulty is measured with (paper: 5)"""
    train_proposer: bool = True
    """ablation of table 6; a role that is not trained still plays"""
    train_solver: bool = True
    """the same for the solver"""
    train_judge: bool = True
    """the same for the judge"""
    quality_gate: bool = True
    """ablation of table 6: without it all questions join the pool, and difficulty always counts"""
    format_reward: bool = True
    """ablation of table 6: without it all format terms are 0"""
    solution_tokens: Tokens = per_model(tiny=80, real=1024)
    """length limit of a solution, and of a proposal (paper: 8192)"""
    judgement_tokens: Tokens = per_model(tiny=96, real=1024)
    """length limit of a judgement (paper: 8192)"""
    silent_share: Share = 0.5
    """the run stops when in three steps in a row more than this share of judgements has no score"""

    def check(self):
        if not (self.train_proposer or self.train_solver or self.train_judge):
            parts = "--no-train-proposer, --no-train-solver and --no-train-judge"
            raise UserError(f"{parts} leave nobody to train.")
        if self.seed_questions >= self.pool_size:
            seeds = f"--seed-questions {self.seed_questions}"
            raise UserError(f"{seeds} must be less than --pool-size {self.pool_size}.")


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.advantage import whiten
from common.core.cotrainer import Batch
from common.core.lists import chunk, mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import (
    SOLVED,
    boxed,
    evaluate_solver,
    is_correct,
    prompt,
    solve_prompt,
)
from common.tasks.math import load_for_steps
from common.tasks.ranking import pairs_in_order
from common.tasks.verdicts import SCORED, to_score, verdict_metrics
from common.tiny.tasks import parse_question

import torch

QUALITY_GATE = 0.7  # a score of 8 or more (paper sec. 4.1)
NEUTRAL = 0.5  # V of a judgement without a score, which exceeds that of an explicit "wrong"
PATIENCE = 3  # silent steps in a row that end the run
WHITEN_EPS = 1e-4  # under the root: std is at least a hundredth, so rounding noise stays noise

# ------------------------------------------------------------------ prompts and parsing
PROPOSE = """Write one new problem that is hard but can be solved by reasoning alone:
self-contained, with one right answer that does not depend on taste, trivia or today's world. If
there is a reference problem, keep its kind of reasoning, make it harder and change what it is
about. Write nothing but the problem, inside of one pair of <question> </question> tags."""

JUDGE_ANSWER = """Score an answer to a question from 1 to 10. First solve the question yourself
inside of <think> </think> tags, and compare. 1 to 3: it is wrong, made up or repetitive. 4 to 7:
nothing is wrong, but something is missing or unclear. 8 to 10: it is right, complete and to the
point. Then write the number alone inside of one pair of <score> </score> tags."""

JUDGE_QUESTION = """Score a question from 1 to 10. First think inside of <think> </think> tags. 1 to
3: it cannot be solved, is unsafe, leaves everything open, or is no question. 4 to 7: it is
ambiguous or lacks a condition. 8 to 10: it is clear, sound and can be solved as it stands. Then
write the number alone inside of one pair of <score> </score> tags."""


def propose_prompt(reference: str | None) -> list[dict]:
    return prompt(PROPOSE, to_propose(reference), PROPOSED)


def to_propose(reference: str | None) -> str:
    return (f"Reference: {reference}\n" if reference else "") + "Propose a question."


PROPOSED = [  # worked examples of unlike kinds
    (to_propose(None), f"<question>{SOLVED[0][0]}</question>"),
    (
        to_propose(SOLVED[1][0]),
        "<question>A baker sells a third of his 60 rolls for 3 dollars each and half of the others "
        "for 2 dollars each. How much money does he take?</question>",
    ),
    (
        to_propose(None),
        "<question>I double a number, add 6 and get 40. What is the number?</question>",
    ),
]


def judge_answer_prompt(question: str, solution: str) -> list[dict]:
    return prompt(JUDGE_ANSWER, to_score(question, shown_answer(solution)), SCORED)


def judge_question_prompt(question: str) -> list[dict]:
    return prompt(JUDGE_QUESTION, to_score_question(question), SCORED_QUESTIONS)


def to_score_question(question: str) -> str:
    return f"Question: {question}\nScore the question."


SCORED_QUESTIONS = [  # worked examples
    (
        to_score_question(SOLVED[1][0]),
        """<think>
The number of books, the part that is sold and the price are given. That is all one needs.
</think>
<score>9</score>""",
    ),
    (
        to_score_question("A train leaves at 9 and travels 120 miles. How fast does it go?"),
        """<think>
When the train arrives is not said, so its speed cannot be known.
</think>
<score>3</score>""",
    ),
]


def contents(text: str, tag: str) -> list[str]:
    """What stands between <tag> and </tag>, in order; a tag opened twice counts from the second."""
    return re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL | re.IGNORECASE)


def proposed_question(text: str) -> str:
    """The last <question>, or "" if there is none."""
    return (contents(text, "question") or [""])[-1].strip()


def shown_answer(solution: str) -> str:
    r"""What the judge sees of a solution: the content of the last \boxed{}, or else all of it."""
    return boxed(solution) or solution


def judge_score(text: str) -> float | None:
    """V = clip((s - 1) / 9, 0, 1) of the first score s in a judgement; None if there is none.

    Only what follows the last </think> is read. In a score a fraction counts before a decimal and
    that before an integer, as in the released code; so "8/10" is 0.8, and V = 0.

    >>> judge_score("<think>7:7</think><score>10</score>"), judge_score("<score>eight</score>")
    (1.0, None)
    """
    verdict = re.split("</think>", text, flags=re.IGNORECASE)[-1]
    verdict = re.split("<think>", verdict, flags=re.IGNORECASE)[0]  # cut thoughts are thoughts
    for part in contents(verdict, "score"):
        score = first_number(part[:1000])  # digits cost n^2
        if score is not None:
            return min(1.0, max(0.0, (score - 1) / 9))
    return None


def neutral(V: float | None) -> float:
    return NEUTRAL if V is None else V


def tag_format(text: str, tag: str) -> float:
    """1 for one <tag>...</tag> pair, 0.5 for several, 0 for none or tags that do not pair up."""
    marks = (f"<{tag}>", f"</{tag}>")
    opened, closed = (len(re.findall(mark, text, re.IGNORECASE)) for mark in marks)
    pairs = len(contents(text, tag))
    if pairs == 0 or not opened == closed == pairs:
        return 0.0
    return 1.0 if pairs == 1 else 0.5


# ------------------------------------------------------------------ rewards
def format_reward(completions, tag, **_) -> list[float]:
    """All roles, called by TRL: the format of the role's own tag. The rest comes from the judge."""
    return [tag_format(c[0]["content"], t) for c, t in zip(completions, tag)]


def proposer_reward(quality: float, difficulty: float, format: float, gate: float) -> float:
    """r = (quality + difficulty + format) / 3, without the difficulty below the gate."""
    return (quality + (difficulty if quality >= gate else 0.0) + format) / 3


# ------------------------------------------------------------------ the paper's mathematics
def part_whiten(rewards: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A = (r - mean) / std over the rows of the same role (sec. 3): (B,) rewards and (B,) numbers
    of roles -> (B,), exactly 0 in a role whose rewards are all equal.

    Trap, also the paper's: if one row of N differs from all other rows, its A is (N - 1) / sqrt(N)
    up or down, however small the difference: 5.5 at N = 32 and 11.2 at the paper's 128. This
    happens to the judge as soon as it keeps to its format: it then learns from rare slips.
    """
    A = torch.zeros_like(rewards)
    for role in part.unique():
        A += whiten(rewards, part == role, WHITEN_EPS)  # 0 in all other roles
    return A


# ------------------------------------------------------------------ the trainer
@dataclass
class Proposal:
    question: str  # "" = there is none
    quality: float = 0.0
    difficulty: float = 0.0


class Mae(CoTrainer):
    """`step` is algorithm 1. CoTrainer samples, scores, computes the loss and updates."""

    def __init__(self, *inputs):
        super().__init__(*inputs)
        # both pools, the same on all processes; the seeds come without their answers, and once
        seeds = list(dict.fromkeys(row["question"] for row in self.train_rows))
        self.saved = {"questions": seeds, "seeds": len(seeds), "pairs": [], "silent_steps": 0}
        self.gate = QUALITY_GATE if self.cfg.quality_gate else 0.0
        self.unread = []  # of each judgement of the step, whether it has no score
        self.trouble = ""  # why the run ends early

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        shared = {"group_size": 1, "adapter": "agent"}
        solution, judgement = args.solution_tokens, args.judgement_tokens
        return {
            "proposer": Player([format_reward], args.lr, solution, **shared),
            "solver": Player([format_reward], args.lr, solution, **shared),
            "judge": Player([format_reward], args.lr, judgement, reads=solution, **shared),
        }

    def step(self, rows):
        """The loader's rows are not used: all roles get theirs from the pools."""
        references, questions, pairs = self.draw()
        batches = [self.propose(references), self.solve(questions)]
        if pairs:
            batches.append(self.judge(pairs))
        self.stop_if_silent()

        batch = self.concat(batches)
        # A = (r - mean) / std within each role, over the rows of all processes
        A = self.over_all_processes(part_whiten, batch.rewards, batch.source)  # (B,)
        trained = torch.tensor([getattr(self.cfg, f"train_{b.player}") for b in batches])
        batch.advantages = A * trained.to(A)[batch.source]
        return [batch]

    def draw(self) -> tuple[list, list, list]:
        """N references (None: propose without it), N questions, and N pairs unless S is empty."""
        cfg, D, S = self.cfg, self.saved["questions"], self.saved["pairs"]
        rng = random.Random(f"{cfg.seed} {self.state.global_step}")
        count = cfg.questions * self.accelerator.num_processes  # everyone's; each takes its share
        references = draw_references(rng, D, cfg.reference_share, count)
        questions = draw_from(rng, D, count)
        pairs = draw_from(rng, S, count)
        return self.shard(references), self.shard(questions), self.shard(pairs)

    def propose(self, references: list[str | None]) -> Batch:
        cfg, n = self.cfg, self.cfg.difficulty_samples
        rows = [{"prompt": propose_prompt(text), "tag": "question"} for text in references]
        batch = self.rollout("proposer", rows)
        proposals = [Proposal(proposed_question(text)) for text in batch.texts]  # N
        written = [proposal for proposal in proposals if proposal.question]
        # quality = V(q)
        V, _ = self.values([judge_question_prompt(proposal.question) for proposal in written])
        for proposal, quality in zip(written, V):
            proposal.quality = quality
        # difficulty = 1 - mean of V(a, q) over n answers; sampled where it counts, above the gate
        good = [proposal for proposal in written if proposal.quality >= self.gate]
        questions = [proposal.question for proposal in good for _ in range(n)]
        answers = self.generate("solver", [solve_prompt(question) for question in questions])
        V, _ = self.values([*map(judge_answer_prompt, questions, answers)])
        for proposal, values in zip(good, chunk(V, n)):
            proposal.difficulty = 1 - mean(values)
        # r = (quality + difficulty + format) / 3; no question, no reward
        formats = (batch.rewards * cfg.format_reward).tolist()  # N
        rewards = [
            proposer_reward(p.quality, p.difficulty, format, self.gate) if p.question else 0.0
            for p, format in zip(proposals, formats)
        ]
        self.set_rewards(batch, rewards)
        new, seeds = self.gather([proposal.question for proposal in good]), self.saved["seeds"]
        add_questions(self.saved["questions"], new, seeds, cfg.pool_size, self.held_out_questions)
        self.report_proposals(batch, proposals, good)
        return batch

    def solve(self, questions: list[str]) -> Batch:
        cfg = self.cfg
        rows = [{"prompt": solve_prompt(question), "tag": "answer"} for question in questions]
        batch = self.rollout("solver", rows)
        V, judgements = self.values([*map(judge_answer_prompt, questions, batch.texts)])
        # r = (V(a, q) + format) / 2
        formats = batch.rewards * cfg.format_reward  # (N,)
        self.set_rewards(batch, (torch.tensor(V).to(formats) + formats) / 2)
        answers = map(shown_answer, batch.texts)
        pairs = [{"question": q, "answer": a} for q, a in zip(questions, answers)]
        self.saved["pairs"] = (self.saved["pairs"] + self.gather(pairs))[-cfg.pool_size :]
        self.log_mean("solver/judged", V)
        for note, v, judgement in zip(batch.notes, V, judgements):
            note["rewards"]["judged"], note["judgement"] = v, judgement
        return batch

    def judge(self, pairs: list[dict]) -> Batch:
        prompts = [judge_answer_prompt(pair["question"], pair["answer"]) for pair in pairs]
        batch = self.rollout("judge", [{"prompt": p, "tag": "score"} for p in prompts])
        self.set_rewards(batch, batch.rewards * self.cfg.format_reward)  # r = format
        return batch

    def values(self, prompts: list) -> tuple[list[float], list[str]]:
        """V of one judgement per prompt, and the judgements, which are never trained on."""
        texts = self.generate("judge", prompts)
        scores = [judge_score(text) for text in texts]
        self.unread += [score is None for score in scores]
        return [neutral(score) for score in scores], texts

    def stop_if_silent(self):
        """Ends the run after PATIENCE steps in a row in which most judgements have no score:
        without scores all rewards are neutral. This step is then the last step, with a checkpoint
        and an evaluation, and `main` says why.
        """
        silent, self.unread = mean(self.gather(self.unread)), []
        self.log_mean("judge/unparsable", silent)
        is_silent = silent > self.cfg.silent_share
        self.saved["silent_steps"] = self.saved["silent_steps"] + 1 if is_silent else 0
        if self.saved["silent_steps"] >= PATIENCE:
            self.state.max_steps = self.state.global_step + 1
            self.trouble = (
                f"step {self.state.global_step + 1}: {silent:.0%} of the judgements had no <score> "
                f"within --judgement-tokens {self.cfg.judgement_tokens} for {PATIENCE} steps in a "
                f"row. The run ends; its checkpoint is in {self.args.output_dir}."
            )

    # --- what is logged and shown; no method below affects training
    def report_proposals(self, batch: Batch, proposals: list[Proposal], good: list[Proposal]):
        for note, p in zip(batch.notes, proposals):
            if p.question:
                note["rewards"] |= {"quality": p.quality, "difficulty": p.difficulty}
        self.log_mean("proposer/quality", [p.quality for p in proposals if p.question])
        self.log_mean("proposer/difficulty", [p.difficulty for p in good])
        self.log_mean("proposer/accepted", len(good) / len(proposals))
        self.log_mean("co/questions", len(self.saved["questions"]))


# ------------------------------------------------------------------ pools
def draw_from(rng: random.Random, pool: list, count: int) -> list:
    """`count` of the pool, repeated only if it is too small; nothing of an empty pool."""
    more = max(0, count - len(pool))
    return rng.sample(pool, count - more) + rng.choices(pool, k=more) if pool else []


def draw_references(rng: random.Random, pool: list, share: float, count: int) -> list:
    """A question of the pool for this share of `count` proposals, None for the others."""
    return [rng.choice(pool) if rng.random() < share else None for _ in range(count)]


def add_questions(pool: list[str], new: list[str], seeds: int, size: int, never: set[str]):
    """Add in place what is neither in the pool nor in `never`.

    The pool's first `seeds` stay for ever; a full pool drops the oldest questions after them.
    """
    known = set(pool) | never
    pool += [q for q in dict.fromkeys(new) if q not in known]
    del pool[seeds : seeds + max(0, len(pool) - size)]


# ------------------------------------------------------------------ numbers in a score
SIGN = r"(?:(?<!\d)-)?"  # a minus right after a digit is the dash of a range
DECIMAL, INTEGER = rf"{SIGN}(?:\d+|(?<![\d.]))\.\d+", rf"{SIGN}\d+"
FRACTION = rf"({DECIMAL}|{INTEGER})\s*/\s*({DECIMAL}|{INTEGER})"


def first_number(text: str) -> float | None:
    """The first fraction, else the first decimal, else the first integer. None if the text has no
    number, or for a division by zero.
    """
    if match := re.search(FRACTION, text, re.ASCII):
        return float(match[1]) / float(match[2]) if float(match[2]) else None
    match = re.search(DECIMAL, text, re.ASCII) or re.search(INTEGER, text, re.ASCII)
    return float(match[0]) if match else None


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: Mae, held_out: list[dict]) -> dict[str, float]:
    """Figures of all three roles on held-out questions, the solver's first."""
    n = trainer.cfg.eval_samples
    result, texts, right = evaluate_solver(trainer, "solver", held_out)
    result |= evaluate_judge(trainer, held_out, texts[::n], right[::n])
    return result | evaluate_proposer(trainer, held_out)


def evaluate_judge(trainer: Mae, held_out: list[dict], texts, right) -> dict[str, float]:
    """Figures of the judge. Its opinion of the solver's own answers (texts, right: one to each
    question) may be flattery. Its skill is measured on the base's answers, which never change.
    """

    def judged(solutions: list[str], greedy: bool = False) -> list[float | None]:
        questions = [row["question"] for row in held_out]
        prompts = [*map(judge_answer_prompt, questions, solutions)]
        return [judge_score(text) for text in trainer.generate_all("judge", prompts, greedy)]

    base = trainer.saved.setdefault("base_solutions", texts)  # step 0: the solver is the base
    base_right = [is_correct(text, row["answer"]) for text, row in zip(base, held_out)]
    V, V_base = judged(texts), judged(base)
    opinion = mean([neutral(v) for v in V])
    result = {
        "solver/judged": opinion,
        "co/flattery": opinion - mean(right),
        "judge/unparsable": mean([v is None for v in V + V_base]),
    }
    for suffix, values in (("", V_base), ("_greedy", judged(base, greedy=True))):
        result[f"judge/balanced_accuracy{suffix}"] = balanced_accuracy(values, base_right)
        result[f"judge/rank_agreement{suffix}"] = rank_agreement(values, base_right)
    return result


def balanced_accuracy(V: list[float | None], right: list[bool]) -> float:
    """V >= 0.5 means "right". The mean over right and wrong; a missing score is an error."""
    return verdict_metrics([None if v is None else v >= 0.5 for v in V], right)["balanced_accuracy"]


def rank_agreement(V: list[float | None], right: list[bool]) -> float:
    """P(V of a right answer > V of a wrong answer), a tie is half: the area under the ROC curve."""
    wins = pairs_in_order(right, [neutral(v) for v in V])
    return mean(wins) if wins else 0.5


def evaluate_proposer(trainer: Mae, held_out: list[dict]) -> dict[str, float]:
    """Figures of one proposal for every four held-out questions, as in training."""
    D, share = trainer.saved["questions"], trainer.cfg.reference_share
    references = draw_references(random.Random(0), D, share, len(held_out[::4]))
    texts = trainer.generate_all("proposer", [propose_prompt(r) for r in references])
    questions = [proposed_question(text) for text in texts]
    well_formed = [q != "" and tag_format(t, "question") == 1 for q, t in zip(questions, texts)]
    result = {"proposer/well_formed": mean(well_formed)}
    if all(parse_question(row["question"]) for row in held_out):  # small model: the grammar decides
        result["proposer/answerable"] = mean([parse_question(q) is not None for q in questions])
    new = set(questions) - {"", *D}  # each counted once
    return result | {"proposer/new": len(new) / len(questions)}


# ------------------------------------------------------------------ main
CURVES = {
    "solver": ["solver/judged", "solver/accuracy", "co/flattery"],
    "judge": ["judge/unparsable", "judge/balanced_accuracy", "judge/rank_agreement"],
    "proposer": ["proposer/difficulty", "proposer/accepted", "proposer/answerable", "proposer/new"],
}


def load(args: Args):
    return load_for_steps(args, args.seed_questions)


def main(args: Args):
    trainer = launch(Mae, args, load=load, evaluate=evaluate, curves=CURVES)
    if trainer.trouble:
        raise UserError(trainer.trouble)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
