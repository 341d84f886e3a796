"""`holdfast pipeline`: the log as tables, kept up to date by Spark."""

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from holdfast_lake.cli import backfill, catalogs, commands, imports, options
from holdfast_lake.cli import run as run_command

EXIT_USAGE: Final = 2
EXIT_TERMINATED: Final = 143
PACKAGE_DIRECTORY: Final = Path("holdfast-spark")
REPORT: Final = Path("report.html")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "pipeline",
        help="the log as tables, by Spark",
        description="The log as tables: bronze (the records), silver (typed readings), gold "
        "(statistics), made and kept up to date by Spark.",
    )
    children = parser.add_subparsers(dest="pipeline_command", metavar="COMMAND", required=True)

    def add(
        name: str, work: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        child = children.add_parser(name, help=text, description=text[0].upper() + text[1:])
        child.set_defaults(work=work)
        return child

    run_parser = add("run", run_command.run, "bring tables up to date, once or continuously")
    run_command.add_options(run_parser)
    status = add("status", commands.show_status, "how far each table is")
    schema = add("schema", commands.show_schema, "every table and its columns")
    rebuild = add(
        "rebuild", commands.rebuild, "delete a table and those made from it, and build them again"
    )
    backfill.add_options(
        add("backfill", backfill.backfill, "make the rows of some days again, by today's rules")
    )
    imports.add_options(add("import", imports.import_past, "bring files of the past to the log"))
    imports.add_replay_options(add("replay", imports.replay, "publish messages of a lake again"))
    compact = add("compact", commands.compact, "make few files of those of small commits")
    add("prepare", commands.prepare, "let Spark start in half the time: once on a machine")
    package = add("package", commands.write_package, "a zip and a script for spark-submit")
    infer = add("infer", commands.infer_rules, "propose rules for the payloads of a log")
    report = add("report", commands.write_report, "charts of the tables as one HTML file")
    register = add("register", catalogs.register, "list tables in a catalog, for other programs")
    history = add("history", catalogs.show_history, "when tables were made and got columns")
    for each in (status, rebuild, compact, report, infer, register, history):
        options.add_lake(each)
    for each in (status, schema, rebuild, compact, report, register, history):
        options.add_tables(each)
    for each in (rebuild, compact, register):
        options.add_session(each)
    catalogs.add_options(register)
    history.add_argument("name", nargs="*", metavar="TABLE", help="only these (default: all)")
    for each in (status, schema, history):
        each.add_argument("--json", action="store_true", help="print JSON")
    status.add_argument(
        "--offline", action="store_true", help="do not ask the servers how far the log is"
    )
    options.add_watching(status)
    status.add_argument(
        "name", nargs="*", metavar="TABLE", help="only these: a layer, or names (default: all)"
    )
    schema.add_argument("name", nargs="*", metavar="TABLE", help="only these (default: all)")
    options.add_inference(infer)
    rebuild.add_argument("names", nargs="+", metavar="TABLE", help="silver or gold table")
    options.add_what(compact, "TABLE", "bronze, silver, all (default), or names of tables")
    options.add_output(package, PACKAGE_DIRECTORY, "DIR", "where to")
    options.add_selection(report)
    options.add_output(report, REPORT, "FILE", "where to write it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for package in ("pyspark", "pyarrow", "numpy"):
        if find_spec(package) is None:
            text = f"holdfast: the pipeline needs {package}: pip install 'holdfast[spark]'"
            print(text, file=sys.stderr)
            return EXIT_USAGE
    from holdfast.client.admin_access import AdminAccessError
    from holdfast.client.admin_connection import AdminError
    from holdfast.client.log.lake.errors import LakeError, ObjectStoreError, RaceError
    from holdfast.client.log.reading.offsets import DataLossError, OffsetError
    from holdfast_lake.java import JavaError
    from holdfast_lake.lake.table import TableError
    from holdfast_lake.session import Terminated
    from holdfast_lake.source.options import OptionError
    from holdfast_lake.tables.profiles import ProfileError

    try:
        code: int = args.work(args)
    except (LakeError, RaceError, ObjectStoreError, TableError, OptionError, DataLossError,
            OffsetError, JavaError, AdminError, AdminAccessError, ProfileError,
            OSError) as error:  # fmt: skip
        if isinstance(error, BrokenPipeError):
            raise
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_USAGE
    except Terminated:
        # A run that has not begun has no step to finish. Other work was cut off.
        return 0 if args.pipeline_command == "run" else EXIT_TERMINATED
    return code
