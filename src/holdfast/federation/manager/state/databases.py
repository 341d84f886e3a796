"""Chooses a database by its URL."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from holdfast.federation.manager.state.store import VERSION, StateStore, StateStoreError, StoreLost
from holdfast.sqlite import Trouble, connect, make_durable, transaction, trouble_of

T = TypeVar("T")

BUSY_TIMEOUT_S: Final = 5.0

_SCHEMA: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE members (
    id INTEGER PRIMARY KEY, uuid TEXT UNIQUE, ip TEXT NOT NULL UNIQUE, body TEXT NOT NULL
);
CREATE TABLE links (
    low INTEGER NOT NULL, high INTEGER NOT NULL, PRIMARY KEY (low, high), CHECK (low < high)
) WITHOUT ROWID;
CREATE TABLE rules (
    low INTEGER NOT NULL, high INTEGER NOT NULL, rule TEXT NOT NULL, PRIMARY KEY (low, high)
) WITHOUT ROWID;
CREATE TABLE tokens (hash TEXT PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE announcements (
    receiver INTEGER NOT NULL, about INTEGER NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (receiver, about)
) WITHOUT ROWID;
CREATE TABLE audit (
    at INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, revision INTEGER NOT NULL,
    actor TEXT NOT NULL, action TEXT NOT NULL, detail TEXT NOT NULL
);
"""


_HINTS: Final = {
    Trouble.FULL: "the disk is full: make room",
    Trouble.IN_USE: "another program holds it",
    Trouble.NO_DATABASE: "give another file in DB_URL",
    Trouble.CANNOT_OPEN: "does its directory exist?",
    Trouble.READ_ONLY: "see its permissions",
}


class SqliteStateStore(StateStore):
    """A state store in an SQLite file. A second manager on the same file is detected by the
    revision when it writes."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file. Raises StateStoreError."""
        self.name = str(path)
        self._connection: sqlite3.Connection | None = None
        self._connect()

    def _connect(self) -> None:
        if self._connection is not None:
            return
        with self._explained():
            self._connection = connect(Path(self.name), self._prepare, BUSY_TIMEOUT_S)

    def _prepare(self, db: sqlite3.Connection) -> None:
        make_durable(db)
        [version] = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            db.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} INSERT INTO meta VALUES ('revision', 0),"
                f" ('next_id', 0); PRAGMA user_version = {VERSION}; COMMIT;"
            )
        else:
            self._check_version(version)

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreLost(f"{self.name}: is not open")
        return self._connection

    def _all(self, sql: str) -> Sequence[tuple[Any, ...]]:
        return self._connected().execute(sql).fetchall()

    def _run(self, sql: str, values: Sequence[object]) -> int:
        return self._connected().execute(sql, tuple(values)).rowcount

    def _run_many(self, sql: str, rows: Sequence[Sequence[object]]) -> None:
        self._connected().executemany(sql, [tuple(row) for row in rows])

    def _transaction(self, work: Callable[[], T]) -> T:
        return transaction(self._connected(), work)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            trouble = trouble_of(error)
            if trouble is Trouble.DISK:
                # Whether a COMMIT is in the file shows when it is read anew.
                self.close()
                raise StoreLost(f"{self.name}: {error}") from error
            hint = f": {_HINTS[trouble]}" if trouble in _HINTS else ""
            raise StateStoreError(f"{self.name}: {error}{hint}") from error
        except OSError as error:
            raise StateStoreError(f"{self.name}: {error.strerror}") from error

    def check(self) -> None:
        """Does nothing: a file has no connection that can be lost."""

    def interrupt(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.interrupt()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


SQLITE: Final = "sqlite:///"
POSTGRESQL: Final = ("postgresql://", "postgres://")


def check_url(url: str) -> None:
    """Checks a database URL. Raises ValueError for an invalid one, with a text that contains no
    secret."""
    if url.startswith(POSTGRESQL) or (url.startswith(SQLITE) and url != SQLITE):
        return
    scheme, separator, _ = url.partition("://")
    raise ValueError(
        f"{scheme if separator else 'no URL'!r}: write {SQLITE}/path/to/topology.db, or"
        " postgresql://user:password@host/database"
    )


def open_store(url: str) -> StateStore:
    """Opens the database of a checked URL. Raises StateStoreError."""
    if url.startswith(SQLITE):
        return SqliteStateStore(Path(url.removeprefix(SQLITE)))
    try:
        from holdfast.federation.manager.state.postgresql import PostgresqlStore
    except ImportError as error:
        raise StateStoreError(
            f"DB_URL names PostgreSQL, and its driver cannot be loaded ({error}): pip install"
            " 'holdfast[postgresql]'"
        ) from None
    return PostgresqlStore(url)
