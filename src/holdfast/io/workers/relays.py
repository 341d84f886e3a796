"""A worker's side: the sockets of its clients, and the stream to the broker.

Neither class derives from asyncio's, so both compile to native classes.
"""

import json
import logging
from asyncio import AbstractEventLoop, BaseTransport, Transport
from typing import Final, cast

from holdfast.config.listener import Listener
from holdfast.io.sockets.driver import proved_name
from holdfast.io.sockets.tcp import CLOSE_TIMEOUT_S
from holdfast.io.workers.messages import BEHIND
from holdfast.io.workers.stream import WORKER_NUMBER, RelayStream
from holdfast.node.connections.pending_connects import PendingHandshake
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
    ClientArrival,
    RelayError,
    count_frame,
    frame,
)

WRITE_BUFFER_BYTES: Final = 32_768
"""The unsent bytes of a socket above which the broker gets no credit for what it sends."""
NOTE_CHARACTERS_MAX: Final = 2000
"""The most characters of one value of a log line on its way to the broker."""
NUMBERS: Final = 1 << 32
CONNACK_FIRST_BYTE: Final = 0x20
"""The first byte of a CONNACK, which has no flags. [MQTT-2.1.3-1]"""


class Relay:
    """An asyncio protocol for the socket of one client."""

    def __init__(
        self, broker: "BrokerChannel", listener: int, settings: Listener, remote: str
    ) -> None:
        self._broker = broker
        self._listener = listener
        self._settings = settings
        self.remote = remote
        # Whether an AcceptLoop has made room for the socket. It passes the address on.
        self._is_counted = bool(remote)
        self._is_silent = True
        # Below 0: the connection was not admitted.
        self._number = -1
        self._transport: Transport | None = None
        self._sending = SendingCredit()
        self._receiving = ReceivingCredit()
        # Bytes from the broker that the socket may not have taken yet.
        self._unconfirmed = 0
        self._is_congested = False

    # The socket

    def connection_made(self, transport: BaseTransport) -> None:
        self._transport = transport = cast(Transport, transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if not self.remote:
            peer = transport.get_extra_info("peername")
            self.remote = f"{peer[0]}:{peer[1]}" if peer else "?"
        name = proved_name(transport, self._settings.certificate_user)
        if name is None or not self._broker.has_room(
            self.remote, self._settings.name, is_counted=self._is_counted
        ):
            transport.abort()
            return
        self._number = self._broker.add(self)
        arrival = ClientArrival(self._listener, self.remote, name)
        self._broker.announce(frame(OPENED, self._number, arrival.encode()))

    def data_received(self, data: bytes) -> None:
        size = self._broker.send_data(self._number, data)
        if self._sending.spend(size) and self._transport is not None:
            self._transport.pause_reading()

    def buffer_upgrade(self, size_bytes: int) -> None:
        if not self._broker.is_behind():
            self._broker.announce(count_frame(UPGRADING, self._number, size_bytes))

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_congested = True

    def resume_writing(self) -> None:
        self._is_congested = False
        self._confirm(0)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._number < 0:
            return
        self._broker.remove(self._number)
        self._broker.announce(frame(ENDED, self._number))

    # The broker

    def find_remote(self) -> str:
        """The client's address."""
        return self.remote

    def write(self, data: bytes) -> None:
        """Sends bytes to the client, and confirms them when the socket has taken them, but for
        WRITE_BUFFER_BYTES."""
        # AUTH proves nothing yet.
        if self._is_silent and data[0] == CONNACK_FIRST_BYTE:
            self._is_silent = False
            self._broker.note_answered(self)
        if self._transport is not None:
            self._transport.write(data)
            self._confirm(HEADER_BYTES + len(data))

    def _confirm(self, size: int) -> None:
        self._unconfirmed += size
        if not self._is_congested and self._unconfirmed:
            due = self._receiving.finish(self._unconfirmed)
            self._unconfirmed = 0
            if due:
                self._broker.send(count_frame(CREDIT, self._number, due))

    def credit(self, size: int) -> None:
        """Counts bytes that the broker has processed."""
        transport = self._transport
        if self._sending.restore(size) and transport is not None and not transport.is_closing():
            transport.resume_reading()

    def close(self) -> None:
        """Closes the socket after the bytes written, or soon if the client does not take them."""
        transport = self._transport
        if transport is not None:
            transport.close()
            if transport.get_write_buffer_size():
                self._broker.loop.call_later(CLOSE_TIMEOUT_S, transport.abort)

    def cut(self) -> None:
        """Closes the socket at once."""
        if self._transport is not None:
            self._transport.abort()


class BrokerChannel(RelayStream):
    """The stream to the broker. Its end is the worker's end.

    The worker is behind while the broker has confirmed too few of the frames that sockets cause
    when they come and go: the credit of no connection bounds these. Such a worker closes new
    sockets and leaves out log lines.

    A worker without descriptors for another socket cuts the oldest handshake, or client without a
    CONNACK. The broker does the same, but may learn of a new socket too late.
    """

    def __init__(self, loop: AbstractEventLoop, sockets_max: int) -> None:
        super().__init__(loop)
        self._handshakes = 0
        self._sockets_max = sockets_max
        self._relays: dict[int, Relay] = {}
        # Handshakes, and clients without a CONNACK, the oldest first.
        self._unproved: dict[PendingHandshake | Relay, None] = {}
        self._last_number = WORKER_NUMBER
        self._announcing = SendingCredit()
        self._sockets_refused = 0
        self._notes_left_out = 0

    def connection_lost(self, error: Exception | None) -> None:
        self.loop.stop()

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        while reader.next():
            relay = self._relays.get(reader.number)
            kind = reader.kind
            if kind == PING:
                # After another round of the loop: then all that the sockets had received before
                # is on its way, in front of the answer.
                self.loop.call_soon(self.loop.call_soon, self._send_pong)
            elif kind == CREDIT and reader.number == WORKER_NUMBER:
                self._confirm(reader.count())
            elif relay is None:
                # Its socket is closed; the broker does not know yet.
                continue
            elif kind == DATA:
                relay.write(reader.content())
            elif kind == CREDIT:
                relay.credit(reader.count())
            elif kind == CLOSE:
                relay.close()
            elif kind == CUT:
                relay.cut()
            else:
                raise RelayError(f"a frame of kind {kind} from the broker")

    def _send_pong(self) -> None:
        self.send(frame(PONG, WORKER_NUMBER))

    def add(self, relay: Relay) -> int:
        """Gives a new connection its number."""
        number = (self._last_number + 1) % NUMBERS
        while number in self._relays or number == WORKER_NUMBER:
            number = (number + 1) % NUMBERS
        self._last_number = number
        self._relays[number] = relay
        self._unproved[relay] = None
        return number

    def begin_handshake(self, handshake: PendingHandshake) -> None:
        """Counts a handshake."""
        self._handshakes += 1
        self._unproved[handshake] = None

    def end_handshake(self, handshake: PendingHandshake) -> None:
        """Removes a handshake."""
        self._handshakes -= 1
        self._unproved.pop(handshake, None)

    def note_answered(self, relay: Relay) -> None:
        """Notes that a client has got its CONNACK."""
        self._unproved.pop(relay, None)

    def remove(self, number: int) -> None:
        """Forgets a client whose socket is closed."""
        relay = self._relays.pop(number, None)
        if relay is not None:
            self._unproved.pop(relay, None)

    def note(self, level: int, event: str, **fields: str) -> None:
        """Puts a line into the broker's log. Level 0: only count the event."""
        if self._announcing.is_exhausted:
            self._notes_left_out += 1
            return
        cut = {key: value[:NOTE_CHARACTERS_MAX] for key, value in fields.items()}
        self._send_note({"level": level, "event": event, "fields": cut})

    def _send_note(self, note: dict[str, object]) -> None:
        self.announce(frame(NOTE, WORKER_NUMBER, json.dumps(note).encode()))

    def announce(self, one: bytes) -> None:
        """Sends a frame that the credit of no connection bounds."""
        self._announcing.spend(len(one))
        self.send(one)

    def is_behind(self) -> bool:
        """Whether the broker must confirm announcements before it gets more of them."""
        return self._announcing.is_exhausted

    def is_full(self, *, is_counted: bool = False) -> bool:
        """Whether no descriptor is left for another socket. `is_counted`: for one that counts as a
        handshake already."""
        return len(self._relays) + self._handshakes - is_counted >= self._sockets_max

    def has_room(self, remote: str, listener: str, *, is_counted: bool = False) -> bool:
        """Makes room for a new socket if necessary. False: it must be closed, and that is counted
        or logged."""
        if self.is_behind():
            self._sockets_refused += 1
            return False
        if not self.is_full(is_counted=is_counted) or self._displace():
            return True
        text = f"{self._sockets_max} in an I/O worker"
        self.note(logging.INFO, "connections_full", remote=remote, listener=listener, error=text)
        return False

    def _displace(self) -> bool:
        """Cuts the oldest handshake or client without a CONNACK. False: there is none."""
        oldest = next(iter(self._unproved), None)
        if oldest is None:
            return False
        del self._unproved[oldest]
        if isinstance(oldest, PendingHandshake):
            oldest.cancel()
        else:
            oldest.cut()
        self.note(0, "displaced")
        return True

    def _confirm(self, size: int) -> None:
        """Counts bytes of announcements that the broker has processed."""
        if self._announcing.restore(size):
            refused, lines = self._sockets_refused, self._notes_left_out
            self._send_note(
                {
                    "level": logging.WARNING,
                    "event": BEHIND,
                    "fields": {"sockets": refused, "lines": lines},
                    "count": refused,
                }
            )
            self._sockets_refused = 0
            self._notes_left_out = 0
