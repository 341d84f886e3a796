"""An HTTP service of the operator: POSTs over pooled connections, with a time and bytes at most."""

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import httpx

from holdfast.addresses import without_query

logger = logging.getLogger("holdfast")

REPLY_BYTES_MAX: Final = 65_536
"""The most bytes of a reply."""
FAILURE_LINE_S: Final = 10.0
"""The least seconds between two log lines about a service that fails."""


class HttpService:
    """The connections to a service."""

    def __init__(self, headers: dict[str, str], timeout_s: float, connections: int) -> None:
        self._headers = headers
        self.timeout_s = timeout_s
        self._connections = connections
        # httpx never queues a request, so that each one passes `_drop_surplus` before it begins.
        self._free = asyncio.Semaphore(connections)
        self._client: httpx.AsyncClient | None = None
        self._broken: tuple[type[Exception], ...] = ()
        """The errors of a connection that ended before its reply."""
        self._is_started = asyncio.Event()
        self._noted_at = float("-inf")

    async def start(self) -> None:
        """Begins to work."""
        import httpx

        limits = httpx.Limits(
            max_connections=self._connections, max_keepalive_connections=self._connections
        )
        self._broken = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
        # Importing certificates takes milliseconds.
        self._client = await asyncio.to_thread(
            lambda: httpx.AsyncClient(
                limits=limits, timeout=self.timeout_s, follow_redirects=False, trust_env=False
            )
        )
        self._is_started.set()

    async def close(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def post(self, url: str, content: bytes) -> tuple[int, bytes]:
        """The status and the body of the reply. Raises errors of httpx and of sockets,
        `TimeoutError`, and `ValueError` for too large a reply."""
        async with asyncio.timeout(self.timeout_s):
            # The first clients come while the library is loaded.
            await self._is_started.wait()
            async with self._free:
                try:
                    return await self._exchange(url, content)
                except self._broken as error:
                    # The service may have closed a pooled connection as the request was sent. A
                    # second question does no harm.
                    logger.debug(
                        "http_check_repeated url=%r error=%r", without_query(url), str(error)
                    )
                    return await self._exchange(url, content)

    async def _exchange(self, url: str, content: bytes) -> tuple[int, bytes]:
        assert self._client is not None
        await self._drop_surplus()
        async with self._client.stream(
            "POST", url, content=content, headers=self._headers
        ) as response:
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > REPLY_BYTES_MAX:
                    raise ValueError(f"a reply of more than {REPLY_BYTES_MAX} bytes")
            return response.status_code, bytes(body)

    async def _drop_surplus(self) -> None:
        """Closes the idle connections on which more than the reply has come. httpcore would take it
        for the reply to the next question: the "allow" of one client would admit another."""
        transport: Any = self._client
        for connection in transport._transport._pool.connections:
            inner = connection._connection  # None: it could not be connected.
            if inner is not None and connection.is_idle() and inner._h11_state.trailing_data[0]:
                await connection.aclose()

    def note(self, url: str, error: Exception) -> None:
        """Logs a failure, at most every `FAILURE_LINE_S`."""
        now = time.monotonic()
        if now - self._noted_at >= FAILURE_LINE_S:
            self._noted_at = now
            text = str(error) or type(error).__name__
            logger.error("http_check_failed url=%r error=%r", without_query(url), text)
