"""Opens SQLite files, runs transactions and translates errors, for all stores."""

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import ClassVar, Final, TypeVar

Result = TypeVar("Result")

PAGE_BYTES: Final = 4096
WAL_PAGES_MAX: Final = 256
"""The length in pages at which the write-ahead log is copied into the file. A disk that fills up
must have room for both."""
PREPARED_MAX: Final = 1024
"""The most statements that stay prepared."""


class Trouble(Enum):
    """The kinds of errors that callers treat differently."""

    FULL = auto()
    """The disk is full; nothing was stored."""
    IN_USE = auto()
    """Another process or connection uses the file."""
    NO_DATABASE = auto()
    """The file is not an SQLite database."""
    OTHER_DATABASE = auto()
    """The file is the SQLite database of another program."""
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


@dataclass(frozen=True)
class SqliteForm:
    """The tables of one application, and its words for errors."""

    application_id: int
    version: int
    tables: tuple[str, ...]
    """The statements that create them."""
    error: type[Exception]
    full: type[Exception]
    """The error of a full disk."""
    texts: Mapping[Trouble, str]
    """Error texts with `{path}`, `{name}` and `{error}`. That of DAMAGED is for the others, too."""


class SqliteFile:
    """An SQLite file with the tables of one application, open in one process at a time.

    The file uses a write-ahead log with synchronous=FULL: a transaction is on disk when it returns,
    for one sync. SQLite's exclusive lock keeps other processes out and ends with the process. Calls
    may come from different threads, but never two at once. After any error except a full disk the
    object refuses all work: after a failed sync the content of the disk is unknown until it is read
    again.
    """

    form: ClassVar[SqliteForm]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._connection: sqlite3.Connection | None = None
        self._failure: Exception | None = None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _open(self, load: Callable[[sqlite3.Connection], Result]) -> Result:
        """Opens the file, creates it if it is missing, and returns its content by `load`."""
        if self._connection is not None:
            raise self.form.error(f"{self.path} is open in this process already")
        self._failure = None
        try:
            with self._explaining():
                self._connection = connect(self.path, self._prepare)
            return self._guard(load)
        except BaseException:
            self.close()
            raise

    def _prepare(self, db: sqlite3.Connection) -> None:
        # Must precede the first access: only then SQLite makes no shared-memory file.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        [(application,)] = db.execute("PRAGMA application_id")
        [(version,)] = db.execute("PRAGMA user_version")
        [(tables,)] = db.execute("SELECT count(*) FROM sqlite_master")
        if tables and application != self.form.application_id:
            raise self._error(Trouble.OTHER_DATABASE)
        if tables and version != self.form.version:
            raise self.form.error(
                f"{self.path} has format {version}, this version reads {self.form.version}: use the"
                " version that wrote it"
            )
        make_durable(db)
        db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES_MAX}")
        db.execute(f"PRAGMA journal_size_limit = {WAL_PAGES_MAX * PAGE_BYTES}")
        if not tables:
            transaction(db, lambda: self._create(db))

    def _create(self, db: sqlite3.Connection) -> None:
        for statement in self.form.tables:
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {self.form.application_id}")
        db.execute(f"PRAGMA user_version = {self.form.version}")

    def _guard(self, operation: Callable[[sqlite3.Connection], Result]) -> Result:
        """Returns the operation's result. Raises the form's errors."""
        if self._connection is None:
            raise self.form.error(f"{self.path} is not open")
        if self._failure is not None:
            raise self._failure
        with self._explaining():
            return operation(self._connection)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            explained = self._error(trouble_of(error), error)
            if not isinstance(explained, self.form.full):
                self._failure = explained
            raise explained from error
        except OSError as error:
            self._failure = self.form.error(f"{self.path}: {error.strerror}")
            raise self._failure from error

    def _error(self, trouble: Trouble, error: sqlite3.Error | None = None) -> Exception:
        text = self.form.texts.get(trouble) or self.form.texts[Trouble.DAMAGED]
        kind = self.form.full if trouble is Trouble.FULL else self.form.error
        return kind(text.format(path=self.path, name=self.path.name, error=error))


def connect(
    path: Path, prepare: Callable[[sqlite3.Connection], object], timeout_s: float = 0
) -> sqlite3.Connection:
    """Opens a file, which is created if it is missing, without an isolation level.

    `timeout_s`: how long to wait for the locks of others. Raises `sqlite3.Error` and `OSError`.
    """
    is_new = not path.exists()
    db = sqlite3.connect(
        path,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=PREPARED_MAX,
    )
    try:
        prepare(db)
        if is_new:
            sync_directory(path.parent)
    except BaseException:
        db.close()
        raise
    return db


def make_durable(db: sqlite3.Connection) -> None:
    """Makes each transaction durable when it returns."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")


def sync_directory(path: Path) -> None:
    """Syncs the directory of a new file. Raises `OSError`.

    SQLite syncs the file, but not the directory entry that names it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def transaction(db: sqlite3.Connection, operation: Callable[[], Result]) -> Result:
    """Runs `operation` in a transaction, on a connection without an isolation level.

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
