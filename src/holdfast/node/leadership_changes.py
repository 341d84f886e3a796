"""Carries a metadata change into a cluster node: leaderships, replication, session reports."""

from holdfast.node.metadata.model import DATA, WITNESS, ClusterMetadata
from holdfast.node.parts import Parts
from holdfast.node.state.replicated import CLOCK_SLACK_S


class LeadershipChanges:
    """The order in which the parts of a node take a new leadership or new metadata."""

    def __init__(self, parts: Parts) -> None:
        self._node_id = parts.meta.node_id
        self._is_witness = parts.config.role == WITNESS
        self._has_data = parts.config.role == DATA
        self._context = parts.context
        self._parts = parts
        self._state = parts.state
        self.failovers = 0
        # The partitions that this node has begun to lead in this turn.
        self._won: list[int] = []

    def lead(self, partition: int, epoch: int) -> None:
        """Begins to lead a partition.

        The uncommitted records are loaded before this node's own pending records are admitted, so
        that admission recognises repetitions among them.
        """
        self._context.leading[partition] = epoch
        self._context.uncompared.add(partition)
        if self._state.delivered[partition] > self._context.journal.next_offset[partition]:
            # Its log was being copied. The records that define its state are given up.
            self._parts.transfer.save(partition)
        self._parts.feeds.receiver.partitions[partition].generation = self._context.generation
        self._parts.admission.start_leading(partition, list(self._parts.log.uncommitted[partition]))
        needs_no_wait = self._parts.alignment.lead(partition)
        # Void records come before this node's own.
        self.compare()
        if needs_no_wait and not self._parts.forwarding.target(partition):
            self._align(partition)
        self._parts.session_coordinator.start_leading(partition)
        self._parts.groups.start_leading(partition, epoch)
        self._won.append(partition)
        self._parts.acquisition.leader_changed(partition)

    def compare(self) -> None:
        """Lets records come to the partitions that all replicas in sync follow now."""
        if not self._context.uncompared:
            return
        for partition in self._parts.alignment.compare():
            if not self._parts.forwarding.target(partition):
                self._align(partition)
            self._parts.feeds.server.align(partition)
        self._parts.admission.voider.advance()

    def _align(self, partition: int) -> None:
        """Lets this node's records come to a partition that it leads."""
        epoch = self._context.leading[partition]
        known = self._parts.applier.tickets(partition)
        self._parts.forwarding.aligned(partition, self._node_id, epoch, known)

    def report_won(self) -> None:
        """Reports this node's sessions to itself, for all partitions of one turn together. A
        request that was decided before is one that came before the report."""
        won = [partition for partition in self._won if self._context.leads(partition)]
        self._won = []
        if won:
            self._parts.acquisition.tell_owned(self._node_id, won)

    def stop_leading(self, partition: int) -> None:
        """Ends the leadership of a partition. From here on this node appends nothing to it."""
        assert not self._context.is_alone
        self._context.leading[partition] = 0
        self._context.uncompared.discard(partition)
        self._parts.admission.stop_leading(partition)
        self._parts.feeds.server.stop_leading(partition)
        self._parts.session_coordinator.stop_leading(partition)
        self._parts.groups.stop_leading(partition)
        self._parts.alignment.lose(partition)

    def take_metadata(
        self, metadata: ClusterMetadata, changed: tuple[int, ...], now: float
    ) -> bool:
        """Takes new metadata. `changed`: its changed partitions. Returns True if the nodes or
        the replication have changed too."""
        before = self._context.metadata
        self._context.metadata = metadata
        self._state.was_put_back = metadata.generation is not None
        if before is not None:
            self._parts.history.add_change(before, metadata, changed, self._state.wall_us)
        moved = self._moved(before, metadata, changed)
        for partition in moved:
            self._parts.groups.agent.lose(partition)
            old = "" if before is None else before.partitions[partition].leader
            if metadata.partitions[partition].leader == self._node_id:
                self.failovers += old != "" and self._context.is_gone(old)
            elif not self._is_witness:
                self._parts.alignment.lose(partition)
        if self._has_data:
            self._parts.replication.handle_metadata(metadata, changed, now)
        self.compare()
        has_other_nodes = before is None or before.nodes is not metadata.nodes
        is_resized = before is None or (
            before.replication,
            before.replication_factor,
            before.min_insync,
        ) != (metadata.replication, metadata.replication_factor, metadata.min_insync)
        if has_other_nodes:
            self._take_nodes(before, metadata, now)
        led: dict[str, list[int]] = {}
        for partition in moved:
            leader = metadata.partitions[partition].leader
            if leader and leader != self._node_id:
                led.setdefault(leader, []).append(partition)
                self._parts.acquisition.leader_changed(partition)
        for leader, partitions in led.items():
            self._parts.acquisition.tell_owned(leader, partitions)
        return has_other_nodes or is_resized

    def _moved(
        self, before: ClusterMetadata | None, metadata: ClusterMetadata, changed: tuple[int, ...]
    ) -> list[int]:
        """Returns the partitions with another leader, or another epoch of the same one."""
        moved: list[int] = []
        for partition in changed:
            info = metadata.partitions[partition]
            old = None if before is None else before.partitions[partition]
            if old is None or old.leader != info.leader or old.epoch != info.epoch:
                moved.append(partition)
        return moved

    def _take_nodes(
        self, before: ClusterMetadata | None, metadata: ClusterMetadata, now: float
    ) -> None:
        self._parts.detector.set_members(tuple(metadata.nodes), now)
        self._parts.replicated.clock_slack_us = 0
        if tuple(metadata.nodes) != (self._node_id,):
            self._parts.replicated.clock_slack_us = int(CLOCK_SLACK_S * 1e6)
            self._context.began_at = None
        for node in metadata.nodes if before is None else before.nodes:
            if self._context.is_gone(node):
                self._parts.session_coordinator.node_gone(node)
                self._parts.groups.coordinator.node_down(node)
        own = metadata.nodes.get(self._node_id)
        if before is None or before.nodes.get(self._node_id) != own:
            # A node that was marked down has no assigned records in any group until it reports them
            # again.
            self._parts.groups.agent.lose_all()
        self._parts.interest.release()

    def tell_owned(self, node: str) -> None:
        """Reports this node's sessions to `node` over its new link, for the partitions that it
        leads."""
        metadata = self._context.metadata
        if metadata is None:
            return
        partitions = [
            partition for partition, info in enumerate(metadata.partitions) if info.leader == node
        ]
        if partitions:
            self._parts.acquisition.tell_owned(node, partitions)
