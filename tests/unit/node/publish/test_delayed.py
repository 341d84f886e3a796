"""Delayed messages on one node without sockets and files."""

import random

import pytest

from holdfast.log import record as log_record
from holdfast.node.config import NodeConfig
from holdfast.node.delivery.subscriptions import add_subscription
from holdfast.node.node_state import CallbackPromise
from holdfast.node.publish.admission import DELAY_OVER
from holdfast.node.publish.delayed import end_delayed
from holdfast.node.publish.delayed_table import (
    DELAYED_PREFIX,
    InvalidDelay,
    mounted,
    split_delayed,
    split_publisher,
    with_publisher,
)
from holdfast.node.session.session import new_subscription
from holdfast.node.state.session_records import (
    SubscribeRecord,
    SubscriptionRow,
    encode_session,
)
from holdfast.node.state.state_records import append_state
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.publish import Publish
from holdfast.security.acl import AclFile
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.delivery.test_replay import drain, publish, subscribe

REASON_STRING = 0x1F


@pytest.fixture
def bench() -> NodeBench:
    return NodeBench()


def delay(
    peer: Peer, topic: str, payload: str, qos: int = 1, packet_id: int = 1, *, retain: bool = False
) -> list[object]:
    packet_id = packet_id if qos else 0
    peer.take()
    peer.send(Publish(topic.encode(), payload.encode(), qos, retain, False, packet_id, b"", 0, -1))
    return peer.take()


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_it_comes_in_its_time_and_once(bench: NodeBench, qos: int) -> None:
    publisher, reader = bench.connect("p"), bench.connect("r", expiry_s=1000)
    subscribe(reader, "#", qos=2)
    answers = delay(publisher, "$delayed/60/a/b", "x", qos)
    assert [each.reason for each in answers] == ([0] if qos else [])
    bench.advance(59)
    assert drain(reader) == []
    bench.advance(1)
    assert drain(reader) == ["x"]
    bench.advance(1000)
    assert drain(reader) == []
    assert len(bench.node.state.delayed) == 0
    assert bench.node.state.delayed.bytes.total == 0
    assert bench.node.state.stats.delayed_published == 1


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("with_snapshot", [False, True])
def test_it_survives_crashes_before_and_after(
    bench: NodeBench, qos: int, with_snapshot: bool
) -> None:
    def crash() -> None:
        snapshot = bench.snapshot() if with_snapshot else None
        # With a snapshot, the log before it is gone.
        offsets = list(bench.journal.high_watermark) if with_snapshot else None
        bench.crash(snapshot=snapshot, offsets=offsets)

    reader = bench.connect("r", expiry_s=10_000)
    subscribe(reader, "a/#", qos=2)
    delay(bench.connect("p"), "$delayed/60/a/b", "x", qos)
    for _ in range(3):
        crash()
        bench.advance(10)
    assert len(bench.node.state.delayed) == 1
    bench.crash(snapshot=bench.snapshot(), offsets=list(bench.journal.high_watermark))
    bench.advance(29)
    reader = bench.connect("r", clean=False, expiry_s=10_000)
    assert drain(reader) == []
    bench.advance(1)
    assert drain(reader) == ["x"]
    # Its position is in the log.
    bench.advance(1)
    crash()
    reader = bench.connect("r", clean=False, expiry_s=10_000)
    bench.advance(100)
    assert drain(reader) == []
    assert [each.topic for each in bench.messages()][-1] == b"a/b"


def test_a_crash_while_its_record_is_written(bench: NodeBench) -> None:
    """A snapshot has it until the record that publishes it is committed."""
    reader = bench.connect("r", expiry_s=10_000)
    subscribe(reader, "a/#", qos=2)
    delay(bench.connect("p"), "$delayed/5/a/b", "x", 2)
    for keep in (False, True):
        bench.auto_commit = False
        bench.advance(5)
        snapshot = bench.snapshot()
        bench.crash(snapshot=snapshot, keep_uncommitted=keep)
        bench.auto_commit = True
        bench.settle()
    reader = bench.connect("r", clean=False, expiry_s=10_000)
    bench.advance(1)
    assert drain(reader) == ["x"]


def test_retained_and_other_topics(bench: NodeBench) -> None:
    publisher = bench.connect("p")
    delay(publisher, "$delayed/5/a/b", "x", retain=True)
    delay(publisher, "$delayed/5/a/c", "y", retain=True, packet_id=2)
    bench.crash()
    assert len(bench.node.state.retained) == 0
    bench.advance(5)
    reader = bench.connect("r")
    subscribe(reader, "a/#")
    assert sorted(drain(reader)) == ["x", "y"]


def test_it_undoes_no_newer_retained_message(bench: NodeBench) -> None:
    """A retained message of QoS 0 counts at once, also over one that is due and not committed."""
    publisher = bench.connect("p")
    delay(publisher, "$delayed/5/a", "old", 0, retain=True)
    bench.auto_commit = False
    bench.advance(5)
    publisher.send(Publish(b"a", b"new", 0, True, False, 0, b"", 0, -1))
    bench.auto_commit = True
    bench.settle()
    reader = bench.connect("r")
    subscribe(reader, "a")
    assert drain(reader) == ["new"]


def test_a_leader_delivers_it_once_while_its_record_waits(bench: NodeBench) -> None:
    """A message of QoS 0, which the leader tries again every 5 s while its disk hangs."""
    reader = bench.connect("r")
    subscribe(reader, "a")
    delay(bench.connect("p"), "$delayed/5/a", "x", 0)
    bench.auto_commit = False
    for _ in range(4):
        bench.advance(5.1)
    assert len(bench.node.state.delayed) == 1
    assert drain(reader) == ["x"]
    bench.auto_commit = True
    bench.settle()
    assert drain(reader) == []
    assert len(bench.node.state.delayed) == 0
    assert len(bench.messages()) == 2


def test_the_longest_user_name() -> None:
    properties = with_publisher(b"", "u" * 65534, True)
    assert split_publisher(properties) == ("u" * 65534, True, b"")
    bench = NodeBench()
    peer = bench.connect("p")
    assert peer.connection.session is not None
    peer.connection.session.username = "u" * 65535
    [answer] = delay(peer, "$delayed/5/a", "x")
    assert isinstance(answer, m.Ack)
    assert answer.reason == 0x90


def test_a_repetition_is_stored_once(bench: NodeBench) -> None:
    publisher, reader = bench.connect("p", expiry_s=1000), bench.connect("r")
    subscribe(reader, "a")
    delay(publisher, "$delayed/5/a", "x", 2)
    bench.crash()
    publisher, reader = bench.connect("p", clean=False, expiry_s=1000), bench.connect("r")
    subscribe(reader, "a")
    publisher.send(Publish(b"$delayed/5/a", b"x", 2, False, True, 1, b"", 0, -1))
    publisher.send(m.Ack(m.PUBREL, 1))
    bench.advance(5)
    assert drain(reader) == ["x"]


@pytest.mark.parametrize(
    ("topic", "reason", "text"),
    [
        ("$delayed/x/a", 0x90, "found 'x'"),
        ("$delayed/-1/a", 0x90, "found '-1'"),
        ("$delayed/0/a", 0x90, "from 1 to 100 seconds"),
        ("$delayed/101/a", 0x90, "found '101'"),
        ("$delayed/99999999999999999999/a", 0x90, "from 1 to 100 seconds"),
        ("$delayed/5", 0x90, "the topic '$delayed/SECONDS/TOPIC'"),
        ("$delayed/5/", 0x90, "the topic '$delayed/SECONDS/TOPIC'"),
        ("$delayed/", 0x90, "the topic '$delayed/SECONDS/TOPIC'"),
        ("$delayed/5/$SYS/x", 0x87, ""),
        ("$delayed/5/$delayed/5/x", 0x87, ""),
        ("$delayed/5/secret", 0x87, ""),
    ],
)
@pytest.mark.parametrize("version", [4, 5])
def test_bad_input(topic: str, reason: int, text: str, version: int) -> None:
    bench = NodeBench(NodeConfig(partitions=4, sys_interval_s=0, delay_s_max=100))
    bench.node.state.acl = AclFile.parse("topic readwrite a/#\ntopic a\n", "acl")
    peer = bench.connect("p", version=version)
    [answer] = delay(peer, topic, "x")
    assert isinstance(answer, m.Ack)
    assert answer.reason == (reason if version == 5 else 0)
    if version == 5 and text:
        assert text in str(answer.properties[REASON_STRING])
    assert len(bench.node.state.delayed) == 0
    assert not bench.messages()
    assert any(each.event == "publish_denied" for each in bench.notes)


def test_bounds() -> None:
    config = NodeConfig(
        partitions=4,
        sys_interval_s=0,
        delayed_messages_max=3,
        delayed_messages_per_client=2,
        delayed_bytes_max=5000,
    )
    bench = NodeBench(config)
    one, two = bench.connect("1"), bench.connect("2")

    def reasons(peer: Peer, payload: str = "x") -> tuple[int, str]:
        [answer] = delay(peer, "$delayed/5/a", payload)
        assert isinstance(answer, m.Ack)
        return answer.reason, str((answer.properties or {}).get(REASON_STRING, ""))

    assert reasons(one, "x" * 5000)[1] == "the delayed messages need more than 5000 bytes"
    assert [reasons(one)[0], reasons(one)[0]] == [0, 0]
    assert reasons(one) == (0x97, "2 delayed messages of this client wait, which is the limit")
    assert reasons(two)[0] == 0
    assert reasons(two) == (0x97, "3 delayed messages wait, which is the limit")
    bench.advance(5)
    assert reasons(two)[0] == 0


def test_a_user_leaves_room_for_others() -> None:
    config = NodeConfig(partitions=4, sys_interval_s=0)
    config.delayed_messages_max, config.delayed_bytes_max = 16, 30_000
    bench = NodeBench(config)
    bench.node.state.admission.checks_passwords = True
    bench.valid_passwords |= {"ann": b"x", "bob": b"x", "eve": b"x"}

    def stored(user: str, payload: str = "x") -> int:
        """The messages that are stored for a user with a client id for each."""
        found = 0
        for number in range(20):
            peer = bench.peer()
            peer.send(m.Connect(5, True, 0, f"{user}{number}", None, user, b"x", {}))
            peer.take(m.Connack)
            [answer] = delay(peer, "$delayed/50/a", payload)
            assert isinstance(answer, m.Ack)
            found += answer.reason < 0x80
        return found

    assert [stored(user) for user in ("ann", "bob", "eve", "ann")] == [8, 4, 2, 0]
    table = bench.node.state.delayed
    assert table.messages.of("ann") == 8
    bench.crash()
    assert bench.node.state.delayed.messages.of("bob") == 4
    bench.advance(50)
    bench.settle()
    assert bench.node.state.delayed.messages.of("ann") == 0
    # The same holds for their bytes.
    bench.node.state.admission.checks_passwords = True
    assert [stored(user, "x" * 2000) for user in ("ann", "bob", "eve")] == [4, 2, 1]


def test_nobody_reads_it_before(bench: NodeBench) -> None:
    reader = bench.connect("r")
    for filter in ("$delayed/#", "$delayed", "$share/g/$delayed/+/a", "$stream/@-1h/$delayed/#",
                   "$queue/$delayed/#"):  # fmt: skip
        assert subscribe(reader, filter).reasons == [0x87], filter
    assert subscribe(reader, "$delayedx/#").reasons == [1]


@pytest.mark.parametrize("is_from_snapshot", [False, True])
@pytest.mark.parametrize("filter", ["$delayed/#", "$share/g/$delayed/#"])
def test_a_subscription_of_an_older_version_reads_nothing_before(
    bench: NodeBench, filter: str, is_from_snapshot: bool
) -> None:
    reader = bench.connect("r", expiry_s=1000)
    state = bench.node.state
    subscribe(reader, "a")
    # As an older version has recorded it.
    rows: list[SubscriptionRow] = [(filter, 1, False, False, 0, 0)]
    payload = encode_session(SubscribeRecord("r", rows, list(state.delivered)))
    append_state(state, log_record.SESSION, b"r", payload)
    add_subscription(state, new_subscription(state.sessions["r"], filter, 1, False, False, 0, 0))
    reader.lose()
    delay(bench.connect("p"), "$delayed/5/a", "x")
    bench.crash(snapshot=bench.snapshot() if is_from_snapshot else None)
    reader = bench.connect("r", clean=False, expiry_s=1000)
    assert drain(reader) == []
    assert list(bench.node.state.sessions["r"].subscriptions) == ["a"]
    bench.advance(5)
    assert drain(reader) == ["x"]


def test_it_is_cancelled(bench: NodeBench) -> None:
    delay(bench.connect("p"), "$delayed/5/a", "x")
    [place] = bench.node.state.delayed.by_place
    end_delayed(bench.node.state, place)
    bench.settle()
    assert len(bench.node.state.delayed) == 0
    bench.crash()
    bench.advance(5)
    assert [each.topic for each in bench.messages()] == [b"$delayed/5/a"]


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("is_cancelled_first", [False, True])
def test_a_cancellation_at_the_time_of_the_publication_keeps_its_word(
    bench: NodeBench, qos: int, is_cancelled_first: bool
) -> None:
    """Both records are appended before the disk has either. The first one decides."""
    reader = bench.connect("r")
    subscribe(reader, "#", qos=1)
    delay(bench.connect("p"), "$delayed/5/a", "x", qos)
    [place] = bench.node.state.delayed.by_place
    outcomes: list[str] = []
    bench.auto_commit = False
    if not is_cancelled_first:
        bench.advance(5)
    end_delayed(bench.node.state, place, CallbackPromise(outcomes.append))
    end_delayed(bench.node.state, place, CallbackPromise(outcomes.append))
    bench.advance(5)
    assert "" not in outcomes
    bench.auto_commit = True
    bench.settle()
    assert drain(reader) == ([] if is_cancelled_first else ["x"])
    over = DELAY_OVER.text
    assert sorted(outcomes) == (["", over] if is_cancelled_first else [over, over])
    bench.crash()
    bench.advance(5)
    topics = [each.topic for each in bench.messages()]
    assert topics == [b"$delayed/5/a"] + ([] if is_cancelled_first else [b"a"])


def test_the_wall_clock_decides(bench: NodeBench) -> None:
    """A clock that jumps moves the time within a minute."""
    delay(bench.connect("p"), "$delayed/3600/a", "x")
    bench.advance(30)
    bench.wall_us -= 3_600_000_000
    for _ in range(119):
        bench.advance(60)
    assert len(bench.node.state.delayed) == 1
    bench.advance(60)
    assert len(bench.node.state.delayed) == 0
    delay(bench.connect("q"), "$delayed/3600/a", "x")
    bench.advance(1)
    bench.wall_us += 3_600_000_000
    bench.advance(60)
    assert len(bench.node.state.delayed) == 0


def test_many_at_once_come_in_slices(bench: NodeBench) -> None:
    config = NodeConfig(partitions=4, sys_interval_s=0, outbox_messages=10_000)
    bench = NodeBench(config)
    peer = bench.connect("p")
    for number in range(900):
        delay(peer, "$delayed/5/a", str(number), packet_id=number + 1)
    reader = bench.connect("r")
    subscribe(reader, "a")
    bench.advance(5)
    for _ in range(10):
        bench.advance(0.01)
    assert drain(reader) == [str(number) for number in range(900)]


def test_a_mount_is_in_front_of_the_real_topic() -> None:
    assert mounted(b"m/", b"$delayed/5/a/b") == b"$delayed/5/m/a/b"
    assert mounted(b"m/", b"a/b") == b"m/a/b"
    assert mounted(b"m/", b"$delayed/5") == b"$delayed/5"


def test_hostile_topics_and_properties() -> None:
    """Any bytes are a delayed message or the one error."""
    dice = random.Random(7)
    alphabet = b"$delayed/0123456789/a\x00\xff+#"
    for _ in range(20_000):
        raw = DELAYED_PREFIX * dice.randint(0, 1)
        raw += bytes(dice.choice(alphabet) for _ in range(dice.randint(0, 20)))
        try:
            seconds, topic = split_delayed(raw)
        except InvalidDelay:
            continue
        assert 1 <= seconds <= 4_294_967
        assert topic
        assert raw.endswith(b"/" + topic)
    for name in (None, "u", "ü" * 300):
        for is_given in (False, True):
            for rest in (b"", b"\x02\0\0\0\x05"):
                properties = with_publisher(rest, name, is_given)
                assert split_publisher(properties) == (name, is_given, rest)
                assert split_publisher(properties[:-1]) is not None
    assert split_publisher(b"\x26\0\x0chf-publisher") is not None


def test_order_of_equal_times(bench: NodeBench) -> None:
    publisher, reader = bench.connect("p"), bench.connect("r")
    subscribe(reader, "a")
    publish(bench, publisher, "a", "0")
    delay(publisher, "$delayed/10/a", "2")
    delay(publisher, "$delayed/5/a", "1", packet_id=2)
    bench.advance(20)
    assert drain(reader) == ["0", "1", "2"]
