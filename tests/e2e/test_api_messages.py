"""Publishing, retained messages, subscriptions and shared groups over the admin API."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.security.access.access_file import AccessFile
from holdfast.security.access.changes import add_token
from tests.e2e.brokers import PROCESSES, Holdfast, one_process
from tests.e2e.cluster_processes import ClusterProcesses, until
from tests.e2e.conftest import StartHoldfast
from tests.e2e.listeners_broker import ListenersBroker
from tests.e2e.test_admin_access import ask
from tests.e2e.test_doors import TAKEN
from tests.e2e.wire import USER_PROPERTY, Wire
from tests.support.api_client import Api, Refused
from tests.support.ports import free_port


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    directory = tmp_path_factory.mktemp("cluster")
    with ClusterProcesses(directory, settings={"cluster": {"partitions": 4}}) as cluster:
        yield cluster


def test_a_published_message_arrives_as_it_was_given(broker: Holdfast) -> None:
    api = Api(broker.admin_port)
    with Wire(broker.port) as client:
        client.connect("c")
        client.subscribe(("a/#", 2))
        for qos in (0, 1, 2):
            message = {
                "topic": "a/ü",
                "payload": f"hé {qos}",
                "qos": qos,
                "user_properties": [["k", "v"]],
            }
            done = api.post("publish", message)
            assert (done["code"], done["publisher"]) == (0, "admin:local")
            received = client.message()
            assert (received.topic, received.qos) == ("a/ü", qos)
            assert received.payload.decode() == f"hé {qos}"
            assert received.values(USER_PROPERTY) == [("k", "v")]
        api.post("publish", {"topic": "a", "payload_base64": "AP8="})
        assert client.message().payload == b"\x00\xff"
    assert api.post("publish", {"topic": "nobody"})["code"] in TAKEN
    for wrong in (
        {"topic": "a/#"},
        {"topic": "a", "qos": 3},
        {"topic": "a", "payload": "x", "payload_base64": "eA=="},
        {"topic": "a", "payload_base64": "?"},
        {"topic": "a", "colour": "red"},
    ):
        with pytest.raises(Refused, match="400"):
            api.post("publish", wrong)
    with pytest.raises(Refused, match="not authorised"):
        api.post("publish", {"topic": "$SYS/x"})
    assert api.get("sessions")["sessions"] == []


def test_a_message_is_published_with_the_rights_of_a_client(
    start_holdfast: StartHoldfast, tmp_path_factory: pytest.TempPathFactory
) -> None:
    acl = tmp_path_factory.mktemp("acl") / "acl"
    acl.write_text("user anna\ntopic write for-anna\npattern write of/%c\n")
    broker = start_holdfast({"security": {"acl_file": str(acl), "allow_anonymous": True}})
    api = Api(broker.admin_port)
    for qos in (0, 1):
        api.post("publish", {"topic": "anything", "qos": qos})
        api.post("publish", {"topic": "for-anna", "user": "anna", "qos": qos})
        api.post("publish", {"topic": "of/dev-1", "client": "dev-1", "qos": qos})
        for identity in ({"user": "bert"}, {"client": "dev-1"}):
            with pytest.raises(Refused, match="not authorised"):
                api.post("publish", {"topic": "for-anna", "qos": qos, **identity})


def test_a_delayed_message_has_the_rights_of_its_request_when_it_is_due(
    start_holdfast: StartHoldfast, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The operator may write everything, also later; `user` and `client` count with each other."""
    acl = tmp_path_factory.mktemp("acl") / "acl"
    acl.write_text("topic read #\nuser anna\ntopic write for-anna\npattern write of/%c\n")
    broker = start_holdfast({"security": {"acl_file": str(acl), "allow_anonymous": True}})
    api = Api(broker.admin_port)
    with Wire(broker.port) as client:
        client.connect("c")
        client.subscribe(("#", 1))
        expected = set()
        for qos in (0, 1):
            for topic, identity in (
                ("anything", {}),
                ("for-anna", {"user": "anna"}),
                ("of/dev-1", {"client": "dev-1", "user": "anna"}),
            ):
                message = {"topic": f"$delayed/1/{topic}", "payload": f"{topic} {qos}", "qos": qos}
                api.post("publish", {**message, **identity})
                expected.add(f"{topic} {qos}")
        received = {client.message().payload.decode() for _ in expected}
        assert received == expected
    with pytest.raises(Refused, match="not authorised"):
        api.post("publish", {"topic": "$delayed/1/for-anna", "user": "bert"})


@one_process("the client has to be at the one with the port")
def test_rights_that_nobody_here_knows_are_refused(tmp_path: Path) -> None:
    """They are those of the listener through which the client connects."""
    acl = tmp_path / "acl"
    acl.write_text("topic write mine\n")
    port = free_port()
    tenant = {"port": port, "acl_file": str(acl), "allow_anonymous": True}
    broker = ListenersBroker(tmp_path / "broker", [tenant])
    broker.start()
    try:
        api = Api(broker.admin_port)
        with pytest.raises(Refused, match=r"409: .*while it is connected"):
            api.post("publish", {"topic": "other", "client": "dev"})
        with Wire(port) as client:
            client.connect("dev")
            api.post("publish", {"topic": "mine", "client": "dev"})
            with pytest.raises(Refused, match=r"409: .*not authorised"):
                api.post("publish", {"topic": "other", "client": "dev"})
    finally:
        broker.kill()


COMMAND = "$CONTROL/dynamic-security/v1"


def test_commands_over_http_need_the_role_admin_and_name_their_caller(
    start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    """`user` gives the rights of any user, so an operator could make itself an administrator."""
    users = tmp_path / "users.json"
    acls = [{"acltype": "publishClientSend", "topic": "$CONTROL/#", "allow": True}]
    users.write_text(
        json.dumps(
            {
                "clients": [{"username": "boss", "roles": [{"rolename": "r"}]}],
                "roles": [{"rolename": "r", "acls": acls}],
            }
        )
    )
    broker = start_holdfast({"security": {"dynamic_security_file": str(users)}})
    secrets = {
        role: AccessFile(broker.data).change(add_token(role, 0))[1]
        for role in ("operator", "admin")
    }
    until(lambda: ask(broker.admin_port, "GET", "/metrics").status == 401, "the tokens count")
    payload = json.dumps({"commands": [{"command": "createClient", "username": "mallory"}]})
    body = {"topic": COMMAND, "payload": payload, "user": "boss"}
    refused = ask(broker.admin_port, "POST", "/api/v1/publish", secrets["operator"], body)
    assert (refused.status, "role admin" in refused.json["error"]) == (403, True)
    assert "mallory" not in users.read_text()
    done = ask(broker.admin_port, "POST", "/api/v1/publish", secrets["admin"], body)
    assert done.status == 200, done.json
    # Several processes agree on the users instead, as a cluster does.
    assert ("mallory" in users.read_text()) == (PROCESSES == 1)
    entries = ask(broker.admin_port, "GET", "/api/v1/audit", secrets["admin"]).json["entries"]
    own = f"token {secrets['admin'].split('_')[1]}"
    [command] = [each for each in entries if each["method"] == "COMMAND"]
    assert command["who"] == own


def test_retained_messages_are_listed_deleted_and_restored(broker: Holdfast) -> None:
    api = Api(broker.admin_port)
    topics = sorted(f"site/{line}/{unit}" for line in "ab" for unit in range(5))
    with Wire(broker.port) as client:
        client.connect("p")
        for topic in topics:
            client.publish(topic, topic.encode(), qos=1, retain=True)
        client.publish("site/a/qos0", b"\xff\x00", qos=0, retain=True)
        client.ping()
    until(lambda: api.get("retained", filter="site/a/qos0")["messages"], "it is stored")
    page = api.get("retained", filter="site/#", limit=4)
    listed = [row["topic"] for row in page["messages"]]
    while page["next"]:
        page = api.get("retained", filter="site/#", limit=4, after=page["next"])
        listed += [row["topic"] for row in page["messages"]]
    assert listed == sorted([*topics, "site/a/qos0"])
    found = api.get("retained/message", topic="site/a/qos0")
    assert found["content"] == {"bytes": 2, "base64": "/wA="}
    assert found["message"]["publisher"] == "p"

    assert len(api.delete("retained", filter="site/a/+", dry_run=True)["deleted"]) == 6
    with Wire(broker.port) as client:
        client.connect("live")
        client.subscribe(("site/a/0", 0x11))  # QoS 1, RETAIN as published
        assert client.message().payload == b"site/a/0"
        deleted = api.delete("retained", filter="site/a/+")
        assert client.message().payload == b""
    assert [row["topic"] for row in api.get("retained", filter="site/#")["messages"]] == topics[5:]

    broker.kill()
    broker.start()
    with Wire(broker.port) as client:
        client.connect("p")
        client.publish("site/a/1", b"newer", qos=1, retain=True)
    body = {"deleted": [*deleted["deleted"], {"topic": "x", "partition": 0, "offset": 1 << 40}]}
    done = api.post("retained/restore", body)
    assert done["restored"] == 5
    assert [each["topic"] for each in done["not_restored"]] == ["site/a/1", "x"]
    assert api.get("retained/message", topic="site/a/1")["content"]["text"] == "newer"
    assert api.get("retained/message", topic="site/a/0")["content"]["text"] == "site/a/0"
    assert api.get("retained/message", topic="site/a/qos0")["content"]["base64"] == "/wA="


def test_topics_are_a_tree_with_rates_and_last_values(broker: Holdfast) -> None:
    api = Api(broker.admin_port)
    with Wire(broker.port) as client:
        client.connect("p")
        for number in range(6):
            client.publish(f"plant/{number % 2}/state", b"%d" % number, qos=1)
        client.publish("plant/0", b"on", qos=1, retain=True)
        client.publish("plant-b/x", b"kept", qos=0, retain=True)
        client.publish("quick", b"-", qos=0)
        client.ping()
        root = {each["level"]: each for each in api.get("topics")["topics"]}
        assert {"plant", "plant-b", "$SYS"} <= set(root)
        assert (root["plant"]["topics"], root["plant"]["is_topic"]) == (3, False)
        assert root["plant"]["messages_per_s"] > 0
        if PROCESSES == 1:  # Of several, the one that is asked may not have seen it.
            assert (root["quick"]["is_topic"], root["quick"]["messages_per_s"]) == (True, 0)
        below = api.get("topics", prefix="plant")["topics"]
        assert [each["level"] for each in below] == ["0", "1"]
        assert below[0]["retained"]
        assert below[0]["has_children"]
        assert below[0]["value"]["text"] == "on"
        [state] = api.get("topics", prefix="plant/1")["topics"]
        assert (state["topic"], state["value"]["text"]) == ("plant/1/state", "5")
        page = api.get("topics", prefix="plant", limit=1)
        rest = api.get("topics", prefix="plant", limit=1, after=page["next"])
        assert [each["level"] for each in page["topics"] + rest["topics"]] == ["0", "1"]


def test_subscriptions_are_found_by_topic_and_client(broker: Holdfast) -> None:
    api = Api(broker.admin_port)
    with contextlib.ExitStack() as stack:
        for number in range(3):
            client = stack.enter_context(Wire(broker.port))
            client.connect(f"c{number}", expiry_s=100)
            client.subscribe((f"a/{number}/#", 1), ("$share/g/a/+/b", 0))
        page = api.get("subscriptions", topic="a/1/b", limit=2)
        rows = page["subscriptions"]
        rows += api.get("subscriptions", topic="a/1/b", limit=2, after=page["next"])[
            "subscriptions"
        ]
        assert page["matched"] == 4
        assert [(row["filter"], row["client"]) for row in rows] == [
            *(("$share/g/a/+/b", f"c{number}") for number in range(3)),
            ("a/1/#", "c1"),
        ]
        assert api.get("subscriptions", client="c2")["matched"] == 2
        assert api.get("subscriptions", search="SHARE")["matched"] == 3


def test_a_group_shows_its_members_and_its_oldest_message(broker: Holdfast) -> None:
    api = Api(broker.admin_port)
    key = "$share/g/in/#"
    with Wire(broker.port) as member:
        member.connect("m1", expiry_s=100)
        member.subscribe((key, 1))
        with Wire(broker.port) as publisher:
            publisher.connect("p")
            for number in range(3):
                publisher.publish("other", b"-", qos=1)
                publisher.publish(f"in/{number}", b"-", qos=1)
        for _ in range(2):
            member.message()
        [row] = api.get("groups")["groups"]
        assert (row["group"], row["member_count"], row["connected_count"]) == (key, 1, 1)
        detail = api.get("group", group=key)
        assert [each["client"] for each in detail["members"]] == ["m1"]
        assert detail["members"][0]["connected"]
    until(
        lambda: (api.get("group", group=key)["oldest"] or {}).get("topic") == "in/2",
        "the unacknowledged message is the oldest",
    )
    with Wire(broker.port) as member:
        member.connect("m1", clean=False, expiry_s=100)
        member.message()
        until(lambda: api.get("group", group=key)["oldest"] is None, "nothing is left")
    with pytest.raises(Refused, match="404"):
        api.get("group", group="$share/none/x")


def test_every_node_of_a_cluster_shows_messages_groups_and_subscriptions(
    cluster: ClusterProcesses,
) -> None:
    everywhere = {name: Api(node.admin_port) for name, node in cluster.nodes.items()}
    key = "$share/g/in/#"
    with contextlib.ExitStack() as stack:
        members = {}
        for name, node in cluster.nodes.items():
            members[name] = stack.enter_context(Wire(node.port))
            members[name].connect(f"m-{name}", expiry_s=300)
            members[name].subscribe((key, 1))
        for api in everywhere.values():
            until(
                lambda api=api: api.get("group", group=key)["group"]["connected_count"] == 3,
                "all members are connected",
            )
            detail = api.get("group", group=key)
            assert [each["node"] for each in detail["members"]] == ["n1", "n2", "n3"]
            assert api.get("subscriptions", topic="in/1")["matched"] == 3
            [row] = api.get("groups")["groups"]
            assert (row["connected_count"], row["coordinator"] != "") == (3, True)

        # A message published at any node's admin port is acknowledged by the cluster.
        for number, api in enumerate(everywhere.values()):
            message = {"topic": f"kept/{number}", "payload": "x", "retain": True, "qos": 2}
            assert api.post("publish", message)["code"] in (0, 16)
        for api in everywhere.values():
            until(
                lambda api=api: len(api.get("retained", filter="kept/#")["messages"]) == 3,
                "every node has the retained messages",
            )
        deleted = everywhere["n2"].delete("retained", filter="kept/#")
        for api in everywhere.values():
            until(lambda api=api: not api.get("retained", filter="kept/#")["messages"], "deleted")
        assert (
            everywhere["n3"].post("retained/restore", {"deleted": deleted["deleted"]})["restored"]
            == 3
        )

        # The group's position is where it began, and all records behind it are for others.
        for name, api in everywhere.items():
            until(lambda api=api: len(api.get("retained", filter="kept/#")["messages"]) == 3, name)
            detail = api.get("group", group=key)
            assert (detail["oldest"], detail["oldest_is_known"]) == (None, True), name
            assert detail["group"]["log_lag"] == 0, name
