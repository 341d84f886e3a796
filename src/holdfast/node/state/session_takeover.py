"""Moves a session from the replicated state to the node that serves it."""

from operator import ge

from msgspec import UNSET

from holdfast.node.delivery.subscriptions import add_subscription
from holdfast.node.node_state import NodeState
from holdfast.node.session.rare_fields import rarities_of
from holdfast.node.session.session import Session, Subscription
from holdfast.node.session.state import cursor_state
from holdfast.node.state.recovery import Recovery
from holdfast.node.state.session_records import (
    SessionEntry,
    replay_entries,
    restore_replays,
    subscription_row,
)
from holdfast.node.state.snapshot_entries import first_starts


class SessionTakeover(Recovery):
    """The step of a session from the replicated state into the tables of the node that owns it."""

    def __init__(self, state: NodeState) -> None:
        super().__init__(state)
        self._node = state

    def _add_subscription(self, subscription: Subscription) -> None:
        add_subscription(self._node, subscription)

    def take_over(self, entry: SessionEntry, replays_over: bool) -> Session:
        """The session of a snapshot entry, ready to be resumed here. An invalid cursor raises
        `ValueError` or `struct.error`. `replays_over`: see `Rarities`."""
        if replays_over:
            entry.replays = UNSET
        session = self._restore_session(entry)
        session.life = 0 if entry.born is UNSET else entry.born
        return self._resumable(session, entry.may_be_sent)

    def take_over_here(self, recorded: Session) -> Session:
        """The session of this node's own replicated state, as `take_over` makes it of the entry."""
        session = self._new_session(recorded.client_id, recorded.epoch)
        session.expiry_s = recorded.expiry_s
        session.disconnected_us = recorded.disconnected_us
        session.username = recorded.username
        session.is_owned = recorded.is_owned
        session.will = recorded.will
        self._set_open(session, recorded.owner)
        for each in recorded.subscriptions.values():
            self._subscribe(session, subscription_row(each), each.start)
        rare = rarities_of(recorded)
        if not rare.replays_over:
            restore_replays(session, replay_entries(recorded), self.state.config.partitions)
        for filter, owed in (rare.owed or {}).items():
            self._owe(session, filter, owed.after, owed.seam)
        if recorded.positions is not None:
            session.positions = list(recorded.positions)
        if recorded.inflight or recorded.done:
            done = sorted(recorded.done or ())
            self._set_cursor(session, cursor_state([], dict(recorded.inflight), done))
        session.owed_inflight = set(rare.owed_inflight or ()) or None
        session.life = recorded.life
        return self._resumable(session, rare.lacks_sent)

    def _resumable(self, session: Session, may_be_sent: bool) -> Session:
        """The session with all that only a live one has."""
        if session.positions is None:
            # The first record must name all positions, because the replicated state has none.
            session.positions = first_starts(self.state, session)
        else:
            session.logged_positions = list(session.positions)
        if session.has_starts:
            _forget_passed_starts(session, session.positions)
        self._complete_inflight(session)
        for packet_id in session.inflight:
            session.next_packet_id = packet_id % 65535 + 1
        if may_be_sent:
            session.maybe_sent = list(self.state.delivered)
        return session


def _forget_passed_starts(session: Session, positions: list[int]) -> None:
    """Forgets the starts that the session has passed, as it does when it catches up."""
    session.has_starts = False
    for subscription in session.subscriptions.values():
        start = subscription.start
        if start is not None and subscription.replay is None and all(map(ge, positions, start)):
            subscription.start = None
        session.has_starts = session.has_starts or subscription.start is not None
