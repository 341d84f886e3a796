"""The links of a node to the other nodes of its cluster: one TCP connection per pair.

Both ends dial, and `holdfast.security.peer_handshake` decides which connection stays. A
`PeerHandler` receives the events in the event loop, and may send from within its methods.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol, cast

from holdfast.cluster.partitions.disk_position import DiskMemory, Known
from holdfast.security.peer_handshake import (
    NONCE_BYTES,
    OLDER_COPY_THERE,
    OLDER_COPY_WAITS_THERE,
    REMOVED_THERE,
    STANDS_APART,
    PeerIdentity,
    Refusal,
)
from holdfast.server.peers.authentication import PeerAuth
from holdfast.server.peers.complaints import Complaints
from holdfast.server.peers.dialer import PeerDialer, connect
from holdfast.server.peers.link import CLOSE_TIMEOUT_S, PeerLink, PeerMetrics, failure
from holdfast.server.peers.listener import PeerListener

__all__ = ["PeerAuth", "PeerHandler", "PeerIdentity", "PeerLinks", "PeerMetrics"]

logger = logging.getLogger("holdfast")

FRAME_BYTES_MAX: Final = 268_435_460 + (1 << 20)
"""The most bytes of a frame's payload: the largest MQTT packet as a record, with its frame."""
SEND_BYTES_MAX: Final = FRAME_BYTES_MAX + 67_108_864
"""The most unsent bytes for one peer. One more frame may be queued beyond it."""
_NOBODY_THERE: Final = ("nobody", "reset", "unreachable", "timeout", "cancelled")
"""The reasons of a failed dial that do not come from a node at the address."""
HANDSHAKE_TIMEOUT_S: Final = 5.0
STOP_TIMEOUT_S: Final = 2 * CLOSE_TIMEOUT_S
LASTING_S: Final = 1.0
"""The age in seconds of a lost link after which its peer is dialled without a delay."""


class PeerHandler(Protocol):
    """The receiver of events of the links."""

    def on_connected(self, identity: PeerIdentity) -> None: ...

    def on_frame(self, node_id: str, kind: int, payload: bytes) -> None:
        """Process a frame. Frames come in the order of sending. `BadFrame` closes the link."""

    def on_disconnected(self, node_id: str) -> None:
        """Report a lost node, once per `on_connected` and before its next one."""

    def on_refused(self, node_id: str) -> None:
        """Report after each dial that a node is not connected and its address has no listener."""

    def on_removed(self) -> None:
        """Report that another node says that this node was removed. Repeated each time."""

    def on_older_copy(self, text: str, may_begin_anew: bool) -> None:
        """Report that another node remembers more on this disk. Repeated each time.
        `may_begin_anew`: whether the others are a majority without this node."""


class PeerLinks:
    """All links of one node, at most one per other node. Methods that close links call
    on_disconnected before they return."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        identity: PeerIdentity,
        auth: PeerAuth,
        handler: PeerHandler,
        bind: str,
        port: int,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        send_bytes_max: int = SEND_BYTES_MAX,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        """`port` 0: the system chooses one, and `start` sets `port`."""
        self.metrics = PeerMetrics()
        self.identity = replace(identity, process=os.urandom(8).hex())
        self.port = port
        self._loop = loop
        self._auth = auth
        self._handler = handler
        self._bind = bind
        self._frame_bytes_max = frame_bytes_max
        self._send_bytes_max = send_bytes_max
        self._handshake_timeout_s = handshake_timeout_s
        self._links: dict[str, PeerLink] = {}
        self._open: set[PeerLink] = set()
        """All connections, including those in the handshake."""
        self._all_closed = asyncio.Event()
        self._unflushed: list[PeerLink] = []
        self._join: list[str] = []
        self._peers: dict[str, str] = {}
        self._removed: frozenset[tuple[str, str]] = frozenset()
        self._own_addresses: set[str] = set()
        self._dialers: dict[tuple[str, str], PeerDialer] = {}
        self._listener = PeerListener(
            loop,
            self._greet,
            lambda: self._count("crowded"),
            lambda error: self._complaints.say(
                "accept", str(error), f"cannot be accepted: {error}"
            ),
        )
        self._complaints = Complaints(loop.time)
        self._stopped = False
        self._isolated = ""
        self.memory = DiskMemory()
        self.own_disk: Callable[[], str] | None = None
        """The description of this node's disk: see `Handshake`."""
        self.objection: Callable[[PeerIdentity, Known], Refusal | None] | None = None
        """The check of a peer against the knowledge of disks when the connection began."""
        self.refused_by: dict[str, Refusal] = {}
        """Refusals by address: the last dial failed although a node was there."""

    async def start(self) -> None:
        """Begin to listen. Raises `OSError` if the address cannot be used."""
        self.port = await self._listener.start(self._bind, self.port)

    async def stop(self) -> None:
        """Send queued frames and close all connections. The handler receives no more calls."""
        self._stopped = True
        dialling = [dialer.stop() for dialer in self._dialers.values()]
        self._dialers.clear()
        await self._listener.stop()
        await asyncio.gather(*dialling, return_exceptions=True)
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._open:
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._all_closed.wait()
            except TimeoutError:
                logger.warning("peers: %s connections do not close", len(self._open))

    # Dials

    def set_join(self, addresses: Sequence[str]) -> None:
        """Set addresses of nodes with unknown ids. They are dialled before `set_peers` names a
        node, and while no link is left: then the peers' addresses may be outdated."""
        self._join = list(addresses)
        self._arrange()

    def set_peers(self, peers: Mapping[str, str]) -> None:
        """Set the cluster's nodes; this one may be included. Links to nodes no longer included are
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

    def set_cluster(self, cluster_id: str) -> None:
        """Set the cluster that this node has joined, and close links to nodes of others."""
        self.identity = replace(self.identity, cluster_id=cluster_id)
        for node_id, link in list(self._links.items()):
            assert link.peer is not None
            if link.peer.cluster_id not in ("", cluster_id):
                self.close(node_id, f"belongs to the cluster {link.peer.cluster_id}")

    def review(self) -> None:
        """Close the links that `objection` refuses now, because more is known than before."""
        for node_id, link in list(self._links.items()):
            assert link.peer is not None
            objection = None if self.objection is None else self.objection(link.peer, {})
            if objection is not None:
                self.close(node_id, objection.text)

    def isolate(self, text: str) -> None:
        """Close all links and allow no new ones. The node still dials others, to receive their
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
        """Set the removed nodes with their incarnations, and close links to them for good."""
        self._removed = frozenset(removed)
        for node_id, link in list(self._links.items()):
            assert link.peer is not None
            if (node_id, link.peer.incarnation) in self._removed:
                self.close(node_id, "was removed from the cluster")

    def _arrange(self) -> None:
        """Start and stop dialers as peers, join addresses and links require."""
        if self._stopped:
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

    # Frames

    def send(self, node_id: str, kind: int, payload: bytes | Sequence[bytes]) -> bool:
        """Queue a frame; returns False if there is no link. One turn is one write per peer. Raises
        `ValueError` for a payload above the limit of frames."""
        link = self._links.get(node_id)
        if link is None or not link.send(kind, payload):
            return False
        if not link.queued:
            link.queued = True
            if not self._unflushed:
                self._loop.call_soon(self.flush)
            self._unflushed.append(link)
        return True

    def flush(self) -> None:
        """Write queued frames now instead of after the present turn of the loop."""
        unflushed, self._unflushed = self._unflushed, []
        for link in unflushed:
            link.queued = False
            link.flush()

    def pending_bytes(self, node_id: str) -> int:
        """Return the bytes queued for a node that the system has not accepted yet."""
        link = self._links.get(node_id)
        return 0 if link is None else link.pending_bytes()

    def connected(self) -> list[PeerIdentity]:
        return [link.peer for link in self._links.values() if link.peer is not None]

    def close(self, node_id: str, text: str) -> None:
        """Close the link to a node, if there is one. A peer is dialled again afterwards."""
        link = self._links.get(node_id)
        if link is not None:
            logger.info("peer closed node=%s address=%s: %s", node_id, link.remote, text)
            self._unlink(link)
            link.close()

    # LinkOwner

    def judge(self, link: PeerLink, peer: PeerIdentity, last: bool) -> Refusal | None:
        own = self.identity
        if peer.node_id == own.node_id:
            if peer.process == own.process:
                return Refusal("self", "is this node", quiet=True)
            return Refusal("same_id", f"two nodes have the id {peer.node_id}")
        if peer.cluster_id and own.cluster_id and peer.cluster_id != own.cluster_id:
            return Refusal(
                "cluster",
                f"{peer.node_id} belongs to the cluster {peer.cluster_id}, {own.node_id} to"
                f" {own.cluster_id}",
            )
        if (peer.node_id, peer.incarnation) in self._removed:
            return Refusal(
                "removed",
                f"{peer.node_id} was removed from the cluster: stop it; with an empty data"
                " directory it may join again",
            )
        if self._stopped:
            return Refusal("stopping", f"{own.node_id} is stopping", quiet=True)
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
                " directory was made anew a moment ago",
            )
        if last and known.peer.process == peer.process:
            return Refusal("linked", f"{peer.node_id} is connected", quiet=True)
        return None

    def established(self, link: PeerLink) -> None:
        peer = link.peer
        assert peer is not None
        known = self._links.get(peer.node_id)
        if known is not None:
            logger.info("peer restarted node=%s address=%s", peer.node_id, link.remote)
            self._unlink(known)
            known.abort()
        self._links[peer.node_id] = link
        self.metrics.connects += 1
        self._complaints.forget(peer.node_id)
        logger.info(
            "peer connected node=%s address=%s dialled=%s", peer.node_id, link.remote, link.dials
        )
        self._arrange()
        self._handler.on_connected(peer)

    def received(self, link: PeerLink, kind: int, payload: bytes) -> None:
        assert link.peer is not None
        self._handler.on_frame(link.peer.node_id, kind, payload)

    def broken_off(self, link: PeerLink, text: str) -> None:
        assert link.peer is not None
        logger.warning("peer closed node=%s address=%s: %s", link.peer.node_id, link.remote, text)

    def opened(self, link: PeerLink) -> None:
        self._open.add(link)

    def closed(self, link: PeerLink) -> None:
        self._open.discard(link)
        if self._stopped and not self._open:
            self._all_closed.set()
        if link.peer is not None and self._links.get(link.peer.node_id) is link:
            logger.info("peer lost node=%s address=%s", link.peer.node_id, link.remote)
            self._unlink(link)

    def _unlink(self, link: PeerLink) -> None:
        assert link.peer is not None
        node_id = link.peer.node_id
        del self._links[node_id]
        self.metrics.disconnects += 1
        if self._stopped:
            return
        if self._loop.time() - link.established_at >= LASTING_S:
            for dialer in self._dialers.values():
                if dialer.answered == node_id:
                    dialer.at_once()
        self._arrange()
        self._handler.on_disconnected(node_id)

    # Connections that are not links yet

    async def _greet(self, one: socket.socket, remote: str) -> None:
        link = self._new_link(False, remote, "")
        context = self._auth.server
        protocol = cast(asyncio.BaseProtocol, link)
        connecting = self._loop.connect_accepted_socket(lambda: protocol, one, ssl=context)
        await self._settle(link, connecting)
        refusal = self._failure(link)
        if refusal is not None:
            # One line per host and reason: strangers must not control the log's volume.
            key = f"{remote.rpartition(':')[0]} {refusal.reason}"
            self._complaints.say(key, refusal.reason, f"at {remote} {refusal.text}")

    async def _dial(self, dialer: PeerDialer) -> None:
        self.metrics.dials += 1
        link = self._new_link(True, dialer.address, dialer.node_id)
        protocol = cast(asyncio.BaseProtocol, link)
        await self._settle(link, connect(self._loop, dialer.address, protocol, self._auth.client))
        if not dialer.node_id and link.identified():
            dialer.answered = link.identified()
        refusal = self._failure(link)
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
            text = f"{name}: nobody listens at {dialer.address}"
            self._complaints.say(name, refusal.reason, text, logging.INFO)
            if dialer.answered and dialer.answered not in self._links:
                self._handler.on_refused(dialer.answered)
        else:
            text = f"{name} at {dialer.address} {refusal.text}"
            level = logging.INFO if refusal.reason == "reset" else logging.WARNING
            self._complaints.say(name, refusal.text, text, level)

    async def _settle(self, link: PeerLink, connecting: Awaitable[object]) -> None:
        """Wait until the connection is a link, is refused, or times out."""
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                await connecting
                await link.settled
        except TimeoutError:
            self._give_up(link, Refusal("timeout", "gave no answer in time"))
        except OSError as error:
            self._give_up(link, failure(error))
        except asyncio.CancelledError:
            self._give_up(link, Refusal("cancelled", "is not waited for any longer", quiet=True))
            raise

    def _give_up(self, link: PeerLink, refusal: Refusal) -> None:
        """Refuse the connection unless it became a link at the same moment."""
        if link.peer is None:
            link.refuse(refusal)
            link.abort()
            # A loop that was interrupted while connecting does not call `connection_lost`.
            self.closed(link)

    def _new_link(self, dials: bool, remote: str, expected: str) -> PeerLink:
        return PeerLink(
            self,
            self._loop,
            self.identity,
            self._auth.secret,
            os.urandom(NONCE_BYTES),
            dials,
            remote,
            expected,
            self._frame_bytes_max,
            self._send_bytes_max,
            disk=self.own_disk,
            known=dict(self.memory.known),
        )

    def _failure(self, link: PeerLink) -> Refusal | None:
        """Return and count the refusal, or None if there is none or it is a normal one."""
        refusal = link.refusal
        if refusal is None or self._stopped:
            return None
        self._count(refusal.reason)
        if refusal.reason == REMOVED_THERE:
            self._handler.on_removed()
        elif refusal.reason in (OLDER_COPY_THERE, OLDER_COPY_WAITS_THERE):
            self._handler.on_older_copy(refusal.text, refusal.reason == OLDER_COPY_THERE)
        return None if refusal.quiet else refusal

    def _count(self, reason: str) -> None:
        self.metrics.refused[reason] = self.metrics.refused.get(reason, 0) + 1
