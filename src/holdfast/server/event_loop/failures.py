"""Exceptions that no code expected, and what each of them means for the process.

There are two answers. An exception is *contained* where all that it may have left half done
belongs to one connection, which is then cut: its session goes on from the log. Everything else
*stops* the process: a turn that ended in the middle may have handed a record to one session and
not to the next, and only recovery, which reads the log again, makes up for that. Nothing is logged
and then carried on with.

| where | answer |
|---|---|
| a packet of a client (`drivers.tcp`) | contained: the connection is cut |
| the HTTP and TLS libraries' own protocols | contained: the loop has cut the connection |
| snapshots, retention, the watch on free space (`api.maintenance`) | contained: tried again, told |
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
    """Make the loop call `stop` with each exception that must not be carried on with."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Exception):
            # No failure: a task that the end of the process has overtaken, for instance.
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
    """The first exception of the loop that must not be carried on with, once there is one."""
    found: asyncio.Future[BaseException] = loop.create_future()

    def keep(error: BaseException) -> None:
        if not found.done():
            found.set_result(error)

    stop_on_unexpected(loop, keep)
    return found


def is_contained(context: dict[str, Any]) -> bool:
    """Is it the failure of one connection, in a library, which the loop has cut? `context`: as the
    loop hands it to its exception handler."""
    protocol = context.get("protocol")
    if protocol is not None:
        return type(protocol).__module__.partition(".")[0] != _OWN
    # An accept that found no descriptor: the loop tries again.
    return "socket" in context and isinstance(context.get("exception"), OSError)


def watched(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """A task of `work` that nobody waits for: its failure goes to the loop's exception handler."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(report)
    return task


def report(task: "asyncio.Task[None]") -> None:
    """Hand what a task failed of, if it did, to the loop's exception handler."""
    if not task.cancelled() and task.exception() is not None:
        context = {"message": "a task failed", "exception": task.exception()}
        task.get_loop().call_exception_handler(context)
