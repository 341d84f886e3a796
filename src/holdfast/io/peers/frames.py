"""Frames between nodes: u32 length of the payload, u8 kind, payload.

The socket is read directly into the reader's buffer (asyncio.BufferedProtocol), so a payload is
copied once, out of that buffer.
"""

import struct
from typing import Final

HEADER: Final = struct.Struct(">IB")
READ_BYTES: Final = 262_144
READ_BYTES_MIN: Final = 65_536
"""The room in bytes below which unparsed bytes are moved to the front of the buffer."""
KEPT_BYTES: Final = 4_194_304
"""The size in bytes above which a buffer that grew for one frame is released after it."""


class FrameTooLong(Exception):
    pass


class PeerFrameReader:
    """Splits received bytes into frames.

    Invariant: 0 <= start <= end < capacity, and the bytes from start to end are not parsed yet.
    """

    def __init__(self, payload_bytes_max: int) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._view = memoryview(bytearray(READ_BYTES))
        self._start = 0
        self._end = 0

    def buffer(self) -> memoryview:
        """Returns the buffer for the next bytes; `filled` reports how many they were."""
        return self._view[self._end :]

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Parses bytes that were read elsewhere before, at most READ_BYTES."""
        self._view[: len(data)] = data
        return self.filled(len(data))

    def filled(self, count: int) -> list[tuple[int, bytes]]:
        """Returns the kinds and payloads of the complete frames.

        Raises `FrameTooLong` for a payload above the limit.
        """
        self._end += count
        view, start, end = self._view, self._start, self._end
        frames: list[tuple[int, bytes]] = []
        needed = HEADER.size
        while end - start >= HEADER.size:
            length, kind = HEADER.unpack_from(view, start)
            if length > self._payload_bytes_max:
                raise FrameTooLong(
                    f"sent a frame of kind {kind} with {length} bytes,"
                    f" more than {self._payload_bytes_max}"
                )
            needed = HEADER.size + length
            if end - start < needed:
                break
            frames.append((kind, view[start + HEADER.size : start + needed].tobytes()))
            start += needed
            needed = HEADER.size
        self._start = start
        self._make_room(needed)
        return frames

    def _make_room(self, needed: int) -> None:
        """Makes room for a whole frame from `start`, and for a worthwhile read.

        A view that was handed out may still be in use. So bytes move within the buffer or into a
        new one, and the buffer is never resized.
        """
        view, start, end = self._view, self._start, self._end
        capacity = max(needed, READ_BYTES)
        too_large = len(view) > KEPT_BYTES >= capacity
        if start == end and not too_large:
            self._start = self._end = 0
            return
        if too_large or capacity > len(view):
            self._view = memoryview(bytearray(capacity))
        elif len(view) - start >= needed and (start == 0 or len(view) - end >= READ_BYTES_MIN):
            return
        self._view[: end - start] = view[start:end]
        self._start = 0
        self._end = end - start
