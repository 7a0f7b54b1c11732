"""The pages in docs/ say what is: headings, links, metrics, commands, functions and TRL's methods exist; every edit applies to
the scripts as they stand, runs, and does what its page says."""

import ast
import dataclasses
import doctest
import importlib.util
import inspect
import itertools
import json
import math
import re
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace

from common.cotrainer import CoTrainer
from common.run import Run, mean

import pytest
import torch
import tyro
from conftest import ROOT
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

DOCS = ROOT / "docs"
HEADINGS = """The idea
The loop
Equations
Metrics
Paper, released code, ours
Results
What goes wrong
Make it yours""".splitlines()
SCRIPTS = [name for name in ("tango", "gar", "prime", "cure", "spin", "mae") if (ROOT / f"{name}.py").exists()]
NAMES = [name for name in SCRIPTS if (DOCS / f"{name}.md").exists()]
PAGES = {name: (DOCS / f"{name}.md").read_text() for name in NAMES}
TRAINER = (DOCS / "how-grpotrainer-works.md").read_text()
EVERYTHING = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
EDITS = sorted(DOCS.glob("edits/*.diff"))

# A short run in which every player has its turn
SHORT = {
    "tango": "--steps 2 --ver-warmup 1 --questions 4 --group-size 4 --micro-batch 16",
    "gar": "--steps 1 --questions 4 --group-size 4 --micro-batch 16",
    "prime": "--steps 1 --questions 4 --group-size 4 --micro-batch 16",
    "spin": "--steps 2 --iterations 1 --questions 8 --micro-batch 8",
    "cure": "--steps 1 --questions 4 --group-size 4 --micro-batch 16",
    "mae": "--steps 2 --questions 8 --micro-batch 24 --difficulty-samples 2",
}
ALWAYS = "--eval-questions 4 --eval-every 0 --show-every 0"


# ------------------------------------------------------------------ reading a page
def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def expand(name: str) -> list[str]:
    """Braces as a shell reads them: {gen,ver}/reward -> gen/reward, ver/reward."""
    parts = re.split(r"\{([^{}]*)\}", name)
    return ["".join(choice) for choice in itertools.product(*[p.split(",") if i % 2 else [p] for i, p in enumerate(parts)])]


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


def anchors(page: str) -> set[str]:
    """The anchors GitHub gives to headings."""
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# ------------------------------------------------------------------ running a script, edited or not, in this process
def run(path, arguments: str, out, recorded: str = "") -> SimpleNamespace:
    """What `python <path> <arguments>` does, without the seconds it takes to import torch.

    -> module, metrics (a row per line), and the calls of the function `recorded`, as tuples of arguments."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{len(sys.modules)}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    calls, real, once = [], module.evaluate, []
    module.evaluate = lambda *args: (once or once.append(real(*args)) or once)[0]  # the last evaluation repeats the first
    if recorded:
        original = getattr(module, recorded)
        setattr(module, recorded, lambda *args: (calls.append(args), original(*args))[1])
    before = signal.getsignal(signal.SIGINT)
    try:
        module.main(tyro.cli(module.Args, args=[*shlex.split(f"{arguments} {ALWAYS}"), "--out", str(out)]))
    finally:
        signal.signal(signal.SIGINT, before)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return SimpleNamespace(module=module, metrics=metrics, calls=calls, folder=out)


@pytest.fixture(scope="module", autouse=True)
def quick():
    """No second thread, which only waits for a model this small, and no pictures."""
    before = torch.get_num_threads(), Run.draw
    torch.set_num_threads(1)
    Run.draw = lambda run: None
    yield
    torch.set_num_threads(before[0])
    Run.draw = before[1]


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory):
    """name -> the keys of metrics.jsonl; each script is run once."""
    done = {}

    def keys(name):
        if name not in done:
            out = tmp_path_factory.mktemp(name) / "run"
            done[name] = {key for row in run(ROOT / f"{name}.py", SHORT[name], out).metrics for key in row}
        return done[name]

    return keys


# ------------------------------------------------------------------ form
def test_every_script_has_a_page():
    assert NAMES == SCRIPTS


@pytest.mark.parametrize("name", NAMES)
def test_every_page_has_the_same_headings_in_one_order(name):
    assert list(sections(PAGES[name])) == HEADINGS
    assert PAGES[name].startswith("# ")


@pytest.mark.parametrize("name", NAMES)
def test_the_idea_takes_ten_lines(name):
    assert 3 <= len(sections(PAGES[name])["The idea"].strip().splitlines()) <= 10


@pytest.mark.parametrize("page", EVERYTHING)
def test_links_lead_somewhere(page):
    text = EVERYTHING[page]
    generated = "".join(re.findall(r"<!-- (?:results|collapse) -->.*?<!-- end -->", text, re.DOTALL))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if target.startswith("https://"):
            continue
        if f"({target})" in generated and not (DOCS / path).with_suffix(".json").exists():
            continue  # not measured yet
        assert (DOCS / path).exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors((DOCS / path).read_text() if path else text), f"{page}: {target}"


@pytest.mark.parametrize("page", EVERYTHING)
def test_linked_functions_exist(page):
    """[`name`](../file.py) is a function, class, method or constant of that file."""
    for name, file in re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", EVERYTHING[page]):
        if name == file:
            continue
        known = set()
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                known.add(node.name)
            if isinstance(node, ast.ClassDef):
                known |= {f"{node.name}.{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)}
            if isinstance(node, ast.Assign):
                known |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        assert name in known, f"{page}: {file} has no {name}"


@pytest.mark.parametrize("page", EVERYTHING)
def test_no_measured_number_is_typed_by_hand(page):
    """Percentages stand in generated blocks, or on a line that names the paper they are from."""
    text = re.sub(r"<!-- (results|collapse|inputs|table: \w+) -->.*?<!-- end -->", "", EVERYTHING[page], flags=re.DOTALL)
    for line in text.splitlines():
        assert "paper" in line.lower() or not re.search(r"\d\s*(%|per ?cent)", line), f"{page}: {line}"


@pytest.mark.parametrize("name", NAMES)
def test_results_are_a_generated_block(name):
    """Filled by benchmarks/evidence.py; before anything is measured it says only where the results will be."""
    text = sections(PAGES[name])["Results"].strip()
    block = re.fullmatch(r"<!-- results -->\n(.*)<!-- end -->", text, re.DOTALL)
    assert block and block[0].count("<!--") == 2
    if (DOCS / f"evidence/{name}.json").exists():
        assert f"(evidence/{name}.png)" in block[1] and f"benchmarks/evidence.py {name}`" in block[1]
    else:
        assert block[1] == f"See [evidence/{name}.md](evidence/{name}.md).\n"


@pytest.mark.parametrize("page", EVERYTHING)
def test_commands_are_understood(page):
    for command in re.findall(
        r"^(?:\w+=\w+ )*(?:python|torchrun|accelerate launch) (.*?)(?:  +#.*)?$", EVERYTHING[page], re.MULTILINE
    ):
        words = shlex.split(command)
        if words[0] == "-m":
            assert importlib.util.find_spec(words[1]), command
            continue
        script = next(word for word in words if word.endswith(".py"))
        assert (ROOT / script).exists(), command
        if "/" not in script:
            tyro.cli(importlib.import_module(script[:-3]).Args, args=words[words.index(script) + 1 :])
    for diff in re.findall(r"^git apply (?:-R )?(\S+)", EVERYTHING[page], re.MULTILINE):
        assert (ROOT / diff).exists(), diff


@pytest.mark.parametrize("name", NAMES)
def test_flags_in_the_text_are_arguments(name):
    fields = {field.name for field in dataclasses.fields(importlib.import_module(name).Args)}
    for flag in re.findall(r"`--([\w-]+)", PAGES[name]):
        name = flag.replace("-", "_")
        assert name in fields or name.removeprefix("no_") in fields, flag


# ------------------------------------------------------------------ metrics
@pytest.mark.parametrize("name", NAMES)
def test_every_metric_is_explained(name, short_runs):
    written = short_runs(name)
    assert written - explained(PAGES[name]).keys() == set()


@pytest.mark.parametrize("name", NAMES)
def test_every_explained_metric_is_written(name, short_runs):
    """Or its line says when it is missing."""
    written = short_runs(name)
    for key, text in explained(PAGES[name]).items():
        assert key in written or "only " in text or "missing " in text, key


def test_trls_own_metrics_are_explained_in_the_same_words():
    """Pages are read alone, so the lines are repeated; they must not drift apart."""
    texts = {}
    for name in NAMES:
        block = PAGES[name].split("### TRL's own")[1].split("\n## ")[0]
        for line in block.splitlines():
            if line.startswith("| `"):
                key, text = line.strip("|").split(" | ")[:2]
                if "/rewards/" in line or "spin_loss" in line:  # the script's own functions, and SPIN's own loss
                    continue
                key = re.sub(r"^\s*`(\{[\w,]+\}|\w+)/", "`", key)  # the player
                assert texts.setdefault(key, text) == text, f"{name}: {key}"
    assert len(texts) > 10


# ------------------------------------------------------------------ make it yours
@pytest.mark.parametrize("name", NAMES)
def test_three_small_edits_are_quoted_as_they_are(name):
    quoted = re.findall(r"```diff\n(.*?)```", sections(PAGES[name])["Make it yours"], re.DOTALL)
    files = [path for path in EDITS if path.stem.split("-")[0] == name]
    assert len(files) == len(quoted) == 3
    assert sorted(quoted) == sorted(path.read_text() for path in files)
    for text in quoted:
        lines = text.splitlines()
        assert lines[:2] == [f"--- a/{name}.py", f"+++ b/{name}.py"]
        assert sum(line[0] in "+-" for line in lines[2:]) <= 20 and max(map(len, lines)) <= 129
    for path in files:
        assert f"git apply {path.relative_to(ROOT)}\n" in PAGES[name]


RUNS = {  # edit -> arguments, the function whose calls are recorded, the rows of a data set of one's own
    "tango-length": (SHORT["tango"] + " --ver-warmup 0 --steps 1", "tango_advantages", []),
    "tango-choices": (
        SHORT["tango"] + " --ver-warmup 0 --steps 1 --solution-tokens 16 --judgement-tokens 16",
        "",
        [{"question": "(A) 1 (B) 2", "answer": "b"}],
    ),
    "tango-reliable": (SHORT["tango"] + " --ver-warmup 0", "", []),
    "prime-partial": (SHORT["prime"], "prime_advantages", []),
    "prime-letters": (SHORT["prime"] + " --keep-low 0", "", []),
    "prime-listen": (SHORT["prime"] + " --steps 2", "prime_advantages", []),
    "gar-agree": (SHORT["gar"], "", []),
    "gar-words": (
        SHORT["gar"] + " --silent-share 1 --solution-tokens 16 --judgement-tokens 16",
        "",
        [{"question": "Who?", "answer": "The Owl", "reference": "<step>It hoots.</step>\n"}],
    ),
    "gar-trust": (SHORT["gar"], "reasoner_reward", []),
    "spin-keep": (SHORT["spin"], "", []),
    "spin-chat": (SHORT["spin"], "", [{"question": "Say hello.", "solution": "Hello to you."}]),
    "spin-lambda": (SHORT["spin"] + " --steps 3 --iterations 3 --no-mix-previous", "spin_loss", []),
    "cure-strict": (SHORT["cure"], "", []),
    "cure-words": (SHORT["cure"], "", []),
    "cure-together": (SHORT["cure"], "", []),
    "mae-half": (SHORT["mae"], "proposer_reward", []),
    "mae-checked": (SHORT["mae"], "", []),
    "mae-alone": (SHORT["mae"] + " --steps 2 --reference-share 1", "propose_prompt", []),
}


@pytest.mark.parametrize("path", EDITS, ids=lambda path: path.stem)
def test_an_edit_applies_runs_and_does_what_it_says(path, tmp_path):
    script = path.stem.split("-")[0] + ".py"
    (tmp_path / script).write_text((ROOT / script).read_text())
    result = subprocess.run(["git", "apply", str(path)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, f"{path.name} no longer applies to {script}: {result.stderr}"
    arguments, recorded, rows = RUNS[path.stem]
    if rows:  # 60 questions, enough for both sides of the split
        numbered = [json.dumps({**row, "question": f"{i}: {row['question']}"}) for row in rows for i in range(60)]
        (tmp_path / "questions.jsonl").write_text("\n".join(numbered))
        arguments += f" --dataset {tmp_path / 'questions.jsonl'}"
    done = run(tmp_path / script, arguments, tmp_path / "run", recorded)
    assert doctest.testmod(done.module).failed == 0
    done.steps = [row for row in done.metrics if "epoch" in row]
    assert len(done.steps) == tyro.cli(done.module.Args, args=shlex.split(arguments)).steps
    assert all(math.isfinite(value) for row in done.metrics for value in row.values() if value is not None)
    CHECKS[path.stem](done)


def tango_length(done):
    outcomes = torch.cat([call[0] for call in done.calls])
    assert all(value == 0 or 0.8 <= value < 1 for value in outcomes.tolist())
    accuracies = [row["gen/accuracy"] for row in done.steps if "gen/loss" in row]  # still the truth
    assert mean(accuracies) == pytest.approx((outcomes > 0).float().mean().item())


def tango_choices(done):
    answers = [[{"content": rf"\boxed{{{answer}}}"}] for answer in ("(B)", "2", "A")]
    assert done.module.outcome_reward(answers, ["b"] * 3) == [1.0, 0.0, 0.0]
    assert "choices" in done.module.solve_prompt("")[0]["content"]


def tango_reliable(done):
    assert "ver/loss" in done.steps[0]  # as the script stands, the generator would begin
    memory = json.loads((done.folder / "checkpoint-2" / "memory.json").read_text())
    first, second = (row["ver/balanced_accuracy"] for row in done.steps)
    assert ("ver/loss" in done.steps[1]) == (first < done.module.RELIABLE)
    assert memory["reliability"] == pytest.approx(0.8 * first + 0.2 * second)


def prime_partial(done):
    outcomes = torch.cat([call[1] for call in done.calls]).tolist()
    assert all(0 <= value < 0.5 or value == 1 for value in outcomes) and any(0 < value < 1 for value in outcomes)


def prime_letters(done):
    rows = done.module.last_letters(1, 50)
    assert all(row["answer"] == "".join(word[-1] for word in row["question"].split()[3:]) for row in rows)
    assert not {row["question"] for row in rows} & {row["question"] for row in done.module.last_letters(0, 50)}
    assert done.module.is_correct(r"\boxed{ab}", "ab") and not done.module.is_correct(r"\boxed{ba}", "ab")


def prime_listen(done):
    assert [call[0] for call in done.calls] == [None, None]  # the policy does not listen,
    assert done.steps[1]["prm/loss"] != done.steps[0]["prm/loss"]  # and the PRM learns


def gar_agree(done):
    # YES and NO on a generated slice of a right solution, of a wrong one, and on a reference slice
    rewards = done.module.discriminator_rewards([1, 0] * 3, [False] * 4 + [True] * 2, [True] * 2 + [False] * 2 + [None] * 2)
    assert rewards == [0.5, 0.0, 0.0, 1.5, 1.0, 0.0]


def gar_words(done):
    answers = [[{"content": rf"\boxed{{{answer}}}"}] for answer in ("an owl", "OWL!", "howl")]
    assert done.module.match_reward(answers, ["The Owl"] * 3) == [1.0, 1.0, 0.0]


def gar_trust(done):
    trust = done.calls[0][2]
    assert 0 <= trust <= 1 and done.steps[0]["dis/trust"] == trust
    assert done.module.reasoner_reward([1, 0], [[1, 0], [1, 1]], trust) == [1 + 0.5 * trust, trust]


def spin_keep(done):
    memory = json.loads((done.folder / "checkpoint-2" / "memory.json").read_text())
    equal = [pair["real"] == pair["generated"] for pair in memory["pairs"]["0"]]
    assert mean(equal) == pytest.approx(done.steps[0]["opp/rewards/answer_reward/mean"]) and 0 < mean(equal) < 1


def spin_chat(done):
    assert [message["role"] for message in done.module.solve_prompt("Say hello.")] == ["user"]
    assert done.module.answer_reward([[{"content": "Hello you"}]], ["Hello to you."]) == [pytest.approx(1 / 3)]


def spin_lambda(done):
    betas = list(dict.fromkeys(round(call[4], 3) for call in done.calls))
    assert betas == [0.1, 0.707, 5.0]


def cure_strict(done):
    own = torch.tensor([[True], [False], [False]])  # a right program and two wrong ones
    unit = torch.tensor(
        [[True, True, True, False, False], [False, False, True, False, True], [False, True, True, False, False]]
    )
    assert done.module.tester_rewards(own, unit).tolist() == [1, 0, 0, 0, -1]


def cure_words(done):
    for row in done.module.word_tasks(1, 40):
        asked = re.search(r"Print it (.*?)\.", row["question"])[1]
        change = {"reversed": lambda w: w[::-1], "in capitals": str.upper, "without its ends": lambda w: w[1:-1]}[asked]
        assert row["test_output"] == [change(word) for word in row["test_input"]] and len(row["test_input"]) == 8
    assert "cod/reward" in done.steps[0]


def cure_together(done):
    step = done.steps[0]
    assert "tes/loss" in step and "cod/grad_norm" not in step and "cod/entropy" not in step  # one update


def mae_half(done):
    # The mean of 5 values, each a ninth: no question is both solved by nobody and difficult
    difficulties = [call[1] for call in done.calls]
    assert all(0 <= d <= 1 for d in difficulties) and any(0 < d < 1 for d in difficulties)


def mae_checked(done):
    memory = json.loads((done.folder / "checkpoint-2" / "memory.json").read_text())
    added = memory["questions"][memory["seeds"] :]
    assert all(done.module.sensible(question) for question in added)


def mae_alone(done):
    # 1 for the loader's rows, 2 in the first evaluation, 8 in each step; with --reference-share 1 all had a reference
    first, second = (sum(call[0] is not None for call in done.calls[i : i + 8]) for i in (3, 11))
    assert first == 8 and 0 < second < 8


CHECKS = {name.replace("_", "-"): function for name, function in list(globals().items()) if name.replace("_", "-") in RUNS}


def test_every_edit_has_its_check():
    assert {path.stem for path in EDITS} == RUNS.keys() == CHECKS.keys()


# ------------------------------------------------------------------ how-grpotrainer-works.md
CLASSES = {cls.__name__: cls for cls in (CoTrainer, GRPOTrainer, Trainer, TrainerCallback, GRPOConfig)}


def test_every_method_named_exists():
    """Every code span `Class.name` is a method or setting of that class, every other name with an underscore in front or
    brackets behind is one of some class or an attribute that its source sets."""
    sources = "".join(inspect.getsource(cls) for cls in (CoTrainer, GRPOTrainer, Trainer))
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TRAINER, flags=re.DOTALL))
    dotted = [
        span.split(".")
        for span in spans
        if re.fullmatch(r"\w+\.\w+", span) and not span.endswith((".py", ".txt", ".json", ".jsonl"))
    ]
    assert len(dotted) > 20
    for owner, name in dotted:
        assert hasattr(CLASSES[owner], name), f"{owner}.{name}"
    for span in spans:
        if re.fullmatch(r"_\w+|\w+\(\)", span):
            name = span.removesuffix("()")
            assert any(hasattr(cls, name) for cls in CLASSES.values()) or f"self.{name}" in sources, span


def test_every_seam_is_named():
    """All that CoTrainer overrides, and what become() swaps."""
    ours = {name for name in vars(CoTrainer) if hasattr(GRPOTrainer, name) and not name.startswith("__")}
    named = set(re.findall(r"`CoTrainer\.(\w+)`", TRAINER))
    assert ours - {"_abc_impl"} <= named
    swapped = re.findall(r"self\.(\w+) = ", inspect.getsource(CoTrainer.become))
    assert all(f"`{name}`" in TRAINER for name in swapped if name != "player")


def test_its_length_is_what_the_page_says():
    lines = len(inspect.getsource(sys.modules[GRPOTrainer.__module__]).splitlines())
    said = int(re.search(r"([\d,]+) lines", TRAINER)[1].replace(",", ""))
    assert abs(lines - said) < 50
