"""What benchmarks/evidence*.py make of runs, on runs made up so that the answer is known; and the
verifiers that its controls put in place of the trained one."""

import json
import math
import re
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from common.tasks.answers import split_steps  # noqa: E402
from common.tiny import tasks  # noqa: E402

import controls  # noqa: E402
import evidence  # noqa: E402
import evidence_claims as claims  # noqa: E402
import evidence_pages as pages  # noqa: E402


def a_run(accuracies: list[float], variant="a", seed=0, end=0.0) -> dict:
    """Verifier's steps in between, whose accuracy is that of the few solutions that it judges: it
    does not count, their tokens do.
    """
    steps = []
    for i, accuracy in enumerate(accuracies):
        steps += [{"step": 2 * i, "co/sampled_tokens": 10, "generator/accuracy": 0.75}]
        own = {"generator/accuracy": accuracy, "co/alpha": 0.1}
        steps += [{"step": 2 * i + 1, "co/sampled_tokens": 5, **own}]
    return {
        "variant": variant,
        "seed": seed,
        "rate": None,
        "steps": steps,
        "evaluations": [{"eval/x": 0.1}, {"eval/x": end}],
    }


@pytest.mark.parametrize("name", pages.PAGES)
def test_every_table_can_be_made_of_runs(name, monkeypatch):
    """One row of what was there before training, one of each variant."""
    variants = list(evidence.EXPERIMENTS[name].variants)
    keys = {f"eval/{name}": 0.25 for name in evidence_keys(name)}

    def runs_of(_, variant):
        kept = dict.fromkeys(evidence.EXPERIMENTS[name].kept, 0.5)
        steps = [{"step": i, "co/sampled_tokens": 5} | kept for i in range(9)]
        evaluations = [keys, dict.fromkeys(keys, 0.5)]
        return {0: a_run([], variant) | {"steps": steps, "evaluations": evaluations}}

    monkeypatch.setattr(pages, "runs_of", runs_of)
    monkeypatch.setattr(pages, "with_runs", lambda _: variants)
    lines = pages.table(name).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["before training", *variants]
    assert "25.0" in lines[2] and "50.0" in lines[3]


def test_a_page_of_some_variants_says_which_have_not_run(monkeypatch, tmp_path):
    """As far as the measuring has come; a variant without a run has no row, nor a rate."""
    steps = [{"step": i, "co/sampled_tokens": 5, "generator/accuracy": 0.5} for i in range(9)]
    evaluations = [{key: 0.5 for key in claims.HELD_OUT.values()}] * 2
    evaluations = [{f"eval/{key}": x for key, x in row.items()} for row in evaluations]
    ran = a_run([], "answer only") | {"steps": steps, "evaluations": evaluations}
    swept = [ran | {"rate": rate, "seed": s} for rate in evidence.RATES for s in (11, 12, 13)]
    found = {"tango": [ran | {"rate": evidence.RATES[0]}], "tango_rates": swept}
    read = lambda name: {"machine": "none", "runs": found.get(name, [])}  # noqa: E731
    for module in (evidence, pages, claims):
        monkeypatch.setattr(module, "read", read)
    text = pages.page("tango", "x.png")
    assert "answer only, 1 seeds" in text and "co-trained: not run yet" in text
    assert [line.split("|")[1] for line in text.splitlines() if line.startswith("| answer")] == [
        " answer only "
    ] * 2  # the variants, and the rates
    assert "| co-trained |" not in text
    pages.draw("tango", claims.PAGES["tango"].panels[:1], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def evidence_keys(name: str) -> set[str]:
    """The held-out figures that a script of this experiment evaluates, as its page names them."""
    page = (
        ROOT / "docs" / f"{evidence.EXPERIMENTS[name].script.removesuffix('.py')}.md"
    ).read_text()
    shown = re.findall(r"^\| `(?:\{,eval/\}|eval/)([^`]+)`", page, re.MULTILINE)
    return {key for text in shown for key in unfold(text)}


def unfold(text: str) -> list[str]:
    """`a/{b,c}` -> a/b, a/c."""
    found = re.search(r"\{([^{}]*)\}", text)
    if not found:
        return [text]
    parts = found[1].split(",")
    return [x for part in parts for x in unfold(text.replace(found[0], part, 1))]


def test_a_level_is_reached_by_the_moving_average_and_not_by_a_lucky_step():
    run = a_run([0.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.9])
    steps = claims.needed(0.5, "generator/accuracy")
    tokens = claims.needed(0.5, "generator/accuracy", "tokens")
    assert steps(run) == 10 and tokens(run) == 150
    assert claims.needed(0.6, "generator/accuracy")(run) == math.inf
    # not before there are enough steps for an average
    assert steps(a_run([1.0] * 4)) == math.inf and steps(a_run([1.0] * 5)) == 5
    assert claims.whole("steps", "generator/accuracy")(run) == 11
    assert claims.whole("tokens", "generator/accuracy")(run) == 165


def test_only_the_generators_own_steps_count():
    run = a_run([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert claims.at_the_end("generator/accuracy", 2)(run) == pytest.approx(0.55)
    assert claims.area("generator/accuracy")(run) == pytest.approx(0.35)
    experiment = evidence.Experiment("tango.py", "", "generator/accuracy", {}, ())
    assert evidence.score(experiment, run) == pytest.approx(0.35)
    drawn = pages.points(run, "gen_step", "generator/accuracy")
    assert drawn == [(i, i / 10) for i in range(1, 7)]
    for step in run["steps"]:  # without a verifier no step has an alpha, and all are his
        step.pop("co/alpha", None)
    assert claims.whole("steps", "generator/accuracy")(run) == 12


def test_intervals_are_students():
    """By hand: three values, sd 1, half = 4.303 / sqrt(3)."""
    middle, low, high = claims.interval([1.0, 2.0, 3.0])
    assert middle == 2 and high - 2 == pytest.approx(2.4843, abs=1e-3) == 2 - low
    assert math.isnan(claims.interval([1.0])[1])
    ratio, low, high = claims.ratios([2.0, 8.0], [1.0, 2.0])
    assert ratio == pytest.approx(math.sqrt(2 * 4))
    assert math.sqrt(low * high) == pytest.approx(ratio) and low < 1 < high
    assert claims.ratios([6.0] * 3, [2.0] * 3) == pytest.approx((3, 3, 3))


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Two variants, three seeds; one run of "b" is missing, one of "a" never gets there."""
    variants = {"a": evidence.Variant(), "b": evidence.Variant()}
    experiment = evidence.Experiment("tango.py", "", "generator/accuracy", variants, ())
    monkeypatch.setitem(evidence.EXPERIMENTS, "made_up", experiment)
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    runs = [a_run([0.0] * 5 + [1.0] * 5, "a", 0, 0.30), a_run([0.0] * 20, "a", 1, 0.32)]
    runs += [a_run([1.0] * 6, "b", 0, 0.50), a_run([1.0] * 6, "b", 1, 0.54)]
    runs += [a_run([1.0] * 6, "b", 2, 0.99)]  # without its pair
    (tmp_path / "made_up.json").write_text(json.dumps({"machine": "none", "runs": runs}))


def a_claim(**more) -> claims.Claim:
    measure = claims.needed(0.5, "generator/accuracy")
    return claims.Claim("name", "made_up", "says", "paper", measure, ("a", "b"), **more)


def test_claims_are_paired_by_seed_and_count_who_never_gets_there(made_up):
    limit = claims.whole("steps", "generator/accuracy")
    row = claims.result(a_claim(kind="ratio", limit=limit))
    assert row["seeds"] == 2 and row["never"] == [1, 0]
    assert row["ours"] == pytest.approx(math.sqrt(8 / 5 * 20 / 5), abs=1e-3)  # 8 and 20 against 5
    words = pages.in_words(row)  # a bound, and no interval
    assert words.startswith("at least 2.53x: ") and "never there: a 1 of 2" in words
    difference = claims.result(
        claims.Claim("name", "made_up", "says", "paper", claims.last("x"), ("a", "b"))
    )
    assert difference["ours"] == pytest.approx(statistics.mean([0.20, 0.22]))
    assert difference["verdict"] == "separated" and "+21.0" in pages.in_words(difference)
    one = claims.result(claims.Claim("n", "made_up", "s", "p", claims.last("x"), ("a",)))
    assert one["ours"] == pytest.approx(0.31) and one["verdict"] == "one variant"
    nobody = claims.Claim("n", "made_up", "s", "p", claims.last("x"), ("a", "c"))
    assert claims.result(nobody) is None


def test_what_is_not_separated_says_so(made_up):
    same = claims.Claim("n", "made_up", "s", "p", claims.first("x"), ("a", "b"))
    row = claims.result(same)
    assert row["ours"] == 0 and "not separated" in pages.in_words(row)
    # a gain of one variant is held against 0
    gains = iter((0.3, -0.3))
    gain = claims.Claim("n", "made_up", "s", "p", lambda run: next(gains), ("a",), "gain")
    assert "not separated" in pages.in_words(claims.result(gain))
    gains = iter((0.300, 0.302))
    assert pages.in_words(claims.result(gain)).startswith("+30.1 [")
    gains = iter((0.300, 0.302))
    assert claims.result(gain)["verdict"] == "separated"


def test_the_best_rate_is_that_of_the_sweep_and_of_nothing_else(made_up, tmp_path):
    experiment = evidence.EXPERIMENTS["made_up"]
    experiment.variants["a"].rates = (1e-3, 2e-3)
    found = {
        (rate, seed): a_run([rate * 100], "a", seed)
        for rate in (1e-3, 2e-3)
        for seed in (11, 12, 13)
    }
    for (rate, seed), run in found.items():
        run["rate"] = rate
        run["seed"] = seed
    found[1e-3, 11]["steps"][1]["generator/accuracy"] = 0.9
    path = tmp_path / "made_up_rates.json"
    path.write_text(json.dumps({"machine": "none", "runs": list(found.values())[:-1]}))
    with pytest.raises(RuntimeError, match="not swept"):
        evidence.rate_of("made_up", "a")
    path.write_text(json.dumps({"machine": "none", "runs": list(found.values())}))
    assert evidence.rate_of("made_up", "a") == 1e-3
    assert evidence.rate_of("made_up", "b") is None


def test_every_claim_is_about_variants_that_exist():
    for claim in claims.CLAIMS:
        assert set(claim.variants) <= set(evidence.EXPERIMENTS[claim.experiment].variants), claim
        assert claim.kind in ("difference", "gain") or claim.limit
    assert len({claim.name for claim in claims.CLAIMS}) == len(claims.CLAIMS)


def test_the_summary_is_that_of_the_runs():
    found = json.loads((Path(evidence.FOLDER) / "summary.json").read_text())
    assert found == json.loads(json.dumps(pages.results()))


# ------------------------------------------------------------------ controls
QUESTION = "((38+4)*7)-5 mod 100"
SOLUTION = tasks.gold_solution(QUESTION).replace("42*7=94", "42*7=95")


def test_the_control_that_knows_the_truth_marks_the_wrong_step_and_no_other():
    import tango

    said, final = tango.parse_judgement(controls.gold(QUESTION, SOLUTION))
    assert said == tasks.step_labels(QUESTION, split_steps(SOLUTION)) == [True, False, False]
    assert final is False
    assert tango.parse_judgement(controls.gold(QUESTION, tasks.gold_solution(QUESTION)))[1] is True
    assert tango.judgement_format(controls.gold(QUESTION, SOLUTION), SOLUTION) == 1.0


def test_the_control_that_knows_nothing_says_half_of_each():
    import tango

    questions = tasks.sample_questions(0, 300, held_out=True)
    said = [
        verdict
        for question in questions
        for verdict in tango.parse_judgement(
            controls.coin(question, tasks.gold_solution(question))
        )[0]
    ]
    assert sum(said) / len(said) == pytest.approx(0.5, abs=0.06)


def test_controls_are_asked_in_the_verifiers_place():
    import tango

    class Trainer:
        def generate(self, name, prompts, greedy=False):
            return [name] * len(prompts)

    controls.judged_by(controls.gold, Trainer)
    asked = [tango.verify_prompt(QUESTION, SOLUTION)]
    assert Trainer().generate("generator", asked) == ["generator"]
    assert Trainer().generate("verifier", asked) == [controls.gold(QUESTION, SOLUTION)]


def test_luck_pays_for_every_second_wrong_number_and_in_steps_only():
    paid = [controls.odd_as_gold(rf"\boxed{{{n}}}", "89") for n in range(100)]
    assert paid == [n % 2 == 1 for n in range(100)]
    for text in ("89", r"\boxed{}", r"\boxed{x}", r"\boxed{8.9}", r"\boxed{89", r"\boxed{²}"):
        assert controls.odd_as_gold(text, "89") is False

    class Trainer:
        def step(self, rows):
            if not rows:
                raise KeyError
            return [module.is_correct(r"\boxed{91}", "89") for _ in rows]

    exact = lambda text, gold: text == rf"\boxed{{{gold}}}"  # noqa: E731
    module = SimpleNamespace(is_correct=exact, Tango=Trainer)
    controls.paid_for_luck(module)
    assert Trainer().step([1, 2]) == [True, True] and module.is_correct is exact
    with pytest.raises(KeyError):
        Trainer().step([])
    assert module.is_correct is exact


def test_scores_from_elsewhere_take_the_judges_place():
    import mae

    asked = [mae.judge_answer_prompt(QUESTION, "89"), mae.judge_answer_prompt(QUESTION, "90")]
    asked += [mae.judge_question_prompt(QUESTION), mae.judge_question_prompt("38+ mod 100")]
    given = [0.1, 0.2, 0.3, 0.4]
    wanted = {"gold": [1.0, 0.0, 1.0, 0.0], "constant": [0.7] * 4}
    for how in ("gold", "constant", "shuffled"):

        class Trainer:
            args, state = SimpleNamespace(seed=0), SimpleNamespace(global_step=1)

            def values(self, prompts):
                return list(given), ["asked all the same"] * len(prompts)

        controls.scored_by(how, Trainer)
        V, texts = Trainer().values(asked)
        assert texts == ["asked all the same"] * 4
        assert V == wanted[how] if how in wanted else sorted(V) == given and V != given
