"""A read of the log that waits for the disk while its node forgets the log of the partition."""

from collections.abc import Callable

import pytest

from holdfast.node.metadata import operations
from tests.sim.process import Process
from tests.sim.reads import SimReads
from tests.unit.node.feeds.test_given_up import process_at
from tests.unit.node.routing.test_lost_link import name_in, partitions, voting_stage


class HeldReads:
    """The reads of a node, which wait until `release`."""

    def __init__(self, process: Process) -> None:
        self.waiting: list[Callable[[], None]] = []
        self._reads = process.runtime.reader
        assert isinstance(self._reads, SimReads)
        self._reads._read = self.waiting.append  # type: ignore[method-assign]

    def release(self) -> None:
        del self._reads._read  # type: ignore[attr-defined]
        for work in self.waiting:
            work()


@pytest.mark.parametrize("acknowledges", [True, False])
def test_a_read_that_waits_loses_nothing(acknowledges: bool) -> None:
    """The node forgets the log between the begin of a read and its end. Other nodes have the
    records. `acknowledges`: without it, the records are read as those in flight, too."""
    stage = voting_stage(3, 3)
    topic = name_in(stage, 0, 1)
    before = partitions(stage)[0]
    followers = [name for name in before.replicas if name != before.leader]
    writer = stage.login(before.leader, "alice", "writer")
    for node in followers:
        reader = stage.login(node, "alice", f"reader-{node}", expiry_s=600)
        reader.acknowledges = acknowledges
        stage.subscribe(reader, topic, 1)
        if acknowledges:
            reader.lose()
    missed = stage.publish(writer, topic, 30, 1)
    stage.until(lambda: len(writer.packets) == 30)
    stage.run(1.0)

    held = {node: HeldReads(process_at(stage, node)) for node in followers}
    readers = {
        node: stage.login(node, "alice", f"reader-{node}", clean=False, expiry_s=600)
        for node in followers
    }
    stage.until(lambda: all(each.waiting for each in held.values()))
    metadata = stage.world.newest_metadata()
    assert metadata is not None
    command = operations.resize(metadata, 2, 1)
    assert command is not None
    leader = process_at(stage, before.leader)
    leader.touch()
    leader.cluster_node.meta.propose(command, leader.state.now)
    contexts = [process_at(stage, node).cluster_node.context for node in followers]
    stage.until(lambda: any(0 in each.unstored - each.leaving for each in contexts))
    for each in held.values():
        each.release()
    stage.until(lambda: all(len(each.payloads) >= 30 for each in readers.values()))
    assert all(each.payloads == missed for each in readers.values())
