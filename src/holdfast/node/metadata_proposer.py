"""Proposes a cluster node's changes of the metadata.

Every node proposes in-sync sets for the partitions that it leads. The Raft leader also proposes new
nodes and the decisions of its controller.
"""

from typing import Final

from holdfast.node.context import ClusterContext
from holdfast.node.failure.health import Presence
from holdfast.node.features import AGREED_PLACEMENT, FEEDS
from holdfast.node.metadata.commands import ChangePartitions, Command, PutPlacement
from holdfast.node.metadata.effects import ProposalDone
from holdfast.node.metadata.model import GATEWAY, NOT_PLACED, ClusterMetadata, NodeInfo, NodeTraits
from holdfast.node.metadata.requests import RequestRefused
from holdfast.node.parts import Parts
from holdfast.node.placement.controller import Controller
from holdfast.node.replicate.effects import ProposeInSync

CHANGES_MAX: Final = 256
"""The most partitions in one command for in-sync sets."""


class MetadataProposer:
    """The source of this node's metadata proposals. It has a controller only while this node leads
    Raft."""

    def __init__(self, parts: Parts) -> None:
        self._state = parts.state
        self._meta = parts.meta
        self._context: ClusterContext = parts.context
        self._detector = parts.detector
        self._config = parts.config.controller
        self.controller: Controller | None = None
        # True if an input of the controller has changed since its last step.
        self.is_changed = True
        # This node and the connected ones, with presence and role.
        self._presences: dict[str, tuple[Presence, str]] = {
            self._meta.node_id: (parts.presence, parts.config.role)
        }
        self._commands: dict[int, Command] = {}
        # By gateway, the nodes that kept it out when it was looked at last.
        self._kept_out: dict[str, list[str]] = {}
        # Changes of in-sync sets to propose, and the requests that contain several of them.
        self._in_sync: list[ProposeInSync] = []
        self._gathered: set[int] = set()

    def leader_changed(self, is_leader: bool, now: float) -> None:
        """Starts or ends the controller with this node's leadership of Raft."""
        self.controller = None
        if is_leader:
            self.controller = Controller(self._meta.node_id, self._config)
            self.admit_all(now)
        self.is_changed = True

    def connected(self, node: str, presence: Presence, role: str, now: float) -> None:
        """Notes a connected node, and proposes it if the metadata lacks it."""
        self._presences[node] = (presence, role)
        self._admit(node, now)

    def disconnected(self, node: str) -> None:
        """Forgets a node whose link is lost."""
        del self._presences[node]

    def _admit(self, node: str, now: float) -> None:
        if not self._meta.is_leader:
            return
        presence, role = self._presences[node]
        metadata = self._context.metadata
        if metadata is not None and (node, presence.incarnation) in metadata.removed:
            return
        if role == GATEWAY and self._keeps_out(node):
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

    def _keeps_out(self, gateway: str) -> bool:
        """Whether other nodes keep a gateway out, which is logged when it changes."""
        nodes = self._without_feeds()
        if nodes and self._kept_out.get(gateway) != nodes:
            text = "upgrade these nodes, start them, or remove them"
            self._state.note(
                "warning", "gateway_waits", {"node": gateway, "for": nodes, "text": text}
            )
        self._kept_out[gateway] = nodes
        return bool(nodes)

    def _without_feeds(self) -> list[str]:
        """The nodes that keep a gateway out: an older version cannot apply the entry of one, and
        the version of a node that was not connected yet is not known."""
        metadata = self._context.metadata
        if metadata is not None and metadata.has_gateways:
            # A node of an older version has not been let in since.
            return []
        return self._nodes_lacking(FEEDS)

    def _nodes_lacking(self, feature: str) -> list[str]:
        """The nodes whose version lacks a feature, or is not known yet."""
        older = self._context.nodes_without(feature, witnesses=True)
        return sorted({*older, *self._context.nodes_unknown()})

    def admit_all(self, now: float) -> None:
        """Proposes the connected nodes that the metadata lacks, and this node's own addresses if
        they have changed: no other node proposes those of the leader."""
        metadata = self._context.metadata
        if metadata is not None and self._meta.is_leader:
            for node in self._presences:
                if node not in metadata.nodes or node == self._meta.node_id:
                    self._admit(node, now)

    def note_in_sync(self, wanted: ProposeInSync) -> None:
        """Notes a changed in-sync set of a partition that this node leads."""
        self._in_sync.append(wanted)

    def propose_in_sync(self, now: float) -> None:
        """Proposes the noted in-sync sets, many partitions in one command."""
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
        """Proposes the controller's decisions, at the end of a turn."""
        controller = self.controller
        metadata = self._context.metadata
        if controller is None or metadata is None or not self.is_changed:
            return
        self.is_changed = False
        for command in controller.step(metadata, self._detector.health(now), now):
            self._propose(command, now)
        self._propose_traits(metadata, now)

    def _propose_traits(self, metadata: ClusterMetadata, now: float) -> None:
        """Proposes the zones and capacities that the connected nodes announce, if they differ from
        the agreed ones. Before the first such entry each node must know its kind."""
        placed = metadata.placement or NOT_PLACED
        traits = metadata.traits
        for node, (presence, _) in self._presences.items():
            traits[node] = NodeTraits(node, presence.zone, presence.capacity)
        found = tuple(
            traits[node]
            for node in sorted(traits)
            if node in metadata.nodes and traits[node] != NodeTraits(node)
        )
        is_pending = any(isinstance(each, PutPlacement) for each in self._commands.values())
        if found == placed.traits or is_pending:
            return
        if metadata.placement is None and self._nodes_lacking(AGREED_PLACEMENT):
            return
        self._propose(PutPlacement(placed.version, found, placed.is_paused), now)

    def timer(self) -> float | None:
        """Returns the time of the controller's next step, or None."""
        return None if self.controller is None else self.controller.timer()

    def _propose(self, command: Command, now: float) -> int:
        request = self._meta.propose(command, now)
        self._commands[request] = command
        return request

    def proposal_done(self, done: ProposalDone, now: float) -> bool:
        """Takes the outcome of a proposal. Returns False if it is not one of this class."""
        command = self._commands.pop(done.request, None)
        if command is None:
            return False
        if (
            isinstance(done.outcome, RequestRefused)
            and isinstance(command, ChangePartitions)
            and done.request in self._gathered
        ):
            # The command is refused as a whole if one change has an old version. Each is proposed
            # alone, so that one late change does not delay the others.
            for change in command.changes:
                self._propose(ChangePartitions((change,)), now)
        self._gathered.discard(done.request)
        if self.controller is not None:
            self.controller.note_outcome(command, now)
            self.is_changed = True
        return True
