"""rollouts.jsonl is what the update saw; report.html shows it, and model output stays text."""

import dataclasses
import json
import math
import re
import shlex
import shutil
from collections import Counter
from types import SimpleNamespace

from common.core.errors import UserError, visible
from common.run.report import build, compare
from common.run.report.__main__ import main
from common.run.report.build import read_run
from common.run.report.recording import RECORDED_TOKENS, read_lines, rows_to_show, token_texts
from common.run.session import Run

import pytest
import torch
import tyro
from conftest import make_trainer, module_of, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer


# ------------------------------------------------------------------ made-up runs
def rollout(step=1, player="solver", tokens=("<step>", "1", "</step>"), **more):
    """A line of rollouts.jsonl."""
    tokens = list(tokens)
    row = {"step": step, "player": player, "prompt": "1 + 1", "rewards": {"right": 1.0}}
    row |= {"length": len(tokens), "tokens": tokens, "components": {}}
    return row | {"advantages": [0.5 - i for i in range(len(tokens))]} | more


CURVES = {"solver": ["solver/accuracy"]}


def made_up(folder, metrics, rollouts=(), about="A script.", curves=CURVES, **arguments):
    """The folder of a run of made.py that never was."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = {"seed": 0, "steps": 300, "questions": 4, "group_size": 2} | arguments
    files = {
        "args.json": arguments,
        "versions.json": {"questions": 2**32 - 1, "processes": 1, "device": "none"},
        "about.json": {"script": "made", "about": about, "curves": curves},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    for name, rows in (("metrics.jsonl", metrics), ("rollouts.jsonl", rollouts)):
        write_rows(folder / name, rows)
    return folder


def accuracy(steps, slope=0.1):
    """Lines of metrics.jsonl."""
    return [
        {"step": step, "seconds": 60.0 * step, "solver/accuracy": slope * step}
        for step in range(1, steps + 1)
    ]


def data_on(html: str) -> dict:
    """The data of a page, as a browser reads it: JSON without NaN and without `<`."""
    text = html.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert text.isascii() and "<" not in text
    return json.loads(text, parse_constant=pytest.fail)


# ------------------------------------------------------------------ what is recorded
def test_rows_worth_showing():
    def note(player, prompt, reward):
        return {"player": player, "prompt": prompt, "rewards": {"r": reward}}

    flat = [note("a", "p", 1)] * 4
    assert [rows_to_show(rows) for rows in ([], flat[:1], flat)] == [[], [0], [0, 3]]
    # the second prompt has contrast, and so comes first; the third is one too many
    contrast = [note("a", "q", 0), note("a", "q", 0), note("a", "q", 1), note("a", "q", 0)]
    rows = [*flat, *contrast, *[note("a", "s", 1)] * 2]
    assert rows_to_show(rows) == [4, 6, 0, 3]
    other = [note("b", "p", 1)] * 2
    assert rows_to_show([*flat, *other]) == [0, 3, 4, 5]  # the prompts of each player are separate


@pytest.mark.parametrize("per_token, limit", [(False, RECORDED_TOKENS), (True, 8)])
def test_recorded_is_what_the_update_sees(tmp_path, monkeypatch, per_token, limit):
    monkeypatch.setattr("common.run.report.recording.RECORDED_TOKENS", limit)
    trainer = make_trainer(tmp_path)
    torch.manual_seed(0)
    first, second = trainer.train_dataset[0], trainer.train_dataset[3]
    batch = trainer.rollout("generator", [first] * 4 + [second] * 4)
    shape = batch.completion_mask.shape
    batch.advantages = torch.randn(shape if per_token else shape[:1])
    batch.components = {"outcome": torch.randn(8), "step": torch.randn(shape)}
    batch.notes[0]["of the script"] = [1, None, torch.tensor(0.5)]
    trainer.create_optimizer()
    trainer.update(batch)
    rows, lost = read_lines(tmp_path / "rollouts.jsonl")
    assert lost == 0 and 3 <= len(rows) <= 4
    chosen = rows_to_show(batch.notes)
    for row, i in zip(rows, chosen, strict=True):
        ids = batch.completion_ids[i][batch.completion_mask[i].bool()].tolist()
        A = batch.advantages[i].tolist()
        assert row["step"] == 1 and row["player"] == "generator"
        T = min(len(ids), limit)
        assert row["length"] == len(ids) and len(row["tokens"]) == T
        assert "".join(row["tokens"]) == trainer.processing_class.decode(ids[:T])
        expected = A[:T] if per_token else [A] * T
        assert row["advantages"] == pytest.approx(expected, rel=5e-4)
        for name, term in batch.components.items():
            expected = term[i].expand(shape[1])[:T].tolist()
            assert row["components"][name] == pytest.approx(expected, rel=5e-4)
        assert row["rewards"] == {"outcome_reward": batch.rewards[i].item()}
        assert row["prompt"] == (first if i < 4 else second)["question"]
    assert [row.get("of the script") for row in rows][chosen.index(0)] == [1, None, 0.5]


@settings(max_examples=60)
@given(text=st.text(max_size=40), cut=st.integers(0, 8))
def test_token_texts_are_the_text(real_tokenizer, text, cut):
    """Whatever bytes are cut in two: one piece a token, together what the tokenizer says."""
    ids = real_tokenizer(text + "日本 é 🙂", add_special_tokens=False).input_ids
    ids = ids[cut:] if cut % 2 else ids[: len(ids) - cut]
    pieces = token_texts(ids, real_tokenizer)
    assert len(pieces) == len(ids) and "".join(pieces) == real_tokenizer.decode(ids)


@pytest.fixture(scope="module")
def real_tokenizer(real_data):
    return AutoTokenizer.from_pretrained(real_data / "qwen2.5-tokenizer")


# ------------------------------------------------------------------ from a folder to the data
def test_the_command_repeats_the_run():
    Args = module_of("tango.py").Args
    args = dataclasses.asdict(Args(dataset="a b'c", four_bit=True, seed=7))
    words = shlex.split(build.command({"script": "tango", "args": args, "versions": {}}))
    assert words[:2] == ["python", "tango.py"]
    assert dataclasses.asdict(tyro.cli(Args, args=words[2:])) == args


def test_panels():
    """CURVES first, then health with what the script adds to it, each metric of the rest once."""
    curves = {"both": ["solver/accuracy", "judge/accuracy"], "health": ["co/new", "co/flattery"]}
    keys = "judge/kl co/new co/flattery solver/kl judge/accuracy judge/a solver/a".split()
    found = [(p["section"], p["title"], p["keys"]) for p in build.panels(keys, curves)]
    assert found == [
        ("curves", "both", ["judge/accuracy"]),
        ("health", "reward minus gold", ["co/flattery"]),
        ("health", "KL to the base", ["solver/kl", "judge/kl"]),
        ("health", "co/new", ["co/new"]),
        ("all", "a", ["solver/a", "judge/a"]),
    ]


def test_a_long_curve_is_thinned_evenly():
    """Not by every n-th row, which could miss a player whose turn is every fourth."""
    keys = ["verifier/loss", *["generator/loss"] * 3]
    rows = [{"step": s, "seconds": s, keys[s % 4]: float(s)} for s in range(1, 20_001)]
    for key in ("generator/loss", "verifier/loss"):
        (series,) = build.curve({"metrics": rows}, key, "label", 0)
        x, y = series["x"], series["y"]
        assert build.POINTS / 2 <= len(x) <= build.POINTS and x == sorted(x) and x[-1] >= 19_997
        assert [rows[step - 1][key] for step in x] == y
        assert len({b - a for a, b in zip(x[1:], x[2:])}) <= 2


def test_a_page_has_as_many_rollouts_as_fit_and_both_players():
    long = {"tokens": ["a word "] * 400, "advantages": [0.5] * 400}
    rows = [
        rollout(step, "generator" if step % 4 else "verifier", **long)
        for step in range(1, 301)
        for _ in range(4)
    ]
    kept, recorded = build.rollouts_for_page(rows)
    assert recorded == 300 and 0.9 < len(json.dumps(kept)) / build.ROLLOUT_BYTES < 1.1
    steps = [row["step"] for row in kept]
    assert steps == sorted(steps) and steps[-1] == 300 and {*Counter(steps).values()} == {4}
    players = Counter(row["player"] for row in kept)
    assert 1.5 <= players["generator"] / players["verifier"] <= 6
    assert build.rollouts_for_page([]) == ([], 0)


@pytest.mark.parametrize("name", ["metrics", "rollouts"])
def test_a_line_that_is_half_written_is_counted(tmp_path, name):
    folder = made_up(tmp_path, accuracy(2), [rollout(1)])
    with open(folder / f"{name}.jsonl", "a") as file:
        file.write('{"step": 8, "cut')
    run = read_run(folder)
    assert run["rollouts"] == [rollout(1)] and run["metrics"] == accuracy(2)
    (remark,) = data_on(build.page(build.run_data(run)))["remarks"]
    assert remark.startswith(f"1 line of {name}.jsonl could not be read")


def test_what_is_no_run(tmp_path, capsys):
    for name, content in (("args", b"{"), ("versions", b"\xff"), ("about", None)):
        file = made_up(tmp_path / name, accuracy(1)) / f"{name}.json"
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(UserError, match=f"not the folder of a run; {name}.json cannot be read"):
            read_run(tmp_path / name)
    empty = made_up(tmp_path / "empty", [])
    with pytest.raises(SystemExit, match="2"):
        main(made_up(tmp_path / "run", accuracy(1)), (empty,))
    error = f"error: {empty}: metrics.jsonl has no line yet; there is nothing to show.\n"
    assert capsys.readouterr().err == error


# ------------------------------------------------------------------ comparing runs
@pytest.fixture
def three(tmp_path):
    """Two seeds of one variant, one of another, on different clocks."""

    def evaluated(rows):
        keys = {"step": "step", "seconds": "seconds", "solver/accuracy": "eval/solver/accuracy"}
        return [x for row in rows for x in (row, {keys[k]: v for k, v in row.items()})]

    made_up(tmp_path / "a0", evaluated(accuracy(4, 0.1)), lr=0.1, seed=0)
    made_up(tmp_path / "a1", evaluated(accuracy(4, 0.2)), lr=0.1, seed=1)
    made_up(tmp_path / "b0", evaluated(accuracy(3, 0.3)), lr=0.2, seed=0)
    return [tmp_path / name for name in ("a0", "a1", "b0")]


def test_a_comparison_is_an_overlay_of_runs(three, capsys):
    """Beside the folder of the first run: a panel per metric, in it a series per run."""
    main(three[0], (*three[1:],))
    path = three[0].parent / "comparison.html"
    assert capsys.readouterr().out.strip() == str(path)
    panels = data_on(path.read_text())["panels"]
    found = [(panel["section"], panel["title"]) for panel in panels]
    assert found == [("held out", "eval/solver/accuracy"), ("curves", "solver/accuracy")]
    for panel in panels:
        assert [
            (line["label"], line["color"], line["x"], line["y"]) for line in panel["series"]
        ] == [
            ("lr 0.1", 0, [1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4]),
            ("lr 0.1", 0, [1, 2, 3, 4], [0.2, 0.4, 0.6, 0.8]),
            ("lr 0.2", 1, [1, 2, 3], [0.3, 0.6, 0.9]),
        ]


def test_variants_are_told_apart_by_what_differs(three):
    """By arguments, or by the script: else an edit's effect would pass for the noise of seeds."""

    def groups(folders):
        found = compare.variants([read_run(folder) for folder in folders])
        return {label: [run["folder"] for run in runs] for label, runs in found.items()}

    assert groups(three) == {"lr 0.1": ["a0", "a1"], "lr 0.2": ["b0"]}
    assert groups(three[:2]) == {"made.py": ["a0", "a1"]}
    (three[0] / "made.py").write_text("x = 1")
    (three[1] / "made.py").write_text("x = 2")
    # the first digits of each one's SHA-256
    assert groups(three[:2]) == {"made.py 8ff436": ["a0"], "made.py 1431b9": ["a1"]}


# ------------------------------------------------------------------ in a browser
@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a window and without a network, with a separate profile."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    quiet = "gpu background-networking component-update sync default-apps extensions".split()
    flags = ["headless", "no-sandbox", "no-first-run", *(f"disable-{name}" for name in quiet)]
    for flag in [*flags, f"user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def look(browser, path):
    """Open a page, and what it has folded."""
    browser.get(path.resolve().as_uri())
    assert browser.find_elements("css selector", "main section"), browser.get_log("browser")
    each(browser, "summary", "e.click()")


def ask(browser, script):
    """The value of a JavaScript expression, as JSON: WebDriver would change lone surrogates."""
    return json.loads(browser.execute_script(f"return JSON.stringify({script})"))


def pick(browser, i):
    """Choose part i of the advantages, of which 0 is their sum."""
    browser.execute_script(
        "const s = document.querySelector('select'); s.selectedIndex = arguments[0];"
        "s.dispatchEvent(new Event('change'))",
        i,
    )


def each(browser, selector, expression):
    """The value of an expression of `e` for every element that a selector finds."""
    return ask(browser, f"[...document.querySelectorAll(`{selector}`)].map(e => {expression})")


HOSTILE = [
    "<script>window.hit = 1</script>",
    "</script><script>window.hit = 2</script>",
    "<!--<script>",
    "<img src=x onerror='window.hit = 3'>",
    "\"'`${window.hit = 4}`&lt;&#60;b>",
    "\u2028\u2029\u0000\ufeff\ufffe",
    "\ud800 alone \udfff",
    "{{data}} {{script hash}} {{style hash}}",
    "<svg onload=window.hit=6><style>*{display:none}</style></noscript><script>hit = 7</script>",
    "\u202egnp.exe \x1b]0;owned\x07\x1b[2J\r",
]


@pytest.fixture
def hostile(tmp_path):
    """A run whose every text is hostile, with metrics that are no numbers: (folder, its rows)."""

    def row(text):
        more = {text + "x": text, "judgement": text * 3, "credit": text, "odd": [{"deep": [text]}]}
        more |= {"prompt": text, "rewards": {text: 1.0}, "parts": [text], "verdicts": [True]}
        more |= {"gold": [False], "components": {text: [1.0, 2.0, 3.0, 4.0]}}
        return rollout(1, text, [text, "<step>", text, "</step>"], **more)

    rows = [row(text) for text in HOSTILE]
    question = "<question>" + "".join(HOSTILE[:6]) + "</question>"
    table = {"passes": [[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]], "own": 2}
    rows.append(rollout(1, "proposer", [question], prompt="ask", generation=1, table=table))
    odd = [math.nan, math.inf, -math.inf, None, "text", 1e300, 0.5]
    metrics = [{"step": i, "solver/accuracy": x, "solver/kl": 2.0} for i, x in enumerate(odd, 1)]
    metrics[0] |= {f"solver/{text}": 0.5 for text in HOSTILE}
    metrics += [{"step": i, "eval/solver/accuracy": x} for i, x in ((8, None), (9, 0.5))]
    metrics = [{"seconds": 1.0, **row} for row in metrics]
    curves = {"<b>": ["solver/accuracy"], HOSTILE[0]: ["solver/accuracy"]}
    about = {"about": "</script>" + HOSTILE[1], "curves": curves}
    folder = made_up(tmp_path / "<b>run&", metrics, rows, **about, note=HOSTILE[1], steps=1)
    main(folder)
    return folder, rows


def test_hostile_output_is_data(hostile):
    folder, rows = hostile
    data = data_on((folder / "report.html").read_text())
    assert data["rollouts"] == rows and data["args"]["note"] == HOSTILE[1]
    assert data["health"] == ["The solver is 2.0 nats per token away from the base."]
    (accuracy, *_), *_ = (panel["series"] for panel in data["panels"])
    assert (accuracy["x"], accuracy["y"]) == ([6, 7], [1e300, 0.5])
    assert data["held_out"]["rows"] == [["solver/accuracy", None, 0.5, 0.5, 9, ""]]
    run = read_run(folder)
    run["rollouts"] = [rollout(advantages=[math.nan, 1.0, -math.inf])]
    (row,) = data_on(build.page(build.run_data(run)))["rollouts"]
    assert row["advantages"] == [None, 1.0, None]


def test_what_a_model_wrote_does_not_steer_a_terminal(tmp_path, capsys):
    wrote = [rollout(1, prompt="a\x1b[2J\nb", tokens=["\x1b]0;owned\x07", "\t\u202ec\x9b\r"])]
    Run._show(SimpleNamespace(folder=made_up(tmp_path, [], wrote)), 1)
    shown = "a\\u001b[2J\nb\n--- solver\n\\u001b]0;owned\\u0007\t\\u202ec\\u009b\\u000d\n"
    assert capsys.readouterr().out == f"--- {shown}--- right 1.00\n"


def test_hostile_output_stays_text(browser, hostile):
    folder, rows = hostile
    look(browser, folder / "report.html")
    token = "[token.textContent, parseFloat(token.title)]"
    tokens = f"[...e.querySelectorAll('.tokens span')].map(token => {token})"
    shown = sorted(each(browser, ".body", tokens))
    tokens = [[*map(visible, row["tokens"])] for row in rows]
    expected = [[*map(list, zip(t, row["advantages"]))] for t, row in zip(tokens, rows)]
    assert shown == sorted(expected)
    prompts = each(browser, ".prompt", "e.textContent")
    assert sorted(prompts) == sorted({visible(row["prompt"]) for row in rows})
    said = each(browser, "header .remark", "e.textContent")
    assert said == ["The solver is 2.0 nats per token away from the base."]
    paths = each(browser, "path", "e.getAttribute('d')")
    assert paths and not any("NaN" in path or "Infinity" in path for path in paths)
    # programs 1 and 2 pass both of the task's own tests, and all generated tests but the third
    good = each(browser, ".matrix th", "e.classList.contains('good')")
    assert good == [True, True, False, True, True, True, False]
    marks = {*each(browser, ".marks", "e.textContent")}
    assert marks == {"V \u2713G \u2717"}
    for i in range(1 + len(HOSTILE)):
        pick(browser, i)
    assert ask(browser, "window.hit ?? null") is None
    # the page has made all elements itself
    kinds = ["script", "style", "img", "iframe", "b:not(.facts b, .legend b)"]
    found = [len(browser.find_elements("css selector", kind)) for kind in kinds]
    assert found == [2, 1, 0, 0, 0]
    assert browser.get_log("browser") == []
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hit = 1';"
        "document.body.append(s); const i = new Image(); i.src = 'http://127.0.0.1:9/x.png';"
        "fetch('http://127.0.0.1:9/').then(() => window.hit = 2, () => 0)"
    )
    assert ask(browser, "window.hit ?? null") is None
    refused = [entry["message"] for entry in browser.get_log("browser")]
    assert sum("Content Security Policy" in message for message in refused) >= 3, refused


SHADES = """[...e.querySelectorAll('.tokens span')].map(token =>
    (token.style.background.includes('minus') ? -1 : 1) *
    (+token.style.background.match(/[\\d.]+(?=%)/)?.[0] || 0))"""


def test_colours_show_each_part_and_its_sign(browser, tmp_path):
    """The strongest colour is 60 %. A term far smaller than its sum has a scale of its own."""
    steps = ([0.02, -0.01, 0.0], [0.01, 0.01, 0.02])
    rows = [
        rollout(advantages=[A + s for s in own], components={"outcome": [A] * 3, "step": own})
        for A, own in zip((-2.0, 1.0), steps)
    ]
    rows.append(rollout(player="judge", advantages=[2.0] * 3))  # whose advantage is no sum
    main(made_up(tmp_path / "run", accuracy(1), rows))
    look(browser, tmp_path / "run" / "report.html")

    def shades(part):
        pick(browser, part)
        *shown, judge = each(browser, ".body", SHADES)
        assert judge == [60] * 3
        return shown

    assert shades(0) == [[-59.4, -60, -60], [30.3, 30.3, 30.6]]
    assert shades(1) == [[-60] * 3, [30] * 3]
    assert shades(2) == [[60, -30, 0], [30, 30, 60]]


def test_a_page_opens_where_a_judge_is_fooled(browser, tmp_path):
    """Then at the other disagreements, the smaller ones last; unequal counts are none."""

    def judged(step, verdicts, gold):
        return rollout(step, prompt=f"{step}", verdicts=verdicts, gold=gold)

    rows = [
        judged(1, [True], [False]),
        judged(2, [False], [True]),
        judged(3, [0.75], [False]),
        judged(4, [True, True], [False]),
        judged(5, [True], [True]),
    ]
    main(made_up(tmp_path / "run", accuracy(5), rows))
    look(browser, tmp_path / "run" / "report.html")
    seen = []
    for _ in range(4):
        seen += each(browser, ".found", "+e.closest('.question').innerText[0]")
        each(browser, "#rollouts button", "e.textContent == 'next disagreement' && e.click()")
    assert seen == [1, 2, 3, 1]


def test_a_run_shows_its_sentences_its_held_out_figures_and_its_curves(browser, three):
    main(three[0])
    look(browser, three[0] / "report.html")
    _, line = each(browser, "#held-out tr", "e.innerText.split('\\t')")
    assert line[:4] == ["solver/accuracy", "0.100", "0.400", "+0.300"]
    header = each(browser, "header", "e.textContent")[0]
    assert "solver/accuracy rose from 0.100 to 0.400" in header and "still at step 4 of" in header
    assert ask(browser, "document.title").startswith("made.py")
    training, held_out = each(browser, "#curves .curve", "e.getAttribute('d').slice(1).split('L')")
    points = [[*map(float, point.split())] for point in training]
    # evenly from left to right, and up: 0.1 at each step, on an axis from 0 to 1
    right, up = zip(*[(x1 - x0, y0 - y1) for (x0, y0), (x1, y1) in zip(points, points[1:])])
    assert held_out == training and right == pytest.approx([right[0]] * 3, abs=0.15)
    assert right[0] > 90 and up == pytest.approx([14.2] * 3, abs=0.15)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_comparison_can_be_read_in_both_schemes(browser, three, scheme):
    """By the ratio of luminances: 4.5 for text and 3 for curves is what WCAG 2 asks for."""
    emulated = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
    main(three[0], (*three[1:],))
    look(browser, three[0].parent / "comparison.html")
    titles, *_, minutes, accuracy = each(browser, "#variants tr", "e.innerText.split('\\t')")
    assert titles[1:] == ["lr 0.1", "lr 0.2"] and minutes == ["minutes", "4", "3"]
    assert accuracy == ["solver/accuracy", "0.600 [0.400, 0.800]", "0.9"]
    strokes = "[...e.querySelectorAll('.curve')].map(e => e.getAttribute('stroke'))"
    # a line is a run: two seeds of the first variant, one of the second
    assert each(browser, "svg", strokes) == [["var(--c0)", "var(--c0)", "var(--c1)"]] * 2

    def luminance(selector, style):
        color = each(browser, selector, f"getComputedStyle(e).{style}")[0]
        values = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear))

    page, card = luminance("body", "backgroundColor"), luminance("figure", "backgroundColor")
    assert (page < 0.1, page > 0.8) == (scheme == "dark", scheme == "light")
    for selector, style, ground, ratio in (
        ("body", "color", page, 4.5),
        (".hint", "color", page, 4.5),
        ("svg text", "fill", card, 4.5),
        ("svg .curve", "stroke", card, 3),
    ):
        low, high = sorted([luminance(selector, style), ground])
        assert (high + 0.05) / (low + 0.05) > ratio, selector
    assert browser.get_log("browser") == []
