"""How much memory a run will need, from the model's config alone and before anything is loaded: `estimate`, `check_memory`;
and what saves some: `machine_options`.

    what                                how it is known
    weights, adapters, Adam, gradients  exact: sums over the shapes of the model, built without memory (torch's meta device)
    KV cache                            exact
    activations                         bytes per token, measured on small models with a memory profiler; the coefficients
                                        are below, and tests/test_memory.py measures them again
    fragmentation                       a tenth of all that comes and goes: an allowance, not a measurement

The peak is that of the worse of two phases. Sampling holds the KV cache of all rows that are sampled at once, and the
prefill or the logits; training holds one gradient, one hidden state per layer, and one layer's recomputation.
"""

import importlib.util
import math
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from common.cotrainer import PREFILL_TOKENS
from common.data import UserError
from common.logprob import BLOCK_BYTES, rows_on_gpu
from common.model import TINY, not_found
from common.run import this_process

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

QUESTION_TOKENS = 512
"""What a prompt without a solution in it may take: GSM8K's longest has 355 tokens with the longest instructions here."""
CUDA_CONTEXT = 600 << 20
"""What CUDA takes before the first tensor. Of a GPU that is there, the free memory is asked for, without it."""
FRAGMENTED = 1.1
"""What is allowed for memory that is free but in pieces: an allowance, not a measurement."""
GIB = 1 << 30

# Bytes per token and layer, at 2 bytes an entry: H hidden size, I width of the MLP, A = heads * head size, r LoRA rank
# kept for backward    20 H + 8 I + 10 A + 14 r      two norms in float32; gate, silu, up, their product; q, k, v (repeated
#                                                    for all heads), attention twice; LoRA's middle (A, K with q/k norms)
# only in passing      15 H + 6 I                    gradients of the MLP
# without gradient     12 H + 8 I, or 16 I           the MLP; outside of autocast LoRA computes in float32


def estimate(
    config,
    turns: list[tuple[int, int]],
    *,
    adapters: int,
    lora_rank: int,
    four_bit: bool,
    rows: int,
    micro_batch: int,
    frozen_adapters: int = 0,
    eight_bit_adam: bool = False,
    checkpointing: bool = True,
    entry: int = 2,
    gpu_bytes: int = 24 * GIB,
    vllm_share: float = 0.0,
    processes: int = 1,
) -> dict[str, int]:
    """Bytes by purpose, and the peak.

    Args:
        config: a transformers config of a dense decoder.
        turns: (prompt tokens, completion tokens), at most, of everything that is sampled and trained on.
        adapters: LoRA adapters that are trained, each with Adam's state of its own; one has a gradient at a time.
        rows: rows sampled at once.
        micro_batch: rows per forward and backward pass.
        frozen_adapters: further adapters that are not trained.
        checkpointing: activations are recomputed layer by layer in backward.
        entry: bytes per entry of weights and activations: 2 on a GPU, 4 on a CPU.
        gpu_bytes: the GPU's memory, by which the log-prob sizes its blocks.
        vllm_share: share of the GPU that vLLM takes, and keeps; it then does the sampling.
        processes: of several, each has DDP's buckets, which hold the gradients of all adapters.

    Returns:
        "weights", "adapters", "adam", "certain" (their sum, and exact); "kv_cache", "prefill", "logits", "sampling" (of the
        phase); "gradients", "kept", "layer", "logprob", "training" (of the phase); "peak". Phases include what is certain
        and the allowance for fragmentation.
    """
    linear, other, q_norm = shapes(config)
    lora = [entries for i, o in linear for entries in (lora_rank * i, lora_rank * o)]
    need = {
        "weights": sum(nf4_bytes(i * o) if four_bit else entry * i * o for i, o in linear) + entry * other,
        "adapters": 4 * sum(lora) * (adapters + frozen_adapters),
        "adam": sum(adam_bytes(entries, eight_bit_adam) for entries in lora) * adapters,
    }
    need["certain"] = sum(need.values()) + int(vllm_share * gpu_bytes)
    size = sizes(config.get_text_config())
    sampling = sampling_bytes(size, turns, rows, entry)
    training = training_bytes(size, turns, micro_batch, lora_rank, q_norm, checkpointing, entry, gpu_bytes)
    training["gradients"] = 4 * sum(lora) * (1 if processes == 1 else 1 + adapters)
    training["layer"] += entry * max(i * o for i, o in linear) if four_bit else 0  # one weight out of NF4
    # growing the cache holds one layer's keys twice
    passing = sampling["kv_cache"] * (1 + 1 / (2 * size.layers)) + max(sampling["prefill"], sampling["logits"])
    need |= sampling | {"sampling": need["certain"] + int((0 if vllm_share else passing) * FRAGMENTED)}
    passing = training["gradients"] + training["kept"] + max(training["layer"], training["logprob"])
    need |= training | {"training": need["certain"] + int(passing * FRAGMENTED)}
    return need | {"peak": max(need["sampling"], need["training"])}


def sampling_bytes(size: "Sizes", turns: list[tuple[int, int]], rows: int, entry: int) -> dict[str, int]:
    H, I, K = size.hidden, size.width, size.keys
    longest, read = max(p + c for p, c in turns), min(PREFILL_TOKENS, max(p for p, _ in turns))
    return {
        "kv_cache": rows * longest * 2 * size.layers * K * entry,
        "prefill": rows * read * (12 * H + 16 * I) * entry // 2,
        "logits": rows * size.vocab * (entry + 3 * 4),  # and in float32: a copy, divided by the temperature, softmax
    }


def training_bytes(size, turns, micro_batch, lora_rank, q_norm, checkpointing, entry, gpu_bytes) -> dict[str, int]:
    H, I, A, K = size.hidden, size.width, size.queries, size.keys
    longest, scored = max(p + c for p, c in turns), micro_batch * max(c for _, c in turns)
    tokens = micro_batch * longest
    of_layer = 20 * H + 8 * I + 10 * A + 14 * lora_rank + (4 * (A + K) if q_norm else 0)
    masks = 3 * longest * tokens
    block = min(scored, rows_on_gpu(size.vocab, gpu_bytes))
    return {
        "kept": tokens * size.layers * (2 * H if checkpointing else of_layer) * entry // 2,
        "layer": tokens * ((of_layer if checkpointing else 0) + 15 * H + 6 * I) * entry // 2 + masks,
        "logprob": 2 * scored * H * entry + block * (6 * size.vocab + 4 * H),
    }


class Sizes(NamedTuple):
    hidden: int
    width: int
    layers: int
    queries: int
    keys: int
    vocab: int


def sizes(config) -> Sizes:
    """H, I, number of layers, A = heads * head size, K = the same for keys, V."""
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head
    return Sizes(config.hidden_size, config.intermediate_size, config.num_hidden_layers, heads * head, keys, config.vocab_size)


def shapes(config) -> tuple[list[tuple[int, int]], int, bool]:
    """(in, out) of every linear layer but the head, which are those that go to 4-bit and get adapters; the number of all
    other parameters; whether queries and keys are normalised."""
    key = config.to_json_string()
    if key not in SHAPES:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        head = model.get_output_embeddings()
        layers = [m for m in model.modules() if isinstance(m, (torch.nn.Linear, Conv1D)) and m is not head]
        inside = {id(layer.weight) for layer in layers}
        other = sum(p.numel() for p in model.parameters() if id(p) not in inside)  # tied weights come once
        sizes = [tuple(x.weight.shape) if isinstance(x, Conv1D) else tuple(x.weight.shape[::-1]) for x in layers]
        SHAPES[key] = sizes, other, any(name.endswith("q_norm") for name, _ in model.named_modules())
    return SHAPES[key]


SHAPES: dict[str, tuple] = {}  # building the model takes a third of a second, and advice asks for many estimates


def nf4_bytes(entries: int) -> int:
    """One weight in NF4 with double quantisation: two entries a byte; a scale of 8 bits per 64 entries; one of 32 bits per
    256 scales; their offset, and the levels of both quantisations, 16 and 256."""
    blocks = math.ceil(entries / 64)
    return math.ceil(entries / 2) + blocks + 4 * math.ceil(blocks / 256) + 4 + 4 * (16 + 256)


def adam_bytes(entries: int, eight_bit: bool) -> int:
    """Both moments of one tensor. bitsandbytes keeps them in 8 bits with a scale per 256, from 4096 entries on."""
    return 2 * (entries + 4 * math.ceil(entries / 256)) if eight_bit and entries >= 4096 else 8 * entries


# ------------------------------------------------------------------ for the scripts
def check_memory(args, turns: list[tuple[int, int]], adapters: int, frozen_adapters: int = 0, rows_per_item: int = 1):
    """Before anything is loaded: does this run fit? With --dry-run, print the estimate and end.

    Args:
        args: a script's arguments: model, four_bit, lora_rank, micro_batch, rows_at_once, eight_bit_adam, vllm, dry_run.
        turns: (what a prompt holds besides instructions and question, completion), in tokens, of everything sampled.
        adapters, frozen_adapters: as `estimate` has them.
        rows_per_item: rows of a forward pass per unit of --micro-batch (2 for pairs).

    Raises:
        UserError: a size below 1; weights, adapters and Adam's state alone do not fit; or, with --dry-run, the peak does
            not, with what to lower and to what. Without --dry-run the latter is a warning: activations are estimated.
        SystemExit: at the end of a dry run.
    """
    for name in ("lora_rank", "micro_batch", "rows_at_once"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1.")
    say = print if this_process().is_main_process else lambda *_: None  # which also chooses this process's GPU
    config = read_config(args.model)
    on_gpu = torch.cuda.is_available()
    if args.vllm:
        check_vllm(on_gpu, args.four_bit)
    free, gpu_bytes = available()
    turns = [(QUESTION_TOKENS + more, completion) for more, completion in turns]

    def need(rows: int, micro_batch: int) -> dict[str, int]:
        return estimate(
            config, turns, adapters=adapters, lora_rank=args.lora_rank, four_bit=args.four_bit, rows=rows,
            micro_batch=micro_batch * rows_per_item, frozen_adapters=frozen_adapters, eight_bit_adam=args.eight_bit_adam,
            checkpointing=on_gpu, entry=2 if on_gpu else 4, gpu_bytes=gpu_bytes, vllm_share=VLLM_SHARE * args.vllm,
            processes=this_process().num_processes,
        )  # fmt: skip

    now = need(args.rows_at_once, args.micro_batch)
    if args.dry_run:
        place = f"free on {torch.cuda.get_device_name()}" if on_gpu else "memory of this machine, in use or not"
        count = adapters + frozen_adapters
        say(f"{args.model}, {'base in 4-bit, ' if args.four_bit else ''}{count} adapter{'s' * (count > 1)}\n{table(now)}")
        say(f"{place:<58}{in_words(free)}")
    if now["peak"] > free:
        sentence = f"--model {args.model}: about {now['peak'] / GIB:.1f} GiB are needed, and there are {free / GIB:.1f} GiB. "
        sentence += advice(need, free, args.rows_at_once, args.micro_batch, args.four_bit)
        if args.dry_run or now["certain"] > free:
            raise UserError(sentence)
        say(f"warning: {sentence}")
    if args.dry_run:
        sys.exit(0)


VLLM_SHARE = 0.3  # vllm_gpu_memory_utilization, TRL's default


def machine_options(args) -> dict:
    """What a GRPOConfig is told of the machine, and of what saves memory on it."""
    on_gpu = torch.cuda.is_available()
    return {
        "gradient_checkpointing": on_gpu,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,  # nor Apple's GPU, on which nothing here was ever tried
        "optim": "paged_adamw_8bit" if args.eight_bit_adam else "adamw_torch_fused",
        "use_vllm": args.vllm,
    }


def check_vllm(on_gpu: bool, four_bit: bool):
    if not on_gpu or importlib.util.find_spec("vllm") is None:
        raise UserError("--vllm needs an NVIDIA GPU, and vLLM, which is not among the requirements: pip install 'trl[vllm]'.")
    if four_bit:
        raise UserError(
            "--vllm is given the base with the adapter merged into it, and 4-bit weights cannot hold the sum: every step "
            "would be sampled from another model than is trained. Add --no-four-bit."
        )


def advice(need: Callable[[int, int], dict], free: int, rows: int, micro_batch: int, four_bit: bool) -> str:
    """The largest --rows-at-once (halved until it fits) and --micro-batch (a divisor, so that batches still divide)."""
    fitting_rows = next((r for r in halves(rows) if need(r, 1)["sampling"] <= free), None)
    fitting_micro = next((m for m in divisors(micro_batch) if need(1, m)["training"] <= free), None)
    if fitting_rows is None or fitting_micro is None:
        smaller = "a smaller model or shorter completions" if four_bit else "--four-bit, a smaller model or shorter completions"
        return f"Not even one row at a time fits: take {smaller}."
    lower = [f"--rows-at-once {fitting_rows}"] if fitting_rows < rows else []
    lower += [f"--micro-batch {fitting_micro}"] if fitting_micro < micro_batch else []
    return f"{' and '.join(lower)} would fit."


def halves(n: int) -> list[int]:
    return [n >> i for i in range(n.bit_length())]


def divisors(n: int) -> list[int]:
    return [d for d in range(n, 0, -1) if n % d == 0]


def table(need: dict[str, int]) -> str:
    lines = [
        ("weights", "weights of the base"),
        ("adapters", "adapters, float32"),
        ("adam", "Adam's moments"),
        ("kv_cache", "sampling: KV cache"),
        ("prefill", "          reading the prompts, or"),
        ("logits", "          logits of the next tokens"),
        ("gradients", "training: gradients of one adapter"),
        ("kept", "          activations kept for backward"),
        ("layer", "          the layer in progress, or"),
        ("logprob", "          the log-probs"),
        ("sampling", "peak of sampling, with a tenth for fragmentation"),
        ("training", "peak of training, with a tenth for fragmentation"),
    ]
    return "\n".join(f"{text:<58}{in_words(need[key])}" for key, text in lines)


def in_words(size: int) -> str:
    return f"{size / GIB:8.2f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):8.2f} MiB"


def read_config(name: str):
    try:
        return AutoConfig.from_pretrained(TINY if name == "tiny" else name)
    except (OSError, ValueError) as error:
        raise not_found(name, error) from None


def available() -> tuple[int, int]:
    """Bytes that are free on the GPU, or that the machine has without one; and by which the log-prob sizes its blocks."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 32 * BLOCK_BYTES
