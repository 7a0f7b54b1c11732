"""What a run writes into its folder, and what it prints while it lasts.

    runs/tango-20260101-120000-0/
        args.json         every argument, filled in
        tango.py          the script as it was
        about.json        its name, docstring and CURVES
        versions.json     libraries, device, git commit, a checksum of the questions
        metrics.jsonl     one line per step, one per evaluation
        rollouts.jsonl    a few completions of every step, each token with its advantage
        report.html       a page that shows all of it, made at every evaluation
        README.md         a model card, for the Hub
        generator/ ...    the trained adapters, as PEFT saves them
        checkpoint-N/     adapters, optimiser, random numbers, what the script keeps

A run that gets its folder (`--out FOLDER`) and the same arguments again resumes where it stopped.
"""

import atexit
import dataclasses
import difflib
import errno
import importlib.metadata
import inspect
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
import zlib
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from common.core.errors import ScriptError, UserError, say, visible
from common.run.folder import claim, forget_older, resume, write_whole
from common.run.machine import on_gpu
from common.run.report.build import write_report
from common.run.report.health import is_evaluation, main_metrics
from common.run.report.recording import read_lines

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from transformers import PrinterCallback, TrainerCallback


# ------------------------------------------------------------------ around everything
@contextmanager
def exit_with_one_sentence():
    """Stands around a script's `main`. An error that the user can put right ends in one sentence
    and exit code 2, and not in a stack trace. Several processes leave their group together.
    """
    code = None
    # a stream that the shell has closed is None
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)  # until training has a handler of its own
    try:
        yield
    except KeyboardInterrupt as error:  # before training, or for the second time
        code = 143 if error.args else 130
        ended = ["terminated." if error.args else "interrupted.", *_notes(error)]
        if len(ended) == 1 and os.environ.get("RANK", "0") == "0":  # the others have no folder
            ended.append("The run has not begun; nothing has changed.")
        print(*ended, file=sys.stderr, flush=True)
    except SystemExit as ended:
        code = ended.code
    except Exception as error:
        said, code = _sentence(error), 2
        if not said:
            raise
        said = " ".join([said, *_notes(error)])
        print(f"error: {visible(said)}", file=sys.stderr, flush=True)
    finally:
        several = torch.distributed.is_initialized()
        if several:  # left to the interpreter's end, gloo's threads abort one run in six
            torch.distributed.destroy_process_group()
    if several:  # torch's threads still abort a run now and then when all is written: no waiting
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    if code is not None:
        sys.exit(code)


def _sentence(error: Exception) -> str:
    """Returns the sentence for an error that a user can put right, and "" for any other error."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ScriptError):
        return f"{_line_of_the_script(error)}{error}."
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # torch and safetensors say in words of their own that a file could not be written
    if full or re.search(r"\(os error 2[78]\)|inline_container\.cc", str(error)):
        return f"a file could not be written: {error}."
    return ""


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])  # see common/run/folder.py


def _line_of_the_script(error: ScriptError) -> str:
    """Returns the place of an error, such as `fork.py, line 120 (self.update(batch)): `, or "" if
    no line of the script led to it.
    """
    libraries = (str(Path(__file__).parent.parent), sys.prefix, sys.base_prefix)
    frames = traceback.extract_tb(error.__traceback__)
    names = [frame.name for frame in frames]
    below = names.index("main") + 1 if "main" in names else 0  # what `main` has called
    frames = [frame for frame in frames[below:] if not frame.filename.startswith(libraries)]
    if not frames:
        return ""
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno} ({frames[-1].line}): "


def _terminated(*_):
    raise KeyboardInterrupt("terminated")


def begin(model: str) -> PartialState:
    """Returns which process this is, under torchrun or accelerate launch, and on which device it
    computes. It is called once, before anything asks for `PartialState()`.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # NCCL would give up after ten minutes, and evaluations of two processes may differ by more
    return PartialState(cpu=not on_gpu(model), timeout=timedelta(hours=2))


# ------------------------------------------------------------------ the run's folder
@contextmanager
def start_run(args, script: str, train: list, held_out: list):
    """Makes the run's folder, or finds it again, writes down what is going to run, and yields the
    `Run`. The folder is locked until the block ends. If the script has changed since the run began,
    the folder keeps both: the name of the new script says from which checkpoint it resumes.

    Args:
        args: the script's arguments.
        script: its path.
        train, held_out: the rows of the data set.

    Raises:
        UserError: see `folder.claim`; all processes raise it.
    """
    name = Path(script).stem
    given = {k: v for k, v in dataclasses.asdict(args).items() if k != "out"}
    found, problem = None, None
    main = PartialState().is_main_process
    with ExitStack() as block:
        if main:
            try:
                found = (*block.enter_context(claim(args.out, name, given)), [])
                now = versions(args.model) | {"questions": checksum([train, held_out])}
                if found[1]:
                    found[2].extend(what_differs(found[0], now, args.dataset))
            except UserError as error:
                problem = error
        found, problem = broadcast_object_list([found, problem])
        if problem:
            raise problem
        folder, checkpoint, said = found
        if main:
            write_whole(folder / "args.json", json.dumps(given, indent=1) + "\n")
            copy, code = folder / f"{name}.py", Path(script).read_bytes()
            if checkpoint and copy.exists() and copy.read_bytes() != code:
                copy = folder / f"{name}-from-{checkpoint.name}.py"
                said.append(f"note: {name}.py has changed since this run began; it is now {copy}")
            copy.write_bytes(code)
            (folder / "versions.json").write_text(json.dumps(now, indent=1) + "\n")
        questions = f"{len(train)} training and {len(held_out)} held-out questions"
        say(f"{name}.py, --model {args.model}, {questions}, in {folder}")
        for line in said:
            say(line)
        if checkpoint:
            say(f"resumes from {checkpoint.name}")
        yield Run(folder, name, checkpoint, args)


def what_differs(folder: Path, now: dict, dataset: str) -> list[str]:
    """Returns notes for the user about a run that resumes: which versions differ.

    now: what will be its versions.json.

    Raises:
        UserError: the run had another number of processes, or other questions. Random numbers, the
            place in the data and the script's state belong to a number of processes. With other
            questions, some that the run was trained on could now be held out.
    """
    try:
        before = json.loads((folder / "versions.json").read_text())
        other = {key: before[key] for key in now.keys() & before.keys() if before[key] != now[key]}
    except (OSError, ValueError, AttributeError):
        return []
    if count := other.get("processes"):
        raise UserError(
            f"--out {folder}: its run has {count} process{'es' * (count != 1)}, this one "
            f"{now['processes']}; resume it with as many, or choose another folder."
        )
    if "questions" in other:
        raise UserError(
            f"--dataset {dataset}: its questions are not those of the run in --out {folder}; bring "
            f"them back, or choose another folder."
        )
    had = ", ".join(f"{key} {value}" for key, value in sorted(other.items()))
    return [f"note: until now this run had {had}; it may not resume bit for bit"] if had else []


def checksum(rows: list) -> int:
    return zlib.crc32(json.dumps(rows, skipkeys=True, default=lambda x: type(x).__name__).encode())


def versions(model: str) -> dict:
    # the commit, with "-dirty" at its end if files have changed since
    command, commit = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], ""
    with suppress(OSError):  # a machine need not have git
        here = Path(__file__).parent
        commit = subprocess.run(command, capture_output=True, text=True, cwd=here).stdout.strip()
    libraries = "torch transformers trl peft accelerate bitsandbytes datasets math-verify".split()
    threads = torch.get_num_threads()
    cpu = f"CPU, {threads} thread{'s' * (threads > 1)}"
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in libraries},
        "processes": PartialState().num_processes,
        "device": torch.cuda.get_device_name() if on_gpu(model) else cpu,
        "commit": commit or None,
    }


# ------------------------------------------------------------------ what a run shows
class Run(TrainerCallback):
    """What every script has around its loop: printed lines, evaluations, samples, Ctrl-C."""

    def __init__(self, folder: Path, name: str, checkpoint: Path | None, args):
        self.folder, self.name, self.checkpoint, self.args = folder, name, checkpoint, args
        self.main, self.processes = PartialState().is_main_process, PartialState().num_processes
        self.stop, self.asked = 0, 0.0  # the signal that asked for it, and when
        self.first, self.since = 0, 0.0  # step and time at which this process began, for the ETA
        rows = self._rows("metrics.jsonl")
        self.evaluations = [row for row in rows if is_evaluation(row)]
        self.started = time.time() - (rows[-1].get("seconds") or 0.0 if rows else 0.0)

    def train(self, trainer, evaluate, curves: dict[str, list[str]]):
        """Trains to the end or to Ctrl-C; `launch` explains the arguments."""
        self.trainer, self.evaluate, self.curves = trainer, evaluate, curves
        if self.main:  # for the report, which is first written at the evaluation before step 1
            about = inspect.getmodule(type(trainer)).__doc__ or ""
            about = {"script": self.name, "about": about, "curves": curves}
            write_whole(self.folder / "about.json", json.dumps(about, indent=1) + "\n")
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)
        trainer.evaluate = self._evaluate  # Trainer calls it after a step's line, if it is due
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(sign) is not signal.SIG_IGN:  # nohup
                signal.signal(sign, self._interrupted)
        self._check_questions()
        if self.checkpoint and self.checkpoint.name == f"checkpoint-{self.args.steps}":
            say(f"this run is finished: {self.args.steps} steps")  # Trainer would do one more
            trainer._load_from_checkpoint(self.checkpoint)
            trainer.state.global_step = self.args.steps
            if not self.evaluations:  # metrics.jsonl is gone
                self._evaluate()
        else:
            self._train_to_the_end()
        self._finish()

    def _train_to_the_end(self):
        try:
            self.trainer.train(resume_from_checkpoint=self.checkpoint and str(self.checkpoint))
        except RuntimeError as error:
            # in a CUDA graph torch raises another error while it handles this error
            if not any(isinstance(e, torch.OutOfMemoryError) for e in (error, error.__context__)):
                raise
            args, step = self.args, self.trainer.state.global_step
            raise UserError(
                f"the GPU's memory is full at step {step}: {resume(self.folder)}, and with "
                f"--gradient-checkpointing on, or a lower --generation-batch-size "
                f"{args.generation_batch_size} or --micro-batch {args.micro_batch}."
            ) from None

    def _check_questions(self):
        """Raises UserError if the questions are too few for a step; notes if they come again."""
        dataset, questions = f"--dataset {self.args.dataset}", len(self.trainer.train_dataset)
        rows = self.trainer.args.generation_batch_size  # of a step, on all processes
        steps = questions * self.trainer.num_generations // rows
        if not steps:  # Trainer would end, and call it a success
            raise UserError(
                f"{dataset}: {questions} training questions are too few for one step, see "
                f"--questions {self.args.questions}."
            )
        own = self.trainer.train_dataset.column_names != ["prompt"]  # else `step` does not use them
        if own and steps < self.args.steps:
            after = f"after {steps} step{'s' * (steps > 1)} its {questions} questions come again"
            say(f"note: {dataset}: {after}")

    def _finish(self):
        trainer = self.trainer
        if self.main:
            write_report(self.folder)
        if self.stop and trainer.state.global_step < self.args.steps:  # else nothing is left to do
            say(f"stopped at step {trainer.state.global_step}; {resume(self.folder)}")
            sys.exit(128 + self.stop)
        if self.main:
            self._save_adapters()
            self.table()
            self._note_untrained()

    def _save_adapters(self):
        """Saves the adapters, and PEFT's model card with the script and the held-out figures."""
        card, model = self.folder / "README.md", self.trainer.model
        if card.exists():  # the user may have written it
            model.create_or_update_model_card = lambda _: None
            model.save_pretrained(self.folder)
            return
        model.save_pretrained(self.folder)
        first, last = self.evaluations[0], self.evaluations[-1]
        figures = []
        for key in [k for k in last if k.startswith("eval/")]:
            before = f"{first[key]:.3f}" if key in first else "-"
            figures.append(f"{key[5:]} {before} -> {last[key]:.3f}")
        with open(card, "a") as file:
            file.write(f"\n\nTrained by `{self.name}.py` in {last['step']} steps.\n")
            file.write(f"Held out, before and after: {', '.join(figures)}.\n")

    def _note_untrained(self):
        """Notes which players no step has trained."""
        rows, _ = read_lines(self.folder / "metrics.jsonl")
        known, players = {key for row in rows for key in row}, self.trainer.players.items()
        trained = {p.adapter for n, p in players if {f"{n}/loss", f"{p.adapter}/loss"} & known}
        for adapter in sorted({p.adapter for _, p in players if p.lr > 0} - trained):
            say(f"note: the {adapter} was never trained in this run")

    def _note_misspelt(self, logs: dict):
        """Notes which names in CURVES no metric has, if a metric has nearly that name."""
        names = {name for names in self.curves.values() for name in names}
        evaluated = {key.removeprefix("eval/") for row in self.evaluations for key in row}
        known = evaluated | logs.keys()
        for name in sorted(names - known):
            for near in difflib.get_close_matches(name, sorted(known - names), 1, 0.9):
                say(f"note: CURVES names {name}, which nothing has logged so far; is it {near}?")

    # ------------------------------------------------------------------ Trainer's events
    def on_train_begin(self, args, state, control, **_):
        self.first, self.since = state.global_step, time.time()
        for name in ("metrics.jsonl", "rollouts.jsonl") if self.main else ():
            # not before: by now the checkpoint has been loaded
            rows = self._rows(name)
            write_whole(self.folder / name, "".join(json.dumps(row) + "\n" for row in rows))
        if state.global_step == 0:
            self._evaluate()

    def on_step_end(self, args, state, control, **_):
        step, last = state.global_step, state.global_step == state.max_steps
        due = self.args.eval_every and step % self.args.eval_every == 0
        control.should_evaluate = bool(last or due)
        self.stop = max(gather_object([self.stop]))  # all processes stop after the same step
        if self.stop or last:
            control.should_save = True
            control.should_training_stop = True

    def on_save(self, args, state, control, **_):
        if self.main:
            forget_older(self.folder, state.global_step)

    def on_log(self, args, state, control, logs=None, **_):
        """Writes and prints the step's line, and prints the samples that are due."""
        if not self.main or "train_runtime" in logs or any(key.startswith("eval_") for key in logs):
            return
        step, steps = state.global_step, state.max_steps
        self._write(step, logs)
        if step == self.first + 1:
            self._note_misspelt(logs)
        eta = (time.time() - self.since) / max(1, step - self.first) * (steps - step)
        keys = [keys[0] for keys in self.curves.values()]
        shown = "  ".join(f"{key} {logs[key]:.3f}" for key in keys if logs.get(key) is not None)
        line = f"step {step}/{steps}  {self.trainer.trained_last}  {shown}"
        say(f"{line}  eta {eta // 60:.0f}:{eta % 60:02.0f}")
        if self.args.show_every and step % self.args.show_every == 0:
            self._show(step)

    # ------------------------------------------------------------------ output
    def _show(self, step: int):
        """Prints what each player was asked and has written, as recorded of this step."""
        rows = [row for row in read_lines(self.folder / "rollouts.jsonl")[0] if row["step"] == step]
        for row in {row["player"]: row for row in reversed(rows)}.values():
            rewards = ", ".join(f"{name} {r:.2f}" for name, r in row["rewards"].items())
            say(f"--- {row['prompt']}\n--- {row['player']}\n{''.join(row['tokens'])}")
            say(f"--- judgement\n{row['judgement']}" if "judgement" in row else f"--- {rewards}")

    def table(self):
        """Prints the first and the last evaluation."""
        first, last = self.evaluations[0], self.evaluations[-1]
        step = f"step {last['step']}"
        say(f"\n{'held-out questions':<34}{'step 0':>10}{step:>12}{'change':>10}")
        for key in [k for k in last if k.startswith("eval/")]:
            if key in first:
                values = f"{first[key]:>10.3f}{last[key]:>12.3f}{last[key] - first[key]:>+10.3f}"
            else:  # at step 0 there was nothing to take a share of
                values = f"{'-':>10}{last[key]:>12.3f}"
            say(f"{key[5:]:<34}{values}")
        seconds = f"{time.time() - self.started:.0f} s"
        say(f"\n{seconds}; everything is in {self.folder}, to look at: report.html")
        say(f"python -m common.run.report {self.folder} OTHER compares it with another run")

    def _evaluate(self, ignore_keys=None):
        """Evaluates, and writes and prints the figures. ignore_keys is Trainer's and not used."""
        start, step, trainer = time.time(), self.trainer.state.global_step, self.trainer
        trainer.control.should_evaluate = False  # or Trainer does it again where its data end
        found = trainer.run_evaluation(self.evaluate)
        result = {f"eval/{key}": value for key, value in found.items()}
        self.evaluations.append({"step": step, **result})
        # trackers put names that begin with eval_ under eval/, and all others under train/
        logs = {f"eval_{key}": value for key, value in found.items()}
        trainer.callback_handler.on_log(trainer.args, trainer.state, trainer.control, logs)
        trainer.control.should_evaluate = False  # Trainer asks again when it leaves its loop
        self.since += time.time() - start  # the ETA speaks of training
        if self.main:
            self._write(step, result)
            main = main_metrics(self.curves, found)  # the table at the end has all
            shown = "  ".join(f"{key} {found[key]:.3f}" for key in main)
            say(f"step {step}  held out:  {shown}  ({time.time() - start:.0f} s)")
            write_report(self.folder)
        return logs

    def _write(self, step: int, metrics: dict):
        row = {"step": step, "seconds": round(time.time() - self.started, 2), **metrics}
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def _rows(self, name: str) -> list[dict]:
        """Returns the lines of a file up to the checkpoint. Later steps are done again."""
        step = int(self.checkpoint.name.split("-")[1]) if self.checkpoint else -1
        return [row for row in read_lines(self.folder / name)[0] if row["step"] <= step]

    def _interrupted(self, sign, _):
        if self.stop and time.time() - self.asked > 1:  # torchrun hands on what the terminal sent
            raise KeyboardInterrupt  # the second Ctrl-C stops immediately
        self.stop, self.asked = sign, time.time()
        said = b"\nstopping after this step, with a checkpoint (Ctrl-C again: at once)\n"
        if self.main:
            with suppress(BrokenPipeError):  # `| tee`, say, which the same Ctrl-C has ended
                os.write(1, said)  # not `print`, in which the signal may have come
