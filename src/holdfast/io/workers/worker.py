"""Process of an I/O worker: `python -m holdfast.io.workers.worker DATA_FD CONTROL_FD`.

`pool` starts it. The stream on DATA_FD has the clients' bytes. The socket on CONTROL_FD has one
message for each change of the listeners, with the listening sockets.
"""

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from typing import Final, cast

import msgspec

from holdfast.config.listener import Listener
from holdfast.io.event_loop import descriptors
from holdfast.io.event_loop.failures import first_unexpected, report
from holdfast.io.event_loop.loop import new_event_loop, spare_the_collector
from holdfast.io.settings.security_files import SecurityFileError, load_listener
from holdfast.io.sockets.acceptor import AcceptLoop
from holdfast.io.sockets.listeners import accept_on, stop_accepting
from holdfast.io.workers.messages import MESSAGE_BYTES_MAX, SOCKETS_MAX, ListenerChange
from holdfast.io.workers.reception import WorkerReception
from holdfast.io.workers.relays import BrokerChannel

IGNORED: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that a terminal or a service manager sends to all processes of the broker. It ends its
workers itself, once its clients have their last bytes."""


PR_SET_PDEATHSIG: Final = 1
RETRY_S: Final = 5.0
"""The time in seconds until a listener that could not be opened is tried again."""


class NoteHandler(logging.Handler):
    """A handler that passes the worker's log lines on to the broker's log."""

    def __init__(self, broker: BrokerChannel) -> None:
        super().__init__(logging.INFO)
        self._broker = broker

    def emit(self, record: logging.LogRecord) -> None:
        self._broker.note(record.levelno, "io_worker", text=self.format(record))


class IoWorker:
    """The listeners of one worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop, control: socket.socket) -> None:
        self.broker = BrokerChannel(loop, descriptors.for_clients())
        self._loop = loop
        self._control = control
        self._servers: dict[int, list[asyncio.Server | AcceptLoop]] = {}
        self._changes: asyncio.Queue[tuple[ListenerChange, list[socket.socket]]] = asyncio.Queue()
        self._latest: dict[int, ListenerChange] = {}

    def read_control(self) -> None:
        """Queues the changes that have arrived, in their order."""
        while True:
            try:
                data, files, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES_MAX, SOCKETS_MAX)
            except BlockingIOError:
                return
            if not data:
                self._loop.stop()
                return
            sockets = [socket.socket(fileno=each) for each in files]
            for one in sockets:
                one.setblocking(False)
            change = msgspec.json.decode(data, type=ListenerChange)
            self._latest[change.number] = change
            self._changes.put_nowait((change, sockets))

    async def apply_changes(self) -> None:
        """Applies the queued changes until the worker ends."""
        while True:
            change, sockets = await self._changes.get()
            if self._latest[change.number] is not change:
                continue
            before = self._servers.pop(change.number, [])
            settings = change.settings
            if settings is None:
                stop_accepting(before, keeps_handshakes=False)
                continue
            try:
                self._servers[change.number] = await self._open(change, settings, sockets)
            except (SecurityFileError, OSError) as error:
                self._servers[change.number] = before
                self.broker.note(
                    logging.ERROR,
                    "listener_not_opened",
                    listener=settings.name,
                    error=str(error),
                    again_in_s=str(RETRY_S),
                )
                # A certificate may be half replaced when a worker starts. Without another attempt
                # nobody would accept from this listener until the next reload.
                self._loop.call_later(RETRY_S, self._changes.put_nowait, (change, sockets))
                continue
            stop_accepting(before, keeps_handshakes=True)

    async def _open(
        self, change: ListenerChange, settings: Listener, sockets: list[socket.socket]
    ) -> list[asyncio.Server | AcceptLoop]:
        reception = WorkerReception(
            self._loop,
            change.connect_timeout_s,
            self.broker,
            change.number,
            settings,
        )
        # The broker checks passwords and rights.
        settings = msgspec.structs.replace(settings, password_file="", acl_file="")
        return await accept_on(reception, settings, load_listener(settings).context, sockets)


def end_with_broker() -> None:
    """Lets the kernel kill this process when the broker's ends. The end of the stream does the
    same, but not in a process that is stopped or busy, and a new broker needs its listening
    sockets."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(data_fd: int, control_fd: int) -> int:
    """Runs until the broker ends. The exit code is 1 after an unexpected exception."""
    for each in IGNORED:
        signal.signal(each, signal.SIG_IGN)
    end_with_broker()
    descriptors.raise_limit()
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    control = socket.socket(fileno=control_fd)
    control.setblocking(False)
    worker = IoWorker(loop, control)
    logger = logging.getLogger("holdfast")
    logger.setLevel(logging.INFO)
    logger.addHandler(NoteHandler(worker.broker))
    logger.propagate = False
    failure = first_unexpected(loop)
    failure.add_done_callback(lambda _: loop.stop())
    stream = socket.socket(fileno=data_fd)
    stream.setblocking(False)
    # BrokerChannel has the methods of a protocol, but not the base class.
    protocol = cast(asyncio.Protocol, worker.broker)
    loop.run_until_complete(loop.create_unix_connection(lambda: protocol, sock=stream))
    loop.add_reader(control, worker.read_control)
    changes = loop.create_task(worker.apply_changes())
    changes.add_done_callback(report)
    spare_the_collector()
    loop.run_forever()
    if not failure.done():
        return 0
    print(f"io_worker_failed error={failure.result()!r}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    # Clients learn of the end by their closed sockets: nothing is left to do in good order.
    os._exit(main(int(sys.argv[1]), int(sys.argv[2])))
