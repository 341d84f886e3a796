"""Follows the leaders of all partitions that this node does not lead.

The follower asks the leader from where to continue (FOLLOW: the epoch and the end of its own log).
It cuts off what the leader's log does not have, and appends batches as they arrive. Logs are
compared by epoch and never by high watermark. Two logs that both have a batch of one epoch are
equal up to there. The reason: an epoch has one leader, in one life of its process, and leaders only
append.

- Batches and high watermarks count only after the reply GO_ON to the newest request, and before the
  next request. They count only from the leader of the newest epoch that this node knows.
- The follower acknowledges only records that are durable here and in the leader's log.
- The high watermark here is never above the durable end here.
"""

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from holdfast.log.batch import Batch
from holdfast.node.frame_kinds import FOLLOW, REPLICATE_ACK, BadFrame
from holdfast.node.metadata.model import PartitionInfo
from holdfast.node.replicate.codec import (
    ASK,
    CUT,
    FOLLOW_ENTRY,
    GO_ON,
    NEWER,
    OFFSET_ENTRY,
    RESET,
    FollowFromEntry,
    OffsetEntry,
    encode_ack,
    encode_follow,
)
from holdfast.node.replicate.effects import Diverged, ProposeInSync, Restarted, Send
from holdfast.node.replicate.log_matching import cut_offset
from holdfast.node.replicate.state import ReplicaState

WAITING: Final = 0
"""There is no leader, or no link to it, or newer metadata must come first, or it is suspended."""
ASKING: Final = 1
FOLLOWING: Final = 2
STUCK: Final = 3
"""This node has records that the leader lacks: committed ones, or after a start perhaps so."""


class FollowedPartition:
    """A partition as its follower sees it."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.leader = ""
        self.epoch = 0
        self.state = WAITING
        # The number of the newest request. Replies to older ones are void: the log may have changed
        # since.
        self.request = 0
        # The durable end that was last sent to the leader. Invariant: it is durable here.
        self.acknowledged = 0
        # It never falls while the leader and its epoch stay.
        self.leader_watermark = 0
        # The epoch whose leader was found to lack records that are committed here.
        self.diverged_epoch = 0
        # This process has neither followed nor led it.
        self.is_untouched = True
        # Its log extends beyond the durable or acknowledged end.
        self.is_dirty = False


class LeaderLink:
    """The link to another node, as its follower sees it."""

    def __init__(self, node: str) -> None:
        self.node = node
        # Bytes of batches received on this link.
        self.received_bytes = 0
        # Some of those bytes are never acknowledged with an offset. The leader must be sent the
        # count, or it takes them for under way and its window stays full.
        self.has_ignored = False
        self.questions: list[bytes] = []
        self.acknowledgements: list[bytes] = []


class FollowerSide:
    """The partitions that this node follows, and the links to their leaders."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._partitions = [FollowedPartition(number) for number in range(len(state.epochs))]
        self._sources: dict[str, LeaderLink] = {}
        self._requests = 0
        self._asking: dict[int, FollowedPartition] = {}
        self._retry_at = 0.0
        self._dirty: list[FollowedPartition] = []

    def follow(self, partition: int, leader: str, epoch: int, now: float) -> None:
        """Follows the leader that the metadata names (empty: none), unless that is so already."""
        followed = self._partitions[partition]
        known = self._state.epochs[partition]
        if epoch < known:
            leader = ""
        if followed.leader == leader and followed.epoch == epoch:
            return
        self._wait(followed)
        followed.leader = leader
        followed.epoch = epoch
        followed.leader_watermark = 0
        self._begin(followed, now)

    def suspend(self, partition: int) -> None:
        """Suspends the partition until `resume`."""
        self._state.suspended.add(partition)
        self._wait(self._partitions[partition])

    def resume(self, partition: int, now: float) -> None:
        self._state.suspended.discard(partition)
        followed = self._partitions[partition]
        if followed.state == WAITING:
            self._begin(followed, now)

    def _begin(self, followed: FollowedPartition, now: float) -> None:
        source = self._sources.get(followed.leader)
        partition = followed.partition
        if (
            source is not None
            and partition not in self._state.suspended
            and self._state.is_wanted(partition)
        ):
            self._send_follow(followed, source, now)

    def review(self, partition: int, now: float) -> None:
        """Begins to follow if the log is wanted now, and was not before."""
        followed = self._partitions[partition]
        if followed.state == WAITING:
            self._begin(followed, now)

    def set_wanted(self, is_wanted: Callable[[int], bool]) -> None:
        """Follows only partitions whose log is wanted here."""
        self._state.is_wanted = is_wanted

    def leads(self, partition: int) -> None:
        """Notes that this node begins to lead the partition."""
        self._partitions[partition].is_untouched = False

    def stop(self, partition: int) -> None:
        """Stops following, because this node leads the partition or knows no leader."""
        followed = self._partitions[partition]
        self._wait(followed)
        followed.leader = ""
        followed.epoch = 0

    def handle_connected(self, node: str, now: float) -> None:
        source = LeaderLink(node)
        self._sources[node] = source
        for followed in self._partitions:
            if followed.leader == node:
                self._wait(followed)
                self._begin(followed, now)

    def handle_disconnected(self, node: str) -> None:
        if self._sources.pop(node, None) is not None:
            for followed in self._partitions:
                if followed.leader == node:
                    self._wait(followed)

    def handle_follow_from(self, node: str, entries: list[FollowFromEntry], now: float) -> None:
        source = self._sources.get(node)
        if source is None:
            return
        for partition, epoch, request, action, cut_epoch, offset, watermark in entries:
            followed = self._followed(partition)
            if action == NEWER:
                continue
            if followed.leader != node or followed.epoch != epoch:
                continue
            if action == ASK:
                if followed.state == FOLLOWING:
                    self._send_follow(followed, source, now)
            elif followed.state == ASKING and followed.request == request:
                self._handle_reply(followed, source, action, cut_epoch, offset, watermark, now)

    def _handle_reply(
        self,
        followed: FollowedPartition,
        source: LeaderLink,
        action: int,
        cut_epoch: int,
        offset: int,
        watermark: int,
        now: float,
    ) -> None:
        partition = followed.partition
        log = self._state.log
        if action == CUT:
            self._cut(followed, cut_epoch, offset)
        elif action == RESET:
            self._reset(followed, offset)
        elif offset != log.next_offset[partition]:
            raise BadFrame(
                f"partition {partition}: go on from {offset}, "
                f"the log ends at {log.next_offset[partition]}"
            )
        if followed.state != ASKING:
            return
        if action != GO_ON:
            self._send_follow(followed, source, now)
            return
        del self._asking[partition]
        followed.state = FOLLOWING
        followed.is_untouched = False
        followed.leader_watermark = watermark
        self._mark(followed)
        self._commit(followed)

    def _cut(self, followed: FollowedPartition, cut_epoch: int, offset: int) -> None:
        partition = followed.partition
        log = self._state.log
        offset = cut_offset(log, partition, cut_epoch, offset)
        if offset >= log.next_offset[partition]:
            raise BadFrame(
                f"partition {partition}: cut at {offset}, "
                f"the log ends at {log.next_offset[partition]}"
            )
        if offset < log.high_watermark[partition]:
            self._diverged(followed, f"asks to cut at {offset}")
            return
        info = self._info_to_lead(followed) if followed.is_untouched else None
        if info is not None and partition not in self._state.incomplete:
            # All nodes may have been killed, and the file of the leader has lost its end. Then
            # records above that end may be committed, and the leader must not cut them here. A node
            # that has followed or led since its start cuts. Otherwise two logs of different epochs
            # would depose each other for ever. One that may lack committed records cuts, too.
            self._take_over(followed, info)
            return
        log.truncate(partition, offset)

    def _reset(self, followed: FollowedPartition, offset: int) -> None:
        partition = followed.partition
        log = self._state.log
        if offset < log.high_watermark[partition]:
            self._diverged(followed, f"asks to begin anew at {offset}")
            return
        log.reset(partition, offset)
        self._state.effects.append(Restarted(partition, offset))
        if self._state.config.suspends_restarted:
            self.suspend(partition)

    def _diverged(self, followed: FollowedPartition, what: str) -> None:
        """Reports a leader that lacks records it had acknowledged, restored from an older copy.
        Every replica in sync has all committed records, so this node asks to lead while it is in
        sync. The replica with the most leads in the end, because each with more asks too."""
        partition = followed.partition
        state = self._state
        watermark = state.log.high_watermark[partition]
        text = f"the leader {what}, below what is committed here, {watermark}"
        followed.state = STUCK
        info = self._info_to_lead(followed)
        takes_over = info is not None
        if not takes_over:
            self._asking.pop(partition, None)
        if followed.diverged_epoch != followed.epoch or not takes_over:
            followed.diverged_epoch = followed.epoch
            state.effects.append(Diverged(partition, followed.leader, text, takes_over))
        if info is not None:
            # If this node may lack records too, the leader has lost more.
            state.incomplete.discard(partition)
            self._take_over(followed, info)

    def _info_to_lead(self, followed: FollowedPartition) -> PartitionInfo | None:
        """The partition by the metadata if this node may ask to lead it in place of the leader that
        it follows. It may while it is in sync: it then has every committed record."""
        state = self._state
        info = state.info(followed.partition)
        is_able = (
            info is not None
            and info.leader == followed.leader
            and info.epoch == followed.epoch
            and state.node_id in info.in_sync
            and state.node_id in info.replicas
        )
        return info if is_able else None

    def _take_over(self, followed: FollowedPartition, info: PartitionInfo) -> None:
        """Asks to lead, without the leader in sync. The question and the proposal are repeated: the
        partition may have changed meanwhile."""
        followed.state = STUCK
        in_sync = tuple(node for node in info.in_sync if node != info.leader)
        changed = replace(info, leader=self._state.node_id, epoch=info.epoch + 1, in_sync=in_sync)
        self._state.effects.append(ProposeInSync(followed.partition, info.version, changed))

    def handle_replicate(self, node: str, batches: list[tuple[int, Batch]], now: float) -> None:
        source = self._sources.get(node)
        if source is None:
            return
        log = self._state.log
        for epoch, batch in batches:
            source.received_bytes += batch.length
            partition = batch.partition
            followed = self._followed(partition)
            if self._is_refused(source, partition, epoch):
                continue
            if (
                followed.state != FOLLOWING
                or followed.leader != node
                or followed.epoch != epoch
                or batch.base_offset < log.next_offset[partition]
            ):
                source.has_ignored = True
            elif batch.base_offset > log.next_offset[partition]:
                self._send_follow(followed, source, now)
            elif batch.epoch < log.last_epoch(partition):
                raise BadFrame(
                    f"partition {partition}: a batch of epoch {batch.epoch} "
                    f"after one of {log.last_epoch(partition)}"
                )
            else:
                try:
                    log.append_batch(batch)
                except AssertionError as error:
                    self._state.break_off(partition, error)
                self._mark(followed)

    def _is_refused(self, source: LeaderLink, partition: int, epoch: int) -> bool:
        """True if the sender's epoch is too old; it is then sent the newer one."""
        known = self._state.epochs[partition]
        if epoch >= known:
            return False
        source.acknowledgements.append(OFFSET_ENTRY.pack(partition, known, 0))
        return True

    def handle_commit(self, node: str, entries: list[OffsetEntry]) -> None:
        for partition, epoch, offset in entries:
            followed = self._followed(partition)
            if (
                followed.state == FOLLOWING
                and followed.leader == node
                and followed.epoch == epoch
                and offset > followed.leader_watermark
            ):
                followed.leader_watermark = offset
                self._commit(followed)

    def awaits_disk(self) -> bool:
        """True if a leader waits for the disk of this node."""
        return bool(self._dirty)

    def handle_durable(self) -> None:
        """Acknowledges the records that have become durable."""
        dirty = self._dirty
        if not dirty:
            return
        self._dirty = []
        log = self._state.log
        for followed in dirty:
            followed.is_dirty = False
            if followed.state != FOLLOWING:
                continue
            partition = followed.partition
            durable = self._durable_end(partition)
            if durable > followed.acknowledged:
                followed.acknowledged = durable
                self._sources[followed.leader].acknowledgements.append(
                    OFFSET_ENTRY.pack(partition, followed.epoch, durable)
                )
                self._commit(followed)
            if durable < log.next_offset[partition]:
                self._mark(followed)

    def await_epoch(self, partition: int, epoch: int) -> None:
        """Follows no leader until the metadata has this newer epoch."""
        followed = self._partitions[partition]
        if epoch > followed.epoch:
            self._wait(followed)
            followed.leader = ""

    def flush(self) -> None:
        """Sends the collected acknowledgements and requests."""
        for source in self._sources.values():
            if source.acknowledgements or source.has_ignored:
                payload = encode_ack(source.received_bytes, source.acknowledgements)
                source.acknowledgements = []
                source.has_ignored = False
                self._state.effects.append(Send(source.node, REPLICATE_ACK, payload))
            if source.questions:
                payload = encode_follow(self._state.config.incarnation, source.questions)
                source.questions = []
                self._state.effects.append(Send(source.node, FOLLOW, payload))

    def timer(self) -> float | None:
        return self._retry_at if self._asking else None

    def handle_timers(self, now: float) -> None:
        if self._asking and now >= self._retry_at:
            asking, self._asking = self._asking, {}
            for followed in asking.values():
                self._send_follow(followed, self._sources[followed.leader], now)

    def followed_epoch(self, partition: int) -> int:
        followed = self._partitions[partition]
        return followed.epoch if followed.state == FOLLOWING else 0

    def _followed(self, partition: int) -> FollowedPartition:
        if partition >= len(self._partitions):
            raise BadFrame(f"partition {partition}, there are {len(self._partitions)}")
        return self._partitions[partition]

    def _wait(self, followed: FollowedPartition) -> None:
        self._leave(followed)
        followed.state = WAITING
        self._asking.pop(followed.partition, None)

    def _leave(self, followed: FollowedPartition) -> None:
        if followed.is_dirty and followed.state == FOLLOWING:
            source = self._sources.get(followed.leader)
            if source is not None:
                source.has_ignored = True

    def _send_follow(self, followed: FollowedPartition, source: LeaderLink, now: float) -> None:
        if not self._asking:
            self._retry_at = now + self._state.config.follow_retry_s
        partition = followed.partition
        self._asking[partition] = followed
        self._requests = (self._requests + 1) & 0xFFFFFFFF
        log = self._state.log
        self._leave(followed)
        followed.state = ASKING
        followed.request = self._requests
        followed.acknowledged = self._durable_end(partition)
        source.questions.append(
            FOLLOW_ENTRY.pack(
                partition,
                followed.epoch,
                followed.request,
                log.last_epoch(partition),
                log.next_offset[partition],
                followed.acknowledged,
            )
        )

    def _durable_end(self, partition: int) -> int:
        return self._state.log.durable_offset[partition]

    def _mark(self, followed: FollowedPartition) -> None:
        if not followed.is_dirty:
            followed.is_dirty = True
            self._dirty.append(followed)

    def _commit(self, followed: FollowedPartition) -> None:
        partition = followed.partition
        durable = self._state.log.durable_offset[partition]
        try:
            assert followed.acknowledged <= durable, "more is acknowledged than is durable"
            self._state.commit(partition, min(followed.leader_watermark, durable))
        except AssertionError as error:
            self._state.break_off(partition, error)

    def check(self) -> None:
        """Raises `AssertionError` for an invariant of a followed partition that does not hold."""
        for followed in self._partitions:
            partition = followed.partition
            assert followed.epoch <= self._state.epochs[partition], "an unknown epoch is followed"
            # A stuck one repeats its question if this node is to take over.
            may_ask = followed.state in (ASKING, STUCK)
            assert may_ask if partition in self._asking else followed.state != ASKING
            if followed.state in (ASKING, FOLLOWING):
                assert partition not in self._state.suspended, "a suspended partition is followed"
                assert followed.leader in self._sources, "its leader is not connected"
            if followed.state == FOLLOWING:
                durable = self._state.log.durable_offset[partition]
                assert followed.acknowledged <= durable, "more is acknowledged than is durable"
