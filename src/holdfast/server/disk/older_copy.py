"""The new start of a node whose disk was restored from an older copy.

The copy lacks votes and acknowledged entries, so the node takes another incarnation, as with an
empty disk. It leaves all in-sync sets and the voters, and joins again as another Raft peer.
Counter-example: a node that voted for A is restored to before the vote. Under its old name it votes
for B in the same term, and two leaders are elected.

Its journal stays. It is a prefix of what the others have, so the node fetches only the rest. If the
node was the last one in sync for a partition, its journal is also the best one left.

`mark` decides, and the next start carries it out (`begin_anew`), however often it is interrupted.
All functions block and may raise `OSError`.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

from holdfast.cluster.metadata.state_machine import member_id
from holdfast.server.disk.raft_files import LOG, SNAPSHOT, RaftFiles
from holdfast.storage.files.data_directory import DirectoryLock, read_manifest
from holdfast.storage.files.filesystem import FileSystem, OsFileSystem, read_file, replace_file
from holdfast.storage.files.layout import LOCK, MANIFEST, DataDirectory

logger = logging.getLogger("holdfast")

MARK: Final = "older-copy"


def mark(files: FileSystem, incarnation: str) -> None:
    """Store the decision durably. `incarnation`: the name that the node continues under."""
    replace_file(files, MARK, [incarnation.encode()])


def begin_anew_at(root: Path) -> bool:
    """Carry out the decision for a directory that no process serves.

    Raises `DataDirectoryError` if one does.
    """
    if not (root / MARK).exists():
        return False
    lock = DirectoryLock(root / LOCK)
    try:
        return begin_anew(OsFileSystem(root), root)
    finally:
        lock.release()


def begin_anew(files: FileSystem, root: Path) -> bool:
    """Take the new incarnation if that was decided; returns whether it was.

    `root`: for error texts. Raises `DataDirectoryError` if the manifest cannot be used.
    """
    names = files.list("")
    if MARK not in names:
        return False
    if MANIFEST in names:
        manifest = read_manifest(files, root)
        incarnation = read_file(files, MARK).decode()
        raft = files.list(LOG.rpartition("/")[0])
        for name in (LOG, SNAPSHOT):
            if name.rpartition("/")[2] in raft:
                files.remove(name)
        DataDirectory(files, manifest).write_manifest(replace(manifest, incarnation=incarnation))
        RaftFiles(files, member_id(manifest.node_id, incarnation), is_new=True).close()
    files.remove(MARK)
    files.sync_folder("")
    return True
