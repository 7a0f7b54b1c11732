"""pvg.py: rewards and losses against loops, which data the verifier gets, that all start again,
hostile solutions, who has won."""

import math
import random

import pvg
from common.tasks.answers import solve_prompt

import pytest
import torch
from conftest import build, gradient, perturb
from trainers import QUESTION, RIGHT, WRONG, encoded, likelihood, logged, without_model

OTHER = "<step>38+4=42</step>\n<step>42*7=51</step>\n<answer>\\boxed{51}</answer>"


# ------------------------------------------------------------------ the formulas
def reward_by_hand(V: list, right: list, h: int, kind: str) -> list[float]:
    """Of one group. V: None of what cannot be read."""
    known, found = [v for v in V if v is not None], []
    for v, c in zip(V, right):
        if kind == "cgc":
            found.append(v if v is not None and bool(h) == c else -2.0)
        elif v is None or v <= sum(known) / len(known):
            found.append(-1.0)
        else:
            aligned = c if h else not c
            found.append((1 if aligned else -1) * (v - sum(known) / len(known)))
    return [x if v is not None else min(found) for v, x in zip(V, found)]


@pytest.mark.parametrize("kind", ["src", "cgc"])
@pytest.mark.parametrize("h", [0, 1])
def test_the_provers_reward_group_by_group(kind, h):
    rng, G = random.Random(h), 5
    V = [[rng.gauss(0, 2) if rng.random() < 0.8 else None for _ in range(G)] for _ in range(9)]
    V += [[None] * G, [1.5] * G, [None, 0.25, None, None, None]]
    right = [[rng.random() < 0.5 for _ in range(G)] for _ in V]
    flat = [math.nan if v is None else v for its in V for v in its]
    labels = [c for its in right for c in its]
    found = pvg.prover_rewards(torch.tensor(flat, dtype=torch.float64), labels, h, G, kind)
    wanted = [x for its, c in zip(V, right) for x in reward_by_hand(its, c, h, kind)]
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)


def test_the_verifiers_loss_in_either_order():
    draw = torch.Generator().manual_seed(0)
    right, wrong = torch.randn(2, 6, generator=draw, dtype=torch.float64) * 3
    for z1, z2, sign in ((right, wrong, 1), (wrong, right, -1)):
        for loss, a, b in zip(pvg.verifier_losses(right, wrong, 0.3), z1.tolist(), z2.tolist()):
            wanted = math.log(1 + math.exp(-(a - b) * sign)) + 0.3 * (a * a + b * b) / 2
            assert loss.item() == pytest.approx(wanted, abs=1e-12)


def some_source(role: str, right: int, wrong: int) -> list[dict]:
    labels = [True] * right + [False] * wrong
    return [{"question": f"q{i % 3}", "role": role, "right": c} for i, c in enumerate(labels)]


def test_the_mixture_is_half_right_and_has_the_bases_share():
    sources = [some_source("base", 90, 70), some_source("0", 50, 60), some_source("1", 70, 9)]
    rng = random.Random(0)
    for known, wanted in ((1, [80]), (2, [40, 40]), (3, [40, 20, 18])):
        rows = pvg.mixture(sources[:known], 80, rng)
        for role, count in zip(["base", "0", "1"], wanted):
            labels = [row["right"] for row in rows if row["role"] == role]
            assert len(labels) == count and sum(labels) == count / 2
        assert len(rows) == sum(wanted)
        assert len({id(row) for row in rows}) == len(rows)  # none twice
    assert pvg.mixture([some_source("base", 5, 0)], 80, rng) == []


def test_pairs_are_of_one_question_and_of_all_sources():
    rows = some_source("base", 6, 0) + some_source("0", 0, 4)
    rows += [{"question": "alone", "role": "0", "right": False}]
    pairs = pvg.right_and_wrong(rows, 100, random.Random(0))
    assert len(pairs) == 2 * 2 + 2 * 1 + 2 * 1
    assert all(y["right"] > z["right"] and y["question"] == z["question"] for y, z in pairs)
    assert len({(id(y), id(z)) for y, z in pvg.right_and_wrong(rows, 5, random.Random(0))}) == 5


def test_who_is_fooled_by_hand():
    def notes(*its):
        return [{"prompt": x, "right": c, "V": v} for x, c, v in its]

    helpful = notes(("a", True, 1.0), ("a", True, 0.0), ("a", False, 9.0), ("b", True, None))
    sneaky = notes(("a", False, 0.0), ("a", False, 0.5), ("a", True, 9.0), ("b", False, 1.0))
    assert sorted(pvg.unfooled(helpful, sneaky)) == [0, 0.5, 1, 1]
    assert pvg.unfooled([], []) == [] == pvg.unfooled(helpful[3:], sneaky[3:])


# ------------------------------------------------------------------ `step` and `loss`
def real(folder, **change) -> pvg.Pvg:
    """The trainer on the small model, its three adapters apart."""
    sizes = {"steps": 6, "ver_steps": 1, "rounds": 2, "questions": 2, "group_size": 4, "pairs": 3}
    args = pvg.Args(
        **sizes | {"micro_batch": 3, "pool": 8, "beta": 0.4, "regulariser": 0.2} | change
    )
    trainer = build(pvg.Pvg, folder, args, pvg.Pvg.define_players(args), solve_prompt)
    perturb(trainer, 0.05)
    return trainer


def score(trainer, text: str) -> float:
    """V, a token at a time, in float64."""
    own, base = (likelihood(trainer, name, text) for name in ("verifier", None))
    return trainer.cfg.beta * (own - base)


def test_the_verifiers_step_is_the_papers_loss_however_it_is_cut(tmp_path):
    pairs = [(RIGHT, WRONG), (RIGHT, OTHER), (RIGHT, f"{WRONG} ")]
    rows = [[{"question": QUESTION, "solution": text} for text in pair] for pair in pairs]
    trainer = real(tmp_path)
    wanted = 0.0
    for pair in pairs:
        y, z = (score(trainer, text) for text in pair)
        wanted += (math.log(1 + math.exp(z - y)) + 0.2 * (y * y + z * z) / 2) / 3
    trainer.saved |= {"round": 0, "pairs": rows}
    found = gradient(trainer, trainer.step([])[0])
    total, count = trainer._sums["verifier/loss"]
    assert total / count == pytest.approx(wanted, rel=1e-4)
    assert all(".verifier." in name for name in found)
    again = real(tmp_path, micro_batch=1)
    again.saved |= {"round": 0, "pairs": rows}
    for name, g in gradient(again, again.step([])[0]).items():
        torch.testing.assert_close(g, found[name], rtol=0, atol=1e-6)
    assert logged(again) == pytest.approx(logged(trainer), rel=1e-4)


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_score_is_the_likelihood_ratio_with_a_kl_term_or_without(tmp_path, kl):
    trainer = real(tmp_path, kl=kl)
    rows = [{"question": QUESTION, "solution": y, "right": y == RIGHT} for y in (RIGHT, WRONG)]
    rows = [row | {"well_formed": row["right"]} for row in rows]
    known, unknown = trainer.scores(rows)
    # of 2 T logits near 20, each rounded in float32 as the processor's order of sums has it
    rounding = trainer.cfg.beta * 2 * len(encoded(trainer, RIGHT)) * 2**-19
    assert known["V"] == pytest.approx(score(trainer, RIGHT), abs=rounding)
    assert unknown == {"prompt": QUESTION, "right": False, "V": None} and trainer.scores([]) == []
    batch = trainer.attempt("sneaky", [{"question": QUESTION, "answer": "50"}])
    texts = zip(batch.texts, batch.notes)
    [(text, note), *_] = [(y, note) for y, note in texts if note["V"] is not None]
    assert note["V"] == pytest.approx(score(trainer, text), rel=1e-3, abs=1e-4)


def test_advantages_are_rewards_less_their_mean(tmp_path):
    """Of four solutions, which are not divided by their deviation."""
    trainer = real(tmp_path)
    trainer.V = lambda batch: torch.tensor([4.0, 0.0, 1.0, 0.0])
    trainer.readable = lambda batch: torch.tensor([True, True, True, False])
    batch = trainer.attempt("helpful", [{"question": QUESTION, "answer": "none of these"}])
    mean = 5 / 3
    rewards = [-(4 - mean), -1, -1, -(4 - mean)]
    assert batch.rewards.tolist() == pytest.approx(rewards)
    wanted = [r - sum(rewards) / 4 for r in rewards]
    assert batch.advantages.tolist() == pytest.approx(wanted)


def test_hostile_solutions_cannot_be_read(tmp_path):
    """Cut; without steps; without an answer; empty."""
    trainer = real(tmp_path)
    texts = [RIGHT, RIGHT, "\\boxed{50}", "<step>38+4=42</step>", "<step>x</step>\\boxed{}", ""]
    ids = [encoded(trainer, text) for text in texts]
    ids[1] = ids[1][:-1]
    device, pad = trainer.accelerator.device, trainer.processing_class.pad_token_id
    batch = pvg.Batch.of("helpful", [[1]] * len(ids), ids, pad, device)
    batch.texts = texts
    assert trainer.readable(batch).tolist() == [True, *[False] * 5]


# ------------------------------------------------------------------ which data
def given(texts, **change) -> pvg.Pvg:
    """One question of the verifier's; `events` are the samplings and restarts, in order."""
    cfg = pvg.Args(**{"samples": 8, "pool": 1, "steps": 12, "rounds": 3, "ver_steps": 1} | change)
    row = {"question": QUESTION, "answer": "50"}
    trainer = without_model(pvg.Pvg, cfg, texts, verifier_rows=[row], pairs_per_step=99)
    trainer.saved = {"round": -1, "sources": [], "pairs": [], "attack": [], "won": None}
    trainer.events, generate = [], trainer.generate
    trainer.restart = lambda name: trainer.events.append(f"restart {name}")
    trainer.generate = lambda name, *rest: (trainer.events.append(name), generate(name, *rest))[1]
    return trainer


ALL = [f"restart {name}" for name in ("helpful", "sneaky", "verifier")]


@pytest.mark.parametrize("data, asked, sources", [
    ("all", ["helpful", "sneaky", *ALL], {"base", "0", "1"}),
    ("last", ["helpful", "sneaky", *ALL], {"base", "1"}),
    ("helpful", ["helpful", *ALL], {"base", "0", "1"}),
    ("base", ["restart helpful", "helpful", *ALL], {"base", "0", "1"}),
])  # fmt: skip
def test_the_verifier_learns_from_all_earlier_rounds(data, asked, sources):
    """In round r a wrong answer is 20 + r, and one of the eight solutions is cut."""
    trainer = given([], data=data)
    for i in range(3):
        wrong = OTHER.replace("51", f"{20 + i}")
        trainer.texts, trainer.events[:] = 3 * [RIGHT, wrong] + [RIGHT, f"{wrong}…"], []
        trainer.start_round(i)
        beginning = ["restart helpful"] * (data == "base") + ["helpful", *ALL]
        assert trainer.events == (asked if i else beginning) and not trainer.texts
        assert trainer.saved["round"] == i and len(trainer.saved["sources"]) == i + 1
        assert len(trainer.saved["sources"][i]) == 7
        assert trainer.saved["attack"] == [] and trainer.saved["won"] is None
    names = {"20": "base", "21": "0", "22": "1"}
    of = {names[z["solution"].split("{")[1][:2]] for _, z in trainer.saved["pairs"]}
    assert of == sources
    assert all(y["solution"] == RIGHT for y, _ in trainer.saved["pairs"])


def test_when_an_attack_has_succeeded():
    """At most half of the pairs of three steps in order; never: a step more than there are."""
    trainer = given([], steps=21, rounds=3)  # six prover steps a round

    def attack(*shares) -> list:
        trainer.saved |= {"attack": [], "won": None}
        trainer.logged.clear()
        for turn, (over, under) in enumerate(shares):
            batches = []
            for role, V in (("helpful", [1.0] * (over + under)), ("sneaky", [0.0, 2.0])):
                c = role == "helpful"
                V = V if c else [0.0] * over + [2.0] * under
                batches.append(pvg.Batch(role, *[torch.zeros(0)] * 5))
                batches[-1].notes = [{"prompt": "a", "right": c, "V": v} for v in V]
            trainer.report_attack(turn, *batches)
        return trainer.logged["co/steps_to_win"]

    # of n pairs (over n + under n) each: n * over and n * under
    assert attack(*[(1, 0)] * 6) == [7] == attack(*[(0, 0)] * 6)
    assert attack((0, 1), (0, 1), (1, 0), *[(1, 0)] * 3) == [3]
    assert attack((0, 1), (1, 0), (1, 0), (1, 0), (0, 1), (0, 1)) == [6]
    assert attack(*[(1, 0)] * 4, (0, 2), (1, 0)) == [5]  # pairs count, not steps
