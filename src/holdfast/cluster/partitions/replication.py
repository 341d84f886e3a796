"""Replication of the log's partitions on one node: those it leads, and those it follows.

A pure core: frames, metadata and the progress of the local disk come in through `handle_...`,
effects gather in `effects`, to be carried out in order. The leader of a partition is its only
sequencer. It sends closed batches to every node that follows, commits what is durable on all
in-sync replicas, and tells the followers. Every node follows every partition that it does not lead;
only those that the metadata names as replicas can be waited for.

A node leads an epoch in one life of its process only. Having sent what it has not made durable, it
may have lost it, and would write something else in its place under the same epoch. So it leads
nothing before `handle_current`, and asks for a new epoch where it finds itself the leader then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from holdfast.cluster.frame_kinds import (
    COMMIT,
    FOLLOW,
    FOLLOW_FROM,
    REPLICATE,
    REPLICATE_ACK,
    BadFrame,
)
from holdfast.cluster.metadata.model import ClusterMetadata, NodePhase, PartitionInfo
from holdfast.cluster.partitions.codec import (
    NEWER,
    decode_ack,
    decode_follow,
    decode_follow_from,
    decode_offsets,
    decode_replicate,
)
from holdfast.cluster.partitions.config import ReplicationConfig
from holdfast.cluster.partitions.effects import GivenUp, ProposeInSync, ReplicationEffect
from holdfast.cluster.partitions.follower import FollowerSide
from holdfast.cluster.partitions.leader import LeaderSide
from holdfast.cluster.partitions.log import ReplicaLog
from holdfast.cluster.partitions.state import ReplicaState


class Replication:
    def __init__(self, node_id: str, log: ReplicaLog, config: ReplicationConfig) -> None:
        self._state = ReplicaState(node_id, log, config)
        self._leading = LeaderSide(self._state)
        self._following = FollowerSide(self._state)
        self._is_current = False
        self._is_fit = True
        # Per partition an epoch of this node that an earlier life of its process may have led,
        # and when it asked for another.
        self._unled: dict[int, int] = {}
        self._renew_at = 0.0

    @property
    def effects(self) -> list[ReplicationEffect]:
        return self._state.effects

    @effects.setter
    def effects(self, effects: list[ReplicationEffect]) -> None:
        self._state.effects = effects

    def leads(self, partition: int) -> bool:
        return self._leading.led[partition] is not None

    def followed_epoch(self, partition: int) -> int:
        """The epoch under which this node follows the partition, its log being the beginning of
        the leader's; 0: it does not, or not yet."""
        return self._following.followed_epoch(partition)

    def may_append(self, partition: int) -> bool:
        """This node leads, and enough replicas are in sync and alive to commit what it appends."""
        led = self._leading.led[partition]
        metadata = self._state.metadata
        return (
            led is not None
            and metadata is not None
            and len(led.info.in_sync) >= metadata.min_insync
            and led.alive >= metadata.min_insync
        )

    def hold(self, partition: int) -> None:
        """Neither follow nor lead it before `resume`. Where the metadata names this node as the
        leader another one in sync gets it; GivenUp if there is none."""
        self._following.hold(partition)

    def set_unfit(self) -> None:
        """The log here is damaged: follow nothing any more, and lead nothing that is not led
        already. That goes to others by the metadata, which does not wait for this node."""
        self._is_fit = False
        for partition in range(len(self._state.epochs)):
            self._following.hold(partition)

    def resume(self, partition: int, now: float) -> None:
        """After `hold`, or Restarted (see ReplicationConfig.holds_restarted)."""
        if not self._is_fit:
            return
        self._following.resume(partition, now)
        self._finish()

    def lag_records(self) -> dict[str, int]:
        """Per follower, the records of the partitions led here that it does not have durably."""
        return self._leading.lag_records()

    def handle_metadata(
        self, metadata: ClusterMetadata, changed: Iterable[int], now: float
    ) -> None:
        """`changed`: partitions that may differ from those of the metadata given before."""
        before = self._state.metadata
        if before is not None and metadata.version <= before.version:
            return
        self._state.metadata = metadata
        for partition in range(len(metadata.partitions)) if before is None else changed:
            self._place(partition, metadata.partitions[partition], now)
        self._leading.answer_early(now)
        if before is not None and before.nodes is not metadata.nodes:
            self._leading.handle_nodes(now)
        self._finish()

    def handle_current(self, now: float) -> None:
        """The metadata given so far is as new as everything that was decided before this process
        began; or there was none."""
        if self._is_current:
            return
        self._is_current = True
        self._renew(now)
        self._finish()

    def _place(self, partition: int, info: PartitionInfo, now: float) -> None:
        epochs = self._state.epochs
        if info.epoch > epochs[partition]:
            epochs[partition] = info.epoch
        led = self._leading.led[partition]
        if info.leader != self._state.node_id or info.epoch < epochs[partition]:
            self._unled.pop(partition, None)
            self._leading.stop(partition)
            self._following.follow(partition, info.leader, info.epoch, now)
        elif led is not None and led.epoch == info.epoch:
            self._leading.update(led, info, now)
        else:
            self._leading.stop(partition)
            self._following.stop(partition)
            if self._may_lead(partition, info):
                self._unled.pop(partition, None)
                self._leading.lead(partition, info, now)
            else:
                self._unled[partition] = info.epoch
                self._renew_at = now

    def _may_lead(self, partition: int, info: PartitionInfo) -> bool:
        return (
            self._is_current
            and self._is_fit
            and self._is_known()
            and partition not in self._state.held
            and info.epoch != self._unled.get(partition, -1)
        )

    def _is_known(self) -> bool:
        metadata = self._state.metadata
        assert metadata is not None
        node = metadata.nodes.get(self._state.node_id)
        return node is not None and node.incarnation == self._state.config.incarnation

    def _renew(self, now: float) -> None:
        """Ask for new epochs where this node leads by one that it must not use."""
        self._renew_at = now + self._state.config.propose_again_s
        if not self._unled or not self._is_current or not self._is_known() or not self._is_fit:
            return
        for partition, epoch in self._unled.items():
            info = self._state.info(partition)
            assert info is not None
            renewed = replace(info, epoch=epoch + 1)
            if partition in self._state.held:
                renewed = self._handed_over(partition, renewed)
            self._state.effects.append(ProposeInSync(partition, info.version, renewed))

    def _handed_over(self, partition: int, info: PartitionInfo) -> PartitionInfo:
        """To somebody in sync; to nobody, if those are all down, until one is back."""
        metadata = self._state.metadata
        assert metadata is not None
        others = tuple(node for node in info.in_sync if node != self._state.node_id)
        if not others:
            self._state.held.discard(partition)
            self._state.effects.append(GivenUp(partition))
            return info
        able = [
            node
            for node in others
            if node in info.replicas and metadata.nodes[node].state != NodePhase.DOWN
        ]
        return replace(info, leader=able[0] if able else "", in_sync=others)

    def _learn(self, newer: list[tuple[int, int]]) -> None:
        """There are epochs above those that the metadata here names."""
        epochs = self._state.epochs
        for partition, epoch in newer:
            if epoch > epochs[partition]:
                epochs[partition] = epoch
                self._unled.pop(partition, None)
                self._leading.stop(partition)
                self._following.learn(partition, epoch)

    def handle_ill(self, nodes: frozenset[str], now: float) -> None:
        """Who is not heard here, or says that its disk is not to be trusted: nobody of these enters
        an in-sync set."""
        if nodes != self._state.ill:
            self._state.ill = nodes
            self._leading.handle_nodes(now)
            self._finish()

    def handle_connected(self, node: str, now: float) -> None:
        self._leading.handle_connected(node, now)
        self._following.handle_disconnected(node)
        self._following.handle_connected(node, now)
        self._finish()

    def handle_disconnected(self, node: str, now: float) -> None:
        self._leading.handle_disconnected(node, now)
        self._following.handle_disconnected(node)
        self._finish()

    def handle_frame(self, node: str, kind: int, payload: bytes, now: float) -> None:
        """Raises BadFrame: close the link."""
        if kind == REPLICATE:
            self._following.handle_replicate(node, decode_replicate(payload), now)
        elif kind == REPLICATE_ACK:
            received, acks = decode_ack(payload)
            self._learn(self._leading.handle_ack(node, received, acks, now))
        elif kind == COMMIT:
            self._following.handle_commit(node, decode_offsets("COMMIT", payload))
        elif kind == FOLLOW:
            incarnation, questions = decode_follow(payload)
            self._learn(self._leading.handle_follow(node, incarnation, questions, now))
        elif kind == FOLLOW_FROM:
            answers = decode_follow_from(payload)
            self._learn([(entry[0], entry[1]) for entry in answers if entry[3] == NEWER])
            self._following.handle_follow_from(node, answers, now)
            self._following.handle_durable()
        else:
            raise BadFrame(f"kind {kind} is none of replication's")
        self._finish()

    def handle_taken(self, batches: Sequence[tuple[int, int, int, bytes]], now: float) -> None:
        """(partition, base offset, end offset, bytes) of the batches that this node as leader has
        just closed, in their order, before anything else is told to this core."""
        self._leading.handle_taken(batches, now)

    def handle_durable(self, now: float) -> None:
        """The log's `durable_offset` has moved."""
        self._leading.handle_durable()
        self._following.handle_durable()
        self._finish()

    def handle_batches(self, request: int, batches: list[bytes], now: float) -> None:
        """What a ReadBatches has found."""
        self._leading.handle_batches(request, batches, now)
        self._finish()

    def timer(self) -> float | None:
        due = self._leading.timer()
        asking = self._following.timer()
        if asking is not None and (due is None or asking < due):
            due = asking
        if self._unled and self._is_current and (due is None or self._renew_at < due):
            due = self._renew_at
        return due

    def handle_timers(self, now: float) -> None:
        self._leading.handle_timers(now)
        self._following.handle_timers(now)
        if now >= self._renew_at:
            self._renew(now)
        self._finish()

    def _finish(self) -> None:
        self._leading.flush()
        self._following.flush()
