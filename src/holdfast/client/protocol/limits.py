"""The limits that the server announced in CONNACK."""

from dataclasses import dataclass

from holdfast.client.errors import PublishRefused
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.properties import Properties, number_of

PUBLISH_OVERHEAD_BYTES = 12
"""The most bytes of a PUBLISH beside its content: header byte, four length bytes, topic length,
packet id, properties length."""


@dataclass
class ServerLimits:
    """The limits of one server. The defaults are the protocol's, for a server that announced
    nothing (or has MQTT 3)."""

    receive_maximum: int = 65535
    packet_bytes_max: int = 268_435_460
    qos_max: int = 2
    retain_available: bool = True
    topic_alias_max: int = 0
    keep_alive_s: int = 0

    @classmethod
    def from_connack(cls, properties: Properties, keep_alive_s: int) -> "ServerLimits":
        """The limits in CONNACK. `keep_alive_s` is the client's; the server's takes precedence
        [MQTT-3.2.2-21]."""
        return cls(
            number_of(properties, pr.RECEIVE_MAXIMUM, 65535),
            number_of(properties, pr.MAXIMUM_PACKET_SIZE, 268_435_460),
            number_of(properties, pr.MAXIMUM_QOS, 2),
            number_of(properties, pr.RETAIN_AVAILABLE, 1) == 1,
            number_of(properties, pr.TOPIC_ALIAS_MAXIMUM, 0),
            number_of(properties, pr.SERVER_KEEP_ALIVE, keep_alive_s),
        )

    def are_tight(self) -> bool:
        """Whether `check_publish` may refuse anything."""
        return self.qos_max < 2 or not self.retain_available or self.packet_bytes_max < 268_435_460

    def check_publish(self, qos: int, retain: bool, content_bytes: int) -> None:
        """Raise `PublishRefused` for a message for which the server would have to disconnect the
        client."""
        if qos > self.qos_max:  # [MQTT-3.2.2-11]
            raise PublishRefused(
                f"QoS {qos}, the server supports {self.qos_max}", reasons.QOS_NOT_SUPPORTED
            )
        if retain and not self.retain_available:  # [MQTT-3.2.2-14]
            raise PublishRefused(
                "the server keeps no retained messages", reasons.RETAIN_NOT_SUPPORTED
            )
        if content_bytes + PUBLISH_OVERHEAD_BYTES > self.packet_bytes_max:  # [MQTT-3.2.2-15]
            raise PublishRefused(
                f"a message of {content_bytes} bytes, the server accepts packets of "
                f"{self.packet_bytes_max}",
                reasons.PACKET_TOO_LARGE,
            )

    def check_alias(self, alias: int) -> None:
        """Raise `PublishRefused` for a topic alias above the server's maximum."""
        if alias > self.topic_alias_max:  # [MQTT-3.2.2-17]
            raise PublishRefused(
                f"topic alias {alias}, the server allows {self.topic_alias_max}",
                reasons.TOPIC_ALIAS_INVALID,
            )
