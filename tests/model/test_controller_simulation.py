"""The controller against nodes that die, return, lose their disks, join, drain and are removed,
while partition leaders change their in-sync sets and proposals are late, lost and repeated. See
tests/support/sim_controller.py for what is checked; in the end everything is as it should be.
"""

import dataclasses

import pytest
from msgspec.structs import replace

from holdfast.node.metadata import commands
from holdfast.node.metadata.model import PartitionInfo
from holdfast.node.placement import controller, planning
from holdfast.node.placement.planning import NodeConditions
from tests.support.seeds import block_of_seeds, run_seeds
from tests.support.sim_controller import Wrong, life

SEEDS = 20
"""How many lives; A failure names its seed; `tests.model` runs more."""
BLOCKS = 4
PLANTED_SEEDS = 12
"""Within which each planted bug is found."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_never_unclean_and_always_whole_again(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), life)


def test_a_seed_says_everything() -> None:
    first, second = life(7), life(7)
    assert first.trace == second.trace
    assert first.commands == second.commands
    assert first.metadata == second.metadata


def test_the_lives_are_rough() -> None:
    worlds = [life(seed) for seed in range(6)]
    assert sum(world.leader_changes for world in worlds) > 300
    assert sum(world.added for world in worlds) > 150
    assert sum(world.refused["late"] for world in worlds) > 300
    happened = {line.split()[1] for world in worlds for line in world.trace}
    assert happened >= {"kill", "start", "wipe", "join", "drain", "undrain", "remove", "hang"}


def require_found() -> None:
    for seed in range(PLANTED_SEEDS):
        try:
            life(seed)
        except Wrong:
            return
    raise AssertionError(f"not found within {PLANTED_SEEDS} seeds")


def test_a_copy_that_leaves_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(
        info: PartitionInfo, wanted: tuple[str, ...], standing: NodeConditions, min_insync: int
    ) -> PartitionInfo:
        in_sync = tuple(node for node in info.in_sync if node in wanted)
        if info.leader not in in_sync:
            return info
        kept = tuple(node for node in info.replicas if node in wanted)
        return replace(info, replicas=kept, in_sync=in_sync)

    monkeypatch.setattr(planning, "_without_unwanted_replicas", hasty)
    require_found()


def without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the metadata would refuse reaches the world."""
    monkeypatch.setattr(commands, "_check_leader", lambda old, new: None)
    monkeypatch.setattr(commands, "_check_in_sync", lambda old, new, wiped: None)
    monkeypatch.setattr(commands, "_after_wipe", lambda partitions, wiped, version: [])


def test_the_guards_are_not_what_keeps_it_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    without_guards(monkeypatch)
    for seed in range(PLANTED_SEEDS):
        life(seed)


def test_an_unclean_leader_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(info: PartitionInfo, standing: NodeConditions) -> str:
        return next((node for node in info.replicas if node in standing.willing), "")

    def settled(info: PartitionInfo, standing: NodeConditions, min_insync: int) -> PartitionInfo:
        changed = planning.repaired(info, standing, min_insync)
        if changed.leader or not (successor := careless(info, standing)):
            return changed
        in_sync = (*changed.in_sync, successor)
        return replace(changed, leader=successor, epoch=info.epoch + 1, in_sync=in_sync)

    without_guards(monkeypatch)
    monkeypatch.setattr(controller, "repaired", settled)
    require_found()


def test_an_epoch_that_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def lazy(info: PartitionInfo, node: str) -> PartitionInfo:
        return replace(info, leader=node)

    without_guards(monkeypatch)
    monkeypatch.setattr(planning, "with_leader", lazy)
    require_found()


def test_a_wiped_disk_that_stays_in_sync_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def trusting(info: PartitionInfo, standing: NodeConditions, min_insync: int) -> PartitionInfo:
        return planning.repaired(info, dataclasses.replace(standing, wiped=frozenset()), min_insync)

    without_guards(monkeypatch)
    monkeypatch.setattr(controller, "repaired", trusting)
    require_found()


def test_a_replica_that_is_never_added_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "lacks_replica", lambda info, wanted, standing: False)
    require_found()
