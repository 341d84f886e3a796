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
# With these types compiled code computes with machine integers, and not with objects.
HeadFields = tuple[int, int, int, int, int, int, int, int, int, int, int, int]
_HeadSummary = tuple[int, int, int, int]
_unpack_head: Final = HEAD.unpack_from
_unpack_summary: Final = _HEAD_SUMMARY.unpack_from
_unpack_client: Final = _HEAD_CLIENT.unpack_from
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
        self._heads: list[tuple[int, int, int]] | None = None
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
        heads = self.start + HEADER_BYTES
        fields: HeadFields = _unpack_head(data, heads + index * HEAD_BYTES)
        a = heads + self.count * HEAD_BYTES + fields[0]
        b = a + fields[1]
        c = b + fields[2]
        d = c + fields[3]
        e = d + fields[6]
        f = e + fields[7]
        flags = fields[5]
        return Record(
            self.partition,
            fields[4],
            flags,
            self.base_timestamp_us + fields[8],
            data[a:b] if topic is None else topic,
            data[b:c],
            data[d:e] if e > d else b"",
            data[e:f],
            producer=data[c:d] if d > c else b"",
            producer_epoch=fields[9],
            sequence=fields[11],
            ticket=fields[10],
            offset=self.base_offset + index,
            audience=data[f : self.body_end(index)] if flags & FLAG_AUDIENCE else b"",
        )

    def body_end(self, index: int) -> int:
        """The end of the body of the record at `index`."""
        heads = self.start + HEADER_BYTES
        body: int = heads + self.count * HEAD_BYTES
        if index + 1 == self.count:
            return body + self.body_bytes
        fields: _HeadSummary = _unpack_summary(self.data, heads + (index + 1) * HEAD_BYTES)
        return body + fields[0]

    def topic(self, index: int) -> bytes:
        """The topic of the record at `index`; b"" if it is not a message."""
        heads = self.start + HEADER_BYTES
        fields: _HeadSummary = _unpack_summary(self.data, heads + index * HEAD_BYTES)
        if fields[2] != MESSAGE:
            return b""
        start = heads + self.count * HEAD_BYTES + fields[0]
        return self.data[start : start + fields[1]]

    def topics(self) -> tuple[list[bytes], int]:
        """The topic of each record (b"": no message), and the newest's µs after the first."""
        known = self._topics
        if known is not None:
            return known, self._newest_us
        data = self.data
        body = self.start + HEADER_BYTES + self.count * HEAD_BYTES
        newest_us = 0
        topics: list[bytes] = []
        for each in _HEAD_SUMMARY.iter_unpack(self.raw_heads()):
            fields: _HeadSummary = each
            newest_us = max(newest_us, fields[3])
            if fields[2] == MESSAGE:
                start = body + fields[0]
                topics.append(data[start : start + fields[1]])
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
        fields: tuple[int, int, int] = _unpack_client(self.data, heads + index * HEAD_BYTES)
        start = heads + self.count * HEAD_BYTES + fields[0] + fields[1]
        return self.data[start : start + fields[2]]

    def raw_heads(self) -> memoryview:
        """The encoded heads of all records (see HEAD)."""
        start = self.start + HEADER_BYTES
        return memoryview(self.data)[start : start + self.count * HEAD_BYTES]

    def heads(self) -> list[tuple[int, int, int]]:
        """Kind, flags and ticket of each record; ticket 0: it has none."""
        heads = self._heads
        if heads is None:
            heads = self._heads = list(_HEAD_APPLY.iter_unpack(self.raw_heads()))
        return heads

    def records(self) -> list[Record]:
        """All records of the batch."""
        return [self.record(index) for index in range(self.count)]
