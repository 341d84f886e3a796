"""The decoder of the `properties` column: `df.withColumn("p", decode_properties("properties"))`.

The log keeps the MQTT 5 properties of a PUBLISH as the publisher sent them (MQTT 5.0, 3.3.2.3).
Most messages have none and most queries do not use them, so the source does not decode them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

PAYLOAD_FORMAT: Final = 0x01
MESSAGE_EXPIRY: Final = 0x02
CONTENT_TYPE: Final = 0x03
RESPONSE_TOPIC: Final = 0x08
CORRELATION_DATA: Final = 0x09
SUBSCRIPTION_ID: Final = 0x0B
TOPIC_ALIAS: Final = 0x23
USER_PROPERTY: Final = 0x26

PROPERTIES_DDL: Final = (
    "struct<payload_is_text: boolean, message_expiry_s: bigint, content_type: string, "
    "response_topic: string, correlation_data: binary, "
    "user: array<struct<key: string, value: string>>>"
)
PROPERTIES_TYPE: Final = pa.struct(
    [
        ("payload_is_text", pa.bool_()),
        ("message_expiry_s", pa.int64()),
        ("content_type", pa.string()),
        ("response_topic", pa.string()),
        ("correlation_data", pa.binary()),
        ("user", pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))),
    ]
)


class PropertiesError(ValueError):
    """The bytes are no property block of a PUBLISH."""


@dataclass
class Properties:
    """The properties of one PUBLISH. A field is None if the property is absent; `user` keeps order
    and duplicates."""

    payload_is_text: bool | None = None
    message_expiry_s: int | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user: list[tuple[str, str]] = field(default_factory=list)


def parse(block: bytes) -> Properties:
    """Parse a property block without its length prefix. Raises PropertiesError."""
    result = Properties()
    position = 0
    try:
        while position < len(block):
            identifier = block[position]
            position += 1
            if identifier == PAYLOAD_FORMAT:
                result.payload_is_text = block[position] == 1
                position += 1
            elif identifier == MESSAGE_EXPIRY:
                result.message_expiry_s = int.from_bytes(_part(block, position, 4), "big")
                position += 4
            elif identifier == CONTENT_TYPE:
                data, position = _data(block, position)
                result.content_type = data.decode()
            elif identifier == RESPONSE_TOPIC:
                data, position = _data(block, position)
                result.response_topic = data.decode()
            elif identifier == CORRELATION_DATA:
                result.correlation_data, position = _data(block, position)
            elif identifier == USER_PROPERTY:
                key, position = _data(block, position)
                value, position = _data(block, position)
                result.user.append((key.decode(), value.decode()))
            elif identifier == TOPIC_ALIAS:
                position += 2
            elif identifier == SUBSCRIPTION_ID:
                while block[position] & 0x80:
                    position += 1
                position += 1
            else:
                raise PropertiesError(f"property {identifier:#04x} is none of PUBLISH")
    except (IndexError, UnicodeDecodeError) as error:
        raise PropertiesError(f"damaged property block: {error}") from None
    return result


def _part(block: bytes, start: int, length: int) -> bytes:
    if start + length > len(block):
        raise IndexError("it ends too early")
    return block[start : start + length]


def _data(block: bytes, position: int) -> tuple[bytes, int]:
    """Return the bytes after a two-byte length, and the position after them."""
    length = int.from_bytes(_part(block, position, 2), "big")
    return _part(block, position + 2, length), position + 2 + length


def decode_array(blocks: pa.Array) -> pa.Array:
    """Decode property blocks to structs. The result is null if the block is null, empty or
    damaged."""
    rows: list[dict[str, Any] | None] = []
    for block in blocks.to_pylist():
        if not block:
            rows.append(None)
            continue
        try:
            found = parse(block)
        except PropertiesError:
            rows.append(None)
            continue
        row = dict(vars(found))
        row["user"] = [{"key": key, "value": value} for key, value in found.user]
        rows.append(row)
    return pa.array(rows, PROPERTIES_TYPE)


def decode_properties(column: Any) -> Any:
    """Return a Spark column with the struct of PROPERTIES_DDL. `column` is a name or a Column."""
    # Imported here, because a task that only reads needs no SQL functions.
    from pyspark.sql.pandas.functions import arrow_udf

    udf: Callable[[Any], Any] = arrow_udf(decode_array, PROPERTIES_DDL)  # type: ignore[call-overload]
    return udf(column)
