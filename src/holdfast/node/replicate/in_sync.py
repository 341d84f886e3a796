"""Chooses a leader's in-sync set, and proposes it to the metadata.

- To remove a replica, the leader proposes its removal when it is silent. The high watermark passes
  that replica only after the metadata has removed it.
- To add a replica, the leader proposes it when it has everything below the high watermark and below
  this epoch's start. A replica that is taken for dead is not proposed. A proposed one counts from
  then on, until the metadata moves on without it.
- A set is not shrunk to this node alone by nodes that it has not heard since its start, for
  `start_alone_after_s`.
- A set is not shrunk below `min_insync`. The watermark could not move either way, and every replica
  that stays in the set may lead after this node.
- There is one proposal at a time for a version of the partition. After `proposal_retry_s` without
  effect the leader makes another. If nothing else, that one makes the first one void.
"""

from msgspec.structs import replace

from holdfast.node.metadata.model import ClusterMetadata, NodePhase
from holdfast.node.replicate.effects import ProposeInSync
from holdfast.node.replicate.progress import IDLE, LedPartition, Progress
from holdfast.node.replicate.state import ReplicaState


class InSync:
    """The in-sync sets that this node proposes for the partitions it leads."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._silent_s = state.config.silent_s
        # No silence counts from before this time, because this node could not have received
        # anything.
        self._judged_from = 0.0

    def restart_silences(self, now: float) -> None:
        """Restarts all silences now, because this node was stalled itself."""
        self._judged_from = now

    def judge(self, led: LedPartition, now: float) -> None:
        """Decides which replicas are silent, and proposes the resulting set."""
        alive = 1
        for progress in led.counted:
            if progress.peer.node not in led.info.in_sync:
                continue
            progress.is_silent = self._makes_no_progress(led, progress, now)
            alive += not progress.is_silent
        led.alive = alive
        self.propose(led, now)

    def _makes_no_progress(self, led: LedPartition, progress: Progress, now: float) -> bool:
        """True if the follower is behind and has made no progress for `silent_s`."""
        is_behind = progress.state == IDLE or progress.matched < led.end
        heard_at = max(progress.acknowledged_at, self._judged_from)
        return is_behind and now - heard_at > self._silent_s

    def is_stable(self, led: LedPartition) -> bool:
        """True if time alone changes nothing in this partition."""
        if led.proposal is not None:
            return False
        for progress in led.counted:
            if progress.state == IDLE or progress.matched < led.end or progress.is_silent:
                return False
        return True

    def propose(self, led: LedPartition, now: float) -> None:
        """Proposes the wanted set, unless it is in force or a proposal is under way."""
        metadata = self._state.metadata
        assert metadata is not None
        is_pending = led.proposal is not None
        if is_pending and now - led.proposed_at < self._state.config.proposal_retry_s:
            return
        wanted = self._target(led, metadata, now)
        if not is_pending and len(wanted) == len(led.info.in_sync) and wanted == led.info.in_sync:
            return
        led.proposal = wanted
        led.proposed_at = now
        for node in wanted:
            if node != self._state.node_id and node not in led.info.in_sync:
                progress = led.followers[node]
                if not progress.is_counted:
                    progress.is_counted = True
                    led.counted.append(progress)
        self._state.effects.append(
            ProposeInSync(led.partition, led.info.version, replace(led.info, in_sync=wanted))
        )

    def _target(self, led: LedPartition, metadata: ClusterMetadata, now: float) -> tuple[str, ...]:
        info = led.info
        lost = set()
        silent = set()
        for progress in led.counted:
            if self._has_lost_disk(progress, metadata):
                lost.add(progress.peer.node)
            elif progress.is_silent:
                silent.add(progress.peer.node)
        kept = [node for node in info.in_sync if node not in lost and node not in silent]
        # A replica that was not heard since the start of this node may have more than this disk.
        is_start = len(kept) == 1 and bool(silent) and silent <= self._state.unmet
        if len(kept) < metadata.min_insync or is_start:
            kept = [node for node in info.in_sync if node not in lost]
        grown = []
        for node in info.members:
            follower = led.followers.get(node)
            if (
                node not in info.in_sync
                and follower is not None
                and self.has_caught_up(led, follower, now)
            ):
                grown.append(node)
        return (*kept, *grown)

    def _has_lost_disk(self, progress: Progress, metadata: ClusterMetadata) -> bool:
        """True if the follower's disk is not the one that was in sync."""
        return progress.is_lost or (progress.state != IDLE and not is_genuine(progress, metadata))

    def has_caught_up(self, led: LedPartition, progress: Progress, now: float) -> bool:
        """True if the follower has everything that can be committed, so commits may wait for it. A
        follower that makes no progress does not qualify: it would be added and removed for ever."""
        metadata = self._state.metadata
        return (
            progress.state != IDLE
            and not self._makes_no_progress(led, progress, now)
            # The controller would remove an unhealthy node at once, and this leader would add it
            # again.
            and progress.peer.node not in self._state.unhealthy
            and progress.matched >= led.start
            and progress.matched >= self._state.log.high_watermark[led.partition]
            and progress.peer.node in led.info.members
            and metadata is not None
            and is_genuine(progress, metadata)
            # A node that hangs keeps its socket open, and its old acknowledgements would qualify
            # it.
            and metadata.nodes[progress.peer.node].state != NodePhase.DOWN
        )


def is_genuine(progress: Progress, metadata: ClusterMetadata) -> bool:
    """True if the node runs on the disk that the metadata knows."""
    info = metadata.nodes.get(progress.peer.node)
    return info is not None and info.incarnation == progress.peer.incarnation
