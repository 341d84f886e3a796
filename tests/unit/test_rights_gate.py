"""Nothing gets around the gate (`node.rights`): every function that sends a client a message, or
brings one into the log, is listed here with the test that plays that way with a client that may
not. A new way fails until it is listed, and so shown."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import holdfast
from tests.support.source_tree import modules, statements

ROOT: Final = Path(holdfast.__file__).parent
TESTS: Final = Path(__file__).parent
GATE: Final = (
    "node/rights.py",
    "node/admission/client_rights.py",
    "node/topic_rights/questions.py",
    "node/admission/explanation.py",
)
"""The gate, the memory of its decisions, the questions to a service, and the explanation."""
LAYERS: Final = ("node", "io", "process", "holdfast_federation/sidecar", "api")
"""That see messages of clients."""

ASKS: Final = {
    "can_leave",
    "can_read",
    "can_replay",
    "can_subscribe",
    "can_unsubscribe",
    "can_write",
    "for_client",
    "verdict_on",
}
"""Methods of access control lists, for the gate alone."""
FIELDS: Final = {
    "acl": {
        "io/settings/node_settings.py:new_node",
        "io/settings/reload.py:apply_security",
        "node/node_state.py:NodeState.__init__",
        "node/session/listener_rules.py:ListenerRules.__init__",
        "io/sockets/listeners.py:OpenListener.apply_rules",
    },
    "rights": {
        "node/session/connection.py:Connection.__init__",
        "node/session/session.py:Session.__init__",
        # Kept for the will of a client that is gone.
        "node/ownership/live_sessions.py:LiveSessions.detached",
        "node/state/replicated.py:ReplicatedState._change_session",
    },
}
"""Attributes that only the gate reads, and where they are set."""

# What makes or hands on a PUBLISH for a client, and who calls it.
SENDS: Final = {
    "frame",
    "frame_qos0",
    "frame_special",
    "_encode_qos0",
    "special_frame",
    "_send_past_qos0",
    "resend",
    "send_qos0",
    "send_inflight",
    "send_group_qos0",
    "send_to_member",
    "send_unlisted",
    "_send_page",
    "_deliver_to_session",
    "_deliver_to_group",
    "deliver",
    "_deliver_to_groups",
    "defer_message",
}
# They make a frame for its length only.
MEASURES: Final = {"api/views/trace.py:TracedMessage.packet_bytes"}
# Kinds of records that hold clients' messages.
KINDS: Final = {"MESSAGE", "RETAINED"}

LIVE = "test_a_client_gets_only_what_it_may_read"
GROUP = "test_a_member_of_a_group_gets_only_what_it_may_read"
LOG = "test_a_client_gets_from_the_log_only_what_it_may_read"
INFLIGHT = "test_what_is_inflight_is_asked_for_again"
ASIDE = "test_a_member_that_may_not_read_takes_nothing_from_those_that_are_away"
WRITE = "test_a_client_publishes_only_where_it_may"
WILL = "test_a_will_is_asked_for_again_when_it_is_published"
DELAYED: Final = "test_a_delayed_message_is_refused_when_it_is_published"
DELAYED_LATER: Final = "test_a_delayed_message_is_dropped_when_it_is_due"
LIVE_QOS0 = "test_a_replaying_client_gets_live_qos0_only_of_what_it_may_read"
REPLAY = "test_a_replay_brings_only_what_the_client_may_read"
FEDERATED = "test_what_the_federation_brings_under_sys_is_refused"
NODES = "test_qos_0_of_a_group_goes_on_to_a_node_with_a_member_that_may_read_it"
COMMANDS = "test_commands_are_answered_to_their_client_only"
CLUSTER = "test_a_group_over_nodes_gives_each_record_to_a_member_that_may_read_it"
PLAIN_CLUSTER = "test_a_client_of_a_cluster_gets_only_what_it_may_read"

READ_WAYS: Final = {
    # They make frames of a message: who calls them is listed too.
    "node/session/message.py:Message.frame_qos0": LIVE,
    "node/delivery/transmission.py:special_frame": LIVE,
    # The routes have only those that may read (`routing._resolve`).
    "node/delivery/delivery.py:deliver": LIVE,
    "node/delivery/transmission.py:send_qos0": LIVE,
    "node/delivery/delivery.py:_deliver_to_session": LIVE,
    "node/delivery/transmission.py:send_inflight": LIVE,
    "node/delivery/live_lane.py:_send": LIVE,
    "node/delivery/delivery.py:deliver_committed_qos0": LIVE_QOS0,
    "node/delivery/live_lane.py:deliver_qos0": LIVE_QOS0,
    "node/delivery/transmission.py:send_log_qos0": LIVE_QOS0,
    "node/publish/completion.py:hand_out_qos0": LIVE,
    "node/publish/inbound.py:_publish_qos0": LIVE,
    "node/sys_topics.py:publish_own": LIVE,
    "node/ownership/wills_and_expiry.py:_publish_qos0": LIVE,
    "node/publish/delayed.py:_publish_qos0": LIVE,
    "node/federation_session.py:publish": LIVE,
    "node/publish/apply.py:Applier._deliver": PLAIN_CLUSTER,
    "node/routing/qos0_routing.py:Qos0Routing._deliver": PLAIN_CLUSTER,
    "node/routing/qos0_routing.py:Qos0Routing.handle_qos0": PLAIN_CLUSTER,
    # Asked one by one.
    "node/publish/control.py:_respond": COMMANDS,
    "node/delivery/retained.py:SessionScans.step": LIVE,
    "node/delivery/retained.py:_send_page": LIVE,
    # It carries the client's own filter.
    "node/delivery/outbox.py:_tell_end": REPLAY,
    "node/delivery/outbox.py:pump": LOG,
    "node/delivery/log_replay.py:send_unsent": INFLIGHT,
    "node/delivery/transmission.py:resend": INFLIGHT,
    "node/delivery/transmission.py:redeliver": INFLIGHT,
    # Of shared groups.
    "node/delivery/delivery.py:send_group_qos0": GROUP,
    "node/delivery/delivery.py:send_to_member": GROUP,
    "node/delivery/delivery.py:send_unlisted": GROUP,
    "node/groups/groups.py:Groups._pass": GROUP,
    "node/delivery/delivery.py:pump_group": GROUP,
    "node/delivery/delivery.py:_pass_over": ASIDE,
    "node/delivery/delivery.py:send_deferred": ASIDE,
    "node/routing/qos0_routing.py:Qos0Routing.spread": NODES,
    "node/routing/qos0_routing.py:Qos0Routing._deliver_to_groups": NODES,
    "node/routing/qos0_routing.py:Qos0Routing.release_followers": NODES,
}
WAITS: Final = "test_what_waits_is_asked_for_again_when_the_rules_change"
SLICES: Final = "test_frames_of_a_read_wait_between_two_slices"
DISK: Final = "test_packets_that_wait_for_the_disk_are_asked_for_again"

MESSAGES: Final = re.compile(r"\b(Message|Delivery|Inflight|Record)\b")
"""The types of what waits, as attributes are annotated with them."""
FRAMES: Final = {"frame", "frames"}
"""Attributes for packets that are made and not sent yet."""
WAITING: Final = {
    "node/session/cursor.py:Cursor.outbox": WAITS,
    "node/session/cursor.py:Cursor.tailed_while_reading": WAITS,
    "node/session/cursor.py:LiveLane.queue": WAITS,
    "node/session/cursor.py:LiveLane.tailed": WAITS,
    "node/session/cursor.py:WaitingQos0.by_partition": WAITS,
    "node/session/session.py:Inflight.message": WAITS,
    "node/session/session.py:Group.returned": WAITS,
    "node/session/session.py:Group.deferred": ASIDE,
    "node/delivery/retained.py:Scan.page": WAITS,
    "node/delivery/read_results.py:QueueRead.records": SLICES,
    "node/delivery/read_results.py:QueueRead.framed": SLICES,
    "node/delivery/read_results.py:QueueRead.frames": SLICES,
    "node/delivery/read_results.py:QueueRead.deliveries": SLICES,
    "node/delivery/transmission.py:SendPromise.frame": DISK,
    # The receivers are found when they are released.
    "node/publish/completion.py:PublishPromise.record": LIVE,
    "node/publish/completion.py:PrecedingPromise.followers": LIVE,
    "node/publish/completion.py:Qos0Promise.message": LIVE,
    "node/publish/completion.py:Qos0Promise.record": LIVE,
}
"""The places where messages wait for a client, and the test in which its rights change."""
NOT_FOR_A_CLIENT: Final = {
    # What is in the places above.
    "node/session/cursor.py:Delivery.message",
    # Only where messages are in the log: nothing is sent from there.
    "node/session/session.py:Session.inflight",
    "node/session/session.py:ChangedIds.used",
    "node/session/state.py:CursorState.inflight",
    # On their way through replication: applied when they are committed, delivered from the log.
    "node/publish/admission.py:Admission.removed",
    "node/publish/apply.py:Applier._on_retained",
    "node/publish/apply.py:Applier.on_session",
    "node/publish/local_commit.py:LocalCommit.appended",
    "node/publish/local_commit.py:_Step.record",
    "node/publish/pending_records.py:PendingRecord.record",
    # The store, from which pages are made.
    "node/state/recorded_state.py:RecordedState.retained",
    "node/delivery/retained.py:Scan.scan",
    "node/delivery/retained.py:SessionScans.scan",
    # A function of the edge of a federation.
    "node/state/recorded_state.py:RecordedState.watch_removal",
    # They are published later.
    "node/publish/delayed.py:WaitingPromise.record",
    "node/publish/delayed_table.py:Delayed.record",
}
TAKES: Final = {"pop", "popleft", "popitem", "pop_before", "pop_deferred"}
"""Methods that take a message from where it waits."""
SENDS_ON: Final = SENDS | {"send_log_qos0", "_send"}
"""Functions that send it."""
ASKS_AGAIN: Final = {"may_read", "ready_member", "_send", "_send_page"}
"""Functions of which one must then be called: the gate's, or one that calls it."""

OF_OTHERS: Final = {
    # The edge of a federation: what it delivers comes to the broker by `federating.publish`.
    "holdfast_federation/sidecar/deliveries.py",
    "holdfast_federation/sidecar/edge_mqtt/edge.py",
    "holdfast_federation/sidecar/federator.py",
}
WRITE_WAYS: Final = {
    # Its record is never appended.
    "node/publish/inbound.py:_handle_special": WRITE,
    "node/publish/inbound.py:handle_publish": WRITE,
    "node/publish/completion.py:record_of_qos0": WRITE,
    "node/ownership/wills_and_expiry.py:publish_will": WILL,
    "node/publish/delayed.py:delayed_record": DELAYED,
    "node/publish/delayed.py:_publish": DELAYED_LATER,
    "node/federation_session.py:publish": FEDERATED,
    "node/federation_session.py:retain": FEDERATED,
}
COPIES: Final = {
    # Records between nodes or in snapshots, of messages that were asked for before.
    "node/state/recovery.py:Recovery._apply",
    "node/state/recovery.py:Recovery._set_retained",
    "node/state/state_records.py:retained_entry",
    # It clears what a message did that was asked for before.
    "node/publish/completion.py:removal",
    # They read the kind.
    "node/publish/delayed_table.py:",
    "node/routing/qos0_routing.py:Qos0Routing._send",
    "node/groups/codec.py:encode_assign",
    "node/publish/admission.py:",
    "node/publish/forwarding.py:",
    "node/publish/local_commit.py:",
    "node/publish/pending_records.py:",
    "node/feeds/feeds.py:Feeds.needing",
    "node/feeds/receiver.py:FeedReceiver._apply_records",
    "node/feeds/server.py:FeedServer._wanted",
    "node/publish/apply.py:",
}


class Uses(NamedTuple):
    """Names that a function uses: of calls, of attributes, and of attributes of `log_record`."""

    called: set[str]
    attributes: set[str]
    kinds: set[str]


@cache
def functions() -> dict[str, Uses]:
    """By `module:Class.function`, its uses, and those of the functions within it."""
    return {
        name: uses(tree)
        for layer in LAYERS
        for module, path in modules(layer)
        for name, tree in _functions(f"{module}:", "", ast.parse(path.read_text()))
    }


def _functions(module: str, prefix: str, tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(module, f"{prefix}{node.name}.", node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{module}{prefix}{node.name}", node


def uses(tree: ast.AST) -> Uses:
    found = Uses(set(), set(), set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                found.called.add(function.attr)
            elif isinstance(function, ast.Name):
                found.called.add(function.id)
        elif isinstance(node, ast.Attribute):
            found.attributes.add(node.attr)
            if isinstance(node.value, ast.Name) and node.value.id == "log_record":
                found.kinds.add(node.attr)
    return found


def test_the_gate_alone_knows_of_access_control_lists() -> None:
    for name, used in functions().items():
        if name.startswith(GATE):
            continue
        assert not used.called & ASKS, f"{name} asks an access control list: node.rights does"
        for field, where in FIELDS.items():
            assert field not in used.attributes or name in where or _is_other(name), (
                f"{name} uses .{field}: ask node.rights"
            )


def _is_other(name: str) -> bool:
    # The configuration's own, before there is a node.
    return name.startswith(
        ("process/server.py:Server", "io/disk/shared_directory.py", "process/cluster.py")
    )


def test_every_way_to_a_client_is_listed() -> None:
    found = {
        name
        for name, used in functions().items()
        if used.called & SENDS and name.split(":")[0] not in OF_OTHERS
    }
    assert found >= MEASURES
    _compare(found - MEASURES, READ_WAYS)


def test_every_way_into_the_log_is_listed() -> None:
    found = {
        name
        for name, used in functions().items()
        if used.kinds & set(KINDS) and not any(name.startswith(copy) for copy in COPIES)
    }
    _compare(found, WRITE_WAYS)


def waiting_places() -> Iterator[str]:
    """`module:Class.attribute` of each attribute that is annotated with a type of `MESSAGES`, set
    from an argument with such an annotation, or one of `FRAMES`."""
    for layer in (
        "node/delivery",
        "node/session",
        "node/publish",
        "node/state/recorded_state.py",
    ):
        path = ROOT / layer
        for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            module = each.relative_to(ROOT).as_posix()
            for node in statements(ast.parse(each.read_text())):
                if isinstance(node, ast.ClassDef):
                    yield from (f"{module}:{node.name}.{name}" for name in _kept_messages(node))


def _kept_messages(node: ast.ClassDef) -> Iterator[str]:
    for function in node.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        arguments = function.args.args + function.args.kwonlyargs
        typed = {each.arg: each.annotation for each in arguments if each.annotation is not None}
        for each in ast.walk(function):
            annotation: ast.expr | None
            targets: list[ast.expr]
            if isinstance(each, ast.AnnAssign):
                annotation, targets = each.annotation, [each.target]
            elif isinstance(each, ast.Assign) and isinstance(each.value, ast.Name):
                annotation, targets = typed.get(each.value.id), each.targets
            else:
                continue
            is_message = annotation is not None and MESSAGES.search(ast.unparse(annotation))
            for target in targets:
                if isinstance(target, ast.Attribute) and (is_message or target.attr in FRAMES):
                    yield target.attr


def test_every_place_where_a_message_waits_is_listed() -> None:
    found = set(waiting_places()) - NOT_FOR_A_CLIENT
    _compare(found, WAITING)


def test_what_is_taken_from_where_it_waits_is_asked_for_again() -> None:
    taking = {
        name: used.called
        for name, used in functions().items()
        if name.startswith("node/delivery/") and used.called & TAKES and used.called & SENDS_ON
    }
    assert len(taking) >= 6
    for name, calls in taking.items():
        assert calls & ASKS_AGAIN, f"{name} sends what has waited: ask may_read"


def _compare(found: set[str], listed: dict[str, str]) -> None:
    new = found - set(listed)
    assert not new, f"{sorted(new)}: show in tests/unit that rights are asked on this way, list it"
    gone = set(listed) - found
    assert not gone, f"{sorted(gone)} are listed and not there"


def test_the_tests_that_are_named_are_there() -> None:
    source = "".join(path.read_text() for path in TESTS.rglob("test_rights*.py"))
    for name in {*READ_WAYS.values(), *WRITE_WAYS.values(), *WAITING.values()}:
        assert f"def {name}(" in source, name
