"""Single-byte mutations of all packets: a packet comes out or a violation, and nothing else."""

import pytest

from holdfast.mqtt.decode import decode
from holdfast.mqtt.encode import encode
from holdfast.mqtt.errors import ProtocolViolation
from holdfast.mqtt.framing import FrameReader
from holdfast.mqtt.packets import Connect, Packet
from tests.data.packets import VALID, Case

PACKET_BYTES_MAX = 65_536


def decode_all(data: bytes, version: int, from_client: bool) -> list[Packet]:
    reader = FrameReader(PACKET_BYTES_MAX)
    reader.feed(data)
    packets = []
    while reader.next():
        packets.append(
            decode(reader.buffer, reader.first, reader.start, reader.end, version, from_client)
        )
    return packets


@pytest.mark.parametrize("case", VALID, ids=lambda case: case.name)
def test_every_single_byte_mutation(case: Case) -> None:
    data = bytearray(case.data)
    # A payload or the second half of a long text is as good as any other byte of it.
    for position in range(min(len(data), 100)):
        original = data[position]
        for value in range(256):
            if value == original:
                continue
            data[position] = value
            packets, reason = outcome(bytes(data), case)
            assert reason in (0, 0x81, 0x82, 0x84, 0x94, 0x95)
            check_again(packets, case)
        data[position] = original


def outcome(data: bytes, case: Case) -> tuple[list[Packet], int]:
    try:
        return decode_all(data, case.version, case.from_client), 0
    except ProtocolViolation as error:
        return [], error.reason


def check_again(packets: list[Packet], case: Case) -> None:
    """What was decoded has an encoding, which means the same."""
    for packet in packets:
        version = packet.protocol_level if isinstance(packet, Connect) else case.version
        assert decode_all(encode(packet, version), version, case.from_client) == [packet]
