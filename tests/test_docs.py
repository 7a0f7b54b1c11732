"""The pages say what is true: what they name exists, commands are understood, edits apply and do
what they say, and the scripts of README.md and of your-own-script.md run. Links and anchors are
mkdocs' business: `mkdocs build --strict`. The tables of results: lab/tests/test_pages.py.
"""

import dataclasses
import doctest
import importlib.util
import itertools
import json
import math
import operator
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from common.checked import CoTrainer
from common.core.lists import mean
from common.run.session import Run
from common.tasks import answers, verdicts
from common.tiny import tasks

import conftest
import pytest
import torch
import tyro
from accelerate.commands.config.config_args import load_config_from_file
from conftest import (
    ROOT,
    SCRIPTS,
    SMALL,
    TRACKED,
    evaluated_once,
    load,
    metrics_of,
    run_module,
    saved_of,
    steps_of,
    weights,
)

DOCS = ROOT / "docs"
NAMES = [script.removesuffix(".py") for script in SCRIPTS]
PAGES = {f"docs/{path.name}": path.read_text() for path in sorted(DOCS.glob("*.md"))}
WITH_README = PAGES | {
    name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", "lab/README.md")
}
README, YOUR_OWN = WITH_README["README.md"], PAGES["docs/your-own-script.md"]
TRUST, CURIOUS, PREFER = re.findall(r"```python\n(.*?)```", YOUR_OWN, re.DOTALL)  # its classes
EDITS = sorted(DOCS.glob("edits/*.diff"))
OWN_SCRIPTS = ("trust.py", "mine.py")  # of your-own-script.md and of README.md
OF_TRUST = "--steps 2 --questions 4 --group-size 4 --tokens 64"


def run(module, arguments: str, out: Path, recorded: str = "") -> SimpleNamespace:
    """The module, its metrics (a row per line), and the run's calls of the function `recorded`, as
    tuples of arguments.
    """
    calls = []
    if recorded:
        original = getattr(module, recorded)
        setattr(module, recorded, lambda *args: (calls.append(args), original(*args))[1])
    always = "--eval-questions 4 --eval-every 0 --show-every 0"
    _, said, code = run_module(module, *shlex.split(f"{arguments} {always}"), "--out", out)
    assert code is None, said
    written = {"metrics": metrics_of(out), "steps": steps_of(out)}
    return SimpleNamespace(module=module, calls=[*calls], folder=out, **written)


# ------------------------------------------------------------------ what is named exists
def test_every_script_has_a_page_and_a_small_run():
    left = [name for name in TRACKED if name not in SCRIPTS]
    assert not left, f"{left}: no page docs/NAME.md, or no line in SMALL of tests/conftest.py"
    assert all(f"[`{name}`]({name})" in README for name in SCRIPTS)


@pytest.mark.parametrize("page", WITH_README)
def test_what_is_named_exists(page):
    """[`name`](../file.py) is a function, class, method or constant of that file."""
    folder, text = (ROOT / page).parent, WITH_README[page]
    for name, file in re.findall(r"\[`([\w.]+)`\]\(([\w/.]+\.py)\)", text):
        if not name.endswith(".py"):
            stem, _ = os.path.splitext(os.path.relpath(folder / file, ROOT))
            module = importlib.import_module(stem.replace("/", "."))
            found = operator.attrgetter(name)(module)
            assert getattr(found, "__module__", module.__name__) == module.__name__, name
    for name in re.findall(r"`((?:common|tests|docs|lab)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page}: {name}"


@pytest.mark.parametrize("page", WITH_README)
def test_commands_are_understood(page):
    command = r"^(?:\w+=\w+ )*(?:python|torchrun|accelerate launch) (.*?)(?:  +#.*)?$"
    for line in re.findall(command, WITH_README[page], re.MULTILINE):
        words = shlex.split(line)
        if words[0] == "-m":
            assert importlib.util.find_spec(words[1]), line
            continue
        script = next(word for word in words if word.endswith(".py"))
        assert (ROOT / script).exists() or script in OWN_SCRIPTS, line
        if script in SCRIPTS and "--help" not in words:
            module = importlib.import_module(script.removesuffix(".py"))
            tyro.cli(module.Args, args=words[words.index(script) + 1 :])
    for diff in re.findall(r"^git apply (?:-R )?(\S+)", WITH_README[page], re.MULTILINE):
        assert (ROOT / diff).exists(), diff


def test_the_configurations_are_understood_by_accelerate():
    files = sorted(DOCS.glob("accelerate/*.yaml"))
    assert len(files) == 2
    for path in files:
        config = load_config_from_file(str(path))
        assert str(config.distributed_type).endswith("MULTI_GPU")
        assert config.mixed_precision == "bf16" and not config.use_cpu


@pytest.mark.parametrize("name", NAMES)
def test_flags_in_the_text_are_those_of_the_script(name):
    fields = {field.name for field in dataclasses.fields(importlib.import_module(name).Args)}
    for flag in re.findall(r"`--([\w-]+)", PAGES[f"docs/{name}.md"]):
        argument = flag.replace("-", "_")
        assert argument in fields or argument.removeprefix("no_") in fields, flag


# ------------------------------------------------------------------ make it yours
V = torch.tensor([[[0.0], [0.0]], [[1.0], [0.0]]])
T, F = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])
OWN = torch.tensor([[1], [0], [0]]).bool()  # a right program and two wrong ones
UNIT = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 0, 1], [0, 1, 1, 0, 0]]).bool()
RIGHT, WRONG = {"choice": 2, "better": 2}, {"choice": 1, "better": 2}


def saved(done, key: str, what: str) -> list:
    return [row[what] for row in saved_of(done.folder)[key]]


DOES = {  # edit: arguments besides the small run's, function whose calls are recorded, what is true
    "tango-length": (
        "--steps 1 --ver-warmup 0 --judgement-tokens 16",
        "tango_advantages",
        lambda d, m: all(x == 0 or 0.8 <= x < 1 for call in d.calls for x in call[0].tolist()),
    ),
    "prime-partial": (
        "--steps 1",
        "prime_advantages",
        lambda d, m: any(0 < x < 0.5 for c in d.calls for x in c[1]),
    ),
    "gar-agree": (
        "--steps 1 --silent-share 1 --solution-tokens 40 --judgement-tokens 8",
        "",
        lambda d, m: [m.discriminator_reward(v, True) for v in (1, 0)] == [0.5, 0.0],
    ),
    "spin-keep": (
        "--steps 2 --iterations 1",
        "",
        lambda d, m: (
            mean(map(operator.eq, saved(d, "pairs", "real"), saved(d, "pairs", "generated")))
            == pytest.approx(d.steps[0]["opponent/accuracy"])
        ),
    ),
    "cure-strict": (
        "--steps 1",
        "",
        lambda d, m: m.tester_rewards(OWN, UNIT)[1:3].tolist() == [0, 0],
    ),
    "mae-half": (
        "--steps 1 --difficulty-samples 2",
        "proposer_reward",
        lambda d, m: all(0 <= call[1] <= 1 for call in d.calls),
    ),
    "coverrl-clear": (
        "--steps 1 --filter none",
        "",
        lambda d, m: d.steps[0]["co/kept"] < 1,
    ),
    "raro-absolute": (
        "--steps 1",
        "policy_reward",
        lambda d, m: {m.policy_reward(*call) for call in d.calls} <= {0.0, 1.0},
    ),
    "score-forgive": (
        "--steps 1 --stage1-steps 0",
        "",
        lambda d, m: m.shaped(T, F, 10.0).tolist() == [1.0, 11.0, 0.0, 0.0],
    ),
    "maporl-individual": ("--steps 1", "", lambda d, m: m.scores(V, 0.5)[0, 1].item() == 0),
    "aprm-cautious": ("--steps 1", "", lambda d, m: m.corruptor_reward(False, False) == -1),
    "ssp-solvable": ("--steps 1", "", lambda d, m: m.proposer_reward(0.0, "1-acc", 0.1) == 0),
    "ssr-valid": ("--steps 1", "", lambda d, m: m.injector_reward(0.0, 0.8) == 1.0),
    "azr-half": (
        "--steps 1 --questions 8",
        "",
        lambda d, m: [m.proposer_reward(True, k / 4) for k in (1, 2, 3)] == [0.5, 1, 0.5],
    ),
    "deepseekmath-exact": (
        "--steps 1 --group-size 4",
        "",
        lambda d, m: [m.verifier_reward(s, 0.5, 0.5) for s in (0, 0.5)] == [0, 0.5],
    ),
    "apo-wrong": (
        "--steps 4 --iterations 1",
        "",
        lambda d, m: (
            saved(d, "rm", "human").count(False)
            == round(32 * (1 - d.steps[0]["generator/accuracy"]))
        ),
    ),
    "vstar-last": (
        "--steps 4 --ver-steps 1 --iterations 3 --pool 8",
        "",
        lambda d, m: (
            {*saved(d, "D_ver", "iteration")} == {2} and 0 in saved(d, "D_gen", "iteration")
        ),
    ),
    "sweet_rl-extremes": (
        "--steps 2 --critic-steps 1",
        "",
        lambda d, m: m.upper_against_lower("abc", [1.0, 3.0, 2.0], None) == [("b", "a")],
    ),
    "genrm-tries": (
        "--steps 1",
        "",
        lambda d, m: len({*saved(d, "D_verify", "solution")}) < d.steps[0]["co/lessons"],
    ),
    "self_rewarding-short": (
        "--pool 8",
        "best_and_worst",
        lambda d, m: d.calls and m.best_and_worst([0.5, None, 0.5, 0.0], [9, 1, 8, 2]) == (2, 3),
    ),
    "self_taught-most": (
        "--steps 2 --samples 3",
        "first_right",
        lambda d, m: d.calls and m.first_right([RIGHT, WRONG]) is None,
    ),
}


@pytest.mark.parametrize("path", EDITS, ids=lambda path: path.stem)
def test_an_edit_applies_runs_and_does_what_it_says(path, tmp_path, no_report):
    script = path.stem.split("-")[0] + ".py"
    assert f"git apply docs/edits/{path.name}\n" in PAGES[f"docs/{script[:-3]}.md"]
    (tmp_path / script).write_text((ROOT / script).read_text())
    command = ["git", "apply", str(path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, f"{path.name} does not apply to {script}: {result.stderr}"
    more, recorded, holds = DOES[path.stem]
    module = load(tmp_path / script)
    assert doctest.testmod(module).failed == 0
    evaluated_once(module, most_tokens=2)
    done = run(module, f"{SMALL[script]} {more}", tmp_path / "run", recorded)
    values = [value for row in done.metrics for value in row.values() if value is not None]
    assert all(map(math.isfinite, values)) and holds(done, module)


# ------------------------------------------------------------------ scripts that pages print
@pytest.fixture(scope="module")
def example(tmp_path_factory) -> SimpleNamespace:
    """The script of your-own-script.md, saved as the page says and run for two steps."""
    path = tmp_path_factory.mktemp("example") / "trust.py"
    path.write_text(TRUST)
    module = load(path)
    evaluated_once(module, most_tokens=8)
    return run(module, f"{OF_TRUST} --micro-batch 16", path.parent / "run")


def test_the_example_runs_and_trains_its_players(example):
    assert "<html" in (example.folder / "report.html").read_text()
    for command in re.findall(r"^python trust.py ?(.*)$", YOUR_OWN, re.MULTILINE):
        tyro.cli(example.module.Args, args=shlex.split(command))
    adapters = weights(example.folder)
    for player in ("solver", "verifier"):  # B is zero before the first update
        B = [w for name, w in adapters.items() if name.startswith(player) and "lora_B" in name]
        assert B and all(w.any() for w in B), player
        assert f"{player}/grad_norm" in example.steps[0]


def test_its_entropy_bonus_is_a_share_of_the_batch(example, tmp_path, monkeypatch):
    """In micro-batches of another size, as the first update's texts are the same."""
    module = example.module
    exec(CURIOUS, vars(module))
    monkeypatch.setattr(module, "Trust", module.Curious)
    first = run(module, f"{OF_TRUST} --micro-batch 5", tmp_path / "run").steps[0]
    inherited, bonus = example.steps[0]["solver/loss"], 0.01 * first["solver/entropy"]
    assert bonus > 1e-4 and first["solver/loss"] == pytest.approx(inherited - bonus, abs=1e-5)
    assert first["verifier/loss"] == pytest.approx(example.steps[0]["verifier/loss"], abs=1e-5)


def test_its_pairs_whose_prompts_differ_train_the_verifier(example, tmp_path, monkeypatch):
    module, seen = example.module, itertools.count()
    exec(PREFER, vars(module))
    monkeypatch.setattr(module, "Trust", module.Prefer)
    # in the second step no answer is right, and there is no pair
    right = lambda *both: next(seen) < 16 and answers.is_correct(*both)  # noqa: E731
    monkeypatch.setattr(module, "is_correct", right)
    done = run(module, f"{OF_TRUST} --micro-batch 4", tmp_path / "run")
    first, second = done.steps
    assert (
        first["verifier/loss"] == pytest.approx(math.log(2), abs=0.5)
        and first["verifier/grad_norm"]
    )
    assert second["verifier/grad_norm"] == 0


def test_every_verb_of_the_page_exists():
    places = (CoTrainer, Run, answers, verdicts, tasks, sys.modules[Run.__module__], conftest)
    elsewhere = ("evaluate", "Player", "copy_adapter", "check")  # in the script or beside CoTrainer
    for name in re.findall(r"`(?:self\.|run\.)?(\w+)\([^`]*\)`", YOUR_OWN):
        assert name in elsewhere or any(hasattr(place, name) for place in places), name


def test_exercise_1_of_the_idea_gives_what_it_should(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", PAGES["docs/idea.md"], re.DOTALL)
    exec(block, {})
    numbers = [float(x) for x in re.findall(r"-?\d\.\d+", capsys.readouterr().out)]
    assert [round(x, 2) for x in numbers[::2]] == [-1.22, -1.63, 0.41, 1.22, 0.82, 0.41]


def test_the_notebook_is_kept_without_outputs():
    """CI runs it; here it is only looked at."""
    cells = json.loads((ROOT / "notebooks" / "tango.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
