"""A client connects again through another process: what it has sent before comes first."""

from holdfast.node.connections.connect import handle_drained
from holdfast.node.effects import DrainOlder
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from tests.support.node_bench import NodeBench, Peer


class DrainingBench(NodeBench):
    """A bench whose older connections have input in another process, until the test drains it."""

    def __init__(self) -> None:
        self.drains: list[DrainOlder] = []
        super().__init__()

    def _carry_out(self, effect: object) -> None:
        if isinstance(effect, DrainOlder):
            self.drains.append(effect)
        else:
            super()._carry_out(effect)

    def connect(self, *, is_remote: bool = True) -> Peer:
        peer = self.peer()
        peer.connection.is_remote = is_remote
        will = m.Will("gone", b"", 0, False)
        peer.send(m.Connect(5, False, 0, "again", will, None, None, {17: 1000}))
        return peer

    def finish_drain(self) -> None:
        handle_drained(self.node.state, self.drains.pop(0))
        self.run()


def watched(bench: NodeBench) -> Peer:
    watcher = bench.peer()
    watcher.send(m.Connect(5, True, 0, "watcher", None, None, None, {}))
    watcher.send(m.Subscribe(1, [m.SubscriptionRequest("#", 0)]))
    watcher.take()
    return watcher


def accepted(peer: Peer) -> bool:
    return [each.reason for each in peer.take(m.Connack)] == [0]  # type: ignore[attr-defined]


def test_what_a_client_has_sent_comes_before_its_next_connection() -> None:
    bench = DrainingBench()
    watcher = watched(bench)
    older = bench.connect()
    assert accepted(older)
    newer = bench.connect()
    assert not newer.received
    assert not older.closed
    older.send_bytes(b"\x30\x04\x00\x01t\x00" + b"\xe0\x00")
    assert older.closed
    older.lose()
    bench.finish_drain()
    assert accepted(newer)
    assert [each.topic for each in watcher.publishes()] == [b"t"]
    assert bench.node.state.stats.sessions_taken_over == 0


def test_a_client_that_is_still_connected_is_taken_over() -> None:
    bench = DrainingBench()
    older = bench.connect()
    newer = bench.connect()
    bench.finish_drain()
    assert accepted(newer)
    assert older.closed
    assert not bench.drains
    newer.send(m.Pingreq())
    assert len(newer.take(m.Pingresp)) == 1


def test_a_connection_that_came_between_is_drained_too() -> None:
    bench = DrainingBench()
    bench.connect()
    second, third = bench.connect(), bench.connect()
    bench.finish_drain()
    assert accepted(second)
    bench.finish_drain()
    assert not third.received
    assert [each.older for each in bench.drains] == [second.connection]
    bench.finish_drain()
    assert accepted(third)
    assert second.closed


def test_a_client_that_has_gone_takes_nothing_over() -> None:
    bench = DrainingBench()
    older = bench.connect()
    bench.connect().lose()
    bench.finish_drain()
    assert not older.closed
    assert bench.node.state.stats.sessions_taken_over == 0


def test_a_refusal_needs_no_drain() -> None:
    bench = DrainingBench()
    older = bench.connect()
    assert accepted(older)
    bench.node.state.closing = True
    (refusal,) = bench.connect().take(m.Connack)
    assert isinstance(refusal, m.Connack)
    assert refusal.reason == reasons.SERVER_UNAVAILABLE
    assert not bench.drains


def test_sockets_of_one_process_need_no_drain() -> None:
    bench = DrainingBench()
    older = bench.connect(is_remote=False)
    assert accepted(bench.connect(is_remote=False))
    assert older.closed
    assert not bench.drains
