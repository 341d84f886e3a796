"""The rules applied to topics: the reader and the stream of each topic's messages."""

import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from typing import Final, NamedTuple

from holdfast.pipeline.decoders.csv_payload import decode_csv
from holdfast.pipeline.decoders.decoded import DecodeError
from holdfast.pipeline.decoders.json_payload import decode_json
from holdfast.pipeline.decoders.text_payload import (
    decode_any,
    decode_number,
    decode_status,
    decode_text,
)
from holdfast.pipeline.tables.columnar.parse import Way
from holdfast.pipeline.tables.edge import Emission
from holdfast.pipeline.tables.messages import TableMessage
from holdfast.pipeline.tables.rules import SPARKPLUG, Rule

TOPICS_KNOWN_MAX: Final = 10_000
"""The most topics that are cached."""
OTHERS_RANK: Final = 2


class Reader:
    """A prepared rule, which decodes a payload and finds the device."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.matches = re.compile(rule.pattern()).match
        self.fields = rule.fields()
        self.device_of = None if self.fields.device else rule.device_of()
        self.metric_of = rule.metric_of()
        self.lateness_us = round(rule.lateness_s * 1_000_000)
        self.future_us = round(rule.future_s * 1_000_000)

    def read(self, message: TableMessage, payload: bytes) -> Emission:
        """Decode a message. Raises DecodeError."""
        decode = self.rule.decode
        payload = payload.removeprefix(BOM_UTF8)
        if decode == "json":
            decoded = decode_json(payload, self.fields)
        elif decode == "auto":
            decoded = decode_any(payload, self.fields, self.metric_of(message.topic))
        elif decode == "csv":
            decoded = decode_csv(payload, self.rule.columns, self.fields, self.rule.delimiter)
        elif decode == "number":
            decoded = decode_number(payload, self.metric_of(message.topic))
        elif decode == "text":
            decoded = decode_text(payload, self.metric_of(message.topic))
        else:
            decoded = decode_status(payload, self.fields)
        if self.device_of is not None:
            return Emission(self.device_of(message.topic, message.client_id or ""), decoded)
        if decoded.device is None:
            raise DecodeError(f"no device: the payload has no {self.fields.device[0]}")
        return Emission(decoded.device, decoded)


class Topic(NamedTuple):
    """The result of the rules for one topic."""

    reader: Reader | None
    """The reader of the first matching rule. None if there is nothing to read."""
    stream: str | None
    """The stream of the messages. None if the client is the stream."""
    by_clock: bool
    """True if the broker's clock orders the stream.

    A topic is in one partition, whose offsets are the order. A stream in several partitions has no
    other order than the clock.
    """
    rank: int
    """The order among messages stored in the same microsecond: births before the messages that need
    them."""
    way: Way | None = None
    """The way in which its messages are read together. None if each is read alone."""
    device: str | None = None
    """The device of all its messages. None if it depends on the message."""


class Topics:
    """The cache of all topics that have come up."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.readers = [Reader(rule) for rule in rules]
        self.with_dollar = any(rule.filter.startswith("$") for rule in rules)
        self._cache: dict[str, Topic] = {}
        self._ways: dict[tuple[int, str | None], Way] = {}

    def __getitem__(self, name: str) -> Topic:
        found = self._cache.get(name)
        if found is None:
            if len(self._cache) >= TOPICS_KNOWN_MAX:
                self._cache.clear()
                self._ways.clear()
            found = self._cache[name] = self._find(name)
        return found

    def _find(self, name: str) -> Topic:
        for index, reader in enumerate(self.readers):
            if reader.matches(name):
                rule = reader.rule
                stream, by_clock = _stream(rule, name)
                if rule.decode == "ignore":
                    return Topic(None, stream, by_clock, OTHERS_RANK)
                way, device = self._common_reading(index, reader, name)
                return Topic(reader, stream, by_clock, _rank(name), way, device)
        return Topic(None, name, False, OTHERS_RANK)

    def _common_reading(
        self, index: int, reader: Reader, name: str
    ) -> tuple[Way | None, str | None]:
        """Return the way in which the messages are read together, and the device of all of them."""
        decode = reader.rule.decode
        if decode not in ("auto", "json", "number"):
            return None, None
        try:
            metric = None if decode == "json" else reader.metric_of(name)
            device = None
            if reader.device_of is None:
                metric = None  # a plain value does not name its device
            elif reader.rule.device != "client":
                device = reader.device_of(name, "")
        except DecodeError:
            return None, None
        way = self._ways.get((index, metric))
        if way is None:
            way = self._ways[index, metric] = Way(index, reader.fields, decode != "number", metric)
        return way, device


def _stream(rule: Rule, topic: str) -> tuple[str | None, bool]:
    """Return the stream of a topic that matches the rule, and whether it may span partitions.

    A topic with too few levels is its own stream. The fold then reports the fault.
    """
    if rule.decode == "sparkplug":
        levels = topic.split("/")
        return "/".join(levels[level] for level in (0, 1, 3) if level < len(levels)), True
    if rule.sequence_per != "device":
        return topic, False
    if rule.device == "client":
        return None, True
    if rule.level_range() is None:
        return topic, True
    try:
        return f"device {rule.device_of()(topic, '')}", True
    except DecodeError:
        return topic, True


def client_stream(client_id: str | None) -> str:
    """Return the stream of a client."""
    return f"client {client_id or ''}"


def _rank(topic: str) -> int:
    if not topic.startswith(f"{SPARKPLUG}/"):
        return OTHERS_RANK
    return 0 if "/NBIRTH/" in topic else 1 if "/DBIRTH/" in topic else OTHERS_RANK
