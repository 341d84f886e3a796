"""Publishers and durable subscribers under load while connections and brokers die, in one thread.

Every client keeps its own session state as the specification demands of a client: packet ids in
flight survive a connection, PUBLISH is sent again with DUP and PUBREL again, in the original
order; an inbound QoS 2 id is held until PUBREL. What each of them saw goes to a `Ledger`.
"""

import random
import selectors
import socket
import time
from collections.abc import Callable
from typing import Final

from tests.e2e import wire
from tests.e2e.ledger import Interest, Key, Ledger

RECONNECT_S: Final = 0.05
EXPIRY_S: Final = 3600


class Party:
    """One client with a durable session; reconnects by itself until told to stay away."""

    def __init__(self, name: str, port: int, version: int, ledger: Ledger) -> None:
        self.name = name
        self.port = port
        self.version = version
        self.ledger = ledger
        self.socket: socket.socket | None = None
        self.ready = False
        self.away = False
        self.connections = 0
        self.retry_at = 0.0
        self._durable = False
        self._frames = wire.Frames()
        self._out = bytearray()

    def on_ready(self) -> None:
        """The broker has accepted the connection."""
        raise NotImplementedError

    def on_frame(self, frame: wire.Frame) -> None:
        raise NotImplementedError

    def open(self) -> bool:
        """Connect, send CONNECT. False when nothing listens."""
        try:
            self.socket = socket.create_connection(("127.0.0.1", self.port), timeout=2)
        except OSError:
            return False
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._frames = wire.Frames()
        props = [(wire.SESSION_EXPIRY, EXPIRY_S)] if self.version == 5 else []
        clean = self.version == 5 and not self._durable and self.connections == 0
        self._out = bytearray(wire.connect(self.name, self.version, clean, 60, None, props))
        return True

    def lost(self) -> None:
        assert self.socket is not None
        self.socket.close()
        self.socket = None
        self.ready = False

    def cut(self) -> None:
        """Lose the connection as a network would: with a reset, whatever was under way."""
        if self.socket is not None:
            linger = (1).to_bytes(4, "little") + bytes(4)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.lost()

    def send(self, data: bytes) -> None:
        self._out += data

    def flush(self) -> None:
        """Raises OSError when the connection is gone."""
        if self._out and self.socket is not None:
            try:
                del self._out[: self.socket.send(self._out)]
            except BlockingIOError:
                pass

    @property
    def has_output(self) -> bool:
        return bool(self._out)

    def read(self) -> None:
        """Take in what has arrived. Raises OSError when the connection is gone."""
        assert self.socket is not None
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError
        for frame in self._frames.feed(data):
            if frame.kind == wire.CONNACK:
                self._on_connack(wire.read_connack(frame, self.version))
            elif frame.kind == wire.DISCONNECT:
                self.ledger.accuse("disconnected", self.name, f"with reason {frame.reason:#x}")
            else:
                self.on_frame(frame)

    def _on_connack(self, connack: wire.Connack) -> None:
        if connack.reason:
            self.ledger.accuse("refused", self.name, f"CONNACK {connack.reason:#x}")
            return
        if self._durable and not connack.session_present:
            self.ledger.accuse("session lost", self.name, f"at connection {self.connections + 1}")
        self._durable = True
        self.connections += 1
        self.ready = True
        self.on_ready()


class Publisher(Party):
    """Keeps `window` messages in flight, round robin over its topics, while `producing`."""

    def __init__(
        self,
        name: str,
        port: int,
        version: int,
        ledger: Ledger,
        topics: list[str],
        qos: int,
        window: int = 20,
        payload_bytes: int = 64,
    ) -> None:
        super().__init__(name, port, version, ledger)
        self.topics = topics
        self.qos = qos
        self.window = window
        self.payload_bytes = payload_bytes
        self.producing = False
        self.inflight: dict[int, Key] = {}
        """Packet id -> message, in sending order."""
        self.releasing: set[int] = set()
        """Packet ids for which PUBREC has come: PUBREL is to be acknowledged."""
        self._sequence = 0
        self._packet_id = 0

    def _packet(self, packet_id: int, dup: bool) -> bytes:
        publisher, topic, sequence = self.inflight[packet_id]
        payload = f"{publisher} {sequence} ".encode().ljust(self.payload_bytes, b".")
        return wire.publish(topic, payload, self.qos, packet_id, self.version, dup=dup)

    def on_ready(self) -> None:
        for packet_id in self.inflight:
            if packet_id in self.releasing:
                self.send(wire.ack(wire.PUBREL, packet_id))
            else:
                self.send(self._packet(packet_id, dup=True))
        self.fill()

    def fill(self) -> None:
        while self.producing and self.ready and len(self.inflight) < self.window:
            while True:
                self._packet_id = self._packet_id % 65535 + 1
                if self._packet_id not in self.inflight:
                    break
            topic = self.topics[self._sequence % len(self.topics)]
            key = (self.name, topic, self._sequence // len(self.topics))
            self._sequence += 1
            self.inflight[self._packet_id] = key
            self.ledger.send(key, self.qos)
            self.send(self._packet(self._packet_id, dup=False))

    def on_frame(self, frame: wire.Frame) -> None:
        packet_id = frame.packet_id
        key = self.inflight.get(packet_id)
        if key is None:
            self.ledger.accuse("stray answer", self.name, f"kind {frame.kind}, id {packet_id}")
        elif frame.kind in (wire.PUBACK, wire.PUBREC) and frame.reason >= 0x80:
            self.ledger.refuse(key)
            del self.inflight[packet_id]
        elif frame.kind == wire.PUBREC:
            self.ledger.acknowledge(key)
            self.releasing.add(packet_id)
            self.send(wire.ack(wire.PUBREL, packet_id))
        elif frame.kind in (wire.PUBACK, wire.PUBCOMP):
            self.ledger.acknowledge(key)
            self.releasing.discard(packet_id)
            del self.inflight[packet_id]
        self.fill()


class Subscriber(Party):
    def __init__(
        self, name: str, port: int, version: int, ledger: Ledger, interests: list[Interest]
    ) -> None:
        super().__init__(name, port, version, ledger)
        self.interests = interests
        self.subscribed = False
        self._held: dict[int, Key] = {}
        """QoS 2 messages delivered to the application whose PUBREL has not come."""

    def on_ready(self) -> None:
        if not self.subscribed:
            filters = [(one.filter, one.qos) for one in self.interests]
            self.send(wire.subscribe(1, filters, self.version))

    def on_frame(self, frame: wire.Frame) -> None:
        if frame.kind == wire.PUBLISH:
            self._on_publish(wire.read_publish(frame, self.version))
        elif frame.kind == wire.PUBREL:
            self._held.pop(frame.packet_id, None)
            self.send(wire.ack(wire.PUBCOMP, frame.packet_id))
        elif frame.kind == wire.SUBACK:
            self.subscribed = True
            self.ledger.subscribe(self.name, self.interests)

    def _on_publish(self, message: wire.Message) -> None:
        publisher, sequence, _ = message.payload.split(b" ", 2)
        key = (publisher.decode(), message.topic, int(sequence))
        if message.qos == 2:
            held = self._held.get(message.packet_id)
            if held is None:
                self._held[message.packet_id] = key
                self.ledger.deliver(self.name, key)
            elif held != key:
                text = f"id {message.packet_id} holds {held}, came with {key}"
                self.ledger.accuse("packet id reused", self.name, text)
            self.send(wire.ack(wire.PUBREC, message.packet_id))
        else:
            self.ledger.deliver(self.name, key)
            if message.qos == 1:
                self.send(wire.ack(wire.PUBACK, message.packet_id))


class Crowd:
    """The parties and the loop that serves them."""

    def __init__(self, parties: list[Party]) -> None:
        self.parties = parties
        self._selector = selectors.DefaultSelector()

    @property
    def publishers(self) -> list[Publisher]:
        return [party for party in self.parties if isinstance(party, Publisher)]

    @property
    def subscribers(self) -> list[Subscriber]:
        return [party for party in self.parties if isinstance(party, Subscriber)]

    def pump(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Serve everybody for that long or until the condition holds. Returns the condition."""
        end = time.monotonic() + seconds
        while not until():
            now = time.monotonic()
            if now >= end:
                return until()
            self._reconnect(now)
            self._serve()
        return True

    def close(self) -> None:
        for party in self.parties:
            if party.socket is not None:
                self._drop(party)
        self._selector.close()

    def cut(self, party: Party) -> None:
        if party.socket is not None:
            self._selector.unregister(party.socket)
            party.cut()

    def _drop(self, party: Party) -> None:
        assert party.socket is not None
        self._selector.unregister(party.socket)
        party.lost()

    def _reconnect(self, now: float) -> None:
        for party in self.parties:
            if party.socket is None and not party.away and now >= party.retry_at:
                party.retry_at = now + RECONNECT_S
                if party.open():
                    assert party.socket is not None
                    self._selector.register(party.socket, selectors.EVENT_READ, party)

    def _serve(self) -> None:
        for entry, _ in self._selector.select(0.005):
            party: Party = entry.data
            try:
                party.read()
            except OSError:
                self._drop(party)
        for party in self.parties:
            if party.has_output and party.socket is not None:
                try:
                    party.flush()
                except OSError:
                    self._drop(party)


def crowd(port: int, ledger: Ledger) -> Crowd:
    """Four publishers (QoS 1 and 2; three share a topic) and five subscribers, of MQTT 3.1.1 and
    of MQTT 5.0."""

    def subscriber(name: str, version: int, *filters: tuple[str, int]) -> Subscriber:
        interests = [Interest(filter_, qos) for filter_, qos in filters]
        return Subscriber(name, port, version, ledger, interests)

    return Crowd(
        [
            Publisher("p1", port, 4, ledger, ["load/one/a", "load/one/b", "shared/1"], 1),
            Publisher("p2", port, 5, ledger, ["load/two/a", "load/two/b"], 2),
            Publisher("p3", port, 5, ledger, ["load/three/a", "shared/1"], 1),
            Publisher("p4", port, 4, ledger, ["load/four/a", "shared/1"], 2),
            subscriber("exact-1", 5, ("load/one/a", 1), ("shared/1", 1)),
            subscriber("exact-2", 4, ("load/two/a", 2)),
            subscriber("plus-2", 5, ("load/+/a", 2), ("shared/+", 2)),
            subscriber("all-1", 4, ("load/#", 1), ("shared/#", 1)),
            subscriber("all-2", 5, ("#", 2)),
        ]
    )


def shake(
    group: Crowd,
    rounds: int,
    rng: random.Random,
    hurt: Callable[[], None],
    round_s: tuple[float, float] = (0.3, 0.9),
    drain_s: float = 60.0,
) -> None:
    """`rounds` times: load, somebody loses the connection, one subscriber stays away, then
    `hurt()`. Afterwards no more messages are produced and everything is delivered, or `drain_s`
    passes: what is missing then is for the ledger to say.
    """
    assert group.pump(10, lambda: all(one.subscribed for one in group.subscribers)), "no SUBACK"
    for publisher in group.publishers:
        publisher.producing = True
        publisher.fill()
    for _ in range(rounds):
        absent = rng.choice(group.subscribers)
        group.pump(rng.uniform(*round_s) / 2)
        absent.away = True
        group.cut(absent)
        group.cut(rng.choice(group.parties))
        group.pump(rng.uniform(*round_s) / 2)
        hurt()
        absent.away = False
    drain(group, drain_s)


def drain(group: Crowd, seconds: float) -> None:
    for publisher in group.publishers:
        publisher.producing = False
    ledger = group.parties[0].ledger
    group.pump(seconds, lambda: not any(one.inflight for one in group.publishers))
    end = time.monotonic() + seconds
    # `missing` walks the whole history: ask it now and then only.
    while next(ledger.missing(), None) is not None and time.monotonic() < end:
        group.pump(0.2)
    # What was sent twice is on its way behind what was missing.
    group.pump(0.3)
