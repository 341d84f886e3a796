"""Messages for the server: packet ids, the send window, and resending.

This state outlives a connection: it is the client's half of the session. It sends nothing itself;
`ClientProtocol` encodes the messages from `next_ready` and `resume`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.client.errors import QueueFull

WAITING: Final = 0
AWAITING_PUBACK: Final = 1
AWAITING_PUBREC: Final = 2
AWAITING_PUBCOMP: Final = 3

PACKET_ID_MAX: Final = 65535


@dataclass(eq=False)
class OutgoingPublish:
    """One message for the server. `handle` identifies it to the application. It gets its packet id
    when it is first sent, and keeps it until its last acknowledgement."""

    handle: int
    topic: bytes
    payload: bytes
    qos: int
    retain: bool
    properties: bytes
    topic_alias: int
    packet_id: int = 0
    state: int = WAITING
    dup: bool = False


class PacketIds:
    """The packet ids in use, of PUBLISH, SUBSCRIBE and UNSUBSCRIBE together."""

    def __init__(self, id_max: int = PACKET_ID_MAX) -> None:
        self.used: set[int] = set()
        self.id_max: Final = id_max
        self._last = 0

    def is_full(self) -> bool:
        """Whether all packet ids are in use."""
        return len(self.used) >= self.id_max

    def allocate(self) -> int:
        """A free id [MQTT-2.2.1-3]. Raises `QueueFull` if all are in use."""
        if self.is_full():
            raise QueueFull(f"all {self.id_max:,} packet ids wait for an acknowledgement")
        packet_id = self._last % self.id_max + 1
        while packet_id in self.used:
            packet_id = packet_id % self.id_max + 1
        self._last = packet_id
        self.used.add(packet_id)
        return packet_id

    def release(self, packet_id: int) -> None:
        """Frees an id."""
        self.used.discard(packet_id)


class OutgoingMessages:
    """The sending half of the client's session: messages inflight, and those that wait for the
    window.

    Invariant: messages are sent, and sent again, in the order of `add`.
    """

    def __init__(self, ids: PacketIds, inflight_max: int, queue_messages_max: int) -> None:
        self._ids = ids
        self._inflight_max = inflight_max
        self._queue_messages_max = queue_messages_max
        # Sent and unacknowledged, in sending order; a message moves to the end when its PUBREC
        # arrives, so that PUBRELs too are repeated in their own order [MQTT-4.6.0-4].
        self.inflight: dict[int, OutgoingPublish] = {}
        self.waiting: deque[OutgoingPublish] = deque()
        self._window = 0
        # The room in the window: Receive Maximum less the PUBLISHes without PUBACK, PUBCOMP or
        # failing PUBREC.
        self._quota = 0

    def __len__(self) -> int:
        return len(self.inflight) + len(self.waiting)

    def is_full(self) -> bool:
        """Whether as many messages wait as may."""
        return len(self.waiting) >= self._queue_messages_max

    def add(self, publish: OutgoingPublish) -> None:
        """Queues a message. Raises `QueueFull`."""
        if self.is_full():
            raise QueueFull(f"{len(self.waiting)} messages wait already")
        self.waiting.append(publish)

    def next_ready(self) -> OutgoingPublish | None:
        """The next message to send now, with its packet id. None: no message waits, or the window
        is used up [MQTT-3.3.4-7] [MQTT-4.9.0-2] [MQTT-4.9.0-3]."""
        if not self.waiting or self._quota <= 0:
            return None
        publish = self.waiting[0]
        if publish.packet_id == 0:
            if self._ids.is_full():
                return None
            publish.packet_id = self._ids.allocate()
        self.waiting.popleft()
        publish.state = AWAITING_PUBACK if publish.qos == 1 else AWAITING_PUBREC
        self.inflight[publish.packet_id] = publish
        self._quota -= 1
        return publish

    def handle_puback(self, packet_id: int) -> OutgoingPublish | None:
        """Finishes a QoS 1 message. None: no message with this id waits for this packet."""
        return self._finish(packet_id, AWAITING_PUBACK)

    def handle_pubrec(self, packet_id: int, refused: bool) -> OutgoingPublish | None:
        """Records that the server has a QoS 2 message, or finishes it if refused. None as above."""
        if refused:
            return self._finish(packet_id, AWAITING_PUBREC)
        publish = self.inflight.get(packet_id)
        if publish is None or publish.state == AWAITING_PUBACK:
            return None
        # The message is the server's now, so it must not be sent again [MQTT-4.3.3-6].
        publish.state = AWAITING_PUBCOMP
        publish.payload = b""
        del self.inflight[packet_id]
        self.inflight[packet_id] = publish
        return publish

    def handle_pubcomp(self, packet_id: int) -> OutgoingPublish | None:
        """Finishes a QoS 2 message. None as above."""
        return self._finish(packet_id, AWAITING_PUBCOMP)

    def _finish(self, packet_id: int, state: int) -> OutgoingPublish | None:
        publish = self.inflight.get(packet_id)
        if publish is None or publish.state != state:
            return None
        del self.inflight[packet_id]
        self._ids.release(packet_id)
        # A PUBREL that was repeated on a new connection took no room.
        if self._quota < self._window:
            self._quota += 1
        return publish

    def refuse(
        self, reason_against: Callable[[OutgoingPublish], int]
    ) -> list[tuple[OutgoingPublish, int]]:
        """Removes the waiting messages with a reason against them (not 0); returns both."""
        refused: list[tuple[OutgoingPublish, int]] = []
        kept: deque[OutgoingPublish] = deque()
        for publish in self.waiting:
            reason = reason_against(publish)
            if not reason:
                kept.append(publish)
                continue
            refused.append((publish, reason))
            # The server may have a QoS 2 message that was sent before. Its id stays in use, or the
            # next message with it would count as a repetition.
            if publish.packet_id and publish.qos == 1:
                self._ids.release(publish.packet_id)
        self.waiting = kept
        return refused

    def suspend(self) -> None:
        """Stops sending until `resume`, because the connection is closed."""
        self._quota = 0

    def resume(
        self, session_present: bool, receive_maximum: int
    ) -> tuple[list[OutgoingPublish], list[OutgoingPublish]]:
        """Begins a connection; returns the messages to release and those that are done.

        The first await PUBCOMP, so their PUBREL is repeated now. The second count as done because
        the server has them, although it lost the session. Unacknowledged messages go to the front
        of the queue in their order. If the session lives they have DUP and their old id
        [MQTT-4.4.0-1] [MQTT-3.3.1-1] [MQTT-4.6.0-1]. If not they are new messages, so a QoS 2
        message may arrive twice when a server loses its session.
        """
        self._window = min(self._inflight_max, receive_maximum)  # [MQTT-4.9.0-1]
        self._quota = self._window
        released = [one for one in self.inflight.values() if one.state == AWAITING_PUBCOMP]
        again = [one for one in self.inflight.values() if one.state != AWAITING_PUBCOMP]
        done: list[OutgoingPublish] = []
        if not session_present:
            done, released = released, []
            for publish in done:
                self._ids.release(publish.packet_id)
        # Messages to be resent that did not fit into the window before are in `waiting` with their
        # ids, and count as if inflight.
        for publish in [*again, *self.waiting]:
            if publish.packet_id and not session_present:
                self._ids.release(publish.packet_id)
                publish.packet_id = 0
            publish.dup = publish.packet_id != 0
        self.waiting.extendleft(reversed(again))
        self.inflight = {publish.packet_id: publish for publish in released}
        return released, done
