"""Make a run's page again, or compare several runs.

The page of one run, of several (the seeds of a variant as mean and band), and an image of curves:

    python -m common.report RUN
    python -m common.report RUN RUN ... --out comparison.html
    python -m common.report RUN RUN ... --png FILE
"""

import argparse
import sys
from pathlib import Path

from common.errors import UserError
from common.report.build import page, read_run, run_data
from common.report.compare import comparison_data


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(
        prog="python -m common.report", description="A run's page, or a comparison of runs."
    )
    out = "the page (default: report.html in the run's folder, comparison.html for several)"
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; several are compared")
    parser.add_argument("--out", help=out)
    parser.add_argument("--png", help="also draw the curves as an image")
    x = ["step", "samples", "minutes"]
    parser.add_argument("--x", choices=x, default="step", help="horizontal axis of the image")
    metrics = "panels of the image (default: the scripts' own)"
    parser.add_argument("--metrics", nargs="+", help=metrics)
    args = parser.parse_args(arguments)
    try:
        runs = [read_run(folder) for folder in args.runs]
        alone = len(runs) == 1
        default = Path(args.runs[0]) / "report.html" if alone else "comparison.html"
        data = run_data(runs[0]) if alone else comparison_data(runs)
        Path(args.out or default).write_text(page(data), encoding="utf-8")
        print(args.out or default)
        if args.png:
            from common.report.figures import draw  # matplotlib takes a second to import

            draw(runs, Path(args.png), args.x, args.metrics)
            print(args.png)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: {error.filename}: cannot be written ({error.strerror}).", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
