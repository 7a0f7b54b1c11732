"""Controls: functions that change one thing in a script before it runs. For tango.py a verifier
that knows the truth, one that knows nothing, and another script's; for few_labels.py other rewards
where no answer is known; for mae.py and self_rewarding.py scores that know the truth or nothing;
for apo.py an opponent that stays; and so on.

A gain from step credit that random verdicts bring, too, is none; and no verifier can be worth more
than the one that is always right. Each control takes the script's module; experiments.toml names
those of a variant, and `evidence.py EXPERIMENT VARIANT --seed N` runs

    python -m lab.runs.controls SCRIPT.py CONTROL ... --the-scripts --own arguments

judge_from=FOLDER starts with the verifier in this folder.
"""

import importlib
import itertools
import random
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import tango
from common.core.lists import mean
from common.run import launch
from common.tasks.answers import boxed, is_correct, split_steps
from common.tasks.verdicts import mark
from common.tiny.tasks import gold_answer, parse_question, sounds_sure, step_labels

import torch
import tyro
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
    """Every step's own label. So a solution that lacks a step can be accepted whole."""
    return judgement(step_labels(question, split_steps(solution)))


def coin(question: str, solution: str, accepts: float = 0.5) -> str:
    """Accepts every step at this rate; the same steps of the same solution."""
    draw = random.Random(question + solution)
    return judgement([draw.random() < accepts for _ in split_steps(solution)])


def judged_by(judge, script):
    """Makes the trainers of tango.py or few_labels.py, which is a fork of it, ask
    `judge(question, solution)` in the verifier's place.
    """
    Tango = getattr(script, "tango", script).Tango
    sampled = Tango.generate

    def generate(self, name, prompts, greedy=False):
        if name != "verifier":
            return sampled(self, name, prompts, greedy)
        return [judge(*ASKED.fullmatch(prompt[-1]["content"]).groups()) for prompt in prompts]

    Tango.generate = generate


def true_verdicts(script):
    judged_by(gold, script)


def coin_verdicts(script, accepts: str = "0.5"):
    judged_by(lambda *of: coin(*of, float(accepts)), script)


def coin_solutions(script):
    """A coin accepts or rejects a whole solution, anew each time."""
    draw = random.Random(11)
    steps_of = lambda solution: len(split_steps(solution))  # noqa: E731
    judged_by(lambda _, text: judgement([draw.random() < 0.5] * steps_of(text)), script)


def judge_from(tango, folder: str):
    """The verifier is that of another script's run: an adapter on the same small model, asked in
    the same form, in this folder.
    """
    Tango = getattr(tango, "tango", tango).Tango  # few_labels.py is a fork of it
    begun = Tango.__init__

    def __init__(self, *inputs):
        begun(self, *inputs)
        state = load_file(Path(folder, "adapter_model.safetensors"))
        set_peft_model_state_dict(self.model, state, adapter_name="verifier")

    Tango.__init__ = __init__


# ------------------------------------------------------------------ few_labels.py: rewards
def scored_alone(few_labels):
    """A likelihood is the generator's only reward: log V(y | x), where V is the verifier."""
    rewarded_by(few_labels, lambda self, batch: self.log_probs("verifier", batch).sum(1))


def scored_above_base(few_labels):
    """The generator's only reward is log V(y | x) - log base(y | x)."""

    def scores(self, batch):
        V, base = (self.log_probs(player, batch).sum(1) for player in ("verifier", None))  # (B,)
        return V - base

    rewarded_by(few_labels, scores)


def rewarded_by(few_labels, scores):
    """`scores(trainer, batch)`, (B,), is the generator's only reward. A solution that cannot be
    read earns the least of its batch.
    """

    def generator_step(self, rows):
        batch = self.rollout("generator", [row | {"answer": ""} for row in rows])  # B
        found = scores(self, batch)  # (B,)
        readable = torch.tensor([*map(few_labels.has_countable_steps, batch.texts)])  # (B,)
        self.set_rewards(batch, torch.where(readable.to(found.device), found, found.min()))
        right = [is_correct(text, row["answer"]) for text, row in zip(batch.texts, rows)]
        self.log_mean("generator/accuracy", right)
        steps = [step for text in batch.texts for step in split_steps(text)]
        self.log_mean("co/sounds_sure", [sounds_sure(step) for step in steps])
        asked = sum(len(parse_question(row["question"])[1]) for row in rows)
        self.log_mean("co/steps_left_out", 1 - len(steps) / asked)
        return batch

    few_labels.FewLabels.generator_step = generator_step


def voted(few_labels):
    """Plain GRPO trains on all questions: where no answer is known, a solution is right if it
    agrees with most of the question's solutions. Takes the place of the outcome reward.
    """
    known = few_labels.outcome_reward

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

    few_labels.outcome_reward = outcome_reward
    few_labels.FewLabels.with_answers = lambda self, questions: questions


def judged_alone(few_labels, lr: float = 0):
    """`all_accepted` is the generator's only reward, under --labels that names more questions than
    there are: every answer trains the verifier, at this rate, and none the generator.
    """
    Few = few_labels.FewLabels
    begun, step, report = Few.define_players, Few.generator_step, Few.report_generator

    def define_players(args):
        players = begun(args)
        return players | {"verifier": replace(players["verifier"], lr=lr)}

    def generator_step(self, rows):
        return step(self, [row | {"answer": "", "gold": row["answer"]} for row in rows])

    def report_generator(self, rows, batch, judgements, alpha):
        right = [is_correct(text, row["gold"]) for text, row in zip(batch.texts, rows)]
        shown = replace(batch, rewards=batch.rewards.new_tensor(right))  # (B,)
        report(self, rows, shown, judgements, alpha)

    Few.define_players = staticmethod(define_players)
    Few.generator_step, Few.report_generator = generator_step, report_generator


def judged_alone_slowly(few_labels):
    judged_alone(few_labels, 1e-4)


def own_right_judgements(few_labels):
    """No RL of the verifier: it imitates its own judgements whose final verdict is right. With an
    advantage of 1 for these and of 0 for all others the loss is their cross-entropy.
    """
    Few = few_labels.FewLabels
    reported = Few.report_verifier

    def report_verifier(self, judged, batch):
        reported(self, judged, batch)
        finals = [few_labels.tango.parse_judgement(text).final for text in batch.texts]
        right = [final is row["label"] for final, row in zip(finals, judged)]
        batch.advantages = torch.tensor(right).to(batch.advantages)  # (B,)

    Few.report_verifier = report_verifier


def several_operations(script):
    """Evaluations of the generator also say how many solutions are right of those to questions of
    two or more operations. A frozen verifier is not evaluated, and before training plain GRPO alone
    is: the others have its weights and its draws then.
    """
    of_generator, evaluate = tango.evaluate_generator, script.evaluate

    def evaluate_generator(trainer, held_out):
        found, samples, right = of_generator(trainer, held_out)
        n = trainer.cfg.eval_samples
        several = [len(split_steps(row["reference"])) > 1 for row in held_out for _ in range(n)]
        found["generator/accuracy_several"] = mean(itertools.compress(right, several))
        return found, samples, right

    def evaluate_what_learns(trainer, held_out):
        if trainer.cfg.verifier != "none" and not trainer.state.global_step:
            return {}
        if trainer.cfg.verifier == "frozen":
            return tango.evaluate_generator(trainer, held_out)[0]
        return evaluate(trainer, held_out)

    tango.evaluate_generator, script.evaluate = evaluate_generator, evaluate_what_learns


def in_bfloat16(script):
    """On a CPU as on a GPU: the base in bfloat16, products by autocast, adapters in float32. The
    head is widened once, not for every token.
    """
    load, config = launch.load_model, launch.grpo_config

    def load_model(*given):
        model, tokenizer = load(*given)
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.data = parameter.data.bfloat16()
        head = model.get_output_embeddings()  # apart from the embeddings, of which it has a copy
        head.weight = torch.nn.Parameter(head.weight.float(), requires_grad=False)
        return model, tokenizer

    launch.load_model = load_model
    launch.grpo_config = lambda *given, **more: config(*given, **{"bf16": True} | more)


# ------------------------------------------------------------------ cure.py: who learns
def only_the_coder(cure):
    """Of the two batches of a step only the coder's is trained on."""
    step = cure.Cure.step
    cure.Cure.step = lambda self, rows: step(self, rows)[:1]


def only_the_tester(cure):
    step = cure.Cure.step
    cure.Cure.step = lambda self, rows: step(self, rows)[1:]


# ------------------------------------------------------------------ mae.py: scores
def true_score(user: str) -> float:
    """1 for a right answer, or for a question that has one; else 0."""
    question = re.search(r"Question: (.*)", user)[1]
    parsed = parse_question(question)
    answer = re.search(r"\nAnswer: (.*)\nScore the answer\.", user, re.DOTALL)
    if parsed is None or answer is None:
        return float(parsed is not None)
    return float(answer[1].strip() == str(gold_answer(question)))


def gold_scores(mae):
    """The truth in place of the judge's scores; the judge is asked all the same."""

    def true_ones(self, V, prompts):
        return [true_score(prompt[-1]["content"]) for prompt in prompts]

    scored_by(true_ones, mae.Mae)


def shuffled_scores(mae):
    """The judge's scores, dealt out anew."""

    def dealt(self, V, prompts):
        return random.Random(f"{self.args.seed} {self.state.global_step}").sample(V, len(V))

    scored_by(dealt, mae.Mae)


def scored_by(scores, trainer_class):
    judged = trainer_class.values

    def values(self, prompts):
        prompts = list(prompts)
        V, texts = judged(self, prompts)
        return scores(self, V, prompts), texts

    trainer_class.values = values


# ------------------------------------------------------------------ self_rewarding.py: scores
def pairs_by_the_truth(self_rewarding):
    """A right answer scores 1, a wrong one 0."""
    read_by(lambda answer: float(answer["right"]), self_rewarding.SelfRewarding)


def pairs_by_chance(self_rewarding):
    """A number that means nothing: always the same for the same answer."""
    draw = lambda answer: random.Random(answer["question"] + answer["text"]).random()  # noqa: E731
    read_by(draw, self_rewarding.SelfRewarding)


def read_by(score, trainer_class):
    """Pairs are chosen by `score(answer)`. Evaluations ask the judge as ever."""
    begun = trainer_class.start_round

    def start_round(self, t):
        self.readings = lambda answers: [[score(answer)] for answer in answers]
        begun(self, t)
        del self.readings

    trainer_class.start_round = start_round


# ------------------------------------------------------------------ apo.py: opponents
def against_the_first(apo):
    """The RMs learn in all rounds from what the first model wrote in the first one: as many golden
    answers above others, and no adversary. The generator learns as ever.
    """
    answers_to = apo.Apo.answers_to

    def as_in_the_first_round(self, rows, n):
        if rows is not self.rm_rows:
            return answers_to(self, rows, n)
        if "opponents" not in self.saved:
            self.saved["opponents"] = answers_to(self, rows, n)
        return self.saved["opponents"]

    apo.Apo.answers_to = as_in_the_first_round


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
    """The critic is shown the solution of another question, of as many operations: the question
    before it of this length, and for the first question the last one.
    """
    load = script.load

    def shifted(rows: list[dict]) -> list[dict]:
        of_length = {}
        for row in rows:
            of_length.setdefault(row["reference"].count("<step>"), []).append(row["reference"])
        before = {steps: iter([its[-1], *its]) for steps, its in of_length.items()}
        return [row | {"reference": next(before[row["reference"].count("<step>")])} for row in rows]

    script.load = lambda args: tuple(map(shifted, load(args)))


def reference_never_shown(script):
    """None of critic and base sees a reference."""
    texts = script.SweetRL.texts
    blind = lambda self, player, some, seen: texts(self, player, some, "actor")  # noqa: E731
    script.SweetRL.texts = blind


# ------------------------------------------------------------------ which verifier? (results.md)
def asked(script):
    """The evaluation asks the script's verifier about the same solutions, see verifiers.py."""
    from lab.runs.verifiers import ask_the_verifier

    ask_the_verifier(script)


def main():
    file, *words = sys.argv[1:]
    controls = list(itertools.takewhile(lambda word: not word.startswith("--"), words))
    script = importlib.import_module(file.removesuffix(".py"))
    for control in controls:
        name, *given = control.split("=")
        globals()[name](script, *given)
    script.main(tyro.cli(script.Args, args=words[len(controls) :]))


if __name__ == "__main__":
    main()
