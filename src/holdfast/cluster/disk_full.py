"""A node whose disk is full but for its reserve.

It says so in its heartbeats, and the controller takes it out of all in-sync sets and gives what it
leads to others. Once nobody waits for it any more it stores no more of what leaders send: the
reserve stays for the metadata's log and for small files. With space again it follows on from where
its log ends.
"""

from holdfast.cluster.context import ClusterContext
from holdfast.cluster.partitions.replication import Replication
from holdfast.cluster.state.transfer import Transfer


class DiskSpace:
    def __init__(
        self, fabric: ClusterContext, replication: Replication, transfer: Transfer
    ) -> None:
        self._fabric = fabric
        self._replication = replication
        self._transfer = transfer
        self._is_full = False
        self.held: frozenset[int] = frozenset()
        """Partitions that are not followed for lack of space."""

    def set_full(self, is_full: bool, now: float) -> None:
        self._is_full = is_full
        held = self.held
        if not is_full and held:
            self.held = frozenset()
            for partition in held - self._transfer.missing - self._transfer.unsaved.keys():
                self._replication.resume(partition, now)

    def advance(self) -> None:
        """End of a turn."""
        if self._is_full and not self.held and self._is_superfluous():
            self.held = frozenset(range(self._fabric.journal.partitions))
            for partition in self.held:
                self._replication.hold(partition)

    def _is_superfluous(self) -> bool:
        """Nobody waits for what is stored here, and nobody reads it as the newest."""
        metadata = self._fabric.metadata
        own = self._fabric.node_id
        return metadata is not None and all(
            own not in info.in_sync and info.leader != own for info in metadata.partitions
        )
