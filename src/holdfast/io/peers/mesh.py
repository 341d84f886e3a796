"""A mesh of authenticated links: at most one per peer, over connections that either end may dial.

Nodes of a cluster (`PeerLinks`) and members of a federation (`MemberLinks`) derive from it. Each of
them decides whom to dial and which peers it accepts. `holdfast.security.peer_handshake` decides
which of two connections stays. Before a peer has proved that it belongs here, it occupies one of
GREETINGS_MAX connections for at most `handshake_timeout_s`, and receives nothing.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, cast

from holdfast.addresses import UNIX, join_address
from holdfast.io.event_loop import descriptors
from holdfast.io.event_loop.failures import report
from holdfast.io.peers.authentication import PeerAuth
from holdfast.io.peers.complaints import Complaints
from holdfast.io.peers.dialer import connect
from holdfast.io.peers.link import CLOSE_TIMEOUT_S, LinkBounds, PeerLink, PeerMetrics, failure
from holdfast.io.sockets.bound_sockets import reserve_tcp, reserve_unix
from holdfast.security.peer_handshake import Realm
from holdfast.security.peer_identity import NO_REPLY, PeerIdentity, Refusal

BACKLOG: Final = 128
GREETINGS_MAX: Final = 64
"""The most accepted connections in the handshake. A further one displaces the oldest.

A node needs milliseconds for its handshake, so idle connections of strangers do not keep it out.
"""
SOCKET_MODE: Final = 0o600
ACCEPT_PAUSE_S: Final = 0.1
"""The pause in seconds after an error of accept, for example without a free descriptor."""


class PeerListener:
    """Runs `greet(socket, remote)`, which owns the socket, for each connection.

    With too many handshakes it cancels the oldest one and calls `crowded`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        greet: Callable[[socket.socket, str], Coroutine[Any, Any, None]],
        crowded: Callable[[], None],
        failed: Callable[[OSError], None],
    ) -> None:
        self.greetings: dict[asyncio.Task[None], None] = {}
        """The handshakes in progress, the oldest first."""
        self._loop = loop
        self._greet = greet
        self._crowded = crowded
        self._failed = failed
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, bind: str, port: int) -> int:
        """Listens on all addresses of a host and returns the port; or at the path of a Unix socket,
        `unix:PATH`. Raises `OSError`."""
        if bind.startswith(UNIX):
            self._sockets.append(reserve_unix(Path(bind.removeprefix(UNIX)), SOCKET_MODE))
        else:
            self._sockets = await asyncio.to_thread(reserve_tcp, bind, port)
            port = self._sockets[0].getsockname()[1]
        for one in self._sockets:
            one.listen(BACKLOG)
            task = self._loop.create_task(self._accept(one))
            task.add_done_callback(report)
            self._tasks.append(task)
        return port

    async def stop(self) -> None:
        tasks = [*self._tasks, *self.greetings]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close()

    def _close(self) -> None:
        for one in self._sockets:
            one.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                one, address = await self._loop.sock_accept(listener)
            except OSError as error:
                self._failed(error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            # The dialling end of a Unix socket has no address.
            remote = join_address(*address[:2]) if one.family != socket.AF_UNIX else UNIX
            task = self._loop.create_task(self._greet(one, remote))
            self.greetings[task] = None
            task.add_done_callback(self._ended)
            if len(self.greetings) > descriptors.share(GREETINGS_MAX):
                oldest = next(iter(self.greetings))
                del self.greetings[oldest]
                oldest.cancel()
                self._crowded()
            # sock_accept does not wait while connections are ready, so others get a turn here.
            await asyncio.sleep(0)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self.greetings.pop(task, None)
        report(task)


logger = logging.getLogger("holdfast")

STOP_TIMEOUT_S: Final = 2 * CLOSE_TIMEOUT_S


class PeerMesh:
    """All links of one node or member, at most one per peer.

    A derived class overrides `_accept`, `_connected`, `_frame` and `_disconnected`, and what else
    concerns it. All of them are called in the event loop, and may send and close links.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        identity: PeerIdentity,
        auth: PeerAuth,
        realm: Realm,
        bounds: LinkBounds,
        subject: str,
    ) -> None:
        """`subject`: the beginning of the event in each log line."""
        self.metrics = PeerMetrics()
        self.identity = identity
        self.own_disk: Callable[[], str] | None = None
        """The description of this node's disk: see `Handshake`."""
        self._loop = loop
        self._auth = auth
        self._realm = realm
        self._bounds = bounds
        self._subject = subject
        self._links: dict[str, PeerLink] = {}
        self._open: set[PeerLink] = set()
        """All connections, including those in the handshake."""
        self._all_closed = asyncio.Event()
        self._unflushed: list[PeerLink] = []
        self._complaints = Complaints(loop.time, subject)
        self._listener = PeerListener(
            loop,
            self._greet,
            lambda: self._count("crowded"),
            lambda error: self._complaints.say(
                "accept", str(error), f"cannot be accepted: {error}"
            ),
        )
        self._sockets = ""
        """The directory of the Unix sockets of peers on this machine."""
        self._is_stopped = False

    async def stop(self) -> None:
        """Sends queued frames and closes all connections. No method of a derived class is called
        for them."""
        self._is_stopped = True
        dialling = self._stop_dialling()
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
                logger.warning(f"{self._subject}_not_closed connections=%d", len(self._open))

    # The decisions of derived classes

    def _stop_dialling(self) -> "list[asyncio.Task[None]]":
        """Cancels the dials and returns their tasks."""
        raise NotImplementedError

    def _accept(self, link: PeerLink, peer: PeerIdentity, last: bool) -> Refusal | None:
        """Returns the reason to refuse a peer other than this process. `last`: see `Handshake`."""
        raise NotImplementedError

    def _connected(self, link: PeerLink, peer: PeerIdentity) -> None:
        raise NotImplementedError

    def _frame(self, link: PeerLink, node_id: str, kind: int, payload: bytes) -> None:
        """Processes a frame. Frames come in the order of sending. `BadFrame` closes the link."""
        raise NotImplementedError

    def _disconnected(self, link: PeerLink, node_id: str) -> None:
        """Handles the loss of a link, once per `_connected` and before the next one of its peer."""
        raise NotImplementedError

    def _refused(self, refusal: Refusal) -> None:
        """Processes a connection that became no link."""

    # Frames

    def send(self, node_id: str, kind: int, payload: bytes | Sequence[bytes]) -> bool:
        """Queues a frame; returns False if there is no link. One turn is one write per peer. Raises
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
        """Writes queued frames now instead of after the present turn of the loop."""
        unflushed, self._unflushed = self._unflushed, []
        for link in unflushed:
            link.queued = False
            link.flush()

    def pending_bytes(self, node_id: str) -> int:
        """Returns the bytes queued for a peer that the system has not accepted yet."""
        link = self._links.get(node_id)
        return 0 if link is None else link.pending_bytes()

    def close(self, node_id: str, text: str, is_reported: bool = True) -> None:
        """Closes the link to a peer, if there is one. `is_reported`: call `_disconnected`."""
        link = self._links.get(node_id)
        if link is not None:
            self._log(logging.INFO, "closed", link, node_id, text=text)
            self._unlink(link, node_id, is_reported)
            link.close()

    # LinkOwner

    def judge(self, link: PeerLink, peer: PeerIdentity, last: bool) -> Refusal | None:
        own = self.identity
        if peer.node_id == own.node_id and peer.process == own.process:
            return Refusal("self", f"is this {self._realm.node}", quiet=True)
        if self._is_stopped:
            return Refusal("stopping", f"{own.node_id} is stopping", quiet=True)
        refusal = self._accept(link, peer, last)
        if refusal is not None:
            return refusal
        known = self._links.get(peer.node_id)
        if known is None or known.peer is None or known.closing or not last:
            return None
        if known.peer.process == peer.process:
            return Refusal("linked", f"{peer.node_id} is connected", quiet=True)
        return None

    def established(self, link: PeerLink) -> None:
        """Registers the link. It replaces the one of the peer's process before."""
        peer = link.peer
        assert peer is not None
        known = self._links.get(peer.node_id)
        if known is not None:
            self._log(logging.INFO, "restarted", link, peer.node_id)
            self._unlink(known, peer.node_id)
            known.abort()
        self._links[peer.node_id] = link
        self.metrics.connects += 1
        self._complaints.forget(peer.node_id)
        version = peer.wire_version
        self._log(
            logging.INFO, "connected", link, peer.node_id, dialled=link.dials, wire_version=version
        )
        self._connected(link, peer)

    def received(self, link: PeerLink, kind: int, payload: bytes) -> None:
        assert link.peer is not None
        self._frame(link, link.peer.node_id, kind, payload)

    def broken_off(self, link: PeerLink, text: str) -> None:
        assert link.peer is not None
        self._log(logging.WARNING, "closed", link, link.peer.node_id, text=text)

    def stirred(self, link: PeerLink) -> None:
        pass

    def busy(self, link: PeerLink) -> None:
        pass

    def closed(self, link: PeerLink) -> None:
        self._open.discard(link)
        if self._is_stopped and not self._open:
            self._all_closed.set()
        peer = link.peer
        if peer is not None and self._links.get(peer.node_id) is link:
            self._log(logging.INFO, "lost", link, peer.node_id)
            self._unlink(link, peer.node_id)

    def _log(self, level: int, what: str, link: PeerLink, node_id: str, **fields: object) -> None:
        values: dict[str, object] = {"node": node_id, "address": link.remote, **fields}
        if link.peer is not None and link.peer.site:
            values["site"] = link.peer.site
        names = "".join(f" {name}=%{'r' if name == 'text' else 's'}" for name in values)
        logger.log(level, f"{self._subject}_{what}" + names, *values.values())

    def _unlink(self, link: PeerLink, node_id: str, is_reported: bool = True) -> None:
        del self._links[node_id]
        self.metrics.disconnects += 1
        if is_reported and not self._is_stopped:
            self._disconnected(link, node_id)

    # Connections that are not links yet

    def _new_link(self, dials: bool, remote: str, expected: str) -> PeerLink:
        link = PeerLink(
            self,
            self._loop,
            self.identity,
            self._bounds,
            secret=self._auth.secret,
            realm=self._realm,
            dials=dials,
            remote=remote,
            expected=expected,
            disk=self.own_disk,
        )
        self._open.add(link)
        return link

    async def _greet(self, one: socket.socket, remote: str) -> None:
        link = self._new_link(False, remote, "")
        context, protocol = self._auth.server, cast(asyncio.BaseProtocol, link)
        connecting = self._loop.connect_accepted_socket(lambda: protocol, one, ssl=context)
        refusal = await self._settle(link, connecting)
        if refusal is not None:
            # One line per host and reason: strangers must not control the log's volume.
            key = f"{remote.rpartition(':')[0]} {refusal.reason}"
            self._complain(key, refusal.reason, remote, refusal)

    def _complain(self, key: str, what: str, subject: str, refusal: Refusal) -> None:
        """Logs why a connection did not become a link; as information what the restart of a node
        does to connections."""
        level = logging.INFO if refusal.reason in ("nobody", "reset") else logging.WARNING
        self._complaints.say(key, what, f"{subject}: {refusal.text}", level)

    async def _attempt(self, link: PeerLink) -> Refusal | None:
        """Dials the link's address once. Returns the refusal, None without a notable one."""
        self.metrics.dials += 1
        protocol = cast(asyncio.BaseProtocol, link)
        return await self._settle(
            link, connect(self._loop, link.remote, protocol, self._auth.client, self._sockets)
        )

    async def _settle(self, link: PeerLink, connecting: Awaitable[object]) -> Refusal | None:
        """Waits until the connection is a link, is refused, or times out. Returns the refusal."""
        try:
            async with asyncio.timeout(self._bounds.handshake_timeout_s):
                await connecting
                await link.settled
        except TimeoutError:
            self._give_up(link, Refusal("timeout", NO_REPLY))
        except OSError as error:
            self._give_up(link, failure(error))
        except asyncio.CancelledError:
            self._give_up(link, Refusal("cancelled", "is not waited for any longer", quiet=True))
            raise
        refusal = link.refusal
        if refusal is None or self._is_stopped:
            return None
        self._count(refusal.reason)
        self._refused(refusal)
        return None if refusal.quiet else refusal

    def _give_up(self, link: PeerLink, refusal: Refusal) -> None:
        """Refuses the connection unless it became a link at the same moment."""
        if link.peer is None:
            link.refuse(refusal)
            link.abort()
            # A loop that was interrupted while connecting does not call `connection_lost`.
            self.closed(link)

    def _count(self, reason: str) -> None:
        self.metrics.refused[reason] = self.metrics.refused.get(reason, 0) + 1
