"""Lets requests wait for the log to grow.

A reader at the end of the log asks once and receives the reply when something is committed. One
task looks at the log for all of them, and only while there are any. So neither a message nor a node
without such readers pays for it.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.io.event_loop.failures import watched

LOOK_S: Final = 0.01
"""The seconds between two looks at the log."""
WAITS_MAX: Final = 256
"""The most requests that wait at one node. Further ones receive 503."""


class TooManyWaits(Exception):
    """The greatest number of requests waits already."""


class CommitWatch:
    """The requests that wait, each with the ends of the log that its reader knows."""

    def __init__(self, find_ends: Callable[[], list[int] | None]) -> None:
        """`find_ends` returns the committed end of each partition, or None if the log cannot be
        read any more. That ends all waits."""
        self._find_ends = find_ends
        self._waits: dict[asyncio.Future[None], Sequence[int]] = {}
        self._looks: asyncio.Task[None] | None = None

    async def wait(self, known: Sequence[int], timeout_s: float) -> None:
        """Returns when some partition ends behind its known end, or after the timeout. Raises
        `TooManyWaits`."""
        ends = self._find_ends()
        if ends is None or any(map(int.__gt__, ends, known)):
            return
        if len(self._waits) >= WAITS_MAX:
            raise TooManyWaits(f"{WAITS_MAX} requests wait for the log already: try again")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits[future] = known
        if self._looks is None:
            self._looks = watched(self._look(ends))
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return
        finally:
            self._waits.pop(future, None)

    async def _look(self, before: list[int]) -> None:
        """Looks until no request waits. `before` are ends that no waiting reader is behind."""
        try:
            while self._waits:
                await asyncio.sleep(LOOK_S)
                ends = self._find_ends()
                if ends is None:
                    return
                # Only partitions that have grown since the last look can be news to a reader. With
                # all 4,096 of them compared for each of 256 readers, a look would take 50 ms.
                grown = [p for p, end in enumerate(ends) if end > before[p]]
                before = ends
                for future, known in self._waits.items():
                    if not future.done() and any(ends[p] > known[p] for p in grown):
                        future.set_result(None)
        finally:
            self._looks = None
            for future in self._waits:
                if not future.done():
                    future.set_result(None)
