"""Reads and writes `traceparent` (W3C Trace Context), a user property of messages.

A publisher that traces puts `traceparent` into its PUBLISH, and the broker leaves it as it is. A
message without one gets one here, so that its subscribers belong to one trace. The core neither
draws ids nor reports spans: a `PublishTracer` of the driver does both. Without one, which is the
default, a publish pays for one comparison.
"""

import re
from typing import Final

VALUE_BYTES: Final = 55
_HEAD: Final = b"\x26\x00\x0btraceparent\x00\x37"
"""A user property `traceparent`, up to its value: identifier 38, lengths of name and value."""
_VALUE: Final = re.compile(rb"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent_of(properties: bytes) -> str:
    """Returns the context in the encoded properties of a PUBLISH, or "" without a valid one.

    The version ff is not valid. Later versions begin like 00, and so do their values here.
    """
    at = properties.find(_HEAD)
    if at < 0:
        return ""
    value = properties[at + len(_HEAD) : at + len(_HEAD) + VALUE_BYTES]
    if _VALUE.fullmatch(value) is None or value.startswith(b"ff"):
        return ""
    return value.decode("ascii")


def with_traceparent(properties: bytes, value: str) -> bytes:
    """Returns the properties with the context behind the others."""
    return properties + _HEAD + value.encode("ascii")


class PublishTracer:
    """Makes the context of each message, and reports the spans of some."""

    def __init__(self) -> None:
        self.span: object | None = None
        """The span of the message that is being handled; None: it is not reported."""

    def begin(
        self, topic: str, properties: bytes, client_id: str, qos: int, size_bytes: int
    ) -> bytes:
        """Begins the span of a message that its client may publish, and returns its properties."""
        raise NotImplementedError

    def end(self, span: object, partition: int, offset: int, error: str) -> None:
        """Reports a span: the message is acknowledged, or refused for the reason `error`.
        `partition` and `offset`: of its record; -1 without one, and for `offset` in a cluster."""
        raise NotImplementedError
