"""Identifies a message by producer, epoch and sequence, so that brokers drop repetitions.

The identity is the MQTT 5 user property `hf-seq` with the value `<producer>:<epoch>:<sequence>`.
The sequence counts a producer's messages over all topics. The epoch grows with each life of the
producer, so a producer that forgot its sequence does not use one twice.
"""

import re
from dataclasses import dataclass
from typing import Final

from holdfast.protocol.mqtt.properties import USER_PROPERTY, Properties

IDENTITY_PROPERTY: Final = "hf-seq"
EPOCH_MAX: Final = (1 << 32) - 1
SEQUENCE_MAX: Final = (1 << 63) - 1
PRODUCER_CHARACTERS_MAX: Final = 64

_PRODUCER: Final = re.compile(rf"[A-Za-z0-9_.-]{{1,{PRODUCER_CHARACTERS_MAX}}}")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ProducerIdentity:
    """The identity of one message. Identities of a producer are ordered by (epoch, sequence)."""

    producer: str
    epoch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.producer}:{self.epoch}:{self.sequence}"


def check_producer(producer: str) -> None:
    """Raises `ValueError` unless this is a valid producer id."""
    if not _PRODUCER.fullmatch(producer):
        raise ValueError(
            f"producer id {producer!r}: 1 to {PRODUCER_CHARACTERS_MAX} of the characters "
            "A-Z a-z 0-9 _ . -"
        )


def parse_identity(text: str) -> ProducerIdentity:
    """The identity that the text contains. A sign, leading zeros or other characters raise
    `ValueError`."""
    parts = text.split(":")
    if len(parts) != 3:
        raise ValueError(f"identity {text!r}: must be <producer>:<epoch>:<sequence>")
    check_producer(parts[0])
    epoch = _number(parts[1], "epoch", 0, EPOCH_MAX)
    return ProducerIdentity(parts[0], epoch, _number(parts[2], "sequence", 1, SEQUENCE_MAX))


def identity_of(properties: Properties) -> ProducerIdentity | None:
    """The identity of a received message, or None. A malformed one, or several, raise
    `ValueError`."""
    pairs = properties.get(USER_PROPERTY)
    if not isinstance(pairs, list):
        return None
    values = [pair[1] for pair in pairs if isinstance(pair, tuple) and pair[0] == IDENTITY_PROPERTY]
    if not values:
        return None
    if len(values) > 1:
        raise ValueError(f"{len(values)} properties {IDENTITY_PROPERTY}: there may be one")
    return parse_identity(values[0])


def _number(text: str, name: str, least: int, most: int) -> int:
    if _NUMBER.fullmatch(text) and least <= (number := int(text)) <= most:
        return number
    raise ValueError(f"{name} {text!r}: a decimal number from {least} to {most}")
