"""self_taught.py: what is kept of the judgements, changed questions, the loss against log-probs of
the model itself, rounds that start from the first model.
"""

import random

import self_taught as st
from common.core.errors import UserError
from common.tiny.tasks import parse_question

import pytest
import torch
from conftest import build, lora, perturb
from hypothesis import given, strategies
from trainers import (
    QUESTION,
    RIGHT,
    encoded,
    log_probs_by_hand,
    loss_in_parts,
    without_model,
)

WORSE = "<step>38+7=45</step>\n<step>45*7=10</step>\n<answer>\\boxed{10}</answer>"


# ------------------------------------------------------------------ what is kept
def judgement(choice, better, name=""):
    return {"choice": choice, "better": better, "name": name}


@pytest.mark.parametrize("seed", range(20))
def test_as_many_of_either_place(seed):
    rng = random.Random(seed)
    judgements = [judgement(*[rng.choice([1, 1, 1, 2])] * 2, name=i) for i in range(12)]
    kept = st.balanced(judgements, rng)
    counts = [sum(j["choice"] == n for j in kept) for n in (1, 2)]
    fewer = min(sum(j["choice"] == n for j in judgements) for n in (1, 2))
    assert counts == [fewer, fewer] and len({j["name"] for j in kept}) == len(kept)


def test_which_of_too_many_are_kept_is_chance():
    judgements = [judgement(1, 1, i) for i in range(30)] + [judgement(2, 2, 99)]
    kept = [st.balanced(judgements, random.Random(seed)) for seed in range(30)]
    assert len({j["name"] for pair in kept for j in pair if j["choice"] == 1}) > 10
    assert {pair[0]["choice"] for pair in kept} == {1, 2}  # nor do they come in order


# ------------------------------------------------------------------ parsing, changed questions
@given(strategies.text(max_size=60))
def test_any_text_can_be_changed(text):
    changed = st.changed_question(random.Random(0), text)
    assert changed is None or changed != text


@pytest.mark.parametrize("seed", range(30))
def test_one_number_is_changed_and_keeps_its_digits(seed):
    changed = st.changed_question(random.Random(seed), QUESTION)
    (start, operations), (new_start, new_operations) = map(parse_question, (QUESTION, changed))
    pairs = [(start, new_start), *zip(operations, new_operations)]
    assert sum(a != b for a, b in pairs) == 1 and len(changed) == len(QUESTION)
    assert [op for op, _ in operations] == [op for op, _ in new_operations]


def test_other_questions_are_changed_too():
    text = "Natalia sold 48 clips in April and half as many in May."
    assert st.changed_question(random.Random(0), text) not in (None, text)  # its only number
    assert st.changed_question(random.Random(0), "How many?") is None
    words = "In H2O the 2nd x_1 is v1.0 of 7."
    assert st.changed_question(random.Random(0), words)[:-2] == words[:-2]
    for seed in range(20):  # neither decimals nor thousands are torn apart
        changed = st.changed_question(random.Random(seed), "Of 1,200 or 3.5 take 7 and 8.")
        assert "1,200" in changed and "3.5" in changed


# ------------------------------------------------------------------ the loss, the restart
@pytest.fixture
def trainer(tmp_path):
    args = st.Args(questions=2, micro_batch=1, pool=2, samples=1, steps=3)
    players = st.SelfTaught.define_players(args)
    return build(st.SelfTaught, tmp_path, args, players, st.solve_prompt, rows=4)


def lessons_of(trainer, *texts):
    prompt = st.compare_prompt(QUESTION, RIGHT, WORSE)
    return [{"prompt": prompt, "ids": encoded(trainer, text)} for text in texts]


def test_the_loss_is_minus_the_mean_log_prob_of_all_tokens(trainer):
    """Judgements of different lengths, in one micro-batch or in two, against the model's logits."""
    perturb(trainer, 0.05)
    lessons = lessons_of(trainer, "The first. \\boxed{1}", "\\boxed{2}")
    batch, logps = trainer.lesson_batch(lessons), []
    ours, parts = (loss_in_parts(trainer, batch, size) for size in (2, 1))
    for lesson in lessons:
        logps += log_probs_by_hand(trainer, "judge", lesson["prompt"], lesson["ids"])
    assert ours == pytest.approx(-sum(logps) / len(logps), rel=1e-4)
    assert len(batch) == 2 and ours == pytest.approx(parts, rel=1e-5)


def test_a_round_judges_with_the_model_as_it_is_and_trains_the_first_one(trainer):
    trainer.create_optimizer()
    trainer.restart("judge")
    first = lora(trainer, "judge")
    for _ in range(2):  # A moves once B is no longer zero
        trainer.update(trainer.lesson_batch(lessons_of(trainer, "\\boxed{1}", "\\boxed{2}")))
    trained = lora(trainer, "judge")
    assert not any(torch.equal(w, trained[name]) for name, w in first.items())
    assert trainer.optimizer.state
    judges = []

    def judge(comparisons):
        judges.append(lora(trainer, "judge"))
        return [c | {"ids": [5, 4], "choice": c["better"]} for c in comparisons]

    trainer.judge = judge
    trainer.saved |= {"round": 0, "comparisons": st.comparisons_of(QUESTION, RIGHT, WORSE)}
    trainer.start_round(1)
    assert all(torch.equal(judges[0][name], w) for name, w in trained.items())
    again = lora(trainer, "judge")
    assert all(torch.equal(w, again[name]) for name, w in first.items())  # A is, too
    assert not trainer.optimizer.state  # nor has Adam moments of the judge that is gone
    assert sorted(j["choice"] for j in trainer.saved["lessons"]) == [1, 2]


# ------------------------------------------------------------------ rounds with given completions
def given_texts(texts=(), **change) -> st.SelfTaught:
    cfg = st.Args(**{"pool": 1, "samples": 1, "questions": 2, "steps": 6} | change)
    trainer = without_model(st.SelfTaught, cfg, texts, restarts=0)
    trainer.train_rows = [{"question": QUESTION, "answer": "50"}]
    trainer.restart = lambda name: setattr(
        trainer, "restarts", trainer.restarts + (name == "judge")
    )
    trainer.saved = {"comparisons": [], "round": -1, "lessons": []}
    return trainer


def test_the_judge_learns_what_prefers_the_answer_to_the_question():
    """Also where the gold answer says otherwise, which only the log knows."""
    said = ["\\boxed{2}", "hm\\boxed{1}", "?", "hm\\boxed{2}"]
    trainer = given_texts([RIGHT, WORSE, *said], samples=2)
    trainer.train_rows[0]["answer"] = "10"
    trainer.start_round(0)
    solved = [text for who, text in trainer.asked if who == "solver"]
    assert solved[0] == QUESTION != solved[1]
    shown = [text for who, text in trainer.asked if who == "judge"]
    assert all(text.startswith(f"Problem: {QUESTION}\n") for text in shown)  # not the changed one
    assert shown[0] == shown[1] and shown[2] == shown[3]
    assert shown[0].index(RIGHT) < shown[0].index(WORSE)
    assert shown[2].index(WORSE) < shown[2].index(RIGHT)
    assert sorted((j["choice"], j["better"]) for j in trainer.saved["lessons"]) == [(1, 1), (2, 2)]
    assert trainer.restarts == 1 and trainer.saved["round"] == 0
    assert trainer.logged == {
        "co/better_right": [False],
        "co/worse_right": [True],
        "judge/prefers_better": [False, True, False, True],
        "judge/unreadable": [False, False, True, False],
        "judge/says_1": [False, True, False],
        "judge/lessons": [1.0],
    }
    # the next round judges the same comparisons again, and makes no new pairs
    trainer.texts, trainer.asked = ["\\boxed{1}"] * 2 + ["\\boxed{2}"] * 2, []
    trainer.start_round(1)
    assert [text for _, text in trainer.asked] == shown and trainer.restarts == 2


@pytest.mark.parametrize(
    "texts, says",
    [
        ([WORSE, "\\boxed{1}", "\\boxed{1}"], "learn the place and nothing else"),
        ([WORSE, "no idea", "no idea"], "learn the place and nothing else"),
        ([RIGHT.replace("38+4=42", "30+12=42")], "0 of 0 judgements"),  # both answers agree
        ([RIGHT.replace("{50}", "{ 50.0 }")], "0 of 0 judgements"),  # so do these
        (["<step>1</step>"], "0 of 0 judgements"),  # one has no end
        ([RIGHT.replace("{50}", "{ }")], "0 of 0 judgements"),  # nor this one
    ],
)
def test_what_teaches_nothing_or_a_place_only_stops_the_run(texts, says):
    trainer = given_texts([RIGHT, *texts])
    with pytest.raises(UserError, match=says):
        trainer.start_round(0)
    assert trainer.logged["judge/lessons"] == [0] and trainer.restarts == 0
