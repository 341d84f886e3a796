"""Starts and replaces a broker's I/O workers, and gives them their listeners."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from errno import EMSGSIZE
from typing import Final, Literal, cast

import msgspec

from holdfast.config.listener import Listener
from holdfast.io.event_loop.broker import Broker
from holdfast.io.sockets.acceptor import BACKLOG
from holdfast.io.sockets.driver import ListenerCount
from holdfast.io.sockets.reception import ListenerHost, RelayedListener
from holdfast.io.workers.channel import WorkerChannel
from holdfast.io.workers.messages import (
    BEHIND,
    MESSAGE_BYTES_MAX,
    ListenerChange,
    WorkerNote,
    decode_note,
)

logger = logging.getLogger("holdfast")

MODULE: Final = "holdfast.io.workers.worker"
PING_S: Final = 2.0
HANG_S: Final = 20.0
"""The time in seconds between two pings, and the time without an answer after which a worker is
killed. It is counted in pings, because a broker that was stopped itself has read no answer."""
QUICK_S: Final = 5.0
DELAY_S_MAX: Final = 5.0
RETRY_S: Final = 5.0
"""A worker that ended within QUICK_S of its start is replaced after a second, then after twice the
time, at most DELAY_S_MAX; one that the system does not let start, every RETRY_S."""


class WorkerProcess:
    """One worker, from its start to its end."""

    def __init__(self, pool: "IoWorkers", index: int, now: float) -> None:
        """Starts the process. Raises `OSError` without memory or descriptors for it."""
        self.index = index
        self.started_at = now
        self.pongs = 0
        self.silent_pings = 0
        self._pool = pool
        self.channel = WorkerChannel(pool.loop, pool.counts, self.handle_note, self.handle_lost)
        self._stream, worker_stream = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._control, worker_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stream.setblocking(False)
        self._control.setblocking(False)
        with worker_stream, worker_control:
            files = (worker_stream.fileno(), worker_control.fileno())
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, *map(str, files)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=files,
                    # Ctrl-C in the broker's terminal is for the broker.
                    start_new_session=True,
                )
            except OSError:
                self._stream.close()
                self._control.close()
                raise

    async def connect(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to exchange frames."""
        # WorkerChannel has the methods of a protocol, but not the base class.
        protocol = cast(asyncio.Protocol, self.channel)
        await loop.create_unix_connection(lambda: protocol, sock=self._stream)

    def tell(self, change: ListenerChange, sockets: Sequence[socket.socket] = ()) -> None:
        """Passes a change of the listeners on. A worker that does not take it is ended."""
        try:
            files = [one.fileno() for one in sockets]
            socket.send_fds(self._control, [msgspec.json.encode(change)], files)
        except OSError as error:
            logger.error("io_worker_not_told worker=%d error=%r", self.index, str(error))
            self.end()

    def handle_note(self, content: bytes) -> None:
        """Handles the content of a NOTE. Raises `RelayError`."""
        self._pool.handle_note(self.index, decode_note(content))

    def handle_lost(self) -> None:
        self._control.close()
        self._pool.replace(self)

    def end(self) -> None:
        """Kills the process. The channel's end follows."""
        self.process.kill()


class WorkerListener(RelayedListener):
    """A listener whose sockets the workers have."""

    def __init__(self, pool: "IoWorkers", number: int) -> None:
        self._pool = pool
        self._number = number

    def close(self) -> None:
        self._pool.close_listener(self._number)


class IoWorkers(ListenerHost):
    """A fixed number of workers, each of which accepts from all listeners.

    They share the listening sockets, and the broker keeps them open. So the connections that nobody
    has accepted yet survive a worker, which they would not with a socket of its own for each.
    """

    def __init__(self) -> None:
        self.count = 0
        self.counts: dict[int, ListenerCount] = {}
        self._broker: Broker | None = None
        self._numbers: dict[str, int] = {}
        self._open: dict[int, tuple[ListenerChange, list[socket.socket]]] = {}
        self._workers: list[WorkerProcess] = []
        self._delays: dict[int, float] = {}
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, wanted: int | Literal["auto"]) -> None:
        """Starts the processes, as `io.workers` says. They accept nothing before `listen`, so
        a standby has them ready when it takes over."""
        self.loop = asyncio.get_running_loop()
        cores = os.cpu_count() or 1
        self.count = wanted if wanted != "auto" else cores - 1 if cores > 2 else 0
        for index in range(self.count):
            self._start(index)
        if self.count:
            self._watch()

    def listen(
        self,
        broker: Broker,
        settings: Listener,
        sockets: list[socket.socket],
        count: ListenerCount,
    ) -> WorkerListener:
        number = self._numbers.setdefault(settings.name, len(self._numbers))
        change = ListenerChange(number, settings, broker.node.state.config.connect_timeout_s)
        size = len(msgspec.json.encode(change))
        if size > MESSAGE_BYTES_MAX:
            # A worker would read a part of it, and end, and so would the next one.
            for one in sockets:
                one.close()
            text = f"the settings of {settings.name} have {size} bytes, and at most"
            raise OSError(EMSGSIZE, f"{text} {MESSAGE_BYTES_MAX} with I/O workers")
        for one in sockets:
            one.listen(BACKLOG)
        self._broker = broker
        self.counts[number] = count
        self._close_sockets(number)
        self._open[number] = (change, sockets)
        for worker in self._workers:
            worker.channel.broker = broker
            worker.tell(change, sockets)
        return WorkerListener(self, number)

    def close_listener(self, number: int) -> None:
        # A worker that is slow may accept from it for a while: those clients are cut.
        self.counts.pop(number, None)
        self._close_sockets(number)
        for worker in self._workers:
            worker.tell(ListenerChange(number))

    def _close_sockets(self, number: int) -> None:
        _, sockets = self._open.pop(number, (None, []))
        for one in sockets:
            one.close()

    def _start(self, index: int) -> None:
        worker = WorkerProcess(self, index, self.loop.time())
        worker.channel.broker = self._broker
        self._workers.append(worker)
        logger.info("io_worker_started worker=%d pid=%d", index, worker.process.pid)
        for change, sockets in self._open.values():
            worker.tell(change, sockets)
        task = self.loop.create_task(worker.connect(self.loop))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def replace(self, worker: WorkerProcess) -> None:
        """Starts another worker in place of one that has ended."""
        self._workers.remove(worker)
        # It has closed its stream, so it ends, or never will by itself.
        worker.process.kill()
        code = worker.process.wait()
        if self._is_closed:
            return
        if self._broker is not None:
            self._broker.node.state.stats.io_workers_replaced += 1
        lived_s = self.loop.time() - worker.started_at
        delay_s = 0.0
        if lived_s < QUICK_S:
            delay_s = min(max(1.0, 2 * self._delays.get(worker.index, 0.0)), DELAY_S_MAX)
        self._delays[worker.index] = delay_s
        logger.error(
            "io_worker_lost worker=%d pid=%d code=%d again_in_s=%s text='its clients are"
            " disconnected, and connect again to other workers'",
            worker.index,
            worker.process.pid,
            code,
            delay_s,
        )
        self.loop.call_later(delay_s, self._start_again, worker.index)

    def _start_again(self, index: int) -> None:
        if self._is_closed:
            return
        try:
            self._start(index)
        except OSError as error:
            # An exception of a timer would stop the broker, with the clients of other workers.
            logger.error(
                "io_worker_not_started worker=%d error=%r again_in_s=%s",
                index,
                str(error),
                RETRY_S,
            )
            self.loop.call_later(RETRY_S, self._start_again, index)

    def _watch(self) -> None:
        """Kills workers that answer no ping, because their clients wait for nothing."""
        for worker in list(self._workers):
            if worker.channel.pongs != worker.pongs:
                worker.pongs = worker.channel.pongs
                worker.silent_pings = 0
            elif worker.silent_pings * PING_S >= HANG_S:
                logger.error("io_worker_hangs worker=%d silent_s=%s", worker.index, HANG_S)
                worker.end()
            worker.silent_pings += 1
            worker.channel.ping()
        self._timer = self.loop.call_later(PING_S, self._watch)

    def handle_note(self, index: int, note: WorkerNote) -> None:
        """Logs a worker's line, or counts its event."""
        if note.level:
            text = " ".join([note.event, *(f"{key}=%r" for key in note.fields), "worker=%d"])
            logger.log(note.level, text, *note.fields.values(), index)
        if self._broker is None:
            return
        stats = self._broker.node.state.stats
        if note.event == "handshake_failed":
            stats.handshakes_failed += note.count
        elif note.event == "displaced":
            stats.connections_displaced += note.count
        elif note.event == BEHIND:
            stats.refuse_connection(note.event, note.count)

    def close(self) -> None:
        """Ends all workers at once, and with them the connections that are still open."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for number in list(self._open):
            self._close_sockets(number)
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
