"""common/run/folder.py: nothing of others is touched, nothing that was saved is lost."""

import json
import re
import shutil
import signal
import time
from contextlib import ExitStack

from common.core.errors import UserError
from common.run import folder as folders
from common.run.folder import checkpoint_to_resume, claim
from common.run.session import Run

import pytest
from conftest import refused, small, write_rows

GIVEN = {"seed": 0, "steps": 6, "save_every": 2, "lr": 0.1}


def test_two_runs_that_start_in_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders.time, "strftime", lambda *_: "20260101-120000")
    with ExitStack() as runs:
        made = [runs.enter_context(claim(None, "tango", GIVEN))[0] for _ in range(3)]
    assert len({*made}) == 3 and all(folder.is_dir() for folder in made)
    assert str(made[0]) == "runs/tango-20260101-120000-0"


def test_a_folder_is_locked_for_as_long_as_the_block_lasts_and_no_longer(tmp_path):
    with claim(tmp_path, "tango", GIVEN):
        with pytest.raises(UserError, match="another run"), claim(tmp_path, "tango", GIVEN):
            pass
    with pytest.raises(UserError) as raised, claim(tmp_path, "tango", GIVEN):
        raise UserError("the server has gone.")
    with claim(tmp_path, "tango", GIVEN):
        assert raised.value.args == ("the server has gone.",)


# ------------------------------------------------------------------ checkpoints
def test_a_run_that_ended_in_its_first_checkpoint_starts_again_a_finished_run_does_not(tmp_path):
    (tmp_path / "args.json").write_text(json.dumps(GIVEN))
    write_rows(tmp_path / "metrics.jsonl", [{"step": 2}])
    assert checkpoint_to_resume(tmp_path, GIVEN) is None
    (tmp_path / "generator").mkdir()
    (tmp_path / "generator" / "adapter_model.safetensors").touch()
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        checkpoint_to_resume(tmp_path, GIVEN)


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


def test_a_second_ctrl_c_ends_at_once_in_a_sentence(tmp_path, monkeypatch, capsys):
    run = Run(tmp_path, "tango", None, None)
    run._interrupted(signal.SIGINT, None)
    run._interrupted(signal.SIGINT, None)  # torchrun's, of the same moment
    assert run.stop == signal.SIGINT
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 5)
    with pytest.raises(KeyboardInterrupt):
        run._interrupted(signal.SIGINT, None)
