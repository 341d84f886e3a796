"""`holdfast.client.log` at a cluster of three nodes, whose leader is killed with -9."""

import threading
from pathlib import Path

import pytest

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
