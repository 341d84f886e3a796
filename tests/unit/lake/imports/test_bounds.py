"""The memory of an import: it does not grow with the topics, the list, the line or the columns."""

import gzip
import io
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast_lake import parquet_pages
from holdfast_lake.imports import rows as rows_module
from holdfast_lake.imports.files import FileImport, RetainedFile
from holdfast_lake.imports.rows import BadRow, ImportFailed, ImportRule, read_rows
from holdfast_lake.parquet_pages import ROWS_MAX, batch_rows

MIB = 1 << 20


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes of Python objects at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class CountedFile(io.BytesIO):
    """A file that counts its reads."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        return super().read(size)


def test_blanks_before_the_rows_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    first = CountedFile(b" \n" * 500_000 + b'{"a": 1}')
    files = iter((first, io.BytesIO(first.getvalue())))
    monkeypatch.setattr(rows_module, "_opened", lambda path: next(files))
    assert [row for _, row in read_rows(Path("a.jsonl"), "json")] == [{"a": 1}]
    assert first.reads < 100


def test_topics_are_counted_without_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    level = "x" * 2000
    with open(path, "w") as file:
        for number in range(5_000):
            file.write(f'{{"topic": "{number}/{level}", "ts": 1}}\n')
    found = FileImport(path, ImportRule("{topic}"))
    assert peak_of(found.check) < 3 * MIB
    assert (found.good, str(found.topics)) == (5_000, "5,000")
    monkeypatch.setattr("holdfast_lake.imports.files.TOPICS_MAX", 99)
    found = FileImport(path, ImportRule("{topic}"))
    found.check()
    assert str(found.topics) == "more than 99"


def test_a_list_is_read_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    row = json.dumps({"device": "d", "text": "ä\ud83d\ude00" * 500}, ensure_ascii=True)
    path.write_text(" [\n" + ",\n".join([row, "[1, 2]", "12345", "{}"] * 800) + " ] \n")
    assert path.stat().st_size > 4 * MIB
    found = []

    def read() -> None:
        found.append(sum(isinstance(each, dict) for _, each in read_rows(path, "json")))

    assert peak_of(read) < 3 * MIB
    assert found == [1600]
    monkeypatch.setattr(rows_module, "LINE_BYTES_MAX", 10_000)
    path.write_text('[{}, {"a": "' + "x" * 20_000 + '"}]')
    with pytest.raises(ImportFailed, match="2: an item of more than 10000 characters"):
        list(read_rows(path, "json"))


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("[]", []), ("[ ]", []), ("[1]", ["it is no JSON object"]), ('[{"a":NaN}]', ["no JSON"]),
        ('[{"a":1}, {"b":"]"}]', [{"a": 1}, {"b": "]"}]), ("[{}] x", None), ("[{},]", None),
        ("[,]", None), ("[", None), ("[{}", None), ("[{} {}]", None), ("[" * 9999, None),
        ('[{"a":"\xff"}]', ["no JSON"]), ("[{}]\n[{}]", None), ("[{},1", None),
        ("[" + "9" * 5000 + "]", ["no JSON"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 1 << 16])
def test_lists_and_what_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, rows: list[object] | None, size: int
) -> None:
    monkeypatch.setattr(rows_module, "READ_CHARACTERS", size)
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("latin-1"))
    if rows is None:
        with pytest.raises(ImportFailed, match=r"a\.json is no JSON: "):
            list(read_rows(path, "json"))
        return
    found = [row for _, row in read_rows(path, "json")]
    assert len(found) == len(rows)
    for row, wanted in zip(found, rows, strict=True):
        assert str(row).startswith(wanted) if isinstance(wanted, str) else row == wanted


def test_a_csv_without_line_ends_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "CSV_ROW_MAX", MIB)
    path = tmp_path / "a.csv"
    for text in ("a,b\n" + "1," * MIB, "a,b\n" + '"1\n",' * MIB, "a," * MIB):
        path.write_text(text)

        def read() -> None:
            with pytest.raises(ImportFailed, match="a row of more than 1048576 characters"):
                list(read_rows(path, "csv"))

        assert peak_of(read) < 48 * MIB
    path.write_text("a,b\n" + "1,2\n" * 3)
    assert [row for _, row in read_rows(path, "csv")] == [{"a": 1, "b": 2}] * 3


def test_large_values_of_parquet_are_read_in_small_batches(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    text = "x" * 100_000
    table = pa.table({"topic": ["t"] * 400, "p": pa.array([text] * 400)})
    pq.write_table(table, path, use_dictionary=False, compression="zstd", row_group_size=600)
    found = []

    def read() -> None:
        rows = read_rows(path, "parquet")
        found.append(sum(not isinstance(row, BadRow) and len(row["p"]) for _, row in rows))

    assert peak_of(read) < 36 * MIB
    assert found == [40_000_000]


def test_retained_messages_are_in_a_file() -> None:
    def work() -> None:
        with RetainedFile() as theirs:
            for number in range(8_000):
                theirs.put(f"{number}/{'x' * 100}", b"%d" % number)
            theirs.put("0/" + "x" * 100, b"other")
            assert len(theirs) == 8_000
            for number in range(0, 8_000, 2):
                theirs.drop(f"{number}/{'x' * 100}", b"%d" % number)
            batches = list(theirs.batches())
            assert sum(batch.num_rows for batch in batches) == len(theirs) == 4_001
            found = {row["topic"]: row["payload"] for each in batches for row in each.to_pylist()}
            assert found["0/" + "x" * 100] == b"other"
            theirs.bytes_left = 3
            with pytest.raises(ImportFailed, match="more than 1024 MiB"):
                theirs.put("a", b"123")

    assert peak_of(work) < 4 * MIB


def read_hostile(path: Path) -> tuple[int, str]:
    """The rows of a Parquet file that another process reads, and its last line. It fails if this
    takes more memory than PEAK_MIB_MAX."""
    run = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True
    )
    count, peak_mib, text = run.stdout.split(maxsplit=2)
    assert int(peak_mib) < PEAK_MIB_MAX, run.stdout
    return int(count), text.strip()


PEAK_MIB_MAX = 200
"""The most MiB that a small file takes: those of one batch and its rows."""
READ = """
import resource, sys
from pathlib import Path
from holdfast_lake.imports.rows import ImportFailed
from holdfast_lake.imports.rows import read_rows
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before, count, text = peak(), 0, "complete"
try:
    for count, _ in read_rows(Path(sys.argv[1]), "parquet"):
        pass
except ImportFailed as error:
    text = str(error)
print(count, peak() - before, text)
"""


@pytest.mark.parametrize("stored", ["dictionary", "text", "delta", "fixed", "many"])
def test_a_value_that_a_file_has_once_is_not_in_memory_for_each_row(
    tmp_path: Path, stored: str
) -> None:
    path = tmp_path / "a.parquet"
    rows = 2_000
    text = "x" * 200_000
    encoded = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    numbers = pa.array(range(rows))
    if stored == "dictionary":
        pq.write_table(pa.table({"n": numbers, "v": encoded}), path)
    elif stored == "many":
        pq.write_table(pa.table({f"v{at}": encoded for at in range(8)}), path, store_schema=False)
    elif stored == "text":
        pq.write_table(pa.table({"n": numbers, "v": encoded}), path, store_schema=False)
    else:
        kind = pa.binary(200_000) if stored == "fixed" else pa.string()
        options: dict[str, object] = {"use_dictionary": True}
        if stored == "delta":
            options = {"use_dictionary": False, "column_encoding": {"v": "DELTA_BYTE_ARRAY"}}
        with pq.ParquetWriter(path, pa.schema([("v", kind)]), **options) as file:
            for _ in range(20):
                array = pa.array([text] * 100).cast(pa.binary()).cast(kind)
                file.write_table(pa.table({"v": array}))
    assert path.stat().st_size < 2 * MIB
    assert read_hostile(path) == (rows, "complete")


def test_pages_and_lists_that_are_too_large_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_pages, "BYTES_MAX", 64 * MIB)
    path = tmp_path / "a.parquet"
    text = pa.array(["x" * (40 * MIB)])
    pq.write_table(pa.table({"v": text}), path, use_dictionary=False, compression="zstd")
    assert path.stat().st_size < MIB
    with pytest.raises(
        ImportFailed, match=r"row group 0 could take \d+ MiB of memory, and at most"
    ):
        next(read_rows(path, "parquet"))
    values = pa.array(np.zeros(4_000_000))
    lists = pa.ListArray.from_arrays(pa.array([0, 4_000_000], pa.int32()), values)
    pq.write_table(pa.table({"v": lists}), path, compression="zstd")
    assert path.stat().st_size < MIB
    with pytest.raises(
        ImportFailed, match=r"row group 0 could take \d+ MiB of memory, and at most"
    ):
        next(read_rows(path, "parquet"))
    # A row of a list that Arrow may have, and Python may not.
    monkeypatch.setattr(parquet_pages, "BYTES_MAX", 512 * MIB)
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2_500_000], pa.int32()), values)
    pq.write_table(pa.table({"v": lists}), path, compression="zstd")
    found = read_rows(path, "parquet")
    assert next(found) == (1, {"v": [0.0]})
    with pytest.raises(ImportFailed, match=r"a\.parquet:2: a row of more than 16777216 bytes"):
        next(found)


@pytest.mark.parametrize(
    ("compression", "version"),
    [("none", "1.0"), ("snappy", "2.0"), ("gzip", "1.0"), ("zstd", "2.0"), ("brotli", "1.0"),
     ("lz4", "1.0")],
)  # fmt: skip
def test_usual_files_have_large_batches(tmp_path: Path, compression: str, version: str) -> None:
    path = tmp_path / "a.parquet"
    rows = 10_000
    names = [f"device-{at % 5_000}-é" for at in range(rows)]
    table = pa.table({
        "name": names, "value": np.arange(rows) / 7, "empty": pa.nulls(rows, pa.string()),
        "words": [[name, name] if at % 3 else [] for at, name in enumerate(names)],
        "part": [{"a": at} for at in range(rows)],
        "day": pa.array(range(rows), pa.int64()).cast(pa.timestamp("us")),
    })  # fmt: skip
    pq.write_table(table, path, compression=compression, data_page_version=version)
    with open(path, "rb") as file, pq.ParquetFile(path) as opened:
        assert batch_rows(file, opened, 0) == ROWS_MAX
    assert [row for _, row in read_rows(path, "parquet")] == table.to_pylist()


def test_broken_page_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"v": ["a", "b"]}), path)
    right = path.read_bytes()
    with pq.ParquetFile(path) as opened:
        begin = opened.metadata.row_group(0).column(0).dictionary_page_offset
    for wrong in (b"\xff" * 12, b"\x1c" * 12, b"\x00" * 12, b"\x19\xfc\xff\xff\xff\xff\x7f"):
        path.write_bytes(right[:begin] + wrong + right[begin + len(wrong) :])
        with pytest.raises(ImportFailed, match="cannot be read: "):
            list(read_rows(path, "parquet"))


def test_a_compressed_line_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """A text of empty lists takes some 50 times its size in memory."""
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b'{"a":[' + b"[]," * 6_000_000 + b"[]]}")
    assert path.stat().st_size < MIB
    with pytest.raises(ImportFailed, match="1: a line of more than 8388608 bytes"):
        list(read_rows(path, "json"))
