"""The fields that the client reads from packets."""

from collections.abc import Sequence

from holdfast.client.errors import SubscribeRefused, reason_text
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.protocol.mqtt.packets import Packet, Properties


def packet_of(data: bytes, version: int) -> Packet:
    """The packet in the bytes of one packet of this client."""
    reader = FrameReader(PACKET_BYTES_MAX)
    reader.feed(data)
    reader.next()
    return decode(reader.buffer, reader.first, reader.start, reader.end, version, True)


def reason_string(properties: Properties) -> str:
    """The reason string, or ""."""
    text = properties.get(pr.REASON_STRING)
    return text if isinstance(text, str) else ""


def server_reference(properties: Properties) -> str:
    """The server reference, or ""."""
    text = properties.get(pr.SERVER_REFERENCE)
    return text if isinstance(text, str) else ""


def authentication_data(properties: Properties) -> bytes | None:
    """The authentication data, or None."""
    data = properties.get(pr.AUTHENTICATION_DATA)
    return data if isinstance(data, bytes) else None


def check_reason_codes(
    properties: Properties, codes: Sequence[int], filters: Sequence[str], verb: str
) -> None:
    """Raise `SubscribeRefused` for the first refused filter of a SUBACK or UNSUBACK."""
    for filter, reason in zip(filters, codes, strict=False):
        if reason >= 0x80:
            raise SubscribeRefused(
                f"cannot {verb} {filter!r}: {reason_text(reason)}",
                reason,
                reason_string(properties),
                list(codes),
            )
