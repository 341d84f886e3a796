"""Stores a publish queue's messages in an SQLite file."""

import sqlite3
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Final

from holdfast.client.identity import EPOCH_MAX, check_producer
from holdfast.client.pubqueue.messages import (
    ENTRY_OVERHEAD_BYTES,
    Failed,
    QueueEntry,
    StoreError,
    StoreFull,
    entry_size,
)
from holdfast.client.pubqueue.store import FAILED_MAX, Opened, QueueChange
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.packets import PUBLISH
from holdfast.protocol.mqtt.properties import decode_block, encode_block
from holdfast.sqlite import SqliteFile, SqliteForm, Trouble, transaction

CHECKED_BYTES_MAX: Final = 64 << 20
"""The most bytes of a file that is checked for damage when opened. In larger ones damage is found
on reading."""
COMPACTED_PAGES_MIN: Final = 1024
"""The least free pages at which an empty queue's file is compacted when opened."""

_FORM: Final = SqliteForm(
    application_id=0x48465051,
    version=1,
    tables=(
        "CREATE TABLE state (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
        "CREATE TABLE messages (sequence INTEGER PRIMARY KEY, epoch INTEGER NOT NULL,"
        " topic TEXT NOT NULL, payload BLOB NOT NULL, properties BLOB NOT NULL,"
        " retain INTEGER NOT NULL, put_at REAL NOT NULL, expires_at REAL NOT NULL)",
        "CREATE TABLE failed (sequence INTEGER PRIMARY KEY, epoch INTEGER NOT NULL,"
        " topic TEXT NOT NULL, payload BLOB NOT NULL, properties BLOB NOT NULL,"
        " retain INTEGER NOT NULL, put_at REAL NOT NULL, expires_at REAL NOT NULL,"
        " reason INTEGER NOT NULL, text TEXT NOT NULL, failed_at REAL NOT NULL)",
    ),
    error=StoreError,
    full=StoreFull,
    texts={
        Trouble.FULL: "{path}: the disk is full, nothing was stored",
        Trouble.IN_USE: "{path} is in use by another process or queue: close it, or give another"
        " file",
        Trouble.NO_DATABASE: "{path} is no publish queue: give another file",
        Trouble.OTHER_DATABASE: "{path} is no publish queue but another SQLite database: give"
        " another",
        Trouble.CANNOT_OPEN: "{path}: cannot be opened; does its directory exist?",
        Trouble.READ_ONLY: "{path}: is not writable",
        Trouble.DISK: "{path}: {error}; open the queue again once the disk works",
        Trouble.DAMAGED: "{path} is damaged ({error}): move it away; `sqlite3 {name} .recover` may"
        " read it",
    },
)
_COLUMNS: Final = "sequence, epoch, topic, payload, properties, retain, put_at, expires_at"

Row = tuple[int, int, str, bytes, bytes, int, float, float]


class SqliteStore(SqliteFile):
    """A store in a file, which is made if there is none. Its producer id is random unless given,
    and stays.

    `renew_identity`: give the messages left in the file this opening's epoch. That is the remedy
    after ProducerFenced, once no other writer uses the file's identity. Messages that the broker
    has already stored then arrive again.
    """

    blocking: bool = True
    form = _FORM

    def __init__(
        self, path: str | Path, *, producer: str | None = None, renew_identity: bool = False
    ) -> None:
        if producer is not None:
            check_producer(producer)
        super().__init__(path)
        self._producer = producer
        self._renew_identity = renew_identity

    def open(self, form: str, clock: float) -> Opened:
        """Implements `QueueStore.open`."""
        return self._open(lambda db: self._begin(db, form, clock))

    def apply(self, change: QueueChange) -> None:
        """Implements `QueueStore.apply`."""
        self._guard(lambda db: transaction(db, lambda: _apply(db, change)))

    def read(self, after: int, count: int, size: int) -> list[QueueEntry]:
        """Implements `QueueStore.read`."""
        return self._guard(lambda db: _read(db, after, count, size))

    def renew(self, epoch: int) -> None:
        """Implements `QueueStore.renew`."""

        def update(db: sqlite3.Connection) -> None:
            """Sets the epoch of all messages."""
            db.execute("UPDATE messages SET epoch = ?", (epoch,))
            _set_state(db, "epoch", epoch)

        self._guard(lambda db: transaction(db, lambda: update(db)))

    def list_failed(self) -> list[Failed]:
        """Implements `QueueStore.list_failed`."""
        query = f"SELECT {_COLUMNS}, reason, text, failed_at FROM failed ORDER BY sequence"
        rows = self._guard(lambda db: db.execute(query).fetchall())
        return [Failed(_entry(row[:8]), row[8], row[9], row[10]) for row in rows]

    def forget_failed(self) -> int:
        """Implements `QueueStore.forget_failed`."""

        def forget(db: sqlite3.Connection) -> int:
            """Deletes the failed messages; returns their number."""
            return db.execute("DELETE FROM failed").rowcount

        return self._guard(lambda db: transaction(db, lambda: forget(db)))

    def _begin(self, db: sqlite3.Connection, form: str, clock: float) -> Opened:
        if self.path.stat().st_size <= CHECKED_BYTES_MAX:
            [(result,)] = db.execute("PRAGMA quick_check(1)")
            if result != "ok":
                raise sqlite3.DatabaseError(result)
        opened = transaction(db, lambda: self._load(db, form, clock))
        [(free_pages,)] = db.execute("PRAGMA freelist_count")
        if not opened.count and free_pages >= COMPACTED_PAGES_MIN:
            # It needs room for a second copy. Without it the file stays as it is.
            with suppress(sqlite3.OperationalError):
                db.execute("VACUUM")
        return opened

    def _load(self, db: sqlite3.Connection, form: str, clock: float) -> Opened:
        """Reads the state and fixes this opening's epoch."""
        state = dict(db.execute("SELECT name, value FROM state"))
        count, size = db.execute(
            "SELECT count(*), coalesce(sum(length(CAST(topic AS BLOB)) + length(payload)"
            " + length(properties) + ?), 0) FROM messages",
            (ENTRY_OVERHEAD_BYTES,),
        ).fetchone()
        kept_form = state.get("form", form)
        if count and kept_form != form:
            raise StoreError(
                f"{self.path} has {count} messages of the form {kept_form!r}, this queue's is "
                f"{form!r}: publish them with the other form first"
            )
        producer = state.get("producer") or self._producer or token_hex(8)
        if self._producer not in (None, producer):
            raise StoreError(
                f"{self.path} belongs to producer {producer!r}, not {self._producer!r}: "
                "each producer needs its own file"
            )
        epoch = _next_epoch(state.get("epoch", -1), clock)
        last_sequence = state.get("sequence", 0)
        for name, value in (
            ("producer", producer),
            ("epoch", epoch),
            ("sequence", last_sequence),
            ("form", form),
        ):
            _set_state(db, name, value)
        if self._renew_identity:
            db.execute("UPDATE messages SET epoch = ?", (epoch,))
        return Opened(producer, epoch, last_sequence, count, size)


def _apply(db: sqlite3.Connection, change: QueueChange) -> None:
    removed = [(sequence,) for sequence in change.removed]
    removed += [(failed.entry.sequence,) for failed in change.failed]
    db.executemany("DELETE FROM messages WHERE sequence = ?", removed)
    if change.added:
        db.executemany(
            f"INSERT INTO messages ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            map(_row, change.added),
        )
        _set_state(db, "sequence", change.added[-1].sequence)
    if change.failed:
        db.executemany(
            f"INSERT OR REPLACE INTO failed ({_COLUMNS}, reason, text, failed_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(*_row(one.entry), one.reason, one.text, one.failed_at) for one in change.failed],
        )
        db.execute(
            "DELETE FROM failed WHERE sequence <= (SELECT sequence FROM failed"
            " ORDER BY sequence DESC LIMIT 1 OFFSET ?)",
            (FAILED_MAX,),
        )


def _read(db: sqlite3.Connection, after: int, count: int, size: int) -> list[QueueEntry]:
    entries: list[QueueEntry] = []
    query = f"SELECT {_COLUMNS} FROM messages WHERE sequence > ? ORDER BY sequence LIMIT ?"
    for row in db.execute(query, (after, count)):
        entry = _entry(row)
        entries.append(entry)
        size -= entry.size
        if size <= 0:
            break
    return entries


def _row(entry: QueueEntry) -> Row:
    properties = encode_block(entry.properties) if entry.properties else b""
    return (
        entry.sequence,
        entry.epoch,
        entry.topic,
        entry.payload,
        properties,
        int(entry.retain),
        entry.put_at,
        entry.expires_at,
    )


def _entry(row: Row) -> QueueEntry:
    sequence, epoch, topic, payload, block, retain, put_at, expires_at = row
    try:
        properties = decode_block(block, 0, len(block), PUBLISH) if block else None
        size = entry_size(topic, payload, block)
    except (ProtocolViolation, TypeError, AttributeError) as error:
        raise sqlite3.DatabaseError(f"message {sequence} is unreadable: {error}") from error
    return QueueEntry(
        sequence, epoch, topic, payload, properties, bool(retain), put_at, expires_at, size
    )


def _set_state(db: sqlite3.Connection, name: str, value: object) -> None:
    db.execute("INSERT OR REPLACE INTO state (name, value) VALUES (?, ?)", (name, value))


def _next_epoch(last: int, clock: float) -> int:
    """The epoch of this opening: seconds since 1970, so that an old copy of a file does not repeat
    an epoch. If the clock has gone back it is the last one plus one."""
    epoch = max(last + 1, int(clock) if 0 <= clock <= EPOCH_MAX else 0)
    if epoch > EPOCH_MAX:
        raise StoreError("the epochs of this producer are used up: begin a new file")
    return epoch
