"""Questions with answers: rows {question, answer, reference} for training and for evaluation.

The questions come from common/tiny, from a JSONL file or from the Hugging Face hub. No question is
in both parts. Whatever a user can get wrong is a `UserError`: one sentence that names the argument,
the file and the row.
"""

import difflib
import hashlib
import json
import math
import os
import random
import re
import reprlib
from pathlib import Path

from common.core.errors import UserError, say
from common.tasks.answers import boxed, is_correct
from common.tasks.references import render, solve_equation
from common.tiny import tasks

QUESTION_COLUMNS = ("question", "problem", "prompt")
ANSWER_COLUMNS = ("answer", "solution", "reward_model", "ground_truth")
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""what `ast` raises for a text that is no Python, or signs and brackets by the thousand"""
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(?<!\.csv)(?<!\.parquet)(?<!\.gz)")
MOST_TINY = 100_000  # questions of common/tiny in a run


def load_questions(
    dataset: str, train_count: int, held_out_count: int, seed: int, file: str | None = None
) -> tuple[list[dict], list[dict]]:
    """Returns (training rows, held-out rows), each {"question": str, "answer": str, "reference":
    str}.

    The reference is the row's own. If it has none, the reference is its solution, in the form that
    the prompts ask for (see references.py); or else the steps of its equation, if these end in the
    answer; or else "".

    Args:
        dataset: "tiny", "tiny-hard" or "tiny-long" (chains of arithmetic from common/tiny, as many
            as wanted), a path to a .jsonl file, or a hub id (openai/gsm8k, or a data set like
            PRIME-RL/Eurus-2-RL-Data). A hub data set's own test or validation split is the held-out
            part if it has one. Otherwise a question's hash decides, so that a question never
            changes sides.
        train_count: the largest number of training rows, which are the first ones of a shuffled
            list: the rows of a smaller number come first, in the same order. Chains of arithmetic
            are exactly as many, at most MOST_TINY.
        held_out_count: the largest number of held-out rows.
        seed: random seed by which training questions are drawn. Held-out questions do not depend on
            it.
        file: --held-out, a .jsonl file whose rows are the held-out part instead.

    Raises:
        UserError: the data set or the file is missing, or a row of it cannot be used.
    """
    if dataset in tasks.LEVELS:
        lengths = tasks.LEVELS[dataset]
        # the held-out part has a seed of its own: all runs are measured on the same questions
        train_count = min(train_count, MOST_TINY)  # a long run meets them more than once
        train = tasks.sample_questions(seed + 1, train_count, held_out=False, steps=lengths)
        held_out = tasks.sample_questions(0, held_out_count, held_out=True, steps=lengths)
        return [_tiny_row(q) for q in train], [_tiny_row(q) for q in held_out]
    rows, held_out = (
        # Eurus-2-RL-Data also holds programming tasks
        {w: _read_row(row, w) for w, row in part if row.get("ability", "math") == "math"}
        for part in read_rows(dataset, file)
    )
    everything = held_out | rows
    odd = [where for where, row in everything.items() if is_sentence(row["answer"])]
    if odd:
        others = f", and {len(odd) - 1} more" if odd[1:] else ""
        answer = f"the answer {reprlib.repr(everything[odd[0]]['answer'])} reads like a sentence"
        say(f"warning: {odd[0]}{others}: {answer}; a boxed answer must equal all of it.")
    held_out, rows = without_copies(held_out), without_copies(rows)
    if copies := len(everything) - len(held_out) - len(rows):
        what = "rows repeat another one's question except for capitals, spaces or punctuation"
        say(f"--dataset {dataset}: {copies} {what}; left out.")
    warn_of_contradictions(everything)
    return split_held_out(rows, held_out, dataset, train_count, held_out_count, seed, file)


def load_for_steps(args, count: int | None = None) -> tuple[list[dict], list[dict]]:
    """Returns what `load_questions` does.

    count: the largest number of training rows; by default `count_for_steps`.
    """
    count = count_for_steps(args) if count is None else count
    return load_questions(args.dataset, count, args.eval_questions, args.seed, args.held_out)


def count_for_steps(args) -> int:
    """Returns how many training rows a run loads. It is the same on one process as on several, if
    together they ask as many questions in a step. A file or hub data set is loaded as a whole,
    because a script may leave out rows that it cannot use.
    """
    from accelerate import PartialState  # takes seconds, which --help does without

    if args.dataset not in tasks.LEVELS:
        return 10**9
    return args.steps * args.questions * PartialState().num_processes


def split_held_out(
    rows: list[dict],
    held_out: list[dict],
    dataset: str,
    train_count: int,
    held_out_count: int,
    seed: int,
    file: str | None,
) -> tuple[list[dict], list[dict]]:
    """Returns (training rows, held-out rows), which have no common question; the arguments are
    those of `load_questions`. If no row is held out, a tenth of the rows is. A printed line counts
    the training rows that are left out because their question is held out.
    """
    source = f"--held-out {file}" if file else f"--dataset {dataset}"
    if not held_out and not file:  # the question's own text decides
        everything, rows = rows, []
        for row in everything:
            digest = hashlib.blake2b(row["question"].encode(), digest_size=2).digest()
            (held_out if digest[0] % 10 == 0 else rows).append(row)
    else:
        taken, before = {same_question(row["question"]) for row in held_out}, len(rows)
        rows = [row for row in rows if same_question(row["question"]) not in taken]
        if len(rows) < before:
            say(f"{source}: {before - len(rows)} training rows have a held-out question; left out.")
    if not rows or not held_out:
        counts = f"{len(rows)} training and {len(held_out)} held-out questions"
        raise UserError(f"{source}: {counts}; both are needed.")
    if len(held_out) < held_out_count:
        counts = f"{len(held_out)} rows are held out, fewer than the {held_out_count} asked for"
        say(f"{source}: {counts}.")
    random.Random(seed).shuffle(rows)  # files are often sorted, by difficulty say
    random.Random(0).shuffle(held_out)
    return rows[:train_count], held_out[:held_out_count]


def without_copies(rows: dict[str, dict]) -> list[dict]:
    """Returns the first row of each question. MAWPS has hundreds of copies, which would be in both
    parts.

    rows: the words that name a row -> the row.
    """
    first = {}
    for row in rows.values():
        first.setdefault(same_question(row["question"]), row)
    return list(first.values())


def warn_of_contradictions(rows: dict[str, dict]):
    """Prints a warning if copies of a question have another answer than its first row."""
    first = {}
    pairs = [
        (first.setdefault(same_question(row["question"]), where), where)
        for where, row in rows.items()
    ]
    answers = {where: row["answer"] for where, row in rows.items()}
    wrong = [
        (read, where)
        for read, where in pairs
        if where != read and not is_correct(rf"\boxed{{{answers[where]}}}", answers[read])
    ]
    if wrong:
        read, where = wrong[0]
        say(
            f"warning: {where} contradicts {read}, which is read: the same question, but "
            f"{answers[where]:.40} for {answers[read]:.40} ({len(wrong)} such rows)"
        )


def is_sentence(answer: str) -> bool:
    """Whether an answer reads like a sentence, as "It is 4 marbles." does: it has three words or
    more, or a word with a full stop at its end.
    """
    words = re.findall(r"(?<!\\)\b[^\W\d_]{2,}\b\.?", answer)  # and not the commands of LaTeX
    return len(words) >= 3 or bool(words and words[-1].endswith(".") and "." == answer[-1])


def same_question(text: str) -> str:
    """Returns the same text for questions that differ only in capitals, spaces, quotes and
    punctuation.

    >>> same_question("It 's 1, 2 . Or 1.5 ?"), same_question("its 12. or 1.5?")
    ('its1 2or1.5', 'its12or1.5')
    """
    plain = re.sub(r"[\s,;:?!'’‘\"“”`]+|\.(?!\d)", " ", text.lower())
    return re.sub(r"(?<!\d) +| +(?!\d)", "", plain)


def _tiny_row(question: str) -> dict:
    return {
        "question": question,
        "answer": str(tasks.gold_answer(question)),
        "reference": tasks.gold_solution(question),
    }


def read_rows(
    dataset: str, file: str | None
) -> tuple[list[tuple[str, dict]], list[tuple[str, dict]]]:
    """Returns (training part, held-out part) of a .jsonl file or a hub data set. Every row comes
    with the words that name it in an error message. If `file` is given, the held-out part is its
    rows. The held-out part may be empty.

    Raises:
        UserError: there is no such data set or file, or it cannot be read.
    """
    given = read_jsonl(Path(file), "--held-out") if file else []
    if dataset in tasks.LEVELS:  # a level of questions, which `load_questions` makes
        raise UserError(f"--dataset {dataset}: programs have one level only, tiny.")
    if dataset.endswith((".jsonl", ".json")):
        return read_jsonl(Path(dataset)), given
    refuse_what_no_hub_has(dataset)
    from datasets import load_dataset  # takes two seconds, which a file does without

    try:
        # gsm8k names its one configuration "main"
        where = os.path.abspath(dataset) if os.path.isdir(dataset) else dataset  # "." has no name
        splits = load_dataset(where, "main" if dataset.endswith("gsm8k") else None)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem = "no data set could be made of this folder"
        if not os.path.isdir(dataset):
            known = " or ".join(tasks.LEVELS)
            problem = f"not {known}, not a .jsonl file, and the hub could not give it"
        raise UserError(f"--dataset {dataset}: {problem} ({reason}).") from None
    if "train" not in splits:
        raise UserError(f"--dataset {dataset}: it has no 'train' split, only {', '.join(splits)}.")
    held = next((splits[s] for s in ("test", "validation") if s in splits), [])
    name = f"--dataset {dataset}"
    rows = [(f"{name}: train row {i}", row) for i, row in enumerate(splits["train"])]
    return rows, given or [(f"{name}: held-out row {i}", row) for i, row in enumerate(held)]


def refuse_what_no_hub_has(dataset: str):
    """Raises UserError for a level that is spelt wrong, for a file of another kind than .jsonl, and
    for a path that leads nowhere.
    """
    if similar := difflib.get_close_matches(dataset, tasks.LEVELS, 1, cutoff=0.8):
        problem = f"there is no such data set; perhaps {similar[0]}?"
    elif not dataset.strip("/"):
        problem = "this names no data set."
    elif os.path.exists(dataset) and not os.path.isdir(dataset):
        problem = "of files only .jsonl is read, with a JSON object on every line."
    elif not os.path.exists(dataset) and not HUB_ID.fullmatch(dataset):
        problem = "there is no such file or folder."
    else:
        return
    raise UserError(f"--dataset {dataset}: {problem}")


def read_jsonl(path: Path, argument: str = "--dataset") -> list[tuple[str, dict]]:
    """Returns the objects of a JSON Lines file, each as (the words that name its row, the object).
    The file is UTF-8, with or without a byte-order mark.

    Raises:
        UserError: there is no such file, or a row of it is not a JSON object.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{argument} {path}: is not a file.")  # a pipe would be waited for
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{argument} {path}: there is no such file.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{argument} {path}: not a UTF-8 text file (byte {error.start}).") from None
    except (OSError, ValueError) as error:  # a name that is none
        raise UserError(f"{argument} {path}: cannot be read ({error}).") from None
    if text.lstrip().startswith("["):
        reason = "a JSON array; every row must be an object on a line of its own"
        raise UserError(f"{argument} {path}: row 1 is not a JSON object, but {reason}.")
    rows = []
    # not splitlines, which also cuts at U+2028 in a text
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # half a character, \ud83d, is no text
        except json.JSONDecodeError as error:
            reason = f"{error.msg} at column {error.colno}"
            raise UserError(f"{argument} {path}: row {number} is not JSON ({reason}).") from None
        except (ValueError, RecursionError):
            reason = "half a character, a number too long, or far too deep"
            raise UserError(f"{argument} {path}: row {number} cannot be read: {reason}.") from None
        if not isinstance(row, dict):
            raise UserError(f"{argument} {path}: row {number} is not a JSON object.")
        rows.append((f"{argument} {path}: row {number}", row))
    if not rows:
        raise UserError(f"{argument} {path}: the file is empty.")
    return rows


def _read_row(row: dict, where: str) -> dict:
    question = next((row[c] for c in QUESTION_COLUMNS if row.get(c)), None)
    answer = next((row[c] for c in ANSWER_COLUMNS if row.get(c) is not None), None)
    if isinstance(question, list):  # a conversation: its last user message
        messages = [m for m in reversed(question) if isinstance(m, dict)]
        question = next((m.get("content") for m in messages if m.get("role") == "user"), None)
    if isinstance(answer, dict):  # Eurus-2-RL-Data: {"ground_truth": ..., "style": "rule"}
        answer = answer.get("ground_truth")
    question = as_text(question, where, "question", QUESTION_COLUMNS)
    if type(answer) is int or type(answer) is float and math.isfinite(answer):
        answer = str(answer)
    answer = as_text(answer, where, "answer", ANSWER_COLUMNS)
    solution = as_text(row.get("solution"), where, "solution")
    reference = as_text(row.get("reference"), where, "reference")
    if "####" in answer:  # GSM8K: reasoning, then "#### 1,234"
        solution = solution or answer
        answer = answer.rsplit("####", 1)[1].replace(",", "")
    elif (own := boxed(answer)) is not None:  # MATH: reasoning with the answer in a box
        solution, answer = solution or answer, own
    answer = as_text(answer, where, "answer", ANSWER_COLUMNS).strip()
    if not solution and (steps := solve_equation(row.get("equation"), row.get("numbers"))):
        if is_correct(rf"\boxed{{{steps[-1].rpartition(' = ')[2]}}}", answer):
            solution = "\n".join(steps)
    # a reference of its own is in the form that the user wants
    reference = reference or render(solution, answer)
    return {"question": question.strip(), "answer": answer, "reference": reference}


def as_text(value, where: str, what: str, columns: tuple = ()) -> str:
    """Returns the value of a row, which must be text; "" for null.

    Args:
        value: of the row.
        where: the words that name the row.
        what: the words that name the value.
        columns: if they are given, the value is needed, and one of these columns must hold it.

    Raises:
        UserError: the value is not text, or it is needed and missing.
    """
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: its {what} is not text but {reprlib.repr(value)}.")
    if columns and not (value or "").strip():
        one = f"one of the columns {', '.join(columns)}"
        raise UserError(f"{where} has no {what} ({one}).")
    return value or ""
