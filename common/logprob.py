"""Fused log-probability of hidden states under a language-model head: `linear_logprob`.

With LoRA the head W is frozen, and then the gradient of a token's log-prob with respect to its hidden state is

    u_t = d log p(y_t) / d h_t = (W[y_t] - E_p[W]) / temperature

a vector that does not depend on the loss. So one pass over the vocabulary yields the log-prob, the entropy **and** u
(two matrix products: h W^T and q W), and backward is `g_t * u_t`, elementwise. Recomputing the logits in backward, as a
chunked cross-entropy does, takes three. Nothing of size (N, V) outlives one block of rows.
"""

import torch

BLOCK_BYTES = 64 << 20
"""Memory budget of one block of logits, in bytes: rows per block = BLOCK_BYTES / (4 V). Two or three such blocks are
alive at a time, whatever N is."""


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target token, and the entropy of its distribution, under softmax((hidden W^T + bias) / temperature).

    Args:
        hidden: (N, H), any float dtype; logits are computed in float32 whatever it is.
        weight: (V, H), the LM head.
        targets: (N,), token ids in [0, V).
        bias: (V,) or None.
        temperature: what the logits are divided by, > 0.

    Returns:
        (logprob, entropy), both (N,) float32, in nats. `logprob` is differentiable in `hidden`. If the head is frozen,
        `entropy` carries no gradient; if it is trainable, everything is differentiable, by recomputing the logits.

    Raises:
        ValueError: shapes that do not match, a target out of range (checked on CPU tensors only: looking at values
            would synchronise a GPU), temperature <= 0.
    """
    _check(hidden, weight, targets, bias, temperature)
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return plain_logprob(hidden, weight, targets, bias, temperature)
    return _FrozenHead.apply(hidden, weight, targets, bias, temperature)


def plain_logprob(hidden, weight, targets, bias=None, temperature=1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the book, materialising all (N, V) logits: the test oracle, and the path for a trainable head."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(wide) @ weight.to(wide).T
    if bias is not None:
        logits = logits + bias.to(wide)
    logp = torch.log_softmax(logits / temperature, dim=-1)  # (N, V)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, bias, temperature):
        n, vocab = hidden.shape[0], weight.shape[0]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logp = torch.empty(n, dtype=wide, device=hidden.device)  # (N,)
        entropy = torch.empty_like(logp)  # (N,)
        need_u = ctx.needs_input_grad[0]
        u = torch.empty_like(hidden) if need_u else None  # (N, H), takes the place of the saved hidden states
        w = weight.to(wide)
        rows = max(1, BLOCK_BYTES // (4 * vocab))
        for start in range(0, n, rows):
            block = slice(start, start + rows)
            z = hidden[block].to(wide) @ w.T  # (n, V)
            if bias is not None:
                z += bias
            z /= temperature
            z -= z.logsumexp(-1, keepdim=True)  # now log p
            p = z.exp()  # (n, V)
            y = targets[block, None]
            logp[block] = z.gather(1, y).squeeze(1)
            entropy[block] = -(z.mul_(p)).sum(-1)  # H = -sum_v p_v log p_v
            if need_u:
                # u = (W[y] - sum_v p_v W_v) / T. The one-hot goes into the product: no cancellation as p_y -> 1
                q = p.neg_()
                q.scatter_add_(1, y, torch.ones_like(y, dtype=wide))
                u[block] = ((q @ w) / temperature).to(u.dtype)
        ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(u)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, _):
        (u,) = ctx.saved_tensors
        # fp32 product, rounded once
        return (grad_logp[:, None] * u).to(u.dtype), None, None, None, None


def _check(hidden, weight, targets, bias, temperature):
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden must be (N, H) and weight (V, H); got {tuple(hidden.shape)} and {tuple(weight.shape)}")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be ({hidden.shape[0]},), one per row of hidden; got {tuple(targets.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be ({weight.shape[0]},), one per row of weight; got {tuple(bias.shape)}")
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    on_cpu = targets.device.type == "cpu"
    if on_cpu and len(targets) and not (0 <= int(targets.min()) and int(targets.max()) < weight.shape[0]):
        raise ValueError(f"targets must lie in [0, {weight.shape[0]}), got {int(targets.min())} to {int(targets.max())}")
