"""Fused log-probability of hidden states under a language-model head: `linear_logprob`.

With LoRA the head W is frozen, and then the gradient of a token's log-prob with respect to its hidden state is

    u_t = d log p(y_t) / d h_t = (W[y_t] - E_p[W]) / temperature

a vector that does not depend on the loss. So one pass over the vocabulary yields the log-prob, the entropy **and** u
(two matrix products: h W^T and q W), and backward is `g_t * u_t`, elementwise. Recomputing the logits in backward, as a
chunked cross-entropy does, takes three. Nothing of size (N, V) outlives one block of rows.
"""

import torch

BLOCK_BYTES = 64 << 20
"""Memory budget of one block of logits in bytes. Only one block is alive at a time, whatever N is."""


def _rows(vocab: int) -> int:
    """Rows per block: what the budget allows, at most 256 (a block should stay near the cache), at least 16 (fewer rows
    would read all of W for too little work)."""
    return max(16, min(256, BLOCK_BYTES // (4 * vocab)))


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
        wide = torch.promote_types(hidden.dtype, torch.float32)
        h, w = hidden.to(wide) / temperature, weight.to(wide)  # temperature is folded into h: N * H divisions, not N * V
        b = None if bias is None else bias.to(wide) / temperature
        if ctx.needs_input_grad[0]:
            logp, entropy, u = _score_and_u(h, w, targets, b)
            # u takes the place of the saved hidden states; d/dh = (1/T) d/d(h/T)
            ctx.save_for_backward(u.div_(temperature).to(hidden.dtype))
        else:
            logp, entropy = _score(h, w, targets, b)
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, _):
        (u,) = ctx.saved_tensors
        # fp32 product, rounded once
        return (grad_logp[:, None] * u).to(u.dtype), None, None, None, None


def _score_and_u(h, w, targets, b):
    """Two products. (N, H), (V, H), (N,), (V,) or None -> logp (N,), entropy (N,), u = W[y] - E_p[W] (N, H)."""
    n, vocab, rows = len(h), len(w), _rows(len(w))
    logp, u = h.new_empty(n), torch.empty_like(h)
    entropy = torch.zeros_like(logp)
    block_memory = h.new_empty(min(rows, n), vocab)
    for start in range(0, n, rows):
        i = slice(start, min(start + rows, n))
        y = targets[i, None]  # (r, 1)
        z = torch.mm(h[i], w.T, out=block_memory[: i.stop - start])  # (r, V)
        if b is not None:
            z += b
        top, z_y = z.amax(1, keepdim=True), z.gather(1, y)
        p = z.sub_(top).exp_()  # not normalised yet, p_v * s: one pass over V less
        s = p.sum(1, keepdim=True)
        log_s = s.log()
        logp[i] = (z_y - top - log_s).squeeze(1)
        if b is not None:  # the bias's part of E_p[z] - z_y, which u does not hold
            entropy[i] = ((p @ b[:, None]) / s - b[y]).squeeze(1)
        # u = W[y] - sum_v p_v W_v. The one-hot goes into the product, so nothing cancels as p_y -> 1
        p.scatter_add_(1, y, -s)
        torch.mm(p, w, out=u[i])
        u[i] /= -s
    # H = log Z - E_p[z] = (z_y - E_p[z]) - log p_y, and h . u = z_y - E_p[z] but for the bias: the entropy comes for free
    entropy = (h * u).sum(1) - logp - entropy
    return logp, entropy, u


def _score(h, w, targets, b):
    """One product: no gradient is wanted. Narrow tiles of the vocabulary, folded as they come (online softmax)."""
    n, vocab, rows, columns = len(h), len(w), 512, 2048
    logp, entropy = h.new_empty(n), h.new_empty(n)
    tile_memory = h.new_empty(min(rows, n) * columns)
    for start in range(0, n, rows):
        i = slice(start, min(start + rows, n))
        r = i.stop - start
        top = h.new_full((r, 1), -torch.inf)  # running maximum of z
        s, sz = h.new_zeros(r, 1), h.new_zeros(r, 1)  # running sums of e^(z - top) and of e^(z - top) * (z - top)
        for first in range(0, vocab, columns):
            part = w[first : first + columns]
            z = torch.mm(h[i], part.T, out=tile_memory[: r * len(part)].view(r, len(part)))  # (r, c)
            if b is not None:
                z += b[first : first + columns]
            new = torch.maximum(top, z.amax(1, keepdim=True))
            shrink = (top - new).exp_()  # 0 at the first tile
            sz = shrink * (sz + torch.where(s > 0, s * (top - new), 0.0))
            z.sub_(new)
            e = z.exp()
            s = s * shrink + e.sum(1, keepdim=True)
            sz += e.mul_(z).sum(1, keepdim=True)
            top = new
        z_y = (h[i] * w[targets[i]]).sum(1, keepdim=True)
        if b is not None:
            z_y += b[targets[i], None]
        log_s = s.log()
        logp[i] = (z_y - top - log_s).squeeze(1)
        entropy[i] = (log_s - sz / s).squeeze(1)
    return logp, entropy


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
