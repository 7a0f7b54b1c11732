"""self_rewarding.py: scores and pairs by hand, the loss against TRL's, rounds with given
completions, evaluation by hand.
"""

import math
import random
from types import SimpleNamespace

import self_rewarding as sr
from common.core.errors import UserError

import pytest
from conftest import build, lora, moved, perturb
from trainers import QUESTION, RIGHT, WRONG, answering, encoded, log_probs_by_hand, without_model


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


@pytest.mark.parametrize("judgement, share", [(said(1), "0.00"), ("hm", "1.00")])
def test_ties_teach_nothing(judgement, share):
    trainer = given_texts([RIGHT, WRONG] + [judgement] * 4)
    with pytest.raises(UserError, match=f"a share of {share} of the judgements could not be read"):
        trainer.start_round(0)


def test_every_round_has_new_questions_and_its_own_steps():
    rows = [{"question": str(i)} for i in range(5)]
    trainer = given_texts((), rows, pool=2)
    pools = ["".join(row["question"] for row in trainer.pool(t)) for t in range(3)]
    assert pools == ["01", "23", "40"]
    rounds, trained = [], []

    def start_round(t):
        rounds.append((t, trainer.state.global_step))
        trainer.saved |= {"round": t, "pairs": [f"{t} {i}" for i in range(3)]}

    trainer.start_round, trainer.preference_batch = start_round, lambda pairs: pairs
    for trainer.state.global_step in range(6):
        trained.append(trainer.step([])[0])
    assert rounds == [(0, 0), (1, 2), (2, 4)]
    assert [{pair[0] for pair in pairs} for pairs in trained] == [{c} for c in "001122"]
    assert {*trained[0], *trained[1]} == {"0 0", "0 1", "0 2"}  # pass after pass over all of them


# ------------------------------------------------------------------ evaluation
def test_evaluation_by_hand():
    """3 questions, 3 answers to each. The judge prefers a right answer, then a wrong one; the third
    question has wrong ones only."""
    read = {"a1": [1.0, 0.5], "a7": [0.0, 0.5], "a8": [None, None]}
    read |= {"b7": [1.0, 1.0], "b1": [0.5, 0.5], "b8": [0.0, 0.0]}
    samples = {"a": ["a1", "a7", "a8"], "b": ["b7", "b1", "b8"], "c": ["c7", "c8", "c9"]}
    held_out = [{"question": question, "answer": "1"} for question in "abc"]
    trainer = answering(lambda *_: "\\boxed{1}", eval_samples=3)

    def answers(rows):
        questions = [row["question"] for row in rows]
        texts = [samples[q][questions[:i].count(q)] for i, q in enumerate(questions)]
        return [
            {"question": q, "text": text, "ids": [5] * (4 + (q == "c")), "right": text[1] == "1"}
            for q, text in zip(questions, texts)
        ]

    trainer.answers = answers
    trainer.readings = lambda some: [read.get(a["text"], [0.0, 0.0]) for a in some]
    result = sr.evaluate(trainer, held_out)
    judge = {"judge/first_pairs": 1 / 2, "judge/readings_right": (2 + 1 + 2 + 0) / 8}
    wanted = {"solver/greedy": 1.0, "solver/accuracy": 2 / 9, "co/best_of_3": 1 / 3}
    wanted |= {"solver/length": (6 * 4 + 3 * 5) / 9, "judge/own_pairs": 1 / 2}
    assert result == pytest.approx(judge | wanted)
    bank = [[answer["text"] for answer in pair] for pair in trainer.saved["bank"]]
    assert bank == [["a1", "a7"], ["b1", "b7"]]
    # a solver that is always right has no pairs of its own; the first model's stay
    samples |= {"a": ["a1"] * 3, "b": ["b1"] * 3, "c": ["c1"] * 3}
    later = sr.evaluate(trainer, held_out)
    assert later["solver/accuracy"] == 1.0 and "judge/own_pairs" not in later
    assert {name: later[name] for name in judge} == pytest.approx(judge)


def test_what_cannot_be_read_is_neither_right_nor_ranked_first():
    pair = [answer(RIGHT, True), answer(WRONG, False)]
    read = [[1.0, None, 1.0], [0.0, 0.0, 0.5], [0.0, None, 0.5], [None, None, 0.0]]
    trainer = SimpleNamespace(in_parallel=lambda fn, items: fn(items), readings=lambda _: read)
    found = sr.evaluate_judge(trainer, [pair] * 2)
    assert found == {"judge/first_pairs": 1.0, "judge/readings_right": 6 / 12}
    assert sr.evaluate_judge(trainer, []) == {}
