"""What a run leaves behind, how it is resumed, and the one sentence that every wrong input ends in.

Every script's own start, Ctrl-C and two processes: tests/scripts/test_every_script.py.
"""

import errno
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

from common.checked import CoTrainer
from common.core.errors import ScriptError, UserError, say
from common.core.lists import mean
from common.run.session import Run, exit_with_one_sentence

import pytest
import torch
from conftest import (
    ROOT,
    metrics_of,
    module_of,
    refused,
    run_here,
    run_module,
    same_weights,
    small,
    steps_of,
    write_rows,
)


# ------------------------------------------------------------------ which questions
@pytest.mark.parametrize("count", [0, 14])
def test_the_questions_are_the_first_of_one_list_whatever_the_steps_are(
    tmp_path, monkeypatch, no_report, count
):
    """Of the small model's own, and of a file that is passed over several times, in which an epoch
    may end in the middle of a step.
    """
    found, data = [], ["--dataset", "tiny"]
    if count:
        rows = [{"question": f"{i}+1 mod 61", "answer": f"{i + 1}"} for i in range(count + 1)]
        files = [write_rows(tmp_path / n, r) for n, r in (("a.jsonl", rows), ("b.jsonl", rows[:1]))]
        data = ["--dataset", files[0], "--held-out", files[1]]

    def asked(trainer, **_):
        for rows in trainer.get_train_dataloader():
            found[-1] += [row["question"] for row in rows[::4]]
            assert [row["question"] for row in rows[::4]] == [row["question"] for row in rows[3::4]]

    monkeypatch.setattr(CoTrainer, "train", asked)
    monkeypatch.setattr(Run, "_finish", lambda _: None)
    for n, (steps, questions) in enumerate([(12, 5), (2, 5), (9, 2), (1, 9)]):
        found.append([])
        more = f"--steps {steps} --questions {questions}".split() + data
        run_here("tango.py", *small("tango.py", tmp_path / str(n), "--eval-every", 0, *more))
        assert len(found[-1]) == steps * questions
        assert found[-1] == found[0][: len(found[-1])]
    for epoch in [found[0][i : i + count] for i in range(0, 42, count)] if count else [found[0]]:
        assert len({*epoch}) == len(epoch)
    assert not count or found[0][:14] != found[0][14:28] != found[0][28:42]


# ------------------------------------------------------------------ resumed
def test_a_finished_run_is_left_as_it_is(copied):
    """And one that was cut short after its last step gets its adapters and its table."""
    folder, whole = copied
    (folder / "README.md").write_text("my notes")
    shutil.rmtree(folder / "generator")
    shown = run_here("tango.py", *small("tango.py", folder))
    assert "this run is finished: 6 steps" in shown and "step 7" not in shown
    assert not (folder / "checkpoint-7").exists()
    assert "held out:" not in shown and "generator/accuracy" in shown  # the table again
    same_weights(folder, whole)
    assert metrics_of(folder) == metrics_of(whole)
    assert (folder / "README.md").read_text() == "my notes"
    (folder / "README.md").unlink()
    run_here("tango.py", *small("tango.py", folder))
    card = (folder / "README.md").read_text()
    assert "`tango.py` in 6 steps" in card and re.search(r"accuracy [\d.]+ -> [\d.]+", card)


def test_a_finished_run_without_its_metrics_is_evaluated(copied):
    folder, whole = copied
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    shown = run_here("tango.py", *small("tango.py", folder))
    assert "step 6  held out" in shown and "generator/accuracy" in shown
    without_time = lambda run: metrics_of(run)[-1] | {"seconds": 0}  # noqa: E731
    assert without_time(folder) == without_time(whole)


def test_the_same_work_may_be_cut_into_other_parts(copied, brief):
    folder, whole = copied
    shutil.rmtree(folder / "checkpoint-6")
    versions = json.loads((folder / "versions.json").read_text())
    (folder / "versions.json").write_text(json.dumps(versions | {"torch": "1.0"}))
    more = "--micro-batch 3 --gradient-checkpointing on".split()
    shown = brief("tango.py", *small("tango.py", folder, *more))
    assert "resumes from checkpoint-4" in shown and "until now this run had torch 1.0" in shown
    assert json.loads((folder / "versions.json").read_text())["torch"] == versions["torch"]
    written = [metrics_of(run, "rollouts") for run in (folder, whole)]
    texts = [[row["tokens"] for row in rows if row["step"] == 5] for rows in written]
    assert texts[0] == texts[1] != []
    assert metrics_of(folder)[-1]["step"] == 6


# ------------------------------------------------------------------ how to go on
def raises(error):
    def function(*_, **__):
        raise error

    return function


def test_every_end_says_the_folder_and_the_command_to_go_on(tmp_path, monkeypatch, no_report):
    """Of a run whose folder has a name from the clock, which nobody has typed. Behind the first
    checkpoint: a second Ctrl-C in a step, what a user or a script got wrong, a mistake.
    """
    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a process of its own
    monkeypatch.setattr("tango.evaluate", lambda *_: {"generator/accuracy": 0.5})
    tango, start = module_of("tango.py"), small("tango.py", "run")[:-2]  # without --out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.run.launch.plan_memory", raises(KeyboardInterrupt))
        _, said, code = run_module(tango, *start)
    assert (said, code) == ("interrupted. The run has not begun; nothing has changed.\n", 130)
    for load, word, status in (
        (raises(KeyboardInterrupt), "interrupted", 130),
        (lambda *_: signal.raise_signal(signal.SIGTERM), "terminated", 143),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("common.run.launch.load_model", load)
            _, said, code = run_module(tango, *start)
        folder = max((tmp_path / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        again = f"the same command and --out runs/{folder.name} start again.\n"
        assert (said, code) == (f"{word}. The run has no checkpoint yet: {again}", status)
    command = [*start, "--out", f"runs/{folder.name}", "--save-every", 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tango.Tango.verifier_step", raises(UserError("the server has gone.")))
        assert refused("tango.py", *command) == "error: the server has gone.\n"
    monkeypatch.setattr("tango.Tango.generator_step", raises(KeyboardInterrupt))
    again = f"resume with the same command and --out runs/{folder.name}"
    safe = f"The run's checkpoints are safe: {again}."
    _, said, code = run_module(tango, *command)
    assert (said, code) == (f"interrupted. {safe}\n", 130)
    full = OSError(errno.ENOSPC, "No space left on device", "rollouts.jsonl")
    for error in (UserError("the server has gone."), ScriptError("no advantages"), full):
        monkeypatch.setattr("tango.Tango.generator_step", raises(error))
        said = refused("tango.py", *command)
        assert said.endswith(f"{str(error).rstrip('.')}. {safe}\n")
    monkeypatch.setattr("tango.Tango.generator_step", raises(KeyError("a mistake")))
    with pytest.raises(KeyError) as raised:
        run_module(tango, *command)
    assert raised.value.__notes__ == [safe]


IN_A_GRAPH = RuntimeError("previous error during capture")
IN_A_GRAPH.__context__ = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    "error, is_full",
    [(torch.OutOfMemoryError(), True), (IN_A_GRAPH, True), (RuntimeError("a mistake"), False)],
)
def test_full_memory_ends_in_a_sentence(tmp_path, monkeypatch, no_report, error, is_full):
    monkeypatch.setattr("tango.evaluate", lambda *_: {"generator/accuracy": 0.5})
    monkeypatch.setattr("common.fast.generate", raises(error))
    arguments = small("tango.py", tmp_path / "run")
    if is_full:
        message = refused("tango.py", *arguments)
        assert "the GPU's memory is full" in message and "--micro-batch 4" in message
        assert f"--out {tmp_path / 'run'}" in message
    else:
        with pytest.raises(RuntimeError, match="a mistake"):
            run_here("tango.py", *arguments)


def test_a_small_model_leaves_the_gpus_alone(tmp_path, monkeypatch, brief):
    """Two that are there, and answer to nothing: this torch was built without CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # Trainer asks them when it saves
    monkeypatch.setattr(torch.cuda.random, "get_rng_state", lambda: torch.zeros(1))
    brief("tango.py", *small("tango.py", tmp_path / "run", "--steps", 1, "--ver-warmup", 0))
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["device"].startswith("CPU")
    assert json.loads((tmp_path / "run" / "args.json").read_text())["four_bit"] is False


def test_tensorboard_has_every_steps_metrics_and_the_held_out_figures(tmp_path, brief):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    more = "--steps 2 --eval-every 1 --eval-samples 1 --report-to tensorboard".split()
    brief("tango.py", *small("tango.py", tmp_path / "run", *more))
    steps = steps_of(tmp_path / "run")
    evaluations = [row for row in metrics_of(tmp_path / "run") if "eval/generator/greedy" in row]
    assert [[row["step"] for row in rows] for rows in (steps, evaluations)] == [[1, 2], [0, 1, 2]]
    (folder,) = (tmp_path / "run" / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    for rows, key, name in (
        (steps, "verifier/parsed", "train/verifier/parsed"),
        (evaluations, "eval/generator/greedy", "eval/generator/greedy"),
    ):
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == pytest.approx({row["step"]: row[key] for row in rows})


def test_a_start_that_failed_may_be_put_right(tmp_path, brief):
    folder = tmp_path / "run"
    arguments = small("tango.py", folder)
    message = refused("tango.py", *arguments, "--dataset", "missing.jsonl")
    assert "--dataset missing.jsonl" in message
    assert not folder.exists()  # what can be known beforehand leaves no folder
    folder.mkdir()
    (folder / "args.json").write_text('{"lr": 7}')
    (folder / "tango.py").touch()
    (folder / "metrics.jsonl").touch()  # killed before the first evaluation
    assert "--model" in refused("tango.py", *arguments, "--model", tmp_path / "none")
    brief("tango.py", *arguments, "--steps", "1", "--eval-every", "0", "--ver-warmup", "0")
    assert (folder / "checkpoint-1").exists()


def test_a_figure_that_nobody_has_is_not_on_the_line(tmp_path, capsys):
    """The mean reward of a step in which nobody judged: null in metrics.jsonl."""
    run = Run(tmp_path, "tango", None, SimpleNamespace(show_every=0))
    run.curves = {"one": ["a/reward"], "two": ["b/reward"]}
    run.trainer = SimpleNamespace(trained_last="a")
    state = SimpleNamespace(global_step=1, max_steps=4)
    run.on_log(None, state, None, {"a/reward": None, "b/reward": 0.5})
    shown = capsys.readouterr().out
    assert shown.startswith("step 1/4  a  b/reward 0.500  eta")
    assert metrics_of(tmp_path)[0]["a/reward"] is None


def test_what_a_terminal_cannot_show_ends_no_run(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with exit_with_one_sentence():
        say("\u221a2 \ud83d")
    assert sys.stdout.buffer.getvalue() == b"\\u221a2 \\ud83d\n"


def test_a_mean_is_one_of_anything_that_can_be_gone_through():
    assert mean(x > 1 for x in (1, 2, 3, 4)) == 0.75 == mean({"a": 0.5, "b": 1.0}.values())
    assert mean([]) == mean(iter(())) == 0.0


def test_what_is_known_at_the_start_is_said_there(tmp_path, brief):
    """A player who will not be trained; and of the held-out figures only the main ones."""
    shown = brief("tango.py", *small("tango.py", tmp_path / "run", "--steps", 1, "--ver-warmup", 1))
    before, _, _ = shown.partition("step 1/1")
    assert "note: all --steps 1 are --ver-warmup; the generator will not be trained" in before
    (line,) = [line for line in before.splitlines() if line.startswith("step 0  held out:")]
    assert "verifier/balanced_accuracy" in line and "step_f1" not in line
    assert "verifier/step_f1_greedy" in shown  # in the table


def test_the_table_has_what_was_not_there_at_first(tmp_path, capsys):
    """P(YES | generated, right), say, while nothing was right."""
    run = Run(tmp_path, "tango", None, None)
    run.started = 0.0
    run.evaluations = [{"step": 0, "eval/a": 0.5}, {"step": 8, "eval/a": 0.75, "eval/b": 1.0}]
    run.table()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["a", "0.500", "0.750", "+0.250"]
    assert lines[3].split() == ["b", "-", "1.000"]


# ------------------------------------------------------------------ bare surroundings
def test_a_machine_with_nothing_but_python(tmp_path):
    """No git and no other program, no HOME, no TMPDIR, another working directory."""
    (tmp_path / "no programs").mkdir()
    sizes = "--steps 1 --questions 2 --group-size 2 --eval-questions 2 --eval-samples 1"
    words = f"{sizes} --ver-warmup 0 --solution-tokens 16 --judgement-tokens 16".split()
    done = subprocess.run(
        [sys.executable, ROOT / "tango.py", *words, "--out", "run"],
        env={"PATH": str(tmp_path / "no programs")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "\nstep 1/1" in done.stdout, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["commit"] is None
