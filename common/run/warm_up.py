"""Phase 0, before RL: teaches a model the form in which a script reads what the model writes.

    python -m common.run.warm_up tango.py --model MODEL --dataset rows.jsonl --out warm
    python tango.py --model warm --dataset rows.jsonl

RL rewards what can be read, so a model that never writes `<step>` learns nothing. TRL's SFTTrainer
teaches it demonstrations (common/tasks/demonstrations.py): the references of the training
questions, arithmetic, and judgements if the script has a verifier of steps. The LoRA adapter is
merged in the end.

The warm-up stops as soon as nine of ten answers to held-out questions can be read. More steps would
make the model surer of a single answer, and RL needs several answers to choose from. With --until
ready it goes on until the held-out answers leave RL something to work with. If --model is the
output of a warm-up, judgements are made of solutions that this model writes.
"""

import dataclasses
import functools
import importlib
import json
import random
import time
from pathlib import Path
from typing import Literal

from common.core.draws import row_key
from common.core.errors import UserError, say
from common.core.lists import chunk, mean
from common.core.model import tokenize
from common.fast import generate
from common.run.args import Count, Tokens, Weight, Whole, check_number
from common.run.folder import claim, read_arguments, write_whole
from common.run.machine import check_machine, on_gpu
from common.run.models import load_model
from common.run.session import begin, exit_with_one_sentence
from common.tasks.answers import solve_prompt
from common.tasks.demonstrations import demonstrations, figures, judges
from common.tasks.math import load_questions

import torch
import tyro
from datasets import Dataset, disable_progress_bars
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

KEPT = 0.9  # share of held-out answers that can be read
READY = {  # held-out figures with which RL has something to work with
    "accuracy": 0.35,
    "groups with two outcomes": 0.5,
    "judgements read": 0.95,
    "verifier, balanced_accuracy": 0.7,
}
QUESTIONS, SAMPLES = 128, 4  # held out, and answers to each, before and after
ROWS, MICRO = 16, 8  # of an optimiser step, and of a micro-batch
SAVES = 10  # steps between two checkpoints
LOOKS = {"read": (10, 1), "ready": (50, 4)}  # steps between two looks, answers to each question
OWN = 512  # training questions that the model answers itself
FIGURES, ANSWERS = "warm_up.json", "own.json"


@dataclasses.dataclass
class Args:
    script: tyro.conf.Positional[str]
    """whose form is taught, such as tango.py"""
    model: str
    """a hub id or a folder"""
    dataset: str
    """a hub id, or a .jsonl file with question, answer and solution, reference or equation"""
    out: str
    """the folder that --model takes afterwards; if you give it again, the warm-up resumes"""
    steps: Count = 150
    """largest number of optimiser steps; a step has sixteen solutions, judgements and drills"""
    until: Literal["read", "ready"] = "read"
    """stop when nine of ten held-out answers can be read, or when RL has something to work with"""
    lr: Weight = 3e-4
    """learning rate, which rises for ten steps and then falls to 0"""
    solution_tokens: Tokens = 128
    """length limit of a solution"""
    judgement_tokens: Tokens = 256
    """length limit of a judgement"""
    held_out: str | None = None
    """the --held-out of the run that follows"""
    seed: Whole = 0
    """random seed"""


class WarmUp(TrainerCallback):
    """Looks at the held-out questions, prints what it sees, and stops when the form is kept."""

    def __init__(self, args: Args, script, tokenizer, held_out: list[dict]):
        self.cfg, self.script, self.tokenizer = args, script, tokenizer
        self.held_out, self.started, self.begun = held_out, time.time(), []  # begun: steps

    def look(self, model, samples: int, again: int = 0) -> dict[str, float]:
        """Returns held-out figures, with the same random numbers every time, or with others if
        `again` is another number. The training has no random numbers that this could change.
        """
        model.eval()  # Trainer's next step puts it back
        write = functools.partial(self.write, model, again)
        return figures(self.script, self.held_out, samples, write)

    def write(self, model, again: int, prompts: list, judging: bool) -> tuple[list[str], float]:
        limit = self.cfg.judgement_tokens if judging else self.cfg.solution_tokens
        ends = [self.tokenizer.eos_token_id]
        ids, logps = [], []
        keys = [row_key(self.cfg.seed, again, judging, i) for i in range(len(prompts))]
        for part, its_keys in zip(chunk(tokenize(prompts, self.tokenizer), 64), chunk(keys, 64)):
            found = generate(model, part, limit, 1.0, ends, its_keys)
            ids, logps = ids + found[0], logps + sum(found[1], [])
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True), -mean(logps)

    def on_step_begin(self, args, state, control, **_):
        self.begun.append(time.time())

    def on_step_end(self, args, state, control, model=None, **_):
        if len(self.begun) == 1:
            minutes = (time.time() - self.begun[0]) / 60
            left = minutes * (state.max_steps - state.global_step)
            where = f"step {state.global_step}/{state.max_steps}: {minutes:.1f} min"
            say(f"{where}; {left:.0f} min more if all steps are needed")
        every, samples = LOOKS[self.cfg.until]
        if state.global_step % every:
            return
        # a single look at so few questions is ready by luck now and then
        for again in range(2 if self.cfg.until == "ready" else 1):
            found = self.look(model, samples, again)
            wanted = [k for k in found if k.endswith(" read") or self.cfg.until == "ready"]
            shares = ", ".join(f"{name} {found[name]:.2f}" for name in wanted)
            minutes = (time.time() - self.started) / 60
            say(f"step {state.global_step}/{state.max_steps}, {minutes:.0f} min: {shares}")
            if not is_enough(found, self.cfg.until):
                return
        control.should_training_stop = True


def is_enough(found: dict[str, float], until: str) -> bool:
    if until == "ready":
        return all(found[name] >= least for name, least in READY.items() if name in found)
    return min(share for name, share in found.items() if name.endswith(" read")) >= KEPT


def own_solutions(progress: WarmUp, model, rows: list[dict]) -> dict[str, list[str]]:
    """Returns question -> four solutions that the model writes, of OWN training questions."""
    rows = random.Random(progress.cfg.seed).sample(rows, min(OWN, len(rows)))
    say(f"answers to {len(rows)} training questions, 4 each, to be judged")
    prompts = [progress.script.solve_prompt(row["question"]) for row in rows for _ in range(4)]
    model.eval()
    texts, _ = progress.write(model, 0, prompts, False)
    return {row["question"]: four for row, four in zip(rows, chunk(texts, 4))}


def trainer_of(args: Args, model, rows: list[dict], progress: WarmUp) -> SFTTrainer:
    gpu = on_gpu(args.model)
    config = SFTConfig(
        args.out, max_steps=args.steps, per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=ROWS // MICRO, learning_rate=args.lr, warmup_steps=10,
        lr_scheduler_type="linear", max_length=None, gradient_checkpointing=False,
        train_sampling_strategy="sequential", seed=args.seed, save_steps=SAVES,
        save_total_limit=2, report_to="none", disable_tqdm=True, logging_strategy="no",
        bf16=gpu or torch.cpu._is_avx512_bf16_supported(), use_cpu=not gpu,
    )  # fmt: skip
    data, tokenizer = Dataset.from_list(rows), progress.tokenizer
    trainer = SFTTrainer(
        model, config, train_dataset=data, processing_class=tokenizer, callbacks=[progress]
    )
    trainer.create_model_card = lambda **_: None  # it would go where the user's own card may be
    return trainer


def main(args: Args):
    for field in dataclasses.fields(Args):
        check_number(field.name, getattr(args, field.name), field.type)
    file = Path(args.script).with_suffix(".py")
    script = importlib.import_module(file.stem) if file.is_file() else None
    if getattr(script, "solve_prompt", None) is not solve_prompt:
        reason = "asks for another form than steps and a boxed answer" if script else "is not there"
        raise UserError(f"{file.name}: {reason}; nothing can be taught.")
    check_machine(args.model)
    begin(args.model)
    disable_progress_bars()
    train, held_out = load_questions(args.dataset, 10**9, QUESTIONS, args.seed, args.held_out)
    demonstrations(script, train, 1, args.seed, {})  # says immediately what is missing
    given = {k: v for k, v in dataclasses.asdict(args).items() if k != "out"}
    with claim(args.out, "warm_up", given) as (out, checkpoint):
        teach(args, script, train, held_out, given, out, checkpoint)


def teach(
    args: Args, script, train: list[dict], held_out: list[dict], given: dict, out: Path,
    checkpoint: Path | None,
):  # fmt: skip
    """Warms up in the folder `out`, from the checkpoint if there is one.

    given: the arguments without --out.
    """
    # the figures may be of other arguments, of a warm-up that has left no checkpoint
    noted = (out / FIGURES).exists() and read_arguments(out) == given
    notes = read_arguments(out, FIGURES) if noted else {}
    write_whole(out / "args.json", json.dumps(given, indent=1) + "\n")

    def note(**more):
        notes.update(more)
        write_whole(out / FIGURES, json.dumps(notes, indent=1) + "\n")

    if "after" not in notes:
        model, tokenizer = load_model(args.model, ["warm_up"], 16, False, args.seed)
        progress = WarmUp(args, script, tokenizer, held_out)
        if "before" not in notes:
            say(f"answers to {len(held_out)} held-out questions, {SAMPLES} each, before training")
            note(before=progress.look(model, SAMPLES))
        if not (out / ANSWERS).exists() or not checkpoint:
            writes = notes["before"]["solutions read"] >= KEPT and judges(script)
            own = own_solutions(progress, model, train) if writes else {}
            write_whole(out / ANSWERS, json.dumps(own) + "\n")
        own = read_arguments(out, ANSWERS)
        rows = demonstrations(script, train, args.steps * ROWS, args.seed, own)
        trainer = trainer_of(args, model, rows, progress)
        if checkpoint and "steps" in notes:  # interrupted after training
            trainer._load_from_checkpoint(str(checkpoint))
        else:
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
            note(steps=trainer.state.global_step)
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.merge_adapter()  # it is looked at as it is saved
        after = progress.look(model, SAMPLES)
        model.unload().save_pretrained(out)
        tokenizer.save_pretrained(out)
        note(after=after)
    say(f"{out}: after {notes['steps']} steps, on {len(held_out)} held-out questions")
    for name, before in notes["before"].items():
        say(f"    {name:28} {before:6.3f} -> {notes['after'][name]:6.3f}")
    if not is_enough(notes["after"], args.until):
        least = f"{KEPT:.0%} can be read" if args.until == "read" else f"{READY}"
        say(f"warning: less than {least}; another folder and more --steps")


if __name__ == "__main__":
    with exit_with_one_sentence():
        main(tyro.cli(Args))
