"""The largest record that a client may publish fits into every frame between nodes that carries
records, whatever waits before it.

What frames add does not depend on the payload. So the tests take a smaller one, but one that makes
a frame of its own, and look at what is in the frame beyond the packet.
"""

from holdfast.config.schema import PACKET_BYTES_LIMIT
from holdfast.io.peers.links import FRAME_BYTES_MAX
from holdfast.log.batch import HEAD_BYTES, HEADER_BYTES, Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.journal.journal import BATCH_BODY_BYTES_MAX, Journal
from holdfast.log.record import FLAG_PRODUCER, FLAG_RETAIN, MESSAGE, Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.node_state import NodeState
from holdfast.node.publish.forward_frames import decode_forward
from holdfast.node.publish.forwarding import FORWARD_BYTES_MAX, RecordForwarder
from holdfast.node.publish.pending_records import Appender
from holdfast.node.publish.producers import ID_BYTES_MAX
from holdfast.node.publish.promises import PromiseQueues
from holdfast.node.publish.retained_updates import RetainedUpdates
from holdfast.node.replicate.catch_up import flush
from holdfast.node.replicate.codec import EPOCH
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.replicate.effects import Send
from holdfast.node.replicate.progress import Peer
from holdfast.node.replicate.state import ReplicaState
from holdfast.node.routing.qos0_frames import QOS0_BYTES_MAX
from holdfast.node.routing.qos0_routing import Qos0Routing
from holdfast.node.session.message import Message
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.transfer import PIECE_BYTES, entries
from tests.support.journal_port import new_state

ROOM_BYTES = FRAME_BYTES_MAX - PACKET_BYTES_LIMIT
"""What a frame may add to the largest packet."""
LEADER = "n2"
FIELD = b"x" * 65_535
LARGE_BYTES = FORWARD_BYTES_MAX + 1


def record(payload: bytes, partition: int = 0, flags: int = FLAG_PRODUCER | 1) -> Record:
    """With fields as long as there may be, none of which need be in the packet: the topic may be
    an alias."""
    return Record(
        partition,
        MESSAGE,
        flags=flags,
        topic=FIELD,
        client_id=FIELD,
        producer=FIELD,
        payload=payload,
    )


def state_of() -> NodeState:
    return new_state(NodeConfig(partitions=2), Journal(2, replicated=True))


def sizes(context: ClusterContext) -> list[int]:
    found = [len(payload) for _, _, payload in context.outgoing if isinstance(payload, bytes)]
    assert len(found) == len(context.outgoing)
    return found


def test_forward() -> None:
    state = state_of()
    context = ClusterContext("n1", state.journal)
    context.connected.add(LEADER)
    forwarding = RecordForwarder(state, context, Appender())
    for partition in (0, 1):
        forwarding.aligned(partition, LEADER, 1, set())
    expected = []
    for size in (FORWARD_BYTES_MAX - 300_000, LARGE_BYTES, 1, 1, LARGE_BYTES):
        expected.append(size)
        forwarding.append(record(bytes(size), len(expected) % 2))
    forwarding.flush()
    assert max(sizes(context)) <= LARGE_BYTES + ROOM_BYTES
    assert [
        len(each.payload)
        for _, _, payload in context.outgoing
        for _, _, batch in decode_forward(bytes(payload))  # type: ignore[arg-type]
        for each in batch.records()
    ] == expected


def test_many_small_records_with_long_names_are_forwarded_in_several_frames() -> None:
    state = state_of()
    context = ClusterContext("n1", state.journal)
    context.connected.add(LEADER)
    forwarding = RecordForwarder(state, context, Appender())
    forwarding.aligned(0, LEADER, 1, set())
    for _ in range(200):
        forwarding.append(record(b""))
    forwarding.flush()
    assert max(sizes(context)) <= FORWARD_BYTES_MAX
    assert len(context.outgoing) == 5


def test_qos_0() -> None:
    state = state_of()
    context = ClusterContext("n1", state.journal)
    context.connected.add(LEADER)
    interest = Qos0Routing(state, context, RetainedUpdates(state), PromiseQueues(state))
    for size in (QOS0_BYTES_MAX - 200_000, LARGE_BYTES, LARGE_BYTES):
        message = Message(FIELD, bytes(size), 0, True, b"", 0, 0, FIELD)
        interest.spread(message, FIELD.decode(), 0)
    interest.frames.flush(0.0)
    assert len(sizes(context)) == 2
    assert max(sizes(context)) <= LARGE_BYTES + ROOM_BYTES
    assert interest.frames.dropped == 1


def test_replicate() -> None:
    """From what the journal closes: no batch has more than one large record, or twice its bound."""
    journal = Journal(1, replicated=True)
    journal.lead(0, 1)
    for size in (BATCH_BODY_BYTES_MAX - 200_000, 2 * BATCH_BODY_BYTES_MAX, 1):
        journal.append(record(bytes(size)))
    group = journal.close_write_group()
    assert group is not None
    state = ReplicaState("n1", journal, ReplicationConfig())  # type: ignore[arg-type]
    peer = Peer(LEADER)
    data = b"".join(group.data)
    at = 0
    while at < len(data):
        batch = Batch(data, at)
        peer.add(EPOCH.pack(1), data[at : at + batch.length])
        at += batch.length
    flush(state, peer)
    frames = [sum(map(len, each.payload)) for each in state.effects if isinstance(each, Send)]  # type: ignore[arg-type]
    assert len(frames) > 1
    assert max(frames) <= 2 * BATCH_BODY_BYTES_MAX + ROOM_BYTES


def test_image() -> None:
    state = state_of()
    images = ReplicatedState(state)
    builder = BatchBuilder(0, 0)
    retained = record(bytes(LARGE_BYTES), flags=FLAG_RETAIN | 1)
    retained.producer = FIELD[:ID_BYTES_MAX]
    builder.add(retained)
    images.apply(Batch(builder.build(1)).record(0))
    largest = max(len(entry[2]) for entry in entries(images, {0}) if entry is not None)
    assert largest > LARGE_BYTES
    # A piece is closed behind the entry that fills it; its head names all partitions there may be.
    assert largest + PIECE_BYTES + 20 * 1024 + HEADER_BYTES <= LARGE_BYTES + ROOM_BYTES


def test_what_records_may_add_is_within_the_room() -> None:
    names_bytes = 4 * len(FIELD)
    assert names_bytes + PIECE_BYTES + HEADER_BYTES + HEAD_BYTES + 64 * 1024 <= ROOM_BYTES
