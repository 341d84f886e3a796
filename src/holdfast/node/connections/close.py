"""Ends connections and sessions: DISCONNECT, errors, wills, expiry.

Every end of a connection with a session goes through `_detach`, whatever its cause. So the same
happens once: the session keeps what it needs, the will is published or scheduled, and the log
receives that the session is closed.

Invariants
- In a cluster the progress of a session is in the log before its close. Counter-example: the close
  comes first, another node opens the session, and ignores the late progress because of its lower
  epoch. It sends again what the client has acknowledged.
- A session without a connection has nothing in memory that the log has (`_release_cursor`). So
  100,000 sessions that are away cost only their subscriptions and inflight entries.
- The end of a session is logged after its will. After a crash between the two the session ends
  again, and the will is not lost.
"""

from typing import Final

from holdfast.node.connections.client_notes import (
    DISCONNECTED,
    LOST,
    NORMAL,
    PROTOCOL_ERROR,
    TAKEN_OVER,
    note_closed,
    note_refused,
    reason_name,
)
from holdfast.node.delivery.subscriptions import leave_groups, remove_subscription
from holdfast.node.node_state import NodeState, Work
from holdfast.node.refusal import Rejection
from holdfast.node.session.connection import CLOSED, NEW, OPEN, Connection
from holdfast.node.session.session import Session
from holdfast.node.state.session_records import CloseRecord, EndRecord
from holdfast.node.state.state_records import append_change, log_session, note_progress
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_within
from holdfast.protocol.mqtt.errors import MessageRefused, ProtocolViolation
from holdfast.protocol.mqtt.packets import Connack, Disconnect, Properties

CLOSE_STEPS: Final = 10
"""The steps of one closed connection, where many are closed in slices."""


def is_refused(state: NodeState, connection: Connection, refusal: Rejection | None) -> bool:
    """Refuses the client if there is a reason, and returns whether there is."""
    if refusal is not None:
        refuse(state, connection, refusal)
    return refusal is not None


def refuse(state: NodeState, connection: Connection, refusal: Rejection, claimed: str = "") -> None:
    """Sends CONNACK with a reason, then closes. [MQTT-3.2.2-7] `claimed`: see `note_refused`."""
    reason = refusal.reason
    state.stats.refuse_connection(reason_name(reason))
    note_refused(state, connection, refusal, claimed)
    # [MQTT-3.1.4-2] no further packet of the client is processed
    connection.connect = None
    if connection.state != CLOSED:
        properties: Properties = {p.REASON_STRING: refusal.text}
        if refusal.servers:
            properties[p.SERVER_REFERENCE] = refusal.servers
        packet = Connack(False, reason, properties)
        data = encode_within(packet, connection.version, connection.packet_bytes_max)
        if data:
            connection.send(data, state.dirty)
    connection.state = CLOSED
    connection.close(state.dirty)


def close_connection(
    state: NodeState,
    connection: Connection,
    reason: int,
    text: str,
    server_reference: str = "",
    event: str = DISCONNECTED,
) -> None:
    """Closes a connection from the broker's side. An MQTT 5 client is sent the reason and, if
    given, the reference to another server. [MQTT-4.13.1-1] `event`: the name of the log line."""
    if connection.state == CLOSED:
        return
    if connection.state == OPEN and connection.version >= 5:
        properties: Properties = {}
        if server_reference:
            properties[p.SERVER_REFERENCE] = server_reference
        if text and connection.problem_information:
            properties[p.REASON_STRING] = text
        packet = Disconnect(reason, properties)
        data = encode_within(packet, connection.version, connection.packet_bytes_max)
        if data:
            connection.send(data, state.dirty)
    if reason == reasons.SESSION_TAKEN_OVER:
        event = TAKEN_OVER
    _detach(state, connection, event, reason_name(reason), text)


def handle_violation(state: NodeState, connection: Connection, error: ProtocolViolation) -> None:
    """Reports a protocol violation to the client as its state allows, and closes. [MQTT-4.13.1-1]
    [MQTT-4.13.2-1]"""
    text = str(error)
    if isinstance(error, MessageRefused):
        close_connection(state, connection, error.reason, text)
        return
    state.stats.protocol_errors += 1
    if connection.state == OPEN:
        close_connection(state, connection, error.reason, text, event=PROTOCOL_ERROR)
    elif connection.state == NEW and error.reason != reasons.UNSUPPORTED_PROTOCOL_VERSION:
        # [MQTT-3.1.0-1] without a CONNECT there is no reply
        note_closed(state, connection, PROTOCOL_ERROR, reason_name(error.reason), text)
        _detach(state, connection)
    else:
        refuse(state, connection, Rejection(text, error.reason))
        _detach(state, connection)


def handle_disconnect(
    state: NodeState, connection: Connection, session: Session, packet: Disconnect
) -> None:
    """Closes a connection at the client's request."""
    expiry = packet.properties.get(p.SESSION_EXPIRY_INTERVAL)
    if isinstance(expiry, int):
        if session.expiry_s == 0 and expiry != 0:
            # [MQTT-3.1.2-23]
            raise ProtocolViolation(
                reasons.PROTOCOL_ERROR, "session expiry set at DISCONNECT of a session without"
            )
        session.expiry_s = min(expiry, state.config.session_expiry_s_max)
    if packet.reason == reasons.SUCCESS:
        # [MQTT-3.1.2-10] [MQTT-3.14.4-3]
        session.will = None
    name = NORMAL if packet.reason == reasons.SUCCESS else reason_name(packet.reason)
    _detach(state, connection, reason=name)


def handle_connection_lost(state: NodeState, connection: Connection) -> None:
    """Handles a closed socket: the session's will is due. [MQTT-3.1.2-8]"""
    _detach(state, connection)


def _detach(
    state: NodeState,
    connection: Connection,
    event: str = DISCONNECTED,
    reason: str = LOST,
    text: str = "",
) -> None:
    """Ends a connection, and its session's part in it. `taken_over`: by another connection of the
    same client."""
    if connection.state == OPEN:
        note_closed(state, connection, event, reason, text)
    connection.state = CLOSED
    connection.close(state.dirty)
    session = connection.session
    if session is None or session.connection is not connection:
        return
    session.connection = None
    connection.session = None
    session.own_rare().disconnected_us = state.wall_us
    _release_cursor(state, session)
    # The leader of the session's home partition publishes its will, and ends it on expiry 0.
    log_session(state, session)
    if session.expiry_s > 0 or session.will is not None:
        log_close(state, session, maybe_sent=session.rare.maybe_sent is not None)
    elif session.recorded:
        log_end(state, session)
    state.cluster.session_detached(session)


def log_close(state: NodeState, session: Session, *, maybe_sent: bool = False) -> None:
    """Appends that the session has no connection. `maybe_sent`: it was sent messages that its
    logged cursor does not cover."""
    will = session.will is not None
    change = CloseRecord(session.client_id, session.expiry_s, will, maybe_sent)
    append_change(state, session.key, change, session.epoch)


def _release_cursor(state: NodeState, session: Session) -> None:
    """Drops everything from memory that the log has. The session continues from its positions."""
    if session.groups is not None:
        leave_groups(state, session, session.groups)
        session.blocked = None
    session.resuming = False
    session.waiting_qos0 = None
    state.interests.pop(session, None)
    for packet_id in session.unsent or ():
        unsent = session.inflight.get(packet_id)
        if unsent is not None:
            unsent.message = None
    session.unsent = None
    if session.rare.inflight_ahead is not None:
        session.rare.inflight_ahead = None
    if session.expiry_s == 0:
        return
    if session.reading:
        session.cancel_read()
    if session.lane is not None:
        session.positions = session.resume_positions(state.delivered)
        session.lane = None
    if session.tailing:
        if not session.outbox and session.rare.maybe_sent is not None:
            # All earlier messages are inflight or finished.
            session.rare.maybe_sent = None
        session.fall_behind(state.delivered)
    elif session.outbox:
        session.positions = session.resume_positions(state.delivered)
        session.outbox = None
    session.outbox_bytes = 0
    note_progress(state, session)


def log_end(state: NodeState, session: Session) -> None:
    """Appends that the session has ended."""
    append_change(state, session.key, EndRecord(session.client_id), session.epoch)


class EndedSession(Work):
    """The job that removes the subscriptions of an ended session from the routing. Until then
    `NodeState.ended` keeps routes from resolving to them. A step is one subscription.

    Removing 100,000 subscriptions takes longer than a turn of the event loop may last.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.filters = list(session.subscriptions)
        self.next = 0

    def step(self, state: NodeState, steps: int) -> int:
        start = self.next
        end = min(len(self.filters), start + steps)
        for index in range(start, end):
            remove_subscription(state, self.session, self.filters[index])
        self.next = end
        self.has_more = end < len(self.filters)
        if not self.has_more:
            state.ended.pop(self.session, None)
        return end - start


def drop_session(state: NodeState, session: Session) -> None:
    """Removes a session without a connection. A long removal continues as Work."""
    users = state.admission.users
    if users is not None and state.sessions.get(session.client_id) is session:
        kept = state.recorded.sessions.get(session.client_id)
        users.assign(session.client_id, kept.username if kept else None)
    state.pop_session(session)
    work = EndedSession(session)
    state.steps_left -= work.step(state, min(max(0, state.steps_left), state.steps_at_once))
    if work.has_more:
        state.ended[session] = None
        state.change_routes()
        state.start_work(work)


def take_over(state: NodeState, session: Session) -> None:
    """Closes the older connection of the same client id with SESSION_TAKEN_OVER. [MQTT-3.1.4-3]"""
    old = session.connection
    assert old is not None
    state.stats.sessions_taken_over += 1
    close_connection(
        state, old, reasons.SESSION_TAKEN_OVER, "another connection uses this client id"
    )
