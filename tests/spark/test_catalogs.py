"""Tables of a lake in the catalog of a Spark session, and the history of their columns."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from holdfast.client.log.lake.commits import HISTORY, history
from holdfast_lake import Column, Lake
from tests.support.lake_site import Crash, Site
from tests.support.lake_tables import NUMBERED, PER_HOUR

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]


def test_a_spark_catalog_and_the_history_of_columns(spark: SparkSession, tmp_path: Path) -> None:
    site = Site(spark, tmp_path, "parquet")
    site.publish(40)
    assert site.run().ok
    assert [name for name, _ in site.lake().register("plant")] == [
        "records",
        "numbered",
        "per_hour",
    ]
    assert spark.table("plant.numbered").count() == 36
    comments = {
        row["col_name"]: row["comment"] for row in spark.sql("DESC plant.numbered").collect()
    }
    assert comments["n"] == "the number"
    site.publish(20)
    assert site.run().ok
    spark.sql("REFRESH TABLE plant.numbered")
    assert spark.table("plant.numbered").count() == 54
    assert spark.sql("SELECT DISTINCT date, hour FROM plant.per_hour").count() == 3

    made = [each.kind for each in history(site.path, "per_hour")]
    assert made == ["made"]
    (site.path / HISTORY / "per_hour.jsonl").unlink()  # a lake of an older version
    more = Column("smallest", "bigint", "the smallest number", "pieces")
    wider = [NUMBERED, _with(PER_HOUR, more)]
    site.publish(20)
    report = site.run(crash_at="per_hour recorded", tables=wider)
    assert isinstance(report.errors["per_hour"], Crash)
    assert site.run(tables=wider).ok
    told = history(site.path, "per_hour")
    assert [(each.kind, each.change) for each in told] == [
        ("made", ""),
        ("columns", "added smallest bigint"),
    ]
    site.lake(wider).register("plant", ["per_hour"])
    properties = spark.sql("SHOW TBLPROPERTIES plant.per_hour").collect()
    assert ("holdfast.unit.smallest", "pieces") in [
        (row["key"], row["value"]) for row in properties
    ]
    assert Lake(site.path, spark=spark, tables=[NUMBERED, PER_HOUR]).rebuild("numbered").ok
    last = history(site.path, "per_hour")[-1]
    assert (last.kind, last.change) == ("built again", "removed smallest")
    assert json.loads((site.path / HISTORY / "per_hour.jsonl").read_text().splitlines()[-1])


def _with(table: Any, column: Column) -> Any:
    def build(rows: Any) -> Any:
        return table.build(rows).withColumn("smallest", F.lit(0))

    return replace(table, columns=(*table.columns, column), build=build)
