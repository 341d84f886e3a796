"""Tables as a user declares them: a silver table with quarantine and state, and a gold one.

The payloads they expect are JSON such as {"n": 7}; `count` in the state is how many rows a topic
has had, and `number` the place of a row among those of its topic.
"""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from holdfast_lake import Column, Grain, Outputs, Table


def numbered(rows: DataFrame, state: DataFrame) -> Outputs:
    parsed = rows.withColumn("n", F.from_json(F.col("payload").cast("string"), "n bigint")["n"])
    good = parsed.where("n IS NOT NULL")
    order = Window.partitionBy("topic").orderBy("offset")
    placed = (
        good.withColumn("place", F.row_number().over(order))
        .join(F.broadcast(state), "topic", "left")
        .withColumn("number", F.coalesce("count", F.lit(0)) + F.col("place"))
    )
    counts = good.groupBy("topic").agg(F.count("*").alias("count"))
    return Outputs(
        rows=placed.withColumn("time", F.col("timestamp")).withColumn("date", F.to_date("time")),
        quarantine=parsed.where("n IS NULL").withColumn("reason", F.lit("no number n")),
        state=state.unionByName(counts).groupBy("topic").agg(F.sum("count").alias("count")),
        shared=(parsed,),
    )


def per_hour(rows: DataFrame) -> DataFrame:
    hour = F.date_trunc("hour", "time").alias("window_start")
    return rows.groupBy("topic", hour).agg(F.count("*").alias("rows"), F.max("n").alias("largest"))


NUMBERED = Table(
    name="numbered",
    layer="silver",
    source="records",
    description="The numbers, and which one of its topic each is.",
    columns=(
        Column("topic", "string", "topic"),
        Column("time", "timestamp", "when it was stored"),
        Column("n", "bigint", "the number"),
        Column("number", "bigint", "place among the rows of the topic, from 1"),
        Column("date", "date", "UTC day of `time`"),
    ),
    keys=("topic", "number"),
    partition_by=("date",),
    state=(
        Column("topic", "string", "topic"),
        Column("count", "bigint", "rows so far"),
    ),
    build=numbered,
)
PER_HOUR = Table(
    name="per_hour",
    layer="gold",
    source="numbered",
    description="How many numbers per topic and hour.",
    columns=(
        Column("window_start", "timestamp", "begin of the hour"),
        Column("topic", "string", "topic"),
        Column("rows", "bigint", "how many"),
        Column("largest", "bigint", "the largest number"),
    ),
    keys=("window_start", "topic"),
    grain=Grain.hours(source_time="time"),
    build=per_hour,
)
TABLES = [NUMBERED, PER_HOUR]
