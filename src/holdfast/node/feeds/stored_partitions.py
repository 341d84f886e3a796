"""Decides which partitions a data node stores: those of which the metadata names it as a member.

A partition is in one of four states here:

stored   its log is here, and is applied
leaving  its log is here and does not grow; its leader was asked to feed this node
fed      its log is not here
copied   it is fed, and its log is copied from its leader until that has everything that was fed

Invariants
- A partition that this node leads or is in sync for is stored, or its copied log has everything
  that is committed.
- The log is forgotten only after the present leader has begun to feed this node, and so counts on
  nothing that this node has stored (`LeaderSide.release`). Counter-example: this node is behind in
  the metadata, and the later one has it in sync. Its log would be one of the copies that count.
- No partition is forgotten while a node may not be able to feed it.
"""

from collections.abc import Callable, Mapping

from holdfast.node.context import ClusterContext
from holdfast.node.disk_full import DiskSpace
from holdfast.node.features import FEEDS
from holdfast.node.feeds.feeds import Feeds
from holdfast.node.metadata.model import PartitionInfo
from holdfast.node.publish.apply import Applier
from holdfast.node.publish.leader_sync import LeaderSync
from holdfast.node.replicate.replication import Replication
from holdfast.node.state.transfer import Transfer


class StoredPartitions:
    """The changes of a node's partitions from one state to another."""

    def __init__(
        self,
        context: ClusterContext,
        applier: Applier,
        replication: Replication,
        alignment: LeaderSync,
        transfer: Transfer,
        space: DiskSpace,
        feeds: Feeds,
    ) -> None:
        self._context = context
        self._applier = applier
        self._replication = replication
        self._alignment = alignment
        self._transfer = transfer
        self._space = space
        self._feeds = feeds
        self.announce_groups: Callable[[], None] = lambda: None
        """Announces the filters of all groups that are coordinated here. Parts sets it."""
        # What the last step saw.
        self._seen: tuple[object, ...] = ()
        self._is_due = True
        applier.on_copied = self._copied
        feeds.server.charge = replication.read_tokens.charge
        replication.following.set_wanted(self._is_wanted)
        feeds.server.release = replication.leading.release
        feeds.receiver.on_accepted = self._accepted

    def begin(self, unstored: Mapping[int, int]) -> None:
        """Goes on with the partitions that were not stored when the process began."""
        journal = self._context.journal
        for partition, offset in unstored.items():
            if journal.start_offsets[partition] == journal.next_offset[partition]:
                self._replication.suspend(partition)
                self._applier.begin_fed(partition, offset)
            else:
                self._applier.copy(partition, offset)

    def step(self, now: float, *, is_current: bool) -> None:
        """Follows the metadata, at the end of a turn. `is_current`: it is as new as everything that
        was decided before this process began."""
        context = self._context
        metadata = context.metadata
        if metadata is None or not is_current or not context.has_data or context.is_alone:
            return
        seen = (metadata.version, len(context.features), len(context.connected))
        if seen == self._seen and not self._is_due:
            return
        self._seen = seen
        self._is_due = False
        must_store = bool(context.nodes_without(FEEDS))
        may_forget = not must_store and not context.nodes_unknown()
        for partition, info in enumerate(metadata.partitions):
            if self._is_member(info) or must_store:
                self._store(partition, info, now)
            elif may_forget or self._may_be_fed(partition, info):
                self._leave(partition, info)
        # Sends what following has gathered.
        self._replication.handle_durable(now)

    def _is_member(self, info: PartitionInfo) -> bool:
        own = self._context.node_id
        return own in info.members or own in info.in_sync or info.leader == own

    def _may_be_fed(self, partition: int, info: PartitionInfo) -> bool:
        """True if there is nothing to forget, and the leader feeds this node."""
        context = self._context
        is_empty = not context.journal.next_offset[partition]
        return is_empty and context.understands(info.leader, FEEDS)

    def _is_wanted(self, partition: int) -> bool:
        """False for an empty log that the metadata does not ask for. Counter-example: a new node
        copies all logs, and forgets most of them."""
        context = self._context
        return (
            context.metadata is None
            or self._is_member(context.metadata.partitions[partition])
            or context.journal.next_offset[partition] > 0
            or bool(context.nodes_without(FEEDS))
        )

    def _store(self, partition: int, info: PartitionInfo, now: float) -> None:
        """Begins to store a partition, unless it is stored or copied."""
        context = self._context
        if partition in context.leaving:
            self._stay(partition, now)
        elif partition in context.unstored and partition not in context.copied:
            if self._transfer.lacks(partition) or self._space.suspended:
                self._is_due = True
            elif info.leader == context.node_id:
                # An operator has given up the records of all nodes that had them.
                self._applier.begin_log(partition)
                self._transfer.save(partition)
                self._copied(partition)
                self._replication.resume(partition, now)
            else:
                self._applier.store(partition)
                self._replication.resume(partition, now)
        else:
            self._replication.following.review(partition, now)

    def _leave(self, partition: int, info: PartitionInfo) -> None:
        """Asks for the feed of a partition, unless that was done."""
        context = self._context
        if partition in context.leaving or not context.may_follow(partition):
            return
        transfer = self._transfer
        if (
            transfer.lacks(partition)
            or partition in transfer.unsaved
            or not info.leader
            or context.leads(partition)
            or self._replication.leads(partition)
        ):
            self._is_due = True
            return
        if not context.unstored:
            self.announce_groups()
        fed = self._feeds.receiver.partitions[partition]
        fed.marked = context.journal.last_epoch(partition)
        if self._replication.followed_epoch(partition) == info.epoch:
            fed.generation = context.generation
        self._replication.suspend(partition)
        context.unstored.add(partition)
        context.leaving.add(partition)
        self._applier.pause(partition)
        self._alignment.lose(partition)

    def _accepted(self, partition: int, is_fed: bool, now: float) -> None:
        """Forgets the log that this node leaves, or goes on with it."""
        if is_fed:
            self._context.leaving.discard(partition)
            self._applier.forget(partition)
        else:
            self._stay(partition, now)
            self._is_due = True

    def _stay(self, partition: int, now: float) -> None:
        """Goes on with the log here."""
        context = self._context
        context.leaving.discard(partition)
        if partition not in context.copied:
            self._copied(partition)
            self._applier.apply_to(partition, context.journal.high_watermark[partition])
        if not self._space.suspended:
            self._replication.resume(partition, now)

    def _copied(self, partition: int) -> None:
        """Goes on from the log. Records of this node that the feed has aligned stay so."""
        is_aligned = self._feeds.receiver.is_live(partition)
        self._feeds.receiver.end(partition)
        self._context.unstored.discard(partition)
        if not is_aligned and not self._context.leads(partition):
            self._alignment.lose(partition)
