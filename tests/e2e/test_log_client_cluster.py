"""Readers of the log of three nodes: one whose leader is killed with -9, and 200 tasks of Spark."""

import shutil
import subprocess
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from holdfast.api.log_sender import READERS_MAX
from holdfast.client.log import LogClient, LogMessage
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.wire import Wire

TOPIC = "line/1/power"


def publish(port: int, numbers: range) -> None:
    with Wire(port, 5, 20.0) as wire:
        wire.connect("meter")
        for number in numbers:
            assert wire.publish(TOPIC, b"%d" % number, qos=1) < 0x80


def numbers(messages: list[LogMessage]) -> list[int]:
    return [int(each.payload) for each in messages]


@pytest.mark.long
def test_a_killed_leader_costs_neither_a_message_nor_a_group(tmp_path: Path) -> None:
    """A reader that follows at a node that dies, and a group that has committed there."""
    with ClusterProcesses(tmp_path, settings={"cluster": {"partitions": 3}}) as cluster:
        leader = cluster.leader_of(cluster.partition_of(TOPIC))
        names = [leader, *(name for name in cluster.nodes if name != leader)]
        ports = {name: cluster.nodes[name].admin_port for name in names}
        # The leader first: the reader and the commits are there until it dies.
        log = LogClient([f"127.0.0.1:{ports[name]}" for name in names])
        survivor = cluster.nodes[names[1]]
        publish(survivor.port, range(100))
        with log.read("line/#", group="lake") as half:
            done = [next(half) for _ in range(37)]
            half.commit()
            committed = half.position.offsets

        found: list[LogMessage] = []
        cursor = log.read("line/#", follow=True)
        reader = threading.Thread(target=lambda: found.extend(cursor))
        reader.start()
        try:
            until(lambda: len(found) >= 100, "the reader follows")
            cluster.kill9(leader)
            # It goes on with what the others commit.
            publish(survivor.port, range(100, 150))
            until(lambda: len(found) >= 150, "the reader follows at another node")
            with log.read("line/#", group="lake") as rest:
                partition = done[0].partition
                assert rest.position.offsets[partition] == committed[partition]
                done += rest
                assert numbers(done) == list(range(150))
                rest.commit()
            # The killed node knows the older commit only, until it has caught up.
            cluster.restart(leader)
            with log.read("line/#", group="lake") as again:
                assert list(again) == []
            cluster.wait_healthy()
            publish(cluster.nodes[leader].port, range(150, 200))
            until(lambda: len(found) >= 200, "the reader follows")
        finally:
            cursor.close()
            reader.join(10)
        assert numbers(found) == list(range(200))
        with log.read("line/#", group="lake") as again:
            assert numbers(list(again)) == list(range(150, 200))


TASKS = 200
ROWS = 24_000


def publish_lines(port: int, topic: str, numbers: range) -> None:
    lines = "".join(f"{number}\n" for number in numbers)
    command = [str(shutil.which("mosquitto_pub")), "-p", str(port), "-q", "1", "-l", "-t", topic]
    subprocess.run(command, input=lines, text=True, timeout=120, check=True)


def puback_times_s(port: int, over: Path) -> list[float]:
    """The times of QoS 1 publishes, one after the other: 200, and more until there is a file."""
    found: list[float] = []
    with Wire(port, 5, 60.0) as wire:
        wire.connect("beside")
        while len(found) < 200 or not over.exists():
            began = time.perf_counter()
            assert wire.publish("beside", b"", qos=1) < 0x80
            found.append(time.perf_counter() - began)
    return sorted(found)


@pytest.mark.long
def test_200_tasks_of_spark_at_three_nodes(tmp_path: Path) -> None:
    """Each has its rows, though the nodes have room for fewer readers, and clients publish."""
    pytest.importorskip("pyspark")
    from holdfast.log.columns.decode import SCHEMA
    from holdfast_lake.source.options import parse
    from holdfast_lake.source.source import HoldfastReader, ReadWork, read_work

    assert 3 * READERS_MAX < TASKS
    with ClusterProcesses(tmp_path) as cluster:
        nodes = list(cluster.nodes.values())
        for number, first in enumerate(range(0, ROWS, ROWS // 12)):
            publish_lines(
                nodes[number % 3].port, f"line/{number}", range(first, first + ROWS // 12)
            )
        alone = puback_times_s(nodes[0].port, tmp_path)
        over = tmp_path / "over"
        servers = ",".join(f"127.0.0.1:{node.admin_port}" for node in nodes)
        options = parse({"servers": servers, "tasks": str(TASKS), "topics": "line/#"})
        works = HoldfastReader(options, SCHEMA).partitions()
        assert len(works) == TASKS
        assert {each.servers[0] for each in works if isinstance(each, ReadWork)} == {
            ("127.0.0.1", node.admin_port) for node in nodes
        }
        together = threading.Barrier(TASKS)

        def task(number: int) -> list[int]:
            together.wait(60)
            found = []
            for rows in read_work(options, works[number], SCHEMA):
                found += [int(each) for each in rows.column("payload").to_pylist()]
            return found

        # The tasks would hold up a publisher in their process.
        with (
            ThreadPoolExecutor(TASKS) as threads,
            ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes,
        ):
            beside = processes.submit(puback_times_s, nodes[0].port, over)
            began = time.perf_counter()
            found = [number for part in threads.map(task, range(TASKS)) for number in part]
            took_s = time.perf_counter() - began
            over.touch()
        assert sorted(found) == list(range(ROWS))
        late = beside.result()
        print(
            f"{TASKS} tasks {took_s:.1f} s, p99 of PUBACK {alone[len(alone) * 99 // 100]:.4f} s"
            f" alone, {late[len(late) * 99 // 100]:.4f} s beside them ({len(late)})"
        )
