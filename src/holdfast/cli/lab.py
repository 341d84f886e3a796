"""`holdfast lab`: the options. The package `holdfast_lab` has the rest, and is imported on use."""

import argparse
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

EXIT_USAGE: Final = 2
NEEDED: Final = {"pyspark": "holdfast[lab]", "plotly": "holdfast[lab]"}
"""The packages that the lab needs, and how they are installed."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "lab",
        help="repeat the experiments of the published studies on any broker",
        description="Repeat the experiments of the published studies on Holdfast, on Mosquitto or"
        " on any broker, and draw a report.",
    )
    commands = parser.add_subparsers(dest="lab_command", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="list the experiments and the targets")
    run_parser = commands.add_parser(
        "run",
        help="run experiments",
        description="Run experiments, each against its targets. The results are stored one by one.",
        epilog="exit codes: 0 done; 1 a promise was broken, or nothing was measured; 2 wrong usage",
    )
    run_parser.add_argument(
        "experiments", nargs="+", metavar="EXPERIMENT", help="all, or names of `lab list`"
    )
    run_parser.add_argument(
        "--target", action="append", metavar="TARGET", help="may be repeated (default: of each)"
    )
    run_parser.add_argument("--quick", action="store_true", help="few rounds, in some minutes")
    run_parser.add_argument("--full", action="store_true", help="all rounds (default)")
    run_parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    _add_directory(run_parser, "--directory")
    report = commands.add_parser("report", help="draw a run as a page and as Markdown")
    _add_directory(report, "directory")
    report.add_argument("-o", "--output", type=Path, metavar="FILE", help="(DIR/report.html)")
    report.add_argument(
        "--no-spark", action="store_true", help="without the verdict of the pipeline"
    )
    report.add_argument("--png", action="store_true", help="also a picture, made by Chromium")
    report.add_argument(
        "--document",
        type=Path,
        metavar="FILE",
        help="only the page of tables for documents, with its results kept in FILE without .md",
    )
    compare = commands.add_parser("compare", help="print two runs side by side")
    compare.add_argument("before", type=Path, metavar="DIR")
    compare.add_argument("after", type=Path, metavar="DIR")
    for each in (listing, run_parser, report, compare):
        each.set_defaults(run=run)


def _add_directory(parser: argparse.ArgumentParser, name: str) -> None:
    options = {} if name.startswith("-") else {"nargs": "?"}
    parser.add_argument(
        name,
        type=Path,
        default=Path("lab"),
        metavar="DIR",
        help="of the run (lab)",
        **options,  # type: ignore[arg-type]
    )


def run(args: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"holdfast: lab: {missing[0]} is not installed: pip install 'holdfast[lab]'",
              file=sys.stderr)  # fmt: skip
        return EXIT_USAGE
    args.words = sys.argv[1:]
    code: int = import_module("holdfast_lab.experiments.command").run(args)
    return code
