"""report.html, the page of one run: from its folder to the data on the page, and the page itself.

The page is page.html with the data put in. It needs no library and no network, and whatever a model
wrote stays text. docs/report.md says how to read it. Recording rollouts and writing five pages took
0.2 of the 153 CPU seconds of `python tango.py`.
"""

import ast
import base64
import hashlib
import itertools
import json
import math
import re
import shlex
from collections import defaultdict
from pathlib import Path

from common.errors import UserError
from common.recording import read_lines
from common.report.words import NOTHING, in_words

TEMPLATE = Path(__file__).with_name("page.html")
POINTS = 600  # of a curve, at most
ROLLOUT_BYTES = 1_500_000  # on a page, at most; of a longer run every k-th step is shown
UNDRAWN = {"step", "seconds", "step_time", "epoch"}
HEALTH = [  # how co-training goes wrong, in the order in which it shows: title, metrics, hint
    (
        "accepts right, rejects wrong",
        r"/(tpr|tnr)$",
        "true-positive and true-negative rate; a lazy verifier has only one of them",
    ),
    (
        "says yes",
        r"/(says_correct|says_yes)$",
        "far from the share of right answers: one opinion on everything",
    ),
    (
        "reward minus gold",
        r"/(verdict_minus_gold|flattery|paid_minus_true)$",
        "above 0, the verifier is kinder than the truth, or the pay is",
    ),
    (
        "can be read",
        r"/(parsed|silent|unparsable|unreadable)$",
        "silent, unparsable and unreadable count those that cannot",
    ),
    ("groups without a difference", r"/frac_reward_zero_std$", "they teach nothing"),
    ("entropy", r"/entropy$", "nats per token; near 0 nothing new is tried"),
    ("KL to the base", r"/kl$", "nats per token"),
    ("cut at the length limit", r"/completions/clipped_ratio$", "share of completions"),
    ("gradient norm", r"/grad_norm$", "before clipping"),
]


# ------------------------------------------------------------------ reading a run folder
def read_run(folder: str | Path) -> dict:
    """What a run has written so far.

    Raises:
        UserError: this is not the folder of a run, or no step of it has been written yet.
    """
    folder, files = Path(folder), {}
    for name in ("args.json", "versions.json", "about.json"):
        try:
            files[name] = json.loads((folder / name).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise UserError(
                f"{folder}: not the folder of a run; {name} cannot be read ({error})."
            ) from None
    rows, lost_rows = read_lines(folder / "metrics.jsonl")
    if not rows:
        raise UserError(
            f"{folder}: metrics.jsonl is missing or empty; there is nothing to show yet."
        )
    rollouts, lost_rollouts = read_lines(folder / "rollouts.jsonl", _is_rollout)
    lost = {"metrics.jsonl": lost_rows, "rollouts.jsonl": lost_rollouts}
    return {
        "folder": folder.resolve().name,
        **files["about.json"],  # script, about, curves
        "args": files["args.json"],
        "versions": files["versions.json"],
        "rows": rows,
        "rollouts": rollouts,
        "code": _code(folder / f"{files['about.json'].get('script')}.py"),
        "remarks": [
            f"{count} line{'s' * (count > 1)} of {name} could not be read: half-written, if the "
            f"run is still going on."
            for name, count in lost.items()
            if count
        ],
    }


def _code(script: Path) -> str:
    """What a script does: its text without comments and layout, "" where there is none."""
    try:
        return ast.unparse(ast.parse(script.read_text()))
    except (OSError, ValueError, SyntaxError):
        return ""


def _is_rollout(row: dict) -> bool:
    tokens, terms = row.get("tokens"), row.get("components", {})
    if not isinstance(tokens, list) or not isinstance(terms, dict):
        return False
    for A in (row.get("advantages"), *terms.values()):
        if not isinstance(A, list) or len(A) != len(tokens):
            return False
        if not all(isinstance(a, (int, float)) for a in A):
            return False
    return all(isinstance(text, str) for text in [row.get("player"), row.get("prompt"), *tokens])


# ------------------------------------------------------------------ curves
def axes(run: dict) -> dict[str, list[float]]:
    """For each row of metrics.jsonl: its step, the samples that all updates so far were made of,
    and minutes.

    A step and process has questions * group_size samples, unless the script counts them itself
    (co/samples).
    """
    args, rows = run["args"], run["rows"]
    per_step = args.get("questions", 1) * args.get("group_size", 1)
    per_step *= run["versions"].get("processes", 1)
    if any("co/samples" in row for row in rows):
        samples = [row.get("co/samples", 0) for row in rows]
    else:
        samples = [per_step * row["step"] for row in rows]
    return {
        "step": [row["step"] for row in rows],
        "samples": list(itertools.accumulate(samples, max)),
        "minutes": [rounded(row.get("seconds", 0) / 60) for row in rows],
    }


def values(run: dict, key: str) -> tuple[list[int], list[float]]:
    """(rows of metrics.jsonl with this metric, its values): at most POINTS, the last among them."""
    at = [i for i, row in enumerate(run["rows"]) if _is_number(row.get(key))]
    at = at[:: -max(1, math.ceil(len(at) / POINTS))][::-1]
    return at, [rounded(run["rows"][i][key]) for i in at]


def metrics_of(runs: list[dict]) -> list[str]:
    """Everything that can be drawn, without "eval/", in the order of the files."""
    rows = [row for run in runs for row in run["rows"]]
    keys = [key for row in rows for key, value in row.items() if _is_number(value)]
    return list(dict.fromkeys(key.removeprefix("eval/") for key in keys if key not in UNDRAWN))


def panels(keys: list[str], curves: dict[str, list[str]]) -> list[dict]:
    """Which metrics are drawn together: those of the script's CURVES, then HEALTH, and all others
    by what follows the player's name.
    """
    players = [player_of(name) for names in curves.values() for name in names]
    order = {player: i for i, player in reversed(list(enumerate(players)))}
    keys = sorted(keys, key=lambda key: order.get(player_of(key), len(players)))
    found = [("curves", title, "", names) for title, names in curves.items() if title != "health"]
    for title, pattern, hint in HEALTH:
        found.append(("health", title, hint, [key for key in keys if re.search(pattern, key)]))
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


def player_of(key: str) -> str:
    """The name that a metric begins with."""
    return key.split("/", 1)[0]


def phases(run: dict) -> list[list]:
    """[first row, last row, player] for every stretch of steps in which one player was trained: the
    one with a loss. Empty where all of them always are.
    """
    trained = []
    for i, row in enumerate(run["rows"]):
        losses = [key for key in row if key.endswith(("/loss", "/grad_norm"))]
        if losses:
            trained.append((i, {player_of(key) for key in losses}))
    together = any(len(players) > 1 for _, players in trained)
    if together or len(set().union(*(players for _, players in trained))) < 2:
        return []
    stretches = [list(steps) for _, steps in itertools.groupby(trained, key=lambda step: step[1])]
    return [[steps[0][0], steps[-1][0], *steps[0][1]] for steps in stretches]


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def rounded(value: float) -> float:
    return float(f"{value:.5g}")


# ------------------------------------------------------------------ the page of one run
def run_data(run: dict) -> dict:
    """What the page shows."""
    args, versions, x = run["args"], run["versions"], axes(run)
    drawn = panels(metrics_of([run]), run["curves"])
    for panel in drawn:
        panel["series"] = _series(run, panel.pop("keys"))
    rollouts, recorded_steps = rollouts_for_page(run["rollouts"])
    evaluations = [row for row in run["rows"] if any(key.startswith("eval/") for key in row)]
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    held_out = [[k[5:], first.get(k), v] for k, v in last.items() if k.startswith("eval/")]
    return {
        "kind": "run",
        "title": f"{run['script']}.py",
        **{name: run[name] for name in ("about", "folder", "remarks", "args", "versions")},
        "in_words": in_words(run["rows"]),
        "nothing": NOTHING,
        "device": versions.get("device", ""),
        "steps": [x["step"][-1], args.get("steps")],
        "minutes": x["minutes"][-1],
        "axes": x,
        "panels": drawn,
        "phases": phases(run),
        "held_out": {"steps": [first.get("step"), last.get("step")], "rows": held_out},
        "rollouts": rollouts,
        "rollout_steps": recorded_steps,
        "command": command(run),
    }


def _series(run: dict, keys: list[str]) -> list[dict]:
    """The curves of one panel: a metric on training batches and on held-out questions have one
    colour.
    """
    series = []
    for color, key in enumerate(keys):
        for held_out in (False, True):
            at, y = values(run, f"eval/{key}" if held_out else key)
            line = {"label": key, "color": color, "held_out": held_out, "at": at, "y": y}
            series += [line] if at else []
    return series


def rollouts_for_page(rows: list[dict]) -> tuple[list[dict], int]:
    """(rows of as many steps as fit, evenly over the run and for each player, steps recorded)."""
    steps = defaultdict(list)
    for row in rows:
        steps[row["step"]].append(row)
    # an even stride over all steps could keep time with the schedule, and miss a player
    kinds = defaultdict(list)
    for step, recorded in steps.items():
        kinds[frozenset(row["player"] for row in recorded)].append(step)
    size = {step: len(json.dumps(recorded)) for step, recorded in steps.items()}
    for stride in itertools.count(1):
        chosen = {step for kind in kinds.values() for step in [*kind[::stride], kind[-1]]}
        if sum(size[step] for step in chosen) <= ROLLOUT_BYTES or stride > len(steps):
            return [row for step in sorted(chosen) for row in steps[step]], len(steps)


def command(run: dict) -> str:
    """The command that repeats the run, with every argument written out."""
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
    """The HTML. Its policy lets only its own script run, by its hash, and nothing be fetched."""
    text = TEMPLATE.read_text(encoding="utf-8")
    for tag in ("style", "script"):
        inline = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        text = text.replace(f"{{{{{tag} hash}}}}", f"'sha256-{digest}'")
    # JSON escapes every other character of a string, down to half a surrogate pair; `<` could close
    # the element
    written = json.dumps(_finite(data), separators=(",", ":")).replace("<", "\\u003c")
    before, after = text.split("{{data}}")
    return before + written + after


def _finite(value):
    """The same with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_report(folder: Path):
    """RUN/report.html, of what is written so far. Until it is complete, the old one stays."""
    beside = folder / ".report.html"
    beside.write_text(page(run_data(read_run(folder))), encoding="utf-8")
    beside.replace(folder / "report.html")
