"""Encodes the sink's column `properties` to MQTT 5 property blocks.

The column may be binary: a block as the source gives it. It may be a struct with some fields of
PROPERTIES_DDL, where `user` may also be a map. It may also be a map of user properties. The
producer sequence that a message came with is left out, because it identifies that message and not
the new one.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import DataType, StructType

from holdfast.client.identity import IDENTITY_PROPERTY
from holdfast.pipeline.properties import IDENTIFIERS
from holdfast.pipeline.source.options import OptionError
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.packets import PUBLISH, Properties
from holdfast.protocol.mqtt.properties import (
    PAYLOAD_FORMAT_INDICATOR,
    RESPONSE_TOPIC,
    SUBSCRIPTION_IDENTIFIER,
    TOPIC_ALIAS,
    USER_PROPERTY,
    check_response_topic,
    decode_block,
    encode_block,
)

BLOCK_BYTES_MAX: Final = 268_435_455
"""The most bytes that a length in MQTT can express."""
CACHE_MAX: Final = 1024
"""The most blocks that are cached."""
CACHED_BYTES_MAX: Final = 1024
"""The most bytes of a block that is cached."""

_MAP: Final = "map<string,string>"
_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "payload_is_text": ("boolean",),
    "message_expiry_s": ("bigint", "int", "smallint", "tinyint"),
    "content_type": ("string",),
    "response_topic": ("string",),
    "correlation_data": ("binary",),
    "user": ("array<struct<key:string,value:string>>", _MAP),
}
"""The allowed types per field, as Spark writes them."""
_ALLOWED: Final = (
    f"binary (a block as the source gives it), {_MAP} (user properties), or a struct of "
    + ", ".join(f"{name} {' or '.join(types)}" for name, types in _TYPES.items())
)
_OF_A_CONNECTION: Final = (TOPIC_ALIAS, SUBSCRIPTION_IDENTIFIER)


def check_type(data_type: DataType) -> None:
    """Checks the type of the column. Raises OptionError."""
    if isinstance(data_type, StructType):
        for field in data_type.fields:
            found = field.dataType.simpleString()
            if found not in _TYPES.get(field.name, ()):
                raise OptionError(f"properties has {field.name} {found}; allowed: {_ALLOWED}")
    elif data_type.simpleString() not in ("binary", _MAP):
        raise OptionError(f"properties is {data_type.simpleString()}; allowed: {_ALLOWED}")


class PropertiesEncoder:
    """An encoder with a cache of the last blocks, because mostly many rows have the same."""

    def __init__(self) -> None:
        self._cache: dict[bytes, bytes] = {}

    def blocks(self, column: pa.Array) -> list[bytes | str]:
        """Returns per row the block, empty for null, or a text that says why the row has none."""
        data_type = column.type
        encode: Callable[[Any], bytes | str]
        if pa.types.is_map(data_type):
            encode = _of_map
        elif pa.types.is_struct(data_type):
            encode = _of_struct
        else:
            encode = self._of_block
        return [encode(value) if value else b"" for value in column.to_pylist()]

    def _of_block(self, value: bytes) -> bytes | str:
        """Checks a binary block, and removes the properties of its connection and its producer
        sequence."""
        known = self._cache.get(value)
        if known is not None:
            return known
        try:
            properties = decode_block(value, 0, len(value), PUBLISH)
        except ProtocolViolation as error:
            return f"properties are no block of a PUBLISH: {error}"
        for identifier in _OF_A_CONNECTION:
            properties.pop(identifier, None)
        pairs = properties.get(USER_PROPERTY)
        if isinstance(pairs, list):
            properties[USER_PROPERTY] = [pair for pair in pairs if pair[0] != IDENTITY_PROPERTY]  # type: ignore[index, assignment]
        block = _encoded(properties)
        if isinstance(block, bytes) and len(value) <= CACHED_BYTES_MAX:
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
            self._cache[value] = block
        return block


def _of_map(value: Iterable[tuple[str, str | None]]) -> bytes | str:
    return _encoded({USER_PROPERTY: _pairs(value)})


def _of_struct(value: dict[str, Any]) -> bytes | str:
    properties: Properties = {}
    for name, content in value.items():
        if content is None:
            continue
        if name == "user":
            pairs = content
            if content and isinstance(content[0], dict):
                pairs = [(pair["key"], pair["value"]) for pair in content]
            properties[USER_PROPERTY] = _pairs(pairs)
        elif name == "payload_is_text":
            properties[PAYLOAD_FORMAT_INDICATOR] = int(content)
        else:
            properties[IDENTIFIERS[name]] = content
    response_topic = properties.get(RESPONSE_TOPIC)
    if isinstance(response_topic, str):
        try:
            check_response_topic(response_topic)
        except ProtocolViolation as error:
            return f"properties: {error}"
    return _encoded(properties)


def _pairs(pairs: Iterable[tuple[str | None, str | None]]) -> list[Any]:
    """Returns the user properties without the producer sequence. Null becomes an empty text."""
    return [(key or "", value or "") for key, value in pairs if key != IDENTITY_PROPERTY]


def _encoded(properties: Properties) -> bytes | str:
    try:
        block = encode_block(properties)
    except ValueError as error:
        return f"properties: {error}"
    if len(block) > BLOCK_BYTES_MAX:
        return f"properties of {len(block)} bytes, the maximum is {BLOCK_BYTES_MAX}"
    return block
