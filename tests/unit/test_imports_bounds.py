"""The memory of an import: it does not grow with the topics, the list, the line or the columns."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.pipeline.imports import json_list
from holdfast.pipeline.imports import rows as rows_module
from holdfast.pipeline.imports.errors import BadRow, ImportFailed
from holdfast.pipeline.imports.files import FileImport
from holdfast.pipeline.imports.retained_file import RetainedFile
from holdfast.pipeline.imports.rows import read_rows
from holdfast.pipeline.imports.rule import ImportRule

MIB = 1 << 20


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes of Python objects at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


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
    monkeypatch.setattr("holdfast.pipeline.imports.files.TOPICS_MAX", 99)
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
    monkeypatch.setattr(json_list, "READ_CHARACTERS", size)
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
