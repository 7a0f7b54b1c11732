"""linear_logprob against the plain formula in float64, gradients included."""

import os
import subprocess
import sys

from common.fast import logprob
from common.fast.logprob import linear_logprob, plain_logprob

import pytest
import torch
from conftest import ROOT


def inputs(n=37, h=16, v=101, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=generator, dtype=torch.float64)
    weight = torch.randn(v, h, generator=generator, dtype=torch.float64)
    targets = torch.randint(v, (n,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), targets


def assert_equals_autograd(loss, n=37, temperature=1.0, first=linear_logprob):
    """Values and d loss(logp, entropy) / d hidden, of `first` and of the plain formula."""
    hidden, weight, targets = inputs(n)
    results = []
    for function in (first, plain_logprob):
        h = hidden.clone().requires_grad_()
        logp, entropy = function(h, weight, targets, temperature)
        loss(logp, entropy).backward()
        results.append((logp.detach(), entropy.detach(), h.grad))
    for ours, plain in zip(*results):
        assert (ours - plain).abs().max() <= 1e-11


def uneven(values):
    """Of every row another share."""
    return (values * torch.linspace(-1, 1, len(values))).sum()


# one row at a time, ragged blocks, one block
@pytest.mark.parametrize("block_bytes", [1, 4 * 101 * 5, 1 << 26])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_values_and_gradient_equal_autograd(monkeypatch, block_bytes, temperature):
    monkeypatch.setattr(logprob, "BLOCK_BYTES", block_bytes)
    assert_equals_autograd(lambda logp, _: uneven(logp), temperature=temperature)


@pytest.mark.parametrize("block_bytes", [1, 1 << 26])
@pytest.mark.parametrize("logp_too", [False, True])
def test_a_gradient_through_the_entropy(monkeypatch, block_bytes, logp_too):
    """Asked for, it is recomputed; the frozen head's shortcut knows only d logp."""
    monkeypatch.setattr(logprob, "BLOCK_BYTES", block_bytes)

    def loss(logp, entropy):
        return uneven(entropy) + logp_too * logp.square().sum()

    assert_equals_autograd(loss, n=150, temperature=0.8)  # two blocks and a ragged one


@pytest.mark.filterwarnings("ignore")
def test_inside_of_a_compiled_function():
    def ours(h, *more):
        return linear_logprob(h.neg().neg(), *more)

    compiled = torch.compile(ours, backend="aot_eager")
    assert_equals_autograd(lambda logp, _: logp.sum(), first=compiled)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("vocab", [5, 2048, 5001])  # one tile, a full one, a ragged last one
def test_values_without_gradient(temperature, vocab):
    arguments = *inputs(v=vocab), temperature
    for ours, plain in zip(linear_logprob(*arguments), plain_logprob(*arguments)):
        assert (ours - plain).abs().max() <= 1e-11 and not ours.requires_grad


def test_peaked_and_huge_logits_stay_finite():
    hidden, weight, targets = inputs(dtype=torch.float32)
    hidden = (hidden * 60).requires_grad_()
    logp, entropy = linear_logprob(hidden, weight, targets)
    logp.sum().backward()
    oracle = plain_logprob(hidden.detach().double(), weight.double(), targets)[0]
    assert torch.isfinite(entropy).all() and torch.isfinite(hidden.grad).all()
    torch.testing.assert_close(logp.detach().double(), oracle, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-5)])
@pytest.mark.parametrize("need_gradient", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_vocabulary_of_real_size(dtype, bound, need_gradient, autocast):
    """Qwen2.5's 151,936 words, logits of a spread as models have it; scored in float32."""
    hidden, weight, targets = inputs(24, 64, 151_936)
    hidden, weight = hidden.to(dtype), (weight / 4).to(dtype)
    oracle = plain_logprob(hidden.double(), weight.double(), targets)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = linear_logprob(hidden.requires_grad_(need_gradient), weight, targets)
    assert all(a.dtype == torch.float32 for a in ours)
    assert all((a.detach().double() - b).abs().max() <= bound for a, b in zip(ours, oracle))
    if need_gradient:
        ours[0].sum().backward()
        assert hidden.grad.dtype == dtype


def test_a_trainable_head_gets_its_gradient():
    hidden, weight, targets = inputs()
    weight.requires_grad_()
    logp, entropy = linear_logprob(hidden, weight, targets)
    (found,) = torch.autograd.grad(logp.sum() + entropy.sum(), weight)
    everything = torch.log_softmax(hidden @ weight.T, dim=-1)  # (N, V)
    by_hand = everything[range(len(targets)), targets].sum() - (everything.exp() * everything).sum()
    torch.testing.assert_close(found, torch.autograd.grad(by_hand, weight)[0])


def test_no_rows():
    hidden = torch.zeros(0, 8, requires_grad=True)
    logp, entropy = linear_logprob(hidden, torch.zeros(5, 8), torch.zeros(0, dtype=torch.long))
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert hidden.grad.shape == (0, 8)


# ------------------------------------------------------------------ the GPU path's fold
CHECK = """
import torch
from common.fast.logprob import _score_on_gpu, plain_logprob
for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 2e-5)):
    for vocab in (7, 4096, 5001):
        g = torch.Generator().manual_seed(vocab)
        h = torch.randn(70, 16, generator=g).to(dtype)
        w = torch.randn(vocab, 16, generator=g).to(dtype)
        y = torch.randint(vocab, (70,), generator=g)
        logp, entropy, u = _score_on_gpu(h, w, y, 0.7, True)
        alone = _score_on_gpu(h, w, y, 0.7, False)
        leaf = h.double().requires_grad_()
        expected, H = plain_logprob(leaf, w.double(), y, 0.7)
        expected.sum().backward()
        assert (logp - expected).abs().max() <= limit and (entropy - H).abs().max() <= 1e-4
        assert torch.equal(alone[0], logp) and alone[2] is None
        off = (u.double() - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert off <= (1e-5 if dtype == torch.float32 else 2e-2)
print("fine")
"""


def test_fold_through_tritons_interpreter():
    """On a CPU, where Triton is installed."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command, options = [sys.executable, "-c", CHECK], {"capture_output": True, "text": True}
    result = subprocess.run(command, env=environment, cwd=ROOT, **options)
    assert result.stdout.strip().endswith("fine"), result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("vocab", [1000, 151936])
def test_on_a_gpu(vocab):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 256, generator=generator).cuda().bfloat16().requires_grad_()
    weight = (torch.randn(vocab, 256, generator=generator) / 8).cuda().bfloat16()
    targets = torch.randint(vocab, (300,), generator=generator).cuda()
    logp, _ = linear_logprob(hidden, weight, targets, temperature=0.9)
    logp.sum().backward()
    leaf = hidden.detach().double().requires_grad_()
    expected, _ = plain_logprob(leaf, weight.double(), targets, 0.9)
    expected.sum().backward()
    assert (logp - expected).abs().max() <= 2e-5
    assert (hidden.grad - leaf.grad).abs().max() <= 2e-2 * leaf.grad.abs().max()
