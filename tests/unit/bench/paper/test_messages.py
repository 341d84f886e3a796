"""What members of the published protocol say and read: the published JSON, and no other harm."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.paper.config import PaperConfig
from bench.paper.effects import (
    ConnectNeighbour,
    DeliverLocally,
    Effect,
    PublishToNeighbour,
    Refused,
)
from bench.paper.member import PaperMember
from bench.paper.messages import (
    LEVELS_MAX,
    SUBSCRIPTIONS,
    TOPIC_BYTES_MAX,
    TOPOLOGY_ANN,
    BadMessage,
    CoreAnnouncement,
    MembershipAnnouncement,
    PublicationId,
    RoutedPublication,
    TopologyAnnouncement,
    decode,
    encode,
)
from holdfast.protocol.topics.names import check_filter, matches

EPOCH = 1_700_000_000_000
CONFIG = PaperConfig(reply_delay_s=0.0)


def member(**options: Any) -> PaperMember:
    """Member 1; its neighbours are 2 and 3."""
    config = PaperConfig(reply_delay_s=0.0, **options)
    started = PaperMember(1, EPOCH, config, {2: "tcp://b", 3: "tcp://c"}, 0.0)
    started.take_effects()
    return started


def said(started: PaperMember, topic: str, body: object, now: float = 1.0) -> list[Effect]:
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    started.handle(topic, payload, now)
    return started.take_effects()


def bodies(effects: list[Effect]) -> list[tuple[int, str, Any]]:
    return [
        (effect.neighbour, effect.topic, json.loads(effect.payload))
        for effect in effects
        if isinstance(effect, PublishToNeighbour)
    ]


CORE_ANN = {"CoreId": 7, "SenderId": 2, "Seqn": 4, "Dist": 1}
ROUTED = {"PubId": {"OriginId": 7, "Seqn": 4}, "SenderId": 2, "Payload": "aGk="}


def test_the_published_fields_are_on_the_wire() -> None:
    assert json.loads(encode(CoreAnnouncement(0, 1, 2, 3))) == {
        "CoreId": 0, "SenderId": 1, "Seqn": 2, "Dist": 3,
    }  # fmt: skip
    assert json.loads(encode(MembershipAnnouncement(0, 1, 2, 9))) == {
        "CoreId": 0, "SenderId": 1, "Seqn": 2, "Epoch": 9,
    }  # fmt: skip
    assert json.loads(encode(RoutedPublication(PublicationId(1, 2, 9), 3, b"hi", 4))) == {
        "PubId": {"OriginId": 1, "Seqn": 2, "Epoch": 9},
        "SenderId": 3,
        "Payload": "aGk=",
        "Hops": 4,
    }


def test_a_published_federator_is_understood() -> None:
    one = member()
    assert bodies(said(one, "federator/core_ann/a/b", CORE_ANN)) == [
        (3, "federator/core_ann/a/b", {"CoreId": 7, "SenderId": 1, "Seqn": 4, "Dist": 2}),
    ]
    assert bodies(said(one, "federator/beacon/a/b", b"")) == [
        (2, "federator/memb_ann/a/b", {"CoreId": 7, "SenderId": 1, "Seqn": 4}),
    ]
    assert said(one, "federator/routing/a/b", ROUTED) == [DeliverLocally("federated/a/b", b"hi", 2)]
    empty = {**ROUTED, "PubId": {"OriginId": 7, "Seqn": 5}, "Payload": None}
    assert said(one, "federator/routing/a/b", empty) == [DeliverLocally("federated/a/b", b"", 2)]


def test_a_published_federator_counts_from_0_in_each_topic() -> None:
    one = member()
    for topic in ("a", "b"):
        said(one, f"federator/beacon/{topic}", b"")
    for number in (0, 1):
        for topic in ("a", "b"):
            body = {**ROUTED, "PubId": {"OriginId": 7, "Seqn": number}}
            assert len(said(one, f"federator/routing/{topic}", body)) == 1
            assert said(one, f"federator/routing/{topic}", body) == []


@pytest.mark.parametrize("topic", TOPOLOGY_ANN)
@pytest.mark.parametrize(("id", "ip"), [("id", "ip"), ("Id", "Ip"), ("ID", "IP")])
def test_both_names_and_spellings_of_topology_announcements(topic: str, id: str, ip: str) -> None:
    one = member()
    body = {"neighbor": {id: 4, ip: "tcp://d:1883"}, "action": "NEW"}
    assert said(one, topic, body) == [ConnectNeighbour(4, "tcp://d:1883")]
    # A manager tells it several times.
    assert said(one, topic, body) == []
    body["neighbor"] = {id: 4, ip: "tcp://elsewhere:1883"}
    assert said(one, topic, body) == [ConnectNeighbour(4, "tcp://elsewhere:1883")]
    assert one.neighbours[4] == "tcp://elsewhere:1883"


def test_the_subscriptions_get_everything_and_nothing_twice() -> None:
    topics = [f"federator/{kind}/a/b" for kind in ("beacon", "core_ann", "memb_ann", "routing")]
    for topic in ("federated/a", *topics, *TOPOLOGY_ANN):
        assert sum(matches(filter, topic) for filter in SUBSCRIPTIONS) == 1
    for filter in SUBSCRIPTIONS:
        check_filter(filter)


BAD = [
    ("federator/core_ann/t", b"", "no JSON"),
    ("federator/core_ann/t", b"{", "no JSON"),
    ("federator/core_ann/t", b"\xff", "no JSON"),
    ("federator/core_ann/t", b'{"CoreId":"\xff"}', "no JSON"),
    ("federator/core_ann/t", b"[" * 4000, "no JSON"),
    ("federator/core_ann/t", b'{"x":' * 600 + b"1" + b"}" * 600, "wrong fields"),
    ("federator/core_ann/t", b" " * 5000, "too large"),
    ("federator/core_ann/t", b"null", "wrong fields"),
    ("federator/core_ann/t", b"[1]", "wrong fields"),
    ("federator/core_ann/t", {}, "wrong fields"),
    ("federator/core_ann/t", {**CORE_ANN, "CoreId": -1}, "wrong fields"),
    ("federator/core_ann/t", {**CORE_ANN, "CoreId": 1 << 63}, "wrong fields"),
    ("federator/core_ann/t", {**CORE_ANN, "CoreId": 1 << 70}, "wrong fields"),
    ("federator/core_ann/t", {**CORE_ANN, "CoreId": "7"}, "wrong fields"),
    ("federator/core_ann/t", {**CORE_ANN, "CoreId": 7.5}, "wrong fields"),
    ("federator/core_ann/t", {**CORE_ANN, "CoreId": True}, "wrong fields"),
    ("federator/core_ann/t", {**CORE_ANN, "Epoch": -1}, "wrong fields"),
    ("federator/core_ann/t", {**CORE_ANN, "SenderId": 9}, "no neighbour"),
    ("federator/core_ann/", CORE_ANN, "no topic"),
    ("federator/core_ann/" + "t" * TOPIC_BYTES_MAX + "t", CORE_ANN, "topic too long"),
    ("federated/" + "t/" * LEVELS_MAX + "t", b"", "topic too long"),
    ("federator/memb_ann/t", {"CoreId": 7, "SenderId": 2}, "wrong fields"),
    ("federator/memb_ann/t", {"CoreId": 7, "SenderId": 9, "Seqn": 1}, "no neighbour"),
    ("federator/routing/t", {**ROUTED, "PubId": 4}, "wrong fields"),
    ("federator/routing/t", {**ROUTED, "PubId": {"OriginId": 7}}, "wrong fields"),
    ("federator/routing/t", {**ROUTED, "Payload": "no base64"}, "wrong fields"),
    ("federator/routing/t", {**ROUTED, "Payload": [1, 2]}, "wrong fields"),
    ("federator/routing/t", {**ROUTED, "SenderId": 9}, "no neighbour"),
    ("federator/beacon/", b"", "no topic"),
    ("federated/", b"", "no topic"),
    ("federated/t", b"x" * 200, "publication too large"),
    ("federator/topology_ann", b"no", "no JSON"),
    ("federator/topology_ann", {"neighbor": {"id": 4}, "action": "NEW"}, "wrong fields"),
    ("federator/topology_ann", {"neighbor": {"id": 4, "ip": ""}, "action": "NEW"}, "wrong fields"),
    ("federator/topology_ann", {"neighbor": {"id": 4, "ip": "b"}, "action": "X"}, "wrong fields"),
    ("federator/topology_ann", {"neighbor": {"id": 1, "ip": "b"}, "action": "NEW"}, "own id"),
    ("federator/topology_bm-0", b"", "unknown topic"),
    ("elsewhere", b"", "unknown topic"),
]


@pytest.mark.parametrize(("topic", "body", "reason"), BAD)
def test_what_cannot_be_read_is_refused_and_counted(topic: str, body: object, reason: str) -> None:
    one = member(payload_bytes_max=100)
    (refused,) = said(one, topic, body)
    assert isinstance(refused, Refused)
    assert (refused.topic, refused.reason) == (topic, reason)
    assert refused.text
    assert one.counts == {reason: 1}
    assert not list(one.topics)
    assert dict(one.neighbours) == {2: "tcp://b", 3: "tcp://c"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)
fields = st.dictionaries(
    st.sampled_from(
        ["CoreId", "SenderId", "Seqn", "Dist", "PubId", "Payload", "OriginId", "Epoch", "Hops",
         "neighbor", "action", "id", "ip", "coreid", "x"]
    ),
    st.integers(0, 4) | json_values
    | st.fixed_dictionaries({"OriginId": st.integers(0, 9), "Seqn": st.integers(0, 9)}),
)  # fmt: skip
topics = st.sampled_from(
    ["federator/core_ann/t", "federator/memb_ann/t", "federator/routing/t", "federator/beacon/t",
     "federated/t", "federator/topology_ann", "federated_topology_ann", "other"]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(topics, st.binary(max_size=40) | fields.map(json.dumps)), max_size=12))
def test_no_message_raises(messages: list[tuple[str, bytes | str]]) -> None:
    one = member()
    now = 1.0
    for topic, body in messages:
        one.handle(topic, body.encode() if isinstance(body, str) else body, now)
        now += 7.0
        one.handle_timers(now)
    assert one.timer() > now


@pytest.mark.parametrize(
    "message",
    [
        CoreAnnouncement(1, 2, 3, 4, 5),
        MembershipAnnouncement(1, 2, 3),
        RoutedPublication(PublicationId(1, 2, 3), 4, bytes(range(256)), 5),
    ],
)
def test_what_is_written_is_read(
    message: CoreAnnouncement | MembershipAnnouncement | RoutedPublication,
) -> None:
    assert decode(encode(message), type(message), 4096) == message
    with pytest.raises(BadMessage):
        decode(encode(message)[:-1], type(message), 4096)
    with pytest.raises(BadMessage):
        decode(encode(message), TopologyAnnouncement, 4096)
