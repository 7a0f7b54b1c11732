"""Several players in one trainer: what must not move does not, and nobody plays as another."""

import contextlib
import dataclasses
import functools

from common.checked import Player
from common.core.errors import ScriptError, UserError
from common.core.plain import READ_AT_ONCE
from common.run.launch import WITHOUT_EFFECT, check_config

import pytest
import torch
from conftest import lora, make_players, moved
from peft.tuners.lora import Linear
from trainers import a_batch, four_players
from trl import GRPOConfig


def rollouts(trainer, names: list[str]) -> list[dict]:
    return [a_batch(trainer, name) for name in names]


# ------------------------------------------------------------------ whose turn it is
def state(trainer):
    """The active adapter, whether it is off, and whose parameters get a gradient."""
    named = trainer.model.named_parameters()
    trainable = {name.split(".")[-2] for name, p in named if p.requires_grad}
    off = {m.disable_adapters for m in trainer.model.modules() if isinstance(m, Linear)}
    return trainer.model.active_adapter, off, trainable


@pytest.mark.parametrize("fails", [False, True])
def test_playing_sets_the_adapter_and_puts_everything_back(tmp_path, fails):
    trainer = four_players(tmp_path)
    trainer.model.set_adapter("bob")
    for name, adapter in (("ann", "ann"), ("bob", "bob"), ("cat", "bob")):
        with contextlib.suppress(ZeroDivisionError), trainer.playing("ann"), trainer.playing(name):
            assert state(trainer) == (adapter, {False}, {adapter})
            with trainer.playing(None):
                assert state(trainer)[1] == {True}
                assert not fails or 1 / 0
        assert state(trainer) == ("bob", {False}, {"bob"})


A_PLAYER = Player([], 1e-3, 8, 4)


def players(**fields) -> dict:
    return {"ann": dataclasses.replace(A_PLAYER, **fields)}


def names(**adapters: str) -> dict:
    return {name: dataclasses.replace(A_PLAYER, adapter=adapters[name]) for name in adapters}


def two(**fields) -> dict:
    """Two players with one adapter, the second of which differs in these."""
    ann = dataclasses.replace(A_PLAYER, adapter="it")
    return {"ann": ann, "bob": dataclasses.replace(ann, max_tokens=12, **fields)}


@pytest.mark.parametrize(
    "made, says",
    [
        (names(co="ann"), "a player cannot be called 'co': other metrics begin with it"),
        (names(ann="", eval="ann"), "a player cannot be called 'eval'"),
        (names(**{"ann/bob": "ann"}), "a player cannot be called 'ann/bob'"),
        # a batch of several players is called by their adapter: its metrics would be bob's
        (names(ann="bob", bob="it"), "'ann' plays with the adapter 'bob', the name of the player"),
        (two(lr=2e-3), "'ann' and 'bob' play with one adapter.*one lr"),
        (two(max_grad_norm=0.5), "'ann' and 'bob' play with one adapter.*one max_grad_norm"),
    ],
)
def test_players_that_cannot_be(tmp_path, made, says):
    with pytest.raises(ScriptError, match=says):
        make_players(tmp_path, made)


@pytest.mark.parametrize("field", ["learning_rate", "beta", "gradient_accumulation_steps"])
def test_fields_of_trls_config_that_would_be_ignored(field):
    assert set(WITHOUT_EFFECT.split()) <= {f.name for f in dataclasses.fields(GRPOConfig)}
    with pytest.raises(ScriptError, match=rf"GRPOConfig\({field}=...\) would have no effect"):
        check_config({field: 1, "adam_beta2": 0.9})


@pytest.mark.parametrize("names", [["pro", "proposer", "prover"], ["odel", "lay", "weight"]])
def test_names_that_are_parts_of_others_are_no_trouble(tmp_path, names):
    """Of one another, or of the base model's: adapters are told apart by the whole name."""
    trainer = make_players(tmp_path, dict.fromkeys(names, A_PLAYER))
    parts = [{id(p) for p in trainer.parameters_of(name)} for name in names]
    assert all(parts) and not parts[0] & parts[1] and not parts[0] & parts[2]
    assert sum(map(len, parts)) == sum("lora_" in n for n, _ in trainer.model.named_parameters())


# ------------------------------------------------------------------ what moves
@pytest.mark.parametrize("kl, four_bit", [(0.0, True), (0.1, False)])
def test_each_step_moves_who_is_trained_and_the_others_by_exactly_zero(tmp_path, kl, four_bit):
    """Also when Adam has momentum for all of them; on a base in NF4 as well. A flat batch, whose
    advantages are all zero, moves nobody; where there is a KL term, its player follows this term.
    """
    order = [["ann"], ["bob"], ["ann", "bob"], ["bob"], ["bob", "ann"], ["ann"], ["bob", "cat"]]
    order += [["ann", "flat bob"], ["bob", "flat ann"]]
    seen = []

    def step(trainer, rows):
        seen.append({name: lora(trainer, name) for name in ("ann", "bob")})
        turn = order[trainer.state.global_step]
        batches = rollouts(trainer, [name.split()[-1] for name in turn])
        for name, batch in zip(turn, batches):
            batch.advantages *= not name.startswith("flat ")
        return batches

    sizes = {"kl": kl, "steps": len(order), "micro_batch": 3}
    trainer = four_players(tmp_path, step, four_bit=four_bit, **sizes)
    layers = [m for m in trainer.model.modules() if type(m).__name__ == "Linear4bit"]
    assert bool(layers) == four_bit

    def frozen():
        return {n: p.clone() for n, p in trainer.model.named_parameters() if "lora_" not in n}

    base = frozen()
    groups = trainer.create_optimizer().param_groups
    rates = [(group["adapter"], group["lr"], group["weight_decay"]) for group in groups]
    assert rates == [("ann", 1e-3, 0.0), ("bob", 2e-3, 0.0)]
    assert all(p.dtype == torch.float32 for group in groups for p in group["params"])
    trainer.train()
    seen.append({name: lora(trainer, name) for name in ("ann", "bob")})
    assert all(torch.equal(base[name], p) for name, p in frozen().items())
    logs = [row for row in trainer.state.log_history if "step_time" in row]
    assert (logs[-2]["bob/grad_norm"] == logs[-1]["ann/grad_norm"] == 0) == (kl == 0)
    for turn, before, after in zip(order, seen, seen[1:]):
        trained = {name.split()[-1] for name in turn if kl or not name.startswith("flat ")}
        assert (moved(before["ann"], after["ann"]) > 0) == ("ann" in trained)
        assert (moved(before["bob"], after["bob"]) > 0) == ("bob" in trained or "cat" in trained)


def test_a_schedule_moves_the_players_rate(tmp_path):
    """That of the optimiser, and the one that is logged."""
    used = []

    def step(trainer, rows):
        used.append(trainer.optimizer.param_groups[0]["lr"])
        return rollouts(trainer, ["ann"])

    trainer = make_players(tmp_path, players(), step, steps=4, lr_scheduler_type="linear")
    trainer.train()
    logs = [row for row in trainer.state.log_history if "step_time" in row]
    logged = [row["ann/learning_rate"] for row in logs]
    assert used == logged == pytest.approx([1e-3, 75e-5, 5e-4, 25e-5])


def test_a_resumed_run_gets_the_order_of_a_later_pass_over_the_data(tmp_path):
    """Four questions, two a step: after three steps the second pass has begun, after four it is
    over."""
    seen = {}

    def step(trainer, rows):
        asked = [row["question"] for row in rows[::4]]
        seen.setdefault(trainer, []).append(asked)
        batch = trainer.rollout("ann", rows)
        batch.advantages = torch.zeros(8)
        return [batch]

    def a_run(folder, resumed=None):
        often = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
        trainer = make_players(folder, players(), step, steps=8, **often)
        trainer.train_dataset = trainer.train_dataset.select(range(4))
        trainer.train(resume_from_checkpoint=resumed and str(resumed))
        return seen[trainer]

    whole = a_run(tmp_path / "whole")
    passes = [whole[i] + whole[i + 1] for i in (0, 2, 4, 6)]
    assert all(sorted(one) == sorted(passes[0]) for one in passes)
    assert passes[1] != passes[0] != passes[2]  # or the test could not fail
    for at in (3, 4):
        assert a_run(tmp_path / str(at), tmp_path / "whole" / f"checkpoint-{at}") == whole[at:]


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_gradient_that_is_no_number_stops_the_run_with_a_sentence(tmp_path, at):
    def step(trainer, rows):
        batches = rollouts(trainer, ["bob", "ann"])
        batches[at == "last"].advantages[3] = 3e38  # finite, but not the sum over its tokens
        return batches

    trainer = four_players(tmp_path, step)
    before = lora(trainer, "bob")
    whose = "ann" if at == "last" else "bob"
    with pytest.raises(UserError, match=rf"the {whose}'s grad_norm is (nan|inf).*--lr"):
        trainer.train()
    assert (moved(before, lora(trainer, "bob")) == 0) == (at == "first")  # stopped before it moves


# ------------------------------------------------------------------ sampling
@pytest.mark.parametrize("checkpointing", [False, True])
def test_transformers_generate_gives_the_same_texts_in_parts_and_chunks(
    trainer, monkeypatch, checkpointing
):
    """What a GPU does: a few rows at once, prompts read a few tokens at a time. Under checkpointing
    a layer would fill no cache."""
    trainer.model.set_adapter("verifier")
    prompts = [trainer.train_dataset[i]["prompt"] for i in range(5)]
    ours = trainer.generate("generator", prompts, greedy=True)
    assert trainer.model.active_adapter == "verifier" and all("<step>" in text for text in ours)
    base = trainer.model.get_base_model()
    calls, original = [], base.generate

    def counted(**inputs):
        calls.append((len(inputs["input_ids"]), inputs["generation_config"].prefill_chunk_size))
        return original(**inputs)

    monkeypatch.setattr(base, "generate", counted)
    monkeypatch.setitem(READ_AT_ONCE, "cpu", 8)
    monkeypatch.setattr("common.fast.sampling.has_plain_attention", lambda _: False)
    if checkpointing:
        trainer.model.gradient_checkpointing_enable()
        trainer.model.train()
    trainer.generation_batch_size = 2
    assert trainer.generate("generator", prompts, greedy=True) == ours
    assert calls == [(2, 8), (2, 8), (1, 8)]
    assert trainer.generate("generator", []) == []
    assert base.is_gradient_checkpointing == checkpointing


def test_adapters_compute_in_one_dtype_when_they_sample_and_when_they_are_scored(
    trainer, monkeypatch
):
    """On a GPU bfloat16, by accelerate's autocast."""
    bfloat16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    monkeypatch.setattr(trainer.accelerator, "autocast", bfloat16)
    monkeypatch.setattr("common.fast.sampling.has_plain_attention", lambda _: False)
    layer = next(m for m in trainer.model.modules() if isinstance(m, Linear))
    found = []
    layer.register_forward_hook(lambda _, __, out: found.append(out.dtype))
    rows = [trainer.train_dataset[0] for _ in range(4)]
    batch = trainer.rollout("generator", rows)
    sampled, found[:] = set(found), []
    trainer.log_probs("generator", batch)
    assert sampled == set(found) == {torch.bfloat16}
