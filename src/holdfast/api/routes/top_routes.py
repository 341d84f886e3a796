"""`GET /api/v1/top`: counters, durations, the slowest sessions and the busiest topics of a node.

The counters are sums since the start of the node. A caller that wants rates asks twice.
"""

import time
from typing import Final

from holdfast.api.census import Census
from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Whole
from holdfast.api.process import ServedProcess
from holdfast.api.routes.top_topics import MISSING, TopTopics
from holdfast.api.views.top import TopDurations, TopPublisher, TopReply, TopSession, TopTopic
from holdfast.node.durations import Durations
from holdfast.security.access.scopes import Scope

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
