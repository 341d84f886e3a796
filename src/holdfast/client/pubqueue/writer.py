"""Gives a publish queue's messages their ids and makes them durable in its store.

A blocking store works in a thread of its own. Messages put while it writes are its next transaction
(group commit). Removals of confirmed messages wait for the next transaction or `REMOVAL_DELAY_S`. A
removal that is lost in a crash means that a message is sent again, and the broker drops it.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from holdfast.client.errors import ClientError
from holdfast.client.identity import SEQUENCE_MAX
from holdfast.client.pubqueue.format import Format
from holdfast.client.pubqueue.messages import (
    Failed,
    QueueClosed,
    QueueEntry,
    StoreError,
    StoreFull,
    entry_size,
)
from holdfast.client.pubqueue.store import Opened, QueueChange, QueueStore
from holdfast.protocol.mqtt.properties import encode_block

REMOVAL_DELAY_S: Final = 0.1
"""The most seconds that removals wait for a transaction."""
REMOVALS_MAX: Final = 500
"""The number of removals that do not wait."""
FULL_RETRY_S: Final = 1.0
"""The seconds between a full disk and the next attempt to write removals."""
ADDED_MAX: Final = 5_000
"""The most messages of one transaction, so that the first of a burst does not wait for all."""

Result = TypeVar("Result")


class Put:
    """A message on its way into the store. `done` gets its sequence (None: no task waits).
    `reserved` is its room in the queue's limits until its size is known."""

    __slots__ = ("done", "entry", "reserved")

    def __init__(self, entry: QueueEntry, done: asyncio.Future[int] | None) -> None:
        self.entry = entry
        self.done = done
        self.reserved = entry.size

    def is_cancelled(self) -> bool:
        """Whether its task has stopped to wait."""
        return self.done is not None and self.done.cancelled()


class Writer:
    """The writer for a store whose calls take no time: everything happens at once."""

    def __init__(
        self,
        store: QueueStore,
        form: Format,
        on_added: Callable[[list[Put]], None],
        on_dropped: Callable[[list[Put]], None],
        on_broken: Callable[[StoreError], None],
    ) -> None:
        """`on_added` receives messages that are durable, ascending; `on_dropped` those that never
        will be; `on_broken` the error with which the store has failed."""
        self.store = store
        self.form = form
        self.on_added = on_added
        self.on_dropped = on_dropped
        self.on_broken = on_broken
        self.epoch = 0
        self.last_sequence = 0

    async def open(self) -> Opened:
        """Opens the store. Raises `StoreError`."""
        opened = await self._call(lambda: self.store.open(self.form.name, time.time()))
        self.epoch = opened.epoch
        self.last_sequence = opened.last_sequence
        return opened

    def add(self, put: Put) -> None:
        """Gives a message its id and stores it."""
        self._stamp(put.entry)
        self.on_added([put])
        if put.done is not None and not put.done.done():
            put.done.set_result(put.entry.sequence)

    def remove(self, sequence: int) -> None:
        """Does nothing: no copy of the message is stored."""

    def fail(self, failed: Failed) -> None:
        """Stores a failed message."""
        self.store.apply(QueueChange(failed=[failed]))

    async def checkpoint(self) -> None:
        """Waits until all removals so far are durable. Raises `StoreError`."""

    async def renew(self) -> int:
        """Gives every message a new epoch, durably, and returns it. Raises `StoreError`."""
        self.epoch += 1
        self.store.renew(self.epoch)
        return self.epoch

    async def read(self, after: int, count: int, size: int) -> list[QueueEntry]:
        """Implements `QueueStore.read`."""
        return await self._call(lambda: self.store.read(after, count, size))

    async def list_failed(self) -> list[Failed]:
        """Implements `QueueStore.list_failed`."""
        return await self._call(self.store.list_failed)

    async def forget_failed(self) -> int:
        """Implements `QueueStore.forget_failed`."""
        return await self._call(self.store.forget_failed)

    async def close(self) -> None:
        """Writes waiting changes and closes the store. Raises `StoreError` if a change could not be
        written; the store is closed even then."""
        self.store.close()

    async def _call(self, operation: Callable[[], Result]) -> Result:
        return operation()

    def _stamp(self, entry: QueueEntry) -> None:
        """Gives the message its id, and its payload the published form."""
        sequence = self.form.next_sequence(self.last_sequence, entry.put_at)
        if not 0 < sequence <= SEQUENCE_MAX:
            raise StoreError("the sequences of this producer are used up: begin a new file")
        self.last_sequence = entry.sequence = sequence
        entry.epoch = self.epoch
        payload = self.form.encode(entry.payload, sequence)
        if payload is not entry.payload:
            entry.payload = payload
            block = encode_block(entry.properties) if entry.properties else b""
            entry.size = entry_size(entry.topic, payload, block)


class ThreadWriter(Writer):
    """The writer for a blocking store, with a thread and a task of its own.

    Invariant: at most one transaction or renewal is under way, with its reports.
    """

    def __init__(
        self,
        store: QueueStore,
        form: Format,
        on_added: Callable[[list[Put]], None],
        on_dropped: Callable[[list[Put]], None],
        on_broken: Callable[[StoreError], None],
    ) -> None:
        super().__init__(store, form, on_added, on_dropped, on_broken)
        self._executor = ThreadPoolExecutor(1, "publish-queue")
        self._puts: list[Put] = []
        self._change = QueueChange()
        self._work = asyncio.Event()
        # Held during a transaction or a renewal, its reports included.
        self._lock = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Opened:
        """Implements `Writer.open`."""
        try:
            opened = await super().open()
        except BaseException:
            # If this was cancelled, the thread may still have opened the store.
            self._executor.submit(self.store.close)
            self._executor.shutdown(wait=False)
            raise
        self._task = asyncio.create_task(self._run(), name="publish-queue-writer")
        return opened

    def add(self, put: Put) -> None:
        """Queues a message for the next transaction."""
        self._puts.append(put)
        self._work.set()

    def remove(self, sequence: int) -> None:
        """Queues the removal of a confirmed message."""
        self._change.removed.append(sequence)
        self._removal_waits()

    def fail(self, failed: Failed) -> None:
        """Queues a failed message."""
        self._change.failed.append(failed)
        self._removal_waits()

    async def list_failed(self) -> list[Failed]:
        """Implements `Writer.list_failed`, changes that wait included."""
        await self.checkpoint()
        return await super().list_failed()

    async def forget_failed(self) -> int:
        """Implements `Writer.forget_failed`, changes that wait included."""
        await self.checkpoint()
        return await super().forget_failed()

    async def checkpoint(self) -> None:
        """Implements `Writer.checkpoint`."""
        async with self._lock:
            if not self._change.is_empty():
                await self._commit([])

    async def renew(self) -> int:
        """Implements `Writer.renew`."""
        async with self._lock:
            if not self._change.is_empty():
                await self._commit([])
            epoch = self.epoch + 1
            await self._call(lambda: self.store.renew(epoch))
            self.epoch = epoch
            return epoch

    async def close(self) -> None:
        """Implements `Writer.close`. Messages that are not stored yet are refused."""
        if self._timer is not None:
            self._timer.cancel()
        async with self._lock:
            # With the lock held, the task is between two transactions.
            if self._task is not None:
                self._task.cancel()
            self._refuse_puts(QueueClosed("the queue was closed before the message was stored"))
            try:
                if not self._change.is_empty():
                    await self._commit([])
            finally:
                await self._call(self.store.close)
                self._executor.shutdown(wait=False)

    async def _call(self, operation: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, operation)

    def _removal_waits(self) -> None:
        if len(self._change.removed) >= REMOVALS_MAX:
            self._work.set()
        elif self._timer is None:
            self._arm(REMOVAL_DELAY_S)

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._work.set)

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            async with self._lock:
                try:
                    await self._commit(self._take_puts())
                except StoreFull:
                    self._arm(FULL_RETRY_S)
                except StoreError as error:
                    self._refuse_puts(error)
                    self.on_broken(error)
                    return

    def _take_puts(self) -> list[Put]:
        """The messages of the next transaction."""
        puts = self._puts[:ADDED_MAX]
        del self._puts[:ADDED_MAX]
        if not self._puts:
            self._work.clear()
        dropped = [put for put in puts if put.is_cancelled()]
        if dropped:
            puts = [put for put in puts if not put.is_cancelled()]
            self.on_dropped(dropped)
        return puts

    def _refuse_puts(self, error: ClientError) -> None:
        puts, self._puts = self._puts, []
        for put in puts:
            _fail(put, error)
        self.on_dropped(puts)

    async def _commit(self, puts: list[Put]) -> None:
        """Writes one transaction: `puts`, and the changes so far. On failure it reports to the
        waiting tasks, then raises `StoreError`."""
        change, self._change = self._change, QueueChange()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        before = self.last_sequence
        try:
            for put in puts:
                self._stamp(put.entry)
                change.added.append(put.entry)
            if not change.is_empty():
                await self._call(lambda: self.store.apply(change))
        except Exception as failure:
            # No message was stored, so the sequences are free.
            self.last_sequence = before
            error = failure if isinstance(failure, StoreError) else StoreError(repr(failure))
            self._change.removed[:0] = change.removed
            self._change.failed[:0] = change.failed
            for put in puts:
                _fail(put, error)
            self.on_dropped(puts)
            if error is failure:
                raise
            raise error from failure
        self.on_added(puts)
        for put in puts:
            if put.done is not None and not put.done.done():
                put.done.set_result(put.entry.sequence)


def _fail(put: Put, error: ClientError) -> None:
    if put.done is not None and not put.done.done():
        put.done.set_exception(error)
