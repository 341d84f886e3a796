"""Retained updates of QoS 0 and 1 against commits and crashes: a subscriber ends with the newest
update, whenever it has subscribed, and finds after a crash the newest that the disk has."""

import random

import pytest

from holdfast.node.config import NodeConfig
from tests.support.node_bench import NodeBench
from tests.support.seeds import block_of_seeds, run_seeds
from tests.unit.node.test_publish import publish, subscribe

SEEDS = 40
"""How many histories; a failure names its seed."""
BLOCKS = 4
TOPICS = ["a", "b"]


def newest(updates: list[bytes]) -> list[bytes]:
    return [updates[-1]] if updates and updates[-1] else []


class Watcher:
    """A subscriber from some moment on: retained messages, and then live ones."""

    def __init__(self, bench: NodeBench, number: int, topic: str) -> None:
        self.topic = topic
        self.peer = bench.connect(f"watcher{number}")
        self.peer.send(subscribe(topic))
        self.received = self.peer.payloads()

    def check(self, updates: list[bytes]) -> None:
        """Everything is committed: it has the newest update."""
        self.received += self.peer.payloads()
        if self.received:
            assert self.received[-1] == updates[-1]
        else:
            assert newest(updates) == []


def update_and_look(seed: int) -> None:
    chance = random.Random(seed)
    bench = NodeBench(NodeConfig(partitions=2, sys_interval_s=0), auto_commit=False)
    publisher = bench.connect("pub")
    updates: dict[str, list[bytes]] = {topic: [] for topic in TOPICS}
    watchers: list[Watcher] = []

    def stored(topic: str) -> list[bytes]:
        """The updates that the disk has."""
        return [each.payload for each in bench.records() if each.topic == topic.encode()]

    for step in range(60):
        topic = chance.choice(TOPICS)
        match chance.choice(["qos0", "qos0", "qos1", "qos1", "commit", "crash", "look"]):
            case "commit":
                bench.settle()
                for each in TOPICS:
                    assert stored(each) == updates[each]
                for watcher in watchers:
                    watcher.check(updates[watcher.topic])
            case "crash":
                bench.crash()
                publisher = bench.connect("pub")
                watchers = []
                updates = {each: stored(each) for each in TOPICS}
                for each in TOPICS:
                    watcher = Watcher(bench, 0, each)
                    assert watcher.received == newest(updates[each])
                    watcher.peer.lose()
            case "look":
                watchers.append(Watcher(bench, step + 1, topic))
            case kind:
                payload = chance.choice([b"", b"%d" % step])
                qos = int(kind == "qos1")
                publisher.send(publish(topic, payload, qos, step + 1 if qos else 0, retain=True))
                updates[topic].append(payload)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_subscriber_ends_with_the_newest_update(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), update_and_look)
