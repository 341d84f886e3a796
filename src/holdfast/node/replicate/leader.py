"""Leads the partitions of this node.

The leader sends a batch to every follower in the turn that closes it, while its own disk writes it.
It waits for no follower. `Progress.sent` runs ahead, and `Progress.matched` follows with the
acknowledgements. The high watermark is the least durable end of all replicas that count.

- Only this node appends under the epoch, in this life of its process. After a restart it needs a
  new epoch (see Replication).
- The high watermark counts durable records only. It waits for every node of the in-sync set, and
  for every node proposed for it since the metadata last changed. Smallest counter-example: A
  proposes {A, B} and commits alone. The proposal passes, A dies, and B leads without the record.
- A follower's records of earlier epochs count only after the comparison, when the leader answered
  GO_ON.
"""

from collections.abc import Sequence

from holdfast.node.frame_kinds import FOLLOW_FROM, BadFrame
from holdfast.node.metadata.model import PartitionInfo
from holdfast.node.replicate.catch_up import CatchUp, RecentBatches, flush
from holdfast.node.replicate.codec import (
    ASK,
    FOLLOW_FROM_ENTRY,
    NEWER,
    FollowEntry,
    OffsetEntry,
)
from holdfast.node.replicate.commit_frames import CommitFrames
from holdfast.node.replicate.effects import BecameLeader, LeadershipEnded, Send
from holdfast.node.replicate.in_sync import InSync
from holdfast.node.replicate.log_matching import compare
from holdfast.node.replicate.progress import (
    CATCHING_UP,
    IDLE,
    LIVE,
    LedPartition,
    Peer,
    Progress,
)
from holdfast.node.replicate.state import ReplicaState


class LeaderSide:
    """The partitions that this node leads, with the progress of their followers."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self.led: list[LedPartition | None] = [None] * len(state.epochs)
        self._peers: dict[str, Peer] = {}
        self.commits = CommitFrames(state, self.led, self._peers)
        self._catch_up = CatchUp(state)
        self._in_sync = InSync(state)
        self._recent = RecentBatches(state)
        # Led partitions whose end is not yet durable here.
        self._dirty: list[LedPartition] = []
        # Led partitions whose in-sync set may change by time alone.
        self._watched: dict[int, LedPartition] = {}
        self._watch_at = 0.0
        # Per node, FOLLOW requests under an epoch that this node leads without knowing it yet.
        self._early: dict[str, dict[int, FollowEntry]] = {}

    def lead(self, partition: int, info: PartitionInfo, now: float) -> None:
        """Leads the partition under a new epoch, as the metadata says."""
        log = self._state.log
        assert self.led[partition] is None, "two epochs are led at once"
        assert log.last_epoch(partition) <= info.epoch, "the log is of a later epoch"
        log.lead(partition, info.epoch)
        led = LedPartition(partition, info, log.next_offset[partition])
        self.led[partition] = led
        self._state.effects.append(BecameLeader(partition, info.epoch))
        self._count(led, now)
        self._mark(led)
        self._advance(led)

    def reply_early(self, now: float) -> None:
        """Replies to followers that learned of this node's leadership before this node did."""
        for node, waiting in self._early.items():
            entries = []
            for partition, entry in list(waiting.items()):
                led = self.led[partition]
                if entry[1] < self._state.epochs[partition]:
                    del waiting[partition]
                elif led is not None:
                    del waiting[partition]
                    entries.append(entry)
            self._handle_follow(self._peers[node], entries, now)

    def update(self, led: LedPartition, info: PartitionInfo, now: float) -> None:
        """Takes over a change of the metadata under the same epoch."""
        led.info = info
        led.proposal = None
        self._count(led, now)
        # The watermark moves first. A follower just outside the in-sync set may have everything
        # below the old watermark. Judged against the new one, it is not taken in again at once.
        self._advance(led)
        self._in_sync.judge(led, now)

    def release(self, partition: int, node: str) -> bool:
        """Lets a node that asks for a feed forget its log. False: commits wait for that log, or may
        soon. Nothing that the node has acknowledged counts after that: a member is asked to follow
        again. Counter-example: it is out of the in-sync set by the metadata that it has, forgets
        its log, and is proposed for what it acknowledged before. So is a node that is no member by
        the metadata here. Counter-example: it follows because it was added, which this node
        learns later, and nothing is sent to it any more."""
        led = self.led[partition]
        if led is None or node in led.info.in_sync:
            return False
        progress = led.followers.get(node)
        if progress is None:
            return True
        if progress.is_counted:
            return False
        progress.stop()
        self._ask(progress)
        if node not in led.info.members:
            del led.followers[node]
        return True

    def _ask(self, progress: Progress) -> None:
        """Lets a follower ask again."""
        led = progress.led
        entry = FOLLOW_FROM_ENTRY.pack(led.partition, led.epoch, 0, ASK, 0, 0, 0)
        self._state.effects.append(Send(progress.peer.node, FOLLOW_FROM, entry))

    def begin_alone(self) -> None:
        """Leaves closed batches and commits to the journal until `end_alone`. No follower has asked
        for any. The recent batches would have a gap afterwards."""
        self._recent.clear()

    def end_alone(self, ends: list[int]) -> None:
        """Takes the commits over again. `ends`: per partition the end of the batches closed."""
        for led in self.led:
            assert led is not None
            led.end = ends[led.partition]
            self._mark(led)

    def handle_nodes(self, met: frozenset[str], now: float) -> None:
        """Proposes again for partitions with replicas out of sync, because nodes changed. The
        silence of nodes heard for the first time since the start of this node begins again.
        Counter-example: the file of this leader has lost its end. A replica in sync has that end,
        and is out of the set between its first heartbeat and its request to follow."""
        for led in self.led:
            if led is None:
                continue
            for progress in led.followers.values():
                if progress.peer.node in met:
                    progress.acknowledged_at = now
                    progress.is_silent = False
            if len(led.info.in_sync) < len(led.info.members):
                self._in_sync.propose(led, now)
                self._watch(led, now)

    def commit_more(self) -> None:
        """Looks at every partition again, because fewer replicas in sync are enough now.
        Counter-example: a record waits in a partition with one replica in sync, and none follows
        it."""
        for led in self.led:
            if led is not None:
                self._mark(led)

    def stop(self, partition: int) -> None:
        """Stops to lead the partition, and cuts off the records that are in no closed batch."""
        led = self.led[partition]
        if led is None:
            return
        self.led[partition] = None
        self._watched.pop(partition, None)
        for progress in led.followers.values():
            progress.stop()
        led.is_led = False
        log = self._state.log
        self._state.effects.append(LeadershipEnded(partition, led.epoch))
        if log.next_offset[partition] > led.end:
            log.truncate(partition, led.end)

    def _count(self, led: LedPartition, now: float) -> None:
        for progress in led.counted:
            progress.is_counted = False
        led.counted = []
        led.alive = 1
        for node in led.info.in_sync:
            if node != self._state.node_id:
                progress = self._progress(led, node, now)
                progress.is_counted = True
                led.counted.append(progress)
                led.alive += not progress.is_silent
        for progress in led.followers.values():
            if not progress.is_counted:
                progress.is_silent = False
                progress.is_lost = False
        self._watch(led, now)

    def _progress(self, led: LedPartition, node: str, now: float) -> Progress:
        progress = led.followers.get(node)
        if progress is None:
            progress = Progress(self._peer(node), led, now)
            led.followers[node] = progress
        return progress

    def _peer(self, node: str) -> Peer:
        peer = self._peers.get(node)
        if peer is None:
            peer = self._peers[node] = Peer(node)
        return peer

    def lags(self) -> dict[int, dict[str, int]]:
        """By partition led here, the records that each follower does not have durably."""
        found: dict[int, dict[str, int]] = {}
        for number, led in enumerate(self.led):
            if led is not None:
                lag: dict[str, int] = {}
                for node, progress in led.followers.items():
                    lag[node] = max(0, led.end - progress.matched)
                found[number] = lag
        return found

    def handle_connected(self, node: str, now: float) -> None:
        self._disconnect(node, now)
        self._peer(node).restart(True)

    def handle_disconnected(self, node: str, now: float) -> None:
        self._disconnect(node, now)
        self._peer(node).restart(False)

    def _disconnect(self, node: str, now: float) -> None:
        self._early.pop(node, None)
        for led in self.led:
            progress = led.followers.get(node) if led is not None else None
            if led is None or progress is None:
                continue
            if progress.state != IDLE:
                if progress.matched == led.end:
                    progress.acknowledged_at = now
                progress.stop()
                self._watch(led, now)

    def handle_follow(
        self, node: str, incarnation: str, entries: list[FollowEntry], now: float
    ) -> list[tuple[int, int]]:
        """Replies with the offset from which the follower continues. Returns (partition, epoch)
        pairs newer than known here; those requests wait for the metadata."""
        peer = self._peer(node)
        if not peer.is_connected:
            return []
        peer.incarnation = incarnation
        newer = []
        mine = []
        answers: list[bytes] = []
        for entry in entries:
            partition, epoch, request = entry[0], entry[1], entry[2]
            led = self._led_partition(partition)
            known = self._state.epochs[partition]
            if epoch < known:
                answers.append(FOLLOW_FROM_ENTRY.pack(partition, known, request, NEWER, 0, 0, 0))
            elif led is not None and led.epoch == epoch:
                mine.append(entry)
            else:
                self._early.setdefault(node, {})[partition] = entry
                if epoch > known:
                    newer.append((partition, epoch))
        if answers:
            self._state.effects.append(Send(node, FOLLOW_FROM, b"".join(answers)))
        self._handle_follow(peer, mine, now)
        return newer

    def _handle_follow(self, peer: Peer, entries: list[FollowEntry], now: float) -> None:
        answers: list[bytes] = []
        answered: list[Progress] = []
        for entry in entries:
            led = self.led[entry[0]]
            assert led is not None
            progress = self._progress(led, peer.node, now)
            answer = compare(self._state.log, led, progress, entry)
            if answer:
                answers.append(answer)
            if progress.is_lost:
                self._watch(led, now)
            if progress.state != IDLE:
                progress.acknowledged_at = now
                answered.append(progress)
        if not answers:
            return
        self._state.effects.append(Send(peer.node, FOLLOW_FROM, b"".join(answers)))
        for progress in answered:
            led = progress.led
            self._on_progress(led, progress, now)
            self._catch_up.enqueue_if_behind(progress)
        self._catch_up.pump(peer, now)

    def handle_ack(
        self, node: str, received_bytes: int, entries: list[OffsetEntry], now: float
    ) -> list[tuple[int, int]]:
        """Takes a follower's durable ends; returns (partition, epoch) pairs newer than known."""
        peer = self._peer(node)
        if not peer.is_connected:
            return []
        if not peer.received_bytes <= received_bytes <= peer.sent_bytes:
            raise BadFrame(
                f"{received_bytes} bytes received, after {peer.received_bytes} "
                f"and of {peer.sent_bytes} sent"
            )
        peer.received_bytes = received_bytes
        newer = []
        for partition, epoch, end in entries:
            led = self._led_partition(partition)
            if epoch > self._state.epochs[partition]:
                newer.append((partition, epoch))
            elif led is not None and led.epoch == epoch:
                progress = led.followers.get(node)
                if progress is not None and progress.state != IDLE:
                    try:
                        self._matched(led, progress, end, now)
                    except AssertionError as error:
                        self._state.break_off(partition, error)
        self._catch_up.pump(peer, now)
        return newer

    def _matched(self, led: LedPartition, progress: Progress, end: int, now: float) -> None:
        if end > progress.sent:
            raise BadFrame(
                f"partition {led.partition}: durable to {end}, sent only to {progress.sent}"
            )
        if end > progress.matched:
            progress.matched = end
            progress.check()
            progress.acknowledged_at = now
            self._on_progress(led, progress, now)

    def _on_progress(self, led: LedPartition, progress: Progress, now: float) -> None:
        if progress.is_counted:
            if progress.is_silent:
                self._in_sync.judge(led, now)
            self._advance(led)
        elif self._in_sync.has_caught_up(led, progress, now):
            self._in_sync.propose(led, now)
            self._watch(led, now)

    def handle_taken(self, batches: Sequence[tuple[int, int, int, bytes]], now: float) -> None:
        """Sends batches just closed here: (partition, base offset, end offset, bytes)."""
        for partition, base, end, batch in batches:
            led = self.led[partition]
            if led is None:
                continue
            try:
                assert led.end == base < end, f"a batch of {base} to {end} after {led.end}"
                led.end = end
                self._recent.add(led, base, batch)
                self._push(led, base, batch, now)
            except AssertionError as error:
                self._state.break_off(partition, error)
            self._mark(led)
            if led.counted:
                self._watch(led, now)
        for peer in self._peers.values():
            if peer.batches:
                peer.replicated_before, peer.replicated_at = peer.replicated_at, now
                flush(self._state, peer)

    def _push(self, led: LedPartition, base: int, batch: bytes, now: float) -> None:
        window = self._state.config.push_window_bytes
        for progress in led.followers.values():
            if progress.state == IDLE:
                continue
            if progress.matched == base:
                progress.acknowledged_at = now
            if progress.state != LIVE:
                continue
            peer = progress.peer
            assert progress.matched <= progress.sent == base, "a live follower was sent less"
            if peer.outstanding_bytes() < window:
                peer.add(led.epoch_bytes, batch)
                progress.sent = led.end
            else:
                progress.state = CATCHING_UP
                self._catch_up.enqueue(progress)

    def handle_durable(self) -> None:
        dirty = self._dirty
        if not dirty:
            return
        self._dirty = []
        durable = self._state.log.durable_offset
        for led in dirty:
            led.is_dirty = False
            if led.is_led:
                try:
                    self._advance(led)
                except AssertionError as error:
                    self._state.break_off(led.partition, error)
                if durable[led.partition] < led.end:
                    self._mark(led)

    def awaits_disk(self) -> bool:
        """True if a commit waits for the disk of this node, and no longer for a follower."""
        durable = self._state.log.durable_offset
        for led in self._dirty:
            offset = durable[led.partition]
            for progress in led.counted:
                if progress.matched <= offset:
                    break
            else:
                return True
        return False

    def _advance(self, led: LedPartition) -> None:
        """Moves the high watermark to the least durable end, if `min_insync` replicas are in
        sync."""
        metadata = self._state.metadata
        if metadata is None or len(led.info.in_sync) < metadata.min_insync:
            return
        offset = self._state.log.durable_offset[led.partition]
        for progress in led.counted:
            if progress.matched < offset:
                offset = progress.matched
        before = self._state.log.high_watermark[led.partition]
        if self._state.commit(led.partition, offset):
            self.commits.note_moved(led, before)

    def handle_batches(self, request: int, batches: list[bytes], now: float) -> None:
        gone = self._catch_up.handle_batches(request, batches, now)
        if gone is not None:
            gone.stop()
            self._ask(gone)

    def timer(self) -> float | None:
        due = self._catch_up.timer()
        if self._watched and (due is None or self._watch_at < due):
            due = self._watch_at
        held_until = self.commits.timer()
        return due if held_until is None or (due is not None and due < held_until) else held_until

    def handle_timers(self, now: float) -> None:
        self._catch_up.handle_timers(now)
        if not self._watched or now < self._watch_at:
            return
        config = self._state.config
        if now - self._watch_at > config.lag_s:
            self._in_sync.restart_silences(now)
        self._watch_at = now + config.silent_s / 4
        for led in list(self._watched.values()):
            self._in_sync.judge(led, now)
            if self._in_sync.is_stable(led):
                del self._watched[led.partition]

    def check(self) -> None:
        """Raises `AssertionError` for an invariant of a led partition that does not hold."""
        ends = self._state.log.next_offset
        for led in self.led:
            if led is not None:
                led.check()
                assert led.epoch == led.info.epoch <= self._state.epochs[led.partition]
                assert led.end <= ends[led.partition], "a closed batch is not in the log"
                assert led.is_dirty == (led in self._dirty), "the partitions to look at"
        for peer in self._peers.values():
            assert peer.outstanding_bytes() >= 0, "received more than was sent"
            assert not peer.batches, "batches wait after the turn"
        self._recent.check()
        self.commits.check()

    def _led_partition(self, partition: int) -> LedPartition | None:
        if partition >= len(self.led):
            raise BadFrame(f"partition {partition}, there are {len(self.led)}")
        return self.led[partition]

    def _mark(self, led: LedPartition) -> None:
        if not led.is_dirty:
            led.is_dirty = True
            self._dirty.append(led)

    def _watch(self, led: LedPartition, now: float) -> None:
        if not self._watched:
            self._watch_at = now + self._state.config.silent_s / 4
        self._watched[led.partition] = led
