"""Reads the log from asyncio programs: `AsyncLogClient`.

A read does its requests and its decoding in a thread of its own, one list or Arrow batch at a time,
and only when the program asks for the next one. So neither the event loop nor the other reads wait.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from holdfast.client.log.client import LogLocation, Topics, select
from holdfast.client.log.cursor import MESSAGES_MAX, LogCursor, OnGap
from holdfast.client.log.errors import LogOptionError
from holdfast.client.log.messages import LogMessage
from holdfast.client.log.position import Place, Position

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class AsyncLogClient(LogLocation):
    """`LogClient` for asyncio: the same arguments, results and errors.

    log = AsyncLogClient("127.0.0.1:18083")
    async with await log.read("plant/#", start="latest", follow=True) as cursor:
        async for message in cursor:
            ...
    """

    async def read(
        self,
        topics: Topics = "#",
        *,
        start: Place | None = None,
        end: Place | None = None,
        follow: bool = False,
        group: str = "",
        partitions: Collection[int] | None = None,
        on_gap: OnGap | None = None,
        idle_s: float | None = None,
    ) -> "AsyncLogCursor":
        """Begins to read: see `LogClient.read`. `on_gap` is called in the thread of the event
        loop."""
        selection = select(topics, start, end, follow, partitions, idle_s)
        loop = asyncio.get_running_loop()
        worker = ThreadPoolExecutor(1, "log-cursor")
        told: OnGap | None = None
        if on_gap is not None:
            told = partial(loop.call_soon_threadsafe, on_gap)  # type: ignore[arg-type]
        make = partial(self._open, selection, group, told)
        try:
            return AsyncLogCursor(await loop.run_in_executor(worker, make), worker)
        except BaseException:
            worker.shutdown(wait=False)
            raise


class AsyncLogCursor:
    """`LogCursor` for asyncio. One task at a time uses it. It is closed when a request of it is
    cancelled, because nobody knows then what it has handed out."""

    def __init__(self, cursor: LogCursor, worker: ThreadPoolExecutor) -> None:
        """Made by `AsyncLogClient.read`."""
        self._cursor = cursor
        self._worker = worker
        self._lists: Iterator[list[LogMessage]] | None = None
        # The messages that `__anext__` hands out one by one, and the position before them.
        self._messages: list[LogMessage] = []
        self._taken = 0
        self._before: dict[int, int] = {}
        self._generation: int | None = None
        self._is_closed = False

    async def __aenter__(self) -> "AsyncLogCursor":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the read and closes its connections. It does not block."""
        self._is_closed = True
        self._cursor.close()
        self._worker.shutdown(wait=False)

    @property
    def position(self) -> Position:
        """See `LogCursor.position`."""
        if self._taken == len(self._messages):
            return self._cursor.position
        return Position(dict(self._before), self._generation)

    async def commit(self) -> None:
        """See `LogCursor.commit`."""
        await self._call(partial(self._cursor.commit, self.position))

    def __aiter__(self) -> "AsyncLogCursor":
        return self

    async def __anext__(self) -> LogMessage:
        while self._taken == len(self._messages):
            if self._is_closed:
                raise StopAsyncIteration
            if self._lists is None:
                self._lists = self._cursor.batches()
            before = self._cursor.position
            self._before, self._generation = dict(before.offsets), before.generation
            found = await self._call(partial(next, self._lists, None))
            if found is None:
                raise StopAsyncIteration
            self._messages, self._taken = found, 0
        message = self._messages[self._taken]
        self._taken += 1
        self._before[message.partition] = message.offset + 1
        return message

    async def batches(self, messages_max: int = MESSAGES_MAX) -> AsyncIterator[list[LogMessage]]:
        """See `LogCursor.batches`."""
        if self._taken < len(self._messages):
            raise LogOptionError("batches: take the messages of the present list first")
        lists = self._cursor.batches(messages_max)
        while not self._is_closed:
            found = await self._call(partial(next, lists, None))
            if found is None:
                return
            yield found

    async def arrow(self, columns: str | None = None) -> "AsyncIterator[pa.RecordBatch]":
        """See `LogCursor.arrow`."""
        batches = self._cursor.arrow(columns)
        while not self._is_closed:
            found = await self._call(partial(next, batches, None))
            if found is None:
                return
            yield found

    async def to_arrow(self, columns: str | None = None) -> "pa.Table":
        """See `LogCursor.to_arrow`."""
        return await self._call(partial(self._cursor.to_arrow, columns))

    async def _call(self, work: Callable[[], T]) -> T:
        if self._is_closed:
            raise LogOptionError("the cursor is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
        except asyncio.CancelledError:
            self.close()
            raise
