"""Publishes one task's messages. It reconnects as needed and waits for the acknowledgements.

Messages are sent in order, at most `messages_max` and about BYTES_MAX at a time. After a transient
refusal nothing more is sent until everything on the wire is answered. After a pause, sending begins
again at the first message that is not resolved, and with that one alone until it is accepted.

Holdfast refuses the messages that follow a refused one of the same producer, so the order holds
there. Without that rule a message could be lost: 5 is refused, 6 is accepted, and 5 sent again is
dropped as a lower sequence.

A new connection has no session, so the server has no state of the old one. Everything that is not
resolved is sent again.
"""

import logging
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.client.errors import ClientError, PublishRefused, TimedOut
from holdfast.client.options import Options
from holdfast.client.protocol.negotiation import ServerLimits, reason_string
from holdfast.client.servers import Server
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import PINGREQ_BYTES, encode, encode_ack
from holdfast.protocol.mqtt.fields import varint
from holdfast.protocol.mqtt.packets import PUBCOMP, PUBREC, PUBREL, Ack, Disconnect
from holdfast_lake.sink.link import (
    BrokerLink,
    LinkDialer,
    PublishError,
    disconnected,
    is_transient,
)

BYTES_MAX: Final = 16 << 20
"""The bytes of unresolved messages at which no more are added. The message that reaches it is still
added."""
PAUSE_FIRST_S: Final = 0.05
PAUSE_MAX_S: Final = 5.0
"""The longest pause in seconds after a transient refusal. The first is PAUSE_FIRST_S, and each
doubles."""
RETRIED: Final = frozenset(
    {
        reasons.UNSPECIFIED_ERROR,
        reasons.SERVER_BUSY,
        reasons.PACKET_IDENTIFIER_IN_USE,
        reasons.QUOTA_EXCEEDED,
    }
)
"""Refusals that may be transient."""

_PACKET_IDS: Final = 65_536


class UnknownPacket(Exception):
    """The server acknowledged a packet that was not sent."""

    def __init__(self, packet_id: int) -> None:
        super().__init__(f"the server acknowledged packet id {packet_id}, which is not on the wire")


class RowRefused(Exception):
    """The server refused a message permanently. `frame` is the PUBLISH that was sent."""

    def __init__(self, frame: bytes, reason: int, detail: str) -> None:
        super().__init__(reasons.NAMES.get(reason, f"reason 0x{reason:02x}"))
        self.frame = frame
        self.reason = reason
        self.detail = detail


class PublishWindow:
    """The window of one task. `resolved` counts the messages that the server has accepted or
    refused permanently."""

    def __init__(self, messages_max: int) -> None:
        self.resolved = 0
        self.resent = 0
        self.unsettled: dict[int, bytes] = {}
        """The PUBLISH per packet id, in the order of publishing."""
        self.last_refusal = ""
        self._messages_max = messages_max
        self._limit = messages_max
        self._bytes = 0
        self._next_id = 1
        # The packet ids to send again before anything new, in order.
        self._backlog: OrderedDict[int, None] = OrderedDict()
        self._refused: set[int] = set()
        # QoS 2: the server has the message, and PUBREL is on its way.
        self._released: set[int] = set()
        self._is_probing = False
        self._resume_at = 0.0
        self._pause_s = PAUSE_FIRST_S

    @property
    def on_wire(self) -> int:
        """The number of messages that the server has not answered yet."""
        return len(self.unsettled) - len(self._backlog) - len(self._refused)

    def has_room(self) -> bool:
        """Returns whether a new message may be added."""
        return (
            len(self.unsettled) < self._limit
            and self._bytes < BYTES_MAX
            and not self._backlog
            and not self._refused
            and not self._is_probing
        )

    def add(self, first: int, head: bytes, tail: bytes) -> bytes:
        """Adds a message with QoS 1 or 2, and returns the PUBLISH to send now.

        The arguments are its first byte, its topic field and the bytes after the packet id.
        """
        packet_id = self._next_id
        while packet_id in self.unsettled:
            packet_id = packet_id % (_PACKET_IDS - 1) + 1
        self._next_id = packet_id % (_PACKET_IDS - 1) + 1
        frame = b"%c%b%b%c%c%b" % (
            first,
            varint(len(head) + 2 + len(tail)),
            head,
            packet_id >> 8,
            packet_id & 255,
            tail,
        )
        self.unsettled[packet_id] = frame
        self._bytes += len(frame)
        return frame

    def connected(self, receive_maximum: int) -> None:
        """Notes a new connection, without a session from the last one."""
        self.disconnected()
        self._limit = min(self._messages_max, receive_maximum)

    def disconnected(self) -> None:
        """Queues everything that is not resolved, to be sent again before anything new."""
        self._backlog = OrderedDict.fromkeys(self.unsettled)
        self._refused.clear()
        self._released.clear()
        self._is_probing = False

    def pop_due(self, now: float) -> list[bytes]:
        """Returns the messages to send again now."""
        if self._refused and not self.on_wire and now >= self._resume_at:
            self._refused.clear()
            self._backlog = OrderedDict.fromkeys(self.unsettled)
            self._is_probing = True
        limit = 1 if self._is_probing else self._limit
        frames: list[bytes] = []
        while self._backlog and not self._refused and self.on_wire < limit:
            packet_id, _ = self._backlog.popitem(last=False)
            frames.append(self.unsettled[packet_id])
        self.resent += len(frames)
        return frames

    def timer(self) -> float | None:
        """Returns the time at which `pop_due` may return messages without another answer. None: it
        depends on answers."""
        return self._resume_at if self._refused and not self.on_wire else None

    def acknowledged(self, packet_id: int) -> None:
        """Processes a successful PUBACK, which nearly all answers are. Raises UnknownPacket."""
        if (self._refused or self._backlog) and not self._is_on_wire(packet_id):
            raise UnknownPacket(packet_id)
        frame = self.unsettled.pop(packet_id, None)
        if frame is None:
            raise UnknownPacket(packet_id)
        self._bytes -= len(frame)
        self.resolved += 1
        if self._is_probing:
            self._is_probing = False
            self._pause_s = PAUSE_FIRST_S

    def handle_acknowledgement(
        self, kind: int, packet_id: int, reason: int, detail: str, now: float
    ) -> bytes:
        """Processes any PUBACK, PUBREC or PUBCOMP, and returns the bytes to send for it.

        Raises UnknownPacket, and RowRefused for a message that the server refused permanently.
        """
        if not self._is_on_wire(packet_id):
            raise UnknownPacket(packet_id)
        frame = self.unsettled[packet_id]
        if kind == PUBCOMP or reason < 0x80:
            if kind == PUBREC:
                self._released.add(packet_id)
                return encode_ack(PUBREL, packet_id, reasons.SUCCESS, 5)
            self._released.discard(packet_id)
            self.acknowledged(packet_id)
        elif reason in RETRIED:
            self._refuse(packet_id, reason, detail, now)
        else:
            self.acknowledged(packet_id)
            raise RowRefused(frame, reason, detail)
        return b""

    def _is_on_wire(self, packet_id: int) -> bool:
        return (
            packet_id in self.unsettled
            and packet_id not in self._refused
            and packet_id not in self._backlog
        )

    def _refuse(self, packet_id: int, reason: int, detail: str, now: float) -> None:
        name = reasons.NAMES.get(reason, f"reason 0x{reason:02x}")
        self.last_refusal = f"{name}: {detail}" if detail else name
        if not self._refused:
            self._resume_at = now + self._pause_s
            self._pause_s = min(self._pause_s * 2, PAUSE_MAX_S)
        self._refused.add(packet_id)


logger = logging.getLogger("holdfast.pipeline")

CHUNK_BYTES: Final = 1 << 16
"""The bytes that are collected before they are sent."""
RESPONSE_TIMEOUT_S: Final = 20.0
"""The seconds of silence after which a server that owes acknowledgements counts as down. After half
of that it is sent a PINGREQ."""
UNSENT_BYTES_MAX: Final = 1 << 20
"""The most bytes that wait for the socket, QoS 0 included."""
PATIENCE_S: Final = 0.5
"""The longest wait in seconds before silence and progress are checked again."""
FRUITLESS_MAX: Final = 3
"""The failures in a row (lost connections and transient refusals) after which only acknowledgements
count as progress. Sent bytes do not count then: they may be the reason why the server closes the
connections."""
CLOSE_S: Final = 5.0
"""The most seconds to wait for the server to close the connection."""

_IDENTITY_REFUSED: Final = ("producer epoch is fenced", "the producer belongs to", "hf-seq")
"""The beginnings of Holdfast's reason strings that reject the writer and not the row."""


class Publisher:
    """The messages of one task and the connection that carries them.

    `on_connected` is called for each connection. `on_refused` is called for each message that the
    server rejects, with its PUBLISH and the reason. An exception from either ends the task.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        options: Options,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        inflight_max: int,
        retry_timeout_s: float,
        on_connected: Callable[[BrokerLink], None],
        on_refused: Callable[[bytes, str], None],
    ) -> None:
        self.connections = 0
        self.window = PublishWindow(inflight_max)
        self._dialer = LinkDialer(servers, options, tls, server_name, retry_timeout_s)
        self._level = options.level
        self._retry_timeout_s = retry_timeout_s
        self._on_connected = on_connected
        self._on_refused = on_refused
        self._link: BrokerLink | None = None
        self._limits = ServerLimits()
        self._limits_are_tight = False
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._sending = memoryview(b"")
        """The bytes that the socket has not taken yet."""
        self._resolved_before = 0
        self._fruitless = 0
        """The lost connections and transient refusals since the last acknowledgement."""
        self._progress_at = 0.0
        self._received_at = 0.0
        # The time at which the last call returned to the caller.
        self._away_at = 0.0
        self._has_pinged = False
        self._last_error = ""

    def publish(self, first: int, topic: bytes, tail: bytes) -> None:
        """Publishes a message: its first byte, its topic field and the bytes after the packet id.

        The call waits while the window is full. Raises PublishError.
        """
        window = self.window
        if not window.unsettled and not self._out and not self._sending:
            self._progress_at = self._received_at = self._away_at = time.monotonic()
            if self._link is None:
                self._connect()
        if self._limits_are_tight and not self._is_allowed(first, topic, tail):
            return
        while not window.has_room():
            self._exchange(self._patience_s())
        if first & 6:
            frame = window.add(first, topic, tail)
        else:
            frame = b"%c%b%b%b" % (first, varint(len(topic) + len(tail)), topic, tail)
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes >= CHUNK_BYTES:
            self._exchange(0.0)
            while self._out_bytes + len(self._sending) > UNSENT_BYTES_MAX:
                self._exchange(self._patience_s())

    def push(self) -> None:
        """Sends the collected bytes as far as the socket takes them, because the next message may
        come late.

        Raises PublishError.
        """
        if self._out:
            self._exchange(0.0)

    def finish(self) -> None:
        """Waits until the server has everything, and disconnects. Raises PublishError."""
        while self.window.unsettled or self._out or self._sending:
            self._exchange(self._patience_s())
        if self._link is not None:
            self._link.shut_down(encode(Disconnect(), self._level), CLOSE_S)
        self.close()

    def close(self) -> None:
        """Closes the connection at once."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _patience_s(self) -> float:
        resume_at = self.window.timer()
        if resume_at is None:
            return PATIENCE_S
        return min(PATIENCE_S, max(0.001, resume_at - time.monotonic()))

    def _is_allowed(self, first: int, topic: bytes, tail: bytes) -> bool:
        try:
            self._limits.check_publish(first >> 1 & 3, bool(first & 1), len(topic) + len(tail))
        except PublishRefused as error:
            self._on_refused(b"\x30\0" + topic, str(error))
            return False
        return True

    def _exchange(self, wait_s: float) -> None:
        """Sends what the socket takes, and processes what has arrived. Waits at most `wait_s` for
        either.

        Raises PublishError.
        """
        # The time between two calls does not count as silence or as lack of progress, because
        # nothing was read meanwhile.
        away_s = time.monotonic() - self._away_at
        self._progress_at += away_s
        self._received_at += away_s
        try:
            link = self._connect() if self._link is None else self._link
            for frame in self.window.pop_due(time.monotonic()):
                self._out.append(frame)
                self._out_bytes += len(frame)
            sent = self._send(link)
            if wait_s and not sent:
                link.wait(wait_s, to_send=bool(self._sending))
            data = link.receive()
            now = time.monotonic()
            if data:
                self._has_pinged = False
                self._receive(link, data, now)
            if data or sent:
                self._received_at = now
            self._note_progress(sent, now)
            self._check_silence(link, now)
        except (ClientError, UnknownPacket) as error:
            self._lose(error)
        self._away_at = time.monotonic()
        self._check_progress(self._away_at)

    def _note_progress(self, sent: int, now: float) -> None:
        """Notes acknowledgements as progress, and sent bytes as well while few attempts have
        failed."""
        if self.window.resolved != self._resolved_before:
            self._resolved_before = self.window.resolved
            self._progress_at = now
            self._fruitless = 0
            self._last_error = ""
            self._dialer.succeeded()
        elif sent and self._sending and self._fruitless < FRUITLESS_MAX:
            # A large message may be on its way for longer than any timeout.
            self._progress_at = now

    def _send(self, link: BrokerLink) -> int:
        sent = 0
        while self._sending or self._out:
            if not self._sending:
                self._sending = memoryview(b"".join(self._out))
                self._out.clear()
                self._out_bytes = 0
            taken = link.send(self._sending)
            if not taken:
                break
            self._sending = self._sending[taken:]
            sent += taken
        return sent

    def _receive(self, link: BrokerLink, data: bytes, now: float) -> None:
        if link.rest:
            data = link.rest + data
            link.rest = b""
        position = self._take_acknowledgements(data)
        if position == len(data):
            return
        for packet in link.packets(data[position:]):
            if isinstance(packet, Ack):
                self._handle_acknowledgement(packet, now)
            elif isinstance(packet, Disconnect):
                raise disconnected(link.server, packet)

    def _take_acknowledgements(self, data: bytes) -> int:
        """Handles the successful PUBACKs at the beginning of `data`, which are nearly all packets.

        Returns the position at which they end.
        """
        acknowledged = self.window.acknowledged
        position = 0
        last = len(data) - 4
        while position <= last and data[position] == 0x40:
            length = data[position + 1]
            if length == 2:
                end = position + 4
            elif length == 3 and position < last and data[position + 4] < 0x80:
                end = position + 5
            else:
                break
            acknowledged(data[position + 2] << 8 | data[position + 3])
            position = end
        return position

    def _handle_acknowledgement(self, packet: Ack, now: float) -> None:
        """Processes an acknowledgement with a reason code, or one of QoS 2."""
        detail = reason_string(packet.properties)
        try:
            reply = self.window.handle_acknowledgement(
                packet.kind, packet.packet_id, packet.reason, detail, now
            )
        except RowRefused as error:
            text = f"{error}: {detail}" if detail else str(error)
            if detail.startswith(_IDENTITY_REFUSED):
                raise PublishError(
                    f"the broker takes no messages of this writer: {text}. Does another user or "
                    "program write with the same checkpoint or writeId?"
                ) from None
            self._on_refused(error.frame, text)
        else:
            if reply:
                self._out.append(reply)
            if packet.reason in RETRIED:
                self._fruitless += 1
                self._last_error = self.window.last_refusal

    def _check_silence(self, link: BrokerLink, now: float) -> None:
        """Checks that the server is not silent for too long. Raises TimedOut."""
        if not self.window.on_wire:
            self._received_at = now
            return
        silence_s = now - self._received_at
        if silence_s > RESPONSE_TIMEOUT_S:
            raise TimedOut(f"{link.server.address} has not answered for {silence_s:.0f} s")
        if silence_s > RESPONSE_TIMEOUT_S / 2 and not self._has_pinged:
            self._has_pinged = True
            self._out.append(PINGREQ_BYTES)

    def _check_progress(self, now: float) -> None:
        """Checks that messages are acknowledged. Raises PublishError."""
        stuck_s = now - self._progress_at
        if stuck_s < self._retry_timeout_s or not (self.window.unsettled or self._sending):
            return
        raise PublishError(
            f"{len(self.window.unsettled)} messages wait, and nothing was acknowledged for "
            f"{stuck_s:.0f} s (retryTimeout): {self._last_error or 'no answer'}"
        )

    def _lose(self, error: Exception) -> None:
        """Drops the connection. Messages in the window are sent again; QoS 0 is at most once.

        Raises PublishError if another connection would not help.
        """
        link = self._link
        self._fruitless += 1
        if link is not None:
            if isinstance(error, TimedOut):
                self._dialer.avoid(link.server)
            link.close()
            self._link = None
        self.window.disconnected()
        self._out.clear()
        self._out_bytes = 0
        self._sending = memoryview(b"")
        self._last_error = str(error)
        logger.warning("%s; %d messages go out again", error, len(self.window.unsettled))
        if not is_transient(error):
            raise PublishError(str(error))

    def _connect(self) -> BrokerLink:
        """Connects, and prepares the window for the new connection. Raises PublishError."""
        link = self._dialer.connect(self._progress_at)
        self._link = link
        self.connections += 1
        self._limits = link.limits
        self._limits_are_tight = link.limits.are_tight()
        self._received_at = time.monotonic()
        self._has_pinged = False
        self.window.connected(link.limits.receive_maximum)
        self._on_connected(link)
        return link
