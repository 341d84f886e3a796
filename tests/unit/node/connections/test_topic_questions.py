"""The rights about which a service decides topic by topic: packets wait for it, in their order."""

from collections.abc import Callable

import pytest

from holdfast.node.state.recorded_state import TOPIC_RIGHTS
from holdfast.node.topic_rights.questions import (
    RESUMED_AT_ONCE,
    asked_rules,
    handle_topics,
)
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from holdfast.security.acl import AclFile
from holdfast.security.identity.asked_rules import (
    ALLOW,
    DECISION_BYTES,
    DENIED,
    FAILED,
    IGNORE,
    PUBLISH_BYTES_MAX,
    AskedRules,
    TopicDecision,
)
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.publish.test_delayed import delay
from tests.unit.node.test_publish import acks, publish, subscribe


def allow(action: str, topic: str) -> str:
    return ALLOW


def deny(action: str, topic: str) -> str:
    return DENIED


def fail(action: str, topic: str) -> str:
    return FAILED


def asked_bench() -> NodeBench:
    bench = NodeBench()
    bench.node.state.admission.asks_rights = True
    return bench


def connect(bench: NodeBench, name: str, version: int = 5, expiry_s: int = 0) -> Peer:
    bench.rights = AskedRules()
    return bench.connect(name, version, clean=expiry_s == 0, expiry_s=expiry_s)


def reader_of(bench: NodeBench, filter: str) -> Peer:
    reader = connect(bench, "reader")
    reader.send(subscribe(filter, 2))
    bench.answer(allow)
    bench.run()
    reader.take()
    return reader


def settled(bench: NodeBench, verdict: Callable[[str, str], str]) -> list[tuple[str, str]]:
    asked = bench.answer(verdict)
    bench.run()
    return asked


def test_packets_wait_for_the_answer_and_keep_their_order() -> None:
    bench = asked_bench()
    reader = reader_of(bench, "#")
    client = connect(bench, "c")
    client.take()
    for number, topic in enumerate(["a", "a", "b", "a"], 1):
        client.send(publish(topic, b"%d" % number, 1, number))
    client.send(m.Pingreq())
    assert client.take() == []
    assert [each.topics for each in bench.questions] == [["a"]]
    assert settled(bench, allow) == [("publish", "a")]
    # What waited behind the first topic has come up to the second one.
    assert [packet_id for _, packet_id, _ in acks(client)] == [1, 2]
    assert settled(bench, allow) == [("publish", "b")]
    assert [packet_id for _, packet_id, _ in acks(client)] == [3, 4]
    assert reader.payloads() == [b"1", b"2", b"3", b"4"]
    assert len(client.take(m.Pingresp)) == 1
    stats = bench.node.state.stats
    assert stats.publish_received == 4
    # Nobody asks twice.
    client.send(publish("b", b"5", 1, 5))
    assert bench.questions == []


def test_nothing_resumes_a_client_before_its_answer() -> None:
    bench = asked_bench()
    client = connect(bench, "c")
    client.send(publish("a", b"1"), publish("b", b"2"))
    bench.node.handle_resumed(client.connection)
    bench.run()
    assert [each.topics for each in bench.questions] == [["a"]]


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_that_is_denied(version: int, qos: int) -> None:
    bench = asked_bench()
    reader = reader_of(bench, "#")
    client = connect(bench, "c", version)
    client.take()
    client.send(publish("a", b"x", qos, 7 if qos else 0))
    settled(bench, deny)
    kind = {1: m.PUBACK, 2: m.PUBREC}.get(qos)
    reason = reasons.NOT_AUTHORIZED if version == 5 else 0
    assert acks(client) == ([] if kind is None else [(kind, 7, reason)])
    assert reader.payloads() == []
    assert not client.closed
    assert bench.node.state.stats.authorizations_denied == 1


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_that_is_not_decided_is_refused_for_now(version: int, qos: int) -> None:
    """MQTT 3 has no reply that refuses, so its client keeps the message and loses the
    connection."""
    bench = asked_bench()
    reader = reader_of(bench, "#")
    client = connect(bench, "c", version)
    client.take()
    client.send(publish("a", b"x", qos, 7 if qos else 0))
    settled(bench, fail)
    kind = {1: m.PUBACK, 2: m.PUBREC}.get(qos)
    if kind is not None and version == 5:
        assert acks(client) == [(kind, 7, reasons.QUOTA_EXCEEDED)]
        assert client.connection.unacknowledged == 0
    assert client.closed == (version == 4 and qos > 0)
    assert bench.node.state.stats.topic_questions_failed == 1
    if client.closed:
        return
    client.send(publish("a", b"again", qos, 8 if qos else 0))
    assert bench.questions == []
    client.take()
    bench.advance(1.1)
    client.send(publish("a", b"later", qos, 9 if qos else 0))
    settled(bench, allow)
    assert reader.payloads() == [b"later"]


def test_a_decision_ends_in_its_time() -> None:
    bench = asked_bench()
    client = connect(bench, "c")
    client.send(publish("a", b"x"))
    settled(bench, allow)
    bench.advance(59)
    client.send(publish("b", b"x"))
    assert settled(bench, allow) == [("publish", "b")]
    bench.advance(2)
    client.take()
    client.send(publish("a", b"x", 1, 1))
    assert settled(bench, deny) == [("publish", "a")]
    assert acks(client) == [(m.PUBACK, 1, reasons.NOT_AUTHORIZED)]
    client.send(publish("b", b"x"))
    assert bench.questions == []


@pytest.mark.parametrize("version", [4, 5])
def test_each_filter_is_asked_about_and_decides_about_deliveries(version: int) -> None:
    bench = asked_bench()
    client = connect(bench, "c", version)
    client.take()
    filters = ["a/#", "b/#", "$share/g/c", "d", "$delayed/1/x"]
    client.send(m.Subscribe(1, [m.SubscriptionRequest(each, 1) for each in filters]))
    client.send(m.Pingreq())
    assert client.take() == []
    verdicts = {"a/#": ALLOW, "b/#": DENIED, "c": ALLOW, "d": FAILED}
    asked = settled(bench, lambda action, topic: verdicts[topic])
    assert asked == [("subscribe", topic) for topic in verdicts]
    (suback,) = client.take(m.Suback)
    assert isinstance(suback, m.Suback)
    expected = [1, 0x87, 1, 0x97, 0x87] if version == 5 else [1, 0x80, 1, 0x80, 0x80]
    assert suback.reasons == expected
    assert len(client.take(m.Pingresp)) == 1
    writer = connect(bench, "w")
    for topic in ("a/1", "b/1", "c", "d"):
        writer.send(publish(topic, topic.encode()))
        settled(bench, allow)
    assert client.payloads() == [b"a/1", b"c"]
    # The decision about the one that failed was not remembered.
    client.send(subscribe("d", 1, 2))
    assert settled(bench, allow) == [("subscribe", "d")]
    writer.send(publish("d", b"d"))
    assert client.payloads() == [b"d"]


def test_a_filter_that_is_denied_later_ends_its_deliveries() -> None:
    bench = asked_bench()
    client, writer = connect(bench, "c"), connect(bench, "w")
    client.send(subscribe("a", 0))
    settled(bench, allow)
    writer.send(publish("a", b"1"))
    settled(bench, allow)
    bench.advance(61)
    client.send(subscribe("a", 0, 2))
    assert settled(bench, deny) == [("subscribe", "a")]
    writer.send(publish("a", b"2"))
    settled(bench, allow)
    assert client.payloads() == [b"1"]


@pytest.mark.parametrize("verdict", [ALLOW, DENIED, FAILED])
def test_the_filters_of_a_resumed_session_are_asked_about_before_connack(verdict: str) -> None:
    bench = asked_bench()
    client = connect(bench, "c", expiry_s=1000)
    client.send(subscribe("a", 1))
    settled(bench, allow)
    client.lose()
    writer = connect(bench, "w")
    writer.send(publish("a", b"x", 1, 1))
    settled(bench, allow)
    again = connect(bench, "c", expiry_s=1000)
    assert again.take() == []
    assert settled(bench, lambda action, topic: verdict) == [("subscribe", "a")]
    (connack,) = again.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert connack.reason == (reasons.SERVER_UNAVAILABLE if verdict == FAILED else 0)
    assert again.payloads() == ([b"x"] if verdict == ALLOW else [])
    if verdict == FAILED:
        # Nothing was passed over: the message comes with the next connection.
        bench.verdicts = allow
        assert connect(bench, "c", expiry_s=1000).payloads() == [b"x"]


def test_the_service_may_leave_a_topic_to_the_file() -> None:
    bench = asked_bench()
    bench.node.state.acl = AclFile.parse("topic write own\ntopic read seen\n", "acl")
    bench.verdicts = lambda action, topic: IGNORE
    client = connect(bench, "c")
    client.take()
    client.send(publish("own", b"", 1, 1), publish("other", b"", 1, 2), subscribe("#", 0))
    assert [reason for _, _, reason in acks(client)] == [0x10, reasons.NOT_AUTHORIZED]
    bench.verdicts = allow
    writer = connect(bench, "w")
    writer.send(publish("seen", b"1"), publish("unseen", b"2"))
    assert client.payloads() == [b"1"]


def test_a_delayed_message_is_asked_about_by_its_later_topic() -> None:
    bench = asked_bench()
    reader = reader_of(bench, "#")
    client = connect(bench, "c")
    delay(client, "$delayed/5/a", "x")
    assert settled(bench, allow) == [("publish", "a")]
    delay(client, "$delayed/0/a", "no")
    delay(client, "$SYS/a", "no")
    assert bench.questions == []
    bench.advance(5)
    assert reader.payloads() == [b"x"]


def test_decisions_are_bounded() -> None:
    rules = AskedRules()
    cleared = 0
    for number in range(5000):
        decision = TopicDecision(ALLOW, 1.0)
        cleared += rules.decide_publish(f"{number}", decision)
        rules.decide_filter(f"{number}", decision)
        if rules.has_spare_filters(DECISION_BYTES + 1):
            rules.keep_filters({"0"})
    assert cleared > 0
    assert len(rules.expire(2.0)) < PUBLISH_BYTES_MAX / 250
    assert rules.next_end() is None
    assert not rules.has_spare_filters(DECISION_BYTES + 1)
    assert rules.can_read("0")


def test_decisions_about_long_filters_are_bounded_in_bytes() -> None:
    """64 refused filters of 64 kB in each SUBSCRIBE would be 4 MB for each client."""
    bench = asked_bench()
    client = connect(bench, "c")
    client.send(subscribe("kept", 1))
    settled(bench, allow)
    rules = asked_rules(client.connection)
    assert rules is not None
    for number in range(5):
        filters = [f"{number}/{index}/{'é' * 30_000}" for index in range(16)]
        client.send(m.Subscribe(2, [m.SubscriptionRequest(each, 1) for each in filters]))
        assert len(settled(bench, deny)) == 16
        assert not rules.has_spare_filters(0)
    # A decision about a subscription is never forgotten.
    client.send(subscribe("kept", 1, 3))
    assert settled(bench, deny) == []


@pytest.mark.parametrize("verdict", [ALLOW, FAILED])
def test_a_group_waits_for_a_member_about_which_the_service_has_not_decided(verdict: str) -> None:
    """Another member of the group may not read the message."""
    bench = asked_bench()
    client = connect(bench, "c", expiry_s=1000)
    client.send(subscribe("$share/g/#", 1))
    settled(bench, allow)
    bench.rights = AclFile.parse("topic read b\n", "acl").for_client(None, "other")
    other = bench.connect("other")
    other.send(subscribe("$share/g/#", 1))
    client.lose()
    again = connect(bench, "c", expiry_s=1000)
    writer = connect(bench, "w")
    writer.send(publish("a", b"x", 1, 1))
    resumed, published = bench.questions
    bench.questions = [published]
    settled(bench, allow)
    assert bench.node.state.stats.dropped_unreadable == 0
    bench.questions = [resumed]
    settled(bench, lambda action, topic: verdict)
    if verdict == FAILED:
        bench.verdicts = allow
        again = connect(bench, "c", expiry_s=1000)
    bench.advance(0.3)
    assert again.payloads() == [b"x"]
    assert other.payloads() == []


def test_a_failure_counts_for_a_second_beside_a_decision_that_lasts() -> None:
    bench = asked_bench()
    client = connect(bench, "c")
    client.send(publish("lasts", b"x"))
    settled(bench, allow)
    client.send(publish("fails", b"x"))
    settled(bench, fail)
    bench.advance(1.1)
    client.send(publish("fails", b"x"))
    assert settled(bench, allow) == [("publish", "fails")]


def test_a_closed_connection_leaves_no_timer_behind() -> None:
    bench = asked_bench()
    client = connect(bench, "c")
    client.send(publish("a", b"x"))
    settled(bench, allow)
    client.lose()
    timers = bench.node.state.timers
    assert [each for each in timers if each.kind == TOPIC_RIGHTS] == []


def test_packets_behind_a_filter_wait_for_its_start_in_the_past() -> None:
    bench = asked_bench()
    bench.node.state.acl = AclFile.parse("topic history #\n", "acl")
    client = connect(bench, "c")
    client.take()
    bench.delay_reads = True
    client.send(subscribe("$stream/@last:1/a", 1, 1), m.Unsubscribe(2, ["a"]))
    settled(bench, allow)
    assert client.take() == []
    bench.delay_reads = False
    bench.run()
    assert [type(each) for each in client.take()] == [m.Suback, m.Unsuback]


@pytest.mark.parametrize("waits", [True, False])
def test_a_session_whose_client_is_refused_or_leaves_stays_as_it_was(waits: bool) -> None:
    """The CONNECT that is refused asked for a session that ends with its connection."""
    bench = asked_bench()
    client = connect(bench, "c", expiry_s=1000)
    client.send(subscribe("a", 1))
    settled(bench, allow)
    client.lose()
    writer = connect(bench, "w")
    writer.send(publish("a", b"x", 1, 1))
    settled(bench, allow)
    bench.rights = AskedRules()
    again = bench.connect("c", 5, clean=False)
    if not waits:
        again.lose()
    settled(bench, fail)
    bench.verdicts = allow
    assert connect(bench, "c", expiry_s=1000).payloads() == [b"x"]
    # A CONNECT that is accepted does end it.
    bench.rights = AskedRules()
    bench.connect("c", 5, clean=False).lose()
    assert "c" not in bench.node.state.sessions


@pytest.mark.parametrize("verdict", [ALLOW, FAILED])
def test_a_connection_is_taken_over_after_the_answers(verdict: str) -> None:
    bench = asked_bench()
    live = connect(bench, "c", expiry_s=1000)
    live.send(subscribe("a", 1))
    settled(bench, allow)
    later = connect(bench, "c", expiry_s=1000)
    # What the live client subscribes to meanwhile is asked about, too.
    live.send(subscribe("b", 1, 2))
    resumed, subscribed = bench.questions
    bench.questions = [subscribed]
    settled(bench, allow)
    bench.questions = [resumed]
    bench.verdicts = None
    effect = bench.questions.pop()
    handle_topics(bench.node.state, effect, [(ALLOW, 60.0)])
    bench.run()
    assert settled(bench, lambda action, topic: verdict) == [("subscribe", "b")]
    assert live.closed == (verdict == ALLOW)
    (connack,) = later.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert connack.reason == (reasons.SERVER_UNAVAILABLE if verdict == FAILED else 0)
    assert later.closed == (verdict == FAILED)
    assert bench.node.state.stats.sessions_taken_over == (verdict == ALLOW)
    assert len(bench.node.state.pending_connects) == 0


def test_the_filters_of_a_large_session_are_asked_about_in_parts() -> None:
    """All at once would hold the loop."""
    bench = asked_bench()
    client = connect(bench, "c", expiry_s=1000)
    filters = [f"a/{number}" for number in range(2 * RESUMED_AT_ONCE)]
    for start in range(0, len(filters), 100):
        requests = [m.SubscriptionRequest(each, 1) for each in filters[start : start + 100]]
        client.send(m.Subscribe(1, requests))
        settled(bench, allow)
        # A packet may have more filters than decisions are kept without a subscription.
        (suback,) = client.take(m.Suback)
        assert isinstance(suback, m.Suback)
        assert suback.reasons == [1] * 100
    client.lose()
    again = connect(bench, "c", expiry_s=1000)
    asked: list[str] = []
    for _ in range(2):
        assert again.take() == []
        (question,) = bench.questions
        assert len(question.topics) == RESUMED_AT_ONCE
        asked += question.topics
        bench.questions = []
        handle_topics(bench.node.state, question, [(ALLOW, 60.0)] * RESUMED_AT_ONCE)
        bench.run()
    assert sorted(asked) == sorted(filters)
    assert len(again.take(m.Connack)) == 1


def test_a_decision_that_is_made_again_takes_no_more_room() -> None:
    rules = AskedRules()
    decision = TopicDecision(ALLOW, 1.0)
    assert not any(rules.decide_publish("a", decision) for _ in range(PUBLISH_BYTES_MAX // 100))
