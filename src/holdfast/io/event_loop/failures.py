"""Handles unexpected exceptions.

There are two ways. An exception is *contained* if everything that may be incomplete belongs to one
part of the node. A connection is cut, and its session continues from the log. A partition of a
cluster is neither led, followed nor applied here any more, and its clients go to other nodes. A
federation member is built again from its store.

Every other exception *stops* the process. A turn that ended in the middle may have handed a record
to one session and not to the next. Only recovery, which reads the log again, repairs that. No
exception is logged and then ignored.

| where | handling |
|---|---|
| a packet of a client (`sockets.driver`, `broker`) | contained: the connection is cut |
| protocols of the HTTP and TLS libraries | contained: the loop has cut the connection |
| an invariant of a session (`node.node_state`) | contained: the connection is cut |
| an invariant of a partition (`node.replicate`) | contained: the partition is stopped |
| an invariant of a federation member | contained: the member starts again |
| snapshots, retention, the check of free space (`maintenance`) | contained: logged, repeated |
| a turn, a commit, a timer, a result of a thread, a frame of a peer | stops the process |
| a task that lives as long as the process | stops the process |
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

logger = logging.getLogger("holdfast")

_OWN: Final = "holdfast"


def stop_on_unexpected(
    loop: asyncio.AbstractEventLoop, stop: Callable[[BaseException], None]
) -> None:
    """Makes the loop call `stop` with each exception that is not contained."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Exception):
            # No failure, for example a task that was still running when the process ended.
            logger.error("event_loop text=%r", context.get("message"))
        elif is_contained(context):
            logger.error(
                "connection_failed text=%r error=%r",
                context.get("message"),
                str(error),
                exc_info=error,
            )
        else:
            logger.critical("unexpected error=%r", str(error), exc_info=error)
            stop(error)

    loop.set_exception_handler(handle)


def first_unexpected(loop: asyncio.AbstractEventLoop) -> asyncio.Future[BaseException]:
    """Returns a future of the first exception of the loop that is not contained."""
    found: asyncio.Future[BaseException] = loop.create_future()

    def keep(error: BaseException) -> None:
        if not found.done():
            found.set_result(error)

    stop_on_unexpected(loop, keep)
    return found


def is_contained(context: dict[str, Any]) -> bool:
    """Returns whether one connection failed in a library and the loop has cut it.

    `context`: the argument of the loop's exception handler.
    """
    protocol = context.get("protocol")
    if protocol is not None:
        return type(protocol).__module__.partition(".")[0] != _OWN
    # An accept found no free descriptor. The loop tries again.
    return "socket" in context and isinstance(context.get("exception"), OSError)


def watched(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Starts a task whose failure goes to the loop's exception handler."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(report)
    return task


def report(task: "asyncio.Task[None]") -> None:
    """Passes the failure of a finished task, if any, to the loop's exception handler."""
    if not task.cancelled() and task.exception() is not None:
        context = {"message": "a task failed", "exception": task.exception()}
        task.get_loop().call_exception_handler(context)
