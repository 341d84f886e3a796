"""Rows to PUBLISH packets: contents, numbers, order, and what each wrong row is answered with."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

import pyarrow as pa

from holdfast.client.identity import SEQUENCE_MAX, parse_identity
from holdfast.node.publish.producers import PROPERTY_HEAD, SequenceReader
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.packets import PUBLISH, Publish
from holdfast.protocol.mqtt.properties import USER_PROPERTY, decode_block, encode_block
from holdfast_lake.properties import decode_array
from holdfast_lake.sink import rows as sink_rows
from holdfast_lake.sink.identity import (
    BATCH_MAX,
    ORIGINS_MAX,
    ROWS_MAX,
    IdentityError,
    Origins,
    Stamp,
    check_overlap,
    counted_producer,
    first_sequence,
    origin_producer,
    stream_job,
    write_job,
)
from holdfast_lake.sink.options import parse
from holdfast_lake.sink.publisher import PublishWindow
from holdfast_lake.sink.rows import Counted, RowEncoder, RowError, ordered

JOB = stream_job("9f3c")


class Encoded:
    """Rows as the packets that would be sent, and why others were left out."""

    def __init__(self, numbering: Counted | Origins | None = None, **options: str) -> None:
        parsed = parse({"mqttServers": "a", **options}, streaming=True)
        self.level = parsed.level
        self.refused: list[str] = []
        self.encoder = RowEncoder(parsed, numbering, self.refused.append)

    def __call__(self, **columns: Any) -> list[Publish]:
        batch = pa.record_batch({name: _array(values) for name, values in columns.items()})
        window = PublishWindow(1000)
        found = []
        for first, head, tail in self.encoder.messages(batch):
            frame = window.add(first, head, tail) if first & 6 else bytes((first, 0)) + head + tail
            # The body of a packet of this size begins behind one or two bytes of length.
            start = 2 if not first & 6 or frame[1] < 128 else 3
            packet = decode(frame, first, start, len(frame), self.level, True)
            assert isinstance(packet, Publish)
            found.append(packet)
        return found


def parse_properties(block: bytes) -> dict[str, Any]:
    found: list[dict[str, Any]] = decode_array(pa.array([block], pa.binary())).to_pylist()
    return found[0]


def user_of(properties: dict[str, Any]) -> list[tuple[str, str]]:
    return [(pair["key"], pair["value"]) for pair in properties["user"]]


def _array(values: Any) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values)


def counted() -> Counted:
    return Counted(counted_producer(JOB, 3), first_sequence(7))


def numbers(packets: list[Publish]) -> list[str]:
    """What a broker reads."""
    reader = SequenceReader()
    found = []
    for packet in packets:
        assert reader.read(packet.properties, packet.properties.find(PROPERTY_HEAD))
        found.append(f"{reader.producer_id.decode()}:{reader.epoch}:{reader.sequence}")
    return found


def test_contents() -> None:
    packets = Encoded()(
        topic=["a", "ü/b", "a"],
        payload=[b"1", None, b"\x00\xff"],
        qos=[0, None, 2],
        retain=[True, None, False],
    )
    assert [(p.topic.decode(), p.payload, p.qos, p.retain) for p in packets] == [
        ("a", b"1", 0, True),
        ("ü/b", b"", 1, False),
        ("a", b"\x00\xff", 2, False),
    ]
    assert {packet.properties for packet in packets} == {b""}


def test_options_for_all_rows() -> None:
    packets = Encoded(topic="t/1", qos="2", retain="true")(payload=["text", "größe"])
    assert [(p.topic, p.payload, p.qos, p.retain) for p in packets] == [
        (b"t/1", b"text", 2, True),
        (b"t/1", "größe".encode(), 2, True),
    ]


@pytest.mark.parametrize("kind", [pa.large_binary(), pa.large_string(), pa.binary_view()])
def test_payloads_of_other_arrow_types(kind: pa.DataType) -> None:
    packets = Encoded(topic="t")(payload=pa.array(["x", None], pa.string()).cast(kind))
    assert [packet.payload for packet in packets] == [b"x", b""]


def test_mqtt_3_has_no_properties() -> None:
    encoded = Encoded(counted(), topic="t", protocolVersion="3.1.1")
    assert encoded(payload=["x"])[0].payload == b"x"


def test_wrong_rows_are_left_out_and_the_others_keep_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink_rows, "MESSAGE_BYTES_MAX", 50)
    encoded = Encoded(counted())
    packets = encoded(
        topic=["a", "a/+", "", None, "#", "a\0", "x", "x", "b", "y" * 65_536],
        payload=[b"1"] * 7 + [b"1" * 51] + [b"9", b""],
        qos=[1] * 6 + [3, 1, 1, 1],
    )
    base = 7 << 32
    assert numbers(packets) == [
        f"spark-{JOB}-3:0:{base + 1}",
        f"spark-{JOB}-3:0:{base + 9}",
    ]
    wrong = [
        "wildcards",
        "at least one",
        "null",
        "wildcards",
        "U+0000",
        "QoS 3",
        "51 bytes",
        "65536",
    ]
    assert len(encoded.refused) == len(wrong)
    for text, part in zip(encoded.refused, wrong, strict=True):
        assert part in text


def test_counted_over_batches() -> None:
    encoded = Encoded(counted(), topic="t")
    packets = [packet for size in (3, 0, 2) for packet in encoded(payload=["x"] * size)]
    assert [int(value.split(":")[2]) - (7 << 32) for value in numbers(packets)] == [1, 2, 3, 4, 5]
    again = Encoded(counted(), topic="t")(payload=["x"] * 5)
    assert numbers(again) == numbers(packets), "another attempt, divided into batches differently"


def test_only_qos_1_is_numbered() -> None:
    encoded = Encoded(counted(), topic="t")
    packets = encoded(payload=["x"] * 3, qos=[0, 1, 2])
    assert [bool(packet.properties) for packet in packets] == [False, True, False]
    assert encoded.encoder.unnumbered == 2
    strict = Encoded(counted(), topic="t", exactlyOnce="require")
    with pytest.raises(RowError, match="needs QoS 1; a row has QoS 2"):
        strict(payload=["x"] * 2, qos=[1, 2])


@pytest.mark.parametrize("sequence", [1, 9, 10, 99, 100, SEQUENCE_MAX])
def test_stamps(sequence: int) -> None:
    stamp = Stamp(counted_producer(JOB, 12))
    for one in (5, sequence, 5):
        pairs = decode_block(stamp.block(one), 0, len(stamp.block(one)), PUBLISH)[USER_PROPERTY]
        assert isinstance(pairs, list)
        (name, text) = pairs[0]  # type: ignore[misc]
        assert name == "hf-seq"
        assert parse_identity(text).sequence == one


def test_producers_are_valid_and_different() -> None:
    jobs = [stream_job("q"), write_job("q"), stream_job("r")]
    origins: list[int | str] = [0, 1 << 31, "0", "topic-0", "ü" * 500]
    names = [counted_producer(job, partition) for job in jobs for partition in (0, 99_999)]
    names += [origin_producer(job, origin) for job in jobs for origin in origins]
    assert len(set(names)) == len(names)
    for name in names:
        assert parse_identity(f"{name}:0:1").producer == name


def test_batches_follow_each_other() -> None:
    assert first_sequence(1) > first_sequence(0) - 1 + ROWS_MAX
    assert first_sequence(BATCH_MAX) - 1 + ROWS_MAX <= SEQUENCE_MAX
    with pytest.raises(IdentityError, match="batch"):
        first_sequence(BATCH_MAX + 1)


def test_more_rows_than_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_rows, "ROWS_MAX", 3)
    encoded = Encoded(counted(), topic="t")
    encoded(payload=["x"] * 3)
    with pytest.raises(IdentityError, match="more partitions"):
        encoded(payload=["x"])


def test_by_origin() -> None:
    encoded = Encoded(Origins(JOB), topic="t")
    packets = encoded(
        payload=["x"] * 6,
        partition=[2, 0, 2, 2, 2, 0],
        offset=[4, 0, 5, 5, 9, 1],
    )
    two, zero = f"spark-{JOB}-o2:0", f"spark-{JOB}-o0:0"
    assert numbers(packets) == [
        f"{two}:{5 << 16}",
        f"{zero}:{1 << 16}",
        f"{two}:{6 << 16}",
        f"{two}:{(6 << 16) + 1}",
        f"{two}:{10 << 16}",
        f"{zero}:{2 << 16}",
    ]


def test_origins_do_not_depend_on_how_rows_are_divided() -> None:
    partitions = [0, 1, 0, 2, 1, 0]
    offsets = [0, 7, 1, 3, 8, 2]

    def numbered(rows: list[int]) -> dict[int, str]:
        found = Encoded(Origins(JOB), topic="t")(
            payload=[str(row) for row in rows],
            partition=[partitions[row] for row in rows],
            offset=[offsets[row] for row in rows],
        )
        return dict(zip(rows, numbers(found), strict=True))

    whole = numbered([0, 1, 2, 3, 4, 5])
    assert numbered([0, 2, 5]) | numbered([1, 3, 4]) == whole
    assert len(set(whole.values())) == 6


@pytest.mark.parametrize(
    ("partitions", "given", "text"),
    [
        ([1, 1], [5, 4], "offset 4 of partition 1 comes after 5"),
        ([1, 1], [-1, 0], "offset -1"),
        ([1, 1], [0, 1 << 50], "offset"),
        ([1, None], [0, 1], "null"),
        ([1, 1], [0, None], "null"),
    ],
)
def test_wrong_origins(partitions: list[int], given: list[int], text: str) -> None:
    with pytest.raises(IdentityError, match=text):
        Encoded(Origins(JOB), topic="t")(payload=["x"] * 2, partition=partitions, offset=given)


def test_origins_are_bounded() -> None:
    origins = Origins(JOB)
    for partition in range(ORIGINS_MAX):
        origins.block(partition, 0)
    with pytest.raises(IdentityError, match="more than 10000 partitions"):
        origins.block("one more", 0)
    for _ in range(65_535):
        origins.block(0, 0)
    with pytest.raises(IdentityError, match="more than 65536 rows"):
        origins.block(0, 0)


def test_an_origin_in_two_tasks() -> None:
    check_overlap([{0: (1, 5)}, {1: (0, 9), "a": (0, 1)}, {}])
    with pytest.raises(IdentityError, match="partition 0 were in two tasks"):
        check_overlap([{0: (1, 5)}, {0: (6, 9)}])


def blocks(column: pa.Array) -> tuple[list[bytes], list[str]]:
    encoded = Encoded(topic="t")
    found = encoded(payload=["x"] * len(column), properties=column)
    return [packet.properties for packet in found], encoded.refused


def test_properties_of_a_struct() -> None:
    pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
    kind = pa.struct(
        [
            ("payload_is_text", pa.bool_()),
            ("message_expiry_s", pa.int32()),
            ("content_type", pa.string()),
            ("response_topic", pa.string()),
            ("correlation_data", pa.binary()),
            ("user", pairs),
        ]
    )
    rows = [
        {
            "payload_is_text": True,
            "message_expiry_s": 60,
            "content_type": "text/plain",
            "response_topic": "answers",
            "correlation_data": b"\0\1",
            "user": [
                {"key": "a", "value": "1"},
                {"key": "hf-seq", "value": "p:0:1"},
                {"key": "a", "value": None},
            ],
        },
        {"content_type": "x"},
        None,
    ]
    (first, second, third), refused = blocks(pa.array(rows, kind))
    assert not refused
    decoded = parse_properties(first)
    assert (decoded["payload_is_text"], decoded["message_expiry_s"]) == (True, 60)
    assert (decoded["content_type"], decoded["response_topic"]) == ("text/plain", "answers")
    assert decoded["correlation_data"] == b"\0\1"
    assert user_of(decoded) == [("a", "1"), ("a", "")]
    assert parse_properties(second)["content_type"] == "x"
    assert third == b""


def test_user_properties_of_a_map() -> None:
    column = pa.array(
        [[("b", "2"), ("a", "1"), ("hf-seq", "p:0:9")], None, []], pa.map_("string", "string")
    )
    found, refused = blocks(column)
    assert not refused
    assert user_of(parse_properties(found[0])) == [("b", "2"), ("a", "1")]
    assert found[1:] == [b"", b""]


def test_a_block_as_the_source_gives_it_loses_its_number() -> None:
    given = encode_block(
        {0x26: [("a", "1"), ("hf-seq", "other:0:5"), ("b", "2")], 0x03: "text", 0x02: 9}
    )
    column = pa.array([given, given, b"", None], pa.binary())
    encoded = Encoded(counted(), topic="t")
    packets = encoded(payload=["x"] * 4, properties=column)
    assert [parse_identity(value).producer for value in numbers(packets)] == [
        counted_producer(JOB, 3)
    ] * 4
    decoded = parse_properties(packets[1].properties)
    assert user_of(decoded)[:2] == [("a", "1"), ("b", "2")]
    assert (decoded["content_type"], decoded["message_expiry_s"]) == ("text", 9)


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array([b"\xff"]), "no block of a PUBLISH"),
        (pa.array([b"\x26\x00"]), "no block of a PUBLISH"),
        (pa.array([b"\x11\0\0\0\1"]), "does not belong in PUBLISH"),
        (pa.array([{"response_topic": "a/#"}]), "wildcards"),
        (pa.array([{"content_type": "a\0"}]), "U\\+0000"),
        (pa.array([{"message_expiry_s": -1}]), "message-expiry-interval cannot be -1"),
        (pa.array([{"content_type": "x" * 65_536}]), "65536 bytes"),
    ],
)
def test_wrong_properties(column: pa.Array, text: str) -> None:
    found, refused = blocks(column)
    assert not found
    assert len(refused) == 1
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(refused[0])


def shuffled(rows: list[dict[str, Any]], seed: int) -> Iterator[pa.RecordBatch]:
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    for start in range(0, len(rows), 7):
        yield pa.RecordBatch.from_pylist(rows[start : start + 7], schema=ROWS)


ROWS = pa.schema(
    [
        ("at", pa.timestamp("us", "UTC")),
        ("topic", pa.string()),
        ("payload", pa.binary()),
        ("qos", pa.int8()),
        ("retain", pa.bool_()),
        ("properties", pa.struct([("content_type", pa.string())])),
    ]
)


def test_order_depends_on_the_rows_only() -> None:
    rows = [
        {
            "at": number // 5,
            "topic": f"t{number % 2}",
            "payload": b"%d" % (number % 3),
            "qos": 1,
            "retain": number % 4 == 0,
            "properties": {"content_type": str(number)} if number % 2 else None,
        }
        for number in range(40)
    ]
    orders = []
    for seed in range(5):
        found = [
            row for batch in ordered(shuffled(rows, seed), ["at"]) for row in batch.to_pylist()
        ]
        orders.append(found)
        assert [row["at"] for row in found] == sorted(row["at"] for row in found)
    assert len(orders[0]) == 40
    assert all(order == orders[0] for order in orders)


def test_order_of_no_rows_and_of_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(ordered(iter(()), ["at"])) == []
    monkeypatch.setattr(sink_rows, "SORTED_BYTES_MAX", 10)
    with pytest.raises(RowError, match="orderBy holds all rows of a task in memory"):
        list(ordered(shuffled([{"topic": "a", "payload": b"x" * 20}], 0), ["topic"]))
