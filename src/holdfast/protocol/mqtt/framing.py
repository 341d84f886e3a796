"""Cuts a byte stream into packets. MQTT 5.0, section 2.1.

A frame is returned in place: input is not copied as long as each read ends with a packet. A packet
that arrives in pieces is joined once. So its cost grows with its size and not with the number of
pieces, and memory grows only as its bytes arrive.
"""

from typing import Final

from holdfast.protocol.mqtt.errors import MalformedPacket, ProtocolViolation
from holdfast.protocol.mqtt.fields import varint
from holdfast.protocol.mqtt.reasons import PACKET_TOO_LARGE

PACKET_BYTES_MAX: Final = 268_435_460
"""The bytes of the largest packet that the protocol can express, its fixed header included."""


class FrameReader:
    """A cutter of one input stream: feed() the input, then call next() until it returns False.
    `packet_bytes_max` may change between two packets.

    After a True, and until the next call, `first` is the fixed header's first byte, at `begin`, and
    buffer[start:end] the body. After an error the reader must not be used again.
    """

    def __init__(self, packet_bytes_max: int) -> None:
        self.packet_bytes_max = packet_bytes_max
        self.buffer = b""
        self.first = 0
        self.begin = 0
        self.start = 0
        self.end = 0
        # The position in `buffer` of the next frame.
        self._position = 0
        # The bytes from `_position` that next() waits for; 0 until it has returned False.
        self._wanted = 0
        # Input after `buffer` that is not joined to it yet.
        self._more: bytearray | None = None

    def feed(self, data: bytes) -> None:
        """Adds input."""
        more = self._more
        if more is not None:
            more += data
            return
        rest = len(self.buffer) - self._position
        if rest == 0:
            self.buffer = data
            self._position = 0
        # Pieces are joined only when the frame is complete. Joining at each read would copy a
        # packet of 256 MB, read in pieces of 64 kB, about 4,000 times.
        elif self._wanted and rest + len(data) >= self._wanted:
            self.buffer = self.buffer[self._position :] + data
            self._position = 0
        else:
            self._more = bytearray(data)

    def is_empty(self) -> bool:
        """Whether next() has consumed all input."""
        return self._more is None and self._position >= len(self.buffer)

    def serve_other_stream(self, packet_bytes_max: int) -> None:
        """Forgets the input, which next() has consumed."""
        self.packet_bytes_max = packet_bytes_max
        self.buffer = b""
        self._position = 0
        self._wanted = 0

    def first_byte(self) -> int:
        """The first byte that next() has not consumed, or -1."""
        if self._position < len(self.buffer):
            return self.buffer[self._position]
        return -1

    def waiting_bytes(self) -> int:
        """The number of received bytes that next() has not consumed."""
        more = self._more
        rest = len(self.buffer) - self._position
        return rest if more is None else rest + len(more)

    def next(self) -> bool:
        """Whether a complete frame is there. If not, more input is needed.

        Raises `ProtocolViolation`: 0x95 for a packet above `packet_bytes_max` as soon as its length
        is known, 0x81 for an invalid length.
        """
        while True:
            buffer = self.buffer
            position = self._position
            size = len(buffer)
            wanted = 2
            if position + 2 <= size:
                length = buffer[position + 1]
                start = position + 2
                if length >= 128:
                    length = self._read_length(position + 1)
                    # 2 to 4 bytes of length, which are as short as can be
                    start += 1 if length < 16_384 else 2 if length < 2_097_152 else 3
                if length >= 0:
                    end = start + length
                    wanted = end - position
                    if wanted > self.packet_bytes_max:
                        raise ProtocolViolation(
                            PACKET_TOO_LARGE,
                            f"a packet of {wanted} bytes, the maximum is {self.packet_bytes_max}",
                        )
                    if end <= size:
                        self.first = buffer[position]
                        self.begin = position
                        self.start = start
                        self.end = end
                        self._position = end
                        self._wanted = 0
                        return True
                else:
                    wanted = size - position + 1
            if not self._join(wanted):
                return False

    def unread(self) -> None:
        """Takes the present frame back, so next() returns it again. Input may be fed before."""
        self._position = self.begin

    def _read_length(self, position: int) -> int:
        """The remaining length at `position`; -1 if it has not arrived entirely."""
        buffer = self.buffer
        end = len(buffer)
        value = 0
        shift = 0
        while position < end:
            byte = buffer[position]
            value |= (byte & 127) << shift
            if byte < 128:
                # [MQTT-1.5.5-1]
                if byte == 0:
                    raise MalformedPacket("a remaining length longer than needed")
                return value
            shift += 7
            if shift == 28:
                raise MalformedPacket("a remaining length of more than four bytes")
            position += 1
        return -1

    def _join(self, wanted: int) -> bool:
        """Joins `wanted` bytes at the start of the buffer and drops consumed ones. False: some of
        them have not arrived yet."""
        position = self._position
        more = self._more
        rest = len(self.buffer) - position
        if more is not None and rest + len(more) >= wanted:
            self.buffer = b"".join((self.buffer[position:], more))
            self._position = 0
            self._more = None
            return True
        if position:
            self.buffer = self.buffer[position:]
            self._position = 0
        self._wanted = wanted
        return False


class SpareReader:
    """A reader for streams of which few have input at a time. A stream needs one from its input
    until that is consumed, so idle streams have none."""

    def __init__(self) -> None:
        self._reader: FrameReader | None = FrameReader(0)

    def lend(self, packet_bytes_max: int) -> FrameReader:
        """A reader without input."""
        reader = self._reader
        self._reader = None
        if reader is None:
            return FrameReader(packet_bytes_max)
        reader.serve_other_stream(packet_bytes_max)
        return reader

    def reclaim(self, reader: FrameReader) -> None:
        """Takes a reader back that is empty."""
        self._reader = reader


def frame(first: int, body: bytes) -> bytes:
    """A packet: fixed header and body."""
    return b"".join((first.to_bytes(1, "big"), varint(len(body)), body))
