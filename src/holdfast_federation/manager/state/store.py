"""Stores the manager's state in an SQLite file: one transaction per change, each with a line of
the audit log. The difference of two states is written.

1. A change is stored as a whole or not at all, and only on the revision on which it was decided. So
   revisions grow by the changes of one manager at a time.
2. After `StoreLost` it is unknown whether the last change was stored. Nothing further is stored
   until `load` has read the state.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from holdfast.sqlite import Trouble, connect, make_durable, transaction, trouble_of
from holdfast_federation.manager.graph.graph import Link
from holdfast_federation.manager.state.federation_state import (
    FederationState,
    JoinToken,
    Member,
)

T = TypeVar("T")

VERSION: Final = 1
"""The version of the tables. A database of another version is not changed."""
BUSY_TIMEOUT_S: Final = 5.0
AUDIT_LINES_MAX: Final = 100_000
"""The most lines of the audit log. Older ones are removed."""


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
CREATE TABLE audit (
    at INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, revision INTEGER NOT NULL,
    actor TEXT NOT NULL, action TEXT NOT NULL, detail TEXT NOT NULL
);
"""


_HINTS: Final = {
    Trouble.FULL: "the disk is full: make room",
    Trouble.IN_USE: "another program holds it",
    Trouble.NO_DATABASE: "give another file in HOLDFAST_TOPOLOGY__DB_URL",
    Trouble.CANNOT_OPEN: "does its directory exist?",
    Trouble.READ_ONLY: "see its permissions",
}


SCHEME: Final = "sqlite:///"


def file_of(url: str) -> Path:
    """Returns the file of a database URL. Raises ValueError for an invalid one, with a text that
    contains no secret."""
    if url.startswith(SCHEME) and url != SCHEME:
        return Path(url.removeprefix(SCHEME))
    scheme, separator, _ = url.partition("://")
    raise ValueError(
        f"{scheme if separator else 'no URL'!r}: write {SCHEME}/path/to/topology.db: the state is"
        " in an SQLite file (members join again by themselves)"
    )


class StateStoreError(Exception):
    """The database cannot be used or written. Nothing has changed."""


class StoreLost(StateStoreError):
    """The disk has failed, and the last change may or may not be stored."""


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the audit log."""

    at_s: float
    """The time in seconds since 1970."""
    revision: int
    actor: str
    action: str
    detail: str = ""


class StateStore:
    """The file with the state. A second manager on the same file is detected by the revision when
    it writes.

    All calls block. Only `interrupt` is thread-safe; the other calls come one at a time, from any
    thread.
    """

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
        elif version != VERSION:
            raise StateStoreError(
                f"{self.name}: written by another version of the manager (format {version}, this"
                f" one knows {VERSION})"
            )

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreLost(f"{self.name}: is not open")
        return self._connection

    def _transaction(self, work: Callable[[], T]) -> T:
        """Runs `work` in one transaction, which is rolled back when it raises."""
        return transaction(self._connected(), work)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns errors of the database into StateStoreError and StoreLost."""
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

    def interrupt(self) -> None:
        """Ends the call of another thread soon, with an exception there."""
        connection = self._connection
        if connection is not None:
            connection.interrupt()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def load(self) -> FederationState:
        """Returns the stored state. It connects again if necessary. Raises StateStoreError."""
        self._connect()
        try:
            with self._explained():
                return self._transaction(self._read)
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise StateStoreError(f"{self.name}: damaged: {error}") from error

    def _read(self) -> FederationState:
        ask = self._connected().execute
        meta = dict(ask("SELECT name, value FROM meta"))
        members = [_decode(Member, body) for (body,) in ask("SELECT body FROM members")]
        rules = list(ask("SELECT low, high, rule FROM rules"))
        return FederationState(
            revision=meta["revision"],
            next_id=meta["next_id"],
            members={member.id: member for member in sorted(members, key=lambda m: m.id)},
            links=frozenset((low, high) for low, high in ask("SELECT low, high FROM links")),
            pinned=frozenset((low, high) for low, high, rule in rules if rule == "pin"),
            forbidden=frozenset((low, high) for low, high, rule in rules if rule == "forbid"),
            tokens={
                name: _decode(JoinToken, body)
                for name, body in ask("SELECT hash, body FROM tokens")
            },
        )

    def save(self, before: FederationState, after: FederationState, line: AuditLine) -> None:
        """Stores a change as a whole. Raises StateStoreError, also when another manager has changed
        the state since `before` was loaded."""
        with self._explained():
            self._transaction(lambda: self._write(before, after, line))

    def _write(self, before: FederationState, after: FederationState, line: AuditLine) -> None:
        run = self._connected().execute
        changed = run(
            "UPDATE meta SET value = ? WHERE name = 'revision' AND value = ?",
            (after.revision, before.revision),
        )
        if changed.rowcount != 1:
            raise StateStoreError(
                f"{self.name}: another manager writes to it, too; stop one of them"
            )
        run("UPDATE meta SET value = ? WHERE name = 'next_id'", (after.next_id,))
        # Deleted before inserted: an address or uuid may have gone from one member to another.
        self._difference("members", ("id",), _members(before), _members(after))
        self._difference("links", ("low", "high"), _pairs(before.links), _pairs(after.links))
        self._difference("rules", ("low", "high"), _rules(before), _rules(after))
        self._difference("tokens", ("hash",), _tokens(before), _tokens(after))
        run(
            "INSERT INTO audit (at_s, revision, actor, action, detail) VALUES (?, ?, ?, ?, ?)",
            (line.at_s, after.revision, line.actor, line.action, line.detail),
        )
        run("DELETE FROM audit WHERE at <= (SELECT max(at) FROM audit) - ?", (AUDIT_LINES_MAX,))

    def _difference(
        self,
        table: str,
        key: tuple[str, ...],
        before: Mapping[tuple[object, ...], tuple[object, ...]],
        after: Mapping[tuple[object, ...], tuple[object, ...]],
    ) -> None:
        """Returns the rows to write and to remove, by their keys, which are the first columns."""
        condition = " AND ".join(f"{name} = ?" for name in key)
        stale = [each for each, row in before.items() if after.get(each) != row]
        if stale:
            self._connected().executemany(f"DELETE FROM {table} WHERE {condition}", stale)
        rows = [row for each, row in after.items() if before.get(each) != row]
        if rows:
            places = ", ".join("?" for _ in rows[0])
            self._connected().executemany(f"INSERT INTO {table} VALUES ({places})", rows)

    def audit(self, lines: int) -> list[AuditLine]:
        """Returns the newest lines of the audit log, the newest first. Raises StateStoreError."""
        with self._explained():
            found = self._connected().execute(
                "SELECT at_s, revision, actor, action, detail FROM audit ORDER BY at DESC LIMIT ?",
                (lines,),
            )
            rows = found.fetchall()
        return [
            AuditLine(at_s=at_s, revision=revision, actor=actor, action=action, detail=detail)
            for at_s, revision, actor, action, detail in rows
        ]


_Rows = dict[tuple[object, ...], tuple[object, ...]]


def _members(state: FederationState) -> _Rows:
    return {
        (id,): (id, member.uuid or None, member.ip, _encode(member))
        for id, member in state.members.items()
    }


def _pairs(links: Iterable[Link]) -> _Rows:
    return {link: link for link in links}


def _rules(state: FederationState) -> _Rows:
    pinned: _Rows = {link: (*link, "pin") for link in state.pinned}
    return pinned | {link: (*link, "forbid") for link in state.forbidden}


def _tokens(state: FederationState) -> _Rows:
    return {(name,): (name, _encode(token)) for name, token in state.tokens.items()}


def _encode(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


def _decode(kind: type[T], body: str) -> T:
    return msgspec.json.decode(body, type=kind)
