"""MQTT over TCP and over WebSocket: damaged packets, and good ones in a bad order."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.data.packets import CASES
from tests.e2e import websocket_wire, wire
from tests.e2e.brokers import Broker
from tests.e2e.websocket_wire import WebSocketHoldfast
from tests.fuzz.doors import exchange
from tests.fuzz.mutation import damage, noise

PACKETS: Final = [case.data for case in CASES if case.from_client]
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "log": {"partitions": 4, "segment_bytes": 1 << 20},
    "log.retention": {"bytes": 8 << 20},
    "limits": {"connect_timeout_s": 2.0},
    "sys": {"interval_s": 1},
}
TOPICS: Final = (
    "a",
    "a/b",
    "x",
    "$SYS/x",
    "$share/g/a",
    "é/☃",
    "",
    "a" * 300,
    "$delayed/1/a",
    "$delayed/2/a/b",
    "$delayed/x/a",
    "$delayed/1/$SYS/x",
    "$delayed/",
)
FILTERS: Final = (
    "#",
    "a/#",
    "+/b",
    "a",
    "$share/g/#",
    "$share/g/a",
    "$share//a",
    "a#",
    "",
    "$SYS/#",
    "$queue/a/#",
    "$stream/@earliest/$queue/a",
    "$stream/@last:2/a/#",
    "$stream/@-1x/$queue/",
    "$queue/",
    "$delayed/#",
)


def session(rng: random.Random) -> list[bytes]:
    """Well-formed packets of one connection, in any order, with ids that are used again, and with
    sessions that others have left behind."""
    version = rng.choice((4, 5, 5))
    expiry = [(wire.SESSION_EXPIRY, rng.choice((0, 1, 3600)))] if version == 5 else []
    client_id = rng.choice(
        ("", "one", "two", "three", "$share/g/a", "$share/$queue/a", "x" * rng.choice((10, 5000)))
    )
    will = None
    if rng.random() < 0.3:
        will = wire.Will(rng.choice(TOPICS), b"will", rng.randrange(3), rng.random() < 0.5)
    pieces = [wire.connect(client_id, version, rng.random() < 0.5, 0, will, expiry)]
    for _ in range(rng.choice((1, 3, 10, 40))):
        pieces.append(_packet(rng, version))
    if rng.random() < 0.1:
        rng.shuffle(pieces)
    return pieces


def _packet(rng: random.Random, version: int) -> bytes:
    packet_id = rng.choice((1, 1, 2, 3, 65535))
    kind = rng.randrange(10)
    if kind < 3:
        payload = rng.choice((b"", b"x", bytes(rng.choice((100, 70_000)))))
        qos = rng.randrange(3)
        retain, dup = rng.random() < 0.3, rng.random() < 0.2
        return wire.publish(rng.choice(TOPICS), payload, qos, packet_id, version, retain, dup)
    if kind == 3:
        filters = [(rng.choice(FILTERS), rng.randrange(3)) for _ in range(rng.choice((1, 2, 30)))]
        return wire.subscribe(packet_id, filters, version)
    if kind == 4:
        return wire.unsubscribe(packet_id, [rng.choice(FILTERS) for _ in range(2)], version)
    if kind < 9:
        return wire.ack(
            rng.choice((wire.PUBACK, wire.PUBREC, wire.PUBREL, wire.PUBCOMP)), packet_id
        )
    return rng.choice((wire.packet(wire.PINGREQ << 4), wire.disconnect(0, (), version)))


def stream(rng: random.Random) -> list[bytes]:
    """The bytes of one connection, in the pieces in which they are written."""
    kind = rng.random()
    if kind < 0.45:
        pieces = session(rng)
    elif kind < 0.6:
        pieces = [damage(rng, piece, PACKETS) for piece in session(rng)]
    elif kind < 0.95:
        pieces = [wire.connect("damaged", rng.choice((4, 5)))] if rng.random() < 0.7 else []
        pieces += [damage(rng, rng.choice(PACKETS), PACKETS) for _ in range(rng.choice((1, 2, 8)))]
    else:
        pieces = [noise(rng)]
    whole = b"".join(pieces)
    if rng.random() < 0.3 and whole:
        cut = rng.randrange(len(whole))
        return [whole[:cut], whole[cut:]]
    return [whole]


class MqttDoor:
    name = "mqtt"
    expected: Sequence[str] = ()

    def __init__(self) -> None:
        self.processes: list[Broker] = []
        self.canary_port = 0

    def start(self, directory: Path) -> None:
        self.broker = WebSocketHoldfast(directory, SETTINGS)
        self.processes = [self.broker]
        self.broker.start()
        self.canary_port = self.broker.port

    def case(self, rng: random.Random) -> str:
        return "answered" if exchange(self.broker.port, stream(rng)) else "closed"

    def end(self) -> None:
        self.broker.kill()


class WebSocketDoor(MqttDoor):
    name = "websocket"

    def case(self, rng: random.Random) -> str:
        upgrade = websocket_wire.request()
        if rng.random() < 0.3:
            upgrade = damage(rng, upgrade, [upgrade, b"\r\n", b"Host: a\r\n"])
        pieces = [upgrade]
        for piece in stream(rng):
            opcode = websocket_wire.BINARY
            if rng.random() < 0.1:
                opcode = rng.randrange(16)
            fin, masked = rng.random() < 0.9, rng.random() < 0.97
            framed = websocket_wire.frame(opcode, piece, fin, masked, rng.choice((0, 0, 0, 0, 1)))
            if rng.random() < 0.2:
                framed = damage(rng, framed, PACKETS)
            pieces.append(framed)
        if rng.random() < 0.5:
            pieces.append(websocket_wire.frame(websocket_wire.CLOSE, b"\x03\xe8"))
        answer = exchange(self.broker.websocket_port, pieces)
        return "upgraded" if answer.startswith(b"HTTP/1.1 101") else "refused"
