"""The core makes no cycle of objects that only a garbage collection would free.

The collector of a serving process leaves old objects alone (`io.event_loop.loop.Collector`). So a
cycle that each client leaves behind would fill the memory.
"""

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from holdfast.node.session.session import Session
from holdfast.protocol.mqtt import packets as m
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.test_publish import publish, subscribe

ROUNDS = 8


@pytest.fixture(autouse=True)
def collected_by_hand() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def garbage() -> Counter[str]:
    """The unreachable objects of the broker, by class."""
    gc.garbage.clear()
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = [type(each) for each in gc.garbage]
    return Counter(each.__qualname__ for each in found if each.__module__.startswith("holdfast."))


def live_one_life(bench: NodeBench, number: int) -> None:
    """One client of each kind connects, uses what a client can use, and ends."""
    for expiry_s in (0, 3600):
        name = f"c{number}-{expiry_s}"
        will = m.Will("w/t", b"gone", 1, False, {})
        peer = bench.connect(name, expiry_s=expiry_s, keep_alive_s=60, will=will)
        peer.send(subscribe("a/#", 2, 1), subscribe("$share/g/b/+", 1, 2))
        peer.send(subscribe("$queue/q/b/+", 1, 3))
        for qos in (0, 1, 2):
            peer.send(publish("a/b", b"x", qos, 10 + qos, retain=qos == 1))
            peer.send(publish("b/c", b"x", qos, 20 + qos))
        peer.send(m.Ack(m.PUBREL, 12, 0, {}))
        # Some deliveries stay without an acknowledgement.
        for each in peer.publishes()[:2]:
            if each.qos == 1:
                peer.send(m.Ack(m.PUBACK, each.packet_id, 0, {}))
        other = bench.connect(name, clean=False, expiry_s=expiry_s, keep_alive_s=60)
        end(other, number)
        last = bench.connect(name)
        last.send(m.Unsubscribe(4, ["a/#"], {}))
        end(last, number)


def end(peer: Peer, number: int) -> None:
    if number % 2:
        peer.send(m.Disconnect(0, {}))
    else:
        peer.lose()
    peer.connection.transport = None


def test_a_cycle_would_be_found() -> None:
    bench = NodeBench()
    peer = bench.connect("c")
    peer.lose()
    session = Session("c")
    session.connection, peer.connection.session = peer.connection, session
    garbage()
    del peer, session
    found = garbage()
    assert found["Connection"] == found["Session"] == 1


def test_a_client_leaves_no_cycle() -> None:
    bench = NodeBench()
    live_one_life(bench, 0)
    live_one_life(bench, 1)
    garbage()
    for number in range(2, 2 + ROUNDS):
        live_one_life(bench, number)
    left = garbage()
    assert {name: count for name, count in left.items() if count >= ROUNDS} == {}
