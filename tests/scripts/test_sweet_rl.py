"""sweet_rl.py: advantages and losses against a softmax by hand, pairs against brute force, turns of
hostile texts, what the actor must not see."""

import itertools
import math
import random

import sweet_rl
from common.tasks.answers import solve_prompt
from lab.runs import controls

import pytest
from conftest import (
    build,
    perturb,
)
from trainers import (
    QUESTION,
    RIGHT,
    WRONG,
    Characters,
    encoded,
    log_probs_by_hand,
    logged,
    loss_in_parts,
    without_model,
)

ROW = {"question": QUESTION, "reference": RIGHT, "answer": "50", "begun": []}
ASKED = f"Problem: {QUESTION}\nSolution:\n{RIGHT}\nDefects: none\nCorrect it."


# ------------------------------------------------------------------ what is paired
def test_the_best_dialogue_is_held_against_every_worse_one():
    for rewards in itertools.product((0.0, 0.5, 1.0), repeat=4):
        group = [{"reward": r, "n": i} for i, r in enumerate(rewards)]
        found = [(a["n"], b["n"]) for a, b in sweet_rl.best_against_worse(group)]
        wanted = []
        if 1.0 in rewards:
            wanted = [(rewards.index(1.0), i) for i, r in enumerate(rewards) if r < 1.0]
        assert found == wanted


@pytest.mark.parametrize("count", range(7))
def test_turns_that_win_are_of_the_upper_half_and_those_that_lose_of_the_lower(count):
    A = [0.3, -1.0, 2.0, 0.1, 0.7, -0.2][:count]
    names, seen = "abcdef"[:count], set()
    best = sorted(range(count), key=A.__getitem__, reverse=True)
    upper = {names[i] for i in best[: count // 2]}
    lower = {names[i] for i in best[(count + 1) // 2 :]}
    for seed in range(60):
        pairs = sweet_rl.upper_against_lower(names, A, random.Random(seed))
        assert len(pairs) == (4 if count > 1 else 0)
        seen |= {*pairs}
    assert seen == {*itertools.product(upper, lower)}  # each with each, the middle one with none


def test_a_turn_that_was_written_often_is_drawn_often_and_equals_are_no_pair():
    A = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    pairs = [
        pair
        for seed in range(300)
        for pair in sweet_rl.upper_against_lower("aaaaba", A, random.Random(seed))
    ]
    assert {*pairs} == {("a", "b")} and 300 < len(pairs) < 500  # a third of 1,200


def test_a_turn_ends_with_its_step_and_the_answer_is_one():
    def texts(text: str) -> list[str]:
        encode = Characters()
        turns = sweet_rl.turns_of(encode(text).input_ids + [4], encode)
        assert sum(turns, []) == encode(text).input_ids + [4]  # nothing is lost
        return [encode.decode(turn) for turn in turns]

    assert texts(RIGHT) == [
        "<step>38+4=42</step>",
        "\n<step>42*7=50</step>",
        "\n<answer>\\boxed{50}</answer>",
    ]
    assert texts("nothing") == ["nothing"]
    assert texts("") == [""]  # the end token
    assert texts("a</step><step>b</step>") == ["a</step><step>b</step>", ""]
    assert texts("<step>a<step>b</step>c") == ["<step>a<step>b</step>", "c"]
    assert texts("<step></step><step>open") == ["<step></step>", "<step>open"]
    assert sweet_rl.turns_of([], Characters()) == []
    assert len(texts("<step>" * 20_000)) == 1  # in no time


def test_weights_are_one_over_the_length_of_the_turn():
    weights = sweet_rl.token_weights([9, 9], [[1, 2, 3, 4], [5]], True)
    assert weights == [0, 0, 0.25, 0.25, 0.25, 0.25, 1]
    assert sweet_rl.token_weights([9], [[1, 2], [3]], False) == [0, 1, 1, 1]


# ------------------------------------------------------------------ on the small model
def real(folder, **change) -> sweet_rl.SweetRL:
    """The trainer on the small model, its two adapters apart."""
    args = sweet_rl.Args(**{"questions": 2, "micro_batch": 2, "beta": 0.3} | change)
    players = sweet_rl.SweetRL.define_players(args)
    trainer = build(sweet_rl.SweetRL, folder, args, players, solve_prompt)
    perturb(trainer, 0.3)
    return trainer


def ids_of(trainer, text: str) -> list[int]:
    return trainer.processing_class(text, add_special_tokens=False).input_ids


def log_ratios(trainer, player, ids: list[int], shown=ASKED, compared=ASKED) -> list[float]:
    """Of each token, by hand: the player's message, and that of its reference."""
    own, ref = (
        log_probs_by_hand(trainer, who, asked, ids)
        for who, asked in ((player, message(shown)), (None, message(compared)))
    )
    return [a - b for a, b in zip(own, ref)]


def message(user: str) -> list[dict]:
    system = sweet_rl.AGAIN if user == ASKED else solve_prompt("")[0]["content"]
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def step_loss(trainer, player: str) -> float:
    return loss_in_parts(trainer, trainer.lesson(player))


def summed(d: list[float], turns: list[list[int]], by_turn: bool) -> float:
    """sum over turns of the mean, or of the sum, over its tokens."""
    total, start = 0.0, 0
    for turn in turns:
        own = d[start : start + len(turn)]
        total, start = total + (sum(own) / len(own) if by_turn else sum(own)), start + len(turn)
    assert start == len(d)
    return total


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


SHOWN = [  # arguments, a control; what the critic is asked, and its reference in the loss and in A
    ({}, None, ASKED, ASKED, ASKED),
    ({"critic_reference": "released"}, None, ASKED, ASKED, QUESTION),
    ({}, controls.reference_never_shown, ASKED, QUESTION, QUESTION),
    ({"privileged": False}, None, QUESTION, QUESTION, QUESTION),
    ({"turn_mean": False}, None, ASKED, ASKED, ASKED),
]


@pytest.mark.parametrize("change, control, shown, taught, ranked", SHOWN)
def test_the_critics_loss_and_advantages_by_hand(
    tmp_path, monkeypatch, change, control, shown, taught, ranked
):
    """Of two dialogues of different lengths, micro-batch by micro-batch."""
    monkeypatch.setattr(sweet_rl.SweetRL, "texts", sweet_rl.SweetRL.texts)  # ends what is patched
    if control:
        control(sweet_rl)
    trainer, margins = real(tmp_path, **change), []
    short = "<step>38+4=42!</step>\n<answer>\\boxed{42}</answer>"
    pairs = [(encoded(trainer, RIGHT), encoded(trainer, wrong)) for wrong in (WRONG, short)]
    trainer.saved["critic"] = [ROW | {"chosen": a, "rejected": b} for a, b in pairs]
    for pair in pairs:
        better, worse = (
            summed(
                log_ratios(trainer, "critic", ids, shown, taught),
                sweet_rl.turns_of(ids, trainer.processing_class),
                change.get("turn_mean", True),
            )
            for ids in pair
        )
        margins.append(better - worse)
    wanted = sum(softplus(-0.3 * margin) for margin in margins) / 2
    assert step_loss(trainer, "critic") == pytest.approx(wanted, rel=1e-4)
    found = [logged(trainer)[f"critic/{name}"] for name in ("margin", "pair_accuracy")]
    assert found == pytest.approx([sum(margins) / 2, sum(m > 0 for m in margins) / 2], rel=1e-3)
    # a turn behind another one: only its own tokens count, and what comes twice is scored once
    first, second, _ = sweet_rl.turns_of(pairs[0][1], trainer.processing_class)
    rows = [(ROW, first), (ROW | {"begun": first}, second), (ROW, first)]
    rows += [(ROW | {"begun": first}, first)]  # the same text at another place
    d = log_ratios(trainer, "critic", first + second, shown, ranked)
    wanted = [summed(d[: len(first)], [first], change.get("turn_mean", True))]
    wanted += [summed(d[len(first) :], [second], change.get("turn_mean", True))]
    found = trainer.advantages(rows)
    assert found[:2] == pytest.approx(wanted, rel=1e-3) and found[2] == found[0]
    assert found[3] != found[0]
    assert trainer.advantages([]) == []


def test_the_actors_loss_by_hand(tmp_path):
    """Sums over the tokens of the turn alone, given the question alone; and its likelihood."""
    trainer, wanted = real(tmp_path), 0.0
    prefix = ids_of(trainer, "<step>38+4=42</step>")
    turns = ["\n<step>42*7=50</step>", "\n<step>42*7=49!</step>", "\n<step>42*7=5</step>"]
    right, *wrong = (ids_of(trainer, turn) for turn in turns)
    row = ROW | {"begun": prefix}
    trainer.saved["actor"] = [row | {"chosen": right, "rejected": turn} for turn in wrong]
    for rejected in wrong:
        r = [
            sum(log_ratios(trainer, "actor", prefix + x, QUESTION, QUESTION)[len(prefix) :])
            for x in (right, rejected)
        ]
        own = log_probs_by_hand(trainer, "actor", solve_prompt(QUESTION), prefix + right)
        likelihood = sum(own[len(prefix) :]) / len(right)
        wanted += (softplus(-0.3 * (r[0] - r[1])) - 0.01 * likelihood) / 2
    assert step_loss(trainer, "actor") == pytest.approx(wanted, rel=1e-4)


# ------------------------------------------------------------------ with given completions
def given_texts(texts, **change) -> sweet_rl.SweetRL:
    cfg = sweet_rl.Args(**{"samples": 3, "candidates": 4} | change)
    rows = [{"question": QUESTION, "answer": "50", "reference": RIGHT}]
    trainer = without_model(sweet_rl.SweetRL, cfg, texts, train_rows=rows)
    trainer.saved = {"critic": None, "dialogues": [], "actor": None, "siblings": None}
    return trainer


def test_dialogues_are_kept_as_they_were_sampled():
    trainer = given_texts([WRONG, RIGHT, "cut…"])
    trainer.start_dialogues()
    ids = [Characters()(text).input_ids + [4] for text in (WRONG, RIGHT)]
    cut = Characters()("cut…").input_ids  # gets no end token
    assert [p["chosen"] for p in trainer.saved["critic"]] == [ids[1]] * 2
    assert [p["rejected"] for p in trainer.saved["critic"]] == [ids[0], cut]
    (kept,) = trainer.saved["dialogues"]  # one of up to twenty
    assert kept["ids"] in [*ids, cut]
    assert trainer.logged["actor/accuracy"] == [0, 1, 0]
    prefix = [Characters().decode(p["begun"]) for p in trainer.places(kept | {"ids": ids[0]})]
    assert prefix == ["", "<step>38+4=41</step>", "<step>38+4=41</step>\n<step>41*7=43</step>"]


def test_candidates_are_one_turn_each_and_none_that_was_cut():
    """The actor is asked the bare question; what the critic is shown must not reach it."""
    texts = ["\n<step>42*7=50</step>\n<step>more…", "\n<step>42*7=4…", "I give up", "…"]
    trainer = given_texts(texts)
    place = ROW | {"begun": Characters()("<step>38+4=42</step>").input_ids}
    (found,) = trainer.write_turns([place])
    assert [*map(Characters().decode, found)] == ["\n<step>42*7=50</step>", "I give up"]
    assert trainer.asked == [("writer", QUESTION)] * 4
    assert trainer.prefix == ["<step>38+4=42</step>"] * 4
    for player in ("actor", "writer"):
        assert trainer.prompt_of(player, ROW) == solve_prompt(QUESTION)
    assert trainer.prompt_of("critic", ROW)[-1]["content"] == ASKED
    blind = given_texts([], privileged=False)
    assert blind.prompt_of("critic", ROW) == solve_prompt(QUESTION)


def test_the_actor_learns_what_the_critic_prefers_and_labels_are_only_logged():
    steps = ["<step>38+4=42</step>", "<step>38+4=41</step>"]
    trainer = given_texts([*steps, *steps])
    trainer.saved["dialogues"] = [ROW | {"ids": Characters()(steps[0]).input_ids}]
    trainer.advantages = lambda turns: [-float(t == trainer_ids(steps[0])) for _, t in turns]
    trainer.start_actor()
    kept = {(*p["chosen"], 0, *p["rejected"]) for p in trainer.saved["actor"]}
    assert kept == {(*trainer_ids(steps[1]), 0, *trainer_ids(steps[0]))}  # as it says, though wrong
    assert {*trainer.logged["co/chosen_right"]} == {False}
    assert {*trainer.logged["co/rejected_right"]} == {True}
    whole = given_texts([], actor_pairs="dialogues")
    whole.saved["critic"] = ["pairs"]
    whole.start_actor()
    assert whole.saved["actor"] == ["pairs"] and not whole.asked


def trainer_ids(text: str) -> list[int]:
    return Characters()(text).input_ids


def test_labels_are_of_the_turn_given_what_was_before():
    trainer = given_texts([])

    def label(prefix, turn):
        return trainer.label(ROW | {"begun": trainer_ids(prefix)}, trainer_ids(turn))

    assert label("", "<step>38+4=42</step>") is True
    assert label("<step>38+4=41</step>", "\n<step>41*7=43</step>") is True
    assert label("<step>38+4=41</step>", "\n<step>42*7=50</step>") is False
    assert label("<step>38+4=42</step>", "\n<answer>\\boxed{42}</answer>") is None
    assert label("", "") is None
    other = ROW | {"question": "How many?"}
    assert trainer.label(other, trainer_ids("<step>38+4=42</step>")) is None
