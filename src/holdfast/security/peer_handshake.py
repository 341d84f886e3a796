"""Handshake of two nodes of a cluster, or two members of a federation, on a new connection.

    dialler                                    acceptor
    preamble: magic, lowest version, nonce ─▶
                                          ◀──  preamble
    PROOF                                 ──▶
                                          ◀──  IDENTITY
    IDENTITY                              ──▶
                                          ◀──  ACCEPT          only where the dialler decides
    ESTABLISH            from the node with the smaller id

Every message after the preambles has an HMAC-SHA-256 with the cluster's secret. It covers the
side, the kind, all earlier messages (both nonces included) and its own body, so no message can be
replayed, reflected or moved to another connection. A peer that has not proved that it has the
secret learns no more than the lowest wire version: the acceptor replies only with its preamble,
and the dialler first shows only a proof. Without a secret (mutual TLS, or loopback) the key is
empty and the same messages are exchanged.

The node with the smaller id decides which connection is *the* link: it alone sends ESTABLISH. So
two nodes that dial each other at the same time end with one link, in any order of events.

Each side speaks a range of wire versions: the preamble has the lowest, the identity the highest.
Both use the highest that both have, or there is no link. The preamble cannot have the highest: a
node of the first version refuses every number but its own, so it could not be upgraded node by
node. The range is part of the transcript, so nobody in between can lower it.

The first ten bytes of the preamble are the same in every wire version. Sans I/O: bytes in, bytes
out, no clock; the driver limits the time.
"""

import hmac
import json
import struct
from collections.abc import Callable
from hashlib import sha256
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from holdfast.security.peer_identity import (
    PeerIdentity,
    Refusal,
    decode_identity,
    encode_identity,
    is_short_text,
    json_object,
)

MAGIC: Final = b"HOLDFAST"
MAGIC_BYTES: Final = len(MAGIC)
NONCE_BYTES: Final = 32
BODY_BYTES_MAX: Final = 4096
INQUIRY: Final = "inquiry"
"""The refusal by a node that only asks for the identity of this one."""
QUIET_REASONS: Final = ("linked", "self", INQUIRY)
"""The refusals that are no mistake of an operator."""
REMOVED_THERE: Final = "removed_there"
"""The refusal by a peer in whose metadata this node is no longer in the cluster."""
OLDER_COPY: Final = "older_copy"
OLDER_COPY_WAITS: Final = "older_copy_waits"
"""The refusal of a peer that once had more on its disk. It waits if the others cannot do without
its vote."""
LAST_COPY: Final = "last_copy"
"""The refusal of a peer with an empty disk whose disk before is the last one that was in sync."""
_SAID_THERE: Final = {
    "removed": REMOVED_THERE,
    OLDER_COPY: "older_copy_there",
    OLDER_COPY_WAITS: "older_copy_waits_there",
    LAST_COPY: "last_copy_there",
}
"""The reasons that have a meaning for the refused node."""
OLDER_COPY_THERE: Final = _SAID_THERE[OLDER_COPY]
OLDER_COPY_WAITS_THERE: Final = _SAID_THERE[OLDER_COPY_WAITS]

PROOF: Final = 1
IDENTITY: Final = 2
ACCEPT: Final = 3
ESTABLISH: Final = 4
REFUSE: Final = 5

_VERSION: Final = struct.Struct(">H")
_HEADER: Final = struct.Struct(">HB")
_MAC_BYTES: Final = 32
_FIXED_BYTES: Final = MAGIC_BYTES + _VERSION.size
_PREAMBLE_BYTES: Final = _FIXED_BYTES + NONCE_BYTES
_TLS_RECORD: Final = b"\x16\x03"


class Realm(Struct, frozen=True):
    """The kind of group that both ends belong to. Each has a magic of its own, so a dialler at a
    wrong port is refused at once."""

    magic: bytes
    """MAGIC_BYTES bytes."""
    group: str
    """The name of the group in texts, like `node`; settings are named after it."""
    node: str


CLUSTER: Final = Realm(MAGIC, "cluster", "node")
FEDERATION: Final = Realm(b"HOLDFEDR", "federation", "federator")


class Handshake:
    """One side of one connection's handshake.

    `judge(identity, last)` decides about the peer: once when its identity has arrived (`last`
    false), and, on the side that decides, right before it sends ESTABLISH (`last` true). It returns
    None or the refusal.
    """

    def __init__(
        self,
        dials: bool,
        identity: PeerIdentity,
        secret: bytes,
        nonce: bytes,
        judge: Callable[[PeerIdentity, bool], Refusal | None],
        realm: Realm = CLUSTER,
        disk: Callable[[], str] | None = None,
    ) -> None:
        """`disk` returns the disk's position when the identity is sent, which is after the peer has
        opened the connection."""
        assert len(nonce) == NONCE_BYTES
        self.peer: PeerIdentity | None = None
        self.authenticated = False
        """True once the peer has proved that it has the secret."""
        self.established = False
        self.heard = False
        """True once the peer has sent a byte."""
        self.rest = b""
        """The input after the peer's last message: frames."""
        self._out: list[bytes] = []
        self._dials = dials
        self._identity = identity
        self._secret = secret
        self._judge = judge
        self._realm = realm
        self._disk = disk
        self._buffer = b""
        self._transcript = sha256()
        self._own_preamble = realm.magic + _VERSION.pack(identity.lowest) + nonce
        self._peer_lowest = 0
        """The peer's lowest wire version; 0: it has sent no preamble."""
        self._expected = 0
        """The kind of the next message; 0: the preamble."""
        if dials:
            self._out.append(self._own_preamble)

    def take_out(self) -> bytes:
        """Removes and returns the bytes to send now."""
        out = b"".join(self._out)
        self._out.clear()
        return out

    def receive(self, data: bytes) -> bool:
        """Processes bytes of the peer. True: the link is established, and `rest` is the input
        behind it.

        Raises `Refusal`; `take_out` may then have a last message for the peer.
        """
        self.heard = self.heard or bool(data)
        self._buffer += data
        if not self._expected and not self._receive_preamble():
            return False
        while not self.established:
            message = self._next_message()
            if message is None:
                return False
            self._handle(*message)
        self.rest = self._buffer
        self._buffer = b""
        return True

    def cut_short(self) -> Refusal:
        """The refusal that it means if the peer closes the connection now."""
        if 0 < self._peer_lowest < self._identity.lowest and not self.authenticated:
            return self._wrong_version(self._peer_lowest, self._peer_lowest)
        if not self._dials:
            return Refusal(
                "closed", "closed the connection during the handshake", quiet=not self.heard
            )
        node, group = self._realm.node, self._realm.group
        if not self._expected:
            return Refusal(
                "closed",
                f"closed the connection without a word: it is no Holdfast {node}, or its"
                f" {group}.certificate, key and ca do not go with those here",
            )
        if not self.authenticated:
            return Refusal(
                "secret_there",
                f"closed the connection when this {node} proved to know the secret: has it the same"
                f" {group}.secret_file?",
            )
        return Refusal("closed", "closed the connection during the handshake")

    def _receive_preamble(self) -> bool:
        magic, group, node = self._realm.magic, self._realm.group, self._realm.node
        start = self._buffer[:_FIXED_BYTES]
        if start[:MAGIC_BYTES] != magic[: len(start)]:
            if start.startswith(_TLS_RECORD):
                raise Refusal("tls", f"speaks TLS, and this {node} has no {group}.certificate")
            raise Refusal("magic", f"is no Holdfast {node}")
        if len(start) < _FIXED_BYTES:
            return False
        self._peer_lowest = _VERSION.unpack_from(start, MAGIC_BYTES)[0]
        if self._peer_lowest > self._identity.wire_version:
            if not self._dials:
                self._out.append(self._own_preamble)
            raise self._wrong_version(self._peer_lowest, self._peer_lowest)
        if len(self._buffer) < _PREAMBLE_BYTES:
            return False
        theirs_whole = self._buffer[:_PREAMBLE_BYTES]
        self._buffer = self._buffer[_PREAMBLE_BYTES:]
        first, second = self._own_preamble, theirs_whole
        if not self._dials:
            self._out.append(self._own_preamble)
            first, second = second, first
        self._transcript.update(first + second)
        if self._dials:
            self._say(PROOF)
        self._expected = IDENTITY if self._dials else PROOF
        return True

    def _wrong_version(self, lowest: int, highest: int) -> Refusal:
        own, node = self._identity, self._realm.node
        return Refusal(
            "version",
            f"speaks wire version {_range(lowest, highest)}, this {node} speaks"
            f" {_range(own.lowest, own.wire_version)}: upgrade"
            f" {'this' if lowest > own.wire_version else 'that'} {node}",
        )

    def _agree(self, peer: PeerIdentity) -> PeerIdentity:
        """The peer's identity with the version that both use. Raises `Refusal` without one."""
        own = self._identity
        agreed = min(own.wire_version, peer.wire_version)
        if agreed < max(own.lowest, peer.lowest):
            older = own if own.wire_version < peer.wire_version else peer
            text = " and ".join(
                f"{each.node_id} speaks wire version {_range(each.lowest, each.wire_version)}"
                for each in (peer, own)
            )
            self._refuse(Refusal("version", f"{text}: upgrade {older.node_id}"))
            raise self._wrong_version(peer.lowest, peer.wire_version)
        return replace(peer, wire_version=agreed)

    def _next_message(self) -> tuple[int, bytes] | None:
        """The kind and body of the next message, whose code is checked."""
        buffer = self._buffer
        if len(buffer) < _HEADER.size:
            return None
        length, kind = _HEADER.unpack_from(buffer)
        if kind != self._expected and (kind != REFUSE or self._expected == PROOF):
            raise Refusal("handshake", f"sent message {kind} where {self._expected} was due")
        if length > (0 if kind == PROOF else BODY_BYTES_MAX):
            raise Refusal("handshake", f"sent message {kind} with {length} bytes")
        end = _HEADER.size + _MAC_BYTES + length
        if len(buffer) < end:
            return None
        code, body = buffer[_HEADER.size : end - length], buffer[end - length : end]
        if not hmac.compare_digest(code, self._code(not self._dials, kind, body)):
            group = self._realm.group
            raise Refusal("secret", f"does not know this {group}'s secret ({group}.secret_file)")
        self._transcript.update(buffer[:end])
        self._buffer = buffer[end:]
        self.authenticated = True
        return kind, body

    def _handle(self, kind: int, body: bytes) -> None:
        if kind == REFUSE:
            raise _refused(body, self._realm.node)
        if kind == PROOF:
            self._say_identity()
            self._expected = IDENTITY
        elif kind == IDENTITY:
            self.peer = self._agree(decode_identity(body, self._peer_lowest))
            self._ask(self.peer, last=False)
            self._go_on(self.peer)
        elif kind == ACCEPT:
            assert self.peer is not None
            self._establish(self.peer)
        else:
            self.established = True

    def _go_on(self, peer: PeerIdentity) -> None:
        decides = self._identity.node_id < peer.node_id
        if self._dials:
            self._say_identity()
            self._expected = ACCEPT if decides else ESTABLISH
        elif decides:
            self._establish(peer)
        else:
            self._say(ACCEPT)
            self._expected = ESTABLISH

    def _establish(self, peer: PeerIdentity) -> None:
        self._ask(peer, last=True)
        self._say(ESTABLISH)
        self.established = True

    def _ask(self, peer: PeerIdentity, last: bool) -> None:
        refusal = self._judge(peer, last)
        if refusal is not None:
            self._refuse(refusal)
            raise refusal

    def _refuse(self, refusal: Refusal) -> None:
        self._say(REFUSE, json.dumps({"reason": refusal.reason, "text": refusal.text}).encode())

    def _say_identity(self) -> None:
        identity = self._identity
        if self._disk is not None:
            identity = replace(identity, disk=self._disk())
        self._say(IDENTITY, encode_identity(identity))

    def _say(self, kind: int, body: bytes = b"") -> None:
        message = _HEADER.pack(len(body), kind) + self._code(self._dials, kind, body) + body
        self._transcript.update(message)
        self._out.append(message)

    def _code(self, dialler: bool, kind: int, body: bytes) -> bytes:
        said = self._transcript.digest()
        side = b"D" if dialler else b"A"
        return hmac.digest(self._secret, side + bytes((kind,)) + said + body, "sha256")


def _refused(body: bytes, node: str) -> Refusal:
    fields = json_object(body)
    reason, text = fields.get("reason"), fields.get("text")
    if not isinstance(reason, str) or not isinstance(text, str) or not is_short_text(text):
        raise Refusal("handshake", "sent a refusal that says nothing")
    if reason in QUIET_REASONS:
        return Refusal(reason, text, quiet=True)
    if reason in _SAID_THERE:
        return Refusal(_SAID_THERE[reason], text)
    return Refusal("refused_there", f"refuses this {node}: {text}")


def _range(lowest: int, highest: int) -> str:
    return str(lowest) if lowest == highest else f"{lowest} to {highest}"
