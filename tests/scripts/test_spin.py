"""spin.py: its loss against TRL's DPO trainer and a loop, its outer loop, its traps."""

import json
import math

from common.core.errors import UserError
from common.tiny import TINY
from spin import Args, Spin, human_ids, learning_rate_at, solve_prompt, spin_loss

import pytest
import torch
from conftest import (
    build,
    gradient,
    lora,
    moved,
    perturb,
    steps_of,
)
from datasets import Dataset
from trainers import log_probs_by_hand, logged
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

LN2 = math.log(2)


# ------------------------------------------------------------------ eq. 4.7
def test_equal_to_trls_dpo_sigmoid_loss(tmp_path):
    """The whole of TRL's DPOTrainer on the same pairs, opponent = reference model."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    player, opponent = (AutoModelForCausalLM.from_pretrained(TINY).eval() for _ in range(2))
    for p in player.parameters():
        p.data += 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    texts = [("3+4 mod 61", "<step>3+4=7</step>", "<step>3+4=8</step>\n9")]
    texts += [("(1+2)*3 mod 61", "<step>1", "9")]
    rows = [dict(zip(("prompt", "chosen", "rejected"), row)) for row in texts]
    config = DPOConfig(tmp_path, beta=0.1, use_cpu=True, report_to="none", bf16=False)
    inputs = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    trainer = DPOTrainer(player, opponent, config, **inputs)
    batch = trainer.data_collator([*trainer.train_dataset])
    theirs = trainer.compute_loss(player, batch).item()
    columns = []  # y under the player and under the opponent, y' under both
    for which in ("chosen", "rejected"):
        for model in (player, opponent):
            nats = []
            for row in rows:
                prompt = tokenizer(row["prompt"]).input_ids
                ids = tokenizer(row[which]).input_ids + [tokenizer.eos_token_id]
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0]
                logp = logits[len(prompt) - 1 : -1].log_softmax(-1)
                nats.append(logp[range(len(ids)), ids].sum())
            columns.append(torch.stack(nats))
    assert spin_loss(*columns, 0.1)[0].item() == pytest.approx(theirs, abs=1e-5)
    assert abs(theirs - LN2) > 1e-3  # the models do differ


def test_schedule():
    """Of 20 steps each: two of warm-up, then linear to almost 0; a fifth from the third on."""
    iteration = [0.5] + [(20 - step) / 19 for step in range(1, 20)]
    rates = [learning_rate_at(step, 20) for step in range(80)]
    assert rates[:40] == pytest.approx(iteration * 2)
    assert rates[40:] == pytest.approx([0.2 * rate for rate in iteration * 2])
    assert all(learning_rate_at(step, 1) > 0 for step in range(4))


# ------------------------------------------------------------------ `step` and `loss`, one by one
def make_spin(folder, **change) -> Spin:
    """A Spin trainer in the middle of iteration 0, its eight pairs made, its two adapters apart."""
    args = Args(**{"steps": 8, "questions": 8, "micro_batch": 8} | change)
    kind = lambda *inputs: Spin(*inputs, inputs[-1][-8:])  # noqa: E731  the last are held out
    trainer = build(
        kind, folder, args, Spin.define_players(args), solve_prompt, rows=args.questions
    )
    perturb(trainer, 0.05)
    human = [human_ids(row, trainer.processing_class) for row in trainer.train_rows]
    pairs = [
        {"question": row["question"], "real": y, "generated": other[: 30 + i]}
        for i, (row, y, other) in enumerate(zip(trainer.train_rows[:8], human, human[8:]))
    ]
    trainer.saved = {"iteration": 0, "pairs": pairs, "previous_pairs": []}
    return trainer


@pytest.mark.parametrize("opponent", ["previous", "none"])
def test_the_step_is_the_papers_loss_however_it_is_cut(tmp_path, opponent):
    """Eq. 4.7, or minus the log-likelihood per human token, one completion at a time. Also at
    another temperature: it is the opponent's when it writes, never when it is scored.
    """
    trainer = make_spin(tmp_path, opponent=opponent)
    pairs = trainer.saved["pairs"]

    def nats(adapter, pair, which):
        prompt = solve_prompt(pair["question"])
        return sum(log_probs_by_hand(trainer, adapter, prompt, pair[which]))

    def reward(pair, which):
        return 0.1 * (nats("player", pair, which) - nats("opponent", pair, which))

    h = [reward(pair, "real") - reward(pair, "generated") for pair in pairs]
    expected = sum(math.log(1 + math.exp(-x)) for x in h) / 8
    if opponent == "none":
        human = sum(nats("player", pair, "real") for pair in pairs)
        expected = -human / sum(len(pair["real"]) for pair in pairs)
    found = gradient(trainer, trainer.step([])[0])
    total, count = trainer._sums["player/loss"]
    assert total / count == pytest.approx(expected, abs=1e-5)
    assert all(".player." in name for name in found)
    assert max(g.abs().max() for g in found.values()) > 1e-3
    change = {"micro_batch": 3, "opponent_temperature": 0.5, "opponent": opponent}
    again = make_spin(tmp_path, **change)  # cut into 3, 3 and 2 pairs
    for name, g in gradient(again, again.step([])[0]).items():
        torch.testing.assert_close(g, found[name], rtol=0, atol=1e-6)
    assert logged(again) == pytest.approx(logged(trainer), abs=1e-5)
    assert torch.isfinite(spin_loss(*1e6 * torch.randn(4, 6), 5.0)[0])


def test_an_iteration_is_one_pass_over_the_mixed_pairs(tmp_path):
    """Two steps of 8 pairs; so 8 of the 16 prompts are asked, and without mixing all of them."""
    trainer, taken = make_spin(tmp_path), []
    previous = [{**pair, "question": f"old {pair['question']}"} for pair in trainer.saved["pairs"]]
    trainer.saved["previous_pairs"] = previous
    for trainer.state.global_step in range(2):
        taken += [note["prompt"] for note in trainer.step([])[0].notes]
    questions = [pair["question"] for pair in trainer.saved["pairs"] + previous]
    assert sorted(taken) == sorted(questions) and taken != questions
    assert trainer.length == 2 and len(trainer.prompts()) == 8
    assert len(make_spin(tmp_path, mix_previous=False).prompts()) == 16
    trainer.length = trainer.cfg.questions = 1
    assert len(trainer.prompts()) == 1  # and not half of one


def test_a_human_answer_fits_with_its_end_token(tmp_path):
    trainer = make_spin(tmp_path)
    rows = trainer.train_rows
    longest = max(len(human_ids(row, trainer.processing_class)) for row in rows)
    trainer.cfg.solution_tokens = longest
    assert trainer.with_human_answers(rows) == rows
    trainer.cfg.solution_tokens -= 1
    assert 0 < len(trainer.with_human_answers(rows)) < len(rows)


def test_the_last_iteration_has_its_own_lambda(tmp_path):
    trainer, found = make_spin(tmp_path), []
    for trainer.state.global_step in range(8):
        found.append(trainer.scale())
    assert found == [0.1] * 6 + [5.0] * 2


def test_a_new_iteration_copies_the_player_and_forgets_the_optimisers_past(tmp_path):
    def weights_of(adapter: str) -> dict:
        return dict(enumerate(lora(trainer, adapter).values()))

    trainer = make_spin(tmp_path)
    players = weights_of("player")
    assert moved(players, weights_of("ref")) > 0
    trainer.create_optimizer()
    trainer.optimizer.state[trainer.parameters_of("player")[0]] = {"step": torch.tensor(3.0)}
    before = trainer.saved["pairs"]
    trainer.start_iteration(1)
    assert not trainer.optimizer.state
    assert moved(players, weights_of("player")) == moved(players, weights_of("ref")) == 0
    assert trainer.saved["iteration"] == 1 and trainer.saved["previous_pairs"] == before
    made = [pair["question"] for pair in trainer.saved["pairs"]]
    assert made == [row["question"] for row in trainer.prompts()]
    # an opponent that writes what humans write
    trainer.generate_ids = lambda *_: [pair["real"] for pair in trainer.saved["pairs"]]
    with pytest.raises(UserError, match="iteration 2: .* nothing is left to learn"):
        trainer.start_iteration(2)


# ------------------------------------------------------------------ a run: four iterations of two
def test_every_iteration_begins_at_ln2_with_a_new_opponent_and_a_new_warm_up(finished):
    """Steps 1, 3, 5 and 7 open iterations: loss ln 2, rewards 0, to float32 rounding of a sum of
    log-probs times lambda = 5.
    """
    folder, *_ = finished("spin.py")
    lr = json.loads((folder / "args.json").read_text())["lr"]
    for row in steps_of(folder):
        opens = row["step"] % 2 == 1
        assert (abs(row["player/spin_loss"] - LN2) < 1e-4) == opens, row["step"]
        for key in ("reward_human", "reward_generated", "pair_accuracy"):
            assert (f"player/{key}" in row) != opens  # rounding is no figure
        assert ("opponent/accuracy" in row) == opens  # it writes then
        rate = lr * learning_rate_at(row["step"] - 1, 2)
        assert row["player/learning_rate"] == pytest.approx(rate)
