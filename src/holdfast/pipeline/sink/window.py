"""Which messages of a task are on their way, and what is sent again. Pure: no socket, no clock.

Messages are sent in the order they come, at most `messages_max` and about BYTES_MAX at a time. When
the server refuses one for now, nothing more is sent until all that is on the wire is answered;
then, after a pause, sending begins again at the first that is not settled, with that one alone
until it is accepted. Holdfast refuses what follows a refused message of the same producer, so the
order holds there.

With a new connection everything that is not settled is sent again: without a session the server
knows nothing of the old one.
"""

from collections import OrderedDict
from typing import Final

from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.fields import varint
from holdfast.protocol.mqtt.packets import PUBCOMP, PUBREC, PUBREL

BYTES_MAX: Final = 16 << 20
"""Of messages that are not settled; the one that reaches it is the last."""
PAUSE_FIRST_S: Final = 0.05
PAUSE_MAX_S: Final = 5.0
RETRIED: Final = frozenset(
    {
        reasons.UNSPECIFIED_ERROR,
        reasons.SERVER_BUSY,
        reasons.PACKET_IDENTIFIER_IN_USE,
        reasons.QUOTA_EXCEEDED,
    }
)
"""Refusals that may not last."""

_PACKET_IDS: Final = 65_536


class UnknownPacket(Exception):
    """The server acknowledged what was not sent."""

    def __init__(self, packet_id: int) -> None:
        super().__init__(f"the server acknowledged packet id {packet_id}, which is not on the wire")


class RowRefused(Exception):
    """The server refused a message for good. `frame` is what was sent."""

    def __init__(self, frame: bytes, reason: int, detail: str) -> None:
        super().__init__(reasons.NAMES.get(reason, f"reason 0x{reason:02x}"))
        self.frame = frame
        self.reason = reason
        self.detail = detail


class PublishWindow:
    """`settled` counts the messages that the server has taken or refused for good."""

    def __init__(self, messages_max: int) -> None:
        self.settled = 0
        self.resent = 0
        self.unsettled: dict[int, bytes] = {}
        """Packet id to the whole PUBLISH, in the order of publishing."""
        self.last_refusal = ""
        self._messages_max = messages_max
        self._limit = messages_max
        self._bytes = 0
        self._next_id = 1
        # Ids that go out again before anything new does, in order.
        self._backlog: OrderedDict[int, None] = OrderedDict()
        self._refused: set[int] = set()
        # QoS 2: the server has it, and our PUBREL is on its way.
        self._released: set[int] = set()
        self._is_probing = False
        self._resume_at = 0.0
        self._pause_s = PAUSE_FIRST_S

    @property
    def on_wire(self) -> int:
        """Messages that the server owes an answer."""
        return len(self.unsettled) - len(self._backlog) - len(self._refused)

    def has_room(self) -> bool:
        """Whether a new message may be added."""
        return (
            len(self.unsettled) < self._limit
            and self._bytes < BYTES_MAX
            and not self._backlog
            and not self._refused
            and not self._is_probing
        )

    def add(self, first: int, head: bytes, tail: bytes) -> bytes:
        """A new PUBLISH with QoS 1 or 2 that goes out now: its first byte, its topic field, and
        what stands behind the packet id."""
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
        """There is a new connection, without a session from the one before."""
        self.disconnected()
        self._limit = min(self._messages_max, receive_maximum)

    def disconnected(self) -> None:
        """From now on everything that is not settled goes out again, before anything new does."""
        self._backlog = OrderedDict.fromkeys(self.unsettled)
        self._refused.clear()
        self._released.clear()
        self._is_probing = False

    def take(self, now: float) -> list[bytes]:
        """What is to be sent again now."""
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
        """When `take` may have something without another answer; None: not by time alone."""
        return self._resume_at if self._refused and not self.on_wire else None

    def acknowledged(self, packet_id: int) -> None:
        """A PUBACK without an error, which is what nearly all answers are. Raises
        UnknownPacket."""
        if (self._refused or self._backlog) and not self._is_on_wire(packet_id):
            raise UnknownPacket(packet_id)
        frame = self.unsettled.pop(packet_id, None)
        if frame is None:
            raise UnknownPacket(packet_id)
        self._bytes -= len(frame)
        self.settled += 1
        if self._is_probing:
            self._is_probing = False
            self._pause_s = PAUSE_FIRST_S

    def answered(self, kind: int, packet_id: int, reason: int, detail: str, now: float) -> bytes:
        """Any PUBACK, PUBREC or PUBCOMP. Returns what is to be sent for it. Raises UnknownPacket,
        and Refused for a message that is thereby settled."""
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
