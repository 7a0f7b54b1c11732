"""Curves as images: a run's curves.png, and comparisons of runs for the docs."""

import math
from pathlib import Path

from common.errors import UserError
from common.recording import read_lines
from common.report.compare import variant_curves, variants, wanted_metrics

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402


def draw(runs: list[dict], path: Path, x: str, metrics: list[str] | None):
    """A comparison's curves: by default those of the scripts, held out where they are evaluated."""
    known = {key for run in runs for row in run["rows"] for key in row}
    if metrics is None:
        own = wanted_metrics(runs)
        metrics = [f"eval/{name}" if f"eval/{name}" in known else name for name in own]
    drawn = [name for name in metrics if name in known]
    if not drawn:
        others = ", ".join(sorted(known))
        raise UserError(f"--metrics {' '.join(metrics)}: no run has them; there are {others}.")
    columns = min(3, len(drawn))
    figure, places = _panels(math.ceil(len(drawn) / columns), columns, width=4.4, height=3.3)
    for place in places[len(drawn) :]:
        place.axis("off")
    grouped = variants(runs)
    for place, key in zip(places, drawn):
        for series in variant_curves(grouped, key):
            line, color = series[x], f"C{series['color']}"
            place.plot(line["x"], line["y"], color=color, label=series["label"], linewidth=1.4)
            bounds = line["x"], line["low"], line["high"]
            place.fill_between(*bounds, color=color, alpha=0.18, linewidth=0)
        place.set(title=key, xlabel=x)
        place.grid(alpha=0.25)
    places[0].legend(fontsize=7, framealpha=0.6)
    _save(figure, path)


def draw_curves(folder: Path, curves: dict[str, list[str]]):
    """curves.png: a panel per entry of `curves`, training batches as lines, evaluations as dots."""
    rows, _ = read_lines(folder / "metrics.jsonl")
    figure, places = _panels(1, len(curves), width=4.2, height=3.4)
    for place, (title, keys) in zip(places, curves.items()):
        for i, key in enumerate(keys):
            trained, held_out = (
                [(row["step"], row[name]) for row in rows if row.get(name) is not None]
                for name in (key, f"eval/{key}")
            )
            if trained:
                place.plot(*zip(*trained), color=f"C{i}", alpha=0.6, linewidth=1, label=key)
            if held_out:
                style = {"color": f"C{i}", "marker": "o", "linestyle": "--"}
                place.plot(*zip(*held_out), **style, label=None if trained else key)
        place.set(title=title, xlabel="optimiser step (lines: training batches, dots: held out)")
        place.grid(alpha=0.25)
        if place.lines:
            place.legend(fontsize=7, framealpha=0.6)
    _save(figure, folder / "curves.png")


def _panels(lines: int, columns: int, width: float, height: float):
    size = (width * columns, height * lines)
    figure, places = pyplot.subplots(lines, columns, figsize=size, squeeze=False)
    return figure, places.ravel()


def _save(figure, path: Path):
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
