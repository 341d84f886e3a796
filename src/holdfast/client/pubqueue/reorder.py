"""Orders received messages by id and drops repetitions, with any broker in between. Pure: messages
are any objects, `now` is monotonic seconds.

A producer's sequences run over all its topics, so a subscriber to some of them sees gaps although
no message is missing. `Deduplicate` therefore never waits: it drops a message older than the newest
of its topic. `Reorder` waits for gaps to close and suits a subscriber to everything that a producer
sends. Both order by (epoch, sequence) and remember a limited number of producers, `Deduplicate`
each of their topics apart, forgetting the longest silent.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final, Generic, TypeAlias, TypeVar

from holdfast.client.identity import ProducerIdentity

PRODUCERS_MAX: Final = 1_000
SOURCES_MAX: Final = 10_000
"""The most producers that `Deduplicate` remembers, each topic of one counted."""
REMEMBERED_MAX: Final = 64
"""The most ids per producer and topic that distinguish a repetition from a late message."""
BUFFERED_MAX: Final = 1_000
"""The most messages per producer that wait for a gap."""
BUFFERED_TOTAL_MAX: Final = 10_000
GAP_TIMEOUT_S: Final = 5.0
SKIPPED_MAX: Final = 64
"""The most gaps per producer that are remembered after they were given up."""

NEW: Final = 0
DUPLICATE: Final = 1
LATE: Final = 2

Item = TypeVar("Item")


@dataclass
class Ordered(Generic[Item]):
    """The next message of its producer."""

    item: Item


@dataclass
class Late(Generic[Item]):
    """A message that was not seen before, and that arrived after later ones."""

    item: Item


@dataclass
class Gap:
    """A gap that is given up: sequences `first` to `last` of a producer are missing."""

    producer: str
    first: int
    last: int


Output: TypeAlias = Ordered[Item] | Late[Item] | Gap


@dataclass
class ReorderCounts:
    """The messages so far by verdict, and the gaps that were given up."""

    ordered: int = 0
    duplicates: int = 0
    late: int = 0
    gaps: int = 0


class Deduplicate:
    """A filter that passes the messages of each producer in each topic in ascending order only.

    Partitions have no order among each other. Counter-example to one order over all topics of a
    producer: it publishes a1, b2, a3; the leader of b's partition is slow, so b2 comes last, and
    would be dropped, although it was acknowledged and nobody has seen it.
    """

    def __init__(
        self, sources_max: int = SOURCES_MAX, remembered_max: int = REMEMBERED_MAX
    ) -> None:
        self._sources_max = sources_max
        self._remembered_max = remembered_max
        # Per producer and topic, the last ids that passed, ascending.
        self._seen: OrderedDict[tuple[str, str], deque[tuple[int, int]]] = OrderedDict()
        self.counts = ReorderCounts()

    def judge(self, identity: ProducerIdentity, topic: str) -> int:
        """NEW; DUPLICATE; or LATE: older than the newest of its topic, and not seen. A message
        older than all that are remembered counts as a duplicate."""
        key = (identity.epoch, identity.sequence)
        source = (identity.producer, topic)
        seen = self._seen.get(source)
        if seen is None:
            seen = self._seen[source] = deque(maxlen=self._remembered_max)
            if len(self._seen) > self._sources_max:
                self._seen.popitem(last=False)
        else:
            self._seen.move_to_end(source)
        if not seen or key > seen[-1]:
            seen.append(key)
            self.counts.ordered += 1
            return NEW
        position = bisect_left(seen, key)
        is_forgotten = position == 0 and len(seen) == self._remembered_max
        if seen[position] == key or is_forgotten:
            self.counts.duplicates += 1
            return DUPLICATE
        # Remembered, so that it is late once and a duplicate after that.
        if len(seen) == self._remembered_max:
            seen.popleft()
            position -= 1
        seen.insert(position, key)
        self.counts.late += 1
        return LATE


@dataclass
class _Producer(Generic[Item]):
    epoch: int
    expected: int
    buffer: dict[int, tuple[float, Item]] = field(default_factory=dict)
    """By sequence: when it came, and the message."""
    skipped: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SKIPPED_MAX))
    """First and last sequence of gaps given up."""


class Reorder(Generic[Item]):
    """A buffer that emits each producer's messages in order, without gaps unless the wait ends.

    A producer's first message is the beginning. A gap is given up after `gap_timeout_s`, or when
    `buffered_max` messages of its producer (or BUFFERED_TOTAL_MAX of all) wait behind it.
    """

    def __init__(
        self,
        gap_timeout_s: float = GAP_TIMEOUT_S,
        producers_max: int = PRODUCERS_MAX,
        buffered_max: int = BUFFERED_MAX,
    ) -> None:
        self._gap_timeout_s = gap_timeout_s
        self._producers_max = producers_max
        self._buffered_max = buffered_max
        self._producers: OrderedDict[str, _Producer[Item]] = OrderedDict()
        # Producers with a gap, and the time at which the wait for it ends.
        self._deadlines: dict[str, float] = {}
        self._buffered = 0
        self.counts = ReorderCounts()

    def feed(self, identity: ProducerIdentity, item: Item, now: float) -> list[Output[Item]]:
        """Adds a message; returns the output, in order."""
        name, sequence = identity.producer, identity.sequence
        output: list[Output[Item]] = []
        producer = self._producers.get(name)
        if producer is None:
            producer = self._producers[name] = _Producer(identity.epoch, sequence)
            if len(self._producers) > self._producers_max:
                oldest, forgotten = next(iter(self._producers.items()))
                self._give_up_all(oldest, forgotten, output)
                del self._producers[oldest]
        self._producers.move_to_end(name)
        if identity.epoch > producer.epoch:
            producer.epoch = identity.epoch
            if sequence < producer.expected:
                # The producer has lost count. Its messages are a new beginning, not repetitions.
                self._give_up_all(name, producer, output)
                producer.expected = sequence
                producer.skipped.clear()
        if sequence < producer.expected:
            self._behind(producer, sequence, item, output)
        elif sequence in producer.buffer:
            self.counts.duplicates += 1
        else:
            producer.buffer[sequence] = (now, item)
            self._buffered += 1
            self._release(producer, output)
            is_full = len(producer.buffer) >= self._buffered_max
            if is_full or self._buffered >= BUFFERED_TOTAL_MAX:
                self._give_up(name, producer, output)
        self._set_deadline(name, producer)
        return output

    def timer(self) -> float | None:
        """The time at which `handle_timer` is due, or None."""
        return min(self._deadlines.values(), default=None)

    def handle_timer(self, now: float) -> list[Output[Item]]:
        """Gives up the gaps that are due; returns the output."""
        output: list[Output[Item]] = []
        for name in [name for name, when in self._deadlines.items() if when <= now]:
            producer = self._producers[name]
            self._give_up(name, producer, output)
            self._set_deadline(name, producer)
        return output

    def drain(self) -> list[Output[Item]]:
        """Gives up all gaps; returns every message that still waits."""
        output: list[Output[Item]] = []
        for name, producer in self._producers.items():
            self._give_up_all(name, producer, output)
        return output

    def _behind(
        self, producer: _Producer[Item], sequence: int, item: Item, output: list[Output[Item]]
    ) -> None:
        for index, (first, last) in enumerate(producer.skipped):
            if first <= sequence <= last:
                # The rest of the gap stays; the sequence is a duplicate from now on.
                del producer.skipped[index]
                if sequence < last:
                    _remember(producer.skipped, index, (sequence + 1, last))
                if first < sequence:
                    _remember(producer.skipped, index, (first, sequence - 1))
                self.counts.late += 1
                output.append(Late(item))
                return
        self.counts.duplicates += 1

    def _release(self, producer: _Producer[Item], output: list[Output[Item]]) -> None:
        while (waiting := producer.buffer.pop(producer.expected, None)) is not None:
            producer.expected += 1
            self._buffered -= 1
            self.counts.ordered += 1
            output.append(Ordered(waiting[1]))

    def _give_up(self, name: str, producer: _Producer[Item], output: list[Output[Item]]) -> None:
        """Continues behind the first gap."""
        if not producer.buffer:
            return
        following = min(producer.buffer)
        self.counts.gaps += 1
        output.append(Gap(name, producer.expected, following - 1))
        producer.skipped.append((producer.expected, following - 1))
        producer.expected = following
        self._release(producer, output)

    def _give_up_all(
        self, name: str, producer: _Producer[Item], output: list[Output[Item]]
    ) -> None:
        while producer.buffer:
            self._give_up(name, producer, output)
        self._deadlines.pop(name, None)

    def _set_deadline(self, name: str, producer: _Producer[Item]) -> None:
        if not producer.buffer:
            self._deadlines.pop(name, None)
            return
        came_at, _ = producer.buffer[min(producer.buffer)]
        self._deadlines[name] = came_at + self._gap_timeout_s


def _remember(skipped: deque[tuple[int, int]], index: int, gap: tuple[int, int]) -> None:
    """Inserts a rest of a gap. The oldest one is forgotten if there is no room."""
    if len(skipped) == SKIPPED_MAX:
        skipped.popleft()
        index = max(0, index - 1)
    skipped.insert(index, gap)
