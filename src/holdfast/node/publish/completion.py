"""Completes an inbound message when its record is committed: the retained update, delivery, and the
acknowledgement or its replacement. Until then its promise waits in `local_commit`, with other nodes
in `promises`.
"""

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.delivery.delivery import deliver
from holdfast.node.features import RETAINED_USERS
from holdfast.node.node_state import NodeState, Promise, ReplyPromise, Route
from holdfast.node.publish.producer_dedup import note_refused
from holdfast.node.refusal import Rejection
from holdfast.node.routing.routing import find_route
from holdfast.node.session.audience import encode_user
from holdfast.node.session.connection import CLOSED, Connection
from holdfast.node.session.message import Message, queued_size
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack, encode_within
from holdfast.protocol.mqtt.packets import PUBACK, PUBREC, Ack, Properties
from holdfast.protocol.mqtt.properties import REASON_STRING


def acknowledgement(qos: int) -> int:
    """The packet type that acknowledges a message of this QoS."""
    return PUBACK if qos == 1 else PUBREC


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
        """Lets the topic's messages of QoS 0 follow this one from now on."""
        self.precedes = route
        route.newest = self

    def add_follower(self, state: NodeState, message: Message) -> None:
        """Keeps a message of QoS 0. It counts like a promise and an append, so its publisher is not
        read while too much is pending."""
        if self.followers is None:
            self.followers = []
        self.followers.append(message)
        state.promise_bytes += queued_size(message)
        state.appended += 1

    def end_precedence(self, state: NodeState) -> None:
        """Delivers the followers: this message is delivered, or refused."""
        route = self.precedes
        if route is None:
            return
        self.precedes = None
        if route.newest is self:
            route.newest = None
        route.behind = state.delivered[route.partition]
        for message in self.followers or ():
            state.promise_bytes -= queued_size(message)
            hand_out_qos0(state, route, message)
        self.followers = None


class PublishPromise(PrecedingPromise):
    """The promise of PUBACK or PUBREC for a message that is appended and not committed yet.

    The message is delivered, and retained, when its record is applied, before the release.
    """

    def __init__(
        self,
        record: Record,
        connection: Connection,
        packet_id: int,
        is_repeated: bool,
    ) -> None:
        """`is_repeated`: a QoS 2 message that was sent before, perhaps to another node."""
        super().__init__(connection)
        self.record = record
        self.packet_id = packet_id
        self.is_repeated = is_repeated

    def release(self, state: NodeState) -> None:
        connection = self.connection
        assert connection is not None
        packet_type = acknowledgement(self.record.flags & log_record.FLAG_QOS_MASK)
        if packet_type == PUBACK:
            # [MQTT-4.3.2-4]; a QoS 2 message counts until its PUBCOMP [MQTT-4.9.0-1]
            connection.note_acknowledged()
        if connection.state != CLOSED:
            reply = encode_ack(packet_type, self.packet_id, self.reason, connection.version)
            connection.send(reply, state.dirty)

    def refuse(self, state: NodeState, refusal: Rejection) -> None:
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
        reason = refusal.reason
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
        reply = encode_refusal(connection, packet_type, self.packet_id, refusal)
        connection.send(reply, state.dirty)


class TracedPromise(PublishPromise):
    """The promise of an acknowledgement whose message has a span."""

    def __init__(
        self,
        record: Record,
        connection: Connection,
        packet_id: int,
        is_repeated: bool,
        span: object,
    ) -> None:
        super().__init__(record, connection, packet_id, is_repeated)
        self.span = span

    def release(self, state: NodeState) -> None:
        super().release(state)
        self._end(state, "")

    def refuse(self, state: NodeState, refusal: Rejection) -> None:
        super().refuse(state, refusal)
        self._end(state, refusal.text)

    def _end(self, state: NodeState, error: str) -> None:
        tracer = state.tracer
        if tracer is not None:
            # A record that is forwarded has no offset at this node, or one of an earlier leader.
            offset = self.record.offset if state.journal.is_alone else -1
            tracer.end(self.span, self.record.partition, offset, error)


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
        hand_out_qos0(state, route, self.message)

    def refuse(self, state: NodeState, refusal: Rejection) -> None:
        hand_out_qos0(state, self.route, self.message)


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
    connection: Connection, packet_type: int, packet_id: int, refusal: Rejection | None
) -> bytes:
    """PUBACK or PUBREC with a reason and, if the client asked for it, the text. None: success."""
    reason = reasons.SUCCESS if refusal is None else refusal.reason
    text = "" if refusal is None else refusal.text
    if text and connection.problem_information:
        # [MQTT-3.1.2-29] only if it asked for it; [MQTT-3.4.2-2] only if that is not too large
        properties: Properties = {REASON_STRING: text}
        packet = Ack(packet_type, packet_id, reason, properties)
        return encode_within(packet, connection.version, connection.packet_bytes_max)
    return encode_ack(packet_type, packet_id, reason, connection.version)


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


def hand_out_qos0(state: NodeState, route: Route, message: Message) -> None:
    """Delivers a message of QoS 0 here."""
    if route.version != state.route_version:
        route = find_route(state, message.topic)
    if route.logged:
        # To those that read the log it comes from there.
        message.partition = route.partition
    deliver(state, route, message)
    message.partition = -1


def follow_qos0(state: NodeState, route: Route, message: Message, newest: Promise) -> None:
    """Lets a message of QoS 0 follow the topic's newest one, whose record is not committed. Its own
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


def retaining_user(state: NodeState, retain: bool, username: str | None) -> bytes:
    """The user that the record of a message names, because it needs a share of the retained store.
    b"": the message is not retained, or the share is that of its client."""
    if not retain or not username or state.cluster.older_nodes(RETAINED_USERS):
        return b""
    return username.encode()


def name_user(record: Record, user: bytes) -> None:
    """Names the user, if there is one, in the record of a message for all subscribers. An empty one
    needs no share."""
    if user and record.payload:
        record.flags |= log_record.FLAG_AUDIENCE
        record.audience = encode_user(user)


def record_of_qos0(message: Message, route: Route) -> Record:
    """The record of a message of QoS 0: a message if the configuration says so, otherwise only a
    retained update."""
    flags = log_record.FLAG_RETAIN if message.retain else 0
    audience = message.audience_field()
    if audience:
        flags |= log_record.FLAG_AUDIENCE
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
