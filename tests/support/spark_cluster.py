"""A Spark standalone cluster on this machine: one master and some workers, from the installed
package."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from holdfast_lake.java import java_home
from tests.support.ports import free_port

START_S = 180
STOP_S = 10
WORKER_MEMORY = "1g"


@contextmanager
def spark_cluster(
    folder: Path, workers: int = 2, cores: int = 1, paths: Sequence[Path] = ()
) -> Iterator[str]:
    """Its URL, `spark://127.0.0.1:port`. `paths`: what Python on the workers can import beside what
    is installed. Logs are below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    port, ui_port = free_port(), free_port()
    url = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        master = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(ui_port)]
        stack.enter_context(_running("master.Master", master, folder / "master", paths))
        _wait_until_ready(ui_port, 0)
        for number in range(workers):
            worker = ["--host", "127.0.0.1", "--cores", str(cores), "--memory", WORKER_MEMORY]
            worker += ["--webui-port", str(free_port()), "--work-dir", str(folder / f"w{number}")]
            name = folder / f"worker{number}"
            stack.enter_context(_running("worker.Worker", [*worker, url], name, paths))
        _wait_until_ready(ui_port, workers)
        yield url


def spark_environment(paths: Sequence[Path] = ()) -> dict[str, str]:
    """For Spark's own programs (spark-class, spark-submit)."""
    return {
        **os.environ,
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "JAVA_HOME": str(java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }


@contextmanager
def _running(name: str, words: list[str], log: Path, paths: Sequence[Path]) -> Iterator[None]:
    environment = spark_environment(paths)
    program = Path(environment["SPARK_HOME"]) / "bin" / "spark-class"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(program), f"org.apache.spark.deploy.{name}", *words],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.terminate()  # a worker ends its executors
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)


def _wait_until_ready(ui_port: int, workers: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ui_port}/json/", timeout=5) as answer:
                if answer.read().decode().count('"state" : "ALIVE"') >= workers:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise TimeoutError(f"no Spark master with {workers} workers within {START_S} s")
