"""common/checked.py: mistakes that one call can make, and the sentence that each ends in."""

import copy
import gc
import weakref
from dataclasses import replace

from common.checked import CoTrainer
from common.core.batch import Batch
from common.core.errors import ScriptError
from common.core.model import tokenize

import pytest
import torch
from trainers import a_batch, four_players, some_rows

MASK = torch.ones(8, 4, dtype=torch.long)
HOLE = torch.tensor([[1, 1, 0, 1]]).repeat(8, 1)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """Every step of it is refused before anybody is trained."""
    return four_players(tmp_path_factory.mktemp("checks"))


def play(trainer, step):
    """An optimiser step, as Trainer calls it."""
    trainer.step = lambda rows: step(trainer, rows)
    return trainer.training_step(trainer.model, some_rows(trainer))


# ------------------------------------------------------------------ what `step` returns
def changed(**fields):
    return lambda batch: [replace(batch, **fields)]


@pytest.mark.parametrize(
    "result, says",
    [
        (changed(player="eve"), "no player 'eve'; there are ann, bob, cat"),
        (changed(player="bob"), "bob cannot be trained on what the ann has"),
        (changed(completion_mask=HOLE), "completion_mask must be ones"),
        (changed(completion_mask=0 * HOLE), "completion_mask must be ones"),
        (changed(texts=["a"] * 4), r"8 rows, and its texts 4; give.*each row.*take\(rows"),
        (changed(notes=[{"player": "ann"}] * 7), "8 rows, and its notes 7"),
        (changed(rewards=torch.full((8,), -1.0)), "rewards.*ann has changed"),
    ],
)
def test_a_step_must_return_batches_of_players(trainer, result, says):
    with pytest.raises(ScriptError, match=says):
        play(trainer, lambda *_: result(replace(a_batch(trainer, "ann"), completion_mask=MASK)))


@pytest.mark.parametrize(
    "advantages, says",
    [
        (lambda A: A[:4], r"must be \(B,\) or \(B, T\), here \(8,\) or \(8, \d+\); got \(4,\)"),
        (lambda A: A[:, None], r"got \(8, 1\)"),
        (lambda A: A[0], r"got \(\)"),
        (lambda A: A.masked_fill(torch.arange(8) == 5, torch.nan), "finite.*not in row 5"),
        (lambda A: A.masked_fill(torch.arange(8) == 2, -torch.inf), "finite.*not in row 2"),
        (lambda A: A * torch.ones(1, requires_grad=True), "have a gradient.*detach"),
    ],
)
def test_advantages_are_finite_floats_of_rows_or_tokens(trainer, advantages, says):
    batch = a_batch(trainer, "ann")
    batch.advantages = advantages(batch.advantages)
    with pytest.raises(ScriptError, match=f"advantages.*{says}"):
        play(trainer, lambda *_: [batch])


def test_a_batch_is_trained_on_once(tmp_path):
    """However it comes back: as a copy, from the step before, or in a batch that was joined."""
    kept = []

    def of_this_step(trainer, rows):
        batch = a_batch(trainer, "ann")
        return [batch, copy.deepcopy(batch)]

    def of_the_step_before(trainer, rows):
        kept.append(a_batch(trainer, "ann"))
        return kept[:1]

    def a_part_of_it(trainer, rows):
        parts = [a_batch(trainer, "ann"), a_batch(trainer, "ann")]
        trainer.update(trainer.concat(parts))
        return parts[:1]

    def by_another_player(trainer, rows):
        batch = a_batch(trainer, "ann")
        trainer.update(replace(batch, player="bob", notes=[]))
        return [batch]

    for step in (of_this_step, of_the_step_before, a_part_of_it, by_another_player):
        trainer = four_players(tmp_path, step, steps=2)
        with pytest.raises(ScriptError, match="a batch of the ann has been trained on already"):
            trainer.train()


def test_nobody_has_set_rewards(trainer):
    """Its advantages would be zero, and nothing would be learnt, without a word."""
    batch = trainer.rollout("cat", some_rows(trainer, 4))
    for call in (lambda: play(trainer, lambda *_: [batch]), lambda: trainer.update(batch)):
        with pytest.raises(ScriptError, match="the cat's batch has no advantages.*set_rewards"):
            call()
    joined = trainer.concat([a_batch(trainer, "bob"), batch])
    with pytest.raises(ScriptError, match="a batch of the cat that had no advantages"):
        trainer.update(joined)


OF_THE_ROWS = lambda self, batch, loss: loss * 8 / len(batch)  # noqa: E731
ENTROPY = lambda self, batch, loss: loss + self.score(batch)[1].sum() / 64  # noqa: E731
A_MEAN = lambda self, batch, loss: loss + 1e-2 * self.score(batch)[0].detach().mean()  # noqa: E731


@pytest.mark.parametrize(
    "change, says",
    [
        (OF_THE_ROWS, "the ann's loss of a micro-batch is not the sum of those of its halves"),
        (A_MEAN, "the ann's loss of a micro-batch is not the sum of those of its halves"),
        (ENTROPY, "the ann's loss has a gradient in rows whose advantages are 0, and these are"),
    ],
)
def test_a_loss_is_looked_at_once(tmp_path, capsys, change, says):
    class Own(CoTrainer):
        def loss(self, batch):
            loss, shown = super().loss(batch)
            return change(self, batch, loss), shown

    trainer = four_players(tmp_path, kind=Own)
    trainer.create_optimizer()
    batches = [a_batch(trainer, "ann") for _ in range(2)]
    for batch in batches:
        batch.advantages = torch.tensor([1.0, -1.0, 0.0, 0.0] * 2)
    capsys.readouterr()
    for batch in batches:
        trainer.update(batch)
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(f"warning: {says}")


@pytest.mark.parametrize(
    "divided, says",
    [
        (lambda loss, batch: loss, ["is divided by nothing"]),
        (lambda loss, batch: loss / batch.total_tokens, []),
        (lambda loss, batch: loss / batch.extras["rows"], []),  # sums over tokens, a mean over rows
        (lambda loss, batch: loss / (8 * 8), []),  # Dr. GRPO: a constant
    ],
)
def test_a_loss_that_is_divided_by_nothing_is_said(tmp_path, capsys, divided, says):
    class Own(CoTrainer):
        def loss(self, batch):
            logp = self.score(batch)[0]
            A = batch.advantages[:, None] * batch.completion_mask
            return divided(-(A * (logp - logp.detach()).exp()).sum(), batch), {}

    trainer = four_players(tmp_path, kind=Own)
    trainer.create_optimizer()
    batch = a_batch(trainer, "ann")
    batch.extras["rows"] = 8
    capsys.readouterr()
    trainer.update(batch)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(says) and all(map(str.__contains__, said, says))


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda row: row.update(answer="3"), True),
        (lambda row: row.update(question="3"), True),
        (lambda row: row.update(solution="3"), False),
        (lambda row: row | {"answer": "3"}, False),
    ],
)
def test_an_answer_that_step_overwrites_is_said(trainer, monkeypatch, capsys, change, says):
    monkeypatch.setattr(trainer, "step", lambda rows: [change(rows[1])], raising=False)
    trainer.warned.clear()
    trainer.run_step([{"question": "1+1", "answer": "2"} for _ in range(2)])
    assert ("`step` has overwritten" in capsys.readouterr().out) == says


@pytest.mark.parametrize(
    "text, says",
    [
        ("Problem: 3+4 mod 61\nSolution:\n<step>3+4=7</step>\nIs it right?", True),
        ("  3+4 mod 61  \nThink.", True),
        ("Read this.\nTwo lines\n make a question.\nSolve it.", True),
        ("Read this.\nTwo lines\nare no question.", False),
        ("Problem: 1+3+4 mod 61", False),
        ("Problem: 3+4 mod 617", False),
    ],
)
def test_a_held_out_question_in_a_prompt_is_said(trainer, monkeypatch, capsys, text, says):
    """Of a row that has no question of its own: what a verifier reads, for example."""
    held_out = {"3+4 mod 61", "Two lines\n make a question."}
    monkeypatch.setattr(trainer, "held_out_questions", held_out)
    for row in ({}, {"question": "1+3+4 mod 61"}):
        trainer.warned.clear()
        trainer.check_held_out("ann", [{"prompt": [user(text)]} | row])
        said = capsys.readouterr().out
        assert ("quotes a held-out question" in said) == (says and not row)


# ------------------------------------------------------------------ rollout and generate
def user(content="1+1") -> dict:
    return {"role": "user", "content": content}


ROW, OTHER = ({"prompt": [user(text)]} for text in ("1+1", "1+2"))


@pytest.mark.parametrize(
    "rows, says",
    [
        # rewards of different questions must not be compared with each other
        ([ROW] * 6 + [OTHER] * 2, "rows 4 to 7.* a group.*their prompts differ; repeat each row 4"),
        ([ROW, OTHER] * 4, "rows 0 to 3 for the ann are a group"),  # the group not adjacent
        ([{"prompt": [user("")]}] * 4, "the ann is asked nothing: all.*without a `prompt`"),
        ([ROW | {"question": "2+2"}] * 4, r"the ann on a held-out question \('2\+2'\)"),
        ([ROW | {"question": " 2+2 \n"}] * 4, "the ann on a held-out question"),
        ([{"prompt": [user(" 2+2 \n")]}] * 4, "the ann on a held-out question"),
        *[([ROW | {n: 1}] * 4, f"cannot be called '{n}'") for n in ("completions", "log_metric")],
    ],
)
def test_rows_of_a_rollout(trainer, monkeypatch, rows, says):
    monkeypatch.setattr(trainer, "held_out_questions", {"2+2"})
    with pytest.raises(ScriptError, match=says):
        trainer.rollout("ann", rows)
    assert len(trainer.rollout("cat", [ROW] * 2 + [OTHER] * 2).texts) == 4  # groups of two


@pytest.mark.parametrize(
    "prompt, says",
    [
        ([{"role": "human", "content": "1"}], "has the role 'human'.*it can be system, user"),
        ([user(), {"role": "assistant", "content": "2"}], "ends with a message of the assistant"),
        ([{"role": "system", "content": "2"}], "ends with a message of the system"),
    ],
)
def test_the_last_message_of_a_prompt_is_the_users(trainer, prompt, says):
    with pytest.raises(ScriptError, match=f"a prompt of the ann {says}"):
        trainer.generate("ann", [ROW["prompt"], prompt])


def test_a_prompt_that_gives_the_answer_away_is_said_once(trainer, monkeypatch, capsys):
    def rows(text, **more):
        return [
            {"prompt": [user(text.format(q=f"{i}+1", a=30 + i))], "question": f"{i}+1"}
            | {"answer": str(30 + i), **more}
            for i in range(4)
        ]

    for fine in (rows("{q} is?"), rows("{q} {a}5"), rows("{q} {a}.5"), rows("{q} is {a}")[:3]):
        trainer.check_gold("ann", fine)
    written = [f"<answer>{30 + i}</answer>" for i in range(4)]  # right solutions, to be judged
    monkeypatch.setitem(trainer.latest_texts, "bob", written)
    monkeypatch.setattr(trainer, "train_rows", rows("{q}"))
    right = rows("{q} <answer>{a}</answer>")
    for judged in (right, [{"prompt": row["prompt"]} for row in right]):
        trainer.check_gold("ann", judged)
    assert capsys.readouterr().out == ""
    for _ in range(2):
        trainer.check_gold("ann", rows("{q} is {a}"))
        long = rows("so it is said, one " * 2, reference="so it is said, one so")
        trainer.check_gold("ann", long)
        leaks = rows("{q} <answer>{a}</answer> Gold: {a}")
        trainer.check_gold("bob", [{"prompt": row["prompt"]} for row in leaks])
    assert capsys.readouterr().out.splitlines() == [
        "warning: every prompt of the ann shows its row's gold answer",
        "warning: every prompt of the ann shows its row's reference solution",
        "warning: every prompt of the bob shows its row's gold answer",
    ]


def test_a_player_with_nothing_to_learn_from_is_said(tmp_path, capsys):
    """Three updates in a row without a gradient; a start at which nearly all rewards are alike."""
    trainer = four_players(tmp_path)
    trainer.create_optimizer()
    trainer.rollout("ann", some_rows(trainer, 16))
    (cut,) = capsys.readouterr().out.splitlines()
    assert cut == "warning: 100% of the ann's completions are cut at its max_tokens"
    said = []
    for flat in (True, True, False, True, True, True, True):
        batch = trainer.rollout("ann", some_rows(trainer, 16))
        trainer.set_rewards(batch, torch.arange(16.0))
        batch.advantages *= not flat
        trainer.update(batch)
        said.append(capsys.readouterr().out.partition(".")[0])
    idle = "warning: 3 updates in a row of the ann taught it nothing: all advantages were 0"
    assert said == [""] * 5 + [idle, ""]
    for equal, step in ((15, 0), (16, 1), (16, 0)):
        trainer.state.global_step = step
        batch = Batch("bob", MASK, MASK, MASK * 9, MASK, row=torch.arange(8), texts=["."])
        batch.rewards = (torch.arange(16) >= equal).float()
        trainer.check_learning("bob", batch, False)
        said = capsys.readouterr().out
        assert ("100% of the bob's rewards are 0" in said) == (equal == 16 and step == 0)


def test_a_prompt_longer_than_memory_was_planned_for_is_said(tmp_path, capsys):
    """As where a judge reads solutions and its `reads` was forgotten. Once, at the start."""
    trainer, said = four_players(tmp_path), []
    prompt = [{"role": "user", "content": "3+4 mod 61" * 350}]
    (ids,) = tokenize([prompt], trainer.processing_class)
    for reads, step in ((len(ids) - 1280, 0), (0, 1), (len(ids) - 1281, 0), (0, 0)):
        trainer.players["ann"].reads, trainer.state.global_step = reads, step
        trainer.rollout("ann", [{"prompt": prompt}] * 4)
        said.append(capsys.readouterr().out)
    assert ["memory" in text for text in said] == [False, False, True, True] and len(ids) > 1281
    planned = f"up to {len(ids)} tokens, and memory was planned for {len(ids) - 1}: 1280 of"
    assert planned in said[2] and "reads=0" in said[3]


# ------------------------------------------------------------------ set_rewards and concat
@pytest.mark.parametrize(
    "rewards, groups, says",
    [
        ([1.0] * 3, None, "rewards must have an entry for each of the 4 rows; got 3"),
        ([1.0] * 4, [1, 1, 2], "groups must have an entry for each of the 4 rows; got 3"),
    ],
)
def test_set_rewards_wants_one_reward_per_row(trainer, rewards, groups, says):
    batch = trainer.rollout("ann", some_rows(trainer, 4))
    before = batch.rewards.tolist()
    with pytest.raises(ScriptError, match=f"set_rewards: .*{says}"):
        trainer.set_rewards(batch, rewards, groups)
    assert batch.rewards.tolist() == before


def test_set_rewards_is_called_once_on_a_batch_and_before_advantages_are_written(trainer):
    batch = trainer.rollout("ann", some_rows(trainer, 4))
    trainer.set_rewards(batch, [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(ScriptError, match="the ann's batch has its rewards already"):
        trainer.set_rewards(batch, [1.0] * 4)
    with pytest.raises(ScriptError, match="set_rewards would replace the advantages"):
        trainer.set_rewards(a_batch(trainer, "ann", 4), [1.0] * 4)


def test_a_joined_batch_has_one_temperature_and_kl_weights_or_none(trainer):
    """It would be scored at that of the player whose name is the adapter's."""
    of = {name: a_batch(trainer, name, 4) for name in ("bob", "cat", "dan")}
    for names in (("bob", "dan"), ("dan", "bob"), ("dan",)):
        says = "the dan samples at temperature 0.5, and.* at 1, as the bob"
        with pytest.raises(ScriptError, match=says):
            trainer.concat([of[name] for name in names])
    of["cat"].kl_weights = torch.ones(4)
    with pytest.raises(ScriptError, match="the bob's batch has no kl_weights"):
        trainer.concat([of["bob"], of["cat"]])
    of["bob"].kl_weights = torch.zeros(4)
    whole = trainer.concat([of["bob"], of["cat"]])
    assert whole.kl_weights.tolist() == [0] * 4 + [1] * 4


def test_concat_refuses_what_would_be_trained_on_twice_or_wrongly(trainer):
    batches = {name: a_batch(trainer, "bob", 4) for name in ("bob", "new")}
    batches["new"].rewards = batches["new"].rewards + 1
    for names, says in (
        ("bob bob", "one batch is among them twice"),
        ("bob new", "rewards.*of the bob has changed.*use set_rewards"),
    ):
        with pytest.raises(ScriptError, match=says):
            trainer.concat([batches[name] for name in names.split()])


def test_a_rollout_that_was_cut_and_joined_again_is_still_watched(trainer):
    """Of parts of one rollout each; and of the whole, whose rewards are the parts' own."""
    for change, says in (
        (lambda whole, parts: parts[0].advantages.mul_(2), "bob were set after concat"),
        (lambda whole, parts: parts[1].advantages.mul_(2), "bob were set after concat"),
        (lambda whole, parts: whole.rewards.add_(1), "batch.rewards of the bob has changed"),
    ):
        batch = a_batch(trainer, "bob")
        parts = [batch.take(torch.arange(4)), batch.take(torch.arange(4, 8))]
        whole = trainer.concat(parts)
        trainer.check_batch(whole)
        change(whole, parts)
        with pytest.raises(ScriptError, match=says):
            trainer.check_batch(whole)


def test_nothing_is_remembered_of_a_batch_that_is_gone(trainer):
    fates = [weakref.ref(a_batch(trainer, "ann").rollouts[0]) for _ in range(3)]
    gc.collect()
    assert [fate() for fate in fates] == [None] * 3


def test_disjoint_rows_are_trained_on_in_turn_by_a_loss_that_has_a_ratio(tmp_path):
    class Clipped(CoTrainer):
        def loss(self, batch):
            ratio = (self.score(batch)[0] - batch.sampled_logps).exp()  # (b, T)
            A, mask = batch.advantages[:, None], batch.completion_mask
            loss = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)  # (b, T)
            return (loss * mask).sum() / 64, {}

    halves = torch.arange(8).split(4)
    for kind, says in ((Clipped, None), (None, r"the ratio .*sampled_logps.*batch.take\(rows\)")):
        trainer = four_players(tmp_path, kind=kind)
        trainer.create_optimizer()
        batch = a_batch(trainer, "ann")
        trainer.update(batch.take(halves[0]))
        if says:
            with pytest.raises(ScriptError, match=says):
                trainer.update(batch.take(halves[1]))
        else:
            trainer.update(batch.take(halves[1]))
            with pytest.raises(ScriptError, match="has been trained on already"):
                trainer.update(batch.take(torch.tensor([1, 6])))


def test_one_attribute_turns_the_guards_off(tmp_path, capsys):
    class Unchecked(CoTrainer):
        checks = False

    trainer = four_players(tmp_path, kind=Unchecked)
    trainer.create_optimizer()
    batch = a_batch(trainer, "ann")
    for _ in range(4):
        trainer.update(batch)
        batch.rewards, batch.advantages = batch.rewards + 1, torch.zeros(8)
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------ checkpoints, data, evaluation
def test_what_a_checkpoint_cannot_keep(tmp_path):
    """It is said after the first step, and not when the run is resumed."""

    def step(trainer, rows):
        trainer.saved = {"a": torch.ones(2)}
        return [a_batch(trainer, "ann")]

    with pytest.raises(ScriptError, match=r"self.saved\['a'\] cannot be kept"):
        play(four_players(tmp_path), step)


def test_what_a_script_remembers_outside_of_saved_is_said(tmp_path, capsys):
    def step(trainer, rows):
        trainer.seen.append(1)
        trainer.count, trainer.saved["count"] = 1, 1
        if trainer.state.global_step:
            trainer.late = 1
        return [a_batch(trainer, "ann")]

    trainer = four_players(tmp_path)
    trainer.create_optimizer()
    trainer.seen, trainer.fixed = [], {"a": 1}
    capsys.readouterr()
    for _ in range(2):
        play(trainer, step)
        trainer.state.global_step += 1
    said = [line.split(" in ")[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(said) == [
        f"warning: self.{n} was set or changed" for n in ("count", "late", "seen")
    ]
