"""What a pretrained verifier accepts: python -m lab.runs.form runs/form

Two kinds of solutions to MAWPS's held-out questions are judged, once each at temperature 1: made
ones, as `demonstrations.judged` makes them for the warm-up, so that it is known what is wrong with
them; and those that runs/warm writes (lab/notes/warm-up.md). The last block of a judgement may name
a missing step; then the final verdict can differ from the AND of the step verdicts. Figures and
texts go to lab/evidence/pretrained_form.json, under the model's name. One CPU thread:
a quarter of an hour.
"""

import json
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

from common.core.draws import row_key
from common.core.lists import chunk
from common.core.model import tokenize
from common.fast import generate
from common.run.models import load_model
from common.tasks.answers import is_correct, solve_prompt, split_steps
from common.tasks.demonstrations import COMPLETE, EQUATION, judged, reworded
from common.tasks.math import load_questions
from common.tasks.references import OPERATIONS
from lab import EVIDENCE, ROOT
from tango import parse_judgement, verify_prompt

import torch

OF_SEVERAL, MOST = ("right, two or more", "too short, true sums"), 32
OUT = EVIDENCE / "pretrained_form.json"


def holds(step: str) -> bool:
    """Whether a step has equations, and all are true."""
    found = EQUATION.findall(step)
    try:
        sums = [OPERATIONS[sign](float(a), float(b)) - float(r) for a, sign, _, b, r in found]
    except ArithmeticError:
        return False
    return bool(sums) and all(abs(x) < 1e-6 for x in sums)


def kind(row: dict) -> str:
    steps = split_steps(row["solution"])
    if row["right"]:
        return "right, one operation" if row["operations"] == 1 else "right, two or more"
    if not all(map(holds, steps)) or not steps:
        return "a false sum"
    return "too short, true sums" if len(steps) < row["operations"] else "wrong operation"


def made(rows: list[dict]) -> list[dict]:
    """Of each question one solution of each kind that there is of it; but of the kinds that
    questions of one operation have, too, MOST in all.
    """
    rng, found, counts = random.Random(1), {}, Counter()
    for row in rows:
        for _ in range(16):
            pair = judged(row["question"], reworded(row["reference"], rng), rng)
            if not pair:
                continue
            solution = row | {"solution": pair[0], "right": is_correct(pair[0], row["answer"])}
            what = kind(solution)
            full = what not in OF_SEVERAL and counts[what] >= MOST
            if (row["question"], what) not in found and not full:
                found[row["question"], what] = solution
                counts[what] += 1
    return list(found.values())


class Writer:
    def __init__(self, name: str):
        self.model, self.tokenizer = load_model(name, ["player"], 16, False, 0)
        self.model.eval()
        for parameter in self.model.parameters():  # the adapter does nothing
            parameter.data = parameter.data.bfloat16()
        head = self.model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.float(), requires_grad=False)

    def write(self, prompts: list, limit: int, what: str) -> list[str]:
        keys, ids = [row_key(what, i) for i in range(len(prompts))], []
        ends = [self.tokenizer.eos_token_id]
        for part, its in zip(chunk(tokenize(prompts, self.tokenizer), 64), chunk(keys, 64)):
            with torch.autocast("cpu", torch.bfloat16):
                ids += generate(self.model, part, limit, 1.0, ends, its)[0]
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)


def judge(writer: Writer, rows: list[dict], what: str) -> list[dict]:
    prompts = [verify_prompt(row["question"], row["solution"]) for row in rows]
    found = []
    for row, text in zip(rows, writer.write(prompts, 144, what)):
        verdicts, final = parse_judgement(text)
        kept = {k: row[k] for k in ("question", "operations", "solution")}
        found.append(kept | {"kind": kind(row), "judgement": text} | said(row, verdicts, final))
    return found


def said(row: dict, verdicts: list[bool], final: bool | None) -> dict[str, bool]:
    """What the reward of few_labels.py and the table ask of a judgement."""
    steps = len(verdicts) == len(split_steps(row["solution"])) > 0 and all(verdicts)
    differs = final is not None and bool(verdicts) and final != all(verdicts)
    return {"steps": steps, "final": final is True, "differs": differs}


def table(rows: list[dict]) -> dict[str, dict]:
    """Kind -> counts."""
    kinds = defaultdict(list)
    for row in rows:
        kinds[row["kind"]].append(row)
    return {
        name: {
            "solutions": len(of_one),
            "all steps accepted": sum(row["steps"] for row in of_one),
            "accepted": sum(row["steps"] and row["final"] for row in of_one),
            "final verdict differs": sum(row["differs"] for row in of_one),
            "names a missing step": sum(
                "is missing" in row["judgement"].replace(COMPLETE, "") for row in of_one
            ),
        }
        for name, of_one in sorted(kinds.items())
    }


def main(name: str):
    rows = load_questions(str(ROOT / "mawps.jsonl"), 10**9, 256, 0)[1]
    rows = [row | {"operations": len(split_steps(row["reference"]))} for row in rows]
    kept = json.loads(OUT.read_text()) if OUT.exists() else {}
    if "solutions" not in kept:  # of the start, whichever model is looked at first
        texts = Writer("runs/warm").write([solve_prompt(r["question"]) for r in rows], 64, "solve")
        kept["solutions"] = texts
    own = [
        row | {"solution": text, "right": is_correct(text, row["answer"])}
        for row, text in zip(rows, kept["solutions"])
    ]
    writer, found = Writer(name), {}
    for what, solutions in (("made", made(rows)), ("own", own)):
        texts = judge(writer, solutions, what)
        found[what] = {"table": table(texts), "texts": texts}
        kept[Path(name).name] = found
        OUT.write_text(json.dumps(kept, indent=1) + "\n")
        print(what, json.dumps(found[what]["table"], indent=1), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
