"""The server end of a client core under test: decodes what it sends, answers by hand."""

from collections.abc import Sequence

from holdfast.client.errors import ConnectionLost, ConnectionRefused, ProtocolError
from holdfast.client.options import Options
from holdfast.client.protocol.core import ClientProtocol
from holdfast.client.protocol.effects import Closed, Connected, Effect
from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import encode, encode_ack
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.protocol.mqtt.packets import Packet, Properties
from holdfast.protocol.mqtt.publish import encode_publish


class Server:
    """The other end of one core: decodes what it sends, answers by hand."""

    def __init__(self, core: ClientProtocol, now: float = 0.0) -> None:
        self.core = core
        self.now = now

    def sent(self) -> list[Packet]:
        """What the core has sent since the last call."""
        reader = FrameReader(PACKET_BYTES_MAX)
        reader.feed(self.core.data_to_send())
        packets = []
        while reader.next():
            packets.append(
                decode(
                    reader.buffer, reader.first, reader.start, reader.end, self.core.version, True
                )
            )
        return packets

    def send(self, *packets: Packet | bytes) -> list[Effect]:
        data = b"".join(
            one if isinstance(one, bytes) else encode(one, self.core.version) for one in packets
        )
        self.core.handle_data(data, self.now)
        return self.core.effects()

    def accept(
        self, session_present: bool = False, properties: Properties | None = None
    ) -> list[Effect]:
        self.core.connect(self.now)
        self.sent()
        return self.send(pk.Connack(session_present, 0, properties or {}))

    def ack(self, kind: int, packet_id: int, reason: int = 0) -> list[Effect]:
        return self.send(encode_ack(kind, packet_id, reason, self.core.version))

    def message(
        self,
        topic: str,
        qos: int = 0,
        packet_id: int = 0,
        properties: bytes = b"",
        dup: bool = False,
    ) -> bytes:
        return encode_publish(
            topic.encode(), b"x", qos, False, dup, packet_id, properties, self.core.version
        )


def connected(level: int = 5, properties: Properties | None = None, **options: object) -> Server:
    core = ClientProtocol(Options(level=level, client_id="c", **options))  # type: ignore[arg-type]
    server = Server(core)
    effects = server.accept(properties=properties)
    assert any(isinstance(one, Connected) for one in effects)
    return server


def publishes(packets: Sequence[Packet]) -> list[tuple[int, bool, bytes]]:
    return [(p.packet_id, p.dup, p.topic) for p in packets if isinstance(p, pk.Publish)]


def closing_error(effects: Sequence[Effect]) -> object:
    (closed,) = [one for one in effects if isinstance(one, Closed)]
    return closed.error


def reason_of(effects: Sequence[Effect]) -> int:
    error = closing_error(effects)
    assert isinstance(error, ProtocolError | ConnectionLost | ConnectionRefused)
    return error.reason
