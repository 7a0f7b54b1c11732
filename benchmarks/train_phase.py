"""Loss and backward pass of a batch, ours against TRL's own: python benchmarks/train_phase.py

One batch of rollouts, half of its groups constant, ragged lengths, on two copies of one model with
one LoRA adapter: TRL's GRPOTrainer with its own `_compute_loss` and micro-batches, CoTrainer with
its `loss` and `micro_batches`. Both compute the same: one update per batch, so a ratio of 1; a mean
over the tokens of the batch; and with --kl the k3 penalty as in the papers, for which TRL's
use_bias_correction_kl has to be off. The log-probs of the base are given to both. Entropy is
computed by both, because both log it. The gradients must agree.

Alternating; a figure is the median of the ratios within one repetition, with their range. Goes into
docs/evidence/train_phase_<device>.json, beside what was measured with other threads and shapes.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402, F401
from common.advantage import group_advantage  # noqa: E402
from common.cotrainer import CoTrainer, Player  # noqa: E402
from common.model import TINY  # noqa: E402

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict  # noqa: E402

SHAPES = {  # rows, group, micro-batch, longest prompt, longest completion
    "embedded": (128, 8, 32, 64, 64),
    "qwen2.5-0.5b": (16, 4, 4, 64, 96),
}


def load(shape: str):
    if shape == "embedded":
        return AutoModelForCausalLM.from_pretrained(TINY)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def two_adapters(base) -> tuple:
    """The same LoRA adapter on two copies of the base, called "default" and "player"."""
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    theirs = get_peft_model(copy.deepcopy(base), lora)
    ours = get_peft_model(base, lora, adapter_name="player")
    parameters = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            draw = torch.Generator().manual_seed(len(name))
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.02
            parameters[name.replace(".default.", ".player.")].data = parameter.data.clone()
    return theirs, ours


def rollouts(shape: str, vocabulary: int, pad_id: int) -> dict:
    """Random tokens. Completions have uniform lengths; prompts are alike in a group."""
    rows, group, _, longest_prompt, longest = SHAPES[shape]
    draw = torch.Generator().manual_seed(1)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=draw)

    lengths = integers(longest_prompt // 3, longest_prompt + 1, rows // group)
    prompt_lengths = lengths.repeat_interleave(group)  # (B,)
    lengths = integers(longest // 6, longest + 1, rows)  # (B,)
    prompt_mask = (torch.arange(longest_prompt).flip(0) < prompt_lengths[:, None]).long()
    completion_mask = (torch.arange(longest) < lengths[:, None]).long()  # (B, T)
    prompts = integers(5, vocabulary, rows // group, longest_prompt).repeat_interleave(group, 0)
    completions = integers(5, vocabulary, *completion_mask.shape)
    rewards = integers(0, 2, rows).float()
    rewards[: rows // 2] = 1.0  # half of the groups constant
    return {
        "prompt_ids": torch.where(prompt_mask.bool(), prompts, pad_id),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.where(completion_mask.bool(), completions, pad_id),
        "completion_mask": completion_mask,
        "advantages": group_advantage(rewards, group),
        "num_items_in_batch": completion_mask.sum(),
    }


def two_trainers(shape: str, tokenizer, kl: float) -> tuple[GRPOTrainer, CoTrainer]:
    rows, group, micro_batch, _, longest = SHAPES[shape]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        steps_per_generation=rows // micro_batch,
        num_generations=group,
        max_completion_length=longest,
        loss_type="dapo",
        use_bias_correction_kl=False,
        beta=0.0,
        gradient_checkpointing=False,
        bf16=False,
        report_to="none",
        max_steps=1,
    )

    def no_reward(completions, **_):
        return [0.0] * len(completions)

    data = {
        "train_dataset": Dataset.from_list([{"prompt": "3+4 mod 100"}] * rows),
        "processing_class": tokenizer,
    }
    other, model = two_adapters(load(shape))
    theirs = GRPOTrainer(other, no_reward, copy.copy(config), **data)
    theirs.beta = kl  # set now, because TRL would make a reference model of its own
    players = {"player": Player([no_reward], 1e-3, longest, group)}
    ours = CoTrainer(model, players, copy.copy(config), kl=kl, **data)
    for trainer in (theirs, ours):
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = rows // micro_batch
    return theirs, ours


def their_gradient(trainer: GRPOTrainer, batch: dict) -> tuple[float, dict]:
    trainer.model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    count = trainer.args.steps_per_generation
    for part in split_tensor_dict(shuffle_sequence_dict(batch), count):
        trainer._compute_loss(trainer.model, part).backward()
    return time.perf_counter() - start, gradients(trainer)


def our_gradient(trainer: CoTrainer, batch: dict) -> tuple[float, dict]:
    trainer.model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    with trainer.playing("player"):
        for part in trainer.micro_batches(batch):
            trainer.loss(trainer.model, part).backward()
    return time.perf_counter() - start, gradients(trainer)


def gradients(trainer) -> dict:
    found = [(name, p.grad) for name, p in trainer.model.named_parameters() if p.grad is not None]
    return {name.replace(".default.", ".player."): grad for name, grad in found}


def measure(shape: str, repeats: int, kl: float) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    vocabulary = len(tokenizer) if shape == "embedded" else 151936
    theirs, ours = two_trainers(shape, tokenizer, kl)
    batch = rollouts(shape, vocabulary, tokenizer.pad_token_id)
    if kl:
        logps = ours.log_probs(None, batch)  # (B, T) of the base, under the name that each gives it
        batch |= {"ref_per_token_logps": logps, "base_logps": logps}
    methods = {
        "trl": lambda: their_gradient(theirs, batch),
        "ours": lambda: our_gradient(ours, batch | {"player": "player"}),
    }
    times, last = {"trl": [], "ours": []}, {}
    for repeat in range(repeats + 1):
        for name, method in methods.items():
            seconds, last[name] = method()
            if repeat:  # the first warms up
                times[name].append(seconds)
    scale = max(grad.abs().max() for grad in last["trl"].values())
    difference = max((last["ours"][n] - grad).abs().max() for n, grad in last["trl"].items())
    ratios = [a / b for a, b in zip(times["ours"], times["trl"])]
    return {
        "shape": shape,
        "threads": torch.get_num_threads(),
        "kl": kl,
        "rows": len(batch["completion_ids"]),
        "repeats": repeats,
        "trl_ms": statistics.median(times["trl"]) * 1e3,
        "ours_ms": statistics.median(times["ours"]) * 1e3,
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "gradient_difference": float(difference / scale),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=25, help="a large shape: three times")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the KL penalty")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    gpu = torch.cuda.is_available()
    name = "train_phase_gpu.json" if gpu else "train_phase_cpu.json"
    out = args.out or ROOT / "docs" / "evidence" / name
    table = json.loads(out.read_text())["rows"] if out.exists() else []
    for shape in args.shapes:
        row = measure(shape, args.repeats if shape == "embedded" else 3, args.kl)
        print(row, flush=True)
        table = [other for other in table if kind(other) != kind(row)] + [row]
    machine = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU"
    result = {"machine": machine, "torch": torch.__version__, "rows": table}
    out.write_text(json.dumps(result, indent=1) + "\n")


def kind(row: dict) -> tuple:
    return row["shape"], row["threads"], row.get("kl", 0.0)


if __name__ == "__main__":
    main()
