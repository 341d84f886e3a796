"""Replaces several files of a directory atomically, for processes that list it.

The new directory is composed of hard links beside the old one, and then the two directories
exchange their names. `exchange` returns False on a file system that cannot do that (NFS).
"""

import ctypes
import errno
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

from holdfast.pipeline.lake.files.files import remove_tree, sync_directory

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
