"""Packets as lines: the name, then each field that says something."""

from typing import Final

from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.properties import TABLE, decode_block
from holdfast.protocol.mqtt.reasons import NAMES

SHOWN_BYTES_MAX: Final = 40
VERSIONS: Final = {3: "3.1", 4: "3.1.1", 5: "5"}


def packet_line(packet: m.Packet, usual: m.Properties | None = None) -> str:
    """`usual`: the properties of a CONNACK that are not repeated when it has all of them."""
    return " ".join(_words(packet, usual or {}))


def payload_text(payload: bytes) -> str:
    """Quoted, short, and in one line."""
    if len(payload) > SHOWN_BYTES_MAX and len(set(payload)) == 1:
        return f'"{chr(payload[0])}"*{len(payload)}'
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return f"0x{payload.hex()}"
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'


def property_words(properties: m.Properties) -> list[str]:
    words = []
    for key, value in properties.items():
        name = TABLE[key].name
        if isinstance(value, list):
            for each in value:
                text = f"{each[0]}={each[1]}" if isinstance(each, tuple) else f"{each}"
                words.append(f"[{name} {text}]")
        elif isinstance(value, bytes):
            words.append(f"[{name} {payload_text(value)}]")
        else:
            words.append(f"[{name} {value}]")
    return words


def reason_text(reason: int) -> str:
    if reason < 0x80:
        return str(reason)
    return f"0x{reason:02x} {NAMES.get(reason, '')}".rstrip()


def message_words(
    topic: bytes, payload: bytes, qos: int, retain: bool, properties: bytes
) -> list[str]:
    """A message, in a packet or in the log."""
    words = [f"q{qos}"]
    if retain:
        words.append("retain")
    words += [topic.decode() or "-", payload_text(payload)]
    if properties:
        words += property_words(decode_block(properties, 0, len(properties), m.PUBLISH))
    return words


def _words(packet: m.Packet, usual: m.Properties) -> list[str]:
    if isinstance(packet, m.Publish):
        return _publish_words(packet)
    if isinstance(packet, m.Connect):
        return _connect_words(packet)
    if isinstance(packet, m.Ack):
        words = [m.TYPE_NAMES[packet.kind], str(packet.packet_id)]
        return [*words, *_reason(packet.reason), *property_words(packet.properties)]
    if isinstance(packet, m.Connack):
        properties = packet.properties
        if usual and all(properties.get(key) == value for key, value in usual.items()):
            properties = {key: value for key, value in properties.items() if key not in usual}
            properties = properties or {}
        words = ["CONNACK", reason_text(packet.reason)]
        if packet.session_present:
            words.append("session-present")
        return [*words, *property_words(properties)]
    if isinstance(packet, m.Subscribe):
        words = ["SUBSCRIBE", str(packet.packet_id)]
        for each in packet.subscriptions:
            words.append(f"{each.filter} q{each.qos}")
            words += ["no-local"] * each.no_local + ["retain-as-published"] * (
                each.retain_as_published
            )
            words += [f"retain-handling-{each.retain_handling}"] * (each.retain_handling > 0)
        return [*words, *property_words(packet.properties)]
    if isinstance(packet, m.Unsubscribe):
        words = ["UNSUBSCRIBE", str(packet.packet_id), *packet.filters]
        return [*words, *property_words(packet.properties)]
    if isinstance(packet, m.Suback | m.Unsuback):
        name = type(packet).__name__.upper()
        words = [name, str(packet.packet_id), *map(reason_text, packet.reasons)]
        return [*words, *property_words(packet.properties)]
    if isinstance(packet, m.Disconnect | m.Auth):
        words = [type(packet).__name__.upper(), reason_text(packet.reason)]
        return [*words, *property_words(packet.properties)]
    return [type(packet).__name__.upper()]


def _reason(reason: int) -> list[str]:
    return [reason_text(reason)] if reason else []


def _publish_words(packet: m.Publish) -> list[str]:
    words = ["PUBLISH"]
    if packet.packet_id:
        words.append(str(packet.packet_id))
    if packet.dup:
        words.append("dup")
    words += message_words(
        packet.topic, packet.payload, packet.qos, packet.retain, packet.properties
    )
    if packet.topic_alias:
        words.append(f"[topic-alias {packet.topic_alias}]")
    words += [f"[subscription-identifier {each}]" for each in packet.subscription_ids or ()]
    return words


def _connect_words(packet: m.Connect) -> list[str]:
    words = ["CONNECT", f"v{VERSIONS[packet.protocol_level]}", packet.client_id or "-"]
    words += ["clean"] * packet.clean_start
    words += [f"keep-alive {packet.keep_alive_s}"] * (packet.keep_alive_s > 0)
    words += property_words(packet.properties)
    if packet.will is not None:
        will = packet.will
        text = message_words(will.topic.encode(), will.payload, will.qos, will.retain, b"")
        words += ["will:", *text, *property_words(will.properties)]
    return words


def raw_line(data: bytes) -> str:
    """Bytes that a client sends as they are."""
    return f"bytes {data.hex(' ')}"
