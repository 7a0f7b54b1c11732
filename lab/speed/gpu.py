"""What training costs on one GPU, cell by cell: python -m lab.speed.gpu --data FOLDER

FOLDER holds gsm8k_train.jsonl and qwen2.5-tokenizer/, as published. Models have Qwen2.5's shapes
and random weights: speed and memory are those of the real ones, texts are noise that never ends. A
cell is a name; without names, those of lab/notes/speed.md are measured:

    logprob/H            forward and backward pass of common/fast/logprob.py and its peers
    rollouts/SIZE/RxT    R rows of T tokens, by generate and by common/fast/sampling.py
    unlike/SIZE/M        an update on 32 rows of GSM8K's lengths, M at a time, ours and TRL's, both
                         with checkpointing; all prompts differ
    alike/SIZE/M         the same, but every 8 rows share a prompt, as those of a group do, and ours
                         has no checkpointing, which a script sets where that fits; TRL's with and
                         without it
    peak/SIZE/RxM        memory of two players: updates, M rows at a time, and sampling of R rows to
                         their full length
    two/SIZE             tango.py in four steps, rows get random signs; and one step of each of its
                         players by two GRPOTrainers on two bases
    resume/SIZE          tango.py in four steps, in two and two, and in four again: differences

Every cell is a line of --out, lab/evidence/gpu.jsonl, as soon as it ends; one that fails leaves
its error, and where CUDA itself has failed, the run ends. A measured cell is not measured again.
gpu_tables.py has the tables of the lines.
"""

import contextlib
import copy
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import tango
from common.checked import CoTrainer, Player
from common.core.batch import Batch
from common.core.cotrainer import with_adapters
from common.core.model import without_checkpointing
from common.core.plain import float32_logits
from common.fast.layers import FusedNorm
from common.fast.sampling import generate
from common.run.launch import grpo_config
from common.run.memory import GIB
from common.run.models import load_model
from common.tasks.math import load_questions
from lab import EVIDENCE, ROOT
from lab.speed import logprob
from lab.speed.side_by_side import GPU, libraries, machine, now
from lab.speed.step import alternate, by_generate, by_sample, player, their_config
from tango import Args, solve_prompt, verify_prompt

import torch
import tyro
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, TrainerCallback
from trl import GRPOTrainer

OUT = EVIDENCE / "gpu.jsonl"


def shape(hidden, width, layers, heads, kv_heads, vocab=151936, tied=True) -> Qwen2Config:
    size = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
    size |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab}
    return Qwen2Config(**size, tie_word_embeddings=tied, rms_norm_eps=1e-6, rope_theta=1e6)


SHAPES = {  # of Qwen2.5, as published in config.json
    "1.5b": shape(1536, 8960, 28, 12, 2),
    "7b": shape(3584, 18944, 28, 28, 4, vocab=152064, tied=False),
    "14b": shape(5120, 13824, 48, 40, 8, vocab=152064, tied=False),
    "32b": shape(5120, 27648, 64, 40, 8, vocab=152064, tied=False),
}
# tokens of 32 of GSM8K's questions, drawn at random, in tango.py's prompt, and of their answers
GSM8K = [
    (160, 87), (164, 162), (186, 136), (158, 87), (190, 138), (164, 120), (152, 47), (157, 90),
    (142, 116), (183, 203), (172, 133), (173, 183), (186, 208), (162, 76), (178, 212), (164, 93),
    (264, 245), (170, 105), (219, 71), (153, 70), (167, 105), (198, 64), (190, 79), (191, 122),
    (160, 64), (201, 131), (163, 110), (145, 74), (157, 88), (196, 134), (164, 124), (168, 129),
]  # fmt: skip


def read(out: Path) -> dict[str, dict]:
    """Cell -> its last line."""
    lines = out.read_text().splitlines() if out.exists() else []
    return {row["cell"]: row for row in map(json.loads, lines)}


# ------------------------------------------------------------------ the machine
def tidy():
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def memory() -> dict[str, float]:
    """GiB at the highest point since `tidy`; nothing without a GPU."""
    if not GPU:
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated": allocated / GIB, "reserved": reserved / GIB}


class Bench:
    """Where data and models are, and how much a cell does."""

    def __init__(self, data: Path, models: Path, tiny: bool):
        self.data, self.models, self.tiny = data, models, tiny
        # of an update; of a whole step
        self.prompt, self.completion, self.rows = (24, 8, 4) if self.tiny else (1536, 1024, 8)
        self.asked, self.micro, self.tokens = (2, 2, 8) if self.tiny else (8, 16, 64)
        folder = data / "qwen2.5-tokenizer"
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")

    def model(self, size: str) -> str:
        """The folder of a model of this shape with random weights, made at the first call."""
        folder = self.models / size
        if not folder.exists():
            part = folder.with_name(f"{size}.part")  # what is cut short is no model
            torch.manual_seed(0)
            with torch.device("cuda" if GPU else "cpu"):
                model = AutoModelForCausalLM.from_config(SHAPES[size], dtype=torch.bfloat16)
            model.save_pretrained(part)
            self.tokenizer.save_pretrained(part)
            part.rename(folder)
            del model
            tidy()
        return str(folder)

    def questions(self, count: int) -> list[str]:
        rows, _ = load_questions(str(self.data / "gsm8k_train.jsonl"), count, 8, seed=0)
        return [row["question"] for row in rows]


# ------------------------------------------------------------------ log-probs, and rollouts
def log_prob(bench: Bench, hidden: str) -> dict:
    size = (64, int(hidden), 4096) if bench.tiny else (16384, int(hidden), 151936)
    return {"peers": logprob.measure(size, 2 if bench.tiny else 10)}


def rollouts(bench: Bench, size: str, what: str) -> dict:
    """Milliseconds of one token of all rows."""
    rows, tokens = map(int, what.split("x"))
    model, tokenizer = player(bench.model(size), ["player"], True)
    prompts = [solve_prompt(q) for q in bench.questions(-(-rows // 8)) for _ in range(8)][:rows]
    found, autocast = {}, torch.autocast("cuda", torch.bfloat16, enabled=GPU)
    for name, method in {"generate": by_generate, "sample": by_sample}.items():
        run = partial(method, model, tokenizer, prompts)
        with autocast, float32_logits(model.eval().get_base_model()):  # as CoTrainer.sample does
            run(4)
            tidy()
            start = now()
            run(tokens)
            seconds = now() - start
        found[name] = {"seconds": seconds, "ms_per_token_step": 1000 * seconds / tokens, **memory()}
    return found


# ------------------------------------------------------------------ updates, ours and TRL's
def arguments(micro: int, gradient_checkpointing="on") -> Args:
    """model: a small model would not run on the GPU; kl: TRL's, beside ours, has no such term."""
    more = {"micro_batch": micro, "gradient_checkpointing": gradient_checkpointing}
    args = Args(model="random weights", **more)
    args.steps, args.kl, args.save_every = 4, 0.0, 10**6
    return args


def our_trainer(model, tokenizer, names: list[str], args: Args, rows: int) -> CoTrainer:
    players = with_adapters({name: Player([], 2e-5, 8) for name in names})
    config = grpo_config(args, Path(tempfile.mkdtemp()), rows, save_strategy="no")
    data = Dataset.from_list([{"prompt": solve_prompt("")}] * rows)
    return CoTrainer(model, players, args, config, data, tokenizer)


def their_trainer(
    bench: Bench, size: str, data: list, reward, micro: int, rows: int, group=2, **more
) -> GRPOTrainer:
    """TRL's, on a 4-bit base of its own; its adapter is bfloat16, as TRL makes it."""
    more |= {"max_grad_norm": 1.0, "learning_rate": 2e-5}
    config = their_config(arguments(micro), rows, group, **more)
    with patch.object(FusedNorm, "replaces", lambda _: False):  # norms as they are without us
        base = load_model(bench.model(size), ["none"], 16, True, 0)[0].unload()
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    tokenizer, data = copy.deepcopy(bench.tokenizer), Dataset.from_list(data)
    return GRPOTrainer(base, reward, config, data, processing_class=tokenizer, peft_config=lora)


def timed(trainer, warm: int) -> dict:
    """Trains; the median second and the peak of the steps after the first `warm`."""
    moments, callback = [], TrainerCallback()  # when optimiser steps begin and end
    callback.on_step_begin = callback.on_step_end = lambda *_, **__: moments.append(now())
    trainer.add_callback(callback)
    tidy()
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    seconds = [end - start for start, end in zip(moments[::2], moments[1::2])]
    return {"seconds": statistics.median(seconds[warm:]), "steps": seconds, **memory()}


def random_signs(rows: int, device) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return (torch.randint(2, (rows,), generator=draw) * 2.0 - 1).to(device)  # (B,)


def ready(prompts: list[list[int]], completions: list[list[int]], device) -> Batch:
    batch = Batch.of("player", prompts, completions, 0, device)
    batch.total_tokens = int(batch.completion_mask.sum())
    batch.advantages = random_signs(len(batch), device)
    return batch


def random_ids(draw: torch.Generator, count: int) -> list[int]:
    return torch.randint(5, 16_000, (count,), generator=draw).tolist()


def real_batch(bench: Bench, device, alike: bool) -> Batch:
    """Rows of GSM8K's lengths; all prompts different, or every 8 rows alike."""
    draw, group = torch.Generator().manual_seed(0), 2 if bench.tiny else 8
    sizes = [(24, 8), (19, 3), (21, 5), (24, 6)] if bench.tiny else GSM8K
    prompts = [random_ids(draw, P) for P, _ in sizes]
    if alike:
        prompts = [prompts[i - i % group] for i in range(len(prompts))]
    return ready(prompts, [random_ids(draw, T) for _, T in sizes], device)


def our_updates(bench: Bench, size: str, micro: int, checkpointing: str, alike=False) -> dict:
    tidy()
    names, args = ["player", "other"], arguments(micro, checkpointing)
    model, tokenizer = load_model(bench.model(size), names, 16, True, 0)
    batch = real_batch(bench, model.device, alike)
    trainer = our_trainer(model, tokenizer, names, args, len(batch))
    trainer.step = lambda _: [batch]
    return timed(trainer, warm=2)


def their_updates(bench: Bench, size: str, micro: int, checkpointing: str, alike=False) -> dict:
    tidy()
    batch = real_batch(bench, "cuda" if GPU else "cpu", alike)
    rows = [{"prompt": "What is 2+2?"}] * len(batch)
    more = {"gradient_checkpointing": checkpointing == "on"}
    trainer = their_trainer(bench, size, rows, alternate, micro, len(batch), **more)
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    given = {name: getattr(batch, name) for name in names}
    given["num_items_in_batch"] = torch.tensor(batch.total_tokens, device=batch.row.device)
    trainer._generate_and_score_completions = lambda _: dict(given)
    return timed(trainer, warm=2)


def unlike(bench: Bench, size: str, micro: str) -> dict:
    how = bench, size, int(micro), "on"
    return {"ours": our_updates(*how), "TRL": their_updates(*how)}


def alike(bench: Bench, size: str, micro: str) -> dict:
    found = {"ours": our_updates(bench, size, int(micro), "off", alike=True)}
    for how in ("on", "off"):
        theirs = their_updates(bench, size, int(micro), how, alike=True)
        found[f"TRL, checkpointing {how}"] = theirs
    return found


def peak(bench: Bench, size: str, what: str) -> dict:
    """Sampling begins just below the full length, where the cache is as large as it gets."""
    rows, micro = map(int, what.split("x"))
    names = ["player", "other"]
    model, tokenizer = load_model(bench.model(size), names, 16, True, 0)
    trainer = our_trainer(model, tokenizer, names, arguments(micro), bench.rows)
    draw, sizes = torch.Generator().manual_seed(0), (bench.prompt, bench.completion)
    full = [[random_ids(draw, length) for _ in range(bench.rows)] for length in sizes]
    batch = ready(*full, model.device)
    trainer.step = lambda _: [replace(batch, player=name) for name in names]
    found = {"training": timed(trainer, warm=2)}
    tidy()
    length = bench.prompt + bench.completion
    prompts = torch.randint(5, 16_000, (rows, length - 8)).tolist()
    with trainer.playing("player"), without_checkpointing(model), trainer.accelerator.autocast():
        start = now()
        generate(model, prompts, 8, 1.0, [], [*range(rows)])
        found["sampling"] = {"seconds": now() - start, **memory()}
    return found


# ------------------------------------------------------------------ whole steps
def run_tango(bench: Bench, size: str, out: Path, more="") -> dict:
    """Four steps of tango.py's own main(), whose players take turns. Every row's advantage is a
    random sign, so that all rows count. -> seconds and sampled tokens of each step, and the peak.
    """
    options = f"--model {bench.model(size)} --dataset {bench.data / 'gsm8k_train.jsonl'} "
    options += f"--four-bit --eval-questions 2 --questions {bench.asked} --steps 4 "
    options += f"--micro-batch {bench.micro} --ver-warmup 0 --gen-steps 1 --ver-steps 1 "
    options += f"--solution-tokens {bench.tokens} --judgement-tokens {bench.tokens} --out {out}"
    update = CoTrainer.update

    def with_signs(self, batch):
        batch.advantages = random_signs(len(batch), batch.row.device)
        update(self, batch)

    args = tyro.cli(Args, args=(options + more).split())
    tidy()
    with (
        patch.object(CoTrainer, "update", with_signs),
        patch.object(tango, "evaluate", lambda *_: {}),  # not what this is about
        contextlib.redirect_stdout(sys.stderr),
    ):
        tango.main(args)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step_time" in row]
    names = {"seconds": "step_time", "tokens": "co/sampled_tokens"}
    return {name: [row[key] for row in steps] for name, key in names.items()} | memory()


def resume(bench: Bench, size: str) -> dict:
    """Largest differences of a weight; on a GPU not even the whole run again need be the same."""
    folder, files = Path(tempfile.mkdtemp()), "checkpoint-4/{}/adapter_model.safetensors"
    run_tango(bench, size, folder / "whole", " --save-every 2")
    shutil.copytree(folder / "whole", folder / "parts", ignore=lambda *_: ["checkpoint-4"])
    found = {}
    for who in ("parts", "again"):
        run_tango(bench, size, folder / who, " --save-every 2")
        found[who] = 0.0
        for name in ("generator", "verifier"):
            a, b = (load_file(folder / run / files.format(name)) for run in ("whole", who))
            found[who] = max(found[who], *((a[key] - b[key]).abs().max().item() for key in a))
    return {"largest_difference": found["parts"], "of_the_same_again": found["again"]}


def two(bench: Bench, size: str) -> dict:
    """Tango's two kinds of steps. Ours are a script's; theirs two trainers', the generator's reward
    function samples from the verifier's model, and the verifier's prompts hold solutions that were
    sampled from the generator's.
    """
    ours = run_tango(bench, size, Path(tempfile.mkdtemp()) / "run")

    def judged(completions, question, **_):
        prompts = [verify_prompt(q, c[0]["content"]) for q, c in zip(question, completions)]
        write(verifier, prompts, bench.tokens)
        return alternate(completions)

    group, questions = Args().group_size, bench.questions(16)
    rows = [{"prompt": solve_prompt(q), "question": q} for q in questions]
    both = bench.asked * group, group
    more = {"max_steps": 2, "max_completion_length": bench.tokens}
    generator, verifier = (
        their_trainer(bench, size, rows, reward, bench.micro, *both, **more)
        for reward in (judged, alternate)
    )
    first = timed(generator, warm=1)
    start = now()
    texts = write(generator, [row["prompt"] for row in rows[: bench.asked]], bench.tokens)
    sampling = now() - start  # the solutions are a part of the verifier's step
    rows = [{"prompt": verify_prompt(q, text)} for q, text in zip(questions, texts)]
    verifier.train_dataset = Dataset.from_list(rows)
    last = timed(verifier, warm=1)
    theirs = [first["seconds"], last["seconds"] + sampling]
    return {"ours": ours, "two trainers": {"seconds": theirs, **memory()}}


def write(trainer: GRPOTrainer, prompts: list, tokens: int) -> list[str]:
    """What a reward function does for texts of another model."""
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    found = by_generate(model.eval(), tokenizer, prompts, tokens)  # in training no cache is filled
    model.train()
    return tokenizer.batch_decode(found.sequences[:, -tokens:], skip_special_tokens=True)


# ------------------------------------------------------------------ cells
CELLS = {"logprob": log_prob, "rollouts": rollouts, "unlike": unlike, "alike": alike}
CELLS |= {"two": two, "peak": peak, "resume": resume}
SHOWN = ["logprob/4096", "logprob/2048", "rollouts/1.5b/64x256", "rollouts/7b/64x64"]
SHOWN += ["unlike/1.5b/8", "alike/1.5b/8", "two/1.5b", "peak/7b/64x8", "resume/1.5b"]


def measure(cells: list[str], bench: Bench, out: Path):
    here = f"{machine()}, {libraries()}"
    for cell in cells:
        kept = read(out).get(cell, {})
        if kept.get("machine") == here and "error" not in kept:
            continue
        start, row = time.time(), {"cell": cell, "machine": here}
        kind, *about = cell.split("/")
        try:
            row |= CELLS[kind](bench, *about)
        except Exception as error:  # one cell that fails must not take the others with it
            message = " ".join(str(error).split())  # a cell of a table is one line
            row["error"] = f"{type(error).__name__}: {message[:400]}"
        row["took"] = round(time.time() - start, 1)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{cell}: {row.get('error', 'measured')} ({row['took']} s)", flush=True)
        tidy()


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=SHOWN, help="cells, by their names")
    parser.add_argument("--data", type=Path, required=True, help="the folder, see above")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--models", type=Path, default=ROOT / "runs" / "gpu", help="kept there")
    args = parser.parse_args()
    if wrong := [cell for cell in args.cells if cell.split("/")[0] not in CELLS]:
        parser.error(f"{wrong[0]}: no such cell")
    if not (args.data / "qwen2.5-tokenizer").is_dir():
        parser.error(f"--data {args.data}: no qwen2.5-tokenizer/ in it")
    measure(args.cells, Bench(args.data, args.models, tiny=False), args.out)


if __name__ == "__main__":
    main()
