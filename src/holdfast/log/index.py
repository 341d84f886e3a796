"""What a segment holds and where: its batches, their times, and the messages of every topic.

Batches are numbered from 0 in file order. A *posting* names one record of the segment as
`batch number << INDEX_BITS | index in the batch`, so postings sort in journal order and batch
arrays say the rest. Only records of kind MESSAGE have postings.

ActiveIndex grows while its segment is written; SealedIndex is read from an .idx file and keeps
topics as bytes, sorted, so that loading one costs the same whatever the number of topics, and the
literal prefix of a filter narrows by bisection. The file, little-endian::

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

In a replica's journal a batch may begin below the end of earlier ones of its partition: it
*overrides* them, and what they hold from there on is void. An index says what counts of its own
segment taken by itself: void batches have a count of 0 (or of what is left), are in no partition's
list, and `start offsets` are as low as the lowest batch in here. What a later segment overrides is
not in the index; Segment.end_offsets has it.
"""

import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final
from zlib import crc32

from holdfast.log.record import ATTRIBUTE_RESET, Batch, BatchBuilder
from holdfast.log.sorting import sorted_in_pieces

INDEX_BITS: Final = 24
INDEX_MASK: Final = (1 << INDEX_BITS) - 1
MAGIC: Final = b"HFLI"
FORMAT: Final = 1
MATCHED_FILTERS_MAX: Final = 256
"""Filters whose matching topics an index remembers."""
TOPICS_BETWEEN_PAUSES: Final = 2000
"""Looked at by compiled code before it lets other threads run."""

_PREFIX: Final = struct.Struct("<4sII")
_FIELDS: Final = struct.Struct("<IQIIQQQIIqqII")
_SWAPPED: Final = sys.byteorder == "big"
_NOTE_EPOCH: Final = 1
"""From `offset` on the partition's batches in here carry the epoch `value`."""
_NOTE_RESET: Final = 2
"""The partition began anew at `offset`."""
_NOTE_VOID: Final = 3
"""`value` records are void."""


class CorruptIndex(Exception):
    """Not a whole, valid index. The text says what is wrong."""


class Gap:
    """Offsets `start` to `end` of a partition that damage has taken. Where nothing later tells how
    many records a damaged place held, `end` is an upper bound."""

    def __init__(self, partition: int, start: int, end: int) -> None:
        self.partition = partition
        self.start = start
        self.end = end


class FilterMatch:
    """The topics of an index that match one filter."""

    def __init__(self) -> None:
        self.topics: list[int] = []
        # Topics below this number were looked at.
        self.seen = 0
        self.overflow = False


class IndexHead:
    """What is known of a segment without its index' body."""

    def __init__(self, sequence: int, start_offsets: Sequence[int]) -> None:
        self.sequence = sequence
        self.start_offsets: list[int] = list(start_offsets)
        self.end_offsets: list[int] = list(start_offsets)
        self.log_bytes = 0
        # Appended here, void ones included; a reset counts as one. The next segment's sequence is
        # so much larger.
        self.records = 0
        # What `records` lacks because of damage.
        self.missing = 0
        # Of `records`: those that others in here have overridden.
        self.void = 0
        # (partition, epoch, offset): where the epoch of a partition's batches changes; its first
        # batch in here is a change. Epoch 0 is left out.
        self.epochs: list[tuple[int, int, int]] = []
        # Partitions that began anew in here, and at which offset.
        self.resets: dict[int, int] = {}
        self.first_timestamp_us = 0
        self.last_timestamp_us = 0
        self.gaps: list[Gap] = []
        # Of the encoded form; 0 as long as there is none.
        self.head_bytes = 0
        self.body_bytes = 0
        self.body_crc = 0
        self.batches = 0
        self.topics = 0


class SegmentIndex:
    """The batches of one segment; the subclasses know its topics."""

    def __init__(self, head: IndexHead) -> None:
        self.head = head
        self.base_offsets = array("Q")
        self.first_timestamps_us = array("q")
        self.positions = array("I")
        self.counts = array("I")
        # Of the newest record, after the batch's first.
        self.last_deltas_us = array("I")
        self.partitions = array("H")
        self.attributes = array("B")
        self.by_partition: list[array[int]] = [array("I") for _ in head.start_offsets]
        self.matched: dict[str, FilterMatch] = {}

    def batch_count(self) -> int:
        return len(self.attributes)

    def batch_end(self, batch: int) -> int:
        """Position up to which reading from the batch's own gets all of it; after the last batch
        before a damaged place that is the damage too."""
        if batch + 1 < len(self.positions):
            return self.positions[batch + 1]
        return self.head.log_bytes

    def find_batch(self, partition: int, offset: int) -> int:
        """Number of the first batch that has records at or after `offset`; -1 if none has."""
        numbers = self.by_partition[partition]
        bases = self.base_offsets
        counts = self.counts
        low = 0
        high = len(numbers)
        while low < high:
            middle = (low + high) // 2
            number = numbers[middle]
            if bases[number] + counts[number] > offset:
                high = middle
            else:
                low = middle + 1
        return numbers[low] if low < len(numbers) else -1

    def offset_at(self, partition: int, posting: int) -> int:
        """The first offset of the partition at or after a posting's place in the file."""
        number = posting >> INDEX_BITS
        if number < len(self.partitions) and self.partitions[number] == partition:
            return self.base_offsets[number] + (posting & INDEX_MASK)
        numbers = self.by_partition[partition]
        at = bisect_left(numbers, number)
        if at < len(numbers):
            return self.base_offsets[numbers[at]]
        return self.head.end_offsets[partition]

    def size_bytes(self) -> int:
        """Roughly, in memory."""
        return 40 * len(self.positions) + 100 * self.topic_count() + 8 * self.head.records

    def topic_count(self) -> int:
        raise NotImplementedError

    def topic(self, number: int) -> bytes:
        raise NotImplementedError

    def find_topic(self, topic: bytes) -> int:
        """The topic's number; -1 if the segment has no message of it."""
        raise NotImplementedError

    def topic_range(self, prefix: bytes) -> tuple[int, int]:
        """Numbers `start, end` between which all topics with this prefix are."""
        raise NotImplementedError

    def postings(self, number: int) -> "array[int]":
        """Of a topic, in journal order."""
        raise NotImplementedError

    def message_counts(
        self, starts: Sequence[int] | None = None, ends: Sequence[int] | None = None
    ) -> dict[bytes, int]:
        """Messages per topic; those between two offsets per partition, if given."""
        counts: dict[bytes, int] = {}
        all_count = starts is None and ends is None and not self.head.void
        for number in range(self.topic_count()):
            postings = self.postings(number)
            count = len(postings)
            if not all_count:
                count = 0
                for posting in postings:
                    count += self._counts_between(posting, starts, ends)
            if count:
                counts[self.topic(number)] = count
        return counts

    def _counts_between(
        self, posting: int, starts: Sequence[int] | None, ends: Sequence[int] | None
    ) -> bool:
        batch = posting >> INDEX_BITS
        inside = posting & INDEX_MASK
        if inside >= self.counts[batch]:
            return False
        partition = self.partitions[batch]
        offset = self.base_offsets[batch] + inside
        if starts is not None and offset < starts[partition]:
            return False
        return ends is None or offset < ends[partition]


class ActiveIndex(SegmentIndex):
    """Grows with its segment. Another thread may read while one adds: what it asks for by offset
    below the journal's `written` is there."""

    def __init__(self, sequence: int, start_offsets: Sequence[int]) -> None:
        super().__init__(IndexHead(sequence, start_offsets))
        # In the order they came. A topic's postings are one int, or an array of several.
        self._topics: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._postings: list[object] = []
        # Per partition, of its newest batch in here; 0: none.
        self._last_epochs: list[int] = [0] * len(start_offsets)

    def add_batch(
        self,
        position: int,
        length: int,
        partition: int,
        base_offset: int,
        attributes: int,
        first_timestamp_us: int,
        last_delta_us: int,
        topics: list[bytes],
        epoch: int = 0,
    ) -> None:
        """`topics`: of each record, b"" for one that is not a message."""
        head = self.head
        count = len(topics)
        number = len(self.attributes)
        if attributes & ATTRIBUTE_RESET:
            self._reset(partition, base_offset)
        elif base_offset > head.end_offsets[partition]:
            self.add_gap(partition, base_offset)
        elif base_offset < head.end_offsets[partition]:
            self._override(partition, base_offset)
        head.end_offsets[partition] = base_offset + count
        if epoch != self._last_epochs[partition] and count:
            self._last_epochs[partition] = epoch
            head.epochs.append((partition, epoch, base_offset))
        if number == 0 or first_timestamp_us < head.first_timestamp_us:
            head.first_timestamp_us = first_timestamp_us
        if first_timestamp_us + last_delta_us > head.last_timestamp_us:
            head.last_timestamp_us = first_timestamp_us + last_delta_us
        head.log_bytes = position + length
        head.records += count or 1
        self.base_offsets.append(base_offset)
        self.first_timestamps_us.append(first_timestamp_us)
        self.positions.append(position)
        self.counts.append(count)
        self.last_deltas_us.append(last_delta_us)
        self.partitions.append(partition)
        self.attributes.append(attributes)
        numbers = self._numbers
        all_postings = self._postings
        posting = number << INDEX_BITS
        for topic in topics:
            if topic:
                known = numbers.get(topic)
                if known is None:
                    numbers[topic] = len(all_postings)
                    # Postings first: a reader goes by the length of the list of topics.
                    all_postings.append(posting)
                    self._topics.append(topic)
                else:
                    postings = all_postings[known]
                    if isinstance(postings, array):
                        postings.append(posting)
                    else:
                        assert isinstance(postings, int)
                        all_postings[known] = array("Q", (postings, posting))
            posting += 1
        # Last: whoever finds the batch's number finds everything of it.
        if count:
            self.by_partition[partition].append(number)

    def add_built(self, position: int, length: int, builder: BatchBuilder) -> None:
        self.add_batch(
            position,
            length,
            builder.partition,
            builder.base_offset,
            builder.attributes,
            builder.base_timestamp_us,
            builder.last_delta_us,
            builder.topics,
            builder.epoch,
        )

    def add_parsed(self, position: int, batch: Batch) -> None:
        topics, last_delta_us = batch.topics()
        self.add_batch(
            position,
            batch.length,
            batch.partition,
            batch.base_offset,
            batch.attributes,
            batch.base_timestamp_us,
            last_delta_us,
            topics,
            batch.epoch,
        )

    def _override(self, partition: int, offset: int) -> None:
        """What the partition's batches in here hold from `offset` on is void. A reader in another
        thread goes on with the list it has: the batches stay where they are."""
        head = self.head
        head.start_offsets[partition] = min(head.start_offsets[partition], offset)
        numbers = self.by_partition[partition][:]
        while numbers and self.base_offsets[numbers[-1]] >= offset:
            number = numbers.pop()
            head.void += self.counts[number]
            self.counts[number] = 0
        if numbers:
            number = numbers[-1]
            left = offset - self.base_offsets[number]
            if left < self.counts[number]:
                head.void += self.counts[number] - left
                self.counts[number] = left
        self.by_partition[partition] = numbers
        kept_gaps: list[Gap] = []
        for gap in head.gaps:
            if gap.partition != partition or gap.end <= offset:
                kept_gaps.append(gap)
            elif gap.start < offset:
                kept_gaps.append(Gap(partition, gap.start, offset))
        head.gaps = kept_gaps
        kept_epochs: list[tuple[int, int, int]] = []
        self._last_epochs[partition] = 0
        for entry in head.epochs:
            if entry[0] != partition or entry[2] < offset:
                kept_epochs.append(entry)
                if entry[0] == partition:
                    self._last_epochs[partition] = entry[1]
        head.epochs = kept_epochs

    def _reset(self, partition: int, offset: int) -> None:
        start = self.head.start_offsets[partition]
        self._override(partition, 0)
        self.head.start_offsets[partition] = min(start, offset)
        self.head.resets[partition] = offset

    def add_gap(self, partition: int, end: int) -> None:
        """Offsets up to `end` are missing at the end of the segment."""
        head = self.head
        start = head.end_offsets[partition]
        if end > start:
            head.gaps.append(Gap(partition, start, end))
            head.missing += end - start
            head.end_offsets[partition] = end

    def topic_count(self) -> int:
        return len(self._topics)

    def topic(self, number: int) -> bytes:
        return self._topics[number]

    def find_topic(self, topic: bytes) -> int:
        return self._numbers.get(topic, -1)

    def topic_range(self, prefix: bytes) -> tuple[int, int]:
        return 0, len(self._topics)

    def postings(self, number: int) -> "array[int]":
        postings = self._postings[number]
        if isinstance(postings, array):
            return postings
        assert isinstance(postings, int)
        return array("Q", (postings,))

    def encode(self, pause: Callable[[], object] | None = None) -> bytes:
        """The .idx file of the finished segment. `pause` is called every few milliseconds: what is
        compiled lets no other thread run unless it calls something that is not."""
        topics = sorted_in_pieces(self._topics)
        topic_ends = array("I")
        posting_ends = array("I")
        postings = array("Q")
        topic_end = 0
        for number, topic in enumerate(topics):
            if pause is not None and number % TOPICS_BETWEEN_PAUSES == 0:
                pause()
            topic_end += len(topic)
            topic_ends.append(topic_end)
            of_topic = self._postings[self._numbers[topic]]
            if isinstance(of_topic, array):
                postings.extend(of_topic)
            else:
                assert isinstance(of_topic, int)
                postings.append(of_topic)
            posting_ends.append(len(postings))
        by_partition = array("I")
        for numbers in self.by_partition:
            by_partition.extend(numbers)
        by_partition.extend([0] * (len(self.positions) - len(by_partition)))
        body = b"".join(
            [
                _encoded(self.base_offsets),
                _encoded(self.first_timestamps_us),
                _encoded(self.positions),
                _encoded(self.counts),
                _encoded(self.last_deltas_us),
                _encoded(self.partitions),
                _encoded(self.attributes),
                _encoded(by_partition),
                _encoded(array("I", [len(numbers) for numbers in self.by_partition])),
                _encoded(topic_ends),
                _encoded(posting_ends),
                _encoded(postings),
                *topics,
            ]
        )
        return _encode_head(self.head, len(self.positions), len(topics), body) + body


class SealedIndex(SegmentIndex):
    """The index of a segment that no longer grows."""

    def __init__(self, head: IndexHead, data: bytes) -> None:
        """`data`: the whole .idx file that `head` was decoded from. Raises CorruptIndex."""
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


def _encoded(values: "array[int]") -> bytes:
    if _SWAPPED:
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _encode_head(head: IndexHead, batches: int, topics: int, body: bytes) -> bytes:
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
    ) + _encoded(numbers)
    return _PREFIX.pack(MAGIC, _PREFIX.size + len(rest), crc32(rest)) + rest


HEAD_PREFIX_BYTES: Final = _PREFIX.size


def head_length(prefix: bytes) -> int:
    """How many bytes of the file decode_head needs, from its first HEAD_PREFIX_BYTES. Raises
    CorruptIndex."""
    if len(prefix) < _PREFIX.size:
        raise CorruptIndex(f"an index of {len(prefix)} bytes")
    magic, length, _ = _PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise CorruptIndex(f"no index magic, found {magic!r}")
    return int(length)


def decode_head(data: bytes) -> IndexHead:
    """`data`: the file, or at least head_length bytes of it. Raises CorruptIndex."""
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
        head.gaps.append(Gap(numbers[at], numbers[at + 1], numbers[at + 2]))
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
    """A whole .idx file. Raises CorruptIndex."""
    return SealedIndex(decode_head(data), data)
