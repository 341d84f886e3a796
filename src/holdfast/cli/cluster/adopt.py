"""`holdfast cluster adopt`: a copy of a stopped node's directory in the form of this version."""

import argparse
import logging
import shutil
import sys
from pathlib import Path
from typing import Final

from holdfast.cli.backup.backup import LEFT_OUT, Copied
from holdfast.cli.backup.manifest import BackupError, NewDirectory, NotEmpty
from holdfast.io.conversion.adoption import COMPLETE, adopt
from holdfast.io.conversion.source import ConversionError
from holdfast.io.disk.storage import StorageError
from holdfast.log.files.data_directory import DataDirectoryError, lock_root, open_to_read
from holdfast.log.files.filesystem import TEMPORARY, OsFileSystem
from holdfast.log.files.layout import BEFORE_ADOPTION, JOURNAL, QUARANTINE, SNAPSHOTS, Manifest
from holdfast.log.journal.epoch_folders import LEASE

PARTIAL: Final = ".adopting"
"""The end of the name of a directory that is not complete yet."""
COPIES: Final = 2
"""The copies of a single broker's log for which there must be room: one in each form."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "adopt", help="copy the directory of an earlier version in the form of this one"
    )
    parser.description = (
        "Make a copy of the data directory of a stopped broker, or node of a cluster, of an earlier"
        " version in the form of this one. A start does the same in the directory itself. OLD is"
        " only read; never serve it once clients have connected to NEW."
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="data directory of a stopped node")
    parser.add_argument("new", type=Path, metavar="NEW", help="new or empty directory")


def run(args: argparse.Namespace) -> int:
    """Copies and adopts. Returns 1 if that is impossible, and then there is no copy."""
    logger = logging.getLogger("holdfast")
    level = logger.level
    # The warning of an adoption names the former content, which the copy does not have.
    logger.setLevel(logging.ERROR)
    try:
        manifest = adopt_copy(args.old, args.new)
    except (BackupError, ConversionError, DataDirectoryError, StorageError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        # A write to a full disk does not name the file.
        name = args.new if error.filename is None else error.filename
        print(f"holdfast: {name}: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        logger.setLevel(level)
    print(f"{args.new} is the directory of node {manifest.node_id}, cluster {manifest.cluster_id}")
    print(f"start it: holdfast serve --data {args.new}")
    print(f"never serve {args.old} again: both would go on from the same messages")
    return 0


def adopt_copy(source: Path, target: Path) -> Manifest:
    """Makes the copy, and returns its manifest. Raises `ConversionError` or one of the errors of
    the directory."""
    if (source / COMPLETE).exists():
        raise ConversionError(
            f"{source} is half adopted: start its broker once, which completes that"
        )
    before = open_to_read(source).manifest
    if (source / LEASE).exists():
        raise ConversionError(
            f"{source} is shared by several nodes: the first one of this version that serves it"
            " adopts it"
        )
    if target.absolute().resolve().is_relative_to(source.resolve()):
        raise ConversionError(f"{target} is inside {source}: give a directory outside of it")
    try:
        made = NewDirectory(target, PARTIAL)
    except NotEmpty as error:
        raise ConversionError(str(error)) from None
    lock = lock_root(source)
    try:
        names = [name for path in sorted(source.rglob("*")) if (name := _kept_name(source, path))]
        size_bytes = sum((source / name).stat().st_size for name in names)
        wanted = size_bytes if before.is_replica else COPIES * size_bytes
        folder = next(each for each in made.partial.parents if each.exists())
        free_bytes = OsFileSystem(folder).free_bytes()
        if free_bytes < wanted:
            raise ConversionError(f"{folder} has {free_bytes} bytes free, and {wanted} are needed")
        with made as partial:
            for empty in (JOURNAL, SNAPSHOTS, QUARANTINE):
                (partial / empty).mkdir(mode=0o750, parents=True)
            copied = Copied(source, partial)
            for name in names:
                if name.endswith(".db"):
                    copied.copy_database(name)
                else:
                    copied.copy(name)
            copied.finish()
            adopt(partial, before.node_id, before.partitions)
            shutil.rmtree(partial / BEFORE_ADOPTION, ignore_errors=True)
            for left in LEFT_OUT:
                (partial / left).unlink(missing_ok=True)
            return open_to_read(partial).manifest
    finally:
        lock.release()


def _kept_name(source: Path, path: Path) -> str:
    """The name of a file inside the directory, or "" for one that is not copied."""
    name = str(path.relative_to(source))
    is_left_out = name in LEFT_OUT or name.startswith(f"{BEFORE_ADOPTION}/")
    is_passing = name.endswith((TEMPORARY, ".db-wal", ".db-shm", ".db-journal"))
    return "" if is_left_out or is_passing or not path.is_file() else name
