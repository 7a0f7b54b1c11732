"""Advantage estimators: each is one vectorised function over (B,), (B, K) or (B, T).

Rows of one group are adjacent, `group_size` of them. A reward that is missing is NaN and gets no
advantage (exactly 0). A group whose rewards are all equal gets **exactly** 0, which is not what
`(r - mean) / (std + 1e-6)` gives: the float mean of equal numbers need not equal them, and 1e-6 in
the denominator then blows the difference up. So we test for max == min.
"""

import torch


def group_advantage(rewards: torch.Tensor, group_size: int, scale: bool = True) -> torch.Tensor:
    """GRPO: A = (r - mean) / (std + 1e-6) over each group (Shao et al. 2024, sec. 4.1).

    Args:
        rewards: (B,) one per row, or (B, K) several per row (step rewards), in which case a group
            pools all its values. NaN = missing.
        group_size: rows per group.
        scale: divide by the unbiased standard deviation; if not, only subtract the mean (Dr. GRPO).

    Returns:
        A tensor shaped like `rewards`; exactly 0 where missing and throughout constant groups.
    """
    if len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rows are not a multiple of the group size {group_size}")
    P = len(rewards) // group_size  # no group, if there is no row
    pool = rewards.unflatten(0, (P, group_size)).flatten(1)  # (P, n): what a group pools
    missing = pool.isnan()
    count = (~missing).sum(1, keepdim=True)  # (P, 1)
    values = pool.nan_to_num(0.0)
    mean = values.sum(1, keepdim=True) / count.clamp(min=1)
    centred = (values - mean).masked_fill(missing, 0.0)
    if scale:
        std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std + 1e-6)
    high = pool.masked_fill(missing, -torch.inf).amax(1, keepdim=True)  # (P, 1)
    low = pool.masked_fill(missing, torch.inf).amin(1, keepdim=True)
    return centred.masked_fill(high <= low, 0.0).reshape(rewards.shape)


def named_group_advantage(rewards: torch.Tensor, groups: list, **options) -> torch.Tensor:
    """`group_advantage` of groups of any size and order: (B,) rewards, a key per row -> (B,)."""
    A = torch.zeros_like(rewards)
    for key in dict.fromkeys(groups):
        rows = [i for i, group in enumerate(groups) if group == key]
        A[rows] = group_advantage(rewards[rows], len(rows), **options)
    return A


def return_to_go(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """R_t = sum_{k >= t} v_k over the valid positions of each row.

    (B, T), NaN = 0, and (B, T) of 0/1, valid positions adjacent -> (B, T), 0 outside the mask.
    """
    returns = values.nan_to_num(0.0) * mask
    return returns.flip(1).cumsum(1).flip(1) * mask


def whiten(values: torch.Tensor, mask: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """(values - mean) / sqrt(var + eps) over all valid positions of the batch, unbiased variance.

    (B, T) and (B, T) of 0/1 -> (B, T); exactly 0 outside the mask, and everywhere if all valid
    values are equal.
    """
    valid = mask.bool()
    count = valid.sum()
    values = values.masked_fill(~valid, 0.0)
    centred = (values - values.sum() / count.clamp(min=1)).masked_fill(~valid, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    high = values.masked_fill(~valid, -torch.inf).max()
    low = values.masked_fill(~valid, torch.inf).min()
    return (centred * (variance + eps).rsqrt()).masked_fill(high <= low, 0.0)
