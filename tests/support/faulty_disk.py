"""A disk that can be made to hang, or to lose power: an ext4 file system of its own in a file. It
needs root and loop devices.

It hangs because the kernel freezes it. Writes and syncs then wait until it is thawed, as on a disk
that does not answer; reads of what is in memory go on. A process that writes to a frozen disk
cannot be killed before it is thawed: thaw first.

It loses power because the kernel shuts the file system down without a flush. Content and names that
nobody has synced are gone when it is mounted again. The journal of ext4 is one for all files, so a
sync of any file keeps the names of all: `tests/e2e/test_synced_calls.py` looks at those.
"""

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

IMAGE_BYTES: Final = 1 << 30
PROGRAMS: Final = ("mkfs.ext4", "mount", "umount", "fsfreeze")
EXT4_IOC_SHUTDOWN: Final = 0x8004587D
NO_LOG_FLUSH: Final = 2
COMMIT_S: Final = 600
"""The interval in seconds at which ext4 syncs names on its own, so that it does not happen before a
loss of power."""


def missing() -> str:
    """Why there can be no such disk here; "" when there can."""
    if os.geteuid() != 0:
        return "a faulty disk needs root"
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return "" if Path("/dev/loop-control").exists() else "there are no loop devices"


class FaultyDisk:
    """See `faulty_disk`."""

    def __init__(self, directory: Path, image: Path) -> None:
        self.directory = directory
        self.hangs = False
        self._image = image

    def mount(self) -> None:
        options = f"loop,commit={COMMIT_S}"
        _run("mount", "-o", options, str(self._image), str(self.directory))

    def lose_power(self) -> None:
        """Drops what was not synced. Whoever had files open there must have ended.

        The disk goes on as a copy of its image: a mount that another namespace of the machine has
        taken over would keep the file system that was shut down.
        """
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)
        _run("umount", "--lazy", str(self.directory))
        copy = self._image.with_name(f"{self._image.name}.copy")
        _run("cp", "--sparse=always", str(self._image), str(copy))
        copy.replace(self._image)
        self.mount()

    def hang(self) -> None:
        """Returns when everything written so far is on the disk, and nothing more gets there."""
        _run("fsfreeze", "--freeze", str(self.directory))
        self.hangs = True

    def go_on(self) -> None:
        if self.hangs:
            _run("fsfreeze", "--unfreeze", str(self.directory))
            self.hangs = False


@contextmanager
def faulty_disk(directory: Path, size_bytes: int = IMAGE_BYTES) -> Iterator[FaultyDisk]:
    """Mounted at `directory`, which is made. Leaving it thaws the disk; whoever writes to it must
    be stopped inside. Raises CalledProcessError where none can be mounted."""
    directory.mkdir(parents=True, exist_ok=True)
    image = directory.with_name(f"{directory.name}.image")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    disk = FaultyDisk(directory, image)
    disk.mount()
    try:
        yield disk
    finally:
        disk.go_on()
        # Lazily: a node that was killed a moment ago may still be ending.
        _run("umount", "--lazy", str(directory))
        image.unlink()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
