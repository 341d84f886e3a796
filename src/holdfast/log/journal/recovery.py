"""Opens a journal from the files that a crash or a bad disk has left.

- A sealed segment is trusted if its index is valid (checksum of the head, length of the segment).
  Otherwise it is scanned and its index is built again.
- The last segment is always scanned. Its torn end is cut off: no record in it was acknowledged. A
  write group is kept or cut off completely, see `journal.journal` and `reading.scan`.
- An end below the offsets of the newest snapshot is damage, too. A snapshot gets its name when all
  records before it are on the disk. Without this rule, rot in the last group would be taken for a
  torn end.
- A damaged place that valid batches follow is copied to quarantine, reported, and stays where it
  is. Its offsets are missing from then on, and never given to other records.
- After a failed sync, the bytes may be in the page cache and nowhere else. The system counts them
  as written and does not sync them again. So bytes that may not be on the disk are written again,
  in place, before they count: the last group, because the one before was synced; in a replica
  everything behind the checkpoint. Counter-example: the group whose sync failed is read after the
  restart, its repetition is acknowledged, and a power cut takes it.
- In a replica's directory batches may override earlier ones, see `log.reading.index`. The
  checkpoint of the watermarks has the committed offsets and the synced length of the last segment.
  Damage behind that length is a torn end, if an interrupted write may have left it. Other damage
  makes partitions unsure: all of them if it does not show which. They must get the missing records
  from other replicas.

Damage never prevents a start; an OSError from the disk is passed on.
"""

import errno
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import lt
from typing import Final

from msgspec import Struct, field

from holdfast.log.batch import ATTRIBUTE_STATE, HEADER_BYTES, Batch, CorruptBatch
from holdfast.log.files.layout import DataDirectory, segment_name
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.journal.journal import SEGMENT_BYTES_DEFAULT, Journal
from holdfast.log.journal.segment import Segment
from holdfast.log.journal.watermarks import Checkpoint
from holdfast.log.reading.index import DamagedOffsets, IndexHead, SegmentIndex
from holdfast.log.reading.index_file import CorruptIndex
from holdfast.log.reading.scan import (
    SegmentScan,
    group_field,
    group_start,
    scan_segment,
)
from holdfast.log.reading.segment_reader import Damage
from holdfast.log.reading.segment_store import OnDamage, SegmentStore, quarantine
from holdfast.log.record import Record
from holdfast.log.snapshot import CorruptSnapshot, Snapshot

READ_BYTES: Final = 1 << 20


class OpenedJournal(Struct):
    """An opened journal, and the repairs that opening it needed."""

    journal: Journal
    store: SegmentStore
    damage: list[Damage] = field(default_factory=list)
    """The damage found by this scan; that of earlier scans is in the `gaps` of the segments."""
    truncated: Damage | None = None
    """The torn end of the last segment."""
    rebuilt: list[int] = field(default_factory=list)
    """The segments whose index was missing or damaged."""
    removed: list[int] = field(default_factory=list)
    """The segments that an interrupted retention had already given up."""
    scanned_bytes: int = 0
    rewritten_bytes: int = 0
    """The bytes at the end that were written again, as they may not have been on the disk."""
    tag: int | None = None
    """The journal's tag, if it has one: see `log.journal.journal`."""
    damaged: dict[int, int] = field(default_factory=dict)
    """The partitions of a replica that damage may have left without committed records, or with
    others in their place, and the first such offset. An unsure partition is not in sync, however
    much follows, until it is cut there or reset."""


def open_journal(
    directory: DataDirectory,
    segment_bytes: int = SEGMENT_BYTES_DEFAULT,
    *,
    writes: bool = True,
    on_damage: OnDamage | None = None,
    tag: int = 0,
) -> OpenedJournal:
    """Opens the journal of a directory. `writes` is true for the node that serves it. Otherwise no
    file changes, and an incomplete last group looks like a torn end, because the journal may be
    growing. `on_damage` is called, in the reading thread, for damage that reads find later. `tag`
    is for a journal without one; it is below 2**32 and must not be guessable."""
    return _Opener(directory, segment_bytes, writes, on_damage, tag).open()


class _Opener:
    def __init__(
        self,
        directory: DataDirectory,
        segment_bytes: int,
        writes: bool,
        on_damage: OnDamage | None,
        new_tag: int,
    ) -> None:
        self._tag: int | None = None
        self._new_tag = new_tag
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._writes = writes
        partitions = directory.manifest.partitions
        self._replica = directory.manifest.is_replica
        self._segments: list[Segment] = []
        self._ends = [0] * partitions
        self._known_start = True
        self._uncertain: dict[int, int] = {}
        self._blind: set[int] = set()
        self._checkpoint = directory.read_checkpoint()
        # The checkpoint for the next opening: later than that if damage proves a later write.
        self._proven = self._checkpoint
        self._result = OpenedJournal(
            Journal(partitions, segment_bytes, replicated=self._replica, tag=new_tag),
            SegmentStore(directory, writes=writes, on_damage=on_damage),
        )

    def open(self) -> OpenedJournal:
        directory = self._directory
        # The snapshot is read before the journal. In a directory that is served both grow, and a
        # later snapshot would cover records that this opening has not seen.
        vouched = None if self._replica else self._newest_snapshot()
        if self._writes:
            directory.remove_temporary_files()
            # A process that was killed may not have synced the names.
            directory.sync_names()
        start = directory.read_start()
        sequences = directory.segments()
        if self._writes:
            for orphan in set(directory.indexes()) - set(sequences):
                directory.remove_segment(orphan)
        if start is not None:
            self._ends = list(start[1])
            sequences = self._without_removed(sequences, start[0])
        result = self._result
        if not sequences:
            first = 0 if start is None else start[0]
            if vouched is not None:
                self._ends = [max(pair) for pair in zip(self._ends, vouched.offsets, strict=True)]
                first = max(first, vouched.sequence)
            if first or any(self._ends):
                result.journal.continue_at(self._ends, first)
            return result
        self._known_start = start is not None or sequences[0] == 0
        for at, sequence in enumerate(sequences[:-1]):
            self._open_sealed(sequence, sequences[at + 1])
            head = self._segments[-1].head
            # Gaps do not show it: later batches may have overridden them.
            head.missing = sequences[at + 1] - sequence - head.records
            self._known_start = True
        self._tag = self._find_tag(sequences[:-1])
        self._open_last(sequences[-1], vouched)
        result.journal = Journal(
            directory.manifest.partitions,
            self._segment_bytes,
            self._segments,
            self._replica,
            directory.read_start_epochs() if self._replica else (),
            self._new_tag if self._tag is None else self._tag,
        )
        result.tag = self._tag
        if self._replica:
            result.damaged = self._find_damaged_partitions(result.journal)
            result.journal.begin_checkpoints(self._proven, result.damaged)
        return result

    def _find_damaged_partitions(self, journal: Journal) -> dict[int, int]:
        starts = journal.start_offsets
        unsure = {partition: starts[partition] for partition in self._blind}
        for segment in reversed(journal.segments):
            ends = segment.end_offsets()
            for gap in reversed(segment.gaps()):
                start = max(gap.start, journal.start_offsets[gap.partition])
                if start < min(gap.end, ends[gap.partition]):
                    unsure[gap.partition] = min(start, unsure.get(gap.partition, start))
        return unsure

    def _without_removed(self, sequences: list[int], first: int) -> list[int]:
        gone = [sequence for sequence in sequences if sequence < first]
        if self._writes:
            for sequence in gone:
                self._directory.remove_segment(sequence)
            self._directory.sync_journal()
            self._result.removed = gone
        return [sequence for sequence in sequences if sequence >= first]

    def _open_sealed(self, sequence: int, following: int) -> None:
        file = self._directory.open_segment(sequence)
        size_bytes = file.size()
        head = self._trusted_head(sequence)
        if head is not None and head.log_bytes == size_bytes:
            self._note_shortened(sequence, size_bytes)
            self._follow(head)
            self._segments.append(Segment(sequence, head, None, size_bytes))
            return
        scan = scan_segment(
            file, sequence, self._ends, known_start=self._known_start, replica=self._replica
        )
        index = scan.index
        self._result.rebuilt.append(sequence)
        self._result.scanned_bytes += size_bytes
        if scan.torn is not None:
            # The segment was complete when the next one was begun, so its torn end is damage.
            scan.damage.append(scan.torn)
            scan.note_uncertain(scan.torn.length)
            if self._replica:
                scan.note_blind()
        after = self._trusted_head(following)
        if after is not None:
            self._end_at(index, after.start_offsets)
            scan.uncertain.clear()
        index.head.log_bytes = size_bytes
        self._take_over(scan)
        self._segments.append(Segment(sequence, index.head, None, size_bytes))
        # Without an index, the next opening scans this segment again. It must, because the damage
        # may have overridden earlier records.
        if self._writes and not scan.blind:
            self._directory.write_index(sequence, index.encode(self._result.store.pause))

    def _newest_snapshot(self) -> Snapshot | None:
        try:
            sequences = self._directory.snapshots()
        except FileNotFoundError:
            return None
        for sequence in reversed(sequences):
            try:
                file = self._directory.open_snapshot(sequence)
                snapshot = Snapshot(file.read, file.size())
            except (OSError, CorruptSnapshot):
                continue
            if len(snapshot.offsets) == len(self._ends):
                return snapshot
        return None

    def _open_last(self, sequence: int, vouched: Snapshot | None) -> None:
        file = self._directory.open_segment(sequence)
        size_bytes = file.size()
        scan = scan_segment(
            file,
            sequence,
            self._ends,
            known_start=self._known_start,
            replica=self._replica,
            synced_bytes=self._synced_bytes(sequence),
            open_end=not self._replica,
            tag=self._tag,
            is_lowest=self._replica and sequence > 0 and not self._segments,
        )
        self._tag = scan.tag
        self._result.scanned_bytes += size_bytes
        ends = scan.index.head.end_offsets
        if vouched is not None and any(map(lt, ends, vouched.offsets)):
            self._note_missing(scan, vouched)
        elif scan.torn is not None:
            self._result.truncated = scan.torn
        self._take_over(scan)
        self._note_shortened(sequence, size_bytes)
        if scan.changed_end:
            # The damage is cut off here, and the next opening must know that it was there.
            offsets = list(self._checkpoint.offsets)
            for partition in scan.index.head.resets:
                offsets[partition] = 0
            self._proven = Checkpoint(offsets, sequence, scan.changed_end)
            if self._writes:
                self._directory.write_watermarks(self._proven)
        if not self._replica:
            for partition, records in self._uncertain.items():
                scan.index.add_gap(partition, self._ends[partition] + records)
        segment = Segment(sequence, scan.index.head, scan.index, scan.end)
        self._segments.append(segment)
        if self._writes:
            self._end_file(segment, scan, size_bytes)

    def _note_missing(self, scan: SegmentScan, vouched: Snapshot) -> None:
        """Notes that the journal ends before records that a snapshot covers. Their offsets stay
        empty, and so do those of as many records as may have followed them."""
        index = scan.index
        for partition, end in enumerate(vouched.offsets):
            if index.head.end_offsets[partition] < end:
                index.add_gap(partition, end)
        torn = scan.torn
        reason = f"it ends before what snapshot {vouched.sequence:020d} has seen"
        if torn is None:
            scan.damage.append(Damage(index.head.sequence, scan.end, 0, reason))
        else:
            scan.note_uncertain(torn.length)
            reason = f"{torn.reason}; {reason}"
            scan.damage.append(Damage(torn.segment, torn.position, torn.length, reason))

    def _find_tag(self, sequences: list[int]) -> int | None:
        """The journal's tag, from the newest of these segments that begins with a marked group."""
        for sequence in reversed(sequences):
            header = self._directory.open_segment(sequence).read(0, HEADER_BYTES)
            tag = group_field(header)
            if tag is not None:
                return tag
        return None

    def _synced_bytes(self, sequence: int) -> int | None:
        """The bytes of the last segment known to be synced; None: all, as far as is known."""
        if not self._replica:
            return None
        return self._checkpoint.position if self._checkpoint.segment == sequence else 0

    def _note_shortened(self, sequence: int, size_bytes: int) -> None:
        """Notes that durable bytes were damaged, and cut off when the journal was opened before."""
        checkpoint = self._checkpoint
        if self._replica and checkpoint.segment == sequence and checkpoint.position > size_bytes:
            self._blind.update(range(len(self._ends)))

    def _end_file(self, segment: Segment, scan: SegmentScan, size_bytes: int) -> None:
        if scan.torn is not None and scan.torn is self._result.truncated:
            quarantine(self._directory, scan.torn)
        if scan.end < size_bytes:
            file = self._directory.append_to_segment(segment.sequence)
            try:
                file.truncate(scan.end)
            finally:
                file.close()
        synced = self._synced_bytes(segment.sequence)
        if synced is None:
            synced = last_group_start(self._directory, segment, scan.tag)
        self._result.rewritten_bytes = write_again(self._directory, segment, synced)

    def _trusted_head(self, sequence: int) -> IndexHead | None:
        """The head of a segment's index, if it fits the segments before."""
        try:
            head = self._directory.read_index_head(sequence)
        except CorruptIndex:
            return None
        if head is None or len(head.start_offsets) != len(self._ends):
            return None
        if self._known_start and not self._replica:
            for start, end in zip(head.start_offsets, self._ends, strict=True):
                if start < end:
                    return None
        return head

    def _follow(self, head: IndexHead) -> None:
        """Continues after a segment that was not scanned."""
        if self._known_start:
            for partition, end in enumerate(self._ends):
                if head.start_offsets[partition] > end and partition not in head.resets:
                    # A whole segment is missing between the two. Where the log begins again in
                    # this one, the records before it are void.
                    head.gaps.append(DamagedOffsets(partition, end, head.start_offsets[partition]))
                    head.start_offsets[partition] = end
            self._override(head)
        self._ends = list(head.end_offsets)
        self._uncertain.clear()
        self._blind.difference_update(head.resets)

    def _override(self, head: IndexHead) -> None:
        """Voids the records of earlier segments that this one overrides."""
        for partition, start in enumerate(head.start_offsets):
            if start < self._ends[partition]:
                for segment in reversed(self._segments):
                    if segment.end_offsets()[partition] <= start:
                        break
                    segment.override(partition, start)

    def _end_at(self, index: ActiveIndex, offsets: list[int]) -> None:
        for partition, offset in enumerate(offsets):
            if not self._known_start and index.head.end_offsets[partition] == 0:
                index.head.start_offsets[partition] = offset
                index.head.end_offsets[partition] = offset
            index.add_gap(partition, offset)

    def _take_over(self, scan: SegmentScan) -> None:
        head = scan.index.head
        for partition, records in self._uncertain.items():
            # Later records of the partition have shown the length of the damage.
            if head.end_offsets[partition] == self._ends[partition]:
                scan.uncertain[partition] = scan.uncertain.get(partition, 0) + records
        self._uncertain = scan.uncertain
        self._blind.difference_update(head.resets)
        self._blind |= scan.blind
        if self._known_start:
            self._override(head)
        self._ends = list(head.end_offsets)
        self._result.damage.extend(scan.damage)
        if self._writes:
            for damage in scan.damage:
                quarantine(self._directory, damage)


def last_group_start(directory: DataDirectory, segment: Segment, tag: int | None) -> int:
    """The position of the last write group in the last segment; 0 if the batches do not show it."""
    index = segment.index
    if index is None or not index.positions or tag is None:
        return 0
    position = index.positions[-1]
    field = group_field(directory.open_segment(segment.sequence).read(position, HEADER_BYTES))
    if field is None:
        return 0
    start = group_start(position, field, tag)
    return start if start is not None and start in index.positions else 0


def write_again(directory: DataDirectory, segment: Segment, start: int) -> int:
    """Writes the batches of the last segment from `start` on again, and syncs it. Returns the
    number of bytes. Another process that still writes there writes the same bytes. Raises `OSError`
    if a batch changed meanwhile, or the disk fails."""
    index = segment.index
    source = directory.open_segment(segment.sequence)
    file = directory.append_to_segment(segment.sequence)
    written = 0
    try:
        positions = () if index is None else index.positions
        for number in range(bisect_left(positions, start), len(positions)):
            assert index is not None
            position = positions[number]
            data = source.read(position, index.batch_end(number) - position)
            try:
                batch = Batch(data)
            except CorruptBatch as error:
                # The batch was valid when it was scanned. The cache has lost it, and the next start
                # finds that.
                name = segment_name(segment.sequence)
                raise OSError(errno.EIO, f"byte {position} has changed: {error}", name) from None
            file.write(position, [data[: batch.length]])
            written += batch.length
        # A process that was killed may have left records in the page cache only.
        file.sync()
    finally:
        file.close()
    return written


def replay(
    opened: OpenedJournal,
    offsets: Sequence[int] | None = None,
    *,
    limits: Sequence[int] | None = None,
    state_only: bool = True,
) -> Iterator[Record]:
    """The records from `offsets` (per partition; None: the start) up to `limits` (None: the end),
    in journal order. With `state_only`, only batches with a record that recovery must apply are
    read; most are skipped. A batch that has become unreadable is reported and skipped."""
    journal = opened.journal
    first = list(journal.start_offsets)
    if offsets is not None:
        first = [max(pair) for pair in zip(first, offsets, strict=True)]
    for segment in journal.segments:
        ends = segment.end_offsets()
        if limits is not None:
            ends = [min(pair) for pair in zip(ends, limits, strict=True)]
        if all(end <= start for end, start in zip(ends, first, strict=True)):
            continue
        index = segment.index
        if index is None:
            index = opened.store.load_index(segment)
        for number, batch in _batches(opened.store, segment, index, first, ends, state_only):
            start = first[batch.partition] - batch.base_offset
            end = min(index.counts[number], ends[batch.partition] - batch.base_offset)
            for inside in range(max(0, start), end):
                yield batch.record(inside)


def _batches(
    store: SegmentStore,
    segment: Segment,
    index: SegmentIndex,
    first: list[int],
    ends: list[int],
    state_only: bool,
) -> Iterator[tuple[int, Batch]]:
    """The batches in this range, each with its number in the index."""
    file = store.open_segment(segment.sequence)
    window = b""
    window_start = 0
    for number, attributes in enumerate(index.attributes):
        if state_only and not attributes & ATTRIBUTE_STATE:
            continue
        base = index.base_offsets[number]
        count = index.counts[number]
        partition = index.partitions[number]
        if not count or base + count <= first[partition] or base >= ends[partition]:
            continue
        position = index.positions[number]
        end = index.batch_end(number)
        if position < window_start or end > window_start + len(window):
            window = file.read(position, max(end - position, READ_BYTES))
            window_start = position
        try:
            yield number, Batch(window, position - window_start)
        except CorruptBatch as error:
            store.note_damage(segment, position, end - position, str(error))
