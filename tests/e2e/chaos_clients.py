"""Publishers and subscribers of the chaos tests.

Each keeps its own session state as the specification demands of a client: packet ids in flight
survive a connection, PUBLISH is sent again with DUP and PUBREL again, in the original order; an
inbound QoS 2 id is held until PUBREL.
"""

import time
from collections.abc import Sequence

from tests.e2e import wire
from tests.e2e.chaos_parties import Party, Server, key_of
from tests.e2e.ledger import Interest, Key, Ledger


class Publisher(Party):
    """Keeps up to `window` messages in flight, round robin over its topics, while `producing`; one
    every `interval_s` (0: as fast as they are acknowledged)."""

    def __init__(
        self,
        name: str,
        servers: Sequence[Server],
        version: int,
        ledger: Ledger,
        topics: list[str],
        qos: int,
        *,
        window: int = 20,
        payload_bytes: int = 64,
        interval_s: float = 0.0,
        retain: bool = False,
        patience_s: float | None = None,
        tolerated: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(name, servers, version, ledger, patience_s=patience_s, tolerated=tolerated)
        self.topics = topics
        self.qos = qos
        self.window = window
        self.payload_bytes = payload_bytes
        self.interval_s = interval_s
        self.retain = retain
        self.producing = False
        self.answers: list[tuple[float, str]] = []
        """When a message was acknowledged for the first time, and its topic."""
        self.inflight: dict[int, Key] = {}
        """Packet id -> message, in sending order."""
        self.releasing: set[int] = set()
        """Packet ids for which PUBREC has come: PUBREL is to be acknowledged."""
        self._sequence = 0
        self._packet_id = 0
        self._due = 0.0

    def _send(self, packet_id: int, dup: bool) -> None:
        key = self.inflight[packet_id]
        publisher, topic, sequence = key
        payload = f"{publisher} {sequence} ".encode().ljust(self.payload_bytes, b".")
        self.ledger.send(key, self.qos, time.monotonic(), retain=self.retain)
        self.send(wire.publish(topic, payload, self.qos, packet_id, self.version, self.retain, dup))

    def on_ready(self) -> None:
        for packet_id in self.inflight:
            if packet_id in self.releasing:
                self.send(wire.ack(wire.PUBREL, packet_id))
            else:
                self._send(packet_id, dup=True)
        self.fill()

    def on_tick(self, now: float) -> None:
        if self.interval_s:
            self.fill()

    def fill(self) -> None:
        while self.producing and self.ready and len(self.inflight) < self.window:
            if self.interval_s:
                now = time.monotonic()
                if now < self._due:
                    return
                # What an outage held back does not follow in a burst.
                self._due = max(self._due + self.interval_s, now)
            while True:
                self._packet_id = self._packet_id % 65535 + 1
                if self._packet_id not in self.inflight:
                    break
            topic = self.topics[self._sequence % len(self.topics)]
            self.inflight[self._packet_id] = (
                self.name,
                topic,
                self._sequence // len(self.topics),
            )
            self._sequence += 1
            self._send(self._packet_id, dup=False)

    def on_frame(self, frame: wire.Frame) -> None:
        packet_id = frame.packet_id
        key = self.inflight.get(packet_id)
        if key is None:
            self.ledger.accuse("stray answer", self.name, f"kind {frame.kind}, id {packet_id}")
        elif frame.kind in (wire.PUBACK, wire.PUBREC) and frame.reason >= 0x80:
            self.refusals[frame.reason] += 1
            self.ledger.refuse(key)
            del self.inflight[packet_id]
        elif frame.kind == wire.PUBREC:
            self._acknowledged(key)
            self.releasing.add(packet_id)
            self.send(wire.ack(wire.PUBREL, packet_id))
        elif frame.kind in (wire.PUBACK, wire.PUBCOMP):
            self._acknowledged(key)
            self.releasing.discard(packet_id)
            del self.inflight[packet_id]
        self.fill()

    def _acknowledged(self, key: Key) -> None:
        if key not in self.ledger.acknowledged:
            self.answers.append((self._heard_at, key[1]))
            self.ledger.acknowledge(key, self._heard_at)


class Subscriber(Party):
    """`group`: its filters are those of a shared subscription of that name."""

    def __init__(
        self,
        name: str,
        servers: Sequence[Server],
        version: int,
        ledger: Ledger,
        interests: list[Interest],
        *,
        group: str = "",
        patience_s: float | None = None,
        tolerated: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(name, servers, version, ledger, patience_s=patience_s, tolerated=tolerated)
        self.interests = interests
        self.group = group
        self.subscribed = False
        self._held: dict[int, Key] = {}
        """QoS 2 messages delivered to the application whose PUBREL has not come."""
        ledger.subscribe(name, interests, group)

    def on_ready(self) -> None:
        if not self.subscribed:
            share = f"$share/{self.group}/" if self.group else ""
            filters = [(share + one.filter, one.qos) for one in self.interests]
            self.send(wire.subscribe(1, filters, self.version))

    def on_frame(self, frame: wire.Frame) -> None:
        if frame.kind == wire.PUBLISH:
            self._on_publish(wire.read_publish(frame, self.version))
        elif frame.kind == wire.PUBREL:
            self._held.pop(frame.packet_id, None)
            self.send(wire.ack(wire.PUBCOMP, frame.packet_id))
        elif frame.kind == wire.SUBACK:
            reason = max(frame.body[-len(self.interests) :])
            if reason >= 0x80:
                self.refused("subscription refused", reason)
            self.subscribed = True
            self.ledger.subscribed(self.name, self._heard_at)

    def _on_publish(self, message: wire.Message) -> None:
        key = key_of(message)
        if message.qos == 2:
            held = self._held.get(message.packet_id)
            if held is None:
                self._held[message.packet_id] = key
                self._deliver(key, message.dup)
            elif held != key:
                text = f"id {message.packet_id} holds {held}, came with {key}"
                self.ledger.accuse("packet id reused", self.name, text)
            self.send(wire.ack(wire.PUBREC, message.packet_id))
        else:
            self._deliver(key, message.dup)
            if message.qos == 1:
                self.send(wire.ack(wire.PUBACK, message.packet_id))

    def _deliver(self, key: Key, dup: bool) -> None:
        self.ledger.deliver(self.name, key, self._heard_at, self.connections, dup)
