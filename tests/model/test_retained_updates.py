"""Retained updates of QoS 0 and 1 against commits and crashes: what a new subscriber finds is the
newest of what was delivered, and after a crash the newest that the disk has."""

import random

import pytest

from holdfast.broker.config import NodeConfig
from tests.support.node_bench import NodeBench
from tests.support.seeds import block_of_seeds, run_seeds
from tests.unit.test_node_publish import publish, subscribe

SEEDS = 40
"""How many histories; a failure names its seed."""
BLOCKS = 4
TOPICS = ["a", "b"]


def found(bench: NodeBench, topic: str) -> list[bytes]:
    peer = bench.connect("newcomer")
    peer.send(subscribe(topic))
    payloads = peer.payloads()
    peer.lose()
    return payloads


def newest(updates: list[bytes]) -> list[bytes]:
    return [updates[-1]] if updates and updates[-1] else []


def update_and_look(seed: int) -> None:
    chance = random.Random(seed)
    bench = NodeBench(NodeConfig(partitions=2, sys_interval_s=0), auto_commit=False)
    publisher = bench.connect("pub")
    # Per topic, in the order published: the payload, and whether it waits for the disk. QoS 0 does
    # behind one that waits. And how many of them are on the disk.
    updates: dict[str, list[tuple[bytes, bool]]] = {topic: [] for topic in TOPICS}
    durable = dict.fromkeys(TOPICS, 0)
    for step in range(60):
        topic = chance.choice(TOPICS)
        match chance.choice(["qos0", "qos0", "qos1", "qos1", "commit", "crash", "look"]):
            case "commit":
                bench.settle()
                durable = {each: len(updates[each]) for each in TOPICS}
            case "crash":
                bench.crash()
                publisher = bench.connect("pub")
                updates = {each: updates[each][: durable[each]] for each in TOPICS}
                for each in TOPICS:
                    assert found(bench, each) == newest([payload for payload, _ in updates[each]])
            case "look":
                delivered = [
                    payload
                    for number, (payload, is_held) in enumerate(updates[topic])
                    if not is_held or number < durable[topic]
                ]
                assert found(bench, topic) == newest(delivered), step
            case kind:
                payload = chance.choice([b"", b"%d" % step])
                qos = int(kind == "qos1")
                publisher.send(publish(topic, payload, qos, step + 1 if qos else 0, retain=True))
                waits = qos == 1 or any(each for _, each in updates[topic][durable[topic] :])
                updates[topic].append((payload, waits))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_retained_is_the_newest_that_was_delivered(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), update_and_look)
