"""Thread in which a node runs commands of dynamic security."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from holdfast.io.event_loop.broker import Broker

T = TypeVar("T")


class CommandThread:
    """One thread, whose results come back to the event loop in their order. A function that raises
    is a defect, and stops the node: what it has done already must not be undone by the next one."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._pool = ThreadPoolExecutor(1, "commands")

    def __call__(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        self._pool.submit(work).add_done_callback(partial(self._arrived, done))

    def close(self) -> None:
        """Begins no more work."""
        self._pool.shutdown(wait=False)

    def _arrived(self, done: Callable[[T], None], result: "Future[T]") -> None:
        """Passes the result to the loop. Runs in the thread."""
        if not result.cancelled():
            self._broker.loop.call_soon_threadsafe(self._finish, done, result)

    def _finish(self, done: Callable[[T], None], result: "Future[T]") -> None:
        self._broker.touch()
        error = result.exception()
        if error is None:
            done(result.result())
        else:
            self._broker.fail("commands_failed", error)
