"""maporl.py: scores and bonuses against the rules as loops over cases; what an agent
sees; one step by hand."""

import itertools

import maporl
from common.core.lists import mean
from maporl import agreements, bonuses, debate_metrics, scores, shown

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainers import C, X, judgement, solution, twice, whitened, without_model


# ------------------------------------------------------------------ score
def test_scores():
    V = torch.rand(3, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = scores(V, 0.3)
    for t, a, b in itertools.product(range(3), range(2), range(5)):
        discounts = {later: 0.3 ** (later - t) for later in range(t + 1, 3)}
        total = V[t, a, b] + sum(V[u, :, b].mean() * discount for u, discount in discounts.items())
        wanted = total.item() / (1 + sum(discounts.values()))
        assert got[t, a, b].item() == pytest.approx(wanted, abs=1e-12)


# ------------------------------------------------------------------ bonus
ALPHAS = [0.1, 0.2, 0.4, 0.8]
ALPHA_NAMES = ["alpha0", "alpha1", "alpha2", "alpha3"]
# (I was, I am, the other was) -> my bonus
OWN = {(1, 0, 0): -0.1, (1, 0, 1): -0.2, (0, 1, 1): 0.1, (0, 1, 0): 0.2}
# (I was, the other was, the other is) -> my bonus
INFLUENCE = {(0, 1, 0): -0.8, (1, 1, 0): -0.4, (1, 0, 1): 0.8, (0, 0, 1): 0.4}


@pytest.mark.parametrize("T, released", [(3, False), (3, True), (2, False), (2, True)])
def test_bonuses_in_every_case(T, released):
    """In the released code turn 1 has no influence term, and the middle one the other sign."""
    for right in itertools.product((0.0, 1.0), repeat=2 * T):
        got = bonuses(torch.tensor(right).reshape(T, 2, 1), ALPHAS, released)
        at = lambda t, a: int(right[2 * t + a])  # noqa: B023, E731
        for t, me in itertools.product(range(T), range(2)):
            other, expected = 1 - me, 0.0
            if t > 0:
                expected += OWN.get((at(t - 1, me), at(t, me), at(t - 1, other)), 0)
            if t < T - 1 and not (released and t == 0):
                seen = (at(t, me), at(t, other), at(t + 1, other))
                expected += (-1 if released else 1) * INFLUENCE.get(seen, 0)
            assert got[t, me, 0].item() == pytest.approx(expected, abs=1e-6), (right, t, me)


# ------------------------------------------------------------------ parsing
@given(st.text(alphabet="<>/think step\n!", max_size=60), st.text(max_size=40))
def test_thoughts_are_not_shown(thoughts, text):
    text = text.replace("</think>", "").replace("<think>", "")  # one that begins is cut off
    assert shown(f"{thoughts}</think>{text}") == text.strip() == shown(text)


# ------------------------------------------------------------------ what is logged
def test_metrics_of_a_debate():
    """Four debates of two turns: kept, copied, came to another result, went wrong."""
    first = [[solution(n) for n in own] for own in ((7, 8, 8, 7), (8, 7, 9, 7))]
    last = [[solution(7), solution("7!"), solution(7), solution(6)],
            ["<think></think>" + solution(7), solution(7), solution(9), solution(7)]]  # fmt: skip
    right = [[[x.count("=7") for x in own] for own in turn] for turn in (first, last)]
    found = debate_metrics([first, last], torch.tensor(right).float())
    assert found["first"] == [1, 0, 0, 1, 0, 1, 0, 1] and sum(found["last"]) == 6
    assert sum(found["gain"]) == 2
    assert found["wrong_to_right"] == [0, 1, 1, 0, 1, 0, 0, 0]
    assert found["right_to_wrong"] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert found["copies"] == [0, 1, 0, 0, 1, 0, 0, 0]
    assert found["agreement"] == [1, 0, 0, 0]  # `7!` is no other step, but another answer
    assert agreements([[solution("7.0"), solution("")], [solution(7), solution("")]]) == [1, 0]


# ------------------------------------------------------------------ a step by hand
def given_texts(texts: dict[str, list[str]], **change) -> maporl.Maporl:
    return without_model(maporl.Maporl, maporl.Args(group_size=2, questions=2, **change), texts)


def written() -> dict[str, list[str]]:
    """Alice is right in the first debate of either question, Bob never, until he follows her."""
    thoughts = "<think>\nhm\n</think>\n"
    return {
        "alice": [solution(n) for n in (7, 8, 7, 8)],
        "bob": [solution(9)] * 4,
        "alice_again": [thoughts + solution(n) for n in (7, 8, 7, 8)],
        "bob_again": [thoughts + solution(n) for n in (7, 9, 9, 9)],
    }


@pytest.mark.parametrize("pool, groups", [("question", [0, 0, 1, 1]), ("role", [0] * 4)])
def test_a_step(pool, groups):
    """Rewards of a role are compared within a question, or across questions."""
    trainer = given_texts(written(), pool=pool)
    alice, bob = trainer.step(twice("1+6", "2+5"))
    got = {batch.player: batch.rewards.tolist() for batch in alice + bob}
    assert [*got] == ["alice", "alice_again", "bob", "bob_again"]
    # alice, turn 1: (1 + .3 * 1) / 1.3 and alpha3 for what Bob made of it; without: .3 * .5
    assert got["alice"] == pytest.approx([1.5, 0, 1.15 / 1.3, 0])
    assert got["bob"] == pytest.approx([0.3 / 1.3, 0, 0.15 / 1.3, 0])
    assert got["alice_again"] == [1, 0, 1, 0] and got["bob_again"] == [1.5, 0, 0, 0]
    for batch in alice + bob:
        wanted = whitened([*zip(batch.rewards.tolist(), groups)])
        assert batch.advantages.tolist() == pytest.approx(wanted, abs=1e-3)
    assert mean(trainer.logged["co/gain"]) == mean(trainer.logged["co/copies"]) == 1 / 8
    note = {"turn": 1, "answer is right": True, "score": pytest.approx(1), "bonus": 0.5}
    assert note.items() <= alice[0].notes[0].items()
    assert [[note["turn"] for note in batch.notes] for batch in bob] == [[1] * 4, [2] * 4]
    asked = next(text for name, text in trainer.asked if name == "bob_again")
    own, other = asked.split("Solution 2:\n")
    assert "x=9" in own and "x=7" in other


def test_what_is_cut_in_its_thoughts_has_no_answer():
    """Whatever it quotes there; and nothing of it is shown. In three turns, each after the last."""
    texts = {name: said * 2 for name, said in written().items()}
    texts["alice_again"][:4] = [r"<think>One says \boxed{7}, the other"] * 4
    trainer = given_texts(texts | {"alice": texts["alice"][:4], "bob": texts["bob"][:4]}, turns=3)
    alice, bob = trainer.step(twice("1+6", "2+5"))
    right = [[note["answer is right"] for note in batch.notes] for batch in alice]
    assert right == [[True, False] * 2, [False] * 4, [True, False] * 2]
    last = [text for name, text in trainer.asked if name == "bob_again"][4:]
    for asked, answer in zip(last, (7, 9, 9, 9)):
        own, other = asked.partition("Solution 1:\n")[2].split("Solution 2:\n")
        assert own.startswith(f"<step>x={answer}<") and other == "\nWrite your own."


def test_the_placebo_shows_another_questions_text():
    """In the prompt that the small model has been taught."""
    texts = [[f"alice {i}" for i in range(4)], [f"bob {i}" for i in range(4)]]
    trainer = given_texts({}, placebo=True)
    for i, asked in enumerate(trainer.debate_prompts(twice("q1", "q2"), texts, agent=0)):
        both = f"Solution 1:\nalice {i}\nSolution 2:\nbob {(i + 2) % 4}"
        wanted = f"Problem: q{1 + i // 2}\n{both}\nWrite your own."
        assert asked[-1]["content"] == wanted


@pytest.mark.parametrize("questions", ["ab", "aba", "aab", "aabbaabb", "abcabca", "aaaab"])
def test_the_placebo_is_never_about_the_own_question(questions):
    seen = maporl.about_another([{"question": q} for q in questions], questions)
    assert all(q != other for q, other in zip(questions, seen, strict=True))


def test_the_released_rule_pays_no_influence_in_two_turns():
    alice, _ = given_texts(written(), influence_sign="released").step(twice("1+6", "2+5"))
    assert [note["bonus"] for note in alice[0].notes] == [0] * 4


def test_a_solution_without_an_answer_is_worth_nothing_to_a_verifier_that_accepts_it():
    """Alice's last ones have a step and no box, or an empty one; Bob's first are empty texts."""
    texts = written() | {"bob": [""] * 4, "verifier": [judgement(final=C)] * 16}
    texts["alice_again"] = ["<step>x=7</step>", solution("")] * 2
    trainer = given_texts(texts, verifier="frozen", **dict.fromkeys(ALPHA_NAMES, 0.0))
    alice, bob = trainer.step(twice("1+6", "2+5"))
    before = {True: (1 + 0.3 * 0.5) / 1.3, False: 0.3 * 0.5 / 1.3}
    assert alice[0].rewards.tolist() == pytest.approx([before[True]] * 4)
    assert bob[0].rewards.tolist() == pytest.approx([before[False]] * 4)
    assert alice[1].rewards.tolist() == [0] * 4 and bob[1].rewards.tolist() == [1] * 4
    assert all(trainer.logged["verifier/wrong_accepted"])  # what it says itself


@pytest.mark.parametrize("verifier", ["frozen", "co-trained"])
def test_a_verifier_in_the_answers_place(verifier):
    """It accepts everything but what it says nothing readable of, Bob's last solution: all other
    scores are 1, and only bonuses, which ask for gold, differ.
    """
    yes, no = judgement(final=C), judgement(final=X)
    said = [yes] * 15 + ["so it is"] + [yes, no, "so it is", no]
    trainer = given_texts(written() | {"verifier": said}, verifier=verifier)
    alice, bob, *trained = trainer.step(twice("1+6", "2+5"))
    got = {batch.player: batch.rewards.tolist() for batch in alice + bob}
    before = (1 + 0.3 * 0.5) / 1.3
    assert got["bob"] == pytest.approx([1, 1, 1, before])
    assert got["alice"] == pytest.approx([1.5, 1, 1, before]) and got["bob_again"][3] == 0
    assert mean(trainer.logged["verifier/accuracy"]) == 6 / 16
    assert trainer.logged["verifier/wrong_accepted"].count(False) == 1
    judged = [text for name, text in trainer.asked if name == "verifier"]
    assert not any("think" in text for text in judged)
    assert [b.player for b in trained] == (["verifier"] if verifier == "co-trained" else [])
    assert not any(trainer.logged["co/sounds_sure"])
    if trained:  # K judgements of a solution of each question, rewarded by its label
        assert judged[16:18] == [judged[16]] * 2 and judged[18:] == [judged[18]] * 2
        one, two = ("x=7" in text for text in (judged[16], judged[18]))
        assert trained[0].rewards.tolist() == [one, not one, 0, not two]
