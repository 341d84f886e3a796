"""SQLite file of a member: the state that must survive a crash.

It has messages in custody, positions in the streams from other members, versions of retained
messages, and the last knowledge of other members. All calls block.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.log.files.filesystem import OsFileSystem
from holdfast.sqlite import PAGE_BYTES, SqliteFile, SqliteForm, Trouble, transaction
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.messages.streams import FORMER_MAX, FormerPositions, Position

STORE: Final = "federation.db"
ROWS_MAX: Final = 200
"""The most rows of one statement. Statements of every length up to it stay prepared."""
RESERVE_BYTES: Final = 8 << 20
"""The free disk space in bytes that messages leave to removals.

Removals need room in the log and the file: without it, a full disk could never be emptied. Pages
that removals have freed in the file are reused.
"""

Value = int | float | str | bytes
Statement = tuple[str, Sequence[Value]]


class MemberStoreError(Exception):
    """The file cannot be used, now or ever. The text names it and says what to do."""


class MemberStoreFull(Exception):
    """The disk has no room. Nothing has changed, and a later attempt may succeed."""


@dataclass(slots=True)
class MemberStoreChange:
    """The changes of one transaction."""

    added: dict[MessageId, bytes] = field(default_factory=dict)
    removed: set[MessageId] = field(default_factory=set)
    positions: dict[bytes, Position] = field(default_factory=dict)
    retained: dict[str, bytes | None] = field(default_factory=dict)
    """Retained versions by topic. None: the topic has no version any more."""
    memory: list[bytes] | None = None
    """The replacement for the whole stored knowledge of other members, or None."""
    former: FormerPositions = field(default_factory=dict)

    def is_empty(self) -> bool:
        return self.memory is None and not (
            self.added or self.removed or self.positions or self.former or self.retained
        )

    def frees(self) -> bool:
        """Returns whether a part of the change needs little or no room."""
        return bool(self.removed or self.positions or self.former)

    def without_data(self) -> "MemberStoreChange":
        """Takes out and returns the part that needs little or no room."""
        change = MemberStoreChange(
            removed=self.removed, positions=self.positions, former=self.former
        )
        self.removed, self.positions, self.former = set(), {}, {}
        return change

    def split(self, added_max: int, bytes_max: int) -> "MemberStoreChange":
        """Takes out and returns the messages beyond the limits. At least one message stays."""
        size = 0
        kept: dict[MessageId, bytes] = {}
        for id, data in self.added.items():
            size += len(data)
            if kept and (len(kept) == added_max or size > bytes_max):
                break
            kept[id] = data
        rest = {id: data for id, data in self.added.items() if id not in kept}
        self.added = kept
        return MemberStoreChange(added=rest)

    def followed_by(self, later: "MemberStoreChange") -> "MemberStoreChange":
        """Combines two changes. A message that the later one removes is not added."""
        added = {id: data for id, data in self.added.items() if id not in later.removed}
        return MemberStoreChange(
            added | later.added,
            self.removed | later.removed,
            self.positions | later.positions,
            self.retained | later.retained,
            self.memory if later.memory is None else later.memory,
            self.former | later.former,
        )


@dataclass(frozen=True, slots=True)
class StoredMember:
    """The content of the file when it was opened."""

    custody: list[tuple[bytes, float]]
    """Messages, each with the seconds since it was stored, by the wall clock."""
    positions: dict[bytes, Position]
    retained: dict[str, bytes]
    """Retained versions by topic."""
    memory: list[bytes]
    former: FormerPositions = field(default_factory=dict)


_FORMER: Final = (
    "CREATE TABLE IF NOT EXISTS former (origin BLOB NOT NULL, epoch INTEGER NOT NULL,"
    " place INTEGER NOT NULL, PRIMARY KEY (origin, epoch)) WITHOUT ROWID"
)
"""A table that older versions neither make nor read."""
_FORM: Final = SqliteForm(
    application_id=0x48464644,
    version=1,
    tables=(
        "CREATE TABLE custody (epoch INTEGER NOT NULL, sequence INTEGER NOT NULL, stored_at REAL"
        " NOT NULL, data BLOB NOT NULL, PRIMARY KEY (epoch, sequence)) WITHOUT ROWID",
        "CREATE TABLE positions (origin BLOB PRIMARY KEY, epoch INTEGER NOT NULL,"
        " place INTEGER NOT NULL) WITHOUT ROWID",
        "CREATE TABLE retained (topic TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID",
        "CREATE TABLE memory (at INTEGER PRIMARY KEY, data BLOB NOT NULL)",
        "CREATE TABLE owner (node BLOB NOT NULL)",
        _FORMER,
    ),
    error=MemberStoreError,
    full=MemberStoreFull,
    texts={
        Trouble.FULL: "{path}: the disk is full",
        Trouble.IN_USE: "{path} is in use by another process: stop it",
        Trouble.OTHER_DATABASE: "{path} is another program's database: give another directory",
        Trouble.CANNOT_OPEN: "{path}: cannot be written ({error}): see its permissions",
        Trouble.READ_ONLY: "{path}: cannot be written ({error}): see its permissions",
        Trouble.DISK: "{path}: {error}; start again once the disk works",
        Trouble.DAMAGED: "{path} is damaged ({error}): move it away, and messages in custody are"
        " lost; `sqlite3 {name} .recover` may read it",
    },
)


class StoreFile(SqliteFile):
    """One open file of one member."""

    clock = staticmethod(time.time)
    form = _FORM

    def __init__(self, path: Path, node: bytes) -> None:
        """`node`: the id of the member that owns the file."""
        super().__init__(path)
        self._node = node

    def open(self) -> StoredMember:
        """Opens the file, creating it if needed, and returns its content.

        Raises `MemberStoreError` when it cannot be used, and `MemberStoreFull` without room.
        """
        return self._open(self._read)

    def apply(self, change: MemberStoreChange) -> None:
        """Writes a change; it is durable when the call returns.

        Raises `MemberStoreError` when the file fails, and `MemberStoreFull` without room.
        """

        def write(db: sqlite3.Connection) -> None:
            self._find_room(db, sum(map(len, change.added.values())))
            _execute(db, self._statements(change))

        self._guard(write)

    def _create(self, db: sqlite3.Connection) -> None:
        super()._create(db)
        db.execute("INSERT INTO owner VALUES (?)", (self._node,))

    def _read(self, db: sqlite3.Connection) -> StoredMember:
        [(owner,)] = db.execute("SELECT node FROM owner")
        if owner != self._node:
            raise MemberStoreError(
                f"{self.path} belongs to member {owner.hex()}, this is {self._node.hex()}: restore"
                " that member's identity file, or delete the store with the messages in it"
            )
        now = self.clock()
        custody = [
            (bytes(data), max(0.0, now - stored_at))
            for stored_at, data in db.execute(
                "SELECT stored_at, data FROM custody ORDER BY epoch, sequence"
            )
        ]
        positions = {
            bytes(origin): (int(epoch), int(place))
            for origin, epoch, place in db.execute("SELECT origin, epoch, place FROM positions")
        }
        db.execute(_FORMER)
        former = {
            (bytes(origin), int(epoch)): int(place)
            for origin, epoch, place in db.execute("SELECT origin, epoch, place FROM former")
        }
        memory = [bytes(data) for (data,) in db.execute("SELECT data FROM memory ORDER BY at")]
        retained = {
            str(topic): bytes(data)
            for topic, data in db.execute("SELECT topic, data FROM retained")
        }
        return StoredMember(custody, positions, retained, memory, former)

    def _statements(self, change: MemberStoreChange) -> list[Statement]:
        now = self.clock()
        found: list[Statement] = [
            ("DELETE FROM custody WHERE epoch = ? AND sequence BETWEEN ? AND ?", span)
            for span in _spans(change.removed)
        ]
        found += _inserts(
            "custody (epoch, sequence, stored_at, data)",
            [(id.epoch, id.sequence, now, data) for id, data in change.added.items()],
        )
        found += _inserts(
            "positions (origin, epoch, place)",
            [(origin, *position) for origin, position in change.positions.items()],
        )
        found += _inserts(
            "former (origin, epoch, place)",
            [(*stream, place) for stream, place in change.former.items()],
        )
        found += [
            (
                "DELETE FROM former WHERE origin = ? AND epoch NOT IN (SELECT epoch FROM former"
                " WHERE origin = ? ORDER BY epoch DESC LIMIT ?)",
                (origin, origin, FORMER_MAX),
            )
            for origin in {origin for origin, _ in change.former}
        ]
        found += [
            ("DELETE FROM retained WHERE topic = ?", (topic,))
            for topic, data in change.retained.items()
            if data is None
        ]
        found += _inserts(
            "retained (topic, data)",
            [(topic, data) for topic, data in change.retained.items() if data is not None],
        )
        if change.memory is not None:
            found.append(("DELETE FROM memory", ()))
            found += _inserts("memory (data)", [(data,) for data in change.memory])
        return found

    def _find_room(self, db: sqlite3.Connection, size: int) -> None:
        """Checks that messages of that size fit. Raises `MemberStoreFull` when they do not."""
        if not size:
            return
        free_bytes = OsFileSystem(self.path.parent).free_bytes()
        # Twice the size: a message is written to the log and then to the file.
        if free_bytes >= RESERVE_BYTES + 2 * size:
            return
        [(freed_pages,)] = db.execute("PRAGMA freelist_count")
        if freed_pages * PAGE_BYTES < 2 * size + PAGE_BYTES:
            raise MemberStoreFull(
                f"{self.path}: the disk has {free_bytes} bytes left, and {RESERVE_BYTES} are kept"
                " for removals"
            )


def _spans(ids: Iterable[MessageId]) -> Iterator[tuple[int, int, int]]:
    """Yields an epoch and the first and last of each run of sequences without a gap."""
    first = last = (0, 0)
    for id in sorted((id.epoch, id.sequence) for id in ids):
        if id == (last[0], last[1] + 1):
            last = id
            continue
        if last[1]:
            yield (*first, last[1])
        first = last = id
    if last[1]:
        yield (*first, last[1])


def _inserts(target: str, rows: Sequence[tuple[Value, ...]]) -> Iterator[Statement]:
    for at in range(0, len(rows), ROWS_MAX):
        group = rows[at : at + ROWS_MAX]
        places = f"({', '.join('?' * len(group[0]))})"
        yield (
            f"INSERT OR REPLACE INTO {target} VALUES {', '.join([places] * len(group))}",
            [value for row in group for value in row],
        )


def _execute(db: sqlite3.Connection, statements: Sequence[Statement]) -> None:
    """Executes the statements as one transaction.

    Each statement releases the interpreter's lock and may wait milliseconds for it while the event
    loop is busy. Callers therefore pass few statements with many rows.
    """

    def execute() -> None:
        for statement, values in statements:
            db.execute(statement, values)

    if len(statements) == 1:
        execute()
    elif statements:
        transaction(db, execute)
