"""Batches of pairs, a chosen and a rejected completion for every prompt.

A loss on pairs overrides `CoTrainer.loss`, for a batch of pairs has no advantages. With summed
log-ratios to the base, say:

    both = as_completions(batch)                                 # 2b rows
    logp = self.score(both)[0]                                   # (2b, T), with a gradient
    with torch.no_grad(), self.playing(None):
        ref = self.score(both)[0]                                # (2b, T)
    chosen, rejected = chosen_and_rejected((logp - ref).sum(1))  # (b,) each
    return -F.logsigmoid(beta * (chosen - rejected)).sum() / pairs_of_the_step

The completions of a batch of pairs are (B, 2, T), the chosen one first.

Shapes: B pairs, b of them in a micro-batch, P prompt tokens, T completion tokens.
"""

import random

from common.batch import Batch
from common.plain import tokenize

import torch


def in_passes(items: list, first: int, count: int, key: str) -> list:
    """What a step trains on: `count` items, from number `first` on, of an endless sequence: pass
    after pass over all of them, each in an order of its own.

    key: decides the orders; equal keys, equal sequences.

    >>> sorted(in_passes("abc", first=0, count=3, key="x")), len(in_passes("abc", 2, 8, "x"))
    (['a', 'b', 'c'], 8)
    """
    taken = []
    while len(taken) < count:
        number, offset = divmod(first + len(taken), len(items))
        order = list(range(len(items)))
        random.Random(f"{key} {number}").shuffle(order)
        taken += [items[i] for i in order[offset : offset + count - len(taken)]]
    return taken


def pair_batch(player: str, prompts: list, pairs: list[tuple], tokenizer, device) -> Batch:
    """B pairs as a batch that trains `player`, for `step` to return.

    Args:
        player: whose `loss` will see it.
        prompts: B lists of messages.
        pairs: B times (chosen, rejected), token ids as sampled: one cut at the length limit has no
            end token, and gets none here.
    """
    twice = [prompt for prompt in prompts for _ in range(2)]
    ids = [ids for pair in pairs for ids in pair]
    both = completion_batch(player, twice, ids, tokenizer, device)  # 2B rows
    return Batch(
        player,
        both.prompt_ids[::2],  # (B, P)
        both.prompt_mask[::2],
        both.completion_ids.reshape(len(pairs), 2, -1),  # (B, 2, T)
        both.completion_mask.reshape(len(pairs), 2, -1),
        row=both.row[: len(pairs)],
    )


def as_completions(batch: Batch) -> Batch:
    """B pairs, or a micro-batch of them -> 2B completions for `log_probs`: chosen, rejected, ...

    Prompts are repeated; that costs little, because a prompt that rows share is run once.
    """
    return Batch(
        batch.player,
        batch.prompt_ids.repeat_interleave(2, 0),  # (2B, P)
        batch.prompt_mask.repeat_interleave(2, 0),
        batch.completion_ids.flatten(0, 1),  # (2B, T)
        batch.completion_mask.flatten(0, 1),
        row=torch.arange(2 * len(batch), device=batch.row.device),
    )


def chosen_and_rejected(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(2B,), a number for each row of `as_completions` -> (B,) of the chosen, (B,) of the rejected.

    For log-probs: sums over tokens, never means, which would be another method.
    """
    return values.reshape(-1, 2).unbind(1)


def completion_batch(player: str, prompts: list, completions: list, tokenizer, device) -> Batch:
    """Completions that nobody sampled just now, or longer ago, as `log_probs` and `loss` want them.

    Args:
        player: at whose temperature they are scored, and who is trained if `step` returns them.
        prompts: B lists of messages, which are tokenised as for a rollout.
        completions: B lists of token ids.
    """
    prompt_ids = tokenize(prompts, tokenizer)
    return Batch.of(player, prompt_ids, completions, tokenizer.pad_token_id, device)
