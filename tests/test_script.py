"""tango.py as a user runs it: a run and what it leaves, Ctrl-C and resume, ablations, two processes, every wrong input."""

import json
import os
import shutil
import signal
import subprocess
import sys

from common.run import Run

import pytest
import torch
from conftest import ROOT, refused, run_script, run_two_processes
from safetensors.torch import load_file

SMALL = "--steps 6 --questions 2 --group-size 4 --micro-batch 4 --ver-warmup 1 --eval-questions 8".split()
SMALL += "--save-every 2 --show-every 3".split()


def weights(folder):
    return {
        f"{player}.{name}": tensor
        for player in ("generator", "verifier")
        for name, tensor in load_file(folder / player / "adapter_model.safetensors").items()
    }


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run of six steps: V G G G V G."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    result = run_script("tango.py", *SMALL, "--out", folder)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_a_run_shows_and_leaves_what_it_says(finished):
    folder, result = finished
    for step in range(1, 7):
        assert f"step {step}/6" in result.stdout
    assert "held-out questions" in result.stdout and "--- the verifier" in result.stdout
    for name in ("args.json", "tango.py", "versions.json", "metrics.jsonl", "curves.png", "checkpoint-6"):
        assert (folder / name).exists()
    assert not (folder / "README.md").exists()  # a form of PEFT's, TRL's card without a base
    assert f"held-out questions, in {folder}" in result.stdout  # where it goes is said at the start
    assert (folder / "tango.py").read_text() == (ROOT / "tango.py").read_text()
    assert json.loads((folder / "args.json").read_text())["lr"] is not None  # filled in
    rows = metrics(folder)
    steps = [row for row in rows if "eval/gen/accuracy" not in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [("ver/loss" in row, "gen/loss" in row) for row in steps] == [
        (True, False), *[(False, True)] * 3, (True, False), (False, True)
    ]  # fmt: skip
    for row in steps:  # what shows co-training going wrong is on every line
        for key in ("gen/accuracy", "ver/balanced_accuracy", "ver/says_correct", "ver/parsed", "co/verdict_minus_gold"):
            assert isinstance(row[key], float)
        player = "ver" if "ver/loss" in row else "gen"
        for key in ("entropy", "kl", "grad_norm", "frac_reward_zero_std", "completions/clipped_ratio"):
            assert isinstance(row[f"{player}/{key}"], float)
    evaluations = [row for row in rows if "eval/gen/accuracy" in row]
    assert [row["step"] for row in evaluations] == [0, 6]
    for key in ("greedy", "accuracy"):
        assert 0 <= evaluations[0][f"eval/gen/{key}"] <= 1
    for key in ("balanced_accuracy", "step_f1", "parsed"):
        assert 0 <= evaluations[0][f"eval/ver/{key}"] <= 1
    assert len(result.stderr) < 400, result.stderr  # no library's chatter


def test_adapters_are_in_pefts_own_format(finished):
    from common.model import TINY

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, _ = finished
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(TINY), folder / "generator", adapter_name="generator"
    )
    model.load_adapter(folder / "verifier", "verifier")
    saved = weights(folder)
    loaded = {n: p for n, p in model.named_parameters() if "lora_" in n}
    assert len(saved) == len(loaded)
    assert any(p.abs().max() > 0 for n, p in loaded.items() if "lora_B.verifier" in n)


def interrupt_at(step, folder):
    process = subprocess.Popen(
        [sys.executable, "tango.py", *SMALL, "--out", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith(f"step {step}/6"):
            process.send_signal(signal.SIGINT)
    process.wait(timeout=120)
    return process.returncode, output


@pytest.mark.parametrize("step", [1, 3])
def test_interrupted_and_resumed_is_the_same_run_bit_for_bit(finished, tmp_path, step):
    whole, _ = finished
    folder = tmp_path / "resumed"
    code, output = interrupt_at(step, folder)
    assert code == 130 and "go on with the same command and --out" in output, output
    assert (folder / f"checkpoint-{step + 1}").exists()  # the step in progress is finished first
    result = run_script("tango.py", *SMALL, "--out", folder)
    assert result.returncode == 0, result.stderr
    ours, expected = weights(folder), weights(whole)
    assert ours.keys() == expected.keys()
    for name in expected:
        assert torch.equal(ours[name], expected[name]), name
    memory = [json.loads((f / "checkpoint-6" / "memory.json").read_text()) for f in (folder, whole)]
    assert memory[0] == memory[1] and "class_counts" in memory[0]
    assert (folder / "rollouts.jsonl").read_text() == (whole / "rollouts.jsonl").read_text()
    timing = ("seconds", "step_time")
    lines = [[{k: v for k, v in row.items() if k not in timing} for row in metrics(f)] for f in (folder, whole)]
    assert [row["step"] for row in lines[0]] == [row["step"] for row in lines[1]]
    for a, b in zip(*lines):
        assert {k: v for k, v in a.items() if "loss" in k or "accuracy" in k} == {
            k: v for k, v in b.items() if "loss" in k or "accuracy" in k
        }


def test_a_checkpoint_cut_short_is_passed_over(finished, tmp_path):
    whole, _ = finished
    folder = tmp_path / "cut"
    shutil.copytree(whole, folder)
    (folder / "checkpoint-6" / "memory.json").unlink()
    (folder / "checkpoint-6" / "optimizer.pt").write_bytes(b"half")
    result = run_script("tango.py", *SMALL, "--out", folder)
    assert result.returncode == 0, result.stderr
    assert "step 5/6" in result.stdout and "step 4/6" not in result.stdout  # from checkpoint-4
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(folder)[name], tensor)


def test_a_finished_run_is_left_as_it_is(finished, tmp_path):
    """And one that was cut short after its last step gets its adapters and its table."""
    whole, _ = finished
    folder = tmp_path / "again"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "generator")
    result = run_script("tango.py", *SMALL, "--out", folder)
    assert result.returncode == 0 and "this run is finished: 6 steps" in result.stdout, result.stderr
    assert "step 7" not in result.stdout and not (folder / "checkpoint-7").exists()
    assert "eval" not in result.stdout and "gen/accuracy" in result.stdout  # the table again
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(folder)[name], tensor)
    assert metrics(folder) == metrics(whole)


def test_a_start_that_failed_may_be_put_right(tmp_path):
    folder = tmp_path / "run"
    assert "--dataset missing.jsonl" in refused("tango.py", *SMALL, "--dataset", "missing.jsonl", "--out", folder)
    assert not folder.exists()  # what can be known beforehand leaves no folder
    (folder / "args.json").parent.mkdir()
    (folder / "args.json").write_text('{"lr": 7}')
    (folder / "metrics.jsonl").touch()  # killed before the first evaluation
    assert "--model" in refused("tango.py", *SMALL, "--model", tmp_path / "none", "--out", folder)
    result = run_script("tango.py", *SMALL, "--steps", "1", "--dry-run", "--out", folder)
    assert result.returncode == 0, result.stderr


def test_the_table_has_what_was_not_there_at_first(tmp_path, capsys):
    """P(YES | generated, right), say, while nothing was right."""
    run = Run(tmp_path, "tango", None)
    run.evaluations, run.started = [{"step": 0, "eval/a": 0.5}, {"step": 9, "eval/a": 0.75, "eval/b": 1.0}], 0.0
    run.table()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["a", "0.500", "0.750", "+0.250"] and lines[3].split() == ["b", "-", "1.000"]


@pytest.mark.parametrize("flag", ["verifier frozen", "verifier none", "generator frozen"])
def test_ablations(tmp_path, flag):
    name, value = flag.split()
    result = run_script("tango.py", *SMALL, "--steps", "2", "--out", tmp_path / "run", f"--{name}", value)
    assert result.returncode == 0, result.stderr
    idle = "generator" if name == "generator" else "verifier"
    for key, tensor in weights(tmp_path / "run").items():
        if key.startswith(idle) and "lora_B" in key:
            assert (tensor == 0).all()  # as it was made
    row = metrics(tmp_path / "run")[-1]
    assert ("eval/ver/balanced_accuracy" in row) == (value != "none")


def test_two_processes_train_both_adapters(tmp_path):
    result = run_two_processes("tango.py", *SMALL, "--questions", "4", "--steps", "3", "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["processes"] == 2
    moved = weights(tmp_path / "run")
    for player in ("generator", "verifier"):
        assert any(t.abs().max() > 0 for n, t in moved.items() if n.startswith(player) and "lora_B" in n)
    assert result.stdout.count("step 3/3") == 1  # one process speaks


def test_two_processes_leave_the_idle_adapter_alone(tmp_path):
    arguments = ["--questions", "4", "--steps", "2", "--generator", "frozen", "--out", tmp_path / "run"]
    result = run_two_processes("tango.py", *SMALL, *arguments)
    assert result.returncode == 0, result.stderr
    assert all((t == 0).all() for n, t in weights(tmp_path / "run").items() if n.startswith("generator") and "lora_B" in n)


# ------------------------------------------------------------------ bad input: one sentence, exit code 2, no stack trace
def test_the_command_itself_ends_in_a_sentence(tmp_path):
    result = run_script(ROOT / "tango.py", "--dataset", "missing.jsonl", "--out", tmp_path / "run")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("error: ") == 1, result.stderr


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("--model no/such-model", "--model no/such-model"),
        ("--dataset no/such-dataset", "--dataset no/such-dataset"),
        ("--dataset missing.jsonl", "--dataset missing.jsonl: there is no such file"),
        ("--micro-batch 48", "--questions 16 times --group-size 8 is not a multiple of --micro-batch 48"),
        ("--questions 3 --group-size 1 --micro-batch 3", "--group-size"),
        ("--steps 0", "--steps 0 must be at least 1"),
        ("--eval-questions 0", "--eval-questions 0 must be at least 1"),
        ("--generator frozen --verifier none", "--generator frozen with --verifier none leaves nobody to train"),
        ("--gen-steps 0 --ver-steps 0", "--gen-steps 0 and --ver-steps 0"),
        ("--out /dev/null/run", "--out /dev/null/run: cannot be written"),
    ],
)
def test_arguments(arguments, says, tmp_path):
    assert says in refused("tango.py", *arguments.split(), *([] if "--out" in arguments else ["--out", tmp_path / "run"]))


@pytest.mark.parametrize(
    "line, says",
    [
        ('{"question": "1+1", "answer"', "row 2 is not JSON"),
        ("[1, 2]", "row 2 is not a JSON object"),
        ('{"question": "1+1"}', "row 2 has no answer"),
        ('{"answer": "2"}', "row 2 has no question"),
        ('{"question": "1+1", "answer": ""}', "row 2 has an empty answer"),
        ('{"question": "1+1", "answer": "so ####  "}', "row 2 has an empty answer"),
        ('{"question": "  ", "answer": "2"}', "row 2 has no question"),
    ],
)
def test_rows(line, says, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "1+2", "answer": "3"}\n' + line + "\n")
    message = refused("tango.py", "--dataset", path, "--out", tmp_path / "run")
    assert says in message and str(path) in message


@pytest.mark.parametrize("script", ["tango.py", "gar.py", "prime.py", "spin.py"])
def test_too_few_questions_for_one_step(script, tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{i}+1", "answer": "1", "reference": "1"}) for i in range(7)))
    message = refused(script, "--questions", "16", "--eval-questions", "2", "--dataset", path, "--out", tmp_path / "run")
    assert "training questions are too few for one step, see --questions 16" in message


def test_other_arguments_than_the_run_was_started_with(finished):
    folder, _ = finished
    before = weights(folder)
    message = refused("tango.py", *SMALL, "--out", folder, "--lr", "0.5")
    assert "was" not in message.split(":")[0] and "--lr" in message
    for name, tensor in weights(folder).items():
        assert torch.equal(tensor, before[name])


def test_a_loss_that_becomes_nan_stops_the_run(tmp_path):
    message = refused("tango.py", *SMALL, "--lr", "1e30", "--save-every", "1", "--out", tmp_path / "run")
    assert "the generator's" in message or "the verifier's" in message
    assert "step " in message
    kept = sorted((tmp_path / "run").glob("checkpoint-*"))
    assert kept and all(torch.isfinite(t).all() for t in weights(kept[0]).values())
