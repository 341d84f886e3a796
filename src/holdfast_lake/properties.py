"""Decodes the column `properties`: `df.withColumn("p", decode_properties("properties"))`.

The log keeps the MQTT 5 properties of a PUBLISH as the publisher sent them (MQTT 5.0, 3.3.2.3).
Most messages have none and most queries do not use them, so the source does not decode them.
"""

from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.packets import PUBLISH
from holdfast.protocol.mqtt.properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    MESSAGE_EXPIRY_INTERVAL,
    PAYLOAD_FORMAT_INDICATOR,
    RESPONSE_TOPIC,
    USER_PROPERTY,
    decode_block,
)

IDENTIFIERS: Final[dict[str, int]] = {
    "payload_is_text": PAYLOAD_FORMAT_INDICATOR,
    "message_expiry_s": MESSAGE_EXPIRY_INTERVAL,
    "content_type": CONTENT_TYPE,
    "response_topic": RESPONSE_TOPIC,
    "correlation_data": CORRELATION_DATA,
    "user": USER_PROPERTY,
}
"""The property of each field."""
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


def decode_array(blocks: pa.Array) -> pa.Array:
    """Decodes property blocks to structs. The result is null if the block is null, empty or
    damaged."""
    return pa.array(map(_row, blocks.to_pylist()), PROPERTIES_TYPE)


def _row(block: bytes | None) -> dict[str, Any] | None:
    if not block:
        return None
    try:
        found = decode_block(block, 0, len(block), PUBLISH)
    except ProtocolViolation:
        return None
    row: dict[str, Any] = {name: found.get(identifier) for name, identifier in IDENTIFIERS.items()}
    if row["payload_is_text"] is not None:
        row["payload_is_text"] = row["payload_is_text"] == 1
    row["user"] = [{"key": key, "value": value} for key, value in row["user"] or ()]
    return row


def decode_properties(column: Any) -> Any:
    """Returns a Spark column with the struct of PROPERTIES_DDL. `column` is a name or a Column."""
    # Imported here, because a task that only reads needs no SQL functions.
    from pyspark.sql.pandas.functions import arrow_udf

    udf: Callable[[Any], Any] = arrow_udf(decode_array, PROPERTIES_DDL)  # type: ignore[call-overload]
    return udf(column)
