"""Finds batches of wanted offsets in raw log bytes, and proves that none is missing.

`Coverage` makes a read exact. It hands out each wanted offset once, in order within its partition.
A hole or a damaged batch raises DataLossError, unless the reader may skip it.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.client.log.reading.offsets import DataLossError, OffsetRange
from holdfast.log.batch import HEADER, HEADER_BYTES, MAGIC, header_damage
from holdfast.log.columns.checksum import crc32
from holdfast.log.columns.chunk import Chunk

try:
    from holdfast.client.log.reading.stretch import scan_stretch
except ImportError:
    # Without numpy the loop does everything.
    scan_stretch = None  # type: ignore[assignment]

logger = logging.getLogger("holdfast")

LOST_MAX: Final = 10_000
"""The most holes that a reader remembers with their offsets."""


@dataclass(frozen=True)
class ScanStop:
    """The position at which a scan ended, and the reason.

    `needed_bytes` is the length of a batch that goes beyond the data. It is 0 if not even the
    header is in the data. `damage` describes the fault at `position`; it is empty if there is none.
    """

    position: int
    needed_bytes: int
    damage: str


class Coverage:
    """The wanted ranges, and the part of each that was found.

    Invariant: all wanted offsets below `next[p]` were handed out, skipped with a report, or passed
    because they hold nothing wanted. `next` decreases only if a replica's batch overrides an
    earlier batch of the same chunk, which has not been handed out yet.
    """

    def __init__(self, ranges: Iterable[OffsetRange], *, fail_on_data_loss: bool) -> None:
        self.next: dict[int, int] = {}
        self.end: dict[int, int] = {}
        for item in ranges:
            self.next[item.partition] = item.start
            self.end[item.partition] = item.end
        self.fail_on_data_loss = fail_on_data_loss
        self.skipped = 0
        """The number of offsets that the log lacked. It stays 0 if `fail_on_data_loss` is set."""
        self.lost: list[OffsetRange] = []
        """The ranges that the log lacked, at most the first LOST_MAX."""
        self.damage = ""
        """The fault of the last bytes that were no valid batch."""
        # Ranges of offsets per partition, ascending, that hold nothing of the wanted topics.
        self._passed: dict[int, list[tuple[int, int]]] = {}

    def note_passed(self, passed: Iterable[tuple[int, int, int]]) -> None:
        """Notes ranges (partition, start, end) that hold nothing wanted. The scan may leave them
        out."""
        for partition, start, end in passed:
            self._passed.setdefault(partition, []).append((start, end))

    def skip_to(self, partition: int, offset: int, reason: str) -> None:
        """Skips the offsets before `offset`, because the log lacks them. Raises DataLossError
        unless the reader may skip."""
        self.pass_to(partition, offset)
        start = self.next[partition]
        offset = min(offset, self.end[partition])
        if offset <= start:
            return
        self.note_missing(OffsetRange(partition, start, offset), reason)
        self.next[partition] = offset

    def note_missing(self, item: OffsetRange, reason: str) -> None:
        """Reports a wanted range that is lost. Raises DataLossError unless the reader may skip."""
        text = f"offsets {item.start} to {item.end} of partition {item.partition} are missing:"
        text += f" {reason}"
        if self.damage:
            text += f" (last damage: {self.damage})"
        if self.fail_on_data_loss:
            raise DataLossError(f"{text}. Set failOnDataLoss=false to go on without them", item)
        logger.warning("%s; going on without them", text)
        self.skipped += item.records
        if len(self.lost) < LOST_MAX:
            self.lost.append(item)

    def pass_to(self, partition: int, offset: int) -> None:
        """Advances towards `offset` over ranges that hold nothing wanted."""
        if partition in self._passed:
            end = min(offset, self.end[partition])
            for start, stop in self._passed[partition]:
                if start <= self.next[partition] < stop:
                    self.next[partition] = max(self.next[partition], min(stop, end))

    def forget_passed(self) -> None:
        """Drops the ranges of `note_passed`. Each response has its own."""
        self._passed.clear()

    def finish(self, reason: str) -> None:
        """Reports every wanted offset that was not found as missing."""
        for partition, end in self.end.items():
            self.skip_to(partition, end, reason)

    @property
    def done(self) -> bool:
        """True if every wanted offset was found or skipped."""
        return all(self.next[partition] >= end for partition, end in self.end.items())

    def scan(
        self,
        chunk: Chunk,
        position: int,
        data_end: int,
        *,
        limits: Mapping[int, int] | None = None,
        stop_at_holes: bool = False,
    ) -> ScanStop:
        """Adds the wanted batches of `chunk.data[position:data_end]` to the chunk.

        `limits` are the offsets below which the data counts. With `limits`, a batch may override
        the end of an earlier one.

        The scan stops before a batch that is incomplete or not valid. With `stop_at_holes` it also
        stops before a batch that leaves offsets out. It verifies the checksums of wanted batches
        only.
        """
        ends = self.end
        if limits is not None:
            ends = {p: min(end, limits.get(p, end)) for p, end in ends.items()}
        if scan_stretch is not None:
            position = scan_stretch(self.next, chunk, position, data_end, ends)
        view = memoryview(chunk.data)
        while position + HEADER_BYTES <= data_end:
            magic, length, crc, layout, _, partition, base, _, count, _, body, _ = (
                HEADER.unpack_from(view, position)
            )
            damage = header_damage(magic, length, layout, count, body)
            if damage:
                return self._damaged(position, damage)
            if position + length > data_end:
                return ScanStop(position, length, "")
            start = self.next.get(partition)
            if start is not None:
                end = min(ends[partition], base + count)
                if limits is not None and base < start:
                    start = self._override(chunk, view, partition, base, start)
                if start < end and base < end:
                    if crc32(view[position + 12 : position + length]) != crc:
                        return self._damaged(position, "wrong checksum")
                    if base > start:
                        self.pass_to(partition, base)
                        if stop_at_holes and base > self.next[partition]:
                            return ScanStop(position, 0, f"nothing before offset {base}")
                        self.skip_to(partition, base, "removed by retention, or damaged")
                        start = base
                    chunk.positions.append(position)
                    chunk.starts.append(start)
                    chunk.ends.append(end)
                    chunk.records += end - start
                    self.next[partition] = end
            position += length
        return ScanStop(position, 0, "")

    def _damaged(self, position: int, damage: str) -> ScanStop:
        self.damage = damage
        return ScanStop(position, 0, damage)

    def _override(
        self, chunk: Chunk, view: memoryview, partition: int, base: int, start: int
    ) -> int:
        """Cuts the earlier batches of the chunk at `base`, because a later batch of a replica
        overrides them.

        Returns the offset at which the partition goes on.
        """
        for at in range(len(chunk.positions) - 1, -1, -1):
            header = HEADER.unpack_from(view, chunk.positions[at])
            if header[5] != partition or chunk.ends[at] <= base:
                continue
            kept = max(base, chunk.starts[at])
            chunk.records -= chunk.ends[at] - kept
            chunk.ends[at] = kept
            start = min(start, kept)
        self.next[partition] = start
        return start


def find_batch_in(data: memoryview, position: int) -> int | None:
    """Returns the position of the first valid batch at or after `position`, a multiple of 8."""
    place = bytes(data[position:]).find(MAGIC)
    while place >= 0:
        at = position + place
        if at % 8 == 0 and at + HEADER_BYTES <= len(data):
            magic, length, crc, layout, _, _, _, _, count, _, body, _ = HEADER.unpack_from(data, at)
            sound = not header_damage(magic, length, layout, count, body)
            if sound and crc32(data[at + 12 : at + length]) == crc:
                return at
        following = bytes(data[at + 1 :]).find(MAGIC)
        place = -1 if following < 0 else at + 1 + following - position
    return None
