"""`GET /api/v1/log/counts`: the number of messages over time, for a histogram."""

from functools import partial
from typing import Final

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text, Whole, bad_request
from holdfast.api.nodes.own_node import OwnNode
from holdfast.log.reading.topic_history import BUCKETS_MAX
from holdfast.protocol.topics.names import InvalidFilter, check_filter
from holdfast.security.access.scopes import Scope
from holdfast.security.http.requests import shown

COUNT_S: Final = 2.0
"""The time in seconds after which a count ends, incomplete."""
COUNTS_MAX: Final = 2
"""The most requests that count at the same time."""
FROM_US: Final = Whole("from_us", "the begin, in microseconds since 1970; default: the log's")
TO_US: Final = Whole("to_us", "the end; default: now")
BUCKETS: Final = Whole(
    "buckets", "the number of equal spans", least=1, most=BUCKETS_MAX, default=60
)
FILTER: Final = Text("filter", "messages of these topics", most=65_535, default="#")


class LogCounts(Struct):
    """The messages in each span of time."""

    from_us: int
    bucket_us: int
    """The length of a span in microseconds."""
    counts: list[int]
    complete_from_us: int
    """The counts before this time are incomplete, because the count was ended."""
    oldest_us: int
    """The time of the oldest record of the log; 0: the log is empty."""


class RecordCountRoutes:
    """The route of counts."""

    def __init__(self, node: OwnNode) -> None:
        self._node = node
        self._running = 0

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/log/counts", Scope.VIEWER,
                     "the number of messages in equal spans of time", self._count, LogCounts,
                     (FROM_US, TO_US, BUCKETS, FILTER), refusals=(421, 503)),
        ]  # fmt: skip

    async def _count(self, call: Call) -> LogCounts:
        broker = self._node.readable_broker
        state = self._node.state
        filter = call[FILTER]
        try:
            check_filter(filter)
        except InvalidFilter as error:
            raise bad_request(f"filter={shown(filter)}: {error}") from None
        segments = state.journal.segments
        times = [each.head.first_timestamp_us for each in segments if each.head.records]
        oldest_us = min(times, default=0)
        to_us = call.get(TO_US) or state.wall_us + 1
        from_us = call.get(FROM_US) or min(oldest_us or to_us, to_us - 1)
        if from_us >= to_us:
            raise bad_request(f"from_us={from_us}: it must be below to_us={to_us}")
        if self._running >= COUNTS_MAX:
            raise ApiRefusal(503, f"{COUNTS_MAX} requests count already: try again",
                             {"Retry-After": "1"})  # fmt: skip
        self._running += 1
        try:
            make = partial(broker.reader.starts.histogram, filter, (from_us, to_us), call[BUCKETS])
            found = await broker.reads.in_thread(make)
            deadline = broker.loop.time() + COUNT_S
            while not found.is_done() and broker.loop.time() < deadline:
                await broker.reads.in_thread(found.step)
        finally:
            self._running -= 1
        complete_us = found.complete_from_us
        return LogCounts(from_us, found.width_us, found.counts, complete_us, oldest_us)
