"""Inbound messages: PUBLISH, PUBREL, wills and the broker's own; and their acknowledgement.

QoS 1 and 2 messages are appended to the log, and everything else about them (the retained
update, delivery, PUBACK or PUBREC) happens when their record is committed.
"""

from holdfast.log import record as log_record
from holdfast.log.partition import partition_of
from holdfast.mqtt import reasons
from holdfast.mqtt.encode import encode, encode_ack
from holdfast.mqtt.errors import MalformedPacket, ProtocolViolation
from holdfast.mqtt.packets import PUBACK, PUBCOMP, PUBREC, Ack, Properties
from holdfast.mqtt.properties import REASON_STRING
from holdfast.mqtt.publish import Publish, decode_publish
from holdfast.node.delivery import deliver, send_group_qos0
from holdfast.node.producers import PROPERTY_HEAD
from holdfast.node.routing import find_route
from holdfast.node.sequencing import (
    ANSWER,
    STORE,
    Sequencer,
    admit,
    read_sequence,
    sequencer_of,
)
from holdfast.node.state import Held, NodeState, Route
from holdfast.security.acl import ClientAcl
from holdfast.session.connection import CLOSED, Connection
from holdfast.session.message import Message
from holdfast.session.session import Session, Will
from holdfast.topics.names import InvalidTopic


class HeldPublish(Held):
    """A message whose record is appended and not yet committed."""

    def __init__(
        self, message: Message, route: Route, connection: Connection | None, packet_id: int
    ) -> None:
        super().__init__(connection)
        self.message = message
        self.route = route
        self.packet_id = packet_id

    def release(self, state: NodeState) -> None:
        message = self.message
        route = self.route
        if route.version != state.route_version:
            route = find_route(state, message.topic)
        if message.retain:
            set_retained(state, route.topic, message)
        receivers = deliver(state, route, message)
        state.delivered[message.partition] = message.offset + 1
        connection = self.connection
        if connection is not None and connection.state != CLOSED:
            reason = reasons.SUCCESS
            if receivers == 0 and connection.version >= 5:
                reason = reasons.NO_MATCHING_SUBSCRIBERS
            packet_type = PUBACK if message.qos == 1 else PUBREC
            if message.qos == 1:
                # [MQTT-4.3.2-4]; a QoS 2 message counts until its PUBCOMP [MQTT-4.9.0-1]
                connection.unacknowledged -= 1
            connection.send(
                encode_ack(packet_type, self.packet_id, reason, connection.version), state.dirty
            )


class HeldAck(Held):
    """PUBACK or PUBREC for a message whose record went to the leader of its partition; delivered
    here, and retained, it is when its record comes back committed."""

    def __init__(
        self, connection: Connection, packet_type: int, packet_id: int, is_repeated: bool
    ) -> None:
        """`is_repeated`: a QoS 2 message that was sent before, maybe to another node."""
        super().__init__(connection)
        self.packet_type = packet_type
        self.packet_id = packet_id
        self.is_repeated = is_repeated
        # Of a message with a producer sequence.
        self.producer_id = b""
        self.producer_epoch = 0
        self.sequence = 0

    def release(self, state: NodeState) -> None:
        self._answer(state, reasons.SUCCESS, "")

    def refuse(self, state: NodeState, reason: int, text: str) -> None:
        connection = self.connection
        assert connection is not None
        session = connection.session
        if (
            self.packet_type == PUBREC
            and isinstance(session, Session)
            and session.inbound is not None
        ):
            session.inbound.pop(self.packet_id, None)
        state.stats.refused_unavailable += 1
        if self.producer_id and reason == reasons.QUOTA_EXCEEDED:
            _note_refused(state, connection, self.producer_id, self.producer_epoch, self.sequence)
        self._answer(state, reason, text)

    def _answer(self, state: NodeState, reason: int, text: str) -> None:
        connection = self.connection
        assert connection is not None
        if self.packet_type == PUBACK or reason >= 0x80:
            # [MQTT-4.3.2-4]; a QoS 2 message counts until its PUBCOMP [MQTT-4.9.0-1]
            connection.unacknowledged -= 1
        if connection.state == CLOSED:
            return
        is_kept = connection.version < 5 or self.is_repeated
        if is_kept and reason >= 0x80 and reason != reasons.NOT_AUTHORIZED:
            # MQTT 3 has no negative acknowledgement: the client keeps what was not answered. So it
            # must if an earlier copy may still be stored: refused, it would be sent anew.
            connection.closing = True
            if not connection.dirty:
                connection.dirty = True
                state.dirty.append(connection)
            return
        connection.send(
            encode_refusal(connection, self.packet_type, self.packet_id, reason, text), state.dirty
        )


class HeldRetained(Held):
    """The retained update of a QoS 0 message."""

    def __init__(self, message: Message, topic: str) -> None:
        super().__init__()
        self.message = message
        self.topic = topic

    def release(self, state: NodeState) -> None:
        set_retained(state, self.topic, self.message)


class HeldReply(Held):
    """Bytes for a client, kept behind the promises made to it before."""

    def __init__(self, connection: Connection, data: bytes, acknowledges: bool) -> None:
        super().__init__(connection)
        self.data = data
        self.acknowledges = acknowledges

    def release(self, state: NodeState) -> None:
        connection = self.connection
        assert connection is not None
        if self.acknowledges:
            connection.unacknowledged -= 1
        if connection.state != CLOSED:
            connection.send(self.data, state.dirty)


class HeldRefusal(HeldReply):
    """Of a message that could not be stored and may be sent again."""

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
    """PUBACK or PUBREC with a reason and, if the client wants to know, the text."""
    reply = b""
    if text and connection.problem_information:
        # [MQTT-3.1.2-29] only if it wants to know; [MQTT-3.4.2-2] only if that is not too large
        properties: Properties = {REASON_STRING: text}
        reply = encode(Ack(packet_type, packet_id, reason, properties), connection.version)
    if not reply or len(reply) > connection.packet_bytes_max:
        reply = encode_ack(packet_type, packet_id, reason, connection.version)
    return reply


def set_retained(state: NodeState, topic: str, message: Message) -> None:
    """[MQTT-3.3.1-5] the last one replaces; [MQTT-3.3.1-6] [MQTT-3.3.1-7] an empty one removes."""
    if not message.payload:
        state.retained.remove(topic)
        return
    if len(state.retained) >= state.config.retained_max and state.retained.get(topic) is None:
        state.stats.refused_quota += 1
        state.note(
            "warning", "retained_limit", {"topic": topic, "limit": state.config.retained_max}
        )
        return
    state.retained.set(topic, message)


def handle_publish(state: NodeState, connection: Connection, session: Session) -> None:
    reader = connection.reader
    version = connection.version
    publish = decode_publish(reader.buffer, reader.first, reader.start, reader.end, version, True)
    state.stats.publish_received += 1
    if publish.topic_alias or not publish.topic:
        _resolve_alias(state, connection, publish)
    try:
        route = find_route(state, publish.topic)
    except InvalidTopic as error:
        # [MQTT-3.3.2-2] no wildcards, [MQTT-4.7.3-1] not empty
        raise ProtocolViolation(reasons.TOPIC_NAME_INVALID, str(error)) from None
    qos = publish.qos
    if qos > state.config.qos_max:
        # [MQTT-3.2.2-11]
        raise ProtocolViolation(
            reasons.QOS_NOT_SUPPORTED, f"QoS {qos}, the maximum here is {state.config.qos_max}"
        )
    if publish.retain and not state.config.retain_available:
        # [MQTT-3.2.2-14]
        raise ProtocolViolation(reasons.RETAIN_NOT_SUPPORTED, "retained messages are switched off")
    if route.reserved or (connection.acl is not None and not _may_write(connection, route)):
        _refuse(state, connection, session, publish, reasons.NOT_AUTHORIZED)
        return
    if qos == 0:
        state.stats.publish_qos0_received += 1
        _publish_qos0(state, connection, session, publish, route)
        return

    # [MQTT-3.3.4-7] [MQTT-3.3.4-8]
    connection.unacknowledged += 1
    if connection.unacknowledged > state.config.receive_maximum and version >= 5:
        raise ProtocolViolation(
            reasons.RECEIVE_MAXIMUM_EXCEEDED,
            f"more than {state.config.receive_maximum} publishes without acknowledgement",
        )
    cluster = state.cluster
    flags = qos
    record_sequence = 0
    producer_id = b""
    producer_epoch = 0
    durable = session.expiry_s > 0
    if qos == 2:
        state.stats.publish_qos2_received += 1
        inbound = session.inbound
        if inbound is None:
            inbound = {}
            session.inbound = inbound
        if publish.packet_id in inbound:
            # [MQTT-4.3.3-10] seen and not yet released: acknowledge again, do not publish again
            state.stats.duplicates_received += 1
            connection.unacknowledged -= 1
            reply = encode_ack(PUBREC, publish.packet_id, reasons.SUCCESS, version)
            state.hold_reply(HeldReply(connection, reply, False))
            return
        if durable:
            flags |= log_record.FLAG_PACKET_ID
            record_sequence = publish.packet_id
            if cluster is not None:
                # The leader of the partition looks for repetitions as well, by session.
                producer_epoch = session.epoch
    else:
        state.stats.publish_qos1_received += 1
        if publish.properties:
            at = publish.properties.find(PROPERTY_HEAD)
            if at >= 0:
                sequencer = sequencer_of(connection)
                if cluster is None:
                    outcome = admit(state, connection, sequencer, route.partition, publish, at)
                else:
                    outcome = read_sequence(
                        state, connection, sequencer, route.partition, publish, at
                    )
                if outcome == ANSWER:
                    _answer_sequenced(state, connection, publish.packet_id, sequencer)
                    return
                if outcome == STORE:
                    flags |= log_record.FLAG_PRODUCER
                    producer_id = sequencer.producer_id
                    producer_epoch = sequencer.epoch
                    record_sequence = sequencer.sequence
    if cluster is not None:
        reason = cluster.refusal(route.partition)
        if connection.refusals_due:
            # Behind a message that it may send again, or the order would be another.
            reason = reasons.QUOTA_EXCEEDED
        if reason:
            state.stats.refused_unavailable += 1
            if producer_id:
                _note_refused(state, connection, producer_id, producer_epoch, record_sequence)
            _refuse(state, connection, session, publish, reason)
            return
    elif state.disk_full:
        state.stats.refused_disk_full += 1
        _refuse(state, connection, session, publish, reasons.QUOTA_EXCEEDED)
        return
    if qos == 2 and session.inbound is not None:
        session.inbound[publish.packet_id] = route.partition
    if publish.retain:
        flags |= log_record.FLAG_RETAIN
    message = Message(
        publish.topic,
        publish.payload,
        qos,
        publish.retain,
        publish.properties,
        publish.expiry_s,
        state.wall_us,
        session.key,
    )
    message.partition = route.partition
    message.offset = state.append(
        route.partition,
        log_record.MESSAGE,
        flags,
        state.wall_us,
        publish.topic,
        session.key,
        producer_id,
        producer_epoch,
        record_sequence,
        publish.properties,
        publish.payload,
        publish.retain or record_sequence != 0,
    )
    if cluster is None:
        state.hold(HeldPublish(message, route, connection, publish.packet_id))
    else:
        packet_type = PUBACK if qos == 1 else PUBREC
        held = HeldAck(connection, packet_type, publish.packet_id, qos == 2 and publish.dup)
        if producer_id:
            held.producer_id = producer_id
            held.producer_epoch = producer_epoch
            held.sequence = record_sequence
        state.hold(held)
    if state.is_congested():
        state.stall(connection)


def _publish_qos0(
    state: NodeState, connection: Connection, session: Session, publish: Publish, route: Route
) -> None:
    message = Message(
        publish.topic,
        publish.payload,
        0,
        publish.retain,
        publish.properties,
        publish.expiry_s,
        state.wall_us,
        session.key,
    )
    reader = connection.reader
    if reader.first == 0x30 and not publish.properties and not publish.topic_alias:
        message.adopt_frame(connection.version, reader.buffer[reader.begin : reader.end])
    deliver(state, route, message)
    if state.cluster is not None:
        state.cluster.spread(message, route.topic)
    if (route.logged or publish.retain) and not state.disk_full:
        _log_qos0(state, message, route)


def _log_qos0(state: NodeState, message: Message, route: Route) -> None:
    """Write a QoS 0 message into the log: as a message where the configuration asks, else only
    for its retained effect."""
    message.partition = route.partition
    message.offset = state.append(
        route.partition,
        log_record.MESSAGE if route.logged else log_record.RETAINED,
        log_record.FLAG_RETAIN if message.retain else 0,
        message.timestamp_us,
        message.topic,
        message.publisher,
        b"",
        0,
        0,
        message.properties,
        message.payload,
        message.retain,
    )
    if message.retain and state.cluster is None:
        state.hold(HeldRetained(message, route.topic))


def _resolve_alias(state: NodeState, connection: Connection, publish: Publish) -> None:
    alias = publish.topic_alias
    if not alias:
        if connection.version >= 5:
            # [MQTT-3.3.2-8] a topic or an alias
            raise ProtocolViolation(reasons.PROTOCOL_ERROR, "empty topic name without topic alias")
        raise MalformedPacket("empty topic name")
    # [MQTT-3.3.2-8] [MQTT-3.3.2-9] [MQTT-3.2.2-17]
    if alias > state.config.topic_alias_max:
        raise ProtocolViolation(
            reasons.TOPIC_ALIAS_INVALID,
            f"topic alias {alias}, the maximum here is {state.config.topic_alias_max}",
        )
    aliases = connection.aliases_in
    if aliases is None:
        aliases = {}
        connection.aliases_in = aliases
    if publish.topic:
        aliases[alias] = publish.topic
        return
    topic = aliases.get(alias)
    if topic is None:
        raise ProtocolViolation(
            reasons.PROTOCOL_ERROR, f"topic alias {alias} was not set on this connection"
        )
    publish.topic = topic


def _may_write(connection: Connection, route: Route) -> bool:
    known = connection.may_write
    if known is None or len(known) > 10_000:
        known = {}
        connection.may_write = known
    allowed = known.get(route.raw)
    if allowed is None:
        acl = connection.acl
        assert isinstance(acl, ClientAcl)
        allowed = acl.can_write(route.topic)
        known[route.raw] = allowed
    return allowed


def _refuse(
    state: NodeState, connection: Connection, session: Session, publish: Publish, reason: int
) -> None:
    """A message that is not taken. MQTT 5 says why; MQTT 3 has no negative acknowledgement: an
    unauthorised message is acknowledged and dropped [MQTT3-3.3.5-2], one that could not be
    stored closes the connection so that the client keeps it."""
    if reason == reasons.NOT_AUTHORIZED:
        state.stats.authorizations_denied += 1
    if publish.qos == 0:
        return
    is_repeated = state.cluster is not None and publish.qos == 2 and publish.dup
    if is_repeated and reason == reasons.QUOTA_EXCEEDED:
        # See HeldAck.
        raise ProtocolViolation(reason, "the message could not be stored")
    if connection.version < 5:
        if reason != reasons.NOT_AUTHORIZED:
            raise ProtocolViolation(reason, "the message could not be stored: disk full")
        reason = reasons.SUCCESS
    counted = reason == reasons.QUOTA_EXCEEDED
    packet_type = PUBACK if publish.qos == 1 else PUBREC
    reply = encode_ack(packet_type, publish.packet_id, reason, connection.version)
    # Behind earlier acknowledgements of this client. [MQTT-4.6.0-2] [MQTT-4.6.0-3]
    if counted:
        state.hold_reply(HeldRefusal(connection, reply))
    else:
        state.hold_reply(HeldReply(connection, reply, False))


def _note_refused(
    state: NodeState, connection: Connection, producer_id: bytes, epoch: int, sequence: int
) -> None:
    """Nothing later of the producer is taken on this connection before this."""
    if not sequencer_of(connection).note_refused(producer_id, epoch, sequence):
        # A new connection starts without holes, and its client where it was.
        connection.closing = True
        if not connection.dirty:
            connection.dirty = True
            state.dirty.append(connection)


def _answer_sequenced(
    state: NodeState, connection: Connection, packet_id: int, sequencer: Sequencer
) -> None:
    """PUBACK for a message that is not stored: refused, or stored before. The latter is a promise:
    the record may still be on its way to the disk, so it waits for all there are."""
    reply = encode_refusal(connection, PUBACK, packet_id, sequencer.reason, sequencer.text)
    state.hold_reply(HeldReply(connection, reply, True))


def handle_pubrel(
    state: NodeState, connection: Connection, session: Session, packet_id: int
) -> None:
    """The publisher has let go of a QoS 2 message: its id may be used again, and the log must
    know before PUBCOMP says so. [MQTT-4.3.3-11] [MQTT-4.3.3-12]"""
    inbound = session.inbound
    partition = -1
    if inbound is not None:
        partition = inbound.pop(packet_id, -1)
    reason = reasons.SUCCESS
    is_appended = False
    if partition < 0:
        if connection.version >= 5:
            reason = reasons.PACKET_IDENTIFIER_NOT_FOUND
    elif session.expiry_s > 0:
        state.append(
            partition,
            log_record.RELEASE,
            0,
            state.wall_us,
            b"",
            session.key,
            b"",
            session.epoch,
            packet_id,
            b"",
            b"",
            True,
        )
        is_appended = True
    held = HeldReply(
        connection, encode_ack(PUBCOMP, packet_id, reason, connection.version), partition >= 0
    )
    if is_appended:
        state.hold(held)
    else:
        state.hold_reply(held)


def publish_own(state: NodeState, topic: bytes, payload: bytes, retain: bool) -> None:
    """A QoS 0 message of the broker itself ($SYS). Its retained copy is not in the log."""
    message = Message(topic, payload, 0, retain, b"", -1, state.wall_us, b"")
    route = find_route(state, topic)
    if retain:
        state.retained.set(route.topic, message)
    deliver(state, route, message)
    if state.cluster is not None:
        # Each node tells its own clients about itself.
        for group in route.groups:
            send_group_qos0(state, group, message)


def publish_will(state: NodeState, session: Session, will: Will) -> None:
    """Publish a session's will and record that it is done, in one record. [MQTT-3.1.2-8]"""
    state.stats.wills_published += 1
    try:
        route = find_route(state, will.topic)
    except InvalidTopic:
        return
    qos = min(will.qos, state.config.qos_max)
    message = Message(
        will.topic,
        will.payload,
        qos,
        will.retain and state.config.retain_available,
        will.properties,
        will.expiry_s,
        state.wall_us,
        session.key,
    )
    if qos == 0:
        deliver(state, route, message)
        if state.cluster is not None:
            state.cluster.spread(message, route.topic)
        if route.logged or message.retain:
            _log_qos0(state, message, route)
        if session.recorded:
            state.append(
                partition_of(session.key, state.config.partitions),
                log_record.WILL,
                0,
                state.wall_us,
                b"",
                session.key,
                b"",
                0,
                session.epoch,
                b"",
                b"",
                True,
            )
        return
    message.partition = route.partition
    message.offset = state.append(
        route.partition,
        log_record.MESSAGE,
        qos | log_record.FLAG_WILL | (log_record.FLAG_RETAIN if message.retain else 0),
        state.wall_us,
        will.topic,
        session.key,
        b"",
        0,
        session.epoch,
        will.properties,
        will.payload,
        True,
    )
    if state.cluster is None:
        state.hold(HeldPublish(message, route, None, 0))
