"""report.html, a page on each run, and comparisons of runs. See docs/report.md."""

from common.report.build import read_run, write_report

__all__ = ["draw_curves", "read_run", "write_report"]


def draw_curves(folder, curves):
    """curves.png. matplotlib takes a second to import, so only when it is drawn."""
    from common.report import figures

    figures.draw_curves(folder, curves)
