"""The journal of a directory that several nodes share: one folder per epoch.

    manifest.json                      as ever
    epochs/<epoch>/epoch.json          from when on the epoch counts, and what it sealed
    epochs/<epoch>/{journal,snapshots,quarantine}/

Each holder of the lease works under its own epoch's folder and in no other. It begins with hard
links to the segments and snapshots of the epoch before. So a deposed holder that goes on for a
while can remove, rename and create what it likes: only names in its own folder change. One thing
is shared, the content of the segment that it was appending to: epoch.json has the length that
counts (its *seal*), and what lies behind is never looked at.

Epoch 0 is a directory that was never shared: its journal is in the directory itself.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from errno import ENOENT
from typing import Final
from zlib import crc32

from holdfast.storage.files.filesystem import FileSystem, SubFolder, write_whole

EPOCHS: Final = "epochs"
LEASE: Final = "lease"
CLAIMED_NAME: Final = f"{LEASE}/epochs"
CLAIM_BYTES: Final = 4096
"""Each claim writes the page of its number, so the size of the file tells the newest."""
EPOCH_FILE: Final = "epoch.json"
EPOCH_DIGITS: Final = 10
FOLDERS: Final = ("journal", "snapshots", "quarantine")
"""What an epoch has of its own."""
LOOK_ATTEMPTS: Final = 3
"""How often epochs are looked for while they are being removed."""


class CorruptEpoch(Exception):
    """An epoch.json that is not whole. The text says which."""


@dataclass(frozen=True)
class Epoch:
    number: int
    node_id: str = ""
    """The holder's."""
    began: str = ""
    """ISO 8601, UTC."""
    sealed: Mapping[int, int] = field(default_factory=dict)
    """Segments of which only the first so many bytes count, by sequence."""

    @property
    def folder(self) -> str:
        return epoch_folder(self.number)

    def files(self, root: FileSystem) -> FileSystem:
        """What a DataDirectory of this epoch works on."""
        return SubFolder(root, self.folder) if self.number else root


NEVER_SHARED: Final = Epoch(0)


def epoch_folder(number: int) -> str:
    """Relative to the directory; "" for epoch 0."""
    return f"{EPOCHS}/{number:0{EPOCH_DIGITS}d}" if number else ""


def epoch_folders(root: FileSystem) -> list[int]:
    """All there are, oldest first; the newest may not count yet. Raises FileNotFoundError if the
    directory is away: what is not to be seen now must not be taken for what never was."""
    above = root.list("", must_exist=True)
    if not above:
        raise FileNotFoundError(ENOENT, "The data directory is empty: is it mounted?")
    names = root.list(EPOCHS, must_exist=True) if EPOCHS in above else []
    return [int(name) for name in names if len(name) == EPOCH_DIGITS and name.isdecimal()]


def newest_epoch(root: FileSystem) -> Epoch:
    """The newest that counts. Raises CorruptEpoch and OSError."""
    for attempt in range(1, LOOK_ATTEMPTS + 1):
        try:
            for number in reversed(epoch_folders(root)):
                epoch = read_epoch(root, number)
                if epoch is not None:
                    return epoch
            break
        except FileNotFoundError:
            # Old ones are removed, when a newer one counts.
            if attempt == LOOK_ATTEMPTS:
                raise
    return NEVER_SHARED


def newest_claimed(root: FileSystem) -> int:
    """The newest epoch that somebody has claimed, whether it counts yet or not; 0 if none was.
    Whoever finds no newer one than its own after it has made something durable knows that this
    lies before the seal: see holdfast.lease. Raises FileNotFoundError if nobody shares the
    directory."""
    return max(0, root.open_read(CLAIMED_NAME).size() - 1) // CLAIM_BYTES


def read_epoch(root: FileSystem, number: int) -> Epoch | None:
    """None if it does not count (yet). Raises CorruptEpoch: it does, and nobody may guess what it
    sealed; FileNotFoundError if it is gone."""
    name = f"{epoch_folder(number)}/{EPOCH_FILE}"
    # Not by a look for the file alone: over NFS that may be answered from a cache.
    if EPOCH_FILE not in root.list(epoch_folder(number), must_exist=True):
        return None
    file = root.open_read(name)
    try:
        content = json.loads(file.read(0, file.size()))
        checked = content.pop("crc")
        if checked != _crc(content) or content["epoch"] != number:
            raise ValueError
        sealed = {int(sequence): int(size) for sequence, size in content["sealed"].items()}
        return Epoch(number, str(content["node_id"]), str(content["began"]), sealed)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptEpoch(f"{name} is damaged: restore it, or the segments it sealed") from None


def write_epoch(root: FileSystem, epoch: Epoch) -> None:
    """From here on, durably, the epoch counts. Everything it needs is in its folder."""
    content: dict[str, object] = {
        "epoch": epoch.number,
        "node_id": epoch.node_id,
        "began": epoch.began,
        "sealed": {str(sequence): size for sequence, size in epoch.sealed.items()},
    }
    content["crc"] = _crc(content)
    text = json.dumps(content, indent=1).encode() + b"\n"
    write_whole(root, f"{epoch.folder}/{EPOCH_FILE}", [text])


def remove_epoch(root: FileSystem, number: int) -> None:
    """All names under an older epoch's folder; its file first, so that it does not count again.
    Not an error if somebody else is at it."""
    files = Epoch(number).files(root)
    names = [EPOCH_FILE] if number else []
    for folder in FOLDERS:
        names += [f"{folder}/{name}" for name in files.list(folder)]
    for name in names:
        try:
            files.remove(name)
        except FileNotFoundError:
            continue
    for folder in (*FOLDERS, "") if number else FOLDERS:
        try:
            files.remove_folder(folder)
        except FileNotFoundError:
            continue


def _crc(content: Mapping[str, object]) -> int:
    return crc32(json.dumps(content, sort_keys=True).encode())
