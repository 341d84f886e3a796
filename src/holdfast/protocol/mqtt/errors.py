"""Errors of a decoder for input that breaks the protocol.

`reason` is the MQTT 5 reason code for closing the connection. The text describes the error,
contains nothing of a payload, and is short enough for a reason string.
"""

from holdfast.protocol.mqtt.reasons import MALFORMED_PACKET


class ProtocolViolation(Exception):
    """A packet that is readable and that the protocol forbids here."""

    def __init__(self, reason: int, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class MessageRefused(ProtocolViolation):
    """A valid message that the broker cannot store now, from a client that can only be told by the
    end of its connection."""


class MalformedPacket(ProtocolViolation):
    """Bytes that are not a valid encoding of their packet type. [MQTT-4.13.1-1]"""

    def __init__(self, message: str) -> None:
        super().__init__(MALFORMED_PACKET, message)
