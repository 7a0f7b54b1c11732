"""Every script as a user runs it: what a run leaves, Ctrl-C and resume, two processes, --help."""

import dataclasses
import json
import os
import random
import re
import signal
import time
from pathlib import Path

from common import fast
from common.checked import CoTrainer
from common.tiny import TINY

import in_two_processes
import pytest
import torch
import tyro
import warm
import yaml
from conftest import (
    ROOT,
    SCRIPTS,
    adapters_of,
    evaluated_once,
    loaded_by_peft_alone,
    metrics_of,
    module_of,
    run_here,
    run_module,
    same_weights,
    saved_of,
    small,
    steps_of,
    trained_adapters,
)
from filelock import FileLock
from transformers import AutoModelForCausalLM


# ------------------------------------------------------------------ a run, and what it leaves
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_shows_and_leaves_what_it_says(finished, script):
    folder, out, err = finished(script)
    steps = json.loads((folder / "args.json").read_text())["steps"]
    shown = re.findall(rf"^step (\d+)/{steps}  ", out, re.MULTILINE)
    assert [*map(int, shown)] == [*range(1, steps + 1)]
    assert f"held-out questions, in {folder}" in out and "report.html" in out
    assert "step 0  held out" in out and f"step {steps}  held out" in out
    assert len(err) < 400 and "Traceback" not in err, err  # no library's chatter
    names = "args.json about.json versions.json metrics.jsonl rollouts.jsonl report.html"
    for name in [*names.split(), script, f"checkpoint-{steps}"]:
        assert (folder / name).exists(), name
    assert not (folder / ".unfinished").exists()  # where checkpoints are written
    card = (folder / "README.md").read_text()  # PEFT's, and two lines
    assert f"`{script}` in {steps} steps" in card and re.search(r": \S+ [\d.-]+ -> [\d.]+", card)
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "peft"  # what the Hub reads
    assert (folder / script).read_text() == (ROOT / script).read_text()
    about = json.loads((folder / "about.json").read_text())
    module = module_of(script)
    assert module.CURVES.items() <= about["curves"].items() and about["about"] == module.__doc__
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["processes"] == 1 and versions["trl"]
    assert [row["step"] for row in steps_of(folder)] == [*range(1, steps + 1)]
    recorded = metrics_of(folder, "rollouts")
    assert {row["step"] for row in recorded} == {*range(1, steps + 1)}
    logged = {key.removeprefix("eval/") for row in metrics_of(folder) for key in row}
    wanted = {key for panel in module.CURVES.values() for key in panel}
    assert wanted <= logged, wanted - logged


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_adapter_was_trained_and_is_in_pefts_own_format(finished, script):
    folder, _, _ = finished(script)
    assert trained_adapters(folder) == adapters_of(script)
    saved = loaded_by_peft_alone(folder, AutoModelForCausalLM.from_pretrained(TINY))
    assert {p.shape[0] for n, p in saved.items() if "_A" in n} == {16}


@pytest.mark.parametrize("script", ["gar.py", "spin.py", "vstar.py"])
def test_plain_uses_nothing_that_is_fast(script, tmp_path, monkeypatch, no_report):
    """One step of it, and what is evaluated before: of rollouts, of pairs, of completions that
    have a beginning. A line by line trace of tango.py's: tests/common/test_plain.py.
    """
    module, step = module_of(script), CoTrainer.training_step
    monkeypatch.setattr(module, "evaluate", module.evaluate)  # put back in the end
    evaluated_once(module, most_tokens=2)
    for name in ("generate", "token_logps", "in_order", "install"):
        monkeypatch.setattr(fast, name, None)

    def once(trainer, *arguments):
        monkeypatch.setattr(CoTrainer, "training_step", interrupted)
        return step(trainer, *arguments)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(CoTrainer, "training_step", once)
    printed, _, code = run_module(module, *small(script, tmp_path / "run", "--plain"))
    assert code == 130 and "\nstep 1/" in printed


@pytest.mark.parametrize("script", SCRIPTS)
def test_interrupted_and_resumed_is_the_same_run_bit_for_bit(finished, tmp_path, no_report, script):
    """Ctrl-C in a process of its own, and the rest of the run in this one."""
    whole, _, _ = finished(script)
    folder, printed = tmp_path / "run", tmp_path / "printed"
    # only the checkpoint that Ctrl-C leaves
    process = warm.start(script, small(script, folder, "--save-every", "100"), printed, printed)
    while process.is_alive() and not (printed.exists() and "\nstep 1/" in printed.read_text()):
        time.sleep(0.02)
    assert process.is_alive(), printed.read_text()
    os.kill(process.pid, signal.SIGINT)
    process.join(timeout=900)
    output = printed.read_text()
    assert process.exitcode == 130 and "Traceback" not in output, output
    assert f"resume with the same command and --out {folder}" in output
    stopped = int(re.search(r"^stopped at step (\d+);", output, re.MULTILINE)[1])
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{stopped}"]
    assert f"step {stopped}/" in output and f"step {stopped + 1}/" not in output

    shown = run_here(script, *small(script, folder))
    assert f"resumes from checkpoint-{stopped}" in shown
    assert f"step {stopped}/" not in shown and f"step {stopped + 1}/" in shown
    same_weights(folder, whole)
    assert saved_of(folder) == saved_of(whole)
    assert (folder / "rollouts.jsonl").read_text() == (whole / "rollouts.jsonl").read_text()
    timing = {"seconds", "step_time"}
    lines = [[{k: r[k] for k in r.keys() - timing} for r in metrics_of(f)] for f in (folder, whole)]
    assert lines[0] == lines[1]


DRAWS = [script for script in SCRIPTS if "random" in (ROOT / script).read_text()]
"""Scripts with random numbers of their own; all others draw by keys: tests/common/test_draws.py."""


@pytest.mark.parametrize("script", DRAWS)
def test_what_has_not_changed_is_not_measured_to_be_different(
    finished, tmp_path, monkeypatch, no_report, script
):
    """Evaluation draws random numbers of its own, the same ones at every step."""

    def evaluated_later(trainer, **_):
        torch.rand(9), random.random()
        trainer.state.global_step = 2
        trainer.evaluate()

    monkeypatch.setattr(CoTrainer, "train", evaluated_later)
    run_here(script, *small(script, tmp_path / "run"))
    first, later = (
        next({k: x for k, x in row.items() if "eval/" in k} for row in metrics_of(folder))
        for folder in (finished(script)[0], tmp_path / "run")
    )
    assert first and first == later


# ------------------------------------------------------------------ two processes
@pytest.fixture(scope="module")
def together(shared_folder):
    """(folder, exit code, output, errors) of a small run of every script in two processes, one
    after the other; made once, whichever worker asks first."""
    folder = shared_folder / "together"
    out, err, ended = (shared_folder / f"together.{name}" for name in ("out", "err", "ended"))
    with FileLock(shared_folder / "together.lock"):
        if not ended.exists():
            starter = Path(__file__).parent / "in_two_processes.py"
            ended.write_text(str(warm.start_two(starter, [folder, *SCRIPTS], out, err)))
    return folder, int(ended.read_text()), out.read_text(), err.read_text()


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_processes_train_together_and_have_the_gradient_of_one(together, script):
    """Every gradient that reached the optimiser, against that of one process with all rows."""
    everything, _, out, err = together
    folder = everything / Path(script).stem
    assert (folder / "about.json").exists(), out + err
    said = next(part for part in out.split("=== ") if part.startswith(script))
    assert json.loads((folder / "versions.json").read_text())["processes"] == 2
    assert trained_adapters(folder) == adapters_of(script)
    steps = json.loads((folder / "args.json").read_text())["steps"]
    for step in range(1, steps + 1):
        assert said.count(f"step {step}/{steps} ") == 1  # one process speaks
    assert [row["step"] for row in steps_of(folder)] == [*range(1, steps + 1)]
    assert "kinds of saved: 1\n" in said
    found = re.findall(r"^gradient of (\w+): (\S+) of (\S+)$", said, re.MULTILINE)
    trained = {"cure.py": {"coder", "tester"}, "spin.py": {"player"}}
    trained["deepseekmath.py"] = {"verifier", "meta", "generator"}
    trained["self_rewarding.py"], trained["ssp.py"] = {"solver"}, {"proposer", "solver"}
    trained["self_verify.py"] = {"generator", "verifier"}
    assert {player for player, _, _ in found} == trained.get(script, adapters_of(script))
    for player, difference, largest in found:
        assert float(difference) < 1e-4 and float(largest) > 1e-4, (player, difference, largest)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_seed_means_the_same_texts_on_two_processes_as_on_one(
    together, tmp_path, monkeypatch, brief, script
):
    """Every completion of a whole run, those of its evaluations too."""
    monkeypatch.setattr(CoTrainer, "sample", in_two_processes.sample_and_note)
    monkeypatch.setattr(in_two_processes, "noted", [])
    brief(script, *in_two_processes.arguments_of(script, tmp_path, processes=1))
    one = in_two_processes.noted
    two = json.loads((together[0] / Path(script).stem / "sampled.json").read_text())
    assert [(name, len(ids)) for name, ids in one] == [(name, len(ids)) for name, ids in two]
    differ = [i for i, calls in enumerate(zip(one, two)) if calls[0] != calls[1]]
    assert not differ, f"calls {differ} of {len(one)}"


def test_two_processes_part_in_order(together):
    _, code, out, err = together
    assert code == 0 and out.count("=== the end") == 1, err


# ------------------------------------------------------------------ arguments
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_one_flat_list_with_the_defaults_of_both_kinds_of_model(script, capsys):
    module = module_of(script)
    with pytest.raises(SystemExit) as ended:
        tyro.cli(module.Args, args=["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    listed = re.findall(r"^\W (--[a-z][\w-]*)", text, re.MULTILINE)  # explanations are indented
    fields = dataclasses.fields(module.Args)
    assert sorted(listed) == sorted("--" + field.name.replace("_", "-") for field in fields)
    text = re.sub(r"[│|\s]+", " ", text)
    assert "subcommands" not in text and text.count("options") == 1
    for field in fields:
        if type(field.default).__name__ == "PerModel":
            assert f"{field.default}" in text, field.name
    shown = [str(f.default) for f in fields if f.name in ("micro_batch", "eval_questions")]
    assert all(re.fullmatch(r"\d+ small model, \d+ real", x) for x in shown)
