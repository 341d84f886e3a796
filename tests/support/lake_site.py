"""A journal in real files and a lake of its records, for the tests of the pipeline's jobs."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from pyspark.sql import SparkSession

from holdfast_lake import Lake
from holdfast_lake.lake.runner import Runner, RunReport
from tests.support.iceberg_tables import iceberg_rows
from tests.support.journal_files import TIME_US, Journal, record
from tests.support.lake_tables import TABLES

HOUR_US = 3_600_000_000
OWN = ("records", "numbered", "per_hour")


class Crash(Exception):
    """Stands for a process that ends."""


class Site:
    """A journal, and a lake of its records; knows what has to be in the tables."""

    def __init__(self, spark: SparkSession, folder: Path, store: str) -> None:
        self.spark = spark
        self.store = store
        self.journal = Journal(folder / "data", partitions=3, segment_bytes=20_000)
        self.path = folder / "lake"
        self.sent: list[tuple[str, int, int]] = []
        """topic, hour, number; those that are no JSON have number -1"""

    def publish(self, count: int) -> None:
        for _ in range(count):
            n = len(self.sent)
            hour = n // 20 % 5
            self.sent.append((f"t/{n % 4}", hour, -1 if n % 10 == 3 else n))
            topic, _, number = self.sent[-1]
            payload = b"{oops" if number < 0 else json.dumps({"n": n}).encode()
            time_us = TIME_US // HOUR_US * HOUR_US + hour * HOUR_US + n
            self.journal.append(n % 4 % 3, [record(topic, payload, timestamp_us=time_us)])

    def lake(self, tables: Any = TABLES) -> Lake:
        return Lake(self.path, spark=self.spark, store=self.store, tables=tables)

    def run(self, what: Any = OWN, crash_at: str = "", tables: Any = TABLES) -> RunReport:
        lake = self.lake(tables)
        engine = replace(lake.engine(), reached=lambda point: _crash(point, crash_at))
        source = {"servers": self.journal.address}
        lake.runner(what, source=source)
        return Runner(engine, lake.catalog, lake.catalog.chosen(list(what)), source).run_once()

    def rows(self, table: str) -> list[Any]:
        """As someone sees them who knows only the files: no Spark, no commits."""
        if self.store == "delta":
            import deltalake

            delta = deltalake.DeltaTable(self.path / table)
            found = delta.to_pyarrow_table()
            for name in found.column_names:  # a reader skips no file that has a row
                value = next((each for each in found[name].to_pylist() if each is not None), None)
                if isinstance(value, str | int | float | bool):
                    chosen = delta.to_pyarrow_table(filters=[(name, "=", value)])
                    assert chosen.num_rows == found[name].to_pylist().count(value), name
        elif self.store == "iceberg":
            found = iceberg_rows(self.path / table)
        else:
            found = ds.dataset(self.path / table, partitioning="hive").to_table()
        return list(found.to_pylist())

    def gold_files(self) -> list[Path]:
        return sorted((self.path / "per_hour").rglob("*.parquet"))

    def check(self) -> None:
        good = [each for each in self.sent if each[2] >= 0]
        assert len(self.rows("records")) == len(self.sent)
        numbered = [(row["topic"], row["n"]) for row in self.rows("numbered")]
        assert sorted(numbered) == sorted((topic, n) for topic, _, n in good)
        for topic in {topic for topic, _, _ in good}:
            places = [row["number"] for row in self.rows("numbered") if row["topic"] == topic]
            assert sorted(places) == list(range(1, len(places) + 1))
        found = {(row["topic"], row["hour"]): row["rows"] for row in self.rows("per_hour")}
        base = TIME_US // HOUR_US % 24
        assert found == Counter((topic, base + hour) for topic, hour, _ in good)
        bad = len(self.sent) - len(good)
        assert self.lake().table("quarantine").count() == bad
        assert len(self.rows("quarantine")) == bad


def _crash(point: str, crash_at: str) -> None:
    if point == crash_at:
        raise Crash(point)
