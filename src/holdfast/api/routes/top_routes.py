"""`GET /api/v1/top`: counters, durations, the slowest sessions and the busiest topics of a node.

The counters are sums since the start of the node. A caller that wants rates asks twice.

Topics and clients are ranked from samples, in sketches of a fixed size (datasketches, "frequent
items"). A sketch knows the error of its counts. It is in an extra: without it the reply says how to
install it.
"""

import asyncio
import time
from importlib import import_module
from typing import Any, Final, NamedTuple

from holdfast.api.census import Census
from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Whole
from holdfast.api.process import ServedProcess
from holdfast.api.views.top import TopDurations, TopPublisher, TopReply, TopSession, TopTopic
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.failures import watched
from holdfast.node.durations import Durations
from holdfast.node.publish.topic_samples import TopicSamples
from holdfast.security.access.scopes import Scope

TAKE_S: Final = 0.2
"""The time in seconds between two collections of samples."""
WINDOW_S: Final = 10.0
"""The time in seconds that one pair of sketches covers. The reply has one and the one before."""
IDLE_S: Final = 30.0
"""The time in seconds without a request after which the sampling ends."""
LG_ENTRIES: Final = 12
"""The logarithm to base 2 of the entries of a sketch."""
TOPIC_BYTES_MAX: Final = 1024
"""The most bytes of a topic in a sketch. Longer ones count as one, by their beginning."""
MISSING: Final = "top topics need the package datasketches: pip install 'holdfast[top]'"


class SampledRate(NamedTuple):
    """The estimated rates of a topic or of a publisher."""

    name: str
    messages_per_s: float
    bytes_per_s: float
    error_per_s: float
    """The most messages a second by which the sketch may be wrong. Sampling adds its own error."""


class _Sketches:
    """The messages and bytes by name."""

    def __init__(self, sketches: Any) -> None:
        self.messages = sketches.frequent_strings_sketch(LG_ENTRIES)
        self.bytes = sketches.frequent_strings_sketch(LG_ENTRIES)

    def add(self, name: str, weight: int, size_bytes: int) -> None:
        self.messages.update(name, weight)
        self.bytes.update(name, weight * size_bytes)

    def merge(self, other: "_Sketches") -> None:
        self.messages.merge(other.messages)
        self.bytes.merge(other.bytes)


class _Window:
    """The sketches of some seconds."""

    def __init__(self, sketches: Any) -> None:
        self.since = time.monotonic()
        self.topics = _Sketches(sketches)
        self.publishers = _Sketches(sketches)


class TopTopics:
    """Samples the publishes of a broker while somebody asks."""

    def __init__(self) -> None:
        self._windows: list[_Window] = []
        self._asked_at = 0.0
        self._task: asyncio.Task[None] | None = None

    async def ask(
        self, broker: Broker, limit: int
    ) -> tuple[list[SampledRate], list[SampledRate]] | None:
        """Returns the topics and the publishers with the most messages. The first call begins the
        sampling, and has none. None: the package is missing."""
        self._asked_at = time.monotonic()
        try:
            # The first import takes 200 ms.
            sketches = await asyncio.to_thread(import_module, "datasketches")
        except ImportError:
            return None
        if self._task is None or self._task.done():
            self._windows = [_Window(sketches)]
            self._task = watched(self._run(broker, sketches))
        return (
            self._rates([each.topics for each in self._windows], limit, sketches),
            self._rates([each.publishers for each in self._windows], limit, sketches),
        )

    async def stop(self) -> None:
        """Ends the sampling, if it runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, broker: Broker, sketches: Any) -> None:
        stats = broker.node.state.stats
        samples = stats.topics = TopicSamples()
        try:
            while time.monotonic() < self._asked_at + IDLE_S:
                await asyncio.sleep(TAKE_S)
                if time.monotonic() >= self._windows[-1].since + WINDOW_S:
                    self._windows = [self._windows[-1], _Window(sketches)]
                self._count(*samples.take())
        finally:
            stats.topics = None
            # The library prints a page of warnings if a sketch, or the library itself, is still
            # referred to when the process ends.
            self._windows = []

    def _count(self, samples: list[tuple[bytes, str, int]], weight: float) -> None:
        window = self._windows[-1]
        whole = round(weight)
        for topic, client_id, payload_bytes in samples:
            name = topic[:TOPIC_BYTES_MAX].decode(errors="replace")
            size_bytes = payload_bytes + len(topic)
            window.topics.add(name, whole, size_bytes)
            window.publishers.add(client_id[:TOPIC_BYTES_MAX], whole, size_bytes)

    def _rates(self, parts: list[_Sketches], limit: int, sketches: Any) -> list[SampledRate]:
        seconds = max(TAKE_S, time.monotonic() - self._windows[0].since)
        merged = _Sketches(sketches)
        for part in parts:
            merged.merge(part)
        kind = sketches.frequent_items_error_type.NO_FALSE_NEGATIVES
        found = merged.messages.get_frequent_items(kind)[:limit]
        return [
            SampledRate(
                name,
                round(estimate / seconds, 3),
                round(merged.bytes.get_estimate(name) / seconds, 1),
                round((most - least) / seconds, 3),
            )
            for name, estimate, least, most in found
        ]


COUNTERS: Final = (
    "publish_received",
    "publish_sent",
    "bytes_received",
    "bytes_sent",
    "connections_opened",
    "connections_refused",
    "readers_fell_behind",
)
LIMIT: Final = Whole("limit", "the most sessions and topics of the reply", most=100, default=10)


class TopRoutes:
    """The route of `holdfast top`."""

    def __init__(self, server: ServedProcess, census: Census) -> None:
        self._server = server
        self._census = census
        self._topics = TopTopics()

    def endpoints(self) -> list[Endpoint]:
        """The declaration of the endpoint."""
        return [
            Endpoint("GET", "/api/v1/top", Scope.VIEWER,
                     "rates, slow sessions and busy topics of this node", self._top,
                     reply=TopReply, parameters=(LIMIT,), refusals=(503,)),
        ]  # fmt: skip

    async def stop(self) -> None:
        """Ends the sampling of topics."""
        await self._topics.stop()

    async def _top(self, call: Call) -> TopReply:
        broker = self._server.broker
        if broker is None:
            raise ApiRefusal(503, "this node serves no clients now")
        limit = call[LIMIT]
        state = broker.node.state
        stats = state.stats
        sampled = await self._topics.ask(broker, limit)
        topics, publishers = sampled or ([], [])
        sessions = self._census.sessions
        away, _, _ = state.cluster.away()
        return TopReply(
            state.config.node_id,
            time.monotonic(),
            max(0, state.wall_us - state.started_us) / 1e6,
            state.connections,
            state.client_sessions() + away,
            sessions.away,
            sessions.behind,
            sessions.backlog_records,
            {name: getattr(stats, name) for name in COUNTERS},
            _durations(stats.durations.acknowledged),
            _durations(stats.durations.delivered),
            _durations(broker.writer.synced),
            [
                TopSession(
                    each.client_id,
                    each.username,
                    each.remote,
                    each.is_connected,
                    each.is_behind,
                    each.backlog_records,
                    each.inflight,
                    each.dropped,
                )
                for each in sessions.slowest()[:limit]
            ],
            [TopTopic(*each) for each in topics],
            MISSING if sampled is None else "",
            [TopPublisher(*each) for each in publishers],
        )


def _durations(durations: Durations) -> TopDurations:
    buckets = durations.cumulative()
    return TopDurations([bound for bound, _ in buckets], [count for _, count in buckets])
