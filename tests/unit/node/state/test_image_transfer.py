"""Images from one node to another: pieces, lost links, and when the node that gets them may follow
again."""

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from holdfast.log import record as log_record
from holdfast.log.batch import Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.journal.journal import Journal
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import IMAGE, IMAGE_REQUEST, BadFrame
from holdfast.node.metadata.commands import InitCluster, PutNode, apply
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo
from holdfast.node.node_state import NodeState
from holdfast.node.publish.apply import Applier, ApplyingLog
from holdfast.node.publish.forwarding import RecordForwarder
from holdfast.node.publish.pending_records import Appender
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.transfer import ANSWER_S, ASK_AGAIN_S, PIECE_BYTES, Transfer
from tests.support.journal_port import new_state

PARTITIONS = 4


def metadata() -> ClusterMetadata:
    """`a` leads everything."""
    made: ClusterMetadata | None = None
    for command in (
        InitCluster("c", PARTITIONS, 2, 1, NodeInfo("a", "i", "a:1", "", "")),
        PutNode(NodeInfo("b", "i", "b:1", "", ""), 0),
        PutNode(NodeInfo("c", "i", "c:1", "", ""), 0),
    ):
        applied = apply(made, command)
        assert not applied.error
        made = applied.metadata
    assert made is not None
    return made


@dataclass
class Party:
    name: str
    context: ClusterContext
    images: ReplicatedState
    applier: Applier
    transfer: Transfer
    state: NodeState

    def retained(self) -> set[str]:
        return set(self.state.retained.entries)


def party(name: str) -> Party:
    journal = Journal(PARTITIONS, replicated=True)
    config = NodeConfig(node_id=name, partitions=PARTITIONS)
    state = new_state(config, journal)
    images = ReplicatedState(RecordedState(config, journal))
    state.retained = images.state.retained
    images.state.delivered = state.delivered
    context = ClusterContext(name, journal)
    context.metadata = metadata()
    context.connected = {"a", "b", "c"} - {name}
    log = ApplyingLog(journal)
    applier = Applier(state, images, log, {}, lambda *_: None, lambda _: None, lambda _: None)
    return Party(name, context, images, applier, Transfer(state, context, images, applier), state)


class Pair:
    def __init__(self) -> None:
        self.parties = {"a": party("a"), "b": party("b")}
        self.a = self.parties["a"]
        self.b = self.parties["b"]
        self.now = 100.0
        self.pieces = 0

    def retain(self, partition: int, topic: str, size: int) -> None:
        """At `a`, where it is applied."""
        delivered = self.a.state.delivered
        builder = BatchBuilder(partition, delivered[partition])
        flags = 1 | log_record.FLAG_RETAIN
        builder.add(
            Record(
                builder.partition,
                log_record.MESSAGE,
                flags=flags,
                topic=topic.encode(),
                payload=bytes(size),
            )
        )
        self.a.images.apply(Batch(builder.build(1)).record(0))
        delivered[partition] += 1

    def restart(self, partition: int, offset: int) -> None:
        """The log of `b` begins at the offset now."""
        self.b.state.journal.reset(partition, offset)
        self.b.transfer.restarted(partition, offset)

    def turn(self, seconds: float = 0.0) -> None:
        """Everybody takes one step, and gets what was sent to it before."""
        self.now += seconds
        for each in self.parties.values():
            each.state.now = self.now
            each.transfer.step(self.now)
        for each in self.parties.values():
            outgoing = each.context.outgoing
            each.context.outgoing = []
            for to, kind, payload in outgoing:
                assert isinstance(payload, bytes)
                receiver = self.parties[to].transfer
                if kind == IMAGE_REQUEST:
                    receiver.handle_request(each.name, payload)
                else:
                    assert kind == IMAGE
                    assert len(payload) < 2 * PIECE_BYTES + 1000
                    self.pieces += 1
                    receiver.handle_state(each.name, payload)

    def run(self) -> None:
        for _ in range(200):
            if not self.b.transfer.missing:
                return
            self.turn()
        pytest.fail("the images do not come")


def filled() -> Pair:
    pair = Pair()
    for number in range(60):
        pair.retain(number % PARTITIONS, f"t/{number % PARTITIONS}/{number}", 20_000)
    return pair


def test_images_come_in_pieces_and_count_once_they_are_saved() -> None:
    pair = filled()
    transfer = pair.b.transfer
    assert transfer.is_whole
    pair.restart(1, 10)
    pair.restart(2, 15)
    assert transfer.missing == {1, 2}
    assert transfer.offsets() == [0, 0, 0, 0]
    pair.run()
    assert pair.pieces > 2
    assert pair.b.retained() == {t for t in pair.a.retained() if t[2] in "12"}
    assert pair.b.applier.starts == [0, 15, 15, 0]
    assert transfer.offsets() == [0, 10, 15, 0]
    assert not transfer.is_whole
    assert transfer.needs_save()
    assert transfer.pop_released() == []
    covered = dict(transfer.unsaved)
    transfer.saved(covered)
    assert sorted(transfer.pop_released()) == [1, 2]
    assert transfer.is_whole
    assert not transfer.needs_save()


def test_what_was_there_before_goes() -> None:
    pair = filled()
    pair.restart(1, 10)
    pair.run()
    pair.b.transfer.saved(dict(pair.b.transfer.unsaved))
    gone = sorted(topic for topic in pair.a.retained() if topic.startswith("t/1/"))[0]
    pair.a.state.retained.remove(gone)
    pair.retain(1, "t/1/new", 10)
    pair.restart(1, 16)
    pair.run()
    assert pair.b.retained() == {topic for topic in pair.a.retained() if topic.startswith("t/1/")}
    assert "t/1/new" in pair.b.retained()
    assert gone not in pair.b.retained()


def test_a_log_that_begins_where_the_images_are_needs_none() -> None:
    """But they are in no snapshot that goes with that log."""
    pair = filled()
    pair.restart(1, 10)
    pair.run()
    pair.b.transfer.saved(dict(pair.b.transfer.unsaved))
    pair.b.transfer.pop_released()
    pair.restart(1, 15)
    assert pair.b.transfer.missing == set()
    covered = dict(pair.b.transfer.unsaved)
    assert list(covered) == [1]
    pair.restart(1, 15)
    pair.b.transfer.saved(covered)
    assert pair.b.transfer.pop_released() == [], "the log has begun anew since"
    pair.b.transfer.saved(dict(pair.b.transfer.unsaved))
    assert pair.b.transfer.pop_released() == [1]


def test_a_lost_link_begins_it_anew() -> None:
    pair = filled()
    pair.restart(1, 10)
    pair.restart(3, 10)
    while not pair.pieces:
        pair.turn()
    assert pair.b.transfer.missing == {1, 3}
    for each, other in ((pair.a, "b"), (pair.b, "a")):
        each.context.outgoing = []
        each.context.connected.discard(other)
        each.transfer.disconnected(other)
    pair.turn(ASK_AGAIN_S)
    pair.turn()
    assert not pair.b.context.outgoing
    topic = next(topic for topic in pair.b.retained() if topic.startswith("t/1/"))
    pair.a.state.retained.remove(topic)
    for each, other in ((pair.a, "b"), (pair.b, "a")):
        each.context.connected.add(other)
    pair.turn(ASK_AGAIN_S)
    pair.run()
    assert pair.b.retained() == {t for t in pair.a.retained() if t[2] in "13"}


def test_a_restart_in_the_middle_of_it() -> None:
    pair = filled()
    pair.restart(1, 10)
    pair.restart(3, 10)
    while not pair.pieces:
        pair.turn()
    pair.restart(3, 12)
    pair.run()
    assert pair.b.retained() == {t for t in pair.a.retained() if t[2] in "13"}
    assert pair.b.applier.starts == [0, 15, 0, 15]


def test_who_has_not_applied_enough_is_asked_again() -> None:
    pair = filled()
    pair.restart(1, 20)
    pair.turn()
    pair.turn()
    assert pair.b.transfer.missing == {1}
    for number in range(5):
        pair.retain(1, f"t/1/late-{number}", 10)
    assert not pair.b.transfer.needs_save()
    pair.turn(ASK_AGAIN_S)
    pair.run()
    assert pair.b.applier.starts[1] == 20


def test_who_lacks_them_gives_none() -> None:
    pair = filled()
    pair.a.transfer.missing.add(1)
    pair.restart(1, 10)
    pair.restart(2, 10)
    for _ in range(60):
        pair.turn()
    assert pair.b.transfer.missing == {1}
    assert pair.b.transfer.needs_save(), "what has come does not wait for what cannot be had"
    pair.a.transfer.abandon(1)
    pair.turn(ASK_AGAIN_S)
    pair.run()


def test_a_node_that_does_not_answer_is_asked_again() -> None:
    pair = filled()
    pair.restart(1, 10)
    pair.turn()
    # The answer is lost on its way.
    assert pair.a.context.outgoing
    pair.a.context.outgoing = []
    pair.turn(ANSWER_S / 2)
    assert pair.b.transfer.missing == {1}
    assert pair.pieces == 0
    assert pair.b.transfer.timer() is not None
    pair.turn(ANSWER_S)
    pair.run()


def test_the_leader_is_asked() -> None:
    pair = filled()
    made = pair.b.context.metadata
    assert made is not None
    info = replace(made.partitions[1], leader="c")
    partitions = (made.partitions[0], info, *made.partitions[2:])
    pair.b.context.metadata = replace(made, partitions=partitions)
    pair.restart(1, 10)
    pair.b.transfer.step(pair.now)
    pair.b.transfer.step(pair.now)
    assert [(to, kind) for to, kind, _ in pair.b.context.outgoing] == [("c", IMAGE_REQUEST)]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b'{"request":1,"piece":0}',
        b'{"request":1,"piece":0,"partitions":[[9,0]]}',
        b'{"request":1,"piece":0,"partitions":[[1]]}',
        b'{"request":1,"piece":0,"partitions":["x"]}',
        b'{"request":"x","piece":0}',
    ],
)
def test_requests_that_are_none(payload: bytes) -> None:
    with pytest.raises(BadFrame):
        filled().a.transfer.handle_request("b", payload)


def test_images_that_are_none() -> None:
    pair = filled()
    pair.restart(1, 10)
    pair.b.transfer.step(pair.now)
    pair.b.transfer.step(pair.now)
    (request,) = pair.b.context.outgoing
    assert isinstance(request[2], bytes)
    pair.a.transfer.handle_request("b", request[2])
    (image,) = pair.a.context.outgoing
    assert isinstance(image[2], bytes)
    # Of somebody who was not asked.
    pair.b.transfer.handle_state("c", image[2])
    assert pair.b.transfer.missing == {1}
    with pytest.raises(BadFrame):
        pair.b.transfer.handle_state("a", image[2][:-1])
    with pytest.raises(BadFrame):
        pair.b.transfer.handle_state("a", b"x")


def test_what_nobody_can_tell_any_more_is_not_sent_again() -> None:
    """Plain messages under way, when the records that would tell are gone, and what their client
    has sent after them. Others are recognised by whoever stores them, and a message that never left
    is in no doubt."""
    journal = Journal(PARTITIONS, replicated=True)
    state = new_state(NodeConfig(node_id="b", partitions=PARTITIONS), journal)
    context = ClusterContext("b", journal)
    context.connected = {"a"}
    forwarding = RecordForwarder(state, context, Appender())
    flags = {
        "plain": 1,
        "numbered": 2 | log_record.FLAG_PACKET_ID,
        "producer": 1 | log_record.FLAG_PRODUCER,
        "will": 1 | log_record.FLAG_WILL,
    }

    def append(client_id: str, topic: str) -> None:
        kind = log_record.MESSAGE if topic in flags else log_record.SESSION
        bits, name = flags.get(topic, 0), client_id.encode()
        forwarding.append(Record(1, kind, flags=bits, topic=topic.encode(), client_id=name))

    forwarding.aligned(1, "a", 1, set())
    for topic in (*flags, "session"):
        append("with", topic)
        if topic != "plain":
            append("without", topic)
    forwarding.flush()
    forwarding.stop(1)
    flags["later"] = 1
    for client_id in ("with", "without"):
        append(client_id, "later")
    forwarding.refuse_unresolved(1)
    left: dict[str, list[str]] = {"with": [], "without": []}
    for pending in forwarding.pending.values():
        left[pending.record.client_id.decode()].append(pending.record.topic.decode())
    assert left == {
        "with": ["will", "session"],
        "without": ["numbered", "producer", "will", "session", "later"],
    }
