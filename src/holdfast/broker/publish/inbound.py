"""Inbound messages: PUBLISH, PUBREL and the broker's own.

QoS 1 and 2 messages are appended to the log; the rest (see `completion`) happens when their record
is committed.
"""

from holdfast.broker.admission.observer import ClientObserver
from holdfast.broker.admission.throttle import charge_publish, refusal_of
from holdfast.broker.connections.client_notes import note_publish_denied
from holdfast.broker.delivery.delivery import deliver
from holdfast.broker.publish.completion import (
    PublishPromise,
    RefusalPromise,
    ReplyPromise,
    TracedPromise,
    acknowledgement,
    encode_refusal,
    retain_at_once,
)
from holdfast.broker.publish.control import take_command
from holdfast.broker.publish.producer_dedup import (
    REPLY,
    STORE,
    Sequencer,
    admit,
    read_sequence,
    sequencer_of,
)
from holdfast.broker.publish.producers import PROPERTY_HEAD
from holdfast.broker.rights import may_write
from holdfast.broker.routing import look_up, resolved
from holdfast.broker.session.connection import ALIASES_IN_BYTES_MAX, AliasesIn, Connection
from holdfast.broker.session.message import Message
from holdfast.broker.session.session import Session
from holdfast.broker.state import NodeState, Route
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.errors import MalformedPacket, MessageRefused, ProtocolViolation
from holdfast.protocol.mqtt.packets import PUBCOMP, PUBREC
from holdfast.protocol.mqtt.publish import Publish, decode_publish
from holdfast.protocol.topics.names import InvalidTopic
from holdfast.storage import record as log_record
from holdfast.storage.record import Record


def handle_publish(state: NodeState, connection: Connection, session: Session) -> None:
    """Check a PUBLISH, then append its record, deliver it at once (QoS 0), or refuse it."""
    reader = connection.reader
    version = connection.version
    publish = decode_publish(reader.buffer, reader.first, reader.start, reader.end, version, True)
    state.stats.publish_received += 1
    route = _checked_route(state, connection, publish)
    if connection.meter is not None and not charge_publish(
        state, connection, reader.end - reader.begin, publish.qos
    ):
        return
    if state.stats.topics is not None:
        state.stats.topics.add(route.raw, len(publish.payload))
    if not may_write(connection, route):
        if not take_command(state, connection, session, publish, route):
            _refuse(state, connection, session, publish, reasons.NOT_AUTHORIZED)
        return
    if route.version != state.route_version:
        resolved(state, route)
    qos = publish.qos
    tracer = state.tracer
    if tracer is not None:
        publish.properties = tracer.begin(
            route.topic, publish.properties, session.client_id, qos, len(publish.payload)
        )
    if qos == 0:
        state.stats.publish_qos0_received += 1
        _publish_qos0(state, connection, session, publish, route)
        if tracer is not None and tracer.span is not None:
            tracer.end(tracer.span, -1, -1, "")
        return
    # [MQTT-3.3.4-7] [MQTT-3.3.4-8]
    connection.unacknowledged += 1
    if connection.unacknowledged > state.config.receive_maximum and version >= 5:
        raise ProtocolViolation(
            reasons.RECEIVE_MAXIMUM_EXCEEDED,
            f"more than {state.config.receive_maximum} publishes without acknowledgement",
        )
    record = Record(
        route.partition,
        log_record.MESSAGE,
        qos | log_record.FLAG_RETAIN if publish.retain else qos,
        state.wall_us,
        publish.topic,
        session.key,
        publish.properties,
        publish.payload,
    )
    if qos == 2:
        state.stats.publish_qos2_received += 1
        if _is_repeated(state, connection, session, publish.packet_id):
            return
        if connection.numbers_qos2 and _is_replied(state, connection, session, publish, record):
            return
        if session.expiry_s > 0 and not record.flags & log_record.FLAG_PRODUCER:
            _identify(session, publish.packet_id, record)
    else:
        state.stats.publish_qos1_received += 1
        if publish.properties and _is_replied(state, connection, session, publish, record):
            return
    _store(state, connection, session, publish, record, route)


def _checked_route(state: NodeState, connection: Connection, publish: Publish) -> Route:
    """The route of a PUBLISH, after the checks that need no rights. A violation closes the
    connection."""
    if publish.topic_alias or not publish.topic:
        _resolve_alias(state, connection, publish)
    if connection.mount:
        publish.topic = connection.mount + publish.topic
    route = state.routes.get(publish.topic)
    if route is None:
        try:
            route = look_up(state, publish.topic)
        except InvalidTopic as error:
            # [MQTT-3.3.2-2] no wildcards, [MQTT-4.7.3-1] not empty
            raise ProtocolViolation(reasons.TOPIC_NAME_INVALID, str(error)) from None
    if publish.qos > state.config.qos_max:
        # [MQTT-3.2.2-11]
        raise ProtocolViolation(
            reasons.QOS_NOT_SUPPORTED,
            f"QoS {publish.qos}, the maximum here is {state.config.qos_max}",
        )
    if publish.retain and not state.config.retain_available:
        # [MQTT-3.2.2-14]
        raise ProtocolViolation(reasons.RETAIN_NOT_SUPPORTED, "retained messages are switched off")
    return route


def _is_repeated(
    state: NodeState, connection: Connection, session: Session, packet_id: int
) -> bool:
    """Whether a QoS 2 message was received and not released yet. It is then acknowledged again, and
    not published again. [MQTT-4.3.3-10]"""
    if session.inbound is None or packet_id not in session.inbound:
        return False
    state.stats.duplicates_received += 1
    connection.unacknowledged -= 1
    reply = encode_ack(PUBREC, packet_id, reasons.SUCCESS, connection.version)
    state.promise(ReplyPromise(connection, reply, False))
    return True


def _identify(session: Session, packet_id: int, record: Record) -> None:
    record.flags |= log_record.FLAG_PACKET_ID
    record.sequence = packet_id
    # The batches of a write group are not in the order of their records. Without the epoch,
    # recovery could take the message of an ended session for one of the next session. That
    # session's new message with the same packet id would be acknowledged and not stored.
    record.producer_epoch = session.epoch


def _is_replied(
    state: NodeState, connection: Connection, session: Session, publish: Publish, record: Record
) -> bool:
    """Whether the producer's number of the message says that it must not be stored. It is then
    answered here. Otherwise the record gets the number."""
    at = publish.properties.find(PROPERTY_HEAD)
    if at < 0:
        return False
    sequencer = sequencer_of(connection)
    if state.cluster.is_single:
        outcome = admit(state, connection, sequencer, record.partition, publish, at)
    else:
        outcome = read_sequence(state, connection, sequencer, record.partition, publish, at)
    if outcome == REPLY:
        _reply_sequenced(state, connection, session, publish, record.partition, sequencer)
        return True
    if outcome == STORE:
        record.flags |= log_record.FLAG_PRODUCER
        record.producer = sequencer.producer_id
        record.producer_epoch = sequencer.epoch
        record.sequence = sequencer.sequence
    return False


def _store(
    state: NodeState,
    connection: Connection,
    session: Session,
    publish: Publish,
    record: Record,
    route: Route,
) -> None:
    """Append the record and promise its acknowledgement, or refuse the message. A cluster sends the
    record to its leader. Delivery and the retained update follow when it comes back committed."""
    text = "" if connection.meter is None else refusal_of(connection)
    if not text:
        text = state.cluster.refusal(connection, record)
    if text:
        _refuse(state, connection, session, publish, reasons.QUOTA_EXCEEDED, text)
        return
    is_repeated = False
    if publish.qos == 2:
        # Before the record is committed: a repetition that arrives meanwhile must not be stored.
        _note_inbound(session, publish.packet_id, record.partition)
        is_repeated = publish.dup
    here = route if state.cluster.is_single else None
    promise = PublishPromise(record, here, connection, publish.packet_id, is_repeated)
    tracer = state.tracer
    if tracer is not None and tracer.span is not None:
        promise = TracedPromise(
            record, here, connection, publish.packet_id, is_repeated, tracer.span
        )
    state.publish(record, promise)
    if state.admission.observer is not None:
        _observe(state.admission.observer, connection, publish, route)


def _observe(
    observer: ClientObserver, connection: Connection, publish: Publish, route: Route
) -> None:
    if observer.observes_messages:
        observer.published(connection, route.topic, publish.payload, publish.qos, publish.retain)


def _note_inbound(session: Session, packet_id: int, partition: int) -> None:
    """Note the packet id of a QoS 2 message until its PUBREL."""
    if session.inbound is None:
        session.inbound = {}
    session.inbound[packet_id] = partition


def _publish_qos0(
    state: NodeState, connection: Connection, session: Session, publish: Publish, route: Route
) -> None:
    """Deliver a QoS 0 message at once. It is logged only if the configuration says so, or if it is
    retained."""
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
    is_plain = reader.first == 0x30 and not publish.properties and not publish.topic_alias
    # Receivers of the same version get such a message unchanged, so its bytes are kept for them.
    if is_plain and not connection.mount:
        message.adopt_frame(connection.version, reader.buffer[reader.begin : reader.end])
    deliver(state, route, message)
    state.cluster.spread(message, route.topic)
    if state.admission.observer is not None:
        _observe(state.admission.observer, connection, publish, route)
    if route.logged or publish.retain:
        if not state.disk_full:
            log_qos0(state, message, route)
        elif publish.retain and state.cluster.is_single:
            retain_at_once(state, route, message, None)


def log_qos0(state: NodeState, message: Message, route: Route) -> None:
    """Append a QoS 0 message: as a message if the configuration says so, otherwise only as a
    retained update."""
    message.partition = route.partition
    record = Record(
        route.partition,
        log_record.MESSAGE if route.logged else log_record.RETAINED,
        flags=log_record.FLAG_RETAIN if message.retain else 0,
        timestamp_us=message.timestamp_us,
        topic=message.topic,
        client_id=message.publisher,
        properties=message.properties,
        payload=message.payload,
    )
    if message.retain and state.cluster.is_single:
        retain_at_once(state, route, message, record)
    else:
        message.offset = state.append(record)


def _resolve_alias(state: NodeState, connection: Connection, publish: Publish) -> None:
    """Replace a topic alias by its topic, or set it. An alias lasts as long as its connection."""
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
        aliases = AliasesIn()
        connection.aliases_in = aliases
    if publish.topic:
        if not aliases.set(alias, publish.topic):
            raise ProtocolViolation(
                reasons.QUOTA_EXCEEDED,
                f"topic aliases for more than {ALIASES_IN_BYTES_MAX} bytes of topics",
            )
        return
    topic = aliases.topics.get(alias)
    if topic is None:
        raise ProtocolViolation(
            reasons.PROTOCOL_ERROR, f"topic alias {alias} was not set on this connection"
        )
    publish.topic = topic


def _refuse(
    state: NodeState,
    connection: Connection,
    session: Session,
    publish: Publish,
    reason: int,
    text: str = "",
) -> None:
    """Refuse a message; `text` is the reason.

    MQTT 5 has a reason code for that. MQTT 3 has no negative acknowledgement: an unauthorised
    message is acknowledged and dropped [MQTT3-3.3.5-2]. One that could not be stored closes the
    connection, so that the client keeps it.
    """
    if reason == reasons.NOT_AUTHORIZED:
        state.stats.authorizations_denied += 1
        note_publish_denied(state, connection, publish.topic, text)
    if publish.qos == 0:
        return
    is_repeated = not state.cluster.is_single and publish.qos == 2 and publish.dup
    if is_repeated and reason == reasons.QUOTA_EXCEEDED:
        # See PublishPromise.
        raise MessageRefused(reason, f"the message could not be stored: {text}")
    if connection.version < 5:
        if reason != reasons.NOT_AUTHORIZED:
            raise MessageRefused(reason, f"the message could not be stored: {text}")
        reason = reasons.SUCCESS
    counted = reason == reasons.QUOTA_EXCEEDED
    packet_type = acknowledgement(publish.qos)
    reply = encode_refusal(connection, packet_type, publish.packet_id, reason, text)
    # Behind earlier acknowledgements of this client. [MQTT-4.6.0-2] [MQTT-4.6.0-3]
    if counted:
        state.promise(RefusalPromise(connection, reply))
    else:
        state.promise(ReplyPromise(connection, reply, False))


def _reply_sequenced(
    state: NodeState,
    connection: Connection,
    session: Session,
    publish: Publish,
    partition: int,
    sequencer: Sequencer,
) -> None:
    """PUBACK or PUBREC for a message that is not stored: refused, or stored before. The latter is a
    promise: the record may still be on its way to the disk, so it waits for all records."""
    reason = sequencer.reason
    if reason == reasons.NOT_AUTHORIZED:
        note_publish_denied(state, connection, publish.topic, sequencer.text)
    packet_type = acknowledgement(publish.qos)
    is_open = publish.qos == 2 and reason < 0x80
    if is_open:
        # The PUBREL of the message is still to come.
        _note_inbound(session, publish.packet_id, partition)
    reply = encode_refusal(connection, packet_type, publish.packet_id, reason, sequencer.text)
    state.promise(ReplyPromise(connection, reply, not is_open))


def handle_pubrel(
    state: NodeState, connection: Connection, session: Session, packet_id: int
) -> None:
    """Free the packet id of a QoS 2 message that the publisher has released. The log must contain
    that before PUBCOMP is sent. [MQTT-4.3.3-11] [MQTT-4.3.3-12]"""
    inbound = session.inbound
    partition = -1
    if inbound is not None:
        partition = inbound.pop(packet_id, -1)
    reason = reasons.SUCCESS
    if partition < 0 and connection.version >= 5:
        reason = reasons.PACKET_IDENTIFIER_NOT_FOUND
    reply = encode_ack(PUBCOMP, packet_id, reason, connection.version)
    promise = ReplyPromise(connection, reply, partition >= 0)
    if partition < 0 or session.expiry_s == 0:
        state.promise(promise)
        return
    record = Record(
        partition,
        log_record.RELEASE,
        timestamp_us=state.wall_us,
        client_id=session.key,
        producer_epoch=session.epoch,
        sequence=packet_id,
    )
    state.publish(record, promise)
