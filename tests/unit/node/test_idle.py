"""An idle client, and the parts of its connection that exist only while they are needed."""

import gc
import random
import sys
from collections import Counter
from math import ceil

import pytest

from holdfast.io.sockets.tcp import TcpConnection
from holdfast.node.config import NodeConfig
from holdfast.node.connections.keep_alive import clear_deadline, set_deadline
from holdfast.node.effects import CheckPassword, Effect
from holdfast.node.node_state import STEPS_PER_TURN
from holdfast.node.session.connection import CLOSED, Connection
from holdfast.node.session.session import NO_INFLIGHT, NO_SUBSCRIPTIONS, Session
from holdfast.node.state.recorded_state import KEEP_ALIVE
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.encode import encode
from tests.support.node_bench import NodeBench
from tests.unit.node.test_publish import publish, subscribe


def test_an_idle_client_has_no_timer_of_its_own_and_no_buffers() -> None:
    bench = NodeBench()
    peers = [bench.connect(f"c{number}", keep_alive_s=60) for number in range(50)]
    # A client that was busy is idle again, too.
    peers[0].send(publish("t", b"x", 1, 1), m.Pingreq())
    state = bench.node.state
    assert len(state.timers) == 1
    for peer in peers:
        session = peer.connection.session
        assert session is not None
        assert peer.connection.reader is None
        assert peer.connection.out is None
        assert session.subscriptions is NO_SUBSCRIPTIONS
        assert session.inflight is NO_INFLIGHT
    # The deadline of CONNECT is first, then those of the keep alive.
    bench.advance(bench.config.connect_timeout_s + 1)
    assert len(state.timers) == 1
    for peer in peers[1:]:
        peer.send(m.Pingreq())
    bench.advance(90 - bench.config.connect_timeout_s)
    assert [peer for peer in peers if peer.closed] == peers[:1]
    bench.advance(bench.config.connect_timeout_s + 1)
    assert all(peer.closed for peer in peers)
    assert state.timers == []
    assert state.deadlines == {}


OF_THE_BENCH = ("Connack", "FrameReader", "ListenerRules", "Note")
"""The classes whose objects the bench keeps for each of its clients."""


def own_objects() -> Counter[str]:
    """The broker's objects in memory, by class."""
    gc.collect()
    found = [type(each) for each in gc.get_objects()]
    return Counter(each.__name__ for each in found if str(each.__module__).startswith("holdfast."))


@pytest.mark.parametrize(
    ("expiry_s", "more"),
    [(0, {}), (3600, {"Owner": 1, "Session": 2, "Rarities": 1})],
    ids=["clean", "durable"],
)
def test_an_idle_client_costs_two_objects(expiry_s: int, more: dict[str, int]) -> None:
    """A durable session costs three more: the replicated state has it, with the name of its owner,
    and the home has the owner."""
    bench = NodeBench()
    bench.connect("first", expiry_s=expiry_s, keep_alive_s=60)
    before = own_objects()
    for number in range(20):
        bench.connect(f"c{number}", expiry_s=expiry_s, keep_alive_s=60)
    added = own_objects()
    added.subtract(before)
    of_each = {name: count // 20 for name, count in added.items() if name not in OF_THE_BENCH}
    assert {name: count for name, count in of_each.items() if count} == {
        "Connection": 1,
        "Session": 1,
        **more,
    }


@pytest.mark.parametrize(
    ("kind", "bytes_max"), [(Session, 320), (Connection, 240), (TcpConnection, 96)]
)
def test_the_objects_of_an_idle_client_are_small(kind: type, bytes_max: int) -> None:
    """The sizes in docs/internals/broker.md. The order of the attributes counts: a bool between two
    pointers takes eight bytes."""
    if not str(sys.modules[kind.__module__].__file__).endswith(".so"):
        pytest.skip("the compiled form has these sizes")
    header_bytes = sys.getsizeof([]) - list.__basicsize__
    assert kind.__basicsize__ + header_bytes <= bytes_max


def test_deadlines_are_those_of_a_table() -> None:
    """Random deadlines, moved and cleared, fire in the second after their time and only once."""
    rng = random.Random(7)
    bench = NodeBench()
    state = bench.node.state
    peers = [bench.connect(f"c{number}", keep_alive_s=0) for number in range(30)]
    connections = [peer.connection for peer in peers]
    wanted: dict[Connection, float] = {}
    for _ in range(2000):
        connection = rng.choice(connections)
        if rng.random() < 0.3:
            clear_deadline(state, connection)
            wanted.pop(connection, None)
        else:
            when = state.now + rng.choice((0.0, 0.5, 1.0, rng.uniform(0.0, 100.0)))
            set_deadline(state, connection, when)
            wanted[connection] = when
        found = {
            each: (deadline.second, index)
            for deadline in state.deadlines.values()
            for index, each in enumerate(deadline.connections)
        }
        assert {each: place[0] for each, place in found.items()} == {
            each: ceil(when) for each, when in wanted.items()
        }
        assert all(each.deadline_index == place[1] for each, place in found.items())
        assert all(deadline.connections for deadline in state.deadlines.values())
        armed = [each for each in state.timers if each.kind == KEEP_ALIVE]
        assert sorted(each.when for each in armed) == sorted(state.deadlines)


def test_a_second_with_many_deadlines_takes_several_turns() -> None:
    config = NodeConfig(partitions=4, sys_interval_s=0, connect_timeout_s=10.0)
    bench = NodeBench(config)
    state = bench.node.state
    peers = [bench.peer() for _ in range(3 * STEPS_PER_TURN)]
    state.now += 11.0
    state.steps_left = STEPS_PER_TURN
    left = [len(peers)]
    while state.timers and left[-1]:
        bench.node.tick(state.now, state.wall_us)
        bench.node.handle_timers()
        left.append(sum(peer.connection.state != CLOSED for peer in peers))
    assert left == [3 * STEPS_PER_TURN, 2 * STEPS_PER_TURN, STEPS_PER_TURN, 0]


def test_no_session_writes_into_the_table_of_all() -> None:
    with pytest.raises(TypeError, match="'t' for the table"):
        NO_SUBSCRIPTIONS["t"] = object()  # type: ignore[assignment]
    bench = NodeBench()
    subscriber = bench.connect("s")
    subscriber.send(subscribe("t", 1))
    bench.connect("p").send(publish("t", b"x", 1, 1))
    assert subscriber.payloads() == [b"x"]
    assert (len(NO_SUBSCRIPTIONS), len(NO_INFLIGHT)) == (0, 0)


class SlowPasswords(NodeBench):
    """A bench whose check of a password is answered by the test."""

    def __init__(self, config: NodeConfig) -> None:
        super().__init__(config)
        self.valid_passwords["u"] = b"right"
        self.node.state.admission.checks_passwords = True
        self.checks: list[CheckPassword] = []

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, CheckPassword):
            self.checks.append(effect)
        else:
            super()._carry_out(effect)


def test_the_keep_alive_begins_with_the_session() -> None:
    """Not with CONNECT, whose check may take longer than the keep alive."""
    config = NodeConfig(partitions=4, sys_interval_s=0, connect_timeout_s=10.0)
    bench = SlowPasswords(config)
    peer = bench.peer()
    peer.send(m.Connect(5, True, 6, "c", None, "u", b"right", {}))
    bench.advance(9.9)
    (check,) = bench.checks
    bench.node.handle_password_checked(check.connection, True)
    bench.run()
    assert isinstance(peer.received[0], m.Connack)
    bench.advance(8.9)
    assert not peer.closed
    bench.advance(0.2)
    assert peer.closed


def test_readers_go_from_client_to_client() -> None:
    """The packets of many clients, cut anywhere: each connection gets its own, in order."""
    rng = random.Random(1)
    bench = NodeBench()
    subscriber = bench.connect("s")
    subscriber.send(subscribe("t/#", 0))
    peers = [bench.connect(f"p{number}") for number in range(5)]
    inputs = [
        b"".join(encode(publish(f"t/{number}", b"%d" % each * 40), 5) for each in range(60))
        for number in range(len(peers))
    ]
    while any(inputs):
        number = rng.choice([each for each, left in enumerate(inputs) if left])
        size = rng.choice((1, 7, 50, 51, 200))
        peers[number].send_bytes(inputs[number][:size])
        inputs[number] = inputs[number][size:]
    expected = [b"%d" % each * 40 for each in range(60)]
    received = subscriber.publishes()
    for number, peer in enumerate(peers):
        topic = b"t/%d" % number
        assert [each.payload for each in received if each.topic == topic] == expected
        assert peer.connection.reader is None
