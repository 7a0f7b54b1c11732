"""Batches of pairs, a chosen and a rejected completion for every prompt.

A loss on pairs overrides `CoTrainer.loss`, for a batch of pairs has no advantages. With summed
log-ratios to the base, say:

    both = as_completions(batch)                                 # 2b rows
    logp = self.score(both)[0]                                   # (2b, T), with a gradient
    with torch.no_grad(), self.playing(None):
        ref = self.score(both)[0]                                # (2b, T)
    chosen, rejected = chosen_and_rejected((logp - ref).sum(1))  # (b,) each
    return -F.logsigmoid(beta * (chosen - rejected)).sum() / pairs_of_the_step

A batch of pairs is a dict: player; prompt_ids and prompt_mask (B, P); pair_ids and pair_mask (B, 2,
T), the chosen completion first; completion_mask (B, T), 1 where either has a token, by which
micro-batches are sorted and trimmed; row (B,), the pair's place in the step, however it is cut.

Shapes: B pairs, b of them in a micro-batch, P prompt tokens, T completion tokens.
"""

import random

from common.batch import padded_batch
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


def pair_batch(player: str, prompts: list, pairs: list[tuple], tokenizer, device) -> dict:
    """B pairs as a batch that trains `player`, for `step` to return.

    Args:
        player: whose `loss` will see it.
        prompts: B lists of messages.
        pairs: B times (chosen, rejected), token ids as sampled: one cut at the length limit has no
            end token, and gets none here.
    """
    twice = [prompt for prompt in prompts for _ in range(2)]
    both = completion_batch(twice, [ids for pair in pairs for ids in pair], tokenizer, device)
    two = {key: rows.reshape(len(pairs), 2, -1) for key, rows in both.items()}
    return {
        "player": player,
        "prompt_ids": two["prompt_ids"][:, 0],  # (B, P)
        "prompt_mask": two["prompt_mask"][:, 0],
        "pair_ids": two["completion_ids"],  # (B, 2, T)
        "pair_mask": two["completion_mask"],
        "completion_mask": two["completion_mask"].amax(1),  # (B, T)
        "row": torch.arange(len(pairs), device=device),
    }


def as_completions(batch: dict) -> dict:
    """B pairs, or a micro-batch of them -> 2B completions for `log_probs`: chosen, rejected, ...

    Prompts are repeated; that costs little, because a prompt that rows share is run once.
    """
    T = batch["completion_mask"].shape[1]  # micro-batches trim this mask, not (B, 2, T)
    return {
        "player": batch["player"],
        "prompt_ids": batch["prompt_ids"].repeat_interleave(2, 0),  # (2B, P)
        "prompt_mask": batch["prompt_mask"].repeat_interleave(2, 0),
        "completion_ids": batch["pair_ids"][..., :T].flatten(0, 1),  # (2B, T)
        "completion_mask": batch["pair_mask"][..., :T].flatten(0, 1),
    }


def chosen_and_rejected(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(2B,), a number for each row of `as_completions` -> (B,) of the chosen, (B,) of the rejected.

    For log-probs: sums over tokens, never means, which would be another method.
    """
    return values.reshape(-1, 2).unbind(1)


def completion_batch(prompts: list, completions: list[list[int]], tokenizer, device) -> dict:
    """Completions that nobody sampled just now, or longer ago, as `log_probs` wants them.

    Args:
        prompts: B lists of messages, which are tokenised as for a rollout.
        completions: B lists of token ids.
    """
    return padded_batch(tokenize(prompts, tokenizer), completions, tokenizer.pad_token_id, device)
