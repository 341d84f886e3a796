"""The live messages of a session beside its replay.

They go through `session.cursor.LiveLane`, which has the invariants. A message that has no room is
not refused: the lane closes, and the message waits in the log behind the replay, with all later
ones. Closing bounds the memory of the lane, and of the records that the replay has to pass later.
"""

from typing import Final

from holdfast.broker.delivery.transmission import can_send, has_room, send_inflight
from holdfast.broker.session.cursor import Delivery, LiveLane
from holdfast.broker.session.message import Message
from holdfast.broker.session.session import Session, Subscription
from holdfast.broker.state import NodeState

DONE_MAX: Final = 10_000
"""The most finished records of a session that its replay has to pass. With one more the lane
closes."""
BACKLOG_BYTES_MAX: Final = 65_536
"""The bytes that wait for a full socket above which a replay sends nothing, so that they do not
delay live messages."""


def overtake(state: NodeState, session: Session, target: Subscription, message: Message) -> bool:
    """Deliver a QoS 1 or 2 message ahead of the replay. False: it belongs to the replay, or there
    is no room, so the session reads it from the log."""
    lane = session.lane
    if lane is None or target.replay is not None or not lane.takes(message.topic.decode()):
        return False
    if target.no_local and session.key == message.publisher:
        return True
    done = session.done
    is_full = done is not None and len(done) >= DONE_MAX
    if is_full or not has_room(state, len(lane.queue), lane.queue_bytes):
        lane.is_open = False
        return False
    qos = message.qos if message.qos < target.qos else target.qos
    retain = message.retain and target.retain_as_published
    delivery = Delivery(message, qos, retain, target.additions)
    if not lane.queue and can_send(state, session):
        _send(state, session, delivery)
    else:
        lane.push(delivery)
    return True


def pump_lane(state: NodeState, session: Session, lane: LiveLane) -> bool:
    """Send what waits in the lane. False: there is no room for all of it."""
    while lane.queue:
        if not can_send(state, session):
            return False
        _send(state, session, lane.pop())
    return True


def is_backed_up(session: Session) -> bool:
    """Whether the replay waits for the socket. The socket wakes the session when it has room."""
    connection = session.connection
    return (
        connection is not None and connection.congested and connection.out_bytes > BACKLOG_BYTES_MAX
    )


def _send(state: NodeState, session: Session, delivery: Delivery) -> None:
    """Send a message, and note that the replay has to pass its record."""
    message = delivery.message
    if message.is_expired(state.wall_us):
        state.stats.dropped_expired += 1
    elif send_inflight(
        state,
        session,
        message,
        delivery.qos,
        delivery.retain,
        delivery.additions,
        False,
        None,
    ):
        for entry in reversed(session.inflight.values()):
            entry.is_ahead = True
            return
    session.note_done(message.partition, message.offset)
