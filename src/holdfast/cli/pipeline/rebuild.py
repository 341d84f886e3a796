"""`holdfast pipeline rebuild`: builds a table again after its declaration has changed."""

import argparse

from holdfast.cli.pipeline import options


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="TABLE", help="silver or gold table")
    options.add_lake(parser)
    options.add_tables(parser)
    options.add_session(parser)


def run(args: argparse.Namespace) -> int:
    from holdfast.pipeline.lake.lake import Lake
    from holdfast.pipeline.lake.progress import RunProgress
    from holdfast.pipeline.spark import end_session, lake_session

    lake = Lake(args.lake, tables=args.tables)
    lake.catalog.table(args.name)
    lake.spark = lake_session(args.master, **dict(args.conf))
    progress = RunProgress()
    try:
        report = lake.rebuild(args.name, listener=progress)
    finally:
        end_session(lake.spark)
    progress.finished(report)
    return 0 if report.ok else 1
