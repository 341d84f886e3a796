"""Single-byte mutations of all packets: a packet comes out or a violation, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.framing import FrameReader
from holdfast.protocol.mqtt.packets import Connect, Packet
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
    # Beyond that there is only more of a long text or payload.
    for position in range(case.novel_from, min(len(data), 100)):
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


def test_a_short_run_of_the_fuzzer() -> None:
    """The same seed gives the same cases, with the same outcomes."""
    fuzz = Path(__file__).parents[4] / "tools" / "fuzz.py"
    outcomes = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(fuzz), "--cases", "1000", "--seed", "7"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        outcomes.append(done.stdout.split("nothing unexpected")[1])
    assert "Malformed Packet" in outcomes[0]
    assert outcomes[0] == outcomes[1]
