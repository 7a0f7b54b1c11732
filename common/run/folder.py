"""A run's folder: whose it is, who writes in it, and from which checkpoint a run resumes.

    with claim(args.out, "tango", arguments) as (folder, checkpoint):
        ...

A folder is ours if it is new, empty, or holds a run of the same script. In any other folder nothing
is touched. A lock keeps a second run out. The system lifts the lock when the run's process ends,
however it ends.
"""

import itertools
import json
import shutil
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from common.core.errors import ScriptError, UserError
from common.run.report.recording import read_lines

from filelock import FileLock, Timeout

MAY_CHANGE = {*"out save_every eval_every show_every report_to generation_batch_size".split()}
MAY_CHANGE |= {"micro_batch", "gradient_checkpointing", "plain", "rollouts"}
"""Arguments that a resumed run may change, because they do not change what is trained, except for
the rounding of sums. An evaluation has random numbers of its own, and the random number of a token
depends on none of these arguments (common/core/draws.py).
"""


@contextmanager
def claim(out: str | None, name: str, given: dict):
    """Makes the run's folder, or finds it again, and locks it until the block ends. Writes nothing
    else. An error that leaves the block says how the run can go on.

    Args:
        out: --out; None makes a new folder in runs/.
        name: the script's name, without .py.
        given: its arguments.

    Yields:
        (the folder, the checkpoint from which the run resumes, or None).

    Raises:
        UserError: the folder cannot be written, or is somebody else's or in use; or it holds a run
            that has other arguments or cannot resume.
    """
    if out == "":  # Path would take it for the working directory
        raise UserError("--out is empty; it must name a folder.")
    try:
        folder = new_folder(name, given["seed"]) if out is None else Path(out)
        ours = is_ours(folder, name, given)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"--out {folder}: another run writes there.") from None
    except OSError as error:
        place = out or "runs"
        raise UserError(f"--out {place}: cannot be written ({error.strerror}).") from None
    try:
        yield folder, checkpoint_to_resume(folder, given) if ours else None
    except (Exception, KeyboardInterrupt) as error:
        add_how_to_go_on(error, folder)
        raise
    finally:
        lock.release()


def new_folder(name: str, seed: int) -> Path:
    """Makes a new folder in runs/ and returns it. Two runs that start in one second get two."""
    base = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}-{seed}"
    Path("runs").mkdir(exist_ok=True)
    for n in itertools.count(1):
        folder = Path(base if n == 1 else f"{base}-{n}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder


def is_ours(folder: Path, name: str, given: dict) -> bool:
    """Whether the folder holds a run of this script. If it is False, the folder is new or empty.

    Raises:
        UserError: the folder holds anything else.
    """
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if found <= {".lock", ".args.json.new"}:  # all that a start on a full disk has left
        return False
    if "args.json" not in found:
        raise UserError(
            f"--out {folder}: neither empty nor a run's folder (it has no args.json); choose "
            f"another one."
        )
    if f"{name}.py" in found:
        return True
    others = ", ".join(sorted(file for file in found if file.endswith(".py")))
    if others or read_arguments(folder).keys() != given.keys():  # equal: it has only started
        others = others or "another script"
        raise UserError(f"--out {folder}: holds a run of {others}, not of {name}.py.")
    return True


# ------------------------------------------------------------------ going on
def resume(folder: Path) -> str:
    return f"resume with the same command and --out {folder}"


def add_how_to_go_on(error: BaseException, folder: Path):
    """Adds a note to an error, unless the error itself names the folder."""
    saved, expected = numbered(folder), isinstance(error, UserError | ScriptError)
    says = any(f"{word} {folder}" in str(error) for word in ("--out", "in"))
    if saved and not says:
        error.add_note(f"The run's checkpoints are safe: {resume(folder)}.")
    elif not saved and not expected:
        again = f"the same command and --out {folder} start again"
        error.add_note(f"The run has no checkpoint yet: {again}.")


def checkpoint_to_resume(folder: Path, given: dict) -> Path | None:
    """Returns the newest checkpoint, or None if the run has none yet. A run that failed before its
    first step may begin again with other arguments.

    Raises:
        UserError: the run has other arguments, or it has steps and no checkpoint.
    """
    before = read_arguments(folder)
    rows, _ = read_lines(folder / "metrics.jsonl")
    steps = max([row["step"] for row in rows], default=0)
    checkpoint = [None, *numbered(folder).values()][-1]
    if not steps and not checkpoint:
        return None
    other = [
        f"--{key.replace('_', '-')} {before.get(key)}"
        for key in sorted(given.keys() | before.keys())
        if key not in MAY_CHANGE and given.get(key) != before.get(key)
    ]
    if other:
        raise UserError(
            f"--out {folder} holds a run with other arguments ({', '.join(other)}); repeat those, "
            f"or choose another folder. Schedules depend on --steps, so a run cannot be made "
            f"longer."
        )
    # a run without this may have ended while it wrote its first checkpoint
    saved = steps > before.get("save_every", steps) or any(
        folder.glob("*/adapter_model.safetensors")
    )
    if checkpoint is None and saved:
        raise UserError(
            f"--out {folder}: holds a run of {steps} steps, but no checkpoint to resume from; it "
            f"is left as it is. Choose another folder."
        )
    return checkpoint


def read_arguments(folder: Path, file: str = "args.json") -> dict:
    try:
        return {} | json.loads((folder / file).read_text())
    except (OSError, ValueError, TypeError):
        raise UserError(f"--out {folder}: its {file} cannot be read.") from None


def numbered(folder: Path) -> dict[int, Path]:
    """Returns a run's whole checkpoints, step -> folder, the oldest first. A folder with another
    name, such as checkpoint-best, is somebody else's. A checkpoint gets its name when it is whole,
    and Trainer writes its state last.
    """
    files = folder.glob("checkpoint-*/trainer_state.json")
    found = [file.parent for file in files if file.parent.name[11:].isdecimal()]
    return dict(sorted((int(path.name[11:]), path) for path in found))


def forget_older(folder: Path, step: int):
    """Deletes the checkpoints before this step, except the last of them. Trainer would also count
    other folders.
    """
    earlier = [path for its, path in numbered(folder).items() if its < step]
    for path in earlier[:-1]:
        shutil.rmtree(path, ignore_errors=True)


def write_whole(path: Path, text: str):
    """Writes a file beside its place and renames it, so that half a file is never there."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)
