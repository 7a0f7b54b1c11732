"""curves.png, a run's curves as an image."""

from pathlib import Path

from common.recording import read_lines


def draw_curves(folder: Path, curves: dict[str, list[str]]):
    """A panel per entry of `curves`, training batches as lines, evaluations as dots."""
    import matplotlib  # which takes a second

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, _ = read_lines(folder / "metrics.jsonl")
    size = (4.2 * len(curves), 3.4)
    figure, places = pyplot.subplots(1, len(curves), figsize=size, squeeze=False)
    for place, (title, keys) in zip(places[0], curves.items()):
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
    figure.tight_layout()
    figure.savefig(folder / "curves.png", dpi=110)
    pyplot.close(figure)
