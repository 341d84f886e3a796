"""Clients that are sent to other nodes at a pace, and the shares of a balance."""

from collections import Counter

import pytest

from holdfast.node.config import NodeConfig
from holdfast.node.metadata.model import DATA, WITNESS, ClusterMetadata, NodeInfo, NodePhase
from holdfast.node.placement.client_shares import (
    STEADY_S,
    AutomaticBalance,
    even_shares,
    obstacle,
)
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from tests.support.node_bench import NodeBench, Peer

OTHERS = "n1:1 tcp=n1:1,n2:2 tcp=n2:2"


def bench() -> NodeBench:
    return NodeBench(NodeConfig(partitions=4, sys_interval_s=0))


def join(world: NodeBench, client: str, level: int = 5, expiry_s: int = 0) -> Peer:
    peer = world.connect(client, level, expiry_s=expiry_s)
    (connack,) = peer.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert connack.reason == 0
    return peer


def run(world: NodeBench, seconds: float) -> None:
    """Let time pass as timers want it."""
    end = world.now + seconds
    while (when := world.node.timer()) is not None and when <= end:
        world.advance(max(0.0, when - world.now))
    world.advance(max(0.0, end - world.now))


def left(peers: list[Peer]) -> list[int]:
    return [number for number, peer in enumerate(peers) if not peer.closed]


def test_a_drain_sends_its_clients_away_at_the_pace() -> None:
    world = bench()
    peers = [join(world, f"c{number}") for number in range(100)]
    world.node.redirect(OTHERS, "drained", 20.0)
    world.run()
    assert len(left(peers)) == 98
    for second in range(1, 5):
        run(world, 1.0)
        assert 0 <= len(left(peers)) - (98 - 20 * second) <= 2
        assert world.node.relocation.left == len(left(peers))
    run(world, 1.0)
    assert not left(peers)
    servers: Counter[object] = Counter()
    for peer in peers:
        (goodbye,) = peer.take(m.Disconnect)
        assert isinstance(goodbye, m.Disconnect)
        assert goodbye.reason == reasons.USE_ANOTHER_SERVER
        servers[goodbye.properties[p.SERVER_REFERENCE]] += 1
    # Clients that follow the reference are spread over the nodes.
    assert servers == {"n1:1 n2:2": 50, "n2:2 n1:1": 50}


def test_an_undrained_node_keeps_the_clients_that_are_left() -> None:
    world = bench()
    peers = [join(world, f"c{number}") for number in range(50)]
    world.node.redirect(OTHERS, "drained", 10.0)
    run(world, 1.0)
    world.node.redirect("", "")
    kept = left(peers)
    assert 39 <= len(kept) <= 40
    run(world, 60.0)
    assert left(peers) == kept
    assert world.node.relocation.left == 0


def test_a_pause_of_the_loop_is_not_made_up_for() -> None:
    world = bench()
    peers = [join(world, f"c{number}") for number in range(500)]
    world.node.redirect(OTHERS, "drained", 100.0)
    world.run()
    assert len(left(peers)) == 490
    world.advance(30.0)
    assert len(left(peers)) == 440


def test_no_pace_is_all_at_once_and_a_worse_reason_ends_a_pace() -> None:
    world = bench()
    peers = [join(world, f"c{number}") for number in range(50)]
    world.node.redirect(OTHERS, "drained", 1.0)
    world.run()
    assert len(left(peers)) == 49
    world.node.redirect(OTHERS, "the disk is damaged")
    world.run()
    assert not left(peers)


def test_those_who_lose_least_leave_first() -> None:
    world = bench()
    peers = [
        join(world, "old", 4),
        join(world, "clean"),
        join(world, "durable", expiry_s=100),
    ]
    order = []
    world.node.redirect(OTHERS, "drained", 1.0)
    world.run()
    for _ in range(4):
        order += [
            number for number, peer in enumerate(peers) if peer.closed and number not in order
        ]
        run(world, 1.0)
    assert order == [2, 1, 0]


def test_a_balance_keeps_the_share_and_moves_no_client_twice() -> None:
    world = bench()
    peers = [join(world, f"c{number}") for number in range(28)]
    world.node.relocation.balance(OTHERS, "balance", 10.0, 19)
    run(world, 5.0)
    assert len(left(peers)) == 19
    assert world.node.relocation.left == 0
    # Those that know no other node come back, and stay.
    gone = [number for number in range(28) if number not in left(peers)]
    back = [join(world, f"c{number}") for number in gone]
    world.node.relocation.balance(OTHERS, "balance", 10.0, 0)
    run(world, 10.0)
    assert not left(peers)
    assert len(left(back)) == 9
    # After an hour they may be asked again.
    run(world, 3600.0)
    world.node.relocation.balance(OTHERS, "balance", 10.0, 4)
    run(world, 10.0)
    assert len(left(back)) == 4


def test_a_balance_counts_clients_that_leave_by_themselves() -> None:
    world = bench()
    peers = [join(world, f"c{number}") for number in range(20)]
    world.node.relocation.balance(OTHERS, "balance", 1.0, 10)
    run(world, 2.0)
    for number in left(peers)[:8]:
        peers[number].send(m.Disconnect(0))
    run(world, 30.0)
    assert len(left(peers)) == 10
    assert world.node.relocation.left == 0


@pytest.mark.parametrize(
    ("counts", "shares"),
    [
        ({"n1": 28, "n2": 27, "n3": 0}, {"n1": 19, "n2": 18, "n3": 18}),
        ({"n1": 0, "n2": 1}, {"n1": 0, "n2": 1}),
        ({"n1": 18, "n2": 18, "n3": 19}, {"n1": 18, "n2": 18, "n3": 19}),
        ({"n1": 5}, {"n1": 5}),
        ({}, {}),
    ],
)
def test_shares_are_even_and_no_node_is_below(
    counts: dict[str, int], shares: dict[str, int]
) -> None:
    found = even_shares(counts)
    assert {each.node: each.share for each in found} == shares
    assert sum(each.share for each in found) == sum(counts.values())
    for each in found:
        assert each.clients - each.surplus >= min(each.clients, sum(counts.values()) // len(counts))


def metadata(**states: str) -> ClusterMetadata:
    nodes = {
        node: NodeInfo(node, "x", "", "", "", WITNESS if node == "w" else DATA, state)
        for node, state in states.items()
    }
    return ClusterMetadata("c", 3, 2, nodes, (), 1)


def test_no_balance_while_a_node_is_down_or_drained() -> None:
    up = NodePhase.UP
    assert obstacle(metadata(n1=up, n2=up, w=NodePhase.DOWN)) == ""
    assert obstacle(metadata(n1=up, n2=NodePhase.DOWN)) == "n2 is down"
    assert obstacle(metadata(n1=NodePhase.DRAINING, n2=up)) == "n1 is draining"


def test_an_automatic_balance_waits_until_the_clients_are_steady() -> None:
    uneven, even = {"n1": 50, "n2": 50, "n3": 0}, {"n1": 34, "n2": 36, "n3": 30}
    balance = AutomaticBalance()
    assert not balance.is_due(uneven, 0.0)
    assert not balance.is_due(uneven, STEADY_S - 1)
    # A node was down: its clients are on their way.
    assert not balance.is_due(None, STEADY_S)
    assert not balance.is_due(uneven, STEADY_S + 1)
    assert not balance.is_due({"n1": 80, "n2": 50, "n3": 0}, 2 * STEADY_S)
    assert not balance.is_due({"n1": 81, "n2": 50, "n3": 0}, 2 * STEADY_S + 1)
    assert balance.is_due({"n1": 80, "n2": 50, "n3": 0}, 3 * STEADY_S)
    # The clients that were sent away need time.
    assert not balance.is_due(uneven, 3 * STEADY_S + 1)
    assert not balance.is_due(even, 4 * STEADY_S)
    assert not balance.is_due(even, 9 * STEADY_S)
