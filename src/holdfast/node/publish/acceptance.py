"""Accepts or refuses inbound QoS 1 and 2 messages: detects repetitions, encodes refusals."""

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.admission.throttle import refusal_of
from holdfast.node.connections.client_notes import note_publish_denied
from holdfast.node.node_state import NodeState, ReplyPromise
from holdfast.node.publish.completion import RefusalPromise, acknowledgement, encode_refusal
from holdfast.node.publish.producer_dedup import REPLY, STORE, admit, sequencer_of
from holdfast.node.publish.producers import PROPERTY_HEAD
from holdfast.node.refusal import Rejection
from holdfast.node.session.connection import Connection
from holdfast.node.session.session import Session
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode_ack
from holdfast.protocol.mqtt.errors import MessageRefused, ProtocolViolation
from holdfast.protocol.mqtt.packets import PUBREC
from holdfast.protocol.mqtt.publish import Publish


def is_repeated(
    state: NodeState, connection: Connection, session: Session, publish: Publish, partition: int
) -> bool:
    """Whether a QoS 2 message was received and not released yet. It is then acknowledged again, and
    not published again. [MQTT-4.3.3-10]"""
    packet_id = publish.packet_id
    if session.inbound is None or packet_id not in session.inbound:
        return False
    if not session.is_doubtful(packet_id):
        connection.note_acknowledged()
    elif not publish.dup or session.inbound[packet_id] != partition:
        # The client has released the id since the copy was made. The record comes before that of
        # the new message, whose sender may repeat it with DUP 1.
        release(state, session, packet_id, ReplyPromise(connection, b"", False))
        return False
    else:
        # The leader decides: the log may have a later message with the id, not committed yet.
        return False
    state.stats.duplicates_received += 1
    reply = encode_ack(PUBREC, packet_id, reasons.SUCCESS, connection.version)
    state.promise(ReplyPromise(connection, reply, False))
    return True


def accept(
    state: NodeState,
    connection: Connection,
    session: Session,
    publish: Publish,
    record: Record,
    refusal: Rejection | None,
) -> bool:
    """Takes the steps of each inbound message of QoS 1 or 2 before it is stored. False: it must not
    be stored, and has its reply.

    `refusal`: the reason why no new message is stored, beside the rates and the state of the
    cluster. A repetition of a stored message is acknowledged all the same. Later messages of a
    refused one's producer are refused, too: one that is stored would make it a repetition.
    """
    # [MQTT-3.3.4-7] [MQTT-3.3.4-8]
    connection.unacknowledged += 1
    if connection.unacknowledged > state.config.receive_maximum and connection.version >= 5:
        text = f"more than {state.config.receive_maximum} publishes without acknowledgement"
        raise ProtocolViolation(reasons.RECEIVE_MAXIMUM_EXCEEDED, text)
    is_numbered = True
    if publish.qos == 2:
        state.stats.publish_qos2_received += 1
        if is_repeated(state, connection, session, publish, record.partition):
            return False
        is_numbered = connection.numbers_qos2
    else:
        state.stats.publish_qos1_received += 1
    if refusal is None and connection.meter is not None:
        refusal = refusal_of(connection)
    if (
        is_numbered
        and publish.properties
        and _is_replied(state, connection, session, publish, record, refusal)
    ):
        return False
    if refusal is None:
        refusal = state.cluster.refusal(connection, record)
    if refusal is not None:
        refuse(state, connection, publish, refusal)
        return False
    if publish.qos == 2:
        if session.expiry_s > 0 and not record.flags & log_record.FLAG_PRODUCER:
            _identify(session, publish.packet_id, record)
        # Before the record is committed: a repetition that arrives meanwhile must not be stored.
        session.hold_inbound(publish.packet_id, record.partition)
    return True


def _identify(session: Session, packet_id: int, record: Record) -> None:
    record.flags |= log_record.FLAG_PACKET_ID
    record.sequence = packet_id
    # The batches of a write group are not in the order of their records. Without the epoch,
    # recovery could take the message of an ended session for one of the next session. That
    # session's new message with the same packet id would be acknowledged and not stored.
    record.producer_epoch = session.epoch
    if session.life:
        record.producer = b"%d" % session.life


def _is_replied(
    state: NodeState,
    connection: Connection,
    session: Session,
    publish: Publish,
    record: Record,
    refusal: Rejection | None,
) -> bool:
    """Whether the producer's number of the message says that it must not be stored. It is then
    answered here. Otherwise the record gets the number."""
    at = publish.properties.find(PROPERTY_HEAD)
    if at < 0:
        return False
    sequencer = sequencer_of(connection)
    outcome = admit(state, connection, sequencer, record.partition, publish, at, refusal)
    if outcome == REPLY:
        _reply_sequenced(state, connection, session, publish, record.partition, sequencer.refusal)
        return True
    if outcome == STORE:
        record.flags |= log_record.FLAG_PRODUCER
        record.producer = sequencer.producer_id
        record.producer_epoch = sequencer.epoch
        record.sequence = sequencer.sequence
    return False


def release(state: NodeState, session: Session, packet_id: int, promise: ReplyPromise) -> None:
    """Frees the packet id of a QoS 2 message. `promise`: released when that is durable."""
    partition = -1
    if session.inbound is not None:
        partition = session.inbound.pop(packet_id, -1)
    if session.rare.doubtful is not None:
        session.rare.doubtful.discard(packet_id)
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


def refuse(state: NodeState, connection: Connection, publish: Publish, refusal: Rejection) -> None:
    """Refuses a message.

    MQTT 5 has a reason code for that. MQTT 3 has no negative acknowledgement: an unauthorised
    message is acknowledged and dropped [MQTT3-3.3.5-2]. One that could not be stored closes the
    connection, so that the client keeps it.
    """
    reason, text = refusal.reason, refusal.text
    is_for_now = refusal.is_for_now
    is_quota = reason == reasons.QUOTA_EXCEEDED
    if reason == reasons.NOT_AUTHORIZED:
        state.stats.authorizations_denied += 1
    if not is_quota:
        note_publish_denied(state, connection, publish.topic, text)
    if publish.qos == 0:
        return
    if is_for_now and (connection.version < 5 or (publish.qos == 2 and publish.dup)):
        # See PublishPromise.
        raise MessageRefused(reason, f"the message could not be stored: {text}")
    packet_type = acknowledgement(publish.qos)
    reply = encode_refusal(connection, packet_type, publish.packet_id, refusal)
    # Behind earlier acknowledgements of this client. [MQTT-4.6.0-2] [MQTT-4.6.0-3]
    if is_for_now:
        state.promise(RefusalPromise(connection, reply))
    else:
        # `accept` has counted a message that lacks room.
        state.promise(ReplyPromise(connection, reply, is_quota))


def _reply_sequenced(
    state: NodeState,
    connection: Connection,
    session: Session,
    publish: Publish,
    partition: int,
    refusal: Rejection | None,
) -> None:
    """PUBACK or PUBREC for a message that is not stored: refused, or stored before. The latter is a
    promise: the record may still be on its way to the disk, so it waits for all records."""
    if refusal is not None and refusal.reason == reasons.NOT_AUTHORIZED:
        note_publish_denied(state, connection, publish.topic, refusal.text)
    is_open = publish.qos == 2 and refusal is None
    if is_open:
        # The PUBREL of the message is still to come.
        session.hold_inbound(publish.packet_id, partition)
    packet_type = acknowledgement(publish.qos)
    reply = encode_refusal(connection, packet_type, publish.packet_id, refusal)
    state.promise(ReplyPromise(connection, reply, not is_open))
