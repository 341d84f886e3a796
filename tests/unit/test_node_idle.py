"""An idle client, and the parts of its connection that exist only while they are needed."""

import random

import pytest

from holdfast.broker.config import NodeConfig
from holdfast.broker.effects import CheckPassword, Effect
from holdfast.broker.session.session import NO_INFLIGHT, NO_SUBSCRIPTIONS
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.encode import encode
from tests.support.node_bench import NodeBench
from tests.unit.test_node_publish import publish, subscribe


def test_an_idle_client_has_one_timer_and_no_buffers() -> None:
    bench = NodeBench()
    peers = [bench.connect(f"c{number}", keep_alive_s=60) for number in range(50)]
    # A client that was busy is idle again, too.
    peers[0].send(publish("t", b"x", 1, 1), m.Pingreq())
    state = bench.node.state
    assert len(state.timers) == len(peers)
    for peer in peers:
        session = peer.connection.session
        assert session is not None
        assert peer.connection.reader is None
        assert peer.connection.out is None
        assert session.subscriptions is NO_SUBSCRIPTIONS
        assert session.inflight is NO_INFLIGHT
    # The timer of CONNECT is due first, then those of the keep alive.
    bench.advance(bench.config.connect_timeout_s + 1)
    assert len(state.timers) == len(peers)
    for peer in peers[1:]:
        peer.send(m.Pingreq())
    bench.advance(90 - bench.config.connect_timeout_s)
    assert [peer for peer in peers if peer.closed] == peers[:1]
    bench.advance(bench.config.connect_timeout_s)
    assert all(peer.closed for peer in peers)
    assert state.timers == []


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
