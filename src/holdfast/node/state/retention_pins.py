"""Pins segments that sessions and shared groups still need. Retention keeps these segments, within
limits."""

from holdfast.log.journal.retention import Pin
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.snapshot_entries import first_starts


def pins_of(state: RecordedState, bytes_max: int | None) -> list[Pin]:
    """The pins of the sessions and groups that have not finished everything. `bytes_max`: as in
    Pin."""
    pins: list[Pin] = []
    for session in state.sessions.values():
        if session.client_id in state.queues:
            # The group has the position of the queue.
            continue
        if session.subscriptions and (session.expiry_s > 0 or not session.tailing):
            pins.append(Pin(session.client_id, needed_positions(state, session), bytes_max))
    for group in state.groups.values():
        is_durable = any(session.expiry_s > 0 for session in group.members)
        if is_durable or not group.tailing:
            pins.append(Pin(group.key, group.resume_positions(state.delivered), bytes_max))
    return pins


def needed_positions(state: RecordedState, session: Session) -> list[int]:
    """The first offsets that the session needs: of unread records, and of unfinished ones for a
    resend."""
    if session.positions is None and not session.tailing:
        # A session of the replicated state that has logged no cursor.
        positions = first_starts(state, session)
    else:
        positions = session.resume_positions(state.delivered)
    for entry in session.inflight.values():
        if not entry.is_retained:
            positions[entry.partition] = min(positions[entry.partition], entry.offset)
    return positions
