"""The log-probability of tokens under a language-model head, without ever holding all logits.

With LoRA the head W is frozen, and then the gradient of a token's log-prob with respect to its
hidden state is

    u_t = d log p(y_t) / d h_t = (W[y_t] - E_p[W]) / temperature

This vector does not depend on the loss. So a single pass over the vocabulary gives the log-prob,
the entropy **and** u, with two matrix products, h W^T and q W; the backward pass is `g_t * u_t`,
elementwise. A chunked cross-entropy computes the logits again in the backward pass, which takes
three products. Nothing of size (N, V) outlives a block of rows.

    where               how                                       memory beyond results and u (N, H)
    CPU, gradient       product, in-place softmax, product        a block of up to 256 rows
    CPU, no gradient    one product, tiles, online softmax        a tile of 512 x 2048 floats
    GPU                 cuBLAS product, one Triton fold, product  a block: a 32nd of it, up to 1 GiB

Logits are float32 whatever the inputs are: with bfloat16 logits a log-prob can be wrong by 5e-2. A
head that is trained goes through plain autograd. A head that is split over GPUs is not supported.
lab/speed/logprob.py measures the speed; lab/evidence/speed_cpu.json has the results.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

BLOCK_BYTES = 64 << 20
"""Memory of a block of logits on a CPU. A single block is alive at a time, whatever N is."""


def rows_on_gpu(vocab: int, gpu_bytes: int) -> int:
    """Returns the rows of a block on a GPU with so much memory. A 32nd of the memory, but at most
    1 GiB, is for logits. Each logit takes 4 bytes of z and 2 bytes of q.
    """
    budget = min(1 << 30, gpu_bytes // 32)
    return max(64, min(4096, budget // (6 * vocab) // 64 * 64))


def linear_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-prob of each target, and the entropy, under softmax(hidden W^T /
    temperature).

    Args:
        hidden: (N, H), any float dtype; logits are computed in float32 whatever it is.
        weight: (V, H), the language-model head.
        targets: (N,), token ids in [0, V).
        temperature: what the logits are divided by, > 0.

    Returns:
        (logprob, entropy), both (N,) float32, in nats, differentiable in `hidden`. A gradient
        through logprob costs nothing more. For a gradient through entropy, or of a trainable head,
        the logits are computed again.
    """
    if weight.requires_grad:
        return plain_logprob(hidden, weight, targets, temperature)
    return _FrozenHead.apply(hidden, weight, targets, temperature)


def plain_logprob(hidden, weight, targets, temperature=1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same as `linear_logprob`, with all (N, V) logits. A trainable head needs it, and
    it is the tests' oracle.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(wide) @ weight.to(wide).T
    logp = torch.log_softmax(logits / temperature, dim=-1)  # (N, V)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        ctx.set_materialize_grads(False)  # an unused entropy then has gradient None, not zeros
        need_u = ctx.needs_input_grad[0]
        if hidden.is_cuda and triton is not None and hidden.dtype != torch.float64:
            logp, entropy, u = _score_on_gpu(hidden, weight, targets, temperature, need_u)
        else:
            wide = torch.promote_types(hidden.dtype, torch.float32)
            # the temperature is folded into h: N * H divisions, not N * V
            h, w = hidden.to(wide) / temperature, weight.to(wide)
            if need_u:
                logp, entropy, u = _score_and_u(h, w, targets)
                u = u.div_(temperature).to(hidden.dtype)  # d/dh = (1/T) d/d(h/T)
            else:
                (logp, entropy), u = _score(h, w, targets), None
        ctx.save_for_backward(u, hidden, weight, targets)
        ctx.temperature = temperature
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        u, hidden, weight, targets = ctx.saved_tensors
        if grad_entropy is not None:
            grad = _recomputed(hidden, weight, targets, ctx.temperature, grad_logp, grad_entropy)
        elif grad_logp is None:
            grad = None
        else:
            grad = (grad_logp[:, None] * u).to(u.dtype)  # float32 product, rounded once
        return grad, None, None, None


def _recomputed(hidden, weight, targets, temperature, grad_logp, grad_entropy):
    """Returns the gradient of a loss that uses the entropy, (N, H). The logits are computed again,
    block by block.
    """
    grad = torch.empty_like(hidden)
    for start in range(0, len(hidden), 64):
        i = slice(start, start + 64)
        with torch.enable_grad():
            h = hidden[i].detach().requires_grad_()
            logp, entropy = plain_logprob(h, weight, targets[i], temperature)
        upstream = [torch.zeros_like(logp) if grad_logp is None else grad_logp[i], grad_entropy[i]]
        grad[i] = torch.autograd.grad([logp, entropy], h, upstream)[0]
    return grad


def _score_and_u(h, w, targets):
    """Returns logp (N,), entropy (N,), and u = W[y] - E_p[W], (N, H), with two products.

    Args:
        h: (N, H) states.
        w: (V, H), the head.
        targets: (N,) token ids.
    """
    n, vocab = len(h), len(w)
    # as many rows as BLOCK_BYTES hold; at most 256, because a block should stay near the cache,
    # and at least 16, because with fewer rows all of W is read for too little work
    rows = max(16, min(256, BLOCK_BYTES // (4 * vocab)))
    logp, u = h.new_empty(n), torch.empty_like(h)
    for start in range(0, n, rows):
        i = slice(start, start + rows)
        y = targets[i, None]  # (r, 1)
        z = float32_product(h[i], w.T)  # (r, V)
        top, z_y = z.amax(1, keepdim=True), z.gather(1, y)
        p = z.sub_(top).exp_()  # p_v * s, not normalised yet, which saves a pass over V
        s = p.sum(1, keepdim=True)
        log_s = s.log()
        logp[i] = (z_y - top - log_s).squeeze(1)
        # u = W[y] - sum_v p_v W_v. The one-hot goes into the product: where p_y is nearly 1, a
        # difference of products would cancel
        p.scatter_add_(1, y, -s)
        u[i] = float32_product(p, w) / -s
        del z, p  # or the next block would be made beside this one
    # The entropy comes for free: H = log Z - E_p[z] = (z_y - E_p[z]) - log p_y, and h . u is
    # z_y - E_p[z]
    return logp, (h * u).sum(1) - logp, u


def _score(h, w, targets):
    """Returns logp and entropy, (N,) each, with a single product, because no gradient is wanted. An
    online softmax takes in one narrow tile of the vocabulary after the other.
    """
    n, vocab, rows, columns = len(h), len(w), 512, 2048
    logp, entropy = h.new_empty(n), h.new_empty(n)
    for start in range(0, n, rows):
        i = slice(start, min(start + rows, n))
        r = i.stop - start
        top = h.new_full((r, 1), -torch.inf)  # running maximum of z
        # running sums of e^(z - top) and of e^(z - top) * (z - top)
        s, sz = h.new_zeros(r, 1), h.new_zeros(r, 1)
        for first in range(0, vocab, columns):
            z = float32_product(h[i], w[first : first + columns].T)  # (r, c)
            new = torch.maximum(top, z.amax(1, keepdim=True))
            shrink = (top - new).exp_()  # 0 at the first tile
            sz = shrink * (sz + torch.where(s > 0, s * (top - new), 0.0))
            z.sub_(new)
            e = z.exp()
            s = s * shrink + e.sum(1, keepdim=True)
            sz += e.mul_(z).sum(1, keepdim=True)
            top = new
        z_y = (h[i] * w[targets[i]]).sum(1, keepdim=True)
        log_s = s.log()
        logp[i] = (z_y - top - log_s).squeeze(1)
        entropy[i] = (log_s - sz / s).squeeze(1)
    return logp, entropy


# ------------------------------------------------------------------ on a GPU
# A product by cuBLAS, a fold, and another product by cuBLAS. A single flash-style kernel cannot do
# all three: its accumulator would be rows x H floats, which is more than shared memory.
if triton is not None:

    @triton.jit
    def _fold(
        Z, Q, Y, LOGP, ENTROPY, vocab, inv_t, WRITE_Q: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """A program for each row: from logits z, (V,), to log p_y, the entropy and, in Q,
        one-hot(y) - p.
        """
        row = tl.program_id(0).to(tl.int64)
        Z += row * vocab
        y = tl.load(Y + row)
        lanes = tl.arange(0, BLOCK)
        # every lane keeps its own online softmax; they are joined once, at the end
        top = tl.full([BLOCK], -float("inf"), tl.float32)
        s = tl.zeros([BLOCK], tl.float32)
        sz = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            inside = start + lanes < vocab
            z = tl.load(Z + start + lanes, mask=inside, other=0.0).to(tl.float32) * inv_t
            new = tl.where(inside, tl.maximum(top, z), top)
            e = tl.where(inside, tl.exp(z - new), 0.0)
            shrink = tl.where(s > 0, tl.exp(top - new), 0.0)
            s = s * shrink + e
            sz = sz * shrink + e * z
            top = new
        highest = tl.max(top, 0)
        weight = tl.where(s > 0, tl.exp(top - highest), 0.0)
        total = tl.sum(s * weight, 0)
        log_z = highest + tl.log(total)
        tl.store(LOGP + row, tl.load(Z + y).to(tl.float32) * inv_t - log_z)
        tl.store(ENTROPY + row, log_z - tl.sum(sz * weight, 0) / total)
        if WRITE_Q:
            Q += row * vocab
            for start in range(0, vocab, BLOCK):
                inside = start + lanes < vocab
                z = tl.load(Z + start + lanes, mask=inside, other=0.0).to(tl.float32)
                q = tl.where(start + lanes == y, 1.0, 0.0) - tl.exp(z * inv_t - log_z)
                tl.store(Q + start + lanes, q.to(Q.dtype.element_ty), mask=inside)


def _score_on_gpu(hidden, weight, targets, temperature, need_u):
    """Returns logp (N,), entropy (N,), and u (N, H) or None, without waiting for the GPU; the
    arguments are those of `linear_logprob`.
    """
    n, vocab = len(hidden), len(weight)
    weight = weight.to(hidden.dtype)  # under autocast the head may be wider than the hidden states
    logp = torch.empty(n, dtype=torch.float32, device=hidden.device)
    entropy = torch.empty_like(logp)
    u = torch.empty_like(hidden) if need_u else None
    gpu_bytes = 32 * BLOCK_BYTES  # for Triton's interpreter on a CPU
    if hidden.is_cuda:
        gpu_bytes = torch.cuda.get_device_properties(hidden.device).total_memory
    rows = rows_on_gpu(vocab, gpu_bytes)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, n, rows):
            i = slice(start, min(start + rows, n))
            z = float32_product(hidden[i], weight.T)  # (r, V) float32
            q = torch.empty(z.shape, dtype=hidden.dtype, device=z.device) if need_u else z
            _fold[(len(z),)](
                z, q, targets[i], logp[i], entropy[i], vocab, 1.0 / temperature,
                WRITE_Q=need_u, BLOCK=4096, num_warps=8,
            )  # fmt: skip
            if need_u:
                u[i] = float32_product(q, weight).div_(temperature)
            del z, q  # or the next block would be made beside this one
    return logp, entropy, u


def float32_product(a, b):
    """Returns a @ b, (..., m), of a (..., n) and b (n, m), in float32, without rounding to the
    inputs' dtype in between. Of float64 inputs it is float64.

    On a CPU oneDNN computes it, as for torch.compile. torch's own product goes to MKL, which is
    slower on the AMD processor on which lab/speed/logprob.py has run.
    """
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    if a.dtype == torch.float64:
        return a @ b
    if a.is_cuda or not torch.backends.mkldnn.is_available():
        return a.float() @ b.float()
    return torch.ops.mkldnn._linear_pointwise(a.float(), b.float().T, None, "none", [], "")
