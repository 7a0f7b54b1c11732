"""self_rewarding.py: scores and pairs by hand, the loss against TRL's, rounds with given
completions.
"""

import math
import random

import self_rewarding as sr

import pytest
from conftest import build, lora, moved, perturb
from trainers import QUESTION, RIGHT, WRONG, encoded, log_probs_by_hand, without_model


# ------------------------------------------------------------------ scores and pairs
def test_a_reading_that_cannot_be_parsed_is_no_zero():
    assert sr.mean_score([1.0, None, 0.5]) == 0.75
    assert sr.mean_score([None, None]) is None and sr.mean_score([]) is None
    assert sr.mean_score([0.0]) == 0.0
    assert sr.mean_score([1.0, None]) is None  # one lucky reading of two is no score
    assert sr.rank_score([None]) < sr.rank_score([0.0]) < sr.rank_score([0.5, 0.0])


@pytest.mark.parametrize("seed", range(50))
def test_best_and_worst_are_the_first_of_equal_ones(seed):
    rng = random.Random(seed)
    scores = [rng.choice([None, 0.0, 0.5, 1.0]) for _ in range(rng.randint(0, 5))]
    known, wanted = [score for score in scores if score is not None], None
    if len({*known}) > 1:
        wanted = (scores.index(max(known)), scores.index(min(known)))
    assert sr.best_and_worst(scores) == wanted


def answer(text, right=None):
    return {"question": QUESTION, "text": text, "ids": [5, 4], "right": right}


def test_answers_with_the_same_text_are_one_with_all_their_readings():
    a, b, c = answer("a"), answer("b"), answer("a")
    pair = sr.pair_of([a, b, c], [[1.0, 0.0], [0.5, 0.5], [1.0, 1.0]])
    assert pair["chosen"] is a and pair["rejected"] is b and pair["scores"] == [0.75, 0.5]
    assert sr.pair_of([a, c], [[1.0], [0.0]]) is None  # not one text against itself
    assert sr.pair_of([a, b], [[1.0], [1.0]]) is None


# ------------------------------------------------------------------ the loss
@pytest.fixture
def trainer(tmp_path):
    """Two pairs a step, on the small model."""
    args = sr.Args(questions=2, micro_batch=2, beta=0.3, samples=2, readings=1, pool=2, steps=3)
    players = sr.SelfRewarding.define_players(args)
    return build(sr.SelfRewarding, tmp_path, args, players, sr.solve_prompt, rows=4)


def pair_of(trainer, *texts):
    pair = {"question": QUESTION, "scores": [1.0, 0.0]}
    sides = [answer(text) | {"ids": encoded(trainer, text)} for text in texts]
    return pair | dict(zip(("chosen", "rejected"), sides, strict=True))


def test_the_loss_by_hand(trainer):
    """With a model that is not the reference, whose loss is ln 2. test_spin.py has the same formula
    against TRL's trainer.
    """
    perturb(trainer, 0.05)
    other = "<step>38+4=40</step>\n<answer>\\boxed{40}</answer>"
    pairs = [pair_of(trainer, RIGHT, WRONG), pair_of(trainer, RIGHT, other)]
    prompt, wanted = sr.solve_prompt(QUESTION), 0.0
    with trainer.playing("solver"):
        ours = trainer.loss(trainer.preference_batch(pairs))[0].item()
    for pair in pairs:
        chosen, rejected = (
            sum(log_probs_by_hand(trainer, "solver", prompt, pair[side]["ids"]))
            - sum(log_probs_by_hand(trainer, "previous", prompt, pair[side]["ids"]))
            for side in ("chosen", "rejected")
        )
        wanted += math.log(1 + math.exp(-0.3 * (chosen - rejected))) / 2
    assert ours == pytest.approx(wanted, rel=1e-5) and abs(ours - math.log(2)) > 1e-3


# ------------------------------------------------------------------ rounds
def test_a_round_starts_from_the_model_of_the_one_before(trainer):
    """Which is the reference then, not the first model; and Adam has no moments of before."""

    def weights_of(adapter: str) -> dict:
        return dict(enumerate(lora(trainer, adapter).values()))

    trainer.create_optimizer()
    trainer.update(trainer.preference_batch([pair_of(trainer, RIGHT, WRONG)] * 2))
    assert trainer.optimizer.state
    now = weights_of("agent")
    assert moved(now, weights_of("previous")) > 0
    trainer.answers = lambda rows: [answer(str(i), False) for i, _ in enumerate(rows)]
    trainer.readings = lambda answers: [[1.0] if a["text"] in "02" else [0.0] for a in answers]
    trainer.start_round(1)
    assert moved(now, weights_of("agent")) == moved(now, weights_of("previous")) == 0
    assert not trainer.optimizer.state
    assert trainer.saved["round"] == 1 and len(trainer.saved["pairs"]) == 2


def given_texts(texts=(), rows=None, **change) -> sr.SelfRewarding:
    options = {"pool": 1, "samples": 2, "readings": 2, "questions": 2, "steps": 6} | change
    more = {"saved": {"round": -1, "pairs": []}}
    more["train_rows"] = rows or [{"question": QUESTION, "answer": "50"}]
    more["freeze_reference"] = lambda: None
    return without_model(sr.SelfRewarding, sr.Args(**options), texts, **more)


def said(score):
    return f"Defects: none\nScore: \\boxed{{{score}}}"


def test_the_best_is_preferred_to_the_worst_whatever_the_truth():
    """Here the judge is wrong, and nothing but the log knows it."""
    judgements = [said(0), said(0.5), "hm", said(1), said(1), "?"]
    trainer = given_texts([RIGHT, WRONG, *judgements], readings=3)
    trainer.start_round(0)
    (pair,) = trainer.saved["pairs"]
    assert pair["chosen"]["text"] == WRONG and pair["rejected"]["text"] == RIGHT
    assert pair["scores"] == [1.0, 0.25] and trainer.saved["round"] == 0
    assert trainer.logged["co/pairs_right_way"] == [False] and trainer.logged["co/pairs"] == [1]
    assert trainer.logged["co/length_gap"] == [len(WRONG) - len(RIGHT)]
    assert trainer.logged["judge/unreadable"] == [False, False, True, False, False, True]
    prompts = [sr.score_prompt(QUESTION, text) for text in [RIGHT] * 3 + [WRONG] * 3]
    judged = [text for who, text in trainer.asked if who == "judge"]
    assert judged == [prompt[-1]["content"] for prompt in prompts]
