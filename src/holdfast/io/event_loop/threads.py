"""Threads for work on files that may hang."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, cast

from holdfast.io.disk.journal_writer import Worker

T = TypeVar("T")


def run_in_thread(name: str, work: Callable[[], T]) -> "asyncio.Future[T]":
    """Runs `work` in a thread of its own, and returns the future of its result.

    The end of the process does not wait for the thread. The loop's executor would: its threads are
    joined at exit, so one that reads from a hanging directory keeps the process alive.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            found = work()
        except Exception as error:  # noqa: BLE001
            # Not lost: whoever waits for the future gets it.
            failure = error
            post(lambda: future.set_exception(failure))
        else:
            post(lambda: future.set_result(found))

    def post(settle: Callable[[], None]) -> None:
        def settle_unless_cancelled() -> None:
            if not future.cancelled():
                settle()

        # The loop is closed when the process ends before the thread.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle_unless_cancelled)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def run_in(worker: Worker, work: Callable[[], T]) -> T:
    """Runs `work` in the worker's thread, after all that was submitted before.

    Cancellation of the caller does not end the work.
    """
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def done(result: object, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    worker.submit(work, done)
    return await future
