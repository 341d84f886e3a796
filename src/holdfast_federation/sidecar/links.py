"""Links a member to others: one TCP connection per pair, which either end may dial.

When both ends have dialled, the member with the lower id keeps the first of the two connections. A
peer knows the federation's secret, has a certificate for its id, or both, as configured.
"""

import asyncio
import os
import struct
import time
from collections import Counter
from collections.abc import Iterable
from re import fullmatch
from typing import Final, Protocol

from holdfast.addresses import ADDRESS, join_address, split_address
from holdfast.io.event_loop.failures import report
from holdfast.io.peers.authentication import PeerAuth
from holdfast.io.peers.dialer import PeerDialer
from holdfast.io.peers.link import LinkBounds, PeerLink
from holdfast.io.peers.mesh import PeerMesh
from holdfast.security.peer_handshake import FEDERATION
from holdfast.security.peer_identity import PeerIdentity, Refusal
from holdfast_federation.core.frames import FRAME_BYTES_MAX, LOWEST, VERSION
from holdfast_federation.sidecar.site_names import SiteNames

FRAME: Final = 0
"""The kind of a frame on a link: a frame of `holdfast_federation.core.frames`.

PING and PONG measure round trips. Other kinds are ignored.
"""
PING: Final = 1
PONG: Final = 2
TOKEN: Final = struct.Struct(">d")
"""The layout of a PING's token: the sender's clock. The PONG returns it unchanged."""
NAMES: Final = 3
"""The kind of a frame with names of sites. Older members ignore it."""
START_DIGITS: Final = 20
"""The length from which on a number is no epoch."""
PING_S: Final = 5.0
STIR_S: Final = 0.25
"""The shortest time in seconds between two reports of a sign of life other than a frame."""
DIALS_MAX: Final = 64
"""The most simultaneous dials. The member repeats its request for those that were skipped."""
BOUNDS: Final = LinkBounds(FRAME_BYTES_MAX, send_bytes_max=64 << 20)


class LinksOwner(Protocol):
    """The receiver of events of the links. All calls come from the event loop."""

    def link_up(self, peer: bytes) -> None: ...

    def link_down(self, peer: bytes) -> None:
        """Reports the end of a link, once per `link_up`, unless `MemberLinks.disconnect` did it."""

    def link_busy(self, peer: bytes, is_busy: bool) -> None: ...

    def link_frame(self, peer: bytes, data: bytes) -> None: ...

    def link_stirred(self, peer: bytes) -> None:
        """Reports that the peer is alive: bytes have arrived, but no whole frame yet."""

    def found(self, address: str, peer: bytes) -> None:
        """Reports the id of the peer that serves an address configured without an id."""


class MemberLinks(PeerMesh):
    """The mesh of one member."""

    def __init__(
        self,
        owner: LinksOwner,
        identity: PeerIdentity,
        auth: PeerAuth,
        bounds: LinkBounds = BOUNDS,
        ping_s: float = PING_S,
        epoch: int = 1,
    ) -> None:
        """`identity`: the member's id in hexadecimal digits, the federation as cluster id.
        `epoch`: of this start."""
        super().__init__(
            asyncio.get_running_loop(), identity, auth, FEDERATION, bounds, "federation"
        )
        self.dropped: Counter[str] = Counter()
        """Frames that were not sent, by reason."""
        self.names = SiteNames(bytes.fromhex(identity.node_id), epoch, identity.site)
        self.address = ""
        self._owner = owner
        self._dials: dict[bytes, asyncio.Task[None]] = {}
        self._finders: dict[str, PeerDialer] = {}
        self._ping_s = ping_s
        self._pings: asyncio.TimerHandle | None = None

    async def start(self, listen: str) -> None:
        """Begins. `listen`: host:port, port 0 for any, empty for none. Raises `OSError`."""
        if listen:
            host, port = split_address(listen)
            self.address = join_address(host, await self._listener.start(host, port))
        self._ping()

    # Dials

    def dial(self, node: bytes, address: str) -> None:
        """Dials a member unless it is linked or a dial to it is in progress."""
        if node.hex() in self._links or node in self._dials or self._is_stopped:
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
        """Dials these addresses repeatedly until a member replies, and reports its id."""
        for address in addresses:
            if address not in self._finders and not self._is_stopped:
                finder = PeerDialer(address, "", self._seek, self._loop)
                self._finders[address] = finder
                finder.needed.set()

    def _stop_dialling(self) -> "list[asyncio.Task[None]]":
        if self._pings is not None:
            self._pings.cancel()
        for task in self._dials.values():
            task.cancel()
        return [*self._dials.values(), *(finder.stop() for finder in self._finders.values())]

    async def _dial(self, expected: str, address: str) -> None:
        refusal = await self._attempt(self._new_link(True, address, expected))
        if refusal is None:
            return
        if refusal.reason == "unexpected" and address in self._finders:
            self._finders[address].needed.set()
        self._complain(expected, refusal.text, f"{expected} at {address}", refusal)

    def _dialled(self, node: bytes, task: "asyncio.Task[None]") -> None:
        del self._dials[node]
        report(task)

    async def _seek(self, finder: PeerDialer) -> None:
        link = self._new_link(True, finder.address, "")
        refusal = await self._attempt(link)
        if refusal is not None:
            self._complain(finder.address, refusal.text, finder.address, refusal)
        reason = link.refusal.reason if link.refusal is not None else ""
        if reason in ("", "linked", "self"):
            finder.needed.clear()
        if reason in ("", "linked"):
            finder.answered = link.identified()
            self._owner.found(finder.address, bytes.fromhex(link.identified()))

    # Frames

    def forward(self, peer: bytes, data: bytes) -> bool:
        """Queues a frame for a peer; False if it was dropped, which the core expects."""
        link = self._links.get(peer.hex())
        if link is None:
            self.dropped["not linked"] += 1
        elif len(data) > self._bounds.frame_bytes_max:
            self.dropped["too large"] += 1
        elif link.pending_bytes() > self._bounds.send_bytes_max:
            self.dropped["buffer full"] += 1
        else:
            assert link.peer is not None
            return self.send(peer.hex(), FRAME, _in_version(data, link.peer.wire_version))
        return False

    def disconnect(self, peer: bytes, reason: str) -> None:
        """Closes the link to a peer. The owner is not called back."""
        self.close(peer.hex(), reason, is_reported=False)
        self._seek_again(peer.hex())

    def _seek_again(self, node_id: str) -> None:
        """Dials the addresses again at which the member was found. A cluster is at one of several,
        depending on the node that runs it."""
        for finder in self._finders.values():
            if finder.answered == node_id:
                finder.needed.set()
                finder.at_once()

    def linked(self) -> dict[bytes, PeerLink]:
        """The established links by peer."""
        return {bytes.fromhex(node_id): link for node_id, link in self._links.items()}

    def _ping(self) -> None:
        for node_id, link in self._links.items():
            # On a busy link a ping would measure the queue, and make it longer.
            if not link.is_busy:
                # Not the loop's clock: it stands still during a turn.
                self.send(node_id, PING, TOKEN.pack(time.monotonic()))
        self._pings = self._loop.call_later(self._ping_s, self._ping)

    # PeerMesh

    def stirred(self, link: PeerLink) -> None:
        """Reports a sign of life at most every STIR_S.

        A frame may take longer than the silence that the member tolerates. Without the report, a
        slow link with one large frame would count as down.
        """
        now = self._loop.time()
        if now - link.stirred_at >= STIR_S and self._links.get(link.identified()) is link:
            link.stirred_at = now
            self._owner.link_stirred(bytes.fromhex(link.identified()))

    def busy(self, link: PeerLink) -> None:
        """Reports a change, so that the member drops QoS 0 on a busy link and queues none."""
        if self._links.get(link.identified()) is link:
            self._owner.link_busy(bytes.fromhex(link.identified()), link.is_busy)

    def _accept(self, link: PeerLink, peer: PeerIdentity, last: bool) -> Refusal | None:
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
            return Refusal(
                "same_id", f"two members have the id {peer.node_id}: give one another directory"
            )
        known = self._links.get(peer.node_id)
        if known is not None and known.peer is not None and _start(known.peer) > _start(peer):
            # Two nodes of a cluster run the member until the earlier one finds out. The link of the
            # later one must not be replaced by it, again and again.
            text = f"a later start of {peer.node_id} is connected"
            return Refusal("earlier start", text, quiet=True)
        return None

    def _connected(self, link: PeerLink, peer: PeerIdentity) -> None:
        self._owner.link_up(bytes.fromhex(peer.node_id))
        for payload in self.names.frames():
            self.send(peer.node_id, NAMES, payload)
        if link.is_busy:
            self.busy(link)

    def _frame(self, link: PeerLink, node_id: str, kind: int, payload: bytes) -> None:
        if kind == FRAME:
            self._owner.link_frame(bytes.fromhex(node_id), payload)
            return
        self.stirred(link)
        if kind == NAMES:
            self._spread_names(node_id, payload)
            return
        if len(payload) != TOKEN.size:
            return
        if kind == PING:
            self.send(node_id, PONG, payload)
        elif kind == PONG:
            rtt_s = time.monotonic() - TOKEN.unpack(payload)[0]
            # A peer that invents tokens must not distort the numbers of other links.
            if 0 <= rtt_s < 60:
                before_s = rtt_s if link.rtt_s is None else link.rtt_s
                link.rtt_s = before_s + (rtt_s - before_s) / 8

    def _spread_names(self, node_id: str, payload: bytes) -> None:
        news = self.names.receive(payload)
        if news:
            for other in self._links:
                if other != node_id:
                    self.send(other, NAMES, news)

    def _disconnected(self, link: PeerLink, node_id: str) -> None:
        self._seek_again(node_id)
        self._owner.link_down(bytes.fromhex(node_id))


def identity_of(
    node: bytes, federation: str, address: str, site: str = "", epoch: int = 0
) -> PeerIdentity:
    return PeerIdentity(
        node.hex(),
        str(epoch or ""),
        federation,
        VERSION,
        peer_address=address,
        process=os.urandom(8).hex(),
        site=site,
        wire_lowest=LOWEST,
    )


def _start(peer: PeerIdentity) -> int:
    """The epoch of the peer's start. Older members do not announce it here: 0."""
    text = peer.incarnation
    return int(text) if text.isascii() and text.isdigit() and len(text) < START_DIGITS else 0


def _in_version(data: bytes, version: int) -> bytes:
    """The frame as a member reads it that speaks at most this version. All versions have the same
    kinds and fields, so only the number differs."""
    return data if version == VERSION else bytes((version,)) + data[1:]
