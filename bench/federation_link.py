"""A link between two members that can be closed and kept closed."""

import asyncio
import threading

from tests.support.cutting_proxy import CuttingProxy


class LinkProxy:
    """Passes on what comes to `port`, from `start` on, in a thread of its own."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self._target_port = target_port
        self._is_open = True
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._proxy: CuttingProxy | None = None
        self._ended = asyncio.Event()

    def start(self) -> None:
        self._thread.start()
        self._is_ready.wait()

    def close_link(self) -> None:
        """Resets the connection, and every new one at once."""
        assert self._loop is not None
        assert self._proxy is not None
        self._is_open = False
        self._loop.call_soon_threadsafe(self._proxy.cut_all)

    def reopen(self) -> None:
        self._is_open = True

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()
            self._loop = None

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        # (0, 0): no byte passes, in either direction.
        async with CuttingProxy(
            self._target_port, lambda: (None, None) if self._is_open else (0, 0)
        ) as proxy:
            self._loop, self._proxy, self.port = loop, proxy, proxy.port
            self._is_ready.set()
            await self._ended.wait()
