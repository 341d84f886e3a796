"""SIGTERM and Ctrl-C at each moment of the start of Spark: the command ends at once, with one line
and without a Java that stays."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast_lake.session import Terminated, java_of_command
from tests.support.journal_files import TIME_US, Journal, record
from tests.support.pipeline_process import PipelineProcess, words_of

java_gateway = pytest.importorskip("pyspark.java_gateway")

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
END_S = 60.0
STOPPED = "stopped while Spark was starting: nothing was changed"


def children(process: PipelineProcess) -> list[psutil.Process]:
    return psutil.Process(process.process.pid).children(recursive=True)


def has_child(process: PipelineProcess) -> bool:
    """A shell, or the Java that finds the command of the real one."""
    return bool(children(process))


def has_java(process: PipelineProcess) -> bool:
    return any(
        "org.apache.spark.deploy.SparkSubmit" in words_of(each) for each in children(process)
    )


def ports(process: PipelineProcess) -> int:
    found = 0
    for each in children(process):
        with suppress(psutil.Error):  # a shell that has ended
            found += sum(
                connection.status == psutil.CONN_LISTEN
                for connection in each.net_connections("tcp")
            )
    return found


def has_gateway(process: PipelineProcess) -> bool:
    """Python begins to make the session."""
    return ports(process) > 0


def has_session(process: PipelineProcess) -> bool:
    """Spark's own ports are open: it is nearly ready."""
    return ports(process) > 1


SLOW = """
import time
from pathlib import Path
from holdfast_lake.lake.table import Column, Table

def wait(batches):
    Path(__file__).with_suffix(".began").touch()
    time.sleep(600)
    yield from batches

def build(records):
    return records.select("topic").mapInArrow(wait, "topic string")

TABLES = [Table(name="slow", layer="silver", source="records", description="A slow one.",
                columns=(Column("topic", "string", "the topic"),), build=build)]
"""
"""A table whose step takes ten minutes."""
STOPS = [
    # Each pair of two of them; the rest is long.
    pytest.param(
        moment,
        number,
        to_all,
        marks=pytest.mark.long if (at + (number == signal.SIGINT) + to_all) % 2 else (),
    )
    for at, moment in enumerate([has_child, has_java, has_gateway, has_session])
    for number in (signal.SIGTERM, signal.SIGINT)
    for to_all in (False, True)
]


@pytest.mark.parametrize(("moment", "number", "to_all"), STOPS)
def test_a_start_that_is_stopped(
    tmp_path: Path,
    moment: Callable[[PipelineProcess], bool],
    number: signal.Signals,
    to_all: bool,
) -> None:
    journal = Journal(tmp_path / "data", partitions=1)
    journal.append(0, [record("t/a", b"1", timestamp_us=TIME_US)])
    words = ["records", "--from", journal.address, "--continuous"]
    process = PipelineProcess(tmp_path / "lake", tmp_path / "run.log", words)
    try:
        process.wait_for(lambda: moment(process), moment.__name__)
        family = children(process)
        if to_all:
            os.killpg(process.process.pid, number)
        else:
            os.kill(process.process.pid, number)
        code = process.process.wait(END_S)
        _, left = psutil.wait_procs(family, timeout=END_S)
    finally:
        process.kill9()
    assert left == []
    told = process.log_text()
    assert "Traceback" not in told
    assert "Exception ignored" not in told
    if STOPPED in told:
        start, stop = told.splitlines()
        assert (start.split(":")[0], stop) == ("starting Spark", STOPPED)
        assert code == (0 if number == signal.SIGTERM else 130)
    else:
        assert moment is has_session  # it was ready meanwhile
        assert code == 0


@pytest.mark.parametrize("how", ["--once", "--continuous"])
def test_a_second_ctrl_c_ends_the_steps_in_progress(tmp_path: Path, how: str) -> None:
    """A step that would take a minute is not waited for."""
    tables = tmp_path / "slow.py"
    tables.write_text(SLOW)
    journal = Journal(tmp_path / "data", partitions=1)
    journal.append(0, [record("t/a", b"1", timestamp_us=TIME_US)])
    words = ["records", "slow", "--from", journal.address, "--tables", str(tables), how]
    process = PipelineProcess(tmp_path / "lake", tmp_path / "run.log", words)
    try:
        process.wait_for((tmp_path / "slow.began").exists, "the step")
        family = children(process)
        os.kill(process.process.pid, signal.SIGINT)
        process.wait_for(lambda: "stopping after" in process.log_text(), "the first signal")
        os.kill(process.process.pid, signal.SIGINT)
        code = process.process.wait(END_S)
        _, left = psutil.wait_procs(family, timeout=END_S)
    finally:
        process.kill9()
    assert left == []
    assert "Traceback" not in process.log_text()
    assert code == 130


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_stop_between_fork_and_exec(
    number: signal.Signals, error: type[BaseException], request: pytest.FixtureRequest
) -> None:
    """Popen is interrupted then, and would forget the process that it has started."""
    # As in a new process: a session of this one, if there was any, has set a handler of its own.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, former))
    parent = os.getpid()

    def interrupt() -> None:
        os.kill(parent, number)
        time.sleep(0.5)  # Popen waits until this process executes its program

    handler = signal.getsignal(number)
    before = set(psutil.Process().children())
    with pytest.raises(error), java_of_command():
        java_gateway.Popen(["sleep", "100"], preexec_fn=interrupt)
    assert set(psutil.Process().children()) <= before
    assert signal.getsignal(number) is handler


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_stop_whose_cleaning_up_fails(
    number: signal.Signals, error: type[BaseException], request: pytest.FixtureRequest
) -> None:
    """Fails as pyspark's does: Java writes to the directory that it removes then."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, former))
    before = set(psutil.Process().children())

    def start() -> None:
        """Is stopped, and fails at what it does then."""
        java_gateway.Popen(["sleep", "100"], preexec_fn=lambda: None)
        try:
            signal.raise_signal(number)
        finally:
            raise OSError("Directory not empty")

    with pytest.raises(error), java_of_command() as signals, signals.not_lost():
        start()
    assert set(psutil.Process().children()) <= before
