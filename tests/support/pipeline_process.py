"""`holdfast pipeline run` as a process under test, and the files that it leaves."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

import holdfast
from holdfast.client.log.lake.commits import CommitLog
from holdfast.client.log.lake.objects import LakePath

WAIT_S = 300.0
POLL_S = 0.1
STOP_S = 60.0
SMALL_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class PipelineProcess:
    """In a process group of its own: its Java and its Python workers end with it."""

    def __init__(
        self,
        lake: LakePath,
        log: Path,
        words: Iterable[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.lake = lake
        self.log = log
        conf = ["--conf", f"spark.driver.extraJavaOptions={SMALL_JAVA}"]
        conf += ["--conf", "spark.sql.shuffle.partitions=2"]
        command = [sys.executable, "-m", "holdfast.cli.main", "pipeline", "run", *words]
        paths = [str(Path(holdfast.__file__).parents[1]), str(Path(__file__).parents[2])]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--lake", str(lake), *conf],
                env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended: {self.log_text()}"
            assert time.monotonic() < deadline, f"not in time: {what}\n{self.log_text()}"
            time.sleep(POLL_S)

    def wait_for_rows(self, table: str, rows: int) -> None:
        self.wait_for(lambda: rows_total(self.lake, table) >= rows, f"{rows} rows of {table}")

    def kill9(self) -> None:
        """All of it at the same moment."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(STOP_S)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


def rows_total(lake: LakePath, table: str) -> int:
    last = CommitLog(lake, table).last()
    return 0 if last is None else last.rows_total


def java_processes(class_name: str, folder: str = "") -> list[psutil.Process]:
    """Of Spark, started by this process: `master.Master`, `worker.Worker`,
    `CoarseGrainedExecutorBackend`; those with something of `folder` among their arguments."""
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if any(word.endswith(class_name) for word in words_of(each))
        and any(word.startswith(folder) for word in words_of(each))
    ]


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def kill9_tree(process: psutil.Process) -> None:
    """The process and all that it has started."""
    for each in [*process.children(recursive=True), process]:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            pass


def gold_files(lake: Path, tables: Iterable[str]) -> dict[str, bytes]:
    """Every file of these tables, by its path."""
    return {
        str(path.relative_to(lake)): path.read_bytes()
        for table in tables
        for path in sorted((lake / table).rglob("*.parquet"))
    }
