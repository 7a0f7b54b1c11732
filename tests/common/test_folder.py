"""common/folder.py: nothing of others is touched, nothing that was saved is lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

from common import folder as folders
from common.errors import UserError
from common.folder import (
    checkpoint_to_resume,
    claim,
    last_checkpoint,
    lock,
    release,
    seal,
    whats_wrong,
)
from common.run import Run

import pytest
from conftest import ROOT, environment, refused, run_here, same_weights, small
from safetensors import SafetensorError

GIVEN = {"seed": 0, "steps": 6, "save_every": 2, "lr": 0.1}


@pytest.fixture(autouse=True)
def nothing_stays_locked():
    yield
    release()


def listing(folder) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


# ------------------------------------------------------------------ whose it is
@pytest.mark.parametrize(
    "names, says",
    [
        (["README.md", "thesis.tex"], "neither empty nor a run's folder"),
        (["metrics.jsonl", "report.html"], "it has no args.json"),
        (["checkpoint-3/model.safetensors"], "neither empty nor a run's folder"),
        (["args.json", "gar.py"], "holds a run of gar.py, not of tango.py"),
        (["args.json", "setup.cfg"], "its args.json is not of tango.py"),
    ],
)
def test_what_is_not_ours_is_refused_and_not_touched(tmp_path, names, says):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    before = listing(tmp_path)
    assert says in refused("tango.py", *small("tango.py", tmp_path))
    assert listing(tmp_path) == before and not (tmp_path / ".lock").exists()


def test_the_current_folder_is_refused_if_there_is_anything_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert claim(".", "tango", GIVEN)[1:] == (None, [])
    release()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"--out \.: neither empty nor"):
        claim(".", "tango", GIVEN)


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UserError, match="is a file, not a folder"):
        claim(str(tmp_path / "run"), "tango", GIVEN)
    with pytest.raises(UserError, match="cannot be written"):
        claim(str(tmp_path / "run" / "below"), "tango", GIVEN)
    assert (tmp_path / "run").read_text() == "mine"


def test_two_runs_that_start_in_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders.time, "strftime", lambda *_: "20260101-120000")
    made = [claim(None, "tango", GIVEN)[0] for _ in range(3)]
    assert len({*made}) == 3 and all(folder.is_dir() for folder in made)
    assert str(made[0]) == "runs/tango-20260101-120000-0"


def test_a_second_run_is_told_who_writes_there(tmp_path):
    claim(str(tmp_path), "tango", GIVEN)
    with pytest.raises(UserError, match=rf"another run writes there \(process {os.getpid()} on "):
        claim(str(tmp_path), "tango", GIVEN)
    release()
    claim(str(tmp_path), "tango", GIVEN)


def test_the_lock_of_a_killed_process_is_lifted(tmp_path):
    code = "import sys, time; from pathlib import Path; from common.folder import lock; "
    code += "lock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code, tmp_path]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(UserError, match=f"process {process.pid} on"):
        lock(tmp_path)
    process.kill()
    process.wait()
    lock(tmp_path)


# ------------------------------------------------------------------ checkpoints
def checkpoint(folder, step: int):
    path = folder / f"checkpoint-{step}"
    (path / "player").mkdir(parents=True)
    for name in (
        "saved.json",
        "optimizer.pt",
        "rng_state.pth",
        "player/adapter_model.safetensors",
    ):
        (path / name).write_text(f"{name} of step {step}")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    seal(path)
    return path


def test_the_last_checkpoint_is_the_one_with_the_highest_number(tmp_path):
    assert last_checkpoint(tmp_path) == (None, [])
    for step in (2, 10, 9):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-").mkdir()
    assert last_checkpoint(tmp_path) == (tmp_path / "checkpoint-10", [])


@pytest.mark.parametrize(
    "name", ["saved.json", "optimizer.pt", "rng_state.pth", "player/adapter_model.safetensors"]
)
@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "changed"])
def test_a_broken_checkpoint_is_passed_over_and_said(tmp_path, name, how):
    older, newer = checkpoint(tmp_path, 4), checkpoint(tmp_path, 6)
    path = newer / name
    text = path.read_text()
    if how == "missing":
        path.unlink()
    else:
        path.write_text({"empty": "", "truncated": text[:-1], "changed": text[:-1] + "!"}[how])
    found, [said] = last_checkpoint(tmp_path)
    assert found == older
    wrong = "is missing" if how == "missing" else "is not as it was written"
    assert said == f"checkpoint-6 is passed over: {name} {wrong}"
    shutil.rmtree(older)
    with pytest.raises(
        UserError, match=rf"no checkpoint is whole \(checkpoint-6 is broken: {name}"
    ):
        last_checkpoint(tmp_path)


def test_a_run_that_was_killed_in_its_first_checkpoint_starts_again(copied):
    folder, whole = copied
    for step in (4, 6):
        shutil.rmtree(folder / f"checkpoint-{step}", ignore_errors=True)
    first = folder / "checkpoint-2"
    first.mkdir(exist_ok=True)
    (first / "files.json").unlink(missing_ok=True)
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[:3]))
    shown = run_here("tango.py", *small("tango.py", folder))
    assert "checkpoint-2 is passed over: it was cut short" in shown and "step 1/6" in shown
    same_weights(folder, whole)


def test_a_copy_of_an_older_checkpoint_is_passed_over(tmp_path):
    shutil.copytree(checkpoint(tmp_path, 4), tmp_path / "checkpoint-6")
    found, [said] = last_checkpoint(tmp_path)
    assert found.name == "checkpoint-4" and "checkpoint-6 is passed over: it is of step 4" in said


def test_who_reads_the_output_may_leave(tmp_path, monkeypatch, brief):
    folder, written = tmp_path / "run", []

    def write(text, **_):
        written.append(text)
        if text.startswith("step 1/"):
            raise BrokenPipeError

    monkeypatch.setattr("common.run.tqdm.write", write)
    with pytest.raises(SystemExit) as ended:
        brief("tango.py", *small("tango.py", folder, "--save-every", "100"))
    assert ended.value.code == 141 and not whats_wrong(folder / "checkpoint-2")


def test_a_checkpoint_without_a_seal_was_cut_short(tmp_path):
    path = checkpoint(tmp_path, 3)
    for text in ("", "{", None):
        (path / "files.json").unlink() if text is None else (path / "files.json").write_text(text)
        assert whats_wrong(path) == "it was cut short while being written"


def test_a_run_resumes_from_the_checkpoint_before_a_broken_one(copied):
    folder, whole = copied
    (folder / "checkpoint-6" / "optimizer.pt").write_bytes(b"half")
    shown = run_here("tango.py", *small("tango.py", folder))
    assert "checkpoint-6 is passed over: optimizer.pt is not as it was written" in shown
    assert "resumes from checkpoint-4" in shown
    assert "step 5/6" in shown and "step 4/6" not in shown
    same_weights(folder, whole)
    read = lambda run: (run / "rollouts.jsonl").read_text()  # noqa: E731
    assert read(folder) == read(whole) and not whats_wrong(folder / "checkpoint-6")


def test_a_run_whose_checkpoints_are_gone_is_left_as_it_is(copied):
    """Today's adapters and metrics are worth more than a second training of the same."""
    folder, _ = copied
    for path in folder.glob("checkpoint-*"):
        shutil.rmtree(path)
    before = listing(folder)
    message = refused("tango.py", *small("tango.py", folder))
    assert "holds a run of 6 steps, but no checkpoint to resume from" in message
    assert listing(folder) == before


def test_nothing_is_cut_before_the_checkpoint_has_been_loaded(copied, monkeypatch):
    """A checkpoint may be whole and still not fit, for example after an update of a library."""
    folder, _ = copied
    shutil.rmtree(folder / "checkpoint-6")
    before = listing(folder)

    def cannot(*_, **__):
        raise UserError("does not fit")

    monkeypatch.setattr("tango.Tango._load_from_checkpoint", cannot)
    refused("tango.py", *small("tango.py", folder))
    after = listing(folder)
    for name in ("metrics.jsonl", "rollouts.jsonl", "generator/adapter_model.safetensors"):
        assert after[name] == before[name]


def test_only_what_changes_no_training_may_be_another_in_a_resumed_run(finished):
    folder, _, _ = finished("tango.py")
    given = json.loads((folder / "args.json").read_text())
    may = "save_every eval_every show_every report_to rows_at_once micro_batch checkpointing"
    assert {*may.split()} < given.keys()
    for key in given:
        other = given | {key: "another"}
        if key in may.split():
            checkpoint, said = checkpoint_to_resume(folder, other)
            assert checkpoint.name == "checkpoint-6" and not said
        else:
            before = f"--{key.replace('_', '-')} {given[key]}"
            with pytest.raises(UserError, match=re.escape(f"other arguments ({before});")):
                checkpoint_to_resume(folder, other)


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_arguments_that_cannot_be_read(copied, text):
    folder, _ = copied
    (folder / "args.json").write_text(text)
    assert "its args.json cannot be read" in refused("tango.py", *small("tango.py", folder))
    assert (folder / "args.json").read_text() == text


# ------------------------------------------------------------------ ends
@pytest.mark.parametrize("sign, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_sigterm_and_a_closed_terminal_are_ctrl_c(tmp_path, monkeypatch, brief, sign, code):
    folder, line = tmp_path / "run", Run.on_log

    def then_the_signal(run, args, state, *rest, **more):
        line(run, args, state, *rest, **more)
        if state.global_step == 1:
            os.kill(os.getpid(), sign)

    monkeypatch.setattr(Run, "on_log", then_the_signal)
    with pytest.raises(SystemExit) as ended:
        brief("tango.py", *small("tango.py", folder, "--save-every", "100"))
    assert ended.value.code == code
    [saved] = folder.glob("checkpoint-*")  # a step's line comes after its end: of step 2
    assert saved.name == "checkpoint-2" and not whats_wrong(saved)


def test_a_second_ctrl_c_ends_at_once_in_a_sentence(tmp_path, monkeypatch, capsys):
    run = Run(tmp_path, "tango", None, None)
    run._interrupted(signal.SIGINT, None)
    run._interrupted(signal.SIGINT, None)  # torchrun's, of the same moment
    assert run.stop == signal.SIGINT
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 5)
    with pytest.raises(KeyboardInterrupt):
        run._interrupted(signal.SIGINT, None)


def test_an_interruption_outside_of_training_is_a_sentence(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("common.launch.load_model", interrupted)
    with pytest.raises(SystemExit) as ended:
        run_here("tango.py", *small("tango.py", tmp_path / "run"))
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted; what was saved is safe\n"


@pytest.mark.parametrize(
    "error, says",
    [
        (OSError(28, "No space left on device"), "not be written (No space left on device)"),
        (RuntimeError("PytorchStreamWriter failed writing file data/3"), "(PytorchStreamWriter"),
        (SafetensorError("I/O error: File too large (os error 27)"), "File too large"),
        (PermissionError(13, "Permission denied", "metrics.jsonl"), "Permission denied"),
        ("deleted", "is gone; nothing more can be saved"),
    ],
)
def test_what_a_disk_can_do_ends_in_a_sentence(tmp_path, monkeypatch, error, says):
    folder = tmp_path / "run"

    def fails(run, row):
        if error == "deleted":
            shutil.rmtree(folder)
            raise FileNotFoundError(2, "No such file or directory", str(folder / "metrics.jsonl"))
        if isinstance(error, PermissionError):
            error.filename = str(folder / "metrics.jsonl")
        raise error

    monkeypatch.setattr("tango.evaluate", lambda *_: {"generator/accuracy": 0.5})
    monkeypatch.setattr("common.run.Run._write", fails)
    if isinstance(error, RuntimeError) and not isinstance(error, SafetensorError):
        monkeypatch.setattr("common.run.disk_is_full", lambda _: True)
    message = refused("tango.py", *small("tango.py", folder))
    assert says in message and str(folder) in message
    assert error == "deleted" or "Its checkpoints are safe" in message


def test_an_error_of_the_script_itself_keeps_its_trace(tmp_path, monkeypatch, brief):
    def fails(*_):
        raise RuntimeError("a mistake in a reward function")

    monkeypatch.setattr("common.run.Run._write", fails)
    with pytest.raises(RuntimeError, match="a mistake in a reward function"):
        brief("tango.py", *small("tango.py", tmp_path / "run"))


def test_args_json_is_written_beside_and_renamed(tmp_path):
    folders.write_whole(tmp_path / "args.json", json.dumps({"a": 1}))
    assert [path.name for path in tmp_path.iterdir()] == ["args.json"]
