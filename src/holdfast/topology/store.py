"""The manager's state in an SQLite file: one transaction per change, and a line of the audit log
in each. What is written is the difference of two states."""

import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from holdfast.topology.desired import Announcement, Federation, JoinToken, Member
from holdfast.topology.graph import Link

T = TypeVar("T")

VERSION: Final = 1
AUDIT_LINES_MAX: Final = 100_000
"""Older ones are forgotten."""
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


class StoreError(Exception):
    """The file cannot be used or written; nothing has changed."""


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    """Seconds since 1970."""
    revision: int
    actor: str
    action: str
    detail: str = ""


class Store:
    """Not thread-safe: one call at a time, from whichever thread."""

    def __init__(self, path: Path) -> None:
        """Opens it, or makes it. Raises StoreError."""
        self._path = path
        try:
            self._connection = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._prepare()
        except sqlite3.Error as error:
            raise StoreError(f"{path}: {error}") from error

    def _prepare(self) -> None:
        [version] = self._connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise StoreError(
                f"{self._path}: written by another version of the manager (format {version}, this"
                f" one knows {VERSION})"
            )
        if version == 0:
            self._connection.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} INSERT INTO meta VALUES ('revision', 0),"
                f" ('next_id', 0); PRAGMA user_version = {VERSION}; COMMIT;"
            )

    def load(self) -> Federation:
        """Raises StoreError."""
        ask = self._connection.execute
        try:
            meta = dict(ask("SELECT name, value FROM meta"))
            members = [_decode(Member, body) for (body,) in ask("SELECT body FROM members")]
            rules = list(ask("SELECT low, high, rule FROM rules"))
            announcements = [
                _decode(Announcement, body) for (body,) in ask("SELECT body FROM announcements")
            ]
            return Federation(
                revision=meta["revision"],
                next_id=meta["next_id"],
                members={member.id: member for member in sorted(members, key=lambda m: m.id)},
                links=frozenset(ask("SELECT low, high FROM links")),
                pinned=frozenset((low, high) for low, high, rule in rules if rule == "pin"),
                forbidden=frozenset((low, high) for low, high, rule in rules if rule == "forbid"),
                tokens={
                    name: _decode(JoinToken, body)
                    for name, body in ask("SELECT hash, body FROM tokens")
                },
                announcements={(each.receiver, each.about): each for each in announcements},
            )
        except (sqlite3.Error, msgspec.DecodeError, KeyError) as error:
            raise StoreError(f"{self._path}: damaged: {error}") from error

    def save(self, before: Federation, after: Federation, line: AuditLine) -> None:
        """All or nothing. Raises StoreError, also when another manager has changed the file since
        `before` was loaded."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._write(before, after, line)
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}") from error

    def _write(self, before: Federation, after: Federation, line: AuditLine) -> None:
        run = self._connection.execute
        changed = run(
            "UPDATE meta SET value = ? WHERE name = 'revision' AND value = ?",
            (after.revision, before.revision),
        )
        if changed.rowcount != 1:
            raise StoreError(f"{self._path}: another manager writes to it, too; stop one of them")
        run("UPDATE meta SET value = ? WHERE name = 'next_id'", (after.next_id,))
        # Deleted before inserted: an address or uuid may have gone from one member to another.
        self._difference("members", ("id",), _members(before), _members(after))
        self._difference("links", ("low", "high"), _pairs(before.links), _pairs(after.links))
        self._difference("rules", ("low", "high"), _rules(before), _rules(after))
        self._difference("tokens", ("hash",), _tokens(before), _tokens(after))
        self._difference(
            "announcements", ("receiver", "about"), _announcements(before), _announcements(after)
        )
        added = run(
            "INSERT INTO audit (at_s, revision, actor, action, detail) VALUES (?, ?, ?, ?, ?)",
            (line.at_s, after.revision, line.actor, line.action, line.detail),
        )
        run("DELETE FROM audit WHERE at <= ?", ((added.lastrowid or 0) - AUDIT_LINES_MAX,))

    def _difference(
        self,
        table: str,
        key: tuple[str, ...],
        before: Mapping[tuple[object, ...], tuple[object, ...]],
        after: Mapping[tuple[object, ...], tuple[object, ...]],
    ) -> None:
        """Rows by their keys, which are their first columns."""
        condition = " AND ".join(f"{name} = ?" for name in key)
        stale = [each for each, row in before.items() if after.get(each) != row]
        self._connection.executemany(f"DELETE FROM {table} WHERE {condition}", stale)
        rows = [row for each, row in after.items() if before.get(each) != row]
        if rows:
            places = ", ".join("?" for _ in rows[0])
            self._connection.executemany(f"INSERT INTO {table} VALUES ({places})", rows)

    def audit(self, lines: int) -> list[AuditLine]:
        """The newest ones, the newest first."""
        found = self._connection.execute(
            "SELECT at_s, revision, actor, action, detail FROM audit ORDER BY at DESC LIMIT ?",
            (lines,),
        )
        return [
            AuditLine(at_s=at_s, revision=revision, actor=actor, action=action, detail=detail)
            for at_s, revision, actor, action, detail in found
        ]

    def close(self) -> None:
        self._connection.close()


_Rows = dict[tuple[object, ...], tuple[object, ...]]


def _members(state: Federation) -> _Rows:
    return {
        (id,): (id, member.uuid or None, member.ip, _encode(member))
        for id, member in state.members.items()
    }


def _pairs(links: Iterable[Link]) -> _Rows:
    return {link: link for link in links}


def _rules(state: Federation) -> _Rows:
    pinned: _Rows = {link: (*link, "pin") for link in state.pinned}
    return pinned | {link: (*link, "forbid") for link in state.forbidden}


def _tokens(state: Federation) -> _Rows:
    return {(name,): (name, _encode(token)) for name, token in state.tokens.items()}


def _announcements(state: Federation) -> _Rows:
    return {key: (*key, _encode(value)) for key, value in state.announcements.items()}


def _encode(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


def _decode(kind: type[T], body: str) -> T:
    return msgspec.json.decode(body, type=kind)
