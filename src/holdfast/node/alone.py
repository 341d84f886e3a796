"""Begins and ends the time in which a node is its whole cluster."""

from holdfast.log.batch import Batch
from holdfast.log.journal.segment import WriteGroup
from holdfast.node.metadata.model import DATA, ClusterMetadata
from holdfast.node.parts import Parts
from holdfast.node.publish.producer_dedup import forget_some


class Alone:
    """Decides whether this node commits alone: by its journal, with `publish.local_commit`.

    Invariant: it does so only while it leads every partition, the metadata names no other node, and
    no other node has a link. So the disk here is all that a commit waits for. The mode ends before
    anything of another node is handled.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._state = parts.state
        self._context = parts.context
        self._local = parts.local
        # The metadata that was looked at last, and whether it allows this mode.
        self._metadata: ClusterMetadata | None = None
        self._is_possible = False
        # The write group that the disk has.
        self._in_flight: WriteGroup | None = None

    def review(self) -> None:
        """Begins if possible, at the end of a turn in which no record waits."""
        context = self._context
        if context.is_alone or context.connected:
            return
        if self._metadata is not context.metadata:
            self._metadata = context.metadata
            self._is_possible = self._is_allowed(context.metadata)
        if self._is_possible and self._is_at_rest():
            self._parts.replication.leading.begin_alone()
            context.journal.is_alone = context.is_alone = True
            self._parts.metadata_reads.is_alone = True

    def _is_allowed(self, metadata: ClusterMetadata | None) -> bool:
        own = self._context.node_id
        return (
            metadata is not None
            and tuple(metadata.nodes) == (own,)
            and metadata.min_insync == 1
            and all(info.in_sync == info.members == (own,) for info in metadata.partitions)
            and self._parts.config.role == DATA
        )

    def _is_at_rest(self) -> bool:
        """Whether everything in the log is applied, and nothing waits to be appended."""
        parts = self._parts
        journal = self._context.journal
        return (
            self._state.delivered == journal.next_offset == journal.high_watermark
            and not parts.forwarding.pending
            and not parts.admission.voider.ends
            and all(self._context.leading)
            and parts.meta.is_leader
            and not parts.session_coordinator.decisions.begins_at
            and parts.transfer.is_whole
            and not parts.transfer.released
            and parts.history.is_current
            and not journal.damaged
        )

    def taken(self, group: WriteGroup) -> None:
        """Notes that the disk has the group."""
        self._in_flight = group

    def written(self) -> None:
        """Folds and acknowledges what is committed now."""
        self._in_flight = None
        self._local.release()
        forget_some(self._state)

    def changes(self, metadata: ClusterMetadata, changed: tuple[int, ...]) -> None:
        """Ends unless the new metadata leaves everything as it is."""
        if self._context.is_alone and (changed or not self._is_allowed(metadata)):
            self.end()

    def end(self) -> None:
        """Goes on as a node among others: every record that waits is forwarded, and appended."""
        context = self._context
        if not context.is_alone:
            return
        journal = context.journal
        journal.is_alone = context.is_alone = False
        self._parts.metadata_reads.is_alone = False
        self._parts.detector.resume(self._state.now)
        ends = list(journal.durable_offset)
        group = self._in_flight
        if group is not None:
            ends = list(group.end_offsets)
            for data in group.data:
                self._parts.log.built(Batch(data, check=False))
        self._parts.replication.leading.end_alone(ends)
        self._parts.groups.agent.list_all()
        self._local.end()
