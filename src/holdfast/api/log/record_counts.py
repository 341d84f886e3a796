"""`GET /api/v1/log/counts`: the number of messages over time, for a histogram."""

from functools import partial
from operator import add
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text, Whole, bad_request
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.nodes.whole_log import ANSWER_S, WholeLog, check_restarts
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


class CountQuestion(Struct):
    """Asks a node for the counts of some partitions; None: of all."""

    filter: str
    from_us: int
    to_us: int
    buckets: int
    partitions: list[int] | None


class RecordCountRoutes:
    """The route of counts."""

    def __init__(self, node: OwnNode, everywhere: Everywhere) -> None:
        self._node = node
        self._running = 0
        everywhere.offer("log_counts", CountQuestion, self._count_here)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/log/counts", Scope.VIEWER,
                     "the number of messages in equal spans of time", self._count, LogCounts,
                     (FROM_US, TO_US, BUCKETS, FILTER), refusals=(421, 503)),
        ]  # fmt: skip

    async def _count(self, call: Call) -> LogCounts:
        filter = call[FILTER]
        try:
            check_filter(filter)
        except InvalidFilter as error:
            raise bad_request(f"filter={shown(filter)}: {error}") from None
        log = await self._node.log()
        oldest_us = log.oldest_us
        to_us = call.get(TO_US) or self._node.state.wall_us + 1
        from_us = call.get(FROM_US) or min(oldest_us or to_us, to_us - 1)
        if from_us >= to_us:
            raise bad_request(f"from_us={from_us}: it must be below to_us={to_us}")
        if self._running >= COUNTS_MAX:
            raise ApiRefusal(503, f"{COUNTS_MAX} requests count already: try again",
                             {"Retry-After": "1"})  # fmt: skip
        self._running += 1
        try:
            question = CountQuestion(filter, from_us, to_us, call[BUCKETS], None)
            if not log.nodes:
                found = await self._count_here(question)
            else:
                found = await self._count_everywhere(question, log)
        finally:
            self._running -= 1
        found.oldest_us = oldest_us
        return found

    async def _count_everywhere(self, question: CountQuestion, log: WholeLog) -> LogCounts:
        """Counts each partition at the node where it is read."""
        own = [each for each in range(len(log.ends)) if each not in log.nodes]
        found = await self._count_here(replace(question, partitions=own))
        for node in sorted(set(log.nodes.values())):
            asked = [partition for partition, name in log.nodes.items() if name == node]
            there: LogCounts = await self._node.ask(
                node, "log_counts", replace(question, partitions=asked), LogCounts, ANSWER_S
            )
            found.counts = list(map(add, found.counts, there.counts))
            found.complete_from_us = max(found.complete_from_us, there.complete_from_us)
        return found

    async def _count_here(self, question: CountQuestion) -> LogCounts:
        broker = self._node.readable_broker
        chosen = None if question.partitions is None else frozenset(question.partitions)
        make = partial(
            broker.reader.starts.histogram,
            question.filter,
            (question.from_us, question.to_us),
            question.buckets,
            chosen,
        )
        restarts = broker.node.state.journal.restarts
        found = await broker.reads.in_thread(make)
        deadline = broker.loop.time() + COUNT_S
        while not found.is_done() and broker.loop.time() < deadline:
            await broker.reads.in_thread(found.step)
        check_restarts(broker, restarts)
        complete_us = found.complete_from_us
        return LogCounts(question.from_us, found.width_us, found.counts, complete_us, 0)
