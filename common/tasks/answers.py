"""Reading what a model wrote: the boxed answer, whether it is right, the steps, where they end."""

import bisect
import re
import threading

from math_verify import parse, verify

SECONDS = 3  # to read one answer; what takes longer is wrong
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

    Equal strings are equal, plain numbers are compared as numbers, and anything else is left to
    math-verify. No box, an empty one, or one that math-verify cannot read is wrong; never an
    exception.
    """
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
    # 9^{9^9} would take for ever; math-verify's timeouts are signals, so for the main thread only
    limit = SECONDS if threading.current_thread() is threading.main_thread() else None
    try:
        expected, given = (
            parse(f"\\boxed{{{text}}}", parsing_timeout=limit) for text in (gold, answer)
        )
        return bool(verify(expected, given, timeout_seconds=limit))
    except Exception:
        return False


# ------------------------------------------------------------------ steps
def split_steps(text: str) -> list[str]:
    """The contents of all <step>...</step> blocks, in order."""
    return STEP.findall(text)


def step_ends(token_ids: list[int], tokenizer) -> list[int]:
    """For every <step>...</step> block, the index of the token that completes `</step>`.

    Found from the token ids themselves, because text that is encoded again need not give the same
    tokens, and in a byte-level BPE `>` may share its token with the newline after it. There are
    always as many as `split_steps(tokenizer.decode(ids))` has.
    """
    text = tokenizer.decode(token_ids)
    expected = len(split_steps(text))
    if expected == 0:
        return []
    # a character that the tokenizer cuts in two decodes to other marks, but ASCII tags stay whole
    pieces = tokenizer.batch_decode([[i] for i in token_ids])
    ends = _ends_in(pieces)
    if len(ends) != expected:
        # SentencePiece drops the leading space of a token at the start of a text: take the pieces
        # from growing prefixes instead, which is exact and slow
        prefixes = [tokenizer.decode(token_ids[: i + 1]) for i in range(len(token_ids))]
        pieces = [new[len(old) :] for old, new in zip([""] + prefixes, prefixes)]
        ends = _ends_in(pieces)
    return ends[:expected]


def _ends_in(pieces: list[str]) -> list[int]:
    starts, position = [], 0  # character at which each piece starts
    for piece in pieces:
        starts.append(position)
        position += len(piece)
    ends = [match.end() for match in STEP.finditer("".join(pieces))]
    return [bisect.bisect_right(starts, end - 1) - 1 for end in ends]
