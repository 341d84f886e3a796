"""Indexes the segment that is being written."""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.log.batch import ATTRIBUTE_RESET, ATTRIBUTE_STATE, Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.reading.index import (
    INDEX_BITS,
    TOPICS_BETWEEN_PAUSES,
    DamagedOffsets,
    IndexHead,
    SegmentIndex,
)
from holdfast.log.reading.index_file import encode_array, encode_head

PIECE: Final = 2000
"""The number of values that one call sorts, roughly."""
SAMPLES_A_PIECE: Final = 16
"""The number of samples per piece, from which the borders of the pieces are taken."""


def sorted_in_pieces(values: list[bytes]) -> list[bytes]:
    """A replacement for sorted(), which lets no other thread run until it is done. That is too long
    for an event loop that waits. Some of the values divide the rest into ranges that are quick to
    sort.

    It must not be compiled: between two lines of Python other threads may run.
    """
    pieces = len(values) // PIECE + 1
    if pieces == 1:
        return sorted(values)
    sample = sorted(values[:: max(1, len(values) // (SAMPLES_A_PIECE * pieces))])
    borders = sample[SAMPLES_A_PIECE::SAMPLES_A_PIECE]
    ranges: list[list[bytes]] = [[] for _ in range(len(borders) + 1)]
    for value in values:
        ranges[bisect_left(borders, value)].append(value)
    result: list[bytes] = []
    for values_in_range in ranges:
        values_in_range.sort()
        result += values_in_range
    return result


class ActiveIndex(SegmentIndex):
    """An index that grows with its segment. One thread adds, and others may read at the same time.

    Invariant: everything about offsets below the journal's `written` is complete when a reader
    looks for it. Lists only grow, or are replaced as a whole. Within a batch the entry by which
    readers find it is added last.
    """

    def __init__(
        self, sequence: int, start_offsets: Sequence[int], *, is_lowest: bool = False
    ) -> None:
        """`is_lowest`: an override in the segment may have lowered these offsets, as in its index
        and in the start of a journal. Nothing is missing then below a partition's first batch, if a
        later one begins at its start."""
        super().__init__(IndexHead(sequence, start_offsets))
        self._is_lowest = is_lowest
        # The topics in order of arrival. A topic's postings are one int, or an array of several: an
        # array for each of a million topics with one record would more than double the memory.
        self._topics: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._postings: list[object] = []
        # Per partition, the epoch of its newest batch in this segment; 0: none.
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
        """Adds a batch. `topics` has the topic of each record, b"" for one that is no message."""
        head = self.head
        count = len(topics)
        number = len(self.attributes)
        if attributes & ATTRIBUTE_RESET:
            self._reset(partition, base_offset)
        elif base_offset > head.end_offsets[partition]:
            self.add_gap(partition, base_offset)
        elif base_offset < head.end_offsets[partition]:
            # The log was truncated at this offset, and another leader's records follow. The file is
            # append-only, so the truncated records stay in it and only lose their index entries.
            self._override(partition, base_offset)
        head.end_offsets[partition] = base_offset + count
        if epoch != self._last_epochs[partition] and count:
            self._last_epochs[partition] = epoch
            head.epochs.append((partition, epoch, base_offset))
        # A mark has no time.
        if count and not 0 < head.first_timestamp_us <= first_timestamp_us:
            head.first_timestamp_us = first_timestamp_us
        if first_timestamp_us + last_delta_us > head.last_timestamp_us:
            head.last_timestamp_us = first_timestamp_us + last_delta_us
        head.log_bytes = position + length
        head.records += count or max(1, epoch)
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
                    # Postings first: a reader uses the length of the list of topics.
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
        # Last: a reader that finds the batch's number then finds all its entries. If the number was
        # first, a reader in between would look up a position that is not in the list yet.
        if count:
            self.by_partition[partition].append(number)

    def add_built(self, position: int, length: int, builder: BatchBuilder) -> None:
        """Adds a batch that this node has built."""
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
        """Adds a batch that was received or read."""
        topics, last_delta_us = batch.topics()
        self.add_batch(
            position,
            batch.length,
            batch.partition,
            batch.base_offset,
            batch.attributes & (ATTRIBUTE_STATE | ATTRIBUTE_RESET),
            batch.base_timestamp_us,
            last_delta_us,
            topics,
            batch.epoch,
        )

    def _override(self, partition: int, offset: int) -> None:
        """Voids the partition's records from `offset` on in this segment. The list is replaced, so
        a reader in another thread continues with its own. The batches stay in place."""
        head = self.head
        start = head.start_offsets[partition]
        head.start_offsets[partition] = min(start, offset)
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
        kept_gaps: list[DamagedOffsets] = []
        for gap in head.gaps:
            if gap.partition != partition or gap.end <= offset:
                kept_gaps.append(gap)
            elif gap.start < offset:
                kept_gaps.append(DamagedOffsets(partition, gap.start, offset))
            elif self._is_lowest and gap.start == start:
                head.missing -= gap.end - gap.start
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
        """Voids all records of the partition so far: its log begins again at `offset`, because the
        records before it are unknown here."""
        start = self.head.start_offsets[partition]
        self._override(partition, 0)
        self.head.start_offsets[partition] = min(start, offset)
        self.head.resets[partition] = offset

    def add_gap(self, partition: int, end: int) -> None:
        """Notes that offsets up to `end` are missing at the end of the segment."""
        head = self.head
        start = head.end_offsets[partition]
        if end > start:
            head.gaps.append(DamagedOffsets(partition, start, end))
            head.missing += end - start
            head.end_offsets[partition] = end

    def topic_count(self) -> int:
        return len(self._topics)

    def topic(self, number: int) -> bytes:
        return self._topics[number]

    def find_topic(self, topic: bytes) -> int:
        return self._numbers.get(topic, -1)

    def topic_range(self, prefix: bytes) -> tuple[int, int]:
        """All topics, because they are not sorted before the segment is finished."""
        return 0, len(self._topics)

    def postings(self, number: int) -> "array[int]":
        postings = self._postings[number]
        if isinstance(postings, array):
            return postings
        assert isinstance(postings, int)
        return array("Q", (postings,))

    def posting_count(self, number: int) -> int:
        postings = self._postings[number]
        return len(postings) if isinstance(postings, array) else 1

    def encode(self, pause: Callable[[], object] | None = None) -> bytes:
        """The .idx file of the finished segment. `pause` is called every few milliseconds. Compiled
        code lets no other thread run unless it calls code that is not compiled."""
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
        # Overridden batches are in no list any more, but the file has one entry per batch.
        by_partition.extend([0] * (len(self.positions) - len(by_partition)))
        body = b"".join(
            [
                encode_array(self.base_offsets),
                encode_array(self.first_timestamps_us),
                encode_array(self.positions),
                encode_array(self.counts),
                encode_array(self.last_deltas_us),
                encode_array(self.partitions),
                encode_array(self.attributes),
                encode_array(by_partition),
                encode_array(array("I", [len(numbers) for numbers in self.by_partition])),
                encode_array(topic_ends),
                encode_array(posting_ends),
                encode_array(postings),
                *topics,
            ]
        )
        return encode_head(self.head, len(self.positions), len(topics), body) + body
