"""What a member must not forget, in an SQLite file: messages in its custody, how far it is with the
streams from others, versions of what is retained, and what it knew of them.

Write-ahead log with synchronous=FULL: a transaction is on disk when it returns. One process has the
file open (SQLite's exclusive lock, which ends with the process). Blocking; calls come from one
thread after another, never two at once.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.federation.core.identity import MessageId
from holdfast.federation.core.messages.streams import Position
from holdfast.sqlite import Result, Trouble, transaction, trouble_of
from holdfast.storage.files.filesystem import OsFileSystem

APPLICATION_ID: Final = 0x48464644
SCHEMA_VERSION: Final = 1
PAGE_BYTES: Final = 4096
WAL_PAGES_MAX: Final = 256
"""The write-ahead log is copied into the file when it has so many pages."""
ROWS_MAX: Final = 200
"""Of one statement; those of every number up to it stay prepared."""
PREPARED_MAX: Final = 1024
RESERVE_BYTES: Final = 8 << 20
"""Room on the disk that messages leave free: removals need some, in log and file. What removals
have freed in the file may be used again."""

_SCHEMA: Final = (
    "CREATE TABLE custody (epoch INTEGER NOT NULL, sequence INTEGER NOT NULL,"
    " stored_at REAL NOT NULL, data BLOB NOT NULL, PRIMARY KEY (epoch, sequence)) WITHOUT ROWID",
    "CREATE TABLE positions (origin BLOB PRIMARY KEY, epoch INTEGER NOT NULL,"
    " place INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE retained (topic TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE memory (at INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE TABLE owner (node BLOB NOT NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

Value = int | float | str | bytes
Statement = tuple[str, Sequence[Value]]


class MemberStoreError(Exception):
    """The file cannot be used any more, or at all. The text names it and says what to do."""


class MemberStoreFull(Exception):
    """There is no room; nothing has changed, and later there may be."""


@dataclass(slots=True)
class MemberStoreChange:
    """One transaction."""

    added: dict[MessageId, bytes] = field(default_factory=dict)
    removed: set[MessageId] = field(default_factory=set)
    positions: dict[bytes, Position] = field(default_factory=dict)
    retained: dict[str, bytes | None] = field(default_factory=dict)
    """By topic; None: nothing any more."""
    memory: list[bytes] | None = None
    """In place of what was there."""

    def is_empty(self) -> bool:
        return self.memory is None and not (
            self.added or self.removed or self.positions or self.retained
        )

    def frees(self) -> bool:
        """Does it have a part that needs no room, or little?"""
        return bool(self.removed or self.positions)

    def without_data(self) -> "MemberStoreChange":
        """That part, taken out."""
        change = MemberStoreChange(removed=self.removed, positions=self.positions)
        self.removed, self.positions = set(), {}
        return change

    def split(self, added_max: int, bytes_max: int) -> "MemberStoreChange":
        """What is added beyond so much, taken out; one message always stays."""
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
        """Both in one; what is removed later is not added."""
        added = {id: data for id, data in self.added.items() if id not in later.removed}
        return MemberStoreChange(
            added | later.added,
            self.removed | later.removed,
            self.positions | later.positions,
            self.retained | later.retained,
            self.memory if later.memory is None else later.memory,
        )


@dataclass(frozen=True, slots=True)
class StoredMember:
    """What was in the file."""

    custody: list[tuple[bytes, float]]
    """Each with the seconds since it was stored, by the wall clock."""
    positions: dict[bytes, Position]
    retained: dict[str, bytes]
    """By topic."""
    memory: list[bytes]


class StoreFile:
    clock = staticmethod(time.time)

    def __init__(self, path: Path, node: bytes) -> None:
        """`node`: the member whose file this is."""
        self.path = path
        self._node = node
        self._connection: sqlite3.Connection | None = None
        self._failure: MemberStoreError | None = None

    def open(self) -> StoredMember:
        """Makes the file if there is none. Raises StoreError, StoreFull."""
        is_new = not self.path.exists()
        try:
            self._connection = sqlite3.connect(
                self.path,
                timeout=0,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=PREPARED_MAX,
            )
            self._prepare(self._connection)
            if is_new:
                # SQLite syncs the file, but not the directory that names it.
                OsFileSystem(self.path.parent).sync_folder(".")
            return self._guard(self._read)
        except sqlite3.Error as error:
            self.close()
            raise self._explained(error) from error
        except OSError as error:
            self.close()
            raise MemberStoreError(f"{self.path}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def apply(self, change: MemberStoreChange) -> None:
        """Durable when it returns. Raises StoreError, StoreFull."""

        def write(db: sqlite3.Connection) -> None:
            self._find_room(db, sum(map(len, change.added.values())))
            _execute(db, self._statements(change))

        self._guard(write)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _prepare(self, db: sqlite3.Connection) -> None:
        # Before the first access: with an exclusive lock there is no shared-memory file, either.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        [(application,)] = db.execute("PRAGMA application_id")
        [(version,)] = db.execute("PRAGMA user_version")
        [(tables,)] = db.execute("SELECT count(*) FROM sqlite_master")
        if tables and application != APPLICATION_ID:
            raise MemberStoreError(
                f"{self.path} is another program's database: give another directory"
            )
        if tables and version != SCHEMA_VERSION:
            raise MemberStoreError(
                f"{self.path} has format {version}, this version reads {SCHEMA_VERSION}: use the"
                " version that wrote it"
            )
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES_MAX}")
        db.execute(f"PRAGMA journal_size_limit = {WAL_PAGES_MAX * PAGE_BYTES}")
        if not tables:
            transaction(db, lambda: self._create(db))
        [(owner,)] = db.execute("SELECT node FROM owner")
        if owner != self._node:
            raise MemberStoreError(
                f"{self.path} belongs to member {owner.hex()}, this is {self._node.hex()}: restore"
                " that member's identity file, or delete the store with the messages in it"
            )

    def _create(self, db: sqlite3.Connection) -> None:
        for statement in _SCHEMA:
            db.execute(statement)
        db.execute("INSERT INTO owner VALUES (?)", (self._node,))

    def _read(self, db: sqlite3.Connection) -> StoredMember:
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
        memory = [bytes(data) for (data,) in db.execute("SELECT data FROM memory ORDER BY at")]
        retained = {
            str(topic): bytes(data)
            for topic, data in db.execute("SELECT topic, data FROM retained")
        }
        return StoredMember(custody, positions, retained, memory)

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
        """For messages of that size. Raises StoreFull."""
        if not size:
            return
        free_bytes = OsFileSystem(self.path.parent).free_bytes()
        # Once in the log, once in the file.
        if free_bytes >= RESERVE_BYTES + 2 * size:
            return
        [(freed_pages,)] = db.execute("PRAGMA freelist_count")
        if freed_pages * PAGE_BYTES < 2 * size + PAGE_BYTES:
            raise MemberStoreFull(
                f"{self.path}: the disk has {free_bytes} bytes left, and {RESERVE_BYTES} are kept"
                " for removals"
            )

    def _guard(self, operation: Callable[[sqlite3.Connection], Result]) -> Result:
        connection = self._connection
        if connection is None:
            raise MemberStoreError(f"{self.path} is not open")
        if self._failure is not None:
            raise self._failure
        try:
            return operation(connection)
        except OSError as error:
            self._failure = MemberStoreError(f"{self.path}: {error.strerror}")
            raise self._failure from error
        except sqlite3.Error as error:
            explained = self._explained(error)
            if isinstance(explained, MemberStoreError):
                # After a failed sync nobody knows what the disk has; only reading it again tells.
                self._failure = explained
            raise explained from error

    def _explained(self, error: sqlite3.Error) -> MemberStoreError | MemberStoreFull:
        path = self.path
        match trouble_of(error):
            case Trouble.FULL:
                return MemberStoreFull(f"{path}: the disk is full")
            case Trouble.IN_USE:
                return MemberStoreError(f"{path} is in use by another process: stop it")
            case Trouble.CANNOT_OPEN | Trouble.READ_ONLY:
                return MemberStoreError(f"{path}: cannot be written ({error}): see its permissions")
            case Trouble.DISK:
                return MemberStoreError(f"{path}: {error}; start again once the disk works")
        return MemberStoreError(
            f"{path} is damaged ({error}): move it away, and messages in custody are lost;"
            f" `sqlite3 {path.name} .recover` may read it"
        )


def _spans(ids: Iterable[MessageId]) -> Iterator[tuple[int, int, int]]:
    """An epoch, the first and the last of sequences without a gap."""
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
    """As one transaction. With each statement this thread gives up the interpreter's lock, and may
    wait for it for milliseconds while the event loop is busy."""

    def execute() -> None:
        for statement, values in statements:
            db.execute(statement, values)

    if len(statements) == 1:
        execute()
    elif statements:
        transaction(db, execute)
