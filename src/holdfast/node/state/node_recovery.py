"""Recovers a node's own state, so that it can serve its sessions."""

from operator import ge

from msgspec import UNSET

from holdfast.node.connections.close import drop_session, end_session
from holdfast.node.delivery.subscriptions import add_subscription, remove_subscription
from holdfast.node.node_state import NodeState
from holdfast.node.session.session import Group, Session, Subscription
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.recovery import Recovery
from holdfast.node.state.session_records import SessionEntry
from holdfast.node.state.snapshot_entries import first_starts
from holdfast.node.state.state_records import least_positions


class NodeRecovery(Recovery):
    """The rebuilding of a `NodeState`: it applies snapshot entries and records to an empty one,
    then finishes it."""

    def __init__(self, state: NodeState) -> None:
        super().__init__(state)
        self._node = state

    def _add_subscription(self, subscription: Subscription) -> None:
        add_subscription(self._node, subscription)

    def _remove_subscription(self, session: Session, filter: str) -> None:
        remove_subscription(self._node, session, filter)

    def _drop_session(self, session: Session) -> None:
        drop_session(self._node, session, in_slices=False)

    def take_over(self, entry: SessionEntry, replays_over: bool) -> Session:
        """The session of a snapshot entry, ready to be resumed here, in a cluster. An invalid
        cursor raises `ValueError` or `struct.error`. `replays_over`: see `Rarities`."""
        if replays_over:
            entry.replays = UNSET
        session = self._restore_session(entry)
        session.life = 0 if entry.born is UNSET else entry.born
        is_cursor_logged = session.positions is not None
        self._complete_session(session)
        if not is_cursor_logged:
            # The first record must name all positions, because the replicated state has none.
            session.logged_positions = None
        if entry.may_be_sent:
            session.maybe_sent = list(self.state.delivered)
        return session

    def finish(self) -> None:
        """Finish the state after the last record. Earlier connections are closed, so their wills
        and expiries run from now."""
        state = self._node
        expired = []
        for session in self.touched:
            self._complete_session(session)
            if session not in self.open and not self._rearm(session):
                expired.append(session)
        for session in self.open:
            session.disconnected_us = state.wall_us
            # The log does not contain the last messages that it was sent.
            session.maybe_sent = list(state.delivered)
            if not self._rearm(session):
                expired.append(session)
        for session in expired:
            end_session(state, session)
        for group in state.groups.values():
            group.start = None
            group.tailing = False
            group.positions = self.group_positions.get(group.key)
            if group.positions is None:
                group.positions = list(state.delivered)
            group.positions = _clamped(state, group.positions)
            group.logged_positions = list(group.positions)
            least = least_positions(group, group.positions)
            for partition, offset in sorted(self.group_assigned.pop(group.key, ())):
                if offset >= least[partition]:
                    group.note_assigned(partition, offset)
            group.assigned_changes = []
            if not state.journal.replicated:
                _note_inflight(group, group.positions)
        self.group_positions = {}
        self.group_assigned = {}

    def _complete_session(self, session: Session) -> None:
        state = self.state
        if session.positions is None:
            session.positions = first_starts(state, session)
        session.positions = _clamped(state, session.positions)
        session.logged_positions = list(session.positions)
        if session.has_starts:
            _forget_passed_starts(session, session.positions)
        self._complete_inflight(session)
        for packet_id in session.inflight:
            session.next_packet_id = packet_id % 65535 + 1


def _forget_passed_starts(session: Session, positions: list[int]) -> None:
    """Forget the starts that the session has passed, as it does when it catches up."""
    session.has_starts = False
    for subscription in session.subscriptions.values():
        start = subscription.start
        if start is not None and subscription.replay is None and all(map(ge, positions, start)):
            subscription.start = None
        session.has_starts = session.has_starts or subscription.start is not None


def _note_inflight(group: Group, positions: list[int]) -> None:
    """Add the QoS 2 records that members have inflight to the group's `assigned`. A QoS 2 packet id
    is logged at once, the group's position later."""
    for session in group.members:
        tags = [other.tag for other in session.groups or () if isinstance(other, Group)]
        if tags.count(group.tag) > 1:
            continue  # it may be the other group's record: twice is better than never
        for entry in session.inflight.values():
            is_given = entry.qos == 2 and entry.group_tag == group.tag
            if is_given and entry.offset >= positions[entry.partition]:
                group.note_assigned(entry.partition, entry.offset)


def _clamped(state: RecordedState, positions: list[int]) -> list[int]:
    """The positions, cut off at the end of the log.

    With durability "memory" a crash may lose records that a snapshot covers. A position beyond the
    log's end would then skip the records written there next. A replica keeps such positions: they
    are committed, and their records have not arrived yet.
    """
    if state.journal.replicated:
        return positions
    return list(map(min, positions, state.journal.next_offset))
