"""Wills: messages that clients leave for the case that their connection ends without DISCONNECT.

A will is published once, by the session's epoch: its record, or a WILL record, says that the will
of this epoch is done. Counter-example without the epoch: the client is back and ends again,
recovery reads the first will's record, and takes the second one for done.

The rights are those of the moment of publication, because rules may have changed since CONNECT.
"""

from holdfast.log import record as log_record
from holdfast.log.partition import partition_of
from holdfast.log.record import Record
from holdfast.node.delivery.delivery import deliver
from holdfast.node.node_state import NodeState, Route
from holdfast.node.publish.completion import follow_qos0
from holdfast.node.publish.inbound import log_qos0
from holdfast.node.rights import may_publish_will
from holdfast.node.routing.routing import find_route
from holdfast.node.session.message import Message
from holdfast.node.session.session import Session
from holdfast.node.session.will import Will
from holdfast.protocol.topics.names import InvalidTopic


def publish_will(state: NodeState, session: Session, will: Will) -> None:
    """Publishes a session's will and records that it is done, in one record. [MQTT-3.1.2-8] With
    two records a crash between them would publish it again."""
    try:
        route = find_route(state, will.topic)
    except InvalidTopic:
        return
    if not may_publish_will(state, session, route.topic):
        # The rules have changed since the client connected.
        state.stats.wills_denied += 1
        fields: dict[str, object] = {
            "client": session.client_id,
            "user": session.username or "",
            "topic": route.topic,
        }
        state.note("warning", "will_denied", fields)
        _log_done(state, session)
        return
    state.stats.wills_published += 1
    qos = min(will.qos, state.config.qos_max)
    retain = will.retain and state.config.retain_available
    if qos == 0:
        _publish_qos0(state, session, will, retain, route)
        return
    record = Record(
        route.partition,
        log_record.MESSAGE,
        flags=qos | log_record.FLAG_WILL | (log_record.FLAG_RETAIN if retain else 0),
        timestamp_us=state.wall_us,
        topic=will.topic,
        client_id=session.key,
        sequence=session.epoch,
        properties=will.properties,
        payload=will.payload,
    )
    # The message is delivered when it comes back committed, on every node.
    state.append(record)


def _publish_qos0(
    state: NodeState, session: Session, will: Will, retain: bool, route: Route
) -> None:
    """Publishes a will at QoS 0. Its WILL record follows, because the message itself may be in no
    log."""
    message = Message(
        will.topic,
        will.payload,
        0,
        retain,
        will.properties,
        will.expiry_s,
        state.wall_us,
        session.key,
    )
    if route.newest is not None:
        follow_qos0(state, route, message, route.newest)
        _log_done(state, session)
        return
    if route.logged:
        # It is appended below, even on a full disk.
        message.partition = route.partition
    deliver(state, route, message)
    message.partition = -1
    state.cluster.spread(message, route.topic, route.behind)
    if route.logged or message.retain:
        log_qos0(state, message, route)
    _log_done(state, session)


def _log_done(state: NodeState, session: Session) -> None:
    """Appends that the will is done, so that a restart does not publish it again."""
    if session.recorded:
        state.append(
            Record(
                partition_of(session.key, state.config.partitions),
                log_record.WILL,
                timestamp_us=state.wall_us,
                client_id=session.key,
                sequence=session.epoch,
            )
        )
