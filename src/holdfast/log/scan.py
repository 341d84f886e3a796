"""Reading a segment from end to end: its index made anew, and what in it is damaged.

A place that is no valid batch is *damage* if a valid batch follows, and the *torn end* otherwise:
what a write that was cut short leaves behind. Zeros at the end are neither; space that was
allocated in advance looks so.

The search for the batch that follows trusts the lengths of batches as long as it can: the payload
of a message may itself contain a valid batch, and must not be taken for one.
"""

from dataclasses import dataclass, field
from typing import Final

from holdfast.log.active_index import ActiveIndex
from holdfast.log.filesystem import ReadFile
from holdfast.log.record import (
    ATTRIBUTE_RESET,
    BATCH_BYTES_MAX,
    FORMAT,
    HEAD_BYTES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    Batch,
    CorruptBatch,
)

WINDOW_BYTES: Final = 4 << 20
"""Read at a time; a longer batch is read whole."""
ALIGNMENT: Final = 8


@dataclass(frozen=True)
class Damage:
    """Bytes of a segment that are no valid batch although one follows, or that were cut off."""

    segment: int
    position: int
    length: int
    reason: str


@dataclass
class SegmentScan:
    index: ActiveIndex
    end: int = 0
    """Where the last valid batch ends."""
    damage: list[Damage] = field(default_factory=list)
    torn: Damage | None = None
    uncertain: dict[int, int] = field(default_factory=dict)
    """Partitions that may have lost records to damage nothing later told about, with an upper
    bound of how many."""
    replica: bool = False
    blind: set[int] = field(default_factory=set)
    """Of a replica: partitions whose earlier records were perhaps overridden by what damage has
    taken, nobody knows from which offset on."""
    claimed: dict[int, int] = field(default_factory=dict)
    """Where the last damaged batch of a partition ended, by its own header."""

    def note_uncertain(self, length: int) -> None:
        """So many bytes may have held records of any partition."""
        for partition in range(len(self.index.head.end_offsets)):
            self.uncertain[partition] = self.uncertain.get(partition, 0) + length // HEAD_BYTES

    def check_claim(self, batch: Batch) -> None:
        """A damaged header said where it ends; if that was true, the partition goes on there."""
        if self.claimed.pop(batch.partition) != batch.base_offset and self.replica:
            self.note_blind()

    def finish(self) -> None:
        if self.claimed and self.replica:
            self.note_blind()

    def note_blind(self) -> None:
        self.blind.update(range(len(self.index.head.end_offsets)))


def scan_segment(
    file: ReadFile,
    sequence: int,
    start_offsets: list[int],
    end: int | None = None,
    *,
    known_start: bool = True,
    replica: bool = False,
    synced_bytes: int | None = None,
) -> SegmentScan:
    """Verify every batch of a segment up to `end` (None: of the file).

    `start_offsets`: where each partition stands before it; unless `known_start`, a partition's
    first batch in here decides instead. `replica`: a batch may override earlier ones.
    `synced_bytes`: what is damaged behind them is the torn end, even if valid batches follow; None:
    the whole segment was synced.
    """
    index = ActiveIndex(sequence, start_offsets)
    scan = SegmentScan(index, replica=replica)
    window = _Window(file, file.size() if end is None else end)
    seen: set[int] = set()
    position = 0
    looked_again = -1
    while position + HEADER_BYTES <= window.end:
        try:
            batch = window.batch(position)
            if not known_start and batch.partition < len(start_offsets):
                if batch.partition not in seen:
                    _begin_partition(index, batch)
                seen.add(batch.partition)
            _check_place(scan, batch)
        except CorruptBatch as error:
            following = None
            if synced_bytes is None or position < synced_bytes:
                following = _after_damage(window, index, position)
            if following is not None and looked_again != position:
                looked_again = position
                if window.has_changed(position):
                    # The file is being written: this batch and the next came since.
                    continue
            if following is None:
                if synced_bytes is not None and position < synced_bytes:
                    scan.note_blind()
                scan.torn = _torn_end(window, sequence, position, str(error))
                scan.finish()
                return scan
            scan.damage.append(Damage(sequence, position, following - position, str(error)))
            _note_lost(scan, window, position, following)
            position = following
            continue
        if batch.partition in scan.claimed:
            scan.check_claim(batch)
        index.add_parsed(position, batch)
        if not batch.count:
            scan.blind.discard(batch.partition)
        scan.uncertain.pop(batch.partition, None)
        position += batch.length
        scan.end = position
    if position < window.end:
        scan.torn = _torn_end(window, sequence, position, "too short for a batch")
    scan.finish()
    return scan


class _Window:
    """A file read in large pieces."""

    def __init__(self, file: ReadFile, end: int) -> None:
        self._file = file
        self._start = 0
        self._data = b""
        self.end = end

    def batch(self, position: int) -> Batch:
        """Raises CorruptBatch."""
        inside = self._load(position, HEADER_BYTES)
        if len(self._data) - inside < HEADER_BYTES:
            raise CorruptBatch(f"{len(self._data) - inside} bytes left of a header")
        if self._data[inside : inside + 4] != MAGIC:
            raise CorruptBatch(f"no batch magic, found {self._data[inside : inside + 4]!r}")
        length = int.from_bytes(self._data[inside + 4 : inside + 8], "little")
        if length > BATCH_BYTES_MAX:
            raise CorruptBatch(f"a length of {length} bytes")
        # First load, then name the data: loading replaces it.
        inside = self._load(position, length)
        return Batch(self._data, inside)

    def claimed_length(self, position: int) -> int:
        """What a header that fits together says; 0 if it does not."""
        if position + HEADER_BYTES > self.end:
            return 0
        inside = self._load(position, HEADER_BYTES)
        if len(self._data) - inside < HEADER_BYTES:
            return 0
        magic, length, _, format, attributes, _, _, _, count, _, body_bytes, _ = HEADER.unpack_from(
            self._data, inside
        )
        smallest = HEADER_BYTES + count * HEAD_BYTES + body_bytes
        if magic != MAGIC or format != FORMAT or length > BATCH_BYTES_MAX:
            return 0
        if not count and not attributes & ATTRIBUTE_RESET:
            return 0
        return int(length) if length == (smallest + 7) & ~7 else 0

    def header(self, position: int) -> tuple[int, int, int]:
        """Partition, base offset and count, unverified."""
        inside = self._load(position, HEADER_BYTES)
        fields = HEADER.unpack_from(self._data, inside)
        return fields[5], fields[6], fields[8]

    def is_batch(self, position: int) -> bool:
        if not self.claimed_length(position):
            return False
        try:
            self.batch(position)
        except CorruptBatch:
            return False
        return True

    def has_changed(self, position: int) -> bool:
        """Whether a valid batch is at `position` now, though what was read before has none."""
        self._data = b""
        return self.is_batch(position)

    def find_magic(self, position: int) -> int:
        """At or after `position`, at a multiple of ALIGNMENT; -1 if there is none."""
        while position + HEADER_BYTES <= self.end:
            inside = self._load(position, min(WINDOW_BYTES, self.end - position))
            found = self._data.find(MAGIC, inside)
            while found >= 0:
                if (self._start + found) % ALIGNMENT == 0:
                    return self._start + found
                found = self._data.find(MAGIC, found + 1)
            position = (self._start + len(self._data)) & ~(ALIGNMENT - 1)
        return -1

    def rest_is_zero(self, position: int) -> bool:
        while position < self.end:
            inside = self._load(position, min(WINDOW_BYTES, self.end - position))
            # Stripping is much faster than a comparison of every byte in Python.
            if self._data[inside:].strip(b"\0"):
                return False
            position = self._start + len(self._data)
        return True

    def _load(self, position: int, length: int) -> int:
        """Have these bytes in `_data`, fewer at the end of the file; the index of the first."""
        inside = position - self._start
        if inside >= 0 and inside + length <= len(self._data):
            return inside
        wanted = min(max(length, WINDOW_BYTES), self.end - position)
        self._data = self._file.read(position, wanted)
        self._start = position
        if len(self._data) < wanted:
            # The file became shorter while it was read.
            self.end = position + len(self._data)
        return 0


def _begin_partition(index: ActiveIndex, batch: Batch) -> None:
    index.head.start_offsets[batch.partition] = batch.base_offset
    index.head.end_offsets[batch.partition] = batch.base_offset


def _check_place(scan: SegmentScan, batch: Batch) -> None:
    """Raises CorruptBatch for a valid batch that cannot be where it is."""
    ends = scan.index.head.end_offsets
    if batch.partition >= len(ends):
        raise CorruptBatch(f"partition {batch.partition}, the journal has {len(ends)}")
    if not batch.count and not (scan.replica and batch.attributes & ATTRIBUTE_RESET):
        raise CorruptBatch("no records")
    if batch.base_offset < ends[batch.partition] and not scan.replica:
        raise CorruptBatch(
            f"offset {batch.base_offset} of partition {batch.partition}"
            f" after {ends[batch.partition] - 1}"
        )


def _after_damage(window: _Window, index: ActiveIndex, position: int) -> int | None:
    """Where the next valid batch begins; None if there is none."""
    at = position
    length = window.claimed_length(at)
    while length:
        at += length
        if at > window.end:
            # The write of this batch was cut short. What is in it is payload.
            return None
        if window.is_batch(at):
            return at
        length = window.claimed_length(at)
    at = window.find_magic(at + ALIGNMENT if at == position else at)
    while at >= 0:
        if window.is_batch(at) and _is_near(window, index, position, at):
            return at
        at = window.find_magic(at + ALIGNMENT)
    return None


def _is_near(window: _Window, index: ActiveIndex, position: int, at: int) -> bool:
    """Whether the offset of a batch found by its magic can follow what is damaged before it."""
    partition, base_offset, _ = window.header(at)
    ends = index.head.end_offsets
    if partition >= len(ends):
        return False
    return 0 <= base_offset - ends[partition] <= (at - position) // HEAD_BYTES


def _torn_end(window: _Window, sequence: int, position: int, reason: str) -> Damage | None:
    if window.rest_is_zero(position):
        return None
    return Damage(sequence, position, window.end - position, reason)


def _note_lost(scan: SegmentScan, window: _Window, position: int, following: int) -> None:
    """Which offsets a damaged place has taken, as far as its own header is to be believed."""
    head = scan.index.head
    if window.claimed_length(position) == following - position:
        partition, base_offset, count = window.header(position)
        ends = head.end_offsets
        if count and partition < len(ends) and base_offset == ends[partition]:
            scan.index.add_gap(partition, base_offset + count)
            scan.claimed[partition] = base_offset + count
            return
    scan.note_uncertain(following - position)
    if scan.replica:
        scan.note_blind()
