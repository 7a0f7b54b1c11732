"""report.html, a page on each run, and comparisons of runs. See docs/report.md."""

from common.report.build import read_run, write_report
from common.report.figures import draw_curves

__all__ = ["draw_curves", "read_run", "write_report"]
