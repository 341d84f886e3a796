"""A node's process: the production cores, driven as server/event_loop/cluster_broker.py and
server/cluster.py drive them, by the schedule's clock, with the simulated network and disk.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from holdfast.broker.effects import Effect, FetchInflight, Note, ReadLog, ResumeInput
from holdfast.broker.session.connection import Connection
from holdfast.cluster.failure.health import Presence
from holdfast.cluster.frame_kinds import IMAGE, BadFrame
from holdfast.cluster.metadata.model import DATA, WITNESS, ClusterMetadata, NodePhase
from holdfast.cluster.partitions.disk_position import lost_since
from holdfast.cluster.partitions.effects import ReadBatches
from holdfast.server.disk import older_copy
from holdfast.storage.record import Record
from tests.sim.cores import Cores
from tests.sim.network import PeerConnection
from tests.sim.storing import ProcessDisk

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.sockets import ClientSocket

LEAVE_S: Final = 3.0
"""How long the others have, at a shutdown, to take over what this node leads."""
READ_S: Final = 0.002
"""The longest read."""


class Process:
    """`host.world` has the settings. Raises what the cores raise: that is a finding."""

    def __init__(self, host: "Host", number: int) -> None:
        self.host = host
        self.number = number
        self.schedule = host.world.schedule
        self.chance: random.Random = self.schedule.chance(f"{host.name}/{number}")
        self.is_over = False
        self.links: dict[str, PeerConnection] = {}
        self.sockets: dict[Connection, ClientSocket] = {}
        self.is_ready = False
        self.is_leaving = False
        self._turn_scheduled = False
        self._timer_at = float("inf")
        # When the member's timers are due, as it said last.
        self._member_at = 0.0
        self.cores: Cores = Cores(host, self, number, self.chance)
        self.is_isolated = False
        """Others have said that the disk is an older copy."""
        self.storage = self.cores.storage
        self.journal = self.cores.journal
        self.node = self.cores.node
        self.state = self.cores.state
        self.images = self.cores.images
        self.member = self.cores.member
        self.presence = self.cores.presence
        self.role = WITNESS if host.is_witness else DATA
        self.disk = ProcessDisk(self)
        host.world.images_watch.begin(self)
        if host.creates_cluster and self.cores.meta.metadata is None:
            self.cores.create_cluster(host)
        self.touch()
        if older_copy.reason_apart(host.disk):
            self.stand_apart()
        self.disk.begin()

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

    def touch(self) -> None:
        """Something has come: the clock is set, and there will be a turn."""
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self.node.tick(self.host.clock(), self.host.wall_us())
            self.state.wall_us = self.member.clock.tick(self.state.now, self.state.wall_us)
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
        self.disk.write_journal()
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
        self.disk.write_journal()
        self._finish_turn()
        self._member_at = self.member.timer()
        times = (node.timer(), self._member_at, self.disk.watch.timer())
        self._arm(min(when for when in times if when is not None))

    def _arm(self, when: float) -> None:
        """In this process' time."""
        due = self.host.schedule_time(when)
        if due < self._timer_at:
            self._timer_at = due
            self.schedule.at(due, lambda: self._post_own(lambda: self._fire(due)))

    def _fire(self, due: float) -> None:
        if self._timer_at == due:
            self._timer_at = float("inf")
            self.touch()

    def _advance(self) -> None:
        member = self.member
        now = self.state.now
        disk_at = self.disk.watch.timer()
        if disk_at is not None and disk_at <= now:
            self.disk.handle_timers(now)
        if self._member_at <= now:
            member.handle_timers(now)
            self._member_at = member.timer()
        member.end_turn(now)

    def _finish_turn(self) -> None:
        member = self.member
        outgoing = member.context.outgoing
        member.context.outgoing = []
        for other, kind, payload in outgoing:
            link = self.links.get(other)
            if link is not None:
                data = b"".join(payload) if isinstance(payload, list) else payload
                link.push(other, (kind, data))
        for write in member.persists:
            self.disk.write_raft(write)
        member.persists = []
        for read in member.reads:
            self._read_batches(read)
        member.reads = []
        member.outcomes = []
        if member.nodes_changed:
            member.nodes_changed = False
            assert member.context.metadata is not None
            self._take_nodes(member.context.metadata)
        if member.transfer.wants_save():
            self.disk.take_snapshot()
        if not self.is_ready and self._looks_ready():
            self.is_ready = True
            self.node.start()
            self.schedule.note(self.host.name, "ready")
            self.redirect()
        self.disk.checkpoint()
        self.host.world.checks.turn_ended(self)

    # The cluster; see api.clustering

    def _looks_ready(self) -> bool:
        member = self.member
        metadata = member.context.metadata
        if metadata is None or self.host.name not in metadata.nodes:
            return False
        if self.host.is_witness:
            return True
        for partition, info in enumerate(metadata.partitions):
            if member.context.leads(partition):
                continue
            if not info.leader or member.replication.followed_epoch(partition) != info.epoch:
                return False
        return member.context.is_whole and member.meta.has_majority(self.state.now)

    def _take_nodes(self, metadata: ClusterMetadata) -> None:
        directory = self.cores.directory
        if directory.manifest.cluster_id != metadata.cluster_id:
            directory.join_cluster(metadata.cluster_id)
        for other in list(self.links):
            if self.host.world.hosts[other].was_removed(metadata):
                self._close(other)
        self.redirect()

    def _close(self, other: str) -> None:
        """The link to it."""
        connection = self.links[other]
        self.host.world.network.close(connection, self.host.name, other)
        self.link_down(connection, other)

    def has_removed(self, other: "Host") -> bool:
        """It does not talk to it."""
        metadata = self.member.context.metadata
        return metadata is not None and other.was_removed(metadata)

    def finds_older(self, other: "Host") -> bool:
        """The disk there is an older copy: it is told so, and takes part in nothing."""
        process = other.process
        metadata = self.member.context.metadata
        if process is None or other.is_paused or self.host.is_paused or self.is_isolated:
            return False
        if metadata is None or other.name not in metadata.nodes:
            return False
        claim = process.member.disk_claim().text()
        known = self.member.disk_memory.known
        lost = lost_since(known, other.name, process.cores.incarnation, claim)
        if not lost and not process.is_isolated:
            return False
        self.touch()
        may_begin = self.member.older_copies.may_begin_anew(
            other.name, str(process.number), process.is_isolated
        )
        self.schedule.note(other.name, f"is an older copy, says {self.host.name}")
        if not process.is_isolated:
            older_copy.stand_apart(other.disk, "it lacks what was agreed")
            process.stand_apart()
        for peer in list(process.links):
            process._close(peer)
        if may_begin:
            other.post(other.begin_anew)
        return True

    def stand_apart(self) -> None:
        """Decide, follow and lead nothing more."""
        self.is_isolated = True
        self.touch()
        self.member.meta.stand_apart(self.state.now)
        self.member.replication.set_unfit(stands_apart=True)

    def redirect(self) -> None:
        metadata = self.member.context.metadata
        if metadata is None or not self.is_ready:
            return
        info = metadata.nodes.get(self.host.name)
        is_draining = info is not None and info.state == NodePhase.DRAINING
        servers = "elsewhere:1" if is_draining or self.disk.watch.is_stalled else ""
        if servers != self.state.redirect:
            self.touch()
            self.node.redirect(servers, "this node is of no use now")

    def leave(self) -> None:
        """A shutdown in good order."""
        if self.is_leaving:
            return
        self.is_leaving = True
        self.touch()
        self.member.detector.leave(self.state.now)
        self._wait_relieved(self.schedule.now + LEAVE_S)

    def _wait_relieved(self, deadline: float) -> None:
        context = self.member.context
        if any(context.leading) and context.connected and self.schedule.now < deadline:
            self.later(0.01, lambda: self._wait_relieved(deadline))
            return
        self.touch()
        self.member.meta.hand_over(self.state.now)
        self.node.shut_down("elsewhere:1")
        self.later(0.1, self.host.has_left)

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

    def _read(self, work: Callable[[], None]) -> None:
        """Not before the disk answers."""
        self.disk.later(self.chance.random() * READ_S, work)

    def _read_log(self, effect: ReadLog) -> None:
        written = self.journal.written
        if any(limit > written[partition] for partition, limit in enumerate(effect.limits)):
            self.disk.deferred.append(effect)
            return

        def work() -> None:
            result = self.storage.reader.read(
                effect.positions,
                effect.limits,
                effect.interests,
                effect.records_max,
                effect.bytes_max,
            )
            self.touch()
            self.node.handle_read(
                effect, result.records, result.positions, result.done, result.lost
            )

        self._read(work)

    def _fetch(self, effect: FetchInflight) -> None:
        written = self.journal.written
        if any(offset >= written[partition] for _, partition, offset in effect.wanted):
            self.disk.deferred.append(effect)
            return

        def work() -> None:
            found: list[tuple[int, Record | None]] = []
            for packet_id, partition, offset in effect.wanted:
                found.append((packet_id, self.storage.reader.fetch(partition, offset)))
                # A driver may leave out the rest.
                if self.chance.random() < 0.1:
                    break
            self.touch()
            self.node.handle_fetched(effect, found)

        self._read(work)

    def _read_batches(self, effect: ReadBatches) -> None:
        end = self.journal.next_offset[effect.partition]

        def work() -> None:
            found = self.storage.reader.read_batches(
                effect.partition, effect.start, end, effect.bytes_max
            )
            self.touch()
            self.member.handle_batches(effect.request, found, self.state.now)

        self._read(work)

    # The other nodes

    def link_up(
        self, connection: PeerConnection, other: str, presence: Presence, role: str
    ) -> None:
        known = self.links.get(other)
        if known is not None:
            self._close(other)
        self.links[other] = connection
        self.touch()
        self.schedule.note(self.host.name, f"connected to {other}")
        self.member.handle_connected(other, presence, role, self.state.now)

    def link_down(self, connection: PeerConnection, other: str) -> None:
        del self.links[other]
        self.touch()
        self.schedule.note(self.host.name, f"lost {other}")
        self.member.handle_disconnected(other, self.state.now)
        if any(node == other for node, _, _ in self.member.context.outgoing):
            # They would leave on the next link, whose other end may be another process.
            checks = self.host.world.checks
            checks.fail(f"{self.host.name} keeps frames of a lost link to {other}")

    def frame(self, connection: PeerConnection, other: str, kind: int, data: bytes) -> None:
        self.touch()
        if kind == IMAGE:
            self.host.world.images_watch.begin(self)
        try:
            self.member.handle_frame(other, kind, data, self.state.now)
        except BadFrame as error:
            self.host.world.checks.fail(f"{self.host.name} got a bad frame of {other}: {error}")

    def refused(self, other: str) -> None:
        self.touch()
        self.member.handle_refused(other, self.state.now)

    # Clients

    def accept(self, socket: "ClientSocket") -> Connection:
        self.touch()
        connection = self.node.handle_connected("sim", "sim")
        self.sockets[connection] = socket
        return connection

    def received(self, connection: Connection, data: bytes) -> None:
        self.touch()
        self.node.handle_data(connection, data)

    def client_gone(self, connection: Connection) -> None:
        if self.sockets.pop(connection, None) is not None:
            self.touch()
            self.node.handle_disconnected(connection)
