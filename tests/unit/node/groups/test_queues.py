"""Queues, which outlive their members, on one node without sockets and files."""

import pytest

from holdfast.node.config import NodeConfig
from holdfast.node.groups.queue_changes import create_queue, delete_queue
from holdfast.node.node import mount_filters
from holdfast.node.state.retention_pins import pins_of
from holdfast.protocol.mqtt import packets as m
from holdfast.security.acl import AclFile
from tests.support.node_bench import NodeBench, check_routing
from tests.unit.node.delivery.test_replay import drain, publish, subscribe

KEY = "$share/$queue/a/#"
REASON_STRING = 0x1F


@pytest.fixture
def bench() -> NodeBench:
    return NodeBench()


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("version", [4, 5])
def test_what_arrives_without_members_is_kept(bench: NodeBench, qos: int, version: int) -> None:
    publisher = bench.connect("p")
    first = bench.connect("r", version=version)
    assert subscribe(first, "$queue/a/#", qos=qos).reasons == [qos]
    publish(bench, publisher, "a/1", "1", qos=qos)
    assert drain(first) == ["1"]
    first.send(m.Disconnect(0, {}))
    first.lose()
    publish(bench, publisher, "a/1", "2", "3", qos=qos)
    bench.advance(10)
    second = bench.connect("s", version=version)
    subscribe(second, "$queue/a/#", qos=qos)
    assert drain(second) == ["2", "3"]
    publish(bench, publisher, "a/2", "4", qos=qos)
    assert drain(second) == ["4"]
    check_routing(bench.node.state)


def test_it_outlives_a_crash_and_a_snapshot(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    reader = bench.connect("r")
    subscribe(reader, "$queue/a/#")
    publish(bench, publisher, "a/1", "1", "2")
    assert drain(reader) == ["1", "2"]
    reader.lose()
    bench.advance(10)
    publish(bench, publisher, "a/1", "3")
    bench.crash()
    assert list(bench.recorded().queues) == [KEY]
    bench.crash(snapshot=bench.snapshot())
    publisher = bench.connect("p")
    publish(bench, publisher, "a/1", "4")
    reader = bench.connect("r")
    subscribe(reader, "$queue/a/#")
    assert drain(reader) == ["3", "4"]
    check_routing(bench.node.state)


def test_members_share_it_and_what_one_leaves_goes_to_another(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    one, two = bench.connect("1"), bench.connect("2")
    subscribe(one, "$queue/a/#")
    subscribe(two, "$queue/a/#")
    publish(bench, publisher, "a/1", "1", "2", "3", "4")
    got = [each.payload.decode() for each in one.publishes()]
    others = drain(two)
    assert len(got) == len(others) == 2
    one.lose()
    assert sorted(got + others) == ["1", "2", "3", "4"]
    assert drain(two) == got


@pytest.mark.parametrize("form", ["property", "filter"])
def test_it_begins_in_the_past_once(bench: NodeBench, form: str) -> None:
    publisher = bench.connect("p")
    publish(bench, publisher, "a/1", "1", "2")
    for expected in (["1", "2"], []):
        reader = bench.connect("r")
        if form == "property":
            answer = subscribe(reader, "$queue/a/#", "earliest")
        else:
            answer = subscribe(reader, "$stream/@-1h/$queue/a/#")
        assert answer.reasons == [1]
        assert drain(reader) == expected
        reader.lose()
    publish(bench, publisher, "a/1", "3")
    bench.crash()
    reader = bench.connect("r")
    subscribe(reader, "$queue/a/#", "earliest")
    assert drain(reader) == ["3"]


def test_a_start_survives_a_crash_before_the_first_message(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    publish(bench, publisher, "a/1", "1", "2")
    reader = bench.connect("r")
    bench.delay_reads = True
    subscribe(reader, "$queue/a/#", "earliest")
    bench.delay_reads = False
    bench.crash()
    reader = bench.connect("r")
    subscribe(reader, "$queue/a/#", "latest")
    assert drain(reader) == ["1", "2"]


def test_two_that_begin_it_at_once_begin_it_once(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    publish(bench, publisher, "a/1", "1")
    one, two = bench.connect("1"), bench.connect("2")
    bench.auto_commit = False
    one.send(
        m.Subscribe(
            1,
            [m.SubscriptionRequest("$queue/a/#", 1)],
            {0x26: [("stream-offset", "earliest")]},
        )
    )
    two.send(m.Subscribe(1, [m.SubscriptionRequest("$queue/a/#", 1)], {}))
    assert one.take(m.Suback) == two.take(m.Suback) == []
    bench.auto_commit = True
    bench.settle()
    assert sorted(drain(one) + drain(two)) == ["1"]
    bench.crash()
    reader = bench.connect("r")
    subscribe(reader, "$queue/a/#")
    publish(bench, bench.connect("p"), "a/1", "2")
    assert drain(reader)[-1:] == ["2"]


def test_nobody_has_the_suback_before_the_log(bench: NodeBench) -> None:
    reader = bench.connect("r")
    bench.auto_commit = False
    reader.send(m.Subscribe(1, [m.SubscriptionRequest("$queue/a/#", 1)], {}))
    assert reader.take(m.Suback) == []
    bench.crash()
    assert bench.recorded().queues == {}
    assert bench.node.state.groups == {}


def test_bad_starts_are_refused(bench: NodeBench) -> None:
    reader = bench.connect("r")
    for filter, start, reason, text in (
        ("$queue/a/#", "last:3", 0x83, "a queue begins at a time or at offsets"),
        ("$queue/a/#", "never", 0x83, "is not one"),
        ("$queue/a/#/b", "earliest", 0x8F, "must be the last"),
        ("$queue/", "", 0x8F, "no filter after the group name"),
        ("$stream/@earliest/$queue/", "", 0x8F, "no filter after the group name"),
    ):
        answer = subscribe(reader, filter, start)
        assert answer.reasons == [reason], filter
        assert filter == "$queue/" or text in str(answer.properties[REASON_STRING])
    assert bench.recorded().queues == {}


def test_bounds_and_rights() -> None:
    bench = NodeBench(NodeConfig(partitions=4, sys_interval_s=0, queues_max=1))
    bench.node.state.acl = AclFile.parse("topic read a/#\ntopic readwrite b/#\n", "acl")
    publish(bench, bench.connect("p"), "b/1", "1")
    reader = bench.connect("r")
    answer = subscribe(reader, "$queue/a/#", "earliest")
    assert answer.reasons == [0x87]
    assert subscribe(reader, "$queue/a/#").reasons == [1]
    answer = subscribe(reader, "$queue/b/#")
    assert answer.reasons == [0x97]
    assert answer.properties[REASON_STRING] == "there are 1 queues, which is the limit"
    assert subscribe(reader, "$queue/a/#").reasons == [1]


def test_a_user_leaves_queues_for_others() -> None:
    """Also with many client ids, and after a restart."""
    bench = NodeBench(NodeConfig(partitions=4, sys_interval_s=0, queues_max=16))

    def begun(user: str) -> int:
        """The queues that a user begins with a client id for each."""
        bench.node.state.admission.checks_passwords = True
        bench.valid_passwords[user] = b"x"
        found = 0
        for number in range(20):
            peer = bench.peer()
            peer.send(m.Connect(5, True, 0, f"{user}{number}", None, user, b"x", {}))
            peer.take(m.Connack)
            answer = subscribe(peer, f"$queue/{user}/{number}")
            found += answer.reasons == [1]
            if answer.reasons != [1]:
                assert "room for all others" in str(answer.properties[REASON_STRING])
            peer.lose()
        return found

    assert [begun(user) for user in ("ann", "bob", "eve")] == [8, 4, 2]
    bench.crash()
    assert [begun(user) for user in ("dan", "ann")] == [1, 8]
    owners = [keeper.username for keeper in bench.recorded().queues.values()]
    assert {user: owners.count(user) for user in owners} == {"ann": 8, "bob": 4, "eve": 2, "dan": 1}


def test_a_member_that_may_read_nothing_does_not_empty_it(bench: NodeBench) -> None:
    bench.node.state.acl = AclFile.parse("topic write a/#\npattern read a/%c\n", "acl")
    publisher = bench.connect("p")
    stranger = bench.connect("stranger")
    subscribe(stranger, "$queue/a/#")
    publish(bench, publisher, "a/worker", "1", "2")
    publish(bench, publisher, "a/stranger", "3")
    assert drain(stranger) == ["3"]
    stranger.lose()
    publish(bench, publisher, "a/worker", "4")
    assert bench.node.state.stats.dropped_unreadable == 0
    worker = bench.connect("worker")
    subscribe(worker, "$queue/a/#")
    assert drain(worker) == ["1", "2", "4"]


def test_unsubscribe_leaves_the_queue_and_deletion_ends_it(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    reader = bench.connect("r", expiry_s=100)
    subscribe(reader, "$queue/a/#")
    reader.send(m.Unsubscribe(9, ["$queue/a/#"]))
    answer = reader.take(m.Unsuback)[0]
    assert isinstance(answer, m.Unsuback)
    assert answer.reasons == [0]
    publish(bench, publisher, "a/1", "1")
    state = bench.node.state
    assert [pin.name for pin in pins_of(bench.recorded(), None)] == [KEY]
    assert state.client_sessions() == 2
    outcomes: list[str] = []
    delete_queue(state, KEY, outcomes.append)
    bench.settle()
    assert outcomes == [""]
    assert not state.groups
    assert not bench.recorded().queues
    assert bench.find_session(KEY) is None
    check_routing(state)
    # The coordinator ends the group.
    bench.advance(1)
    bench.crash()
    assert not bench.node.state.groups
    reader = bench.connect("r")
    subscribe(reader, "$queue/a/#")
    assert drain(reader) == []


def test_an_old_position_does_not_come_back(bench: NodeBench) -> None:
    """The next queue of the same filter has its own start, after a crash as well."""
    publisher = bench.connect("p")
    reader = bench.connect("r")
    subscribe(reader, "$queue/a/#", qos=2)
    publish(bench, publisher, "a/1", "1", "2", qos=2)
    assert drain(reader) == ["1", "2"]
    reader.lose()
    bench.advance(10)
    delete_queue(bench.node.state, KEY, lambda text: None)
    bench.settle()
    reader = bench.connect("r")
    bench.delay_reads = True
    subscribe(reader, "$queue/a/#", "earliest", qos=2)
    bench.delay_reads = False
    bench.crash()
    reader = bench.connect("r")
    subscribe(reader, "$queue/a/#", qos=2)
    assert drain(reader) == ["1", "2"]


def test_a_mount_stays_in_front(bench: NodeBench) -> None:
    packet = m.Subscribe(
        1,
        [
            m.SubscriptionRequest("$queue/a/#", 1),
            m.SubscriptionRequest("$stream/@-1h/$queue/a/#", 1),
            m.SubscriptionRequest("$stream/a/#", 1),
        ],
        {},
    )
    mount_filters(packet, "m/")
    assert [each.filter for each in packet.subscriptions] == [
        "$share/$queue/m/a/#",
        "$stream/@-1h/$share/$queue/m/a/#",
        "$stream/m/a/#",
    ]


def test_a_subscribe_begins_each_of_its_queues_once() -> None:
    """What the longest one costs is in `bench.worst_packet`."""
    bench = NodeBench(NodeConfig(partitions=4, sys_interval_s=0, queues_max=1))
    reader = bench.connect("r")
    for filters in (["$queue/a"] * 5000, [f"$queue/{number}" for number in range(2500)]):
        reader.send(m.Subscribe(1, [m.SubscriptionRequest(each, 1) for each in filters], {}))
    assert list(bench.recorded().queues) == ["$share/$queue/a"]


@pytest.mark.parametrize("crashes", ["before", "after"])
def test_a_crash_after_a_deletion_brings_no_old_message_back(
    bench: NodeBench, crashes: str
) -> None:
    """The log has the end of the queue, and not yet the one of its group, and perhaps the beginning
    of the next queue."""
    publisher = bench.connect("p")
    reader = bench.connect("r")
    subscribe(reader, "$queue/a/#")
    publish(bench, publisher, "a/1", "1")
    assert drain(reader) == ["1"]
    bench.advance(10)
    reader.send(m.Disconnect(0, {}))
    reader.lose()
    publish(bench, publisher, "a/1", "old")
    bench.advance(10)
    bench.auto_commit = False
    delete_queue(bench.node.state, KEY, lambda text: None)
    bench.commit()
    assert KEY not in bench.recorded().queues
    if crashes == "after":
        create_queue(bench.node.state, reader.connection, KEY, bench.journal.high_watermark, "r")
        bench.take()
    bench.crash(keep_uncommitted=crashes == "after")
    assert (KEY in bench.recorded().queues) == (crashes == "after")
    bench.auto_commit = True
    reader = bench.connect("r")
    subscribe(reader, "$queue/a/#")
    bench.advance(10)
    assert drain(reader) == []
    publish(bench, bench.connect("p"), "a/1", "new")
    assert drain(reader) == ["new"]
    reader.lose()
    publish(bench, bench.connect("p"), "a/1", "newer")
    bench.crash()
    reader = bench.connect("r")
    subscribe(reader, "$queue/a/#")
    bench.advance(1)
    assert drain(reader) == ["newer"]
