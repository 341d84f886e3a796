"""Sessions with the name of a shared group: no client may have one, and the records that older
versions wrote for one never move the group."""

import json

import pytest

from holdfast.log import record as log_record
from holdfast.log.journal.journal import Journal
from holdfast.log.record import Record
from holdfast.node.config import NodeConfig
from holdfast.node.session.state import encode_cursor
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.recovery import Recovery
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.snapshot_entries import SNAPSHOT_SESSION
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.publish import Publish
from tests.support.node_bench import NodeBench

GROUP = "$share/g/x"


@pytest.mark.parametrize("client_id", [GROUP, "$share/", "$share/g"])
def test_such_a_client_is_refused(client_id: str) -> None:
    bench = NodeBench()
    peer = bench.connect(client_id, expiry_s=1000)
    (answer,) = peer.take()
    assert isinstance(answer, m.Connack)
    assert answer.reason == reasons.CLIENT_IDENTIFIER_NOT_VALID
    assert peer.closed
    assert client_id not in bench.node.state.sessions
    other = bench.connect("$shared", expiry_s=1000)
    (answer,) = other.take()
    assert isinstance(answer, m.Connack)
    assert answer.reason == 0


@pytest.mark.parametrize("client_id", ["$api-", "$api-0123", "admin:", "admin:user ada"])
def test_a_client_with_a_name_of_the_admin_port_is_refused(client_id: str) -> None:
    """No list would show it, or it would publish under the name of an operator."""
    bench = NodeBench()
    (answer,) = bench.connect(client_id).take()
    assert isinstance(answer, m.Connack)
    assert answer.reason == reasons.CLIENT_IDENTIFIER_NOT_VALID
    (answer,) = bench.connect("admin").take()
    assert isinstance(answer, m.Connack)
    assert answer.reason == 0


def opened(epoch: int) -> dict[str, object]:
    return {
        "op": "open",
        "client": GROUP,
        "epoch": epoch,
        "expiry_s": 99,
        "clean": True,
        "username": None,
    }


def session_record(fields: dict[str, object], epoch: int) -> Record:
    return Record(
        0,
        log_record.SESSION,
        client_id=GROUP.encode(),
        sequence=epoch,
        payload=json.dumps(fields).encode(),
    )


def cursor(offset: int, epoch: int) -> Record:
    return Record(
        0,
        log_record.CURSOR,
        client_id=GROUP.encode(),
        sequence=epoch,
        payload=encode_cursor([(1, offset)], {}, []),
    )


def new_recovery() -> Recovery:
    """The recovery of a directory of the single form, before its adoption."""
    return Recovery(RecordedState(NodeConfig(partitions=4), Journal(4)))


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_its_records_do_not_move_the_group(with_snapshot: bool) -> None:
    recovery = new_recovery()
    if with_snapshot:
        entry = opened(3) | {"disconnected_us": 0, "open": False, "subscriptions": []}
        entry |= {"inbound": [], "cursor": ""}
        recovery.apply_snapshot_entry(SNAPSHOT_SESSION, json.dumps(entry).encode())
    else:
        recovery.apply(session_record(opened(3), 3))
    recovery.apply(cursor(5, 0))
    recovery.apply(cursor(900, 3))
    assert recovery.group_positions[GROUP][1] == 5
    recovery.apply(
        session_record({"op": "close", "client": GROUP, "expiry_s": 9, "will": False}, 3)
    )
    recovery.apply(session_record({"op": "end", "client": GROUP}, 3))
    recovery.apply(cursor(6, 0))
    assert recovery.group_positions[GROUP][1] == 6
    assert recovery.damaged == 0
    assert recovery.state.sessions == {}


def test_its_records_do_not_move_the_group_in_a_cluster() -> None:
    state = RecordedState(NodeConfig(partitions=4), Journal(4, replicated=True))
    images = ReplicatedState(state)
    images.apply(cursor(5, 2))
    images.apply(session_record(opened(7), 7))
    images.apply(cursor(900, 7))
    images.apply(cursor(6, 2))
    assert images.groups.positions[GROUP][1] == 6
    assert state.sessions == {}


def test_a_member_gets_everything_after_a_kill() -> None:
    """End to end: somebody tries to take the group's position."""
    bench = NodeBench()
    member = bench.connect("member", expiry_s=1000)
    member.send(m.Subscribe(1, [m.SubscriptionRequest(GROUP, 1)]))
    member.lose()
    evil = bench.connect(GROUP, expiry_s=1000)
    evil.send(m.Subscribe(1, [m.SubscriptionRequest("x", 1)]))
    publisher = bench.connect("p")
    for number in range(5):
        payload = b"m%d" % number
        publisher.send(Publish(b"x", payload, 1, False, False, number + 1, b"", 0, -1))
    bench.advance(1)
    bench.crash(keep_uncommitted=True)
    member = bench.connect("member", clean=False, expiry_s=1000)
    assert sorted(member.payloads()) == [b"m%d" % number for number in range(5)]
