"""Limits and their use, drops by reason with the last cases, settings, and known readers."""

import asyncio
from typing import Any, Final

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Whole
from holdfast.api.metrics.catalog import DROPPED, REFUSED
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode, cluster_of
from holdfast.api.views.events import NoteRow, note_row
from holdfast.api.views.pages import AbsentNode
from holdfast.security.access.scopes import Scope

CASES_MAX: Final = 100
CASES: Final = Whole("cases", "the most last cases", most=CASES_MAX, default=50)
CASE_EVENTS: Final = (
    "connection_refused", "publish_denied", "read_denied", "will_denied", "records_lost",
    "retained_limit", "connections_full", "address_full", "listener_full", "publish_refused",
    "protocol_error", "handshake_failed", "connection_displaced", "producer_evicted",
    "rate_limited", "banned", "locked_out",
)  # fmt: skip
"""The log lines that are cases of a drop or a refusal."""


class LimitUse(Struct):
    """One limit of a node."""

    name: str
    """The key of the setting."""
    used: int
    most: int
    """0: no limit."""


class NodeLimits(Struct):
    """The limits of one node."""

    node: str
    limits: list[LimitUse]


class LimitsReply(Struct):
    """The limits of all nodes."""

    nodes: list[NodeLimits]
    missing: list[AbsentNode] = []


class NodeDrops(Struct):
    """The drops and refusals of one node since its start."""

    node: str
    since_us: int
    dropped: dict[str, int]
    """Deliveries, by reason."""
    refused: dict[str, int]
    """Publishes and connections, by reason."""
    cases: list[NoteRow]
    """The last cases, newest first. A client that repeats one has a line a minute."""


class DropsReply(Struct):
    """The drops and refusals of all nodes."""

    nodes: list[NodeDrops]
    missing: list[AbsentNode] = []


class FigureQuestion(Struct):
    """A question about the figures of another node."""

    cases: int = 50


class SettingRow(Struct):
    """One setting of this node."""

    key: str
    value: Any
    origin: str
    """The file and line, the variable, the option, or `default`, as it is now."""
    is_default: bool


class SettingsReply(Struct):
    """The settings of the node that was asked."""

    node: str
    settings: list[SettingRow]


class FigureRoutes:
    """The routes of limits, drops and settings."""

    def __init__(self, node: OwnNode, everywhere: Everywhere) -> None:
        self._node = node
        self._everywhere = everywhere
        everywhere.offer("limits", FigureQuestion, self._limits_here)
        everywhere.offer("drops", FigureQuestion, self._drops_here)

    def endpoints(self) -> list[Endpoint]:
        v1, viewer = "/api/v1", Scope.VIEWER
        return [
            Endpoint("GET", f"{v1}/limits", viewer, "the limits of all nodes and their use",
                     self._limits, LimitsReply, refusals=(503,)),
            Endpoint("GET", f"{v1}/drops", viewer,
                     "what was dropped or refused, by reason, with the last cases", self._drops,
                     DropsReply, (CASES,), refusals=(503,)),
            Endpoint("GET", f"{v1}/cluster", viewer, "the cluster as this node sees it",
                     self._cluster, dict, refusals=(503,)),
            Endpoint("GET", f"{v1}/settings", viewer, "the settings of this node with their origin",
                     self._settings, SettingsReply, refusals=(503,)),
        ]  # fmt: skip

    async def _limits(self, call: Call) -> LimitsReply:
        own = await self._limits_here(FigureQuestion())
        others, missing = await self._everywhere.ask_others("limits", FigureQuestion(), NodeLimits)
        return LimitsReply(sorted([own, *others], key=lambda each: each.node), missing)

    async def _limits_here(self, question: FigureQuestion) -> NodeLimits:
        state = self._node.state
        config = state.config
        sessions, subscriptions, _ = state.cluster.away()
        recorded = state.recorded
        filter_bytes = max(state.filters.total, recorded.filters.total)
        rows = [
            LimitUse("limits.connections", state.connections, config.connections),
            LimitUse("limits.sessions", state.client_sessions() + sessions, config.sessions_max),
            LimitUse("limits.retained_max", state.retained.topics.total, config.retained_max),
            LimitUse("limits.retained_bytes", state.retained.bytes.total,
                     config.retained_bytes_max),
            LimitUse("limits.producers_max", len(state.producers), config.producers_max),
            LimitUse("pending_bytes", state.journal.pending_bytes, config.pending_bytes_max),
            LimitUse("limits.filter_bytes", filter_bytes, config.filter_bytes_max),
            LimitUse("subscriptions", state.subscription_count + subscriptions, 0),
        ]  # fmt: skip
        return NodeLimits(self._node.node_id, rows)

    async def _drops(self, call: Call) -> DropsReply:
        question = FigureQuestion(call[CASES])
        own = await self._drops_here(question)
        others, missing = await self._everywhere.ask_others("drops", question, NodeDrops)
        return DropsReply(sorted([own, *others], key=lambda each: each.node), missing)

    async def _drops_here(self, question: FigureQuestion) -> NodeDrops:
        broker, state = self._node.broker, self._node.state
        stats = state.stats
        cases = [
            note_row(each)
            for each in reversed(broker.notes.after(0))
            if each.note.event in CASE_EVENTS
        ]
        return NodeDrops(
            self._node.node_id,
            state.started_us,
            {reason: getattr(stats, name) for reason, name in DROPPED.items()},
            {
                **{reason: getattr(stats, name) for reason, name in REFUSED.items()},
                "connections": stats.connections_refused,
                "publish_not_authorised": stats.authorizations_denied,
                "read_not_authorised": stats.reads_denied,
            },
            cases[: min(question.cases, CASES_MAX)],
        )

    async def _cluster(self, call: Call) -> object:
        return cluster_of(self._node.server).status()

    async def _settings(self, call: Call) -> SettingsReply:
        explain = self._node.server.explain
        if explain is None:
            raise ApiRefusal(503, "this process was started without a configuration")
        try:
            # Files are read, so not in the event loop.
            found = await asyncio.to_thread(explain)
        except ValueError as error:
            raise ApiRefusal(503, f"the configuration cannot be read now: {error}") from None
        rows = [SettingRow(each.key, each.value, each.origin, each.is_default) for each in found]
        return SettingsReply(self._node.node_id, rows)
