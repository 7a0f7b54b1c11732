"""Several players in one trainer: what must not move does not, and nobody plays as another."""

import dataclasses
import functools

from common.cotrainer import Player
from common.errors import UserError
from tango import solve_prompt, verify_prompt

import pytest
import torch
from conftest import gradients, lora, make_players, moved
from peft.tuners.lora import Linear
from transformers.trainer_utils import IntervalStrategy


def one_reward(completions, **_):
    return [1.0] * len(completions)


def other_reward(completions, **_):
    return [2.0] * len(completions)


def a_trainer(folder, step=None, **more):
    """Three players: `ann` and `bob` with adapters of their own, `cat` with bob's."""
    players = {
        "ann": Player([one_reward], 1e-3, 8, group_size=4),
        "bob": Player([other_reward, one_reward], 2e-3, 16, 2, temperature=0.7, max_grad_norm=0.5),
        "cat": Player([], 2e-3, 4, 1, temperature=0.0, adapter="bob", max_grad_norm=0.5),
    }
    return make_players(folder, players, step, **more)


# ------------------------------------------------------------------ whose turn it is
def state(trainer) -> dict:
    settings = trainer.generation_config
    return {
        "player": trainer.player,
        "adapter": trainer.model.active_adapter,
        "trainable": {n for n, p in trainer.model.named_parameters() if p.requires_grad},
        "off": {m.disable_adapters for m in trainer.model.modules() if isinstance(m, Linear)},
        "group": trainer.num_generations,
        "limit": (trainer.max_completion_length, settings.max_new_tokens),
        "temperature": (trainer.temperature, settings.do_sample, settings.temperature),
        "rewards": (trainer.reward_funcs, trainer.reward_func_names, len(trainer.reward_weights)),
        "clipping": trainer.args.max_grad_norm,
    }


def test_every_player_has_what_it_was_given(tmp_path):
    trainer = a_trainer(tmp_path)
    with trainer.playing("ann"):
        ann = state(trainer)
    with trainer.playing("bob"):
        bob = state(trainer)
    with trainer.playing("cat"):
        cat = state(trainer)
    keys = "adapter", "group", "limit", "clipping"
    given = [[one[key] for key in keys] for one in (ann, bob, cat)]
    assert given[0] == ["ann", 4, (8, 8), 1.0]
    assert given[1] == ["bob", 2, (16, 16), 0.5]
    assert given[2] == ["bob", 1, (4, 4), 0.5]
    assert ann["temperature"] == (1.0, True, 1.0) and bob["temperature"] == (0.7, True, 0.7)
    assert cat["temperature"] == (1.0, False, 1.0)  # greedy, scored as it is
    assert ann["rewards"] == ([one_reward], ["one_reward"], 1)
    assert bob["rewards"] == ([other_reward, one_reward], ["other_reward", "one_reward"], 2)
    assert cat["rewards"][1:] == (["unpaid"], 1)
    trained = {n for n, _ in trainer.model.named_parameters() if "lora_" in n}
    # DDP and AdamW fix their list of parameters at the start
    assert ann["trainable"] == bob["trainable"] == trained


@pytest.mark.parametrize("name", ["ann", "bob", "cat", None])
@pytest.mark.parametrize("fails", [False, True])
def test_playing_puts_everything_back(tmp_path, name, fails):
    trainer = a_trainer(tmp_path)
    trainer._become("bob")
    before = state(trainer)
    try:
        with trainer.playing("ann"), trainer.playing(name):
            inside = state(trainer)
            trainer._set_sampling(3, 0.0)
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert inside["player"] == (name or "ann") and inside["off"] == {name is None}
    assert state(trainer) == before and before["off"] == {False}


@pytest.mark.parametrize("call", ["playing", "rollout", "generate", "log_probs"])
def test_a_player_that_does_not_exist(tmp_path, call):
    trainer = a_trainer(tmp_path)
    trainer._become("bob")
    before = state(trainer)
    row = {"prompt": [{"role": "user", "content": "1+2 mod 100"}]}
    calls = {
        "playing": lambda: trainer.playing("dan").__enter__(),
        "rollout": lambda: trainer.rollout("dan", [row] * 4),
        "generate": lambda: trainer.generate("dan", [row["prompt"]]),
        "log_probs": lambda: trainer.log_probs("dan", {}),
    }
    with pytest.raises(ValueError, match="no player 'dan'; there are ann, bob, cat"):
        calls[call]()
    assert state(trainer) == before


@pytest.mark.parametrize(
    "players, says",
    [
        ({"co": "ann"}, "a player cannot be called 'co': other metrics begin with it"),
        ({"ann": "", "eval": "ann"}, "a player cannot be called 'eval'"),
        ({"ann/bob": "ann"}, "a player cannot be called 'ann/bob'"),
        # a batch of several players is called by their adapter: its metrics would be bob's
        ({"ann": "bob", "bob": "it"}, "'ann' plays with the adapter 'bob', the name of the player"),
    ],
)
def test_names_that_metrics_would_mix_up(tmp_path, players, says):
    made = {name: Player([], 1e-3, 8, 4, adapter=adapter) for name, adapter in players.items()}
    with pytest.raises(ValueError, match=says):
        make_players(tmp_path, made)


@pytest.mark.parametrize(
    "rewards",
    [one_reward, None, [None], [functools.partial(one_reward)]]
    + [[one_reward, one_reward], [lambda **_: [1.0], lambda **_: [2.0]]],
)
def test_reward_functions_are_logged_by_their_names(tmp_path, rewards):
    with pytest.raises(ValueError, match="rewards of 'ann' must be a list of functions with names"):
        make_players(tmp_path, {"ann": Player(rewards, 1e-3, 8, 4)})


@pytest.mark.parametrize("what", [{"lr": 2e-3}, {"max_grad_norm": 0.5}])
def test_one_adapter_has_one_rate_and_one_norm(tmp_path, what):
    players = {"ann": Player([], 1e-3, 8, 4, adapter="it")}
    players["bob"] = dataclasses.replace(players["ann"], max_tokens=12, **what)
    (name,) = what
    with pytest.raises(ValueError, match=f"'ann' and 'bob' play with one adapter.*one {name}"):
        make_players(tmp_path, players)


@pytest.mark.parametrize(
    "field, says",
    [
        ({"learning_rate": 1e-4}, r"learning_rate=.*each Player, as lr"),
        ({"temperature": 0.7}, r"temperature=.*each Player, as temperature"),
        ({"max_completion_length": 64}, "each Player, as max_tokens"),
        ({"max_grad_norm": 0.3}, "each Player, as max_grad_norm"),
        ({"beta": 0.04}, r"beta=.*`kl` an argument of the trainer"),
        ({"loss_type": "grpo"}, "loss_type"),
        ({"epsilon_high": 0.28}, "epsilon_high"),
        ({"scale_rewards": "none"}, "scale_rewards"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights"),
        ({"num_iterations": 2}, "num_iterations must be 1"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, "equal"),
    ],
)
def test_fields_of_trls_config_that_would_be_ignored(tmp_path, field, says):
    with pytest.raises(ValueError, match=says):
        make_players(tmp_path, {"ann": Player([], 1e-3, 8, 4)}, **field)


def test_a_run_that_goes_on_in_a_later_pass_over_the_data_gets_that_passes_order(tmp_path):
    """Four questions, two a step: after three steps the second pass has begun, after four it is
    over."""
    seen = {}

    def step(trainer, rows):
        asked = [row["question"] for row in rows[::4]]
        seen.setdefault(trainer, []).append(asked)
        batch = trainer.rollout("ann", rows)
        return [batch | {"advantages": torch.zeros(8)}]

    def a_run(folder, resumed=None):
        trainer = make_players(folder, {"ann": Player([], 1e-3, 8, 4)}, step, steps=8)
        trainer.train_dataset = trainer.train_dataset.select(range(4))
        trainer.args.save_strategy, trainer.args.save_steps = IntervalStrategy.STEPS, 1
        trainer.args.save_total_limit = None
        trainer.train(resume_from_checkpoint=resumed and str(resumed))
        return seen[trainer]

    whole = a_run(tmp_path / "whole")
    passes = [whole[i] + whole[i + 1] for i in (0, 2, 4, 6)]
    assert all(sorted(one) == sorted(passes[0]) for one in passes)
    assert passes[1] != passes[0] != passes[2]  # or the test could not fail
    for at in (1, 2, 3, 4, 6):
        assert a_run(tmp_path / str(at), tmp_path / "whole" / f"checkpoint-{at}") == whole[at:]


@pytest.mark.parametrize("names", [["pro", "proposer", "prover"], ["odel", "lay", "weight"]])
def test_names_that_are_parts_of_others_are_no_trouble(tmp_path, names):
    """Of one another, or of the base model's: adapters are told apart by the whole name."""
    trainer = make_players(tmp_path, {name: Player([], 1e-3, 8, 4) for name in names})
    parts = [{id(p) for p in trainer._parameters_of(name)} for name in names]
    assert all(parts) and not parts[0] & parts[1] and not parts[0] & parts[2]
    assert sum(map(len, parts)) == sum("lora_" in n for n, _ in trainer.model.named_parameters())


# ------------------------------------------------------------------ what moves
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_each_step_moves_who_is_trained_and_the_others_by_exactly_zero(tmp_path, kl):
    """Also when Adam has momentum for all of them, and when one is trained at once, by `update`,
    and the other by Trainer's own step.
    """
    order = [["ann"], ["bob"], ["ann", "bob"], ["bob"], ["bob", "ann"], ["ann"], ["bob", "cat"]]
    seen = []

    def step(trainer, rows):
        seen.append({name: lora(trainer, name) for name in ("ann", "bob")})
        batches = [trainer.rollout(name, rows) for name in order[trainer.state.global_step]]
        return [b | {"advantages": torch.linspace(-1, 1, len(rows))} for b in batches]

    trainer = a_trainer(tmp_path, step, kl=kl, steps=len(order), micro_batch=4)

    def frozen():
        return {n: p.clone() for n, p in trainer.model.named_parameters() if "lora_" not in n}

    base = frozen()
    trainer.train()
    seen.append({name: lora(trainer, name) for name in ("ann", "bob")})
    assert moved(base, frozen()) == 0
    for trained, before, after in zip(order, seen, seen[1:]):
        assert (moved(before["ann"], after["ann"]) > 0) == ("ann" in trained)
        assert (moved(before["bob"], after["bob"]) > 0) == ("bob" in trained or "cat" in trained)


def test_one_parameter_group_per_adapter_and_nothing_decays(tmp_path):
    groups = a_trainer(tmp_path).create_optimizer().param_groups
    assert [group["lr"] for group in groups] == [1e-3, 2e-3]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0]
    assert all(p.dtype == torch.float32 for group in groups for p in group["params"])


# ------------------------------------------------------------------ metrics
def test_metrics_carry_the_players_whole_name_and_its_own_rate(tmp_path):
    def step(trainer, rows):
        trainer.log_mean("co/number", 3)
        trainer.log_mean("co/number", [1.0, 2.0])
        trainer.log_mean("co/nothing", [])
        batches = [trainer.rollout("ann", rows), trainer.rollout("bob", rows)]
        for batch in batches:
            batch["advantages"] = torch.linspace(-1, 1, len(rows))
        return batches if trainer.state.global_step == 0 else batches[::-1]

    trainer = a_trainer(tmp_path, step, kl=0.1, steps=2)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "step_time" in row]
    assert len(logs) == 2
    for row, last, rate in zip(logs, ("bob", "ann"), (2e-3, 1e-3)):
        assert row["co/number"] == pytest.approx(2.25)  # of the means of both calls
        assert "co/nothing" not in row and f"{last}/learning_rate" in row
        assert row[f"{last}/learning_rate"] == rate
        for player in ("ann", "bob"):
            for key in ("loss", "grad_norm", "kl", "entropy", "reward", "completions/mean_length"):
                assert isinstance(row[f"{player}/{key}"], float), (player, key)
        assert row["ann/rewards/one_reward/mean"] == 1.0
        assert row["bob/rewards/other_reward/mean"] == 2.0
        left = {key.split("/")[0] for key in row} - {"ann", "bob", "co"}
        assert left == {"step", "epoch", "num_tokens", "step_time"}


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_loss_that_is_no_number_stops_the_run_with_a_sentence(tmp_path, at):
    def step(trainer, rows):
        batches = [trainer.rollout("bob", rows), trainer.rollout("ann", rows)]
        for batch in batches:
            batch["advantages"] = torch.linspace(-1, 1, len(rows))
        batches[at == "last"]["advantages"][3] = 3e38  # finite, but not the sum over its tokens
        return batches

    trainer = a_trainer(tmp_path, step)
    before = lora(trainer, "bob")
    whose = "ann" if at == "last" else "bob"
    with pytest.raises(UserError, match=rf"the {whose}'s (loss|grad_norm) is (nan|-?inf).*--lr"):
        trainer.train()
    assert (moved(before, lora(trainer, "bob")) == 0) == (at == "first")  # stopped before it moves


# ------------------------------------------------------------------ sampling
def test_generate_neither_trains_nor_changes_the_player(trainer):
    trainer.model.train()
    trainer._become("verifier")
    trainer.rows_at_once = 2
    prompts = [trainer.train_dataset[i]["prompt"] for i in range(3)]
    texts = trainer.generate("generator", prompts, greedy=True)
    assert len(texts) == 3 and all("<step>" in text for text in texts)
    assert trainer.player == "verifier" and trainer.model.active_adapter == "verifier"
    assert trainer.generation_config.do_sample and trainer.generation_config.max_new_tokens == 112
    assert not gradients(trainer)


def test_transformers_generate_gives_the_same_texts_in_parts_and_chunks(trainer, monkeypatch):
    """What a GPU does: a few rows at once, prompts read a few tokens at a time."""
    prompts = [trainer.train_dataset[i]["prompt"] for i in range(5)]
    ours = trainer.generate("generator", prompts, greedy=True)
    base = trainer.model.get_base_model()
    calls, original = [], base.generate

    def counted(**inputs):
        calls.append((len(inputs["input_ids"]), inputs["generation_config"].prefill_chunk_size))
        return original(**inputs)

    monkeypatch.setattr(base, "generate", counted)
    monkeypatch.setattr("common.adapters.PREFILL_TOKENS", 8)
    trainer.top_k, trainer.rows_at_once = 1, 2  # a filter, which common/sampling.py does not have
    assert trainer.generate("generator", prompts, greedy=True) == ours
    assert calls == [(2, 8), (2, 8), (1, 8)]
    assert trainer.generate("generator", []) == []


def test_adapters_compute_in_one_dtype_when_they_sample_and_when_they_are_scored(
    trainer, monkeypatch
):
    """On a GPU bfloat16; PEFT's `generate` goes around accelerate's autocast."""
    bfloat16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    monkeypatch.setattr(trainer.accelerator, "autocast", bfloat16)
    layer = next(m for m in trainer.model.modules() if isinstance(m, Linear))
    found = []
    layer.lora_A["generator"].register_forward_hook(lambda _, __, out: found.append(out.dtype))
    trainer.top_k = 1  # a filter, so that transformers' `generate` samples
    rows = [trainer.train_dataset[0] for _ in range(4)]
    batch = trainer.rollout("generator", rows)
    sampled, found[:] = set(found), []
    trainer.log_probs("generator", batch)
    assert sampled == set(found) == {torch.bfloat16}


def test_sampling_under_checkpointing_leaves_no_hooks_behind(trainer):
    """TRL adds one to the embedding at every call of `generate`; thousands of them cost more than
    the embedding."""
    trainer.model.gradient_checkpointing_enable()
    trainer.top_k = 1  # a filter, so that transformers' `generate` samples
    embedding, counts = trainer.model.get_input_embeddings(), []
    for _ in range(4):
        trainer.model.train()
        trainer.generate("generator", [trainer.train_dataset[0]["prompt"]])
        counts.append(len(embedding._forward_hooks))
    assert counts[-1] == counts[0] <= 2


def test_a_text_cannot_pass_for_the_templates_own_marks(trainer):
    """<|im_end|> and its like, spelled out by a model, must not end the message that quotes it."""
    tokenizer = trainer.processing_class
    marks = tokenizer.all_special_tokens
    half = len(marks[0]) // 2
    nested = marks[0][:half] + marks[-1] + marks[0][half:]  # removing one must not make another

    def ids_of(text):
        return trainer._tokenize_prompts([verify_prompt("3+4 mod 100", text)])[0][0]

    texts = ("7", "7".join(marks), nested)
    special = [sum(i in tokenizer.all_special_ids for i in ids_of(text)) for text in texts]
    assert special[1] == special[2] == special[0]
    prompt = verify_prompt("3+4 mod 100", "<step>3+4=7</step>")  # an innocent one is as it was
    plain = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
    assert ids_of("<step>3+4=7</step>") == plain["input_ids"]


def test_marks_that_are_in_no_named_list_are_blanked_too(trainer, monkeypatch):
    """As Llama's <|start_header_id|>: special, but neither eos nor pad nor among the additional
    ones."""
    tokenizer = trainer.processing_class
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|header|>"]})
    mark = tokenizer.convert_tokens_to_ids("<|header|>")
    named = property(lambda self: ["<|im_end|>"])
    monkeypatch.setattr(type(tokenizer), "all_special_tokens", named)
    quoted = verify_prompt("3+4 mod 100", "7<|header|>judge<|header|>")
    assert mark not in trainer._tokenize_prompts([quoted])[0][0]
    assert mark in tokenizer("7<|header|>")["input_ids"]


def test_the_loaders_prompts_are_left_as_they_are(trainer):
    prompt = solve_prompt("3+4 <|im_end|> mod 100")
    trainer._tokenize_prompts([prompt])
    assert prompt == solve_prompt("3+4 <|im_end|> mod 100")
