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

from holdfast.storage.files.data_directory import DirectoryLock
from holdfast.storage.files.filesystem import OsFileSystem, write_whole
from holdfast.storage.files.layout import ASIDE, LOCK, QUARANTINE

MARK: Final = "begin-anew"
_STAYS: Final = frozenset({ASIDE, MARK, LOCK, QUARANTINE, "lost+found"})
KEPT: Final = "diverged"
"""Committed records that the other nodes have gone on without: for an operator to look at."""
_KEEP: Final = b"diverged: to be put aside and kept, and fetched anew from the other nodes\n"
_TEXT: Final = b"damaged: to be put aside, and fetched anew from the other nodes of the cluster\n"


def exists(root: Path) -> bool:
    """Something was put aside, and the node does not have everything since."""
    return (root / ASIDE).exists()


def mark(root: Path, *, keep: bool = False) -> None:
    """Durable on return: the directory is put aside at the next start. `keep`: it is whole, and not
    removed by `forget`."""
    write_whole(OsFileSystem(root), MARK, [_KEEP if keep else _TEXT])


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
            if name not in _STAYS and not name.startswith(f"{KEPT}-"):
                (root / name).rename(aside / name)
        if (root / MARK).read_bytes() == _KEEP:
            write_whole(OsFileSystem(aside), KEPT, [_KEEP])
        # The new names first: nothing may be in neither place.
        OsFileSystem(aside).sync_folder("")
        OsFileSystem(root).sync_folder("")
        (root / MARK).unlink()
        OsFileSystem(root).sync_folder("")
    finally:
        lock.release()
    return True


def forget(root: Path) -> Path | None:
    """What was put aside is removed; where it is to be kept, it gets another name, which is
    returned."""
    aside = root / ASIDE
    if not (aside / KEPT).exists():
        shutil.rmtree(aside)
        return None
    number = 1
    while (kept := root / f"{KEPT}-{number}").exists():
        number += 1
    aside.rename(kept)
    OsFileSystem(root).sync_folder("")
    return kept
