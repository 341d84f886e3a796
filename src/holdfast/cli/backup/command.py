"""`holdfast backup`: a copy of a data directory at one moment, by hard links, also while a node
serves it."""

import argparse
import sys
from pathlib import Path

from holdfast.cli.backup.backup import make_backups
from holdfast.cli.backup.manifest import BackupError
from holdfast.cli.text import count_text, size_text
from holdfast.log.files.data_directory import DataDirectoryError


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "backup",
        help="copy a data directory at one moment",
        description="Copy a data directory at one moment, whether a broker serves it or not. Files"
        " that never change are hard links, so a backup on the same file system takes seconds and"
        " little space.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="data directory")
    parser.add_argument("target", type=Path, metavar="BACKUP", help="new or empty directory")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Makes a backup. Returns 1 if that is impossible."""
    try:
        made = make_backups(args.directory, args.target)
    except (BackupError, DataDirectoryError, OSError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    for manifest, copied in made:
        files = count_text(len(manifest.files), "file")
        print(f"{copied.target}: {files}, {size_text(copied.linked_bytes)} linked,"
              f" {size_text(copied.copied_bytes)} copied")  # fmt: skip
        if not copied.links:
            print("no hard links here (another file system or owner), so all files were copied")
    print(f"has everything acknowledged before {made[0][0].began}")
    return 0
