"""The Spark session of a run: that of spark-submit, or one of our own."""

import os
from contextlib import suppress
from typing import Any, Final

from pyspark.sql import SparkSession

from holdfast.pipeline.session import spark_session

APP_NAME: Final = "holdfast-pipeline"
LOCAL: Final = "local[*]"

SETTINGS: Final[dict[str, Any]] = {
    # Bad values become null or quarantine; under ANSI rules one of them would end the job.
    "spark.sql.ansi.enabled": "false",
    # Many small files are listed by the driver itself: a job for it costs more.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": 10_000,
    # What fails is told in one line; `--conf spark.log.level=WARN` shows more.
    "spark.log.level": "FATAL",
    "spark.scheduler.mode": "FAIR",
}


def submitted() -> bool:
    """Whether spark-submit has started this process: it has decided on the master then."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def lake_session(master: str | None = None, **conf: Any) -> SparkSession:
    """`conf` wins over what is chosen here. Raises JavaError."""
    settings = {**SETTINGS, **conf}
    if not submitted():
        return spark_session(APP_NAME, master or LOCAL, **settings)
    builder = SparkSession.builder.appName(APP_NAME)
    settings["spark.sql.session.timeZone"] = "UTC"
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def end_session(session: SparkSession) -> None:
    """Also if its Java process has gone already."""
    with suppress(Exception):
        session.stop()
