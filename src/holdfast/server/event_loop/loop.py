"""The event loop and the garbage collector of a serving process.

The loop is uvloop if it is installed, else asyncio's.
"""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable
from typing import Final

SWITCH_INTERVAL_S: Final = 0.0001
"""The time in seconds after which a thread that computes hands the interpreter to one that waits
for it. With Python's 5 ms the read of a replay delays a PUBACK three times: as its publish arrives,
as the writer has synced it, and as the loop learns of that."""

logger = logging.getLogger("holdfast")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process, in whose thread everything urgent runs."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def is_uvloop(loop: asyncio.AbstractEventLoop) -> bool:
    return type(loop).__module__.partition(".")[0] == "uvloop"


def spare_the_collector() -> None:
    """Make full collections rare. Call it once everything is loaded.

    Long-lived objects stay anyway, and reference counts free what a message allocates. A full
    collection would only cost a pause that grows with the number of objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def handle_signals(
    loop: asyncio.AbstractEventLoop, stop: Callable[[], object], reload: Callable[[], object]
) -> None:
    """Call `stop` at SIGTERM and SIGINT, and `reload` at SIGHUP."""
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # They end a process by default, and Mosquitto's operators send them.
        loop.add_signal_handler(number, logger.info, "signal_ignored signal=%s", number.name)
