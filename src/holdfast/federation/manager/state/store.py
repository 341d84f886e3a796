"""Stores the manager's state in an SQL database: one transaction per change, each with a line of
the audit log. The difference of two states is written.

For every database:

1. A change is stored as a whole or not at all, and only on the revision on which it was decided. So
   revisions grow by the changes of one manager at a time.
2. After `StoreLost` it is unknown whether the last change was stored. Nothing further is stored
   until `load` has read the state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import msgspec

from holdfast.federation.manager.graph.graph import Link
from holdfast.federation.manager.state.federation_state import (
    FederationState,
    JoinToken,
    Member,
    PendingAnnouncement,
)

T = TypeVar("T")

VERSION: Final = 1
"""The version of the tables. A database of another version is not changed."""
AUDIT_LINES_MAX: Final = 100_000
"""The most lines of the audit log. Older ones are removed."""


class StateStoreError(Exception):
    """The database cannot be used or written. Nothing has changed."""


class StoreLost(StateStoreError):
    """The connection is lost, and the last change may or may not be stored."""


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the audit log."""

    at_s: float
    """The time in seconds since 1970."""
    revision: int
    actor: str
    action: str
    detail: str = ""


class StateStore(ABC):
    """A database with the state. All calls block.

    Only `interrupt` is thread-safe; the other calls come one at a time, from any thread. A subclass
    opens its database in its constructor. Its SQL has `?` for parameters.
    """

    name: str
    """The name for log lines, without secrets."""

    @abstractmethod
    def _all(self, sql: str) -> Sequence[tuple[Any, ...]]: ...

    @abstractmethod
    def _run(self, sql: str, values: Sequence[object]) -> int:
        """Runs a statement. Returns the number of changed rows."""

    @abstractmethod
    def _run_many(self, sql: str, rows: Sequence[Sequence[object]]) -> None: ...

    @abstractmethod
    def _transaction(self, work: Callable[[], T]) -> T:
        """Runs `work` in one transaction, which is rolled back when it raises."""

    @abstractmethod
    def _explained(self) -> AbstractContextManager[object]:
        """Turns errors of the database into StateStoreError and StoreLost."""

    @abstractmethod
    def _connect(self) -> None:
        """Connects if there is no connection. Raises StateStoreError."""

    @abstractmethod
    def check(self) -> None:
        """Checks the connection to the database. Raises StoreLost when it is lost."""

    @abstractmethod
    def interrupt(self) -> None:
        """Ends the call of another thread soon, with an exception there."""

    @abstractmethod
    def close(self) -> None: ...

    def load(self) -> FederationState:
        """Returns the stored state. It connects again if necessary. Raises StateStoreError."""
        self._connect()
        try:
            with self._explained():
                return self._transaction(self._read)
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise StateStoreError(f"{self.name}: damaged: {error}") from error

    def _read(self) -> FederationState:
        ask = self._all
        meta = dict(ask("SELECT name, value FROM meta"))
        members = [_decode(Member, body) for (body,) in ask("SELECT body FROM members")]
        rules = list(ask("SELECT low, high, rule FROM rules"))
        announcements = [
            _decode(PendingAnnouncement, body) for (body,) in ask("SELECT body FROM announcements")
        ]
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
            announcements={(each.receiver, each.about): each for each in announcements},
        )

    def save(self, before: FederationState, after: FederationState, line: AuditLine) -> None:
        """Stores a change as a whole. Raises StateStoreError, also when another manager has changed
        the state since `before` was loaded."""
        with self._explained():
            self._transaction(lambda: self._write(before, after, line))

    def _write(self, before: FederationState, after: FederationState, line: AuditLine) -> None:
        run = self._run
        changed = run(
            "UPDATE meta SET value = ? WHERE name = 'revision' AND value = ?",
            (after.revision, before.revision),
        )
        if changed != 1:
            raise self._conflict()
        run("UPDATE meta SET value = ? WHERE name = 'next_id'", (after.next_id,))
        # Deleted before inserted: an address or uuid may have gone from one member to another.
        self._difference("members", ("id",), _members(before), _members(after))
        self._difference("links", ("low", "high"), _pairs(before.links), _pairs(after.links))
        self._difference("rules", ("low", "high"), _rules(before), _rules(after))
        self._difference("tokens", ("hash",), _tokens(before), _tokens(after))
        self._difference(
            "announcements", ("receiver", "about"), _announcements(before), _announcements(after)
        )
        run(
            "INSERT INTO audit (at_s, revision, actor, action, detail) VALUES (?, ?, ?, ?, ?)",
            (line.at_s, after.revision, line.actor, line.action, line.detail),
        )
        run("DELETE FROM audit WHERE at <= (SELECT max(at) FROM audit) - ?", (AUDIT_LINES_MAX,))

    def _conflict(self) -> StateStoreError:
        return StateStoreError(f"{self.name}: another manager writes to it, too; stop one of them")

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
            self._run_many(f"DELETE FROM {table} WHERE {condition}", stale)
        rows = [row for each, row in after.items() if before.get(each) != row]
        if rows:
            places = ", ".join("?" for _ in rows[0])
            self._run_many(f"INSERT INTO {table} VALUES ({places})", rows)

    def audit(self, lines: int) -> list[AuditLine]:
        """Returns the newest lines of the audit log, the newest first. Raises StateStoreError."""
        with self._explained():
            found = self._all(
                "SELECT at_s, revision, actor, action, detail FROM audit ORDER BY at DESC"
                f" LIMIT {lines:d}"
            )
        return [
            AuditLine(at_s=at_s, revision=revision, actor=actor, action=action, detail=detail)
            for at_s, revision, actor, action, detail in found
        ]

    def _check_version(self, version: int) -> None:
        """Checks the version of the tables. Raises StateStoreError for another one."""
        if version != VERSION:
            raise StateStoreError(
                f"{self.name}: written by another version of the manager (format {version}, this"
                f" one knows {VERSION})"
            )


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


def _announcements(state: FederationState) -> _Rows:
    return {key: (*key, _encode(value)) for key, value in state.announcements.items()}


def _encode(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


def _decode(kind: type[T], body: str) -> T:
    return msgspec.json.decode(body, type=kind)
