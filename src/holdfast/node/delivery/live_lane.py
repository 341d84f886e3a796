"""Delivers a session's live messages beside its replay.

Those of other topics go through `session.cursor.LiveLane`, which has the invariants. A message that
has no room is not refused: the lane closes, and the message waits in the log behind the replay,
with all later ones. Closing bounds the memory of the lane, and of the records that the replay has
to pass later.

Those of a replayed topic come with the replay, from the log. A QoS 0 message that is not in the log
waits in memory for its turn (`session.cursor.WaitingQos0`). One without room is dropped.
"""

from typing import Final

from holdfast.log.reading.interest import ReadInterest
from holdfast.node.delivery.transmission import (
    READ_BYTES_MAX,
    can_send,
    has_room,
    redeliver,
    send_inflight,
    send_log_qos0,
    send_qos0,
)
from holdfast.node.effects import ReadLog
from holdfast.node.node_state import NodeState, Route
from holdfast.node.rights import may_read
from holdfast.node.routing.routing import subscriptions_of
from holdfast.node.session.cursor import Delivery, LiveLane, Redelivery, WaitingQos0
from holdfast.node.session.message import Message
from holdfast.node.session.session import Session, Subscription

DONE_MAX: Final = 10_000
"""The most finished records of a session that its replay has to pass. With one more the lane
closes."""
LANE_RECORDS_MAX: Final = 200
"""The most records of one read of a lane."""
BACKLOG_BYTES_MAX: Final = 65_536
"""The bytes that wait for a full socket above which a replay sends nothing, so that they do not
delay live messages."""


def overtake(state: NodeState, session: Session, target: Subscription, message: Message) -> bool:
    """Delivers a message of the log ahead of the replay. False: the session reads it from the log,
    because it belongs to the replay, or there is no room."""
    lane = session.lane
    if lane is None or target.replay is not None or not lane.takes(message.topic.decode()):
        return False
    if target.no_local and session.key == message.publisher:
        return True
    qos = message.qos if message.qos < target.qos else target.qos
    retain = message.retain and target.retain_as_published
    delivery = Delivery(message, qos, retain, target.additions)
    if lane.positions is not None:
        lane.tail(delivery, has_room(state, len(lane.tailed), lane.tailed_bytes))
        return True
    if is_full(session, lane) or not has_room(state, len(lane.queue), lane.queue_bytes):
        lane.close()
        return False
    if not lane.queue and can_send(state, session):
        _send(state, session, delivery)
    else:
        lane.push(delivery)
    return True


def is_full(session: Session, lane: LiveLane) -> bool:
    """Whether the replay would have to pass too many records with one more in the lane."""
    done = session.done
    return done is not None and len(done) + len(lane.queue) >= DONE_MAX


def open_lane_behind(session: Session, filters: list[str]) -> None:
    """Opens the lane of a session that replays and is behind, unless it has one. Messages of its
    other subscriptions then wait for each other only. Needs an empty outbox. `filters`: those of
    replays that are not in the session yet."""
    positions = session.positions
    if session.lane is not None or positions is None:
        return
    all_filters = list(filters)
    has_others = False
    for each in session.subscriptions.values():
        if each.replay is not None:
            all_filters.append(each.filter)
        elif each.group is None:
            has_others = True
    if not has_others or not all_filters:
        return
    lane = LiveLane(all_filters)
    if lane.is_open:
        lane.positions = list(positions)
    session.lane = lane


def read_lane(state: NodeState, session: Session, lane: LiveLane) -> bool:
    """Requests the next piece of the log for a lane that is behind. False: it is not, so the replay
    goes on."""
    positions = lane.positions
    if positions is None:
        return False
    if lane.reading or lane.queue:
        return True
    interests = [
        ReadInterest(each.filter, each.start)
        for each in session.subscriptions.values()
        if each.group is None and each.replay is None and (each.qos > 0 or each.reads_log)
    ]
    if not interests:
        lane.positions = None
        return False
    lane.start_read()
    state.stats.log_reads += 1
    effect = ReadLog(
        session,
        session.connection,
        list(positions),
        list(state.delivered),
        interests,
        min(LANE_RECORDS_MAX, state.config.outbox_messages),
        READ_BYTES_MAX,
    )
    effect.lane = lane
    state.effects.append(effect)
    return True


def pump_lane(state: NodeState, session: Session, lane: LiveLane) -> bool:
    """Sends what waits in the lane. False: there is no room for all of it."""
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
    """Sends a message, and notes that the replay has to pass its record."""
    message = delivery.message
    if isinstance(delivery, Redelivery):
        redeliver(state, session, message)
        return
    if not may_read(session, message.topic):
        state.stats.reads_denied += 1
    elif message.is_expired(state.wall_us):
        state.stats.dropped_expired += 1
    elif delivery.qos == 0:
        send_log_qos0(state, session, message, delivery.retain, delivery.additions)
    elif send_inflight(
        state, session, message, delivery.qos, delivery.retain, delivery.additions, False, None
    ):
        for entry in reversed(session.inflight.values()):
            entry.is_ahead = True
            return
    session.note_done(message.partition, message.offset)


def deliver_qos0(
    state: NodeState, route: Route, targets: list[Subscription], message: Message
) -> None:
    """Delivers a QoS 0 message of a topic that some of the targets read from the log. To these it
    comes from there if the log has it."""
    # On a full disk a QoS 0 message is delivered and not logged.
    is_logged = message.partition >= 0 or (route.logged and not state.disk_full)
    for target in targets:
        session = target.session
        if session.connection is None:
            continue
        if target.reads_log and is_logged:
            continue
        if _waits(session, target, route.partition):
            _let_wait(state, session, target, message, route.partition)
        else:
            send_qos0(state, target, message)


def _waits(session: Session, target: Subscription, partition: int) -> bool:
    """Whether an unlogged QoS 0 message waits: behind a replay, or behind earlier ones. Those may
    be left of a subscription that the client has replaced. [MQTT-3.8.4-4]"""
    if not target.reads_log:
        return False
    if target.replay is not None and session.has_starts:
        return True
    waiting = session.waiting_qos0
    return waiting is not None and partition in waiting.by_partition


def _let_wait(
    state: NodeState, session: Session, target: Subscription, message: Message, partition: int
) -> None:
    """Queues a QoS 0 message behind the records handed out by the node, or drops and counts."""
    if target.no_local and session.key == message.publisher:
        return
    waiting = session.waiting_qos0
    if waiting is None:
        waiting = WaitingQos0()
    if not has_room(state, waiting.count, waiting.size_bytes):
        state.stats.dropped_qos0_slow += 1
        session.dropped += 1
        return
    retain = message.retain and target.retain_as_published
    delivery = Delivery(message, 0, retain, target.additions)
    waiting.push(partition, state.delivered[partition], delivery)
    session.waiting_qos0 = waiting


def drop_waiting(state: NodeState, session: Session) -> None:
    """Drops the waiting QoS 0 messages of topics that no subscription reads from the log any more.
    The next subscription to them would get newer messages first. [MQTT-3.10.4-2]"""
    waiting = session.waiting_qos0
    if waiting is None:
        return
    kept = WaitingQos0()
    is_read: dict[bytes, bool] = {}
    for partition, entries in waiting.by_partition.items():
        for before, delivery in entries:
            topic = delivery.message.topic
            if topic not in is_read:
                found = subscriptions_of(state, session, topic.decode())
                is_read[topic] = any(each.reads_log for each in found)
            if is_read[topic]:
                kept.push(partition, before, delivery)
    session.waiting_qos0 = kept if kept.count else None


def send_waiting(state: NodeState, session: Session) -> bool:
    """Sends the waiting QoS 0 messages that go before the first delivery of the outbox, or all of
    them at the tail. False: there is no room now."""
    waiting = session.waiting_qos0
    assert waiting is not None
    while waiting.count:
        if not can_send(state, session):
            return False
        outbox = session.outbox
        delivery: Delivery | None = None
        if outbox:
            first = outbox[0].message
            delivery = waiting.pop_before(first.partition, first.offset)
        elif session.tailing and not session.reading:
            delivery = waiting.pop()
        if delivery is None:
            return True
        message = delivery.message
        if not may_read(session, message.topic):
            state.stats.reads_denied += 1
        elif message.is_expired(state.wall_us):
            state.stats.dropped_expired += 1
        else:
            send_log_qos0(state, session, message, delivery.retain, delivery.additions)
    session.waiting_qos0 = None
    return True
