"""report.html in a real browser: what it shows is what the run wrote, whatever the models wrote stays text, and what
rollouts.jsonl records is what the update saw."""

import dataclasses
import importlib
import itertools
import json
import math
import re
import shlex
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path

from common.answers import token_texts
from common.cotrainer import RECORDED_TOKENS, rows_to_show
from common.data import UserError
from common.report import axes, band, command, page, panels, phases, read_lines, read_run, rollouts_for_page, run_data, variants

import pandas
import pytest
import torch
import tyro
from conftest import ROOT, make_trainer, run_script
from hypothesis import given, settings
from hypothesis import strategies as st

SHORT = {
    "tango.py": "--steps 4 --questions 2 --group-size 4 --micro-batch 4 --ver-warmup 1",
    "prime.py": "--steps 2 --questions 2 --group-size 4 --micro-batch 4 --keep-low 0 --keep-high 1",
    "gar.py": "--steps 2 --questions 2 --group-size 4 --micro-batch 4",
    "spin.py": "--steps 2 --iterations 1 --questions 4 --micro-batch 4",
    "cure.py": "--steps 2 --questions 2 --group-size 4 --micro-batch 8",
    "mae.py": "--steps 2 --questions 4 --micro-batch 12 --seed-questions 8",
}
SCRIPTS = [name for name in SHORT if (ROOT / name).exists()]


# ------------------------------------------------------------------ what is needed: a browser, real runs, made-up runs
@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A second one only waits for a model this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window and without a network, in a profile of its own."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    quiet = "background-networking component-update sync default-apps extensions".split()
    profile = tempfile.mkdtemp()
    for flag in ["headless", "no-sandbox", "disable-gpu", "no-first-run", *(f"disable-{name}" for name in quiet)]:
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()
    shutil.rmtree(profile, ignore_errors=True)


def look(browser, path, width=1280, scheme="light"):
    """Open a page; errors of an earlier one are forgotten."""
    browser.get_log("browser")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    preferred = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", preferred)
    browser.get(path.resolve().as_uri())
    assert browser.find_elements("css selector", "main section"), browser.get_log("browser")


def ask(browser, script, *arguments):
    """The value of a JavaScript expression, through JSON: WebDriver's own way would change lone surrogates."""
    return json.loads(browser.execute_script(f"return JSON.stringify({script})", *arguments))


def each(browser, selector, expression):
    """The value of an expression of `e` for every element that a selector finds."""
    return ask(browser, f"[...document.querySelectorAll(`{selector}`)].map(e => {expression})")


def open_all(browser):
    browser.execute_script("document.querySelectorAll('summary').forEach(summary => summary.click())")


def try_all(browser):
    """Every choice once, every button but the clipboard's, everything opened."""
    browser.execute_script("document.querySelectorAll('input[type=radio]').forEach(choice => choice.click())")
    browser.execute_script("document.querySelectorAll('button').forEach(b => b.textContent === 'copy' || b.click())")
    open_all(browser)


def at_step(browser, place):
    browser.execute_script(
        "const s = document.querySelector('#step'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))", place
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A short run of every script, in this process, which has torch imported already: script -> folder."""
    folders, before = {}, signal.getsignal(signal.SIGINT)
    for script in SCRIPTS:
        module, folders[script] = importlib.import_module(script[:-3]), tmp_path_factory.mktemp("runs") / script[:-3]
        arguments = f"{SHORT[script]} --eval-questions 4 --eval-every 0 --show-every 0 --out {folders[script]}"
        module.main(tyro.cli(module.Args, args=arguments.split()))
    signal.signal(signal.SIGINT, before)
    return folders


def rollout(step=1, player="solver", tokens=("<step>", "1", "</step>"), **more):
    tokens = list(tokens)
    row = {"step": step, "player": player, "prompt": "1 + 1", "rewards": {"right": 1.0}, "length": len(tokens)}
    return {**row, "tokens": tokens, "advantages": [0.5 - i for i in range(len(tokens))], **more}


def made_up(folder, metrics, rollouts=(), source='"""A script."""\nCURVES = {"solver": ["sol/accuracy"]}\n', **arguments):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "made.py").write_text(source)
    (folder / "args.json").write_text(json.dumps({"seed": 0, "steps": 300, "questions": 4, "group_size": 2, **arguments}))
    (folder / "versions.json").write_text(json.dumps({"python": "3", "processes": 1, "device": "none"}))
    for name, rows in (("metrics.jsonl", metrics), ("rollouts.jsonl", rollouts)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def accuracy(steps, slope=0.1, **more):
    return [{"step": s, "seconds": 60.0 * s, "sol/accuracy": slope * s, **more} for s in range(1, steps + 1)]


def written(folder):
    """report.html of a folder, by the command."""
    result = run_script("-m", "common.report", folder)
    assert result.returncode == 0, result.stderr
    return folder / "report.html"


# ------------------------------------------------------------------ what is recorded
def test_rows_worth_showing():
    note = lambda player, prompt, reward: {"player": player, "prompt": prompt, "rewards": {"r": reward}}  # noqa: E731
    flat = [note("a", "p", 1)] * 4
    assert rows_to_show([]) == []
    assert rows_to_show(flat) == [0, 3]
    assert rows_to_show([note("a", "p", 1)]) == [0]
    # the second prompt has contrast, and so comes first; the third is one too many
    rows = [*flat, note("a", "q", 0), note("a", "q", 0), note("a", "q", 1), note("a", "q", 0), *[note("a", "s", 1)] * 2]
    assert rows_to_show(rows) == [4, 6, 0, 3]
    assert rows_to_show([*flat, *[note("b", "p", 1)] * 2]) == [0, 3, 4, 5]  # each player has its own


@pytest.mark.parametrize("per_token", [False, True])
def test_recorded_is_what_the_update_sees(tmp_path, per_token):
    """Tokens, advantages and rewards of the batch that is trained on, against the batch itself."""
    trainer = make_trainer(tmp_path)
    torch.manual_seed(0)
    batch = trainer.turn("generator", [trainer.train_dataset[0]] * 4 + [trainer.train_dataset[3]] * 4)
    shape = batch["completion_mask"].shape
    batch["advantages"] = torch.randn(shape if per_token else shape[:1])
    batch["notes"][0]["of the script"] = [1, None]
    trainer._generate_and_score_completions = lambda rows: batch
    trainer._prepare_inputs([])
    rows, lost = read_lines(tmp_path / "rollouts.jsonl")
    assert lost == 0 and 3 <= len(rows) <= 4
    chosen = rows_to_show(batch["notes"])
    for row, i in zip(rows, chosen, strict=True):
        ids = [t for t, there in zip(batch["completion_ids"][i].tolist(), batch["completion_mask"][i].tolist()) if there]
        A = batch["advantages"][i].tolist()
        assert row["step"] == 1 and row["player"] == "generator" and row["length"] == len(ids) == len(row["tokens"])
        assert "".join(row["tokens"]) == trainer.processing_class.decode(ids)
        assert row["advantages"] == pytest.approx(A[: len(ids)] if per_token else [A] * len(ids), rel=5e-4)
        assert row["rewards"] == {"outcome_reward": batch["rewards"][i].item()}
        assert row["prompt"] == trainer.train_dataset[0 if i < 4 else 3]["question"]
    assert [row.get("of the script") for row in rows][chosen.index(0)] == [1, None]


def test_recorded_answers_are_cut_and_the_rest_is_counted(tmp_path):
    trainer = make_trainer(tmp_path)
    T = RECORDED_TOKENS + 88
    note = {"player": "generator", "prompt": "p", "rewards": {}}
    ones = torch.ones(1, T, dtype=torch.long)
    trainer.record({"completion_ids": 9 * ones, "completion_mask": ones, "advantages": torch.ones(1), "notes": [note]})
    (row,), _ = read_lines(tmp_path / "rollouts.jsonl")
    assert row["length"] == T and len(row["tokens"]) == len(row["advantages"]) == RECORDED_TOKENS


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), cut=st.integers(0, 8))
def test_token_texts_are_the_text(real_tokenizer, text, cut):
    """Whatever bytes are cut in two: one piece a token, together what the tokenizer says."""
    ids = real_tokenizer(text + "日本 é 🙂", add_special_tokens=False).input_ids
    ids = ids[cut:] if cut % 2 else ids[: len(ids) - cut]
    pieces = token_texts(ids, real_tokenizer)
    assert len(pieces) == len(ids) and "".join(pieces) == real_tokenizer.decode(ids)


@pytest.fixture(scope="module")
def real_tokenizer():
    from conftest import DATA
    from transformers import AutoTokenizer

    if not (DATA / "qwen2.5-tokenizer").exists():
        pytest.skip("set DUET_DATA to a folder with qwen2.5-tokenizer/")
    return AutoTokenizer.from_pretrained(DATA / "qwen2.5-tokenizer")


def test_resuming_forgets_what_came_after_the_checkpoint(tmp_path):
    from common.run import Run

    steps = accuracy(4)
    evaluation = {"step": 2, "seconds": 121.0, "eval/sol/accuracy": 0.5}
    made_up(tmp_path, [*steps[:2], evaluation, *steps[2:]], [rollout(s) for s in (1, 2, 3, 4)])
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write('{"step": 1, "cut sh')
    run = Run(tmp_path, "made", Path("checkpoint-2"))
    assert run.spent == 121.0 and run.evaluations == [evaluation]
    assert read_lines(tmp_path / "metrics.jsonl") == ([*steps[:2], evaluation], 0)
    assert read_lines(tmp_path / "rollouts.jsonl") == ([rollout(1), rollout(2)], 0)
    Run(tmp_path, "made", None)
    assert not (tmp_path / "rollouts.jsonl").read_text() and not (tmp_path / "metrics.jsonl").read_text()


# ------------------------------------------------------------------ a real run of every script, in the browser
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_token_carries_the_advantage_in_the_file(browser, runs, script):
    folder = runs[script]
    look(browser, folder / "report.html")  # as the run left it
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    steps = sorted({row["step"] for row in rows})
    assert steps == list(range(1, json.loads((folder / "args.json").read_text())["steps"] + 1))
    found = []
    for place in range(len(steps)):
        at_step(browser, place)
        tokens = "[...e.querySelectorAll('.tokens span')].map(t => [t.textContent, t.dataset.advantage])"
        found += each(browser, "[data-row]", tokens)
    on_page = Counter(tuple((text, float(value)) for text, value in answer) for answer in found)
    assert on_page == Counter(tuple(zip(row["tokens"], row["advantages"])) for row in rows)
    assert any(value for row in rows for value in row["advantages"])
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_page_can_be_used_without_an_error(browser, runs, script):
    look(browser, runs[script] / "report.html")
    try_all(browser)
    charts = each(browser, "figure svg", "[e.querySelectorAll('path').length, e.innerHTML]")
    data = run_data(read_run(runs[script]))
    assert len(charts) == len(data["panels"]) and sum(panel["section"] == "curves" for panel in data["panels"]) >= 2
    assert all(paths > 0 and "NaN" not in text and "Infinity" not in text for paths, text in charts)
    shown = browser.find_element("id", "run").text
    assert command(read_run(runs[script])) in re.sub(r"\s+", " ", shown)
    assert ask(browser, "performance.getEntriesByType('resource').length") == 0
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_command_repeats_the_run(runs, script):
    """Read as a user's shell and the script would: every argument as it was."""
    words = shlex.split(command(read_run(runs[script])))
    assert words[:2] == ["python", script]
    again = tyro.cli(importlib.import_module(script[:-3]).Args, args=words[2:])
    assert dataclasses.asdict(again) == {**json.loads((runs[script] / "args.json").read_text()), "out": None}


def test_pandas_reads_the_rollouts_in_one_line(runs):
    table = pandas.read_json(runs["tango.py"] / "rollouts.jsonl", lines=True)
    assert {"step", "player", "prompt", "rewards", "length", "tokens", "advantages", "verdicts", "gold"} <= set(table)
    assert (table.tokens.map(len) == table.advantages.map(len)).all()


def test_verdicts_stand_beside_gold(browser, runs):
    """Of every step of a solution: as in the file, and a frame exactly where they differ."""
    look(browser, runs["tango.py"] / "report.html")
    rows = [row for row in read_lines(runs["tango.py"] / "rollouts.jsonl")[0] if row["player"] == "generator"]
    assert rows and any(row["verdicts"] for row in rows)
    steps = sorted({row["step"] for row in read_lines(runs["tango.py"] / "rollouts.jsonl")[0]})
    for step in sorted({row["step"] for row in rows}):
        at_step(browser, steps.index(step))
        marks = "[...marks.children].map(mark => [mark.textContent, mark.classList.contains('differs')])"
        shown = each(browser, "[data-row]", f"[...e.querySelectorAll('.marks')].map(marks => {marks})")
        for row, answer in zip([row for row in rows if row["step"] == step], shown, strict=True):
            text, sign = "".join(row["tokens"]), {True: "✓", False: "✗", None: "·"}
            count = len(re.findall(r"<step>.*?</step>", text, re.DOTALL))
            verdicts = (row["verdicts"] + [None] * count)[:count]
            for marks, verdict, gold in zip(answer, verdicts, row["gold"], strict=True):
                differs = verdict is not None and verdict != gold
                expected = [[f"V {sign[verdict]}", differs]] if row["verdicts"] else []
                assert marks == [*expected, [f"G {sign[gold]}", differs]]


def test_cures_table_is_the_one_that_was_rewarded(runs):
    """It stands on the first program of a group, whose reward is the share of the task's own tests in its first row."""
    rows = [row for row in read_lines(runs["cure.py"] / "rollouts.jsonl")[0] if "table" in row]
    assert rows
    for row in rows:
        passes, own = row["table"]["passes"], row["table"]["own"]
        assert len(passes) == 4 and {len(line) for line in passes} == {own + 4}  # 4 programs, 4 generated tests
        if row["player"] == "coder":
            assert row["rewards"]["own_tests_reward"] == pytest.approx(sum(passes[0][:own]) / own)


# ------------------------------------------------------------------ by hand: pointer, keyboard, size of the window, colours
@pytest.fixture(scope="module")
def example(tmp_path_factory):
    tokens = ["<step>", "4", " ", "+\n", "5", "</step>", "\n", "9"]
    rows = [
        rollout(
            step, "solver", tokens, advantages=[0.1234, -1.5, 0.0, 1e-05, 2.0, -2.0, 0.3, 0.7], verdicts=[False], gold=[True]
        )
        for step in (1, 2, 5)
    ]
    table = {"passes": [[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]], "own": 2}
    rows.append(rollout(5, "coder", ["x"], prompt="program", table=table))
    rows.append(rollout(5, "proposer", ["<question>2+2?</question>"], prompt="ask", generation=3, quality=0.75))
    players = [{"sol/loss": 0.1}, {"sol/loss": 0.1}, {"ver/loss": 0.2}, {"ver/loss": 0.1}, {"sol/loss": 0.1}]
    metrics = [{**row, **more} for row, more in zip(accuracy(5), players)]
    return written(made_up(tmp_path_factory.mktemp("example") / "run", metrics, rows, steps=5))


def test_pointing_at_a_token_shows_its_advantage(browser, example):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.wait import WebDriverWait

    look(browser, example)
    row = next(row for row in read_lines(example.parent / "rollouts.jsonl")[0] if row["step"] == 5)
    tokens = browser.find_elements("css selector", "#answers [data-row] .tokens span")[: len(row["tokens"])]
    for token, text, value in zip(tokens, row["tokens"], row["advantages"]):
        if text.strip():
            browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", token)
            tip, places = browser.find_element("id", "tip"), itertools.cycle((0, 1))

            def pointed_at(_, token=token, tip=tip, places=places):
                """Scrolling hides it, and on a busy machine the browser may say so after the pointer has come."""
                ActionChains(browser).move_to_element_with_offset(token, next(places), 0).perform()
                return tip.is_displayed()

            WebDriverWait(browser, 20).until(pointed_at)
            quoted, number = tip.text.rsplit(maxsplit=1)
            assert json.loads(quoted) == text and float(number) == value
    colours = each(browser, "#answers .tokens span", "e.style.background")[:6]
    assert ["plus" in c or "minus" in c for c in colours] == [True, True, False, True, True, True]
    assert "plus" in colours[0] and "minus" in colours[1] and "minus" in colours[5]


def test_keyboard(browser, example):
    from selenium.webdriver import ActionChains, Keys

    look(browser, example)
    press = lambda *keys: ActionChains(browser).send_keys(*keys).perform()  # noqa: E731
    browser.find_element("id", "step").click()
    browser.execute_script("document.querySelector('#step').focus()")
    press(Keys.HOME)
    assert "step 1 of 5" in browser.find_element("css selector", "output").text
    press(Keys.RIGHT)
    assert "step 2 of 5" in browser.find_element("css selector", "output").text
    seen = []
    for _ in range(12):  # from the slider on, by tab, into the first answer
        press(Keys.TAB)
        seen.append(ask(browser, "[document.activeElement.tagName, document.activeElement.dataset.i ?? null]"))
        if seen[-1] == ["SPAN", "0"]:
            break
    assert seen[-1] == ["SPAN", "0"], seen
    press(Keys.RIGHT, Keys.RIGHT, Keys.LEFT)
    assert ask(browser, "document.activeElement.dataset.i") == "1"
    assert browser.find_element("id", "tip").text.endswith(" -1.5")
    press(Keys.ESCAPE)
    assert not browser.find_element("id", "tip").is_displayed()
    browser.execute_script("document.querySelector('figure svg').focus()")
    press(Keys.RIGHT, Keys.RIGHT)
    legend = browser.find_element("css selector", "figure .legend").text
    assert "sol/accuracy 0.2" in legend and "step 2" in legend
    assert browser.get_log("browser") == []


def test_phases_are_shaded(browser, example):
    look(browser, example)
    assert phases(read_run(example.parent)) == [[0, 1, "sol"], [2, 3, "ver"], [4, 4, "sol"]]
    shaded = each(browser, "figure:first-of-type svg rect", "[+e.getAttribute('x'), +e.getAttribute('width')]")
    lines = each(browser, "figure:first-of-type svg .grid", "[+e.getAttribute('x1'), +e.getAttribute('x2')]")
    # steps run from 1 to 5, and step 3 begins where step 2 has ended: from 2 to 4 of 1 to 5
    left, right = lines[0]
    ((x, width),) = shaded
    assert (x - left) / (right - left) == pytest.approx(0.25, abs=0.01)
    assert width / (right - left) == pytest.approx(0.5, abs=0.01)


def test_pass_table_and_questions(browser, example):
    look(browser, example)
    rows = each(browser, ".matrix tr", "[e.className, [...e.children].map(cell => cell.className)]")
    assert [name for name, _ in rows] == ["", "right", "right", ""]  # programs 1 and 2 pass both of the task's own tests
    passes = [[name.split()[0] == "pass" for name in cells[1:]] for _, cells in rows[1:]]
    assert passes == [[True, True, False, True], [True, True, True, True], [False, True, True, True]]
    assert ["first" in name for name in rows[1][1][1:]] == [False, False, True, False]  # the line before generated tests
    assert ["good" in name for name in rows[0][1][1:]] == [True, True, False, True]  # passed by all right programs
    cells = each(browser, "#questions td", "e.textContent")
    assert cells == ["3", "5", "2+2?", "0.75", "1"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readable_at_400_pixels_and_in_all_colours(browser, runs, example, scheme):
    """Nothing sticks out, and a token of the strongest colour has contrast 4.5 : 1 or more with its background."""
    for path in [example, *(folder / "report.html" for folder in runs.values())]:
        look(browser, path, 400, scheme)
        open_all(browser)
        wide, there = ask(browser, "[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert wide <= there <= 400
    look(browser, example, 1280, scheme)
    at_step(browser, 0)
    card = numbers(each(browser, ".question", "getComputedStyle(e).backgroundColor")[0])
    assert (sum(card) < 1) == (scheme == "dark")
    tokens = each(browser, ".tokens span", "[getComputedStyle(e).color, getComputedStyle(e).backgroundColor]")
    for ink, back in tokens[4:6]:  # +2 and -2, the ends of the scale
        *colour, alpha = numbers(back)
        assert alpha > 0.5
        mixed = [alpha * c + (1 - alpha) * under for c, under in zip(colour, card)]
        assert contrast(numbers(ink), mixed) >= 4.5
    soft = each(browser, ".facts", "getComputedStyle(e).color")[0]
    assert contrast(numbers(soft), card) >= 4.5


def numbers(colour: str) -> list[float]:
    found = [float(x) for x in re.findall(r"[\d.]+(?:e-\d+)?", colour)]
    return found if colour.startswith("color(") else [x / 255 for x in found[:3]] + found[3:]


def contrast(a, b) -> float:
    """WCAG 2."""
    linear = lambda c: c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4  # noqa: E731
    light = sorted(sum(w * linear(c) for w, c in zip((0.2126, 0.7152, 0.0722), x)) for x in (a, b))
    return (light[1] + 0.05) / (light[0] + 0.05)


# ------------------------------------------------------------------ hostile output
HOSTILE = [
    "<script>window.hit = 1</script>",
    "</script><script>window.hit = 2</script>",
    "<!--<script>",
    "<img src=x onerror='window.hit = 3'>",
    "\"'`${window.hit = 4}`&lt;&#60;b>",
    "\u2028\u2029\u0000\ufeff\ufffe",
    "\ud800 alone \udfff",
    "{{data}} {{script hash}} {{style hash}}",
    "\u202egnirts\u202c",
    "javascript:window.hit = 5//",
    "<svg onload=window.hit=6><style>*{display:none}</style>",
    "a" * 3000,
]


def test_hostile_output_stays_text(browser, tmp_path):
    rows = [
        rollout(1, text, [text, "<step>", text, "</step>"], prompt=text, rewards={text: 1.0}, parts=[text], verdicts=[True])
        | {text + "x": text, "judgement": text * 3, "credit": text, "odd": [{"deep": [text]}]}
        for text in HOSTILE
    ]
    rows.append(rollout(1, "proposer", ["<question>" + "".join(HOSTILE[:6]) + "</question>"], prompt="ask", generation=1))
    metrics = [{"step": 1, "seconds": 1.0, "sol/accuracy": 1.0, **{f"sol/{text}": 0.5 for text in HOSTILE}}]
    source = f'{("</script>" + HOSTILE[1])!r}\nCURVES = {{"<b>": ["sol/accuracy"], {HOSTILE[0]!r}: ["sol/accuracy"]}}\n'
    folder = made_up(tmp_path / "<b>run&", metrics, rows, source, note=HOSTILE[1], steps=1)
    look(browser, written(folder))
    open_all(browser)
    shown = each(browser, "[data-row]", "[...e.querySelectorAll('.tokens span')].map(t => t.textContent)")
    assert sorted(shown) == sorted(row["tokens"] for row in rows)
    assert sorted(each(browser, ".prompt", "e.textContent")) == sorted({row["prompt"] for row in rows})
    assert ask(browser, "window.hit ?? null") is None
    made = ["script", "style", "img", "iframe", "b:not(.facts b, .legend b)"]  # nothing that the page did not make itself
    kinds = [len(browser.find_elements("css selector", selector)) for selector in made]
    assert kinds == [2, 1, 0, 0, 0]
    assert browser.get_log("browser") == []


def test_the_policy_lets_nothing_else_run_or_be_fetched(browser, example):
    look(browser, example)
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hit = 1'; document.body.append(s);"
        "const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i);"
        "fetch('http://127.0.0.1:9/').then(() => window.hit = 2, () => 0)"
    )
    assert ask(browser, "window.hit ?? null") is None
    refused = [entry["message"] for entry in browser.get_log("browser")]
    assert sum("Content Security Policy" in message for message in refused) >= 3, refused


# ------------------------------------------------------------------ size
def test_three_hundred_steps_stay_under_three_megabytes(browser, tmp_path):
    """Rows as large as they get, 70 metrics; both players are there, and the page says that steps are left out."""
    words = [f"word{i} " for i in range(RECORDED_TOKENS)]
    A = [float(f"{math.sin(i):.4g}") for i in range(RECORDED_TOKENS)]
    rows = [
        rollout(step, "generator" if step % 4 else "verifier", words, advantages=A, prompt=f"{k} " * 300, judgement="j" * 2000)
        for step in range(1, 301)
        for k in range(4)
    ]
    names = [f"gen/metric_{k}" for k in range(70)]
    metrics = [{"step": s, "seconds": float(s), **{n: math.cos(s + len(n)) for n in names}} for s in range(1, 301)]
    path = written(made_up(tmp_path / "long", metrics, rows))
    assert path.stat().st_size < 3_000_000
    kept, all_steps = rollouts_for_page(rows)
    players = Counter(row["player"] for row in kept)
    assert all_steps == 300 and kept[-1]["step"] == 300 and 2 <= players["generator"] / players["verifier"] <= 4
    look(browser, path)
    steps = len({row["step"] for row in kept})
    assert f"{steps} of 300 recorded steps" in browser.find_element("id", "rollouts").text
    assert browser.get_log("browser") == []


def test_a_long_run_is_thinned_evenly():
    rows = [{"step": s, "seconds": s, "gen/loss" if s % 4 else "ver/loss": float(s)} for s in range(1, 20_001)]
    from common.report import POINTS, values

    for key in ("gen/loss", "ver/loss"):  # an even stride over all rows would have missed one of them
        at, y = values({"rows": rows}, key)
        assert POINTS / 2 <= len(at) <= POINTS and at == sorted(at) and at[-1] >= 19_998
        assert [rows[i][key] for i in at] == y and len({b - a for a, b in zip(at[1:], at[2:])}) <= 2


# ------------------------------------------------------------------ comparing runs
@pytest.fixture
def three(tmp_path):
    """Two seeds of one variant, one of another, on different clocks."""

    def held_out(rows):
        return rows + [{"step": r["step"], "seconds": r["seconds"], "eval/sol/accuracy": r["sol/accuracy"]} for r in rows]

    made_up(tmp_path / "a0", held_out(accuracy(4, 0.1)), lr=0.1, seed=0)
    made_up(tmp_path / "a1", held_out(accuracy(4, 0.2)), lr=0.1, seed=1)
    made_up(tmp_path / "b0", held_out(accuracy(3, 0.3)), lr=0.2, seed=0)
    return [tmp_path / name for name in ("a0", "a1", "b0")]


def test_band_is_mean_and_range():
    """Against a loop over seeds, each a straight line between its points."""

    def line(x, points):
        for (x0, y0), (x1, y1) in zip(points, points[1:]):
            if x0 <= x <= x1:
                return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    seeds = [[(0, 1.0), (2, 3.0), (4, 0.0)], [(1, 5.0), (3, 1.0)], [(0, 2.0), (6, 8.0)]]
    result = band([tuple(map(list, zip(*points))) for points in seeds])
    assert result["x"] == [0, 1, 2, 3, 4, 6]
    for i, x in enumerate(result["x"]):
        there = [y for points in seeds if (y := line(x, points)) is not None]
        assert result["y"][i] == pytest.approx(sum(there) / len(there), rel=1e-4)
        assert (result["low"][i], result["high"][i]) == pytest.approx((min(there), max(there)), rel=1e-4)
    assert band([([1, 2], [0.0, 1.0]), ([5, 6], [0.0, 1.0])])["x"] == [1, 2, 5, 6]  # nothing is drawn where nobody is


def test_axes(tmp_path):
    run = read_run(made_up(tmp_path, accuracy(3)))
    assert axes(run) == {"step": [1, 2, 3], "samples": [8, 16, 24], "minutes": [1, 2, 3]}
    counted = [{**row, "co/samples": n} for row, n in zip(accuracy(2), (10, 40))] + [
        {"step": 2, "seconds": 130.0, "eval/x": 1.0}
    ]
    assert axes(read_run(made_up(tmp_path, counted)))["samples"] == [10, 40, 40]


def test_variants_are_told_apart_by_what_differs(three):
    grouped = variants([read_run(folder) for folder in three])
    assert {label: [run["folder"] for run in of_one] for label, of_one in grouped.items()} == {
        "lr 0.1": ["a0", "a1"],
        "lr 0.2": ["b0"],
    }
    assert list(variants([read_run(folder) for folder in three[:2]])) == ["made.py"]


def test_comparison(browser, three, tmp_path):
    page_at, image = tmp_path / "c.html", tmp_path / "c.png"
    result = run_script("-m", "common.report", *three, "--out", page_at, "--png", image, "--x", "minutes")
    assert result.returncode == 0, result.stderr
    assert image.read_bytes().startswith(b"\x89PNG") and image.stat().st_size > 10_000
    look(browser, page_at)
    table = [row.text for row in browser.find_elements("css selector", "#held-out tr")]
    assert table[1].startswith("lr 0.1 0, 1 4 4 0.6 [0.4, 0.8]") and table[2].startswith("lr 0.2 0 3 3 0.9")
    for section in ("heldout-curves", "curves"):
        drawn = each(browser, f"#{section} svg", "['.band', '.curve'].map(kind => e.querySelectorAll(kind).length)")
        assert drawn == [[1, 2]]  # one band, of the variant with two seeds
    try_all(browser)
    assert browser.get_log("browser") == []
    for width in (1280, 400):
        look(browser, page_at, width)
        assert ask(browser, "document.documentElement.scrollWidth") <= width


def test_runs_of_different_scripts(browser, runs, three, tmp_path):
    other = [runs[script] for script in ("tango.py", "prime.py")]
    result = run_script("-m", "common.report", *other, *three, "--out", tmp_path / "c.html")
    assert result.returncode == 0, result.stderr
    look(browser, tmp_path / "c.html")
    sentence = "These are runs of made.py and prime.py and tango.py: only metrics of the same name meet in one panel."
    assert sentence in browser.find_element("css selector", "header").text
    assert browser.get_log("browser") == []


# ------------------------------------------------------------------ bad input
def refused(*arguments):
    result = run_script("-m", "common.report", *arguments)
    assert result.returncode == 2 and "Traceback" not in result.stderr and result.stderr.count("error: ") == 1, result.stderr
    return result.stderr


def test_what_is_no_run(tmp_path, three):
    assert f"{tmp_path}: not the folder of a run" in refused(tmp_path)
    assert "no-such: not the folder of a run" in refused(tmp_path / "no-such")
    empty = made_up(tmp_path / "empty", [])
    assert f"{empty}: metrics.jsonl is missing or empty; there is nothing to show yet." in refused(empty)
    (empty / "metrics.jsonl").unlink()
    assert "metrics.jsonl is missing or empty" in refused(*three, empty)
    message = refused(*three, "--png", tmp_path / "x.png", "--out", tmp_path / "x.html", "--metrics", "no/such")
    assert "--metrics no/such: no run has them; there are eval/sol/accuracy" in message
    assert "cannot be written" in refused(three[0], "--out", tmp_path / "no" / "folder" / "x.html")


def test_a_run_that_is_still_writing(browser, tmp_path):
    folder = made_up(tmp_path / "run", accuracy(7), [rollout(7)])
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with open(folder / name, "a") as file:
            file.write('{"step": 8, "prompt": "cut in the mid')
    look(browser, written(folder))
    header = browser.find_element("css selector", "header").text
    assert "still at step 7 of 300" in header
    assert "1 line of metrics.jsonl could not be read" in header and "1 line of rollouts.jsonl could not be read" in header
    assert browser.get_log("browser") == []


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "[1]",
        '"text"',
        "12",
        "{}",
        '{"step": "1"}',
        '{"step": 1, "player": 1}',
        '{"step": 1.5, "sol/accuracy": 1}',
        "[" * 5000,
    ]
    + [json.dumps(rollout(1) | {"advantages": [1]}), json.dumps(rollout(1) | {"tokens": [1, 2, 3]}), "NaN", "\x00"],
    ids=lambda line: line[:24],
)
def test_lines_that_are_none_are_counted(tmp_path, line):
    folder = made_up(tmp_path, accuracy(2), [rollout(1)])
    with open(folder / "rollouts.jsonl", "a") as file:
        file.write(line + "\n")
    run = read_run(folder)
    assert run["rollouts"] == [rollout(1)] and len(run["remarks"]) == 1
    assert run["remarks"][0].startswith("1 line of rollouts.jsonl could not be read")


def test_numbers_that_are_none_are_left_out(browser, tmp_path):
    """A metric may be NaN, infinite, null, text or missing; a page of it is still a page."""
    odd = [math.nan, math.inf, -math.inf, None, "text", True, 1e300, 0.5]
    rows = [{"step": i, "seconds": 1.0, "sol/accuracy": value, "sol/kl": 0.0} for i, value in enumerate(odd, start=1)]
    path = written(made_up(tmp_path / "run", rows, [rollout(1, advantages=[math.nan, 1.0, -math.inf])]))
    look(browser, path)
    paths = each(browser, "path", "e.getAttribute('d')")
    assert paths and not any("NaN" in p or "Infinity" in p for p in paths)
    assert browser.get_log("browser") == []


def test_no_rollouts_no_docstring_computed_curves(browser, tmp_path):
    folder = made_up(tmp_path / "run", accuracy(1), source="CURVES = dict(a=[x for x in 'ab'])\n")
    (folder / "rollouts.jsonl").unlink()
    look(browser, written(folder))
    assert "This run has recorded none." in browser.find_element("id", "rollouts").text
    assert "sol/accuracy" in [k for panel in panels(["sol/accuracy"], {}) for k in panel["keys"]]
    assert browser.get_log("browser") == []


def test_read_run_says_whose_folder_it_is(tmp_path):
    made_up(tmp_path, accuracy(1))
    (tmp_path / "args.json").write_text("{")
    with pytest.raises(UserError, match="args.json or versions.json cannot be read"):
        read_run(tmp_path)


def test_the_page_is_ascii_where_it_must_be():
    """Data can neither end its element nor hold a character that a browser might read as anything else."""
    text = page({"kind": "run", "x": HOSTILE})
    data = text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert data.isascii() and "<" not in data and json.loads(data)["x"] == HOSTILE
