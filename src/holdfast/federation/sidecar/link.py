"""One connection to another member: a peer link that measures load and signs of life."""

import asyncio
import struct
import time
from typing import Final, Protocol, cast

from holdfast.server.peers.link import PeerLink

FRAME: Final = 0
"""The kind of a frame on a link: a frame of `holdfast.federation.core.frames`.

PING and PONG measure round trips. Other kinds are ignored.
"""
PING: Final = 1
PONG: Final = 2
TOKEN: Final = struct.Struct(">d")
"""The layout of a PING's token: the sender's clock. The PONG returns it unchanged."""

BUSY_BYTES: Final = 1 << 20
"""The unsent bytes at which a link becomes busy. It stays so until `FREE_BYTES` are left."""
FREE_BYTES: Final = 1 << 18
STIR_S: Final = 0.25
"""The shortest time in seconds between two reports of bytes that are no whole frame yet."""


class LinkWatcher(Protocol):
    """The receiver of a link's changes of state."""

    def busy(self, link: "MemberLink", is_busy: bool) -> None: ...

    def stirred(self, link: "MemberLink") -> None:
        """Report that bytes of an incomplete frame are arriving."""


class MemberLink(asyncio.BufferedProtocol):
    """An asyncio protocol around a `PeerLink` that adds backpressure and round trip times."""

    def __init__(
        self, inner: PeerLink, watcher: LinkWatcher, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.inner = inner
        self.is_busy = False
        self.rtt_s: float | None = None
        """The smoothed round trip in seconds. None: not measured yet."""
        self._watcher = watcher
        self._loop = loop
        self._stirred_at = 0.0

    @property
    def node(self) -> bytes:
        """The peer's id. Only an established link has one."""
        assert self.inner.peer is not None
        return bytes.fromhex(self.inner.peer.node_id)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # `cast`, because the transports of uvloop are no subclasses of asyncio's.
        cast(asyncio.WriteTransport, transport).set_write_buffer_limits(BUSY_BYTES, FREE_BYTES)
        self.inner.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.inner.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Pass bytes to the link, and report signs of life at most every STIR_S.

        A frame may take longer than the silence that the member tolerates. Without the report, a
        slow link with one large frame would count as down.
        """
        self.inner.buffer_updated(nbytes)
        if self.inner.peer is not None and not self.inner.closing:
            now = self._loop.time()
            if now - self._stirred_at >= STIR_S:
                self._stirred_at = now
                self._watcher.stirred(self)

    def pause_writing(self) -> None:
        """Mark the link as busy, so that the member drops QoS 0 instead of queueing it."""
        self.is_busy = True
        self._watcher.busy(self, True)

    def resume_writing(self) -> None:
        self.is_busy = False
        self._watcher.busy(self, False)

    def eof_received(self) -> bool:
        return self.inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.inner.connection_lost(exc)

    def token(self) -> bytes:
        # Not the loop's clock: it stands still during a turn.
        return TOKEN.pack(time.monotonic())

    def measured(self, token: bytes) -> None:
        """Update the round trip from the token of a PONG."""
        if len(token) != TOKEN.size:
            return
        rtt_s = time.monotonic() - TOKEN.unpack(token)[0]
        # A peer that invents tokens must not distort the numbers of other links.
        if 0 <= rtt_s < 60:
            self.rtt_s = rtt_s if self.rtt_s is None else self.rtt_s + (rtt_s - self.rtt_s) / 8
