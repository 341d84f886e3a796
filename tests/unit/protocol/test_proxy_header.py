"""The header of the PROXY protocol: both versions, in any pieces, and everything that is none."""

import random
import re
import struct

import pytest

from holdfast.protocol.proxy.header import (
    BINARY_BYTES_MAX,
    FIXED_BYTES,
    SIGNATURE,
    TEXT_BYTES_MAX,
    ProxyError,
    ProxyHeader,
)

AFTER = b"\x10\x0c\x00\x04MQTT\x05"
"""What follows a header: the beginning of a CONNECT."""


def binary(command: int = 0x21, family: int = 0x11, addresses: bytes = b"", rest: int = 0) -> bytes:
    body = addresses + bytes(rest)
    return SIGNATURE + bytes((command, family)) + struct.pack(">H", len(body)) + body


IPV4 = bytes((10, 0, 0, 7, 10, 0, 0, 1)) + struct.pack(">HH", 4321, 1883)
IPV6 = bytes(15) + b"\x01" + bytes(15) + b"\x02" + struct.pack(">HH", 4321, 1883)
MAPPED = bytes(10) + b"\xff\xff" + IPV4[:4] + bytes(16) + struct.pack(">HH", 4321, 1883)

GOOD = {
    b"PROXY TCP4 10.0.0.7 10.0.0.1 4321 1883\r\n": "10.0.0.7:4321",
    b"PROXY TCP6 ::1 ::2 4321 1883\r\n": "::1:4321",
    b"PROXY UNKNOWN\r\n": "",
    b"PROXY UNKNOWN ffff:f...f:ffff ffff:f...f:ffff 65535 65535\r\n": "",
    b"PROXY TCP4 0.0.0.0 255.255.255.255 0 65535\r\n": "0.0.0.0:0",
    binary(addresses=IPV4): "10.0.0.7:4321",
    binary(addresses=IPV4, rest=500): "10.0.0.7:4321",
    binary(family=0x21, addresses=IPV6): "::1:4321",
    b"PROXY TCP6 ::ffff:10.0.0.7 ::ffff:10.0.0.1 4321 1883\r\n": "10.0.0.7:4321",
    binary(family=0x21, addresses=MAPPED): "10.0.0.7:4321",
    binary(family=0x00): "",
    binary(family=0x31, rest=216): "",
    binary(command=0x20, family=0x00): "",
    binary(command=0x20, family=0x11, addresses=IPV4): "",
    binary(addresses=IPV4, rest=BINARY_BYTES_MAX - len(IPV4)): "10.0.0.7:4321",
}


def read(data: bytes, sizes: list[int]) -> tuple[ProxyHeader, int]:
    """Offer the data as it arrives, in pieces of these sizes; what is not taken is offered again.
    Returns the number of bytes taken."""
    header = ProxyHeader()
    taken = arrived = 0
    while not header.is_complete and (sizes or taken < len(data)):
        arrived = min(len(data), arrived + (sizes.pop(0) if sizes else len(data)))
        offered = data[taken : min(arrived, taken + header.wanted_bytes)]
        used = header.take(offered)
        assert used == len(offered) or header.is_complete
        taken += used
    return header, taken


@pytest.mark.parametrize(("data", "client"), GOOD.items(), ids=range(len(GOOD)))
def test_headers_in_any_pieces_leave_what_follows(data: bytes, client: str) -> None:
    for size in (1, 2, 7, 15, 16, 17, 60, len(data) + 5):
        header, taken = read(data + AFTER, [size] * (len(data) // size + 20))
        assert header.is_complete
        assert header.client == client
        assert taken == len(data)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (AFTER, "begins with no header"),
        (b"\x16\x03\x01\x02\x00", "begins with no header"),
        (b"GET / HTTP/1.1\r\n\r\n", "begins with no header"),
        (b"PROXY\r\n", "begins with no header"),
        (b"PROXY TCP4 10.0.0.7 10.0.0.1 4321 1883\n", "ends with CR LF"),
        (b"PROXY " + b"x" * 200, f"at most {TEXT_BYTES_MAX} bytes"),
        (b"PROXY TCP5 1 1 1 1\r\n", "TCP4, TCP6 or UNKNOWN, found 'TCP5'"),
        (b"PROXY TCP4 10.0.0.7\r\n", "6 words, found 3"),
        (b"PROXY TCP4  10.0.0.7 10.0.0.1 1 1\r\n", "6 words, found 7"),
        (b"PROXY TCP4 10.0.0.256 10.0.0.1 1 1\r\n", "256"),
        (b"PROXY TCP4 ::1 ::2 1 1\r\n", "::1"),
        (b"PROXY TCP4 10.0.0.7 10.0.0.1 65536 1\r\n", "up to 65535, found '65536'"),
        (b"PROXY TCP4 10.0.0.7 10.0.0.1 -1 1\r\n", "found '-1'"),
        (b"PROXY TCP4 10.0.0.7 10.0.0.1 01 1\r\n", "found '01'"),
        (b"PROXY TCP4 10.0.0.7 10.0.0.1 1 \xb2\r\n", "is ASCII"),
        (SIGNATURE[:-1] + b"x" + bytes(4), "begins with no header"),
        (binary(command=0x11, addresses=IPV4), "0x11"),
        (binary(command=0x22, addresses=IPV4), "0x22"),
        (binary(family=0x12, addresses=IPV4), "0x12"),
        (binary(family=0x22, addresses=IPV6), "0x22"),
        (binary(addresses=IPV4[:-1]), "addresses of 11 bytes, 12 are needed"),
        (binary(family=0x21, addresses=IPV4), "addresses of 12 bytes, 36 are needed"),
        (binary(addresses=IPV4, rest=BINARY_BYTES_MAX), f"the maximum is {BINARY_BYTES_MAX}"),
    ],
)
def test_what_is_no_header(data: bytes, expected: str) -> None:
    for sizes in ([len(data)], [1] * len(data)):
        with pytest.raises(ProxyError, match=re.escape(expected)):
            read(data, sizes)


def test_damaged_headers_end_or_wait_for_a_bounded_rest() -> None:
    """Changed bytes, in order and at random: a header, an error, or a wait for a bounded rest."""
    rng = random.Random(7)
    cases = [
        data[:position] + bytes((value,)) + data[position + 1 :]
        for data in GOOD
        for position in range(min(len(data), 60))
        for value in (0, 0x0A, 0x0D, 0x20, 0x21, 0x7F, 0xFF, data[position] ^ 1)
    ]
    for _ in range(3000):
        data = bytearray(rng.choice(list(GOOD)))
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        cases.append(bytes(data[: rng.randrange(len(data) + 1)]))
    for data in cases:
        header = ProxyHeader()
        try:
            used = header.take(data)
        except ProxyError:
            continue
        assert used <= len(data)
        if not header.is_complete:
            assert used == len(data)
            assert 0 < header.wanted_bytes <= FIXED_BYTES + BINARY_BYTES_MAX
