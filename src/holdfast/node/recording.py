"""Derived state into the log: what sessions and groups must leave there to be rebuilt."""

import base64
import json
from typing import Final

from holdfast.log import record as log_record
from holdfast.node.delivery import append_state, arm_progress, log_cursor
from holdfast.node.state import Group, NodeState
from holdfast.session.session import SENT, Session, Will
from holdfast.session.state import encode_cursor


def will_fields(will: Will) -> dict[str, object]:
    return {
        "topic": will.topic.decode(),
        "payload": base64.b64encode(will.payload).decode(),
        "qos": will.qos,
        "retain": will.retain,
        "properties": base64.b64encode(will.properties).decode(),
        "expiry_s": will.expiry_s,
        "delay_s": will.delay_s,
    }


def will_from(fields: dict[str, object]) -> Will:
    """Raises KeyError, ValueError or TypeError for fields that are not a will's."""
    return Will(
        str(fields["topic"]).encode(),
        base64.b64decode(str(fields["payload"])),
        int(str(fields["qos"])),
        bool(fields["retain"]),
        base64.b64decode(str(fields["properties"])),
        int(str(fields["expiry_s"])),
        int(str(fields["delay_s"])),
    )


SESSION_OPENED: Final = b'{"op":"open",'
"""So begins what `session_opened` returns, and no other record of a session."""


def session_opened(session: Session, clean: bool, owner: str = "", request: int = 0) -> bytes:
    """`owner`: in a cluster, the node that the client is connected to, and its request."""
    fields: dict[str, object] = {
        "op": "open",
        "client": session.client_id,
        "epoch": session.epoch,
        "expiry_s": session.expiry_s,
        "clean": clean,
        "username": session.username,
    }
    if session.is_owned:
        fields["proved"] = True
    if owner:
        fields["owner"] = owner
        fields["request"] = request
    if session.will is not None:
        fields["will"] = will_fields(session.will)
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def changed_positions(logged: list[int] | None, now: list[int]) -> list[tuple[int, int]]:
    changed: list[tuple[int, int]] = []
    for partition in range(len(now)):
        if logged is None or logged[partition] != now[partition]:
            changed.append((partition, now[partition]))
    return changed


def group_positions(state: NodeState, group: Group) -> list[int]:
    """The group's first unfinished offset per partition: what waits, what members gave back, and
    what is with members whose own state would not survive a crash."""
    positions = group.resume_positions(state.delivered)
    waiting: list[object] = list(group.returned)
    for messages in group.aside.values():
        waiting.extend(messages)
    for message in waiting:
        # Message or Inflight; deque[object] keeps state.py free of the latter.
        partition = message.partition  # type: ignore[attr-defined]
        offset = message.offset  # type: ignore[attr-defined]
        positions[partition] = min(positions[partition], offset)
    for session in group.members:
        if session.expiry_s > 0:
            continue
        for entry in session.inflight.values():
            if entry.group is group and entry.state == SENT:
                positions[entry.partition] = min(positions[entry.partition], entry.offset)
    return positions


def is_durable_group(group: Group) -> bool:
    return any(session.expiry_s > 0 for session in group.members)


def log_progress(state: NodeState, steps: int = 1 << 60) -> None:
    """Write the cursors that moved since the last call, about `steps` of them; the rest follows in
    the next pass of the timers. All groups before any session: if a crash cuts between the two, a
    record is delivered twice rather than not at all."""
    state.progress_armed = False
    groups = state.groups_in_progress
    while groups and steps > 0:
        group = groups.popleft()
        steps -= 1 + len(group.members) // 16
        group.progress_due = False
        _log_group(state, group)
    sessions = state.sessions_in_progress
    while sessions and steps > 0:
        session = sessions.popleft()
        steps -= 1
        session.progress_due = False
        _log_session(state, session)
    if groups or sessions:
        arm_progress(state, 0.0)


def _log_group(state: NodeState, group: Group) -> None:
    if state.groups.get(group.key) is not group or not is_durable_group(group):
        return
    positions = group_positions(state, group)
    changed = changed_positions(group.logged_positions, positions)
    if changed:
        append_state(state, log_record.CURSOR, group.key.encode(), encode_cursor(changed, {}, []))
        group.logged_positions = positions


def _log_session(state: NodeState, session: Session) -> None:
    if session.expiry_s == 0 or state.sessions.get(session.client_id) is not session:
        return
    positions = session.resume_positions(state.delivered)
    log_cursor(state, session, changed_positions(session.logged_positions, positions))
    session.logged_positions = positions
    if session.replaying:
        _forget_passed(session, positions)


def _forget_passed(session: Session, positions: list[int]) -> None:
    if session.done is not None:
        session.done = {place for place in session.done if place[1] >= positions[place[0]]}
    if session.positions is None and not session.outbox:
        session.replaying = False
        session.done = None
