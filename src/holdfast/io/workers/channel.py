"""Broker's end of the stream to one I/O worker, with its clients' transports."""

import logging
from asyncio import AbstractEventLoop, TimerHandle
from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.io.event_loop.broker import Broker
from holdfast.io.sockets.driver import ConnectionDriver, ListenerCount
from holdfast.io.sockets.transport import ClientTransport
from holdfast.io.workers.stream import WORKER_NUMBER, RelayStream
from holdfast.protocol.relay.credit import ReceivingCredit, SendingCredit
from holdfast.protocol.relay.frames import (
    CLOSE,
    CREDIT,
    CUT,
    DATA,
    ENDED,
    HEADER_BYTES,
    NOTE,
    OPENED,
    PING,
    PONG,
    UPGRADING,
    RelayError,
    count_frame,
    decode_arrival,
    frame,
)

logger = logging.getLogger("holdfast")

ANNOUNCEMENTS: Final = (OPENED, UPGRADING, ENDED, NOTE)
"""The frames whose bytes the worker's own credit bounds."""


DRAIN_S: Final = 1.0
"""The longest time in seconds that a takeover waits for a worker that does not answer."""


class Drain:
    """A takeover that waits for a worker's answer, or for the time without one."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then: Callable[[], None] | None = then
        self.timer: TimerHandle | None = None

    def end(self) -> None:
        """Continues the takeover, once."""
        then = self._then
        self._then = None
        if self.timer is not None:
            self.timer.cancel()
        if then is not None:
            then()


class RelayedConnection(ConnectionDriver):
    """The transport of a client whose socket is in a worker.

    While the node has paused the input, what arrives waits here, the end included: the node must
    process what the client sent before it closed the connection.
    """

    def __init__(
        self,
        broker: Broker,
        listener: ListenerCount,
        remote: str,
        channel: "WorkerChannel",
        number: int,
    ) -> None:
        super().__init__(broker, listener, remote)
        self._channel = channel
        self._number = number
        self._sending = SendingCredit()
        self._receiving = ReceivingCredit()
        self._waiting: bytearray | None = None
        # Bytes of frames that the node has not processed.
        self._unconfirmed = 0
        self._reading_paused = False
        self._has_ended = False
        self._is_cut = False

    # The channel

    def receive(self, data: bytes) -> None:
        """Hands bytes from the client to the node, or keeps them while its input is paused."""
        if self._is_cut or self.connection is None:
            return
        self._unconfirmed += HEADER_BYTES + len(data)
        if self._waiting is not None:
            self._waiting += data
        elif self._reading_paused:
            self._waiting = bytearray(data)
        else:
            self.take(data)
            self._confirm_processed()

    def confirm(self, size: int) -> None:
        """Counts bytes that the worker has written to the socket."""
        if self._sending.restore(size):
            self.relieve()

    def end(self) -> None:
        """Reports the end, once everything that came before it is processed."""
        self._has_ended = True
        connection = self.connection
        waits = self._reading_paused or self._waiting is not None
        is_over = connection is None or connection.closing or self._is_cut
        if is_over or not waits:
            self.leave()

    # The node

    def write(self, data: bytes) -> None:
        if self._sending.spend(self._channel.send_data(self._number, data)):
            self.congest()

    def finish(self) -> None:
        self._channel.send(frame(CLOSE, self._number))
        self._leave_soon()

    def cut(self) -> None:
        self._is_cut = True
        self._channel.send(frame(CUT, self._number))
        self._leave_soon()

    def _leave_soon(self) -> None:
        """Reports an end that has waited for the node. The worker will not report it again."""
        if self._has_ended:
            self.broker.loop.call_soon(self.leave)

    def has_left(self) -> bool:
        return self._has_ended or self._is_cut

    def drain(self, newer: ClientTransport, then: Callable[[], None]) -> None:
        if isinstance(newer, RelayedConnection) and newer._channel is self._channel:
            then()
            return
        drain = Drain(then)
        drain.timer = self.broker.loop.call_later(DRAIN_S, drain.end)
        self._channel.ping(drain.end)

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            # As from a socket: not within the node's turn.
            self.broker.loop.call_soon(self._continue)

    def _continue(self) -> None:
        """Processes what has waited, unless the node has paused the input again."""
        if self._reading_paused:
            return
        waiting = self._waiting
        self._waiting = None
        if waiting is not None and self.connection is not None and not self._is_cut:
            self.take(bytes(waiting))
        self._confirm_processed()
        if self._has_ended and not self._reading_paused:
            self.leave()

    def _confirm_processed(self) -> None:
        if not self._reading_paused and self._unconfirmed:
            due = self._receiving.finish(self._unconfirmed)
            self._unconfirmed = 0
            if due:
                self._channel.send(count_frame(CREDIT, self._number, due))


class WorkerChannel(RelayStream):
    """The stream to one worker, with the connections of its clients."""

    def __init__(
        self,
        loop: AbstractEventLoop,
        listeners: dict[int, ListenerCount],
        on_note: Callable[[bytes], None],
        on_lost: Callable[[], None],
    ) -> None:
        """`listeners`: by number, shared with the pool. `on_note`: called with the content of each
        NOTE. `on_lost`: called when the worker is gone, after its clients."""
        super().__init__(loop)
        self.broker: Broker | None = None
        self.listeners = listeners
        self.connections: dict[int, RelayedConnection] = {}
        self.pongs = 0
        # What waits for the answer to each ping, the oldest first.
        self._pinged: deque[Callable[[], None] | None] = deque()
        self._announced = ReceivingCredit()
        self._on_note = on_note
        self._on_lost = on_lost

    def data_received(self, data: bytes) -> None:
        """Processes frames. Bytes that are none end the worker."""
        reader = self._reader
        try:
            reader.feed(data)
            while reader.next():
                if reader.kind == DATA:
                    connection = self.connections.get(reader.number)
                    if connection is not None:
                        connection.receive(reader.content())
                else:
                    self._process(reader.kind, reader.number)
                    self._confirm_announced(reader.kind, reader.end - reader.start)
        except RelayError as error:
            logger.critical("io_worker_error error=%r", str(error))
            self.abort()

    def _process(self, kind: int, number: int) -> None:
        reader = self._reader
        if kind == NOTE:
            self._on_note(reader.content())
            return
        if kind == PONG:
            self._handle_pong()
            return
        if kind == OPENED:
            self._open(number)
            return
        connection = self.connections.get(number)
        if connection is None:
            return
        if kind == CREDIT:
            connection.confirm(reader.count())
        elif kind == UPGRADING:
            connection.buffer_upgrade(reader.count())
        elif kind == ENDED:
            del self.connections[number]
            connection.end()
        else:
            raise RelayError(f"a frame of kind {kind} from a worker")

    def _confirm_announced(self, kind: int, size: int) -> None:
        """Confirms a frame that `BrokerChannel.announce` has sent."""
        if kind in ANNOUNCEMENTS:
            due = self._announced.finish(HEADER_BYTES + size)
            if due:
                self.send(count_frame(CREDIT, WORKER_NUMBER, due))

    def _open(self, number: int) -> None:
        arrival = decode_arrival(self._reader.content())
        listener = self.listeners.get(arrival.listener)
        broker = self.broker
        if broker is None or number in self.connections:
            raise RelayError(f"connection {number} of listener {arrival.listener}")
        if listener is None:
            self.send(frame(CUT, number))
            return
        connection = RelayedConnection(broker, listener, arrival.remote, self, number)
        self.connections[number] = connection
        if not connection.admit(arrival.certificate_name):
            connection.cut()
        elif connection.connection is not None:
            connection.connection.is_remote = True

    def ping(self, then: Callable[[], None] | None = None) -> None:
        """Asks whether the worker runs; `pongs` counts its answers. `then`: called once what its
        sockets had received is here, or the worker has ended."""
        if self._transport is not None:
            self._pinged.append(then)
            self.send(frame(PING, WORKER_NUMBER))
        elif then is not None:
            then()

    def _handle_pong(self) -> None:
        if not self._pinged:
            raise RelayError("an answer to no ping")
        self.pongs += 1
        then = self._pinged.popleft()
        if then is not None:
            then()

    def abort(self) -> None:
        """Ends the stream, and so the worker."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Reports the end of all clients of the worker, whatever waits of them."""
        self._transport = None
        connections = list(self.connections.values())
        self.connections.clear()
        for connection in connections:
            connection.leave()
        while self._pinged:
            then = self._pinged.popleft()
            if then is not None:
                then()
        self._on_lost()
