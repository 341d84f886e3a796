"""Converts messages between a broker's own session and the federation. Pure."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from holdfast.node.publish.producers import EPOCH_MAX
from holdfast.node.session.audience import Audience
from holdfast.node.session.message import NO_EXPIRY
from holdfast.node.session.message import Message as BrokerMessage
from holdfast.node.session.session import FEDERATION
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.packets import PUBLISH
from holdfast.protocol.mqtt.properties import (
    MESSAGE_EXPIRY_INTERVAL,
    SUBSCRIPTION_IDENTIFIER,
    TOPIC_ALIAS,
    decode_block,
    expiry_position,
)
from holdfast.protocol.mqtt.publish import Publish, splice_properties
from holdfast.protocol.topics.names import InvalidTopic, decode_topic, matches
from holdfast_federation.core.effects import DeliverLocally, Message
from holdfast_federation.core.identity import NODE_BYTES, MessageId
from holdfast_federation.core.routing.interest import may_leave, plain_of
from holdfast_federation.sidecar.edge_broker.interest import importable
from holdfast_federation.sidecar.edge_broker.origin_offset import (
    LogPlace,
    offset_in,
    with_offset,
    without_offset,
)

PRODUCER: Final = "$fed:"
"""The prefix of the federation's producer ids. No client can have such an id."""

CAME_IN: Final = MessageId(bytes(NODE_BYTES), 0, 0)
"""A placeholder for a message's id that the broker did not keep."""


class Arrival(NamedTuple):
    """A message on its way to `holdfast.node.federation_session.publish`."""

    message: BrokerMessage
    producer: bytes
    epoch: int
    sequence: int
    done: Callable[[], None]
    delivery: DeliverLocally | None
    """The delivery, or None for a message that is only to be retained and not published."""


def outgoing(
    publish: Publish,
    place: LogPlace | None,
    missed_by: tuple[str, ...] = (),
    is_replaced: bool = False,
    done_may_wait: bool = False,
) -> Message:
    """Converts a publication that the broker has sent, with its remaining expiry."""
    return Message(
        publish.topic.decode(),
        publish.payload,
        publish.qos,
        publish.retain,
        _outgoing_properties(publish.properties, place),
        float(publish.expiry_s) if publish.expiry_s >= 0 else None,
        # Without a place a crash here may repeat the message. QoS 1 allows that, QoS 2 does not.
        is_repeatable=place is not None or publish.qos == 1,
        done_may_wait=done_may_wait,
        is_replaced=is_replaced,
        missed_by=missed_by,
    )


def retained_here(message: BrokerMessage, place: LogPlace | None, wall_us: int) -> Message:
    """Converts a message that the broker has retained, equal to the one that was exported."""
    left_s = message.remaining_expiry_s(wall_us)
    return Message(
        message.topic.decode(),
        message.payload,
        message.qos,
        True,
        _outgoing_properties(message.properties, place),
        float(left_s) if left_s != NO_EXPIRY else None,
        CAME_IN if message.publisher == FEDERATION.encode() else None,
        message.timestamp_us,
    )


def _outgoing_properties(properties: bytes, place: LogPlace | None) -> bytes:
    at = expiry_position(properties)
    if at >= 0:
        properties = properties[: at - 1] + properties[at + 4 :]
    return without_offset(properties) if place is None else with_offset(properties, place)


def refusal(id: MessageId, message: Message, import_filters: Sequence[str]) -> str:
    """Returns the reason to refuse a message of the federation, or "" to accept it."""
    if not may_leave(message.topic):
        return "reserved topic"
    if not any(matches(filter, message.topic) for filter in import_filters):
        return "import filters"
    if id.epoch > EPOCH_MAX:
        return "epoch too high"
    try:
        decode_topic(message.topic.encode())
        found = decode_block(message.properties, 0, len(message.properties), PUBLISH)
    except (InvalidTopic, UnicodeEncodeError):
        return "bad topic"
    except ProtocolViolation:
        return "bad properties"
    alien = (TOPIC_ALIAS, SUBSCRIPTION_IDENTIFIER, MESSAGE_EXPIRY_INTERVAL)
    return "bad properties" if any(one in found for one in alien) else ""


def arrival_of(delivery: DeliverLocally, done: Callable[[], None]) -> Arrival:
    """Numbers an accepted message, so that the broker stores it once.

    The number is the offset in the origin's log if the message has it, because that stays equal
    however often the origin exports the message. Otherwise the number is the place in the stream. A
    message that comes again for additional groups also uses its place: under its offset the broker
    would drop it as a duplicate.
    """
    id, message = delivery.id, delivery.message
    producer, epoch, sequence = f"{PRODUCER}{id.node.hex()}", id.epoch, delivery.place
    origin = _origin_of(id, message)
    if origin is not None and not delivery.is_regranted:
        producer = f"{producer}:{origin.log}:{origin.partition}"
        epoch, sequence = 0, origin.offset + 1
    incoming = _incoming(message, origin is not None)
    return Arrival(incoming, producer.encode(), epoch, sequence, done, delivery)


def retaining_of(id: MessageId, message: Message, done: Callable[[], None]) -> Arrival:
    """Makes the arrival of a message that is only to be retained. It needs no number."""
    incoming = _incoming(message, _origin_of(id, message) is not None)
    return Arrival(incoming, b"", 0, 0, done, None)


def audience_of(
    delivery: DeliverLocally, groups: Iterable[str], import_filters: Sequence[str]
) -> Audience | None:
    """Returns the audience among this broker's clients, or None for all of them.

    `groups`: the keys of all groups here with a filter that matches. Grants use the names under
    which groups were announced.
    """
    if delivery.granted is None:
        return None if delivery.is_plain else Audience(False, groups)
    topic = delivery.message.topic
    granted = []
    for group in groups:
        announced = importable(group, import_filters)
        # A group announced in several parts uses the first matching one, as all members do.
        first = next((one for one in announced if matches(plain_of(one), topic)), None)
        if first in delivery.granted:
            granted.append(group)
    return Audience(delivery.is_plain, granted)


def _origin_of(id: MessageId, message: Message) -> LogPlace | None:
    """Returns the offset in the origin's log, or None if the message has no valid one."""
    place = offset_in(message.properties) if message.qos else None
    return place if place is not None and place.node == id.node else None


def _incoming(message: Message, has_place: bool) -> BrokerMessage:
    properties = without_offset(message.properties) if has_place else message.properties
    expiry_s = NO_EXPIRY
    if message.expiry_s is not None:
        # Rounded up: rounding down would expire a message early.
        expiry_s = min(math.ceil(message.expiry_s), 0xFFFFFFFF)
        properties = splice_properties(properties, expiry_s, (), 0)
    return BrokerMessage(
        message.topic.encode(),
        message.payload,
        message.qos,
        message.is_retained,
        properties,
        expiry_s,
        0,
        FEDERATION.encode(),
    )
