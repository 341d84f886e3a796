"""The checks of a message before it enters a publish queue: it must be possible to send it
later."""

import time
from typing import Final

from holdfast.client.identity import IDENTITY_PROPERTY
from holdfast.client.pubqueue.entry import QueueEntry, entry_size
from holdfast.client.pubqueue.format import Format
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.packets import PUBLISH, Properties
from holdfast.protocol.topics.names import decode_topic

PACKET_BYTES_MAX: Final = 268_435_455
_PACKET_OVERHEAD_BYTES: Final = 256
"""The bytes of a PUBLISH beside topic, payload, its properties and the identity, at most."""


def checked_entry(
    form: Format,
    topic: str,
    payload: bytes | str,
    retain: bool,
    properties: Properties | None,
    expiry_s: float,
) -> QueueEntry:
    """The message without sequence and epoch. One that no server could accept raises
    `ValueError`."""
    data = payload.encode() if isinstance(payload, str) else bytes(payload)
    decode_topic(topic.encode())  # [MQTT-3.3.2-2]
    form.check(data)
    block = checked_block(properties) if properties else b""
    size = entry_size(topic, data, block)
    if size + _PACKET_OVERHEAD_BYTES > PACKET_BYTES_MAX:
        raise ValueError(f"a message of {size} bytes: MQTT allows {PACKET_BYTES_MAX}")
    put_at = time.time()
    expires_at = put_at + expiry_s if expiry_s > 0 else 0.0
    return QueueEntry(0, 0, topic, data, properties or None, retain, put_at, expires_at, size)


def checked_block(properties: Properties) -> bytes:
    """The encoded properties of a message. Invalid ones raise `ValueError`."""
    for name in (pr.TOPIC_ALIAS, pr.SUBSCRIPTION_IDENTIFIER):
        if name in properties:
            raise ValueError(f"{pr.TABLE[name].name} does not belong in a queued message")
    block = pr.encode_block(properties)
    try:
        decoded = pr.decode_block(block, 0, len(block), PUBLISH)
    except ProtocolViolation as violation:
        raise ValueError(str(violation)) from None
    pairs = decoded.get(pr.USER_PROPERTY)
    if isinstance(pairs, list) and any(
        isinstance(pair, tuple) and pair[0] == IDENTITY_PROPERTY for pair in pairs
    ):
        raise ValueError(f"the user property {IDENTITY_PROPERTY} is set by the queue")
    return block
