"""Whoever makes a table from another reads its files; nobody replaces them meanwhile.

    LAKE/_locks/<table>.readers   shared by those who read, alone with the one who replaces

A reader is inside from before it looks at the table's commits until its own commit is recorded. So
whoever is alone with a table knows from the commits how far each reader has come, and that none of
them will open a file that is about to go.
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
"""How long a reader waits for one who replaces files: he records a commit and renames."""
READING_MAX_S: Final = 120.0
"""How long one who replaces files waits for the steps that read them."""
POLL_S: Final = 0.01


class BusyError(LakeError):
    """A table whose files cannot be replaced now."""


@contextmanager
def reading(lake: Path, table: str) -> Iterator[None]:
    """Read a table's files. Raises TimeoutError."""
    with _locked(lake, table, fcntl.LOCK_SH, REPLACING_MAX_S) as got:
        if not got:
            raise TimeoutError(
                f"the files of table {table} of {lake} have been replaced for {REPLACING_MAX_S:g} s"
            )
        yield


@contextmanager
def alone(lake: Path, table: str) -> Iterator[None]:
    """Replace a table's files. Raises BusyError if somebody reads them all the time."""
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
