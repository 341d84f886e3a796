"""Messages between a broker's own session and the federation. Pure."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from holdfast.broker.publish.producers import EPOCH_MAX
from holdfast.broker.session.audience import Audience
from holdfast.broker.session.message import NO_EXPIRY
from holdfast.broker.session.message import Message as BrokerMessage
from holdfast.broker.session.session import FEDERATION
from holdfast.federation.core.effects import DeliverLocally, Message
from holdfast.federation.core.identity import NODE_BYTES, MessageId
from holdfast.federation.core.routing.interest import may_leave, plain_of
from holdfast.federation.sidecar.edge_broker.interest import importable
from holdfast.federation.sidecar.edge_broker.origin_offset import (
    LogPlace,
    place_in,
    with_place,
    without_place,
)
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

PRODUCER: Final = "$fed:"
"""So begin the ids of producers that no client can have."""

CAME_IN: Final = MessageId(bytes(NODE_BYTES), 0, 0)
"""In place of an id that the broker does not know any more."""


class Arrival(NamedTuple):
    """On its way to the broker; see node.federating.publish."""

    message: BrokerMessage
    producer: bytes
    epoch: int
    sequence: int
    done: Callable[[], None]
    delivery: DeliverLocally | None
    """None: it is no publication, and only to be retained."""


def outgoing(
    publish: Publish,
    place: LogPlace | None,
    missed_by: tuple[str, ...] = (),
    is_replaced: bool = False,
    done_may_wait: bool = False,
) -> Message:
    """`publish`: as the broker has sent it, with what is left of its expiry."""
    return Message(
        publish.topic.decode(),
        publish.payload,
        publish.qos,
        publish.retain,
        _outgoing_properties(publish.properties, place),
        float(publish.expiry_s) if publish.expiry_s >= 0 else None,
        # Only after a crash of ours may QoS 1 come twice where the place says nothing.
        is_known_again=place is not None or publish.qos == 1,
        done_may_wait=done_may_wait,
        is_replaced=is_replaced,
        missed_by=missed_by,
    )


def retained_here(message: BrokerMessage, place: LogPlace | None, wall_us: int) -> Message:
    """`message`: as the broker has it retained; the same as when it went out."""
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
    return without_place(properties) if place is None else with_place(properties, place)


def refusal(id: MessageId, message: Message, import_filters: Sequence[str]) -> str:
    """Why it does not come in, "" if it does."""
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
    """Of a message that is not refused. Its number is its place in the origin's log if it tells
    that: the same, however often its origin has handed it over. Else it is its place in the stream;
    so too where it comes a second time, for groups that it was not for at first."""
    id, message = delivery.id, delivery.message
    producer, epoch, sequence = f"{PRODUCER}{id.node.hex()}", id.epoch, delivery.place
    origin = _origin_of(id, message)
    if origin is not None and not delivery.is_regranted:
        producer = f"{producer}:{origin.log}:{origin.partition}"
        epoch, sequence = 0, origin.offset + 1
    incoming = _incoming(message, origin is not None)
    return Arrival(incoming, producer.encode(), epoch, sequence, done, delivery)


def retaining_of(id: MessageId, message: Message, done: Callable[[], None]) -> Arrival:
    """The same of what is only to be retained, which needs no number."""
    incoming = _incoming(message, _origin_of(id, message) is not None)
    return Arrival(incoming, b"", 0, 0, done, None)


def audience_of(
    delivery: DeliverLocally, groups: Iterable[str], import_filters: Sequence[str]
) -> Audience | None:
    """For whom of a broker's clients it is; None: for all. `groups`: the keys of all there that
    want its topic. Grants name groups as they were announced."""
    if delivery.granted is None:
        return None if delivery.is_plain else Audience(False, groups)
    topic = delivery.message.topic
    granted = []
    for group in groups:
        announced = importable(group, import_filters)
        # Of several, every member goes by the first.
        first = next((one for one in announced if matches(plain_of(one), topic)), None)
        if first in delivery.granted:
            granted.append(group)
    return Audience(delivery.is_plain, granted)


def _origin_of(id: MessageId, message: Message) -> LogPlace | None:
    """None: it does not tell its place in its origin's log."""
    place = place_in(message.properties) if message.qos else None
    return place if place is not None and place.node == id.node else None


def _incoming(message: Message, has_place: bool) -> BrokerMessage:
    properties = without_place(message.properties) if has_place else message.properties
    expiry_s = NO_EXPIRY
    if message.expiry_s is not None:
        # Whole seconds, and none that has expired only by being rounded.
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
