"""A node that was put back from an older copy of its disk begins anew as another Raft member.

Its votes and the entries that it acknowledged are lost, as with an empty disk, so it takes another
incarnation: it leaves all in-sync sets and the voters, and joins again. Its journal is kept: what
is in it is the beginning of what the others have, and only the rest is fetched. Should it be the
last that was in sync for a partition, its journal is the best there is.

`mark` decides it, the next start carries it out (`begin_anew`), however often it is interrupted.
Blocking; may raise OSError.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

from holdfast.cluster.metadata.state_machine import member_id
from holdfast.server.disk.raft_files import LOG, SNAPSHOT, RaftFiles
from holdfast.storage.files.data_directory import DirectoryLock, read_manifest
from holdfast.storage.files.filesystem import FileSystem, OsFileSystem, read_whole, write_whole
from holdfast.storage.files.layout import LOCK, MANIFEST, DataDirectory

logger = logging.getLogger("holdfast")

MARK: Final = "older-copy"


def mark(files: FileSystem, incarnation: str) -> None:
    """Durable on return. `incarnation`: the one to go on under."""
    write_whole(files, MARK, [incarnation.encode()])


def begin_anew_at(root: Path) -> bool:
    """As `begin_anew`, of a directory that nobody serves. Raises DataDirectoryError."""
    if not (root / MARK).exists():
        return False
    lock = DirectoryLock(root / LOCK)
    try:
        return begin_anew(OsFileSystem(root), root)
    finally:
        lock.release()


def begin_anew(files: FileSystem, root: Path) -> bool:
    """Take another incarnation, if that was decided; False if not. `root`: for the text of an
    error. Raises DataDirectoryError."""
    names = files.list("")
    if MARK not in names:
        return False
    if MANIFEST in names:
        manifest = read_manifest(files, root)
        incarnation = read_whole(files, MARK).decode()
        raft = files.list(LOG.rpartition("/")[0])
        for name in (LOG, SNAPSHOT):
            if name.rpartition("/")[2] in raft:
                files.remove(name)
        DataDirectory(files, manifest).write_manifest(replace(manifest, incarnation=incarnation))
        RaftFiles(files, member_id(manifest.node_id, incarnation), is_new=True).close()
    files.remove(MARK)
    files.sync_folder("")
    return True
