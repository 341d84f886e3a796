"""One end of the stream between the broker and an I/O worker, the same at both.

The class does not derive from asyncio's, so it compiles to a native class.
"""

from asyncio import AbstractEventLoop, BaseTransport, Transport
from typing import Final, cast

from holdfast.protocol.relay.frames import RelayReader, add_data

WORKER_NUMBER: Final = 0
"""The number in frames that concern the worker, and no connection of it."""


class RelayStream:
    """An asyncio protocol that writes the frames of one iteration of the loop at once, after it.

    Subclasses process the frames that arrive (`data_received`) and the end (`connection_lost`).
    """

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.loop = loop
        self._reader = RelayReader()
        self._transport: Transport | None = None
        self._out: list[bytes] = []
        self._flush_scheduled = False

    def connection_made(self, transport: BaseTransport) -> None:
        self._transport = cast(Transport, transport)

    def send(self, one: bytes) -> None:
        """Sends a frame, with what else this iteration of the loop sends."""
        self._out.append(one)
        self._schedule()

    def send_data(self, number: int, data: bytes) -> int:
        """Sends bytes from or for a client, with what else this iteration of the loop sends.
        Returns the bytes of their frames, which their credit counts: a client that sends single
        bytes would otherwise fill ten times its window."""
        size = add_data(self._out, number, data)
        self._schedule()
        return size

    def _schedule(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        out = self._out
        self._out = []
        if self._transport is not None:
            self._transport.write(b"".join(out))

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        """Does nothing: the credit of each connection and of the worker bounds the writes."""

    def resume_writing(self) -> None:
        pass
