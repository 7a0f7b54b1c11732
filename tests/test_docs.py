"""The pages in docs/ say what is true.

Headings, links, metrics, commands, functions and TRL's methods exist; tables are those of the
measured runs; every edit applies to the script as it stands, runs, and does what its page says; the
script of your-own-script.md runs, too; and the README promises no more than was measured.
"""

import ast
import dataclasses
import doctest
import importlib.util
import inspect
import itertools
import json
import math
import operator
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from common.batch import Batch
from common.cotrainer import CoTrainer
from common.players import AdapterTrainer
from common.run.session import Run
from common.tasks import answers, verdicts
from common.tasks.answers import mean
from common.tiny import tasks

import claims
import evidence
import pages
import pytest
import torch
import tyro
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
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

DOCS = ROOT / "docs"
HEADINGS = ["The idea", "The loop", "Equations", "Metrics", "Paper, released code, ours", "Results"]
HEADINGS += ["What goes wrong", "Make it yours"]
NAMES = [script.removesuffix(".py") for script in SCRIPTS]
ALL_PAGES = {f"docs/{path.name}": path.read_text() for path in sorted(DOCS.glob("*.md"))}
PAGES = {name: ALL_PAGES[f"docs/{name}.md"] for name in NAMES}
YOUR_OWN = ALL_PAGES["docs/your-own-script.md"]
WITH_README = ALL_PAGES | {n: (ROOT / n).read_text() for n in ("README.md", "CONTRIBUTING.md")}
EDITS = sorted(DOCS.glob("edits/*.diff"))

ALWAYS = "--eval-questions 4 --eval-every 0 --show-every 0"


# ------------------------------------------------------------------ reading a page
def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def expand(name: str) -> list[str]:
    """Braces as a shell reads them: {coder,tester}/loss -> coder/loss, tester/loss."""
    parts = re.split(r"\{([^{}]*)\}", name)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def explained(page: str) -> dict[str, str]:
    """Metric -> its explanation, from the tables of the section on metrics."""
    found = {}
    for line in sections(page)["Metrics"].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and "`" in cells[0]:
            for span in re.findall(r"`([^`]+)`", cells[0]):
                for key in expand(span):
                    assert key not in found, f"{key} is explained twice"
                    found[key] = cells[1]
    return found


def is_shared(key: str) -> bool:
    """Whether docs/runs.md explains this metric for all scripts."""
    page = ALL_PAGES["docs/runs.md"].split("All scripts log these")[1]
    spans = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))
    patterns = [
        re.escape(span).replace(r"\*", r"\w+").replace("FUNCTION", r"\w+") for span in spans
    ]
    return key in {"step", *spans} or any(re.fullmatch(pattern, key) for pattern in patterns)


def anchors(page: str) -> set[str]:
    """The anchors GitHub gives to headings."""
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# ------------------------------------------------------------------ running a script, in process
def run(module, arguments: str, out: Path, recorded: str = "") -> SimpleNamespace:
    """The module, its metrics (a row per line), and the run's calls of the function `recorded`, as
    tuples of arguments."""
    calls = []
    if recorded:
        original = getattr(module, recorded)
        setattr(module, recorded, lambda *args: (calls.append(args), original(*args))[1])
    _, said, code = run_module(module, *shlex.split(f"{arguments} {ALWAYS}"), "--out", out)
    assert code is None, said
    written = {"metrics": metrics_of(out), "steps": steps_of(out)}
    return SimpleNamespace(module=module, calls=[*calls], folder=out, **written)


# ------------------------------------------------------------------ form
def test_every_script_has_a_page_and_a_small_run():
    """What git tracks as a script is tested as one."""
    left = [name for name in TRACKED if name not in SCRIPTS]
    assert not left, f"{left}: no page docs/NAME.md, or no line in SMALL of tests/conftest.py"


@pytest.mark.parametrize("name", NAMES)
def test_every_page_has_one_form(name):
    """The same headings in one order; in ten lines the idea; what is measured in a block stands
    before it, and no table or figure, and no result is typed by hand."""
    parts = sections(PAGES[name])
    assert list(parts) == HEADINGS and PAGES[name].startswith("# ")
    assert 3 <= len(parts["The idea"].strip().splitlines()) <= 10
    block = r"<!-- (results|table): \w+ -->\n.*?<!-- end -->"
    rest = re.sub(block, "", parts["Results"], flags=re.DOTALL)
    assert "<!-- results" in parts["Results"] and "|" not in rest and "![" not in rest


@pytest.mark.parametrize("page", WITH_README)
def test_links_lead_somewhere_and_what_is_named_exists(page):
    """[`name`](../file.py) is a function, class, method or constant of that file."""
    folder, text = (ROOT / page).parent, WITH_README[page]
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if target.startswith("https://"):
            continue
        assert (folder / path).exists(), f"{page}: {target}"
        if anchor:
            there = (folder / path).read_text() if path else text
            assert anchor in anchors(there), f"{page}: {target}"
    for name, file in re.findall(r"\[`([\w.]+)`\]\(([\w/.]+\.py)\)", text):
        if not name.endswith(".py"):
            stem, _ = os.path.splitext(os.path.relpath(folder / file, ROOT))
            module = importlib.import_module(stem.replace("/", "."))
            found = operator.attrgetter(name)(module)
            assert getattr(found, "__module__", module.__name__) == module.__name__, name
    for name in re.findall(r"`((?:common|tests|docs|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page}: {name}"


@pytest.mark.parametrize("page", ALL_PAGES)
def test_no_measured_number_is_typed_by_hand(page):
    """Percentages stand in generated blocks, or on a line that names the paper they are from."""
    block = r"<!-- (results: \w+|claims|minutes|speed|table: \w+) -->.*?<!-- end"
    for line in re.sub(block, "", ALL_PAGES[page], flags=re.DOTALL).splitlines():
        typed = re.search(r"\d\s*(%|per ?cent)", line)
        assert "paper" in line.lower() or not typed, f"{page}: {line}"


@pytest.mark.parametrize("page", WITH_README)
def test_commands_are_understood(page):
    command = r"^(?:\w+=\w+ )*(?:python|torchrun|accelerate launch) (.*?)(?:  +#.*)?$"
    for line in re.findall(command, WITH_README[page], re.MULTILINE):
        words = shlex.split(line)
        if words[0] == "-m":
            assert importlib.util.find_spec(words[1]), line
            continue
        script = next(word for word in words if word.endswith(".py"))
        if script == EXAMPLE:
            continue
        assert (ROOT / script).exists(), line
        if "/" not in script and "--help" not in words:
            module = importlib.import_module(script.removesuffix(".py"))
            tyro.cli(module.Args, args=words[words.index(script) + 1 :])
    for diff in re.findall(r"^git apply (?:-R )?(\S+)", WITH_README[page], re.MULTILINE):
        assert (ROOT / diff).exists(), diff


@pytest.mark.parametrize("name", NAMES)
def test_flags_in_the_text_are_arguments(name):
    fields = {field.name for field in dataclasses.fields(importlib.import_module(name).Args)}
    # what was measured may have had arguments that are gone
    page = re.sub(r"<!-- results.*?<!-- end", "", PAGES[name], flags=re.DOTALL)
    for flag in re.findall(r"`--([\w-]+)", page):
        argument = flag.replace("-", "_")
        assert argument in fields or argument.removeprefix("no_") in fields, flag


# ------------------------------------------------------------------ results
def test_tables_are_those_of_the_measured_runs():
    """Generated, never typed: `python benchmarks/pages.py` writes them."""
    made = pages.blocks()
    for (page, mark), text in made.items():
        found = re.findall(rf"<!-- {mark} -->\n(.*?)<!-- end -->", WITH_README[page], re.DOTALL)
        assert found == [text], f"{page}: {mark} is not what was measured"
    for page in {page for page, _ in made}:  # and there is no other mark, which nothing fills
        marks = re.findall(r"<!-- (?!end)([^>]*) -->", WITH_README[page])
        assert sorted(marks) == sorted(mark for other, mark in made if other == page)


@pytest.mark.parametrize("name", pages.TRAINED)
def test_measured_metrics_are_still_called_that(name):
    """What is kept of a run from now on, and what was kept, goes by the names of the page; columns
    and claims are made of such metrics.
    """
    experiment, runs = evidence.EXPERIMENTS[name], evidence.read(name)["runs"]
    known = explained(PAGES[experiment.script.removesuffix(".py")]).keys()
    kept = {key for key in evidence.kept_metrics(name) if not is_shared(key)}
    assert kept - {"co/alpha"} <= known
    texts = [text for _, text, *_ in experiment.columns]
    texts += [claim.measure for claim in claims.CLAIMS if claim.experiment == name]
    for text in texts:
        for key in re.findall(r"\b(?:last|after|gain|first):([\w/]+)", text):
            assert f"eval/{key}" in known, text
    kept = {key for r in runs for row in r["evaluations"] + r["steps"] for key in row if "/" in key}
    assert {key for key in kept if not is_shared(key)} <= known and (len(kept) > 3 or not runs)


@pytest.mark.parametrize("patch, trained", [("only_coder", "coder"), ("only_tester", "tester")])
def test_a_patch_of_cure_trains_one_role(patch, trained):
    class Cure:
        def step(self, rows):
            return [SimpleNamespace(player="coder"), SimpleNamespace(player="tester")]

    exec(evidence.PATCHES[patch], {"cure": SimpleNamespace(Cure=Cure)})
    assert [batch.player for batch in Cure().step([])] == [trained]


# ------------------------------------------------------------------ metrics
@pytest.mark.parametrize("name", NAMES)
def test_every_metric_is_explained_and_every_explained_one_is_written(name, finished):
    written = {key for row in metrics_of(finished(f"{name}.py")[0]) for key in row}
    known = explained(PAGES[name])
    assert {key for key in written - known.keys() if not is_shared(key)} == set()
    for key, text in known.items():
        assert key in written or "only " in text or "missing " in text, key


# ------------------------------------------------------------------ make it yours
@pytest.mark.parametrize("name", NAMES)
def test_small_edits_are_quoted_as_they_are(name):
    quoted = re.findall(r"```diff\n(.*?)```", sections(PAGES[name])["Make it yours"], re.DOTALL)
    files = [path for path in EDITS if path.stem.split("-")[0] == name]
    assert 1 <= len(files) == len(quoted) <= 3
    assert sorted(quoted) == sorted(path.read_text() for path in files)
    for text in quoted:
        lines = text.splitlines()
        assert lines[:2] == [f"--- a/{name}.py", f"+++ b/{name}.py"]
        changed = sum(line[0] in "+-" for line in lines[2:])
        assert changed <= 20 and max(map(len, lines)) <= 101
    for path in files:
        assert f"git apply {path.relative_to(ROOT)}\n" in PAGES[name]


def edit(arguments: str, recorded: str = ""):
    """Marks `def tango_length(done)` as the check of a run with tango-length.diff: arguments
    besides the small run's, function whose calls are recorded, check.
    """
    return lambda check: (arguments, recorded, check)


@pytest.mark.parametrize("path", EDITS, ids=lambda path: path.stem)
def test_an_edit_applies_runs_and_does_what_it_says(path, tmp_path, no_report):
    script = path.stem.split("-")[0] + ".py"
    (tmp_path / script).write_text((ROOT / script).read_text())
    command = ["git", "apply", str(path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, f"{path.name} does not apply to {script}: {result.stderr}"
    more, recorded, check = globals()[path.stem.replace("-", "_")]
    module = load(tmp_path / script)
    assert doctest.testmod(module).failed == 0
    evaluated_once(module, most_tokens=2)
    arguments = f"{SMALL[script]} {more}"
    done = run(module, arguments, tmp_path / "run", recorded)
    assert len(done.steps) == tyro.cli(module.Args, args=shlex.split(arguments)).steps
    values = [value for row in done.metrics for value in row.values() if value is not None]
    assert all(map(math.isfinite, values)) and (done.calls or not recorded)
    check(done)


@edit("--steps 1 --ver-warmup 0 --judgement-tokens 16", recorded="tango_advantages")
def tango_length(done):
    outcomes = torch.cat([call[0] for call in done.calls])
    assert all(value == 0 or 0.8 <= value < 1 for value in outcomes.tolist())
    accuracy = done.steps[0]["generator/accuracy"]  # still the truth
    assert accuracy == pytest.approx((outcomes > 0).float().mean().item()) and accuracy > 0


@edit("--steps 1", recorded="prime_advantages")
def prime_partial(done):
    outcomes = torch.cat([call[1] for call in done.calls]).tolist()
    assert all(0 <= value < 0.5 or value == 1 for value in outcomes)
    assert any(0 < value < 1 for value in outcomes)


@edit("--steps 1 --silent-share 1 --solution-tokens 40 --judgement-tokens 8")
def gar_agree(done):
    # YES and NO on a generated slice of a right solution, of a wrong one, and on a reference slice
    cases = [(verdict, right) for right in (True, False, None) for verdict in (1, 0)]
    rewards = [done.module.discriminator_reward(*case) for case in cases]
    assert rewards == [0.5, 0.0, 0.0, 1.5, 1.0, 0.0]


@edit("--steps 2 --iterations 1")
def spin_keep(done):
    equal = mean([pair["real"] == pair["generated"] for pair in saved_of(done.folder)["pairs"]])
    assert equal == pytest.approx(done.steps[0]["opponent/accuracy"]) and 0 < equal < 1


@edit("--steps 1")
def cure_strict(done):
    own = torch.tensor([[1], [0], [0]]).bool()  # a right program and two wrong ones
    unit = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 0, 1], [0, 1, 1, 0, 0]]).bool()
    assert done.module.tester_rewards(own, unit).tolist() == [1, 0, 0, 0, -1]


@edit("--steps 1 --difficulty-samples 2", recorded="proposer_reward")
def mae_half(done):
    # The mean of 5 values, each a ninth: no question is both solved by nobody and difficult
    difficulties = [call[1] for call in done.calls]
    assert all(0 <= d <= 1 for d in difficulties) and any(0 < d < 1 for d in difficulties)


@edit("--steps 1 --filter none")
def coverrl_clear(done):
    """Of the solutions of a kept question more than a third have had the answer m."""
    assert done.steps[0]["co/kept"] < 1  # which without the edit is 1 with --filter none


@edit("--steps 1", recorded="policy_reward")
def raro_absolute(done):
    """A tie is worth nothing to the policy, so every reward is 0 or 1."""
    assert {done.module.policy_reward(*call) for call in done.calls} <= {0.0, 1.0}


@edit("--steps 1 --stage1-steps 0", recorded="shaped")
def score_forgive(done):
    """To spoil a right answer costs no more than that answer."""
    r1, r2 = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert done.module.shaped(r1, r2, 10.0).tolist() == [1.0, 11.0, 0.0, 0.0]


@edit("--steps 1", recorded="scores")
def maporl_individual(done):
    """What the other comes to later has no part in one's own score."""
    V = torch.tensor([[[0.0], [0.0]], [[1.0], [0.0]]])
    assert done.module.scores(V, 0.5)[0, 1].item() == 0


@edit("--steps 1", recorded="corruptor_reward")
def aprm_cautious(done):
    """Caught is worth as little as harmless."""
    assert (False, False) in done.calls
    assert {done.module.corruptor_reward(*call) for call in done.calls} == {-1, 1}


@edit("--steps 1", recorded="injector_reward")
def ssr_valid(done):
    """Every valid bug is worth the same."""
    assert {done.module.injector_reward(*call) for call in done.calls} <= {-1.0, 1.0}
    assert done.module.injector_reward(0.0, 0.8) == 1.0


@edit("--steps 1 --questions 8", recorded="proposer_reward")
def azr_half(done):
    rewards = [done.module.proposer_reward(True, k / 4) for k in range(5)]
    assert rewards == [-0.5, 0.5, 1, 0.5, -0.5]
    assert done.module.proposer_reward(False, 0.5) == -1
    assert len(done.calls) > 18  # three kinds of eight proposals


@edit("--steps 1 --group-size 4", recorded="verifier_reward")
def deepseekmath_exact(done):
    hits = [said == truth for said, truth, _ in done.calls]  # R_meta is 1
    assert done.steps[0]["verifier/total_reward"] == pytest.approx(sum(hits) / 8) and any(hits)
    rewards = [done.module.verifier_reward(said, 0.5, 0.5) for said in (0, 0.5, 1)]
    assert rewards == [0, 0.5, 0]


@edit("--steps 4 --ver-steps 1 --iterations 3 --pool 8")
def vstar_last(done):
    kept = saved_of(done.folder)
    assert {row["iteration"] for row in kept["D_ver"] + kept["lessons"]} == {2}
    assert 0 in {row["iteration"] for row in kept["D_gen"]}  # the generator's own data stay
    assert all(row["co/all_solutions"] <= 8 * 4 for row in done.steps[:3])


@edit("--steps 1")
def genrm_tries(done):
    lessons = [row["solution"] for row in saved_of(done.folder)["D_verify"]]
    assert max(Counter(lessons).values()) > 1 and "verifier/verify_loss" in done.steps[0]
    assert done.steps[0]["co/lessons"] == len(lessons)


@edit("--pool 8", recorded="best_and_worst")
def self_rewarding_short(done):
    assert len(done.calls) == 2 * 8
    for scores, lengths in done.calls:
        assert 0 < len(scores) == len(lengths) <= 4 and min(lengths) > 0
    chosen = done.module.best_and_worst
    assert chosen([0.5, None, 0.5, 0.0], [9, 1, 8, 2]) == (2, 3)  # 8 tokens, not 9, nor 1
    assert chosen([0.5, 0.0, 0.0], [9, 2, 8]) == (0, 2)
    assert chosen([0.5, 0.5], [9, 8]) is None and chosen([None, 1.0], [9, 8]) is None


@edit("--steps 2 --samples 3", recorded="first_right")
def self_taught_most(done):
    assert all(len(tries) == 3 for (tries,) in done.calls)
    right, wrong = {"choice": 2, "better": 2}, {"choice": 1, "better": 2}
    assert done.module.first_right([wrong, right, right | {"second": True}]) is right
    assert done.module.first_right([right, wrong]) is None


# ------------------------------------------------------------------ how-grpotrainer-works.md
OURS = (CoTrainer, AdapterTrainer)
CLASSES = {cls.__name__: cls for cls in (*OURS, GRPOTrainer, Trainer, TrainerCallback, GRPOConfig)}


def test_every_method_named_exists_and_every_override_is_named():
    """Every code span `Class.name` is a method or setting of that class; every other name with an
    underscore in front or brackets behind is one of some class, or an attribute that its source
    sets.
    """
    sources = "".join(inspect.getsource(cls) for cls in (*OURS, GRPOTrainer, Trainer))
    page = ALL_PAGES["docs/how-grpotrainer-works.md"]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    dotted = [span.split(".") for span in spans if re.fullmatch(r"[A-Z]\w+\.\w+", span)]
    assert len(dotted) > 20
    for owner, name in dotted:
        assert hasattr(CLASSES[owner], name), f"{owner}.{name}"
    for span in spans:
        if re.fullmatch(r"_\w+|\w+\(\)", span):
            name = span.removesuffix("()")
            known = any(hasattr(cls, name) for cls in CLASSES.values())
            assert known or f"self.{name}" in sources, span
    ours = {name for cls in OURS for name in vars(cls) if hasattr(GRPOTrainer, name)}
    ours = {name for name in ours if not name.startswith("__") and name != "_abc_impl"}
    assert len(ours) >= 7 and ours <= {name for _, name in dotted}


# ------------------------------------------------------------------ your-own-script.md
EXAMPLE = "trust.py"


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> SimpleNamespace:
    """The page's script, saved as the page says and run for two steps; and what `step` returned."""
    blocks = re.findall(r"```python\n(.*?)```", YOUR_OWN, re.DOTALL)
    assert len(blocks) == 1 and f"`{EXAMPLE}`" in YOUR_OWN
    path = tmp_path_factory.mktemp("example") / EXAMPLE
    path.write_text(blocks[0])
    module, returned = load(path), []
    evaluated_once(module, most_tokens=8)
    step = module.Trust.step

    def recording(self, rows):
        returned.append(step(self, rows))
        return returned[-1]

    module.Trust.step = recording
    arguments = "--steps 2 --questions 4 --group-size 4 --micro-batch 16 --tokens 64"
    done = run(module, arguments, path.parent / "run")
    return SimpleNamespace(**vars(done), returned=returned)


def test_the_example_runs_and_trains_its_players(example):
    assert [row["step"] for row in example.steps] == [1, 2]
    assert all(map(math.isfinite, example.steps[-1].values()))
    assert "<html" in (example.folder / "report.html").read_text()
    commands = re.findall(rf"^python {EXAMPLE} ?(.*)$", YOUR_OWN, re.MULTILINE)
    for command in commands:
        tyro.cli(example.module.Args, args=shlex.split(command))
    assert commands
    players = list(dict.fromkeys(b.player for batches in example.returned for b in batches))
    assert len(players) == 2
    adapters = weights(example.folder)
    for player in players:  # B is zero before the first update
        B = [w for name, w in adapters.items() if name.startswith(player) and "lora_B" in name]
        assert B and all(w.any() for w in B), player
        assert f"{player}/grad_norm" in example.steps[0]


def test_a_batch_contains_what_its_class_says(example):
    body = ast.parse(inspect.getsource(Batch)).body[0].body
    said = {
        field.target.id: text.value.value
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    assert said.keys() | {"origins"} == {field.name for field in dataclasses.fields(Batch)}
    for batch in (batch for batches in example.returned for batch in batches):
        shapes = {"(B,)": batch.rewards.shape, "(B, P)": batch.prompt_ids.shape}
        shapes["(B, T)"] = batch.completion_ids.shape
        for key, text in said.items():
            if isinstance(value := getattr(batch, key), torch.Tensor):
                found = re.findall(r"\(B,(?: [PT])?\)", text)
                assert value.shape in [shapes[shape] for shape in found], key


ELSEWHERE = ("evaluate", "Player", "copy_adapter", "check")  # in the script or beside CoTrainer
BESIDE = [answers, verdicts, tasks, sys.modules[Run.__module__]]


def test_every_verb_of_the_page_exists():
    spans = re.findall(r"`(?:self\.|run\.)?(\w+)\([^`]*\)`", YOUR_OWN)
    assert len(spans) > 5
    for name in spans:
        known = any(hasattr(place, name) for place in (CoTrainer, Run, *BESIDE))
        assert known or name in ELSEWHERE, name


# ------------------------------------------------------------------ README.md
README = WITH_README["README.md"]


def test_the_first_screen_has_exactly_two_commands():
    first = README[: README.index("## ")]
    blocks = re.findall(r"```\n(.*?)\n```", first, re.DOTALL)
    install = "pip install -r requirements.txt"
    assert blocks == [f"{install} && python tango.py", f"{install} && pytest"]


def test_it_can_be_read_in_five_minutes():
    assert len(README.split()) <= 900


def test_the_quoted_lines_are_those_of_the_code():
    """The generator's step and the loss, as they stand in the two files that they are said to be
    in, in their order; lines may have been left out.
    """
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    sources = [(ROOT / name).read_text() for name in ("tango.py", "common/cotrainer.py")]
    for part, source in zip(block.split("\n\n"), sources, strict=True):
        for line in part.strip().splitlines():
            found = re.search(rf"^ *{re.escape(line.strip())}$", source, re.MULTILINE)
            assert found, line
            source = source[found.end() :]


def test_the_notebook_is_kept_without_outputs():
    """CI runs it; here it is only looked at: every cell is Python, or a command of the README."""
    cells = json.loads((ROOT / "notebooks" / "tango.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    old = re.search(r"OLD = (\".*\")", "".join("".join(cell["source"]) for cell in code))[1]
    assert (ROOT / "tango.py").read_text().count(json.loads(old)) == 1


def test_every_default_keeps_its_five_minutes():
    runs = evidence.read("defaults")["runs"]
    assert {f"{run['variant']}.py" for run in runs} == set(SCRIPTS)
    assert all(run["wall_seconds"] <= 300 for run in runs)


def test_the_measured_runs_keep_the_promise():
    """Five minutes or less; the generator up by at least 10 points, greedy by 25; the solution that
    the verifier picks better than the mean of those it picks from; on four samples of at least 250
    held-out questions, for each of three random seeds.
    """
    runs = evidence.read("tango_default")["runs"]
    assert {0, 1, 2} <= {run["seed"] for run in runs}
    for run in runs:
        first, last = run["evaluations"][0], run["evaluations"][-1]
        assert run["wall_seconds"] <= 300 and run["questions"] >= 250
        for key, least in (("eval/generator/accuracy", 0.1), ("eval/generator/greedy", 0.25)):
            assert last[key] - first[key] >= least
        assert last["eval/co/best_of_4"] > last["eval/co/mean_of_same"]
