r"""Self-Taught Evaluators: a judge that learns from its own judgements, where it is known which of
two answers is better (Wang et al. 2024, arXiv:2408.02666).

    python self_taught.py                                 the small model on a CPU, 2 minutes
    python self_taught.py --samples 1                     one try at each comparison
    python self_taught.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k
                                                          one GPU

The loop (section 3).  M_0 is the model as it is given; x are questions
    once, by M_0                                                          `make_pairs`
        y answers x;  y' answers x', a changed x, so that y' is a worse answer to x
    for t = 0 .. iterations - 1                                           `step`, `start_round`
        JUDGE    M_t compares y and y' in both orders, N times each       `judge`
        KEEP     one judgement j of a comparison, if any prefers y;       `first_right`
                 as many that name solution 1 as solution 2               `balanced`
        RESTART  makes the adapter M_0 again, and clears Adam's moments   `restart`
        TRAIN    M_{t+1} = M_0 fine-tuned by                              `loss`
                 loss = - mean of log M(j | x, y, y') over the tokens of all j

No right answer is used in training, and nobody labels anything. A better M_t judges more of the
comparisons rightly, also harder comparisons, and M_{t+1} learns from these judgements. But a
judgement may be right by luck, and then it is kept as well. Only the judge is trained; nobody
learns to answer.

Our changes that matter (more in docs/self_taught.md)
    1. The judge is one LoRA adapter on the base, which is M_0. A restart sets LoRA's matrix
       A back to the same random values every time, and its matrix B to 0.
    2. The script changes one number of the question; the paper's model rewrites the instruction.
       As a judge the small model hardly notices that y' answers another question, because it only
       checks calculations.
    3. A pair whose two final answers are equal is left out, because nothing tells its answers
       apart. So is a pair that lacks a final answer.
    4. Judgements are sampled at temperature 1 (paper: 0.7 and top-p 0.9).
    5. We measure on pairs of a right and a wrong answer; the paper on RewardBench.

Shapes: B judgements, b of them in a micro-batch, T tokens of a judgement, N tries at a comparison.
"""

import random
import re
from dataclasses import dataclass

from common.core.errors import UserError
from common.run.args import Count, CountOrZero, RunArgs, Several, Tokens, Weight, parse, per_model


# ------------------------------------------------------------------ arguments
@dataclass
class Args(RunArgs):  # model, dataset, out, seed, micro_batch, eval_every, ...: common/run/args.py
    steps: Count = 72
    """optimiser steps of all rounds; must be a multiple of --iterations"""
    questions: Count = 32
    """judgements per step and process"""
    micro_batch: Count = per_model(tiny=16, real=4)
    """judgements per forward and backward pass"""
    lr: Weight = per_model(tiny=3e-4, real=5e-6)
    """learning rate of the adapter, constant (paper: 1e-6 falling to 1e-7, all weights)"""
    iterations: Count = 3
    """rounds, each of which trains the first model anew"""
    pool: Count = per_model(tiny=192, real=1024)
    """questions from which pairs are made, once"""
    samples: Several = per_model(tiny=4, real=8)
    """N, tries at every comparison, of which one right try is kept"""
    eval_every: CountOrZero = 24
    """steps between evaluations on held-out questions; 0 = only first and last"""
    eval_questions: Count = per_model(tiny=128, real=128)
    """held-out questions"""
    solution_tokens: Tokens = per_model(tiny=80, real=512)
    """length limit of an answer"""
    judgement_tokens: Tokens = per_model(tiny=176, real=768)
    """length limit of a judgement"""

    def check(self):
        if self.steps % self.iterations:
            raise UserError(
                f"--steps {self.steps} must be a multiple of --iterations {self.iterations}."
            )


if __name__ == "__main__":  # before torch and TRL are imported, which takes ten seconds
    args = parse(Args)

from common.checked import CoTrainer, Player
from common.core.batch import Batch
from common.core.lists import chunk, mean
from common.run.launch import launch
from common.run.session import exit_with_one_sentence
from common.tasks.answers import final_answer, is_correct, prompt, solve_prompt
from common.tasks.math import load_for_steps
from common.tasks.verdicts import COMPARED, read_verdict
from common.tiny.tasks import MODULO, parse_question

# ------------------------------------------------------------------ prompts and parsing
COMPARE = r"""You are given a problem and two solutions, one of which is better. Work the problem
out, and say what each solution gets right or wrong. End with the number of the better solution, and
nothing after it: \boxed{1} or \boxed{2}"""


def compare_prompt(question: str, first: str, second: str) -> list[dict]:
    return prompt(COMPARE, to_compare(question, first, second), EXAMPLES)


def to_compare(question: str, first: str, second: str) -> str:
    both = f"Solution 1:\n{first}\nSolution 2:\n{second}"
    return f"Problem: {question}\n{both}\nWhich is right?"


EXAMPLES = [(to_compare(*both), judgement) for *both, judgement in COMPARED]


def parse_choice(text: str) -> int | None:
    r"""Returns the solution that a judgement names at its end, 1 or 2; None if it names none.

    >>> parse_choice("The second one. \\boxed{2}"), parse_choice("\\boxed{2} is right")
    (2, None)
    """
    choice = read_verdict(text, ("1", "2"))
    return int(choice) if choice else None


def changed_question(rng: random.Random, question: str) -> str | None:
    """Returns x': the question with one number replaced by another number that has as many digits;
    None if the question has no number.

    The last of several numbers is never changed, because it is the modulus in questions of the
    repository. Decimals, numbers with thousands separators and digits within words do not count.

    >>> changed_question(random.Random(0), "(42/5)*7 mod 61")
    '(42/7)*7 mod 61'
    """
    numbers = list(re.finditer(r"(?<![\w.,])[0-9]{1,9}(?!\w|[.,]\d)", question))
    if not numbers:
        return None
    number = rng.choice(numbers[:-1] or numbers)
    digits = len(number[0])
    least, most = (10 ** (digits - 1), 10**digits - 1) if digits > 1 else (1, 9)
    if parse_question(question):  # a question of the repository: numbers are below the modulus
        most = min(most, MODULO - 1)
    others = [n for n in rng.sample(range(least, most + 1), 2) if n != int(number[0])]
    return question[: number.start()] + str(others[0]) + question[number.end() :]


def comparisons_of(question: str, better: str, worse: str) -> list[dict]:
    """Returns the two comparisons of a pair, one in each order."""
    return [
        {"prompt": compare_prompt(question, better, worse), "better": 1},
        {"prompt": compare_prompt(question, worse, better), "better": 2},
    ]


# ------------------------------------------------------------------ the paper's mathematics
def first_right(judgements: list[dict]) -> dict | None:
    """Returns the first of a comparison's N judgements that prefers the better answer; None if no
    judgement does: then the comparison is left out of this round.

    The N judgements are independent samples, so the first is as random as any other judgement.
    """
    return next((j for j in judgements if j["choice"] == j["better"]), None)


def balanced(judgements: list[dict], rng: random.Random) -> list[dict]:
    """Returns as many judgements that name solution 1 as solution 2, in random order; otherwise a
    judge with a position bias would be taught more of this bias.
    """
    named = [[j for j in judgements if j["choice"] == number] for number in (1, 2)]
    count = min(map(len, named))
    lessons = [j for judgements in named for j in rng.sample(judgements, count)]
    return rng.sample(lessons, len(lessons))


# ------------------------------------------------------------------ the trainer
class SelfTaught(CoTrainer):
    """`step` is the loop of section 3, `loss` is the fine-tuning of the judge.

    `saved` holds the comparisons, which M_0 has made, the number of the round, and its lessons: the
    judgements that its steps train on. All processes hold the same.
    """

    def __init__(self, *inputs):
        super().__init__(*inputs)
        self.saved = {"comparisons": [], "round": -1, "lessons": []}

    @staticmethod
    def define_players(args: Args) -> dict[str, Player]:
        """Returns the players. The solver only plays at step 0, where the judge's adapter still is
        M_0, so the solver needs no adapter of its own.
        """
        solution, judgement = args.solution_tokens, args.judgement_tokens
        return {
            "judge": Player([], args.lr, judgement, reads=2 * solution, adapter="judge"),
            "solver": Player([], args.lr, solution, adapter="judge"),
        }

    def step(self, rows):
        """rows: not used; every round makes its own lessons, and its steps pass over them."""
        now = self.state.global_step
        t = now // (self.cfg.steps // self.cfg.iterations)  # the round, from 0 on
        if self.saved["round"] < t:
            self.start_round(t)
        return [self.lesson_batch(self.from_epochs(self.saved["lessons"], now, "j"))]

    def start_round(self, t: int):
        """Has M_t judge, keeps right judgements, and makes the adapter M_0 again."""
        rng = random.Random(f"{self.cfg.seed} {t}")
        if t == 0:
            pairs = self.make_pairs(self.train_rows, rng)
            self.report_pairs(pairs)
            both_orders = [comparisons_of(p["question"], p["better"], p["worse"]) for p in pairs]
            self.saved["comparisons"] = [c for two in both_orders for c in two]
        N = self.cfg.samples
        tries = [comparison for comparison in self.saved["comparisons"] for _ in range(N)]
        judgements = self.in_parallel(self.judge, tries)  # by M_t: the restart comes after
        kept = [first_right(several) for several in chunk(judgements, N)]
        lessons = balanced([j for j in kept if j], rng)
        self.report_round(judgements, lessons)
        if not lessons:
            right = sum(j["choice"] == j["better"] for j in judgements)
            unread = sum(j["choice"] is None for j in judgements)
            raise UserError(
                f"round {t}: {right} of {len(judgements)} judgements prefer the better answer, and "
                f"not one of these in one of the two places, so the judge would learn the place "
                f"and nothing else; {unread} name no solution within --judgement-tokens "
                f"{self.cfg.judgement_tokens}; --pool {self.cfg.pool} may be too small."
            )
        self.restart("judge")
        self.saved |= {"round": t, "lessons": lessons}

    def make_pairs(self, rows: list[dict], rng: random.Random) -> list[dict]:
        """Returns y and y' of every question that can be changed, if their final answers differ."""
        changed = [row | {"changed": changed_question(rng, row["question"])} for row in rows]
        changed = [row for row in changed if row["changed"]]
        better = self.answers([row["question"] for row in changed])
        worse = self.answers([row["changed"] for row in changed])
        pairs = []
        for row, y, y_changed in zip(changed, better, worse):
            finals = [final_answer(y), final_answer(y_changed)]
            if all(finals) and not is_correct(y_changed, finals[0]):
                pair = {"question": row["question"], "better": y, "worse": y_changed}
                # for the log alone
                pairs.append(
                    pair | {"right": [is_correct(z, row["answer"]) for z in (y, y_changed)]}
                )
        return pairs

    def answers(self, questions: list[str]) -> list[str]:
        """Returns one answer to each question; the processes share the work."""
        prompts = [solve_prompt(question) for question in questions]
        return [text.strip() for text in self.generate_all("solver", prompts)]

    def judge(self, comparisons: list[dict]) -> list[dict]:
        """Judges each comparison once; adds the sampled token ids and the solution named."""
        ids = self.generate_ids("judge", [row["prompt"] for row in comparisons])
        texts = self.decode(ids)
        return [
            row | {"ids": list(map(int, token_ids)), "choice": parse_choice(text)}
            for row, token_ids, text in zip(comparisons, ids, texts)
        ]

    def lesson_batch(self, everyones: list[dict]) -> Batch:
        """everyones: the step's lessons on all processes; `loss` divides by their tokens."""
        mine = self.shard(everyones)  # B
        prompts, ids = [row["prompt"] for row in mine], [row["ids"] for row in mine]
        batch = self.completions("judge", prompts, ids)
        batch.total_tokens = sum(len(lesson["ids"]) for lesson in everyones)
        return batch

    def loss(self, batch):
        """Returns a micro-batch's share of - mean of log M(j | x, y, y') over the step's tokens."""
        logp = self.score(batch)[0]  # (b, T), 0 after the end of a judgement
        return -logp.sum() / batch.total_tokens, {"logp": logp.sum(1), "credit": logp}

    # --- what is logged and shown; no method below affects training
    def report_pairs(self, pairs):
        self.log_mean("co/better_right", [pair["right"][0] for pair in pairs])
        self.log_mean("co/worse_right", [pair["right"][1] for pair in pairs])

    def report_round(self, judgements, lessons):
        named = [j["choice"] for j in judgements if j["choice"] is not None]
        self.log_mean("judge/prefers_better", [j["choice"] == j["better"] for j in judgements])
        self.log_mean("judge/unreadable", [j["choice"] is None for j in judgements])
        self.log_mean("judge/says_1", [choice == 1 for choice in named])
        comparisons = len(self.saved["comparisons"])
        self.log_mean("judge/lessons", len(lessons) / max(1, comparisons))

    def show_loss(self, batch, shown):
        super().show_loss(batch, shown)
        self.record_part(batch, shown["credit"], "log-likelihood", shown["logp"])


# ------------------------------------------------------------------ evaluation
def evaluate(trainer: SelfTaught, held_out: list[dict]) -> dict[str, float]:
    """Measures the judge on two sets of pairs to held-out questions. M_0 writes both sets at step
    0, and they are the same in all evaluations. A true pair is a right and a wrong answer to one
    question; a made pair is made as in training.

    What the judge gains on made pairs and not on true pairs is about changed questions alone.
    """
    if "true" not in trainer.saved:
        made = trainer.make_pairs(held_out, random.Random(0))
        trainer.saved["true"] = true_pairs(trainer, held_out)
        trainer.saved["made"] = [[p["question"], p["better"], p["worse"]] for p in made]
    result = {"co/true_pairs": len(trainer.saved["true"])}
    result |= evaluate_judge(trainer, trainer.saved["true"], trainer.cfg.eval_samples)
    made = evaluate_judge(trainer, trainer.saved["made"], 1)
    return result | ({"judge/made_pairs": made["judge/accuracy"]} if made else {})


def true_pairs(trainer: SelfTaught, held_out: list[dict]) -> list[list[str]]:
    """Returns [question, right answer, wrong answer] of every question to which M_0 has written
    both. A text that was cut before its answer is no wrong answer: its form would give it away.
    """
    n = trainer.cfg.eval_samples
    answers = trainer.answers([row["question"] for row in held_out for _ in range(n)])
    pairs = []
    for row, texts in zip(held_out, chunk(answers, n)):
        right = [text for text in texts if is_correct(text, row["answer"])]
        wrong = [y for y in texts if final_answer(y) and not is_correct(y, row["answer"])]
        pairs += [[row["question"], *two] for two in zip(right[:1], wrong[:1])]
    return pairs


def evaluate_judge(trainer: SelfTaught, pairs: list, samples: int) -> dict[str, float]:
    """pairs: [question, better, worse]; each is judged `samples` times in both orders.

    Returns:
        accuracy: share of judgements that prefer the better answer; guessing gets 0.5.
        both_orders: share of tries that prefer it in both orders; guessing gets 0.25.
        vote: as accuracy, for the majority of all judgements of a pair; a tie counts half.
        unreadable: share of judgements that name no solution.
    """
    if not pairs:
        return {}
    tries = [c for pair in pairs for _ in range(samples) for c in comparisons_of(*pair)]
    judgements = trainer.in_parallel(trainer.judge, tries)
    right = [j["choice"] == j["better"] for j in judgements]  # y first, y' first, y first, ...
    return {
        "judge/accuracy": mean(right),
        "judge/both_orders": mean([all(two) for two in chunk(right, 2)]),
        "judge/vote": mean([majority(several) for several in chunk(judgements, 2 * samples)]),
        "judge/unreadable": mean([j["choice"] is None for j in judgements]),
    }


def majority(judgements: list[dict]) -> float:
    """Returns 1 if most judgements of a pair prefer the better answer, 0 if most prefer the worse
    answer, 0.5 for a tie.
    """
    hits = [j["choice"] == j["better"] for j in judgements if j["choice"] is not None]
    right, wrong = sum(hits), len(hits) - sum(hits)
    return float(right > wrong) + 0.5 * (right == wrong)


# ------------------------------------------------------------------ main
CURVES = {
    "right above wrong": ["judge/accuracy", "judge/vote", "judge/both_orders"],
    "changed questions": ["judge/prefers_better", "judge/made_pairs"],
    "what it learns from": ["judge/lessons", "judge/says_1", "judge/unreadable"],
}


def load(args: Args):
    return load_for_steps(args, args.pool)


def main(args: Args):
    launch(SelfTaught, args, load=load, evaluate=evaluate, curves=CURVES)


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(args)
