"""Records figures of one node twice a second: publishes, acknowledgements, refusals, waits.

The node records them whether or not a client of the admin port looks, so that a failover can be
seen afterwards. One row costs some microseconds, and the rows of ten minutes have a bound of 1,200.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from holdfast.api.process import ServedProcess
from holdfast.io.event_loop.broker import Broker
from holdfast.node.durations import BOUNDS_S

INTERVAL_S: Final = 0.5
ROWS_MAX: Final = 1200
"""The most rows that are kept: ten minutes."""
REFUSED: Final = (
    "refused_disk_full", "refused_quota", "refused_unavailable", "refused_rate",
)  # fmt: skip
"""The counters of refused publishes."""


class FigureColumns(Struct):
    """The figures of a node, one list per column, the oldest row first."""

    at_us: list[int]
    published_per_s: list[float]
    acknowledge_p99_ms: list[float | None]
    """The p99 of a sample of the publishes acknowledged since the row before; None: no publish."""
    refused: list[int]
    """Publishes refused since the row before."""
    waiting: list[int]
    """Publishes of QoS 1 and 2 without an acknowledgement now."""
    waits_ms: list[float]
    """The age of the oldest of them."""


class FigureRow(NamedTuple):
    """The figures of one moment."""

    at_us: int
    published_per_s: float
    acknowledge_p99_ms: float | None
    refused: int
    waiting: int
    waits_ms: float


class FigureRecorder:
    """The latest figures of this node."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server
        self._rows: deque[FigureRow] = deque(maxlen=ROWS_MAX)
        self._broker: Broker | None = None
        self._taken_at = 0.0
        self._counts: list[int] = []
        self._published = self._refused = 0

    async def run(self) -> None:
        """Takes the figures again and again, until cancelled."""
        while True:
            self.take(time.monotonic())
            await asyncio.sleep(INTERVAL_S)

    def take(self, now: float) -> None:
        """Takes the figures since the last time."""
        broker, cluster = self._server.broker, self._server.cluster
        if broker is None or cluster is None:
            return
        stats = broker.node.state.stats
        counts = list(stats.durations.acknowledged.counts)
        published = stats.publish_received
        refused = sum(getattr(stats, name) for name in REFUSED)
        if broker is self._broker and now > self._taken_at:
            waiting, waits_s = cluster.waiting()
            difference = [new - old for new, old in zip(counts, self._counts, strict=True)]
            row = FigureRow(
                cluster.now_us(),
                round((published - self._published) / (now - self._taken_at), 1),
                quantile_ms(difference, 0.99),
                refused - self._refused,
                waiting,
                round(1000 * waits_s, 1),
            )
            self._rows.append(row)
        self._broker, self._taken_at = broker, now
        self._counts, self._published, self._refused = counts, published, refused

    def columns(self, since_us: int) -> FigureColumns:
        """The rows since a time."""
        rows = [each for each in self._rows if each.at_us >= since_us]
        return FigureColumns(
            [each.at_us for each in rows],
            [each.published_per_s for each in rows],
            [each.acknowledge_p99_ms for each in rows],
            [each.refused for each in rows],
            [each.waiting for each in rows],
            [each.waits_ms for each in rows],
        )


def quantile_ms(counts: Sequence[int], share: float) -> float | None:
    """A quantile of observations in buckets, in milliseconds, evenly spread within its bucket as
    Prometheus does it. None without observations; the last bound for those above it."""
    total = sum(counts)
    if not total:
        return None
    wanted = share * total
    passed = 0
    lower = 0.0
    for count, upper in zip(counts, BOUNDS_S, strict=False):
        if passed + count >= wanted:
            return round(1000 * (lower + (upper - lower) * (wanted - passed) / count), 2)
        passed += count
        lower = upper
    return 1000 * BOUNDS_S[-1]
