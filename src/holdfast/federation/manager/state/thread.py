"""A store in a thread of its own, for the event loop to wait for, but not for ever."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from holdfast.federation.manager.state.store import StateStore, StoreLost

T = TypeVar("T")

ANSWER_S: Final = 15.0
"""For a change, or a connection with its lock. A store's own bounds are shorter where it has any:
this one is for a server that stands still."""
INTERRUPT_S: Final = 5.0


class StoreThread:
    def __init__(self, store: StateStore) -> None:
        self.store = store
        self._executor = ThreadPoolExecutor(1, "topology-store")
        # Of which nobody could say how it ends: nothing is put behind it.
        self._stuck: asyncio.Future[Any] | None = None

    async def run(self, call: Callable[[], T]) -> T:
        """One at a time, and not to be cancelled: what a change does to the state has to follow
        it. Raises StoreError, StoreLost also when there is no answer in time."""
        if self._stuck is not None and not self._stuck.done():
            raise StoreLost(f"{self.store.name}: still gives no answer")
        self._stuck = None
        work = asyncio.get_running_loop().run_in_executor(self._executor, call)
        await asyncio.wait({work}, timeout=ANSWER_S)
        if work.done():
            return work.result()
        self.store.interrupt()
        await asyncio.wait({work}, timeout=INTERRUPT_S)
        if not work.done():
            self._stuck = work
            # Whatever it brings is looked at by nobody.
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise StoreLost(f"{self.store.name}: no answer in {ANSWER_S + INTERRUPT_S:g} s")
        try:
            return work.result()
        except StoreLost as error:
            raise StoreLost(f"{self.store.name}: no answer in {ANSWER_S:g} s") from error

    async def stop(self) -> None:
        """Nothing runs in it any more, or it is left behind."""
        if self._stuck is None or self._stuck.done():
            await asyncio.get_running_loop().run_in_executor(self._executor, self.store.close)
        self._executor.shutdown(wait=False)
