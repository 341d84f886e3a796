"""A broker without sessions that may do what real ones do at times: send a client's own messages
back, refuse bridges, refuse messages."""

import asyncio
from dataclasses import dataclass, field

from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import encode, encode_ack
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.protocol.mqtt.packets import Properties
from holdfast.protocol.mqtt.publish import encode_publish
from holdfast.protocol.topics.names import matches


@dataclass
class OddBroker:
    """`async with`."""

    echoes: bool = False
    """To the publisher, whatever it asked for."""
    strips: bool = False
    """User properties, of everything."""
    refuses_bridges: bool = False
    connack: Properties = field(default_factory=dict)
    refusals: list[int] = field(default_factory=list)
    """Reasons for the next messages on topics below t/; 0 accepts."""
    refused_filters: frozenset[str] = frozenset()
    port: int = 0
    stored: list[tuple[str, bytes, int]] = field(default_factory=list)
    """Topic, payload and QoS of what was accepted below t/."""
    bridges: int = 0

    async def __aenter__(self) -> "OddBroker":
        self._clients: set[_Client] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for client in self._clients:
            client.writer.close()

    def cut(self) -> None:
        for client in self._clients:
            client.writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(self, writer)
        frames = FrameReader(PACKET_BYTES_MAX)
        self._clients.add(client)
        try:
            while data := await reader.read(65_536):
                frames.feed(data)
                while frames.next():
                    packet = decode(
                        frames.buffer, frames.first, frames.start, frames.end, client.level, True
                    )
                    if not client.handle(packet):
                        return
        except ConnectionError:
            pass
        finally:
            self._clients.discard(client)
            writer.close()

    def route(self, publish: pk.Publish, source: "_Client") -> None:
        topic = publish.topic.decode()
        for client in self._clients:
            if client is source and not self.echoes and source.is_bridge_or_5:
                continue
            if any(matches(filter, topic) for filter in client.filters):
                client.send_publish(publish, b"" if self.strips else publish.properties)


class _Client:
    def __init__(self, broker: OddBroker, writer: asyncio.StreamWriter) -> None:
        self._broker = broker
        self.writer = writer
        self.level = 4
        self.filters: set[str] = set()
        self.is_bridge_or_5 = False
        self._last_id = 0

    def send_publish(self, publish: pk.Publish, properties: bytes) -> None:
        self._last_id = self._last_id % 65_535 + 1
        packet_id = self._last_id if publish.qos else 0
        data = encode_publish(
            publish.topic, publish.payload, min(publish.qos, 1), publish.retain, False,
            packet_id, properties if self.level == 5 else b"", self.level,
        )  # fmt: skip
        self.writer.write(data)

    def handle(self, packet: pk.Packet) -> bool:
        """False: close."""
        broker = self._broker
        answer: pk.Packet | None = None
        match packet:
            case pk.Connect():
                broker.bridges += packet.is_bridge
                if packet.is_bridge and broker.refuses_bridges:
                    return False
                self.level = packet.protocol_level
                self.is_bridge_or_5 = packet.is_bridge or self.level == 5
                properties = dict(broker.connack) if self.level == 5 else {}
                answer = pk.Connack(False, 0, properties)
            case pk.Subscribe():
                codes = []
                for one in packet.subscriptions:
                    is_refused = one.filter in broker.refused_filters
                    codes.append(0x80 if is_refused else one.qos)
                    if not is_refused:
                        self.filters.add(one.filter)
                answer = pk.Suback(packet.packet_id, codes)
            case pk.Unsubscribe():
                self.filters.difference_update(packet.filters)
                answer = pk.Unsuback(packet.packet_id, [0] * len(packet.filters))
            case pk.Publish():
                self._take(packet)
            case pk.Pingreq():
                answer = pk.Pingresp()
            case pk.Disconnect():
                return False
        if answer is not None:
            self.writer.write(encode(answer, self.level))
        return True

    def _take(self, publish: pk.Publish) -> None:
        broker = self._broker
        reason = reasons.SUCCESS
        if publish.topic.startswith(b"t/"):
            reason = broker.refusals.pop(0) if broker.refusals else reasons.SUCCESS
            if not reason:
                broker.stored.append((publish.topic.decode(), publish.payload, publish.qos))
        if publish.qos:
            self.writer.write(encode_ack(pk.PUBACK, publish.packet_id, reason, self.level))
        if not reason:
            broker.route(publish, self)
