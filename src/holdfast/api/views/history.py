"""State of one session at one time, by the log: whether it existed, and its subscriptions.

The log has a record of each open, subscribe, unsubscribe, close and end of a session that outlives
its connection, and of its cursor about twenty times a second. Records before the retention floor
are gone. So a fact is either known from a record before the time in question, inferred from the
first record behind it, or unknown.
"""

import struct
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final, Protocol

from msgspec import Struct, field

from holdfast.api.nodes.whole_log import LogSource
from holdfast.log.batch import Batch
from holdfast.log.record import CURSOR, SESSION, Record
from holdfast.node.session.state import decode_cursor
from holdfast.node.state.session_records import (
    CloseRecord,
    EndRecord,
    OpenRecord,
    SubscribeRecord,
    SubscriptionRow,
    UnsubscribeRecord,
    decode_record,
)
from holdfast.protocol.topics.names import is_shared, matches, split_shared

HISTORY_BYTES_MAX: Final = 32 << 20
"""The most bytes of the session's partition that are read before the time in question, and the most
that are read behind it."""
READ_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 1 << 20
"""The bytes of one piece above which it is read again with fewer records."""
STEP_RECORDS: Final = 4000
"""The records of one read backwards."""


class InThread(Protocol):
    """A runner of work off the event loop."""

    async def __call__(self, work: Callable[[], Any], /) -> Any:
        """The result of the work."""


class SessionHistory(Struct):
    """The records of a session around a time, and what they say about a topic."""

    topic: str
    partition: int
    offset: int
    """The place of the message in question."""
    is_own: bool = False
    """Whether the client published the message itself."""

    is_open: bool | None = None
    """Whether a client was connected at the time; None: unknown."""
    subscribed_us: int = 0
    """Time of its last SUBSCRIBE before the time; 0: unknown."""
    filters: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The matching filters that were subscribed to before the time, with QoS and time."""
    shared: set[str] = field(default_factory=set)
    """The matching filters of shared groups that were subscribed to before the time."""
    no_local: set[str] = field(default_factory=set)
    """The matching filters with No Local, of the message's own publisher."""
    has_begun: bool = False
    """Whether the records show the session from its beginning."""
    later: list[tuple[int, str, str]] = field(default_factory=list)
    """Changes behind the time: microseconds, kind and filter."""
    passed_us: int = 0
    """Time at which the session's position passed the message; 0: not seen."""
    moved_us: int = 0
    """Time at which an operator moved the session past the message; 0: none did."""
    acknowledged_us: int = 0
    """Time of the record that shows the message as no longer inflight."""
    inflight_us: int = 0
    """Time at which the message became inflight."""
    connected_us: int = 0
    """Time of the first connect behind the time; 0: not seen."""

    def before(self, record: Record) -> None:
        """Applies a record before the message, oldest first."""
        if record.kind != SESSION:
            return
        change = _change(record)
        if isinstance(change, OpenRecord):
            self.is_open = True
            if change.clean:
                self._begin()
        elif isinstance(change, CloseRecord):
            self.is_open = False
        elif isinstance(change, EndRecord):
            self.is_open = False
            self._begin()
        elif isinstance(change, SubscribeRecord):
            for row in change.subscriptions:
                self._subscribe(row, record.timestamp_us)
        elif isinstance(change, UnsubscribeRecord):
            for filter in change.filters:
                self._unsubscribe(filter)

    def _begin(self) -> None:
        """The session has no subscriptions here."""
        self.filters.clear()
        self.shared.clear()
        self.no_local.clear()
        self.has_begun = True

    def _unsubscribe(self, filter: str) -> None:
        self.filters.pop(filter, None)
        self.shared.discard(filter)
        self.no_local.discard(filter)

    def _subscribe(self, row: SubscriptionRow, at_us: int) -> None:
        filter = row[0]
        self._unsubscribe(filter)
        if is_shared(filter):
            if matches(split_shared(filter)[1], self.topic):
                self.shared.add(filter)
        elif self._matches(filter):
            if self.is_own and row[2]:
                self.no_local.add(filter)
                return
            self.filters[filter] = (row[1], at_us)
            self.subscribed_us = at_us

    def behind(self, record: Record) -> None:
        """Applies a record behind the message, oldest first."""
        if record.kind == CURSOR:
            self._move(record)
            return
        if record.kind != SESSION:
            return
        change = _change(record)
        at_us = record.timestamp_us
        if isinstance(change, OpenRecord):
            self.connected_us = self.connected_us or at_us
            if change.clean:
                self.later.append((at_us, "clean", ""))
        elif isinstance(change, EndRecord):
            self.later.append((at_us, "end", ""))
        elif isinstance(change, SubscribeRecord):
            for row in change.subscriptions:
                if self._matches(row[0]):
                    self.later.append((at_us, "subscribe", row[0]))
        elif isinstance(change, UnsubscribeRecord):
            for filter in change.filters:
                if self._matches(filter):
                    self.later.append((at_us, "unsubscribe", filter))

    def _move(self, record: Record) -> None:
        try:
            cursor = decode_cursor(record.payload)
        except struct.error:
            return
        for partition, offset in cursor.positions:
            if partition == self.partition:
                self._pass(offset > self.offset, cursor.is_move, record.timestamp_us)
        place = (self.partition, self.offset)
        for _, entry in cursor.inflight:
            if entry is not None and (entry.partition, entry.offset) == place:
                self.inflight_us = self.inflight_us or record.timestamp_us
        if place in cursor.done and not self.acknowledged_us:
            self.acknowledged_us = record.timestamp_us

    def _pass(self, is_above: bool, is_move: bool, at_us: int) -> None:
        if self.passed_us:
            return
        if is_move:
            self.moved_us = at_us if is_above else 0
        elif is_above and not self.moved_us:
            self.passed_us = at_us

    def _matches(self, filter: str) -> bool:
        return not is_shared(filter) and matches(filter, self.topic)

    @property
    def ended_us(self) -> int:
        """Returns the time at which the session ended behind the message; 0: not seen."""
        return next((at for at, kind, _ in self.later if kind in ("clean", "end")), 0)


def _change(record: Record) -> object:
    try:
        return decode_record(record.payload)
    except ValueError:
        return None


class HistoryPiece(Struct):
    """The records of a session from an offset of its partition to the piece behind."""

    start: int
    records: list[Record]


async def pieces_before(
    in_thread: InThread,
    reader: LogSource,
    key: bytes,
    partition: int,
    end: int,
    bytes_max: int,
) -> AsyncIterator[HistoryPiece]:
    """The records of a session before an offset, the newest piece first, until about `bytes_max`
    are read. The first piece comes whatever its size. A piece is complete: records are read
    forwards, so one that is cut off would lack its newest records, and be taken for all of them."""
    first, at, left = reader.first_offset(partition), end, bytes_max
    step = widest = STEP_RECORDS
    while at > first and (left > 0 or at == end):
        start = position = max(first, at - step)
        records: list[Record] = []
        size_bytes = 0
        while position < at and (size_bytes < PIECE_BYTES or step == 1):
            work = partial(records_of, reader, key, partition, position, at)
            found, position, more_bytes = await in_thread(work)
            records += found
            size_bytes += max(1, more_bytes)
        left -= size_bytes
        if position < at:
            # Large records are in the way: read again with fewer.
            widest = max(1, step // 2)
            step = max(1, step // 8)
            continue
        yield HistoryPiece(start, records)
        at = start
        step = min(2 * step, widest)


def records_of(
    reader: LogSource, key: bytes, partition: int, start: int, end: int
) -> tuple[list[Record], int, int]:
    """The records of a session from `start` to at most `end`: the records, the offset at which the
    read ended, and its bytes. Runs in a thread."""
    found: list[Record] = []
    batches = reader.read_batches(partition, start, end, READ_BYTES)
    size_bytes, position = 0, end
    for data in batches:
        batch = Batch(data, check=False)
        size_bytes += len(data)
        position = batch.end_offset
        for index in range(max(0, start - batch.base_offset), batch.count):
            if batch.base_offset + index >= end:
                break
            if batch.client_id(index) == key:
                record = batch.record(index)
                if record.kind in (SESSION, CURSOR):
                    found.append(record)
    return found, min(end, position), size_bytes
