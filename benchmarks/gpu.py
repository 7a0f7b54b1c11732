"""What the scripts cost on one GPU, cell by cell: python benchmarks/gpu.py --data FOLDER --plan a

FOLDER holds gsm8k_train.jsonl, mbpp.jsonl and qwen2.5-tokenizer/, as published. Models have
Qwen2.5's shapes and random weights: speed and memory are those of the real ones, texts are noise
that never ends. A cell is a name; --plan a, b or c is a list of them, each for ten minutes:

    logprob/H            forward and backward pass of common/logprob.py and its peers, see there
    rollouts/SIZE/RxT    R rows of T tokens, by transformers' generate and by common/sampling.py
    update/SIZE/M        an update on 8 rows of 1,536 + 1,024 tokens, M at a time, ours and TRL's;
                         update/SIZE/M/on and /off: ours, with --checkpointing on and off
    step/SCRIPT/SIZE     two steps of a script in a process of its own, rows get random signs
    two/SIZE             two steps of tango.py; and the same as two GRPOTrainers on two bases
    gap/SIZE             nats between the sampler's and the trainer's log-probs of the same tokens
    resume/SIZE          tango.py in four steps, and in two and two: the largest difference

Every cell is a line of --out, docs/evidence/gpu.jsonl, as soon as it ends; one that fails leaves
its error. A cell that is there with figures is not measured again. `--plan tiny` runs every kind
on a CPU in minutes. benchmarks/gpu_docs.py makes the tables of docs/one-gpu.md from the lines.
"""

import argparse
import contextlib
import copy
import gc
import importlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
import common  # noqa: E402, F401
from common.adapters import AdapterTrainer  # noqa: E402
from common.args import fill_in, grpo_config  # noqa: E402
from common.cotrainer import CoTrainer, Player  # noqa: E402
from common.model import load_model  # noqa: E402
from common.pairs import completion_batch  # noqa: E402
from common.sampling import float32_logits, sample  # noqa: E402
from common.tasks.math import load_questions  # noqa: E402
from tango import Args, solve_prompt, verify_prompt  # noqa: E402

import logprob  # noqa: E402
import torch  # noqa: E402
import tyro  # noqa: E402
from bitsandbytes.nn import Linear4bit  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    Qwen2Config,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

OUT = ROOT / "docs" / "evidence" / "gpu.jsonl"
GPU = torch.cuda.is_available()


# ------------------------------------------------------------------ models
def shape(hidden, width, layers, heads, kv_heads, vocab=151936, tied=True) -> Qwen2Config:
    size = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
    size |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab}
    return Qwen2Config(**size, tie_word_embeddings=tied, rms_norm_eps=1e-6, rope_theta=1e6)


SHAPES = {  # as published in config.json
    "tiny": shape(64, 128, 2, 4, 2),
    "0.5b": shape(896, 4864, 24, 14, 2),
    "1.5b": shape(1536, 8960, 28, 12, 2),
    "7b": shape(3584, 18944, 28, 28, 4, vocab=152064, tied=False),
    "14b": shape(5120, 13824, 48, 40, 8, vocab=152064, tied=False),
    "32b": shape(5120, 27648, 64, 40, 8, vocab=152064, tied=False),
}


class Bench:
    """Where data and models are, and how much a cell does."""

    def __init__(self, data: Path, models: Path, size: str = "tiny"):
        self.data, self.models, self.tiny = data, models, size == "tiny"
        self.prompt, self.completion, self.rows = (24, 8, 4) if self.tiny else (1536, 1024, 8)
        self.tokens = 8 if self.tiny else 128  # of a completion in whole steps
        self.tokenizer = AutoTokenizer.from_pretrained(
            data / "qwen2.5-tokenizer", padding_side="left"
        )

    def model(self, size: str) -> Path:
        """The folder of a model of this shape with random weights, made at the first call."""
        folder = self.models / size
        if not (folder / "config.json").exists():
            torch.manual_seed(0)
            with torch.device("cuda" if GPU else "cpu"):
                model = AutoModelForCausalLM.from_config(SHAPES[size], dtype=torch.bfloat16)
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            del model
            tidy()
        return folder

    def questions(self, count: int) -> list[str]:
        rows, _ = load_questions(str(self.data / "gsm8k_train.jsonl"), count, 8, seed=0)
        return [row["question"] for row in rows]


def tidy():
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def now() -> float:
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def memory() -> dict[str, float]:
    """GiB at the highest point since `tidy`; nothing without a GPU."""
    if not GPU:
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated": allocated / 2**30, "reserved": reserved / 2**30}


# ------------------------------------------------------------------ rollouts, and their log-probs
def player(bench: Bench, size: str):
    """(the 4-bit model with an adapter that does something, its tokenizer)."""
    model, tokenizer = load_model(str(bench.model(size)), ["player", "equal"], 16, True, 0)
    weights = dict(model.named_parameters())
    for name, parameter in weights.items():
        if "lora_" in name and ".player." in name:
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, 0.0, 0.01)
            weights[name.replace(".player.", ".equal.")].data.copy_(parameter.data)
    return model.eval(), tokenizer


def by_generate(model, prompt_ids, tokens, pad_id, **more):
    """Token ids of each row; with `more`, whatever `generate` returns."""
    width = max(map(len, prompt_ids))
    ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in prompt_ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompt_ids])
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "top_k": 0}
    settings |= {"pad_token_id": pad_id, "return_dict_in_generate": True} | more
    with torch.no_grad():
        found = model.generate(
            input_ids=ids.to(model.device), attention_mask=mask.to(model.device), **settings
        )
    return found if more else found.sequences[:, width:].tolist()


def by_sample(model, prompt_ids, tokens, pad_id) -> list[list[int]]:
    return sample(model, prompt_ids, tokens, 1.0, [], pad_id)[0]


def kernels(work) -> int:
    """GPU kernels that `work()` starts; operators, where there is no GPU."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if GPU else kinds.CPU]) as profile:
        work()
        now()
    return len(profile.events())


def rollouts(bench: Bench, size: str, what: str) -> dict:
    """Tokens a second; milliseconds, and kernels, of one token of all rows."""
    rows, tokens = map(int, what.split("x"))
    model, tokenizer = player(bench, size)
    prompts = [solve_prompt(q) for q in bench.questions(-(-rows // 8)) for _ in range(8)]
    ids = tokenizer.apply_chat_template(prompts[:rows], add_generation_prompt=True)["input_ids"]
    found = {}
    for name, method in {"generate": by_generate, "sample": by_sample}.items():
        run = lambda n: method(model, ids, n, tokenizer.pad_token_id)  # noqa: B023, E731
        run(4)
        few, many = kernels(lambda: run(2)), kernels(lambda: run(6))  # noqa: B023
        tidy()
        start = now()
        count = sum(map(len, run(tokens)))
        seconds = now() - start
        found[name] = {"seconds": seconds, "tokens_per_second": count / seconds, **memory()}
        found[name] |= {"ms_per_token_step": 1000 * seconds / tokens, "kernels": (many - few) / 4}
    return found


class Ready(CoTrainer):
    """Trains on a batch that is there, step after step."""

    def step(self, rows):
        return [dict(self.ready)]


def our_trainer(model, tokenizer, names: list[str], rows: int, micro: int, steps: int, **change):
    args = Args(micro_batch=micro, steps=steps, four_bit=True, save_every=10**6, **change)
    args = fill_in(args, rows=rows)
    players = {name: Player([], 2e-5, 8) for name in names}
    return Ready(
        model,
        players,
        args=grpo_config(args, Path(tempfile.mkdtemp()), rows=rows),
        train_dataset=Dataset.from_list([{"prompt": solve_prompt("")}] * rows),
        processing_class=tokenizer,
    )


def gap(bench: Bench, size: str) -> dict:
    """Mean distances in nats: of sampler and trainer, the same adapter; and of two adapters with
    the same weights: what prime.py's log-ratio can mean at least.
    """
    model, tokenizer = player(bench, size)
    trainer = our_trainer(model, tokenizer, ["player", "equal"], bench.rows, 2, 1)
    prompts = [solve_prompt(q) for q in bench.questions(bench.rows)]
    ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]
    model.set_adapter("player")
    with float32_logits(model.get_base_model()):  # as common/adapters.py samples on a GPU
        found = by_generate(model, ids, 64, tokenizer.pad_token_id, output_logits=True)
    width = max(map(len, ids))
    logps = torch.stack(found.logits, 1).float().log_softmax(-1)  # (B, T, V)
    texts = found.sequences[:, width:]  # (B, T)
    sampled = logps.gather(2, texts[..., None])[..., 0]  # (B, T)
    batch = completion_batch(prompts, texts.tolist(), tokenizer, model.device)
    own, equal = (trainer.log_probs(name, batch) for name in ("player", "equal"))
    return {
        "sampler_and_trainer": (sampled - own).abs().mean().item(),
        "two_equal_adapters": (own - equal).abs().mean().item(),
    }


# ------------------------------------------------------------------ updates, ours and TRL's
def random_signs(rows: int, device) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return (torch.randint(2, (rows,), generator=draw) * 2.0 - 1).to(device)  # (B,)


class StepTimes(TrainerCallback):
    """Seconds of every optimiser step."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *_, **__):
        self.start = now()

    def on_step_end(self, *_, **__):
        self.seconds.append(now() - self.start)


def timed(trainer, warm: int) -> dict:
    """Trains; the median second and the peak of the steps after the first `warm`."""
    times = StepTimes()
    trainer.add_callback(times)
    tidy()
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    return {"seconds": statistics.median(times.seconds[warm:]), "steps": times.seconds, **memory()}


def full_batch(bench: Bench, device) -> dict:
    """Rows without padding, all prompts different: the most work that there can be."""
    draw = torch.Generator().manual_seed(0)
    shape_ = (bench.rows, bench.prompt + bench.completion)
    ids = torch.randint(5, 151_000, shape_, generator=draw).to(device)
    ones, P = torch.ones_like(ids), bench.prompt
    return {
        "prompt_ids": ids[:, :P],
        "prompt_mask": ones[:, :P],
        "completion_ids": ids[:, P:],
        "completion_mask": ones[:, P:],
        "advantages": random_signs(bench.rows, device),
        "num_items_in_batch": torch.tensor(ones[:, P:].sum().item(), device=device),
    }


def our_update(bench: Bench, size: str, micro: int, checkpointing: str = "on") -> dict:
    model, tokenizer = load_model(str(bench.model(size)), ["player", "other"], 16, True, 0)
    options = {"checkpointing": checkpointing}
    trainer = our_trainer(model, tokenizer, ["player", "other"], bench.rows, micro, 4, **options)
    trainer.ready = full_batch(bench, model.device) | {"player": "player"}
    return timed(trainer, warm=2)


def their_trainer(bench: Bench, size: str, rows, reward, tokens: int, steps: int, **change):
    """TRL's GRPOTrainer on a 4-bit base of its own; its adapter is bfloat16, as TRL makes it."""
    dtype = torch.bfloat16 if GPU else torch.float32
    four_bit = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    four_bit |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    model = AutoModelForCausalLM.from_pretrained(
        bench.model(size),
        dtype=dtype,
        quantization_config=BitsAndBytesConfig(**four_bit),
        **({"device_map": {"": 0}} if GPU else {}),
    )
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False  # see common/model.py
    config = {"output_dir": tempfile.mkdtemp(), "max_steps": steps, "num_generations": 2}
    config |= {"max_completion_length": tokens, "loss_type": "dapo", "beta": 0.0}
    config |= {"learning_rate": 2e-5, "gradient_checkpointing": True, "bf16": GPU}
    config |= {"use_cpu": not GPU, "report_to": "none", "save_strategy": "no"}
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return GRPOTrainer(
        model,
        reward,
        GRPOConfig(**config | change, disable_tqdm=True),
        rows,
        processing_class=copy.deepcopy(bench.tokenizer),
        peft_config=lora,
    )


def their_update(bench: Bench, size: str, micro: int) -> dict:
    parts = bench.rows // micro
    cut = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": parts}
    rows = Dataset.from_list([{"prompt": "What is 2+2?"}] * bench.rows)
    nothing = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
    trainer = their_trainer(
        bench, size, rows, nothing, bench.completion, 4, steps_per_generation=parts, **cut
    )
    batch = full_batch(bench, trainer.accelerator.device)
    trainer._generate_and_score_completions = lambda _: dict(batch)
    return timed(trainer, warm=2)


def update(bench: Bench, size: str, micro: str, checkpointing: str = "") -> dict:
    if checkpointing:
        return {"ours": our_update(bench, size, int(micro), checkpointing)}
    ours = our_update(bench, size, int(micro))
    tidy()
    theirs = their_update(bench, size, int(micro))
    return {"ours": ours, "TRL": theirs, "ratio": ours["seconds"] / theirs["seconds"]}


# ------------------------------------------------------------------ whole steps
STEPS = {  # everybody plays within two steps, and nothing is filtered away
    "tango": "--ver-warmup 0 --gen-steps 1 --ver-steps 1 --solution-tokens {T} "
    "--judgement-tokens {T}",
    "gar": "--solution-tokens {T} --judgement-tokens {T} --silent-share 1 --min-slice-tokens 4 "
    "--slice-tokens 64",
    "prime": "--solution-tokens {T} --keep-low 0 --keep-high 1",
    "spin": "--iterations 1 --solution-tokens 512",  # human answers have to fit
    "cure": "--program-tokens {T} --test-tokens {T}",
    "mae": "--solution-tokens {T} --judgement-tokens {T} --silent-share 1 --seed-questions 8",
    "deepseekmath": "--verifier-steps 0 --meta-steps 0 --solution-tokens {T} --analysis-tokens {T}",
}
"""The other scripts learn from texts that can be read, which noise is not."""


def child(script: str, options: list[str]):
    """A script's own main(), with a random sign in every row's advantage, so that all rows count.
    Seconds of sampling, tokens and the peak go to measured.json in its folder.
    """
    module, sampled, cut = importlib.import_module(script), [], CoTrainer.micro_batches
    generate = AdapterTrainer._generate_single_turn

    def measured(self, *args):
        start = now()
        ids, logps = generate(self, *args)
        step = self.state.global_step + 1
        sampled.append([step, now() - start, sum(map(len, ids))])
        return ids, logps

    def with_signs(self, batch):
        if "advantages" in batch:
            mask = batch["completion_mask"]
            batch["advantages"] = random_signs(len(mask), mask.device)
        return cut(self, batch)

    AdapterTrainer._generate_single_turn, CoTrainer.micro_batches = measured, with_signs
    module.evaluate = lambda *_: {}  # not what this is about
    args = tyro.cli(module.Args, args=options)
    module.main(args)
    (Path(args.out) / "measured.json").write_text(json.dumps({"sampled": sampled, **memory()}))


def run_child(bench: Bench, script: str, size: str, out: Path, steps: int, *more) -> None:
    data = bench.data / ("mbpp.jsonl" if script == "cure" else "gsm8k_train.jsonl")
    rows = "--questions 2 --micro-batch 2" if bench.tiny else "--questions 8 --micro-batch 4"
    options = f"--model {bench.model(size)} --dataset {data} --four-bit --eval-questions 2 {rows} "
    options += f"--steps {steps} --out {out} " + STEPS[script].format(T=bench.tokens)
    command = [sys.executable, __file__, "--child", script, *options.split(), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script}.py: {(done.stderr or done.stdout).strip()[-300:]}")


def step(bench: Bench, script: str, size: str) -> dict:
    """Seconds of the steps, of the sampling in them, tokens."""
    out, steps = Path(tempfile.mkdtemp()) / "run", 4 if script == "tango" else 2
    run_child(bench, script, size, out, steps)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = json.loads((out / "measured.json").read_text())
    sampled = found.pop("sampled")
    return found | {
        "seconds": [row["step_time"] for row in rows if "step_time" in row],
        "sampling": [sum(s for n, s, _ in sampled if n == i) for i in range(1, steps + 1)],
        "tokens": [sum(t for n, _, t in sampled if n == i) for i in range(1, steps + 1)],
    }


def resume(bench: Bench, size: str) -> dict:
    """Tango whole, and from the checkpoint in its middle: the largest difference of a weight."""
    folder, files = Path(tempfile.mkdtemp()), "checkpoint-4/{}/adapter_model.safetensors"
    run_child(bench, "tango", size, folder / "whole", 4, "--save-every", "2")
    shutil.copytree(folder / "whole", folder / "parts", ignore=lambda *_: ["checkpoint-4"])
    run_child(bench, "tango", size, folder / "parts", 4, "--save-every", "2")
    worst = 0.0
    for name in ("generator", "verifier"):
        a, b = (load_file(folder / who / files.format(name)) for who in ("whole", "parts"))
        worst = max(worst, *((a[key] - b[key]).abs().max().item() for key in a))
    return {"largest_difference": worst}


def two(bench: Bench, size: str) -> dict:
    """Tango's two kinds of steps. Ours are a script's; theirs two trainers', the generator's reward
    function samples from the verifier's model, and the verifier's prompts hold solutions that were
    sampled from the generator's.
    """
    ours = step(bench, "tango", size)
    questions = bench.questions(16)
    count = 2 if bench.tiny else 8  # questions of a step
    group = Args().group_size
    shared = {
        "per_device_train_batch_size": 2 if bench.tiny else 4,
        "gradient_accumulation_steps": count * group // (2 if bench.tiny else 4),
        "num_generations": group,
    }
    shared["steps_per_generation"] = shared["gradient_accumulation_steps"]
    draw = torch.Generator().manual_seed(0)

    def noise(completions, **_):
        return torch.randint(2, (len(completions),), generator=draw).float().tolist()

    def judged(completions, question, **_):
        prompts = [verify_prompt(q, c[0]["content"]) for q, c in zip(question, completions)]
        write(verifier, prompts, bench.tokens)
        return noise(completions)

    rows = Dataset.from_list([{"prompt": solve_prompt(q), "question": q} for q in questions])
    generator = their_trainer(bench, size, rows, judged, bench.tokens, 2, **shared)
    verifier = their_trainer(bench, size, rows, noise, bench.tokens, 2, **shared)
    first = timed(generator, warm=1)
    start = now()
    texts = write(generator, [solve_prompt(q) for q in questions[:count]], bench.tokens)
    sampling = now() - start  # the solutions are a part of the verifier's step
    judge = [{"prompt": verify_prompt(q, s), "question": q} for q, s in zip(questions, texts)]
    verifier.train_dataset = Dataset.from_list(judge)
    last = timed(verifier, warm=1)
    theirs = [first["seconds"], last["seconds"] + sampling]
    return {"ours": ours, "two trainers": {"seconds": theirs, **memory()}}


def write(trainer: GRPOTrainer, prompts: list, tokens: int) -> list[str]:
    """What a reward function does for texts of another model."""
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]
    base = model.get_base_model()
    base.gradient_checkpointing_disable()  # under it no layer fills a cache
    base.disable_input_require_grads()
    found = by_generate(model.eval(), ids, tokens, tokenizer.pad_token_id)
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    model.train()
    return tokenizer.batch_decode(found, skip_special_tokens=True)


# ------------------------------------------------------------------ cells
def log_prob(bench: Bench, hidden: str) -> dict:
    size = (64, int(hidden), 4096) if bench.tiny else (16384, int(hidden), 151936)
    device, dtype = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
    inputs = logprob.make_inputs(*size, device, dtype)
    return {"methods": logprob.measure(size, inputs, True, 2 if bench.tiny else 10)}


CELLS = {
    "logprob": log_prob,
    "rollouts": rollouts,
    "update": update,
    "step": step,
    "two": two,
    "gap": gap,
    "resume": resume,
}
PLANS = {
    "a": ["logprob/2048", "logprob/4096", "step/tango/1.5b", "rollouts/1.5b/64x512"]
    + [f"step/{script}/1.5b" for script in STEPS if script != "tango"]
    + ["rollouts/7b/64x512"],
    "b": [f"update/{size}/{micro}" for size in ("1.5b", "7b") for micro in (1, 2, 4, 8)],
    "c": ["two/1.5b", "gap/1.5b", "resume/1.5b", "update/1.5b/4/on", "update/1.5b/4/off"]
    + ["rollouts/1.5b/256x512", "rollouts/7b/64x1000", "two/7b"],
    "tiny": ["logprob/32", "rollouts/tiny/8x6", "update/tiny/2", "update/tiny/2/off", "two/tiny"]
    + ["gap/tiny", "resume/tiny", *(f"step/{script}/tiny" for script in STEPS)],
}


def machine() -> str:
    device = torch.cuda.get_device_name() if GPU else f"{platform.machine()} CPU"
    return f"{device}, torch {torch.__version__}"


def read(out: Path) -> dict[str, dict]:
    """Cell -> its last line."""
    lines = out.read_text().splitlines() if out.exists() else []
    return {row["cell"]: row for row in map(json.loads, lines)}


def measure(cells: list[str], bench: Bench, out: Path, minutes: float):
    end = time.time() + 60 * minutes
    for cell in cells:
        kept = read(out).get(cell, {})
        if kept.get("machine") == machine() and "error" not in kept:
            continue
        if time.time() > end:
            print(f"{cell}: no time is left", flush=True)
            continue
        start, row = time.time(), {"cell": cell, "machine": machine()}
        kind, *about = cell.split("/")
        try:
            row |= CELLS[kind](bench, *about)
        except Exception as error:  # one cell that fails must not take the others with it
            row["error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
        row["took"] = round(time.time() - start, 1)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{cell}: {row.get('error', 'measured')} ({row['took']} s)", flush=True)
        tidy()


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", help="cells, by their names")
    files = "gsm8k_train.jsonl, mbpp.jsonl and qwen2.5-tokenizer/"
    parser.add_argument("--data", type=Path, required=True, help=files)
    parser.add_argument("--plan", choices=PLANS, help="a list of cells")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--models", type=Path, default=ROOT / "runs" / "gpu", help="kept there")
    parser.add_argument("--minutes", type=float, default=9.0, help="start nothing after them")
    args = parser.parse_args()
    cells = [*args.cells, *PLANS.get(args.plan, [])]
    wrong = [cell for cell in cells if cell.split("/")[0] not in CELLS]
    if wrong or not cells:
        parser.error(f"{wrong[0]}: no such cell" if wrong else "no cell, and no --plan")
    if not (args.data / "qwen2.5-tokenizer").is_dir():
        parser.error(f"--data {args.data}: no qwen2.5-tokenizer/ in it")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    tiny = all("tiny" in cell or cell == "logprob/32" for cell in cells)
    measure(cells, Bench(args.data, args.models, "tiny" if tiny else ""), args.out, args.minutes)
    return None


if __name__ == "__main__":
    main()
