"""QoS 2 packet ids of a session that are from before the log was put back: see
`node.session.session`."""

from holdfast.log import record as log_record
from holdfast.log.partition import partition_of
from holdfast.node.metadata.commands import PutGeneration
from holdfast.node.session.session import Session
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer

PARTITIONS = 4
HERE, THERE = (
    "t/0",
    next(
        name
        for name in (f"t/{number}" for number in range(100))
        if partition_of(name.encode(), PARTITIONS) != partition_of(b"t/0", PARTITIONS)
    ),
)


def publish(topic: str, packet_id: int, dup: bool) -> Publish:
    return Publish(topic.encode(), b"x", 2, False, dup, packet_id, b"", 0, -1)


class Site(NodeBench):
    """A session that held the packet ids 1 and 2 when the log was put back."""

    def __init__(self) -> None:
        super().__init__()
        peer = self.connect("q", expiry_s=1000)
        for packet_id in (1, 2):
            peer.send(publish(HERE, packet_id, False))
        peer.lose()
        cluster = self.core.cluster
        cluster.meta.propose(PutGeneration(0, 1, ()), self.now)
        self.advance(0.1)
        assert cluster.context.generation == 1
        self.peer: Peer = self.connect("q", clean=False, expiry_s=1000)
        self.peer.take()

    @property
    def own(self) -> Session:
        return self.session("q")

    @property
    def unacknowledged(self) -> int:
        connection = self.own.connection
        assert connection is not None
        return connection.unacknowledged

    def reason(self, packet: Publish | m.Ack) -> int:
        self.peer.send(packet)
        (answer,) = self.peer.take()
        assert isinstance(answer, m.Ack)
        return answer.reason

    def released(self) -> int:
        return sum(record.kind == log_record.RELEASE for record in self.records())


def test_a_repetition_is_answered_and_counts_until_its_release() -> None:
    site = Site()
    assert site.unacknowledged == 0
    assert site.reason(publish(HERE, 1, True)) == reasons.SUCCESS
    assert (len(site.messages()), site.unacknowledged) == (2, 1)
    # The client has it, so another PUBLISH is a repetition, whatever its DUP flag.
    assert site.reason(publish(HERE, 1, False)) == reasons.SUCCESS
    assert (len(site.messages()), site.unacknowledged) == (2, 1)
    assert site.reason(m.Ack(m.PUBREL, 1)) == reasons.SUCCESS
    assert (site.unacknowledged, site.own.inbound) == (0, {2: site.own.inbound[2]})


def test_a_new_message_releases_the_earlier_one() -> None:
    for topic, dup in ((HERE, False), (THERE, False), (THERE, True)):
        site = Site()
        site.reason(publish(topic, 1, dup))
        assert (len(site.messages()), site.released(), site.unacknowledged) == (3, 1, 1)
        site.reason(m.Ack(m.PUBREL, 1))
        assert (site.released(), site.unacknowledged) == (2, 0)
        assert site.own.rare.doubtful == {2}


def test_a_release_is_known_and_does_not_count() -> None:
    site = Site()
    assert site.reason(m.Ack(m.PUBREL, 1)) == reasons.SUCCESS
    assert (site.released(), site.unacknowledged) == (1, 0)
    assert site.reason(m.Ack(m.PUBREL, 1)) == reasons.PACKET_IDENTIFIER_NOT_FOUND


def test_an_id_towards_a_client_is_freed_before_its_first_use() -> None:
    """The PUBCOMP to that comes before the PUBREC of the message, and finishes nothing."""
    bench = NodeBench()
    bench.node.state.was_put_back = True
    peer = bench.connect("q", expiry_s=1000)
    peer.send(m.Subscribe(1, [m.SubscriptionRequest("t/#", 2)]))
    peer.take()
    session = bench.session("q")
    other = bench.connect("other")
    for number in range(2):
        session.next_packet_id = 1
        other.send(publish(HERE, 1 + number, False))
        *freed, sent = peer.take()
        assert [type(each) for each in (*freed, sent)] == [m.Ack, m.Publish][number:]
        assert isinstance(sent, m.Publish)
        assert sent.packet_id == 1
        if not number:
            peer.send(m.Ack(m.PUBCOMP, 1, reasons.PACKET_IDENTIFIER_NOT_FOUND))
            assert list(session.inflight) == [1]
        peer.send(m.Ack(m.PUBREC, 1))
        peer.send(m.Ack(m.PUBCOMP, 1))
        assert not session.inflight
        peer.take()
