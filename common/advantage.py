"""Advantage estimators: each is one vectorised function over (B,), (B, K) or (B, T).

Rows of one group are adjacent, `group_size` of them. A reward that is missing is NaN and gets no
advantage (exactly 0). A group whose rewards are all equal gets **exactly** 0, which is not what
`(r - mean) / (std + eps)` gives: the float mean of equal numbers need not equal them, and eps in
the denominator then blows the difference up. So we test for max == min.
"""

import torch


def _is_flat(pool: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
    """(P, n) -> (P, 1): True where all values that are present are equal, or fewer than two are."""
    high = pool.masked_fill(missing, -torch.inf).amax(1, keepdim=True)
    low = pool.masked_fill(missing, torch.inf).amin(1, keepdim=True)
    return high <= low


def group_advantage(
    rewards: torch.Tensor,
    group_size: int,
    scale: bool = True,
    eps: float = 1e-6,
    keep_single: bool = False,
) -> torch.Tensor:
    """GRPO: A = (r - mean) / (std + eps) over each group (Shao et al. 2024, sec. 4.1).

    Args:
        rewards: (B,) one per row, or (B, K) several per row (step rewards), in which case a group
            pools all its values. NaN = missing.
        group_size: rows per group.
        scale: divide by the unbiased standard deviation; if not, only subtract the mean (Dr. GRPO).
        keep_single: a value that is alone in its group stays as it is, as if the mean were 0 and
            the deviation 1 (the released code of RL Tango); by default it becomes 0.

    Returns:
        A tensor shaped like `rewards`; exactly 0 where missing and throughout constant groups.
    """
    if len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rows are not a multiple of the group size {group_size}")
    pool = rewards.reshape(len(rewards) // group_size, -1)  # (P, n): all values that a group pools
    missing = pool.isnan()
    count = (~missing).sum(1, keepdim=True)  # (P, 1)
    values = pool.nan_to_num(0.0)
    mean = values.sum(1, keepdim=True) / count.clamp(min=1)
    centred = (values - mean).masked_fill(missing, 0.0)
    if scale:
        std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std + eps)
    A = centred.masked_fill(_is_flat(pool, missing), 0.0)
    if keep_single:
        A = torch.where(count == 1, values, A)
    return A.reshape(rewards.shape)


def named_group_advantage(rewards: torch.Tensor, groups: list) -> torch.Tensor:
    """`group_advantage` of groups of any size and order: (B,) rewards, a key per row -> (B,)."""
    A = torch.zeros_like(rewards)
    for key in dict.fromkeys(groups):
        rows = [i for i, group in enumerate(groups) if group == key]
        A[rows] = group_advantage(rewards[rows], len(rows))
    return A


def return_to_go(values: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """R_t = sum_{k >= t} gamma^(k - t) v_k over the valid positions of each row.

    Args:
        values: (B, T), NaN = 0.
        mask: (B, T) of 0/1, valid positions adjacent.
        gamma: discount in [0, 1].

    Returns:
        (B, T), 0 outside the mask.
    """
    returns = values.nan_to_num(0.0) * mask
    if gamma == 1.0:
        return returns.flip(1).cumsum(1).flip(1) * mask
    # a scan in log2(T) doublings: after the pass with `shift`, every R_t covers 2 * shift positions
    shift = 1
    while shift < returns.shape[1]:
        ahead = torch.zeros_like(returns)
        ahead[:, :-shift] = returns[:, shift:]
        returns = returns + gamma**shift * ahead
        shift *= 2
    return returns * mask


def step_return_to_go(
    steps: torch.Tensor, step_ends: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0
) -> torch.Tensor:
    """Rewards at the ends of steps: every token earns those of the steps that end at or after it.

    Args:
        steps: (B, K), NaN = no reward.
        step_ends: (B, K), index of each step's last token, -1 = no such step.
        mask: (B, T) of 0/1.
        gamma: discount per token.

    Returns:
        (B, T), 0 outside the mask and after the last step.
    """
    present = (step_ends >= 0) & ~steps.isnan()
    at_ends = torch.zeros(mask.shape, dtype=steps.dtype, device=steps.device)  # (B, T)
    at_ends.scatter_add_(1, step_ends.clamp(min=0), torch.where(present, steps, 0.0))
    return return_to_go(at_ends, mask, gamma)


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
    flat = _is_flat(values.reshape(1, -1), ~valid.reshape(1, -1)).squeeze()
    return (centred * (variance + eps).rsqrt()).masked_fill(flat, 0.0)
