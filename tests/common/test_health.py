"""The sentences at the top of a report: each rule on both sides of its bound."""

from common.report.words import NOTHING, RECENT, in_words

import pytest


def said(*metrics):
    """What is said of a run whose steps have these metrics."""
    return in_words([{"step": i + 1, "seconds": 1.0, **row} for i, row in enumerate(metrics)])


@pytest.mark.parametrize(
    "metrics, sentence",
    [
        ({"verifier/says_correct": 0.97}, "The verifier says CORRECT to 97% of everything."),
        (
            {"verifier/says_correct": 0.97, "co/verdict_minus_gold": 0.2},
            "The verifier says CORRECT to 97% of everything; 77% is right.",
        ),
        (
            {"verifier/says_correct": 0.02, "co/verdict_minus_gold": -0.3},
            "The verifier says CORRECT to 2% of everything; 32% is right.",
        ),
        ({"discriminator/says_yes": 0.01}, "The discriminator says YES to 1% of everything."),
        ({"verifier/tpr": 0.05}, "The verifier accepts only 5% of what is right."),
        ({"verifier/tnr": 0.05}, "The verifier rejects only 5% of what is wrong."),
        (
            {"co/verdict_minus_gold": 0.3},
            "Judged or paid 0.30 more than is true, on average (co/verdict_minus_gold).",
        ),
        ({"co/flattery": 0.4}, "Judged or paid 0.40 more than is true, on average (co/flattery)."),
        (
            {"co/paid_minus_true": 0.4},
            "Judged or paid 0.40 more than is true, on average (co/paid_minus_true).",
        ),
        ({"coder/parsed": 0.7}, "30% of what the coder writes cannot be read."),
        ({"judge/unparsable": 0.3}, "30% of what the judge writes cannot be read."),
        ({"discriminator/silent": 0.3}, "30% of what the discriminator writes cannot be read."),
        ({"judge/unreadable": 0.3}, "30% of what the judge writes cannot be read."),
        (
            {"solver/frac_reward_zero_std": 0.9},
            "In 90% of the solver's groups all rewards are alike; these teach nothing.",
        ),
        ({"solver/kl": 1.5}, "The solver is 1.5 nats per token away from the base."),
        (
            {"solver/completions/clipped_ratio": 0.3},
            "30% of the solver's completions are cut at the length limit.",
        ),
    ],
)
def test_every_figure_that_stands_out(metrics, sentence):
    assert said(metrics) == [sentence]


@pytest.mark.parametrize(
    "metrics",
    [
        {"verifier/says_correct": 0.94, "verifier/tpr": 0.11, "verifier/tnr": 0.11},
        # nearly everything is right, and nearly nothing is
        {"verifier/says_correct": 0.97, "co/verdict_minus_gold": 0.05},
        {"verifier/says_correct": 0.03, "co/verdict_minus_gold": -0.1},
        {"co/verdict_minus_gold": 0.2, "co/flattery": -0.5, "co/paid_minus_true": 0.2},
        {"coder/parsed": 0.85, "judge/unparsable": 0.15, "discriminator/silent": 0.15},
        {"solver/frac_reward_zero_std": 0.7, "solver/kl": 0.5},
        {"solver/completions/clipped_ratio": 0.1, "solver/entropy": 1e-6},  # no earlier step
    ],
)
def test_what_is_within_bounds(metrics):
    assert said(metrics) == [NOTHING]


def test_entropy_is_compared_with_its_own_beginning():
    falling = [{"solver/entropy": 1.0}] * RECENT + [{"solver/entropy": 0.05}] * RECENT
    assert said(*falling) == [
        "The solver's entropy fell from 1 to 0.05 nats per token; it tries hardly anything new."
    ]
    assert said(*falling[:RECENT], *[{"solver/entropy": 0.2}] * RECENT) == [NOTHING]


def test_only_the_last_steps_count():
    steps = [{"solver/kl": 9.0}] * 50 + [{"solver/kl": 0.1}, {}, {"solver/kl": None}] * RECENT
    assert said(*steps) == [NOTHING]


def test_held_out_is_the_first_against_the_last():
    rows = [{"step": 1, "solver/kl": 0.0}]
    rows += [{"step": s, "eval/solver/accuracy": a} for s, a in ((0, 0.4), (1, 0.9), (2, 0.3))]
    assert in_words(rows) == ["Held out, solver/accuracy fell from 0.40 to 0.30."]
    rows[-1]["eval/solver/accuracy"] = 0.36
    assert in_words(rows) == [NOTHING]
    assert in_words([*rows, {"step": 3, "eval/judge/accuracy": 0.1}]) == [NOTHING]  # it is new
    for nothing in (None, "text", float("nan")):
        rows[1]["eval/solver/accuracy"] = nothing
        assert in_words(rows) == [NOTHING]


def test_the_gravest_comes_first():
    metrics = {"solver/completions/clipped_ratio": 1.0, "judge/parsed": 0.0, "verifier/tnr": 0.0}
    assert [sentence.split()[-1] for sentence in said(metrics)] == ["wrong.", "read.", "limit."]


def test_nothing_to_speak_of():
    assert in_words([]) == in_words([{"step": 0, "eval/solver/accuracy": 0.5}]) == []
    assert said({"solver/kl": float("nan"), "solver/entropy": "text"}) == [NOTHING]  # seconds


def test_a_gradient_that_is_always_zero():
    zero, some = {"solver/grad_norm": 0.0, "judge/grad_norm": 0.1}, {"solver/grad_norm": 0.1}
    sentence = "The solver's gradient was zero in its last {} steps; it learns nothing."
    assert said(*[zero] * 3) == [sentence.format(3)]
    assert said(some, *[zero] * RECENT) == [sentence.format(RECENT)]
    for steps in ([zero] * 2, [zero] * 5 + [some], [zero, {}, zero]):
        assert said(*steps) == [NOTHING]
