"""Finds the fields that name devices, and the topics that mix the messages of several.

`infer` proposes rules by these fields (inference.py). Without a rule a topic is a device, so all
devices that publish on one topic are one device of the tables. `mixtures` finds such topics in a
sample of the messages.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast_lake.decoders.json_payload import NUMBERS, VALUE
from holdfast_lake.tables.field_roles import (
    CODE_NAME,
    Arguments,
    Document,
    TopicMessages,
    come_again,
    inner_value,
    is_counter,
    items_of,
    kinds_of,
    lists_of,
    named_items,
    named_value,
    words_of,
)
from holdfast_lake.tables.rules import ID_FIELDS, SENT_FIELDS, SEQUENCE_FIELDS, TIME_FIELDS

DEVICE_FIELDS: Final = (
    ("device_id",), ("deviceId",), ("device",), ("dev_id",), ("devEUI",), ("sensor_id",),
    ("model", "id"), ("id",), ("mac",), ("device_name",), ("deviceName",), ("sensor_name",),
    ("sensor",), ("name",),
)  # fmt: skip
"""The fields that may name a device, if one topic has several."""
_DEVICE_NAME: Final = re.compile(
    r"(?:unique|dev|device|sensor|node|meter|module|station|endpoint|slave|unit|beacon|tracker|asset|"
    r"vehicle|probe|entity|battery|bms|pack)_?id|pack|(?:device|sensor|node|meter|message|station)\.id|dev_?eui|imei|[bd]?mac|mmsi|"
    r"icao(?:24)?|vin|slave|(?:ert)?serial(?:_?(?:no|nr|number))?|(?:ble_?|mac_?)?addr(?:ess)?"
)
"""The words of a field that may name a device under another spelling or inside of an object."""
OFTEN_OTHERS: Final = frozenset({"id", "mac", "device_name", "deviceName", "sensor_name", "sensor",
                                 "name"})  # fmt: skip
"""Those of them that name a device only if few values come again and again."""
_ADDRESS: Final = re.compile(r"[\dA-Fa-f:_-]+")
"""The address of a device, and not of a house or of the internet."""
FIELDS_MAX: Final = 10
"""The most of such fields that are looked at: a payload may have thousands."""
_NO_READINGS: Final = frozenset((*TIME_FIELDS, *SENT_FIELDS, *SEQUENCE_FIELDS, *ID_FIELDS))
_COMMANDS: Final = frozenset({"set", "get", "cmnd", "cmd", "command", "commands", "request", "rpc"})
"""The levels of topics on which several clients command one device."""


@dataclass(frozen=True)
class Mixture:
    """Messages of several devices that are one in the tables, or of several metrics."""

    arguments: Arguments
    """The arguments of a rule that keeps them apart. Its filter may be missing."""
    field: str
    """The field that shows the difference, or `client id`."""
    values: tuple[str, ...]
    """Its values, in the order in which they came."""
    topics: tuple[str, ...]
    messages: int
    """The messages that were looked at and have the field."""


def joined(found: Iterable[Mixture]) -> list[Mixture]:
    """Returns the mixtures with those of topics of one shape, and with one rule, as one."""
    alike: dict[Any, list[Mixture]] = defaultdict(list)
    for each in found:
        if len(each.values) > 1:  # 1 and "1" are one device
            alike[repr(each.arguments), each.topics[0].count("/")].append(each)
    result = []
    for some in alike.values():
        names = [name for each in some for name in each.topics]
        levels = zip(*(name.split("/") for name in names), strict=True)
        shape = "/".join(each[0] if len(set(each)) == 1 else "+" for each in levels)
        arguments = {"filter": shape} | some[0].arguments
        messages = sum(each.messages for each in some)
        result.append(replace(some[0], arguments=arguments, topics=(*names,), messages=messages))
    return result


def mixture_of(topic: TopicMessages, clients: Sequence[str]) -> Mixture | None:
    """Returns the mixture of a topic, if it is one. `clients` has the client id of each message."""

    def of(arguments: Arguments, field: str, values: Sequence[object], messages: int) -> Mixture:
        """Returns the mixture of a field with some values."""
        found = tuple(dict.fromkeys(map(str, values)))
        return Mixture(arguments, field, found, (topic.name,), messages)

    count = len(topic.documents)
    items = [item for document, _ in topic.documents for _, some in lists_of(document)
             for item in some]  # fmt: skip
    if (listed := named_items([topic])) and _has_numbers(items, listed["pairs"]):
        (name,) = listed["pairs"]
        values = [each[name] for each in items if name in each]
        return of({"pairs": (name,)}, name, values, count)
    if named := named_value([topic]):
        name = named["metric"].removeprefix("field ")
        values = [each[name] for document, _ in topic.documents for each in items_of(document)]
        return of(named, name, values, count)
    kinds = kinds_of(topic.objects)
    for names in (*DEVICE_FIELDS, *other_device_fields(kinds)):
        if not kinds.keys() >= set(names):
            continue
        # The messages of the gateway itself have no name of a device.
        part = TopicMessages(topic.name)
        part.documents = [each for each in topic.objects if _name_in(each[0], names) is not None]
        part.messages = [(b"", at) for _, at in part.documents]
        objects = [document for document, _ in part.documents]
        if has_several_devices([part], names) and (
            _is_certain(names) or _is_device_id(names[0]) or _has_numbers(objects, names)
        ):
            values = ["/".join(map(str, _name_in(each, names) or ())) for each in objects]
            device = f"field{'s' * (len(names) > 1)} {' '.join(names)}"
            return of({"device": device}, " ".join(names), values, len(objects))
    if _are_apart(topic, clients):
        return of({"device": "client"}, "client id", clients, count)
    return None


def _has_numbers(objects: Sequence[Document], names: Sequence[str]) -> bool:
    """Returns whether objects have numbers or lists that are measured, beside their names."""
    kinds = kinds_of([(each, 0) for each in objects])
    return any(
        of_name & {*NUMBERS, list}
        and name not in names
        and name not in _NO_READINGS
        and not CODE_NAME.fullmatch(words_of(name))
        for name, of_name in kinds.items()
    )


def _are_apart(topic: TopicMessages, clients: Sequence[str]) -> bool:
    """Returns whether several clients publish different numbers of one metric on a topic, in turns.
    Each connection of a script may have an id of its own, which does not come again."""
    some = come_again(clients)
    if len(some) < 2 or not _COMMANDS.isdisjoint(topic.levels):
        return False
    numbers: dict[str, dict[str, set[float]]] = {each: defaultdict(set) for each in some}
    for (document, _), client in zip(topic.documents, clients, strict=True):
        fields = document if isinstance(document, dict) else {VALUE: document}
        for name, value in fields.items() if client in numbers else ():
            if type(value) in NUMBERS and name not in _NO_READINGS:
                numbers[client][name].add(value)
    first, *others = numbers.values()
    return any(first[name] != other[name] for other in others for name in first.keys() & other)


def _name_in(document: Document, names: Sequence[str]) -> tuple[object, ...] | None:
    """Returns the texts or integers of some fields, or None if one of them is none."""
    found = tuple(inner_value(document, name) for name in names)
    is_named = all(type(each) in (str, int) for each in found)
    if is_named and "addr" in names[-1].lower() and not _ADDRESS.fullmatch(str(found[-1])):
        return None
    return found if is_named else None


def _is_device_id(name: str) -> bool:
    """Returns whether a field says that it is the id of a device, as `id` alone does not."""
    return name.lower().endswith("id") and name not in OFTEN_OTHERS


def _is_certain(names: Sequence[str]) -> bool:
    return len(names) > 1 or (names in DEVICE_FIELDS and names[0] not in OFTEN_OTHERS)


def other_device_fields(fields: Iterable[str]) -> list[tuple[str]]:
    """Returns the fields that may name a device by their words: the meters that a radio hears are
    told apart by `Message.ID` only."""
    words = {name: re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in fields}
    known = {name for names in DEVICE_FIELDS for name in names}
    named = [name for name, word in words.items() if name not in known
             and any(map(_DEVICE_NAME.fullmatch, (word, word.rpartition(".")[2])))]  # fmt: skip
    return [(name,) for name in named[:FIELDS_MAX]]


def has_several_devices(group: Sequence[TopicMessages], names: Sequence[str]) -> bool:
    """Returns whether each message has some fields, and a topic has several values of them."""
    several = False
    for topic in group:
        named = [_name_in(document, names) for document, _ in topic.objects]
        if None in named or len(named) < len(topic.messages):
            return False
        values = len(set(named))
        # A value of its own in each message is the message's, not the device's.
        is_few = values <= len(named) / 2 and len(come_again(named)) > 1
        several |= values > 1 and (
            _is_certain(names) or (is_few and not is_counter(names[0], [topic]))
        )
    return several
