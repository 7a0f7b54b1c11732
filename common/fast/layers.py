"""Layers that compute what the layers of transformers and PEFT compute, in fewer kernels. With
short texts the time of an update grows with the number of its GPU kernels. To replace a layer, its
class is changed; its weights stay where they are.
"""

import os
from contextlib import contextmanager

from common.fast.logprob import float32_product

import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.bnb import Linear4bit as Lora4bit


def replace_layers(model, gpu: bool):
    """Gives each layer of a PeftModel the class below that computes the same, if there is one."""
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and not gpu and "lora_" not in name:
            module.__class__ = FrozenLinear
        elif type(module) is LoraLinear:
            module.__class__ = FusedLoraLinear
        elif type(module) is Lora4bit:
            module.__class__ = FusedLora4bit
        elif gpu and FusedNorm.replaces(module):
            module.__class__ = FusedNorm


class FrozenLinear(torch.nn.Linear):
    """A layer of the base on a CPU. It uses `float32_product`, which says why, in FusedLora, which
    has a backward pass of its own, and wherever no gradient is wanted. Otherwise torch computes it.
    """

    def forward(self, x):
        graph = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        if graph or not x.dtype == self.weight.dtype == torch.float32:
            return super().forward(x)
        y = float32_product(x, self.weight.T)
        return y if self.bias is None else y + self.bias


class FusedNorm(torch.nn.Module):
    """weight * x / sqrt(mean of x^2 + eps), in a single kernel. transformers takes seven."""

    @staticmethod
    def replaces(module) -> bool:
        """Whether it is Llama's norm, which most models have. A norm with 1 + weight, a mean or a
        gate is another.
        """
        return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):  # it computes in float32 by itself
            return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


class FusedLora:
    """A layer with its player's adapter, as a single function of autograd:

        y = x W^T + scaling (x A^T) B^T

    PEFT calls one module after the other, which takes more kernels, more passes over y and more
    Python. If an adapter is more than this formula, PEFT computes it.
    """

    def forward(self, x):
        name, *more = self.active_adapters
        if self.disable_adapters or self.merged or more or not self.is_plain(name):
            return super().forward(x)
        if torch.is_autocast_enabled(x.device.type):  # x is float32 where a LayerNorm made it
            x = x.to(torch.get_autocast_dtype(x.device.type))
        A, B = self.lora_A[name].weight, self.lora_B[name].weight
        return _LoraProduct.apply(x, A, B, self.base_layer, self.scaling[name])

    def is_plain(self, name: str) -> bool:
        """Whether an adapter is A and B alone, without dropout, bias, DoRA or another variant."""
        undropped = isinstance(self.lora_dropout[name], torch.nn.Identity)
        return undropped and self.lora_B[name].bias is None and name not in self.lora_variant


class FusedLoraLinear(FusedLora, LoraLinear):
    """The adapter is on an unquantised layer."""


class FusedLora4bit(FusedLora, Lora4bit):
    """The adapter is on a 4-bit layer."""


class Unpacked(torch.nn.Linear):
    """A 4-bit layer of the base inside `prepared`, with the same numbers, unpacked."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        dtype = layer.compute_dtype
        W = dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(dtype)  # (out, in)
        self.weight = torch.nn.Parameter(W, requires_grad=False)
        if layer.bias is not None:
            self.bias = torch.nn.Parameter(layer.bias.to(dtype), requires_grad=False)

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Packed(torch.nn.Module):
    """A merged layer on a CPU inside `prepared`: `float32_product` alone, without PEFT, with W in
    the order in which oneDNN reads it. oneDNN would otherwise copy W into that order in every call.
    """

    def __init__(self, layer):
        super().__init__()
        self.bias = layer.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.data)

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


@contextmanager
def prepared(model):
    """Inside this block, in which tokens are sampled and nothing is trained, layers keep what they
    would otherwise make for every token: A and B in the dtype of autocast, the packed weights of
    merged layers on a CPU, and unpacked 4-bit weights, if these take at most half of the free
    memory. No number changes, but for the rounding of a single row's packed products.
    """
    device, swapped = model.device, []
    merged = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, FusedLora) and layer.merged and type(layer.base_layer) is FrozenLinear
    ]
    layers = [module for module in model.modules() if isinstance(module, FusedLora)]
    in_four_bits = [layer for layer in layers if isinstance(layer, FusedLora4bit)]
    entry = torch.finfo(in_four_bits[0].base_layer.compute_dtype).bits // 8 if in_four_bits else 0
    size = entry * sum(layer.in_features * layer.out_features for layer in in_four_bits)
    bases = [layer.base_layer for layer in in_four_bits if size <= free_memory(device) / 2]
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        both = [(m, layer) for layer in layers for m in (layer.lora_A, layer.lora_B)]
        swapped = [m[n].weight for m, layer in both for n in layer.active_adapters if n in m]
    before = [parameter.data for parameter in swapped]
    try:
        if torch.backends.mkldnn.is_available():
            for parent, name, layer in merged:
                setattr(parent, name, Packed(layer.base_layer))
        for layer, base in zip(in_four_bits, bases):
            layer.base_layer = Unpacked(base)
        for parameter in swapped:
            parameter.data = parameter.data.to(dtype)
        yield
    finally:
        for parent, name, layer in merged:
            setattr(parent, name, layer)
        for layer, base in zip(in_four_bits, bases):
            layer.base_layer = base
        for parameter, data in zip(swapped, before):
            parameter.data = data


def free_memory(device) -> int:
    """Returns the free bytes of a device, including what torch has reserved and does not use."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, A, B, layer, scaling):
        """Returns y, (..., out). x: (..., in); A: (r, in) and B: (out, r), float32; layer: the
        base's.
        """
        A, B, rows = A.to(x.dtype), B.to(x.dtype), x.flatten(0, -2)  # rows: (N, in)
        h = F.linear(rows, A)  # (N, r)
        y = layer(rows).addmm_(h, B.T, alpha=scaling)  # (N, out)
        ctx.save_for_backward(rows, h, A, B)
        # W is not among them: quant_state, which unpacks it, is an attribute of the parameter
        ctx.weight, ctx.scaling, ctx.shape = layer.weight, scaling, x.shape
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, grad):
        rows, h, A, B = ctx.saved_tensors
        grad = grad.flatten(0, -2)  # (N, out)
        grad_h = grad @ B  # (N, r)
        grad_x = None
        if ctx.needs_input_grad[0]:
            W = ctx.weight  # (out, in)
            if state := getattr(W, "quant_state", None):
                W = dequantize_4bit(W.data, state)
            product = float32_product if grad.dtype == torch.float32 else torch.mm
            grad_x = product(grad, W.to(grad.dtype)).addmm_(grad_h, A, alpha=ctx.scaling)
            grad_x = grad_x.view(ctx.shape)
        # autograd makes the gradients of A and B float32, as A and B are
        return grad_x, ctx.scaling * (grad_h.T @ rows), ctx.scaling * (grad.T @ h), None, None
