"""Completes an inbound message when its record is committed: the retained update, delivery, and the
acknowledgement or its replacement.
"""

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.delivery.delivery import deliver, deliver_committed_qos0
from holdfast.node.delivery.log_replay import message_of
from holdfast.node.node_state import NodeState, Route
from holdfast.node.promise import Promise
from holdfast.node.publish.producer_dedup import note_refused
from holdfast.node.routing.routing import find_route
from holdfast.node.session.audience import encode_audience
from holdfast.node.session.connection import CLOSED, Connection
from holdfast.node.session.message import Message, queued_size, retained_size
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack, encode_within
from holdfast.protocol.mqtt.packets import PUBACK, PUBREC, Ack, Properties
from holdfast.protocol.mqtt.properties import REASON_STRING


def acknowledgement(qos: int) -> int:
    """The packet type that acknowledges a message of this QoS."""
    return PUBACK if qos == 1 else PUBREC


def _pass(state: NodeState, partition: int, offset: int) -> None:
    """Note a delivered record. One that is delivered twice is no error of a single session: it
    stops the process, because only recovery knows what each session has."""
    if offset < state.delivered[partition]:
        raise ValueError(f"offset {offset} of partition {partition} is delivered twice")
    state.delivered[partition] = offset + 1


class PrecedingPromise(Promise):
    """A promise whose message waits for its record, and that messages of QoS 0 follow.

    Invariant: to the clients of this node, the messages of a topic are delivered in the order of
    their arrival, those of QoS 0 included, and it is that of the records in the log. [MQTT-4.6.0-6]
    Counter-example of a message of QoS 0 that is sent at once: a valve is closed at QoS 1 and
    opened at QoS 0, in one segment, and every subscriber believes that it is closed.

    A message of QoS 0 without a record is kept here, and delivered directly behind this one. One
    with a record has a promise of its own. Counter-example of a record that is appended when the
    message is delivered: a message of QoS 1 arrives in between, its record comes first, and the
    topic is left with the older retained message.

    A route that is dropped from the cache forgets its newest promise.
    """

    def __init__(self, connection: Connection | None = None) -> None:
        super().__init__(connection)
        # The route whose newest promise this is, or was.
        self.precedes: Route | None = None
        self.followers: list[Message] | None = None

    def precede(self, route: Route) -> None:
        """Let the topic's messages of QoS 0 follow this one from now on."""
        self.precedes = route
        route.newest = self

    def add_follower(self, state: NodeState, message: Message) -> None:
        """Keep a message of QoS 0. It counts like a promise and an append, so its publisher is not
        read while too much is pending."""
        if self.followers is None:
            self.followers = []
        self.followers.append(message)
        state.promise_bytes += queued_size(message)
        state.appended += 1

    def end_precedence(self, state: NodeState) -> None:
        """Deliver the followers: this message is delivered, or refused."""
        route = self.precedes
        if route is None:
            return
        self.precedes = None
        if route.newest is self:
            route.newest = None
        if not state.cluster.is_single:
            route.behind = state.delivered[route.partition]
        for message in self.followers or ():
            state.promise_bytes -= queued_size(message)
            hand_out_qos0(state, route, message)
        self.followers = None


class PublishPromise(PrecedingPromise):
    """The promise of PUBACK or PUBREC for a message that is appended and not committed yet.

    A single node passes `route`. On release it then updates the retained message and delivers
    before it acknowledges, so a publisher with its acknowledgement knows that the record is
    committed. In a cluster that happens when the record is applied.
    """

    def __init__(
        self,
        record: Record,
        route: Route | None,
        connection: Connection | None,
        packet_id: int,
        is_repeated: bool,
    ) -> None:
        """`is_repeated`: a QoS 2 message that was sent before, perhaps to another node."""
        super().__init__(connection)
        self.record = record
        self.route = route
        self.packet_id = packet_id
        self.is_repeated = is_repeated

    def release(self, state: NodeState) -> None:
        connection = self.connection
        if self.route is not None:
            if self._complete(state, self.route) == 0:
                self.reason = reasons.NO_MATCHING_SUBSCRIBERS
            self.end_precedence(state)
            if connection is None:
                return
        assert connection is not None
        packet_type = acknowledgement(self.record.flags & log_record.FLAG_QOS_MASK)
        if packet_type == PUBACK:
            # [MQTT-4.3.2-4]; a QoS 2 message counts until its PUBCOMP [MQTT-4.9.0-1]
            connection.note_acknowledged()
        if connection.state != CLOSED:
            reply = encode_ack(packet_type, self.packet_id, self.reason, connection.version)
            connection.send(reply, state.dirty)

    def _complete(self, state: NodeState, route: Route) -> int:
        """Retain and deliver the message. Returns the number of receivers."""
        record = self.record
        # The receivers are those at the commit. Subscriptions may have changed since the append.
        if route.version != state.route_version:
            route = find_route(state, record.topic)
        is_retained = record.flags & log_record.FLAG_RETAIN != 0
        receivers = 0
        if is_retained or route.targets or route.groups or route.denied:
            message = message_of(record)
            if is_retained and record.offset >= state.retained_ahead.get(route.topic, 0):
                set_retained(state, route.topic, message)
            receivers = deliver(state, route, message)
        _pass(state, record.partition, record.offset)
        return receivers

    def refuse(self, state: NodeState, reason: int, text: str) -> None:
        connection = self.connection
        assert connection is not None
        session = connection.session
        packet_type = acknowledgement(self.record.flags & log_record.FLAG_QOS_MASK)
        if packet_type == PUBREC and session is not None and session.inbound is not None:
            session.inbound.pop(self.packet_id, None)
        if state.disk_full:
            state.stats.refused_disk_full += 1
        else:
            state.stats.refused_unavailable += 1
        if reason == reasons.QUOTA_EXCEEDED:
            note_refused(state, connection, self.record)
        connection.note_acknowledged()
        if connection.state == CLOSED or connection.closing:
            return
        is_kept = connection.version < 5 or self.is_repeated
        if reason not in reasons.ALLOWED[packet_type]:
            # Another node has the session. This client has moved there and gets no reply here.
            is_kept = True
        if is_kept and reason != reasons.NOT_AUTHORIZED:
            # MQTT 3 has no negative acknowledgement: the client keeps a message without reply. It
            # must keep it if an earlier copy may still be stored: refused, it would be sent as a
            # new one.
            connection.close(state.dirty)
            return
        connection.send(
            encode_refusal(connection, packet_type, self.packet_id, reason, text), state.dirty
        )


class TracedPromise(PublishPromise):
    """The promise of an acknowledgement whose message has a span."""

    def __init__(
        self,
        record: Record,
        route: Route | None,
        connection: Connection | None,
        packet_id: int,
        is_repeated: bool,
        span: object,
    ) -> None:
        super().__init__(record, route, connection, packet_id, is_repeated)
        self.span = span

    def release(self, state: NodeState) -> None:
        super().release(state)
        self._end(state, "")

    def refuse(self, state: NodeState, reason: int, text: str) -> None:
        super().refuse(state, reason, text)
        self._end(state, text)

    def _end(self, state: NodeState, error: str) -> None:
        tracer = state.tracer
        if tracer is not None:
            # A record that is forwarded has no offset at this node, or one of an earlier leader.
            is_own = self.route is not None or state.journal.is_alone
            offset = self.record.offset if is_own else -1
            tracer.end(self.span, self.record.partition, offset, error)


class LoggedPromise(Promise):
    """The promise of a logged QoS 0 message to the subscriptions that read the log, on a single
    node. All others have it when it is appended."""

    def __init__(self, message: Message, route: Route) -> None:
        super().__init__()
        self.message = message
        self.route = route

    def release(self, state: NodeState) -> None:
        message = self.message
        route = self.route
        if route.version != state.route_version:
            route = find_route(state, message.topic)
        deliver_committed_qos0(state, route, message)
        _pass(state, message.partition, message.offset)


class Qos0Promise(PrecedingPromise):
    """The promise of a message of QoS 0 with a record that follows another one of its topic."""

    def __init__(self, message: Message, record: Record, route: Route) -> None:
        super().__init__()
        self.message = message
        self.record = record
        self.route = route

    def release(self, state: NodeState) -> None:
        record = self.record
        route = find_route(state, record.topic)
        if not state.cluster.is_single:
            hand_out_qos0(state, route, self.message)
            return
        stored = message_of(record)
        if stored.retain and record.offset >= state.retained_ahead.get(route.topic, 0):
            set_retained(state, route.topic, stored)
        hand_out_qos0(state, route, self.message)
        if record.kind == log_record.MESSAGE:
            deliver_committed_qos0(state, route, stored)
        _pass(state, record.partition, record.offset)
        self.end_precedence(state)

    def refuse(self, state: NodeState, reason: int, text: str) -> None:
        hand_out_qos0(state, self.route, self.message)


class ReplyPromise(Promise):
    """The promise of bytes for a client, kept behind the earlier promises to it."""

    def __init__(self, connection: Connection, data: bytes, acknowledges: bool) -> None:
        super().__init__(connection)
        self.data = data
        self.acknowledges = acknowledges

    def release(self, state: NodeState) -> None:
        connection = self.connection
        assert connection is not None
        if self.acknowledges:
            connection.note_acknowledged()
        # Nothing follows a DISCONNECT.
        if connection.state != CLOSED and not connection.closing:
            connection.send(self.data, state.dirty)


class RefusalPromise(ReplyPromise):
    """The refusal of a message that could not be stored and may be sent again.

    While it waits in a cluster, the client's later messages are refused too. Otherwise message 2
    could be stored before the repetition of message 1.
    """

    def __init__(self, connection: Connection, data: bytes) -> None:
        super().__init__(connection, data, True)
        connection.refusals_due += 1

    def release(self, state: NodeState) -> None:
        connection = self.connection
        assert connection is not None
        connection.refusals_due -= 1
        super().release(state)


def encode_refusal(
    connection: Connection, packet_type: int, packet_id: int, reason: int, text: str
) -> bytes:
    """PUBACK or PUBREC with a reason and, if the client asked for it, the text."""
    if text and connection.problem_information:
        # [MQTT-3.1.2-29] only if it asked for it; [MQTT-3.4.2-2] only if that is not too large
        properties: Properties = {REASON_STRING: text}
        packet = Ack(packet_type, packet_id, reason, properties)
        return encode_within(packet, connection.version, connection.packet_bytes_max)
    return encode_ack(packet_type, packet_id, reason, connection.version)


def set_retained(state: NodeState, topic: str, message: Message) -> None:
    """Replace or remove the retained message of a topic.

    On a single node. Without room the topic has no retained message then, because the old one is
    out of date. A record says so, so that each recovery has the same retained messages, whatever
    the limits are by then.
    """
    before = state.retained_bytes(topic)
    more = retained_size(message) - before
    if message.payload and not state.has_retained_room(more, 0 if before else 1):
        state.note_retained_limit(topic)
        state.retained.remove(topic)
        if message.offset >= 0:
            state.append(removal(message.partition, message.offset, message.topic, state.wall_us))
        return
    state.set_retained(topic, message)


def removal(partition: int, offset: int, topic: bytes, timestamp_us: int) -> Record:
    """The record that removes the retained message of the record at `offset`, if the topic still
    has that one."""
    return Record(
        partition,
        log_record.RETAINED,
        flags=log_record.FLAG_RETAIN,
        timestamp_us=timestamp_us,
        topic=topic,
        sequence=offset + 1,
    )


def retain_at_once(state: NodeState, route: Route, message: Message, record: Record | None) -> None:
    """Apply the retained update of a QoS 0 message in one step with its delivery. `record` is
    appended with it; None on a full disk.

    Invariant: in one run of the broker the retained message is never older than the delivered one.
    Smallest counter-example of an update that waits for the log: a subscriber gets the message,
    unsubscribes, subscribes again within the fsync, and gets the message before it, or none. A
    record that was appended earlier and is committed later must not undo the update.

    The delivery does not wait for the log, as QoS 0 never does. So a crash within that write group
    loses the message like any other of QoS 0, and the topic has its earlier retained message again.
    Without a record the update lasts until the next start.
    """
    offset = state.journal.next_offset[route.partition]
    if record is not None:
        message.offset = offset
    state.retained_ahead[route.topic] = offset
    promise = RetainedAheadPromise(route.topic, offset)
    if record is None:
        state.promise(promise)
    else:
        state.publish(record, promise)
    set_retained(state, route.topic, message)


def hand_out_qos0(state: NodeState, route: Route, message: Message) -> None:
    """Deliver a message of QoS 0 here."""
    if route.version != state.route_version:
        route = find_route(state, message.topic)
    if route.logged:
        # To those that read the log it comes from there.
        message.partition = route.partition
    deliver(state, route, message)
    message.partition = -1


def follow_qos0(state: NodeState, route: Route, message: Message, newest: Promise) -> None:
    """Let a message of QoS 0 follow the topic's newest one, whose record is not committed. Its own
    record, if it has one, is appended now.

    Other nodes receive it at once. If it were sent to them when this node has applied the newest
    record, a later message of QoS 1 could be applied there before it arrives, and they would end
    with the older one.
    """
    state.cluster.spread(message, route.topic, route.behind)
    if route.logged or message.retain:
        record = record_of_qos0(message, route)
        promise = Qos0Promise(message, record, route)
        promise.precede(route)
        state.publish(record, promise)
    else:
        assert isinstance(newest, PrecedingPromise)
        newest.add_follower(state, message)


def record_of_qos0(message: Message, route: Route) -> Record:
    """The record of a message of QoS 0: a message if the configuration says so, otherwise only a
    retained update."""
    flags = log_record.FLAG_RETAIN if message.retain else 0
    audience = b""
    if message.audience is not None:
        flags |= log_record.FLAG_AUDIENCE
        audience = encode_audience(message.audience)
    return Record(
        route.partition,
        log_record.MESSAGE if route.logged else log_record.RETAINED,
        flags=flags,
        timestamp_us=message.timestamp_us,
        topic=message.topic,
        client_id=message.publisher,
        properties=message.properties,
        payload=message.payload,
        audience=audience,
    )


class RetainedAheadPromise(Promise):
    """The end of a retained update's lead over the log: its record is committed."""

    def __init__(self, topic: str, offset: int) -> None:
        super().__init__()
        self.topic = topic
        self.offset = offset

    def release(self, state: NodeState) -> None:
        if state.retained_ahead.get(self.topic) == self.offset:
            del state.retained_ahead[self.topic]
