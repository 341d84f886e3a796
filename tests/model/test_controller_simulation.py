"""The controller against nodes that die, return, lose their disks, join, drain and are removed,
while partition leaders change their in-sync sets and proposals are late, lost and repeated. See
tests/support/sim_controller.py for what is checked; in the end everything is as it should be.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

import pytest
from msgspec import structs
from msgspec.structs import replace

from holdfast.node.metadata import commands, operations
from holdfast.node.metadata.commands import Resize, SetReplication
from holdfast.node.metadata.model import ClusterMetadata, PartitionInfo
from holdfast.node.placement import controller, planning
from holdfast.node.placement.planning import NodeConditions
from holdfast.node.placement.ring import Assignment, placement
from tests.support.seeds import block_of_seeds, run_seeds
from tests.support.sim_controller import ControllerWorld, Wrong, life

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
    expected = {"kill", "start", "wipe", "join", "drain", "undrain", "remove", "hang", "resize"}
    expected.add("switch_moves")
    assert happened >= expected


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


def test_a_copy_that_begins_while_moves_are_paused_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = controller.Controller._begin_moves

    def deaf(
        self: controller.Controller,
        metadata: ClusterMetadata,
        wanted: Assignment,
        standing: NodeConditions,
        free: Iterable[int],
    ) -> list[controller.Change]:
        return begin(self, replace(metadata, placement=None), wanted, standing, free)

    monkeypatch.setattr(controller.Controller, "_begin_moves", deaf)
    require_found()


def test_two_replicas_in_one_zone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(
        nodes: Collection[str],
        partitions: int,
        factor: int,
        current: Sequence[Sequence[str]],
        traits: object,
    ) -> Assignment:
        return placement(nodes, partitions, factor, current)

    monkeypatch.setattr(planning, "placement", blind)
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
        return planning.repaired(info, structs.replace(standing, wiped=frozenset()), min_insync)

    without_guards(monkeypatch)
    monkeypatch.setattr(controller, "repaired", trusting)
    require_found()


def test_a_replica_that_is_never_added_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "lacks_replica", lambda info, wanted, standing: False)
    require_found()


def steps_at_once(metadata: ClusterMetadata) -> SetReplication | None:
    """Both settings in one step, whatever copies there are."""
    present = (metadata.replication_factor, metadata.min_insync)
    wanted = metadata.wanted_replication
    return SetReplication(present, wanted) if wanted != present else None


def test_a_resize_without_steps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "next_replication", steps_at_once)
    require_found()


def test_a_resize_that_never_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "next_replication", lambda metadata: None)
    require_found()


# Every crash point of a resize.


def resizing(interrupt: Callable[[ControllerWorld, int], None]) -> int:
    """A cluster grows from one node to three and back by `auto`. `interrupt` is called in each turn
    with the number of changes of the metadata so far. Returns that number; raises Wrong."""
    world = ControllerWorld(0, partitions=4, replication_factor=1)
    world.is_rough = False
    world.propose(Resize(0, True, 0, 0))
    world.run(1)
    count = 0

    def turn(duration_s: float, replication: tuple[int, int]) -> None:
        nonlocal count
        end = world.now + duration_s
        while world.now < end:
            known = world.metadata.version
            world.tick()
            count += world.metadata.version != known
            interrupt(world, count)
        assert (world.metadata.replication_factor, world.metadata.min_insync) == replication
        world.require_perfect()

    for node, replication in (("n2", (2, 1)), ("n3", (3, 2))):
        world.join(node)
        turn(30.0, replication)
    for node, replication in (("n3", (2, 1)), ("n2", (1, 1))):
        assert world.operate(operations.drain, node)
        turn(30.0, replication)
    return count


def test_a_resize_survives_a_crash_at_every_point() -> None:
    """Stops the node whose controller decides: what was on its way is lost, and the next one begins
    with nothing but the metadata."""

    def crash(world: ControllerWorld, at: int) -> None:
        nonlocal point
        if at >= point >= 0:
            point = -1
            world.depose(is_noticed=True)
            # An operator sends his command again.
            world.flights = [each for each in world.flights if each.done is None]

    point = -1
    changes = resizing(crash)
    assert changes > 12
    for number in range(changes):
        point = number
        resizing(crash)
        assert point == -1


@pytest.mark.parametrize("node", ["n1", "n2", "n3"])
def test_a_resize_survives_the_death_of_a_node_at_every_point(node: str) -> None:
    """It is dead for longer than `replace_after_s`, and comes back."""

    def crash(world: ControllerWorld, at: int) -> None:
        nonlocal point, start_at
        if at >= point >= 0 and node in world.metadata.nodes:
            point = -1
            world.kill(node)
            start_at = world.now + 6.0
        if world.now >= start_at:
            start_at = float("inf")
            world.start(node)

    point, start_at = -1, float("inf")
    for number in range(resizing(crash)):
        point = number
        resizing(crash)
        assert point == -1
