"""The snapshot container: derived state as a stream of entries, and where in the log it starts.

It knows nothing of what the entries mean. All integers are little-endian::

    header     magic 4s b"HFLS" · length u32 · crc u32 · format u8 · 3 zero bytes · sequence u64 ·
               created_us i64 · partitions u32 · u64 per partition
    chunk      magic b"HFSC" · length u32 · crc u32 · number u32 · entries u32 · the
               entries: kind u32 · length u32 · data
    footer     magic b"HFSF" · length u32 · crc u32 · chunks u32 · entries u64 · snapshot bytes u64

A part's length covers the whole part, its CRC-32 what follows the CRC. The footer is the last
thing written, so a snapshot that a crash cut short has none and is refused as a whole; so is one
with a damaged chunk, because half of a state is worse than an older one.

The snapshot is fuzzy: the state moves on while it is taken. Records from `sequence` on are applied
over it, and it may already contain the effect of some of them: applying a record twice must change
nothing in the end.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final
from zlib import crc32

HEADER_MAGIC: Final = b"HFLS"
CHUNK_MAGIC: Final = b"HFSC"
FOOTER_MAGIC: Final = b"HFSF"
FORMAT: Final = 1

_PART: Final = struct.Struct("<4sII")
_HEADER: Final = struct.Struct("<B3xQqI")
_CHUNK: Final = struct.Struct("<II")
_ENTRY: Final = struct.Struct("<II")
_FOOTER: Final = struct.Struct("<IQQ")
FOOTER_BYTES: Final = _PART.size + _FOOTER.size

CHUNK_BYTES: Final = 256 << 10
"""The bytes at which a chunk is closed. It also bounds a reader's memory, except for single larger
entries."""
PART_BYTES_MAX: Final = 1 << 30
"""The most bytes of a part. No written part reaches it: an entry has one session or one retained
message."""
PARTITIONS_MAX: Final = 65_536

ReadAt = Callable[[int, int], bytes]
"""A function of position and length that returns bytes of the snapshot; fewer only at its end."""


class CorruptSnapshot(Exception):
    """The bytes are not a complete, valid snapshot. The text gives the reason."""


def _part(magic: bytes, content: list[bytes]) -> list[bytes]:
    crc = 0
    length = _PART.size
    for piece in content:
        crc = crc32(piece, crc)
        length += len(piece)
    if length > PART_BYTES_MAX:
        raise ValueError(f"a snapshot entry of {length} bytes, the maximum is {PART_BYTES_MAX}")
    return [_PART.pack(magic, length, crc), *content]


class SnapshotEncoder:
    """Encodes entries as a snapshot, whose bytes must be written in the order they are returned.

    `sequence` and `offsets` (the next offset per partition) are those *before* the first entry is
    taken from the state. With later ones, a record between the two would be in neither.
    """

    def __init__(self, sequence: int, offsets: Sequence[int], created_us: int) -> None:
        self.entries = 0
        self.size_bytes = 0
        """The bytes returned so far."""
        self._chunks = 0
        self._open: list[bytes] = []
        self._open_entries = 0
        self._open_bytes = 0
        self._header: list[bytes] = _part(
            HEADER_MAGIC,
            [
                _HEADER.pack(FORMAT, sequence, created_us, len(offsets)),
                struct.pack(f"<{len(offsets)}Q", *offsets),
            ],
        )

    def add(self, kind: int, data: bytes) -> list[bytes]:
        """Adds an entry and returns the bytes that are ready to be written, often none."""
        self._open.append(_ENTRY.pack(kind, len(data)))
        self._open.append(data)
        self._open_entries += 1
        self._open_bytes += _ENTRY.size + len(data)
        if self._open_bytes < CHUNK_BYTES:
            return []
        return self._returned(self._close_chunk())

    def finish(self) -> list[bytes]:
        """Returns the rest of the snapshot with its footer."""
        rest = self._close_chunk()
        size_bytes = self.size_bytes + sum(map(len, rest)) + FOOTER_BYTES
        footer = _FOOTER.pack(self._chunks, self.entries, size_bytes)
        return self._returned([*rest, *_part(FOOTER_MAGIC, [footer])])

    def _close_chunk(self) -> list[bytes]:
        ready, self._header = self._header, []
        if self._open_entries:
            ready += _part(
                CHUNK_MAGIC, [_CHUNK.pack(self._chunks, self._open_entries), *self._open]
            )
            self._chunks += 1
            self.entries += self._open_entries
            self._open = []
            self._open_entries = 0
            self._open_bytes = 0
        return ready

    def _returned(self, ready: list[bytes]) -> list[bytes]:
        self.size_bytes += sum(map(len, ready))
        return ready


class Snapshot:
    """A snapshot that is read through `read_at`. Only `check` proves that it is complete."""

    def __init__(self, read_at: ReadAt, size_bytes: int) -> None:
        """Reads header and footer.

        Raises `CorruptSnapshot` if one is invalid.
        """
        self._read_at = read_at
        self.size_bytes = size_bytes
        # Footer first: a snapshot that was never finished is the usual damage.
        content = self._content(size_bytes - FOOTER_BYTES, FOOTER_MAGIC, "footer")
        if len(content) != _FOOTER.size:
            raise CorruptSnapshot(f"a footer of {len(content)} bytes, expected {_FOOTER.size}")
        self._chunks, self.entry_count, expected_bytes = _FOOTER.unpack(content)
        if expected_bytes != size_bytes:
            raise CorruptSnapshot(f"{size_bytes} bytes, the footer says {expected_bytes}")
        header = self._content(0, HEADER_MAGIC, "header")
        if not header or header[0] != FORMAT:
            found = header[0] if header else "none"
            raise CorruptSnapshot(f"snapshot format {found}, this program reads {FORMAT}")
        if len(header) < _HEADER.size:
            raise CorruptSnapshot(
                f"a header of {len(header)} bytes, it has at least {_HEADER.size}"
            )
        _, sequence, created_us, partitions = _HEADER.unpack_from(header)
        if partitions > PARTITIONS_MAX or len(header) != _HEADER.size + 8 * partitions:
            raise CorruptSnapshot(f"a header of {len(header)} bytes for {partitions} partitions")
        self.sequence: int = sequence
        """Records from this journal sequence on must be applied over the entries."""
        self.offsets: list[int] = list(struct.unpack_from(f"<{partitions}Q", header, _HEADER.size))
        """Per partition the offset of the first record that must be applied."""
        self.created_us: int = created_us
        self._first_chunk = _PART.size + len(header)

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """The (kind, data) pairs in the order they were added. Call `check` first where half a
        state would do harm.

        Raises `CorruptSnapshot` when it reaches damage.
        """
        position = self._first_chunk
        chunks = entries = 0
        while position < self.size_bytes - FOOTER_BYTES:
            content = self._content(position, CHUNK_MAGIC, "chunk")
            for entry in _chunk_entries(content, chunks, position):
                yield entry
                entries += 1
            position += _PART.size + len(content)
            chunks += 1
        if (chunks, entries) != (self._chunks, self.entry_count):
            raise CorruptSnapshot(
                f"{entries} entries in {chunks} chunks,"
                f" the footer says {self.entry_count} in {self._chunks}"
            )

    def check(self) -> None:
        """Reads the whole snapshot.

        Raises `CorruptSnapshot` if it is damaged.
        """
        for _ in self.entries():
            pass

    def _content(self, position: int, magic: bytes, name: str) -> bytes:
        """The verified bytes after the CRC of the part at `position`."""
        if position < 0:
            raise CorruptSnapshot(f"{self.size_bytes} bytes are too few for a snapshot")
        prefix = self._read_at(position, _PART.size)
        if len(prefix) < _PART.size or prefix[:4] != magic:
            raise CorruptSnapshot(f"no {name} at {position}, found {prefix[:4]!r}")
        _, length, expected = _PART.unpack(prefix)
        if not _PART.size <= length <= min(PART_BYTES_MAX, self.size_bytes - position):
            raise CorruptSnapshot(f"a {name} of {length} bytes at {position} of {self.size_bytes}")
        content = self._read_at(position + _PART.size, length - _PART.size)
        if len(content) != length - _PART.size:
            raise CorruptSnapshot(f"the {name} at {position} ends after {len(content)} bytes")
        found = crc32(content)
        if found != expected:
            raise CorruptSnapshot(f"{name} at {position}: checksum {found:08x}, not {expected:08x}")
        return content


def _chunk_entries(content: bytes, number: int, position: int) -> Iterator[tuple[int, bytes]]:
    """The entries of the chunk at `position`, whose checksum is right.

    Raises `CorruptSnapshot` if its number is not `number`, or the entries do not fill it exactly.
    """
    where = f"chunk at {position}"
    if len(content) < _CHUNK.size:
        raise CorruptSnapshot(f"{where}: {len(content)} bytes, it has at least {_CHUNK.size}")
    found, count = _CHUNK.unpack_from(content)
    if found != number:
        raise CorruptSnapshot(f"{where}: it is number {found} where {number} belongs")
    start = _CHUNK.size
    for index in range(count):
        if start + _ENTRY.size > len(content):
            raise CorruptSnapshot(f"{where}: entry {index} of {count} is missing")
        kind, length = _ENTRY.unpack_from(content, start)
        start += _ENTRY.size
        if start + length > len(content):
            raise CorruptSnapshot(f"{where}: entry {index} of {count} is cut off")
        yield kind, content[start : start + length]
        start += length
    if start != len(content):
        raise CorruptSnapshot(f"{where}: {len(content) - start} bytes after its {count} entries")
