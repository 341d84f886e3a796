"""Acquires the sessions of clients that connect to this node.

This node requests the ownership of a session from the coordinator, and releases it when the
connection ends.

Invariants
- A resumed session begins only after this node has passed a read barrier (`reads.read_barrier`),
  unless it is alone. Everything that the previous owner has acknowledged is then applied here too.
- A session that a record names does not begin while this node is unsure of its ownership
  (`ownership_lease`). The other nodes may have closed or even ended the session already. A client
  that receives Session Present must find its session.
- The coordinator knows every session here that no record names: it has granted the session, or this
  node has announced it. Counter-example: this node announces to a new coordinator that it requests
  a session, and then takes the reply of the previous one. The new coordinator grants the client a
  session at another node, and both nodes keep theirs.
- A reply counts only in an epoch of the home partition that is not lower than any in which a node
  has requested the report of this one. Counter-example: the disk here takes no metadata, so this
  node coordinates sessions, or requests them from a coordinator, after another node has begun to.
"""

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Final

from msgspec import UNSET

from holdfast.addresses import server_reference
from holdfast.node.connections.accepted_connect import AcceptedConnect
from holdfast.node.connections.close import log_close, refuse
from holdfast.node.connections.session_open import OTHER_USER, finish_open
from holdfast.node.context import NEVER, ClusterContext
from holdfast.node.frame_kinds import SESSION_OPEN
from holdfast.node.frames import CloseFrame, OpenedFrame, OpenFrame
from holdfast.node.node_state import NodeState
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.ownership.live_sessions import LiveSessions, live_session
from holdfast.node.ownership.own_reports import OwnReports
from holdfast.node.ownership.releases import FEATURE
from holdfast.node.ownership.requests import NOTHING, PendingOpen
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.refusal import Rejection
from holdfast.node.rights import proves_names
from holdfast.node.session.connection import CLOSED, OPENING, Connection
from holdfast.node.session.session import Session
from holdfast.node.session.state import continues
from holdfast.node.state.session_records import will_entry
from holdfast.node.sweep import Sweep
from holdfast.node.topic_rights.kept_subscriptions import checksum_of, waits_for_more
from holdfast.protocol.mqtt import reasons

ASK_AFTER_S: Final = 0.001
"""The delay in seconds between a CONNECT and the SESSION_OPEN for it.

An end of the connection that has already arrived is seen first. A node that was stopped for a while
finds CONNECTs of clients that have connected elsewhere, and must not take their sessions.
"""
ASKING_MAX: Final = 100_000
"""The most CONNECTs that may wait for a session. An entry that was sent to the coordinator stays
until the reply."""
ASK_AGAIN_S: Final = 0.3
"""The interval in seconds after which a SESSION_OPEN without a reply is sent again."""
REFUSED_AFTER_S: Final = 2.0
"""The longest time in seconds that a CONNECT waits for a majority, for metadata that names the
present leader of its home partition, or while this node is unsure of its ownership."""
LEADERLESS_S: Final = 5.0
"""The longest time in seconds that it waits for its home partition to have a leader."""

SUPERSEDED: Final = Rejection("another connection uses this client id", reasons.SERVER_BUSY)
CLOSED_BY_OTHERS: Final = Rejection("the cluster has closed the session", reasons.SERVER_BUSY)

WAKES_MAX: Final = 100
"""The most waiting CONNECTs that one check of the timers looks at."""
OPEN_STEPS: Final = 10
"""The steps of one session that begins."""


class SessionAcquisition:
    """The requests of this node for sessions, from CONNECT until the session begins.

    Invariant: this node has at most one request per client under way. Counter-example: two
    connections of one client both request the session. The repeated request of the earlier
    connection takes the session from the later one.
    """

    def __init__(
        self,
        state: NodeState,
        context: ClusterContext,
        coordinator: SessionCoordinator,
        barriers: Barriers,
    ) -> None:
        self._state = state
        self._barriers = barriers
        self._context = context
        self._coordinator = coordinator
        self._number = 0
        self.asking: dict[int, PendingOpen] = {}
        # The same entries by home partition, those with a reply, and when to look at each next.
        self._of_homes: list[dict[int, PendingOpen]]
        self._of_homes = [{} for _ in range(state.config.partitions)]
        self._answered: dict[int, PendingOpen] = {}
        self._wakes: list[tuple[float, int]] = []
        self._finishing: Sweep[PendingOpen] = Sweep(state)
        self._resent: Sweep[PendingOpen] = Sweep(state)
        # The same entries by client id, in the order of their CONNECTs.
        self._of_clients: dict[str, list[PendingOpen]] = {}
        # Whether records were applied since the slices of `applied` began.
        self._is_applied = False
        self.reports = OwnReports(state, context, coordinator)
        self.live = LiveSessions(state, context, coordinator, self._of_clients)
        # Per home partition: the highest epoch of a leader that has requested a report, and when.
        self._reported_in: dict[int, tuple[int, float]] = {}
        # Announces the filters of a session before it begins, at a node that is fed. True: it has
        # to wait. Feeds sets it.
        self.holds_filters: Callable[[PendingOpen, list[str]], bool] = lambda asking, filters: False

    def seed_ids_at(self, number: int) -> None:
        """Numbers the requests from `number` + 1.

        The caller passes a random number. A reply to an earlier process of this node then does not
        match a request of this one.
        """
        self._number = number

    def open_session(
        self, connection: Connection, client_id: str, opening: AcceptedConnect
    ) -> None:
        """Queues the CONNECT of `connection` for its session, and refuses earlier CONNECTs of the
        client. Its live connection ends by an order of the coordinator."""
        if len(self.asking) >= ASKING_MAX:
            text = "too many sessions are being opened"
            refuse(self._state, connection, Rejection(text, reasons.SERVER_BUSY))
            return
        self._number += 1
        if self._context.is_alone and self._open_at_once(connection, client_id, opening):
            return
        connection.input_paused = True
        home = self._coordinator.home(client_id)
        asking = PendingOpen(self._number, connection, client_id, home, opening)
        asking.refused_at = self._state.now + REFUSED_AFTER_S
        self.asking[asking.number] = asking
        self._of_homes[home][asking.number] = asking
        self._send_at(asking, self._state.now + ASK_AFTER_S)
        of_client = self._of_clients.setdefault(client_id, [])
        of_client.append(asking)
        for earlier in of_client[:-1]:
            # Only the coordinator knows which user owns the session. An earlier CONNECT of another
            # user is therefore not refused here and keeps its turn.
            if earlier.connection.username in (None, connection.username):
                self._supersede(earlier)
        if self._context.is_alone:
            # No client can have connected elsewhere.
            self._send_request(asking)

    def _open_at_once(
        self, connection: Connection, client_id: str, opening: AcceptedConnect
    ) -> bool:
        """Opens a session that needs no record if the coordinator, which is here, gives its epoch
        at once. While this node is alone, no barrier could change it."""
        is_recorded = opening.expiry_s > 0 or opening.will is not None
        if is_recorded or client_id in self._of_clients or client_id in self._state.sessions:
            return False
        epoch = self._coordinator.epoch_at_once(client_id)
        if not epoch:
            return False
        session = Session(client_id)
        session.epoch = session.life = epoch
        finish_open(self._state, connection, session, False, opening)
        return True

    def _supersede(self, asking: PendingOpen) -> None:
        """Refuses the older CONNECT because the client has connected again. [MQTT-3.1.4-3]"""
        if asking.connection.state == OPENING:
            refuse(self._state, asking.connection, SUPERSEDED)
        if not asking.is_sent:
            self._done(asking)
        elif asking.reply is not None:
            self._finish_if_ready(asking)

    def _send_at(self, asking: PendingOpen, when: float) -> None:
        """Sends SESSION_OPEN for the entry, first or again, at a time."""
        asking.send_at = when
        self._wake_at(asking, when)

    def _send_no_more(self, asking: PendingOpen) -> None:
        """Sends nothing more for the entry, which has its reply, or waits for a service."""
        asking.send_at = asking.wake_at = NEVER
        self._wake_at(asking, max(asking.refused_at, self._state.now + ASK_AGAIN_S))

    def _wake_at(self, asking: PendingOpen, when: float) -> None:
        """Looks at the entry at that time, or earlier if that was decided before."""
        if when < asking.wake_at:
            asking.wake_at = when
            heappush(self._wakes, (when, asking.number))

    def _done(self, asking: PendingOpen) -> None:
        del self.asking[asking.number]
        del self._of_homes[asking.home][asking.number]
        self._answered.pop(asking.number, None)
        of_client = self._of_clients[asking.client_id]
        of_client.remove(asking)
        if of_client:
            self._send_at(of_client[0], min(of_client[0].send_at, self._state.now + ASK_AFTER_S))
        else:
            del self._of_clients[asking.client_id]
        if not self.asking:
            # A node without requests looks at no times.
            self._wakes.clear()

    def _send_request(self, asking: PendingOpen) -> None:
        self._send_at(asking, self._state.now + ASK_AGAIN_S)
        if self._of_clients[asking.client_id][0] is not asking:
            # An earlier CONNECT of the same client is first. Its repeated request would take the
            # session from this one.
            return
        opening = asking.opening
        if not asking.is_sent and self._refuse_behind(asking):
            self._done(asking)
            return
        user = asking.connection.username
        frame = OpenFrame(
            asking.number,
            asking.client_id,
            opening.clean_start,
            opening.expiry_s,
            user,
            # Older versions send no user. The coordinator then does not check the user of the
            # session.
            user=user if proves_names(self._state) else UNSET,
            # The coordinator withdraws the request unless the session is already open.
            gone=asking.connection.state == CLOSED,
            will=None if opening.will is None else will_entry(opening.will),
            filters=opening.filters,
        )
        leader = self._context.leader(asking.home)
        asking.is_sent = asking.is_sent or leader != ""
        if leader in self._context.connected and not self._context.understands(leader, FEATURE):
            # An older coordinator orders nothing of the node that requests the session.
            self.live.end(asking.client_id)
        if leader == self._context.node_id:
            self._coordinator.open(leader, frame)
        elif leader:
            self._context.send_frame(leader, SESSION_OPEN, frame)

    def opened(self, node: str, frame: OpenedFrame) -> None:
        """Takes the reply of `node` to a request of this node.

        A reply from a node that does not lead the home partition is ignored. The request goes to
        the new leader, which does not know that reply.
        """
        asking = self.asking.get(frame.request)
        client_id = frame.client
        home = self._coordinator.home(client_id)
        if node != self._context.leader(home) or self._is_led_anew(home):
            return
        if asking is None or asking.client_id != client_id or asking.reply is not None:
            # The request was sent twice and got two replies. Both epochs are this node's; the
            # higher one counts.
            if not frame.lost:
                self._renew(client_id, frame.epoch)
            return
        asking.reply = frame
        self._answered[asking.number] = asking
        if frame.denied:
            self._done(asking)
            if asking.connection.state == OPENING:
                self._state.stats.sessions_denied += 1
                refuse(self._state, asking.connection, OTHER_USER)
            return
        if frame.kept is not None:
            self._decide_again(asking, frame.kept)
            return
        if frame.lost:
            self._refuse(asking)
            return
        self._send_no_more(asking)
        # A node that is alone has applied what was appended before the reply.
        if not self._context.is_alone and (frame.present or not self._is_in_log(asking)):
            asking.barrier = self._barriers.begin()
        self._finish_if_ready(asking)

    def _decide_again(self, asking: PendingOpen, filters: list[str]) -> None:
        """Has a service decide about the present filters of the session, whose owner keeps it until
        then."""
        self._take_back(asking)
        asking.is_sent = False
        self._send_no_more(asking)
        if asking.connection.state != OPENING:
            self._wake_at(asking, self._state.now)
            return
        decided = partial(self._decided, asking, filters)
        if waits_for_more(self._state, asking.connection, filters, decided):
            asking.refused_at = self._state.now + REFUSED_AFTER_S
        elif self._state.now < asking.refused_at:
            self._decided(asking, filters, self._state, asking.connection)
        else:
            text = "the subscriptions of the session change: try again later"
            refuse(self._state, asking.connection, Rejection(text, reasons.SERVER_UNAVAILABLE))

    def _take_back(self, asking: PendingOpen) -> None:
        asking.reply = None
        self._answered.pop(asking.number, None)

    def _decided(
        self, asking: PendingOpen, filters: list[str], state: object, connection: Connection
    ) -> None:
        connection.input_paused = True
        asking.opening.filters = checksum_of(filters)
        if asking.number in self.asking:
            self._send_at(asking, self._state.now + ASK_AFTER_S)

    def _is_led_anew(self, home: int, for_s: float = 0.0) -> bool:
        """True if the metadata here does not name the leader that has requested a report."""
        epoch, asked_at = self._reported_in.get(home, (0, 0.0))
        return self._context.epoch(home) < epoch and asked_at + for_s <= self._state.now

    def _is_in_log(self, asking: PendingOpen) -> bool:
        """True if a record names this node as owner, or the client wants a clean start.

        Otherwise the reply may come from a deposed leader that does not know of an existing
        session. Its `open` record would not have been committed. Such a reply waits for a read
        barrier.
        """
        opening = asking.opening
        return opening.clean_start or opening.expiry_s > 0 or opening.will is not None

    def _refuse(self, asking: PendingOpen) -> None:
        """Refuses the CONNECT: the other nodes counted this node as down and closed the new
        session."""
        self._done(asking)
        if asking.connection.state == OPENING:
            refuse(self._state, asking.connection, CLOSED_BY_OTHERS)

    def _renew(self, client_id: str, epoch: int) -> None:
        for asking in self._of_clients.get(client_id, ()):
            if asking.reply is not None:
                asking.reply.epoch = max(epoch, asking.reply.epoch)
                return
        session = self._state.sessions.get(client_id)
        if session is not None and session.epoch < epoch:
            session.renew(epoch)
            return
        if session is None:
            self.live.report_closed(client_id, epoch)

    def applied(self) -> None:
        """Begins the sessions that waited for applied records or for a barrier, in slices."""
        if self._answered and not self._finishing.has_more:
            self._is_applied = False
            self._finishing.begin(list(self._answered.values()), self._try, self._tried)
        else:
            self._is_applied = True

    def _try(self, asking: PendingOpen) -> int:
        if self.asking.get(asking.number) is not asking or asking.reply is None:
            return 1
        self._finish_if_ready(asking)
        return 1 if asking.number in self.asking else OPEN_STEPS

    def _tried(self) -> None:
        if self._is_applied:
            self.applied()

    def confirm_ownership(self) -> None:
        """Makes the waiting sessions wait for a new read barrier.

        While this node was unsure of its ownership, other nodes may have closed or reassigned them.
        """
        for asking in self._answered.values():
            if asking.is_recorded:
                asking.barrier = self._barriers.begin()

    def _finish_if_ready(self, asking: PendingOpen) -> None:
        if asking.connection.state != OPENING:
            self._close_unused(asking)
            return
        if not self._context.is_whole or (self._state.is_ownership_expired and asking.is_recorded):
            return
        if asking.barrier != NOTHING and not self._barriers.has_passed(asking.barrier):
            return
        answer = asking.reply
        assert answer is not None
        epoch = answer.epoch
        image = self._coordinator.recorded_session(asking.client_id)
        if image is None:
            # After the barrier the `open` record is applied, and so is the end of the session if it
            # has ended.
            is_lost = asking.barrier != NOTHING and asking.is_recorded
        else:
            is_unknown_there = not answer.present and not self._is_in_log(asking)
            is_lost = image.owner != self._context.node_id and (
                image.epoch >= epoch or is_unknown_there
            )
        if is_lost:
            self._refuse(asking)
            return
        # [MQTT-3.1.2-5]
        resumed = image if answer.present else None
        if (
            resumed is not None
            and self._context.unstored
            and self.holds_filters(asking, list(resumed.subscriptions))
        ):
            return
        self._done(asking)
        self.live.end(asking.client_id)
        session = self._session(answer.client, resumed)
        if answer.present:
            # This node may have applied later PUBRELs and QoS 2 messages than the coordinator had
            # when it replied.
            self._coordinator.load_packet_ids(session)
            kept = 1 if resumed is None else resumed.next_packet_id
            if kept > 1 and continues(session.inflight, kept):
                # The session was here before. The log does not have this number.
                session.next_packet_id = kept
        session.renew(epoch)
        finish_open(self._state, asking.connection, session, answer.present, asking.opening)

    def _close_unused(self, asking: PendingOpen) -> None:
        """Closes the session that was opened for a client that has disconnected meanwhile."""
        assert asking.reply is not None
        session = Session(asking.client_id)
        session.epoch = asking.reply.epoch
        session.will = asking.opening.will
        session.expiry_s = asking.opening.expiry_s
        if session.expiry_s > 0 or session.will is not None:
            # This node has delivered nothing, so only an earlier owner may have sent inflight
            # messages.
            older = asking.reply.session
            maybe_sent = asking.reply.maybe_sent or (older is not None and older.maybe_sent is True)
            log_close(self._state, session, maybe_sent=maybe_sent)
        self.live.report_closed(session.client_id, session.epoch)
        self._done(asking)

    def _session(self, client_id: str, resumed: Session | None) -> Session:
        if resumed is None:
            return Session(client_id)
        session = live_session(self._state, resumed)
        if session.rare.maybe_sent is not None and self._context.began_at is not None:
            # Only an earlier process has not logged all that it sent.
            session.own_rare().maybe_sent = self._context.began_at
        return session

    def close(self, order: CloseFrame) -> None:
        """Refuses the CONNECT that waits for a session which another connection takes, and releases
        the session."""
        for asking in list(self._of_clients.get(order.client, ())):
            if asking.reply is not None and asking.reply.epoch <= order.epoch:
                self._supersede(asking)
        self.live.close(order)

    def tell_owned(self, leader: str, partitions: list[int]) -> None:
        """Reports to `leader` the sessions and requests of this node whose home is one of
        `partitions`.

        It is called when `leader` begins to lead them, or when its link is new.
        """
        asking: list[str] = []
        for partition in partitions:
            for each in self._of_homes[partition].values():
                asking.append(each.client_id)
                if each.reply is not None and not each.is_recorded:
                    # The new coordinator may not know this reply. The request is sent again.
                    self._take_back(each)
                    each.barrier = NOTHING
                    self._send_at(each, self._state.now + ASK_AFTER_S)
        self.reports.begin(leader, partitions, asking)

    def leader_changed(self, partition: int) -> None:
        """Sends the requests that have no reply to the new leader of `partition`."""
        self._resent.begin(list(self._of_homes[partition].values()), self._send_soon)

    def _send_soon(self, asking: PendingOpen) -> int:
        if self.asking.get(asking.number) is asking and asking.reply is None:
            self._send_at(asking, min(asking.send_at, self._state.now + ASK_AFTER_S))
        return 1

    def take_local(self) -> None:
        """Takes the replies, close orders and report requests that this node's own coordinator has
        queued."""
        self._coordinator.reports.flush()
        while self._coordinator.answers.local:
            local, self._coordinator.answers.local = self._coordinator.answers.local, []
            for each in local:
                if isinstance(each, CloseFrame):
                    self.close(each)
                elif isinstance(each, OpenedFrame):
                    self.opened(self._context.node_id, each)
                else:
                    for home, epoch in zip(each.partitions, each.epochs, strict=True):
                        if epoch > self._reported_in.get(home, (0, 0.0))[0]:
                            self._reported_in[home] = (epoch, self._state.now)
                    self.tell_owned(each.node, each.partitions)

    def handle_timers(self) -> None:
        """Sends due requests, and refuses CONNECTs that have waited for too long. The next call is
        due at once while there are more of them."""
        now = self._state.now
        wakes = self._wakes
        for _ in range(WAKES_MAX):
            if not wakes or wakes[0][0] > now:
                return
            when, number = heappop(wakes)
            asking = self.asking.get(number)
            if asking is None or asking.wake_at != when:
                continue
            asking.wake_at = NEVER
            if asking.connection.state == CLOSED and not asking.is_sent:
                self._done(asking)
                continue
            is_overdue = asking.refused_at <= now
            if is_overdue and asking.connection.state == OPENING:
                self._refuse_overdue(asking)
            if asking.send_at <= now and asking.number in self.asking:
                self._send_request(asking)
            if asking.number in self.asking:
                self._wake_at(asking, now + ASK_AGAIN_S if is_overdue else asking.refused_at)
                self._wake_at(asking, asking.send_at)

    def _refuse_overdue(self, asking: PendingOpen) -> None:
        if not self._refuse_behind(asking):
            is_recorded = asking.reply is not None and asking.is_recorded
            if not self._context.has_majority(self._state.now):
                text = "no majority of the cluster can be reached"
            elif self._state.is_ownership_expired and is_recorded:
                text = "this node does not know the owner of the session"
            elif self._is_led_anew(asking.home, REFUSED_AFTER_S):
                text = "this node does not know which node leads the session's home partition"
            elif self._has_no_home(asking):
                text = f"partition {asking.home}, the home of the session, has no leader"
            else:
                return
            refuse(self._state, asking.connection, Rejection(text, reasons.SERVER_UNAVAILABLE))
        if asking.reply is not None:
            self._finish_if_ready(asking)

    def _has_no_home(self, asking: PendingOpen) -> bool:
        is_overdue = asking.refused_at + LEADERLESS_S - REFUSED_AFTER_S <= self._state.now
        return is_overdue and asking.reply is None and not self._context.leader(asking.home)

    def _refuse_behind(self, asking: PendingOpen) -> bool:
        """Refuses a CONNECT that waits for a read barrier, or will, if this node lags and other
        nodes can pass it. Returns True if it did."""
        is_known = self._coordinator.recorded_session(asking.client_id) is not None
        is_new = self._is_in_log(asking) and (asking.opening.clean_start or not is_known)
        nodes = [] if is_new and asking.barrier == NOTHING else self._barriers.nodes_ahead()
        if nodes:
            kind = asking.connection.listener.kind
            servers = server_reference(self._context.servers(nodes), kind)
            text = "this node lags behind in the log"
            refusal = Rejection(text, reasons.USE_ANOTHER_SERVER, servers)
            refuse(self._state, asking.connection, refusal)
        return bool(nodes)

    def timer(self) -> float | None:
        """Returns the time of the next check. It may be too early: at most WAKES_MAX entries that
        do not count any more are removed at once."""
        wakes = self._wakes
        for _ in range(WAKES_MAX):
            if not wakes:
                return None
            when, number = wakes[0]
            asking = self.asking.get(number)
            if asking is not None and asking.wake_at == when:
                break
            heappop(wakes)
        return wakes[0][0] if wakes else None
