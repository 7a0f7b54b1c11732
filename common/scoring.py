"""Log-probs of completions; and the same gradient for less work: prompts that rows share run once,
rows without advantage dropped, micro-batches of rows of similar length.

Nothing here changes what is computed, only how much: tests/common/test_scoring.py compares each
saving with the plain computation.
"""

from common.logprob import linear_logprob
from common.sampling import has_plain_attention

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache


# ------------------------------------------------------------------ log-probs
def score(base, batch: dict, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature) of each completion token, and the entropy there, in nats.

    Rows with the same prompt run it once: its keys and values are copied to every row, and their
    gradients flow back through the copies.

    Args:
        base: the causal LM inside of the PeftModel; its active adapter is scored.
        batch: prompt_ids and prompt_mask (B, P), completion_ids and completion_mask (B, T).

    Returns:
        (B, T) each, 0 outside of the mask.
    """
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)  # (B, P + T)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)  # (B, P + T)
    targets, valid = batch["completion_ids"], batch["completion_mask"].bool()  # (B, T)
    P = batch["prompt_ids"].shape[1]
    marked = 2 * batch["prompt_ids"] + batch["prompt_mask"]  # token and padding in one number
    prompts, rows = torch.unique(marked, dim=0, return_inverse=True)  # (U, P), (B,)
    shared = P > 1 and len(prompts) <= len(rows) / 2
    # activation checkpointing cannot keep a cache
    if shared and has_plain_attention(base) and not base.is_gradient_checkpointing:
        # A prompt runs without its last token, which runs with every row: so only its keys and
        # values are needed, and none of its states.
        cache = DynamicCache()
        known = {"input_ids": prompts[:, :-1] // 2, "attention_mask": prompts[:, :-1] % 2}
        base.base_model(**known, past_key_values=cache)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        run = {"input_ids": ids[:, P - 1 : -1], "past_key_values": cache}
        states = base.base_model(**run, attention_mask=mask[:, :-1]).last_hidden_state
    else:
        run = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        states = base.base_model(**run).last_hidden_state[:, P - 1 : -1]
    head = base.get_output_embeddings().weight  # states (B, T, H) are those before each token
    logp, entropy = linear_logprob(states[valid], head, targets[valid], temperature)  # (N,) each
    zeros = torch.zeros(valid.shape, dtype=logp.dtype, device=logp.device)
    return zeros.masked_scatter(valid, logp), zeros.masked_scatter(valid, entropy)  # (B, T)


# ------------------------------------------------------------------ micro-batches
SCORED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def padded_batch(
    prompts: list[list[int]], completions: list[list[int]], pad_id: int, device
) -> dict:
    """Token ids -> prompt_ids and prompt_mask (B, P), padded on the left, completion_ids and
    completion_mask (B, T), padded on the right.
    """
    batch = {}
    for name, rows, side in (("prompt", prompts, "left"), ("completion", completions, "right")):
        ids = [torch.tensor(row, dtype=torch.long) for row in rows]
        ones = [torch.ones_like(row) for row in ids]
        batch[f"{name}_ids"] = pad_sequence(ids, True, pad_id, padding_side=side).to(device)
        batch[f"{name}_mask"] = pad_sequence(ones, True, 0, padding_side=side).to(device)
    return batch


def padded(tensors: list[torch.Tensor], left: bool, fill: float = 0) -> list[torch.Tensor]:
    """(B_i, T_i) each -> (B_i, longest T); (B_i,) as they are."""
    width = max(t.shape[-1] for t in tensors)
    missing = [width - t.shape[-1] if t.dim() == 2 else 0 for t in tensors]
    return [F.pad(t, (n, 0) if left else (0, n), value=fill) for t, n in zip(tensors, missing)]


def live_rows(batch: dict, kl: float) -> torch.Tensor:
    """(B,) bool: the rows that can have a gradient. One whose advantages are all zero has none,
    unless there is a KL term; and a batch without advantages has a loss of its own, to which all
    rows count.
    """
    if kl or "advantages" not in batch:
        return torch.ones(len(batch["completion_mask"]), dtype=torch.bool)
    A = batch["advantages"]
    return (A.reshape(len(A), -1) != 0).any(1).cpu()


def like_with_like(batch: dict, sharing: bool = True) -> torch.Tensor:
    """(B,) row numbers, from short completions to long, so that little is padding. Where prompts
    are shared (`score`), rows with the same one stay together.
    """
    if not sharing:
        return torch.argsort(batch["completion_mask"].sum(1), stable=True).cpu()
    marked = 2 * batch["prompt_ids"] + batch["prompt_mask"]  # token and padding in one number
    prompts = torch.unique(marked, dim=0, return_inverse=True)[1]  # (B,)
    lengths = batch["completion_mask"].sum(1)  # (B,)
    longest = torch.zeros_like(lengths).scatter_reduce(0, prompts, lengths, "amax")[prompts]  # (B,)
    keys = list(zip(longest.tolist(), prompts.tolist(), lengths.tolist()))
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))


def in_parts(batch: dict, live: torch.Tensor, size: int, sharing: bool = True) -> list[dict]:
    """The live rows of a batch in parts of at most `size` rows of similar length.

    The loss divides by the tokens of *all* rows, so that leaving rows out, sorting and cutting do
    not change the gradient. Each part is trimmed to its own longest prompt and completion.
    """
    order = like_with_like(batch, sharing)  # (B,)
    order = order[live[order]]
    parts = -(-len(order) // size)  # rounded up
    return [take_rows(batch, rows) for rows in torch.tensor_split(order, parts)] if parts else []


def take_rows(batch: dict, rows: torch.Tensor) -> dict:
    """These rows of every tensor and of the notes, tensors trimmed to their longest; what has no
    rows (a sum) stays as it is.

    Tensors (B, P) have names that begin with "prompt" and are padded on the left, all others of two
    dimensions are (B, T) and padded on the right.
    """
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    part = {k: v[rows.to(v.device)] if v.dim() else v for k, v in tensors.items()}
    P, T = (int(part[f"{side}_mask"].sum(1).max()) for side in ("prompt", "completion"))
    for key, value in part.items():
        if value.dim() == 2:
            part[key] = value[:, -P:] if key.startswith("prompt") else value[:, :T]
    part |= {"notes": [batch["notes"][i] for i in rows.tolist()]} if "notes" in batch else {}
    return part | ({"player": batch["player"]} if "player" in batch else {})
