"""Files of the past as messages: each kind of file, and each way in which a row is bad."""

import gzip
import json
import random
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.pipeline.imports.files import FileImport
from holdfast.pipeline.imports.rows import (
    NOW,
    BadRow,
    ImportFailed,
    ImportRule,
    csv_value,
    kind_of,
    read_rows,
)

RULE = ImportRule("plant/{line}/{device}", time="at")
AT = "2026-01-02T03:04:05.000006Z"
ROW = {"line": "l1", "device": "d1", "at": AT, "t": 1.5, "ok": True, "none": None}
MESSAGE = ("plant/l1/d1", {"ts": AT, "t": 1.5, "ok": True})


def message(rule: ImportRule, row: dict[str, Any]) -> tuple[str, Any]:
    topic, payload = rule.message(row)
    return topic, json.loads(payload)


def read(path: Path) -> list[Any]:
    return [
        (number, str(row) if isinstance(row, BadRow) else row)
        for number, row in read_rows(path, kind_of(path))
    ]


def test_each_kind_of_file_gives_the_same_message(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(ROW)}\n\n")
    (tmp_path / "a.json").write_text(f" [{json.dumps(ROW)}]")
    text = f"line,device,at,t,ok,none\r\nl1,d1,{AT},1.5,true,\r\n"
    (tmp_path / "a.csv").write_text(f"\ufeff{text}", "utf-8")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    when = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)
    pq.write_table(pa.Table.from_pylist([{**ROW, "at": when}]), tmp_path / "a.parquet")
    for path in sorted(tmp_path.iterdir()):
        (found,) = [row for _, row in read_rows(path, kind_of(path))]
        assert not isinstance(found, BadRow)
        assert message(RULE, found) == MESSAGE, path


def test_lines_that_can_be_no_row_have_their_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":\n[1]\n"x"\n{"a":"\xff"}\n' + b"[" * 5000 + b"\n{}\n")
    found = read(path)
    assert [number for number, _ in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [row for _, row in found if isinstance(row, dict)] == [{"a": 1}, {}]
    assert found[1][1].startswith("no JSON: ")
    assert found[2][1] == "it is no JSON object"
    path = tmp_path / "a.csv"
    path.write_bytes(b'a,b\n1,2\n1\n1,2,3\n\n\xff,1\n"x\ny",2\n"x"y,2\n007,+1\n')
    assert read(path) == [
        (2, {"a": 1, "b": 2}),
        (3, "1 fields, the first line has 2"),
        (4, "3 fields, the first line has 2"),
        (6, "it is no UTF-8"),
        (8, {"a": "x\ny", "b": 2}),
        (9, "',' expected after '\"'"),
        (10, {"a": "007", "b": "+1"}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.txt", b"", "its name tells no format"),
        ("a.csv", b"a,a\n1,2\n", ":1: the first line must name each column once"),
        ("a.parquet", b"PAR1 and no more", "cannot be read: "),
        ("a.json", b"[1, 2", "is no JSON: "),
        ("a.csv.gz", gzip.compress(b"a,b\n1,2\n" * 100, mtime=0)[:-20], "cannot be read: "),
        ("a.jsonl.gz", b"no gzip", "cannot be read: "),
        ("missing.csv", None, "cannot be read: "),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, name: str, content: bytes | None, why: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ImportFailed) as error:
        FileImport(path, RULE).check()
    assert str(error.value).startswith(str(path))
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"line": "a/b"}, "line is 'a/b', which would be several levels"),
        ({"line": "+"}, "topic 'plant/+/d1': "),
        ({"line": None}, "line is None, which is no part of a topic"),
        ({"line": ""}, "line is '', which is no part of a topic"),
        ({"line": "\ud800"}, "topic "),
        ({"at": "22/11/2026 18:00"}, "at is '22/11/2026 18:00', which is no time"),
        ({"at": True}, "at is True, which is no time"),
        ({"at": None}, "at is None, which is no time"),
        ({"ts": 1}, "it has a field ts beside the time at"),
        ({"t": float("nan")}, "a field is NaN, infinity or no Unicode"),
        ({"t": b"x"}, "a column is binary: name it with --payload"),
    ],
)
def test_rows_that_can_be_no_message(change: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRow) as error:
        RULE.message({**ROW, **change})
    assert str(error.value).startswith(why)


def test_the_payload_is_a_field() -> None:
    rule = ImportRule("{topic}", payload="p")
    assert rule.message({"topic": "a/b", "p": '{"ts": 1 }'})[1] == b'{"ts": 1 }'
    with pytest.raises(BadRow, match="--time now imports it without"):
        rule.message({"topic": "a/b", "p": "21.5 C"})
    with pytest.raises(BadRow, match="it has no time"):
        rule.message({"topic": "a/b", "p": {"x": 1}})
    with pytest.raises(BadRow, match="it has no field p; it has topic"):
        rule.message({"topic": "a/b"})
    with pytest.raises(BadRow, match="no Unicode"):
        rule.message({"topic": "a/b", "p": "\ud800"})
    assert ImportRule("t", "p", NOW).message({"p": b"\xff"}) == ("t", b"\xff")
    timed = ImportRule("t", "p", "at")
    assert message(timed, {"p": 21.5, "at": AT}) == ("t", {"ts": AT, "value": 21.5})
    assert message(timed, {"p": b"21", "at": 1_767_323_045}) == (
        "t", {"ts": "2026-01-02T03:04:05.000000Z", "value": 21},
    )  # fmt: skip


def test_types_of_parquet_that_json_has_not(tmp_path: Path) -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    path = tmp_path / "a.parquet"
    columns = {
        "t": pa.array([time(3, 4), None, None], pa.time64("us")),
        "m": pa.array([[("k", at)], None, None], pa.map_(pa.string(), pa.timestamp("us", "UTC"))),
        "d": pa.array([None, timedelta(seconds=2), None], pa.duration("us")),
        "x": pa.array(["ok", "ok", "ok"]),
    }
    pq.write_table(pa.table(columns), path)
    rule = ImportRule("t", time="now")
    first, second, _ = [row for _, row in read_rows(path, "parquet") if isinstance(row, dict)]
    fields = {"t": "03:04:00", "m": [["k", "2026-01-02T00:00:00.000000Z"]], "x": "ok"}
    assert message(rule, first)[1] == fields
    with pytest.raises(BadRow, match="values of type timedelta: leave it out"):
        rule.message(second)
    for value in (pa.array([20_000_000], pa.date32()), pa.array([b"\xff"]).view(pa.string())):
        pq.write_table(pa.table({"v": value}), path)
        with pytest.raises(ImportFailed, match=r"a\.parquet cannot be read: "):
            list(read_rows(path, "parquet"))


@pytest.mark.parametrize("topic", ["", "a/+", "{a", "a/{}", "#", "{a}}", "x\0"])
def test_topics_that_are_none(topic: str) -> None:
    with pytest.raises(ImportFailed, match="--topic "):
        ImportRule(topic)


def test_values_of_parquet_and_csv() -> None:
    row = {"a": date(2026, 1, 2), "b": Decimal("1.50"), "c": Decimal(7), "d": [{"e": AT}], "ts": 1}
    assert message(ImportRule("t"), row)[1] == {
        "a": "2026-01-02", "b": 1.5, "c": 7, "d": [{"e": AT}], "ts": 1,
    }  # fmt: skip
    texts = ["1", "-0.5", "1e3", "", "true", "NaN", "1_0", "0x1", "9" * 19, " 1"]
    assert [csv_value(text) for text in texts] == [
        1, -0.5, 1000.0, None, True, "NaN", "1_0", "0x1", "9" * 19, " 1",
    ]  # fmt: skip


def test_garbage_is_bad_rows_and_nothing_else(tmp_path: Path) -> None:
    chance = random.Random(5)
    base = {
        "a.jsonl": json.dumps(ROW).encode() * 3,
        "a.json": json.dumps([ROW, ROW]).encode(),
        "a.csv": b'a,b,c\n1,"2",3\n4,5,6\n',
    }
    for _ in range(300):
        name = chance.choice(list(base))
        content = bytearray(base[name])
        for _ in range(chance.randrange(1, 4)):
            content[chance.randrange(len(content))] = chance.choice(b'"[]{},:\n\0\xff\x80a1-')
        path = tmp_path / name
        path.write_bytes(content)
        try:
            for _, row in read_rows(path, kind_of(path)):
                if not isinstance(row, BadRow):
                    RULE.message(row)
        except (BadRow, ImportFailed):
            pass
