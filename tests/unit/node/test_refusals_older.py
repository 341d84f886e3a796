"""What a node refuses while another node runs an older version."""

from unittest.mock import patch

from holdfast.log.record import FLAG_AUDIENCE, FLAG_RETAIN
from holdfast.node.admission.bans import Ban
from holdfast.node.session.audience import user_in
from holdfast.node.state.ban_records import record_ban
from holdfast.protocol.mqtt import reasons
from tests.support.node_bench import NodeBench
from tests.unit.node.admission.test_shares import login
from tests.unit.node.delivery.test_replay import subscribe
from tests.unit.node.delivery.test_retained_shares import GREEDY, is_retained
from tests.unit.node.publish.test_delayed import delay


def test_what_an_older_node_cannot_apply_is_refused() -> None:
    bench = NodeBench()
    outcomes: list[str] = []
    client = bench.connect("c")
    text = "the version of n2 has none: upgrade all nodes first"
    state = bench.node.state
    with patch.object(state.cluster, "older_nodes", lambda feature: text):
        record_ban(state, Ban("client", "x", 0), outcomes.append)
        [refused] = delay(client, "$delayed/5/a", "x")
        suback = subscribe(client, "$queue/a")
    assert outcomes == [text]
    assert getattr(refused, "reason", 0) == reasons.QUOTA_EXCEEDED
    assert suback.reasons == [reasons.QUOTA_EXCEEDED]
    assert len(bench.node.state.delayed) == len(bench.node.state.queues) == 0
    assert subscribe(client, "$queue/a").reasons == [1]


def test_older_nodes_get_no_name() -> None:
    """Their shared groups would not receive the message."""
    bench = NodeBench()
    state = bench.node.state
    peer = login(bench, "g1", GREEDY)
    with patch.object(state.cluster, "older_nodes", lambda feature: feature):
        assert is_retained(peer, "a")
    assert is_retained(peer, "b")
    retained = [record for record in bench.messages() if record.flags & FLAG_RETAIN]
    found = [(record.flags & FLAG_AUDIENCE, user_in(record.audience)) for record in retained]
    assert found == [(0, b""), (FLAG_AUDIENCE, GREEDY.encode())]
    # The first one is the client's.
    topics = bench.recorded().retained.topics
    assert topics.of(GREEDY) == topics.of("\0g1") == 1
