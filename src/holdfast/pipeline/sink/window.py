"""Tracks a task's messages that are under way, and those to send again. Pure: no socket, no clock.

Messages are sent in order, at most `messages_max` and about BYTES_MAX at a time. After a transient
refusal nothing more is sent until everything on the wire is answered. After a pause, sending begins
again at the first message that is not resolved, and with that one alone until it is accepted.

Holdfast refuses the messages that follow a refused one of the same producer, so the order holds
there. Without that rule a message could be lost: 5 is refused, 6 is accepted, and 5 sent again is
dropped as a lower sequence.

A new connection has no session, so the server has no state of the old one. Everything that is not
resolved is sent again.
"""

from collections import OrderedDict
from typing import Final

from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.fields import varint
from holdfast.protocol.mqtt.packets import PUBCOMP, PUBREC, PUBREL

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
