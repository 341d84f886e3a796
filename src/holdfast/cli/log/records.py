"""Selects and formats the records that `holdfast log dump` and `tail` print.

A text line never contains a control character of a topic, client id or payload. Otherwise a
stranger's message could control the terminal of the reader.

Reads the journal of a cluster's replica from outside: valid and committed records.

Truncated records are recognised in the same way as by the node when it opens the directory. Only
records below its checkpoint of the high watermarks are shown, which a node writes about once a
second.
"""

import argparse
import base64
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from holdfast.client.log.messages import LogMessage
from holdfast.log.batch import ATTRIBUTE_RESET, Batch
from holdfast.log.files.layout import DataDirectory
from holdfast.log.journal.recovery import OpenedJournal, open_journal, replay
from holdfast.log.journal.segment_list import claims
from holdfast.log.journal.watermarks import Checkpoint
from holdfast.log.kinds import KIND_NAMES
from holdfast.log.reading.cursor import LogReader
from holdfast.log.reading.segment_reader import Damage, SegmentReader
from holdfast.log.record import (
    CURSOR,
    FLAG_AUDIENCE,
    FLAG_PACKET_ID,
    FLAG_PRODUCER,
    FLAG_QOS_MASK,
    FLAG_RETAIN,
    FLAG_WILL,
    MESSAGE,
    RELEASE,
    RETAINED,
    WILL,
    Record,
)
from holdfast.node.session.audience import Audience, decode_audience, user_in
from holdfast.node.session.state import decode_cursor
from holdfast.protocol.topics.names import InvalidFilter, check_filter, is_shared, matches

UNCOMMITTED_BYTES_MAX: Final = 64 << 20
"""The most uncommitted bytes read per partition.

A leader without replicas stops accepting records long before that.
"""


SHOWN_CHARACTERS_MAX: Final = 200
"""The most characters of a payload in a text line; `--full` shows all."""
KINDS: Final = {name: kind for kind, name in KIND_NAMES.items()}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Bound:
    """An offset or a time. Both None: no bound."""

    offset: int | None = None
    time_us: int | None = None


@dataclass(frozen=True)
class Selection:
    """The conditions on the records to show. An empty condition admits all."""

    partitions: frozenset[int] = frozenset()
    filters: tuple[str, ...] = ()
    kinds: frozenset[int] = frozenset()
    start: Bound = field(default_factory=Bound)
    end: Bound = field(default_factory=Bound)
    """The end, which is not included."""

    def records(self, batch: Batch) -> list[Record]:
        """Returns the chosen records of a batch, in order."""
        if self.partitions and batch.partition not in self.partitions:
            return []
        first = 0
        last = batch.count
        if self.start.offset is not None:
            first = max(first, self.start.offset - batch.base_offset)
        if self.end.offset is not None:
            last = min(last, self.end.offset - batch.base_offset)
        records = [batch.record(index) for index in range(first, last)]
        return [record for record in records if self._has(record)]

    def has(self, record: Record) -> bool:
        """Returns whether a record is chosen."""
        if self.partitions and record.partition not in self.partitions:
            return False
        if self.start.offset is not None and record.offset < self.start.offset:
            return False
        if self.end.offset is not None and record.offset >= self.end.offset:
            return False
        return self._has(record)

    def _has(self, record: Record) -> bool:
        if self.kinds and record.kind not in self.kinds:
            return False
        if self.start.time_us is not None and record.timestamp_us < self.start.time_us:
            return False
        if self.end.time_us is not None and record.timestamp_us >= self.end.time_us:
            return False
        if self.filters:
            if record.kind not in (MESSAGE, RETAINED):
                return False
            topic = record.topic.decode("utf-8", "replace")
            return any(matches(filter, topic) for filter in self.filters)
        return True


def record_of(message: LogMessage) -> Record:
    """Returns a message of a log client as the record that it was."""
    flags = message.qos | (FLAG_RETAIN if message.retain else 0)
    name, epoch, sequence = message.producer or ("", 0, 0)
    return Record(
        message.partition,
        MESSAGE,
        flags | (FLAG_PRODUCER if message.producer is not None else 0),
        message.timestamp_us,
        message.topic.encode(),
        message.client_id.encode(),
        message.encoded_properties,
        message.payload,
        producer=name.encode(),
        producer_epoch=epoch,
        sequence=sequence,
        offset=message.offset,
    )


def parse_bound(text: str) -> Bound:
    """Parses an offset, or a time in ISO 8601, which is local without a zone. For argparse."""
    if text.isdecimal():
        return Bound(offset=int(text))
    try:
        when = datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither an offset nor a time like 2026-01-31T12:00:00Z"
        ) from None
    return Bound(time_us=int((when - _EPOCH).total_seconds() * 1_000_000))


def parse_filter(text: str) -> str:
    """Parses a topic filter. For argparse."""
    try:
        check_filter(text)
    except InvalidFilter as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if is_shared(text):
        raise argparse.ArgumentTypeError(f"give the filter of {text!r} without its group")
    return text


def time_text(timestamp_us: int) -> str:
    """Formats a time in ISO 8601, UTC, with microseconds."""
    try:
        seconds, rest_us = divmod(timestamp_us, 1_000_000)
        when = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{timestamp_us}us"
    return f"{when:%Y-%m-%dT%H:%M:%S}.{rest_us:06}Z"


def text_line(record: Record, *, full: bool = False) -> str:
    """Formats a record as one line: time, offset, kind, topic and client, then the payload."""
    parts = [
        time_text(record.timestamp_us),
        f"{record.partition}/{record.offset}",
        KIND_NAMES.get(record.kind, f"kind-{record.kind}"),
    ]
    if record.kind in (MESSAGE, RETAINED):
        parts.append(f"q{record.flags & FLAG_QOS_MASK}{'r' if record.flags & FLAG_RETAIN else ''}")
        parts.append(_printable(record.topic))
    if record.client_id:
        parts.append(f"client={_printable(record.client_id)}")
    if record.flags & FLAG_PRODUCER:
        producer = _printable(record.producer)
        parts.append(f"producer={producer}:{record.producer_epoch}:{record.sequence}")
    elif record.flags & FLAG_PACKET_ID or record.kind == RELEASE:
        parts.append(f"packet={record.sequence}")
    elif record.flags & FLAG_WILL or record.kind == WILL:
        parts.append(f"will-epoch={record.sequence}")
    if record.properties:
        parts.append(f"properties={record.properties.hex()}")
    audience = _audience(record)
    if user_in(record.audience):
        parts.append(f"user={_printable(user_in(record.audience))}")
    elif audience is not None:
        names = [*(["plain"] if audience.is_plain else []), *sorted(audience.groups)]
        parts.append(f"for={_escaped(','.join(names) or 'nobody')}")
    payload = _payload_text(record)
    if len(payload) > SHOWN_CHARACTERS_MAX and not full:
        payload = f"{payload[:SHOWN_CHARACTERS_MAX]}... ({len(record.payload)} bytes)"
    parts.append(payload)
    return " ".join(parts).rstrip()


def json_line(record: Record) -> str:
    """Formats a record as a JSON object with all its fields.

    Bytes that are not UTF-8 are in base64, under a name that says so.
    """
    fields: dict[str, object] = {
        "partition": record.partition,
        "offset": record.offset,
        "time": time_text(record.timestamp_us),
        "timestamp_us": record.timestamp_us,
        "kind": KIND_NAMES.get(record.kind, record.kind),
    }
    if record.kind in (MESSAGE, RETAINED):
        fields["qos"] = record.flags & FLAG_QOS_MASK
        fields["retain"] = bool(record.flags & FLAG_RETAIN)
    fields["flags"] = record.flags
    _put_bytes(fields, "topic", record.topic)
    _put_bytes(fields, "client", record.client_id)
    if record.flags & FLAG_PRODUCER:
        _put_bytes(fields, "producer", record.producer)
        fields["producer_epoch"] = record.producer_epoch
    elif record.flags & FLAG_PACKET_ID and record.producer:
        _put_bytes(fields, "life", record.producer)
    if record.sequence or record.flags & (FLAG_PRODUCER | FLAG_PACKET_ID | FLAG_WILL):
        fields["sequence"] = record.sequence
    if record.properties:
        fields["properties_base64"] = base64.b64encode(record.properties).decode()
    audience = _audience(record)
    if user_in(record.audience):
        _put_bytes(fields, "user", user_in(record.audience))
    elif audience is not None:
        fields["audience"] = {"plain": audience.is_plain, "groups": sorted(audience.groups)}
    cursor = _cursor_text(record.payload) if record.kind == CURSOR else None
    if cursor is not None:
        fields["cursor"] = cursor
    else:
        _put_bytes(fields, "payload", record.payload)
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def _put_bytes(fields: dict[str, object], name: str, value: bytes) -> None:
    if not value and name != "payload":
        return
    try:
        fields[name] = value.decode()
    except UnicodeDecodeError:
        fields[f"{name}_base64"] = base64.b64encode(value).decode()


def _audience(record: Record) -> Audience | None:
    """Returns the record's audience. None: all clients, or it cannot be read."""
    if not record.flags & FLAG_AUDIENCE:
        return None
    try:
        return decode_audience(record.audience)
    except ValueError:
        return None


def _payload_text(record: Record) -> str:
    if record.kind == CURSOR:
        cursor = _cursor_text(record.payload)
        if cursor is not None:
            return cursor
    try:
        text = record.payload.decode()
    except UnicodeDecodeError:
        return f"hex:{record.payload.hex()}"
    return _escaped(text)


def _cursor_text(payload: bytes) -> str | None:
    """Formats positions and changed packet ids, or returns None if it is no cursor."""
    try:
        cursor = decode_cursor(payload)
    except struct.error:
        return None
    parts = [f"{partition}/{offset}" for partition, offset in cursor.positions]
    parts += [
        f"packet={packet_id}:" + ("free" if entry is None else f"{entry.partition}/{entry.offset}")
        for packet_id, entry in cursor.inflight
    ]
    parts += [f"finished={partition}/{offset}" for partition, offset in cursor.done]
    return " ".join([*parts, "moved"] if cursor.is_move else parts)


def _printable(value: bytes) -> str:
    return _escaped(value.decode("utf-8", "backslashreplace"))


def _escaped(text: str) -> str:
    """Replaces control characters and other unprintable ones by backslash escapes."""
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        character
        if character.isprintable() and character != "\\"
        else character.encode("unicode_escape").decode()
        for character in text
    )


class ReplicaJournal:
    """Reads the committed records of a replica, and those that become committed."""

    def __init__(self, directory: DataDirectory, on_damage: Callable[[Damage], None]) -> None:
        """`on_damage`: called once for each damaged range."""
        self._directory = directory
        self._on_damage = on_damage
        self._told: set[tuple[int, int]] = set()
        self._opened = self._open()
        self._shown = list(self._opened.journal.high_watermark)
        """Per partition the end of the records that were returned."""
        self._epochs = [self._epoch_below(*each) for each in enumerate(self._shown)]
        """Per partition the newest epoch of these records. A partition may begin again at a lower
        offset. Records of this epoch or an older one are then the same as before, and those of a
        newer epoch are others."""
        self._resets: dict[int, tuple[int, int]] = {}
        """Per partition that began again: the segment and the position of the newest mark."""
        self._waiting: dict[int, list[Batch]] = {}
        """Per partition the batches that are not known to be committed."""

    def records(self) -> Iterator[Record]:
        """Yields all records in journal order. Raises `OSError`."""
        return replay(self._opened, limits=self._shown, state_only=False)

    def newest(self, count: int, selection: Selection) -> list[Record]:
        """Returns the newest chosen records, oldest first. Raises `OSError`.

        Segments are read from the last one back, until there are enough.
        """
        found: list[Record] = []
        for segment in reversed(self._opened.journal.segments):
            if len(found) >= count:
                break
            limits = [min(p) for p in zip(segment.end_offsets(), self._shown, strict=True)]
            here = [
                record
                for record in replay(
                    self._opened, segment.start_offsets(), limits=limits, state_only=False
                )
                if selection.has(record)
            ]
            found = here[max(0, len(here) - (count - len(found))) :] + found
        return found

    def reader(self) -> SegmentReader | None:
        """Returns the reader of later records, or None without segments.

        Raises `FileNotFoundError` if retention removed the last segment.
        """
        journal = self._opened.journal
        if not journal.segments:
            return None
        last = journal.segments[-1]
        reader = SegmentReader(self._directory, last.sequence)
        reader.position = last.size_bytes
        log = LogReader(journal, self._opened.store)
        for partition, end in enumerate(journal.next_offset):
            shown = self._shown[partition]
            batches = log.read_batches(partition, shown, end, UNCOMMITTED_BYTES_MAX)
            self._waiting[partition] = [Batch(data) for data in batches]
        return reader

    def add(self, batch: Batch, segment: int, position: int) -> None:
        """Adds the next batch of the files, which is at `position` of the segment. It replaces
        batches from its base offset on."""
        if batch.attributes & ATTRIBUTE_RESET:
            self._resets[batch.partition] = segment, position
        waiting = self._waiting.get(batch.partition, [])
        if batch.count:
            kept = [each for each in waiting if each.base_offset < batch.base_offset]
            self._waiting[batch.partition] = [*kept, batch]
        else:
            self._waiting.pop(batch.partition, None)

    def committed(self, checkpoint: Checkpoint) -> Iterator[Record]:
        """Yields the added records that are committed and were not yielded before.

        `checkpoint`: read before the last batch was added. A later one could commit a record that
        replaced an added one and was not read yet.
        """
        ends = claims(self._opened.journal.segments, checkpoint)
        for partition, place in self._resets.items():
            if place >= (checkpoint.segment, checkpoint.position):
                ends[partition] = 0
        for partition, waiting in self._waiting.items():
            end = ends[partition]
            for batch in waiting:
                is_newer = batch.epoch > self._epochs[partition]
                for record in batch.records():
                    if record.offset < end and (
                        is_newer or record.offset >= self._shown[partition]
                    ):
                        yield record
                        self._shown[partition] = record.offset + 1
                        self._epochs[partition] = max(self._epochs[partition], batch.epoch)
            self._waiting[partition] = [each for each in waiting if each.end_offset > end]

    def _epoch_below(self, partition: int, offset: int) -> int:
        """Returns the epoch of the last record below the offset, 0 if there is none."""
        journal = self._opened.journal
        epoch = journal.last_epoch(partition)
        while epoch:
            older, begin = journal.epoch_end(partition, epoch - 1)
            if begin < offset:
                break
            epoch = older
        return epoch

    def _open(self) -> OpenedJournal:
        opened = open_journal(self._directory, writes=False, on_damage=self._tell)
        for damage in opened.damage:
            self._tell(damage)
        return opened

    def _tell(self, damage: Damage) -> None:
        place = (damage.segment, damage.position)
        if place not in self._told:
            self._told.add(place)
            self._on_damage(damage)
