"""`holdfast pipeline status`: the progress of each table of a lake, without Spark."""

import argparse
import json

from holdfast.cli.pipeline import options


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_lake(parser)
    options.add_tables(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--offline", action="store_true", help="do not ask the servers how far the log is"
    )


def run(args: argparse.Namespace) -> int:
    from holdfast.pipeline.lake.files.files import LakeError
    from holdfast.pipeline.lake.lake import SETTINGS, Lake

    lake = Lake(args.lake, tables=args.tables)
    if not lake.settings:
        raise LakeError(f"there is no lake in {lake.path} (no {SETTINGS}): run the pipeline first")
    status = lake.status(ask_servers=not args.offline)
    print(json.dumps(status.as_dict(), indent=2) if args.json else status)
    return 0
