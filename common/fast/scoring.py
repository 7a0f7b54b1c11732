"""Log-probs of completions; and the same gradient for less work: prompts that rows share run once,
rows without advantage dropped, micro-batches of rows of similar length.

Nothing here changes what is computed, only how much: tests/common/test_scoring.py compares each
saving with the plain computation.
"""

from common.batch import Batch
from common.fast.logprob import linear_logprob
from common.fast.sampling import common_beginning, has_plain_attention
from common.plain import joined

import torch
from transformers import DynamicCache

MUST_SAVE = {"cpu": 0, "cuda": 4096}
"""Tokens that a pass of its own must save. On a GPU, to start a pass's kernels takes as long as to
compute thousands of tokens: a tenth of a second at 1.5B on an H200."""


# ------------------------------------------------------------------ log-probs
def token_logps(base, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `plain.token_logps`. What prompts share runs once where that saves time, see
    `states_with_shared_prompts`; the head's logits are never held whole, see fast/logprob.py.
    """
    ids, mask, places = joined(batch)  # (B, P + T) each
    targets, valid = batch.completion_ids, batch.completion_mask.bool()  # (B, T)
    P = batch.prompt_ids.shape[1]
    # activation checkpointing cannot keep a cache
    if has_plain_attention(base) and not base.is_gradient_checkpointing:
        states = states_with_shared_prompts(base.base_model, ids, mask, places, P)
    else:
        run = {"input_ids": ids, "attention_mask": mask, "position_ids": places, "use_cache": False}
        states = base.base_model(**run).last_hidden_state[:, P - 1 : -1]
    head = base.get_output_embeddings().weight  # states (B, T, H) are those before each token
    logp, entropy = linear_logprob(states[valid], head, targets[valid], temperature)  # (N,) each
    zeros = torch.zeros(valid.shape, dtype=logp.dtype, device=logp.device)
    return zeros.masked_scatter(valid, logp), zeros.masked_scatter(valid, entropy)  # (B, T)


def states_with_shared_prompts(backbone, ids, mask, places, P: int) -> torch.Tensor:
    """The hidden states before each completion token, (B, T, H).

    What all prompts begin with (instructions, mostly) runs on one row; then every different prompt,
    if rows share them; then what is left, on every row. Keys and values are copied to the rows that
    need them, and gradients flow back through the copies.

    Args:
        ids, mask, places: (B, P + T), prompts of P tokens padded on the left.
    """
    marked = 2 * ids[:, :P] + mask[:, :P]  # token and padding in one number
    prompts, rows = torch.unique(marked, dim=0, return_inverse=True)  # (U, P), (B,)
    every = torch.arange(len(ids), device=ids.device)  # (B,)
    one_of_each = torch.zeros_like(every[: len(prompts)]).scatter(0, rows, every)  # (U,)
    saved = MUST_SAVE[ids.device.type]
    least = saved // max(1, len(prompts) - 1)
    L = common_beginning([row[row % 2 == 1].tolist() for row in prompts], least)
    cache, done = DynamicCache(), 0  # columns that the cache holds

    def run(rows: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """(rows, end - start, H)"""
        given = {"input_ids": ids[rows, start:end], "attention_mask": mask[rows, :end]}
        given |= {"position_ids": places[rows, start:end], "past_key_values": cache}
        return backbone(**given).last_hidden_state

    if L:
        first = mask[:1, :P].bool()
        begun = {"input_ids": ids[:1, :P][first][None, :L], "past_key_values": cache}
        backbone(**begun, position_ids=places[:1, :P][first][None, :L])
        cache.batch_select_indices(torch.zeros_like(one_of_each))
        # it now fills every row's first L columns; its old place is masked
        left = mask * (mask.cumsum(1) > L)
        mask = torch.cat([torch.ones_like(mask[:, :L]), left[:, L:]], 1)
        done = L
    spared = (P - 1 - done) * (len(ids) - len(prompts))
    if spared > saved and len(prompts) <= len(ids) / 2:
        # without a prompt's last token, which runs with every row: so its states are not needed
        run(one_of_each, done, P - 1)
        done = P - 1
    cache.batch_select_indices(rows)
    return run(every, done, ids.shape[1] - 1)[:, P - 1 - done :]


# ------------------------------------------------------------------ micro-batches
def in_order(batch: Batch, sharing: bool = True) -> torch.Tensor:
    """(B,) row numbers, from short completions to long, so that little is padding. Where prompts
    are shared (`token_logps`), rows with the same one stay together.
    """
    if not sharing:
        return torch.argsort(batch.lengths(), stable=True).cpu()
    marked = 2 * batch.prompt_ids + batch.prompt_mask  # token and padding in one number
    prompts = torch.unique(marked, dim=0, return_inverse=True)[1]  # (B,)
    lengths = batch.lengths()  # (B,)
    longest = torch.zeros_like(lengths).scatter_reduce(0, prompts, lengths, "amax")[prompts]  # (B,)
    keys = list(zip(longest.tolist(), prompts.tolist(), lengths.tolist()))
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))


def in_parts(batch: Batch, size: int, all_rows=False, sharing: bool = True) -> list[Batch]:
    """The rows of a batch that can have a gradient, in parts of at most `size` rows of similar
    length: without `all_rows` not those whose advantages are all zero.

    The loss divides by the tokens of *all* rows, so that leaving rows out, sorting and cutting do
    not change the gradient. Each part is trimmed to its own longest prompt and completion.
    """
    if not len(batch):
        return []
    order, A = in_order(batch, sharing), batch.advantages  # (B,); (B,) or (B, T)
    if not all_rows and A is not None:  # without them the script's loss counts all rows
        order = order[(A.reshape(len(A), -1) != 0).any(1).cpu()[order]]
    parts = -(-len(order) // size)  # rounded up
    return [batch.take(rows) for rows in torch.tensor_split(order, parts)] if parts else []
