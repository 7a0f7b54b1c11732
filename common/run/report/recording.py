"""Writes and reads rollouts.jsonl, which has a few rows of every update, each token with its
advantage. `launch` gives every trainer a Recorder; nothing that it does changes the training.
"""

import dataclasses
import itertools
import json
import os
from collections import defaultdict
from pathlib import Path

from common.core.batch import Batch, as_completions
from common.core.errors import ScriptError

import torch

RECORDED_TOKENS = 512  # of a completion


class Recorder:
    """Writes what the report shows of a trainer's updates.

    trainer: the CoTrainer.
    file: rollouts.jsonl.
    """

    def __init__(self, trainer, file: Path):
        self.trainer, self.file = trainer, file
        self.parts = []  # what `record_part` has got in this update

    def record(self, batch: Batch, credit: torch.Tensor | None = None, notes: list | None = None):
        """Writes a few rows of a batch; see `CoTrainer.record`."""
        trainer, credit = self.trainer, batch.advantages if credit is None else credit.detach()
        shown = dataclasses.replace(batch, advantages=credit, notes=notes or batch.notes)
        if trainer.accelerator.is_main_process and shown.notes and credit is not None:
            step = trainer.state.global_step + 1
            write_rows(shown, self.file, step, trainer.processing_class)

    def record_part(self, batch: Batch, credit: torch.Tensor, name: str, values, sides, of: str):
        """Keeps the rows of a micro-batch; see `CoTrainer.record_part`."""
        sides, rows = sides or [batch.player], batch
        if len(sides) == 2:
            rows = as_completions(batch)
        notes = [note | {"player": side} for note in batch.notes for side in sides]
        for i, note in enumerate(notes):
            value = values[i * len(values) // len(notes)].item()
            note |= {"rewards": {name: value}, "credit": of or "log-probability"}
        shown = rows.prompt_ids, rows.prompt_mask, rows.completion_ids, rows.completion_mask
        numbers = batch.row.repeat_interleave(len(sides))  # in the whole batch
        part = Batch(batch.player, *shown, row=numbers, notes=notes, advantages=credit.detach())
        self.parts.append(part)

    def record_parts(self):
        """Writes a few rows of all that `record_part` has got in this update, in the order of the
        batch. `update` calls it after the last micro-batch.
        """
        if self.parts:
            order = torch.cat([part.row for part in self.parts]).argsort(stable=True)
            pad_id = self.trainer.processing_class.pad_token_id
            self.record(Batch.join(self.parts[0].player, self.parts, pad_id).take(order))
            self.parts.clear()


def write_rows(batch: Batch, file: Path, step: int, tokenizer):
    """Appends a few rows of this update to a JSONL file.

    Args:
        batch: it has advantages, and the notes that are shown.
        file: rollouts.jsonl.
        step: number of the step.

    Raises:
        ScriptError: a note cannot become JSON.
    """
    with open(file, "a") as lines:
        for i in rows_to_show(batch.notes):
            valid = batch.completion_mask[i].bool()  # (T,)
            ids = batch.completion_ids[i][valid]  # (T_i,)

            def of_tokens(A):
                """Returns a row's numbers, (T,) or a number for all its tokens, to four digits."""
                A = A.expand_as(valid)[valid][:RECORDED_TOKENS]
                return [float(f"{a:.4g}") for a in A.tolist()]

            terms = batch.components.items()
            row = {
                "step": step,
                **batch.notes[i],
                "length": len(ids),
                "tokens": token_texts(ids[:RECORDED_TOKENS].tolist(), tokenizer),
                "advantages": of_tokens(batch.advantages[i]),
                "components": {name: of_tokens(A[i]) for name, A in terms},
            }
            lines.write(json.dumps(row, default=as_list) + "\n")


def as_list(tensor):
    if not hasattr(tensor, "tolist"):
        raise ScriptError(
            f"a note cannot hold {tensor!r:.60}, for notes become JSON: numbers, texts, lists, "
            f"dicts, tensors"
        )
    return tensor.tolist()


def rows_to_show(notes: list[dict]) -> list[int]:
    """Returns the numbers of the rows to record: of each player two prompts, and of each prompt two
    completions. These are its first completion, and the next completion with another reward; if all
    have the same reward, the last completion.

    Prompts whose two completions have different rewards come first, because they show what is
    rewarded. So the rows are no random sample of the batch.
    """
    groups = defaultdict(lambda: defaultdict(list))  # player -> prompt -> its rows
    for i, note in enumerate(notes):
        groups[note["player"]][note["prompt"]].append(i)
    chosen = []
    for prompts in groups.values():
        pairs = []
        for first, *others in prompts.values():
            differing = [i for i in others if notes[i]["rewards"] != notes[first]["rewards"]]
            pairs.append((not differing, [first, *(differing[:1] or others[-1:])]))
        chosen += [i for _, pair in sorted(pairs, key=lambda pair: pair[0])[:2] for i in pair]
    return chosen


def token_texts(token_ids: list[int], tokenizer) -> list[str]:
    """Returns the text of each token; together the texts are `tokenizer.decode(token_ids)`. If the
    tokenizer cuts a character in two, the token that completes it gets the character.
    """
    text = tokenizer.decode(token_ids)
    pieces = [tokenizer.decode([i]) for i in token_ids]
    if "".join(pieces) == text:
        return pieces
    # how much of the text is certain after each token: not what a later token completes
    prefixes = [tokenizer.decode(token_ids[:n]) for n in range(1, len(token_ids))]
    known = [len(os.path.commonprefix([prefix, text])) for prefix in prefixes]
    ends = [*itertools.accumulate(known, max), len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends)]


def read_lines(path: Path) -> tuple[list[dict], int]:
    """Returns (the objects in a JSONL file that have a step, the number of all other lines, which
    may be cut off). If there is no file, there are no objects.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines, rows = [line for line in text.split("\n") if line.strip()], []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows, len(lines) - len(rows)
