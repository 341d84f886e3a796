"""Files of the past as messages: each kind of file, and each way in which a row is bad."""

import gzip
import json
import random
import subprocess
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast_lake.imports.files import FileImport, replay_lake
from holdfast_lake.imports.rows import (
    CSV_FORMAT,
    NO_UTF8,
    NOW,
    BadRow,
    CsvFormat,
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


@pytest.mark.parametrize(
    ("start", "end", "said"),
    [
        ("2026-11-30", "2026-11-29", "no time is from --from 2026-11-30 to --to 2026-11-29"),
        ("yesterday", None, "--from is 'yesterday'; allowed"),
        (None, "soon", "--to is 'soon'; allowed"),
    ],
)
def test_a_replay_of_no_time(tmp_path: Path, start: str | None, end: str | None, said: str) -> None:
    with pytest.raises(ImportFailed) as raised:
        replay_lake(str(tmp_path), ["#"], start, end, {"mqttServers": "127.0.0.1:1"})
    assert str(raised.value).startswith(said)
    assert "may be in the log" not in str(raised.value)


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
    wrong = "between ',', the first line has 2 (--delimiter gives another one)"
    path = tmp_path / "a.csv"
    path.write_bytes(b'a,b\n1,2\n1\n1,2,3\n\n\xff,1\n"x\ny",2\n"x"y,2\n007,+1\n')
    assert read(path) == [
        (2, {"a": 1, "b": 2}),
        (3, f"1 fields {wrong}"),
        (4, f"3 fields {wrong}"),
        (6, NO_UTF8),
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
    with pytest.raises(BadRow, match=r"it has no time .* name its field with --time"):
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
    for value in ("on", "unavailable", None, True):  # a history of Home Assistant
        assert message(timed, {"p": value, "at": AT}) == ("t", {"ts": AT, "value": value})
    for value in (b"\xff", "[1, 2]"):
        with pytest.raises(BadRow, match="--time now leaves texts and bytes unchanged"):
            timed.message({"p": value, "at": AT})
    with pytest.raises(BadRow, match="the payload p is None"):
        ImportRule("t", "p", NOW).message({"p": None})


def test_the_time_may_be_in_the_payload() -> None:
    inside = ImportRule("t", "p", "tst")
    payload = {"ts": "2026-01-02T03:04:05.000000Z", "_type": "location", "tst": 1_767_323_045}
    assert message(inside, {"p": '{"_type":"location","tst":1767323045}'})[1] == payload
    assert message(inside, {"p": '{"tst":5}', "tst": AT})[1] == {"ts": AT, "tst": 5}
    local = ImportRule("t", "p", "ts", "Europe/Berlin")
    assert message(local, {"p": '{"v":1,"ts":"2026-07-01 02:00"}'})[1] == {
        "ts": "2026-07-01T00:00:00.000000Z", "v": 1,
    }  # fmt: skip
    with pytest.raises(BadRow, match="it has no field tst"):
        inside.message({"p": '{"a":1}'})


def test_times_without_a_zone_are_of_the_given_one() -> None:
    winter, summer = "2026-01-01T11:00:00.000000Z", "2026-07-01T10:00:00.000000Z"
    rule = ImportRule("t", time="at", zone="Europe/Berlin")
    for value, at in (
        ("2026-01-01 12:00", winter),
        ("1.7.2026 12:00", summer),
        (datetime(2026, 7, 1, 12), summer),
        (datetime(2026, 7, 1, 10, tzinfo=UTC), summer),
        ("2026-07-01T10:00Z", summer),
    ):
        assert message(rule, {"at": value})[1] == {"ts": at}
    utc = ImportRule("t", time="at")
    for value, is_told in (("2026-01-01 12:00", True), ("2026-01-01 12:00Z", False), ("5", False),
                           (5, False), ("x", False), (None, False)):  # fmt: skip
        assert utc.names_no_zone({"at": value}) == is_told
        assert not rule.names_no_zone({"at": value})
    assert not ImportRule("t").names_no_zone({"at": AT})
    american = ImportRule("t", time="at", zone="Europe/Berlin", time_format="%m/%d/%Y %I:%M %p")
    assert message(american, {"at": "07/01/2026 12:00 PM"})[1] == {"ts": summer}
    with pytest.raises(BadRow, match="which is no time"):
        american.message({"at": "2026-07-01 12:00"})
    with pytest.raises(ImportFailed, match="--zone Mars is not known"):
        ImportRule("t", time="at", zone="Mars")
    for when in (None, NOW):
        with pytest.raises(ImportFailed, match="are for the times of --time FIELD"):
            ImportRule("t", time=when, zone="Europe/Berlin")


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_the_first_line_shows_the_delimiter(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text("Zeit,Gerät,°C\n1,a,2\n".replace(",", delimiter), "utf-8")
    assert read(path) == [(2, {"Zeit": 1, "Gerät": "a", "°C": 2})]
    # A name or a text with the delimiter is none, and several candidates are no evidence.
    for text, row in (
        (f'"a{delimiter}b"\n1\n', {f"a{delimiter}b": 1}),
        (f"a{delimiter}b,c\n1,2\n", {f"a{delimiter}b": 1, "c": 2}),
        ("a;b|c\n1\n", {"a;b|c": 1}),
    ):
        path.write_text(text)
        assert read(path) == [(2, row)]
    path.write_text("a-b\n1-2\n")
    assert list(read_rows(path, "csv", CsvFormat("-"))) == [(2, {"a": 1, "b": 2})]


def test_a_decimal_comma_is_never_a_text_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('a;b\n21,5;x\n-1;2.5\n1.234;"1,2,3"\n')

    def values(decimal: str) -> list[Any]:
        """The fields of the rows, or why they are bad."""
        found = [row for _, row in read_rows(path, "csv", CsvFormat(decimal=decimal))]
        return [str(each) if isinstance(each, BadRow) else [*each.values()] for each in found]

    assert values(",") == [[21.5, "x"], [-1, "2.5"], ["1.234", "1,2,3"]]
    assert values(".") == [["21,5", "x"], [-1, 2.5], [1.234, "1,2,3"]]
    bad, *others = values("")
    assert "--decimal , makes numbers of these" in bad
    assert others == values(".")[1:]
    path.write_text('a,b\n"21,5",1\n')
    assert values("") == [["21,5", 1]]
    assert values(",") == [[21.5, 1]]


def test_the_command_in_a_refusal_mends_the_file(tmp_path: Path) -> None:
    table = ",result,table,_time,_value,host\n,,0,{at},1,{host}\n"
    note = "#group,false,false,false,false,true\n#datatype,string,long,dateTime,long,string\n"
    text = "\n".join(note + table.format(at=AT, host=host) for host in "ab")
    (tmp_path / "OLD.csv").write_text(text)
    (tmp_path / "UTF16.csv").write_text("a\tb\n1\t2\n", "utf-16")
    (tmp_path / "OLD").write_bytes("a,b\nö,1\n".encode("latin1"))
    with pytest.raises(ImportFailed) as influx:
        read(tmp_path / "OLD.csv")
    with pytest.raises(ImportFailed) as utf16:
        read(tmp_path / "UTF16.csv")
    assert "is UTF-16" in str(utf16.value)
    ((_, latin),) = list(read_rows(tmp_path / "OLD", "csv"))
    for error, name, rows in (
        (influx.value, "NEW.csv", [{"result": None, "table": 0, "_time": AT, "_value": 1, "host": h}
                                   for h in "ab"]),
        (utf16.value, "utf8-UTF16.csv", [{"a": 1, "b": 2}]),
        (latin, "NEW", [{"a": "ö", "b": 1}]),
    ):  # fmt: skip
        command = str(error)[str(error).index("awk " if name == "NEW.csv" else "iconv ") :]
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
        assert [row for _, row in read_rows(tmp_path / name, "csv")] == rows


def test_the_producer_of_an_import_is_that_of_0_1(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def producer(text: str, rule: ImportRule, form: CsvFormat = CSV_FORMAT) -> str:
        """The identity by which the broker knows the rows of a file."""
        path.write_text(text)
        file = FileImport(path, rule, "json", form)
        file.check()
        return file._digest

    rule, number = ImportRule("t", "p", "at"), '{"p":1,"at":1}\n'
    old = sha256(b"('json', ImportRule(topic='t', payload='p', time='at'))" + number.encode())
    assert producer(number, rule) == old.hexdigest()
    assert producer(number, ImportRule("t", "p", "at", "Europe/Berlin")) != old.hexdigest()
    assert producer(number, rule, CsvFormat(decimal=",")) != old.hexdigest()
    # 0.1 left out a text with --skip-bad, and gave its number to the next row.
    text = '{"p":"on","at":1}\n' + number
    old = sha256(b"('json', ImportRule(topic='t', payload='p', time='at'))" + text.encode())
    assert producer(text, rule) != old.hexdigest()


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
