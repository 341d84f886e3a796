"""Moves a session from the replicated state to the node that serves it."""

from operator import ge

from msgspec import UNSET

from holdfast.node.delivery.subscriptions import add_subscription
from holdfast.node.node_state import NodeState
from holdfast.node.session.session import Session, Subscription
from holdfast.node.state.recovery import Recovery
from holdfast.node.state.session_records import SessionEntry
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
        if entry.may_be_sent:
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
