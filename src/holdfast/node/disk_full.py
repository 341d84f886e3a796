"""Reacts to a disk that has only its reserve left.

The node reports the full disk in its heartbeats. The controller then removes it from all in-sync
sets and gives its leaderships to other nodes. Once no commit waits for this node, it suspends
replication. The reserve remains for the metadata's log and for small files. When there is space
again the node continues from the end of its log.
"""

from holdfast.node.context import ClusterContext
from holdfast.node.replicate.replication import Replication
from holdfast.node.state.transfer import Transfer


class DiskSpace:
    """The suspension of replication while the disk is full.

    Invariant: this node suspends replication only when it is in no in-sync set and leads nothing.
    Counter-example: it stops storing while a leader still counts it as in sync. Every commit of
    that leader would wait until the follower is removed.
    """

    def __init__(
        self, context: ClusterContext, replication: Replication, transfer: Transfer
    ) -> None:
        self._context = context
        self._replication = replication
        self._transfer = transfer
        self._is_full = False
        self.suspended: frozenset[int] = frozenset()
        """The partitions whose replication is suspended for lack of space."""

    def set_full(self, is_full: bool, now: float) -> None:
        """Notes whether the disk is full, and resumes replication when it is not."""
        self._is_full = is_full
        held = self.suspended
        if not is_full and held:
            self.suspended = frozenset()
            for partition in held - self._transfer.missing - self._transfer.unsaved.keys():
                if self._context.may_follow(partition):
                    self._replication.resume(partition, now)

    def advance(self) -> None:
        """Suspends replication if the disk is full and no commit waits for this node, at the end of
        a turn."""
        if self._is_full and not self.suspended and self._is_superfluous():
            self.suspended = frozenset(range(self._context.journal.partitions))
            for partition in self.suspended:
                self._replication.suspend(partition)

    def _is_superfluous(self) -> bool:
        """True if this node is in no in-sync set and leads no partition."""
        metadata = self._context.metadata
        own = self._context.node_id
        return metadata is not None and all(
            own not in info.in_sync and info.leader != own for info in metadata.partitions
        )
