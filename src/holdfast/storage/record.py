"""Record batches: the one layout that lies on disk, crosses the wire and reaches Spark.

A batch is the unit of append, checksum and replication. All integers are little-endian::

    header, 48 bytes
       0  magic              4s   b"HFLB"
       4  length             u32  whole batch in bytes: header, heads, body, padding
       8  crc                u32  CRC-32 (zlib) of bytes 12 to length
      12  format             u8   1
      13  attributes         u8   ATTRIBUTE_STATE: recovery must apply some record in here;
                                  ATTRIBUTE_RESET, ATTRIBUTE_GROUPED, ATTRIBUTE_MORE: see these
      14  partition          u16
      16  base_offset        u64  offset of the first record; the others follow densely
      24  epoch              u32  leadership term under which the batch was appended
      28  count              u32
      32  base_timestamp_us  i64  wall clock, microseconds since 1970 UTC
      40  body_bytes         u32  without the padding
      44  group              u32  with ATTRIBUTE_GROUPED: the journal's tag, plus the bytes of
                                  the write group in front of this batch, modulo 2**32; else 0
    heads, count * 40 bytes: one fixed-size head a record (see HEAD)
    body: per record topic, client id, producer id, properties, payload, in that order, and with
        FLAG_AUDIENCE an audience, which ends where the next record begins
    zero padding to a multiple of 8

The heads lie together so that numpy reads them as one structured array
(`np.frombuffer(batch, HEAD_DTYPE, count, 48)`) and a record is found by its index without
walking the ones before it.
"""

import struct
from typing import Final
from zlib import crc32

MAGIC: Final = b"HFLB"
FORMAT: Final = 1
HEADER: Final = struct.Struct("<4sIIBBHQIIqII")
HEADER_BYTES: Final = 48
# body_start, topic_len, client_id_len, producer_len, kind, flags, properties_len, payload_len,
# timestamp_delta_us, producer_epoch, ticket, sequence
HEAD: Final = struct.Struct("<IHHHBBIIIIIQ")
HEAD_BYTES: Final = 40
_pack_head: Final = HEAD.pack
# The fields of a head for an index: body_start, topic_len, kind, timestamp_delta_us.
_HEAD_SUMMARY: Final = struct.Struct("<IH4xB9xI16x")
# The fields that the application of a record reads first: kind, flags, ticket.
_HEAD_APPLY: Final = struct.Struct("<10xBB16xI8x")
# body_start, topic_len, client_id_len.
_HEAD_CLIENT: Final = struct.Struct("<IHH32x")
# The same layout for numpy; a tuple list so that this module needs no numpy.
HEAD_FIELDS: Final = [
    ("body_start", "<u4"),
    ("topic_len", "<u2"),
    ("client_id_len", "<u2"),
    ("producer_len", "<u2"),
    ("kind", "u1"),
    ("flags", "u1"),
    ("properties_len", "<u4"),
    ("payload_len", "<u4"),
    ("timestamp_delta_us", "<u4"),
    ("producer_epoch", "<u4"),
    ("ticket", "<u4"),
    ("sequence", "<u8"),
]

ATTRIBUTE_STATE: Final = 0x01
ATTRIBUTE_RESET: Final = 0x02
"""A mark without records in a replica's journal: the partition restarts at `base_offset`, and
earlier batches of it are void. The mark never leaves the node."""
ATTRIBUTE_GROUPED: Final = 0x04
"""`group` has the batch's position in its write group. Batches of replicas and rewritten batches do
not have the attribute."""
ATTRIBUTE_MORE: Final = 0x08
"""The next batch belongs to the same write group. This one counts only together with it."""
GROUP_MASK: Final = (1 << 32) - 1

MESSAGE: Final = 1
"""A published message; with FLAG_RETAIN it also sets (or, empty, clears) its retained topic."""
RETAINED: Final = 2
"""Sets or clears a retained topic without being a message (a QoS 0 publish that is not logged)."""
SESSION: Final = 3
"""A session opened, changed its subscriptions, disconnected or ended (payload: JSON)."""
CURSOR: Final = 4
"""A session's or shared group's read positions and inflight packet ids (payload: packed)."""
RELEASE: Final = 5
"""An inbound QoS 2 packet id is free again (client id, sequence = packet id)."""
WILL: Final = 6
"""A will was fired or dropped (client id)."""
CONTROL: Final = 7
"""A record about the log itself; readers that do not know it skip it."""
PRODUCER: Final = 8
"""A producer id is bound to a user (producer, client id = user name; empty: unbound)."""
BAN: Final = 9
"""A ban (client id: scope and name; payload: JSON); without a payload: it is lifted."""

DELAYED: Final = 10
"""The delayed message at offset `sequence` of the partition is over without a publication."""

FLAG_QOS_MASK: Final = 0x03
FLAG_RETAIN: Final = 0x04
FLAG_PACKET_ID: Final = 0x08
"""`sequence` is the QoS 2 packet id under which `client_id` sent the message."""
FLAG_PRODUCER: Final = 0x10
"""`producer`, `producer_epoch` and `sequence` identify the message at its producer."""
FLAG_WILL: Final = 0x20
"""The message is the will of `client_id` for its session epoch `sequence`."""
FLAG_AUDIENCE: Final = 0x40
"""The message is not for all subscribers; `audience` defines for which, see session.audience.
Readers that know no audiences treat it as a message for all."""

FLAG_DELAYED: Final = 0x80
"""The message waits for its time, or with another topic than `$delayed/...` is the publication of
the one at offset `sequence`: see broker.publish.delayed_table."""

STATE_FLAGS: Final = FLAG_RETAIN | FLAG_PACKET_ID | FLAG_PRODUCER | FLAG_WILL | FLAG_DELAYED
"""The flags of messages that recovery must apply."""

DELTA_US_MAX: Final = (1 << 32) - 1
BATCH_BYTES_MAX: Final = 1 << 30
"""The most bytes of a batch, far above what is written (one packet is at most 256 MiB)."""


class CorruptBatch(Exception):
    """The bytes at a position are not a complete, valid batch. The text gives the reason."""


class Record:
    """One record, to be appended or read from the log. `topic` is UTF-8. `properties`: as the
    publisher sent them, encoded, without length prefix and topic alias."""

    def __init__(
        self,
        partition: int,
        kind: int,
        flags: int = 0,
        timestamp_us: int = 0,
        topic: bytes = b"",
        client_id: bytes = b"",
        properties: bytes = b"",
        payload: bytes = b"",
        *,
        producer: bytes = b"",
        producer_epoch: int = 0,
        sequence: int = 0,
        ticket: int = 0,
        offset: int = -1,
        audience: bytes = b"",
    ) -> None:
        self.partition = partition
        self.kind = kind
        self.flags = flags
        self.timestamp_us = timestamp_us
        self.topic = topic
        self.client_id = client_id
        self.producer = producer
        self.producer_epoch = producer_epoch
        self.sequence = sequence
        self.properties = properties
        self.payload = payload
        # It is set with FLAG_AUDIENCE only.
        self.audience = audience
        # The number by which the client's node recognises its record; 0: none.
        self.ticket = ticket
        # The offset, set by the append; -1 before.
        self.offset = offset

    def is_state(self) -> bool:
        """True if recovery must apply the record."""
        if self.kind == MESSAGE:
            return self.flags & STATE_FLAGS != 0
        return self.kind != CONTROL


def _delta_us(timestamp_us: int, base_us: int) -> int:
    """The difference for the 32 bits of a head; a clock that steps back counts as no step."""
    delta = timestamp_us - base_us
    if delta < 0:
        return 0
    return delta if delta <= DELTA_US_MAX else DELTA_US_MAX


class BatchBuilder:
    """Collects records of one partition until they are written as one batch."""

    def __init__(self, partition: int, base_offset: int) -> None:
        self.partition = partition
        self.base_offset = base_offset
        # The epoch under which the batch was opened; `build` takes it as an argument.
        self.epoch = 0
        self.base_timestamp_us = 0
        # Of the newest record.
        self.last_delta_us = 0
        self.attributes = 0
        self.count = 0
        self.body_bytes = 0
        # The topic of each record; b"" for one that is not a message.
        self.topics: list[bytes] = []
        self._heads: list[bytes] = []
        self._body: list[bytes] = []

    def add(self, record: Record) -> int:
        """Add a record, set its offset and return it. The caller keeps a batch below
        BATCH_BYTES_MAX and closes it within an hour (`timestamp_delta_us` has 32 bits)."""
        if self.count == 0:
            self.base_timestamp_us = record.timestamp_us
        delta = record.timestamp_us - self.base_timestamp_us
        if not 0 <= delta <= DELTA_US_MAX:
            delta = _delta_us(record.timestamp_us, self.base_timestamp_us)
        if delta > self.last_delta_us:
            self.last_delta_us = delta
        kind = record.kind
        flags = record.flags
        if (kind != MESSAGE or flags & STATE_FLAGS) and kind != CONTROL:
            self.attributes |= ATTRIBUTE_STATE
        topic = record.topic
        client_id = record.client_id
        producer = record.producer
        properties = record.properties
        payload = record.payload
        topic_len = len(topic)
        client_id_len = len(client_id)
        producer_len = len(producer)
        properties_len = len(properties)
        payload_len = len(payload)
        body_bytes = self.body_bytes
        self._heads.append(
            _pack_head(
                body_bytes,
                topic_len,
                client_id_len,
                producer_len,
                kind,
                flags,
                properties_len,
                payload_len,
                delta,
                record.producer_epoch,
                record.ticket,
                record.sequence,
            )
        )
        body = self._body
        body.append(topic)
        body.append(client_id)
        if producer_len:
            body.append(producer)
        if properties_len:
            body.append(properties)
        body.append(payload)
        self.topics.append(topic if kind == MESSAGE else b"")
        self.body_bytes = (
            body_bytes + topic_len + client_id_len + producer_len + properties_len + payload_len
        )
        if flags & FLAG_AUDIENCE:
            body.append(record.audience)
            self.body_bytes += len(record.audience)
        offset = self.base_offset + self.count
        self.count += 1
        record.offset = offset
        return offset

    def move_last(self, record: Record) -> "BatchBuilder":
        """Move the newest record to a builder of its own, with the same offset, and return that."""
        moved = BatchBuilder(self.partition, self.base_offset + self.count - 1)
        moved.epoch = self.epoch
        moved.add(record)
        self._heads.pop()
        self.topics.pop()
        self.count -= 1
        self.body_bytes -= moved.body_bytes
        del self._body[-len(moved._body) :]
        self.attributes = 0
        self.last_delta_us = 0
        for heads in self._heads:
            for fields in HEAD.iter_unpack(heads):
                kind: int = fields[4]
                flags: int = fields[5]
                delta_us: int = fields[8]
                if (kind != MESSAGE or flags & STATE_FLAGS) and kind != CONTROL:
                    self.attributes |= ATTRIBUTE_STATE
                self.last_delta_us = max(self.last_delta_us, delta_us)
        return moved

    def extend(self, batch: "Batch") -> int:
        """Add the records of another batch unchanged, and return the offset of the first."""
        heads = batch.start + HEADER_BYTES
        body = heads + batch.count * HEAD_BYTES
        if self.count == 0:
            self.base_timestamp_us = batch.base_timestamp_us
            self._heads.append(batch.data[heads:body])
        else:
            self._add_moved_heads(batch)
        self._body.append(batch.data[body : body + batch.body_bytes])
        topics, newest_us = batch.topics()
        newest_us = _delta_us(batch.base_timestamp_us + newest_us, self.base_timestamp_us)
        if newest_us > self.last_delta_us:
            self.last_delta_us = newest_us
        self.attributes |= batch.attributes & ATTRIBUTE_STATE
        self.topics.extend(topics)
        self.body_bytes += batch.body_bytes
        offset = self.base_offset + self.count
        self.count += batch.count
        return offset

    def _add_moved_heads(self, batch: "Batch") -> None:
        """Add the heads, with positions and times relative to this batch."""
        moved_by = self.body_bytes
        later_by = batch.base_timestamp_us - self.base_timestamp_us
        heads = memoryview(batch.data)[batch.start + HEADER_BYTES :]
        for fields in HEAD.iter_unpack(heads[: batch.count * HEAD_BYTES]):
            body_start: int = fields[0]
            delta_us: int = fields[8]
            self._heads.append(
                _pack_head(
                    body_start + moved_by,
                    *fields[1:8],
                    _delta_us(delta_us + later_by, 0),
                    *fields[9:],
                )
            )

    @property
    def size_bytes(self) -> int:
        """The bytes of the batch if it were built now."""
        return (HEADER_BYTES + self.count * HEAD_BYTES + self.body_bytes + 7) & ~7

    def build(self, epoch: int, group: int = 0, attributes: int = 0) -> bytes:
        """The encoded batch. `group` and `attributes` are those of a batch in a write group."""
        length = self.size_bytes
        padding = length - HEADER_BYTES - self.count * HEAD_BYTES - self.body_bytes
        header = HEADER.pack(
            MAGIC,
            length,
            0,
            FORMAT,
            self.attributes | attributes,
            self.partition,
            self.base_offset,
            epoch,
            self.count,
            self.base_timestamp_us,
            self.body_bytes,
            group,
        )
        rest = b"".join([header[12:], *self._heads, *self._body, bytes(padding)])
        return b"".join([header[:8], crc32(rest).to_bytes(4, "little"), rest])

    def parsed(self, data: bytes) -> "Batch":
        """The Batch of the bytes that `build` returned, without parsing them again."""
        batch = Batch(data, check=False)
        batch.set_topics(self.topics, self.last_delta_us)
        return batch


class Batch:
    """A parsed header over bytes that hold one whole batch at `start`."""

    def __init__(self, data: bytes, start: int = 0, *, check: bool = True) -> None:
        """Parse the header and, unless `check` is false, the checksum. Raises `CorruptBatch`."""
        if len(data) - start < HEADER_BYTES:
            raise CorruptBatch(f"{len(data) - start} bytes left, a header has {HEADER_BYTES}")
        fields = HEADER.unpack_from(data, start)
        self.length: int = fields[1]
        self.attributes: int = fields[4]
        self.partition: int = fields[5]
        self.base_offset: int = fields[6]
        self.epoch: int = fields[7]
        self.count: int = fields[8]
        self.base_timestamp_us: int = fields[9]
        self.body_bytes: int = fields[10]
        self.group: int = fields[11]
        self.start = start
        self.data = data
        self._topics: list[bytes] | None = None
        self._newest_us = 0
        if fields[0] != MAGIC:
            raise CorruptBatch(f"no batch magic, found {fields[0]!r}")
        if fields[3] != FORMAT:
            raise CorruptBatch(f"batch format {fields[3]}, this program reads {FORMAT}")
        smallest = HEADER_BYTES + self.count * HEAD_BYTES + self.body_bytes
        if self.length > BATCH_BYTES_MAX or self.length != (smallest + 7) & ~7:
            raise CorruptBatch(f"length {self.length} does not fit its {self.count} records")
        if len(data) - start < self.length:
            raise CorruptBatch(f"{len(data) - start} bytes left of a batch of {self.length}")
        if check:
            found = crc32(memoryview(data)[start + 12 : start + self.length])
            if found != fields[2]:
                raise CorruptBatch(f"checksum {found:08x}, header says {fields[2]:08x}")

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.count

    @property
    def size_bytes(self) -> int:
        return self.length

    def content(self) -> bytes:
        """The bytes of the batch alone, as written."""
        return self.data[self.start : self.start + self.length]

    def record(self, index: int) -> Record:
        """The record at `index` of this batch."""
        data = self.data
        (
            body_start,
            topic_len,
            client_id_len,
            producer_len,
            kind,
            flags,
            properties_len,
            payload_len,
            delta,
            producer_epoch,
            ticket,
            sequence,
        ) = HEAD.unpack_from(data, self.start + HEADER_BYTES + index * HEAD_BYTES)
        a = self.start + HEADER_BYTES + self.count * HEAD_BYTES + body_start
        b = a + topic_len
        c = b + client_id_len
        d = c + producer_len
        e = d + properties_len
        f = e + payload_len
        return Record(
            self.partition,
            kind,
            flags,
            self.base_timestamp_us + delta,
            data[a:b],
            data[b:c],
            data[d:e] if properties_len else b"",
            data[e:f],
            producer=data[c:d] if producer_len else b"",
            producer_epoch=producer_epoch,
            sequence=sequence,
            ticket=ticket,
            offset=self.base_offset + index,
            audience=data[f : self._body_end(index)] if flags & FLAG_AUDIENCE else b"",
        )

    def _body_end(self, index: int) -> int:
        """The end of the body of the record at `index`."""
        heads = self.start + HEADER_BYTES
        body: int = heads + self.count * HEAD_BYTES
        if index + 1 == self.count:
            return body + self.body_bytes
        next_start: int = _HEAD_SUMMARY.unpack_from(self.data, heads + (index + 1) * HEAD_BYTES)[0]
        return body + next_start

    def topic(self, index: int) -> bytes:
        """The topic of the record at `index`; b"" if it is not a message."""
        body_start, topic_len, kind, _ = _HEAD_SUMMARY.unpack_from(
            self.data, self.start + HEADER_BYTES + index * HEAD_BYTES
        )
        if kind != MESSAGE:
            return b""
        start: int = self.start + HEADER_BYTES + self.count * HEAD_BYTES + body_start
        return self.data[start : start + topic_len]

    def topics(self) -> tuple[list[bytes], int]:
        """The topic of each record (b"": no message), and the newest's µs after the first."""
        known = self._topics
        if known is not None:
            return known, self._newest_us
        data = self.data
        heads = self.start + HEADER_BYTES
        body = heads + self.count * HEAD_BYTES
        newest_us = 0
        topics: list[bytes] = []
        for body_start, topic_len, kind, delta_us in _HEAD_SUMMARY.iter_unpack(
            memoryview(data)[heads:body]
        ):
            if delta_us > newest_us:
                newest_us = delta_us
            if kind == MESSAGE:
                start = body + body_start
                topics.append(data[start : start + topic_len])
            else:
                topics.append(b"")
        self._topics = topics
        self._newest_us = newest_us
        return topics, newest_us

    def set_topics(self, topics: list[bytes], newest_us: int) -> None:
        """Set the result of `topics`, which the builder knows already."""
        self._topics = topics
        self._newest_us = newest_us

    def client_id(self, index: int) -> bytes:
        """The client id of the record at `index`."""
        heads = self.start + HEADER_BYTES
        body_start, topic_len, length = _HEAD_CLIENT.unpack_from(
            self.data, heads + index * HEAD_BYTES
        )
        start: int = heads + self.count * HEAD_BYTES + body_start + topic_len
        return self.data[start : start + length]

    def heads(self) -> list[tuple[int, int, int]]:
        """Kind, flags and ticket of each record."""
        start = self.start + HEADER_BYTES
        return list(
            _HEAD_APPLY.iter_unpack(memoryview(self.data)[start : start + self.count * HEAD_BYTES])
        )

    def tickets(self) -> list[int]:
        """The ticket of each record; 0: it has none."""
        heads = memoryview(self.data)[self.start + HEADER_BYTES :]
        return [fields[10] for fields in HEAD.iter_unpack(heads[: self.count * HEAD_BYTES])]

    def records(self) -> list[Record]:
        """All records of the batch."""
        return [self.record(index) for index in range(self.count)]
