"""Questions with answers, from the embedded tasks, a JSONL file or the Hugging Face hub: rows {question, answer, reference}.

Every source is split into a training part and a held-out part that never overlap. `load_questions` raises `UserError`
with one sentence, naming argument, file and row, for anything a user can get wrong.
"""

import hashlib
import json
import random
import re
from pathlib import Path

from common.tiny import tasks

QUESTION_COLUMNS = ("question", "problem", "prompt")
ANSWER_COLUMNS = ("answer", "solution", "reward_model", "ground_truth")


class UserError(Exception):
    """Something the user can put right. Scripts print the message and end with exit code 2, without a stack trace."""


def load_questions(dataset: str, train_count: int, held_out_count: int, seed: int) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows), each row {"question": str, "answer": str, "reference": str}, the last one a solution
    written out, as the data set has it, or "".

    Args:
        dataset: "tiny" (the embedded chains of arithmetic, as many as asked for), a path to a .jsonl file, or a hub id
            (openai/gsm8k; PRIME-RL/Eurus-2-RL-Data and its like). A hub dataset's own test or validation split is the
            held-out part if it has one; otherwise a question's hash decides, so that a question never changes sides.
        train_count: at most this many training rows, drawn from all (the embedded tasks: exactly this many).
        held_out_count: at most this many held-out rows, likewise.
        seed: of the training questions that are drawn. Held-out questions do not depend on it.
    """
    if dataset == "tiny":
        # the seed of the held-out part is fixed: runs with different seeds are measured on the same questions
        train = tasks.sample_questions(seed + 1, train_count, held_out=False)
        held_out = tasks.sample_questions(0, held_out_count, held_out=True)
        return [_tiny_row(q) for q in train], [_tiny_row(q) for q in held_out]
    raw, raw_held_out = read_rows(dataset)
    rows, held_out = ([_read_row(row, where) for where, row in part if _is_math(row)] for part in (raw, raw_held_out))
    rows, held_out = split(rows, held_out, dataset)
    random.Random(seed).shuffle(rows)  # files are often sorted, by difficulty say
    random.Random(0).shuffle(held_out)
    return rows[:train_count], held_out[:held_out_count]


def split(rows: list[dict], held_out: list[dict], dataset: str) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows) without a question in common. Without a held-out part of its own, a tenth is held out."""
    if not held_out:
        rows, held_out = [r for r in rows if not _held_out(r)], [r for r in rows if _held_out(r)]
    else:  # a question that stands in both splits is held out
        taken = {row["question"] for row in held_out}
        rows = [row for row in rows if row["question"] not in taken]
    if not rows or not held_out:
        raise UserError(f"--dataset {dataset}: {len(rows)} training and {len(held_out)} held-out questions; both are needed.")
    return rows, held_out


def _tiny_row(question: str) -> dict:
    return {"question": question, "answer": str(tasks.gold_answer(question)), "reference": tasks.gold_solution(question)}


def _held_out(row: dict) -> bool:
    """A tenth of all questions, decided by the question's own text."""
    return hashlib.blake2b(row["question"].encode(), digest_size=2).digest()[0] % 10 == 0


def read_rows(dataset: str) -> tuple[list[tuple[str, dict]], list[tuple[str, dict]]]:
    """(training part, held-out part or nothing) of a .jsonl file or a hub data set, each row with the words that name it in an
    error message."""
    return (read_jsonl(Path(dataset)), []) if dataset.endswith((".jsonl", ".json")) else _read_hub(dataset)


def read_jsonl(path: Path, argument: str = "--dataset") -> list[tuple[str, dict]]:
    """The objects of a JSON Lines file in UTF-8, with or without a byte-order mark, each with the words that name it."""
    if not path.is_file():
        raise UserError(f"{argument} {path}: there is no such file.")
    rows = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines, which also cuts at U+2028 in a text
    except UnicodeDecodeError as error:
        raise UserError(f"{argument} {path}: not a UTF-8 text file (byte {error.start}).") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # half a character, \ud83d alone, is no text
        except json.JSONDecodeError as error:
            raise UserError(f"{argument} {path}: row {number} is not JSON ({error.msg} at column {error.colno}).") from None
        except (ValueError, RecursionError):
            raise UserError(
                f"{argument} {path}: row {number} cannot be read: half a character, a number too long, or far too deep."
            ) from None
        if not isinstance(row, dict):
            raise UserError(f"{argument} {path}: row {number} is not a JSON object.")
        rows.append((f"{path}: row {number}", row))
    return rows


def _read_hub(name: str) -> tuple[list[tuple[str, dict]], list[tuple[str, dict]]]:
    from datasets import load_dataset  # slow to import, and not needed by the default

    try:
        # gsm8k names its one configuration "main"
        splits = load_dataset(name, "main") if name.endswith("gsm8k") else load_dataset(name)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"--dataset {name}: not 'tiny', not a .jsonl file, and the hub could not give it ({reason}).") from None
    if "train" not in splits:
        raise UserError(f"--dataset {name}: it has no 'train' split, only {', '.join(splits)}.")
    held = next((splits[s] for s in ("test", "validation") if s in splits), [])
    rows = [(f"{name}: train row {i}", row) for i, row in enumerate(splits["train"])]
    return rows, [(f"{name}: held-out row {i}", row) for i, row in enumerate(held)]


def _is_math(row: dict) -> bool:
    return row.get("ability", "math") == "math"  # Eurus-2-RL-Data also holds programming tasks


def _read_row(row: dict, where: str) -> dict:
    question = next((row[c] for c in QUESTION_COLUMNS if row.get(c)), None)
    answer = next((row[c] for c in ANSWER_COLUMNS if row.get(c) is not None), None)
    if isinstance(question, list):  # a conversation: its last user message
        question = next((m.get("content") for m in reversed(question) if isinstance(m, dict) and m.get("role") == "user"), None)
    if isinstance(answer, dict):  # Eurus-2-RL-Data: {"ground_truth": ..., "style": "rule"}
        answer = answer.get("ground_truth")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"--dataset {where} has no question (one of the columns {', '.join(QUESTION_COLUMNS)}).")
    if answer is None:
        raise UserError(f"--dataset {where} has no answer (one of the columns {', '.join(ANSWER_COLUMNS)}).")
    answer, reference = str(answer), row.get("reference") or row.get("solution") or ""
    if "####" in answer:  # GSM8K: reasoning, then "#### 1,234"
        reference = reference or re.sub(r"<<.*?>>", "", answer)  # without the calculator's marks
        answer = answer.rsplit("####", 1)[1].replace(",", "")
    answer = re.sub(r"^\\boxed\{(.*)\}$", r"\1", answer.strip())
    if not answer:
        raise UserError(f"--dataset {where} has an empty answer.")
    return {"question": question.strip(), "answer": answer, "reference": reference if isinstance(reference, str) else ""}


def are_new(questions: list[str], pool: list[str], n: int = 10) -> list[bool]:
    """Whether less than half of a question's n-grams, runs of n words or symbols, occur in the pool. With n = 10, embedded
    questions drawn afresh are 96 % new to a pool of 2,000; the words of a shorter question are its one n-gram."""
    words = [re.findall(r"\w+|[^\w\s]", text.lower()) for text in questions + pool]
    grams = [{tuple(w[i : i + n]) for i in range(max(1, len(w) - n + 1))} for w in words]
    known = set().union(*grams[len(questions) :])
    return [2 * len(own & known) < len(own) for own in grams[: len(questions)]]
