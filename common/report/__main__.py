"""python -m common.report RUN [RUN ...] [--out FILE]: a run's page again, or a comparison."""

import sys
from pathlib import Path

from common.errors import UserError
from common.report.build import page, read_run, run_data
from common.report.compare import comparison_data

import tyro


def main(runs: tyro.conf.Positional[tuple[Path, ...]], out: Path | None = None):
    """Make the page of a run, or of several, with the seeds of a variant as mean and band.

    Args:
        runs: Run folders; several are compared.
        out: The page (default: report.html in the run's folder, comparison.html for several).
    """
    try:
        data = [read_run(folder) for folder in runs]
        one = len(data) == 1
        out = out or (runs[0] / "report.html" if one else Path("comparison.html"))
        out.write_text(page(run_data(data[0]) if one else comparison_data(data)))
        print(out)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    tyro.cli(main)
