"""`holdfast pipeline run`: one run of the jobs, in the foreground.

SIGTERM and SIGINT end it after the steps in progress, with exit code 0. A second SIGINT ends it at
once. Exit code 1 means that a table failed.
"""

import argparse
import signal
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from types import FrameType
from typing import TYPE_CHECKING

from holdfast_lake.cli import options
from holdfast_lake.cli.commands import spark_of
from holdfast_lake.cli.metrics import serving
from holdfast_lake.cli.status_reports import StatusReporter

if TYPE_CHECKING:
    from holdfast_lake.lake.lake import Lake
    from holdfast_lake.lake.runner import Runner, RunProgress


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_what(parser, "WHAT", "bronze, silver, gold, all (default), or names of tables")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="admin ports of the servers (host:port[,host:port], https://host:port); remembered by"
        " the lake",
    )
    options.add_access(parser)
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
    parser.add_argument(
        "--metrics",
        type=options.address,
        metavar="ADDR:PORT",
        help="serve metrics for Prometheus at http://ADDR:PORT/metrics while the run lasts",
    )
    parser.add_argument("--quiet", action="store_true", help="print errors only")


def run(args: argparse.Namespace) -> int:
    from holdfast_lake.lake.engine import locked
    from holdfast_lake.lake.lake import Lake
    from holdfast_lake.lake.runner import RunProgress, check_log, check_source
    from holdfast_lake.lake.status import LATENCY, QUALITY, READINGS, TOPICS, hints
    from holdfast_lake.lake.table import RECORDS, TableError

    if args.trigger is not None and not args.continuous:
        raise TableError("--trigger is for --continuous: without it, a run is done once")
    if args.trigger is None:
        args.trigger = 1.0
    lake = Lake(args.lake, store=args.format, tables=args.tables)
    chosen = lake.catalog.chosen(args.what)
    source = lake.source_with(args.source)
    check_source(chosen, source)
    lake.check_tables()
    source |= options.access_options(args) | dict(args.option)
    if RECORDS in chosen:
        check_log(source, lake.path, waits=args.continuous)
    with ExitStack() as stack:
        # Spark needs seconds to start: another run, and a full disk, are noticed before. Without
        # the locks meanwhile, of two runs the one that began first could be refused a minute later.
        stack.enter_context(locked(lake.path, chosen))
        progress = RunProgress(quiet=args.quiet)
        reporter = _reporter(args, lake, source, progress)
        if args.max_records_per_trigger is not None:
            source["maxRecordsPerTrigger"] = str(args.max_records_per_trigger)
        backlog, hint = (None, "") if args.continuous else lake.backlog(args.what, source)
        if hint and not args.quiet:
            print(f"hint: {hint}", file=sys.stderr)
        if backlog == 0:
            lake.remember(source)
            with reporter:
                reporter.is_ok = True
            if not args.quiet:
                print("nothing new", file=sys.stderr)
            return 0
        if args.metrics is not None:
            stack.enter_context(_metrics(args.metrics, lake))
        stack.enter_context(reporter)
        log = stack.enter_context(spark_of(lake, args, backlog))
        runner = lake.runner(
            args.what, source=source or None, listener=progress, compact_at=args.compact_at
        )
        runner.has_locks = True
        stop_on_signals(runner)
        report = runner.continuously(args.trigger) if args.continuous else runner.run_once()
        reporter.is_ok = report.ok
        progress.finished(report)
        if not args.quiet and not report.commits.keys().isdisjoint(
            (READINGS, QUALITY, LATENCY, TOPICS)
        ):
            for hint in hints(lake.path, lake.catalog):
                print(f"hint: {hint}", file=sys.stderr)
        if not report.ok:
            print(f"holdfast: Spark's own output is in {log.keep()}", file=sys.stderr)
    return 0 if report.ok else 1


def _reporter(
    args: argparse.Namespace, lake: "Lake", source: Mapping[str, str], progress: "RunProgress"
) -> StatusReporter:
    """The reports of the run to the servers of its log."""
    from holdfast.client.log.reading.offsets import OffsetError
    from holdfast_lake.source.options import OptionError, parse

    found = None
    # The run itself refuses wrong options.
    with suppress(OptionError, OffsetError):
        found = parse(source) if source else None
    trigger_s = args.trigger if args.continuous else 0.0
    return StatusReporter(lake, found, progress.errors, trigger_s=trigger_s)


def _metrics(address: tuple[str, int], lake: "Lake") -> AbstractContextManager[int]:
    """Serves the metrics of a lake. Raises LakeError if the address cannot be used."""
    from holdfast.client.log.lake.files import LakeError

    try:
        return serving(address, lambda: lake.status(with_hints=False))
    except OSError as error:
        raise LakeError(f"--metrics {address[0]}:{address[1]}: {error.strerror}") from None


def stop_on_signals(runner: "Runner") -> None:
    """Lets the runner finish its steps at the first signal. A second SIGINT interrupts it.

    Its threads wait for Java, and the run for its threads, so Java is killed then.
    """
    from holdfast_lake.session import kill_java

    def stop(number: int, _frame: FrameType | None) -> None:
        if runner.stopping and number == signal.SIGINT:
            kill_java()
            raise KeyboardInterrupt
        runner.stop()
        print("stopping after the steps that are being made", file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
