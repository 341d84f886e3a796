"""The links of a member to others: one TCP connection per pair, which either end may dial.

`holdfast.security.peer_handshake` authenticates the peer. When both ends have dialled, the member
with the lower id keeps the first of the two connections. A peer knows the federation's secret, has
a certificate for its id, or both, as configured. Before it has proved that, it occupies one of
GREETINGS_MAX connections for at most HANDSHAKE_TIMEOUT_S, and receives nothing.
"""

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from re import fullmatch
from typing import Final, Protocol

from holdfast.addresses import ADDRESS, join_address, split_address
from holdfast.federation.core.frames import FRAME_BYTES_MAX, VERSION
from holdfast.federation.sidecar.link import FRAME, PING, PONG, TOKEN, MemberLink
from holdfast.security.peer_handshake import FEDERATION, NONCE_BYTES, PeerIdentity, Refusal
from holdfast.server.event_loop.failures import report
from holdfast.server.peers.authentication import PeerAuth
from holdfast.server.peers.complaints import Complaints
from holdfast.server.peers.dialer import PeerDialer, connect
from holdfast.server.peers.link import CLOSE_TIMEOUT_S, PeerLink, PeerMetrics, failure
from holdfast.server.peers.listener import PeerListener

logger = logging.getLogger("holdfast")

HANDSHAKE_TIMEOUT_S: Final = 5.0
STOP_TIMEOUT_S: Final = 2 * CLOSE_TIMEOUT_S
DIALS_MAX: Final = 64
"""The most simultaneous dials. The member repeats its request for those that were skipped."""
PING_S: Final = 5.0


@dataclass(frozen=True)
class LinkBounds:
    """The limits of one link."""

    frame_bytes_max: int = FRAME_BYTES_MAX
    buffer_bytes_max: int = 64 << 20
    """The most unsent bytes for one peer. Frames beyond are dropped, which the core expects."""
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S


class LinksOwner(Protocol):
    """The receiver of events of the links. All calls come from the event loop."""

    def link_up(self, peer: bytes) -> None: ...

    def link_down(self, peer: bytes) -> None:
        """Report the end of a link, once per `link_up`, unless `MemberLinks.close` closed it."""

    def link_busy(self, peer: bytes, is_busy: bool) -> None: ...

    def link_frame(self, peer: bytes, data: bytes) -> None: ...

    def link_stirred(self, peer: bytes) -> None:
        """Report that the peer is alive: bytes have arrived, but no whole frame yet."""

    def found(self, address: str, peer: bytes) -> None:
        """Report the id of the peer that serves an address configured without an id."""


class MemberLinks:
    """All links of one member: at most one per peer, which the handshake chooses."""

    def __init__(
        self,
        owner: LinksOwner,
        identity: PeerIdentity,
        auth: PeerAuth,
        bounds: LinkBounds | None = None,
    ) -> None:
        """`identity`: the member's id in hexadecimal digits, the federation as cluster id."""
        self.metrics = PeerMetrics()
        self.dropped: Counter[str] = Counter()
        """Frames that were not sent, by reason."""
        self.address = ""
        self.identity = identity
        self._owner = owner
        self._auth = auth
        self._bounds = bounds or LinkBounds()
        self._loop = asyncio.get_running_loop()
        self._links: dict[bytes, MemberLink] = {}
        # All connections, including those still in the handshake.
        self._open: dict[PeerLink, MemberLink] = {}
        self._all_closed = asyncio.Event()
        self._unflushed: list[MemberLink] = []
        self._dials: dict[bytes, asyncio.Task[None]] = {}
        self._finders: dict[str, PeerDialer] = {}
        self._complaints = Complaints(self._loop.time, "federation:")
        self._listener = PeerListener(
            self._loop,
            self._greet,
            lambda: self._count("crowded"),
            lambda error: self._complaints.say(
                "accept", str(error), f"cannot be accepted: {error}"
            ),
        )
        self._pings: asyncio.TimerHandle | None = None
        self._is_stopped = False

    async def start(self, listen: str) -> None:
        """Begin. `listen`: host:port, port 0 for any, empty for none. Raises `OSError`."""
        if listen:
            host, port = split_address(listen)
            self.address = join_address(host, await self._listener.start(host, port))
        self._ping()

    async def stop(self) -> None:
        """Send queued frames and close all connections. The owner receives no more calls."""
        self._is_stopped = True
        if self._pings is not None:
            self._pings.cancel()
        tasks = [*self._dials.values(), *(finder.stop() for finder in self._finders.values())]
        for task in tasks:
            task.cancel()
        await self._listener.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._links.values():
            link.inner.close()
        self._links.clear()
        if self._open:
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._all_closed.wait()
            except TimeoutError:
                logger.warning("federation: %d connections do not close", len(self._open))

    # Dials

    def dial(self, node: bytes, address: str) -> None:
        """Dial a member unless it is linked or a dial to it is in progress."""
        if node in self._links or node in self._dials or self._is_stopped:
            return
        if len(self._dials) >= DIALS_MAX:
            self._count("too many dials")
            return
        if fullmatch(ADDRESS, address) is None:
            self._complaints.say(
                node.hex(), "address", f"{node.hex()} says to be at {address!r}: not host:port"
            )
            return
        task = self._loop.create_task(self._dial(node.hex(), address))
        self._dials[node] = task
        task.add_done_callback(lambda task: self._dialled(node, task))

    def find(self, addresses: Iterable[str]) -> None:
        """Dial these addresses repeatedly until a member replies, and report its id."""
        for address in addresses:
            if address not in self._finders and not self._is_stopped:
                finder = PeerDialer(address, "", self._seek, self._loop)
                self._finders[address] = finder
                finder.needed.set()

    # Frames

    def send(self, peer: bytes, data: bytes) -> bool:
        """Queue a frame for a peer; False if it was dropped. Frames of one turn share one write."""
        link = self._links.get(peer)
        if link is None:
            self.dropped["not linked"] += 1
            return False
        if len(data) > self._bounds.frame_bytes_max:
            self.dropped["too large"] += 1
            return False
        if link.inner.pending_bytes() > self._bounds.buffer_bytes_max:
            self.dropped["buffer full"] += 1
            return False
        return self._queue(link, FRAME, data)

    def close(self, peer: bytes, reason: str) -> None:
        """Close the link to a peer. The owner is not called back."""
        link = self._links.pop(peer, None)
        if link is not None:
            self.metrics.disconnects += 1
            logger.info("federation: closed %s at %s: %s", peer.hex(), link.inner.remote, reason)
            link.inner.close()

    def linked(self) -> dict[bytes, MemberLink]:
        """The established links by peer, not to be modified."""
        return self._links

    def pending_bytes(self, peer: bytes) -> int:
        link = self._links.get(peer)
        return 0 if link is None else link.inner.pending_bytes()

    def _queue(self, link: MemberLink, kind: int, payload: bytes) -> bool:
        if not link.inner.send(kind, payload):
            return False
        if not link.inner.queued:
            link.inner.queued = True
            if not self._unflushed:
                self._loop.call_soon(self._flush)
            self._unflushed.append(link)
        return True

    def _flush(self) -> None:
        unflushed, self._unflushed = self._unflushed, []
        for link in unflushed:
            link.inner.queued = False
            link.inner.flush()

    def _ping(self) -> None:
        for link in self._links.values():
            # On a busy link a ping would measure the queue, and make it longer.
            if not link.is_busy:
                self._queue(link, PING, link.token())
        self._pings = self._loop.call_later(PING_S, self._ping)

    # PeerLinkOwner and LinkWatcher

    def judge(self, link: PeerLink, peer: PeerIdentity, last: bool) -> Refusal | None:
        own = self.identity
        if fullmatch("[0-9a-f]{32}", peer.node_id) is None:
            return Refusal("handshake", f"{peer.node_id!r} is no id of a member")
        if peer.cluster_id != own.cluster_id:
            return Refusal(
                "federation",
                f"{peer.node_id} belongs to the federation {peer.cluster_id!r}, {own.node_id} to"
                f" {own.cluster_id!r}: see federation.name",
            )
        if peer.node_id == own.node_id:
            if peer.process == own.process:
                return Refusal("self", "is this federator", quiet=True)
            return Refusal(
                "same_id", f"two members have the id {peer.node_id}: give one another directory"
            )
        if self._is_stopped:
            return Refusal("stopping", f"{own.node_id} is stopping", quiet=True)
        known = self._links.get(bytes.fromhex(peer.node_id))
        if known is None or known.inner.closing or not last:
            return None
        assert known.inner.peer is not None
        if known.inner.peer.process == peer.process:
            return Refusal("linked", f"{peer.node_id} is connected", quiet=True)
        return None

    def established(self, link: PeerLink) -> None:
        wrapper = self._open[link]
        node = wrapper.node
        known = self._links.get(node)
        if known is not None:
            self._unlink(known)
            known.inner.abort()
        self._links[node] = wrapper
        self.metrics.connects += 1
        self._complaints.forget(node.hex())
        logger.info(
            "federation: linked with %s at %s dialled=%s", node.hex(), link.remote, link.dials
        )
        self._owner.link_up(node)
        if wrapper.is_busy and self._links.get(node) is wrapper:
            self._owner.link_busy(node, True)

    def received(self, link: PeerLink, kind: int, payload: bytes) -> None:
        wrapper = self._open[link]
        if self._links.get(wrapper.node) is not wrapper:
            return
        if kind == FRAME:
            self._owner.link_frame(wrapper.node, payload)
        elif kind == PING and len(payload) == TOKEN.size:
            self._queue(wrapper, PONG, payload)
        elif kind == PONG:
            wrapper.measured(payload)

    def broken_off(self, link: PeerLink, text: str) -> None:
        wrapper = self._open[link]
        logger.warning("federation: closed %s at %s: %s", wrapper.node.hex(), link.remote, text)

    def opened(self, link: PeerLink) -> None:
        """Do nothing: the connection is registered since `_new_link`."""

    def closed(self, link: PeerLink) -> None:
        wrapper = self._open.pop(link, None)
        if self._is_stopped:
            if not self._open:
                self._all_closed.set()
        elif wrapper is not None and link.peer is not None:
            node = wrapper.node
            if self._links.get(node) is wrapper:
                logger.info("federation: lost %s at %s", node.hex(), link.remote)
                self._unlink(wrapper)

    def busy(self, link: MemberLink, is_busy: bool) -> None:
        if link.inner.peer is not None and self._links.get(link.node) is link:
            self._owner.link_busy(link.node, is_busy)

    def stirred(self, link: MemberLink) -> None:
        if self._links.get(link.node) is link:
            self._owner.link_stirred(link.node)

    def _unlink(self, link: MemberLink) -> None:
        del self._links[link.node]
        self.metrics.disconnects += 1
        if not self._is_stopped:
            self._owner.link_down(link.node)

    # Connections that are not links yet

    async def _greet(self, one: socket.socket, remote: str) -> None:
        link = self._new_link(False, remote, "")
        context = self._auth.server
        connecting = self._loop.connect_accepted_socket(lambda: link, one, ssl=context)
        refusal = await self._settle(link, connecting)
        if refusal is not None:
            # One line per host and reason: strangers must not control the log's volume.
            key = f"{remote.rpartition(':')[0]} {refusal.reason}"
            self._complaints.say(key, refusal.reason, f"at {remote} {refusal.text}")

    async def _dial(self, expected: str, address: str) -> None:
        self.metrics.dials += 1
        link = self._new_link(True, address, expected)
        refusal = await self._settle(link, connect(self._loop, address, link, self._auth.client))
        if refusal is None:
            return
        if refusal.reason == "unexpected" and address in self._finders:
            self._finders[address].needed.set()
        # A restart of the other member is normal, so it is logged as information.
        level = logging.INFO if refusal.reason in ("nobody", "reset") else logging.WARNING
        text = f"{expected} at {address} {refusal.text}"
        self._complaints.say(expected, refusal.text, text, level)

    def _dialled(self, node: bytes, task: "asyncio.Task[None]") -> None:
        del self._dials[node]
        report(task)

    async def _seek(self, finder: PeerDialer) -> None:
        link = self._new_link(True, finder.address, "")
        self.metrics.dials += 1
        connecting = connect(self._loop, finder.address, link, self._auth.client)
        refusal = await self._settle(link, connecting)
        if refusal is not None:
            text = f"{finder.address} {refusal.text}"
            self._complaints.say(finder.address, refusal.text, text)
        reason = link.inner.refusal.reason if link.inner.refusal is not None else ""
        if reason == "self":
            finder.needed.clear()
        elif reason in ("", "linked"):
            finder.needed.clear()
            self._owner.found(finder.address, bytes.fromhex(link.inner.identified()))

    async def _settle(self, link: MemberLink, connecting: Awaitable[object]) -> Refusal | None:
        """Wait for the handshake. Return its counted refusal, None without a notable one."""
        inner = link.inner
        try:
            async with asyncio.timeout(self._bounds.handshake_timeout_s):
                await connecting
                await inner.settled
        except TimeoutError:
            self._give_up(inner, Refusal("timeout", "gave no answer in time"))
        except OSError as error:
            self._give_up(inner, failure(error))
        except asyncio.CancelledError:
            self._give_up(inner, Refusal("cancelled", "is not waited for any longer", quiet=True))
            raise
        refusal = inner.refusal
        if refusal is None or self._is_stopped:
            return None
        self._count(refusal.reason)
        return None if refusal.quiet else refusal

    def _give_up(self, link: PeerLink, refusal: Refusal) -> None:
        if link.peer is None:
            link.refuse(refusal)
            link.abort()
            # A loop that was interrupted while connecting does not call `connection_lost`.
            self.closed(link)

    def _new_link(self, dials: bool, remote: str, expected: str) -> MemberLink:
        inner = PeerLink(
            self,
            self._loop,
            self.identity,
            self._auth.secret,
            os.urandom(NONCE_BYTES),
            dials,
            remote,
            expected,
            self._bounds.frame_bytes_max,
            self._bounds.buffer_bytes_max,
            FEDERATION,
        )
        link = MemberLink(inner, self, self._loop)
        self._open[inner] = link
        return link

    def _count(self, reason: str) -> None:
        self.metrics.refused[reason] = self.metrics.refused.get(reason, 0) + 1


def identity_of(node: bytes, federation: str, address: str) -> PeerIdentity:
    return PeerIdentity(
        node.hex(),
        "",
        federation,
        VERSION,
        peer_address=address,
        process=os.urandom(8).hex(),
    )
