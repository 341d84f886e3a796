"""`holdfast pipeline run`: one run of the jobs, in the foreground.

SIGTERM and SIGINT end it after the steps in progress, with exit code 0. A second SIGINT ends it at
once. Exit code 1 means that a table failed.
"""

import argparse
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from holdfast.cli.pipeline import options

if TYPE_CHECKING:
    from holdfast.pipeline.lake.runner import Runner


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_what(parser, "WHAT", "bronze, silver, gold, all (default), or names of tables")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="admin ports of the servers (host:port[,host:port]) or a data directory; "
        "remembered by the lake",
    )
    options.add_lake(parser)
    parser.add_argument(
        "--format",
        choices=("parquet", "delta", "iceberg"),
        help="how a new lake is kept (default parquet)",
    )
    options.add_tables(parser)
    options.add_session(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--once", action="store_true", help="what is there now, then end (the default)"
    )
    how.add_argument("--continuous", action="store_true", help="go on until stopped")
    parser.add_argument(
        "--trigger",
        type=options.duration_s,
        default=1.0,
        metavar="TIME",
        help="--continuous: how often a table is looked after (default 1s)",
    )
    parser.add_argument(
        "--max-records-per-trigger",
        type=options.positive,
        metavar="N",
        help="records in one commit of bronze at most (default 2000000)",
    )
    parser.add_argument(
        "--compact-at",
        type=options.positive,
        metavar="N",
        help="make few files of the small ones of a bronze or silver table whenever it has got N "
        "more (default: never; `holdfast pipeline compact` does it when no run goes on)",
    )
    parser.add_argument(
        "--option",
        type=options.pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the data source, such as failOnDataLoss=false; may be given again",
    )
    parser.add_argument("--quiet", action="store_true", help="print errors only")


def run(args: argparse.Namespace) -> int:
    from holdfast.pipeline.lake.lake import Lake, source_options
    from holdfast.pipeline.lake.progress import RunProgress
    from holdfast.pipeline.lake.runner import check_source
    from holdfast.pipeline.session import end_session, lake_session

    lake = Lake(args.lake, store=args.format, tables=args.tables)
    chosen = lake.catalog.chosen(args.what)
    source = source_options(args.source) if args.source else lake.source()
    check_source(chosen, source)
    source |= dict(args.option)
    if args.max_records_per_trigger is not None:
        source["maxRecordsPerTrigger"] = str(args.max_records_per_trigger)
    # Java inherits ignored signals. A SIGTERM to all processes of a service must not end Java
    # before the steps are finished. It ends with this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lake.spark = lake_session(args.master, **dict(args.conf))
    progress = RunProgress(quiet=args.quiet)
    runner = lake.runner(
        args.what, source=source or None, listener=progress, compact_at=args.compact_at
    )
    stop_on_signals(runner)
    try:
        report = runner.continuously(args.trigger) if args.continuous else runner.run_once()
    finally:
        end_session(lake.spark)
    progress.finished(report)
    return 0 if report.ok else 1


def stop_on_signals(runner: "Runner") -> None:
    """Let the runner finish its steps at the first signal. A second SIGINT interrupts it."""

    def stop(number: int, _frame: FrameType | None) -> None:
        if runner.stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        runner.stop()
        print("stopping after the steps that are being made", file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
