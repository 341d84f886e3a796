"""Handles receivers' PUBACK, PUBREC and PUBCOMP for messages the broker sent.

Each frees a packet id or moves it on, and then lets waiting messages take the room (`proceed`). An
acknowledgement for an unknown id has no effect: after a reconnect a client repeats those that it
does not know to have arrived.
"""

from holdfast.node.delivery.log_replay import (
    await_pubcomp,
    continue_reading,
    feed_group,
    send_unsent,
)
from holdfast.node.delivery.outbox import pump
from holdfast.node.delivery.retained import continue_scans
from holdfast.node.delivery.transmission import can_send, finish_inflight
from holdfast.node.node_state import NodeState
from holdfast.node.session.connection import Connection
from holdfast.node.session.session import SENT, Inflight, Session
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.packets import PUBREL


def handle_puback(state: NodeState, session: Session, packet_id: int) -> None:
    """Finishes a QoS 1 message of the broker's."""
    entry = session.inflight.get(packet_id)
    # An unknown id is a repetition after a reconnect, not an attack. [MQTT-4.3.2-5]
    if entry is None or entry.qos != 1:
        return
    _finish(state, session, packet_id, entry)


def handle_pubrec(
    state: NodeState, connection: Connection, session: Session, packet_id: int, reason: int
) -> None:
    """Continues with PUBREL for a QoS 2 message of the broker's, or finishes it if the client
    refuses it."""
    entry = session.inflight.get(packet_id)
    if entry is None or entry.qos != 2:
        # The client must get PUBREL all the same, or it would keep the id for ever.
        if connection.version >= 5:
            answer = reasons.PACKET_IDENTIFIER_NOT_FOUND
        else:
            answer = reasons.SUCCESS
        if reason < 0x80:
            connection.send(encode_ack(PUBREL, packet_id, answer, connection.version), state.dirty)
        return
    if reason >= 0x80:
        # The receiver refuses the message: the id is free, and it is not sent again. [MQTT-4.4.0-2]
        _finish(state, session, packet_id, entry)
        return
    await_pubcomp(state, connection, session, packet_id, entry)


def handle_pubcomp(state: NodeState, session: Session, packet_id: int) -> None:
    """Finishes a QoS 2 message of the broker's. Before its PUBREC, the PUBCOMP replies to the
    PUBREL of an earlier message with the id: see `send_inflight`."""
    entry = session.inflight.get(packet_id)
    if entry is None or entry.qos != 2 or entry.state == SENT:
        return
    _finish(state, session, packet_id, entry)


def _finish(state: NodeState, session: Session, packet_id: int, entry: Inflight) -> None:
    """Finishes a message, and sends what waits for its place in the window."""
    finish_inflight(state, session, packet_id, entry)
    proceed(state, session)


def proceed(state: NodeState, session: Session) -> None:
    """Sends waiting messages when the window or the socket has opened. The order is: unfinished
    messages of an earlier connection, retained messages of a SUBSCRIBE, then the cursor's."""
    if session.resuming:
        return
    if session.unsent is not None:
        send_unsent(state, session)
        if session.unsent is not None:
            return
    if session.retained_scans is not None:
        continue_scans(state, session)
    if session.has_starts and session.blocked:
        # A replay would fill each room in the window before its groups get one.
        _feed_blocked(state, session)
    if session.outbox or session.lane is not None or session.waiting_qos0 is not None:
        pump(state, session)
    if not session.tailing and not session.reading:
        continue_reading(state, session)
    if session.blocked is not None:
        _feed_blocked(state, session)


def _feed_blocked(state: NodeState, session: Session) -> None:
    """Gives messages of its shared groups to the session. The member that has waited longest comes
    first."""
    blocked = session.blocked
    while blocked and can_send(state, session):
        member, _ = blocked.popitem(last=False)
        group = member.group
        assert group is not None
        group.unblock(member)
        feed_group(state, group, member)
    if not blocked:
        session.blocked = None
