"""Judges that nobody trains, in the place of the one that a script trains: for tango.py a verifier
that knows the truth and one that knows nothing, and rewards that luck earns; for mae.py and
self_rewarding.py scores that know the truth or nothing, and for mae.py a judge that is trained
towards the truth.

A gain from step credit that random verdicts bring, too, is none; and no verifier can be worth more
than the one that is always right. The patches of experiments.toml put them in place.
"""

import random
import re

from common.tasks.answers import boxed, split_steps
from common.tasks.math import load_questions
from common.tiny.tasks import gold_answer, parse_question, step_labels

import torch

# ------------------------------------------------------------------ tango.py: verdicts from
# elsewhere
ASKED = re.compile(r"Problem: (.*?)\nSolution:\n(.*)\nVerify its \d+ steps\.", re.DOTALL)


def judgement(verdicts: list[bool]) -> str:
    """In the form that tango.py's verifier writes, the final verdict being whether all hold."""
    said = lambda verdict: rf"\boxed{{{'CORRECT' if verdict else 'INCORRECT'}}}"  # noqa: E731
    steps = "".join(f"<step>{said(verdict)}</step>\n" for verdict in verdicts)
    whole = f"<final_verification>{said(all(verdicts))}</final_verification>"
    return f"<step_verification>\n{steps}</step_verification>\n{whole}"


def gold(question: str, solution: str) -> str:
    """Every step's own label."""
    return judgement(step_labels(question, split_steps(solution)))


def coin(question: str, solution: str) -> str:
    """Heads or tails for every step; the same for the same solution."""
    draw = random.Random(question + solution)
    return judgement([draw.random() < 0.5 for _ in split_steps(solution)])


def judged_by(judge, trainer_class):
    """Makes all trainers of this class ask `judge(question, solution)` in the verifier's place."""
    sampled = trainer_class.generate

    def generate(self, name, prompts, greedy=False):
        if name != "verifier":
            return sampled(self, name, prompts, greedy)
        return [judge(*ASKED.fullmatch(prompt[-1]["content"]).groups()) for prompt in prompts]

    trainer_class.generate = generate


def odd_as_gold(text: str, gold: str) -> bool:
    """Whether the boxed number is odd or even as the right one is: luck is one in two."""
    answer = (boxed(text) or "").strip()
    return re.fullmatch(r"-?[0-9]+", answer) is not None and int(answer) % 2 == int(gold) % 2


def paid_for_luck(tango):
    """Makes the steps of tango.py take an answer for right if it is `odd_as_gold`, in the reward
    and in the verifier's labels. Evaluations ask for the number itself, as ever.
    """
    exact, step = tango.is_correct, tango.Tango.step

    def lucky_step(self, rows):
        tango.is_correct = odd_as_gold
        try:
            return step(self, rows)
        finally:
            tango.is_correct = exact

    tango.Tango.step = lucky_step


# ------------------------------------------------------------------ mae.py: scores from elsewhere
def true_score(user: str) -> float:
    """1 for a right answer, or for a question that has one; else 0."""
    question = re.search(r"Question: (.*)", user)[1]
    parsed = parse_question(question)
    answer = re.search(r"\nAnswer: (.*)\nScore the answer\.", user, re.DOTALL)
    if parsed is None or answer is None:
        return float(parsed is not None)
    return float(answer[1].strip() == str(gold_answer(question)))


def scored_by(how: str, trainer_class):
    """Makes all trainers of this class score with the truth ("gold"), with the judge's scores dealt
    out anew ("shuffled"), or with one number ("constant": only the format is left to be rewarded).
    The judge is asked in any case.
    """
    judged = trainer_class.values

    def values(self, prompts):
        prompts = list(prompts)
        V, texts = judged(self, prompts)
        if how == "shuffled":
            V = random.Random(f"{self.args.seed} {self.state.global_step}").sample(V, len(V))
        elif how == "constant":
            V = [0.7] * len(V)  # no better than the gate asks for
        else:
            V = [true_score(prompt[-1]["content"]) for prompt in prompts]
        return V, texts

    trainer_class.values = values


def rewarded_for_agreement(mae):
    """mae.py's judge is rewarded for its format and for agreeing with gold answers to 256 questions
    set aside for it: r = (format + 1 - |V - right|) / 2, without a score the second term is 0.
    """
    made, solved = mae.Mae.__init__, mae.Mae.solve

    def load(args):
        wanted = args.seed_questions + 256
        return load_questions(args.dataset, wanted, args.eval_questions, args.seed)

    def init(self, *inputs):
        made(self, *inputs)
        count = self.cfg.seed_questions
        self.gold = self.train_rows[count:]
        seeds = list(dict.fromkeys(row["question"] for row in self.train_rows[:count]))
        self.saved |= {"questions": seeds, "seeds": len(seeds)}

    def draw(self):
        """As many pairs with a right answer as with a wrong one, once there are both."""
        cfg, D, S = self.cfg, self.saved["questions"], self.saved["pairs"]
        rng = random.Random(f"{cfg.seed} {self.state.global_step}")
        count = cfg.questions * self.accelerator.num_processes
        references = mae.draw_references(rng, D, cfg.reference_share, count)
        questions = mae.draw_from(rng, D, count)
        right, wrong = ([pair for pair in S if pair["right"] is label] for label in (True, False))
        pairs = mae.draw_from(rng, right, count // 2) + mae.draw_from(
            rng, wrong, count - count // 2
        )
        pairs = pairs if right and wrong else []
        rng.shuffle(pairs)
        return self.my_share(references), self.my_share(questions), self.my_share(pairs)

    def solve(self, questions):
        """The pool's new pairs are the solver's answers to questions with gold answers."""
        kept, batch = self.saved["pairs"], solved(self, questions)
        rng = random.Random(f"{self.cfg.seed} {self.state.global_step} 0")
        count = self.cfg.questions * self.accelerator.num_processes
        rows = self.my_share(mae.draw_from(rng, self.gold, count))
        texts = self.generate("solver", [mae.solve_prompt(row["question"]) for row in rows])
        pairs = [
            {
                "question": row["question"],
                "answer": mae.shown_answer(text),
                "right": mae.is_correct(text, row["answer"]),
            }
            for row, text in zip(rows, texts)
        ]
        self.saved["pairs"] = (kept + self.gather(pairs))[-self.cfg.pool_size :]
        return batch

    def judge(self, pairs):
        prompts = [mae.judge_answer_prompt(pair["question"], pair["answer"]) for pair in pairs]
        batch = self.rollout("judge", [{"prompt": p, "tag": "score"} for p in prompts])
        V = [mae.judge_score(text) for text in batch["texts"]]
        agreement = [0.0 if v is None else 1 - abs(v - p["right"]) for v, p in zip(V, pairs)]
        formats = batch["rewards"] * self.cfg.format_reward
        self.set_rewards(batch, (formats + torch.tensor(agreement).to(formats)) / 2)
        return batch

    mae.load, mae.Mae.__init__ = load, init
    mae.Mae.draw, mae.Mae.solve, mae.Mae.judge = draw, solve, judge


# ------------------------------------------------------------------ self_rewarding.py: the scores
# that choose pairs, from elsewhere
def read_by(how: str, trainer_class):
    """Makes all trainers of this class choose pairs by the truth ("truth": 1 for a right answer, 0
    for a wrong one) or by a number that means nothing ("chance": always the same for the same
    answer). Evaluations ask the judge as ever.
    """
    begun = trainer_class.start_round

    def score(answer: dict) -> float:
        if how == "truth":
            return float(answer["right"])
        return random.Random(answer["question"] + answer["text"]).random()

    def start_round(self, t):
        self.readings = lambda answers: [[score(answer)] for answer in answers]
        begun(self, t)
        del self.readings

    trainer_class.start_round = start_round
