"""Each place that appends a record names the allowance that pays for it: a limit that sees one of
several ways into the log is none. A new place fails until it is listed."""

import ast
from pathlib import Path
from typing import Final

import holdfast

ROOT: Final = Path(holdfast.__file__).parent
APPENDS: Final = {"append", "publish", "append_state", "append_change", "append_cursor"}
"""Calls that bring a record into the log: the first two of `state` or `self._state`."""

MESSAGE: Final = "charge_publish, and disk_full before it is stored"
OPEN: Final = "recording_refusal and charge_open at CONNECT"
SUBSCRIBE: Final = "recording_refusal, and charge_bytes for the packet"
WILL: Final = "charge_open at the CONNECT that left it"
BEFORE: Final = "an open, a subscription or a message before it, once each; it frees or moves state"
PACED: Final = "nothing: at most one a session or group in progress_interval_s"
OPERATOR: Final = "nothing: callers with credentials of an operator"
NODES: Final = "nothing: the cluster's own, paced or once for an event"
CALLERS: Final = "the functions that call it"
FEDERATION: Final = "disk_full; the members are configured"

PAID: Final = {
    "node/connections/close.py:log_close": BEFORE,
    "node/connections/close.py:log_end": BEFORE,
    "node/connections/operations.py:move_session": OPERATOR,
    "node/ownership/wills_and_expiry.py:_log_done": WILL,
    "node/ownership/wills_and_expiry.py:publish_will": WILL,
    "node/delivery/outbox.py:end_drains": BEFORE,
    "node/delivery/subscribe.py:_subscribe": SUBSCRIBE,
    "node/delivery/unsubscribe.py:handle_unsubscribe": BEFORE,
    "node/federation_session.py:publish": FEDERATION,
    "node/federation_session.py:retain": FEDERATION,
    "node/federation_session.py:store_values": FEDERATION,
    "node/publish/acceptance.py:release": BEFORE,
    "node/publish/completion.py:follow_qos0": MESSAGE,
    "node/publish/delayed.py:_publish": BEFORE,
    "node/publish/delayed.py:_publish_qos0": BEFORE,
    "node/publish/delayed.py:end_delayed": BEFORE,
    "node/publish/inbound.py:publish_delayed": MESSAGE,
    "node/publish/inbound.py:_store": MESSAGE,
    "node/publish/inbound.py:log_qos0": MESSAGE,
    "node/publish/producer_dedup.py:_append_owner": MESSAGE,
    "node/publish/producer_dedup.py:forget_some": BEFORE,
    "node/groups/queue_changes.py:create_queue": SUBSCRIBE,
    "node/groups/queue_changes.py:delete_queue": OPERATOR,
    "node/state/ban_records.py:_record": OPERATOR,
    "node/state/state_records.py:append_change": CALLERS,
    "node/state/state_records.py:append_cursor": CALLERS,
    "node/state/state_records.py:log_cursor": PACED,
    "node/state/state_records.py:_log_owed": PACED,
    "node/state/state_records.py:append_state": CALLERS,
    "node/node_state.py:append": CALLERS,
    "node/node_state.py:publish": CALLERS,
    "node/ownership/coordinator.py:_open": OPEN,
    "node/ownership/owners.py:_append": NODES,
    "node/groups/durable_members.py:_complete": NODES,
    "node/groups/durable_members.py:log_join": SUBSCRIBE,
    "node/groups/durable_members.py:log_leave": BEFORE,
    "node/groups/progress.py:_append": PACED,
}


def appending() -> set[str]:
    found = set()
    for path in sorted((ROOT / "node").rglob("*.py")):
        module = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(map(_appends, ast.walk(node))):
                found.add(f"{module}:{node.name}")
    return found


def _appends(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    if isinstance(function, ast.Name):
        return function.id in APPENDS
    if not isinstance(function, ast.Attribute) or function.attr not in APPENDS:
        return False
    owner = function.value
    return (isinstance(owner, ast.Name) and owner.id == "state") or (
        isinstance(owner, ast.Attribute) and owner.attr in ("_state", "state", "cluster")
    )


def test_every_record_is_paid_for() -> None:
    found = appending()
    new = found - set(PAID)
    assert not new, f"{sorted(new)}: charge what the record costs, and list what pays for it"
    gone = set(PAID) - found
    assert not gone, f"{sorted(gone)} are listed and append nothing"
