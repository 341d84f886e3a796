"""`GET /api/v1/timeline`: what happened in the cluster, and the figures of its nodes meanwhile.

Any node replies for all. A change of the metadata is in the memory of every node that applied it,
so it is in the reply as long as one of them remembers. The figures and notes of a node are in its
own memory only: a restart begins with none, and the reply says since when a node has them.
"""

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from holdfast.api.cluster.figures import FigureColumns, FigureRecorder
from holdfast.api.endpoints import Call, Endpoint, Whole
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode, cluster_of
from holdfast.api.views.events import NoteRow, note_row
from holdfast.api.views.pages import AbsentNode
from holdfast.node.metadata.history import MetadataChange
from holdfast.security.access.scopes import Scope

SINCE_US = Whole("since_us", "the oldest time, in microseconds since 1970", default=0)


class NodeStep(Struct):
    """A node with another state than before. "" is the state before it joined."""

    node: str
    before: str
    after: str


class PartitionStep(Struct):
    """A partition with another leader, epoch or in-sync set than before."""

    partition: int
    leader_before: str
    leader_after: str
    epoch: int
    in_sync_before: list[str]
    in_sync_after: list[str]


class ClusterStep(Struct):
    """A change of the metadata, at the time at which the first node applied it."""

    version: int
    at_us: int
    nodes: list[NodeStep]
    partitions: list[PartitionStep]


class NodeTimeline(Struct):
    """The part of one node."""

    node: str
    started_us: int
    """The start of its process. It has no figures and no notes from before."""
    figures: FigureColumns
    notes: list[NoteRow]
    """Its lines of the log about the cluster: suspicions, leaders of the metadata, the disk."""
    steps: list[ClusterStep] = []


class TimelineReply(Struct):
    """The timeline of all nodes."""

    node: str
    now_us: int
    nodes: list[NodeTimeline]
    steps: list[ClusterStep]
    """The changes of the cluster, oldest first. Each begins with the state before it, and
    `GET /api/v1/cluster` has the state after the last one."""
    missing: list[AbsentNode] = []


class TimelineQuestion(Struct):
    """The timeline of another node since a time."""

    since_us: int = 0


class TimelineRoutes:
    """The route of the timeline."""

    def __init__(self, node: OwnNode, everywhere: Everywhere, figures: FigureRecorder) -> None:
        self._node = node
        self._everywhere = everywhere
        self._figures = figures
        everywhere.offer("timeline", TimelineQuestion, self._here)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/timeline", Scope.VIEWER,
                     "leaders, in-sync sets and figures of all nodes in the last minutes",
                     self._timeline, TimelineReply, (SINCE_US,), refusals=(503,)),
        ]  # fmt: skip

    async def _timeline(self, call: Call) -> TimelineReply:
        question = TimelineQuestion(call[SINCE_US])
        own = await self._here(question)
        others, missing = await self._everywhere.ask_others("timeline", question, NodeTimeline)
        nodes = sorted([own, *others], key=lambda each: each.node)
        steps = merged(step for each in nodes for step in each.steps)
        for each in nodes:
            each.steps = []
        now_us = cluster_of(self._node.server).now_us()
        return TimelineReply(self._node.node_id, now_us, nodes, steps, missing)

    async def _here(self, question: TimelineQuestion) -> NodeTimeline:
        broker, cluster = self._node.broker, cluster_of(self._node.server)
        since_us = question.since_us
        return NodeTimeline(
            self._node.node_id,
            broker.node.state.started_us,
            self._figures.columns(since_us),
            [note_row(each) for each in broker.notes.of_cluster(since_us)],
            [step_of(each) for each in cluster.changes(since_us)],
        )


def step_of(change: MetadataChange) -> ClusterStep:
    """A change of the metadata as JSON."""
    return ClusterStep(
        change.version,
        change.at_us,
        [NodeStep(*each) for each in change.nodes],
        [
            PartitionStep(
                each.partition,
                each.leader_before,
                each.leader_after,
                each.epoch,
                list(each.in_sync_before),
                list(each.in_sync_after),
            )
            for each in change.partitions
        ],
    )


def merged(steps: Iterable[ClusterStep]) -> list[ClusterStep]:
    """The steps of several nodes, each version once, at its earliest time."""
    found: dict[int, ClusterStep] = {}
    for step in steps:
        known: Any = found.get(step.version)
        if known is None or step.at_us < known.at_us:
            found[step.version] = step
    return [found[version] for version in sorted(found)]
