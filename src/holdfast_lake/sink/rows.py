"""Checks the sink's columns, and encodes Arrow batches to PUBLISH packets.

=========== =======================================================================================
topic       string; or the option `topic` for all rows
payload     string or binary; null is an empty payload
qos         0, 1 or 2; null or no such column: the option `qos`
retain      boolean; null or no such column: the option `retain`
properties  MQTT 5: binary, a block as the source gives it; a struct with some fields of
            PROPERTIES_DDL, where `user` may also be a map; or a map of user properties
partition   number or string, and `offset`, a number: where the row comes from, as the sources of
            Holdfast and Kafka have them; both or none (see identity.py)
=========== =======================================================================================

Columns named in `orderBy` may be present, too. Any other column is an error, so that no data is
left out unnoticed. The producer sequence that a message came with is left out of `properties`,
because it identifies that message and not the new one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    IntegralType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from holdfast.client.identity import IDENTITY_PROPERTY
from holdfast.client.options import LEVEL_5
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.fields import varint
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
from holdfast.protocol.mqtt.publish import FIRST_BYTE, topic_field
from holdfast.protocol.topics.names import InvalidTopic, decode_topic
from holdfast_lake.properties import IDENTIFIERS
from holdfast_lake.sink.identity import ROWS_MAX, IdentityError, Origins, Stamp
from holdfast_lake.sink.options import REQUIRE, SinkOptions
from holdfast_lake.source.options import OptionError

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


COLUMNS: Final = ("topic", "payload", "qos", "retain", "properties", "partition", "offset")
SORTED_BYTES_MAX: Final = 512 << 20
"""The most bytes of the rows of one task with orderBy. They are in memory together."""
SORTED_ROWS: Final = 10_000
"""The most rows in one sorted batch."""
TOPICS_MAX: Final = 100_000
"""The most topics that are cached in their encoded form."""
MESSAGE_BYTES_MAX: Final = 268_435_455 - 256
"""The most bytes of topic, properties and payload together. The rest of MQTT's limit is for lengths
and the producer sequence."""

Message = tuple[int, bytes, bytes]
"""A PUBLISH: its first byte, its topic field, and the bytes after the packet id."""
_SORTABLE: Final = (
    NumericType,
    StringType,
    BinaryType,
    BooleanType,
    DateType,
    TimestampType,
    TimestampNTZType,
)


class RowError(ValueError):
    """The rows cannot be published as requested. The text says why and what to do."""


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Checks the columns of a write against its options. Raises OptionError."""
    types = {field.name: field.dataType for field in schema.fields}
    if len(types) != len(schema.fields):
        raise OptionError(f"columns of the same name: {', '.join(schema.names)}")
    for name in schema.names:
        if name not in COLUMNS and name not in options.order_by:
            raise OptionError(
                f"column {name!r} is none that a message has; there are {', '.join(COLUMNS)}. "
                "Select what is to be published, for example "
                "select('topic', to_json(struct('*')).alias('payload'))"
            )
    for name in options.order_by:
        if name not in types:
            raise OptionError(f"orderBy has {name!r}; the columns are {', '.join(schema.names)}")
        if not isinstance(types[name], _SORTABLE):
            raise OptionError(f"orderBy has {name}, and {types[name].simpleString()} has no order")
    if "topic" in types and options.topic is not None:
        raise OptionError("there are both a column topic and an option topic; leave one out")
    if "topic" not in types and options.topic is None:
        raise OptionError("a message needs a topic: a column topic, or the option topic for all")
    if "payload" not in types:
        raise OptionError("a message needs a column payload, string or binary")
    if ("partition" in types) != ("offset" in types):
        raise OptionError("the columns partition and offset belong together: both or none")
    if "properties" in types and options.level < LEVEL_5:
        raise OptionError("MQTT 3.1.1 has no properties: drop the column, or use protocolVersion 5")
    for name, data_type in types.items():
        _check_column(name, data_type)


def _check_column(name: str, data_type: DataType) -> None:
    allowed: tuple[type[DataType], ...]
    match name:
        case "topic":
            allowed, text = (StringType,), "string"
        case "payload":
            allowed, text = (StringType, BinaryType), "string or binary; cast it, or use to_json"
        case "qos" | "offset":
            allowed, text = (IntegralType,), "tinyint, smallint, int or bigint"
        case "retain":
            allowed, text = (BooleanType,), "boolean"
        case "partition":
            allowed, text = (IntegralType, StringType), "a whole number or string"
        case "properties":
            check_type(data_type)
            return
        case _:
            return
    if not isinstance(data_type, allowed):
        raise OptionError(f"column {name} is {data_type.simpleString()}; allowed: {text}")


class Counted:
    """A numbering of a task's rows in the order in which they come."""

    def __init__(self, producer: str, first_sequence: int) -> None:
        self._stamp = Stamp(producer)
        self._next = first_sequence
        self._end = first_sequence + ROWS_MAX

    def blocks(self, rows: int) -> Iterator[bytes]:
        """Returns the properties for the next rows. Raises IdentityError."""
        start = self._next
        if start + rows > self._end:
            raise IdentityError(f"more than {ROWS_MAX} rows in one task: use more partitions")
        self._next += rows
        return map(self._stamp.block, range(start, self._next))


class RowEncoder:
    """The encoder of the rows of one task.

    It calls `on_refused` with the reason when a row cannot be a message. An exception from that
    call ends the task.
    """

    def __init__(
        self,
        options: SinkOptions,
        numbering: Counted | Origins | None,
        on_refused: Callable[[str], None],
    ) -> None:
        self.unnumbered = 0
        """The number of rows without a sequence because of their QoS."""
        self._options = options
        self._numbering = numbering
        self._on_refused = on_refused
        self._has_properties = options.level >= LEVEL_5
        self._properties = PropertiesEncoder()
        self._topics: dict[str | None, bytes | str] = {}

    def messages(self, batch: pa.RecordBatch) -> Iterator[Message]:
        """Yields the messages in the order of the rows.

        Raises IdentityError, and RowError if a row contradicts exactlyOnce=require.
        """
        options = self._options
        topics, places = self._topic_fields(batch)
        rows = zip(
            places,
            _payloads(batch.column("payload")),
            _column_or_default(batch, "qos", options.qos),
            _column_or_default(batch, "retain", options.retain),
            self._blocks(batch),
            self._stamps(batch),
            strict=False,
        )
        numbered = self._numbering is not None
        for place, payload, qos, retain, block, stamp in rows:
            topic = topics[place]
            if isinstance(topic, str):
                self._on_refused(topic)
            elif isinstance(block, str):
                self._on_refused(block)
            elif not 0 <= qos <= 2:
                self._on_refused(f"QoS {qos}; there are 0, 1 and 2")
            elif len(topic) + len(block) + len(payload) > MESSAGE_BYTES_MAX:
                self._on_refused(f"a payload of {len(payload)} bytes, MQTT has room for 256 MiB")
            else:
                if qos == 1:
                    block += stamp
                elif options.exactly_once == REQUIRE:
                    raise RowError(f"exactlyOnce=require needs QoS 1; a row has QoS {qos}")
                elif numbered:
                    self.unnumbered += 1
                if self._has_properties:
                    payload = b"%b%b%b" % (varint(len(block)), block, payload)
                yield FIRST_BYTE | qos << 1 | retain, topic, payload

    def _topic_fields(self, batch: pa.RecordBatch) -> tuple[list[bytes | str], Iterable[int]]:
        """Returns the distinct topics as fields (or their faults), and the index of each row's
        topic."""
        if self._options.topic is not None:
            return [self._topic_field(self._options.topic)], repeat(0, batch.num_rows)
        encoded = pc.dictionary_encode(batch.column("topic"), null_encoding="encode")
        names = encoded.dictionary.to_pylist()
        return [self._topic_field(name) for name in names], encoded.indices.to_pylist()

    def _topic_field(self, topic: str | None) -> bytes | str:
        known = self._topics.get(topic)
        if known is not None:
            return known
        field: bytes | str
        if topic is None:
            field = "a row without a topic (null)"
        else:
            try:
                raw = topic.encode()
                decode_topic(raw)
                field = topic_field(raw)
            except (InvalidTopic, UnicodeEncodeError) as error:
                field = str(error)
        if len(self._topics) >= TOPICS_MAX:
            self._topics.clear()
        self._topics[topic] = field
        return field

    def _blocks(self, batch: pa.RecordBatch) -> Iterable[bytes | str]:
        if "properties" not in batch.schema.names:
            return repeat(b"")
        return self._properties.blocks(batch.column("properties"))

    def _stamps(self, batch: pa.RecordBatch) -> Iterable[bytes]:
        numbering = self._numbering
        if numbering is None:
            return repeat(b"")
        if isinstance(numbering, Counted):
            return numbering.blocks(batch.num_rows)
        partitions = batch.column("partition").to_pylist()
        return map(numbering.block, partitions, batch.column("offset").to_pylist())


def _column_or_default(batch: pa.RecordBatch, name: str, default: Any) -> Iterable[Any]:
    if name not in batch.schema.names:
        return repeat(default)
    return [default if value is None else value for value in batch.column(name).to_pylist()]


def _payloads(column: pa.Array) -> list[bytes]:
    """Returns the payloads: text as UTF-8, null as empty bytes."""
    if not pa.types.is_binary(column.type):
        column = column.cast(pa.binary())
    if column.null_count:
        column = pc.fill_null(column, b"")
    payloads: list[bytes] = column.to_pylist()
    return payloads


def ordered(batches: Iterator[pa.RecordBatch], order_by: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Sorts the rows of a task by these columns, and then by all others.

    The order then depends only on the rows, so each attempt numbers them equally. Raises RowError.
    """
    found: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        size += batch.nbytes
        if size > SORTED_BYTES_MAX:
            raise RowError(
                f"orderBy holds all rows of a task in memory, and there are more than "
                f"{SORTED_BYTES_MAX >> 20} MiB: use more partitions or smaller batches"
            )
        found.append(batch)
    if not found:
        return
    table = pa.Table.from_batches(found)
    keys = list(order_by) + [name for name in table.schema.names if name not in order_by]
    sortable = table
    if "properties" in keys and not pa.types.is_binary(table.schema.field("properties").type):
        texts = pa.array([repr(value) for value in table.column("properties").to_pylist()])
        place = table.schema.get_field_index("properties")
        sortable = table.set_column(place, "properties", texts)
    indices = pc.sort_indices(sortable, sort_keys=[(key, "ascending") for key in keys])
    yield from table.take(indices).combine_chunks().to_batches(max_chunksize=SORTED_ROWS)
