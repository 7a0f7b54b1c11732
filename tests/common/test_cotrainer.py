"""The verbs that a script is written with: what they give, and the mistakes they name."""

from common.cotrainer import CoTrainer, Player
from tango import verify_prompt

import pytest
import torch
from conftest import gradients, lora, make_players, moved, perturb

HOLE = torch.tensor([[1, 1, 0, 1]]).repeat(8, 1)
RAMP = torch.tensor([1.0, -0.5, 0.25, -0.75, 0.5, -1.0, 0.75, -0.25])


def length_reward(completions, **_):
    return [float(len(c[0]["content"])) for c in completions]


def a_trainer(folder, step=None, norm_of_ann=1.0, **more):
    """`ann` and `bob` have adapters of their own; `cat` has bob's, `dan` too, at another
    temperature."""
    players = {
        "ann": Player([length_reward], 1e-3, 8, group_size=4, max_grad_norm=norm_of_ann),
        "bob": Player([length_reward], 1e-3, 8, 4),
        "cat": Player([], 1e-3, 12, 2, adapter="bob"),
        "dan": Player([length_reward], 1e-3, 8, 4, temperature=0.5, adapter="bob"),
    }
    return make_players(folder, players, step, **more)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """For tests that train nothing: their weights stay as they are."""
    trainer = a_trainer(tmp_path_factory.mktemp("shared"), kl=0.1)
    perturb(trainer)
    before = [lora(trainer, name) for name in ("ann", "bob")]
    yield trainer
    assert [moved(b, lora(trainer, name)) for b, name in zip(before, ("ann", "bob"))] == [0, 0]


@pytest.fixture
def at_rest(shared):
    """`shared` at the beginning of a step."""
    shared._become("ann")
    shared._means.clear()
    shared._step = 0
    return shared


def some_rows(trainer, count=8) -> list[dict]:
    return [trainer.train_dataset[i // 4] for i in range(count)]


def a_batch(trainer, name, count=8) -> dict:
    batch = trainer.rollout(name, some_rows(trainer, count))
    return batch | {"advantages": RAMP.repeat(2)[:count]}


def gradient_of(trainer, parts):
    trainer.model.zero_grad(set_to_none=True)
    for part in parts:
        trainer._compute_loss(trainer.model, part).backward()
    return gradients(trainer)


# ------------------------------------------------------------------ rollout, pay, concat
def test_a_rollouts_rewards_are_those_of_the_reward_functions(trainer):
    row = {"solution": "<step>3+4=7</step>", "label": True, "question": "3+4 mod 100"}
    row["prompt"] = verify_prompt(row["question"], row["solution"])
    batch = trainer.rollout("verifier", [row] * 8)
    assert trainer.player == "generator"
    functions = trainer.players["verifier"].rewards
    assert [f.__name__ for f in functions] == ["verdict_reward", "format_reward"]
    for i, text in enumerate(batch["texts"]):
        messages = [[{"content": text}]]
        paid = [f(messages, label=[True], solution=[row["solution"]])[0] for f in functions]
        assert batch["rewards"][i].item() == pytest.approx(sum(paid))
        note = batch["notes"][i]
        assert note["player"] == "verifier" and note["prompt"] == row["prompt"][-1]["content"]
        assert list(note["rewards"].values()) == pytest.approx(paid)
    decode = trainer.processing_class.decode
    for text, ids, mask in zip(batch["texts"], batch["completion_ids"], batch["completion_mask"]):
        assert decode(ids[mask.bool()], skip_special_tokens=True) == text
    for group in range(2):
        r = batch["rewards"][4 * group : 4 * group + 4]
        expected = (r - r.mean()) / (r.std() + 1e-6)
        assert torch.allclose(batch["advantages"][4 * group : 4 * group + 4], expected, atol=1e-4)
    assert int(batch["num_items_in_batch"]) == int(batch["completion_mask"].sum())
    assert batch["player"] == "verifier" and "base_logps" not in batch  # kl 0 needs none


def test_a_reward_function_may_leave_a_row_unjudged(tmp_path):
    def sometimes(completions, **_):
        return [1.0, None] * (len(completions) // 2)

    players = {"ann": Player([sometimes, length_reward], 1e-3, 8, 4)}
    trainer = make_players(tmp_path, players)
    batch = trainer.rollout("ann", some_rows(trainer, 4))
    lengths = length_reward([[{"content": text}] for text in batch["texts"]])
    assert batch["rewards"].tolist() == [1 + lengths[0], lengths[1], 1 + lengths[2], lengths[3]]
    assert [len(note["rewards"]) for note in batch["notes"]] == [2, 1, 2, 1]


def test_a_row_that_nobody_judges_is_missing_and_not_worth_nothing(tmp_path):
    """With 0 in its place the others of its group would look better than they are."""

    def last_unjudged(completions, **_):
        return [1.0, 3.0, 5.0, None]

    trainer = make_players(tmp_path, {"ann": Player([last_unjudged], 1e-3, 8, 4)})
    batch = trainer.rollout("ann", some_rows(trainer, 4))
    assert batch["rewards"].isnan().tolist() == [False, False, False, True]
    assert batch["advantages"].tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-5)


def test_pay_sets_what_is_known_only_later(at_rest):
    trainer = at_rest
    batch = trainer.rollout("cat", some_rows(trainer, 4))  # groups of two
    assert batch["rewards"].tolist() == [0.0] * 4 and "advantages" not in batch
    trainer.pay(batch, [1, 3, 5, 5])
    assert batch["rewards"].tolist() == [1.0, 3.0, 5.0, 5.0]
    half = 0.5**0.5
    assert batch["advantages"].tolist() == pytest.approx([-half, half, 0.0, 0.0], abs=1e-5)
    assert [note["rewards"]["total"] for note in batch["notes"]] == [1.0, 3.0, 5.0, 5.0]
    assert trainer._means["cat/total_reward"] == [3.5]
    trainer.pay(batch, torch.tensor([2, 2, 0, 1]))
    assert (
        batch["rewards"].tolist() == [2.0, 2.0, 0.0, 1.0] and (batch["advantages"][:2] == 0).all()
    )


def test_flat_groups_are_those_of_what_is_paid_in_the_end(at_rest):
    """Also where reward functions have been logged by TRL already: gar.py's slices break ties."""
    trainer = at_rest
    batch = trainer.rollout("ann", some_rows(trainer, 8))  # groups of four
    trainer.pay(batch, [1.0] * 4 + [0.0, 0.0, 0.0, 1.0])
    trainer.log({})
    assert trainer.state.log_history[-1]["ann/frac_reward_zero_std"] == 0.5
    batch = trainer.rollout("ann", some_rows(trainer, 8))
    trainer.pay(batch, range(8))
    trainer.log({})
    assert trainer.state.log_history[-1]["ann/frac_reward_zero_std"] == 0.0


@pytest.mark.parametrize("rewards", [[1.0] * 3, [1.0] * 5, [[1.0]] * 4, 1.0])
def test_pay_wants_one_reward_per_row(at_rest, rewards):
    trainer = at_rest
    batch = trainer.rollout("ann", some_rows(trainer, 4))
    before = batch["rewards"].tolist()
    with pytest.raises(ValueError, match=r"rewards must be \(4,\), one per row; got \("):
        trainer.pay(batch, rewards)
    assert batch["rewards"].tolist() == before


def test_concat_is_one_update_on_all_rows(at_rest):
    """Prompts padded left, completions right: the gradient is that of both batches, by their
    tokens."""
    trainer = at_rest
    one, two = a_batch(trainer, "bob", 4), a_batch(trainer, "cat", 4)
    for batch in (one, two):  # tokens that are not likely have a gradient worth comparing
        batch["completion_ids"] = torch.randint(5, 40, batch["completion_ids"].shape)
        batch["base_logps"] = trainer.log_probs(None, batch)
    two["advantages"] = (
        two["advantages"][:, None] * torch.linspace(1, 2, 12)[: two["base_logps"].shape[1]]
    )
    T = [b["completion_ids"].shape[1] for b in (one, two)]
    P = [b["prompt_ids"].shape[1] for b in (one, two)]
    assert T[0] != T[1]
    joined = trainer.concat([dict(one), dict(two)])
    assert joined["player"] == "bob"  # the adapter's name
    assert joined["completion_ids"].shape == joined["advantages"].shape == (8, max(T))
    assert joined["prompt_ids"].shape == (8, max(P))
    assert joined["texts"] == one["texts"] + two["texts"]
    assert [note["player"] for note in joined["notes"]] == ["bob"] * 4 + ["cat"] * 4
    tokens = [int(b["num_items_in_batch"]) for b in (one, two)]
    assert int(joined["num_items_in_batch"]) == sum(tokens) == int(joined["completion_mask"].sum())
    with trainer.playing("bob"):
        got = gradient_of(trainer, trainer.micro_batches(joined))
        parts = [gradient_of(trainer, trainer.micro_batches(b)) for b in (one, two)]
    expected = {n: sum(g[n] * t for g, t in zip(parts, tokens)) / sum(tokens) for n in parts[0]}
    assert got.keys() == expected.keys() and all(".bob." in name for name in got)
    assert moved(got, expected) <= 1e-5 * max(g.abs().max() for g in expected.values())


def test_concat_wants_the_same_of_every_batch(at_rest):
    trainer = at_rest
    a, b = a_batch(trainer, "cat", 4), a_batch(trainer, "cat", 4)
    b["judgements"] = ["fine"] * 4
    for pair in ([a, b], [b, a]):
        with pytest.raises(ValueError, match="concat: not every batch has judgements"):
            trainer.concat(pair)


def test_concat_of_one_player_keeps_its_name(at_rest):
    trainer = at_rest
    joined = trainer.concat([a_batch(trainer, "cat", 4), a_batch(trainer, "cat", 4)])
    assert joined["player"] == "cat" and len(joined["rewards"]) == 8


@pytest.mark.parametrize(
    "names, says",
    [
        (("ann", "bob"), "batches must be of one adapter; got ann: ann, bob: bob"),
        (("bob", "ann", "cat"), "batches must be of one adapter"),
        (("bob", "dan"), r"batches must be of one temperature; got bob: 1.0, dan: 0.5"),
    ],
)
def test_concat_refuses_what_one_update_cannot_train(at_rest, names, says):
    trainer = at_rest
    batches = [a_batch(trainer, name, 4) for name in names]
    with pytest.raises(ValueError, match=says):
        trainer.concat(batches)


# ------------------------------------------------------------------ log_probs
def test_log_probs_of_every_player_and_of_the_base(tmp_path):
    trainer = a_trainer(tmp_path, kl=0.1, micro_batch=4)
    perturb(trainer)
    batch = a_batch(trainer, "ann")
    T, mask = batch["completion_ids"].shape[1], batch["completion_mask"].bool()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)

    def plain(temperature):
        logits = trainer.model(input_ids=ids, attention_mask=seen).logits[:, -T - 1 : -1]
        logp = (logits / temperature).log_softmax(-1)
        return logp.gather(2, batch["completion_ids"][..., None]).squeeze(2)

    for name, adapter, temperature in (
        ("ann", "ann", 1.0),
        ("cat", "bob", 1.0),
        ("dan", "bob", 0.5),
    ):
        got = trainer.log_probs(name, batch)
        assert got.shape == mask.shape and not got.requires_grad and (got[~mask] == 0).all()
        trainer.model.set_adapter(adapter)
        expected = plain(temperature).detach()
        torch.testing.assert_close(got[mask], expected[mask], rtol=0, atol=1e-4)
        trainer._become("ann")
        with_gradient = trainer.log_probs(name, batch, trainer.model)
        torch.testing.assert_close(with_gradient.detach()[mask], got[mask], rtol=0, atol=1e-4)
        trainer.model.zero_grad(set_to_none=True)
        with_gradient.sum().backward()
        assert {n.split(".")[-2] for n in gradients(trainer)} == {adapter}
        assert trainer.player == "ann" and trainer.model.active_adapter == "ann"
    with trainer.model.disable_adapter():
        expected = plain(1.0).detach()
    trainer._become("ann")
    torch.testing.assert_close(batch["base_logps"][mask], expected[mask], rtol=0, atol=1e-4)
    assert torch.equal(trainer.log_probs(None, batch), batch["base_logps"])
    assert moved({"": batch["base_logps"]}, {"": trainer.log_probs("ann", batch)}) > 0.01


def test_the_bases_log_probs_are_at_the_temperature_of_the_batchs_player(at_rest):
    """Whoever's turn it is when they are computed: a KL term compares the two."""
    trainer = at_rest
    batch = trainer.rollout("dan", some_rows(trainer, 4))
    for turn in ("ann", "dan"):
        trainer._become(turn)
        assert torch.equal(trainer.log_probs(None, batch), batch["base_logps"])


# ------------------------------------------------------------------ who is trained, and how
def test_update_is_the_same_step_as_trainers_own(tmp_path):
    """Two players: whoever comes first, and so is trained at once, moves as if it came last."""
    after, logs = [], []
    for order in ((0, 1), (1, 0)):

        def step(trainer, rows, order=order):
            torch.manual_seed(trainer.state.global_step)
            batches = [a_batch(trainer, name) for name in ("ann", "bob")]
            return [batches[i] for i in order]

        folder = tmp_path / str(order)
        folder.mkdir()
        trainer = a_trainer(folder, step, kl=0.1, steps=1, micro_batch=4)
        perturb(trainer)
        before = {name: lora(trainer, name) for name in ("ann", "bob")}
        trainer.train()
        after.append({name: lora(trainer, name) for name in ("ann", "bob")})
        logs.append(next(row for row in trainer.state.log_history if "ann/loss" in row))
        assert all(moved(before[name], after[-1][name]) > 1e-4 for name in before)
    for name in ("ann", "bob"):
        assert moved(after[0][name], after[1][name]) < 1e-6
        for key in ("loss", "grad_norm", "kl", "entropy"):  # Adam does not see the gradient's scale
            values = [row[f"{name}/{key}"] for row in logs]
            assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-4) and values[0] != 0


@pytest.mark.parametrize("turn, player", [("ann", "bob"), ("bob", "ann"), ("ann", "cat")])
def test_update_trains_the_batchs_player_whoevers_turn_it_is(tmp_path, turn, player):
    """Once, after another player's turn, it silently trained that other one."""
    trainer = a_trainer(tmp_path)
    trainer.create_optimizer()
    batch = a_batch(trainer, player)
    trainer._become(turn)
    adapter = trainer.players[player].adapter
    other = "ann" if adapter == "bob" else "bob"
    before = lora(trainer, adapter), lora(trainer, other)
    trainer.update(batch)
    assert (
        moved(before[0], lora(trainer, adapter)) > 0 and moved(before[1], lora(trainer, other)) == 0
    )
    assert trainer.player == turn and not gradients(trainer)
    assert set(trainer._means) == {f"{player}/{key}" for key in ("entropy", "loss", "grad_norm")}


def test_update_clips_to_the_players_norm(tmp_path):
    """The same direction, at most as long: what arrives at the optimiser."""
    found = []
    for norm in (1e9, 1e-3):
        trainer = a_trainer(tmp_path, micro_batch=4)
        trainer.players["bob"].max_grad_norm = norm
        optimizer = trainer.create_optimizer()
        torch.manual_seed(0)
        batch = a_batch(trainer, "bob")
        optimizer.step = lambda: found.append(gradients(trainer))  # noqa: B023
        trainer.update(batch)
    length = [sum(g.square().sum() for g in gradient.values()).sqrt() for gradient in found]
    assert length[0] > 0.01 and length[1].item() == pytest.approx(1e-3, rel=1e-3)
    scaled = {n: g * length[1] / length[0] for n, g in found[0].items()}
    assert moved(scaled, found[1]) < 1e-6


def test_a_norm_of_zero_is_no_limit_wherever_the_player_is_updated(tmp_path):
    moves = []
    for norm in (0.0, 1e9):
        for at_once in (False, True):

            def step(trainer, rows):
                torch.manual_seed(0)
                batches = [a_batch(trainer, "ann"), a_batch(trainer, "bob")]
                return batches if at_once else batches[::-1]  # noqa: B023

            trainer = a_trainer(tmp_path, step, steps=1, norm_of_ann=norm)
            before = lora(trainer, "ann")
            trainer.train()
            moves.append(moved(before, lora(trainer, "ann")))
    assert min(moves) > 0


def test_a_loss_with_a_term_of_its_own_asks_for_all_rows(at_rest):
    trainer, rows = at_rest, []
    batch = a_batch(trainer, "ann") | {"advantages": torch.zeros(8)}
    trainer.kl = 0.0
    try:
        for trainer.all_rows in (False, True):
            parts = trainer.micro_batches(batch)
            rows.append(0 if trainer.flat else sum(len(part["advantages"]) for part in parts))
    finally:
        trainer.kl = 0.1
        del trainer.all_rows
    assert rows == [0, 8]


def test_a_flat_batch_moves_nothing(tmp_path):
    """All advantages zero: not even Adam's momentum of the steps before may move the weights,
    neither in `update` nor in Trainer's own step.
    """
    flat_from, seen = 2, []

    def step(trainer, rows):
        seen.append({name: lora(trainer, name) for name in ("ann", "bob")})
        batches = [a_batch(trainer, "ann"), a_batch(trainer, "bob")]
        if trainer.state.global_step >= flat_from:
            flat = trainer.state.global_step % 2
            batches[flat]["advantages"] = torch.zeros(8)
        return batches

    trainer = a_trainer(tmp_path, step, steps=4)
    trainer.train()
    seen.append({name: lora(trainer, name) for name in ("ann", "bob")})
    moves = [{n: moved(a[n], b[n]) for n in a} for a, b in zip(seen, seen[1:])]
    assert all(x > 0 for move in moves[:flat_from] for x in move.values())
    assert moves[2]["ann"] == 0 and moves[2]["bob"] > 0
    assert moves[3]["bob"] == 0 and moves[3]["ann"] > 0


def test_with_a_kl_term_a_flat_batch_does_move(tmp_path):
    def step(trainer, rows):
        batch = trainer.rollout("cat", rows)
        trainer.pay(batch, [1.0] * len(rows))
        return [batch]

    trainer = a_trainer(tmp_path, step, kl=0.1, steps=1)
    perturb(trainer)
    before = lora(trainer, "bob")
    trainer.train()
    assert moved(before, lora(trainer, "bob")) > 0


class OwnLoss(CoTrainer):
    def loss(self, model, batch):
        self.losses.append((batch["player"], len(batch["weights"])))
        logp = self.log_probs(batch["player"], batch, model)
        return -(logp * batch["completion_mask"] * batch["weights"][:, None]).sum()


def test_a_loss_of_its_own_gets_all_rows_and_the_batchs_player(tmp_path):
    """Batches without advantages: every row counts, and is never taken for flat."""

    def step(trainer, rows):
        batches = [trainer.rollout("ann", rows), trainer.rollout("bob", rows)]
        for batch in batches:
            del batch["advantages"]
            batch["weights"] = torch.zeros(8).index_fill(0, torch.tensor([2]), 1.0)
        return batches

    trainer = a_trainer(tmp_path, step, steps=1, micro_batch=4, kind=OwnLoss)
    trainer.losses = []
    before = {name: lora(trainer, name) for name in ("ann", "bob")}
    trainer.train()
    assert trainer.losses == [("ann", 4)] * 2 + [("bob", 4)] * 2
    assert all(moved(before[name], lora(trainer, name)) > 0 for name in before)


# ------------------------------------------------------------------ mistakes that a script can make
def play(trainer, step):
    """The beginning of an optimiser step, as Trainer calls it."""
    trainer.step = lambda rows: step(trainer, rows)
    return trainer._prepare_inputs(some_rows(trainer))


def test_a_last_batch_with_more_rows_than_a_step_holds(tmp_path, at_rest):
    """Its longest rows would be left out, silently. The same rows fit in one before the last."""

    def too_many(trainer, rows):
        return [trainer.concat([a_batch(trainer, "bob"), a_batch(trainer, "cat")])]

    with pytest.raises(
        ValueError, match="the last batch of a step has 16 rows.*1 micro-batches of 8"
    ):
        play(at_rest, too_many)

    rows_trained = []

    class Count(CoTrainer):
        def loss(self, model, batch):
            rows_trained.append(len(batch["completion_ids"]))
            return super().loss(model, batch)

    def as_it_says(trainer, rows):
        return [*too_many(trainer, rows), a_batch(trainer, "ann")]

    a_trainer(tmp_path, as_it_says, steps=1, micro_batch=4, kind=Count).train()
    assert rows_trained == [4] * 4 + [4] * 2


@pytest.mark.parametrize(
    "result, says",
    [
        (lambda batch: None, "step must return a list of at least one batch"),
        (lambda batch: [], "step must return a list of at least one batch"),
        (lambda batch: batch, "step must return a list of at least one batch"),
        (lambda batch: [None], "must return batches.*one has no player"),
        (lambda batch: [{k: v for k, v in batch.items() if k != "player"}], "one has no player"),
        (
            lambda batch: [batch | {"player": "eve"}],
            "no player 'eve'; there are ann, bob, cat, dan",
        ),
        (lambda batch: [batch | {"player": "eve"}, batch], "no player 'eve'"),
        (lambda batch: [batch, batch], "a batch once"),
        (lambda batch: [batch | {"completion_mask": HOLE}], "completion_mask must be ones"),
        (lambda batch: [batch | {"completion_mask": HOLE.flip(1)}], "completion_mask must be"),
        (lambda batch: [batch | {"completion_mask": 0 * HOLE}], "completion_mask must be ones"),
    ],
)
def test_a_step_must_return_batches_of_players(at_rest, result, says):
    with pytest.raises(ValueError, match=says):
        play(at_rest, lambda trainer, rows: result(a_batch(trainer, "ann")))


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("shape", [(4,), (8, 1), (8, 99), (1, 8), (8, 8, 1), ()])
def test_advantages_of_a_wrong_shape(at_rest, shape, place):
    def step(trainer, rows):
        batches = [a_batch(trainer, "ann"), a_batch(trainer, "bob")]
        batches[place == "last"]["advantages"] = torch.ones(shape)
        trainer.wanted = tuple(batches[place == "last"]["completion_mask"].shape)
        return batches

    with pytest.raises(ValueError, match=r"advantages must be \(B,\) or \(B, T\)") as error:
        play(at_rest, step)
    assert f"(8,) or {at_rest.wanted}; got {shape}" in str(error.value)
    assert not at_rest._means.keys() & {"ann/loss", "bob/loss"}  # nobody has been trained


def test_a_group_has_one_prompt(at_rest):
    """Rewards of different questions must not be compared with each other."""
    trainer, (one, other) = at_rest, (at_rest.train_dataset[i] for i in (0, 1))
    says = "rows 4 to 7 for the ann are a group.*their prompts differ; repeat each row 4 times"
    with pytest.raises(ValueError, match=says):
        trainer.rollout("ann", [one] * 4 + [one, one, other, other])
    with pytest.raises(ValueError, match="rows 0 to 3 for the ann are a group"):
        trainer.rollout("ann", [one, other] * 4)  # [one, other] * G, the group not adjacent
    assert len(trainer.rollout("ann", [one] * 4 + [other] * 4)["texts"]) == 8
    assert len(trainer.rollout("cat", [one, one, other, other])["texts"]) == 4  # groups of two


def test_a_batch_is_trained_on_once(tmp_path):
    """However it comes back: from `update`, or from the step before."""
    kept = []

    def updated_and_returned(trainer, rows):
        batch = a_batch(trainer, "ann")
        trainer.update(batch)
        return [batch]

    def of_the_step_before(trainer, rows):
        kept.append(a_batch(trainer, "ann"))
        return kept[:1]

    for step in (updated_and_returned, of_the_step_before):
        trainer = a_trainer(tmp_path / step.__name__, step, steps=2)
        with pytest.raises(ValueError, match="a batch of the ann has been trained on already"):
            trainer.train()


def test_nobody_has_paid(at_rest):
    """Its advantages would be zero, and nothing would be learnt, without a word."""
    with pytest.raises(ValueError, match="the cat's batch has no advantages.*pay"):
        play(at_rest, lambda trainer, rows: [trainer.rollout("cat", rows)])
    with pytest.raises(ValueError, match="the cat's batch has no advantages"):
        at_rest.update(at_rest.rollout("cat", some_rows(at_rest, 4)))


@pytest.mark.parametrize(
    "advantages, says",
    [
        (lambda A: A.tolist(), "must be a tensor of floats; got list"),
        (lambda A: A.numpy(), "must be a tensor of floats; got ndarray"),
        (lambda A: A > 0, "must be a tensor of floats; got torch.bool"),
        (lambda A: A.masked_fill(torch.arange(8) == 5, torch.nan), "finite.*not in row 5"),
        (lambda A: A.masked_fill(torch.arange(8) == 2, -torch.inf), "finite.*not in row 2"),
        (lambda A: A * torch.ones(1, requires_grad=True), "have a gradient.*detach"),
    ],
)
@pytest.mark.parametrize("call", ["step", "update"])
def test_advantages_are_finite_floats_without_a_gradient(at_rest, advantages, says, call):
    trainer, batch = at_rest, a_batch(at_rest, "ann")
    batch["advantages"] = advantages(batch["advantages"])
    with pytest.raises(ValueError, match=f"the ann's advantages.*{says}"):
        play(trainer, lambda *_: [batch]) if call == "step" else trainer.update(batch)


def test_rows_are_not_left_out_by_half(at_rest):
    def half(trainer, rows):
        batch = a_batch(trainer, "ann")
        return [
            {k: v[:4] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in batch.items()}
        ]

    with pytest.raises(ValueError, match="has 4 rows and 8 texts; to leave rows out.*of 0"):
        play(at_rest, half)


@pytest.mark.parametrize("name", ["step", "seconds", "loss", "eval/ann/accuracy"])
def test_metrics_begin_with_a_name_that_is_free(at_rest, name):
    with pytest.raises(ValueError, match=f"log_mean: '{name}' must begin with a player's name"):
        at_rest.log_mean(name, 1.0)


def test_who_is_not_judged_has_no_part_in_its_group(at_rest):
    """NaN in `pay`: not in the mean, and a group of equal rewards beside it stays flat."""
    trainer = at_rest
    batch = trainer.rollout("ann", some_rows(trainer, 8))
    trainer.pay(batch, [1.0, 1.0, torch.nan, 1.0, 0.0, 1.0, torch.nan, torch.nan])
    A = batch["advantages"]
    assert (A[:4] == 0).all() and (A[6:] == 0).all() and A[4] == -A[5] < -0.5
    assert trainer._means["ann/frac_reward_zero_std"] == [0.5]
    assert trainer._means["ann/total_reward"] == [4 / 5]


@pytest.mark.parametrize("count", [1, 3, 6, 10])
def test_rows_must_fill_the_players_groups(at_rest, count):
    trainer = at_rest
    with pytest.raises(
        ValueError, match=f"{count} rows for the ann are not a multiple.*group of 4"
    ):
        trainer.rollout("ann", some_rows(trainer, count))


@pytest.mark.parametrize("call", ["rollout", "generate"])
@pytest.mark.parametrize(
    "prompt",
    ["a text", None, [], ["a text"], [{"role": "user"}], [{"content": "1"}], {"role": "user"},
     [{"role": "user", "content": None}]],
)  # fmt: skip
def test_prompts_must_be_messages(at_rest, prompt, call):
    trainer = at_rest
    good = trainer.train_dataset[0]["prompt"]
    with pytest.raises(ValueError, match="a prompt of the ann must be messages, as .*role.*; got"):
        if call == "rollout":
            trainer.rollout("ann", [{"prompt": good}] * 3 + [{"prompt": prompt}])
        else:
            trainer.generate("ann", [good, prompt])


def test_no_rows(at_rest):
    trainer = at_rest
    with pytest.raises(ValueError, match="no rows for the ann"):
        trainer.rollout("ann", [])
    with pytest.raises(ValueError, match="a prompt of the ann must be messages"):
        trainer.rollout("ann", [{"question": "no prompt"}] * 4)
    assert trainer.generate("ann", []) == trainer.generate_ids("ann", []) == []
    assert trainer.generate_all("ann", []) == []


def test_a_script_without_a_step():
    trainer = CoTrainer.__new__(CoTrainer)
    with pytest.raises(NotImplementedError):
        trainer.step([])


# ------------------------------------------------------------------ work shared between processes;
# two: test_two_processes.py
def test_one_process_does_all_the_work(at_rest):
    trainer = at_rest
    columns = [1, 2, 3], torch.tensor([[1.0], [2.0], [3.0]])
    double = trainer.over_all_processes(lambda a, b: b * torch.tensor(a)[:, None], *columns)
    assert double.tolist() == [[1.0], [4.0], [9.0]]
    assert trainer.in_parallel(lambda items: [x * 2 for x in items], [1, 2, 3]) == [2, 4, 6]
    assert trainer.my_share([1, 2, 3]) == [1, 2, 3] and trainer.in_parallel(list, []) == []
    prompts = [trainer.train_dataset[i]["prompt"] for i in range(3)]
    together = trainer.generate_all("ann", prompts, greedy=True)
    assert together == trainer.generate("ann", prompts, greedy=True) and len(together) == 3
