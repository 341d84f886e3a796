"""Tables for all clients with a share for each of them, and queues that began in the past."""

from pathlib import Path

import pytest

from holdfast.api.routes import group_routes
from holdfast.node.admission.shares import Shares
from holdfast.node.config import NodeConfig
from holdfast.node.groups.queue_changes import QueuePromise
from holdfast.node.refusal import Rejection
from holdfast.node.state.recorded_state import FILTER_OVERHEAD_BYTES
from holdfast.node.state.session_records import QueueRecord
from holdfast.node.state.state_records import append_change
from holdfast.protocol.mqtt import packets as m
from holdfast.security.acl import AclFile
from holdfast.testing import Broker
from tests.e2e.test_admin_access import ask, made_token
from tests.support.node_bench import NodeBench, Peer, check_routing
from tests.unit.node.delivery.test_replay import drain, publish, subscribe

REASON_STRING = 0x1F
WEEK_S = 604_800
FILTER = 100
COST = FILTER + FILTER_OVERHEAD_BYTES


def login(
    bench: NodeBench,
    client: str,
    user: str | None = None,
    address: str = "test",
    expiry_s: int = WEEK_S,
) -> Peer:
    peer = Peer(bench, 5, address=address)
    bench.node.state.admission.checks_passwords = True
    password = None
    if user is not None:
        bench.valid_passwords[user] = password = b"x"
    expiry = {0x11: expiry_s}
    peer.send(m.Connect(5, False, 0, client, None, user, password, expiry))
    peer.take(m.Connack)
    return peer


def granted(peer: Peer, name: str, count: int = 1) -> int:
    """How many of so many new filters of `FILTER` bytes are granted."""
    filters = [f"{name}/{number}/".ljust(FILTER, "x") for number in range(count)]
    peer.send(m.Subscribe(3, [m.SubscriptionRequest(each, 1) for each in filters], {}))
    [answer] = peer.take(m.Suback)
    assert isinstance(answer, m.Suback)
    refused = [each for each in answer.reasons if each != 1]
    assert set(refused) <= {0x97}
    assert bool(refused) == (REASON_STRING in answer.properties)
    return len(answer.reasons) - len(refused)


@pytest.fixture
def bench() -> NodeBench:
    return NodeBench(NodeConfig(partitions=4, sys_interval_s=0, filter_bytes_max=16 * COST))


def test_no_owner_has_more_than_is_left_for_the_others() -> None:
    shares = Shares()
    for owner, most in (("a", 8), ("b", 4), ("c", 2), ("d", 1), ("e", 0)):
        found = 0
        while shares.has_room(owner, 1, 16):
            shares.change(owner, 1)
            found += 1
        assert found == most
    shares.change("a", -8)
    assert shares.has_room("e", 3, 16)
    shares.check()
    with pytest.raises(AssertionError):
        shares.change("b", -5)


def test_a_user_leaves_filters_for_others(bench: NodeBench) -> None:
    """Also with many client ids, and after a restart."""

    def begun(user: str) -> int:
        return sum(granted(login(bench, f"{user}{number}", user), user, 4) for number in range(5))

    assert [begun(user) for user in ("ann", "bob", "eve")] == [8, 4, 2]
    bench.crash()
    check_routing(bench.node.state)
    assert begun("dan") == 1
    assert begun("ann") == 8, "the present ones are granted again"
    login(bench, "ann0", "ann").send(m.Disconnect(0, {0x11: 0}))
    bench.settle()
    assert begun("eve") == 2 + 1
    check_routing(bench.node.state)


def test_anonymous_clients_of_an_address_have_one_share(bench: NodeBench) -> None:
    """While their sessions end with their connections. All others are one owner."""

    def open_at(address: str, *names: str, expiry_s: int) -> list[Peer]:
        return [login(bench, each, address=address, expiry_s=expiry_s) for each in names]

    peers = open_at("192.0.2.1", "a", "b", "c", expiry_s=0)
    assert [granted(peer, f"f{at}", 4) for at, peer in enumerate(peers)] == [4, 4, 0]
    (other,) = open_at("192.0.2.2", "other", expiry_s=0)
    assert granted(other, "g", 8) == 4
    for peer in (*peers, other):
        peer.lose()
    first, second = open_at("192.0.2.1", "d", "e", expiry_s=WEEK_S)
    assert [granted(first, "f0", 4), granted(second, "f1", 4)] == [4, 4]
    (other,) = open_at("192.0.2.2", "other", expiry_s=WEEK_S)
    assert granted(other, "g", 8) == 0
    assert granted(login(bench, "ann", "ann"), "h", 8) == 4
    second.send(m.Unsubscribe(9, [f"f1/{n}/".ljust(FILTER, "x") for n in range(4)]))
    assert granted(other, "g", 8) == 2
    check_routing(bench.node.state)


def test_a_queue_that_began_in_the_past_needs_history_of_each_member() -> None:
    """Also after a snapshot."""
    bench = NodeBench()
    state = bench.node.state
    rules = "topic readwrite #\nuser ann\ntopic readwrite #\ntopic history a/#\n"

    def open_as(client: str, user: str | None) -> Peer:
        bench.node.state.acl = AclFile.parse(rules, "acl")
        return login(bench, client, user)

    source = open_as("p", None)
    publish(bench, source, "a/1", "1", "2")
    ann, eve = open_as("ann", "ann"), open_as("eve", "eve")
    assert subscribe(eve, "$queue/a/#", "earliest").reasons == [0x87]
    assert subscribe(ann, "$queue/a/#", "earliest").reasons == [1]
    assert subscribe(eve, "$queue/a/#").reasons == [0x87]
    assert state.stats.subscriptions_denied == 1
    ann.lose()
    for snapshot in (False, True):
        bench.crash(snapshot=bench.snapshot() if snapshot else None)
        eve = open_as("eve", "eve")
        assert subscribe(eve, "$queue/a/#").reasons == [0x87]
        # One that began at the end of the log is for everybody.
        assert subscribe(eve, "$queue/a/1").reasons == [1]
    assert drain(eve) == []
    assert subscribe(open_as("ann", "ann"), "$queue/a/#").reasons == [1]


@pytest.mark.parametrize("expiry_s", [0, WEEK_S])
@pytest.mark.parametrize("first", ["ann", "eve"])
def test_history_is_needed_of_members_of_a_queue_that_is_appended_and_not_applied(
    first: str, expiry_s: int
) -> None:
    """The first record of the queue decides, although neither of them is committed."""
    bench = NodeBench()
    rules = "topic readwrite #\nuser ann\ntopic readwrite #\ntopic history a/#\n"
    bench.node.state.acl = AclFile.parse(rules, "acl")
    publish(bench, login(bench, "p"), "a/1", "1", "2")
    peers = {name: login(bench, name, name, expiry_s=expiry_s) for name in ("ann", "eve")}
    queue = m.SubscriptionRequest("$queue/a/#", 1)
    packets = {
        "ann": m.Subscribe(1, [queue], {0x26: [("stream-offset", "earliest")]}),
        "eve": m.Subscribe(1, [m.SubscriptionRequest("b/#", 1), queue], {}),
    }
    bench.auto_commit = False
    for name in sorted(peers, key=lambda each: each != first):
        peers[name].send(packets[name])
        assert peers[name].take(m.Suback) == []
    bench.auto_commit = True
    bench.settle()
    answers = {name: peer.take(m.Suback)[0] for name, peer in peers.items()}
    assert [answers[name].reasons for name in ("ann", "eve")] == (  # type: ignore[attr-defined]
        [[1], [1, 0x87]] if first == "ann" else [[1], [1, 1]]
    )
    assert bench.node.state.stats.subscriptions_denied == (first == "ann")
    assert drain(peers["eve"]) == []
    assert drain(peers["ann"]) == (["1", "2"] if first == "ann" else [])
    check_routing(bench.node.state)


def test_packets_behind_a_subscribe_wait_until_its_queue_is_committed() -> None:
    """Also if the input is resumed for another reason."""
    bench = NodeBench()
    reader = login(bench, "r")
    bench.auto_commit = False
    reader.send(m.Subscribe(1, [m.SubscriptionRequest("$queue/a/#", 1)], {}))
    reader.send(m.Unsubscribe(2, ["$queue/a/#"]))
    bench.node.handle_resumed(reader.connection)
    bench.run()
    assert reader.take() == []
    bench.auto_commit = True
    bench.settle()
    assert [type(each) for each in reader.take()] == [m.Suback, m.Unsuback]
    publish(bench, bench.connect("p"), "a/1", "1")
    assert drain(reader) == []
    assert "$share/$queue/a/#" in bench.recorded().queues


def test_a_client_that_leaves_before_its_queue_is_committed_is_no_member() -> None:
    bench = NodeBench()
    reader = bench.connect("r", expiry_s=WEEK_S)
    bench.auto_commit = False
    reader.send(m.Subscribe(1, [m.SubscriptionRequest("$queue/a/#", 1)], {}))
    reader.lose()
    bench.auto_commit = True
    bench.settle()
    session = bench.find_session("r")
    assert session is not None
    assert not session.subscriptions
    assert "$share/$queue/a/#" in bench.recorded().queues
    check_routing(bench.node.state)


def test_a_subscribe_whose_queue_is_refused_makes_no_member() -> None:
    bench = NodeBench()
    state = bench.node.state
    reader = login(bench, "r")
    bench.auto_commit = False
    # As if the leader had refused the record of another queue of the packet.
    refused = QueuePromise(reader.connection, "$share/$queue/b", "r", True)
    refused.refusal = Rejection("no room")
    reader.connection.refusals_due += 1
    end = list(state.delivered)
    append_change(state, b"$share/$queue/b", QueueRecord("$share/$queue/b", end), promise=refused)
    reader.send(m.Subscribe(1, [m.SubscriptionRequest("$queue/a/#", 1)], {}))
    bench.auto_commit = True
    bench.settle()
    assert reader.closed
    session = bench.find_session("r")
    assert session is not None
    assert not session.subscriptions
    check_routing(state)


def test_a_queue_takes_no_member_with_no_local() -> None:
    """Also after a search for its start. [MQTT-3.8.3-4]"""
    bench = NodeBench()
    for filter in ("$queue/a/#", "$stream/@-1h/$queue/a/#"):
        reader = login(bench, "r")
        reader.send(m.Subscribe(1, [m.SubscriptionRequest(filter, 1, no_local=True)], {}))
        [end] = reader.take()
        assert isinstance(end, m.Disconnect)
        assert end.reason == 0x82
        assert reader.closed
    assert not bench.recorded().queues


def test_a_replay_in_the_packet_of_a_queue_brings_each_message_once() -> None:
    """Also those that are committed while the SUBSCRIBE waits for the record of its queue."""
    bench = NodeBench()
    publisher, reader = login(bench, "p"), login(bench, "r")
    publish(bench, publisher, "a/1", "1", "2")
    assert drain(reader) == []
    bench.auto_commit = False
    publisher.send(m.Publish(b"a/1", b"3", 1, False, False, 99, b"", 0, -1))
    filters = ("$stream/@earliest/a/#", "$queue/b/#")
    reader.send(m.Subscribe(1, [m.SubscriptionRequest(each, 1) for each in filters], {}))
    publisher.send(m.Publish(b"a/1", b"4", 1, False, False, 98, b"", 0, -1))
    bench.auto_commit = True
    bench.settle()
    [suback] = reader.take(m.Suback)
    assert suback == m.Suback(1, [1, 1])
    publish(bench, publisher, "a/1", "5")
    assert drain(reader) == ["1", "2", "3", "4", "5"]
    check_routing(bench.node.state)


def test_a_reader_leaves_consumer_groups_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_routes, "GROUPS_MAX", 8)
    tokens = {
        name: made_token(tmp_path, role)
        for name, role in (("ann", "reader"), ("bob", "reader"), ("boss", "operator"))
    }

    def begun(name: str, count: int = 8) -> int:
        """How many of so many groups a caller begins."""
        found = 0
        for number in range(count):
            path = f"/api/v1/log/group?group={name}{number}"
            reply = ask(broker.admin_port, "POST", path, tokens[name], {"offsets": [[0, 0]]})
            assert reply.status in (200, 409), reply.json
            found += reply.status == 200
        return found

    with Broker(data=tmp_path, admin=True) as broker:
        assert [begun(name) for name in ("ann", "bob", "ann")] == [4, 2, 4]
        assert begun("boss") == 2
        assert begun("ann", 4) == 4, "a group that is there goes on"
