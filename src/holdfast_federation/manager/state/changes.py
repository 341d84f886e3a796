"""The stored state, and its changes, one after another.

1. A change is decided on the state that the change before it has left. It is stored before any
   caller or member sees it. So no two changes are decided on the same state.
2. While it is unknown whether a change was stored, no further change is made and no member receives
   links, until the state has been read again. The read state replaces the known one, unless it is
   older than what members have received.
3. A caller that disconnects does not cancel its change. Counter-example: the change is stored, the
   state in memory does not follow, and the next change is decided on the old state.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from holdfast_federation.manager.state.federation_state import FederationState
from holdfast_federation.manager.state.store import (
    AuditLine,
    StateStore,
    StateStoreError,
    StoreLost,
)

T = TypeVar("T")

ANSWER_S: Final = 15.0
"""The most seconds of a change: for a disk that hangs."""
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


logger = logging.getLogger("holdfast.topology")

WAITING_MAX: Final = 1_000
"""The most changes that wait for the one before them."""
RETRY_S: Final = 0.2
"""The seconds before the first retry. They double up to RETRY_S_MAX."""
RETRY_S_MAX: Final = 5.0


class TooMany(Exception):
    """A limit of the manager is reached. The text names it."""


@dataclass(frozen=True)
class StoredChange(Generic[T]):
    """A decided change: the next state, its line of the audit log, and what follows."""

    after: FederationState
    actor: str
    action: str
    detail: str
    then: Callable[[], T]
    """Called once the change is stored. It returns the caller's result."""


class Changes:
    """The state, and the queue of its changes."""

    def __init__(self, store: StateStore) -> None:
        """Reads the state, and blocks meanwhile. Raises StateStoreError."""
        self.state: FederationState = store.load()
        self.unknown_because = ""
        """The reason why it is unknown whether `state` is stored; empty if it is known."""
        self.losses = 0
        """The number of losses since the start."""
        self._thread = StoreThread(store)
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._changed = asyncio.Event()
        self._needs_reload = asyncio.Event()
        self._is_ending = False

    def check_current(self) -> None:
        """Checks that the state here is current. Raises StateStoreError if it may be old."""
        if self.unknown_because:
            raise StateStoreError(
                f"the database is away, and is tried again: {self.unknown_because}"
            )

    async def apply(self, decide: Callable[[], StoredChange[T] | None]) -> T | None:
        """Calls `decide` when its turn comes and stores its change; None for no change. Returns the
        result of the change.

        Raises what `decide` raises, TooMany or StateStoreError. Nothing has changed then, unless
        the database was lost meanwhile.
        """
        if len(self._tasks) >= WAITING_MAX:
            raise TooMany(f"{WAITING_MAX} changes wait already: ask again later")
        making = self._apply(decide)
        task = asyncio.create_task(making)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Of one whose asker is gone nobody else takes the exception.
            task.exception()

    async def _apply(self, decide: Callable[[], StoredChange[T] | None]) -> T | None:
        async with self._turn:
            if self._is_ending:
                raise StateStoreError("the manager is stopping: ask again when it is back")
            self.check_current()
            change = decide()
            if change is None:
                return None
            line = AuditLine(
                at_s=time.time(), revision=change.after.revision, actor=change.actor,
                action=change.action, detail=change.detail,
            )  # fmt: skip
            before, store = self.state, self._thread.store
            await self._run(lambda: store.save(before, change.after, line))
            self.state = change.after
            logger.info(
                f"{change.action} actor=%s revision=%d detail=%r",
                change.actor, change.after.revision, change.detail,
            )  # fmt: skip
            self.wake()
            return change.then()

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            return await self._thread.run(call)
        except StoreLost as error:
            self.losses += not self.unknown_because
            self.unknown_because = str(error)
            self._needs_reload.set()
            logger.error("database_lost error=%r", self.unknown_because)
            raise

    async def audit(self, lines: int) -> list[AuditLine]:
        """Returns the newest lines of the audit log, the newest first. Raises StateStoreError."""
        async with self._turn:
            self.check_current()
            return await self._run(lambda: self._thread.store.audit(lines))

    def wake(self) -> None:
        """Wakes the waiting callers once. The event is replaced, because nothing could wait for one
        that stays set."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """The event of the next change. It stays set, so a caller takes a new one after it."""
        return self._changed

    async def maintain(self, adopted: Callable[[FederationState], None]) -> None:
        """Reads the state again after a loss, until it is cancelled. `adopted` is called with the
        state before."""
        while True:
            await self._needs_reload.wait()
            pause_s = RETRY_S
            while self.unknown_because:
                await self._undisturbed(self._reload(adopted))
                if self.unknown_because:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def _undisturbed(self, work: Coroutine[None, None, None]) -> None:
        task: asyncio.Task[object] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    async def _reload(self, adopted: Callable[[FederationState], None]) -> None:
        async with self._turn:
            try:
                state = await self._thread.run(self._thread.store.load)
            except StateStoreError as error:
                if str(error) != self.unknown_because:
                    self.unknown_because = str(error)
                    logger.error("database_away error=%r", self.unknown_because)
                return
            before = self.state
            if state.revision < before.revision:
                lost = (
                    f"its revision is {state.revision}, and members have been told"
                    f" {before.revision}: was a backup restored? Restart the manager to go on from"
                    " there"
                )
                if lost != self.unknown_because:
                    self.unknown_because = lost
                    logger.error("database_is_older error=%r", self.unknown_because)
                return
            self.state, self.unknown_because = state, ""
            self._needs_reload.clear()
            logger.info("database_back revision=%d before=%d", state.revision, before.revision)
            adopted(before)
            self.wake()

    async def stop(self) -> None:
        """Stops after the change in progress. The waiting ones are refused."""
        self._is_ending = True
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._thread.stop()
