"""What a session's own state tells of records that it has from a shared group."""

import random

import pytest

from holdfast.log.journal.journal import Journal
from holdfast.log.record import CURSOR, FLAG_AUDIENCE, MESSAGE, SESSION, Record
from holdfast.node.config import NodeConfig
from holdfast.node.delivery.log_replay import message_of
from holdfast.node.delivery.transmission import send_inflight
from holdfast.node.groups.group_state import Coordination
from holdfast.node.groups.next_node import NodeLoad
from holdfast.node.node_state import ClusterPort
from holdfast.node.session.audience import Audience, encode_audience
from holdfast.node.session.connection import OPEN, Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.message import Message
from holdfast.node.session.session import Group, Inflight, Session, Subscription, tag_of
from holdfast.node.session.state import decode_cursor, encode_cursor
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import EndRecord, OpenRecord, encode_session
from tests.support.journal_port import new_state


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_record_of_a_group_is_no_state_of_the_session(is_shared: bool) -> None:
    """The group gives it again if the member's node is lost; the session must not send it too."""
    state = new_state(NodeConfig(partitions=1), Journal(1, replicated=True))
    state.cluster = ClusterPort()
    session = Session("c")
    session.expiry_s = 60
    session.inflight_max = 10
    session.connection = Connection(1 << 20, "", ListenerRules(""))
    session.connection.state = OPEN
    message = Message(b"t", b"payload", 1, False, b"", -1, 0, b"p")
    message.partition = 0
    group = Group("$share/g/t", "t") if is_shared else None
    assert send_inflight(state, session, message, 1, False, None, False, group)
    assert len(session.inflight) == 1
    assert (session.changes is None) == is_shared


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
    for packet_id, entry in decode_cursor(encode_cursor([], dict(entries), [])).inflight:
        images._set_inflight(session, packet_id, entry)
    assert [entry.is_retained for entry in session.inflight.values()] == [False, True, False]
    kept = [images.groups.kept_by_sessions(group.key) for group in groups]
    assert kept == [{(0, 7)}, set(), set()]
    assert images.has_inflight("c", groups[0].tag, (0, 7))
    assert not images.has_inflight("c", groups[1].tag, (0, 7))
    assert not images.has_inflight("c", groups[0].tag, (0, 5))


@pytest.mark.parametrize("seed", range(20))
def test_who_keeps_records_of_a_group_is_known_without_its_members(seed: int) -> None:
    chance = random.Random(seed)
    images = ReplicatedState(RecordedState(NodeConfig(partitions=1), Journal(1, replicated=True)))
    keys = ["$share/g/t", "$share/h/t"]

    def apply(kind: int, client_id: str, epoch: int, payload: bytes) -> None:
        key = client_id.encode()
        images.apply(Record(0, kind, client_id=key, sequence=epoch, payload=payload))

    for epoch in range(1, 300):
        client_id = chance.choice("abc")
        if chance.random() < 0.2:
            opened = OpenRecord(client_id, epoch, 9, chance.random() < 0.3, None)
            record = chance.choice((opened, EndRecord(client_id)))
            apply(SESSION, client_id, epoch, encode_session(record))
        else:
            entry = Inflight(0, chance.randrange(9), chance.choice((1, 2)), False)
            entry.group_tag = chance.choice((0, *map(tag_of, keys)))
            changes = {chance.randrange(1, 5): entry if chance.random() < 0.7 else None}
            apply(CURSOR, client_id, epoch, encode_cursor([], changes, []))
        for key in keys:
            assert images.groups.kept_by_sessions(key) == {
                (entry.partition, entry.offset)
                for session in images.state.sessions.values()
                for entry in session.inflight.values()
                if entry.qos == 2 and entry.group_tag == tag_of(key)
            }


def test_a_coordinator_that_reads_the_log_respects_the_audience() -> None:
    """The coordinator respects it as it does while it follows the end of the log."""
    journal = Journal(1, replicated=True)
    config = NodeConfig(partitions=1)
    key = "$share/g/t"
    audiences = {
        "none": None,
        "ours": Audience(True, [key, "$share/h/t"]),
        "others": Audience(True, ["$share/h/t"]),
        "nobody": Audience(False, ()),
    }
    coordination = Coordination(key, 0, 1, new_state(config, journal))
    coordination.cursor.positions = [0]
    coordination.cursor.start_read()
    records = []
    for offset, (name, audience) in enumerate(audiences.items()):
        record = Record(0, MESSAGE, flags=1, topic=b"t", payload=name.encode())
        record.offset = offset
        if audience is not None:
            record.flags |= FLAG_AUDIENCE
            record.audience = encode_audience(audience)
        records.append(record)
    coordination.handle_read(coordination.cursor, records, [len(records)], True)
    assert coordination.cursor.outbox is not None
    received = [each.message.payload.decode() for each in coordination.cursor.outbox]
    assert received == ["none", "ours"]


@pytest.mark.parametrize("way", ["tail", "read", "overflow"])
def test_a_coordinator_that_lags_hands_out_nothing_that_the_log_has_as_finished(way: str) -> None:
    """Its log ends at 5, and an earlier coordinator has finished the records below 7."""
    journal = Journal(1, replicated=True)
    state = new_state(NodeConfig(partitions=1), journal)
    images = ReplicatedState(RecordedState(NodeConfig(partitions=1), journal))
    key = "$share/g/t"
    payload = encode_cursor([(0, 7)], {}, [])
    images.apply(Record(0, CURSOR, client_id=key.encode(), sequence=1, payload=payload))
    state.delivered[0] = 5
    coordination = Coordination(key, 0, 2, state)
    coordination.open(list(images.group_positions[key]), images.groups)
    coordination.is_certain = True
    coordination.read()
    coordination.handle_read(coordination.cursor, [], [5], True)
    assert coordination.positions() == [7]
    if way == "overflow":
        coordination.cursor.fall_behind(state.delivered)
    for offset in range(5, 9):
        record = Record(0, MESSAGE, flags=2, topic=b"t", payload=b"%d" % offset)
        record.offset = offset
        if way == "tail":
            coordination.tail(message_of(record))
        else:
            coordination.cursor.start_read()
            coordination.handle_read(coordination.cursor, [record], [offset + 1], offset == 8)
        state.delivered[0] = offset + 1
        assert coordination.positions() == [7]
    assert coordination.cursor.outbox is not None
    assert [each.message.offset for each in coordination.cursor.outbox] == [7, 8]


def test_a_doubtful_record_that_a_session_has_finished_is_not_assigned_again() -> None:
    """The group is opened while a node that was lost may have it, and the log shows that a session
    keeps it. The session finishes it before the doubt ends."""
    journal = Journal(1, replicated=True)
    images = ReplicatedState(RecordedState(NodeConfig(partitions=1), journal))
    state = new_state(NodeConfig(partitions=1), journal)
    state.delivered[0] = 9
    key = "$share/g/t"
    place = (0, 7)
    coordination = Coordination(key, 0, 2, state)
    stake = coordination.weights.of("n2", NodeLoad())
    coordination.holders.hold(stake, place, 0)
    coordination.mark_doubtful([place], 3, "n2")
    for epoch, change in ((1, Inflight(0, 7, 2, False)), (2, None)):
        if change is not None:
            opened = encode_session(OpenRecord("c", epoch, 9, False, None, owner="n2"))
            images.apply(Record(0, SESSION, client_id=b"c", sequence=epoch, payload=opened))
            change.group_tag = tag_of(key)
        payload = encode_cursor([], {1: change}, [])
        images.apply(Record(0, CURSOR, client_id=b"c", sequence=1, payload=payload))
        if change is not None:
            payload = encode_cursor([(0, 5)], {}, [])
            images.apply(Record(0, CURSOR, client_id=key.encode(), sequence=1, payload=payload))
            coordination.open(list(images.group_positions[key]), images.groups)
            coordination.check()
    kept = images.groups.kept_by_sessions(key)
    assert kept == set()
    coordination.resolve_doubtful({(3, "n2")}, kept)
    assert place not in coordination.to_assign
    coordination.check()
