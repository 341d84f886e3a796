"""Messages decoded together: flat JSON objects with the same fields, and plain numbers.

Invariant: the values are those that the decoders find one by one, only kept as columns. A message
with anything else is left to the decoders: nested objects, numbers that a double cannot express, or
a field that is no time where others have one. So this module reports no errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast_lake.decoders.decoded import EXACT_MAX, NAME_LENGTH_MAX, RESERVED
from holdfast_lake.decoders.json_payload import KEY_END, STATUS_KEYS, UNREADABLE_TIMES, Fields
from holdfast_lake.decoders.scales import has_scale
from holdfast_lake.decoders.text_payload import worded_value
from holdfast_lake.decoders.times import parse_times
from holdfast_lake.decoders.units import UNIT_FIELDS, known_unit, measured_field
from holdfast_lake.tables.stream import ID_LENGTH_MAX

PARSED_ROWS: Final = 1024
"""The payloads parsed before their values are taken. The objects stay in the processor's cache."""
GROUP_ROWS_MIN: Final = 8
"""The fewest messages with the same fields that are worth columns."""
NAMES_MAX: Final = 100
"""The most fields of a message that is read together. Longer messages can be read alone, and the
limit bounds the readings of a batch."""
NUMBER_LENGTH_MAX: Final = 64
"""The most bytes of a payload that is a plain number."""
NUMBER, TEXT, TRUTH, NULL, OTHER = range(5)
_KINDS: Final = {int: NUMBER, float: NUMBER, str: TEXT, bool: TRUTH, type(None): NULL}
_parse: Final = msgspec.json.Decoder().decode
_BAD: Final = object()

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass
class Values:
    """The values of one metric, one for each message of a group."""

    kind: int | None
    """The kind of all values. None if they differ, see `kinds`."""
    kinds: npt.NDArray[np.int8] | None = None
    doubles: npt.NDArray[np.float64] | None = None
    texts: Sequence[str | None] | None = None
    truths: Mask | None = None
    words: npt.NDArray[np.int8] | None = None
    """The truth of each text that is a word such as `off`, and -1 for others."""

    def of_kind(self, kind: int) -> Mask | bool:
        """Returns which messages have a value of this kind. True: all, False: none."""
        return self.kind == kind if self.kinds is None else self.kinds == kind


@dataclass
class FieldGroup:
    """Messages with the same fields. Arrays have one element for each of `rows`."""

    rows: Integers
    """The messages of the batch, ascending."""
    names: Sequence[str]
    """The names of the readings, in the order of the payload."""
    values: Sequence[Values]
    time_us: Integers | None = None
    sent_us: Integers | None = None
    sequences: Integers | None = None
    ids: Sequence[str] | None = None
    devices: Sequence[str] | None = None
    units: Sequence[str | None] | None = None
    """The units of one metric."""
    measured: int = -1
    """The index of this metric in `names`."""


class Way(NamedTuple):
    """The way in which the messages of some topics are read."""

    rule: int
    """The index of the rule. Two rules have two ways, even if both read the same."""
    fields: Fields
    """The fields of JSON objects."""
    takes_objects: bool
    metric: str | None
    """The metric of a payload that is one number or boolean. None: such payloads are left to the
    decoders."""


def read_flat(payloads: Sequence[bytes | None], ways: Sequence[Way | None]) -> list[FieldGroup]:
    """Returns the groups of messages that can be read together.

    `ways` has the way of each payload, None for one to leave alone. Messages in no group are left
    to the decoders.
    """
    found: dict[Any, AlikeMessages] = {}
    for begin in range(0, len(payloads), PARSED_ROWS):
        end = begin + PARSED_ROWS
        _add_alike(found, begin, payloads[begin:end], ways[begin:end])
    groups = []
    for alike in found.values():
        if len(alike.rows) >= GROUP_ROWS_MIN:
            group = _plain(alike) if alike.names is None else _object(alike, alike.names)
            if group is not None:
                groups.append(group)
    return groups


class AlikeMessages(NamedTuple):
    """Messages with the same way and fields."""

    way: Way
    names: tuple[str, ...] | None
    """The names of the fields. None for one plain value."""
    rows: list[int]
    columns: Sequence[list[Any]]

    def add(self, rows: Sequence[int], documents: Sequence[Any]) -> None:
        """Appends messages."""
        self.rows.extend(rows)
        if self.names is None:
            self.columns[0].extend(documents)
            return
        # Names and values of a dict have the same order.
        values = zip(*map(dict.values, documents), strict=True)
        for column, more in zip(self.columns, values, strict=True):
            column.extend(more)


def _add_alike(
    found: dict[Any, AlikeMessages],
    begin: int,
    payloads: Sequence[bytes | None],
    ways: Sequence[Way | None],
) -> None:
    """Adds payloads to their groups. `begin` is the row of the first payload."""
    first = ways[0]
    if first is None or ways.count(first) < len(ways):
        payloads = [None if way is None else payload
                    for way, payload in zip(ways, payloads, strict=True)]  # fmt: skip
        first = None
    documents = _documents(payloads)
    if first is not None and first.takes_objects and set(map(type, documents)) == {dict}:
        shapes = set(map(tuple, documents))
        if len(shapes) == 1:
            names = shapes.pop()
            if all(_has_each_once(payload, len(names)) for payload in payloads):
                rows = range(begin, begin + len(documents))
                _of_shape(found, first, names).add(rows, documents)
                return
    several: dict[Any, tuple[Way, tuple[str, ...] | None, list[int], list[Any]]] = {}
    for at, (way, document) in enumerate(zip(ways, documents, strict=True)):
        if way is None or document is _BAD:
            continue
        if type(document) is dict and way.takes_objects:
            shape = tuple(document)
            if not _has_each_once(payloads[at], len(shape)):
                continue
        elif way.metric is not None and _is_plain(document, payloads[at]):
            shape = None
        else:
            continue
        one = several.setdefault((id(way), shape), (way, shape, [], []))
        one[2].append(begin + at)
        one[3].append(document)
    for way, shape, some, of_them in several.values():
        _of_shape(found, way, shape).add(some, of_them)


def _of_shape(
    found: dict[Any, AlikeMessages], way: Way, names: tuple[str, ...] | None
) -> AlikeMessages:
    alike = found.get((id(way), names))
    if alike is None:
        columns: list[list[Any]] = [[] for _ in range(1 if names is None else len(names))]
        alike = found[id(way), names] = AlikeMessages(way, names, [], columns)
    return alike


def _documents(payloads: Sequence[bytes | None]) -> list[Any]:
    documents: list[Any] = []
    parsed = map(_parse, payloads)  # type: ignore[arg-type]
    while len(documents) < len(payloads):
        try:
            for document in parsed:
                documents.append(document)
        except (ValueError, TypeError, RecursionError, msgspec.MsgspecError):
            documents.append(_BAD)
    return documents


def _has_each_once(payload: bytes | None, keys: int) -> bool:
    """Returns whether an object certainly has no key twice. `keys` are those that were found."""
    assert payload is not None
    ends = payload.count(b'":')
    return ends == keys or (ends < keys and len(KEY_END.findall(payload)) == keys)


def _is_plain(document: Any, payload: bytes | None) -> bool:
    kind = type(document)
    if kind is bool:
        return True
    # The decoder of texts limits the digits of an exponent, so such numbers are left to it.
    return (
        (kind is int or kind is float)
        and payload is not None
        and len(payload) <= NUMBER_LENGTH_MAX
        and b"e" not in payload
        and b"E" not in payload
    )


def _plain(alike: AlikeMessages) -> FieldGroup | None:
    metric = alike.way.metric
    found = _values(alike.columns[0])
    if found is None or metric is None or len(metric) > NAME_LENGTH_MAX:
        return None
    values, good = found
    return _chosen(FieldGroup(np.array(alike.rows, np.int64), [metric], [values]), good)


def _object(alike: AlikeMessages, names: tuple[str, ...]) -> FieldGroup | None:
    if len(names) > NAMES_MAX or any(len(name) > NAME_LENGTH_MAX for name in names):
        return None
    if not RESERVED.isdisjoint(names) or any({*pair} <= {*names} for pair in STATUS_KEYS.items()):
        return None  # they get other names, or a quality, one by one
    if has_scale(names):
        return None  # a scale may be another one in each message
    columns: dict[str, Any] = dict(zip(names, alike.columns, strict=True))
    rows = alike.rows
    way = alike.way
    group = FieldGroup(np.array(rows, np.int64), (), ())
    good = np.ones(len(rows), np.bool_)
    if not _extract_fields(way.fields, columns, group, good) or not columns:
        return None  # a number without readings needs the metric SEQUENCE
    group.names = list(columns)
    values = []
    for column in columns.values():
        found = _values(column)
        if found is None:
            return None
        values.append(found[0])
        good &= found[1]
    group.values = values
    if not _extract_units(columns, group):
        return None
    return _chosen(group, good)


def _extract_units(columns: dict[str, Any], group: FieldGroup) -> bool:
    """Applies the unit of objects to all messages. It returns False if it differs in kind."""
    fields = [name for name in UNIT_FIELDS if name in columns]
    if not fields:
        return True
    kinds = {name: each.kind for name, each in zip(columns, group.values, strict=True)}
    if len(fields) > 1 or None in kinds.values():
        return False
    name = measured_field(kinds.keys(), [name for name in kinds if kinds[name] == TRUTH])
    if name is not None and kinds[name] == NUMBER and kinds[fields[0]] == TEXT:
        group.units = list(map(known_unit, columns[fields[0]]))
        group.measured = list(columns).index(name)
    return True


def _extract_fields(fields: Fields, columns: dict[str, Any], group: FieldGroup, good: Mask) -> bool:
    """Applies `decoders.json_payload.extract_fields` to all messages.

    It clears `good` for a message whose field differs in kind from the others. It returns False if
    no message can be read together.
    """
    told = tuple(_KINDS) if "time" in fields.required else UNREADABLE_TIMES
    group.time_us = _extract_time(fields.time, columns, good, told)
    told = tuple(_KINDS) if "sent" in fields.required else ()
    group.sent_us = _extract_time(fields.sent, columns, good, told)
    for name in fields.sequence:
        if name in columns and group.sequences is None:
            group.sequences = _sequences(columns[name])
            if group.sequences is not None:
                del columns[name]
            elif "sequence" in fields.required or int in set(map(type, columns[name])):
                return False
    for name in fields.id:
        if name in columns:
            kinds = set(map(type, columns[name]))
            if kinds == {str}:
                group.ids = columns.pop(name)
                good &= _fit(group.ids, ID_LENGTH_MAX)
                break
            if kinds == {int} and _integers(columns[name]) is not None:
                group.ids = list(map(str, columns.pop(name)))
                break
            if not kinds.isdisjoint((str, int)):
                return False
    for name in fields.device:
        if name not in columns or set(map(type, columns[name])) != {str}:
            return False
        group.devices = columns.pop(name)
        good &= _fit(group.devices, NAME_LENGTH_MAX)
    return bool(good.any())


def _extract_time(
    names: Sequence[str], columns: dict[str, Any], good: Mask, told: tuple[type, ...]
) -> Integers | None:
    for name in names:
        if name in columns:
            times, there = parse_times(columns[name])
            if there.any():
                good &= there
                del columns[name]
                return times
            if any(type(value) in told for value in columns[name]):
                good[:] = False  # the decoders report it
                return None
    return None


def _sequences(column: Sequence[Any]) -> Integers | None:
    if set(map(type, column)) != {int}:
        return None
    numbers = _integers(column)
    return numbers if numbers is not None and numbers.min() >= 0 else None


def _integers(column: Sequence[int]) -> Integers | None:
    try:
        return np.array(column, np.int64)
    except OverflowError:
        return None


def _fit(texts: Sequence[str], length_max: int) -> Mask:
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    return (lengths > 0) & (lengths <= length_max)


def _values(column: Sequence[Any]) -> tuple[Values, Mask] | None:
    """Returns the values and which of them are valid, or None if that cannot be decided here."""
    kinds = set(map(type, column))
    everyone = np.ones(len(column), np.bool_)
    if kinds <= {int, float}:
        doubles = _doubles(column)
        if doubles is None:
            return None
        return Values(NUMBER, doubles=doubles), np.abs(doubles) < EXACT_MAX
    if kinds == {str}:
        words = _words(column)
        return None if words is None else (Values(TEXT, texts=column, words=words), everyone)
    if kinds == {bool}:
        return Values(TRUTH, truths=np.array(column, np.bool_)), everyone
    if kinds == {type(None)}:
        return Values(NULL), everyone
    codes = np.array([_KINDS.get(type(value), OTHER) for value in column], np.int8)
    numbers = codes == NUMBER
    doubles = _doubles([value if is_one else 0.0
                        for value, is_one in zip(column, numbers, strict=True)])  # fmt: skip
    if doubles is None:
        return None
    texts = [value if type(value) is str else None for value in column]
    truths = np.array([value is True for value in column], np.bool_)
    words = _words(texts)
    if words is None:
        return None
    return Values(None, codes, doubles, texts, truths, words), (
        (codes != OTHER) & (np.abs(doubles) < EXACT_MAX)
    )


def _words(texts: Sequence[str | None]) -> npt.NDArray[np.int8] | None:
    """Returns `Values.words`, or None if one of the texts is a number with a unit."""
    words = {}
    for text in set(texts) - {None}:
        found, unit = worded_value(text)  # type: ignore[arg-type]
        if unit is not None:
            return None
        if found is not None:
            words[text] = found
    return np.array([words.get(text, -1) for text in texts], np.int8)


def _doubles(column: Sequence[Any]) -> npt.NDArray[np.float64] | None:
    try:
        return np.fromiter(column, np.float64, len(column)) + 0.0  # -0.0 becomes 0.0
    except OverflowError:
        return None


def _chosen(group: FieldGroup, good: Mask) -> FieldGroup | None:
    """Returns the good messages of a group."""
    if good.all():
        return group
    at = np.flatnonzero(good)
    if len(at) < GROUP_ROWS_MIN:
        return None
    return FieldGroup(
        group.rows[at],
        group.names,
        [_some_values(values, at) for values in group.values],
        None if group.time_us is None else group.time_us[at],
        None if group.sent_us is None else group.sent_us[at],
        None if group.sequences is None else group.sequences[at],
        None if group.ids is None else [group.ids[index] for index in at.tolist()],
        None if group.devices is None else [group.devices[index] for index in at.tolist()],
        None if group.units is None else [group.units[index] for index in at.tolist()],
        group.measured,
    )


def _some_values(values: Values, at: Integers) -> Values:
    return Values(
        values.kind,
        None if values.kinds is None else values.kinds[at],
        None if values.doubles is None else values.doubles[at],
        None if values.texts is None else [values.texts[index] for index in at.tolist()],
        None if values.truths is None else values.truths[at],
        None if values.words is None else values.words[at],
    )
