"""Writes, moves and removes the lake's files in an order that makes data durable.

A lake is a directory that the driver and all executors see under one path: on one machine, on a
shared file system, or in an object store (objects.py).
"""

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from holdfast.client.log.lake.errors import LakeError as LakeError
from holdfast.client.log.lake.objects import (
    LakePath,
    ObjectPath,
    ObjectReader,
    move_objects,
    remove_objects,
)


def write_atomically(path: LakePath, data: bytes) -> None:
    """Writes a file durably and atomically: readers see the old or the new content."""
    if isinstance(path, ObjectPath):
        path.write_bytes(data)
        return
    os.replace(_written(path, data), path)
    sync_directory(path.parent)


FAILURES: Final = "_failed"
"""The folder with the errors of tables."""


def note_failure(lake: LakePath, table: str, error: str) -> None:
    """Writes the error of a table's last step. An empty one means that the step has succeeded."""
    path = lake / FAILURES / table
    # The disk or the store may be the cause, and the run has printed the error.
    with suppress(OSError, LakeError):
        if error:
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, error.encode())
        elif isinstance(path, ObjectPath):
            remove_objects([path])
        else:
            path.unlink(missing_ok=True)


def noted_failures(lake: LakePath) -> dict[str, str]:
    """Returns the errors of the tables whose last step has failed."""
    folder = lake / FAILURES
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # a step has succeeded meanwhile
            found[path.name] = path.read_bytes().decode()
    return found


def write_new(path: LakePath, data: bytes) -> None:
    """Writes a file like `replace_file`, if it does not exist yet.

    Raises FileExistsError. Of two processes that create it at the same time one succeeds, unless
    the file system has no hard links. In an object store, two contents must not be equal.
    """
    if isinstance(path, ObjectPath):
        path.create(data)
        return
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


def open_new(path: LakePath) -> IO[bytes]:
    """Opens a file for writing. That of an object is a temporary one until `complete`."""
    return tempfile.TemporaryFile() if isinstance(path, ObjectPath) else open(path, "wb")


def complete(file: IO[bytes], path: LakePath) -> int:
    """Makes the content of a file of `open_new` durable and closes it. Returns its bytes."""
    file.flush()
    size = file.seek(0, os.SEEK_END)
    if isinstance(path, ObjectPath):
        path.upload(file)
    else:
        os.fsync(file.fileno())
    file.close()
    return size


def readable(path: LakePath, size: int = 0) -> Any:
    """Returns a file as pyarrow reads it. `size`: its bytes, if they are known."""
    return ObjectReader(path, size) if isinstance(path, ObjectPath) else path


def sync_names(root: LakePath, directory: str) -> None:
    """Makes the names below `root/directory`, and the path to it from `root`, durable.

    The contents of the files must be synced already.
    """
    if isinstance(root, ObjectPath):
        return
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
    """Makes the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_all(moves: Sequence[tuple[LakePath, LakePath]]) -> None:
    """Moves each file to its place, and replaces an existing one.

    Files that were moved before are skipped, so the call may be repeated after a crash. Raises
    LakeError if a file is in neither place.
    """
    lost: Sequence[LakePath] = move_objects(
        [
            (source, target)
            for source, target in moves
            if isinstance(source, ObjectPath) and isinstance(target, ObjectPath)
        ]
    )
    local = [(a, b) for a, b in moves if isinstance(a, Path) and isinstance(b, Path)]
    for target in lost or _move_files(local):
        raise LakeError(
            f"{target} is missing: its commit is recorded, but neither it nor its staged file is "
            "there. Restore it, or build the table again"
        )


def _move_files(moves: Sequence[tuple[Path, Path]]) -> list[Path]:
    """Renames files, and returns the targets of which nothing is there."""
    touched: set[Path] = set()
    lost = []
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
                lost.append(target)
                continue
        touched.add(target.parent)
    for directory in touched:
        sync_directory(directory)
    return lost


def _make_durable_directory(directory: Path) -> None:
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_directory(each.parent)


def remove_all(paths: Iterable[LakePath]) -> None:
    """Removes those of the files that exist. Directories that become empty stay."""
    found = list(paths)
    remove_objects(path for path in found if isinstance(path, ObjectPath))
    for path in found:
        if isinstance(path, Path):
            path.unlink(missing_ok=True)


def remove_tree(directory: LakePath) -> None:
    """Removes a directory with everything in it, if it exists."""
    if isinstance(directory, ObjectPath):
        remove_objects(each.path for each in directory.objects())
        return
    shutil.rmtree(directory, ignore_errors=True)


AT_FDCWD: Final = -100
RENAME_EXCHANGE: Final = 2
NOT_SUPPORTED: Final = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
"""The error numbers of an unsupported operation. EPERM: no hard links."""


def replace_in(
    place: Path, added: Mapping[str, Path], without: Collection[str], scratch: Path
) -> bool:
    """Adds files to a directory under new names and removes some names, atomically and durably.

    The added files are linked, so they also stay where they are. `scratch` is a path on the same
    file system that does not exist before or after the call. A crash may leave the old or the new
    directory there. Returns False if the file system cannot do it; the call then had no effect.
    """
    try:
        _compose(scratch, place, added, without)
        return exchange(scratch, place)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        return False
    finally:
        remove_tree(scratch)


def _compose(
    directory: Path, place: Path, added: Mapping[str, Path], without: Collection[str]
) -> None:
    directory.mkdir(parents=True)
    for source in place.iterdir():
        if source.name not in without:
            _link(source, directory / source.name)
    for name, source in added.items():
        os.link(source, directory / name)
    sync_directory(directory)


def _link(source: Path, target: Path) -> None:
    if not source.is_dir():
        os.link(source, target)
        return
    target.mkdir()
    for each in source.iterdir():
        _link(each, target / each.name)
    sync_directory(target)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two directories, atomically and durably.

    Returns False if the file system or the operating system cannot do it; the call then had no
    effect.
    """
    rename = _renameat2()
    if rename is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if rename(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        if number in NOT_SUPPORTED:
            return False
        raise OSError(number, os.strerror(number), str(one), None, str(other))
    for parent in {one.parent, other.parent}:
        sync_directory(parent)
    return True


def _renameat2() -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return None
    return function
