"""Subcommands of `holdfast pipeline`, except `run`. Each imports Spark only if it needs it."""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from holdfast_lake.cli.metrics import metrics_text

if TYPE_CHECKING:
    from holdfast_lake.lake.lake import Lake
    from holdfast_lake.lake.status import LakeStatus
    from holdfast_lake.session import SparkLog

EXIT_USAGE: Final = 2


def open_lake(args: argparse.Namespace) -> "Lake":
    """Opens the lake of a command."""
    from holdfast_lake.lake.lake import Lake

    return Lake(args.lake, tables=args.tables)


def existing_lake(args: argparse.Namespace) -> "Lake":
    """Opens the lake of a command. Raises LakeError if it was never made."""
    from holdfast.client.log.lake.files import LakeError
    from holdfast_lake.lake.settings import SETTINGS

    lake = open_lake(args)
    if not lake.settings:
        raise LakeError(f"there is no lake in {lake.path} (no {SETTINGS}): run the pipeline first")
    return lake


@contextmanager
def spark_of(
    lake: "Lake", args: argparse.Namespace, backlog: int | None = None
) -> "Iterator[SparkLog]":
    """Gives the lake a Spark session with the options of the command.

    Its output goes to a file, unless the user sets a log level or spark-submit has started Java.
    """
    from holdfast_lake.class_archive import has_archive
    from holdfast_lake.session import (
        SparkLog,
        Terminated,
        end_session,
        java_of_command,
        lake_session,
        submitted,
    )

    conf = dict(args.conf)
    log = SparkLog()
    if not getattr(args, "quiet", False):
        is_prepared = submitted() or has_archive()
        print(
            "starting Spark: its Java takes some seconds, on a busy machine a minute"
            + ("" if is_prepared else " (`holdfast pipeline prepare` halves that)"),
            file=sys.stderr,
        )
    is_shown = submitted() or "spark.log.level" in conf
    with closing(log), log.catching_py4j(), java_of_command() as signals:
        try:
            with signals.not_lost(), nullcontext() if is_shown else log.catching():
                lake.spark = lake_session(args.master, backlog=backlog, **conf)
        except (Terminated, KeyboardInterrupt):
            print("stopped while Spark was starting: nothing was changed", file=sys.stderr)
            raise
        try:
            yield log
        finally:
            end_session(lake.spark)


def show_status(args: argparse.Namespace) -> int:
    """Prints the progress of each table of a lake, without Spark."""
    lake = existing_lake(args)
    chosen = lake.catalog.chosen(args.name or ["all"])
    status = lake.status(ask_servers=not args.offline)
    status = replace(status, tables=[each for each in status.tables if each.name in chosen])
    if args.prometheus:
        print(metrics_text(status), end="")
    else:
        print(json.dumps(status.as_dict(), indent=2) if args.json else status)
    return 0 if args.fail_if_lag is None else _check_lag(status, args.fail_if_lag)


def _check_lag(status: "LakeStatus", limit_s: float) -> int:
    """Returns 1 and prints a line if a table is too far behind, or if that is not known."""
    code = 0
    for table in status.tables:
        if table.lag_s is None:
            why = status.problem or "its source was built again"
            print(f"holdfast: the lag of {table.name} is not known: {why}", file=sys.stderr)
            code = 1
        elif table.lag_s > limit_s:
            print(
                f"holdfast: {table.name} is {table.lag_s:.0f} s behind {table.source}, more than "
                f"{limit_s:g} s ({table.lag:,} missing)",
                file=sys.stderr,
            )
            code = 1
    return code


def show_schema(args: argparse.Namespace) -> int:
    """Prints the meaning of the tables and their columns."""
    from holdfast_lake.lake.catalog import described, load_catalog

    tables = described(load_catalog(args.tables), args.name)
    if args.json:
        print(json.dumps(tables, indent=2))
    else:
        print("\n\n".join("\n".join(_schema_lines(table)) for table in tables))
    return 0


def _schema_lines(table: dict[str, Any]) -> list[str]:
    head = f"{table['name']} ({table['layer']}, from {table['source']})"
    result = [head, f"  {table['description']}"]
    if table["partition_by"]:
        result.append(f"  partitioned by {', '.join(table['partition_by'])}")
    if table["keys"]:
        result.append(f"  sorted by {', '.join(table['keys'])}")
    name = max(len(column["name"]) for column in table["columns"])
    kind = min(24, max(len(column["type"]) for column in table["columns"]))
    for column in table["columns"]:
        text = f"    {column['name']:{name}}  {column['type']:{kind}}  {column['description']}"
        result.append(text)
    return result


def rebuild(args: argparse.Namespace) -> int:
    """Builds a table again after its declaration has changed."""
    from holdfast_lake.lake.runner import RunProgress

    lake = open_lake(args)
    lake.check_rebuild(args.names)
    with spark_of(lake, args):
        progress = RunProgress()
        report = lake.rebuild(args.names, listener=progress)
    progress.finished(report)
    return 0 if report.ok else 1


def compact(args: argparse.Namespace) -> int:
    """Merges the many files of small commits into few. Plain Parquet files need no Spark."""
    from holdfast_lake.lake.stores.store import ParquetStore

    lake = open_lake(args)
    if lake.store_name == ParquetStore.name:
        saved = lake.compact(args.what)
    else:
        with spark_of(lake, args):
            saved = lake.compact(args.what)
    for name, files in saved.items():
        print(f"{name}: {files} files fewer" if files else f"{name}: nothing to do")
    return 0


def prepare(_args: argparse.Namespace) -> int:
    """Makes the archive of Spark's classes, unless there is one."""
    from holdfast_lake.class_archive import archive_path, make_archive
    from holdfast_lake.java import java_home

    path = archive_path(java_home())
    is_made = not path.exists()
    if is_made:
        print("starting Spark to archive its classes: one to three minutes", file=sys.stderr)
        make_archive()
    text = "" if is_made else ", as before"
    print(f"Spark starts in half the time{text}: its classes are in {path}")
    return 0


def write_package(args: argparse.Namespace) -> int:
    """Writes the files for spark-submit where holdfast is not installed."""
    from holdfast_lake.session import NEEDED, write_package

    archive, script = write_package(args.output)
    print(
        f"wrote {archive} and {script}\n\n"
        f"The driver and the executors need Python 3.11 or newer with {', '.join(NEEDED)}.\n"
        "All of them must see the lake's directory under the same path. Run\n\n"
        f"  spark-submit --master spark://HOST:7077 --py-files {archive} {script} \\\n"
        "    run all --from HOST:ADMINPORT --lake DIR\n"
    )
    return 0


def infer_rules(args: argparse.Namespace) -> int:
    """Writes rules that fit the last messages of a log, without Spark."""
    from holdfast_lake.cli.options import access_options
    from holdfast_lake.lake.runner import check_source
    from holdfast_lake.lake.settings import source_options
    from holdfast_lake.lake.table import RECORDS
    from holdfast_lake.source.options import parse
    from holdfast_lake.source.source import newest_messages
    from holdfast_lake.tables.inference import infer, tables_file
    from holdfast_lake.tables.profiles import load_profiles

    output: Path = args.output
    source = source_options(args.source) if args.source else open_lake(args).source()
    source |= access_options(args)
    check_source([RECORDS], source)
    profiles = load_profiles(args.profiles)
    messages, hint = newest_messages(parse(source), args.messages)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    topics = len({topic for topic, _, _ in messages})
    seen = f"{len(messages):,} messages of {topics:,} topics"
    proposals = infer(messages, profiles)
    for each in profiles if args.profiles is not None else ():
        own = args.profiles / f"{each.name}.toml"
        if own.exists() and not any(one.reason.startswith(each.title) for one in proposals):
            print(f"hint: {own}: no topic of these messages is one of its `found`, or none of its "
                  "rules can read one", file=sys.stderr)  # fmt: skip
    if not proposals:
        print(f"no rule to propose from {seen}: the default rules fit, or there are too few")
        return 0
    text = tables_file(proposals, {"messages": len(messages), "topics": topics})
    try:
        with output.open("x") as file:
            file.write(text)
    except OSError as error:
        cure = ": remove it, or give another -o" if output.exists() else ""
        print(f"holdfast: {output} cannot be written: {error.strerror}{cure}", file=sys.stderr)
        return EXIT_USAGE
    words = ["run", "--lake", args.lake, "--tables", str(output)]
    args.tables = [str(output)]
    if stored := open_lake(args).redeclared():  # by other rules, which a run does not mix
        words[:1] = ["rebuild", *stored]
    elif args.source:
        words[1:1] = ["--from", args.source]
    print(f"wrote {output}: {len(proposals)} rules from {seen}. Read it, then use it:")
    print(f"  holdfast pipeline {shlex.join(words)}")
    return 0


def write_report(args: argparse.Namespace) -> int:
    """Writes charts of tables as one HTML file, without Spark."""
    if find_spec("plotly") is None:
        print("holdfast: the report needs plotly: pip install 'holdfast[spark]'", file=sys.stderr)
        return EXIT_USAGE
    from holdfast.client.log.lake.errors import ObjectStoreError
    from holdfast_lake.report.report import write_report

    output: Path = args.output
    try:
        lake = open_lake(args)
        print(f"reading the tables of {lake.path}: a minute for millions of rows", file=sys.stderr)
        write_report(lake.path, lake.catalog, output, args.run_id, args.device)
    except OSError as error:
        if isinstance(error, ObjectStoreError):
            raise
        print(f"holdfast: {output} cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_USAGE
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
    return 0
