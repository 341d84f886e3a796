"""What a decoder raises when a peer breaks the protocol.

`reason` is the MQTT 5 reason code to close the connection with; the text says what is wrong,
repeats nothing of a payload, and is short enough for a reason string.
"""

from holdfast.protocol.mqtt.reasons import MALFORMED_PACKET


class ProtocolViolation(Exception):
    """The packet could be read and says something the protocol forbids."""

    def __init__(self, reason: int, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class MalformedPacket(ProtocolViolation):
    """The bytes cannot be read as the packet they claim to be. [MQTT-4.13.1-1]"""

    def __init__(self, message: str) -> None:
        super().__init__(MALFORMED_PACKET, message)
