"""Lists the epochs of a partition: which leader's epoch each stretch was appended under.

A replica uses them to find where its log and its leader's differ (KIP-101, KIP-279). They come from
the headers of batches, one entry (epoch, first offset) for each change. Epochs grow along a log, so
an entry ends where the next begins.
"""

from collections.abc import Sequence

from holdfast.log.reading.index import IndexHead


class EpochTable:
    """The epochs of one partition, growing with the offset."""

    def __init__(self) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []

    def add(self, epoch: int, start: int) -> None:
        """Notes that a batch of the epoch begins at `start`; entries at or behind it are void."""
        self.cut(start)
        assert self.last_epoch() <= epoch, "epochs fall along the log"
        if self.last_epoch() != epoch:
            self._epochs.append(epoch)
            self._starts.append(start)

    def cut(self, offset: int) -> None:
        """Drops the entries at or behind the offset."""
        while self._starts and self._starts[-1] >= offset:
            self._starts.pop()
            self._epochs.pop()

    def clear(self) -> None:
        self._starts.clear()
        self._epochs.clear()

    def forget_before(self, offset: int) -> None:
        """Drops the entries that end before the offset. The entry of the record right before it
        stays, because a follower's log may end there."""
        gone = 0
        while gone + 1 < len(self._starts) and self._starts[gone + 1] < offset:
            gone += 1
        if gone:
            del self._starts[:gone]
            del self._epochs[:gone]

    def last_epoch(self) -> int:
        """The epoch of the newest batch; 0 if there is none, or none of a known epoch."""
        return self._epochs[-1] if self._epochs else 0

    def end_of(self, epoch: int, end: int) -> tuple[int, int]:
        """The largest epoch that is at most `epoch`, and the offset where it ends; `end` is the end
        of the log. Returns 0 and the start of the oldest entry if all epochs are larger."""
        at = len(self._epochs)
        while at and self._epochs[at - 1] > epoch:
            at -= 1
        found = self._epochs[at - 1] if at else 0
        return found, self._starts[at] if at < len(self._starts) else end

    def entries(self) -> list[tuple[int, int]]:
        """The (epoch, first offset) pairs, oldest first."""
        return list(zip(self._epochs, self._starts, strict=True))


class PartitionEpochs:
    """The epoch tables of a journal's partitions, and the offsets at which partitions were
    reset."""

    def __init__(self, partitions: int, starts: Sequence[tuple[int, int, int]]) -> None:
        """Starts with `starts`, the result of that method before older segments were removed."""
        self._tables: list[EpochTable] = [EpochTable() for _ in range(partitions)]
        self._floors: dict[int, int] = {}
        for partition, epoch, start in starts:
            self._tables[partition].add(epoch, start)

    def note(self, partition: int, epoch: int, start: int) -> None:
        """Notes that a batch of the epoch begins at `start`."""
        table = self._tables[partition]
        if table.last_epoch() != epoch:
            table.add(epoch, start)

    def add_notes(self, head: IndexHead, cuts: bool) -> None:
        """Adds the epochs of a segment, after those of earlier ones. With `cuts`, the segment
        overrides earlier records at or behind its start. If epochs fall, damage hides the mark of a
        partition that began again: its leader's log begins with records of older epochs."""
        if cuts:
            for partition, start in enumerate(head.start_offsets):
                self._tables[partition].cut(start)
        for partition, offset in head.resets.items():
            self.restart_at(partition, offset)
        for partition, epoch, start in head.epochs:
            table = self._tables[partition]
            table.cut(start)
            if table.last_epoch() > epoch:
                table.clear()
            table.add(epoch, start)

    def restart_at(self, partition: int, offset: int) -> None:
        self._tables[partition].clear()
        self._floors[partition] = offset

    def cut(self, partition: int, offset: int) -> None:
        self._tables[partition].cut(offset)

    def apply_floors(self, start_offsets: list[int]) -> None:
        """Raises start offsets to the offsets at which partitions were reset, because earlier
        records are void."""
        for partition, offset in self._floors.items():
            if start_offsets[partition] < offset:
                start_offsets[partition] = offset
        for partition, start in enumerate(start_offsets):
            self._tables[partition].forget_before(start)

    def last_epoch(self, partition: int) -> int:
        return self._tables[partition].last_epoch()

    def end_of(self, partition: int, epoch: int, end: int) -> tuple[int, int]:
        return self._tables[partition].end_of(epoch, end)

    def starts(self, start_offsets: Sequence[int]) -> list[tuple[int, int, int]]:
        """The (partition, epoch, first offset) of the epochs that begin before these offsets."""
        result: list[tuple[int, int, int]] = []
        for partition, table in enumerate(self._tables):
            for epoch, start in table.entries()[:1]:
                if start < start_offsets[partition]:
                    result.append((partition, epoch, start))
        return result
