"""The arguments that all scripts share. To import torch and TRL takes ten seconds, and nothing here
imports them. A script calls `parse(Args)` above its imports of them, so `--help` and a typo are
answered immediately.

A script's `Args` inherits `RunArgs` and adds the paper's arguments. Its `check` refuses arguments
that do not go together. If another default fits a paper better, the script declares the field of
`RunArgs` again. The type of a field says its bounds: `steps: Count`, `alpha: Share`.
"""

import math
import os
import sys
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, get_type_hints

from common.core.errors import NOBODY, UserError, visible
from common.tiny import MODELS, TINY
from common.tiny.tasks import LEVELS

import tyro
from tyro.constructors import PrimitiveConstructorSpec


# ------------------------------------------------------------------ types with bounds
class PerModel(NamedTuple):
    """A default that depends on the model. `RunArgs` replaces it by a number."""

    tiny: float
    real: float

    def __str__(self):  # what --help shows
        return f"{self.tiny} small model, {self.real} real"


def per_model(tiny, real) -> PerModel:
    """Returns a default: `tiny` with a small model, `real` with any other model."""
    return PerModel(tiny, real)


class Bounds(NamedTuple):
    """The least and the most value of a number; both are allowed."""

    least: float = -math.inf
    most: float = math.inf


def number(kind: type, metavar: str, wanted: str):
    """Returns the type of a number, for tyro, whose own error would quote Python. A PerModel can
    only be its default: no word is read as one.
    """

    def read(words: list[str]):
        try:
            return kind(words[0])
        except ValueError:
            raise ValueError(f"{words[0]} is {wanted}") from None

    fits = lambda value: isinstance(value, int | float | PerModel)  # noqa: E731
    shown = lambda value: str(value).split()  # noqa: E731
    return Annotated[kind | PerModel, PrimitiveConstructorSpec(1, metavar, read, fits, shown)]


Whole = number(int, "INT", "no whole number in digits, such as 1000")
Real = number(float, "FLOAT", "no number, such as 1e-3")
Count = Annotated[Whole, Bounds(1, 1_000_000)]
Several = Annotated[Whole, Bounds(1, 10_000)]  # samples of a question, solution or step
TwoOrMore = Annotated[Whole, Bounds(2, 10_000)]  # samples that are compared
Tokens = Annotated[Whole, Bounds(1)]
CountOrZero = Annotated[Whole, Bounds(0)]  # 0 switches something off
Share = Annotated[Real, Bounds(0, 1)]
Weight = Annotated[Real, Bounds(0)]
Scale = Annotated[Real, Bounds(1e-6)]  # of log-ratios: at 0 a loss has no gradient
GroupSize = Annotated[Whole, Bounds(2, 100_000)]  # rewards are compared within a group
Seconds = Annotated[Real, Bounds(0.001, 3600)]


# ------------------------------------------------------------------ the arguments
@dataclass
class RunArgs:
    model: str = "tiny"
    """tiny (the small model), a hub id or a folder"""
    dataset: str = "tiny"
    """tiny, tiny-hard or tiny-long (questions for the small model), a hub id
    (openai/gsm8k), or a .jsonl file with question and answer"""
    held_out: str | None = None
    """a .jsonl file whose rows are held out; by default the data set's own test or validation
    split is held out, or a tenth of its questions"""
    out: str | None = None
    """run folder, by default runs/SCRIPT-TIME-SEED; if you give it again, the run resumes where it
    stopped"""
    seed: Annotated[Whole, Bounds(0, 2**32 - 1)] = 0  # numpy's
    """random seed"""
    micro_batch: Count = per_model(tiny=32, real=8)
    """rows per forward and backward pass"""
    lora_rank: Annotated[Whole, Bounds(1, 4096)] = 16
    """rank of each LoRA adapter"""
    four_bit: tyro.conf.DisallowNone[bool | None] = None  # a flag; memory.py replaces None
    """load the base in 4-bit NF4; by default only if a run would not fit the GPU otherwise, and
    never with --rollouts"""
    generation_batch_size: Count | None = None
    """largest number of rows that are sampled together, which bounds the KV cache; by default as
    many as fit, at most 256"""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """recompute activations in the backward pass, which takes less memory and a third more work;
    auto does so only if they do not fit"""
    plain: bool = False
    """sample and score by transformers, PEFT and autograd alone. It is slower and gives the same
    numbers except for rounding; it shows whether a fast path is at fault"""
    rollouts: str | None = None
    """URL of a vLLM server that samples in place of this process; docs/real-models.md has its
    command"""
    vllm_importance_sampling_clip_max: Scale | None = None
    """with --rollouts, and named as in TRL: weight each token by min(p_trainer / p_server, this);
    take 2 if co/sampler_gap is more than rounding"""
    dry_run: bool = False
    """print how much memory this needs, load nothing, and end"""
    eval_every: CountOrZero = 16
    """steps between evaluations on held-out questions; 0 evaluates only before and after training
    """
    eval_questions: Count = per_model(tiny=256, real=128)
    """held-out questions"""
    eval_samples: Several = 4
    """completions per held-out question, of which accuracy is the mean"""
    save_every: Count = 20
    """steps between checkpoints"""
    show_every: CountOrZero = 20
    """steps between samples that are printed; 0 prints none"""
    report_to: str = "none"
    """any tracker that transformers knows: trackio, wandb, tensorboard"""

    def __post_init__(self):
        """Replaces every `per_model` default by its value for this model, and checks all arguments.

        Raises:
            UserError: a number is out of its bounds, a tracker is not there, the small model is one
                of other scripts, or the script's own `check` refuses something.
        """
        own = type(self).model
        if self.model in MODELS and own in MODELS and self.model != own:
            raise UserError(
                f"--model {self.model}: this small model has learnt nothing that this script "
                f"asks of it; take --model {own}."
            )
        if self.model in LEVELS and self.model not in MODELS:
            raise UserError(f"--model {self.model}: that is a data set, --dataset {self.model}.")
        if self.held_out and self.dataset in LEVELS:
            raise UserError(
                f"--held-out {self.held_out}: the small model's questions, --dataset "
                f"{self.dataset}, have a held-out part of their own."
            )
        check_path(f"--model {self.model}", self.model)
        check_path(f"--out {self.out}", self.out or "")
        check_path(f"the small models' folder {TINY.parent}", str(TINY.parent))
        for name, value in vars(self).items():
            if isinstance(value, PerModel):
                vars(self)[name] = value.tiny if self.model in MODELS else value.real
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            check_number(name, getattr(self, name), kind)
        if self.report_to not in ("none", "all"):
            check_tracker(self.report_to)
        self.check_rollouts()
        self.check()

    def check_rollouts(self):
        """Raises UserError for arguments that do not go with --rollouts."""
        if self.rollouts is None:
            if self.vllm_importance_sampling_clip_max:
                raise UserError("--vllm-importance-sampling-clip-max needs --rollouts.")
            return
        self.rollouts = self.rollouts.rstrip("/").removesuffix("/v1")
        if self.plain:
            raise UserError("--rollouts with --plain: only one of them can sample.")
        if self.four_bit:
            raise UserError(
                "--rollouts with --four-bit: the server has its base in 16 bits, this process in "
                "4, and these are two models; leave out --four-bit."
            )

    def check(self):
        """A SCRIPT MAY WRITE THIS. Raises UserError for arguments that do not go together."""


def parse(kind: type[RunArgs]) -> RunArgs:
    """Returns the command line as the script's own `Args`. With --help the process ends here. If an
    argument is wrong, it ends here with exit code 2 and one sentence.
    """
    # a stream that the shell has closed is None
    sys.stdout, sys.stderr = sys.stdout or NOBODY, sys.stderr or NOBODY
    try:
        try:
            return tyro.cli(kind)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `--help | head` has seen enough
        sys.stdout = NOBODY
        sys.exit()
    except UserError as error:
        print(f"error: {visible(str(error))}", file=sys.stderr, flush=True)
        sys.exit(2)


def check_number(name: str, value, kind):
    """Raises UserError unless a number is finite and within the bounds of its type, `kind`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    options = [kind, *getattr(kind, "__args__", ())]  # Count | None
    found = [b for k in options for b in getattr(k, "__metadata__", ()) if isinstance(b, Bounds)]
    least, most = found[0] if found else Bounds()
    if not math.isfinite(value):
        wanted = "finite"
    elif value < least:
        wanted = f"at least {least:g}"
    elif value > most:
        wanted = f"at most {most:,}"
    else:
        return
    raise UserError(f"--{name.replace('_', '-')} {value} must be {wanted}.")


def check_path(what: str, path: str):
    """Raises UserError unless a path is the same bytes in this locale and in UTF-8. tokenizers and
    safetensors know paths in UTF-8 only, and would not find the folder.
    """
    try:
        if os.fsencode(path) == path.encode():
            return
    except UnicodeEncodeError:  # a byte that is no character here, such as \udcc3
        pass
    raise UserError(
        f"{what}: its name is not UTF-8 in this locale, as libraries need it; put PYTHONUTF8=1 in "
        f"front of the command, or rename it."
    )


def check_tracker(name: str):
    """Raises UserError unless transformers can report to it."""
    from transformers.integrations import get_available_reporting_integrations  # and torch

    trackers = ["none", "all", *get_available_reporting_integrations()]
    if name not in trackers:
        raise UserError(
            f"--report-to {name}: there is no such tracker, or it is not installed; it can be "
            f"{', '.join(trackers)}."
        )
