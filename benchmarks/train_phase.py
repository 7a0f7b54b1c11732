"""The training phase, `_compute_loss` and backward, ours against TRL's own: python benchmarks/train_phase.py

One batch of rollouts, half of its groups constant, ragged lengths, on two copies of one model with one LoRA adapter:
TRL's GRPOTrainer with its micro-batches, CoTrainer with its own. Alternating; a figure is the median of the ratios within
one repetition, with their range. The gradients must agree. Goes into docs/evidence/train_phase_<device>.json,
beside what was measured with other thread counts and shapes.
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
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM  # noqa: E402
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
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True,
        )
    )  # fmt: skip


def rollouts(shape: str, vocab: int, pad_id: int) -> dict:
    """Random tokens of ragged lengths. Completions end on their own at uniform lengths, prompts are alike in a group."""
    rows, group, _, longest_prompt, longest = SHAPES[shape]
    g = torch.Generator().manual_seed(1)
    prompt_lengths = torch.randint(longest_prompt // 3, longest_prompt + 1, (rows // group,), generator=g).repeat_interleave(
        group
    )
    lengths = torch.randint(longest // 6, longest + 1, (rows,), generator=g)
    prompt_mask = (torch.arange(longest_prompt).flip(0) < prompt_lengths[:, None]).long()
    completion_mask = (torch.arange(longest) < lengths[:, None]).long()
    prompts = torch.randint(5, vocab, (rows // group, longest_prompt), generator=g).repeat_interleave(group, 0)
    completions = torch.randint(5, vocab, completion_mask.shape, generator=g)
    rewards = torch.randint(2, (rows,), generator=g).float()
    rewards[: rows // 2] = 1.0  # half of the groups constant
    return {
        "prompt_ids": torch.where(prompt_mask.bool(), prompts, pad_id),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.where(completion_mask.bool(), completions, pad_id),
        "completion_mask": completion_mask,
        "advantages": group_advantage(rewards, group),
        "num_items_in_batch": completion_mask.sum(),
    }


def gradient(trainer, micro_batches) -> tuple[float, dict]:
    trainer.model.zero_grad(set_to_none=True)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    start = time.perf_counter()
    for micro_batch in micro_batches():
        trainer._compute_loss(trainer.model, micro_batch).backward()
    seconds = time.perf_counter() - start
    return seconds, {
        n.replace(".default.", ".player."): p.grad for n, p in trainer.model.named_parameters() if p.grad is not None
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25, help="of the embedded shape; a large one is measured three times")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table = []
    for shape in args.shapes:
        rows, group, micro, _, longest = SHAPES[shape]
        base = load(shape)
        tokenizer = AutoTokenizer.from_pretrained(TINY)
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        other = get_peft_model(copy.deepcopy(base), lora)
        model = get_peft_model(base, lora, adapter_name="player")
        parameters = dict(model.named_parameters())
        for name, parameter in other.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.02
                parameters[name.replace(".default.", ".player.")].data = parameter.data.clone()
        settings = dict(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro,
            steps_per_generation=rows // micro, num_generations=group, max_completion_length=longest, loss_type="dapo",
            beta=0.0, gradient_checkpointing=False, bf16=False, report_to="none", max_steps=1,
        )  # fmt: skip
        dataset = Dataset.from_list([{"prompt": "3+4 mod 10"}] * rows)
        reward = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
        reward.__name__ = "reward"
        common_arguments = dict(train_dataset=dataset, processing_class=tokenizer)
        theirs = GRPOTrainer(other, reward, GRPOConfig(**settings), **common_arguments)
        ours = CoTrainer(model, {"player": Player([reward], 1e-3, longest, group)}, GRPOConfig(**settings), **common_arguments)
        batch = rollouts(shape, len(tokenizer) if shape == "embedded" else 151936, tokenizer.pad_token_id)
        count = rows // micro
        methods = {
            "trl": lambda: gradient(theirs, lambda: split_tensor_dict(shuffle_sequence_dict(batch), count)),
            "ours": lambda: gradient(ours, lambda: ours._micro_batches(dict(batch), count)),
        }
        ours.become("player")
        theirs.model.train(), ours.model.train()
        times: dict[str, list[float]] = {name: [] for name in methods}
        repeats = args.repeats if shape == "embedded" else 3
        for repeat in range(repeats + 1):
            grads = {}
            for name, method in methods.items():
                seconds, grads[name] = method()
                if repeat:
                    times[name].append(seconds)
        scale = max(g.abs().max() for g in grads["trl"].values())
        difference = max((grads["ours"][n] - g).abs().max() for n, g in grads["trl"].items()) / scale
        ratios = [a / b for a, b in zip(times["ours"], times["trl"])]
        row = {
            "shape": shape, "threads": args.threads, "rows": rows, "repeats": repeats,
            "trl_ms": statistics.median(times["trl"]) * 1e3, "ours_ms": statistics.median(times["ours"]) * 1e3,
            "ratio": statistics.median(ratios), "range": [min(ratios), max(ratios)],
            "gradient_difference": float(difference),
        }  # fmt: skip
        table.append(row)
        print(row, flush=True)
    device = "gpu" if torch.cuda.is_available() else "cpu"
    out = ROOT / "docs" / "evidence" / f"train_phase_{device}.json"
    machine = torch.cuda.get_device_name() if device == "gpu" else f"{platform.machine()} CPU"
    measured = {(row["shape"], row["threads"]) for row in table}
    kept = json.loads(out.read_text())["rows"] if out.exists() else []
    table = [row for row in kept if (row["shape"], row["threads"]) not in measured] + table
    out.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
