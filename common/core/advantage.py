"""Advantage estimators: each is a vectorised function over (B,), (B, K) or (B, T).

The `group_size` rows of a group are adjacent. A missing reward is NaN, and its advantage is exactly
0. If all rewards of a group are equal, its advantages are **exactly** 0. The formula
`(r - mean) / (std + 1e-6)` does not give that: the float mean of equal numbers need not equal them,
and 1e-6 in the denominator then makes the difference large. So we test for max == min.
"""

import torch


def group_advantage(rewards: torch.Tensor, group_size: int, scale: bool = True) -> torch.Tensor:
    """Returns GRPO's advantages, A = (r - mean) / (std + 1e-6) over each group (Shao et al. 2024,
    arXiv:2402.03300, sec. 4.1).

    Args:
        rewards: (B,), a reward for each row, or (B, K), several rewards for each row, such as step
            rewards; then a group pools all its values. NaN marks a missing reward.
        group_size: rows per group.
        scale: divide by the unbiased standard deviation; if False, only subtract the mean
            (Dr. GRPO).

    Returns:
        A tensor shaped like `rewards`; exactly 0 where a reward is missing and in all of a group
        whose rewards are equal.

    Raises:
        ValueError: the rows do not divide into groups.
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
    """Returns `group_advantage`, (B,), of groups of any size and order.

    Args:
        rewards: (B,).
        groups: B keys; rows with equal keys are a group.
        options: those of `group_advantage`.
    """
    A = torch.zeros_like(rewards)
    for key in dict.fromkeys(groups):
        rows = [i for i, group in enumerate(groups) if group == key]
        A[rows] = group_advantage(rewards[rows], len(rows), **options)
    return A


def return_to_go(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns R_t = sum_{k >= t} v_k over the valid positions of each row, (B, T), 0 outside the
    mask.

    Args:
        values: (B, T); NaN counts as 0.
        mask: (B, T), 1 at valid positions, which are adjacent, else 0.
    """
    returns = values.nan_to_num(0.0) * mask
    return returns.flip(1).cumsum(1).flip(1) * mask


def whiten(values: torch.Tensor, mask: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """Returns (values - mean) / sqrt(var + eps), (B, T), over all valid positions of the batch; the
    variance is unbiased. The result is exactly 0 outside the mask, and everywhere if all valid
    values are equal.

    Args:
        values: (B, T).
        mask: (B, T), 1 at valid positions, else 0.
    """
    valid = mask.bool()
    count = valid.sum()
    values = values.masked_fill(~valid, 0.0)
    centred = (values - values.sum() / count.clamp(min=1)).masked_fill(~valid, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    high = values.masked_fill(~valid, -torch.inf).max()
    low = values.masked_fill(~valid, torch.inf).min()
    return (centred * (variance + eps).rsqrt()).masked_fill(high <= low, 0.0)
