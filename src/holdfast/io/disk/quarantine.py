"""Sets aside a replica's damaged data directory, so that the node starts with an empty one.

`mark` decides, and the next start carries it out (`begin_anew`), however often it is interrupted.
The old content is kept under DIR/damaged until the node has everything again (`forget`). While it
exists no second directory may be set aside, because a disk that damages fresh data must be
replaced. All functions block and may raise `OSError`.
"""

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Final

from holdfast.log.files.data_directory import (
    ACCESS,
    DataDirectoryError,
    DirectoryLock,
    open_to_read,
)
from holdfast.log.files.filesystem import OsFileSystem, replace_file
from holdfast.log.files.layout import ASIDE, LOCK, PROCESSES, QUARANTINE
from holdfast.log.journal.recovery import open_journal

MARK: Final = "begin-anew"
_STAYS: Final = frozenset({ASIDE, MARK, LOCK, QUARANTINE, PROCESSES, *ACCESS, "lost+found"})
"""The names that are no part of the damaged log: the other processes of the machine have theirs in
PROCESSES, and the admin port its users in ACCESS."""
KEPT: Final = "diverged"
"""The name for committed records that the other nodes dropped. An operator may examine them."""
_KEEP: Final = b"diverged: to be put aside and kept, and fetched anew from the other nodes\n"
_TEXT: Final = b"damaged: to be put aside, and fetched anew from the other nodes of the cluster\n"


def exists(root: Path) -> bool:
    """Returns whether a directory is set aside and the node is not complete since."""
    return (root / ASIDE).exists()


def kept(root: Path) -> list[str]:
    """Returns the names of the directories that an operator should look at and remove."""
    return sorted(each.name for each in root.glob(f"{KEPT}-*"))


def mark(root: Path, *, keep: bool = False) -> None:
    """Stores the decision durably; the next start sets the directory aside.

    `keep`: the content is undamaged, so `forget` must not remove it.
    """
    replace_file(OsFileSystem(root), MARK, [_KEEP if keep else _TEXT])


def begin_anew(root: Path) -> bool:
    """Sets the content aside if that was decided; returns whether it was.

    Raises `DataDirectoryError` when another process serves the directory.
    """
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
            replace_file(OsFileSystem(aside), KEPT, [_KEEP])
        # The new names are synced first, so a crash leaves every file in at least one place.
        OsFileSystem(aside).sync_folder("")
        OsFileSystem(root).sync_folder("")
        (root / MARK).unlink()
        OsFileSystem(root).sync_folder("")
    finally:
        lock.release()
    return True


def forget(root: Path, partitions: Collection[int], generation: int) -> Path | None:
    """Removes what was set aside. Content to keep is renamed instead, and its path returned: also a
    log that has more than the present one of these partitions, which are stored here. A log of
    others is kept if the cluster has another `generation` of the log by now.

    Counter-example without the comparison: the only complete log is damaged, and an operator lets
    the others go on without it (`unsafe-recover`). The only copies of its readable records go.
    Counter-example without the generation: the partition moves away before this node has all.
    """
    aside = root / ASIDE
    if not (aside / KEPT).exists() and not _has_more(aside, root, partitions, generation):
        shutil.rmtree(aside)
        return None
    number = 1
    while (kept := root / f"{KEPT}-{number}").exists():
        number += 1
    aside.rename(kept)
    OsFileSystem(root).sync_folder("")
    return kept


def _has_more(aside: Path, root: Path, partitions: Collection[int], generation: int) -> bool:
    """True if a log that was set aside is not the beginning of the present one. A record is the
    same in both if its offset and its epoch are. What retention has removed is not missing."""
    try:
        directory = open_to_read(aside)
        former = open_journal(directory, writes=False).journal
    except DataDirectoryError:
        return False  # nothing in it can be read
    present = open_journal(open_to_read(root), writes=False).journal
    has_gone_on = directory.manifest.generation != generation
    for partition, end in enumerate(former.next_offset):
        if partition not in partitions:
            if has_gone_on and former.start_offsets[partition] < end:
                return True
            continue
        epoch = former.last_epoch(partition)
        start = max(former.start_offsets[partition], present.start_offsets[partition])
        found, epoch_end = present.epoch_end(partition, epoch)
        if start < end and (found != epoch or epoch_end < end):
            return True
    return False
