"""`holdfast restore`: a new data directory from a backup or a lake, whole or up to a time."""

import argparse
import sys
from pathlib import Path

from holdfast.cli.backup.manifest import BackupError
from holdfast.cli.backup.restoration import advice, restore
from holdfast.cli.log.records import parse_bound
from holdfast.cli.text import count_text
from holdfast.client.log.lake.errors import LakeError
from holdfast.io.conversion.source import ConversionError
from holdfast.log.files.data_directory import DataDirectoryError


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "restore",
        help="make a data directory from a backup",
        description="Check a backup, and make a data directory from it. The backup stays as it is."
        " A lake has the messages and, every five minutes, the rest of a broker's state.",
    )
    parser.add_argument(
        "backup", type=Path, nargs="?", metavar="BACKUP", help="made by holdfast backup"
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="new or empty data directory")
    parser.add_argument(
        "--until",
        type=_time,
        metavar="TIME",
        help="leave out records of this time and later, such as 2026-01-31T12:00:00Z",
    )
    parser.add_argument(
        "--from-lake", metavar="LAKE", help="a lake of the pipeline, in place of a backup"
    )
    lake = parser.add_argument_group("with --from-lake")
    lake.add_argument(
        "--since", type=_time, metavar="TIME", help="leave out older messages that nobody waits for"
    )
    lake.add_argument(
        "--messages-only", action="store_true", help="do without sessions, queues and bans"
    )
    lake.add_argument("--node-id", default="n1", metavar="NAME", help="node.id (default: n1)")
    parser.set_defaults(run=run)


def _time(text: str) -> int:
    time_us = None if text.isdecimal() else parse_bound(text).time_us
    if time_us is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time like 2026-01-31T12:00:00Z")
    return time_us


def run(args: argparse.Namespace) -> int:
    """Restores. Returns 1 if that is impossible, and 2 for wrong usage."""
    if (args.backup is None) == (args.from_lake is None):
        print("holdfast: give a BACKUP, or --from-lake LAKE, before DIR", file=sys.stderr)
        return 2
    try:
        lines = _from_backup(args) if args.from_lake is None else _from_lake(args)
    except (BackupError, ConversionError, DataDirectoryError, LakeError, OSError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    for line in lines:
        print(line)
    return 0


def _from_backup(args: argparse.Namespace) -> list[str]:
    manifest, lines = restore(args.backup, args.directory, args.until)
    files = count_text(len(manifest.files), "file")
    first = f"{args.directory}: {files} of {manifest.began}"
    return [first, *lines, *advice(manifest, args.directory)]


def _from_lake(args: argparse.Namespace) -> list[str]:
    # Imported here, because a restore of a backup needs no Parquet.
    from holdfast.cli.backup.from_lake import LakeSource, restore_from_lake

    source = LakeSource(args.from_lake, args.until, messages_only=args.messages_only)
    lines = restore_from_lake(source, args.directory, args.node_id, args.since)
    return [
        f"{args.directory}: node {args.node_id}, made from {args.from_lake}",
        *lines,
        f"start the broker: holdfast serve --data {args.directory}",
        "never start a node of the former cluster again: it has another history",
    ]
