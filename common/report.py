"""report.html, a run to look at, and comparisons of runs: `write_report`, or by hand

    python -m common.report RUN                                 makes RUN/report.html again
    python -m common.report RUN RUN ... --out comparison.html   several runs; seeds of one variant as mean and band
    python -m common.report RUN RUN ... --png FILE              the same curves for the docs, `--metrics` and `--x` choose

The page is common/report.html with the data put in: no library, no network, and what a model wrote is never markup.
docs/report.md says how to read it, and what rollouts.jsonl holds. Recording and five pages took 0.2 of the 206 CPU seconds of
`python tango.py`.
"""

import argparse
import ast
import base64
import hashlib
import itertools
import json
import math
import re
import shlex
import sys
from collections import defaultdict
from pathlib import Path

from common.data import UserError

import numpy as np

TEMPLATE = Path(__file__).with_suffix(".html")
POINTS = 600  # of a curve, at most
ROLLOUT_BYTES = 1_500_000  # on a page; of a longer run every k-th step is shown

# title, metrics, what to look for: how co-training goes wrong, in the order in which it is seen
HEALTH = [
    ("accepts right, rejects wrong", r"/(tpr|tnr)$", "true-positive and true-negative rate; a lazy verifier has one of them"),
    ("says yes", r"/(says_correct|says_yes)$", "far from the truth and steady: one opinion on everything"),
    ("reward minus gold", r"/(verdict_minus_gold|flattery)$", "above 0, the generator is being flattered"),
    ("can be read", r"/(parsed|silent|unparsable)$", "silent and unparsable count those that cannot"),
    ("groups without a difference", r"/frac_reward_zero_std$", "they teach nothing"),
    ("entropy", r"/entropy$", "in nats a token; near 0 nothing new is tried"),
    ("KL to the base", r"/kl$", "in nats a token"),
    ("cut at the length limit", r"/completions/clipped_ratio$", "share of answers"),
    ("gradient norm", r"/grad_norm$", "before it is clipped"),
]
UNDRAWN = {"step", "seconds", "step_time", "epoch"}


# ------------------------------------------------------------------ reading a run folder
def read_lines(path: Path) -> tuple[list[dict], int]:
    """(rows of a JSONL file that have a step, how many lines are none: cut short, or something else)."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    rows, written = [], [line for line in lines if line.strip()]
    for line in written:
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows, len(written) - len(rows)


def read_run(folder: str | Path) -> dict:
    """What a run has left behind so far. UserError if `folder` is none's, or no step of it has been written yet."""
    folder = Path(folder)
    try:
        args = json.loads((folder / "args.json").read_text())
        versions = json.loads((folder / "versions.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{folder}: not the folder of a run; args.json or versions.json cannot be read ({error}).") from None
    rows, lost = read_lines(folder / "metrics.jsonl")
    if not rows:
        raise UserError(f"{folder}: metrics.jsonl is missing or empty; there is nothing to show yet.")
    rollouts, lost_rollouts = read_lines(folder / "rollouts.jsonl")
    readable = [row for row in rollouts if _is_rollout(row)]
    script = next(iter(sorted(folder.glob("*.py"))), None)
    source = script.read_text() if script else ""
    about, curves = _docstring_and_curves(source)
    lost = {"metrics.jsonl": lost, "rollouts.jsonl": lost_rollouts + len(rollouts) - len(readable)}
    return {
        "folder": folder.resolve().name,
        "script": script.stem if script else "run",
        "about": about,
        "curves": curves,
        "args": args,
        "versions": versions,
        "rows": rows,
        "rollouts": readable,
        "remarks": [
            f"{count} line{'s' * (count > 1)} of {name} could not be read: half-written, if the run is still going on."
            for name, count in lost.items()
            if count
        ],
    }


def _is_rollout(row: dict) -> bool:
    tokens, A = row.get("tokens"), row.get("advantages")
    return (
        isinstance(row.get("player"), str)
        and isinstance(row.get("prompt"), str)
        and isinstance(tokens, list)
        and isinstance(A, list)
        and len(tokens) == len(A)
        and all(isinstance(token, str) for token in tokens)
        and all(isinstance(a, (int, float)) for a in A)
    )


def _docstring_and_curves(source: str) -> tuple[str, dict[str, list[str]]]:
    """A script's docstring and its CURVES, without running it."""
    try:
        tree = ast.parse(source)
        assigned = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CURVES"]
        return ast.get_docstring(tree) or "", ast.literal_eval(assigned[0].value) if assigned else {}
    except (SyntaxError, ValueError):  # a fork may compute them: then there are only the panels that all scripts have
        return "", {}


# ------------------------------------------------------------------ curves
def axes(run: dict) -> dict[str, list[float]]:
    """For each row of metrics.jsonl: its step, the samples that all updates so far were made of, and minutes.

    Samples are questions * group_size a step and process, unless the script counts them itself (co/samples)."""
    per_step = run["args"].get("questions", 1) * run["args"].get("group_size", 1) * run["versions"].get("processes", 1)
    counted = any("co/samples" in row for row in run["rows"])
    samples = itertools.accumulate(
        (row.get("co/samples", 0) if counted else per_step * row["step"] for row in run["rows"]), max
    )
    return {
        "step": [row["step"] for row in run["rows"]],
        "samples": list(samples),
        "minutes": [_short(row.get("seconds", 0) / 60) for row in run["rows"]],
    }


def values(run: dict, key: str) -> tuple[list[int], list[float]]:
    """(rows of metrics.jsonl that have this metric, its values), at most POINTS, the last one among them."""
    at = [i for i, row in enumerate(run["rows"]) if _is_number(row.get(key))]
    at = at[:: -max(1, math.ceil(len(at) / POINTS))][::-1]
    return at, [_short(run["rows"][i][key]) for i in at]


def metrics_of(runs: list[dict]) -> list[str]:
    """All that can be drawn, without "eval/", in the order of the files."""
    keys = [key for run in runs for row in run["rows"] for key in row if _is_number(row[key]) and key not in UNDRAWN]
    return list(dict.fromkeys(key.removeprefix("eval/") for key in keys))


def panels(keys: list[str], curves: dict[str, list[str]]) -> list[dict]:
    """Which metrics are drawn together: those of the script's CURVES, then HEALTH, then all others by their last name."""
    players = [name[:3] for names in curves.values() for name in names]
    keys = sorted(keys, key=lambda key: players.index(key[:3]) if key[:3] in players else len(players))
    by_title = [("curves", title, "", names) for title, names in curves.items() if title != "health"]
    by_title += [("health", title, hint, [k for k in keys if re.search(pattern, k)]) for title, pattern, hint in HEALTH]
    shown = {name for *_, names in by_title for name in names}
    by_title += [("health", name, "", [name]) for name in curves.get("health", []) if name not in shown]
    shown |= set(curves.get("health", []))
    rest = defaultdict(list)
    for key in keys:
        if key not in shown:
            rest[key.split("/", 1)[-1]].append(key)
    by_title += [("all", title, "", names) for title, names in sorted(rest.items())]
    found = [(section, title, hint, [name for name in names if name in keys]) for section, title, hint, names in by_title]
    return [dict(zip(("section", "title", "hint", "keys"), panel)) for panel in found if panel[3]]


def phases(run: dict) -> list[list]:
    """[first row, last row, its player] for every stretch in which one player was trained; empty if all always are.

    The player of a step is the one with a loss: rows carry the first three letters of its name."""
    trained = [(i, sorted({k[:3] for k in row if k[3:] in ("/loss", "/grad_norm")})) for i, row in enumerate(run["rows"])]
    trained = [(i, names) for i, names in trained if names]
    if any(len(names) > 1 for _, names in trained) or len({names[0] for _, names in trained}) < 2:
        return []
    stretches = [list(group) for _, group in itertools.groupby(trained, key=lambda step: step[1])]
    return [[group[0][0], group[-1][0], group[0][1][0]] for group in stretches]


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _short(value: float) -> float:
    return float(f"{value:.5g}")


# ------------------------------------------------------------------ one run
def run_data(run: dict) -> dict:
    """What the page of one run shows."""
    keys = metrics_of([run])
    drawn = panels(keys, run["curves"])
    for panel in drawn:
        found = [(key, held_out) for key in panel.pop("keys") for held_out in (False, True)]
        series = [(key, held_out, *values(run, f"eval/{key}" if held_out else key)) for key, held_out in found]
        panel["series"] = [
            {"label": key, "color": [k for k, _ in found].index(key) // 2, "held_out": held_out, "at": at, "y": y}
            for key, held_out, at, y in series
            if at
        ]
    rollouts, all_steps = rollouts_for_page(run["rollouts"])
    evaluations = [row for row in run["rows"] if any(key.startswith("eval/") for key in row)]
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    return {
        "kind": "run",
        "title": f"{run['script']}.py",
        "about": run["about"],
        "folder": run["folder"],
        "device": run["versions"].get("device", ""),
        "remarks": run["remarks"],
        "steps": [run["rows"][-1]["step"], run["args"].get("steps")],
        "minutes": axes(run)["minutes"][-1],
        "axes": axes(run),
        "panels": drawn,
        "phases": phases(run),
        "players": player_names(run),
        "held_out": {
            "steps": [first.get("step"), last.get("step")],
            "rows": [[key[5:], first.get(key), value] for key, value in last.items() if key.startswith("eval/")],
        },
        "rollouts": rollouts,
        "rollout_steps": all_steps,
        "command": command(run),
        "args": run["args"],
        "versions": run["versions"],
    }


def player_names(run: dict) -> dict[str, str]:
    """First three letters -> name, of the players that rollouts.jsonl knows."""
    return {row["player"][:3]: row["player"] for row in run["rollouts"]}


def rollouts_for_page(rows: list[dict]) -> tuple[list[dict], int]:
    """(rows of as many steps as fit, evenly over the run and for each player, number of steps there are)."""
    by_step = defaultdict(list)
    for row in rows:
        by_step[row["step"]].append(row)
    kinds = defaultdict(list)  # an even stride over all steps could meet the schedule's and miss a player
    for step, of_step in by_step.items():
        kinds[frozenset(row["player"] for row in of_step)].append(step)
    size = {step: len(json.dumps(of_step)) for step, of_step in by_step.items()}
    for stride in itertools.count(1):
        chosen = {step for steps in kinds.values() for step in [*steps[::stride], steps[-1]]}
        if sum(size[step] for step in chosen) <= ROLLOUT_BYTES or stride > len(by_step):
            return [row for step in sorted(chosen) for row in by_step[step]], len(by_step)


def command(run: dict) -> str:
    """The command that repeats the run, with every argument said."""
    words = []
    for name, value in run["args"].items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag} {shlex.quote(str(value))}")
    processes = run["versions"].get("processes", 1)
    start = "python" if processes == 1 else f"torchrun --standalone --nproc_per_node {processes}"
    return " ".join([start, f"{run['script']}.py", *words])


# ------------------------------------------------------------------ several runs
def variants(runs: list[dict]) -> dict[str, list[dict]]:
    """Runs with the same script and the same arguments but for the seed, under what tells them from the others."""
    said = [{"script": run["script"], **{k: v for k, v in run["args"].items() if k not in ("seed", "out")}} for run in runs]
    differing = [key for key in dict.fromkeys(k for s in said for k in s) if len({repr(s.get(key)) for s in said}) > 1]
    grouped = defaultdict(list)
    for run, words in zip(runs, said):
        label = ", ".join(_said(k, words[k]) for k in differing if k in words)
        grouped[label or f"{run['script']}.py"].append(run)
    return grouped


def _said(name: str, value) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{value}.py" if name == "script" else f"{name} {value}"


def band(curves: list[tuple[list[float], list[float]]]) -> dict[str, list[float]]:
    """Curves (x, y) of several seeds as x, y (their mean), low and high. Between its points a curve is a straight line; where
    one has not begun or has ended, the others go on."""
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    if len(grid) > POINTS // 2:
        grid = np.linspace(grid[0], grid[-1], POINTS // 2)
    rows = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in curves])
    there = ~np.isnan(rows).all(0)
    grid, rows = grid[there], rows[:, there]
    result = {"x": grid, "y": np.nanmean(rows, 0), "low": np.nanmin(rows, 0), "high": np.nanmax(rows, 0)}
    return {name: [_short(v) for v in line] for name, line in result.items()}


def variant_curves(grouped: dict[str, list[dict]], key: str) -> list[dict]:
    """One series a variant that has this metric: label, color, held_out, and a band by step, by samples and by minutes."""
    series = []
    for color, (label, runs) in enumerate(grouped.items()):
        by_x = defaultdict(list)
        for run in runs:
            at, y = values(run, key)
            for name, x in axes(run).items():
                if at:
                    by_x[name].append(([x[i] for i in at], y))
        if by_x:
            bands = {name: band(curves) for name, curves in by_x.items()}
            series.append({"label": label, "color": color, "held_out": key.startswith("eval/"), **bands})
    return series


def comparison_data(runs: list[dict]) -> dict:
    """What the page of several runs shows: one panel a metric, one series a variant."""
    grouped = variants(runs)
    curves = {title: names for run in runs for title, names in run["curves"].items()}
    all_curves = list(dict.fromkeys(name for run in runs for names in run["curves"].values() for name in names))
    keys = metrics_of(runs)
    everything = panels(keys, curves)
    health = [k for panel in everything if panel["section"] == "health" for k in panel["keys"]]
    wanted = [("held out", f"eval/{key}") for key in keys]
    wanted += [("curves", key) for key in all_curves if key not in health] + [("health", key) for key in dict.fromkeys(health)]
    drawn = [{"section": section, "title": key, "hint": "", "series": variant_curves(grouped, key)} for section, key in wanted]
    scripts = sorted({f"{run['script']}.py" for run in runs})
    remarks = [f"{run['folder']}: {remark}" for run in runs for remark in run["remarks"]]
    if len(scripts) > 1:
        remarks.insert(0, f"These are runs of {' and '.join(scripts)}: only metrics of the same name meet in one panel.")
    return {
        "kind": "comparison",
        "title": f"{len(runs)} runs of {' and '.join(scripts)}",
        "remarks": remarks,
        "panels": [panel for panel in drawn if panel["series"]],
        "variants": [
            {
                "label": label,
                "seeds": [run["args"].get("seed") for run in of_one],
                "steps": [run["rows"][-1]["step"] for run in of_one],
                "minutes": [axes(run)["minutes"][-1] for run in of_one],
                "final": {f"eval/{k}": last for k in keys if (last := _last_values(of_one, f"eval/{k}"))},
            }
            for label, of_one in grouped.items()
        ],
        "runs": [{"folder": run["folder"], "command": command(run)} for run in runs],
    }


def _last_values(runs: list[dict], key: str) -> list[float]:
    return [y[-1] for _, y in (values(run, key) for run in runs) if y]


def draw(runs: list[dict], path: Path, x: str, metrics: list[str] | None):
    """The comparison's curves as an image: by default the scripts' own, held out where they are."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grouped = variants(runs)
    there = {key for run in runs for row in run["rows"] for key in row}
    if metrics is None:
        names = dict.fromkeys(name for run in runs for names in run["curves"].values() for name in names)
        metrics = [f"eval/{name}" if f"eval/{name}" in there else name for name in names]
    unknown = [name for name in metrics if name not in there]
    if unknown and len(unknown) == len(metrics):
        raise UserError(f"--metrics {' '.join(unknown)}: no run has them; there are {', '.join(sorted(there))}.")
    metrics = [name for name in metrics if name in there]
    columns = min(3, len(metrics))
    lines = math.ceil(len(metrics) / columns)
    figure, places = pyplot.subplots(lines, columns, figsize=(4.4 * columns, 3.3 * lines), squeeze=False)
    for place in places.flat[len(metrics) :]:
        place.axis("off")
    for place, key in zip(places.flat, metrics):
        for series in variant_curves(grouped, key):
            line = series[x]
            place.plot(line["x"], line["y"], color=f"C{series['color']}", label=series["label"], linewidth=1.4)
            place.fill_between(line["x"], line["low"], line["high"], color=f"C{series['color']}", alpha=0.18, linewidth=0)
        place.set(title=key, xlabel=x)
        place.grid(alpha=0.25)
    places.flat[0].legend(fontsize=7, framealpha=0.6)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# ------------------------------------------------------------------ the page
def page(data: dict) -> str:
    """The HTML. Its policy lets nothing run but the script it was made with, and nothing be fetched."""
    text = TEMPLATE.read_text(encoding="utf-8")
    for tag in ("style", "script"):
        inline = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        text = text.replace(f"{{{{{tag} hash}}}}", f"'sha256-{digest}'")
    # every other character of a string is escaped by JSON, down to lone surrogates; `<` could close the element
    written = json.dumps(_finite(data), separators=(",", ":")).replace("<", "\\u003c")
    before, after = text.split("{{data}}")
    return before + written + after


def _finite(value):
    """The same without NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_report(folder: Path):
    """RUN/report.html, of whatever is there. A browser that reads while it is written sees the one before."""
    beside = folder / ".report.html"
    beside.write_text(page(run_data(read_run(folder))), encoding="utf-8")
    beside.replace(folder / "report.html")


def main():
    parser = argparse.ArgumentParser(prog="python -m common.report", description="A run's page, or a comparison of runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; more than one are compared")
    parser.add_argument("--out", help="the page (default: report.html in the run's folder, comparison.html for several)")
    parser.add_argument("--png", help="also draw the curves as an image")
    parser.add_argument("--x", choices=["step", "samples", "minutes"], default="step", help="horizontal axis of the image")
    parser.add_argument("--metrics", nargs="+", help="panels of the image (default: the scripts' own)")
    args = parser.parse_args()
    try:
        runs = [read_run(folder) for folder in args.runs]
        out = Path(args.out or (Path(args.runs[0]) / "report.html" if len(runs) == 1 else "comparison.html"))
        out.write_text(page(run_data(runs[0]) if len(runs) == 1 else comparison_data(runs)), encoding="utf-8")
        print(out)
        if args.png:
            draw(runs, Path(args.png), args.x, args.metrics)
            print(args.png)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: {error.filename}: cannot be written ({error.strerror}).", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
