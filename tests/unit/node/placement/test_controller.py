"""What the controller does about each thing that happens to a cluster. All at once and at random:
tests/model/test_controller_simulation.py."""

import json
from collections import Counter
from itertools import pairwise

import pytest
from msgspec import structs
from msgspec.structs import replace

from holdfast.node.failure.health import Health
from holdfast.node.metadata import operations
from holdfast.node.metadata.commands import ChangePartitions, apply
from holdfast.node.metadata.model import WITNESS, ClusterMetadata, NodePhase, PartitionInfo
from holdfast.node.metadata.operations import OperationError
from holdfast.node.metadata.status import cluster_status
from holdfast.node.placement.controller import Controller, ControllerConfig
from tests.support.sim_controller import ControllerWorld, node_info

CONFIG = ControllerConfig()


def cluster(*nodes: str, partitions: int = 64, min_insync: int = 1) -> ControllerWorld:
    world = ControllerWorld(1, partitions=partitions, min_insync=min_insync, config=CONFIG)
    world.is_rough = False
    for node in nodes:
        world.join(node)
    world.run(10)
    world.require_perfect()
    return world


def leaders(world: ControllerWorld) -> Counter[str]:
    return Counter(info.leader for info in world.metadata.partitions)


def holding(world: ControllerWorld, node: str) -> set[int]:
    return {number for number, info in enumerate(world.metadata.partitions) if node in info.members}


def until_dead(world: ControllerWorld, node: str) -> ChangePartitions:
    """Kills the node; returns the one command that follows at once."""
    world.kill(node)
    world.look()
    (command,) = world.controllers[-1].step(world.metadata, world.health, world.now)
    assert isinstance(command, ChangePartitions)
    return command


def test_a_new_cluster_grows_to_its_replication_factor() -> None:
    world = cluster()
    assert {info.replicas for info in world.metadata.partitions} == {("n1",)}
    world.join("n2")
    world.run(10)
    world.require_perfect()
    assert sorted(leaders(world).values()) == [32, 32]
    world.join("n3")
    world.run(10)
    world.require_perfect()
    assert all(len(info.in_sync) == 3 for info in world.metadata.partitions)
    assert world.added == 128


def test_a_death_is_one_command() -> None:
    world = cluster("n2", "n3")
    before = world.metadata
    command = until_dead(world, "n2")
    after = apply(before, command).metadata
    assert after is not None
    assert after.nodes["n2"].state == NodePhase.DOWN
    for old, new in zip(before.partitions, after.partitions, strict=True):
        assert "n2" not in new.in_sync
        assert new.replicas == old.replicas
        if old.leader == "n2":
            first = old.replicas.index("n2") + 1
            assert new.leader == (*old.replicas[first:], *old.replicas[:first])[0]
            assert new.epoch == old.epoch + 1
        else:
            assert (new.leader, new.epoch) == (old.leader, old.epoch)


def test_a_proposal_is_not_made_twice() -> None:
    world = cluster("n2", "n3")
    command = until_dead(world, "n2")
    controller = world.controllers[-1]
    assert controller.step(world.metadata, world.health, world.now) == []
    other_health = structs.replace(world.health)
    assert controller.step(world.metadata, other_health, world.now + 1.0) == []
    at = controller.timer()
    assert at is not None
    assert at <= world.now + CONFIG.proposal_timeout_s
    later = world.now + CONFIG.proposal_timeout_s
    assert controller.step(world.metadata, world.health, later) == [command], "no answer"


def test_what_was_refused_is_decided_anew() -> None:
    world = cluster("n2", "n3")
    command = until_dead(world, "n2")
    controller = world.controllers[-1]
    # A partition's leader came first.
    info = world.metadata.partitions[0]
    shrunk = replace(info, in_sync=tuple(node for node in info.in_sync if node != "n2"))
    if info.leader == "n2":
        shrunk = replace(info, in_sync=info.in_sync[:2])
    world.carry_out(ChangePartitions(((0, info.version, shrunk),)))
    assert apply(world.metadata, command).error
    controller.note_outcome(command, world.now)
    at = controller.timer()
    assert at is not None
    assert at <= world.now + CONFIG.retry_s
    (again,) = controller.step(world.metadata, world.health, at)
    assert apply(world.metadata, again).error == ""


def test_a_death_under_many_partitions_is_several_commands() -> None:
    config = structs.replace(CONFIG, changes_max=10)
    world = cluster("n2", "n3")
    world.controllers = [Controller("n1", config)]
    world.kill("n2")
    world.look()
    commands = world.controllers[-1].step(world.metadata, world.health, world.now)
    sizes = [len(c.changes) for c in commands if isinstance(c, ChangePartitions)]
    assert sizes == [10] * 6 + [4]
    metadata: ClusterMetadata | None = world.metadata
    for command in commands:
        applied = apply(metadata, command)
        assert applied.error == ""
        metadata = applied.metadata
    assert metadata is not None
    assert not any("n2" in info.in_sync for info in metadata.partitions)


def test_when_all_in_sync_are_dead_a_partition_waits() -> None:
    world = cluster("n2", "n3")
    world.kill("n2")
    world.kill("n3")
    world.run(2)
    assert set(leaders(world)) == {"n1"}
    world.kill("n1")
    world.run(2)
    assert set(leaders(world)) == {""}
    assert {info.in_sync for info in world.metadata.partitions} == {("n1",)}
    world.start("n2")
    world.start("n3")
    world.run(30)
    assert set(leaders(world)) == {""}, "they lack what n1 alone has promised"
    world.start("n1")
    world.run(30)
    world.require_perfect()


def test_all_at_once_and_the_first_back_leads() -> None:
    world = cluster("n2", "n3")
    for node in ("n1", "n2", "n3"):
        world.kill(node)
    world.run(2)
    assert set(leaders(world)) == {""}
    assert all(len(info.in_sync) == 3 for info in world.metadata.partitions)
    world.start("n2")
    world.run(2)
    assert set(leaders(world)) == {"n2"}


def test_a_node_that_is_back_leads_again_after_a_while() -> None:
    world = cluster("n2", "n3")
    world.kill("n2")
    world.run(3)
    world.start("n2")
    world.run(CONFIG.balance_after_s - 1)
    assert leaders(world)["n2"] == 0
    assert world.metadata.nodes["n2"].state == NodePhase.UP
    assert all("n2" in info.in_sync for info in world.metadata.partitions)
    added = world.added
    world.run(5)
    world.require_perfect()
    assert world.added == added


def test_the_leaderships_of_a_node_that_comes_and_goes_do_not() -> None:
    world = cluster("n2", "n3", partitions=12)
    share = leaders(world)["n2"]
    got_back = 0
    for _ in range(12):
        world.kill("n2")
        world.run(3)
        assert leaders(world)["n2"] == 0
        world.start("n2")
        world.run(CONFIG.balance_after_s + 3)
        got_back += leaders(world)["n2"] > 0
    assert got_back == 1, "only before it was known to come and go"
    world.run(CONFIG.balance_after_s_max + 5)
    assert leaders(world)["n2"] == share
    world.run(10 * CONFIG.balance_after_s_max)
    world.kill("n2")
    world.run(3)
    world.start("n2")
    world.run(CONFIG.balance_after_s + 3)
    assert leaders(world)["n2"] == share, "it was steady meanwhile"


def test_leaders_go_back_a_few_at_a_time_or_at_once_when_told() -> None:
    world = cluster("n2", "n3")
    world.kill("n2")
    world.run(3)
    world.start("n2")
    world.run(2)
    command = operations.rebalance(world.metadata)
    assert isinstance(command, ChangePartitions)
    assert len(command.changes) > CONFIG.leader_moves_max
    assert apply(world.metadata, command).error == ""
    counts = [leaders(world)["n2"]]
    while counts[-1] < len(command.changes):
        world.tick()
        counts.append(leaders(world)["n2"])
    steps = [later - earlier for earlier, later in pairwise(counts)]
    assert max(steps) <= CONFIG.leader_moves_max
    assert operations.rebalance(world.metadata) is None


def test_a_wiped_node_leaves_every_in_sync_set_in_one_command() -> None:
    world = cluster("n2", "n3")
    before = world.metadata
    world.wipe("n2")
    world.look()
    (command,) = world.controllers[-1].step(before, world.health, world.now)
    applied = apply(before, command)
    assert applied.error == ""
    after = applied.metadata
    assert after is not None
    assert after.nodes["n2"].incarnation == "i2"
    assert not any("n2" in (*info.in_sync, info.leader) for info in after.partitions)
    world.run(20)
    world.require_perfect()


def test_a_wiped_node_waits_for_a_proposal_it_could_conflict_with() -> None:
    world = cluster("n2", "n3")
    controller = world.controllers[-1]
    leaving = structs.replace(world.health, leaving=frozenset({"n1"}))
    (first,) = controller.step(world.metadata, leaving, world.now)
    assert isinstance(first, ChangePartitions)
    world.wipe("n2")
    world.look()
    commands = controller.step(world.metadata, world.health, world.now)
    assert all(isinstance(c, ChangePartitions) and not c.nodes for c in commands)
    world.carry_out(first)
    for command in commands:
        world.carry_out(command)
    world.run(20)
    assert world.metadata.nodes["n2"].incarnation == "i2"
    world.require_perfect()


def test_the_last_disk_lost_needs_an_operator() -> None:
    world = cluster("n2", "n3", partitions=8)
    world.kill("n2")
    world.kill("n3")
    world.run(2)
    world.wipe("n1")
    world.start("n2")
    world.start("n3")
    world.run(30)
    # The disk before may only not be mounted: nothing is given up without an operator.
    assert all(info.in_sync == ("n1",) for info in world.metadata.partitions)
    assert operations.lost_partitions(world.metadata, ("n1",)) == list(range(8))
    status = cluster_status(world.metadata, world.health)
    assert status["lost"] == status["leaderless"] == 8
    command = operations.unsafe_recover(world.metadata, "n2")
    world.propose(command)
    world.run(30)
    world.require_perfect()


def test_a_dead_replica_stays_in_sync_where_too_few_would_be_left() -> None:
    """n2 loses its disk, which is not noticed yet, and n1 is killed, which is. Nothing is committed
    with one replica in sync, so n1 has all records, and must not leave the set before n2 does."""
    world = cluster("n2", partitions=4, min_insync=2)
    world.join("w1", WITNESS)
    world.run(10)
    world.kill("n1")
    world.run(2)
    assert world.metadata.nodes["n1"].state == NodePhase.DOWN
    assert all(set(info.in_sync) == {"n1", "n2"} for info in world.metadata.partitions)
    assert leaders(world) == {"n2": 4}
    world.wipe("n2")
    world.start("n1")
    world.run(30)
    assert world.metadata.nodes["n2"].incarnation == "i2"
    world.require_perfect()


def test_a_dead_replica_whose_disk_is_not_to_be_trusted_leaves_the_set() -> None:
    world = cluster("n2", partitions=4, min_insync=2)
    damaged = structs.replace(world.health, damaged=frozenset({"n2"}))
    (command,) = world.controllers[-1].step(world.metadata, damaged, world.now)
    after = apply(world.metadata, command).metadata
    assert after is not None
    assert all(info.in_sync == ("n1",) for info in after.partitions)


def decided(
    world: ControllerWorld, health: Health, before: ClusterMetadata | None = None
) -> ClusterMetadata:
    """The metadata after all that the controller proposes for this health."""
    metadata = before or world.metadata
    for command in Controller("other", CONFIG).step(metadata, health, world.now):
        found = apply(metadata, command).metadata
        assert found is not None
        metadata = found
    return metadata


def test_a_replica_that_may_lack_records_leaves_the_set_while_another_one_is_complete() -> None:
    """Also where fewer than `min_insync` are left, and also a leader."""
    world = cluster("n2", partitions=4, min_insync=2)
    lacking = dict.fromkeys(("n2",), frozenset({0, 1, 2}))
    after = decided(world, structs.replace(world.health, incomplete=lacking))
    for number, info in enumerate(after.partitions):
        if number < 3:
            assert (info.leader, info.in_sync) == ("n1", ("n1",))
        else:
            assert set(info.in_sync) == {"n1", "n2"}


def test_where_each_may_lack_records_all_stay_in_the_set() -> None:
    world = cluster("n2", partitions=4, min_insync=2)
    lacking = dict.fromkeys(("n1", "n2"), frozenset(range(4)))
    assert decided(world, structs.replace(world.health, incomplete=lacking)) == world.metadata


def test_a_dead_replica_that_is_complete_stays_in_the_set_and_is_waited_for() -> None:
    world = cluster("n2", "n3", partitions=4)
    world.kill("n3")
    world.look()
    lacking = dict.fromkeys(("n1", "n2"), frozenset(range(4)))
    after = decided(world, structs.replace(world.health, incomplete=lacking))
    for info in after.partitions:
        assert set(info.in_sync) == {"n1", "n2", "n3"}
        assert info.leader == ""


@pytest.mark.parametrize("illness", ["stalled", "full"])
def test_a_replica_whose_disk_does_not_respond_stays_in_sync_where_too_few_would_be_left(
    illness: str,
) -> None:
    """The disk of n1 may be lost already, which shows when it is read. n2 has all records."""
    world = cluster("n2", partitions=4, min_insync=2)
    ill = structs.replace(world.health, **{illness: frozenset({"n2"})})
    (command,) = world.controllers[-1].step(world.metadata, ill, world.now)
    after = apply(world.metadata, command).metadata
    assert after is not None
    assert after.nodes["n2"].state == NodePhase.DOWN
    assert all(info.leader == "n1" for info in after.partitions)
    assert all(set(info.in_sync) == {"n1", "n2"} for info in after.partitions)


def test_a_full_disk_with_the_last_copy_keeps_its_roles_until_another_one_is_in_sync() -> None:
    """The disks of n1 and n2 have room again, and n3 has all records: nobody else can send them."""
    world = cluster("n2", "n3", partitions=4, min_insync=2)
    led = tuple(
        replace(info, leader="n3", in_sync=("n3",), epoch=info.epoch + 1)
        for info in world.metadata.partitions
    )
    metadata = replace(world.metadata, partitions=led)
    full = structs.replace(world.health, full=frozenset({"n3"}))

    unchanged = decided(world, full, metadata)
    assert unchanged.nodes["n3"].state == NodePhase.UP
    assert all(info.leader == "n3" for info in unchanged.partitions)
    assert all("n3" in info.in_sync for info in unchanged.partitions)
    # Three partitions have a copy elsewhere: another node leads them, and n3 is still up.
    caught_up = tuple(replace(info, in_sync=("n3", "n1", "n2")) for info in led[:3])
    partly = decided(world, full, replace(metadata, partitions=(*caught_up, led[3])))
    assert partly.nodes["n3"].state == NodePhase.UP
    assert [info.leader == "n3" for info in partly.partitions] == [False, False, False, True]
    everywhere = tuple(replace(info, in_sync=("n3", "n1", "n2")) for info in led)
    done = decided(world, full, replace(metadata, partitions=everywhere))
    assert done.nodes["n3"].state == NodePhase.DOWN
    assert all(info.leader in ("n1", "n2") for info in done.partitions)
    assert all("n3" not in info.in_sync for info in done.partitions)


def test_a_dead_node_that_is_drained_leaves_the_set() -> None:
    """Without another node that could take its replicas the operator could not remove it."""
    world = cluster("n2", partitions=4, min_insync=2)
    world.join("w1", WITNESS)
    world.run(10)
    world.kill("n2")
    world.run(2)
    n2 = world.metadata.nodes["n2"]
    world.carry_out(ChangePartitions((), ((n2.version, replace(n2, state=NodePhase.DRAINING)),)))
    world.run(5)
    assert holding(world, "n2") == set()


def test_a_dead_node_is_replaced_after_a_while() -> None:
    world = cluster("n2", "n3", "n4")
    held = holding(world, "n2")
    world.kill("n2")
    world.run(CONFIG.replace_after_s - 1)
    assert holding(world, "n2") == held
    added = world.added
    world.run(10)
    assert holding(world, "n2") == set()
    assert world.added - added == len(held) == 48
    world.require_perfect()
    world.start("n2")
    world.run(20)
    world.require_perfect()
    assert len(holding(world, "n2")) == 48


def test_a_dead_node_that_nobody_can_replace_is_waited_for() -> None:
    world = cluster("n2", "n3")
    world.kill("n2")
    world.run(30)
    assert len(holding(world, "n2")) == 64
    assert sorted(leaders(world).values()) == [32, 32], "its leaderships are spread"
    added = world.added
    world.start("n2")
    world.run(20)
    world.require_perfect()
    assert world.added == added


def test_a_node_that_comes_back_meanwhile_keeps_what_it_has() -> None:
    world = cluster("n2", "n3", "n4")
    world.kill("n2")
    world.run(CONFIG.replace_after_s + 0.5)
    assert any(info.adding for info in world.metadata.partitions)
    world.start("n2")
    world.run(20)
    world.require_perfect()


def test_a_join_moves_its_share_a_few_at_a_time() -> None:
    world = cluster("n2", "n3")
    added = world.added
    world.join("n4")
    moving_max = 0
    for _ in range(200):
        world.tick()
        moving = sum(bool(info.adding) for info in world.metadata.partitions)
        moving_max = max(moving, moving_max)
    assert 0 < moving_max <= CONFIG.moves_max
    assert world.added - added == 48
    world.require_perfect()


def test_a_pause_ends_moves_and_not_failovers() -> None:
    world = cluster("n2", "n3")
    added = world.added
    pause = operations.pause(world.metadata, True)
    assert pause is not None
    world.carry_out(pause)
    world.join("n4")
    world.run(20)
    assert world.added == added
    world.kill("n2")
    world.run(2 * CONFIG.replace_after_s)
    assert leaders(world)["n2"] == 0
    assert world.added == added
    world.start("n2")
    resume = operations.pause(world.metadata, False)
    assert resume is not None
    world.carry_out(resume)
    world.run(30)
    world.require_perfect()
    assert world.added - added == 48


def test_drain_takes_leaderships_first_and_then_everything() -> None:
    world = cluster("n2", "n3", "n4")
    assert world.operate(operations.drain, "n2")
    world.run(0.4)
    assert leaders(world)["n2"] == 0
    assert holding(world, "n2")
    with pytest.raises(OperationError, match=r"still holds \d+ partitions: drain it first"):
        operations.remove(world.metadata, "n2")
    world.run(20)
    assert holding(world, "n2") == set()
    assert world.metadata.nodes["n2"].state == NodePhase.DRAINING
    world.require_perfect()
    world.propose(operations.remove(world.metadata, "n2"))
    world.run(1)
    assert "n2" not in world.metadata.nodes


def test_drain_of_one_of_three_leaves_two_copies() -> None:
    world = cluster("n2", "n3", min_insync=2)
    world.operate(operations.drain, "n3")
    world.run(20)
    assert holding(world, "n3") == set()
    assert all(len(info.in_sync) == 2 for info in world.metadata.partitions)
    with pytest.raises(OperationError, match="only n1 would be left, and min_insync is 2"):
        operations.drain(world.metadata, "n2")
    assert operations.drain(world.metadata, "n3") is None
    world.operate(operations.undrain, "n3")
    world.run(20)
    world.require_perfect()
    assert operations.undrain(world.metadata, "n3") is None


def test_a_dead_node_can_be_drained_and_removed() -> None:
    world = cluster("n2", "n3")
    world.kill("n3")
    world.run(2)
    with pytest.raises(OperationError, match="n3 is down and still holds 64 partitions"):
        operations.remove(world.metadata, "n3")
    world.operate(operations.drain, "n3")
    world.run(20)
    assert holding(world, "n3") == set()
    world.propose(operations.remove(world.metadata, "n3"))
    world.run(1)
    assert sorted(world.metadata.nodes) == ["n1", "n2"]


def test_a_draining_node_that_dies_is_no_obstacle() -> None:
    world = cluster("n2", "n3", "n4")
    world.operate(operations.drain, "n2")
    world.run(0.5)
    world.kill("n2")
    world.run(20)
    assert holding(world, "n2") == set()
    assert world.metadata.nodes["n2"].state == NodePhase.DRAINING
    world.require_perfect()


def test_a_node_that_is_up_is_not_removed() -> None:
    world = cluster("n2", "n3")
    with pytest.raises(
        OperationError, match="there is no node n9 in the cluster; its nodes are n1"
    ):
        operations.remove(world.metadata, "n9")
    world.carry_out(ChangePartitions((), ((world.metadata.nodes["n2"].version, node_info("n2")),)))
    empty = replace(world.metadata, partitions=(PartitionInfo(("n1",), (), "n1", 1, ("n1",), 1),))
    with pytest.raises(OperationError, match="n2 is up and would be given partitions again"):
        operations.remove(empty, "n2")


def test_the_last_node_that_may_take_partitions_is_not_removed() -> None:
    world = cluster("n2")
    world.operate(operations.drain, "n1")
    world.run(20)
    gone = replace(world.metadata.nodes["n2"], state=NodePhase.DOWN)
    empty = replace(
        world.metadata,
        nodes={**world.metadata.nodes, "n2": gone},
        partitions=(PartitionInfo(("n1",), (), "n1", 1, ("n1",), 1),),
    )
    with pytest.raises(OperationError, match="without n2 no data node would be up: undrain one"):
        operations.remove(empty, "n2")
    up = replace(world.metadata.nodes["n1"], state=NodePhase.UP)
    assert operations.remove(replace(empty, nodes={"n1": up, "n2": gone}), "n2")


def test_a_leaving_node_is_relieved_and_gets_its_leaderships_back() -> None:
    world = cluster("n2", "n3")
    world.nodes["n2"].is_leaving = True
    world.run(0.4)
    assert leaders(world)["n2"] == 0
    assert all("n2" in info.in_sync for info in world.metadata.partitions)
    world.run(CONFIG.balance_after_s * 2)
    assert leaders(world)["n2"] == 0
    world.kill("n2")
    world.run(1)
    world.start("n2")
    world.run(15)
    world.require_perfect()


def test_a_node_with_a_hanging_disk_is_as_good_as_dead() -> None:
    world = cluster("n2", "n3")
    added = world.added
    commands = len(world.commands)
    world.nodes["n1"].is_stalled = True
    world.run(0.4)
    assert world.metadata.nodes["n1"].state == NodePhase.DOWN
    assert leaders(world)["n1"] == 0
    assert not any("n1" in info.in_sync for info in world.metadata.partitions)
    (first, *_) = world.commands[commands:]
    assert isinstance(first, ChangePartitions)
    assert len(first.changes) == 64
    assert [info.state for _, info in first.nodes] == [NodePhase.DOWN]
    # It is there all the time; that makes no difference.
    world.run(2)
    assert world.metadata.nodes["n1"].state == NodePhase.DOWN
    world.nodes["n1"].is_stalled = False
    world.run(15)
    world.require_perfect()
    assert world.added == added


def test_when_no_disk_answers_nothing_is_changed() -> None:
    world = cluster("n2", "n3", partitions=8)
    world.run(10)
    before = world.metadata
    for sim in world.nodes.values():
        sim.is_stalled = True
    world.run(3)
    assert world.metadata == before
    world.nodes["n2"].is_stalled = False
    world.run(1)
    assert leaders(world) == {"n2": 8}


def test_a_damaged_node_leads_nothing_even_if_nobody_else_can() -> None:
    """And whoever is the last to have a partition stays in sync: it must not be thrown away."""
    world = cluster("n2", "n3", partitions=6)
    world.nodes["n1"].is_damaged = True
    world.run(2)
    assert leaders(world)["n1"] == 0
    assert not any("n1" in info.in_sync for info in world.metadata.partitions)
    for node in ("n2", "n3"):
        world.nodes[node].is_damaged = True
        world.run(2)
    assert leaders(world) == {"": 6}
    assert {info.in_sync for info in world.metadata.partitions} == {("n3",)}
    world.nodes["n3"].is_damaged = False
    world.run(2)
    assert leaders(world) == {"n3": 6}


def test_a_witness_takes_nothing_over_from_a_hanging_disk() -> None:
    world = cluster(partitions=4)
    world.join("w1", role=WITNESS)
    world.run(3)
    world.nodes["n1"].is_stalled = True
    world.run(3)
    assert leaders(world) == {"n1": 4}
    assert world.metadata.nodes["n1"].state == NodePhase.UP


def test_a_node_that_is_drained_with_a_hanging_disk_leads_nothing() -> None:
    world = cluster("n2", "n3", partitions=8)
    command = operations.drain(world.metadata, "n1")
    assert command is not None
    world.propose(command, is_safe=True)
    world.nodes["n1"].is_stalled = True
    world.run(1)
    assert world.metadata.nodes["n1"].state == NodePhase.DRAINING
    assert leaders(world)["n1"] == 0
    assert not any("n1" in info.in_sync for info in world.metadata.partitions)


def test_a_restart_of_every_node_in_turn_moves_no_replica() -> None:
    world = cluster("n2", "n3")
    added = world.added
    for node in ("n1", "n2", "n3"):
        world.nodes[node].is_leaving = True
        world.run(1)
        world.kill(node)
        world.run(3)
        world.start(node)
        world.run(3)
    world.run(15)
    world.require_perfect()
    assert world.added == added


def test_a_leaving_node_with_nobody_else_goes_on_leading() -> None:
    world = cluster("n2", "n3", partitions=8)
    world.kill("n2")
    world.kill("n3")
    world.run(2)
    world.nodes["n1"].is_leaving = True
    world.run(2)
    assert leaders(world) == {"n1": 8}


def test_a_witness_gets_nothing() -> None:
    world = cluster("n2")
    world.join("w1", WITNESS)
    world.run(10)
    world.require_perfect()
    assert holding(world, "w1") == set()
    assert world.metadata.nodes["w1"].state == NodePhase.UP
    world.kill("w1")
    world.run(2)
    assert world.metadata.nodes["w1"].state == NodePhase.DOWN
    world.start("w1")
    world.run(2)
    assert world.metadata.nodes["w1"].state == NodePhase.UP


def test_a_new_address_is_told() -> None:
    world = cluster("n2", "n3", partitions=4)
    sim = world.nodes["n2"]
    sim.info = replace(sim.info, client_address="n2:1999")
    world.run(1)
    assert world.metadata.nodes["n2"].client_address == "n2:1999"


def test_the_last_copies_that_were_being_added_may_lead() -> None:
    """Every replica is dead, one that had just caught up is not."""
    info = PartitionInfo(("n1",), ("n2",), "n1", 4, ("n1", "n2"), 9)
    metadata = ClusterMetadata(
        "c", 1, 1, {"n1": node_info("n1"), "n2": node_info("n2")}, (info,), 9
    )
    presence = ControllerWorld(1).nodes["n1"].presence()
    dead = frozenset({"n1"})
    (command,) = Controller("n2", CONFIG).step(metadata, Health({"n2": presence}, dead, dead), 0.0)
    applied = apply(metadata, command)
    assert applied.metadata is not None
    after = applied.metadata.partitions[0]
    assert (after.leader, after.epoch, after.in_sync) == ("n2", 5, ("n2",))


def test_recovery_by_force_is_only_for_what_has_no_leader() -> None:
    world = cluster("n2", "n3", partitions=4)
    with pytest.raises(OperationError, match="n2 holds no partition that has no leader"):
        operations.unsafe_recover(world.metadata, "n2")
    with pytest.raises(OperationError, match=r"partition 1 is led by n\d: nothing is to be"):
        operations.unsafe_recover(world.metadata, "n2", [1])
    with pytest.raises(OperationError, match="there is no partition 4"):
        operations.unsafe_recover(world.metadata, "n2", [4])


def test_status_is_json() -> None:
    world = cluster("n2", "n3", partitions=6)
    world.kill("n3")
    world.run(2)
    status = json.loads(json.dumps(cluster_status(world.metadata, world.health)))
    assert status["under_replicated"] == 6
    assert status["leaderless"] == status["moving"] == status["lost"] == 0
    nodes = {node["node"]: node for node in status["nodes"]}
    assert nodes["n3"]["state"] == "down"
    assert nodes["n3"]["connected"] is False
    assert nodes["n3"]["replicas"] == 6
    assert nodes["n3"]["leaders"] == nodes["n3"]["in_sync"] == 0
    assert nodes["n1"]["leaders"] + nodes["n2"]["leaders"] == 6
    assert [entry["partition"] for entry in status["partitions"]] == list(range(6))
