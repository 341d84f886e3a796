"""Locks a table's files between their readers and the process that replaces them.

    LAKE/_locks/<table>.readers   shared by readers, exclusive for the process that replaces files

A reader holds the lock from before it looks at the table's commits until its own commit is
recorded. So the holder of the exclusive lock sees every reader's position in the commits. No reader
can open a file that is about to be removed.

The locks of a lake in an object store are in the machine's directory for temporary files. They keep
apart the runs of one machine. Between machines the commits decide: a step that reads a file which
another machine has replaced fails without an effect.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final

from holdfast.client.log.lake.errors import LakeError
from holdfast.client.log.lake.objects import LakePath

LOCKS: Final = "_locks"
REPLACING_MAX_S: Final = 60.0
"""The most seconds that a reader waits for a process that replaces files. That process only records
a commit and renames."""
READING_MAX_S: Final = 120.0
"""The most seconds that a process that replaces files waits for the steps that read them."""
POLL_S: Final = 0.01
"""The seconds between two attempts to get the lock."""


class BusyError(LakeError):
    """The files of a table cannot be replaced now."""


def lock_directory(lake: LakePath) -> Path:
    """Returns the directory of a lake's locks, which is made if needed."""
    if isinstance(lake, Path):
        place = lake / LOCKS
        place.mkdir(parents=True, exist_ok=True)
        return place
    place = Path(tempfile.gettempdir()) / f"holdfast-locks-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.stat().st_uid != os.getuid():
        raise LakeError(f"{place} belongs to another user: remove it, or set TMPDIR")
    place = place / sha256(str(lake).encode()).hexdigest()[:16]
    place.mkdir(exist_ok=True)
    return place


@contextmanager
def reading(lake: LakePath, table: str) -> Iterator[None]:
    """Holds the shared lock while reading a table's files. Raises TimeoutError."""
    with _locked(lake, table, fcntl.LOCK_SH, REPLACING_MAX_S) as got:
        if not got:
            raise TimeoutError(
                f"the files of table {table} of {lake} have been replaced for {REPLACING_MAX_S:g} s"
            )
        yield


@contextmanager
def exclusively(lake: LakePath, table: str) -> Iterator[None]:
    """Holds the exclusive lock while replacing a table's files.

    Raises BusyError if steps read the table without a pause.
    """
    with _locked(lake, table, fcntl.LOCK_EX, READING_MAX_S) as got:
        if not got:
            raise BusyError(
                f"table {table} of {lake} is being read for {READING_MAX_S:g} s without a pause: "
                "try again, or stop the runs that read it"
            )
        yield


@contextmanager
def _locked(lake: LakePath, table: str, how: int, wait_max_s: float) -> Iterator[bool]:
    directory = lock_directory(lake)
    deadline = time.monotonic() + wait_max_s
    with open(directory / f"{table}.readers", "a") as file:
        while True:
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(POLL_S)
                continue
            yield True
            return
