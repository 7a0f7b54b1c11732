"""What docs/one-gpu.md says of FSDP: a sharded 4-bit base gives the gradients of the whole one."""

from conftest import ROOT, run_two_processes

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import common
from common.cotrainer import _install_scoring
from common.model import add_players

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config

folder = sys.argv[1]
dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))


def build(storage):
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=storage,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=settings)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    model = add_players(model, ["generator", "verifier"], 4, 0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
    _install_scoring(model.get_base_model())
    return model


ids = torch.randint(5, 300, (2, 12), generator=torch.Generator().manual_seed(0))[rank : rank + 1]


def gradients(model):
    logp, _ = model(input_ids=ids, attention_mask=torch.ones_like(ids), score=(6, 1.0))
    logp.sum().backward()
    return {{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


whole = gradients(build(torch.uint8))
for gradient in whole.values():
    dist.all_reduce(gradient)
model = build(torch.float32)
for layer in model.get_base_model().model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
sharded = {{name: gradient.full_tensor() for name, gradient in gradients(model).items()}}
assert whole.keys() == sharded.keys() and all(".generator." in name for name in whole)
for name in whole:
    assert torch.allclose(whole[name] / 2, sharded[name], atol=1e-6), name
assert max(g.abs().max() for g in whole.values()) > 0.01
weight = next(p for name, p in model.named_parameters() if "q_proj.base_layer.weight" in name)
assert weight.to_local().numel() == weight.numel() // 2
print("the same gradients")
dist.destroy_process_group()
"""


def test_a_sharded_four_bit_base_gives_the_same_gradients(tmp_path):
    from transformers import AutoModelForCausalLM, Qwen2Config

    shape = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(Qwen2Config(vocab_size=320, **shape)).save_pretrained(tmp_path / "model")
    (tmp_path / "sharded.py").write_text(SCRIPT.format(root=str(ROOT)))
    result = run_two_processes(tmp_path / "sharded.py", tmp_path / "model")
    assert result.returncode == 0 and "the same gradients" in result.stdout, result.stderr
