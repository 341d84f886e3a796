"""Commands to `$CONTROL` and rights to subscribe, at the node."""

from collections.abc import Iterator

import pytest

from holdfast.node.connections.reauthorize import UserDeparture
from holdfast.node.publish.control import COMMAND_BYTES_MAX, COMMAND_TOPIC, RESPONSE_TOPIC
from holdfast.node.rights import replace_rules
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.security.dynamic.document import (
    RECEIVES,
    SUBSCRIBES_PATTERN,
    UNSUBSCRIBES_LITERAL,
    DefaultAccess,
    RoleAcl,
    RoleGrant,
    SecurityDocument,
    SecurityRole,
    SecurityUser,
)
from holdfast.security.dynamic.edit import new_document
from holdfast.security.dynamic.users import DynamicRules
from tests.support.node_bench import NodeBench, Peer
from tests.unit.node.test_rights import Bench, connack, publication

NOT_AUTHORIZED = 0x87


class DynamicBench(Bench):
    """`admin` may command; `mallory` may subscribe to some filters, and publish anything else."""

    def __init__(self) -> None:
        self.document = new_document("admin", "x")
        self.document.roles["some"] = SecurityRole(
            "some",
            acls=(
                RoleAcl(RECEIVES, "$CONTROL/#", 0, True),
                RoleAcl(SUBSCRIBES_PATTERN, "$CONTROL/#", 0, True),
                RoleAcl(SUBSCRIBES_PATTERN, "some/#", 0, True),
                RoleAcl(UNSUBSCRIBES_LITERAL, "some/kept", 0, False),
            ),
        )
        self.document.users["mallory"] = SecurityUser("mallory", roles=(RoleGrant("some"),))
        self.document.defaults = DefaultAccess(publishClientSend=True)
        super().__init__()

    def change(self, rules: str) -> None:
        self.node.state.acl = DynamicRules(self.document)
        self.node.state.admission.takes_commands = True


@pytest.fixture
def bench() -> Iterator[DynamicBench]:
    bench = DynamicBench()
    yield bench
    bench.settle()


def filters(peer: Peer, *filters: str) -> list[int]:
    peer.send(m.Subscribe(9, [m.SubscriptionRequest(each, 1) for each in filters]))
    (suback,) = peer.take(m.Suback)
    assert isinstance(suback, m.Suback)
    return suback.reasons


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_commands_are_answered_to_their_client_only(
    bench: DynamicBench, qos: int, version: int
) -> None:
    admin = bench.login("admin", version=version)
    mallory = bench.login("mallory", version=version)
    assert filters(admin, "$CONTROL/dynamic-security/#") == [1]
    assert filters(mallory, "$CONTROL/dynamic-security/#") == [1]
    before = len(bench.records())
    admin.send(publication(COMMAND_TOPIC, b"command", qos))
    if qos == 2:
        again = publication(COMMAND_TOPIC, b"command", qos)
        again.dup = True
        admin.send(again)
        admin.send_bytes(encode_ack(m.PUBREL, 1, 0, version))
        assert len(admin.take(m.Ack)) == 3
        assert admin.connection.unacknowledged == 0
    elif qos == 1:
        assert len(admin.take(m.Ack)) == 1
    assert bench.commands == [b"command"]
    assert [each.topic for each in admin.publishes()] == [RESPONSE_TOPIC.encode()]
    # Nobody else commands, nobody pretends to answer, and no command is in the log.
    denied = bench.node.state.stats.authorizations_denied
    for topic in (COMMAND_TOPIC, RESPONSE_TOPIC, "$CONTROL/other"):
        mallory.send(publication(topic, b"forged", 1))
        (puback,) = mallory.take(m.Ack)
        assert isinstance(puback, m.Ack)
        assert puback.reason == (NOT_AUTHORIZED if version == 5 else 0)
    assert bench.node.state.stats.authorizations_denied == denied + 3
    assert bench.commands == [b"command"]
    assert mallory.publishes() == []
    assert [each.topic for each in bench.records()[before:] if each.topic[:1] == b"$"] == []


def test_a_command_that_is_too_large_closes_the_connection(bench: DynamicBench) -> None:
    admin = bench.login("admin")
    admin.send(publication(COMMAND_TOPIC, bytes(COMMAND_BYTES_MAX + 1)))
    assert bench.commands == []
    assert admin.closed


def test_filters_without_a_right_are_refused_one_by_one(bench: DynamicBench) -> None:
    mallory = bench.login("mallory")
    wanted = ["some/x", "other", "some/kept", "$share/g/some/+", "$share/g/#"]
    assert filters(mallory, *wanted) == [1, NOT_AUTHORIZED, 1, 1, NOT_AUTHORIZED]
    mallory.send(m.Unsubscribe(8, ["some/x", "some/kept", "other"]))
    (unsuback,) = mallory.take(m.Unsuback)
    assert isinstance(unsuback, m.Unsuback)
    assert unsuback.reasons == [0, NOT_AUTHORIZED, 0x11]
    assert bench.node.state.stats.subscriptions_denied == 3
    events = [each.event for each in bench.notes if each.event.endswith("subscribe_denied")]
    assert events == ["subscribe_denied", "subscribe_denied", "unsubscribe_denied"]


def test_a_right_that_is_withdrawn_ends_delivery_and_departures_are_of_one_user(
    bench: DynamicBench,
) -> None:
    mallory, admin = bench.login("mallory"), bench.login("admin")
    assert filters(mallory, "some/#") == [1]
    admin.send(publication("some/1", b"before", 0))
    state = bench.node.state
    changed: SecurityDocument = bench.document.copy()
    changed.users["mallory"] = SecurityUser("mallory")
    done: list[str] = []
    rules = DynamicRules(changed)
    users = frozenset({"mallory"})
    replace_rules(state, rules, (), users, lambda: done.append("rules"))
    bench.run()
    assert done == ["rules"]
    admin.send(publication("some/1", b"after", 0))
    assert mallory.payloads() == [b"before"]
    state.start_work(UserDeparture(state, users, lambda: done.append("gone")))
    bench.run()
    assert done == ["rules", "gone"]
    assert (mallory.closed, admin.closed) == (True, False)


def test_a_disabled_user_does_not_connect_whatever_proves_its_name(bench: DynamicBench) -> None:
    admission = bench.node.state.admission
    admission.disabled_users = frozenset({"mallory"})
    admission.client_ids = {"admin": "one"}
    assert connack(bench.login("mallory")).reason == NOT_AUTHORIZED
    assert connack(bench.login("admin", "two")).reason == 0x85
    assert connack(bench.login("admin", "one")).reason == 0


def test_without_rules_nobody_commands() -> None:
    bench = NodeBench()
    bench.node.state.admission.takes_commands = True
    peer = bench.peer(5)
    peer.send(m.Connect(5, True, 0, "c", None, None, None, {}))
    peer.send(publication(COMMAND_TOPIC, b"command", 1))
    (puback,) = peer.take(m.Ack)
    assert isinstance(puback, m.Ack)
    assert (puback.reason, bench.commands) == (NOT_AUTHORIZED, [])
