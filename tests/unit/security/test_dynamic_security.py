"""Dynamic security: commands, rights and the file. tests/data/dynamic_security_commands.txt is a
conversation with Mosquitto 2.0.11, but for one error text, which newer versions have."""

import contextlib
import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.protocol.topics.names import covers, matches
from holdfast.security.acl import READ, WRITE, AclFile
from holdfast.security.dynamic import document as stored
from holdfast.security.dynamic.commands import encode_responses, run_commands
from holdfast.security.dynamic.document import (
    PUBLISHES,
    RECEIVES,
    SUBSCRIBES_LITERAL,
    SUBSCRIBES_PATTERN,
    DynamicSecurityError,
    SecurityDocument,
    parse,
)
from holdfast.security.dynamic.edit import SecurityChanges, SecurityEdit, new_document
from holdfast.security.dynamic.file import DynamicSecurityFile, write
from holdfast.security.dynamic.users import DynamicRules, DynamicUsers
from holdfast.security.filter_verdict import verdict_on_filter

ADMIN = new_document("admin", "secret")
DATA = Path(__file__).parents[2] / "data" / "dynamic_security_commands.txt"


def run(document: SecurityDocument, *commands: dict[str, object]) -> list[dict[str, object]]:
    """The responses; all of them must succeed."""
    edit = SecurityEdit(document, SecurityChanges())
    payload = json.dumps({"commands": commands}).encode()
    found = [each.response for each in run_commands(edit, payload)]
    assert not [each for each in found if "error" in each]
    return found


def command(name: str, **fields: object) -> dict[str, object]:
    return {"command": name, **fields}


def test_each_change_shows_its_state_before_and_after() -> None:
    document = new_document("admin", "secret")
    edit = SecurityEdit(document, SecurityChanges())

    def shown(name: str, **fields: object) -> tuple[object, object]:
        payload = json.dumps({"commands": [command(name, **fields)]}).encode()
        (outcome,) = run_commands(edit, payload)
        assert outcome.is_change
        # As in the record.
        both = msgspec.json.encode((outcome.before, outcome.after))
        before, after = msgspec.json.decode(both)
        return before, after

    made = {"username": "ann", "password": "set"}
    assert shown("createClient", username="ann", password="p") == (None, made)
    # A refused command changed nothing.
    assert shown("createClient", username="ann", password="q") == (made, None)
    other = {**made, "password": "changed"}
    assert shown("setClientPassword", username="ann", password="q") == (made, other)
    assert shown("createGroup", groupname="g") == (None, {"groupname": "g"} | GROUP)
    joined = {**made, "groups": ["g"]}
    assert shown("addGroupClient", groupname="g", username="ann") == (made, joined)
    assert shown("deleteGroup", groupname="g")[1] is None
    before, after = shown("setAnonymousGroup", groupname="nobody")
    assert (before, after) == ({"anonymousGroup": ""}, None)
    allow = {"acltype": "subscribe", "allow": True}
    before, after = shown("setDefaultACLAccess", acls=[allow])
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert (before["subscribe"], after["subscribe"]) == (False, True)
    for wrong in (7, None, ["x"], {}):
        assert shown("deleteRole", rolename=wrong) == (None, None)


GROUP: dict[str, object] = {"textname": "", "textdescription": "", "roles": [], "members": []}


def test_each_command_is_answered_as_by_mosquitto() -> None:
    document = new_document("admin", "secret")
    lines = DATA.read_text().splitlines()
    for asked, expected in zip(lines[::2], lines[1::2], strict=True):
        changes = SecurityChanges()
        changed = document.copy()
        outcomes = run_commands(SecurityEdit(changed, changes), asked[2:].encode())
        assert json.loads(encode_responses(outcomes)) == json.loads(expected), asked
        assert bool(changes.count) == any(each.is_change and not each.error for each in outcomes)
        again = parse(b"".join(changed.chunks()), "again")
        if not changes.count:
            assert b"".join(changed.chunks()) == b"".join(document.chunks()), asked
        assert b"".join(again.chunks()) == b"".join(changed.chunks())
        document = changed


# --------------------------------------------------------------------------------------- rights

LEVELS = st.sampled_from(["a", "b", "+"])
FILTERS = st.builds(
    lambda levels, end: "/".join([*levels, *end]) or "#",
    st.lists(LEVELS, max_size=3),
    st.sampled_from([[], ["#"]]),
)
TOPICS = st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=3).map("/".join)
ACLS = st.lists(
    st.builds(
        stored.RoleAcl,
        st.sampled_from([PUBLISHES, RECEIVES, SUBSCRIBES_LITERAL, SUBSCRIBES_PATTERN]),
        FILTERS,
        st.integers(-1, 2),
        st.booleans(),
    ),
    max_size=6,
    unique_by=lambda acl: (acl.acltype, acl.topic),
)


def document_of(*roles: list[stored.RoleAcl], defaults: stored.DefaultAccess) -> SecurityDocument:
    document = SecurityDocument()
    document.defaults = defaults
    for index, acls in enumerate(roles):
        name = f"r{index}"
        document.roles[name] = stored.SecurityRole(name, acls=stored.acls_by_priority(acls))
    grants = tuple(stored.RoleGrant(f"r{index}") for index in range(len(roles)))
    document.users["u"] = stored.SecurityUser("u", roles=grants[:1])
    document.groups["g"] = stored.UserGroup("g", roles=grants[1:])
    document.join("u", "g", -1)
    return document


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(ACLS, ACLS),
    st.builds(stored.DefaultAccess, st.booleans(), st.booleans(), st.booleans()),
    TOPICS,
    FILTERS,
)
@example(
    (
        [
            stored.RoleAcl(SUBSCRIBES_LITERAL, "#", 0, False),
            stored.RoleAcl(SUBSCRIBES_LITERAL, "a/a", 0, False),
            stored.RoleAcl(SUBSCRIBES_PATTERN, "#", 0, True),
        ],
        [stored.RoleAcl(SUBSCRIBES_LITERAL, "a/+", 0, False)],
    ),
    stored.DefaultAccess(True, True, False, False),
    "a/a",
    "a/+",
)
def test_rights_are_those_of_the_first_rule(
    roles: tuple[list[stored.RoleAcl], list[stored.RoleAcl]],
    defaults: stored.DefaultAccess,
    topic: str,
    filter: str,
) -> None:
    rules = DynamicRules(document_of(*roles, defaults=defaults)).for_client("u", "c")

    def first(kind: str, about: "object") -> bool | None:
        for role in roles:
            for acl in sorted(role, key=lambda each: -each.priority):
                if acl.acltype == kind and about(acl.topic):  # type: ignore[operator]
                    return acl.allow
        return None

    sends = first(PUBLISHES, lambda pattern: matches(pattern, topic))
    assert rules.can_write(topic) == (defaults.publishClientSend if sends is None else sends)

    def subscribes(wanted: str) -> bool:
        for role in roles:
            for kind in (SUBSCRIBES_LITERAL, SUBSCRIBES_PATTERN):
                for acl in sorted(role, key=lambda each: -each.priority):
                    is_literal = kind == SUBSCRIBES_LITERAL
                    found = acl.topic == wanted if is_literal else covers(acl.topic, wanted)
                    if acl.acltype == kind and found:
                        return acl.allow
        return defaults.subscribe

    assert rules.can_subscribe(filter) == subscribes(filter)
    assert rules.can_subscribe(f"$share/g/{filter}") == subscribes(filter)
    receives = first(RECEIVES, lambda pattern: matches(pattern, topic))
    receives = defaults.publishClientReceive if receives is None else receives
    possible = {topic, "#"} | {
        acl.topic
        for role in roles
        for acl in role
        if acl.acltype in (SUBSCRIBES_LITERAL, SUBSCRIBES_PATTERN) and matches(acl.topic, topic)
    }
    # A client receives only what it may subscribe to now.
    assert rules.can_read(topic) == (receives and any(map(subscribes, possible)))


@given(FILTERS, FILTERS, TOPICS)
def test_a_filter_that_covers_another_matches_its_topics(
    wide: str, narrow: str, topic: str
) -> None:
    if covers(wide, narrow) and matches(narrow, topic):
        assert matches(wide, topic)
    assert covers(wide, topic) == matches(wide, topic)


def test_names_stand_in_rules_and_defaults_never_give_control() -> None:
    document = new_document("admin", "x")
    run(
        document,
        command("createRole", rolename="own", acls=[
            {"acltype": PUBLISHES, "topic": "of/%u/%c", "allow": True},
            {"acltype": SUBSCRIBES_LITERAL, "topic": "to/%u/#", "allow": True},
        ]),
        command("createClient", username="+", roles=[{"rolename": "own"}]),
        command("createClient", username="ann", roles=[{"rolename": "own"}]),
    )  # fmt: skip
    rules = DynamicRules(document, AclFile.parse("topic history #\nuser ann\ntopic read x", "acl"))
    ann = rules.for_client("ann", "c1")
    assert ann.can_write("of/ann/c1")
    assert not ann.can_write("of/ann/c2")
    assert ann.can_subscribe("to/ann/#")
    assert ann.can_read("to/ann/1")
    assert not ann.can_read("to/bob/1")
    # Where nothing decides, the ACL file does.
    assert ann.can_read("x")
    assert not ann.can_replay("to/ann/1")
    assert ann.verdict_on("to/ann/1", READ).text() == "role own: subscribeLiteral read to/ann/#"
    assert not rules.for_client("+", "c1").can_write("of/bob/c1")
    run(
        document,
        command("createRole", rolename="free", acls=[
            {"acltype": kind, "topic": "%c/#", "allow": True}
            for kind in (PUBLISHES, SUBSCRIBES_LITERAL, SUBSCRIBES_PATTERN)
        ]),
        command("addClientRole", username="ann", rolename="free"),
    )  # fmt: skip
    named = DynamicRules(document).for_client("ann", "$CONTROL")
    assert not named.can_write("$CONTROL/dynamic-security/v1")
    assert not named.can_subscribe("$CONTROL/#")
    assert not named.can_read("$CONTROL/x")
    assert DynamicRules(document).for_client("ann", "c1").can_write("c1/x")
    open_to_all = [{"acltype": kind, "allow": True} for kind in (PUBLISHES, "subscribe")]
    run(document, command("setDefaultACLAccess", acls=open_to_all))
    ann = DynamicRules(document).for_client("ann", "c1")
    assert ann.can_write("anything")
    assert ann.can_read("anything")
    assert not ann.can_write("$CONTROL/dynamic-security/v1")
    assert not ann.can_subscribe("$CONTROL/#")
    assert ann.verdict_on("x", WRITE).text() == "defaultACLAccess: publishClientSend write #"
    assert DynamicRules(document).for_client("admin", "").can_write("$CONTROL/dynamic-security/v1")


# --------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "truncated"),
        ("[]", "Expected `object`"),
        ('{"clients": [{"username": ""}]}', "the client '' has no name"),
        ('{"clients": [{"username": "a"}, {"username": "a"}]}', "the client 'a' is there twice"),
        (
            '{"clients": [{"username": "a", "password": "x", "salt": "eA==", "iterations": 1}]}',
            "the password of client 'a': salt or hash is not base64",
        ),
        (
            '{"clients": [{"username": "a", "roles": [{"rolename": "r"}]}]}',
            "client 'a': there is no role 'r'",
        ),
        (
            '{"groups": [{"groupname": "g", "clients": [{"username": "b"}]}]}',
            "group 'g': there is no client 'b'",
        ),
        ('{"anonymousGroup": "g"}', "anonymousGroup: there is no group 'g'"),
        (
            '{"roles": [{"rolename": "r", "acls": [{"acltype": "x", "topic": "t"}]}]}',
            "role 'r': x 't': Unknown acltype",
        ),
        (
            '{"roles": [{"rolename": "r", "acls": [{"acltype": "publishClientSend",'
            ' "topic": "a#"}]}]}',
            "role 'r': publishClientSend 'a#': Invalid ACL topic",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(DynamicSecurityError) as error:
        parse(text.encode(), "users.json")
    assert str(error.value).startswith("users.json: ")
    assert problem in str(error.value)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["commands", "command", "username", "rolename", "groupname", "acls",
                         "acltype", "topic", "roles", "groups", "clients", "priority", "count",
                         "password", "allow"]), inner, max_size=4),
    max_leaves=10,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_garbage_is_answered_and_changes_nothing_wrong(payload: bytes) -> None:
    document = ADMIN.copy()
    for name in ("createClient", "modifyClient", "createRole", "listRoles"):
        wrapped = payload
        fields: object = None
        with contextlib.suppress(ValueError):
            fields = json.loads(payload)
        if isinstance(fields, dict):
            wrapped = json.dumps({"commands": [{**fields, "command": name}]}).encode()
        responses = encode_responses(
            run_commands(SecurityEdit(document, SecurityChanges()), wrapped)
        )
        assert json.loads(responses)["responses"] is not None
    parse(b"".join(document.chunks()), "document")


def test_a_change_replaces_the_file_that_was_read_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    write(path, new_document("admin", "first"))
    assert path.stat().st_mode & 0o777 == 0o600
    file = DynamicSecurityFile.load(path)
    document = file.document.copy()
    run(document, command("createClient", username="ann", password="p"))
    changed = file.replaced(document)
    assert set(DynamicSecurityFile.load(path).document.users) == {"admin", "ann"}
    assert os.listdir(tmp_path) == ["users.json"]
    with pytest.raises(DynamicSecurityError, match="changed by another program"):
        file.replaced(document)
    users = DynamicUsers.of(changed, None, None)
    assert users.passwords.verify("ann", b"p")
    assert not users.passwords.verify("ann", b"q")
    run(document, command("disableClient", username="ann"))
    run(document, command("setClientId", username="admin", clientid="one"))
    later = users.changed(changed.replaced(document), ["ann", "admin"])
    assert not later.passwords.verify("ann", b"p")
    assert later.disabled == {"ann"}
    assert later.client_ids == {"admin": "one"}
    assert "ann" not in later.passwords


def test_a_filter_is_explained_by_role_and_default() -> None:
    document = new_document("admin", "secret")
    acls = [
        {"acltype": "publishClientReceive", "topic": "plant/secret/#", "allow": False},
        {"acltype": "subscribePattern", "topic": "%u/#", "allow": True},
    ]
    run(
        document,
        command("createRole", rolename="worker", acls=acls),
        command("createClient", username="plant", roles=[{"rolename": "worker"}]),
    )
    rules = DynamicRules(document).for_client("plant", "c")
    found = verdict_on_filter(rules.in_order(READ, "plant/#"), "plant/#")
    assert found.verdict == "partly"
    assert [rule.place() for rule in found.rules] == ["role worker", "defaultACLAccess"]
    assert rules.subscription_verdict("plant/x").rule is not None
    assert not rules.subscription_verdict("other/#").is_allowed
