"""`holdfast`, but its work with a shared directory is held up now and then:

    python -m tests.support.stalling_node serve --standby ...

Every `STALL_EVERY_S` or so one labelled point is chosen, and whoever comes to it next, in whatever
thread, sleeps for 0.3 to 1.5 s: about to write, synced and not yet checked, checked and not yet
reported, between the steps of a takeover, in retention, snapshots and compaction. Each stall is a
line on stderr: `stalled at=LABEL seconds=S`. They end when there is a file `calm` beside the data
directory.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from holdfast.cli.main import main
from holdfast.io.disk import maintenance
from holdfast.io.disk import shared_directory as sharing
from holdfast.io.disk.mastership import Renewal
from holdfast.log.files.filesystem import OsFileSystem, OsReadFile, OsWriteFile
from holdfast.log.journal.epoch_folders import CLAIMED_NAME, EPOCH_FILE

STALL_EVERY_S = 0.4
STALL_S = (0.3, 1.5)
UNUSED_S = 0.3
"""After so long another point is chosen: nobody came to this one."""

LABELS = (
    "before write", "after write", "before sync", "after sync", "before epoch check",
    "after epoch check", "before the promise", "before beat", "after beat", "before claim",
    "after claim", "before announcement", "after announcement", "link", "before seal", "after seal",
    "retention", "snapshot", "compaction",
)  # fmt: skip


class Stalls:
    def __init__(self, calm: Path) -> None:
        self._calm = calm
        self._chance = random.Random()
        self._armed = ""
        threading.Thread(target=self._arm, daemon=True).start()

    def at(self, label: str) -> None:
        if label == self._armed:
            self._armed = ""
            duration_s = self._chance.uniform(*STALL_S)
            os.write(2, f"stalled at={label!r} seconds={duration_s:.2f}\n".encode())
            time.sleep(duration_s)

    def _arm(self) -> None:
        while not self._calm.exists():
            time.sleep(self._chance.uniform(0, 2 * STALL_EVERY_S))
            self._armed = self._chance.choice(LABELS)
            time.sleep(UNUSED_S)
        self._armed = ""


class StallingReadFile(OsReadFile):
    stalls: Stalls

    def size(self) -> int:
        size = super().size()
        self.stalls.at("after epoch check")
        return size


class StallingWriteFile(OsWriteFile):
    stalls: Stalls

    def __init__(self, path: Path, create: bool) -> None:
        if path.suffix == ".claim":
            self.stalls.at("before claim")
        super().__init__(path, create)
        if path.suffix == ".claim":
            self.stalls.at("after claim")
        self._what = {".log": "write", ".beat": "beat"}.get(path.suffix, "")
        if path.match(f"*/{CLAIMED_NAME}"):
            self._what = "announcement"

    def write(self, position: int, data: Sequence[bytes]) -> None:
        self.stalls.at(f"before {self._what}")
        super().write(position, data)
        self.stalls.at(f"after {self._what}")

    def sync(self) -> None:
        if self._what != "write":
            super().sync()
            return
        self.stalls.at("before sync")
        super().sync()
        self.stalls.at("after sync")


class StallingFileSystem(OsFileSystem):
    stalls: Stalls

    def open_read(self, name: str) -> OsReadFile:
        if name != CLAIMED_NAME:
            return super().open_read(name)
        self.stalls.at("before epoch check")
        return StallingReadFile(self.root / name)

    def open_write(self, name: str, *, create: bool) -> OsWriteFile:
        return StallingWriteFile(self.root / name, create)

    def link(self, name: str, new_name: str) -> None:
        self.stalls.at("link")
        super().link(name, new_name)

    def remove(self, name: str) -> None:
        if name.endswith(".log"):
            self.stalls.at("retention")
        super().remove(name)

    def rename(self, name: str, new_name: str) -> None:
        if new_name.endswith(EPOCH_FILE):
            self.stalls.at("before seal")
        elif new_name.endswith(".snap"):
            self.stalls.at("snapshot")
        elif new_name.endswith(".log"):
            self.stalls.at("compaction")
        super().rename(name, new_name)
        if new_name.endswith(EPOCH_FILE):
            self.stalls.at("after seal")


def stall() -> None:
    """Put the stalls in place."""
    data = Path(sys.argv[sys.argv.index("--data") + 1])
    stalls = Stalls(data.parent / "calm")
    for each in (StallingReadFile, StallingWriteFile, StallingFileSystem):
        each.stalls = stalls
    confirm = Renewal.confirm

    def confirm_slowly(renewal: Renewal) -> None:
        confirm(renewal)
        stalls.at("before the promise")

    for target, name, value in (
        (sharing, "OsFileSystem", StallingFileSystem),
        (Renewal, "confirm", confirm_slowly),
        # A test looks at what deposed holders have written.
        (sharing, "OLD_EPOCHS_KEPT_S", 1e9),
        (maintenance, "RETENTION_INTERVAL_S", 0.5),
    ):
        patch.object(target, name, value).start()


if __name__ == "__main__":
    stall()
    sys.exit(main())
