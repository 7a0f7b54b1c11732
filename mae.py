r"""MAE, Multi-Agent Evolve: one model proposes, answers and judges (Chen et al. 2025,
arXiv:2510.23595).

    python mae.py                                         the embedded model on a CPU, 5 minutes
    python mae.py --no-train-judge                        one of table 6's ablations
    python mae.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k        one GPU, 4-bit

The loop (algorithm 1).  D: pool of questions, at first the seeds.  S: pool of (question, answer)
    PROPOSER  q ~ proposer(. | a reference from D, or none)                              sec. 4.1
              quality = V(q);  difficulty = 1 - mean of V(a_i, q) over 5 answers of the solver
              r = (quality + difficulty + format) / 3;  if quality >= 0.7, q joins D
    SOLVER    q ~ D, a ~ solver(. | q);  r = (V(a, q) + format) / 2;  (q, a) joins S     sec. 4.2
    JUDGE     (q, a) ~ S, score ~ judge(. | q, a);  r = format                           sec. 4.3

    V = (score - 1) / 9, with a score of the judge from 1 to 10
    A = (r - mean) / std within each role; ONE update on all three batches, with the loss in
    common/cotrainer.py, `CoTrainer.loss`.

What is sampled only to make rewards, the judge's V and the 5 answers, is never trained on. No gold
answer is used, and nothing pays the judge for being right. Whether the model learns or flatters
itself is in co/flattery: its opinion of its own answers to held-out questions, minus their true
accuracy.

What we changed and it matters (the full list is in docs/mae.md)
    1. The one model is one LoRA adapter; in the paper all weights of a 3B model.
    2. Format counts tags in the response and wants one pair, as the paper says; the released code
       counts those of the prompt, too, so that three drafts pass for one.
    3. Below the gate the difficulty is 0, as in the released code, not in the paper: nonsense is
       hard to answer, too.
    4. Answers and judgements are sampled at temperature 1; in the released code they are probably
       greedy, so that the 5 answers are alike.
    5. All roles draw from D and S as the last step left them, as in the released code. In algorithm
       1 the solver can already draw this step's questions, and the judge this step's answers.
    6. A full D drops its oldest self-generated question; the released code keeps the oldest 10,000
       for ever. S starts empty; the released code starts it with the seeds' gold answers.
    7. --judge-reward agreement is ours: the judge is paid for agreeing with gold answers that are
       set aside for it.

Shapes: N rows of each role, B = 3 * N rows of a step.
"""

import random
import re
from dataclasses import dataclass
from typing import Literal

from common.advantage import whiten
from common.args import Count, RunArgs, Several, Share, Tokens, Weight, per_model
from common.cotrainer import CoTrainer, Player
from common.errors import UserError
from common.launch import launch
from common.run import mean, plain_errors
from common.tasks.answers import boxed, is_correct, prompt, solve, solve_prompt
from common.tasks.math import load_questions
from common.tiny.tasks import parse_question

import torch
import tyro


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/args.py
    steps: Count = 48
    """optimiser steps, each on all three roles (paper: 300)"""
    questions: Count = 32
    """N, rows of each role per step and process (paper: 128)"""
    lr: Weight = per_model(tiny=1e-3, real=2e-5)
    """learning rate of the adapter, constant (paper: 1e-6, all weights)"""
    reference_share: Share = 0.5
    """share of proposals that start from a question of the pool (paper: 0, 0.5 or 1)"""
    seed_questions: Count = 256
    """questions in the pool at the start, without answers (paper: 967; 16 of its own in "zero")"""
    pool_size: Count = 10_000
    """most questions in one pool, most pairs in the other (released code: 10,000 questions)"""
    difficulty_samples: Several = 5
    """answers that a question's difficulty is measured with (paper: 5)"""
    judge_reward: Literal["format", "agreement"] = "format"
    """what the judge is paid for: its format (paper), or also for agreeing with gold answers to
    questions set aside for it"""
    train_proposer: bool = True
    """ablation of table 6; a role that is not trained still plays"""
    train_solver: bool = True
    """the same for the solver"""
    train_judge: bool = True
    """the same for the judge"""
    quality_gate: bool = True
    """ablation of table 6: without it all questions join the pool and are paid for difficulty"""
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
        if self.questions < 2:
            raise UserError("--questions 1: rewards are compared within a role; take 2 or more.")
        if self.seed_questions >= self.pool_size:
            seeds = f"--seed-questions {self.seed_questions}"
            raise UserError(f"{seeds} must be less than --pool-size {self.pool_size}.")


QUALITY_GATE = 0.7  # a score of 8 or more (paper sec. 4.1)
GOLD_QUESTIONS = 256  # set aside with their gold answers, for --judge-reward agreement
NEUTRAL = 0.5  # V of a judgement without a score: silence pays more than the verdict "wrong"
PATIENCE = 3  # hopeless steps in a row that end the run
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
    wanted = "Propose a question."
    return prompt(PROPOSE, f"Reference: {reference}\n{wanted}" if reference else wanted)


def judge_answer_prompt(question: str, answer: str) -> list[dict]:
    return prompt(JUDGE_ANSWER, f"Question: {question}\nAnswer: {answer}\nScore the answer.")


def judge_question_prompt(question: str) -> list[dict]:
    return prompt(JUDGE_QUESTION, f"Question: {question}\nScore the question.")


def contents(text: str, tag: str) -> list[str]:
    """What stands between <tag> and </tag>, in order; a tag opened twice counts from the second."""
    return re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL | re.IGNORECASE)


def proposed_question(text: str) -> str:
    """The last <question>, or "" if there is none."""
    return (contents(text, "question") or [""])[-1].strip()


def shown_answer(solution: str) -> str:
    r"""What the judge sees of a solution: the content of the last \boxed{}, or else all of it."""
    return boxed(solution) or solution


SIGN = r"(?:(?<!\d)-)?"  # a minus right after a digit is the dash of a range
DECIMAL, INTEGER = rf"{SIGN}(?:\d+|(?<![\d.]))\.\d+", rf"{SIGN}\d+"
FRACTION = rf"({DECIMAL}|{INTEGER})\s*/\s*({DECIMAL}|{INTEGER})"


def first_number(text: str) -> float | None:
    """The first fraction, else the first decimal, else the first integer; None if there is none, or
    a division by zero.
    """
    if match := re.search(FRACTION, text, re.ASCII):
        return float(match[1]) / float(match[2]) if float(match[2]) else None
    match = re.search(DECIMAL, text, re.ASCII) or re.search(INTEGER, text, re.ASCII)
    return float(match[0]) if match else None


def judge_score(text: str) -> float | None:
    """V = clip((s - 1) / 9, 0, 1) of the first score s in a judgement; None if there is none.

    Only what follows the last </think> is read: <score>10</score> in its thoughts is none. In a
    score a fraction counts before a decimal and that before an integer, wherever they stand, as in
    the released code; so "8/10" is 0.8, and V = 0.

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


def tag_format(text: str, tag: str) -> float:
    """1 for one <tag>...</tag> pair, 0.5 for several, 0 for none or tags that do not pair up."""
    marks = (f"<{tag}>", f"</{tag}>")
    opened, closed = (len(re.findall(mark, text, re.IGNORECASE)) for mark in marks)
    pairs = len(contents(text, tag))
    return 0.0 if pairs == 0 or not opened == closed == pairs else 1.0 if pairs == 1 else 0.5


# ------------------------------------------------------------------ rewards
def format_reward(completions, tag, **_) -> list[float]:
    """All roles, called by TRL: the format of the role's own tag. The trainer pays the rest."""
    return [tag_format(c[0]["content"], t) for c, t in zip(completions, tag)]


def proposer_reward(
    quality: float, difficulty: float, format: float, gate: float = QUALITY_GATE
) -> float:
    """r = (quality + difficulty + format) / 3, without the difficulty below the gate."""
    return (quality + (difficulty if quality >= gate else 0.0) + format) / 3


# ------------------------------------------------------------------ the paper's mathematics
def part_whiten(rewards: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A = (r - mean) / std over the rows of the same role (sec. 3); 0 where they are all equal.

    Trap, and the paper's: if one row of N differs from all others, its A is (N - 1) / sqrt(N) up or
    down, whether it is paid 0.5 less or 1: 5.5 at N = 32, 11.2 at the paper's 128. The judge, paid
    for its format, comes to that as soon as it keeps to it: the rare slip is what it learns from.

    Args:
        rewards: (B,)
        part: (B,), a number for the role of each row.

    Returns:
        (B,), exactly 0 in a role whose rewards are all equal.
    """
    A = torch.zeros_like(rewards)
    for p in part.unique():
        A += whiten(rewards, part == p, WHITEN_EPS)  # 0 in all other roles
    return A


def draw_from(rng: random.Random, pool: list, count: int) -> list:
    """`count` of the pool, without replacement as far as it goes; nothing of an empty pool."""
    more = max(0, count - len(pool))
    return rng.sample(pool, count - more) + rng.choices(pool, k=more) if pool else []


def draw_references(rng: random.Random, pool: list, share: float, count: int) -> list:
    """A question of the pool for this share of `count` proposals, None for the others."""
    return [rng.choice(pool) if pool and rng.random() < share else None for _ in range(count)]


def add_questions(pool: list[str], new: list[str], seeds: int, size: int, never: set[str]):
    """Add in place what is neither in the pool nor in `never`.

    The pool's first `seeds` stay for ever; a full pool drops the oldest questions after them.
    """
    known = set(pool) | never
    pool += [q for q in dict.fromkeys(new) if q not in known]
    del pool[seeds : seeds + max(0, len(pool) - size)]


def are_new(questions: list[str], pool: list[str], n: int = 10) -> list[bool]:
    """Whether less than half of a question's n-grams, runs of n words or symbols, are in the pool.

    With n = 10, 99 % of embedded questions drawn afresh are new to a pool of 2,000, and 93 % of
    the hard ones. The words of a shorter question are its one n-gram.
    """
    words = [re.findall(r"\w+|[^\w\s]", text.lower()) for text in questions + pool]
    grams = [{tuple(w[i : i + n]) for i in range(max(1, len(w) - n + 1))} for w in words]
    known = set().union(*grams[len(questions) :])
    return [2 * len(own & known) < len(own) for own in grams[: len(questions)]]


# ------------------------------------------------------------------ the trainer
class Mae(CoTrainer):
    """`step` is algorithm 1. CoTrainer samples, scores, computes the loss and updates.

    Both pools are in `saved`, the same on all processes.
    """

    def __init__(self, *inputs):
        super().__init__(*inputs)
        cfg = self.cfg
        # the seeds come without their answers; copies among them are dropped
        rows, self.gold = (
            self.train_rows[: cfg.seed_questions],
            self.train_rows[cfg.seed_questions :],
        )
        if cfg.judge_reward == "agreement" and not self.gold:
            missing = "all questions are seeds, none is left for --judge-reward agreement"
            raise UserError(f"--dataset {cfg.dataset}: {missing}.")
        seeds = list(dict.fromkeys(row["question"] for row in rows))
        self.gate = QUALITY_GATE if cfg.quality_gate else 0.0
        self.trouble = ""  # why the run ends early
        self.saved = {"questions": seeds, "seeds": len(seeds), "pairs": [], "hopeless_steps": 0}

    @staticmethod
    def players(args: Args) -> dict[str, Player]:
        shared = {"group_size": 1, "adapter": "agent"}
        solution, judgement = args.solution_tokens, args.judgement_tokens
        return {
            "proposer": Player([format_reward], args.lr, solution, **shared),
            "solver": Player([format_reward], args.lr, solution, **shared),
            "judge": Player([format_reward], args.lr, judgement, reads=solution, **shared),
        }

    def step(self, rows):
        """The loader's rows are not used: all roles get theirs from the pools, as the last step
        left them: the released code's order, not that of algorithm 1.
        """
        cfg = self.cfg
        references, questions, pairs = self.draw()
        batch, judgements = self.propose(references)
        batches = [batch]
        if questions:
            batch, more = self.solve(questions)
            batches, judgements = [*batches, batch], judgements + more
        if pairs:
            batches.append(self.judge(pairs))
        self.stop_if_hopeless(judgements)

        batch = self.concat(batches)
        # A = (r - mean) / std within each role, over the rows of all processes
        A = self.over_all_processes(part_whiten, batch["rewards"], batch["rollout"])  # (B,)
        trained = torch.tensor([getattr(cfg, f"train_{b['player']}") for b in batches])
        batch["advantages"] = A * trained.to(A)[batch["rollout"]]
        return [batch]

    def draw(self) -> tuple[list, list, list]:
        """N references (None: propose without one), N questions, N pairs; questions and pairs are
        empty while their pool is.
        """
        cfg, D, S = self.cfg, self.saved["questions"], self.saved["pairs"]
        rng = random.Random(f"{cfg.seed} {self.state.global_step}")
        count = cfg.questions * self.accelerator.num_processes  # everyone's; each takes its share
        references = draw_references(rng, D, cfg.reference_share, count)
        questions = draw_from(rng, D, count)
        if cfg.judge_reward == "format":
            pairs = draw_from(rng, S, count)
        else:  # right and wrong answers alike, once there are both
            right, wrong = ([pair for pair in S if pair["right"] is r] for r in (True, False))
            pairs = draw_from(rng, right, count // 2) + draw_from(rng, wrong, count - count // 2)
            pairs = pairs if right and wrong else []
            rng.shuffle(pairs)
        return self.my_share(references), self.my_share(questions), self.my_share(pairs)

    def propose(self, references: list[str | None]) -> tuple[dict, list[str]]:
        """The batch, and the judgements that made its rewards."""
        cfg, n = self.cfg, self.cfg.difficulty_samples
        prompts = [propose_prompt(reference) for reference in references]
        batch = self.rollout("proposer", [{"prompt": p, "tag": "question"} for p in prompts])
        questions = [proposed_question(text) for text in batch["texts"]]
        written = [i for i, question in enumerate(questions) if question]
        # quality = V(q)
        V, of_questions = self.values([judge_question_prompt(questions[i]) for i in written])
        quality = dict(zip(written, V))
        # difficulty = 1 - mean of V(a, q) over n answers; sampled where it counts, above the gate
        good = [i for i in written if quality[i] >= self.gate]
        tried = [questions[i] for i in good for _ in range(n)]
        answers = self.generate("solver", [solve_prompt(question) for question in tried])
        V, of_answers = self.values(map(judge_answer_prompt, tried, map(shown_answer, answers)))
        difficulty = dict.fromkeys(written, 0.0)
        difficulty |= {i: 1 - mean(V[k * n : (k + 1) * n]) for k, i in enumerate(good)}
        # r = (quality + difficulty + format) / 3; no question, no reward
        formats = (batch["rewards"] * cfg.format_reward).tolist()  # N
        rewards = torch.zeros(len(questions))
        for i in written:
            rewards[i] = proposer_reward(quality[i], difficulty[i], formats[i], self.gate)
        self.set_rewards(batch, rewards)
        new = self.gather([questions[i] for i in good])
        seeds = self.saved["seeds"]
        add_questions(self.saved["questions"], new, seeds, cfg.pool_size, self.held_out_questions)
        self.report_proposals(batch, quality, difficulty, good)
        return batch, of_questions + of_answers

    def solve(self, questions: list[str]) -> tuple[dict, list[str]]:
        """The batch, and the judgements that made its rewards."""
        cfg = self.cfg
        prompts = [solve_prompt(question) for question in questions]
        batch = self.rollout("solver", [{"prompt": p, "tag": "answer"} for p in prompts])
        answers = [shown_answer(text) for text in batch["texts"]]
        V, judgements = self.values(map(judge_answer_prompt, questions, answers))
        # r = (V(a, q) + format) / 2
        formats = batch["rewards"] * cfg.format_reward  # (N,)
        self.set_rewards(batch, (torch.tensor(V).to(formats) + formats) / 2)
        pairs = [{"question": q, "answer": a, "right": None} for q, a in zip(questions, answers)]
        if cfg.judge_reward == "agreement":
            pairs = self.pairs_with_gold()
        self.saved["pairs"] = (self.saved["pairs"] + self.gather(pairs))[-cfg.pool_size :]
        self.report_solutions(batch, V, judgements)
        return batch, judgements

    def judge(self, pairs: list[dict]) -> dict:
        prompts = [judge_answer_prompt(pair["question"], pair["answer"]) for pair in pairs]
        batch = self.rollout("judge", [{"prompt": p, "tag": "score"} for p in prompts])
        rewards = batch["rewards"] * self.cfg.format_reward  # (N,): r = format
        if self.cfg.judge_reward == "agreement":
            # r = (format + 1 - |V - right|) / 2; without a score the second term is 0
            V = [judge_score(text) for text in batch["texts"]]
            agreement = [0.0 if v is None else 1 - abs(v - p["right"]) for v, p in zip(V, pairs)]
            rewards = (rewards + torch.tensor(agreement).to(rewards)) / 2
            self.report_agreement(batch, pairs, agreement)
        self.set_rewards(batch, rewards)
        return batch

    def values(self, prompts) -> tuple[list[float], list[str]]:
        """V of one judgement per prompt, and the judgements; sampled at temperature 1 and never
        trained on.
        """
        texts = self.generate("judge", list(prompts))
        V = [judge_score(text) for text in texts]
        return [NEUTRAL if v is None else v for v in V], texts

    def pairs_with_gold(self) -> list[dict]:
        """N questions with gold answers, set aside for the judge, and the solver's answers."""
        cfg, world = self.cfg, self.accelerator.num_processes
        rng = random.Random(f"{cfg.seed} {self.state.global_step} 0")  # another one than draw's
        rows = self.my_share(draw_from(rng, self.gold, cfg.questions * world))
        texts = self.generate("solver", [solve_prompt(row["question"]) for row in rows])
        right = [is_correct(text, row["answer"]) for text, row in zip(texts, rows)]
        return [
            {"question": row["question"], "answer": shown_answer(text), "right": r}
            for row, text, r in zip(rows, texts, right)
        ]

    def stop_if_hopeless(self, judgements: list[str]):
        """Without scores all rewards are neutral, without questions there is nothing to solve.
        After PATIENCE such steps in a row this one is the last; main() says why.
        """
        silent = mean(self.gather([judge_score(text) is None for text in judgements]))
        self.log_mean("judge/unparsable", silent)
        trouble = ""
        if not self.saved["questions"]:
            trouble = "the pool was empty: no --seed-questions, no proposal of quality 0.7"
        if silent > self.cfg.silent_share:
            limit = f"--judgement-tokens {self.cfg.judgement_tokens}"
            trouble = f"{silent:.0%} of the judgements had no <score> within {limit}"
        self.saved["hopeless_steps"] = self.saved["hopeless_steps"] + 1 if trouble else 0
        if self.saved["hopeless_steps"] >= PATIENCE:
            self.trouble = f"step {self.state.global_step + 1}: {trouble}"
            self.state.max_steps = self.state.global_step + 1

    # --- what is logged and shown; nothing below affects training
    def report_proposals(self, batch, quality, difficulty, good):
        """quality, difficulty: row -> value, of rows with a question; good: rows above the gate."""
        for i, value in quality.items():
            batch["notes"][i]["rewards"] |= {"quality": value, "difficulty": difficulty[i]}
        self.log_mean("proposer/quality", list(quality.values()))
        self.log_mean("proposer/difficulty", [difficulty[i] for i in good])
        self.log_mean("proposer/accepted", len(good) / len(batch["notes"]))
        self.log_mean("co/questions", len(self.saved["questions"]))

    def report_solutions(self, batch, V, judgements):
        for note, v, judgement in zip(batch["notes"], V, judgements):
            note["rewards"]["judged"], note["judgement"] = v, judgement
        self.log_mean("solver/judged", V)

    def report_agreement(self, batch, pairs, agreement):
        for note, pair, a in zip(batch["notes"], pairs, agreement):
            note["rewards"]["agreement"], note["answer is right"] = a, pair["right"]
        self.log_mean("judge/agreement", agreement)


# ------------------------------------------------------------------ evaluation
def against_gold(V: list[float | None], right: list[bool]) -> dict[str, float]:
    """How well values agree with the truth.

    Returns:
        balanced_accuracy: V >= 0.5 taken for "right", the mean over both classes; no score is wrong
            in both.
        rank_agreement: P(V of a right answer > V of a wrong one), ties half; the area under the ROC
            curve.
    """
    accepts = [None if v is None else v >= 0.5 for v in V]
    hits = [[a is label for a, r in zip(accepts, right) if r is label] for label in (True, False)]
    known = [NEUTRAL if v is None else v for v in V]
    good, bad = ([v for v, r in zip(known, right) if r is label] for label in (True, False))
    wins = [float(g > b) + 0.5 * (g == b) for g in good for b in bad]
    return {
        "balanced_accuracy": mean([mean(of_class) for of_class in hits if of_class]),
        "rank_agreement": mean(wins) if wins else 0.5,
    }


def evaluate(trainer: Mae, held_out: list[dict]) -> dict[str, float]:
    """On held-out questions, whose gold answers training never sees.

    The judge is measured on answers that the base wrote once, so that they are the same all along;
    its opinion of the solver's own present answers is what may be flattery. It judges the first
    sample of each question. The solver samples first, so that it meets the same random numbers
    every time.
    """
    n = trainer.cfg.eval_samples

    def judged(texts: list[str], greedy: bool = False) -> list[float | None]:
        answers = [(row["question"], shown_answer(text)) for row, text in zip(held_out, texts)]
        asked = [judge_answer_prompt(*answer) for answer in answers]
        return [judge_score(text) for text in trainer.generate_all("judge", asked, greedy)]

    texts, right = solve(trainer, "solver", held_out, n)
    first = texts[::n]
    base = trainer.saved.setdefault("base_solutions", first)  # step 0: the solver is the base
    base_right = [is_correct(text, row["answer"]) for text, row in zip(base, held_out)]
    V, V_base = judged(first), judged(base)
    opinion = mean([NEUTRAL if v is None else v for v in V])
    # proposals, with references as in training
    D, share = trainer.saved["questions"], trainer.cfg.reference_share
    references = draw_references(random.Random(0), D, share, len(held_out[::4]))
    proposals = trainer.generate_all("proposer", [propose_prompt(r) for r in references])

    _, greedy = solve(trainer, "solver", held_out, greedy=True)
    result = {
        "solver/greedy": mean(greedy),
        "solver/accuracy": mean(right),
        "solver/judged": opinion,
        "co/flattery": opinion - mean(right[::n]),
        "judge/unparsable": mean([v is None for v in V + V_base]),
    }
    for key, value in against_gold(V_base, base_right).items():
        result[f"judge/{key}"] = value
    for key, value in against_gold(judged(base, greedy=True), base_right).items():
        result[f"judge/{key}_greedy"] = value
    questions = [proposed_question(text) for text in proposals]
    well_formed = [q != "" and tag_format(t, "question") == 1 for q, t in zip(questions, proposals)]
    result["proposer/well_formed"] = mean(well_formed)
    if all(parse_question(row["question"]) for row in held_out):  # embedded: the grammar decides
        result["proposer/answerable"] = mean([parse_question(q) is not None for q in questions])
    new = [q != "" and is_new for q, is_new in zip(questions, are_new(questions, D))]
    result["proposer/new"] = mean(new)
    return result


# ------------------------------------------------------------------ main
CURVES = {  # panels of curves.png and report.html; step lines show the first metric of each
    "solver": ["solver/judged", "solver/accuracy", "co/flattery"],
    "judge": ["judge/unparsable", "judge/balanced_accuracy", "judge/rank_agreement"],
    "proposer": "proposer/difficulty proposer/accepted proposer/answerable proposer/new".split(),
}


def load(args: Args):
    wanted = args.seed_questions + GOLD_QUESTIONS * (args.judge_reward == "agreement")
    return load_questions(args.dataset, wanted, args.eval_questions, args.seed)


def main(args: Args):
    trainer = launch(Mae, args, load, evaluate, CURVES)
    if trainer.trouble:
        raise UserError(
            f"{trainer.trouble} for {PATIENCE} steps in a row. The run ends; its checkpoint is in "
            f"{trainer.args.output_dir}."
        )


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
