"""common/run/folder.py: nothing of others is touched, nothing that was saved is lost."""

import json
import re
import shutil
import signal
import time

from common.core.errors import UserError
from common.run import folder as folders
from common.run.folder import checkpoint_to_resume, claim, release
from common.run.session import Run, in_a_sentence

import pytest
from conftest import refused, small

GIVEN = {"seed": 0, "steps": 6, "save_every": 2, "lr": 0.1}


@pytest.fixture(autouse=True)
def nothing_stays_locked():
    yield
    release()


def test_two_runs_that_start_in_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders.time, "strftime", lambda *_: "20260101-120000")
    made = [claim(None, "tango", GIVEN)[0] for _ in range(3)]
    assert len({*made}) == 3 and all(folder.is_dir() for folder in made)
    assert str(made[0]) == "runs/tango-20260101-120000-0"


# ------------------------------------------------------------------ checkpoints
def test_a_run_resumes_from_the_whole_checkpoint_with_the_highest_number(tmp_path):
    (tmp_path / "args.json").write_text(json.dumps(GIVEN))
    assert checkpoint_to_resume(tmp_path, GIVEN) is None
    for step in (2, 10, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    (tmp_path / "checkpoint-11").mkdir()  # cut short
    (tmp_path / "checkpoint-²").mkdir()
    assert checkpoint_to_resume(tmp_path, GIVEN) == tmp_path / "checkpoint-10"


def test_nothing_is_cut_before_the_checkpoint_has_been_loaded(copied, monkeypatch):
    """A checkpoint may be whole and still not fit, for example after an update of a library."""
    folder, _ = copied
    shutil.rmtree(folder / "checkpoint-6")
    names = "metrics.jsonl rollouts.jsonl generator/adapter_model.safetensors".split()
    before = [(folder / name).read_bytes() for name in names]

    def cannot(*_, **__):
        raise UserError("does not fit")

    monkeypatch.setattr("tango.Tango._load_from_checkpoint", cannot)
    refused("tango.py", *small("tango.py", folder))
    assert [(folder / name).read_bytes() for name in names] == before


def test_only_what_changes_no_training_may_be_another_in_a_resumed_run(finished):
    folder, _, _ = finished("tango.py")
    given = json.loads((folder / "args.json").read_text())
    may = "save_every eval_every show_every report_to generation_batch_size micro_batch plain"
    may += " gradient_checkpointing rollouts"
    assert {*may.split()} < given.keys()
    for key in given:
        other = given | {key: "another"}
        if key in may.split():
            assert checkpoint_to_resume(folder, other).name == "checkpoint-6"
        else:
            before = f"--{key.replace('_', '-')} {given[key]}"
            with pytest.raises(UserError, match=re.escape(f"other arguments ({before});")):
                checkpoint_to_resume(folder, other)


def test_nothing_is_written_where_another_folder_has_taken_the_name(tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    folder.mkdir()
    run = Run(folder, "tango", None, None)
    run._write(1, {})
    folder.rename(moved)
    with pytest.raises(UserError, match="run is gone"), in_a_sentence(folder):
        run._write(2, {})
    folder.mkdir()
    for call in (lambda: run._write(2, {}), lambda: run.on_step_begin(None, None, None)):
        with pytest.raises(UserError, match="another folder than the one in which this run began"):
            call()
    assert not [*folder.iterdir()] and len((moved / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_second_ctrl_c_ends_at_once_in_a_sentence(tmp_path, monkeypatch, capsys):
    run = Run(tmp_path, "tango", None, None)
    run._interrupted(signal.SIGINT, None)
    run._interrupted(signal.SIGINT, None)  # torchrun's, of the same moment
    assert run.stop == signal.SIGINT
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 5)
    with pytest.raises(KeyboardInterrupt):
        run._interrupted(signal.SIGINT, None)
