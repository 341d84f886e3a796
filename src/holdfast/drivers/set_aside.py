"""A replica's data directory that is damaged is put aside, and the node begins with an empty one.

`mark` decides it, the next start carries it out (`begin_anew`), however often it is interrupted.
What was there is kept under DIR/damaged until the node has everything again (`forget`); so there
is never more than one of these, and while there is one no second may follow: a disk that damages
what has just been written is to be replaced. Blocking; may raise OSError.
"""

import os
import shutil
from pathlib import Path
from typing import Final

from holdfast.log.files import ASIDE, LOCK, QUARANTINE
from holdfast.log.filesystem import OsFileSystem, write_whole
from holdfast.log.opening import DirectoryLock

MARK: Final = "begin-anew"
_STAYS: Final = frozenset({ASIDE, MARK, LOCK, QUARANTINE, "lost+found"})
_TEXT: Final = b"damaged: to be put aside, and fetched anew from the other nodes of the cluster\n"


def exists(root: Path) -> bool:
    """Something was put aside, and the node does not have everything since."""
    return (root / ASIDE).exists()


def mark(root: Path) -> None:
    """Durable on return: the directory is put aside at the next start."""
    write_whole(OsFileSystem(root), MARK, [_TEXT])


def begin_anew(root: Path) -> bool:
    """Put aside what is there, if that was decided; False if not. Raises DataDirectoryError when
    another process serves the directory."""
    if not (root / MARK).exists():
        return False
    lock = DirectoryLock(root / LOCK)
    try:
        aside = root / ASIDE
        aside.mkdir(mode=0o750, exist_ok=True)
        for name in sorted(os.listdir(root)):
            if name not in _STAYS:
                (root / name).rename(aside / name)
        # The new names first: nothing may be in neither place.
        OsFileSystem(aside).sync_folder("")
        OsFileSystem(root).sync_folder("")
        (root / MARK).unlink()
        OsFileSystem(root).sync_folder("")
    finally:
        lock.release()
    return True


def forget(root: Path) -> None:
    shutil.rmtree(root / ASIDE)
