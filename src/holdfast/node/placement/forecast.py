"""Forecasts which leaders and replicas the controller would give partitions.

The controller itself decides, on a copy of the metadata on which every new replica is in sync at
once. So a forecast cannot differ from what the controller does, unless nodes fail or join
meanwhile.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from holdfast.node.failure.health import Health, Presence
from holdfast.node.metadata import operations
from holdfast.node.metadata.commands import (
    ChangePartitions,
    Command,
    PutNode,
    PutPlacement,
    apply,
)
from holdfast.node.metadata.model import (
    NOT_PLACED,
    ClusterMetadata,
    NodeInfo,
    NodeTraits,
    PartitionInfo,
)
from holdfast.node.placement.controller import Controller, ControllerConfig

STEPS_MAX: Final = 10_000
"""The most decisions of one forecast. Each one changes up to `moves_max` partitions or more."""
PLANNED: Final = "planned"
"""The incarnation of a node that has not joined yet."""
STEP_S: Final = 3600.0
"""The time in seconds between two decisions, longer than every wait of the controller."""


class PartitionForecast(Struct, frozen=True):
    """A partition that changes, now and at the end."""

    partition: int
    before: PartitionInfo
    after: PartitionInfo

    @property
    def copied_from(self) -> str:
        """The node that the copies are read from, as far as it is known."""
        kept = (each for each in self.after.replicas if each in self.before.members)
        leader = self.before.leader
        return leader if leader in self.after.replicas else next(kept, leader)

    @property
    def copies_to(self) -> tuple[str, ...]:
        """The nodes that receive a copy of the partition."""
        return tuple(each for each in self.after.replicas if each not in self.before.members)


class Situation(Struct, frozen=True):
    """A cluster as a forecast begins with it: that of now, or one with a node more or less."""

    metadata: ClusterMetadata
    health: Health

    def with_node(self, traits: NodeTraits) -> "Situation":
        """The cluster after a data node has joined."""
        node = traits.node
        metadata = _applied(self.metadata, PutNode(NodeInfo(node, PLANNED, "", "", ""), 0))
        placed = metadata.placement or NOT_PLACED
        command = PutPlacement(placed.version, (*placed.traits, traits), placed.is_paused)
        present = {**self.health.present, node: Presence(PLANNED, "")}
        return Situation(_applied(metadata, command), replace(self.health, present=present))

    def without_node(self, node: str) -> "Situation":
        """The cluster after a node was lost for good."""
        health = self.health
        present = {name: each for name, each in health.present.items() if name != node}
        return Situation(
            self.metadata,
            replace(
                health,
                present=present,
                suspected=health.suspected | {node},
                dead=health.dead | {node},
            ),
        )


def forecast(situation: Situation, command: Command | None) -> list[PartitionForecast]:
    """The partitions that change after a command, None for no command, as if moves were not paused.
    It costs time in proportion to the partitions, so it runs in a thread."""
    metadata, health = situation.metadata, situation.health
    resumed = _applied(metadata, operations.pause(metadata, False))
    after = _settled(_applied(resumed, command), health)
    return [
        PartitionForecast(number, old, new)
        for number, (old, new) in enumerate(zip(metadata.partitions, after.partitions, strict=True))
        if (old.leader, old.members) != (new.leader, new.members)
    ]


def _settled(metadata: ClusterMetadata, health: Health) -> ClusterMetadata:
    """The metadata when the controller has nothing left to do."""
    count = len(metadata.partitions)
    config = ControllerConfig(moves_max=count, leader_moves_max=count)
    controller = Controller("forecast", config)
    now = idle = 0
    # The first step may only note since when nodes are down, so one idle step is not the end.
    while idle < 2 and now < STEPS_MAX:
        now += 1
        before = metadata
        for command in controller.step(metadata, _copy(health), now * STEP_S):
            metadata = _applied(metadata, command)
        metadata = _caught_up(metadata, health.present)
        idle = idle + 1 if metadata is before else 0
    return metadata


def _applied(metadata: ClusterMetadata, command: Command | None) -> ClusterMetadata:
    if command is None:
        return metadata
    made = apply(metadata, command).metadata
    assert made is not None
    return made


def _caught_up(metadata: ClusterMetadata, present: Mapping[str, object]) -> ClusterMetadata:
    """The metadata after every replica on a present node has become in sync."""
    changes = []
    for number, info in enumerate(metadata.partitions):
        arrived = tuple(
            node for node in info.members if node in present and node not in info.in_sync
        )
        if arrived and info.leader:
            made = replace(info, in_sync=info.in_sync + arrived)
            changes.append((number, info.version, made))
    return _applied(metadata, ChangePartitions(tuple(changes)) if changes else None)


def _copy(health: Health) -> Health:
    """An equal object: the controller takes the same one for a repetition and does nothing."""
    return replace(health, incomplete={})
