"""Runs a node's turn: carries out, in order, the results of one iteration of the event loop.

The driver owns the sockets, the threads and the clock. It calls `begin` before it hands anything to
the node, and `turn` once per iteration. The ports (`node.runtime.ports`) are all that a turn needs
of the driver, so a simulator that implements them runs the same turns.

| step | why it is where it is |
|---|---|
| 1. due timers | They append records, and those belong in this turn's write group. |
| 2. `_advance`: disk, timers of the cluster, `ClusterNode.end_turn` | A stall is known before this turn's leaders are asked to do anything. What is committed is applied. All of it appends records, too. |
| 3. write group | The disk works while steps 4 and 5 use the processor. |
| 4. effects and writes to clients | Until none is left, because an effect may cause others: input that goes on is answered in the same turn. |
| 5. `_advance`, write group | Step 4 has appended records. Without this step they would wait for the next event. |
| 6. frames | They leave behind what all steps before have queued, and before Raft's writes are submitted. None depends on such a write: those are made by `raft_written`. |
| 7. Raft's writes, reads for other nodes | In the order in which they were produced. |
| 8. news | The links are adjusted first, so that the redirect names the nodes as they are now. Damage comes before readiness, because a damaged node is not ready. |
| 9. damage | After the news, because metadata that has just arrived decides whether other replicas exist. |
| 10. watermarks | Last, because they describe the finished turn. |
"""  # noqa: E501

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from holdfast.log.journal.group_commit_delay import CommitPace, JournalWaits
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.journal.watermarks import Checkpoint
from holdfast.log.reading.cursor import ReadResult
from holdfast.log.reading.starts import FoundStart
from holdfast.node.cluster_node import ClusterNode
from holdfast.node.delivery.subscribe import handle_starts
from holdfast.node.effects import AnyRead, Effect, FetchInflight, FindStarts, Found, ReadLog
from holdfast.node.failure.disk_watch import DiskWatch
from holdfast.node.metadata.model import NOT_RESTORED, ClusterMetadata
from holdfast.node.node_state import NodeState
from holdfast.node.placement.client_shares import obstacle
from holdfast.node.relocation.redirection import Redirection
from holdfast.node.replicate.effects import ReadBatches
from holdfast.node.runtime.fitness import Fitness
from holdfast.node.runtime.node_links import NodeLinks
from holdfast.node.runtime.ports import RuntimePorts
from holdfast.node.runtime.probes import ClusterProbes
from holdfast.node.runtime.replacement import Replacement
from holdfast.node.state.recorded_state import RecordedState

GATHERED_BYTES: Final = 1 << 20
"""The pending bytes that are written at once, though records gather."""
WATERMARKS_S: Final = 1.0
"""The interval in seconds at which the high watermarks are written."""

FOREVER: Final = float("inf")


class Runtime:
    """The turns of a node.

    Frames that announce a Raft write as durable are made by `raft_written`, so no frame is ahead of
    the disk.
    """

    def __init__(
        self,
        cluster_node: ClusterNode,
        ports: RuntimePorts,
        replacement: Replacement,
        disk_stall_s: float,
        waits: JournalWaits | None = None,
        *,
        durable: bool = True,
    ) -> None:
        """`disk_stall_s`: the longest normal write in seconds. `waits`: None: records wait for no
        others. `durable`: see `Broker`."""
        self.node = cluster_node.node
        self.state: NodeState = cluster_node.state
        self.writer = ports.journal
        self.reader = ports.reader
        self.clients = ports.clients
        self.group_in_flight = False
        self.group_began_at = 0.0
        # The times of the oldest record in the group in flight, and in the next one; 0.0: none.
        self._group_oldest_at = 0.0
        self._oldest_at = 0.0
        self.reserve_bytes = 0
        """The free bytes below which publishes of QoS 1 and 2 are refused."""
        self.believes_disk = True
        """False after damage: a read may lack records, so its result must not reach any client."""
        # Each is called once, when a group was written or there is none to write.
        self._idle_waiters: list[Callable[[], None]] = []
        # Reads of records that are not in the file yet.
        self.deferred: list[Effect] = []
        waits = waits or JournalWaits()
        self._pace = CommitPace(waits.durable_s) if waits.durable_s else None
        # The time at which the records that gather are written.
        self._flush_at: float | None = None
        self.cluster_node = cluster_node
        self._gathers_among_others = waits.among_others
        self.replacement = replacement
        self.disk = DiskWatch(disk_stall_s)
        self._probes = ClusterProbes(cluster_node)
        self.fitness = Fitness(cluster_node, self.disk)
        self.redirection = Redirection(cluster_node, self.fitness, ports.clients.touch)
        self._raft = ports.raft
        self._links = ports.links
        self._process = ports.process
        self.links = NodeLinks(cluster_node, ports)
        # True if the news of a turn are looked at though there may be none.
        self._is_watched = True
        self._has_news = False
        self._has_stopped_partition = False
        self._is_leaving = False
        self._begins_anew = False
        self._recovers = cluster_node.attendance.is_recovering
        self._reviewed: ClusterMetadata | None = None
        self.on_news: Callable[[], None] = lambda: None
        """Called when the metadata has changed, or this node was removed."""
        # The time at which the cluster's timers are due.
        self._cluster_at = 0.0
        self._watermarks_at = 0.0
        self._durable = durable
        self._is_incomplete = bool(cluster_node.positions.own_incomplete)
        if not durable:
            cluster_node.positions.sync_later()
        self._written_watermarks: Checkpoint | None = None
        self._remembered = cluster_node.disk_memory.encode()
        # The records that were committed here when the watermarks were last looked at.
        self._looked_at_sequence = 0

    # The turn

    def begin(self, now: float, wall_us: int) -> None:
        """Sets the clocks: monotonic in seconds, and the wall clock in microseconds. The latter
        follows the cluster's."""
        self.node.tick(now, wall_us)
        state = self.state
        state.wall_us = self.cluster_node.clock.tick(now, wall_us)
        recorded = self.cluster_node.replicated.state
        recorded.now = now
        recorded.wall_us = state.wall_us
        self.cluster_node.tick(now)

    def turn(self) -> None:
        """Carries out the iteration's work. The module says why the steps have this order."""
        state = self.state
        state.stats.durations.takes_delivery = True
        if self.group_in_flight:
            group = self.writer.take_written()
            if group is not None:
                self._commit(group)
        when = self.node.timer()
        if when is not None and when <= state.now:
            self.node.handle_timers()
        self._advance()
        flush_at = self._flush_at
        self.write_journal(flush_at is not None and flush_at <= state.now)
        while state.effects or state.dirty:
            effects = state.effects
            if effects:
                state.effects = []
                for effect in effects:
                    self._carry_out(effect)
            dirty = state.dirty
            if dirty:
                state.dirty = []
                self.clients.flush(dirty)
        self._advance()
        self.write_journal(False)
        self._finish()
        if self.group_in_flight and not self.cluster_node.context.is_alone:
            self._await_group(is_awaited=self._is_group_awaited())

    def _is_group_awaited(self) -> bool:
        """Whether anything waits for the group in flight here. A leader's own disk is mostly done
        before those of its followers: then the turn of their acknowledgement commits the group, and
        none is run before. Each other turn looks at the group, too, so it waits for a heartbeat at
        most."""
        return bool(
            self.state.journal.pending_bytes
            or self.deferred
            or self._idle_waiters
            or self.cluster_node.replication.awaits_disk()
        )

    def _await_group(self, *, is_awaited: bool) -> None:
        """Runs a turn when the group in flight is written, or leaves it to the next turn."""
        if self.writer.set_awaited(is_awaited=is_awaited):
            self.clients.touch()

    def _advance(self) -> None:
        """Runs the disk's checks and the cluster's timers, and lets the cluster end its turn."""
        cluster_node = self.cluster_node
        now = self.state.now
        if self.disk.timer() <= now:
            self._watch_disk(now)
        if self._cluster_at <= now:
            cluster_node.handle_timers(now)
            self._cluster_at = cluster_node.timer()
            if not cluster_node.context.is_alone:
                self.links.step(now)
        cluster_node.end_turn(now)

    def timer(self) -> float | None:
        """The time of the next turn if nothing arrives before."""
        when = self.node.timer()
        flush_at = self._flush_at
        if flush_at is not None and (when is None or flush_at < when):
            when = flush_at
        cluster_at = self._cluster_at = self.cluster_node.timer()
        cluster_at = min(cluster_at, self.links.relayed.timer(self.state.now))
        cluster_at = min(cluster_at, self.cluster_node.end_timer())
        if cluster_at < FOREVER and (when is None or cluster_at < when):
            when = cluster_at
        if self.state.journal.committed_sequence != self._looked_at_sequence:
            # A node at rest has no other reason to write the watermarks.
            watermarks_at = self._watermarks_at + WATERMARKS_S
            when = watermarks_at if when is None else min(when, watermarks_at)
        disk_at = self.disk.timer()
        return disk_at if disk_at < (FOREVER if when is None else when) else when

    def _finish(self) -> None:
        """Sends frames, submits Raft's writes and reads, and acts on the turn's news."""
        cluster_node = self.cluster_node
        effects = cluster_node.effects
        outgoing = cluster_node.context.outgoing
        if outgoing:
            cluster_node.context.outgoing = []
            for node, kind, payload in outgoing:
                self.links.send(node, kind, payload)
            self._links.flush()
        self.links.drain()
        if effects.persists:
            persists = effects.persists
            effects.persists = []
            for write in persists:
                self.disk.metadata.began(self.state.now)
                self._raft.submit(write)
        if effects.reads:
            reads = effects.reads
            effects.reads = []
            for read in reads:
                end = self.state.journal.next_offset[read.partition]
                self.reader.read_batches(read, end, self._batches_read)
        if self._recovers and not cluster_node.attendance.is_recovering:
            self._recovers = False
            self._process.recovered()
        is_alone = cluster_node.context.is_alone
        if not is_alone and cluster_node.meta.diverged and not self.fitness.older_copy:
            self.report_older_copy(cluster_node.meta.diverged, may_begin_anew=False)
        if (
            effects.nodes_changed
            or effects.users_changed
            or effects.outcomes
            or self._is_watched
            or self._has_news
            or self._reviewed is not cluster_node.context.metadata
            or self.state.has_stopped_partition != self._has_stopped_partition
            or cluster_node.transfer.needs_save()
        ):
            self._has_news = False
            self._has_stopped_partition = self.state.has_stopped_partition
            self._act_on_news()
        fitness = self.fitness
        if fitness.is_undecided:
            self.distrust_disk()
        elif effects.has_diverged and not fitness.is_damaged:
            self._leave()
        self._probes.step()
        if self._is_incomplete and not cluster_node.positions.own_incomplete:
            self._is_incomplete = False
            self._process.became_complete()
        self._checkpoint()

    def _act_on_news(self) -> None:
        cluster_node = self.cluster_node
        effects = cluster_node.effects
        fitness = self.fitness
        metadata = cluster_node.context.metadata
        if effects.nodes_changed:
            effects.nodes_changed = False
            assert metadata is not None
            nodes = frozenset(metadata.nodes)
            if obstacle(metadata):
                self.redirection.stop_balance()
            cluster_node.disk_memory.forget(nodes)
            cluster_node.older_copies.forget(nodes)
            cluster_node.clock.forget(nodes, self.state.now)
            self._process.take_nodes(metadata)
        if self._reviewed is not metadata:
            self._reviewed = metadata
            self.links.review()
        self.on_news()
        self.redirection.review()
        if fitness.is_damaged and self.replacement.step(metadata, cluster_node.is_dispensable()):
            self._process.set_aside(keep=effects.has_diverged)
        if fitness.may_begin_anew and not self._begins_anew:
            self._begins_anew = True
            self._process.begin_anew()
        if effects.users_changed:
            # Before the outcomes, so that a command that was accepted finds its change.
            effects.users_changed = False
            self._process.take_users()
        outcomes = effects.outcomes
        if outcomes:
            effects.outcomes = []
            self._process.proposals_done(outcomes)
        if cluster_node.transfer.needs_save():
            self._process.save_snapshot()
        if not fitness.is_ready and not fitness.unready_reason(self.state.now):
            fitness.is_ready = True
            self._is_watched = False
            self._process.became_ready()
            self.redirection.review()
        if self._is_leaving and not self._may_be_relieved():
            self._process.relieved()

    def _may_be_relieved(self) -> bool:
        """Whether a connected node may still take over a partition that this one leads. A partition
        with one replica keeps its leader."""
        context = self.cluster_node.context
        metadata = context.metadata
        return metadata is not None and any(
            epoch > 0 and any(node in context.connected for node in info.in_sync)
            for epoch, info in zip(context.leading, metadata.partitions, strict=True)
        )

    def _checkpoint(self) -> None:
        now = self.state.now
        if now < self._watermarks_at + WATERMARKS_S:
            return
        self._watermarks_at = now
        self._remember()
        self._looked_at_sequence = self.state.journal.committed_sequence
        watermarks = self.state.journal.checkpoint()
        if watermarks != self._written_watermarks:
            self._written_watermarks = watermarks
            self.clients.write_watermarks(watermarks)

    def _remember(self) -> None:
        """Stores the positions of the other nodes' disks, unless they are as before."""
        memory = self.cluster_node.disk_memory
        metadata = self.cluster_node.context.metadata
        if metadata is not None:
            memory.begin_generation((metadata.generation or NOT_RESTORED).number)
        content = memory.encode()
        if content != self._remembered:
            self._remembered = content
            self.clients.write_remembered(content)

    def watermarks_written(self, watermarks: Checkpoint) -> None:
        """Notes that a checkpoint is on disk, with all records below it."""
        if not self._durable:
            self.cluster_node.positions.synced = watermarks

    # The journal and the disk

    def write_journal(self, at_once: bool) -> None:
        """Hands the pending records to the writer if it is free; later ones form the next group.
        They may gather before, unless `at_once`, for some time or up to 1 MiB."""
        state = self.state
        journal = state.journal
        if not self._oldest_at and journal.pending_bytes:
            self._oldest_at = state.now
        if self.group_in_flight:
            return
        if not at_once and self._pace is not None and self._gathers(self._pace):
            return
        self._flush_at = None
        group = journal.close_write_group()
        if group is None:
            self._wake_waiters()
            return
        self.group_in_flight = True
        self.group_began_at = state.now
        self._group_oldest_at, self._oldest_at = self._oldest_at, 0.0
        self._group_taken(group)
        self.writer.submit(group)

    def _gathers(self, pace: CommitPace) -> bool:
        """Whether the pending records wait for others before they are committed. With other nodes a
        record waits for the leader's disk and for those of its followers, so it may wait twice."""
        if not (self._gathers_among_others or self.cluster_node.context.is_alone):
            return False
        state = self.state
        pending_bytes = state.journal.pending_bytes
        if not pending_bytes or pending_bytes >= GATHERED_BYTES:
            return False
        if self._flush_at is None:
            wait_s = pace.wait_s(state.now, state.journal.sequence)
            if wait_s == 0.0:
                return False
            self._flush_at = state.now + wait_s
        return state.now < self._flush_at

    def _group_taken(self, group: WriteGroup) -> None:
        """Replicates the group while the disk writes it."""
        now = self.state.now
        self.disk.journal.began(now)
        self._probes.group_taken(group)
        self.cluster_node.handle_taken(group, now)

    def group_written(self, group: WriteGroup) -> None:
        """Handles the report of a group that is in the file, and on disk unless durability is
        "memory"."""
        self.clients.touch()
        self._commit(group)

    def _commit(self, group: WriteGroup) -> None:
        """Lets the cluster commit or acknowledge the records of a group that is durable."""
        self.group_in_flight = False
        state = self.state
        if self.writer.free_bytes < self.reserve_bytes:
            self.refuse_publishes()
        state.journal.wrote(group)
        state.journal.commit(group)
        state.resume_inputs()
        state.effects.extend(self.deferred)
        self.deferred.clear()
        self._wake_waiters()
        now = self.state.now
        if self.cluster_node.local.waiting():
            self.state.stats.durations.acknowledged.observe(now - self._group_oldest_at)
        if self.disk.ended(self.disk.journal, now):
            self._disk_changed(now)
        self.cluster_node.handle_durable(now)

    def raft_written(self) -> None:
        """Handles the completion of Raft's oldest submitted write."""
        self.clients.touch()
        now = self.state.now
        if self.disk.ended(self.disk.metadata, now):
            self._disk_changed(now)
        self.cluster_node.handle_persisted(now)

    def when_written(self, done: Callable[[], None]) -> None:
        """Calls `done` once everything appended so far is written."""
        self._call_when_written(self.state.journal.sequence, done)

    def _call_when_written(self, target: int, done: Callable[[], None]) -> None:
        journal = self.state.journal
        is_idle = not self.group_in_flight and not journal.pending_bytes
        if is_idle or journal.committed_sequence >= target:
            done()
        else:
            self._idle_waiters.append(partial(self._call_when_written, target, done))
            self.write_journal(True)
            self._await_group(is_awaited=True)

    def _wake_waiters(self) -> None:
        waiters = self._idle_waiters
        if waiters:
            self._idle_waiters = []
            for check in waiters:
                check()

    def waits_s(self, now: float) -> float:
        """Returns the age in seconds of the oldest waiting promise, 0.0 without one."""
        if self.cluster_node.local.waiting():
            return now - self.group_began_at if self.group_in_flight else 0.0
        return self.cluster_node.forwarding.waits_s(now)

    def _watch_disk(self, now: float) -> None:
        disk = self.disk
        if self.writer.is_full:
            disk.journal.waits_for_space(now)
        if self._raft.is_full:
            disk.metadata.waits_for_space(now)
        if disk.handle_timers(now):
            self._disk_changed(now)

    def _disk_changed(self, now: float) -> None:
        """Reports that the disk stalls, or that it responds again."""
        is_stalled = self.disk.is_stalled
        self._has_news = True
        if is_stalled:
            self.state.note("error", "disk_stalled", {"stall_s": self.disk.stall_s})
        else:
            self.state.note("warning", "disk_goes_on", {})
        self.cluster_node.handle_disk(is_stalled, now)

    # Free space

    def writer_full(self) -> None:
        """Refuses publishes: the group in flight, and every promise behind it, waits for space."""
        self.clients.touch()
        self.state.is_reserve_low = True
        self.refuse_publishes()

    def check_space(self, free_bytes: int) -> None:
        """Refuses QoS 1 and 2 before the disk is full; accepts them with a quarter more room."""
        reserve = self.reserve_bytes
        self.state.is_reserve_low = self.writer.is_full or free_bytes < reserve // 2
        if free_bytes < reserve:
            self.refuse_publishes()
        elif free_bytes > reserve + reserve // 4 and not self.writer.is_full:
            self.accept_publishes()

    def refuse_publishes(self) -> None:
        """Refuses publishes of QoS 1 and 2, for lack of space."""
        state = self.state
        if not state.disk_full:
            self.clients.touch()
            state.disk_full = True
            fields: dict[str, object] = {
                "free_bytes": self.writer.free_bytes, "reserve_bytes": self.reserve_bytes
            }  # fmt: skip
            state.note("error", "disk_full", fields)
            self._space_changed(is_full=True)

    def accept_publishes(self) -> None:
        """Accepts publishes again, because there is space."""
        state = self.state
        if state.disk_full:
            self.clients.touch()
            state.disk_full = False
            state.note("warning", "disk_has_space", {"free_bytes": self.writer.space()})
            self._space_changed(is_full=False)

    def _space_changed(self, *, is_full: bool) -> None:
        """Reports that the disk has only its reserve left, or space again."""
        self._has_news = True
        self.cluster_node.handle_space(is_full, self.state.now)

    # Effects

    def _carry_out(self, effect: Effect) -> None:
        cluster_node = self.cluster_node
        if not isinstance(effect, (ReadLog, FetchInflight, FindStarts)):
            self.clients.carry_out(effect)
        elif (
            cluster_node.context.unstored or cluster_node.remote_reads.lake.ask is not None
        ) and cluster_node.remote_reads.take(effect):
            # Another node, this one with others, or a lake has the records.
            return
        elif isinstance(effect, ReadLog):
            self._read_log(effect)
        elif isinstance(effect, FetchInflight):
            self._fetch(effect)
        else:
            self._find_starts(effect)

    def _read_log(self, effect: ReadLog) -> None:
        """Reads now, or after the next group if the file lacks some of the records."""
        if self._is_written(effect.limits):
            self.reader.read_log(effect, partial(self._log_read, self.state.journal.restarts))
        else:
            self._defer(effect)

    def _find_starts(self, effect: FindStarts) -> None:
        """Searches now, or after the next group if the file lacks some of the records."""
        if self._is_written(effect.limits):
            self.reader.find_starts(
                effect, partial(self._starts_found, self.state.journal.restarts)
            )
        else:
            self._defer(effect)

    def _is_written(self, limits: list[int]) -> bool:
        written = self.state.journal.written
        return all(limit <= written[partition] for partition, limit in enumerate(limits))

    def _fetch(self, effect: FetchInflight) -> None:
        """Reads now, or after the next group if the file lacks some of the records."""
        written = self.state.journal.written
        if any(offset >= written[partition] for _, partition, offset in effect.wanted):
            self._defer(effect)
        else:
            self.reader.fetch(effect, partial(self._fetched, self.state.journal.restarts))

    def _defer(self, effect: Effect) -> None:
        """Waits for the next group, because the file lacks some of the records."""
        self.deferred.append(effect)
        self.write_journal(True)

    def _is_over(self, restarts: int, effect: AnyRead, result: Any, has_lost: bool) -> bool:
        """False if a reader here waits for the result. If a log began again during the read, it is
        done again. Counter-example: the node forgets a log that is read for a session. The records
        are at other nodes, and the read takes them for lost. It also begins again if retention has
        removed records before they were read that a lake may have."""
        reads = self.cluster_node.remote_reads
        if restarts != self.state.journal.restarts:
            self._carry_out(effect)
        elif effect.done is not None:
            effect.done(result if self.believes_disk else None)
        elif self.believes_disk:
            return has_lost and reads.lake.ask is not None and reads.take(effect)
        return True

    def _log_read(self, restarts: int, effect: ReadLog, result: ReadResult) -> None:
        if not self._is_over(restarts, effect, result, result.lost > 0):
            self.node.handle_read(
                effect, result.records, result.positions, result.done, result.lost
            )

    def _fetched(self, restarts: int, effect: FetchInflight, found: Found) -> None:
        if not self._is_over(restarts, effect, found, any(record is None for _, record in found)):
            self.node.handle_fetched(effect, found)

    def _starts_found(self, restarts: int, effect: FindStarts, found: list[FoundStart]) -> None:
        if not self._is_over(restarts, effect, found, True):
            handle_starts(self.state, effect, found)

    def _batches_read(self, effect: ReadBatches, batches: list[bytes]) -> None:
        # The disk of a node that has diverged is right, but not its state.
        has_diverged = self.cluster_node.effects.has_diverged and not self.fitness.is_damaged
        if self.believes_disk or has_diverged:
            self.cluster_node.handle_batches(effect.request, batches, self.state.now)

    # Fitness

    def distrust_disk(self) -> None:
        """Gives no read result to anyone any more, if other nodes have replicas of the log.

        Without other replicas the node continues, because the rest of its log is the only copy.
        """
        fitness = self.fitness
        fitness.is_undecided = self.cluster_node.context.metadata is None
        if fitness.is_damaged or not fitness.has_other_replicas():
            return
        self.clients.touch()
        fitness.is_damaged = self._has_news = True
        self._is_watched = True
        self.believes_disk = False
        text = "it gives up its leaderships and serves no client"
        self.state.note("error", "node_damaged", {"text": text})
        self.cluster_node.handle_damage(self.state.now)

    def _leave(self) -> None:
        """Distrusts the disk, because the others have gone on without records of this node. Before,
        it leads the partitions of which it has the last copy, and serves no client and no reader.

        Counter-example of a reader: a session of another node resumes here at an offset that two
        records have, and is sent the one that was given up.
        """
        if not self.fitness.has_last_copy():
            self.distrust_disk()
        elif self.believes_disk and self.fitness.has_other_replicas():
            self.clients.touch()
            self._has_news = True
            self.believes_disk = False

    def report_removed(self) -> None:
        """Notes that the other nodes have removed this one for good."""
        if not self.fitness.is_removed:
            self.clients.touch()
            self.fitness.is_removed = self._has_news = True
            text = "the others go on without this node: stop it"
            self.state.note("error", "node_removed", {"text": text})

    def report_older_copy(self, text: str, may_begin_anew: bool) -> None:
        """Notes that this disk has lost something that it had once."""
        self.clients.touch()
        fitness = self.fitness
        self._has_news = True
        fitness.may_begin_anew = fitness.may_begin_anew or may_begin_anew
        if not fitness.older_copy:
            fitness.older_copy = text
            self.state.note("error", "older_copy", {"text": text})
            self._process.stand_apart(text)
            self.cluster_node.meta.stand_apart(self.state.now)
            self.cluster_node.alone.end()
            self.cluster_node.replication.set_unfit(stands_apart=True)
            # The disk has lost votes and acknowledgements, so the node must give no new ones.
            self._links.isolate("the disk of this node is an older copy")

    # Shutdown

    def ask_to_stop(self, now: float) -> None:
        """Announces that this node leaves as soon as the others can do without it."""
        self.cluster_node.detector.ask_to_stop(now)
        self.clients.touch()

    def leave(self, now: float) -> None:
        """Lets other nodes take over the leaderships; `ProcessPort.relieved` says when."""
        self.cluster_node.detector.leave(now)
        self._is_leaving = self._is_watched = True
        self.clients.touch()

    def hand_over(self, now: float) -> str:
        """Gives up Raft's leadership; returns where the clients may go."""
        self.clients.touch()
        self.cluster_node.meta.transfer_leadership(now)
        self.redirection.hand_over()
        return self.fitness.other_servers(is_stopping=True)

    def recorded_state(self) -> RecordedState:
        """Returns the state that the log's committed records define."""
        return self.cluster_node.replicated.state
