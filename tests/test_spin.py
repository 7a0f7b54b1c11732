"""spin.py: its loss against TRL's DPO trainer, its outer loop, its traps."""

import json
import math
import shutil
from types import SimpleNamespace

from spin import Args, Spin, learning_rate_at, shuffled, spin_loss

import pytest
import torch
from conftest import refused, run_script, run_two_processes
from safetensors.torch import load_file


def test_the_loss_is_ln2_and_rewards_are_zero_while_player_and_opponent_are_the_same():
    logps = torch.tensor([-3.0, -40.0]), torch.tensor([-7.0, -0.5])
    loss, real, generated = spin_loss(logps[0], logps[0], logps[1], logps[1], 0.1)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-7) and not real.any() and not generated.any()


def test_the_loss_equals_the_loop_and_its_gradient_pushes_the_right_way():
    g = torch.Generator().manual_seed(0)
    a, b, c, d = (torch.randn(6, generator=g, dtype=torch.float64) * 5 for _ in range(4))
    h = [0.3 * ((a[i] - b[i]) - (c[i] - d[i])).item() for i in range(6)]
    expected = sum(math.log(1 + math.exp(-x)) for x in h) / 6
    a.requires_grad_(), c.requires_grad_()
    loss, *_ = spin_loss(a, b, c, d, 0.3)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    loss.backward()
    assert (a.grad < 0).all() and (c.grad > 0).all()
    assert torch.isfinite(spin_loss(a * 1e6, b, c, d, 5.0)[0])


def test_equal_to_trls_dpo_sigmoid_loss(tmp_path):
    """The whole of TRL's DPOTrainer on the same pairs, opponent = reference model."""
    from common.model import TINY

    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    player, opponent = (AutoModelForCausalLM.from_pretrained(TINY) for _ in range(2))
    with torch.no_grad():
        for p in player.parameters():
            p += 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    pairs = [("3+4 mod 10", "<step>3+4=7</step>", "<step>3+4=8</step>\n<step>8</step>"), ("(1+2)*3 mod 10", "<step>1", "9")]
    say = lambda role, text: [{"role": role, "content": text}]  # noqa: E731
    rows = [{"prompt": say("user", q), "chosen": say("assistant", a), "rejected": say("assistant", b)} for q, a, b in pairs]
    config = DPOConfig(str(tmp_path), beta=0.1, loss_type="sigmoid", report_to="none", bf16=False, gradient_checkpointing=False)
    trainer = DPOTrainer(player, opponent, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    batch = trainer._prepare_inputs(trainer.data_collator([trainer.train_dataset[i] for i in range(2)]))
    trainer.model.eval()
    theirs = trainer.compute_loss(trainer.model, batch)

    def logp(model, question, answer):
        prompt = tokenizer(f"<|user|>{question}<|assistant|>").input_ids
        ids = prompt + tokenizer(f"{answer}<|end|>").input_ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[len(prompt) :])[:, None]).sum()

    columns = [
        torch.stack([logp(model, q, answers[which]) for q, *answers in pairs])
        for which in (0, 1)
        for model in (player, opponent)
    ]
    assert spin_loss(*columns, 0.1)[0].item() == pytest.approx(theirs.item(), abs=1e-5)
    assert abs(theirs.item() - math.log(2)) > 1e-3  # the models do differ


def test_schedule():
    rates = [learning_rate_at(step, 20) for step in range(80)]
    assert rates[0] == rates[20] == 0.5 and rates[1] == rates[21] == 1.0  # warm-up over a tenth, every iteration anew
    assert rates[1] > rates[10] > rates[19] > 0
    assert [r / rates[i] for i, r in enumerate(rates[40:60])] == pytest.approx([0.2] * 20)
    assert all(learning_rate_at(step, 1) > 0 for step in range(4))


def test_every_pass_has_every_pair_once_in_an_order_of_its_own():
    assert sorted(shuffled(50, 1, 0)) == list(range(50)) and shuffled(50, 1, 0) != shuffled(50, 1, 1) != shuffled(50, 2, 0)


@pytest.mark.parametrize("count", [5, 16, 17, 40])
def test_processes_get_prompts_of_their_own_and_as_many_each(count):
    def prompts(rank):
        accelerator = SimpleNamespace(num_processes=2, process_index=rank)
        trainer = SimpleNamespace(script=Args(questions=8), length=2, train_dataset=range(count), accelerator=accelerator)
        return Spin.prompts_of(trainer, 0)

    first, second = prompts(0), prompts(1)
    assert len(first) == len(second) == min(8, count // 2) and not set(first) & set(second)


# ------------------------------------------------------------------ the script
SMALL = "--steps 6 --iterations 3 --questions 8 --micro-batch 4 --lr 1e-4 --eval-questions 8".split()
SMALL += "--save-every 1 --eval-every 0".split()


def steps(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval/pla/accuracy" not in row]


def weights(folder):
    files = {player: load_file(folder / player / "adapter_model.safetensors") for player in ("player", "ref")}
    return {f"{player}.{name}": tensor for player, state in files.items() for name, tensor in state.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spin") / "whole"
    result = run_script("spin.py", *SMALL, "--out", folder)
    assert result.returncode == 0, result.stderr
    return folder


def test_the_opponent_is_frozen_anew_in_every_iteration(finished):
    """Steps 1, 3 and 5 open iterations: loss ln 2, rewards 0, to float32 rounding of a sum of log-probs times lambda = 5."""
    for row in steps(finished):
        opens = row["step"] % 2 == 1
        assert (abs(row["pla/spin_loss"] - math.log(2)) < 1e-4) == opens, row["step"]
        assert (abs(row["pla/reward_human"]) < 1e-4 and abs(row["pla/reward_generated"]) < 1e-4) == opens


@pytest.fixture(scope="module")
def one_step_iterations(tmp_path_factory):
    """Four iterations of one step each; the last two checkpoints are of two iterations."""
    folder = tmp_path_factory.mktemp("spin") / "short"
    result = run_script("spin.py", *SMALL, "--steps", "4", "--iterations", "4", "--out", folder)
    assert result.returncode == 0, result.stderr
    return folder


def test_the_opponent_is_the_player_as_the_iteration_before_left_it(one_step_iterations):
    before = load_file(one_step_iterations / "checkpoint-3" / "player" / "adapter_model.safetensors")
    opponent = load_file(one_step_iterations / "checkpoint-4" / "ref" / "adapter_model.safetensors")
    assert all(torch.equal(before[name], opponent[name]) for name in before)


def test_previous_pairs_are_mixed_in_and_cut_answers_get_no_end(one_step_iterations):
    from common.model import TINY

    from transformers import AutoTokenizer

    memory, before = (json.loads((one_step_iterations / f"checkpoint-{n}" / "memory.json").read_text()) for n in (4, 3))
    assert memory["previous_pairs"] == before["pairs"] and (before["iteration"], memory["iteration"]) == (2, 3)
    end = AutoTokenizer.from_pretrained(TINY).eos_token_id
    for pair in memory["pairs"]["0"] + memory["previous_pairs"]["0"]:
        assert pair["real"][-1] == end
        assert pair["generated"][-1] == end or len(pair["generated"]) == 64


def test_an_answer_cut_at_the_limit_keeps_its_cut(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(
        "\n".join(json.dumps({"question": f"({i}+4)*3 mod 10", "answer": "1", "reference": "short"}) for i in range(200))
    )
    result = run_script("spin.py", *SMALL, "--dataset", data, "--solution-tokens", "8", "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    memory = json.loads((tmp_path / "run" / "checkpoint-6" / "memory.json").read_text())
    assert any(len(pair["generated"]) == 8 for pair in memory["pairs"]["0"])
    assert all(pair["generated"].count(4) == 0 for pair in memory["pairs"]["0"] if len(pair["generated"]) == 8)


@pytest.mark.parametrize("every, at", [(1, 5), (2, 4)])  # in the middle of an iteration, and between two
def test_resume_is_the_same_run_bit_for_bit(finished, tmp_path, every, at):
    folder = tmp_path / "resumed"
    result = run_script("spin.py", *SMALL, "--save-every", every, "--out", folder)
    assert result.returncode == 0
    shutil.rmtree(folder / "checkpoint-6")
    result = run_script("spin.py", *SMALL, "--save-every", every, "--out", folder)
    assert result.returncode == 0, result.stderr
    assert f"step {at + 1}/6" in result.stdout and f"step {at}/6" not in result.stdout
    ours, expected = weights(folder), weights(finished)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "flags", ["--no-mix-previous", "--opponent sft", "--opponent none", "--opponent-temperature 0 --questions 24"]
)
def test_variants(tmp_path, flags):
    result = run_script("spin.py", *SMALL, *flags.split(), "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    trained = weights(tmp_path / "run")
    assert any(t.abs().max() > 0 for n, t in trained.items() if n.startswith("player") and "lora_B" in n)
    if "sft" in flags or "none" in flags:
        assert all((t == 0).all() for n, t in trained.items() if n.startswith("ref") and "lora_B" in n)


def test_continued_sft_is_a_mean_over_the_tokens_of_the_step_however_it_is_cut(tmp_path):
    first = []
    for micro_batch in ("8", "2"):
        flags = ["--opponent", "none", "--steps", "3", "--micro-batch", micro_batch, "--out", tmp_path / micro_batch]
        result = run_script("spin.py", *SMALL, *flags)
        assert result.returncode == 0, result.stderr
        first.append(steps(tmp_path / micro_batch)[0])
    assert first[0]["pla/loss"] == pytest.approx(first[1]["pla/loss"], rel=1e-4)
    assert first[0]["pla/grad_norm"] == pytest.approx(first[1]["pla/grad_norm"], rel=1e-4)


def test_two_processes(tmp_path):
    result = run_two_processes("spin.py", *SMALL, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["processes"] == 2
    opening = [row["pla/spin_loss"] for row in steps(tmp_path / "run") if row["step"] % 2 == 1]
    assert opening == pytest.approx([math.log(2)] * 3, abs=1e-4)


def test_human_answers_missing_or_too_long(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"question": f"{i}+4 mod 10", "answer": "1", "reference": "<step>1</step>" if i % 3 else ""} for i in range(200)]
    rows += [{"question": f"{i}*4 mod 10", "answer": "1", "reference": "1" * 70} for i in range(10)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    result = run_script("spin.py", *SMALL, "--dataset", path, "--out", tmp_path / "run")
    assert result.returncode == 0 and "have no human answer" in result.stdout, result.stderr
    path.write_text("\n".join(json.dumps({**row, "reference": ""}) for row in rows))
    message = refused("spin.py", *SMALL, "--dataset", path, "--out", tmp_path / "other")
    assert "no question has a human answer" in message
    message = refused("spin.py", "--steps", "5", "--out", tmp_path / "third")
    assert "--steps 5 is not a multiple of --iterations 4" in message
    assert "--questions 3 must be even" in refused("spin.py", "--questions", "3", "--micro-batch", "3", "--out", tmp_path / "4")
