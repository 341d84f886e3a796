"""Records that an operator gives up: nodes go on without them, and no position is given again."""

from functools import partial

import pytest

from holdfast.log.partition import partition_of
from holdfast.node.metadata import operations
from holdfast.node.metadata.commands import Command
from holdfast.node.metadata.model import NOT_RESTORED, ClusterMetadata, NodePhase
from holdfast.node.publish import offset_voider
from holdfast.node.replicate.catch_up import CatchUp
from holdfast.protocol.mqtt import packets as m
from tests.sim.checks import Message
from tests.sim.invariants import check_invariants
from tests.sim.process import Process
from tests.sim.storing import Snapshots
from tests.unit.node.routing.test_lost_link import name_in, partitions, voting_stage
from tests.unit.node.test_rights_cluster import Stage


def process_at(stage: Stage, node: str) -> Process:
    found = stage.world.hosts[node].process
    assert found is not None
    return found


def test_a_fed_node_leads_what_is_given_up() -> None:
    """It has the state of the partition and none of its records. It goes on behind the last offset
    that was fed, so no offset that clients have seen is given to another record."""
    stage = voting_stage(3, 1)
    lost = partitions(stage)[0].leader
    node, other = (name for name in stage.world.hosts if name != lost)
    topic = name_in(stage, 0, 1)
    reader = stage.login(other, "alice", "reader", expiry_s=600)
    stage.subscribe(reader, topic, 1)
    writer = stage.login(node, "alice", "writer")
    before = stage.publish(writer, topic, 20, 1)
    stage.until(lambda: reader.payloads == before)
    journal = process_at(stage, node).cluster_node.context.journal
    end = journal.high_watermark[0]
    assert journal.start_offsets[0] == journal.next_offset[0], "it has none of the records"

    stage.world.hosts[lost].kill(power=False)
    stage.world.hosts[lost].wipe()
    metadata = stage.world.newest_metadata()

    def is_down() -> bool:
        nonlocal metadata
        metadata = stage.world.newest_metadata()
        assert metadata is not None
        return metadata.nodes[lost].state == NodePhase.DOWN and not metadata.partitions[0].leader

    stage.until(is_down)
    assert metadata is not None
    generation = (metadata.generation or NOT_RESTORED).number + 1
    process = process_at(stage, node)
    process.touch()
    command = operations.unsafe_recover(metadata, node, None, (lost,), generation)
    process.cluster_node.meta.propose(command, process.state.now)
    stage.until(lambda: partitions(stage)[0].leader == node)
    late = stage.login(other, "alice", "late")
    stage.subscribe(late, topic, 1)
    after = stage.publish(writer, topic, 20, 1)
    stage.until(lambda: late.payloads == after and reader.payloads == before + after)
    stage.until(lambda: len(writer.packets) == 40)
    assert journal.start_offsets[0] >= end
    # The session is at a node that was fed, too, and goes on there.
    reader.lose()
    missed = stage.publish(writer, topic, 5, 1)
    reader = stage.login(node, "alice", "reader", clean=False, expiry_s=600)
    stage.until(lambda: reader.payloads == missed)

    # The node with the empty disk comes back, and has what the others have.
    stage.world.hosts[lost].start()
    stage.until(lambda: process_at(stage, lost).is_ready, 60.0)
    reader.lose()
    missed = stage.publish(writer, topic, 5, 1)
    reader = stage.login(lost, "alice", "reader", clean=False, expiry_s=600)
    stage.until(lambda: reader.payloads == missed)


def test_a_node_that_copies_leads_what_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was fed up to an offset that its copied log has not reached, and no session names one. The
    next messages are not taken for those that were fed. No record defines its state any more, so it
    saves that."""
    monkeypatch.setattr(Snapshots, "_maybe_take", lambda self: None)
    stage = voting_stage(3, 1)
    lost, topic = partitions(stage)[0].leader, name_in(stage, 0, 1)
    writer = stage.login(next(name for name in stage.world.hosts if name != lost), "alice", "w")
    kept = next(each for each in (f"c{n}" for n in range(99)) if not home_of(stage, each))
    stage.login(lost, "alice", kept, expiry_s=6000).lose()
    stage.publish(writer, topic, 20, 1)
    stage.until(lambda: len(writer.packets) == 20)
    stage.run(0.5)
    monkeypatch.setattr(CatchUp, "_is_paused", lambda self, progress: progress.peer.node != lost)
    propose(stage, lost, operations.drain(newest(stage), lost))
    stage.until(lambda: partitions(stage)[0].adding != ())
    (node,) = partitions(stage)[0].adding
    process = process_at(stage, node)
    stage.until(lambda: 0 in process.cluster_node.context.copied)
    stage.run(0.5)
    assert process.state.journal.next_offset[0] < 20 < process.state.delivered[0]
    (other,) = stage.world.hosts.keys() - {lost, node}
    receiver = process_at(stage, other).cluster_node.feeds.receiver
    receiver.may_ask = lambda partition: partition != 0
    world = stage.world
    world.checks.turn_ended = check_invariants  # type: ignore[method-assign]
    world.checks.impossible -= {"offsets_voided", "images_given_up"}
    world.checks.committed[0].clear()
    world.images_watch._views.clear()
    world.hosts[lost].kill(power=False)
    world.hosts[lost].wipe()
    stage.until(lambda: not partitions(stage)[0].leader)
    for heir, given_up in ((node, [0]), (other, None)):
        metadata = newest(stage)
        generation = (metadata.generation or NOT_RESTORED).number + 1
        if given_up or not all(each.leader for each in metadata.partitions):
            command = operations.unsafe_recover(metadata, heir, given_up, (lost,), generation)
            propose(stage, heir, command)
            stage.until(partial(is_later, stage, metadata))
    stage.until(lambda: all(each.leader for each in partitions(stage)))
    reader = stage.login(node, "alice", "reader", expiry_s=600)
    stage.subscribe(reader, topic, 1)
    after = publish_until_acknowledged(stage, node, topic, 5)
    stage.until(lambda: reader.payloads == after)
    stage.run(0.5)
    world.hosts[node].kill(power=True)
    world.hosts[node].start()
    stage.until(lambda: process_at(stage, node).is_ready, 60.0)
    assert kept in process_at(stage, node).images.state.sessions


def is_later(stage: Stage, metadata: ClusterMetadata) -> bool:
    return newest(stage).version > metadata.version


def home_of(stage: Stage, name: str) -> int:
    return partition_of(name.encode(), len(partitions(stage)))


def newest(stage: Stage) -> ClusterMetadata:
    metadata = stage.world.newest_metadata()
    assert metadata is not None
    return metadata


def propose(stage: Stage, node: str, command: Command | None) -> None:
    assert command is not None
    process = process_at(stage, node)
    process.touch()
    process.cluster_node.meta.propose(command, process.state.now)


def begin(replicas: int) -> tuple[Stage, str, str, str, str]:
    """A stage, the leader of partition 0, another replica of it, the third node, and a topic of the
    partition. One replica in sync is enough."""
    stage = voting_stage(3, replicas)
    stage.until(lambda: partitions(stage)[0].leader == partitions(stage)[0].replicas[0])
    info = partitions(stage)[0]
    leader = info.leader
    heir = next(name for name in info.replicas if name != leader)
    third = next(name for name in stage.world.hosts if name not in (leader, heir))
    if newest(stage).min_insync > 1:
        propose(stage, leader, operations.resize(newest(stage), replicas, 1))
        stage.until(lambda: newest(stage).min_insync == 1)
    return stage, leader, heir, third, name_in(stage, 0, 1)


def home_apart(stage: Stage, named: str = "{}") -> str:
    """A client id or a key whose home is not partition 0."""
    names = (named.format(f"c{number}") for number in range(99))
    return next(each for each in names if partition_of(each.encode(), len(partitions(stage))))


def suspend_others(stage: Stage, leader: str) -> None:
    """Lets the leader of partition 0 go on without the other replicas."""
    for node in stage.world.hosts:
        if node != leader:
            process_at(stage, node).cluster_node.replication.suspend(0)


def give_up(stage: Stage, leader: str, heir: str, *, wipes: bool = True) -> None:
    """Loses the leader with its disk, and lets the other replica go on without its records."""
    stage.run(0.5)
    assert partitions(stage)[0].in_sync == (leader,)
    # The ledgers of the simulation know nothing of records that are given up.
    world = stage.world
    world.checks.turn_ended = check_invariants  # type: ignore[method-assign]
    world.checks.impossible -= {"offsets_voided"}
    world.checks.committed[0].clear()
    world.images_watch._views.clear()
    stage.world.hosts[leader].kill(power=False)
    if wipes:
        stage.world.hosts[leader].wipe()
    stage.until(lambda: newest(stage).nodes[leader].state == NodePhase.DOWN)
    for node in stage.world.hosts:
        if node != leader:
            process = process_at(stage, node)
            if process.cluster_node.context.is_stored(0):
                process.cluster_node.replication.resume(0, process.state.now)
    generation = (newest(stage).generation or NOT_RESTORED).number + 1
    lost = (leader,) if wipes else ()
    command = operations.unsafe_recover(newest(stage), heir, None, lost, generation)
    propose(stage, heir, command)
    stage.until(lambda: partitions(stage)[0].leader == heir)


def publish_until_acknowledged(stage: Stage, node: str, topic: str, count: int) -> list[str]:
    """Publishes as a new client, again while the leader refuses: it makes offsets void first."""
    texts: list[str] = []
    while len(texts) < count:
        client = f"late-{len(texts)}"
        peer = stage.login(node, "alice", client)
        text = stage.publish(peer, topic, 1, 1)
        ack = peer.answer(m.Ack)
        assert isinstance(ack, m.Ack)
        if ack.reason == 0:
            texts += text
        peer.leave()
    return texts


@pytest.mark.parametrize("at_once", [3, 10_000])
def test_a_session_gets_what_is_published_at_lost_offsets(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has received records that the next leader lacks, and is away."""
    monkeypatch.setattr(offset_voider, "AT_ONCE", at_once)
    stage, leader, heir, third, topic = begin(3)
    client = home_apart(stage)
    reader = stage.login(leader, "alice", client, expiry_s=6000)
    stage.subscribe(reader, topic, 1)
    writer = stage.login(leader, "alice", "writer")
    texts = stage.publish(writer, topic, 5, 1)
    stage.until(lambda: reader.payloads == texts)
    suspend_others(stage, leader)
    texts += stage.publish(writer, topic, 20, 1)
    stage.until(lambda: reader.payloads == texts)
    reader.lose()
    give_up(stage, leader, heir)
    after = publish_until_acknowledged(stage, heir, topic, 10)
    reader = stage.login(third, "alice", client, clean=False, expiry_s=6000)
    stage.until(lambda: reader.payloads[-10:] == after)
    stage.run(0.5)
    assert reader.payloads == after


def test_a_record_that_is_lost_while_it_is_inflight_is_no_other_message() -> None:
    """The client has it under a packet id, and its offset is void. The id does not name a message
    that is published later."""
    stage, leader, heir, third, topic = begin(3)
    client = home_apart(stage)
    reader = stage.login(leader, "alice", client, expiry_s=6000)
    stage.subscribe(reader, topic, 2)
    writer = stage.login(leader, "alice", "writer")
    suspend_others(stage, leader)
    reader.acknowledges = False
    lost = stage.publish(writer, topic, 5, 2)
    stage.until(lambda: reader.payloads == lost)
    stage.run(0.5)
    reader.lose()
    give_up(stage, leader, heir)
    after = publish_until_acknowledged(stage, heir, topic, 10)
    reader = stage.login(third, "alice", client, clean=False, expiry_s=6000)
    stage.until(lambda: reader.payloads[-10:] == after)
    assert reader.payloads == after


@pytest.mark.parametrize("named", ["$share/{}/", "$share/$queue/"])
def test_a_shared_group_gets_what_is_published_at_lost_offsets(named: str) -> None:
    """Its position and the ranges that it has finished are of lost records. One is not finished: it
    was sent to a member that is lost with it."""
    stage, leader, heir, third, topic = begin(3)
    key = home_apart(stage, named + topic) if "{" in named else named + topic
    members = [stage.login(leader, "alice", f"member-{each}", expiry_s=6000) for each in "ab"]
    for each in members:
        stage.subscribe(each, key, 1)
    writer = stage.login(leader, "alice", "writer")
    texts = stage.publish(writer, topic, 6, 1)

    def received() -> list[str]:
        return [text for each in members for text in each.payloads]

    stage.until(lambda: sorted(received()) == sorted(texts))
    suspend_others(stage, leader)
    members[0].acknowledges = False
    texts += stage.publish(writer, topic, 20, 1)
    stage.until(lambda: sorted(received()) == sorted(texts))
    stage.run(1.0)
    for each in members:
        each.lose()
    give_up(stage, leader, heir)
    after = publish_until_acknowledged(stage, heir, topic, 10)
    member = stage.login(third, "alice", "member-b", clean=False, expiry_s=6000)
    stage.until(lambda: set(after) <= set(member.payloads), 60.0)
    assert len(set(member.payloads)) == len(member.payloads)


@pytest.mark.parametrize("is_away", [False, True])
def test_a_node_that_was_fed_lost_records(is_away: bool) -> None:
    """Its state has their effects: it gets that of the new leader. If it asks for its feed later,
    the new log is longer than its own was, so the end of the log does not show it."""
    stage, leader, heir, third, topic = begin(2)
    client = home_apart(stage)
    reader = stage.login(third, "alice", client, expiry_s=6000)
    stage.subscribe(reader, topic, 1)
    writer = stage.login(leader, "alice", "writer")
    texts = stage.publish(writer, topic, 5, 1)
    stage.until(lambda: reader.payloads == texts)
    suspend_others(stage, leader)
    texts += stage.publish(writer, topic, 20, 1)
    stage.until(lambda: reader.payloads == texts)
    kept = Message("#kept", "writer", topic, 99, 1)
    stage.world.checks.published(kept)
    writer.send(m.Publish(topic.encode(), b"#kept", 1, True, False, 99, b"", 0, -1))
    stage.until(lambda: reader.payloads[-1] == "#kept")
    assert not process_at(stage, third).cluster_node.context.is_stored(0)
    process = process_at(stage, third)
    receiver = process.cluster_node.feeds.receiver
    may_ask = receiver.may_ask
    if is_away:
        receiver.may_ask = lambda partition: False
    give_up(stage, leader, heir)
    after = publish_until_acknowledged(stage, heir, topic, 40)
    receiver.may_ask = may_ask
    stage.until(lambda: process.state.delivered[0] >= process_at(stage, heir).state.delivered[0])
    stage.until(lambda: process.cluster_node.transfer.is_whole)
    states = [process_at(stage, node).images.state for node in (heir, third)]
    assert [each.retained.get(topic) is None for each in states] == [True, True]
    if reader.is_closed:
        received = reader.payloads
        reader = stage.login(third, "alice", client, clean=False, expiry_s=6000)
        reader.payloads = received + reader.payloads
    stage.until(lambda: set(after) <= set(reader.payloads))
    order = [each for each in reader.payloads if each in after]
    assert list(dict.fromkeys(order)) == after
    assert not process.cluster_node.effects.has_diverged


def test_a_node_with_records_that_were_given_up_keeps_the_last_copy_of_others() -> None:
    """It has the only complete log of another partition, so it leads that one until another replica
    has it, and begins with an empty directory only then."""
    stage, leader, heir, third, topic = begin(2)
    infos = partitions(stage)
    kept = next(
        number for number, info in enumerate(infos) if set(info.replicas) == {leader, third}
    )
    reader = stage.login(heir, "alice", home_apart(stage), expiry_s=6000)
    stage.subscribe(reader, name_in(stage, kept, 1), 1)
    process_at(stage, heir).cluster_node.replication.suspend(0)
    process_at(stage, third).cluster_node.replication.suspend(kept)
    writer = stage.login(leader, "alice", "writer")
    stage.publish(writer, topic, 5, 1)
    texts = stage.publish(writer, name_in(stage, kept, 1), 5, 1)
    stage.until(lambda: sum(isinstance(each, m.Ack) for each in writer.packets) == 10)
    stage.until(lambda: [partitions(stage)[each].in_sync for each in (0, kept)] == [(leader,)] * 2)
    give_up(stage, leader, heir, wipes=False)
    publish_until_acknowledged(stage, heir, topic, 3)
    assert not partitions(stage)[kept].leader
    stage.world.checks.impossible -= {"replica_diverged"}
    stage.world.hosts[leader].start()
    stage.until(lambda: partitions(stage)[kept].leader == leader, 60.0)
    process = process_at(stage, leader)
    stage.until(lambda: process.cluster_node.effects.has_diverged)
    stage.run(0.5)
    assert partitions(stage)[kept].leader == leader
    assert not process.runtime.believes_disk, "given-up records would be read"
    process = process_at(stage, third)
    process.cluster_node.replication.resume(kept, process.state.now)
    stage.until(lambda: set(partitions(stage)[kept].in_sync) >= {third}, 60.0)
    stage.until(lambda: set(texts) <= set(reader.payloads), 60.0)


def test_a_leader_that_does_not_know_its_successor_reports_no_loss() -> None:
    """Records that the successor has committed are beyond its log, and none is lost."""
    stage, leader, heir, third, topic = begin(3)
    stage.until(lambda: len(partitions(stage)[0].in_sync) == 3)
    for other in (heir, third):
        stage.world.network.cut(leader, other)
        stage.world.network.cut(other, leader)
    process = process_at(stage, leader)
    process.touch()
    end = process.cluster_node.context.journal.next_offset[0]
    process.cluster_node.admission.voider.reach(0, end + 3)
    assert process.cluster_node.context.journal.next_offset[0] == end + 3
    stage.until(lambda: partitions(stage)[0].leader not in ("", leader))
    publish_until_acknowledged(stage, heir, topic, 2)
    stage.world.network.heal()
    stage.until(lambda: len(partitions(stage)[0].in_sync) == 3)
    assert not process.cluster_node.admission.voider.ends


def test_a_position_that_is_far_beyond_the_log_is_none() -> None:
    """It would fill the disk."""
    stage, leader, _, _, _ = begin(3)
    process = process_at(stage, leader)
    end = process.cluster_node.context.journal.next_offset[0]
    process.cluster_node.admission.voider.reach(0, end + offset_voider.VOID_MAX + 1)
    assert process.cluster_node.context.journal.next_offset[0] == end


def test_a_position_that_is_applied_later_is_reached() -> None:
    """The leader had not applied its record when it began to lead, and others follow it by then."""
    stage, leader, _, _, topic = begin(3)
    process = process_at(stage, leader)
    end = process.cluster_node.context.journal.next_offset[0]
    stage.until(lambda: len(partitions(stage)[0].in_sync) == 3)
    stage.world.checks.impossible -= {"offsets_voided"}
    process.images.note_position(0, end + 1000)
    publish_until_acknowledged(stage, leader, topic, 2)
    stage.run(0.5)
    assert process.state.delivered[0] > end + 1000


def test_a_start_with_marks_of_an_earlier_generation() -> None:
    """The snapshot does not say under which epochs its marks were fed, so nothing of it counts."""
    stage, leader, _, third, topic = begin(2)
    publish_until_acknowledged(stage, leader, topic, 5)
    cluster_node = process_at(stage, third).cluster_node
    end = process_at(stage, leader).state.delivered[0]
    stage.until(lambda: cluster_node.state.delivered[0] == end)
    receiver = cluster_node.feeds.receiver
    receiver.begin(7)
    receiver.partitions[0].marked = 0
    assert not receiver.is_of_generation()
    receiver.lose(0)
    stage.until(lambda: any("feed_diverged" in each for each in stage.world.schedule.trace))
    stage.until(lambda: cluster_node.transfer.is_whole and receiver.is_live(0))
    assert receiver.partitions[0].generation == cluster_node.context.generation
    assert cluster_node.state.delivered[0] >= end
