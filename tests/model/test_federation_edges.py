"""From one broker's log into another's, with crashes of either at any moment: each message once,
in order. The stream between them is the federation's: in order, given away before the origin has it
in custody, kept by the origin from custody on, given again from the first that was not done."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from holdfast.node import federation_session as federating
from holdfast.node.delivery.acknowledgements import handle_puback, handle_pubcomp, handle_pubrec
from holdfast.node.session.session import FEDERATION
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.protocol.mqtt.packets import PUBREL, Ack
from holdfast.protocol.mqtt.publish import Publish
from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.core.identity import MessageId
from holdfast_federation.sidecar.edge_broker.messages import arrival_of, outgoing, refusal
from holdfast_federation.sidecar.edge_broker.origin_offset import LogPlace
from tests.support.node_bench import NodeBench, Peer
from tests.support.seeds import block_of_seeds, run_seeds
from tests.unit.node.test_publish import publish

SEEDS = 30
"""How many histories; a failure names its seed."""
BLOCKS = 4
NODE = bytes(range(16))
TOPICS = ("a", "b", "c/d")


class Session(Peer):
    """The other end of the origin's own session."""

    def __init__(self, bench: NodeBench) -> None:
        self.bench = bench
        self.version = 5
        self.reader = FrameReader(PACKET_BYTES_MAX)
        self.received: list[object] = []
        self.closed = False
        self.connection = federating.connect(bench.node.state, self)


@dataclass
class World:
    rng: random.Random
    origin: NodeBench = field(default_factory=NodeBench)
    destination: NodeBench = field(default_factory=NodeBench)
    epoch: int = 0
    is_calm: bool = False
    sequence: int = 0
    published: int = 0
    # In custody: id, place, message. What the destination was given and is done with.
    custody: deque[tuple[MessageId, int, Message]] = field(default_factory=deque)
    # Not durable there: QoS and packet id at the origin's broker, which waits for it.
    unstored: dict[MessageId, tuple[int, int]] = field(default_factory=dict)
    unstored_given: int = 0
    place: int = 0
    given: int = 0
    done: set[MessageId] = field(default_factory=set)

    def begin(self) -> None:
        self.origin.auto_commit = self.destination.auto_commit = True
        self._open()
        federating.subscribe(self.origin.node.state, self.session.connection, ["#"])
        self.origin.run()
        self.origin.auto_commit = self.destination.auto_commit = False

    def _open(self) -> None:
        self.epoch += 1
        self.session = Session(self.origin)
        self.origin.settle()
        self.publisher = self.origin.connect("p")
        self.origin.settle()

    # What may happen

    def publish(self) -> None:
        self.published += 1
        number = self.published
        self.publisher.send(
            publish(
                self.rng.choice(TOPICS), b"%d" % number, self.rng.choice((1, 2)), number % 60000 + 1
            )
        )

    def commit_origin(self) -> None:
        self.origin.commit()
        self.origin.run()

    def commit_destination(self) -> None:
        self.destination.commit()
        self.destination.run()

    def export(self) -> None:
        """Take what the session has sent."""
        state = self.origin.node.state
        session = state.sessions[FEDERATION]
        for packet in self.session.take():
            if isinstance(packet, Publish):
                entry = session.inflight[packet.packet_id]
                place = LogPlace(NODE, "log", entry.partition, entry.offset)
                self.sequence += 1
                self.place += 1
                id = MessageId(NODE, self.epoch, self.sequence)
                message = outgoing(packet, place)
                assert message.is_repeatable
                self.custody.append((id, self.place, message))
                self.unstored[id] = (packet.qos, packet.packet_id)
            elif isinstance(packet, Ack) and packet.kind == PUBREL:
                handle_pubcomp(state, session, packet.packet_id)
        self.origin.run()

    def store(self) -> None:
        """Custody is durable, in the order in which it was taken; then the broker hears of it."""
        for id in list(self.unstored)[: self.rng.randint(1, 5)]:
            packet = self.unstored.pop(id)
            if not self.is_calm and self.rng.random() < 0.1:
                # It dies between its store and its log.
                self.crash_origin()
                return
            self._acknowledge(*packet)
        self.origin.run()

    def _acknowledge(self, qos: int, packet_id: int) -> None:
        state = self.origin.node.state
        session = state.sessions[FEDERATION]
        if qos == 2:
            handle_pubrec(state, self.session.connection, session, packet_id, 0)
        else:
            handle_puback(state, session, packet_id)

    def deliver(self) -> None:
        for id, place, message in list(self.custody)[self.given : self.given + 5]:
            self.given += 1
            self.unstored_given += id in self.unstored
            assert not refusal(id, message, ["#"])
            delivery = DeliverLocally(id, message, place, 1)
            arrival = arrival_of(delivery, lambda: None)
            arrival.message.timestamp_us = self.destination.wall_us
            assert federating.publish(
                self.destination.node.state,
                *arrival[:4],
                lambda _, id=id: self.done.add(id),  # type: ignore[misc]
            )
        while self.custody and self.custody[0][0] in self.done:
            id, _, _ = self.custody.popleft()
            self.given = max(0, self.given - 1)
            packet = self.unstored.pop(id, None)
            if packet is not None:
                self._acknowledge(*packet)
        self.origin.run()

    def progress(self) -> None:
        self.origin.advance(0.1)

    def crash_origin(self) -> None:
        self.origin.crash(keep_uncommitted=self.rng.random() < 0.5)
        self.custody = deque(entry for entry in self.custody if entry[0] not in self.unstored)
        self.given = min(self.given, len(self.custody))
        self.unstored.clear()
        self._open()
        # Places go on; what is in custody keeps its own, and goes first.

    def crash_destination(self) -> None:
        self.destination.crash(keep_uncommitted=self.rng.random() < 0.5)
        self.given = 0

    def finish(self) -> None:
        self.is_calm = True
        for _ in range(100):
            self.origin.settle()
            self.progress()
            self.export()
            self.store()
            self.deliver()
            self.destination.settle()
            self.deliver()
        assert not self.custody


def cross_an_edge(seed: int) -> int:
    """Returns how many messages were given away before the origin had them in custody."""
    rng = random.Random(seed)
    world = World(rng)
    world.begin()
    steps = [
        world.publish, world.publish, world.publish, world.commit_origin, world.export, world.store,
        world.deliver, world.commit_destination, world.progress,
    ]  # fmt: skip
    for _ in range(200):
        if rng.random() < 0.02:
            rng.choice([world.crash_origin, world.crash_destination])()
        else:
            rng.choice(steps)()
    given_early = world.unstored_given
    world.finish()
    for topic in TOPICS:
        sent = [
            record.payload
            for record in world.origin.messages()
            if record.topic == topic.encode() and record.client_id != FEDERATION.encode()
        ]
        stored = [
            record.payload
            for record in world.destination.messages()
            if record.topic == topic.encode()
        ]
        assert sent
        assert stored == sent
    return given_early


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_each_message_reaches_the_other_log_once_and_in_order(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), cross_an_edge)


def test_the_histories_are_rough() -> None:
    assert min(cross_an_edge(seed) for seed in range(10)) > 0
