"""What a session's own state tells of records that it has from a shared group."""

import pytest

from holdfast.log.journal import Journal
from holdfast.node.config import NodeConfig
from holdfast.node.delivery import send_inflight
from holdfast.node.state import Cluster, Group, NodeState
from holdfast.session.connection import OPEN, Connection
from holdfast.session.message import Message
from holdfast.session.session import Session


@pytest.mark.parametrize(
    ("is_clustered", "is_shared", "is_told"),
    [(True, True, False), (True, False, True), (False, True, True)],
)
def test_in_a_cluster_a_record_of_a_group_is_no_state_of_the_session(
    is_clustered: bool, is_shared: bool, is_told: bool
) -> None:
    """The group gives it again if the member's node is lost; the session must not send it too."""
    state = NodeState(NodeConfig(partitions=1), Journal(1, replicated=is_clustered))
    if is_clustered:
        state.cluster = Cluster()
    session = Session("c", b"c")
    session.expiry_s = 60
    session.connection = Connection(1 << 20, "", "")
    session.connection.state = OPEN
    message = Message(b"t", b"payload", 1, False, b"", -1, 0, b"p")
    message.partition = 0
    group = Group("$share/g/t", "t") if is_shared else None
    assert send_inflight(state, session, message, 1, False, (), False, group)
    assert len(session.inflight) == 1
    assert (session.changes is not None) == is_told
