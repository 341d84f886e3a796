"""Links of two nodes whose own connection is lost, through a third node that hears both.

For the two *ends* a relayed link is a link: `LinkUp` and `LinkDown` come as for a direct one, never
two links of a pair at once. Its frames arrive in order, or the link is lost as a whole.

    opener                     relay                      other end
    OPEN(epoch, other) ──▶ knows both ──▶ OPEN(epoch, opener)
                           ◀── ACCEPT(disk of the other end)
    ACCEPT(identity) ◀──
    CONFIRM(disk) ──▶                ──▶ CONFIRM(identity)
    DATA, CREDIT ◀──▶                ◀──▶ DATA, CREDIT
    CLOSE, by either end, or by the relay when it loses one of them

The end that has not heard the other one for most of `suspect_s` opens (`Detector.unheard`), through
a node whose heartbeats say that it hears the other end. If both open, the
smaller id wins. An end confirms a node that is a member, and that `objection` accepts. Its identity
comes from the relay, which has authenticated it. Its disk is described after the other end has
opened the link, as in the handshake of a direct one (`security.peer_handshake`).

An epoch is a number of the opener: odd if its id is the smaller one. So the epochs of two openers
differ. Frames of another epoch or through another relay are not of this link. Counter-example: A
closes a link and opens another one through the same node, while frames of the first one are on
their way to it. A leader's answer from before the gap would count for a record that was sent after
it.

A relay has only direct links to both ends, and forgets a pair with either of them. It holds the
frames that a busy link cannot take, at most HELD_BYTES_MAX of all pairs, so that its own frames do
not wait behind them. An end sends WINDOW_BYTES ahead of the credit of the other end. More waits at
that end, as unsent bytes of a direct link do.

A frame is RELAYED: u8 type, with FORWARDED from the relay to an end; u64 epoch; u8 length and ASCII
id of the other end; then the body. Of ACCEPT and CONFIRM that is the text of the disk, and from the
relay the identity as in the handshake. DATA has u8 kind of the frame, u8 1 if more of it follows,
and bytes; CREDIT has u32 bytes. All numbers are big-endian.
"""

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.node.context import ClusterContext
from holdfast.node.failure.detector import Detector
from holdfast.node.features import RELAYED_LINKS
from holdfast.node.frame_kinds import RELAYED, BadFrame
from holdfast.node.frames import FRAME_BYTES_MAX
from holdfast.node.metadata.model import NODE_ID
from holdfast.node.replicate.disk_position import DiskMemory, Known
from holdfast.security.peer_identity import (
    WIRE_LOWEST,
    PeerIdentity,
    Refusal,
    decode_identity,
    encode_identity,
    features_in,
    is_short_text,
)

OPEN: Final = 1
ACCEPT: Final = 2
CONFIRM: Final = 3
DATA: Final = 4
CREDIT: Final = 5
CLOSE: Final = 6
FORWARDED: Final = 0x80

CHUNK_BYTES: Final = 65_536
"""The most bytes of a frame in one DATA, so that a large one does not delay the relay's own."""
WINDOW_BYTES: Final = 1 << 20
"""The bytes that an end sends ahead of the other end's credit."""
WAITING_BYTES_MAX: Final = FRAME_BYTES_MAX + 67_108_864
"""The most bytes that wait at an end for credit. One more frame ends the link."""
BUSY_BYTES: Final = 131_072
"""The unsent bytes of a direct link above which a relay holds the frames of others."""
HELD_BYTES_MAX: Final = 16 << 20
"""The most bytes that a relay holds for others. One more frame ends the link that it belongs to."""
DRAIN_S: Final = 0.02
"""The seconds after which a relay looks again whether a busy link takes what it holds."""
OPENING_S: Final = 0.3
"""The seconds that a link through one node may take to open."""
AGAIN_S: Final = 0.3
"""The seconds between two attempts to open a link to one node, through each node that hears it."""
REFUSED_S: Final = 2.0
"""The seconds for which an end that has refused the other one opens no link to it and accepts
none."""
IDENTITY_BYTES_MAX: Final = 16_384

FOREVER: Final = float("inf")
_HEAD: Final = struct.Struct(">BQB")
HEAD_BYTES: Final = 10
"""The bytes before the id of the other end."""
_CREDIT: Final = struct.Struct(">I")


class RelaySend(Struct, frozen=True):
    """A frame RELAYED for a direct link."""

    node: str
    payload: bytes


class CloseDirect(Struct, frozen=True):
    """The direct link to a node is to be closed: a relayed one replaces it."""

    node: str
    text: str


class LinkUp(Struct, frozen=True):
    """A relayed link begins."""

    identity: PeerIdentity
    through: str


class LinkDown(Struct, frozen=True):
    """A relayed link has ended."""

    node: str
    through: str
    text: str


class Deliver(Struct, frozen=True):
    """A frame that has come over a relayed link."""

    node: str
    kind: int
    payload: bytes


RelayEffect = RelaySend | CloseDirect | LinkUp | LinkDown | Deliver


class _Opening(Struct):
    """A link that is being opened, at an end."""

    through: str
    epoch: int
    at: float
    known: Known
    """The disks of other nodes as this node knew them when the link began."""
    is_ours: bool
    tried: frozenset[str] = frozenset()
    """The nodes of this attempt that were asked before."""


class _Link(Struct):
    """A relayed link, at an end."""

    identity: PeerIdentity
    through: str
    epoch: int
    room: int = WINDOW_BYTES
    """The bytes that may be sent before more credit comes; the last piece may exceed it."""
    waiting: deque[bytes] = field(default_factory=deque)
    waiting_bytes: int = 0
    consumed: int = 0
    """The received bytes for which no credit was sent."""
    parts: list[bytes] = field(default_factory=list)
    """The received pieces of an incomplete frame."""
    part_bytes: int = 0
    part_kind: int = 0


class RelayedLinks:
    """The relayed links of this node, and what it relays for others.

    The driver reports direct links and their RELAYED frames, calls `step` with each heartbeat, and
    carries out `effects` after every call. No frame is sent while no node is unheard.
    """

    def __init__(
        self,
        context: ClusterContext,
        detector: Detector,
        memory: DiskMemory,
        pending_bytes: Callable[[str], int],
    ) -> None:
        """`pending_bytes`: the unsent bytes of a direct link."""
        self.effects: list[RelayEffect] = []
        self.links: dict[str, _Link] = {}
        """The relayed links of this node, by the other end."""
        self.objection: Callable[[PeerIdentity, Known], Refusal | None] | None = None
        """The check of a member in the handshake. None: no link begins."""
        self.own_disk: Callable[[], str] = str
        """The description of this node's disk in the handshake."""
        self.relayed_bytes = 0
        """The bytes that this node has relayed for others since its start."""
        self.held_bytes = 0
        """The bytes that it holds for others now."""
        self._node_id = context.node_id
        self._context = context
        self._detector = detector
        self._memory = memory
        self._pending_bytes = pending_bytes
        self._direct: dict[str, PeerIdentity] = {}
        self._openings: dict[str, _Opening] = {}
        self._again_at: dict[str, float] = {}
        self._refused_until: dict[str, float] = {}
        self._epochs = 0
        # The epoch of each pair that this node relays, by opener and other end.
        self._pairs: dict[tuple[str, str], int] = {}
        # The frames that a direct link is too busy for, in order, with their pair and epoch.
        self._held: dict[str, deque[tuple[tuple[str, str], int, bytes]]] = {}

    def through(self) -> dict[str, str]:
        """The nodes that this one reaches through another node, each with that node."""
        return {peer: link.through for peer, link in self.links.items()}

    # Direct links

    def direct_up(self, identity: PeerIdentity) -> None:
        """Notes a direct link, before the cluster's core receives it. It ends a relayed one."""
        node = identity.node_id
        assert node not in self._direct, "two direct links to one node"
        self._direct[node] = identity
        self._drop_opening(node)
        self.close(node, "there is a direct link again")

    def direct_down(self, node: str) -> None:
        """Notes the loss of a direct link, with all relayed ones that need it."""
        if self._direct.pop(node, None) is None:
            return
        for peer in [each for each, link in self.links.items() if link.through == node]:
            self._end(peer, f"{node} is lost")
        for peer in [each for each, one in self._openings.items() if one.through == node]:
            del self._openings[peer]
        self._drop_held(node)
        for pair in [each for each in self._pairs if node in each]:
            self._forget_pair(pair, node)

    def step(self, now: float) -> None:
        """Opens links to the nodes that are not heard, and gives up those that take too long."""
        unheard = self._detector.unheard(now)
        for peer, opening in list(self._openings.items()):
            if now >= opening.at + OPENING_S:
                self._drop_opening(peer)
                if opening.is_ours and peer in unheard:
                    self._open(peer, opening.tried, now)
        for peer in unheard:
            if peer not in self._openings and now >= self._again_at.get(peer, now):
                self._open(peer, frozenset(), now)

    def _open(self, peer: str, tried: frozenset[str], now: float) -> None:
        """Opens a link through a node that was not tried, or tries again later."""
        link = self.links.get(peer)
        present = "" if link is None else link.through
        for node in self._detector.unheard(now).get(peer, ()):
            if node not in tried and node != present and self._can_relay(node):
                break
        else:
            self._again_at[peer] = now + AGAIN_S
            return
        self._epochs += 1
        epoch = 2 * self._epochs + (self._node_id < peer)
        known = dict(self._memory.positions)
        self._openings[peer] = _Opening(node, epoch, now, known, True, tried | {node})
        self._send_to(node, OPEN, epoch, peer)

    def _can_relay(self, node: str) -> bool:
        """Whether there is a direct link to this node, and its version relays."""
        identity = self._direct.get(node)
        return identity is not None and RELAYED_LINKS in features_in(identity.features)

    def _drop_opening(self, peer: str) -> None:
        opening = self._openings.pop(peer, None)
        if opening is not None:
            self._send_to(opening.through, CLOSE, opening.epoch, peer)

    # The ends

    def close(self, peer: str, text: str) -> None:
        """Ends a relayed link, if there is one, and lets the other end know."""
        link = self.links.get(peer)
        if link is not None:
            self._send_to(link.through, CLOSE, link.epoch, peer)
            self._end(peer, text)

    def review(self) -> None:
        """Ends the relayed links that a direct one would not outlast, because more is known."""
        for peer, link in list(self.links.items()):
            refusal = self._refusal(link.identity, {})
            if refusal:
                self.close(peer, refusal)

    def _end(self, peer: str, text: str) -> None:
        link = self.links.pop(peer)
        self.effects.append(LinkDown(peer, link.through, text))

    def _refusal(self, peer: PeerIdentity, known: Known) -> str:
        """The reason why a node must not be linked, or ""."""
        metadata = self._context.metadata
        if metadata is None or self.objection is None or peer.node_id not in metadata.nodes:
            return "it is no node of this cluster"
        if (peer.node_id, peer.incarnation) in metadata.removed:
            return "it was removed from the cluster"
        if peer.cluster_id not in ("", metadata.cluster_id):
            return f"it belongs to the cluster {peer.cluster_id}"
        if RELAYED_LINKS not in features_in(peer.features):
            return "its version does not know relayed links"
        refusal = self.objection(peer, known)
        return "" if refusal is None else refusal.text

    def _begin(self, peer: str, opening: _Opening, identity: PeerIdentity) -> None:
        """Begins a link in place of the one that there may be."""
        del self._openings[peer]
        self.close(peer, f"it goes through {opening.through} now")
        if peer in self._direct:
            self.effects.append(CloseDirect(peer, "one of both nodes does not hear the other"))
        self.links[peer] = _Link(identity, opening.through, opening.epoch)
        if opening.is_ours:
            self._send_to(opening.through, CONFIRM, opening.epoch, peer, self.own_disk().encode())
        self.effects.append(LinkUp(identity, opening.through))

    def receive(self, node: str, payload: bytes, now: float) -> None:
        """Processes a RELAYED frame of a direct link. At most one `Deliver` follows from it.

        Raises `BadFrame` if it is malformed.
        """
        kind, epoch, other, body = decode_relayed(payload)
        if other == node or (kind & FORWARDED and other == self._node_id):
            raise BadFrame(f"a relayed frame of {node} for itself")
        if node not in self._direct:
            # The link was closed while its frames were taken.
            return
        if kind & FORWARDED:
            self._handle(node, kind & ~FORWARDED, epoch, other, body, now)
        else:
            self._relay(node, kind, epoch, other, body, now)

    def _handle(
        self, through: str, kind: int, epoch: int, peer: str, body: bytes, now: float
    ) -> None:
        """Processes a frame of an end."""
        if kind == OPEN:
            self._handle_open(through, epoch, peer, now)
            return
        link = self.links.get(peer)
        if link is not None and (link.through, link.epoch) == (through, epoch):
            if kind == DATA:
                self._take(peer, link, body)
            elif kind == CREDIT:
                self._take_credit(peer, link, body)
            elif kind == CLOSE:
                self._end(peer, f"{peer} or {through} has closed it")
            else:
                self.close(peer, f"{peer} has sent a frame of type {kind} on an open link")
            return
        opening = self._openings.get(peer)
        if opening is None or (opening.through, opening.epoch) != (through, epoch):
            if kind != CLOSE:
                self._send_to(through, CLOSE, epoch, peer)
        elif kind == CLOSE:
            del self._openings[peer]
            if opening.is_ours:
                self._open(peer, opening.tried, now)
        elif kind == (ACCEPT if opening.is_ours else CONFIRM):
            self._decide(peer, opening, _identity(peer, body), now)
        else:
            self._drop_opening(peer)

    def _handle_open(self, through: str, epoch: int, peer: str, now: float) -> None:
        """Accepts a link, unless this end has opened one and decides. That the other end does not
        hear this one is enough: a direct link that works in one direction is lost."""
        opening = self._openings.get(peer)
        decides = opening is not None and opening.is_ours and self._node_id < peer
        metadata = self._context.metadata
        is_member = metadata is not None and peer in metadata.nodes
        if decides or not is_member or now < self._refused_until.get(peer, now):
            self._send_to(through, CLOSE, epoch, peer)
            return
        self._drop_opening(peer)
        known = dict(self._memory.positions)
        self._openings[peer] = _Opening(through, epoch, now, known, False)
        self._send_to(through, ACCEPT, epoch, peer, self.own_disk().encode())

    def _decide(self, peer: str, opening: _Opening, identity: PeerIdentity, now: float) -> None:
        """Begins the link, unless the other end is refused, or was heard in the meantime."""
        refusal = self._refusal(identity, opening.known)
        if refusal:
            self._again_at[peer] = self._refused_until[peer] = now + REFUSED_S
        if refusal or (opening.is_ours and peer not in self._detector.unheard(now)):
            self._drop_opening(peer)
        else:
            self._begin(peer, opening, identity)

    def send(self, peer: str, kind: int, payload: bytes | Sequence[bytes]) -> None:
        """Sends a frame over a relayed link, or ends it if too much waits."""
        assert kind != RELAYED, "a relayed frame in a relayed frame"
        link = self.links[peer]
        data = payload if isinstance(payload, bytes) else b"".join(payload)
        if link.waiting_bytes > WAITING_BYTES_MAX:
            self.close(peer, f"{peer} does not read: {link.waiting_bytes} bytes wait for it")
            return
        for start in range(0, len(data) or 1, CHUNK_BYTES):
            has_more = start + CHUNK_BYTES < len(data)
            link.waiting.append(bytes((kind, has_more)) + data[start : start + CHUNK_BYTES])
        link.waiting_bytes += len(data)
        self._pump(peer, link)

    def _pump(self, peer: str, link: _Link) -> None:
        while link.waiting and link.room > 0:
            piece = link.waiting.popleft()
            link.waiting_bytes -= len(piece) - 2
            link.room -= len(piece)
            self._send_to(link.through, DATA, link.epoch, peer, piece)

    def _take_credit(self, peer: str, link: _Link, body: bytes) -> None:
        link.room += _CREDIT.unpack(body)[0] if len(body) == _CREDIT.size else WINDOW_BYTES + 1
        if link.room > WINDOW_BYTES:
            self.close(peer, f"{peer} has sent a credit that cannot be right")
        else:
            self._pump(peer, link)

    def _take(self, peer: str, link: _Link, body: bytes) -> None:
        """Takes a piece of a frame, and delivers the frame with its last one."""
        if len(body) < 2 or body[1] > 1 or (link.parts and body[0] != link.part_kind):
            self.close(peer, f"{peer} has sent a piece that fits no frame")
            return
        link.consumed += len(body)
        if link.consumed >= WINDOW_BYTES // 2:
            self._send_to(link.through, CREDIT, link.epoch, peer, _CREDIT.pack(link.consumed))
            link.consumed = 0
        link.part_kind = body[0]
        link.parts.append(body[2:])
        link.part_bytes += len(body) - 2
        if link.part_bytes > FRAME_BYTES_MAX or body[0] == RELAYED:
            self.close(peer, f"{peer} has sent a frame that is too long or relayed twice")
        elif not body[1]:
            payload = link.parts[0] if len(link.parts) == 1 else b"".join(link.parts)
            link.parts.clear()
            link.part_bytes = 0
            self.effects.append(Deliver(peer, body[0], payload))

    def _send_to(self, through: str, kind: int, epoch: int, peer: str, body: bytes = b"") -> None:
        self.effects.append(RelaySend(through, encode_relayed(kind, epoch, peer, body)))

    # The relay

    def _relay(
        self, source: str, kind: int, epoch: int, target: str, body: bytes, now: float
    ) -> None:
        """Passes on a frame of an end. One of a pair or epoch that is not known is answered with
        CLOSE: this node may have forgotten it with a link."""
        is_opener = (epoch % 2 == 1) == (source < target)
        pair = (source, target) if is_opener else (target, source)
        if kind == OPEN and is_opener and self._may_relay(source, target, now):
            self._drop_held(target, pair)
            self._drop_held(source, pair)
            self._pairs[pair] = epoch
        elif kind == OPEN or self._pairs.get(pair) != epoch:
            if kind != CLOSE:
                self._send_to(source, CLOSE | FORWARDED, epoch, target)
            return
        if kind in (ACCEPT, CONFIRM):
            text = body.decode("latin-1")
            if not is_short_text(text):
                raise BadFrame("a relayed frame whose disk is no short text")
            body = encode_identity(replace(self._direct[source], disk=text))
        self.relayed_bytes += len(body)
        if kind == CLOSE:
            # It may overtake what is held: the link ends as a whole.
            del self._pairs[pair]
            self._drop_held(target, pair)
            self._send_to(target, CLOSE | FORWARDED, epoch, source)
            return
        self._pass_on(target, pair, epoch, encode_relayed(kind | FORWARDED, epoch, source, body))

    def _may_relay(self, source: str, target: str, now: float) -> bool:
        """Whether this node hears both of these members, and their versions know relayed links."""
        metadata = self._context.metadata
        unheard = self._detector.unheard(now)
        return metadata is not None and all(
            self._can_relay(node) and node in metadata.nodes and node not in unheard
            for node in (source, target)
        )

    def _pass_on(self, target: str, pair: tuple[str, str], epoch: int, payload: bytes) -> None:
        """Sends a frame behind those that are held, and behind this node's own."""
        held = self._held.get(target)
        if held is None and self._pending_bytes(target) <= BUSY_BYTES:
            self.effects.append(RelaySend(target, payload))
            return
        if self.held_bytes + len(payload) > HELD_BYTES_MAX:
            self._forget_pair(pair, "")
            return
        self._held.setdefault(target, deque()).append((pair, epoch, payload))
        self.held_bytes += len(payload)

    def timer(self, now: float) -> float:
        """The time at which to call `drain`."""
        return now + DRAIN_S if self._held else FOREVER

    def drain(self) -> None:
        """Sends what is held to the links that have room again: per call as much as makes a link
        busy."""
        for target, held in list(self._held.items()):
            room = BUSY_BYTES - self._pending_bytes(target)
            while held and room >= 0:
                payload = held.popleft()[2]
                self.held_bytes -= len(payload)
                room -= len(payload)
                self.effects.append(RelaySend(target, payload))
            if not held:
                del self._held[target]

    def _drop_held(self, target: str, pair: tuple[str, str] | None = None) -> None:
        """Drops what is held for a node, only of one pair if there is one."""
        held = self._held.pop(target, None)
        if held is None:
            return
        kept = deque(each for each in held if pair is not None and each[0] != pair)
        self.held_bytes -= sum(len(each[2]) for each in held) - sum(len(each[2]) for each in kept)
        if kept:
            self._held[target] = kept

    def _forget_pair(self, pair: tuple[str, str], lost: str) -> None:
        """Ends a pair at both ends, except at the one to which the link is lost."""
        epoch = self._pairs.pop(pair)
        for node, other in (pair, (pair[1], pair[0])):
            if node != lost:
                self._drop_held(node, pair)
                self._send_to(node, CLOSE | FORWARDED, epoch, other)

    def check(self) -> None:
        """Asserts the invariants: one link of a pair, over links that are there, within bounds."""
        for peer, link in self.links.items():
            assert peer not in self._direct, f"two links to {peer}"
            assert link.through in self._direct, f"a link through {link.through}, which is lost"
            assert link.room <= WINDOW_BYTES, "more credit than the window"
            assert sum(map(len, link.waiting)) == link.waiting_bytes + 2 * len(link.waiting)
        for opening in self._openings.values():
            assert opening.through in self._direct, "a link is opened through a node that is lost"
        for pair in self._pairs:
            assert all(node in self._direct for node in pair), f"{pair} is relayed without a link"
        held = sum(len(each[2]) for queue in self._held.values() for each in queue)
        assert held == self.held_bytes <= HELD_BYTES_MAX, "bytes held for others"


def encode_relayed(kind: int, epoch: int, node: str, body: bytes) -> bytes:
    return _HEAD.pack(kind, epoch, len(node)) + node.encode("ascii") + body


def decode_relayed(payload: bytes) -> tuple[int, int, str, bytes]:
    """The type, epoch, other end and body of a frame. Raises `BadFrame`."""
    if len(payload) < HEAD_BYTES:
        raise BadFrame(f"a relayed frame of {len(payload)} bytes")
    kind, epoch, length = _HEAD.unpack_from(payload)
    end = HEAD_BYTES + length
    node = payload[HEAD_BYTES:end].decode("latin-1")
    if len(payload) < end or NODE_ID.fullmatch(node) is None:
        raise BadFrame("a relayed frame whose node id is none")
    if not OPEN <= kind & ~FORWARDED <= CLOSE:
        raise BadFrame(f"a relayed frame of type {kind}")
    return kind, epoch, node, payload[end:]


def _identity(peer: str, body: bytes) -> PeerIdentity:
    """The identity of an end, which the relay has authenticated. Raises `BadFrame`."""
    if len(body) > IDENTITY_BYTES_MAX:
        raise BadFrame(f"an identity of {len(body)} bytes")
    try:
        identity = decode_identity(body, WIRE_LOWEST)
    except Refusal as refusal:
        raise BadFrame(refusal.text) from None
    if identity.node_id != peer:
        raise BadFrame(f"an identity of {identity.node_id} in place of {peer}")
    return identity
