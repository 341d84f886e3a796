"""`holdfast restore`: a new data directory from a backup, whole or up to a time."""

import argparse
import sys
from pathlib import Path

from holdfast.cli.backup.manifest import BackupError
from holdfast.cli.backup.restoration import advice, restore
from holdfast.cli.log.records import parse_bound
from holdfast.cli.text import count_text
from holdfast.log.files.data_directory import DataDirectoryError


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "restore",
        help="make a data directory from a backup",
        description="Check a backup, and make a data directory from it. The backup stays as it is.",
    )
    parser.add_argument("backup", type=Path, metavar="BACKUP", help="made by holdfast backup")
    parser.add_argument("directory", type=Path, metavar="DIR", help="new or empty data directory")
    parser.add_argument(
        "--until",
        type=_time,
        metavar="TIME",
        help="leave out records of this time and later, such as 2026-01-31T12:00:00Z",
    )
    parser.set_defaults(run=run)


def _time(text: str) -> int:
    time_us = None if text.isdecimal() else parse_bound(text).time_us
    if time_us is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time like 2026-01-31T12:00:00Z")
    return time_us


def run(args: argparse.Namespace) -> int:
    """Restores. Returns 1 if that is impossible."""
    try:
        manifest, lines = restore(args.backup, args.directory, args.until)
    except (BackupError, DataDirectoryError, OSError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    print(f"{args.directory}: {count_text(len(manifest.files), 'file')} of {manifest.began}")
    for line in [*lines, *advice(manifest, args.directory)]:
        print(line)
    return 0
