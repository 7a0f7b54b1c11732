"""--report-to: a tracker has every step's metrics and the held-out figures. Offline."""

import pytest
from conftest import metrics_of, small, steps_of

RUN = "--steps 2 --eval-every 1 --eval-samples 1 --report-to".split()


def test_tensorboard(tmp_path, brief):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    brief("tango.py", *small("tango.py", tmp_path / "run", *RUN, "tensorboard"))
    steps = steps_of(tmp_path / "run")
    evaluations = [row for row in metrics_of(tmp_path / "run") if "eval/generator/greedy" in row]
    assert [[row["step"] for row in rows] for rows in (steps, evaluations)] == [[1, 2], [0, 1, 2]]
    (folder,) = (tmp_path / "run" / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    for rows, key, name in (
        (steps, "generator/accuracy", "train/generator/accuracy"),
        (evaluations, "eval/generator/greedy", "eval/generator/greedy"),
    ):
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == pytest.approx({row["step"]: row[key] for row in rows})
