"""The common part of the stores in SQLite files: transactions and the meaning of errors."""

import os
import sqlite3
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import Final, TypeVar

Result = TypeVar("Result")


class Trouble(Enum):
    """The kinds of errors that callers treat differently."""

    FULL = auto()
    """The disk is full; nothing was stored."""
    IN_USE = auto()
    """Another process or connection uses the file."""
    NO_DATABASE = auto()
    """The file is not an SQLite database."""
    CANNOT_OPEN = auto()
    READ_ONLY = auto()
    DISK = auto()
    """A read, a write or a sync failed, so the content of the disk is unknown."""
    DAMAGED = auto()
    """The database is damaged, or the error is of another kind."""


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
    """Sync the directory of a new file. Raises `OSError`.

    SQLite syncs the file, but not the directory entry that names it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def transaction(db: sqlite3.Connection, operation: Callable[[], Result]) -> Result:
    """Run `operation` in a transaction, on a connection without an isolation level.

    Raises `sqlite3.Error`, and any error of `operation`, after a rollback.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        result = operation()
        db.execute("COMMIT")
        return result
    except BaseException:
        # SQLite itself has rolled back after some errors.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
