"""Scans a segment from end to end: rebuilds the index and finds damage.

Bytes that are no valid batch are *damage* if a valid batch follows. Otherwise they are the *torn
end* that a write cut short leaves behind. Zeros at the end are neither, because preallocated space
looks so.

The last write group of a journal counts completely or not at all, wherever it is torn: it may lack
its end, its beginning, or any page. So at the journal's end (`open_end`) valid batches of the
damaged group prove nothing, and the torn end begins where that group begins. A batch of a later
group does prove damage: groups are synced one by one, so the damaged one was on the disk.

The search for the following batch trusts the lengths of batches as long as it can. The payload of a
message may contain a valid batch, which must not be taken for one. If no length leads on, a batch
must have the journal's tag (`log.journal.journal`), if that is known.
"""

from typing import Final

from msgspec import Struct, field

from holdfast.log.batch import (
    ATTRIBUTE_GROUPED,
    ATTRIBUTE_MORE,
    ATTRIBUTE_RESET,
    BATCH_BYTES_MAX,
    GROUP_MASK,
    HEAD_BYTES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    Batch,
    CorruptBatch,
    header_damage,
)
from holdfast.log.files.filesystem import ReadFile, may_be_torn
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.reading.segment_reader import ALIGNMENT, Damage

WINDOW_BYTES: Final = 4 << 20
"""The bytes of one read; a longer batch is read as a whole."""


class SegmentScan(Struct):
    """The result of a scan, and its state while it runs."""

    index: ActiveIndex
    end: int = 0
    """The position where the last valid batch ends."""
    damage: list[Damage] = field(default_factory=list)
    torn: Damage | None = None
    uncertain: dict[int, int] = field(default_factory=dict)
    """Partitions that may have lost records to unknown damage, with an upper bound of them."""
    replica: bool = False
    blind: set[int] = field(default_factory=set)
    """The partitions of a replica with records that lost batches may have overridden."""
    claimed: dict[int, int] = field(default_factory=dict)
    """The end of a partition's last damaged batch, according to that batch's own header."""
    tag: int | None = None
    """The journal's tag in the batches; None: they have none."""
    group_start: int = 0
    """The position where the write group of the last valid batch begins."""
    is_group_open: bool = False
    """More batches of that group must follow."""
    changed_end: int = 0
    """The end of a batch behind the synced bytes that was complete and has changed; 0: of none."""

    def note_uncertain(self, length: int) -> None:
        """Notes that these bytes may have contained records of any partition."""
        for partition in range(len(self.index.head.end_offsets)):
            self.uncertain[partition] = self.uncertain.get(partition, 0) + length // HEAD_BYTES

    def check_claim(self, batch: Batch) -> None:
        """Compares a damaged header's end with the next batch: agreement means no other loss."""
        claimed = self.claimed.pop(batch.partition, batch.base_offset)
        if claimed != batch.base_offset and self.replica:
            self.note_blind()

    def enter_group(self, position: int, batch: Batch) -> None:
        self.group_start = position
        self.is_group_open = False
        if batch.attributes & ATTRIBUTE_GROUPED:
            start = group_start(position, batch.group, self.tag)
            if start is None or self.tag is None:
                self.tag = batch.group
            else:
                self.group_start = start
            self.is_group_open = batch.attributes & ATTRIBUTE_MORE != 0

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
    open_end: bool = False,
    tag: int | None = None,
    is_lowest: bool = False,
) -> SegmentScan:
    """Verifies every batch of a segment up to `end` (None: of the file).

    `start_offsets` are the partitions' ends before it; unless `known_start`, a partition's first
    batch decides. In a `replica` a batch may override earlier ones. Damage behind `synced_bytes` is
    the torn end, even if valid batches follow; None: all was synced. With `open_end` the journal's
    last group may be torn. `tag` is the journal's, if earlier segments show it. `is_lowest`: see
    `ActiveIndex`.
    """
    index = ActiveIndex(sequence, start_offsets, is_lowest=is_lowest)
    scan = SegmentScan(index, replica=replica, tag=tag)
    window = _Window(file, file.size() if end is None else end)
    seen: set[int] = set()
    position = 0
    looked_again = -1
    while position + HEADER_BYTES <= window.end:
        try:
            batch = window.batch(position)
            if not known_start:
                _begin_partition(index, batch, seen)
            _check_position(scan, batch)
        except CorruptBatch as error:
            following = None
            if synced_bytes is not None and position >= synced_bytes:
                scan.changed_end = window.changed_end(position) or scan.changed_end
                synced_bytes = max(synced_bytes, scan.changed_end)
            if synced_bytes is None or position < synced_bytes:
                following = _after_damage(window, scan, position, open_end=open_end)
            is_damage = following is not None or scan.changed_end > position
            if is_damage and looked_again != position:
                looked_again = position
                if window.has_changed(position):
                    # The file is being written: this batch and the next came meanwhile.
                    continue
            if following is not None and open_end:
                following = following if _later_group(window, scan, position, following) else None
            if following is None:
                if open_end and scan.is_group_open:
                    break
                if synced_bytes is not None and position < synced_bytes:
                    scan.note_blind()
                scan.torn = _torn_end(window, sequence, position, str(error))
                scan.finish()
                return scan
            scan.damage.append(Damage(sequence, position, following - position, str(error)))
            _note_lost(scan, window, position, following)
            scan.is_group_open = False
            position = following
            continue
        scan.check_claim(batch)
        index.add_parsed(position, batch)
        if not batch.count:
            scan.blind.discard(batch.partition)
        scan.uncertain.pop(batch.partition, None)
        scan.enter_group(position, batch)
        scan.end = position = position + batch.length
    if open_end and scan.is_group_open:
        # The scan is repeated up to the start of the group, because the index has that already.
        begins = scan.group_start
        scan = scan_segment(
            file, sequence, start_offsets, begins, known_start=known_start, replica=replica, tag=tag
        )
        reason = f"a write group was cut short at {position}"
        scan.torn = Damage(sequence, begins, window.end - begins, reason)
        return scan
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
        """The verified batch at `position`. Raises `CorruptBatch` if there is none."""
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
        """The length in a consistent header; 0 if the header is not consistent."""
        if position + HEADER_BYTES > self.end:
            return 0
        inside = self._load(position, HEADER_BYTES)
        if len(self._data) - inside < HEADER_BYTES:
            return 0
        header = HEADER.unpack_from(self._data, inside)
        magic, length, _, layout, attributes, _, _, _, count, _, body_bytes, _ = header
        if not count and not attributes & ATTRIBUTE_RESET:
            return 0
        return 0 if header_damage(magic, length, layout, count, body_bytes) else int(length)

    def changed_end(self, position: int) -> int:
        """The end of the damaged batch at `position`, as far as its header shows, if it was written
        completely; otherwise 0."""
        length = self.claimed_length(position) or HEADER_BYTES
        inside = self._load(position, length)
        data = self._data[inside : inside + length]
        return 0 if len(data) < length or may_be_torn(data, position) else position + length

    def group(self, position: int) -> int | None:
        """The group field of the header at `position`; None if it has none."""
        inside = self._load(position, HEADER_BYTES)
        return group_field(self._data[inside : inside + HEADER_BYTES])

    def header(self, position: int) -> tuple[int, int, int]:
        """The partition, base offset and count, unverified."""
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
        """True if a valid batch is at `position` now, although an earlier read showed none."""
        self._data = b""
        return self.is_batch(position)

    def find_magic(self, position: int) -> int:
        """The next magic at or after `position`, at a multiple of ALIGNMENT; -1 without one."""
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
        """Loads these bytes into `_data`, fewer at the file's end; returns the first's index."""
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


def _begin_partition(index: ActiveIndex, batch: Batch, seen: set[int]) -> None:
    partition = batch.partition
    if partition < len(index.head.end_offsets) and partition not in seen:
        seen.add(partition)
        index.head.start_offsets[partition] = index.head.end_offsets[partition] = batch.base_offset


def _check_position(scan: SegmentScan, batch: Batch) -> None:
    """Checks that a valid batch can be in this place. Raises `CorruptBatch` if it cannot."""
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


def group_field(header: bytes) -> int | None:
    """The group field of a batch header, unverified; None if it has none."""
    if len(header) < HEADER_BYTES or header[: len(MAGIC)] != MAGIC:
        return None
    fields = HEADER.unpack(header)
    return int(fields[11]) if fields[4] & ATTRIBUTE_GROUPED else None


def group_start(position: int, group: int, tag: int | None) -> int | None:
    """The position where the group of a batch at `position` begins; None if the tag differs."""
    start = position if tag is None else position - ((group - tag) & GROUP_MASK)
    return start if start >= 0 else None


def _later_group(window: _Window, scan: SegmentScan, position: int, at: int | None) -> bool:
    """True if the batch at `at`, or a later one, is of a group that begins after the damage."""
    tag = scan.tag
    while at is not None:
        group = window.group(at)
        if group is None:
            return True
        if tag is None and window.claimed_length(position):
            tag = window.group(position)
        if tag is None:
            # The tag is unknown. If these are batches of one group, it is the only one after the
            # damage, and nothing shows that it was ever synced.
            tag = (group - (at - position)) & GROUP_MASK
        start = group_start(at, group, tag)
        if start is not None and start > position:
            return True
        following = at + window.claimed_length(at)
        if not window.is_batch(following):
            at = _after_damage(window, scan, following, open_end=True, damage_at=position)
        else:
            at = following
    return False


def _after_damage(
    window: _Window,
    scan: SegmentScan,
    position: int,
    *,
    open_end: bool,
    damage_at: int | None = None,
) -> int | None:
    """The position of the next valid batch, or None. The damage begins at `damage_at` or
    `position`."""
    at = position
    length = window.claimed_length(at)
    while length:
        at += length
        if at > window.end:
            # The write of this batch was cut short, so its bytes are payload.
            return None
        if window.is_batch(at):
            return at
        length = window.claimed_length(at)
    at = window.find_magic(at + ALIGNMENT if at == position else at)
    begins = position if damage_at is None else damage_at
    while at >= 0:
        if (
            window.is_batch(at)
            and _is_near(window, scan.index, begins, at)
            and (not open_end or _has_tag(window, scan, begins, at))
        ):
            return at
        at = window.find_magic(at + ALIGNMENT)
    return None


def _has_tag(window: _Window, scan: SegmentScan, damage_at: int, at: int) -> bool:
    """True if a batch found by its magic belongs to the damaged group, or begins one. The group
    field of any other batch could be guessed by a publisher."""
    if scan.tag is None:
        return True
    group = window.group(at)
    if group is None:
        return False
    begins = scan.group_start if scan.is_group_open else damage_at
    return group_start(at, group, scan.tag) in (at, begins)


def _is_near(window: _Window, index: ActiveIndex, position: int, at: int) -> bool:
    """True if the offset of a batch found by its magic can follow the damaged bytes."""
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
    """Notes the offsets that a damaged place has lost, as far as its own header is credible."""
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
