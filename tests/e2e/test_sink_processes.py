"""The Spark sink's tasks against real brokers: kill -9 on both sides, two attempts at once, users,
and a broker that knows no producer sequences."""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql")

import pyarrow as pa

from holdfast.cli.main import main
from holdfast_lake.sink.link import PublishError
from holdfast_lake.sink.rows import RowError
from holdfast_lake.sink.sink import SinkCommit, Task
from tests.e2e import wire
from tests.e2e.brokers import SOURCE, Broker, Holdfast
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.conftest import StartHoldfast
from tests.support.sink_attempt import BATCH_ROWS, TASK, TOPICS, attempt, batches

ROWS = 3000
WAIT_S = 60.0


def subscribe(port: int, filter: str = "plant/#") -> None:
    """A durable session that is away while the messages come."""
    with wire.Wire(port) as client:
        client.connect("reader", expiry_s=3600)
        client.subscribe((filter, 2))
        client.disconnect()


def received(port: int, least: int) -> dict[str, list[int]]:
    """What the session has got, per topic in order: at least so many, and whatever there is."""
    found: dict[str, list[int]] = {}
    with wire.Wire(port, timeout_s=WAIT_S) as client:
        assert client.connect("reader", clean=False, expiry_s=3600).session_present
        count, before = 0, -1
        while count < least or count > before:
            before = count
            client.send(b"\xc0\0")
            while (frame := client.receive()).kind != wire.PINGRESP:
                message = wire.read_publish(frame, 5)
                client.send(wire.ack(wire.PUBACK, message.packet_id))
                found.setdefault(message.topic, []).append(int(message.payload))
                count += 1
    return found


def each_once(rows: int = ROWS) -> dict[str, list[int]]:
    return {f"plant/{topic}": list(range(topic, rows, TOPICS)) for topic in range(TOPICS)}


def test_kill_9_of_the_broker(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast()
    subscribe(broker.port)

    def rows() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches(ROWS)):
            if number in (4, 9):
                broker.kill()
                broker.start()
            yield batch

    done = attempt(f"127.0.0.1:{broker.port}", rows(), exactlyOnce="require", inflight="5000")
    assert (done.rows, done.connections, done.at_least_once) == (ROWS, 3, "")
    assert done.resent
    assert received(broker.port, ROWS) == each_once()


def test_attempts_that_fail_and_are_killed(broker: Holdfast) -> None:
    servers = f"127.0.0.1:{broker.port}"
    subscribe(broker.port)
    command = [sys.executable, "-m", "tests.support.sink_attempt", servers, "1000000"]
    paths = os.pathsep.join([str(SOURCE), str(Path(__file__).parents[2])])
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
    try:
        until(lambda: broker.metric("producer_places") > 0, "its first rows are stored")
    finally:
        process.kill()
        process.wait()

    def rows() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches(ROWS)):
            if number == 7:
                raise ZeroDivisionError("a row that cannot be computed")
            yield batch

    with pytest.raises(ZeroDivisionError):
        attempt(servers, rows())
    attempt(servers, batches(ROWS))
    repeated = attempt(servers, batches(ROWS), inflight="7")
    assert (repeated.rows, repeated.at_least_once) == (ROWS, "")
    assert broker.metric("producer_duplicates_total") >= ROWS
    found = received(broker.port, ROWS)
    # The one that was killed may have come further than the others, in each topic by itself.
    expected = each_once()
    for topic, numbers in found.items():
        first = expected[topic][0]
        assert numbers == list(range(first, first + TOPICS * len(numbers), TOPICS))
        assert len(numbers) >= len(expected[topic])
    assert len(found) == TOPICS


def test_two_attempts_at_the_same_time(broker: Holdfast) -> None:
    """A zombie, or speculation: both publish the same rows with the same numbers."""
    subscribe(broker.port)
    done: list[SinkCommit] = []

    def run(inflight: int) -> None:
        servers = f"127.0.0.1:{broker.port}"
        done.append(attempt(servers, batches(ROWS), inflight=str(inflight)))

    threads = [threading.Thread(target=run, args=(inflight,)) for inflight in (11, 50, 400)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [one.rows for one in done] == [ROWS] * 3
    assert received(broker.port, ROWS) == each_once()


def test_batches_and_partitions_are_apart(broker: Holdfast) -> None:
    servers = f"127.0.0.1:{broker.port}"
    subscribe(broker.port)
    tasks = [Task(TASK.job, 0, 0), Task(TASK.job, 0, 1), Task(TASK.job, 1, 0), Task("b", 0, 0)]
    for task in [*tasks, *tasks]:
        attempt(servers, batches(BATCH_ROWS), task)
    found = received(broker.port, BATCH_ROWS * len(tasks))
    for topic, numbers in each_once(BATCH_ROWS).items():
        assert found[topic] == numbers * len(tasks)


def test_origins_whatever_the_tasks(broker: Holdfast) -> None:
    servers = f"127.0.0.1:{broker.port}"
    subscribe(broker.port)

    def rows(partitions: list[int], count: int) -> Iterator[pa.RecordBatch]:
        for partition in partitions:
            yield pa.record_batch(
                {
                    "topic": [f"plant/{partition}"] * count,
                    "payload": [b"%d" % number for number in range(count)],
                    "partition": [partition] * count,
                    "offset": [10 + 3 * number for number in range(count)],
                }
            )

    # A batch that got half-way with two tasks is repeated with three, after a restart elsewhere.
    attempt(servers, rows([0, 1], 50), Task(TASK.job, 0, 0))
    attempt(servers, rows([2], 20), Task(TASK.job, 0, 1))
    for task in range(3):
        attempt(servers, rows([task], 100), Task(TASK.job, 0, task))
    assert received(broker.port, 300) == {f"plant/{n}": list(range(100)) for n in range(3)}


def test_a_node_of_a_cluster_dies(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path) as cluster:
        subscribe(cluster.nodes["n3"].port)

        def rows() -> Iterator[pa.RecordBatch]:
            for number, batch in enumerate(batches(ROWS)):
                if number == 7:
                    cluster.kill9("n1")
                yield batch

        done = attempt(",".join(cluster.addresses), rows(), exactlyOnce="require")
        assert (done.rows, done.connections) == (ROWS, 2)
        attempt(cluster.addresses[1], batches(ROWS))
        assert received(cluster.nodes["n3"].port, ROWS) == each_once()


def test_mosquitto_at_least_once(mosquitto: Broker) -> None:
    servers = f"127.0.0.1:{mosquitto.port}"
    with pytest.raises(PublishError, match=r"does not say that it knows.*exactlyOnce=prefer"):
        attempt(servers, batches(10), exactlyOnce="require")
    with wire.Wire(mosquitto.port, timeout_s=WAIT_S) as reader:
        reader.connect("reader")
        reader.subscribe(("plant/#", 0))
        for options in ({}, {"exactlyOnce": "off"}, {"protocolVersion": "3.1.1"}, {"qos": "2"}):
            done = attempt(servers, batches(ROWS), **options)
            assert done.rows == ROWS
            assert bool(done.at_least_once) == (options != {"exactlyOnce": "off"})
        payloads = Counter(int(reader.message().payload) for _ in range(4 * ROWS))
        assert payloads == Counter(dict.fromkeys(range(ROWS), 4))


def test_users(start_holdfast: StartHoldfast, tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    passwords.touch()
    for user in ("ada", "bob"):
        assert main(["passwd", "-b", str(passwords), user, f"secret of {user}"]) == 0
    acl = tmp_path / "acl"
    acl.write_text("pattern write plant/0\npattern write plant/1\n")
    security = {"password_file": str(passwords), "acl_file": str(acl)}
    broker = start_holdfast({"security": security})
    servers = f"127.0.0.1:{broker.port}"
    ada = {"username": "ada", "password": "secret of ada"}
    with pytest.raises(PublishError, match="refused the connection"):
        attempt(servers, batches(10), username="ada", password="wrong")
    with pytest.raises(RowError, match=r"does not take a message to 'plant/2': Not authorized"):
        attempt(servers, batches(10), **ada)
    done = attempt(servers, batches(300), failOnRefused="false", **ada)
    assert (done.rows, done.refused, len(done.examples)) == (300, 100, 3)
    with pytest.raises(PublishError, match="belongs to another user"):
        attempt(servers, batches(10), username="bob", password="secret of bob")
