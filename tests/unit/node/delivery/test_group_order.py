"""The batches of a write group are in another order than their records were appended: a restart
comes to the same state."""

import pytest

from holdfast.log import record as log_record
from holdfast.log.journal.journal import Journal
from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.recovery import Recovery
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench, Peer

PARTITIONS = 4


def topic_of(partition: int) -> str:
    names = (f"t/{number}" for number in range(1000))
    return next(name for name in names if partition_of(name.encode(), PARTITIONS) == partition)


HOME = partition_of(b"q", PARTITIONS)
ELSEWHERE = topic_of((HOME + 1) % PARTITIONS)


def publish(topic: str, payload: bytes, packet_id: int, dup: bool = False) -> Publish:
    return Publish(topic.encode(), payload, 2, False, dup, packet_id, b"", 0, -1)


def connect(bench: NodeBench, *, clean: bool) -> Peer:
    return bench.connect("q", clean=clean, expiry_s=1000)


def stored(bench: NodeBench) -> list[bytes]:
    return [record.payload for record in bench.messages()]


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_a_packet_id_of_a_session_that_has_ended(with_snapshot: bool) -> None:
    """The file has first the home of the client, with the end of its session, then the message."""
    bench = NodeBench(auto_commit=False)
    peer = connect(bench, clean=True)
    bench.settle()
    snapshot = bench.snapshot() if with_snapshot else None
    peer.send(m.Subscribe(1, [m.SubscriptionRequest("x", 0)]))
    peer.send(publish(ELSEWHERE, b"old", 5))
    peer.lose()
    connect(bench, clean=True)
    bench.settle()
    bench.crash(snapshot=snapshot)
    peer = connect(bench, clean=False)
    bench.settle()
    peer.take()
    peer.send(publish(ELSEWHERE, b"new", 5))
    bench.settle()
    (answer,) = peer.take()
    assert isinstance(answer, m.Ack)
    assert stored(bench) == [b"old", b"new"]


def test_a_packet_id_before_the_opening_of_its_session() -> None:
    """The other way round: a message of somebody else opens the batch that the client's is in."""
    bench = NodeBench(auto_commit=False)
    other = bench.connect("other", expiry_s=1000)
    bench.settle()
    other.send(publish(ELSEWHERE, b"other", 9))
    peer = connect(bench, clean=True)
    bench.settle()
    peer.send(publish(ELSEWHERE, b"once", 5))
    bench.settle()
    recovered = recover(bench)
    assert recovered.state.sessions["q"].inbound == {5: partition_of(ELSEWHERE.encode(), 4)}


def new_recovery() -> Recovery:
    """The recovery of a directory of the single form, before its adoption."""
    return Recovery(RecordedState(NodeConfig(partitions=4), Journal(4)))


def recover(bench: NodeBench) -> Recovery:
    """With the records of `q` to other partitions before those of its home."""
    recovery = new_recovery()
    records = bench.records()
    for record in [r for r in records if r.partition != HOME] + [
        r for r in records if r.partition == HOME
    ]:
        recovery.apply(record)
    return recovery


def test_a_release_of_a_session_that_has_ended() -> None:
    """The id was used again by the next session, for a message of another partition."""
    recovery = new_recovery()
    opened = b'{"op":"open","client":"q","epoch":%d,"expiry_s":99,"clean":true,"username":null}'

    def session(epoch: int) -> Record:
        return Record(
            HOME, log_record.SESSION, client_id=b"q", payload=opened % epoch, sequence=epoch
        )

    def sent(partition: int, epoch: int) -> Record:
        flags = 2 | log_record.FLAG_PACKET_ID
        return Record(
            partition,
            log_record.MESSAGE,
            flags,
            topic=b"t",
            client_id=b"q",
            sequence=5,
            producer_epoch=epoch,
        )

    def released(partition: int, epoch: int) -> Record:
        return Record(
            partition, log_record.RELEASE, client_id=b"q", sequence=5, producer_epoch=epoch
        )

    for record in (session(1), sent(1, 1), session(2), sent(2, 2), released(1, 1)):
        recovery.apply(record)
    assert recovery.state.sessions["q"].inbound == {5: 2}
    # Records of older versions have no epoch, and count as they come.
    recovery.apply(released(2, 0))
    recovery.apply(sent(3, 0))
    assert recovery.state.sessions["q"].inbound == {5: 3}


def test_epochs_of_a_client_only_grow() -> None:
    bench = NodeBench()
    epochs = []
    for clean, expiry_s in [(True, 100), (False, 100), (True, 0), (True, 0), (True, 100)]:
        bench.connect("q", clean=clean, expiry_s=expiry_s)
        epochs.append(bench.session("q").epoch)
    assert epochs == sorted(set(epochs))
