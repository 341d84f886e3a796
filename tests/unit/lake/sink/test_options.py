"""The sink's options and columns: what is taken, and what each mistake is answered with."""

from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

from pyspark.sql import types as t

from holdfast_lake.sink.options import parse
from holdfast_lake.sink.rows import check_columns
from holdfast_lake.sink.sink import HoldfastStreamWriter, HoldfastWriter
from holdfast_lake.source.options import OptionError

SERVERS = {"mqttServers": "127.0.0.1:1883"}


SIMPLE: dict[str, t.DataType] = {
    "string": t.StringType(),
    "binary": t.BinaryType(),
    "boolean": t.BooleanType(),
    "int": t.IntegerType(),
    "bigint": t.LongType(),
    "double": t.DoubleType(),
    "timestamp": t.TimestampType(),
    "map": t.MapType(t.StringType(), t.StringType()),
    "pairs": t.ArrayType(
        t.StructType([t.StructField("key", t.StringType()), t.StructField("value", t.StringType())])
    ),
}


def schema(text: str) -> t.StructType:
    """`name type`s separated by commas, without a JVM; `name<...>` for a struct."""
    result = t.StructType()
    for column in text.split(", "):
        name, _, kind = column.partition(" ")
        if kind.startswith("struct<"):
            inner = schema(kind.removeprefix("struct<").removesuffix(">").replace("; ", ", "))
            result.add(name, inner)
        else:
            result.add(name, SIMPLE[kind])
    return result


def test_defaults() -> None:
    options = parse({"mqttservers": "a:1, mqtts://b ,[::1]:2,a:1"}, streaming=True)
    assert [str(server) for server in options.servers] == [
        "mqtt://a:1",
        "mqtts://b:8883",
        "mqtt://[::1]:2",
    ]
    assert (options.topic, options.qos, options.retain) == (None, 1, False)
    assert (options.exactly_once, options.fail_on_refused, options.level) == ("prefer", True, 5)


def test_every_option() -> None:
    options = parse(
        {
            "MQTTSERVERS": "mqtts://a",
            "topic": "t",
            "qos": "0",
            "retain": "TRUE",
            "exactlyOnce": "off",
            "writeId": "w",
            "writeVersion": "0",
            "orderBy": "a, b",
            "failOnRefused": "false",
            "username": "u",
            "password": "secret",
            "tlsCaFile": "ca",
            "tlsCertFile": "cert",
            "tlsKeyFile": "key",
            "tlsServerName": "name",
            "clientIdPrefix": "etl",
            "protocolVersion": "3.1.1",
            "inflight": "1",
            "retryTimeout": "5",
            "checkpointLocation": "/of/spark",
        },
        streaming=False,
    )
    assert (options.order_by, options.level, options.retain) == (("a", "b"), 4, True)
    assert (options.inflight_max, options.retry_timeout_s) == (1, 5)
    assert "secret" not in repr(options)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "where to publish"),
        ({"servers": "a:8080"}, "admin ports"),
        ({"path": "/data", **SERVERS}, "not written to a path"),
        ({"mqttServer": "a"}, "unknown option 'mqttserver'"),
        ({"mqttServers": "http://a"}, "unknown scheme"),
        ({"mqttServers": "ws://a"}, "over TCP and TLS"),
        ({"mqttServers": "a:0"}, "port '0'"),
        ({"mqttServers": "a,,b"}, "host is missing"),
        ({"qos": "3"}, "allowed: 0, 1, 2"),
        ({"retain": "yes"}, "allowed: true, false"),
        ({"exactlyOnce": "yes"}, "allowed: prefer, require, off"),
        ({"exactlyOnce": "require", "qos": "2"}, "needs QoS 1"),
        ({"exactlyOnce": "require", "protocolVersion": "3.1.1"}, "needs MQTT 5"),
        ({"writeId": ""}, "1 to 1024"),
        ({"writeVersion": "1"}, "without writeId"),
        ({"writeId": "w", "writeVersion": "-1"}, "from 0 to"),
        ({"orderBy": "a,a"}, "at most once"),
        ({"password": "p"}, "without username"),
        ({"tlsCertFile": "f", "mqttServers": "mqtts://a"}, "together"),
        ({"tlsCaFile": "f"}, "reached by TLS"),
        ({"clientIdPrefix": "x" * 65}, "longer than 64"),
        ({"protocolVersion": "3.1"}, "allowed: 5, 5.0, 3.1.1"),
        ({"inflight": "65536"}, "from 1 to 65535"),
        ({"retryTimeout": "0"}, "from 1 to"),
    ],
)
def test_mistakes(given: dict[str, str], text: str) -> None:
    needs_servers = given and not {"servers", "mqttServers", "mqttServer", "path"} & set(given)
    with pytest.raises(OptionError, match=text):
        parse({**SERVERS, **given} if needs_servers else given, streaming=False)


def test_what_only_batches_have() -> None:
    with pytest.raises(OptionError, match="a stream has its checkpoint"):
        parse({**SERVERS, "writeId": "w"}, streaming=True)
    columns = schema("topic string, payload binary")
    for writer in (HoldfastWriter, HoldfastStreamWriter):
        with pytest.raises(OptionError, match="append"):
            writer(SERVERS, columns, overwrite=True)


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ("topic string, payload string", {}),
        ("payload binary, qos int, retain boolean", {"topic": "t"}),
        ("topic string, payload string, partition int, offset bigint", {}),
        ("topic string, payload string, partition string, offset int", {}),
        ("topic string, payload string, properties binary", {}),
        ("topic string, payload string, properties map", {}),
        (
            "topic string, payload string, properties struct<message_expiry_s int; "
            "content_type string; user pairs>",
            {},
        ),
        ("topic string, payload string, at timestamp", {"orderBy": "at"}),
    ],
)
def test_columns(columns: str, options: dict[str, str]) -> None:
    check_columns(schema(columns), parse({**SERVERS, **options}, streaming=True))


@pytest.mark.parametrize(
    ("columns", "options", "text"),
    [
        ("payload string", {}, "a column topic, or the option"),
        ("topic string, payload string", {"topic": "t"}, "leave one out"),
        ("topic string", {}, "column payload"),
        ("topic string, payload string, timestamp timestamp", {}, "column 'timestamp' is none"),
        ("topic string, payload string, producer string", {}, "column 'producer' is none"),
        ("topic string, payload string, Payload string", {}, "column 'Payload' is none"),
        ("topic string, payload string, payload string", {}, "of the same name"),
        ("topic int, payload string", {}, "topic is int; allowed: string"),
        ("topic string, payload double", {}, "cast it"),
        ("topic string, payload string, qos string", {}, "qos is string"),
        ("topic string, payload string, retain int", {}, "allowed: boolean"),
        ("topic string, payload string, offset int", {}, "belong together"),
        ("topic string, payload string, partition double, offset int", {}, "partition is double"),
        ("topic string, payload string, properties string", {}, "properties is string"),
        (
            "topic string, payload string, properties struct<expiry int>",
            {},
            "properties has expiry int",
        ),
        (
            "topic string, payload string, properties struct<content_type binary>",
            {},
            "properties has content_type binary",
        ),
        (
            "topic string, payload string, properties binary",
            {"protocolVersion": "3.1.1"},
            "has no properties",
        ),
        ("topic string, payload string", {"orderBy": "at"}, "orderBy has 'at'"),
        ("topic string, payload string, a pairs", {"orderBy": "a"}, "has no order"),
    ],
)
def test_wrong_columns(columns: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        check_columns(schema(columns), parse({**SERVERS, **options}, streaming=True))
