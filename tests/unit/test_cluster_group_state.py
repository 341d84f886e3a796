"""What a session's own state tells of records that it has from a shared group."""

import pytest

from holdfast.broker.cluster_port import ClusterPort
from holdfast.broker.config import NodeConfig
from holdfast.broker.delivery.transmission import send_inflight
from holdfast.broker.recorded_state import RecordedState
from holdfast.broker.session.connection import OPEN, Connection
from holdfast.broker.session.listener_rules import ListenerRules
from holdfast.broker.session.message import Message
from holdfast.broker.session.session import Group, Inflight, Session, Subscription
from holdfast.broker.session.state import decode_cursor, encode_cursor
from holdfast.broker.state import NodeState
from holdfast.cluster.state.replicated import ReplicatedState
from holdfast.storage.journal.journal import Journal


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
        state.cluster = ClusterPort()
    session = Session("c")
    session.expiry_s = 60
    session.connection = Connection(1 << 20, "", ListenerRules(""))
    session.connection.state = OPEN
    message = Message(b"t", b"payload", 1, False, b"", -1, 0, b"p")
    message.partition = 0
    group = Group("$share/g/t", "t") if is_shared else None
    assert send_inflight(state, session, message, 1, False, None, False, group)
    assert len(session.inflight) == 1
    assert (session.changes is not None) == is_told


def test_the_log_says_which_group_has_given_a_record() -> None:
    """Not so of what the session has by a subscription of its own that matches as well, or by
    another group: it may not have been given the group's copy."""
    images = ReplicatedState(RecordedState(NodeConfig(partitions=1), Journal(1, replicated=True)))
    state = images.state
    session = Session("c")
    state.sessions["c"] = session
    groups = [Group("g", "t"), Group("h", "t"), Group("g", "+")]
    assert len({group.tag for group in groups}) == len(groups)
    for group in groups:
        group.members[session] = Subscription(session, group.key, 2, False, False, 0, 0)
        state.groups[group.key] = group
    given = Inflight(0, 7, 2, False)
    given.group_tag = groups[0].tag
    entries = {1: Inflight(0, 5, 2, False), 2: Inflight(0, 6, 2, True), 3: given}
    session.inflight = {
        packet_id: entry
        for packet_id, entry in decode_cursor(encode_cursor([], dict(entries), [])).inflight
        if entry is not None
    }
    assert [entry.is_retained for entry in session.inflight.values()] == [False, True, False]
    kept = [images.groups.kept_by_members(group.key) for group in groups]
    assert kept == [{(0, 7)}, set(), set()]
    assert images.has_inflight("c", groups[0].tag, (0, 7))
    assert not images.has_inflight("c", groups[1].tag, (0, 7))
    assert not images.has_inflight("c", groups[0].tag, (0, 5))
