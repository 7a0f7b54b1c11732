"""Computes the log-probs of completions, and the same gradient as plain.py with less work. Padding
is left out, a beginning that rows share runs once, and rows of similar length make a micro-batch.

This changes the amount of work and not the result: tests/common/test_scoring.py compares each
saving with the plain computation.
"""

from common.core.batch import Batch
from common.fast.logprob import linear_logprob
from common.fast.sampling import has_plain_attention

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


# ------------------------------------------------------------------ log-probs
def token_logps(base, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same as `plain.token_logps`. Padding has no states, and not all logits are held
    together (see logprob.py).
    """
    ids, mask, places = batch.joined()  # (B, P + T) each
    targets, valid = batch.completion_ids, batch.completion_mask.bool()  # (B, T)
    # rows padded on the right, (B, W), without their last tokens, whose states predict nothing
    ends = mask.sum(1, keepdim=True) - 1  # (B, 1)
    columns = torch.arange(int(ends.max()), device=ids.device)  # (W,)
    order = mask.argsort(dim=1, descending=True, stable=True)[:, : len(columns)]
    rows = ids.gather(1, order).masked_fill(columns >= ends, -1)
    one_row = has_plain_attention(base) and base._supports_attention_backend
    states, of = (packed if one_row else right_padded)(base.base_model, rows, places.min())
    nth = torch.arange(valid.shape[1], device=ids.device)  # (T,)
    before = batch.prompt_mask.sum(1, keepdim=True) - 1 + nth  # (B, T): what predicts each
    states = states.index_select(0, of.gather(1, before.clamp(max=len(columns) - 1))[valid])
    head = base.get_output_embeddings().weight
    logp, entropy = linear_logprob(states, head, targets[valid], temperature)  # (n,) each
    zeros = torch.zeros(valid.shape, dtype=logp.dtype, device=logp.device)
    return zeros.masked_scatter(valid, logp), zeros.masked_scatter(valid, entropy)  # (B, T)


def right_padded(backbone, rows, first) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the states of some rows, (B * W, H); the number of each token's state, (B, W)).

    A token does not see what comes after it. So padding on the right needs no mask, and attention
    has faster kernels for that.

    Args:
        backbone: the model without its head.
        rows: (B, W) token ids, -1 after the end.
        first: the position of every row's first token.
    """
    places = first + torch.arange(rows.shape[1], device=rows.device)[None]
    run = {"input_ids": rows.clamp(min=0), "position_ids": places, "use_cache": False}
    states = backbone(**run).last_hidden_state.flatten(0, 1)
    return states, torch.arange(len(states), device=rows.device).view_as(rows)


def packed(backbone, rows, first) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same as `right_padded`, but equal beginnings of rows share their states: (N, H),
    and (B, W).

    A state depends only on its token and on the tokens before. If rows begin with the same tokens,
    such as instructions or the prompt of a group, the states of these tokens are equal, and they
    run once. All tokens that run make a single row of N tokens without padding. Only attention must
    take this row apart, in `attention`; all other layers look at each token alone.
    """
    rows, which = torch.unique(rows, dim=0, return_inverse=True)  # (U, W) sorted, (B,)
    new = rows >= 0  # (U, W): tokens that are not shared with the row before
    new[1:] &= (rows[1:] != rows[:-1]).cumsum(1) > 0
    places = first + torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    numbers = (new.flatten().cumsum(0) - 1).view_as(rows)
    of = numbers.where(new, 0).cummax(0).values  # (U, W): the number of each token that runs
    taken_apart = of, new.flatten().nonzero().squeeze(1)
    unused = rows.new_zeros(1, 1, 1, 1)  # a mask of 4 dimensions keeps transformers from making one
    run = {"input_ids": rows[new][None], "position_ids": places[new][None], "use_cache": False}
    states = backbone(**run, attention_mask=unused, taken_apart=taken_apart).last_hidden_state[0]
    return states, of[which]


def attention(module, query, key, value, mask, taken_apart=None, **more) -> tuple:
    """Returns what transformers' attention does, in two special cases in another way. In the row
    that `packed` makes, a token attends to the tokens of its own row. For a new token of each row
    on a CPU, keys that several heads share are not read anew for each head.

    Args:
        query, key, value: (1, heads, N, D).
        taken_apart: (U, W), which of the N tokens make each row; and (N,), where each of the N
            tokens stands among the U * W; a shared token stands in the first of its rows.
    """
    if taken_apart is None:
        shared, one_mask = query.shape[1] > key.shape[1], mask is None or mask.shape[1] == 1
        if query.is_cuda or query.shape[2] > 1 or not shared or not one_mask:
            return sdpa_attention_forward(module, query, key, value, mask, **more)
        # the query heads that share a head of keys become its queries, (B, heads of keys, heads of
        # each, D). transformers does the same, but not under models.SHARED_KEYS
        query = query[:, :, 0].unflatten(1, (key.shape[1], -1))
        found = F.scaled_dot_product_attention(query, key, value, mask, scale=more.get("scaling"))
        return found.flatten(1, 2)[:, None], None  # (B, 1, heads, D)
    of, at = taken_apart
    whole = of.numel() == len(at)  # rows of one length that have nothing in common stand in order

    def of_rows(x):
        x = x[0].transpose(0, 1)  # (N, heads, D)
        x = x if whole else x.index_select(0, of.flatten())
        return x.unflatten(0, of.shape).transpose(1, 2)  # (U, heads, W, D)

    found, _ = sdpa_attention_forward(module, *map(of_rows, (query, key, value)), None, **more)
    found = found.flatten(0, 1)  # (U * W, heads, D)
    return (found if whole else found.index_select(0, at))[None], None


def use_packed_attention():
    # by this name, because a layer that is recomputed in the backward pass asks for it again
    AttentionInterface.register("sdpa", attention)


# ------------------------------------------------------------------ micro-batches
def in_order(batch: Batch) -> torch.Tensor:
    """Returns the row numbers, (B,), in the order in which micro-batches are cut: from short
    completions to long completions, with rows of the same prompt together.
    """
    marked = 2 * batch.prompt_ids + batch.prompt_mask  # token and padding in one number
    prompts = torch.unique(marked, dim=0, return_inverse=True)[1]  # (B,)
    lengths = batch.lengths()  # (B,)
    longest = torch.zeros_like(lengths).scatter_reduce(0, prompts, lengths, "amax")[prompts]  # (B,)
    keys = list(zip(longest.tolist(), prompts.tolist(), lengths.tolist()))
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))
