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

from holdfast.log.record import FLAG_AUDIENCE, MESSAGE, Record

MAGIC: Final = b"HFLB"
FORMAT: Final = 1
HEADER: Final = struct.Struct("<4sIIBBHQIIqII")
HEADER_BYTES: Final = 48
# body_start, topic_len, client_id_len, producer_len, kind, flags, properties_len, payload_len,
# timestamp_delta_us, producer_epoch, ticket, sequence
HEAD: Final = struct.Struct("<IHHHBBIIIIIQ")
HEAD_BYTES: Final = 40
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
earlier batches of it are void. The mark never leaves the node. If such batches were dropped from
the segment, `epoch` is the number of their records, so that sequences stay; else it is 0."""
ATTRIBUTE_GROUPED: Final = 0x04
"""`group` has the batch's position in its write group. Batches of replicas and rewritten batches do
not have the attribute."""
ATTRIBUTE_MORE: Final = 0x08
"""The next batch belongs to the same write group. This one counts only together with it."""
GROUP_MASK: Final = (1 << 32) - 1
DELTA_US_MAX: Final = (1 << 32) - 1
BATCH_BYTES_MAX: Final = 1 << 30
"""The most bytes of a batch, far above what is written (one packet is at most 256 MiB)."""


class CorruptBatch(Exception):
    """The bytes at a position are not a complete, valid batch. The text gives the reason."""


def header_damage(magic: bytes, length: int, layout: int, count: int, body_bytes: int) -> str:
    """The fault of the fields of a batch header; "" if they are consistent."""
    if magic != MAGIC:
        return f"no batch magic, found {magic!r}"
    if layout != FORMAT:
        return f"batch format {layout}, this program reads {FORMAT}"
    if length > BATCH_BYTES_MAX or length != batch_bytes(count, body_bytes):
        return f"length {length} does not fit its {count} records"
    return ""


def batch_bytes(count: int, body_bytes: int) -> int:
    """The bytes of a batch of `count` records: header, heads, body and padding."""
    return (HEADER_BYTES + count * HEAD_BYTES + body_bytes + 7) & ~7


class Batch:
    """A parsed header over bytes that hold one whole batch at `start`."""

    def __init__(self, data: bytes, start: int = 0, *, check: bool = True) -> None:
        """Parses the header and, unless `check` is false, the checksum. Raises `CorruptBatch`."""
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
        self.known: list[Record | None] | None = None
        """The records that are still in memory as they were appended; None: no record is."""
        damage = header_damage(fields[0], self.length, fields[3], self.count, self.body_bytes)
        if damage:
            raise CorruptBatch(damage)
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

    def record(self, index: int, topic: bytes | None = None) -> Record:
        """The record at `index` of this batch. `topic`: its topic, if the caller has it."""
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
            data[a:b] if topic is None else topic,
            data[b:c],
            data[d:e] if properties_len else b"",
            data[e:f],
            producer=data[c:d] if producer_len else b"",
            producer_epoch=producer_epoch,
            sequence=sequence,
            ticket=ticket,
            offset=self.base_offset + index,
            audience=data[f : self.body_end(index)] if flags & FLAG_AUDIENCE else b"",
        )

    def body_end(self, index: int) -> int:
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
        body = self.start + HEADER_BYTES + self.count * HEAD_BYTES
        newest_us = 0
        topics: list[bytes] = []
        for body_start, topic_len, kind, delta_us in _HEAD_SUMMARY.iter_unpack(self.raw_heads()):
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
        """Sets the result of `topics`, which the builder knows already."""
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

    def raw_heads(self) -> memoryview:
        """The encoded heads of all records (see HEAD)."""
        start = self.start + HEADER_BYTES
        return memoryview(self.data)[start : start + self.count * HEAD_BYTES]

    def heads(self) -> list[tuple[int, int, int]]:
        """Kind, flags and ticket of each record."""
        return list(_HEAD_APPLY.iter_unpack(self.raw_heads()))

    def tickets(self) -> list[int]:
        """The ticket of each record; 0: it has none."""
        return [fields[10] for fields in HEAD.iter_unpack(self.raw_heads())]

    def records(self) -> list[Record]:
        """All records of the batch."""
        return [self.record(index) for index in range(self.count)]
