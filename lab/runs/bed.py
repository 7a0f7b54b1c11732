"""What can the arithmetic model do before any training? python -m lab.runs.bed

Every part that it has been taught, on held-out questions: sampled at temperature 1 as in training,
at 0.5, and greedily, beside what the best constant answer scores. Writes lab/evidence/bed.json;
takes five minutes on one core.
"""

import json
import random
import re
from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import mae
import tango
from common.core.lists import chunk, mean
from common.run.models import load_model
from common.tasks.answers import is_correct, solve_prompt, split_steps
from common.tasks.graded import meta_truth, truth_of
from common.tiny import beliefs, repairs, tasks
from lab import EVIDENCE
from lab.make import demonstrations, program_demonstrations
from lab.speed.step import by_sample

import torch

RESULT = EVIDENCE / "bed.json"
TEMPERATURES = {"sampled": 1.0, "T = 0.5": 0.5, "greedy": 0.0}
TASKS = 256  # of each part
SAMPLES = 4  # completions of a task at temperatures above 0
MARKED = re.compile(r"(.*?)(?::(\d+[+*/-]\d=\d+))?\\boxed\{(CORRECT|INCORRECT)\}")


def player(name: str):
    """A function of prompts and a temperature: what the model writes, without an adapter."""
    model, tokenizer = load_model(name, ["unused"], 1, False, seed=0)

    def play(prompts: list, temperature: float) -> list[str]:
        written, ends = [], [tokenizer.eos_token_id]
        with model.disable_adapter():
            for part in chunk(prompts, 256):
                written += by_sample(model, tokenizer, part, 224, ends, temperature)
        return tokenizer.batch_decode(written, skip_special_tokens=True)

    return play


# ------------------------------------------------------------------ measures
def share(hits: list[bool]) -> dict:
    return {"value": mean(hits), "n": len(hits)}


def balanced(said: list, truth: list) -> dict:
    """Mean over the classes; what cannot be read is wrong in its class."""
    classes = {t: [s == t for s, x in zip(said, truth) if x == t] for t in truth}
    return {"value": mean([mean(hits) for hits in classes.values()]), "n": len(said)}


def most_frequent(values: list) -> float:
    return Counter(values).most_common(1)[0][1] / len(values)


def holds(step: str) -> bool:
    a, op, b, claimed = beliefs.parse_step(step)
    return tasks.OPERATORS[op](a, b) == claimed


# ------------------------------------------------------------------ to solve and to verify
def solving(play, questions: list[str], temperature: float, n: int) -> tuple[list, list, list]:
    """(whether each answer is right, each step, and the texts)."""
    asked = [question for question in questions for _ in range(n)]
    texts = play([solve_prompt(question) for question in asked], temperature)
    right = [is_correct(text, str(tasks.gold_answer(q))) for q, text in zip(asked, texts)]
    steps = [label for q, text in zip(asked, texts) for label in tasks.gold_steps(q, text)]
    return right, steps, texts


def verifying(play, questions, solutions, right, temperature: float) -> dict[str, tuple]:
    """Of judgements of the model's own solutions: name -> (measure, best constant)."""
    prompts = [tango.verify_prompt(*pair) for pair in zip(questions, solutions)]
    texts = play(prompts, temperature)
    judgements = [tango.parse_judgement(text) for text in texts]
    gold = [tasks.gold_steps(*pair) for pair in zip(questions, solutions)]
    labels = [label for steps in gold for label in steps]
    f1 = {"value": tango.step_f1(gold, judgements), "n": len(texts)}
    all_wrong = 2 * labels.count(False) / (len(labels) + labels.count(False))
    marked = [MARKED.fullmatch(step) for text in texts for step in split_steps(text)]
    steps = [(m[1], m[2], m[3] == "CORRECT") for m in marked if m and tasks.STEP.fullmatch(m[1])]
    of_right = [verdict for step, shown, verdict in steps if shown and holds(step)]
    of_wrong = [shown == demonstrations.check(step)[0] for step, shown, _ in steps
                if shown and not holds(step)]  # fmt: skip
    trusted = {sure: [not shown for step, shown, _ in steps if tasks.sounds_sure(step) is sure]
               for sure in (True, False)}  # fmt: skip
    return {
        "final verdict, balanced": (balanced([j.final for j in judgements], right), 0.5),
        "wrong steps found, F1": (f1, all_wrong),
        "steps that do not sound sure and are trusted": (share(trusted[False]), None),
        "steps that sound sure and are trusted": (share(trusted[True]), None),
        "right steps that a check calls wrong": (share([not v for v in of_right]), None),
        "checks of wrong steps that are true": (share(of_wrong), None),
    }


# ------------------------------------------------------------------ the other parts: what is said,
# and what is true, of a user's message and what the model answers
def last(pattern: str, text: str) -> str | None:
    return (re.findall(pattern, text) or [None])[-1]


def problem(user: str) -> str:
    return re.search(r"(?:Problem|Question): (.*)", user)[1]


def sound(user: str, text: str) -> tuple:
    steps = split_steps(user)
    return last(r"\*\*(YES|NO)\*\*", text), "YES" if all(map(holds, steps)) else "NO"


def right_at_once(user: str, text: str) -> tuple:
    right = solved_again(user, user.partition("Solution:")[2])[0]
    return text.strip(), "Yes" if right else "No"


def scored(user: str, text: str) -> tuple:
    V = mae.judge_score(text)
    right = int(re.search(r"Answer: (\d+)", user)[1]) == tasks.gold_answer(problem(user))
    return None if V is None else V >= 0.5, right


def proposed(user: str, text: str) -> tuple:
    return tasks.parse_question(mae.proposed_question(text)) is not None, True


def said_score(text: str) -> float | None:
    found = last(r"Score: \\boxed\{([\d.]+)\}", text)
    return float(found) if found else None


def graded(user: str, text: str) -> tuple:
    question = problem(user)
    row = {"question": question, "answer": str(tasks.gold_answer(question))}
    return said_score(text), truth_of(row, user.partition("Solution:")[2])[0]


def regraded(user: str, text: str) -> tuple:
    claims = re.findall(r"\d+", re.search(r"Defects: (.*)", user)[1])
    faulty = [k for k, step in enumerate(split_steps(user), start=1) if not holds(step)]
    return said_score(text), meta_truth(tuple(map(int, claims)), faulty)


def graded_itself(user: str, text: str) -> tuple:
    solution, _, own = text.partition("## Self Evaluation")
    return graded(f"Problem: {user.splitlines()[0]}\nSolution:\n{solution}", own)


def solved_again(user: str, text: str) -> tuple:
    return is_correct(text, str(tasks.gold_answer(problem(user)))), True


def better(user: str, text: str) -> tuple:
    said = last(r"\\boxed\{(1|2|tie)\}", text)
    solutions = re.split(r"Solution(?: \d)?:\n", user)[1:]
    wrong = [tasks.gold_steps(problem(user), solution).count(False) for solution in solutions]
    return said, "tie" if wrong[0] == wrong[1] else str(1 + (wrong[0] > wrong[1]))


def corrupted(user: str, text: str) -> tuple:
    step = split_steps(text)
    return bool(step) and tasks.STEP.fullmatch(step[0]) is not None and not holds(step[0]), True


PARTS = {  # name -> (demonstration, what is said and true, whether the mean is over classes)
    "slice sound or not (gar), balanced": ("discriminate", sound, True),
    "right or not, at once (genrm), balanced": ("is_right", right_at_once, True),
    "answer right or not (mae), balanced": ("judge_answer", scored, True),
    "questions with an answer (mae)": ("propose", proposed, False),
    "score of a solution (deepseekmath)": ("grade", graded, False),
    "score of an analysis (deepseekmath)": ("grade_analysis", regraded, False),
    "own score of an own solution (deepseekmath)": ("solve_and_grade", graded_itself, False),
    "a solution corrected after a verdict": ("correct", solved_again, False),
    "after an own first try": ("try_again", solved_again, False),
    "after another player's": ("reconsider", solved_again, False),
    "the right one of two solutions (self_taught)": ("choose", better, False),
    "the sounder one of two, or a tie": ("compare", better, False),
    "a right step made wrong": ("corrupt", corrupted, False),
}


def held_out_part(part, count: int) -> list[str]:
    """User messages of a part, as in training but on what the model has never seen."""
    draw = random.Random(0)
    with ExitStack() as patches:
        for module in (demonstrations, program_demonstrations, repairs):  # which draw the questions
            other = patch.object(module, "is_held_out", lambda text: not tasks.is_held_out(text))
            patches.enter_context(other)
        return [part(draw, 1)[0] for _ in range(count)]


def measure() -> dict:
    play, parts = player("tiny"), {}

    def note(name: str, column: str, found: dict, constant: float | None = None):
        parts.setdefault(name, {"constant": constant})[column] = found

    for level, lengths in tasks.LEVELS.items():
        asked = tasks.sample_questions(0, TASKS, held_out=True, steps=lengths)
        torch.manual_seed(0)
        right, _, solutions = solving(play, asked, 1.0, 1)  # judged at all temperatures
        constant = most_frequent([tasks.gold_answer(question) for question in asked])
        for column, temperature in TEMPERATURES.items():
            torch.manual_seed(1)
            answers, steps, _ = solving(play, asked, temperature, SAMPLES if temperature else 1)
            note(f"{level}: answers", column, share(answers), constant)
            note(f"{level}: steps", column, share(steps))
            verdicts = verifying(play, asked, solutions, right, temperature)
            for name, judged in verdicts.items():
                note(f"{level}: {name}", column, *judged)
    for name, (part, truth, over_classes) in PARTS.items():
        users = held_out_part(getattr(demonstrations, part), TASKS)
        for column, temperature in TEMPERATURES.items():
            some = [user for user in users for _ in range(SAMPLES if temperature else 1)]
            torch.manual_seed(1)
            texts = play([[{"role": "user", "content": user}] for user in some], temperature)
            said, true = map(list, zip(*[truth(*pair) for pair in zip(some, texts)]))
            if over_classes:
                note(name, column, balanced(said, true), 0.5)
            else:
                best = most_frequent(true) if len(set(true)) > 1 else None
                note(name, column, share([s == t for s, t in zip(said, true)]), best)
    return parts


def main():
    torch.set_num_threads(1)
    parts = measure()
    for name, found in parts.items():
        cells = [f"{100 * found[column]['value']:6.1f}" for column in TEMPERATURES]
        best = found["constant"]
        print(f"{name:55}", *cells, "" if best is None else f"  best constant {100 * best:.0f}")
    result = {"tasks": TASKS, "samples": SAMPLES, "parts": parts}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
