"""Replication of the log's partitions on one node: those it leads, and those it follows.

This is a pure core. Frames, metadata and the progress of the local disk come in through
`handle_...`; effects collect in `effects` and are carried out in order. The leader of a partition
is its only sequencer. It sends closed batches to every node that follows, commits what is durable
on all in-sync replicas, and announces the high watermark. A node follows every partition that it
does not lead. Commits wait only for nodes that the metadata names as replicas.

A node leads an epoch in one life of its process only. Smallest counter-example: A sends record 7 of
epoch 3 to B, and restarts before its own disk has it. If A led epoch 3 again, it would write
another record 7. The logs of A and B would differ under one epoch, which the comparison by epoch
cannot see. So a node leads nothing before `handle_current`, and asks for a new epoch where it is
the leader then.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from holdfast.node.frame_kinds import (
    COMMIT,
    FOLLOW,
    FOLLOW_FROM,
    REPLICATE,
    REPLICATE_ACK,
    BadFrame,
)
from holdfast.node.metadata.model import ClusterMetadata, NodePhase, PartitionInfo
from holdfast.node.replicate.codec import (
    NEWER,
    decode_ack,
    decode_follow,
    decode_follow_from,
    decode_offsets,
    decode_replicate,
)
from holdfast.node.replicate.config import ReplicationConfig
from holdfast.node.replicate.effects import GivenUp, ProposeInSync, ReplicationEffect
from holdfast.node.replicate.follower import FollowerSide
from holdfast.node.replicate.incomplete import Incomplete
from holdfast.node.replicate.leader import LeaderSide
from holdfast.node.replicate.log import ReplicaLog
from holdfast.node.replicate.state import ReplicaState


class Replication:
    """The replication of all partitions on one node. A partition is led or followed here, never
    both."""

    def __init__(self, node_id: str, log: ReplicaLog, config: ReplicationConfig) -> None:
        self._state = ReplicaState(node_id, log, config)
        self.read_tokens = self._state.read_tokens
        self.leading = LeaderSide(self._state)
        self.commits = self.leading.commits
        self.following = FollowerSide(self._state)
        self._incomplete = Incomplete(self._state)
        self._is_current = False
        self._is_fit = True
        # Per partition, an epoch of this node that an earlier life of its process may have led.
        self._unled: dict[int, int] = {}
        self._renew_at = 0.0

    @property
    def effects(self) -> list[ReplicationEffect]:
        """The effects since the driver last took them, in order."""
        return self._state.effects

    @effects.setter
    def effects(self, effects: list[ReplicationEffect]) -> None:
        self._state.effects = effects

    def leads(self, partition: int) -> bool:
        """True if this node leads the partition now."""
        return self.leading.led[partition] is not None

    def followed_epoch(self, partition: int) -> int:
        """The epoch under which this node follows the partition, with a log that is a prefix of the
        leader's. 0: it does not follow, or not yet."""
        return self.following.followed_epoch(partition)

    def may_append(self, partition: int) -> bool:
        """True if this node leads, and enough replicas are in sync and alive to commit new
        records."""
        led = self.leading.led[partition]
        metadata = self._state.metadata
        return (
            led is not None
            and metadata is not None
            and len(led.info.in_sync) >= metadata.min_insync
            and led.alive >= metadata.min_insync
        )

    def suspend(self, partition: int) -> None:
        """Suspends the partition until `resume`: neither follows nor leads it. If the metadata
        names this node as the leader, another in-sync replica gets it. Without one, GivenUp
        follows."""
        self.following.suspend(partition)

    def set_unfit(self, *, stands_apart: bool = False) -> None:
        """Stops following, and takes no new leadership, because the log here is damaged or an older
        copy. The metadata moves existing leaderships to other nodes, without waiting for this one.
        A node that stands apart ends them itself, because it receives no metadata."""
        self._is_fit = False
        for partition in range(len(self._state.epochs)):
            self.following.suspend(partition)
            if stands_apart:
                self.leading.stop(partition)

    def resume(self, partition: int, now: float) -> None:
        """Ends a suspension by `suspend`, or after Restarted (see
        ReplicationConfig.suspends_restarted)."""
        if not self._is_fit or partition in self._state.broken:
            return
        self.following.resume(partition, now)
        self._finish()

    def break_off(self, partition: int, error: AssertionError) -> None:
        """Stops a partition whose invariant does not hold here. Another in-sync replica gets its
        leadership."""
        self._state.break_off(partition, error)
        self._finish()

    def check(self) -> None:
        """Raises `AssertionError` for an invariant that does not hold between two turns."""
        self._state.check()
        self.leading.check()
        self.following.check()
        for partition, led in enumerate(self.leading.led):
            assert led is None or not self.followed_epoch(partition), "led and followed"

    def handle_metadata(
        self, metadata: ClusterMetadata, changed: Iterable[int], now: float
    ) -> None:
        """Takes over newer metadata. `changed` contains every partition that may differ from
        before."""
        before = self._state.metadata
        if before is not None and metadata.version <= before.version:
            return
        self._state.metadata = metadata
        self._review_incomplete(now)
        for partition in range(len(metadata.partitions)) if before is None else changed:
            info = metadata.partitions[partition]
            try:
                known = 0 if before is None else before.partitions[partition].epoch
                assert known <= info.epoch, f"epoch {info.epoch} follows {known}"
                self._assign_role(partition, info, now)
            except AssertionError as error:
                self._state.break_off(partition, error)
        self.leading.reply_early(now)
        if before is not None and before.nodes is not metadata.nodes:
            self.leading.handle_nodes(frozenset(), now)
        if before is not None and before.min_insync > metadata.min_insync:
            self.leading.commit_more()
        self._finish()

    def handle_current(self, now: float) -> None:
        """Begins to lead. The metadata is now at least as new as every decision made before this
        process began. An older image could name this node the leader of an epoch that another one
        has ended."""
        if self._is_current:
            return
        self._is_current = True
        self._review_incomplete(now)
        self._renew(now)
        self._finish()

    def review_incomplete(
        self, reports: Mapping[str, frozenset[int]], now: float
    ) -> frozenset[int]:
        """Takes the partitions in which connected nodes may be incomplete, and returns those of
        this node; see `incomplete`."""
        if self._incomplete.reports != reports:
            self._incomplete.reports = dict(reports)
            self._renew_at = now
        self._review_incomplete(now)
        return self._incomplete.own()

    def _review_incomplete(self, now: float) -> None:
        """Lets this node lead the partitions that it is known to be complete in."""
        if self._is_current and self._incomplete.review(self.leading.led):
            self._renew_at = now

    def _assign_role(self, partition: int, info: PartitionInfo, now: float) -> None:
        epochs = self._state.epochs
        if info.epoch > epochs[partition]:
            epochs[partition] = info.epoch
        led = self.leading.led[partition]
        if info.leader != self._state.node_id or info.epoch < epochs[partition]:
            self._unled.pop(partition, None)
            self.leading.stop(partition)
            self.following.follow(partition, info.leader, info.epoch, now)
        elif led is not None and led.epoch == info.epoch:
            self.leading.update(led, info, now)
        else:
            self.leading.stop(partition)
            self.following.stop(partition)
            if self._may_lead(partition, info):
                self._unled.pop(partition, None)
                self.following.leads(partition)
                self.leading.lead(partition, info, now)
            else:
                self._unled[partition] = info.epoch
                self._renew_at = now

    def _may_lead(self, partition: int, info: PartitionInfo) -> bool:
        return (
            self._is_current
            and self._is_fit
            and self._is_known()
            and partition not in self._state.suspended
            and partition not in self._state.incomplete
            and info.epoch != self._unled.get(partition, -1)
        )

    def _is_known(self) -> bool:
        metadata = self._state.metadata
        assert metadata is not None
        node = metadata.nodes.get(self._state.node_id)
        return node is not None and node.incarnation == self._state.config.incarnation

    def _renew(self, now: float) -> None:
        """Proposes new epochs for partitions that this node leads by an epoch that it must not
        use."""
        self._renew_at = now + self._state.config.proposal_retry_s
        if not self._unled or not self._is_current or not self._is_known() or not self._is_fit:
            return
        for partition, epoch in self._unled.items():
            info = self._state.info(partition)
            assert info is not None
            if partition in self._state.broken and len(info.in_sync) == 1:
                # No other replica has everything, so the partition waits for a restart.
                continue
            renewed = replace(info, epoch=epoch + 1)
            if partition in self._state.suspended:
                renewed = self._handed_over(partition, renewed)
            elif partition in self._state.incomplete:
                successor = self._incomplete.successor(partition, renewed)
                if successor is None:
                    continue
                renewed = successor
            self._state.effects.append(ProposeInSync(partition, info.version, renewed))

    def _handed_over(self, partition: int, info: PartitionInfo) -> PartitionInfo:
        """The partition with another in-sync replica as leader. If all of those are down, it has no
        leader until one is back."""
        metadata = self._state.metadata
        assert metadata is not None
        others = tuple(node for node in info.in_sync if node != self._state.node_id)
        if not others:
            self._state.suspended.discard(partition)
            self._state.effects.append(GivenUp(partition))
            return info
        able = [
            node
            for node in others
            if node in info.replicas and metadata.nodes[node].state != NodePhase.DOWN
        ]
        return replace(info, leader=able[0] if able else "", in_sync=others)

    def _note_epochs(self, newer: list[tuple[int, int]]) -> None:
        """Stops leading and following under epochs older than these."""
        epochs = self._state.epochs
        for partition, epoch in newer:
            if epoch > epochs[partition]:
                epochs[partition] = epoch
                self._unled.pop(partition, None)
                self.leading.stop(partition)
                self.following.await_epoch(partition, epoch)

    def handle_unhealthy(
        self, nodes: frozenset[str], now: float, unmet: frozenset[str] = frozenset()
    ) -> None:
        """Keeps these nodes from entering an in-sync set. They are silent here, or report an
        untrustworthy disk."""
        met = self._state.unmet - unmet
        self._state.unmet = unmet
        if met or nodes != self._state.unhealthy:
            self._state.unhealthy = nodes
            self.leading.handle_nodes(met, now)
            self._finish()

    def handle_connected(self, node: str, now: float) -> None:
        self.leading.handle_connected(node, now)
        self.following.handle_disconnected(node)
        self.following.handle_connected(node, now)
        self._finish()

    def handle_disconnected(self, node: str, now: float) -> None:
        self.leading.handle_disconnected(node, now)
        self.following.handle_disconnected(node)
        self._finish()

    def handle_frame(self, node: str, kind: int, payload: bytes, now: float) -> None:
        """Dispatches a frame of replication.

        Raises `BadFrame` if the payload is invalid; the caller closes the link.
        """
        self._state.now = now
        if kind == REPLICATE:
            self.following.handle_replicate(node, decode_replicate(payload), now)
        elif kind == REPLICATE_ACK:
            received, acks = decode_ack(payload)
            self._note_epochs(self.leading.handle_ack(node, received, acks, now))
        elif kind == COMMIT:
            self.following.handle_commit(node, decode_offsets("COMMIT", payload))
        elif kind == FOLLOW:
            incarnation, questions = decode_follow(payload)
            self._note_epochs(self.leading.handle_follow(node, incarnation, questions, now))
        elif kind == FOLLOW_FROM:
            answers = decode_follow_from(payload)
            self._note_epochs([(entry[0], entry[1]) for entry in answers if entry[3] == NEWER])
            self.following.handle_follow_from(node, answers, now)
            self.following.handle_durable()
        else:
            raise BadFrame(f"kind {kind} is none of replication's")
        self._finish()

    def handle_taken(self, batches: Sequence[tuple[int, int, int, bytes]], now: float) -> None:
        """Sends the batches that this node, as leader, has just closed: (partition, base offset,
        end offset, bytes). The driver calls this before any other handler, in the order of the
        batches."""
        self._state.now = now
        self.leading.handle_taken(batches, now)
        self._finish()

    def handle_durable(self, now: float) -> None:
        """Reacts to a change of the log's `durable_offset`."""
        self._state.now = now
        self.leading.handle_durable()
        self.following.handle_durable()
        self._finish()

    def awaits_disk(self) -> bool:
        """True if a commit or an acknowledgement of this node waits for its disk alone."""
        return self.following.awaits_disk() or self.leading.awaits_disk()

    def handle_batches(self, request: int, batches: list[bytes], now: float) -> None:
        """Takes the result of a ReadBatches."""
        self.leading.handle_batches(request, batches, now)
        self._finish()

    def timer(self) -> float | None:
        due = self.leading.timer()
        asking = self.following.timer()
        if asking is not None and (due is None or asking < due):
            due = asking
        if self._unled and self._is_current and (due is None or self._renew_at < due):
            due = self._renew_at
        return due

    def handle_timers(self, now: float) -> None:
        self.leading.handle_timers(now)
        self.following.handle_timers(now)
        if now >= self._renew_at:
            self._renew(now)
        self._finish()

    def _finish(self) -> None:
        for partition in self._state.broken:
            led = self.leading.led[partition]
            if led is not None:
                self.leading.stop(partition)
                self._unled[partition] = led.epoch
                self._renew_at = 0.0
            self.following.suspend(partition)
        self.commits.flush()
        self.following.flush()
