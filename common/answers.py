"""Reading what a model wrote: boxed answers and their equality, the steps of a solution and where each ends, token texts."""

import bisect
import itertools
import os
import re
import threading

from math_verify import parse, verify

SECONDS = 3  # for one answer; what takes longer is wrong
STEP = re.compile(r"<step>(.*?)</step>", re.DOTALL)


# ------------------------------------------------------------------ answers
def boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{...} (braces may nest), or None."""
    for start in reversed([m.end() for m in re.finditer(r"\\boxed\{", text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start:i]
    return None


def is_correct(text: str, gold: str) -> bool:
    """Whether the last boxed answer of `text` equals `gold`.

    Equal strings are equal; a plain number is compared as a number; anything else is left to math-verify. No box, an
    empty box or anything that math-verify cannot read is wrong, never an exception."""
    answer = boxed(text)
    if answer is None or not answer.strip():
        return False
    answer, gold = answer.strip(), gold.strip()
    if answer == gold:
        return True
    if re.fullmatch(r"-?\d+", answer) and re.fullmatch(r"-?\d+", gold):
        return len(answer) < 1000 and len(gold) < 1000 and int(answer) == int(gold)
    if len(answer) > 1000:  # nothing that long is an answer, and parsing it could take minutes
        return False
    # 9^{9^9} would take for ever; math-verify's timeouts use signals, which work in the main thread only
    limit = SECONDS if threading.current_thread() is threading.main_thread() else None
    try:
        expected, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=limit) for text in (gold, answer))
        return bool(verify(expected, given, timeout_seconds=limit))
    except Exception:
        return False


# ------------------------------------------------------------------ steps
def split_steps(text: str) -> list[str]:
    """The contents of all <step>...</step> blocks, in order."""
    return STEP.findall(text)


def step_ends(token_ids: list[int], tokenizer) -> list[int]:
    """For every <step>...</step> block, the index of the token that holds the last character of its `</step>`.

    Found from the token ids themselves: re-encoding decoded text need not give the same tokens back, and in a byte-level
    BPE `>` may share its token with the newline after it. Always as many as `split_steps(tokenizer.decode(ids))`.
    """
    text = tokenizer.decode(token_ids)
    expected = len(split_steps(text))
    if expected == 0:
        return []
    # Token by token. A character cut in two by the tokenizer decodes to replacement marks, but ASCII tags stay intact.
    pieces = tokenizer.batch_decode([[i] for i in token_ids])
    ends = _ends_in(pieces)
    if len(ends) != expected:
        # A tokenizer that decodes a token differently at the start of a text (SentencePiece drops the leading space):
        # take the pieces from growing prefixes instead, exact and slow.
        prefixes = [tokenizer.decode(token_ids[: i + 1]) for i in range(len(token_ids))]
        pieces = [new[len(old) :] for old, new in zip([""] + prefixes, prefixes)]
        ends = _ends_in(pieces)
    return ends[:expected]


def token_texts(token_ids: list[int], tokenizer) -> list[str]:
    """The text of each token, such that together they are `tokenizer.decode(token_ids)`. A character that is cut in two by the
    tokenizer goes to the token that completes it."""
    text = tokenizer.decode(token_ids)
    pieces = [tokenizer.decode([i]) for i in token_ids]
    if "".join(pieces) == text:
        return pieces
    # how much of the text is there after each token; what a later one completes is not yet
    known = [len(os.path.commonprefix([tokenizer.decode(token_ids[:n]), text])) for n in range(1, len(token_ids))]
    ends = [*itertools.accumulate(known, max), len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends)]


def _ends_in(pieces: list[str]) -> list[int]:
    starts, position = [], 0  # character at which each piece starts
    for piece in pieces:
        starts.append(position)
        position += len(piece)
    return [bisect.bisect_right(starts, match.end() - 1) - 1 for match in STEP.finditer("".join(pieces))]
