"""Nothing gets around the gate (`node.rights`): every function that sends a client a message, or
brings one into the log, is listed here with the test that plays that way with a client that may
not. A new way fails until it is listed, and so shown."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import holdfast

ROOT: Final = Path(holdfast.__file__).parent
TESTS: Final = Path(__file__).parent
GATE: Final = "node/rights.py"
LAYERS: Final = ("session", "node", "cluster", "drivers", "federator", "api")
"""That see messages of clients."""

ASKS: Final = {"can_read", "can_write", "for_client"}
"""Methods of access control lists, for the gate alone."""
FIELDS: Final = {
    "acl": {"api/server.py:new_node", "node/state.py:NodeState.__init__"},
    "rights": {
        "session/connection.py:Connection.__init__",
        "session/session.py:Session.__init__",
    },
}
"""Attributes that only the gate reads, and where they are set."""

# What makes or hands on a PUBLISH for a client, and who calls it.
SENDS: Final = {
    "frame",
    "frame_qos0",
    "frame_special",
    "_encode_qos0",
    "_special_frame",
    "_send_again",
    "send_qos0",
    "send_inflight",
    "send_group_qos0",
    "send_to_member",
    "_send_page",
    "_hand_to_session",
    "_hand_to_group",
    "deliver",
    "_deliver_to_groups",
    "put_aside",
}
# Kinds of records that hold clients' messages.
KINDS: Final = {"MESSAGE", "RETAINED"}

LIVE = "test_a_client_gets_only_what_it_may_read"
GROUP = "test_a_member_of_a_group_gets_only_what_it_may_read"
LOG = "test_a_client_gets_from_the_log_only_what_it_may_read"
INFLIGHT = "test_what_is_inflight_is_asked_for_again"
ASIDE = "test_a_member_that_may_not_read_takes_nothing_from_those_that_are_away"
WRITE = "test_a_client_publishes_only_where_it_may"
WILL = "test_a_will_is_asked_for_again_when_it_is_published"
FEDERATED = "test_what_the_federation_brings_under_sys_is_refused"
NODES = "test_qos_0_of_a_group_goes_on_to_a_node_with_a_member_that_may_read_it"
CLUSTER = "test_a_group_over_nodes_gives_each_record_to_a_member_that_may_read_it"
PLAIN_CLUSTER = "test_a_client_of_a_cluster_gets_only_what_it_may_read"

READ_WAYS: Final = {
    # They make frames of a message: who calls them is listed too.
    "session/message.py:Message.frame_qos0": LIVE,
    "node/delivery.py:_special_frame": LIVE,
    # The routes have only those that may read (`routing._resolve`).
    "node/delivery.py:deliver": LIVE,
    "node/delivery.py:send_qos0": LIVE,
    "node/delivery.py:_hand_to_session": LIVE,
    "node/delivery.py:send_inflight": LIVE,
    "node/held_publish.py:HeldPublish.release": LIVE,
    "node/publishing.py:_publish_qos0": LIVE,
    "node/publishing.py:publish_own": LIVE,
    "node/wills.py:_publish_qos0": LIVE,
    "node/federating.py:publish": LIVE,
    "cluster/applying.py:Applier._deliver": PLAIN_CLUSTER,
    "cluster/interest.py:Interest.handle_qos0": PLAIN_CLUSTER,
    # Asked one by one.
    "node/retained.py:SessionScans.step": LIVE,
    "node/retained.py:_send_page": LIVE,
    "node/delivery.py:pump": LOG,
    "node/catching_up.py:send_unsent": INFLIGHT,
    "node/catching_up.py:_send_again": INFLIGHT,
    # Of shared groups.
    "node/delivery.py:_hand_to_group": GROUP,
    "node/delivery.py:send_group_qos0": GROUP,
    "node/delivery.py:send_to_member": GROUP,
    "node/delivery.py:pump_group": GROUP,
    "node/delivery.py:_pass_over": ASIDE,
    "node/delivery.py:send_aside": ASIDE,
    "cluster/interest.py:Interest.spread": NODES,
    "cluster/interest.py:Interest._deliver_to_groups": NODES,
}
OF_OTHERS: Final = {
    # The edge of a federation: what it delivers comes to the broker by `federating.publish`.
    "federator/deliveries.py",
    "federator/edge_mqtt.py",
    "federator/federator.py",
}
WRITE_WAYS: Final = {
    "node/publishing.py:handle_publish": WRITE,
    "node/publishing.py:log_qos0": WRITE,
    "node/wills.py:publish_will": WILL,
    "node/federating.py:publish": FEDERATED,
    "node/federating.py:retain": FEDERATED,
}
COPIES: Final = {
    # Records between nodes or in snapshots, of messages that were asked for before.
    "node/recovery.py:Recovery._apply",
    "node/recovery.py:retained_entry",
    "cluster/interest.py:Interest._send",
    "cluster/group_wire.py:encode_assign",
    "cluster/admission.py:",
    "cluster/forwarding.py:",
    "cluster/applying.py:",
}


def functions() -> Iterator[tuple[str, ast.AST]]:
    """`module:Class.function` with its tree, less the functions within it."""
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            module = path.relative_to(ROOT).as_posix()
            tree = ast.parse(path.read_text())
            yield from _functions(f"{module}:", "", tree)


def _functions(module: str, prefix: str, tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(module, f"{prefix}{node.name}.", node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{module}{prefix}{node.name}", node


def called(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                found.add(function.attr)
            elif isinstance(function, ast.Name):
                found.add(function.id)
    return found


def attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_the_gate_alone_knows_of_access_control_lists() -> None:
    for name, tree in functions():
        if name.startswith(GATE):
            continue
        assert not called(tree) & ASKS, f"{name} asks an access control list: node.rights does"
        for field, where in FIELDS.items():
            assert field not in attributes(tree) or name in where or _is_other(name), (
                f"{name} uses .{field}: ask node.rights"
            )


def _is_other(name: str) -> bool:
    # The configuration's own, before there is a node.
    return name.startswith(("api/server.py:Server", "api/sharing.py", "api/clustering.py"))


def test_every_way_to_a_client_is_listed() -> None:
    found = {
        name
        for name, tree in functions()
        if called(tree) & SENDS and name.split(":")[0] not in OF_OTHERS
    }
    _compare(found, READ_WAYS)


def test_every_way_into_the_log_is_listed() -> None:
    found = {
        name
        for name, tree in functions()
        if any(
            isinstance(node, ast.Attribute)
            and node.attr in KINDS
            and isinstance(node.value, ast.Name)
            and node.value.id == "log_record"
            for node in ast.walk(tree)
        )
        and not any(name.startswith(copy) for copy in COPIES)
    }
    _compare(found, WRITE_WAYS)


def _compare(found: set[str], listed: dict[str, str]) -> None:
    new = found - set(listed)
    assert not new, f"{sorted(new)}: show in tests/unit that rights are asked on this way, list it"
    gone = set(listed) - found
    assert not gone, f"{sorted(gone)} are listed and not there"


def test_the_tests_that_are_named_are_there() -> None:
    source = "".join(path.read_text() for path in TESTS.glob("test_rights*.py"))
    for name in {*READ_WAYS.values(), *WRITE_WAYS.values()}:
        assert f"def {name}(" in source, name
