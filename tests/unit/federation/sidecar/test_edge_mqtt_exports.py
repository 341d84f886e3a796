"""What a broker sends us: given on in order and once, acknowledged when it is done."""

import random
from collections.abc import Callable

import pytest

from holdfast.client.protocol.effects import Message as Received
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast_federation.core.effects import Message
from holdfast_federation.core.identity import MessageId
from holdfast_federation.sidecar.edge_mqtt import exports as edge_exports
from holdfast_federation.sidecar.edge_mqtt.exports import Exports, Replays
from holdfast_federation.sidecar.edge_mqtt.loop_marker import MARK, inbound, mark_of, outbound


class World:
    """The host above and the connection below."""

    def __init__(self, replays: Replays = Replays.NONE, *allowed: str) -> None:
        self.given: list[Message] = []
        self.dones: list[Callable[[], None]] = []
        self.acknowledged: list[int] = []
        self.is_connected = True
        self.exports = Exports(self._publish, self._acknowledge, replays)
        self.exports.allow(frozenset(allowed or ("#",)))

    def _publish(self, message: Message, done: Callable[[], None]) -> None:
        self.given.append(message)
        self.dones.append(done)

    def _acknowledge(self, received: Received) -> bool:
        if self.is_connected:
            self.acknowledged.append(received.packet_id)
        return self.is_connected

    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.given]


def received(
    packet_id: int,
    payload: bytes = b"x",
    connection: int = 1,
    dup: bool = False,
    retain: bool = False,
    ids: tuple[int, ...] = (),
    topic: str = "t",
) -> Received:
    properties: pr.Properties = {pr.SUBSCRIPTION_IDENTIFIER: list(ids)} if ids else {}
    qos = 2 if packet_id else 0
    return Received(topic, payload, qos, retain, dup, packet_id, properties, connection)


def test_acknowledges_in_order_what_is_done() -> None:
    world = World()
    for number in (1, 2, 3):
        world.exports.handle(received(number, b"%d" % number))
    world.dones[2]()
    world.dones[1]()
    assert world.acknowledged == []
    world.dones[0]()
    assert world.acknowledged == [1, 2, 3]
    assert len(world.exports) == 0


def test_what_was_done_while_away_is_not_given_again() -> None:
    world = World()
    for number in (1, 2, 3):
        world.exports.handle(received(number, b"%d" % number))
    world.is_connected = False
    world.dones[0]()
    world.dones[2]()
    world.is_connected = True
    for number in (1, 2, 3):
        world.exports.handle(received(number, b"%d" % number, 2, True))
    assert world.payloads() == [b"1", b"2", b"3"]
    assert world.acknowledged == [1]
    world.dones[1]()
    assert world.acknowledged == [1, 2, 3]


def test_another_client_counts_its_connections_anew() -> None:
    """What was held of the one before comes again, once."""
    world = World()
    world.exports.suspend()
    world.exports.handle(received(1, b"held"))
    world.exports.new_client()
    world.exports.handle(received(1, b"held", dup=True))
    world.exports.resume()
    assert world.payloads() == [b"held"]
    assert world.exports.counts == {"exported": 1}


def test_a_packet_id_that_is_used_anew_is_a_new_message() -> None:
    world = World()
    world.exports.handle(received(1, b"old"))
    world.exports.forget_session()
    world.dones[0]()
    world.exports.handle(received(1, b"old", 2))
    world.exports.handle(received(2, b"new", 2, True))
    assert world.payloads() == [b"old", b"old", b"new"]
    world.dones[1]()
    world.dones[2]()
    assert world.acknowledged == [1, 2]


@pytest.mark.parametrize(
    ("replays", "is_settling", "given"),
    [
        (Replays.NONE, True, True),
        (Replays.FLAGGED, False, False),
        (Replays.AT_FIRST, True, False),
        (Replays.AT_FIRST, False, True),
    ],
)
def test_retained(replays: Replays, is_settling: bool, given: bool) -> None:
    world = World(replays)
    world.exports.is_settling = is_settling
    world.exports.handle(received(1, retain=True))
    assert bool(world.given) is given
    assert bool(world.acknowledged) is not given


def test_not_everything_leaves() -> None:
    world = World(Replays.NONE, "a/#")
    for number, topic in enumerate(("$SYS/x", "federator/interest", "b"), 1):
        world.exports.handle(received(number, topic=topic))
    world.exports.handle(received(0, topic="b"))
    marked = received(4, topic="a")
    marked.properties = {pr.USER_PROPERTY: [(MARK, "")]}
    world.exports.handle(marked)
    assert not world.given
    assert world.acknowledged == [1, 2, 3, 4]
    assert world.exports.counts == {"not federated": 2, "not wanted": 2, "echo": 1}


def test_copies_of_overlapping_subscriptions() -> None:
    world = World()
    world.exports.is_changing = True
    # Before the second subscription; with both, in any order; after the first is gone.
    for number, identifier in enumerate((1, 1, 2, 2, 1), 1):
        world.exports.handle(received(number, b"same", ids=(identifier,)))
    world.exports.fence()
    for number, identifier in enumerate((1, 2, 2, 2), 6):
        world.exports.handle(received(number, b"same", ids=(identifier,)))
    assert len(world.given) == 3 + 3
    # The first by the old one alone, the next by the new one alone: what parts them is the fence.
    world.exports.handle(received(10, b"one", ids=(1,)))
    world.exports.fence()
    world.exports.handle(received(11, b"one", ids=(2,)))
    assert len(world.given) == 8
    # A broker that sends one for all names all; without identifiers nothing is taken for a copy.
    world.exports.handle(received(12, b"all", ids=(1,)))
    world.exports.handle(received(13, b"all", ids=(1, 2)))
    world.exports.handle(received(14, b"none"))
    world.exports.handle(received(15, b"none"))
    assert len(world.given) == 12


def test_nothing_is_given_while_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_exports, "HELD_UNACKNOWLEDGED_MAX", 2)
    world = World()
    world.exports.suspend()
    world.exports.handle(received(1, b"1"))
    world.exports.handle(received(0, b"zero"))
    world.exports.handle(received(2, b"2"))
    # The connection is made again: the broker repeats what has a packet id.
    world.exports.handle(received(1, b"1", 2, True))
    world.exports.handle(received(2, b"2", 2, True))
    assert not world.given
    world.exports.resume()
    assert world.payloads() == [b"zero", b"1", b"2"]
    for done in world.dones:
        done()
    assert world.acknowledged == [1, 2]
    world.exports.resume()
    assert len(world.given) == 3


def test_a_broker_that_is_cut_again_and_again() -> None:
    """Every message is given once and in order, however connections break and dones come."""
    choose = random.Random(11)
    for _ in range(200):
        world = World()
        sent = unacknowledged = 0
        connection = 1
        waiting: dict[int, bytes] = {}
        pending: list[Callable[[], None]] = []
        seen = 0
        for _ in range(60):
            what = choose.random()
            if what < 0.5:
                sent += 1
                waiting[sent] = b"%d" % (sent // 2)
                world.exports.handle(received(sent, waiting[sent], connection))
            elif what < 0.8 and pending:
                pending.pop(choose.randrange(len(pending)))()
            else:
                world.is_connected = False
                for _ in range(choose.randint(0, len(pending))):
                    pending.pop(choose.randrange(len(pending)))()
                world.is_connected = True
                connection += 1
                for packet_id, payload in list(waiting.items()):
                    world.exports.handle(received(packet_id, payload, connection, True))
            pending += world.dones[seen:]
            seen = len(world.dones)
            for packet_id in world.acknowledged[unacknowledged:]:
                del waiting[packet_id]
            unacknowledged = len(world.acknowledged)
        assert world.payloads() == [b"%d" % (number // 2) for number in range(1, sent + 1)]
        assert world.acknowledged == sorted(world.acknowledged)


def test_the_mark_and_the_sequence() -> None:
    id = MessageId(b"N" * 16, 3, 42)
    sent = Received("t", b"x", 1, False, False, 1, {
        pr.USER_PROPERTY: [("hf-seq", "pump:1:7"), ("a", "b")], pr.MESSAGE_EXPIRY_INTERVAL: 9,
        pr.TOPIC_ALIAS: 3, pr.SUBSCRIPTION_IDENTIFIER: [4],
    })  # fmt: skip
    message = outbound(sent)
    assert message.expiry_s == 9.0
    assert message.delivered_id is None
    plain = inbound(id, message, "", 5)
    assert plain[pr.USER_PROPERTY] == [
        ("hf-seq", "pump:1:7"), ("a", "b"), (MARK, f"{id.node.hex()}:3:42"),
    ]  # fmt: skip
    numbered = inbound(id, message, "fed-x", 5)
    assert numbered[pr.USER_PROPERTY] == [
        ("hf-seq-origin", "pump:1:7"), ("a", "b"), ("hf-seq", "fed-x:3:5"),
        (MARK, f"{id.node.hex()}:3:42"),
    ]  # fmt: skip
    assert set(numbered) == {pr.USER_PROPERTY}
    unplaced = inbound(id, message, "fed-x", 0)
    assert unplaced[pr.USER_PROPERTY] == [
        ("hf-seq-origin", "pump:1:7"), ("a", "b"), (MARK, f"{id.node.hex()}:3:42"),
    ]  # fmt: skip
    sent.properties = numbered
    assert mark_of(sent) == id
    for wrong in ("", "x", "00:1:1", "zz:1:1", f"{'00' * 16}:a:1"):
        sent.properties = {pr.USER_PROPERTY: [(MARK, wrong)]}
        assert mark_of(sent) is None
    with pytest.raises(ProtocolViolation):
        inbound(id, Message("t", b"", 1, properties=b"\x26\xff\xff"), "", 1)
