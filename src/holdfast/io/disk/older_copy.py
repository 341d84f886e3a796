"""Restarts a node with a disk that was restored from an older copy.

The copy lacks votes and acknowledged entries, so the node takes another incarnation, as with an
empty disk. It leaves all in-sync sets and the voters, and joins again as another Raft peer.
Counter-example: a node that voted for A is restored to before the vote. Under its old name it votes
for B in the same term, and two leaders are elected.

Its journal stays. It is a prefix of what the others have, so the node fetches only the rest. If the
node was the last one in sync for a partition, its journal is also the best one left.

Until the other nodes permit that, the node stands apart (`node.older_copies`). Its disk keeps
this (`stand_apart`), because the others know the disk of the node only while they run. Smallest
counter-example: A stands apart. B and C restart, C stops, and the power of A fails. A returns, and
B has no objection. A leads a partition with the copy, although B and C have more of it.

A stop does not end it, because a SIGTERM is no decision: a service manager, a reboot, and the first
attempt of an operator send it. Smallest counter-example: n1 votes alone and is put back, n2 has 20
acknowledged messages more. Both are stopped, and n1 starts first. It goes on without n2, and the 20
messages are in no log of the cluster. If a majority of the disks was restored, no majority without
them can permit anything. Then an operator decides with a command that names the loss (`accept`).

`mark` decides, and the next start carries it out (`begin_anew`), however often it is interrupted.
All functions block. Those without a result of their own note an `OSError` in the log.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from holdfast.io.disk.raft_files import LOG, SNAPSHOT, RaftFiles
from holdfast.log.files.data_directory import DirectoryLock, read_manifest
from holdfast.log.files.filesystem import FileSystem, OsFileSystem, read_file, replace_file
from holdfast.log.files.layout import LOCK, MANIFEST, DataDirectory
from holdfast.node.metadata.generation import ACCEPTED
from holdfast.node.metadata.state_machine import peer_id
from holdfast.node.replicate.disk_position import DiskMemory

logger = logging.getLogger("holdfast")

MARK: Final = "older-copy"
APART: Final = "stands-apart"
RECOVERS: Final = "recovers"
"""The mark of an accepted disk until it has the log of the others (`node.attendance`): the ids
of the nodes that the operator has given up, one a line."""


REMEMBERED: Final = "remembered"
"""The file of the other nodes' positions (`DiskMemory.encode`). A restored directory begins without
it: the other nodes of a cluster that is put back have less than it says."""


def remember(files: FileSystem, content: bytes) -> None:
    """Stores the positions of the other nodes' disks."""
    try:
        replace_file(files, REMEMBERED, [content])
    except OSError as error:
        # The file from before stays.
        logger.warning("positions_not_stored error=%r", str(error))


def load_memory(files: FileSystem, memory: DiskMemory) -> None:
    """Takes up what this node remembered before its start."""
    if REMEMBERED in files.list("") and not memory.load(read_file(files, REMEMBERED)):
        logger.warning("positions_unreadable text='this node remembers nothing of other disks'")


def stand_apart(files: FileSystem, text: str) -> None:
    """Stores that the node stands apart, also after a crash. `text`: the reason."""
    try:
        replace_file(files, APART, [text.encode()])
    except OSError as error:
        logger.critical("older_copy_not_marked error=%r", str(error))


def reason_apart(files: FileSystem) -> str:
    """Returns the reason for which the node stands apart; "" if it does not."""
    return read_file(files, APART).decode() if APART in files.list("") else ""


def accept(files: FileSystem, root: Path, mark: int, given_up: Iterable[str] = ()) -> str:
    """Lets the next start take part with what the disk has, and returns the reason against it; ""
    if it does not stand apart. No process may serve it. Raises as `begin_anew`.

    `given_up`: the nodes that never come back. The start waits for all others. `mark`: a random
    number of GENERATION_BITS. It makes the nodes agree on a new generation of the log, because
    offsets of the records that are lost are assigned again.
    """
    reason = reason_apart(files)
    if reason:
        manifest = read_manifest(files, root)
        accepted = replace(manifest, restored=(manifest.restored or mark) | ACCEPTED)
        DataDirectory(files, manifest).write_manifest(accepted)
        replace_file(files, RECOVERS, ["\n".join(given_up).encode()])
        files.remove(APART)
        files.sync_folder("")
    return reason


def nodes_given_up(files: FileSystem) -> list[str] | None:
    """The nodes that an accepted disk does not wait for; None if the disk has lost nothing, or has
    it again."""
    return read_file(files, RECOVERS).decode().split() if RECOVERS in files.list("") else None


def recovered(files: FileSystem) -> None:
    """Stores that an accepted disk has the log of the others."""
    try:
        files.remove(RECOVERS)
        files.sync_folder("")
    except OSError as error:
        # The next start waits for the others once more.
        logger.error("recovery_not_stored error=%r", str(error))


def mark(files: FileSystem, incarnation: str) -> bool:
    """Stores the decision durably; returns whether it is. `incarnation`: the name that the node
    continues under."""
    try:
        replace_file(files, MARK, [incarnation.encode()])
    except OSError as error:
        logger.critical("older_copy_not_marked error=%r", str(error))
        return False
    return True


def begin_anew_at(root: Path) -> bool:
    """Carries out the decision for a directory that no process serves.

    Raises `OSError`, or `DataDirectoryError` if a process serves it.
    """
    if not (root / MARK).exists():
        return False
    lock = DirectoryLock(root / LOCK)
    try:
        return begin_anew(OsFileSystem(root), root)
    finally:
        lock.release()


def begin_anew(files: FileSystem, root: Path) -> bool:
    """Takes the new incarnation if that was decided; returns whether it was.

    `root`: for error texts. Raises `OSError`, or `DataDirectoryError` if the manifest cannot be
    used.
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
        RaftFiles(files, peer_id(manifest.node_id, incarnation), is_new=True).close()
    for name in (APART, RECOVERS):
        if name in names:
            files.remove(name)
    files.remove(MARK)
    files.sync_folder("")
    return True
