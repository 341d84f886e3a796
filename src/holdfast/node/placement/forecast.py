"""Forecasts which leaders and replicas the controller would give partitions.

The controller itself decides, on a copy of the metadata on which every new replica is in sync at
once. So a forecast cannot differ from what the controller does, unless nodes fail or join
meanwhile.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from holdfast.node.failure.health import Health
from holdfast.node.metadata.commands import ChangePartitions, Command, apply
from holdfast.node.metadata.model import ClusterMetadata, PartitionInfo
from holdfast.node.placement.controller import Controller, ControllerConfig

STEPS_MAX: Final = 10_000
"""The most decisions of one forecast. Each one changes up to `moves_max` partitions or more."""
STEP_S: Final = 3600.0
"""The time in seconds between two decisions, longer than every wait of the controller."""


@dataclass(frozen=True)
class PartitionForecast:
    """A partition that changes, now and at the end."""

    partition: int
    before: PartitionInfo
    after: PartitionInfo

    @property
    def copies_to(self) -> tuple[str, ...]:
        """The nodes that receive a copy of the partition."""
        return tuple(each for each in self.after.replicas if each not in self.before.members)


def forecast(
    metadata: ClusterMetadata, health: Health, command: Command | None
) -> list[PartitionForecast]:
    """The partitions that change after a command, None for no command. It costs time in proportion
    to the partitions, so it runs in a thread."""
    after = _settled(_applied(metadata, command), health)
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
    return Health(
        health.present,
        health.suspected,
        health.dead,
        health.leaving,
        health.stalled,
        health.damaged,
        health.full,
        asking=health.asking,
        unmet=health.unmet,
    )
