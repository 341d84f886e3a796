"""What the federation's benchmark makes of its figures and its graph, without running any."""

import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bench import federation, federation_faults, wire
from bench.federation_control import Control
from bench.federation_faults import Campaign, Fault, Round
from bench.federation_latency import CLOSED, PACED, Found, Plan, Run
from bench.federation_load import PROBES, Latency, Sink, latency_of
from bench.federation_members import TOPIC, VARIANTS
from bench.federation_observing import control_in, copies_in
from bench.ledger import Findings
from bench.scenarios import PAYLOAD_BYTES
from bench.wire import Frame
from holdfast_lab.targets.graph import (
    LAN,
    branches,
    layout_of,
    neighbours,
    path,
    shortest_path_tree,
)

CLEAN = Findings(10, 10, 10, 0, 0, 0, 0, 0, 0, 0)


# The graph


def test_the_papers_distances() -> None:
    assert LAN.members == 12
    assert len(LAN.edges) == 21
    assert (LAN.hops(0), LAN.hops(5)) == (1, 3)
    assert max(map(LAN.degree, range(12))) == 5


def test_a_shortest_path_tree_reaches_everybody_and_no_one_twice() -> None:
    for root in range(LAN.members):
        parents = shortest_path_tree(LAN.edges, root)
        assert set(parents) == set(range(LAN.members)) - {root}
        assert all((min(e), max(e)) in LAN.edges for e in parents.items())
        for member in range(LAN.members):
            way = path(parents, member)
            assert (way[0], way[-1]) == (member, root)
            # No neighbour is nearer to the root than by one.
            near = [len(path(parents, each)) for each in neighbours(LAN.edges)[member]]
            assert member == root or len(way) == min(near) + 1


def test_the_least_copies_are_the_links_of_the_pruned_tree() -> None:
    assert LAN.copies_least() == 3
    assert branches(LAN.parents(), (0, 5)) == {(11, 0), (0, 2), (2, 5)}
    assert replace(LAN, subscribers=(0,)).copies_least() == 1
    # Two ways that part at once.
    assert layout_of("0-1 0-2", 0, [1, 2]).copies_least() == 2


@pytest.mark.parametrize(
    ("links", "publisher", "subscribers", "text"),
    [
        ("", 0, [1], "at least one link"),
        ("0-1", 0, [2], "choose different ones from 0 to 1"),
        ("0-1", 0, [0], "choose different ones"),
        ("0-1", 0, [], "choose different ones"),
        ("0-1 2-3", 0, [1], r"no way from 0 to \[2, 3\]"),
        ("0-1-2", 0, [1], "too many"),
        ("a-b", 0, [1], "invalid literal"),
    ],
)
def test_no_graph(links: str, publisher: int, subscribers: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        layout_of(links, publisher, subscribers)


# Latency


def test_a_latency_is_of_all_times() -> None:
    found = latency_of([4.0, 1.0, 3.0, 2.0])
    assert found == Latency(2.5, 3.0, 4.0, 4.0)
    assert latency_of([]) is None


def run(variant: str, mean_ms: float, load: str = CLOSED, qos: int = 1, lost: int = 0) -> Run:
    latency = Latency(mean_ms, mean_ms, mean_ms, mean_ms)
    at: dict[int, Latency | None] = {0: latency, 5: latency}
    return Run(variant, load, qos, 10, at, lost, 0, 0, 1.0, 0.1, 0.0, 1, 3.0, 21.0)


def found_in(*runs: Run) -> Found:
    variants = tuple(dict.fromkeys(each.variant for each in runs))
    return Found(Plan(LAN, variants, (1,), 10, 1, Path("/")), list(runs), {})


def results(found: Found) -> list[bool]:
    return [each.is_met for each in found.verdicts()]


def test_a_mean_is_judged_by_the_bridges_of_the_same_run() -> None:
    bridges = [run("bridges", 2.0), run("bridges", 3.0), run("bridges", 9.0)]
    # At both subscribers, by the bridges and by the published figures; and the copies.
    assert results(found_in(*bridges, run("builtin", 3.0))) == [True] * 5
    assert results(found_in(*bridges, run("builtin", 3.1))) == [False, True] * 2 + [True]
    # A tenth of 445.796 and of 1062.230.
    slow = [run("bridges", 100.0), run("builtin", 50.0)]
    assert results(found_in(*slow)) == [True, False, True, True, True]
    assert results(found_in(run("paper", 500.0), run("bridges", 1.0))) == []


def test_of_rounds_the_median_counts_and_the_paced_load_does_not() -> None:
    runs = [run("bridges", 3.0), *(run("builtin", each) for each in (1.0, 2.0, 99.0))]
    assert results(found_in(*runs, run("builtin", 99.0, PACED))) == [True] * 5


def test_where_nothing_arrived_nothing_is_met() -> None:
    silent = replace(run("builtin", 1.0), latencies={0: None, 5: None})
    assert results(found_in(run("bridges", 3.0), silent)) == [False] * 4 + [True]


def test_copies_must_be_those_of_the_tree() -> None:
    for copies, is_met in ((3.0, True), (3.04, True), (3.2, False), (2.0, False)):
        each = replace(run("builtin", 1.0), copies=copies)
        assert results(found_in(each))[-1] is is_met


def test_only_federations_that_promise_can_break_it() -> None:
    for variant, is_judged in (
        ("bridges", False), ("paper", False), ("builtin", True), ("sidecar", True),
    ):  # fmt: skip
        assert bool(found_in(run(variant, 1.0, lost=2)).violations()) is is_judged
    assert found_in(run("builtin", 1.0, lost=2)).violations() == ["builtin, A, QoS 1: 2 lost"]
    assert found_in(run("builtin", 1.0, qos=0, lost=2)).violations() == []
    twice = replace(run("builtin", 1.0), duplicates=1)
    assert found_in(twice).violations() == []
    assert found_in(replace(twice, qos=2)).violations() == ["builtin, A, QoS 2: 1 delivered twice"]
    swapped = replace(run("sidecar", 1.0), reordered=1)
    assert found_in(swapped).violations() == ["sidecar, A, QoS 1: 1 out of order"]


def test_what_brokers_say_to_one_another_is_told_apart() -> None:
    topics = Counter(
        {
            "federator/routing/bench": 7,
            "federator/core_ann/bench": 5,
            "federator/memb_ann/bench": 3,
            "federator/beacon/bench": 2,
            "federated/bench": 1,
        }
    )
    assert (copies_in(topics), control_in(topics)) == (8, 8)


def test_subscriptions_of_one_packet_and_of_many() -> None:
    one = wire.subscribe("a/b", 1)
    assert one == b"\x82\x08\x00\x01\x00\x03a/b\x01"
    assert wire.subscribe_all(["a/b"], 1) == one
    assert wire.suback(2) == b"\x90\x03\x00\x01\x02"
    assert wire.suback_all(200, 1)[:3] == struct.pack("!BBB", 0x90, 0xCA, 1)


# What a subscriber makes of the bytes it is given


@pytest.fixture
def given() -> Iterator[tuple[Sink, socket.socket, Frame]]:
    """A QoS 2 subscriber, and the broker's end of its connection."""
    frame = Frame(TOPIC, 2, PAYLOAD_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        made = pool.submit(Sink, port, "sink", frame)
        broker, _ = server.accept()
        with broker:
            broker.recv(1000)
            broker.sendall(wire.CONNACK_ACCEPTED)
            broker.recv(1000)
            broker.sendall(wire.suback(2))
            sink = made.result(10)
            yield sink, broker, frame
            sink.connection.close()


def packet(frame: Frame, id: int, number: int, first_byte: int = 0) -> bytes:
    made = frame.batch(wire.Ids(b"\0", bytes([id])))
    made[0] |= first_byte
    struct.pack_into("!qQ", made, frame.payload_at, time.monotonic_ns(), number)
    return bytes(made)


def hand_over(sink: Sink, broker: socket.socket, data: bytes) -> None:
    """In pieces, as a network may."""
    for at in range(0, len(data), 37):
        broker.sendall(data[at : at + 37])
        assert select.select([sink.connection.socket], [], [], 10)[0]
        sink.handle()


def test_repeated_and_overtaken_messages_are_seen(
    given: tuple[Sink, socket.socket, Frame],
) -> None:
    sink, broker, frame = given
    parts = [
        packet(frame, 1, 0),
        packet(frame, 2, 2),
        bytes(wire.acks(wire.PUBREL, wire.Ids(b"\0", b"\1"))),
    ]
    parts += [packet(frame, 3, 1), packet(frame, 2, 2, first_byte=8)]
    hand_over(sink, broker, b"".join(parts))
    assert sorted(sink.times_ms) == [0, 1, 2]
    assert (sink.duplicates, sink.reordered) == (1, 1)
    expected = [(wire.PUBREC, 1), (wire.PUBREC, 2), (wire.PUBCOMP, 1), (wire.PUBREC, 3)]
    expected += [(wire.PUBREC, 2)]
    answer = b"".join(bytes([kind, 2, 0, id]) for kind, id in expected)
    found = b""
    while len(found) < len(answer):
        found += broker.recv(1000)
    assert found == answer


def test_a_probe_is_none_of_the_messages(given: tuple[Sink, socket.socket, Frame]) -> None:
    sink, broker, frame = given
    hand_over(sink, broker, packet(frame, 1, PROBES + 7))
    assert (sink.probe, sink.times_ms) == (PROBES + 7, {})


@pytest.mark.parametrize("at", [0, 5])
def test_what_is_none_of_ours_is_refused(given: tuple[Sink, socket.socket, Frame], at: int) -> None:
    """Another QoS or RETAIN, or another topic."""
    sink, broker, frame = given
    strange = bytearray(packet(frame, 1, 0))
    strange[at] ^= 1
    with pytest.raises(ValueError, match="not a message of this benchmark"):
        hand_over(sink, broker, bytes(strange))


# Control and faults


def test_control_may_not_grow_beyond_the_windows_ends() -> None:
    assert Control(1, 0.1, 21.0, 40.0, 21.0).is_met()
    assert Control(1, 0.1, 22.0, 40.0, 21.0).is_met()
    assert not Control(1, 0.1, 22.1, 40.0, 21.0).is_met()
    assert not Control(10_000, 0.1, 35.0, 10.0, 21.0).is_met()


def campaign(*silences_s: float | None, lost: int = 0) -> Campaign:
    rounds = [Round(Fault.LINK, each) for each in silences_s]
    return Campaign(rounds, {0: CLEAN, 5: replace(CLEAN, lost=lost)})


def test_the_worst_silence_counts() -> None:
    target_s = federation_faults.TARGETS_S[Fault.LINK]
    assert campaign(0.1, 0.5).is_met(Fault.LINK, target_s)
    assert not campaign(0.1, 0.6).is_met(Fault.LINK, target_s)
    assert not campaign(0.1, None).is_met(Fault.LINK, target_s)


def test_nothing_acknowledged_may_be_lost_anywhere() -> None:
    assert campaign(0.1).violations() == []
    assert campaign(0.1, lost=2).violations() == ["subscriber at 5: 2 lost"]


# The command line


def test_what_is_played_by_default() -> None:
    arguments = federation.parse([])
    assert arguments.layout == LAN
    assert set(arguments.counts) == set(Fault)
    assert federation.parse(["--faults", "relay kill -9=3"]).counts == {Fault.RELAY: 3}
    assert set(federation.QUICK_VARIANTS) <= set(VARIANTS)


@pytest.mark.parametrize(
    "options",
    [
        ["--faults", "relay=3"],
        ["--faults", "relay kill -9=0"],
        ["--rounds", "0"],
        ["--graph", "0-1"],
        ["--graph", "0-1", "--publisher", "0", "--subscriber", "0"],
        ["--publisher", "3"],
        ["--variant", "other"],
    ],
)
def test_a_wrong_command_line_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        federation.parse(options)
    assert ended.value.code == 2
