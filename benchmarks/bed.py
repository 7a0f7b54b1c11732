"""What can the embedded model do before any training? python benchmarks/bed.py

Every part that a script has it play, on held-out tasks: sampled at temperature 1 as in training, at
0.5, and greedily, beside what the best constant answer scores. A part that is nearly perfect when
decoded greedily has only its temperature to learn. Writes docs/evidence/bed.json and the table of
docs/test-bed.md; takes three minutes on one core.
"""

import argparse
import json
import random
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
from common.tiny import tasks  # noqa: E402

import torch  # noqa: E402
from evidence_pages import fill  # noqa: E402

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "docs" / "evidence" / "bed.json", ROOT / "docs" / "test-bed.md"
TEMPERATURES = {"sampled": 1.0, "T = 0.5": 0.5, "greedy": 0.0}
COUNT, SAMPLES = 256, 4  # held-out tasks of each part, completions of each at temperatures above 0
INPUTS = [str(x) for x in range(10)]


class Player:
    """The embedded model, without an adapter."""

    def __init__(self):
        self.model, self.tokenizer = load_model("tiny", ["unused"], 1, False, seed=0)

    def __call__(self, prompts: list, temperature: float, tokens: int = 96) -> list[str]:
        ids = [self.tokenizer.apply_chat_template(p, add_generation_prompt=True) for p in prompts]
        ids = [row["input_ids"] if not isinstance(row, list) else row for row in ids]
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
    texts = play([tango.solve_prompt(q) for q in questions for _ in range(n)], temperature, 64)
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
    """Answers, every second one right, the others one too high."""
    gold = [tasks.gold_answer(q) for q in questions]
    right = [i % 2 == 0 for i in range(len(questions))]
    shown = [str(g if r else (g + 1) % 10) for g, r in zip(gold, right)]
    asked = [mae.judge_answer_prompt(q, a) for q, a in zip(questions, shown)]
    V = [mae.judge_score(text) for text in play(asked, temperature)]
    return balanced([None if v is None else v >= 0.5 for v in V], right)


# ------------------------------------------------------------------ the table
def measure(count: int) -> dict:
    play = Player()
    questions = tasks.sample_questions(0, count, held_out=True)
    programs = tasks.sample_tasks(0, count, held_out=True)
    torch.manual_seed(0)
    solutions = solving(play, questions, 1.0, 1)[2]  # to be judged: the same at all temperatures
    answers = [tasks.gold_answer(q) for q in questions]
    marks = [label for q, s in zip(questions, solutions) for label in tasks.gold_steps(q, s)]
    wrong = marks.count(False)
    constant = {
        "answers (solve)": most_frequent(answers),
        "steps (solve)": None,
        "final verdict (tango's verifier), balanced": 0.5,
        "wrong steps found (tango's verifier), F1": 2 * wrong / (len(marks) + wrong),
        "slice sound or not (gar's discriminator), balanced": 0.5,
        "programs (cure's coder)": None,
        "tests (cure's tester)": None,
        "questions with an answer (mae's proposer)": None,
        "answer right or not (mae's judge), balanced": 0.5,
    }
    parts = {name: {"constant": value} for name, value in constant.items()}
    with Sandbox(1) as sandbox:
        for column, temperature in TEMPERATURES.items():
            n = SAMPLES if temperature else 1
            torch.manual_seed(1)
            found = [
                *solving(play, questions, temperature, n)[:2],
                *verifying(play, questions, solutions, temperature),
                discriminating(play, questions, solutions, temperature),
                coding(play, programs, temperature, n, sandbox),
                testing(play, programs, temperature, n),
                proposing(play, temperature, count if temperature else 1),
                scoring(play, questions, temperature),
            ]
            for name, value in zip(parts, found, strict=True):
                parts[name][column] = value
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
