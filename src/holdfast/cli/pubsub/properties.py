"""The option `-D command identifier value`: MQTT 5 properties on the command line."""

import os
from typing import Final

from holdfast.protocol.mqtt import packets as pk
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.packets import Properties, PropertyValue
from holdfast.protocol.topics.names import InvalidTopic, decode_topic

COMMANDS: Final = {
    "connect": pk.CONNECT,
    "publish": pk.PUBLISH,
    "puback": pk.PUBACK,
    "pubrec": pk.PUBREC,
    "pubrel": pk.PUBREL,
    "pubcomp": pk.PUBCOMP,
    "subscribe": pk.SUBSCRIBE,
    "unsubscribe": pk.UNSUBSCRIBE,
    "disconnect": pk.DISCONNECT,
    "auth": pk.AUTH,
    "will": pr.WILL,
}
_BY_NAME: Final = {info.name: identifier for identifier, info in pr.TABLE.items()}
_LIMITS: Final = {
    pr.BYTE: 0xFF,
    pr.TWO_BYTES: 0xFFFF,
    pr.FOUR_BYTES: 0xFFFFFFFF,
    pr.VARIABLE: 268_435_455,
}


class PropertyError(Exception):
    """The option is wrong. The text says which part."""


def add_property(found: dict[str, Properties], arguments: list[str], position: int) -> int:
    """Reads the values of one -D from arguments[position:] and returns the next position.

    Raises `PropertyError` if they are wrong.
    """
    rest = arguments[position : position + 4]
    if len(rest) < 3:
        raise PropertyError("--property argument given but not enough arguments specified.")
    command, name, value = rest[0].lower(), rest[1], rest[2]
    if command not in COMMANDS:
        raise PropertyError("Invalid command given in --property argument.")
    if name not in _BY_NAME:
        raise PropertyError("Invalid property name given in --property argument.")
    identifier = _BY_NAME[name]
    info = pr.TABLE[identifier]
    if COMMANDS[command] not in info.packet_types:
        raise PropertyError(f"{name} property not allowed for {command} in --property argument.")
    properties = found.setdefault(command, {})
    if info.encoding == pr.STRING_PAIR:
        if len(rest) < 4:
            raise PropertyError("--property argument given but not enough arguments specified.")
        pairs = properties.setdefault(identifier, [])
        assert isinstance(pairs, list)
        pairs.append((value, rest[3]))  # type: ignore[arg-type]
        return position + 4
    properties[identifier] = _value(name, identifier, info.encoding, value)
    return position + 3


def _value(name: str, identifier: int, encoding: int, text: str) -> PropertyValue:
    if encoding == pr.BINARY:
        return os.fsencode(text)
    if encoding == pr.STRING:
        if identifier == pr.RESPONSE_TOPIC:
            try:
                decode_topic(text.encode())
            except (InvalidTopic, UnicodeEncodeError):
                raise PropertyError(f"Invalid response topic '{text}'.") from None
        return text
    if not (text.isascii() and text.isdigit()):
        raise PropertyError(f"Property value ({text}) is not a number for property {name}.")
    number = int(text)
    if number > _LIMITS[encoding] or (number == 0 and identifier in _ABOVE_ZERO):
        raise PropertyError(f"Property value ({text}) out of range for property {name}.")
    return [number] if encoding == pr.VARIABLE else number


_ABOVE_ZERO: Final = frozenset(
    {
        pr.TOPIC_ALIAS,
        pr.RECEIVE_MAXIMUM,
        pr.MAXIMUM_PACKET_SIZE,
        pr.SUBSCRIPTION_IDENTIFIER,
    }
)
