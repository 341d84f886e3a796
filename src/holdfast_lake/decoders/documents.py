"""Decodes binary documents (CBOR, MessagePack), SenML, which JSON and CBOR can carry, and layers.

A binary document becomes what JSON would be: keys are texts, bytes are base64, times are ISO 8601.
The layers around a payload are gzip, zlib and base64.
"""

import base64
import binascii
import zlib
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from io import BytesIO
from typing import Any, Final

import msgspec

from holdfast_lake.decoders.decoded import (
    DEPTH_MAX,
    NAME_LENGTH_MAX,
    PAYLOAD_BYTES_MAX,
    READINGS_MAX,
    Decoded,
    DecodeError,
    own_name,
)
from holdfast_lake.decoders.json_payload import Fields, count_keys
from holdfast_lake.decoders.units import named_unit

GZIP_BEGIN: Final = b"\x1f\x8b"
_ANY_HEADER: Final = 32 + zlib.MAX_WBITS
"""The option of zlib by which it accepts the header of gzip and its own."""


def inflated(payload: bytes, what: str = "the payload") -> bytes:
    """Decompress gzip or zlib. Raises DecodeError, also if the result is too long."""
    inflater = zlib.decompressobj(_ANY_HEADER)
    try:
        found = inflater.decompress(payload, PAYLOAD_BYTES_MAX)
    except zlib.error as error:
        raise DecodeError(f"{what} cannot be decompressed: {error}") from None
    if not inflater.eof:
        if len(found) >= PAYLOAD_BYTES_MAX:
            raise DecodeError(
                f"{what} has more than {PAYLOAD_BYTES_MAX} bytes when decompressed", "limit"
            )
        raise DecodeError(f"{what} is truncated: compressed, without its end")
    return found


def from_base64(payload: bytes) -> bytes:
    """Decodes base64, also with the two letters of URLs. Raises DecodeError."""
    try:
        return base64.b64decode(payload.strip().translate(_URL_LETTERS), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DecodeError(f"no base64: {error}") from None


_URL_LETTERS: Final = bytes.maketrans(b"-_", b"+/")
LAYERS: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "gzip": inflated, "zlib": inflated, "base64": from_base64,
}  # fmt: skip
"""The layers that a rule can name before the decoder: `decode="base64+json"`."""


RELATIVE_BELOW: Final = 1 << 28
"""The bound of SenML times that are seconds from now. Later ones are since 1970."""
_PLAIN: Final = (int, float, bool, str, type(None))
_BASES: Final = ("bn", "bt", "bv", "bs", "bu")


def parse_messagepack(payload: bytes) -> tuple[Any, str | None]:
    """Parses MessagePack. Returns the document, and an error for keys that an object has twice.
    Raises DecodeError."""
    try:
        document = msgspec.msgpack.decode(payload)
        has_lost = _count_pairs(payload) > count_keys(document)
        return plain(document), "a key is there twice: the last counts" if has_lost else None
    except DecodeError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DecodeError(f"no MessagePack: {error}") from None


_SIZES: Final = {
    0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2,
    0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
"""The bytes of the length behind the first byte of a MessagePack value."""
_EXTENSIONS: Final = range(0xC7, 0xCA)
_FIXED: Final = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
"""The bytes behind the first byte of a number or a short extension."""


def _count_pairs(payload: bytes) -> int:
    """Returns the number of pairs in all maps of a MessagePack document that is well-formed."""
    at, values, pairs = 0, 1, 0
    while values:
        values -= 1
        first = payload[at]
        at += 1 + _FIXED.get(first, 0)
        kind, length = first & 0xF0, first & 0x0F
        if first in _SIZES:
            size = _SIZES[first]
            length = int.from_bytes(payload[at : at + size])
            at += size + (first in _EXTENSIONS)
            kind = 0x80 if first >= 0xDE else 0x90 if first >= 0xDC else 0xA0
        elif kind in (0xA0, 0xB0):
            length = first & 0x1F
        if kind == 0x80:
            pairs += length
            values += 2 * length
        elif kind == 0x90:
            values += length
        elif kind in (0xA0, 0xB0):
            at += length
    return pairs


def parse_cbor(payload: bytes) -> tuple[Any, str | None]:
    """Parses CBOR. Returns the document, and an error for keys that an object has twice. Raises
    DecodeError."""
    file = BytesIO(payload)
    try:
        import cbor2

        decoder = cbor2.CBORDecoder(file, allow_duplicate_keys=False)
    except (ImportError, TypeError):
        raise DecodeError(
            "CBOR needs the package cbor2, 6.1 or later, on the machines of the tasks: "
            "pip install 'cbor2>=6.1'",
            "package",
        ) from None
    error = None
    try:
        try:
            document = decoder.decode()
        except cbor2.CBORDecodeError as strict:
            file = BytesIO(payload)
            document = cbor2.CBORDecoder(file).decode()
            error = f"{strict}: the last counts"
        found = plain(document)
    except DecodeError:
        raise
    except Exception as other:  # noqa: BLE001
        # The library decodes tags with Python's own types, which raise many kinds of errors.
        raise DecodeError(f"no CBOR: {other}") from None
    if file.read(1):
        raise DecodeError("no CBOR: there are bytes behind the first document")
    return found, error


def plain(value: Any, depth: int = 1) -> Any:
    """Returns a value of the types of JSON. Raises DecodeError if it is too deep."""
    if type(value) in _PLAIN:
        return value
    if depth > DEPTH_MAX:
        raise DecodeError(f"nested more than {DEPTH_MAX} levels deep", "limit")
    if isinstance(value, Mapping):
        named = {str(key): plain(each, depth + 1) for key, each in value.items()}
        if len(named) < len(value):
            raise DecodeError("an object has a number and a text as the same key", "key")
        return named
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each, depth + 1) for each in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    kind = type(value).__name__
    if kind in ("CBORTag", "CBORSimpleValue"):  # a tag with no type of Python: its value counts
        return plain(value.value, depth + 1)
    return None if kind == "UndefinedType" else str(value)


def decode_senml(document: Any, fields: Fields) -> Decoded:
    """Decodes the records of SenML (RFC 8428). Raises DecodeError.

    The metric is the base name and the name. With `device="field bn"` in the rule, the base name is
    the device, and the metric is the name.
    """
    if type(document) is not list or not all(type(each) is dict for each in document):
        raise DecodeError("no SenML: it is a list of objects")
    if len(document) > READINGS_MAX:
        raise DecodeError(
            f"a list of {len(document)} objects, the maximum is {READINGS_MAX}", "limit"
        )
    decoded = Decoded()
    times: list[int | None] = []
    base: dict[str, Any] = {"bn": "", "bt": 0, "bv": 0, "bs": 0, "bu": None}
    for index, record in enumerate(document):
        base |= {name: record[name] for name in _BASES if name in record}
        if type(base["bn"]) is not str:
            raise DecodeError(f"no SenML: record {index} has the base name {base['bn']!r:.40}")
        value = _senml_value(record, base, decoded)
        if value is _NOTHING:
            continue
        name = record.get("n", "")
        if type(name) is not str or len(base["bn"]) + len(name) > NAME_LENGTH_MAX:
            raise DecodeError(f"no SenML: record {index} has the name {name!r:.40}")
        if fields.device:
            device = base["bn"].rstrip(":/")
            if not device or decoded.device not in (None, device):
                decoded.refuse(f"record {index} is of the device {device!r:.40}", "device")
                continue
            decoded.device = device
        metric = name if fields.device else f"{base['bn']}{name}"
        before = len(decoded.names)
        decoded.add(own_name(metric or "value"), value)
        if len(decoded.names) > before:
            decoded.set_unit(before, named_unit(record.get("u", base["bu"])))
        time_us = _senml_time(base["bt"], record.get("t", 0), fields.near_us)
        times.extend([time_us] * (len(decoded.names) - len(times)))
    if not decoded.names and not decoded.errors:
        raise DecodeError("no SenML: no record has a value")
    decoded.times = times
    return decoded


_NOTHING: Final = object()


def _senml_value(record: dict[str, Any], base: dict[str, Any], decoded: Decoded) -> Any:
    """Returns the value of a record, with its base. _NOTHING: it has none, or it was refused."""
    for name, name_of_base in (("v", "bv"), ("s", "bs")):
        if name in record or (name == "v" and "bv" in record and "n" in record):
            value, added = record.get(name, 0), base[name_of_base]
            if any(type(each) not in (int, float) for each in (value, added)):
                decoded.refuse(f"{name} of {record.get('n')!r:.40} is no number")
                return _NOTHING
            return value + added
    for name in ("vs", "vb", "vd"):
        if name in record:
            return record[name] if type(record[name]) in _PLAIN else str(record[name])
    return _NOTHING


def _senml_time(base: Any, offset: Any, near_us: int) -> int | None:
    """Returns the time of a record. None: the time of the message."""
    if any(type(each) not in (int, float) for each in (base, offset)):
        return None
    time_s = base + offset
    if time_s == 0 or not -(1 << 40) < time_s < 1 << 40:
        return None
    since_us: int = round(time_s * 1_000_000)
    return since_us if time_s >= RELATIVE_BELOW else near_us + since_us
