"""A node's process: the turns of `holdfast.node.runtime` over the production cores, by the
schedule's clock, with the simulated network and disk.
"""

from typing import TYPE_CHECKING, Final

from holdfast.io.disk import older_copy
from holdfast.log.journal.group_commit_delay import JournalWaits
from holdfast.log.journal.watermarks import Checkpoint
from holdfast.log.reading.scan import Damage
from holdfast.node.effects import Note
from holdfast.node.frame_kinds import IMAGE, RELAYED, BadFrame
from holdfast.node.metadata.model import DATA, ClusterMetadata
from holdfast.node.metadata.requests import Outcome
from holdfast.node.runtime.peer_check import PeerCheck
from holdfast.node.runtime.ports import RuntimePorts
from holdfast.node.runtime.replacement import Replacement
from holdfast.node.runtime.runtime import Runtime
from holdfast.security.peer_identity import PeerIdentity
from tests.sim.cores import Cores
from tests.sim.links import SimLinks, relayed_kind
from tests.sim.loop import EventLoop
from tests.sim.network import PeerConnection
from tests.sim.reads import SimReads
from tests.sim.storing import ProcessDisk
from tests.sim.watching import FeedsWatch

if TYPE_CHECKING:
    from tests.sim.host import Host

SAVE_AGAIN_S: Final = 1.0
"""The pause after a manifest that could not be written, as that of the server."""
LEAVE_S: Final = 3.0
"""How long the others have, at a shutdown, to take over what this node leads."""
GATHER_S: Final = 0.05
"""The wait where records gather: long, because few clients publish here."""
LOOK_S: Final = 1.0
"""As often a node that began with an empty directory looks whether it has everything."""


class Process(EventLoop):
    """The driver of a `Runtime`. `host.world` has the settings. Raises what the cores raise:
    that is a finding."""

    def __init__(self, host: "Host", number: int) -> None:
        super().__init__(host, number)
        self.links: dict[str, PeerConnection] = {}
        self.proposals: set[int] = set()
        """Of an operator, without an outcome."""
        self.is_leaving = False
        self._has_left = False
        self.cores: Cores = Cores(host, self, number, self.chance)
        self.journal = self.cores.journal
        self.node = self.cores.node
        self.state = self.cores.state
        self.images = self.cores.images
        self.cluster_node = self.cores.cluster_node
        if host.world.settings.reads_remotely and host.role == DATA:
            shift = int(host.name[1:])
            reads = self.cluster_node.remote_reads
            has_log = reads.is_stored
            reads.is_stored = lambda p: (p + shift) % 3 == 0 and has_log(p)
        self.feeds_watch = FeedsWatch(self)
        self.presence = self.cores.presence
        self.role = host.role
        self.disk = ProcessDisk(self)
        self.peer_links = SimLinks(self)
        reads = SimReads(self, self.disk, self.cores.storage.reader)
        self.runtime: Runtime = Runtime(
            self.cluster_node,
            RuntimePorts(self.disk, reads, self, self.disk.raft, self.peer_links, self),
            Replacement(host.name, self.state, host.aside),
            host.world.settings.disk_stall_s,
            JournalWaits(durable_s=GATHER_S * host.world.settings.gathers, among_others=True),
            durable=host.world.settings.durable,
        )
        self.peers = PeerCheck(self.runtime)
        host.world.images_watch.begin(self)
        if host.creates_cluster and self.cores.meta.metadata is None:
            self.cores.create_cluster(host)
        self.touch()
        reason = older_copy.reason_apart(host.disk)
        if reason:
            self.runtime.report_older_copy(reason, may_begin_anew=False)
        self.cores.storage.opened.store.on_damage = self._found_damage
        if self.journal.damaged or self.cores.damage:
            self._distrust_disk()
        self.disk.begin()
        if host.aside:
            self.later(LOOK_S, self._forget_aside)

    @property
    def is_ready(self) -> bool:
        return self.runtime.fitness.is_ready

    @property
    def is_isolated(self) -> bool:
        """Others have said that the disk is an older copy."""
        return bool(self.runtime.fitness.older_copy)

    def _found_damage(self, damage: Damage) -> None:
        # The reading thread reports damage before what it has read.
        self.schedule.note(self.host.name, f"finds damage: {damage}")
        self._distrust_disk()

    def _distrust_disk(self) -> None:
        # What it has is incomplete, and reaches nobody.
        self.cores.applied.on_applied = None
        self.runtime.distrust_disk()

    def turn_ended(self) -> None:
        self.host.world.checks.turn_ended(self)

    def noted(self, note: Note) -> None:
        self.host.world.checks.noted(self, note)
        if note.event == "relayed_link_ended" and "cannot be read" in str(note.fields["text"]):
            self.host.world.checks.fail(f"{self.host.name} {note.fields}")

    def write_watermarks(self, watermarks: Checkpoint) -> None:
        """By the thread that writes the journal."""
        self.disk.later(0.0, lambda: self.disk.write_watermarks(watermarks))

    def write_remembered(self, content: bytes) -> None:
        self.disk.later(0.0, lambda: older_copy.remember(self.host.disk, content))

    # The links

    def link_up(self, connection: PeerConnection, other: str, identity: PeerIdentity) -> None:
        if other in self.links:
            self.close(other)
        self.links[other] = connection
        self.schedule.note(self.host.name, f"connected to {other}")
        self.runtime.links.link_up(identity)

    def link_down(self, connection: PeerConnection, other: str) -> None:
        del self.links[other]
        self.schedule.note(self.host.name, f"lost {other}")
        self.runtime.links.link_down(other)
        if any(node == other for node, _, _ in self.cluster_node.context.outgoing):
            # They would leave on the next link, whose other end may be another process.
            checks = self.host.world.checks
            checks.fail(f"{self.host.name} keeps frames of a lost link to {other}")

    def frame(self, connection: PeerConnection, other: str, kind: int, data: bytes) -> None:
        if kind == IMAGE or (kind == RELAYED and relayed_kind(data) == IMAGE):
            self.host.world.images_watch.begin(self)
        try:
            self.runtime.links.handle_frame(other, kind, data, self.host.clock())
        except BadFrame as error:
            self.host.world.checks.fail(f"{self.host.name} got a bad frame of {other}: {error}")

    def close(self, other: str) -> None:
        """The link to it."""
        connection = self.links[other]
        self.host.world.network.close(connection, self.host.name, other)
        self.link_down(connection, other)

    # The process

    def take_nodes(self, metadata: ClusterMetadata) -> None:
        directory = self.cores.directory
        if directory.manifest.cluster_id != metadata.cluster_id:
            self._store_cluster_id(metadata.cluster_id)
        for other in list(self.links):
            if self.host.world.hosts[other].was_removed(metadata):
                self.close(other)

    def _store_cluster_id(self, cluster_id: str) -> None:
        try:
            self.cores.directory.join_cluster(cluster_id)
        except OSError:
            self.later(SAVE_AGAIN_S, lambda: self._store_cluster_id(cluster_id))

    def take_users(self) -> None:
        """No user is changed here."""

    def proposals_done(self, outcomes: list[tuple[int, Outcome]]) -> None:
        for request, outcome in outcomes:
            self.schedule.note(self.host.name, f"proposal {request}: {outcome}")
            self.proposals.discard(request)

    def save_snapshot(self) -> None:
        self.disk.snapshots.take(received=True)

    def became_ready(self) -> None:
        self.node.start()
        self.schedule.note(self.host.name, "ready")

    def set_aside(self, *, keep: bool) -> None:
        self.host.set_aside()
        self.leave()

    def _forget_aside(self) -> None:
        replacement = self.runtime.replacement
        if replacement.has_everything(self.cluster_node.context.metadata):
            self.host.aside = replacement.aside = ""
        else:
            self.later(LOOK_S, self._forget_aside)

    def became_complete(self) -> None:
        self.schedule.note(self.host.name, "is complete")
        self.cores.mark.renew()

    def stand_apart(self, text: str) -> None:
        older_copy.stand_apart(self.host.disk, text)

    def recovered(self) -> None:
        older_copy.recovered(self.host.disk)

    def begin_anew(self) -> None:
        if self.host.take_new_incarnation():
            self.leave()

    def leave(self) -> None:
        """A shutdown in good order."""
        if self.is_leaving:
            return
        self.is_leaving = True
        self.touch()
        if self.cluster_node.context.metadata is None:
            self._shut_down("")
            return
        self.runtime.leave(self.state.now)
        self.later(LEAVE_S, self._hand_over)

    def relieved(self) -> None:
        self.later(0.0, self._hand_over)

    def _hand_over(self) -> None:
        if not self._has_left:
            self._shut_down(self.runtime.hand_over(self.state.now))

    def _shut_down(self, servers: str) -> None:
        self._has_left = True
        self.touch()
        self.node.shut_down(servers)
        self.later(0.1, self.host.has_left)
