"""The clients of a transcript. They do what its commands say, and acknowledge what they receive
unless they have been told to hold it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.framing import FrameReader
from holdfast.protocol.mqtt.publish import decode_publish
from tests.sim.host import Host
from tests.sim.sockets import ClientSocket
from tests.transcripts.packets import packet_line, raw_line

if TYPE_CHECKING:
    from tests.transcripts.stage import Stage

Told = Callable[["Peer", str, str], None]
"""Called with a connection, the direction (">": to the broker) and a line."""

USUAL: m.Properties = {
    p.RECEIVE_MAXIMUM: 1024,
    p.TOPIC_ALIAS_MAXIMUM: 64,
    p.MAXIMUM_PACKET_SIZE: 2_097_152,
}
"""The properties of every CONNACK with the default configuration."""


class NamedSocket(ClientSocket):
    """The connection of a client whose certificate proves its user name."""

    def __init__(self, user: "Peer", host: Host, user_name: str) -> None:
        self._user_name = user_name
        super().__init__(user, host)

    def _accept(self) -> None:
        super()._accept()
        if self._user_name and self._connection is not None:
            self._connection.certificate_name = self._user_name


class Peer:
    """One connection of an actor."""

    def __init__(self, actor: "Actor", number: int, host: Host, version: int, user: str) -> None:
        self.actor = actor
        self.number = number
        self.node = host.name
        self.version = version
        self.is_over = False
        self._reader = FrameReader(1 << 28)
        self._held: list[m.Packet] | None = None
        self._socket = NamedSocket(self, host, user)

    @property
    def name(self) -> str:
        return self.actor.name if self.number == 1 else f"{self.actor.name} #{self.number}"

    def send(self, packet: m.Packet) -> None:
        self._tell(">", packet_line(packet))
        self._socket.write(encode(packet, self.version))

    def send_raw(self, data: bytes) -> None:
        self._tell(">", raw_line(data))
        self._socket.write(data)

    def hold(self) -> None:
        """Keep the acknowledgements."""
        self._held = []

    def release(self, count: int) -> None:
        """Send the first held acknowledgements; 0: all, and later ones at once again."""
        held = self._held or []
        for packet in held[: count or len(held)]:
            self.send(packet)
        self._held = held[count:] if count else None

    def close(self) -> None:
        """The connection ends without another byte."""
        self._tell(">", "(closes)")
        self.is_over = True
        self._socket.close()

    def _tell(self, direction: str, line: str) -> None:
        self.actor.told(self, direction, line)

    # From the broker

    def received(self, socket: ClientSocket, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        while reader.next():
            decoder = decode_publish if reader.first >> 4 == m.PUBLISH else decode
            packet = decoder(
                reader.buffer, reader.first, reader.start, reader.end, self.version, False
            )
            self._tell("<", packet_line(packet, USUAL))
            self._answer(packet)

    def closed(self, socket: ClientSocket) -> None:
        self.is_over = True
        self._tell("<", "(closes)")

    def refused(self, packet_id: int) -> None:
        """The line of the acknowledgement says it."""

    def _answer(self, packet: m.Packet) -> None:
        if isinstance(packet, m.Publish) and packet.qos:
            self._acknowledge(m.PUBACK if packet.qos == 1 else m.PUBREC, packet.packet_id)
        elif isinstance(packet, m.Ack) and packet.kind == m.PUBREL:
            self._acknowledge(m.PUBCOMP, packet.packet_id)
        elif isinstance(packet, m.Ack) and packet.kind == m.PUBREC and packet.reason < 0x80:
            self._acknowledge(m.PUBREL, packet.packet_id)

    def _acknowledge(self, kind: int, packet_id: int) -> None:
        packet = m.Ack(kind, packet_id)
        if self._held is None:
            self.send(packet)
        else:
            self._held.append(packet)


class Actor:
    """A client with all its connections."""

    def __init__(self, stage: "Stage", name: str, told: Told) -> None:
        self.stage = stage
        self.name = name
        self.told = told
        self.peers: list[Peer] = []
        self._packet_id = 0

    @property
    def peer(self) -> Peer:
        """The newest connection."""
        return self.peers[-1]

    def next_packet_id(self) -> int:
        self._packet_id += 1
        return self._packet_id

    def connect(self, node: str, version: int, user: str, packet: m.Connect | None) -> None:
        """`packet`: None: only the connection opens."""
        peer = Peer(self, len(self.peers) + 1, self.stage.hosts[node], version, user)
        self.peers.append(peer)
        self._packet_id = 0
        if packet is not None:
            peer.send(packet)
