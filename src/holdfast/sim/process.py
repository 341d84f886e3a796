"""A node's process: the production cores, driven as drivers/cluster_broker.py and
api/clustering.py drive them, by the schedule's clock, with the simulated network and disk.
"""

import contextlib
import random
from collections import deque
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, cast

from holdfast.cluster.images import Images
from holdfast.cluster.member import Member, MemberConfig
from holdfast.drivers.disk import SPACE_POLL_S, DiskFullError, GroupWriter
from holdfast.drivers.raft_files import RaftFiles
from holdfast.drivers.storage import SNAPSHOTS_KEPT, Storage
from holdfast.log.files import (
    MANIFEST,
    DataDirectory,
    Manifest,
    create,
    read_manifest,
    snapshot_name,
)
from holdfast.log.filesystem import TemporaryFile
from holdfast.log.index import ActiveIndex
from holdfast.log.journal import Segment, WriteGroup
from holdfast.log.retention import RetentionPolicy, SegmentSummary, decide
from holdfast.log.snapshot import SnapshotEncoder
from holdfast.log.watermarks import Checkpoint
from holdfast.node.config import NodeConfig
from holdfast.node.effects import Effect, FetchInflight, Note, ReadLog, ResumeInput
from holdfast.node.holding import holds_of
from holdfast.node.node import Node
from holdfast.node.state import NodeState
from holdfast.replication.controller import ControllerConfig
from holdfast.replication.detector import DetectorConfig
from holdfast.replication.health import Presence
from holdfast.replication.kinds import BadFrame
from holdfast.replication.metadata import DATA, NodeInfo
from holdfast.replication.metastate import member_id
from holdfast.replication.metastore import MetaStore
from holdfast.replication.raft import Write
from holdfast.replication.replica_config import ReplicationConfig
from holdfast.replication.replica_effects import ReadBatches
from holdfast.session.connection import Connection
from holdfast.sim.network import PeerConnection

if TYPE_CHECKING:
    from holdfast.sim.host import Host
    from holdfast.sim.sockets import ClientSocket

WATERMARKS_S: Final = 1.0
SPACE_S: Final = 0.5
PENDING_BYTES: Final = 8 << 20


class Process:
    """`host.world` has the settings. Raises what the cores raise: that is a finding."""

    def __init__(self, host: "Host", number: int) -> None:
        self.host = host
        self.number = number
        world = host.world
        self.schedule = world.schedule
        self.chance: random.Random = self.schedule.chance(f"{host.name}/{number}")
        self.is_over = False
        self.links: dict[str, PeerConnection] = {}
        self.sockets: dict[Connection, ClientSocket] = {}
        self.is_ready = False
        self._turn_scheduled = False
        self._timer_at = float("inf")
        self._deferred: list[Effect] = []
        self._watermarks_at = 0.0
        self._written_watermarks: Checkpoint | None = None
        # The journal's group and the metadata's writes that are under way.
        self.group: WriteGroup | None = None
        self.raft_writes: deque[Write] = deque()
        self.is_full = False
        self._unfinished_snapshot: tuple[TemporaryFile, int, dict[int, int]] | None = None
        self._open()

    # The start

    def _open(self) -> None:
        host = self.host
        settings = host.world.settings
        files = host.disk
        if MANIFEST not in files.list(""):
            manifest = Manifest(host.name, settings.partitions, "", "", host.new_incarnation())
            directory = create(files, manifest)
        else:
            manifest = read_manifest(files, cast("object", PurePosixPath(host.name)))  # type: ignore[arg-type]
            directory = DataDirectory(files, manifest)
        self.incarnation = manifest.incarnation
        lock = files.lock_as(self, "lock")
        assert lock is not None
        self.storage = Storage.recover(
            PurePosixPath(host.name),  # type: ignore[arg-type]
            directory,
            lock,
            settings.segment_bytes,
        )
        self.directory = directory
        journal = self.storage.journal
        self.node = Node(
            NodeConfig(
                node_id=host.name,
                partitions=settings.partitions,
                sys_interval_s=0,
                outbox_messages=settings.outbox_messages,
                inflight_max=8,
            ),
            journal,
        )
        self.state: NodeState = self.node.state
        self.state.client_id_prefix = f"auto-{host.name}-{self.number}-"
        self._tick()
        state = NodeState(self.state.config, journal)
        state.now = self.state.now
        state.wall_us = self.state.wall_us
        self.images = Images(state)
        self.storage.replay_into(self.images)
        self.raft_files = RaftFiles(
            files, member_id(host.name, manifest.incarnation), is_new=not manifest.cluster_id
        )
        now = self.state.now
        self.meta = MetaStore(
            host.name,
            manifest.incarnation,
            self.raft_files.state,
            nonce=f"{host.name}{self.number}",
            random=self.chance.random,
            now=now,
        )
        self.presence = Presence(manifest.incarnation, f"{host.name}:1", f"{host.name}:2", "")
        self.member = Member(
            self.node,
            self.images,
            journal,
            self.meta,
            self.presence,
            MemberConfig(
                DetectorConfig(),
                ControllerConfig(replace_after_s=settings.replace_after_s),
                ReplicationConfig(incarnation=manifest.incarnation),
            ),
            self.chance.random,
            now,
            self.storage.lacking(),
        )
        self._load_uncommitted()
        self.writer = GroupWriter(directory, durable=True, allocate_bytes=settings.allocate_bytes)
        self.journal = journal
        if host.creates_cluster and self.meta.metadata is None:
            self.meta.create_cluster(
                "simulated",
                settings.partitions,
                settings.replication_factor,
                settings.min_insync,
                NodeInfo(
                    host.name,
                    manifest.incarnation,
                    self.presence.peer_address,
                    self.presence.client_address,
                    self.presence.admin_address,
                ),
                now,
            )
        self._touch()
        self.schedule.after(SPACE_S, self._watch_space)
        self.schedule.after(
            settings.snapshot_s * (0.5 + self.chance.random()), self._maybe_snapshot
        )

    def _load_uncommitted(self) -> None:
        journal = self.storage.journal
        for partition, end in enumerate(journal.next_offset):
            start = journal.high_watermark[partition]
            while start < end:
                batches = self.storage.reader.read_batches(partition, start, end, PENDING_BYTES)
                if not batches:
                    break
                self.member.load_uncommitted(batches, partition)
                start = self.member.log.uncommitted[partition][-1].end_offset

    # The event loop

    def post(self, work: Callable[[], None]) -> None:
        """From the schedule: in this process, when it runs."""
        if not self.is_over:
            self.host.post(work)

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """Of its own."""
        self.schedule.after(delay_s, lambda: self._post_own(work))

    def _post_own(self, work: Callable[[], None]) -> None:
        if not self.is_over:
            self.host.post(work, is_own=True)

    def _tick(self) -> None:
        self.node.tick(self.host.clock(), self.host.wall_us())

    def _touch(self) -> None:
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._tick()
            images = self.images.state
            images.now = self.state.now
            images.wall_us = self.state.wall_us
            self.member.tick(self.state.now)
            self.later(self.chance.random() * self.host.world.settings.turn_s, self._turn)

    def _turn(self) -> None:
        self._turn_scheduled = False
        node = self.node
        state = self.state
        when = node.timer()
        if when is not None and when <= state.now:
            node.handle_timers()
        self._advance()
        self._write_journal()
        while state.effects or state.dirty:
            effects = state.effects
            state.effects = []
            for effect in effects:
                self._carry_out(effect)
            dirty = state.dirty
            state.dirty = []
            for connection in dirty:
                connection.dirty = False
                socket = self.sockets.get(connection)
                if socket is not None:
                    socket.flush()
        self._advance()
        self._write_journal()
        self._finish_turn()
        when = node.timer()
        member = self.member.timer()
        self._arm(member if when is None or member < when else when)

    def _arm(self, when: float) -> None:
        """In this process' time."""
        due = self.host.schedule_time(when)
        if due < self._timer_at:
            self._timer_at = due
            self.schedule.at(due, lambda: self._post_own(lambda: self._fire(due)))

    def _fire(self, due: float) -> None:
        if self._timer_at == due:
            self._timer_at = float("inf")
            self._touch()

    def _advance(self) -> None:
        member = self.member
        now = self.state.now
        if member.timer() <= now:
            member.handle_timers(now)
        member.end_turn(now)

    def _finish_turn(self) -> None:
        member = self.member
        outgoing = member.fabric.outgoing
        member.fabric.outgoing = []
        for other, kind, payload in outgoing:
            link = self.links.get(other)
            if link is not None:
                data = b"".join(payload) if isinstance(payload, list) else payload
                link.push(other, (kind, data))
        for write in member.persists:
            self.raft_writes.append(write)
            if len(self.raft_writes) == 1:
                self._begin_raft_write()
        member.persists = []
        for read in member.reads:
            self._read_batches(read)
        member.reads = []
        member.outcomes = []
        if member.nodes_changed:
            member.nodes_changed = False
            assert member.fabric.metadata is not None
            if self.directory.manifest.cluster_id != member.fabric.metadata.cluster_id:
                self.directory.join_cluster(member.fabric.metadata.cluster_id)
        if member.transfer.wants_save() and self._unfinished_snapshot is None:
            self._take_snapshot()
        if not self.is_ready and self._looks_ready():
            self.is_ready = True
            self.node.start()
            self.schedule.note(self.host.name, "ready")
        self._checkpoint()
        self.host.world.checks.turn_ended(self)

    def _looks_ready(self) -> bool:
        """See api.clustering."""
        member = self.member
        metadata = member.fabric.metadata
        if metadata is None or self.host.name not in metadata.nodes:
            return False
        for partition, info in enumerate(metadata.partitions):
            if member.fabric.leads(partition):
                continue
            if not info.leader or member.replication.followed_epoch(partition) != info.epoch:
                return False
        return member.fabric.is_whole and member.meta.has_majority(self.state.now)

    # The disk

    def _write_journal(self) -> None:
        if self.group is not None:
            return
        group = self.journal.take()
        if group is None:
            return
        self.group = group
        self.member.handle_taken(group, self.state.now)
        self.later(self.host.sync_s(), self._write_group)

    def _write_group(self) -> None:
        group = self.group
        assert group is not None
        try:
            self.writer.write(group)
        except DiskFullError:
            if not self.is_full:
                self.is_full = True
                self._touch()
                self.state.disk_full = True
                self.schedule.note(self.host.name, "disk full")
            self.later(SPACE_POLL_S, self._write_group)
            return
        self.is_full = False
        self.host.mirror.wrote(group)
        self._touch()
        self.group = None
        self.journal.wrote(group)
        self.journal.commit(group)
        self.state.release_committed()
        self.state.release_stalled()
        self.state.effects.extend(self._deferred)
        self._deferred.clear()
        self.member.handle_durable(self.state.now)
        if group.sealed is not None:
            self._write_index(group.sealed)

    def _write_index(self, segment: Segment) -> None:
        index = segment.index
        if not isinstance(index, ActiveIndex):
            return
        try:
            self.directory.write_index(segment.sequence, index.encode(lambda: None))
        except OSError:
            return
        segment.index = None

    def _begin_raft_write(self) -> None:
        self.later(self.host.sync_s(), self._write_raft)

    def _write_raft(self) -> None:
        try:
            self.raft_files.write(self.raft_writes[0])
        except DiskFullError:
            self.later(SPACE_POLL_S, self._write_raft)
            return
        self.raft_writes.popleft()
        self._touch()
        self.member.handle_persisted(self.state.now)
        if self.raft_writes:
            self._begin_raft_write()

    def _watch_space(self) -> None:
        if self.is_over:
            return
        self.schedule.after(SPACE_S, self._watch_space)
        if self.state.disk_full and not self.is_full and self.directory.files.free_bytes() > 0:
            self.state.disk_full = False

    def _checkpoint(self) -> None:
        now = self.state.now
        if now < self._watermarks_at + WATERMARKS_S:
            return
        watermarks = self.journal.checkpoint()
        if watermarks != self._written_watermarks:
            self._watermarks_at = now
            self._written_watermarks = watermarks
            try:
                self.directory.write_watermarks(watermarks, sync=False)
            except OSError:
                return

    def _maybe_snapshot(self) -> None:
        """As api/maintenance.py does it, but for the slices."""
        if self.is_over:
            return
        self.schedule.after(
            self.host.world.settings.snapshot_s * (0.5 + self.chance.random()),
            self._maybe_snapshot,
        )
        if self.is_ready:
            self.post(self._take_snapshot)

    def _take_snapshot(self) -> None:
        if self._unfinished_snapshot is not None:
            return
        transfer = self.member.transfer
        covered = transfer.begin_save()
        known = self.storage.snapshots
        settled = self.journal.settled_sequence(self.journal.high_watermark)
        sequence = max(known[-1] if known else -1, settled)
        encoder = SnapshotEncoder(sequence, transfer.offsets(), self.state.wall_us)
        try:
            file = TemporaryFile(self.directory.files, snapshot_name(sequence))
            for kind, data in self.images.snapshot():
                file.write(encoder.add(kind, data))
            file.write(encoder.finish())
        except OSError:
            return
        self._unfinished_snapshot = (file, sequence, covered)
        self.schedule.note(self.host.name, f"snapshot {sequence}")
        self.later(0.01, self._finish_snapshot)

    def _finish_snapshot(self) -> None:
        assert self._unfinished_snapshot is not None
        if self.group is not None or self.journal.pending_bytes:
            self.later(0.01, self._finish_snapshot)
            return
        file, sequence, covered = self._unfinished_snapshot
        self._unfinished_snapshot = None
        file.finish()
        self._touch()
        self.member.transfer.saved(covered)
        known = self.storage.snapshots
        if not known or known[-1] != sequence:
            known.append(sequence)
        while len(known) > SNAPSHOTS_KEPT:
            self.directory.remove_snapshot(known.pop(0))
        if self.host.world.settings.retention_bytes:
            self._retain(self.host.world.settings.retention_bytes)

    def _retain(self, bytes_max: int) -> None:
        """As api/maintenance.py does it; no session loses anything."""
        journal = self.journal
        summaries = [
            SegmentSummary(
                segment.sequence,
                segment.size_bytes,
                segment.last_timestamp_us(),
                segment.end_offsets(),
            )
            for segment in journal.segments
        ]
        decision = decide(
            summaries,
            journal.start_offsets,
            RetentionPolicy(None, bytes_max, None),
            self.storage.snapshots[0],
            holds_of(self.images.state, None),
            self.state.wall_us,
        )
        if decision.remove:
            removed = journal.remove_oldest(decision.remove)
            self.host.mirror.begin(journal.start_offsets)
            with contextlib.suppress(OSError):
                self.storage.remove_segments(removed)

    # Effects

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, ReadLog):
            self._read_log(effect)
        elif isinstance(effect, FetchInflight):
            self._fetch(effect)
        elif isinstance(effect, ResumeInput):
            socket = self.sockets.get(effect.connection)
            if socket is not None:
                self.node.handle_resumed(effect.connection)
                socket.resume()
        elif isinstance(effect, Note):
            self.schedule.note(self.host.name, f"{effect.event} {effect.fields}")
            self.host.world.checks.noted(self, effect)

    def _read_log(self, effect: ReadLog) -> None:
        written = self.journal.written
        if any(limit > written[partition] for partition, limit in enumerate(effect.limits)):
            self._deferred.append(effect)
            return

        def work() -> None:
            result = self.storage.reader.read(
                effect.positions,
                effect.limits,
                effect.interests,
                effect.records_max,
                effect.bytes_max,
            )
            self._touch()
            self.node.handle_read(
                effect, result.records, result.positions, result.done, result.lost
            )

        self.later(self.chance.random() * 0.002, work)

    def _fetch(self, effect: FetchInflight) -> None:
        written = self.journal.written
        if any(offset >= written[partition] for _, partition, offset in effect.wanted):
            self._deferred.append(effect)
            return

        def work() -> None:
            found = [
                (packet_id, self.storage.reader.fetch(partition, offset))
                for packet_id, partition, offset in effect.wanted
            ]
            self._touch()
            self.node.handle_fetched(effect, found)

        self.later(self.chance.random() * 0.002, work)

    def _read_batches(self, effect: ReadBatches) -> None:
        end = self.journal.next_offset[effect.partition]

        def work() -> None:
            found = self.storage.reader.read_batches(
                effect.partition, effect.start, end, effect.bytes_max
            )
            self._touch()
            self.member.handle_batches(effect.request, found, self.state.now)

        self.later(self.chance.random() * 0.002, work)

    # The other nodes

    def link_up(self, connection: PeerConnection, other: str, presence: Presence) -> None:
        known = self.links.get(other)
        if known is not None:
            self.link_down(known, other)
        self.links[other] = connection
        self._touch()
        self.schedule.note(self.host.name, f"connected to {other}")
        self.member.handle_connected(other, presence, DATA, self.state.now)

    def link_down(self, connection: PeerConnection, other: str) -> None:
        del self.links[other]
        self._touch()
        self.schedule.note(self.host.name, f"lost {other}")
        self.member.handle_disconnected(other, self.state.now)

    def frame(self, connection: PeerConnection, other: str, kind: int, data: bytes) -> None:
        self._touch()
        try:
            self.member.handle_frame(other, kind, data, self.state.now)
        except BadFrame as error:
            self.host.world.checks.fail(f"{self.host.name} got a bad frame of {other}: {error}")

    def refused(self, other: str) -> None:
        self._touch()
        self.member.handle_refused(other, self.state.now)

    # Clients

    def accept(self, socket: "ClientSocket") -> Connection:
        self._touch()
        connection = self.node.handle_connected("sim", "sim")
        self.sockets[connection] = socket
        return connection

    def received(self, connection: Connection, data: bytes) -> None:
        self._touch()
        self.node.handle_data(connection, data)

    def client_gone(self, connection: Connection) -> None:
        if self.sockets.pop(connection, None) is not None:
            self._touch()
            self.node.handle_disconnected(connection)
