"""Messages as JSON: payloads as text or base64, and the properties of MQTT 5."""

import base64

from msgspec import Struct

from holdfast.node.session.message import Message
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.packets import PUBLISH


class Content(Struct, kw_only=True, omit_defaults=True):
    """The payload and the MQTT 5 properties of a message. Text, or base64 if it is not UTF-8."""

    text: str = ""
    base64: str = ""
    bytes: int
    is_cut: bool = False
    """Whether the payload is longer than what is shown."""
    content_type: str = ""
    response_topic: str = ""
    correlation_base64: str = ""
    expiry_s: int | None = None
    user_properties: list[tuple[str, str]] = []


def content_of(payload: bytes, properties: bytes, bytes_max: int) -> Content:
    """The content of a message, with at most `bytes_max` bytes of its payload."""
    content = Content(bytes=len(payload), is_cut=len(payload) > bytes_max)
    shown = payload[:bytes_max]
    try:
        # A character that the cut has split does not make a text binary.
        content.text = shown.decode("utf-8", "ignore" if content.is_cut else "strict")
    except UnicodeDecodeError:
        content.base64 = base64.b64encode(shown).decode()
    if content.is_cut and len(content.text.encode()) < len(shown) - 3:
        content.text, content.base64 = "", base64.b64encode(shown).decode()
    if properties:
        _add_properties(content, properties)
    return content


def _add_properties(content: Content, block: bytes) -> None:
    try:
        found = p.decode_block(block, 0, len(block), PUBLISH)
    except ProtocolViolation:
        # A record of a damaged or later version: the payload is still worth showing.
        return
    content.content_type = str(found.get(p.CONTENT_TYPE, ""))
    content.response_topic = str(found.get(p.RESPONSE_TOPIC, ""))
    correlation = found.get(p.CORRELATION_DATA)
    if isinstance(correlation, bytes):
        content.correlation_base64 = base64.b64encode(correlation).decode()
    expiry = found.get(p.MESSAGE_EXPIRY_INTERVAL)
    content.expiry_s = expiry if isinstance(expiry, int) else None
    pairs = found.get(p.USER_PROPERTY, [])
    if isinstance(pairs, list):
        content.user_properties = [each for each in pairs if isinstance(each, tuple)]


class RetainedRow(Struct):
    """A retained message, without its payload."""

    topic: str
    bytes: int
    qos: int
    at_us: int
    """Time of the publish, in microseconds since 1970."""
    publisher: str
    partition: int
    """With `offset` the place of its record in the log; -1: it is not in the log."""
    offset: int
    expires_at_us: int = 0
    """Time of its expiry; 0: never."""


def retained_row(message: Message) -> RetainedRow:
    """The row of a retained message."""
    row = RetainedRow(
        message.topic.decode("utf-8", "replace"),
        len(message.payload),
        message.qos,
        message.timestamp_us,
        message.publisher.decode("utf-8", "replace"),
        message.partition,
        message.offset,
    )
    if message.expiry_s >= 0:
        row.expires_at_us = message.timestamp_us + message.expiry_s * 1_000_000
    return row
