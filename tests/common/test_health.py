"""The sentences at the top of a report: each rule on both sides of its bound."""

from common.run.report.health import highest_of, main_metrics, result, sentences

import pytest


def sentences_of(*metrics):
    """Of a run whose steps have these metrics."""
    return sentences([{"step": i + 1, "seconds": 1.0, **row} for i, row in enumerate(metrics)])


STAND_OUT = """
verifier/tpr 0.05 0.11
verifier/tnr 0.05 0.11
verifier/says_correct 0.97 0.94
discriminator/says_yes 0.01 0.06
coder/parsed 0.7 0.85
judge/unparsable 0.3 0.15
judge/unreadable 0.3 0.15
gar/silent 0.3 0.15
a/frac_advantage_zero .9 .7
solver/kl 1.5 0.5
a/completions/clipped_ratio 0.3 0.1
co/verdict_minus_gold 0.4 0.2
co/flattery 0.4 0.2
co/rewarded_minus_true 0.4 0.2
"""


@pytest.mark.parametrize("line", STAND_OUT.strip().splitlines())
def test_a_metric_that_stands_out(line):
    """A metric, a value that is out of bounds, and one that is not."""
    metric, out, within = line.split()
    (sentence,) = sentences_of(*[{metric: float(out)}] * 3)
    assert metric.split("/")[0] in sentence
    assert sentences_of(*[{metric: float(out)}] * 2) == []  # too early to tell
    assert sentences_of(*[{metric: float(within)}] * 3) == []


def test_entropy_is_compared_with_its_own_beginning():
    first, last = ([{"solver/entropy": value}] * 10 for value in (1.0, 0.05))
    (said,) = sentences_of(*first, *last)
    assert "from 1 to 0.05 nats per token" in said
    assert sentences_of(*first, *[{"solver/entropy": 0.2}] * 10) == []


def test_only_the_last_third_counts():
    """Of the player's own values, however few: ten of a rare player would be most of the run."""
    steps = [{"solver/kl": 9.0}] * 20 + [{"solver/kl": 0.1}, {}, {"solver/kl": None}] * 10
    assert sentences_of(*steps) == []
    rare = [{"verifier/frac_advantage_zero": x} for x in (*[0.2] * 8, 0.88, 0.94, 0.95, 1.0)]
    (said,) = sentences_of(*[row for value in rare for row in (value, {}, {}, {})])
    assert said.startswith("94% of the verifier's completions have advantages of 0")


def test_held_out_is_the_first_against_the_last():
    rows = [{"step": 1, "solver/kl": 0.0}]
    rows += [{"step": s, "eval/solver/accuracy": a} for s, a in ((0, 0.4), (1, 0.9), (2, 0.3))]
    assert sentences(rows) == ["Held out, solver/accuracy fell from 0.40 to 0.30."]
    assert sentences([*rows, {"step": 3, "eval/judge/accuracy": 0.1}]) == []  # it is new
    for calm in (0.36, None, "text", float("nan")):
        rows[-1]["eval/solver/accuracy"] = calm
        assert sentences(rows) == []


def test_a_gradient_that_is_always_zero():
    zero, some = {"solver/grad_norm": 0.0, "judge/grad_norm": 0.1}, {"solver/grad_norm": 0.1}
    for steps, count in (([zero] * 3, 3), ([some] * 8 + [zero] * 4, 4)):
        (said,) = sentences_of(*steps)
        assert f"was zero in its last {count} updates" in said
    for steps in ([zero] * 2, [zero] * 5 + [some], [zero, {}, zero]):
        assert sentences_of(*steps) == []


def test_what_is_no_number_says_nothing():
    odd = {"solver/kl": float("nan"), "judge/parsed": None}
    assert sentences([]) == sentences_of(*[odd] * 3) == []


def test_the_result_is_one_sentence_on_the_first_metric_of_each_panel():
    curves = {"one": ["a/not here", "a/accuracy", "a/other"], "two": ["b/rate"], "three": ["c/x"]}
    metrics = [(0.4, 0.5, 1.0), (0.9, 0.5, 2.0), (0.3, 0.5004, 3.0)]
    rows = [
        {"step": s, "eval/b/rate": b, "eval/a/accuracy": a, "eval/c/x": c, "eval/a/other": 0.0}
        for s, (a, b, c) in zip((0, 4, 8), metrics)
    ]
    assert result(rows, curves) == (
        "On held-out questions, by step 8: a/accuracy fell from 0.400 to 0.300, after 0.900 at "
        "step 4; b/rate stayed at 0.500; c/x rose from 1.000 to 3.000."
    )
    assert result(rows[:1], curves) == result([{"step": 1, "a/loss": 1.0}], curves) == ""
    assert highest_of([{"step": 1}, *rows, rows[1] | {"step": 9}], "eval/a/accuracy") == (0.9, 4)
    assert main_metrics({"one": ["x"]}, ["a", "b"]) == ["a", "b"]
