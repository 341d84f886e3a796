"""`holdfast pipeline backfill`: the rows of some days are made again and replaced."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from holdfast_lake.cli import options
from holdfast_lake.cli.commands import open_lake, spark_of

if TYPE_CHECKING:
    from holdfast_lake.lake.backfill.backfill import BackfillReport

DAYS_SHOWN: Final = 31
"""The most days of a table that are printed one by one."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        metavar="TABLE",
        help="tables to make again, with those made from them (default: all but records, from the "
        "records of the lake); records reads the days from the log again",
    )
    parser.add_argument(
        "--from",
        dest="first",
        required=True,
        metavar="DAY",
        help="the first day (UTC), such as 2026-11-20; of a time, its day",
    )
    parser.add_argument(
        "--to", dest="last", metavar="DAY", help="the last day, included (default: no end)"
    )
    parser.add_argument(
        "--context",
        type=options.positive,
        metavar="DAYS",
        help="read only these days before the first one, for numbers and repetitions that began "
        "there (default: all days)",
    )
    options.add_lake(parser)
    options.add_tables(parser)
    options.add_session(parser)
    parser.add_argument("--quiet", action="store_true", help="print errors only")


def backfill(args: argparse.Namespace) -> int:
    """Makes the rows of some days again."""
    from holdfast_lake.lake.backfill.backfill import Backfill
    from holdfast_lake.lake.backfill.parts import parse_days
    from holdfast_lake.lake.runner import RunProgress

    days = parse_days(args.first, args.last)
    lake = open_lake(args)
    work = Backfill(lake, args.names, days, args.context)
    with spark_of(lake, args):
        progress = RunProgress(quiet=args.quiet)
        report = work.run(progress)
    if not args.quiet:
        print("\n".join(_lines(report)))
    progress.finished(report.run)
    return 0 if report.run.ok else 1


def _lines(report: "BackfillReport") -> Iterator[str]:
    """Says which rows a backfill has replaced, per table and day."""
    for table, days in report.rows.items():
        if "" in days:
            yield f"{table}: {_change(*days.pop(''))}"
            continue
        before, after = (sum(pair[at] for pair in days.values()) for at in (0, 1))
        yield f"{table}, {report.days}: {_change(before, after)}"
        if len(days) > 1:
            for day in list(days)[:DAYS_SHOWN]:
                yield f"  {day}: {_change(*days[day])}"
        if len(days) > DAYS_SHOWN:
            yield f"  and {len(days) - DAYS_SHOWN} days more"


def _change(before: int, after: int) -> str:
    return f"{before:,} rows, as before" if before == after else f"{before:,} rows became {after:,}"
