"""Makes comparison.html: several runs side by side, and the seeds of a variant as mean and band."""

from collections import defaultdict

from common.run.report.build import (
    POINTS,
    ROLLOUT_BYTES,
    axes,
    command,
    metrics_of,
    own_steps,
    panels,
    rollouts_for_page,
    rounded,
    values,
)
from common.run.report.health import player_of

import numpy as np


def variants(runs: list[dict]) -> dict[str, list[dict]]:
    """Returns name -> runs of a variant. Runs are the same variant if their scripts are equal byte
    by byte and their arguments differ only in the seed. Its name says how it differs from the
    others.
    """
    identities = [
        {f"{run['script']}.py": run["code"], **run["args"], "seed": None, "out": None}
        for run in runs
    ]
    keys = dict.fromkeys(key for identity in identities for key in identity)
    differing = [key for key in keys if len({repr(i.get(key)) for i in identities}) > 1]
    found = defaultdict(list)
    for run, identity in zip(runs, identities):
        label = ", ".join(f"{key} {identity[key]}" for key in differing if key in identity)
        found[label or f"{run['script']}.py"].append(run)
    return found


def band(curves: list[tuple[list[float], list[float]]]) -> dict[str, list[float]]:
    """Returns curves (x, y) of several seeds as x, y (their mean), low and high.

    A curve is a straight line between its points. Where a curve has not begun or has ended, mean
    and band are of the other curves.
    """
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    if len(grid) > POINTS // 2:
        grid = np.linspace(grid[0], grid[-1], POINTS // 2)
    rows = np.array([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in curves])
    covered = ~np.isnan(rows).all(0)
    grid, rows = grid[covered], rows[:, covered]
    y, low, high = (of_seeds(rows, 0) for of_seeds in (np.nanmean, np.nanmin, np.nanmax))
    lines = {"x": grid, "y": y, "low": low, "high": high}
    return {name: [rounded(v) for v in line] for name, line in lines.items()}


def variant_curves(by_label: dict[str, list[dict]], key: str) -> list[dict]:
    """Returns a series for each variant that has this metric: bands by step, by samples and by
    minutes, and by the player's own steps if players take turns.
    """
    series = []
    for color, (label, runs) in enumerate(by_label.items()):
        by_x = defaultdict(list)
        for run in runs:
            at, y = values(run, key)
            own = own_steps(run).get(player_of(key.removeprefix("eval/")))
            for name, x in (axes(run) | ({"own steps": own} if own else {})).items():
                points = [(x[i], value) for i, value in zip(at, y) if x[i] is not None]
                if points:  # sorted: rows may be in disorder in a damaged file
                    by_x[name].append(tuple(map(list, zip(*sorted(points, key=lambda p: p[0])))))
        if by_x:
            bands = {name: band(curves) for name, curves in by_x.items()}
            held_out = key.startswith("eval/")
            series.append({"label": label, "color": color, "held_out": held_out, **bands})
    return series


def comparison_data(runs: list[dict]) -> dict:
    """Returns what the page of several runs shows: a panel per metric, a series per variant."""
    by_label, metrics = variants(runs), metrics_of(runs)
    curves = {title: names for run in runs for title, names in run["curves"].items()}
    section_of = {f"eval/{metric}": "held out" for metric in metrics}
    for panel in panels(metrics, curves):
        if panel["section"] != "all":
            section_of |= dict.fromkeys(panel["keys"], panel["section"])
    drawn = []
    for key, section in section_of.items():
        if series := variant_curves(by_label, key):
            drawn.append({"section": section, "title": key, "hint": "", "series": series})
    evaluated = [panel["title"] for panel in drawn if panel["section"] == "held out"]
    rollouts = []  # of the first seed of each variant
    for label, (run, *_) in by_label.items():
        rows, _ = rollouts_for_page(run["rollouts"], ROLLOUT_BYTES // len(by_label))
        rollouts += [{"run": label, **row} for row in rows]
    scripts = " and ".join(sorted({f"{run['script']}.py" for run in runs}))
    return {
        "kind": "comparison",
        "title": f"{len(runs)} runs of {scripts}",
        "remarks": [f"{run['folder']}: {remark}" for run in runs for remark in run["remarks"]],
        "panels": drawn,
        "rollouts": rollouts,
        "variants": [_variant(label, seeds, evaluated) for label, seeds in by_label.items()],
        "runs": [{"folder": run["folder"], "command": command(run)} for run in runs],
    }


def _variant(label: str, runs: list[dict], evaluated: list[str]) -> dict:
    """Returns a row of the table: an entry for each seed, and the last held-out values of each."""
    return {
        "label": label,
        "seeds": [run["args"].get("seed") for run in runs],
        "steps": [run["metrics"][-1]["step"] for run in runs],
        "minutes": [axes(run)["minutes"][-1] for run in runs],
        "final": {key: [y[-1] for run in runs if (y := values(run, key)[1])] for key in evaluated},
    }
