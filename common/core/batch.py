"""A batch holds the rows that a player is trained on, each with a completion. This file makes, cuts
and joins batches. In a batch of pairs the completions are (B, 2, T), the chosen text first.

A batch of pairs has no advantages, so a script that trains on pairs overrides `CoTrainer.loss`.
This is such a loss, on log-ratios to the base that are summed over tokens:

    both = as_completions(batch)                                 # 2b rows
    logp = self.score(both)[0]                                   # (2b, T), with a gradient
    with torch.no_grad(), self.playing(None):
        ref = self.score(both)[0]                                # (2b, T)
    chosen, rejected = chosen_and_rejected((logp - ref).sum(1))  # (b,) each
    losses = -F.logsigmoid(beta * (chosen - rejected))           # (b,)
    return losses.sum() / pairs_of_the_step, {"margin": chosen - rejected}

Shapes: B rows or pairs, P prompt tokens, padded on the left, T completion tokens, padded on the
right.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from common.core.errors import ScriptError

import torch
import torch.nn.functional as F
from torch import Tensor

PER_TOKEN = {"completion_ids", "completion_mask", "base_logps", "sampled_logps"}
PER_TOKEN |= {"advantages", "components", "token_extras"}
"""Fields of Batch with an entry for each token, (B, ..., T); some of them may be (B,) instead."""


@dataclass(slots=True, eq=False)  # slots: to set a field that does not exist raises
class Batch:
    """A field is None, or empty, until a verb or a script sets it."""

    player: str
    """the name of the player that is trained on it"""
    prompt_ids: Tensor
    """(B, P), padded on the left"""
    prompt_mask: Tensor
    """(B, P), 1 at a token"""
    completion_ids: Tensor
    """(B, T), padded on the right"""
    completion_mask: Tensor
    """(B, T), 1 at a token"""
    row: Tensor
    """(B,) the row's number in the whole batch, which it keeps when the batch is cut"""
    total_tokens: int | None = None
    """completion tokens of the whole batch on all processes; a mean over tokens divides by it"""
    base_logps: Tensor | None = None
    """(B, T) log-probs under the base; only if there is a KL term"""
    kl_weights: Tensor | None = None
    """(B,) weight of the KL term in each row; by default it is --kl"""
    sampled_logps: Tensor | None = None
    """(B, T) log-probs with which the tokens were drawn; only of a rollout"""
    texts: list[str] = field(default_factory=list)
    """B completions"""
    notes: list[dict] = field(default_factory=list)
    """B dicts with what the report shows of each row: player, prompt, rewards, and what a script
    adds"""
    rewards: Tensor | None = None
    """(B,), NaN if nobody has judged the row"""
    advantages: Tensor | None = None
    """(B,), or (B, T) with an advantage for each token"""
    components: dict[str, Tensor] = field(default_factory=dict)
    """if the advantages are a sum, its terms by name, (B,) or (B, T) each, for the report"""
    source: Tensor | None = None
    """(B,) after `join`: the number of the batch that the row comes from"""
    extras: dict = field(default_factory=dict)
    """what a script adds: a tensor or a list with an entry for each row, which is cut with the
    rows, or a number of the whole batch"""
    token_extras: dict[str, Tensor] = field(default_factory=dict)
    """what a script adds for each token, (B, ..., T); it is cut with the rows and their tokens"""
    rollouts: list[int] = field(default_factory=list)
    """what common/checked.py remembers of the rollouts that the rows come from"""

    @classmethod
    def of(cls, player: str, prompts: list[list[int]], completions: list, pad_id: int, device):
        """Returns a batch of B rows, from the token ids of B prompts and of B completions."""
        ids, mask = padded_ids(prompts, pad_id, device, left=True)
        written, valid = padded_ids(completions, pad_id, device)
        row = torch.arange(len(prompts), device=device)
        return cls(player, ids, mask, written, valid, row)

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def lengths(self) -> Tensor:
        """Returns the number of tokens of each row's completion, (B,), or of the longer text of
        each pair.
        """
        lengths = self.completion_mask.sum(-1)
        return lengths if lengths.dim() == 1 else lengths.amax(1)

    def joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns token ids, mask and position ids of prompt and completion as one text,
        (B, P + T) each.

        Position ids skip padding, because in some models attention depends on absolute positions.
        Only padding that stands in front of *all* rows moves the positions. prime.py adds such
        padding, to measure how much the log-probs change by rounding.
        """
        ids = torch.cat([self.prompt_ids, self.completion_ids], 1)
        mask = torch.cat([self.prompt_mask, self.completion_mask], 1)
        first = int((mask.sum(0) == 0)[: self.prompt_ids.shape[1]].sum())
        return ids, mask, (mask.cumsum(1) - 1).clamp(min=0) + first

    def take(self, rows: Tensor) -> "Batch":
        """Returns a batch of these rows, trimmed to the longest prompt and the longest completion
        among them. rows: row numbers, (b,).
        """
        rows = rows.to(self.row.device)
        P = int(self.prompt_mask[rows].sum(1).max()) if len(rows) else 0
        T = int(self.lengths()[rows].max()) if len(rows) else 0

        def of(name: str, value):
            if isinstance(value, dict):
                return {key: of(name, each) for key, each in value.items()}
            if isinstance(value, list):
                return [value[i] for i in rows.tolist()] if value else value
            if not isinstance(value, Tensor) or not value.dim():
                return value
            part = value[rows]
            if name.startswith("prompt"):
                return part[:, part.shape[1] - P :]
            return part[..., :T] if name in PER_TOKEN and part.dim() > 1 else part

        names = {field.name for field in dataclasses.fields(self)} - {"rollouts"}
        taken = {name: of(name, getattr(self, name)) for name in names}
        return Batch(**taken, rollouts=self.rollouts)

    @staticmethod
    def join(player: str, batches: list["Batch"], pad_id: int) -> "Batch":
        """Returns one batch with the rows of several batches, batch after batch. Advantages become
        (B, T). Components are left out; a script sets them on the joined batch.

        Raises:
            ScriptError: a key of extras or token_extras is not in all batches, or is a number of a
                whole batch and not the same in all.
        """

        def of(values: list, left=False, fill=0):
            if any(value is None for value in values):
                return None
            if isinstance(values[0], list):
                return [value for part in values for value in part]
            return torch.cat(padded(values, left, fill))

        def each(name: str) -> list:
            return [getattr(batch, name) for batch in batches]

        def per_token(batch: Batch):
            A = batch.advantages
            return A if A is None or A.dim() == 2 else A[:, None] * batch.completion_mask

        counts = torch.tensor([len(batch) for batch in batches])
        source = torch.arange(len(batches)).repeat_interleave(counts)
        device = batches[0].row.device
        return Batch(
            player,
            of(each("prompt_ids"), left=True, fill=pad_id),
            of(each("prompt_mask"), left=True),
            of(each("completion_ids"), fill=pad_id),
            of(each("completion_mask")),
            row=torch.arange(len(source), device=device),
            total_tokens=None if None in each("total_tokens") else sum(each("total_tokens")),
            base_logps=of(each("base_logps")),
            kl_weights=of(each("kl_weights")),
            sampled_logps=of(each("sampled_logps")),
            texts=of(each("texts")),
            notes=of(each("notes")),
            rewards=of(each("rewards")),
            advantages=of([per_token(batch) for batch in batches]),
            source=source.to(device),
            extras=joined_extras("extras", batches, of),
            token_extras=joined_extras("token_extras", batches, of),
            rollouts=of(each("rollouts")),
        )


def joined_extras(name: str, batches: list[Batch], of: Callable) -> dict:
    """Returns the extras or token_extras of the batch that joins these batches.

    of: joins lists or tensors with an entry for each row.
    """
    found, joined = [getattr(batch, name) for batch in batches], {}
    for key in dict.fromkeys(key for extras in found for key in extras):
        for batch, extras in zip(batches, found):
            if key not in extras:
                raise ScriptError(
                    f"concat: the {batch.player}'s batch has no {name}[{key!r}], which another "
                    f"batch has; either all have it, or none has"
                )
        first, *others = values = [extras[key] for extras in found]
        if isinstance(first, list) or torch.is_tensor(first) and first.dim():
            joined[key] = of(values)
        elif any(value != first for value in others):
            raise ScriptError(
                f"concat: {name}[{key!r}] is a number of a whole batch, and it differs: "
                f"{', '.join(map(str, values))}; give all the number that the joined batch needs"
            )
        else:
            joined[key] = first
    return joined


def padded_ids(rows: list[list[int]], pad_id: int, device, left: bool = False) -> tuple:
    """Returns (ids, mask), (B, longest) each, of B lists of token ids; left: pads on the left."""
    width = max(map(len, rows), default=0)
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(len(row))
        ids[i, place], mask[i, place] = torch.tensor(row, dtype=torch.long), 1
    return ids.to(device), mask.to(device)


def padded(tensors: list[Tensor], left: bool, fill: float = 0) -> list[Tensor]:
    """Returns tensors (B_i, ..., T_i) as (B_i, ..., longest T), and tensors (B_i,) as they are."""
    width = max(t.shape[-1] for t in tensors)
    missing = [width - t.shape[-1] if t.dim() > 1 else 0 for t in tensors]
    return [F.pad(t, (n, 0) if left else (0, n), value=fill) for t, n in zip(tensors, missing)]


# ------------------------------------------------------------------ pairs
def as_completions(batch: Batch) -> Batch:
    """Returns the texts of B pairs as 2B completions for `score`, in the order chosen, rejected,
    chosen, rejected, ... The prompts are repeated. That costs little, because a prompt that rows
    share is run once.
    """
    return Batch(
        batch.player,
        batch.prompt_ids.repeat_interleave(2, 0),  # (2B, P)
        batch.prompt_mask.repeat_interleave(2, 0),
        batch.completion_ids.flatten(0, 1),  # (2B, T)
        batch.completion_mask.flatten(0, 1),
        row=torch.arange(2 * len(batch), device=batch.row.device),
    )


def as_pairs(batch: Batch) -> Batch:
    """Returns 2B completions as B pairs. Rows 0 and 1, which share a prompt, become pair 0."""
    return Batch(
        batch.player,
        batch.prompt_ids[::2],  # (B, P)
        batch.prompt_mask[::2],
        batch.completion_ids.unflatten(0, (-1, 2)),  # (B, 2, T)
        batch.completion_mask.unflatten(0, (-1, 2)),
        row=batch.row[: len(batch) // 2],
        notes=batch.notes[::2],
    )


def chosen_and_rejected(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (the chosen texts' numbers, the rejected texts' numbers), (B,) each.

    values: (2B,), a number for each row of `as_completions`. For a preference loss these are sums
        of log-probs over tokens; means would make it another method.
    """
    return values.reshape(-1, 2).unbind(1)
