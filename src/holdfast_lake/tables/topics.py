"""Applies rules to topics: the reader and the stream of each topic's messages."""

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any, Final, NamedTuple

from holdfast_lake.decoders.decoded import (
    NAME_LENGTH_MAX,
    Decoded,
    DecodeError,
    own_name,
)
from holdfast_lake.decoders.documents import (
    GZIP_BEGIN,
    LAYERS,
    decode_senml,
    inflated,
    parse_cbor,
    parse_messagepack,
    plain,
)
from holdfast_lake.decoders.json_payload import (
    VALUE,
    Fields,
    count_keys,
    decode_document,
    decode_json,
    parse_json,
    refuse_repeated_keys,
)
from holdfast_lake.decoders.scales import Scales
from holdfast_lake.decoders.text_payload import (
    ONLINE,
    decode_any,
    decode_csv,
    decode_form,
    decode_number,
    decode_status,
    decode_text,
    number,
    parse_texts,
)
from holdfast_lake.decoders.units import UnitRules, measured_value, with_point
from holdfast_lake.tables.columns import TableMessage
from holdfast_lake.tables.parse import Way
from holdfast_lake.tables.rules import SPARKPLUG, WITH_LAYERS, Rule
from holdfast_lake.tables.stream import Emission

TOPICS_KNOWN_MAX: Final = 10_000
"""The most topics that are cached."""
OTHERS_RANK: Final = 2
NAMED_BY_RULE: Final = frozenset({"auto", "number", "text", "status", "presence"})
"""The decoders of payloads of one value, which a rule names."""


class Reader:
    """A prepared rule, which decodes a payload and finds the device."""

    def __init__(self, rule: Rule, *, is_scaled: bool = True) -> None:
        """Prepares a rule. Without `is_scaled`, numbers are not multiplied by scales."""
        self.rule = rule
        self.matches = re.compile(rule.pattern()).match
        self.fields = rule.fields()
        self.device_of = None if self.fields.device else rule.device_of()
        self.metric_of = rule.metric_of()
        self.lateness_us = round(rule.lateness_s * 1_000_000)
        self.future_us = round(rule.future_s * 1_000_000)
        self.decoder = rule.decoder
        layers = rule.decode.split("+")[:-1] if isinstance(rule.decode, str) else ()
        self._layers = [LAYERS[name] for name in layers]
        self._needs_time = self.fields.zone is not None or self.decoder == "senml"
        self._prefix_of = rule.levels_of(rule.prefix) if rule.prefix else None
        self._names_one = self.decoder in NAMED_BY_RULE and rule.metric != VALUE
        self._drops, self._numbers = _any_of(rule.drop), _any_of(rule.numbers)
        self.units = UnitRules(rule.units) if rule.units else None
        self._scales = Scales(rule.scales) if is_scaled else None

    def read(
        self, message: TableMessage, payload: bytes, scaled: dict[str, str] | None = None
    ) -> Emission:
        """Decodes a message. `scaled` is that of the stream's state. Raises DecodeError."""
        for layer in self._layers:
            payload = layer(payload)
        if payload.startswith(GZIP_BEGIN) and self.decoder in WITH_LAYERS:
            payload = inflated(payload)
        fields = self.fields
        if self._needs_time:
            fields = replace(fields, near_us=message.store_us)
        decoded = self._decode(message.topic, payload.removeprefix(BOM_UTF8), fields)
        if self._numbers is not None:
            self._read_numbers(decoded, self._numbers)
        if self._scales is not None:
            self._scales.apply(decoded, scaled)
        if self.rule.is_special:
            self._change_metrics(message.topic, payload, decoded)
        parse_texts(decoded, fields.decimal)
        if self.device_of is not None:
            return Emission(self.device_of(message.topic, message.client_id or ""), decoded)
        if decoded.device is None:
            raise DecodeError(f"no device: the payload has no {', '.join(fields.device)}", "device")
        return Emission(decoded.device, decoded)

    def _decode(self, topic: str, payload: bytes, fields: Fields) -> Decoded:
        decode = self.decoder
        if decode == "json":
            return decode_json(payload, fields)
        if decode == "auto":
            return decode_any(payload, fields, self.metric_of(topic))
        if decode == "csv":
            return decode_csv(payload, self.rule.columns, fields, self.rule.delimiter)
        if decode == "form":
            return decode_form(payload, fields)
        if decode == "number":
            return decode_number(payload, self.metric_of(topic), fields.decimal)
        if decode == "text":
            return decode_text(payload, self.metric_of(topic))
        if decode == "senml" and payload.lstrip()[:1] == b"[":
            document = parse_json(payload)
            keys = count_keys(document)
            decoded = decode_senml(document, fields)
            refuse_repeated_keys(payload, keys, decoded)
            return decoded
        if decode in ("cbor", "messagepack", "senml"):
            parse = parse_messagepack if decode == "messagepack" else parse_cbor
            document, error = parse(payload)
            decoded = (decode_senml if decode == "senml" else decode_document)(document, fields)
            if error is not None:
                decoded.refuse(error, "key")
            return decoded
        if decode == "function":
            return decode_document(self._call(topic, payload), fields)
        return decode_status(
            payload, fields, self.metric_of(topic), any_word=decode == "status",
            value=self.rule.value,
        )  # fmt: skip

    def _call(self, topic: str, payload: bytes) -> Any:
        """Returns what the user's function makes of a payload. Raises DecodeError."""
        assert callable(self.rule.decode)
        try:
            return plain(self.rule.decode(topic, payload))
        except DecodeError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's code, of which all is shown
            name = getattr(self.rule.decode, "__name__", "the function")
            raise DecodeError(f"{name}: {type(error).__name__}: {error}") from None

    def _read_numbers(self, decoded: Decoded, wanted: Callable[[str], object]) -> None:
        """Parses the texts that are numbers by the rule."""
        for at, name in enumerate(decoded.names):
            value = decoded.values[at]
            if type(value) is str and wanted(name):
                text = value.strip()
                point = with_point(text, self.fields.decimal)
                found, unit = measured_value(point or "", by_rule=True) or (
                    number(point or ""), None)  # fmt: skip
                decoded.set_number(at, found)
                decoded.set_unit(at, unit)
                if found is not None and point != text:
                    decoded.exact = (decoded.exact or {}) | {at: text}

    def _change_metrics(self, topic: str, payload: bytes, decoded: Decoded) -> None:
        """Applies the parts of the rule that name or drop metrics, or give units to them."""
        # A payload of one value has its whole name already, where the rule says one.
        has_name = self._names_one and payload.lstrip()[:1] not in (b"{", b"[")
        used: Set[str] = frozenset()
        named = self._names_of_values(decoded) if self.rule.metric_field else {}
        metrics = decoded.names
        if self.rule.value is not None:
            metrics = [named.get(at) or self.metric_of(topic) if name == self.rule.value else name
                       for at, name in enumerate(metrics)]  # fmt: skip
        if self.units is not None:
            texts = {name: value for name, value in zip(decoded.names, decoded.values, strict=True)
                     if type(value) is str}  # fmt: skip
            used = self.units.apply(decoded, metrics, texts)
        drops = self._drops
        if named:
            used = used | {self.rule.metric_field}
        if used or drops is not None:
            kept = [at for at, name in enumerate(decoded.names)
                    if name not in used and not (drops and drops(name))]  # fmt: skip
            decoded.keep(kept)
            metrics = [metrics[at] for at in kept]
        for at, name in enumerate(decoded.names):
            if name == self.rule.value:
                decoded.names[at] = metrics[at]
            elif self._prefix_of is not None and name != ONLINE and not has_name:
                decoded.names[at] = f"{self._prefix_of(topic)}.{name}"
        if self.rule.value is not None and decoded.times is None:
            decoded.keep_one_of_each()  # the metric may be the name of another field

    def _names_of_values(self, decoded: Decoded) -> dict[int, str]:
        """Returns the names that values have in fields beside them, by position. Raises DecodeError
        if a list or a table has values without one: the others' would be theirs."""
        fields = [at for at, name in enumerate(decoded.names) if name == self.rule.metric_field]
        values = [at for at, name in enumerate(decoded.names) if name == self.rule.value]
        in_order = [at for pair in zip(fields, values, strict=False) for at in pair]
        swapped = [at for pair in zip(values, fields, strict=False) for at in pair]
        if len(values) > 1 and (
            len(fields) != len(values) or sorted(in_order) not in (in_order, swapped)
        ):
            raise DecodeError(f"values without {self.rule.metric_field} in a list", "name")
        found = {}
        for at, value in zip(fields, values, strict=False):
            name = decoded.values[at]
            if type(name) is float and name.is_integer():
                name = str(int(name))  # the number of a register
            if type(name) is not str or not 0 < len(name) <= NAME_LENGTH_MAX:
                raise DecodeError(f"{self.rule.metric_field} is no name of a metric", "name")
            found[value] = own_name(name)
        return found


def _any_of(patterns: Sequence[str]) -> Callable[[str], object] | None:
    """Returns the test whether a name matches one of some patterns with `*`, and none of those that
    begin with a `!`."""
    if not patterns:
        return None
    parts: dict[bool, list[str]] = {True: [], False: []}
    for pattern in patterns:
        text = ".*".join(map(re.escape, pattern.removeprefix("!").split("*")))
        parts[pattern.startswith("!")].append(text)
    others = rf"(?!(?:{'|'.join(parts[True])})\Z)" if parts[True] else ""
    return re.compile(rf"{others}(?:{'|'.join(parts[False])})", re.DOTALL).fullmatch


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

    def __init__(self, rules: Sequence[Rule], *, is_scaled: bool = True) -> None:
        self.readers = [Reader(rule, is_scaled=is_scaled) for rule in rules]
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
        """Returns the way in which messages are read together, and the device of all of them."""
        decode = reader.rule.decode
        if decode not in ("auto", "json", "number") or reader.rule.is_special:
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
    """Returns the stream of a topic that matches the rule, and whether it may span partitions.

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
    """Returns the stream of a client."""
    return f"client {client_id or ''}"


def _rank(topic: str) -> int:
    if not topic.startswith(f"{SPARKPLUG}/"):
        return OTHERS_RANK
    return 0 if "/NBIRTH/" in topic else 1 if "/DBIRTH/" in topic else OTHERS_RANK
