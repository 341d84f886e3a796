"""The Spark session of a run: the one of spark-submit, or a local one."""

import os
from contextlib import suppress
from typing import Any, Final

from pyspark.sql import SparkSession

from holdfast.pipeline.session import spark_session

APP_NAME: Final = "holdfast-pipeline"
"""The name of the run in Spark's user interface."""
LOCAL: Final = "local[*]"

SETTINGS: Final[dict[str, Any]] = {
    # Bad values become null or go to quarantine. Under ANSI rules one bad value would end the run.
    "spark.sql.ansi.enabled": "false",
    # The driver lists many small files itself, because a Spark job for it costs more.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": 10_000,
    # The run reports a failure in one line. `--conf spark.log.level=WARN` shows more.
    "spark.log.level": "FATAL",
    "spark.scheduler.mode": "FAIR",
}


def submitted() -> bool:
    """Return whether spark-submit has started this process. It has then chosen the master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def lake_session(master: str | None = None, **conf: Any) -> SparkSession:
    """Return the Spark session of a run. `conf` overrides the settings chosen here. Raises
    JavaError."""
    settings = {**SETTINGS, **conf}
    if not submitted():
        return spark_session(APP_NAME, master or LOCAL, **settings)
    builder = SparkSession.builder.appName(APP_NAME)
    settings["spark.sql.session.timeZone"] = "UTC"
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def end_session(session: SparkSession) -> None:
    """Stop the session, even if its Java process has ended already."""
    with suppress(Exception):
        session.stop()
