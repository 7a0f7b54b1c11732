"""Layers that replace those of transformers and PEFT, against float64 and against these."""

import copy

from common.fast.layers import FrozenLinear, FusedLora, FusedNorm
from common.run.models import load_model

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.bnb import Linear4bit as Lora4bit
from trainers import SHAPE
from transformers import AutoModelForCausalLM, Cohere2Config, Gemma2Config, LlamaConfig, Qwen3Config


@pytest.mark.parametrize("bias", [False, True])
def test_a_layers_output_by_float64(bias):
    """Also of rows that lie apart in memory; one that a fork trains has its gradients."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 32, bias=bias)
    layer.__class__ = FrozenLinear
    x = torch.randn(5, 48, 3).transpose(1, 2).requires_grad_()  # (5, 3, 48)
    upstream = torch.randn(3, 5, 32).transpose(0, 1)
    with torch.no_grad():
        y = layer(x)
    found = torch.autograd.grad(layer(x), [x, layer.weight], upstream)
    wide, W = (t.detach().double().requires_grad_() for t in (x, layer.weight))
    exact = wide @ W.T + (layer.bias.detach().double() if bias else 0)
    expected = torch.autograd.grad(exact, [wide, W], upstream.double())
    for one, other in zip([y, *found], [exact, *expected]):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)


def test_every_layer_of_the_base_and_its_head_are_computed_so():
    model, _ = load_model("tiny", ["player"], 4, False, 0)
    found = [module for module in model.modules() if isinstance(module, FrozenLinear)]
    assert len(found) == 7 * model.config.num_hidden_layers + 1
    assert not any(module.weight.requires_grad for module in found)


# ------------------------------------------------------------------ norms
@pytest.mark.parametrize("config, norms", [(LlamaConfig, 5), (Qwen3Config, 9)])
def test_norms_of_one_kernel_are_those_of_transformers(config, norms):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SHAPE))
    replaced = [module for module in model.modules() if FusedNorm.replaces(module)]
    assert len(replaced) == norms
    for module in replaced:
        torch.nn.init.normal_(module.weight)
    ids = torch.randint(40, (3, 7))
    wide = copy.deepcopy(model).double()
    for module in replaced:
        module.__class__ = FusedNorm
    found, exact = (m(ids).logits for m in (model, wide))
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    heads = [m.get_input_embeddings().weight for m in (model, wide)]
    one, other = (torch.autograd.grad(y[:, -1].sum(), w) for y, w in zip((found, exact), heads))
    torch.testing.assert_close(one[0].double(), other[0], rtol=0, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):  # which would make it float32
        assert replaced[-1](torch.ones(2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("config", [Gemma2Config, Cohere2Config])
def test_norms_of_another_formula_are_left_alone(config):
    model = AutoModelForCausalLM.from_config(config(**SHAPE))
    assert not any(FusedNorm.replaces(module) for module in model.modules())


# ------------------------------------------------------------------ adapters
PEFTS = {False: LoraLinear, True: Lora4bit}  # by --four-bit
both = pytest.mark.parametrize("four_bit", PEFTS)


def layer_of(four_bit: bool) -> tuple:
    """(a layer with two adapters that are not zero, its weight (out, in))"""
    model, _ = load_model("tiny", ["player", "other"], 4, four_bit, 0)
    layers = [module for module in model.modules() if isinstance(module, PEFTS[four_bit])]
    assert len(layers) == 7 * model.config.num_hidden_layers
    assert all(isinstance(layer, FusedLora) for layer in layers)
    layer = layers[3]
    for B in layer.lora_B.values():
        torch.nn.init.normal_(B.weight)
    W = layer.base_layer.weight
    return layer, dequantize_4bit(W.data, W.quant_state) if four_bit else W.detach()


@pytest.mark.parametrize("who", ["player", "other"])
@both
def test_a_layer_with_its_adapter_by_float64(four_bit, who):
    """Output, and gradients of input, A and B; the other adapter has none."""
    layer, W = layer_of(four_bit)
    layer.set_adapter(who)
    torch.manual_seed(0)
    x = torch.randn(5, 3, W.shape[1]).transpose(0, 1).requires_grad_()  # (3, 5, in), lies apart
    A, B = layer.lora_A[who].weight, layer.lora_B[who].weight
    upstream = torch.randn(3, 5, W.shape[0])
    y = layer(x)
    found = torch.autograd.grad(y, [x, A, B], upstream)
    x, A, B = (t.detach().double().requires_grad_() for t in (x, A, B))
    expected = x @ W.double().T + 2 * (x @ A.T) @ B.T  # alpha is twice the rank
    exact = torch.autograd.grad(expected, [x, A, B], upstream.double())
    for one, other in zip([y, *found], [expected, *exact]):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@both
def test_under_autocast_gradients_are_float32_and_as_near_as_pefts(four_bit, given):
    """Also of float32 inputs, which a LayerNorm leaves under autocast."""
    layer, W = layer_of(four_bit)
    layer.base_layer.compute_dtype = torch.bfloat16  # of one in four bits
    torch.manual_seed(0)
    x = torch.randn(64, W.shape[1]).bfloat16().to(given).requires_grad_()
    inputs = [x, layer.lora_A["player"].weight, layer.lora_B["player"].weight]
    upstream, errors = torch.randn(64, W.shape[0]).bfloat16(), []
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = wide[0] @ W.double().T + 2 * (wide[0] @ wide[1].T) @ wide[2].T
    exact = [exact, *torch.autograd.grad(exact, wide, upstream.double())]
    for kind in (PEFTS[four_bit], type(layer)):
        layer.__class__ = kind
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        found = [y, *torch.autograd.grad(y, inputs, upstream.to(y.dtype))]
        assert [t.dtype for t in found[1:]] == [given, torch.float32, torch.float32]
        errors.append([((a - b).norm() / b.norm()).item() for a, b in zip(found, exact)])
    assert all(ours < 1.1 * pefts and ours < 0.01 for pefts, ours in zip(*errors)), errors


@pytest.mark.parametrize("more", [{"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}])
@both
def test_an_adapter_of_another_formula_is_pefts(four_bit, more):
    model, _ = load_model("tiny", ["player"], 4, four_bit, 0)
    model.add_adapter("more", LoraConfig(r=4, target_modules=["q_proj"], **more))
    layer = next(module for n, module in model.named_modules() if n.endswith("q_proj"))
    torch.nn.init.normal_(layer.lora_B["more"].weight)
    if "lora_bias" in more:
        torch.nn.init.normal_(layer.lora_B["more"].bias)
    layer.set_adapter("more")
    x, found = torch.randn(2, layer.in_features), []
    for kind in (type(layer), PEFTS[four_bit]):
        layer.__class__ = kind
        torch.manual_seed(0)
        found.append(layer.train()(x))
    assert torch.equal(*found)


@both
def test_with_two_adapters_it_is_pefts_and_without_any_the_base(four_bit):
    layer, W = layer_of(four_bit)
    kind, x = type(layer), torch.randn(2, W.shape[1])
    layer.set_adapter(["player", "other"])
    two = layer(x)
    layer.__class__ = PEFTS[four_bit]
    assert torch.equal(two, layer(x))
    layer.__class__ = kind
    layer.set_adapter("player")
    layer.enable_adapters(False)
    torch.testing.assert_close(layer(x), x @ W.T)
