"""A disk that can be made to hang: an ext4 file system of its own in a file, which the kernel
freezes. Writes and syncs then wait until it is thawed, as on a disk that does not answer; reads of
what is in memory go on. Needs root and loop devices.

A process that writes to a frozen disk cannot be killed before it is thawed: thaw first.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

IMAGE_BYTES: Final = 1 << 30
PROGRAMS: Final = ("mkfs.ext4", "mount", "umount", "fsfreeze")


def missing() -> str:
    """Why there can be no such disk here; "" when there can."""
    if os.geteuid() != 0:
        return "a disk that hangs needs root"
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return "" if Path("/dev/loop-control").exists() else "there are no loop devices"


class FaultyDisk:
    """See `faulty_disk`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hangs = False

    def hang(self) -> None:
        """Returns when everything written so far is on the disk, and nothing more gets there."""
        _run("fsfreeze", "--freeze", str(self.directory))
        self.hangs = True

    def go_on(self) -> None:
        if self.hangs:
            _run("fsfreeze", "--unfreeze", str(self.directory))
            self.hangs = False


@contextmanager
def faulty_disk(directory: Path) -> Iterator[FaultyDisk]:
    """Mounted at `directory`, which is made. Leaving it thaws the disk; whoever writes to it must
    be stopped inside. Raises CalledProcessError where none can be mounted."""
    directory.mkdir(parents=True, exist_ok=True)
    image = directory.with_name(f"{directory.name}.image")
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    _run("mount", "-o", "loop", str(image), str(directory))
    disk = FaultyDisk(directory)
    try:
        yield disk
    finally:
        disk.go_on()
        # Lazily: a node that was killed a moment ago may still be ending.
        _run("umount", "--lazy", str(directory))
        image.unlink()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
