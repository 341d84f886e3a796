"""`holdfast pipeline report`: charts of tables as one HTML file, without Spark."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from holdfast.cli.pipeline import options

EXIT_USAGE = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_lake(parser)
    options.add_tables(parser)
    parser.add_argument(
        "--run", metavar="ID", help="only this test run (with --tables holdfast_lab)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="where to write it (default ./report.html)",
    )


def run(args: argparse.Namespace) -> int:
    if find_spec("plotly") is None:
        print("holdfast: the report needs plotly: pip install 'holdfast[spark]'", file=sys.stderr)
        return EXIT_USAGE
    from holdfast.pipeline.lake.catalog import load_catalog
    from holdfast.pipeline.report.report import write_report

    try:
        write_report(args.lake, load_catalog(args.tables), args.output, args.run)
    except OSError as error:
        print(f"holdfast: {args.output} cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_USAGE
    print(f"{args.output}: {args.output.stat().st_size / 1e6:.1f} MB")
    return 0
