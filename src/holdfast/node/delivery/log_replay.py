"""Readers that are behind, on their way from the log back to the live tail.

The node requests a read whenever a reader is behind, connected and has little queued. The result is
queued in the outbox. During the read the reader tails too (see session.cursor). So it is live again
the moment a read reaches the records that the node had delivered at the request.
"""

from collections import deque
from typing import Final

from holdfast.log import record as log_record
from holdfast.log.reading.interest import ReadInterest
from holdfast.log.record import Record
from holdfast.node.delivery.delivery import FETCH_RECORDS_MAX, pump_group, send_deferred
from holdfast.node.delivery.live_lane import open_lane_behind, read_lane
from holdfast.node.delivery.transmission import READ_BYTES_MAX, finish_inflight, resend
from holdfast.node.effects import FetchInflight, ReadLog
from holdfast.node.node_state import NodeState, ReplyPromise, Work
from holdfast.node.rights import may_read
from holdfast.node.session.audience import Audience, decode_audience, user_in
from holdfast.node.session.connection import OPEN, Connection
from holdfast.node.session.cursor import Redelivery
from holdfast.node.session.message import Message, stored_message
from holdfast.node.session.rare_fields import pop_ahead
from holdfast.node.session.session import RECEIVED, Group, GroupMember, Inflight, Session
from holdfast.node.state.state_records import log_changes, note_progress
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.packets import PUBREL
from holdfast.protocol.topics.names import matches

READ_RECORDS_MAX = 500
INFLIGHT_MAX: Final = 65_000
"""The most packet ids in use while messages wait for the cursor. A session has 65,535."""


def continue_reading(state: NodeState, reader: Session) -> None:
    """Requests the next piece of the log, unless enough is queued already."""
    if reader.reading or reader.tailing:
        return
    if reader.outbox_count() > READ_RECORDS_MAX // 2 or reader.outbox_bytes >= READ_BYTES_MAX:
        return
    connection = reader.connection
    if connection is None or connection.state != OPEN or reader.resuming or reader.replays_awaited:
        return
    lane = reader.lane
    if lane is not None and lane.positions is not None and read_lane(state, reader, lane):
        return
    if reader.has_starts and not state.replay_pace.may_read_on(reader):
        return
    positions = reader.positions
    assert positions is not None
    interests = _interests(state, reader)
    if not interests:
        reader.positions = None
        reader.tailing = True
        reader.end_lane()
        resend_passed(state, reader)
        return
    reader.start_read()
    state.stats.log_reads += 1
    state.effects.append(
        ReadLog(
            reader,
            connection,
            list(positions),
            list(state.delivered),
            interests,
            READ_RECORDS_MAX,
            READ_BYTES_MAX,
        )
    )


def feed_group(state: NodeState, group: Group, member: GroupMember | None) -> None:
    """Sends waiting messages of the group. `member`: one that has room."""
    if member is not None and group.deferred:
        send_deferred(state, group, member)
    pump_group(state, group)


class GroupsResumption(Work):
    """The job that attaches a session with a new connection to its groups. A step is one group."""

    def __init__(self, session: Session, connection: Connection) -> None:
        super().__init__()
        self.session = session
        self.connection = connection
        groups = session.groups
        self.members: list[GroupMember] = [] if groups is None else list(groups.values())
        self.next = 0

    def step(self, state: NodeState, steps: int) -> int:
        session = self.session
        start = self.next
        end = min(len(self.members), start + max(1, steps))
        for index in range(start, end):
            if session.connection is not self.connection:
                self.has_more = False
                return index - start
            member = self.members[index]
            group = member.group
            if isinstance(group, Group) and group.members.get(session) is member:
                group.attach(member)
                feed_group(state, group, member)
        self.next = end
        self.has_more = end < len(self.members)
        return end - start


def open_groups(state: NodeState, session: Session, connection: Connection) -> None:
    """Attaches a session with a new connection to its groups."""
    if session.groups is None:
        return
    work = GroupsResumption(session, connection)
    state.steps_left -= work.step(state, min(max(1, state.steps_left), state.steps_at_once))
    if work.has_more:
        state.start_work(work)


def _interests(state: NodeState, reader: Session) -> list[ReadInterest]:
    """The filters of a reader. The list stays the same from read to read until a subscription
    changes, because the reader of the log keeps what it derives from it."""
    interests = state.interests.get(reader)
    if interests is None:
        interests = [
            ReadInterest(subscription.filter, subscription.start)
            for subscription in reader.subscriptions.values()
            if subscription.group is None and (subscription.qos > 0 or subscription.reads_log)
        ]
        state.interests[reader] = interests
    return interests


def message_of(record: Record) -> Message:
    """The message that a record contains. An audience that is none is nobody."""
    message = stored_message(record, record.flags & log_record.FLAG_QOS_MASK, record.timestamp_us)
    message.partition = record.partition
    message.offset = record.offset
    if record.flags & log_record.FLAG_AUDIENCE:
        message.user = user_in(record.audience)
        if message.user:
            return message
        try:
            message.audience = decode_audience(record.audience)
        except ValueError:
            message.audience = Audience(False, ())
    return message


def resume(state: NodeState, session: Session, connection: Connection) -> None:
    """Sends everything inflight again after CONNACK of a resumed session, in its order, with its
    packet id and DUP. [MQTT-4.4.0-1] [MQTT-4.6.0-1] [MQTT-3.3.1-1]

    A message that the cursor has not reached is sent when it does. A crash loses the packet ids of
    QoS 1 that were not logged yet, and the cursor sends those messages again. Counter-example
    without it: 1 (QoS 1) and 2 (QoS 2) of a topic are sent, and only the id of 2 is in the log. The
    client would receive 1, 2, 2, 1.
    """
    if session.has_starts:
        open_lane_behind(session, [])
    unsent: deque[int] = deque()
    ahead: dict[tuple[int, int], int] = {}
    for packet_id, entry in session.inflight.items():
        place = (entry.partition, entry.offset)
        if entry.state == RECEIVED:
            state.promise(_pubrel_promise(state, connection, session, packet_id, entry))
        elif _is_ahead(session, entry) and place not in ahead:
            ahead[place] = packet_id
        else:
            unsent.append(packet_id)
    if ahead and len(ahead) + session.inflight_max > INFLIGHT_MAX:
        # Ids for the messages before them might be lacking.
        unsent = deque(each for each, at in session.inflight.items() if at.state != RECEIVED)
        ahead = {}
    if ahead:
        session.own_rare().inflight_ahead = ahead
    if unsent:
        session.unsent = unsent
        send_unsent(state, session)


def _is_ahead(session: Session, entry: Inflight) -> bool:
    """Whether the cursor of a resumed session will reach the message. Not one that overtook a
    replay on this node: all earlier ones of its topic were sent, too."""
    positions = session.positions
    if positions is None or entry.is_retained or entry.group_tag or entry.is_ahead:
        return False
    return entry.offset >= positions[entry.partition]


def resend_passed(state: NodeState, session: Session) -> None:
    """Resends the messages of `inflight_ahead` that the cursor has passed without queueing them: no
    subscription brings them any more, or their records are lost."""
    ahead = session.rare.inflight_ahead
    if ahead is None or session.reading:
        return
    lane = session.lane
    queued = [*(session.outbox or ()), *(() if lane is None else lane.queue)]
    places = {
        (each.message.partition, each.message.offset)
        for each in queued
        if isinstance(each, Redelivery)
    }
    positions = session.positions
    passed = [
        place
        for place in ahead
        if place not in places and (positions is None or place[1] < positions[place[0]])
    ]
    if not passed:
        return
    unsent = session.unsent or deque()
    unsent.extend(pop_ahead(session, place) for place in passed)
    session.unsent = unsent
    send_unsent(state, session)


def _pubrel_promise(
    state: NodeState, connection: Connection, session: Session, packet_id: int, entry: Inflight
) -> ReplyPromise:
    """The promise of a PUBREL. The caller gives it once the log says that the client has the
    message, or after a crash the broker would send it as a new one.

    A member of a shared group keeps the id until the log says that the group has finished with the
    message. With neither in the log, another member would receive it.
    """
    reply = encode_ack(PUBREL, packet_id, reasons.SUCCESS, connection.version)
    promise = ReplyPromise(connection, reply, False)
    if entry.group_tag and session.expiry_s > 0:
        state.cluster.groups.await_finish(promise, session, entry)
    return promise


def handle_fetched(
    state: NodeState, effect: FetchInflight, found: list[tuple[int, Record | None]]
) -> None:
    """Handles the result of a FetchInflight effect: the first of the wanted records, as many as fit
    into its `bytes_max`, and at least one."""
    reader = effect.reader
    assert reader is not None, "the read of another node"
    if isinstance(reader, Group):
        _handle_returned(state, reader, effect, found)
        return
    if reader.connection is not effect.connection or not reader.resuming:
        return
    reader.resuming = False
    connection = reader.connection
    assert connection is not None
    for packet_id, record in found:
        entry = reader.inflight.get(packet_id)
        if entry is None or entry.state == RECEIVED:
            continue
        if record is not None:
            entry.message = message_of(record)
        elif entry.is_retained:
            entry.message = _still_retained(state, entry)
        if entry.message is None:
            # Retention deleted the record, so the delivery cannot be completed.
            state.stats.dropped_lost += 1
            if reader.rare.owed_inflight is not None:
                reader.rare.owed_inflight.discard((entry.partition, entry.offset))
            _abandon_message(state, connection, reader, packet_id, entry)
    send_unsent(state, reader)


def _still_retained(state: NodeState, entry: Inflight) -> Message | None:
    """The retained message of the entry, which may outlive its record."""
    message = state.retained.get(entry.topic.decode())
    if message is None:
        return None
    is_it = message.partition == entry.partition and message.offset == entry.offset
    return message if is_it else None


def _abandon_message(
    state: NodeState, connection: Connection, session: Session, packet_id: int, entry: Inflight
) -> None:
    """Drops a message of an earlier connection that cannot or may not be sent again."""
    if entry.qos == 2:
        # The client may have the message under this id, and would take another one for a
        # repetition: PUBREL frees the id on both sides. [MQTT-4.3.3-12]
        await_pubcomp(state, connection, session, packet_id, entry)
        return
    finish_inflight(state, session, packet_id, entry)


def _return_to_group(
    state: NodeState,
    connection: Connection,
    session: Session,
    packet_id: int,
    entry: Inflight,
    by_tag: dict[int, list[Group]],
) -> None:
    """Returns a message that the client may not read any more to the shared group that gave it, if
    one did. `by_tag`: receives the groups of the session, for the next call."""
    message = entry.message
    assert message is not None
    entry.message = None
    if entry.qos == 1:
        # The group gives it to another member, so it is not finished.
        entry.group = None
    _abandon_message(state, connection, session, packet_id, entry)
    if entry.qos == 2 or not entry.group_tag or session.groups is None:
        return
    topic = message.topic.decode()
    if not by_tag:
        for each in session.groups:
            by_tag.setdefault(each.tag, []).append(each)
    for group in by_tag.get(entry.group_tag, ()):
        if matches(group.filter, topic):
            group.returned.append(entry)
            pump_group(state, group)
            return


def await_pubcomp(
    state: NodeState, connection: Connection, session: Session, packet_id: int, entry: Inflight
) -> None:
    """Finishes the message of a QoS 2 entry, but keeps its packet id until PUBCOMP."""
    entry.state = RECEIVED
    entry.message = None
    pop_ahead(session, (entry.partition, entry.offset), packet_id)
    group = entry.group
    if group is not None:
        state.cluster.groups.received(group, entry)
    entry.group = None
    # [MQTT-4.3.3-7] [MQTT-4.3.3-8]
    promise = _pubrel_promise(state, connection, session, packet_id, entry)
    if session.expiry_s > 0:
        note_progress(state, session)
        session.note_change(packet_id, entry)
        log_changes(state, session, promise)
    else:
        state.promise(promise)


def send_unsent(state: NodeState, session: Session) -> None:
    """Resends within the receive maximum of the new connection and the socket's room.
    [MQTT-3.3.4-9] The rest follows as the client acknowledges and reads. Messages are fetched from
    the log in pieces, so memory holds at most one piece and `outbox_bytes`."""
    unsent = session.unsent
    connection = session.connection
    if unsent is None or connection is None or session.resuming:
        return
    by_tag: dict[int, list[Group]] = {}
    while unsent and session.window_is_open():
        if connection.out_bytes > state.config.outbox_bytes:
            return
        packet_id = unsent[0]
        entry = session.inflight.get(packet_id)
        if entry is None or entry.state == RECEIVED:
            unsent.popleft()
            continue
        message = entry.message
        if message is None:
            _fetch_unsent(state, session, connection, unsent)
            return
        unsent.popleft()
        if not may_read(session, message.topic):
            state.stats.reads_denied += 1
            _return_to_group(state, connection, session, packet_id, entry, by_tag)
            continue
        entry.message = None
        if not resend(state, session, connection, packet_id, message):
            state.stats.dropped_too_large += 1
            _abandon_message(state, connection, session, packet_id, entry)
    if not unsent:
        session.unsent = None


def _fetch_unsent(
    state: NodeState, session: Session, connection: Connection, unsent: deque[int]
) -> None:
    wanted: list[tuple[int, int, int]] = []
    for packet_id in unsent:
        entry = session.inflight.get(packet_id)
        if entry is not None and entry.state != RECEIVED:
            wanted.append((packet_id, entry.partition, entry.offset))
        if len(wanted) == FETCH_RECORDS_MAX:
            break
    session.resuming = True
    state.effects.append(FetchInflight(session, connection, wanted, READ_BYTES_MAX))


def _handle_returned(
    state: NodeState, group: Group, effect: FetchInflight, found: list[tuple[int, Record | None]]
) -> None:
    """Takes the fetched records that members have returned, and sends them to other members."""
    group.fetching = False
    for number, record in found:
        entry = effect.entries[number]
        if record is not None:
            entry.message = message_of(record)
        elif entry in group.returned:
            state.stats.dropped_lost += 1
            group.returned.remove(entry)
            state.cluster.groups.finished(group, entry.partition, entry.offset)
    pump_group(state, group)
