"""One connection to another member: a peer link that tells when it is slow, and that it lives."""

import asyncio
import struct
import time
from typing import Final, Protocol, cast

from holdfast.server.peers.link import PeerLink

FRAME: Final = 0
"""Kinds of frames of a link: one of `federation.frames`, and those that measure round trips. Others
are passed over."""
PING: Final = 1
PONG: Final = 2
TOKEN: Final = struct.Struct(">d")
"""Of a PING; comes back unchanged."""

BUSY_BYTES: Final = 1 << 20
"""Unsent; then the link counts as busy, until `FREE_BYTES` are left."""
FREE_BYTES: Final = 1 << 18
STIR_S: Final = 0.25
"""Between reports of bytes that are not a whole frame yet."""


class LinkWatcher(Protocol):
    def busy(self, link: "MemberLink", is_busy: bool) -> None: ...

    def stirred(self, link: "MemberLink") -> None:
        """Bytes of a large frame are coming."""


class MemberLink(asyncio.BufferedProtocol):
    def __init__(
        self, inner: PeerLink, watcher: LinkWatcher, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.inner = inner
        self.is_busy = False
        self.rtt_s: float | None = None
        """Smoothed; None: not measured yet."""
        self._watcher = watcher
        self._loop = loop
        self._stirred_at = 0.0

    @property
    def node(self) -> bytes:
        """Only of one that is established."""
        assert self.inner.peer is not None
        return bytes.fromhex(self.inner.peer.node_id)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are none by class.
        cast(asyncio.WriteTransport, transport).set_write_buffer_limits(BUSY_BYTES, FREE_BYTES)
        self.inner.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.inner.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self.inner.buffer_updated(nbytes)
        if self.inner.peer is not None and not self.inner.closing:
            now = self._loop.time()
            if now - self._stirred_at >= STIR_S:
                self._stirred_at = now
                self._watcher.stirred(self)

    def pause_writing(self) -> None:
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
        # The loop's clock stands still during a turn.
        return TOKEN.pack(time.monotonic())

    def measured(self, token: bytes) -> None:
        """A PONG has come."""
        if len(token) != TOKEN.size:
            return
        rtt_s = time.monotonic() - TOKEN.unpack(token)[0]
        # A peer that makes up tokens does not spoil the numbers of others.
        if 0 <= rtt_s < 60:
            self.rtt_s = rtt_s if self.rtt_s is None else self.rtt_s + (rtt_s - self.rtt_s) / 8
