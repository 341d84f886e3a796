"""Finding the batches of the wanted offsets in raw log bytes, and proving that none is missing.

`Coverage` is what makes a read exact: each wanted offset is handed out once, in order within its
partition; a hole or a damaged batch raises DataLossError unless the reader may skip it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from holdfast.log.record import BATCH_BYTES_MAX, FORMAT, HEAD_BYTES, HEADER, HEADER_BYTES, MAGIC
from holdfast.pipeline.offsets import DataLossError, OffsetRange


@dataclass
class Chunk:
    """Raw bytes and where the wanted, checked batches begin in them, ascending. Of the batch at
    `positions[i]` the offsets `starts[i]` to `ends[i]` count. Positions are multiples of 8."""

    data: bytes
    positions: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    records: int = 0
    """Offsets that count, over all batches."""


@dataclass(frozen=True)
class ScanStop:
    """Where a scan ended, and why: `needed_bytes` is the length of a batch that goes beyond the
    data (0: not even its header is there), `damage` says what is wrong at `position`."""

    position: int
    needed_bytes: int
    damage: str


class Coverage:
    """The wanted ranges, and how much of each has been found."""

    def __init__(self, ranges: Iterable[OffsetRange], *, fail_on_data_loss: bool) -> None:
        self.next: dict[int, int] = {}
        self.end: dict[int, int] = {}
        for item in ranges:
            self.next[item.partition] = item.start
            self.end[item.partition] = item.end
        self.fail_on_data_loss = fail_on_data_loss
        self.skipped = 0
        """Offsets that were not in the log (only with fail_on_data_loss false)."""

    def skip_to(self, partition: int, offset: int, reason: str) -> None:
        """The log has nothing before `offset`. Raises DataLossError unless that may be."""
        start = self.next[partition]
        offset = min(offset, self.end[partition])
        if offset <= start:
            return
        if self.fail_on_data_loss:
            raise DataLossError(
                f"offsets {start} to {offset} of partition {partition} are missing: {reason}. "
                "Set failOnDataLoss=false to go on without them"
            )
        self.skipped += offset - start
        self.next[partition] = offset

    def finish(self, reason: str) -> None:
        """Every wanted offset must have been found by now."""
        for partition, end in self.end.items():
            self.skip_to(partition, end, reason)

    @property
    def done(self) -> bool:
        return all(self.next[partition] >= end for partition, end in self.end.items())

    def scan(
        self,
        chunk: Chunk,
        position: int,
        data_end: int,
        cuts: Sequence[tuple[int, int, int]] = (),
        place: int = 0,
    ) -> ScanStop:
        """Add the wanted batches of `chunk.data[position:data_end]` to the chunk.

        `cuts`: see Piece; `place`: where in the file the chunk's data begins. Stops before a batch
        that is not whole or not valid. Only wanted batches have their checksum verified.
        """
        data = chunk.data
        view = memoryview(data)
        while position + HEADER_BYTES <= data_end:
            magic, length, crc, layout, _, partition, base, _, count, _, body, _ = (
                HEADER.unpack_from(data, position)
            )
            damage = header_damage(magic, length, layout, count, body)
            if damage:
                return ScanStop(position, 0, damage)
            if position + length > data_end:
                return ScanStop(position, length, "")
            start = self.next.get(partition)
            if start is not None:
                end = min(self.end[partition], base + count)
                for of, before, offset in cuts:
                    if of == partition and place + position < before:
                        end = min(end, offset)
                if start < end and base < end:
                    if crc32(view[position + 12 : position + length]) != crc:
                        return ScanStop(position, 0, "wrong checksum")
                    if base > start:
                        self.skip_to(partition, base, "removed by retention, or damaged")
                        start = base
                    chunk.positions.append(position)
                    chunk.starts.append(start)
                    chunk.ends.append(end)
                    chunk.records += end - start
                    self.next[partition] = end
            position += length
        return ScanStop(position, 0, "")


def header_damage(magic: bytes, length: int, layout: int, count: int, body_bytes: int) -> str:
    """What is wrong with the fields of a batch header; empty if nothing is."""
    if magic != MAGIC:
        return f"no batch magic, found {magic!r}"
    if layout != FORMAT:
        return f"batch format {layout}, this program reads {FORMAT}"
    smallest = HEADER_BYTES + count * HEAD_BYTES + body_bytes
    if length > BATCH_BYTES_MAX or length != (smallest + 7) & ~7:
        return f"length {length} does not fit its {count} records"
    return ""
