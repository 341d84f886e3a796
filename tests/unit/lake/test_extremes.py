"""One message with an extreme time or number changes no row of another one, and stops no table."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

import pyarrow as pa

from holdfast.client.log.lake.commits import ROWS
from holdfast_lake.tables import TABLES
from holdfast_lake.tables.readings import Folder
from tests.support.fold_log import TIME_US, Log, batch

EXTREMES: list[Any] = [
    "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:60-14:00",
    "0001-01-01T00:00:00+14:00", "00010101T000000Z", "99991231235959", "991231235959W", "-1", "",
    "1e308", "inf", "0", -1, 0, -(2**63), 2**63 - 1, 2**63, 10**17 - 1, 10**20, 10**400,
    99_999_999_999, 20_991_231_235_959, 1e300, -1e300, 5e-324, 1e17, float("nan"), float("inf"),
    True, None, [], {}, {"$date": 10**18}, {"$date": "9999-12-31T23:59:59Z"},
]  # fmt: skip
FIELDS = ("ts", "sent", "seq", "msg_id", "v")
FOLDS = {each.name: each.build for each in TABLES if hasattr(each.build, "spread")}


def _tables(log: Log, *, together: bool) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table about the device `other`, as one step makes them."""
    pieces = Folder(log.rules, together=together).fold(iter([batch(log.rows)]), {})
    rows = pa.Table.from_batches([each for output, each in pieces if output == ROWS])
    plain = [pa.field(each.name, getattr(each.type, "value_type", each.type))
             for each in rows.schema]  # fmt: skip
    rows = rows.cast(pa.schema(plain))
    found = {"readings": rows.to_pylist()}
    (readings,) = rows.combine_chunks().to_batches()
    for name, fold in FOLDS.items():
        if set(fold.columns) <= set(readings.schema.names):
            kept, _ = fold.spread(readings.select(list(fold.columns)))
            made = fold.fold(pa.Table.from_batches([kept]), pa.table({}), None)
            found[name] = [row for _, each in made for row in each.to_pylist()]
    return {name: [row for row in rows if row["device"] == "other"]
            for name, rows in found.items()}  # fmt: skip


def _payloads(field: str) -> Iterator[bytes]:
    for value in EXTREMES:
        document = {"ts": TIME_US / 1e6, "seq": 7, "v": 1.5} | {field: value}
        yield json.dumps(document).encode()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("field", FIELDS)
def test_no_message_stops_or_changes_another(field: str, together: bool) -> None:
    alone, beside = Log(), Log()
    for at, payload in enumerate(_payloads(field)):
        ordinary = b'{"ts":%d,"seq":%d,"v":%d}' % (TIME_US // 1_000_000 + at, at, at)
        for log in (alone, beside):
            log.add("other", ordinary, at_s=at, offset=at)
        beside.add("device", payload, at_s=at, offset=10_000 + at)
    for log in (alone, beside):
        log.rows.sort(key=lambda row: str(row[0]))
    found = _tables(beside, together=together)
    assert len(found) >= 7
    assert all(found[name] for name in ("readings", "device_minutes", "latency", "availability"))
    assert found == _tables(alone, together=together)
