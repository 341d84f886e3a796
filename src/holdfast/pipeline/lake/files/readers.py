"""The lock between the readers of a table's files and the process that replaces them.

    LAKE/_locks/<table>.readers   shared by readers, exclusive for the process that replaces files

A reader holds the lock from before it looks at the table's commits until its own commit is
recorded. So the holder of the exclusive lock sees every reader's position in the commits. No reader
can open a file that is about to be removed.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from holdfast.pipeline.lake.files.files import LakeError

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


@contextmanager
def reading(lake: Path, table: str) -> Iterator[None]:
    """Hold the shared lock while reading a table's files. Raises TimeoutError."""
    with _locked(lake, table, fcntl.LOCK_SH, REPLACING_MAX_S) as got:
        if not got:
            raise TimeoutError(
                f"the files of table {table} of {lake} have been replaced for {REPLACING_MAX_S:g} s"
            )
        yield


@contextmanager
def exclusively(lake: Path, table: str) -> Iterator[None]:
    """Hold the exclusive lock while replacing a table's files.

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
def _locked(lake: Path, table: str, how: int, wait_max_s: float) -> Iterator[bool]:
    (lake / LOCKS).mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_max_s
    with open(lake / LOCKS / f"{table}.readers", "a") as file:
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
