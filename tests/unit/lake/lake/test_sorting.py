"""Tables in the order of their keys."""

from datetime import UTC, date, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from holdfast.client.log.lake.parquet import in_order  # noqa: E402

TIME = pa.timestamp("us", tz="UTC")
TYPES = {"name": pa.string(), "at": TIME, "day": pa.date32(), "n": pa.int64(), "s": pa.int32()}
ROWS = st.lists(
    st.tuples(
        st.none() | st.text(max_size=3),
        st.none() | st.datetimes(timezones=st.just(UTC)),
        st.none() | st.dates(),
        st.none() | st.integers(1 - 2**63, 2**63 - 1),
        st.none() | st.integers(-3, 3),
    )
)


def key(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Nulls first, texts by their bytes."""
    return tuple((value is not None, value.encode() if isinstance(value, str) else value)
                 if value is not None else (False,) for value in row)  # fmt: skip


@settings(deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=3), st.booleans())
def test_rows_are_sorted(parts: list[list[tuple[Any, ...]]], encoded: bool) -> None:
    """Of several chunks, with a dictionary each."""
    batches = []
    for rows in parts:
        columns = zip(*rows, strict=True) if rows else [[]] * len(TYPES)
        arrays = [pa.array(each, kind) for each, kind in zip(columns, TYPES.values(), strict=True)]
        if encoded:
            arrays[0] = arrays[0].dictionary_encode()
        batches.append(pa.RecordBatch.from_arrays(arrays, names=list(TYPES)))
    found = in_order(pa.Table.from_batches(batches), list(TYPES))
    rows = [tuple(row.values()) for row in found.to_pylist()]
    assert rows == sorted((row for part in parts for row in part), key=key)


def test_what_is_sorted_stays_as_it_is() -> None:
    times = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 2)]
    days = [date(2026, 1, 1)] * 3
    table = pa.table({"at": pa.array(times, TIME), "day": days, "n": [3, 1, 2]})
    assert in_order(table, ["day", "at", "n"]).to_pylist() == table.to_pylist()
