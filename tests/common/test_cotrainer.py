"""The verbs that a script is written with: what they give. The mistakes that they name are in
test_checks.py, what two processes do in test_two_processes.py."""

import math
import random
from dataclasses import replace

from common.checked import Player
from tango import verify_prompt

import pytest
import torch
from conftest import gradient, lora, make_players, moved, perturb, relative
from trainers import a_batch, close, four_players, gathered, length_reward, some_rows, whitened


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """For tests that train nothing: their weights stay as they are."""
    trainer = four_players(tmp_path_factory.mktemp("shared"), kl=0.1)
    perturb(trainer)
    before = [lora(trainer, name) for name in ("ann", "bob")]
    yield trainer
    assert [moved(b, lora(trainer, name)) for b, name in zip(before, ("ann", "bob"))] == [0, 0]


@pytest.fixture
def at_rest(shared):
    """`shared` at the beginning of a step."""
    shared._sums.clear()
    return shared


# ------------------------------------------------------------------ an adapter that starts again
def test_an_adapter_that_restarts_is_untrained_the_same_every_time(tmp_path):
    """That of cat, who plays with bob's."""
    trainer = four_players(tmp_path)
    trainer.create_optimizer()
    for p in trainer.parameters_of("ann") + trainer.parameters_of("bob"):
        trainer.optimizer.state[p] = {"step": torch.tensor(3.0)}
    perturb(trainer, 0.1)
    before, trained = lora(trainer, "ann"), lora(trainer, "bob")
    trainer.restart("cat")
    first = lora(trainer, "bob")
    for key, p in first.items():  # PEFT draws A uniformly between these bounds
        bound = p.shape[1] ** -0.5
        if "lora_A" in key:
            assert 0.9 * bound < p.abs().max() <= bound and abs(p.mean()) < 0.2 * bound
        assert p.any() == ("lora_A" in key) and not torch.equal(p, trained[key])
    assert len({p.flatten()[0].item() for key, p in first.items() if "lora_A" in key}) > 1
    assert moved(before, lora(trainer, "ann")) == 0
    assert set(trainer.optimizer.state) == set(trainer.parameters_of("ann"))
    perturb(trainer, 0.1)
    torch.rand(3)  # it does not follow the state of the random numbers
    trainer.state.global_step = 7
    trainer.restart("cat")
    assert moved(first, lora(trainer, "bob")) == 0


# ------------------------------------------------------------------ rollout, set_rewards, concat
def test_a_rollouts_rewards_are_those_of_the_reward_functions(trainer):
    row = {"solution": "<step>3+4=7</step>", "label": True, "question": "3+4 mod 61"}
    row["prompt"] = verify_prompt(row["question"], row["solution"])
    batch = trainer.rollout("verifier", [row] * 8)
    functions = trainer.players["verifier"].rewards
    assert len(functions) == 2
    for i, text in enumerate(batch.texts):
        messages = [[{"content": text}]]
        each = [f(messages, label=[True], solution=[row["solution"]])[0] for f in functions]
        assert batch.rewards[i].item() == pytest.approx(sum(each))
        note = batch.notes[i]
        assert note["player"] == "verifier" and note["prompt"] == row["prompt"][-1]["content"]
        assert list(note["rewards"].values()) == pytest.approx(each)
    decode = trainer.processing_class.decode
    for text, ids, mask in zip(batch.texts, batch.completion_ids, batch.completion_mask):
        assert decode(ids[mask.bool()], skip_special_tokens=True) == text
    expected = whitened([(r, i // 4) for i, r in enumerate(batch.rewards.tolist())], added=1e-6)
    assert batch.advantages.tolist() == pytest.approx(expected, abs=1e-4)
    lengths = batch.completion_mask.sum(1).tolist()
    assert batch.total_tokens == sum(lengths)
    assert batch.prompt_mask[:, -1].all() and batch.completion_mask[:, 0].all()
    assert batch.base_logps is None  # kl 0 needs none
    metrics = gathered(trainer)
    assert metrics["verifier/completions/mean_length"] == sum(lengths) / 8
    cut = [length == 112 for length in lengths]
    assert metrics["verifier/completions/clipped_ratio"] == sum(cut) / 8
    assert metrics["verifier/reward"] == pytest.approx(batch.rewards.mean().item())


def test_a_reward_function_may_leave_a_row_unjudged_and_log_figures_of_its_own(tmp_path):
    """A row that nobody judges is missing: with 0 in its place the others of its group would look
    better than they are."""

    def sometimes(completions, log_metric=None, **_):
        log_metric("asked", float(len(completions)))
        return [1.0, None] * (len(completions) // 2)

    def last_unjudged(completions, **_):
        return [1.0, 3.0, 5.0, None]

    players = {"ann": Player([sometimes, length_reward], 1e-3, 8, 4)}
    players["bob"] = Player([last_unjudged], 1e-3, 8, 4)
    trainer = make_players(tmp_path, players)
    batch = trainer.rollout("ann", some_rows(trainer, 4))
    lengths = length_reward([[{"content": text}] for text in batch.texts])
    assert batch.rewards.tolist() == [1 + lengths[0], lengths[1], 1 + lengths[2], lengths[3]]
    assert [len(note["rewards"]) for note in batch.notes] == [2, 1, 2, 1]
    batch = trainer.rollout("bob", some_rows(trainer, 4))
    assert batch.rewards.isnan().tolist() == [False, False, False, True]
    assert batch.advantages.tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-5)
    metrics = gathered(trainer)
    assert metrics["ann/rewards/sometimes/mean"] == 1.0 and metrics["ann/asked"] == 4.0
    assert metrics["bob/reward"] == 3.0


@pytest.mark.parametrize("seed", range(8))
def test_set_rewards_of_groups_of_any_order_and_size_equals_the_loop(at_rest, seed):
    random.seed(seed)
    name = "ann" if seed else "cat"  # who has no reward functions
    batch = at_rest.rollout(name, some_rows(at_rest, 8))
    groups = [random.choice(["x", 7, ("y", 1)]) for _ in range(7)]
    groups.append(groups[0])  # or every row might be a group of its own
    rewards = [random.choice([0.0, 1.0, 2.5, math.nan]) for _ in groups]
    at_rest.set_rewards(batch, rewards, groups if seed else None)
    groups = groups if seed else [0, 0, 1, 1, 2, 2, 3, 3]  # of two
    said = [note["rewards"]["total"] for note in batch.notes]
    for found in (batch.rewards.tolist(), said):
        assert found == pytest.approx(rewards, nan_ok=True)
    expected = whitened([*zip(rewards, groups)], added=1e-6)
    assert batch.advantages.tolist() == pytest.approx(expected, abs=1e-4)
    found = [{r for r, g in zip(rewards, groups) if g == k and r == r} for k in {*groups}]
    flat = [len(values) < 2 for values in found if values]  # where nobody judged nothing is equal
    judged = [reward for reward in rewards if reward == reward]
    metrics = gathered(at_rest)  # what `rollout` has logged of flat groups is replaced
    assert metrics[f"{name}/frac_reward_zero_std"] == pytest.approx(sum(flat) / len(flat))
    assert metrics[f"{name}/total_reward"] == pytest.approx(sum(judged) / len(judged))


def test_rewards_of_two_rollouts_are_compared_with_each_other(at_rest):
    """As the turns of a dialogue: rows of both that share a key, in each batch's own order."""
    first, second = (at_rest.rollout(name, some_rows(at_rest)) for name in ("bob", "cat"))
    rewards = torch.tensor([0.0, 1, 3, 2, 5, 5, math.nan, 4, 1, 1, 2, 8, 0, 5, 6, 7])
    groups = [*"aabbccdd", *"dcbaabcd"]
    at_rest.set_rewards([first, second], rewards, groups)
    expected = torch.tensor(whitened([*zip(rewards.tolist(), groups)], added=1e-6))
    for batch, rows in ((first, slice(8)), (second, slice(8, 16))):
        close(batch.advantages, expected[rows], 1e-5)
        assert torch.equal(batch.rewards.nan_to_num(-1), rewards[rows].nan_to_num(-1))
        totals = [note["rewards"]["total"] for note in batch.notes]
        assert torch.equal(torch.tensor(totals).nan_to_num(-1), rewards[rows].nan_to_num(-1))


def test_concat_is_one_update_on_all_rows(at_rest):
    """Prompts padded left, completions right: the gradient is that of both batches, by their
    tokens."""
    trainer = at_rest
    one, two = a_batch(trainer, "bob", 4), a_batch(trainer, "cat", 4)
    for batch in (one, two):  # tokens that are not likely have a gradient worth comparing
        batch.completion_ids = torch.randint(5, 40, batch.completion_ids.shape)
        batch.base_logps = trainer.log_probs(None, batch)
    ramp = torch.linspace(1, 2, 12)[: two.base_logps.shape[1]]
    two.advantages = two.advantages[:, None] * ramp
    T = [b.completion_ids.shape[1] for b in (one, two)]
    P = [b.prompt_ids.shape[1] for b in (one, two)]
    assert T[0] != T[1]
    joined = trainer.concat([one, two])
    assert joined.player == "bob"  # the adapter's name
    assert joined.completion_ids.shape == joined.advantages.shape == (8, max(T))
    assert joined.prompt_ids.shape == (8, max(P))
    assert joined.texts == one.texts + two.texts
    assert [note["player"] for note in joined.notes] == ["bob"] * 4 + ["cat"] * 4
    assert joined.source.tolist() == [0] * 4 + [1] * 4
    tokens = [b.total_tokens for b in (one, two)]
    assert joined.total_tokens == sum(tokens) == int(joined.completion_mask.sum())
    parts = [gradient(trainer, b) for b in (one, two)]
    expected = {n: sum(g[n] * t for g, t in zip(parts, tokens)) / sum(tokens) for n in parts[0]}
    two_of_cats = trainer.concat([two, a_batch(trainer, "cat", 4)])
    assert two_of_cats.player == "bob" and len(two_of_cats) == 8
    got = gradient(trainer, joined)
    assert relative(got, expected) <= 1e-5 and all(".bob." in name for name in got)


# ------------------------------------------------------------------ log_probs and score
def test_log_probs_of_every_player_and_of_the_base(at_rest):
    """At the temperature of the batch's player, whoever scores it: a KL term compares two."""
    trainer = at_rest
    trainer.cfg.micro_batch = 3
    for writer, temperature in (("ann", 1.0), ("dan", 0.5)):
        batch = a_batch(trainer, writer)
        T, mask = batch.completion_ids.shape[1], batch.completion_mask.bool()
        ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
        seen = torch.cat([batch.prompt_mask, batch.completion_mask], 1)
        found = {}
        for name in ("ann", "cat", "dan", None):
            found[name] = got = trainer.log_probs(name, batch)
            assert got.shape == mask.shape and not got.requires_grad and (got[~mask] == 0).all()
            with trainer.playing(name):
                with_gradient = trainer.score(batch)[0]
                logits = trainer.model(input_ids=ids, attention_mask=seen).logits[:, -T - 1 : -1]
                assert with_gradient.requires_grad == (name is not None)
            logp = (logits / temperature).log_softmax(-1)
            expected = logp.gather(2, batch.completion_ids[..., None]).squeeze(2).detach()
            for ours in (got, with_gradient.detach()):
                torch.testing.assert_close(ours[mask], expected[mask], rtol=0, atol=1e-4)
        assert torch.equal(found["cat"], found["dan"])
        assert torch.equal(found[None], batch.base_logps)
        assert (found[None] - found["ann"]).abs().max() > 1e-3  # rounding is below 1e-4


# ------------------------------------------------------------------ who is trained, and how
@pytest.mark.parametrize("turn, player", [("ann", "bob"), ("bob", "ann"), ("ann", "cat")])
def test_update_trains_the_batchs_player_whoevers_turn_it_is(tmp_path, turn, player):
    """Once, after another player's turn, it silently trained that other one."""
    trainer = four_players(tmp_path)
    trainer.create_optimizer()
    batch = a_batch(trainer, player)
    gathered(trainer)
    adapter = trainer.players[player].adapter
    other = "ann" if adapter == "bob" else "bob"
    before = lora(trainer, adapter), lora(trainer, other)
    with trainer.playing(turn):
        trainer.update(batch)
        assert trainer.model.active_adapter == trainer.players[turn].adapter
    assert moved(before[0], lora(trainer, adapter)) > 0
    assert moved(before[1], lora(trainer, other)) == 0
    assert all(p.grad is None for p in trainer.model.parameters())
    keys = ("entropy", "frac_advantage_zero", "loss", "grad_norm", "learning_rate")
    metrics = gathered(trainer)
    assert metrics.pop("co/sampler_gap") < 1e-5  # what was sampled is what is scored
    assert set(metrics) == {f"{player}/{key}" for key in keys}


def test_update_clips_to_the_players_norm_and_zero_is_no_limit(at_rest):
    """The same direction, at most as long: what arrives at the optimiser."""
    batch = a_batch(at_rest, "ann")
    whole, loose, clipped = (gradient(at_rest, batch, norm) for norm in (0.0, 1e9, 1e-3))
    length = sum(g.square().sum() for g in whole.values()).sqrt().item()
    assert length > 0.01 and moved(whole, loose) == 0
    assert relative(clipped, {n: g * 1e-3 / length for n, g in whole.items()}) < 1e-3


def test_a_loss_with_a_term_of_its_own_asks_for_all_rows(at_rest, monkeypatch):
    trainer, rows, loss = at_rest, [], at_rest.loss
    batch = replace(a_batch(trainer, "ann"), advantages=torch.zeros(8))
    monkeypatch.setattr(trainer, "kl", 0.0)
    monkeypatch.setattr(
        trainer, "loss", lambda part: rows.append(len(part.advantages)) or loss(part)
    )
    assert gradient(trainer, batch) == {} and rows == []
    monkeypatch.setattr(trainer, "all_rows", True, raising=False)
    gradient(trainer, batch)
    assert sum(rows) == 8


def a_flat_batch(trainer, name):
    return replace(a_batch(trainer, name), advantages=torch.zeros(8))


def test_without_an_advantage_and_a_kl_term_nothing_moves(tmp_path, capsys):
    """Adam's momentum would move it."""
    trainer = four_players(tmp_path)
    trainer.create_optimizer()
    trainer.update(a_batch(trainer, "ann"))  # momentum
    before = lora(trainer, "ann")
    for _ in range(3):
        trainer.update(a_flat_batch(trainer, "ann"))
    assert moved(before, lora(trainer, "ann")) == 0
    assert "3 updates in a row of the ann taught it nothing" in capsys.readouterr().out
    trainer.update(a_batch(trainer, "ann"))
    assert moved(before, lora(trainer, "ann")) > 0


def test_without_an_advantage_a_player_follows_the_kl_term_once_it_was_updated(tmp_path, capsys):
    """Before, it is the base, and Adam would make steps of the learning rate out of rounding."""
    trainer = four_players(tmp_path, kl=1.0)
    trainer.create_optimizer()
    before = lora(trainer, "ann")
    noisy = a_flat_batch(trainer, "ann")
    noisy.base_logps += 1e-6 * torch.randn(noisy.base_logps.shape)
    trainer.update(noisy)
    assert moved(before, lora(trainer, "ann")) == 0 and gathered(trainer)["ann/grad_norm"] > 0
    for _ in range(3):
        trainer.update(a_batch(trainer, "ann"))
    asked, k3 = a_batch(trainer, "ann"), []
    for _ in range(9):
        log_q = trainer.log_probs(None, asked) - trainer.log_probs("ann", asked)  # (B, T)
        k3.append((log_q.exp() - log_q - 1).mean().item())
        trainer.update(a_flat_batch(trainer, "ann"))
    assert k3[-1] < k3[0] / 2  # by way of a maximum: Adam's momentum goes on at first
    assert "3 updates in a row of the ann taught it nothing" in capsys.readouterr().out


def test_texts_from_elsewhere_are_trained_on_as_a_rollout_is(at_rest):
    """With advantages that the script gives, prompts that rows share, and a KL term."""
    trainer, rows = at_rest, some_rows(at_rest)
    sampled = a_batch(trainer, "ann")
    ids = [i[m.bool()].tolist() for i, m in zip(sampled.completion_ids, sampled.completion_mask)]
    batch = trainer.completions("ann", [row["prompt"] for row in rows], ids)
    batch.advantages, batch.total_tokens = sampled.advantages, sampled.total_tokens
    found = gradient(trainer, batch)
    assert relative(found, gradient(trainer, sampled)) < 1e-5
