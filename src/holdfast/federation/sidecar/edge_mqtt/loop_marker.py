"""Messages between a broker and the federation, and the mark that tells where they have been.

What the federation brings is published with a user property MARK. What carries one is never taken
from the broker again, on whatever way it came back: over a bridge beside us, from a client that
copies properties, or because the broker knows no No Local.
"""

from typing import Final

from holdfast.client.identity import EPOCH_MAX, IDENTITY_PROPERTY
from holdfast.client.protocol.effects import Message as Received
from holdfast.federation.core.effects import Message
from holdfast.federation.core.identity import NODE_BYTES, MessageId
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.packets import PUBLISH
from holdfast.protocol.mqtt.properties import Properties, decode_block, encode_block

MARK: Final = "hf-federation"
"""Its value: the origin's id in hexadecimal, its epoch, the message's number there."""
FORMER_IDENTITY: Final = "hf-seq-origin"
"""Where the publisher's own sequence goes when the message gets one of ours."""
_OF_THE_BROKER: Final = (
    pr.TOPIC_ALIAS,
    pr.SUBSCRIPTION_IDENTIFIER,
    pr.MESSAGE_EXPIRY_INTERVAL,
)
"""Not part of a message's journey; the expiry is told apart."""


def user_properties(properties: Properties) -> list[tuple[str, str]]:
    pairs = properties.get(pr.USER_PROPERTY)
    if not isinstance(pairs, list):
        return []
    return [pair for pair in pairs if isinstance(pair, tuple)]


def is_marked(received: Received) -> bool:
    return any(name == MARK for name, _ in user_properties(received.properties))


def mark_of(received: Received) -> MessageId | None:
    """Which message of the federation it is; None for another one, or a mark that is none."""
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
    """As the federation takes it."""
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
        # After a crash of ours QoS 1 may come twice, QoS 2 should not.
        is_known_again=received.qos == 1,
    )


def inbound(id: MessageId, message: Message, producer: str, place: int) -> Properties:
    """The properties to publish with. With a `producer`, the broker tells repetitions by sequence:
    then that is ours, or none without a `place`, for the publisher's own has another order after
    its journey. Raises ProtocolViolation for properties that are none."""
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
