"""Which leader's term each stretch of a partition's log was appended under.

What a replica needs to find where its log and its leader's part (KIP-101, KIP-279): the epochs in
the headers of batches, as one entry (epoch, first offset) for each change. Epochs grow along a
log, so an entry ends where the next begins.
"""


class EpochTable:
    def __init__(self) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []

    def add(self, epoch: int, start: int) -> None:
        """A batch of the epoch begins at `start`; what was there or behind it is void."""
        self.cut(start)
        if self.last_epoch() != epoch:
            self._epochs.append(epoch)
            self._starts.append(start)

    def cut(self, offset: int) -> None:
        """What is at or behind the offset is void."""
        while self._starts and self._starts[-1] >= offset:
            self._starts.pop()
            self._epochs.pop()

    def clear(self) -> None:
        self._starts.clear()
        self._epochs.clear()

    def forget_before(self, offset: int) -> None:
        """Drop entries that end before the offset. The one of the record right before it stays: a
        log that ends there differs in nothing."""
        gone = 0
        while gone + 1 < len(self._starts) and self._starts[gone + 1] < offset:
            gone += 1
        if gone:
            del self._starts[:gone]
            del self._epochs[:gone]

    def last_epoch(self) -> int:
        """Of the newest batch; 0 if there is none, or none of a known epoch."""
        return self._epochs[-1] if self._epochs else 0

    def end_of(self, epoch: int, end: int) -> tuple[int, int]:
        """The largest epoch here that is not above `epoch`, and the offset where it ends; `end`
        is the log's. (0, where the oldest entry begins) if all are above it."""
        at = len(self._epochs)
        while at and self._epochs[at - 1] > epoch:
            at -= 1
        found = self._epochs[at - 1] if at else 0
        return found, self._starts[at] if at < len(self._starts) else end

    def entries(self) -> list[tuple[int, int]]:
        """(epoch, first offset), oldest first."""
        return list(zip(self._epochs, self._starts, strict=True))
