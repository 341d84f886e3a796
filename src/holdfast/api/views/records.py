"""Records of the log as JSON, and pages of them within a scan budget.

Partitions have no common order, so a page is in the order of the records' times. A cursor has one
offset for each partition, so a page neither repeats nor leaves out a record of a partition, however
its clocks went.
"""

import base64
import binascii
import struct
from typing import Final

from msgspec import DecodeError, Struct, field, json

from holdfast.api.nodes.whole_log import ABSENT, LogSource
from holdfast.api.views.pages import BadCursor
from holdfast.api.views.payloads import Content, content_of
from holdfast.log.batch import Batch
from holdfast.log.kinds import KIND_NAMES
from holdfast.log.record import (
    CURSOR,
    FLAG_PRODUCER,
    FLAG_QOS_MASK,
    FLAG_RETAIN,
    MESSAGE,
    RETAINED,
    Record,
)
from holdfast.node.session.state import decode_cursor
from holdfast.protocol.topics.names import matches

SCAN_BYTES_MAX: Final = 32 << 20
"""The most bytes of batches that one request reads."""
READ_BYTES: Final = 1 << 20
"""The bytes of one read. Reads of clients that are behind come in between."""
WINDOW: Final = 500
"""The records of a partition that are read at a time when conditions choose among them."""

_POSITIONS: Final = json.Decoder(list[int])


class LogRecord(Struct, kw_only=True):
    """A record of the log."""

    partition: int
    offset: int
    at_us: int
    """Time at which its node took it, in microseconds since 1970."""
    kind: str
    topic: str = ""
    client: str = ""
    """The publisher, or the session that the record is about."""
    qos: int = 0
    retain: bool = False
    producer: str = ""
    sequence: int = 0
    content: Content
    cursor: str = ""
    """The positions and packet ids of a cursor record."""


class LogPage(Struct):
    """A page of records."""

    records: list[LogRecord]
    next: str
    """The cursor behind the page; with `newest`, of older records. Empty at the end of the log."""
    scanned: int
    """The records that were read for the page."""


class RecordQuery(Struct):
    """The choice of records. An empty condition admits all."""

    start: list[int]
    """Per partition, the offset at which the page begins: the first, or, with `newest`, the end."""
    bounds: list[int]
    """Per partition, the offset at which the scan ends: the end, or, with `newest`, the first."""
    limit: int
    newest: bool
    kind: int = 0
    filter: str = ""
    clients: frozenset[bytes] = frozenset()
    bytes_max: int = 200
    part: bytes = b""
    """A part of the payload."""
    generation: int = 0
    """The generation of the log, for the cursor of the page."""


def log_record(record: Record, bytes_max: int) -> LogRecord:
    """A record as JSON, with at most `bytes_max` bytes of its payload."""
    is_message = record.kind in (MESSAGE, RETAINED)
    found = LogRecord(
        partition=record.partition,
        offset=record.offset,
        at_us=record.timestamp_us,
        kind=KIND_NAMES.get(record.kind, str(record.kind)),
        topic=record.topic.decode("utf-8", "replace"),
        client=record.client_id.decode("utf-8", "replace"),
        content=content_of(record.payload, record.properties if is_message else b"", bytes_max),
    )
    if is_message:
        found.qos = record.flags & FLAG_QOS_MASK
        found.retain = bool(record.flags & FLAG_RETAIN)
    if record.flags & FLAG_PRODUCER:
        found.producer = record.producer.decode("utf-8", "replace")
        found.sequence = record.sequence
    if record.kind == CURSOR:
        found.content = Content(bytes=len(record.payload))
        found.cursor = _cursor_text(record.payload)
    return found


def _cursor_text(payload: bytes) -> str:
    try:
        cursor = decode_cursor(payload)
    except struct.error:
        return ""
    parts = [f"{partition}/{offset}" for partition, offset in cursor.positions]
    parts += [
        f"packet={number}:" + ("free" if entry is None else f"{entry.partition}/{entry.offset}")
        for number, entry in cursor.inflight
    ]
    parts += [f"finished={place[0]}/{place[1]}" for place in cursor.done]
    return " ".join([*parts, "moved"] if cursor.is_move else parts)


def encode_positions(positions: list[int], generation: int) -> str:
    """The cursor of a page: its positions, then the generation of the log unless that is 0."""
    numbers = [*positions, generation] if generation else positions
    return base64.urlsafe_b64encode(json.encode(numbers)).decode().rstrip("=")


def decode_positions(text: str, partitions: int, generation: int) -> list[int] | None:
    """The positions of a cursor, or None if it is of another generation of the log. Raises
    `BadCursor`."""
    try:
        positions = _POSITIONS.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, binascii.Error, DecodeError) as error:
        raise BadCursor("a cursor is the `next` of an earlier page") from error
    if len(positions) not in (partitions, partitions + 1) or min(positions) < 0:
        raise BadCursor(f"a cursor of this log has {partitions} offsets")
    is_own = positions[partitions:] == ([generation] if generation else [])
    return positions[:partitions] if is_own else None


class RecordWindow(Struct):
    """The records of one partition that were read at once."""

    records: list[Record]
    position: int
    """Offset at which the partition's next window begins, or, with `newest`, ends."""
    size_bytes: int


def read_window(
    reader: LogSource, partition: int, start: int, end: int, count: int
) -> RecordWindow:
    """Reads about `count` records from `start`, at least one if there is any. Runs in a thread."""
    stop = min(end, start + count)
    batches = reader.read_batches(partition, start, stop, READ_BYTES)
    records = _records(batches, start, stop)
    last = Batch(batches[-1], check=False).end_offset if batches else stop
    return RecordWindow(records, min(stop, max(last, start + 1)), sum(map(len, batches)))


def read_window_back(
    reader: LogSource, partition: int, end: int, first: int, count: int
) -> RecordWindow:
    """Reads about `count` records before `end`, at least one if there is any. Runs in a thread."""
    size_bytes = 0
    while True:
        start = max(first, end - count)
        batches = reader.read_batches(partition, start, end, READ_BYTES)
        size_bytes += sum(map(len, batches))
        reached = Batch(batches[-1], check=False).end_offset if batches else start
        if reached >= end or count == 1:
            return RecordWindow(_records(batches, start, end), start, size_bytes)
        # The window has more bytes than one read, or a gap at its end.
        count = max(1, count // 8)


def _records(batches: list[bytes], start: int, end: int) -> list[Record]:
    found: list[Record] = []
    for data in batches:
        batch = Batch(data, check=False)
        first = max(0, start - batch.base_offset)
        last = min(batch.count, end - batch.base_offset)
        found += [batch.record(index) for index in range(first, last)]
    # A lake does not have them.
    return [each for each in found if each.kind != ABSENT]


class RecordScan(Struct):
    """The scan for one page. `step` runs in a thread and reads at most one window."""

    reader: LogSource
    query: RecordQuery
    positions: list[int] = field(default_factory=list)
    found: list[Record] = field(default_factory=list)
    scanned: int = 0
    size_bytes: int = 0
    _round: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.positions = list(self.query.start)

    def is_done(self) -> bool:
        """Whether the page is full, the log at its end, or the budget spent."""
        if self._round:
            return False
        return (
            len(self.found) >= self.query.limit
            or self.size_bytes >= SCAN_BYTES_MAX
            or not self._open()
        )

    def _open(self) -> list[int]:
        bounds = self.query.bounds
        return [
            partition
            for partition, position in enumerate(self.positions)
            if (position > bounds[partition] if self.query.newest else position < bounds[partition])
        ]

    def step(self) -> None:
        """Reads the next window of one partition. All partitions have their turn in each round."""
        if not self._round:
            self._round = self._open()
        partition = self._round.pop()
        query = self.query
        position, bound = self.positions[partition], query.bounds[partition]
        # Most records are messages, so their kind alone is no reason to read many more.
        is_rare = query.kind not in (0, MESSAGE) or query.filter or query.clients or query.part
        count = WINDOW if is_rare else query.limit
        if query.newest:
            window = read_window_back(self.reader, partition, position, bound, count)
        else:
            window = read_window(self.reader, partition, position, bound, count)
        self.positions[partition] = window.position
        self.size_bytes += window.size_bytes
        self.scanned += len(window.records)
        self.found += [record for record in window.records if self._is_chosen(record)]

    def _is_chosen(self, record: Record) -> bool:
        query = self.query
        if query.kind and record.kind != query.kind:
            return False
        if query.clients and record.client_id not in query.clients:
            return False
        if query.part and query.part not in record.payload:
            return False
        if query.filter:
            if record.kind not in (MESSAGE, RETAINED):
                return False
            return matches(query.filter, record.topic.decode("utf-8", "replace"))
        return True

    def page(self) -> LogPage:
        """The page: of each partition, the records up to the first one that has no room."""
        newest, limit = self.query.newest, self.query.limit
        self.found.sort(key=_order, reverse=newest)
        shown, rest = self.found[:limit], self.found[limit:]
        for record in rest:
            # Records of later rounds are never behind the positions of earlier ones.
            position = self.positions[record.partition]
            if newest:
                self.positions[record.partition] = max(position, record.offset + 1)
            else:
                self.positions[record.partition] = min(position, record.offset)
        following = encode_positions(self.positions, self.query.generation) if self._open() else ""
        rows = [log_record(record, self.query.bytes_max) for record in shown]
        return LogPage(rows, following, self.scanned)


def _order(record: Record) -> tuple[int, int, int]:
    return record.timestamp_us, record.partition, record.offset
