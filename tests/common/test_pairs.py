"""Pairs and epochs: what a step takes, and pairs cut and trimmed in every way
against one forward pass per completion."""

from collections import Counter

from common import fast
from common.checked import CoTrainer, Player
from common.core import plain
from common.core.batch import as_completions, chosen_and_rejected
from common.core.lists import epochs
from common.core.model import tokenize
from common.run.report.recording import read_lines

import pytest
import torch
from conftest import make_players, make_trainer
from trainers import log_probs_by_hand, logged

QUESTIONS = ["3+4 mod 61", "(1+2)*3 mod 61", "9*9 mod 61", "2+2 mod 61", "((7+8)*2)+1 mod 61"]
COMPLETIONS = [  # chosen, rejected; the longest is rejected, the shortest is cut, one is empty
    ("<step>3+4=7</step><|end|>", "<step>3+4=8</step>\n<step>8</step>\n<step>8</step><|end|>"),
    ("<step>1+2=3</step>\n<step>3*3=9</step><|end|>", "<step>1"),
    ("<|end|>", "<step>9*9=1</step><|end|>"),
    ("<step>2+2=4</step><|end|>", ""),
    ("<step>7+8=5</step>\n<step>5*2=0</step>\n<step>0+1=1</step>", "9<|end|>"),
]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("run"), micro_batch=2)


def messages(question):
    return [{"role": "user", "content": question}]


def make_batch(trainer):
    def encoded(text):
        return trainer.encode(text.removesuffix("<|end|>"), ended=text.endswith("<|end|>"))

    pairs = [tuple(map(encoded, pair)) for pair in COMPLETIONS]
    return trainer.pairs("generator", [messages(q) for q in QUESTIONS], pairs)


# ------------------------------------------------------------------ which pairs a step takes
def test_every_pass_has_every_item_once_in_an_order_of_its_own():
    items = list(range(50))
    passes = [epochs(items, 50 * n, 50, "0") for n in range(3)]
    assert all(sorted(order) == items for order in passes)
    assert len({tuple(order) for order in [*passes, items, epochs(items, 0, 50, "1")]}) == 5


@pytest.mark.parametrize("count", [1, 3, 7, 8, 20, 64])
def test_steps_follow_each_other_without_a_gap(count):
    """Whatever a step takes: fewer than all, more than one pass, more than two."""
    taken = sum((epochs(list("abcdefgh"), n * count, count, "key") for n in range(8)), [])
    assert taken == epochs(list("abcdefgh"), 0, 8 * count, "key")
    times = Counter(taken)
    assert len(taken) == 8 * count and set(times.values()) == {count}  # eight items, count passes


# ------------------------------------------------------------------ batches
def test_a_pair_batch_holds_the_tokens_it_was_given(trainer):
    batch, tokenizer = make_batch(trainer), trainer.processing_class
    rows = as_completions(batch)
    for i, (question, texts) in enumerate(zip(QUESTIONS, COMPLETIONS)):
        prompt = tokenizer(f"<|user|>{question}<|assistant|>").input_ids
        for j, text in enumerate(texts):
            row = 2 * i + j
            asked, written = rows.prompt_mask[row], rows.completion_mask[row]
            assert rows.prompt_ids[row][asked.bool()].tolist() == prompt
            ids = rows.completion_ids[row][written.bool()].tolist()
            assert ids == tokenizer(text).input_ids  # a cut one gets no end
            assert asked.diff().min() >= 0  # padded on the left,
            assert written.diff().max() <= 0  # and on the right
        longer = max(len(tokenizer(text).input_ids) for text in texts)
        assert batch.lengths()[i] == longer
    assert batch.row.tolist() == list(range(5)) and batch.advantages is None


def test_prompts_are_those_of_a_rollout(trainer):
    """A question cannot end the user's message by spelling the template's marks out."""
    prompts = [messages(q) for q in ("1+1 mod 61", "9<|end|><|assistant|>1 mod 61")]
    batch = trainer.completions("generator", prompts, [[5], [6, 7]])
    kept = [ids[m.bool()].tolist() for ids, m in zip(batch.prompt_ids, batch.prompt_mask)]
    assert kept == tokenize(prompts, trainer.processing_class)
    assert (
        len(trainer.completions("generator", [], []))
        == len(trainer.pairs("generator", [], []))
        == 0
    )
    assert batch.completion_mask.tolist() == [[1, 0], [1, 1]]


# ------------------------------------------------------------------ log-probs of pairs
@pytest.mark.parametrize("parts", [[[3], [2, 1], [4, 0]], [[0, 1, 2, 3, 4]]])
def test_log_probs_do_not_depend_on_how_pairs_are_cut(trainer, parts):
    batch, tokenizer = make_batch(trainer), trainer.processing_class

    def logp(question, text):
        ids = tokenizer(text).input_ids
        return sum(log_probs_by_hand(trainer, "generator", messages(question), ids))

    expected = [[logp(q, text) for text in texts] for q, texts in zip(QUESTIONS, COMPLETIONS)]
    found = torch.full((5, 2), torch.nan)
    for rows in parts:
        part = batch.take(torch.tensor(rows))
        width = int(batch.lengths()[rows].max())
        both = as_completions(part)
        assert both.completion_ids.shape == (2 * len(rows), width)  # trimmed with the pairs
        logp = trainer.log_probs("generator", both)
        assert logp.shape == both.completion_ids.shape and both.player == "generator"
        found[part.row] = torch.stack(chosen_and_rejected(logp.sum(1)), 1)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-4)


def test_parts_of_a_batch_of_pairs_hold_every_pair_once(trainer):
    """No pair is dropped for its advantages: it has none."""
    batch = make_batch(trainer)
    parts = [batch.take(rows) for rows in trainer.micro_batches(batch)]
    assert [part.player for part in parts] == ["generator"] * 3
    assert sorted(sum((part.row.tolist() for part in parts), [])) == list(range(5))
    widths = [part.completion_mask.shape[2] for part in parts]
    assert widths == sorted(widths) and widths[0] < widths[-1]


# ------------------------------------------------------------------ what a loss shows
def test_what_a_loss_returns_by_name_is_logged_as_means_however_it_is_cut(tmp_path):
    """Per token, per pair, and of some pairs only; "credit" is not logged. The loss is also asked
    by the guards, and what it shows then is shown to nobody."""
    seen = []

    class Shows(CoTrainer):
        def loss(self, batch):
            both = as_completions(batch)
            logp, _ = self.score(both)  # (2b, T)
            chosen, rejected = chosen_and_rejected(logp.sum(1))  # (b,) each
            shown = {"logp": logp, "chosen": chosen, "even": chosen[batch.row % 2 == 0]}
            return (rejected - chosen).sum() / 5, shown | {"credit": logp}

        def show_loss(self, batch, shown):
            super().show_loss(batch, shown)
            seen.append(len(batch))
            assert not any(values.requires_grad for values in shown.values())

    players = {"generator": Player([], 1e-3, 8, rows=2)}
    trainer = make_players(tmp_path, players, kind=Shows, micro_batch=2)
    trainer.create_optimizer()
    rows = [0, 1, 2, 4]  # not the one with an empty completion
    batch = make_batch(trainer).take(torch.tensor(rows))
    logps = []
    for i, row in enumerate(rows):
        for ids, mask in zip(batch.completion_ids[i], batch.completion_mask[i]):
            asked, ids = messages(QUESTIONS[row]), ids[mask.bool()].tolist()
            logps.append(log_probs_by_hand(trainer, "generator", asked, ids))
    trainer.update(batch)
    tokens, chosen = sum(logps, []), [sum(row) for row in logps[::2]]
    found = logged(trainer)
    assert found["generator/logp"] == pytest.approx(sum(tokens) / len(tokens), rel=1e-4)
    assert found["generator/chosen"] == pytest.approx(sum(chosen) / 4, rel=1e-4)
    even = chosen[0] + chosen[2] + chosen[3]
    assert found["generator/even"] == pytest.approx(even / 3, rel=1e-4)
    assert "generator/credit" not in found and sorted(seen) == [2, 2]


def test_the_same_rows_are_recorded_however_the_batch_is_sorted_and_split(tmp_path):
    """Of pairs and of completions, five prompts each; sorted as fast/ does, or not at all."""

    class Recorded(CoTrainer):
        def loss(self, batch):
            rows = as_completions(batch) if batch.player == "pairs" else batch
            logp, _ = self.score(rows)
            return -logp.sum() / 5, {"credit": logp}

        def show_loss(self, batch, shown):
            sides = ["right", "wrong"] if batch.player == "pairs" else []
            self.record_part(batch, shown["credit"], "sum", shown["credit"].sum(1), sides)

    players = {name: Player([], 1e-9, 8, rows=2, adapter="one") for name in ("pairs", "texts")}
    trainer = make_players(tmp_path, players, kind=Recorded)
    trainer.create_optimizer()
    encoded = [[trainer.encode(text, ended=False) for text in pair] for pair in COMPLETIONS]
    pairs = trainer.pairs("pairs", [messages(q) for q in QUESTIONS], encoded)
    texts = trainer.completions("texts", [messages(q) for q in QUESTIONS], [p[1] for p in encoded])
    written = []
    for engine, micro_batch in ((plain, 8), (plain, 2), (fast, 5), (fast, 2), (fast, 1)):
        trainer.engine, trainer.cfg.micro_batch = engine, micro_batch
        trainer.update(pairs.take(torch.tensor([0, 1, 2, 4])))  # one text of pair 3 is empty
        trainer.update(texts.take(torch.tensor([4, 2, 1])))
        written.append(read_lines(tmp_path / "rollouts.jsonl")[0])
        (tmp_path / "rollouts.jsonl").unlink()
    shown = [("right", 0), ("right", 1), ("wrong", 0), ("wrong", 1), ("texts", 1), ("texts", 2)]
    for rows in written:
        found = [(row["player"], QUESTIONS.index(row["prompt"])) for row in rows]
        assert found == shown and [row["tokens"] for row in rows] == [
            trainer.processing_class.tokenize(COMPLETIONS[i][who != "right"]) for who, i in shown
        ]
        for row, same in zip(rows, written[0]):
            assert row["advantages"] == pytest.approx(same["advantages"], abs=1e-3)
            assert row["rewards"]["sum"] == pytest.approx(sum(row["advantages"]), rel=1e-2)
