"""What lab/runs/{measures,evidence,pages}.py make of runs, on runs made up so that the answer is
known; and the verifiers that controls.py puts in place of the trained one."""

import ast
import graphlib
import importlib
import json
import math
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
from types import SimpleNamespace

import mae
import tango
from common.run.models import load_model
from common.tasks.answers import split_steps
from common.tasks.math import load_questions
from common.tiny import tasks
from lab import EVIDENCE, ROOT
from lab.runs import controls, evidence, pages, verifiers
from lab.runs.measures import interval, measure
from tango import Judgement

import pytest
import torch
import tyro
from conftest import write_rows

ACCURACY = "generator/accuracy"
TO_HALF = f"needed:0.5:steps:{ACCURACY}"


def a_run(accuracies: list[float], variant="a", seed=0, end=0.0) -> dict:
    """With verifier's steps in between, whose accuracy is that of the few solutions that it judges:
    their accuracy does not count, their tokens do.
    """
    steps = []
    for i, accuracy in enumerate(accuracies):
        steps += [{"step": 2 * i, "co/sampled_tokens": 10, ACCURACY: 0.75}]
        own = {ACCURACY: accuracy, "co/alpha": 0.1}
        steps += [{"step": 2 * i + 1, "co/sampled_tokens": 5, **own}]
    evaluations = [{"eval/x": 0.1, "eval/y": 0.1}, {"eval/x": end}]
    about = {"variant": variant, "seed": seed}
    about |= {"versions": {"commit": "1234567890", "python": "3.11.7", "torch": "2.13.0+cpu"}}
    return about | {"steps": steps, "evaluations": evaluations}


def test_the_laboratory_imports_itself_one_way_only():
    """Anywhere in a file, in functions as well."""
    found = {}
    for path in (ROOT / "lab").glob("*/*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                found.setdefault(name, set()).update(names)
    assert "lab.runs.evidence" in found["lab.runs.pages"]
    graphlib.TopologicalSorter(found).prepare()  # raises where there is a circle


# ------------------------------------------------------------------ measures and intervals
def test_held_out_figures():
    run = a_run([], end=0.4)
    found = [measure(f"{kind}:x", run) for kind in ("first", "last", "after")]
    assert found == pytest.approx([0.1, 0.4, 0.4])
    assert math.isnan(measure("last:y", run))


def test_a_level_is_reached_by_the_moving_average_and_not_by_a_lucky_step():
    run = a_run([0.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.9])
    units = ("steps", "tokens", "step")
    assert [measure(f"needed:0.5:{unit}:{ACCURACY}", run) for unit in units] == [10, 150, 19]
    assert measure(f"needed:0.6:steps:{ACCURACY}", run) == math.inf
    # not before there are enough steps for an average
    assert measure(TO_HALF, a_run([1.0] * 4)) == math.inf
    assert measure(TO_HALF, a_run([1.0] * 5)) == 5
    assert [measure(f"whole:{unit}:{ACCURACY}", run) for unit in units] == [11, 165, 21]


def test_only_the_generators_own_steps_count():
    run = a_run([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert measure(f"end:2:{ACCURACY}", run) == pytest.approx(0.55)
    assert measure(f"mean:{ACCURACY}", run) == pytest.approx(0.35)
    assert math.isnan(measure("end:5:no/such", run))
    drawn = pages.points(run, "gen_step", ACCURACY)
    assert drawn == [(i, i / 10) for i in range(1, 7)]
    held_out = [{"step": step, "eval/x": step / 10} for step in (0, 5, 12)]
    drawn = pages.points(run | {"evaluations": held_out}, "gen_step", "eval/x")
    assert drawn == [(0, 0.0), (3, 0.5), (6, 1.2)]  # the generator's steps are 1, 3, 5, ...
    for step in run["steps"]:
        step.pop("co/alpha", None)  # without a verifier none has it, and all are the generator's
    assert measure(f"whole:steps:{ACCURACY}", run) == 12


def test_older_and_newer_runs_of_tango_are_read_alike():
    """In newer ones the accuracy of what a verifier's step judges has a name of its own."""
    older = a_run([0.2, 0.4, *[0.6] * 20])
    own = ["co/alpha" in step for step in older["steps"]]
    steps = [
        step if its else {k.replace(ACCURACY, "verifier/judged_right"): x for k, x in step.items()}
        for its, step in zip(own, older["steps"])
    ]
    newer = older | {"steps": steps}
    assert [ACCURACY in step for step in steps] == own
    for text in (TO_HALF, f"end:3:{ACCURACY}", f"mean:{ACCURACY}", f"whole:steps:{ACCURACY}"):
        assert measure(text, older) == measure(text, newer)
    assert pages.points(older, "gen_step", ACCURACY) == pages.points(newer, "gen_step", ACCURACY)


def test_intervals_are_students():
    """By hand, with quantiles from a printed table: three values, sd 1, half = 4.303 / sqrt(3)."""
    middle, low, high = interval([1.0, 2.0, 3.0])
    assert middle == 2 and high - 2 == pytest.approx(2.4843, abs=1e-3) == 2 - low
    table = {2: 12.706, 3: 4.303, 5: 2.776, 8: 2.365, 16: 2.131, 31: 2.042}
    for n, quantile in table.items():
        middle, low, high = interval([0.0, 1.0, *[0.5] * (n - 2)])
        error = math.sqrt(0.5 / (n - 1) / n)
        assert (high - middle) / error == pytest.approx(quantile, abs=1e-3) and middle == 0.5
    assert interval([2.0, 2.0]) == (2, 2, 2) and math.isnan(interval([1.0])[1])


def test_the_exact_interval_of_a_share():
    """Of none of n, 1 - .025^(1/n) is the most; and tables say 2 of 26 is .0095 to .2513."""
    assert pages.share(0, 5) == f"0 of 5 runs (0 [0, {100 * (1 - 0.025 ** (1 / 5)):.0f}] %)"
    assert pages.share(2, 26) == "2 of 26 runs (8 [1, 25] %)"
    assert pages.share(5, 5) == "5 of 5 runs (100 [48, 100] %)"


# ------------------------------------------------------------------ what pages show
def runs(*some: dict) -> dict[int, dict]:
    return {run["seed"]: run for run in some}


A = runs(a_run([0.0] * 5 + [1.0] * 5, "a", 0, 0.30), a_run([0.0] * 20, "a", 1, 0.32))


def test_the_headline_has_a_mean_or_the_ends_and_collapses_are_counted(made_up, monkeypatch):
    rows = [[f"by {variant}", "32", variant] for variant in ("a", "b")]
    chosen = {"experiment": "made_up", "title": "t", "rows": rows}
    monkeypatch.setitem(pages.SHOWN, "headline", chosen)
    ends = {"a": (0.4, 0.7, 0.35, 0.1), "b": (0.4, 0.5)}
    made = []
    for variant, some in ends.items():
        for seed, end in enumerate(some):
            made.append(a_run([], variant, seed))
            made[-1]["evaluations"] = [{f"eval/{ACCURACY}": end}]
    made_up("made_up", made)
    assert "| by a | 32 | 10 to 70 (4) |\n| by b | 32 | 45 (2) |\n" in pages.headline()
    # 15.0 and 27.5 points below the median of a: one run is far below
    assert pages.collapses("made_up", ["a", "b"]) == (1, 6)


def test_the_table_of_other_models_is_that_of_their_runs():
    """Means and differences of the runs in bases.json, without `runs_of`, `cell` and `interval`."""
    runs = json.loads((EVIDENCE / "bases.json").read_text())["runs"]
    last = {(r["variant"], r["seed"]): r["evaluations"][-1][f"eval/{ACCURACY}"] for r in runs}
    lines = {line.split(" | ")[0][2:]: line for line in pages.bases_table().splitlines()}
    for model, base in pages.SHOWN["bases"]["rows"]:
        if not base or not any(variant.startswith(f"{base}: ") for variant, _ in last):
            continue
        answers = [100 * x for (v, _), x in last.items() if v == f"{base}: GRPO, all answers"]
        if answers:
            assert f" {statistics.mean(answers):.1f}" in lines[model]
        along, first = (
            {seed: x for (v, seed), x in last.items() if v == f"{base}: {reward}"}
            for reward in ("co-trained", "verifier beforehand")
        )
        both = [100 * (along[seed] - first[seed]) for seed in along if seed in first]
        if len(both) > 1:
            assert f"| {statistics.mean(both):+.1f} [" in lines[model]


def test_every_variant_that_is_shown_exists():
    headline, bases = pages.SHOWN["headline"], pages.SHOWN["bases"]
    shown = [variant for *_, variant in headline["rows"]] + sum(
        pages.SHOWN["collapses"].values(), []
    )
    assert {*shown} <= evidence.EXPERIMENTS[headline["experiment"]].variants.keys()
    of_bases = evidence.EXPERIMENTS["bases"].variants.keys()
    for _, shipped, others in bases["columns"]:
        assert shipped in evidence.EXPERIMENTS["few_labels"].variants
        assert all(f"{base}: {others}" in of_bases for _, base in bases["rows"] if base)


def test_every_variants_arguments_are_understood():
    for experiment in evidence.EXPERIMENTS.values():
        for variant in experiment.variants.values():
            script = importlib.import_module((variant.script or experiment.script)[:-3])
            words = f"{evidence.QUIET} {experiment.arguments} {variant.arguments}".split()
            tyro.cli(script.Args, args=words)


def test_every_judge_exists():
    for experiment in evidence.EXPERIMENTS.values():
        for variant in experiment.variants.values():
            if variant.judge:
                name, whose, _ = variant.judge
                assert whose in evidence.EXPERIMENTS[name].variants


def test_every_table_says_the_command_that_makes_its_first_row():
    names = [name for name in pages.TRAINED if evidence.with_runs(name)]
    commands = re.findall("`(python .*?)`", pages.all_runs())
    for name, command in zip(names, commands, strict=True):
        words = shlex.split(command)
        assert words[1:4] == ["-m", "lab.runs.evidence", name]
        assert int(words[6]) in evidence.runs_of(name, words[4]), words


# ------------------------------------------------------------------ experiments
@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """An experiment of two variants, and a folder for its runs."""
    variants = {"a": evidence.Variant("", "--lr 0.001"), "b": evidence.Variant()}
    columns = [["x", "last:x"], ["steps", TO_HALF, "count"]]
    experiment = evidence.Experiment(variants, "tango.py", "x.md", columns=columns)
    monkeypatch.setitem(evidence.EXPERIMENTS, "made_up", experiment)
    monkeypatch.setattr(evidence, "EVIDENCE", tmp_path)

    def write(file: str, some: list[dict]):
        (tmp_path / f"{file}.json").write_text(json.dumps({"machine": "none", "runs": some}))

    return write


def test_the_table_of_some_variants_says_which_have_not_run(made_up):
    """A row of what was there before training and one for each variant that has runs."""
    assert pages.block("made_up").startswith("Not measured yet")
    made_up("made_up", [*A.values()])
    text = pages.block("made_up")
    assert "lab/README.md#the-runs) are those of `made_up`. Not run yet: *b*.\n" in text
    says = "These 2 runs are of commit 1234567; the code has changed since."
    assert pages.provenance("made_up") == says
    before, after = pages.table("made_up").splitlines()[2:]
    assert before == "| before training | 10.0, 10.0 |  |"
    assert after == "| a, 2 | 30.0, 32.0 | 8.0, 1 never |"


@pytest.mark.parametrize("name", pages.TRAINED)
def test_all_variants_but_controls_start_from_the_same_figures(name):
    """Or their table would show the start of one as that of all, see `pages.table`; within four
    points, because some runs drew other random numbers than others. Runs that say which code they
    ran also draw by counter, so they are compared with one another.
    """
    usual = {
        v: x
        for v, x in evidence.EXPERIMENTS[name].variants.items()
        if not (x.controls or x.judge or x.own_start)
    }
    for _, text, *_ in evidence.EXPERIMENTS[name].columns:
        measured = {}  # (seed, whether the run has its code) -> figures before training
        for variant in usual if text.startswith("last:") else ():
            for seed, run in evidence.runs_of(name, variant).items():
                found = measure(text.replace("last", "first"), run)
                if found == found:
                    measured.setdefault((seed, "code" in run), set()).add(found)
        assert all(max(found) - min(found) <= 0.04 for found in measured.values() if found), text


def test_a_table_says_of_which_commits_and_of_which_versions_its_runs_are(made_up):
    def of(seed, commit, python="3.11.7", **more):
        versions = {"commit": commit * 10, "python": python, "torch": "2.13.0"}
        return a_run([], "b", seed) | {"versions": versions} | more

    code = evidence.code_of("made_up", "b")
    made_up("made_up", [of(0, "a"), of(1, "b-dirty", code=code)])
    text = "These 2 runs are of commits aaaaaaa and b-dirty; the code has changed since 1 of them."
    assert pages.provenance("made_up") == text
    made_up("made_up", [of(0, "a"), of(1, "b", "3.12.3"), of(2, "c")])
    pages.usual_libraries.cache_clear()
    text = pages.provenance("made_up")
    assert text.startswith(
        "These 3 runs are of 3 commits, aaaaaaa to ccccccc; the code has changed"
    )
    assert "Python 3.11.7, torch 2.13.0 (2), Python 3.12.3, torch 2.13.0 (1); most others" in text


@pytest.fixture
def script(made_up, tmp_path, monkeypatch):
    """In place of processes: (words, OMP_NUM_THREADS) of each. Every second one fails."""
    calls = []

    def run(words, env, **_):
        calls.append((words, env["OMP_NUM_THREADS"]))
        folder = evidence.Path(words[words.index("--out") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"step": 0, "seconds": 1, "eval/x": 0.1}]
        rows += [{"step": 1, "seconds": 2, ACCURACY: 0.123456, "other": 1}]
        write_rows(folder / "metrics.jsonl", rows)
        (folder / "args.json").write_text('{"eval_questions": 4}')
        (folder / "versions.json").write_text('{"python": "3", "torch": "2", "commit": "other"}')
        return SimpleNamespace(returncode=len(calls) % 2 - 1, stdout="", stderr="it broke")

    monkeypatch.setattr(evidence, "RUNS", tmp_path)
    monkeypatch.setattr(evidence, "commit", lambda: "1234567")
    monkeypatch.setattr(evidence.subprocess, "run", run)
    return calls


def test_a_run_is_kept_and_not_repeated(script):
    """The script by its command line, with the variant's arguments, rate, seed and one thread; the
    metrics that the table is made of, its code and commit; an error says what the script said.
    """
    for _ in range(2):
        evidence.run_missing("made_up", [("b", 3)], at_once=1)
    ((words, threads),) = script
    assert words[1:9] == ["tango.py", *evidence.QUIET.split(), "--seed"]
    assert threads == "1" and "--lr" not in words
    (kept,) = evidence.read("made_up")["runs"]
    assert kept["evaluations"] == [{"step": 0, "seconds": 1, "eval/x": 0.1}]
    assert kept["steps"] == [{"step": 1, ACCURACY: 0.12346}] and kept["questions"] == 4
    assert kept["code"] == evidence.code_of("made_up", "b")
    assert kept["versions"]["commit"] == "1234567" and kept["versions"]["python"] == "3"
    assert ", with today's code." in pages.provenance("made_up")
    with pytest.raises(RuntimeError, match="made_up, a, seed 0:\n\nit broke"):
        evidence.run_missing("made_up", [("a", 0)], at_once=1)
    words = script[-1][0]
    assert words[words.index("--lr") + 1] == "0.001"


def test_one_run_is_printed_beside_the_committed_one_and_not_kept(script, made_up, capsys):
    made_up("made_up", [a_run([], "b", 0, end=0.4)])
    evidence.repeat("made_up", "b", 0)
    said = capsys.readouterr().out.splitlines()
    assert said[2].split() == ["x", "10.0", "%", "40.0", "%"]
    assert "commit 1234567, today's code" in said[-2] and "older code" in said[-1]
    assert len(evidence.read("made_up")["runs"]) == 1


def test_a_judge_is_made_before_the_run_that_asks_it(script, monkeypatch):
    """And again where its code has changed, but not else."""
    experiment = evidence.EXPERIMENTS["made_up"]
    experiment.variants["c"] = evidence.Variant(judge=["made_up", "b", "verifier"])
    folder = evidence.folder_of("made_up", "b", 1) / "verifier"
    words = evidence.command("made_up", "c", 1)
    assert script[0][0][1] == "tango.py" and len(script) == 1
    assert words[1:5] == ["-m", "lab.runs.controls", "tango.py", f"judge_from={folder}"]
    folder.mkdir()
    write_rows(folder / "adapter_model.safetensors", [])
    evidence.command("made_up", "c", 1)
    assert len(script) == 1
    monkeypatch.setattr(experiment.variants["b"], "arguments", "--steps 3")
    with pytest.raises(RuntimeError, match="it broke"):  # it is run
        evidence.command("made_up", "c", 1)


def test_what_a_reader_must_make_first_is_said(made_up):
    evidence.EXPERIMENTS["made_up"].arguments = "--model runs/no-such-model"
    with pytest.raises(SystemExit, match="made_up needs runs/no-such-model; lab/notes/warm-up.md"):
        evidence.command("made_up", "b", 0)


# ------------------------------------------------------------------ which code a run is of
def test_comments_and_docstrings_are_no_code(tmp_path):
    texts = [
        '"""Of f."""\n\n\ndef f(x):\n    """x.\n\n    More.\n    """\n    # why\n    return x\n',
        "# about\ndef f(x):\n    return x  # why\n",
        "def f(x):\n    return '#' + x\n",
        'def f(x):\n    return """#""" + x\n',
        "def f(x):\n    pass\nreturn x\n",
    ]
    found = []
    for i, text in enumerate(texts):
        path = tmp_path / f"{i}.py"
        path.write_text(text)
        found.append(evidence.bare(path))
    assert found[0] == found[1] == "def f(x):\n    return x"
    assert found[2:] == [text.strip() for text in texts[2:]]


def test_a_runs_code_is_its_script_its_controls_and_its_arguments(made_up, monkeypatch):
    hashes = {evidence.code_of("made_up", v) for v in ("a", "b")}
    assert len(hashes) == 2  # their rates differ
    for change in ({"arguments": "--kl 0"}, {"controls": ["coin_verdicts"]}, {"script": "gar.py"}):
        evidence.EXPERIMENTS["made_up"].variants["b"] = evidence.Variant(**change)
        hashes.add(evidence.code_of("made_up", "b"))
    assert len(hashes) == 5
    parts = evidence.code_of_controls(["coin_verdicts=0.9"])
    assert {"coin_verdicts", "judged_by", "coin", "judgement", "ASKED"} <= parts.keys()
    assert not {"gold", "voted", "main"} & parts.keys()
    assert "verifiers.py" in evidence.code_of_controls(["asked"])


def test_the_evidence_itself_makes_no_commit_dirty(monkeypatch):
    asked = []

    def git(words, **_):
        asked.append(words)
        return SimpleNamespace(stdout="abc\n" if "rev-parse" in words else " M tango.py\n")

    monkeypatch.setattr(evidence.subprocess, "run", git)
    assert evidence.commit() == "abc-dirty"
    assert ":!lab/evidence" in asked[0]


# the 135 runs of c80b418, whose commits had been replaced by another
BEFORE_C80B418 = {"tango": 34, "verifiers": 32, "only_judge": 24, "azr": 15, "raro": 15}
BEFORE_C80B418 |= {"gamed": 9, "ssr": 6}


def test_what_runs_recorded_stands():
    """In the commit that replaced commits these were all 7b15a92b."""
    for name, count in BEFORE_C80B418.items():
        commits = [run["versions"]["commit"][:8] for run in evidence.read(name)["runs"]]
        assert sum(commit != "7b15a92b" for commit in commits) >= count, name


# ------------------------------------------------------------------ controls
QUESTION = "((42/5)+9)*7 mod 61"
SOLUTION = tasks.gold_solution(QUESTION).replace("45+9=54", "45+9=55")


def test_the_control_that_knows_the_truth_marks_the_wrong_step_and_no_other():
    said, final = tango.parse_judgement(controls.gold(QUESTION, SOLUTION))
    assert said == tasks.step_labels(QUESTION, split_steps(SOLUTION)) == [True, False, False]
    assert final is False
    assert tango.parse_judgement(controls.gold(QUESTION, tasks.gold_solution(QUESTION)))[1] is True
    assert tango.judgement_format(controls.gold(QUESTION, SOLUTION), SOLUTION) == 1.0


def test_controls_are_asked_in_the_verifiers_place_and_the_blind_one_says_half_of_each():
    class Trainer:
        def generate(self, name, prompts, greedy=False):
            return [name] * len(prompts)

    controls.true_verdicts(SimpleNamespace(Tango=Trainer))
    asked = [tango.verify_prompt(QUESTION, SOLUTION)]
    assert Trainer().generate("generator", asked) == ["generator"]
    assert Trainer().generate("verifier", asked) == [controls.gold(QUESTION, SOLUTION)]
    questions = tasks.sample_questions(0, 300, held_out=True)
    texts = [controls.coin(question, tasks.gold_solution(question)) for question in questions]
    said = [verdict for text in texts for verdict in tango.parse_judgement(text)[0]]
    assert sum(said) / len(said) == pytest.approx(0.5, abs=0.06)
    controls.coin_verdicts(SimpleNamespace(tango=SimpleNamespace(Tango=Trainer)), "0.9")
    asked = [tango.verify_prompt(q, tasks.gold_solution(q)) for q in questions]
    said = [v for t in Trainer().generate("verifier", asked) for v in tango.parse_judgement(t)[0]]
    assert sum(said) / len(said) == pytest.approx(0.9, abs=0.04)


def test_controls_find_in_their_script_what_they_change(tmp_path):
    """Of every variant; each in a process of its own, since a control changes its script."""
    program = tmp_path / "all.py"
    program.write_text(
        """
import importlib, os, sys
from lab.runs import controls, evidence

for name, experiment in evidence.EXPERIMENTS.items():
    for title, variant in experiment.variants.items():
        words = variant.controls + ["judge_from=folder"] * bool(variant.judge)
        script = importlib.import_module((variant.script or experiment.script).removesuffix(".py"))
        if words and not (child := os.fork()):
            for control, *given in [word.split("=") for word in words]:
                getattr(controls, control)(script, *given)
            os._exit(0)
        elif words and os.waitpid(child, 0)[1]:
            sys.exit(f"{name}, {title}: {words}")
"""
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_coin_for_whole_solutions_accepts_half_of_them_anew_each_time():
    class Trainer:
        pass

    Trainer.generate = None
    controls.coin_solutions(SimpleNamespace(Tango=Trainer))
    asked = [tango.verify_prompt(QUESTION, SOLUTION)] * 300
    said = [tango.parse_judgement(text) for text in Trainer().generate("verifier", asked)]
    assert all(len(j.verdicts) == 3 and len({*j.verdicts, j.final}) == 1 for j in said)
    assert sum(j.final for j in said) / 300 == pytest.approx(0.5, abs=0.08)


def test_imitation_learns_from_right_judgements_alone():
    seen = []

    class FewLabels:
        def report_verifier(self, judged, batch):
            seen.append(batch.advantages.tolist())

    controls.own_right_judgements(SimpleNamespace(FewLabels=FewLabels, tango=tango))
    texts = [controls.judgement([True]), controls.judgement([False]), "no verdict"] * 2
    judged = [{"label": True}] * 3 + [{"label": False}] * 3
    batch = SimpleNamespace(texts=texts, advantages=torch.tensor([0.5] * 6))
    FewLabels().report_verifier(judged, batch)
    assert seen == [[0.5] * 6]  # what is reported is not what the control does
    assert batch.advantages.tolist() == [1, 0, 0, 0, 1, 0]


def test_accuracy_on_questions_of_several_operations(monkeypatch):
    """Two samples each of a question of one step and of one of two."""
    step = "<step>1+1=2</step>"
    rows = [{"reference": step}, {"reference": step * 2}]
    trainer = SimpleNamespace(cfg=SimpleNamespace(eval_samples=2, verifier="frozen"))
    trainer.state = SimpleNamespace(global_step=3)
    of_generator = lambda *_: ({"generator/accuracy": 0.75}, list("abcd"), [1, 1, 1, 0])  # noqa: E731
    monkeypatch.setattr(tango, "evaluate_generator", of_generator)
    script = SimpleNamespace(evaluate=lambda *_: "both")
    controls.several_operations(script)
    expected = {"generator/accuracy": 0.75, "generator/accuracy_several": 0.5}
    assert script.evaluate(trainer, rows) == expected
    trainer.cfg.verifier = "co-trained"
    assert script.evaluate(trainer, rows) == "both"
    trainer.state.global_step = 0
    assert script.evaluate(trainer, rows) == {}  # as plain GRPO's
    assert tango.evaluate_generator(trainer, rows)[1:] == (list("abcd"), [1, 1, 1, 0])


def test_a_base_in_bfloat16(monkeypatch):
    """Its adapters stay in float32, and TRL's trainer computes by autocast."""
    config = lambda *given, **more: (given, more)  # noqa: E731
    monkeypatch.setattr(controls.launch, "load_model", load_model)
    monkeypatch.setattr(controls.launch, "grpo_config", config)
    controls.in_bfloat16(tango)
    model, _ = controls.launch.load_model("tiny", ["a"], 4, False, 0, False)
    for name, parameter in model.named_parameters():
        wide = "lora_" in name or name.endswith("lm_head.weight")
        assert parameter.dtype == (torch.float32 if wide else torch.bfloat16), name
    embedded = model.get_input_embeddings().weight
    assert torch.equal(model.get_output_embeddings().weight.bfloat16(), embedded)
    assert controls.launch.grpo_config(1, x=2) == ((1,), {"bf16": True, "x": 2})


@pytest.mark.parametrize("control, trained", [("only_the_coder", 0), ("only_the_tester", 1)])
def test_a_control_of_cure_trains_one_role(control, trained):
    class Cure:
        def step(self, rows):
            return ["coder", "tester"]

    getattr(controls, control)(SimpleNamespace(Cure=Cure))
    assert Cure().step([]) == [["coder", "tester"][trained]]


def test_controls_are_applied_before_a_script_runs(monkeypatch):
    """By the command line that evidence.py makes; judge_from=FOLDER is given its folder."""
    script, done = SimpleNamespace(Args=None, main=lambda args: done.append(args)), []
    monkeypatch.setattr(controls.importlib, "import_module", lambda name: script)
    monkeypatch.setattr(controls.tyro, "cli", lambda Args, args: args)
    monkeypatch.setattr(controls, "voted", lambda module: done.append(module))
    monkeypatch.setattr(controls, "judge_from", lambda module, folder: done.append(folder))
    words = ["controls.py", "tango.py", "voted", "judge_from=a/b", "--steps", "3"]
    monkeypatch.setattr(controls.sys, "argv", words)
    controls.main()
    assert done == [script, "a/b", ["--steps", "3"]]


def test_a_likelihood_is_the_only_reward_and_what_cannot_be_read_earns_the_least():
    texts, logged = [tasks.gold_solution(QUESTION), SOLUTION, "<step>42/5=45"], {}
    logps = {"verifier": [[-1.0, -2.0], [-4.0, 0.0], [0.0, 0.0]], None: [[-3.0, 0.0]] * 3}

    class Trainer:
        def rollout(self, name, rows):
            assert name == "generator" and not any(row["answer"] for row in rows)
            return SimpleNamespace(texts=texts)

        def log_probs(self, name, batch):
            return torch.tensor(logps[name])

        def set_rewards(self, batch, rewards):
            batch.rewards = rewards.tolist()

        def log_mean(self, name, value):
            logged[name] = value

    script = SimpleNamespace(FewLabels=Trainer, has_countable_steps=tango.has_countable_steps)
    rows = [{"question": QUESTION, "answer": str(tasks.gold_answer(QUESTION))}] * 3
    both = (controls.scored_alone, [-3, -4, -4]), (controls.scored_above_base, [0, -1, -1])
    for control, rewards in both:
        control(script)
        assert Trainer.generator_step(object.__new__(Trainer), rows).rewards == rewards
    assert logged["generator/accuracy"] == [True, True, False]


def test_scores_from_elsewhere_take_the_judges_place():
    asked = [mae.judge_answer_prompt(QUESTION, "12"), mae.judge_answer_prompt(QUESTION, "13")]
    asked += [mae.judge_question_prompt(QUESTION), mae.judge_question_prompt("38+ mod 61")]
    given = [0.1, 0.2, 0.3, 0.4]
    for control, wanted in (("gold_scores", [1.0, 0.0, 1.0, 0.0]), ("shuffled_scores", None)):

        class Trainer:
            args, state = SimpleNamespace(seed=0), SimpleNamespace(global_step=1)

            def values(self, prompts):
                return list(given), ["asked all the same"] * len(prompts)

        getattr(controls, control)(SimpleNamespace(Mae=Trainer))
        V, texts = Trainer().values(asked)
        assert texts == ["asked all the same"] * 4
        assert V == wanted if wanted else sorted(V) == given and V != given


def test_pairs_are_chosen_by_the_truth_or_by_chance_and_only_pairs():
    answers = [{"question": "1+1", "text": str(i), "right": i == 2} for i in range(4)]
    chosen = {}
    for how in ("pairs_by_the_truth", "pairs_by_chance"):

        class Trainer:
            def readings(self, answers):
                return "the judge's"

            def start_round(self, t):
                chosen[how] = self.readings(answers), self.readings(answers)

        getattr(controls, how)(SimpleNamespace(SelfRewarding=Trainer))
        trainer = Trainer()
        trainer.start_round(0)
        assert trainer.readings(answers) == "the judge's"  # in evaluations
        assert chosen[how][0] == chosen[how][1]
    assert chosen["pairs_by_the_truth"][0] == [[0.0], [0.0], [1.0], [0.0]]
    assert len({score for (score,) in chosen["pairs_by_chance"][0]}) == 4


def test_the_opponents_stay_and_all_else_is_asked_again():
    class Trainer:
        rm_rows, saved, asked = ["a", "b"], {}, 0

        def answers_to(self, rows, n):
            self.asked += 1
            return [self.asked, *rows * n]

    controls.against_the_first(SimpleNamespace(Apo=Trainer))
    trainer = Trainer()
    first = trainer.answers_to(trainer.rm_rows, 2)
    assert trainer.answers_to(trainer.rm_rows, 2) == first == [1, "a", "b", "a", "b"]
    assert trainer.answers_to(trainer.rm_rows[:2], 1)[0] == 2  # the labelled ones
    assert trainer.answers_to(["c"], 1) == [3, "c"]


def test_a_reference_of_another_question_has_as_many_steps_and_another_answer():
    own = load_questions("tiny", 20, 10, seed=0)
    script = SimpleNamespace(load=lambda _: own)
    controls.others_references(script)
    for before, after in zip(own, script.load(None)):
        assert [r["question"] for r in after] == [r["question"] for r in before]
        references = [{r["question"]: r["reference"] for r in part} for part in (before, after)]
        assert {*references[1].values()} == {*references[0].values()}  # none is lost
        for question, reference in references[1].items():
            steps = [text.count("<step>") for text in (reference, references[0][question])]
            assert reference != references[0][question] and steps[0] == steps[1]


def test_labels_by_chance_keep_their_balance():
    rows = [{"solution": str(i), "right": i < 20} for i in range(40)]
    script = SimpleNamespace(samples_of=lambda groups, rng: rows)
    controls.labelled_by_chance(script)
    found = script.samples_of([], random.Random(0))
    assert [row["solution"] for row in found] == [row["solution"] for row in rows]
    assert sum(row["right"] for row in found) == 20
    assert 10 <= sum(a["right"] is b["right"] for a, b in zip(found, rows)) <= 30


# ------------------------------------------------------------------ verifiers on the same solutions
def test_a_verifier_of_truth_and_one_of_tone_are_told_apart(monkeypatch):
    """Of two questions with a right solution each, and one whose second step is wrong."""
    made = []
    for x, *last in (("(3*2)+4", "6+4=10", "6+4=12"), ("(9-2)-3", "7-3=4", "7-3=9!")):
        for step, right in zip(last, (True, False)):
            text = f"<step>{x[1:4]}={step[0]}</step>\n<step>{step}</step>"
            made.append({"question": f"{x} mod 61", "solution": text, "right": right})
    monkeypatch.setattr(verifiers, "solutions_of_the_base", lambda trainer: made)
    monkeypatch.setattr(verifiers, "N", 2)

    def judged(accepts):
        def ask(trainer, rows):
            trainer.sampled_tokens += 12
            verdicts = [[*map(accepts, split_steps(row["solution"]))] for row in rows]
            judgements = [Judgement(v, all(v)) for v in verdicts]
            return verifiers.Asked([sum(v) for v in verdicts], judgements)

        found = verifiers.figures(SimpleNamespace(sampled_tokens=5), ask)
        names = "rank_agreement agreement_sure agreement_meek step_f1 accepted_sure accepted_meek"
        return [found[f"asked/{name}"] for name in [*names.split(), "tokens"]]

    assert judged(lambda step: "=12" not in step and "=9" not in step) == [1, 1, 1, 1, 0, 0, 3]
    assert judged(lambda step: step.endswith("!")) == [0.25, 0, 1, 2 / 9, 1, 0, 3]


def test_verifiers_are_asked_about_word_problems_without_labels_of_steps(monkeypatch):
    text = "<step>so it is {}</step><answer>\\boxed{{{}}}</answer>"
    made = [
        {"question": "how many?", "solution": text.format(n, n), "right": n == 7} for n in (7, 8)
    ]
    monkeypatch.setattr(verifiers, "solutions_of_the_base", lambda trainer: made)
    monkeypatch.setattr(verifiers, "N", 2)
    said = verifiers.Asked([1.0, 0.0], [Judgement([True], True), Judgement([True], False)])
    found = verifiers.figures(SimpleNamespace(sampled_tokens=0), lambda trainer, rows: said)
    assert found["asked/rank_agreement"] == found["asked/accepted_right"] == 1
    assert found["asked/accepted_wrong"] == 0 and "asked/step_f1" not in found
