"""What the project relies on in the insides of TRL and Trainer, which common/core/cotrainer.py and
common/core/trl.py override; and of PEFT, bitsandbytes, transformers and torch, whose layers,
attention and products common/fast/ replaces. An upgrade that moves any of it fails here.
"""

import inspect

from common import checked
from common.core.cotrainer import CoTrainer
from common.core.trl import PlayersTrainer
from common.fast import layers, scoring

import bitsandbytes
import bitsandbytes.cextension
import pytest
import torch
import trl
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from conftest import SCRIPTS, module_of
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.bnb import Linear4bit as Lora4bit
from transformers import AttentionInterface, Trainer
from transformers.integrations import sdpa_attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2RMSNorm
from trl import GRPOConfig, GRPOTrainer

LORA_PRODUCT = "lora_B(lora_A(dropout(x))) * scaling"
OVERRIDDEN = {
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "create_optimizer": ["self", "model"],
    "log": ["self", "logs", "start_time"],
    "create_model_card": ["self", "model_name", "dataset_name"],
    "_get_train_sampler": ["self", "dataset"],
    "_get_output_dir": ["self", "trial"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
}
CALLED = {
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "get_optimizer_cls_and_kwargs": ["args", "model"],
}


def test_version():
    assert trl.__version__.startswith("1.16.")


def test_nothing_else_is_overridden():
    """But for `evaluate`, which common/run/session.py replaces in the instance."""
    ours = {*vars(PlayersTrainer), *vars(CoTrainer)}
    assert {n for n in ours if hasattr(GRPOTrainer, n) and n[:2] != "__"} == {*OVERRIDDEN}
    looked_at = {n for n in vars(checked.CoTrainer) if hasattr(GRPOTrainer, n) and n[:2] != "__"}
    assert looked_at == {"train"}


def test_of_the_scripts_only_spin_overrides_more():
    """Its schedule begins anew with every iteration."""
    found = set()
    for script in SCRIPTS:
        own = [kind for kind in vars(module_of(script)).values() if inspect.isclass(kind)]
        for kind in [k for k in own if issubclass(k, CoTrainer) and k.__name__ != "CoTrainer"]:
            names = [n for n in vars(kind) if hasattr(GRPOTrainer, n) and n[:2] != "__"]
            found |= {(script, name) for name in names}
    assert found == {("spin.py", "create_scheduler")}
    arguments = [*inspect.signature(GRPOTrainer.create_scheduler).parameters]
    assert arguments == ["self", "num_training_steps", "optimizer"]
    assert "self.lr_scheduler" in inspect.getsource(GRPOTrainer.create_scheduler)


@pytest.mark.parametrize("method, arguments", [*OVERRIDDEN.items(), *CALLED.items()])
def test_signatures(method, arguments):
    found = [*inspect.signature(getattr(GRPOTrainer, method)).parameters]
    assert found[: len(arguments)] == arguments


@pytest.mark.parametrize(
    "method, fragments",
    [
        (GRPOTrainer._calculate_rewards, ["self.reward_funcs, self.", "gather(rewards_per_func)"]),
        (GRPOTrainer._log_metric, ["self._pending_metrics[name].append(value)"]),
        (GRPOTrainer.__init__, ["self.eos_token_ids = ", "self._pending_metrics = "]),
        (GRPOTrainer.log, ["self._metrics[mode].items()", "self._metrics[mode].clear()"]),
        # once per optimiser step; then its line, and after that what is due
        (Trainer._maybe_log_save_evaluate, ["self.log(", "self._evaluate(", "_save_checkpoint("]),
        (Trainer._evaluate, ["self.evaluate(ignore_keys="]),
        # `_get_train_sampler` is asked for the rows of all processes, each question's adjacent
        (GRPOTrainer._get_train_sampler, ["mini_repeat_count=self.num_generations"]),
        (GRPOTrainer._get_train_sampler, ["self.args.generation_batch_size // self.num_gen"]),
        (GRPOTrainer.get_train_dataloader, ["sampler_fn=self._get_train_sampler"]),
        # FusedLora computes this product; an adapter that is more has a variant, dropout or bias
        (LoraLinear.forward, ["self.disable_adapters", "self.merged", LORA_PRODUCT]),
        (Lora4bit.forward, ["self.disable_adapters", "self.merged", LORA_PRODUCT]),
        # FusedNorm
        (LlamaRMSNorm.forward, ["pow(2).mean(-1", "self.variance_epsilon", "self.weight * "]),
        (Qwen2RMSNorm.forward, ["pow(2).mean(-1", "self.variance_epsilon", "self.weight * "]),
        # `keep_backward`, and Unpacked, which gives the same numbers
        (Linear4bit.forward, ["self.support_avx512bf16_for_cpu", "_convert_weight_packed"]),
        (Linear4bit.forward, ["x.to(self.compute_dtype)", ".to(inp_dtype)"]),
        # `packed` hands `taken_apart` through the model to what is registered as "sdpa"
        (LlamaAttention.forward, ["get_interface(", "self,", "attention_mask,", "**kwargs"]),
        (Qwen2Attention.forward, ["get_interface(", "self,", "attention_mask,", "**kwargs"]),
        (sdpa_attention.use_gqa_in_sdpa, ["TRANSFORMERS_SDPA_FORCE_GQA"]),
    ],
)
def test_internals(method, fragments):
    source, at = inspect.getsource(method), 0
    for fragment in fragments:
        assert fragment in source[at:], f"{method.__qualname__} no longer has: {fragment}"
        at += source[at:].index(fragment)


def test_defaults_we_leave_alone():
    """None of them is in common/run/args.py, and each one would change what is trained."""
    config = GRPOConfig("unused", use_cpu=True, bf16=False)
    assert (config.adam_beta1, config.adam_beta2, config.adam_epsilon) == (0.9, 0.999, 1e-8)
    assert config.warmup_steps == 0


def test_a_layer_becomes_another_by_its_class_alone():
    """No class has slots or a state of its own, and what FusedLora reads of PEFT's is there."""
    for fused, theirs in (
        (layers.FrozenLinear, torch.nn.Linear),
        (layers.FusedLoraLinear, LoraLinear),
        (layers.FusedLora4bit, Lora4bit),
    ):
        assert issubclass(fused, theirs) and "__init__" not in vars(fused)
        assert not [slot for kind in theirs.__mro__ for slot in vars(kind).get("__slots__", ())]
    body = torch.nn.ModuleDict({"layer": torch.nn.Linear(3, 2)})
    model = get_peft_model(body, LoraConfig(r=1, target_modules=["layer"]), adapter_name="ann")
    model.add_adapter("bob", LoraConfig(r=1, target_modules=["layer"], lora_dropout=0.1))
    layer = model.base_model.model["layer"]
    assert type(layer) is LoraLinear and layer.active_adapters == ["ann"]
    assert not (layer.disable_adapters or layer.merged or layer.lora_variant)
    assert layers.FusedLora.is_plain(layer, "ann") and not layers.FusedLora.is_plain(layer, "bob")
    x = torch.randn(5, 3)
    torch.nn.init.normal_(layer.lora_B["ann"].weight)
    expected = layer(x)
    layer.__class__ = layers.FusedLoraLinear
    torch.testing.assert_close(layer(x), expected)


def test_four_bit_weights():
    assert [*inspect.signature(dequantize_4bit).parameters][:2] == ["A", "quant_state"]
    assert {"ErrorHandlerMockBNBNativeLibrary", "lib"} <= {*dir(bitsandbytes.cextension)}
    layer = Linear4bit(64, 8, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer = layer.to("cpu")  # which packs them
    assert layer.weight.quant_state is not None and layer.compute_dtype == torch.float32
    assert dequantize_4bit(layer.weight.data, layer.weight.quant_state).shape == (8, 64)


def test_attention_is_registered_by_name_for_all_models():
    before = AttentionInterface().get_interface("sdpa", None)
    try:
        scoring.use_packed_attention()
        assert AttentionInterface().get_interface("sdpa", None) is scoring.attention
    finally:
        AttentionInterface.register("sdpa", before)
    theirs = [*inspect.signature(sdpa_attention.sdpa_attention_forward).parameters]
    assert theirs[:5] == ["module", "query", "key", "value", "attention_mask"]


def test_onednn_computes_a_product():
    found = str(torch.ops.mkldnn._linear_pointwise.default._schema)
    of = "(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm) -> Tensor Y"
    assert found == f"mkldnn::_linear_pointwise{of}"
    a, W = torch.randn(5, 3), torch.randn(2, 3)
    product = torch.ops.mkldnn._linear_pointwise(a, W, None, "none", [], "")
    torch.testing.assert_close(product, a @ W.T)
