"""The JSON decoder: nested objects and arrays become names with dots, `motor.phases.0.current`.

A top-level array of objects is a list of readings, each of which may have its own time. The fields
that a rule names (time, sequence, id, ...) are looked up at the top level, and with dots in nested
objects. A field that is used becomes no reading.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec

from holdfast_lake.decoders.decoded import (
    BAD,
    DEPTH_MAX,
    EXACT_MAX,
    GOOD,
    INTEGER_MAX,
    INTEGER_MIN,
    NAME_LENGTH_MAX,
    READINGS_MAX,
    RESERVED,
    UNCERTAIN,
    Decoded,
    DecodeError,
    own_name,
    utf8,
)
from holdfast_lake.decoders.times import parse_time
from holdfast_lake.decoders.units import UNIT_FIELDS, known_unit, measured_field

_parse: Final = msgspec.json.Decoder().decode
UNREADABLE_TIMES: Final = (str, int, float)
"""The types of a default time field that is reported if it is no time. An object is a reading."""
KEY_END: Final = re.compile(rb'"\s*:')
"""The end of a key in a JSON text. It may be inside of a text as well."""
STATUS_KEYS: Final = {"StatusCode": "Value", "statusCode": "value"}
"""The keys of a StatusCode of OPC UA, with the key of the value beside it."""
_CODE_KEYS: Final = ("Code", "code", "value")
"""The keys of the number in a StatusCode that is an object."""
_KEYS_OF_OTHERS: Final = frozenset((*STATUS_KEYS, *UNIT_FIELDS))
"""The keys that say something about a value beside them."""
NUMBERS: Final = frozenset({int, float})
VALUE: Final = "value"
"""The name of a reading that is a whole payload."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The names of the fields that are no readings. Of several names the first that is present
    counts."""

    time: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    id: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    pairs: tuple[str, ...] | None = None
    """The names of key and value in lists of pairs, or the one field that names each object of a
    list."""
    zone: ZoneInfo | None = None
    """The zone of times that name none. None: UTC."""
    time_format: str | None = None
    """The format of times as texts, for `strptime`."""
    decimal: str = ""
    """The decimal sign of texts that are numbers, as a rule says it."""
    near_us: int = 0
    """The time of the message by the broker. An hour that the zone has twice is resolved by it."""
    required: frozenset[str] = frozenset()
    """The roles (`time`, ...) that a rule has asked for. An unusable field in such a role is an
    error; in another role it is a reading like any other."""


def decode_json(payload: bytes, fields: Fields) -> Decoded:
    """Decodes a JSON payload. Raises DecodeError."""
    return decode_parsed(payload, parse_json(payload), fields)


def decode_parsed(payload: bytes, document: Any, fields: Fields) -> Decoded:
    """Decodes a document that `parse_json` found in a payload. Raises DecodeError."""
    keys = count_keys(document)
    decoded = decode_document(document, fields)
    refuse_repeated_keys(payload, keys, decoded)
    return decoded


def decode_document(document: Any, fields: Fields) -> Decoded:
    """Decodes a document of dicts, lists and plain values. Raises DecodeError."""
    decoded = Decoded()
    is_list = type(document) is list and document and all(type(item) is dict for item in document)
    if fields.pairs is not None and len(fields.pairs) == 1:
        parts = document if is_list else [document]
        parts = [_by_name(part, fields.pairs[0], decoded, 1) for part in parts]
        document = parts if is_list else parts[0]
    elif fields.pairs is not None:
        key, of_key = fields.pairs
        document = _without_pairs(document, key, of_key, 1)
    if type(document) is dict:
        extract_fields(document, fields, decoded)
        flatten("", document, decoded, 1)
        decoded.keep_one_of_each()
    elif is_list and type(document) is list:
        _decode_list(document, fields, decoded)
    elif type(document) is list:
        flatten("", document, decoded, 1)
        decoded.keep_one_of_each()
    else:
        decoded.add(VALUE, document)
    return decoded


def _without_pairs(value: Any, key: str, of_key: str, depth: int) -> Any:
    """Returns a document in which each list of pairs is an object: [{"key": "v", "value": 1, "q":
    2}] is {"v": 1, "v.q": 2}. Raises DecodeError."""
    if depth > DEPTH_MAX:
        raise DecodeError(f"nested more than {DEPTH_MAX} levels deep", "limit")
    if type(value) is dict:
        return {name: _without_pairs(each, key, of_key, depth + 1) for name, each in value.items()}
    if type(value) is not list:
        return value
    if value and all(type(each) is dict and {key, of_key} <= each.keys() for each in value):
        names = [each[key] for each in value]
        if all(type(name) is str for name in names) and len(set(names)) == len(names):
            return {
                name if at == of_key else f"{name}.{at}": item
                for name, each in zip(names, value, strict=True)
                for at, item in each.items()
                if at != key
            }
    return [_without_pairs(each, key, of_key, depth + 1) for each in value]


def _by_name(value: Any, key: str, decoded: Decoded, depth: int) -> Any:
    """Returns a document in which each list of objects that have a name in the field `key` is an
    object: [{"mac": "A1", "rssi": -60}] is {"A1": {"rssi": -60}}. Raises DecodeError."""
    if depth > DEPTH_MAX:
        raise DecodeError(f"nested more than {DEPTH_MAX} levels deep", "limit")
    if type(value) is dict:
        return {name: _by_name(each, key, decoded, depth + 1) for name, each in value.items()}
    if type(value) is not list:
        return value
    items = [_by_name(each, key, decoded, depth + 1) for each in value]
    names = [_identifier(each.get(key)) if type(each) is dict else None for each in items]
    if not items or None in names:
        return items
    for name, count in Counter(names).items():
        if count > 1:
            decoded.refuse_repeated(repr(name), count)
    return {name: {at: each[at] for at in each if at != key}
            for name, each in zip(names, items, strict=True)}  # fmt: skip


def count_keys(value: Any) -> int:
    """Returns the number of keys of all objects in a document."""
    keys, parts = 0, [value]
    while parts:
        part = parts.pop()
        if type(part) is dict:
            keys += len(part)
            part = part.values()
        elif type(part) is not list:
            continue
        parts += [each for each in part if type(each) is dict or type(each) is list]
    return keys


def refuse_repeated_keys(payload: bytes, keys: int, decoded: Decoded) -> None:
    """Notes keys that an object has twice. `parse_json` takes the last value of each.

    `keys` is the number of keys that it found. Each of them ends like KEY_END in the payload.
    """
    if len(KEY_END.findall(payload)) <= keys:
        return

    def note(pairs: list[tuple[str, Any]]) -> None:
        """Notes the keys that one object has twice."""
        counts = Counter(name for name, _ in pairs)
        for name, count in counts.items():
            if count > 1:
                decoded.refuse_repeated(repr(name), count)

    json.loads(payload, object_pairs_hook=note)


def parse_json(payload: bytes) -> Any:
    """Parses a JSON payload. Raises DecodeError."""
    try:
        return _parse(payload)
    except UnicodeDecodeError:
        utf8(payload)  # raises with the position
        raise DecodeError("not UTF-8 inside a text", "encoding") from None
    except RecursionError:
        raise DecodeError(f"nested more than {DEPTH_MAX} levels deep", "limit") from None
    except msgspec.ValidationError:
        return _with_no_numbers(payload)
    except (msgspec.DecodeError, ValueError) as error:
        if b"NaN" in payload or b"Infinity" in payload:
            return _with_no_numbers(payload)  # Python's json writes them by default
        if not payload.strip():
            raise DecodeError("only white space") from None
        text, why = utf8(payload), str(error)
        with suppress(ValueError, RecursionError):
            json.loads(text)  # this library accepts what no table can store
            why = "a text has half of a surrogate pair, such as \\ud800"
        raise DecodeError(f"no JSON: {why}") from None


def _with_no_numbers(payload: bytes) -> Any:
    """Parses a document with NaN, Infinity or a number beyond double, so that the rest can be read.

    Raises DecodeError."""
    try:
        document = json.loads(payload)
        # The library accepts halves of surrogate pairs, which no table can store.
        json.dumps(document, ensure_ascii=False).encode()
    except (RecursionError, ValueError) as error:
        raise DecodeError(f"no JSON: {error}") from None
    return document


def extract_fields(document: dict[str, Any], fields: Fields, decoded: Decoded) -> None:
    """Moves the fields with a role out of `document`. Raises DecodeError if it has no usable
    device."""
    _extract_event_time(document, fields, decoded)
    for name in fields.sent:
        if name in document or "." in name:
            decoded.sent_us = _extract_time("sent", name, document, fields, decoded)
            if decoded.sent_us is not None:
                break
    for name in fields.sequence:
        if name in document or "." in name:
            _extract_sequence(name, document, fields, decoded)
    for name in fields.id:
        if name in document or "." in name:
            found, holder, key = _find(document, name)
            text = _identifier(found)
            if holder is not None and text is not None:
                decoded.id = text
                del holder[key]
                break
    if fields.device:
        decoded.device = _extract_device(document, fields.device)


def _extract_device(document: dict[str, Any], names: tuple[str, ...]) -> str:
    """Returns the device of one or several fields. One with a `?` may be missing. Raises
    DecodeError."""
    parts = []
    for wanted in names:
        name = wanted.removesuffix("?")
        found, holder, key = _find(document, name)
        part = _identifier(found)
        if found is None and name != wanted and len(names) > 1:
            continue
        if holder is None or part is None:
            raise DecodeError(f"no device: {name} is {_shown(found)}", "device")
        del holder[key]
        parts.append(part)
    if not parts:
        raise DecodeError(f"no device: the payload has no {', '.join(names)}", "device")
    return "/".join(parts)


def _extract_event_time(document: dict[str, Any], fields: Fields, decoded: Decoded) -> None:
    """Extracts the event time. If no field has one, a text or number that looks like one is an
    error: all times of the device may be wrong, and nobody would notice."""
    for name in fields.time:
        if name in document or "." in name:
            decoded.time_us = _extract_time("time", name, document, fields, decoded)
            if decoded.time_us is not None:
                return
    if "time" in fields.required:
        return
    for name in fields.time:
        found = document.get(name)
        if type(found) in UNREADABLE_TIMES:
            cure = ", until a rule has its time_format" if type(found) is str else ""
            decoded.refuse(
                f"{name} is {_shown(found)}, no time: the broker's time is used{cure}", "time"
            )
            return


def _extract_time(
    role: str, name: str, document: dict[str, Any], fields: Fields, decoded: Decoded
) -> int | None:
    found, holder, key = _find(document, name)
    if holder is None or found is None:
        return None
    time_us = parse_time(found, fields.zone, fields.near_us, fields.time_format)
    if time_us is not None:
        del holder[key]
    elif role in fields.required:
        decoded.refuse(f"{name} is {_shown(found)}, no time", "time")
    return time_us


def _extract_sequence(
    name: str, document: dict[str, Any], fields: Fields, decoded: Decoded
) -> None:
    found, holder, key = _find(document, name)
    if holder is None or decoded.sequence is not None:
        return
    if type(found) is int and 0 <= found < 1 << 63:
        decoded.sequence = found
        del holder[key]
    elif "sequence" in fields.required:
        decoded.refuse(f"{name} is {_shown(found)}, no sequence number", "sequence")


def _find(document: dict[str, Any], name: str) -> tuple[Any, dict[str, Any] | None, str]:
    """Returns the value of a name, the object that has it (None: none has) and its key there."""
    if name in document:
        return document[name], document, name
    if "." not in name:
        return None, None, name
    *path, last = name.split(".")
    for key in path:
        document = document.get(key)  # type: ignore[assignment]
        if type(document) is not dict:
            return None, None, name
    return (document[last], document, last) if last in document else (None, None, name)


def _decode_list(items: list[dict[str, Any]], fields: Fields, decoded: Decoded) -> None:
    """Decodes a list of readings. If each has its own time, the names need no index. With one name
    in `pairs` that of each object is before its metrics."""
    if len(items) > READINGS_MAX:
        raise DecodeError(f"a list of {len(items)} objects, the maximum is {READINGS_MAX}", "limit")
    times: list[int | None] = []
    inner = replace(fields, sent=(), sequence=(), id=(), device=())
    key = fields.pairs[0] if fields.pairs is not None and len(fields.pairs) == 1 else ""
    for index, item in enumerate(items):
        of_item = Decoded()
        extract_fields(item, inner, of_item)
        for error in of_item.errors or ():
            decoded.refuse(f"{index}: {error}", of_item.code)
        prefix = "" if of_item.time_us is not None else f"{index}."
        name = _identifier(item.get(key)) if key else None
        if name is not None:
            del item[key]
            prefix = f"{name}."
        first = len(decoded.names)
        flatten(prefix, item, decoded, 2)
        decoded.keep_one_of_each(first)
        times.extend([of_item.time_us] * (len(decoded.names) - len(times)))
    decoded.times = times


def flatten(prefix: str, value: Any, decoded: Decoded, depth: int) -> None:
    """Adds the values of an object or array as readings. Raises DecodeError if a bound is
    exceeded."""
    if depth > DEPTH_MAX:
        raise DecodeError(f"nested more than {DEPTH_MAX} levels deep, at {prefix[:80]}", "limit")
    if len(prefix) > NAME_LENGTH_MAX and value:
        decoded.add(prefix, None)  # raises: every name below it is even longer
    names, values = decoded.names, decoded.values
    first = len(names)
    if len(value) > READINGS_MAX:
        _check_values(value.values() if type(value) is dict else value)
    if type(value) is not dict:
        items: Iterable[tuple[Any, Any]] = enumerate(value)
    elif prefix or RESERVED.isdisjoint(value):
        items = value.items()
    else:
        items = [(own_name(key), item) for key, item in value.items()]
    for key, item in items:
        name = f"{prefix}{key}" if prefix else str(key)
        kind = type(item)
        if kind is dict or kind is list:
            flatten(f"{name}.", item, decoded, depth + 1)
        elif len(name) > NAME_LENGTH_MAX:
            decoded.add(name, item)
        elif kind is int or kind is float:
            if -EXACT_MAX < item < EXACT_MAX:
                names.append(name)
                values.append(item + 0.0)  # -0.0 becomes 0.0, an int a float
            else:
                decoded.add(name, item)
        else:
            names.append(name)
            values.append(item)
    if len(names) > READINGS_MAX:
        raise DecodeError(f"more than {READINGS_MAX} values in one message", "limit")
    if type(value) is dict and not _KEYS_OF_OTHERS.isdisjoint(value):
        _rate_by_status(prefix, value, decoded, first)
        _set_unit(prefix, value, decoded, first)


def _rate_by_status(prefix: str, item: dict[str, Any], decoded: Decoded, first: int) -> None:
    """Takes the StatusCode of OPC UA as the quality of the values beside it, from the position
    `first` on. Its highest two bits are 0 for good, 1 for uncertain, 2 and 3 for bad."""
    for key, of_value in STATUS_KEYS.items():
        code = item.get(key)
        if type(code) is dict:
            code = next((code[name] for name in _CODE_KEYS if name in code), None)
        # 200 is a status of HTTP: the codes of OPC UA have a number in the upper half, or are 0.
        if type(code) is not int or not (code == 0 or 1 << 16 <= code < 1 << 32):
            continue
        name = f"{prefix}{of_value}"
        places = range(first, len(decoded.names))
        rated = [at for at in places if f"{decoded.names[at]}.".startswith(f"{name}.")]
        quality = (GOOD, UNCERTAIN, BAD, BAD)[code >> 30]
        if quality == BAD and rated:
            decoded.refuse(f"{name} has the StatusCode 0x{code:08X}: its value is left out", "bad")
            for at in rated:
                decoded.values[at] = None
        decoded.rate(rated, quality)


def _set_unit(prefix: str, item: dict[str, Any], decoded: Decoded, first: int) -> None:
    """Gives a number the unit that is beside it. The unit stays a reading of its own."""
    unit = next((known_unit(item[name]) for name in UNIT_FIELDS if name in item), None)
    truths = [name for name, each in item.items() if type(each) is bool]
    name = measured_field(item.keys(), truths)
    if unit is not None and name is not None and type(item[name]) in NUMBERS:
        name = f"{prefix}{name}"
        places = [at for at in range(first, len(decoded.names)) if decoded.names[at] == name]
        if len(places) == 1:
            decoded.set_unit(places[0], unit)


def _check_values(items: Iterable[Any]) -> None:
    """Checks the number of values before millions of names are made. Raises DecodeError."""
    if sum(type(item) is not dict and type(item) is not list for item in items) > READINGS_MAX:
        raise DecodeError(f"more than {READINGS_MAX} values in one message", "limit")


def _identifier(value: Any) -> str | None:
    """Returns a text or an integer that may be an identifier, or None."""
    if type(value) is int and INTEGER_MIN <= value <= INTEGER_MAX:
        return str(value)
    return value if type(value) is str and 0 < len(value) <= NAME_LENGTH_MAX else None


def _shown(value: Any) -> str:
    if type(value) is int and not INTEGER_MIN <= value <= INTEGER_MAX:
        return "an integer beyond 64 bits"
    text = repr(value[:40] if type(value) is str else value)
    return text if len(text) <= 40 else text[:40] + "..."
