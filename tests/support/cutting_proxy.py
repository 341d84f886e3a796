"""A TCP proxy that cuts connections where the test says, to the byte."""

import asyncio
from collections.abc import Callable

from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX


class CuttingProxy:
    """`async with`: listens on `port` and forwards to `target_port`. For each connection
    `cut_after` gives how many bytes pass to the server and to the client before both sides are
    reset; None: all. `close` ends all connections, and `is_open` False refuses new ones."""

    def __init__(
        self, target_port: int, cut_after: Callable[[], tuple[int | None, int | None]]
    ) -> None:
        self.target_port = target_port
        self.port = 0
        self.connections = 0
        self.cuts = 0
        self._cut_after = cut_after
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "CuttingProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        up_bytes, down_bytes = self._cut_after()
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, upstream[1]}
        self._writers |= pair
        try:
            await asyncio.wait(
                [
                    asyncio.ensure_future(self._pass(reader, upstream[1], up_bytes)),
                    asyncio.ensure_future(self._pass(upstream[0], writer, down_bytes)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._writers -= pair
            for one in pair:
                one.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit_bytes: int | None
    ) -> None:
        left = limit_bytes if limit_bytes is not None else PACKET_BYTES_MAX**2
        try:
            while left:
                data = await reader.read(min(65_536, left))
                if not data:
                    return
                writer.write(data)
                await writer.drain()
                left -= len(data)
            self.cuts += 1
        except OSError:
            return
