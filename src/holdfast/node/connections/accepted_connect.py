"""A CONNECT that was accepted, until this node owns its session."""

from holdfast.node.session.session import Will
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt.packets import Connect, Properties
from holdfast.protocol.mqtt.properties import encode_block


class AcceptedConnect:
    """An accepted CONNECT that waits for this node to own its session."""

    def __init__(
        self, packet: Connect, expiry_s: int, answer: Properties, reply: bytes = b""
    ) -> None:
        """`reply`: the CONNACK with these properties if no session is present, when encoded."""
        self.clean_start = packet.clean_start
        self.expiry_s = expiry_s
        self.reply_properties = answer
        self.reply = reply
        self.will = will_of(packet)
        self.filters: str | None = None
        """See `kept_subscriptions.checksum_asked`."""


def will_of(packet: Connect) -> Will | None:
    """The will of a CONNECT, or None."""
    will = packet.will
    if will is None:
        return None
    properties = dict(will.properties)
    delay_s = properties.pop(p.WILL_DELAY_INTERVAL, 0)
    message_expiry_s = properties.get(p.MESSAGE_EXPIRY_INTERVAL, -1)
    assert isinstance(delay_s, int)
    assert isinstance(message_expiry_s, int)
    return Will(
        will.topic.encode(),
        will.payload,
        will.qos,
        will.retain,
        encode_block(properties),
        message_expiry_s,
        delay_s,
    )
