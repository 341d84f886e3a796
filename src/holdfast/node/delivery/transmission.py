"""Sending one message to one session: its PUBLISH packet, and the inflight entry of QoS 1 and 2."""

from collections import deque
from typing import Final

from holdfast.node.node_state import NodeState, Promise
from holdfast.node.rights import may_read
from holdfast.node.routing.routing import subscription_at, subscriptions_of
from holdfast.node.session.additions import Additions
from holdfast.node.session.connection import OPEN, Connection
from holdfast.node.session.message import Message
from holdfast.node.session.rare_fields import frees_first, pop_ahead
from holdfast.node.session.session import FREED, Group, Inflight, Session, Subscription
from holdfast.node.state.recorded_state import WITHHELD
from holdfast.node.state.state_records import log_changes, note_progress
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.packets import PUBREL
from holdfast.protocol.mqtt.reasons import SUCCESS

READ_BYTES_MAX: Final = 1 << 20
"""The most bytes of one read of the log, or of one fetch. A single record may exceed it."""


def send_qos0(state: NodeState, target: Subscription, message: Message) -> None:
    """Sends at QoS 0, or drops and counts: the socket is full, or the message expired or too large.
    It waits behind QoS 2 packets that wait for the log."""
    session = target.session
    connection = session.connection
    if connection is None or connection.state != OPEN:
        return
    # [MQTT-3.8.3-3] no local
    if target.no_local and session.key == message.publisher:
        return
    waits = session.promised_sends > 0
    if connection.out_bytes > state.config.outbox_bytes or (waits and state.is_congested()):
        state.stats.dropped_qos0_slow += 1
        session.dropped += 1
        return
    # [MQTT-3.3.1-12] [MQTT-3.3.1-13] RETAIN of the publisher only where the subscription asks
    retain = message.retain and target.retain_as_published
    if not connection.mount and (
        connection.version < 5
        or (message.expiry_s < 0 and target.additions is None and connection.aliases_out is None)
    ):
        frame = message.frame_qos0(connection.version, retain)
    else:
        if message.is_expired(state.wall_us):
            state.stats.dropped_expired += 1
            return
        frame = special_frame(
            state, connection, message, 0, retain, False, 0, target.additions, not waits
        )
    # [MQTT-3.1.2-24] [MQTT-3.1.2-25] larger than the client takes: drop as if it were sent
    if not 0 < len(frame) <= connection.packet_bytes_max:
        state.stats.dropped_too_large += 1
        return
    if waits:
        promise = SendPromise(connection, session, frame, message.topic)
        promise.size_bytes = len(frame)
        state.promise_bytes += promise.size_bytes
        state.promise(promise)
        return
    state.stats.publish_sent += 1
    connection.send(frame, state.dirty)


def special_frame(
    state: NodeState,
    connection: Connection,
    message: Message,
    qos: int,
    retain: bool,
    dup: bool,
    packet_id: int,
    additions: Additions | None,
    may_introduce: bool,
) -> bytes:
    """A PUBLISH with properties of this receiver's own.

    `may_introduce` a topic alias: only if this frame is the next to be sent. Otherwise a later
    frame may leave first and use an alias that the client does not have yet.
    """
    topic = connection.topic_of(message.topic)
    alias = 0
    aliases = connection.aliases_out
    is_introduced = False
    if aliases is not None:
        # [MQTT-3.1.2-26] [MQTT-3.1.2-27] never above the client's maximum
        alias = aliases.by_topic.get(topic, 0)
        if alias:
            topic = b""
        elif may_introduce and aliases.has_room(topic, connection.alias_out_max):
            alias = aliases.add(topic)
            is_introduced = True
    frame = message.frame_special(
        connection.version, qos, retain, dup, packet_id, state.wall_us, additions, topic, alias
    )
    if is_introduced and not 0 < len(frame) <= connection.packet_bytes_max:
        # The frame will not be sent, so the client would never receive the alias.
        assert aliases is not None
        aliases.remove_last(topic)
    return frame


def has_room(state: NodeState, count: int, size_bytes: int) -> bool:
    """Whether a queue of this size takes another message."""
    return count < state.config.outbox_messages and size_bytes < state.config.outbox_bytes


def fall_behind(state: NodeState, reader: Session | Group, message: Message) -> None:
    """Lets the reader read the log from `message` on, the first record that it was not handed."""
    state.stats.readers_fell_behind += 1
    delivered = state.delivered
    was = delivered[message.partition]
    delivered[message.partition] = message.offset
    reader.fall_behind(delivered)
    delivered[message.partition] = was


def can_send(state: NodeState, session: Session) -> bool:
    """Whether there is a connection that takes another QoS > 0 PUBLISH now."""
    connection = session.connection
    return (
        connection is not None
        and connection.state == OPEN
        and not state.is_ownership_expired
        and not session.resuming
        and session.unsent is None
        and session.window_is_open()
        and connection.out_bytes <= state.config.outbox_bytes
    )


class SendPromise(Promise):
    """An outbound QoS 2 PUBLISH of a durable session.

    Its packet id must be in the log first, or a crash could send the message again under another
    id. Later ones wait too, so that a topic's order is the same for every receiver. At QoS 0 this
    holds for subscriptions that read the log.

    The rights of the client may have changed meanwhile. A message that it may not read any more is
    then treated like one that is inflight from an earlier connection (`log_replay.send_unsent`).
    """

    def __init__(
        self,
        connection: Connection,
        session: Session,
        frame: bytes,
        topic: bytes,
        packet_id: int = 0,
    ) -> None:
        """`packet_id` 0: QoS 0."""
        super().__init__(connection)
        self.session = session
        self.frame = frame
        self.topic = topic
        self.packet_id = packet_id
        # In NodeState.promise_bytes while it waits.
        self.size_bytes = 0
        session.promised_sends += 1

    def release(self, state: NodeState) -> None:
        session = self.session
        session.promised_sends -= 1
        assert session.promised_sends >= 0, "a promised send is sent twice"
        state.promise_bytes -= self.size_bytes
        connection = self.connection
        assert connection is not None
        if connection.state != OPEN:
            return
        if may_read(session, self.topic):
            state.stats.publish_sent += 1
            connection.send(self.frame, state.dirty)
        elif self.packet_id:
            if self.packet_id in session.inflight:
                withhold(state, session, connection, self.packet_id)
        else:
            state.stats.reads_denied += 1


def withhold(state: NodeState, session: Session, connection: Connection, packet_id: int) -> None:
    """Lets `log_replay.send_unsent` decide about a message that cannot be sent as it is."""
    if session.unsent is None:
        session.unsent = deque()
    session.unsent.append(packet_id)
    state.arm(state.now, WITHHELD, connection)


def send_log_qos0(
    state: NodeState, session: Session, message: Message, retain: bool, additions: Additions | None
) -> None:
    """Sends at QoS 0 to a subscription that reads the log; needs can_send(), so none is dropped for
    a full socket. It waits behind QoS 2 packets that wait for the log."""
    connection = session.connection
    assert connection is not None
    if session.expiry_s > 0:
        note_progress(state, session)
    waits = session.promised_sends > 0
    if not connection.mount and (
        connection.version < 5
        or (message.expiry_s < 0 and additions is None and connection.aliases_out is None)
    ):
        frame = message.frame_qos0(connection.version, retain)
    else:
        frame = special_frame(state, connection, message, 0, retain, False, 0, additions, not waits)
    if not 0 < len(frame) <= connection.packet_bytes_max:
        state.stats.dropped_too_large += 1
        return
    if waits:
        state.promise(SendPromise(connection, session, frame, message.topic))
        return
    state.stats.publish_sent += 1
    connection.send(frame, state.dirty)


def send_inflight(
    state: NodeState,
    session: Session,
    message: Message,
    qos: int,
    retain: bool,
    additions: Additions | None,
    is_retained: bool,
    group: Group | None,
) -> bool:
    """Sends a QoS 1 or 2 PUBLISH, makes it inflight; needs can_send(). False: nothing was sent."""
    connection = session.connection
    assert connection is not None
    assert session.window_is_open(), "more is sent than the client takes"
    packet_id = session.allocate_packet_id()
    dup = session.rare.maybe_sent is not None and group is None and _was_sent(session, message)
    if (
        not dup
        and not is_retained
        and not connection.mount
        and (
            connection.version < 5
            or (message.expiry_s < 0 and additions is None and connection.aliases_out is None)
        )
    ):
        frame = message.frame(connection.version, qos, retain, packet_id)
    else:
        if message.is_expired(state.wall_us):
            state.stats.dropped_expired += 1
            return False
        waits = session.expiry_s > 0 and (qos == 2 or session.promised_sends > 0)
        frame = special_frame(
            state, connection, message, qos, retain, dup, packet_id, additions, not waits
        )
    if not 0 < len(frame) <= connection.packet_bytes_max:
        state.stats.dropped_too_large += 1
        return False
    entry = Inflight(message.partition, message.offset, qos, is_retained)
    if group is not None:
        entry.group = group
        entry.group_tag = group.tag
    elif is_retained:
        entry.topic = message.topic
    assert packet_id not in session.inflight, "a packet id is used twice"
    session.add_inflight(packet_id, entry)
    if session.expiry_s > 0:
        note_progress(state, session)
        if group is None or qos == 2:
            session.note_change(packet_id, entry)
        # Otherwise the group's position stays below the record until it is finished. After a crash
        # the group assigns the record again.
        if qos == 2:
            if state.was_put_back and frees_first(session, packet_id):
                # The client may have the id of a message that the log has lost, and wait for its
                # PUBREL. It would take this message for a repetition. [MQTT-4.3.3-10]
                frame = encode_ack(PUBREL, packet_id, SUCCESS, connection.version) + frame
            promise = SendPromise(connection, session, frame, message.topic, packet_id)
            log_changes(state, session, promise)
            return True
        if session.promised_sends:
            state.promise(SendPromise(connection, session, frame, message.topic, packet_id))
            return True
    state.stats.publish_sent += 1
    connection.send(frame, state.dirty)
    return True


def redeliver(state: NodeState, session: Session, message: Message) -> None:
    """Sends an inflight message that the cursor has reached, unless it is finished meanwhile; needs
    can_send()."""
    connection = session.connection
    assert connection is not None
    packet_id = pop_ahead(session, (message.partition, message.offset))
    if not packet_id:
        return
    # It is the last one sent, and so the last one that another connection resends.
    session.inflight[packet_id] = session.inflight.pop(packet_id)
    if not may_read(session, message.topic) or not resend(
        state, session, connection, packet_id, message
    ):
        withhold(state, session, connection, packet_id)


def resend(
    state: NodeState, session: Session, connection: Connection, packet_id: int, message: Message
) -> bool:
    """Sends an inflight message again, behind QoS 2 packets that wait for the log. False: it is
    larger than the client takes."""
    entry = session.inflight[packet_id]
    retain = entry.is_retained
    inflight = session.rare.owed_inflight
    if inflight and retain and not _is_retained(state, message):
        # No resumed set will come to it.
        inflight.discard((message.partition, message.offset))
    matching = subscriptions_of(state, session, message.topic.decode())
    subscription = subscription_at(matching, message.partition, message.offset)
    additions = None if subscription is None else subscription.additions
    if subscription is not None:
        retain = retain or (message.retain and subscription.retain_as_published)
    frame = message.frame_special(
        connection.version,
        entry.qos,
        retain,
        True,
        packet_id,
        state.wall_us,
        additions,
        connection.topic_of(message.topic),
        0,
    )
    if not 0 < len(frame) <= connection.packet_bytes_max:
        return False
    if session.promised_sends:
        state.promise(SendPromise(connection, session, frame, message.topic, packet_id))
        return True
    state.stats.publish_sent += 1
    connection.send(frame, state.dirty)
    return True


def _is_retained(state: NodeState, message: Message) -> bool:
    """Whether a message is still the retained one of its topic."""
    found = state.retained.get(message.topic.decode())
    if found is None:
        return False
    return found.partition == message.partition and found.offset == message.offset


def finish_inflight(state: NodeState, session: Session, packet_id: int, entry: Inflight) -> None:
    """Frees the packet id and records that the message is finished."""
    del session.inflight[packet_id]
    pop_ahead(session, (entry.partition, entry.offset), packet_id)
    if session.unsent is not None and packet_id in session.unsent:
        session.unsent.remove(packet_id)
    if entry.group is not None:
        state.cluster.groups.finished(entry.group, entry.partition, entry.offset)
    is_known = entry.is_retained
    if (session.replaying or entry.is_ahead) and not entry.is_retained and not entry.group_tag:
        session.note_done(entry.partition, entry.offset)
        is_known = True
    if session.expiry_s > 0:
        if entry.logged:
            session.note_change(packet_id, FREED if is_known and entry.qos == 1 else None)
        elif session.changes is not None:
            session.changes.used.pop(packet_id, None)
        note_progress(state, session)


def _was_sent(session: Session, message: Message) -> bool:
    """Whether the message may have been sent before a crash, under an id that was not in the log
    yet. DUP is set for such messages. [MQTT-3.3.1-1]"""
    below = session.rare.maybe_sent
    if below is None or message.partition < 0:
        return False
    if message.offset < below[message.partition]:
        return True
    if session.tailing and not session.outbox:
        session.rare.maybe_sent = None
    return False
