"""coverrl.py: votes, judgements, filter, rewards and groups against loops of their own; a step
by hand."""

import math

import coverrl
from common.core.lists import mean
from coverrl import (
    advantages,
    final_answer,
    is_kept,
    judgement_reward,
    parse_judgement,
    reward,
    to_verify,
    vote,
)

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainers import C, X, judgement, solution, twice, whitened, without_model

an_answer = st.sampled_from(["7", "8", "9", None])


# ------------------------------------------------------------------ parsing
def test_parse_judgement():
    assert parse_judgement(judgement(C, X, X, final=X)) == (False, [2, 3])
    assert parse_judgement(judgement("no verdict", X, final=r" \box{Incorrect}. ")) == (False, [2])
    assert parse_judgement(judgement(*[X] * 400, final=X)) == (False, [*range(1, 401)])
    for left_out in ("", "<step_verification>\n"):  # by models that nobody has taught
        text = judgement(C, X, final=X).replace("</step_verification>\n", left_out)
        assert parse_judgement(text) == (False, [2])
    none = [judgement(X, final="maybe"), judgement(C) + " and more", "it is right " + judgement(C)]
    assert parse_judgement(judgement(X, final=f"Not sure, but {X}")) == (False, [1])
    none += [judgement(C, final=f"{no} {C}") for no in ("NOT", "it isn't", "It cannot be")]
    none += [f"<final_verification>{C}</final_verification>", judgement(C, final=f"<b>{C}</b>"), ""]
    for text in none:
        assert parse_judgement(text) == (None, []), text


@given(st.text(alphabet="<>/_step verificatonCRETINboxd{}\\\n", max_size=200))
def test_no_text_breaks_the_parsers(text):
    said, faulty = parse_judgement(text)
    assert said in (True, False, None) and faulty == sorted(set(faulty))
    assert final_answer(text) != ""


# ------------------------------------------------------------------ the vote and its filter
@given(st.lists(an_answer, max_size=12))
def test_the_vote_equals_counting(answers):
    """Of equally frequent answers the first one counts."""
    counts = {answer: answers.count(answer) for answer in answers if answer is not None}
    most = max(counts, key=counts.get, default=None)
    others = [answer for answer in counts if answer != most]
    assert vote(answers) == (most, min(others, key=counts.get, default=None))


@given(st.lists(st.tuples(st.sampled_from("abcd"), an_answer), max_size=12), st.integers(1, 4))
def test_both_sides_are_judged_equally_often(solutions, M):
    texts, answers = [t + str(a) for t, a in solutions], [a for _, a in solutions]
    for_m, for_other = to_verify(texts, answers, M)
    m, rarest = vote(answers)
    assert len(for_m) == len(for_other) <= M and (for_m == []) == (rarest is None)
    assert len(set(for_m)) == len(for_m) and len(set(for_other)) <= 1
    assert all(text.endswith(str(m)) for text in for_m)
    assert all(text.endswith(str(rarest)) for text in for_other)
    if rarest is not None:
        assert len(for_m) == min(M, len({t for t, a in zip(texts, answers) if a == m}))


def test_more_than_half_must_accept():
    assert is_kept([]) and is_kept([True]) and is_kept([True, True, False])
    for said in ([True, False], [True, None, None], [None], [False] * 3):
        assert not is_kept(said), said


# ------------------------------------------------------------------ rewards and advantages
def test_rewards_in_every_case():
    assert [reward(a, "7") for a in ("7", "8", None)] == [2, 1, 0]
    assert reward(None, None) == 0 and reward("7", None) == 1
    table = {(True, True): 2, (False, True): 1, (None, True): 0}
    table |= {(True, False): 1, (False, False): 2, (None, False): 0}
    assert {key: judgement_reward(*key) for key in table} == table


VALUE = st.sampled_from([0.0, 1.0, 2.0, math.nan])


@given(st.lists(st.tuples(VALUE, st.sampled_from("abc")), min_size=1))
def test_advantages_equal_the_loop(rows):
    """One row has nothing to be compared with: its reward itself would reinforce whatever it is."""
    values, keys = map(list, zip(*rows))
    found = advantages(torch.tensor(values, dtype=torch.float64), keys)
    assert found.tolist() == pytest.approx(whitened(rows, added=1e-6), abs=1e-6)


# ------------------------------------------------------------------ a step by hand
def given_texts(texts: dict[str, list[str]], **change) -> coverrl.CoVerRL:
    cfg = coverrl.Args(**{"group_size": 2, "samples": 4, "corrections": 2} | change)
    return without_model(coverrl.CoVerRL, cfg, texts)


ROWS = [*twice("1"), *twice("2", answer="5")]
WRITTEN = {
    # the trained solutions of both, then those that only vote: 7 7 8 7 wins 3 to 1; 4 6 4 none
    "solver": [*map(solution, (7, 8, 4, 6)), solution(7) + " ", solution(7), solution(4), "none"],
    # 1: two different solutions for 7, twice the one for 8; 2: one for 4 ("4" twice is one text)
    "verifier": [judgement(v, final=v) for v in (C, C, X, C, X, C)],
    "corrector": [solution(7), "hm"],
}


def test_a_step():
    trainer = given_texts(WRITTEN)
    trainer.step(ROWS)
    asked = {name: [text for who, text in trainer.asked if who == name] for name in WRITTEN}
    assert [user.count("Verify its 1 steps.") for user in asked["verifier"]] == [1] * 6
    # the judgements that say INCORRECT: of 8, and of 4, whose question is dropped with it
    assert len(asked["corrector"]) == 2
    assert all(user.endswith("Defects: 1\nCorrect it.") for user in asked["corrector"])
    A = {name: batch.advantages.tolist() for name, batch in trainer.batches.items()}
    half = pytest.approx([2**-0.5, -(2**-0.5)], abs=1e-5)
    assert A["solver"][:2] == half and A["solver"][2:] == [0, 0]
    # V+ of the first question agrees; in V- the one that says INCORRECT is right
    assert A["verifier"][:2] == [0, 0] and A["verifier"][2:4] == half
    assert A["verifier"][4:] == [0, 0]  # dropped
    assert A["corrector"] == half  # 2 for the answer 7, 0 without a box
    logged = {name: mean(values) for name, values in trainer.logged.items()}
    assert logged["co/kept"] == logged["co/label_accuracy"] == logged["corrector/accuracy"] == 0.5
    assert logged["co/reward_accuracy"] == 1.0


def test_corrections_agree_with_the_vote_and_are_compared_after_one_judgement():
    """The majority is wrong here, and nothing but the log knows it. Three solutions only vote."""
    other, rare = solution(7, "?"), solution(8)
    said = [C, C, X, X, C, C]  # V+ of three solutions, V- of one
    written = {
        "solver": [solution(7), rare, solution(7, "!"), solution(7), other],
        "verifier": [judgement(v, final=v) for v in said],
        "corrector": [*map(solution, (7, 8, 7, 7))],
    }
    trainer = given_texts(written, samples=5)
    trainer.step(twice("1", answer="8"))
    A = trainer.batches["corrector"].advantages.tolist()
    assert A == pytest.approx([2**-0.5, -(2**-0.5), 0, 0], abs=1e-5)
    asked = [text for who, text in trainer.asked if who == "corrector"]
    assert [other in text for text in asked] == [True, True, False, False]
    assert [rare in text for text in asked] == [False, False, True, True]


def test_equal_answers_are_one_however_they_are_written():
    """The majority is 7 by three forms of it; what is to be rejected is 8, and not one of them."""
    written = {
        "solver": [solution(n) for n in ("7.0", r"\$7", 8, "07")],
        "verifier": [judgement(v, final=v) for v in (C, C, C, X, X, X)],
        "corrector": [solution(n) for n in (7, r"\frac{14}{2}", "8.0", 8) * 3],
    }
    trainer = given_texts(written, corrections=4)
    trainer.step(twice("1"))
    assert trainer.batches["solver"].rewards.tolist() == [2, 2]
    judged = [text for name, text in trainer.asked if name == "verifier"]
    assert [solution(8) in text for text in judged] == [False] * 3 + [True] * 3
    assert trainer.batches["corrector"].rewards[:4].tolist() == [2, 2, 1, 1]


def test_a_process_without_a_judgement_takes_part_with_no_row():
    trainer = given_texts({"solver": [solution(3)] * 8})
    trainer.step(ROWS)
    counts = {name: len(batch) for name, batch in trainer.batches.items()}
    assert counts == {"solver": 4, "verifier": 0, "corrector": 0}
    assert {name for name, _ in trainer.asked} == {"solver"}
    assert trainer.logged["co/kept"] == [True] * 2


@pytest.mark.parametrize(
    "change, trains",
    [
        ({"verifier": "none"}, {"solver": [True, True]}),
        ({"verifier": "untrained"}, {"verifier": [False, False], "corrector": [True]}),
        ({"corrections": 0}, {"solver": [True, False], "verifier": [True, False]}),
        ({"filter": "none"}, {"solver": [True, True], "corrector": [True]}),
    ],
)
def test_ablations(change, trains):
    """Who is trained on, for each of the two questions."""
    written = WRITTEN | {"corrector": [solution(7), "hm", solution(4), "hm"]}
    trainer = given_texts(written, **change)
    trainer.step(ROWS)
    found = {name: batch.advantages != 0 for name, batch in trainer.batches.items()}
    for name, expected in trains.items():
        first = {"solver": 2, "verifier": 4}.get(name, len(found[name]))  # rows of question 1
        parts = found[name][:first], found[name][first:]
        assert [bool(part.any()) for part in parts][: len(expected)] == expected, name
    assert change.get("verifier") != "none" or set(trainer.batches) == {"solver"}


def test_a_coin_keeps_as_many_without_a_reason():
    kept = []
    for step in range(40):
        trainer = given_texts({}, filter="coin")
        trainer.state.global_step = step
        asked = [coverrl.Asked(str(i), "", [], [], None) for i in range(4)]
        judged = [{"i": i, "for_m": True} for i in range(4)]
        trainer.filter(asked, judged, [(True, []), *[(False, [1])] * 3])
        assert sum(one.kept for one in asked) == 1
        kept.append([one.kept for one in asked].index(True))
    assert set(kept) == {0, 1, 2, 3}
