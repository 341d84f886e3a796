"""What the stores in SQLite files have in common: transactions, and what an error means."""

import os
import sqlite3
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import Final, TypeVar

Result = TypeVar("Result")


class Trouble(Enum):
    FULL = auto()
    """Of the disk; nothing was stored."""
    IN_USE = auto()
    """By another process or connection."""
    NO_DATABASE = auto()
    """But some other file."""
    CANNOT_OPEN = auto()
    READ_ONLY = auto()
    DISK = auto()
    """Reading or writing has failed, perhaps a sync: nobody knows what the disk has."""
    DAMAGED = auto()
    """Or anything else."""


_TROUBLES: Final = {
    sqlite3.SQLITE_FULL: Trouble.FULL,
    sqlite3.SQLITE_BUSY: Trouble.IN_USE,
    sqlite3.SQLITE_LOCKED: Trouble.IN_USE,
    sqlite3.SQLITE_NOTADB: Trouble.NO_DATABASE,
    sqlite3.SQLITE_CANTOPEN: Trouble.CANNOT_OPEN,
    sqlite3.SQLITE_READONLY: Trouble.READ_ONLY,
    sqlite3.SQLITE_PERM: Trouble.READ_ONLY,
    sqlite3.SQLITE_IOERR: Trouble.DISK,
}


def trouble_of(error: sqlite3.Error) -> Trouble:
    return _TROUBLES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, Trouble.DAMAGED)


def sync_directory(path: Path) -> None:
    """Of a new file: SQLite syncs the file, but not the directory that names it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def transaction(db: sqlite3.Connection, operation: Callable[[], Result]) -> Result:
    """Of a connection without an isolation level. Raises sqlite3.Error, and what `operation`
    raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        result = operation()
        db.execute("COMMIT")
        return result
    except BaseException:
        # Some errors have ended the transaction already.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
