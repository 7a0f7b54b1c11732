"""The GPU path's fold on a CPU, through Triton's interpreter (where Triton is installed), and on a
GPU."""

import os
import subprocess
import sys

from common.logprob import linear_logprob, plain_logprob

import pytest
import torch
from conftest import ROOT

CHECK = """
import torch
from common.logprob import _score_on_gpu, plain_logprob
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


def test_fold_through_the_interpreter():
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
