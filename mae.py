r"""MAE, Multi-Agent Evolve (Chen et al. 2025, arXiv:2510.23595): one model proposes, answers and judges, without gold answers.

The loop (paper, algorithm 1).  D: pool of questions, at first the seeds.  S: pool of (question, answer) pairs, at first empty.
    each step, from D and S as the last step left them
      PROPOSER   q ~ proposer(. | a reference from D, or none)
                 quality = V(q);  difficulty = 1 - mean of V(a_i, q) over 5 answers of the solver;  V = (score - 1) / 9
                 r = (quality + difficulty + format) / 3;  if quality >= 0.7 (a score of 8, 9 or 10), q joins D
      SOLVER     q ~ D, a ~ solver(. | q);  r = (V(a, q) + format) / 2;  (q, a) joins S
      JUDGE      (q, a) ~ S, score ~ judge(. | q, a);  r = format
    and ONE update of the one model on all three batches, advantages whitened per part. What is sampled only to make rewards,
    V and the 5 answers, is never trained on. Nothing rewards the judge for being right. Whether the model learns or flatters
    itself is in co/flattery: its own opinion of its answers to held-out questions, minus their true accuracy.

Where we differ from the paper [P] or the released code [C], and why
     1. QLoRA: the one model is one adapter on a 4-bit base. [P, C: a full 3B model.]
     2. Tags are counted in the response, target one pair, as in [P]. [C] counts the prompt's, too: three drafts pass for one.
     3. Only what follows the last </think> is the judge's word: <score>10</score> in its thoughts is none; it is in [C].
     4. A part's advantage is (r - mean) / std over its samples, exactly 0 if all are equal. [C] whitens over tokens, so that
        long responses weigh more, with 1e-8 under the root: rounding noise becomes an advantage.
     5. One update, strictly on-policy. [C]'s mini-batches of 256 make two of 384 rows. No entropy bonus, [P, C] 0.001.
     6. Below the gate the difficulty term is 0, as in [C], not in [P]; so none is sampled there. No question, no reward [C].
     7. All is sampled at temperature 1. In [C] what makes rewards probably is greedy, and the 5 answers are alike.
     8. A full D drops its oldest SELF-GENERATED question: seeds anchor it, and new ones always get in. [C] keeps the oldest
        10,000 for ever. Copies of what is in D, and held-out questions, stay out. A full S drops its oldest pair.
     9. S starts empty; [C] starts it with the seeds' gold answers. Difficulty uses the solver's own prompt, [C] a plain one.
    10. --judge-reward agreement, not in [P]: the judge's batch is of answers to training questions set aside with their gold
        answers, half of them right, and pays (format + 1 - |V - right|) / 2. Held-out questions are for measuring only.

Run
    python mae.py                                                                  # embedded default, CPU, five minutes
    python mae.py --no-train-judge                                                 # table 6: each part, the gate, the format
    python mae.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k        # one GPU, in 4-bit

Shapes: N rows of each part, B = 3 * N rows of a step.
"""

import random
import re
from dataclasses import dataclass
from typing import Literal

from common.advantage import whiten
from common.answers import boxed, is_correct
from common.cotrainer import CoTrainer, Player
from common.data import UserError, are_new, load_questions
from common.memory import check_memory, machine_options
from common.model import load_model
from common.run import fill_in, mean, plain_errors, start_run, this_process
from common.tiny.tasks import parse_question

import torch
import tyro
from datasets import Dataset
from trl import GRPOConfig


# ------------------------------------------------------------------ arguments
@dataclass
class Args:
    # --- alike in all six scripts; what is None depends on the model, see SMALL and REAL below
    model: str = "tiny"
    """the embedded default, a hub id or a folder"""
    dataset: str = "tiny"
    """the embedded questions, a hub id (openai/gsm8k) or a .jsonl file with question and answer"""
    out: str | None = None
    """run folder, runs/mae-<time>-<seed> if not given; given again, the run goes on where it stopped"""
    seed: int = 0
    """of adapters, questions and sampling"""
    steps: int = 48
    """optimiser steps, each on all three parts (paper: 300)"""
    questions: int = 32
    """N, rows of each part per step and process (paper: 128)"""
    micro_batch: int | None = None
    """rows per forward and backward pass (embedded 32, real 8); 3 * questions must be a multiple"""
    lr: float | None = None
    """learning rate of the adapter, constant (embedded 1e-3, real 2e-5; paper: 1e-6, all weights)"""
    lora_rank: int = 16
    """rank of the adapter"""
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
    reference_share: float = 0.5
    """share of proposals that start from a question of the pool (paper: 0, 0.5 or 1)"""
    seed_questions: int = 256
    """questions in the pool at the start, without their answers (paper: 967; 16 self-generated ones in "zero")"""
    pool_size: int = 10_000
    """most questions in one pool, most pairs in the other (released code: 10,000 questions)"""
    difficulty_samples: int = 5
    """answers that a question's difficulty is measured with (paper: 5)"""
    judge_reward: Literal["format", "agreement"] = "format"
    """what the judge is paid for: its format (paper), or half for agreeing with gold on questions set aside for it"""
    train_proposer: bool = True
    """ablation of table 6; a part that is not trained still plays"""
    train_solver: bool = True
    """the same for the solver"""
    train_judge: bool = True
    """the same for the judge"""
    quality_gate: bool = True
    """ablation of table 6: without it every question joins the pool and is paid for its difficulty"""
    format_reward: bool = True
    """ablation of table 6: without it all format terms are 0"""
    solution_tokens: int | None = None
    """length limit of a solution, and of a proposal (embedded 64, real 1024; paper: 8192)"""
    judgement_tokens: int | None = None
    """length limit of a judgement (embedded 64, real 1024; paper: 8192)"""
    silent_share: float = 0.5
    """stop with an explanation when in three steps in a row a larger share of the judgements has no score"""


SMALL = {"lr": 1e-3, "solution_tokens": 64, "judgement_tokens": 64}
REAL = {"lr": 2e-5, "solution_tokens": 1024, "judgement_tokens": 1024}
QUALITY_GATE = 0.7  # a score of 8 or more (paper sec. 4.1)
GOLD_QUESTIONS = 256  # set aside with their gold answers, for --judge-reward agreement
NEUTRAL = 0.5  # V of a judgement without a score, which is more than one that says wrong; the rate is jud/unparsable
PATIENCE = 3  # hopeless steps in a row that end the run
WHITEN_EPS = 1e-4  # under the root: std is at least a hundredth, so rounding noise stays noise

# ------------------------------------------------------------------ prompts and parsing
SOLVE = r"""Solve the problem step by step. Put every step in its own <step> </step> tags, and after the last one the answer
in this form: <answer>\boxed{...}</answer>. Write nothing outside of these tags.
For example, for 15-(3*2):
<step>First the bracket: 3*2 = 6.</step>
<step>Then 15-6 = 9.</step>
<answer>\boxed{9}</answer>"""

PROPOSE = """Write one new problem that is hard but can be solved by reasoning alone: self-contained, with one right answer that
does not depend on taste, trivia or today's world. If there is a reference problem, keep its kind of reasoning, make it harder
and change what it is about. Write nothing but the problem, inside of one pair of <question> </question> tags."""

JUDGE_ANSWER = """Score an answer to a question from 1 to 10. First solve the question yourself inside of <think> </think> tags,
and compare. 1 to 3: it is wrong, made up or repetitive. 4 to 7: nothing is wrong, but something is missing or unclear. 8 to 10:
it is right, complete and to the point. Then write the number alone inside of one pair of <score> </score> tags."""

JUDGE_QUESTION = """Score a question from 1 to 10. First think inside of <think> </think> tags. 1 to 3: it cannot be solved, is
unsafe, leaves everything open, or is no question. 4 to 7: it is ambiguous or lacks a condition. 8 to 10: it is clear, sound and
can be solved as it stands. Then write the number alone inside of one pair of <score> </score> tags."""


def solve_prompt(question: str) -> list[dict]:
    return [{"role": "system", "content": SOLVE}, {"role": "user", "content": question}]


def propose_prompt(reference: str | None) -> list[dict]:
    user = f"Reference: {reference}\nPropose a question." if reference else "Propose a question."
    return [{"role": "system", "content": PROPOSE}, {"role": "user", "content": user}]


def judge_answer_prompt(question: str, answer: str) -> list[dict]:
    user = f"Question: {question}\nAnswer: {answer}\nScore the answer."
    return [{"role": "system", "content": JUDGE_ANSWER}, {"role": "user", "content": user}]


def judge_question_prompt(question: str) -> list[dict]:
    user = f"Question: {question}\nScore the question."
    return [{"role": "system", "content": JUDGE_QUESTION}, {"role": "user", "content": user}]


def contents(text: str, tag: str) -> list[str]:
    """What stands between <tag> and </tag>, in any case, in order. A tag that is opened twice counts from the second time."""
    return re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL | re.IGNORECASE)


def proposed_question(text: str) -> str:
    """The last <question>, or "" if there is none."""
    return (contents(text, "question") or [""])[-1].strip()


def shown_answer(solution: str) -> str:
    r"""What the judge sees of a solution: the content of the last \boxed{}, or all of it if there is none."""
    return boxed(solution) or solution


SIGN = r"(?:(?<!\d)-)?"  # a minus right after a digit is the dash of a range
DECIMAL, INTEGER = rf"{SIGN}(?:\d+|(?<![\d.]))\.\d+", rf"{SIGN}\d+"
FRACTION = rf"({DECIMAL}|{INTEGER})\s*/\s*({DECIMAL}|{INTEGER})"


def first_number(text: str) -> float | None:
    """The first fraction, else the first decimal, else the first integer; None if there is none, or a division by zero."""
    if match := re.search(FRACTION, text, re.ASCII):
        return float(match[1]) / float(match[2]) if float(match[2]) else None
    match = re.search(DECIMAL, text, re.ASCII) or re.search(INTEGER, text, re.ASCII)
    return float(match[0]) if match else None


def judge_score(text: str) -> float | None:
    """V = clip((s - 1) / 9, 0, 1) of the first score s in a judgement; None if there is none.

    Read are <score> contents after the last </think>. In each a fraction counts before a decimal and that before an integer,
    wherever they stand, as in the released code; so "8/10" is 0.8, and V = 0.

    >>> judge_score("<think>7:7</think><score>10</score>"), judge_score("<score>eight</score>")
    (1.0, None)
    """
    said = re.split("</think>", text, flags=re.IGNORECASE)[-1]
    said = re.split("<think>", said, flags=re.IGNORECASE)[0]  # thoughts that were cut are thoughts
    numbers = [s for part in contents(said, "score") if (s := first_number(part[:1000])) is not None]  # digits cost n^2
    return min(1.0, max(0.0, (numbers[0] - 1) / 9)) if numbers else None


def tag_format(text: str, tag: str) -> float:
    """1 for exactly one <tag>...</tag> pair, 0.5 for several, 0 for none or for tags that do not pair up (paper sec. 4)."""
    opened, closed = (len(re.findall(mark, text, re.IGNORECASE)) for mark in (f"<{tag}>", f"</{tag}>"))
    pairs = len(contents(text, tag))
    return 0.0 if pairs == 0 or not opened == closed == pairs else 1.0 if pairs == 1 else 0.5


# ------------------------------------------------------------------ rewards
def format_reward(completions, tag, **_) -> list[float]:
    """Called by TRL: the format of the part whose tag it is. What depends on judgements is added in the trainer."""
    return [tag_format(c[0]["content"], t) for c, t in zip(completions, tag)]


def proposer_reward(quality: float, difficulty: float, format: float, gate: float = QUALITY_GATE) -> float:
    """r = (quality + difficulty + format) / 3, without the difficulty below the gate: nonsense is hard to answer, too."""
    return (quality + (difficulty if quality >= gate else 0.0) + format) / 3


# ------------------------------------------------------------------ the paper's mathematics
def part_whiten(rewards: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A = (r - mean) / std over the rows of the same part (paper sec. 3); exactly 0 in a part whose rewards are all equal.

    rewards: (B,).  part: (B,), which part each row is of.  Returns (B,)."""
    A = torch.zeros_like(rewards)
    for p in part.unique():
        A += whiten(rewards, part == p, WHITEN_EPS)  # 0 in all other parts
    return A


def draw_from(rng: random.Random, pool: list, count: int) -> list:
    """`count` of the pool, without replacement as far as it goes; nothing of an empty pool."""
    more = max(0, count - len(pool))
    return rng.sample(pool, count - more) + rng.choices(pool, k=more) if pool else []


def add_questions(pool: list[str], new: list[str], seeds: int, size: int, never: set[str]):
    """Add in place what is neither in the pool nor in `never`. The pool's first `seeds` stay for ever; a full pool drops the
    oldest questions after them."""
    known = set(pool) | never
    pool += [q for q in dict.fromkeys(new) if q not in known]
    del pool[seeds : seeds + max(0, len(pool) - size)]


# ------------------------------------------------------------------ the trainer: one optimiser step
class Mae(CoTrainer):
    """Inherited: sampling, log-probs, the clipped loss, the optimiser, logging, checkpoints.
    Here: both pools, who asks whom, and the rewards. The pools are in `memory`, the same on all processes."""

    def __init__(self, model, script: Args, seeds: list[str], gold: list[dict], held_out: list[dict], **kwargs):
        self.script, self.gold, self.never = script, gold, {row["question"] for row in held_out}
        self.gate = QUALITY_GATE if script.quality_gate else 0.0
        limits = dict.fromkeys(("proposer", "solver", "all"), script.solution_tokens) | {"judge": script.judgement_tokens}
        # "all" plays nothing: it is the name under which the common update is logged
        players = {name: Player([format_reward], script.lr, limit, 1, adapter="agent") for name, limit in limits.items()}
        super().__init__(model, players, rows_at_once=script.rows_at_once, **kwargs)
        self.memory = {"questions": seeds, "seeds": len(seeds), "pairs": [], "hopeless_steps": 0}
        self.example, self.trouble = "", ""

    def _generate_and_score_completions(self, rows):
        """Nothing of the loader's rows: what is asked is drawn from the pools, for all parts before any of them plays."""
        s, rank = self.script, self.accelerator.process_index
        references, questions, pairs = self.draw()
        self.readable = []  # for every judgement of this step, whether it has a score
        batches = {"proposer": self.propose(references)}
        batches |= {"solver": self.solve(questions)} if questions else {}
        batches |= {"judge": self.judge(pairs)} if pairs else {}
        self.stop_if_hopeless()
        # A: per part, over the rows of all processes, before the parts are joined
        mine = [(part, r) for part, batch in enumerate(batches.values()) for r in batch["rewards"].tolist()]  # B of them
        part, rewards = map(torch.tensor, zip(*self.gather(mine)))
        A = part_whiten(rewards, part)[rank * len(mine) : (rank + 1) * len(mine)]  # (B,)
        for (name, batch), A_part in zip(batches.items(), A.split(s.questions)):
            batch["advantages"] = A_part.to(batch["rewards"].device) * getattr(s, f"train_{name}")  # (N,)
        self.become("all")
        return self.join(list(batches.values()))

    def draw(self) -> tuple[list, list, list]:
        """N references (None: do without), N questions, N pairs; the last two are empty while their pool is. All processes
        draw the same, and each takes its slice."""
        s, D, S = self.script, self.memory["questions"], self.memory["pairs"]
        rng = random.Random(f"{s.seed} {self.state.global_step}")
        count, first = s.questions * self.accelerator.num_processes, s.questions * self.accelerator.process_index
        references = [rng.choice(D) if D and rng.random() < s.reference_share else None for _ in range(count)]
        questions = draw_from(rng, D, count)
        pairs = draw_from(rng, S, count)
        if s.judge_reward == "agreement":  # right and wrong answers alike, once there are both
            right, wrong = ([pair for pair in S if pair["right"] is label] for label in (True, False))
            pairs = draw_from(rng, right, count // 2) + draw_from(rng, wrong, count - count // 2) if right and wrong else []
            rng.shuffle(pairs)
        return tuple(drawn[first : first + s.questions] for drawn in (references, questions, pairs))

    def scores(self, prompts: list) -> list[float]:
        """V of one judgement per prompt, sampled at temperature 1 and never trained on."""
        self.judgements = self.act("judge", prompts)
        found = [judge_score(text) for text in self.judgements]
        self.readable += [V is not None for V in found]
        return [NEUTRAL if V is None else V for V in found]

    def propose(self, references: list[str | None]) -> dict:
        s, n = self.script, self.script.difficulty_samples
        batch = self.turn("proposer", [{"prompt": propose_prompt(ref), "tag": "question"} for ref in references])
        questions = [proposed_question(text) for text in batch["texts"]]
        there = [i for i, q in enumerate(questions) if q]
        quality = dict(zip(there, self.scores([judge_question_prompt(questions[i]) for i in there])))
        # difficulty = 1 - mean V of n answers; it counts above the gate only, so only there it is sampled
        good = [i for i in there if quality[i] >= self.gate]
        asked = [questions[i] for i in good for _ in range(n)]
        answers = self.act("solver", [solve_prompt(q) for q in asked])
        V = self.scores([judge_answer_prompt(q, shown_answer(a)) for q, a in zip(asked, answers)])
        difficulty = {i: 1 - mean(V[k * n : (k + 1) * n]) for k, i in enumerate(good)}
        form, R = (batch["rewards"] * s.format_reward).tolist(), torch.zeros_like(batch["rewards"])  # (N,), 0: no question
        for i in there:
            R[i] = proposer_reward(quality[i], difficulty.get(i, 0.0), form[i], self.gate)
            batch["notes"][i]["rewards"] |= {"quality": quality[i], "difficulty": difficulty.get(i, 0.0)}
        batch["rewards"] = R
        new = self.gather([questions[i] for i in good])
        add_questions(self.memory["questions"], new, self.memory["seeds"], s.pool_size, self.never)
        self.log_metric("pro/total_reward", mean(self.gather(R.tolist())))
        self.log_metric("pro/quality", mean(self.gather(list(quality.values()))))
        self.log_metric("pro/difficulty", mean(self.gather(list(difficulty.values()))))
        self.log_metric("pro/accepted", len(new) / len(self.gather(questions)))
        self.log_metric("co/questions", len(self.memory["questions"]))
        self.example = f"--- proposed\n{batch['texts'][0]}"
        return batch

    def solve(self, questions: list[str]) -> dict:
        batch = self.turn("solver", [{"prompt": solve_prompt(q), "tag": "answer"} for q in questions])
        answers = [shown_answer(text) for text in batch["texts"]]
        V = self.scores([judge_answer_prompt(q, a) for q, a in zip(questions, answers)])
        batch["rewards"] = (torch.tensor(V).to(batch["rewards"]) + batch["rewards"] * self.script.format_reward) / 2  # (N,)
        for note, v, judgement in zip(batch["notes"], V, self.judgements):
            note["rewards"]["judged"], note["judgement"] = v, judgement
        self.log_metric("sol/judged", mean(self.gather(V)))
        self.example += f"\n--- {questions[0]}\n{batch['texts'][0]}\n--- the judge\n{self.judgements[0]}\n---"
        right = [None] * len(questions)
        if self.script.judge_reward == "agreement":  # other pairs: of questions whose gold answers are set aside for the judge
            rng = random.Random(f"{self.script.seed} {self.state.global_step} {self.accelerator.process_index}")
            rows = draw_from(rng, self.gold, self.script.questions)
            texts = self.act("solver", [solve_prompt(row["question"]) for row in rows])
            right = [is_correct(text, row["answer"]) for row, text in zip(rows, texts)]
            questions, answers = [row["question"] for row in rows], [shown_answer(text) for text in texts]
        new = [{"question": q, "answer": a, "right": r} for q, a, r in zip(questions, answers, right)]
        self.memory["pairs"] = (self.memory["pairs"] + self.gather(new))[-self.script.pool_size :]
        return batch

    def judge(self, pairs: list[dict]) -> dict:
        batch = self.turn("judge", [{"prompt": judge_answer_prompt(p["question"], p["answer"]), "tag": "score"} for p in pairs])
        batch["rewards"] = batch["rewards"] * self.script.format_reward  # (N,)
        if self.script.judge_reward == "agreement":
            V = [judge_score(text) for text in batch["texts"]]
            agreement = [0.0 if v is None else 1 - abs(v - pair["right"]) for v, pair in zip(V, pairs)]
            batch["rewards"] = (batch["rewards"] + torch.tensor(agreement).to(batch["rewards"])) / 2
            self.log_metric("jud/agreement", mean(self.gather(agreement)))
            for note, pair, a in zip(batch["notes"], pairs, agreement):
                note["rewards"]["agreement"], note["answer is right"] = a, pair["right"]
        return batch

    def stop_if_hopeless(self):
        """Without scores all rewards are neutral, without questions there is nothing to solve. After PATIENCE such steps in a
        row this one is the last: evaluated and saved as a last one is, and main() says why."""
        silent, s = mean(self.gather([not ok for ok in self.readable])), self.script
        self.log_metric("jud/unparsable", silent)
        trouble = "" if self.memory["questions"] else "the pool was empty: no --seed-questions, no proposal of quality 0.7"
        if silent > s.silent_share:
            trouble = f"{silent:.0%} of the judgements had no <score> within --judgement-tokens {s.judgement_tokens}"
        self.memory["hopeless_steps"] = self.memory["hopeless_steps"] + 1 if trouble else 0
        if self.memory["hopeless_steps"] >= PATIENCE:
            self.trouble = f"step {self.state.global_step + 1}: {trouble}"
            self.state.max_steps = self.state.global_step + 1


# ------------------------------------------------------------------ evaluation
def against_gold(V: list[float | None], right: list[bool]) -> dict[str, float]:
    """balanced_accuracy: V >= 0.5 taken for "right", the mean over both classes; no score is wrong in both.
    rank_agreement: P(V of a right answer > V of a wrong one), ties half; the area under the ROC curve."""
    said = [None if v is None else v >= 0.5 for v in V]
    hits = [[verdict is label for verdict, r in zip(said, right) if r is label] for label in (True, False)]
    good, bad = ([NEUTRAL if v is None else v for v, r in zip(V, right) if r is label] for label in (True, False))
    wins = [float(g > b) + 0.5 * (g == b) for g in good for b in bad]
    return {"balanced_accuracy": mean([mean(h) for h in hits if h]), "rank_agreement": mean(wins) if wins else 0.5}


def evaluate(trainer: Mae, held_out: list[dict]) -> dict[str, float]:
    """Held-out questions, whose gold answers training never sees. The judge is measured on answers that the base wrote once,
    so that they are the same all along; its opinion of the solver's own present answers is what may be flattery."""
    state, gather = trainer.accelerator, trainer.gather
    rows = held_out[state.process_index :: state.num_processes]
    prompts = [solve_prompt(row["question"]) for row in rows]

    def right(texts: list[str]) -> list[bool]:
        return gather([is_correct(text, row["answer"]) for text, row in zip(texts, rows)])

    def judged(texts: list[str]) -> list[float | None]:
        asked = [judge_answer_prompt(row["question"], shown_answer(text)) for row, text in zip(rows, texts)]
        return gather([judge_score(text) for text in trainer.act("judge", asked)])

    texts = trainer.act("solver", prompts)
    if "base_solutions" not in trainer.memory:  # step 0: the solver is still the base
        trainer.memory["base_solutions"] = dict(zip(gather([row["question"] for row in rows]), gather(texts)))
    base = [trainer.memory["base_solutions"][row["question"]] for row in rows]
    V, V_base = judged(texts), judged(base)
    accuracy, opinion = mean(right(texts)), mean([NEUTRAL if v is None else v for v in V])
    result = {
        "sol/greedy": mean(right(trainer.act("solver", prompts, greedy=True))),
        "sol/accuracy": accuracy,
        "sol/judged": opinion,
        "co/flattery": opinion - accuracy,
        **{f"jud/{key}": value for key, value in against_gold(V_base, right(base)).items()},
        "jud/unparsable": mean([v is None for v in V + V_base]),
    }
    # proposals, asked for as in training
    rng, D = random.Random(state.process_index), trainer.memory["questions"]
    references = [rng.choice(D) if D and rng.random() < trainer.script.reference_share else None for _ in rows[::4]]
    texts = trainer.act("proposer", [propose_prompt(reference) for reference in references])
    questions = [proposed_question(text) for text in texts]
    result["pro/well_formed"] = mean(gather([q != "" and tag_format(t, "question") == 1 for q, t in zip(questions, texts)]))
    if all(parse_question(row["question"]) for row in held_out):  # embedded questions: the grammar says what has an answer
        result["pro/answerable"] = mean(gather([parse_question(q) is not None for q in questions]))
    result["pro/new"] = mean(gather([q != "" and new for q, new in zip(questions, are_new(questions, D))]))
    return result


# ------------------------------------------------------------------ main
CURVES = {
    "solver": ["sol/judged", "sol/accuracy", "co/flattery"],
    "judge": ["jud/unparsable", "jud/balanced_accuracy", "jud/rank_agreement"],
    "proposer": ["pro/difficulty", "pro/accepted", "pro/answerable", "pro/new"],
}


def main(args: Args):
    args = fill_in(args, SMALL, REAL)
    N, micro = args.questions, args.micro_batch
    if N < 2 or N % 2 or micro < 1 or 3 * N % micro:
        raise UserError(f"--questions {N} must be even, and 3 times it a multiple of --micro-batch {micro}.")
    if not 0 <= args.reference_share <= 1:
        raise UserError(f"--reference-share {args.reference_share}: it is a share, from 0 to 1.")
    if not 0 <= args.seed_questions < args.pool_size:
        raise UserError(f"--seed-questions {args.seed_questions} must be less than --pool-size {args.pool_size}.")
    check_memory(args, [(0, args.solution_tokens), (args.solution_tokens, args.judgement_tokens)], adapters=1)
    set_aside = GOLD_QUESTIONS if args.judge_reward == "agreement" else 0
    train, held_out = load_questions(args.dataset, args.seed_questions + set_aside, args.eval_questions, args.seed)
    run = start_run(args, __file__, train, held_out)
    seeds = list(dict.fromkeys(row["question"] for row in train[: args.seed_questions]))  # without their answers
    gold = train[args.seed_questions :]
    if set_aside and not gold:
        raise UserError(f"--dataset {args.dataset}: all questions are seeds, none is left for --judge-reward agreement.")
    model, tokenizer = load_model(args.model, ["agent"], args.lora_rank, args.four_bit, args.seed)
    accumulation = 3 * args.questions // args.micro_batch
    config = GRPOConfig(
        output_dir=str(run.folder),
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,  # one optimiser step per batch of rollouts: strictly on-policy, the ratio is 1
        num_generations=2,  # GRPOTrainer's least; the loader's rows are not used
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
        ddp_find_unused_parameters=True,
        **machine_options(args),  # bfloat16, checkpointing, Adam in 8 bits, vLLM
    )
    rows = Dataset.from_list([{"prompt": propose_prompt(None)}] * 3 * args.questions * this_process().num_processes)
    trainer = Mae(model, args, seeds, gold, held_out, args=config, train_dataset=rows, processing_class=tokenizer)
    run.train(trainer, lambda: evaluate(trainer, held_out), args, CURVES)
    if trainer.trouble:
        raise UserError(f"{trainer.trouble} for {PATIENCE} steps in a row. The run ends; its checkpoint is in {run.folder}.")


if __name__ == "__main__":
    with plain_errors():
        main(tyro.cli(Args))
