"""Links a node to the other nodes of its cluster: one TCP connection per pair.

Both ends dial. A `PeerHandler` receives the events in the event loop, and may send from within its
methods.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

from msgspec.structs import replace

from holdfast.addresses import UNIX
from holdfast.io.peers.authentication import PeerAuth
from holdfast.io.peers.dialer import PeerDialer
from holdfast.io.peers.link import LinkBounds, PeerLink, PeerMetrics
from holdfast.io.peers.mesh import PeerMesh
from holdfast.node.frames import FRAME_BYTES_MAX
from holdfast.node.replicate.disk_position import DiskMemory, Known
from holdfast.security.peer_handshake import (
    CLUSTER,
    OLDER_COPY_THERE,
    OLDER_COPY_WAITS_THERE,
    REMOVED_THERE,
)
from holdfast.security.peer_identity import STANDS_APART, PeerIdentity, Refusal

__all__ = ["PeerAuth", "PeerHandler", "PeerIdentity", "PeerLinks", "PeerMetrics"]

BOUNDS: Final = LinkBounds(FRAME_BYTES_MAX, send_bytes_max=FRAME_BYTES_MAX + 67_108_864)
_NOBODY_THERE: Final = ("nobody", "reset", "unreachable", "timeout", "cancelled")
"""The reasons of a failed dial that do not come from a node at the address."""
LASTING_S: Final = 1.0
"""The age in seconds of a lost link after which its peer is dialled without a delay."""


class PeerHandler(Protocol):
    """The receiver of events of the links."""

    def on_connected(self, identity: PeerIdentity) -> None: ...

    def on_frame(self, node_id: str, kind: int, payload: bytes) -> None:
        """Processes a frame. Frames come in the order of sending. `BadFrame` closes the link."""

    def on_disconnected(self, node_id: str) -> None:
        """Reports a lost node, once per `on_connected` and before its next one."""

    def on_refused(self, node_id: str) -> None:
        """Reports after each dial that a node is not connected and its address has no listener."""

    def on_removed(self) -> None:
        """Reports that another node says that this node was removed. Repeated each time."""

    def on_older_copy(self, text: str, may_begin_anew: bool) -> None:
        """Reports that another node remembers more on this disk. Repeated each time.
        `may_begin_anew`: whether the others are a majority without this node."""


class PeerLinks(PeerMesh):
    """The mesh of one node. Methods that close links call on_disconnected before they return."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        identity: PeerIdentity,
        auth: PeerAuth,
        handler: PeerHandler,
        bind: str,
        port: int,
        bounds: LinkBounds = BOUNDS,
    ) -> None:
        """`port` 0: the system chooses one, and `start` sets `port`."""
        identity = replace(identity, process=os.urandom(8).hex())
        super().__init__(loop, identity, auth, CLUSTER, bounds, "peer")
        self.port = port
        self._handler = handler
        self._bind = bind
        if bind.startswith(UNIX):
            self._sockets = bind.removeprefix(UNIX).rpartition("/")[0]
        self._join: list[str] = []
        self._peers: dict[str, str] = {}
        self._removed: frozenset[tuple[str, str]] = frozenset()
        self._own_addresses: set[str] = set()
        self._dialers: dict[tuple[str, str], PeerDialer] = {}
        self._isolated = ""
        self.memory = DiskMemory()
        self.partitions = ""
        """The number of partitions of this node's log; "": any."""
        self.objection: Callable[[PeerIdentity, Known], Refusal | None] | None = None
        """The check of a peer against the knowledge of disks when the connection began."""
        self.refused_by: dict[str, Refusal] = {}
        """Refusals by address: the last dial failed although a node was there."""

    async def start(self) -> None:
        """Begins to listen, if there is an address. Raises `OSError` if it cannot be used."""
        if self._bind:
            self.port = await self._listener.start(self._bind, self.port)

    # Dials

    def set_join(self, addresses: Sequence[str]) -> None:
        """Sets addresses of nodes with unknown ids. They are dialled before `set_peers` names a
        node, and while no link is left: then the peers' addresses may be outdated."""
        self._join = list(addresses)
        self._arrange()

    def set_peers(self, peers: Mapping[str, str]) -> None:
        """Sets the cluster's nodes; this one may be included. Links to nodes no longer included are
        closed. Others may still connect, because a new node must connect to join."""
        gone = self._peers.keys() - peers.keys()
        self._peers = {
            node_id: address
            for node_id, address in peers.items()
            if node_id != self.identity.node_id
        }
        for node_id in sorted(gone):
            self.close(node_id, "is no longer in the cluster")
        self._arrange()

    def set_cluster(self, cluster_id: str, partitions: int) -> None:
        """Sets the cluster that this node has joined, and closes links to nodes of others."""
        self.identity = replace(self.identity, cluster_id=cluster_id, partitions=str(partitions))
        for node_id, link in list(self._links.items()):
            assert link.peer is not None
            if link.peer.cluster_id not in ("", cluster_id):
                self.close(node_id, f"belongs to the cluster {link.peer.cluster_id}")

    def review(self) -> None:
        """Closes the links that `objection` refuses now, because more is known than before."""
        for node_id, link in list(self._links.items()):
            assert link.peer is not None
            objection = None if self.objection is None else self.objection(link.peer, {})
            if objection is not None:
                self.close(node_id, objection.text)

    def isolate(self, text: str) -> None:
        """Closes all links and allows no new ones. The node still dials others, to receive their
        reports and to announce that it stands apart."""
        self._isolated = text
        features = f"{self.identity.features},{STANDS_APART}".lstrip(",")
        self.identity = replace(self.identity, features=features)
        for node_id in list(self._links):
            self.close(node_id, text)
        for link in list(self._open):
            # This handshake did not announce it, so the other end could still make it a link.
            if link.peer is None and not link.closing:
                link.refuse(Refusal("isolated", text, quiet=True))

    def set_removed(self, removed: Collection[tuple[str, str]]) -> None:
        """Sets the removed nodes with their incarnations, and closes links to them for good."""
        self._removed = frozenset(removed)
        for node_id, link in list(self._links.items()):
            assert link.peer is not None
            if (node_id, link.peer.incarnation) in self._removed:
                self.close(node_id, "was removed from the cluster")

    def _arrange(self) -> None:
        """Starts and stops dialers as peers, join addresses and links require."""
        if self._is_stopped:
            return
        wanted = [(node_id, address) for node_id, address in self._peers.items() if address]
        known = {self.identity.peer_address, *self._own_addresses, *self._peers.values()}
        wanted += [("", address) for address in self._join if address not in known]
        for key in self._dialers.keys() - set(wanted):
            self._dialers.pop(key).stop()
            self.refused_by.pop(key[1], None)
        for key in wanted:
            if key not in self._dialers:
                self._dialers[key] = PeerDialer(key[1], key[0], self._dial, self._loop)
        for dialer in self._dialers.values():
            may_dial = dialer.node_id or not self._peers or not self._links
            if may_dial and dialer.answered not in self._links:
                dialer.needed.set()
            else:
                dialer.needed.clear()
                dialer.tried.set()

    def _stop_dialling(self) -> "list[asyncio.Task[None]]":
        dialling = [dialer.stop() for dialer in self._dialers.values()]
        self._dialers.clear()
        return dialling

    async def _dial(self, dialer: PeerDialer) -> None:
        link = self._new_link(True, dialer.address, dialer.node_id)
        refusal = await self._attempt(link)
        if not dialer.node_id and link.identified():
            dialer.answered = link.identified()
        if link.refusal is not None and link.refusal.reason == "self":
            self._own_addresses.add(dialer.address)
        self.refused_by.pop(dialer.address, None)
        if refusal is not None and refusal.reason not in _NOBODY_THERE:
            self.refused_by[dialer.address] = refusal
        self._arrange()
        if refusal is None:
            return
        name = dialer.node_id or dialer.address
        if refusal.reason == "nobody":
            text = f"nothing listens at {dialer.address}"
            text = f"{name}: {text}" if dialer.node_id else text
            self._complaints.say(name, refusal.reason, text, logging.INFO)
            if dialer.answered and dialer.answered not in self._links:
                self._handler.on_refused(dialer.answered)
        else:
            subject = f"{name} at {dialer.address}" if dialer.node_id else name
            self._complain(name, refusal.text, subject, refusal)

    async def wait_for_peers(self, longest_s: float) -> None:
        """Waits until each peer is connected or an attempt to dial it has ended, at most
        `longest_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                for dialer in list(self._dialers.values()):
                    if dialer.answered not in self._links:
                        await dialer.tried.wait()

    def joined(self) -> dict[str, str]:
        """The addresses of `set_join` except this node's own, with the id of the connected node at
        each, or "". Complete until `set_peers`."""
        return {
            dialer.address: dialer.answered if dialer.answered in self._links else ""
            for dialer in self._dialers.values()
            if not dialer.node_id
        }

    def unmet(self) -> list[str]:
        """The addresses of `joined` without a link."""
        return [address for address, node in sorted(self.joined().items()) if not node]

    # PeerMesh

    def connected(self) -> list[PeerIdentity]:
        return [link.peer for link in self._links.values() if link.peer is not None]

    def _new_link(self, dials: bool, remote: str, expected: str) -> PeerLink:
        link = super()._new_link(dials, remote, expected)
        link.known = dict(self.memory.positions)
        return link

    def _accept(self, link: PeerLink, peer: PeerIdentity, last: bool) -> Refusal | None:
        own = self.identity
        if peer.node_id == own.node_id:
            return Refusal("same_id", f"two nodes have the id {peer.node_id}")
        if peer.cluster_id and own.cluster_id and peer.cluster_id != own.cluster_id:
            return Refusal(
                "cluster",
                f"{peer.node_id} belongs to the cluster {peer.cluster_id}, {own.node_id} to"
                f" {own.cluster_id}",
            )
        if "" not in (peer.partitions, self.partitions) and peer.partitions != self.partitions:
            return Refusal(
                "partitions",
                f"the cluster of {peer.node_id} has {peer.partitions} partitions, and"
                f" {own.node_id} {self.partitions}: start {own.node_id} with an empty data"
                " directory, and cluster.partitions as the cluster has them",
            )
        if (peer.node_id, peer.incarnation) in self._removed:
            return Refusal(
                "removed",
                f"{peer.node_id} was removed from the cluster: stop it; with an empty data"
                " directory it may join again",
            )
        if self._isolated:
            if link.dials and not last and peer.answers_apart and link.identity.stands_apart:
                # The handshake continues until this node has announced that it stands apart. No
                # link comes of it.
                return None
            return Refusal("isolated", self._isolated)
        if self.objection is not None and not last:
            objection = self.objection(peer, link.known)
            if objection is not None:
                return objection
        if peer.stands_apart:
            return Refusal("apart", f"the disk of {peer.node_id} is an older copy")
        known = self._links.get(peer.node_id)
        if known is None or known.peer is None or known.closing:
            return None
        if known.peer.incarnation != peer.incarnation:
            return Refusal(
                "incarnation",
                f"another node is connected as {peer.node_id}: two have the same id, or its data"
                " directory was created again a moment ago",
            )
        return None

    def _connected(self, link: PeerLink, peer: PeerIdentity) -> None:
        self._arrange()
        self._handler.on_connected(peer)

    def _frame(self, link: PeerLink, node_id: str, kind: int, payload: bytes) -> None:
        self._handler.on_frame(node_id, kind, payload)

    def _disconnected(self, link: PeerLink, node_id: str) -> None:
        if self._loop.time() - link.established_at >= LASTING_S:
            for dialer in self._dialers.values():
                if dialer.answered == node_id:
                    dialer.at_once()
        self._arrange()
        self._handler.on_disconnected(node_id)

    def _refused(self, refusal: Refusal) -> None:
        if refusal.reason == REMOVED_THERE:
            self._handler.on_removed()
        elif refusal.reason in (OLDER_COPY_THERE, OLDER_COPY_WAITS_THERE):
            self._handler.on_older_copy(refusal.text, refusal.reason == OLDER_COPY_THERE)
