"""What the client reads out of packets."""

from holdfast.mqtt import properties as pr
from holdfast.mqtt.decode import decode
from holdfast.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.mqtt.packets import Packet, Properties


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


def authentication_data(properties: Properties) -> bytes | None:
    data = properties.get(pr.AUTHENTICATION_DATA)
    return data if isinstance(data, bytes) else None
