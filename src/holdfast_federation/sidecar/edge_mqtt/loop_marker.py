"""Converts messages between a broker and the federation, with a mark against loops.

Messages of the federation are published with the user property MARK. The edge never exports a
message with the mark, whichever way it came back: over another bridge, from a client that copies
properties, or from a broker without No Local.
"""

from typing import Final

from holdfast.client.identity import EPOCH_MAX, IDENTITY_PROPERTY
from holdfast.client.protocol.effects import Message as Received
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.packets import PUBLISH
from holdfast.protocol.mqtt.properties import Properties, decode_block, encode_block
from holdfast_federation.core.effects import Message
from holdfast_federation.core.identity import NODE_BYTES, MessageId

MARK: Final = "hf-federation"
"""The name of the mark. The value is the origin's id in hexadecimal, its epoch and sequence."""
FORMER_IDENTITY: Final = "hf-seq-origin"
"""The property for the publisher's own sequence when the federator adds its own."""
_OF_THE_BROKER: Final = (
    pr.TOPIC_ALIAS,
    pr.SUBSCRIPTION_IDENTIFIER,
    pr.MESSAGE_EXPIRY_INTERVAL,
)
"""Properties that belong to one hop. The expiry is converted separately."""


def user_properties(properties: Properties) -> list[tuple[str, str]]:
    pairs = properties.get(pr.USER_PROPERTY)
    if not isinstance(pairs, list):
        return []
    return [pair for pair in pairs if isinstance(pair, tuple)]


def is_marked(received: Received) -> bool:
    return any(name == MARK for name, _ in user_properties(received.properties))


def mark_of(received: Received) -> MessageId | None:
    """Returns the federation's id of a marked message, or None without a valid mark."""
    for name, value in user_properties(received.properties):
        if name == MARK:
            parts = value.split(":")
            try:
                id = MessageId(bytes.fromhex(parts[0]), int(parts[1]), int(parts[2]))
            except (ValueError, IndexError):
                return None
            return id if len(id.node) == NODE_BYTES else None
    return None


def outbound(received: Received) -> Message:
    """Converts a received message for the federation."""
    rest = {
        identifier: value
        for identifier, value in received.properties.items()
        if identifier not in _OF_THE_BROKER
    }
    expiry = received.properties.get(pr.MESSAGE_EXPIRY_INTERVAL)
    return Message(
        received.topic,
        received.payload,
        received.qos,
        received.retain,
        encode_block(rest),
        float(expiry) if isinstance(expiry, int) else None,
        mark_of(received),
        # After a crash of the edge a QoS 1 message may come twice, a QoS 2 message must not.
        is_repeatable=received.qos == 1,
    )


def inbound(id: MessageId, message: Message, producer: str, place: int) -> Properties:
    """Returns the properties to publish a message with.

    With a `producer`, the broker deduplicates by sequence, so the sequence must be the federator's.
    The publisher's own one would drop messages: its order does not survive the journey. Without a
    `place` there is none. Raises `ProtocolViolation` if the message's properties are malformed.
    """
    block = message.properties
    properties = decode_block(block, 0, len(block), PUBLISH) if block else {}
    for identifier in _OF_THE_BROKER:
        properties.pop(identifier, None)
    pairs = [pair for pair in user_properties(properties) if pair[0] != MARK]
    if producer:
        pairs = [
            (FORMER_IDENTITY if name == IDENTITY_PROPERTY else name, value) for name, value in pairs
        ]
        if place and 0 <= id.epoch <= EPOCH_MAX:
            pairs.append((IDENTITY_PROPERTY, f"{producer}:{id.epoch}:{place}"))
    pairs.append((MARK, f"{id.node.hex()}:{id.epoch}:{id.sequence}"))
    properties[pr.USER_PROPERTY] = pairs
    return properties
