"""Interface of the log that replication uses. `log.journal.journal.Journal` implements it."""

from typing import Protocol

from holdfast.log.batch import Batch


class ReplicaLog(Protocol):
    """The log of one node, with one entry per partition in each list. A caller reads the lists
    afresh each time, because the log may replace them."""

    @property
    def next_offset(self) -> list[int]:
        """The offset that the next record gets."""

    @property
    def durable_offset(self) -> list[int]:
        """The first offset that a power cut on this node may still lose."""

    @property
    def high_watermark(self) -> list[int]:
        """The first offset that is not committed."""

    @property
    def start_offsets(self) -> list[int]:
        """The first offset that is still in the log."""

    def lead(self, partition: int, epoch: int) -> None:
        """Gives this epoch to everything that this node appends from now on."""

    def append_batch(self, batch: Batch) -> None:
        """Appends a leader's batch unchanged. It begins at next_offset."""

    def truncate(self, partition: int, offset: int) -> None:
        """Removes everything at and above `offset`, a batch boundary at or above the high
        watermark."""

    def reset(self, partition: int, offset: int) -> None:
        """Removes everything. The log begins at `offset` and is committed up to there."""

    def advance(self, partition: int, offset: int) -> None:
        """Marks everything below `offset` as committed."""

    def last_epoch(self, partition: int) -> int:
        """The epoch of the newest batch; 0 for an empty log."""

    def epoch_end(self, partition: int, epoch: int) -> tuple[int, int]:
        """The largest epoch in this log that is at most `epoch`, and the offset where it ends.
        Returns (0, start_offset) if there is none."""
