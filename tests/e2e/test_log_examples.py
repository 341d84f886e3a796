"""The examples that read the log: run as processes, killed with -9 in the middle, and run again."""

import contextlib
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.client.log import LogClient
from holdfast.testing import Broker
from tests.e2e.brokers import Holdfast
from tests.e2e.wire import Wire
from tests.support.postgresql import missing, running_server

EXAMPLES = Path(__file__).parents[2] / "examples"
MESSAGES = 3000
WAIT_S = 60.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Holdfast]:
    broker = Holdfast(tmp_path_factory.mktemp("broker"))
    broker.start()
    publish(broker, range(MESSAGES))
    yield broker
    broker.kill()


def publish(broker: Holdfast, numbers: range) -> None:
    with Wire(broker.port) as wire:
        wire.connect("meter")
        for number in numbers:
            qos = 1
            wire.publish(f"plant/{number % 7}/temperature", b"%d" % number, qos=qos)


def run_killed(example: str, broker: Holdfast, target: str, count: Callable[[], int]) -> None:
    """Run an example again and again, killed once it has stored some more, until it has all."""
    command = [sys.executable, str(EXAMPLES / example), f"127.0.0.1:{broker.admin_port}", "plant/#"]
    rng = random.Random(4)
    deadline = time.monotonic() + WAIT_S
    kills = 0
    while count() < MESSAGES or kills < 3:
        before = count()
        process = subprocess.Popen([*command, target], stderr=subprocess.PIPE)
        try:
            while count() == before < MESSAGES:
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(rng.random() * 0.01)
        finally:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
        kills += 1


def check(rows: list[tuple[str, int]]) -> None:
    """Every message has one row."""
    assert len(rows) == MESSAGES
    expected = sorted((f"plant/{n % 7}/temperature", n) for n in range(MESSAGES))
    assert sorted(rows) == expected


def test_the_sink_in_sqlite_is_exactly_once(broker: Holdfast, tmp_path: Path) -> None:
    path = tmp_path / "readings.db"

    def rows() -> list[tuple[str, int]]:
        database = sqlite3.connect(path, timeout=30)
        try:
            found = database.execute("select topic, value from readings").fetchall()
        except sqlite3.OperationalError:
            return []  # no table yet
        finally:
            database.close()
        return [(topic, int(value)) for topic, value in found]

    run_killed("log_to_sqlite.py", broker, str(path), lambda: len(rows()))
    check(rows())


@pytest.mark.long
@pytest.mark.skipif(bool(missing()), reason=missing() or "there is one")
def test_the_sink_in_postgresql_is_exactly_once(broker: Holdfast) -> None:
    import psycopg

    with running_server() as server:
        url = server.url(server.new_database())
        with psycopg.connect(url, autocommit=True) as reader:

            def rows() -> list[tuple[str, int]]:
                try:
                    found = reader.execute("select topic, value from readings").fetchall()
                except psycopg.errors.UndefinedTable:
                    return []
                return [(topic, int(value)) for topic, value in found]

            run_killed("log_to_postgresql.py", broker, url, lambda: len(rows()))
            check(rows())


def kill_when(process: subprocess.Popen[bytes], is_time: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    try:
        while not is_time():
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.kill()
        process.communicate()


def test_the_sink_in_delta_is_exactly_once(tmp_path: Path) -> None:
    """Killed once it has written rows, and once it has committed them."""
    pytest.importorskip("deltalake")
    from deltalake import DeltaTable
    from deltalake.exceptions import CommitFailedError

    from examples.log_to_delta import COLUMNS, DeltaSink, tables

    path = tmp_path / "lake"
    sent: list[tuple[str, int]] = []

    def publish_some(wire: Wire) -> None:
        for number in range(len(sent), len(sent) + 200):
            sent.append((f"plant/{number % 7}/temperature", number))
            wire.publish(sent[-1][0], b"%d" % number, qos=1)

    with Broker(data=tmp_path / "data", admin=True) as broker, Wire(broker.port) as wire:
        wire.connect("meter")
        log = LogClient(f"127.0.0.1:{broker.admin_port}")
        command = [sys.executable, str(EXAMPLES / "log_to_delta.py"), "--every-s", "0.01"]
        command += [f"127.0.0.1:{broker.admin_port}", "plant/#", str(path)]
        for made in ("*.parquet", "_delta_log/*.json"):
            publish_some(wire)
            before = set(path.glob(made))
            process = subprocess.Popen(command, stderr=subprocess.PIPE)
            kill_when(process, lambda: set(path.glob(made)) - before)  # noqa: B023
        # Two processes of one sink by mistake: both go on at the same position.
        publish_some(wire)
        with log.read("plant/#") as cursor:
            schema, partitions = cursor.arrow_reader(COLUMNS).schema, cursor.position.offsets
        sinks = [DeltaSink(str(path), schema) for _ in range(2)]
        starts = [sink.load(partitions) for sink in sinks]
        outcomes = (contextlib.nullcontext(), pytest.raises(CommitFailedError))
        for sink, start, outcome in zip(sinks, starts, outcomes, strict=True):
            with outcome, log.read("plant/#", start=start) as cursor:
                for rows in tables(cursor):
                    sink.append(rows, cursor.position)
    found = DeltaTable(path).to_pyarrow_table().to_pylist()
    assert sorted((row["topic"], int(row["payload"])) for row in found) == sorted(sent)


def test_the_last_hour_in_polars(broker: Holdfast) -> None:
    pytest.importorskip("polars")
    pytest.importorskip("pyarrow")
    sys.path.insert(0, str(EXAMPLES))
    try:
        from log_to_polars import last_hour
    finally:
        sys.path.remove(str(EXAMPLES))
    frame = last_hour(f"127.0.0.1:{broker.admin_port}", "plant/+/temperature")
    assert frame["count"].sum() == MESSAGES
    assert frame["max"].max() == MESSAGES - 1
    assert frame["topic"].to_list() == [f"plant/{n}/temperature" for n in range(7)]
