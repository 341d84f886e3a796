"""One connection to another node or member: the handshake, then frames both ways.

It has the methods of asyncio.BufferedProtocol without the base class, so that it compiles to a
native class. asyncio's own loop then treats it as a Protocol.
"""

import asyncio
import os
import ssl
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from holdfast.io.peers.dialer import configure
from holdfast.node.frame_kinds import BadFrame
from holdfast.node.replicate.disk_position import Known
from holdfast.security.certificates import certificate_names
from holdfast.security.peer_handshake import NONCE_BYTES, Handshake, Realm
from holdfast.security.peer_identity import PeerIdentity, Refusal

HEADER: Final = struct.Struct(">IB")
READ_BYTES: Final = 262_144
READ_BYTES_MIN: Final = 65_536
"""The room in bytes below which unparsed bytes are moved to the front of the buffer."""
KEPT_BYTES: Final = 4_194_304
"""The size in bytes above which a buffer that grew for one frame is released after it."""


class FrameTooLong(Exception):
    pass


class PeerFrameReader:
    """Splits received bytes into frames.

    Invariant: 0 <= start <= end < capacity, and the bytes from start to end are not parsed yet.

    The socket is read directly into the reader's buffer (asyncio.BufferedProtocol), so a payload is
    copied once, out of that buffer.
    """

    def __init__(self, payload_bytes_max: int) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._view = memoryview(bytearray(READ_BYTES))
        self._start = 0
        self._end = 0

    def buffer(self) -> memoryview:
        """Returns the buffer for the next bytes; `filled` reports how many they were."""
        return self._view[self._end :]

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Parses bytes that were read elsewhere before, at most READ_BYTES."""
        self._view[: len(data)] = data
        return self.filled(len(data))

    def filled(self, count: int) -> list[tuple[int, bytes]]:
        """Returns the kinds and payloads of the complete frames.

        Raises `FrameTooLong` for a payload above the limit.
        """
        self._end += count
        view, start, end = self._view, self._start, self._end
        frames: list[tuple[int, bytes]] = []
        needed = HEADER.size
        while end - start >= HEADER.size:
            length, kind = HEADER.unpack_from(view, start)
            if length > self._payload_bytes_max:
                raise FrameTooLong(
                    f"sent a frame of kind {kind} with {length} bytes,"
                    f" more than {self._payload_bytes_max}"
                )
            needed = HEADER.size + length
            if end - start < needed:
                break
            frames.append((kind, view[start + HEADER.size : start + needed].tobytes()))
            start += needed
            needed = HEADER.size
        self._start = start
        self._make_room(needed)
        return frames

    def _make_room(self, needed: int) -> None:
        """Makes room for a whole frame from `start`, and for a worthwhile read.

        A view that was handed out may still be in use. So bytes move within the buffer or into a
        new one, and the buffer is never resized.
        """
        view, start, end = self._view, self._start, self._end
        capacity = max(needed, READ_BYTES)
        too_large = len(view) > KEPT_BYTES >= capacity
        if start == end and not too_large:
            self._start = self._end = 0
            return
        if too_large or capacity > len(view):
            self._view = memoryview(bytearray(capacity))
        elif len(view) - start >= needed and (start == 0 or len(view) - end >= READ_BYTES_MIN):
            return
        self._view[: end - start] = view[start:end]
        self._start = 0
        self._end = end - start


HANDSHAKE_READ_BYTES: Final = 4096
JOINED_BYTES: Final = 65_536
"""The size in bytes up to which one copy costs less than passing pieces to the socket."""
CLOSE_TIMEOUT_S: Final = 1.0
"""The time in seconds that an orderly close has to send queued frames."""
BUSY_BYTES: Final = 1 << 20
"""The unsent bytes at which a link becomes busy. It stays so until a quarter of them is left."""


@dataclass(frozen=True)
class LinkBounds:
    """The limits of each link of a mesh."""

    frame_bytes_max: int
    send_bytes_max: int
    """The most unsent bytes for one peer. One more frame may be queued beyond it."""
    handshake_timeout_s: float = 5.0


@dataclass(slots=True)
class PeerMetrics:
    """The counters of a mesh's links since the start."""

    frames_in: int = 0
    frames_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    connects: int = 0
    disconnects: int = 0
    dials: int = 0
    overflows: int = 0
    """Links closed because the peer did not read."""
    refused: dict[str, int] = field(default_factory=dict)
    """Connections that did not become a link, by `Refusal.reason`.

    "nobody" means that no process listens at the dialled address. "linked", "self" and "reset" also
    occur in normal operation.
    """


class LinkOwner(Protocol):
    """The receiver of a link's events. All calls come from the event loop."""

    metrics: PeerMetrics

    def judge(self, link: "PeerLink", peer: PeerIdentity, last: bool) -> Refusal | None: ...

    def established(self, link: "PeerLink") -> None: ...

    def received(self, link: "PeerLink", kind: int, payload: bytes) -> None:
        """Processes a frame. `BadFrame` from it closes the link."""

    def broken_off(self, link: "PeerLink", text: str) -> None:
        """Reports that the peer violated the protocol. The link is being closed."""

    def stirred(self, link: "PeerLink") -> None:
        """Reports bytes of a frame that is not complete yet."""

    def busy(self, link: "PeerLink") -> None:
        """Reports that `is_busy` of the link has changed."""

    def closed(self, link: "PeerLink") -> None:
        """Reports that the socket is closed. This is the last call for a link."""


def failure(error: Exception | None) -> Refusal:
    """Converts a socket's error before the link is established into a refusal."""
    if isinstance(error, ConnectionRefusedError):
        return Refusal("nobody", "refuses connections")
    if isinstance(error, ConnectionResetError):
        # A process that ends does this to connections that it has not accepted.
        return Refusal("reset", "reset the connection")
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "no reason").replace("_", " ").lower()
        return Refusal("tls", f"TLS failed: {reason}")
    if isinstance(error, OSError):
        return Refusal("unreachable", f"cannot be reached: {error.strerror or error}")
    return Refusal("closed", f"failed: {error}")


class PeerLink:
    """The protocol of one connection, from the handshake to the close.

    `settled` is done exactly once: when the handshake has succeeded, or when the connection has
    ended without that. Only an established link passes frames to its owner.
    """

    def __init__(
        self,
        owner: LinkOwner,
        loop: asyncio.AbstractEventLoop,
        identity: PeerIdentity,
        bounds: LinkBounds,
        *,
        secret: bytes,
        realm: Realm,
        dials: bool,
        remote: str,
        expected: str,
        disk: Callable[[], str] | None = None,
    ) -> None:
        """`identity`: what this end announces. `remote`: the other end, for the log.

        `expected`: the dialled node id, "" for any. `disk`: see `Handshake`.
        """
        self.known: Known = {}
        """The disks of other nodes as this node knew them when the connection began."""
        self.identity = identity
        self.remote = remote
        self.expected = expected
        self.dials = dials
        self.peer: PeerIdentity | None = None
        self.established_at = 0.0
        self.closing = False
        self.refusal: Refusal | None = None
        """The reason why the connection did not become a link, or None."""
        self.settled: asyncio.Future[None] = loop.create_future()
        """Done when the link is established, or closed before that."""
        self.queued = False
        """Whether the owner's list of links to flush contains this one."""
        self.is_busy = False
        """Whether the peer reads slower than this end sends: see BUSY_BYTES."""
        self.stirred_at = 0.0
        """The time at which the owner last reported the peer as alive."""
        self.rtt_s: float | None = None
        """The smoothed round trip in seconds. None: not measured."""
        self._owner = owner
        self._loop = loop
        self._handshake: Handshake | None = Handshake(
            dials, identity, secret, os.urandom(NONCE_BYTES), self._judge, realm, disk
        )
        self._greeting = memoryview(bytearray(HANDSHAKE_READ_BYTES))
        self._reader: PeerFrameReader | None = None
        self._frame_bytes_max = bounds.frame_bytes_max
        self._send_bytes_max = bounds.send_bytes_max
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._unsent_bytes = 0
        """The bytes in the transport's buffer after the last flush, an upper bound of the
        present."""
        self._is_joined = False
        """Whether frames are joined before the write, as on asyncio's own transports.

        Their writelines does not call pause_writing in Python 3.12 and 3.13. A peer that does not
        read would then never count as busy.
        """

    # BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins the handshake on a new socket."""
        self._transport = cast(asyncio.Transport, transport)
        if self.closing:
            self._transport.abort()
            return
        configure(transport)
        self._is_joined = type(transport).__module__.startswith("asyncio.")
        self._transport.set_write_buffer_limits(BUSY_BYTES)
        assert self._handshake is not None
        self._write(self._handshake.take_out())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._greeting if self._reader is None else self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Processes received bytes: of the handshake until it is done, then of frames."""
        self._owner.metrics.bytes_in += nbytes
        if self.closing:
            return
        if self._handshake is not None:
            self._greet(self._handshake, self._greeting[:nbytes].tobytes())
        else:
            self._take_frames(nbytes)

    def data_received(self, data: bytes) -> None:
        """Accepts bytes from a loop that does not ask for a buffer."""
        view = memoryview(data)
        while view:
            buffer = self.get_buffer(len(view))
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            view = view[count:]
            self.buffer_updated(count)

    def pause_writing(self) -> None:
        """Marks the link as busy. It still accepts frames: `send` bounds the unsent bytes."""
        self.is_busy = True
        self._owner.busy(self)

    def resume_writing(self) -> None:
        self.is_busy = False
        self._owner.busy(self)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self._transport = None
        self._out.clear()
        self._out_bytes = self._unsent_bytes = 0
        if self._handshake is not None and self.refusal is None:
            known = isinstance(exc, ssl.SSLError | ConnectionResetError)
            heard = self._handshake.heard
            self.refusal = failure(exc) if known and not heard else self._handshake.cut_short()
        self._settle()
        self._owner.closed(self)

    def identified(self) -> str:
        """Returns the authenticated node id of the other end, "" before that is proved."""
        peer = self.peer if self._handshake is None else self._handshake.peer
        return "" if peer is None else peer.node_id

    # Receiving

    def _greet(self, handshake: Handshake, data: bytes) -> None:
        try:
            established = handshake.receive(data)
        except Refusal as refusal:
            self._write(handshake.take_out())
            self.refuse(refusal)
            return
        self._write(handshake.take_out())
        if not established:
            return
        self.peer = handshake.peer
        self.established_at = self._loop.time()
        self._handshake = None
        self._reader = reader = PeerFrameReader(self._frame_bytes_max)
        self._settle()
        self._owner.established(self)
        if handshake.rest:
            reader.buffer()[: len(handshake.rest)] = handshake.rest
            self._take_frames(len(handshake.rest))

    def _take_frames(self, count: int) -> None:
        reader, owner = self._reader, self._owner
        assert reader is not None
        try:
            frames = reader.filled(count)
            owner.metrics.frames_in += len(frames)
            for kind, payload in frames:
                if self.closing:
                    return
                owner.received(self, kind, payload)
            if not frames:
                owner.stirred(self)
        except FrameTooLong as error:
            self.break_off(str(error))
        except BadFrame as bad:
            # A separate name, because a name has one type in compiled code.
            self.break_off(f"sent a frame of kind {kind} that cannot be read: {bad}")

    def _judge(self, peer: PeerIdentity, last: bool) -> Refusal | None:
        if self.expected and peer.node_id != self.expected:
            return Refusal("unexpected", f"{peer.node_id} answers where {self.expected} should be")
        assert self._transport is not None
        if self._transport.get_extra_info("sslcontext") is not None:
            names = certificate_names(self._transport.get_extra_info("peercert"))
            if peer.node_id not in names:
                return Refusal(
                    "certificate",
                    f"the certificate of {peer.node_id} is for"
                    f" {', '.join(sorted(names)) or 'nobody'}",
                )
        return self._owner.judge(self, peer, last)

    # Sending

    def send(self, kind: int, payload: bytes | Sequence[bytes]) -> bool:
        """Queues a frame; returns False if the link is being closed.

        More than `send_bytes_max` unsent bytes close it. Otherwise a peer that does not read would
        fill the memory.
        """
        if self.closing:
            return False
        if self._out_bytes + self._unsent_bytes > self._send_bytes_max:
            unsent_bytes = self.pending_bytes()
            if unsent_bytes > self._send_bytes_max:
                self._owner.metrics.overflows += 1
                self.break_off(f"does not read: {unsent_bytes} bytes wait for it")
                return False
        pieces = (payload,) if isinstance(payload, bytes) else payload
        length = sum(map(len, pieces))
        if length > self._frame_bytes_max:
            raise ValueError(f"a frame of kind {kind} with {length} bytes")
        self._out.append(HEADER.pack(length, kind))
        self._out.extend(pieces)
        self._out_bytes += HEADER.size + length
        self._owner.metrics.frames_out += 1
        return True

    def flush(self) -> None:
        """Writes the queued frames in one call.

        Small frames are joined first: one copy costs less than many pieces in a system call.
        """
        out, transport = self._out, self._transport
        if not out or transport is None or self.closing:
            return
        if self._out_bytes <= JOINED_BYTES or self._is_joined:
            transport.write(b"".join(out))
        else:
            transport.writelines(out)
        self._owner.metrics.bytes_out += self._out_bytes
        self._out = []
        self._out_bytes = 0
        self._unsent_bytes = transport.get_write_buffer_size()

    def pending_bytes(self) -> int:
        """Returns the queued bytes that the system has not accepted yet."""
        if self._transport is None or self.closing:
            return 0
        self._unsent_bytes = self._transport.get_write_buffer_size()
        return self._out_bytes + self._unsent_bytes

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None:
            self._transport.write(data)
            self._owner.metrics.bytes_out += len(data)

    # Ending

    def refuse(self, refusal: Refusal) -> None:
        """Ends a connection that is not a link yet."""
        self.refusal = refusal
        self.close()
        self._settle()

    def break_off(self, text: str) -> None:
        """Closes the link at once, because the peer violated the protocol."""
        self._owner.broken_off(self, text)
        self.abort()

    def close(self) -> None:
        """Closes the link after its queued frames were sent, or after CLOSE_TIMEOUT_S."""
        if self.closing:
            return
        self.flush()
        self.closing = True
        transport = self._transport
        if transport is not None:
            if transport.get_write_buffer_size():
                self._loop.call_later(CLOSE_TIMEOUT_S, transport.abort)
            transport.close()

    def abort(self) -> None:
        """Cuts the connection without sending queued frames."""
        self.closing = True
        if self._transport is not None:
            self._transport.abort()

    def _settle(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)
