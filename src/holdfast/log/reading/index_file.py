"""The .idx file: the index of a segment, written when that has its last batch.

A SealedIndex is read from it. It keeps topics as bytes, sorted, so that loading one costs the same
whatever the number of topics. The literal prefix of a filter narrows the search by bisection.
Little-endian::

    head    magic 4s b"HFLI" · head bytes u32 · crc u32 (of the rest of the head) · format u32 ·
            body bytes u64 · body crc u32 · partitions u32 · sequence u64 · records u64 ·
            log bytes u64 · batches u32 · topics u32 · first, last timestamp_us i64 · gaps u32 ·
            notes u32 ·
            start offsets u64 per partition · end offsets u64 per partition ·
            gaps: partition, start, end u64 each · notes: kind, partition, value, offset u64 each
    body    one array after the other. Per batch: base offset u64, first timestamp_us i64,
            position u32, count u32, newest record's time after the first u32, partition u16,
            attributes u8; batch numbers in partition order u32, as many as batches, zeros in place
            of void ones at the end; per partition how many of them u32; per topic, sorted: where
            it ends in `topics` u32, where its postings end u32; postings u64; topics

The head alone is enough to open a journal; `log bytes` ties it to one length of the segment.
"""

import struct
import sys
from array import array
from typing import Final
from zlib import crc32

from holdfast.log.reading.index import DamagedOffsets, IndexHead, SegmentIndex

MAGIC: Final = b"HFLI"
FORMAT: Final = 1

_PREFIX: Final = struct.Struct("<4sII")
_FIELDS: Final = struct.Struct("<IQIIQQQIIqqII")
_SWAPPED: Final = sys.byteorder == "big"
_NOTE_EPOCH: Final = 1
"""The kind of a note: from `offset` on the partition's batches in this segment have the epoch
`value`."""
_NOTE_RESET: Final = 2
"""The kind of a note: the partition was reset at `offset`."""
_NOTE_VOID: Final = 3
"""The kind of a note: `value` records are void."""


class CorruptIndex(Exception):
    """The bytes are not a complete, valid index. The text gives the reason."""


class SealedIndex(SegmentIndex):
    """The index of a segment that no longer grows."""

    def __init__(self, head: IndexHead, data: bytes) -> None:
        """Uses `data`, the complete .idx file that `head` was decoded from.

        Raises `CorruptIndex` if it is damaged.
        """
        super().__init__(head)
        if len(data) != head.head_bytes + head.body_bytes:
            raise CorruptIndex(
                f"an index of {len(data)} bytes, its head says {head.head_bytes + head.body_bytes}"
            )
        body = memoryview(data)[head.head_bytes :]
        found = crc32(body)
        if found != head.body_crc:
            raise CorruptIndex(f"checksum {found:08x}, the index's head says {head.body_crc:08x}")
        reader = _ArrayReader(body)
        batches = head.batches
        self.base_offsets = reader.next("Q", batches)
        self.first_timestamps_us = reader.next("q", batches)
        self.positions = reader.next("I", batches)
        self.counts = reader.next("I", batches)
        self.last_deltas_us = reader.next("I", batches)
        self.partitions = reader.next("H", batches)
        self.attributes = reader.next("B", batches)
        by_partition = reader.next("I", batches)
        start = 0
        for partition, count in enumerate(reader.next("I", len(head.start_offsets))):
            self.by_partition[partition] = by_partition[start : start + count]
            start += count
        self._topic_ends = reader.next("I", head.topics)
        self._posting_ends = reader.next("I", head.topics)
        self._postings = reader.next("Q", self._posting_ends[-1] if head.topics else 0)
        self._topics = bytes(body[reader.position :])
        self._size_bytes = len(data)

    def size_bytes(self) -> int:
        return self._size_bytes

    def topic_count(self) -> int:
        return len(self._topic_ends)

    def topic(self, number: int) -> bytes:
        start = self._topic_ends[number - 1] if number else 0
        return self._topics[start : self._topic_ends[number]]

    def find_topic(self, topic: bytes) -> int:
        number = self._first_not_below(topic)
        if number < len(self._topic_ends) and self.topic(number) == topic:
            return number
        return -1

    def topic_range(self, prefix: bytes) -> tuple[int, int]:
        # No UTF-8 text has the byte 0xff.
        return self._first_not_below(prefix), self._first_not_below(prefix + b"\xff")

    def postings(self, number: int) -> "array[int]":
        start = self._posting_ends[number - 1] if number else 0
        return self._postings[start : self._posting_ends[number]]

    def posting_count(self, number: int) -> int:
        return self._posting_ends[number] - (self._posting_ends[number - 1] if number else 0)

    def _first_not_below(self, topic: bytes) -> int:
        low = 0
        high = len(self._topic_ends)
        while low < high:
            middle = (low + high) // 2
            if self.topic(middle) < topic:
                low = middle + 1
            else:
                high = middle
        return low


class _ArrayReader:
    def __init__(self, body: memoryview) -> None:
        self._body = body
        self.position = 0

    def next(self, typecode: str, count: int) -> "array[int]":
        result: array[int] = array(typecode)
        end = self.position + count * result.itemsize
        if end > len(self._body):
            raise CorruptIndex(f"an array of {count} ends beyond the index")
        result.frombytes(self._body[self.position : end])
        self.position = end
        if _SWAPPED:
            result.byteswap()
        return result


def encode_array(values: "array[int]") -> bytes:
    """The array as the file has it: little-endian."""
    if _SWAPPED:
        values = values[:]
        values.byteswap()
    return values.tobytes()


def encode_head(head: IndexHead, batches: int, topics: int, body: bytes) -> bytes:
    """The encoded head. `batches` and `topics` are their numbers in `body`, the rest of the
    file."""
    numbers = array("Q", head.start_offsets)
    numbers.extend(head.end_offsets)
    for gap in head.gaps:
        numbers.extend((gap.partition, gap.start, gap.end))
    notes = [(_NOTE_EPOCH, partition, epoch, start) for partition, epoch, start in head.epochs]
    notes += [(_NOTE_RESET, partition, 0, offset) for partition, offset in head.resets.items()]
    if head.void:
        notes.append((_NOTE_VOID, 0, head.void, 0))
    for note in notes:
        numbers.extend(note)
    rest = _FIELDS.pack(
        FORMAT,
        len(body),
        crc32(body),
        len(head.start_offsets),
        head.sequence,
        head.records,
        head.log_bytes,
        batches,
        topics,
        head.first_timestamp_us,
        head.last_timestamp_us,
        len(head.gaps),
        len(notes),
    ) + encode_array(numbers)
    return _PREFIX.pack(MAGIC, _PREFIX.size + len(rest), crc32(rest)) + rest


HEAD_PREFIX_BYTES: Final = _PREFIX.size


def head_length(prefix: bytes) -> int:
    """The bytes that decode_head needs, from the first HEAD_PREFIX_BYTES of the file.

    Raises `CorruptIndex` if they are damaged.
    """
    if len(prefix) < _PREFIX.size:
        raise CorruptIndex(f"an index of {len(prefix)} bytes")
    magic, length, _ = _PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise CorruptIndex(f"no index magic, found {magic!r}")
    return int(length)


def decode_head(data: bytes) -> IndexHead:
    """The head in `data`, at least head_length bytes of the file.

    Raises `CorruptIndex` if it is damaged.
    """
    length = head_length(data)
    if len(data) < length or length < _PREFIX.size + _FIELDS.size:
        raise CorruptIndex(f"{len(data)} bytes of an index whose head has {length}")
    _, _, expected = _PREFIX.unpack_from(data)
    rest = data[_PREFIX.size : length]
    found = crc32(rest)
    if found != expected:
        raise CorruptIndex(f"checksum of the head {found:08x}, it says {expected:08x}")
    if int.from_bytes(rest[:4], "little") != FORMAT:
        raise CorruptIndex(
            f"index format {int.from_bytes(rest[:4], 'little')}, this program reads {FORMAT}"
        )
    fields = _FIELDS.unpack_from(rest)
    partitions: int = fields[3]
    gaps: int = fields[11]
    notes: int = fields[12]
    count = 2 * partitions + 3 * gaps + 4 * notes
    if len(rest) != _FIELDS.size + 8 * count:
        raise CorruptIndex(
            f"a head of {length} bytes for {partitions} partitions, {gaps} gaps, {notes} notes"
        )
    numbers = _ArrayReader(memoryview(rest)[_FIELDS.size :]).next("Q", count)
    head = IndexHead(fields[4], numbers[:partitions])
    head.end_offsets = list(numbers[partitions : 2 * partitions])
    notes_at = 2 * partitions + 3 * gaps
    for at in range(2 * partitions, notes_at, 3):
        head.gaps.append(DamagedOffsets(numbers[at], numbers[at + 1], numbers[at + 2]))
        head.missing += numbers[at + 2] - numbers[at + 1]
    for at in range(notes_at, count, 4):
        _take_note(head, numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3])
    head.head_bytes = length
    head.body_bytes = fields[1]
    head.body_crc = fields[2]
    head.records = fields[5]
    head.log_bytes = fields[6]
    head.batches = fields[7]
    head.topics = fields[8]
    head.first_timestamp_us = fields[9]
    head.last_timestamp_us = fields[10]
    return head


def _take_note(head: IndexHead, kind: int, partition: int, value: int, offset: int) -> None:
    if partition >= len(head.start_offsets):
        raise CorruptIndex(f"a note on partition {partition} of {len(head.start_offsets)}")
    if kind == _NOTE_EPOCH:
        head.epochs.append((partition, value, offset))
    elif kind == _NOTE_RESET:
        head.resets[partition] = offset
    elif kind == _NOTE_VOID:
        head.void = value
    else:
        raise CorruptIndex(f"a note of the unknown kind {kind}")


def decode(data: bytes) -> SealedIndex:
    """The index in a complete .idx file.

    Raises `CorruptIndex` if it is damaged.
    """
    return SealedIndex(decode_head(data), data)
