"""`holdfast pipeline compact`: merges the many files of small commits into few."""

import argparse

from holdfast.cli.pipeline import options


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="*",
        default=["all"],
        metavar="TABLE",
        help="bronze, silver, all (default), or names of tables",
    )
    options.add_lake(parser)
    options.add_tables(parser)
    options.add_session(parser)


def run(args: argparse.Namespace) -> int:
    from holdfast.pipeline.lake.lake import Lake
    from holdfast.pipeline.lake.stores.store import ParquetStore
    from holdfast.pipeline.spark import end_session, lake_session

    lake = Lake(args.lake, tables=args.tables)
    if lake.store_name == ParquetStore.name:
        print_saved(lake.compact(args.what))
        return 0
    lake.spark = lake_session(args.master, **dict(args.conf))
    try:
        saved = lake.compact(args.what)
    finally:
        end_session(lake.spark)
    print_saved(saved)
    return 0


def print_saved(saved: dict[str, int]) -> None:
    for name, files in saved.items():
        print(f"{name}: {files} files fewer" if files else f"{name}: nothing to do")
