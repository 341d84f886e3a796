"""The file operations of the lake, and the order in which they make data durable.

A lake is a directory that the driver and all executors see under one path: on one machine, or on a
shared file system.
"""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


class LakeError(Exception):
    """The lake, or a request to it, is not valid. The text says what is wrong and what to do."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file durably and atomically: readers see the old or the new content."""
    os.replace(_written(path, data), path)
    sync_directory(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Write a file like `replace_file`, if it does not exist yet.

    Raises FileExistsError. Of two processes that create it at the same time one succeeds, unless
    the file system has no hard links.
    """
    temporary = _written(path, data)
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, "exists", str(path)) from None
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _written(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def sync_names(root: Path, directory: str) -> None:
    """Make the names below `root/directory`, and the path to it from `root`, durable.

    The contents of the files must be synced already.
    """
    path = root / directory
    if not path.exists():
        return
    for parent, _, _ in os.walk(path):
        sync_directory(Path(parent))
    for above in path.parents:
        sync_directory(above)
        if above == root:
            return


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_all(moves: Iterable[tuple[Path, Path]]) -> None:
    """Move each file to its place, and replace an existing one.

    Files that were moved before are skipped, so the call may be repeated after a crash. Raises
    LakeError if a file is in neither place.
    """
    touched: set[Path] = set()
    for source, target in moves:
        try:
            os.replace(source, target)
        except FileNotFoundError:
            if source.exists():
                _make_durable_directory(target.parent)
                os.replace(source, target)
            elif target.exists():
                continue
            else:
                raise LakeError(
                    f"{target} is missing: its commit is recorded, but neither it nor {source} "
                    "is there. Restore it, or build the table again"
                ) from None
        touched.add(target.parent)
    for directory in touched:
        sync_directory(directory)


def _make_durable_directory(directory: Path) -> None:
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_directory(each.parent)


def remove_all(paths: Iterable[Path]) -> None:
    """Remove those of the files that exist. Directories that become empty stay."""
    for path in paths:
        path.unlink(missing_ok=True)


def remove_tree(directory: Path) -> None:
    """Remove a directory with everything in it, if it exists."""
    shutil.rmtree(directory, ignore_errors=True)
