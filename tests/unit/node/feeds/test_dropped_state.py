"""State of partitions whose leaders' logs begin above 0, and the snapshots that it needs."""

import pytest
from msgspec.structs import replace

from holdfast.log.journal.retention import RetentionPolicy
from holdfast.log.partition import partition_of
from holdfast.node.metadata import operations
from tests.sim import storing
from tests.sim.process import Process
from tests.unit.node.feeds.test_given_up import begin, newest, process_at, propose
from tests.unit.node.routing.test_lost_link import name_in, partitions, voting_stage
from tests.unit.node.test_rights_cluster import Stage


def clients_at_home(stage: Stage, count: int) -> list[str]:
    """Client ids whose home is partition 0."""
    names = (f"c{number}" for number in range(1000))
    homes = [each for each in names if not partition_of(each.encode(), len(partitions(stage)))]
    return homes[:count]


def retain_from_now_on(stage: Stage, process: Process) -> None:
    """Removes everything in the log of a node but its newest segment, behind a snapshot."""
    journal, snapshots = process.state.journal, process.disk.snapshots
    process.touch()
    snapshots.take(received=True)
    stage.until(lambda: snapshots._unfinished is None)
    removed = journal.remove_oldest(len(journal.segments))
    process.host.mirror.begin(journal.start_offsets)
    process.cores.storage.remove_segments(removed)


def leave_sessions(stage: Stage, node: str) -> None:
    """Leaves 20 sessions with the home partition 0."""
    for client in clients_at_home(stage, 20):
        reader = stage.login(node, "alice", client, expiry_s=6000)
        stage.subscribe(reader, name_in(stage, 1, 1), 1)
        reader.lose()


def test_a_snapshot_does_not_count_with_a_part_of_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node begins a snapshot. Then it learns that its leader has removed the next records of a
    partition that is fed to it, so it drops the state of that partition and receives it again. The
    process restarts with the newest snapshot, and another leader still has those records."""
    monkeypatch.setattr(storing.Snapshots, "_maybe_take", lambda self: None)
    stage, leader, heir, third, topic = begin(2)
    leave_sessions(stage, heir)
    process, first = process_at(stage, third), process_at(stage, leader)
    receiver, delivered = process.cluster_node.feeds.receiver, process.state.delivered
    assert not process.cluster_node.context.is_stored(0)
    stage.until(lambda: delivered[0] == first.state.delivered[0] > 40)
    may_ask, receiver.may_ask = receiver.may_ask, lambda partition: partition != 0
    process.touch()
    receiver.leave(leader)
    writer = stage.login(leader, "alice", "writer")
    for count in (5, 10):
        stage.publish(writer, topic, 5, 1)
        stage.until(lambda count=count: len(writer.packets) == count)  # type: ignore[misc]
        first.state.journal.start_segment()
    retain_from_now_on(stage, first)
    assert first.state.journal.start_offsets[0] > delivered[0] > 40

    monkeypatch.setattr(storing, "SLICE_ENTRIES", 1)
    monkeypatch.setattr(storing, "SLICE_S", 0.1)
    process.touch()
    snapshots, transfer = process.disk.snapshots, process.cluster_node.transfer
    snapshots.take(received=False)
    receiver.may_ask = may_ask
    process.touch()
    stage.until(lambda: bool(transfer.missing))
    stage.until(lambda: transfer.is_whole)
    assert snapshots._unfinished is not None, "the snapshot was over before"
    stage.until(lambda: snapshots._unfinished is None)
    for name in (third, leader):
        stage.world.hosts[name].kill(power=False)
    stage.world.hosts[third].start()
    stage.until(lambda: partitions(stage)[0].leader == heir)
    stage.until(lambda: process_at(stage, third).is_ready, 60.0)
    present = process_at(stage, third).images.state.sessions
    stage.until(lambda: present.keys() == process_at(stage, heir).images.state.sessions.keys())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_partition_that_moves_has_its_state_after_a_restart(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader has removed records, so the copied logs begin above 0. The new replicas have the
    state of those records in memory, and no snapshot. The old ones leave, and all are killed."""
    monkeypatch.setattr(storing.Snapshots, "_maybe_take", lambda self: None)
    stage = voting_stage(2 * replicas + 1, replicas)
    old = partitions(stage)[0].replicas
    other = next(name for name in stage.world.hosts if name not in old)
    leave_sessions(stage, other)
    writer = stage.login(other, "alice", "writer")
    for name in old:
        process_at(stage, name).state.journal.start_segment()
    stage.publish(writer, name_in(stage, 0, 1), 5, 1)
    stage.until(lambda: len(writer.packets) == 5)
    for name in old:
        retain_from_now_on(stage, process_at(stage, name))
        assert process_at(stage, name).state.journal.start_offsets[0] > 40
        propose(stage, name, operations.drain(newest(stage), name))
    stage.until(lambda: not set(old) & set(partitions(stage)[0].members), 60.0)
    new = partitions(stage)[0].replicas
    stage.run(1.0)
    present = process_at(stage, new[0]).images.state.sessions.keys()
    assert len(present) >= 20
    for name in new:
        stage.world.hosts[name].kill(power=True)
    for name in new:
        stage.world.hosts[name].start()
    stage.until(lambda: all(process_at(stage, name).is_ready for name in new), 60.0)
    for name in new:
        assert process_at(stage, name).images.state.sessions.keys() == present


def test_retention_waits_for_the_sessions_that_it_has_to_keep_records_for() -> None:
    """A node has dropped the state of a partition and not received it again. A session with that
    home partition has records of another one to get, which the node stores."""
    stage = voting_stage(3, 3)
    leader = partitions(stage)[0].leader
    node = next(name for name in stage.world.hosts if name != leader)
    client = clients_at_home(stage, 1)[0]
    reader = stage.login(node, "alice", client, expiry_s=6000)
    stage.subscribe(reader, name_in(stage, 1, 1), 1)
    reader.lose()
    stage.run(0.5)
    process, first = process_at(stage, node), process_at(stage, leader)
    snapshots, transfer = process.disk.snapshots, process.cluster_node.transfer
    process.cluster_node.replication.suspend(0)
    writer = stage.login(leader, "alice", "writer")
    texts: list[str] = []
    for count in (10, 20, 30):
        stage.publish(writer, name_in(stage, 0, 1), 5, 1)
        texts += stage.publish(writer, name_in(stage, 1, 1), 5, 1)
        stage.until(lambda count=count: len(writer.packets) == count)  # type: ignore[misc]
        for each in (process, first):
            each.state.journal.start_segment()
    process.touch()
    snapshots.take(received=True)
    stage.until(lambda: snapshots._unfinished is None)
    retain_from_now_on(stage, first)
    first.cluster_node.transfer.may_serve = False
    process.touch()
    process.cluster_node.replication.resume(0, process.state.now)
    stage.until(lambda: client not in process.images.state.sessions)
    snapshots._plan.limits = replace(snapshots._plan.limits, policy=RetentionPolicy(None, 1, None))
    snapshots._retain()
    first.cluster_node.transfer.may_serve = True
    stage.until(lambda: transfer.is_whole)
    reader = stage.login(node, "alice", client, clean=False, expiry_s=6000)
    stage.until(lambda: reader.payloads == texts)


def test_nothing_is_removed_or_saved_while_state_is_wrong() -> None:
    """The next start would load it, and sessions may be missing in it."""
    stage = voting_stage(3, 3)
    node = next(name for name in stage.world.hosts if partitions(stage)[0].leader != name)
    process = process_at(stage, node)
    writer = stage.login(node, "alice", "writer")
    for count in (5, 10):
        stage.publish(writer, name_in(stage, 0, 1), 5, 1)
        stage.until(lambda count=count: len(writer.packets) == count)  # type: ignore[misc]
        process.state.journal.start_segment()
    writer.leave()
    stage.run(0.5)
    snapshots, transfer = process.disk.snapshots, process.cluster_node.transfer
    process.touch()
    snapshots.take(received=True)
    stage.until(lambda: snapshots._unfinished is None)
    plan = snapshots._plan
    plan.limits = replace(plan.limits, policy=RetentionPolicy(None, 1, None))
    transfer.save(0)
    assert plan.retention(plan.summaries(), 0, [])[0].remove
    assert transfer.needs_save()
    process.state.has_stopped_partition = True
    assert not plan.retention(plan.summaries(), 0, [])[0].remove
    assert not transfer.needs_save()
