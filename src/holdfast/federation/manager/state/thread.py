"""A state store in a thread of its own, with a time limit for the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from holdfast.federation.manager.state.store import StateStore, StoreLost

T = TypeVar("T")

ANSWER_S: Final = 15.0
"""The most seconds of a change, or of a connection with its lock. The limits of a store itself are
shorter; this one is for a server that hangs."""
INTERRUPT_S: Final = 5.0
"""The most seconds of a call after its interrupt."""


class StoreThread:
    """The thread of a store. It runs one call at a time."""

    def __init__(self, store: StateStore) -> None:
        self.store = store
        self._executor = ThreadPoolExecutor(1, "topology-store")
        # A call whose result is unknown. No other call follows it.
        self._stuck: asyncio.Future[Any] | None = None

    async def run(self, call: Callable[[], T]) -> T:
        """Runs a call, which cannot be cancelled: the state in memory must follow what it stores.
        Raises StateStoreError, or StoreLost also without a response in time."""
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
        """Stops the thread, or leaves it behind if its call hangs."""
        if self._stuck is None or self._stuck.done():
            await asyncio.get_running_loop().run_in_executor(self._executor, self.store.close)
        self._executor.shutdown(wait=False)
