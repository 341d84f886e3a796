"""Hands the events of links, direct ones and those through a third node, to the cluster's core, and
its frames to them.
"""

from collections.abc import Sequence

from holdfast.node.cluster_node import ClusterNode
from holdfast.node.failure.health import Presence
from holdfast.node.frame_kinds import ANSWER, HEARTBEAT, QUESTION, RELAYED, BadFrame
from holdfast.node.metadata.model import CAPACITY_DEFAULT
from holdfast.node.runtime.ports import RuntimePorts
from holdfast.node.runtime.relayed_links import (
    CloseDirect,
    Deliver,
    LinkUp,
    RelayedLinks,
    RelayEffect,
    RelaySend,
)
from holdfast.security.peer_identity import PeerIdentity


class NodeLinks:
    """The driver's entry for what comes from other nodes. The core knows one link of a node at
    most, whichever way its frames take."""

    def __init__(self, cluster_node: ClusterNode, ports: RuntimePorts) -> None:
        self._cluster_node = cluster_node
        self._state = cluster_node.state
        self._links = ports.links
        self._clients = ports.clients
        self._questions = ports.questions
        self.relayed = RelayedLinks(
            cluster_node.context,
            cluster_node.detector,
            cluster_node.disk_memory,
            ports.links.pending_bytes,
        )
        # True while the effects of `relayed` are carried out: what they cause is carried out last.
        self._is_relaying = False

    def link_up(self, identity: PeerIdentity) -> None:
        """Handles a new connection to a node, which ends a relayed link to it."""
        self._clients.touch()
        self.relayed.direct_up(identity)
        self._carry_out_relayed()
        self._link_up(identity)

    def _link_up(self, identity: PeerIdentity) -> None:
        node = identity.node_id
        presence = Presence(
            identity.incarnation,
            identity.peer_address,
            identity.client_address,
            identity.admin_address,
            identity.features,
            identity.program,
            identity.zone,
            int(identity.capacity or CAPACITY_DEFAULT),
        )
        self._cluster_node.handle_connected(node, presence, identity.role, self._state.now)
        if self._questions is not None:
            self._questions.connected(node, identity.features)

    def link_down(self, node: str) -> None:
        """Handles the end of a connection, and of the links that are relayed over it."""
        self._clients.touch()
        self._link_down(node)
        self.relayed.direct_down(node)
        self._carry_out_relayed()

    def _link_down(self, node: str) -> None:
        self._cluster_node.handle_disconnected(node, self._state.now)
        if self._questions is not None:
            self._questions.disconnected(node)

    def link_refused(self, node: str) -> None:
        """Handles a refused connection: nothing listens at the node's address. A node with a
        relayed link runs, so something between the two refuses."""
        if node not in self.relayed.links:
            self._clients.touch()
            self._cluster_node.handle_refused(node, self._state.now)

    def handle_frame(self, node: str, kind: int, payload: bytes, now: float) -> None:
        """Handles a frame at the present time `now`. Raises `BadFrame` when it is malformed.

        The process may have been stopped after the turn began, so the turn's clock may be old.
        Ownership and heartbeats are judged by the present time.
        """
        if self._questions is not None and kind in (QUESTION, ANSWER):
            self._questions.handle_frame(node, kind, payload)
            return
        self._clients.touch()
        if kind == RELAYED:
            self.relayed.receive(node, payload, now)
            self._carry_out_relayed(now)
            return
        self._cluster_node.tick(now)
        self._cluster_node.handle_frame(
            node, kind, payload, now if kind == HEARTBEAT else self._state.now
        )

    def send(self, node: str, kind: int, payload: bytes | Sequence[bytes]) -> bool:
        """Queues a frame for a node; returns False if there is no link."""
        if node not in self.relayed.links:
            return self._links.send(node, kind, payload)
        self.relayed.send(node, kind, payload)
        self._carry_out_relayed()
        return True

    def step(self, now: float) -> None:
        """Opens links through others to the nodes that are not heard, with each heartbeat."""
        self.relayed.step(now)
        self._carry_out_relayed()

    def drain(self) -> None:
        """Passes on what this node holds for others, behind its own frames."""
        if self.relayed.held_bytes:
            self.relayed.drain()
            self._carry_out_relayed()

    def review(self) -> None:
        """Closes the links that the metadata does not allow any more."""
        self._links.review()
        self.relayed.review()
        self._carry_out_relayed()

    def _carry_out_relayed(self, now: float = 0.0) -> None:
        """Carries out the effects of the relayed links, in order. `now`: of a received frame."""
        if self._is_relaying or not self.relayed.effects:
            return
        self._is_relaying = True
        try:
            while self.relayed.effects:
                effects, self.relayed.effects = self.relayed.effects, []
                for effect in effects:
                    self._relay(effect, now)
        finally:
            self._is_relaying = False

    def _relay(self, effect: RelayEffect, now: float) -> None:
        if isinstance(effect, RelaySend):
            self._links.send(effect.node, RELAYED, effect.payload)
        elif isinstance(effect, Deliver):
            try:
                self.handle_frame(effect.node, effect.kind, effect.payload, now)
            except BadFrame as bad:
                text = f"it sent a frame of kind {effect.kind} that cannot be read: {bad}"
                self.relayed.close(effect.node, text)
        elif isinstance(effect, CloseDirect):
            self._links.close(effect.node, effect.text)
        elif isinstance(effect, LinkUp):
            self._clients.touch()
            node, through = effect.identity.node_id, effect.through
            self._state.note("warning", "link_relayed", {"node": node, "through": through})
            self._link_up(effect.identity)
        else:
            self._clients.touch()
            fields: dict[str, object] = {"node": effect.node, "through": effect.through}
            fields["text"] = effect.text
            self._state.note("warning", "relayed_link_ended", fields)
            self._link_down(effect.node)
