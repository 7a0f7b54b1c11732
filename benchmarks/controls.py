"""Judges that are not trained here, in the place of the one that a script trains: for tango.py a
verifier that knows the truth, one that knows nothing, and aprm.py's; for mae.py and
self_rewarding.py scores that know the truth or nothing; for apo.py an opponent that stays.

A gain from step credit that random verdicts bring, too, is none; and no verifier can be worth more
than the one that is always right. The patches of experiments.toml put them in place.
"""

import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from common.tasks.answers import boxed, is_correct, split_steps
from common.tasks.verdicts import mark
from common.tiny.tasks import gold_answer, parse_question, sounds_sure, step_labels

import torch
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file

# ------------------------------------------------------------------ tango.py: verdicts
ASKED = re.compile(r"Problem: (.*?)\nSolution:\n(.*)\nVerify its \d+ steps\.", re.DOTALL)


def judgement(verdicts: list[bool]) -> str:
    """In the form that tango.py's verifier writes, the final verdict being whether all hold."""
    steps = "".join(f"<step>{mark(verdict)}</step>\n" for verdict in verdicts)
    whole = f"<final_verification>{mark(all(verdicts))}</final_verification>"
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


def judging_as(folder: str, trainer_class):
    """Makes all trainers of this class start with the verifier of another script's run: an adapter
    on the same embedded model, asked in the same form, in this folder, whose SEED is the run's.
    """
    begun = trainer_class.__init__

    def __init__(self, *inputs):
        begun(self, *inputs)
        place = folder.replace("SEED", str(self.cfg.seed))
        state = load_file(Path(place, "adapter_model.safetensors"))
        set_peft_model_state_dict(self.model, state, adapter_name="verifier")

    trainer_class.__init__ = __init__


def scored_alone(tango, folder: str, above_base: bool):
    """Makes a likelihood the generator's only reward: log V(y | x), or with `above_base`
    log V(y | x) - log base(y | x). V is the verifier in this folder, see `judging_as`. A solution
    that cannot be read earns the least reward of its batch.
    """
    judging_as(folder, tango.Tango)

    def generator_step(self, rows):
        batch = self.rollout("generator", [row | {"answer": ""} for row in rows])  # B
        scores = self.log_probs("verifier", batch).sum(1)  # (B,)
        if above_base:
            scores = scores - self.log_probs(None, batch).sum(1)
        readable = torch.tensor([tango.has_countable_steps(text) for text in batch.texts])  # (B,)
        self.set_rewards(batch, torch.where(readable.to(scores.device), scores, scores.min()))
        right = [is_correct(text, row["answer"]) for text, row in zip(batch.texts, rows)]
        self.log_mean("generator/accuracy", right)
        steps = [step for text in batch.texts for step in split_steps(text)]
        self.log_mean("co/sounds_sure", [sounds_sure(step) for step in steps])
        asked = sum(len(parse_question(row["question"])[1]) for row in rows)
        self.log_mean("co/steps_left_out", 1 - len(steps) / asked)
        return batch

    tango.Tango.generator_step = generator_step


def voted(tango):
    """Makes plain GRPO train on all questions: where no answer is known, a solution is right if it
    agrees with most of the question's solutions. Takes the place of the outcome reward.
    """
    known = tango.outcome_reward

    def outcome_reward(completions, answer, question, **more):
        answers = [boxed(completion[0]["content"]) for completion in completions]
        votes = {q: Counter() for q in question}
        for q, given in zip(question, answers):
            votes[q].update([given] if given is not None else [])
        most = {q: count.most_common(1)[0][0] for q, count in votes.items() if count}
        rewards = known(completions=completions, answer=answer)
        return [
            float(given is not None and given == most.get(q)) if reward is None else reward
            for reward, given, q in zip(rewards, answers, question)
        ]

    tango.outcome_reward = outcome_reward
    tango.Tango.with_answers = lambda self, questions: questions


def judged_alone(tango, lr: float):
    """Makes `all_accepted` the generator's only reward, under --labels that names more questions
    than there are: every answer trains the verifier, at this rate, and none the generator.
    """
    Tango = tango.Tango
    begun, step, report = Tango.define_players, Tango.generator_step, Tango.report_generator

    def define_players(args):
        players = begun(args)
        return players | {"verifier": replace(players["verifier"], lr=lr)}

    def generator_step(self, rows):
        return step(self, [row | {"answer": "", "gold": row["answer"]} for row in rows])

    def report_generator(self, rows, batch, judgements, alpha):
        right = [is_correct(text, row["gold"]) for text, row in zip(batch.texts, rows)]
        shown = replace(batch, rewards=batch.rewards.new_tensor(right))  # (B,)
        report(self, rows, shown, judgements, alpha)

    Tango.define_players = staticmethod(define_players)
    Tango.generator_step, Tango.report_generator = generator_step, report_generator


# ------------------------------------------------------------------ mae.py: scores
def true_score(user: str) -> float:
    """1 for a right answer, or for a question that has one; else 0."""
    question = re.search(r"Question: (.*)", user)[1]
    parsed = parse_question(question)
    answer = re.search(r"\nAnswer: (.*)\nScore the answer\.", user, re.DOTALL)
    if parsed is None or answer is None:
        return float(parsed is not None)
    return float(answer[1].strip() == str(gold_answer(question)))


def scored_by(how: str, trainer_class):
    """Makes all trainers of this class score with the truth ("gold"), or with the judge's scores
    dealt out anew ("shuffled"). The judge is asked in any case.
    """
    judged = trainer_class.values

    def values(self, prompts):
        prompts = list(prompts)
        V, texts = judged(self, prompts)
        if how == "shuffled":
            V = random.Random(f"{self.args.seed} {self.state.global_step}").sample(V, len(V))
        else:
            V = [true_score(prompt[-1]["content"]) for prompt in prompts]
        return V, texts

    trainer_class.values = values


# ------------------------------------------------------------------ self_rewarding.py: scores
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


# ------------------------------------------------------------------ apo.py: opponents
def against_the_first(trainer_class):
    """Makes the RMs of this class learn in all rounds from what the first model wrote in the first
    one: as many golden answers above others, and no adversary. The generator learns as ever.
    """
    answers_to = trainer_class.answers_to

    def as_in_the_first_round(self, rows, n):
        if rows is not self.rm_rows:
            return answers_to(self, rows, n)
        if "opponents" not in self.saved:
            self.saved["opponents"] = answers_to(self, rows, n)
        return self.saved["opponents"]

    trainer_class.answers_to = as_in_the_first_round


# ------------------------------------------------------------------ self_verify.py: labels
def labelled_by_chance(script):
    """What is judged keeps its balance, and its labels say nothing."""
    samples_of = script.samples_of

    def by_chance(groups, rng):
        samples = samples_of(groups, rng)
        labels = [row["right"] for row in samples]
        rng.shuffle(labels)
        return [row | {"right": label} for row, label in zip(samples, labels)]

    script.samples_of = by_chance


# ------------------------------------------------------------------ sweet_rl.py: references
def others_references(script):
    """The critic is shown the solution of another question, of as many operations: the rows of the
    embedded tasks have two lengths in turn.
    """
    load = script.load

    def shifted(args):
        parts = load(args)
        return tuple(
            [row | {"reference": part[i - 2]["reference"]} for i, row in enumerate(part)]
            for part in parts
        )

    script.load = shifted
