"""What a run leaves behind, and what it shows while it lasts: `start_run`, `Run`, `plain_errors`.

    runs/tango-20260101-120000-0/
      args.json          every argument, filled in          metrics.jsonl   one line per step, one per evaluation
      tango.py           the script as it was               rollouts.jsonl  a few answers of every step, with their credit
      versions.json      libraries, device, git commit      report.html     all of it to look at, at every evaluation
      generator/ ...     the trained adapters, PEFT's way   curves.png      both players over time
                                                            checkpoint-N/   adapters, optimiser, RNG, memory

A run goes on where it stopped if its folder is given again with the same arguments (`--out FOLDER`).
"""

import atexit
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from common.data import UserError
from common.report import read_lines, write_report

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from tqdm import tqdm
from transformers import PrinterCallback, TrainerCallback

MAY_CHANGE = {"out", "save_every", "eval_every", "show_every", "report_to"}
"""Arguments that do not change what is computed (evaluation has random numbers of its own)."""


@contextmanager
def plain_errors():
    """What a user can put right ends in one sentence and exit code 2, not in a stack trace; processes part in order."""
    code = None
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2
    except SystemExit as ended:
        code = ended.code
    finally:
        several = torch.distributed.is_initialized()
        if several:  # left to the interpreter's end, gloo's threads abort one run in six
            torch.distributed.destroy_process_group()
    if several:  # what is left of torch's threads still aborts a run now and then, when all is written: not waited for
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    if code is not None:
        sys.exit(code)


def fill_in(args, small: dict, real: dict):
    """Arguments left at None take the value for the embedded model (`small`) or for a real one (`real`)."""
    small = {"micro_batch": 32, "rows_at_once": 256} | small
    real = {"micro_batch": 8, "rows_at_once": 64} | real  # by estimate, two players of 7B then fit a 24 GB card
    values = small if args.model == "tiny" else real
    return dataclasses.replace(args, **{k: v for k, v in values.items() if getattr(args, k) is None})


def this_process() -> PartialState:
    """Which process this is, under torchrun or accelerate launch; said before the trainer exists."""
    return PartialState(cpu=not torch.cuda.is_available())


def mean(values: list) -> float:
    return sum(values) / max(1, len(values))


def check_batch(questions: int, group_size: int, micro_batch: int):
    """What one step is made of, checked before anything is loaded."""
    if questions < 1 or micro_batch < 1:
        raise UserError(f"--questions {questions} and --micro-batch {micro_batch} must be at least 1.")
    if group_size < 2:
        raise UserError(f"--group-size {group_size}: rewards are compared within a group, so it must be at least 2.")
    if questions * group_size % micro_batch:
        raise UserError(
            f"--questions {questions} times --group-size {group_size} is not a multiple of --micro-batch {micro_batch}."
        )


def start_run(args, script: str, train: list, held_out: list) -> "Run":
    """Make (or find again) the run's folder, write down what will be run, and say what it is.

    Raises:
        UserError: the folder cannot be written; it holds a run with other arguments; its checkpoints are all cut short.
    """
    name = Path(script).stem
    for size in ("steps", "eval_questions", "save_every"):
        if getattr(args, size) < 1:
            raise UserError(f"--{size.replace('_', '-')} {getattr(args, size)} must be at least 1.")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    out = args.out or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}-{args.seed}"
    this_process()  # the first process's clock names the folder for all
    out = Path(broadcast_object_list([out])[0])
    checkpoint = None
    written = {k: v for k, v in dataclasses.asdict(args).items() if k != "out"}
    if this_process().is_main_process:
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / ".writable").touch()
            (out / ".writable").unlink()
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written ({error.strerror}).") from None
    this_process().wait_for_everyone()
    begun = [path for path in (out / "metrics.jsonl", *out.glob("checkpoint-*")) if path.exists() and path.stat().st_size]
    if begun and (out / "args.json").exists():  # a start that failed before the first step may be put right
        before = json.loads((out / "args.json").read_text())
        other = sorted(k for k in written.keys() | before.keys() if k not in MAY_CHANGE and written.get(k) != before.get(k))
        if other:
            was = ", ".join(f"--{k.replace('_', '-')} {before.get(k)}" for k in other)
            raise UserError(
                f"--out {out} holds a run with other arguments ({was}); repeat those, or choose another folder. "
                f"Schedules depend on --steps, so a run cannot be made longer."
            )
        checkpoint = last_checkpoint(out)
    this_process().wait_for_everyone()  # nobody may write before everybody has read
    if this_process().is_main_process:
        (out / "args.json").write_text(json.dumps(written, indent=1) + "\n")
        shutil.copy(script, out / Path(script).name)
        (out / "versions.json").write_text(json.dumps(versions(), indent=1) + "\n")
    run = Run(out, name, checkpoint)
    run.say(f"{name}.py, --model {args.model}, {len(train)} training and {len(held_out)} held-out questions, in {out}")
    if checkpoint:
        run.say(f"goes on from {checkpoint.name}")
    if args.model == "tiny" and args.dataset != "tiny":
        run.say("warning: the embedded model knows nothing but its own arithmetic; other questions need another --model")
    return run


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint: `memory.json` is what CoTrainer writes last. None if there was never one.

    A checkpoint that was cut short is passed over; UserError if there are only such ones."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]), reverse=True)
    for path in found:
        if (path / "memory.json").exists():
            return path
    if found:
        raise UserError(f"--out {folder}: {found[0].name} was cut short while being written; delete it to start again.")
    return None


def versions() -> dict:
    names = ["torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "datasets", "math-verify"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
        "processes": this_process().num_processes,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads",
        "commit": commit.stdout.strip() or None,
    }


class Run(TrainerCallback):
    """Logging, evaluation, samples, checkpoints on Ctrl-C: everything around the loop that is alike in all scripts."""

    def __init__(self, folder: Path, name: str, checkpoint: Path | None):
        self.folder, self.name, self.checkpoint = folder, name, checkpoint
        self.evaluations: list[dict] = []
        self.stop = False
        self.spent = 0.0  # seconds, before it was resumed
        self.main = this_process().is_main_process
        if self.main:
            self._forget_after(int(checkpoint.name.split("-")[1]) if checkpoint else -1)

    def train(self, trainer, evaluate, args, curves: dict[str, list[str]]):
        """Train to the end or to Ctrl-C. `evaluate() -> dict` is called at step 0, every `eval_every` steps, and at the end.

        curves: title of a panel of curves.png -> metrics in it; the first one of each is on the progress line, too."""
        self.trainer, self.evaluate, self.args, self.curves = trainer, evaluate, args, curves
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)
        signal.signal(signal.SIGINT, self._interrupted)
        if len(trainer._get_train_sampler()) == 0:  # Trainer would end at once and call it a success
            rows = f"{len(trainer.train_dataset)} training questions"
            raise UserError(f"--dataset {args.dataset}: {rows} are too few for one step, see --questions {args.questions}.")
        self.started = time.time() - self.spent
        if self.checkpoint and self.checkpoint.name == f"checkpoint-{args.steps}":
            self.say(f"this run is finished: {args.steps} steps")  # Trainer would do one more
            trainer._load_from_checkpoint(self.checkpoint)
        else:
            trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        if self.main:
            write_report(self.folder)
        if self.stop:
            self.say(f"stopped at step {trainer.state.global_step}; go on with the same command and --out {self.folder}")
            sys.exit(130)
        if self.main:
            trainer.model.save_pretrained(self.folder)
            (self.folder / "README.md").unlink(missing_ok=True)  # PEFT's form to fill in
            self.draw()
            self.table()

    # ------------------------------------------------------------------ Trainer's events
    def on_train_begin(self, args, state, control, **_):
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, disable=not self.main or not sys.stderr.isatty())
        self.since = time.time()
        self.first = state.global_step
        if state.global_step == 0:
            self._evaluate(0)

    def on_log(self, args, state, control, logs=None, **_):
        """After every step's line, on all processes: the sample and the evaluation that are due."""
        if "train_runtime" in logs:
            return
        step = state.global_step
        if self.main:
            self._step_line(state, logs)
            if self.args.show_every and step % self.args.show_every == 0:
                self.say(self.trainer.example)
        if step == state.max_steps or (self.args.eval_every and step % self.args.eval_every == 0):
            self._evaluate(step)

    def on_step_end(self, args, state, control, **_):
        self.bar.update()
        self.stop = any(gather_object([self.stop]))  # all processes stop after the same step
        if self.stop or state.global_step == state.max_steps:
            control.should_save = True
            control.should_training_stop = True
        return control

    # ------------------------------------------------------------------ output
    def _step_line(self, state, logs):
        step = state.global_step
        self._write({"step": step, "seconds": round(time.time() - self.started, 2), **logs})
        done, left = state.global_step - self.first, state.max_steps - state.global_step
        eta = (time.time() - self.since) / max(1, done) * left
        shown = "  ".join(f"{key} {logs[key]:.3f}" for key in [keys[0] for keys in self.curves.values()] if key in logs)
        self.say(f"step {step}/{state.max_steps}  {self.trainer.player[:3]}  {shown}  eta {eta // 60:.0f}:{eta % 60:02.0f}")

    def say(self, text: str):
        if self.main:
            tqdm.write(text)
            sys.stdout.flush()

    def table(self):
        """First and last evaluation side by side."""
        first, last = self.evaluations[0], self.evaluations[-1]
        self.say(f"\n{'held-out questions':<34}{'step 0':>10}{'step ' + str(last['step']):>12}{'change':>10}")
        for key in [k for k in last if k.startswith("eval/")]:
            if key in first:
                self.say(f"{key[5:]:<34}{first[key]:>10.3f}{last[key]:>12.3f}{last[key] - first[key]:>+10.3f}")
            else:  # a share of something that there was none of
                self.say(f"{key[5:]:<34}{'-':>10}{last[key]:>12.3f}{'':>10}")
        self.say(f"\n{time.time() - self.started:.0f} s; everything is in {self.folder}, to look at: report.html")

    def draw(self):
        """curves.png: one panel per entry of `curves`, training values as lines, evaluations as dots."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        figure, axes = pyplot.subplots(1, len(self.curves), figsize=(4.2 * len(self.curves), 3.4), squeeze=False)
        for axis, (title, keys) in zip(axes[0], self.curves.items()):
            for color, key in enumerate(keys):
                points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
                if points:
                    axis.plot(*zip(*points), color=f"C{color}", alpha=0.6, linewidth=1, label=key)
                held_out = [(row["step"], row[f"eval/{key}"]) for row in rows if row.get(f"eval/{key}") is not None]
                if held_out:
                    axis.plot(*zip(*held_out), color=f"C{color}", marker="o", linestyle="--", label=None if points else key)
            axis.set(title=title, xlabel="optimiser step (lines: training batches, dots: held out)")
            axis.grid(alpha=0.25)
            if axis.lines:
                axis.legend(fontsize=7, framealpha=0.6)
        figure.tight_layout()
        figure.savefig(self.folder / "curves.png", dpi=110)
        pyplot.close(figure)

    # ------------------------------------------------------------------ small things
    def _evaluate(self, step: int):
        """With random numbers of its own, so that a run with more evaluations is still the same run."""
        start = time.time()
        cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(1_000_003 + this_process().process_index)
            result = {f"eval/{key}": value for key, value in self.evaluate().items()}
        self.evaluations.append({"step": step, **result})
        self.since += time.time() - start  # the ETA speaks of training
        if self.main:
            self._write({"step": step, "seconds": round(time.time() - self.started, 2), **result})
            shown = "  ".join(f"{key[5:]} {value:.3f}" for key, value in result.items())
            self.say(f"step {step}  held out:  {shown}  ({time.time() - start:.0f} s)")
            write_report(self.folder)

    def _write(self, row: dict):
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def _forget_after(self, step: int):
        """On resuming, what came after the checkpoint will be written again; a line cut short is dropped."""
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            path = self.folder / name
            rows = [row for row in read_lines(path)[0] if row["step"] <= step]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            if name == "metrics.jsonl" and rows:
                self.spent = rows[-1]["seconds"]
                self.evaluations = [row for row in rows if any(key.startswith("eval/") for key in row)]

    def _interrupted(self, *_):
        if self.stop:  # the second time: at once
            raise KeyboardInterrupt
        self.stop = True
        self.say("\nstopping after this step, with a checkpoint (Ctrl-C again to stop at once)")
