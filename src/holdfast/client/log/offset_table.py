"""Stores a sink's position in a table of its own database.

A program that writes its results and the position in one transaction has each message exactly once:
after a crash it goes on at the position of its last transaction.
"""

import re
from collections.abc import Sequence
from typing import Any, Final, Protocol

from holdfast.client.log.errors import LogOptionError
from holdfast.client.log.position import Position

TABLE: Final = "holdfast_offsets"
GENERATION: Final = -1
"""The log_partition of the row whose next_offset is the generation of the log. Without it: 0."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")
_MARKS: Final = {"sqlite3": "?", "psycopg": "%s"}


class DatabaseCursor(Protocol):
    """The part of a DB-API 2.0 cursor (PEP 249) that is used here."""

    @property
    def rowcount(self) -> int:
        """The rows that the last statement has changed."""
        ...

    def execute(self, operation: Any, parameters: Sequence[Any] = ..., /) -> Any:
        """Runs a statement."""
        ...

    def fetchall(self) -> Sequence[Any]:
        """Returns the rows of the last statement."""
        ...

    def close(self) -> Any:
        """Closes the cursor."""
        ...


class DatabaseConnection(Protocol):
    """The part of a DB-API 2.0 connection (PEP 249) that is used here."""

    def cursor(self) -> DatabaseCursor:
        """Makes a cursor."""
        ...

    def commit(self) -> Any:
        """Commits the transaction."""
        ...


class OffsetConflict(Exception):
    """Another process has stored a position of this sink meanwhile. Roll back: its results are
    stored, and those of this transaction would be there twice."""


class OffsetTable:
    """The position of one sink.

    Invariant: a stored position only replaces the one that this object loaded or stored last. So of
    two processes that run the same sink by mistake, one fails, and no message is stored twice.
    """

    def __init__(
        self,
        connection: DatabaseConnection,
        sink: str,
        *,
        table: str = TABLE,
        placeholder: str = "",
    ) -> None:
        """`sink`: the name of the sink, which is the key in the table. `placeholder`: that of the
        driver, "?" or "%s"; known for sqlite3 and psycopg."""
        module = type(connection).__module__.partition(".")[0]
        mark = placeholder or _MARKS.get(module, "")
        if mark not in _MARKS.values():
            raise LogOptionError(f"placeholder is {mark!r} for {module}; allowed: '?', '%s'")
        if not _NAME.fullmatch(table):
            raise LogOptionError(f"table is {table!r}; allowed: a name, or schema.name")
        self._connection = connection
        self._sink = sink
        self._create = (
            f"create table if not exists {table} (sink varchar(255) not null, log_partition integer"
            " not null, next_offset bigint not null, primary key (sink, log_partition))"
        )
        self._select = f"select log_partition, next_offset from {table} where sink = {mark}"
        self._insert = f"insert into {table} values ({mark}, {mark}, {mark})"
        self._update = (
            f"update {table} set next_offset = {mark} where sink = {mark} and log_partition = "
            f"{mark} and next_offset = {mark}"
        )
        self._known: dict[int, int] = {}

    def load(self) -> Position | None:
        """Returns the stored position, or None before the first. It makes the table if needed, and
        commits. Call it again after a rollback, and read from there again."""
        cursor = self._connection.cursor()
        try:
            cursor.execute(self._create)
            cursor.execute(self._select, (self._sink,))
            self._known = {int(partition): int(offset) for partition, offset in cursor.fetchall()}
        finally:
            cursor.close()
        self._connection.commit()
        if not self._known:
            return None
        known = dict(self._known)
        return Position(known, known.pop(GENERATION, 0))

    def store(self, position: Position) -> None:
        """Stores a position in the transaction of the connection, and does not commit. Raises
        OffsetConflict, or the driver's error if two processes store a first position."""
        stored = dict(position.offsets)
        if position.generation or GENERATION in self._known:
            stored[GENERATION] = position.generation or 0
        cursor = self._connection.cursor()
        try:
            for partition, offset in stored.items():
                known = self._known.get(partition)
                if known is None:
                    cursor.execute(self._insert, (self._sink, partition, offset))
                elif known != offset:
                    cursor.execute(self._update, (offset, self._sink, partition, known))
                    if cursor.rowcount != 1:
                        raise OffsetConflict(
                            f"sink {self._sink!r} has stored another offset of partition "
                            f"{partition} than {known}: does a second process run?"
                        )
        finally:
            cursor.close()
        self._known |= stored
