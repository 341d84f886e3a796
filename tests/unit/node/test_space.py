"""A node with a full disk stores nothing more once nobody waits for it."""

import pytest

from holdfast.log.journal.journal import Journal
from holdfast.node.admission.usage import SharedUsage
from holdfast.node.context import ClusterContext
from holdfast.node.disk_full import DiskSpace
from holdfast.node.metadata.model import ClusterMetadata, NodePhase, PartitionInfo
from tests.unit.node.test_rights_cluster import Stage


class Followed:
    """Replication and transfer, as Space uses them."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.missing: set[int] = set()
        self.unsaved: dict[int, int] = {}

    def suspend(self, partition: int) -> None:
        self.held.add(partition)

    def resume(self, partition: int, now: float) -> None:
        self.held.discard(partition)


def metadata_of(*in_sync: tuple[str, ...]) -> ClusterMetadata:
    partitions = tuple(PartitionInfo(("n1", "n2"), (), each[0], 1, each) for each in in_sync)
    return ClusterMetadata("c", 2, 1, {}, partitions, 1, ("n1", "n2"))


def bench() -> tuple[ClusterContext, Followed, DiskSpace]:
    context = ClusterContext("n1", Journal(2, replicated=True))
    followed = Followed()
    return context, followed, DiskSpace(context, followed, followed)  # type: ignore[arg-type]


def test_it_stores_for_as_long_as_somebody_waits_for_it() -> None:
    context, followed, space = bench()
    space.set_full(True, 1.0)
    space.advance()
    assert not followed.held
    context.metadata = metadata_of(("n2",), ("n2", "n1"))
    space.advance()
    assert not followed.held
    context.metadata = metadata_of(("n2",), ("n2",))
    space.advance()
    assert followed.held == {0, 1}
    space.set_full(False, 2.0)
    assert not followed.held
    space.advance()
    assert not followed.held


def test_what_is_held_for_another_reason_stays_so() -> None:
    context, followed, space = bench()
    context.metadata = metadata_of(("n2",), ("n2",))
    space.set_full(True, 1.0)
    space.advance()
    followed.missing.add(1)
    space.set_full(False, 2.0)
    assert followed.held == {1}


@pytest.mark.parametrize("is_machine", [True, False])
def test_the_processes_of_a_machine_send_nobody_to_each_other(*, is_machine: bool) -> None:
    """They have one disk. One of them notices first that it is full, or that it hangs."""
    # Where it has the only copy, a node with a full disk stays whatever the others are.
    stage = Stage(2, 1 if is_machine else 2)
    processes = [host.process for host in stage.world.hosts.values() if host.process is not None]
    if is_machine:
        for process in processes:
            node = process.cluster_node
            others = frozenset(stage.world.hosts) - {node.meta.node_id}
            node.usage = SharedUsage(process.state, node.context, others)
    full = next(each for each in processes if each.cluster_node.meta.node_id == stage.names["a"])
    full.runtime.reserve_bytes = 1 << 60
    full.runtime.check_space(0)

    def phase() -> NodePhase:
        metadata = stage.world.newest_metadata()
        assert metadata is not None
        return metadata.nodes[stage.names["a"]].state

    if is_machine:
        stage.run(5.0)
        assert phase() == NodePhase.UP
        full.runtime.disk.is_stalled = True
        full.cluster_node.handle_disk(True, full.state.now)
        stage.run(5.0)
        assert phase() == NodePhase.UP
        assert not full.runtime.fitness.redirect_reason()
    else:
        stage.until(lambda: phase() == NodePhase.DOWN)
        stage.until(lambda: full.runtime.fitness.redirect_reason() != "")
