"""Finds the roles of fields in messages: time, counter, id, numbers in texts, lists, columns."""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from holdfast_lake.decoders.decoded import DecodeError
from holdfast_lake.decoders.documents import GZIP_BEGIN, inflated, parse_cbor, parse_messagepack
from holdfast_lake.decoders.json_payload import NUMBERS, parse_json
from holdfast_lake.decoders.scales import scale_reasons
from holdfast_lake.decoders.text_payload import plain_value
from holdfast_lake.decoders.times import parse_time
from holdfast_lake.decoders.units import (
    UNIT_FIELDS,
    decimal_of,
    known_unit,
    measured_field,
    measured_value,
)
from holdfast_lake.tables.alike import EARLIEST_US
from holdfast_lake.tables.rules import ID_FIELDS, SEQUENCE_FIELDS, TIME_FIELDS, Rule

MESSAGES_PER_TOPIC: Final = 50
"""The newest messages of a topic that are looked at."""
_ID_NAME: Final = re.compile(
    r"(?:.*_)?(?:uuid|guid|(?:event|message|msg|order|request|record|report|measurement|reading|"
    r"sample|uplink|packet|transaction|alarm|alert|notification|correlation)_?id)"
)
"""The words of a field that may identify a message. The id of a card is not one: it comes again."""
_COUNTER_NAME: Final = re.compile(
    r"(?:.*_)?(?:f_?cnt(?:_?up)?|seq(?:uence)?(?:_?(?:no|nr|num|number|id|count|counter))?|"
    r"(?:msg|message|packet|pkt|frame|telegram|sample|record|report|uplink|tx)_?"
    r"(?:no|nr|num|number|id|idx|index|cnt|count|counter))"
)
"""The words of a field that may count the messages. A charge of 40 %, 41 %, 42 % does not."""
_NUMBER_NAME: Final = re.compile(r"(?:.*_)?(?:n|no|nr|num|number|index|idx|count|counter|cnt)")
"""The words of a field that may count the messages, or what a meter counts."""
CODE_NAME: Final = re.compile(
    r"(?:.*_)?(?:fw|sw|hw|ver|version|firmware|software|hardware|rev|revision|release|build|model|dpt|"
    r"serial|sn|id|code|key|imei|imsi|iccid|mac|ean|zip|plz|phone|pin)(?:_?(?:ver|version|no|nr|"
    r"number))?"
)
"""The words of a field whose digits are a name: version 1.10 is not 1.1."""
_NO_VALUES: Final = frozenset({"", "-", "--", "n/a", "na", "nan", "none", "null", "unavailable",
                               "unknown", "error"})  # fmt: skip
"""The texts of a field of numbers that has none now. They stay texts."""
_NAME_FIELDS: Final = ("tag", "tagname", "tagpath", "name", "sensor", "metric", "type", "point",
                       "measurement", "parameter", "variable", "signal", "key", "property",
                       "item")  # fmt: skip
"""The fields that may say what the value beside them is, in small letters without underscores."""
IDS_MIN: Final = 10
"""The fewest messages from which a message id is proposed."""
ID_LENGTH_MIN: Final = 6
"""The fewest characters of a message id."""
UUID_LENGTH: Final = 20
"""The fewest characters of a message id in the field `id`, which else is a device or a card."""
_UNIT_NAME: Final = re.compile(r"(.*?)[._]?(?:[uU]nits?|UNITS?|unit_of_measurement|uom)")
"""The name of a field that may be a unit, with the name of what it is the unit of."""
_DECIMAL_COMMA: Final = re.compile(r"[+-]?\d+,\d+(\s*[^\d\s,;.][^\s,;]*)?")
"""A text that is probably one number, `20,5 °C`, and not two cells."""
PAIR_KEYS: Final = ("id", "name", "key", "tag", "n", "tagname")
PAIR_VALUES: Final = ("v", "val", "value", "tagvalue")
"""The names of key and value in lists of named values, in small letters without underscores."""
_ITEM_NAMES: Final = ("mac", "dmac", "bleaddr", "address", "addr", "deviceid", "sensorid",
                      "deveui", "uniqueid", "imei", "serial", "serialnumber", "sn", "id", "name",
                      "device", "sensor")  # fmt: skip
"""The fields that may name the objects of lists, in small letters without underscores."""
_TIME_KINDS: Final = frozenset({int, float, str, dict})
DAY_US: Final = 86_400_000_000
MINUTE_US: Final = 60_000_000
QUARTER_US: Final = 900_000_000
"""The step of the offsets of time zones in microseconds."""
LAG_US: Final = 120_000_000
"""The microseconds that a message may need, so that a constant offset is still one."""
LETTERS: Final = 0.7
"""The share of letters in a text of another encoding than UTF-8."""
SHARE: Final = 0.9
"""The share of messages that must agree."""
Arguments = dict[str, Any]
"""The arguments of a rule."""
_Value = TypeVar("_Value", bound=Hashable)
Document = dict[str, Any]
"""A JSON object of a device."""


@dataclass
class TopicMessages:
    """The messages of one topic."""

    name: str
    messages: list[tuple[bytes, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.levels = tuple(self.name.split("/"))
        self.documents: list[tuple[Any, int]] = []
        self.decode = ""
        """The decoder of binary documents. Empty: the default one."""
        self.uses: dict[Rule, Any] = {}
        """The readings of the messages, by each rule that was tried."""

    def parse(self) -> None:
        """Parses the newest messages."""
        self.messages = self.messages[-MESSAGES_PER_TOPIC:]
        self.documents = [(_parsed(parse_json, payload), at) for payload, at in self.messages]
        if all(_is_senml(document) for document, _ in self.documents):
            self.decode = "senml"
            return
        is_text = any(map(_is_text, (payload for payload, _ in self.messages)))
        for decode, parse in () if is_text else _BINARY.items():
            found = [(_parsed(parse, payload), at) for payload, at in self.messages]
            if all(type(document) is dict and document for document, _ in found):
                self.decode, self.documents = decode, found
                return

    @property
    def objects(self) -> list[tuple[Document, int]]:
        """The messages that are JSON objects."""
        return [(each, at) for each, at in self.documents if isinstance(each, dict)]


_BINARY: Final[Mapping[str, Callable[[bytes], Any]]] = {
    "cbor": lambda payload: parse_cbor(payload)[0],
    "messagepack": lambda payload: parse_messagepack(payload)[0],
    "zlib+json": lambda payload: parse_json(inflated(payload)),
}


def _parsed(parse: Callable[[bytes], Any], payload: bytes) -> Any:
    try:
        return parse(inflated(payload) if payload.startswith(GZIP_BEGIN) else payload)
    except DecodeError:
        return None


def _is_senml(document: Any) -> bool:
    """Returns whether a document is a list of SenML's records, as far as their names show it."""
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(each, dict) and each.keys() & {"n", "bn"} for each in document)
        and any(each.keys() & {"v", "vs", "vb", "vd"} for each in document)
        and any(each.keys() & {"bn", "bt", "bu", "u", "t"} for each in document)
    )


def _is_text(payload: bytes) -> bool:
    return "\ufffd" not in payload.decode(errors="replace")


def is_picture(payload: bytes) -> bool:
    """Returns whether a payload is no text in an encoding of 8 bits either."""
    letters = sum(each in b"\t\r\n" or 32 <= each < 127 for each in payload)
    return not _is_text(payload) and letters < LETTERS * len(payload)


def roles_of(group: Sequence[TopicMessages], zone: str) -> Arguments:
    """Returns the fields of objects with a time or a counter under another name, and numbers in
    texts."""
    objects = [(document, at) for topic in group for document, at in topic.objects]
    if not objects:
        named = named_value(group)
        why = {"why": f"{named['metric']} says what {named['value']} is"} if named else {}
        return named | why or named_items(group) or _measured_texts(group)
    kinds = kinds_of(objects)
    found, reasons = _time_of(group, objects, kinds, zone)
    growing = [name for name, of_name in kinds.items() if int in of_name
               and is_counter(name, group) and not _offset_is_near(name, objects)]  # fmt: skip
    counters = [name for name in growing if _COUNTER_NAME.fullmatch(words_of(name))]
    reasons += [
        f'if {name} counts messages and nothing else, sequence="{name}"'
        for name in growing
        if not counters and _NUMBER_NAME.fullmatch(words_of(name))
    ]
    if counters and counters[0] not in SEQUENCE_FIELDS:
        found["sequence"] = counters[0]
        reasons.append(f"{counters[0]} counts the messages")
    elif (
        not counters
        and any(name in each for name in SEQUENCE_FIELDS for each, _ in objects)
        and not any(_grows(name, topic) for name in SEQUENCE_FIELDS for topic in group)
    ):
        found["sequence"] = None
        reasons.append("the sequence does not count")
    if not any(name in each for name in ID_FIELDS for each, _ in objects):
        ids = [name for name in kinds if _is_message_id(name, group)]
        if ids:
            found["id"] = ids[0]
            reasons.append(f"{ids[0]} differs in every message")
    pairs = _pairs_of([document for document, _ in objects])
    if pairs is not None:
        found["pairs"] = pairs
        reasons.append(f"lists of {pairs[0]} and {pairs[1]}")
    elif items := named_items(group):
        found["pairs"] = items["pairs"]
        reasons.append(items["why"])
    found |= named_value(group)
    if "value" in found:
        reasons.append(f"{found['metric']} says what {found['value']} is")
    signs = _signs_of(objects, [name for name, of_name in kinds.items() if str in of_name])
    decimal = next(filter(None, signs.values()), "")
    texts = [name for name, sign in signs.items() if sign == decimal]
    if texts:
        found["numbers"] = tuple(texts)
        are = "one field is a number" if len(texts) == 1 else f"{len(texts)} fields are numbers"
        reasons.append(f"{are} in texts")
    if decimal:
        found["decimal"] = decimal
        reasons.append(f"their decimal sign is {decimal!r}; texts with another one stay texts")
    roles = {*TIME_FIELDS, *SEQUENCE_FIELDS, *ID_FIELDS, *map(str, found.values())}
    numbers = [*texts, *(name for name, of_name in kinds.items() if of_name & NUMBERS
                         and name not in roles and _is_number(name, objects))]  # fmt: skip
    units, unclear = _unit_fields(objects, [*kinds], numbers)
    if units:
        found["units"] = units
    reasons += [f'of what is {name} the unit? units={{"...": "field {name}"}}' for name in unclear]
    reasons += scale_reasons([document for document, _ in objects])
    return found | ({"why": "; ".join(reasons)} if reasons else {})


def _time_of(
    group: Sequence[TopicMessages],
    objects: Sequence[tuple[Document, int]],
    kinds: Mapping[str, set[type]],
    zone: str,
) -> tuple[Arguments, list[str]]:
    """Returns the time of messages if a rule has to name it, and the reasons."""
    found: Arguments = {}
    reasons: list[str] = []
    having = {name: [each for each in objects if name in each[0]] for name in TIME_FIELDS}
    usual = [name for name in TIME_FIELDS if having[name]]
    readable = [name for name in usual if _offset_is_near(name, having[name])]
    if not readable:
        named = next((name for name, of_name in kinds.items() if of_name & _TIME_KINDS
                      and _offset_is_near(name, objects) and _moves(name, group)),
                     None)  # fmt: skip
        if named is not None:
            # Times that differ are right, too: a phone sends positions of hours ago.
            of_time, why = time_arguments(named, group, zone)
            if "zone" not in of_time and offset_of(named, group) is None:
                of_time, why = {"time": named}, ""
                if any(_names_no_zone(inner_value(document, named)) for document, _ in objects):
                    why = ' of UTC, as it names no zone: if it is local, zone="Europe/Berlin"'
            found |= of_time
            reasons.append(f"the time is {named}{why}")
        elif usual and not any(_is_of_the_past(name, having[name]) for name in usual):
            found["time"] = None
            reasons.append(f"{usual[0]} is no time of the message")
    elif offset_of(readable[0], group):
        of_time, why = time_arguments(readable[0], group, zone)
        found |= of_time
        reasons.append(f"the time is {readable[0]}{why}")
    return found, reasons


def named_value(group: Sequence[TopicMessages]) -> Arguments:
    """Returns the rule for objects whose value is of what another field says. Without it, the speed
    of a pump and the level of a tank would be one metric. A name that each topic has one of is the
    device's."""
    objects = [[each for document, _ in topic.documents for each in items_of(document)]
               for topic in group]  # fmt: skip
    documents = [each for some in objects for each in some]
    value = next(iter(_spelled(PAIR_VALUES, documents)), "")
    for name in _spelled(_NAME_FIELDS, documents) if value else ():
        names = [each.get(name) for each in documents]
        most = len(names) / 2 if name.lower() in ("name", "type", "key", "item") else len(names)
        if (
            all(type(each) is str for each in names)
            and len(set(names)) <= most
            and (any(len({each[name] for each in some}) > 1 for some in objects))
        ):
            return {"metric": f"field {name}", "value": value}
    return {}


def _spelled(names: Sequence[str], documents: Sequence[Document]) -> list[str]:
    """Returns the fields that all of some objects have under one of some names, in the order of
    these: `Tag` and `TAG` are `tag`, and so is `tagName` the `tagname`."""
    common = set(documents[0]).intersection(*documents) if documents else set()
    plain = {name: name.lower().replace("_", "") for name in common}
    found = [name for name in common if plain[name] in names]
    return sorted(found, key=lambda name: (names.index(plain[name]), name))


def items_of(document: Any) -> list[Document]:
    """Returns an object, or the objects of a list of readings that have their own times."""
    if isinstance(document, dict):
        return [document]
    is_list = isinstance(document, list) and all(isinstance(each, dict) for each in document)
    has_times = is_list and all(each.keys() & set(TIME_FIELDS) for each in document)
    return document if has_times else []


def _pairs_of(documents: Sequence[Document]) -> tuple[str, str] | None:
    """Returns the names of key and value of the lists that each of some objects has."""
    lists = [[each for each in document.values() if type(each) is list and each
              and all(type(item) is dict for item in each)] for document in documents]  # fmt: skip
    items = [item for each in lists for found in each for item in found]
    values = _spelled(PAIR_VALUES, items) if all(lists) else []
    for key in _spelled(PAIR_KEYS, items) if values else ():
        if all(type(each[key]) is str for each in items):
            return key, values[0]
    return None


def named_items(group: Sequence[TopicMessages]) -> Arguments:
    """Returns the rule for lists whose objects have names and change their places. Without it, the
    tags that a gateway hears would be one metric, or one after the other."""
    lists = [each for topic in group for document, _ in topic.documents
             for each in lists_of(document)]  # fmt: skip
    some = [item for _, items in lists for item in items]
    for name in _spelled(_ITEM_NAMES, [max(some, key=len)]) if some else ():
        names = [each[name] for each in some if type(each.get(name)) in (str, int)]
        if len(names) < SHARE * len(some):
            continue
        places: dict[tuple[str, int], set[Any]] = defaultdict(set)
        for place, items in lists:
            for at, item in enumerate(items):  # readings with times have no places in a list
                places[place, 0 if not place and items_of(items) else at].add(str(item.get(name)))
        is_moving = any(len(some_names) > 1 for some_names in places.values())
        if is_moving and len(come_again(names)) > 1:
            return {"pairs": (name,), "why": f"each object of a list is that of its {name}"}
    return {}


def lists_of(document: Any) -> list[tuple[str, list[Document]]]:
    """Returns the lists of objects in a document, or the document, with their fields."""
    some = document.items() if isinstance(document, dict) else [("", document)]
    return [(name, each) for name, each in some if isinstance(each, list) and each
            and all(isinstance(item, dict) for item in each)]  # fmt: skip


def come_again(values: Sequence[_Value]) -> list[_Value]:
    """Returns the values whose first and last place are at least half of the sequence apart. The
    names of devices are so. The id of an event, and the version before an update, are not."""
    last = {value: at for at, value in enumerate(values)}
    first = {value: len(values) - 1 - at for at, value in enumerate(reversed(values))}
    return [
        value for value in dict.fromkeys(values) if 2 * (last[value] - first[value]) >= len(values)
    ]


def words_of(name: str) -> str:
    """Returns the last part of a name in small letters with underscores: `f_cnt` for `up.fCnt`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name.rpartition(".")[2]).lower()


def kinds_of(objects: Sequence[tuple[Document, int]]) -> dict[str, set[type]]:
    """Returns the names of the fields of some objects, those inside of objects with dots, and the
    types of their values."""
    kinds: dict[str, set[type]] = {}
    for document, _ in objects[:MESSAGES_PER_TOPIC]:
        for name, value in document.items():
            kinds.setdefault(name, set()).add(type(value))
            if isinstance(value, dict):
                for inner, each in value.items():
                    kinds.setdefault(f"{name}.{inner}", set()).add(type(each))
    return kinds


def inner_value(document: Document, name: str) -> Any:
    """Returns the value of a field, also of one inside of an object. None: there is none."""
    first, _, rest = name.partition(".")
    inner: Any = document.get(first)
    is_inside = name not in document and isinstance(inner, dict)
    return inner.get(rest) if is_inside else document.get(name)


def _offset_is_near(name: str, objects: Sequence[tuple[Document, int]]) -> bool:
    """Returns whether a field is a time within a day of storing, in nearly all messages."""
    others = 0
    for document, store_us in objects:
        found = inner_value(document, name)
        time_us = parse_time(found) if type(found) in _TIME_KINDS else None
        others += time_us is None or abs(time_us - store_us) >= DAY_US
        if others > (1 - SHARE) * len(objects):
            return False
    return True


def _moves(name: str, group: Sequence[TopicMessages]) -> bool:
    """Returns whether a time is another one in later messages. The time of a sunrise, or of the
    last start, is near as well, and not that of the message."""
    times = [[(time_us, at) for document, at in topic.objects
              if (time_us := parse_time(inner_value(document, name))) is not None]
             for topic in group]  # fmt: skip
    is_minutes = all(time_us % MINUTE_US == 0 for found in times for time_us, _ in found)
    step_us = MINUTE_US if is_minutes else 1_000_000
    pairs = [pair for found in times for pair in pairwise(found)]
    apart = [pair for pair in pairs if pair[1][1] - pair[0][1] >= step_us]
    changes = [before != after for (before, _), (after, _) in apart or pairs]
    if apart:
        return sum(changes) >= SHARE * len(changes)
    return any(changes) or (not changes and offset_of(name, group) is not None)


def _is_of_the_past(name: str, objects: Sequence[tuple[Document, int]]) -> bool:
    """Returns whether a field is a time that is believed, of any age, in nearly all messages."""
    found = [(parse_time(inner_value(document, name)), store_us) for document, store_us in objects]
    past = sum(time_us is not None and EARLIEST_US <= time_us <= at for time_us, at in found)
    return past >= SHARE * len(objects)


def _steps(name: str, topic: TopicMessages) -> list[int]:
    found = [inner_value(document, name) for document, _ in topic.objects]
    return [after - before for before, after in pairwise(n for n in found if type(n) is int)]


def is_counter(name: str, group: Sequence[TopicMessages]) -> bool:
    """Returns whether a field grows by one with each message of a topic, in messages enough."""
    ones = others = 0
    most = (1 - SHARE) * sum(len(topic.messages) for topic in group)
    for topic in group:
        steps = _steps(name, topic)
        ones += steps.count(1)
        others += len(steps) - steps.count(1)
        if others > most:
            return False
    return ones + others >= 5 and ones >= SHARE * (ones + others)


def _grows(name: str, topic: TopicMessages) -> bool:
    """Returns whether a number of a topic grows, or it has few. It seldom steps back: the numbers
    of two devices below one topic do so all the time."""
    steps = _steps(name, topic)
    if len(steps) < 2:
        return any(type(inner_value(document, name)) is int for document, _ in topic.objects)
    return sum(step < 0 for step in steps) <= len(steps) / 5 and max(steps) > 0


def _is_message_id(name: str, group: Sequence[TopicMessages]) -> bool:
    """Returns whether a field identifies the message: a text that messages share only if they are
    equal."""
    ids = [inner_value(document, name) for topic in group for document, _ in topic.objects]
    if not _ID_NAME.fullmatch(words_of(name)) and not (
        name == "id" and all(isinstance(each, str) and len(each) >= UUID_LENGTH for each in ids)
    ):
        return False
    payloads = {payload for topic in group for payload, _ in topic.messages}
    return (
        len(payloads) >= IDS_MIN
        and all(isinstance(each, str) and len(each) >= ID_LENGTH_MIN for each in ids)
        and len(set(ids)) == len(payloads)
        and not _offset_is_near(name, [each for topic in group for each in topic.objects])
    )


def _signs_of(objects: Sequence[tuple[Document, int]], names: Sequence[str]) -> dict[str, str]:
    """Returns the decimal sign of each field whose texts are numbers. A device that writes 21.5 in
    quotes writes 7 in quotes, too."""
    signs = {name: _number_texts(name, objects) for name in names}
    if any(signs[name] is not None and type(plain_value(str(inner_value(each, name)))) is float
           for name in names for each, _ in objects):  # fmt: skip
        signs = {name: _number_texts(name, objects, like_others=True) for name in names}
    return {name: sign for name, sign in signs.items() if sign is not None}


def _number_texts(
    name: str, objects: Sequence[tuple[Document, int]], *, like_others: bool = False
) -> str | None:
    """Returns the decimal sign that a rule has to name for a field whose texts are numbers in all
    messages, and no identifiers. Empty: it needs none. None: they are no numbers.

    With `like_others`, another field of the messages is a number in a text.
    """
    texts = []
    for document, _ in objects:
        value = inner_value(document, name)
        if value is None or str(value).strip().lower() in _NO_VALUES:
            continue
        if not isinstance(value, str):
            return None
        texts.append(value.strip())
    decimal = decimal_of(texts)
    are_numbers = (
        len(texts) >= 3
        and all(
            type(plain_value(text, decimal)) in NUMBERS
            or measured_value(text, by_rule=True, decimal=decimal)
            for text in texts
        )
        and not CODE_NAME.fullmatch(words_of(name))
        and (
            any("." in text or decimal for text in texts)
            or len(set(texts)) > (1 if like_others else len(texts) / 2)
            or all(map(measured_value, texts))
        )
        and not _offset_is_near(
            name, [each for each in objects if inner_value(each[0], name) is not None]
        )
    )
    return decimal if are_numbers else None


def _is_number(name: str, objects: Sequence[tuple[Document, int]]) -> bool:
    """Returns whether a field is a number in each message that has it."""
    kinds = {type(inner_value(document, name)) for document, _ in objects} - {type(None)}
    return bool(kinds) and kinds <= NUMBERS


def _unit_fields(
    objects: Sequence[tuple[Document, int]], names: Sequence[str], numbers: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Returns the units of metrics that are in other fields and need a rule, and the fields with a
    unit of which the metric is not known."""
    units: dict[str, str] = {}
    unclear = []
    for name in names:
        match = _UNIT_NAME.fullmatch(name)
        values = [found for document, _ in objects if match is not None
                  and (found := inner_value(document, name)) is not None]  # fmt: skip
        if match is None or not values or None in map(known_unit, values):
            continue
        above, _, last = name.rpartition(".")
        holders = [inner_value(document, above) if above else document for document, _ in objects]
        if last in UNIT_FIELDS and all(
            measured_field(holder.keys(), [key for key in holder if type(holder[key]) is bool])
            for holder in holders
            if type(holder) is dict and last in holder
        ):
            continue  # the decoder gives it to the number beside it
        same = [each for each in numbers if each.lower() == match[1].lower()]
        of_name = same or (numbers if len(numbers) == 1 else [])
        if of_name:
            units[of_name[0]] = f"field {name}"
        else:
            unclear.append(name)
    return units, unclear


_PATH: Final = re.compile(r"value_json((?:\.\w+|\[['\"][^'\"\]]+['\"]\])+)")
"""The field that a template of Home Assistant takes: `value_json.temperature`."""


def discovered_units(topics: Iterable[TopicMessages]) -> dict[str, dict[str, str]]:
    """Returns the units that devices announce to Home Assistant, by topic and field. The field is
    empty for payloads of one value."""
    found: dict[str, dict[str, str]] = {}
    for topic in topics:
        for document, _ in topic.objects if topic.levels[-1] == "config" else ():
            parts = document.get("components", document.get("cmps"))
            for part in (document, *(parts.values() if isinstance(parts, dict) else ())):
                one = document | part if isinstance(part, dict) else {}
                unit = known_unit(one.get("unit_of_measurement", one.get("unit_of_meas")))
                state = one.get("state_topic", one.get("stat_t"))
                template = one.get("value_template", one.get("val_tpl", "{{ value }}"))
                if unit is None or not isinstance(state, str) or not isinstance(template, str):
                    continue
                path = _PATH.search(template)
                if path is None and "value_json" in template:
                    continue
                names = re.findall(r"\w[^.'\"\[\]]*", path[1]) if path is not None else []
                name = state.replace("~", str(document.get("~", "")))
                found.setdefault(name, {})[".".join(names)] = unit
    return found


def _measured_texts(group: Sequence[TopicMessages]) -> Arguments:
    """Returns the decoder for texts that are all numbers with one unit, such as `16A`. Each alone
    may be a code."""
    texts = {payload.decode(errors="replace").strip()
             for topic in group for payload, _ in topic.messages}  # fmt: skip
    decimal = decimal_of(texts, may_be_two=True)
    if decimal:
        why = f"the decimal sign is {decimal!r}: leave it out if it is between two values"
        return {"decimal": decimal, "why": why}
    found = [measured_value(text, by_rule=True) for text in texts]
    units = {each[1] for each in found if each is not None}
    if len(found) < 3 or None in found or len(units) > 1 or all(map(measured_value, texts)):
        return {}
    return {"decode": "number", "why": f"numbers in {units.pop()}"}


def csv_of(group: Sequence[TopicMessages]) -> Arguments:
    """Returns the columns of lines with the same number of cells, most of them numbers."""
    parts = [(payload.decode(errors="replace").splitlines(), store_us)
             for topic in group for payload, store_us in topic.messages]  # fmt: skip
    heads = {lines[0] for lines, _ in parts if len(lines) > 1}
    has_head = (
        len(heads) == 1
        and all(len(lines) > 1 for lines, _ in parts)
        and all(plain_value(cell.strip()) is None for cell in re.split("[;,\t]", min(heads)))
    )
    lines = [(line, store_us) for lines, store_us in parts for line in lines[has_head:]]
    if any(topic.objects for topic in group):
        return {}
    for delimiter in (";", ",", "\t"):
        counts = {line.count(delimiter) for line, _ in lines}
        if len(counts) != 1 or not lines or counts == {0}:
            continue
        whole = [line.strip() for line, _ in lines]
        if delimiter == "," and (decimal_of(whole) or all(map(_DECIMAL_COMMA.fullmatch, whole))):
            return {}
        cells = [line.split(delimiter) for line, _ in lines]
        texts = [cell.strip() for line in cells for cell in line]
        decimal = decimal_of(texts) if delimiter != "," else ""
        numbers = sum(plain_value(text, decimal) is not None for text in texts)
        if numbers < sum(map(len, cells)) / 2:
            continue
        is_time = all(
            (time_us := parse_time(line[0].strip())) is not None and abs(time_us - at) < DAY_US
            for line, (_, at) in zip(cells, lines, strict=True)
        )
        more = {"delimiter": delimiter} if delimiter != "," else {}
        more |= {"decimal": decimal} if decimal else {}
        sign = f"; the decimal sign is {decimal!r}" if decimal else ""
        if has_head:
            first = min(heads).split(delimiter)[0].strip()
            of_time = {"time": first} if is_time and first not in TIME_FIELDS else {}
            why = f"lines of cells, of which the first names the columns{sign}"
            return {"decode": "csv", "why": why} | more | of_time
        columns = tuple(f"column_{number}" for number in range(1, len(cells[0]) + 1))
        if is_time:
            columns = ("ts", *columns[1:])
        why = f"lines of cells: name the columns, `_` leaves one out{sign}"
        firsts = [line[is_time].strip() for line in cells]
        if len(come_again(firsts)) > 1 and not any(
            plain_value(each, decimal) is not None for each in firsts
        ):
            column = columns[is_time]
            why += f'; if {column} names a device, device="field {column}", else they are mixed'
        return {"decode": "csv", "columns": columns, "why": why} | more
    return {}


def offset_of(
    name: str, topics: Sequence[TopicMessages], zone: ZoneInfo | None = None
) -> int | None:
    """Returns by how much the times of a field are ahead of the broker's, in quarters of an hour.

    None: they are no times, or do not agree.
    """
    offsets = []
    for topic in topics:
        for document, store_us in topic.objects:
            found = inner_value(document, name)
            time_us = None if found is None else parse_time(found, zone, store_us)
            if time_us is not None:
                offsets.append(time_us - store_us)
    if not offsets:
        return None
    step = round(max(offsets) / QUARTER_US) * QUARTER_US
    near = sum(abs(offset - step) <= LAG_US for offset in offsets)
    return step if near >= SHARE * len(offsets) and abs(step) < DAY_US else None


def _names_no_zone(value: Any) -> bool:
    """Returns whether a time depends on the zone of its rule."""
    return parse_time(value) != parse_time(value, ZoneInfo("Etc/GMT+1"))


def _is_local(name: str, topics: Sequence[TopicMessages], zone: str) -> bool:
    """Returns whether the times of a field are right if those without a zone are of this one."""
    try:
        return offset_of(name, topics, ZoneInfo(zone)) == 0
    except (ZoneInfoNotFoundError, ValueError):
        return False


def local_zone() -> str:
    """Returns the zone of this machine, or an empty text if it is not known."""
    name = os.environ.get("TZ", "").removeprefix(":")
    if not name:
        place = str(Path("/etc/localtime").resolve())
        name = place.partition("/zoneinfo/")[2]
    return "" if name in ("UTC", "Etc/UTC", "Universal", "Zulu") else name


def time_arguments(name: str, topics: Sequence[TopicMessages], zone: str) -> tuple[Arguments, str]:
    """Returns the arguments of a rule for a time that may be local, and an explanation."""
    offset_us = offset_of(name, topics)
    if offset_us == 0:
        return {"time": name}, ""
    if _is_local(name, topics, zone):
        return {"time": name, "zone": zone}, ""
    if offset_us is None:
        why = f"; {name} is no time that agrees with the broker's, which is used"
    elif not any(_names_no_zone(inner_value(document, name))
                 for topic in topics for document, _ in topic.objects):  # fmt: skip
        return {"time": None}, (
            f"; {name} is {_distance(offset_us)} the broker's, which is used: it counts from 1970 "
            "or names its zone, so no zone corrects it"
        )
    else:
        why = (
            f"; {name} is local time, {_distance(offset_us)} the broker's, which is used: to use "
            f'it, write time="{name}" and its zone, such as zone="Europe/Berlin"'
        )
    return {"time": None, "drop": (name,)}, why


def _distance(offset_us: int) -> str:
    return f"{abs(offset_us) / 3.6e9:.2f} h {'ahead of' if offset_us > 0 else 'behind'}"
