"""One Spark session for all tests of this directory, because each costs seconds; and brokers that
always end."""

from collections.abc import Iterator

import pytest

pytest.importorskip("pyspark.sql")

from pyspark.sql import SparkSession

from holdfast_lake import spark_session
from holdfast_lake.session import SMALL_SETTINGS
from tests.e2e.conftest import start_holdfast as start_holdfast
from tests.support.iceberg_tables import iceberg_settings

SETTINGS = SMALL_SETTINGS | {"spark.log.level": "ERROR"}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = spark_session(
        "holdfast-tests",
        "local[2]",
        **SETTINGS,
        **iceberg_settings(tmp_path_factory.mktemp("jars")),
        **{"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))},
    )
    yield session
    session.stop()
