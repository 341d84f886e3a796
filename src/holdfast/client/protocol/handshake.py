"""The CONNECT packet of a client, made from its options."""

from holdfast.client.authentication import Authentication
from holdfast.client.options import LEVEL_5, LEVEL_31, Options
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.encode import encode
from holdfast.protocol.mqtt.packets import Connect
from holdfast.protocol.mqtt.properties import Properties


def check_options(options: Options) -> None:
    """Raise `ValueError` for options that no server could accept."""
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
