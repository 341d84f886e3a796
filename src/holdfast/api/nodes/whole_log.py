"""Reads the log of the whole cluster for the admin port.

A node stores the partitions of which it is a replica. The others are read at one of their replicas
in sync, over the link between the nodes. A route reads through a `WholeLog`, which has the methods
of the node's own reader. It is of one moment: its ends are those that the replicas had.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal
from holdfast.io.event_loop.broker import Broker
from holdfast.log.batch import Batch
from holdfast.log.reading.cursor import ReadResult
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.reading.topic_history import TopicHistory
from holdfast.log.record import MESSAGE, Record
from holdfast.protocol.topics.names import matches

T = TypeVar("T")

ANSWER_S: Final = 10.0
"""The time in seconds that a replica may take for an answer."""
REMOTE_BYTES: Final = 1 << 20
"""The most bytes of batches of an answer, and at least one batch."""
REMOTE_READS: Final = 16
"""The answers with batches of a partition that one call of `read` waits for."""
HISTORY_OFFSETS: Final = 1000
"""The offsets of a topic's messages after which an answer ends."""
HISTORY_SEGMENTS: Final = 16
"""The segments that are searched for an answer."""


class BoundsQuestion(Struct):
    """Asks a node for the first offsets and ends of partitions that it stores."""

    partitions: list[int]


class Bounds(Struct):
    """The answer, in the order of the question."""

    first: list[int]
    ends: list[int]
    oldest_us: int = 0
    """The time of the node's oldest record; 0: it has none."""


class BatchesQuestion(Struct):
    """Asks for batches; see `LogReader.read_batches`."""

    partition: int
    start: int
    end: int
    size: int


class Batches(Struct):
    """The answer."""

    batches: list[bytes]


class TimeQuestion(Struct):
    """Asks for the first offset whose record is not older than a time."""

    partition: int
    time_us: int


class OffsetAnswer(Struct):
    """The answer."""

    offset: int


class HistoryQuestion(Struct):
    """Asks for the messages of a topic below an offset, the newest first."""

    topic: bytes
    partition: int
    before: int


class HistoryAnswer(Struct):
    """Their offsets. Above `searched` there are no others."""

    offsets: list[int]
    searched: int
    done: bool


Ask = Callable[[str, str, Struct, type[Any], float], Awaitable[Any]]
"""Asks a node: its name, the question, its parameters, the type of the answer, and the longest
wait in seconds. Raises `ApiRefusal` (503)."""


async def ask_nobody(
    node: str, name: str, parameters: Struct, kind: type[Any], wait_s: float
) -> Any:
    """Asks no node."""
    raise ApiRefusal(503, f"{node} is not asked")


class LogSource(Protocol):
    """The methods of a reader of the log that views use."""

    def first_offset(self, partition: int) -> int: ...

    def read_batches(self, partition: int, start: int, end: int, bytes_max: int) -> list[bytes]: ...


class TopicSearch(Protocol):
    """The search for a topic's messages; see `TopicHistory`."""

    offsets: list[int]

    def is_done(self) -> bool: ...

    @property
    def searched(self) -> int: ...

    def step(self) -> None: ...


class WholeLog:
    """The log with all partitions. Its methods run in `in_thread`, except for `first_offset`."""

    def __init__(self, broker: Broker, ask: Ask) -> None:
        self._broker = broker
        self._ask = ask
        self._reader = broker.reader
        journal = broker.node.state.journal
        self.ends = list(map(min, journal.high_watermark, journal.written))
        """The first offset of each partition that is not both committed and readable."""
        self._first: dict[int, int] = {}
        self.oldest_us = oldest_us(broker)
        """The time of the oldest record; 0: there is none."""
        # The partitions that are read elsewhere, and where.
        self.nodes: dict[int, str] = {}

    async def open(self, partitions: Iterable[int] | None = None) -> None:
        """Finds the partitions that are not stored here, of all or of these. Raises `ApiRefusal`
        (503) if no replica of one answers."""
        remote = self._broker.runtime.cluster_node.remote_reads
        chosen = range(len(self.ends)) if partitions is None else partitions
        left = {each for each in chosen if not remote.is_stored(each)}
        tried: set[str] = set()
        failure = "no node has it"
        while left:
            by_node: dict[str, list[int]] = {}
            for partition in sorted(left):
                for node in self._replicas(partition):
                    if node not in tried:
                        by_node.setdefault(node, []).append(partition)
            if not by_node:
                raise ApiRefusal(503, f"partition {min(left)} cannot be read: {failure}")
            node = max(by_node, key=lambda name: len(by_node[name]))
            tried.add(node)
            wanted = by_node[node]
            try:
                found = await self._ask(
                    node, "log_bounds", BoundsQuestion(wanted), Bounds, ANSWER_S
                )
            except ApiRefusal as error:
                failure = str(error)
                continue
            for partition, first, end in zip(wanted, found.first, found.ends, strict=True):
                if found.oldest_us:
                    self.oldest_us = min(self.oldest_us or found.oldest_us, found.oldest_us)
                if end >= 0:
                    self._first[partition] = first
                    self.ends[partition] = end
                    self.nodes[partition] = node
                    left.discard(partition)

    def _replicas(self, partition: int) -> list[str]:
        """The connected replicas in sync, the leader last."""
        context = self._broker.runtime.cluster_node.context
        info = None if context.metadata is None else context.metadata.partitions[partition]
        found = [] if info is None else [each for each in info.in_sync if each in context.connected]
        return sorted(found, key=lambda name: info is not None and name == info.leader)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Does work with the log: in the reading thread, or in one that may wait for others."""
        if not self.nodes:
            return await self._broker.reads.in_thread(work)
        return await asyncio.to_thread(work)

    def _await(self, answer: Awaitable[T]) -> T:
        async def get() -> T:
            return await answer

        return asyncio.run_coroutine_threadsafe(get(), self._broker.loop).result()

    def _there(self, partition: int, name: str, question: Struct, kind: type[T]) -> T:
        found: T = self._await(self._ask(self.nodes[partition], name, question, kind, ANSWER_S))
        return found

    # The methods of `LogReader`

    def first_offset(self, partition: int) -> int:
        first = self._first.get(partition)
        return self._reader.first_offset(partition) if first is None else first

    def read_batches(self, partition: int, start: int, end: int, bytes_max: int) -> list[bytes]:
        if partition not in self.nodes:
            return self._reader.read_batches(partition, start, end, bytes_max)
        question = BatchesQuestion(partition, start, end, min(bytes_max, REMOTE_BYTES))
        return self._there(partition, "log_batches", question, Batches).batches

    def fetch(self, partition: int, offset: int) -> Record | None:
        if partition not in self.nodes:
            return self._reader.fetch(partition, offset)
        for data in self.read_batches(partition, offset, offset + 1, 1):
            batch = Batch(data, check=False)
            if batch.base_offset <= offset < batch.end_offset:
                record = batch.record(offset - batch.base_offset)
                return record if record.kind == MESSAGE else None
        return None

    def offset_for_time(self, partition: int, time_us: int) -> int:
        if partition not in self.nodes:
            return self._reader.offset_for_time(partition, time_us)
        question = TimeQuestion(partition, time_us)
        return self._there(partition, "log_time", question, OffsetAnswer).offset

    def topic_history(self, topic: bytes, partition: int, before: int) -> TopicSearch:
        if partition not in self.nodes:
            return self._reader.topic_history(topic, partition, before)
        return RemoteHistory(partial(self._history, topic, partition), before)

    def _history(self, topic: bytes, partition: int, before: int) -> HistoryAnswer:
        question = HistoryQuestion(topic, partition, before)
        return self._there(partition, "log_history", question, HistoryAnswer)

    def read(
        self,
        positions: list[int],
        limits: list[int],
        interests: list[ReadInterest],
        records_max: int,
        bytes_max: int,
    ) -> ReadResult:
        if not self.nodes:
            return self._reader.read(positions, limits, interests, records_max, bytes_max)
        own = [
            position if partition in self.nodes else limit
            for partition, (position, limit) in enumerate(zip(positions, limits, strict=True))
        ]
        result = self._reader.read(positions, own, interests, records_max, bytes_max)
        places = list(result.positions)
        lost = result.lost
        for partition in self.nodes:
            end = min(limits[partition], self.ends[partition])
            first = self.first_offset(partition)
            lost += max(0, min(first, end) - places[partition])
            at = max(places[partition], min(first, end))
            for _ in range(REMOTE_READS):
                if at >= end or len(result.records) >= records_max:
                    break
                batches = self.read_batches(partition, at, end, REMOTE_BYTES)
                for data in batches:
                    batch = Batch(data, check=False)
                    found = batch.records()
                    result.records += [
                        each
                        for each in found
                        if at <= each.offset < end and _is_wanted(each, interests)
                    ]
                    at = min(end, batch.end_offset)
                if not batches:
                    at = end
            places[partition] = at
        done = all(at >= limit for at, limit in zip(places, limits, strict=True))
        return ReadResult(result.records, places, done, lost)


def oldest_us(broker: Broker) -> int:
    """The time of the oldest record in the log of this node; 0: it has none."""
    times = [each.head.first_timestamp_us for each in broker.node.state.journal.segments]
    return min(filter(None, times), default=0)


def _is_wanted(record: Record, interests: list[ReadInterest]) -> bool:
    if record.kind != MESSAGE:
        return False
    topic = record.topic.decode("utf-8", "replace")
    return any(
        matches(each.filter, topic)
        and (each.start is None or record.offset >= each.start[record.partition])
        for each in interests
    )


class RemoteHistory:
    """The search for a topic's messages at another node."""

    def __init__(self, ask: Callable[[int], HistoryAnswer], before: int) -> None:
        self._ask = ask
        self._is_done = False
        self.searched = before
        self.offsets: list[int] = []

    def is_done(self) -> bool:
        return self._is_done

    def step(self) -> None:
        """Asks for more offsets."""
        found = self._ask(self.searched)
        self.offsets += found.offsets
        self.searched, self._is_done = found.searched, found.done


def search(history: TopicHistory, before: int) -> HistoryAnswer:
    """The answer to a HistoryQuestion. Runs in a thread."""
    for _ in range(HISTORY_SEGMENTS):
        if history.is_done() or len(history.offsets) >= HISTORY_OFFSETS:
            break
        history.step()
    offsets = history.offsets
    if len(offsets) > HISTORY_OFFSETS:
        # The next question is for those below.
        return HistoryAnswer(offsets[:HISTORY_OFFSETS], offsets[HISTORY_OFFSETS - 1], False)
    return HistoryAnswer(offsets, min(before, history.searched), history.is_done())
