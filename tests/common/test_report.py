"""report.html in a real browser: it shows what the run wrote, and whatever models wrote stays text.

And rollouts.jsonl: what is recorded is what the update saw.
"""

import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import math
import re
import shlex
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from common.errors import UserError
from common.recording import RECORDED_TOKENS, read_lines, record, rows_to_show, token_texts
from common.report import read_run
from common.report.__main__ import main
from common.report.build import (
    POINTS,
    axes,
    command,
    page,
    panels,
    phases,
    rollouts_for_page,
    run_data,
    values,
)
from common.report.compare import band, variants

import pandas
import pytest
import torch
import tyro
from conftest import DATA, SCRIPTS, make_trainer, run_script
from hypothesis import given, settings
from hypothesis import strategies as st


# ------------------------------------------------------------------ a browser, and made-up runs
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
    flags = ["headless", "no-sandbox", "disable-gpu", "no-first-run"]
    for flag in [*flags, *(f"disable-{name}" for name in quiet)]:
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
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
    """The value of a JavaScript expression, as JSON: WebDriver would change lone surrogates."""
    return json.loads(browser.execute_script(f"return JSON.stringify({script})", *arguments))


def each(browser, selector, expression):
    """The value of an expression of `e` for every element that a selector finds."""
    return ask(browser, f"[...document.querySelectorAll(`{selector}`)].map(e => {expression})")


def click(browser, selector):
    """Click on all elements that a selector finds, but not on those of the clipboard."""
    each(browser, selector, "e.textContent === 'copy' || e.click()")


def open_all(browser):
    click(browser, "summary")


def try_all(browser):
    for selector in ("input[type=radio]", "button", "summary"):
        click(browser, selector)


def at_step(browser, place):
    """Move the slider of the rollouts to this place."""
    slider = "document.querySelector('#step')"
    browser.execute_script(f"{slider}.value = arguments[0]", place)
    browser.execute_script(f"{slider}.dispatchEvent(new Event('input'))")


TOKENS_SHOWN = "#answers [data-row] .tokens span"
TOKENS = "[...e.querySelectorAll('.tokens span')]"  # of an answer


def rollout(step=1, player="solver", tokens=("<step>", "1", "</step>"), **more):
    """A line of rollouts.jsonl."""
    tokens = list(tokens)
    row = {"step": step, "player": player, "prompt": "1 + 1", "rewards": {"right": 1.0}}
    row |= {"length": len(tokens), "tokens": tokens}
    return row | {"advantages": [0.5 - i for i in range(len(tokens))]} | more


CURVES = {"solver": ["solver/accuracy"]}


def made_up(folder, metrics, rollouts=(), about="A script.", curves=CURVES, **arguments):
    """The folder of a run of made.py that never was."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = {"seed": 0, "steps": 300, "questions": 4, "group_size": 2} | arguments
    files = {
        "args.json": arguments,
        "versions.json": {"python": "3", "processes": 1, "device": "none"},
        "about.json": {"script": "made", "about": about, "curves": curves},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    for name, rows in (("metrics.jsonl", metrics), ("rollouts.jsonl", rollouts)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def accuracy(steps, slope=0.1):
    """Lines of metrics.jsonl."""
    return [
        {"step": step, "seconds": 60.0 * step, "solver/accuracy": slope * step}
        for step in range(1, steps + 1)
    ]


def report(*arguments) -> str:
    """What `python -m common.report arguments` prints, in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([*map(str, arguments)])
    return printed.getvalue()


def written(folder):
    """report.html of a folder."""
    assert report(folder) == f"{folder / 'report.html'}\n"
    return folder / "report.html"


# ------------------------------------------------------------------ what is recorded
def test_rows_worth_showing():
    def note(player, prompt, reward):
        return {"player": player, "prompt": prompt, "rewards": {"r": reward}}

    flat = [note("a", "p", 1)] * 4
    assert rows_to_show([]) == []
    assert rows_to_show(flat) == [0, 3]
    assert rows_to_show([note("a", "p", 1)]) == [0]
    # the second prompt has contrast, and so comes first; the third is one too many
    contrast = [note("a", "q", 0), note("a", "q", 0), note("a", "q", 1), note("a", "q", 0)]
    rows = [*flat, *contrast, *[note("a", "s", 1)] * 2]
    assert rows_to_show(rows) == [4, 6, 0, 3]
    other = [note("b", "p", 1)] * 2
    assert rows_to_show([*flat, *other]) == [0, 3, 4, 5]  # each player has prompts of its own


@pytest.mark.parametrize("per_token", [False, True])
def test_recorded_is_what_the_update_sees(tmp_path, per_token):
    """Tokens, advantages and rewards of the batch that is trained on, against the batch itself."""
    trainer = make_trainer(tmp_path)
    torch.manual_seed(0)
    first, second = trainer.train_dataset[0], trainer.train_dataset[3]
    batch = trainer.rollout("generator", [first] * 4 + [second] * 4)
    shape = batch["completion_mask"].shape
    batch["advantages"] = torch.randn(shape if per_token else shape[:1])
    batch["components"] = {"outcome": torch.randn(8), "step": torch.randn(shape)}
    batch["notes"][0]["of the script"] = [1, None]
    trainer.create_optimizer()
    trainer.update(batch)
    rows, lost = read_lines(tmp_path / "rollouts.jsonl")
    assert lost == 0 and 3 <= len(rows) <= 4
    chosen = rows_to_show(batch["notes"])
    for row, i in zip(rows, chosen, strict=True):
        ids = batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist()
        A = batch["advantages"][i].tolist()
        assert row["step"] == 1 and row["player"] == "generator"
        assert row["length"] == len(ids) == len(row["tokens"])
        assert "".join(row["tokens"]) == trainer.processing_class.decode(ids)
        expected = A[: len(ids)] if per_token else [A] * len(ids)
        assert row["advantages"] == pytest.approx(expected, rel=5e-4)
        for name, term in batch["components"].items():
            expected = term[i].expand(shape[1])[: len(ids)].tolist()
            assert row["components"][name] == pytest.approx(expected, rel=5e-4)
        assert row["rewards"] == {"outcome_reward": batch["rewards"][i].item()}
        assert row["prompt"] == (first if i < 4 else second)["question"]
    assert [row.get("of the script") for row in rows][chosen.index(0)] == [1, None]


def test_recorded_answers_are_cut_and_the_rest_is_counted(tmp_path, real_tokenizer):
    T = RECORDED_TOKENS + 88
    ones = torch.ones(1, T, dtype=torch.long)
    batch = {"completion_ids": 9 * ones, "completion_mask": ones, "advantages": torch.ones(1)}
    batch["notes"] = [{"player": "generator", "prompt": "p", "rewards": {}}]
    record(batch, tmp_path / "rollouts.jsonl", 7, real_tokenizer)
    (row,), _ = read_lines(tmp_path / "rollouts.jsonl")
    assert row["step"] == 7 and row["length"] == T
    assert len(row["tokens"]) == len(row["advantages"]) == RECORDED_TOKENS


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
    from transformers import AutoTokenizer

    if not (DATA / "qwen2.5-tokenizer").exists():
        pytest.skip("set DUET_DATA to a folder with qwen2.5-tokenizer/")
    return AutoTokenizer.from_pretrained(DATA / "qwen2.5-tokenizer")


def test_resuming_forgets_what_came_after_the_checkpoint(tmp_path):
    from common.run import Run

    steps = accuracy(4)
    evaluation = {"step": 2, "seconds": 121.0, "eval/solver/accuracy": 0.5}
    made_up(tmp_path, [*steps[:2], evaluation, *steps[2:]], [rollout(s) for s in (1, 2, 3, 4)])
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write('{"step": 1, "cut sh')
    run = Run(tmp_path, "made", Path("checkpoint-2"), None)
    assert run.spent == 121.0 and run.evaluations == [evaluation]
    run._forget_what_came_later()
    assert read_lines(tmp_path / "metrics.jsonl") == ([*steps[:2], evaluation], 0)
    assert read_lines(tmp_path / "rollouts.jsonl") == ([rollout(1), rollout(2)], 0)
    Run(tmp_path, "made", None, None)._forget_what_came_later()
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert not (tmp_path / name).read_text()


# ------------------------------------------------------------------ a run of every script, in the
# browser
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_token_carries_the_advantage_in_the_file(browser, finished, script):
    folder, *_ = finished(script)
    look(browser, folder / "report.html")  # as the run left it
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    steps = sorted({row["step"] for row in rows})
    wanted = json.loads((folder / "args.json").read_text())["steps"]
    assert steps == list(range(1, wanted + 1))
    found = []
    for place in range(len(steps)):
        at_step(browser, place)
        tokens = f"{TOKENS}.map(token => [token.textContent, token.dataset.advantage])"
        found += each(browser, "[data-row]", tokens)
    shown = Counter(tuple((text, float(value)) for text, value in answer) for answer in found)
    assert shown == Counter(tuple(zip(row["tokens"], row["advantages"])) for row in rows)
    assert any(value for row in rows for value in row["advantages"])
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_page_can_be_used_without_an_error(browser, finished, script):
    folder, *_ = finished(script)
    look(browser, folder / "report.html")
    try_all(browser)
    charts = each(browser, "figure svg", "[e.querySelectorAll('path').length, e.innerHTML]")
    run = read_run(folder)
    sections = Counter(panel["section"] for panel in run_data(run)["panels"])
    assert len(charts) == sections.total() and sections["curves"] >= 2
    for paths, text in charts:
        assert paths > 0 and "NaN" not in text and "Infinity" not in text
    shown = re.sub(r"\s+", " ", browser.find_element("id", "run").text)
    assert command(run) in shown and run["about"].splitlines()[0] in shown
    assert ask(browser, "performance.getEntriesByType('resource').length") == 0
    assert browser.get_log("browser") == []
    wide, limit = width(browser, folder / "report.html", 400)
    assert wide <= limit


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_command_repeats_the_run(finished, script):
    """Read as a user's shell and the script would: every argument as it was."""
    folder, *_ = finished(script)
    words = shlex.split(command(read_run(folder)))
    assert words[:2] == ["python", script]
    again = tyro.cli(importlib.import_module(Path(script).stem).Args, args=words[2:])
    args = json.loads((folder / "args.json").read_text())
    assert dataclasses.asdict(again) == {**args, "out": None}


def test_pandas_reads_the_rollouts_in_one_line(finished):
    table = pandas.read_json(finished("tango.py")[0] / "rollouts.jsonl", lines=True)
    columns = "step player prompt rewards length tokens advantages verdicts gold".split()
    assert {*columns} <= {*table}
    assert (table.tokens.map(len) == table.advantages.map(len)).all()


def test_verdicts_stand_beside_gold(browser, finished):
    """Those of every step of a solution are the ones in the file; a frame is where they differ."""
    folder, *_ = finished("tango.py")
    look(browser, folder / "report.html")
    rows, _ = read_lines(folder / "rollouts.jsonl")
    steps = sorted({row["step"] for row in rows})
    solutions = [row for row in rows if row["player"] == "generator"]
    assert solutions and any(row["verdicts"] for row in solutions)
    mark = "[mark.textContent, mark.classList.contains('differs')]"
    steps_of = "[...e.querySelectorAll('.marks')]"
    marks = f"{steps_of}.map(step => [...step.children].map(mark => {mark}))"
    for step in sorted({row["step"] for row in solutions}):
        at_step(browser, steps.index(step))
        shown = each(browser, "[data-row]", marks)
        of_step = [row for row in solutions if row["step"] == step]
        for row, answer in zip(of_step, shown, strict=True):
            assert answer == expected_marks(row)


def expected_marks(row: dict) -> list[list]:
    """[text, whether it is framed] of the marks of each step of a solution."""
    count = len(re.findall(r"<step>.*?</step>", "".join(row["tokens"]), re.DOTALL))
    verdicts = (row["verdicts"] + [None] * count)[:count]
    sign, found = {True: "✓", False: "✗", None: "·"}, []
    for verdict, gold in zip(verdicts, row["gold"], strict=True):
        differs = verdict is not None and verdict != gold
        verifier = [[f"V {sign[verdict]}", differs]] if row["verdicts"] else []
        found.append([*verifier, [f"G {sign[gold]}", differs]])
    return found


def test_cures_table_is_the_one_that_was_rewarded(finished):
    """The first program of a group has the table; its reward is the share of the task's own tests
    in the table's first row.
    """
    folder, *_ = finished("cure.py")
    rows = [row for row in read_lines(folder / "rollouts.jsonl")[0] if "table" in row]
    assert rows
    M = json.loads((folder / "args.json").read_text())["group_size"]
    for row in rows:
        passes, own = row["table"]["passes"], row["table"]["own"]
        assert len(passes) == M and {len(line) for line in passes} == {own + M}  # M generated tests
        if row["player"] == "coder":
            share = sum(passes[0][:own]) / own
            assert row["rewards"]["total"] == pytest.approx(share)


# ------------------------------------------------------------------ pointer, keyboard, width,
# colours
@pytest.fixture(scope="module")
def example(tmp_path_factory):
    tokens = ["<step>", "4", " ", "+\n", "5", "</step>", "\n", "9"]
    judged = {"verdicts": [False], "gold": [True]}
    judged["advantages"] = [0.1234, -1.5, 0.0, 1e-05, 2.0, -2.0, 0.3, 0.7]
    rows = [rollout(step, "solver", tokens, **judged) for step in (1, 2, 5)]
    table = {"passes": [[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]], "own": 2}
    rows.append(rollout(5, "coder", ["x"], prompt="program", table=table))
    proposal = {"prompt": "ask", "generation": 3, "quality": 0.75}
    rows.append(rollout(5, "proposer", ["<question>2+2?</question>"], **proposal))
    players = ["solver", "solver", "verifier", "verifier", "solver"]
    metrics = [row | {f"{name}/loss": 0.1} for row, name in zip(accuracy(5), players)]
    return written(made_up(tmp_path_factory.mktemp("example") / "run", metrics, rows, steps=5))


def test_pointing_at_a_token_shows_its_advantage(browser, example):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.wait import WebDriverWait

    look(browser, example)
    row = next(row for row in read_lines(example.parent / "rollouts.jsonl")[0] if row["step"] == 5)
    tokens = browser.find_elements("css selector", "#answers [data-row] .tokens span")
    for token, text, value in zip(tokens, row["tokens"], row["advantages"]):
        if text.strip():
            browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", token)
            tip, places = browser.find_element("id", "tip"), itertools.cycle((0, 1))

            def pointed_at(_, token=token, tip=tip, places=places):
                """Scrolling hides it, which on a busy machine may come after the pointer."""
                move = ActionChains(browser).move_to_element_with_offset
                move(token, next(places), 0).perform()
                return tip.is_displayed()

            WebDriverWait(browser, 120).until(pointed_at)
            quoted, number = tip.text.rsplit(maxsplit=1)
            assert json.loads(quoted) == text and float(number) == value
    colours = each(browser, "#answers .tokens span", "e.style.background")[:6]
    assert ["plus" in c or "minus" in c for c in colours] == [True, True, False, True, True, True]
    assert "plus" in colours[0] and "minus" in colours[1] and "minus" in colours[5]


def test_terms_of_an_advantage_and_what_stands_out(browser, tmp_path):
    """A term is shown in place of the sum where a row has it; the first lines say what is odd."""
    terms = {"outcome": [1.0, 1.0, 1.0], "step": [-0.5, -1.5, -2.5]}
    metrics = [row | {"solver/kl": 2.0} for row in accuracy(3)]
    rows = [rollout(1, components=terms), rollout(1, prompt="without terms")]
    look(browser, written(made_up(tmp_path / "run", metrics, rows)))
    said = "The solver is 2.0 nats per token away from the base."
    assert each(browser, "header .remark", "e.textContent") == [said]
    numbers = lambda: each(browser, TOKENS_SHOWN, "Number(e.dataset.advantage)")  # noqa: E731
    assert numbers() == [0.5, -0.5, -1.5] * 2
    assert each(browser, TOKENS_SHOWN, "e.dataset.terms")[:4] == [
        "outcome 1, step -0.5",
        "outcome 1, step -1.5",
        "outcome 1, step -2.5",
        "",
    ]
    click(browser, "fieldset[aria-label=part] input[value=step]")
    assert numbers() == [*terms["step"], 0.5, -0.5, -1.5]
    calm = made_up(tmp_path / "calm", accuracy(3))
    look(browser, written(calm))
    assert "No health figure stands out" in browser.find_element("css selector", "header").text
    assert each(browser, "header .remark", "1") == browser.get_log("browser") == []


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
        active = "document.activeElement"
        seen.append(ask(browser, f"[{active}.tagName, {active}.dataset.i ?? null]"))
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
    assert "solver/accuracy 0.2" in legend and "step 2" in legend
    assert browser.get_log("browser") == []


def test_phases_are_shaded(browser, example):
    look(browser, example)
    expected = [[0, 1, "solver"], [2, 3, "verifier"], [4, 4, "solver"]]
    assert phases(read_run(example.parent)) == expected
    first = "figure:first-of-type svg"
    shaded = each(browser, f"{first} rect", "['x', 'width'].map(key => +e.getAttribute(key))")
    lines = each(browser, f"{first} .grid", "['x1', 'x2'].map(key => +e.getAttribute(key))")
    # steps run from 1 to 5, and step 3 begins where step 2 has ended: from 2 to 4 of 1 to 5
    left, right = lines[0]
    ((x, width),) = shaded
    assert (x - left) / (right - left) == pytest.approx(0.25, abs=0.01)
    assert width / (right - left) == pytest.approx(0.5, abs=0.01)


def test_pass_table_and_questions(browser, example):
    look(browser, example)
    classes = "[e.className, [...e.children].map(cell => cell.className)]"
    table = each(browser, ".matrix tr", classes)
    kinds, ((_, *head), *rows) = [kind for kind, _ in table], [cells for _, cells in table]
    assert kinds == ["", "right", "right", ""]  # programs 1 and 2 pass both of the task's own tests
    passes = [["pass" in cell.split() for cell in cells[1:]] for cells in rows]
    assert passes == [[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]]
    # a line before the generated tests; bold are those that all right programs pass
    assert ["first" in cell for cell in rows[0][1:]] == [False, False, True, False]
    assert ["good" in cell for cell in head] == [True, True, False, True]
    cells = each(browser, "#questions td", "e.textContent")
    assert cells == ["3", "5", "2+2?", "0.75", "1"]


def width(browser, path, pixels):
    """(width of the page's content, width of the window)."""
    look(browser, path, pixels)
    open_all(browser)
    page = "document.documentElement"
    return ask(browser, f"[{page}.scrollWidth, {page}.clientWidth]")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readable_at_400_pixels_and_in_all_colours(browser, example, scheme):
    """Nothing sticks out, and a token of the strongest colour has contrast 4.5 : 1 or more."""
    wide, limit = width(browser, example, 400)
    assert wide <= limit <= 400
    look(browser, example, 1280, scheme)
    at_step(browser, 0)
    card = numbers(each(browser, ".question", "getComputedStyle(e).backgroundColor")[0])
    assert (sum(card) < 1) == (scheme == "dark")
    colours = "[getComputedStyle(e).color, getComputedStyle(e).backgroundColor]"
    tokens = each(browser, ".tokens span", colours)
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
    def hostile(text):
        more = {text + "x": text, "judgement": text * 3, "credit": text, "odd": [{"deep": [text]}]}
        more |= {"prompt": text, "rewards": {text: 1.0}, "parts": [text], "verdicts": [True]}
        return rollout(1, text, [text, "<step>", text, "</step>"], **more)

    rows = [hostile(text) for text in HOSTILE]
    question = "<question>" + "".join(HOSTILE[:6]) + "</question>"
    rows.append(rollout(1, "proposer", [question], prompt="ask", generation=1))
    metrics = accuracy(1)[0] | {f"solver/{text}": 0.5 for text in HOSTILE}
    curves = {"<b>": ["solver/accuracy"], HOSTILE[0]: ["solver/accuracy"]}
    about = {"about": "</script>" + HOSTILE[1], "curves": curves}
    folder = tmp_path / "<b>run&"
    made_up(folder, [metrics], rows, **about, note=HOSTILE[1], steps=1)
    look(browser, written(folder))
    open_all(browser)
    shown = each(browser, "[data-row]", f"{TOKENS}.map(token => token.textContent)")
    assert sorted(shown) == sorted(row["tokens"] for row in rows)
    prompts = each(browser, ".prompt", "e.textContent")
    assert sorted(prompts) == sorted({row["prompt"] for row in rows})
    assert ask(browser, "window.hit ?? null") is None
    # the page has made all elements itself
    kinds = ["script", "style", "img", "iframe", "b:not(.facts b, .legend b)"]
    found = [len(browser.find_elements("css selector", kind)) for kind in kinds]
    assert found == [2, 1, 0, 0, 0]
    assert browser.get_log("browser") == []


def test_the_policy_lets_nothing_else_run_or_be_fetched(browser, example):
    look(browser, example)
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hit = 1';"
        "document.body.append(s);"
        "const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i);"
        "fetch('http://127.0.0.1:9/').then(() => window.hit = 2, () => 0)"
    )
    assert ask(browser, "window.hit ?? null") is None
    refused = [entry["message"] for entry in browser.get_log("browser")]
    assert sum("Content Security Policy" in message for message in refused) >= 3, refused


# ------------------------------------------------------------------ size
def test_three_hundred_steps_stay_under_three_megabytes(browser, tmp_path):
    """Rows as large as they get, 70 metrics; both players are on the page, which says that steps
    are left out.
    """
    words = [f"word{i} " for i in range(RECORDED_TOKENS)]
    A = [float(f"{math.sin(i):.4g}") for i in range(RECORDED_TOKENS)]
    long = {"tokens": words, "advantages": A, "judgement": "j" * 2000}
    rows = [
        rollout(step, "generator" if step % 4 else "verifier", **long, prompt=f"{k} " * 300)
        for step in range(1, 301)
        for k in range(4)
    ]
    names = [f"generator/metric_{k}" for k in range(70)]
    metrics = [
        {"step": step, "seconds": float(step)} | {n: math.cos(step + len(n)) for n in names}
        for step in range(1, 301)
    ]
    path = written(made_up(tmp_path / "long", metrics, rows))
    assert path.stat().st_size < 3_000_000
    kept, recorded = rollouts_for_page(rows)
    players = Counter(row["player"] for row in kept)
    assert recorded == 300 and kept[-1]["step"] == 300
    assert 2 <= players["generator"] / players["verifier"] <= 4
    look(browser, path)
    steps = len({row["step"] for row in kept})
    shown = browser.find_element("id", "rollouts").text
    assert f"{steps} of 300 recorded steps" in shown
    assert browser.get_log("browser") == []


def test_a_long_run_is_thinned_evenly():
    """Not by an even stride over all rows, which could miss a player whose turn is every fourth."""
    keys = ["verifier/loss", *["generator/loss"] * 3]
    rows = [{"step": s, "seconds": s, keys[s % 4]: float(s)} for s in range(1, 20_001)]
    for key in ("generator/loss", "verifier/loss"):
        at, y = values({"rows": rows}, key)
        assert POINTS / 2 <= len(at) <= POINTS and at == sorted(at) and at[-1] >= 19_998
        assert [rows[i][key] for i in at] == y
        assert len({b - a for a, b in zip(at[1:], at[2:])}) <= 2


# ------------------------------------------------------------------ comparing runs
@pytest.fixture
def three(tmp_path):
    """Two seeds of one variant, one of another, on different clocks."""

    def evaluated(rows):
        keys = {"step": "step", "seconds": "seconds", "solver/accuracy": "eval/solver/accuracy"}
        return rows + [{keys[k]: v for k, v in row.items()} for row in rows]

    made_up(tmp_path / "a0", evaluated(accuracy(4, 0.1)), lr=0.1, seed=0)
    made_up(tmp_path / "a1", evaluated(accuracy(4, 0.2)), lr=0.1, seed=1)
    made_up(tmp_path / "b0", evaluated(accuracy(3, 0.3)), lr=0.2, seed=0)
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
        present = [y for points in seeds if (y := line(x, points)) is not None]
        assert result["y"][i] == pytest.approx(sum(present) / len(present), rel=1e-4)
        assert result["low"][i] == pytest.approx(min(present), rel=1e-4)
        assert result["high"][i] == pytest.approx(max(present), rel=1e-4)
    apart = [([1, 2], [0.0, 1.0]), ([5, 6], [0.0, 1.0])]
    assert band(apart)["x"] == [1, 2, 5, 6]  # nothing is drawn between them


def test_axes(tmp_path):
    run = read_run(made_up(tmp_path, accuracy(3)))
    assert axes(run) == {"step": [1, 2, 3], "samples": [8, 16, 24], "minutes": [1, 2, 3]}
    counted = [{**row, "co/samples": n} for row, n in zip(accuracy(2), (10, 40))] + [
        {"step": 2, "seconds": 130.0, "eval/x": 1.0}
    ]
    assert axes(read_run(made_up(tmp_path, counted)))["samples"] == [10, 40, 40]


def test_variants_are_told_apart_by_what_differs(three):
    runs = [read_run(folder) for folder in three]
    grouped = {label: [run["folder"] for run in seeds] for label, seeds in variants(runs).items()}
    assert grouped == {"lr 0.1": ["a0", "a1"], "lr 0.2": ["b0"]}
    assert list(variants(runs[:2])) == ["made.py"]


def test_an_edit_of_the_script_makes_another_variant(tmp_path):
    """Else its effect would be taken for the noise of seeds. Comments make none."""
    texts = {"a": "x = 1", "b": "x = 1  # the same", "c": "x = 2", "other": "x = 1"}
    runs = []
    for name, text in texts.items():
        folder = made_up(tmp_path / name, accuracy(2))
        (folder / "made.py").write_text(text)
        runs.append(read_run(folder))
    grouped = {label: [run["folder"] for run in some] for label, some in variants(runs).items()}
    assert grouped == {"code of a": ["a", "b", "other"], "code of c": ["c"]}
    assert list(variants(runs[:2])) == ["made.py"]
    runs[2]["folder"] = "a"  # of another place
    names = ["code of a, number 1", "code of a, number 2"]
    assert list(variants(runs)) == names


def test_comparison(browser, three, tmp_path):
    """By the command, in a process of its own."""
    page_at, image = tmp_path / "c.html", tmp_path / "c.png"
    options = ["--out", page_at, "--png", image, "--x", "minutes"]
    result = run_script("-m", "common.report", *three, *options)
    assert result.returncode == 0, result.stderr
    assert image.read_bytes().startswith(b"\x89PNG") and image.stat().st_size > 10_000
    look(browser, page_at)
    _, first, second = (row.text for row in browser.find_elements("css selector", "#held-out tr"))
    assert first.startswith("lr 0.1 0, 1 4 4 0.600 [0.400, 0.800]")
    assert second.startswith("lr 0.2 0 3 3 0.9")
    for section in ("heldout-curves", "curves"):
        counts = "['.band', '.curve'].map(kind => e.querySelectorAll(kind).length)"
        assert each(browser, f"#{section} svg", counts) == [[1, 2]]  # the first one has two seeds
    try_all(browser)
    assert browser.get_log("browser") == []
    for pixels in (1280, 400):
        wide, limit = width(browser, page_at, pixels)
        assert wide <= limit


def test_runs_of_different_scripts(browser, finished, three, tmp_path):
    others = [finished(script)[0] for script in ("tango.py", "prime.py")]
    report(*others, *three, "--out", tmp_path / "c.html")
    look(browser, tmp_path / "c.html")
    header = browser.find_element("css selector", "header").text
    assert "These are runs of made.py and prime.py and tango.py: only metrics of the same" in header
    assert browser.get_log("browser") == []


# ------------------------------------------------------------------ bad input
def refused(*arguments) -> str:
    """The one sentence with which `python -m common.report arguments` ends, with exit code 2."""
    error = io.StringIO()
    with contextlib.redirect_stderr(error), pytest.raises(SystemExit) as ended:
        report(*arguments)
    assert ended.value.code == 2 and error.getvalue().count("error: ") == 1
    return error.getvalue()


def test_what_is_no_run(tmp_path, three):
    assert f"{tmp_path}: not the folder of a run" in refused(tmp_path)
    assert "no-such: not the folder of a run" in refused(tmp_path / "no-such")
    empty = made_up(tmp_path / "empty", [])
    nothing = "metrics.jsonl is missing or empty; there is nothing to show yet."
    assert f"{empty}: {nothing}" in refused(empty)
    (empty / "metrics.jsonl").unlink()
    assert nothing in refused(*three, empty)
    options = ["--png", tmp_path / "x.png", "--out", tmp_path / "x.html", "--metrics", "no/such"]
    message = refused(*three, *options)
    assert "--metrics no/such: no run has them; there are eval/solver/accuracy" in message
    assert "cannot be written" in refused(three[0], "--out", tmp_path / "no" / "folder" / "x.html")


def test_a_run_that_is_still_writing(browser, tmp_path):
    folder = made_up(tmp_path / "run", accuracy(7), [rollout(7)])
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with open(folder / name, "a") as file:
            file.write('{"step": 8, "prompt": "cut in the mid')
    look(browser, written(folder))
    header = browser.find_element("css selector", "header").text
    assert "still at step 7 of 300" in header
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert f"1 line of {name} could not be read" in header
    assert browser.get_log("browser") == []


NO_ROLLOUTS = ["null", "[1]", '"text"', "12", "{}", "NaN", "\x00", "[" * 5000, '{"step": "1"}']
NO_ROLLOUTS += ['{"step": 1, "player": 1}', '{"step": 1.5, "solver/accuracy": 1}']
NO_ROLLOUTS += [json.dumps(rollout(advantages=[1])), json.dumps(rollout() | {"tokens": [1, 2, 3]})]
NO_ROLLOUTS += [json.dumps(rollout(components=terms)) for terms in ([1], {"a": 1}, {"a": [1]})]
NO_ROLLOUTS += [json.dumps(rollout(components={"a": [1, 2, "</script>"]}))]


@pytest.mark.parametrize("line", NO_ROLLOUTS, ids=lambda line: line[:24])
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
    metrics = [
        {"step": i, "seconds": 1.0, "solver/accuracy": value, "solver/kl": 0.0}
        for i, value in enumerate(odd, start=1)
    ]
    row = rollout(1, advantages=[math.nan, 1.0, -math.inf])
    look(browser, written(made_up(tmp_path / "run", metrics, [row])))
    paths = each(browser, "path", "e.getAttribute('d')")
    assert paths and not any("NaN" in path or "Infinity" in path for path in paths)
    assert browser.get_log("browser") == []


def test_no_rollouts_no_docstring_no_curves(browser, tmp_path):
    folder = made_up(tmp_path / "run", accuracy(1), about="", curves={})
    (folder / "rollouts.jsonl").unlink()
    look(browser, written(folder))
    assert "This run has recorded none." in browser.find_element("id", "rollouts").text
    assert [panel["keys"] for panel in panels(["solver/accuracy"], {})] == [["solver/accuracy"]]
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("name", ["args.json", "versions.json", "about.json"])
def test_read_run_says_which_file_it_cannot_read(tmp_path, name):
    made_up(tmp_path, accuracy(1))
    (tmp_path / name).write_text("{")
    with pytest.raises(UserError, match=f"not the folder of a run; {name} cannot be read"):
        read_run(tmp_path)


def test_the_page_is_ascii_where_it_must_be():
    """Data can neither end its element nor hold a character that a browser might misread."""
    text = page({"kind": "run", "x": HOSTILE})
    data = text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert data.isascii() and "<" not in data and json.loads(data)["x"] == HOSTILE
