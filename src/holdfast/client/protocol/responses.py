"""What the client reads out of packets."""

from collections.abc import Sequence

from holdfast.client.errors import SubscribeRefused, reason_text
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.protocol.mqtt.packets import Packet, Properties


def packet_of(data: bytes, version: int) -> Packet:
    """What one packet of ours says."""
    reader = FrameReader(PACKET_BYTES_MAX)
    reader.feed(data)
    reader.next()
    return decode(reader.buffer, reader.first, reader.start, reader.end, version, True)


def reason_string(properties: Properties) -> str:
    """ "" if there is none."""
    text = properties.get(pr.REASON_STRING)
    return text if isinstance(text, str) else ""


def server_reference(properties: Properties) -> str:
    """ "" if there is none."""
    text = properties.get(pr.SERVER_REFERENCE)
    return text if isinstance(text, str) else ""


def authentication_data(properties: Properties) -> bytes | None:
    data = properties.get(pr.AUTHENTICATION_DATA)
    return data if isinstance(data, bytes) else None


def check_answer(
    properties: Properties, codes: Sequence[int], filters: Sequence[str], verb: str
) -> None:
    """SUBACK or UNSUBACK. Raises SubscribeRefused, naming the first filter refused."""
    for filter, reason in zip(filters, codes, strict=False):
        if reason >= 0x80:
            raise SubscribeRefused(
                f"cannot {verb} {filter!r}: {reason_text(reason)}",
                reason,
                reason_string(properties),
                list(codes),
            )
