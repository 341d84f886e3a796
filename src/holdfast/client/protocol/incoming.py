"""Messages from the server: QoS 2 exactly once, acknowledgements in order, topic aliases.

The set of QoS 2 packet ids outlives a connection: it is the client's half of the session.
"""

from collections import deque
from typing import Final

from holdfast.client.errors import ProtocolError
from holdfast.client.protocol.effects import Message
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import PUBLISH, Publish
from holdfast.protocol.mqtt.properties import Properties, decode_block
from holdfast.protocol.topics.names import InvalidTopic, decode_topic

NEW: Final = 0
REPEATED: Final = 1
"""The verdict for a message delivered and acknowledged before: acknowledge again, do not
deliver."""
PENDING: Final = 2
"""The verdict for a message delivered and not acknowledged by the application yet: do neither."""


class IncomingMessages:
    """The receiving half of the client's session.

    Invariant: acknowledgements leave in the order of arrival, and a QoS 2 message is delivered once
    while its packet id is in use.
    """

    def __init__(self, receive_maximum: int, topic_alias_max: int) -> None:
        self.receive_maximum = receive_maximum
        self.topic_alias_max = topic_alias_max
        self._aliases: dict[int, bytes] = {}
        self._acknowledged_ids: set[int] = set()
        # The ids of earlier connections among them.
        self._former_ids: set[int] = set()
        # Delivered without PUBACK or PUBREC, in the order of arrival: id, QoS, acknowledged.
        self._unacknowledged: deque[list[int]] = deque()
        self._pending: dict[int, list[int]] = {}

    def start(self) -> None:
        """Begins a connection. Aliases and unacknowledged deliveries belong to the old one
        [MQTT-3.3.2-7]; the server repeats the latter."""
        self._aliases.clear()
        self._unacknowledged.clear()
        self._pending.clear()
        self._former_ids = set(self._acknowledged_ids)

    def forget_session(self) -> None:
        """Forgets the packet ids, because the server has no session. [MQTT-3.2.2-5]"""
        self._acknowledged_ids.clear()
        self._former_ids.clear()

    def resolve(self, topic: bytes, alias: int) -> bytes:
        """The topic of a PUBLISH with or without alias. An invalid alias raises `ProtocolError`."""
        if alias == 0:
            if not topic:
                raise ProtocolError("empty topic without an alias", reasons.PROTOCOL_ERROR)
            return topic
        # [MQTT-3.1.2-26]
        if alias > self.topic_alias_max:
            raise ProtocolError(
                f"topic alias {alias}, we allow {self.topic_alias_max}",
                reasons.TOPIC_ALIAS_INVALID,
            )
        if topic:
            self._aliases[alias] = topic
            return topic
        known = self._aliases.get(alias)
        if known is None:
            raise ProtocolError(f"topic alias {alias} was never set", reasons.PROTOCOL_ERROR)
        return known

    def arrive(self, packet_id: int, qos: int, dup: bool) -> int:
        """Records a QoS 1 or 2 PUBLISH and returns NEW, REPEATED or PENDING. Raises `ProtocolError`
        if the server exceeds the client's Receive Maximum [MQTT-3.3.4-9]."""
        if not dup and packet_id in self._former_ids:
            # A repetition would have DUP [MQTT-3.3.1-1], so this is a new message: the server found
            # an older state of the session again, as of its last save.
            self.release(packet_id)
        if qos == 2 and packet_id in self._acknowledged_ids:
            return REPEATED  # [MQTT-4.3.3-10]
        if packet_id in self._pending:
            return PENDING
        if len(self._unacknowledged) + len(self._acknowledged_ids) >= self.receive_maximum:
            raise ProtocolError(
                f"more than {self.receive_maximum} unacknowledged messages",
                reasons.RECEIVE_MAXIMUM_EXCEEDED,
            )
        entry = [packet_id, qos, 0]
        self._unacknowledged.append(entry)
        self._pending[packet_id] = entry
        return NEW

    def acknowledge(self, packet_id: int) -> list[tuple[int, int]]:
        """Records the application's acknowledgement; returns each (id, QoS) to acknowledge now.

        Acknowledgements leave in the order of arrival [MQTT-4.6.0-2] [MQTT-4.6.0-3], so one that
        comes early waits for the messages before it. Unknown ids (of an earlier connection) are
        ignored.
        """
        entry = self._pending.get(packet_id)
        if entry is None:
            return []
        entry[2] = 1
        answers: list[tuple[int, int]] = []
        queue = self._unacknowledged
        while queue and queue[0][2]:
            done_id, qos, _ = queue.popleft()
            del self._pending[done_id]
            if qos == 2:
                self._acknowledged_ids.add(done_id)
            answers.append((done_id, qos))
        return answers

    def release(self, packet_id: int) -> bool:
        """Handles PUBREL. Returns whether the id was known. [MQTT-4.3.3-12]"""
        if packet_id not in self._acknowledged_ids:
            return False
        self._acknowledged_ids.discard(packet_id)
        self._former_ids.discard(packet_id)
        return True


def message_of(publish: Publish, topic: bytes) -> Message:
    """The message for the application. `topic` is the one after resolving an alias. An invalid
    message raises `ProtocolError`."""
    try:
        name = decode_topic(topic)
    except InvalidTopic as error:
        raise ProtocolError(str(error), reasons.TOPIC_NAME_INVALID) from None
    properties: Properties = {}
    block = publish.properties
    if block:
        properties = decode_block(block, 0, len(block), PUBLISH)
    if publish.subscription_ids:
        properties[pr.SUBSCRIPTION_IDENTIFIER] = publish.subscription_ids
    if publish.topic_alias:
        properties[pr.TOPIC_ALIAS] = publish.topic_alias
    return Message(
        name,
        publish.payload,
        publish.qos,
        publish.retain,
        publish.dup,
        publish.packet_id,
        properties,
    )
