"""`GET /api/v1/topics`: the tree of topics, one level at a time, with rates and last
values.

Nothing counts topics while nobody asks. The names are those of retained messages, of routes that
the broker remembers, and of the newest records of the log; rates and last values come from these
records and from retained messages. So a topic that is published at QoS 0, and not logged or
retained, has a name without a rate.
"""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Final

from msgspec import Struct, field

from holdfast.api.endpoints import Call, Endpoint, Text, Whole
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.nodes.whole_log import LogSource
from holdfast.api.views.pages import PAGE_MAX
from holdfast.api.views.payloads import Content, content_of
from holdfast.api.views.records import read_window_back
from holdfast.api.views.slices import ITEMS
from holdfast.log.record import MESSAGE, Record
from holdfast.node.session.message import Message
from holdfast.protocol.topics.retained import RetainedTrie
from holdfast.security.access.scopes import Scope

RECENT_RECORDS: Final = 20_000
"""The most records, of all partitions together, that rates are made of."""
RECENT_BYTES: Final = 16 << 20
"""The most bytes that are read for them."""
RECENT_S: Final = 60.0
"""The longest time in seconds that rates cover."""
LEVELS_MAX: Final = 10_000
"""The most children of a level that are gathered."""


class TopicNode(Struct, kw_only=True):
    """One level below a prefix."""

    level: str
    topic: str
    """The whole name up to this level."""
    is_topic: bool
    """Whether messages were published to this name itself."""
    has_children: bool
    topics: int
    """The known names at and below it, except those that are only retained."""
    messages_per_s: float
    """The rate of all topics at and below it, in the newest records of the log."""
    retained: bool
    """Whether a message is retained at this name itself."""
    last_us: int = 0
    """Time of the last known publish to this name itself; 0: unknown."""
    value: Content | None = None
    """The last known message of this name itself, for callers with the scope `reader`."""


class TopicLevel(Struct):
    """The levels below a prefix."""

    topics: list[TopicNode]
    covers_s: float
    """The time in seconds that the rates cover."""
    next: str = ""
    """The last level of the page, if there are more."""
    is_cut: bool = False
    """Whether there are more than 10,000 levels here."""


class RecentTopic(Struct):
    """One topic, by the newest records."""

    count: int = 0
    last: Record | None = None


class RecentTopics(Struct):
    """The topics of the newest records of the log."""

    topics: dict[str, RecentTopic] = field(default_factory=dict)
    covers_s: float = 0.0


def read_recent(
    reader: LogSource,
    first: list[int],
    ends: list[int],
    now_us: int,
    partition: int,
    found: "Gathered",
) -> None:
    """Adds the newest records of one partition. Runs in a thread."""
    count = RECENT_RECORDS // len(ends)
    left_bytes = RECENT_BYTES // len(ends)
    position = ends[partition]
    oldest_us = now_us - int(RECENT_S * 1_000_000)
    begins_us = now_us
    while position > first[partition] and count > 0 and left_bytes > 0 and begins_us > oldest_us:
        window = read_window_back(reader, partition, position, first[partition], min(count, 500))
        position = window.position
        count -= max(1, len(window.records))
        left_bytes -= max(1, window.size_bytes)
        found.records += [each for each in window.records if each.kind == MESSAGE]
        if window.records:
            begins_us = window.records[0].timestamp_us
    # The partition is complete from its oldest record read, or, without older ones, from the start.
    complete_us = begins_us if position > first[partition] else oldest_us
    found.begins_us = max(found.begins_us, complete_us, oldest_us)


class Gathered(Struct):
    """The newest messages, and the time from which they are complete in all partitions."""

    records: list[Record] = field(default_factory=list)
    begins_us: int = 0

    def topics(self, now_us: int) -> RecentTopics:
        """The messages by topic. Runs in a thread."""
        found = RecentTopics()
        found.covers_s = max(1.0, (now_us - self.begins_us) / 1_000_000)
        for record in self.records:
            topic = record.topic.decode("utf-8", "replace")
            entry = found.topics.setdefault(topic, RecentTopic())
            if record.timestamp_us >= self.begins_us:
                entry.count += 1
            if entry.last is None or record.timestamp_us >= entry.last.timestamp_us:
                entry.last = record
        return found


class LevelScan:
    """The levels below a prefix, gathered slice by slice."""

    def __init__(
        self,
        prefix: str,
        retained: RetainedTrie[Message],
        routed: list[bytes],
        recent: RecentTopics,
    ) -> None:
        """`prefix`: whole levels, without the last slash; "" is the root."""
        self._prefix = f"{prefix}/" if prefix else ""
        self._retained = retained
        self._routed = routed
        self._recent = recent
        self.nodes: dict[str, TopicNode] = {}
        self.is_cut = False

    def steps(self) -> Iterator[None]:
        """Gathers the levels, some names at a time."""
        names, number = self._routed, 0
        while names:
            number += 1
            if number % ITEMS == 0:
                yield
            name = names.pop().decode("utf-8", "replace")
            if name not in self._recent.topics:
                self._add(name, 0)
        for name, entry in self._recent.topics.items():
            number += 1
            if number % ITEMS == 0:
                yield
            self._add(name, entry.count)
        yield from self._add_retained()

    def _add(self, name: str, count: int) -> None:
        if not name.startswith(self._prefix):
            return
        level, slash, _ = name[len(self._prefix) :].partition("/")
        node = self._node(level)
        if node is None:
            return
        node.topics += 1
        node.messages_per_s += count / max(1.0, self._recent.covers_s)
        if slash:
            node.has_children = True
        else:
            node.is_topic = True

    def _node(self, level: str) -> TopicNode | None:
        node = self.nodes.get(level)
        if node is None:
            if len(self.nodes) >= LEVELS_MAX:
                self.is_cut = True
                return None
            node = self.nodes[level] = TopicNode(
                level=level,
                topic=self._prefix + level,
                is_topic=False,
                has_children=False,
                topics=0,
                messages_per_s=0.0,
                retained=False,
            )
        return node

    def _add_retained(self) -> Iterator[None]:
        """Jumps from level to level in the sorted names of retained messages."""
        seek = self._prefix
        while not self.is_cut:
            yield
            page = self._retained.page(seek, 1)
            if not page or not page[0].startswith(self._prefix):
                return
            name = page[0]
            level, slash, _ = name[len(self._prefix) :].partition("/")
            node = self._node(level)
            if node is not None and slash:
                node.has_children = True
            elif node is not None:
                node.is_topic = node.retained = True
            whole = self._prefix + level
            # Behind the name itself, or behind all names below it: "0" follows "/".
            seek = whole + "0" if slash else whole + "\0"


def add_values(
    nodes: list[TopicNode], retained: RetainedTrie[Message], recent: RecentTopics, bytes_max: int
) -> None:
    """Adds the last known message of each name. `bytes_max` 0: only its time."""
    for node in nodes:
        entry, message = recent.topics.get(node.topic), retained.get(node.topic)
        last = None if entry is None else entry.last
        if last is not None and (message is None or last.timestamp_us >= message.timestamp_us):
            node.last_us = last.timestamp_us
            if bytes_max:
                node.value = content_of(last.payload, last.properties, bytes_max)
        elif message is not None:
            node.last_us = message.timestamp_us
            if bytes_max:
                node.value = content_of(message.payload, message.properties, bytes_max)
        node.messages_per_s = round(node.messages_per_s, 3)


PREFIX: Final = Text("prefix", "whole levels, as plant/1; default: the first level", least=0,
                     most=65_535, default="")  # fmt: skip
AFTER: Final = Text("after", "`next` of the page before: a level", most=65_535)
LIMIT: Final = Whole("limit", "the most levels", least=1, most=PAGE_MAX, default=200)
BYTES: Final = Whole("bytes", "the most bytes of each value", default=200, most=4096)
FRESH_S: Final = 2.0
"""The time in seconds for which the newest records are not read again."""


class TopicRoutes:
    """The route of topics."""

    def __init__(self, node: OwnNode) -> None:
        self._node = node
        self._lock = asyncio.Lock()
        self._recent = RecentTopics()
        self._read_at = -FRESH_S

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/topics", Scope.VIEWER,
                     "the topics below a prefix, with rates and, for readers, last values",
                     self._list, TopicLevel, (PREFIX, LIMIT, AFTER, BYTES), refusals=(421, 503)),
        ]  # fmt: skip

    async def _list(self, call: Call) -> TopicLevel:
        node = self._node
        recent = await self._newest()
        state = node.state
        scan = LevelScan(call[PREFIX].strip("/"), state.retained, list(state.routes), recent)
        await node.slices.run(scan.steps())
        after = call.get(AFTER)
        levels = sorted(level for level in scan.nodes if after is None or level > after)
        chosen = [scan.nodes[level] for level in levels[: call[LIMIT]]]
        bytes_max = call[BYTES] if call.caller.scope >= Scope.READER else 0
        add_values(chosen, state.retained, recent, bytes_max)
        following = chosen[-1].level if len(levels) > len(chosen) else ""
        return TopicLevel(chosen, round(recent.covers_s, 1), following, scan.is_cut)

    async def _newest(self) -> RecentTopics:
        """The topics of the newest records, at most FRESH_S old."""
        broker = self._node.readable_broker
        async with self._lock:
            if broker.loop.time() - self._read_at < FRESH_S:
                return self._recent
            log = await self._node.log()
            ends = log.ends
            first = [log.first_offset(partition) for partition in range(len(ends))]
            now_us = self._node.state.wall_us
            found = Gathered()
            for partition in range(len(ends)):
                work = partial(read_recent, log, first, ends, now_us, partition, found)
                await log.in_thread(work)
            self._recent = await log.in_thread(partial(found.topics, now_us))
            self._read_at = broker.loop.time()
            return self._recent
