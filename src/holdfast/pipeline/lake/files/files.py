"""File operations of the lake: what is made durable, and in which order.

A lake is a directory that the driver and all executors see under one path (one machine, or a shared
file system).
"""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


class LakeError(Exception):
    """The lake, or what is asked of it, is not in order. The text says what is wrong, and what
    to do."""


def write_whole(path: Path, data: bytes) -> None:
    """The file has `data`, durably, or is as it was before: nobody sees half of it."""
    os.replace(_written(path, data), path)
    sync_directory(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """The same for a file that must not be there yet. Raises FileExistsError; of two processes that
    create it at the same time one gets it, unless the file system has no hard links."""
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
    """Make durable which files there are below `root/directory`, and the way to it from `root`.
    Whoever wrote the files has synced what is in them."""
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
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_all(moves: Iterable[tuple[Path, Path]]) -> None:
    """Each file to its place, over one that is there. Those that have been moved already are left
    alone, so it may be done again after a crash. Raises LakeError if a file is in neither place."""
    touched: set[Path] = set()
    for source, target in moves:
        try:
            os.replace(source, target)
        except FileNotFoundError:
            if source.exists():
                _make_durably(target.parent)
                os.replace(source, target)
            elif target.exists():
                continue
            else:
                raise LakeError(
                    f"{target} is missing: its commit is recorded, but neither it nor {source} "
                    "is there. Restore it, or build the table anew"
                ) from None
        touched.add(target.parent)
    for directory in touched:
        sync_directory(directory)


def _make_durably(directory: Path) -> None:
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_directory(each.parent)


def remove_all(paths: Iterable[Path]) -> None:
    """Those that are there; directories that are left empty stay."""
    for path in paths:
        path.unlink(missing_ok=True)


def remove_tree(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
