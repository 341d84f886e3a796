"""Begins and releases the sessions that this node owns."""

from collections.abc import Container
from operator import ge

from holdfast.log.record import Record
from holdfast.node.connections.close import close_connection, drop_session, take_over
from holdfast.node.context import ClusterContext
from holdfast.node.delivery.subscriptions import add_subscription
from holdfast.node.frame_kinds import SESSION_CLOSED
from holdfast.node.frames import CloseFrame
from holdfast.node.node_state import NodeState
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.ownership.releases import FEATURE
from holdfast.node.session.rare_fields import OwedRetained
from holdfast.node.session.session import Inflight, Replay, Session, Subscription, new_subscription
from holdfast.node.session.state import complete_inflight
from holdfast.node.state.snapshot_entries import first_starts
from holdfast.node.topic_rights.kept_subscriptions import checksum_of
from holdfast.protocol.mqtt import reasons


class LiveSessions:
    """The release of this node's sessions: by their clients, by orders, or by records."""

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        coordinator: SessionCoordinator,
        pending: Container[str],
    ) -> None:
        """`pending`: the clients that wait for their session at this node."""
        self._state = state
        self._context = context
        self._coordinator = coordinator
        self._pending = pending

    def _connected(self, client_id: str) -> Session | None:
        session = self._state.sessions.get(client_id)
        return None if session is None or session.connection is None else session

    def detached(self, session: Session) -> None:
        """Releases the session of a closed connection. Its progress is queued for the log."""
        if self._state.sessions.get(session.client_id) is session:
            drop_session(self._state, session)
            image = self._coordinator.recorded_session(session.client_id)
            if image is not None and image.epoch == session.epoch:
                image.next_packet_id = session.next_packet_id
                # The log has no listener and no given rules, and the will counts by them.
                image.rights = None if image.will is None else session.rights
                image.own_rare().replays_over = not session.has_starts
        self.report_closed(session.client_id, session.epoch)

    def report_closed(self, client_id: str, epoch: int) -> None:
        """Reports to the coordinator that this node does not have the session any more."""
        leader = self._context.leader(self._coordinator.home(client_id))
        if leader == self._context.node_id:
            self._coordinator.closed(leader, client_id, epoch)
        elif leader:
            self._context.send_frame(leader, SESSION_CLOSED, CloseFrame(client_id, epoch))

    def close(self, order: CloseFrame) -> None:
        """Closes the connection of the session, or confirms that it is closed: another connection
        takes the session.

        A session with a higher epoch stays open, because the order concerns an earlier ownership.
        """
        session = self._connected(order.client)
        if session is None or session.epoch > order.epoch:
            self.report_closed(order.client, order.epoch)
        elif not self._keeps(session, order):
            take_over(self._state, session)

    def _keeps(self, session: Session, order: CloseFrame) -> bool:
        """True if the session has other subscriptions than the order permits, and stays therefore.

        A SUBSCRIBE that waits for the log will be one of them.
        """
        if order.filters is None or session.expiry_s == 0:
            return False
        is_known = checksum_of(session.subscriptions) == order.filters
        leader = self._context.leader(self._coordinator.home(session.client_id))
        if (is_known and not session.subscribes_awaited) or not self._context.understands(
            leader, FEATURE
        ):
            return False
        kept = list(session.subscriptions)
        if leader == self._context.node_id:
            self._coordinator.kept(leader, session.client_id, kept)
        else:
            frame = CloseFrame(session.client_id, session.epoch, kept=kept)
            self._context.send_frame(leader, SESSION_CLOSED, frame)
        return True

    def end(self, client_id: str) -> None:
        """Closes the live connection of a client for which another one is opened here."""
        session = self._connected(client_id)
        if session is not None:
            take_over(self._state, session)

    def session_changed(self, record: Record) -> None:
        """Closes this node's session if the applied SESSION record gives it to another owner, or to
        another connection here."""
        client_id = record.client_id.decode()
        session = self._connected(client_id)
        if session is None:
            return
        image = self._coordinator.recorded_session(client_id)
        if image is not None and image.owner == self._context.node_id:
            if image.epoch > session.epoch and client_id in self._pending:
                # The coordinator has waited in vain for the release. With the new epoch the end of
                # this connection would close the session of the next one.
                take_over(self._state, session)
            else:
                session.renew(max(session.epoch, image.epoch))
        elif record.sequence > session.epoch:
            self._lose(session, reasons.SESSION_TAKEN_OVER, "another connection has the session")
        elif record.sequence == session.epoch and session.recorded:
            # The other nodes counted this node as down and closed the session under its own epoch.
            self._lose(session, reasons.SERVER_BUSY, "the cluster has closed the session")

    def _lose(self, session: Session, reason: int, text: str) -> None:
        """Closes the connection of a session that has another owner.

        Records that this node still appends for it have a stale epoch, so every node ignores them.
        """
        connection = session.connection
        assert connection is not None
        self._state.stats.sessions_taken_over += 1
        close_connection(self._state, connection, reason, text)


def live_session(state: NodeState, recorded: Session) -> Session:
    """The session of this node's replicated state as a live one, ready to be resumed here. The two
    share no object that either changes: only records change the recorded one."""
    rare = recorded.rare
    session = Session(recorded.client_id)
    state.sessions[session.client_id] = session
    session.epoch = recorded.epoch
    session.life = recorded.life
    session.recorded = True
    session.tailing = False
    session.expiry_s = recorded.expiry_s
    if rare.disconnected_us:
        session.own_rare().disconnected_us = rare.disconnected_us
    session.username = recorded.username
    session.is_owned = recorded.is_owned
    session.will = recorded.will
    session.owner = recorded.owner
    for each in recorded.subscriptions.values():
        _subscribe(state, session, each, is_replayed=not rare.replays_over)
    for filter, owed in (rare.owed or {}).items():
        known = OwedRetained(owed.after, owed.seam)
        known.is_logged = True
        known.is_seam_logged = owed.seam is not None
        session.owe(filter, known)
    if rare.owed_inflight:
        session.own_rare().owed_inflight = set(rare.owed_inflight)
    for packet_id, entry in recorded.inflight.items():
        session.add_inflight(packet_id, _same(entry))
    if recorded.done:
        session.add_done(sorted(recorded.done))
    if recorded.positions is None:
        # The first record must name all positions, because the replicated state has none.
        session.positions = first_starts(state, session)
    else:
        session.positions = list(recorded.positions)
        session.logged_positions = list(recorded.positions)
    if session.has_starts:
        _forget_passed_starts(session, session.positions)
    complete_inflight(session)
    for packet_id in session.inflight:
        session.next_packet_id = packet_id % 65535 + 1
    if rare.lacks_sent:
        session.own_rare().maybe_sent = list(state.delivered)
    return session


def _subscribe(
    state: NodeState, session: Session, recorded: Subscription, *, is_replayed: bool
) -> None:
    subscription = new_subscription(
        session,
        recorded.filter,
        recorded.qos,
        recorded.no_local,
        recorded.retain_as_published,
        recorded.retain_handling,
        0,
    )
    # A client may have thousands, so none is packed as a row and unpacked.
    subscription.additions = recorded.additions
    subscription.reads_log, subscription.drains = recorded.reads_log, recorded.drains
    start, replay = recorded.start, recorded.replay
    subscription.start = None if start is None else list(start)
    if is_replayed and start is not None and replay is not None:
        again = set(replay.again or ()) or None
        subscription.replay = Replay(list(replay.seam), dict(replay.floors), again)
        # Records of older versions do not say it.
        subscription.reads_log = True
    add_subscription(state, subscription)


def _same(entry: Inflight) -> Inflight:
    """The entry without what only a connection has."""
    known = Inflight(entry.partition, entry.offset, entry.qos, entry.is_retained)
    known.group_tag = entry.group_tag
    known.state = entry.state
    known.logged = True
    return known


def _forget_passed_starts(session: Session, positions: list[int]) -> None:
    """Forgets the starts that the session has passed, as it does when it catches up."""
    session.has_starts = False
    for subscription in session.subscriptions.values():
        start = subscription.start
        if start is not None and subscription.replay is None and all(map(ge, positions, start)):
            subscription.start = None
        session.has_starts = session.has_starts or subscription.start is not None
