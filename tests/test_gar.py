"""gar.py's own rules: slices, verdicts, both rewards; and the script."""

import json
import math
import shutil
from types import SimpleNamespace

import gar
from gar import Args, Gar, are_sound, discriminator_rewards, parse_verdict, reasoner_reward, reasoning, slice_reasoning

import pytest
import torch
from conftest import make_trainer, refused, run_script, run_two_processes
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

words = lambda text: len(text.split())  # noqa: E731
characters = len


# ------------------------------------------------------------------ slices
@given(st.lists(st.sampled_from(list("ab .\n\t!?é漢🙂") + ["Wait, ", "So ", "Therefore "]), max_size=200).map("".join))
@settings(max_examples=300, deadline=None)
def test_nothing_is_lost_and_nothing_is_too_long(text):
    for limit, least in ((7, 1), (20, 5), (1, 1), (1000, 10)):
        slices = slice_reasoning(text, characters, limit, least)
        assert "".join(slices) == text and all(slices)
        assert all(characters(part) <= limit for part in slices)


@pytest.mark.parametrize(
    "text",
    ["x" * 10_000, "\n" * 500, "word " * 3000, "🙂" * 400, "", "\n", "So So So So " * 50, "a\r\nb\u2028c\n", "<step>" * 200],
    ids=["one line", "newlines", "no cues", "emoji", "empty", "newline", "cues", "odd breaks", "tags"],
)
def test_hostile_text(text):
    slices = slice_reasoning(text, characters, 64, 8)
    assert "".join(slices) == text and all(0 < len(part) <= 64 for part in slices)


def test_lines_are_merged_up_to_the_limit():
    text = "one two\nthree four\nfive six\nseven\n"
    assert slice_reasoning(text, words, 4, 1) == ["one two\nthree four\n", "five six\nseven\n"]
    assert slice_reasoning(text, words, 100, 1) == [text]


def test_a_cue_ends_a_slice_that_is_long_enough():
    text = "We add them. Wait, that is wrong. So we subtract. The end."
    assert slice_reasoning(text, words, 100, 3) == ["We add them. ", "Wait, that is wrong. ", "So we subtract. The end."]
    assert slice_reasoning(text, words, 100, 5) == ["We add them. Wait, that is wrong. ", "So we subtract. The end."]
    assert slice_reasoning("Somebody said so. Sofia agreed.", words, 100, 1) == ["Somebody said so. Sofia agreed."]


def test_only_the_reasoning_is_sliced():
    assert reasoning("<step>1</step>\n<answer>\\boxed{1}</answer>") == "<step>1</step>\n"
    hiding = "ok.\n<answer></answer>\n<step>3+4=9</step>\n<answer>\\boxed{7}</answer>"
    assert "3+4=9" in reasoning(hiding)  # the box that counts is the last one, so what stands before it is reasoning


# ------------------------------------------------------------------ verdicts and rewards
@pytest.mark.parametrize(
    "text, verdict",
    [
        ("fine **YES** every step holds", 1),
        ("**NO** a step is wrong; **YES** would need 8", 0),
        ("YES", None),
        ("**yes**", None),
        ("** YES **", None),
        ("", None),
        ("**YE", None),
        ("**NOT** sure **YES**", 1),
        ("***YES***", 1),
    ],
)
def test_parse_verdict(text, verdict):
    assert parse_verdict(text) == verdict


def test_reasoner_reward():
    got = reasoner_reward([1, 0, 1, 0], [[1, 1, 0, 0], [1], [], [None, 1]])
    assert got == pytest.approx([1.5, 1.0, 1.0, 0.5])  # mean, not sum; no slices = 0; no verdict = 0
    assert reasoner_reward([0], [[1.0, 0.25, None]]) == pytest.approx([1.25 / 3])  # shares of several judgements


def test_every_slice_counts_once_however_often_it_is_judged(monkeypatch):
    """R_s = mean over slices of r_gi: the slice with M judgements weighs no more than those with one."""
    trainer = SimpleNamespace(script=Args(group_size=2), log_metric=lambda *_: None, gather=lambda x: x)
    batch = {"rewards": torch.tensor([1.0, 0.0]), "texts": ["three", "blank"], "notes": [{"rewards": {}}, {"rewards": {}}]}
    trainer.turn = lambda *_: batch
    trainer.slices = lambda text: ["a", "b", "c"] if text == "three" else []
    trainer.judge = lambda *_: [[1, 1, 1, 1, 1, 1, None, 0], [0], [None]]
    trainer.become = lambda name: None
    seen = []
    monkeypatch.setattr(gar, "reasoner_reward", lambda *a: seen.append(reasoner_reward(*a)) or seen[-1])
    Gar._generate_and_score_completions(trainer, [{"question": "?"}] * 2)
    assert seen == [pytest.approx([1.0 + 0.75 / 3, 0.0])]
    assert batch["notes"][0]["verdicts"] == [0.75, 0, 0] and batch["notes"][0]["parts"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "kind, expected",
    [("both", {"ref": 1.0, "right": -0.5, "wrong": -1.5}), ("adversarial", {"ref": 1.0, "right": -1.0, "wrong": -1.0})],
)
def test_both_rewards_are_heard_in_the_discriminators_advantages(kind, expected):
    """YES minus NO, in units of the batch's std. Normalised slice by slice all of them would be +-1, and R_a unheard."""
    rows = [{"question": "?", "reference": "ref"}] * 8  # P = 4, M = 2: two slices of each kind
    generated, updates = [(0, "right"), (2, "wrong")], []
    trainer = SimpleNamespace(
        script=Args(group_size=2, reward=kind),
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(process_index=0),
        gather=lambda values: values,
        log_metric=lambda *_: None,
        log_verdicts=lambda *_: None,
        slices=lambda text: [text],
        act=lambda *_: [],
        update=updates.append,
    )

    def turn(_, asked):
        texts = ["**YES**", "**NO**"] * (len(asked) // 2)
        columns = {name: [row[name] for row in asked] for name in ("reference", "right", "kind")}
        rewards = gar.judgement_reward([[{"content": text}] for text in texts], **columns)
        return {"rewards": torch.tensor(rewards), "texts": texts, "notes": [{} for _ in asked], "asked": asked}

    trainer.turn = turn
    assert Gar.judge(trainer, rows, [1, 1, 0, 0, 0, 0, 0, 0], generated) == [[1, 0], [1, 0]]
    A, rewards = updates[0]["advantages"].reshape(-1, 2), updates[0]["rewards"]
    for (yes, no), row in zip(A.tolist(), updates[0]["asked"][::2]):
        which = "ref" if row["reference"] else "right" if row["right"] else "wrong"
        assert yes - no == pytest.approx(expected[which] / rewards.std().item(), rel=1e-4) and yes + no == pytest.approx(0)


def test_white_space_is_no_slice():
    trainer = SimpleNamespace(script=Args(slice_tokens=4, min_slice_tokens=1), count_tokens=lambda text: len(text.split()))
    assert Gar.slices(trainer, "\n\n\n<answer>\\boxed{1}</answer>") == []
    assert Gar.slices(trainer, "one two three four\n\n\nfive") == ["one two three four\n\n\n", "five"]


def test_are_sound():
    question = "((3+4)*6)-5 mod 10"
    parts = ["<step>3+4=7</step>\n", "<step>7*6=3</step>\n<step>3-", "5=8</step>\n", "so\n"]
    assert are_sound(question, parts) == [True, False, True, None]  # the third carries on correctly; nothing ends in the last
    assert are_sound(question, ["gibberish 3+4=7\n"]) == [None] and are_sound("Who?", parts) == [None] * 4


def test_discriminator_rewards_in_every_case():
    #             reference        generated, right  generated, wrong  silent
    verdicts = [1, 0, 1, 0, 1, 0, None, None, None]
    reference = [True, True, False, False, False, False, True, False, False]
    right = [None, None, True, True, False, False, None, True, False]
    assert discriminator_rewards(verdicts, reference, right) == [1.0, 0.0, 0.5, 1.0, 0.0, 1.5, 0.0, 0.0, 0.0]
    assert discriminator_rewards(verdicts, reference, right, "adversarial") == [1, 0, 0, 1, 0, 1, 0, 0, 0]
    assert discriminator_rewards(verdicts, reference, right, "alignment") == [0, 0, 0.5, 0, 0, 0.5, 0, 0, 0]


# ------------------------------------------------------------------ the second player's update inside a step
def test_update_moves_its_adapter_alone_and_like_the_trainers_own_step(tmp_path):
    """CoTrainer.update against a plain AdamW step on the gradient of the same batch."""
    trainer = make_trainer(tmp_path)
    trainer.create_optimizer()
    trainer.model.train()
    batch = trainer.turn("generator", [trainer.train_dataset[0]] * 4 + [trainer.train_dataset[1]] * 4)
    batch["advantages"] = torch.linspace(-1, 1, 8)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}).backward()
    grads = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad(set_to_none=True)
    trainer.update(dict(batch))
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    for name, p in trainer.model.named_parameters():
        if name in grads:  # the first AdamW step: lr * g / (|g| + eps)
            g = grads[name] * min(1.0, 1.0 / (norm.item() + 1e-6))
            expected = before[name] - 1e-3 * g / (g.abs() + 1e-8)
            assert (p - expected).abs().max() <= 2e-5 or (g.abs() < 1e-6).any()
        else:
            assert torch.equal(p, before[name])
    assert all(p.grad is None for p in trainer.model.parameters())


# ------------------------------------------------------------------ the script
SMALL = "--steps 4 --questions 2 --group-size 4 --micro-batch 4 --eval-questions 8 --save-every 2 --show-every 2".split()


def weights(folder):
    files = {player: load_file(folder / player / "adapter_model.safetensors") for player in ("reasoner", "discriminator")}
    return {f"{player}.{name}": tensor for player, state in files.items() for name, tensor in state.items()}


def moved(folder, player):
    return any(t.abs().max() > 0 for n, t in weights(folder).items() if n.startswith(player) and "lora_B" in n)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gar") / "whole"
    result = run_script("gar.py", *SMALL, "--out", folder)
    assert result.returncode == 0, result.stderr
    return folder


def test_a_run_trains_both_in_every_step(finished):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "eval/rea/accuracy" not in row]
    for row in rows:
        for key in (
            "rea/accuracy",
            "rea/total_reward",
            "dis/says_yes",
            "dis/yes_reference",
            "dis/silent",
            "dis/spread_in_groups",
            "dis/updated",
        ):
            assert math.isfinite(row[key])
    assert any("dis/grad_norm" in row for row in rows)
    assert moved(finished, "reasoner") and moved(finished, "discriminator")


def test_resume_is_the_same_run_bit_for_bit(finished, tmp_path):
    folder = tmp_path / "resumed"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoint-4")
    result = run_script("gar.py", *SMALL, "--out", folder)
    assert result.returncode == 0 and "step 3/4" in result.stdout and "step 2/4" not in result.stdout, result.stderr
    ours, expected = weights(folder), weights(finished)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "flags", ["--discriminator frozen", "--discriminator none", "--reward alignment", "--reward adversarial"]
)
def test_ablations(tmp_path, flags):
    result = run_script("gar.py", *SMALL, "--steps", "3", *flags.split(), "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert moved(tmp_path / "run", "reasoner")
    if "discriminator" in flags:
        assert not moved(tmp_path / "run", "discriminator")


def test_two_processes(tmp_path):
    result = run_two_processes("gar.py", *SMALL, "--steps", "3", "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["processes"] == 2
    assert moved(tmp_path / "run", "reasoner") and moved(tmp_path / "run", "discriminator")


def test_stage_one_from_a_file(tmp_path):
    rows = [
        {"question": "3+4 mod 10", "slice": f"<step>3+4={r}</step>\n", "label": "YES" if r == 7 else "NO", "rationale": " ok"}
        for r in (7, 8, 7, 5, 7)
    ]
    path = tmp_path / "labels.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    result = run_script("gar.py", *SMALL, "--steps", "1", "--sft-labels", path, "--out", tmp_path / "run")
    assert result.returncode == 0 and "stage 1: 5 labels" in result.stdout, result.stderr
    path.write_text(json.dumps({**rows[0], "label": "MAYBE"}))
    message = refused("gar.py", *SMALL, "--sft-labels", path, "--out", tmp_path / "other")
    assert "row 1 needs question, slice, and label YES or NO" in message
    path.write_text(json.dumps(rows[0]))
    message = refused("gar.py", *SMALL, "--sft-labels", path, "--out", tmp_path / "other")
    assert "does not have both labels" in message


def test_one_question_has_no_room_for_a_reference(tmp_path):
    message = refused("gar.py", *SMALL, "--questions", "1", "--micro-batch", "4", "--out", tmp_path / "run")
    assert "--questions 1" in message and not (tmp_path / "run").exists()


def test_no_references_and_a_silent_discriminator_end_in_a_sentence(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{i}+4 mod 10", "answer": str((i + 4) % 10)}) for i in range(60)))
    message = refused("gar.py", *SMALL, "--dataset", path, "--out", tmp_path / "run")
    assert "no question has a reference solution" in message
    message = refused("gar.py", *SMALL, "--judgement-tokens", "2", "--out", tmp_path / "other")
    assert "have no **YES** or **NO**" in message
