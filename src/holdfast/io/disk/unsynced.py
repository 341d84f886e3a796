"""Marks a data directory when its newest records may not be on the disk.

With `log.durability = "memory"` a node of a cluster acknowledges records that are in the file, and
syncs them later. The operating system keeps them when the process dies, and may lose them when the
machine does. The mark names the boot of the machine under which such records were written.

Invariant: the mark is on the disk before the first of these records is acknowledged, and stays
until all are synced. A node that starts under another boot may lack records. It leaves the mark
as it is until it has them again (`node.replicate.incomplete`). Counter-example: it takes the
name of the new boot, is killed, and looks complete at the next start.

All functions block and raise `OSError`.
"""

from typing import Final

from holdfast.log.files.filesystem import FileSystem, read_file, replace_file

NAME: Final = "unsynced"
LOST: Final = ""
"""The boot in the mark after a failed sync. The system may have dropped what it did not write."""


class UnsyncedMark:
    """The mark of a directory that this process serves. Without one yet, its records are synced."""

    def __init__(self, files: FileSystem, boot: str, *, durable: bool) -> None:
        """`boot`: of the machine, "" if that is unknown. `durable`: whether each record is synced
        before it is acknowledged, so that no mark is needed."""
        self._files = files
        self._boot = boot
        self.durable = durable
        self.may_lack_records = may_lack_records(files, boot)
        """Whether records may be lost that the directory had."""
        if not self.may_lack_records:
            self.renew()

    def renew(self) -> None:
        """Marks the directory as one that lacks nothing now."""
        if self.durable:
            clear(self._files)
        else:
            replace_file(self._files, NAME, [self._boot.encode()])

    def note_failure(self) -> None:
        """Notes that a sync has failed, so that records may be lost although the machine runs."""
        if not self.durable:
            replace_file(self._files, NAME, [LOST.encode()])


def may_lack_records(files: FileSystem, boot: str) -> bool:
    """Whether the directory has the mark of another boot."""
    if NAME not in files.list(""):
        return False
    return not boot or read_file(files, NAME).decode() != boot


def clear(files: FileSystem) -> None:
    """Removes the mark, because all records are synced."""
    if NAME in files.list(""):
        files.remove(NAME)
        files.sync_folder("")
