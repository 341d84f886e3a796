"""The turns of a cluster node, which also carry frames between nodes and Raft's writes."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from holdfast.broker.state import NodeState
from holdfast.cluster.failure.disk_watch import DiskWatch
from holdfast.cluster.failure.health import Presence
from holdfast.cluster.frame_kinds import HEARTBEAT, BadFrame
from holdfast.cluster.metadata.model import DATA, ClusterMetadata
from holdfast.cluster.node import ClusterNode
from holdfast.cluster.partitions.effects import ReadBatches
from holdfast.cluster.state.replicated import ReplicatedState
from holdfast.security.passwords import PasswordFile
from holdfast.server.disk import older_copy
from holdfast.server.disk.raft_writer import RaftWriter
from holdfast.server.disk.storage import Storage, report_damage
from holdfast.server.event_loop.broker import Broker
from holdfast.server.peers.links import PeerIdentity, PeerLinks
from holdfast.storage.journal.segment import WriteGroup
from holdfast.storage.journal.watermarks import Checkpoint
from holdfast.storage.reading.segment_reader import Damage

logger = logging.getLogger("holdfast")

WATERMARKS_S: Final = 1.0
"""The interval in seconds at which the high watermarks are written."""


class ClusterBroker(Broker):
    """The `Broker` of a cluster node and the `PeerHandler` of its links.

    `links` and `raft` are set before the first turn. A turn sends the frames of the cluster before
    it submits Raft's writes. Frames that depend on a write are produced only after `raft_written`.
    """

    def __init__(
        self,
        member: ClusterNode,
        loop: "object",
        storage: Storage,
        password_file: PasswordFile | None,
        memory_flush_s: float,
        on_failed: Callable[[BaseException], None],
        on_turn: Callable[[], None],
        disk_stall_s: float,
    ) -> None:
        """`on_turn`: called after a turn with news for the server.

        News are: the cluster's nodes changed, proposals are decided, a snapshot is wanted, the disk
        stalls or responds again, or this node was removed. While `is_watched`, it is called after
        every turn. `disk_stall_s`: the longest normal write in seconds.
        """
        super().__init__(
            member.node,
            loop,  # type: ignore[arg-type]
            storage,
            password_file,
            memory_flush_s,
            on_failed,
        )
        self.member = member
        self.replicated: ReplicatedState = member.replicated
        self.links: PeerLinks | None = None
        self.raft: RaftWriter | None = None
        self.directory = storage.directory
        self.on_turn = on_turn
        storage.opened.store.on_damage = self._found_damage
        self.disk = DiskWatch(disk_stall_s)
        self.is_damaged = False
        """Whether the log has lost or changed records. It never becomes False again."""
        # Damage was found before the metadata said whether there are other replicas.
        self._is_undecided = False
        self.is_removed = False
        """Whether the other nodes have reported that this node was removed for good."""
        self.older_copy = ""
        """The report of another node that this disk has lost something that it had once."""
        self.may_begin_anew = False
        """Whether the other nodes form a majority without this node, so that it may start again."""
        self._standing_changed = False
        self.is_watched = True
        # The time at which the cluster's timers are due.
        self._member_at = 0.0
        self._watermarks_at = 0.0
        self._written_watermarks: Checkpoint | None = None
        # Whether the last attempt to write the watermarks failed, which was logged.
        self._is_unwritten = False

    def set_clock(self) -> None:
        super().set_clock()
        state = self.node.state
        state.wall_us = self.member.clock.tick(state.now, state.wall_us)

    def touch(self) -> None:
        if not self.turn_scheduled:
            super().touch()
            state = self.node.state
            images = self.replicated.state
            images.now = state.now
            images.wall_us = state.wall_us
            self.member.tick(state.now)

    def advance(self) -> None:
        """Run the cluster's timers and the checks of the disk, and let the cluster end its turn."""
        member = self.member
        now = self.node.state.now
        disk_at = self.disk.timer()
        if disk_at is not None and disk_at <= now:
            self._watch_disk(now)
        if self._member_at <= now:
            member.handle_timers(now)
            self._member_at = member.timer()
        member.end_turn(now)

    def next_timer(self) -> float | None:
        when = self.node.timer()
        member = self._member_at = self.member.timer()
        if when is None or member < when:
            when = member
        disk_at = self.disk.timer()
        return disk_at if disk_at is not None and disk_at < when else when

    def _watch_disk(self, now: float) -> None:
        disk = self.disk
        if self.writer.is_full:
            disk.journal.waits_for_space(now)
        if self.raft is not None and self.raft.is_full:
            disk.metadata.waits_for_space(now)
        if disk.handle_timers(now):
            self._tell_disk(now)

    def _tell_disk(self, now: float) -> None:
        """Report that the disk stalls, or that it responds again."""
        is_stalled = self.disk.is_stalled
        self._standing_changed = True
        if is_stalled:
            logger.error("disk_stalled stall_s=%g", self.disk.stall_s)
        else:
            logger.warning("disk_goes_on")
        self.member.handle_disk(is_stalled, now)

    def finish_turn(self) -> None:
        """Send frames, submit Raft's writes and reads, and report the turn's news.

        Frames that announce a Raft write as durable are not among them: they are made by
        `raft_written`.
        """
        member = self.member
        outgoing = member.context.outgoing
        links = self.links
        if outgoing and links is not None:
            member.context.outgoing = []
            for node, kind, payload in outgoing:
                links.send(node, kind, payload)
            links.flush()
        if member.persists and self.raft is not None:
            persists = member.persists
            member.persists = []
            for write in persists:
                self.disk.metadata.began(self.node.state.now)
                self.raft.submit(write)
        if member.reads:
            reads = member.reads
            member.reads = []
            for read in reads:
                self._read_batches(read)
        wants_save = member.transfer.wants_save()
        if member.meta.diverged and not self.older_copy:
            self.on_older_copy(member.meta.diverged, may_begin_anew=False)
        if (
            member.nodes_changed
            or member.outcomes
            or self.is_watched
            or wants_save
            or self._standing_changed
        ):
            self._standing_changed = False
            self.on_turn()
        if self._is_undecided or (member.has_diverged and not self.is_damaged):
            self.distrust_disk()
        self._checkpoint()

    def _checkpoint(self) -> None:
        now = self.node.state.now
        if now < self._watermarks_at + WATERMARKS_S:
            return
        self._watermarks_at = now
        watermarks = self.node.state.journal.checkpoint()
        if watermarks != self._written_watermarks:
            self._written_watermarks = watermarks
            self.writer.housekeeping.submit(partial(self._write_watermarks, watermarks))

    async def write_watermarks(self) -> None:
        """Write the last watermarks behind those in progress, and wait for that."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(result: object, error: BaseException | None) -> None:
            if error is not None:
                written.set_exception(error)
            else:
                written.set_result(None)

        watermarks = self.node.state.journal.checkpoint()
        work = partial(self._write_watermarks, watermarks)
        self.writer.housekeeping.submit(work, done)
        await written

    def _write_watermarks(self, watermarks: Checkpoint) -> None:
        """Write the watermarks, in another thread. Older ones only make a start slower."""
        try:
            self.directory.write_watermarks(watermarks)
        except OSError as error:
            if not self._is_unwritten:
                logger.warning("watermarks_not_written error=%r", str(error))
            self._is_unwritten = True
            return
        self._is_unwritten = False

    def refuse_publishes(self) -> None:
        was_full = self.node.state.disk_full
        super().refuse_publishes()
        if not was_full:
            self._tell_space(is_full=True)

    def accept_publishes(self) -> None:
        was_full = self.node.state.disk_full
        super().accept_publishes()
        if was_full:
            self._tell_space(is_full=False)

    def _tell_space(self, *, is_full: bool) -> None:
        self.touch()
        self._standing_changed = True
        self.member.handle_space(is_full, self.node.state.now)

    def waits_s(self) -> float:
        return self.member.forwarding.waits_s(self.loop.time())

    def group_taken(self, group: WriteGroup) -> None:
        now = self.node.state.now
        self.disk.journal.began(now)
        self.member.handle_taken(group, now)

    def group_written(self, group: WriteGroup) -> None:
        """Commit a group locally, and let the cluster acknowledge what is durable."""
        super().group_written(group)
        now = self.node.state.now
        if self.disk.ended(self.disk.journal, now):
            self._tell_disk(now)
        self.member.handle_durable(now)

    def write_journal(self, at_once: bool) -> None:
        super().write_journal(at_once)
        if self.node.state.memory:
            self.member.handle_durable(self.node.state.now)

    def _read_batches(self, effect: ReadBatches) -> None:
        reader = self.reader
        end = self.node.state.journal.next_offset[effect.partition]

        def work() -> object:
            return reader.read_batches(effect.partition, effect.start, end, effect.bytes_max)

        def done(result: object, error: BaseException | None) -> None:
            self.touch()
            if error is not None:
                self.fail("log_read_failed", error)
                return
            if not self.believes_disk:
                return
            assert isinstance(result, list)
            self.member.handle_batches(effect.request, result, self.node.state.now)

        self.read_pool.submit(work, done)

    def raft_written(self) -> None:
        self.touch()
        now = self.node.state.now
        if self.disk.ended(self.disk.metadata, now):
            self._tell_disk(now)
        self.member.handle_persisted(now)

    def recorded_state(self) -> NodeState:
        return self.replicated.state

    def snapshot_offsets(self) -> list[int]:
        return self.member.transfer.offsets()

    def snapshot_entries(self) -> Iterator[tuple[int, bytes]]:
        return self.replicated.snapshot()

    # PeerHandler

    def on_connected(self, identity: PeerIdentity) -> None:
        self.touch()
        presence = Presence(
            identity.incarnation,
            identity.peer_address,
            identity.client_address,
            identity.admin_address,
            identity.features,
        )
        member, now = self.member, self.node.state.now
        self._link_changed(
            partial(member.handle_connected, identity.node_id, presence, identity.role, now)
        )

    def on_frame(self, node_id: str, kind: int, payload: bytes) -> None:
        self.touch()
        # The process may have been stopped after the turn began, so the turn's clock may be old.
        # Ownership and heartbeats are judged by the present time.
        now = self.loop.time()
        self.member.tick(now)
        if kind != HEARTBEAT:
            now = self.node.state.now
        try:
            self.member.handle_frame(node_id, kind, payload, now)
        except BadFrame:
            raise
        except Exception as error:  # noqa: BLE001
            self.fail("frame_failed", error)

    def on_disconnected(self, node_id: str) -> None:
        self.touch()
        self._link_changed(partial(self.member.handle_disconnected, node_id, self.node.state.now))

    def on_refused(self, node_id: str) -> None:
        self.touch()
        self._link_changed(partial(self.member.handle_refused, node_id, self.node.state.now))

    def _link_changed(self, tell_member: Callable[[], None]) -> None:
        """Change a link, and stop the node if that fails.

        An exception in the link's callback would only close the link. The next link would fail in
        the same way, while the node seems to work.
        """
        try:
            tell_member()
        except Exception as error:  # noqa: BLE001
            self.fail("link_failed", error)

    def _found_damage(self, damage: Damage) -> None:
        """Report damage, in the reading thread, before it reports what it has read."""
        report_damage(damage)
        self.loop.call_soon_threadsafe(self.distrust_disk)

    def distrust_disk(self) -> None:
        """Give no read result to anyone any more, if other nodes have replicas of the log.

        Without other replicas the node continues, because the rest of its log is the only copy.
        """
        metadata = self.member.context.metadata
        self._is_undecided = metadata is None
        if self.is_damaged or metadata is None or not _has_other_replicas(self.member, metadata):
            return
        self.touch()
        self.is_damaged = self._standing_changed = True
        self.is_watched = True
        self.believes_disk = False
        logger.error("node_damaged text='it gives up what it leads and serves nobody'")
        self.member.handle_damage(self.node.state.now)

    def on_removed(self) -> None:
        if not self.is_removed:
            self.touch()
            self.is_removed = self._standing_changed = True
            logger.error("node_removed text='the others go on without this node: stop it'")

    def on_older_copy(self, text: str, may_begin_anew: bool) -> None:
        self.touch()
        self._standing_changed = True
        self.may_begin_anew = self.may_begin_anew or may_begin_anew
        if not self.older_copy:
            self.older_copy = text
            logger.error("older_copy text=%r", text)
            older_copy.stand_apart(self.directory.files, text)
            self.member.meta.stand_apart(self.node.state.now)
            self.member.replication.set_unfit(stands_apart=True)
            if self.links is not None:
                # The disk has lost votes and acknowledgements, so the node must give no new ones.
                self.links.isolate("the disk of this node is an older copy")

    def close(self) -> None:
        if self.raft is not None:
            self.raft.close()
        super().close()


def _has_other_replicas(member: ClusterNode, metadata: ClusterMetadata) -> bool:
    own = member.meta.node_id
    return any(node != own and info.role == DATA for node, info in metadata.nodes.items())
