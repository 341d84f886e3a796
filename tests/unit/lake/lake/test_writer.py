import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

pa = pytest.importorskip("pyarrow")

import pyarrow.parquet as pq  # noqa: E402

from holdfast.client.log.lake import parquet  # noqa: E402
from holdfast.client.log.lake.commits import File  # noqa: E402
from holdfast.client.log.lake.parquet import (  # noqa: E402
    PartitionedWriter,
    WriteSpec,
    escape,
    partition_path,
    split,
    write_files,
)

UTC_TIME = pa.timestamp("us", tz="UTC")


def batch(rows: list[dict[str, Any]], **types: Any) -> Any:
    schema = pa.schema(list(types.items()))
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def test_partitions_in_order_of_their_coming() -> None:
    rows = [
        {"run": run, "day": day, "n": n}
        for n, (run, day) in enumerate(
            [("b", date(2026, 1, 2)), ("a", None), ("b", date(2026, 1, 2)), ("", date(2026, 1, 2))]
        )
    ]
    data = batch(rows, run=pa.string(), day=pa.date32(), n=pa.int64())
    found = [(values, part.column("n").to_pylist()) for values, part in split(data, ("run", "day"))]
    assert found == [
        (("b", "2026-01-02"), [0, 2]),
        (("a", None), [1]),
        ((None, "2026-01-02"), [3]),
    ]
    assert [values for values, _ in split(data, ())] == [()]


def test_days_that_python_does_not_know() -> None:
    days = pa.array([4_000_000, 20_000, None], pa.int32()).cast(pa.date32())
    data = pa.RecordBatch.from_arrays([days, pa.array([1, 2, 3])], names=["day", "n"])
    assert [values for values, _ in split(data, ("day",))] == [
        ("12921-08-18",),
        ("2024-10-04",),
        (None,),
    ]


def test_names_of_directories() -> None:
    partition = {"run": "a/b=c d%", "day": None}
    assert partition_path(partition) == "run=a%2Fb%3Dc d%25/day=__HIVE_DEFAULT_PARTITION__/"
    assert escape("é:\n") == "é%3A%0A"


def test_files_and_what_is_told_of_them(tmp_path: Path) -> None:
    times = [datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in (5, 3)]
    rows = [{"t": time, "k": key} for time in (*times, None) for key in "xy"]
    data = batch(rows, t=UTC_TIME, k=pa.string())
    spec = WriteSpec(str(tmp_path), ("k",))
    (answer,) = write_files([data.slice(0, 4), data.slice(0, 0), data.slice(4)], spec, "7-1")
    files = [msgspec.json.decode(text, type=File) for text in answer.column("file").to_pylist()]
    assert [file.partition for file in files] == [{"k": "x"}, {"k": "y"}]
    assert [file.rows for file in files] == [3, 3]
    least, greatest = (int(time.timestamp() * 1e6) for time in sorted(times))
    assert files[0].times == {"t": (least, greatest)}
    for file in files:
        path = tmp_path / file.staged
        assert path.stat().st_size == file.bytes
        assert pq.read_table(path).column("t").to_pylist() == [*times, None]
        assert pq.read_schema(path).names == ["t"]


def test_same_bytes_however_the_rows_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 100)
    rows = [{"d": n // 150, "text": f"value {n % 7}", "n": n * n} for n in range(500)]
    data = batch(rows, d=pa.int32(), text=pa.string(), n=pa.int64())
    contents = []
    for cut in (1, 13, 100, 500):
        folder = tmp_path / str(cut)
        folder.mkdir()
        spec = WriteSpec(str(folder), ("d",), one_file_each=True)
        out = PartitionedWriter(spec, "0")
        for start in range(0, 500, cut):
            out.write(data.slice(start, cut))
        files = out.close()
        assert [file.rows for file in files] == [150, 150, 150, 50]
        assert pq.ParquetFile(folder / files[0].staged).num_row_groups == 2
        contents.append([(folder / file.staged).read_bytes() for file in files])
    assert all(content == contents[0] for content in contents)


def test_open_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "OPEN_FILES_MAX", 3)
    data = batch([{"k": n % 5, "n": n} for n in range(20)], k=pa.int32(), n=pa.int64())
    out = PartitionedWriter(WriteSpec(str(tmp_path), ("k",)), "0")
    for start in range(0, 20, 5):
        out.write(data.slice(start, 5))
        assert len(out._open) <= 3
    assert sum(file.rows for file in out.close()) == 20


def test_a_large_value_ends_a_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1000)
    data = batch([{"b": b"x" * 600} for _ in range(6)], b=pa.binary())
    out = PartitionedWriter(WriteSpec(str(tmp_path), encodings={"b": "PLAIN"}), "0")
    for index in range(6):
        out.write(data.slice(index, 1))
    (file,) = out.close()
    assert pq.ParquetFile(tmp_path / file.staged).num_row_groups == 3


def test_nothing_to_write(tmp_path: Path) -> None:
    (answer,) = write_files([], WriteSpec(str(tmp_path)), "0")
    assert answer.num_rows == 0
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_no_file_open(tmp_path: Path) -> None:
    def failing() -> Any:
        yield batch([{"n": 1}], n=pa.int64())
        raise ValueError("a broken batch")

    with pytest.raises(ValueError, match="a broken batch"):
        list(write_files(failing(), WriteSpec(str(tmp_path)), "0"))


def test_the_answer_is_json(tmp_path: Path) -> None:
    data = batch([{"n": 1}], n=pa.int64())
    (answer,) = write_files([data], WriteSpec(str(tmp_path)), "3-4")
    assert json.loads(answer.column("file")[0].as_py())["staged"] == "3-4-00001.parquet"
