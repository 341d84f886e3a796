"""The retained store has a share for each owner: the one with most gives way."""

import pytest

from holdfast.node.config import NodeConfig
from holdfast.node.session.message import retained_size
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.admission.test_shares import login
from tests.unit.node.publish.test_producers import user_property
from tests.unit.node.test_bounds import Cluster
from tests.unit.node.test_publish import subscribe

BYTES = 1000
ROOM = 32
"""The store has room for about this many messages of `BYTES` bytes."""
QUOTA = 0x97
GREEDY, SMALL = "greedy", [f"small-{number}" for number in range(12)]


def made(most_topics: int = 5_000_000, *, auto_commit: bool = True) -> NodeBench:
    size = ROOM * (BYTES + 900)
    config = NodeConfig(
        partitions=4, sys_interval_s=0, retained_bytes_max=size, retained_max=most_topics
    )
    return NodeBench(config, auto_commit=auto_commit)


def retain(
    peer: Peer, topic: str, qos: int = 1, packet_id: int = 7, payload: bytes = b"x" * BYTES
) -> None:
    peer.send(Publish(topic.encode(), payload, qos, True, False, packet_id, b"", 0, -1))


def is_retained(peer: Peer, topic: str, qos: int = 1, packet_id: int = 7) -> bool:
    """Publishes a message of `BYTES` bytes. Whether it was accepted."""
    retain(peer, topic, qos, packet_id)
    (reply,) = peer.take(m.Ack)
    assert isinstance(reply, m.Ack)
    is_accepted = reply.reason < 0x80
    if qos == 2 and is_accepted:
        peer.send(m.Ack(m.PUBREL, packet_id, 0, {}))
        peer.take(m.Ack)
    assert is_accepted or reply.reason == QUOTA
    return is_accepted


def filled(peer: Peer, name: str, qos: int = 1) -> int:
    """The number of topics that the client can retain."""
    count = 0
    while is_retained(peer, f"{name}/{count}", qos):
        count += 1
    return count


def shares(bench: NodeBench) -> dict[str, tuple[int, int]]:
    retained = bench.recorded().retained
    retained.check()
    return {
        owner: (retained.bytes.of(owner), retained.topics.of(owner)) for owner in (GREEDY, *SMALL)
    }


@pytest.mark.parametrize("qos", [1, 2])
def test_the_owner_with_most_gives_way(qos: int) -> None:
    """Also under another client id. Nobody's message is removed, and each may still be changed."""
    bench = made()
    topics = bench.node.state.retained.entries
    greedy = login(bench, "g1", GREEDY)
    count = filled(greedy, GREEDY, qos)
    assert ROOM // 2 - 2 <= count <= ROOM // 2
    assert not is_retained(login(bench, "g2", GREEDY), "another", qos)
    for user in SMALL:
        assert is_retained(login(bench, user, user), user, qos)
    assert len(topics) == count + len(SMALL)
    assert not is_retained(greedy, "another", qos)
    # It is full to the share of the greedy user, whose messages change nevertheless.
    assert all(is_retained(greedy, f"{GREEDY}/{number}", qos) for number in range(count))
    assert len(topics) == count + len(SMALL)
    # What was refused is delivered to nobody.
    assert len(bench.messages()) == 2 * count + len(SMALL)
    assert bench.node.state.stats.refused_quota == 3
    # Removed messages make room.
    for number in range(count):
        retain(greedy, f"{GREEDY}/{number}", 0, payload=b"")
    assert shares(bench)[GREEDY] == (0, 0)
    assert filled(login(bench, "g3", GREEDY), GREEDY, qos) >= (ROOM - len(SMALL)) // 2 - 2


def test_topics_have_shares_too() -> None:
    bench = made(most_topics=8)
    assert [filled(login(bench, each, each), each) for each in ("a", "b", "c")] == [4, 2, 1]


def test_clients_without_a_user_are_owners() -> None:
    """Another one than a user of the same name."""
    bench = made(most_topics=8)
    owners = (("a", None), ("b", None), ("c", "a"))
    assert [filled(login(bench, name, user), name + "0") for name, user in owners] == [4, 2, 1]
    assert all(not record.audience for record in bench.messages() if record.client_id != b"c")


def test_appended_messages_count() -> None:
    bench = made(most_topics=8, auto_commit=False)
    peer = login(bench, "a", "a")
    bench.settle()
    for number in range(8):
        retain(peer, f"a/{number}", packet_id=number + 1)
    bench.settle()
    # A later message needs no room, and does not wait for the refused ones.
    peer.send(Publish(b"b", b"", 1, False, False, 9, b"", 0, -1))
    bench.settle()
    replies = [reply.reason for reply in peer.take(m.Ack) if isinstance(reply, m.Ack)]
    assert sum(reason < 0x80 for reason in replies) == 5
    assert replies.count(QUOTA) == 4
    assert peer.connection.unacknowledged == 0
    assert len(bench.node.state.retained) == 4


@pytest.mark.parametrize(("version", "qos", "name"), [(4, 1, ""), (5, 0, ""), (5, 1, "p:0:")])
def test_what_cannot_be_refused_is_delivered_and_not_retained(
    version: int, qos: int, name: str
) -> None:
    """Clients of MQTT 3 and numbered producers would send a refused message for ever."""
    bench = made(most_topics=4)
    subscriber = bench.connect("s")
    subscriber.send(subscribe("#"))
    peer = bench.connect("publisher", version)
    for number in range(3):
        block = user_property("hf-seq", f"{name}{number + 1}") if name else b""
        topic = f"t/{number}".encode()
        peer.send(Publish(topic, b"x", qos, True, False, number + 1, block, 0, -1))
    assert len(subscriber.publishes()) == 3
    assert not peer.closed
    assert sorted(bench.node.state.retained.entries) == ["t/0", "t/1"]
    assert [note.event for note in bench.notes].count("retained_limit") == 1


def test_a_restart_knows_the_owners() -> None:
    """From the log, and from a snapshot: by each way into the store."""
    bench = made()
    greedy = login(bench, "g1", GREEDY)
    for number, qos in enumerate((0, 1, 2)):
        retain(greedy, f"{GREEDY}/{number}", qos, number + 1)
    greedy.send(m.Ack(m.PUBREL, 3, 0, {}))
    retain(greedy, "$delayed/1/greedy/delayed", 1, 4)
    retain(greedy, "$delayed/1/greedy/delayed0", 0)
    for number, qos in enumerate((0, 1)):
        will = m.Will(f"{GREEDY}/will{number}", b"x" * BYTES, qos, True, {})
        client = Peer(bench, 5)
        client.send(m.Connect(5, True, 0, f"w{number}", will, GREEDY, b"x", {}))
        assert client.take(m.Connack)
        client.lose()
    is_retained(login(bench, SMALL[0], SMALL[0]), SMALL[0])
    bench.advance(2.0)
    bench.settle()
    before = shares(bench)
    size = retained_size(bench.node.state.retained.entries[f"{GREEDY}/0"])
    assert before[GREEDY][1] == 7
    assert before[GREEDY][0] >= 7 * size
    assert before[SMALL[0]][1] == 1
    for snapshot in (False, True):
        bench.crash(snapshot=bench.snapshot() if snapshot else None)
        assert shares(bench) == before
    # The messages are for all subscribers, live ones and those of a shared group, and from the log.
    reader = bench.connect("reader")
    reader.send(subscribe("#", 1))
    assert len(reader.publishes()) == 8


def test_after_a_failover_the_owners_are_known() -> None:
    """Each node has the shares, by the records and by a snapshot."""
    cluster = Cluster()
    peer = cluster.stage.login("a", "alice", "a")
    for number in range(2):
        cluster.send(peer, f"public/{number}", retain=True)
    cluster.agrees()
    for process in cluster.nodes:
        retained = process.images.state.retained
        assert retained.topics.of("alice") == 2
        journal = process.cluster_node.context.journal
        other = ReplicatedState(RecordedState(NodeConfig(partitions=journal.partitions), journal))
        for kind, data in process.images.snapshot():
            other.apply_snapshot_entry(kind, data)
        assert other.state.retained.bytes.of("alice") == retained.bytes.of("alice")
