"""A takeover, step by step. The order is what makes it safe:

1. create <epoch>.claim exclusively: of several claimants one gets the number;
2. announce the epoch: from here on the old holder, wherever it is, promises nothing more;
3. link the old epoch's snapshots, then its segments, into the new folder, then the rest;
4. read the old journal to its end: it contains everything promised before step 2;
5. make that end durable, and epoch.json with it (the seal): from here on the new epoch counts;
6. read `epochs` again: if a newer epoch is there, the takeover was in vain.

A claimant that dies in between leaves a number that is never used and a folder that never counts.
Reading before announcing would be wrong: A commits record 9 after B has read to 8, and B seals at
8.
"""

from typing import Final

from msgspec import Struct

from holdfast.log.files.filesystem import FileSystem, Lock, read_file
from holdfast.log.files.layout import (
    JOURNAL,
    QUARANTINE,
    SNAPSHOTS,
    DataDirectory,
    Manifest,
)
from holdfast.log.journal.epoch_folders import (
    EPOCHS,
    OTHERS,
    RAFT,
    RAFT_LOG,
    Epoch,
    epoch_folder,
    write_epoch,
)
from holdfast.node.lease.directory import HolderInfo, LeaseDirectory
from holdfast.node.lease.tenure import LeaseLost

LINK_ATTEMPTS: Final = 100
"""The most attempts at linking; one fails if the old holder removes a file meanwhile."""


class Claim(Struct):
    """A claimed epoch, with the lock that proves that the claimant lives."""

    epoch: int
    lock: Lock


def claim(directory: LeaseDirectory, info: HolderInfo) -> Claim | None:
    """Carries out steps 1 and 2. Returns None if another node was faster."""
    epoch = directory.next_epoch()
    lock = directory.begin_claim(epoch, info)
    if lock is None:
        return None
    try:
        directory.announce_epoch(epoch)
    except OSError:
        lock.release()
        raise
    return Claim(epoch, lock)


def require_newest(directory: LeaseDirectory, epoch: int) -> None:
    """Checks that no newer epoch was claimed.

    Raises `LeaseLost` if one was.
    """
    newest = directory.newest_claimed()
    if newest != epoch:
        raise LeaseLost(f"epoch {newest} was claimed while {epoch} was taking over")


def link_epoch(root: FileSystem, manifest: Manifest, old: Epoch, number: int) -> DataDirectory:
    """Carries out step 3: fills the new epoch's folder with every file that the old one has now.

    They have everything that the old holder promised, because the claim came before.
    Snapshots come before segments. So a snapshot that is linked is covered by the journal that is
    read later. Raises `OSError` if the files keep changing.
    """
    for _ in range(LINK_ATTEMPTS):
        try:
            _link_all(root, old, number)
            break
        except FileNotFoundError:
            # Retention removed the oldest files, after it had recorded that in START.
            continue
    else:
        raise OSError(f"the files under {old.folder or 'the directory'} keep changing")
    # The old holder may have died, or stalled, before it removed all that START says is removed.
    # Nothing else would, because a standby opens no journal.
    linked = DataDirectory(Epoch(number).files(root), manifest)
    start = linked.read_start()
    for sequence in linked.segments():
        if start is not None and sequence < start[0]:
            linked.remove_segment(sequence)
    new = Epoch(number, sealed=_still_sealed(root, old, number))
    return DataDirectory(new.files(root), manifest, new)


def _link_all(root: FileSystem, old: Epoch, number: int) -> None:
    source = old.files(root)
    target = Epoch(number).files(root)
    for folder in (SNAPSHOTS, JOURNAL, QUARANTINE):
        target.make_folder(folder)
    for folder, endings in (
        (SNAPSHOTS, (".snap",)),
        (JOURNAL, (".log", ".idx")),
        (QUARANTINE, (".bad",)),
    ):
        present = set(target.list(folder, must_exist=True))
        there = source.list(folder, must_exist=folder != QUARANTINE)
        names = [name for name in there if name.endswith(endings)]
        for name in sorted(present - set(names)):
            # An earlier attempt linked this file, and retention has removed it since.
            target.remove(f"{folder}/{name}")
        for name in names:
            if name not in present:
                _link(source, root, f"{folder}/{name}", old, number)
    # START comes after the segments, so it covers every removal before they were linked.
    for name in OTHERS:
        folder, _, own = name.rpartition("/")
        if own in source.list(folder):
            target.make_folder(folder)
            if own in target.list(folder):
                target.remove(name)
            if name != RAFT_LOG:
                # Its writer replaces it, durably.
                _link(source, root, name, old, number)
                continue
            file = target.open_write(name, create=True)
            file.write(0, [read_file(source, name)])
            file.sync()
            file.close()
    for folder in (SNAPSHOTS, JOURNAL, QUARANTINE, RAFT):
        if target.list(folder):
            target.sync_folder(folder)


def _link(source: FileSystem, root: FileSystem, name: str, old: Epoch, number: int) -> None:
    old_name = f"{old.folder}/{name}" if old.folder else name
    new_name = f"{epoch_folder(number)}/{name}"
    root.link(old_name, new_name)


def _still_sealed(root: FileSystem, old: Epoch, number: int) -> dict[int, int]:
    """The seals of the segments that still exist."""
    names = set(root.list(f"{epoch_folder(number)}/{JOURNAL}", must_exist=True))
    return {
        sequence: size for sequence, size in old.sealed.items() if f"{sequence:020d}.log" in names
    }


def seal(
    directory: LeaseDirectory,
    taken: Claim,
    folder: DataDirectory,
    node_id: str,
    began: str,
    last_segment: int | None,
    end_bytes: int,
) -> None:
    """Carries out steps 5 and 6: the journal ends at `end_bytes` of its last segment (None: it has
    none).

    Raises `LeaseLost` if a newer epoch was claimed, and `OSError`.
    """
    if last_segment is not None:
        folder.sealed[last_segment] = end_bytes
        file = folder.append_to_segment(last_segment)
        try:
            # The old holder may not have synced this end. From now on it counts as committed.
            file.sync()
        finally:
            file.close()
    require_newest(directory, taken.epoch)
    for name in (EPOCHS, ""):
        directory.root.sync_folder(name)
    write_epoch(directory.root, Epoch(taken.epoch, node_id, began, folder.sealed))
    require_newest(directory, taken.epoch)
