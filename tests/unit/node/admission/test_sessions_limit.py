"""How many sessions there may be, connected or not."""

from holdfast.node.config import NodeConfig
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from tests.support.node_bench import NodeBench, Peer


def reason(peer: Peer) -> int:
    (connack,) = peer.take(m.Connack)
    assert isinstance(connack, m.Connack)
    return connack.reason


def test_one_session_too_many_is_refused() -> None:
    bench = NodeBench(NodeConfig(partitions=2, sys_interval_s=0, sessions_max=3))
    for number in range(3):
        peer = bench.connect(f"c{number}", clean=False, expiry_s=1000)
        assert reason(peer) == reasons.SUCCESS
        peer.lose()
    late = bench.connect("late")
    assert reason(late) == reasons.QUOTA_EXCEEDED
    assert late.closed
    assert bench.node.state.stats.refused_quota == 1
    # A session that is there is resumed, or begun anew; its end makes room.
    assert reason(bench.connect("c0", clean=False, expiry_s=1000)) == reasons.SUCCESS
    last = bench.connect("c1")
    assert reason(last) == reasons.SUCCESS
    last.lose()
    assert reason(bench.connect("late", 4)) == reasons.SUCCESS


def test_after_a_restart_all_that_were_there_are_there() -> None:
    """A limit that was lowered takes nobody's session away."""
    bench = NodeBench(NodeConfig(partitions=2, sys_interval_s=0))
    for number in range(5):
        bench.connect(f"c{number}", clean=False, expiry_s=1000).lose()
    bench.config.sessions_max = 2
    bench.crash()
    assert len(bench.recorded().sessions) == 5
    assert reason(bench.connect("c4", clean=False, expiry_s=1000)) == reasons.SUCCESS
    assert reason(bench.connect("new")) == reasons.QUOTA_EXCEEDED
