"""Data representations in packets. MQTT 5.0, section 1.5.

Readers take the buffer, the position of the field and the end of the readable part (the buffer
continues after it). They return the value and the position after it, or raise `MalformedPacket`.
Writers raise `ValueError`.
"""

from typing import Final

from holdfast.protocol.mqtt.errors import MalformedPacket

VARINT_MAX: Final = 268_435_455
"""The largest variable byte integer."""
FIELD_BYTES_MAX: Final = 65_535
"""The most bytes in a string or binary field."""


def varint(value: int) -> bytes:
    """A variable byte integer in its shortest form. [MQTT-1.5.5-1]"""
    if value < 128:
        if value < 0:
            raise ValueError(f"{value} is no variable byte integer")
        return value.to_bytes(1, "big")
    if value < 16_384:
        return ((value & 127 | 128) << 8 | value >> 7).to_bytes(2, "big")
    if value > VARINT_MAX:
        raise ValueError(f"{value} is above the largest variable byte integer, {VARINT_MAX}")
    low = (value & 127 | 128) << 8 | value >> 7 & 127 | 128
    if value < 2_097_152:
        return (low << 8 | value >> 14).to_bytes(3, "big")
    return (low << 16 | (value >> 14 & 127 | 128) << 8 | value >> 21).to_bytes(4, "big")


def read_varint(buf: bytes, position: int, end: int) -> tuple[int, int]:
    """The variable byte integer at `position`, and the position after it.

    The first byte has the lowest seven bits. Four bytes are the most, for 268,435,455; a value in
    more bytes than it needs is malformed, so that each value has one encoding.
    """
    if position < end:
        byte = buf[position]
        if byte < 128:
            return byte, position + 1
    value = 0
    shift = 0
    while position < end:
        byte = buf[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            # [MQTT-1.5.5-1]
            if byte == 0 and shift:
                raise MalformedPacket("a variable byte integer longer than needed")
            return value, position
        shift += 7
        if shift == 28:
            raise MalformedPacket("a variable byte integer of more than four bytes")
    raise MalformedPacket("the packet ends within a variable byte integer")


def read_two(buf: bytes, position: int, end: int) -> int:
    """The two-byte integer at `position`."""
    if position + 2 > end:
        raise MalformedPacket("the packet ends within a two-byte integer")
    return buf[position] << 8 | buf[position + 1]


def read_four(buf: bytes, position: int, end: int) -> int:
    """The four-byte integer at `position`."""
    if position + 4 > end:
        raise MalformedPacket("the packet ends within a four-byte integer")
    return (
        buf[position] << 24 | buf[position + 1] << 16 | buf[position + 2] << 8 | buf[position + 3]
    )


def read_binary(buf: bytes, position: int, end: int) -> tuple[bytes, int]:
    """The binary field at `position`, and the position after it."""
    start = position + 2
    if start > end:
        raise MalformedPacket("the packet ends within a length")
    after = start + (buf[position] << 8 | buf[position + 1])
    if after > end:
        raise MalformedPacket(f"a field of {after - start} bytes, {end - start} are left")
    return buf[start:after], after


def read_string(buf: bytes, position: int, end: int) -> tuple[str, int]:
    """The string field at `position`, and the position after it."""
    data, after = read_binary(buf, position, end)
    return text_of(data), after


def text_of(data: bytes) -> str:
    """The text of a UTF-8 encoded string. Other bytes raise `MalformedPacket`."""
    try:
        # The strict decoder refuses surrogates and overlong forms [MQTT-1.5.4-1] and leaves a
        # byte order mark where it is [MQTT-1.5.4-3].
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedPacket(
            f"a string that is not UTF-8: {error.reason} at byte {error.start}"
        ) from None
    # [MQTT-1.5.4-2]
    if "\0" in text:
        raise MalformedPacket("U+0000 in a string")
    return text


def binary_field(data: bytes) -> bytes:
    """The bytes after their two-byte length."""
    length = len(data)
    if length > FIELD_BYTES_MAX:
        raise ValueError(f"a field of {length} bytes, the maximum is {FIELD_BYTES_MAX}")
    return length.to_bytes(2, "big") + data


def string_field(text: str) -> bytes:
    """The text as UTF-8 after its two-byte length. [MQTT-1.5.4-1] [MQTT-1.5.4-2]"""
    if "\0" in text:
        raise ValueError("U+0000 cannot be sent in a string")
    return binary_field(text.encode("utf-8"))
