"""The messages of Holdfast's log as a streaming table: each offset once, in runs of any size."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()
source = spark.conf.get("spark.holdfast.source", "servers=127.0.0.1:18083") or ""
name, _, value = source.partition("=")


@dp.table(comment="Every message of the log, once.")
def messages() -> DataFrame:
    return (
        spark.readStream.format("holdfast")
        .option(name, value)
        .option("startingOffsets", "earliest")
        .load()
    )
