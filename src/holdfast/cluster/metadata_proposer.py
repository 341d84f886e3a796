"""What a member proposes for the metadata: nodes that are here and not known yet, the in-sync sets
of the partitions that it leads and, where it leads the metadata, what its controller decides."""

from typing import Final

from holdfast.cluster.context import ClusterContext
from holdfast.cluster.failure.health import Presence
from holdfast.cluster.metadata.commands import ChangePartitions, Command
from holdfast.cluster.metadata.model import NodeInfo
from holdfast.cluster.metadata.requests import RequestRefused
from holdfast.cluster.metadata.store import ProposalDone
from holdfast.cluster.partitions.effects import ProposeInSync
from holdfast.cluster.parts import Parts
from holdfast.cluster.placement.controller import Controller

CHANGES_MAX: Final = 256
"""Partitions in one command of a leader."""


class MetadataProposer:
    def __init__(self, parts: Parts) -> None:
        self._meta = parts.meta
        self._fabric: ClusterContext = parts.fabric
        self._detector = parts.detector
        self._config = parts.config.controller
        self.controller: Controller | None = None
        # Something that the controller looks at is not what it was.
        self.is_changed = True
        # Connected nodes, each with its role.
        self._presences: dict[str, tuple[Presence, str]] = {}
        self._commands: dict[int, Command] = {}
        # Changes of in-sync sets to be proposed, and requests for several of them.
        self._in_sync: list[ProposeInSync] = []
        self._gathered: set[int] = set()

    def leader_changed(self, is_leader: bool, now: float) -> None:
        """Of the metadata."""
        self.controller = None
        if is_leader:
            self.controller = Controller(self._meta.node_id, self._config)
            self.admit_all(now)
        self.is_changed = True

    def connected(self, node: str, presence: Presence, role: str, now: float) -> None:
        self._presences[node] = (presence, role)
        self._admit(node, now)

    def disconnected(self, node: str) -> None:
        del self._presences[node]

    def _admit(self, node: str, now: float) -> None:
        if not self._meta.is_leader:
            return
        presence, role = self._presences[node]
        metadata = self._fabric.metadata
        if metadata is not None and (node, presence.incarnation) in metadata.removed:
            return
        self._meta.admit(
            NodeInfo(
                node,
                presence.incarnation,
                presence.peer_address,
                presence.client_address,
                presence.admin_address,
                role,
            ),
            now,
        )

    def admit_all(self, now: float) -> None:
        """Nodes that are here and not known yet."""
        metadata = self._fabric.metadata
        if metadata is not None and self._meta.is_leader:
            for node in self._presences:
                if node not in metadata.nodes:
                    self._admit(node, now)

    def note_in_sync(self, wanted: ProposeInSync) -> None:
        """A partition led here has another in-sync set."""
        self._in_sync.append(wanted)

    def propose_in_sync(self, now: float) -> None:
        """What was noted, many partitions in one command."""
        while self._in_sync:
            changes = tuple(
                (each.partition, each.expected_version, each.info)
                for each in self._in_sync[:CHANGES_MAX]
            )
            del self._in_sync[:CHANGES_MAX]
            request = self._propose(ChangePartitions(changes), now)
            if len(changes) > 1:
                self._gathered.add(request)

    def step(self, now: float) -> None:
        """End of a turn: what the controller decides."""
        controller = self.controller
        metadata = self._fabric.metadata
        if controller is None or metadata is None or not self.is_changed:
            return
        self.is_changed = False
        for command in controller.step(metadata, self._detector.health(now), now):
            self._propose(command, now)

    def timer(self) -> float | None:
        return None if self.controller is None else self.controller.timer()

    def _propose(self, command: Command, now: float) -> int:
        request = self._meta.propose(command, now)
        self._commands[request] = command
        return request

    def proposal_done(self, done: ProposalDone, now: float) -> bool:
        """False if it was not for this."""
        command = self._commands.pop(done.request, None)
        if command is None:
            return False
        if (
            isinstance(done.outcome, RequestRefused)
            and isinstance(command, ChangePartitions)
            and done.request in self._gathered
        ):
            # One of them came too late; the others need not wait for the next round.
            for change in command.changes:
                self._propose(ChangePartitions((change,)), now)
        self._gathered.discard(done.request)
        if self.controller is not None:
            self.controller.settled(command, now)
            self.is_changed = True
        return True
