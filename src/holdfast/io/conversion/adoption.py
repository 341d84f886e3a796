"""Adopts the data directory of a single broker, in its place, for a node of a cluster.

Invariant: at every moment DIR has a manifest and what it describes, either the old content or the
new, or DIR/adopted has the complete new content. So an adoption that was interrupted begins again,
or is completed from DIR/adopted. The old content is only moved: it stays in DIR/before-adoption.

| step | a start after a crash |
|---|---|
| fill DIR/adopted.partial | finds the old content, and begins again |
| rename it to DIR/adopted, durably | completes |
| move the old manifest to DIR/before-adoption | completes; other programs find no manifest |
| move each file and folder out of the way, and the new one into its place | completes: a name in DIR/adopted shows that the one in DIR is the old one |
| move the new manifest, remove DIR/adopted | finds the new content |

A directory that nodes share is adopted by the node that takes the lease, into the folder of its
epoch (`adopt_epoch`). The old content counts until that epoch does.
"""  # noqa: E501

import logging
import shutil
from pathlib import Path
from typing import Final

from holdfast.io.conversion.conversion import fill
from holdfast.io.conversion.source import ConversionError, Source
from holdfast.io.disk.storage import StorageError, now_text
from holdfast.log.files.data_directory import (
    DataDirectoryError,
    DirectoryLock,
    create_or_open,
    open_to_read,
)
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import BEFORE_ADOPTION, LOCK, MANIFEST, QUARANTINE, DataDirectory
from holdfast.log.journal.epoch_folders import LEASE, Epoch, epoch_folder

logger = logging.getLogger("holdfast")

COMPLETE: Final = "adopted"
"""The folder with the new content, until everything of it is in its place."""
PARTIAL: Final = "adopted.partial"
"""The folder with the new content while it is being made."""


def adopt(root: Path, node_id: str, partitions: int) -> None:
    """Adopts the directory if it is that of a single broker, or its adoption was interrupted.

    Raises `StorageError`, with the old content in its place, or an adoption that the next start
    completes. Blocks while the log is written again.
    """
    try:
        if (root / COMPLETE).exists():
            lock = DirectoryLock(root / LOCK)
        elif (
            not (root / MANIFEST).exists()
            or (root / LEASE).exists()
            or open_to_read(root).manifest.is_replica
        ):
            # The opening of the directory creates it, or says why it cannot be used.
            return
        else:
            directory, lock = create_or_open(root, node_id, partitions, now_text())
            try:
                _fill(root, directory)
            except BaseException:
                lock.release()
                raise
        try:
            _exchange(root)
        finally:
            lock.release()
    except (ConversionError, DataDirectoryError) as error:
        raise StorageError(str(error)) from error
    except OSError as error:
        raise StorageError(f"{root} cannot be adopted: {error}") from error


def _fill(root: Path, directory: DataDirectory) -> None:
    """Makes the complete new content."""
    former, partial = root / BEFORE_ADOPTION, root / PARTIAL
    if former.exists() and any(former.iterdir()):
        raise ConversionError(f"{former} is not empty: move it away, so that it is not overwritten")
    if partial.exists():
        shutil.rmtree(partial)
    source = _source(root, directory)
    partial.mkdir(mode=0o750)
    try:
        _convert(source, partial)
        partial.rename(root / COMPLETE)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    OsFileSystem(root).sync_folder("")


def adopt_epoch(root: Path, old: DataDirectory, number: int) -> DataDirectory:
    """Makes the content of a new epoch of a shared directory from `old`, which is that of a single
    broker, and returns it. Until the epoch counts, the next claimant begins again.

    Raises `StorageError`, and `OSError`. Blocks while the log is written again.
    """
    path = root / epoch_folder(number)
    path.mkdir(mode=0o750, parents=True)
    try:
        _convert(_source(root, old), path)
        made = open_to_read(path)
    except (ConversionError, DataDirectoryError) as error:
        raise StorageError(str(error)) from error
    files = Epoch(number).files(OsFileSystem(root))
    files.sync_folder("")
    return DataDirectory(files, made.manifest, Epoch(number))


def _source(root: Path, directory: DataDirectory) -> Source:
    """The old content, for which there is room once more."""
    logger.info("adopting directory=%s text='its log is written again'", root)
    source = Source(root / directory.epoch.folder, directory)
    if source.recovery.damaged:
        logger.warning("records_not_understood count=%d", source.recovery.damaged)
    free_bytes = OsFileSystem(root).free_bytes()
    if free_bytes < source.size_bytes:
        raise ConversionError(
            f"{root} has {free_bytes} bytes free, and its adoption needs about {source.size_bytes},"
            " because the old content stays: make room, or use"
            " `holdfast cluster adopt` with another disk"
        )
    return source


def _convert(source: Source, path: Path) -> None:
    fill(source, path)
    if source.lost:
        text = "damage has taken them from the log, and void ones are in their place"
        logger.error("records_lost count=%d text=%r", source.lost, text)


def _exchange(root: Path) -> None:
    """Gives the new content its place. Each step may have been done before."""
    former, complete = root / BEFORE_ADOPTION, root / COMPLETE
    former.mkdir(mode=0o750, exist_ok=True)
    # Both kinds of nodes quarantine in the same way, so the folder stays.
    names = {each.name for each in complete.iterdir()} - {QUARANTINE, MANIFEST}
    if (complete / MANIFEST).exists():
        _move(root, root, former, MANIFEST)
    for name in sorted(names):
        _move(root, root, former, name)
        _move(root, complete, root, name)
    _move(root, complete, root, MANIFEST)
    shutil.rmtree(complete)
    OsFileSystem(root).sync_folder("")
    text = "the former content is still there: remove it when it is not needed any more"
    logger.warning("adopted directory=%s former=%s text=%r", root, former, text)


def _move(root: Path, source: Path, target: Path, name: str) -> None:
    """Renames, durably. A name that is missing was moved before."""
    if not (source / name).exists():
        return
    (source / name).rename(target / name)
    for folder in (target, source, root):
        OsFileSystem(folder).sync_folder("")
