"""Layers that compute what those of transformers and PEFT do, faster: where texts are short, an
update takes as long as its GPU kernels are many. A layer becomes one of these by its class alone.
"""

from common.logprob import float32_product

import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from peft.tuners.lora.bnb import Linear4bit


class FrozenLinear(torch.nn.Linear):
    """A layer of the base on a CPU, by `float32_product`, which says why."""

    def forward(self, x):
        if self.weight.requires_grad or not x.dtype == self.weight.dtype == torch.float32:
            return super().forward(x)
        y = _FrozenProduct.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return float32_product(x, weight.T)

    @staticmethod
    def backward(ctx, grad):
        return float32_product(grad, *ctx.saved_tensors), None


class FusedNorm(torch.nn.Module):
    """weight * x / sqrt(mean of x^2 + eps): one kernel in place of the seven of transformers."""

    @staticmethod
    def replaces(module) -> bool:
        """Llama's norm, which most models have; not those with 1 + weight, a mean or a gate."""
        return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):  # it computes in float32 by itself
            return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


class FusedLora(Linear4bit):
    """A 4-bit layer with its player's adapter as one function of autograd,

        y = x W^T + scaling (x A^T) B^T

    where PEFT's modules, one after the other, take more kernels and more of Python.
    """

    def forward(self, x):
        name, *more = self.active_adapters
        if self.disable_adapters or self.merged or more:
            return super().forward(x)
        if torch.is_autocast_enabled(x.device.type):  # x is float32 where a LayerNorm made it
            x = x.to(torch.get_autocast_dtype(x.device.type))
        A, B = self.lora_A[name].weight, self.lora_B[name].weight
        return _LoraProduct.apply(x, A, B, self.base_layer, self.scaling[name])


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, A, B, layer, scaling):
        """x: (..., in); A: (r, in) and B: (out, r), float32; layer: the base's -> (..., out)"""
        A, B, rows = A.to(x.dtype), B.to(x.dtype), x.flatten(0, -2)  # rows: (N, in)
        h = F.linear(rows, A)  # (N, r)
        y = layer(rows).addmm_(h, B.T, alpha=scaling)  # (N, out)
        ctx.save_for_backward(rows, h, A, B)
        # not among them: what unpacks W, quant_state, is an attribute of the parameter
        ctx.weight, ctx.scaling, ctx.shape = layer.weight, scaling, x.shape
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, grad):
        rows, h, A, B = ctx.saved_tensors
        grad = grad.flatten(0, -2)  # (N, out)
        grad_h = grad @ B  # (N, r)
        grad_x = None
        if ctx.needs_input_grad[0]:
            W = dequantize_4bit(ctx.weight.data, ctx.weight.quant_state).to(grad.dtype)  # (out, in)
            grad_x = (grad @ W).addmm_(grad_h, A, alpha=ctx.scaling).view(ctx.shape)
        # autograd makes them float32, as A and B are
        return grad_x, ctx.scaling * (grad_h.T @ rows), ctx.scaling * (grad.T @ h), None, None
