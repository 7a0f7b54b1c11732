"""linear_logprob, and a layer of the base, against their peers: python -m lab.speed.logprob

Forward and backward pass with a gradient for the hidden states, a frozen head, and a random
gradient per token. Errors are the largest distance from float64. Of a GPU's peers one more runs
there: cut-cross-entropy, exact. See side_by_side.py for what is written.
"""

import copy
import sys
from functools import partial

from common.fast.layers import FrozenLinear, FusedLoraLinear
from common.fast.logprob import linear_logprob
from lab.speed.side_by_side import GPU, arguments, keep, with_memory

import torch
from peft import LoraConfig, get_peft_model

SIZES = [(2048, 256, 4096), (512, 1024, 32768)]
SIZES = [(16384, 2048, 151936), (16384, 4096, 151936)] if GPU else SIZES
TEMPERATURE = 0.9


def ours(hidden, weight, targets):
    return linear_logprob(hidden, weight, targets, temperature=TEMPERATURE)[0]


def trl(hidden, weight, targets):
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK

    inputs = hidden, weight, None, targets, TEMPERATURE, CHUNK, None, 1.0, ("entropy",)
    return ChunkedLogProbFunction.apply(*inputs)[0]


def liger(hidden, weight, targets):
    """It computes no entropy."""
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

    return _ChunkedSelectiveLogProbFunction.apply(hidden, weight, targets, None, TEMPERATURE, 4096)


def naive(hidden, weight, targets):
    logp = torch.log_softmax((hidden @ weight.T).float() / TEMPERATURE, dim=-1)
    return logp.gather(1, targets[:, None]).squeeze(1)


def cce(hidden, weight, targets):
    from cut_cross_entropy import linear_cross_entropy

    hidden = hidden / TEMPERATURE
    return -linear_cross_entropy(hidden, weight, targets, reduction="none", filter_eps=None)


METHODS = {"ours": ours, "TRL's fused head": trl, "Liger": liger, "plain autograd": naive}
METHODS |= {"cut-cross-entropy": cce} if GPU else {}


def once(method, hidden, weight, targets, upstream) -> torch.Tensor:
    """The log-probs of one forward and backward pass."""
    logp = method(hidden.detach().requires_grad_(), weight, targets)
    logp.backward(upstream.to(logp.dtype))
    return logp.detach()


def make_inputs(n: int, h: int, v: int) -> tuple:
    """Hidden states (N, H), weight (V, H), targets (N,), a gradient per log-prob (N,)."""
    device, dtype = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
    draw = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    hidden = torch.randn(n, h, **draw).to(dtype)
    weight = (torch.randn(v, h, **draw) / h**0.5 * 3).to(dtype)
    return hidden, weight, torch.randint(v, (n,), **draw), torch.randn(n, **draw)


def measure(size: tuple[int, int, int], repeats: int) -> list[dict]:
    """A row per peer; what does not run here is left out, and says so."""
    inputs = hidden, weight, targets, _ = make_inputs(*size)
    some = slice(0, min(len(targets), 256))
    logits = hidden[some].double() @ weight.double().T / TEMPERATURE
    exact = logits.log_softmax(-1).gather(1, targets[some, None])[:, 0]
    runs = {}
    for name, method in METHODS.items():
        run = partial(once, method, *inputs)
        try:
            run()
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:80]}"
            print(f"{name} does not run here: {reason}", file=sys.stderr)
            continue
        runs[name] = run
    rows, last = with_memory(runs, repeats)
    errors = {name: (logp[some].double() - exact).abs().max().item() for name, logp in last.items()}
    N, H, V = size
    for row in rows:
        row["what"] = f"log-probs, forward+backward, {N} tokens, hidden {H}, vocabulary {V:,}"
        row["errors"] = [errors["ours"], errors[row["against"]]]
    return rows


def layer(repeats: int) -> list[dict]:
    """20 times the output of a layer with its adapter, and all gradients."""
    base = torch.nn.Sequential(torch.nn.Linear(576, 1536, bias=False))
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=["0"], init_lora_weights=False)
    (theirs,) = get_peft_model(base, lora).base_model.model
    ours = copy.deepcopy(theirs)
    ours.__class__, ours.base_layer.__class__ = FusedLoraLinear, FrozenLinear
    x, upstream = torch.randn(768, 576, requires_grad=True), torch.randn(768, 1536)

    def run(layer):
        trained = [p for p in layer.parameters() if p.requires_grad]
        for _ in range(20):
            found = torch.autograd.grad(layer(x), [x, *trained], upstream)
        return found

    methods = {"ours": partial(run, ours), "PEFT's": partial(run, theirs)}
    rows, last = with_memory(methods, repeats)
    torch.testing.assert_close(*last.values(), rtol=1e-4, atol=1e-3)
    threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    what = f"a layer with its adapter, forward+backward, 768 rows, 576 x 1,536, {threads}"
    return [row | {"what": what} for row in rows]


def main():
    parser = arguments(__doc__, repeats=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not GPU:
        keep(layer(args.repeats), args.out)
    for size in SIZES:
        keep(measure(size, args.repeats), args.out)


if __name__ == "__main__":
    main()
