"""The jobs on a real Spark standalone cluster, sent there by spark-submit."""

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql")

import pyspark
from pyspark.sql import SparkSession

from holdfast_lake.session import write_package
from tests.support import lake_tables
from tests.support.lake_site import OWN, Site
from tests.support.spark_cluster import spark_cluster, spark_environment

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),
]

RUN_S = 800


def test_same_gold_as_in_one_process(spark: SparkSession, tmp_path: Path) -> None:
    here, there = (Site(spark, tmp_path / name, "parquet") for name in ("here", "there"))
    here.publish(200)
    there.publish(200)
    assert here.run().ok
    archive, script = write_package(tmp_path / "package")
    with spark_cluster(tmp_path / "cluster") as master:
        submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
        command = [submit, "--master", master, "--py-files", str(archive), str(script), "run", *OWN]
        command += ["--from", there.journal.address, "--lake", str(there.path)]
        result = subprocess.run(
            [
                *command,
                "--tables",
                lake_tables.__file__,
                "--conf",
                "spark.sql.shuffle.partitions=3",
            ],
            env=spark_environment(),
            cwd=tmp_path,  # nothing there to import
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    there.check()
    files = [
        {path.relative_to(site.path): path.read_bytes() for path in site.gold_files()}
        for site in (here, there)
    ]
    assert files[0]
    assert files[0] == files[1]
