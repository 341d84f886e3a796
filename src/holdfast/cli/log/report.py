"""Examines a whole data directory: its content, and everything that is wrong with it.

A *problem* must not exist after any crash: damage, missing or repeated offsets, a wrong index, an
unusable snapshot, or a journal that begins behind the newest usable one. A *note* is harmless: an
unfinished tail, a missing index, or records that a replica has replaced by its leader's.
"""

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from holdfast.cli.log.records import time_text
from holdfast.cli.text import count_text, size_text, table
from holdfast.log.batch import ATTRIBUTE_RESET, Batch
from holdfast.log.files.filesystem import ReadFile
from holdfast.log.files.layout import JOURNAL, QUARANTINE, START, DataDirectory
from holdfast.log.journal.active_index import ActiveIndex
from holdfast.log.reading.index import IndexHead, SegmentIndex
from holdfast.log.reading.index_file import CorruptIndex, decode
from holdfast.log.reading.segment_reader import Damage, SegmentReader, is_zero
from holdfast.log.snapshot import CorruptSnapshot, Snapshot


def index_difference(data: bytes, rebuilt: ActiveIndex) -> str:
    """Returns the first difference of an .idx file from its segment, "" if there is none."""
    try:
        stored = decode(data)
    except CorruptIndex as error:
        return str(error)
    for name, found, expected in _compared(stored, rebuilt):
        if found != expected:
            return f"wrong {name}: the index says {found}, the segment {expected}"
    return _topic_difference(stored, rebuilt)


def _compared(stored: SegmentIndex, rebuilt: SegmentIndex) -> list[tuple[str, object, object]]:
    """Returns triples (name, found, expected), with single values instead of arrays.

    The ends are left out: they include damaged records, which the segment alone does not show.
    """
    pairs: list[tuple[str, object, object]] = [
        ("number of batches", stored.batch_count(), rebuilt.batch_count()),
        ("number of records", stored.head.records, rebuilt.head.records),
        ("first time", stored.head.first_timestamp_us, rebuilt.head.first_timestamp_us),
        ("last time", stored.head.last_timestamp_us, rebuilt.head.last_timestamp_us),
    ]
    arrays: list[tuple[str, array[int], array[int]]] = [
        ("base offset", stored.base_offsets, rebuilt.base_offsets),
        ("first time", stored.first_timestamps_us, rebuilt.first_timestamps_us),
        ("position", stored.positions, rebuilt.positions),
        ("count", stored.counts, rebuilt.counts),
        ("last time", stored.last_deltas_us, rebuilt.last_deltas_us),
        ("partition", stored.partitions, rebuilt.partitions),
        ("attributes", stored.attributes, rebuilt.attributes),
    ]
    for partition, numbers in enumerate(stored.by_partition):
        arrays.append((f"batch of partition {partition}", numbers, rebuilt.by_partition[partition]))
    for name, found, expected in arrays:
        if found != expected:
            pairs.append((f"number of {name}s", len(found), len(expected)))
            for number, value in enumerate(found[: len(expected)]):
                pairs.append((f"{name} of batch {number}", value, expected[number]))
    return pairs


def _topic_difference(stored: SegmentIndex, rebuilt: SegmentIndex) -> str:
    if stored.topic_count() != rebuilt.topic_count():
        return f"{stored.topic_count()} topics, the segment has {rebuilt.topic_count()}"
    for number in range(stored.topic_count()):
        topic = stored.topic(number)
        known = rebuilt.find_topic(topic)
        if known < 0:
            return f"topic {topic!r}, which no message of the segment has"
        if stored.find_topic(topic) != number:
            return f"topic {topic!r} is out of order"
        if stored.postings(number) != rebuilt.postings(known):
            return f"other messages for topic {topic!r} than the segment has"
    return ""


@dataclass
class SegmentReport:
    """One segment, with the findings in it."""

    sequence: int
    size_bytes: int
    batches: int = 0
    records: int = 0
    first_us: int | None = None
    last_us: int | None = None
    missing: int = 0
    """Offsets missing in this segment or directly before it."""
    superseded: int = 0
    """Records of a replica that later records in this segment replace."""
    damage_bytes: int = 0
    unfinished_bytes: int = 0
    index: str = ""
    """The problem of its index, or "". The newest segment has no index."""

    @property
    def name(self) -> str:
        return f"{self.sequence:020d}.log"

    @property
    def index_name(self) -> str:
        return f"{self.sequence:020d}.idx"


@dataclass
class PartitionReport:
    """The offsets and records of one partition."""

    start: int
    """The offset of the first existing record."""
    end: int
    records: int = 0


@dataclass
class SnapshotReport:
    """One snapshot, with the reason if it is unusable."""

    sequence: int
    size_bytes: int
    error: str = ""
    created_us: int | None = None
    entries: int | None = None

    @property
    def name(self) -> str:
        return f"{self.sequence:020d}.snap"


@dataclass
class DirectoryReport:
    """The result of an examination."""

    path: str
    node_id: str
    partition_count: int
    created: str
    epoch: int
    """The newest valid epoch of a shared directory, 0 for others."""
    epoch_node_id: str
    """The node that holds or held the lease in that epoch."""
    segments: list[SegmentReport] = field(default_factory=list)
    partitions: dict[int, PartitionReport] = field(default_factory=dict)
    """The partitions that the log mentions. One that was forgotten may have no record."""
    snapshots: list[SnapshotReport] = field(default_factory=list)
    quarantine: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def examine(directory: DataDirectory, path: Path, *, deep: bool) -> DirectoryReport:
    """Examines a directory. `deep`: read every byte, even if an index fits its segment's length."""
    manifest = directory.manifest
    epoch = directory.epoch
    report = DirectoryReport(
        str(path),
        manifest.node_id,
        manifest.partitions,
        manifest.created,
        epoch.number,
        epoch.node_id,
    )
    # Snapshots first: a snapshot that appears later needs records beyond the end read here.
    _examine_snapshots(directory, report, newer_than=-1)
    _JournalExaminer(directory, report, deep=deep).run()
    if report.segments and _newest_usable_snapshot(report) < report.segments[0].sequence:
        # Retention may have written a snapshot after that, and removed the segments before it.
        seen = max((snapshot.sequence for snapshot in report.snapshots), default=-1)
        _examine_snapshots(directory, report, newer_than=seen)
    _check_snapshots(report)
    report.quarantine = directory.files.list(QUARANTINE)
    return report


@dataclass(frozen=True)
class _Missing:
    """Missing offsets of a partition, in a segment or before it."""

    partition: int
    start: int
    end: int
    problem: str
    """The text in the report."""
    segment: int
    """The number of segments before that one."""


class _JournalExaminer:
    """Examines the segments, oldest first, with the state that the next one must continue."""

    def __init__(self, directory: DataDirectory, report: DirectoryReport, *, deep: bool) -> None:
        self.directory = directory
        self.report = report
        self.deep = deep
        self.sequence: int | None = None
        """The required name of the next segment, if it is known."""
        self.ends: dict[int, int] = {}
        """Per partition the next expected offset, if it is known."""
        self.gaps: list[_Missing] = []

    def run(self) -> None:
        sequences = self.directory.segments()
        # Read after the listing: retention writes it before it removes older segments.
        first = self._expect_start(sequences)
        sequences = [sequence for sequence in sequences if sequence >= first]
        for sequence in sequences:
            try:
                self._examine_segment(sequence, newest=sequence == sequences[-1])
            except FileNotFoundError:
                # Retention removes the oldest segments during the examination.
                self.sequence = None
                self.ends.clear()

    def _expect_start(self, sequences: list[int]) -> int:
        """Returns the first segment. Those before it are removed, but for their files: retention
        was interrupted. More of them may be missing, and are no damage."""
        start = self.directory.read_start()
        if start is None:
            if START.rpartition("/")[2] in self.directory.files.list(JOURNAL):
                self.report.problems.append(f"{START}: damaged; retention writes it again")
            elif sequences and sequences[0] == 0:
                start = 0, [0] * self.directory.manifest.partitions
        if start is None:
            return 0
        if sequences:
            self.sequence = start[0]
            self.ends = dict(enumerate(start[1]))
        return start[0]

    def _examine_segment(self, sequence: int, *, newest: bool) -> None:
        reader = SegmentReader(self.directory, sequence)
        segment = SegmentReport(sequence, reader.file.size())
        if self.sequence is not None and sequence != self.sequence:
            self._report_wrong_sequence(segment, sequence - self.sequence)
        head = None if newest else self._index_head(segment, reader)
        if head is not None and not self.deep:
            self._enter_head(segment, head)
        else:
            self._scan(segment, reader, head, newest=newest)
        self.report.segments.append(segment)
        self.sequence = sequence + segment.records + segment.missing

    def _index_head(self, segment: SegmentReport, reader: SegmentReader) -> IndexHead | None:
        try:
            head = self.directory.read_index_head(segment.sequence)
        except CorruptIndex as error:
            segment.index = str(error)
        else:
            if head is None:
                segment.index = "missing"
                self.report.notes.append(f"{segment.name}: no index; the next start builds it")
                return None
            segment.index = _head_mismatch(head, reader.file, self.report.partition_count)
            if not segment.index:
                return head
        self.report.problems.append(f"{segment.index_name}: {segment.index}")
        return None

    def _enter_head(self, segment: SegmentReport, head: IndexHead) -> None:
        segment.batches = head.batches
        segment.records = head.records
        if head.records:
            segment.first_us = head.first_timestamp_us
            segment.last_us = head.last_timestamp_us
        missing = [0] * len(head.start_offsets)
        for gap in head.gaps:
            missing[gap.partition] += gap.end - gap.start
            self._report_gap(segment.name, gap.partition, gap.start, gap.end)
        segment.missing = sum(missing)
        segment.superseded = head.void
        if head.void and self.directory.manifest.is_replica:
            self.report.notes.append(
                f"{segment.name}: {head.void} records are superseded by others in it"
            )
        for number, start in enumerate(head.start_offsets):
            end = head.end_offsets[number]
            segment.missing += self._check_offset(number, start, segment.name)
            if number in head.resets:
                start = head.resets[number]
                segment.missing -= self._begin_anew(segment.name, number, start)
            self.ends[number] = end
            if end > start:
                partition = self._partition(number, start)
                partition.end = end
                partition.records += end - start - missing[number]

    def _scan(
        self,
        segment: SegmentReport,
        reader: SegmentReader,
        head: IndexHead | None,
        *,
        newest: bool,
    ) -> None:
        starts = [0] * self.report.partition_count if head is None else head.start_offsets
        if head is None and self.directory.manifest.is_replica:
            starts = [self.ends.get(number, 0) for number in range(len(starts))]
        rebuilt = ActiveIndex(segment.sequence, starts)
        for item in reader.read(newest=newest):
            if isinstance(item, Damage):
                segment.damage_bytes += item.length
                self.report.problems.append(str(item))
            else:
                self._enter(segment, item, reader.position - item.length, rebuilt)
        segment.size_bytes = reader.file.size()
        segment.unfinished_bytes = reader.unfinished_bytes
        if reader.unfinished_bytes:
            self.report.notes.append(
                f"{segment.name} at {reader.position}: the last {reader.unfinished_bytes} bytes are"
                " no whole batch: a write that goes on, or that a crash cut off"
            )
        data = None if head is None else self.directory.read_index(segment.sequence)
        # After damage the index may describe the records before it or only those left.
        if data is not None and not segment.damage_bytes:
            segment.index = index_difference(data, rebuilt)
            if segment.index:
                self.report.problems.append(f"{segment.index_name}: {segment.index}")

    def _enter(
        self, segment: SegmentReport, batch: Batch, position: int, rebuilt: ActiveIndex
    ) -> None:
        where = f"{segment.name} at {position}"
        if batch.partition >= self.report.partition_count:
            self.report.problems.append(
                f"{where}: partition {batch.partition}, the directory has"
                f" {self.report.partition_count}"
            )
            return
        rebuilt.add_parsed(position, batch)
        segment.batches = rebuilt.batch_count()
        segment.records = rebuilt.head.records
        segment.first_us = rebuilt.head.first_timestamp_us
        segment.last_us = rebuilt.head.last_timestamp_us
        segment.superseded = rebuilt.head.void
        if batch.attributes & ATTRIBUTE_RESET and self.directory.manifest.is_replica:
            segment.missing -= self._begin_anew(where, batch.partition, batch.base_offset)
            return
        epoch = batch.epoch
        segment.missing += self._check_offset(batch.partition, batch.base_offset, where, epoch)
        partition = self._partition(batch.partition, batch.base_offset)
        partition.end = max(partition.end, batch.end_offset)
        partition.records += batch.count
        self.ends[batch.partition] = partition.end

    def _partition(self, number: int, start: int) -> PartitionReport:
        return self.report.partitions.setdefault(number, PartitionReport(start, start))

    def _begin_anew(self, where: str, number: int, start: int) -> int:
        """Begins a partition again; returns how many missing offsets of this segment are void."""
        self.report.notes.append(
            f"{where}: partition {number} begins again at offset {start}, earlier records are void"
        )
        self.report.partitions[number] = PartitionReport(start, start)
        self.ends[number] = start
        return self._withdraw_gaps(number, 0)

    def _check_offset(self, partition: int, start: int, where: str, epoch: int = -1) -> int:
        """Returns how many offsets miss before `start`; negative if earlier gaps are void now."""
        expected = self.ends.get(partition, start)
        if start > expected:
            self._report_gap(where, partition, expected, start)
        elif start < expected and self.directory.manifest.is_replica:
            by = f" by epoch {epoch}" if epoch >= 0 else ""
            self.report.notes.append(
                f"{where}: offsets {start} to {expected} of partition {partition} before it are"
                f" superseded{by}"
            )
            known = self._partition(partition, start)
            known.records -= expected - max(start, known.start)
            known.start = min(known.start, start)
            known.end = start
            return -self._withdraw_gaps(partition, start)
        elif start < expected:
            self.report.problems.append(
                f"{where}: offset {start} of partition {partition} again, after {expected} was"
                " reached"
            )
        return max(0, start - expected)

    def _report_gap(self, where: str, partition: int, start: int, end: int) -> None:
        problem = f"{where}: offsets {start} to {end} of partition {partition} are missing"
        self.report.problems.append(problem)
        self.gaps.append(_Missing(partition, start, end, problem, len(self.report.segments)))

    def _withdraw_gaps(self, partition: int, offset: int) -> int:
        """Withdraws gaps truncated anyway. Returns how many offsets are of this segment."""
        here = 0
        for gap in [gap for gap in self.gaps if gap.partition == partition and gap.start >= offset]:
            self.gaps.remove(gap)
            self.report.problems.remove(gap.problem)
            if gap.segment == len(self.report.segments):
                here += gap.end - gap.start
        return here

    def _report_wrong_sequence(self, segment: SegmentReport, missing: int) -> None:
        what = (
            f"{missing} records before it are missing"
            if missing > 0
            else f"{-missing} records more than expected lie before it"
        )
        self.report.problems.append(f"{segment.name}: {what}")


def _head_mismatch(head: IndexHead, segment: ReadFile, partitions: int) -> str:
    """Returns why an index cannot belong to its segment, "" if nothing shows that."""
    size_bytes = segment.size()
    if head.log_bytes > size_bytes or not is_zero(segment, head.log_bytes, size_bytes):
        return f"it covers {head.log_bytes} bytes of a segment of {size_bytes}"
    if len(head.start_offsets) != partitions:
        return f"it has {len(head.start_offsets)} partitions, the directory {partitions}"
    return ""


def _examine_snapshots(
    directory: DataDirectory, report: DirectoryReport, *, newer_than: int
) -> None:
    for sequence in directory.snapshots():
        if sequence > newer_than:
            # An older snapshot is removed when a newer one exists.
            with contextlib.suppress(FileNotFoundError):
                report.snapshots.append(_examine_snapshot(directory, sequence))


def _newest_usable_snapshot(report: DirectoryReport) -> int:
    """Returns the sequence of the newest usable snapshot, 0 if there is none."""
    usable = (snapshot.sequence for snapshot in report.snapshots if not snapshot.error)
    return max(usable, default=0)


def _examine_snapshot(directory: DataDirectory, sequence: int) -> SnapshotReport:
    file = directory.open_snapshot(sequence)
    report = SnapshotReport(sequence, file.size())
    try:
        snapshot = Snapshot(file.read, report.size_bytes)
        report.created_us = snapshot.created_us
        report.entries = snapshot.entry_count
        snapshot.check()
        if snapshot.sequence != sequence:
            report.error = f"it says that it starts at sequence {snapshot.sequence}"
    except (CorruptSnapshot, OSError) as error:
        report.error = str(error)
    return report


def _check_snapshots(report: DirectoryReport) -> None:
    for snapshot in report.snapshots:
        if snapshot.error:
            report.problems.append(f"{snapshot.name}: {snapshot.error}")
    if not report.segments:
        return
    start = report.segments[0].sequence
    newest = _newest_usable_snapshot(report)
    if newest < start:
        found = f"the newest usable snapshot starts at {newest}" if newest else "none is usable"
        report.problems.append(
            f"the journal begins at sequence {start} and needs a snapshot from there on, but"
            f" {found}: older sessions and retained messages cannot be restored whole"
        )
    end = report.segments[-1].sequence + report.segments[-1].records
    report.notes.extend(
        f"{snapshot.name}: it starts beyond the journal's end, sequence {end}"
        for snapshot in report.snapshots
        if not snapshot.error and snapshot.sequence > end
    )


_RIGHT: Final = frozenset(
    {"sequence", "partition", "start", "end", "records", "batches", "entries", "missing", "size"}
)
"""The columns of numbers."""


def report_lines(report: DirectoryReport) -> list[str]:
    """Returns the report as lines for people."""
    return [
        *_summary(report),
        *_section("segments", _segment_rows(report)),
        *_section("partitions", _partition_rows(report)),
        *_section("snapshots", _snapshot_rows(report)),
        *_list("quarantine", report.quarantine),
        *_list("problems", report.problems),
        *_list("notes", report.notes),
    ]


_PARTITION_COLUMNS: Final = ("partition", "start", "end", "records", "missing")


def _summary(report: DirectoryReport) -> Iterator[str]:
    segments = report.segments
    records = sum(segment.records for segment in segments)
    yield f"data directory  {report.path}"
    yield f"node            {report.node_id}, created {report.created}"
    if report.epoch:
        yield f"epoch           {report.epoch}, of node {report.epoch_node_id}"
    with_records = sum(partition.records > 0 for partition in report.partitions.values())
    yield f"partitions      {report.partition_count}, {with_records} with records"
    size = size_text(sum(segment.size_bytes for segment in segments))
    counts = f"{count_text(records, 'record')} in {count_text(len(segments), 'segment')}"
    yield f"journal         {counts}, {size}"
    if segments:
        end = segments[-1].sequence + segments[-1].records
        yield f"sequences       {segments[0].sequence} to {end}"
    times = [segment for segment in segments if segment.first_us is not None]
    if times:
        first = min(segment.first_us or 0 for segment in times)
        last = max(segment.last_us or 0 for segment in times)
        yield f"times           {time_text(first)} to {time_text(last)}"
    yield f"damage          {len(report.problems) or 'none'}"


def _segment_rows(report: DirectoryReport) -> Iterator[dict[str, str]]:
    for segment in report.segments:
        yield {
            "sequence": str(segment.sequence),
            "records": str(segment.records),
            "batches": str(segment.batches),
            "size": size_text(segment.size_bytes),
            "first time": _optional_time(segment.first_us),
            "last time": _optional_time(segment.last_us),
            "state": _segment_state(segment),
        }


def _segment_state(segment: SegmentReport) -> str:
    states = []
    if segment.damage_bytes:
        states.append(f"{segment.damage_bytes} bytes damaged")
    if segment.unfinished_bytes:
        states.append(f"{segment.unfinished_bytes} bytes unfinished")
    if segment.superseded:
        states.append(f"{segment.superseded} records superseded")
    if segment.missing:
        states.append(f"{segment.missing} records missing")
    if segment.index:
        states.append(f"index {'missing' if segment.index == 'missing' else 'wrong'}")
    return ", ".join(states) or "whole"


def _partition_rows(report: DirectoryReport) -> Iterator[dict[str, str]]:
    for number, partition in sorted(report.partitions.items()):
        missing = partition.end - partition.start - partition.records
        counts = (number, partition.start, partition.end, partition.records, missing)
        if partition.end:
            yield dict(zip(_PARTITION_COLUMNS, map(str, counts), strict=True))


def _snapshot_rows(report: DirectoryReport) -> Iterator[dict[str, str]]:
    for snapshot in report.snapshots:
        yield {
            "sequence": str(snapshot.sequence),
            "entries": "-" if snapshot.entries is None else str(snapshot.entries),
            "size": size_text(snapshot.size_bytes),
            "created": _optional_time(snapshot.created_us),
            "state": snapshot.error or "whole",
        }


def _optional_time(timestamp_us: int | None) -> str:
    return "-" if timestamp_us is None else time_text(timestamp_us)


def _section(title: str, rows: Iterator[dict[str, str]]) -> Iterator[str]:
    """Returns a table with the columns of its rows, or nothing without rows."""
    return _list(title, list(table(list(rows), _RIGHT)))


def _list(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield title
        yield from (f"  {line}" for line in lines)
