"""Real shapes on one GPU, seconds and memory by phase: python benchmarks/one_gpu.py --data FOLDER

FOLDER holds gsm8k_train.jsonl, mbpp.jsonl and qwen2.5-tokenizer/, as published. Models have Qwen2.5's shapes and random
weights, made in 4-bit on the GPU, layer by layer: speed and memory are those of the real ones, texts are noise. Random
weights do not end a text, so every completion has the full length. Advantages are random, so that no row is dropped.

    training    log-probs and backward of rows of 1536 + 1024 tokens, on their own, at micro-batches 1, 2 and 4, against
                TRL's GRPOTrainer on a model of its own
    step        a script's own main(), its rollouts cut to --tokens, a warm-up first, by phase; tango.py also against two
                GRPOTrainers on two 4-bit models, one sampling from the other's model in its reward function

Adapters are what each makes of them: float32 in ours, bfloat16 in theirs, which TRL casts on a 4-bit base.

Ours and theirs alternate, each built afresh and freed. Every cell is a JSON file in --out as soon as it is measured; one
that fails holds its error; one that would not end within --minutes holds that. Then the tables in docs/one-gpu.md are
written again (--docs alone does only that). --shapes tiny runs everything on a CPU in a minute or two.
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
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402, F401
from common.model import add_players  # noqa: E402

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
        hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=tied, rms_norm_eps=1e-6, rope_theta=1e6,
    )  # fmt: skip


SHAPES = {  # as published in config.json
    "tiny": shape(64, 128, 2, 4, 2),
    "0.5b": shape(896, 4864, 24, 14, 2),
    "1.5b": shape(1536, 8960, 28, 12, 2),
    "7b": shape(3584, 18944, 28, 28, 4, vocab=152064, tied=False),
    "14b": shape(5120, 13824, 48, 40, 8, vocab=152064, tied=False),
    "32b": shape(5120, 27648, 64, 40, 8, vocab=152064, tied=False),
}


def random_model(config, device: str, four_bit: bool = True, seed: int = 0):
    """A base as `common.model.load_model` makes it, with random weights: a layer exists in 16 bits only until it is in NF4.

    bfloat16 on a GPU, float32 on a CPU."""
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
                bias = child.bias is not None
                layer = Linear4bit(child.in_features, child.out_features, bias, dtype, quant_type="nf4", device="meta")
                layer.weight = Params4bit(normal(child.weight), quant_type="nf4", module=layer).to(device)
                layer.support_avx512bf16_for_cpu = False  # see common/model.py
                setattr(parent, name, layer)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = normal(parameter) if parameter.dim() == 2 else torch.full(parameter.shape, float(name == "weight"))
                module._parameters[name] = torch.nn.Parameter(value.to(device, dtype), requires_grad=False)
    model.tie_weights()
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its buffers are computed, not drawn
    if four_bit:  # what transformers, TRL and PEFT ask a quantised model for
        settings = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        model.config.quantization_config, model.quantization_method = settings, settings.quant_method
        model.is_quantized = model.is_loaded_in_4bit = True
        model.hf_quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    return model.requires_grad_(False)


# ------------------------------------------------------------------ time and memory by phase
class Phases:
    """Seconds and peak bytes of what happens inside `with phases(name)`; an inner phase's are not the outer's."""

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


class Steps(TrainerCallback):
    """One record per optimiser step: seconds and peak by phase, sampled tokens. Completions are short in the first `warm`."""

    def __init__(self, trainer, warm: int, short: int = 8):
        self.phases, self.records, self.warm, self.trainer = Phases(), [], warm, trainer
        for method, name in (
            ("_generate_single_turn", "rollout"), ("_generate_and_score_completions", "scoring"),
            ("_get_per_token_logps_and_entropies", "log-prob"), ("_compute_loss", "log-prob"), ("backward_now", "backward"),
        ):  # fmt: skip
            if hasattr(trainer, method):
                self.phases.watch(trainer, method, name)
        self.phases.watch(trainer.accelerator, "backward", "backward")
        sampled = trainer._generate_single_turn

        def counted(*args, **kwargs):
            ids, logps = sampled(*args, **kwargs)
            self.phases.tokens += sum(map(len, ids))
            return ids, logps

        trainer._generate_single_turn = counted
        self.limits = {name: player.max_tokens for name, player in getattr(trainer, "players", {}).items()}
        self.limit = trainer.max_completion_length
        if warm:
            self.set_limits(dict.fromkeys(self.limits, short), short)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)

    def set_limits(self, limits: dict[str, int], limit: int):
        """Of our players, or of a plain GRPOTrainer."""
        for name, of_player in limits.items():
            self.trainer.players[name].max_tokens = of_player
        if not limits:
            self.trainer.max_completion_length = limit
            self.trainer.generation_kwargs["max_new_tokens"] = self.trainer.generation_config.max_new_tokens = limit

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
                    "player": getattr(self.trainer, "player", ""), "tokens": self.phases.tokens,
                    "seconds": time.perf_counter() - self.started, "phases": dict(self.phases.seconds),
                    "peak": dict(self.phases.peak),
                }
            )  # fmt: skip


def summary(records: list[dict]) -> dict:
    """Means over steps of seconds and tokens, maxima of memory."""
    names = sorted({name for record in records for name in record["phases"]})
    count = max(1, len(records))
    return {
        "steps": len(records),
        "seconds": sum(r["seconds"] for r in records) / count,
        "phases": {name: sum(r["phases"].get(name, 0.0) for r in records) / count for name in names},
        "tokens_per_second": sum(r["tokens"] for r in records) / max(1e-9, sum(r["phases"].get("rollout", 0) for r in records)),
        "peak": {name: max(r["peak"].get(name, 0) for r in records) for name in names},
        "records": records,
    }


# ------------------------------------------------------------------ ours: a script's own main()
SETTINGS = {  # what makes two steps of noise complete: every part plays, nothing is filtered away
    "tango": lambda t: dict(ver_warmup=0, gen_steps=1, ver_steps=1, solution_tokens=t, judgement_tokens=t),
    "gar": lambda t: dict(
        solution_tokens=t, judgement_tokens=min(t, 128), min_slice_tokens=4, slice_tokens=64, silent_share=1.0
    ),
    "prime": lambda t: dict(solution_tokens=t, keep_low=0.0, keep_high=1.0),
    "spin": lambda t: dict(solution_tokens=max(t, 160), iterations=1),  # human answers have to fit
    "cure": lambda t: dict(program_tokens=t, test_tokens=t),
    "mae": lambda t: dict(solution_tokens=t, judgement_tokens=t, silent_share=1.0),
}


class Bench:
    """Stands in for common.run.Run: takes the trainer that main() has built, and measures it."""

    checkpoint = None

    def __init__(self, folder: Path, warm: int, prepare=None):
        self.folder, self.warm, self.prepare = folder, warm, prepare

    def say(self, *_):
        pass

    def train(self, trainer, *_):
        trainer._generate_and_score_completions = with_random_advantages(trainer._generate_and_score_completions)
        trainer.update = with_random_advantages(trainer.update, first=True)
        if self.prepare:
            self.prepare(trainer)
        trainer.args.save_strategy = SaveStrategy.NO
        self.steps = Steps(trainer, self.warm)
        trainer.train()


def with_random_advantages(function, first: bool = False):
    """-1 or 1 per row, in the batch that comes out of `function`, or (first) goes in."""

    def change(batch):
        signs = torch.randint(2, (len(batch["advantages"]),), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
        batch["advantages"] = signs.to(batch["completion_mask"].device)
        return batch

    return (lambda batch: function(change(batch))) if first else (lambda rows: change(function(rows)))


def ours(script: str, work: "Work", tokens: int, micro_batch: int, prepare=None, **change) -> dict:
    """Two measured steps of the script, on a GPU after two short ones (spin.py samples in its first step only: none)."""
    module = importlib.import_module(script)
    warm = 2 if work.warm and script != "spin" else 0
    bench = Bench(Path(tempfile.mkdtemp()), warm, prepare)
    names = {field for field in module.Args.__dataclass_fields__}
    wanted = dict(
        model=str(work.folder), dataset=str(work.data / ("mbpp.jsonl" if script == "cure" else "gsm8k_train.jsonl")),
        out=str(bench.folder), steps=warm + 2, questions=work.questions, group_size=work.group, micro_batch=micro_batch,
        four_bit=True, eval_questions=8, kl=0.0, lora_rank=16, **SETTINGS[script](tokens),
    )  # fmt: skip
    args = module.Args(**{k: v for k, v in {**wanted, **change}.items() if k in names})

    def load(name, adapters, lora_rank, four_bit, seed):
        return add_players(random_model(work.config, work.device), adapters, lora_rank, seed), work.tokenizer

    before = module.load_model, module.start_run, module.check_memory
    module.load_model, module.start_run, module.check_memory = load, lambda *_: bench, lambda *_, **__: None
    try:
        module.main(args)
    finally:
        module.load_model, module.start_run, module.check_memory = before
    return summary(bench.steps.records)


# ------------------------------------------------------------------ theirs: what one would write today
def plain_trainer(work: "Work", rows: Dataset, limit: int, micro_batch: int, reward, steps: int = 1):
    """TRL's GRPOTrainer on a 4-bit model of its own, with a LoRA adapter; `steps` steps, after as many to warm up."""
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps + steps * work.warm, per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=work.rows // micro_batch, steps_per_generation=work.rows // micro_batch,
        num_generations=work.group, max_completion_length=limit, loss_type="dapo", beta=0.0, learning_rate=2e-5,
        gradient_checkpointing=work.device == "cuda", bf16=work.device == "cuda", report_to="none", save_strategy="no",
        logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = random_model(work.config, work.device)
    return GRPOTrainer(
        model, reward, config, train_dataset=rows, processing_class=copy.deepcopy(work.tokenizer), peft_config=lora
    )


def two_trainers(work: "Work", tokens: int, micro_batch: int) -> dict:
    """Tango as two GRPOTrainers: the generator's reward function samples from the verifier's model; the verifier's prompts
    hold solutions sampled from the generator's. One measured step of each, on a GPU after a short one."""
    from common.data import load_questions
    from tango import solve_prompt, verify_prompt

    questions = [r["question"] for r in load_questions(str(work.data / "gsm8k_train.jsonl"), 8 * work.questions, 8, 0)[0]]
    rows = Dataset.from_list([{"prompt": solve_prompt(q), "question": q} for q in questions])
    draw = torch.Generator().manual_seed(0)

    def coin(completions, **_):
        return torch.randint(2, (len(completions),), generator=draw).float().tolist()

    def judged(completions, question, **_):
        prompts = [verify_prompt(q, c[0]["content"]) for q, c in zip(question, completions)]
        write(verifier, prompts, generator.max_completion_length)
        return coin(completions)

    generator = plain_trainer(work, rows, tokens, micro_batch, judged)
    verifier = plain_trainer(work, rows, tokens, micro_batch, coin)

    def write(trainer, prompts, limit) -> list[str]:
        """What a reward function does for texts of another model."""
        tokenizer = trainer.processing_class
        texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(work.device)
        settings = GenerationConfig(
            max_new_tokens=limit, do_sample=True, top_k=0, pad_token_id=tokenizer.pad_token_id, disable_compile=True,
            eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        training, model = trainer.model.training, trainer.accelerator.unwrap_model(trainer.model)
        with steps.phases("rollout"), torch.no_grad():
            # as TRL does around its own generate: a cache needs checkpointing to be off
            checkpointing = model.is_gradient_checkpointing
            if checkpointing:
                model.gradient_checkpointing_disable()
            ids = model.eval().generate(**batch, generation_config=settings)[:, batch["input_ids"].shape[1] :]
            if checkpointing:
                model.gradient_checkpointing_enable()
            model.train(training)
        steps.phases.tokens += ids.numel()
        return tokenizer.batch_decode(ids, skip_special_tokens=True)

    records = []
    for trainer in (generator, verifier):
        steps = Steps(trainer, warm=int(work.warm))
        if trainer is verifier:
            started = time.perf_counter()
            solutions = write(generator, [solve_prompt(q) for q in questions[: work.questions]], tokens)
            took, sampled = time.perf_counter() - started, steps.phases.tokens
            judge = [{"prompt": verify_prompt(q, s), "question": q} for q, s in zip(questions, solutions)]
            trainer.train_dataset = Dataset.from_list(judge * 8)
        trainer.train()
        records += steps.records
    records[-1]["seconds"] += took
    records[-1]["phases"]["rollout"] = records[-1]["phases"].get("rollout", 0.0) + took
    records[-1]["tokens"] += sampled
    return summary(records)


# ------------------------------------------------------------------ the training phase on its own
def full_batch(work: "Work", prompt: int, completion: int) -> dict:
    """Rows without padding, prompts all different: the most there can be."""
    g, rows = torch.Generator().manual_seed(0), work.rows
    ids = torch.randint(5, 151_000, (rows, prompt + completion), generator=g).to(work.device)
    ones = torch.ones_like(ids)
    return {
        "prompt_ids": ids[:, :prompt], "prompt_mask": ones[:, :prompt], "completion_ids": ids[:, prompt:],
        "completion_mask": ones[:, prompt:], "advantages": torch.ones(rows, device=work.device),
        "num_items_in_batch": torch.tensor(rows * completion, device=work.device),
    }  # fmt: skip


def training_phase(work: "Work", micro_batch: int, prompt: int, completion: int, who: str) -> dict:
    """Log-prob and backward of a ready batch, in the trainer's own loop, in turn for both players (theirs: for one)."""

    def ready(trainer):
        def batch(rows):
            if who == "ours":
                trainer.become(trainer.player_at(trainer.state.global_step))
            return full_batch(work, prompt, completion)

        trainer._generate_and_score_completions = with_random_advantages(batch)

    if who == "ours":
        result = ours("tango", work, completion, micro_batch, prepare=ready)
    else:
        rows = Dataset.from_list([{"prompt": "What is 2+2?"}] * 64)
        coin = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
        coin.__name__ = "coin"
        trainer = plain_trainer(work, rows, completion, micro_batch, coin, 2)
        ready(trainer)
        steps = Steps(trainer, warm=2 * work.warm)
        trainer.train()
        result = summary(steps.records)
    seconds = result["phases"]["log-prob"] + result["phases"]["backward"]
    result["tflops"] = training_flops(work.config, work.rows, prompt, completion, work.device == "cuda") / seconds / 1e12
    return result


def training_flops(config, rows: int, prompt: int, completion: int, checkpointing: bool) -> float:
    """Of forward and backward with a frozen base (no products for weight gradients): matrix products with the weights and
    causal attention, once more where activations are recomputed; of the head, common/logprob.py's two products.

    LoRA's own products are left out (1 %)."""
    H, I, layers, length = config.hidden_size, config.intermediate_size, config.num_hidden_layers, prompt + completion
    K = H // config.num_attention_heads * config.num_key_value_heads
    linear = layers * (2 * H * H + 2 * H * K + 3 * H * I)
    passes = 3 if checkpointing else 2
    attention = layers * 2 * length**2 * H * (passes + 1)  # forward: q k and p v, half of each; backward twice that
    return rows * (2 * linear * length * passes + attention + 4 * config.vocab_size * H * completion)


def matmul(device: str) -> dict:
    """The rate of one large bfloat16 product on this card (float32 on a CPU)."""
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
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
    """What all cells of one size share: the config and the tokenizer, in a folder without weights."""

    def __init__(self, size: str, data: Path, questions: int):
        self.config, self.data, self.questions, self.group = SHAPES[size], data, questions, 2 if size == "tiny" else 4
        self.rows = self.questions * self.group
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.warm = self.device == "cuda"  # what a GPU does the first time (compiling, growing its pools) is not measured
        self.folder = Path(tempfile.mkdtemp()) / size
        self.tokenizer = AutoTokenizer.from_pretrained(data / "qwen2.5-tokenizer", padding_side="left")
        self.config.save_pretrained(self.folder)
        self.tokenizer.save_pretrained(self.folder)


def machine() -> dict:
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "memory": torch.cuda.get_device_properties(0).total_memory if gpu else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


class Cells:
    """Measures one after the other, writes each down at once, and stops starting new ones when time is up."""

    def __init__(self, out: Path, minutes: float):
        self.out, self.end, self.took = out, time.time() + 60 * minutes, {}
        out.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, kind: str, function, **about):
        """`kind`: cells of one kind take about as long; one that would not end in time is not started."""
        row, start = {"cell": name, **about, "machine": machine()}, time.time()
        row["allocated_before"] = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0  # by what was not freed
        if start + self.took.get(kind, 0.0) > self.end:
            row["skipped"] = "no time was left"
        else:
            try:
                row |= function()
            except Exception as error:  # one cell that fails must not take the others with it
                row["error"] = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
            self.took[kind] = max(self.took.get(kind, 0.0), time.time() - start)
        row["cell_seconds"] = round(time.time() - start, 1)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        (self.out / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
        told = row.get("error") or row.get("skipped") or f"{row.get('seconds', 0.0):.2f} s"
        print(f"{name:<40}{told}   ({row['cell_seconds']} s)", flush=True)


def run_cells(args):
    cells = Cells(args.out, args.minutes)
    tiny = args.shapes == ["tiny"]
    prompt, completion, tokens, micro_batches = (24, 8, 8, [1, 2]) if tiny else (1536, 1024, args.tokens, [1, 2, 4, 8])
    cells("matmul", "matmul", lambda: matmul("cuda" if torch.cuda.is_available() else "cpu"))
    for size in args.shapes:
        work = Work(size, args.data, questions=2)
        for micro in micro_batches:
            for who in ("ours", "trl") if micro in (1, 4) else ("ours",):
                cells(
                    f"training-{size}-{micro}-{who}", f"training-{size}",
                    lambda work=work, micro=micro, who=who: training_phase(work, micro, prompt, completion, who),
                    size=size, micro_batch=micro, prompt=prompt, completion=completion, who=who, rows=work.rows,
                )  # fmt: skip
    for repeat in range(args.repeats):
        for size in args.shapes:
            work = Work(size, args.data, questions=2 if tiny else 8)
            for script in args.scripts:
                about = dict(size=size, script=script, tokens=tokens, rows=work.rows, repeat=repeat)
                step = lambda work=work, script=script: ours(script, work, tokens, micro_batches[-2])  # noqa: E731
                cells(f"step-{script}-{size}-{repeat}-ours", f"step-{script}", step, who="ours", **about)
                if script == "tango":
                    step = lambda work=work: two_trainers(work, tokens, micro_batches[-2])  # noqa: E731
                    cells(f"step-{script}-{size}-{repeat}-two-trainers", "two", step, who="two trainers", **about)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="gsm8k_train.jsonl, mbpp.jsonl and qwen2.5-tokenizer/")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--shapes", nargs="+", default=["7b", "1.5b"], choices=SHAPES)
    parser.add_argument("--scripts", nargs="+", default=["tango"], choices=SETTINGS)
    parser.add_argument("--tokens", type=int, default=128, help="length of completions in the steps")
    parser.add_argument("--repeats", type=int, default=2, help="of the steps")
    parser.add_argument("--minutes", type=float, default=7.0, help="start nothing that would end later")
    args = parser.parse_args()
    if not (args.data / "qwen2.5-tokenizer").is_dir():
        parser.error(f"--data {args.data}: no qwen2.5-tokenizer/ in it")
    transformers.utils.logging.set_verbosity_error()
    run_cells(args)


if __name__ == "__main__":
    main()
