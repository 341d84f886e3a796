"""Tracks reads of the log that several nodes work on: how far each is, and what it needs next."""

from collections.abc import Iterable
from operator import gt
from typing import Final

from holdfast.log.partition import partition_of
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.reading.starts import TOPICS_MAX, FoundStart
from holdfast.log.record import Record
from holdfast.node.effects import AnyRead, FetchInflight, FindStarts, Found, ReadLog
from holdfast.node.reads.fetch_frames import FetchFrame, ReadRange, StartEntry
from holdfast.node.session.connection import OPEN
from holdfast.node.session.session import Session
from holdfast.protocol.topics.names import has_wildcard
from holdfast.protocol.topics.trie import SubscriptionTrie

SHARED_DISTANCE: Final = 2000
"""The most records between the positions of two jobs that share a FETCH."""


class ReadJob:
    """The progress of one read."""

    def __init__(self, effect: AnyRead) -> None:
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
        # FindStarts: the starts so far, and the partitions that are still to be searched: in the
        # log, and then in the lake. None: not known yet.
        self.starts: list[FoundStart] = []
        self.unsearched: set[int] = set()
        self.unsearched_past: set[int] | None = None
        # Where the log began when it was searched here.
        self.begins: list[int] = []
        # Whether it goes on without the lake.
        self.is_without_lake = False
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
        return sorted(self.unsearched or self.unsearched_past or ())

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
                    start.left[topic] = part.left.get(topic, 0)
            _check_floors(start)

    def add_past_starts(self, found: list[FoundStart]) -> None:
        """Adds the starts in the lake, which has what is older than the log. One that has
        nothing of a partition is at its limit."""
        assert isinstance(self.effect, FindStarts)
        self.unsearched_past = set()
        for query, start, part in zip(self.effect.wanted, self.starts, found, strict=True):
            start.error = start.error or part.error
            if start.error:
                continue
            if not query.last:
                start.offsets = list(map(min, start.offsets, part.offsets))
                continue
            for topic, floor in part.floors.items():
                if start.left.get(topic, query.last) > 0:
                    start.floors[topic] = floor
                    partition = partition_of(topic, len(start.offsets))
                    start.offsets[partition] = min(start.offsets[partition], floor)
            _check_floors(start)

    def needs_past(self, oldest_us: int) -> bool:
        """Whether a search of the log may have missed older records. `oldest_us`: the time of the
        oldest segment, behind all that was removed; 0: there is none."""
        assert isinstance(self.effect, FindStarts)
        for query, start in zip(self.effect.wanted, self.starts, strict=True):
            if start.error or query.offsets:
                continue
            if not query.last:
                if not oldest_us or query.since_us < oldest_us:
                    return True
            elif has_wildcard(query.filter) or start.left.get(query.filter.encode(), query.last):
                return True
        return False

    def take(self, record: Record) -> None:
        self.records.append(record)
        self.size_bytes += len(record.topic) + len(record.payload) + len(record.properties)


class Fetch:
    """A FETCH that is not answered, for one job or for several that share it."""

    def __init__(self, node: str, jobs: list[ReadJob], partitions: list[int], now: float) -> None:
        self.node = node
        self.jobs = jobs
        self.partitions = partitions
        self.sent_at = now
        self.starts: list[int] = []
        self.piece = 0
        self.records: list[Record] = []


def _check_floors(start: FoundStart) -> None:
    if len(start.floors) > TOPICS_MAX:
        start.error = f"the filter has more than {TOPICS_MAX} topics"


def searched_partitions(effect: FindStarts) -> set[int]:
    """The partitions that a search concerns. The last records of a topic are in one partition."""
    limits = effect.limits
    if all(each.last and not has_wildcard(each.filter) for each in effect.wanted):
        count = len(limits)
        found = {partition_of(each.filter.encode(), count) for each in effect.wanted}
        return {partition for partition in found if limits[partition]}
    return {partition for partition, limit in enumerate(limits) if limit}


def reader_of(effect: AnyRead) -> object:
    """The session, group or connection that waits for the result of a read."""
    if isinstance(effect, ReadLog):
        return effect.cursor
    return effect.reader if isinstance(effect, FetchInflight) else effect.connection


def all_needs(effect: AnyRead) -> Iterable[int]:
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


def past_start(entry: StartEntry, partitions: list[int], limits: list[int]) -> FoundStart:
    """The start in a lake as one of the whole log. It is at the limit where the lake has none."""
    return found_start(entry, partitions, limits, list(limits))


def found_start(
    entry: StartEntry, partitions: list[int], limits: list[int], others: list[int] | None = None
) -> FoundStart:
    """The start of an answer as one of the whole log. `others`: of the partitions that were not
    searched."""
    if entry.error:
        return FoundStart(error=entry.error)
    offsets = [0] * len(limits) if others is None else others
    for partition, offset in zip(partitions, entry.offsets, strict=True):
        offsets[partition] = min(offset, limits[partition])
    found = FoundStart(offsets, {topic.encode(): floor for topic, floor in entry.floors})
    found.size_bytes = entry.size_bytes
    return found


def filter_count(job: ReadJob) -> int:
    assert isinstance(job.effect, ReadLog)
    return len(job.effect.interests)


def ask_for_range(frame: FetchFrame, fetch: Fetch) -> None:
    """Puts the ranges and filters of the jobs into a FETCH."""
    effects: list[ReadLog] = []
    for job in fetch.jobs:
        assert isinstance(job.effect, ReadLog)
        effects.append(job.effect)
    for partition in fetch.partitions:
        start = min(job.positions[partition] for job in fetch.jobs)
        end = max(effect.limits[partition] for effect in effects)
        fetch.starts.append(start)
        frame.ranges.append(ReadRange(partition, start, end))
    known: dict[int, int] = {}
    filters: dict[tuple[str, int], None] = {}
    for effect in effects:
        for interest in effect.interests:
            offsets = interest.start
            index = -1
            if offsets is not None:
                index = known.get(id(offsets), -2)
                if index == -2:
                    index = -1
                    wanted = [offsets[partition] for partition in fetch.partitions]
                    if any(map(gt, wanted, fetch.starts)):
                        index = len(frame.starts)
                        frame.starts.append(wanted)
                    known[id(offsets)] = index
            filters[(interest.filter, index)] = None
    frame.filters = list(filters)
    # All that share a read want some of its records.
    share = 1 if len(effects) == 1 else 2
    jobs = fetch.jobs
    pairs = list(zip(effects, jobs, strict=True))
    frame.records_max = share * max(each.records_max - len(job.records) for each, job in pairs)
    frame.bytes_max = share * max(each.bytes_max - job.size_bytes for each, job in pairs)
