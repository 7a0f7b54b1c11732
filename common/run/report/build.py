"""Makes report.html, the page of a run: from the run's folder to the data on the page, and the page
itself.

The page is page.html with the data put in. It needs neither a library nor a network. What a model
wrote stays text. docs/running.md says how to read the page.
"""

import base64
import hashlib
import json
import math
import random
import re
import shlex
from collections import defaultdict
from pathlib import Path

from common.core.errors import UserError
from common.run.folder import write_whole
from common.run.report.health import (
    HEALTH,
    MEANINGS,
    highest_of,
    is_evaluation,
    is_number,
    player_of,
    result,
    sentences,
)
from common.run.report.recording import read_lines

TEMPLATE = Path(__file__).with_name("page.html")
POINTS = 600  # of a curve, at most
ROLLOUT_BYTES = 1_500_000  # on a page, at most
UNDRAWN = {"step", "seconds", "step_time", "epoch"}


# ------------------------------------------------------------------ reading a run folder
def read_run(folder: str | Path) -> dict:
    """Returns what a run has written so far.

    Raises:
        UserError: this is not the folder of a run, or the run has not written a step yet.
    """
    folder, run = Path(folder), {"remarks": []}
    for name in ("args", "versions", "about"):
        try:
            run[name] = json.loads((folder / f"{name}.json").read_text())
        except (OSError, ValueError) as error:
            reason = f"{name}.json cannot be read ({error})"
            raise UserError(f"{folder}: not the folder of a run; {reason}.") from None
    for name in ("metrics", "rollouts"):
        run[name], lost = read_lines(folder / f"{name}.jsonl")
        if lost:
            lines = f"{lost} line{'s' * (lost > 1)} of {name}.jsonl"
            run["remarks"].append(f"{lines} could not be read: half-written, if it still runs.")
    if not run["metrics"]:
        raise UserError(f"{folder}: metrics.jsonl has no line yet; there is nothing to show.")
    run |= run["about"]  # the script's name, its docstring as "about", and its CURVES
    run["folder"] = folder.resolve().name
    script = folder / f"{run['script']}.py"
    code = script.read_bytes() if script.exists() else b""
    return run | {"code": hashlib.sha256(code).hexdigest()[:6]}


def minutes_of(run: dict) -> float:
    return rounded(run["metrics"][-1]["seconds"] / 60)


# ------------------------------------------------------------------ curves
def curve(run: dict, key: str, label: str, color: int) -> list[dict]:
    """Returns a metric as a list of one series of a panel, with at most POINTS points, the last
    one among them. The list is empty if the run does not have this metric.
    """
    rows = [row for row in run["metrics"] if is_number(row.get(key))]
    rows = rows[:: -max(1, math.ceil(len(rows) / POINTS))][::-1]
    series = {
        "label": label,
        "color": color,
        "held_out": key.startswith("eval/"),
        "x": [row["step"] for row in rows],
        "y": [rounded(row[key]) for row in rows],
    }
    return [series] if rows else []


def metrics_of(runs: list[dict]) -> list[str]:
    """Returns all metrics that can be drawn, without "eval/", in the order of the files."""
    rows = [row for run in runs for row in run["metrics"]]
    keys = [key for row in rows for key, value in row.items() if is_number(value)]
    return list(dict.fromkeys(key.removeprefix("eval/") for key in keys if key not in UNDRAWN))


def panels(keys: list[str], curves: dict[str, list[str]]) -> list[dict]:
    """Returns which metrics are drawn together: the script's CURVES, then the panels of HEALTH, and
    then all other metrics, by what follows the player's name.
    """
    players = [player_of(name) for names in [*curves.values(), keys] for name in names]
    keys = sorted(keys, key=lambda key: players.index(player_of(key)))
    found = [("curves", title, "", names) for title, names in curves.items() if title != "health"]
    for title, health in HEALTH.items():
        names = [key for key in keys if re.fullmatch(health.metrics, key)]
        found.append(("health", title, health.hint, names))
    shown = {name for *_, names in found for name in names}
    own = [name for name in curves.get("health", []) if name not in shown]
    found += [("health", name, "", [name]) for name in own]
    rest = defaultdict(list)
    for key in keys:
        if key not in shown and key not in own:
            rest[key.split("/", 1)[-1]].append(key)
    found += [("all", title, "", names) for title, names in sorted(rest.items())]
    return [
        {"section": section, "title": title, "hint": hint, "keys": drawn}
        for section, title, hint, names in found
        if (drawn := [name for name in names if name in keys])
    ]


def rounded(value: float) -> float:
    return float(f"{value:.5g}")


# ------------------------------------------------------------------ the page of one run
def run_data(run: dict) -> dict:
    """What the page shows."""
    drawn = panels(metrics_of([run]), run["curves"])
    for panel in drawn:
        # a metric has the same colour in training and held out
        panel["series"] = [
            series
            for color, key in enumerate(panel.pop("keys"))
            for name in (key, f"eval/{key}")
            for series in curve(run, name, key, color)
        ]
    rollouts, recorded_steps = rollouts_for_page(run["rollouts"])
    evaluations = [row for row in run["metrics"] if is_evaluation(row)] or [{}]
    first, last = evaluations[0], evaluations[-1]
    held_out = [
        [key[5:], first.get(key), value, *highest_of(evaluations, key), meaning(key)]
        for key, value in last.items()
        if key.startswith("eval/") and is_number(value)
    ]
    return {
        "kind": "run",
        "title": f"{run['script']}.py",
        **{name: run[name] for name in ("about", "folder", "remarks", "args", "versions")},
        "result": result(run["metrics"], run["curves"]),
        "health": sentences(run["metrics"]),
        "done": run["metrics"][-1]["step"],
        "minutes": minutes_of(run),
        "panels": drawn,
        "held_out": {"steps": [first.get("step"), last.get("step")], "rows": held_out},
        "rollouts": rollouts,
        "rollout_steps": recorded_steps,
        "command": command(run),
    }


def meaning(key: str) -> str:
    name = key.split("/")[-1]
    sampled = MEANINGS.get(name.removesuffix("_greedy"), "")
    return f"{sampled}, in its likeliest words" if sampled and name.endswith("_greedy") else sampled


def rollouts_for_page(rows: list[dict]) -> tuple[list[dict], int]:
    """Returns (rows of the last step and of as many other steps as fit, the number of all steps).
    The other steps are drawn at random, because every n-th step could be the same player's.
    """
    steps = defaultdict(list)
    for row in rows:
        steps[row["step"]].append(row)
    others, chosen, size = sorted(steps)[:-1], [], 0
    random.Random(0).shuffle(others)
    for step in [*sorted(steps)[-1:], *others]:
        if size < ROLLOUT_BYTES:
            chosen.append(step)
            size += len(json.dumps(steps[step]))
    return [row for step in sorted(chosen) for row in steps[step]], len(steps)


def command(run: dict) -> str:
    """Returns the command that repeats the run, with every argument written out."""
    processes, words = run["versions"].get("processes", 1), []
    for name, value in run["args"].items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag} {shlex.quote(str(value))}")
    start = "python" if processes == 1 else f"torchrun --standalone --nproc_per_node {processes}"
    return " ".join([start, f"{run['script']}.py", *words])


def page(data: dict) -> str:
    """Returns the HTML. By its policy only its own script runs, by its hash, and nothing is
    fetched.
    """
    text = TEMPLATE.read_text(encoding="utf-8")
    for tag in ("style", "script"):
        inline = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        text = text.replace(f"{{{{{tag} hash}}}}", f"'sha256-{digest}'")
    # NaN, which a browser's JSON does not have, becomes null. JSON escapes every other character of
    # a string, down to half a surrogate pair; `<` could close the element.
    finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
    written = json.dumps(finite, separators=(",", ":")).replace("<", "\\u003c")
    before, after = text.split("{{data}}")
    return before + written + after


def write_report(folder: Path):
    """RUN/report.html, of what is written so far."""
    write_whole(folder / "report.html", page(run_data(read_run(folder))))
