"""What a node refuses while another node runs an older version."""

from unittest.mock import patch

from holdfast.node.admission.bans import Ban
from holdfast.node.state.ban_records import record_ban
from holdfast.protocol.mqtt import reasons
from tests.support.node_bench import NodeBench
from tests.unit.test_delayed import delay
from tests.unit.test_node_replay import subscribe


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
