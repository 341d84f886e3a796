"""Reads events as a DataFrame, from records of the log or the files of ExperimentLog."""

from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from holdfast_lab.events import (
    BY_NAME,
    EVENTS,
    RUN_PATTERN,
    SCHEMA_VERSION,
    TOPIC_ROOT,
    ddl,
)

_NEEDED: Final = ("run", "writer", "n", "host", "at_us")
_CORRUPT: Final = "_corrupt"
_SCHEMA: Final = f"{ddl()}, `{_CORRUPT}` string"
_OPTIONS: Final = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}


def parse(records: DataFrame) -> DataFrame:
    """Returns the events among records (columns `topic`, `payload`), unchanged, as `parsed`.

    Records on their topics that are no events have a `reason`.
    """
    of_events = records.where(F.col("topic").startswith(f"{TOPIC_ROOT}/"))
    event = F.from_json(F.col("payload").cast("string"), _SCHEMA, _OPTIONS)
    # The name inside the function makes Spark parse the JSON once, however often it is used. A
    # filter on a column copies the column's whole expression to every place.
    judged = F.transform(
        F.array(event),
        lambda one: F.struct(one.alias("parsed"), _reason(one).alias("reason")),
    )
    return of_events.select("*", judged[0].alias("judged")).select("*", "judged.*").drop("judged")


def events_of_records(records: DataFrame) -> DataFrame:
    """Returns the events among records, prepared for the tables (`prepare`). Other records are left
    out."""
    return prepare(parse(records).where(F.col("reason").isNull()).select("parsed.*").drop(_CORRUPT))


def events_of_files(spark: SparkSession, *paths: Path) -> DataFrame:
    """Returns the events of files that `ExperimentLog` wrote, like `events_of_records`."""
    lines = spark.read.text([str(path) for path in paths])
    topic = F.lit(f"{TOPIC_ROOT}/of/file").alias("topic")
    return events_of_records(lines.select(topic, F.col("value").alias("payload")))


def _reason(event: Column) -> Column:
    """Returns the reason why a record is no event, or null if it is one."""
    needed = [F.when(event[name].isNull(), F.lit(name)) for name in _NEEDED]
    needed += [
        F.when((event["event"] == one.name) & event[name].isNull(), F.lit(name))
        for one in EVENTS
        for name in one.required
    ]
    lacking = F.concat_ws(", ", *needed)
    version = F.concat(F.lit("version "), event["v"], F.lit(f": only {SCHEMA_VERSION} is known"))
    return (
        F.when(event.isNull() | event[_CORRUPT].isNotNull(), F.lit("not the JSON of an event"))
        .when(event["v"].isNull(), F.lit("lacks v, the version"))
        .when(event["v"] != SCHEMA_VERSION, version)
        .when(~F.coalesce(event["event"].isin(*BY_NAME), F.lit(False)), F.lit("unknown event"))
        .when(lacking != "", F.concat(F.lit("lacks "), lacking))
        .when(~event["qos"].between(0, 2), F.lit("qos is not 0, 1 or 2"))
        .when(~event["run"].rlike(f"^{RUN_PATTERN}$"), F.lit("name of the run is malformed"))
    )


def prepare(events: DataFrame) -> DataFrame:
    """Returns each event once, with `time_us` (microseconds since 1970) and its largest error
    `error_us`."""
    once = events.dropDuplicates(["run", "writer", "n"])
    clocks = (
        once.where(F.col("event") == "clock")
        .groupBy("run", "host")
        .agg(F.max_by(F.struct("offset_us", "error_us"), F.struct("at_us", "n")).alias("clock"))
    )
    offset_us = F.coalesce("clock.offset_us", F.lit(0))
    return (
        once.drop("error_us")
        .join(F.broadcast(clocks), ["run", "host"], "left")
        .withColumn("time_us", F.col("at_us") + offset_us)
        .withColumn("error_us", F.coalesce("clock.error_us", F.lit(0)))
        .drop("clock", "offset_us")
    )
