"""Makes report.html, a page on each run, and comparisons of runs. See docs/running.md."""
