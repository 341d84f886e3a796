"""Configures the event loop and the garbage collector of a serving process.

The loop is uvloop if it is installed, else asyncio's.
"""

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable
from typing import Final

SWITCH_INTERVAL_S: Final = 0.0001
"""The time in seconds after which a thread that computes hands the interpreter to one that waits
for it. With Python's 5 ms the read of a replay delays a PUBACK three times: as its publish arrives,
as the writer has synced it, and as the loop learns of that."""

COLLECT_S: Final = 0.02
"""The seconds between two collections of young objects while turns run."""
MIDDLE_EVERY: Final = 4
"""One of so many collections includes the objects that the others have left."""
OLD_EVERY: Final = 4096
"""One of so many collections includes all objects since the start, or since too many became
permanent."""
YOUNG_MAX: Final = 20_000
"""The new objects after which Python begins a collection within a call."""
BURSTS_MAX: Final = 8
"""More of such collections within `COLLECT_S` have left too many objects for one collection."""
OBJECT_S: Final = 50e-9
"""The shortest time in seconds in which a collection traverses an object that is not in the cache.
With other work on the machine it was measured at 400 ns."""
LONG_S: Final = 0.005
"""The longest time in seconds that a collection may take by the speed of the last one."""
TRAVERSED_MAX: Final = int(LONG_S / OBJECT_S)
"""The most objects of a collection of all but the youngest."""
NEVER: Final = 1_000_000_000
"""A threshold of the collector that no process reaches."""

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


def count_objects(generation: int) -> int:
    """The number of objects in a generation and the younger ones.

    No other thread may run while a list has them. Counter-example: a thread makes a tuple from a
    generator, the list refers to the tuple too, and Python raises `SystemError` in the thread. So
    this is one expression of built-in functions, between which no thread gets its turn.
    """
    return sum(map(len, map(gc.get_objects, range(generation + 1))))


class Collector:
    """The collections between two turns, none of which traverses many objects.

    If there are too many, or have too many elements, they become permanent, which takes no time. No
    collection traverses them, and their reference counts free them. Only a cycle among them stays,
    so the core makes none (`tests/unit/node/test_garbage_collection.py`). A process with few
    clients collects all its objects.

    Python counts new objects less those freed, of whatever age, and its full collections have no
    bound. Counter-example with Python's own collections: sessions of 1,000,000 clients replace
    older ones, the count stays at 0, and then one collection takes 0.1 s. A full one takes 1 s.
    """

    def __init__(self) -> None:
        self.is_active = False
        """False: the process is not the broker's own, or only starts."""
        self._count = 0
        # At most so many objects have become old since the old ones were counted.
        self._aged = 0
        # The time per object of the last collection that traversed counted ones.
        self._object_s = OBJECT_S

    def start(self) -> None:
        """Makes all present objects permanent. Call it once everything is loaded."""
        self.is_active = True
        gc.set_threshold(YOUNG_MAX, NEVER, NEVER)
        self.leave_present()

    def leave_present(self) -> None:
        """Makes all present objects permanent."""
        if self.is_active:
            gc.freeze()

    def collect(self) -> None:
        """Collects one generation. It is due every `COLLECT_S`."""
        if not self.is_active:
            return
        self._count += 1
        if gc.get_count()[1] > BURSTS_MAX + MIDDLE_EVERY:
            gc.freeze()
            # Nothing is left to traverse. This sets Python's count of such collections back.
            gc.collect(1)
        elif self._aged > TRAVERSED_MAX or self._count % OLD_EVERY == 1:
            self._aged = 0
            self._collect_counted(2)
        elif self._count % MIDDLE_EVERY:
            gc.collect(0)
        else:
            self._aged += self._collect_counted(1)

    def _collect_counted(self, generation: int) -> int:
        """Collects a generation with the younger ones, or makes their objects permanent. Returns
        their number."""
        count = count_objects(generation)
        if count * self._object_s > LONG_S:
            gc.freeze()
            # A list or table with a million elements, or other work, makes one collection slow.
            self._object_s *= 0.9
        else:
            began_s = time.thread_time()
            gc.collect(generation)
            took_s = time.thread_time() - began_s
            speed_s = took_s / max(1000, count)
            self._object_s = max(OBJECT_S, speed_s, 0.9 * self._object_s)
        return count


COLLECTOR: Final = Collector()


def spare_the_collector() -> None:
    """Makes full collections rare in a process without turns. Call it once everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1_000_000)


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
