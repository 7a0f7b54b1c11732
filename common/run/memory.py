"""How much memory a run needs, computed from the model's config before anything is loaded.

Weights, adapters, Adam's moments, gradients and the KV cache are exact: they are sums over the
shapes of the model. (A layer with a sliding window or without attention needs less cache than
that.) Activations are an estimate, from bytes per token of models with few layers. Memory that
comes and goes gets a tenth more for fragmentation, which is an allowance and not a measurement.

A run has two phases, and the peak is the larger of their peaks. Sampling holds the KV cache of all
rows that are sampled together. Training holds a gradient, a hidden state per layer, and the
activations of the layer that is being recomputed; without --gradient-checkpointing it holds the
activations of all layers. tests/common/test_memory.py counts the exact parts in real models, and
measures the activations with a memory profiler.
"""

import copy
import math
import sys

from common.core.errors import UserError, say
from common.core.plain import read_at_once
from common.fast.logprob import BLOCK_BYTES, rows_on_gpu
from common.run import limits
from common.run.machine import check_machine, on_gpu
from common.run.models import read_config, sizes
from common.tiny import MODELS

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM

GIB = 1 << 30
QUESTION_TOKENS = (
    1280  # instructions, worked examples and question: raro.py has the longest examples
)
FEW_ROWS = 64  # a base in 16 bits must leave room to sample as many
MOST_ROWS = 256  # with more rows a token costs the same: a GPU no longer waits for work
FRAGMENTED = 1.1
TABLE = {
    "weights": "weights of the base",
    "adapters": "adapters, float32",
    "adam": "Adam's moments",
    "kv_cache": "sampling: KV cache",
    "gradients": "training: gradients of one adapter",
    "kept": "training: activations kept for backward",
    "sampling": "peak of sampling, with a tenth for fragmentation",
    "training": "peak of training, with a tenth for fragmentation",
}


def plan_memory(args, players: dict):
    """Returns the arguments, and fills in what they leave open. --generation-batch-size is as many
    rows as fit, at most MOST_ROWS. --gradient-checkpointing is off if the activations fit without
    it. --four-bit is on if a GPU cannot hold a run in 16 bits. Only the model's config is read.
    With --dry-run it prints the table, and the run ends.

    Args:
        args: the script's arguments.
        players: name -> Player, from `with_adapters`. A player's prompt holds instructions and the
            question (QUESTION_TOKENS), and what the player `reads` of other players' texts.

    Raises:
        UserError: weights, adapters and Adam's moments alone do not fit; or the peak does not fit
            in a dry run. In any other run this is a warning, because activations are an estimate.
        SystemExit: at the end of a dry run.
    """
    config, gpu = read_config(args.model), on_gpu(args.model)
    check_machine(args.model)
    where, free, gpu_bytes = available(gpu)
    turns = [(QUESTION_TOKENS + player.reads, player.max_tokens) for player in players.values()]
    trained = {player.adapter: player.lr > 0 for player in players.values()}
    per_unit = max(player.rows for player in players.values())
    four_bit = bool(args.four_bit)

    def need(rows: int, micro_batch: int, checkpointing=True) -> dict[str, int]:
        return estimate(
            config, turns, adapters=sum(trained.values()),
            frozen_adapters=len(trained) - sum(trained.values()),
            lora_rank=args.lora_rank, four_bit=four_bit,
            rows=0 if args.rollouts else rows,
            micro_batch=micro_batch * per_unit, checkpointing=checkpointing,
            entry=2 if gpu else 4, gpu_bytes=gpu_bytes,
            processes=PartialState().num_processes,
        )  # fmt: skip

    if args.four_bit is None and gpu and not args.rollouts:  # a server's base has 16 bits
        few = min(FEW_ROWS, args.generation_batch_size or FEW_ROWS)
        whole = need(few, args.micro_batch)["peak"]
        four_bit = whole > free
        so = "so it is loaded in 4-bit; --no-four-bit forbids that" if four_bit else "which it gets"
        have = f"{whole / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free"
        say(f"{args.model}: a run with the base in 16 bits needs about {have}, {so}")
    rows, checkpointing = args.generation_batch_size, args.gradient_checkpointing
    if rows is None:
        rows = next((n for n in halves(MOST_ROWS) if need(n, 1)["sampling"] <= free), 1)
    if checkpointing == "auto":
        fits = need(1, args.micro_batch, checkpointing=False)["training"] <= free
        checkpointing = "off" if fits else "on"
    now = need(rows, args.micro_batch, checkpointing == "on")
    if args.dry_run:
        say_estimate(args.model, four_bit, len(trained), now, where, free)
    check_length(args.model, config, max(map(sum, turns)))
    if now["peak"] > free:
        short = f"about {now['peak'] / GIB:.1f} GiB are needed, and there are {free / GIB:.1f} GiB"
        smaller = f"{'' if four_bit else '--four-bit, '}a smaller model or shorter completions"
        sentence = (
            f"--model {args.model}: {short}; take a lower --generation-batch-size {rows} or "
            f"--micro-batch {args.micro_batch}, {smaller}."
        )
        if args.dry_run or now["certain"] > free:
            raise UserError(sentence)
        say(f"warning: {sentence}")
    if args.dry_run:
        sys.exit(0)
    plan = copy.copy(args)
    plan.generation_batch_size, plan.gradient_checkpointing = rows, checkpointing
    plan.four_bit = four_bit
    return plan


def say_estimate(name: str, four_bit: bool, adapters: int, need: dict, where: str, free: int):
    """Prints the table of --dry-run."""
    base = "base in 4-bit, " if four_bit else ""
    say(f"{name}, {base}{adapters} adapter{'s' * (adapters > 1)}")
    say("\n".join(f"{text:<58}{_size(need[key])}" for key, text in TABLE.items()))
    say(f"{where:<58}{_size(free)}")


def check_length(name: str, config, longest: int):
    """Warns if texts may be longer than the texts that the model has seen.

    Raises:
        UserError: the model's rope changes at some length, and a text may be longer. The tokens
            before that length would then be scored with another rope than they were sampled with.
    """
    positions = getattr(config, "max_position_embeddings", math.inf)
    rope = getattr(config, "rope_parameters", None) or {}
    changes = {"longrope": rope.get("original_max_position_embeddings"), "dynamic": positions}
    here = f"a prompt with its completion may have {longest:,} here"
    if longest > (most := changes.get(rope.get("rope_type"), math.inf)):
        changed = f"its rope changes after {most:,} tokens, and {here}"
        raise UserError(f"--model {name}: {changed}; take shorter completions.")
    if longest > positions and name not in MODELS:
        say(f"warning: --model {name} has seen at most {positions:,} tokens, and {here}")


def halves(n: int) -> list[int]:
    return [n >> i for i in range(n.bit_length())]


def _size(size: int) -> str:
    return f"{size / GIB:8.2f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):8.2f} MiB"


def available(gpu: bool) -> tuple[str, int, int]:
    """Returns (what the memory is, free bytes, all bytes) of the GPU. On a CPU the free bytes are
    the memory of the machine, or of the container that this process runs in. All bytes are then
    those of a GPU on which the log-prob would take blocks of the size that it takes on a CPU.
    """
    if gpu:
        return f"free on {torch.cuda.get_device_name()}", *torch.cuda.mem_get_info()
    return "memory that this process may use, in use or not", limits.memory(), 32 * BLOCK_BYTES


# ------------------------------------------------------------------ the estimate
def estimate(
    config, turns: list[tuple[int, int]], *, adapters: int, lora_rank: int, four_bit: bool,
    rows: int, micro_batch: int, frozen_adapters: int = 0,
    checkpointing: bool = True, entry: int = 2, gpu_bytes: int = 24 * GIB, processes: int = 1,
) -> dict[str, int]:  # fmt: skip
    """Returns bytes by purpose: the rows of TABLE, "certain", which is exact, and "peak".

    Args:
        config: a transformers config of a dense decoder.
        turns: the longest (prompt, completion) of each player, in tokens.
        adapters, frozen_adapters: how many adapters are trained, and how many are not.
        lora_rank: rank of each adapter.
        four_bit: the base is in NF4.
        rows: rows that are sampled together; 0 if a server samples.
        micro_batch: rows of a forward and backward pass.
        checkpointing: activations are recomputed in the backward pass, layer by layer.
        entry: bytes per entry of weights and activations: 2 on a GPU, 4 on a CPU.
        gpu_bytes: the GPU's memory, from which the log-prob takes the size of its blocks.
        processes: if there are several, each has DDP's buckets and adds up copies of gradients.
    """
    linear, other, q_norm = shapes(config)
    H, I, layers, A, K, V = sizes(config.get_text_config())
    weights = sum(nf4_bytes(i * o) if four_bit else entry * i * o for i, o in linear)
    lora = [lora_rank * side for sides in linear for side in sides]  # entries of every A and B
    need = {
        "weights": weights + entry * other,
        "adapters": 4 * sum(lora) * (adapters + frozen_adapters),
        "adam": 8 * sum(lora) * adapters,
    }
    need["certain"] = sum(need.values())

    # Sampling: the KV cache, and a pass over a part of all prompts, bytes per token at 2 an entry
    longest, prompt = max(map(sum, turns)), max(prompt for prompt, _ in turns)
    at_once = read_at_once("cuda" if entry == 2 else "cpu", gpu_bytes)
    read = max(prompt, rows * min(prompt, at_once))  # tokens
    need["kv_cache"] = rows * longest * 2 * layers * K * entry
    prefill = read * (12 * H + 8 * I) * entry // 2
    logits = rows * V * 4 * 5  # float32: as they are, over T, log p, p, p in blocks
    # to grow the cache, or to drop rows of it, holds one layer's keys twice
    comes = need["kv_cache"] * (1 + 1 / (2 * layers)) + max(prefill, logits)
    need["sampling"] = need["certain"] + int(comes * FRAGMENTED)

    # Training, bytes per token and layer at 2 an entry. Kept for backward: two norms in float32;
    # gate, silu, up, their product; q, k, v, attention twice; the middle of LoRA; q and k once
    # more if they are normalised. During the backward pass: gradients of the MLP
    of_layer = 20 * H + 8 * I + 6 * A + 4 * K + 14 * lora_rank + (4 * (A + K) if q_norm else 0)
    of_pass = 15 * H + 6 * I + (of_layer if checkpointing else 0)
    tokens, scored = micro_batch * longest, micro_batch * max(length for _, length in turns)
    block = min(scored, rows_on_gpu(V, gpu_bytes))
    need["gradients"] = 4 * sum(lora) * (1 if processes == 1 else 4)
    need["kept"] = tokens * layers * (2 * H if checkpointing else of_layer) * entry // 2
    need["layer"] = tokens * of_pass * entry // 2
    need["layer"] += entry * max(i * o for i, o in linear) if four_bit else 0  # a weight out of NF4
    need["logprob"] = 2 * scored * H * entry + block * (6 * V + 4 * H)
    comes = need["gradients"] + need["kept"] + max(need["layer"], need["logprob"])
    need["training"] = need["certain"] + int(comes * FRAGMENTED)
    return need | {"peak": max(need["sampling"], need["training"])}


SHAPES = {}  # building a model takes a third of a second, and advice needs many estimates


def shapes(config) -> tuple[list[tuple[int, int]], int, bool]:
    """Returns three things: (in, out) of every linear layer but the head, which are the layers that
    go to 4-bit and get adapters; the number of all other parameters; and whether queries and keys
    are normalised.
    """
    key = config.to_json_string()
    if key not in SHAPES:
        with torch.device("meta"):  # all of the model but its memory
            model = AutoModelForCausalLM.from_config(config)
        layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
        layers.remove(model.get_output_embeddings())
        linear = [(layer.in_features, layer.out_features) for layer in layers]
        other = sum(p.numel() for p in model.parameters())  # tied weights come once
        other -= sum(i * o for i, o in linear)
        q_norm = any(name.endswith("q_norm") for name, _ in model.named_modules())
        SHAPES[key] = linear, other, q_norm
    return SHAPES[key]


def nf4_bytes(entries: int) -> int:
    """Returns the bytes of a weight in NF4 with double quantisation. A byte holds two entries.
    There is a scale of 8 bits for each 64 entries, and a scale of 32 bits for each 256 of these
    scales. Their offset, and the 16 and 256 levels of both, come on top.
    """
    blocks = math.ceil(entries / 64)
    return math.ceil(entries / 2) + blocks + 4 * math.ceil(blocks / 256) + 4 + 4 * (16 + 256)
