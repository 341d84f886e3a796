"""An MQTT client, 3.1.1 or 5, that does what a client must: it keeps what is not acknowledged and
sends it again, tells QoS 2 repetitions apart, and never lets go of a packet id too early.

What it publishes and when it connects is for `workload`.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import encode, encode_ack
from holdfast.protocol.mqtt.framing import FrameReader
from holdfast.protocol.mqtt.packets import (
    Ack,
    Connack,
    Connect,
    Disconnect,
    Publish,
    Suback,
    Subscribe,
)
from tests.sim.checks import Message
from tests.sim.sockets import ClientSocket

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.world import World

FOREVER: Final = 0xFFFFFFFF
PATIENCE_S: Final = 4.0
"""A client that waits for something longer connects anew."""

FOUND_OUT_S: Final = 4.0
"""After so long, at most, a node sees that a client has gone elsewhere."""

FAILURE: Final = 0x80
"""The only refusal of a subscription in MQTT 3.1.1."""
ANSWERED_S: Final = 5.0
"""A refusal arrives at most so long after the disk has space again."""

SENT: Final = 0
RELEASED: Final = 1


class Outgoing:
    def __init__(self, message: Message, retain: bool, properties: bytes) -> None:
        self.message = message
        self.retain = retain
        self.properties = properties
        self.state = SENT
        self.since = 0.0


class Abandoned:
    """A connection in whose place the client has opened another."""

    def __init__(self, reader: FrameReader) -> None:
        self.reader = reader
        # When the next one was accepted.
        self.superseded_at = float("inf")


class Client:
    def __init__(
        self,
        world: "World",
        name: str,
        version: int,
        *,
        clean: bool = False,
        filters: tuple[tuple[str, int], ...] = (),
        expiry_s: int | None = None,
    ) -> None:
        """`clean`: each connection begins a session. `expiry_s`: of its session, with version 5.
        None: it ends with its connection if `clean`, otherwise never."""
        self.world = world
        self.schedule = world.schedule
        self.name = name
        self.version = version
        self.clean = clean
        self.filters = filters
        if expiry_s is None:
            expiry_s = 0 if clean else FOREVER
        self.expiry_s = expiry_s
        self.chance: random.Random = world.schedule.chance(f"client/{name}")
        self.socket: ClientSocket | None = None
        self.is_connected = False
        self.is_subscribed = not filters
        # A session of it is with the cluster.
        self.has_session = False
        self.connects = 0
        self.subscribes = 0
        self.left_at = float("-inf")
        """When its last connection that was accepted ended; infinite while there is one."""
        self.will: m.Will | None = None
        self.on_message: Callable[[Publish], None] | None = None
        self.on_connected: Callable[[], None] | None = None
        self.on_subscribed: Callable[[], None] | None = None
        self.on_done: Callable[[Outgoing, int], None] | None = None
        # A QoS 2 message was refused, and its packet id is free again.
        self.on_refused: Callable[[Outgoing, int], None] | None = None
        self.outgoing: dict[int, Outgoing] = {}
        self._incoming: set[int] = set()
        self._next_id = 0
        # Some take the lowest one that is free, at once.
        self.reuses_ids = self.chance.random() < 0.6
        self._connecting_since = 0.0
        # How often its session had ended when it connected last.
        self._ends = 0
        self._reader = FrameReader(1 << 20)
        self._abandoned: dict[ClientSocket, Abandoned] = {}

    # Connections

    def connect(self, host: "Host") -> None:
        """Drops an older connection without closing it: the node finds out."""
        old = self.socket
        if old is not None:
            old.abandon(self.chance.random() * FOUND_OUT_S)
            self._abandoned[old] = Abandoned(self._reader)
        self._end_connection()
        self.socket = ClientSocket(self, host)
        self._reader = FrameReader(1 << 20)
        self._connecting_since = self.schedule.now
        self.connects += 1
        properties: m.Properties = {}
        if self.version >= 5 and self.expiry_s:
            properties[p.SESSION_EXPIRY_INTERVAL] = self.expiry_s
        self.schedule.note(self.name, f"connects to {host.name}")
        clean_start = self.clean
        self._write(
            encode(
                Connect(self.version, clean_start, 0, self.name, self.will, None, None, properties),
                self.version,
            )
        )

    def drop(self) -> None:
        """Without a word."""
        socket = self.socket
        if socket is None:
            return
        self.schedule.note(self.name, "drops its connection")
        if self.chance.random() < 0.5:
            socket.vanish()
        else:
            socket.close()
        self._lost()

    def disconnect(self, reason: int = 0) -> None:
        socket = self.socket
        if socket is None:
            return
        self.schedule.note(self.name, f"disconnects, 0x{reason:02x}")
        self._write(encode(Disconnect(reason), self.version))
        socket.close()
        self._lost()

    def closed(self, socket: ClientSocket) -> None:
        if socket is self.socket:
            self.schedule.note(self.name, "is disconnected")
            self._lost()

    def refused(self, packet_id: int) -> None:
        """A refusal that is not heard is a message that comes later than others."""
        outgoing = self.outgoing.get(packet_id)
        if outgoing is not None:
            outgoing.message.is_ordered = False

    def _lost(self) -> None:
        self.socket = None
        self._end_connection()

    def _end_connection(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self.left_at = self.schedule.now

    def is_stuck(self) -> bool:
        """Has it waited too long for an answer?"""
        if self.socket is None:
            return False
        limit = self.schedule.now - PATIENCE_S
        if not self.is_connected:
            return self._connecting_since < limit
        return any(each.since < limit for each in self.outgoing.values())

    def _write(self, data: bytes) -> None:
        if self.socket is not None:
            self.socket.write(data)

    # Publishing

    def publish_as(self, packet_id: int, message: Message) -> None:
        """With a packet id that is free."""
        outgoing = Outgoing(message, False, b"")
        self.outgoing[packet_id] = outgoing
        self._send(packet_id, outgoing, False)

    def publish(self, message: Message, retain: bool = False, properties: bytes = b"") -> None:
        if self.reuses_ids:
            self._next_id = 0
        self._next_id = self._next_id % 50 + 1
        while self._next_id in self.outgoing:
            self._next_id = self._next_id % 50 + 1
        outgoing = Outgoing(message, retain, properties)
        self.outgoing[self._next_id] = outgoing
        self._send(self._next_id, outgoing, False)

    def send(self, message: Message) -> None:
        """With QoS 0."""
        packet = Publish(
            message.topic.encode(), message.text.encode(), 0, False, False, 0, b"", 0, -1
        )
        self._write(encode(packet, self.version))

    def _send(self, packet_id: int, outgoing: Outgoing, dup: bool) -> None:
        message = outgoing.message
        outgoing.since = self.schedule.now
        if outgoing.state == RELEASED:
            self._write(encode_ack(m.PUBREL, packet_id, 0, self.version))
            return
        if not message.times_sent:
            message.sent_at = outgoing.since
        message.times_sent += 1
        delayed = f"$delayed/{message.delay_s}/" if message.delay_s else ""
        packet = Publish(
            (delayed + message.topic).encode(),
            message.text.encode(),
            message.qos,
            outgoing.retain,
            dup,
            packet_id,
            outgoing.properties,
            0,
            -1,
        )
        self._write(encode(packet, self.version))

    # What arrives

    def received(self, socket: ClientSocket, data: bytes) -> None:
        if socket is not self.socket:
            self._overhear(socket, data)
            return
        reader = self._reader
        reader.feed(data)
        while self.socket is socket and reader.next():
            packet = decode(
                reader.buffer, reader.first, reader.start, reader.end, self.version, False
            )
            self._handle(packet)

    def _overhear(self, socket: ClientSocket, data: bytes) -> None:
        """A node that hands out messages has the session."""
        abandoned = self._abandoned.get(socket)
        if abandoned is None:
            return
        reader = abandoned.reader
        reader.feed(data)
        while reader.next():
            packet = decode(
                reader.buffer, reader.first, reader.start, reader.end, self.version, False
            )
            if isinstance(packet, Connack):
                # Overtaken on its way: it takes the session from the later one.
                self._abandoned.pop(socket, None)
                return
            if isinstance(packet, Publish) and packet.qos and not self.clean:
                self.world.checks.overheard(
                    self.name, socket.host.name, packet.payload.decode(), abandoned.superseded_at
                )

    def _handle(self, packet: m.Packet) -> None:
        if isinstance(packet, Connack):
            self._connacked(packet)
        elif isinstance(packet, Publish):
            self._arrived(packet)
        elif isinstance(packet, Ack):
            self._acknowledged(packet)
        elif isinstance(packet, Suback):
            if any(reason >= 0x80 for reason in packet.reasons):
                self._refused(packet)
                return
            self.is_subscribed = True
            if self.on_subscribed is not None:
                self.on_subscribed()
        elif isinstance(packet, Disconnect):
            self.schedule.note(self.name, f"is told DISCONNECT 0x{packet.reason:02x}")

    def _refused(self, suback: Suback) -> None:
        """Tries again later. Only a full disk permits it: that of the leader of the session."""
        expected = reasons.QUOTA_EXCEEDED if self.version == 5 else FAILURE
        was_full_until = max(host.was_full_until for host in self.world.hosts.values())
        if self.schedule.now > was_full_until + ANSWERED_S or set(suback.reasons) != {expected}:
            self.world.checks.fail(f"{self.name}: SUBACK {suback.reasons}")
        self.schedule.note(self.name, "is refused its subscription")
        self.drop()

    def _connacked(self, packet: Connack) -> None:
        socket = self.socket
        assert socket is not None
        if packet.reason:
            self.schedule.note(self.name, f"CONNACK 0x{packet.reason:02x}")
            self.drop()
            return
        self.is_connected = True
        self.left_at = float("inf")
        for abandoned in self._abandoned.values():
            abandoned.superseded_at = min(abandoned.superseded_at, self.schedule.now)
        self.schedule.note(self.name, f"CONNACK present={packet.session_present}")
        if self.clean:
            if packet.session_present:
                self.world.checks.fail(f"{self.name}: a clean start found a session")
            self.outgoing.clear()
        elif self.has_session and not packet.session_present:
            self._miss_session(socket.host.name)
        if packet.session_present and self.connects == 1:
            self.world.checks.fail(f"{self.name}: a session from nowhere")
        if not packet.session_present:
            self._forget_session()
        elif self.world.checks.sessions.ends.get(self.name, 0) > self._ends:
            # It expired, and this one is of a CONNECT whose answer was lost: see `Checks.opened`.
            self._forget_session()
        self.has_session = not self.clean
        self._ends = self.world.checks.sessions.ends.get(self.name, 0)
        if socket.process is socket.host.process:
            self.world.checks.opened(self.name, socket.process, packet.session_present)
        if not self.is_subscribed:
            self._subscribe()
        for packet_id, outgoing in list(self.outgoing.items()):
            self._send(packet_id, outgoing, True)
        if self.on_connected is not None:
            self.on_connected()

    def _miss_session(self, node: str) -> None:
        """It may have expired, and the log knows then."""
        if self.world.checks.sessions.ends.get(self.name, 0) == self._ends:
            self.world.checks.fail(f"{self.name}: {node} has lost its session")

    def _forget_session(self) -> None:
        self._incoming.clear()
        self.is_subscribed = not self.filters

    def unsubscribe(self) -> None:
        """From everything. It subscribes again when it is connected again, or by `resubscribe`."""
        self.is_subscribed = False
        self._write(encode(m.Unsubscribe(60_001, [each for each, _ in self.filters]), self.version))

    def resubscribe(self) -> None:
        if not self.is_subscribed:
            self._subscribe()

    def _subscribe(self) -> None:
        self.subscribes += 1
        requests = [m.SubscriptionRequest(filter, qos) for filter, qos in self.filters]
        self._write(encode(Subscribe(60_000, requests), self.version))

    def _arrived(self, packet: Publish) -> None:
        if packet.qos == 2:
            if packet.packet_id not in self._incoming:
                self._incoming.add(packet.packet_id)
                self._deliver(packet)
            self._reply(m.PUBREC, packet.packet_id)
            return
        self._deliver(packet)
        if packet.qos == 1:
            self._reply(m.PUBACK, packet.packet_id)

    def _deliver(self, packet: Publish) -> None:
        if self.on_message is not None:
            self.on_message(packet)

    def _reply(self, kind: int, packet_id: int) -> None:
        """In order, at once or soon."""
        data = encode_ack(kind, packet_id, 0, self.version)
        socket = self.socket
        if self.chance.random() < 0.7:
            self._write(data)
            return

        def late() -> None:
            if self.socket is socket:
                self._write(data)

        self.schedule.after(self.chance.random() * 0.02, late)

    def _acknowledged(self, packet: Ack) -> None:
        if packet.kind == m.PUBREL:
            self._incoming.discard(packet.packet_id)
            self._reply(m.PUBCOMP, packet.packet_id)
            return
        outgoing = self.outgoing.get(packet.packet_id)
        if outgoing is None:
            return
        node = "" if self.socket is None else self.socket.host.name
        message = outgoing.message
        if packet.kind == m.PUBREC and packet.reason < 0x80:
            self.world.checks.promised(message, node)
            outgoing.state = RELEASED
            outgoing.since = self.schedule.now
            self._write(encode_ack(m.PUBREL, packet.packet_id, 0, self.version))
            return
        if packet.kind == m.PUBCOMP and outgoing.state != RELEASED:
            self.world.checks.fail(f"{self.name}: PUBCOMP for {message.text} before its PUBREL")
        del self.outgoing[packet.packet_id]
        if packet.kind == m.PUBACK and packet.reason < 0x80:
            self.world.checks.promised(message, node)
        if self.on_done is not None:
            # A PUBCOMP may say that the id was free already.
            self.on_done(outgoing, 0 if packet.kind == m.PUBCOMP else packet.reason)
        if packet.kind == m.PUBREC and self.on_refused is not None:
            self.on_refused(outgoing, packet.packet_id)
