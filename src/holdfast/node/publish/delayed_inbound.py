"""Inbound delayed messages: the checks of a PUBLISH to `$delayed/SECONDS/TOPIC`, and its record.

The client's packet id, or its number as a producer, is in the record as in that of any message. So
a repetition is recognised in the same way, across restarts and nodes, before and after the message
is due.
"""

from holdfast.log import record as log_record
from holdfast.log.record import Record
from holdfast.node.admission.throttle import refusal_of
from holdfast.node.node_state import NodeState
from holdfast.node.publish.acceptance import (
    identify,
    is_repeated,
    is_replied,
    refuse,
)
from holdfast.node.publish.completion import PublishPromise
from holdfast.node.publish.delayed import (
    delayed_record,
    delayed_refusal,
    delayed_route,
)
from holdfast.node.publish.delayed_table import InvalidDelay
from holdfast.node.rights import may_write
from holdfast.node.session.connection import Connection
from holdfast.node.session.session import Session
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.errors import ProtocolViolation
from holdfast.protocol.mqtt.publish import Publish
from holdfast.protocol.topics.names import InvalidTopic


def publish_delayed(
    state: NodeState, connection: Connection, session: Session, publish: Publish
) -> None:
    """Stores a message to `$delayed/SECONDS/TOPIC`, or refuses it. PUBACK follows when it is
    durable, not when it is due."""
    try:
        route = delayed_route(state, publish)
        record = delayed_record(state, connection, session, publish, route)
    except (InvalidDelay, InvalidTopic) as error:
        refuse(state, connection, session, publish, reasons.TOPIC_NAME_INVALID, str(error))
        return
    if not may_write(connection, route):
        refuse(state, connection, session, publish, reasons.NOT_AUTHORIZED)
        return
    if publish.qos == 0:
        state.stats.publish_qos0_received += 1
        if delayed_refusal(state, record) or state.disk_full:
            state.stats.refused_quota += 1
        else:
            state.append(record)
        return
    connection.unacknowledged += 1
    if connection.unacknowledged > state.config.receive_maximum and connection.version >= 5:
        text = f"more than {state.config.receive_maximum} publishes without acknowledgement"
        raise ProtocolViolation(reasons.RECEIVE_MAXIMUM_EXCEEDED, text)
    if publish.qos == 2:
        state.stats.publish_qos2_received += 1
        if is_repeated(state, connection, session, publish, record.partition):
            return
    else:
        state.stats.publish_qos1_received += 1
    text = delayed_refusal(state, record)
    is_numbered = publish.qos == 1 or connection.numbers_qos2
    if is_numbered and is_replied(state, connection, session, publish, record, text):
        return
    if publish.qos == 2 and session.expiry_s > 0 and not record.flags & log_record.FLAG_PRODUCER:
        identify(session, publish.packet_id, record)
    _store_delayed(state, connection, session, publish, record, text)


def _store_delayed(
    state: NodeState,
    connection: Connection,
    session: Session,
    publish: Publish,
    record: Record,
    text: str,
) -> None:
    """Appends the record, or refuses the message. `text`: the reason of a refusal, or ""."""
    if text:
        state.stats.refused_quota += 1
    else:
        # That of a rate is counted already.
        text = refusal_of(connection) or state.cluster.refusal(connection, record)
    if text:
        refuse(state, connection, session, publish, reasons.QUOTA_EXCEEDED, text)
        return
    may_be_known = False
    if publish.qos == 2:
        # Before the record is committed: a repetition that arrives meanwhile must not be stored.
        session.hold_inbound(publish.packet_id, record.partition)
        may_be_known = publish.dup
    state.publish(record, PublishPromise(record, connection, publish.packet_id, may_be_known))
