"""Tracks reads of the log that several nodes work on: how far each is, and what it needs next."""

from collections.abc import Iterable
from typing import Final

from holdfast.log.partition import partition_of
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.reading.starts import TOPICS_MAX, FoundStart
from holdfast.log.record import Record
from holdfast.node.effects import FetchInflight, FindStarts, Found, ReadLog
from holdfast.node.reads.fetch_frames import StartEntry
from holdfast.node.session.connection import OPEN
from holdfast.node.session.session import Session
from holdfast.protocol.topics.names import has_wildcard
from holdfast.protocol.topics.trie import SubscriptionTrie

SHARED_DISTANCE: Final = 2000
"""The most records between the positions of two jobs that share a FETCH."""


class ReadJob:
    """The progress of one read."""

    def __init__(self, effect: ReadLog | FetchInflight | FindStarts) -> None:
        self.effect = effect
        # The nodes whose log had lost a record of the range.
        self.lossy: set[str] = set()
        # The node that has the job next, and the partitions that it reads.
        self.node = ""
        self.partitions: list[int] = []
        self.is_shareable = True
        self.lost = 0
        # ReadLog: the positions and the records so far.
        self.positions: list[int] = []
        self.records: list[Record] = []
        self.size_bytes = 0
        # FetchInflight: the first of the wanted records.
        self.found: Found = []
        # FindStarts: the starts so far, and the partitions that are still to be searched.
        self.starts: list[FoundStart] = []
        self.unsearched: set[int] = set()
        if isinstance(effect, ReadLog):
            self.positions = list(effect.positions)
        elif isinstance(effect, FindStarts):
            self.starts = [FoundStart(effect.limits) for _ in effect.wanted]
            self.unsearched = searched_partitions(effect)

    def needs(self) -> list[int]:
        """The partitions that are still to be read."""
        effect = self.effect
        if isinstance(effect, ReadLog):
            limits = effect.limits
            return [p for p, at in enumerate(self.positions) if at < limits[p]]
        if isinstance(effect, FetchInflight):
            left = effect.wanted[len(self.found) :]
            return [left[0][1]] if left else []
        return sorted(self.unsearched)

    def has_progress(self) -> bool:
        """Whether an answer now would bring its reader further."""
        effect = self.effect
        if isinstance(effect, ReadLog):
            return self.positions != effect.positions
        return isinstance(effect, FetchInflight) and bool(self.found)

    def is_full(self) -> bool:
        """Whether the budget of the read is used."""
        effect = self.effect
        if isinstance(effect, FindStarts):
            return any(each.error for each in self.starts)
        if self.size_bytes >= effect.bytes_max:
            return True
        return isinstance(effect, ReadLog) and len(self.records) >= effect.records_max

    def is_stale(self) -> bool:
        """Whether nothing waits for the result any more."""
        effect = self.effect
        if isinstance(effect, FindStarts):
            return effect.connection is None or effect.connection.state != OPEN
        reader = effect.reader if isinstance(effect, FetchInflight) else effect.cursor
        if isinstance(reader, Session) and reader.connection is not effect.connection:
            return True
        if isinstance(effect, FetchInflight) or effect.lane is not None:
            return False
        return reader is None or effect.number != reader.read_number or not reader.reading

    def shares_with(self, first: "ReadJob") -> bool:
        """Whether one FETCH may serve this job as well, without reading much more."""
        if not (self.is_shareable and first.is_shareable and isinstance(self.effect, ReadLog)):
            return False
        if self.partitions != first.partitions or self.lossy or first.lossy:
            return False
        mine, others = self.positions, first.positions
        return sum(abs(mine[p] - others[p]) for p in self.partitions) <= SHARED_DISTANCE

    def wants(self, partition: int, offset: int, end: int) -> bool:
        """Whether a record of a read up to `end` is in the range of the job."""
        assert isinstance(self.effect, ReadLog)
        return self.positions[partition] <= offset < min(end, self.effect.limits[partition])

    def move(self, positions: dict[int, int], stops: dict[int, int]) -> None:
        """Moves the positions to those of a read, but not beyond `stops` or the limits."""
        assert isinstance(self.effect, ReadLog)
        for partition, position in positions.items():
            end = min(position, self.effect.limits[partition])
            end = min(end, stops.get(partition, end))
            self.positions[partition] = max(self.positions[partition], end)

    def add_found(self, number: int, record: Record | None) -> None:
        """Adds the next one of the wanted records. None: the log has lost it."""
        self.found.append((number, record))
        if record is not None:
            self.size_bytes += len(record.payload) + len(record.properties)

    def add_starts(self, partitions: list[int], found: list[FoundStart]) -> None:
        """Adds the starts of some partitions."""
        self.unsearched.difference_update(partitions)
        names = set(partitions)
        for start, part in zip(self.starts, found, strict=True):
            start.error = start.error or part.error
            if start.error:
                continue
            # The nodes have the same log, in part.
            start.size_bytes = max(start.size_bytes, part.size_bytes)
            for partition in partitions:
                start.offsets[partition] = part.offsets[partition]
            count = len(start.offsets)
            for topic, floor in part.floors.items():
                if partition_of(topic, count) in names:
                    start.floors[topic] = floor
            if len(start.floors) > TOPICS_MAX:
                start.error = f"the filter has more than {TOPICS_MAX} topics"

    def take(self, record: Record) -> None:
        self.records.append(record)
        self.size_bytes += len(record.topic) + len(record.payload) + len(record.properties)


def searched_partitions(effect: FindStarts) -> set[int]:
    """The partitions that a search concerns. The last records of a topic are in one partition."""
    limits = effect.limits
    if all(each.last and not has_wildcard(each.filter) for each in effect.wanted):
        count = len(limits)
        return {partition_of(each.filter.encode(), count) for each in effect.wanted}
    return {partition for partition, limit in enumerate(limits) if limit}


def all_needs(effect: ReadLog | FetchInflight | FindStarts) -> Iterable[int]:
    """The partitions that a read concerns."""
    if isinstance(effect, FetchInflight):
        return [partition for _, partition, _ in effect.wanted]
    if isinstance(effect, FindStarts):
        return searched_partitions(effect)
    return [p for p, at in enumerate(effect.positions) if at < effect.limits[p]]


def left_of(job: ReadJob) -> list[tuple[int, int, int]]:
    """The wanted records that are not read yet."""
    assert isinstance(job.effect, FetchInflight)
    return job.effect.wanted[len(job.found) :]


def position_of(job: ReadJob, partition: int) -> int:
    """The first offset of a partition that the job needs."""
    if isinstance(job.effect, ReadLog):
        return job.positions[partition]
    if isinstance(job.effect, FetchInflight):
        return next((offset for _, p, offset in left_of(job) if p == partition), 0)
    return 0


def distribute(jobs: list[ReadJob], records: list[Record], positions: dict[int, int]) -> None:
    """Gives each job the records that it asked for, and moves its positions.

    A job whose budget is used stops at its first record that has no room, in each partition.
    """
    if len(jobs) == 1:
        job = jobs[0]
        for record in records:
            at = job.positions[record.partition]
            if at <= record.offset < positions.get(record.partition, 0):
                job.take(record)
        job.move(positions, {})
        return
    interests = SubscriptionTrie()
    for number, job in enumerate(jobs):
        assert isinstance(job.effect, ReadLog)
        for interest in job.effect.interests:
            key = (number, interest)
            interests.add(interest.filter, key, key)
    stops: list[dict[int, int]] = [{} for _ in jobs]
    matches: dict[bytes, list[tuple[int, ReadInterest]]] = {}
    for record in records:
        found = matches.get(record.topic)
        if found is None:
            found = []
            for value in interests.match(record.topic.decode()):
                assert isinstance(value, tuple)
                found.append(value)
            matches[record.topic] = found
        partition, offset = record.partition, record.offset
        for number, interest in found:
            job = jobs[number]
            if not job.wants(partition, offset, positions.get(partition, 0)):
                continue
            if interest.start is not None and offset < interest.start[partition]:
                continue
            if job.records and job.records[-1] is record:
                continue
            if job.is_full():
                stops[number].setdefault(partition, offset)
            else:
                job.take(record)
    for job, stop in zip(jobs, stops, strict=True):
        job.move(positions, stop)


def found_start(entry: StartEntry, partitions: list[int], limits: list[int]) -> FoundStart:
    """The start of an answer as one of the whole log."""
    if entry.error:
        return FoundStart(error=entry.error)
    offsets = [0] * len(limits)
    for partition, offset in zip(partitions, entry.offsets, strict=True):
        offsets[partition] = min(offset, limits[partition])
    found = FoundStart(offsets, {topic.encode(): floor for topic, floor in entry.floors})
    found.size_bytes = entry.size_bytes
    return found
