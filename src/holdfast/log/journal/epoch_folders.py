"""Divides the journal of a shared directory into folders, one per epoch.

    manifest.json                      as in any data directory
    epochs/<epoch>/epoch.json          from when on the epoch counts, and what it sealed
    epochs/<epoch>/manifest.json       the manifest of this epoch; without it, the one above counts
    epochs/<epoch>/{journal,snapshots,quarantine}/
    epochs/<epoch>/{raft/,watermarks}  of a replica

Each holder of the lease works under its own epoch's folder and in no other. It begins with hard
links to the files of the epoch before, and a copy of Raft's log. So a deposed holder that continues
for a while can only change names in its own folder. One thing is shared: the content of the segment
that it was appending to. The length that counts is in epoch.json (its *seal*), and bytes behind it
are never read.

Epoch 0 is a directory that was never shared: its journal is in the directory itself.
"""

import json
from collections.abc import Mapping
from errno import ENOENT
from typing import Final
from zlib import crc32

from msgspec import Struct, field

from holdfast.log.files.filesystem import FileSystem, SubFolder, replace_file
from holdfast.log.files.json_object import decode_object

EPOCHS: Final = "epochs"
LEASE: Final = "lease"
CLAIMED_NAME: Final = f"{LEASE}/epochs"
CLAIM_BYTES: Final = 4096
"""The bytes of a page. Each claim writes the page of its number, so the size of the file shows the
newest."""
EPOCH_FILE: Final = "epoch.json"
EPOCH_DIGITS: Final = 10
FOLDERS: Final = ("journal", "snapshots", "quarantine")
"""The folders of an epoch."""
RAFT: Final = "raft"
RAFT_LOG: Final = f"{RAFT}/log"
"""The only file that its writer changes in place, beside the last segment."""
OTHERS: Final = (
    "journal/start.json",
    "manifest.json",
    "watermarks",
    RAFT_LOG,
    f"{RAFT}/snapshot",
    "unsynced",
    "stands-apart",
    "recovers",
)
"""The other files that a new epoch takes over, in this order, because each may be newer than those
before it. Counter-example for Raft's snapshot before its log: the old holder takes a snapshot in
between, and the log begins behind the snapshot that was taken over."""
LOOK_ATTEMPTS: Final = 3
"""The most attempts to find an epoch while old ones are being removed."""


class CorruptEpoch(Exception):
    """A damaged epoch.json, named in the text."""


class Epoch(Struct, frozen=True):
    """An epoch that counts, with the lengths of the segments that it took over."""

    number: int
    node_id: str = ""
    """The holder's node id."""
    began: str = ""
    """The time of the takeover, ISO 8601 in UTC."""
    sealed: Mapping[int, int] = field(default_factory=dict)
    """The number of the first bytes that count, by segment sequence."""

    @property
    def folder(self) -> str:
        return epoch_folder(self.number)

    def files(self, root: FileSystem) -> FileSystem:
        """The file system for a DataDirectory of this epoch."""
        return SubFolder(root, self.folder) if self.number else root


NEVER_SHARED: Final = Epoch(0)


def epoch_folder(number: int) -> str:
    """The folder relative to the directory; "" for epoch 0."""
    return f"{EPOCHS}/{number:0{EPOCH_DIGITS}d}" if number else ""


def epoch_folders(root: FileSystem) -> list[int]:
    """The numbers of all epochs, oldest first. The newest may not count yet.

    Raises `FileNotFoundError` if the directory is not mounted: an unmounted directory must not look
    like one that was never shared.
    """
    above = root.list("", must_exist=True)
    if not above:
        raise FileNotFoundError(ENOENT, "The data directory is empty: is it mounted?")
    names = root.list(EPOCHS, must_exist=True) if EPOCHS in above else []
    return [int(name) for name in names if len(name) == EPOCH_DIGITS and name.isdecimal()]


def newest_epoch(root: FileSystem) -> Epoch:
    """The newest epoch that counts.

    Raises `CorruptEpoch` if its file is damaged, and `OSError`.
    """
    for attempt in range(1, LOOK_ATTEMPTS + 1):
        try:
            for number in reversed(epoch_folders(root)):
                epoch = read_epoch(root, number)
                if epoch is not None:
                    return epoch
            break
        except FileNotFoundError:
            # An old epoch is removed when a newer one counts, so the next attempt finds that.
            if attempt == LOOK_ATTEMPTS:
                raise
    return NEVER_SHARED


def newest_claimed(root: FileSystem) -> int:
    """The newest claimed epoch, whether it counts yet or not; 0 without one. A holder that finds no
    newer epoch after a sync knows that the synced bytes lie before the seal; see `node.lease`.

    Raises `FileNotFoundError` if the directory is not shared.
    """
    return max(0, root.open_read(CLAIMED_NAME).size() - 1) // CLAIM_BYTES


def read_epoch(root: FileSystem, number: int) -> Epoch | None:
    """The epoch, or None if it does not count yet.

    Raises `CorruptEpoch` if it counts and its file is damaged, because its seals must not be
    guessed. Raises `FileNotFoundError` if it was removed.
    """
    name = f"{epoch_folder(number)}/{EPOCH_FILE}"
    # The folder is listed, because over NFS a check for the file alone may be served from a cache.
    if EPOCH_FILE not in root.list(epoch_folder(number), must_exist=True):
        return None
    file = root.open_read(name)
    try:
        content = decode_object(file.read(0, file.size()))
        checked = content.pop("crc")
        if checked != _crc(content) or content["epoch"] != number:
            raise ValueError
        sealed = {int(sequence): int(size) for sequence, size in content["sealed"].items()}
        return Epoch(number, str(content["node_id"]), str(content["began"]), sealed)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise CorruptEpoch(f"{name} is damaged: restore it, or the segments it sealed") from None


def write_epoch(root: FileSystem, epoch: Epoch) -> None:
    """Makes the epoch count, durably. Everything it needs must be in its folder."""
    content: dict[str, object] = {
        "epoch": epoch.number,
        "node_id": epoch.node_id,
        "began": epoch.began,
        "sealed": {str(sequence): size for sequence, size in epoch.sealed.items()},
    }
    content["crc"] = _crc(content)
    text = json.dumps(content, indent=1).encode() + b"\n"
    replace_file(root, f"{epoch.folder}/{EPOCH_FILE}", [text])


def keep_epoch(root: FileSystem, number: int, target: str) -> None:
    """Moves the content of an older epoch to the folder `target`. A name that is there stays."""
    folder = epoch_folder(number)
    root.make_folder(target)
    for name in set(root.list(folder) if number else FOLDERS) - set(root.list(target)):
        if name in root.list(folder):
            root.rename(f"{folder}/{name}" if number else name, f"{target}/{name}")
    for each in (target, folder):
        root.sync_folder(each)


def remove_epoch(root: FileSystem, number: int) -> None:
    """Removes an older epoch's folder. Its epoch.json goes first, so that it does not count again.
    Another node may remove it at the same time."""
    files = Epoch(number).files(root)
    folders = (*FOLDERS, RAFT)
    # The other files of epoch 0 are those of the directory.
    others = [name for name in files.list("") if name not in folders] if number else ["watermarks"]
    names = [EPOCH_FILE, *others] if number else others
    for folder in folders:
        names += [f"{folder}/{name}" for name in files.list(folder)]
    for name in names:
        try:
            files.remove(name)
        except FileNotFoundError:
            continue
    for folder in (*folders, "") if number else folders:
        try:
            files.remove_folder(folder)
        except FileNotFoundError:
            continue


def _crc(content: Mapping[str, object]) -> int:
    return crc32(json.dumps(content, sort_keys=True).encode())
