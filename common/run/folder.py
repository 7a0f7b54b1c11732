"""A run's folder: whose it is, who writes in it, and from which checkpoint a run resumes.

    folder, checkpoint = claim(args.out, "tango", arguments)

Nothing of somebody else's is touched: a folder is ours if it is new, empty, or holds a run of the
same script. A lock keeps a second run out, and the system lifts it when the first one ends, however
that happens.
"""

import errno
import fcntl
import itertools
import json
import os
import platform
import shutil
import time
from contextlib import suppress
from pathlib import Path

from common.core.errors import UserError
from common.core.recording import read_lines

MAY_CHANGE = {*"out save_every eval_every show_every report_to generation_batch_size".split()}
MAY_CHANGE |= {"micro_batch", "gradient_checkpointing", "plain", "rollouts"}
"""Arguments that do not change what is trained, except for the rounding of sums: evaluation has
random numbers of its own, and those of a token depend on none of these (common/core/draws.py)."""

LOCKS = []  # open files; `release` closes them


def claim(out: str | None, name: str, given: dict) -> tuple[Path, Path | None]:
    """Make the run's folder, or find it again, and lock it. Writes nothing else.

    Args:
        out: --out; None makes a new folder in runs/.
        name: the script's, without .py.
        given: its arguments.

    Returns:
        (the folder, the checkpoint to resume from if there is one).

    Raises:
        UserError: the folder cannot be written, is somebody else's or in use, holds a run with
            other arguments, or one that cannot resume.
    """
    if out == "":  # to Path the folder that one is in
        raise UserError("--out is empty; it must name a folder.")
    try:
        folder = new_folder(name, given["seed"]) if out is None else Path(out)
        ours = is_ours(folder, name, given)
        folder.mkdir(parents=True, exist_ok=True)
        lock(folder)
        if not ours:
            return folder, None
        return folder, checkpoint_to_resume(folder, given)
    except OSError as error:
        place = out or "runs"
        raise UserError(f"--out {place}: cannot be written ({error.strerror}).") from None


def new_folder(name: str, seed: int) -> Path:
    """Made here, so that two runs that start in one second get two."""
    base = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}-{seed}"
    Path("runs").mkdir(exist_ok=True)
    for n in itertools.count(1):
        folder = Path(base if n == 1 else f"{base}-{n}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder


def is_ours(folder: Path, name: str, given: dict) -> bool:
    """Whether the folder holds a run of this script; False: it is new, or empty.

    Raises:
        UserError: it holds anything else.
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
    if others or read_arguments(folder).keys() != given.keys():  # else a start that came no further
        others = others or "another script"
        raise UserError(f"--out {folder}: holds a run of {others}, not of {name}.py.")
    return True


def lock(folder: Path):
    """Held until `release`, or until the process ends.

    Raises:
        UserError: another process holds it.
    """
    file = open(folder / ".lock", "a+")  # noqa: SIM115  it stays open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read()
        if error.errno in (errno.EAGAIN, errno.EACCES):  # else a file system without locks
            file.close()
            raise UserError(f"--out {folder}: another run writes there ({holder}).") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%H:%M:%S')}")
    file.flush()
    LOCKS.append(file)


def claimed() -> Path | None:
    """Returns the folder that this process has locked, until `release`."""
    return Path(LOCKS[-1].name).parent if LOCKS else None


def release():
    while LOCKS:
        LOCKS.pop().close()


# ------------------------------------------------------------------ going on
def checkpoint_to_resume(folder: Path, given: dict) -> Path | None:
    """The newest checkpoint; None where a run has none yet. One that failed before its first step
    may have its arguments put right.
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
    if checkpoint is None and steps >= min(before["save_every"], before["steps"]):
        raise UserError(
            f"--out {folder}: holds a run of {steps} steps, but no checkpoint to resume from; it "
            f"is left as it is. Choose another folder."
        )
    return checkpoint


def read_arguments(folder: Path, file: str = "args.json") -> dict:
    try:
        return {} | json.loads((folder / file).read_text())
    except (ValueError, TypeError):
        raise UserError(f"--out {folder}: its {file} cannot be read.") from None


def numbered(folder: Path) -> dict[int, Path]:
    """A run's own whole checkpoints by their steps, the oldest first. checkpoint-best, say, is
    somebody else's. Trainer writes its state last; a script's run gives a checkpoint its name only
    when all of it is written.
    """
    files = folder.glob("checkpoint-*/trainer_state.json")
    found = [file.parent for file in files if file.parent.name[11:].isdecimal()]
    return dict(sorted((int(path.name[11:]), path) for path in found))


def forget_older(folder: Path, step: int):
    """Of the checkpoints before this step only the last one stays. Trainer would count other
    folders with them.
    """
    earlier = [path for its, path in numbered(folder).items() if its < step]
    for path in earlier[:-1]:
        shutil.rmtree(path, ignore_errors=True)


def write_whole(path: Path, text: str):
    """Beside it first and then renamed, so that at no moment half of it is there."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)
