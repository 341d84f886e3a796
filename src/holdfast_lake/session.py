"""Makes the Spark session of a run: that of spark-submit, or a local one with a usable Java."""

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from pyspark import SparkContext, java_gateway
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

import holdfast
from holdfast_lake.class_archive import use_archive
from holdfast_lake.java import JavaError, java_home

ARROW_ROWS: Final = 32_768
"""The most rows in one Arrow batch between Spark and Python."""
ARROW_CHECKS: Final = {
    "ARROW_ENABLE_UNSAFE_MEMORY_ACCESS": "true",
    "ARROW_ENABLE_NULL_CHECK_FOR_GET": "false",
}
"""Variables with which Java reads Arrow data without checking each index. Spark's own code reads
it, and this saves a fifth of Java's processor time."""


def spark_session(app_name: str, master: str = "local[*]", **conf: Any) -> SparkSession:
    """Returns the session of this process, and makes it if there is none.

    `conf` are Spark settings, such as `**{"spark.sql.shuffle.partitions": 8}`. They override the
    settings chosen here. The function sets JAVA_HOME (unless the current one is usable),
    PYSPARK_PYTHON and PYTHONPATH of this process, because Spark reads them there. Raises JavaError.
    """
    _check_jars(str(conf.get("spark.jars", "")))
    home = java_home()
    os.environ["JAVA_HOME"] = str(home)
    use_archive(home)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    _let_workers_import()
    for name, value in ARROW_CHECKS.items():
        os.environ.setdefault(name, value)
    settings: dict[str, Any] = {
        # Over TCP each Python task takes 40 ms more.
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": ARROW_ROWS,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings["spark.driver.host"] = "127.0.0.1"
        settings["spark.driver.bindAddress"] = "127.0.0.1"
        settings["spark.sql.shuffle.partitions"] = os.cpu_count() or 1
        # Without Hadoop's native library, the default manager starts a process per checkpoint file
        # to set its mode. That takes 60 ms more per trigger.
        settings["spark.sql.streaming.checkpointFileManagerClass"] = (
            "org.apache.spark.sql.execution.streaming.checkpointing."
            "FileSystemBasedCheckpointFileManager"
        )
    settings.update(conf)
    builder = SparkSession.builder.appName(app_name).master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    if master.startswith("local"):
        _write_no_checksum_files(session)
    return session


def _check_jars(jars: str) -> None:
    """Checks the files of `spark.jars` on this machine, before Java starts: Spark goes on without a
    file that is missing, and fails at the first class of it. Raises JavaError."""
    for jar in filter(None, map(str.strip, jars.split(","))):
        path = jar.removeprefix("file://").removeprefix("file:")
        is_here = ":" not in path and not set("*?[{") & set(path)
        if is_here and not os.access(path, os.R_OK):
            raise JavaError(f"spark.jars: {path} is not a file that can be read")


def _write_no_checksum_files(session: SparkSession) -> None:
    """Lets Hadoop write local files without a checksum file beside each.

    Without its native library Hadoop starts a process per new file to set the mode. A trigger of a
    stream writes two files to its checkpoint, and two checksum files.
    """
    context = session.sparkContext
    java: Any = context._jvm
    files = java.org.apache.hadoop.fs.FileSystem.getLocal(context._jsc.hadoopConfiguration())
    files.setWriteChecksum(False)


def _let_workers_import() -> None:
    """Adds the directory of this package to PYTHONPATH.

    Spark starts its Python processes without the state of this one. They need the directory if the
    package is not installed.
    """
    root = str(Path(holdfast.__file__).parent.parent)
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if root not in entries:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *entries])


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


SMALL_SETTINGS: Final[dict[str, Any]] = {
    # Java ends before it would have compiled anything to its end.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.codegen.wholeStage": "false",
    # Expressions are interpreted: to compile them costs an eighth of a run of few rows.
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": 1,
}
"""The settings of a local run with little to do. They halve its processor time."""
SMALL_ROWS: Final = 100_000
"""The most rows of a run with little to do."""


def submitted() -> bool:
    """Returns whether spark-submit has started this process. It has then chosen the master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def lake_session(
    master: str | None = None, *, backlog: int | None = None, **conf: Any
) -> SparkSession:
    """Returns the Spark session of a run.

    `backlog` are the rows that the run has to read, if that is known. `conf` overrides the settings
    chosen here. Raises JavaError.
    """
    is_small = backlog is not None and backlog <= SMALL_ROWS and (master or LOCAL).startswith(LOCAL)
    settings = {**SETTINGS, **(SMALL_SETTINGS if is_small else {}), **conf}
    if not submitted():
        return spark_session(APP_NAME, master or LOCAL, **settings)
    builder = SparkSession.builder.appName(APP_NAME)
    settings["spark.sql.session.timeZone"] = "UTC"
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


_STACK: Final = re.compile(r"\s*(at |\.\.\. \d+ more)")
LOG_BYTES_MAX: Final = 1 << 20
"""The most bytes of Spark's output that a user gets."""


class SparkLog:
    """A file that gets the output of Spark's processes. A command then prints its own lines only.

    Java warns at each start, and its Python processes print a stack when they are stopped. So does
    py4j, by Python's root logger, when a command is interrupted while it waits for Java, or when
    Java has ended.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it has no name: kill -9 leaves nothing

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Lets the processes that start in this context write to the file. Raises JavaError if
        Java ends at its start."""
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        try:
            yield
        except PySparkRuntimeError as error:
            lines = self._text().decode(errors="replace").splitlines()
            told = [each for each in lines if each.strip() and not _STACK.match(each)][-1:]
            raise JavaError(
                f"Java ended at its start: {' '.join(told) or error}. All that it said is in "
                f"{self.keep()}"
            ) from None
        finally:
            os.dup2(saved, 2)
            os.close(saved)

    @contextmanager
    def catching_py4j(self) -> Iterator[None]:
        """Takes the records of py4j in this context. Its own loggers repeat what is raised."""

        def is_of_others(record: logging.LogRecord) -> bool:
            """Filters the records of the root logger."""
            is_py4j = Path(record.pathname).parent.name == "py4j"
            if is_py4j:
                text = logging.Formatter().format(record)
                os.write(self._file.fileno(), f"{text}\n".encode(errors="replace"))
            return not is_py4j

        root, own = logging.getLogger(), logging.getLogger("py4j")
        root.addFilter(is_of_others)
        own.propagate, before = False, own.propagate
        try:
            yield
        finally:
            root.removeFilter(is_of_others)
            own.propagate = before

    def keep(self) -> Path:
        """Copies the output to a file for the user, and returns its path."""
        descriptor, name = tempfile.mkstemp(prefix="holdfast-spark-", suffix=".log")
        with os.fdopen(descriptor, "wb") as file:
            file.write(self._text())
        return Path(name)

    def close(self) -> None:
        """Removes the output."""
        self._file.close()

    def _text(self) -> bytes:
        return os.pread(self._file.fileno(), LOG_BYTES_MAX, 0)


class Terminated(BaseException):
    """SIGTERM has come. It is no Exception, because no work may go on after it."""

    number: Final = signal.SIGTERM


@contextmanager
def java_of_command() -> Iterator["StopSignals"]:
    """Lets SIGTERM and Ctrl-C end a command with its Java. Raises Terminated.

    Java ignores both signals. A service sends SIGTERM to all of its processes, and Java must not
    end before the steps in progress. It ends by itself when this process has ended. A Java that was
    interrupted while it started can wait for itself then, so it is killed here. A signal between
    its fork and the return of Popen waits, or nobody would know of it.
    """
    started: list[subprocess.Popen[bytes]] = []
    signals = StopSignals()

    def start(*args: Any, preexec_fn: Any, **more: Any) -> subprocess.Popen[bytes]:
        """Starts Java like pyspark, and ignores SIGTERM in it as well."""

        def ignore_signals() -> None:
            """Runs between fork and exec."""
            preexec_fn()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

        popen: Any = subprocess.Popen
        with signals.waiting():
            started.append(popen(*args, preexec_fn=ignore_signals, **more))
        return started[-1]

    gateway: Any = java_gateway

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = [(number, signal.signal(number, signals.stop)) for number in numbers]
    original, gateway.Popen = gateway.Popen, start
    try:
        yield signals
    except (Terminated, KeyboardInterrupt):
        for process in started:
            process.kill()
            process.wait()
        raise
    finally:
        gateway.Popen = original
        for number, handler in before:
            signal.signal(number, handler)


class StopSignals:
    """The SIGTERM and SIGINT that a command has received."""

    def __init__(self) -> None:
        self._came: BaseException | None = None
        self._are_waiting = False

    def stop(self, number: int, _frame: FrameType | None) -> None:
        """Interrupts the command: the handler of the signals."""
        self._came = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if not self._are_waiting:
            raise self._came

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Lets a signal wait for the end of this context."""
        self._are_waiting = True
        try:
            yield
        finally:
            self._are_waiting = False
        if self._came is not None:
            raise self._came

    @contextmanager
    def not_lost(self) -> Iterator[None]:
        """Raises a signal that has come in this context in place of the error that it has caused.

        Counter-example: pyspark removes the directory of the address of Java when it is
        interrupted. Java writes the address to it at the same time, so that this fails.
        """
        try:
            yield
        except Exception:
            if self._came is not None:
                raise self._came from None
            raise


def kill_java() -> None:
    """Kills the Java that this process has started. The steps in progress fail, and change
    nothing."""
    process = getattr(SparkContext._gateway, "proc", None)
    if process is not None:
        process.kill()


def end_session(session: SparkSession) -> None:
    """Stops the session, even if its Java process has ended already."""
    with suppress(Exception):
        session.stop()


ARCHIVE: Final = "holdfast-pipeline.zip"
SCRIPT: Final = "holdfast-pipeline.py"
PACKAGES: Final = ("holdfast", "holdfast_lab", "holdfast_lake", "pyspark_holdfast")
NEEDED: Final = (
    "pyspark",
    "pyarrow",
    "pandas<3",
    "numpy",
    "msgspec",
    "zlib-ng",
    "deltalake",
    "obstore",
)
"""The packages that the driver or the executors import beside the archive."""

_SCRIPT_TEXT: Final = '''\
"""The driver's program for spark-submit; give it the words after `holdfast pipeline`."""

import sys

from holdfast.cli.main import main

sys.exit(main(["pipeline", *sys.argv[1:]]))
'''
_TIME: Final = (1980, 1, 1, 0, 0, 0)
"""The date of every file in the archive. It is fixed, so that equal sources give equal archives."""


def write_package(directory: Path) -> tuple[Path, Path]:
    """Writes the archive and the script below `directory`, and returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    archive = directory / ARCHIVE
    root = Path(holdfast.__file__).parent.parent
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for package in PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                member = zipfile.ZipInfo(str(path.relative_to(root)), _TIME)
                member.compress_type = zipfile.ZIP_DEFLATED
                file.writestr(member, path.read_bytes())
    script = directory / SCRIPT
    script.write_text(_SCRIPT_TEXT)
    return archive, script
