"""Declares how the messages of topics are decoded, as data.

    RULES = (
        Rule("factory/+/+/json", decode="json", device="level 2", time="ts", sequence="seq"),
        Rule("factory/+/+/csv", decode="csv", columns=("ts", "temperature", "ok"), time="ts"),
        Rule("factory/+/debug/#", decode="ignore"),
    )

The first rule whose filter matches applies. DEFAULT_RULES follow a user's rules.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from holdfast.protocol.topics.names import InvalidFilter, check_filter
from holdfast_lake.decoders.decoded import DecodeError
from holdfast_lake.decoders.documents import LAYERS
from holdfast_lake.decoders.json_payload import VALUE, Fields
from holdfast_lake.decoders.units import UNIT_LENGTH_MAX

DECODERS: Final = (
    "auto", "json", "csv", "number", "text", "status", "presence", "sparkplug", "cbor",
    "messagepack", "senml", "form", "ignore",
)  # fmt: skip
WITH_LAYERS: Final = frozenset(DECODERS) - {"sparkplug", "ignore"}
"""The decoders that a layer can stand before."""
SPARKPLUG: Final = "spBv1.0"
TIME_FIELDS: Final = ("ts", "timestamp", "time", "event_time")
SENT_FIELDS: Final = ("sent", "sent_at", "published_at")
SEQUENCE_FIELDS: Final = ("seq", "sequence")
ID_FIELDS: Final = ("message_id", "msg_id")
"""The default fields of a message id. `id` is not one: in many payloads it is the device."""

SECONDS_MAX: Final = 10_000_000_000
"""The most seconds of a limit, more than 300 years. Its microseconds fit into 64 bits."""

Names = str | tuple[str, ...] | None

KINDS: Final[Mapping[Any, str]] = {
    str: "a text",
    str | None: "a text or None",
    tuple[str, ...]: "a tuple of texts",
    tuple[str, ...] | None: "a tuple of texts or None",
    Names: "a text or a tuple of texts or None",
    float: "a number",
}
"""Types of fields of a rule, and the kinds of their values in words that `_kind` has, too."""


class RuleError(ValueError):
    """A rule cannot be used. The text names its filter and a correction."""


@dataclass(frozen=True)
class Rule:
    """The way in which the messages of some topics are read. Raises RuleError."""

    filter: str
    """The MQTT topic filter."""
    decode: str | Callable[[str, bytes], Any] = "auto"
    """One of DECODERS, with layers before it: `base64+cbor`. `auto` reads JSON if the payload
    begins like JSON, else a number, boolean or text. A function gets the topic and the payload, and
    returns a document like those of JSON; what it raises is quarantined."""
    device: str = "topic"
    """The source of the device: `topic`, `level 2`, `levels 1-3` (negative from the end: `levels
    1--2`), `client` (the client id), `field name` (of the payload), or `fields model channel? id`,
    joined by a slash, where a field with a `?` may be missing."""
    metric: str = "value"
    """The name of the metric if the payload is one value, or `level 3`, `level -1`, `levels 3--1`.
    With `value`, `field name` is the field of the object that has it."""
    value: str | None = None
    """The field of an object that has the one value: {"value": 13.2} with `value="value"` is like
    the payload 13.2."""
    prefix: str = ""
    """The level of the topic that comes before the metrics of an object, such as `level -1`."""
    drop: tuple[str, ...] = ()
    """The metrics that are left out. `*` stands for any characters. Those that match a pattern with
    a `!` before it stay: ("radio.*", "!radio.rssi")."""
    numbers: tuple[str, ...] = ()
    """The metrics whose texts are numbers, such as "21.5" and "21.5 °C". `*` stands for any
    characters."""
    decimal: str = ""
    """The decimal sign of numbers that are texts: `,` for 1.234,5 and `.` for 1,234.5. It applies
    to payloads of one value, cells of CSV, and `numbers`. Without it, a comma is in no number."""
    units: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The units of metrics that do not say their own: {"temp*": "°C"}. With "field NAME" it is in
    another field of the message, with "last NAME" in another metric of the device, which came
    before. A `*` there is the part of the metric's name for which the first `*` stands. The first
    pattern that matches applies."""
    scales: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The fields with the power of ten by which metrics are multiplied, where the names do not show
    it: {"pv_*": "dc_scale"}. An empty text is none. A `*` is as in `units`."""
    pairs: tuple[str, ...] | None = None
    """The names of key and value in lists of pairs: [{"key": "temp", "value": 3}] is temp. One name
    alone is the field that names the objects of lists: [{"mac": "A1", "rssi": -60}] is A1.rssi."""
    zone: str | None = None
    """The zone of times that name none, such as Europe/Berlin. None: UTC."""
    time_format: str | None = None
    """The format of times as texts, like %d/%m/%Y %H:%M:%S."""
    time: Names = TIME_FIELDS
    """The fields (or CSV columns) with the event time. An unreadable value is an error only in a
    field that the rule names, not in a default one."""
    sent: Names = SENT_FIELDS
    """The fields with the time of publishing, for the latency. Without one the event time is
    used."""
    sequence: Names = SEQUENCE_FIELDS
    """The fields with a number that grows by one with each message, for gaps."""
    id: Names = ID_FIELDS
    """The fields with a text that differs in every message. A second message with the same text is
    dropped. With a default field it must have the same payload, too."""
    sequence_per: str = "topic"
    """The unit that counts: `topic` or `device`. `device` needs a device made from levels or the
    client."""
    columns: tuple[str, ...] = ()
    """The names of the columns (csv), `_` for one to leave out. Empty: the first line has them."""
    delimiter: str = ","
    lateness_s: float = 60.0
    """The seconds by which an event time may be older than the newest before it without being
    late."""
    future_s: float = 300.0
    """The seconds by which an event time may be ahead of the broker's clock."""

    def __post_init__(self) -> None:
        for each in fields(self):
            name, value, kinds = each.name, getattr(self, each.name), KINDS.get(each.type)
            if kinds is not None and _kind(value) not in kinds.split(" or "):
                such = f"; such as {name}=({value!r},)" if kinds.startswith("a tuple") else ""
                raise self._wrong(f"{name}={value!r}; it is {kinds}{such}")
        try:
            check_filter(self.filter)
        except InvalidFilter as error:
            raise RuleError(f"rule {self.filter!r}: {error}") from None
        if self.filter.startswith("$share/"):
            raise RuleError(f"rule {self.filter!r}: write the filter without $share")
        if isinstance(self.decode, str):
            *layers, decoder = self.decode.split("+")
            if decoder not in DECODERS or (layers and decoder not in WITH_LAYERS):
                raise self._wrong(f"decode={self.decode!r}; there are {', '.join(DECODERS)}")
            if not LAYERS.keys() >= set(layers):
                raise self._wrong(
                    f"decode={self.decode!r}; before the + there are {', '.join(LAYERS)}"
                )
        if self.zone is not None:
            self._zone()
        if self.columns and self.decode != "csv":
            raise self._wrong("columns are for decode='csv'")
        if len(self.delimiter) != 1:
            raise self._wrong(f"delimiter={self.delimiter!r}; one character")
        named = [name for name in self.columns if name != "_"]
        if len(set(named)) != len(named):
            raise self._wrong(f"columns has a name twice: {self.columns}")
        if self.sequence_per not in ("topic", "device"):
            raise self._wrong(f"sequence_per={self.sequence_per!r}; there are topic, device")
        if not (0 <= self.lateness_s <= SECONDS_MAX and 0 <= self.future_s <= SECONDS_MAX):
            raise self._wrong(f"lateness_s and future_s are seconds, 0 to {SECONDS_MAX:,}")
        if not isinstance(self.units, Mapping) or not all(map(_is_unit, self.units.items())):
            raise self._wrong(f"units={self.units!r}; such as {{'temp*': '°C', 'x': 'field unit'}}")
        if not isinstance(self.scales, Mapping) or not all(
            isinstance(text, str) for item in self.scales.items() for text in item
        ):
            raise self._wrong(f"scales={self.scales!r}; such as {{'l1_*': '*_scale', 'x': ''}}")
        if self.decimal not in ("", ",", "."):
            raise self._wrong(f"decimal={self.decimal!r}; a comma or a dot")
        if self.decimal and not self.numbers and self.decoder not in ("auto", "number", "csv"):
            raise self._wrong(f"decimal with decode={self.decode!r} needs numbers, the metrics")
        if self.pairs is not None and len(self.pairs) not in (1, 2):
            raise self._wrong(
                f"pairs={self.pairs!r}; the names of key and value, or one that names the objects "
                "of lists: ('mac',)"
            )
        if self.prefix and self._levels(self.prefix) is None:
            raise self._wrong(f"prefix={self.prefix!r}; such as 'level -1'")
        field = self._device_fields()
        if field and self.sequence_per == "device":
            raise self._wrong("sequence_per='device' with a device from the payload; use levels")
        if not field:
            self.device_of()
        if self.metric_field and self.value is None:
            raise self._wrong(f"metric={self.metric!r} needs value, the field with the value")
        self.metric_of()

    def _wrong(self, what: str) -> RuleError:
        return RuleError(f"rule {self.filter!r}: {what}")

    def _device_fields(self) -> tuple[str, ...]:
        """Returns the fields that name the device. A field may have spaces in its name."""
        if self.device.startswith("field "):
            return (self.device.removeprefix("field "),)
        return tuple(self.device.split()[1:]) if self.device.startswith("fields ") else ()

    def _zone(self) -> ZoneInfo:
        try:
            return ZoneInfo(self.zone or "")
        except (ZoneInfoNotFoundError, ValueError):
            raise self._wrong(
                f"zone={self.zone!r} is not known; a name such as 'Europe/Berlin' (where no zone "
                "is known: pip install tzdata)"
            ) from None

    @property
    def decoder(self) -> str:
        """The name of the decoder without layers. `function`: the user's own."""
        return self.decode.split("+")[-1] if isinstance(self.decode, str) else "function"

    @property
    def is_special(self) -> bool:
        """True if its messages are read one by one, because of how times or metrics are made."""
        return bool(
            self.zone or self.time_format or self.pairs or self.value or self.prefix
            or self.drop or self.numbers or self.units or self.scales or self.decimal
        )  # fmt: skip

    @property
    def metric_field(self) -> str:
        """The field of an object that names the metric of its value. Empty: none does."""
        return self.metric[len("field ") :] if self.metric.startswith("field ") else ""

    def fields(self) -> Fields:
        """Returns the fields that the decoders look for."""
        device = self._device_fields()
        required = {
            role
            for role, default in (("time", TIME_FIELDS), ("sent", SENT_FIELDS))
            if getattr(self, role) != default
        }
        if self.sequence != SEQUENCE_FIELDS:
            required.add("sequence")
        if self.id != ID_FIELDS:
            required.add("id")
        return Fields(
            time=_names(self.time),
            sent=_names(self.sent),
            sequence=_names(self.sequence),
            id=_names(self.id),
            device=device,
            pairs=self.pairs,
            zone=None if self.zone is None else self._zone(),
            decimal=self.decimal,
            time_format=self.time_format,
            required=frozenset(required),
        )

    def device_of(self) -> Callable[[str, str], str]:
        """Returns the function (topic, client id) -> device.

        It raises DecodeError for a topic with too few levels.
        """
        if self.device == "topic":
            return lambda topic, client_id: topic
        if self.device == "client":
            return lambda topic, client_id: client_id
        found = self._levels(self.device)
        if found is None:
            raise self._wrong(
                f"device={self.device!r}; there are topic, client, 'level 2', 'levels 1-3', "
                "'field name' and 'fields a b'"
            )
        begin, end = found
        return lambda topic, client_id: _some_levels(topic, begin, end)

    def metric_of(self) -> Callable[[str], str]:
        """Returns the function from a topic to the metric of a payload that is one value.

        It raises DecodeError for a topic with too few levels.
        """
        if not self.metric.startswith(("level ", "levels ")):
            name = VALUE if self.metric_field else self.metric
            return lambda topic: name
        return self.levels_of(self.metric)

    def levels_of(self, text: str) -> Callable[[str], str]:
        """Returns the function from a topic to some of its levels. Raises RuleError."""
        found = self._levels(text)
        if found is None:
            raise self._wrong(f"{text!r}; a name, 'level 3', 'levels 3-4' or 'field tag'")
        begin, end = found
        return lambda topic: _some_levels(topic, begin, end)

    def level_range(self, text: str = "") -> tuple[int, int] | None:
        """Returns the first and last level of the device, or of another text of the rule, or None
        if it is not made from levels."""
        return self._levels(text or self.device)

    def _levels(self, text: str) -> tuple[int, int] | None:
        """Returns the first and last level, counted from 1, or from the end with -1."""
        match = re.fullmatch(r"levels? (-?\d{1,3})(?:-(-?\d{1,3}))?", text)
        if match is None:
            return None
        begin = int(match[1])
        end = int(match[2]) if match[2] is not None else begin
        if begin == 0 or end == 0:
            raise self._wrong(f"{text!r}: levels count from 1, or from the end with -1")
        return begin, end

    def pattern(self) -> str:
        """A regular expression of Java and of Python for the whole topic name.

        A wildcard at the first level matches no name that begins with `$` [MQTT-4.7.2-1].
        """
        levels = self.filter.split("/")
        text = "(?!\\$)" if levels[0] in ("+", "#") else ""
        for at, level in enumerate(levels):
            if level == "#":  # also the level above [MQTT-4.7.1-2]
                text += "[\\s\\S]*" if at == 0 else "(/[\\s\\S]*)?"
            else:
                text += "/" if at else ""
                text += "[^/]*" if level == "+" else _quoted(level)
        return f"^{text}(?![\\s\\S])"


def _quoted(level: str) -> str:
    """Escapes every character that may have a meaning in a regular expression."""
    return "".join(f"\\{c}" if c.isascii() and not c.isalnum() else c for c in level)


def _kind(value: object) -> str:
    """Returns the word of KINDS for a value, or its type."""
    if value is None or isinstance(value, str):
        return "None" if value is None else "a text"
    if isinstance(value, tuple | list) and all(isinstance(each, str) for each in value):
        return "a tuple of texts"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "a number" if is_number else type(value).__name__


def _is_unit(item: tuple[object, object]) -> bool:
    """Returns whether an item of `units` is a pattern, and a unit or a name."""
    pattern, unit = item
    if not isinstance(pattern, str) or not isinstance(unit, str):
        return False
    is_name = unit.startswith(("field ", "last "))
    return bool(unit.strip()) and (is_name or len(unit) <= UNIT_LENGTH_MAX)


def _names(given: Names) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else given


def _some_levels(topic: str, begin: int, end: int) -> str:
    levels = topic.split("/")
    first = begin - 1 if begin > 0 else len(levels) + begin
    last = end if end > 0 else len(levels) + end + 1
    if not 0 <= first < last <= len(levels):
        raise DecodeError(
            f"the topic has {len(levels)} levels, the rule wants level {begin}"
            + (f" to {end}" if end != begin else ""),
            "device",
        )
    found = "/".join(levels[first:last])
    if not found:  # `a//x` and `b//x` would be one device
        raise DecodeError(f"level {begin} of the topic is empty", "device")
    return found


STATUS_LEVELS: Final = {
    "status": "presence", "Status": "presence", "available": "presence", "lwt": "presence",
    "$state": "presence", "availability": "status", "LWT": "status",
}  # fmt: skip


def _metric_of(level: str) -> str:
    """Returns the metric of a plain value on such a topic: the free places on `lot/available` are
    not the `value` of `lot/status`."""
    return VALUE if level in ("status", "availability", "LWT") else level.strip("$")


DEFAULT_RULES: Final = (
    Rule(f"{SPARKPLUG}/#", decode="sparkplug"),
    *(
        Rule("+/" * depth + name, decode=decode, device="levels 1--2", metric=_metric_of(name))
        for name, decode in STATUS_LEVELS.items()
        for depth in range(1, 7)
    ),
    Rule("#"),
)
"""The default rules.

They read Sparkplug B, and online or offline on topics that end in one of STATUS_LEVELS.
They read everything else by its look. Topics that begin with `$` are left out.
"""


UNMARKED_LEVELS: Final = ("Status", "available", "lwt", "$state")
"""The last levels with a default rule that the first version without marks did not have."""


def default_mark() -> str:
    """Returns a text that differs for other default rules. A new field of Rule does not count."""
    fields = Rule("#").__dict__
    told = [
        [(name, each) for name, each in rule.__dict__.items() if each != fields[name]]
        for rule in DEFAULT_RULES
    ]
    return sha256(repr(told).encode()).hexdigest()[:16]


def with_defaults(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Returns some rules, followed by the default ones."""
    return (*rules, *DEFAULT_RULES)
