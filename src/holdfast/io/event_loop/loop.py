"""Configures the event loop and the garbage collector of a serving process.

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

COLLECT_S: Final = 0.02
"""The seconds between two collections of young objects while turns run. In this time a node makes
some 20,000 objects that stay, and a collection takes a millisecond. With a million sessions it was
measured at 0.1 s."""
MIDDLE_EVERY: Final = 4
"""One of so many collections includes the objects that the others have left."""

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
    """Makes full collections rare. Call it once everything is loaded.

    Long-lived objects stay anyway, and reference counts free what a message allocates. A full
    collection would only cost a pause that grows with the number of objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1_000_000)
    COLLECTOR.is_active = True


class Collector:
    """The collections of young objects between two turns, so that none of them takes long.

    Python counts new objects less those freed, of whatever age. Counter-example without these
    collections: sessions of 1,000,000 clients replace older ones, the count stays at 0, and the
    next 50,000 objects begin a collection of a million. It takes 0.1 s.
    """

    def __init__(self) -> None:
        self.is_active = False
        """False: the process is not the broker's own, or only starts."""
        self._count = 0

    def collect(self) -> None:
        """Traverses the objects since the last call. It is due every `COLLECT_S`."""
        if self.is_active:
            self._count += 1
            gc.collect(0 if self._count % MIDDLE_EVERY else 1)


COLLECTOR: Final = Collector()


def handle_signals(
    loop: asyncio.AbstractEventLoop, stop: Callable[[], object], reload: Callable[[], object]
) -> None:
    """Calls `stop` at SIGTERM and SIGINT, and `reload` at SIGHUP."""
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # They end a process by default, and Mosquitto's operators send them.
        loop.add_signal_handler(number, logger.info, "signal_ignored signal=%s", number.name)
