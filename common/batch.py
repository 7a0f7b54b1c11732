"""A batch of token ids: made of lists, joined, and taken apart by rows.

Shapes: B rows, P prompt tokens, padded on the left, T completion tokens, padded on the right.
"""

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

SCORED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
"""What a batch needs for its log-probs."""


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


def take_rows(batch: dict, rows: torch.Tensor) -> dict:
    """These rows of every tensor and list, tensors trimmed to their longest; what has no rows (a
    name, a sum) stays as it is.

    Tensors (B, P) have names that begin with "prompt" and are padded on the left, all others of two
    dimensions are (B, T) and padded on the right.
    """
    part, B = dict(batch), len(batch["completion_mask"])
    for key, value in batch.items():
        if isinstance(value, list) and len(value) == B:
            part[key] = [value[i] for i in rows.tolist()]
        elif isinstance(value, torch.Tensor) and value.dim():
            part[key] = value[rows.to(value.device)]
    P, T = (int(part[f"{side}_mask"].sum(1).max()) for side in ("prompt", "completion"))
    for key, value in part.items():
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            part[key] = value[:, -P:] if key.startswith("prompt") else value[:, :T]
    return part
