"""Builds CONNECT, reads the limits in CONNACK, and the fields of later replies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.client.authentication import Authentication
from holdfast.client.errors import PublishRefused, SubscribeRefused, reason_text
from holdfast.client.options import LEVEL_5, LEVEL_31, Options
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.framing import PACKET_BYTES_MAX, FrameReader
from holdfast.protocol.mqtt.packets import Connect, Packet, Properties
from holdfast.protocol.mqtt.properties import number_of

HTTP_BEGIN: Final = b"HTTP/"
"""The begin of the answer of an admin port to CONNECT."""
SPEAKS_HTTP: Final = "speaks HTTP, as an admin port does: give the address of an MQTT listener"


def check_options(options: Options) -> None:
    """Raises `ValueError` for options that no server could accept."""
    if options.level not in (LEVEL_31, 4, LEVEL_5):
        raise ValueError(f"protocol level {options.level}: 3, 4 (MQTT 3.1.1) or 5")
    if not 0 <= options.keep_alive_s <= 65535:
        raise ValueError(f"keep alive of {options.keep_alive_s} s: 0 to 65535")
    if options.response_timeout_s is not None and options.response_timeout_s <= 0:
        raise ValueError(f"response timeout of {options.response_timeout_s} s: above 0, or None")
    if options.ping_interval_s < 0:
        raise ValueError(f"ping interval of {options.ping_interval_s} s: 0 or more")
    if not 1 <= options.packet_ids_max <= 65535:
        raise ValueError(f"packet ids up to {options.packet_ids_max}: 1 to 65535")
    if options.is_bridge and options.level == LEVEL_5:
        raise ValueError("a bridge marks itself in MQTT 3 only; MQTT 5 has No Local")
    if options.level == LEVEL_31 and not options.client_id:
        raise ValueError("MQTT 3.1 needs a client id")
    if options.level < LEVEL_5:
        # [MQTT3-3.1.3-7]
        if not options.client_id and not options.clean_start:
            raise ValueError("a client without id cannot resume a session: set a client id")
        # [MQTT3-3.1.2-22]
        if options.password is not None and options.username is None:
            raise ValueError("a password without a user name needs MQTT 5")
        if options.authentication is not None:
            raise ValueError("enhanced authentication needs MQTT 5")
    encode(connect_packet(options, options.client_id, options.clean_start, None), options.level)


def session_lasts(options: Options) -> bool:
    """Whether the server keeps the session after the connection."""
    if options.level < LEVEL_5:
        return not options.clean_start
    expiry = options.properties.get(pr.SESSION_EXPIRY_INTERVAL)
    return bool(options.session_expiry_s if expiry is None else expiry)


def connect_packet(
    options: Options, client_id: str, clean: bool, exchange: Authentication | None
) -> Connect:
    """The CONNECT for the options. `exchange` is a new one if they ask for enhanced authentication;
    its first data is included. It may raise `AuthenticationFailed`."""
    properties: Properties = {}
    if options.level == LEVEL_5:
        properties = _properties(options)
        if exchange is not None:
            # [MQTT-4.12.0-5]
            properties[pr.AUTHENTICATION_METHOD] = exchange.method
            data = exchange.start()
            if data is not None:
                properties[pr.AUTHENTICATION_DATA] = data
        properties.update(options.properties)
    return Connect(
        options.level,
        clean,
        options.keep_alive_s,
        client_id,
        options.will,
        options.username,
        options.password,
        properties,
        options.is_bridge,
    )


def _properties(options: Options) -> Properties:
    properties: Properties = {}
    if options.session_expiry_s:
        properties[pr.SESSION_EXPIRY_INTERVAL] = options.session_expiry_s
    if options.receive_maximum != 65535:
        properties[pr.RECEIVE_MAXIMUM] = options.receive_maximum
    if options.packet_bytes_max < 268_435_460:
        properties[pr.MAXIMUM_PACKET_SIZE] = options.packet_bytes_max
    if options.topic_alias_max:
        properties[pr.TOPIC_ALIAS_MAXIMUM] = options.topic_alias_max
    return properties


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
        """Raises `PublishRefused` for a message for which the server would have to disconnect the
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
        """Raises `PublishRefused` for a topic alias above the server's maximum."""
        if alias > self.topic_alias_max:  # [MQTT-3.2.2-17]
            raise PublishRefused(
                f"topic alias {alias}, the server allows {self.topic_alias_max}",
                reasons.TOPIC_ALIAS_INVALID,
            )


def packet_of(data: bytes, version: int) -> Packet:
    """The packet in the bytes of one packet of this client."""
    reader = FrameReader(PACKET_BYTES_MAX)
    reader.feed(data)
    reader.next()
    return decode(reader.buffer, reader.first, reader.start, reader.end, version, True)


def reason_string(properties: Properties) -> str:
    """The reason string, or ""."""
    text = properties.get(pr.REASON_STRING)
    return text if isinstance(text, str) else ""


def server_reference(properties: Properties) -> str:
    """The server reference, or ""."""
    text = properties.get(pr.SERVER_REFERENCE)
    return text if isinstance(text, str) else ""


def authentication_data(properties: Properties) -> bytes | None:
    """The authentication data, or None."""
    data = properties.get(pr.AUTHENTICATION_DATA)
    return data if isinstance(data, bytes) else None


def check_reason_codes(
    properties: Properties, codes: Sequence[int], filters: Sequence[str], verb: str
) -> None:
    """Raises `SubscribeRefused` for the first refused filter of a SUBACK or UNSUBACK."""
    for filter, reason in zip(filters, codes, strict=False):
        if reason >= 0x80:
            raise SubscribeRefused(
                f"cannot {verb} {filter!r}: {reason_text(reason)}",
                reason,
                reason_string(properties),
                list(codes),
            )
