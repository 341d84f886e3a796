"""The log as replication needs it; log.journal.Journal is one."""

from typing import Protocol

from holdfast.storage.record import Batch


class ReplicaLog(Protocol):
    """All lists are by partition; the lists themselves may be replaced."""

    @property
    def next_offset(self) -> list[int]:
        """The offset the next record gets."""

    @property
    def durable_offset(self) -> list[int]:
        """The first offset that a power cut here may still take."""

    @property
    def high_watermark(self) -> list[int]:
        """The first offset not committed."""

    @property
    def start_offsets(self) -> list[int]:
        """The first offset that is still there."""

    def lead(self, partition: int, epoch: int) -> None:
        """What is appended here from now on carries this epoch."""

    def append_batch(self, batch: Batch) -> None:
        """Take over a leader's batch as it is. It begins at next_offset."""

    def truncate(self, partition: int, offset: int) -> None:
        """Forget what lies at and above `offset`: a batch boundary, high_watermark or above."""

    def reset(self, partition: int, offset: int) -> None:
        """Forget everything; the log begins at `offset`, committed up to there."""

    def advance(self, partition: int, offset: int) -> None:
        """Everything below `offset` is committed."""

    def last_epoch(self, partition: int) -> int:
        """Of the newest batch; 0 for an empty log."""

    def epoch_end(self, partition: int, epoch: int) -> tuple[int, int]:
        """The largest epoch here that is at most `epoch`, and the offset where it ends; (0,
        start_offset) if there is none."""
