"""--report-to: a tracker has every step's metrics and the held-out figures. Offline."""

import json
import sqlite3
import subprocess
import sys

import pytest
from conftest import ROOT, environment, run_here, small

RUN = "--steps 2 --eval-every 1 --eval-samples 1 --report-to".split()


def rows_of(folder) -> tuple[dict, dict]:
    """(steps, evaluations) of the run: step -> metric -> value."""
    steps, evaluations = {}, {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        held_out = any(key.startswith("eval/") for key in row)
        (evaluations if held_out else steps)[row["step"]] = row
    assert set(steps) == {1, 2} and set(evaluations) == {0, 1, 2}
    return steps, evaluations


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_here("tango.py", *small("tango.py", tmp_path / "run", *RUN, "tensorboard"))
    steps, evaluations = rows_of(tmp_path / "run")
    (folder,) = (tmp_path / "run" / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    for rows, key, name in (
        (steps, "generator/accuracy", "train/generator/accuracy"),
        (evaluations, "eval/generator/greedy", "eval/generator/greedy"),
    ):
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == pytest.approx({step: row[key] for step, row in rows.items()})


def test_trackio(tmp_path, monkeypatch):
    """In a Python of its own: trackio asks for its folder when it is imported."""
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    command = [sys.executable, "tango.py", *small("tango.py", tmp_path / "run", *RUN, "trackio")]
    options = {"cwd": ROOT, "env": environment(), "capture_output": True, "text": True}
    done = subprocess.run(command, **options, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    steps, evaluations = rows_of(tmp_path / "run")
    (base,) = (tmp_path / "trackio").glob("*.db")
    assert base.stem == "duet"
    rows = sqlite3.connect(base).execute("select run_name, metrics from metrics").fetchall()
    assert {run for run, _ in rows} == {"run"}
    logged = [json.loads(metrics) for _, metrics in rows]
    for wanted, key, name in (
        (steps, "generator/accuracy", "train/generator/accuracy"),
        (evaluations, "eval/generator/greedy", "eval/generator/greedy"),
    ):
        found = {row["train/global_step"]: row[name] for row in logged if name in row}
        assert found == pytest.approx({step: row[key] for step, row in wanted.items()})
