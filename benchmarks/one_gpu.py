"""Real shapes on one GPU, seconds and memory by phase: python benchmarks/one_gpu.py --data FOLDER

FOLDER holds gsm8k_train.jsonl, mbpp.jsonl and qwen2.5-tokenizer/, as published. Models have
Qwen2.5's shapes and random weights, made in 4-bit on the GPU, layer by layer: speed and memory are
those of the real ones, texts are noise. Random weights do not end a text, so every completion has
the full length. Advantages are random, so that no row is dropped.

    training    log-probs and backward pass of rows of 1536 + 1024 tokens, on their own, at several
                micro-batches; against TRL's GRPOTrainer on a model of its own
    step        a script's own main(), its rollouts cut to --tokens, after a warm-up, by phase;
                tango.py also against two GRPOTrainers on two 4-bit models, one of which samples
                from the other's model in its reward function

Neither side has a KL term. Adapters are what each makes of them: float32 in ours, bfloat16 in
theirs, because TRL casts those of a 4-bit base.

Ours and theirs alternate, each built afresh and freed. Every cell is a JSON file in --out as soon
as it is measured; one that fails holds its error, one that would not end within --minutes says so.
one_gpu_docs.py makes the tables of docs/one-gpu.md from them. `--shapes tiny` runs everything on a
CPU in a minute or two.
"""

import argparse
import copy
import gc
import importlib
import json
import platform
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402, F401
from common.model import add_players  # noqa: E402
from common.tasks.math import load_questions  # noqa: E402
from tango import solve_prompt, verify_prompt  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402
from bitsandbytes.nn import Linear4bit, Params4bit  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PrinterCallback,
    Qwen2Config,
    TrainerCallback,
)  # fmt: skip
from transformers.quantizers import AutoHfQuantizer  # noqa: E402
from transformers.trainer_utils import SaveStrategy  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

RESULTS = ROOT / "docs" / "evidence" / "one_gpu"


# ------------------------------------------------------------------ models
def shape(hidden, width, layers, heads, kv_heads, vocab=151936, tied=True) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
    )


SHAPES = {  # as published in config.json
    "tiny": shape(64, 128, 2, 4, 2),
    "0.5b": shape(896, 4864, 24, 14, 2),
    "1.5b": shape(1536, 8960, 28, 12, 2),
    "7b": shape(3584, 18944, 28, 28, 4, vocab=152064, tied=False),
    "14b": shape(5120, 13824, 48, 40, 8, vocab=152064, tied=False),
    "32b": shape(5120, 27648, 64, 40, 8, vocab=152064, tied=False),
}


def random_model(config, device: str, four_bit: bool = True, seed: int = 0):
    """A base as `common.model.load_model` makes it, but with random weights.

    bfloat16 on a GPU, float32 on a CPU; a layer exists in that only until it is in NF4.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(seed)

    def normal(like):
        return torch.randn(like.shape, generator=generator, dtype=dtype, device=device) * 0.02

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if four_bit and isinstance(child, torch.nn.Linear) and child is not head:
                size = (child.in_features, child.out_features, child.bias is not None)
                layer = Linear4bit(*size, dtype, quant_type="nf4", device="meta")
                weight = Params4bit(normal(child.weight), quant_type="nf4", module=layer)
                layer.weight = weight.to(device)
                layer.support_avx512bf16_for_cpu = False  # see common/model.py
                setattr(parent, name, layer)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = torch.full(parameter.shape, float(name == "weight"))  # norms and biases
                value = (normal(parameter) if parameter.dim() == 2 else value).to(device, dtype)
                module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
    model.tie_weights()
    with torch.device(device):  # its buffers are computed, not drawn
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    if four_bit:  # what transformers, TRL and PEFT ask a quantised model for
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        model.config.quantization_config, model.quantization_method = (
            settings,
            settings.quant_method,
        )
        model.is_quantized = model.is_loaded_in_4bit = True
        model.hf_quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    return model.requires_grad_(False)


# ------------------------------------------------------------------ time and memory by phase
class Phases:
    """Seconds and peak bytes of what happens inside `with phases(name)`; an inner phase's are not
    the outer's.
    """

    def __init__(self):
        self.gpu, self.stack = torch.cuda.is_available(), ["other"]
        self.reset()

    def reset(self):
        self.seconds, self.peak, self.tokens = defaultdict(float), defaultdict(int), 0
        self.since = self._now()

    def _now(self) -> float:
        if self.gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        return time.perf_counter()

    def close(self):
        """What has passed since the last border belongs to the phase on top of the stack."""
        name = self.stack[-1]
        if self.gpu:
            torch.cuda.synchronize()
            self.peak[name] = max(self.peak[name], torch.cuda.max_memory_allocated())
        self.seconds[name] += time.perf_counter() - self.since
        self.since = self._now()

    @contextmanager
    def __call__(self, name: str):
        self.close()
        self.stack.append(name)
        try:
            yield
        finally:
            self.close()
            self.stack.pop()

    def watch(self, owner, method: str, name: str):
        """Every call of owner.method is a phase from now on."""
        original = getattr(owner, method)

        def watched(*args, **kwargs):
            with self(name):
                return original(*args, **kwargs)

        setattr(owner, method, watched)


PHASES = {  # method of a trainer, TRL's or ours -> what its time counts as; inner ones count apart
    "_generate_single_turn": "rollout",
    "_generate_and_score_completions": "scoring",
    "step": "scoring",
    "_get_per_token_logps_and_entropies": "log-prob",
    "_compute_loss": "log-prob",
    "update": "backward",  # with the optimiser, which has the adapters only to change
}


class Steps(TrainerCallback):
    """One record per optimiser step: seconds and peak by phase, and how many tokens were sampled.

    In the first `warm` steps, which are not recorded, completions have `short` tokens.
    """

    def __init__(self, trainer, warm: int, short: int = 8):
        self.phases, self.records, self.warm, self.trainer = Phases(), [], warm, trainer
        for method, name in PHASES.items():
            if hasattr(trainer, method):
                self.phases.watch(trainer, method, name)
        self.phases.watch(trainer.accelerator, "backward", "backward")
        sampled = trainer._generate_single_turn

        def counted(*args, **kwargs):
            ids, logps = sampled(*args, **kwargs)
            self.phases.tokens += sum(map(len, ids))
            return ids, logps

        trainer._generate_single_turn = counted
        players = getattr(trainer, "players", {})
        self.limits = {name: player.max_tokens for name, player in players.items()}
        self.limit = trainer.max_completion_length
        if warm:
            self.set_limits(dict.fromkeys(self.limits, short), short)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)

    def set_limits(self, limits: dict[str, int], limit: int):
        """Of our players, or of a plain GRPOTrainer."""
        for name, tokens in limits.items():
            self.trainer.players[name].max_tokens = tokens
        if not limits:
            self.trainer.max_completion_length = limit
            self.trainer.generation_kwargs["max_new_tokens"] = limit
            self.trainer.generation_config.max_new_tokens = limit

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.warm:
            self.set_limits(self.limits, self.limit)
        if state.global_step >= self.warm:
            self.phases.reset()
            self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        if state.global_step > self.warm:
            self.phases.close()
            self.records.append(
                {
                    "player": getattr(self.trainer, "player", ""),
                    "tokens": self.phases.tokens,
                    "seconds": time.perf_counter() - self.started,
                    "phases": dict(self.phases.seconds),
                    "peak": dict(self.phases.peak),
                }
            )


def summary(records: list[dict]) -> dict:
    """Means over steps of seconds and tokens, maxima of memory."""
    names = sorted({name for record in records for name in record["phases"]})
    count = max(1, len(records))
    phases = {name: sum(r["phases"].get(name, 0.0) for r in records) for name in names}
    sampling = max(1e-9, phases.get("rollout", 0.0))
    return {
        "steps": len(records),
        "seconds": sum(r["seconds"] for r in records) / count,
        "phases": {name: seconds / count for name, seconds in phases.items()},
        "tokens_per_second": sum(r["tokens"] for r in records) / sampling,
        "peak": {name: max(r["peak"].get(name, 0) for r in records) for name in names},
        "records": records,
    }


# ------------------------------------------------------------------ ours: a script's own main()
def settings(script: str, tokens: int) -> dict:
    """What makes two steps of noise complete: everybody plays, and nothing is filtered away."""
    both = {"solution_tokens": tokens, "judgement_tokens": tokens}
    if script == "tango":
        return both | {"ver_warmup": 0, "gen_steps": 1, "ver_steps": 1}
    if script == "gar":
        slices = {"min_slice_tokens": 4, "slice_tokens": 64, "silent_share": 1.0}
        return both | {"judgement_tokens": min(tokens, 128)} | slices
    if script == "prime":
        return {"solution_tokens": tokens, "keep_low": 0.0, "keep_high": 1.0}
    if script == "spin":
        return {"solution_tokens": max(tokens, 160), "iterations": 1}  # human answers have to fit
    if script == "cure":
        return {"program_tokens": tokens, "test_tokens": tokens}
    return both | {"silent_share": 1.0}  # mae


SCRIPTS = ("tango", "gar", "prime", "spin", "cure", "mae")


class Bench:
    """Stands in for common.run.Run: takes the trainer that main() has built, and measures it."""

    checkpoint = None

    def __init__(self, folder: Path, warm: int, prepare=None):
        self.folder, self.warm, self.prepare = folder, warm, prepare

    def say(self, *_):
        pass

    def train(self, trainer, *_):
        step, update = trainer.step, trainer.update
        trainer.step = lambda rows: [random_advantages(batch) for batch in step(rows)]
        trainer.update = lambda batch: update(random_advantages(batch))
        if self.prepare:
            self.prepare(trainer)
        trainer.args.save_strategy = SaveStrategy.NO
        self.steps = Steps(trainer, self.warm)
        trainer.train()


def random_advantages(batch: dict) -> dict:
    """The batch with -1 or 1 for every row, so that each has a gradient."""
    if "advantages" in batch:  # else it has a loss of its own, to which all rows count
        draw = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (len(batch["completion_mask"]),), generator=draw) * 2.0 - 1
        batch["advantages"] = signs.to(batch["completion_mask"].device)  # (B,)
    return batch


def ours(script: str, work: "Work", tokens: int, micro_batch: int, prepare=None) -> dict:
    """Two measured steps of the script.

    On a GPU they come after two short ones, except for spin.py, which samples in its first step
    only.
    """
    module = importlib.import_module(script)
    warm = 2 if work.warm and script != "spin" else 0
    bench = Bench(Path(tempfile.mkdtemp()), warm, prepare)
    dataset = "mbpp.jsonl" if script == "cure" else "gsm8k_train.jsonl"
    wanted = {
        "model": str(work.folder),
        "dataset": str(work.data / dataset),
        "out": str(bench.folder),
        "steps": warm + 2,
        "questions": work.questions,
        "micro_batch": micro_batch,
        "four_bit": True,
        "eval_questions": 8,
        **settings(script, tokens),
    }
    fields = module.Args.__dataclass_fields__
    of_some = {"group_size": work.group, "kl": 0.0}
    args = module.Args(**wanted, **{k: v for k, v in of_some.items() if k in fields})

    def load(name, adapters, lora_rank, four_bit, seed):
        base = random_model(work.config, work.device)
        return add_players(base, adapters, lora_rank, seed), work.tokenizer

    replaced = {
        "load_model": load,
        "start_run": lambda *_: bench,
        "check_memory": lambda *_, **__: None,
    }
    before = {name: getattr(module, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(module, name, function)
        module.main(args)
    finally:
        for name, function in before.items():
            setattr(module, name, function)
    return summary(bench.steps.records)


# ------------------------------------------------------------------ theirs: what is usual
def plain_trainer(work: "Work", rows: Dataset, limit: int, micro_batch: int, reward, steps=1):
    """TRL's GRPOTrainer on a 4-bit model of its own, with a LoRA adapter.

    It takes `steps` steps, on a GPU after as many to warm up.
    """
    on_gpu, parts = work.device == "cuda", work.rows // micro_batch
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps + steps * work.warm,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=parts,
        steps_per_generation=parts,
        num_generations=work.group,
        max_completion_length=limit,
        loss_type="dapo",
        beta=0.0,
        learning_rate=2e-5,
        gradient_checkpointing=on_gpu,
        bf16=on_gpu,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    return GRPOTrainer(
        random_model(work.config, work.device),
        reward,
        config,
        train_dataset=rows,
        processing_class=copy.deepcopy(work.tokenizer),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )


def two_trainers(work: "Work", tokens: int, micro_batch: int) -> dict:
    """Tango as two GRPOTrainers. One measured step of each, on a GPU after a short one.

    The generator's reward function samples from the verifier's model; the verifier's prompts hold
    solutions that were sampled from the generator's.
    """
    questions = work.load_questions(8 * work.questions)
    rows = Dataset.from_list([{"prompt": solve_prompt(q), "question": q} for q in questions])
    draw = torch.Generator().manual_seed(0)

    def random_reward(completions, **_):
        return torch.randint(2, (len(completions),), generator=draw).float().tolist()

    def judged_reward(completions, question, **_):
        prompts = [verify_prompt(q, c[0]["content"]) for q, c in zip(question, completions)]
        write(verifier, steps.phases, prompts, generator.max_completion_length)
        return random_reward(completions)

    generator = plain_trainer(work, rows, tokens, micro_batch, judged_reward)
    verifier = plain_trainer(work, rows, tokens, micro_batch, random_reward)
    steps = Steps(generator, warm=int(work.warm))
    generator.train()
    records = steps.records

    steps = Steps(verifier, warm=int(work.warm))
    start = time.perf_counter()
    prompts = [solve_prompt(q) for q in questions[: work.questions]]
    solutions = write(generator, steps.phases, prompts, tokens)
    seconds, sampled = time.perf_counter() - start, steps.phases.tokens
    judge = [{"prompt": verify_prompt(q, s), "question": q} for q, s in zip(questions, solutions)]
    verifier.train_dataset = Dataset.from_list(judge * 8)
    verifier.train()
    last = steps.records[-1]  # the solutions are part of the verifier's step
    last["seconds"] += seconds
    last["phases"]["rollout"] = last["phases"].get("rollout", 0.0) + seconds
    last["tokens"] += sampled
    return summary(records + steps.records)


def write(trainer: GRPOTrainer, phases: Phases, prompts: list, limit: int) -> list[str]:
    """What a reward function does for texts of another model."""
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    batch = tokenizer.apply_chat_template(
        prompts,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        padding=True,
    ).to(model.device)
    settings = GenerationConfig(
        max_new_tokens=limit,
        do_sample=True,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        disable_compile=True,
    )
    training, checkpointing = trainer.model.training, model.is_gradient_checkpointing
    with phases("rollout"), torch.no_grad():
        if checkpointing:  # a cache needs it to be off; TRL does so around its own generate, too
            model.gradient_checkpointing_disable()
        ids = model.eval().generate(**batch, generation_config=settings)
        ids = ids[:, batch["input_ids"].shape[1] :]
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train(training)
    phases.tokens += ids.numel()
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


# ------------------------------------------------------------------ the training phase on its own
def full_batch(work: "Work", prompt: int, completion: int) -> dict:
    """Rows without padding, all prompts different: the most work that there can be."""
    draw, rows = torch.Generator().manual_seed(0), work.rows
    ids = torch.randint(5, 151_000, (rows, prompt + completion), generator=draw).to(work.device)
    ones = torch.ones_like(ids)
    batch = {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": ones[:, :prompt],
        "completion_ids": ids[:, prompt:],
        "completion_mask": ones[:, prompt:],
        "advantages": None,
        "num_items_in_batch": torch.tensor(rows * completion, device=work.device),
    }
    return random_advantages(batch)


def training_phase(work: "Work", micro_batch: int, prompt: int, completion: int, who: str) -> dict:
    """Log-probs and backward pass of a ready batch, in the trainer's own loop.

    Ours takes a step of each player, theirs as many of its one adapter.
    """
    if who == "ours":

        def prepare(trainer):
            def step(_):
                player = trainer.player_at(trainer.state.global_step)
                return [full_batch(work, prompt, completion) | {"player": player}]

            trainer.step = step

        result = ours("tango", work, completion, micro_batch, prepare)
    else:

        def no_reward(completions, **_):
            return [0.0] * len(completions)

        rows = Dataset.from_list([{"prompt": "What is 2+2?"}] * 64)
        trainer = plain_trainer(work, rows, completion, micro_batch, no_reward, steps=2)
        batch = lambda _: full_batch(work, prompt, completion)  # noqa: E731
        trainer._generate_and_score_completions = batch
        steps = Steps(trainer, warm=2 * work.warm)
        trainer.train()
        result = summary(steps.records)
    seconds = result["phases"]["log-prob"] + result["phases"]["backward"]
    checkpointing = work.device == "cuda"
    flops = training_flops(work.config, work.rows, prompt, completion, checkpointing)
    return result | {"tflops": flops / seconds / 1e12}


def training_flops(config, rows: int, prompt: int, completion: int, checkpointing: bool) -> float:
    """Of a forward and a backward pass with a frozen base, so without weight gradients.

    Counted are the matrix products with the weights and causal attention, once more where
    activations are recomputed, and common/logprob.py's two products with the head; LoRA's own
    products (1 %) are not.
    """
    H, I, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    K = H // config.num_attention_heads * config.num_key_value_heads
    length, passes = prompt + completion, 3 if checkpointing else 2
    linear = 2 * layers * (2 * H * H + 2 * H * K + 3 * H * I) * length * passes
    # forward: q k and p v, half of each; backward: twice that
    attention = layers * 2 * length**2 * H * (passes + 1)
    return rows * (linear + attention + 4 * config.vocab_size * H * completion)


def matmul(device: str) -> dict:
    """The rate of one large product: bfloat16 on a GPU, float32 on a CPU."""
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        a @ b
    wait()
    start = time.perf_counter()
    for _ in range(20):
        a @ b
    wait()
    seconds = (time.perf_counter() - start) / 20
    return {"n": n, "seconds": seconds, "tflops": 2 * n**3 / seconds / 1e12}


# ------------------------------------------------------------------ cells
class Work:
    """What all cells of a size share: config and tokenizer, in a folder without weights."""

    def __init__(self, size: str, data: Path, questions: int):
        self.config, self.data, self.questions = SHAPES[size], data, questions
        self.group = 2 if size == "tiny" else 4
        self.rows = self.questions * self.group
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.warm = self.device == "cuda"  # the first time it compiles, and its pools grow
        self.folder = Path(tempfile.mkdtemp()) / size
        vocabulary = data / "qwen2.5-tokenizer"
        self.tokenizer = AutoTokenizer.from_pretrained(vocabulary, padding_side="left")
        self.config.save_pretrained(self.folder)
        self.tokenizer.save_pretrained(self.folder)

    def load_questions(self, count: int) -> list[str]:
        train, _ = load_questions(str(self.data / "gsm8k_train.jsonl"), count, 8, seed=0)
        return [row["question"] for row in train]


def machine() -> dict:
    gpu = torch.cuda.is_available()
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": torch.cuda.get_device_name() if gpu else cpu,
        "memory": torch.cuda.get_device_properties(0).total_memory if gpu else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


class Cells:
    """Measures one cell after the other, and writes each down at once."""

    def __init__(self, out: Path, minutes: float):
        self.out, self.end, self.took = out, time.time() + 60 * minutes, {}
        out.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, kind: str, function, **about):
        """`kind`: cells of one kind take about as long; one that would end late is skipped."""
        gpu, start = torch.cuda.is_available(), time.time()
        row = {"cell": name, **about, "machine": machine()}
        row["allocated_before"] = torch.cuda.memory_allocated() if gpu else 0  # what was not freed
        if start + self.took.get(kind, 0.0) > self.end:
            row["skipped"] = "no time was left"
        else:
            try:
                row |= function()
            except Exception as error:  # one cell that fails must not take the others with it
                message = (str(error).strip() or "no message").splitlines()[0]
                row["error"] = f"{type(error).__name__}: {message}"
            self.took[kind] = max(self.took.get(kind, 0.0), time.time() - start)
        row["cell_seconds"] = round(time.time() - start, 1)
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
        (self.out / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
        result = row.get("error") or row.get("skipped") or f"{row.get('seconds', 0.0):.2f} s"
        print(f"{name:<40}{result}   ({row['cell_seconds']} s)", flush=True)


def run_cells(args):
    cells, tiny = Cells(args.out, args.minutes), args.shapes == ["tiny"]
    cells("matmul", "matmul", lambda: matmul("cuda" if torch.cuda.is_available() else "cpu"))
    prompt, completion = (24, 8) if tiny else (1536, 1024)
    for size in args.shapes:
        work = Work(size, args.data, questions=2)
        about = {"size": size, "prompt": prompt, "completion": completion, "rows": work.rows}
        for micro in (1, 2) if tiny else (1, 2, 4, 8):
            for who in ("ours", "trl"):
                cells(
                    f"training-{size}-{micro}-{who}",
                    f"training-{size}",
                    partial(training_phase, work, micro, prompt, completion, who),
                    micro_batch=micro,
                    who=who,
                    **about,
                )
    tokens, micro = (8, 1) if tiny else (args.tokens, 4)
    for repeat in range(args.repeats):
        for size in args.shapes:
            work = Work(size, args.data, questions=2 if tiny else 8)
            about = {"size": size, "tokens": tokens, "rows": work.rows, "repeat": repeat}
            for script in args.scripts:
                name, about["script"] = f"step-{script}-{size}-{repeat}", script
                step = partial(ours, script, work, tokens, micro)
                cells(f"{name}-ours", f"step-{script}", step, who="ours", **about)
                if script == "tango":
                    step = partial(two_trainers, work, tokens, micro)
                    cells(f"{name}-two-trainers", "two", step, who="two trainers", **about)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    files = "gsm8k_train.jsonl, mbpp.jsonl and qwen2.5-tokenizer/"
    parser.add_argument("--data", type=Path, required=True, help=files)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--shapes", nargs="+", default=["7b", "1.5b"], choices=SHAPES)
    parser.add_argument("--scripts", nargs="+", default=["tango"], choices=SCRIPTS)
    parser.add_argument("--tokens", type=int, default=128, help="of a completion in the steps")
    parser.add_argument("--repeats", type=int, default=2, help="of the steps")
    parser.add_argument("--minutes", type=float, default=7.0, help="start nothing that ends later")
    args = parser.parse_args()
    if not (args.data / "qwen2.5-tokenizer").is_dir():
        parser.error(f"--data {args.data}: no qwen2.5-tokenizer/ in it")
    transformers.utils.logging.set_verbosity_error()
    run_cells(args)


if __name__ == "__main__":
    main()
