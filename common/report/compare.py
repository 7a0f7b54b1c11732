"""comparison.html: several runs side by side, the seeds of one variant as mean and band."""

from collections import Counter, defaultdict

from common.report.build import POINTS, axes, command, metrics_of, panels, rounded, values

import numpy as np


def variants(runs: list[dict]) -> dict[str, list[dict]]:
    """Runs of one script whose arguments differ in the seed only are one variant. It is called by
    what tells it from the others: arguments, or the first run with its code, if the script was
    edited between two runs.
    """
    first = {}  # (script, code) -> the first run with it
    for run in runs:
        first.setdefault((run["script"], run["code"]), run["folder"])
    codes, identities = Counter(script for script, _ in first), []
    for run in runs:
        identity = {"script": run["script"]}
        if codes[run["script"]] > 1:
            place = list(first).index((run["script"], run["code"]))
            folder = list(first.values())[place]
            alike = [*first.values()].count(folder) > 1  # a/run and b/run
            identity["code"] = f"{folder}, number {place + 1}" if alike else folder
        identity |= {k: v for k, v in run["args"].items() if k not in ("seed", "out")}
        identities.append(identity)
    keys = dict.fromkeys(key for identity in identities for key in identity)
    differing = [key for key in keys if len({repr(i.get(key)) for i in identities}) > 1]
    grouped = defaultdict(list)
    for run, identity in zip(runs, identities):
        words = [_in_words(key, identity[key]) for key in differing if key in identity]
        grouped[", ".join(words) or f"{run['script']}.py"].append(run)
    return grouped


def _in_words(name: str, value) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if name == "code":
        return f"code of {value}"
    return f"{value}.py" if name == "script" else f"{name} {value}"


def band(curves: list[tuple[list[float], list[float]]]) -> dict[str, list[float]]:
    """Curves (x, y) of several seeds as x, y (their mean), low and high.

    A curve is a straight line between its points; where one has not begun yet or has ended, the
    others go on without it.
    """
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    if len(grid) > POINTS // 2:
        grid = np.linspace(grid[0], grid[-1], POINTS // 2)
    rows = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in curves])
    covered = ~np.isnan(rows).all(0)
    grid, rows = grid[covered], rows[:, covered]
    lines = {
        "x": grid,
        "y": np.nanmean(rows, 0),
        "low": np.nanmin(rows, 0),
        "high": np.nanmax(rows, 0),
    }
    return {name: [rounded(v) for v in line] for name, line in lines.items()}


def variant_curves(grouped: dict[str, list[dict]], key: str) -> list[dict]:
    """One series per variant that has this metric: a band by step, by samples and by minutes."""
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
            held_out = key.startswith("eval/")
            series.append({"label": label, "color": color, "held_out": held_out, **bands})
    return series


def comparison_data(runs: list[dict]) -> dict:
    """What the page of several runs shows: one panel per metric, one series per variant."""
    grouped, keys = variants(runs), metrics_of(runs)
    curves = {title: names for run in runs for title, names in run["curves"].items()}
    drawn = [panel for panel in panels(keys, curves) if panel["section"] == "health"]
    health = list(dict.fromkeys(key for panel in drawn for key in panel["keys"]))
    wanted = [("held out", f"eval/{key}") for key in keys]
    wanted += [("curves", key) for key in wanted_metrics(runs) if key not in health]
    wanted += [("health", key) for key in health]
    drawn = [
        {"section": section, "title": key, "hint": "", "series": variant_curves(grouped, key)}
        for section, key in wanted
    ]
    scripts = " and ".join(sorted({f"{run['script']}.py" for run in runs}))
    remarks = [f"{run['folder']}: {remark}" for run in runs for remark in run["remarks"]]
    if " and " in scripts:
        only = "only metrics of the same name meet in one panel"
        remarks.insert(0, f"These are runs of {scripts}: {only}.")
    return {
        "kind": "comparison",
        "title": f"{len(runs)} runs of {scripts}",
        "remarks": remarks,
        "panels": [panel for panel in drawn if panel["series"]],
        "variants": [_variant(label, seeds, keys) for label, seeds in grouped.items()],
        "runs": [{"folder": run["folder"], "command": command(run)} for run in runs],
    }


def wanted_metrics(runs: list[dict]) -> list[str]:
    """The metrics that the scripts want drawn, each once."""
    curves = [names for run in runs for names in run["curves"].values()]
    return list(dict.fromkeys(name for names in curves for name in names))


def _variant(label: str, runs: list[dict], keys: list[str]) -> dict:
    """A row of the table: one entry per seed, and the last held-out values of each."""
    final = {}
    for key in keys:
        curves = [values(run, f"eval/{key}")[1] for run in runs]
        if any(curves):
            final[f"eval/{key}"] = [y[-1] for y in curves if y]
    return {
        "label": label,
        "seeds": [run["args"].get("seed") for run in runs],
        "steps": [run["rows"][-1]["step"] for run in runs],
        "minutes": [axes(run)["minutes"][-1] for run in runs],
        "final": final,
    }
