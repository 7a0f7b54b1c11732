"""report.html, a page on each run, and comparisons of runs. See docs/report.md."""

from common.report.build import read_run, write_report

__all__ = ["read_run", "write_report"]
