"""Tasks of a fold hold so much in memory as is said, whatever is in the files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast_lake.lake import fold_tasks
from holdfast_lake.lake.fold_tasks import FoldSpec, Unit, _Held, _read, fold_units

SCHEMA = pa.schema([("stream", pa.string()), ("payload", pa.binary())])
STATES = pa.schema([("stream", pa.string()), ("state", pa.string())])


class Echo:
    """A StreamFold that notes what it is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    columns = ("stream", "payload")

    def spread(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Any]:
        return rows, np.zeros(len(rows), np.int64)

    def spread_states(self, states: pa.RecordBatch) -> Any:
        return np.zeros(len(states), np.int64)

    def fold(self, rows: pa.Table, states: pa.Table, oldest_us: int | None) -> Iterator[Any]:
        self.given = rows.to_pylist()
        yield from ()


def spec_of(fold: Any, folder: Path) -> FoldSpec:
    return FoldSpec(
        fold=fold, rows_schema=SCHEMA, state_schema=STATES, oldest_us=None, keys=(), outputs={},
        exchange=str(folder), file_rows=1000,
    )  # fmt: skip


@pytest.fixture
def units(tmp_path: Path) -> list[Unit]:
    """Files of small row groups."""
    found = []
    for number in range(3):
        rows = [{"stream": str(number), "payload": bytes([at]) * 100} for at in range(50)]
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path, row_group_size=7)
        found.append(Unit(str(path), False, 0, 1))
    return found


def test_a_batch_is_no_more_than_a_row_group(units: list[Unit], tmp_path: Path) -> None:
    """The writer ends a group at so many bytes, so a batch of several has no bound."""
    spec = spec_of(Echo(), tmp_path)
    lengths = [len(batch) for unit in units for batch in _read(spec, unit)]
    assert lengths == [7, 7, 7, 7, 7, 7, 7, 1] * 3


@pytest.mark.parametrize("held_bytes", [0, 2000, 1 << 20])
def test_small_steps_with_much_in_them_go_by_a_file(
    units: list[Unit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_bytes: int
) -> None:
    monkeypatch.setattr(fold_tasks, "HELD_BYTES", held_bytes)
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    fold = Echo()
    assert fold_units(spec_of(fold, exchange), units, "00000-7") == []
    assert fold.given == [
        {"stream": str(number), "payload": bytes([at]) * 100}
        for number in range(3)
        for at in range(50)
    ]
    # The file has no name any more; the memory map goes with its batches.
    assert list(exchange.iterdir()) == []


def test_what_is_held_in_memory_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold_tasks, "HELD_BYTES", 1000)
    held = _Held(str(tmp_path), "held")
    for number in range(100):
        held.add(pa.record_batch({"n": [number] * 10}))
        assert sum(batch.nbytes for batch in held._batches) <= 1000
    held.close()
    assert [batch["n"][0].as_py() for batch in held.batches()] == list(range(100))
