"""A stream from readings to alerts: reads a broker's log, publishes to the same or another broker,
each alert exactly once.

Expects numbers on `plant/<machine>/temperature`, and publishes those above a limit as JSON to
`alerts/<machine>`::

    python examples/alerts.py admin=127.0.0.1:18083 mqtt=127.0.0.1:1883 checkpoint=./alerts limit=90
"""

import sys
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from holdfast_lake import spark_session


def start_alerts(
    spark: SparkSession, admin: str, mqtt: str, checkpoint: str, limit: float, **trigger: Any
) -> Any:
    """The running query. `trigger` is Spark's, for example `availableNow=True`."""
    readings = spark.readStream.format("holdfast").option("servers", admin)
    reading = F.expr("try_cast(CAST(payload AS string) AS double)")
    alerts = (
        readings.option("startingOffsets", "earliest")
        .load()
        .where("topic LIKE 'plant/%/temperature'")
        .withColumn("reading", reading)
        .where(F.col("reading") > limit)
        .select(
            F.expr("concat('alerts/', split_part(topic, '/', 2))").alias("topic"),
            F.to_json(F.struct("reading", "timestamp")).alias("payload"),
            # Where each alert comes from: so the broker knows it again after any failure.
            "partition",
            "offset",
        )
    )
    writer = alerts.writeStream.format("holdfast").options(mqttServers=mqtt, exactlyOnce="require")
    return writer.option("checkpointLocation", checkpoint).trigger(**trigger).start()


def main(arguments: list[str]) -> int:
    given = {name: value for name, _, value in (each.partition("=") for each in arguments)}
    try:
        limit = float(given.pop("limit", "90"))
    except ValueError as error:
        print(f"alerts: limit: {error}", file=sys.stderr)
        return 2
    if set(given) != {"admin", "mqtt", "checkpoint"}:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        spark = spark_session("alerts")
        try:
            start_alerts(spark, **given, limit=limit, processingTime="1 second").awaitTermination()
        finally:
            spark.stop()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
