"""What can the embedded model do before any training? python benchmarks/bed.py

Every part that a script has it play, on held-out tasks: sampled at temperature 1 as in training, at
0.5, and greedily, beside what the best constant answer scores. A part that is nearly perfect when
decoded greedily has only its temperature to learn. Writes docs/evidence/bed.json and the table of
docs/test-bed.md; takes three minutes on one core.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import cure  # noqa: E402
import gar  # noqa: E402
import mae  # noqa: E402
import tango  # noqa: E402
from common.model import load_model  # noqa: E402
from common.run import mean  # noqa: E402
from common.sampling import sample  # noqa: E402
from common.sandbox import Sandbox, Status  # noqa: E402
from common.tasks.answers import is_correct, split_steps  # noqa: E402
from common.tiny import MODELS, demonstrations, tasks  # noqa: E402
from common.tiny.tasks import function_operations  # noqa: E402

import torch  # noqa: E402
from evidence_pages import fill  # noqa: E402

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "docs" / "evidence" / "bed.json", ROOT / "docs" / "test-bed.md"
TEMPERATURES = {"sampled": 1.0, "T = 0.5": 0.5, "greedy": 0.0}
COUNT, SAMPLES = 256, 4  # held-out tasks of each part, completions of each at temperatures above 0
INPUTS = [str(x) for x in range(10)]


class Player:
    """An embedded model, without an adapter."""

    def __init__(self, name: str):
        self.model, self.tokenizer = load_model(name, ["unused"], 1, False, seed=0)

    def __call__(self, prompts: list, temperature: float, tokens: int = 112) -> list[str]:
        options = {"add_generation_prompt": True, "return_dict": True}
        ids = [self.tokenizer.apply_chat_template(p, **options)["input_ids"] for p in prompts]
        written, eos = [], [self.tokenizer.eos_token_id]
        with self.model.disable_adapter():
            for start in range(0, len(ids), 256):
                part = ids[start : start + 256]
                pad = self.tokenizer.pad_token_id
                written += sample(self.model, part, tokens, temperature, eos, pad)[0]
        return self.tokenizer.batch_decode(written, skip_special_tokens=True)


# ------------------------------------------------------------------ measures
def share(hits: list[bool]) -> dict:
    return {"value": mean(hits), "n": len(hits)}


def balanced(said: list[bool | None], truth: list[bool]) -> dict:
    """Mean over both classes; what cannot be read is wrong in its class. A constant scores 0.5."""
    classes = [[s is t for s, t in zip(said, truth) if t is label] for label in (True, False)]
    return {"value": mean([mean(hits) for hits in classes if hits]), "n": len(said)}


def most_frequent(values: list) -> float:
    return Counter(values).most_common(1)[0][1] / len(values)


# ------------------------------------------------------------------ parts
def solving(play, questions: list[str], temperature: float, n: int) -> tuple[dict, dict, list[str]]:
    """Answers and single steps; and the texts."""
    texts = play([tango.solve_prompt(q) for q in questions for _ in range(n)], temperature, 80)
    asked = [q for q in questions for _ in range(n)]
    right = [is_correct(text, str(tasks.gold_answer(q))) for q, text in zip(asked, texts)]
    steps = [label for q, text in zip(asked, texts) for label in tasks.gold_steps(q, text)]
    return share(right), share(steps), texts


def verifying(play, questions, solutions, temperature: float) -> tuple[dict, dict]:
    """Final verdicts and wrong steps found, on solutions that the model itself has sampled."""
    asked = [tango.verify_prompt(q, s) for q, s in zip(questions, solutions)]
    texts = play(asked, temperature)
    right = [is_correct(s, str(tasks.gold_answer(q))) for q, s in zip(questions, solutions)]
    finals = [tango.parse_judgement(text)[1] for text in texts]
    f1 = tango.step_f1(questions, solutions, texts)
    return balanced(finals, right), {"value": f1, "n": len(texts)}


def discriminating(play, questions, solutions, temperature: float) -> dict:
    """YES to slices of one step whose step is right, NO to the others."""
    draw, asked, sound = random.Random(0), [], []
    for question, solution in zip(questions, solutions):
        steps = split_steps(solution)
        if steps:
            k = draw.randrange(len(steps))
            asked.append(gar.judge_prompt(question, f"<step>{steps[k]}</step>\n"))
            sound.append(tasks.step_labels(question, steps)[k])
    texts = play(asked, temperature)
    return balanced([gar.parse_verdict(text) == 1 for text in texts], sound)


def coding(play, questions, temperature: float, n: int, sandbox) -> dict:
    texts = play([cure.code_prompt(q) for q in questions for _ in range(n)], temperature)
    programs = [cure.parse_program(text) for text in texts]
    runs = sandbox.run(
        [program or "raise" for program in programs for _ in INPUTS], INPUTS * len(programs)
    )
    right = []
    for i, _ in enumerate(programs):
        found = runs[i * len(INPUTS) : (i + 1) * len(INPUTS)]
        wanted = [tasks.program_output(questions[i // n], int(x)) for x in INPUTS]
        shown = [r.output.decode(errors="replace").strip() for r in found]
        fine = all(r.status is Status.OK for r in found)
        right.append(fine and shown == [str(number) for number in wanted])
    return share(right)


def testing(play, questions, temperature: float, n: int) -> dict:
    texts = play([cure.test_prompt(q) for q in questions for _ in range(n)], temperature, 128)
    right = []
    for i, text in enumerate(texts):
        test = cure.parse_test(text)
        try:
            right.append(int(test[1]) == tasks.program_output(questions[i // n], int(test[0])))
        except (TypeError, ValueError):
            right.append(False)
    return share(right)


def proposing(play, temperature: float, count: int) -> dict:
    """Questions with an answer. Greedily there is only one, whatever it is worth."""
    texts = play([mae.propose_prompt(None)] * count, temperature)
    asked = [mae.proposed_question(text) for text in texts]
    return share([tasks.parse_question(question) is not None for question in asked])


def scoring(play, questions, temperature: float) -> dict:
    """Answers, every second one right, the others a player's wrong one."""
    draw = random.Random(0)
    right = [i % 2 == 0 for i in range(len(questions))]
    shown = [
        str(tasks.gold_answer(q) if r else wrong_answer(draw, q)) for q, r in zip(questions, right)
    ]
    asked = [mae.judge_answer_prompt(q, a) for q, a in zip(questions, shown)]
    V = [mae.judge_score(text) for text in play(asked, temperature)]
    return balanced([None if v is None else v >= 0.5 for v in V], right)


def wrong_answer(draw, question: str) -> int:
    while True:
        answer = demonstrations.write_steps(draw, *tasks.parse_question(question), 1)[1]
        if answer != tasks.gold_answer(question):
            return answer


# ------------------------------------------------------------------ parts of scripts to come, whose
# prompts are the demonstrations'
def held_out_part(part, count: int) -> list[str]:
    """User messages of a part on questions and programs that the model has never seen."""
    draw, train = random.Random(0), demonstrations.is_held_out
    demonstrations.is_held_out = lambda text: not train(text)
    try:
        return [part(draw, 0)[0] for _ in range(count)]
    finally:
        demonstrations.is_held_out = train


def other_part(play, part, fine, temperature: float, n: int, count: int) -> dict:
    """Share of completions for which fine(user message, completion) holds."""
    users = [user for user in held_out_part(part, count) for _ in range(n)]
    texts = play([[{"role": "user", "content": user}] for user in users], temperature, 128)
    return share([fine(user, text) for user, text in zip(users, texts)])


def deduced(user: str, text: str) -> bool:
    x, said = int(re.search(r"Input: (\d+)", user)[1]), re.search(r"```output\n(\d+)\n```", text)
    return said is not None and int(said[1]) == demonstrations.run(x, function_operations(user))


def abduced(user: str, text: str) -> bool:
    y, said = int(re.search(r"Output: (\d+)", user)[1]), re.search(r"```input\n(\d+)\n```", text)
    return said is not None and demonstrations.run(int(said[1]), function_operations(user)) == y


def induced(user: str, text: str) -> bool:
    pairs, operations = re.findall(r"(\d+)->(\d+)", user), function_operations(text)
    return bool(operations) and all(
        demonstrations.run(int(x), operations) == int(y) for x, y in pairs
    )


def proposed(user: str, text: str) -> bool:
    """A program that can be run, and an input."""
    return bool(function_operations(text)) and re.search(r"```input\n\d+\n```", text) is not None


def shown(user: str) -> tuple[list[str], int, int]:
    """The solution in a prompt: (steps, answer, gold answer)."""
    question, answer = re.search(r"Problem: (.*)", user)[1], re.search(r"\\boxed\{(\d+)\}", user)[1]
    return split_steps(user), int(answer), tasks.gold_answer(question)


def holds(step: str) -> bool:
    a, op, b, claimed = demonstrations.parse_step(step)
    return tasks.OPERATORS[op](a, b) == claimed


def graded(user: str, text: str) -> bool:
    """1 for a right answer with right steps, 0.5 for one with a wrong step, 0 for a wrong one."""
    steps, answer, gold = shown(user)
    truth = "0" if answer != gold else "1" if all(map(holds, steps)) else "0.5"
    return f"Score: \\boxed{{{truth}}}" in text


def regraded(user: str, text: str) -> bool:
    steps = shown(user)[0]
    claims = re.findall(r"\d+", re.search(r"Defects: (.*)", user)[1])
    real = [not holds(steps[int(k) - 1]) for k in claims]
    truth = "1" if all(real) else "0.5" if any(real) else "0"
    return f"Score: \\boxed{{{truth}}}" in text


def graded_itself(user: str, text: str) -> bool:
    """Whether its own score of its own solution is the true one."""
    solution, _, own = text.partition("## Self Evaluation")
    answer = re.search(r"\\boxed\{(\d+)\}", solution)
    if not answer or not split_steps(solution):
        return False
    try:
        return graded(f"Problem: {user}\n{solution}", own)
    except (ValueError, StopIteration):  # a step that is none
        return False


def corrected(user: str, text: str) -> bool:
    return is_correct(text, str(shown(user)[2]))


def chosen(user: str, text: str) -> bool:
    gold = str(tasks.gold_answer(re.search(r"Problem: (.*)", user)[1]))
    solutions = re.split(r"Solution \d:\n", user)[1:]
    right = 1 + [is_correct(solution, gold) for solution in solutions].index(True)
    return f"\\boxed{{{right}}}" in text


OTHER_PARTS = {  # name -> (model, demonstration, check, best constant)
    "output of a program (azr)": ("tiny-programs", "deduce", deduced, None),
    "input of a program (azr)": ("tiny-programs", "abduce", abduced, None),
    "program from examples (azr)": ("tiny-programs", "induce", induced, None),
    "proposed programs that run (azr)": ("tiny-programs", "propose_program", proposed, None),
    "score of a solution (deepseekmath)": ("tiny", "grade", graded, 0.34),
    "score of an analysis (deepseekmath)": ("tiny", "grade_analysis", regraded, None),
    "own score of an own solution (deepseekmath)": ("tiny", "solve_and_grade", graded_itself, None),
    "a solution corrected after a verdict": ("tiny", "correct", corrected, None),
    "the right one of two solutions": ("tiny", "choose", chosen, 0.5),
}


# ------------------------------------------------------------------ the table
def measure(count: int) -> dict:
    players = {name: Player(name) for name in MODELS}
    play, programs = players["tiny"], players["tiny-programs"]
    asked = {
        level: tasks.sample_questions(0, count, held_out=True, steps=lengths)
        for level, lengths in tasks.LEVELS.items()
    }
    questions, testing_tasks = asked["tiny"], tasks.sample_tasks(0, count, held_out=True)
    torch.manual_seed(0)
    # to be judged: the same solutions at all temperatures
    solutions = {level: solving(play, asked[level], 1.0, 1)[2] for level in asked}
    parts = {}

    def note(name: str, column: str, found: dict, constant: float | None = None):
        parts.setdefault(name, {"constant": constant})[column] = found

    with Sandbox(1) as sandbox:
        for column, temperature in TEMPERATURES.items():
            n = SAMPLES if temperature else 1
            torch.manual_seed(1)
            for level, some in asked.items():
                answers, steps, _ = solving(play, some, temperature, n)
                note(
                    f"answers, {level}",
                    column,
                    answers,
                    most_frequent([tasks.gold_answer(q) for q in some]),
                )
                note(f"steps, {level}", column, steps)
            for level, some in asked.items():
                finals, f1 = verifying(play, some, solutions[level], temperature)
                pairs = zip(some, solutions[level])
                marks = [label for q, s in pairs for label in tasks.gold_steps(q, s)]
                wrong = marks.count(False)
                note(f"final verdict (tango), {level}, balanced", column, finals, 0.5)
                all_wrong = 2 * wrong / (len(marks) + wrong)
                note(f"wrong steps found (tango), {level}, F1", column, f1, all_wrong)
            slices = discriminating(play, questions, solutions["tiny"], temperature)
            note("slice sound or not (gar), balanced", column, slices, 0.5)
            note(
                "programs (cure)", column, coding(programs, testing_tasks, temperature, n, sandbox)
            )
            note("tests (cure)", column, testing(programs, testing_tasks, temperature, n))
            note(
                "questions with an answer (mae)",
                column,
                proposing(play, temperature, count if n > 1 else 1),
            )
            note(
                "answer right or not (mae), balanced",
                column,
                scoring(play, questions, temperature),
                0.5,
            )
            for name, (model, part, fine, constant) in OTHER_PARTS.items():
                part = getattr(demonstrations, part)
                found = other_part(players[model], part, fine, temperature, n, count)
                note(name, column, found, constant)
            print(column, {k: round(v[column]["value"], 3) for k, v in parts.items()}, flush=True)
    return {"tasks": count, "samples": SAMPLES, "parts": parts}


def table(result: dict) -> str:
    percent = lambda value: "-" if value is None else f"{100 * value:.0f}"  # noqa: E731
    lines = ["| part | sampled | T = 0.5 | greedy | best constant |", "|---|---|---|---|---|"]
    for name, found in result["parts"].items():
        cells = [percent(found[column]["value"]) for column in TEMPERATURES]
        lines.append(f"| {' | '.join([name, *cells, percent(found['constant'])])} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=COUNT, help="of each part")
    parser.add_argument("--table-only", action="store_true", help="measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.table_only:
        RESULT.write_text(json.dumps(measure(args.tasks), indent=1) + "\n")
    fill(PAGE, "table: bed", table(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    main()
