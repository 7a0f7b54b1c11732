"""python -m common.run.report RUN [RUN ...] [--out FILE] makes a run's page, or a comparison."""

import sys
from pathlib import Path

from common.core.errors import UserError
from common.run.report.build import page, read_run, run_data
from common.run.report.compare import comparison_data

from tyro import cli
from tyro.conf import Positional


def main(run: Positional[Path], others: Positional[tuple[Path, ...]] = (), out: Path | None = None):
    """Make a run's page, or compare runs: a line is a run, and its colour is its variant.

    Args:
        run: The run's folder.
        others: More runs, to compare with it.
        out: The page (default: report.html in the run's folder; for several runs comparison.html
            beside the folder of the first).
    """
    try:
        runs = [read_run(folder) for folder in (run, *others)]
        out = out or (run.parent / "comparison.html" if others else run / "report.html")
        out.write_text(page(comparison_data(runs) if others else run_data(runs[0])))
        print(out)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    cli(main, prog="python -m common.run.report")
