"""A broker's end of a TCP connection whose every answer a test chooses."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable

from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.protocol.mqtt.packets import Packet


class Peer:
    """One accepted connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._frames = FrameReader(PACKET_BYTES_MAX)

    async def receive(self) -> Packet | None:
        """The next packet, None when the client has closed."""
        frames = self._frames
        while not frames.next():
            data = await self._reader.read(65_536)
            if not data:
                return None
            frames.feed(data)
        return decode(frames.buffer, frames.first, frames.start, frames.end, 5, True)

    async def send(self, *packets: Packet | bytes) -> None:
        for packet in packets:
            self.writer.write(packet if isinstance(packet, bytes) else encode(packet, 5))
        await self.writer.drain()

    async def accept(self) -> pk.Connect:
        connect = await self.receive()
        assert isinstance(connect, pk.Connect)
        await self.send(pk.Connack(False, 0))
        return connect


Script = Callable[[Peer], Awaitable[None]]


class ScriptedBroker:
    """`async with`: listens, and runs one script per connection in turn; `port` is where."""

    def __init__(self, *scripts: Script, tls: ssl.SSLContext | None = None) -> None:
        self._scripts = list(scripts)
        self._tls = tls
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0

    async def __aenter__(self) -> "ScriptedBroker":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        # What a script found wrong fails the test.
        await asyncio.wait_for(asyncio.gather(*self._tasks), 10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        try:
            await self._scripts.pop(0)(Peer(reader, writer))
        finally:
            writer.close()
