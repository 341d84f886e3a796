"""`holdfast pipeline`: the log as tables, kept up to date by Spark.

Each command is a module `holdfast.cli.pipeline.<name>` with `add_options(parser)` and `run(args) ->
int`. It imports Spark only when it runs.
"""

import argparse
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Final

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2

COMMANDS: Final = {
    "run": "bring tables up to date, once or continuously",
    "status": "how far each table is",
    "schema": "every table and its columns",
    "rebuild": "forget a table and what is made from it, and make them anew",
    "compact": "make few files of the many that small commits have made",
    "package": "a zip and a script for spark-submit",
    "report": "charts of the tables as one HTML file",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "pipeline",
        help="the log as tables, by Spark",
        description="The log as tables: bronze (the records), silver (typed readings), gold "
        "(statistics), made and kept up to date by Spark.",
    )
    commands = parser.add_subparsers(dest="pipeline_command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        if find_spec(_module(name)) is not None:
            child = commands.add_parser(name, help=text, description=text[0].upper() + text[1:])
            import_module(_module(name)).add_options(child)
    parser.set_defaults(run=run)


def _module(name: str) -> str:
    return f"holdfast.cli.pipeline.{name}"


def run(args: argparse.Namespace) -> int:
    for package in ("pyspark", "pyarrow", "numpy"):
        if find_spec(package) is None:
            print(
                f"holdfast: the pipeline needs {package}: pip install 'holdfast[spark]'",
                file=sys.stderr,
            )
            return EXIT_USAGE
    from holdfast.pipeline.lake.files.files import LakeError
    from holdfast.pipeline.lake.table import TableError
    from holdfast.pipeline.session import JavaError
    from holdfast.pipeline.source.offsets import OffsetError
    from holdfast.pipeline.source.options import OptionError

    try:
        code: int = import_module(_module(args.pipeline_command)).run(args)
    except (LakeError, TableError, OptionError, OffsetError, JavaError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_USAGE
    return code
